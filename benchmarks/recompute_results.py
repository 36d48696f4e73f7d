"""Computes the numbers of docs/results*.md again from the finished runs, with none of the code that renders the pages.

    python benchmarks/recompute_results.py

Reads experiments/results, experiments/tables and experiments/expected as plain files. Each number of a table has to be
within half a unit of its last digit. Prints how many cells of each table were compared, and every one that differs.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "experiments"
#: Values that a setting has if a table does not name it; every empty one, too.
STANDARD = {
    "kind": "train", "convention": "authors-code", "accountant": "rdp", "delta": 1e-5, "evaluations": 16, "watch": 4,
    "population": 2000, "inputs": "normalised", "input_scale": 1.0, "optimizer": "sgd", "rows_per_person": 1,
    "model": "mlp", "clip_norm": 2**0.5, "batch_size": 50_000, "private": 50_000, "teachers": 250,
}  # fmt: skip

Row = list[str]
#: Column -> the numbers that its cell has.
Numbers = dict[int, Any]


# -- files ---------------------------------------------------------------------------------------------------------


LINES = [
    json.loads(text) for path in sorted((HERE / "results").glob("*.jsonl")) for text in path.open(encoding="utf-8")
]
TABLES = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted((HERE / "tables").glob("*.toml"))
}
PAPER = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (HERE / "expected").glob("*.json")}


def same(chosen: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a run has these settings, and the standard ones elsewhere."""
    for key in chosen.keys() | settings.keys():
        usual = STANDARD.get(key) if key not in chosen else chosen[key]
        found = settings.get(key, usual)
        if found != usual and (found or usual) and not (key not in chosen and not found):
            return False
    return True


def settings_of(table: str, cell: str, **changes: Any) -> dict[str, Any]:
    run = next(run for run in TABLES[table]["run"] if run["name"] == cell)
    merged = {**TABLES[table].get("defaults", {}), **run, **changes}
    return {key: value for key, value in merged.items() if key not in ("name", "title", "seeds")}


def seeds_of(table: str, cell: str) -> int:
    run = next(run for run in TABLES[table]["run"] if run["name"] == cell)
    return int(run.get("seeds", TABLES[table].get("defaults", {}).get("seeds", 1)))


def runs(table: str, cell: str, **changes: Any) -> dict[int, dict[str, Any]]:
    """Finished runs by seed."""
    chosen = settings_of(table, cell, **changes)
    found = {line["seed"]: line for line in LINES if same(chosen, line["settings"])}
    return {seed: found[seed] for seed in range(seeds_of(table, cell)) if seed in found}


def titles(table: str) -> dict[str, str]:
    return {run.get("title", run["name"]): run["name"] for run in TABLES[table]["run"]}


def number(line: dict[str, Any], what: str) -> float:
    """A number of a run, as expected/*.json names it."""
    if at := re.fullmatch(r"group_(\w+)@([\d.]+)", what):
        point = min(line["groups"], key=lambda row: abs(row["step"] - float(at[2]) * line["steps"]))
        return point[at[1]][0] * (100 if at[1] == "accuracy" else 1)
    if at := re.fullmatch(r"(class|others)_accuracy\[(\d)\]", what):
        right = np.array(line["per_class"], dtype=float)
        chosen = np.arange(len(right)) == int(at[2])
        hits, records = right[chosen if at[1] == "class" else ~chosen].sum(0)
        return 100 * hits / records
    if what == "gap":
        shares = [100 * hits / records for hits, records in line["per_class"]]
        return max(shares) - min(shares)
    if at := re.fullmatch(r"(\w+)\[(\w+)\]", what):
        value = line[at[1]][int(at[2]) if at[2].isdigit() else at[2]]
        return value * (100 if at[1] == "accuracies" else 1)
    return line[what] * (100 if what == "accuracy" else 1)


def scores(table: str, cell: str, what: str = "accuracy", **changes: Any) -> dict[int, float]:
    return {seed: number(line, what) for seed, line in runs(table, cell, **changes).items()}


