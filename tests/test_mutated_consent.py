"""Lists of consent in 1,000 forms, many of them damaged: nobody is trained on whose entry says no (mutated_consent)."""

from __future__ import annotations

import csv
import gzip
import io
import random
import re
import warnings
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from epsilons.budgets.ids import as_rule
from epsilons.cli import registry_people
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import budgets_to_train, joined, prepare
from epsilons.errors import EpsilonsError
from id_cases import CONFIG, is_alike_open, same
from program import epsilons

FORMS = (
    lambda n: f"{n + 1000}",
    lambda n: f"P-{n + 1000}",
    lambda n: f"{n:05d}",
    lambda n: f"{10**20 + n}",
    lambda n: f"é{n + 1000}",
    lambda n: f"{n + 1000}a",
)
TIERS = {"open": 4.0, "strict": 0.5}
NOTHING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"),
)
DAY = date(2026, 10, 1)
#: What else a cell may hold in the place of a yes or no.
ODD = (
    *("no", "No", "NO ", " no", "no.", "n\u03bf", "no\u00a0", "nein", "yes", "Open", "open ", "stric", "open;strict"),
    *("", " ", "NA", "null", "-", "?", "0", "0.0", "-0", "0e5", "+0.", "inf", "-inf", "∞", "Infinity", "nan", "1e400"),
    *("1e-400", "1e5", "1e308", "-1", "1_0", "0x10", "1,5", "1.234", "1,234", "\uff11", "1e-5", ".5", "5.", "true"),
    *("4 ", "\t4", "4\n", "'4'", "4 open", "9" * 400),
)
DATES = (
    *("%Y-%m-%d", "%Y-%m-%d", "%Y-%m-%d", "%d.%m.%Y", "%Y/%m/%d", "%d/%m/%Y", "%m/%d/%Y", "%Y-%m-%dT10:15"),
    *("%Y-%m-%d 23:59:59", " %Y-%m-%d ", "%d-%m-%Y", "%-d.%-m.%Y", "%Y.%m.%d"),
)
NO_DATES = (
    "2026-02-30",
    "31.02.2026",
    "soon",
    "45931",
    "01.10.26",
    "2026-10",
    "2026-13-01",
    "0000-01-01",
    "9999-12-31",
)
KINDS = ("list", "list", "list", "list", "position", "import", "import", "withdraw")


@dataclass
class Case:
    """A list and what is stated about it.

    kind     list: entries of persons, for a config; position: entries by row; import, withdraw: lists for a registry
    rows     the id of each row of the table, as written
    said     what the cells of the column of budgets are: "tiers" or "epsilon"
    content  the bytes of the list
    cells    the columns of a list in Parquet, as values; None for a text file
    what     the mutations, for messages
    """

    kind: str
    rows: list[str]
    said: str
    name: str = ""
    content: bytes = b""
    cells: dict[str, list[Any]] | None = None
    separator: str = ","
    stated_separator: bool = False
    decimal: str | None = None
    dated: bool = False
    order: str | None = None
    left_out: bool = True
    blank: bool = True
    zero: bool = False
    infinite: bool = False
    unlisted: bool = True
    strictest: bool = True
    ids: list[str] = field(default_factory=list)
    what: list[str] = field(default_factory=list)

    @property
    def ways(self) -> list[str]:
        return [way for way in self.ids if way != "as written"]


