"""Exports: the head alone, coarse numbers on demand, and who vouches for them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import program
from epsilons.errors import RegistryRefusedError
from epsilons.registry import Registry, Roster, evidence
from registries import table

URL = "sqlite:///people.db"
GRID = [step * 10**power for power in range(1, 6) for step in (1, 2, 5)][1:]
BOUNDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
EPSILONS = [0.9, 1.0, 1.7, 2.0, 2.5, 4.0, 7.0]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def people():
    with Registry.create(URL) as registry:
        registry.enrol([f"zz{i}" for i in range(60)], 3.0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two key pairs: officer.pem and other.pem, and their public halves."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as ser
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder = tmp_path_factory.mktemp("keys")
    for name in ("officer", "other"):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
        public = key.public_key().public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}-public.pem").write_bytes(public)
    return folder


def registry(*arguments):
    return program.epsilons("registry", arguments[0], URL, *arguments[1:])


def on_grid(count):
    """The slow obvious grid: the largest of 20, 50, 100, … that is not above the count."""
    below = [one for one in GRID if one <= count]
    return f"{below[-1]:,} or more" if below else "fewer than 20"


def expected(budgets, runs):
    """What the counts must be, of id -> epsilon."""
    classes = Counter(next(bound for bound in BOUNDS if bound >= epsilon) for epsilon in budgets.values())
    return {
        "people": on_grid(len(budgets)),
        "runs": on_grid(runs),
        "epsilon_at_most": {f"{bound:g}": on_grid(classes[bound]) for bound in BOUNDS if classes[bound] >= 20},
    }


def change_one(registry, rng, budgets, runs):
    """One person's change, return, withdrawal, enrolment, or run; how many runs there are then."""
    one = str(rng.choice(list(budgets)))
    kind = rng.choice(["change", "withdraw", "enrol", "run"])
    if kind == "change":
        budgets[one] = float(rng.choice(EPSILONS))
        registry.change([one], budgets[one])
    elif kind == "withdraw":
        registry.withdraw([one])
    elif kind == "enrol":
        budgets[f"new{len(budgets)}"] = float(rng.choice(EPSILONS))
        registry.enrol([f"new{len(budgets) - 1}"], budgets[f"new{len(budgets) - 1}"])
    else:
        of_one = Roster(np.array([rng.integers(len(budgets))]), np.array([0]))
        with suppress(RegistryRefusedError):  # who withdrew
            registry.reserve_table(f"run {runs}", table([500.0]), of_one, project=f"only {runs}")
            return runs + 1
    return runs


def test_an_export_is_the_head_and_nothing_else(people):
    registry("export", "-o", "a.json").succeeded()
    values = json.loads(Path("a.json").read_text())
    assert set(values) == {"document", "schema", "registry", "time", "head"}
    with Registry(URL) as opened:
        assert (values["head"]["number"], values["head"]["hash"]) == opened.head
        assert (values["schema"], values["registry"]) == (2, opened.id)


@pytest.mark.parametrize("seed", range(3))
def test_no_coarse_number_shows_what_one_person_did(seed):
    """Exact counts stay away from the grid by more than the steps of the walk: no export may differ."""
    rng = np.random.default_rng(seed)
    budgets = {f"p{i}": 1.0 for i in range(30)} | {f"q{i}": 2.0 for i in range(70)} | {f"r{i}": 4.0 for i in range(35)}
    with Registry.create(URL) as opened:
        opened.enrol(list(budgets), list(budgets.values()))
        before, runs = evidence.export(opened, counts=True), 0
        for _ in range(9):
            runs = change_one(opened, rng, budgets, runs)
            after = evidence.export(opened, counts=True)
            different = {name for name in before if before[name] != after[name]}
            assert different <= {"head", "time"}
        assert before["counts"] == expected(budgets, runs)
        assert after["head"]["number"] > before["head"]["number"]


@pytest.mark.parametrize("seed", range(2))
def test_coarse_numbers_are_exact_ones_rounded_down_to_the_grid(seed):
    rng = np.random.default_rng(seed)
    budgets = {f"p{i}": float(rng.choice(EPSILONS[:4])) for i in range(98)}
    runs = 0
    with Registry.create(URL) as opened:
        assert opened.counts() == {"people": "fewer than 20", "runs": "fewer than 20", "epsilon_at_most": {}}
        opened.enrol(list(budgets), list(budgets.values()))
        seen = set()
        for _ in range(30):
            runs = change_one(opened, rng, budgets, runs)
            found = opened.counts()
            assert found == expected(budgets, runs)
            seen.add(json.dumps(found))
        assert len(seen) > 1, "the walk crosses the grid, where one person does show"


def test_the_statement_about_people_who_withdrew_is_coarse(people):
    with Registry(URL) as opened:
        opened.withdraw([f"zz{i}" for i in range(23)])
    for name, more in (("a.json", []), ("b.json", ["zz30"])):
        with Registry(URL) as opened:
            opened.withdraw(more or ["zz0"])
        registry("export", "-o", name, "--excluded", "2100-01-01").succeeded()
    first, second = (json.loads(Path(name).read_text())["excluded"] for name in ("a.json", "b.json"))
    assert first == second == {"withdrew_before": "2100-01-01", "people": "20 or more", "in_later_rosters": 0}


