"""The modes of files: for the owner alone, except what is made for release."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

import epsilons
from epsilons import Plan
from epsilons.core.files import close_folder, write_json, write_text
from epsilons.errors import EpsilonsWarning, RunError
from epsilons.ledger.run_folder import RunFolder
from program import epsilons as program
from small_runs import a_model, private_over, some_plan, train

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


@pytest.fixture(autouse=True)
def generous():
    """The most generous of umasks: nothing is narrow by accident."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def widened(path: Path, wide: int) -> Path:
    path.mkdir(exist_ok=True)
    path.chmod(wide)
    return path


@pytest.fixture(scope="module")
def plan() -> Plan:
    return some_plan(steps=4)


def run(run_dir: Path, updates: int, resume: bool = False) -> epsilons.training.Private:
    """So many updates of a tiny model in this folder."""
    model = a_model()
    private = private_over(model, plan=some_plan(steps=4), run_dir=run_dir, resume=resume)
    train(private, model, until=updates)
    private.checkpoint()
    return private


def readable_by_others(folder: Path) -> list[str]:
    """What another user could open: a path whose folders from the top all let them in."""
    if not mode(folder) & 0o077:
        return []
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if mode(file) & 0o077]


# -- the run's folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [0o755, 0o777, 0o750, 0o711, 0o1777, 0o2775, 0o701])
def test_a_folder_that_exists_is_closed_at_the_start_and_on_resume_again(tmp_path, plan, wide):
    private = run(widened(tmp_path / "run", wide), 2)
    assert mode(tmp_path / "run") == 0o700
    assert readable_by_others(tmp_path / "run") == []
    private.close()
    (tmp_path / "run").chmod(wide)  # by an earlier version, or a careless copy
    run(tmp_path / "run", 4, resume=True).close()
    assert mode(tmp_path / "run") == 0o700


def test_a_link_to_a_folder_closes_the_folder(tmp_path, plan):
    (tmp_path / "link").symlink_to(widened(tmp_path / "real", 0o755))
    RunFolder.create(tmp_path / "link", plan, {})
    assert mode(tmp_path / "real") == 0o700


