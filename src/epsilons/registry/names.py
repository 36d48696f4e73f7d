"""Names of runs, projects and kinds: they are printed, so no control character is in them. And hashes."""

from __future__ import annotations

import re

from ..errors import RegistryError

LONGEST_NAME = 200


def check_name(name: str) -> None:
    """Raise RegistryError for a name that is too long, or that does not print as it is."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not name.isprintable():
        raise RegistryError(
            f"Names of runs and projects are text of at most {LONGEST_NAME} printable characters, without line breaks."
        )


def check_hash(value: str) -> str:
    """This hash or commitment. Raises RegistryError if it is none."""
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise RegistryError("Keys and lines of ledgers are given by their hashes, 64 hexadecimal digits.")
    return value
