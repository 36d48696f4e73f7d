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
    used = {text for step in form.relevant for argument in step.arguments for text in _texts(argument)}
    return [
        (read.line, read.value)
        for read in form.reads
        if read.at < form.produced and (read.is_truth or read.is_many or read.value in used)
    ]


def _texts(argument: Any) -> list[str]:
    return [argument] if isinstance(argument, str) else list(map(repr, _values(argument)))


def _values(argument: Any) -> tuple[Any, ...]:
    return argument[1] if isinstance(argument, tuple) else (argument,)


def _difference(a: Step, b: Step, one: int, other: int) -> str:
    """How two steps differ beyond sizes that grow with the number of records; "" if they do not."""
    if a.operator != b.operator:
        return f"runs where {b.operator} runs for another number"
    for left, right in zip(a.arguments, b.arguments, strict=False):
        sizes = [x[0] if isinstance(x, tuple) else x for x in (left, right) if not isinstance(x, str)]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            is_same = sizes[0] * other == sizes[1] * one  # a size that grows with the records, or a value for each
        else:
            values = zip_longest(_values(left), _values(right))
            is_same = all(p == q or (p != p and q != q) for p, q in values)
        if not is_same:
            return f"gets {_short(left)} for one and {_short(right)} for the other"
    return ""


def _short(argument: Any) -> str:
    values = _values(argument)
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v)[:40] for v in values[:3])
    return shown if len(values) <= 3 else f"{shown}, …"
