"""Tables as people have them: a table of known values, written in many ways, some of them damaged.

`mutated(seed)` gives the bytes of a file, its name, and what its cells are. A reader may refuse the file; if it takes
it, each cell must have the value that was written.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass, field

import numpy as np

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
