"""What a compiled program depends on, what is refused, and what is compared with the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compiling import bounds_of, compiled, has_compiler, needs_compiler, of_model, quick, warnings  # noqa: F401
from epsilons.training.clipping.compiled import Compiled, programs
from functional import Model
from sums import any_case, attached, away, length
from zoo import Case, Doubled, build, clip_norms

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]


# -- what a program depends on ------------------------------------------------------------------------------


def smoothed() -> nn.Module:
    """A loss that is a module, with a number that may change."""

    def loss(own: nn.Module, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=own.smoothing)

    return Model(loss, smoothing=0.0)


def cooled() -> nn.Module:
    """A loss that reads its number from a tensor, which is no attribute."""
    temperature = torch.tensor(1.0)

    def loss(own: nn.Module, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) / float(own.read()), batch[1], reduction="none")

    return Model(loss, read=lambda: temperature)


class Listed(nn.Sequential):
    """A model with a number in a list, a number, a tensor and a mode."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.factors, self.temperature, self.shift = [1.0], 1.0, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x) * self.factors[0] / self.temperature + self.shift
        return outputs if self.training else 2 * outputs


def another_hook(model: nn.Module, loss: nn.Module) -> None:
    model[1]._forward_hooks.clear()
    model[1].register_forward_hook(lambda module, inputs, output: 3 * output)


