"""Tables in 1,000 forms, some of them damaged: each gives the values that were written, or one clear message."""

from __future__ import annotations

import gzip
import random
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from epsilons.configs.config import DataSection
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import prepare
from epsilons.data.tables import DateRule
from epsilons.errors import DataError, EpsilonsError
from epsilons.tabular import Marks, column_of, days, emptied, marks_of, numbers, read_table
from program import epsilons

NAMES = ["age", "dose", "zip", "town", "admitted", "smoker", "note"]
TOWNS = ["Köln", "Łódź", "São Paulo", "naïve", "north", "south, east", 'the "old" town', "a;b", "x|y"]
SEPARATORS = [",", ";", "\t", "|"]
LEFT = ["", "NA", "null", " "]


@dataclass
class Mutated:
    """A file and what is in it.

    ages, doses  (records,) numbers; NaN for an empty cell
    towns, zips  (records,) texts
    days         (records,) days since 2000-01-01
    budgets      (records,) epsilons; NaN where a record has none
    what         the mutations, for messages
    written      the header and the cells, as they are written
    """

    name: str
    content: bytes
    ages: list[float]
    doses: list[float]
    towns: list[str]
    zips: list[str]
    days: list[float]
    labels: list[str]
    budgets: list[float]
    what: list[str] = field(default_factory=list)
    written: list[list[str]] = field(default_factory=list)


def mutated(seed: int) -> Mutated:
    """The table of this seed."""
    coins = random.Random(seed)
    rows = coins.choice([0, 1, 3, 25, 40, 50, 60, 60, 60, 60, 60, 70, 80, 90])
    table = _values(coins, rows)
    separator = coins.choice(SEPARATORS)
    mark = coins.choice([".", ".", ","])
    quoting = coins.choice(["needed", "needed", "all", "texts"])
    date = coins.choice(["%Y-%m-%d", "%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%y", "%Y-%m-%dT10:15"])
    thousands = coins.random() < 0.08
    table.what += [f"separator {separator!r}", f"decimal {mark!r}", f"quoting {quoting}", f"dates {date}"]
    if thousands:
        table.what.append("thousands")
    lines = [[*NAMES, "epsilon", "label"]]
    for i in range(rows):
        day = (np.datetime64("2000-01-01") + int(table.days[i])).astype("O").strftime(date)
        note = coins.choice(["", "a note", "two\nlines"]) if quoting != "needed" or i % 5 == 0 else "short"
        age = _number(table.ages[i], mark, coins, thousands)
        dose = _number(table.doses[i], mark, coins, thousands)
        budget = "" if np.isnan(table.budgets[i]) else _number(table.budgets[i], mark, coins, False)
        lines.append([age, dose, table.zips[i], table.towns[i], day, coins.choice(["true", "false"]), note, budget])
        lines[-1].append(table.labels[i])
    lines = _damaged(lines, coins, table)
    if len(lines) > 2 and not {"ragged", "no header", "blank end"} & {*table.what}:
        _soiled(lines, random.Random(f"soiled {seed}"), table, mark)
    table.written = lines
    text = _written(lines, separator, quoting, coins)
    if seed % 97 == 5:
        text = "\ufeff\ufeff" + text
        table.what.append("two marks")
    table.content, table.name = _encoded(text, separator, coins, table)
    return table


def _values(coins: random.Random, rows: int) -> Mutated:
    """Known values of all kinds."""
    empty = coins.choice([0, 0, 0.1])
    ages = [float("nan") if coins.random() < empty else float(coins.randint(1, 99)) for _ in range(rows)]
    size = coins.choice([1, 1, 1, 2_000])
    doses = [float("nan") if coins.random() < empty else size * round(coins.random() * 50, 3) for _ in range(rows)]
    doses = [round(dose, 3) for dose in doses]
    budgets = [coins.choice([0.5, 1.0, 4.0]) for _ in range(rows)]
    if coins.random() < 0.08 and rows:
        for i in range(0, rows, 4):
            budgets[i] = float("nan")
    few = coins.random() < 0.05
    return Mutated(
        "",
        b"",
        ages,
        doses,
        [coins.choice(TOWNS) for _ in range(rows)],
        [f"{coins.randint(0, 99_999):05d}" for _ in range(rows)],
        [float(coins.randint(0, 9_000)) for _ in range(rows)],
        ["no" if few else coins.choice(["no", "yes"]) for _ in range(rows)],
        budgets,
    )


def _number(value: float, mark: str, coins: random.Random, thousands: bool) -> str:
    if np.isnan(value):
        return coins.choice(LEFT)
    text = f"{value:,.3f}" if thousands else repr(value)
    if value == int(value) and not thousands and coins.random() < 0.5:
        text = str(int(value))
    return text.translate(str.maketrans(",.", ".,")) if mark == "," else text


