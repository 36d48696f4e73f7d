"""Ids of persons: what a value is read as, which ids may be one person, statements about it, and dates of consent."""

from __future__ import annotations

import html
import json
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from epsilons import Budgets, Recipe, Registry, fit, plan
from epsilons.budgets.ids import AS_WRITTEN, WAYS, as_rule, count_unstated, ids_in, normalised, texts_of
from epsilons.configs import consent
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import prepare
from epsilons.core.disclosure import shown_counts
from epsilons.errors import BudgetError, EpsilonsError, EpsilonsWarning, RegistryError
from epsilons.registry import runs
from epsilons.reporting import population
from epsilons.tabular import Marks, read_table
from epsilons.tabular.table_files import with_marks
from epsilons.training import Records, Training
from id_cases import CONFIG
from program import change, epsilons
from registries import outside, reserve, table

URL = "sqlite:///people.db"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPSILONS_REGISTRY", raising=False)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (["007", " 7 ", "7.0"], ["007", "7", "7.0"]),
        ([7, 7.0, np.int16(7), np.float32(7)], ["7"] * 4),
        ([Decimal("7.00"), Decimal(10) ** 20, Decimal("0.50")], ["7", "1" + "0" * 20, "0.5"]),
        (np.array([2**63 + 1], dtype=np.uint64), ["9223372036854775809"]),
        (np.array(["007", "7"], dtype=object), ["007", "7"]),
        (pyarrow.array([10**20 + 1], pyarrow.decimal128(21, 0)), ["100000000000000000001"]),
        (pyarrow.array(["07", "7"]).dictionary_encode(), ["07", "7"]),
        (pyarrow.chunked_array([["0x10"], ["1e5"]]), ["0x10", "1e5"]),
        ([10**15 + 1, "9" * 400], ["1000000000000001", "9" * 400]),
    ],
)
def test_a_value_is_read_as_the_text_that_is_written(ids, texts):
    assert texts_of(ids).to_pylist() == texts


@pytest.mark.parametrize(
    "ids", [[1e15], [2.0**53], np.array([2**24], dtype=np.float32), [np.float16(2**11)], [float("-inf")]]
)
def test_floats_that_may_have_lost_digits_are_no_ids(ids):
    with pytest.raises(BudgetError, match="infinite, or floats too large"):
        texts_of(ids)


@pytest.mark.parametrize("empty", ["\ufeff", "\u200b\u2003", "\u3000", "\u00ad"])
def test_an_id_of_invisible_characters_is_empty(empty):
    with pytest.raises(BudgetError, match="no id of a person"):
        texts_of(["a", empty])


@pytest.mark.parametrize("rule", [(), ("casefold",), ("nfkc", "casefold")])
@pytest.mark.parametrize("empty", ["NA", "NaN", "null", "N/A"])
def test_an_empty_cell_is_no_person_whatever_is_made_equal(empty, rule):
    with pytest.raises(BudgetError, match="no id of a person"):
        texts_of(["a", empty], rule)


def test_true_and_false_are_no_budgets():
    parquet.write_table(pyarrow.table({"pid": ["a", "b"], "epsilon": [True, True]}), "wishes.parquet")
    for person in ("pid", None):
        with pytest.raises(BudgetError, match="true and false"):
            Budgets.from_parquet("wishes.parquet", person=person)


def test_categories_and_empty_columns_of_parquet_files_are_read_as_their_values():
    cells = pyarrow.array(["4", "NA", "2"]).dictionary_encode()
    entries = {"pid": pyarrow.array(["p0", "p1", "p2"]).dictionary_encode(), "tier": cells, "gone": pyarrow.nulls(3)}
    write(["p0,4,,,"], people=3, budgets='blank = "left out"\nas_of = "2026-10-01"\nwithdrawn_on = "gone"')
    parquet.write_table(pyarrow.table(entries), "wishes.parquet")
    change("wishes.csv", "wishes.parquet")
    change("tiers = { open = 4 }\n", "")
    assert rows_used() == [0, 2]
    assert Budgets.from_parquet("wishes.parquet", column="pid", tiers={"p0": 1, "p1": 2, "p2": 3}).records == 3


def test_a_day_before_all_calendars_in_a_column_that_is_not_used_is_no_error():
    write(["p0,open,,,", "p1,open,,,0000-01-01"], people=2)
    assert rows_used() == [0, 1]


