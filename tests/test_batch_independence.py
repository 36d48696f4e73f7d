"""The batch-independence check: families of what must be refused and what must not be, then programs as people write.

Each program was once let through although it mixes records, or refused although it does not. See also test_checks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import epsilons
import mixers
from epsilons import Budgets, Performance, Private, Recipe
from epsilons.errors import BatchDependenceError, ModelError
from epsilons.independence.comparison import BUCKETS, sketch
from functional import Model
from mixers import RECORDS, WORDS, Case, Rows, cross_entropy, over_rows, pad, refusal
from options import make_flat

# -- families ---------------------------------------------------------------------------------------------------------

FEATURES, CLASSES = 6, 3
Losses = Callable[[nn.Module, Any], Tensor]


def private_over(model: nn.Module, data: Any, steps: int = 5, batch: float = 24.0, **options: Any) -> epsilons.Private:
    """Over 40 records, with a learning rate of 0.1 unless an optimizer is given."""
    budgets = epsilons.Budgets([1.0, 2.0] * 20, delta=1e-5)
    recipe = epsilons.Recipe(steps=steps, batch_size=batch, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, accountant="rdp")
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return make_flat(model, optimizer, data, plan, budgets=budgets, seed=1, **options)


def train(
    model: nn.Module,
    data: Any,
    losses: Losses,
    during: Callable[[epsilons.Private], None] = lambda private: None,
    **options: Any,
) -> epsilons.Private:
    """Some steps; `during` is called after each update."""
    with private_over(model, data, **{"steps": 3} | options) as private:
        for batch in private.batches:
            private.backward(losses(model, batch))
            if private.step():
                during(private)
    return private


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, FEATURES, generator=generator), torch.randint(CLASSES, (40,), generator=generator)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def refused(words: str, losses: Losses, data: Any = None, model: nn.Module | None = None, **options: Any) -> str:
    """The training is refused with these words (a pattern); returns the whole message."""
    with pytest.raises(BatchDependenceError, match=words) as caught:
        train(model or linear(), rows() if data is None else data, losses, **options)
    return str(caught.value)


# -- generated cases --------------------------------------------------------------------------------------------------

SHARE = [300, 301, 302, 303]


@pytest.mark.parametrize("number", SHARE)
def test_a_generated_training_that_mixes_is_refused(number: int):
    case = mixers.mixing(number)
    assert mixers.refusal(case, seed=number), case.what


@pytest.mark.parametrize("number", SHARE)
def test_a_generated_training_that_does_not_mix_is_accepted(number: int):
    case = mixers.sound(number)
    assert mixers.refusal(case, seed=number) == "", case.what


@pytest.mark.slow
def test_of_200_generated_trainings_that_mix_199_are_refused():
    accepted = [number for number in range(200) if not mixers.refusal(mixers.mixing(number), seed=number)]
    assert len(accepted) <= 1, [mixers.mixing(number).what for number in accepted]


@pytest.mark.slow
def test_of_200_generated_trainings_that_do_not_mix_all_are_accepted():
    refused = {n: m for n in range(200) if (m := mixers.refusal(mixers.sound(n), seed=n))}
    assert not refused


# -- the number of records --------------------------------------------------------------------------------------------

SIZES: dict[str, Callable[[Tensor], Any]] = {
    "divided": lambda x: 1 / len(x),
    "even only": lambda x: len(x) % 2 == 0,
    "a power": lambda x: (64 / x.shape[0]) ** 4,
    "a threshold": lambda x: 2.0 if x.size(0) > 3 else 1.0,
    "ones summed": lambda x: 1 / torch.ones_like(x[:, 0]).sum(),
    "ones made": lambda x: 1 / torch.ones(len(x)).sum(),
    "a mask summed": lambda x: 1 / (x[:, 0] < 1e9).sum(),
    "a tensor": lambda x: torch.tensor(1.0 / len(x)),
    "a tensor of many": lambda x: torch.full((12,), 1 / len(x)).sum(),
    "its last place": lambda x: torch.arange(len(x))[-1] / 10,
    "each place": lambda x: torch.arange(len(x)) / 10,
    "entries": lambda x: x.numel() / 100,
}


@pytest.mark.parametrize("dropout", [1e-9, *(pytest.param(p, marks=pytest.mark.slow) for p in (None, 0.5))])
@pytest.mark.parametrize("size", SIZES)
def test_losses_that_depend_on_the_number_of_records_are_refused(size: str, dropout: float | None):
    """Random operators hide nothing: dropout of no effect switched the check off once."""
    model = linear() if dropout is None else nn.Sequential(nn.Dropout(dropout), linear())
    words = r"number of records|depend on one another|moved the losses"
    refused(words, lambda m, b: each(m, b) * SIZES[size](b[0]), model=model)


def test_the_message_names_the_operator_its_line_and_both_numbers():
    words = r"operator div at test_batch_independence.py:\d+ gets (\d+) for one and"
    assert "private.step()" in refused(words, lambda m, b: each(m, b) / len(b[0]))
    words = r"operator mean at test_batch_independence.py:\d+ computes across records"
    refused(words, lambda m, b: each(m, (b[0] - b[0].mean(0), b[1])))


def test_what_is_only_logged_may_depend_on_the_number_of_records():
    seen: list[float] = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        seen.append(float((outputs.argmax(1) == batch[1]).sum() / len(batch[1])))
        return F.cross_entropy(outputs, batch[1], reduction="none") * 2

    train(linear(), rows(), losses)
    assert seen


# -- hidden by size, or by rarity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "outlier"), [("centred", 0.0), ("gradient", 1e3), ("centred", 1e7), ("gradient", 1e10)]
)
def test_one_record_far_from_all_others_hides_no_mixing_among_them(outlier: float, how: str):
    x, y = rows()
    x[7, 0] = 50.0
    users = torch.arange(40)
    users[20:30] = 5

    def losses(model: nn.Module, batch: Any) -> Tensor:
        x, y, users = batch
        z = model(x)
        own = users == 5
        mean = (z * own[:, None]).sum(0) / 10
        moved = z - mean if how == "centred" else z + (mean - mean.detach())
        found = F.cross_entropy(torch.where(own[:, None], moved, z), y, reduction="none")
        return found + torch.where(x[:, 0] > 40, outlier, 0.0)

    refused("", losses, (x, y, users))


def test_a_gate_of_tensors_that_never_fired_is_refused():
    """No value shows it; the operator does."""

    def gated(model: nn.Module, batch: Any) -> Tensor:
        return each(model, batch) * torch.where(batch[0].max() > 1e6, 2.0, 1.0)

    refused("operator max at", gated)


def test_the_number_of_records_in_the_gradient_alone_is_refused():
    def scaled(model: nn.Module, batch: Any) -> Tensor:
        found = each(model, batch)
        return found.detach() + len(found) * (found - found.detach())

    refused(r"operator mul at .* gets \d+ for one", scaled)


@pytest.mark.parametrize("read", ["asserted", "logged", "both"])
def test_a_value_that_python_reads_and_does_not_use_hides_no_number_of_records(read: str):
    """A check that is switched off by an innocent line of code is none."""
    shown: list[float] = []

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        if read in ("asserted", "both"):
            assert torch.isfinite(batch[0]).all()
        if read in ("logged", "both"):
            shown.append(batch[0].mean().item())
        found = each(model, batch)
        return found.detach() + len(found) * (found - found.detach())

    refused("number of records", scaled)


def test_an_outlier_hides_nothing_where_losses_alone_tell():
    """Values go through Python, one record's loss is 1e10, and its gradient is its own size."""
    x, y = rows()
    x[7, 0] = 1e5

    def losses(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        inputs = x.numpy().copy()
        usual = inputs[:, 0] < 1e4
        inputs[usual] -= 0.3 * inputs[usual].mean(0)
        outlier = torch.where(x[:, 0] > 1e4, 1e10, 0.0)
        return each(model, (torch.from_numpy(inputs).clamp(-9, 9), y)) + outlier

    refused("moved the losses", losses, (x, y))


def test_a_few_records_that_meet_through_values_python_reads_are_found():
    """No operator shows it; any two records are in different halves of some form."""
    x, y = rows()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        inputs, pair = batch[0][:, :-1].numpy(), batch[0][:, -1:].numpy()
        mean = (inputs * pair).sum(0) / (pair.sum() + 1e-9)
        return each(model, (torch.from_numpy(inputs + pair * (mean - inputs)), batch[1]))

    for one, other in [(0, 1), (7, 8), (14, 15), (21, 39), (28, 29), (35, 36)]:
        named = torch.zeros(40, 1)
        named[[one, other]] = 1.0
        refused("moved the", losses, (torch.cat([x, named], 1), y), steps=1, batch=40.0)


@pytest.mark.parametrize("sizes", [(5,), (3, 4_000), (1_000, 2 * BUCKETS + 77, 3)])
def test_a_sketch_shows_differences_that_a_sum_would_not(sizes: tuple[int, ...]):
    """The oracle is the whole difference. That of a model with one row of numbers is exact."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    total = sum(sizes)
    flat = torch.randn(total, generator=torch.Generator().manual_seed(0))
    few = [torch.zeros(total) for _ in range(3)]
    few[0][[0, total - 1]] = torch.tensor([1.0, -1.0])
    for change in few[1:]:
        change[:: max(1, total // 7)] = torch.rand(len(change[:: max(1, total // 7)]))
    if total > BUCKETS:
        few += [torch.full((total,), 1e-3), torch.arange(total) % 2 - 0.5]
        few.append(torch.cat([flat[:BUCKETS], -flat[:BUCKETS], torch.zeros(total - 2 * BUCKETS)]))  # rows that cancel
    sketched = sketch([*torch.split(flat, sizes)], parameters)
    for change in few:
        other = sketch([*torch.split(flat + change, sizes)], parameters)
        found, whole = float((sketched - other).norm()), float(change.double().norm())
        assert found == pytest.approx(whole, rel=1e-6 if total <= BUCKETS else 0.01)
    none = [None, *torch.split(flat, sizes)[1:]]
    zero = [torch.zeros(sizes[0]), *torch.split(flat, sizes)[1:]]
    assert torch.equal(sketch(none, parameters), sketch(zero, parameters))


def test_a_decision_by_several_records_is_refused_though_it_was_always_the_same():
    def gated(model: nn.Module, batch: Any) -> Tensor:
        scale = 1.0
        if batch[0].max() > 1e6:
            scale = 2.0
        return each(model, batch) * scale

    refused(r"test_batch_independence.py:\d+ decides by values of several records", gated)


def test_an_assertion_a_raise_and_a_number_that_is_only_shown_decide_nothing():
    shown: list[float] = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        assert torch.isfinite(batch[0]).all()
        if batch[0].isnan().any():
            raise ValueError
        shown.append(batch[0].mean().item())
        return each(model, batch)

    train(linear(), rows(), losses)


# -- collate functions ------------------------------------------------------------------------------------------------


def texts(lengths: list[int]) -> mixers.Rows:
    """Records of the given lengths."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 30, (n,), generator=generator) for n in lengths]
    return mixers.Rows((rows, [index % CLASSES for index in range(len(rows))]))


def padded(records: list[Any], to: int = 1, left: bool = False) -> tuple[Tensor, Tensor]:
    longest = -(-max(len(text) for text, _ in records) // to) * to
    rows = [F.pad(t, (longest - len(t), 0) if left else (0, longest - len(t))) for t, _ in records]
    return torch.stack(rows), torch.tensor([y for _, y in records])


def reader(masked: bool, dropout: float = 0.0) -> nn.Module:
    """Reads padding, or does not."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        mask, words = (x > 0)[:, :, None], model.drop(model.table(x))
        return model.head((words * mask).sum(1) / mask.sum(1) if masked else words.mean(1))

    torch.manual_seed(0)
    return Model(compute, table=nn.Embedding(30, 8), drop=nn.Dropout(dropout), head=nn.Linear(8, CLASSES))


@pytest.mark.parametrize(
    ("lengths", "left", "dropout"),
    [("any", False, 0.1), ("mostly full", True, 0.0), pytest.param("any", True, 0.0, marks=pytest.mark.slow),
     pytest.param("mostly full", False, 0.1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_padding_that_is_read_is_refused_at_once_with_both_lengths(lengths: str, left: bool, dropout: float):
    sizes = [3 + i % 9 for i in range(40)] if lengths == "any" else [12] * 36 + [4, 7, 9, 11]
    collate = lambda records: padded(records, left=left)  # noqa: E731
    words = r"collate function .*lambda.* pads \d+ → 1[12], and .* reads the padding"
    assert "mask" in refused(words, each, texts(sizes), reader(False, dropout), batch=40.0, collate_fn=collate)
    train(reader(True, dropout), texts(sizes), each, batch=40.0, collate_fn=collate)


def test_padding_is_noticed_at_the_first_draw_in_which_lengths_differ():
    """The first draws hold texts of one length; the odd ones come later, at a step at which no check is due."""
    options = {"steps": 60, "batch": 2.0, "collate_fn": padded}
    sizes, done = [12] * 39 + [4], []
    refused("pads 4 → 12", each, texts(sizes), reader(False), during=lambda p: done.append(1), **options)
    with private_over(reader(False), texts(sizes), **options) as private:
        before = [a for a in private._physical_batches() if len(a.indices)]
    met = next(n for n, a in enumerate(before) if 39 in a.indices and len(a.indices) > 1)
    assert len(done) == met > 1


@pytest.mark.parametrize(
    ("how", "num_workers"), [("sorted", 0), ("centred", 0), ("by number", 0), ("shuffled", 0), ("centred", 1)]
)
def test_a_collate_function_in_which_records_meet_is_named(how: str, num_workers: int):
    def collate(records: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*records, strict=True))
        if how in ("sorted", "shuffled"):
            order = x[:, 0].argsort() if how == "sorted" else torch.randperm(len(x))
            return x[order], y[order]
        return (x - x.mean(0), y) if how == "centred" else (x / len(x), y)

    collate.__qualname__ = "my_collate"
    words = r"function my_collate (gives a record other values|computes across records, by the operator mean)"
    refused(words, each, mixers.Rows(rows()), collate_fn=collate, num_workers=num_workers)


@pytest.mark.parametrize("to", [8, 16])
def test_padding_to_a_multiple_with_a_mask_and_random_augmentation_are_welcome(to: int):
    def collate(records: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = padded(records, to)
        return torch.where((x > 0) & (torch.rand(x.shape) < 0.2), 1, x), y

    train(reader(True), texts([3 + i % 9 for i in range(40)]), each, steps=12, collate_fn=collate)


# -- the loop ----------------------------------------------------------------------------------------------------


def test_a_check_is_marked_as_one_leaves_no_trace_and_repeats_in_every_run():
    """It is part of no release, but a run that continues must not stop where the first did not."""
    runs = []
    for _ in range(2):
        kinds: list[tuple[bool, int]] = []
        with private_over(linear(), rows()) as private:
            assert not private.is_check
            for batch in private.batches:
                kinds.append((private.is_check, len(batch[0])))
                private.backward(each(private.model, batch))
                private.step()
            assert not private.is_check
        runs.append(kinds)
    assert [is_check for is_check, _ in kinds].count(False) == 5
    assert {size for is_check, size in kinds if is_check} >= {1}
    assert runs[0] == runs[1]


@pytest.mark.parametrize("with_close", [True, False])
def test_an_error_in_the_loop_leaves_no_mode_behind(with_close: bool):
    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("by the loop")

    if with_close:
        with pytest.raises(RuntimeError, match="by the loop"):
            train(linear(), rows(), fails)
    else:
        for _ in private_over(linear(), rows()).batches:
            break
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()


# -- outside the update -----------------------------------------------------------------------------------------------


def _raw_step(private: epsilons.Private) -> None:
    other = torch.optim.SGD(private.model.parameters(), lr=0.1)
    each(private.model, rows(5)).mean().backward()
    other.step()
    other.zero_grad()


def _by_data(private: epsilons.Private) -> None:
    private.model.weight.data -= rows(5)[0].mean(0)


def _swapped(private: epsilons.Private) -> None:
    private.model.weight.data[[0, 1]] = private.model.weight.data[[1, 0]]


def _one_value(private: epsilons.Private) -> None:
    private.model.bias.data[1] = torch.nextafter(private.model.bias.data[1], torch.tensor(9.0))


WRITES = {"second optimizer": _raw_step, ".data": _by_data, "swapped": _swapped, "one bit": _one_value}


def _run(private: epsilons.Private, write: Callable[[epsilons.Private], None], when: str) -> None:
    """Writes after the second update, in the loop or in a listener; or in the first draw, before or after step()."""
    if when == "a listener":
        private.on_update(lambda p: write(p) if p.updates == 2 else None)
    for batch in private.batches:
        private.backward(each(private.model, batch))
        if when == "the first draw" and not private.is_check:
            write(private)
        if private.step():
            if when == "the loop" and private.updates == 2:
                write(private)
        elif when == "between two physical batches" and not private.is_check:
            write(private)


@pytest.mark.parametrize(
    ("how", "when"),
    [*((how, "the loop") for how in WRITES), ("one bit", "a listener"), (".data", "the first draw"),
     (".data", "between two physical batches")],
)  # fmt: skip
def test_parameters_that_something_else_wrote_to_stop_the_next_update(how: str, when: str):
    model = linear()
    model.bias.data += 0.1
    private = private_over(model, rows(), max_physical_batch=8 if when.startswith("between") else "auto")
    with private, pytest.raises(ModelError, match=r"(weight|bias).* changed between two updates"):
        _run(private, WRITES[how], when)
    assert private.updates == (2 if when in ("the loop", "a listener") else 0)


def test_a_write_after_the_last_update_is_noticed_too():
    with pytest.raises(ModelError, match="changed between two updates"):
        _run(private_over(linear(), rows(), steps=2), _by_data, "the loop")


def test_buffers_are_watched_like_parameters():
    model = linear()
    model.register_buffer("centre", torch.zeros(FEATURES))
    with pytest.raises(ModelError, match="centre changed between two updates"):
        _run(private_over(model, rows()), lambda p: p.model.centre.copy_(rows(3)[0].mean(0)), "the loop")


@pytest.mark.parametrize("way", ["a checkpoint that is due", "closing", "closing in a draw"])
def test_no_checkpoint_keeps_what_something_else_wrote(tmp_path, way: str):
    """A run that continues from there would have learnt it."""
    options = {"run_dir": tmp_path / "run", "checkpoint_every": 1 if way.startswith("a checkpoint") else 100}
    clean: list[Tensor] = [linear().weight]
    with suppress(ModelError), private_over(linear(), rows(), resume=False, **options) as private:
        for batch in private.batches:
            private.backward(each(private.model, batch))
            if way == "closing in a draw" and private.updates == 2 and not private.is_check:
                _by_data(private)
                break
            if private.step():
                clean.append(private.model.weight.detach().clone())
                if private.updates == 2 and way != "closing in a draw":
                    _by_data(private)
                    if way == "closing":
                        break
    with private_over(linear(), rows(), resume=True, **options) as private:
        assert any(torch.equal(private.model.weight, one) for one in clean[:3])


def test_a_projection_after_each_update_and_a_swap_that_is_undone_are_accepted():
    model = linear()
    average = torch.optim.swa_utils.AveragedModel(model)

    def during(private: epsilons.Private) -> None:
        average.update_parameters(model)
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())  # to evaluate the average
        model.load_state_dict(state)

    class Projected(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            with torch.no_grad():
                model.weight.clamp_(-0.1, 0.1)
            return result

    train(model, rows(), each, during, optimizer=Projected(model.parameters(), lr=5.0))
    assert model.weight.abs().max() <= 0.1


class _Patient:
    """A scheduler of one's own that takes a loss."""

    def step(self, loss: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, lambda _: _Patient()])
def test_schedules_that_follow_a_metric_are_refused_with_the_lesson(kind: Callable[[Any], Any]):
    with (
        private_over(linear(), rows()) as private,
        pytest.raises(ModelError, match=r"takes a metric at each step.*fixed beforehand"),
    ):
        private.register_for_checkpointing(schedule=kind(private.optimizer))
    plan, budgets = private.plan, epsilons.Budgets([1.0, 2.0] * 20, delta=1e-5)
    with pytest.raises(ModelError, match="takes a metric"):
        epsilons.fit(linear(), rows(), plan, budgets=budgets, training=epsilons.Training(scheduler=kind))
    epsilons.fit(
        linear(),
        rows(),
        plan,
        budgets=budgets,
        training=epsilons.Training(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)),
    )


