"""Signatures of a plan, of a run's folder or of a release: who saw what, detached, by Ed25519. No torch in here.

    plan.json.3fa1b2c4.sig    beside the plan, in JSON; 3fa1b2c4 begins the fingerprint of the key
    runs/first/run.3fa1b2c4.sig
    release/release.3fa1b2c4.sig

{"document": "epsilons signature", "schema": 1, "of": "plan", "name": "A. Meyer", "role": "data protection officer",
 "date": "2030-01-31T09:00:00Z", "files": {"plan.json": SHA-256}, "digest": SHA-256 of the lines "SHA-256  NAME", by
 name, as `sha256sum` prints them, "plan": the plan's own digest, or null, "public_key": base64, "signature": base64}

The signature is over all values but itself, as JSON with sorted keys, in ASCII. The key is proven, and name and role
are what its holder wrote. A run is signed by EVIDENCE: reports and signatures are not in it, since they change without
it. A release is signed by every file.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..core import files
from ..errors import EpsilonsWarning, InputError, PromiseError, RunError, parsed_json
from ..planning import Plan
from . import model_file
from .account import read_account
from .run_folder import RunFolder, now

#: The files of a run that a signature covers, as far as they exist.
EVIDENCE = (
    *("plan.json", "run.json", "ledger.jsonl", "metrics.jsonl", "audit.json", "membership.json"),
    *("model.json", "model.safetensors", "features.safetensors"),
)
SUFFIX = ".sig"
CHANGED, OTHER = "was changed after it was signed, or is damaged", "this is another plan"


@dataclass(frozen=True)
class Signature:
    """A signature, as it was checked. wrong: what does not fit; None if all does. Without values it is damaged."""

    file: Path
    values: Mapping[str, Any]
    wrong: str | None = None

    def __str__(self) -> str:
        return self.in_words(f"{str(self.values.get('date')).replace('T', ' ')[:16]} UTC")

    def in_words(self, when: str) -> str:
        """Who signed, in words. when: the time or the day to name"""
        if not self.values:
            return f"{self.file.name} {self.wrong}"
        name, role, of, key = (self.values[one] for one in ("name", "role", "of", "public_key"))
        now_is = f"NOT VALID, {self.wrong}" if self.wrong else "valid"
        return f"{name} ({role}) signed the {of} on {when} with the key {fingerprint(key)}: {now_is}"


class Seen(NamedTuple):
    """What is signed: a plan, run or release; how names of its signatures begin; name -> SHA-256 of its files."""

    of: str
    beside: Path
    files: dict[str, str]


def seen(path: Path) -> Seen:
    """The files of a plan, a run or a release. Raises RunError for anything else, and for unreadable files."""
    path = path / "plan.json" if (path / "slots").is_dir() else path  # of a plan for several runs
    if path.is_file():
        return Seen("plan", path, {"plan.json": files.sha256_of(path)})
    if model_file.is_release(path):
        found = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
        names = [file.relative_to(path).as_posix() for file in found if file.parent != path or file.suffix != SUFFIX]
        return Seen("release", path / "release", {name: files.sha256_of(path / name) for name in names})
    if not RunFolder(path).ledger.is_file():
        raise RunError(f"{path} is no plan, run or release. Give plan.json, the folder of a run, or its release.")
    return Seen("run", path / "run", {n: files.sha256_of(path / n) for n in EVIDENCE if (path / n).exists()})


def sign(path: Path, key: Path, name: str, role: str) -> Signature:
    """Sign what is there, and write the signature beside it. An older one with this key that does not fit is replaced.

    Raises RunError for a run that is not finished, and where one with this key fits, InputError for a key that is none,
    and what reading a plan, a ledger and a release raises.
    """
    what, run = seen(path), RunFolder(path)
    plan = None if what.of == "release" else Plan.load(run.plan if what.of == "run" else what.beside)
    if plan is None:
        model_file.check_sums(path)
    elif what.of == "run":
        read_account(run.ledger, plan)
        if run.key.exists():
            raise RunError(f"The run in {path} is not finished, and its files would change. Sign it when it is.")
    own, public = private_key(key)
    digest = hashlib.sha256("".join(f"{what.files[n]}  {n}\n" for n in sorted(what.files)).encode()).hexdigest()
    values = {"document": "epsilons signature", "schema": 1, "of": what.of, "name": name, "role": role, "date": now()}
    values |= {"files": what.files, "digest": digest, "plan": plan and plan.digest, "public_key": public}
    values["signature"] = as_text(own.sign(body(values)))
    file = what.beside.with_name(f"{what.beside.name}.{fingerprint(public)[:8]}{SUFFIX}")
    if file.exists() and not _read(file, what).wrong:
        raise RunError(
            f"{path} is signed with this key: {file.name}. Sign with another key, or remove that file first."
        )
    return Signature(files.write_json(file, values, release=plan is None), values)


def signatures(path: Path) -> tuple[Signature, ...]:
    """The signatures of what is there, checked. Raises what `seen` raises."""
    what = seen(path)
    beside = sorted(what.beside.parent.glob(f"*{SUFFIX}"))
    return tuple(_read(file, what) for file in beside if file.name[: -len(SUFFIX) - 9] == what.beside.name)


def check_unsigned(plan: Path) -> None:
    """Raise RunError if there are signatures of a plan in this file."""
    if signed := sorted(plan.parent.glob(f"{glob.escape(plan.name)}.????????{SUFFIX}")):
        raise RunError(f"{plan} is signed ({signed[0].name}). Save under another name, or remove the signatures first.")


def of_run(run: RunFolder, plan: Plan) -> tuple[Signature, ...]:
    """The signatures that a run's plan had when the run began, from run.json, checked against the plan."""
    metadata = run.read_settings().get("metadata")
    records = metadata.get("signatures") if isinstance(metadata, dict) else None
    found = [_checked(run.settings, one) for one in records] if isinstance(records, list) else []
    same = {"of": "plan", "plan": plan.digest}
    return tuple(
        one if one.wrong or {**one.values, **same} == one.values else replace(one, wrong=OTHER) for one in found
    )


