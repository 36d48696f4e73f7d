"""How many runs of this machine and user began with the same budgets, or on the same data. Internal reports say it.

Each new run in a folder adds one line to runs.jsonl in the user's state folder: $XDG_STATE_HOME/epsilons, by default
~/.local/state/epsilons (XDG Base Directory Specification 0.8). A line holds HMACs (RFC 2104, with SHA-256) under a
random secret of the same folder. Without the secret, nobody can check a guessed list of budgets against a line; equal
lists have equal HMACs. Both files have mode 0600, and no report for release depends on them.

Counting never stops a run: what fails is stated, and the run is not counted. EPSILONS_COUNT_RUNS=0 turns counting off.
Runs that overlap in some people are not found, and neither are runs of other users, machines or libraries.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .escaping import parsed_json
from .files import for_owner

#: Set to 0, this turns counting off.
VARIABLE = "EPSILONS_COUNT_RUNS"

#: What kept a run from being counted.
OFF = f"counting was turned off by {VARIABLE}=0"
UNUSABLE = "the state folder could not be used"
DAMAGED = "the secret in the state folder is damaged; remove it to begin again"
EXPOSED = "others may read the secret in the state folder; remove it to begin again"

_SECRET_BYTES = 32
#: Where the files are opened, a link or a pipe in their place is refused and never waited for.
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class _NotCountedError(Exception):
    """Why a run is not counted, in words."""


@dataclass(frozen=True)
class Count:
    """Runs of this machine and user, this one included.

    same_roster   begun with exactly this list of budgets, in this order
    same_data     of these, on exactly these data
    unreadable    lines that are damaged, or were written under another secret: any of them may be one of these runs
    """

    same_roster: int
    same_data: int
    unreadable: int


def begin(roster: Iterable[bytes], contents: str) -> dict[str, str]:
    """Count a new run, and return its entry for run.json: its tags, or {"reason": why it was not counted}.

    roster    the budgets of all records, in their order, as bytes
    contents  a fingerprint of the data
    """
    try:
        if os.environ.get(VARIABLE) == "0":
            raise _NotCountedError(OFF)
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = _secret(folder / "secret")
        tags = {
            "run": secrets.token_hex(16),
            "key": _tag(secret, "key", []),
            "roster": _tag(secret, "roster", roster),
            "data": _tag(secret, "data", [contents.encode()]),
        }
        _append(folder / "runs.jsonl", tags)
    except _NotCountedError as error:
        return {"reason": str(error)}
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home folder; ValueError: a path with a null byte
        return {"reason": UNUSABLE}
    return tags


def count(tags: Mapping[str, Any]) -> Count | None:
    """The runs with the tags that `begin` returned; None if this run was not counted here."""
    try:
        lines = [_parsed(line) for line in _read(_folder() / "runs.jsonl").split(b"\n") if line.strip()]
    except (OSError, RuntimeError, ValueError):
        return None
    known: dict[str, Mapping[str, Any]] = {line["run"]: line for line in lines if line is not None}
    if "run" not in tags or tags["run"] not in known:
        return None
    same = [line for line in known.values() if line["roster"] == tags["roster"]]
    return Count(
        same_roster=len(same),
        same_data=sum(line["data"] == tags["data"] for line in same),
        unreadable=lines.count(None) + sum(line["key"] != tags["key"] for line in known.values()),
    )


def _folder() -> Path:
    """The state folder; a relative XDG_STATE_HOME is ignored, as its specification demands."""
    stated = os.environ.get("XDG_STATE_HOME", "")
    parent = Path(stated) if os.path.isabs(stated) else Path.home() / ".local" / "state"
    return parent / "epsilons"


def _secret(path: Path) -> bytes:
    """The secret, made on first use. Of several processes that make it at once, all get the same one."""
    if not path.exists():
        unique = path.with_name(f".secret.{secrets.token_hex(8)}")
        try:
            with open(unique, "xb", opener=for_owner) as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first
                os.link(unique, path)
        finally:
            unique.unlink(missing_ok=True)
    secret = _read(path)
    if len(secret) != _SECRET_BYTES:
        raise _NotCountedError(DAMAGED)
    if os.name != "nt" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise _NotCountedError(EXPOSED)
    return secret


def _tag(secret: bytes, kind: str, parts: Iterable[bytes]) -> str:
    """An HMAC of these parts; the kind and the length of each part keep different inputs apart."""
    made = hmac.new(secret, f"epsilons {kind}\0".encode(), hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def _append(path: Path, line: Mapping[str, str]) -> None:
    """Add a line in one write, so that processes do not mix theirs. The first break ends a line that was cut off."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFUL, 0o600)
    try:
        text = f"\n{json.dumps(line)}\n".encode()
        if not stat.S_ISREG(os.fstat(handle).st_mode) or os.write(handle, text) != len(text):
            raise _NotCountedError(UNUSABLE)
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | _CAREFUL)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("not a plain file")
        return file.read()


def _parsed(line: bytes) -> Mapping[str, str] | None:
    """A line of the file; None if it is damaged."""
    try:
        values = parsed_json(line)
    except ValueError:
        return None
    names = ("run", "key", "roster", "data")
    return values if isinstance(values, dict) and all(isinstance(values.get(name), str) for name in names) else None
