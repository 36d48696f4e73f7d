"""The results page on membership inference: AUCs by group, differences, and the paper's own test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epsilons.reporting.membership import Estimate

from .comparing import NETWORK, Expected, expected, markdown, titled
from .membership_claims import PLAIN, is_membership, minus_placebo, paired, run_of, with_interval
from .results import Line
from .settings import Cell, MembershipSettings, Table

#: Arms that have a budget for every group.
INDIVIDUAL = ("sample", "scale")

#: Student's t and p of the paper's five targets (Table 12), Sample.
PAPER_TEST = ((5.16, 2.49e-07), (2.41, 0.016), (1.84, 0.066), (4.03, 5.52e-05), (2.537, 0.011))

PAPER_TEST_MEANS = """This test is not valid for the claim. It compares all scores of one target's groups, members \
and non-members together. Both move together with the target, so t is mostly how this one model treats a group as a \
whole, and has either sign. The last column has the share of targets in which the members alone differ (Welch's test). \
Neither counts that the scores of one target depend on each other; the randomisation test above does."""


# -- the section of a table ------------------------------------------------------------------------


def body(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """The numbers of one table of attacks as Markdown."""
    arms = {cell.name: line for cell in table.cells if (line := run_of(cell, done)) is not None}
    parts = [_aucs(table, theirs, done)]
    if arms:
        parts += [part(table, arms) for part in (_differences, _against_plain, _attacks, _paper_test)]
    return "\n\n".join(part for part in parts if part)


def beside_the_paper(every: Mapping[str, Table], done: Mapping[str, Line]) -> str:
    """The AUCs that the paper and its authors' repository print, beside ours on each table that was run."""
    ran = [table for table in every.values() if is_membership(table) and run_of(table.by_name.get("sample"), done)]
    rows = []
    for name in INDIVIDUAL:
        printed = expected("lira_cifar10_cnn").cells[name]
        lowest, highest = ([row for row in printed if row.quantity == f"auc[{group}]"] for group in (0, 1))
        theirs = [f"{one.mean:.3f} / {two.mean:.3f} ({one.label})" for one, two in zip(lowest, highest, strict=True)]
        ours = []
        for table in ran:
            line = run_of(table.by_name[name], done)
            found = [] if line is None else line["auc"][attacks_of(table.cells[0])[0]]
            ours.append(" / ".join(f"{one[0]:.3f}" for one in found) or "**not run**")
        rows.append([name.title(), "; ".join(theirs), *ours])
    models = [expected(table.name).model("sample") for table in ran]
    return markdown(["AUC at ε = 10 / 20", f"paper or repository: {NETWORK}", *(f"ours: {m}" for m in models)], rows)


