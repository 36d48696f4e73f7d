"""Lists of consent in 1,000 forms, many of them damaged: nobody is trained on whose entry says no (mutated_consent)."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from epsilons.budgets.ids import as_rule
from epsilons.cli import registry_people
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import budgets_to_train, joined, prepare
from epsilons.errors import EpsilonsError
from id_cases import CONFIG, same
from mutated_consent import DAY, TIERS, Case, expected, mutated
from program import epsilons

pytestmark = pytest.mark.filterwarnings("ignore::epsilons.errors.EpsilonsWarning")

URL = "sqlite:///people.db"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPSILONS_REGISTRY", raising=False)


def write(case: Case) -> None:
    """The list, the table of people and the config."""
    Path(case.name).write_bytes(case.content)
    lines = [f'"{one}",{serial},{("no", "yes")[serial % 2]}' for serial, one in enumerate(case.rows)]
    Path("people.csv").write_text("\n".join(["pid,serial,label", *lines]) + "\n", encoding="utf-8")
    budgets = ["[budgets]", f'file = "{case.name}"', 'column = "wish"', "delta = 1e-3"]
    budgets += ["tiers = { open = 4.0, strict = 0.5 }"] if case.said == "tiers" else []
    budgets += ['left_out = ["no"]'] if case.left_out else []
    budgets += [f'{name} = "left out"' for name in ("blank", "zero", "infinite") if getattr(case, name)]
    if case.dated:
        budgets += [f'as_of = "{DAY}"', 'valid_from = "from"', 'valid_until = "until"', 'withdrawn_on = "gone"']
        budgets += [f'dates = "{case.order}"'] if case.order else []
    marks = {",": '","', ";": '";"', "\t": '"\\t"', "|": '"|"'}
    budgets += [f"separator = {marks[case.separator]}"] if case.stated_separator else []
    budgets += [f'decimal = "{case.decimal}"'] if case.decimal else []
    data = [f"ids = {case.ids!r}".replace("'", '"')] if case.ids else []
    if case.kind == "list":
        budgets += ['unlisted = "left out"'] if case.unlisted else []
        budgets += ['conflict = "strictest"'] if case.strictest else []
    text = CONFIG.format(train="people.csv", data="\n".join(data), budgets="\n".join(budgets))
    if case.kind == "position":
        text = text.replace('person = "pid"', 'person = "each row is one person"\ndrop = ["pid"]')
        text = re.sub("\nids = .*", "", text)
    Path("people.toml").write_text(text, encoding="utf-8")


def taken(case: Case) -> dict[str, float]:
    """Whom the package trains on, enrols or withdraws, with their epsilon. Raises EpsilonsError."""
    rule = as_rule(case.ids)
    if case.kind == "withdraw":
        return dict.fromkeys(registry_people.read_ids(Path(case.name), "pid", rule), 0.0)
    if case.kind == "import":
        conflict = "strictest" if case.strictest else "refuse"
        tiers = TIERS if case.said == "tiers" else None
        dated = {
            "as_of": DAY,
            "valid_from": "from",
            "valid_until": "until",
            "withdrawn_on": "gone",
            "dates": case.order,
        }
        found, out = registry_people.read_wishes(
            Path(case.name), (), dated, person="pid", column="wish", tiers=tiers, conflict=conflict, spelling=rule
        )
        assert not {*out} & {*found.ids}
        return dict(zip(found.ids, found.epsilons[found.group].tolist(), strict=True))
    config = read_config(Path("people.toml"))
    made = prepare(config, Path())
    rows = np.rint((made.train.inputs[:, 0] + 1) * 500).astype(int).tolist()
    levels = made.budgets.epsilons[made.budgets.group]
    if case.kind == "position":
        return dict(zip(map(str, rows), levels.tolist(), strict=True))
    ids = [same(case.rows[row], case.ways) for row in rows]
    assert len({*ids}) == len(levels)
    assert sorted(levels) == sorted(budgets_to_train(config, Path()).epsilons[budgets_to_train(config, Path()).group])
    assert joined(config, Path(), None)[0].counts["matched"] == len(levels)
    return dict(zip(ids, levels[made.persons].tolist(), strict=True))


def check_message(message: str, case: Case) -> None:
    """One line, and no id of a person in it."""
    assert "\n" not in message, (case.what, message)
    assert len(message) < 700, (case.what, message)
    words = {*re.findall(r"[\w-]+", message)}
    assert not words & {one for one in case.rows if not one.isdigit() or len(one) > 5}, (case.what, message)


def tried(seed: int) -> str:
    """ "read", or the message. Whoever is taken is whom the slow reader takes."""
    case = mutated(seed)
    write(case)
    should = expected(case)
    try:
        found = taken(case)
    except EpsilonsError as error:
        check_message(str(error), case)
        return str(error)
    assert found == should, (seed, case.kind, case.what)
    return "read"


def commanded(seed: int) -> None:
    """The commands end as the package's functions do, with one message, and agree on how many there are."""
    case = mutated(seed)
    write(case)
    outcome = tried(seed)
    code = 0 if outcome == "read" else 2
    if case.kind in ("list", "position"):
        commands = ["plan people.toml", "consent check people.toml", "train people.toml --dry-run"]
    else:
        epsilons("registry", "create", URL, *(part for way in case.ids for part in ("--ids", way))).succeeded()
        tiers = "--tiers strict=0.5,open=4" if case.said == "tiers" else ""
        more = f"--person pid --column wish {tiers}" + " --conflict strictest" * case.strictest
        more += f" --as-of {DAY} --valid-from from --valid-until until --withdrawn-on gone"
        more += f" --dates {case.order.replace(' ', '_')}" if case.order else ""
        commands = [f"registry import {URL} {case.name} {more}"]
        if case.kind == "withdraw":  # nobody is enrolled
            commands, code = [f"registry withdraw {URL} --file {case.name} --column pid"], code or 3
    for command in commands:
        done = epsilons(*(part.replace("_first", " first") for part in command.split()))
        assert done.code == code, (seed, command, case.what, done.err, outcome)
        if done.code:
            assert done.err.startswith("epsilons: ")
            assert done.err.count("\n") == 1
    Path("people.db").unlink(missing_ok=True)
    Path("people.db.pepper").unlink(missing_ok=True)


def check(seeds: range, least: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [tried(seed) for seed in seeds]
    assert sum(outcome == "read" for outcome in outcomes) >= least * len(seeds)


def test_a_share_of_the_lists_takes_whom_a_slow_reader_takes_or_gives_one_message():
    check(range(120), 0.3)


@pytest.mark.slow
def test_each_of_a_thousand_lists_takes_whom_a_slow_reader_takes_or_gives_one_message():
    check(range(1_000), 0.3)


def test_commands_and_functions_take_or_refuse_the_same_lists():
    for seed in range(8):
        commanded(seed)


@pytest.mark.slow
def test_commands_and_functions_take_or_refuse_the_same_of_many_lists():
    for seed in range(300):
        commanded(seed)