def mutated(seed: int) -> Case:
    """The case of this seed."""
    coins = random.Random(seed)
    form = coins.choice(FORMS)
    people = [form(n) for n in coins.sample(range(60), coins.randint(3, 25))]
    case = Case(coins.choice(KINDS), [], coins.choice(["tiers", "epsilon"]))
    for name in ("blank", "left_out", "unlisted", "strictest"):
        setattr(case, name, coins.random() < 0.85)
    case.zero, case.infinite = coins.random() < 0.3, coins.random() < 0.3
    case.dated = case.kind == "import" or (case.kind in ("list", "position") and coins.random() < 0.6)
    case.order = coins.choice([None, None, "day first", "month first"])
    case.ids = coins.choice([[], [], ["as written"], ["strip leading zeros", "nfkc"], ["casefold", "strip invisible"]])
    table = [_entry(one, case, coins) for one in people]
    if case.kind == "position":
        case.rows = people
    else:
        case.rows = [one for one in people for _ in range(coins.choice([0, 1, 1, 2]))]
        coins.shuffle(case.rows)
        case.rows = case.rows or people[:1]
        if coins.random() < 0.3:
            case.rows.append(form(77))  # not listed
    header = ["pid", "wish", "from", "until" if case.dated else "to", "gone", "note"]  # "until" must be stated
    some = coins.choices(range(len(MUTATIONS)), k=coins.choice([0, 1, 1, 1, 2, 2, 3]))
    for mutation in (MUTATIONS[i] for i in sorted(some)):
        case.what.append(mutation.__name__)
        mutation(header, table, case, coins)
    _write(header, table, case, coins)
    return case


def _entry(one: str, case: Case, coins: random.Random) -> list[str]:
    yes = coins.choice(list(TIERS)) if case.said == "tiers" else coins.choice(["4", "0.5", "2"])
    is_no = coins.random() < 0.3 and case.kind in ("list", "position")
    no = (
        coins.choice(["no"] * case.left_out + [""] * case.blank + ["0"] * (case.zero and case.said == "epsilon"))
        if (is_no and (case.left_out or case.blank))
        else yes
    )
    days = [(DAY + timedelta(coins.choice([-400, -1, 0, 1, 400]))).isoformat() for _ in range(3)]
    from_, until, gone = (
        day if coins.random() < share else "" for day, share in zip(days, (0.3, 0.3, 0.2), strict=True)
    )
    return [one, no, from_, until, gone, coins.choice(["", "a note", 'said "yes"', "no"])]


# -- mutations ---------------------------------------------------------------------------------------------------------

Table = list[list[str]]


