"""The opening of the results page: ten lines, the claims by whether they held, and the runs that are missing."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from .comparing import NOT_RUN, Expected, Verdict, ledger, runs_of, value
from .results import Line, is_complete
from .settings import HERE, Table

#: The ten lines; {…} is computed by `in_ten_lines`.
TEN_LINES = HERE / "opening.md"

#: Headings, by (Verdict.held, Verdict.so_far).
HELD = {
    (True, True): "What held",
    (None, True): "What holds so far, with seeds missing",
    (False, False): "What did not hold",
    (None, False): "What is not settled",
}

#: Claims that rest on one seed have a section: its heading, and what it means.
ONCE = "What rests on one seed"
ONCE_MEANS = """Each cell of these claims has one run, so they may be due to chance. Costs of a step were measured \
once, on one machine."""

Tables = Mapping[str, Table]
Done = Mapping[str, Line]
Verdicts = Mapping[str, Sequence[Verdict]]


# -- ten lines -----------------------------------------------------------------------------------------------------


def in_ten_lines(every: Tables, theirs: Mapping[str, Expected], verdicts: Verdicts, done: Done) -> str:
    """opening.md, with its numbers.

    {claims}                    number of claims that were tested on runs
    {held}, {broke}, {once}     number of claims that held with all their seeds, that did not, that rest on one seed
    {mean table cell}           mean accuracy in %
    {gain table cell other}     mean difference of two cells, by seed
    {paper table cell}          the paper's first number for a cell
    """
    settled = [v for table in verdicts.values() for v in table if v.found != NOT_RUN]
    counts = {
        "claims": len(settled),
        "held": sum(v.held is True and v.seeds > 1 for v in settled),
        "broke": sum(v.held is False and v.seeds > 1 for v in settled),
        "once": sum(v.seeds == 1 for v in settled),
    }

    def number(match: re.Match[str]) -> str:
        what, *names = match[1].split()
        if not names:
            return str(counts[what])
        return FIELDS[what](every, theirs, done, *names) if names[0] in every else NOT_RUN

    return re.sub(r"\{([^}]+)\}", number, TEN_LINES.read_text(encoding="utf-8").strip())


def _mean(every: Tables, theirs: Mapping[str, Expected], done: Done, table: str, cell: str) -> str:
    scores = _scores(every, done, table, cell)
    return f"{statistics.fmean(scores.values()):.1f}" if scores else NOT_RUN


def _gain(every: Tables, theirs: Mapping[str, Expected], done: Done, table: str, cell: str, other: str) -> str:
    ours, others = (_scores(every, done, table, name) for name in (cell, other))
    gains = [ours[seed] - others[seed] for seed in ours if seed in others]
    return f"{statistics.fmean(gains):+.2f}" if gains else NOT_RUN


def _paper(every: Tables, theirs: Mapping[str, Expected], done: Done, table: str, cell: str) -> str:
    return f"{theirs[table].cells[cell][0].mean:.1f}"


def _scores(every: Tables, done: Done, table: str, cell: str) -> dict[int, float]:
    return {seed: value(line, "accuracy") for seed, line in runs_of(every[table].by_name[cell], done).items()}


FIELDS: dict[str, Callable[..., str]] = {"mean": _mean, "gain": _gain, "paper": _paper}


# -- claims --------------------------------------------------------------------------------------------------------


def claims(every: Tables, verdicts: Verdicts, done: Done) -> list[str]:
    """The sections on claims that held, that rest on one seed, that did not hold, and that are not settled."""
    settled = [v for table in verdicts.values() for v in table if v.found != NOT_RUN]
    rest = [v for v in settled if v.seeds != 1]
    lines = {key: [_line(v) for v in rest if (v.held, v.so_far) == key] for key in HELD}
    for held in (True, False):
        lines[held, held] += _ledgers(done, held)
    lines[None, False] += _missing(every, done)
    parts = [f"## {title}\n\n" + ("\n".join(lines[key]) or "Nothing so far.") for key, title in HELD.items()]
    return [parts[0], *_once([v for v in settled if v.seeds == 1]), *parts[1:]]


def _line(found: Verdict) -> str:
    return f"* {found.say}: {found.found}"


def _once(found: Sequence[Verdict]) -> list[str]:
    """The section on claims that rest on one seed; none without such claims."""
    lists = [
        f"{title}\n\n" + "\n".join(_line(v) for v in chosen)
        for title, good in (("They held:", True), ("They did not hold:", False))
        if (chosen := [v for v in found if v.so_far == good])
    ]
    return [f"## {ONCE}\n\n{ONCE_MEANS}\n\n" + "\n\n".join(lists)] if lists else []


def _missing(every: Tables, done: Done) -> list[str]:
    """By table: cells with too few seeds, with too few shadows, and without any run."""
    lines = []
    for name, table in every.items():
        if some := [
            f"{cell.title} ({runs} of {len(cell.seeds)})"
            for cell in table.cells
            if 0 < (runs := len(runs_of(cell, done))) < len(cell.seeds)
        ]:
            lines.append(f"* Seeds missing, of `{name}`: {'; '.join(some)}")
        if few := [
            f"{cell.title} ({line['shadows']})"
            for cell in table.cells
            for line in runs_of(cell, done).values()
            if not is_complete(line)
        ]:
            lines.append(f"* Fewer shadows than planned, of `{name}`: {'; '.join(few)}")
        if never := [cell.title for cell in table.cells if not runs_of(cell, done)]:
            lines.append(f"* Not run yet, of `{name}`: {'; '.join(never)}")
    return lines


def _ledgers(done: Done, held: bool) -> list[str]:
    spent = [parts for line in done.values() if (parts := ledger(line)) is not None]
    if not spent:
        return []
    most, least = max(high for high, _ in spent), min(low for _, low in spent)
    if (most <= 1 and least >= 0.99) != held:
        return []
    return [
        f"* Every group's ledger ends at or below its promise, and at 99 % or more of what its strategy targets: "
        f"{least:.4%} to {most:.4%} over {len(spent)} runs"
    ]
