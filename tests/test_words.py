"""Figures and names on the pages, each read again from its source: plans, results, code."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import re
import shlex
import statistics
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import epsilons
from epsilons import Budgets, Plan, Recipe, SampledGaussian, plan, planning, run_folder
from epsilons.accounting import rdp
from epsilons.planning import guarantee
from experiments import opening, reporting
from experiments.comparing import expected, ledger, runs_of, value, verdict
from experiments.results import finished
from experiments.running import missing
from experiments.settings import tables
from experiments.strategies import one_after_another
from pages import PAGES, ROOT
from test_imports import imported_modules, source_files

SOURCE = Path(epsilons.__file__).parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SHARES = {"A": {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, "B": {1.0: 0.54, 2.0: 0.37, 3.0: 0.09}}

#: The paper's settings, by its text: records, recipe.
SETTINGS = {
    "MNIST": (60_000, Recipe(steps=9_375, batch_size=512, clip_norm=0.2)),
    "SVHN": (73_257, Recipe(steps=2_146, batch_size=1_024, clip_norm=0.9)),
    "CIFAR-10": (50_000, Recipe(steps=1_465, batch_size=1_024, clip_norm=0.4)),
}
EVERY = [(data, setup) for data in SETTINGS for setup in SHARES]


@functools.cache
def text_of(page: str) -> str:
    """A page's text with every run of white space as one space, so that lines may break anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def assert_page_says(page: str, *sentences: str) -> None:
    assert [sentence for sentence in sentences if sentence not in text_of(page)] == []


def section(page: str, heading: str) -> str:
    """The text under this heading, up to the next heading of the same or a higher rank."""
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(rf"^(#+) {re.escape(heading)}$\n(.*?)(?=^#{{1,2}} |\Z)", text, flags=re.M | re.S)
    assert match, f"{page} has no section {heading!r}"
    return match[2]


