"""Figures and names that the pages state, each read again from where it comes from: plans, results, code."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import re
import statistics
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import epsilons
from epsilons import Budgets, Plan, Recipe, SampledGaussian, plan, planning, run_folder
from epsilons.accounting import rdp
from experiments import reporting
from experiments.comparing import expected, ledger, runs_of, value, verdict
from experiments.results import finished
from experiments.settings import tables
from experiments.strategies import one_after_another
from pages import PAGES, ROOT
from test_imports import imported_modules

SOURCE = Path(epsilons.__file__).parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SHARES = {"A": {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, "B": {1.0: 0.54, 2.0: 0.37, 3.0: 0.09}}

#: The paper's settings, by its text: records, recipe.
SETTINGS = {
    "MNIST": (60_000, Recipe(steps=9_375, batch_size=512, clip_norm=0.2)),
    "SVHN": (73_257, Recipe(steps=2_146, batch_size=1_024, clip_norm=0.9)),
    "CIFAR-10": (50_000, Recipe(steps=1_465, batch_size=1_024, clip_norm=0.4)),
}


@functools.cache
def said(page: str) -> str:
    """A page's text with every run of white space as one space, so that lines may break anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def part(page: str, heading: str) -> str:
    """The section under this heading, up to the next of the same rank or a higher one, as it stands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$\n(.*?)(?=^#{{1,2}} |\Z)", text, flags=re.M | re.S)
    assert found, f"{page} has no section {heading!r}"
    return found[2]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table in a text, without rules."""
    lines = [line.strip() for line in text.splitlines()]
    found = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    return [row for row in found if not set("".join(row)) <= set("-|: ")]


@functools.cache
def of_the_paper(data: str, setup: str, strategy: str, accountant: str) -> Plan:
    records, recipe = SETTINGS[data]
    return plan(Budgets.from_shares(SHARES[setup], records=records, delta=1e-5), recipe, strategy, accountant)


# -- installing ------------------------------------------------------------------------------------------------------

OPTIONAL = {requirement for extra in SETUP["project"]["optional-dependencies"].values() for requirement in extra}
WRITTEN = [
    *PAGES,
    *SOURCE.rglob("*.py"),
    *(ROOT / "examples").rglob("*"),
    *(ROOT / "experiments").rglob("*.py"),
    *(ROOT / "experiments").rglob("*.md"),
]


def test_nobody_is_told_to_install_the_package_by_a_name_that_no_index_has():
    warned = 0
    for path in WRITTEN:
        text = " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""
        for found in re.finditer(r"pip install [\"']?epsilons", text):
            assert text[: found.start()].endswith("Do not run `"), f"{path}: {text[found.start() :][:60]}"
            warned += 1
    assert warned >= 2


def test_what_messages_say_to_install_is_what_an_extra_names():
    said_so = [
        requirement
        for path in SOURCE.rglob("*.py")
        for requirement in re.findall(r"pip install \"([^\"]+)\"", path.read_text(encoding="utf-8"))
    ]
    assert len(said_so) >= 3
    assert set(said_so) <= OPTIONAL


def test_the_wheel_is_called_as_the_readme_says():
    assert f"`dist/epsilons-{epsilons.__version__}-py3-none-any.whl`" in said("README.md")
    assert SETUP["project"]["name"] == "epsilons"


#: Distributions whose module has another name.
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}


def module_of(requirement: str) -> str:
    name = re.match(r"[\w-]+", requirement)[0]
    return MODULES.get(name, name)


