"""Docstrings as they read in the source, set as Markdown.

Aligned columns, of names and what is said of them, become definition lists; doctests become
blocks of code.
A name stands at the margin, two spaces or more before its text. A line that
goes on is indented by four or more.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

#: A name (or several, or a call), two spaces or more, and what is said of it.
_ROW = re.compile(r"^(\S+(?: \S+)*?) {2,}(\S.*)$")
_LINE_OF_ROW = re.compile(r"^ {4,}(\S.*)$")


class Readable(griffe.Extension):
    """Rewrites every docstring once it was loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """The docstring as Markdown."""
    return "\n".join(line for block in _blocks(text.split("\n")) for line in block)


def _blocks(lines: list[str]) -> list[list[str]]:
    blocks: list[list[str]] = []
    place = 0
    while place < len(lines):
        end = place + 1
        if lines[place].startswith(">>> "):
            while end < len(lines) and lines[end].strip():
                end += 1
            blocks.append(["", "```pycon", *lines[place:end], "```", ""])
        elif _ROW.match(lines[place]):
            rows: list[list[str]] = []
            end = place
            while end < len(lines) and (
                row := _ROW.match(lines[end]) or (rows and _LINE_OF_ROW.match(lines[end]))
            ):
                if len(row.groups()) == 2:
                    rows.append([row[1], row[2]])
                else:
                    rows[-1].append(row[1])
                end += 1
            blocks.append(["", *(line for row in rows for line in _definition(row)), ""])
        else:
            blocks.append([lines[place]])
        place = end
    return blocks


def _definition(row: list[str]) -> list[str]:
    names = ", ".join(f"`{name}`" for name in row[0].split(", "))
    return [names, f":   {' '.join(row[1:])}", ""]
