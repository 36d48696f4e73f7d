"""Names of runs, projects and kinds: they are printed, so no control character is in them."""

from __future__ import annotations

from ..errors import RegistryError

LONGEST_NAME = 200


def check_name(name: str) -> None:
    """Raise RegistryError for a name that is too long, or that does not print as it is."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not name.isprintable():
        raise RegistryError(
            f"Names of runs and projects are text of at most {LONGEST_NAME} printable characters, without line breaks."
        )
