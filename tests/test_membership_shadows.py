"""Shadow models: coins, one plan, blocks, and an attack that continues to the same bits after any interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epsilons
from epsilons.auditing.membership import folder, shadows
from epsilons.auditing.membership.shadows import (
    BLOCK_SIZES,
    METHODS,
    Block,
    any_counts,
    blocks_of,
    one_thread,
    placebo_plan,
    shadow_plan,
    train_block,
    train_shadows,
)
from epsilons.errors import DataError, EpsilonsWarning, InputError, ModelError
from epsilons.planning.plan_numbers import ROSTER, SHARES
from small_attacks import FEATURES, RECORDS, a_plan, a_setting, attack, budgets, dropping, linear, some_data
from small_runs import of_phases

# -- coins ---------------------------------------------------------------------------------------------------------


def test_coins_are_fair_and_independent_between_records_and_shadows():
    """Mutants: halves of fixed size; one coin for all records; the same coins for each shadow."""
    setting = a_setting()
    coins = np.array([setting.member(k) for k in range(500)], dtype=float)
    sizes = coins.sum(axis=1)
    assert abs(coins.mean() - 0.5) < 5 * 0.5 / coins.size**0.5
    assert 0.75 < sizes.var() / (RECORDS / 4) < 1.3  # binomial: a fixed size has no variance
    correlations = np.corrcoef(coins.T)[np.triu_indices(RECORDS, 1)]
    assert abs(correlations.mean()) < 5 / (500 * len(correlations)) ** 0.5
    assert len({row.tobytes() for row in coins}) == 500


def test_coins_and_keys_depend_on_the_seed_and_the_shadow_alone():
    one = a_setting()
    other = a_setting(plan=shadow_plan(a_plan("scale"), RECORDS), method="alone", model=dropping())
    for k in (0, 65):
        assert np.array_equal(one.member(k), other.member(k))
        assert one.randomness(k).key == other.randomness(k).key
    assert not np.array_equal(one.member(0), a_setting(seed=8).member(0))
    assert one.randomness(0).key not in (one.randomness(1).key, a_setting(seed=8).randomness(0).key)


# -- one plan for all ----------------------------------------------------------------------------------------------


def test_the_shadow_plan_halves_the_divisor_and_changes_nothing_else():
    made = a_plan()
    halved = shadow_plan(made, RECORDS)
    [old], [new] = made.phases, halved.phases
    assert new.expected_batch == old.expected_batch / 2
    assert new.to_dict() == {**old.to_dict(), "expected_batch": new.expected_batch}
    assert halved.groups == made.groups
    assert halved.adjacency == made.adjacency == ROSTER
    assert (replace(halved).epsilon_spent() == made.epsilon_spent()).all()  # computed again, not copied


@pytest.mark.parametrize(("declared", "same"), [(RECORDS // 2, True), (RECORDS, False)])
def test_a_plan_declared_for_half_of_the_records_is_used_as_it_is(declared, same):
    made = declared_plan(declared)
    [old], [new] = made.phases, shadow_plan(made, RECORDS).phases
    assert new.expected_batch == (old.expected_batch if same else old.expected_batch / 2)


@cache
def declared_plan(records: int) -> epsilons.Plan:
    recipe = epsilons.Recipe(steps=4, batch_size=10, clip_norm=0.5)
    shares = {2.0: 0.5, 8.0: 0.5}
    return epsilons.plan(budgets(), recipe, "sample", "rdp", public_shares=shares, public_records=records)


def test_the_placebo_gives_every_group_the_strictest_budget():
    made = a_plan()
    placebo = placebo_plan(made)
    assert placebo.groups == made.groups
    assert (placebo.steps, placebo.batch_size) == (made.steps, made.batch_size)
    for column in (placebo.sample_rate, placebo.clip_norm, placebo.noise_multiplier):
        assert len(set(column.tolist())) == 1
    assert placebo.epsilon_spent().max() <= made.epsilons[0]
    assert placebo.clip_norm[0] == pytest.approx(made.clip_norm @ made.counts / made.records)


# -- training --------------------------------------------------------------------------------------------------------


def test_a_shadow_alone_is_make_private_on_its_members_under_the_same_table():
    """Mutants: a plan for the members' counts, another divisor, all records as members."""
    setting = a_setting(model=dropping(), method="alone")
    arrays = train_block(setting, Block(3, 4))
    member = setting.member(3)
    model = dropping()
    plan, data = any_counts(setting.plan), tuple(torch.from_numpy(part[member]) for part in some_data())
    with one_thread():
        private = epsilons.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            data,
            plan,
            budgets=epsilons.Budgets(budgets().epsilons[budgets().group[member]], delta=1e-3),
            key=setting.randomness(3).key,
        )
        with private:
            for x, y in private.batches:
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                private.step()
        model.eval()
        with torch.no_grad():
            log_p = model(torch.from_numpy(setting.inputs)).log_softmax(1).numpy()
    assert plan.phases == setting.plan.phases
    assert plan.adjacency == SHARES
    assert np.abs(arrays["log_p"][0] - log_p[np.arange(RECORDS), setting.targets]).max() < 1e-6
    assert np.array_equal(arrays["member"], member[None])


def test_stacked_and_alone_train_the_same_shadow_where_everyone_is_drawn():
    """With a rate of 1 the draws do not depend on which records the data set holds."""
    made = of_phases(
        {"steps": 5, "sample_rate": [1.0, 1.0], "clip_norm": [0.3, 0.6], "expected_batch": 60.0, "noise_std": 2.0},
        budgets=epsilons.Budgets(np.resize([500.0, 1000.0], RECORDS)),
    )
    own = epsilons.Budgets(np.resize([500.0, 1000.0], RECORDS))
    stacked = train_block(a_setting(plan=made, budgets=own), Block(0, 4))
    for k in range(4):
        alone = train_block(a_setting(plan=made, budgets=own, method="alone"), Block(k, k + 1))
        for name in ("member", "margin", "raw", "log_p", "population", "accuracy", "member_accuracy"):
            assert stacked[name][k] == pytest.approx(alone[name][0], abs=1e-4), name


