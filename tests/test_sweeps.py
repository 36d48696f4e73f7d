"""Sweeps by joblib's active backend, on processes and on clusters of this machine: the same bits, and killed workers.

dask: pip install "dask[distributed]". ray: the dependency group `flower` has it. Tests of what is absent are skipped.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from joblib import Parallel, delayed, parallel_config
from torch.nn import functional as F

import epsilons
from epsilons.auditing.membership import shadows
from epsilons.auditing.membership.shadows import BLOCK_SIZES, train_shadows
from epsilons.core.threads import REPEATS, spread, workers
from epsilons.errors import EpsilonsWarning, InputError, RunError
from small_attacks import a_plan, a_setting, attack, dropping

CLUSTERS = ["dask", "ray"]


@contextmanager
def dask(workers: int = 2, threads: int = 1, processes: bool = True) -> Iterator[None]:
    """A cluster on this machine, as joblib's active backend."""
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed: these are not tested")
    options = {"dashboard_address": None, "memory_limit": None, "silence_logs": logging.CRITICAL}
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=threads, processes=processes, **options
        ) as cluster,
        distributed.Client(cluster),
        parallel_config("dask"),
    ):
        yield


@contextmanager
def ray() -> Iterator[None]:
    """A cluster on this machine, as joblib's active backend."""
    ray = pytest.importorskip("ray", reason="ray is not installed: its clusters are not tested")
    pytest.importorskip("ray.util.joblib").register_ray()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        with parallel_config("ray"):
            yield
    finally:
        ray.shutdown()


@contextmanager
def loky() -> Iterator[None]:
    with parallel_config("loky", n_jobs=2):
        yield


BACKENDS = {"loky": loky, "dask": dask, "ray": ray}


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch):
    """Workers unpickle functions of these files; and they use what this process would use."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(shadows, "WORTH_PROCESSES", 0.0)


# -- which backend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "jobs", "expected"),
    [
        ({}, None, joblib.cpu_count()),
        ({}, 3, 3),
        ({"n_jobs": 3}, None, 3),
        ({"backend": "loky", "n_jobs": 3}, None, 3),
        ({"backend": "loky", "n_jobs": 3}, 2, 2),
        ({"backend": "threading", "n_jobs": 3}, None, 3),
        ({"backend": "multiprocessing", "n_jobs": 3}, None, 3),
    ],
)
def test_joblib_s_own_backends_are_processes_of_this_machine(settings, jobs, expected):
    with parallel_config(**settings):
        assert workers(jobs) == (expected, False)


def test_threads_that_are_asked_for_become_processes():
    with parallel_config("threading", n_jobs=2):
        found = set(spread(process, [(k,) for k in range(4)], *workers()))
    assert os.getpid() not in found


def process(_: int) -> int:
    return os.getpid()


def test_a_cluster_is_used_unless_one_process_is_asked_for():
    with dask(workers=1, threads=3, processes=False):
        assert workers() == (3, True)
        assert workers(1) == (1, False)


# -- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_attack_has_the_same_bits_wherever_its_shadows_are_trained(backend, tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCK_SIZES, "stacked", 3)
    with BACKENDS[backend]():
        for name, change in (("stacked", {}), ("alone", {"model": dropping()})):
            attack(tmp_path / f"here-{name}", placebo=True, jobs=1, **change)
            attack(tmp_path / name, placebo=True, jobs=None, **change)
            assert result(tmp_path / name) == result(tmp_path / f"here-{name}")


def result(folder: Path) -> bytes:
    return (folder / "membership.json").read_bytes()


def test_threads_of_one_worker_train_one_after_the_other():
    """Mutant: no lock. Dropout of one shadow would use the generator that another one has seeded."""
    setting = a_setting(method="alone", model=dropping(), plan=shadows.shadow_plan(a_plan(steps=30), 80))
    here = train_shadows(setting, 8, jobs=1)
    with dask(workers=1, threads=4, processes=False):
        there = train_shadows(setting, 8)
    for name in ("member", "margin", "raw", "log_p"):
        assert (getattr(here.signals, name) == getattr(there.signals, name)).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_audits_repeated_on_a_cluster_have_the_same_results(backend):
    here = [an_audit(seed) for seed in range(3)]
    with BACKENDS[backend]():
        assert Parallel()(delayed(an_audit)(seed) for seed in range(3)) == here


def an_audit(seed: int) -> str:
    """The result, with its trace, as text: it has NaNs, which are not equal to themselves."""
    torch.set_num_threads(1)
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1_000, seed=0)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=60, clip_norm=1.0), accountant="rdp")
    return repr(epsilons.audit(plan, canaries=20, seed=seed).to_dict())


@pytest.mark.slow
def test_attacks_made_by_a_cluster_s_workers_spread_their_shadows_over_it():
    here = [an_attack(seed, jobs=1) for seed in range(2)]
    with dask():
        assert Parallel()(delayed(an_attack)(seed) for seed in range(2)) == here


def an_attack(seed: int, jobs: int | None = None) -> dict[str, Any]:
    return attack(model=dropping(), seed=seed, jobs=jobs).to_dict()


# -- interrupted, refused ------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """What a signal raises."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", CLUSTERS)
def test_an_attack_interrupted_on_a_cluster_continues_to_the_same_bits(backend, tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCK_SIZES, "stacked", 2)
    attack(tmp_path / "whole")
    with BACKENDS[backend]():
        with monkeypatch.context() as patch:
            patch.setattr(shadows, "_count", interrupting(shadows._count))
            with pytest.raises(Interrupted):
                attack(tmp_path / "stopped", jobs=None)
        assert 1 <= len(list((tmp_path / "stopped" / "secret" / "blocks").iterdir())) < 4
        attack(tmp_path / "stopped", jobs=None, resume=True)
    assert result(tmp_path / "stopped") == result(tmp_path / "whole")


