"""Splits of data whose ids have several spellings: who said no is neither trained nor tested on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import budgets_to_train, prepare
from epsilons.errors import EpsilonsWarning, InputError
from program import epsilons

CONFIG = """
[data]
train = "visits.csv"
target = "label"
classes = ["no", "yes"]
person = "patient"
ids = ["casefold", "strip leading zeros"]
drop = ["day"]
SPLIT
[data.numeric]
serial = [0, 1000]
[budgets]
file = "people.csv"
column = "tier"
tiers = { strict = 1, open = 4 }
left_out = ["no"]
delta = 1e-3
[model]
name = "logistic"
[training]
steps = 2
batch_size = 10
lr = 0.2
[privacy]
accountant = "rdp"
"""
TIERS = ("strict", "open", "no")


def visits(rows: range) -> str:
    lines = [f"{f'{n % 90:04}' if n % 2 else n % 90},{n},{('no', 'yes')[n % 2]},{2020 + n // 200}-03-01" for n in rows]
    return "\n".join(["patient,serial,label,day", *lines]) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people = "\n".join(f"{n:06},{TIERS[n % 3]}" for n in range(90))
    Path("people.csv").write_text(f"patient,tier\n{people}\n")
    return tmp_path


def serials(arrays) -> list[int]:
    return np.rint((arrays.inputs[:, 0] + 1) * 500).astype(int).tolist()


def allowed(rows) -> list[int]:
    return [n for n in rows if n % 90 % 3 != 2]


def check_tested(found, plan_rows) -> None:
    person = found.test_owned.person
    epsilons = found.test_owned.budgets.epsilons[found.test_owned.budgets.group][person]
    assert epsilons.tolist() == [(1.0, 4.0)[n % 90 % 3] for n in plan_rows]


def test_a_split_by_a_dropped_date_leaves_out_who_said_no(folder):
    Path("visits.csv").write_text(visits(range(600)))
    Path("c.toml").write_text(CONFIG.replace("SPLIT", 'test_after = { day = ["2021-12-31"] }'))
    config = read_config(Path("c.toml"))
    with pytest.warns(EpsilonsWarning, match="too high") as warned:
        found = prepare(config, Path())
    assert sum("too high" in str(one.message) for one in warned) == 1
    assert serials(found.train) == allowed(range(400))
    assert serials(found.test) == allowed(range(400, 600))
    check_tested(found, allowed(range(400, 600)))
    assert len(found.budgets) == 60
    assert (budgets_to_train(config, Path()).counts == found.budgets.counts).all()


@pytest.mark.parametrize("value", ['{ day = "2021-12-31" }', "{ day = 2021-12-31 }", '"2021-12-31"', '["day"]'])
def test_a_last_day_in_another_form_is_told_the_right_one(value, folder):
    Path("visits.csv").write_text(visits(range(600)))
    Path("c.toml").write_text(CONFIG.replace("SPLIT", f"test_after = {value}"))
    with pytest.raises(InputError, match=r'data\.test_after.*test_after = \{admitted = \["2024-06-30"\]\}\.'):
        read_config(Path("c.toml"))


@pytest.mark.parametrize("listed", ["X{n},open\n", ""])
def test_a_list_that_has_no_id_of_the_data_is_named_with_both_files(listed, folder):
    Path("visits.csv").write_text(visits(range(600)))
    Path("people.csv").write_text("patient,tier\n" + "".join(listed.format(n=n) for n in range(90)))
    for key in ("", 'unlisted = "left out"\n'):
        Path("c.toml").write_text(CONFIG.replace("SPLIT", "").replace("delta =", f"{key}delta ="))
        for command in ("plan", "consent check", "train --dry-run"):
            words = "None of the ids in people.csv occurs in visits.csv", "right list"
            epsilons(*command.split(), "c.toml").is_refused(2, *words)


def test_people_who_train_in_another_spelling_are_not_tested_on(folder, recwarn):
    Path("visits.csv").write_text(visits(range(45)))
    Path("later.csv").write_text(visits(range(40, 180)).replace("\n0", "\n00"))
    Path("c.toml").write_text(CONFIG.replace("SPLIT", 'test = "later.csv"\ntest_people = "new"'))
    found = prepare(read_config(Path("c.toml")), Path())
    new = [n for n in allowed(range(40, 180)) if n % 90 >= 45]
    assert serials(found.train) == allowed(range(45))
    assert serials(found.test) == new
    check_tested(found, new)
    assert "are left out" in found.left_out
    assert "also train: their rows are not tested on" in found.left_out
    assert not [one for one in recwarn if "too high" in str(one.message)]


STATED = CONFIG.replace("SPLIT", 'test_after = { day = ["2021-12-31"] }').replace(
    'file = "people.csv"\n', 'as_of = "2026-01-01"\nwithdrawn_on = "gone"\nconflict = "strictest"\n'
)


@pytest.mark.filterwarnings("ignore:.*too high")
@pytest.mark.parametrize("seed", range(20))
def test_what_any_row_of_a_person_states_counts_for_the_rows_to_train_on(seed, folder):
    """Rows to train on say "open" mostly; others, of the test or without a day, may be stricter, say no, withdraw."""
    coins = random.Random(seed)
    rows = []
    for serial in range(400):
        day = coins.choice(["2020-03-01", "2020-03-01", "2022-03-01", ""])
        is_open = coins.random() < (0.99 if day == "2020-03-01" else 0.9)
        tier = "open" if is_open else coins.choice(["strict", "no"])
        gone = "2025-01-01" if day != "2020-03-01" and coins.random() < 0.02 else coins.choice(["", "2027-01-01"])
        rows.append((f"P{coins.randrange(90)}", serial, ("no", "yes")[serial % 2], day, tier, gone))
    lines = [",".join(map(str, row)) for row in rows]
    Path("visits.csv").write_text("\n".join(["patient,serial,label,day,tier,gone", *lines]) + "\n")
    Path("c.toml").write_text(STATED)
    config = read_config(Path("c.toml"))
    found = prepare(config, Path())

    out = {row[0] for row in rows if row[4] == "no" or row[5] == "2025-01-01"}
    level = {row[0]: 4.0 for row in rows} | {row[0]: 1.0 for row in rows if row[4] == "strict"}
    for part, budgets, person, day in (
        (found.train, found.budgets, found.persons, "2020-03-01"),
        (found.test, found.test_owned.budgets, found.test_owned.person, "2022-03-01"),
    ):
        wanted = [row for row in rows if row[3] == day and row[0] not in out]
        assert serials(part) == [row[1] for row in wanted]
        assert budgets.epsilons[budgets.group][person].tolist() == [level[row[0]] for row in wanted]
        assert len({row[0] for row in wanted}) == len(budgets) == len({*person.tolist()})
    assert (budgets_to_train(config, Path()).counts == found.budgets.counts).all()


@pytest.mark.filterwarnings("ignore:.*too high")
@pytest.mark.parametrize(
    ("later", "change", "words"),
    [
        (",401,no,2022-03-01,open,", {}, "no id of a person"),
        ("P0,401,no,2022-03-01,open,", {'conflict = "strictest"': ""}, "different budgets"),
        ("P1,401,no,2022-03-01,maybe,", {}, "not the name of a tier"),
    ],
)
def test_rows_that_are_not_trained_on_are_refused_for_what_they_state(later, change, words, folder):
    rows = [
        f"P{n % 90},{n},{('no', 'yes')[n % 2]},{2020 + n // 200 * 2}-03-01,{TIERS[n % 90 % 2]}," for n in range(400)
    ]
    Path("visits.csv").write_text("\n".join(["patient,serial,label,day,tier,gone", *rows, later]) + "\n")
    text = STATED
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    Path("c.toml").write_text(text)
    for read in (prepare, budgets_to_train):
        with pytest.raises(InputError, match=words):
            read(read_config(Path("c.toml")), Path())