def test_a_column_of_numbers_of_a_text_file_is_no_column_of_ids():
    table = pyarrow.table({"id": [7, 8]})
    assert ids_in(table, "id", Path("a.parquet"), BudgetError).to_pylist() == ["7", "8"]
    with pytest.raises(AssertionError):
        ids_in(with_marks(table, Marks(",")), "id", Path("a.csv"), BudgetError)
    Path("a.csv").write_text("id,x\n007,1\n")
    with pytest.raises(AssertionError):
        ids_in(read_table(Path("a.csv"), "data", BudgetError), "id", Path("a.csv"), BudgetError)


# -- spellings ---------------------------------------------------------------------------------------------------------

PAIRS = [
    ("ANN", "ann", "casefold"),
    ("straße", "STRASSE", "casefold"),
    ("e\u0301", "é", "nfkc"),
    ("\uff11\uff12", "12", "nfkc"),
    ("\u200bann", "ann", "strip invisible"),
    ("\ufeffann", "ann", "strip invisible"),
    ("a  b", "a b", "strip blanks"),
    ("\u2003ann", "ann", "strip blanks"),
    ("7.0", "7", "strip .0"),
    ("7,00", "7", "strip .0"),
    ("007", "7", "strip leading zeros"),
    ("007A", "7A", "strip leading zeros"),
]


@pytest.mark.parametrize(("one", "other", "way"), PAIRS)
def test_two_spellings_need_a_statement_and_one_way_makes_them_equal(one, other, way):
    assert count_unstated((), texts_of([one, "else"]), texts_of([other])) == (2, 3)
    assert count_unstated((AS_WRITTEN,), texts_of([one, other])) == (0, 2)
    assert normalised(one, (way,)) == normalised(other, (way,))
    others = tuple(name for name in WAYS if name != way)
    assert normalised(one, others) != normalised(other, others) or way == "strip blanks"
    assert len(set(texts_of([one, other], (way,)).to_pylist())) == 1
    assert count_unstated((way,), texts_of([one, other], (way,))) == (0, 1)
    assert count_unstated((way,), texts_of([one, other, "B", "b"], (way,)))[0] == (0 if way == "casefold" else 2)


@pytest.mark.parametrize("pair", [("+7", "7"), ("1e2", "100"), ("1.10", "1.1"), ("1,5", "1,50")])
def test_two_spellings_that_no_way_makes_equal_are_other_people_or_refused(pair):
    assert count_unstated(tuple(WAYS), texts_of(list(pair), tuple(WAYS)))[0] == 2
    assert count_unstated(as_rule([*WAYS, AS_WRITTEN]), texts_of(list(pair), tuple(WAYS)))[0] == 0


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        (["1.23457E+14", "x"], 1),
        (["1e+20", "x"], 1),
        (["1,5E15", "x"], 1),
        (["1e5", "7"], 1),  # a column of numbers
        (["1e5", "7f"], 0),  # hexadecimal
        (["43e1", "a0"], 0),
        (["0x10", "16"], 0),
        (["-7", "7"], 0),
        (["P-007", "P-7"], 0),
    ],
)
def test_numbers_that_a_program_rounded_need_a_statement(ids, count):
    assert count_unstated((), texts_of(ids))[0] == count


@pytest.mark.parametrize("seed", range(40))
def test_an_id_that_was_made_equal_stays_as_it_is(seed):
    rng = np.random.default_rng(seed)
    marks = [*"0017aAéß.,eE+- \t\u200b\ufeff\uff11\u00a0\u2003\u0301\u1e9e\u01c4"]
    ways = tuple(name for name in WAYS if rng.random() < 0.6)
    for _ in range(50):
        text = "".join(rng.choice(marks, rng.integers(1, 9)))
        once = normalised(text, ways)
        assert normalised(once, ways) == once


def test_an_unknown_way_is_named_with_those_that_there_are():
    with pytest.raises(BudgetError, match=r"'as written'; got 'lower'"):
        Budgets.by_person([1.0], ["a"], spelling="lower")
    Path("a.toml").write_text('[data]\ntrain = "a.csv"\nids = ["lower"]\n[training]\nsteps = 1\nbatch_size = 1\n')
    epsilons("train", "a.toml").is_refused(2, "data.ids", "'casefold'", "got 'lower'")
    assert as_rule(["casefold", AS_WRITTEN, "nfkc"]) == ("nfkc", "casefold", AS_WRITTEN)


# -- in Python ---------------------------------------------------------------------------------------------------------