# -- programs as people write them ------------------------------------------------------------------------------------

STEPS = 2  # checks at both, with coins that fall either way

LossesOf = Callable[[Any, Any], Tensor]


def _small() -> nn.Module:
    """Features or words to classes."""
    layers = {"body": nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))}
    layers |= {"table": nn.Embedding(WORDS, 8), "rnn": nn.GRU(8, 8, batch_first=True), "head": nn.Linear(8, CLASSES)}
    return Model(lambda model, x: model.body(x), **layers, biggest=0.0)


def _columns() -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=numbers)
    return (
        x,
        torch.randint(CLASSES, (RECORDS,), generator=numbers),
        torch.randint(8, (RECORDS,), generator=numbers),
    )


def _refusal(losses: LossesOf, collate: Callable[[list[Any]], Any] | None = None, data: Any = None, batch=8.0) -> str:
    torch.manual_seed(0)
    data = data if data is not None else _columns() if collate is None else Rows(_columns())
    return refusal(Case("", _small(), data, losses, collate, batch), STEPS)


def _texts() -> Rows:
    return mixers.texts(torch.Generator().manual_seed(2), 14, 0.1)


def _table(programs: list[Any]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.__name__.strip("_"))


# -- losses that mix: most of them act on data that these records do not hold ----------------------------------------


