"""The exception tree: one base to catch, and the exit codes of the command line."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
import unicodedata
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import epsilons
from epsilons import Budgets, Plan, Recipe, errors, models, plan
from epsilons.configs.config_file import read_config
from epsilons.data.tables import Columns, Features, table
from epsilons.errors import UNPRINTABLE, BudgetError, EpsilonsError, EpsilonsWarning, json_text, printable
from epsilons.planning import STRATEGIES
from epsilons.registry.registry import Registry
from epsilons.training import EvalData, validation
from program import epsilons as program

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception) and not issubclass(value, Warning)
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_has_a_base_class_an_exit_code_and_a_docstring(name):
    error = CLASSES[name]
    assert issubclass(error, errors.EpsilonsError)
    assert error("what arrived").exit_code == (3 if issubclass(error, errors.PromiseError) else 2)
    assert error.__doc__


def test_the_tree_in_the_docstring_is_the_tree():
    drawn, path = {}, []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^( {4})([│ ]*)(?:[├└]── )?([A-Z]\w+) {2,}\S", line)
        if not found:
            continue
        depth = len(found[2]) // 4 + ("── " in line)
        path[depth:] = [found[3]]
        drawn[found[3]] = path[depth - 1] if depth else "Exception"
    assert drawn == {name: error.__mro__[1].__name__ for name, error in CLASSES.items()}


@pytest.mark.parametrize("name", CLASSES)
def test_errors_of_inputs_and_models_are_value_errors_and_no_others_are(name):
    """Scripts of Opacus and scikit-learn catch ValueError."""
    error = CLASSES[name]
    assert issubclass(error, ValueError) == issubclass(error, errors.InputError | errors.ModelError)


DATABASE = SimpleNamespace(_database=SimpleNamespace(snapshot=lambda work: work()))
#: Code that turns a foreign ValueError into an error of its own, with a function that it calls.
AROUND = {
    "models": lambda fail: models._made("mine", fail),
    "columns": lambda fail: validation.columns([SimpleNamespace(dtype=None, to_numpy=fail)]),
    "registry": lambda fail: Registry._reading(DATABASE, lambda _: fail()),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_an_error_of_ours_keeps_its_message_where_foreign_value_errors_are_caught(around):
    def fail(error):
        raise error

    with pytest.raises(errors.DataError, match=r"^ours$"):
        around(lambda: fail(errors.DataError("ours")))
    with pytest.raises(errors.InputError, match=r"^(?!theirs$)"):
        around(lambda: fail(ValueError("theirs")))


# -- Names from data appear without control characters on pages, in messages, in tables and on the terminal ----------


C0_AND_C1 = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]
BIDI = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
OTHERS = ["\u2028", "\u2029", "\u200b", "\ufeff", "\u00ad", "\U000e0001", "\U000e0041"]
EVERY = [*C0_AND_C1, *BIDI, *OTHERS]

#: The first name holds every character, the others are attacks.
ATTACKS = [
    "".join(EVERY),
    "[bold]b[/bold][/x]:warning:",
    "strict\x1b[2J\x1b[31m",
    "a\x9b31mb",
    "a\rb\x08c\x07",
    "one\ntwo\x0bthree\x85four\u2028five",
    "\u202eneddih\u202c",
    "x\x1b]8;;http://evil\x1b\\y",
]
#: Two of them in every run of the tests; the others add no character.
NAMES = [pytest.param(name, id=f"{i}", marks=pytest.mark.slow if i > 1 else ()) for i, name in enumerate(ATTACKS)]
HARMLESS = ["streng", "ε ≤ 1", "می\u200cخواهم", "👩\u200d🔬", "a b\u00a0c", "<b>&amp;</b>", "C:\\new"]


def raw(text: str, ours: str = "\n") -> set[str]:
    """Control characters in a text, without the newlines of the library."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {*ours, "\u200c", "\u200d"}


# -- the one function ------------------------------------------------------------------------------------------------


def test_every_control_character_of_unicode_is_escaped_and_no_letter_is():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        category = unicodedata.category(char)
        if category in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\u200c\u200d":
            assert UNPRINTABLE.fullmatch(char), hex(code)
            assert raw(printable(char), "") == set(), hex(code)
        elif category != "Cn":
            assert printable(char) == char, hex(code)


@pytest.mark.parametrize("name", HARMLESS)
def test_ordinary_text_is_unchanged(name):
    assert printable(name) == name
    assert json.loads(json_text([name])) == [name]