def interrupting(count: Callable[[Any], int]) -> Callable[[Any], int]:
    """As a signal between two blocks."""

    def counted(blocks: Any) -> int:
        if count(blocks) >= 2:
            raise Interrupted
        return count(blocks)

    return counted


@pytest.mark.slow
@pytest.mark.parametrize("backend", CLUSTERS)
def test_a_worker_with_other_versions_is_refused(backend, monkeypatch):
    with BACKENDS[backend]():
        monkeypatch.setattr(shadows, "versions", lambda: {"torch": "1.0"})
        with pytest.raises(InputError, match=r"A worker of the cluster lacks torch 1\.0:"):
            attack(jobs=None)


# -- killed workers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deadly:
    """Cross entropy. The first process that finds the file removes it, and is killed.

    blocks  with so many of these, every process is killed as long as there is the file
    """

    file: Path
    blocks: Path | None = None
    __name__ = "deadly"

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.file.exists() and (self.blocks is None or self.finished >= 2):
            if self.blocks is None:
                self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(outputs, targets, reduction="none")

    @property
    def finished(self) -> int:
        return len(list(self.blocks.glob("[!.]*"))) if self.blocks is not None else 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker was ended")
@pytest.mark.parametrize("backend", BACKENDS)
def test_shadows_of_killed_workers_are_trained_again_to_the_same_bits(backend, tmp_path):
    loss = Deadly(tmp_path / "deadly")
    attack(tmp_path / "whole", loss=loss)
    with BACKENDS[backend]():
        loss.file.touch()
        attack(tmp_path / "killed", loss=loss, jobs=None)
    assert not loss.file.exists()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker was ended")
def test_what_always_kills_its_worker_ends_with_an_error_and_finished_shadows_are_kept(tmp_path):
    blocks = tmp_path / "killed" / "secret" / "blocks"
    loss = Deadly(tmp_path / "deadly", blocks)
    attack(tmp_path / "whole", loss=loss)
    loss.file.touch()
    with pytest.raises(RunError, match=r"Repeating does not help.*resume"):
        attack(tmp_path / "killed", loss=loss, jobs=2)
    finished = {path: path.stat().st_mtime_ns for path in blocks.iterdir()}
    assert 2 <= len(finished) < 8
    loss.file.unlink()
    attack(tmp_path / "killed", loss=loss, jobs=1, resume=True, keep_scores=True)
    assert finished.items() <= {path: path.stat().st_mtime_ns for path in blocks.iterdir()}.items()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "ray"])  # dask repeats by itself
def test_work_is_repeated_a_few_times_and_with_a_warning(backend, tmp_path):
    with BACKENDS[backend](), pytest.warns(EpsilonsWarning, match="done again"), pytest.raises(RunError):
        list(spread(deadly, [(tmp_path / "calls",)], *workers()))
    assert len((tmp_path / "calls").read_text()) == 1 + REPEATS


def deadly(file: Path) -> None:
    with file.open("a") as calls:
        calls.write("x")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker was ended")
@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_of_killed_workers_go_on_in_their_folders_and_nothing_is_charged_twice(backend, tmp_path):
    """Three runs of one plan: a run that was charged again would need a fourth slot, and be refused."""
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=80, delta=1e-3, seed=0)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=8, batch_size=20, clip_norm=1.0), accountant="rdp", runs=3)
    epsilons.PlanFolder.create(tmp_path / "plan", plan)
    items = [(number, tmp_path, budgets) for number in range(3)]
    with BACKENDS[backend]():
        (tmp_path / "deadly").touch()
        spent = list(spread(a_run, items, *workers(2)))
    assert not (tmp_path / "deadly").exists()
    assert len(list((tmp_path / "plan" / "slots").iterdir())) == 3
    assert epsilons.PlanFolder(tmp_path / "plan").left == 0
    for one in spent:
        assert one == plan.epsilon_spent().tolist()


def a_run(number: int, folder: Path, budgets: epsilons.Budgets) -> list[float]:
    torch.manual_seed(number)
    data = (torch.randn(80, 5), torch.randint(3, (80,)))
    run = epsilons.fit(
        torch.nn.Linear(5, 3),
        data,
        epsilons.PlanFolder(folder / "plan"),
        budgets=budgets,
        training=epsilons.Training(loss=Deadly(folder / "deadly"), lr=0.1, progress=False),
        run_dir=epsilons.RunFolder(folder / f"run-{number}", resume=True),
    )
    return run.epsilon_spent().tolist()
