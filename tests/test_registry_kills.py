"""A worker is killed at each point from folder to settlement; --resume goes on, or --abandon gives everything back."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import program
from epsilons.errors import RegistryError
from epsilons.ledger import run_folder
from epsilons.ledger.ledger import Ledger
from epsilons.ledger.run_folder import RunFolder
from epsilons.registry import Registry, evidence
from registries import VISITS, begin, reserve, table
from test_registry_cli import IDS, URL

TRAIN = ["train", "people.toml", "--registry", URL, "--share", "0.5", "-q", "-o", "runs/one"]

#: where the worker is killed -> (object, its function, whether right before or right after)
NOT_BEGUN = {
    "before the note": (evidence, "note", "before"),
    "after the note": (Registry, "reserve", "before"),
    "after the reservation": (Registry, "reserve", "after"),
    "after plan.json": (run_folder, "write_json", "before"),
}
NO_LEDGER = {
    "after run.json": (RunFolder, "create", "after"),
    "after the key": (RunFolder, "write_key", "after"),
}
BEGUN = {
    "after the ledger": (Ledger, "__init__", "after"),
    "before it begins": (Registry, "begin", "before"),
    "after it began": (Registry, "begin", "after"),
    "before it is settled": (Registry, "settle", "before"),
    "after it is settled": (Registry, "settle", "after"),
}


@pytest.fixture(autouse=True)
def _people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visits = [f"{one},{20 + i % 50},{('no', 'yes')[i % 3 % 2]}" for i, one in enumerate(IDS)]
    Path("visits.csv").write_text("\n".join(["id,age,label", *visits]) + "\n")
    Path("people.toml").write_text(VISITS)
    with Registry.create(URL) as registry:
        registry.enrol(IDS, [1.0, 4.0] * 30)


def kill(target, name, when):
    """Train in a process that is killed there."""
    pid = os.fork()
    if pid == 0:
        function = getattr(target, name)

        def dies(*arguments, **options):
            if when == "after":
                function(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(target, name, dies)
        try:
            program.epsilons(*TRAIN)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the worker never got there"


def used():
    with Registry(URL) as registry:
        assert registry.verify().is_right
        return registry.account(IDS).used_share


def states():
    with Registry(URL) as registry:
        return sorted((run.state, run.charged) for run in registry.summary().runs)


#: These are in every run of the tests.
SOME = ("after the reservation", "after the key", "before it begins", "before it is settled")
ALL = [
    pytest.param(point, id=name, marks=[] if name in SOME else [pytest.mark.slow])
    for name, point in (NOT_BEGUN | NO_LEDGER | BEGUN).items()
]


@pytest.mark.parametrize("point", ALL)
def test_a_run_that_was_killed_goes_on_and_is_charged_once(point):
    kill(*point)
    outcome = program.epsilons(*TRAIN, "--resume")
    assert outcome.code == 0, outcome
    assert used() == pytest.approx([0.5] * 60, rel=1e-3)
    assert [run for run in states() if run != ("cancelled", 0)] == [("settled", 20)]
    assert not Path("runs/one/reservation.json").exists()
    assert not Path("runs/one/secret").exists()


@pytest.mark.slow
@pytest.mark.parametrize("point", (FEW := NOT_BEGUN | NO_LEDGER).values(), ids=FEW)
def test_a_run_that_was_killed_before_it_began_is_given_up_without_a_charge(point):
    kill(*point)
    outcome = program.epsilons("registry", "settle", URL, "runs/one", "--abandon")
    assert outcome.code == 0 or "holds no run" in outcome.err, outcome
    assert (used() == 0).all()
    assert [run for run in states() if run != ("cancelled", 0)] == []


def test_a_run_that_never_began_says_what_to_do(monkeypatch):
    kill(*NOT_BEGUN["after the reservation"])
    assert states() == [("reserved", None)]
    program.epsilons(*TRAIN).is_refused(2, "never began", "--resume", "--abandon")
    program.epsilons("registry", "settle", URL, "runs/one").is_refused(2, "never began", "--resume", "--abandon")
    program.epsilons("registry", "show", URL).succeeded("--cancel NAME")
    program.epsilons("train", "people.toml", "-o", "runs/one", "--resume").is_refused(2, "--registry URL")
    assert states() == [("reserved", None)]


def test_a_reservation_of_a_copy_that_began_is_not_given_back(tmp_path):
    kill(*NOT_BEGUN["after the reservation"])
    name = re.search(r'"run": "(.*?)"', Path("runs/one/reservation.json").read_text()).group(1)
    with Registry(URL) as registry:
        begin(registry, name)
    program.epsilons(*TRAIN, "--resume").is_refused(3, "has begun")
    assert states() == [("running", None)]


def test_an_error_of_the_registry_while_it_reserves_leaves_the_note_that_names_it(monkeypatch):
    """The answer of the database is lost: the reservation was made, and cannot be given back now."""
    reserve_ = Registry.reserve

    def lost(*arguments, **options):
        reserve_(*arguments, **options)
        raise RegistryError("The registry's database failed.")

    def away(*arguments, **options):
        raise RegistryError("The registry's database cannot be reached.")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "reserve", lost)
        patch.setattr(Registry, "cancel", away)
        program.epsilons(*TRAIN).is_refused(2, "database failed")
    assert states() == [("reserved", None)]
    program.epsilons(*TRAIN, "--resume").succeeded()
    assert used() == pytest.approx([0.5] * 60, rel=1e-3)


def test_a_refused_reservation_leaves_no_folder():
    with Registry(URL) as registry:
        reserve(registry, "all", IDS, [0] * 60, table([3.0], steps=20), project="other")
        registry.set_quota("x", 0.01)
    program.epsilons(*TRAIN, "--project", "x").is_refused(3, "quota")
    assert not Path("runs/one").exists()
