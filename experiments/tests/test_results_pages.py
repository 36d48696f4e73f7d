"""Numbers of the runs on the pages of the documentation, each read again from the results."""

from __future__ import annotations

import functools
import re
import statistics
from dataclasses import replace
from pathlib import Path

import epsilons
from epsilons import Budgets, Recipe, SampledGaussian, plan
from epsilons.accounting import ACCOUNTANTS
from experiments import errata, opening, reporting
from experiments.comparing import NETWORK, NOT_RUN, WORDS, expected, interval, verdict
from experiments.protocol import contrast, outcome, protocols
from experiments.settings import HERE
from experiments.strategies import one_after_another
from pages import ROOT, assert_page_says, rows, section
from runs import DONE, TABLES, gains, mean, scores, scores_of, with_cells

SOURCE = Path(epsilons.__file__).parent
RDP = ACCOUNTANTS["rdp"]
PAPER = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def test_how_much_less_noise_pld_needs_in_the_runs_of_that_table():
    table, less = TABLES["pld"], {}
    for settings in (cell.settings for cell in table.cells):
        shares = {float(level): share for level, share in settings.shares.items()}
        budgets = Budgets.from_shares(shares, records=60_000, delta=settings.delta)
        stds = [plan(budgets, settings.recipe(60_000), settings.strategy, name).noise_std for name in ("pld", "rdp")]
        less[settings.strategy] = f"{100 * (1 - stds[0] / stds[1]):.1f}"
    assert_page_says(
        "docs/results-beyond.md",
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


SAID = {v.say for v in VERDICTS}


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row[1:-1].split("|")] if row.count("|") == 5 else [""] * 4


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
    seeds = sorted(set.intersection(*(set(by_seed) for both in found.values() for by_seed in both)))

    def best(name: str) -> list[float]:
        return max(([by_seed[seed] for seed in seeds] for by_seed in found[name]), key=statistics.fmean)

    def above(ours: list[float], theirs: list[float]) -> tuple[float, float]:
        return interval([one - two for one, two in zip(ours, theirs, strict=True)])

    plain = [found["mnist-dpsgd"][1][seed] for seed in seeds]
    before = {name: above([found[name][1][seed] for seed in seeds], plain)[0] for name in METHODS}
    left = {name: above(best(name), best("mnist-dpsgd")) for name in METHODS}

    def span(setup: str) -> str:
        pairs = [left[f"mnist-{method}-{setup}"] for method in ("sample", "scale")]
        means = " to ".join(sorted({f"{mean:.1f}" for mean, _ in pairs}))
        (was,) = {f"{before[f'mnist-{method}-{setup}']:.1f}" for method in ("sample", "scale")}
        return f"{means} ± {max(half for _, half in pairs):.1f} of {was}"

    words = f"{span('a')} points are left in setup A and {span('b')} in B"
    assert len(seeds) == 3
    assert all(left[name][0] / before[name] <= 0.5 for name in METHODS)
    assert_page_says("docs/results-protocol.md", f"{words} (three seeds, 95 % intervals")


def test_what_is_left_of_the_gain_on_mnist_when_all_methods_are_tuned():
    made = protocols()
    found = {name: outcome(made[name], DONE) for name in made}
    left = {
        (name, method): contrast({(method, "best"): 1.0, ("dpsgd", "best"): -1.0}, scores)
        for name, scores in found.items()
        for method in ("sample", "scale")
    }
    sample, scale = (left["protocol_mnist", method] for method in ("sample", "scale"))
    assert sample.pairs == scale.pairs == 5
    said = [f"{one.mean:.2f} ± {one.half:.2f}" for one in (sample, scale)]
    assert_page_says("README.md", f"Sample is {said[0]} and Scale {said[1]} above DP-SGD, over five seeds")
    assert_page_says(
        "docs/results.md", f"Sample and Scale are {said[0]} and {said[1]} points above DP-SGD in setup A (five"
    )
    others = [one.mean for (name, _), one in left.items() if name != "protocol_mnist"]
    assert_page_says("README.md", f"on three other data sets {min(others):.1f} to {max(others):.1f}")
    assert len(others) == 6
    was = [statistics.fmean(gains("table_2", cell, "mnist-dpsgd")) for cell in ("mnist-sample-a", "mnist-scale-a")]
    assert_page_says("README.md", f"they gain {was[0]:.1f} points in setup A")
    assert_page_says("docs/results.md", f"gain {was[0]:.2f} and {was[1]:.2f}")
    assert all(one.mean / before < 0.34 for one, before in zip((sample, scale), was, strict=True))
    without = [
        contrast({(m, "without"): 1.0, ("dpsgd", "without"): -1.0}, found["protocol_mnist"])
        for m in ("sample", "scale")
    ]
    assert [f"{one.mean:.2f}" for one in without] == [words[:4] for words in said]


