"""Whether losses depend on the number of records.

Two forms of other sizes must consist of the same operators with the same arguments, up to sizes that grow with the
number of records.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from .states import Unknown
from .watch import Step, Watched


def difference(whole: Watched, other: Watched) -> tuple[Step, str] | None:
    """The first step that depends on the number of records, and how; None if there is none, or if it is not known."""
    # Where one record is cut from the others, or Python saw other values, operators may differ for other reasons.
    if isinstance(whole.losses, Unknown) or whole.is_split or seen_by_python(whole) != seen_by_python(other):
        return None
    for one, two in zip_longest(whole.relevant, other.relevant):
        if one is None or two is None:
            return one or two, "runs for one number of records only"
        text = _difference(one, two, whole.records, other.records)
        if text:
            return one, text
    return None


def seen_by_python(form: Watched) -> list[tuple[str, str]]:
    """What was read before the losses were complete and may have shaped them: (line, value) in order.

    A number that is no operator's argument has shaped nothing, or it decided something (`IndependenceCheck.conclude`).
    """
    used = {text for step in form.relevant for text in (*step.scalars, *map(repr, step.sizes))}
    used |= {repr(value) for step in form.relevant for _, values in step.values for value in values}
    return [
        (read.line, read.value)
        for read in form.reads
        if read.at < form.produced and (read.is_truth or read.is_many or read.value in used)
    ]


def _difference(a: Step, b: Step, one: int, other: int) -> str:
    """How two steps differ beyond sizes that grow with the number of records; "" if they do not."""
    if a.operator != b.operator:
        return f"runs where {b.operator} runs for another number"
    for left, right in zip(a.scalars, b.scalars, strict=False):
        if left != right:
            return f"gets {left[:40]} for one and {right[:40]} for the other"
    for x, y in zip(a.sizes, b.sizes, strict=False):
        if x != y and x * other != y * one:
            return f"gets {x} for one and {y} for the other"
    for (size, u), (its, v) in zip(a.values, b.values, strict=False):
        if size != its and size * other == its * one:
            continue  # a value for each record
        if size != its or not all(p == q or (p != p and q != q) for p, q in zip(u, v, strict=True)):
            return f"gets {_short(u)} for one and {_short(v)} for the other"
    return ""


def _short(values: tuple[Any, ...]) -> str:
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:3])
    return shown if len(values) <= 3 else f"{shown}, …"
