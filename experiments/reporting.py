"""The pages docs/results*.md: the paper's numbers beside ours in the paper's order, and what was not run.

A table is on the page that PAGES names, otherwise on the last one. Its section has the numbers of its items in the
paper ("Table 3"), the text of texts.md under its name, its figures, what was not run, and where its runs come from.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from . import (
    alternatives,
    balance,
    banded_page,
    membership_report,
    opening,
    per_class,
    protocol_page,
    texts,
    visits_page,
)
from .comparing import (
    NETWORK,
    PAPER_PRECISION,
    Compared,
    Expected,
    by_seed,
    expected,
    gained,
    markdown,
    pairs,
    runs_of,
    spread,
    titled,
    value,
    verdict,
)
from .figures import draw, pictures
from .individual_accounting import page as individual_accounting
from .membership_claims import is_membership
from .membership_figures import draw_membership, membership_pictures
from .missing import HEADER, not_run, provenance
from .pate import page as pate
from .results import Line, finished
from .settings import HERE, Cell, Table, tables

DOCS = HERE.parent / "docs"

#: Something of a page that is no table: (all tables, finished runs) -> Markdown.
Part = Callable[[Mapping[str, Table], Mapping[str, Line]], str]

#: page -> its title, and in the paper's order its tables and other parts. A table on no page is on the last one.
PAGES: dict[str, tuple[str, tuple[str | Part, ...]]] = {
    "results-utility": ("Accuracy", ("figure_advantage", "table_2", "modalities", "table_untuned")),
    "results-membership": (
        "Membership inference",
        (membership_report.beside_the_paper, "lira_cifar10_cnn", "lira_mnist_cnn", "lira_cifar10"),
    ),
    "results-membership-linear": ("Membership inference on linear models", ("lira_mnist", "lira_digits")),
    "results-accounting": ("Individual accounting", ("individual_accounting",)),
    "results-parameters": ("Parameters and privacy spent", ("parameters", "consumption")),
    "results-groups": ("Many groups, mixing, convergence", ("groups_100", "mix", "convergence")),
    "results-per-class": ("Budgets per class", ("per_class", "per_class_cnn", "per_class_mnist", "class_balance")),
    "results-baselines": ("Other baselines", ("pate", "baselines", "alternatives")),
    "results-runtime": ("Seconds", ("runtime_planning", "runtime_training")),
    "results-protocol": ("Tuned alike", (protocol_page.page, "momentum")),
    "results-beyond": (
        "Beyond the paper",
        ("pld", "conventions", "features", "fashion_mnist", "visits", banded_page.page),
    ),
}

#: The column beside the page is left to wide tables.
HIDE = "---\nhide: [toc]\n---"

#: Tables that vary one setting of table_2, and the value of that setting in table_2.
BESIDE: dict[str, dict[str, float | str]] = {
    "momentum": {"momentum": 0.5},
    "pld": {"accountant": "rdp"},
    "conventions": {"convention": "authors-code"},
}

#: Tables with numbers of their own kind: (table, the paper's numbers, finished runs) -> Markdown.
BODIES: dict[str, Callable[[Table, Expected, Mapping[str, Line]], str]] = {
    "per_class": per_class.body,
    "per_class_mnist": per_class.body,
    "class_balance": balance.body,
    "visits": visits_page.body,
}

#: Parts that follow the numbers of one table: (table, finished runs) -> Markdown.
MORE: dict[str, Callable[[Table, Mapping[str, Line]], str]] = {
    "individual_accounting": individual_accounting.page,
    "alternatives": alternatives.page,
    "pate": pate.page,
    "modalities": texts.page,
}


def write(docs: Path = DOCS) -> list[Path]:
    """Render all pages and figures from all finished runs; returns the pages."""
    every, done = tables(), finished()
    folder = docs / "assets" / "results"
    draw(every, done, folder)
    draw_membership(every, done, folder)
    made = pages(every, done)
    for name, text in made.items():
        (docs / f"{name}.md").write_text(text, encoding="utf-8")
    return [docs / f"{name}.md" for name in made]


def pages(every: Mapping[str, Table], done: Mapping[str, Line]) -> dict[str, str]:
    """Name -> Markdown of each page."""
    words = _texts()
    placed = {page: [part for part in there if callable(part) or part in every] for page, (_, there) in PAGES.items()}
    named = set(chain.from_iterable(there for _, there in PAGES.values()))
    placed[list(PAGES)[-1]] += [name for name in every if name not in named]
    pages_of = {part: page for page, there in placed.items() for part in there if isinstance(part, str)}
    theirs = {name: expected(name) for name in pages_of}
    verdicts = {name: [verdict(c, every[name], theirs[name], done) for c in theirs[name].claims] for name in pages_of}
    fill = opening.Filled(every, theirs, verdicts, done)
    links = {
        name: f"[{(*theirs[name].items, f'`{name}`')[0]}]({page}.md#{_anchors(every[name], theirs[name])[0]})"
        for name, page in pages_of.items()
    }
    missing = [[links[name], *row] for name in pages_of for row in not_run(every[name], theirs[name], done)]
    made = {
        "results": ["# The paper's numbers, and ours", opening.table_2(every, theirs, done), fill(words["results"])],
        **{
            name: [
                f"# {title}",
                " · ".join(_link(every[part], theirs[part]) for part in placed[name] if not callable(part)),
                words.get(name, ""),
                *(
                    part(every, done) if callable(part) else _section(every[part], theirs[part], words, done)
                    for part in placed[name]
                ),
            ]
            for name, (title, _) in PAGES.items()
        },
        "results-claims": [words["results-claims"], *opening.claims(verdicts, links, done)],
        "results-paper": [
            words["results-paper"],
            markdown(["in the paper", *HEADER], missing),
            fill(words["results-status"]),
        ],
        "results-reading": [fill(words["results-reading"]), words["rerun"]],
        "results-errata": [fill(words["results-errata"])],
    }
    return {name: "\n\n".join(part for part in (HIDE, *parts) if part) + "\n" for name, parts in made.items()}


def _texts() -> dict[str, str]:
    """The texts of texts.md, by the name above each."""
    names_and_texts = re.split(r"^<!-- ([\w-]+) -->\n", (HERE / "texts.md").read_text(encoding="utf-8"), flags=re.M)
    return {name: text.strip() for name, text in zip(names_and_texts[1::2], names_and_texts[2::2], strict=True)}


# -- sections ------------------------------------------------------------------------------------------------------


def _section(table: Table, theirs: Expected, words: Mapping[str, str], done: Mapping[str, Line]) -> str:
    """All of one table: heading, numbers, figures, what was not run, and where the runs come from."""
    anchors = _anchors(table, theirs)
    ran = dict.fromkeys(theirs.model(cell.name) for cell in table.cells if runs_of(cell, done))
    figures = [*pictures(table, done), *membership_pictures(table, done)]
    missing = not_run(table, theirs, done)
    parts = [
        "".join(f'<a id="{anchor}"></a>' for anchor in anchors),
        f"## {', '.join(theirs.items)}{': ' if theirs.items else ''}{table.title}",
        f"`{table.name}` · paper: {theirs.source} · ours: {'; '.join(ran) or 'not run'} · {theirs.unit}",
        table.note.strip(),
        words.get(table.name, ""),
        _body(table, theirs, done),
        *(f"![{caption}](assets/results/{file})\n\n*{caption}*" for file, caption in figures),
        _beside(table, done),
        _best(table, done),
        MORE[table.name](table, done) if table.name in MORE else "",
        "**Not run yet**\n\n" + markdown(HEADER, missing) if missing else "",
        provenance(table, done),
    ]
    return "\n\n".join(part for part in parts if part)


def _anchors(table: Table, theirs: Expected) -> list[str]:
    """The anchors of a section: "table-3" for each of its items in the paper, or the name of the table."""
    return [re.sub(r"[ .]", "-", item.lower()) for item in theirs.items] or [table.name.replace("_", "-")]


def _link(table: Table, theirs: Expected) -> str:
    return f"[{', '.join(theirs.items) or table.title}](#{_anchors(table, theirs)[0]})"


def _body(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    if is_membership(table):
        return membership_report.body(table, theirs, done)
    if table.name in BODIES:
        return BODIES[table.name](table, theirs, done)
    if any(row.digits is not None for rows in theirs.cells.values() for row in rows):
        return _parameters(table, theirs, done)
    labels = any(row.label for rows in theirs.cells.values() for row in rows)
    tests = any(
        row.sd is not None and theirs.model(name) == NETWORK for name, rows in theirs.cells.items() for row in rows
    )
    header = ["cell", *["number"] * labels, "paper", "ours", "difference", *["p"] * tests, "seeds"]
    rows = [row for cell in table.cells for row in _rows(cell, theirs, done, labels, tests)]
    return markdown(header, rows)


def _rows(cell: Cell, theirs: Expected, done: Mapping[str, Line], labels: bool, tests: bool) -> list[list[str]]:
    """One row per printed number; one for a cell without any."""
    runs = runs_of(cell, done)
    seeds = f"{len(runs)} of {len(cell.seeds)}"
    if cell.name not in theirs.cells:
        why = theirs.not_printed.get(cell.name, "not in the paper")
        return [[cell.title, *[""] * labels, why, _unprinted(runs), "", *[""] * tests, seeds]]
    rows = []
    for printed in theirs.cells[cell.name]:
        paper = f"{printed.mean:g}" + (f" ± {printed.sd:g}" if printed.sd is not None else "")
        found = ["**not run**", "", *[""] * tests]
        if runs:
            compared = Compared(printed, tuple(value(line, printed.quantity) for line in runs.values()))
            same = theirs.model(cell.name) == NETWORK
            digits = 2 if abs(compared.mean) > 10 else 3
            half = f" ± {compared.half:.{digits}f}" if same and compared.half else ""
            difference = f"{compared.difference:+.{digits}f}{half}"
            if theirs.unit == "seconds":
                difference = f"÷ {printed.mean / compared.mean:,.0f}"
            p = f"{compared.p:.2g}" if same and compared.p is not None else ""
            found = [spread(compared.values, digits), difference, *[p] * tests]
        rows.append([cell.title, *[printed.label] * labels, paper, *found, seeds])
    return rows


def _unprinted(runs: Mapping[int, Line]) -> str:
    """Our result for a cell without a printed number."""
    if not runs:
        return "**not run**"
    if all("accuracy" in line for line in runs.values()):
        return spread([value(line, "accuracy") for line in runs.values()])
    line = next(iter(runs.values()))
    if "ratio" in line:
        return ", ".join(f"{name} {ratio:.3f}" for name, ratio in line["ratio"].items())
    return "ends at " + " / ".join(f"{spent:.4f}" for spent in line["spent"])


def _parameters(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """A row per printed parameter, and how many come out."""
    rows, right, odd = [], 0, 0
    for cell in table.cells:
        for printed in theirs.cells[cell.name]:
            for line in runs_of(cell, done).values() or [None]:
                row = [cell.title, printed.label, f"{printed.mean:g}", "**not run**", "", ""]
                if line is not None:
                    compared = Compared(printed, (value(line, printed.quantity),))
                    right, odd = right + compared.agrees, odd + bool(printed.contradicts)
                    agrees = "yes" if compared.agrees else f"**no**: {printed.contradicts or ''}"
                    digits = (printed.digits or 0) + 1
                    row[3:] = [f"{compared.mean:.{digits}f}", f"{compared.difference:+.{digits}f}", agrees]
                rows.append(row)
    return (
        f"{right} of {len(rows)} printed numbers come out, to their last digit or to {PAPER_PRECISION:.1%}, the "
        f"precision of the paper's searches; {odd} entries contradict the paper itself ([how](results-errata.md)).\n\n"
        + markdown(["cell", "number", "paper", "ours", "difference", "agrees"], rows)
    )


def _beside(table: Table, done: Mapping[str, Line]) -> str:
    """Our runs beside our runs of table_2, seed by seed."""
    if table.name not in BESIDE:
        return ""
    here = ", ".join(f"{key} {getattr(table.cells[0].settings, key)}" for key in BESIDE[table.name])
    there = ", ".join(f"{key} {default}" for key, default in BESIDE[table.name].items())
    rows = []
    for cell in table.cells:
        twin = cell.but(**BESIDE[table.name])
        ours, before = by_seed(cell, done), by_seed(twin, done)
        common = sorted(set(ours) & set(before))
        means = [f"{statistics.fmean(s[seed] for seed in common):.2f}" for s in (before, ours)] if common else ["", ""]
        found = gained(pairs(cell, twin, done)) if common else "**not run**"
        rows.append([cell.title, *means, found, str(len(common))])
    return titled("Compared with our runs, with the same seeds", ["cell", there, here, "difference", "seeds"], rows)


def _best(table: Table, done: Mapping[str, Line]) -> str:
    """Each method at the better of two momenta, so that the baseline is tuned as much as the others.

    The means of a row are over the seeds that the method and the baseline both have at both momenta.
    """
    if table.name != "momentum":
        return ""
    momenta, rows = (0.5, 0.0), []
    scores = {cell.name: [by_seed(cell.but(momentum=m), done) for m in momenta] for cell in table.cells}
    baseline = scores[table.cells[0].name]
    for cell in table.cells:
        method = scores[cell.name]
        common = sorted(set.intersection(*(set(s) for s in (*method, *baseline))))
        cells = ["", "**not run**", "", "0"]
        if common:
            ours, theirs = ([statistics.fmean(s[seed] for seed in common) for s in both] for both in (method, baseline))
            best, better_at = max(zip(ours, momenta, strict=True))
            one, two = method[ours.index(best)], baseline[theirs.index(max(theirs))]
            gain = "" if method is baseline else gained([one[seed] - two[seed] for seed in common])
            cells = [str(better_at), f"{best:.2f}", gain, str(len(common))]
        rows.append([cell.title, *cells])
    return titled(
        "Each method at its best momentum\n\nThe better of the two momenta above, chosen by test accuracy, at one "
        "learning rate. The larger of two means is slightly optimistic, most if they are close, and on private data "
        "the choice costs privacy. The means of a row are over the seeds that were run for it and for DP-SGD at both "
        "momenta.",
        ["cell", "better at momentum", "there", "above DP-SGD at its best", "seeds"],
        rows,
    )