# -- claims ----------------------------------------------------------------------------------------------------------


def test_each_claim_is_listed_under_what_the_runs_say_of_it_with_its_model_and_few_seeds():
    for word in (*WORDS.values(), NOT_RUN):
        text = section("docs/results-claims.md", word[0].upper() + word[1:])
        listed = {say: (found, model) for _, say, found, model in map(cells, text.splitlines()[3:]) if say in SAID}
        wanted = {v.say: v for v in VERDICTS if v.word == word}
        assert set(listed) == set(wanted)
        for say, verdict_ in wanted.items():
            ran = word != NOT_RUN
            assert listed[say][1] == (verdict_.model if ran else "")
            assert not ran or listed[say][0].startswith(verdict_.found)
            assert listed[say][0].endswith({1: "**one seed**", 2: "**two seeds**"}.get(verdict_.seeds, "")), say
    assert all("linear" in v.model for v in VERDICTS if v.word == WORDS[False, False])
    assert sum(v.seeds == 1 for v in VERDICTS) > 0


def test_a_claim_has_a_word_for_what_holds_and_on_which_model():
    table, accuracies = TABLES["features"], {"cifar10-dpsgd": 0.6, "cifar10-sample-a": 0.7}
    done = {table.by_name[cell].settings.named(0): {"accuracy": accuracy} for cell, accuracy in accuracies.items()}
    theirs = expected("features")
    claim = next(c for c in theirs.claims if c["cell"] == "cifar10-sample-a" and "above" in c)
    backwards = {**claim, "cell": "cifar10-dpsgd", "above": "cifar10-sample-a"}
    network = replace(theirs, measured_on={})
    assert network.model("cifar10-dpsgd") == NETWORK
    words = [verdict(one, table, on, done).word for on in (theirs, network) for one in (claim, backwards)]
    assert words == [WORDS[True, False], WORDS[False, False], WORDS[True, True], WORDS[False, True]]
    assert verdict(claim, table, theirs, {}).word == NOT_RUN
    assert opening.said([verdict(one, table, network, done) for one in (claim, claim, backwards)]) == (
        "reproduced: 2 of 3; contradicted on the paper's network: 1 of 3"
    )


def test_the_front_page_has_table_2_first_and_a_scorecard_without_a_gap():
    front = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert front.index("| data, setup |") < front.index("## Scorecard")
    card = rows(section("docs/results.md", "Scorecard"), 6)
    assert len(card) >= 18
    for item, (_, ours, said, model, seeds) in card.items():
        assert all((ours, said, model, seeds)), item
        assert NOT_RUN not in ours, item
    tested = [found for found in VERDICTS if found.found != NOT_RUN]
    counts = {word: sum(v.word == word for v in tested) for word in WORDS.values()}
    assert_page_says(
        "docs/results.md",
        f"Of {len(tested)} claims that were tested, {counts[WORDS[True, True]]} were reproduced, "
        f"{counts[WORDS[True, False]]} have the same direction on another model, {counts[WORDS[False, False]]} were "
        f"not seen on a linear model, and {counts[WORDS[False, True]]} were contradicted on the paper's network. "
        f"{sum(v.seeds == 1 for v in tested)} rest on one seed",
        f"{mean('features', 'cifar10-scale-a'):.1f} % on CIFAR10 with Scale in setup A",
    )


def test_a_text_says_which_number_has_no_run():
    table = TABLES["fashion_mnist"]
    every = {"fashion_mnist": with_cells(table, *table.cells)}
    fill = opening.Filled(every, {"fashion_mnist": expected("fashion_mnist")}, {"fashion_mnist": []}, {})
    fields = "{mean fashion_mnist dpsgd}, {gain fashion_mnist sample-a dpsgd}, {mean table_2 mnist-dpsgd}, {#a}"
    assert fill(fields) == "not run, not run, not run, {#a}"


