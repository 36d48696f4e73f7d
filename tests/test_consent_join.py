"""Who is trained on: every reader of ids agrees with a slow one, and a planted bug in any of them is found."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from epsilons.budgets import ids as ids_module
from epsilons.cli import registry_people
from epsilons.configs import consent as consent_module
from epsilons.configs import prepare as prepare_module
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import budgets_to_train, joined, prepare
from epsilons.configs.registry_train import Members
from epsilons.data import tables
from epsilons.errors import EpsilonsError
from epsilons.registry import Registry
from epsilons.training.distributed import Ranks
from id_cases import (
    CONFIG,
    FORMS,
    VISIT,
    WAYS,
    Case,
    is_decided,
    random_case,
    same,
    took_part,
    write,
    write_case,
)
from program import change, epsilons
from shares import share

pytestmark = pytest.mark.filterwarnings("ignore::epsilons.errors.EpsilonsWarning")

URL = "sqlite:///people.db"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPSILONS_REGISTRY", raising=False)


def result(work: Callable[[], Any]) -> Any:
    """What the work returns; None if it is refused."""
    with contextlib.suppress(EpsilonsError):
        return work()
    return None


def persons(case: Case, inputs: Any, written: list[str]) -> set[str]:
    """The persons of rows, which are known by their number."""
    return {same(written[row], case.ways) for row in np.rint((inputs[:, 0] + 1) * 500).astype(int).tolist()}


def check_case(case: Case) -> None:
    """plan, consent check and train agree with the slow reader on every person."""
    write_case(case, Path())
    config = read_config(Path("people.toml"))
    expected = took_part(case, case.rows) if is_decided(case) else None
    made = result(lambda: prepare(config, Path()))
    assert (made is None) == (expected is None)
    planned = result(lambda: budgets_to_train(config, Path()))
    assert (planned is None) == (not is_decided(case, with_test=False))
    checked = result(lambda: joined(config, Path(), None))
    if planned is not None:
        epsilon: dict[str, float] = {}
        for name, value, said, _ in case.entries:
            if said == "open":
                one = same(name, case.ways)
                epsilon[one] = min(value, epsilon.get(one, value))
        took = took_part(case, case.rows)
        assert sorted(planned.epsilons[planned.group]) == sorted(epsilon[one] for one in took)
        assert checked[0].counts["matched"] == len(took)
    if made is not None and expected is not None:
        assert persons(case, made.train.inputs, case.rows) == expected
        assert np.array_equal(made.budgets.epsilons[made.budgets.group], planned.epsilons[planned.group])
        by_person = made.budgets.epsilons[made.budgets.group][made.persons]
        rows = np.rint((made.train.inputs[:, 0] + 1) * 500).astype(int).tolist()
        assert by_person.tolist() == [epsilon[same(case.rows[row], case.ways)] for row in rows]
        assert not any(join.problems for join in checked)
        if case.test is not None:
            assert persons(case, made.test.inputs, case.test) == took_part(case, case.test)


def check_cases(seeds: range) -> None:
    for seed in seeds:
        check_case(random_case(seed))


def check_registry(case: Case, seed: int) -> None:
    """registry import and withdraw, and train --registry, agree with the slow reader on every person."""
    case.test = None
    if case.inside:
        return
    write_case(case, Path(), registry=True)
    rng = np.random.default_rng(seed)
    every = list(dict.fromkeys(same(one, case.ways) for one in [*case.rows, *(name for name, *_ in case.entries)]))
    enrolled = [one for one in every if rng.random() < 0.8] or every
    gone = [one for one in enrolled if rng.random() < 0.2]
    stated = [part for name in case.ids or [] for part in ("--ids", name)]
    for name, people in (("enrolling", enrolled), ("leaving", gone)):
        lines = "\n".join('"' + one.replace('"', '""') + '",3' for one in people)
        Path(f"{name}.csv").write_text(f"pid,epsilon\n{lines}\n", encoding="utf-8")
    epsilons("registry", "create", URL, *stated).succeeded()
    done = epsilons("registry", "import", URL, "enrolling.csv", "--person", "pid", *stated)
    if done.code:
        assert case.ids is None or "as written" not in case.ids
        return
    if gone:
        epsilons("registry", "withdraw", URL, "--file", "leaving.csv", "--person", "pid").succeeded()
    config = read_config(Path("people.toml"))
    expected = took_part(case, case.rows, set(enrolled)) - {same(one, case.ways) for one in gone}
    with Registry(URL, spelling=case.ids) as registry:
        members = Members(registry.id, registry, Ranks(), 0.5, "", rule=registry.spelling)
        made = result(lambda: prepare(config, Path(), members=members))
        checked = result(lambda: joined(config, Path(), members))
    assert (made is not None) == (is_decided(case, accounts=set(enrolled)) and bool(expected))
    if made is not None:
        assert persons(case, made.train.inputs, case.rows) == expected
        assert checked[0].counts["matched"] == len(expected)

    done = epsilons("train", "people.toml", "--registry", URL, "--dry-run")
    assert (done.code == 0) == (made is not None)
    assert done.code or f"{len(expected):,} persons by the column 'pid'" in " ".join(done.out.split())


@pytest.mark.parametrize("part", share(range(6), 2))
def test_every_reader_of_ids_agrees_with_a_slow_one(part):
    check_cases(range(part * 20, part * 20 + 20))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_every_reader_of_ids_agrees_with_a_slow_one_in_many_cases(part):
    check_cases(range(1000 + part * 100, 1100 + part * 100))


def check_registries(seeds: Iterable[int]) -> None:
    for seed in seeds:
        folder = Path(f"case-{seed}")
        folder.mkdir()
        with contextlib.chdir(folder):
            check_registry(random_case(seed), seed)


@pytest.mark.parametrize("part", range(3))
def test_a_registry_agrees_with_the_slow_reader(part):
    check_registries(range(part * 5, part * 5 + 5))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_registry_agrees_with_the_slow_reader_in_many_cases(part):
    check_registries(range(1000 + part * 20, 1020 + part * 20))


COMMANDS = (
    "plan people.toml",
    "consent check people.toml",
    "train people.toml --dry-run",
    "train people.toml -q -o run",
)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(s, marks=pytest.mark.slow) for s in range(1000, 1150))])
def test_all_commands_train_on_the_same_people_or_refuse(seed):
    case = random_case(seed)
    case.test = None
    write_case(case, Path())
    codes = [epsilons(*command.split()).code for command in COMMANDS]
    assert codes == [0 if is_decided(case) else 2] * 4
    if is_decided(case):
        expected = f"{len(took_part(case, case.rows)):,} persons by the column 'pid'"
        assert expected in " ".join(epsilons("train", "people.toml", "--dry-run").out.split())
        kept = json.loads(Path("run/run.json").read_text())["metadata"]["consent"]
        assert kept["ids"] == [way for way in (*WAYS, "as written") if way in (case.ids or [])]
        assert kept["as_of"] == ("2026-10-01" if case.dated else "2020-01-01" if case.inside else None)
        name = write(Path("new"), VISIT, [[one, f"{i}", ""] for i, one in enumerate(case.rows)], case.kinds[0])
        epsilons("predict", "run", name, "-o", "scored.csv", "--keep", "pid").succeeded()
        with Path("scored.csv").open(newline="", encoding="utf-8") as file:
            assert [row["pid"].strip() for row in csv.DictReader(file)] == [one.strip() for one in case.rows]


@pytest.mark.parametrize("seed", range(20))
def test_without_persons_an_entry_is_of_the_row_at_its_place(seed):
    case = random_case(seed)
    case.test, case.ids, case.unlisted, case.inside = None, None, False, False
    entries = [entry for entry in case.entries for _ in range(2)]
    case.rows, case.entries = [one for one, *_ in entries], entries
    write_case(case, Path())
    change('person = "pid"', 'person = "each row is one person"')
    change("read_off = []", 'read_off = []\ndrop = ["pid"]' if not case.drop else "read_off = []")
    change('conflict = "strictest"', "")
    used = [
        row
        for row, (_, _, said, gone) in enumerate(entries)
        if said == "open" and not (case.dated and gone == "2026-01-01")
    ]
    made = result(lambda: prepare(read_config(Path("people.toml")), Path()))
    if not used:
        assert made is None
        return
    assert np.rint((made.train.inputs[:, 0] + 1) * 500).astype(int).tolist() == used
    assert made.budgets.epsilons[made.budgets.group].tolist() == [entries[row][1] for row in used]


# -- predict -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = (case for case in map(random_case, range(200)) if is_decided(case) and case.test is None)
        case = next(case for case in cases if case.kinds[0] == "csv")
        write_case(case, Path())
        epsilons("train", "people.toml", "-q", "-o", "run").succeeded()
    return folder / "run"


def check_predictions(run: Path, kind: str) -> None:
    """The column of ids that is kept holds what was written, row by row."""
    ids = [form(number) for form in FORMS.values() for number in (7, 31)]
    name = write(Path("new"), ["pid", "serial", "label"], [[one, str(i), ""] for i, one in enumerate(ids)], kind)
    Path("scored.csv").unlink(missing_ok=True)
    epsilons("predict", run, name, "-o", "scored.csv", "--keep", "pid").succeeded()
    with Path("scored.csv").open(newline="", encoding="utf-8") as file:
        assert [row["pid"] for row in csv.DictReader(file)] == ids


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_predictions_keep_ids_as_written(kind, run):
    check_predictions(run, kind)


# -- planted bugs ------------------------------------------------------------------------------------------------------


def as_a_number(text: str | None) -> str | None:
    """What a reader makes of an id that takes it for a number."""
    return text if text is None or not text.strip().isdigit() else str(int(text))


def reading(read: Callable[..., Any]) -> Callable[..., Any]:
    """The reader, which takes ids for numbers."""

    def wrong(*arguments: Any, **named: Any) -> Any:
        table = read(*arguments, **named)
        if "pid" not in table.column_names:
            return table
        cells = pyarrow.array([as_a_number(str(cell)) for cell in table.column("pid").to_pylist()])
        return table.set_column(table.column_names.index("pid"), "pid", cells)

    return wrong


def numbers_in_place_of_texts(read: Callable[..., Any]) -> Callable[..., Any]:
    """The reader as it was: a dropped column of ids is not among those that are read as text."""
    return lambda path, what, error, texts=(), *more, **named: read(
        path, what, error, {*texts} - {"pid"}, *more, **named
    )


PLANTED = {
    "the training table": (tables, "open_table", reading),
    "a dropped column": (tables, "open_table", numbers_in_place_of_texts),
    "the table of a plan": (prepare_module, "open_table", reading),
    "the list of budgets": (consent_module, "read_table", reading),
    "one way of a statement": (ids_module, "normalised", lambda f: lambda text, rule: f(text, rule[1:])),
    "the statement": (ids_module, "count_unstated", lambda f: lambda rule, *texts: (0, 1)),
    "who said no": (consent_module, "meanings", lambda f: lambda *a: ()),
    "the day of withdrawal": (consent_module, "_days", lambda f: lambda table, *a: np.full(len(table), np.nan)),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_bug_in_one_reader_is_found(plant, monkeypatch):
    module, name, bug = PLANTED[plant]
    monkeypatch.setattr(module, name, bug(getattr(module, name)))
    if plant == "the statement":
        monkeypatch.setattr(consent_module, name, bug(None))
    with pytest.raises(AssertionError):
        check_cases(range(120))


@pytest.mark.parametrize("planted", ["budgets", "list of people"], ids=["import", "withdraw"])
def test_a_bug_in_a_reader_of_a_registry_is_found(planted, monkeypatch):
    read = registry_people.read_table

    def wrong(path: Path, what: str, *more: Any, **named: Any) -> Any:
        return (reading(read) if what == planted else read)(path, what, *more, **named)

    monkeypatch.setattr(registry_people, "read_table", wrong)
    padded = [seed for seed in range(400) if any(one[:2] == "00" for one in random_case(seed).rows)]
    with pytest.raises(AssertionError):
        check_registries(padded)


def test_a_bug_in_the_reader_of_predictions_is_found(run, monkeypatch):
    from epsilons.training.predicting import table_parts as parts

    def wrong(*arguments: Any) -> Any:
        names, found = read(*arguments)
        return names, (reading(lambda part=part: part)() for part in found)

    read = parts.read_parts
    monkeypatch.setattr(parts, "read_parts", wrong)
    with pytest.raises(AssertionError):
        check_predictions(run, "csv")


# -- what happened -----------------------------------------------------------------------------------------------------


def wards(drop: str, data: str = "") -> None:
    """Ward A has the ids 1 to 300, ward B the ids 0001 to 0300; everybody of ward B said no."""
    ids = [f"{i}" for i in range(1, 301)] + [f"{i:04d}" for i in range(1, 301)]
    rows = [f"{one},{i % 1000},{('no', 'yes')[i % 2]}" for i, one in enumerate(ids * 2)]
    Path("people.csv").write_text("pid,serial,label\n" + "\n".join(rows) + "\n")
    said = [f"{one},{'no' if len(one) == 4 else 'open'}" for one in ids]
    Path("wishes.csv").write_text("pid,tier\n" + "\n".join(said) + "\n")
    budgets = '[budgets]\nfile = "wishes.csv"\ncolumn = "tier"\ntiers = { open = 8 }\nleft_out = ["no"]\ndelta = 1e-4'
    Path("people.toml").write_text(CONFIG.format(train="people.csv", data=f"{drop}\n{data}", budgets=budgets))


@pytest.mark.parametrize("drop", ["", 'drop = ["pid"]'])
def test_nobody_of_a_ward_that_said_no_is_trained_on(drop):
    wards(drop)
    for command in COMMANDS:
        epsilons(*command.split()).is_refused(2, "600 of 600 ids", 'ids = "as written"')
    change('person = "pid"', 'person = "pid"\nids = "as written"')
    made = prepare(read_config(Path("people.toml")), Path())
    assert made.left_out.startswith("300 of 600 persons are left out")
    assert made.budgets.counts.tolist() == [300]
    assert len(made.train.targets) == 600
    change('ids = "as written"', 'ids = "strip leading zeros"')  # each id of ward A is then one of ward B, who said no
    epsilons("train", "people.toml").is_refused(2, "All 1,200 rows of people.csv are left out")


@pytest.mark.parametrize("declared", ["no", "No"])
def test_a_no_in_any_spelling_leaves_out_and_one_that_may_be_a_tier_is_refused(declared):
    wards("", 'ids = "as written"')
    spelt = itertools.cycle(["no", " NO", "nO ", "No"])
    said = re.sub(r"(?<=,)no$", lambda _: next(spelt), Path("wishes.csv").read_text(), flags=re.MULTILINE)
    Path("wishes.csv").write_text(said.replace(",open", ", Open"))
    change('left_out = ["no"]', f'left_out = ["{declared}"]')
    made = prepare(read_config(Path("people.toml")), Path())
    assert made.budgets.counts.tolist() == [300]
    Path("wishes.csv").write_text(said)
    change("tiers = { open = 8 }", "tiers = { open = 8, nO = 1 }")  # " NO" may be either, and one more of the four
    epsilons("train", "people.toml").is_refused(2, "150 of 600 cells", "not the name of a tier")


@pytest.mark.parametrize("drop", ["", 'drop = ["pid"]'])
@pytest.mark.parametrize("form", [lambda i: f"{i:04d}", lambda i: f"{10**20 + i}", lambda i: f"0x{i:x}"])
def test_ids_with_zeros_or_21_digits_find_their_budgets_and_accounts(drop, form):
    ids = [form(i) for i in range(40)]
    rows = [f"{one},{i},{('no', 'yes')[i % 2]}" for i, one in enumerate(ids * 2)]
    Path("people.csv").write_text("pid,serial,label\n" + "\n".join(rows) + "\n")
    Path("wishes.csv").write_text("pid,epsilon\n" + "".join(f"{one},{1 + i / 64}\n" for i, one in enumerate(ids)))
    config = CONFIG.format(train="people.csv", data=drop, budgets='[budgets]\nfile = "wishes.csv"\ndelta = 1e-4')
    Path("people.toml").write_text(config)
    made = prepare(read_config(Path("people.toml")), Path())
    by_row = made.budgets.epsilons[made.budgets.group][made.persons]
    assert by_row.tolist() == [1 + i / 64 for i in range(40)] * 2
    epsilons("registry", "create", URL).succeeded()
    epsilons("registry", "import", URL, "wishes.csv", "--person", "pid").succeeded("40 of 40")
    outcome = epsilons("train", "people.toml", "--registry", URL, "--share", "0.5", "--dry-run")
    outcome.succeeded("40 persons")
    epsilons("consent", "check", "people.toml", "--registry", URL).succeeded("matched")