def trained(budgets: Budgets, persons: Any) -> Any:
    model, rows = torch.nn.Linear(1, 2), len(persons)
    data = torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.long)
    made = plan(budgets, Recipe(1, 1.0, 1.0), accountant="rdp")
    return fit(model, Records(data, persons=persons), made, budgets=budgets, training=Training(lr=0.1, progress=False))


@pytest.mark.filterwarnings("ignore:delta")
def test_training_in_python_needs_the_statement_and_keeps_it_for_other_rows():
    ids = ["ANN", "ann", "bob"]
    with pytest.raises(BudgetError, match=r"^Fewer than 20 ids .* spelling=…"):
        trained(Budgets.by_person([1.0] * 3, ids), ids)
    apart = Budgets.by_person([1.0, 1.0, 2.0], ids, spelling="as written")
    together = Budgets.by_person([1.0, 1.0, 2.0], ids, spelling=["casefold"])
    assert (len(apart), len(together)) == (3, 2)
    assert together.persons_of(["BOB", "Ann"]).tolist() == [1, 0]
    assert together.subset([1]).persons_of(["bOb"]).tolist() == [0]
    with pytest.raises(BudgetError, match="without a budget"):
        apart.persons_of(["BOB"])
    trained(apart, ids)
    trained(together, ["Bob", "aNN"])
    with pytest.raises(BudgetError, match="different budgets"):
        Budgets.by_person([1.0, 2.0], ["a", "A"], spelling="casefold")


# -- a registry --------------------------------------------------------------------------------------------------------


def test_a_registry_keeps_how_its_ids_are_made_equal():
    with Registry.create(URL, spelling=["casefold", "nfkc"]) as registry:
        registry.enrol(["Ann", "b\uff11"], 1.0)
    with Registry(URL) as registry:
        assert registry.spelling == ("nfkc", "casefold")
        assert registry.are_enrolled(["ANN", "B1", "ann2"]).tolist() == [True, True, False]
        accounts = registry.account(["aNN", "b1"])
        assert accounts.budgets(0.5).persons_of(["ANN"]).tolist() == [0]
        with pytest.raises(RegistryError, match="twice"):
            registry.account(["ann", "ANN"])
        registry.withdraw(["ANN"])
        assert registry.account(["ann"]).withdrawn.all()
        assert registry.verify().is_right
    outside((URL,), "update fact set value = 'casefold' where name = 'ids'")
    with Registry(URL) as registry:
        assert "the table fact" in str(registry.verify().first)
    outside((URL,), "update fact set value = 'nfkc, casefold' where name = 'ids'")
    for spelling in ("as written", ["casefold"]):
        with pytest.raises(RegistryError, match="nfkc and casefold"):
            Registry(URL, spelling=spelling)
    with Registry.create("sqlite:///other.db") as other:
        assert other.spelling == ()
    assert Registry("sqlite:///other.db", spelling="as written").spelling == ("as written",)
    with pytest.raises(RegistryError, match="as written"):
        Registry("sqlite:///other.db", spelling="casefold")


def test_an_import_of_several_spellings_needs_a_statement():
    variants = ["ann", "ANN", "007", "7", "7.0", "e\u0301", "é", "\uff17", "\u200b7", "\ufeff7", "a  b", "a b"]
    Path("wishes.csv").write_text("id,epsilon\n" + "".join(f"{one},1\n" for one in variants), encoding="utf-8")
    with_import = {"one": (["as written"], 12), "two": ([*WAYS], 4)}
    for name, (ids, people) in with_import.items():
        stated = [part for one in ids for part in ("--ids", one)]
        import_ = ("registry", "import", f"sqlite:///{name}.db", "wishes.csv", "--person", "id")
        epsilons("registry", "create", f"sqlite:///{name}.db", *(stated if name == "two" else [])).succeeded()
        if name == "one":
            epsilons(*import_).is_refused(2, "Fewer than 20 ids", "--ids")
            epsilons(*import_, "--ids", "casefold").is_refused(2, "compares ids as written")
        epsilons(*import_, *stated).succeeded()
        with Registry(f"sqlite:///{name}.db") as registry:
            assert len(registry.account(texts_of(variants, registry.spelling).unique().to_pylist())) == people


# -- who takes part ----------------------------------------------------------------------------------------------------


def write(entries: list[str], people: int = 100, budgets: str = "", header: str = "pid,tier,from,to,gone") -> None:
    """p0 … with one row each, a list, and a config of both."""
    rows = [f"p{i},{i % 1000},{('no', 'yes')[i % 2]}" for i in range(people)]
    Path("people.csv").write_text("pid,serial,label\n" + "\n".join(rows) + "\n")
    Path("wishes.csv").write_text(header + "\n" + "\n".join(entries) + "\n")
    stated = '[budgets]\nfile = "wishes.csv"\ncolumn = "tier"\ntiers = { open = 4 }\ndelta = 1e-4\n' + budgets
    Path("people.toml").write_text(CONFIG.format(train="people.csv", data="", budgets=stated))


