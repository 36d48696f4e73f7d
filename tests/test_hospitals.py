"""Four hospitals go from the files of their programs to a report, without a file being edited by hand.

The configs are what `epsilons init` drafts, changed as the next message asks. What is true of each patient decides who
is trained on, why the others are not, and what each cell says.
"""

from __future__ import annotations

import csv
import io
import json
import random
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import load_file

from epsilons.cli import train_config
from epsilons.configs import consent
from program import Outcome, epsilons

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


@pytest.fixture(autouse=True)
def on_that_day(monkeypatch):
    monkeypatch.setattr(consent, "_today", lambda: AS_OF)


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


# -- from the files to a report --------------------------------------------------------------------------------------


FROM, TO = date(2020, 1, 1), date(2027, 12, 31)
SEXES, CLASSES = ("w", "m"), ("nein", "ja")
#: Cells that a config lists as missing, and cells that only later exports hold.
JUNK, LATER_JUNK = ("n.b.", "?", "<0,5"), ("12 µg", "hämol.", "1.2.3")
LEFT_REGISTRY = "withdrew in the registry"


@dataclass
class Hospital:
    """The files of a hospital, and what becomes of them.

    header   its columns, as in `Program.table`
    wards    file -> its rows
    listed   the file with the list of consent
    columns  of the list, as in `Program.wishes`
    config   what the draft says, and what was changed in it
    """

    people: list[Patient]
    header: list[str]
    wards: dict[str, list[Visit]]
    listed: str
    columns: list[str]
    program: Program
    config: dict[str, Any] = field(default_factory=dict)

    def init(self, *arguments: str) -> str:
        """Draft a config, and make the changes that its comments ask for."""
        done = epsilons("init", *arguments, "-o", "c.toml")
        done.succeeded("Read it, correct it", f"of the cells of '{self.header[3]}'")
        assert f"cells of '{self.header[5]}'" not in done.out  # all are dates
        draft = tomllib.loads(Path("c.toml").read_text())
        assert '# file = "consent.csv"' in Path("c.toml").read_text()
        assert "SIMULATED budgets" in epsilons("consent", "check", "c.toml").out
        _, age, weight, crp, platelets, day, sex, back = self.header
        assert draft["data"]["target"] == back
        assert draft["data"]["person"] == self.header[0]
        assert [*draft["data"]["numeric"]] == [age, weight, crp, platelets]
        assert {*draft["data"]["categorical"][sex]} == {*SEXES}
        assert draft["data"]["units"] == {crp: self.program.unit.strip()}
        order = draft["data"]["dates"][day][2:]
        del draft["data"]["drop"], draft["budgets"], draft["privacy"]  # all as it is without them
        draft["data"] |= {
            "classes": CLASSES,
            "numeric": {age: [0, 120], weight: [0, 250], crp: [0, 500], platelets: [0, 500_000]},
            "dates": {day: [str(FROM), str(TO), *order]},
            "categorical": {sex: SEXES},
            "read_off": [],
        }
        draft["budgets"] = {"file": self.listed, "column": self.columns[1], "tiers": {"streng": 1, "offen": 4}}
        draft["model"], draft["training"] = {"name": "logistic"}, {"steps": 5, "batch_size": 40, "lr": 0.5}
        self.config = draft
        self.write()
        return done.out

    def write(self) -> None:
        head = [
            f"{name} = {value(one)}" for name, one in self.config.items() if one and name not in ("data", "budgets")
        ]
        lines = [*head, "[data]", *(f"{key(name)} = {value(one)}" for name, one in self.config["data"].items())]
        lines += ["[budgets]", *(f"{name} = {value(one)}" for name, one in self.config["budgets"].items())]
        Path("c.toml").write_text("\n".join(lines) + "\n")
        assert len(lines) <= 30

    def answer(self, command: list[str], *answers: tuple[str, str, dict[str, Any]]) -> Outcome:
        """Repeat the command, and change the config as each refusal asks; (words of it, section, keys)."""
        for words, section, keys in answers:
            epsilons(*command).is_refused(2, words)
            self.config[section] |= keys
            self.write()
        done = epsilons(*command)
        assert done.code == 0, done.err
        return done

    def dates(self) -> None:
        names = dict(zip(("valid_from", "valid_until", "withdrawn_on"), self.columns[2:], strict=True))
        self.config["budgets"] |= {"as_of": AS_OF, **names}
        self.write()

    # -- what is true --------------------------------------------------------------------------------------------------

    def people_of(self, file: str) -> list[Patient]:
        return list({row.patient.number: row.patient for row in self.wards[file]}.values())

    def check_explained(self, printed: str) -> None:
        """Every person of every file is in one row of the table, by the rule of 20."""
        found = json.loads(printed)
        assert found["missing"] == []
        present = {one.number for one in self.people_of(next(iter(self.wards)))}
        absent = [one for one in self.people if one.number not in present]
        for file in self.wards:
            fates = Counter(fate(one) for one in self.people_of(file))
            rows = {row["what"]: row["count"] for row in found["table"] if row["file"] == file}
            covered: list[str] = []
            for what, count in rows.items():
                if what == "matched" or what.startswith("not in: "):
                    names = what.removeprefix("not in: ").removeprefix("one or more of ").split(", ")
                    covered += names
                    total = sum(fates[name] for name in names)
                    assert count == (str(total) if total >= 20 else "fewer than 20"), what
                    assert len(names) > 1 or total == 0 or total >= 20 or len(rows) == 1, what
            assert len(covered) == len({*covered})
            assert {*fates} <= {*covered}
            assert rows["spellings not decided"] == "none"
            if fates[WITHDRAWN] >= 20 and f"not in: {WITHDRAWN}" in rows:
                months = [int(count) for what, count in rows.items() if what.startswith("of these, withdrew 20")]
                assert sum(months) == fates[WITHDRAWN]
        [row] = [row for row in found["table"] if row["file"] == self.listed]
        took = sum(fate(one) in ("matched", LEFT_REGISTRY) for one in absent)
        assert row == {"file": self.listed, "what": "listed without rows", "count": str(took)}

    def read(self, arrays: Any) -> list[Visit]:
        """The visits that these inputs are of. Each cell was read as what it says."""
        every = {round(row.platelets * 10): row for rows in self.wards.values() for row in rows}
        found = [every[round((x + 1) * 2_500_000)] for x in arrays.inputs[:, 3].astype(float).tolist()]
        assert np.allclose(arrays.inputs, [inputs_of(row) for row in found], atol=1e-6)
        assert arrays.targets.tolist() == [CLASSES.index(row.back) for row in found]
        return found

    def check_trained(self, prepared: Any) -> tuple[set[float], set[float]]:
        """The visits that are trained and tested on, by their platelets. No row has the budget of another person."""
        rows = self.read(prepared.train)
        places = dict(zip((row.patient.number for row in rows), prepared.persons.tolist(), strict=True))
        assert [places[row.patient.number] for row in rows] == prepared.persons.tolist()
        assert sorted(places.values()) == [*range(len(prepared.budgets))]
        if self.config.get("registry") is None:
            epsilon = prepared.budgets.epsilons[prepared.budgets.group]
            assert all(epsilon[places[row.patient.number]] == row.patient.epsilon for row in rows)
        tested = self.read(prepared.test)
        return {row.platelets for row in rows}, {row.platelets for row in tested}

    def check_predicted(self, seed: int, kind: str) -> None:
        """Rows of a later export with cells that nobody listed are marked; the others have the output of the model."""
        rng = random.Random(seed)
        rows = visits(rng, [Patient(5000 + i, 1, []) for i in range(120)], (*JUNK, *LATER_JUNK))
        for row in rows[:3]:
            row.texts["day"] = "31.02.2026"
        table = self.program.table(self.header, rows)
        as_text(f"new.{kind}", table, {"csv": ",", "tsv": "\t", "scsv": ";"}[kind], "utf-8", csv.QUOTE_ALL)
        Path(f"new.{kind}").rename("new.csv")
        done = epsilons("predict", "run", "new.csv", "-o", "scored.csv", "--keep", self.header[0], "--bad-rows", "mark")
        assert done.code == 4, done.err
        weights = load_file("run/model.safetensors")
        [bias], [matrix] = ([w for w in weights.values() if w.ndim == n] for n in (1, 2))
        marked = 0
        with open("scored.csv", newline="") as file:
            for row, written, line in zip(rows, table[1:], csv.DictReader(file), strict=True):
                assert line[self.header[0]] == written[0]
                is_bad = "day" in row.texts or row.texts.get("crp") in LATER_JUNK
                assert (line["not_predicted"] != "") == is_bad
                marked += is_bad
                if is_bad:
                    assert line["prediction"] == ""
                    continue
                scores = np.exp(matrix @ np.array(inputs_of(row)) + bias)
                found = [float(line[f"probability_{name}"]) for name in CLASSES]
                assert np.allclose(found, scores / scores.sum(), atol=1e-5)
        assert f"{120 - marked} rows predicted in scored.csv, and {marked} not" in done.out


