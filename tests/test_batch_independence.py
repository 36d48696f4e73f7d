"""The batch-independence check, by families of what must be refused and what must not be; see also test_checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import epsilons
import mixers
from epsilons.errors import BatchDependenceError, ModelError
from functional import Model
from options import split

FEATURES, CLASSES = 6, 3
Losses = Callable[[nn.Module, Any], Tensor]


def private_over(model: nn.Module, data: Any, steps: int = 5, batch: float = 24.0, **options: Any) -> epsilons.Private:
    """Over 40 records, with a learning rate of 0.1 unless an optimizer is given."""
    budgets = epsilons.Budgets([1.0, 2.0] * 20, delta=1e-5)
    recipe = epsilons.Recipe(steps=steps, batch_size=batch, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, accountant="rdp")
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return epsilons.make_private(model, optimizer, data, plan, budgets=budgets, seed=1, **split(options))


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
        before = [a for a in private._parts.remaining(private._draws) if len(a.indices)]
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
        epsilons.fit(linear(), rows(), plan, budgets=budgets, scheduler=kind)
    epsilons.fit(linear(), rows(), plan, budgets=budgets, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2))
