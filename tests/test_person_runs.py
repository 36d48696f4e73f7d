"""Runs over persons with 1 to 50 rows: as runs of records, with views, cut off and resumed, in loops of others."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import epsilons
from epsilons.clipping import ENGINES
from epsilons.doors.foreign_loop import ForeignLoop
from epsilons.errors import DataError, InputError
from epsilons.opacus import PrivacyEngine
from options import make_flat
from people import (
    BATCH,
    KEY,
    NORMS,
    SIZES,
    STEPS,
    Trace,
    Visits,
    a_model,
    a_plan,
    clipped,
    drawn,
    losses_of,
    private_over,
    rows_seen,
    run,
    visits,
    watch,
)  # fmt: skip
from small_runs import lines, without_times

pytestmark = pytest.mark.usefixtures("one_thread")
DATA = visits()
PLAIN = tuple(1 for _ in SIZES)


def bits(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def trained(data: Visits, model: nn.Module | None = None, until: int | None = None, **options: Any) -> list[float]:
    """The weights after a run that learns."""
    model = a_model() if model is None else model
    with private_over(data, model, lr=0.5, **options) as private:
        for batch in private.batches:
            private.backward(losses_of(model, batch))
            private.step()
            if private.updates == until:
                break
    return bits(model)


class Augmented(Dataset[Any]):
    """Rows with noise of their own, and the noise as a number of each reading."""

    def __init__(self, data: Visits) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.person)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.rand(1, dtype=torch.float64)
        number = (noise * 2**40).long()[0] * 2**20 + self.data.numbers[row] % 2**20
        return self.data.inputs[row] + 0.1 * noise, self.data.targets[row], number


# -- as records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["columns", "data set"])
def test_persons_of_one_row_are_trained_as_records_to_the_bit(engine: str, kind: str):
    data = visits(PLAIN)
    data = dataclasses.replace(data, person=np.arange(len(SIZES)))
    dataset = data.columns if kind == "columns" else Augmented(data)
    of_records = epsilons.Budgets(np.resize([1.0, 4.0], len(SIZES)), delta=1e-5)
    common = {"engine": engine, "dataset": dataset, "largest": 3}
    as_persons = trained(data, rows_per_person=7, **common)
    assert as_persons == trained(data, budgets=of_records, persons=None, plan=a_plan(people=of_records), **common)
    assert as_persons != bits(a_model())


def test_a_seed_gives_persons_of_one_row_the_key_of_records():
    data = dataclasses.replace(visits(PLAIN), person=np.arange(len(SIZES)))
    of_records = epsilons.Budgets(np.resize([1.0, 4.0], len(SIZES)), delta=1e-5)
    as_records = trained(data, budgets=of_records, persons=None, plan=a_plan(people=of_records), seed=1)
    assert trained(data, seed=1) == as_records


def test_a_seed_s_key_depends_on_persons_rows_and_views():
    others = dataclasses.replace(DATA, person=np.roll(DATA.person, 1))
    keys = set()
    for data, options in [(DATA, {}), (others, {}), (DATA, {"rows_per_person": 2}), (DATA, {"views": 2})]:
        with private_over(data, a_model(), seed=1, **options) as private:
            keys.add(private._draws.randomness.key)
    assert len(keys) == 4


@pytest.mark.parametrize("largest", [4, 5, 11, 400])
def test_the_size_of_physical_batches_changes_neither_rows_nor_sums(largest: int):
    one, other = run(DATA, rows_per_person=4, largest=largest), run(DATA, rows_per_person=4, largest=60)
    assert one.seen == other.seen
    assert np.allclose(one.sums, other.sums, atol=1e-12)


def test_numbers_of_rows_and_views_may_be_numpy_s(tmp_path: Path):
    plain = trained(DATA, rows_per_person=2, views=2, run_dir=tmp_path / "plain")
    assert trained(DATA, rows_per_person=np.int64(2), views=np.int32(2), run_dir=tmp_path / "numpy") == plain


def test_losses_are_one_per_row_and_view():
    model = a_model()
    with private_over(DATA, model, rows_per_person=2, views=3) as private:
        for batch in private.batches:
            assert len(batch[0]) % 3 == 0 or private.is_check
            with pytest.raises(epsilons.errors.ModelError, match="one loss per record"):
                private.backward(losses_of(model, batch)[:-1])
            break


# -- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_view_of_a_data_set_is_read_under_its_own_seed(num_workers: int):
    """The first view is today's reading; each of the others differs, and a run is the same when it is repeated."""
    make = {"dataset": Augmented(DATA), "performance": epsilons.Performance(num_workers=num_workers)}
    one, two, again = (run(DATA, views=k, rows_per_person=2, **make) for k in (1, 2, 2))
    assert two.seen == again.seen
    for step in range(STEPS):
        assert two.seen[step][::2] == one.seen[step]
        assert len(set(two.seen[step])) == 2 * len(one.seen[step])


