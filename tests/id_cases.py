"""Random tables of people with odd ids, the config that joins them, and a slow reader that decides who is trained on.

The slow reader knows what was written, cell by cell. It shares no code with the package: texts, dictionaries, loops.
"""

from __future__ import annotations

import csv
import gzip
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

#: Forms of ids: a number of a person -> what a ward writes. Several forms of one number may be spellings of each other.
FORMS = {
    "plain": lambda n: f"{n}",
    "zeros": lambda n: f"{n:04d}",
    "long": lambda n: f"{10**20 + n}",
    "hexadecimal": lambda n: f"0x{n + 200:x}",
    "hash": lambda n: f"{n}e{n % 7}f",
    "letters": lambda n: f"P-{n}",
    "case": lambda n: f"p-{n}",
    "composed": lambda n: f"\u00e9{n}",
    "decomposed": lambda n: f"e\u0301{n}",
    "full width": lambda n: "".join(chr(0xFF10 + int(d)) for d in f"{n}"),
    "float": lambda n: f"{n}.0",
    "exponent": lambda n: f"{n}e2",
    "rounded": lambda n: f"1.{n}E+14",
    "invisible": lambda n: f"\u200b{n}",
    "byte-order mark": lambda n: f"\ufeff{n}",
    "blanks": lambda n: f"  {n}\t",
    "inner blanks": lambda n: f"{n}  a",
    "plus": lambda n: f"+{n}",
    "minus": lambda n: f"-{n}",
    "true": lambda n: f"TRUE{n}",
    "date": lambda n: f"2024-01-{n % 28 + 1:02d}",
    "quoted": lambda n: f'a,"{n};',
}
WAYS = ("nfkc", "casefold", "strip invisible", "strip blanks", "strip .0", "strip leading zeros")
SEPARATORS = {"csv": '","', "csv.gz": '","', "csv;": '";"', "tsv": '"\\t"'}
KINDS = ("csv", "tsv", "parquet", "csv;", "csv.gz")
VISIT = ["pid", "serial", "label"]
SAID = ("open", "no", "", "missing")  # what a person's entry says; missing: no entry

CONFIG = """
[data]
train = "{train}"
target = "label"
classes = ["no", "yes"]
person = "pid"
read_off = []
{data}
[data.numeric]
serial = [0, 1000]
{budgets}
[model]
name = "logistic"
[training]
steps = 1
batch_size = 1
lr = 0.1
[privacy]
accountant = "rdp"
"""


@dataclass
class Case:
    """What is in the files, and what the config says of it.

    rows     the id of each row of the table, as written
    entries  (id as written, epsilon, what it says, withdrawn on) of the list
    test     the id of each row of a table to test on; None without one
    inside   True if each row of the table has the entry of its person, and there is no other list
    """

    rows: list[str]
    entries: list[tuple[str, float, str, str]]
    test: list[str] | None
    ids: list[str] | None
    unlisted: bool
    dated: bool
    drop: bool
    kinds: tuple[str, str]
    inside: bool = False

    @property
    def ways(self) -> list[str]:
        return [way for way in self.ids or [] if way != "as written"]


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    forms = [str(name) for name in rng.choice(list(FORMS), rng.integers(1, 4), replace=False)]
    pool = int(rng.choice([5, 40]))  # few numbers make many spellings of one
    ids = list(dict.fromkeys(FORMS[form](n) for form in forms for n in rng.choice(pool, 4, replace=False).tolist()))
    entries, rows = [], []
    for number, one in enumerate(ids):
        said = str(rng.choice(SAID, p=[0.6, 0.2, 0.1, 0.1]))
        gone = str(rng.choice(["", "2026-01-01", "2026-12-31"], p=[0.7, 0.15, 0.15]))
        if said != "missing":
            entries.append((one, 1 + number / 100, said, gone))  # two decimals: three may be thousands
        rows += [one] * int(rng.integers(0, 4))
    rng.shuffle(rows)
    rng.shuffle(entries)
    entries = [(str(a), float(b), str(c), str(d)) for a, b, c, d in entries]
    ways = [str(way) for way in rng.choice(WAYS, rng.integers(1, 6), replace=False)]
    stated = [None, ["as written"], ways, [*ways, "as written"]][rng.choice(4, p=[0.3, 0.35, 0.25, 0.1])]
    inside = bool(rng.random() < 0.2)
    if inside:
        entries = [entry for entry in entries if entry[0] in rows]
        entries += [(one, 0.0, "", "") for one in dict.fromkeys(rows) if one not in {name for name, *_ in entries}]
    return Case(
        rows=[str(row) for row in rows],
        entries=entries,
        test=[str(one) for one in rng.choice(ids, 3)] if rng.random() < 0.3 and not inside else None,
        ids=stated,
        unlisted=bool(rng.random() < 0.7) and not inside,
        inside=inside,
        dated=bool(rng.random() < 0.5),
        drop=bool(rng.random() < 0.5),
        kinds=(str(rng.choice(KINDS)), str(rng.choice(KINDS))),
    )


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, header: list[str], rows: list[list[str]], kind: str) -> str:
    """The table as a file of this kind; its name. A Parquet column of whole numbers holds numbers."""
    name = f"{path.name}.{kind.rstrip(';')}"
    if kind == "parquet":
        columns = {}
        for place, column in enumerate(header):
            cells = [row[place] for row in rows]
            numbers = [str(int(cell)) if cell.isascii() and cell.isdigit() else "" for cell in cells]
            typed = column != "pid" or (numbers == cells and all(int(n) < 2**62 for n in numbers))
            if column == "serial":
                columns[column] = [float(cell) for cell in cells]
            else:
                columns[column] = [int(cell) for cell in cells] if column == "pid" and typed and cells else cells
        parquet.write_table(pyarrow.table(columns), path.with_name(name))
    else:
        separator = {"tsv": "\t", "csv;": ";"}.get(kind, ",")
        opener = gzip.open if kind == "csv.gz" else open
        with opener(path.with_name(name), "wt", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator).writerows([header, *rows])
    return name


