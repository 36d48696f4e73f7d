"""Several processes train one model: as one process would, or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import epsilons
from epsilons import Plan
from epsilons.cli import app
from epsilons.core.checksums import check_sum, hash_of
from epsilons.draws.persons_rows import Draws
from epsilons.draws.randomness import Randomness, key_from_seed
from epsilons.errors import InputError, RankError
from epsilons.ledger.ledger import Ledger, read_account, read_charges
from epsilons.registry import Registry
from epsilons.training.distributed import SIZES, Ranks
from options import fit_flat, make_flat
from pages import ROOT, blocks, commands
from ranked import CLASSES, FEATURES, Listed, Processes, Stopped, points, wait_until
from shares import share
from small_runs import blocks_of, epochs, lines, replace_noise, three_levels

KEPT, BLOCK = 40, 16  # steps of the runs that are stopped: more than one block of the ledger


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with blocks_of(BLOCK):
        yield


@pytest.fixture(scope="module")
def pair(small_blocks: None) -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.end()


# -- what is trained, and how -----------------------------------------------------------------------------------------


@cache
def budgets() -> epsilons.Budgets:
    return epsilons.Budgets(np.random.default_rng(1).permutation(np.repeat([1.0, 2.0, 8.0], 20)), delta=1e-3)


@cache
def plan(strategy: str = "sample", steps: int = 24, batch_size: float = 6.0) -> epsilons.Plan:
    return epsilons.plan(budgets(), epsilons.Recipe(steps, batch_size, clip_norm=0.5), strategy, "rdp")


def a_model(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, CLASSES))


def values(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()


def here() -> int:
    """This process's rank, among however many."""
    return dist.get_rank() if dist.is_initialized() else 0


class Training:
    """One rank's part of a training, or all of it: a model, momentum, a schedule, and the records of each update."""

    def __init__(
        self,
        *,
        lr: float = 0.2,
        data: Any = None,
        dropout: float = 0.0,
        model_seed: int = 0,
        wrapped: Callable[[nn.Module], nn.Module] = lambda model: model,
        **options: Any,
    ) -> None:
        self.model = a_model(dropout, model_seed)
        wrapped_model = wrapped(self.model)
        self.optimizer = torch.optim.SGD(wrapped_model.parameters(), lr=lr, momentum=0.5)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)
        one_key = {} if "seed" in options else {"key": key_from_seed(5)}
        options = one_key | {"budgets": budgets(), "engine": "vmap"} | options
        data, chosen = points() if data is None else data, options.pop("plan", plan())
        self.private = make_flat(wrapped_model, self.optimizer, data, chosen, **options)
        self.private.register_for_checkpointing(schedule=self.schedule)
        self.private.on_update(lambda _: self.schedule.step())
        self.seen: dict[int, list[int]] = {}  # update -> numbers of the records that this rank computed for it

    def run(self, until: int | None = None, each: Callable[[Training], None] = lambda training: None) -> Training:
        with self.private as private:
            for inputs, classes, numbers in private.batches:
                each(self)
                private.backward(F.cross_entropy(self.model(inputs), classes, reduction="none"))
                if not private.is_check:
                    self.seen.setdefault(private.updates, []).extend(numbers.tolist())
                private.step()
                if private.updates == until:
                    break
        return self


