"""What a notebook shows of a plan, a ledger, a run and an audit: headings, tables, paragraphs and progress as HTML.

A notebook keeps what it showed, and is often passed on. So the parts are those of the printed text, by the rules of
`disclosure`. Every text is escaped, because names may come from data.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, Package, printable
from .files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def is_running() -> bool:
    """True in a notebook: IPython was loaded, and a kernel serves it. IPython in a terminal has no kernel.

    IPython is looked up among the loaded modules and is never imported, so it is no dependency.

    >>> is_running()
    False
    """
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython, "get_ipython"):
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None


def progress_bar(done: int, steps: int, line: str) -> dict[str, str]:
    """A bar and its line of text, as HTML and as plain text.

    >>> progress_bar(3, 10, "charged 3/10")["text/html"]
    '<progress value="3" max="10"></progress> charged 3/10'
    """
    line = line.rstrip()
    return {
        "text/html": f'<progress value="{int(done)}" max="{int(steps)}"></progress> {escaped(line)}',
        "text/plain": printable(line),
    }


def display_bundle(bundle: Mapping[str, str]) -> Callable[[Mapping[str, str]], None]:
    """Display texts {MIME type: text} below the cell that runs; returns a function that replaces them.

    Call it only while `is_running()`.
    """
    from IPython.display import display

    handle = display(dict(bundle), raw=True, display_id=True)
    return lambda newer: handle.update(dict(newer), raw=True)


# -- Figures: the one place that loads matplotlib and writes its pictures, atomically and for their owner alone

FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches with one pair of axes, without a frame at the top and on the right."""
    figure = Package("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Figure, path: Path, formats: tuple[str, ...] = FORMATS) -> Path:
    """Write the figure to `path`, whole or not at all. Raises InputError unless it ends in one of the formats."""
    if path.suffix not in formats:
        raise InputError(f"A picture's name ends in {' or '.join(formats)}, got {path.name!r}.")
    dates = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None} if path.suffix == ".pdf" else {}
    content = BytesIO()
    figure.savefig(content, format=path.suffix[1:], metadata={"Creator": None, **dates} if dates else None)
    return write_bytes(path, content.getvalue())