def fate(one: Patient) -> str:
    return one.fate or (LEFT_REGISTRY if one.left_registry else "matched")


def inputs_of(row: Visit) -> list[float]:
    """A row as inputs, number by number: what is not known is 0, the middle."""
    bounds = ((row.age, 120), (row.weight, 250), (row.crp, 500), (row.platelets, 500_000))
    numbers = [0.0 if number is None else 2 * number / high - 1 for number, high in bounds]
    return [*numbers, 2 * (row.day - FROM).days / (TO - FROM).days - 1, *(float(row.sex == sex) for sex in SEXES)]


def key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name, ensure_ascii=False)


def value(one: Any) -> str:
    """A value in TOML, on one line."""
    if isinstance(one, dict):
        return "{ " + ", ".join(f"{key(name)} = {value(inner)}" for name, inner in one.items()) + " }"
    if isinstance(one, list | tuple):
        return f"[{', '.join(map(value, one))}]"
    return str(one) if isinstance(one, date) else json.dumps(one, ensure_ascii=False)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPSILONS_REGISTRY", raising=False)


@pytest.fixture
def trained(monkeypatch):
    """What `epsilons train` trains on."""
    seen: list[Any] = []
    original = train_config.prepare
    monkeypatch.setattr(train_config, "prepare", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1])
    return seen


