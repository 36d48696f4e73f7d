"""The folder of an attack: it continues to the same bits after any interruption, and keeps scores only on request."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import epsilons
from epsilons.auditing import membership
from epsilons.auditing.membership import shadows
from epsilons.auditing.membership.folder import AttackFolder
from epsilons.auditing.membership.shadows import BLOCK_SIZES, Block, ShadowSetting
from epsilons.errors import RunError
from small_attacks import CLASSES, FEATURES, RECORDS, a_plan, a_setting, attack, budgets, some_data


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
import test_membership_folders as t
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
    for folder in folders:
        assert same_result(tmp_path / "whole", folder)
        assert not (folder / "secret").exists()


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
