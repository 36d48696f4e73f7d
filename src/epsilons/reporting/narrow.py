"""Tables for narrow screens: every cell knows the header of its column, and the style sheet stacks them.

The markup is that of this folder's templates, where every text from data is escaped, so a tag is a tag.
"""

from __future__ import annotations

import re

_TABLE = re.compile(r"<thead>(.*?)</thead>(.*?)</table>", re.S)
_HEADER = re.compile(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", re.S)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.S)
_CELL = re.compile(r"<t([hd])\b([^>]*)>")
_TAG = re.compile(r"<[^>]*>")


def labelled(page: str) -> str:
    """The page, with the header of its column in every cell of a table's body.

    >>> labelled('<thead><tr><td></td><th>δ</th></tr></thead><tbody><tr><th>a</th><td>0.1</td></tr></tbody></table>')
    '<thead><tr><td></td><th>δ</th></tr></thead><tbody><tr><th>a</th><td data-label="δ">0.1</td></tr></tbody></table>'
    """
    return _TABLE.sub(_with_labels, page)


def _with_labels(table: re.Match[str]) -> str:
    headers = [_TAG.sub("", header).replace('"', "&quot;") for header in _HEADER.findall(table[1])]

    def row(match: re.Match[str]) -> str:
        names = iter(headers)

        def cell(match: re.Match[str]) -> str:
            name = next(names, "")
            return f'<t{match[1]}{match[2]} data-label="{name}">' if name else match[0]

        return f"<tr>{_CELL.sub(cell, match[1])}</tr>"

    return f"<thead>{table[1]}</thead>{_ROW.sub(row, table[2])}</table>"