def check_reports(printed: str) -> None:
    """The internal report repeats what the check printed; the report for release has none of these counts."""
    table = json.loads(printed)["table"]
    kept = json.loads(Path("run/run.json").read_text())["metadata"]["consent"]
    assert [*kept["table"], *kept.get("tested", [])] == table
    epsilons("report", "run").succeeded()
    internal, public = (Path(f"run/{name}.html").read_text() for name in ("report", "report-release"))
    epsilons("report", "run", "--annexes", "annexes").succeeded()
    for text in (public, *(file.read_text() for file in Path("annexes").iterdir())):
        assert "withdrew 20" not in text
    for row in table:
        if row["count"].isdigit():
            what = row["what"].replace("'", "&#39;")
            assert what in internal
            assert f"{what}: " not in public


def check_planned(hospital: Hospital, numbers: set[float]) -> None:
    """The plan has the persons of these visits, by their epsilon."""
    rows = [row for rows in hospital.wards.values() for row in rows if row.platelets in numbers]
    expected = Counter({row.patient.number: row.patient.epsilon for row in rows}.values())
    plan = json.loads(Path("run/plan.json").read_text())
    assert [group["records"] for group in plan["groups"]] == [expected[1.0], expected[4.0]]
    shown = json.loads(epsilons("plan", "c.toml", "--json").out)
    assert [group["records"] for group in shown["groups"]] == [expected[1.0], expected[4.0]]


# -- the hospitals -----------------------------------------------------------------------------------------------------

ASK_BLANK = ("[budgets] blank", "budgets", {"blank": "left out", "left_out": ["nein"]})
UNDECIDED = ("[budgets] unlisted", "budgets", {"unlisted": "left out"})
MISSING = ("data.missing", "data", {"missing": list(JUNK)})
CHECK = ["consent", "check", "c.toml", "--json"]


def converted(outcome: Outcome, name: str) -> None:
    """Do what the refusal of a file in Windows-1252 says: iconv, into a new file."""
    outcome.is_refused(2, "iconv -f WINDOWS-1252 -t UTF-8")
    Path(f"utf8-{name}").write_text(Path(name).read_bytes().decode("cp1252"), newline="")