def rows_used() -> list[int]:
    made = prepare(read_config(Path("people.toml")), Path())
    return np.rint((made.train.inputs[:, 0] + 1) * 500).astype(int).tolist()


def counts(*more: str) -> dict[str, str]:
    outcome = epsilons("consent", "check", "people.toml", "--json", *more)
    return {row["what"]: row["count"] for row in json.loads(outcome.out)["table"]} | {"code": str(outcome.code)}


def test_people_without_an_entry_are_refused_or_left_out_as_stated():
    write([f"p{i},open,,," for i in range(60)])
    for command in ("plan", "train", "consent check"):
        epsilons(*command.split(), "people.toml").is_refused(2, "40 of 100 persons", 'unlisted = "left out"')
    undecided = {"matched": "60", "not in: unlisted": "40", "code": "2"}
    assert undecided.items() <= counts().items()
    change("delta = 1e-4", 'delta = 1e-4\nunlisted = "left out"')
    assert rows_used() == list(range(60))
    assert counts() == {
        "matched": "60",
        "not in: unlisted": "40",
        "spellings not decided": "none",
        "listed without rows": "fewer than 20",
        "code": "0",
    }


def test_test_people_without_an_entry_are_tested_on_and_counted_as_such():
    write([f"p{i},open,,," for i in range(60)], people=60)
    rows = [f"p{i},{i},{('no', 'yes')[i % 2]}" for i in range(100)]
    Path("later.csv").write_text("pid,serial,label\n" + "\n".join(rows) + "\n")
    change('train = "people.csv"', 'train = "people.csv"\ntest = "later.csv"')
    found = json.loads(epsilons("consent", "check", "people.toml", "--json").out)["table"]
    tested = {row["what"]: row["count"] for row in found if row["file"] == "later.csv"}
    assert tested == {"matched": "100", "spellings not decided": "none"}
    with pytest.warns(EpsilonsWarning, match="too high"):
        assert prepare(read_config(Path("people.toml")), Path()).test.inputs.shape[0] == 100


def test_a_check_of_records_counts_records():
    write([f"p{i},{'open' if i < 60 else ''},,," for i in range(100)], budgets='blank = "left out"')
    change('person = "pid"', 'person = "each row is one person"\ndrop = ["pid"]')
    assert counts() == {"matched": "60", "not in: blank": "40", "code": "0"}
    write([f"p{i},open,,," for i in range(100)])
    change('person = "pid"', 'person = "each row is one person"\ndrop = ["pid"]')
    epsilons("consent", "check", "people.toml").succeeded("All records take part")


@pytest.mark.parametrize("key", ['unlisted = "left out"', 'without_rows = "on the roster"'])
def test_keys_about_persons_need_a_column_of_ids(key):
    write([f"p{i},open,,," for i in range(100)], budgets=key)
    change('person = "pid"', 'person = "each row is one person"\ndrop = ["pid"]')
    epsilons("plan", "people.toml").is_refused(2, f"budgets.{key.split()[0]}", "data.person")


WITHDRAWALS = ["withdrawn", "Withdrawal date", "consentWithdrawn", "revoked_at", "opt-out", "Widerruf", "ZURÜCKGEZOGEN"]
VALIDITY = ["valid_until", "validFrom", "gültig bis", "gu\u0308ltig_ab", "expires", "bis", "until"]


@pytest.mark.parametrize("name", [*WITHDRAWALS, *VALIDITY])
def test_a_list_with_withdrawals_or_validity_that_nothing_states_is_refused(name):
    write([f"p{i},open,{'2026-01-01' if i < 30 else ''}" for i in range(100)], header=f"pid,tier,{name}")
    commands = ("plan", "train", "train --dry-run", "consent check")
    for command in commands:
        epsilons(*command.split(), "people.toml").is_refused(2, repr(name), "withdrawn_on", "as_of", "Rename")
    change("delta = 1e-4", f'delta = 1e-4\nas_of = "2026-10-01"\nwithdrawn_on = "{name}"')
    assert rows_used() == list(range(30, 100))
    write([f"p{i},open,2026-01-01" for i in range(100)], header=f"pid,tier,{name}")
    change('person = "pid"', f'person = "pid"\ndrop = ["{name}"]')  # `init` drafts such a line by itself
    epsilons("plan", "people.toml").is_refused(2, repr(name))