def trained(options: dict[str, Any], until: int | None = None) -> dict[str, Any]:
    """What came of a training on this rank."""
    training = Training(**options).run(until)
    moments = [state["momentum_buffer"] for state in training.optimizer.state.values()]
    return {
        "values": values(training.model),
        "hash": hash_of([*training.model.parameters(), *moments]),
        "seen": training.seen,
        "updates": training.private.updates,
        "charged": training.private.ledger.charged,
        "key": training.private._draws.randomness,
        "folder": training.private.folder,
    }


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, relative to the larger of 1 and the largest value."""
    return float(np.abs(one - other).max() / max(1.0, np.abs(other).max()))


# -- as one process would ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "steps"), share([("sample", 60), ("scale", 60), ("sample", 1_000), ("scale", 1_000)], 1)
)
def test_two_ranks_reach_what_one_process_reaches(strategy, steps, pair):
    """Small draws, so that some ranks, and some draws, have no record: 3 records expected of 60."""
    made = plan(strategy, steps, batch_size=3.0)
    options = {"plan": made, "key": key_from_seed(11)}
    alone, ranks = trained(options), pair.together(trained, options)
    assert apart(alone["values"], values(a_model())) > 0.1  # something was learnt
    for rank in ranks:
        assert rank["updates"] == steps
        assert rank["charged"] == (steps,)
        assert apart(rank["values"], alone["values"]) < 1e-5
    assert ranks[0]["hash"] == ranks[1]["hash"]

    draws = Draws(made, budgets().group, Randomness(key_from_seed(11)))
    empty = [0, 0]
    for step in range(steps):
        handed = [rank["seen"].get(step, []) for rank in ranks]
        assert sorted(handed[0] + handed[1]) == draws.at(0, step).tolist()  # each drawn record by one rank, once
        for rank in (0, 1):
            empty[rank] += not handed[rank]
    assert empty[0] > steps / 50
    assert empty[1] > steps / 10


def test_two_ranks_share_persons_and_never_split_one(pair):
    """20 persons with 1 to 5 rows; on each rank a person's rows are those that one process reads."""
    person = np.random.default_rng(6).permutation(np.concatenate([np.arange(20), np.resize(np.arange(10), 40)]))
    people = epsilons.Budgets(np.resize([1.0, 2.0, 8.0], 20), delta=1e-3, unit="person")
    made = epsilons.plan(people, epsilons.Recipe(40, 3.0, clip_norm=0.5), "sample", "rdp")
    options = {"budgets": people, "plan": made, "persons": person, "rows_per_person": 3, "views": 2}
    alone, ranks = trained(options), pair.together(trained, options)
    for rank in ranks:
        assert apart(rank["values"], alone["values"]) < 1e-5
    for step in range(40):
        handed = [rank["seen"].get(step, []) for rank in ranks]
        assert sorted(handed[0] + handed[1]) == sorted(alone["seen"].get(step, []))
        assert not {*person[handed[0]]} & {*person[handed[1]]}
    assert any(alone["seen"].values())


def with_leavers(folder: str) -> dict[str, Any]:
    """A run on accounts of a registry, from which two people withdraw in its first block of steps."""
    url, ids = f"sqlite:///{folder}/people.db", [f"p{i}" for i in range(60)]
    if here() == 0:
        with Registry.create(url) as registry:
            registry.enrol(ids, 3.0)
    if dist.is_initialized():
        dist.barrier()
    with Registry(url) as registry:
        accounts = registry.account(ids)
        if dist.is_initialized():
            dist.barrier()  # all ranks plan on what was left before the reservation
        people = accounts.budgets(0.5)
        made = epsilons.plan(people, epsilons.Recipe(40, 6.0, clip_norm=0.5), accountant="filter")
        reservation = registry.reserve("one", made, accounts, budgets=people)

        def leave(training: Training) -> None:
            if training.private.updates == 10 and here() == 0:
                registry.withdraw(["p3", "p4"])

        options = {"budgets": people, "plan": made, "persons": ids, "reservation": reservation}
        training = Training(**options, run_dir=f"{folder}/run").run(each=leave)
        return {"values": values(training.model), "out": training.private.ledger.left_out(0, 30).tolist()}


def test_who_leaves_a_registry_is_left_out_on_every_rank(pair, tmp_path):
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
    alone, ranks = with_leavers(f"{tmp_path}/alone"), pair.together(with_leavers, f"{tmp_path}/ranks")
    for rank in ranks:
        assert rank["out"] == alone["out"] == [3, 4]
        assert apart(rank["values"], alone["values"]) < 1e-5


def other_persons() -> None:
    """One rank passes other persons than the other."""
    people = epsilons.Budgets(np.resize([1.0, 2.0], 20), delta=1e-3, unit="person")
    made = epsilons.plan(people, epsilons.Recipe(2, 3.0, clip_norm=0.5), "sample", "rdp")
    trained({"budgets": people, "plan": made, "persons": np.roll(np.resize(np.arange(20), 60), here())})


def test_ranks_with_different_persons_stop_and_show_no_id(pair):
    for stopped in pair.together(other_persons):
        assert stopped.kind == "RankError"
        assert "persons (rank 1 from rank 0)" in stopped.message


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=50).map(sorted), st.integers(1, 9))
def test_every_drawn_record_falls_to_exactly_one_rank(drawn, size):
    parts = []
    for rank in range(size):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, size
        parts.append(ranks.part(np.array(drawn, dtype=np.int64)).tolist())
    assert list(chain(*parts)) == drawn
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def check_matches_one_process(options: dict[str, Any], pair: Processes, **of_the_pair: Any) -> None:
    alone, ranks = trained(options), pair.together(trained, options | of_the_pair)
    assert np.isfinite(alone["values"]).all()
    for rank in ranks:
        assert apart(rank["values"], alone["values"]) < 1e-5


