"""Numbers of the runs on the pages of the documentation, each read again from the results."""

from __future__ import annotations

import functools
import math
import re
import shlex
import statistics
from pathlib import Path

import epsilons
from epsilons import Budgets, Recipe, plan
from experiments import opening, reporting
from experiments.comparing import expected, ledger, verdict
from experiments.running import missing
from experiments.strategies import one_after_another
from pages import ROOT, assert_page_says, rows, section, text_of
from runs import DONE, TABLES, gains, mean, scores, scores_of, with_cells

SOURCE = Path(epsilons.__file__).parent
PAPER = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("paper.md", "results-paper.md"))


def test_how_much_less_noise_pld_needs_in_the_runs_of_that_table():
    table, less = TABLES["pld"], {}
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


def test_the_paper_s_e_2_is_the_experiments_rule_and_not_the_planner_s():
    ((name, row),) = [(name, row) for name, row in rows(PAPER).items() if name.startswith("Baseline E.2")]
    ours, planners = row[-1].split(";")
    assert "every group at the noise multiplier 2.5, for as many steps as its budget allows" in name
    assert "`experiments/strategies.py`" in ours
    assert "`planning/strategies/baselines.py` has another rule" in planners
    budgets, recipe = Budgets([1.0] * 500 + [3.0] * 300), Recipe(steps=101, batch_size=50, clip_norm=1.0)
    paper, own = plan(budgets, recipe, one_after_another, "rdp"), plan(budgets, recipe, "sequential", "rdp")
    assert [float(phase.noise_std) for phase in paper.phases] == [2.5, 2.5]
    assert paper.phases[0].steps < paper.phases[1].steps
    assert [phase.steps for phase in own.phases] == [50, 51]
    assert own.phases[0].noise_std > own.phases[1].noise_std


# -- results ---------------------------------------------------------------------------------------------------------

METHODS = ["mnist-sample-a", "mnist-scale-a", "mnist-sample-b", "mnist-scale-b"]
THEIRS = {name: expected(name) for name in TABLES}
VERDICTS = [verdict(claim, TABLES[name], theirs, DONE) for name, theirs in THEIRS.items() for claim in theirs.claims]


def test_the_readme_s_sentence_on_mnist():
    pairs = [gain for cell in METHODS for gain in gains("table_2", cell, "mnist-dpsgd")]
    assert min(pairs) > 0
    assert_page_says("README.md", f"both methods beat DP-SGD in all {len(pairs)} pairs")
    for cell in TABLES["table_2"].cells:
        if cell.settings.dataset == "mnist":
            assert abs(mean("table_2", cell.name) - THEIRS["table_2"].cells[cell.name][0].mean) < 0.1
            assert len(scores("table_2", cell.name)) == 5


def test_how_much_of_the_gain_on_mnist_is_momentum():
    """With each method at its better momentum, over the seeds that all have; before, at 0.5 for all."""
    cells = [TABLES["momentum"].by_name[name] for name in ("mnist-dpsgd", *METHODS)]
    found = {cell.name: [scores_of(cell.but(momentum=momentum)) for momentum in (0.0, 0.5)] for cell in cells}
    seeds = set.intersection(*(set(by_seed) for both in found.values() for by_seed in both))
    means = {
        name: [statistics.fmean(by_seed[seed] for seed in sorted(seeds)) for by_seed in both]
        for name, both in found.items()
    }
    before = {name: means[name][1] - means["mnist-dpsgd"][1] for name in METHODS}
    left = {name: max(means[name]) - max(means["mnist-dpsgd"]) for name in METHODS}

    def span(numbers: dict[str, float], setup: str) -> str:
        return " to ".join(sorted({f"{numbers[f'mnist-{method}-{setup}']:.1f}" for method in ("sample", "scale")}))

    count = {2: "two", 3: "three", 4: "four", 5: "five"}[len(seeds)]
    words = (
        f"{span(left, 'a')} of {span(before, 'a')} points are left in setup A and {span(left, 'b')} of "
        f"{span(before, 'b')} in B"
    )
    assert all(left[name] / before[name] <= 0.5 for name in METHODS)
    assert_page_says("README.md", f"{words}, over {count} seeds", "Half or more of that gain is the momentum of 0.5")
    assert_page_says("docs/results.md", f"{words} (`momentum`, {count} seeds)")


def test_what_held_rests_on_two_seeds_or_more_and_the_rest_says_that_it_does_not():
    held, once = (
        [line for line in section("docs/results.md", title).splitlines() if line.startswith("* ")]
        for title in ("What held", opening.ONCE)
    )
    assert len(held) == 1 + sum(v.held is True and v.seeds > 1 for v in VERDICTS)  # and a line on all ledgers
    assert len(once) == sum(v.seeds == 1 for v in VERDICTS) > 0
    assert not any("(1 of 1" in line or "1 of 1 pairs" in line for line in held)
    assert all(re.search(r"1 of [12] seeds|[01] of 1 pairs|of \d+ classes", line) for line in once)
    assert_page_says("docs/results.md", " ".join(opening.ONCE_MEANS.split()))