@pytest.mark.parametrize("name", ["drawn", "bison", "validated_by", "note", "signed_on", "invalid", "adopt", "outlet"])
def test_other_names_of_columns_of_a_list_need_no_statement(name):
    write([f"p{i},open,x" for i in range(100)], header=f"pid,tier,{name}")
    assert rows_used() == list(range(100))


@pytest.mark.parametrize("person", ['"pid"', '"each row is one person"'])
def test_withdrawals_beside_budgets_in_the_data_are_refused_unless_stated(person):
    rows = [f"p{i},{i % 1000},{('no', 'yes')[i % 2]},open,{'2026-01-01' if i < 30 else ''},1" for i in range(100)]
    budgets = '[budgets]\ncolumn = "tier"\ntiers = { open = 4 }\ndelta = 1e-4\n'
    Path("people.csv").write_text("pid,serial,label,tier,withdrawn,valid\n" + "\n".join(rows) + "\n")
    Path("people.toml").write_text(CONFIG.format(train="people.csv", data="", budgets=budgets))
    change('person = "pid"', f'person = {person}\ndrop = ["pid", "withdrawn", "valid"]')
    for command in ("plan", "train --dry-run", "consent check"):
        epsilons(*command.split(), "people.toml").is_refused(2, "'withdrawn'", "Rename")
    change("delta = 1e-4", 'delta = 1e-4\nas_of = "2026-10-01"\nwithdrawn_on = "withdrawn"')
    assert rows_used() == list(range(30, 100))


DATED = """as_of = "2026-10-01"
valid_from = "from"
valid_until = "to"
withdrawn_on = "gone"
unlisted = "left out"
left_out = ["no"]
"""


@pytest.mark.parametrize(
    ("entries", "used"),
    [
        (["open,,,"], True),
        (["open,2026-10-01,2026-10-01,2026-10-02"], True),
        (["open,2026-10-02,,"], False),
        (["open,,2026-09-30,"], False),
        (["open,,,2026-10-01"], False),
        (["open,31.12.2020,2027/01/01,"], True),
        (["no,,2026-09-30,", "open,2026-09-01,,"], True),  # a refusal that ended
        (["open,,2026-09-30,", "no,2026-10-01,,"], False),  # one that began
        (["no,2026-10-02,,", "open,,,"], True),  # one to come
        (["open,,2020-01-01,2019-01-01", "open,2021-01-01,,"], False),  # who withdrew once is out
        (["open,,2020-01-01,", "no,,2020-01-01,"], False),  # nothing is in force
        (["open,,2020-01-01,", "maybe,,2020-01-01,", "open,,,"], True),  # what ended is not looked at
    ],
)
def test_the_day_decides_which_entries_are_in_force(entries, used, monkeypatch):
    monkeypatch.setattr(consent, "_today", lambda: date(2026, 10, 1))
    write([*(f"p0,{entry}" for entry in entries), "p1,open,,,"], people=2, budgets=DATED)
    assert rows_used() == ([0, 1] if used else [1])


def test_what_does_not_go_with_dates_is_refused():
    write(["p0,open,,,3/4/2026", "p1,open,,,"], people=2, budgets=DATED)
    epsilons("train", "people.toml").is_refused(2, "order is not stated")
    change("left_out", 'dates = "day first"\nleft_out')
    assert rows_used() == [1]
    change("3/4/2026", "soon", "wishes.csv")
    epsilons("train", "people.toml").is_refused(2, "are not dates", "wishes.csv")
    change('as_of = "2026-10-01"\n', "")
    epsilons("train", "people.toml").is_refused(2, "as_of is the day")
    change('valid_from = "from"\nvalid_until = "to"\nwithdrawn_on = "gone"\n', 'as_of = "2026-10-01"\n')
    epsilons("train", "people.toml").is_refused(2, "as_of is the day")
    change("2026-10-01", "October")
    epsilons("train", "people.toml").is_refused(2, "budgets.as_of")