def before(path: Path) -> tuple[Signature, ...]:
    """The same for the folder of a run; empty for anything else."""
    run = RunFolder(path)
    return of_run(run, Plan.load(run.plan)) if run.settings.is_file() else ()


def is_signed(run: Path) -> bool:
    """True if there is a signature of the run in this folder, whether it fits or not."""
    return any(run.glob(f"run.*{SUFFIX}"))


def warn_of_change(run: Path, file: str) -> None:
    """Warn that a signature of a run will not fit any more, because this file will be written into it."""
    if is_signed(run):
        warnings.warn(
            f"{run} is signed, and {file} will be new in it: its signatures will not fit any more, and reports of it "
            "are refused. Stop here, and work on a copy of the folder; or have the run signed again afterwards.",
            EpsilonsWarning,
            stacklevel=3,
        )


def check_signed(given: Sequence[Signature], wanted: Sequence[str], what: object) -> None:
    """Raise PromiseError if a signature does not fit, or one of these keys or fingerprints signed nothing."""
    if wrong := [one for one in given if one.wrong]:
        raise PromiseError(f"{what}: {wrong[0]}. Restore what was signed, or have it signed again.")
    keys = {one.values["public_key"] for one in given}
    if missing := [key for key in wanted if key not in keys | set(map(fingerprint, keys))]:
        raise PromiseError(f"{what} is not signed with the key {missing[0]}. Its holder signs with: epsilons sign")


def _read(file: Path, what: Seen) -> Signature:
    """A signature, compared with what is there."""
    found = _checked(file, files.read(file))
    if found.wrong or (found.values["of"], found.values["files"]) == (what.of, what.files):
        return found
    signed = found.values["files"]
    first = min((n for n in {*signed, *what.files} if signed.get(n) != what.files.get(n)), default=what.beside.name)
    shown = what.beside.name if what.of == "plan" else first
    verb = "is new" if first not in signed else "was changed" if first in what.files else "is missing"
    return replace(found, wrong=f"{shown} {verb} since")


def _checked(file: Path, values: Any) -> Signature:
    """A signature, compared with its key."""
    try:
        values = parsed_json(values) if isinstance(values, bytes) else values
        verify(values["public_key"], values["signature"], body(values))
        are_texts = all(isinstance(values[name], str) for name in ("of", "name", "role", "date"))
        if values["document"] != "epsilons signature" or not (are_texts and isinstance(values["files"], dict)):
            raise ValueError
        return Signature(file, {"plan": None, **values})
    except (KeyError, TypeError, ValueError, AttributeError):
        return Signature(file, {}, CHANGED)


# -- Ed25519: keys in PEM, signatures of JSON values, as text


def new_key(path: Path) -> str:
    """Make a private key in a new file, readable by its owner alone, and return its public key. Raises InputError."""
    form = pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
    try:
        files.create(path, Ed25519PrivateKey.generate().private_bytes(*form))
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror or error}. A key needs a new file.") from None
    return private_key(path)[1]


def private_key(path: Path) -> tuple[Ed25519PrivateKey, str]:
    """The private key in a PEM file, and its public key as text. Raises InputError."""
    try:
        key = pem.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(
            f"{path} must be a private Ed25519 key in PEM without a password, as openssl genpkey -algorithm ed25519 "
            "writes it."
        )
    return key, as_text(key.public_key().public_bytes_raw())


def signer(given: str) -> str:
    """A public key or a fingerprint as it is; of the PEM file of a public key, that key as text. Raises InputError."""
    if re.fullmatch(r"[A-Za-z0-9+/]{43}=|[0-9a-f]{32}", given):
        return given
    path = Path(given)
    try:
        key: Any = pem.load_pem_public_key(path.read_bytes())
        return as_text(key.public_bytes_raw())
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}."
    except Exception:  # a file that holds none raises many things
        why = f"{path} holds no public Ed25519 key in PEM."
    raise InputError(f"{why} --signer takes a public key or fingerprint, as epsilons sign --new-key prints, or a file.")


def fingerprint(public: str) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a public key."""
    return hashlib.sha256(base64.b64decode(public)).hexdigest()[:32]


def body(values: Mapping[str, Any]) -> bytes:
    """What is signed: all values but the signature, as JSON with sorted keys, in ASCII."""
    signed = {name: value for name, value in values.items() if name != "signature"}
    return json.dumps(signed, sort_keys=True, ensure_ascii=True).encode()


def verify(public: str, signature: str, signed: bytes) -> None:
    """Raise ValueError unless it is this key's signature. Of several spellings of base64, one counts."""
    key, value = (base64.b64decode(text, validate=True) for text in (public, signature))
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(value, signed)
    except InvalidSignature:
        value = b""
    if (as_text(key), as_text(value)) != (public, signature):
        raise ValueError("no signature of this key")


def as_text(value: bytes) -> str:
    """Bytes in base64."""
    return base64.b64encode(value).decode()