def _columns_renormed(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model(torch.renorm(batch[0], 2, 1, 50.0)), batch[1])


def _biggest(x: Tensor) -> float:
    return x.abs().max().item()


def _doubled(losses: Tensor, size: float) -> Tensor:
    return losses * 2 if size > 50 else losses


def _value_by_helpers(model: Any, batch: Any) -> Tensor:
    size = _biggest(batch[0])
    return _doubled(over_rows(model, batch), size)


def _clamped_in_numpy(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) / float(np.clip(batch[0].abs().numpy().max(), 50.0, None))


def _attribute(model: Any, batch: Any) -> Tensor:
    model.biggest = batch[0].abs().max().item()
    return over_rows(model, batch) * (2.0 if model.biggest > 50 else 1.0)


def _rounded_down(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) * (1 + int(batch[0].abs().max().item() // 50))


def _any_of_a_list(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) * (2.0 if any(v > 50 for v in batch[0].flatten().tolist()) else 1.0)


def _numpy_in_place(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone()
    values = x.numpy()
    values -= np.maximum(values.max() - 50, 0)
    return cross_entropy(model(x), batch[1])


def _coin_above(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    return cross_entropy(model((x + x.flip(0)) / 2 if torch.rand(1).item() > 0.999 else x), batch[1])


def _kernel_over_records(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    moved = F.conv1d(x.T[None], torch.ones(FEATURES, FEATURES, 3), padding=1)[0].T
    return cross_entropy(model(x + (moved - 500).clamp_min(0)), batch[1])


def _channels_are_records(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    moved = F.conv1d(x[None], torch.ones(len(x), len(x), 1))[0]
    return cross_entropy(model(x + (moved - 500).clamp_min(0)), batch[1])


def _number_that_was_not_drawn(model: Any, batch: Any) -> Tensor:
    """About 24 records are drawn, and sometimes more than 40."""
    return over_rows(model, batch) * (2.0 if len(batch[0]) > 40 else 1.0)


@_table([
    _number_that_was_not_drawn, _columns_renormed, _value_by_helpers, _clamped_in_numpy, _attribute, _rounded_down,
    _any_of_a_list, _numpy_in_place, _coin_above, _kernel_over_records, _channels_are_records,
])  # fmt: skip
def test_a_loss_that_mixes_records_is_refused(program: LossesOf) -> None:
    found = _refusal(program, batch=24.0)
    assert found.startswith("BatchDependenceError")
    assert "test_batch_independence.py:" in found  # the line


# -- losses that do not ----------------------------------------------------------------------------------------------


def _weights_by_numpy(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) * torch.tensor(np.where(batch[1].numpy() == 0, 2.0, 1.0)).float()


def _class_by_class(model: Any, batch: Any) -> Tensor:
    found = over_rows(model, batch)
    for c in batch[1].unique():
        found = torch.where(batch[1] == c, found * (1 + float(c)), found)
    return found


def _gradient_penalty(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return cross_entropy(outputs, batch[1]) + 0.1 * slope.square().sum(1)


def _variational(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    drawn = torch.distributions.Normal(outputs, F.softplus(outputs) + 0.1).rsample()
    return cross_entropy(drawn, batch[1])


def _stochastic_depth(model: Any, batch: Any) -> Tensor:
    keep = batch[0].new_empty((len(batch[0]), 1)).bernoulli_(0.8) / 0.8
    return cross_entropy(model(batch[0] * keep), batch[1])


def _coin_per_record(model: Any, batch: Any) -> Tensor:
    rows = [x.flip(0) if torch.rand(1) < 0.5 else x for x in batch[0]]
    return torch.stack([cross_entropy(model(x[None]), y[None])[0] for x, y in zip(rows, batch[1], strict=True)])


def _index_copy(model: Any, batch: Any) -> Tensor:
    outputs = torch.zeros(len(batch[0]), CLASSES)
    return cross_entropy(outputs.index_copy(0, torch.arange(len(outputs)), model(batch[0])), batch[1])


def _rows_renormed(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model(torch.renorm(batch[0], 2, 0, 2.0)), batch[1])


def _a_column_as_a_list(model: Any, batch: Any) -> Tensor:
    """Of one record, its values lie at strides of their own."""
    return over_rows(model, batch) * torch.tensor([1 + abs(v) for v in batch[0][:, 1].tolist()])


@_table([
    _weights_by_numpy, _class_by_class, _gradient_penalty, _variational, _stochastic_depth, _coin_per_record,
    _index_copy, _rows_renormed, _a_column_as_a_list,
])  # fmt: skip
def test_a_loss_that_keeps_records_apart_is_accepted(program: LossesOf) -> None:
    assert _refusal(program) == ""


@pytest.mark.parametrize("name", mixers.SOUND)
def test_every_sound_loss_of_the_generator_is_accepted(name: str) -> None:
    assert _refusal(lambda model, batch: mixers.SOUND[name](model, *batch)) == ""


@pytest.mark.parametrize("name", mixers.SPECIAL)
def test_every_special_loss_of_the_generator_is_refused(name: str) -> None:
    assert _refusal(lambda model, batch: mixers.SPECIAL[name](model, *batch)).startswith("BatchDependenceError")


def _cut_to_the_longest(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    lengths = (words != 0).sum(1)
    longest = int(lengths.max())
    mask = torch.arange(longest)[None] < lengths[:, None]
    return cross_entropy(model.head((model.table(words[:, :longest]) * mask[:, :, None]).sum(1)), classes)


def _lengths_as_a_list(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    lengths = (words != 0).sum(1).tolist()
    outputs = [model.head(model.table(row[:n]).mean(0)) for row, n in zip(words, lengths, strict=True)]
    return cross_entropy(torch.stack(outputs), classes)


def _packed_by_a_list(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    rows = model.table(words)
    packed = nn.utils.rnn.pack_padded_sequence(rows, (words != 0).sum(1).tolist(), True, enforce_sorted=False)
    return cross_entropy(model.head(model.rnn(packed)[1][-1]), classes)


def _sorted_and_back(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    lengths, order = (words != 0).sum(1).sort(descending=True)
    packed = nn.utils.rnn.pack_padded_sequence(model.table(words[order]), lengths, True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return cross_entropy(model.head(model.rnn(packed)[1][-1][back]), classes)


def _ragged_bags(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    counts = (words != 0).sum(1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    bags = F.embedding_bag(torch.cat([row[row != 0] for row in words]), model.table.weight, offsets, mode="mean")
    return cross_entropy(model.head(bags), classes)


def _nested(model: Any, batch: Any) -> Tensor:
    rows = torch.nested.nested_tensor([model.table(row[row != 0]) for row in batch[0]], layout=torch.strided)
    return cross_entropy(torch.stack([model.head(row.mean(0)) for row in rows.unbind()]), batch[1])


@_table([_cut_to_the_longest, _lengths_as_a_list, _packed_by_a_list, _sorted_and_back, _ragged_bags, _nested])
def test_a_loss_over_texts_that_reads_no_padding_is_accepted(program: LossesOf) -> None:
    assert _refusal(program, pad, _texts()) == ""


# -- collate functions -----------------------------------------------------------------------------------------------


def _stacked(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y, _ = zip(*records, strict=True)
    return torch.stack(x), torch.stack(y)


OWN = np.random.default_rng(0)


def _mixed_up_by_an_own_generator(records: list[Any]) -> Any:
    x, y = _stacked(records)
    return 0.7 * x + 0.3 * x[torch.from_numpy(OWN.permutation(len(x)))], y


class _RunningMean:
    """Holds what it saw from call to call."""

    def __init__(self) -> None:
        self.mean = torch.zeros(FEATURES)

    def __call__(self, records: list[Any]) -> Any:
        x, y = _stacked(records)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean, y


def _halved_when_large(records: list[Any]) -> Any:
    x, y = _stacked(records)
    if x.abs().max() > 50:
        x = x / 2
    return x, y


def _divided_when_large(records: list[Any]) -> Any:
    x, y = _stacked(records)
    return x / x.abs().max().clamp_min(50.0), y


def _divided_and_turned(records: list[Any]) -> Any:
    x, y = _divided_when_large(records)
    return x.T.contiguous().T, y


@pytest.mark.parametrize(
    "collate",
    [_mixed_up_by_an_own_generator, _RunningMean(), _halved_when_large, _divided_when_large, _divided_and_turned],
    ids=["own generator", "state", "gate", "bound", "turned"],
)
def test_a_collate_function_in_which_records_meet_is_refused(collate: Callable[[list[Any]], Any]) -> None:
    found = _refusal(over_rows, collate)
    assert found.startswith("BatchDependenceError")
    assert getattr(collate, "__qualname__", type(collate).__name__) in found


class _OwnNoise(Rows):
    """Never gives the same record twice."""

    numbers = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        x, *rest = super().__getitem__(index)
        return (x + 0.1 * torch.from_numpy(self.numbers.normal(size=FEATURES)).float(), *rest)


def test_a_data_set_that_never_repeats_does_not_hide_its_collate_function() -> None:
    def centred(records: list[Any]) -> Any:
        x, y = _stacked(records)
        return x - x.mean(0), y

    assert "centred" in _refusal(over_rows, centred, _OwnNoise(_columns()))
    assert _refusal(over_rows, _stacked, _OwnNoise(_columns())) == ""


def _noisy_by_an_own_generator(records: list[Any]) -> Any:
    x, y = _stacked(records)
    return x + 0.1 * torch.from_numpy(OWN.normal(size=x.shape)).float(), y


def test_a_collate_function_that_augments_by_an_own_generator_is_accepted() -> None:
    assert _refusal(over_rows, _noisy_by_an_own_generator) == ""


def _packed(records: list[Any]) -> Any:
    words, classes = zip(*records, strict=True)
    return nn.utils.rnn.pack_sequence(list(words), enforce_sorted=False), torch.stack(classes)


def _over_packed(model: Any, batch: Any) -> Tensor:
    packed, classes = batch
    return cross_entropy(model.head(model.rnn(packed._replace(data=model.table(packed.data)))[1][-1]), classes)


def _sorted(records: list[Any]) -> Any:
    order = sorted(range(len(records)), key=lambda i: -len(records[i][0]))
    return *pad([records[i] for i in order]), torch.tensor(order)


def _mean_of_words(model: Any, batch: Any) -> Tensor:
    words, classes, *_ = batch
    mask = (words != 0)[:, :, None]
    return cross_entropy(model.head((model.table(words) * mask).sum(1) / mask.sum(1)), classes)


def _put_back(model: Any, batch: Any) -> Tensor:
    found = _mean_of_words(model, batch)
    back = torch.empty_like(found)
    back[batch[2]] = found
    return back


def test_a_collate_function_may_pack_or_sort_where_the_losses_are_put_back() -> None:
    assert _refusal(_over_packed, _packed, _texts()) == ""
    assert _refusal(_put_back, _sorted, _texts()) == ""


def test_a_collate_function_that_sorts_is_named_where_no_loss_is_put_back() -> None:
    assert "_sorted" in _refusal(_mean_of_words, _sorted, _texts())


# -- what is left behind ---------------------------------------------------------------------------------------------


def _private() -> epsilons.training.Private:
    model, columns = _small(), _columns()
    budgets = epsilons.Budgets([1.0] * RECORDS, delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=24, clip_norm=1.0), accountant="rdp")
    return epsilons.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), columns, plan, budgets=budgets, seed=0
    )


def _fails(batches: Any) -> None:
    for _ in batches:
        raise ZeroDivisionError


def test_random_numbers_are_random_after_an_error_although_the_loop_is_kept() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    private = _private()
    kept = private.batches  # as a progress bar in a notebook keeps it
    with pytest.raises(ZeroDivisionError):
        _fails(kept)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)
    private.close()
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()


def test_modes_of_the_loop_s_own_are_left_where_they_are() -> None:
    private = _private()
    for batch in private.batches:
        own = torch.overrides.BaseTorchFunctionMode()
        with own:
            private.backward(over_rows(private.model, batch))
            assert _get_current_function_mode_stack() == [own]
        private.step()
    assert not _get_current_function_mode_stack()


# -- batches that are trained on: losses come from them, and follow no counter of batches -----------------------------

FEW = 24
Loop = Callable[[Private, nn.Module], None]


def train_by(loop: Loop, model: nn.Module, data: Any = None, at_once: int = 8, steps: int = 4) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(FEW, 4), torch.randint(0, 3, (FEW,))
    plan = epsilons.plan(
        Budgets([1.0] * FEW, delta=1e-5), Recipe(steps, float(FEW), 1.0), accountant="rdp", strategy="uniform"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with epsilons.make_private(
        model,
        optimizer,
        (x, y) if data is None else data,
        plan,
        budgets=Budgets([1.0] * FEW, delta=1e-5),
        seed=epsilons.Randomness.with_key(bytes(32)),
        performance=Performance(max_physical_batch=at_once),
    ) as private:
        loop(private, model)
        assert private.updates == steps


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


# -- another batch ------------------------------------------------------------------------------------------


def the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for batch in private.batches:
        own = batch if private.is_check or before is None else before
        private.backward(losses_of(model, *own))
        private.step()
        before = before if private.is_check else batch


def a_part_of_the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for x, y in private.batches:
        mixed = x if private.is_check or before is None else x + 0.1 * before
        private.backward(losses_of(model, mixed, y))
        private.step()
        before = before if private.is_check else x


def targets_of_the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for x, y in private.batches:
        private.backward(losses_of(model, x, y if private.is_check or before is None else before))
        private.step()
        before = before if private.is_check else y


def the_mean_of_the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for x, y in private.batches:
        losses = losses_of(model, x, y)
        private.backward(losses if private.is_check or before is None else losses * (1 + before.abs().mean()))
        private.step()
        before = before if private.is_check else x


def a_batch_of_ones_own(private: Private, model: nn.Module) -> None:
    own = torch.randn(FEW, 4), torch.randint(0, 3, (FEW,))
    for x, y in private.batches:
        chosen = (x, y) if private.is_check else tuple(t[: len(x)] for t in own)
        private.backward(losses_of(model, *chosen))
        private.step()


@pytest.mark.parametrize(
    "loop",
    [
        the_batch_before,
        a_part_of_the_batch_before,
        targets_of_the_batch_before,
        the_mean_of_the_batch_before,
        a_batch_of_ones_own,
    ],
)
def test_losses_of_another_batch_outside_of_checks_are_refused(loop: Loop):
    with pytest.raises(BatchDependenceError, match="the batch before"):
        train_by(loop, nn.Linear(4, 3))


def plain(private: Private, model: nn.Module) -> None:
    for x, y in private.batches:
        private.backward(losses_of(model, x, y))
        private.step()


def through_numpy(model: Any, x: Tensor) -> Tensor:
    """Operators show nothing of what NumPy computes: neither in checks nor in training."""
    return model.layer(torch.from_numpy(x.numpy() * 2))


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)),
    "noise": lambda: Model(lambda m, x: m.layer(x + 0.1 * torch.randn_like(x)), layer=nn.Linear(4, 3)),
    "one coin": lambda: Model(lambda m, x: m.layer(x.flip(1) if torch.rand(()) < 0.5 else x), layer=nn.Linear(4, 3)),
    "numpy": lambda: Model(through_numpy, layer=nn.Linear(4, 3)),
    "lstm": lambda: Model(
        lambda m, x: m.o(m.r(x[:, :, None])[0][:, -1]), r=nn.LSTM(1, 5, batch_first=True), o=nn.Linear(5, 3)
    ),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("at_once", [8, 24])
def test_sound_models_train(name: str, at_once: int):
    torch.manual_seed(1)
    train_by(plain, TRAINED[name](), at_once=at_once)


def test_watching_changes_no_draw_of_dropout():
    """A draw with a check is watched. Its update is that of the same losses by hand, under the same seeds."""
    seen: list[list[Tensor]] = []

    def loop(private: Private, model: nn.Module) -> None:
        for x, y in private.batches:
            outputs = model(x)
            if not private.is_check:
                seen[-1].append((outputs == 0).float().mean().detach())
            private.backward(F.cross_entropy(outputs, y, reduction="none"))
            private.step()

    for _ in range(2):
        seen.append([])
        torch.manual_seed(1)
        train_by(loop, nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.5)), steps=3)
    first, second = seen
    assert first == second
    assert all(0.4 < float(share) < 0.6 for share in first)


# -- counters -----------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A layer whose outputs may be scaled by a counter that the loop moves."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.layer, self.count, self.strength = nn.Linear(4, 3), 0, strength

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.strength * self.count)


def counting(private: Private, model: nn.Module) -> None:
    for x, y in private.batches:
        private.backward(losses_of(model, x, y))
        private.step()
        if not private.is_check:
            model.count += 1


def test_a_counter_of_batches_in_a_model_that_moves_losses_is_refused():
    with pytest.raises(BatchDependenceError, match=r"a counter, and how many batches.*private\.on_update"):
        train_by(counting, Counted(0.01))


def test_a_counter_of_batches_that_moves_no_loss_trains_and_counts_on():
    model = Counted(0.0)
    train_by(counting, model)
    assert model.count == 4 * FEW // 8


def test_a_counter_of_updates_that_moves_losses_trains():
    def by_updates(private: Private, model: nn.Module) -> None:
        private.on_update(lambda private: setattr(model, "count", private.updates))
        plain(private, model)

    train_by(by_updates, Counted(0.01))


class Cached(nn.Module):
    """Caches its positions, and how many they are: a number in an attribute that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.longest = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return self.layer(x / self.longest)


def test_a_number_that_forward_passes_set_from_shapes_trains():
    train_by(plain, Cached())