def start_method() -> str:
    return multiprocessing.get_start_method()


def test_a_rank_starts_its_workers_as_a_process_of_torchrun_does(pair):
    """Workers that are spawned import torch first, which takes seconds for each loader."""
    assert pair.together(start_method) == [start_method()] * 2


@pytest.mark.parametrize(("engine", "num_workers"), share([("loop", 0), ("vmap", 0), ("ghost", 0), ("vmap", 1)], 2))
def test_every_engine_batch_size_and_kind_of_data_matches_one_process(engine, num_workers, pair):
    options = {"engine": engine, "max_physical_batch": 2, "data": Listed()}
    check_matches_one_process(options, pair, num_workers=num_workers)


def broken_points() -> Any:
    """Some records whose gradient is infinite, or not a number."""
    inputs, classes, numbers = points()
    inputs[::7], inputs[3] = float("nan"), float("inf")
    return inputs, classes, numbers


def test_records_whose_gradient_is_not_finite_contribute_nothing_on_any_rank(pair):
    """Their physical batch is done again record by record, on that rank alone."""
    check_matches_one_process({"data": broken_points(), "plan": plan(batch_size=20.0), "engine": "ghost"}, pair)


def test_secure_randomness_is_under_one_key_on_all_ranks(pair):
    options = {"randomness": "secure", "seed": None}
    first, second = pair.together(trained, options)
    assert first["key"] == second["key"]
    assert len(set(first["key"].key)) > 8
    assert first["hash"] == second["hash"]
    with mock.patch.object(Randomness, "fresh", return_value=first["key"]):
        alone = trained(options)
    assert apart(first["values"], alone["values"]) < 1e-5
    again, _ = pair.together(trained, options)
    assert again["key"] != first["key"]


def scores_of_fit(run_dir: Path | None, resume: bool = False) -> dict[str, Any]:
    model, data = a_model(), points()[:2]
    options = {"eval_data": data, "eval_every": 9, "device": "cpu", "seed": 3, "run_dir": run_dir, "resume": resume}
    run = fit_flat(model, data, plan(), budgets=budgets(), **options)
    return {"values": values(model), "run": run}