@pytest.mark.parametrize("name", ATTACKS)
def test_json_holds_the_name_without_raw_control_characters(name):
    text = json_text({name: [name, 1.5, None]})
    assert raw(text) == set()
    assert json.loads(text) == {name: [name, 1.5, None]}
    assert json.loads(json_text("\ud800x")) == "\ud800x"
    json_text("\ud800x").encode("utf-8")


# -- where names come out --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def printed(*arguments: object, code: int = 0) -> str:
    """All that `epsilons ARGUMENTS` prints; the exit code must be `code`."""
    outcome = program(*arguments)
    assert outcome.code == code, outcome.out + outcome.err
    assert "Traceback" not in outcome.err
    return outcome.out + outcome.err


def quoted(cells: Iterable[str]) -> str:
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)


def as_file(name: str) -> str:
    return name.replace("/", "-").replace("\x00", "")


def toml(text: str) -> str:
    return '"' + "".join(f"\\U{ord(c):08x}" for c in text) + '"'


@pytest.mark.parametrize("name", NAMES)
def test_messages_name_columns_and_files_without_control_characters(tmp_path, name):
    messages = []
    file = tmp_path / (as_file(name) + ".csv")
    file.write_text(quoted([name, "x"]) + "\n" + "".join(quoted([name, "1"]) + "\n" for _ in range(30)), newline="")
    tries = [
        lambda: Budgets.from_csv(file, column=name),
        lambda: Budgets.from_csv(file, column=name + "?"),
        lambda: Budgets.from_csv(file, column=name, tiers={name + "!": 1.0, "b": 2.0}),
        lambda: Budgets.from_csv(file.with_suffix(".gone")),
        lambda: Budgets.from_csv(file.with_name("gone" + as_file(name) + ".csv")),
        lambda: table(file, name, None, Columns("x", Features({}, {name: [name + "?"]}))),
        lambda: table(file, name, ["b"], Columns(name, Features({"x": (0.0, 1.0, False)}))),
        lambda: table(file, name, None, Columns("x")),
        lambda: table(file, name, None, Columns(name + "x")),
        lambda: Plan.load(file),
        lambda: epsilons.report(file),
        lambda: epsilons.report(file.with_name(as_file(name))),
    ]
    for attempt in tries:
        with pytest.raises(EpsilonsError) as caught:
            attempt()
        messages += [str(caught.value), repr(caught.value)]
    assert raw("".join(messages), "") == set()
    with pytest.warns(EpsilonsWarning) as caught_warnings:
        warnings.warn(name, EpsilonsWarning, stacklevel=1)
    assert raw(str(caught_warnings[0].message), "") == set()


