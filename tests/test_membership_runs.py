"""Shadow models and the folder of an attack: coins, one plan, blocks, the same bits after any interruption."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epsilons
from epsilons.auditing import membership
from epsilons.auditing.membership import folder, shadows
from epsilons.auditing.membership.folder import AttackFolder
from epsilons.auditing.membership.shadows import (
    BLOCK_SIZES,
    METHODS,
    Block,
    ShadowSetting,
    any_counts,
    blocks_of,
    one_thread,
    placebo_plan,
    shadow_plan,
    train_block,
    train_shadows,
)
from epsilons.errors import DataError, EpsilonsWarning, InputError, ModelError, RunError
from epsilons.planning.plan_numbers import ROSTER, SHARES
from small_attacks import CLASSES, FEATURES, RECORDS, a_plan, a_setting, attack, budgets, dropping, linear, some_data
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
            seed=epsilons.Randomness.with_key(setting.randomness(3).key),
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
import test_membership_runs as t
from epsilons.auditing.membership.shadows import Block
for block, arrays in t.shadows._elsewhere(t.a_setting(method="alone"), [Block(k, k + 1) for k in range(500)], 2, False):
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


# ==== The folder of an attack: it continues to the same bits after any interruption, and keeps scores only on request.


@pytest.fixture(autouse=True)
def _no_picture(request, monkeypatch):
    """Drawing takes longer than the attack; slow tests draw."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(membership.folder, "draw", lambda _, path: membership.folder.write_text(path, "<svg/>"))


class Killed(BaseException):
    """Stands for the end of a process."""


def killed_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> list[Block]:
    """Interrupt after so many blocks; the list collects the blocks that are trained."""
    trained: list[Block] = []
    original = shadows.train_block

    def train(setting: ShadowSetting, block: Block, progress: Any = None) -> Any:
        if len(trained) == saves:
            raise Killed
        trained.append(block)
        return original(setting, block, progress)

    monkeypatch.setattr(shadows, "train_block", train)
    return trained


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setitem(BLOCK_SIZES, "stacked", 3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("placebo", [False, True])
def test_an_attack_interrupted_after_any_block_continues_to_the_same_bits(tmp_path, monkeypatch, placebo):
    attack(tmp_path / "whole", placebo=placebo)
    blocks = 3 * (1 + placebo)
    for saves in range(blocks):
        path = tmp_path / f"after-{saves}"
        with monkeypatch.context() as patch:
            killed_after(patch, saves)
            with pytest.raises(Killed):
                attack(path, placebo=placebo)
        with monkeypatch.context() as patch:
            trained = killed_after(patch, 99)
            attack(path, placebo=placebo, resume=True)
        assert len(trained) == blocks - saves
        assert same_result(tmp_path / "whole", path)


def same_result(one: Path, two: Path) -> bool:
    return (one / "membership.json").read_bytes() == (two / "membership.json").read_bytes()


STAGES = ["draw", "attack_page", "remove_secrets"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("stage", STAGES)
def test_an_attack_interrupted_while_it_finishes_continues_to_the_same_bits(tmp_path, monkeypatch, stage):
    attack(tmp_path / "whole")

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AttackFolder if stage == "remove_secrets" else membership.folder, stage, kill)
        with pytest.raises(Killed):
            attack(tmp_path / "other")
    trained = killed_after(monkeypatch, 0)
    attack(tmp_path / "other", resume=True)
    assert trained == []
    assert same_result(tmp_path / "whole", tmp_path / "other")
    assert not (tmp_path / "other" / "secret").exists()


def test_a_finished_attack_is_read_and_not_repeated(tmp_path, monkeypatch):
    first = attack(tmp_path / "a", placebo=True)
    killed_after(monkeypatch, 0)
    again = attack(tmp_path / "a", placebo=True, resume=True)
    assert again.to_dict() == first.to_dict()
    assert str(again) == str(first)


@pytest.mark.usefixtures("small_blocks")
def test_kept_blocks_continue_with_more_shadows_as_if_asked_at_once(tmp_path, monkeypatch):
    attack(tmp_path / "whole", shadows=10)
    attack(tmp_path / "grown", keep_scores=True)  # 8 shadows: blocks of 3, 3, 2
    trained = killed_after(monkeypatch, 99)
    attack(tmp_path / "grown", shadows=10, resume=True)
    assert trained == [Block(6, 9), Block(9, 10)]
    assert same_result(tmp_path / "whole", tmp_path / "grown")


def test_more_shadows_without_kept_blocks_are_refused(tmp_path):
    attack(tmp_path / "a")
    with pytest.raises(RunError, match="keep_scores"):
        attack(tmp_path / "a", shadows=9, resume=True)


def test_a_damaged_block_is_trained_again(tmp_path, monkeypatch):
    attack(tmp_path / "whole")
    attack(tmp_path / "a", keep_scores=True)
    [file] = (tmp_path / "a" / "secret" / "blocks").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    trained = killed_after(monkeypatch, 99)
    attack(tmp_path / "a", keep_scores=True, attacks=["loss"], resume=True)
    assert trained == [Block(0, 8)]


def test_signals_and_scores_of_records_are_removed_unless_they_are_kept(tmp_path):
    attack(tmp_path / "a")
    names = {"plan.json", "attack.json", "membership.json", "roc.svg", "attack.html"}
    assert {file.name for file in (tmp_path / "a").rglob("*")} == names
    attack(tmp_path / "b", keep_scores=True)
    with np.load(tmp_path / "b" / "secret" / "scores" / "shadows.npz") as scores:
        assert {name: scores[name].shape for name in scores} == dict.fromkeys(
            ["member", "lira-shrunk", "rmia"], (8, 80)
        )
    for file in (tmp_path / "b").rglob("*"):
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600), file
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o700