def spread(values: list[float]) -> list[float]:
    """Mean and standard deviation; of two both values, of one its value."""
    return (
        [np.mean(values), np.std(values, ddof=1)]
        if len(values) > 2
        else [np.mean(values), *values[: len(values) ** 2 // 2]]
    )


def gain(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Mean of the differences by seed, and half of the 95 % interval from three seeds on."""
    found = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found) if len(found) > 2 else None
    return [] if not found else [np.mean(found), *([] if half is None else [half])]


# -- tables of the pages -------------------------------------------------------------------------------------------


def pages() -> Iterator[tuple[str, str, Row, list[Row]]]:
    """(name of the section's table, heading, header, rows) of each Markdown table."""
    for path in sorted((ROOT / "docs").glob("results*.md")):
        table, heading, block = "", "", []
        for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
            if line.startswith("|"):
                block.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
                continue
            if block:
                yield table, heading, block[0], block[2:]
                block = []
            if line.startswith(("#", "**")):
                heading = line.strip("#* ")
            if found := re.match(r"`(\w+)` · (?:paper|\d+ trials)", line):
                table = found[1]


def compared(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    """Cells, the paper's numbers, ours, the difference and its interval."""
    at = {name: header.index(name) for name in header}
    once = Counter()
    for row in rows:
        cell = titles(table)[row[0]]
        printed = PAPER.get(table, {}).get("cells", {}).get(cell)
        found = runs(table, cell)
        wanted: Numbers = {at["seeds"]: [len(found), seeds_of(table, cell)]} if "seeds" in at else {}
        if not printed:
            if found and all("accuracy" in line for line in found.values()):
                wanted[at["ours"]] = spread([number(line, "accuracy") for line in found.values()])
            elif found:
                (line,) = found.values()
                wanted[at["ours"]] = list(line["ratio"].values()) if "ratio" in line else line["spent"]
            yield row, wanted
            continue
        one = printed[once[cell]]
        once[cell] += 1
        wanted[at["paper"]] = [one["mean"], *([one["sd"]] if one.get("sd") is not None else [])]
        if found:
            values = [number(line, one["quantity"]) for line in found.values()]
            difference = [np.mean(values) - one["mean"]]
            if PAPER[table]["unit"] == "seconds":
                difference = [one["mean"] / np.mean(values)]
            on = next((m for p, m in PAPER[table].get("measured_on", {}).items() if fnmatch.fnmatch(cell, p)), "")
            if one.get("sd") and one.get("trials") and (not on or on.startswith("the paper's network")):
                parts = (np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0, len(values))
                n = len(values) + one["trials"] - 2
                pooled = np.sqrt(((len(values) - 1) * parts[1] ** 2 + (one["trials"] - 1) * one["sd"] ** 2) / n)
                difference.append(stats.t.ppf(0.975, n) * pooled * np.sqrt(1 / len(values) + 1 / one["trials"]))
                if len(values) > 2:
                    test = stats.ttest_ind_from_stats(*parts, one["mean"], one["sd"], one["trials"])
                    wanted[at["p"]] = [float(f"{test.pvalue:.2g}")]
            wanted |= {
                at["ours"]: [np.mean(values)] if "agrees" in at else spread(values),
                at["difference"]: difference,
            }
        yield row, wanted


def paired(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    what = "accuracies[0]" if table == "individual_accounting" else "accuracy"
    for row in rows:
        ours, theirs = (scores(table, titles(table)[title], what) for title in row[1:3])
        yield row, {3: gain(ours, theirs), 4: [len(ours.keys() & theirs.keys())]}


def beside(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    key, _, there = header[1].partition(" ")
    for row in rows:
        cell = titles(table)[row[0]]
        ours = scores(table, cell)
        twin = scores(table, cell, **{key: float(there) if key == "momentum" else there})
        both = sorted(ours.keys() & twin.keys())
        yield (
            row,
            {
                1: [np.mean([twin[s] for s in both])],
                2: [np.mean([ours[s] for s in both])],
                3: gain(ours, twin),
                4: [len(both)],
            },
        )


def best(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    def both(cell: str) -> list[dict[int, float]]:
        return [scores(table, cell, momentum=momentum) for momentum in (0.5, 0.0)]

    plain = both("mnist-dpsgd")
    for row in rows:
        ours = both(titles(table)[row[0]])
        seeds = set.intersection(*(set(each) for each in (*ours, *plain)))
        means = [[np.mean([each[seed] for seed in seeds]) for each in two] for two in (ours, plain)]
        chosen = [int(np.argmax(two)) for two in means]
        found = [{seed: two[at][seed] for seed in seeds} for two, at in zip((ours, plain), chosen, strict=True)]
        wanted = {1: [(0.5, 0.0)[chosen[0]]], 2: [max(means[0])], 4: [len(seeds)]}
        yield row, wanted | ({3: gain(*found)} if row[3] else {})


def of_parts(*columns: Callable[[list[dict[str, Any]]], Any]) -> Callable[..., Iterator[tuple[Row, Numbers]]]:
    """Rows of cells, whose columns are functions of the cell's runs."""

    def rows_of(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
        for row in rows:
            found = list(runs(table, titles(table)[row[0]]).values())
            yield row, {number: column(found) for number, column in enumerate(columns, start=1)}

    return rows_of


def means(key: str, scale: float = 1) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda found: np.atleast_1d(scale * np.mean([line[key] for line in found], axis=0))


def weights(found: list[dict[str, Any]]) -> list[float]:
    phases = found[0]["weights"]
    return phases[0] if len(phases) == 1 else [1, *found[-1]["votes"]]


def students(found: list[dict[str, Any]]) -> list[float]:
    return spread([100 * line["accuracy"] for line in found])


def code_weights(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        cell = titles(table)[row[0]]
        own, found = (list(runs(table, name).values()) for name in (cell.replace("code", "published"), cell))
        shown = [own[0]["weights"]["voted"], found[0]["weights"]["voted"], found[0]["weights"]["charged"]]
        shown += [found[0]["exact_at"]["charged"], found[0]["exact_at"]["voted"], means("with_voted_weights")(found)]
        yield row, dict(enumerate(shown, start=1))


def copies(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    keys = ["copies", "as_argued", "by_rate", "by_weight"]
    for number_of_row, row in enumerate(rows):
        line = next(line for line in LINES if line["table"] == table and line["settings"]["dataset"] == row[0])
        yield row, {2 + n: [line[keys[number_of_row % 4]][str(n + 1)]] for n in range(5)}


def visits(table: str, header: Row, rows: list[Row], heading: str) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        cell = [titles(table)[f"{heading}: {row[0]}, {method}"] for method in header[1:]]
        yield row, {n: spread(list(scores(table, name).values())) for n, name in enumerate(cell, start=1)}


def class_cell(column: str, number_of_class: str) -> str | None:
    """The cell of a column such as "ε = 3, Sample"; None for the paper's."""
    epsilon, _, method = column.removeprefix("ε = ").partition(", ")
    if epsilon == "2":
        return "all-2"
    return None if method == "paper" else f"{method.lower()}-{number_of_class}-at-{epsilon}"


def classes(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        which, what = row[0].removeprefix("all but "), "others" if "all" in row[0] else "class"
        quantity, wanted = f"{what}_accuracy[{which}]", {}
        for at, column in enumerate(header[1:], start=1):
            if column.endswith("paper"):
                cell = class_cell(column.replace("paper", "Sample"), which)
                printed = next(one for one in PAPER[table]["cells"][cell] if one["quantity"] == quantity)
                wanted[at] = [printed["mean"], printed["sd"]]
            elif found := scores(table, class_cell(column, which), quantity):
                wanted[at] = [found[0]]
        yield row, wanted


def moved(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    def accuracy(cell: str) -> Any:
        found = runs(table, cell)
        return np.divide(*np.array(found[0]["per_class"]).T) * 100 if found else None

    before = accuracy("all-2")
    for row in rows:
        wanted = {}
        for at, column in enumerate(header[1:], start=1):
            method, epsilon = column.split(", ε = ")
            after = accuracy(f"{method.lower()}-{row[0]}-at-{epsilon}")
            if after is not None:
                change = after - before
                wanted[at] = [change[int(row[0])], np.delete(change, int(row[0])).mean()]
        yield row, wanted


def balance(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        if row[0] in titles(table):
            cell = titles(table)[row[0]]
            found = runs(table, cell)
            wanted: Numbers = {12: [len(found), seeds_of(table, cell)]}
            if found:
                each = np.mean([[100 * hit / of for hit, of in line["per_class"]] for line in found.values()], axis=0)
                wanted |= {n + 1: [one] for n, one in enumerate([*each, np.ptp(each)])}
            yield row, wanted
        elif row[0].endswith(": paper"):
            cell = next(name for title, name in titles(table).items() if title.endswith(row[0].removesuffix(": paper")))
            yield row, {n + 1: [one["mean"]] for n, one in enumerate(PAPER[table]["cells"][cell])}
        else:
            yield row, {int(n) + 1: [e] for n, e in settings_of(table, "cnn-sample")["class_epsilon"].items()}


# -- membership ----------------------------------------------------------------------------------------------------


def arm(table: str, title: str) -> dict[str, Any]:
    return runs(table, titles(table)[title.removesuffix(" (placebo)")])[0]


def over(values: Any) -> list[float]:
    """Mean over targets and its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return [np.mean(values), np.mean(values) - half, np.mean(values) + half]


def effect(table: str, line: dict[str, Any], attack: str) -> list[float]:
    """The difference of the groups by target, minus the mean of both placebos."""
    lines = [line, *(runs(table, plain)[0] for plain in ("dpsgd-10", "dpsgd-20"))]
    own, *placebos = (np.subtract(each["target_auc"][attack][1], each["target_auc"][attack][0]) for each in lines)
    return over(own - np.mean(placebos, axis=0))


def aucs(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row, group in zip(rows, [0, 1] * len(rows), strict=False):
        if "**not run**" in row:
            printed = PAPER[table].get("cells", {}).get(titles(table)[row[0]])
            yield row, {2: [one["mean"] for one in printed[:2]]} if printed and header[2] == "paper's AUC" else {}
            continue
        line, first, second = arm(table, row[0]), *settings_of(table, titles(table)[row[0]])["attacks"][:2]
        found = line["found"][first][group]
        wanted: list[Any] = [line["auc"][attack][group][:3] for attack in (first, second)]
        wanted += [[line["certified_auc"][group]], [100 * line["share"][first][group]]]
        for at in found:
            wanted += [[100 * one for one in at[1:4]], [100 * at[4]]]
        wanted += [[line["accuracy"]], [line["shadows"], line["settings"]["shadows"]]]
        yield row, dict(enumerate(wanted, start=len(header) - len(wanted)))


def groups(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        line, attack = arm(table, row[0]), row[1]
        one = line["difference"][attack]
        wanted: Numbers = {2: one["auc"], 4: one["of_others"], 5: [100 * one["ordered"]], 6: [one["p"]]}
        yield row, wanted | ({3: effect(table, line, attack)} if "placebo" not in row[0] else {})


def against(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        group, attack = int(row[1] == "20"), row[2]
        two = (arm(table, row[0]), runs(table, f"dpsgd-{row[1]}")[0])
        yield row, {3: over(np.subtract(*(line["target_auc"][attack][group] for line in two)))}


def beside_the_paper(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    models = {PAPER[name]["measured_on"]["*"]: name for name in ("lira_cifar10", "lira_digits", "lira_mnist")}
    for row in rows:
        found = [runs(models[column.removeprefix("ours: ")], row[0].lower())[0] for column in header[2:]]
        yield row, {n: [group[0] for group in line["auc"]["lira-shrunk"]] for n, line in enumerate(found, start=2)}


def attacks(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    line = runs(table, "sample")[0]
    for row in rows:
        auc, one = line["auc"][row[0]], line["difference"][row[0]]["auc"]
        yield row, {1: auc[0][:3], 2: auc[1][:3], 3: one, 4: effect(table, line, row[0]) if row[4] else []}


def students_test(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    targets = runs(table, "sample")[0]["paper_test"]["lira-raw"]["targets"]
    for row, (t, p) in zip(rows, targets, strict=True):
        yield row, {3: [t], 4: [float(f"{p:.2g}")]}


def tests_of_all(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        test = arm(table, row[0])["paper_test"][row[1]]
        yield row, {2: test["quantiles"], 3: [100 * test["significant"]], 4: [100 * test["members_only"]]}


# -- the protocol --------------------------------------------------------------------------------------------------


def chosen(table: str) -> dict[tuple[str, str], tuple[float, dict[str, Any], dict[int, float]]]:
    """(method, half) -> validation accuracy of its best finalist, the settings of that, and its test accuracies."""
    scored: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    tested: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for line in (line for line in LINES if line["table"] == table):
        method, half, *trial = line["cell"].split("-")
        if trial:
            scored[method, half][trial[0]].append(line)
        else:
            tested[method, half][line["seed"]] = 100 * line["accuracy"]
    best = {}
    for which, trials in scored.items():
        most = max(map(len, trials.values()))
        ranked = sorted(trials.values(), key=lambda t: -t[0]["accuracy"])  # of equal means, the better trial
        means = [(fmean([100 * one["accuracy"] for one in t]), t[0]) for t in ranked if len(t) == most]
        mean, line = max(means, key=lambda pair: pair[0])
        best[which] = mean, line["settings"], tested[which]
    return best


METHODS = {"DP-SGD, strictest ε": "dpsgd", "E.1": "exclude", "Sample": "sample", "Scale": "scale"}


def protocol(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    found = chosen(table)
    halves = {"best without momentum": "without", "best with momentum": "with"}
    bests = {}
    for name, method in METHODS.items():
        ranked = [value for (which, _), value in found.items() if which == method and value[2]]
        bests[name] = max(reversed(ranked), key=lambda value: value[0])[2] if ranked else {}  # the last of equal ones
    beside = tomllib.loads((HERE / "protocol.toml").read_text(encoding="utf-8"))[table.removeprefix("protocol_")]
    for row in rows:
        wanted: Numbers = {}
        for at, column in enumerate(header[1:-1], start=1):
            values = bests[row[0]]
            if column in halves:
                values = found.get((METHODS[row[0]], halves[column]), (0, {}, {}))[2]
            if column == "settings of before":
                where = beside.get("beside", {}).get(METHODS[row[0]])
                values = current(*where.split()) if where else {}
            wanted |= {at: spread(list(values.values()))} if values else {}
        ours, plain = bests[row[0]], next(iter(bests.values()))
        yield row, wanted | ({len(header) - 1: gain(ours, plain)} if row[-1] else {})


def current(table: str, cell: str) -> dict[int, float]:
    """Scores of runs with the newest coins and noise."""
    newest = max(line.get("draws_version", 1) for line in LINES)
    found = {seed: line for seed, line in runs(table, cell).items() if line.get("draws_version", 1) == newest}
    return {seed: number(line, "accuracy") for seed, line in found.items()}


def settings_chosen(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    found = chosen(table)
    for row in rows:
        settings = found[METHODS[row[0]], row[1]][1]
        yield row, {at: [settings[key]] for at, key in enumerate(header) if at > 1}


# -- the front page ------------------------------------------------------------------------------------------------


def table_2(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    for row in rows:
        data, setup = re.split(r",\s", row[0].lower())
        plain, sample, scale = (f"{data}-{name}" for name in ("dpsgd", f"sample-{setup}", f"scale-{setup}"))
        if row[1] == "paper":
            one, two, three = (PAPER["table_2"]["cells"][cell][0] for cell in (plain, sample, scale))
            gains = [[other["mean"] - one["mean"]] for other in (two, three)]
            wanted = [[each["mean"], each["sd"]] for each in (one, two, three)]
            yield row, {2: wanted[0], 3: wanted[1], 4: gains[0], 5: wanted[2], 6: gains[1], 7: [one["trials"]]}
            continue
        found = [scores("table_2", cell) for cell in (plain, sample, scale)]
        counts = [len(each) for each in found]
        wanted = {7: counts if len(set(counts)) > 1 else counts[:1]}
        for at, each in zip((2, 3, 5), found, strict=True):
            wanted |= {at: spread(list(each.values()))} if each else {}
        yield row, wanted | {at: gain(each, found[0]) for at, each in zip((4, 6), found[1:], strict=True)}


def scorecard(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    def means_of(table: str, other: str, *cells_of: str, what: str = "accuracy") -> list[float]:
        return [gain(scores(table, cell, what), scores(table, other, what))[0] for cell in cells_of]

    def gap(cell: str) -> float:
        each = [[100 * hit / of for hit, of in line["per_class"]] for line in runs("class_balance", cell).values()]
        return float(np.ptp(np.mean(each, axis=0)))

    bound, plain, *own = (
        np.mean(list(scores("figure_advantage", cell).values()))
        for cell in ("mnist-dpsgd-3", "mnist-dpsgd", "mnist-sample-a", "mnist-sample-b")
    )
    digits = {name: runs("lira_digits", name)[0] for name in ("sample", "dpsgd-20")}
    two = [line["target_auc"]["lira-shrunk"][1] for line in digits.values()]
    ours = [
        means_of("table_2", "mnist-dpsgd", "mnist-sample-a", "mnist-scale-a"),
        means_of("table_2", "mnist-dpsgd", "mnist-sample-b", "mnist-scale-b"),
        means_of("table_2", "cifar10-dpsgd", "cifar10-sample-a", "cifar10-scale-a"),
        means_of("table_untuned", "cifar10-dpsgd", "cifar10-sample-a", "cifar10-scale-a"),
        [100 * (each - plain) / (bound - plain) for each in own],
        [means_of("modalities", f"{row}-dpsgd", f"{row}-scale")[0] for row in ("imdb-embedding", "lstm-by-row")],
        [group[0] for group in digits["sample"]["auc"]["lira-shrunk"]],
        [np.mean(np.subtract(*two))],
        means_of("individual_accounting", "full-filter", "full-assigned"),
        None, None,
        means_of("groups_100", "mnist-dpsgd", "mnist-sample-100", "mnist-scale-100"),
        means_of("per_class", "all-2", "sample-0-at-3", "sample-0-at-1", what="class_accuracy[0]"),
        [gap("features-all-3"), gap("features-sample")],
        means_of("pate", "weighting-a", "sgd-sample-a"),
        means_of("mix", "mnist-scale-a", "mnist-sample-a"),
        means_of("convergence", "mnist-dpsgd-100", "mnist-sample", what="group_accuracy@1"),
        [number(runs("runtime_training", "cifar10")[0], f"ratio[{method}]") for method in ("sample", "scale")],
        [means_of("baselines", f"mnist-{cell}-a", "mnist-sample-a")[0] for cell in ("exclude-short", "sequential")],
    ]  # fmt: skip
    for row, found in zip(rows, ours, strict=True):
        yield row, {} if found is None else {2: found}


def banded(table: str, header: Row, rows: list[Row]) -> Iterator[tuple[Row, Numbers]]:
    found = json.loads((HERE / "results" / "banded.json").read_text(encoding="utf-8"))
    by_run = {f"{run['data']}, ε = {run['tiers']}": run for run in found["runs"]}
    for row in rows:
        wanted: Numbers = {}
        name, *rest = row[0].lower().split(", ")
        if header[0] == "data, batch":
            for column, title in enumerate(header[1:], 1):
                chosen = {"data": name, "batch": int(rest[0])} | dict(
                    zip(("epochs", "epsilon"), map(float, re.findall(r"[\d.]+", title)), strict=True)
                )
                (ratios,) = (each["ratios"] for each in found["errors"] if chosen.items() <= each.items())
                bands = sorted((ratio, int(count)) for count, ratio in ratios.items() if count != "1")
                wanted[column] = bands[0]
        elif header[0] == "data, budgets":
            run = by_run[f"{name}, {rest[0]}"]
            tests = [dict(enumerate(run["chosen"][noise]["test"])) for noise in ("independent", "banded")]
            least = [
                min(trial["error"] for trial in run["trials"][noise] if trial["momentum"] == 0)
                for noise in ("independent", "banded")
            ]
            wanted = {1 + at: spread(list(each.values())) for at, each in enumerate(tests)}
            wanted |= {3: gain(tests[1], tests[0]), 4: [least[1] / least[0]]}
        else:
            trials = by_run[f"{name}, {rest[0]}"]["trials"][rest[1]]
            best = max((trial for trial in trials if "final" in trial), key=lambda trial: trial["final"])
            records = {"mnist": 60_000, "cifar10": 50_000, "imdb": 25_000}[name]
            steps = round(4 * records / best["batch"])
            lr = best["travel"] * (1 - best["momentum"]) / (0.1 * steps)
            shown = [best["batch"], best["bands"], best["momentum"], steps, float(f"{lr:.3g}")]
            wanted = {column: [value] for column, value in enumerate(shown, 1)}
        yield row, wanted


# -- all -----------------------------------------------------------------------------------------------------------

#: The first columns of a table -> its numbers.
KINDS: dict[tuple[str, ...], Callable[..., Iterator[tuple[Row, Numbers]]]] = {
    ("data, batch",): banded,
    ("data, budgets",): banded,
    ("settings that were chosen", "batch"): banded,
    ("cell", "paper", "ours"): compared,
    ("cell", "number", "paper"): compared,
    ("what", "cell", "minus"): paired,
    ("cell", "momentum 0.5"): beside,
    ("cell", "accountant rdp"): beside,
    ("cell", "convention authors-code"): beside,
    ("cell", "better at momentum"): best,
    ("two models on one budget",): of_parts(
        *(lambda found, run=run: [np.mean([100 * line["accuracies"][run] for line in found])] for run in (0, 1)),
        lambda found: [len(found)],
    ),
    ("part of the own ε spent",): of_parts(
        *(lambda found, at=at: [np.mean([line["part_spent"][at] for line in found])] for at in (0, 1, 2)),
        means("used_up", 100),
        lambda found: [max(line["largest_part"] for line in found)],
    ),
    ("exact costs",): of_parts(
        weights, lambda found: [found[0]["noise"]], means("labels_right", 100), students, means("spent")
    ),
    ("as published",): of_parts(
        means("steps"), means("labels_right", 100), students, means("data_dependent"), means("exact")
    ),
    ("weights of ε = 1 / 2 / 3",): code_weights,
    ("data", "ε of n copies"): copies,
    ("class", "ε = 3, paper"): classes,
    ("class", "ε = 3, Sample"): classes,
    ("class", "Sample, ε = 3"): moved,
    ("class", "0"): balance,
    ("arm", "ε", "attack"): against,
    ("arm", "ε"): aucs,
    ("arm", "attack", "AUC at 20 − at 10"): groups,
    ("arm", "attack", "t, 5 / 50 / 95 %"): tests_of_all,
    ("attack",): attacks,
    ("target",): students_test,
    ("AUC at ε = 10 / 20",): beside_the_paper,
    ("data, setup",): table_2,
    ("the paper's claim",): scorecard,
    ("settings that were chosen",): settings_chosen,
    ("",): protocol,
}
#: Tables of words, of settings, or of costs; and the errata, which `python -m experiments.errata` computes.
WORDS = ("cells", "in the paper", "tables", "figures", "claims in the text", "where", "row")


def digits_of(text: str) -> list[tuple[float, float]]:
    """The numbers of a text, and half a unit of the last digit of each."""
    found = re.findall(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", re.sub(r"^÷ ", "", text))
    numbers = []
    for one in found:
        plain = one.replace("−", "-").replace(",", "").lstrip("+")
        mantissa, _, exponent = plain.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        numbers.append((float(plain), 0.501 * unit))
    return numbers


def agrees(text: str, wanted: Any) -> bool:
    shown = digits_of(text)
    return len(shown) == len(list(wanted)) and all(
        abs(value - float(ours)) <= half for (value, half), ours in zip(shown, wanted, strict=True)
    )


def main() -> int:
    checked, wrong = defaultdict(int), []
    for table, heading, header, rows in pages():
        if header[0] in WORDS:
            continue
        kinds = [kind for columns, kind in KINDS.items() if tuple(header[: len(columns)]) == columns]
        if table == "visits":
            kinds = [lambda *given, heading=heading: visits(*given, heading)]
        if not kinds:
            wrong.append(f"{table}: no numbers for a table with the columns {header}")
            continue
        for row, wanted in kinds[0](table, header, rows):
            for column, numbers in wanted.items():
                checked[table] += 1
                if not agrees(row[column], numbers):
                    wrong.append(
                        f"{table}, {heading}: {row[0]}, {header[column]}: {row[column]} is not {list(numbers)}"
                    )
    for table, count in checked.items():
        print(f"{table or 'front page':24} {count:5} cells")
    print(f"{sum(checked.values())} cells compared, {len(wrong)} differ")
    print("\n".join(wrong))
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
