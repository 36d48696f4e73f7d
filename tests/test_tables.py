"""What is printed of plans, ledgers, risks and advice tells nobody what one person chose."""

from __future__ import annotations

import gzip
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from epsilons import Budgets, Plan, Recipe, advise, plan
from epsilons.cli import app
from epsilons.core.disclosure import SMALLEST_SHOWN, display_rows, has_small_cells
from epsilons.core.mechanism import Groups
from epsilons.errors import BudgetError, InfeasibleBudgetError, PlanError
from epsilons.ledger.ledger import Ledger
from epsilons.planning import STRATEGIES
from shares import examples, share

RECIPE = Recipe(steps=30, batch_size=20, clip_norm=1.0)


def made(levels, counts, strategy: str = "scale", delta=1e-5, **options) -> Plan:
    return plan(Budgets(np.repeat(levels, counts), delta), RECIPE, strategy, "rdp", **options)


def printed(shown: Plan, other: Plan) -> str:
    """All that Python prints of a plan: alone, beside another way, and charged in part and in full."""
    ledger = Ledger(shown)
    texts = [str(shown), repr(shown), repr(shown.phases), shown.compare(other), str(ledger)]
    for phase, lines in enumerate(shown.phases):
        for step in range(lines.steps):
            ledger.charge(phase, step)
            if step % 15 == 0:
                texts.append(str(ledger))
    return "\n".join([*texts, str(ledger), repr(ledger)])


def commanded(words: list[str], levels, counts, folder: Path, name: str) -> str:
    """What the command line prints for a file of such budgets."""
    file = folder / f"{name}.csv"
    file.write_text("epsilon\n" + "\n".join(f"{level}" for level in np.repeat(levels, counts)) + "\n")
    recipe = ["--batch-size", "20", "--steps", "30", "--accountant", "rdp"]
    outcome = CliRunner().invoke(app, [*words, "--budgets", str(file), *recipe])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


#: Two lists of levels that differ in what a few hold, and how many hold each.
ALIKE = [
    ([0.37, 1.0, 2.0], [0.99, 1.0, 2.0], [1, 30, 569]),  # below all others
    ([1.0, 2.3, 7.7, 9.0], [1.0, 3.1, 6.9, 9.0], [200, 19, 1, 180]),  # in between
    ([1.0, 2.0, 7.7], [1.0, 2.0, 5.5], [300, 297, 3]),  # above
    ([0.5, 0.7, 0.9], [0.6, 0.8, 0.95], [7, 8, 9]),  # all of them
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("one", "other", "counts"), ALIKE, ids=["below", "between", "above", "all"])
def test_what_is_printed_is_the_same_whatever_the_few_chose(strategy, one, other, counts):
    first, second = (made(levels, counts, strategy) for levels in (one, other))
    beside = [made(levels, counts, "uniform") for levels in (one, other)]
    assert first != second
    assert printed(first, beside[0]) == printed(second, beside[1])


def test_nor_does_it_depend_on_the_deltas_of_the_few():
    deltas = [np.repeat([delta, 1e-5], [1, 599]) for delta in (3.3e-7, 4.1e-6)]
    first, second = (made([0.37, 1.0, 2.0], [1, 30, 569], delta=delta) for delta in deltas)
    assert printed(first, first) == printed(second, second)


@examples(10, 30)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.integers(0, 2**32),
    st.sampled_from(["uniform", "scale", "sample", "exclude"]),
)
@example([1, 30, 569], 0, "uniform")
def test_two_plans_of_the_same_rows_print_the_same(counts, seed, strategy):
    assume(sum(counts) >= 40 and min(counts) < SMALLEST_SHOWN)
    generator = np.random.default_rng(seed)
    levels = np.sort(generator.choice(np.arange(50, 900), len(counts), replace=False)) / 100
    # One hidden person goes elsewhere between the two neighbours.
    place = int(np.argmin(counts))
    low = levels[place - 1] if place else levels[0] / 2
    high = levels[place + 1] if place + 1 < len(levels) else levels[-1] * 1.3
    moved = levels.copy()
    moved[place] = generator.uniform(low, high)
    one, other = made(levels, counts, strategy), made(moved, counts, strategy)
    labels = [
        [(row.label, row.records) for row in display_rows(each.groups, None, release=True)] for each in (one, other)
    ]
    assume(labels[0] == labels[1])
    assert printed(one, one) == printed(other, other)


@pytest.mark.parametrize(("one", "other", "counts"), share(ALIKE[:3], 1))
@pytest.mark.parametrize(
    "words",
    [["plan"], ["plan", "--strategy", "uniform", "--compare", "sample"], ["plan", "--risk"], ["advise"]],
    ids=" ".join,
)
def test_the_command_line_prints_the_same_whatever_the_few_chose(words, one, other, counts, tmp_path):
    texts = [commanded(words, levels, counts, tmp_path, f"{n}") for n, levels in enumerate((one, other))]
    assert texts[0] == texts[1]