def test_records_without_persons_have_views_too():
    data = visits(PLAIN)
    of_records = epsilons.Budgets(np.resize([1.0, 4.0], len(SIZES)), delta=1e-5)
    make = {"budgets": of_records, "persons": None, "plan": a_plan(people=of_records), "dataset": Augmented(data)}
    one, three = run(data, **make), run(data, views=3, **make)
    for step in range(STEPS):
        assert len(three.seen[step]) == 3 * len(drawn(step))
        assert three.seen[step][::3] == one.seen[step]
        assert np.linalg.norm(three.sums[step]) <= sum(NORMS[p % 2] for p in drawn(step)) * (1 + 1e-9)


def test_augmentation_of_a_row_does_not_depend_on_other_persons_rows():
    who = 1
    without = DATA.without(who)
    whole, less = (run(d, dataset=Augmented(d), rows_per_person=3, views=2) for d in (DATA, without))
    mine = set((DATA.numbers[DATA.rows_of(who)] % 2**20).tolist())
    for step in range(STEPS):
        assert [n for n in whole.seen[step] if n % 2**20 not in mine] == less.seen[step]


# -- gradients that are not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("broken", [(1,), (1, 4, 10), tuple(range(len(SIZES)))], ids=["one", "some", "all"])
def test_a_person_with_one_broken_row_adds_nothing_and_others_are_exact(engine: str, broken: tuple[int, ...]):
    """One row of each broken person is not a number; every row of theirs is left out with it."""
    inputs = DATA.inputs.clone()
    for person in broken:
        inputs[DATA.rows_of(person)[-1:], 1] = torch.nan
    data = dataclasses.replace(DATA, inputs=inputs)
    given = {"engine": engine, "rows_per_person": 50, "largest": 200}
    handed: list[list[int]] = []
    model, trace = a_model(), Trace()
    with private_over(data, model, **given) as private:
        watch(private, trace, handed)
        for batch in private.batches:
            if not private.is_check and private._issued.is_whole and not private._issued.masked:
                handed.append(batch[2].tolist())
            private.backward(losses_of(model, batch))
            private.step()
    for step in range(STEPS):
        by_person = rows_seen(data, trace.seen[step])
        whole = [p for p in by_person if p not in broken]
        expected = sum((clipped(data, p, by_person[p]) for p in whole), np.zeros_like(trace.sums[step]))
        assert np.abs(trace.sums[step] - expected).max() <= 1e-6


# -- cut off and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "rows_per_person", "views"), [("ghost", 4, 2), ("vmap", 1, 1), ("loop", 50, 1)])
def test_a_run_that_is_cut_off_and_resumed_has_the_same_bits(
    engine: str, rows_per_person: int, views: int, tmp_path: Path
):
    options: dict[str, Any] = {"engine": engine, "rows_per_person": rows_per_person, "views": views, "largest": 100}
    options["dataset"] = Augmented(DATA)
    whole = trained(DATA, **options)
    kept = options | {"run_dir": tmp_path / "run", "checkpoint_every": 2}
    trained(DATA, until=5, **kept)
    model = a_model()
    assert trained(DATA, model, resume=True, **kept) == whole
    assert {line["epoch"] for line in lines(tmp_path / "run") if "epoch" in line} == {0}, "one key"


def test_a_run_is_not_resumed_with_rows_of_other_persons(tmp_path: Path):
    run_dir = tmp_path / "run"
    trained(DATA, until=3, run_dir=run_dir)
    moved = dataclasses.replace(DATA, person=np.roll(DATA.person, 1))
    with pytest.raises(DataError, match="belong to other persons"):
        trained(moved, run_dir=run_dir, resume=True)
    with private_over(DATA, a_model(), lr=0.5, run_dir=run_dir, resume=True) as private:
        assert private.ledger.epoch == 0
    with private_over(DATA, a_model(), lr=0.5, run_dir=run_dir, resume=True, rows_per_person=2) as private:
        assert private.ledger.epoch == 1, "other rows under the same noise: another key"


def test_no_file_that_is_kept_depends_on_numbers_of_rows(tmp_path: Path):
    """But for the updates: a run without one person's 50 rows leaves the same settings, plan and ledger."""
    written = []
    for data in (DATA, DATA.without(1)):
        run_dir = tmp_path / str(len(written))
        trained(data, run_dir=run_dir, rows_per_person=2, checkpoint_every=10**6)
        ledger = [
            {k: v for k, v in row.items() if k not in ("update", "prev", "hash", "file")} for row in lines(run_dir)
        ]
        files = {p.name: without_times(json.loads(p.read_text())) for p in run_dir.glob("*.json")}
        written.append((ledger, files))
    assert written[0] == written[1]
    assert {"run.json", "plan.json"} <= {*written[0][1]}


