"""What a notebook shows of a plan, a ledger, a run and an audit: headings, tables and paragraphs as HTML.

A notebook keeps what it showed, and is often passed on. So the parts are those of the printed text, by the rules of
`disclosure`. Every text is escaped, because names may come from data.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from .escaping import printable


def escaped(text: object) -> str:
    r"""One line of text for HTML, without control characters.

    >>> escaped("<b>strict</b>\x1b")
    '&lt;b&gt;strict&lt;/b&gt;\\x1b'
    """
    return html.escape(printable(text))


def heading(text: str) -> str:
    return f"<p><strong>{escaped(text)}</strong></p>"


def paragraphs(texts: Iterable[str]) -> str:
    """Each line of each text as a paragraph."""
    return "".join(f"<p>{escaped(line)}</p>" for text in texts for line in text.split("\n"))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of texts.

    >>> table(["epsilon"], [["1"]])
    '<table><thead><tr><th>epsilon</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escaped(name)}</th>" for name in headers)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def details(title: str, text: str) -> str:
    """A text of several lines that is opened by a click."""
    return f"<details><summary>{escaped(title)}</summary>{paragraphs([text])}</details>"


def document(*parts: str) -> str:
    """The parts, one below the other."""
    return f"<div>{''.join(parts)}</div>"