def test_a_folder_of_other_things_is_refused_and_keeps_its_mode(tmp_path, plan):
    (widened(tmp_path / "home", 0o755) / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty"):
        RunFolder.create(tmp_path / "home", plan, {})
    assert mode(tmp_path / "home") == 0o755


def test_nothing_is_written_before_the_folder_is_closed(tmp_path, plan, monkeypatch):
    real, seen = os.open, []

    def watched(path, *arguments, **named):
        if Path(os.fsdecode(path)).parent == tmp_path / "run":
            seen.append(mode(tmp_path / "run"))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", watched)
    RunFolder.create(widened(tmp_path / "run", 0o777), plan, {})
    assert seen
    assert set(seen) == {0o700}


def test_a_folder_of_another_user_is_refused_with_the_reason(tmp_path, plan, monkeypatch):
    widened(tmp_path / "run", 0o755)
    monkeypatch.setattr(os, "chmod", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with pytest.raises(RunError, match=r"cannot be set to 0700.*another user.*does not exist yet"):
        RunFolder.create(tmp_path / "run", plan, {})
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to become another user")
def test_a_real_user_is_refused_a_folder_that_belongs_to_another(plan):
    with tempfile.TemporaryDirectory() as above:  # pytest's own folders let no other user through
        os.chmod(above, 0o755)
        place = widened(Path(above) / "run", 0o777)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setuid(65534)
                RunFolder.create(place, plan, {})
            except RunError as error:
                code = 0 if "0700" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(place.iterdir()) == []


@pytest.mark.parametrize("complains", [False, True])
def test_a_file_system_without_modes_is_warned_about_and_used(tmp_path, plan, monkeypatch, complains):
    def chmod(*_):
        if complains:
            raise OSError(95, "Operation not supported")

    real = os.mkdir

    def mkdir(path, mode=0o777, **named):
        real(path, 0o777, **named)

    widened(tmp_path / "run", 0o777)
    monkeypatch.setattr(os, "chmod", chmod)
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.warns(EpsilonsWarning, match="keeps no modes"):
        folder = RunFolder.create(tmp_path / "run", plan, {})
    assert sorted(os.listdir(folder.path)) == ["plan.json", "run.json"]


def test_where_there_are_no_modes_at_all_nothing_is_asked(tmp_path, monkeypatch):
    widened(tmp_path / "run", 0o777)
    monkeypatch.setattr(os, "name", "nt")
    close_folder(tmp_path / "run")
    monkeypatch.undo()
    assert mode(tmp_path / "run") == 0o777


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [None, 0o644, 0o666, 0o600])
@pytest.mark.parametrize("release", [False, True])
def test_a_file_is_its_owner_s_from_the_first_byte_unless_for_release(tmp_path, monkeypatch, wide, release):
    os.umask(0o022)
    file, real, seen = tmp_path / "x.json", os.fsync, []
    if wide is not None:
        file.write_text("old")
        file.chmod(wide)

    def watched(handle):
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", watched)
    write_json(file, {"a": 1}, release)
    assert mode(file) == (0o644 if release else 0o600)
    assert seen[0] == (0o644 if release else 0o600)
    write_text(tmp_path / "deep" / "y", "text", release)
    assert mode(tmp_path / "deep" / "y") == (0o644 if release else 0o600)


def test_the_mode_is_asked_for_when_the_file_is_created_and_not_set_afterwards(tmp_path, plan, monkeypatch):
    asked, real = [], os.open

    def watched(path, flags, mode=0o777, **named):
        if flags & os.O_CREAT:
            asked.append((Path(os.fsdecode(path)).name, mode, bool(flags & os.O_EXCL)))
        return real(path, flags, mode, **named)

    monkeypatch.setattr(os, "open", watched)
    folder = RunFolder.create(tmp_path / "run", plan, {})
    folder.append_metrics({"step": 1})
    plan.save(tmp_path / "plan.json")
    assert len(asked) == 4  # plan.json, run.json, metrics.jsonl, and the plan again
    assert {mode for _, mode, _ in asked} == {0o600}
    assert all(exclusive for name, _, exclusive in asked if name.startswith("."))


def test_the_files_of_a_run_are_its_owner_s_each(tmp_path, plan):
    private = run(tmp_path / "run", 4)
    private.close()
    named = {"plan.json", "run.json", "ledger.jsonl"}
    assert named <= {file.name for file in (tmp_path / "run").iterdir()}
    assert {name: mode(tmp_path / "run" / name) for name in named} == dict.fromkeys(named, 0o600)


def test_reports_are_their_owner_s_but_the_ones_for_release(tmp_path, plan):
    run(tmp_path / "run", 4).close()
    os.umask(0o022)
    for release in (False, True):
        for name in ("a.html", "a.json"):
            file = tmp_path / f"{release}-{name}"
            for _ in range(2):
                epsilons.report(tmp_path / "run", release=release).save(file)
                assert mode(file) == (0o644 if release else 0o600)
                file.chmod(0o666)


def test_wherever_the_command_line_writes_only_what_is_for_release_is_for_others(tmp_path, plan, monkeypatch):
    run(tmp_path / "run", 4).close()
    monkeypatch.chdir(tmp_path)
    os.umask(0o022)
    (tmp_path / "p.json").write_text("old and readable")
    (tmp_path / "people.csv").write_text("age,epsilon,label\n" + "".join(f"{i % 90},1,{i % 2}\n" for i in range(200)))
    who = ("--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "10", "--accountant", "rdp")
    program("plan", *who, "-o", "p.json", "-q").succeeded()
    program("advise", *who, "--picture", "advice.svg").succeeded()
    program("init", "people.csv", "-q").succeeded()
    program("report", "run", "-o", "pages/r.html", "-q").succeeded()
    for name in ("p.json", "advice.svg", "people.toml", "pages/r.html", "pages/r.json"):
        assert mode(tmp_path / name) == 0o600, name
    for name in ("pages/r-release.html", "pages/r-release.json"):
        assert mode(tmp_path / name) == 0o644, name


def test_findings_and_pictures_of_an_audit_are_their_owner_s(tmp_path, plan):
    from epsilons import auditing

    found = auditing.audit(plan, canaries=20, seed=0, progress=False, groups=[0, 1])
    assert mode(found.save(tmp_path / "audit.json")) == 0o600
    assert mode(auditing.draw(found, tmp_path / "audit.svg")) == 0o600


def test_the_folder_for_tensorboard_is_closed_too(tmp_path):
    pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from epsilons.training.fitting.progress import TensorBoard

    TensorBoard(tmp_path / "new").close(())
    TensorBoard(widened(tmp_path / "old", 0o755)).close(())
    assert mode(tmp_path / "new") == mode(tmp_path / "old") == 0o700
