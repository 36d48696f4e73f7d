"""Numbers beyond every range, wherever one can be stated to the registry: one line, and nothing changes."""

from __future__ import annotations

import json
import shutil
import typing
from pathlib import Path

import numpy as np
import pytest

import program
from epsilons.cli import registry_command
from epsilons.errors import EpsilonsError
from epsilons.registry import Registry, Roster, Table
from registries import VISITS

URL = "sqlite:///people.db"
IMPORT = ["registry", "import", URL]
TRAIN = ["train", "--registry", URL, "--dry-run"]
#: Texts of numbers that no option can use, or that are at the end of what it can.
TEXTS = [
    "1e30",
    "-1e30",
    "1e309",
    "nan",
    "inf",
    "-inf",
    "0",
    "-0",
    "-1",
    "5e-324",
    "9" * 400,
    "1e",
    "",
    "0x10",
    "1,5",
    "1_000",
]
#: (command, option) -> the arguments around the number.
CALLS = {
    ("import", "delta"): lambda text: [*IMPORT, "new.csv", "--person", "id", "--delta", text],
    ("change", "epsilon"): lambda text: ["registry", "change", URL, "--person", "p1", "--epsilon", text],
    ("change", "delta"): lambda text: ["registry", "change", URL, "--person", "p1", "--epsilon", "1", "--delta", text],
    ("quota", "share"): lambda text: ["registry", "quota", URL, "reading", "--", text],
    ("limit", "share"): lambda text: ["registry", "limit", URL, "--", text],
    ("quarantine", "event"): lambda text: ["registry", "quarantine", URL, "--reason", "x", f"--event={text}"],
}
#: What is in range all the same.
LEGAL = {
    ("change", "epsilon", "1_000"),
    ("quota", "share", "5e-324"),
    *(("limit", "share", text) for text in ("0", "-0", "5e-324")),
}
#: Other places of numbers: in texts, files and configs.
ELSEWHERE = {
    "tiers": lambda text: [*IMPORT, "tiers.csv", "--person", "id", "--column", "tier", "--tiers", f"a={text}"],
    "a cell of epsilon": lambda text: [*IMPORT, cells(epsilon=text), "--person", "id"],
    "a cell of delta": lambda text: [*IMPORT, cells(delta=text), "--person", "id", "--delta-column", "delta"],
    "train --share": lambda text: [*TRAIN, "people.toml", f"--share={text}"],
    "registry.share": lambda text: [*TRAIN, config(text)],
    "registry.share, set": lambda text: [*TRAIN, "people.toml", "--set", f"registry.share={text}"],
    "a day": lambda text: ["registry", "export", URL, "-o", "x.json", f"--excluded={text}"],
    "a day's year": lambda text: ["registry", "export", URL, "-o", "x.json", f"--excluded={text}-01-01"],
    "a person": lambda text: ["registry", "show", URL, "--json", f"--person={text}"],
    "a run": lambda text: ["registry", "settle", URL, f"--cancel={text}"],
}


def cells(epsilon="1", delta="1e-5"):
    Path("cells.csv").write_text(f'id,epsilon,delta\nnew1,"{epsilon}","{delta}"\n')
    return "cells.csv"


def config(share):
    Path("share.toml").write_text(f"{VISITS}[registry]\nshare = {share or '0.5'}\n")
    return "share.toml"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    with Registry.create(f"sqlite:///{folder}/people.db") as opened:
        opened.enrol([f"p{i}" for i in range(30)], 3.0)
    (folder / "new.csv").write_text("id,epsilon\nnew1,1\n")
    (folder / "tiers.csv").write_text("id,tier\nnew1,a\n")
    (folder / "visits.csv").write_text("id,age,label\n" + "".join(f"p{i},{20 + i},no\n" for i in range(30)))
    (folder / "people.toml").write_text(VISITS)
    return folder


@pytest.fixture
def people(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)


def is_numeric(hint):
    kinds = [hint]
    while kinds:
        one = kinds.pop()
        if one in (int, float):
            return True
        kinds += [kind for kind in typing.get_args(one) if isinstance(kind, type) or typing.get_args(kind)]
    return False


def test_every_numeric_option_of_the_registrys_commands_is_tried_here():
    assert registry_command.app is registry_command.app
    found = set()
    for info in registry_command.app.registered_commands:
        hints = typing.get_type_hints(info.callback, include_extras=True)
        found |= {(info.name, name) for name, hint in hints.items() if is_numeric(hint)}
    assert found == set(CALLS)


def is_refused_or_changes_one_thing(arguments):
    with Registry(URL) as opened:
        before = opened.head
    outcome = program.epsilons(*arguments)
    assert outcome.code in (0, 2, 3), outcome
    if outcome.code:
        outcome.is_refused(outcome.code)
    with Registry(URL) as opened:
        assert opened.verify().is_right
        assert outcome.code == 0 or opened.head == before
        assert np.isfinite(opened.account(["p1"]).epsilon).all()
    return outcome.code == 0


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12] or "empty")
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_number_of_a_command_out_of_range_is_one_line(people, call, text):
    assert is_refused_or_changes_one_thing(CALLS[call](text)) == ((*call, text) in LEGAL)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12] or "empty")
@pytest.mark.parametrize("call", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_number_elsewhere_out_of_range_is_one_line(people, call, text):
    is_refused_or_changes_one_thing(call(text))


ONE = Roster(np.array([1]), np.array([0]))
NUMBERS = [10**30, -(10**30), 2**63, -1, True, 1.5, float("nan"), float("inf"), "1", None]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda registry, n: registry.set_quota("x", n),
        lambda registry, n: registry.change(["p1"], n),
        lambda registry, n: registry.change(["p1"], 1.0, n),
        lambda registry, n: registry.enrol(["new"], n),
        lambda registry, n: registry.reserve_table("r", Table(np.ones((1, 1)), np.full((1, 1), 9.0), (n,)), ONE),
        lambda registry, n: registry.reserve_table("r", Table(np.array([[n]]), np.full((1, 1), 9.0), (1,)), ONE),
        lambda registry, n: registry.reserve_table("r", Table(np.ones((1, 1)), np.array([[n]]), (1,)), ONE),
        lambda registry, n: registry.release("r", 1.0, ids=["p1"], sensitivity=n, noise_multiplier=9.0),
        lambda registry, n: registry.release("r", 1.0, ids=["p1"], sensitivity=1.0, noise_multiplier=n),
    ],
)
def test_a_number_of_python_out_of_range_is_one_error_or_a_wrong_type(people, call, number):
    with Registry(URL) as opened:
        before = opened.head
        try:
            call(opened, number)
        except (EpsilonsError, TypeError, ValueError):
            assert opened.head == before
        assert opened.verify().is_right
        json.dumps(opened.summary().to_dict(), allow_nan=False)