# -- and it still says what can be said -------------------------------------------------------------------------------


def test_a_large_group_beside_a_small_one_shows_a_bound_and_no_exact_spend():
    text = made([0.37, 1.0, 2.0], [1, 30, 969], "uniform").summary()
    assert [line.split()[:1] + line.split()[-1:] for line in text.splitlines()[3:5]] == [["≤", "budget"], ["2", "2"]]
    assert "≤ 2" in text
    assert "0.37" not in text
    assert "noise_std " not in text
    assert "plan.json and plan.epsilon_spent()" in text


def test_a_large_group_that_is_left_out_shows_that_it_spends_nothing():
    lines = made([0.4, 1.0, 2.0], [3, 500, 497], "exclude", threshold=1.5).summary().splitlines()[3:5]
    assert [row.split()[-1] for row in lines] == ["budget", "2"]
    lines = made([1.0, 2.0, 2.5], [500, 497, 30], "exclude", threshold=1.5).summary().splitlines()[3:6]
    assert [row.split()[3] for row in lines] == ["0", "2", "2"]
    lines = made([1.0, 2.0, 2.5, 3.0], [500, 447, 3, 50], "exclude", threshold=1.5).summary().splitlines()[3:6]
    assert [row.split()[-1] for row in lines] == ["0", "2", "budget"]


def test_a_merged_row_s_label_does_not_show_one_person_s_choice():
    text = made([1.0, 2.3, 7.7, 9.0], [500, 19, 1, 480]).summary()
    assert "7.7" not in text
    assert "below 9" in text


def test_a_small_remainder_cannot_be_computed_from_the_total():
    text = made([1.0, 2.0, 7.7], [500, 497, 3]).summary()
    counts = [int(cell.replace(",", "")) for cell in re.findall(r"(?<![\d.,])\d[\d,]*(?![\d.,])", text)]
    assert 497 not in counts
    assert "2 to 10" in text


def test_with_one_budget_each_the_table_says_how_many_lie_below_which_bounds():
    text = made(np.linspace(1.0, 3.0, 2000), np.ones(2000, dtype=int)).summary()
    lines = [line.split() for line in text.splitlines()[3:5]]
    assert [line[:2] for line in lines] == [["≤", "2"], ["≤", "5"]]
    assert sum(int(line[3].replace(",", "")) for line in lines) == 2000


def test_with_one_budget_each_the_command_line_says_as_much(tmp_path):
    levels = np.round(np.linspace(0.6, 3.0, 200), 3)
    text = commanded(["plan", "--risk", "--compare", "uniform"], levels, np.ones(200, dtype=int), tmp_path, "each")
    assert "≤ 5" in text
    assert "Suppressed" in text
    assert not any(f" {level:g} " in text for level in levels[1:-1] if level != 2)


def test_risks_of_visible_groups_follow_from_their_own_promise(tmp_path):
    text = commanded(["plan", "--risk"], [1.0, 2.0, 9.0], [300, 299, 1], tmp_path, "few")
    assert "≤ 74" in text  # (e + δ) / (1 + e) is .7311: rounded up, of 100 guesses
    assert "Guessing whether a record took part" not in text


def test_without_small_groups_nothing_is_suppressed():
    text = made([1.0, 2.0, 7.7], [500, 480, 20]).summary()
    for words in ("noise_std ", "sample_rate", "clip_norm", "noise_multiplier", "7.7"):
        assert words in text
    assert "Suppressed" not in text


def test_exact_numbers_stay_in_the_plan_and_its_file(tmp_path):
    shown = made([0.37, 1.0, 2.0], [1, 30, 969], "uniform")
    assert shown.epsilon_spent()[2] == pytest.approx(0.37, rel=1e-4)
    assert Plan.load(shown.save(tmp_path / "plan.json")).epsilons.tolist() == [0.37, 1.0, 2.0]


# -- advice -----------------------------------------------------------------------------------------------------------


def test_advice_prints_no_small_group_s_size_or_budget_and_holds_the_numbers(tmp_path):
    advice = advise(Budgets([0.5] * 3 + [2.0] * 997), RECIPE, "rdp")
    for text in (str(advice), repr(advice)):
        assert "997" not in text
        assert "signal=" not in text
    assert "advise(…).ways" in str(advice)
    assert {way.records for way in advice.ways} == {997, 1000}
    file = tmp_path / "wishes.csv"
    file.write_text("epsilon\n" + "0.5\n" * 3 + "2\n" * 997)
    words = ["advise", "--budgets", str(file), "--batch-size", "20", "--steps", "30", "--accountant", "rdp"]
    refused = CliRunner().invoke(app, [*words, "--picture", str(tmp_path / "advice.png")])
    assert isinstance(refused.exception, PlanError)
    assert not (tmp_path / "advice.png").exists()