def rows(text: str, cells: int | None = None) -> dict[str, list[str]]:
    """The table rows of a text, by their first cell, without rules; only those with so many cells, if given."""
    lines = [line.strip()[1:-1] for line in text.splitlines() if line.lstrip().startswith("|")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    return {row[0]: row[1:] for row in split if cells in (None, len(row)) and not set("".join(row)) <= set("-: ")}


@functools.cache
def paper_plan(data: str, setup: str, strategy: str, accountant: str = "pld") -> Plan:
    records, recipe = SETTINGS[data]
    return plan(Budgets.from_shares(SHARES[setup], records=records, delta=1e-5), recipe, strategy, accountant)


# -- installing ------------------------------------------------------------------------------------------------------

OPTIONAL = {requirement for extra in SETUP["project"]["optional-dependencies"].values() for requirement in extra}
MODULES = [*SOURCE.rglob("*.py")]
EXPERIMENTS = [path for kind in ("*.py", "*.md") for path in (ROOT / "experiments").rglob(kind)]


def test_no_text_says_to_install_the_package_from_an_index():
    warned = 0
    for path in [*PAGES, *MODULES, *(ROOT / "examples").rglob("*"), *EXPERIMENTS]:
        text = " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""
        for match in re.finditer(r"pip install [\"']?epsilons", text):
            assert text[: match.start()].endswith("Do not run `"), f"{path}: {text[match.start() :][:60]}"
            warned += 1
    assert warned >= 2


def test_what_messages_say_to_install_is_what_an_extra_names():
    named = [name for path in MODULES for name in re.findall(r"pip install \"([^\"]+)\"", path.read_text("utf-8"))]
    assert len(named) >= 3
    assert set(named) <= OPTIONAL


def test_the_wheel_has_the_name_that_the_readme_states():
    assert_page_says("README.md", f"`dist/epsilons-{epsilons.__version__}-py3-none-any.whl`")
    assert SETUP["project"]["name"] == "epsilons"


def module_of(requirement: str) -> str:
    name = re.match(r"[\w-]+", requirement)[0]
    return {"scikit-learn": "sklearn", "pillow": "PIL"}.get(name, name)


def test_the_package_requires_what_it_imports_and_nothing_else():
    names = {name for path, code in source_files().items() for name in imported_modules(code, path)}
    imported = {name.split(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, "epsilons"}
    core = {module_of(requirement) for requirement in SETUP["project"]["dependencies"]}
    assert core <= imported, f"required and never imported: {core - imported}"
    loaded = {"markupsafe", "IPython"}  # markupsafe comes with jinja2; IPython is imported only in a notebook
    assert imported <= core | {module_of(requirement) for requirement in OPTIONAL} | loaded


def test_dp_accounting_is_there_for_the_tests_alone():
    name = "dp-accounting"
    assert any(one.startswith(name) for one in SETUP["dependency-groups"]["dev"])
    assert not any(one.startswith(name) for one in [*SETUP["project"]["dependencies"], *OPTIONAL])
    assert re.search(rf"^{name}==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    assert name not in run_folder.versions()


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_class_that_a_module_s_docstring_lists_is_where_it_says():
    """In this module, or in the one beside it that the line names."""
    listed = 0
    for path in SOURCE.rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name, beside in re.findall(r"^[ │├└─]*([A-Z][a-z]\w+)  +(?:`(\w+)`: )?\S", docstring, flags=re.M):
            where = path.with_name(beside) if beside else path.with_suffix("")
            module = importlib.import_module(".".join(["epsilons", *where.relative_to(SOURCE).parts]))
            assert hasattr(module, name), f"{path}: {name}"
            listed += 1
    assert listed >= 18


def named_in(column: int) -> set[str]:
    """All code in this column of the tables of docs/naming.md, without the first column."""
    tables = [rows(section("docs/naming.md", heading)) for heading in ("Quantities", "Algorithms", "Training")]
    return {name for table in tables for row in table.values() for name in re.findall(r"`([^`]+)`", row[column])}


def test_the_names_of_opacus_that_the_page_of_names_uses_are_in_opacus():
    import opacus

    code = "".join(path.read_text(encoding="utf-8") for path in Path(opacus.__file__).parent.rglob("*.py"))
    words = {word for name in named_in(-2) for word in re.findall(r"\b[A-Za-z_]\w+", name)}
    assert len(words) >= 20
    assert [word for word in words if not re.search(rf"\b{word}\b", code)] == []


def test_the_names_of_this_package_that_the_page_of_names_uses_exist():
    names = [re.match(r"(Budgets|Plan|Phase|Recipe|Private|Performance)\b[.(](\w+)", n) for n in named_in(0)]
    assert len(names) >= 20
    for owner, name in (match.groups() for match in names if match):
        kind = getattr(epsilons, owner)
        assert hasattr(kind, name) or name in inspect.signature(kind).parameters, f"{owner}.{name}"


def test_a_file_that_a_page_names_is_there():
    for page in PAGES:
        files = re.findall(r"`((?:\w+/)+(?!x\.)\w+\.py)`", page.read_text(encoding="utf-8"))
        assert [file for file in files if not any((place / file).exists() for place in (ROOT, SOURCE))] == [], page


def test_the_guarantee_on_the_page_of_concepts_is_the_one_that_plans_print():
    page = re.sub(r"\*\*|\s*>\s", " ", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
    for line in guarantee.words("pld", shares_declared=False, steps=1).splitlines()[:4]:
        assert line in " ".join(page.split())


def test_the_pages_say_how_often_the_default_engine_compares_with_autograd():
    from epsilons.training.clipping.ghost.ghost import AUDIT_EVERY

    for page in ("docs/faq.md", "docs/engine.md"):
        assert_page_says(page, f"he first physical batch of each pattern of operators, and every {AUDIT_EVERY}th")


# -- accountants -----------------------------------------------------------------------------------------------------


def test_the_orders_of_rdp_and_the_least_epsilon_that_they_reach():
    orders = rdp.OPACUS_ORDERS
    least = float(rdp.converted(np.zeros((1, len(orders))), np.array([1e-5]), np.array(orders))[0])
    assert_page_says(
        "docs/concepts.md",
        f"Opacus' {len(orders)} orders, from {min(orders):g} to {max(orders):g}. The paper used RDP, too, but its code "
        f"searches orders from 1.001 to 10,000, which reaches budgets below {least:.3f} (at δ = 1e-5)",
    )


def noise_saved(strategy: str, data: str, setup: str) -> np.ndarray:
    """(groups,) % by which PLD's noise multipliers are below RDP's."""
    pld, by_rdp = (paper_plan(data, setup, strategy, name).noise_multiplier for name in ("pld", "rdp"))
    return 100 * (1 - pld / by_rdp)


def shared_noise_saved(strategy: str, data: str, setup: str) -> float:
    pld, by_rdp = (paper_plan(data, setup, strategy, name).noise_std for name in ("pld", "rdp"))
    return 100 * (1 - pld / by_rdp)


def test_how_much_less_noise_pld_needs():
    single = [noise_saved("scale", *setting) for setting in EVERY]
    strictest = [float(groups[0]) for groups in single]
    scale, sample = ([shared_noise_saved(name, *setting) for setting in EVERY] for name in ("scale", "sample"))
    assert_page_says(
        "docs/paper.md",
        f"In the paper's settings it needs less noise than RDP: {min(strictest):.1f} to {max(strictest):.1f} % for "
        f"everyone at ε = 1, {np.min(single):.1f} to {np.max(single):.1f} % for single budgets under Scale, and of the "
        f"noise that all share {min(scale):.1f} to {max(scale):.1f} % under Scale and {min(sample):.1f} to "
        f"{max(sample):.1f} % under Sample",
    )
    assert_page_says("docs/pitfalls.md", f"moves the noise at ε = 1 by {strictest[EVERY.index(('MNIST', 'A'))]:.1f} %")


def test_how_much_less_noise_pld_needs_in_the_runs_of_that_table():
    table, less = tables()["pld"], {}
    for settings in (cell.settings for cell in table.cells):
        shares = {float(level): share for level, share in settings.shares.items()}
        budgets = Budgets.from_shares(shares, records=60_000, delta=settings.delta)
        stds = [plan(budgets, settings.recipe(60_000), settings.strategy, name).noise_std for name in ("pld", "rdp")]
        less[settings.strategy] = f"{100 * (1 - stds[0] / stds[1]):.1f}"
    assert_page_says(
        "docs/results.md",
        f"less of it: {less['uniform']} % for DP-SGD at ε = 1, {less['scale']} and {less['sample']} % for Scale and "
        "Sample in setup A.",
    )
    note = f"less noise: {less['uniform']} % for DP-SGD, {less['scale']} % for Scale, {less['sample']} % for Sample."
    assert note in table.note


def test_the_table_of_what_pld_saves_is_what_the_plans_give():
    table = rows(section("docs/planning.md", "PLD on whole grids"))
    for data, setup in EVERY:
        scale = [paper_plan(data, setup, "scale", name).noise_multiplier for name in ("rdp", "pld")]
        shared = [paper_plan(data, setup, "sample", name).noise_multiplier[0] for name in ("rdp", "pld")]
        cells = [" ".join(f"{number:.3f}" for number in numbers) for numbers in scale]
        cells.append(" ".join(f"{number:.1f}" for number in noise_saved("scale", data, setup)))
        cells.append(f"{shared[0]:.3f} → {shared[1]:.3f} ({shared_noise_saved('sample', data, setup):.1f} %)")
        assert table[f"{data} {setup}"] == cells


# -- the paper's algorithms and parameters ---------------------------------------------------------------------------

PAPER = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def test_the_arithmetic_mean_s_clip_norms_in_the_paper_s_settings():
    means = []
    for data, setup in EVERY:
        plan = paper_plan(data, setup, "scale-arithmetic", "rdp")
        means.append(float(plan.counts @ plan.clip_norm) / plan.records / SETTINGS[data][1].clip_norm)
    assert_page_says("docs/paper.md", f"is then {min(means):.2f} to {max(means):.2f} times c")


def test_what_the_paper_s_scale_rows_spend_if_they_are_used_as_printed(golden):
    table, checked = rows(PAPER, cells=3), 0
    for setting in golden["published"]:
        if setting["dataset"] == "MNIST":
            continue  # test_plans.py
        printed, used = setting["published"], setting["computed_rdp_reproduction"]
        clip_norm = {"SVHN": 0.9, "CIFAR10": 0.4}[setting["dataset"]]
        spent = [
            rdp.epsilon([SampledGaussian(used["q"], printed["ss"] * clip_norm / own, used["steps"])], 1e-5)
            for own in printed["c"]
        ]
        row = table[setting["dataset"].replace("CIFAR10", "CIFAR-10")]
        assert row[0 if setting["weights"][0] == 0.34 else 1] == " / ".join(f"{epsilon:.3f}" for epsilon in spent)
        checked += 1
    assert checked == 4


def test_the_paper_s_e_2_is_the_experiments_rule_and_not_the_planner_s():
    ((name, row),) = [(name, row) for name, row in rows(PAPER).items() if name.startswith("Baseline E.2")]
    ours, planners = row[-1].split(";")
    assert "every group at the noise multiplier 2.5, for as many steps as its budget allows" in name
    assert "`experiments/strategies.py`" in ours
    assert "`planning/strategies/sequential.py` has another rule" in planners
    budgets, recipe = Budgets([1.0] * 500 + [3.0] * 300), Recipe(steps=101, batch_size=50, clip_norm=1.0)
    paper, own = plan(budgets, recipe, one_after_another, "rdp"), plan(budgets, recipe, "sequential", "rdp")
    assert [float(phase.noise_std) for phase in paper.phases] == [2.5, 2.5]
    assert paper.phases[0].steps < paper.phases[1].steps
    assert [phase.steps for phase in own.phases] == [50, 51]
    assert own.phases[0].noise_std > own.phases[1].noise_std


# -- results ---------------------------------------------------------------------------------------------------------

DONE = finished()
METHODS = ["mnist-sample-a", "mnist-scale-a", "mnist-sample-b", "mnist-scale-b"]


def scores(cell) -> dict[int, float]:
    return {seed: value(line, "accuracy") for seed, line in runs_of(cell, DONE).items()}


def table_scores(table: str, cell: str) -> dict[int, float]:
    return scores(tables()[table].by_name[cell])


def mean(table: str, cell: str) -> float:
    return statistics.fmean(table_scores(table, cell).values())


def gains(table: str, cell: str, over: str) -> list[float]:
    ours, theirs = table_scores(table, cell), table_scores(table, over)
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


def test_the_readme_s_sentence_on_mnist():
    pairs = [gain for cell in METHODS for gain in gains("table_2", cell, "mnist-dpsgd")]
    assert min(pairs) > 0
    assert_page_says("README.md", f"both methods beat DP-SGD in all {len(pairs)} pairs")
    for cell in ("mnist-dpsgd", *METHODS):
        assert abs(mean("table_2", cell) - expected("table_2").cells[cell][0].mean) < 0.1
        assert len(table_scores("table_2", cell)) == 5


def test_how_much_of_the_gain_on_mnist_is_momentum():
    """With each method at its better momentum, over the seeds that all have; before, at 0.5 for all."""
    table = tables()["momentum"]
    at = {c.name: {m: scores(c.but(momentum=m)) for m in (0.0, 0.5)} for c in table.cells if c.name != "mnist-dpsgd-3"}
    seeds = sorted(set.intersection(*(set(s) for both in at.values() for s in both.values())))
    means = {
        name: {m: statistics.fmean(s[seed] for seed in seeds) for m, s in both.items()} for name, both in at.items()
    }
    before = {name: means[name][0.5] - means["mnist-dpsgd"][0.5] for name in METHODS}
    left = {name: max(means[name].values()) - max(means["mnist-dpsgd"].values()) for name in METHODS}

    def span(numbers: dict[str, float], setup: str) -> str:
        return " to ".join(sorted({f"{numbers[f'mnist-{method}-{setup}']:.1f}" for method in ("sample", "scale")}))

    count = {2: "two", 3: "three", 4: "four", 5: "five"}[len(seeds)]
    words = (
        f"{span(left, 'a')} of {span(before, 'a')} points are left in setup A and {span(left, 'b')} of "
        f"{span(before, 'b')} in B"
    )
    assert all(left[name] / before[name] <= 0.5 for name in METHODS)
    half = "Half or more of that gain is the momentum of 0.5"
    assert_page_says("README.md", f"{words}, over {count} seeds", half)
    assert_page_says("docs/results.md", f"{words} (`momentum`, {count} seeds)")


def test_what_held_rests_on_two_seeds_or_more_and_the_rest_says_that_it_does_not():
    verdicts = [
        verdict(claim, table, expected(name), DONE)
        for name, table in tables().items()
        for claim in expected(name).claims
    ]
    held, once = (
        [line for line in section("docs/results.md", title).splitlines() if line.startswith("* ")]
        for title in ("What held", opening.ONCE)
    )
    assert len(held) == 1 + sum(v.held is True and v.seeds > 1 for v in verdicts)  # and a line on all ledgers
    assert len(once) == sum(v.seeds == 1 for v in verdicts) > 0
    assert not any("(1 of 1" in line or "1 of 1 pairs" in line for line in held)
    assert all(re.search(r"1 of [12] seeds|[01] of 1 pairs|of \d+ classes", line) for line in once)
    assert_page_says("docs/results.md", " ".join(opening.ONCE_MEANS.split()))


def test_a_claim_that_one_seed_holds_is_in_a_section_of_its_own():
    table, accuracies = tables()["fashion_mnist"], {"dpsgd": 0.8, "sample-a": 0.9}

    def page(seeds: int) -> tuple[str, str]:
        """The opening before and after the heading of claims with one seed."""
        cells = tuple(cell.model_copy(update={"seeds": tuple(range(seeds))}) for cell in table.cells)
        scored = [(cell, seed) for cell in cells for seed in cell.seeds if cell.name in accuracies]
        done = {cell.settings.named(seed): {"accuracy": accuracies[cell.name]} for cell, seed in scored}
        whole = reporting.results_page({"fashion_mnist": table.model_copy(update={"cells": cells})}, done)
        return whole.partition("## Why")[0].partition(f"## {opening.ONCE}")[::2]

    line = "* Fashion-MNIST, Sample, A: above DP-SGD with every seed"
    assert [line in half for half in page(1)] == [False, True]
    assert [line in half for half in page(2)] == [True, False]
    assert page(2)[1] == ""


def test_the_ten_lines_have_the_numbers_of_the_results():
    cells = [cell for cell in tables()["table_2"].cells if cell.settings.dataset == "mnist"]
    theirs = expected("table_2").cells
    assert all(abs(mean("table_2", cell.name) - theirs[cell.name][0].mean) <= 0.1 for cell in cells)
    opening_lines = section("docs/results.md", "In ten lines")
    assert f"{mean('features', 'cifar10-scale-a'):.1f} % on CIFAR-10" in opening_lines
    gain = statistics.fmean(gains("table_2", "mnist-sample-a", "mnist-dpsgd"))
    assert f"{gain:+.2f}" in opening_lines
    tested = [
        found
        for name, table in tables().items()
        for claim in expected(name).claims
        if (found := verdict(claim, table, expected(name), DONE)).found != "not run"
    ]
    once = sum(found.seeds == 1 for found in tested)
    assert f"Of {len(tested)} claims" in opening_lines
    assert f"{once} rest" in opening_lines
    assert "not run" not in opening_lines.lower().replace("**not run**: svhn", "")
    assert opening_lines.count("\n* ") == 10


# -- what of the paper is not here -----------------------------------------------------------------------------------

STATES = {"here", "here, not used", "here, did not hold", "not here"}
COMMAND = "python -m experiments run "


def states() -> dict[str, list[str]]:
    table = rows(section("docs/paper.md", "What of the paper is not here (yet)"))
    return {item: row for item, row in table.items() if row[0] != "state"}


def test_every_row_on_what_is_not_here_has_a_state_and_names_what_exists():
    table, cited = states(), set()
    assert len(table) >= 45
    names = {path.stem for path in (ROOT / "experiments" / "tables").glob("*.toml")}
    for item, (state, *rest) in table.items():
        assert state in STATES, item
        for code in re.findall(r"`([^`]+)`", " ".join(rest)):
            if code.startswith(COMMAND):
                cited.add(code.removeprefix(COMMAND).split()[0])
            elif "/" in code:
                assert (SOURCE / code).exists() or (ROOT / code).exists(), f"{item}: {code}"
            elif code in names:
                cited.add(code)
            else:
                assert callable(functools.reduce(getattr, code.split("."), epsilons)), f"{item}: {code}"
    assert cited == names - {
        "momentum",
        "pld",
        "conventions",
        "fashion_mnist",
        "features",
        "visits",
    }  # these are not in the paper


def test_what_is_not_here_names_what_is_missing_and_a_command_that_would_run_it():
    for item, (state, text) in states().items():
        commands = [code for code in re.findall(r"`([^`]+)`", text) if code.startswith(COMMAND)]
        assert bool(commands) <= (state == "not here"), item
        assert text.startswith(("Missing: ", "Reason: ")) == (state == "not here"), item
        for command in commands:
            name, *options = shlex.split(command.removeprefix(COMMAND))
            given = dict(zip(options[::2], options[1::2], strict=True))
            assert set(given) <= {"--only", "--device"}, command
            chosen = [job[1] for job in missing([tables()[name]], given.get("--only", "*"))]
            assert chosen, command
            if "--device" not in given:  # something of it was not run
                assert missing([tables()[name]], given.get("--only", "*"), done=DONE), command


def test_the_seeds_and_figures_on_what_is_not_here_are_those_of_the_results():
    table, every, numbers = states(), tables(), {1: "one", 2: "two", 5: "five"}

    def seeds(name: str, *cells: str) -> str:
        (count,) = {len(table_scores(name, cell)) for cell in cells}
        return numbers[count]

    assert (
        f"MNIST with {seeds('table_2', 'mnist-dpsgd', *METHODS)} seeds; CIFAR-10 setup A with "
        f"{seeds('table_2', 'cifar10-sample-a', 'cifar10-scale-a')}, DP-SGD with {seeds('table_2', 'cifar10-dpsgd')}"
    ) in table["Accuracy, tuned for each method: MNIST, CIFAR-10"][1]
    for cell in every["table_2"].cells:
        is_left_out = cell.settings.dataset == "svhn" or re.fullmatch("cifar10-.*-b", cell.name) is not None
        assert is_left_out == (not scores(cell)), cell.name
    untuned = sorted({len(scores(c)) for c in every["table_untuned"].cells if c.settings.dataset == "cifar10"})
    assert f"{' or '.join(numbers[n] for n in untuned)} seeds" in table["Accuracy, tuned for DP-SGD: CIFAR-10"][1]
    assert f"{seeds('figure_advantage', 'mnist-dpsgd-3')} seeds" in table["MNIST, advantage over DP-SGD"][1]

    bound, plain = mean("figure_advantage", "mnist-dpsgd-3"), mean("table_2", "mnist-dpsgd")
    closed = {s: 100 * (mean("table_2", f"mnist-sample-{s}") - plain) / (bound - plain) for s in "ab"}
    gap = f"{closed['a']:.0f} % of the gap in setup A, {closed['b']:.0f} % in B"
    assert table["Close to the upper bound, everyone at ε = 3"][1] == gap
    most = max(mean("table_2", f"mnist-{m}-a") - plain for m in ("sample", "scale"))
    tuned = [gains("table_2", f"cifar10-{m}-a", "cifar10-dpsgd")[0] for m in ("sample", "scale")]
    (row,) = [row for item, row in table.items() if item.startswith("Gains over DP-SGD: 1.06")]
    assert row[1].startswith(
        f"MNIST {most:.2f}, of which half or more is momentum; CIFAR-10 {tuned[0]:.1f} and {tuned[1]:.1f} with one seed"
    )
    least = min(parts[1] for line in DONE.values() if (parts := ledger(line)) is not None)
    assert table["All groups use up their budgets together"][1] == f"to {math.floor(least * 1e4) / 100:.2f} % or more"
    ahead = [gain > 0 for gain in gains("mix", "mnist-sample-a", "mnist-scale-a")]
    progression = table['"A clear progression" from Scale to Sample'][1]
    assert progression == f"Sample ahead in {sum(ahead)} of {len(ahead)} seeds"
    come_out, printed = re.search(r"(\d+) of (\d+) printed numbers come out", text_of("docs/results.md")).groups()
    assert (
        f"{come_out} of {printed} printed numbers come out; for each of the other {int(printed) - int(come_out)} it is "
        "said why"
    ) in table["Hyperparameters; tuned ones; individualization parameters"][1]


# -- limits ----------------------------------------------------------------------------------------------------------

#: rows of the table: (level, shares of all)
EXCESS = {
    "1 (50 %), among 20": (1.0, {1.0: 0.5, 20.0: 0.5}),
    "8 (5 %), among 0.5": (8.0, {0.5: 0.95, 8.0: 0.05}),
    "3 (23 %), among 1 and 2": (3.0, SHARES["A"]),
}


def test_the_excess_under_sample_is_what_the_limits_page_says():
    lines = section("docs/limits.md", "Your risk depends on the choices of others").splitlines()
    printed = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.count("|") == 7][2:]
    records, recipe = SETTINGS["CIFAR-10"]
    computed = []
    for name, (level, shares) in EXCESS.items():
        for strategy in ("scale", "sample"):
            one = plan(Budgets.from_shares(shares, records=records, delta=1e-5, seed=0), recipe, strategy)
            (risk,) = planning.risk(one, [int(np.flatnonzero(one.epsilons == level)[0])])
            numbers = f"{risk.advantage:.3f}", f"{risk.epsilons[1e-7]:.2f}"
            excess = [f"{risk.bayes_excess:.3f}", f"{100 * risk.tail_excess:.0f} %"]
            computed.append([name, strategy, *numbers, *(["reference"] * 2 if strategy == "scale" else excess)])
    assert printed == computed
    assert_page_says("docs/limits.md", f"{records:,} records, batches of {recipe.batch_size:,}, {recipe.steps:,} steps")


def test_the_weight_and_noise_of_the_strictest_on_the_limits_page():
    printed = rows(section("docs/limits.md", "Strict budgets have less influence on the model"), cells=4)
    for setup, shares in SHARES.items():
        weights = [f"{100 * shares[1.0]:.0f} %"]
        for strategy in ("scale", "sample"):
            one = paper_plan("MNIST", setup, strategy)
            pull = one.counts * one.sample_rate * one.clip_norm
            weights.append(f"{100 * float(pull[0] / pull.sum()):.1f} %")
        assert printed[f"setup {setup}"] == weights
    alike, scaled = (paper_plan("MNIST", "A", name) for name in ("uniform", "scale"))
    least, most = scaled.noise_multiplier.min(), scaled.noise_multiplier.max()
    assert_page_says(
        "docs/limits.md",
        f"falls from {alike.noise_std:.3f}, with everyone at ε = 1, to {scaled.noise_std:.3f}.",
        f"have multipliers of {least:.2f} to {most:.2f} under Scale",
    )


def test_the_bound_for_one_epoch_and_the_accuracies_on_the_limits_page():
    records, recipe = SETTINGS["MNIST"]
    updates = math.ceil(records / recipe.batch_size)
    means = [mean("table_2", f"{data}-dpsgd") for data in ("mnist", "cifar10")]
    assert_page_says(
        "docs/limits.md",
        f"For an epoch of {updates} updates",
        f"1/√(2 ln M) is {1 / math.sqrt(2 * math.log(updates)):.2f}",
        f"with everyone at ε = 1, {means[0]:.1f} % on MNIST and {means[1]:.1f} % on CIFAR-10",
    )


def test_the_critics_are_cited_where_their_points_are_answered():
    numbers = ("2601.12922", "2605.07930", "2601.10237")
    assert_page_says("docs/limits.md", *(f"https://arxiv.org/abs/{number}" for number in numbers))
    page = text_of("docs/limits.md")
    assert page.count("*Done here.*") == page.count("*Not done.*") == 3
    assert_page_says("docs/index.md", "[Limits](limits.md)")
    assert_page_says("README.md", "[Limits](docs/limits.md)")


# -- one number ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["uniform", "scale", "sample", "mix"])
def test_every_record_has_the_guarantee_of_the_loosest_also_with_own_deltas(strategy):
    """Lemma 3.2 with a delta per record: the pair of the largest epsilon and the largest delta bounds every group."""
    budgets = Budgets([1.0] * 300 + [2.0] * 300 + [4.0] * 400, delta=[1e-5] * 300 + [1e-6] * 300 + [1e-7] * 400)
    one = plan(budgets, Recipe(steps=50, batch_size=50, clip_norm=1.0), strategy)
    assert (one.epsilon_spent(delta=float(one.delta.max())) <= one.epsilons.max()).all()
    if strategy == "uniform":  # Lemma 3.1
        assert (one.epsilon_spent() <= one.epsilons).all()
        assert one.epsilon_spent(delta=1e-7).max() <= one.epsilons.max()
