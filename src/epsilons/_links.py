"""Addresses that messages give. The same ones are in pyproject.toml, [project.urls]."""

from __future__ import annotations

#: The documentation. The address is reserved, and leads nowhere, until the repository is public.
DOCS = "https://epsilons.example/docs"


def docs_page(page: str, section: str = "") -> str:
    """The address of a page of the documentation, at a section.

    >>> docs_page("pitfalls", "several-records-of-one-person")
    'https://epsilons.example/docs/pitfalls.html#several-records-of-one-person'
    """
    return f"{DOCS}/{page}.html" + (f"#{section}" if section else "")