# -- who vouches -------------------------------------------------------------------------------------------------------


def first_line(outcome):
    return (outcome.out or outcome.err).splitlines()[0]


def test_without_a_signer_the_first_line_says_that_nobody_vouches(people, keys):
    registry("export", "-o", "plain.json").succeeded()
    registry("export", "-o", "signed.json", "--sign", keys / "other.pem").succeeded()
    for name, words in (("plain.json", "is not signed"), ("signed.json", "nothing here confirms")):
        found = registry("verify", "--since", name)
        found.succeeded("continues the export")
        assert first_line(found).startswith("Nobody vouches for this export: ")
        assert words in first_line(found)
        for flag in ("--json", "-q"):
            quiet = registry("verify", "--since", name, flag)
            assert quiet.code == 0
            assert quiet.err.startswith("Nobody vouches for this export: ")
        assert json.loads(registry("verify", "--since", name, "--json").out)["signer"] is False
    found = registry("verify", "--since", "signed.json", "--signer", keys / "other-public.pem")
    found.succeeded("continues the export")
    assert "Nobody" not in found.out + found.err
    registry("verify", "--since", "signed.json", "--signer", keys / "officer-public.pem").is_refused(3, "another key")


def test_a_forged_export_is_said_to_be_vouched_for_by_nobody(people, keys):
    """The registry is rolled back, and its owner signs an export of the old copy with a key of their own."""
    shutil.copy("people.db", "old.db")
    with Registry(URL) as opened:
        opened.withdraw(["zz3"])
    registry("export", "-o", "honest.json", "--sign", keys / "officer.pem").succeeded()
    shutil.copy("old.db", "people.db")
    registry("export", "-o", "forged.json", "--sign", keys / "other.pem").succeeded()
    officer = ["--signer", keys / "officer-public.pem"]
    registry("verify", "--since", "honest.json", *officer).is_refused(3, "older copy")
    registry("verify", "--since", "forged.json", *officer).is_refused(3, "another key")
    assert first_line(registry("verify", "--since", "forged.json")).startswith("Nobody vouches")


# -- other exports, and files that are none ----------------------------------------------------------------------------


def test_an_export_of_the_first_version_is_still_compared(people):
    with Registry(URL) as opened:
        use, (number, last) = opened.summary().to_dict(), opened.head
        identity = {"document": "epsilons registry", "registry": opened.id, "time": "2026-01-01T00:00:00+00:00"}
        old = identity | {"schema": 1, "head": {"number": number, "hash": last}}
        old |= {name: use[name] for name in ("people", "wishes", "projects", "runs")}
        opened.withdraw(["zz1"])
    Path("old.json").write_text(json.dumps(old))
    registry("verify", "--since", "old.json").succeeded("continues the export of 2026-01-01")
    Path("old.json").write_text(json.dumps(old | {"head": {"number": number, "hash": "0" * 64}}))
    registry("verify", "--since", "old.json").is_refused(3, "rewritten")


BAD_VALUES = [None, True, False, 1.5, 1.0, -1, 2**31, 10**30, "1", [], {}, float("nan"), float("inf"), "\ud800"]
BAD = {
    **{f"head {i}": {"head": value} for i, value in enumerate(BAD_VALUES)},
    **{f"number {i}": {"head": {"number": value, "hash": "0" * 64}} for i, value in enumerate([*BAD_VALUES, 0])},
    **{f"hash {i}": {"head": {"number": 1, "hash": value}} for i, value in enumerate(BAD_VALUES)},
    **{f"schema {i}": {"schema": value} for i, value in enumerate([*BAD_VALUES, 0, 3]) if value not in (True, 1.0)},
    **{f"registry {i}": {"registry": value} for i, value in enumerate(BAD_VALUES)},
    **{f"excluded {i}": {"excluded": value} for i, value in enumerate(BAD_VALUES[1:])},
    **{f"day {i}": {"excluded": {"withdrew_before": value}} for i, value in enumerate(BAD_VALUES)},
    **{f"signature {i}": {"signature": value} for i, value in enumerate(BAD_VALUES)},
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    with Registry.create(f"sqlite:///{folder}/people.db") as opened:
        opened.enrol(["zz0"], 3.0)
        return folder, evidence.export(opened)


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_an_export_with_a_bad_value_is_refused_in_one_line(template, change):
    folder, good = template
    Path("bad.json").write_text(json.dumps(good | change))
    found = program.epsilons("registry", "verify", f"sqlite:///{folder}/people.db", "--since", "bad.json")
    assert found.code in (2, 3)
    found.is_refused(found.code)


TEXTS = {
    "deep": '{"head": ' * 100_000 + "1" + "}" * 100_000,
    "deep beside": '{"document": "epsilons registry", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "long number": '{"head": {"number": ' + "9" * 100_000 + ', "hash": ""}}',
    "a list": "[1]",
    "empty": "",
    "no text": "\udcff",
    "a text": '"epsilons registry"',
    "twice": '{"head": {"number": 1, "number": -1}}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_file_that_is_no_export_is_refused_in_one_line(template, text):
    Path("bad.json").write_bytes(text.encode(errors="surrogateescape"))
    found = program.epsilons("registry", "verify", f"sqlite:///{template[0]}/people.db", "--since", "bad.json")
    found.is_refused(2, "no export")