# -- loops of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_foreign_loop_makes_the_sums_of_a_loop_with_losses_by_row(reduction: str):
    own = run(DATA, rows_per_person=5, views=2, largest=30)
    model, trace, handed = a_model(), Trace(), []
    private = private_over(DATA, model, rows_per_person=5, views=2, largest=30)
    watch(private, trace, handed)
    with ForeignLoop(private, reduction) as loop:
        for x, y, numbers in loop.batches:
            handed.append(numbers.tolist())
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            loop.step()
    assert trace.seen == own.seen
    assert np.allclose(trace.sums, own.sums, atol=1e-9)


def opacus(data: Visits, batch: int = 7, **options: Any) -> tuple[epsilons.Plan, nn.Module, epsilons.Budgets]:
    """Two epochs of a loop written for Opacus."""
    ids = [f"person {p}" for p in data.person]
    people = epsilons.Budgets.by_person(np.where(data.person % 2, 4.0, 1.0), ids, delta=1e-3)
    model, inputs, targets = a_model(), data.inputs, data.targets
    engine = PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    module, wrapped, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=batch),
        target_epsilon=people, target_delta=None, epochs=2, max_grad_norm=0.5, seed=3, **options,
    )  # fmt: skip
    assert len(loader) == -(-len(people) // batch)
    for _ in range(2):
        for x, y in loader:
            wrapped.zero_grad()
            F.cross_entropy(module(x), y).backward()
            wrapped.step()
    assert engine.private.is_finished
    engine.close()
    return engine.private.plan, model, people


@pytest.mark.parametrize(("rows_per_person", "views"), [(1, 1), (4, 1), (2, 2)])
def test_the_opacus_door_makes_the_sums_of_our_own_loop_over_persons(rows_per_person: int, views: int):
    of_persons = {"persons": [f"person {p}" for p in DATA.person], "rows_per_person": rows_per_person, "views": views}
    made, model, people = opacus(DATA, **of_persons)
    draws = -(-len(people) // 7)
    plan = epsilons.plan(people, epsilons.Recipe(2 * draws, len(people) / draws, 0.5), "scale", "rdp")
    assert plan.digest == made.digest
    own = a_model()
    with make_flat(
        own,
        torch.optim.SGD(own.parameters(), lr=0.5),
        (DATA.inputs, DATA.targets),
        plan,
        budgets=people,
        seed=3,
        metadata={"training": {"loss_reduction": "mean"}},
        performance=epsilons.Performance(max_physical_batch=500),
        **of_persons,
    ) as private:
        for batch in private.batches:
            private.backward(losses_of(own, batch))
            private.step()
    assert np.allclose(bits(own), bits(model), atol=1e-9)


def test_nothing_that_the_opacus_door_publishes_depends_on_numbers_of_rows(tmp_path: Path):
    """Number of steps, expected batch and settings are public, and rows per person are not."""
    made, kept = [], []
    for times in (1, 3):
        sizes = tuple(1 if times == 1 else 1 + person % times for person in range(len(SIZES)))
        data = visits(sizes)
        data = dataclasses.replace(data, person=np.sort(data.person))  # the same order of persons in both
        plan, _, _ = opacus(data, run_dir=tmp_path / str(times))
        made.append(plan)
        kept.append(without_times(json.loads((tmp_path / str(times) / "run.json").read_text())))
    assert made[0].digest == made[1].digest
    assert kept[0] == kept[1]


def test_an_opacus_loop_without_budgets_takes_no_persons():
    model = a_model()
    loader = DataLoader(TensorDataset(DATA.inputs, DATA.targets), batch_size=7)
    with pytest.raises(InputError, match="make_private_with_epsilon with target_epsilon=Budgets"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, persons=DATA.person,
        )  # fmt: skip


def test_fit_trains_persons_as_a_loop_of_ones_own_does():
    model = a_model().float()
    people = epsilons.Budgets.by_person(np.where(DATA.person % 2, 4.0, 1.0), DATA.person, delta=1e-3)
    plan = epsilons.plan(people, epsilons.Recipe(3, BATCH, 0.5), accountant="rdp")
    data = DATA.inputs.float(), DATA.targets
    epsilons.fit(
        model,
        epsilons.Records(data, persons=DATA.person, rows_per_person=3, views=2),
        plan,
        budgets=people,
        training=epsilons.Training(device="cpu"),
        seed=epsilons.Randomness.with_key(KEY),
    )
    plain = a_model().float()
    with epsilons.make_private(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
        epsilons.Records(data, rows_per_person=3, views=2),
        plan,
        budgets=people,
        seed=epsilons.Randomness.with_key(KEY),
    ) as private:
        for batch in private.batches:
            private.backward(losses_of(plain, batch))
            private.step()
    assert bits(model) == bits(plain)


def test_the_example_of_persons_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("EPSILONS_TINY", "1")
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "07_persons.py"))
    assert "2 views of each visit" in capsys.readouterr().out