def test_a_check_counts_reasons_and_months_by_the_rule_of_20():
    months = ["2026-01-05"] * 25 + ["2026-02-05"] * 3 + ["2026-03-05"] * 30 + ["2026-11-05"] * 30
    entries = [f"p{i},open,,,{day}" for i, day in enumerate(months)]
    entries += [f"p{i},no,,," for i in range(88, 120)] + [f"p{i},open,,," for i in range(120, 200)]
    entries += [f"q{i},open,,," for i in range(21)]
    write(entries, people=205, budgets=DATED)
    found = counts()
    assert found == {
        "matched": "110",
        "not in: withdrawn by 2026-10-01": "58",
        "not in: one or more of not in force on 2026-10-01, 'no', unlisted": "37",
        "of these, withdrew 2026-01 to 2026-01": "25",
        "of these, withdrew 2026-02 to 2026-03": "33",
        "spellings not decided": "none",
        "listed without rows": "21",
        "code": "0",
    }
    assert "fewer than 20" not in epsilons("consent", "check", "people.toml").out


@pytest.mark.parametrize(
    ("today", "words"),
    [
        (date(2026, 11, 4), None),  # all withdrawals are before the day that decides, or to come
        (
            date(2026, 11, 5),
            "as_of = 2026-10-01: 30 of 100 entries were withdrawn since then, and count as if they were not",
        ),
        (date(2026, 9, 30), "that day is still to come"),
    ],
)
def test_a_day_that_is_not_today_is_warned_of_where_it_changes_who_takes_part(today, words, monkeypatch):
    monkeypatch.setattr(consent, "_today", lambda: today)
    write([f"p{i},open,,,{'2026-11-05' if i < 30 else ''}" for i in range(100)], people=100, budgets=DATED)
    said = " ".join(epsilons("consent", "check", "people.toml").err.split())
    assert words in said if words else "as_of" not in said


def test_a_release_says_neither_how_many_withdrew_nor_in_which_months():
    row = {"file": "list.csv", "what": "matched", "count": "110"}
    months = [
        {**row, "what": f"of these, withdrew {one}", "count": "25"}
        for one in ("2026-01 to 2026-01", "2026-02 to 2026-03")
    ]
    stated = {"ids": [], "as_of": "2026-10-01", "table": [row, *months]}
    assert population.joined(stated, release=True)[1:] == ()
    assert "list.csv: of these, withdrew 2026-02 to 2026-03: 25" in population.joined(stated, release=False)


@pytest.mark.parametrize("seed", range(30))
def test_no_shown_count_and_no_difference_of_counts_is_small(seed):
    rng = np.random.default_rng(seed)
    counted = {f"reason {i}": int(rng.choice([0, 1, 5, 19, 20, 21, 400])) for i in range(rng.integers(1, 6))}
    shown = shown_counts(counted)
    assert sorted(", ".join(shown).split(", ")) == sorted(counted)
    for names, text in shown.items():
        total = sum(counted[name] for name in names.split(", "))
        assert text == (f"{total:,}" if total >= 20 else "fewer than 20")
    hidden = [names for names, text in shown.items() if text == "fewer than 20"]
    assert not hidden or sum(counted[name] for name in hidden[0].split(", ")) == 0 or len(shown) == 1


def test_a_list_leaves_people_out_under_a_registry_too():
    write([f"p{i},{'no' if i < 30 else 'open'},,," for i in range(90)], budgets=DATED)
    Path("enrol.csv").write_text("pid,epsilon\n" + "".join(f"p{i},3\n" for i in range(95) if i != 50))
    epsilons("registry", "create", URL).succeeded()
    epsilons("registry", "import", URL, "enrol.csv", "--person", "pid").succeeded()
    epsilons("registry", "withdraw", URL, "--id", "p60").succeeded()
    found = counts("--registry", URL)
    assert (found["matched"], found["code"]) == ("58", "0")
    outcome = epsilons("train", "people.toml", "--registry", URL, "--share", "0.5", "-q", "-o", "run")
    outcome.succeeded()
    with Registry(URL) as registry:
        charged = registry.account([f"p{i}" for i in range(95) if i != 50]).used_share > 0
    assert [i for i, was in zip((i for i in range(95) if i != 50), charged, strict=True) if was] == [
        i for i in range(30, 90) if i not in (50, 60)
    ]
    kept = json.loads(Path("run/run.json").read_text())["metadata"]["consent"]
    assert {row["what"]: row["count"] for row in kept["table"]}["matched"] == "58"
    change('unlisted = "left out"\n', "")
    epsilons("train", "people.toml", "--registry", URL, "--share", "0.5").is_refused(2, "persons have rows without")
    change('column = "tier"', 'column = "teir"')
    epsilons("train", "people.toml", "--registry", URL, "--share", "0.5").is_refused(2, "no column 'teir'")


