"""The section of the protocol: best against best on each data set, and what momentum is of a gain."""

from __future__ import annotations

from collections.abc import Mapping

from .comparing import markdown, spread
from .missing import provenance
from .protocol import BESIDE, BEST, Interval, Protocol, contrast, finals, outcome, protocols
from .results import Line, is_current
from .settings import Table

METHODS = {"dpsgd": "DP-SGD, strictest ε", "exclude": "E.1", "sample": "Sample", "scale": "Scale"}
COLUMNS = {BEST: "best", "without": "best without momentum", "with": "best with momentum", BESIDE: "settings of before"}


def page(every: Mapping[str, Table], done: Mapping[str, Line]) -> str:
    """All data sets. Runs with other coins and noise than today's are left out."""
    current = {name: line for name, line in done.items() if is_current(line)}
    parts = [
        '<a id="protocol"></a>\n\n## One protocol for all methods: best against best',
        "Each method has the same number of trials, drawn from one grid: half of them without momentum, half with. "
        "Trials are scored on a fifth of the training data; the best two of each half get more seeds. The best is "
        "trained on all training data, and only these runs read the test data. Differences are paired by seed, with "
        "95 % intervals.",
        *(_section(protocol, current) for protocol in protocols().values()),
    ]
    return "\n\n".join(parts)


def _section(protocol: Protocol, done: Mapping[str, Line]) -> str:
    scores, runs = outcome(protocol, done), protocol.runs(done)
    finished = sum(name in done for name in runs)
    shown = [column for column in COLUMNS if any(column == half and found for (_, half), found in scores.items())]
    rows = []
    for method in protocol.methods:
        gain = contrast({(method, BEST): 1, ("dpsgd", BEST): -1}, scores) if method != "dpsgd" else None
        means = [_mean(scores.get((method, column), {})) for column in shown]
        rows.append([METHODS.get(method, method), *means, _interval(gain)])
    parts = [
        f"### {protocol.title}",
        f"`protocol_{protocol.name}` · {protocol.trials} trials for each method, {protocol.seeds} seeds of the best · "
        f"{finished} of {protocol.needed} runs" + (f" · {protocol.note}" if protocol.note else ""),
    ]
    if not shown:
        return "\n\n".join([*parts, f"**not run** (`python -m experiments run protocol_{protocol.name}`)"])
    parts.append(markdown(["", *(COLUMNS[c] for c in shown), "best over DP-SGD's best"], rows))
    parts += [text for text in (_momentum(protocol, scores), _chosen(protocol, done)) if text]
    table = protocol.table(finals(protocol, done))
    return "\n\n".join([*parts, provenance(table, done)])


def _momentum(protocol: Protocol, scores: Mapping[tuple[str, str], Mapping[int, float]]) -> str:
    """What is left of the gain of each method without momentum on both sides."""
    found = []
    for method in protocol.methods:
        weights = {(method, "without"): 1.0, ("dpsgd", "without"): -1.0}
        left = contrast(weights, scores) if method != "dpsgd" else None
        both = contrast({(method, "with"): 1, ("dpsgd", "with"): -1}, scores) if left else None
        if left and both:
            found.append(f"{METHODS.get(method, method)} {_interval(left)} without, {_interval(both)} with")
    return (
        f"Gain over DP-SGD where neither side has momentum, and where both have it: {'; '.join(found)}."
        if found
        else ""
    )


def _chosen(protocol: Protocol, done: Mapping[str, Line]) -> str:
    cells = list(finals(protocol, done))
    rows = [
        [METHODS.get(method, method), half, *(f"{getattr(cell.settings, key):g}" for key in _keys(protocol))]
        for cell in cells
        for method, _, half in [cell.name.rpartition("-")]
    ]
    return markdown(["settings that were chosen", "half of the trials", *_keys(protocol)], rows) if rows else ""


def _keys(protocol: Protocol) -> list[str]:
    return ["lr" if key == "length" else key for key in protocol.grid]


def _mean(scores: Mapping[int, float]) -> str:
    return spread(list(scores.values())) if scores else "**not run**"


def _interval(found: Interval | None) -> str:
    if found is None:
        return ""
    half = f" ± {found.half:.2f}" if found.half is not None else f" ({found.pairs} seed{'s' * (found.pairs > 1)})"
    return f"{found.mean:+.2f}{half}"