def test_what_a_killed_process_left_is_removed(tmp_path):
    attack(tmp_path / "a")
    (tmp_path / "a" / ".secret.1" / "blocks").mkdir(parents=True)
    (tmp_path / "a" / ".secret.1" / "blocks" / "x.npz").write_bytes(b"scores")
    (tmp_path / "a" / ".membership.json.0123abcd").write_bytes(b"half")
    attack(tmp_path / "a", resume=True)
    assert not [file for file in (tmp_path / "a").iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"lr": 0.25}, "optimizer"),
        ({"plan": a_plan("scale")}, "plan"),
        ({"dataset": some_data(seed=9)}, "data"),
        ({"population": some_data(31, seed=5)}, "population"),
        ({"model": nn.Linear(FEATURES, CLASSES)}, "model"),
        ({"method": "alone"}, "method, block size"),
        ({"budgets": epsilons.Budgets(budgets().epsilons[1 - budgets().group], delta=1e-3)}, "budgets"),
    ],
)
def test_another_attack_is_not_continued_and_the_difference_is_named(tmp_path_factory, changes, named):
    path = finished(tmp_path_factory)
    with pytest.raises(RunError, match=f"other settings: {named}\\."):
        attack(path, **changes, resume=True)


FINISHED: list[Path] = []