def test_reports_say_how_people_were_joined_and_the_internal_one_counts_them_by_the_rule_of_20():
    write([f"p{i},{'no' if i < 30 else 'open'},,,2027-01-01" for i in range(100)], budgets=DATED)
    epsilons("train", "people.toml", "-q", "-o", "run").succeeded()
    epsilons("report", "run").succeeded()
    inside, outside = (json.loads(Path(f"run/{name}.json").read_text()) for name in ("report", "report-release"))
    how = "Ids of persons were compared as written; no two were alike up to spelling. Entries of consent count as of "
    assert "people.csv: matched: 70" in inside["joined"]
    assert inside["joined"][0] == outside["joined"][0] == f"{how}2026-10-01."
    assert inside["joined"][2:] == [
        "people.csv: not in: 'no': 30",
        "people.csv: not in: one or more of withdrawn by 2026-10-01, not in force on 2026-10-01, unlisted: fewer "
        "than 20",
        "people.csv: spellings not decided: none",
        "wishes.csv: listed without rows: fewer than 20",
    ]
    assert outside["joined"][1:] == []
    epsilons("release", "run").succeeded()
    for page in ("report-release.html", "release/README.md"):
        text = html.unescape(Path("run", page).read_text())
        assert all(line in text for line in outside["joined"]), page
        assert "people.csv" not in text
    assert "people.csv: matched: 70" in Path("run/report.html").read_text()
    epsilons("plan", "people.toml", "--html", "plan.html").succeeded()
    assert "entries of consent count as of" in Path("plan.html").read_text()
    assert "people.csv: matched" in Path("plan.html").read_text()


def test_whole_numbers_of_parquet_files_meet_the_texts_of_others():
    table = {"pid": list(range(40)), "serial": [float(i) for i in range(40)], "label": ["no", "yes"] * 20}
    parquet.write_table(pyarrow.table(table), "people.parquet")
    stated = '[budgets]\nfile = "wishes.csv"\ndelta = 1e-4'
    Path("people.toml").write_text(CONFIG.format(train="people.parquet", data="", budgets=stated))
    for form, refused in (("{}", False), ("{:03}", True), ("{}.0", True)):
        Path("wishes.csv").write_text("pid,epsilon\n" + "".join(f"{form.format(i)},4\n" for i in range(40)))
        if refused:
            epsilons("train", "people.toml", "--dry-run").is_refused(2, "ids of persons", "as written")
        else:
            assert rows_used() == list(range(40))
    change('person = "pid"', 'person = "pid"\nids = ["strip leading zeros", "strip .0"]')
    assert rows_used() == list(range(40))
    change('ids = ["strip leading zeros", "strip .0"]', 'ids = "as written"')
    with pytest.raises(EpsilonsError, match=r"None of the ids in wishes.csv occurs in people.parquet"):
        rows_used()


def test_a_config_states_what_its_registry_keeps():
    write([f"p{i},open,,," for i in range(30)], people=30)
    Path("enrol.csv").write_text("pid,epsilon\n" + "".join(f"P{i},3\n" for i in range(30)))
    epsilons("registry", "create", URL, "--ids", "casefold").succeeded()
    epsilons("registry", "import", URL, "enrol.csv", "--person", "pid").succeeded()
    train = ("train", "people.toml", "--registry", URL, "--share", "0.5", "--dry-run")
    epsilons(*train).succeeded("30 persons")
    change('person = "pid"', 'person = "pid"\nids = "as written"')
    epsilons(*train).is_refused(2, "compares ids casefold")


def test_an_export_states_that_who_withdrew_is_in_no_later_roster(monkeypatch):
    people = [f"p{i}" for i in range(60)]
    epsilons("registry", "create", URL).succeeded()
    with Registry(URL) as registry:
        registry.enrol(people, 3.0)
        reserve(registry, "before", people, [0] * 60, table([20.0]))
        registry.withdraw(people[:25])
        registry.change(people[:2], 3.0)  # they came back
        reserve(registry, "after", [*people[:2], *people[25:]], [0] * 37, table([20.0]))
        assert [registry.verify(date(year, 1, 1)).excluded for year in (2100, 2000)] == [23, 0]
        assert registry.verify().is_right
    epsilons("registry", "export", URL, "-o", "a.json", "--excluded", "2100-01-01").succeeded()
    values = json.loads(Path("a.json").read_text())
    assert values["excluded"] == {"withdrew_before": "2100-01-01", "people": "20 or more", "in_later_rosters": 0}
    epsilons("registry", "verify", URL, "--since", "a.json").succeeded()
    with Registry(URL) as registry:
        monkeypatch.setattr(runs, "move", lambda *a, **k: None)  # what refuses people who withdrew
        reserve(registry, "wrong", people[20:30], [0] * 10, table([20.0]))
        verdict = registry.verify(date(2100, 1, 1))
        assert (verdict.excluded, verdict.over) == (23, 5)
    epsilons("registry", "export", URL, "-o", "b.json", "--excluded", "2100-01-01").is_refused(3, "had withdrawn")
    epsilons("registry", "verify", URL, "--since", "a.json").is_refused(3, "had withdrawn")
    Path("c.json").write_text(json.dumps(values | {"excluded": {"withdrew_before": 7}}))
    epsilons("registry", "verify", URL, "--since", "c.json").is_refused(2, "no day")
    epsilons("registry", "verify", URL).is_refused(3, "had withdrawn")
    assert not Path("b.json").exists()