# -- errata ----------------------------------------------------------------------------------------------------------


def test_the_errata_have_each_printed_parameter_that_contradicts_the_paper():
    listed, odd = rows(section("docs/results-errata.md", "Parameters"), 4), 0
    names = {"noise_multiplier": "σ_p", "clip_norm": "c_p", "noise_scale": "σ"}
    for cell, printed in expected("parameters").cells.items():
        for row in printed:
            if row.contradicts:
                data, method, setup = cell.removesuffix("-tuned").split("-")
                where = f"Table {6 if cell.endswith('-tuned') else 7}, {data.upper()}, {method.title()}, setup "
                found = listed[f"{where}{setup.upper()}: {names[row.quantity.partition('[')[0]]}"][0]
                assert f"{row.mean:g}" in found
                odd += 1
    assert odd == 20
    assert sum(len(found[0].split(", ")) for where, found in listed.items() if where.startswith("Table")) == odd


def test_the_errata_are_computed_from_what_the_paper_prints():
    """By hand: the means of three numbers, the iterations of 60 epochs, what the code spends, and the mean budgets."""
    listed, found = rows((ROOT / "docs" / "results-errata.md").read_text(encoding="utf-8"), 4), errata.numbers()
    svhn = listed["Table 7, SVHN, Scale, setup A: σ"]
    assert svhn[1] == f"{1 / (0.34 / 2.747 + 0.43 / 1.589 + 0.23 / 1.214):.3f}" != svhn[0]
    assert f"{0.34 * 2.747 + 0.43 * 1.589 + 0.23 * 1.214:.3f}" in svhn[2]
    assert found["iterations"] == f"{60 * 50_000 / 1_024:.2f}"
    spends = RDP([SampledGaussian(1 / 118, 3.42529, 9_375)], 1e-5)
    assert found["mnist-spent"] == f"{spends:.4f}"
    assert found["budgets"] == f"{0.34 + 0.86 + 0.69:.2f} and {0.54 + 0.74 + 0.27:.2f}"
    text = (HERE / "texts.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\{errata ([\w-]+)\}", text)) == set(found)


# -- what of the paper is not here -----------------------------------------------------------------------------------

STATES = {"here", "here, not used", "on another model", "not here", NOT_RUN, *WORDS.values()}


def states() -> dict[str, list[str]]:
    parts = (
        section("docs/paper.md", "Where each part is"),
        section("docs/results-paper.md", "The status of everything"),
    )
    return {item: row for part in parts for item, row in rows(part).items() if row[0] != "state"}


def test_every_row_on_the_status_has_a_state_and_names_what_exists():
    table, cited = states(), set()
    assert len(table) >= 45
    for item, (state, *rest) in table.items():
        assert set(re.sub(r": \d+ of \d+", "", state).split("; ")) <= STATES, item
        for code in re.findall(r"`([^`]+)`", " ".join(rest)):
            if "/" in code:
                assert (SOURCE / code).exists() or (ROOT / code).exists(), f"{item}: {code}"
            elif code in TABLES:
                cited.add(code)
            else:
                assert callable(functools.reduce(getattr, code.split("."), epsilons)), f"{item}: {code}"
    on_pages = {name for name, table in TABLES.items() if expected(name).items}
    assert on_pages <= cited


def test_every_item_of_the_paper_has_an_anchor_and_a_link_to_it():
    items = [item for name in TABLES for item in expected(name).items]
    assert len(items) == len(set(items))
    tables = [f"Table {number}" for number in range(2, 18)]
    assert {*tables, *(f"Figure {number}" for number in range(1, 11))} <= set(items)
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("results*.md"))
    for name in TABLES:
        for anchor in reporting._anchors(TABLES[name], expected(name)):
            assert f'<a id="{anchor}"></a>' in text, anchor
    assert not re.search(r"\b(tab|fig|app|sec):\w", text)


def test_the_accuracies_on_the_page_of_concepts():
    means = [mean("table_2", f"{data}-dpsgd") for data in ("mnist", "cifar10")]
    assert_page_says(
        "docs/concepts.md", f"with everyone at ε = 1, {means[0]:.1f} % on MNIST and {means[1]:.1f} % on CIFAR-10"
    )