def write_case(case: Case, folder: Path, registry: bool = False) -> None:
    """people.*, wishes.* and people.toml in this folder."""
    said = {one: [str(epsilon) if what == "open" else what, gone] for one, epsilon, what, gone in case.entries}
    visits = [[*row, *(said[row[0]] if case.inside else [])] for row in _visits(case.rows)]
    train = write(folder / "people", [*VISIT, *(["wish", "gone"] if case.inside else [])], visits, case.kinds[0])
    cells = [[one, *said[one]] for one, *_ in case.entries]
    named = "" if case.inside else write(folder / "wishes", ["pid", "wish", "gone"], cells, case.kinds[1])
    data = [f"ids = {case.ids!r}".replace("'", '"')] if case.ids else []
    data += ['drop = ["pid"]'] if case.drop else []
    data += [f"separator = {SEPARATORS[case.kinds[0]]}"] if case.kinds[0] in SEPARATORS else []
    if case.test is not None:
        data += [f'test = "{write(folder / "test", VISIT, _visits(case.test), case.kinds[0])}"']
    budgets = ["[budgets]", 'column = "wish"', 'blank = "left out"', 'left_out = ["no"]']
    budgets += [f'file = "{named}"'] if named else ['as_of = "2020-01-01"\nwithdrawn_on = "gone"'] * (not case.dated)
    budgets += ["delta = 1e-3", 'conflict = "strictest"']
    budgets += ['unlisted = "left out"'] if case.unlisted else []
    budgets += ['as_of = "2026-10-01"', 'withdrawn_on = "gone"'] if case.dated else []
    budgets += [f"separator = {SEPARATORS[case.kinds[1]]}"] if case.kinds[1] in SEPARATORS else []
    budgets += ["[registry]", "share = 0.5"] if registry else []
    (folder / "people.toml").write_text(
        CONFIG.format(train=train, data="\n".join(data), budgets="\n".join(budgets)), encoding="utf-8"
    )


def _visits(ids: list[str]) -> list[list[str]]:
    return [[one, str(serial), ("no", "yes")[serial % 2]] for serial, one in enumerate(ids)]


# -- the slow reader ---------------------------------------------------------------------------------------------------


def _once(text: str, way: str) -> str:
    if way == "nfkc":
        return unicodedata.normalize("NFKC", text)
    if way == "casefold":
        return text.casefold()
    if way == "strip invisible":
        return text.replace("\u200b", "").replace("\ufeff", "").replace("\t", "")
    if way == "strip blanks":
        return " ".join(part for part in text.replace("\t", " ").split(" ") if part)
    if way == "strip .0":
        head, point, tail = text.partition(".")
        return head if point and set(tail) == {"0"} and head.isascii() and head.isdigit() else text
    while way == "strip leading zeros" and text[:1] == "0" and text[1:2].isascii() and text[1:2].isdigit():
        text = text[1:]
    return text


def same(text: str, ways: list[str]) -> str:
    """The id that a statement makes of what is written."""
    text = text.strip(" \t\r\n\v\f\u00a0")
    for _ in range(20):
        for way in WAYS:
            if way in ways:
                text = _once(text, way)
    return text


def alike(text: str) -> str:
    """What all spellings of an id have in common."""
    text = same(text, list(WAYS))
    head, _, places = text.removeprefix("+").partition("e")
    if head.isascii() and head.isdigit() and (f"{places}0").isascii() and (f"{places}0").isdigit():
        text = head + "0" * int(places or 0)
    return same(text, list(WAYS))


def is_rounded(text: str) -> bool:
    return "E+" in text.upper()


def took_part(case: Case, ids: list[str], accounts: set[str] | None = None) -> set[str]:
    """Those of these people whom nothing leaves out, by their ids under the statement.

    accounts  the people of a registry, as they are written there; None without one
    """
    took: set[str] = set()
    for one in {same(one, case.ways) for one in ids}:
        said = [(what, gone) for name, _, what, gone in case.entries if same(name, case.ways) == one]
        is_listed = bool(said) and (accounts is None or one in {same(name, case.ways) for name in accounts})
        if not any(what in ("no", "") or (case.dated and gone == "2026-01-01") for what, gone in said):
            took |= {one} if is_listed or not case.unlisted else set()
    return took


def is_decided(case: Case, with_test: bool = True, accounts: set[str] | None = None) -> bool:
    """Whether training has all that it needs to know about these people."""
    rows, listed = ({same(one, case.ways) for one in ids} for ids in (case.rows, [name for name, *_ in case.entries]))
    tested = {same(one, case.ways) for one in case.test or []} if with_test else set()
    is_open = is_alike_open(rows | listed) or (bool(tested) and is_alike_open(tested | listed | rows))
    if is_open and "as written" not in (case.ids or []):
        return False
    known = listed if accounts is None else listed & {same(one, case.ways) for one in accounts}
    left = took_part(case, case.rows, accounts)
    if not left or (not case.unlisted and left - known):
        return False
    return not tested or bool(took_part(case, case.test or [], accounts))


def is_alike_open(ids: set[str]) -> bool:
    """Whether it is open which of these ids are of one person."""
    keys: dict[str, str] = {}
    for one in ids:
        if is_rounded(one) or keys.setdefault(alike(one), one) != one:
            return True
    numbers = all(key.replace(".", "", 1).isdigit() and key.isascii() for key in keys)
    return numbers and any("e" in one.lower() for one in ids)