@pytest.mark.parametrize("name", NAMES)
def test_plans_show_names_without_control_characters(tmp_path, name):
    def mine(budgets, recipe, accountant):
        return STRATEGIES["scale"](budgets, recipe, accountant)

    mine.__name__ = name
    recipe = Recipe(steps=4, batch_size=20, clip_norm=1.0)
    made = plan(Budgets([1.0] * 30 + [2.0] * 30), recipe, mine, "rdp")
    file = tmp_path / (as_file(name) + ".json")
    assert Plan.load(made.save(file)) == made
    assert Plan.load(file).strategy == name
    assert raw(file.read_text(encoding="utf-8")) == set()
    few = plan(Budgets([1.0] * 30 + [2.0] * 3), recipe, mine, "rdp")
    for text in (str(made), repr(made), made.compare(made), made.summary(), str(few), few.compare(few)):
        assert raw(text) == set()
    word = name.replace("\x00", "")
    who = ("--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "4", "--accountant", "rdp")
    for code, arguments in (
        (0, (*who, "-o", file)),
        (0, (*who, "-o", file, "--json")),
        (2, (*who, "--strategy", word)),
        (2, (*who, "--option", word + "=1")),
        (2, (*who, "--accountant", word)),
        (2, (*who[2:], "--shares", word)),
        (2, (*who, "--" + word.replace("\n", ""))),
        (2, ("--budgets", file.with_suffix(".csv"), *who[4:])),
        (2, ("--budgets", "x.csv", "--tiers", word, *who[4:])),
    ):
        assert raw(printed("plan", *arguments, code=code)) == set(), arguments
    assert raw(printed("advise", *who, "--picture", file.with_suffix(".svg"))) == set()


def trained(folder: Path, name: str) -> None:
    """A run with this name for its tiers, classes, model, metadata and folder."""
    torch.manual_seed(0)
    budgets = Budgets([1.0] * 40 + [2.0] * 40)
    made = plan(budgets, Recipe(steps=3, batch_size=30, clip_norm=1.0), "scale", "rdp")
    data = (torch.ones(80, 3), torch.arange(80) % 2)
    kind = type(name.replace("\x00", "") or "x", (torch.nn.Linear,), {})
    with warnings.catch_warnings(action="ignore"):
        epsilons.fit(
            kind(3, 2),
            data,
            made,
            budgets=budgets,
            training=epsilons.Training(progress=False),
            evaluation=EvalData(data, public=True, classes=(name, "b"), groups=np.repeat([0, 1], 40)),
            run_dir=epsilons.RunFolder(
                folder, metadata={"tiers": {name: 1.0, "b" + name: 2.0}, "config": {name: name}, "simulated": False}
            ),
        )


@pytest.mark.parametrize("name", NAMES)
def test_reports_show_names_without_control_characters_and_json_keeps_them(tmp_path, name):
    folder = tmp_path / as_file(name)
    trained(folder, name)
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    settings["versions"][name] = name
    settings["training"] |= {"device": name, "optimizer": name, "model": name}
    settings["engine"] = name
    (folder / "run.json").write_text(json.dumps(settings))
    for release in (False, True):
        made = epsilons.report(folder, release=release)
        page = made.to_html()
        assert raw(page) == set()
        assert printable(name)[:5].replace("<", "&lt;") in page or release
        saved = made.save(tmp_path / f"{release}.json").read_text(encoding="utf-8")
        assert raw(saved) == set()
        assert json.loads(saved)["groups"][0]["tier"] == name
    assert raw(printed("report", folder, "-o", tmp_path / (as_file(name) + ".html"))) == set()
    assert raw(printed("report", folder, "--json")) == set()
    assert raw(printed("report", tmp_path, code=2)) == set()


CONFIG = """
[data]
train = {train}
target = {target}
classes = [{first}, "b"]
test_share = 0.25
[data.categorical]
{feature} = [{first}, "c"]
[budgets]
column = {budget}
tiers = {{ {first} = 1.0, "other" = 2.0 }}
[model]
name = "logistic"
[training]
steps = 2
batch_size = 20
{more}
[privacy]
accountant = "rdp"
"""


@pytest.mark.parametrize("attack", NAMES)
def test_configs_and_what_they_print_are_without_control_characters(attack):
    name = attack.replace("\x00", "").replace("\r", "")
    stem, file = as_file(name), as_file(name) + ".csv"
    target, feature, budget = "t" + name, "f" + name, "tier" + name
    rows = [[name if i % 2 else "b", name if i % 3 else "c", name if i % 4 < 2 else "other"] for i in range(160)]
    lines = [quoted(row) for row in [[target, feature, budget], *rows]]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    words = {"train": file, "target": target, "first": name, "feature": feature, "budget": budget}

    def config(more: str = "", **others: str) -> str:
        values = {key: toml(value) for key, value in {**words, **others}.items()}
        Path("c.toml").write_text(CONFIG.format(more=more, **values))
        return "c.toml"

    assert raw(printed("train", config(), "--run-dir", stem + "-run")) == set()
    assert (Path(stem + "-run") / "ledger.jsonl").exists()
    others = ({"feature": name}, {"target": name}, {"first": name + "!"}, {"budget": name}, {"train": name})
    mores = (f"{toml(name)} = 1", f"device = {toml(name)}", f"optimizer = {toml(name)}", "\x1b")
    for wrong in (*others, *({"more": more} for more in mores)):
        assert raw(printed("train", config(**wrong), "--run-dir", "no-run", code=2)) == set(), wrong
    draft = printed("init", file, "--target", target, "--budget", budget, "-o", stem + ".toml")
    drafted = Path(stem + ".toml").read_text(encoding="utf-8")
    assert (raw(draft), raw(drafted)) == (set(), set())
    assert tomllib.loads(drafted)["data"]["target"] == target
    assert name in tomllib.loads(drafted)["budgets"]["tiers"]
    with pytest.raises(EpsilonsError):  # the draft needs an epsilon for each tier
        read_config(Path(stem + ".toml"))
    for missing in (stem, stem + ".csv-gone", file + "/x"):
        assert raw(printed("init", missing, "-o", "new.toml", code=2)) == set()
        assert raw(printed("audit", missing, code=2)) == set()


def test_rich_takes_no_part_of_a_name_for_markup():
    name = "[red]x[-red] [-nothing] :warning:.json"
    who = ("--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "4", "--accountant", "rdp")
    assert name in re.sub(r"\s+", " ", printed("plan", *who, "-o", name))


def test_a_message_is_one_line(tmp_path):
    with pytest.raises(BudgetError) as caught:
        Budgets.from_csv(tmp_path / "a\nb.csv")
    assert "\n" not in str(caught.value)
    assert "a\\nb.csv" in str(caught.value)
