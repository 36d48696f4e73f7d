"""Tables in 1,000 forms, some of them damaged: each gives the values that were written, or one clear message."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from epsilons.configs.config import DataSection
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import prepare
from epsilons.data.tables import DateRule
from epsilons.errors import DataError, EpsilonsError
from epsilons.tabular import Marks, column_of, days, emptied, marks_of, numbers, read_table
from mutated_tables import Mutated, mutated
from program import epsilons

#: Cells that count as empty in every column, written down again.
NOTHING = ["", "NA", "N/A", "n/a", "null", "NULL", "nan", "NaN", "-nan", "-NaN"]


def slow_number(text: str, data: DataSection, name: str) -> float | None:
    """What a cell means under a config's statements, character by character; None for one that is refused."""
    text = text.strip(" \t")
    if text in NOTHING or text in [str(mark) for mark in data.missing]:
        return float("nan")
    unit = data.units.get(name)
    if unit and text.endswith(unit):
        text = text[: -len(unit)].rstrip(" \t\u00a0\u202f")
    sign, digits = (text[:1], text[1:]) if text[:1] in ("+", "-") else ("", text)
    mark = data.decimal or ("," if data.thousands == "." else ".")
    whole, point, tail = digits.partition(mark)
    if data.thousands:
        for alike in {" ": "\u00a0\u202f", "'": "’"}.get(data.thousands, ""):
            whole = whole.replace(alike, data.thousands)
        groups = whole.split(data.thousands)
        is_grouped = 1 <= len(groups[0]) <= 3 and groups[0][0] != "0" and all(len(group) == 3 for group in groups[1:])
        if len(groups) > 1 and not is_grouped:
            return None
        whole = "".join(groups)
    mantissa, exponent, power = (whole + point + tail).lower().partition("e")
    pieces = mantissa.split(mark)
    if len(pieces) > 2 or not all(set(piece) <= set("0123456789") for piece in pieces) or not "".join(pieces):
        return None
    if exponent and not power.lstrip("+-").isdigit():
        return None
    value = float(sign + ".".join(pieces) + (f"e{power}" if exponent else ""))
    return None if np.isinf(value) else value


def same(found, wanted) -> bool:
    return len(found) == len(wanted) and np.allclose(found, wanted, rtol=1e-12, atol=0, equal_nan=True)


#: Damages after which a file says something else than what was written; the numbers that are left are compared.
DAMAGED = {"zeros", "quote", "cut"}


def check_drafted(table: Mutated, file: Path) -> None:
    """What the drafted config reads is what was written. A column that is dropped or hashed is not compared."""
    data = read_config(Path("new.toml")).data
    names = table.written[0] if table.written else []
    marks, is_damaged = Marks(data.separator, data.decimal), bool(DAMAGED & {*table.what})
    cells = read_table(file, "data", DataError, (*data.numeric, *data.dates, "town", "zip", "label"), marks)
    for name, wanted in (("age", table.ages), ("dose", table.doses)):
        if name in data.numeric:
            column = column_of(cells, name, file, DataError)
            slow = [slow_number(line[names.index(name)], data, name) for line in table.written[1:]]
            rule = data.columns.rule(name)
            if None in slow and not is_damaged:
                with pytest.raises(DataError, match="are not numbers"):
                    numbers(column, name, file, DataError, marks_of(cells), rule)
                continue
            found = numbers(column, name, file, DataError, marks_of(cells), rule)
            assert same(found, slow[: len(found)]) or is_damaged, (name, table.what)
            # What the config names as missing is nothing to learn from; all else is what was written.
            meant = [
                s if v == np.inf and s is not None and np.isnan(s) else v for s, v in zip(slow, wanted, strict=True)
            ]
            assert same(found, wanted[: len(found)] if is_damaged else meant), (name, table.what)
        else:
            assert name not in data.dates
    if is_damaged:
        return
    if "admitted" in data.dates:
        _, last, *order = data.dates["admitted"]
        rule = DateRule(np.datetime64("2000-01-01").astype("O"), np.datetime64(last).astype("O"))
        rule = DateRule(rule.first, rule.last, order == ["day first"] if order else None)
        assert same(days(cells.column("admitted"), "admitted", file, DataError, rule), table.days), table.what
    assert "zip" not in data.numeric, table.what
    assert [str(c) for c in cells.column("zip").to_pylist()] == table.zips, table.what
    is_lossy = "cp1252" in table.what
    assert is_lossy or cells.column("town").to_pylist() == table.towns, table.what
    assert set(emptied(cells.column("label")).to_pylist()) == set(table.labels)


def tried(seed: int) -> str:
    """ "read", or the message. Anything but a result or one message fails."""
    table = mutated(seed)
    file = Path(table.name)
    file.write_bytes(table.content)
    Path("new.toml").unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = epsilons("init", table.name, "-o", "new.toml")
        if outcome.code:
            assert outcome.code == 2, (table.what, outcome.err)
            check_message(outcome.err, table)
            return outcome.err
        text = Path("new.toml").read_text()
        is_damaged = bool(DAMAGED & {*table.what})
        if not is_damaged:
            check_drafted(table, file)
        text = re.sub("epochs = 20 .*", "steps = 1", text).replace('accountant = "pld"', 'accountant = "rdp"')
        text = re.sub("delta = .*", "delta = 1e-3", text).replace("hidden = [64]", "hidden = [2]")
        person = 'person = "each row is one person"\n'
        text = re.sub("batch_size = .*", "batch_size = 2", text)
        Path("new.toml").write_text(
            text if "\nperson" in text else text.replace("test_share", person + "test_share", 1)
        )
        try:
            config = read_config(Path("new.toml"))
            check_drafted(table, file)
            found = prepare(config, Path())
        except EpsilonsError as error:
            check_message(f"epsilons: {error}\n", table)
            return str(error)
        if is_damaged:
            return "read"
        finite = [level for level in table.budgets if not np.isnan(level)]
        levels = set(found.budgets.epsilons.tolist())
        assert levels <= set(finite), table.what
        assert len(found.train.targets) + len(found.test.targets) == len(table.budgets) == len(finite), table.what
        if seed % 4 == 0:
            outcome = epsilons("train", "new.toml", "-o", f"run-{seed}", "--quiet")
            if outcome.code:
                assert outcome.code in (2, 3), (table.what, outcome.err)
                check_message(outcome.err, table)
                return outcome.err
    return "read"


def check_message(message: str, table: Mutated) -> None:
    assert message.startswith("epsilons: "), (table.what, message)
    assert message.count("\n") == 1, (table.what, message)
    assert "Traceback" not in message
    assert len(message) < 700, (table.what, message)


def test_a_share_of_the_tables_gives_what_was_written_or_one_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = [tried(seed) for seed in range(40)]
    assert sum(outcome == "read" for outcome in outcomes) >= 8


@pytest.mark.slow
def test_each_of_a_thousand_tables_gives_what_was_written_or_one_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = [tried(seed) for seed in range(1_000)]
    assert sum(outcome == "read" for outcome in outcomes) >= 250