def _aucs(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    first, second = attacks_of(table.cells[0])[:2]
    theirs_too = ["paper's AUC"] * bool(theirs.cells)
    header = ["arm", "ε", *theirs_too, f"AUC, {first}", f"AUC, {second}", "certified", "share"]
    rows = [row for cell in table.cells for row in _auc_rows(cell, theirs, run_of(cell, done), first, second)]
    header += ["TPR at 1 %", "certified", "TPR at 0.1 %", "certified", "accuracy", "shadows"]
    return markdown(header, rows)


def attacks_of(cell: Cell) -> list[str]:
    """The attacks of an arm, the ones that are shown first at the front."""
    assert isinstance(cell.settings, MembershipSettings)
    return cell.settings.attacks


def _auc_rows(cell: Cell, theirs: Expected, line: Line | None, first: str, second: str) -> list[list[str]]:
    assert isinstance(cell.settings, MembershipSettings)
    printed = {row.quantity: f"{row.mean:g}" for row in reversed(theirs.cells.get(cell.name, ()))}
    wanted = cell.settings.shadows
    if line is None:
        auc = (
            " / ".join(printed[f"auc[{g}]"] for g in (0, 1))
            if printed
            else theirs.not_printed.get(cell.name, "not in the paper")
        )
        return [[cell.title, "", *[auc] * bool(theirs.cells), "**not run**", *[""] * 8, f"0 of {wanted}"]]
    accuracy = f"{line['accuracy']:.3f}" + (f" ({printed['accuracy']} %)" if "accuracy" in printed else "")
    return [
        [
            cell.title,
            label_of(cell, line, group),
            *[printed.get(f"auc[{group}]", "")] * bool(theirs.cells),
            *(with_interval(Estimate(*line["auc"][attack][group][:3])) for attack in (first, second)),
            f"{line['certified_auc'][group]:.3f}",
            "" if line["share"][first][group] is None else f"{line['share'][first][group]:.0%}",
            *(part for at in line["found"][first][group] for part in _found(at)),
            accuracy,
            f"{line['shadows']} of {wanted}",
        ]
        for group in (0, 1)
    ]


def label_of(cell: Cell, line: Line, group: int) -> str:
    """The epsilon of a group, or for DP-SGD that of all, and the group's label."""
    assert isinstance(cell.settings, MembershipSettings)
    level = f"{line['levels'][group]:g}"
    return level if cell.settings.epsilon is None else f"{cell.settings.epsilon:g} (records of {level})"


def _found(at: list[Any]) -> list[str]:
    """The true-positive rate, and what the plan certifies."""
    _, value, low, high, certified = at
    found = "too few false alarms" if value is None else f"{value:.2%} [{low:.2%}, {high:.2%}]"
    return [found, f"{certified:.1%}"]


def _differences(table: Table, arms: Mapping[str, Line]) -> str:
    header = ["arm", "attack", "AUC at 20 − at 10", "minus placebo", "95 %, other records", "ordered targets", "p"]
    rows = []
    for name, line in arms.items():
        cell = table.by_name[name]
        for attack in attacks_of(cell)[:2]:
            one = line["difference"][attack]
            low, high = one["of_others"]
            rows.append(
                [
                    cell.title + (" (placebo)" if name in PLAIN else ""),
                    attack,
                    with_interval(Estimate(*one["auc"])),
                    _minus_placebo(name, arms, attack),
                    f"[{low:.4f}, {high:.4f}]",
                    f"{one['ordered']:.0%}",
                    f"{one['p']:.2g}",
                ]
            )
    said = """Paired by target; p is that of the randomisation test over records. With DP-SGD all records have one \
budget, so a difference there is that of the two sets of records: the placebo. "Minus placebo" subtracts the mean of \
both placebos, target by target."""
    return titled(f"Differences between the groups\n\n{said}", header, rows)


def _minus_placebo(name: str, arms: Mapping[str, Line], attack: str) -> str:
    """The effect minus that of the placebos; "" for a placebo."""
    found = None if name in PLAIN else minus_placebo(name, arms, attack)
    return ("" if name in PLAIN else "no placebo") if found is None else with_interval(found)


def _against_plain(table: Table, arms: Mapping[str, Line]) -> str:
    rows = [
        [table.by_name[name].title, f"{arms[name]['levels'][group]:g}", attack, with_interval(found)]
        for name in INDIVIDUAL
        for group, plain in enumerate(PLAIN)
        if name in arms and plain in arms and arms[name]["shadows"] == arms[plain]["shadows"]
        for attack in attacks_of(table.by_name[name])[:2]
        for found in [paired(arms[name], arms[plain], attack, group)]
    ]
    return titled(
        "Against DP-SGD\n\nThe AUC for the records of a group, minus that for the same records where all records "
        "have the group's budget. The coins are the same, so the arms are compared target by target.",
        ["arm", "ε", "attack", "AUC − DP-SGD's"],
        rows,
    )


def _attacks(table: Table, arms: Mapping[str, Line]) -> str:
    name = next(iter(arms))
    line = arms[name]
    rows = [
        [
            attack,
            *(with_interval(Estimate(*auc[:3])) for auc in line["auc"][attack]),
            with_interval(Estimate(*line["difference"][attack]["auc"])),
            _minus_placebo(name, arms, attack),
        ]
        for attack in line["auc"]
    ]
    header = ["attack", *(f"AUC, ε = {level:g}" for level in line["levels"]), "difference", "minus placebo"]
    return titled(f"All attacks: {table.by_name[name].title}", header, rows)


# -- the paper's test ------------------------------------------------------------------------------


def _paper_test(table: Table, arms: Mapping[str, Line]) -> str:
    sample = arms.get("sample") or next(iter(arms.values()))
    raw = sample["paper_test"].get("lira-raw")
    if raw is None:
        return ""
    targets = [
        [str(number), f"{paper[0]:.2f}", f"{paper[1]:.2g}", f"{ours[0]:+.2f}", f"{ours[1]:.2g}"]
        for number, (paper, ours) in enumerate(zip(PAPER_TEST, raw["targets"], strict=True), start=1)
    ]
    rows = [
        [
            table.by_name[name].title,
            attack,
            " / ".join(f"{t:+.1f}" for t in test["quantiles"]),
            f"{test['significant']:.0%}",
            f"{test['members_only']:.0%}",
        ]
        for name, line in arms.items()
        for attack, test in line["paper_test"].items()
    ]
    header = ["arm", "attack", "t, 5 / 50 / 95 %", "targets with p < .05", "members alone, p < .05"]
    return (
        f"### The paper's Student test, for comparison only\n\n{PAPER_TEST_MEANS}\n\nFive targets, raw logits "
        "(the signal of the paper's code):\n\n"
        + markdown(["target", "paper's Δ", "paper's p", "our t", "our p"], targets)
        + "\n\nAll targets:\n\n"
        + markdown(header, rows)
    )