def test_a_check_tells_whether_a_run_s_roster_is_as_the_files_allow(monkeypatch):
    write([f"p{i},{'no' if i < 30 else 'open'},,,{'2026-01-05' if i > 74 else ''}" for i in range(100)], budgets=DATED)
    epsilons("train", "people.toml", "-q", "-o", "run").succeeded()
    check = ("consent", "check", "people.toml", "--run", "run")
    epsilons(*check).succeeded("as many people as these files allow, with the same budgets in the same order")
    found = json.loads(epsilons(*check, "--json").out)
    assert found["run"]["as_of"] == "2026-10-01"
    assert found["run"]["roster"].startswith("as many people as these files allow")
    assert found["run"]["ledger"] == json.loads(Path("run/ledger.jsonl").read_text().splitlines()[-1])["hash"]
    assert not re.search(r"\bp\d", json.dumps(found))
    change("p90,open,,,2026-01-05", "p90,open,,,", "wishes.csv")  # who withdrew is taken up
    epsilons(*check).is_refused(3, "not of the people")
    change("p90,open,,,", "p90,open,,,2026-01-05", "wishes.csv")
    change("p40,open,,,", "p40,no,,,", "wishes.csv")  # another left since
    change("p10,no,,,", "p10,open,,,", "wishes.csv")
    epsilons(*check).succeeded()  # as many, with the same budgets: no file of a run tells who they are
    change("2026-10-01", "2025-10-01")
    monkeypatch.setattr(consent, "_today", lambda: date(2025, 10, 1))
    epsilons(*check).is_refused(3, "not of the people")
    epsilons(*check, "--registry", URL).is_refused(2, "--excluded")


# -- differences of one person -----------------------------------------------------------------------------------------


def test_what_is_said_of_the_data_and_of_a_plan_does_not_show_that_one_person_holds_a_rare_tier():
    said = []
    for tier in ("open", "rare"):
        write([f"p{i},{tier if i == 7 else ('strict', 'open')[i % 2]},,," for i in range(100)])
        change("{ open = 4 }", "{ strict = 0.5, open = 4, rare = 3 }")
        outcome = epsilons("train", "people.toml", "--dry-run")
        text = " ".join((outcome.out + outcome.err).split())
        said.append(text[text.index("people.csv:") : text.index("no test data") + 40])
    assert said[0] == said[1]
    two, three = ([1.0] * 40 + [4.0] * 40, [1.0] * 39 + [2.0] + [4.0] * 40)
    assert repr(Budgets(two)) == "Budgets(80 records, 2 groups)"
    assert repr(Budgets(three)) == "Budgets(80 records)"


def test_a_plans_page_does_not_count_one_person_who_is_only_tested_on():
    """Rows after a day are held out: with one person less of them, the plan is the same, and so is its page."""
    pages = []
    for people in (70, 69):
        write([f"p{i},open,,," for i in range(people)], people=people)
        rows = [f"p{i},{i},{('no', 'yes')[i % 2]},202{3 + (i >= 40)}-05-01" for i in range(people)]
        Path("people.csv").write_text("pid,serial,label,day\n" + "\n".join(rows) + "\n")
        change('train = "people.csv"', 'train = "people.csv"\ntest_after = { day = ["2024-01-01"] }')
        epsilons("plan", "people.toml", "--html", "plan.html").succeeded()
        pages.append(html.unescape(Path("plan.html").read_text()))
        Path("plan.html").unlink()
    assert pages[0] == pages[1]
    assert "matched, also those to be held out" in pages[0]
    assert "60 or more" in pages[0]
    assert "budgets alone" not in pages[0]
    assert "Counts of who takes part are of the ids in the data." in pages[0]