# -- errors and notes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [3, 19])
def test_leaving_out_too_many_is_refused_without_saying_how_few_are_left(few):
    with pytest.raises(PlanError, match="fewer records than the expected batch") as caught:
        made([1.0, 2.0], [500 - few, few], "exclude", threshold=1.5)
    assert not re.search(rf"\b({few}|{500 - few}|500)\b", str(caught.value))


def test_notes_are_suppressed_where_their_counts_would_show_one_choice():
    recipe = Recipe(50, 10, 1.0)
    few = plan(Budgets([1.0] * 985 + [2.0] * 15), recipe, "exclude", "rdp", threshold=2.0)
    assert not any("985" in note or "15" in note for note in few.notes)
    many = plan(Budgets([1.0] * 900 + [2.0] * 100), recipe, "exclude", "rdp", threshold=2.0)
    assert many.notes == ("900 of 1,000 records take no part and spend nothing.",)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_budget_out_of_reach_does_not_show_one_person_s_delta(strategy):
    deltas = [3.3e-8] + [1e-5] * 999
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(Budgets([0.1] + [1.0] * 999, deltas), Recipe(200, 50, 1.0), strategy, "rdp")
    assert not re.search(r"3\.3|delta = |\d\.\d", str(caught.value)), str(caught.value)


def test_rows_merge_exactly_the_groups_of_fewer_than_twenty():
    for counts in itertools.product((19, 20), repeat=3):
        shown = made([1.0, 2.0, 3.0], counts)
        assert has_small_cells(shown.groups) == (min(counts) < 20)
        assert has_small_cells(shown.groups) == any(
            row.merged for row in display_rows(shown.groups, None, release=True)
        )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("release", [False, True])
def test_fewer_rows_are_merges_of_whole_rows(seed, release):
    """Where rows of two tables overlapped in part, their difference would be a small cell."""
    generator = np.random.default_rng(seed)
    counts = generator.choice([1, 3, 15, 25, 60], generator.integers(9, 200))
    epsilons = np.sort(generator.choice(np.arange(50, 2_000), len(counts), replace=False)) / 100
    groups = Groups(epsilons, np.full(len(counts), 1e-5), counts)
    rows, fewer = (display_rows(groups, None, release, most) for most in (50, 8))
    assert len(fewer) <= 8
    assert {row.groups.start for row in fewer} <= {row.groups.start for row in rows}
    assert sum(row.records or 0 for row in fewer) == counts.sum()


# -- files of tables: each is read in one way, or refused with the true reason -----------------------------------------


REFUSED = [
    ("a.csv", b"", "is empty"),
    ("a.csv", b"\n\n", "only blank lines"),
    ("a.csv", b"\x89PNG\r\n", "a PNG image"),
    ("a.csv", b"PK\x03\x04", r"a workbook \(.xlsx"),
    ("a.xlsx", b"PK\x03\x04", "export the sheet as CSV"),
    ("a.csv", "epsilon\n1\n2\n".encode("utf-16-le"), "without a byte-order mark"),
    ("a.csv", b"epsilon;b,c\n1;2,3\n2;2,3\n", "commas or semicolons"),
    ("a.csv", b'epsilon,b\n1,"x\n2,y\n3,z\n', "never closed"),
    ("a.csv", b"epsilon;b\n1.234;x\n2.500;y\n", "may be between thousands"),
    ("a.csv", b"epsilon;b\n0,5;x\n2;y\n", "decimal commas"),
    ("a.csv", b"epsilon,b\n1,x\n,\n", "blank lines"),
    ("a.csv.gz", gzip.compress(b"epsilon\n1\n2\n")[:-9], "damaged"),
]


@pytest.mark.parametrize(("name", "content", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_read_in_one_way_is_refused_with_the_reason(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BudgetError, match=words):
        Budgets.from_csv(tmp_path / name, delta=1e-3)


@pytest.mark.parametrize(
    ("name", "content", "stated"),
    [
        ("a.csv.gz", gzip.compress(b"epsilon,b\n0.5,x\n2,y\n"), {}),
        ("a.tsv", b"epsilon\tb,c\n0.5\tx,1\n2\ty,1\n", {}),
        ("a.CSV", "epsilon;b\r\n0.5;Köln\r\n2;y\r\n".encode("utf-16"), {}),
        ("a.csv", b"sep=;\r\nepsilon;b\r\n0.5;x\r\n2;y\r\n", {}),
        ("a.csv", b'epsilon,b\n"0,5",x\n2,y\n', {"decimal": ","}),
        ("a.csv", b"epsilon|b\n0,500|x\n2,000|y\n", {"decimal": ","}),
        ("a.csv", b"epsilon;b,c\n0.5;2,3\n2;2,3\n", {"separator": ";"}),
    ],
    ids=range(7),
)
def test_budgets_are_the_same_in_every_form_of_text(name, content, stated, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert Budgets.from_csv(tmp_path / name, delta=1e-3, **stated).epsilons.tolist() == [0.5, 2.0]


def test_a_folder_is_no_table(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(BudgetError, match="is a folder"):
        Budgets.from_csv(tmp_path / "a.csv")