def _some(table: Table, coins: random.Random) -> list[list[str]]:
    return coins.sample(table, max(1, len(table) * coins.choice([1, 1, 3]) // 10))


def swap_columns(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    order = coins.sample(range(len(header)), len(header))
    header[:] = [header[i] for i in order]
    table[:] = [[row[i] for i in order] for row in table]


def swap_names(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    one, other = coins.sample(range(len(header)), 2)
    header[one], header[other] = header[other], header[one]


def contradict(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    yes = ["0.25", "4", "2"] if case.said == "epsilon" else list(TIERS)
    for row in _some(table, coins):
        other = _entry(row[0], case, coins)
        other[1] = coins.choice([*yes, *yes, "no", "", "open", "4"] if case.kind != "import" else yes)
        table.insert(coins.randrange(len(table) + 1), other)


def repeat(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    table += [list(row) for row in _some(table, coins)]


def blank_ids(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    for row in _some(table, coins)[:1]:
        row[0] = coins.choice(["", " ", "NA", "\u200b", "null"])


def other_spelling(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    ways = (str.lower, str.upper, lambda t: "0" + t, lambda t: t + ".0", lambda t: "\u200b" + t, lambda t: f" {t}\t")
    ways = (*ways, lambda t: t.replace("1", "\uff11"), lambda t: f"{t}e0", lambda t: f"+{t}", lambda t: f"'{t}'")
    way = coins.choice(ways)
    for row in _some(table, coins):
        if coins.random() < 0.5:
            table.append([way(row[0]), *row[1:]])
        else:
            row[0] = way(row[0])


def odd_cells(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    odd = coins.choice(ODD)
    for row in _some(table, coins):
        row[1] = odd


def other_dates(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    shape = coins.choice(DATES)
    for row in table:
        for i in (2, 3, 4):
            if re.fullmatch(r"\d{4}-\d{2}-\d{2}", row[i]):
                row[i] = date.fromisoformat(row[i]).strftime(shape)


def no_dates(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    _some(table, coins)[0][coins.choice([2, 3, 4])] = coins.choice(NO_DATES)


def strange_periods(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    for row in _some(table, coins):
        row[2:5] = coins.choice(
            [["2026-12-01", "2026-01-01", ""], ["2026-12-01", "", "2026-01-01"], ["", "2020-01-01", "2026-10-01"]]
        )


def decimal_commas(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    case.decimal = coins.choice([None, ",", ","]) if case.kind in ("list", "position") else None
    for row in table:
        row[1] = row[1].replace(".", ",")


def more_tiers(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    for row in _some(table, coins):
        row[1] = coins.choice(["research", "OPEN", "maybe", "open,strict"])


def names(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    i = coins.randrange(len(header))
    header[i] = coins.choice([header[i].upper(), f" {header[i]}", "pid", "wish", "", f"{header[i]}."])


def no_header(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    if len(table) > 1:
        header[:] = table.pop(0)


def ragged(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    row = coins.choice(table)
    row[:] = coins.choice([row[:-1], [*row, "more"], row[:1], []])


def lines(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    table.insert(coins.choice([0, len(table) // 2, len(table)]), coins.choice([[""] * len(header), [], ["a title"]]))


def forget(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    del table[-1]


def typed(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    case.what.append("parquet")


def cut(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    """And the like: done to the bytes."""


MUTATIONS = [
    *(swap_columns, swap_names, contradict, contradict, contradict, repeat, blank_ids, other_spelling, other_spelling),
    *(odd_cells, odd_cells, odd_cells, odd_cells, other_dates, other_dates, no_dates, strange_periods, strange_periods),
    *(decimal_commas, more_tiers, names, no_header, ragged, lines, forget, typed, typed, cut, cut, cut),
]


# -- files -------------------------------------------------------------------------------------------------------------


def _write(header: list[str], table: Table, case: Case, coins: random.Random) -> None:
    is_whole = all(len(row) == len(header) for row in table) and len(set(header)) == len(header)
    if "parquet" in case.what and is_whole and table:
        case.name = "wishes.parquet"
        case.cells = {name: _typed([row[i] for row in table], name, coins) for i, name in enumerate(header)}
        try:
            arrow = pyarrow.table({name: _array(cells, coins) for name, cells in case.cells.items()})
        except (pyarrow.ArrowException, OverflowError):  # cells of several types
            case.cells = {name: list(map(str, cells)) for name, cells in case.cells.items()}
            arrow = pyarrow.table(case.cells)
        buffer = io.BytesIO()
        parquet.write_table(arrow, buffer)
        case.content = buffer.getvalue()
        return
    case.separator = coins.choice([",", ",", ";", "\t", "|"])
    case.stated_separator = coins.random() < 0.5
    quoting = coins.choice([csv.QUOTE_MINIMAL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=case.separator, quoting=quoting, lineterminator=coins.choice(["\n", "\r\n"]))
    writer.writerows([header, *table])
    text = out.getvalue()
    if coins.random() < 0.1:
        text = text.rstrip("\r\n")
    encoding = "utf-8"
    if "cut" in case.what:
        damage = coins.choice(
            ["cut", "cut", "bom", "two boms", "utf-16", "utf-16-le", "cp1252", "utf-32", "zero", "quote"]
        )
        damage = coins.choice([damage, damage, "gzip", "half of gzip", "sep", "empty", "header"])
        case.what.append(damage)
        encoding = {"utf-16": "utf-16", "utf-16-le": "utf-16-le", "cp1252": "cp1252", "utf-32": "utf-32"}.get(
            damage, encoding
        )
        text = {"bom": "\ufeff" + text, "two boms": "\ufeff\ufeff" + text, "sep": f"sep={case.separator}\n{text}"}.get(
            damage, text
        )
        case.content = text.encode(encoding, "replace")
        if damage == "cut":
            case.content = case.content[: int(len(case.content) * coins.random())]
        elif damage == "zero":
            place = coins.randrange(len(case.content))
            case.content = case.content[:place] + b"\0" + case.content[place:]
        elif damage == "quote":
            place = coins.randrange(len(case.content))
            case.content = case.content[:place] + b'"' + case.content[place:]
        elif "gzip" in damage:
            case.content = gzip.compress(case.content)
            case.content = case.content[: len(case.content) // 2] if "half" in damage else case.content
        elif damage in ("empty", "header"):
            case.content = b"" if damage == "empty" else case.content.split(b"\n")[0] + b"\n"
    else:
        case.content = text.encode()
    case.name = "wishes.csv"


def _typed(cells: list[str], name: str, coins: random.Random) -> list[Any]:
    """The cells as numbers or days where all of them are some, in a type of chance."""
    filled = [cell for cell in cells if cell]
    if name in ("from", "until", "to", "gone") and all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", cell) for cell in filled):
        kind = coins.choice([str, date.fromisoformat, datetime.fromisoformat])
        with_none = None if kind is not str else ""
        try:
            return [kind(cell) if cell else with_none for cell in cells]
        except ValueError:
            return cells
    if name == "wish" and filled and coins.random() < 0.15:
        return [cell not in ("no", "") for cell in cells]
    if all(re.fullmatch(r"[0-9]+(\.[0-9]+)?", cell) for cell in filled) and not any(
        c[:1] == "0" < c[1:2] for c in filled
    ):
        whole = all(re.fullmatch("[0-9]+", cell) for cell in filled)
        kinds = [str, float, Decimal, *([int] if whole else [])]
        if any(len(cell) > 15 for cell in filled):
            kinds = [str, Decimal]
        kind = coins.choice(kinds)
        return cells if kind is str else [kind(cell) if cell else None for cell in cells]
    return cells


def _array(cells: list[Any], coins: random.Random) -> Any:
    array = pyarrow.array(cells)
    return array.dictionary_encode() if array.type == pyarrow.string() and coins.random() < 0.3 else array


# -- the slow reader ---------------------------------------------------------------------------------------------------


def parsed(case: Case) -> tuple[list[str], list[list[Any]]] | None:
    """(names, rows) of the list; None if nobody can tell what it says."""
    if case.cells is not None:
        return list(case.cells), [list(row) for row in zip(*case.cells.values(), strict=True)]
    content = case.content
    try:
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        boms = {b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
        text = content.decode(next((name for bom, name in boms.items() if content.startswith(bom)), "utf-8"))
        separator = case.separator
        if text[:4].lower() == "sep=":
            first, _, text = text.partition("\n")
            separator = first.rstrip("\r\n")[4:]
        found = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except (UnicodeError, EOFError, OSError, csv.Error, TypeError):
        return None
    found = [row or [""] * len(found[0]) for row in found]  # a blank line holds blank cells
    if len(found) < 2 or any(len(row) != len(found[0]) for row in found):
        return None
    return found[0], [list(row) for row in found[1:]]


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return str(value)


def meaning(value: Any, case: Case) -> float | str:
    """The epsilon that a cell states, "no", or "?" if it states neither."""
    text = text_of(value).strip(" \t")
    is_list = case.kind in ("list", "position")
    digits = re.fullmatch(r"[+-]?([0-9]*)([.,]?)([0-9]*)(?:[eE][+-]?[0-9]+)?", text)
    if digits and not digits[1] + digits[3]:
        digits = None
    if digits and digits[2] and digits[2] != (case.decimal or "."):
        digits = None
    if is_list and (
        (case.left_out and text.casefold() == "no")
        or (case.blank and text in NOTHING)
        or (case.zero and digits is not None and not (digits[1] + digits[3]).strip("0"))
        or (case.infinite and text.lower() in ("inf", "+inf", "infinity", "+infinity", "∞"))
    ):
        return "no"
    if isinstance(value, bool):
        return "?"
    if case.said == "tiers":
        return TIERS.get(text_of(value).strip().casefold(), "?")  # no two tiers differ in case alone
    if digits is None:
        return "?"
    number = float(text.replace(",", "."))
    return number if 0 < number < float("inf") else "?"


def day_of(value: Any, order: str | None) -> date | str | None:
    """The day in a cell; None in an empty one, "?" if it is none."""
    if value is None or isinstance(value, date):
        return value.date() if isinstance(value, datetime) else value
    text = re.sub(r"[T ][0-9]{1,2}:[0-9]{2}.*$", "", value.strip())
    if text in NOTHING:
        return None
    year_first = re.fullmatch(r"([0-9]{4})([-/.])([0-9]{1,2})\2([0-9]{1,2})", text)
    year_last = re.fullmatch(r"([0-9]{1,2})([-/.])([0-9]{1,2})\2([0-9]{4})", text)
    try:
        if year_first:
            return date(int(year_first[1]), int(year_first[3]), int(year_first[4]))
        if year_last and (year_last[2] == "." or order is not None):
            first, second = int(year_last[1]), int(year_last[3])
            is_day_first = year_last[2] == "." or order == "day first"
            return date(int(year_last[4]), *((second, first) if is_day_first else (first, second)))
    except ValueError:
        pass
    return "?"


def is_nobody(text: str) -> bool:
    return text in NOTHING or not re.sub("[\\s\u200b\ufeff]", "", text)


def expected(case: Case) -> dict[str, float] | None:
    """Who may be trained on, enrolled or withdrawn, with their epsilon; None if the list must be refused."""
    found = parsed(case)
    if found is None:
        return None
    header, rows = found
    needed = ["pid"] if case.kind == "withdraw" else ["pid", "wish"] if case.kind != "position" else ["wish"]
    needed += ["from", "until", "gone"] if case.dated else []
    if any(header.count(name) != 1 for name in needed):
        return None
    cells = {name: [row[header.index(name)] for row in rows] for name in needed}
    if case.kind == "position":
        ids = [str(i) for i in range(len(rows))]
        if len(rows) != len(case.rows):
            return None
    else:
        if any(is_nobody(text_of(one).strip(" \t\r\n\v\f\u00a0")) for one in cells["pid"]):
            return None
        ids = [same(text_of(one), case.ways) for one in cells["pid"]]
        mine = {same(one, case.ways) for one in case.rows} if case.kind == "list" else set()
        if is_alike_open({*ids} | mine) and "as written" not in case.ids and case.kind != "withdraw":
            return None
    if case.kind == "withdraw":
        return dict.fromkeys(ids, 0.0)
    return _decided(ids, [meaning(value, case) for value in cells["wish"]], cells, case)


def _decided(
    ids: list[str], says: list[float | str], cells: dict[str, list[Any]], case: Case
) -> dict[str, float] | None:
    people: dict[str, list[int]] = {}
    for i, one in enumerate(ids):
        people.setdefault(one, []).append(i)
    days = {
        name: [day_of(cell, case.order) for cell in cells.get(name, [None] * len(ids))]
        for name in ("from", "until", "gone")
    }
    if any("?" in column for column in days.values()):
        return None
    took: dict[str, float] = {}
    for one, places in people.items():
        active = [i for i in places if (days["from"][i] or DAY) <= DAY <= (days["until"][i] or DAY)]
        said = [says[i] for i in active]
        if any((days["gone"][i] or date.max) <= DAY for i in places) or "no" in said or not active:
            continue
        if "?" in said or (len({*said}) > 1 and not case.strictest):
            return None
        took[one] = min(said)  # type: ignore[type-var]
    if case.kind == "import":
        return took or None
    mine = {same(one, case.ways) for one in case.rows} if case.kind == "list" else {*ids}
    if not case.unlisted and mine - {*people}:
        return None
    return {one: epsilon for one, epsilon in took.items() if one in mine} or None


# -- the tests ---------------------------------------------------------------------------------------------------------


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