def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished attack; tests only read it."""
    if not FINISHED:
        path = tmp_path_factory.mktemp("attacks") / "a"
        attack(path)
        FINISHED.append(path)
    return FINISHED[0]


def test_an_occupied_folder_is_refused(tmp_path, tmp_path_factory):
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RunError, match="does not exist yet"):
            attack(tmp_path, resume=resume)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(RunError, match="holds an attack"):
        attack(finished(tmp_path_factory))


def test_two_processes_do_not_use_one_folder(tmp_path):
    folder = AttackFolder(tmp_path / "a", a_plan(), {}, {})
    try:
        with pytest.raises(RunError, match="Another process"):
            attack(tmp_path / "a", resume=True)
    finally:
        folder.close()


def test_an_attack_inside_a_run_is_refused(tmp_path):
    (tmp_path / "ledger.jsonl").write_text("{}")
    with pytest.raises(RunError, match="outside of any run"):
        attack(tmp_path / "deep" / "attack")
    assert not (tmp_path / "deep").exists()


def test_no_score_of_a_record_is_in_any_text(tmp_path, capsys, caplog):
    """Mutants: a repr with arrays, scores in attack.json or on the page."""
    attack(tmp_path / "a", keep_scores=True, progress=True)
    with np.load(tmp_path / "a" / "secret" / "scores" / "shadows.npz") as scores:
        texts = {f"{value:.4f}"[-5:] for value in scores["lira-shrunk"].ravel()[:200]}
    assert len(texts) > 150
    captured = capsys.readouterr()
    said = [captured.out, captured.err, caplog.text, repr(a_setting()), (tmp_path / "a" / "attack.json").read_text()]
    assert not any(len(text) > 4_000 for text in said)
    values = json.loads((tmp_path / "a" / "membership.json").read_text())
    assert longest(values) < RECORDS


def longest(value: Any) -> int:
    """The length of the longest list of numbers in JSON values."""
    if isinstance(value, dict):
        return max(map(longest, value.values()), default=0)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return max([len(value), *map(longest, value)])
    return 0


# -- killed for real -----------------------------------------------------------------------------------------------

KILLED = """
import sys; sys.path[:0] = {paths!r}
import test_membership_runs as t
from epsilons.auditing.membership.shadows import BLOCK_SIZES
BLOCK_SIZES["stacked"] = 4
print("ready", flush=True)
t.attack(t.Path({folder!r}), shadows=48, resume=True, plan=t.a_plan(steps=60), placebo=True)
"""


@pytest.mark.slow
def test_twenty_sigkills_and_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCK_SIZES, "stacked", 4)
    attack(tmp_path / "whole", shadows=48, plan=a_plan(steps=60), placebo=True)
    rng, kills, folders = np.random.default_rng(0), 0, [tmp_path / "killed-0"]
    while kills < 20:
        if is_killed(folders[-1], rng.uniform(0, 0.3)):
            kills += 1
        else:  # it finished in spite of the kills before
            folders.append(tmp_path / f"killed-{len(folders)}")
    subprocess.run(killed_command(folders[-1]), check=True, stdout=subprocess.DEVNULL)
    for one in folders:
        assert same_result(tmp_path / "whole", one)
        assert not (one / "secret").exists()


def killed_command(folder: Path) -> list[str]:
    return [sys.executable, "-c", KILLED.format(paths=[str(Path(__file__).parent)], folder=str(folder))]


def is_killed(folder: Path, seconds: float) -> bool:
    """Attack in another process, and kill it after so many seconds; False if it had finished."""
    with subprocess.Popen(killed_command(folder), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its imports are done
        time.sleep(seconds)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            return process.wait() == -signal.SIGKILL
        return False


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_other_files_keeps_its_mode(tmp_path, resume):
    (tmp_path / "other").mkdir(mode=0o755)
    (tmp_path / "other").chmod(0o755)
    (tmp_path / "other/file").write_text("mine")
    with pytest.raises(RunError):
        attack(shadows=8, folder=tmp_path / "other", resume=resume)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o755
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["file"]


def test_groups_of_one_epsilon_are_told_apart_by_delta():
    deltas = np.where(np.arange(RECORDS) % 2, 1e-6, 1e-5)
    chosen = epsilons.Budgets(np.full(RECORDS, 4.0), deltas)
    planned = epsilons.plan(chosen, epsilons.Recipe(steps=4, batch_size=20, clip_norm=1.0), strategy="sample")
    result = attack(plan=planned, budgets=chosen, shadows=8, attacks=["loss"], placebo=True)
    assert sorted(row.label for row in result.groups) == ["4 (δ = 1e-05)", "4 (δ = 1e-06)"]