def test_the_package_asks_for_what_it_imports_and_for_nothing_else():
    imported = set()
    for path in SOURCE.rglob("*.py"):
        *folders, stem = ["epsilons", *path.relative_to(SOURCE).with_suffix("").parts]
        is_package = stem == "__init__"
        module = ".".join(folders if is_package else [*folders, stem])
        names = imported_modules(path.read_text(encoding="utf-8"), module, is_package)
        imported |= {name.split(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, "epsilons"}
    core = {module_of(requirement) for requirement in SETUP["project"]["dependencies"]}
    optional = {module_of(requirement) for requirement in OPTIONAL}
    with_jinja2 = {"markupsafe"}
    assert core <= imported, f"required and never imported: {core - imported}"
    assert imported <= core | optional | with_jinja2


def test_dp_accounting_is_there_for_the_tests_alone():
    name = "dp-accounting"
    assert any(one.startswith(name) for one in SETUP["dependency-groups"]["dev"])
    assert not any(one.startswith(name) for one in [*SETUP["project"]["dependencies"], *OPTIONAL])
    assert re.search(rf"^{name}==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    assert name not in run_folder.versions()


# -- names in docstrings ---------------------------------------------------------------------------------------------


def test_a_name_that_a_module_s_docstring_lists_is_in_the_module():
    listed = 0
    for path in (SOURCE / "training").rglob("*.py"):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        names = re.findall(r"^([A-Z][a-z]\w+)  +\S", words, flags=re.M)
        if names:
            dotted = ".".join(["epsilons", *path.relative_to(SOURCE).with_suffix("").parts])
            module = importlib.import_module(dotted)
            assert [name for name in names if not hasattr(module, name)] == [], path
            listed += len(names)
    assert listed >= 3


def test_the_faq_and_the_engine_page_say_how_often_the_default_engine_compares_with_autograd():
    from epsilons.training.clipping.ghost.engine import AUDIT_EVERY

    for page in ("docs/faq.md", "docs/engine.md"):
        pattern = rf"he first (chunk|physical batch) of each pattern of operators, and every {AUDIT_EVERY}th"
        assert re.search(pattern, said(page)), page


# -- accountants -----------------------------------------------------------------------------------------------------


def test_the_orders_of_rdp_and_the_least_epsilon_that_they_reach():
    orders = rdp.OPACUS_ORDERS
    least = float(rdp.converted(np.zeros((1, len(orders))), np.array([1e-5]), np.array(orders))[0])
    words = (
        f"Opacus' {len(orders)} orders, from {min(orders):g} to {max(orders):g}. The paper used RDP, too, but its code "
        f"searches orders from 1.001 to 10,000, which reaches budgets below {least:.3f} (at δ = 1e-5)"
    )
    assert words in said("docs/concepts.md")


def less_noise(strategy: str, data: str, setup: str) -> np.ndarray:
    """(groups,) % by which PLD's noise multipliers are below RDP's."""
    pld, by_rdp = (of_the_paper(data, setup, strategy, name).noise_multiplier for name in ("pld", "rdp"))
    return 100 * (1 - pld / by_rdp)


def shared_less_noise(strategy: str, data: str, setup: str) -> float:
    pld, by_rdp = (of_the_paper(data, setup, strategy, name).noise_std for name in ("pld", "rdp"))
    return 100 * (1 - pld / by_rdp)


EVERY = [(data, setup) for data in SETTINGS for setup in SHARES]


def test_how_much_less_noise_pld_needs():
    single = [less_noise("scale", *one) for one in EVERY]
    strictest, scale, sample = (
        [float(groups[0]) for groups in single],
        [shared_less_noise("scale", *one) for one in EVERY],
        [shared_less_noise("sample", *one) for one in EVERY],
    )
    words = (
        f"In the paper's settings it needs less noise than RDP: {min(strictest):.1f} to {max(strictest):.1f} % for "
        f"everyone at ε = 1, {np.min(single):.1f} to {np.max(single):.1f} % for single budgets under Scale, and of the "
        f"noise that all share {min(scale):.1f} to {max(scale):.1f} % under Scale and {min(sample):.1f} to "
        f"{max(sample):.1f} % under Sample"
    )
    assert words in said("docs/paper.md")
    assert f"moves the noise at ε = 1 by {less_noise('scale', 'MNIST', 'A')[0]:.1f} %" in said("docs/pitfalls.md")


def test_how_much_less_noise_pld_needs_in_the_runs_of_that_table():
    table = tables()["pld"]
    less = {}
    for cell in table.cells:
        settings = cell.settings
        budgets = Budgets.from_shares(
            {float(level): share for level, share in settings.shares.items()}, records=60_000, delta=settings.delta
        )
        stds = [plan(budgets, settings.recipe(60_000), settings.strategy, name).noise_std for name in ("pld", "rdp")]
        less[settings.strategy] = f"{100 * (1 - stds[0] / stds[1]):.1f}"
    assert (
        f"less of it: {less['uniform']} % for DP-SGD at ε = 1, {less['scale']} and {less['sample']} % for Scale and "
        "Sample in setup A."
    ) in said("docs/results.md")
    assert (
        f"less noise: {less['uniform']} % for DP-SGD, {less['scale']} % for Scale, {less['sample']} % for Sample."
    ) in table.note


def test_the_table_of_what_pld_saves_is_what_plans_come_to():
    table = {row[0]: row[1:] for row in rows(part("docs/planning.md", "PLD on whole grids"))[1:]}
    for data, setup in EVERY:
        by_rdp, pld = (of_the_paper(data, setup, "scale", name).noise_multiplier for name in ("rdp", "pld"))
        shared = [of_the_paper(data, setup, "sample", name).noise_multiplier[0] for name in ("rdp", "pld")]
        told = [" ".join(f"{number:.3f}" for number in numbers) for numbers in (by_rdp, pld)]
        told.append(" ".join(f"{number:.1f}" for number in less_noise("scale", data, setup)))
        told.append(f"{shared[0]:.3f} → {shared[1]:.3f} ({shared_less_noise('sample', data, setup):.1f} %)")
        assert table[f"{data} {setup}"] == told


# -- the paper's algorithms and parameters ---------------------------------------------------------------------------

PAPER = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def test_the_arithmetic_mean_s_clip_norms_in_the_paper_s_settings():
    means = []
    for data, setup in EVERY:
        made = of_the_paper(data, setup, "scale-arithmetic", "rdp")
        means.append(float(made.counts @ made.clip_norm) / made.records / SETTINGS[data][1].clip_norm)
    assert f"is then {min(means):.2f} to {max(means):.2f} times c" in said("docs/paper.md")


def test_what_the_paper_s_scale_rows_spend_if_they_are_used_as_printed(golden):
    table = {row[0]: row[1:] for row in rows(PAPER) if len(row) == 3}
    checked = 0
    for setting in golden["published"]:
        if setting["dataset"] == "MNIST":
            continue  # test_plans.py
        printed, used = setting["published"], setting["computed_rdp_reproduction"]
        clip_norm = {"SVHN": 0.9, "CIFAR10": 0.4}[setting["dataset"]]
        spent = [
            rdp.epsilon([SampledGaussian(used["q"], printed["ss"] * clip_norm / own, used["steps"])], 1e-5)
            for own in printed["c"]
        ]
        column = 0 if setting["weights"][0] == 0.34 else 1
        name = setting["dataset"].replace("CIFAR10", "CIFAR-10")
        assert table[name][column] == " / ".join(f"{epsilon:.3f}" for epsilon in spent)
        checked += 1
    assert checked == 4


def test_the_paper_s_e_2_is_the_experiments_rule_and_not_the_planner_s():
    (row,) = [row for row in rows(PAPER) if row[0].startswith("Baseline E.2")]
    ours, planners = row[1].split(";")
    assert "every group at the noise multiplier 2.5, for as many steps as its budget allows" in row[0]
    assert "`experiments/strategies.py`" in ours
    assert "`planning/strategies/sequential.py` has another rule" in planners
    budgets, recipe = Budgets([1.0] * 500 + [3.0] * 300), Recipe(steps=101, batch_size=50, clip_norm=1.0)
    paper, own = plan(budgets, recipe, one_after_another, "rdp"), plan(budgets, recipe, "sequential", "rdp")
    noises = [[float(phase.noise_std) for phase in made.phases] for made in (paper, own)]
    assert noises[0] == [2.5, 2.5]
    assert paper.phases[0].steps < paper.phases[1].steps
    assert [phase.steps for phase in own.phases] == [50, 51]
    assert noises[1][0] > noises[1][1]


# -- results ---------------------------------------------------------------------------------------------------------

DONE = finished()


def scores(cell) -> dict[int, float]:
    return {seed: value(line, "accuracy") for seed, line in runs_of(cell, DONE).items()}


def gains(table: str, cell: str, over: str) -> list[float]:
    ours, theirs = scores(tables()[table].by_name[cell]), scores(tables()[table].by_name[over])
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


METHODS = ["mnist-sample-a", "mnist-scale-a", "mnist-sample-b", "mnist-scale-b"]


def test_the_readme_s_sentence_on_mnist():
    table = tables()["table_2"]
    pairs = [gain for cell in METHODS for gain in gains("table_2", cell, "mnist-dpsgd")]
    assert min(pairs) > 0
    assert f"both methods beat DP-SGD in all {len(pairs)} pairs" in said("README.md")
    for cell in ("mnist-dpsgd", *METHODS):
        ours, theirs = statistics.fmean(scores(table.by_name[cell]).values()), expected("table_2").cells[cell][0].mean
        assert abs(ours - theirs) < 0.1
        assert len(scores(table.by_name[cell])) == 5


def test_how_much_of_the_gain_on_mnist_is_momentum():
    """With each method at its better momentum, over the seeds that all have; before, at 0.5 for all."""
    table = tables()["momentum"]
    at = {c.name: {m: scores(c.but(momentum=m)) for m in (0.0, 0.5)} for c in table.cells if c.name != "mnist-dpsgd-3"}
    seeds = sorted(set.intersection(*(set(s) for both in at.values() for s in both.values())))
    mean = {
        name: {m: statistics.fmean(s[seed] for seed in seeds) for m, s in both.items()} for name, both in at.items()
    }
    before = {name: mean[name][0.5] - mean["mnist-dpsgd"][0.5] for name in METHODS}
    left = {name: max(mean[name].values()) - max(mean["mnist-dpsgd"].values()) for name in METHODS}

    def told(numbers: dict[str, float], setup: str) -> str:
        return " to ".join(sorted({f"{numbers[f'mnist-{method}-{setup}']:.1f}" for method in ("sample", "scale")}))

    count = {2: "two", 3: "three", 4: "four", 5: "five"}[len(seeds)]
    words = (
        f"{told(left, 'a')} of {told(before, 'a')} points are left in setup A and {told(left, 'b')} of "
        f"{told(before, 'b')} in B"
    )
    assert f"{words}, over {count} seeds" in said("README.md")
    assert f"{words} (`momentum`, {count} seeds)" in said("docs/results.md")
    assert all(left[name] / before[name] <= 0.5 for name in METHODS)
    assert "Half or more of that gain is the momentum of 0.5" in said("README.md")


def test_what_held_rests_on_two_seeds_or_more_and_the_rest_says_that_it_does_not():
    every = tables()
    verdicts = [
        verdict(claim, table, expected(name), DONE) for name, table in every.items() for claim in expected(name).claims
    ]
    held, once = ([line for line in part("docs/results.md", title).splitlines() if line.startswith("* ")]
                  for title in ("What held", reporting.ONCE))  # fmt: skip
    assert len(held) == 1 + sum(v.held is True and v.seeds > 1 for v in verdicts)  # and a line on all ledgers
    assert len(once) == sum(v.held is True and v.seeds == 1 for v in verdicts) > 0
    assert not any("(1 of 1" in line or "1 of 1 pairs" in line for line in held)
    assert all("(1 of 1" in line or "1 of 1 pairs" in line for line in once)
    assert " ".join(reporting.ONCE_MEANS.split()) in said("docs/results.md")


def test_a_claim_that_one_seed_holds_is_told_apart_from_one_that_two_hold():
    table = tables()["fashion_mnist"]
    accuracies = {"dpsgd": 0.8, "sample-a": 0.9}

    def page(seeds: int) -> str:
        cells = tuple(cell.model_copy(update={"seeds": tuple(range(seeds))}) for cell in table.cells)
        wider = table.model_copy(update={"cells": cells})
        done = {
            cell.settings.named(seed): {"accuracy": accuracies[cell.name]}
            for cell in cells
            for seed in cell.seeds
            if cell.name in accuracies
        }
        return reporting.results_page({"fashion_mnist": wider}, done).partition("## Why")[0]

    line = "* Fashion-MNIST, Sample, A: above DP-SGD with every seed"
    assert line in page(1).partition(f"## {reporting.ONCE}")[2]
    assert line not in page(1).partition(f"## {reporting.ONCE}")[0]
    assert reporting.ONCE not in page(2)
    assert line in page(2)


# -- what of the paper is not here -----------------------------------------------------------------------------------

NOT_HERE = "What of the paper is not here (yet)"
STATES = {"here", "here, not used", "here, did not hold", "in part", "not here"}


def standing() -> dict[str, list[str]]:
    found = rows(part("docs/paper.md", NOT_HERE))
    return {row[0]: row[1:] for row in found if row[1] != "state"}


def test_every_row_on_what_is_not_here_has_a_state_and_names_what_exists():
    table = standing()
    assert len(table) >= 45
    names = {path.stem for path in (ROOT / "experiments" / "tables").glob("*.toml")}
    cited = set()
    for item, (state, *rest) in table.items():
        assert state in STATES, item
        for code in re.findall(r"`([^`]+)`", " ".join(rest)):
            if "/" in code:
                assert (SOURCE / code).exists() or (ROOT / code).exists(), f"{item}: {code}"
            elif code in names:
                cited.add(code)
            else:
                thing = functools.reduce(getattr, code.split("."), epsilons)
                assert callable(thing), f"{item}: {code}"
    ours = {"momentum", "pld", "conventions", "fashion_mnist"}  # not in the paper
    assert cited == names - ours


def test_the_seeds_and_figures_on_what_is_not_here_are_those_of_the_results():
    table = standing()
    every = tables()

    def seeds(name: str, cell: str) -> int:
        return len(scores(every[name].by_name[cell]))

    def mean(name: str, cell: str) -> float:
        return statistics.fmean(scores(every[name].by_name[cell]).values())

    numbers = {1: "one", 2: "two", 5: "five"}
    mnist = {seeds("table_2", cell) for cell in ("mnist-dpsgd", *METHODS)}
    cifar = {seeds("table_2", f"cifar10-{method}-a") for method in ("sample", "scale")}
    assert [len(mnist), len(cifar)] == [1, 1]
    assert (
        f"MNIST with {numbers[mnist.pop()]} seeds; CIFAR-10 setup A with {numbers[cifar.pop()]}, DP-SGD with "
        f"{numbers[seeds('table_2', 'cifar10-dpsgd')]}; CIFAR-10 setup B and SVHN not run"
    ) in table["Accuracy, tuned for each method"][1]
    for cell in every["table_2"].cells:
        assert (cell.settings.dataset == "svhn" or (cell.name.startswith("cifar10-") and cell.name.endswith("-b"))) == (
            not scores(cell)
        ), cell.name
    untuned = sorted({len(scores(c)) for c in every["table_untuned"].cells if c.settings.dataset == "cifar10"})
    assert f"CIFAR-10 with {' or '.join(numbers[n] for n in untuned)} seeds" in table["Accuracy, tuned for DP-SGD"][1]
    assert f"{numbers[seeds('figure_advantage', 'mnist-dpsgd-3')]} seeds" in table["MNIST, advantage over DP-SGD"][1]

    bound, plain = mean("figure_advantage", "mnist-dpsgd-3"), mean("table_2", "mnist-dpsgd")
    closed = {s: 100 * (mean("table_2", f"mnist-sample-{s}") - plain) / (bound - plain) for s in "ab"}
    assert (
        table["Close to the upper bound, everyone at ε = 3"][1]
        == f"{closed['a']:.0f} % of the gap in setup A, {closed['b']:.0f} % in B"
    )
    most = max(mean("table_2", f"mnist-{m}-a") - plain for m in ("sample", "scale"))
    tuned = [gains("table_2", f"cifar10-{m}-a", "cifar10-dpsgd")[0] for m in ("sample", "scale")]
    (row,) = [row for item, row in table.items() if item.startswith("Gains over DP-SGD")]
    assert row[1].startswith(
        f"MNIST {most:.2f}, of which half or more is momentum; CIFAR-10 {tuned[0]:.1f} and {tuned[1]:.1f} with one seed"
    )
    least = min(found[1] for line in DONE.values() if (found := ledger(line)) is not None)
    assert table["All groups use up their budgets together"][1] == f"to {math.floor(least * 1e4) / 100:.2f} % or more"
    ahead = [gain > 0 for gain in gains("mix", "mnist-sample-a", "mnist-scale-a")]
    assert (
        table['"A clear progression" from Scale to Sample'][1] == f"Sample ahead in {sum(ahead)} of {len(ahead)} seeds"
    )
    come_out, printed = re.search(r"(\d+) of (\d+) printed numbers come out", said("docs/results.md")).groups()
    assert (
        f"{come_out} of {printed} printed numbers come out; for each of the other {int(printed) - int(come_out)} it is "
        "said why"
    ) in table["Hyperparameters; tuned ones; individualization parameters"][1]


# -- limits ----------------------------------------------------------------------------------------------------------

#: rows of the table: (level, share, the others), and the shares of all
EXCESS = {
    "1 (50 %), among 20": (1.0, {1.0: 0.5, 20.0: 0.5}),
    "8 (5 %), among 0.5": (8.0, {0.5: 0.95, 8.0: 0.05}),
    "3 (23 %), among 1 and 2": (3.0, SHARES["A"]),
}


def test_the_excess_under_sample_is_what_the_limits_page_says():
    told = [row for row in rows(part("docs/limits.md", "Your risk depends on the choices of others")) if len(row) == 6][
        1:
    ]
    records, recipe = SETTINGS["CIFAR-10"]
    made = []
    for name, (level, shares) in EXCESS.items():
        for strategy in ("scale", "sample"):
            one = plan(Budgets.from_shares(shares, records=records, delta=1e-5, seed=0), recipe, strategy)
            (risk,) = planning.risk(one, [int(np.flatnonzero(one.epsilons == level)[0])])
            numbers = f"{risk.advantage:.3f}", f"{risk.epsilons[1e-7]:.2f}"
            excess = [f"{risk.bayes_excess:.3f}", f"{100 * risk.tail_excess:.0f} %"]
            made.append([name, strategy, *numbers, *(["reference"] * 2 if strategy == "scale" else excess)])
    assert told == made
    assert f"{records:,} records, batches of {recipe.batch_size:,}, {recipe.steps:,} steps" in said("docs/limits.md")


def test_the_weight_and_noise_of_the_strictest_on_the_limits_page():
    told = {
        row[0]: row[1:]
        for row in rows(part("docs/limits.md", "Strict budgets have less influence on the model"))
        if len(row) == 4
    }
    for setup, shares in SHARES.items():
        weights = [100 * shares[1.0]]
        for strategy in ("scale", "sample"):
            made = of_the_paper("MNIST", setup, strategy, "pld")
            pull = made.counts * made.sample_rate * made.clip_norm
            weights.append(100 * float(pull[0] / pull.sum()))
        assert told[f"setup {setup}"] == [f"{weights[0]:.0f} %", *(f"{w:.1f} %" for w in weights[1:])]
    alike, scaled = (of_the_paper("MNIST", "A", name, "pld") for name in ("uniform", "scale"))
    assert f"falls from {alike.noise_std:.3f}, with everyone at ε = 1, to {scaled.noise_std:.3f}." in said(
        "docs/limits.md"
    )
    multipliers = scaled.noise_multiplier
    assert f"have multipliers of {multipliers.min():.2f} to {multipliers.max():.2f} under Scale" in said(
        "docs/limits.md"
    )


def test_the_bound_for_one_epoch_and_the_accuracies_on_the_limits_page():
    records, recipe = SETTINGS["MNIST"]
    updates = math.ceil(records / recipe.batch_size)
    assert f"For an epoch of {updates} updates" in said("docs/limits.md")
    assert f"1/√(2 ln M) is {1 / math.sqrt(2 * math.log(updates)):.2f}" in said("docs/limits.md")
    means = [
        statistics.fmean(scores(tables()["table_2"].by_name[f"{data}-dpsgd"]).values()) for data in ("mnist", "cifar10")
    ]
    assert f"with everyone at ε = 1, {means[0]:.1f} % on MNIST and {means[1]:.1f} % on CIFAR-10" in said(
        "docs/limits.md"
    )


def test_the_critics_are_cited_where_their_points_are_answered():
    page = said("docs/limits.md")
    for number in ("2601.12922", "2605.07930", "2601.10237"):
        assert f"https://arxiv.org/abs/{number}" in page
    assert page.count("*Done here.*") == page.count("*Not done.*") == 3
    assert "[Limits](limits.md)" in said("docs/index.md")
    assert "[Limits](docs/limits.md)" in said("README.md")


# -- one number ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["uniform", "scale", "sample", "mix"])
def test_everyone_has_at_least_the_guarantee_of_the_loosest_with_deltas_of_their_own_too(strategy):
    """Lemma 3.2 with a delta per record: the pair of the largest epsilon and the largest delta bounds every group."""
    budgets = Budgets([1.0] * 300 + [2.0] * 300 + [4.0] * 400, delta=[1e-5] * 300 + [1e-6] * 300 + [1e-7] * 400)
    made = plan(budgets, Recipe(steps=50, batch_size=50, clip_norm=1.0), strategy)
    assert (made.epsilon_spent(delta=float(made.delta.max())) <= made.epsilons.max()).all()
    if strategy == "uniform":  # Lemma 3.1
        assert (made.epsilon_spent() <= made.epsilons).all()
        assert made.epsilon_spent(delta=1e-7).max() <= made.epsilons.max()
