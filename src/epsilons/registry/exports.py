"""Exports of a registry: its head and aggregates, to keep elsewhere, so that a restored backup is noticed.

An export holds no id, and shows nothing that fewer than 20 people share. With a key it is signed (Ed25519, RFC 8032).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError, PromiseError, RegistryError
from ..escaping import parsed_json
from .registry import Registry
from .summary import at_least

SCHEMA = 1
DOCUMENT = "epsilons registry"


def export(registry: Registry, key: Path | None = None, day: date | None = None) -> dict[str, Any]:
    """The registry's head, and its use in aggregates; signed with the private key in this PEM file.

    day  the export also states that who withdrew before this day is in the roster of no later run. Raises PromiseError
         if it is not so
    """
    use = registry.summary().to_dict()
    if registry.hash_at(use["events"]) is None:  # refused for a role that sees the runs of some projects only
        raise RegistryError("The registry was altered: its last events are missing.")
    values = {
        "document": DOCUMENT,
        "schema": SCHEMA,
        "registry": registry.id,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "head": {"number": use["events"], "hash": use["head"]},
        **{name: use[name] for name in ("people", "wishes", "projects", "runs")},
    }
    if day is not None:
        people = _excluded(registry, day)
        if not registry.verify().is_right:
            raise PromiseError("The registry is wrong: see epsilons registry verify.")
        values["excluded"] = {"withdrew_before": str(day), "people": at_least(people), "in_later_rosters": 0}
    return values if key is None else {**values, "signature": _signed(values, key)}


def read_export(path: Path, signer: Path | None = None) -> dict[str, Any]:
    """The export in this file.

    signer  a PEM file with the public key that must have signed it

    Raises InputError if it is no export, PromiseError if its signature is wrong or missing.
    """
    try:
        values: Any = parsed_json(path.read_text(encoding="utf-8"))
        number, last = values["head"]["number"], values["head"]["hash"]
        is_export = values["document"] == DOCUMENT and isinstance(number, int) and isinstance(last, str)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError):
        is_export = False
    if not is_export:
        raise InputError(f"{path} is no export of a registry. Write one with: epsilons registry export URL -o FILE")
    signature = values.pop("signature", None)
    if signature is None and signer is not None:
        raise PromiseError(f"{path} is not signed.")
    if signature is not None:
        _check_signature(values, signature, path, signer)
    return dict(values)


def _excluded(registry: Registry, day: date) -> int:
    """How many people withdrew before this day, and stayed so. Raises PromiseError if a later run has one of them."""
    people, taken = registry.excluded(day)
    if taken:
        raise PromiseError("The registry is wrong: a run was reserved with a person who had withdrawn.")
    return people


def compare(registry: Registry, earlier: Mapping[str, Any]) -> None:
    """Raise PromiseError if this registry does not continue the one that an export was made of.

    And if what the export states about people who withdrew is not so. Raises InputError for a statement without a day.
    """
    if earlier.get("registry") != registry.id:
        raise PromiseError("The export is of another registry.")
    number, last = earlier["head"]["number"], earlier["head"]["hash"]
    found = registry.hash_at(number)
    if found is None:
        raise PromiseError(
            f"The registry has fewer than the {number:,} events of the export: it was restored from an older copy. "
            "What was charged since that copy is missing, so people would spend it twice. Restore a newer copy, or "
            "count every run since then as charged in full."
        )
    if found != last:
        raise PromiseError(
            f"The registry was rewritten: its event {number:,} is not the one of the export. Find a copy that "
            "continues the export."
        )
    if (excluded := earlier.get("excluded")) is not None:
        try:
            day = date.fromisoformat(excluded["withdrew_before"])
        except (TypeError, KeyError, ValueError):
            raise InputError("The export states who is excluded, and no day. Make another one.") from None
        _excluded(registry, day)


def _body(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, ensure_ascii=True).encode()


def _signed(values: Mapping[str, Any], path: Path) -> dict[str, str]:
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
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return {"kind": "Ed25519", "key": _text(public), "value": _text(key.sign(_body(values)))}


def _check_signature(values: Mapping[str, Any], signature: Any, path: Path, signer: Path | None) -> None:
    serialization, ed25519 = _cryptography()
    try:
        public = base64.b64decode(signature["key"], validate=True)
        if signer is not None:
            wanted: Any = serialization.load_pem_public_key(signer.read_bytes())
            if public != wanted.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw):
                raise PromiseError(f"{path} is signed with another key than the one in {signer}.")
        value = base64.b64decode(signature["value"], validate=True)
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(value, _body(values))
    except PromiseError:
        raise
    except OSError as error:
        raise InputError(f"{signer} cannot be read: {error.strerror or error}.") from None
    except Exception:  # a signature or a key that is damaged raises many things
        raise PromiseError(f"{path} was changed after it was signed, or its signature or key is damaged.") from None


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise RegistryError('Signatures need the package cryptography: pip install "cryptography>=42".') from None
    return serialization, ed25519


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