CHANGES = {
    "a number of the loss": lambda model, loss: setattr(loss, "smoothing", 0.5),
    "a number of the model": lambda model, loss: setattr(model, "temperature", 0.1),
    "a number in a list": lambda model, loss: model.factors.__setitem__(0, 0.2),
    "a tensor": lambda model, loss: model.shift.add_(torch.tensor([0.0, 2.0, 0.0])),
    "a value that was read": lambda model, loss: loss.read().fill_(0.2),
    "a mode": lambda model, loss: model.eval(),
    "a hook": another_hook,
    "a layer": lambda model, loss: model.__setitem__(1, nn.SiLU()),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_under_a_program_compiles_another(what):
    torch.manual_seed(0)
    model = Listed(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].register_forward_hook(lambda module, inputs, output: 1.0 * output)
    loss = cooled() if what == "a value that was read" else smoothed()
    batch, clip_norm = (torch.randn(6, 5), torch.randint(0, 3, (6,))), bounds_of(6, 0.3)
    program = of_model(model, loss, 6)

    def both() -> tuple[list[Tensor] | None, list[Tensor]]:
        engine = attached("ghost", Case(model, lambda n: ()))
        engine.begin(6)
        return program.sums(batch, 6, clip_norm, clip_norm), engine.clipped_sum(
            loss(model, batch), clip_norm, clip_norm
        )

    for _ in range(3):
        ours, before = both()
        assert away(ours, before) <= 1e-6 * length(before)
    with torch.no_grad():  # parameters are arguments
        model[0].weight.mul_(0.5)
    ours, before = both()
    assert away(ours, before) <= 1e-6 * length(before)
    CHANGES[what](model, loss)
    ours, after = both()
    assert away(after, before) > 0.01 * length(before)
    assert away(ours, after) <= 1e-6 * length(after)
    assert not program.refused


def test_what_changes_again_and_again_is_left_to_the_engine(monkeypatch, caplog):
    monkeypatch.setattr(programs, "compile_graph", lambda graph, example: graph)
    model, loss = nn.Linear(5, 3), smoothed()
    batch, ones = (torch.randn(6, 5), torch.randint(0, 3, (6,))), bounds_of(6, 1.0)
    program = of_model(model, loss, 6)
    taken = []
    for number in range(2 * programs.MOST_PROGRAMS):
        loss.smoothing = number / 100
        taken.append(program.takes(6) and program.sums(batch, 6, ones, ones) is not None)
    assert taken == [True] * programs.MOST_PROGRAMS + [False] * programs.MOST_PROGRAMS
    assert ["change again and again" in message for message in warnings(caplog)] == [True]


@pytest.mark.usefixtures("quick")
def test_an_lstm_keeps_its_program(caplog):
    """Recording replaces its weights, and it renews attributes at its next forward pass."""
    case, ones = build("lstm, last output"), bounds_of(4, 1.0)
    program = compiled(case, records=4)
    for number in range(3):
        assert program.sums(case.batch(4, seed=number), 4, ones, ones) is not None
    assert len(program._programs) == 1


# -- what is refused ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A linear layer, and something that cannot be compiled."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what, self.calls = nn.Linear(6, 3), what, 0
        if what == "hook":

            def swap(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                output.register_hook(lambda gradient: gradient.flip(0))

            self.layer.register_forward_hook(swap)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        if self.what == "autograd function":
            return Doubled.apply(outputs)
        if self.what == "branch" and outputs.sum() > -1e9:
            return outputs + 1
        if self.what == "numpy":
            return outputs + float(np.abs(x.detach().numpy()).max())
        if self.what == "mask":
            return outputs + x[x > 0].sum()
        if self.what == "counter":
            self.calls += 1
        if self.what == "16 bits":
            return self.layer.to(torch.float32)(x.bfloat16().float())
        return outputs


REASONS = {
    "autograd function": "not proved",
    "branch": "",
    "numpy": "reads values",
    "mask": "",
    "counter": "attributes",
    "16 bits": "16 bits",
    "hook": "not proved",
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", [what for what in REASONS if what != "mask"])
def test_what_cannot_be_compiled_is_left_to_the_engine_with_a_reason(what, caplog):
    check_refused(what, caplog)


@pytest.mark.slow
def test_an_operator_that_the_compiler_refuses_is_left_to_the_engine(caplog):
    check_refused("mask", caplog)


def check_refused(what: str, caplog) -> None:
    torch.manual_seed(0)
    case = Case(Odd(what), lambda n: (torch.randn(n, 6),))
    program, clip_norm = compiled(case, records=4), bounds_of(4, 0.3)
    for _ in range(2):
        generator = torch.get_rng_state()
        if program.takes(4):
            assert program.sums(case.batch(4, seed=1), 4, clip_norm, clip_norm) is None
        assert torch.equal(generator, torch.get_rng_state())
    (message,) = [m for m in warnings(caplog) if m.startswith("Physical batches are not compiled")]
    assert REASONS[what] in message
    assert not program.takes(4)


@pytest.mark.usefixtures("quick")
def test_a_loss_that_brings_data_along_is_noticed_at_the_second_batch(caplog):
    """A closure over targets that change from batch to batch: recorded, they would stay those of the first."""
    case, targets, clip_norm = build("linear"), {}, bounds_of(4, 1e3)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), torch.ones(4).long(), reduction="none") * (1 + 1e-4 * targets["now"])

    program = Compiled(case.model, case.parameters, losses, 4)
    for number in range(2):
        (x,), targets["now"] = case.batch(4, seed=number)
        assert (program.sums(x, 4, clip_norm, clip_norm) is None) == (number == 1)
    assert "differs from the engine's" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_tensor_of_the_loss_may_change():
    weights = torch.tensor([1.0, 2.0, 3.0])
    model = nn.Linear(6, 3)
    case = Case(
        model, lambda n: (torch.randn(n, 6),), lambda out, y: F.cross_entropy(out, y, weights, reduction="none")
    )
    program, batch, clip_norm = compiled(case, records=4), case.batch(4, seed=1), bounds_of(4, 1e3)
    before = program.sums(batch, 4, clip_norm, clip_norm)
    weights.mul_(2)
    after = program.sums(batch, 4, clip_norm, clip_norm)
    assert away(after, [2 * t for t in before]) <= 1e-6 * length(after)


@pytest.mark.parametrize(
    ("is_compiled", "factor", "is_used"), [(True, 1.1, False), (True, 1.001, True), (False, 1.001, False)]
)
def test_a_sum_that_differs_from_the_engines_is_not_used(is_compiled, factor, is_used, monkeypatch):
    """Compiled, rounding may send a maximum's gradient elsewhere, so only what was recorded must agree closely."""
    monkeypatch.setattr(programs, "compile_graph", lambda graph, example: graph)
    real = programs._Program.run

    def run(self, given, is_compiled=True, wrong=is_compiled):
        *sums, is_finite = real(self, given, is_compiled)
        return [factor * t if is_compiled == wrong else t for t in sums] + [is_finite]

    monkeypatch.setattr(programs._Program, "run", run)
    case, clip_norm = build("linear"), bounds_of(4, 0.3)
    program = compiled(case, records=4)
    assert (program.sums(case.batch(4, seed=1), 4, clip_norm, clip_norm) is not None) == is_used
    assert ("differs from the engine's" in program.refused) != is_used


def picked(model: nn.Module, x: Tensor, last: Tensor, place: Tensor) -> Tensor:
    """x[arange(n), last] belongs to records in order, always; x[given, last] does in this batch."""
    return model.layer(x)[place if model.is_given else torch.arange(len(x)), last]


@pytest.mark.usefixtures("quick")
def test_an_index_is_proved_only_if_no_batch_can_change_it(caplog):
    clip_norm = bounds_of(4, 0.3)
    for is_given in (False, True):
        torch.manual_seed(0)
        inputs = lambda n: (torch.randn(n, 5, 6), torch.randint(5, (n,)), torch.arange(n))  # noqa: E731
        case = Case(Model(picked, layer=nn.Linear(6, 3), is_given=is_given), inputs)
        total = compiled(case, records=4).sums(case.batch(4, seed=1), 4, clip_norm, clip_norm)
        assert (total is None) == is_given
    assert "is not proved for all physical batches" in caplog.text


# -- persons with several rows ------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["two layers", "embedding", "conv", "lstm, last output", "linear on sequences"])
def test_persons_with_equally_many_rows_are_clipped_by_a_program_of_their_own(name):
    case = any_case(name)
    program, loop = compiled(case, 13), attached("loop", case)
    for number, (persons, size) in enumerate([(4, 3), (2, 3), (5, 2), (4, 3), (6, 1)]):
        inputs, targets = case.batch(persons * size, seed=number)
        clip_norm, weight = clip_norms(persons, 0.1), torch.linspace(1.5, 0.5, persons, dtype=torch.float64)
        sizes = [size] * persons
        ours = program.sums((inputs, targets), persons * size, clip_norm, weight, sizes)
        theirs = loop.clipped_sum(case.loss_of(inputs, targets), clip_norm, weight, sizes)
        assert ours is not None, program.refused
        assert away(ours, theirs) <= 1e-5 * length(theirs)
    assert not program.refused


def test_persons_with_different_numbers_of_rows_are_left_to_the_engine():
    case = any_case("two layers")
    program = compiled(case, 12)
    for sizes in ([1, 2, 3], [3, 3, 2], [7, 7]):
        inputs, targets = case.batch(sum(sizes), seed=0)
        bounds = bounds_of(len(sizes), 1.0)
        assert program.sums((inputs, targets), sum(sizes), bounds, bounds, sizes) is None
    assert not program.refused