def test_a_claim_that_one_seed_holds_is_in_a_section_of_its_own():
    table, accuracies = TABLES["fashion_mnist"], {"dpsgd": 0.8, "sample-a": 0.9}

    def page(seeds: int) -> tuple[str, str]:
        """The opening before and after the heading of claims with one seed."""
        cells = [cell.model_copy(update={"seeds": tuple(range(seeds))}) for cell in table.cells]
        scored = [(cell, seed) for cell in cells for seed in cell.seeds if cell.name in accuracies]
        done = {cell.settings.named(seed): {"accuracy": accuracies[cell.name]} for cell, seed in scored}
        whole = reporting.results_page({"fashion_mnist": with_cells(table, *cells)}, done)
        return whole.partition("## Why")[0].partition(f"## {opening.ONCE}")[::2]

    line = "* Fashion-MNIST, Sample, A: above DP-SGD with every seed"
    assert [line in half for half in page(1)] == [False, True]
    assert [line in half for half in page(2)] == [True, False]
    assert page(2)[1] == ""


def test_the_ten_lines_have_the_numbers_of_the_results():
    lines = section("docs/results.md", "In ten lines")
    assert f"{mean('features', 'cifar10-scale-a'):.1f} % on CIFAR-10" in lines
    assert f"{statistics.fmean(gains('table_2', 'mnist-sample-a', 'mnist-dpsgd')):+.2f}" in lines
    tested = [found for found in VERDICTS if found.found != "not run"]
    assert f"Of {len(tested)} claims" in lines
    assert f"{sum(found.seeds == 1 for found in tested)} rest" in lines
    assert "not run" not in lines.lower().replace("**not run**: svhn", "")
    assert lines.count("\n* ") == 10


# -- what of the paper is not here -----------------------------------------------------------------------------------

STATES = {"here", "here, not used", "here, did not hold", "not here"}
COMMAND = "python -m experiments run "


def states() -> dict[str, list[str]]:
    parts = section("docs/paper.md", "Where each part is"), (ROOT / "docs" / "results-paper.md").read_text("utf-8")
    return {item: row for part in parts for item, row in rows(part).items() if row[0] != "state"}


def test_every_row_on_what_is_not_here_has_a_state_and_names_what_exists():
    table, cited = states(), set()
    assert len(table) >= 45
    for item, (state, *rest) in table.items():
        assert state in STATES, item
        for code in re.findall(r"`([^`]+)`", " ".join(rest)):
            if code.startswith(COMMAND):
                cited.add(code.removeprefix(COMMAND).split()[0])
            elif "/" in code:
                assert (SOURCE / code).exists() or (ROOT / code).exists(), f"{item}: {code}"
            elif code in TABLES:
                cited.add(code)
            else:
                assert callable(functools.reduce(getattr, code.split("."), epsilons)), f"{item}: {code}"
    ours = {"momentum", "pld", "conventions", "fashion_mnist", "features", "visits"}  # these are not in the paper
    assert cited == set(TABLES) - ours


def test_what_is_not_here_names_what_is_missing_and_a_command_that_would_run_it():
    for item, (state, text) in states().items():
        commands = [code for code in re.findall(r"`([^`]+)`", text) if code.startswith(COMMAND)]
        assert bool(commands) <= (state == "not here"), item
        assert text.startswith(("Missing: ", "Reason: ")) == (state == "not here"), item
        for command in commands:
            name, *options = shlex.split(command.removeprefix(COMMAND))
            given = dict(zip(options[::2], options[1::2], strict=True))
            assert set(given) <= {"--only", "--device"}, command
            chosen = [job[1] for job in missing([TABLES[name]], given.get("--only", "*"))]
            assert chosen, command
            if "--device" not in given:  # something of it was not run
                assert missing([TABLES[name]], given.get("--only", "*"), done=DONE), command


def test_the_seeds_and_figures_on_what_is_not_here_are_those_of_the_results():
    table, numbers = states(), {1: "one", 2: "two", 5: "five"}

    def seeds(name: str, *cells: str) -> str:
        (count,) = {len(scores(name, cell)) for cell in cells}
        return numbers[count]

    assert (
        f"MNIST with {seeds('table_2', 'mnist-dpsgd', *METHODS)} seeds; CIFAR-10 setup A with "
        f"{seeds('table_2', 'cifar10-sample-a', 'cifar10-scale-a')}, DP-SGD with {seeds('table_2', 'cifar10-dpsgd')}"
    ) in table["Accuracy, tuned for each method: MNIST, CIFAR-10"][1]
    for cell in TABLES["table_2"].cells:
        is_left_out = cell.settings.dataset == "svhn" or re.fullmatch("cifar10-.*-b", cell.name) is not None
        assert is_left_out == (not scores_of(cell)), cell.name
    untuned = sorted({len(scores_of(c)) for c in TABLES["table_untuned"].cells if c.settings.dataset == "cifar10"})
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


def test_the_accuracies_on_the_page_of_concepts():
    means = [mean("table_2", f"{data}-dpsgd") for data in ("mnist", "cifar10")]
    assert_page_says(
        "docs/concepts.md", f"with everyone at ε = 1, {means[0]:.1f} % on MNIST and {means[1]:.1f} % on CIFAR-10"
    )
