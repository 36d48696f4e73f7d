"""Names from data reach people without control characters: on pages, in messages, in tables, on the terminal."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import unicodedata
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import epsilons
from epsilons import Budgets, Plan, Recipe, plan
from epsilons.cli.config import read_config
from epsilons.data.tables import Features, table
from epsilons.errors import BudgetError, EpsilonsError, EpsilonsWarning
from epsilons.escaping import UNPRINTABLE, json_text, printable
from epsilons.planning import STRATEGIES
from epsilons.training import EvalData

C0_AND_C1 = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]
BIDI = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
OTHERS = ["\u2028", "\u2029", "\u200b", "\ufeff", "\u00ad", "\U000e0001", "\U000e0041"]
EVERY = [*C0_AND_C1, *BIDI, *OTHERS]

#: Names that hold every one of them, but what a line of CSV or a file name cannot hold, and what people try.
ATTACKS = [
    "".join(EVERY),
    "strict\x1b[2J\x1b[31m",
    "a\x9b31mb",
    "a\rb\x08c\x07",
    "one\ntwo\x0bthree\x85four\u2028five",
    "\u202eneddih\u202c",
    "x\x1b]8;;http://evil\x1b\\y",
    "[bold]b[/bold][/x]:warning:",
]
HARMLESS = ["streng", "ε ≤ 1", "می\u200cخواهم", "👩\u200d🔬", "a b\u00a0c", "<b>&amp;</b>", "C:\\new"]


def raw(text: str, ours: str = "\n") -> set[str]:
    """Control characters in a text, the newlines that are ours aside."""
    found = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return found - set(ours) - {"\u200c", "\u200d"}


# -- the one function ------------------------------------------------------------------------------------------------


def test_every_control_and_format_character_of_unicode_is_escaped_and_no_letter_is():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        category = unicodedata.category(char)
        if category in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\u200c\u200d":
            assert UNPRINTABLE.fullmatch(char), hex(code)
            assert raw(printable(char), "") == set(), hex(code)
        elif category != "Cn":
            assert printable(char) == char, hex(code)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_people_write_is_left_as_it_is(name):
    assert printable(name) == name
    assert json.loads(json_text([name])) == [name]


@pytest.mark.parametrize("name", ATTACKS)
def test_json_holds_the_name_itself_and_no_raw_control_character(name):
    text = json_text({name: [name, 1.5, None]})
    assert raw(text) == set()
    assert json.loads(text) == {name: [name, 1.5, None]}
    assert json.loads(json_text("\ud800x")) == "\ud800x"
    json_text("\ud800x").encode("utf-8")


# -- where names come out --------------------------------------------------------------------------------------------


class Command:
    """The command line in this process, and all that it printed."""

    def __init__(self, monkeypatch, capfd) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int, str]:
        from epsilons.cli import main

        self.monkeypatch.setattr(sys, "argv", ["epsilons", *arguments])
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        run_dir, err = self.capfd.readouterr()
        return int(ended.value.code or 0), run_dir + err


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capfd)


def quoted(cells: Iterable[str]) -> str:
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)


def as_file(name: str) -> str:
    return name.replace("/", "-").replace("\x00", "")


def toml(text: str) -> str:
    return '"' + "".join(f"\\U{ord(c):08x}" for c in text) + '"'


@pytest.mark.parametrize("name", ATTACKS)
def test_budgets_and_tables_tell_names_without_control_characters(tmp_path, name):
    told = []
    file = tmp_path / (as_file(name) + ".csv")
    file.write_text(quoted([name, "x"]) + "\n" + "".join(quoted([name, "1"]) + "\n" for _ in range(30)), newline="")
    tries = [
        lambda: Budgets.from_csv(file, column=name),
        lambda: Budgets.from_csv(file, column=name + "?"),
        lambda: Budgets.from_csv(file, column=name, tiers={name + "!": 1.0, "b": 2.0}),
        lambda: Budgets.from_csv(file.with_suffix(".gone")),
        lambda: Budgets.from_csv(file.with_name("gone" + as_file(name) + ".csv")),
        lambda: table(file, name, "x", None, Features({}, {name: [name + "?"]}), []),
        lambda: table(file, name, name, ["b"], Features({"x": (0.0, 1.0, False)}), []),
        lambda: table(file, name, "x", None, Features(), []),
        lambda: table(file, name, name + "x", None, Features(), []),
        lambda: Plan.load(file),
        lambda: epsilons.report(file),
        lambda: epsilons.report(file.with_name(as_file(name))),
    ]
    for attempt in tries:
        with pytest.raises(EpsilonsError) as caught:
            attempt()
        told += [str(caught.value), repr(caught.value)]
    assert [raw(text, "") for text in told if raw(text, "")] == []
    with pytest.warns(EpsilonsWarning) as caught_warnings:
        warnings.warn(name, EpsilonsWarning, stacklevel=1)
    assert raw(str(caught_warnings[0].message), "") == set()


@pytest.mark.parametrize("name", ATTACKS)
def test_plans_and_their_tables_tell_names_without_control_characters(tmp_path, name, command):
    def mine(budgets, recipe, accountant):
        return STRATEGIES["scale"](budgets, recipe, accountant)

    mine.__name__ = name
    budgets = Budgets([1.0] * 30 + [2.0] * 30)
    made = plan(budgets, Recipe(steps=4, batch_size=20, clip_norm=1.0), mine, "rdp")
    file = tmp_path / (as_file(name) + ".json")
    assert Plan.load(made.save(file)) == made
    assert Plan.load(file).strategy == name
    assert raw(file.read_text(encoding="utf-8")) == set()
    few = plan(Budgets([1.0] * 30 + [2.0] * 3), Recipe(steps=4, batch_size=20, clip_norm=1.0), mine, "rdp")
    for text in (str(made), repr(made), made.compare(made), made.summary(), str(few), few.compare(few)):
        assert raw(text) == set()
    who = ("--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "4", "--accountant", "rdp")
    for arguments in (
        (*who, "-o", str(file)),
        (*who, "-o", str(file), "--json"),
        (*who, "--strategy", name.replace("\x00", "")),
        (*who, "--option", name.replace("\x00", "") + "=1"),
        (*who, "--accountant", name.replace("\x00", "")),
        (*who[2:], "--shares", name.replace("\x00", "")),
        (*who, "--" + name.replace("\x00", "").replace("\n", "")),
        ("--budgets", str(file.with_suffix(".csv")), *who[4:]),
        ("--budgets", "x.csv", "--tiers", name.replace("\x00", ""), *who[4:]),
    ):
        code, run_dir = command("plan", *arguments)
        assert raw(run_dir) == set(), arguments
        assert "Traceback" not in run_dir
    code, run_dir = command("advise", *who, "--picture", str(file.with_suffix(".svg")))
    assert (code, raw(run_dir)) == (0, set())


def trained(folder: Path, name: str) -> None:
    """A run whose tiers, classes, model, notes and folder are called so."""
    torch.manual_seed(0)
    budgets = Budgets([1.0] * 40 + [2.0] * 40)
    made = plan(budgets, Recipe(steps=3, batch_size=30, clip_norm=1.0), "scale", "rdp")
    data = (torch.ones(80, 3), torch.arange(80) % 2)
    kind = type(name.replace("\x00", "") or "x", (torch.nn.Linear,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epsilons.fit(
            kind(3, 2),
            data,
            made,
            budgets=budgets,
            eval_data=EvalData(data, public=True, classes=(name, "b"), groups=np.repeat([0, 1], 40)),
            run_dir=folder,
            progress=False,
            notes={"tiers": {name: 1.0, "b" + name: 2.0}, "config": {name: name}, "simulated": False},
        )


@pytest.mark.parametrize("name", ATTACKS)
def test_reports_tell_names_without_control_characters_and_their_json_keeps_them(tmp_path, name, command):
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
    code, run_dir = command("report", str(folder), "-o", str(tmp_path / (as_file(name) + ".html")))
    assert (code, raw(run_dir)) == (0, set())
    code, run_dir = command("report", str(folder), "--json")
    assert (code, raw(run_dir)) == (0, set())
    code, run_dir = command("report", str(tmp_path))
    assert (code, raw(run_dir)) == (2, set())


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


@pytest.mark.parametrize("name", [attack.replace("\x00", "").replace("\r", "") for attack in ATTACKS])
def test_configs_and_what_is_printed_of_them_are_without_control_characters(tmp_path, name, command):
    file = as_file(name) + ".csv"
    target, feature, budget = "t" + name, "f" + name, "tier" + name
    rows = [[name if i % 2 else "b", name if i % 3 else "c", name if i % 4 < 2 else "other"] for i in range(160)]
    lines = [quoted(row) for row in [[target, feature, budget], *rows]]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    words = {"train": toml(file), "target": toml(target), "first": toml(name), "feature": toml(feature)}

    def config(more: str = "", **others: str) -> str:
        Path("c.toml").write_text(CONFIG.format(**{**words, "budget": toml(budget), "more": more, **others}))
        return "c.toml"

    out_folder = as_file(name) + "-run"
    code, run_dir = command("train", config(), "--run-dir", out_folder)
    assert (code, raw(run_dir)) == (0, set()), run_dir
    assert (Path(out_folder) / "ledger.jsonl").exists()
    for wrong in (
        config(feature=toml(name)),
        config(target=toml(name)),
        config(first=toml(name + "!")),
        config(budget=toml(name)),
        config(train=toml(name)),
        config(more=f"{toml(name)} = 1"),
        config(more=f"device = {toml(name)}"),
        config(more=f"optimizer = {toml(name)}"),
        config(more="\x1b"),
    ):
        text = Path(wrong).read_text()
        code, run_dir = command("train", wrong, "--run-dir", "no-run")
        assert (code, raw(run_dir)) == (2, set()), text
    code, run_dir = command("init", file, "--target", target, "--budget", budget, "-o", as_file(name) + ".toml")
    drafted = Path(as_file(name) + ".toml").read_text(encoding="utf-8")
    assert (code, raw(run_dir), raw(drafted)) == (0, set(), set())
    assert tomllib.loads(drafted)["data"]["target"] == target
    assert name in tomllib.loads(drafted)["budgets"]["tiers"]
    with pytest.raises(EpsilonsError):  # the draft asks for an epsilon of each tier
        read_config(Path(as_file(name) + ".toml"))
    for gone in (as_file(name), as_file(name) + ".csv-gone", file + "/x"):
        code, run_dir = command("init", gone, "-o", "new.toml")
        assert (code, raw(run_dir)) == (2, set())
        code, run_dir = command("audit", gone)
        assert (code, raw(run_dir)) == (2, set())


def test_rich_takes_no_part_of_a_name_for_markup(tmp_path, command):
    name = "[red]x[/red] [/nothing] :warning:.json"
    who = ("--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "4", "--accountant", "rdp")
    code, run_dir = command("plan", *who, "-o", name.replace("/", "-"))
    assert code == 0
    assert name.replace("/", "-") in re.sub(r"\s+", " ", run_dir)


def test_a_message_is_one_line(tmp_path):
    with pytest.raises(BudgetError) as caught:
        Budgets.from_csv(tmp_path / "a\nb.csv")
    assert "\n" not in str(caught.value)
    assert "a\\nb.csv" in str(caught.value)
