"""Figures and names on the pages, each read again from its source: plans and code."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import epsilons
from epsilons import Budgets, Plan, Recipe, SampledGaussian, plan, planning
from epsilons.accounting import pld, rdp
from epsilons.accounting.profile import Profile
from epsilons.ledger import run_folder
from epsilons.planning import guarantee
from pages import PAGES, ROOT, assert_page_says, rows, section, text_of
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
    return {"scikit-learn": "sklearn", "pillow": "PIL", "mlflow-skinny": "mlflow"}.get(name, name)


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
    """All code in this column of the table of names in docs/concepts.md, without the first column."""
    table = rows(section("docs/concepts.md", "Names"))
    return {name for row in table.values() for name in re.findall(r"`([^`]+)`", row[column])}


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


def test_the_page_says_how_often_the_default_engine_compares_with_autograd():
    from epsilons.clipping.ghost.ghost import AUDIT_EVERY

    assert_page_says(
        "docs/engine.md", f"he first physical batch of each pattern of operators, and every {AUDIT_EVERY}th"
    )


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
    assert_page_says("docs/concepts.md", f"moves the noise at ε = 1 by {strictest[EVERY.index(('MNIST', 'A'))]:.1f} %")


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


def test_the_arithmetic_mean_s_clip_norms_in_the_paper_s_settings():
    means = []
    for data, setup in EVERY:
        plan = paper_plan(data, setup, "scale-arithmetic", "rdp")
        means.append(float(plan.counts @ plan.clip_norm) / plan.records / SETTINGS[data][1].clip_norm)
    assert_page_says("docs/paper.md", f"is then {min(means):.2f} to {max(means):.2f} times c")


def test_what_the_paper_s_scale_rows_spend_if_they_are_used_as_printed(golden):
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
        listed = ", ".join(f"{epsilon:.3f}" for epsilon in spent)
        assert_page_says("docs/results-errata.md", f"Used together, the groups spend {listed} of 1, 2, 3")
        checked += 1
    assert checked == 4


# -- limits ----------------------------------------------------------------------------------------------------------

#: rows of the table: (level, shares of all)
EXCESS = {
    "1 (50 %), among 20": (1.0, {1.0: 0.5, 20.0: 0.5}),
    "8 (5 %), among 0.5": (8.0, {0.5: 0.95, 8.0: 0.05}),
    "3 (23 %), among 1 and 2": (3.0, SHARES["A"]),
}


def test_the_excess_under_sample_is_what_the_limits_page_says():
    lines = section("docs/concepts.md", "Your risk depends on the choices of others").splitlines()
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
    assert_page_says(
        "docs/concepts.md", f"{records:,} records, batches of {recipe.batch_size:,}, {recipe.steps:,} steps"
    )


def test_the_weight_and_noise_of_the_strictest_on_the_limits_page():
    printed = rows(section("docs/concepts.md", "Strict budgets have less influence on the model"), cells=4)
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
        "docs/concepts.md",
        f"falls from {alike.noise_std:.3f}, with everyone at ε = 1, to {scaled.noise_std:.3f}.",
        f"have multipliers of {least:.2f} to {most:.2f} under Scale",
    )


def test_the_bound_for_one_epoch_on_the_limits_page():
    records, recipe = SETTINGS["MNIST"]
    updates = math.ceil(records / recipe.batch_size)
    assert_page_says(
        "docs/concepts.md",
        f"For an epoch of {updates} updates",
        f"1/√(2 ln M) is {1 / math.sqrt(2 * math.log(updates)):.2f}",
    )


def test_the_critics_are_cited_where_their_points_are_answered():
    numbers = ("2601.12922", "2605.07930", "2601.10237")
    assert_page_says("docs/concepts.md", *(f"https://arxiv.org/abs/{number}" for number in numbers))
    page = text_of("docs/concepts.md")
    assert page.count("*Done here.*") == page.count("*Not done.*") == 3
    assert_page_says("docs/index.md", "[Limits](concepts.md#limits)")
    assert_page_says("README.md", "[Limits](docs/concepts.md#limits)")


# -- tuning.md -------------------------------------------------------------------------------------------------------


def test_what_cross_validation_costs_on_the_page_of_tuning():
    """5 folds and 4 candidates: 21 fits, a record is in 17."""
    budgets = Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=6_000)
    recipe = Recipe(steps=200, batch_size=300, clip_norm=1.0)
    alone, together = plan(budgets, recipe), plan(budgets, recipe, runs=5 * 4 + 1)
    fits = [SampledGaussian(0.05, float(sigma), steps=200 * (4 * 4 + 1)) for sigma in alone.noise_multiplier]
    strict, loose = (pld.epsilon([one], 1e-5) for one in fits)
    more = together.noise_multiplier / alone.noise_multiplier
    assert (together.epsilon_spent() <= [1.0, 4.0]).all()
    assert_page_says(
        "docs/tuning.md",
        "17 (68) under 21 plans for one run each",
        f"{strict:.2f} ({loose:.1f}) under the same plans",
        f"with {more[0]:.1f} ({more[1]:.1f}) times the noise: at most √21 = {math.sqrt(21):.1f} times",
    )


# -- choosing budgets -------------------------------------------------------------------------------------------------


def test_what_a_randomly_drawn_budget_is_worth():
    budgets = Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=60_000, delta=1e-5)
    one = plan(budgets, Recipe(steps=9_375, batch_size=512, clip_norm=0.2))
    (phase,) = one.phases
    profiles = [
        Profile((SampledGaussian(float(q), float(s), one.steps),), grid=np.linspace(0, 4, 81))
        for q, s in zip(phase.sample_rate, phase.noise_multiplier, strict=True)
    ]
    curves = np.stack([profile.divergence for profile in profiles])  # (levels, directions, points)

    def worth(*weights: float) -> float:
        mixture = np.tensordot(weights, curves, axes=1).max(axis=0)
        return float(np.interp(-math.log(1e-5), -np.log(mixture), profiles[0].grid))

    assert worth(0, 0, 1) == pytest.approx(3, abs=0.01)
    assert_page_says(
        "docs/choosing-budgets.md",
        f"is worth ε = {worth(1 / 3, 1 / 3, 1 / 3):.2f}",
        f"0.05 each, it is worth {worth(0.9, 0.05, 0.05):.2f}",
    )


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
