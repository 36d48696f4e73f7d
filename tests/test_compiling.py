"""Compiled steps give the definition's sum by a program that was proved once. The engine does what they cannot.

Most tests run what was recorded, and with --slow the compiled program, too. It takes seconds to compile one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compiling import RECORDS, bounds_of, compiled, has_compiler, needs_compiler, of_model, one_of, quick, warnings  # noqa: F401
from epsilons.errors import ModelError
from epsilons.training.clipping.compiled import Compiled
from functional import Model
from program import python
from sums import CLOSE, any_case, attached, away, common_mode, doubled, in_double, length
from zoo import ZOO, Case, build
from zoo_more import MORE

#: Models that leave all physical batches to the engine, and what the reason says. Torch compiles no backward pass of
#: oneDNN's LSTM, which is needed where paths lead around one.
LEFT = {
    "two-layer lstm, hidden state": "mkldnn_rnn_layer",
    "a path around two lstms": "mkldnn_rnn_layer",
}

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]


# -- the definition's sum -----------------------------------------------------------------------------------


def check_sums(case: Case, program: Compiled) -> None:
    """Clip norms and weights per record; physical batches that are full, and that are filled up."""
    for records in (RECORDS, 2, 20):
        inputs, targets = case.batch(records, seed=records)
        clip_norm = torch.linspace(0.05, 1.5, records, dtype=torch.float64)
        weight = torch.linspace(1.5, 0.5, records, dtype=torch.float64)
        torch.manual_seed(records)
        ours = program.sums((inputs, targets), records, clip_norm, weight)
        exact = doubled(case)
        torch.manual_seed(records)
        theirs = attached("loop", exact).clipped_sum(exact.loss_of(in_double(inputs), targets), clip_norm, weight)
        assert ours is not None, program.refused
        assert length(theirs) > 0
        assert away(ours, theirs) <= CLOSE * length(theirs)
        assert [a.shape for a in ours] == [p.shape for p in case.parameters]


@pytest.mark.parametrize("name", ["layer norm"])  # two kernels to compile, an embedding has six
def test_a_program_gives_the_definitions_sum(name):
    case = any_case(name)
    check_sums(case, compiled(case))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["embedding", "lstm, last output", "transformer", "conv"])
def test_a_model_is_compiled_or_the_log_says_why_not(name, caplog):
    check_compiled_or_left(name, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ZOO, *MORE])
def test_the_whole_zoo_is_compiled_or_the_log_says_why_not(name, caplog):
    if any_case(name).random:
        pytest.skip("the definition's masks are in 64 bits; see the tests of dropout")
    check_compiled_or_left(name, caplog)


def check_compiled_or_left(name: str, caplog) -> None:
    case = any_case(name)
    program = compiled(case)
    if name not in LEFT:
        check_sums(case, program)
        assert not warnings(caplog)
        return
    ones = bounds_of(RECORDS, 1.0)
    assert program.sums(case.batch(RECORDS, seed=0), RECORDS, ones, ones) is None
    assert LEFT[name] in program.refused
    assert any(message.startswith("Physical batches are not compiled") for message in warnings(caplog))


@pytest.mark.usefixtures("quick")
def test_an_lstm_of_usual_width_is_compiled():
    """The bounds on norms that the engine and a recording compute differ by 4e-5, and all records are clipped."""
    torch.manual_seed(0)
    model = Model(
        lambda m, x, y: F.cross_entropy(m.head(m.lstm(m.table(x))[0][:, -1]), y, reduction="none"),
        table=nn.Embedding(1000, 64), lstm=nn.LSTM(64, 128, batch_first=True), head=nn.Linear(128, 2),
    )  # fmt: skip
    program = of_model(model, lambda model, batch: model(*batch), 64)
    batch, ones = (torch.randint(1000, (64, 32)), torch.randint(2, (64,))), bounds_of(64, 1.0)
    assert program.sums(batch, 64, ones, ones) is not None, program.refused


# -- how long a contribution may be -------------------------------------------------------------------------


def cancelling() -> nn.Module:
    """A linear layer over 64 steps with outputs that are summed with alternating signs: nearly everything cancels."""
    model = Model(lambda m, x: (torch.tanh(0.01 * m.layer(x)) * m.sign).sum((1, 2)), layer=nn.Linear(512, 512))
    model.register_buffer("sign", torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None])
    return model


@pytest.mark.usefixtures("quick")
def test_no_compiled_contribution_is_above_its_clip_norm_however_much_cancels():
    """64 steps, 512 features with a common mode and noise 1e-4. Each contribution is measured alone."""
    records = 64
    features, _ = common_mode(records, 1e-4, 64, 512, 1)
    torch.manual_seed(1)
    program = of_model(cancelling(), lambda model, batch: model(batch), records)
    for record in [0, 17, 63]:
        total = program.sums(features, records, bounds_of(records, 1e-6), one_of(records, record))
        assert total is not None, program.refused
        assert 0.99e-6 <= length(total) <= 1e-6


@pytest.mark.slow
def test_no_contribution_exceeds_its_clip_norm_where_rounding_is_most_of_it():
    """Saturated outputs, large features: gradients are small differences, and norm and sum must use the same ones."""
    records = 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 3), nn.Softplus(), nn.Linear(3, 3))
    x = 40 * torch.randn(records, 6)

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        return -torch.log_softmax(3 * model(batch), 1).amax(1) + torch.erf(model(batch)).sum(1)

    program = of_model(model, losses, records)
    for record in range(records):
        total = program.sums(x, records, bounds_of(records, 1e-9), one_of(records, record))
        assert total is not None, program.refused
        assert length(total) <= 1e-9


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("time", [1, 16])
def test_no_norm_vanishes_where_32_bits_end(time):
    """One side of each product is so small that its squares are 0, the other as large as the gradient needs."""
    signs = torch.randn(4, time, 256).sign(), torch.randn(4, time, 256).sign()
    model, clip_norm = nn.Linear(256, 256, bias=False), bounds_of(4, 1e-3)

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) * batch[1]).flatten(1).sum(1)

    for small, large in ((2.6e-23, 8e17), (8e17, 2.6e-23)):
        batch = small * signs[0][:, :1].expand(4, time, 256), large * signs[1][:, :1].expand(4, time, 256)
        with torch.no_grad():
            model.weight.fill_(1e-9)
        engine, program = attached("ghost", Case(model, lambda n: ())), of_model(model, losses, 4)
        for record in range(4):
            engine.begin(4)
            assert length(engine.clipped_sum(losses(model, batch), clip_norm, one_of(4, record))) <= 1e-3
            assert length(program.sums(batch, 4, clip_norm, one_of(4, record))) <= 1e-3


@pytest.mark.usefixtures("quick")
def test_norms_and_sums_are_computed_from_stored_outputs_of_the_program():
    """Activations and gradients are outputs, so that they are computed once; not the views that are multiplied."""
    case = build("two layers")
    program, ones = compiled(case, records=4), bounds_of(4, 1.0)
    assert program.sums(case.batch(4, seed=0), 4, ones, ones) is not None
    (graph,) = [p._graph for p in program._programs.values()]
    (output,) = graph.graph.find_nodes(op="output")
    stored = {str(node.target) for node in output.args[0][len(case.parameters) + 1 :]}
    assert {"aten.tanh.default", "aten.tanh_backward.default", "aten._log_softmax_backward_data.default"} <= stored
    assert not any("view" in operator or ".t." in operator or "detach" in operator for operator in stored)


# -- batches ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_batch_with_a_record_that_is_not_finite_is_left_to_the_engine():
    case = build("two layers")
    program, ones = compiled(case), bounds_of(5, 1.0)
    inputs, targets = case.batch(5, seed=0)
    broken = (inputs[0].clone(),)
    broken[0][3, 1] = float("nan")
    assert program.sums((broken, targets), 5, ones, ones) is None  # the first batch of all: nothing is compared
    ours = program.sums((inputs, targets), 5, ones, ones)
    broken[0][3, 1] = float("inf")
    broken[0][0, 0] = float("nan")  # the record that batches are filled up with
    assert program.sums((broken, targets), 5, ones, ones) is None
    again = program.sums((inputs, targets), 5, ones, ones)
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
    assert not program.refused


@pytest.mark.usefixtures("quick")
def test_filling_up_a_batch_adds_nothing():
    """The same records alone and among fillings; records at clip norm 0 do not count, whatever they hold."""
    case = build("two layers")
    program, ones = compiled(case, records=8), bounds_of(8, 1.0)
    inputs, targets = case.batch(8, seed=0)
    three = (torch.arange(8) < 3).double()
    short = program.sums(((inputs[0][:3],), targets[:3]), 3, ones[:3], ones[:3])
    full = program.sums((inputs, targets), 8, three, three)
    assert away(short, full) <= 1e-7 * length(full)
    assert not any(program.takes(count) for count in (0, 1, 9))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 6), ["a"] * 4), "got a str"),
        ((torch.zeros(4, 6), torch.zeros(3)), r"got one of shape \(3,\)"),
        ((torch.zeros(6, 4), torch.zeros(())), "got "),
    ],
)
def test_batches_that_are_not_rows_of_tensors_are_refused(batch, message):
    program, ones = of_model(nn.Linear(6, 3), lambda m, b: m(b[0]).sum(1), 4), torch.ones(4)
    with pytest.raises(ModelError, match=message):
        program.sums(batch, 4, ones, ones)


@pytest.mark.usefixtures("quick")
def test_batches_of_many_shapes_have_a_program_each_and_a_warning(caplog):
    program = of_model(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), lambda m, b: m(b).sum((1, 2)), 4)
    clip_norm = bounds_of(4, 0.3)
    for time in (1, 2, 3, 4, 5, 2, 1):
        assert program.sums(torch.randn(4, time, 6), 4, clip_norm, clip_norm) is not None
    assert [message.startswith("Batches have 4 shapes") for message in warnings(caplog)] == [True]


# -- randomness, repetition ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_dropout_is_drawn_for_each_batch_as_the_engine_draws_it():
    case = build("dropout in transformer")
    program, engine = compiled(case), attached("ghost", case)
    batch, clip_norm = case.batch(RECORDS, seed=0), bounds_of(RECORDS, 0.1)

    def ours(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        total = program.sums(batch, RECORDS, clip_norm, clip_norm)
        assert total is not None, program.refused
        return total

    first, second, again = ours(1), ours(2), ours(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert away(first, second) > 0.01 * length(first)
    for seed, sums in [(1, first), (2, second)]:
        torch.manual_seed(seed)
        engine.begin(RECORDS)
        theirs = engine.clipped_sum(case.loss_of(*batch), clip_norm, clip_norm)
        assert away(sums, theirs) <= 1e-6 * length(theirs)


def digest() -> str:
    """Of two batches' sums on two threads, with a table, which threads add into, and dropout."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40), nn.Dropout(0.3), nn.Linear(40, 2))
    tokens = torch.randint(50, (64, 12))
    program = of_model(model, lambda m, b: m(b).square().mean((1, 2)), 64)
    digest = hashlib.sha256()
    for n in (64, 9):
        torch.manual_seed(n)
        sums = program.sums(tokens[:n], n, torch.full((n,), 0.01), torch.ones(n))
        assert sums is not None, program.refused
        for t in sums:
            digest.update(t.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_two_processes_that_both_compile_give_the_same_bits(tmp_path):
    here = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {here!r}); import test_compiling; print(test_compiling.digest())"
    assert python(script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PYTHONHASHSEED="7").strip() == digest()


@pytest.mark.slow
def test_nothing_of_torchs_settings_is_left_changed():
    from torch._inductor import config

    def settings() -> tuple[bool, ...]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return config.fallback_random, config.deterministic, deterministic, torch.is_grad_enabled()

    before, case, ones = settings(), build("linear"), bounds_of(4, 1.0)
    assert compiled(case, records=4).sums(case.batch(4, seed=1), 4, ones, ones) is not None
    assert before == settings()