def _damaged(lines: list[list[str]], coins: random.Random, table: Mutated) -> list[list[str]]:
    """Most tables as they are; some ragged, without a header, with a name twice, a text among numbers, and so on."""
    kind = coins.choice(["none"] * 12 + ["ragged", "no header", "twice", "text", "blank end", "nameless", "hex", "inf"])
    if kind == "none" or len(lines) < 3:
        return lines
    table.what.append(kind)
    middle = len(lines) // 2
    if kind == "ragged":
        lines[middle] = lines[middle][: coins.randint(1, 7)]
    elif kind == "no header":
        lines = lines[1:]
        for values in (table.ages, table.doses, table.towns, table.zips, table.days, table.labels, table.budgets):
            del values[0]  # type: ignore[attr-defined]
    elif kind == "twice":
        lines[0][1] = "age"
    elif kind == "nameless":
        lines[0][6] = ""
    elif kind == "blank end":
        lines.append([""] * len(lines[0]))
    else:
        lines[middle][0] = {"text": "unknown", "hex": "0x1F", "inf": "inf"}[kind]
        table.ages[middle - 1] = float("inf")
    return lines


#: What exports write where nothing was measured. The last is no usual mark, and is refused or stated by the user.
MARKS = ["n.b.", "-", "k.A.", "?", "Frau Muster"]


def _soiled(lines: list[list[str]], coins: random.Random, table: Mutated, mark: str) -> None:
    """Marks of missing values, units, other decimal marks and numbers beyond 64 bits, in half of the tables."""
    kind = coins.choice(["none"] * 6 + ["marks", "marks", "unit", "some units", "mixed", "far"])
    table.what.append(f"soiled: {kind}")
    for i, line in enumerate(lines[1:]):
        if kind == "marks" and coins.random() < 0.04:
            line[1] = coins.choice(MARKS)
            table.doses[i] = float("nan") if line[1] != "Frau Muster" else float("inf")
        elif kind in ("unit", "some units") and line[1].strip() not in ("", "NA", "null") and "0x" not in line[1]:
            line[1] += coins.choice([" mg", "mg"]) if kind == "unit" or coins.random() < 0.3 else ""
        elif kind == "mixed" and coins.random() < 0.1 and "thousands" not in table.what:
            line[1] = line[1].translate(str.maketrans(",.", ".,"))
    if kind == "far":
        lines[len(lines) // 2][1] = coins.choice(["1e400", "9" * 400, "-1e999"])
        table.doses[len(lines) // 2 - 1] = float("inf")


def _written(lines: list[list[str]], separator: str, quoting: str, coins: random.Random) -> str:
    end = coins.choice(["\n", "\n", "\r\n"])

    def cell(text: str, row: int) -> str:
        needed = any(mark in text for mark in (separator, '"', "\n", "\r"))
        is_text = not text.replace(".", "").replace(",", "").isdigit()
        if needed or quoting == "all" or (quoting == "texts" and is_text and row):
            return '"' + text.replace('"', '""') + '"'
        return text

    rows = [separator.join(cell(text, number) for text in line) for number, line in enumerate(lines)]
    return end.join(rows) + (end if coins.random() < 0.8 else "")


def _encoded(text: str, separator: str, coins: random.Random, table: Mutated) -> tuple[bytes, str]:
    """The bytes of the file, and its name."""
    if coins.random() < 0.1:
        text = f"sep={separator}\n" + text
        table.what.append("sep=")
    encoding = coins.choice(["utf-8"] * 5 + ["utf-8-sig", "utf-16", "utf-16-le", "cp1252", "utf-32"])
    content = text.encode(encoding, "replace")
    if encoding == "utf-16-le" and coins.random() < 0.5:
        content = b"\xff\xfe" + content
    kind = coins.choice(["none"] * 16 + ["empty", "cut", "png", "zip", "zeros", "quote"])
    if kind == "empty":
        content = b""
    elif kind == "cut":
        content = content[: int(len(content) * coins.random())]
    elif kind in ("png", "zip"):
        content = {"png": b"\x89PNG\r\n\x1a\n", "zip": b"PK\x03\x04"}[kind] + content
    elif kind == "zeros":
        content = content[: len(content) // 2] + b"\0" + content[len(content) // 2 :]
    elif kind == "quote":
        content += b'"1'
    suffix = ".tsv" if separator == "\t" and coins.random() < 0.5 else ".csv"
    is_zipped = coins.random() < 0.15
    content = gzip.compress(content) if is_zipped else content
    table.what += [encoding, *([kind] if kind != "none" else []), *(["gzip"] if is_zipped else [])]
    return content, "people" + suffix + (".gz" if is_zipped and coins.random() < 0.8 else "")


# -- the tests ---------------------------------------------------------------------------------------------------------


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
