"""Exports of four made-up hospitals, and what is true of each patient: who decided what, and what was measured.

Nothing here uses the package: a table is a list of texts, written as the hospital's program writes it.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path

import pyarrow
from pyarrow import parquet

AS_OF = date(2026, 10, 1)
FIRST, LAST = date(2024, 1, 1), date(2026, 9, 30)
EPSILONS = {"streng": 1.0, "offen": 4.0}
#: Why a patient is not in, as the package words it.
NO, BLANK, UNLISTED = "'nein'", "blank", "unlisted"
NOT_IN_FORCE, WITHDRAWN = f"not in force on {AS_OF}", f"withdrawn by {AS_OF}"

#: How many patients decided what. 20 and more are shown by the rule of 20, fewer are not.
GROUPS = {
    "streng": 110,
    "offen": 100,
    "nein": 40,
    "blank": 25,
    "unlisted": 30,
    "withdrew": 32,  # by the day that decides
    "withdraws": 24,  # after it, so they take part
    "expired": 22,
    "signs": 5,  # after it
    "renewed": 22,  # said no, and yes since
    "revoked": 21,  # said yes, and no since
    "no rows": 35,
}


@dataclass
class Entry:
    """One row of a list of consent."""

    decision: str
    signed: date
    expires: date | None = None
    withdrawn: date | None = None

    @property
    def is_in_force(self) -> bool:
        return self.signed <= AS_OF and (self.expires is None or self.expires >= AS_OF)


@dataclass
class Patient:
    number: int
    visits: int
    entries: list[Entry]
    left_registry: bool = False

    @property
    def fate(self) -> str:
        """Why the patient is not in; "" for those who take part."""
        if not self.entries:
            return UNLISTED
        if any(one.withdrawn and one.withdrawn <= AS_OF for one in self.entries):
            return WITHDRAWN
        valid = [one.decision for one in self.entries if one.is_in_force]
        if not valid:
            return NOT_IN_FORCE
        return NO if "nein" in valid else BLANK if "" in valid else ""

    @property
    def epsilon(self) -> float:
        [decision] = [one.decision for one in self.entries if one.is_in_force]
        return EPSILONS[decision]


@dataclass
class Visit:
    """One row: what was measured, and texts that the program wrote in its place. None: not measured, or no number."""

    patient: Patient
    age: int
    weight: float | None
    crp: float | None
    platelets: float
    day: date
    sex: str
    back: str
    texts: dict[str, str] = field(default_factory=dict)


def patients(rng: random.Random, **other: int) -> list[Patient]:
    """GROUPS, with other counts for some of them."""
    made = []
    for group, count in (GROUPS | other).items():
        for _ in range(count):
            ago, later = timedelta(rng.choice([1, rng.randint(2, 200)])), timedelta(rng.choice([1, rng.randint(2, 60)]))
            one = Entry(rng.choice(list(EPSILONS)), AS_OF - timedelta(rng.randint(300, 900)))
            if group in ("streng", "offen", "nein"):
                one.decision, one.expires = group, rng.choice([None, None, AS_OF, AS_OF + later])
            elif group == "blank":
                one.decision = ""
            elif group == "withdrew":
                one.withdrawn = rng.choice([AS_OF, AS_OF - ago])
            elif group == "withdraws":
                one.withdrawn = AS_OF + later
            elif group == "expired":
                one.expires = AS_OF - ago
            elif group == "signs":
                one.signed = AS_OF + later
            entries = [] if group == "unlisted" else [one]
            if group in ("renewed", "revoked"):
                before = replace(one, signed=one.signed - timedelta(700), expires=one.signed - timedelta(1))
                (before if group == "renewed" else one).decision = "nein"
                entries.append(before)
            made.append(Patient(0, 0 if group == "no rows" else rng.choice([1, 1, 2, 3]), entries))
    rng.shuffle(made)
    for number, one_of_them in enumerate(made, 1):
        one_of_them.number = number
    return made


def visits(rng: random.Random, people: list[Patient], junk: tuple[str, ...]) -> list[Visit]:
    """Rows in no order; 3 % of the lab values are junk, and more have a unit."""
    found = []
    platelets = iter(rng.sample(range(10_000, 5_000_000), sum(one.visits for one in people)))  # each once
    for one in people:
        for _ in range(one.visits):
            crp, weight = rng.randint(1, 4000) / 10, rng.randint(400, 1400) / 10
            row = Visit(
                patient=one,
                age=rng.randint(18, 99),
                weight=None if rng.random() < 0.03 else weight,
                crp=crp,
                platelets=next(platelets) / 10,
                day=FIRST + timedelta(rng.randint(0, (LAST - FIRST).days)),
                sex=rng.choice(["w", "m"]),
                back=rng.choice(["ja", "nein"]),
            )
            if rng.random() < 0.03:
                row.texts["crp"], row.crp = rng.choice(junk), None
            elif rng.random() < 0.1:
                row.texts["crp"] = "with unit"
            found.append(row)
    rng.shuffle(found)
    return found


# -- how programs write ------------------------------------------------------------------------------------------------


def german(value: float) -> str:
    """1.234,5"""
    return f"{value:,.1f}".translate(str.maketrans(",.", ".,"))


def english(value: float) -> str:
    """1234.5"""
    return f"{value:.1f}"


def with_points(day: date | None) -> str:
    return "" if day is None else f"{day.day:02}.{day.month:02}.{day.year}"


def iso(day: date | None) -> str:
    return "" if day is None else day.isoformat()


def american(day: date | None) -> str:
    return "" if day is None else f"{day.month}/{day.day}/{day.year}"


@dataclass(frozen=True)
class Program:
    """How a program writes ids, numbers and days."""

    id: Callable[[int], str]
    number: Callable[[float], str]
    day: Callable[[date | None], str]
    unit: str = " mg/l"

    def table(self, header: list[str], rows: list[Visit]) -> list[list[str]]:
        """header: the columns of id, age, weight, crp, platelets, day, sex, and whether the patient came back"""
        lines = [header]
        for row in rows:
            crp = row.texts.get("crp", "with number")
            if row.crp is not None:
                crp = self.number(row.crp) + (self.unit if crp == "with unit" else "")
            weight = "" if row.weight is None else self.number(row.weight)
            values = [str(row.age), weight, crp, self.number(row.platelets), row.texts.get("day") or self.day(row.day)]
            lines.append([self.id(row.patient.number), *values, row.sex, row.back])
        return lines

    def wishes(self, header: list[str], rng: random.Random, people: list[Patient]) -> list[list[str]]:
        """header: the columns of id, decision, first day, last day, day of withdrawal"""
        rows = [
            [self.id(who.number), one.decision, *map(self.day, (one.signed, one.expires, one.withdrawn))]
            for who in people
            for one in who.entries
        ]
        rng.shuffle(rows)
        return [header, *rows]


def as_text(path: str, rows: list[list[str]], separator: str, encoding: str, quoting: int = csv.QUOTE_MINIMAL) -> None:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="\r\n", quoting=quoting).writerows(rows)  # type: ignore[arg-type]
    Path(path).write_bytes(text.getvalue().encode(encoding))


def as_parquet(path: str, rows: list[list[str]], **types: str) -> None:
    """types: column -> int or day; other columns hold texts"""
    read: dict[str, Callable[[str], object]] = {"int": int, "day": date.fromisoformat}
    columns = {}
    for place, name in enumerate(rows[0]):
        kind = read.get(types.get(name, ""), str)
        columns[name] = [kind(row[place]) if row[place] or kind is str else None for row in rows[1:]]
    parquet.write_table(pyarrow.table(columns), path)


def odd_spelling(number: int) -> str:
    """An id as five clerks type it: case, an invisible character, width, blanks."""
    plain = f"anna-{number:04}"
    return [plain, plain.upper(), "\u200b" + plain, plain.replace("-", "\uff0d"), f"  {plain.title()}"][number % 5]