def test_wards_in_windows_1252_with_a_list_from_a_spreadsheet(trained):
    rng = random.Random(1)
    people = patients(rng)
    rows = visits(rng, people, JUNK)
    inner, outer = (rows[: len(rows) * 3 // 4], rows[len(rows) * 3 // 4 :])
    header = ["Patient", "Alter", "Gewicht", "CRP", "Blutplättchen", "Aufnahme", "Geschlecht", "Rückkehr"]
    columns = ["Patient", "Stufe", "unterschrieben", "gültig bis", "widerrufen"]
    program = Program(lambda n: f"{n:06}", german, with_points)
    wards = {"utf8-innere.csv": inner, "utf8-chirurgie.csv": outer}
    hospital = Hospital(people, header, wards, "einwilligung.csv", columns, program)
    for name, some in (("innere.csv", inner), ("chirurgie.csv", outer)):
        as_text(name, program.table(header, some), ";", "cp1252")
        converted(epsilons("init", name, "--target", "Rückkehr"), name)
    spreadsheet = Program(lambda n: f"{n}.0", english, american)
    as_text("einwilligung.csv", spreadsheet.wishes(columns, rng, people), ",", "utf-8-sig")

    hospital.init("utf8-innere.csv", "--target", "Rückkehr", "--test", "utf8-chirurgie.csv")
    spellings = ("strip leading zeros", "data", {"ids": ["strip .0", "strip leading zeros"]})
    hospital.dates()
    del hospital.config["data"]["separator"]  # the first rows show it
    order = ('dates = "day first"', "budgets", {"dates": "month first"})
    hospital.answer(CHECK, order, ASK_BLANK, spellings, UNDECIDED)
    printed = hospital.answer(CHECK).out
    hospital.check_explained(printed)
    hospital.config["data"]["test_people"] = "new"
    hospital.answer(["train", "c.toml", "--dry-run"], MISSING).succeeded("also train")
    epsilons("train", "c.toml", "-o", "run").succeeded()
    took, tested = hospital.check_trained(trained[-1])
    assert took == {row.platelets for row in inner if not row.patient.fate}
    known = {row.patient.number for row in inner}
    assert tested == {row.platelets for row in outer if not row.patient.fate and row.patient.number not in known}
    check_planned(hospital, took)
    check_reports(printed)
    hospital.check_predicted(1, "scsv")


def test_a_spreadsheet_with_ids_as_floats_and_a_split_by_date(trained):
    rng = random.Random(2)
    people = patients(rng, unlisted=6, signs=0)
    rows = visits(rng, people, JUNK)
    header = ["patient_id", "age", "weight", "crp", "platelets", "admitted", "sex", "readmitted"]
    columns = ["patient_id", "tier", "signed", "expires", "withdrawn"]
    program = Program(lambda n: f"{n}.0", english, american)
    hospital = Hospital(people, header, {"visits.csv": rows}, "consent.parquet", columns, program)
    as_text("visits.csv", program.table(header, rows), ",", "utf-8-sig")
    listed = Program(str, english, iso).wishes(columns, rng, people)
    as_parquet("consent.parquet", listed, patient_id="int", signed="day", expires="day", withdrawn="day")

    hospital.init("visits.csv")
    hospital.dates()
    hospital.answer(CHECK, ASK_BLANK, ("strip .0", "data", {"ids": ["strip .0"]}), UNDECIDED)
    printed = hospital.answer(CHECK).out
    hospital.check_explained(printed)
    del hospital.config["data"]["test_share"]
    hospital.config["data"] |= {"test_after": {"admitted": ["2026-03-31"]}, "test_people": "new"}
    hospital.write()
    order = ("the second in data.test_after", "data", {"test_after": {"admitted": ["2026-03-31", "month first"]}})
    hospital.answer(["train", "c.toml", "--dry-run"], MISSING, order).succeeded("also train")
    epsilons("train", "c.toml", "-o", "run").succeeded()
    took, tested = hospital.check_trained(trained[-1])
    before = [row for row in rows if row.day <= date(2026, 3, 31) and not row.patient.fate]
    after = [row for row in rows if row.day > date(2026, 3, 31) and not row.patient.fate]
    known = {row.patient.number for row in before}
    assert took == {row.platelets for row in before}
    assert tested == {row.platelets for row in after if row.patient.number not in known}
    check_planned(hospital, took)
    check_reports(printed)
    hospital.check_predicted(2, "csv")


def test_wards_with_whole_numbers_and_a_registry_that_people_leave(trained):
    rng = random.Random(3)
    people = patients(rng, renewed=0)
    rows = visits(rng, people, JUNK)
    header = ["Pat_ID", "Alter", "Gewicht", "CRP", "Thrombozyten", "Aufnahme", "Geschlecht", "Wiederkehr"]
    columns = ["Pat_ID", "Stufe", "gültig ab", "gültig bis", "widerrufen am"]
    program = Program(str, german, iso)
    wards = {f"station-{i}.parquet": [row for row in rows if (row.patient.number % 4 == 0) == i] for i in (0, 1)}
    hospital = Hospital(people, header, wards, "einwilligung.tsv", columns, program)
    for name, some in wards.items():
        as_parquet(name, program.table(header, some), Pat_ID="int", Alter="int", Aufnahme="day")
    padded = Program(lambda n: f"{n:05}", german, with_points)
    as_text("alt.tsv", padded.wishes(columns, rng, people), "\t", "cp1252")
    leaving = rng.sample([one for one in people if not one.fate], 60)
    for one in leaving:
        one.left_registry = True
    as_text("widerruf.csv", [["Pat_ID", "Grund"], *([f"0{one.number}", ""] for one in leaving)], ";", "utf-8")

    url = "sqlite:///people.db"
    epsilons("registry", "create", url, "--ids", "strip leading zeros").succeeded()
    imported = ["--person", "Pat_ID", "--column", "Stufe", "--tiers", "streng=1,offen=4"]
    converted(epsilons("registry", "import", url, "alt.tsv", *imported), "alt.tsv")
    Path("utf8-alt.tsv").rename("einwilligung.tsv")
    epsilons("registry", "import", url, "einwilligung.tsv", *imported).is_refused(2, *map(repr, columns[2:]), "--as-of")
    imported += ["--as-of", str(AS_OF), "--valid-from", columns[2], "--valid-until", columns[3]]
    imported += ["--withdrawn-on", columns[4]]
    epsilons("registry", "import", url, "einwilligung.tsv", *imported).is_refused(2, 'import: --left-out ""')
    done = epsilons("registry", "import", url, "einwilligung.tsv", *imported, "--left-out", "nein", "--left-out", "")
    listed = [one for one in people if one.entries]
    out = sum(bool(one.fate) for one in listed)
    takes = len(listed) - out
    assert out > sum(any(entry.decision in ("nein", "") for entry in one.entries) for one in people)
    done.succeeded(f"{takes} of {takes} people", f"{out} of {len(listed)} people of this list are left")
    epsilons("registry", "withdraw", url, "--file", "widerruf.csv", "--person", "Pat_ID").succeeded()

    hospital.init("station-0.parquet", "--test", "station-1.parquet")
    hospital.dates()
    hospital.config["registry"] = {"share": 0.5}
    hospital.write()
    hospital.config["data"]["ids"] = ["strip leading zeros"]  # as the registry
    command = [*CHECK, "--registry", url]
    printed = hospital.answer(command, ASK_BLANK, UNDECIDED).out
    hospital.check_explained(printed)
    hospital.answer(["train", "c.toml", "--dry-run", "--registry", url], MISSING)
    epsilons("train", "c.toml", "-o", "run", "--registry", url).succeeded()
    took, tested = hospital.check_trained(trained[-1])
    for name, found in zip(wards, (took, tested), strict=True):
        assert found == {row.platelets for row in wards[name] if fate(row.patient) == "matched"}
    check_reports(printed)
    epsilons("registry", "verify", url).succeeded()
    hospital.check_predicted(3, "csv")


def test_two_wards_of_other_programs_that_spell_ids_in_six_ways(trained):
    rng = random.Random(4)
    people = patients(rng)
    rows = visits(rng, people, JUNK)
    header = ["Pat-ID", "Alter", "Gewicht", "CRP", "Thrombozyten", "Datum, Aufnahme", "Geschl.", "Rückkehr"]
    columns = ["Pat-ID", "Wille", "ab", "bis", "Widerruf"]
    program = Program(odd_spelling, german, with_points, unit=" mg")
    hospital = Hospital(people, header, {"visits.csv": rows}, "liste.csv", columns, program)
    as_text("haus1.csv", program.table(header, rows[::2]), ",", "utf-8", csv.QUOTE_ALL)
    other = Program(lambda n: f"Anna-{n:04}", german, with_points, unit="mg")
    as_text("haus2.txt", other.table(header, rows[1::2]), "\t", "cp1252")
    listed = Program(lambda n: f"ANNA-{n:04}", german, with_points).wishes(columns, rng, people)
    as_text("liste.csv", listed, "\t", "utf-16")
    with open("visits.csv", "w", newline="", encoding="utf-8") as file:  # as docs/tables.md says
        joined = csv.DictWriter(file, header)
        joined.writeheader()
        for ward, separator, encoding in (("haus1.csv", ",", "utf-8"), ("haus2.txt", "\t", "cp1252")):
            with open(ward, newline="", encoding=encoding) as part:
                joined.writerows(csv.DictReader(part, delimiter=separator))

    hospital.init("visits.csv", "--target", "Rückkehr")
    hospital.dates()
    ways = ("strip invisible", "data", {"ids": ["nfkc", "casefold", "strip invisible"]})
    printed = hospital.answer(CHECK, ASK_BLANK, ways, UNDECIDED).out
    hospital.check_explained(printed)
    hospital.answer(["train", "c.toml", "--dry-run"], MISSING)
    epsilons("train", "c.toml", "-o", "run").succeeded()
    took, tested = hospital.check_trained(trained[-1])
    assert took | tested == {row.platelets for row in rows if not row.patient.fate}
    numbers = [{row.patient.number for row in rows if row.platelets in part} for part in (took, tested)]
    assert not numbers[0] & numbers[1]
    check_planned(hospital, took)
    check_reports(printed)
    hospital.check_predicted(4, "csv")