def test_fit_leaves_one_run_whose_scores_are_those_of_one_process(pair, tmp_path):
    alone = scores_of_fit(tmp_path / "alone")
    first, second = pair.together(scores_of_fit, tmp_path / "run")
    for rank in (first, second):
        assert apart(rank["values"], alone["values"]) < 1e-5
        assert rank["run"].charged == (24,)
    assert (first["run"].path, second["run"].path) == (tmp_path / "run", None)
    assert second["run"].metrics == ()
    assert [row["step"] for row in first["run"].metrics] == [row["step"] for row in alone["run"].metrics]
    for row, expected in zip(first["run"].metrics, alone["run"].metrics, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    names = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    assert epsilons.report(tmp_path / "run").content.status.charged == 24

    # a finished run is shown again, on every rank
    for rank in pair.together(scores_of_fit, tmp_path / "run", True):
        assert np.array_equal(rank["values"], first["values"])


# -- stop and go on ---------------------------------------------------------------------------------------------------


def kept(run_dir: Path, **more: Any) -> dict[str, Any]:
    """Options of a run with dropout, and checkpoints at other steps than anything else."""
    return {"run_dir": run_dir, "checkpoint_every": 7, "dropout": 0.3, "plan": plan(steps=KEPT), "seed": None} | more


def test_a_run_that_was_stopped_goes_on_to_the_same_bits_and_is_charged_once(pair, tmp_path):
    whole = pair.together(trained, kept(tmp_path / "whole", seed=5))
    pair.together(trained, kept(tmp_path / "cut", seed=5), 25)
    assert (tmp_path / "cut" / "secret" / "key").exists()
    ranks = pair.together(trained, kept(tmp_path / "cut", seed=5, resume=True))
    assert {rank["hash"] for rank in ranks} == {whole[0]["hash"]} == {whole[1]["hash"]}
    assert ranks[1]["folder"] is None
    assert read_charges(tmp_path / "cut" / "ledger.jsonl", plan(steps=KEPT)) == (KEPT,)
    assert epochs(tmp_path / "cut") == [0]
    assert not (tmp_path / "cut" / "secret").exists()


KILLED = 80  # steps of a run that is killed: some are left when it is


def kill(folder: Path, seed: int) -> None:
    """Kill one rank or both in a run under a key that is not known."""
    luck = random.Random(seed)
    processes = Processes(2)
    try:
        processes.begin(trained, kept(folder, plan=plan(steps=KILLED)))
        until = luck.randrange(3, KILLED - 15)
        wait_until(lambda: folder.joinpath("checkpoints").is_dir() and updates_of_last_checkpoint(folder) >= until)
        victims = luck.choice([[0], [1], [0, 1]])
        for victim in victims:
            processes.kill(victim)
        for survivor in {0, 1} - set(victims):
            stopped = processes.outcome(survivor)
            assert isinstance(stopped, Stopped), "it trained on without the other"
            assert stopped.kind == "RankError"
            assert "cannot be reached" in stopped.message or "stopped" in stopped.message
    finally:
        processes.end()


def updates_of_last_checkpoint(run_dir: Path) -> int:
    with suppress(OSError, ValueError, KeyError, IndexError):
        last = max(run_dir.joinpath("checkpoints").glob("*.json"))
        items = dict(map(tuple, json.loads(last.read_text())["state"]["$items"]))
        return int(items["updates"])
    return 0


def trained_under(key: Randomness, options: dict[str, Any]) -> dict[str, Any]:
    """A training under this key: what an uninterrupted one would have come to."""
    with mock.patch.object(Randomness, "fresh", return_value=key):
        return trained(options)


@pytest.mark.parametrize("seed", share(range(1, 12), 1))
def test_a_killed_rank_stops_the_others_and_the_run_resumes_to_the_same_bits(seed, pair, tmp_path):
    """It must come out as an uninterrupted run under its key, and as the ledger's hashes say."""
    run_dir = tmp_path / "run"
    made = plan(steps=KILLED)
    kill(run_dir, seed)
    key = Randomness((run_dir / "secret" / "key").read_bytes())
    assert read_account(run_dir / "ledger.jsonl", made).closed is None
    ranks = pair.together(trained, kept(run_dir, plan=made, resume=True))
    assert ranks[0]["hash"] == ranks[1]["hash"]
    assert read_charges(run_dir / "ledger.jsonl", made) == (KILLED,)
    assert epochs(run_dir) == [0]
    assert pair.together(trained_under, key, kept(tmp_path / "whole", plan=made))[0]["hash"] == ranks[0]["hash"]


def busy(first: int, made: Plan) -> int:
    """The first step from this one on at which both ranks have somebody, under the key of `Training`."""
    draws = Draws(made, budgets().group, Randomness(key_from_seed(5)))
    return next(step for step in range(first, made.steps) if len(draws.at(0, step)) >= 4)


def trained_noisily(options: dict[str, Any], odd: int, until: int | None = None) -> dict[str, Any]:
    """The gradients of update `odd` are never twice the same on rank 1, and too short to be clipped."""
    training = Training(**options)
    backward = training.private.backward

    def disturbed(losses: Tensor) -> None:
        is_odd = here() == 1 and training.private.updates == odd
        backward(losses * 1e-9 * (time.time_ns() % 1_000_000) if is_odd else losses)

    if until is not None:  # then it ends as if it were killed, so that updates are made again
        training.private._leave_checkpoint = lambda: None
    with mock.patch.object(training.private, "backward", disturbed):
        training.run(until)
    return {"hash": hash_of(training.model.parameters()), "epoch": training.private.ledger.epoch}


def test_a_replay_that_comes_out_differently_on_one_rank_changes_the_key_of_all(pair, tmp_path):
    run_dir, odd = tmp_path / "run", busy(29, plan(steps=KEPT))
    assert 28 < odd < 34  # after a checkpoint, and before another
    pair.together(trained_noisily, kept(run_dir, key=key_from_seed(5)), odd, 35)
    first, second = pair.together(trained_noisily, kept(run_dir, key=key_from_seed(5), resume=True), odd)
    assert first == second
    assert first["epoch"] == 1
    (start,) = [line["start"] for line in lines(run_dir) if line["kind"] == "key" and line["epoch"] == 1]
    assert start == [odd]
    assert read_charges(run_dir / "ledger.jsonl", plan(steps=KEPT)) == (KEPT,)


def test_on_another_number_of_ranks_a_run_goes_on_under_another_key(pair, tmp_path):
    pair.together(trained, kept(tmp_path / "run"), 20)
    alone = trained(kept(tmp_path / "run", resume=True))
    assert epochs(tmp_path / "run") == [0, 1]
    assert alone["charged"] == (KEPT,)
    assert alone["updates"] == 19 + KEPT - 2 * BLOCK


# -- or not at all ----------------------------------------------------------------------------------------------------


def trained_apart(common: dict[str, Any], of_rank_1: dict[str, Any]) -> dict[str, Any]:
    return trained(common | (of_rank_1 if here() == 1 else {}))


@pytest.mark.parametrize(
    ("of_rank_1", "words"),
    [
        ({"plan": plan("scale")}, "the plan (rank 1 from rank 0)"),
        ({"plan": plan(steps=25)}, "the plan (rank 1 from rank 0)"),
        ({"data": points(records=59)}, "Rank 1 stopped, and so must the others. Its error: DataError: Got 60 budgets"),
        ({"data": points(seed=1)}, "data (rank 1 from rank 0)"),
        ({"budgets": three_levels()}, "the budgets (rank 1 from rank 0)"),
        ({"seed": 6}, "the seed (rank 1 from rank 0)"),
        ({"seed": None}, "randomness (rank 0: seeded, rank 1: chacha20)"),
        ({"seed": None, "key": bytes(32)}, "the key (rank 1 from rank 0)"),
        ({"run_index": 1}, "the index of the randomness (rank 0: 0, rank 1: 1)"),
        ({"model_seed": 1}, "the model's values (rank 1 from rank 0)"),
        ({"lr": 0.3}, "the optimizer's settings"),
        ({"engine": "loop"}, "engine (rank 0: Vmap, rank 1: Loop)"),
        ({"max_physical_batch": 3}, "largest physical batch"),
        ({"run_dir": None}, "the folder"),
        ({"resume": True}, "resume (rank 0: False, rank 1: True)"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_ranks_with_different_facts_stop_with_a_message_on_each(of_rank_1, words, pair, tmp_path):
    outcomes = pair.together(trained_apart, {"run_dir": tmp_path / "run", "seed": 5}, of_rank_1)
    assert all(isinstance(stopped, Stopped) for stopped in outcomes), outcomes
    if "DataError" in words:  # that rank found its own mistake, and the others were informed
        assert outcomes.pop().kind == "DataError"
    for stopped in outcomes:
        assert stopped.kind == "RankError"
        assert words in stopped.message
    assert not (tmp_path / "run").exists()


def budgets_and_data_of_other_lengths() -> dict[str, Any]:
    fewer = epsilons.Budgets(np.repeat([1.0, 2.0, 8.0], 18), delta=1e-3)
    made = epsilons.plan(fewer, epsilons.Recipe(24, 6.0, clip_norm=0.5), "sample", "rdp")
    return {"plan": made, "budgets": fewer, "data": points(records=54)}


def test_another_number_of_records_is_named_even_where_plan_and_budgets_fit_it(pair):
    for stopped in pair.together(trained_apart, {}, budgets_and_data_of_other_lengths()):
        assert stopped.kind == "RankError"
        assert "the number of records (rank 0: 60, rank 1: 54)" in stopped.message
        assert "8.0" not in stopped.message


TURN = busy(12, plan())


@pytest.fixture(scope="module")
def whole(pair: Processes) -> dict[str, Any]:
    """What rank 0 comes to in a run that nothing stops."""
    first: dict[str, Any] = pair.together(trained, {})[0]
    return first


def tampered(what: str, run_dir: Path | None = None) -> tuple[str, int, str]:
    """Rank 1 loses its way after update TURN: what each rank says, and how many updates it had made by then."""
    training = Training(run_dir=run_dir)
    private, before, undo = training.private, {}, ExitStack()

    def lose(private: Any) -> None:
        before[private.updates] = values(training.model)
        if here() != 1 or private.updates != TURN:
            return
        if what == "key":
            private._draws = replace(private._draws, randomness=Randomness(key_from_seed(6), seeded=True))
        elif what == "step":
            private._position.step, private._restarted = private._position.step + 1, True
            private.ledger._account.reserved[0] = private._position.step
        elif what == "charges":
            private.ledger._account.previous_keys[0] += 1
        elif what == "parameters":
            with torch.no_grad():
                training.model[0].weight[0, 0] += 1e-7
        elif what == "noise":
            other = undo.enter_context(pytest.MonkeyPatch.context())
            replace_noise(other, lambda real: lambda *address: -real(*address))
        elif what == "close":
            private.close()
        elif what == "finish":
            private.finish()
        elif what == "learning rate":
            training.optimizer.param_groups[0]["lr"] = 0.1
        elif what == "a listener":
            raise ValueError("here it ends")

    private.on_update(lose)

    def fail(training: Training) -> None:
        if here() == 1 and training.private.updates == TURN and what == "the loop":
            raise ValueError("here it ends")

    try:
        with undo:
            training.run(each=fail)
    except Exception as error:
        last = max(before)
        assert np.array_equal(values(training.model), before[last]) or what == "parameters", "an update was applied"
        return type(error).__name__, last, str(error)
    return "", max(before), ""


STOPPED = "Rank 1 stopped, and so must the others."


@pytest.mark.parametrize(
    ("what", "other", "words", "updates"),
    [
        ("key", "RankError", "the key (rank 1 from rank 0)", TURN),
        ("step", "RankError", f"the step (rank 0: (0, {TURN}), rank 1: (0, {TURN + 1}))", TURN),
        ("charges", "RankError", f"what was charged (rank 0: ({TURN + 1},), rank 1: ({TURN + 2},))", TURN),
        ("parameters", "ModelError", STOPPED, TURN),
        ("noise", "RankError", "the update's values (rank 1 from rank 0)", TURN),
        ("learning rate", "RankError", "the parameters' values (rank 1 from rank 0)", TURN + 1),
        ("close", "CallOrderError", "Rank 1 closed the run before its end", TURN),
        ("finish", "RankError", "rank 0: at the end of a draw, rank 1: at the end of the run", TURN),
        ("a listener", "ValueError", f"{STOPPED} Its error: ValueError", TURN),
        ("the loop", "ValueError", STOPPED, TURN),
    ],
    ids=lambda value: value if isinstance(value, str) and " (" not in value else "",
)
def test_a_rank_that_loses_its_way_stops_all_before_the_next_update(what, other, words, updates, pair, whole, tmp_path):
    run_dir = tmp_path / "run"
    outcomes = pair.together(tampered, what, run_dir)
    assert [kind for kind, _, _ in outcomes] == ["RankError", other]
    assert words in outcomes[0][2]
    assert [last for _, last, _ in outcomes] == [updates, updates]
    assert (run_dir / "secret" / "key").exists()  # it can be resumed, and comes out as if nothing had been
    resumed = pair.together(trained, {"run_dir": run_dir, "resume": True})
    assert resumed[0]["updates"] == resumed[1]["updates"] == 24
    assert {rank["hash"] for rank in resumed} == {whole["hash"]}


def test_the_key_is_named_and_never_shown(pair):
    outcomes = pair.together(tampered, "key")
    for rank, seed in ((0, 5), (1, 6)):
        key = Randomness(key_from_seed(seed))
        for _, _, message in outcomes:
            assert key.key.hex() not in message, rank
            assert key.commitment not in message, rank


def trained_on_a_full_disk(run_dir: Path) -> tuple[str, str, int]:
    """Rank 0's ledger cannot be made durable from its second block on."""
    training = Training(run_dir=run_dir, plan=plan(steps=KEPT), checkpoint_every=1_000)
    real = Ledger._sync

    def full(ledger: Ledger, directory: bool = False) -> None:
        if here() == 0 and training.private.updates > 0:
            with ledger._closed_on_failure():
                raise OSError(28, "No space left on device")
        real(ledger, directory)

    with mock.patch.object(Ledger, "_sync", full):
        try:
            training.run()
        except Exception as error:
            return type(error).__name__, str(error), training.private.updates
    return "", "", training.private.updates


def test_no_rank_applies_an_update_whose_charge_is_not_durable(pair, tmp_path):
    (kind, message, updates), (other_kind, other_message, other_updates) = pair.together(
        trained_on_a_full_disk, tmp_path / "run"
    )
    assert (kind, other_kind) == ("LedgerError", "RankError")
    assert "No space left on device" in message
    assert "Its error: LedgerError" in other_message
    assert updates == other_updates == BLOCK  # one block was durable


def wrapped_otherwise(how: str) -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        if how == "ddp within":
            return nn.Sequential(nn.parallel.DistributedDataParallel(model))
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    Training(wrapped=wrapped)


@pytest.mark.parametrize("how", ["ddp within", "fsdp1"])
def test_models_that_average_or_shard_gradients_themselves_are_refused(how, pair):
    for stopped in pair.together(wrapped_otherwise, how):
        assert stopped.kind == "ModelError"
        assert "wrapped.module" in stopped.message


def test_processes_of_torchrun_that_are_not_connected_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankError, match="init_process_group"):
        Training()
    monkeypatch.setenv("WORLD_SIZE", "1")
    Training().private.close()


@pytest.mark.parametrize("name", SIZES)
def test_processes_of_any_launcher_that_are_not_connected_are_refused_without_folders(name, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NTASKS", "2")  # of a batch script, too, which is one process
    monkeypatch.setenv(name, "1")
    Training().private.close()
    monkeypatch.setenv(name, "2")
    with pytest.raises(RankError, match=rf"{name}=2: .*run_dir.*remove {name}"):
        Training()
    Training(run_dir=tmp_path / "run").private.close()
    (tmp_path / "people.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankError, match=f"{name}=2: "):
        CliRunner().invoke(app, ["train", "people.toml"], catch_exceptions=False)
    assert not (tmp_path / "runs").exists()


def connected() -> None:
    with mock.patch.dict(os.environ, dict.fromkeys(SIZES, "2")):
        Training()


def test_processes_of_any_launcher_that_are_connected_train_together(pair):
    assert pair.together(connected) == [None, None]


def test_a_check_sum_moves_with_every_bit_and_a_hash_with_every_order():
    tensors = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.randn(2).to(torch.bfloat16)]
    for place, tensor in enumerate(tensors):
        moved = [t.clone() for t in tensors]
        moved[place].view(-1).view(torch.uint8)[0] ^= 1
        assert check_sum(moved) != check_sum(tensors), tensor.dtype
        assert hash_of(moved) != hash_of(tensors)
    assert check_sum([t.clone() for t in tensors]) == check_sum(tensors)
    assert hash_of(tensors[::-1]) != hash_of(tensors)


# -- torchrun ---------------------------------------------------------------------------------------------------------

CONFIG = """
[data]
train = "digits"

[budgets]
shares = { 1 = 0.5, 3 = 0.5 }

[model]
name = "mlp"
options = { hidden = [8] }

[training]
steps = 30
batch_size = 20
clip_norm = 1.0
lr = 0.5
seeds = [3]
eval_every = 10

[privacy]
accountant = "rdp"
"""


def run_here(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python command in a process of its own."""
    path = str(Path(epsilons.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
    )


def torchrun(*command: str, cwd: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """A command as torchrun starts it."""
    return run_here(
        *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command), cwd=cwd
    )


def trained_by_command(folder: Path, *options: str) -> str:
    torch.manual_seed(here())  # as if by chance
    os.chdir(folder)
    return CliRunner().invoke(app, ["train", "people.toml", *options], catch_exceptions=False).stdout


def by_torchrun(folder: Path) -> str:
    two = torchrun("-m", "epsilons", "train", "people.toml", "--json", cwd=folder)
    assert two.returncode == 0, two.stderr
    return two.stdout


@pytest.mark.parametrize("is_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_line_trains_in_two_processes_what_it_trains_in_one(is_torchrun, pair, tmp_path, monkeypatch):
    (tmp_path / "people.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    alone = CliRunner().invoke(app, ["train", "people.toml", "--json", "--run-dir", "alone"], catch_exceptions=False)
    assert alone.exit_code == 0, alone.output
    if is_torchrun:
        output = by_torchrun(tmp_path)
    else:
        output, of_rank_1 = pair.together(trained_by_command, tmp_path, "--json")
        assert of_rank_1 == ""
    (run,) = json.loads(output)["runs"]  # shown once
    assert run["path"] == "runs/people-1"
    assert run["charged"] == 30
    folders = [tmp_path / "runs/people-1", tmp_path / "alone"]
    ours, expected = (load_file(folder / "model.safetensors") for folder in folders)
    for name, values_alone in expected.items():
        assert apart(ours[name].numpy(), values_alone.numpy()) < 1e-5
    assert read_charges(folders[0] / "ledger.jsonl", Plan.load(folders[1] / "plan.json")) == (30,)
    assert [len((folder / "metrics.jsonl").read_text().splitlines()) for folder in folders] == [3, 3]


def test_without_a_seed_the_command_begins_with_equal_weights_on_all_ranks(pair, tmp_path):
    (tmp_path / "people.toml").write_text(CONFIG.replace("seeds = [3]", ""))
    first, second = pair.together(trained_by_command, tmp_path)
    assert "30 of 30 steps charged" in first
    assert second == ""
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["people-1"]
    assert "30 of 30 steps charged" in pair.together(trained_by_command, tmp_path, "--resume")[0]  # shown again


def test_the_demonstration_is_refused_in_several_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="The demonstration runs in one process"):
        CliRunner().invoke(app, ["train"], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def script_of_the_page(folder: Path) -> Path:
    (script, *_) = blocks(ROOT / "docs" / "several-processes.md", "python")
    (folder / "train.py").write_text(script.text)
    return folder / "train.py"


def run_script(script: Path) -> None:
    os.chdir(script.parent)
    runpy.run_path(str(script))


def test_the_script_on_the_page_trains_one_run(pair, tmp_path):
    assert pair.together(run_script, script_of_the_page(tmp_path)) == [None, None]
    assert read_charges(tmp_path / "run" / "ledger.jsonl", Plan.load(tmp_path / "run" / "plan.json")) == (20,)


@pytest.mark.slow
def test_the_script_on_the_page_runs_under_torchrun(tmp_path):
    script_of_the_page(tmp_path)
    ended = torchrun("train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("steps charged") == 1


# -- other launchers --------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "several-processes.md"


def repeatable(script: str, folder: Path) -> str:
    """The page's script with a seed; every rank writes its weights into the folder."""
    folder.mkdir()
    script, seeds = re.subn("budgets=budgets, ", "budgets=budgets, seed=3, ", script)
    writes = rf'\1torch.save(model.state_dict(), f"{folder}/{{private.ranks.rank}}.pt")\n\1'
    script, places = re.subn(r"^( *)(?=if private\.ranks\.is_main)", writes, script, flags=re.M)
    assert (seeds, places) == (1, 1)
    return script


def assert_two_ranks_reach_what_one_process_reaches(folder: Path, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of two ranks are equal, and those of the page's first script in this process alone."""
    (script, *_) = blocks(PAGE, "python")
    alone = folder / "alone"
    (folder / "alone.py").write_text(repeatable(script.text, alone))
    monkeypatch.chdir(alone)
    runpy.run_path(str(folder / "alone.py"))
    (expected,) = map(torch.load, alone.glob("*.pt"))
    assert [path.name for path in sorted(ours.glob("*.pt"))] == ["0.pt", "1.pt"]
    first, second = (torch.load(ours / f"{rank}.pt") for rank in (0, 1))
    assert hash_of(list(first.values())) == hash_of(list(second.values()))
    for name, value in expected.items():
        assert apart(first[name].numpy(), value.numpy()) < 1e-5
    assert read_charges(folder / "run" / "ledger.jsonl", Plan.load(folder / "run" / "plan.json")) == (20,)


@pytest.mark.slow
def test_the_script_on_the_page_runs_under_accelerate(tmp_path, monkeypatch):
    (script, *_) = blocks(PAGE, "python")
    (command,) = [c for b in blocks(PAGE, "console") for c in commands(b) if c.startswith("accelerate launch ")]
    (tmp_path / "train.py").write_text(repeatable(script.text, tmp_path / "weights"))
    words = ["--main_process_port", "0", *command.split()[2:]]  # any port that is free
    ended = run_here("-m", "accelerate.commands.launch", *words, cwd=tmp_path, HF_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("steps charged") == 1
    assert_two_ranks_reach_what_one_process_reaches(tmp_path, tmp_path / "weights", monkeypatch)


@pytest.mark.slow
def test_the_script_on_the_page_runs_under_ray_train(tmp_path, monkeypatch):
    pytest.importorskip("ray.train", reason="Ray is in no extra", exc_type=ImportError)
    (script,) = [block for block in blocks(PAGE, "python") if block.text.startswith("import ray.")]
    text = repeatable(script.text, tmp_path / "weights").replace("/path/to/run", str(tmp_path / "run"))
    (tmp_path / "train.py").write_text(text)
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    ended = run_here("train.py", cwd=tmp_path, **loopback)
    assert ended.returncode == 0, ended.stderr
    assert_two_ranks_reach_what_one_process_reaches(tmp_path, tmp_path / "weights", monkeypatch)


@pytest.mark.slow
def test_three_processes_reach_what_one_reaches_and_go_on_after_a_stop(tmp_path):
    alone, three = trained({}), Processes(3)
    try:
        for rank in three.together(trained, {}):
            assert apart(rank["values"], alone["values"]) < 1e-5
        whole = three.together(trained, kept(tmp_path / "whole", seed=5))
        three.together(trained, kept(tmp_path / "cut", seed=5), 25)
        ranks = three.together(trained, kept(tmp_path / "cut", seed=5, resume=True))
        assert {rank["hash"] for rank in [*whole, *ranks]} == {whole[0]["hash"]}
    finally:
        three.end()
