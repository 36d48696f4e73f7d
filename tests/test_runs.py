"""A run's folder holds one run, and only its owner can read it, above all the key."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat

import numpy as np
import pytest

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.errors import RunError
from epsilons.ledger.run_folder import KEY_BYTES, RunFolder, read_metrics
from epsilons.training.fitting.fit_loop import Run

KEY = bytes(range(1, KEY_BYTES + 1))


@pytest.fixture(scope="module")
def made() -> Plan:
    budgets = Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=1000)
    return plan(budgets, Recipe(steps=20, batch_size=50, clip_norm=1.0), "scale", "rdp")


@pytest.fixture
def folder(tmp_path, made) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "first", made, {"engine": "loop", "seed": None})


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_new_folder_holds_the_plan_and_the_settings(folder, made):
    assert Plan.load(folder.plan) == made
    settings = json.loads(folder.settings.read_text())
    assert settings["engine"] == "loop"
    assert settings["seed"] is None
    assert set(settings["versions"]) == {"epsilons", "python", "torch", "numpy", "scipy"}
    assert sorted(os.listdir(folder.path)) == ["plan.json", "run.json"]


def test_an_empty_folder_is_used(tmp_path, made):
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", made, {}).plan.exists()


@pytest.mark.parametrize("name", ["ledger.jsonl", "holiday.jpg", ".hidden"])
def test_an_occupied_folder_is_refused_and_left_alone(tmp_path, made, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(RunError, match="not empty"):
        RunFolder.create(tmp_path, made, {})
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_second_run_is_not_started_in_the_folder_of_the_first(folder, made):
    with pytest.raises(RunError, match="not empty"):
        RunFolder.create(folder.path, made, {})


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path, made):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="cannot be used"):
            RunFolder.create(path, made, {})


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_only_its_owner_can_read_the_key(folder):
    before = os.umask(0)  # also under the widest umask
    try:
        folder.write_key(KEY)
    finally:
        os.umask(before)
    assert folder.key.read_bytes() == KEY
    assert mode(folder.key) == 0o600
    assert mode(folder.key.parent) == 0o700


def test_a_new_key_replaces_the_old_one_and_stays_secret(folder):
    folder.write_key(KEY)
    folder.write_key(bytes(reversed(KEY)))
    assert folder.read_key() == bytes(reversed(KEY))
    assert mode(folder.key) == 0o600
    assert [file.name for file in folder.key.parent.iterdir()] == ["key"]
    folder.key.write_bytes(KEY[:5])
    assert folder.read_key() is None
    folder.key.unlink()
    assert folder.read_key() is None


def test_the_key_is_durable_before_it_is_used(folder, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), real(handle)))
    folder.write_key(KEY)
    assert os.stat(folder.key).st_ino in synced


def test_the_key_is_overwritten_and_then_removed(folder, monkeypatch):
    folder.write_key(KEY)
    os.link(folder.key, folder.path / "witness")  # another name for the same bytes on disk
    folder.destroy_key()
    assert not folder.key.exists()
    assert not folder.key.parent.exists()
    assert (folder.path / "witness").read_bytes() == bytes(KEY_BYTES)
    folder.destroy_key()  # nothing left to destroy is not an error


FAILING = [(os, "stat"), (io, "open"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize(("module", "name"), FAILING, ids=[name for _, name in FAILING])
def test_a_key_that_cannot_be_destroyed_is_one_message_and_is_tried_again(folder, monkeypatch, module, name, number):
    folder.write_key(KEY)
    real = getattr(module, name)

    def failing(path, *arguments, **options):
        if isinstance(path, int) or str(folder.key.parent) in str(path):
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, failing)
        if name == "rmdir":
            folder.destroy_key()  # an empty folder tells nothing
        else:
            with pytest.raises(RunError, match=f"cannot be destroyed.*: {os.strerror(number)}"):
                folder.destroy_key()
    assert folder.key.exists() == (name != "rmdir")
    folder.destroy_key()
    assert not folder.key.exists()


def test_no_other_file_holds_the_key(folder, made):
    folder.write_key(KEY)
    folder.append_metrics({"step": 1, "loss": 0.5})
    others = [path for path in folder.path.rglob("*") if path.is_file() and path != folder.key]
    assert others
    for path in others:
        content = path.read_bytes()
        assert KEY not in content
        assert KEY.hex().encode() not in content


def test_an_incomplete_line_of_metrics_is_written_again(folder):
    folder.append_metrics({"step": 1, "loss": 0.5})
    folder.append_metrics({"step": 2, "loss": 0.25})
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-9])
    assert [row["step"] for row in read_metrics(folder)] == [1]
    folder.append_metrics({"step": 2, "loss": 0.25})
    assert [row["step"] for row in read_metrics(folder)] == [1, 2]
    folder.metrics.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"Line 1 of .* is damaged"):
        read_metrics(folder)


@pytest.mark.parametrize("left", [[".plan.json.0a1b2c3d"], ["plan.json", ".run.json.0a1b2c3d"], ["secret/key.new"]])
def test_a_folder_of_a_run_that_was_cut_off_before_it_began_can_be_used(left, tmp_path, made):
    for name in left:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{")
    assert not RunFolder(tmp_path / "run").has_begun
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert RunFolder(tmp_path / "run").has_begun
    (tmp_path / "run" / "notes.txt").unlink()
    if not (tmp_path / "run" / "secret").exists():
        RunFolder.create(tmp_path / "run", made, {})


def test_settings_that_json_cannot_hold_leave_no_folder(tmp_path, made):
    with pytest.raises(RunError, match="cannot hold"):
        RunFolder.create(tmp_path / "run", made, {"metadata": {"rate": float("nan")}})
    assert not (tmp_path / "run").exists()


def test_metrics_come_back_in_order(folder):
    assert read_metrics(folder) == ()
    rows = [{"step": step, "loss": 0.1 * step, "accuracy": None} for step in range(5)]
    for row in rows:
        folder.append_metrics(row)
    assert list(read_metrics(folder)) == rows


def test_a_metric_that_is_not_a_number_does_not_break_the_file(folder):
    for value in (math.nan, math.inf, -math.inf):
        folder.append_metrics({"step": 1, "loss": value})
    for line in folder.metrics.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is not JSON, and other readers refuse it
    assert len(read_metrics(folder)) == 3


def test_no_file_but_the_plan_names_a_budget(tmp_path):
    odd = plan(Budgets([7.7777, 1.0] * 500, delta=1e-5), Recipe(steps=5, batch_size=50, clip_norm=1.0), "scale", "rdp")
    folder = RunFolder.create(tmp_path / "run", odd, {"engine": "loop"})
    assert "7.77" not in folder.settings.read_text()
    assert "7.77" not in repr(Run(folder.path, odd, (5,), ()))


def test_a_run_claims_the_whole_plan_however_early_it_stopped(made):
    for charged in (0, 3, 20):
        np.testing.assert_array_equal(Run(None, made, (charged,), ()).epsilon_spent(), made.epsilon_spent())
