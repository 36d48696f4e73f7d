"""The verifier: it agrees with the former one on random histories, and finds what that one did not see."""

from __future__ import annotations

import collections
import shutil
from contextlib import closing
from datetime import UTC, datetime

import numpy as np
import pytest

from epsilons.registry import Registry
from epsilons.registry.databases import database
from epsilons.registry.verifier import verify
from histories import History, small_pages, tamper
from old_verifying import verify as old_verify

#: Reasons for which the former verifier had no check.
NOT_SEEN_BEFORE = (
    "the run is ",
    "it migrates from another schema",
    "its key ",
    "steps are given back without a ledger",
    "it gives back more than the limit",
    "it has begun with another ledger",
    "steps of a run that never began",
    "an event that it names is legal",
    "there is no such run",
    "was reserved before",
    "its project uses more than its quota",
    "it changes a home order",
    "(unknown)",
    "its fields",
    "a field has",
    "its time",
    "it is written in another form",
    "it has begun under this key before",
    "a registry is created once",
    "it is not the next new budget",
    "no account can keep",
    "a registry that was not migrated",
    "its people are not the next ones",
    "it charges more than was reserved",
    "its plan is written in another form",
    "its rows are out of range",
    "the run that is stored",
    "the table run",
    "the table part",
    "the table page",
    "the table quota",
    "its share is",
    "it is no part",
)


def opinion(work):
    """Whether a registry is right; False also for whatever the former verifier raised on what it could not read."""
    try:
        return work().is_right
    except Exception:
        return False


def compare(path, counts):
    """Both verifiers on one database."""
    with closing(database(f"sqlite:///{path}")) as stored:
        verdict = stored.snapshot(lambda: verify(stored.stream, datetime.now(UTC)))
        before = opinion(lambda: stored.snapshot(lambda: old_verify(stored)))
    reason = str(verdict.first)
    assert verdict.is_right <= before, f"found by the former verifier alone: {verdict}"
    assert before <= verdict.is_right or any(hole in reason for hole in NOT_SEEN_BEFORE), verdict
    counts["right" if verdict.is_right else "both" if not before else "new alone"] += 1
    return verdict


def check_histories(seeds, folder, people=20):
    """Make these histories, and change each of them three times in one way."""
    counts = collections.Counter()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        path, copy, pepper = folder / f"{seed}.db", folder / "copy.db", folder / "pepper"
        with Registry.create(f"sqlite:///{path}", pepper) as registry:
            registry._database.run("pragma synchronous=off")
            history = History(registry, rng, people, is_old=seed % 4 == 3)
            history.make(int(rng.integers(3, 13)))
            if seed % 4 == 3:
                history.age(f"sqlite:///{path}", pepper)
        assert not path.with_name(f"{path.name}-wal").exists(), "all of it is in one file"
        verdict = compare(path, counts)
        assert verdict.is_right, f"seed {seed}: {verdict.first}"
        for _ in range(3):
            shutil.copy(path, copy)
            done = tamper(copy, rng)
            try:
                compare(copy, counts)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {done}: {error}") from None
        for file in folder.glob(f"{seed}.db*"):
            file.unlink()
    return counts


def test_two_verifiers_agree_on_100_random_histories(tmp_path, monkeypatch):
    small_pages(monkeypatch)
    counts = check_histories(range(100), tmp_path)
    assert counts["both"] > 100
    assert counts["new alone"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_two_verifiers_agree_on_10_000_random_histories(tmp_path, monkeypatch, block):
    small_pages(monkeypatch)
    print(check_histories(range(500 * block, 500 * block + 500), tmp_path))


def test_two_verifiers_agree_on_histories_with_whole_pages(tmp_path):
    check_histories(range(10_000, 10_003), tmp_path)
