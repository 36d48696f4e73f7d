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
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core import files
from ..errors import InputError, PromiseError, RunError, parsed_json
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
_TEXTS = ("of", "name", "role", "date", "digest", "public_key")
CHANGED = "was changed after it was signed, or is damaged"


@dataclass(frozen=True)
class Signature:
    """A signature, as it was checked. plan: the digest of the plan. wrong: what does not fit; None if all does."""

    file: Path
    values: Mapping[str, Any]
    wrong: str | None

    @property
    def plan(self) -> str | None:
        """The digest of the signed plan, or of the run's; None for a release."""
        return self.values.get("plan")

    @property
    def keys(self) -> set[str]:
        """The public key, and its fingerprint."""
        key = self.values.get("public_key", "")
        return {key, fingerprint(key)} if key else set()

    def __str__(self) -> str:
        if not self.values:
            return f"{self.file.name}: {self.wrong}"
        name, role, date, key = (self.values[one] for one in ("name", "role", "date", "public_key"))
        told = f"{name} ({role}) signed the {self.values['of']} on {date[:10]} with the key {fingerprint(key)}"
        return told + (f", and {self.wrong}" if self.wrong else "")


@dataclass(frozen=True)
class Seen:
    """What is signed: a plan, run or release; how names of its signatures begin; name -> SHA-256 of its files."""

    of: str
    beside: Path
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of all names and hashes."""
        return hashlib.sha256("".join(f"{self.files[n]}  {n}\n" for n in sorted(self.files)).encode()).hexdigest()


def seen(path: Path) -> Seen:
    """The files of a plan, a run or a release. Raises RunError for anything else, and what `files.sha256_of` raises."""
    if (path / "slots").is_dir():  # the folder of a plan for several runs
        path = path / "plan.json"
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
    """Sign what is there, and write the signature beside it. An earlier signature with this key is replaced.

    Raises RunError for a run that is not finished, InputError for a key that is none, and what reading a plan, a ledger
    and a release raises.
    """
    what, run, plan = seen(path), RunFolder(path), None
    if what.of == "release":
        model_file.check_sums(path)
    else:
        plan = Plan.load(run.plan if what.of == "run" else what.beside)
    if what.of == "run" and plan is not None:
        read_account(run.ledger, plan)
        if run.key.exists():
            raise RunError(f"The run in {path} is not finished, and its files would change. Sign it when it is.")
    own, public = private_key(key)
    values = {"document": "epsilons signature", "schema": 1, "of": what.of, "name": name, "role": role, "date": now()}
    values |= {"files": what.files, "digest": what.digest, "plan": plan and plan.digest, "public_key": public}
    values["signature"] = as_text(own.sign(body(values)))
    file = what.beside.with_name(f"{what.beside.name}.{fingerprint(public)[:8]}{SUFFIX}")
    return Signature(files.write_json(file, values, release=what.of == "release"), values, None)


def signatures(path: Path) -> tuple[Signature, ...]:
    """The signatures of what is there, checked. Raises what `seen` raises."""
    what = seen(path)
    beside = sorted(what.beside.parent.glob(f"*{SUFFIX}"))
    return tuple(_checked(file, what) for file in beside if file.name[: -len(SUFFIX) - 9] == what.beside.name)


def check_signed(given: Sequence[Signature], wanted: Sequence[str], what: object) -> None:
    """Raise PromiseError if a signature does not fit, or one of these keys or fingerprints signed nothing."""
    if wrong := [one for one in given if one.wrong]:
        raise PromiseError(f"{what}: {wrong[0]}.")
    if missing := [key for key in wanted if not any(key in one.keys for one in given)]:
        raise PromiseError(f"{what} is not signed with the key {missing[0]}. Its holder signs with: epsilons sign")


def of_run(run: RunFolder, plan: Plan) -> tuple[Signature, ...]:
    """The signatures that a run's plan had when the run began, from run.json, checked against the plan."""
    metadata = run.read_settings().get("metadata")
    records = metadata.get("signatures") if isinstance(metadata, dict) else None
    found = [_parsed(run.settings, one) for one in records] if isinstance(records, list) else []
    other = "this is another plan"
    return tuple(one if one.wrong or one.plan == plan.digest else replace(one, wrong=other) for one in found)


def _checked(file: Path, what: Seen) -> Signature:
    try:
        found = _parsed(file, parsed_json(files.read(file)))
    except ValueError:
        return Signature(file, {}, CHANGED)
    signed = found.values.get("files", {})
    changed = sorted(name for name in {*signed, *what.files} if signed.get(name) != what.files.get(name))
    if found.wrong or (not changed and (found.values["of"], found.values["digest"]) == (what.of, what.digest)):
        return found
    first = changed[0] if changed else what.beside.name
    verb = "is new" if first not in signed else "was changed" if first in what.files else "is missing"
    return replace(found, wrong=f"{first} {verb} since")


def _parsed(file: Path, values: Any) -> Signature:
    try:
        verify(values["public_key"], values["signature"], body(values))
        if not all(isinstance(values[name], str) for name in _TEXTS) or not isinstance(values["files"], dict):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        return Signature(file, {}, CHANGED)
    return Signature(file, values, None)


# -- Ed25519: keys in PEM, signatures of JSON values, as text


def new_key(path: Path) -> str:
    """Make a private key in a new file, readable by its owner alone, and return its public key. Raises InputError."""
    serialization, ed25519 = _cryptography()
    key, encoding = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    pem = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        files.create(path, pem)
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror or error}. A key needs a new file.") from None
    return private_key(path)[1]


def private_key(path: Path) -> tuple[Any, str]:
    """The private key in a PEM file, and its public key as text. Raises InputError."""
    serialization, ed25519 = _cryptography()
    try:
        key: Any = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InputError(
            f"{path} must be a private Ed25519 key in PEM without a password, as openssl genpkey -algorithm ed25519 "
            "writes it."
        )
    return key, as_text(key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))


def public_key(path: Path) -> str:
    """The public key in a PEM file, as text. Raises OSError, and others for a file that holds none."""
    serialization, _ = _cryptography()
    key: Any = serialization.load_pem_public_key(path.read_bytes())
    return as_text(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))


def fingerprint(public: str) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a public key."""
    return hashlib.sha256(base64.b64decode(public)).hexdigest()[:32]


def body(values: Mapping[str, Any]) -> bytes:
    """What is signed: all values but the signature, as JSON with sorted keys, in ASCII."""
    signed = {name: value for name, value in values.items() if name != "signature"}
    return json.dumps(signed, sort_keys=True, ensure_ascii=True).encode()


def verify(public: str, signature: str, signed: bytes) -> None:
    """Raise ValueError unless it is this key's signature."""
    from cryptography.exceptions import InvalidSignature

    try:
        key, value = (base64.b64decode(text, validate=True) for text in (public, signature))
        if (as_text(key), as_text(value)) != (public, signature):  # base64 has several spellings of some bytes
            raise ValueError("not canonical")
        _cryptography()[1].Ed25519PublicKey.from_public_bytes(key).verify(value, signed)
    except InvalidSignature:
        raise ValueError("another signature") from None


def as_text(value: bytes) -> str:
    """Bytes in base64."""
    return base64.b64encode(value).decode()


def _cryptography() -> tuple[Any, Any]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return serialization, ed25519
