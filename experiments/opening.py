"""The front page of the results: the paper's Table 2 in its layout and a scorecard; and the list of claims."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from . import errata
from .balance import gap
from .comparing import (
    FEW,
    NETWORK,
    NOT_RUN,
    WORDS,
    Compared,
    Expected,
    Verdict,
    by_seed,
    gained,
    ledger,
    markdown,
    pairs,
    runs_of,
    spread,
    value,
)
from .membership_claims import paired, run_of
from .missing import hours, shown
from .results import Line
from .settings import Cell, Table

Tables = Mapping[str, Table]
Done = Mapping[str, Line]
Verdicts = Mapping[str, Sequence[Verdict]]

#: The rows of Table 2, in the paper's order, and its setups.
DATA = {"mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR10"}
SETUPS = ("a", "b")
METHODS = ("sample", "scale")
EVERY_MODEL = f"{NETWORK} and all other models"


def table_2(every: Tables, theirs: Mapping[str, Expected], done: Done) -> str:
    """The paper's main table in its layout: the paper's row over ours, gains by seed, and seeds."""
    if "table_2" not in every:
        return ""
    cells, printed = every["table_2"].by_name, theirs["table_2"].cells
    rows = []
    for data, name in DATA.items():
        for setup in SETUPS:
            three = [cells[f"{data}-{method}"] for method in ("dpsgd", *(f"{m}-{setup}" for m in METHODS))]
            paper = [printed[cell.name][0] for cell in three]
            texts = [f"{number.mean:.2f} ± {number.sd:.2f}" for number in paper]
            gains = [f"{number.mean - paper[0].mean:+.2f}" for number in paper[1:]]
            label = f"{name}, {setup.upper()}"
            rows.append([label, "paper", texts[0], texts[1], gains[0], texts[2], gains[1], "10"])
            counts = [len(runs_of(cell, done)) for cell in three]
            texts = [_ours(cell, every["table_2"], theirs["table_2"], done) for cell in three]
            gains = [gained(found) if (found := pairs(cell, three[0], done)) else "" for cell in three[1:]]
            seeds = " / ".join(map(str, dict.fromkeys(counts) if len(set(counts)) == 1 else counts))
            row = [texts[0], texts[1], gains[0], texts[2], gains[1], seeds]
            rows.append([label, "**ours**", *(text and f"**{text}**" for text in row)])
    header = ["data, setup", "", "DP-SGD, ε = 1", "Sample", "gain", "Scale", "gain", "seeds"]
    return markdown(header, [[text.replace(" ", "\u00a0") for text in row] for row in rows])


def _ours(cell: Cell, table: Table, theirs: Expected, done: Done) -> str:
    scores = list(by_seed(cell, done).values())
    return spread(scores) if scores else f"not run: {shown(hours(cell, table, theirs, done))} h"


# -- texts with numbers --------------------------------------------------------------------------------------------


_errata = cache(errata.numbers)


class _Missing(Exception):
    """A number needs a run that is not there."""


@dataclass(frozen=True)
class Filled:
    """Fills the {fields} of a text with the numbers of the runs; each method below that begins with "number_" is one.

    A field is {name table …}. Where a run is missing, it says so.
    """

    every: Tables
    theirs: Mapping[str, Expected]
    verdicts: Verdicts
    done: Done

    def __call__(self, text: str) -> str:
        def filled(match: re.Match[str]) -> str:
            what, *words = match[1].split()
            if words and words[0] not in self.every and what not in ("count", "errata"):
                return NOT_RUN
            try:
                return str(getattr(self, f"number_{what}")(*words))
            except _Missing:
                return NOT_RUN

        return re.sub(r"\{([a-z]+[^}]*)\}", filled, text)

    def _scores(self, table: str, cell: str, quantity: str = "accuracy") -> dict[int, float]:
        found = by_seed(self.every[table].by_name[cell], self.done, quantity)
        if not found:
            raise _Missing
        return found

    def _mean(self, table: str, cell: str, quantity: str = "accuracy") -> float:
        return statistics.fmean(self._scores(table, cell, quantity).values())

    def number_mean(self, table: str, cell: str, quantity: str = "accuracy", digits: str = "1") -> str:
        """The mean over seeds."""
        return f"{self._mean(table, cell, quantity):.{digits}f}"

    def number_gain(self, table: str, cell: str, other: str, quantity: str = "accuracy") -> str:
        """The mean difference of two cells by seed, without its interval."""
        cells = self.every[table].by_name
        found = pairs(cells[cell], cells[other], self.done, quantity)
        if not found:
            raise _Missing
        return f"{statistics.fmean(found):+.2f}"

    def number_paper(self, table: str, cell: str, other: str = "", quantity: str = "accuracy") -> str:
        """The paper's number for a cell; minus that of another."""
        one, *two = (
            next(row.mean for row in self.theirs[table].cells[name] if row.quantity == quantity)
            for name in (cell, other)
            if name
        )
        return f"{one - two[0]:+.2f}" if two else f"{one:g}"

    def number_share(self, table: str, cell: str) -> str:
        """The part of the gap between everyone at ε = 1 and at ε = 3 that a cell closes."""
        plain, bound, own = (self._mean(table, name) for name in ("mnist-dpsgd", "mnist-dpsgd-3", cell))
        return f"{100 * (own - plain) / (bound - plain):.0f} %"

    def number_gap(self, table: str, cell: str) -> str:
        """Points between the best and the worst class, by their means."""
        self._scores(table, cell)
        return f"{gap(list(runs_of(self.every[table].by_name[cell], self.done).values())):.2f}"

    def number_auc(self, table: str, cell: str) -> str:
        """The AUC of both groups, by the first attack."""
        line = run_of(self.every[table].by_name[cell], self.done)
        if line is None:
            raise _Missing
        return " / ".join(f"{group[0]:.3f}" for group in next(iter(line["auc"].values())))

    def number_against(self, table: str, cell: str, other: str, group: str) -> str:
        """The AUC of a group minus that under the other arm."""
        line, its = (run_of(self.every[table].by_name[name], self.done) for name in (cell, other))
        if line is None or its is None:
            raise _Missing
        return f"{paired(line, its, next(iter(line['auc'])), int(group)).value:+.3f}"

    def number_parameters(self, table: str) -> str:
        """How many printed parameters come out."""
        rows = [
            Compared(printed, (value(line, printed.quantity),)).agrees
            for cell in self.every[table].cells
            for line in runs_of(cell, self.done).values()
            for printed in self.theirs[table].cells[cell.name]
        ]
        return f"{sum(rows)} of {len(rows)}"

    def number_errata(self, name: str) -> str:
        """A number that contradicts the paper."""
        return _errata()[name]

    def number_spent(self) -> str:
        """The smallest part of its target that the ledger of a group ends at, and the largest of its promise."""
        parts = [found for line in self.done.values() if (found := ledger(line)) is not None]
        if not parts:
            raise _Missing
        return f"{min(low for _, low in parts):.2%} to {max(high for high, _ in parts):.2%}"

    def number_seeds(self, table: str, *cells: str) -> str:
        """The seeds that were run of these cells; of attacks, the shadows."""
        found = [runs_of(self.every[table].by_name[cell], self.done) for cell in cells]
        shadows = {line["shadows"] for runs in found for line in runs.values() if "shadows" in line}
        counts = [f"{few} shadows" for few in sorted(shadows)] or sorted({str(len(runs)) for runs in found})
        return " to ".join(counts).replace("shadows to ", "to ")

    def number_on(self, table: str, cell: str) -> str:
        """What a cell was measured on."""
        return re.sub(r"^(an?|the) ", "", self.theirs[table].model(cell))

    def number_verdict(self, table: str, pattern: str, *say: str) -> str:
        """What the runs say of the claims on these cells whose text has these words."""
        return said(v for claim, v in self._claims(table, pattern) if " ".join(say) in claim["say"])

    def _claims(self, table: str, pattern: str) -> list[tuple[Mapping[str, Any], Verdict]]:
        both = zip(self.theirs[table].claims, self.verdicts[table], strict=True)
        return [(claim, found) for claim, found in both if fnmatchcase(claim["cell"], pattern)]

    def number_count(self, *words: str) -> str:
        """How many claims have this word of WORDS; "tested" and "once" count those that were run, and with one seed."""
        every = [found for each in self.verdicts.values() for found in each]
        counted = {
            "tested": [v for v in every if v.found != NOT_RUN],
            "once": [v for v in every if v.seeds == 1],
        }
        return str(len(counted.get(" ".join(words), [v for v in every if v.word == " ".join(words)])))