@pytest.mark.parametrize("method", ["stacked", "alone"])
def test_a_repeated_block_has_the_same_bits_whatever_the_threads(method, monkeypatch):
    setting = a_setting(method=method)
    block = Block(0, BLOCK_SIZES[method])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads = []
        watched = {
            name: lambda *a, f=f: (threads.append(torch.get_num_threads()), f(*a))[1] for name, f in METHODS.items()
        }
        monkeypatch.setattr("epsilons.auditing.membership.shadows.METHODS", watched)
        first = train_block(setting, block)
        assert threads == [1]
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        second = train_block(setting, block)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_no_model_is_changed_and_signals_are_read_in_slices(monkeypatch):
    setting = a_setting()
    before = [p.detach().clone() for p in setting.model.parameters()]
    whole = train_block(setting, Block(0, 3))
    monkeypatch.setattr("epsilons.auditing.membership.shadows.SLICE", 7)
    parts = train_block(setting, Block(0, 3))
    assert all(torch.equal(p, q) for p, q in zip(setting.model.parameters(), before, strict=True))
    for name in whole:
        assert parts[name] == pytest.approx(whole[name], abs=1e-5), name


@pytest.mark.slow
def test_several_processes_give_the_same_bits_as_one(monkeypatch):
    monkeypatch.setattr(shadows, "WORTH_PROCESSES", 0.0)
    for method, count in (("alone", 5), ("stacked", 150)):
        setting = a_setting(method=method, model=dropping() if method == "alone" else linear())
        one, two = (train_shadows(setting, count, jobs=jobs) for jobs in (1, 2))
        for name in ("member", "margin", "raw", "log_p", "population"):
            assert np.array_equal(getattr(one.signals, name), getattr(two.signals, name))


PARENT = """
import sys; sys.path[:0] = {paths!r}
import test_membership_shadows as t
from epsilons.auditing.membership.shadows import Block
for block, arrays in t.shadows._in_processes(t.a_setting(method="alone"), [Block(k, k + 1) for k in range(500)], 2):
    print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts the processes of a session in /proc")
def test_processes_end_with_a_parent_that_was_killed():
    """joblib's own leave them waiting, with the records in memory."""
    code = PARENT.format(paths=[str(Path(__file__).parent)])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert of_session(parent.pid) >= 3
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 60
        while of_session(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert of_session(parent.pid) == 0


def of_session(leader: int) -> int:
    """The number of living processes in this session."""
    fields = [stat_of(file) for file in Path("/proc").glob("[0-9]*/stat")]
    return sum(len(one) > 3 and one[3] == str(leader) and one[0] != "Z" for one in fields)


def stat_of(file: Path) -> list[str]:
    """State, parent, group, session of a process; nothing if it has ended."""
    try:
        return file.read_text().rpartition(")")[2].split()
    except OSError:
        return []


# -- what is said ----------------------------------------------------------------------------------------------------


def test_auto_stacks_what_can_be_stacked_and_says_why_not():
    assert attack().setting["method"] == "stacked"
    setting = attack(model=dropping()).setting
    assert setting["method"] == "alone"
    assert "Dropout" in setting["why"]


def test_the_result_says_that_nothing_covers_it():
    said = " ".join(attack().sentences)
    assert "no guarantee covers them" in said
    assert "tuning on private data" in said


def test_without_a_population_rmia_is_left_out_or_refused():
    with pytest.warns(EpsilonsWarning, match="data.test_share"):
        assert attack(population=None).names == ("lira-shrunk",)
    with pytest.raises(InputError, match=r"data\.test_share"):
        attack(population=None, attacks=["rmia"])


def test_a_population_of_training_records_is_warned_of(recwarn):
    attack()
    assert not recwarn.list
    inputs, targets = some_data()
    with pytest.warns(EpsilonsWarning, match="equal training records"):
        attack(population=(inputs[:30], targets[:30]))
    attack(population=(inputs[:30], (targets[:30] + 1) % 2))  # other records with the same inputs


def test_an_attack_of_one_s_own_is_used_by_its_name():
    result = attack(attacks={"margin": lambda signals: signals.margin.copy()})
    assert result.names == ("margin",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "mse"}, "mse"),
        ({"shadows": 7}, "at least 8"),
        ({"attacks": ["lira-shrunk", "magic"]}, "magic"),
        ({"attacks": []}, "none"),
        ({"method": "fast"}, "fast"),
        ({"method": "stacked", "model": dropping()}, "Dropout"),
        ({"dataset": [1, 2]}, "two tensors or arrays"),
        ({"dataset": (some_data()[0], some_data()[0])}, "one class per record"),
        ({"dataset": tuple(part[:-1] for part in some_data())}, "80 budgets"),
        ({"model": nn.Linear(FEATURES, 2)}, "3 classes"),
        ({"device": "abacus"}, "abacus"),
        ({"resume": True}, "folder"),
    ],
)
def test_what_cannot_be_attacked_is_refused_before_any_training(changes, words, monkeypatch):
    monkeypatch.setattr(folder, "train_shadows", lambda *_: pytest.fail("trained"))
    with pytest.raises((InputError, DataError, ModelError), match=words):
        attack(**changes)


def test_blocks_cover_all_shadows():
    assert blocks_of(5, 2) == [Block(0, 2), Block(2, 4), Block(4, 5)]
