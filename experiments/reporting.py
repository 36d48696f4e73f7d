"""docs/results.md and docs/results-figures.md: the paper's numbers beside ours, and the cells that were not run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from . import alternatives, balance, per_class, texts, visits_page
from .comparing import PAPER_PRECISION, Compared, Expected, expected, runs_of, value, verdict
from .figures import draw
from .individual_accounting import page as individual_accounting
from .membership_claims import is_membership
from .membership_figures import draw_membership
from .membership_report import membership_section
from .opening import claims, in_ten_lines
from .pate import page as pate
from .results import Line, finished
from .settings import HERE, Cell, Table, tables

DOCS = HERE.parent / "docs"
#: Parts of the page that are written by hand.
TEXTS = ("why.md", "reading.md", "membership.md", "rerun.md")

#: The order of the page. Other tables come after these.
ORDER = (
    *("table_2", "table_untuned", "figure_advantage", "momentum", "pld", "conventions", "parameters", "consumption"),
    *("groups_100", "mix", "baselines", "convergence", "pate", "individual_accounting", "alternatives"),
    *("runtime_planning", "runtime_training", "fashion_mnist", "features", "modalities", "visits"),
    *("per_class", "per_class_mnist", "per_class_cnn", "class_balance"),
    *("lira_cifar10_cnn", "lira_cifar10", "lira_mnist", "lira_digits"),
)

#: Tables that vary one setting of table_2, and the value of that setting in table_2.
BESIDE: dict[str, dict[str, float | str]] = {
    "momentum": {"momentum": 0.5},
    "pld": {"accountant": "rdp"},
    "conventions": {"convention": "authors-code"},
}

#: Parts that follow the section of one table: (table, finished runs) -> Markdown.
MORE = {
    "individual_accounting": individual_accounting.page,
    "alternatives": alternatives.page,
    "pate": pate.page,
    "modalities": texts.page,
}

#: Tables with a section of their own: (table, the paper's numbers, finished runs) -> Markdown.
SECTIONS = {
    "per_class": per_class.section,
    "per_class_mnist": per_class.section,
    "class_balance": balance.section,
    "visits": visits_page.section,
}


def write(docs: Path = DOCS) -> list[Path]:
    """Render both pages and the figures from all finished runs; returns the pages."""
    every, done = tables(), finished()
    pictures = docs / "assets" / "results"
    captions = draw(every, done, pictures) | draw_membership(in_order(every), done, pictures)
    pages = {"results.md": results_page(every, done), "results-figures.md": figures_page(captions)}
    for name, text in pages.items():
        (docs / name).write_text(text, encoding="utf-8")
    return [docs / name for name in pages]


def in_order(every: Mapping[str, Table]) -> dict[str, Table]:
    """The same tables in the order of ORDER."""
    return {
        name: every[name] for name in sorted(every, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    }


def results_page(every: Mapping[str, Table], done: Mapping[str, Line]) -> str:
    """The page, as Markdown."""
    every = in_order(every)
    theirs = {name: expected(name) for name in every}
    verdicts = {name: [verdict(c, every[name], theirs[name], done) for c in theirs[name].claims] for name in every}
    cells = [cell for table in every.values() for cell in table.cells]
    wanted = {cell.settings.named(seed) for cell in cells for seed in cell.seeds}
    parts = [
        "# The paper's numbers, and ours",
        "Rendered by `python -m experiments report` from `experiments/results/`. Test accuracy in %, mean ± standard "
        f"deviation over seeds; {len(wanted & set(done))} of {len(wanted)} runs are done. p is Welch's test of the "
        "paper's mean against ours. Seeds, hyperparameters and normalisation touch public benchmark data only; on "
        "private data, tuning would cost privacy.",
        in_ten_lines(every, theirs, verdicts, done),
        *claims(every, verdicts, done),
        *((HERE / name).read_text(encoding="utf-8").strip() for name in TEXTS),
        *(
            part
            for name, table in every.items()
            for part in (
                _section(table, theirs[name], done),
                _beside(table, done),
                _best(table, done),
                _more(table, done),
            )
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parameters(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """How many printed parameters are reproduced, in one sentence."""
    rows = [
        (printed, line)
        for cell in table.cells
        for line in runs_of(cell, done).values()
        for printed in theirs.cells[cell.name]
    ]
    odd = sum(bool(printed.contradicts) for printed, _ in rows)
    wrong = sum(not Compared(printed, (value(line, printed.quantity),)).agrees for printed, line in rows)
    return (
        f"{len(rows) - wrong} of {len(rows)} printed numbers come out, to their last digit or to {PAPER_PRECISION:.1%}"
        f", the precision of the paper's searches; {odd} entries contradict the paper itself."
    )


def _section(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """One table of the paper: a row per printed number, and per cell without one."""
    if is_membership(table):
        return membership_section(table, theirs, done)
    if table.name in SECTIONS:
        return SECTIONS[table.name](table, theirs, done)
    parameters = any(row.digits is not None for rows in theirs.cells.values() for row in rows)
    header = ["cell", "", "paper", "ours", "difference", "agrees" if parameters else "p", "seeds"]
    rows = [row for cell in table.cells for row in _rows(cell, theirs, done)]
    note = table.note.strip() + (f" {_parameters(table, theirs, done)}" if parameters else "")
    source = f"`{table.name}` · paper: {theirs.source} · {theirs.unit}"
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *rows)]
    return f"## {table.title}\n\n{source}\n\n{note}\n\n" + "\n".join(f"| {line} |" for line in lines)


def _rows(cell: Cell, theirs: Expected, done: Mapping[str, Line]) -> list[list[str]]:
    runs = runs_of(cell, done)
    missing = [str(seed) for seed in cell.seeds if seed not in runs]
    seeds = f"{len(runs)} of {len(cell.seeds)}"
    if missing:
        seeds += f"; missing: {'seed' if len(missing) == 1 else 'seeds'} {', '.join(missing)}"
    if cell.name not in theirs.cells:
        return [[cell.title, "", theirs.not_printed[cell.name], _unprinted(cell, runs), "", "", seeds]]
    rows = []
    for printed in theirs.cells[cell.name]:
        paper = f"{printed.mean:g}" + (f" ± {printed.sd:g}" if printed.sd is not None else "")
        if not runs:
            rows.append([cell.title, printed.label, paper, "**not run**", "", "", seeds])
            continue
        compared = Compared(printed, tuple(value(line, printed.quantity) for line in runs.values()))
        difference = f"{compared.difference:+.{_digits(compared)}f}"
        if theirs.unit == "seconds":
            difference = f"÷ {printed.mean / compared.mean:,.0f}"
        rows.append([cell.title, printed.label, paper, _spread(compared), difference, _agreement(compared), seeds])
    return rows


def _agreement(compared: Compared) -> str:
    if compared.printed.digits is None:
        return "" if compared.p is None else f"{compared.p:.2g}"
    agrees, odd = "yes" if compared.agrees else "**no**", compared.printed.contradicts
    return f"{agrees}; the paper's entry is inconsistent: {odd}" if odd else agrees


def _unprinted(cell: Cell, runs: Mapping[int, Line]) -> str:
    """Our result for a cell without a printed number."""
    if not runs:
        return "**not run**"
    if all("accuracy" in line for line in runs.values()):
        values = [value(line, "accuracy") for line in runs.values()]
        return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")
    line = next(iter(runs.values()))
    if "ratio" in line:
        return ", ".join(f"{name} {ratio:.3f}" for name, ratio in line["ratio"].items())
    return "ends at " + " / ".join(f"{spent:.4f}" for spent in line["spent"])


def _digits(compared: Compared) -> int:
    if compared.printed.digits is not None:
        return compared.printed.digits + 1
    return 2 if abs(compared.mean) > 10 else 3


def _spread(compared: Compared) -> str:
    digits = _digits(compared)
    return f"{compared.mean:.{digits}f}" + ("" if compared.sd is None else f" ± {compared.sd:.{digits}f}")


def _beside(table: Table, done: Mapping[str, Line]) -> str:
    """Our runs beside our runs of table_2, seed by seed."""
    if table.name not in BESIDE:
        return ""
    here = ", ".join(f"{key} {getattr(table.cells[0].settings, key)}" for key in BESIDE[table.name])
    there = ", ".join(f"{key} {default}" for key, default in BESIDE[table.name].items())
    lines = [f"| cell | {there} | {here} | difference, by seed |", "|---|---|---|---|"]
    for cell in table.cells:
        ours, twin = _scores(cell, done), _scores(cell.but(**BESIDE[table.name]), done)
        common = sorted(set(ours) & set(twin))
        means = [f"{statistics.fmean(s[seed] for seed in common):.2f}" for s in (twin, ours)] if common else ["", ""]
        differences = ", ".join(f"{ours[seed] - twin[seed]:+.2f}" for seed in common) or "**not run**"
        lines.append("| " + " | ".join([cell.title, *means, differences]) + " |")
    return "### Compared with our runs, with the same seeds\n\n" + "\n".join(lines)


def _best(table: Table, done: Mapping[str, Line]) -> str:
    """Each method at the better of two momenta, so that the baseline is tuned as much as the others.

    The means of a row are over the seeds that the method and the baseline both have at both momenta.
    """
    if table.name != "momentum":
        return ""
    lines = ["| cell | better at momentum | there | above DP-SGD at its best | seeds |", "|---|---|---|---|---|"]
    momenta = (0.5, 0.0)
    scores = {cell.name: [_scores(cell.but(momentum=m), done) for m in momenta] for cell in table.cells}
    baseline = scores[table.cells[0].name]
    for cell in table.cells:
        method = scores[cell.name]
        common = sorted(set.intersection(*(set(s) for s in (*method, *baseline))))
        cells = ["", "**not run**", "", "0"]
        if common:
            ours, theirs = ([statistics.fmean(s[seed] for seed in common) for s in both] for both in (method, baseline))
            best, better_at = max(zip(ours, momenta, strict=True))
            gain = "" if method is baseline else f"{best - max(theirs):+.2f}"
            cells = [str(better_at), f"{best:.2f}", gain, str(len(common))]
        lines.append("| " + " | ".join([cell.title, *cells]) + " |")
    return (
        "### Each method at its best momentum\n\nThe better of the two momenta above, chosen by test accuracy. The "
        "larger of two means is slightly optimistic, most if they are close, and on private data the choice costs "
        "privacy. The means of a row are over the seeds that were run for it and for DP-SGD at both momenta.\n\n"
        + "\n".join(lines)
    )


def _more(table: Table, done: Mapping[str, Line]) -> str:
    return MORE[table.name](table, done) if table.name in MORE else ""


def _scores(cell: Cell, done: Mapping[str, Line]) -> dict[int, float]:
    return {seed: value(line, "accuracy") for seed, line in runs_of(cell, done).items()}


def figures_page(captions: Mapping[str, str]) -> str:
    """The page of figures, as Markdown; file name -> caption."""
    parts = ["# The paper's figures, from our runs", "The numbers are in [the tables](results.md)."]
    parts += [f"## {caption}\n\n![{caption}](assets/results/{file})" for file, caption in captions.items()]
    if not captions:
        parts.append("No run that a figure needs is finished yet.")
    return "\n\n".join(parts) + "\n"