def said(verdicts: Iterable[Verdict]) -> str:
    """One of WORDS for several claims: how many of those that were run, if they differ."""
    words = Counter(found.word for found in verdicts)
    ran = sum(count for word, count in words.items() if word != NOT_RUN)
    parts = [word if count == ran else f"{word}: {count} of {ran}" for word, count in words.items() if word != NOT_RUN]
    return "; ".join(parts) or NOT_RUN


# -- claims --------------------------------------------------------------------------------------------------------


CLAIMS = ("in the paper", "claim", "found", "measured on")


def claims(verdicts: Verdicts, links: Mapping[str, str], done: Done) -> list[str]:
    """A section for each of WORDS, and one for claims that were not run; `links`: table -> where it is."""
    every = [(links[name], found) for name, each in verdicts.items() for found in each]
    every += [("[Figure 4](results-parameters.md#figure-4)", found) for found in _ledgers(done)]
    parts = []
    for word in (*WORDS.values(), NOT_RUN):
        rows = [_row(link, found) for link, found in every if found.word == word]
        parts.append(f"## {word[0].upper()}{word[1:]}\n\n{markdown(CLAIMS, rows) if rows else 'No claim.'}")
    return parts


def _row(link: str, found: Verdict) -> list[str]:
    if found.found == NOT_RUN:
        return [link, found.say, "", ""]
    few = f" **{FEW[found.seeds]}**" if found.seeds in FEW else ""
    return [link, found.say, f"{found.found}{few}", found.model]


def _ledgers(done: Done) -> list[Verdict]:
    """The claim that budgets are used up and never exceeded, over all runs with a ledger."""
    spent = [parts for line in done.values() if (parts := ledger(line)) is not None]
    if not spent:
        return []
    most, least = max(high for high, _ in spent), min(low for _, low in spent)
    say = "Every group's ledger ends at or below its promise, and at 99 % or more of what its strategy targets"
    good = most <= 1 and least >= 0.99
    return [Verdict(say, good, f"{least:.4%} to {most:.4%} over {len(spent)} runs", good, len(spent), EVERY_MODEL)]
