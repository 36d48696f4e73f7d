"""Known faults of such libraries: in-place activations, projections no hook sees, time-first data, raw gradients in the
optimizer, frozen parameters and copies, mixed precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.clipping import ENGINES, Engine, NonFiniteGradientError
from epsilons.errors import BatchDependenceError, CallOrderError, UnsupportedLayerError
from epsilons.training.noisy_update import SCALING
from sums import attached as attached_to
from sums import away, length
from zoo import Case

RECORDS = 6
CLIP_NORM = torch.linspace(0.05, 0.5, RECORDS, dtype=torch.float64)

each_engine = pytest.mark.parametrize("which", ENGINES)
#: The definition is the other side of these comparisons.
each_fast_engine = pytest.mark.parametrize("which", [name for name in ENGINES if name != "loop"])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def attached(which: str, model: nn.Module) -> Engine:
    return attached_to(which, Case(model, lambda records: ()))


def clipped(which: str, model: nn.Module, losses) -> list[Tensor]:
    """The second of two sums; an engine may use in it what it learned from the first."""
    engine = attached(which, model)
    for _ in range(2):
        engine.begin(RECORDS)
        torch.manual_seed(3)
        sums = engine.clipped_sum(losses(), CLIP_NORM, torch.ones(RECORDS))
    engine.detach()
    return sums


def assert_same(which: str, model: nn.Module, losses) -> None:
    theirs = clipped("loop", model, losses)
    assert length(theirs) > 0
    assert away(clipped(which, model, losses), theirs) <= 2e-6 * length(theirs)


def private_loop(model: nn.Module, which: str, shape: tuple[int, ...]):
    """An optimizer and a Private for 16 records of this shape."""
    budgets = epsilons.Budgets([1.0, 2.0] * 8)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=8, clip_norm=0.5), accountant="rdp")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = (torch.randn(16, *shape), torch.randint(2, (16,)))
    performance = epsilons.Performance(engine=which)
    private = epsilons.make_private(model, optimizer, data, plan, budgets=budgets, performance=performance, seed=1)
    return optimizer, private


def train(model: nn.Module, outputs, which: str, shape: tuple[int, ...]) -> None:
    _, private = private_loop(model, which, shape)
    with private:
        for x, y in private.batches:
            private.backward(F.cross_entropy(outputs(x), y, reduction="none"))
            private.step()


@each_fast_engine
def test_activations_in_place_right_after_the_first_layer_and_later(which):
    """The tensor a hook saw is overwritten; the first layer's output is no leaf to be cut off."""
    model = nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.SiLU(inplace=True), nn.Linear(5, 5),
        nn.ELU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 2),
    )  # fmt: skip
    x = torch.randn(RECORDS, 4)
    assert_same(which, model, lambda: F.relu_(model(x)).square().sum(1))


@each_fast_engine
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_whose_output_projection_is_never_called_as_a_module(which, dropout, need_weights):
    model = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
    x = torch.randn(RECORDS, 3, 4)

    def losses() -> Tensor:
        return model(x, x, x, need_weights=need_weights)[0].square().sum((1, 2))

    assert_same(which, model, losses)
    sums = dict(zip(dict(model.named_parameters()), clipped(which, model, losses), strict=True))
    assert float(sums["out_proj.weight"].norm()) > 0


@each_fast_engine
@pytest.mark.parametrize("time", [2, RECORDS, 7])
def test_rows_of_time_first_data_keep_their_record_also_if_sizes_coincide(which, time):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # time first
    model = nn.ModuleList([layer, nn.GRU(4, 3), nn.Linear(3, 2)])
    x = torch.randn(RECORDS, time, 4)

    def losses() -> Tensor:
        outputs, _ = model[1](layer(x.transpose(0, 1)))  # (time, records, 3)
        rows = model[2](outputs.reshape(-1, 3))  # (time · records, 2)
        return rows.view(time, RECORDS, 2).square().sum((0, 2))

    assert_same(which, model, losses)


@each_engine
def test_a_time_first_model_fed_records_first_is_refused(which):
    model, head = nn.LSTM(4, 3), nn.Linear(3, 2)
    with pytest.raises(BatchDependenceError, match="batch_first"):
        train(nn.ModuleList([model, head]), lambda x: head(model(x)[0][:, -1]), which, (4, 4))


@each_engine
def test_weights_that_the_forward_pass_renormalises_are_refused(which):
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(UnsupportedLayerError, match="max_norm"):
        train(model, lambda x: model(x.abs().long().clamp(max=4)), which, (3,))


@each_engine
@pytest.mark.parametrize("scale", [None, 2.0**10], ids=["plain", "GradScaler"])
def test_an_ordinary_backward_and_step_is_refused_and_moves_no_weights(which, scale):
    """A GradScaler's step would apply gradients without noise, too."""
    model = nn.Linear(4, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer, private = private_loop(model, which, (4,))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with private:
        for x, y in private.batches:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            with pytest.raises(CallOrderError, match=r"private\.step"):
                scaler.step(optimizer)
            break
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_scaler_around_a_private_backward_is_refused_in_words(optimizer, fused):
    """torch's own message is a bare assertion, because no gradient is in p.grad."""
    model = nn.Linear(4, 2)
    used = optimizer(model.parameters(), lr=0.1, fused=fused)
    before = vars(used).get(SCALING)
    budgets = epsilons.Budgets([1.0] * 40)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=20, clip_norm=1.0), accountant="rdp")
    data = torch.randn(40, 4), torch.randint(0, 2, (40,))
    scaler = torch.amp.GradScaler("cpu")
    with epsilons.make_private(model, used, data, plan, budgets=budgets) as private:
        for x, y in private.batches:
            private.backward(scaler.scale(F.cross_entropy(model(x), y, reduction="none")))
            with pytest.raises(CallOrderError, match=r"Leave the scaler out: private\.backward"):
                scaler.step(used)
            break
    assert vars(used).get(SCALING) is before


@each_engine
def test_frozen_parameters_stay_frozen_and_copies_carry_no_engine(which):
    """No requires_grad is switched off meanwhile; a copy for an average of weights can be trained as usual."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    needed = [p.requires_grad for p in model.parameters()]
    _, private = private_loop(model, which, (4,))
    with private:
        for x, y in private.batches:
            assert [p.requires_grad for p in model.parameters()] == needed
            average = copy.deepcopy(model)
            average(x)
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            private.step()
    assert [p.requires_grad for p in model.parameters()] == needed
    F.cross_entropy(average(x), y).backward()
    assert average[2].weight.grad is not None


@each_fast_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_contributions_stay_within_their_clip_norms(which, dtype):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    x, y = torch.randn(RECORDS, 5, 16), torch.randint(2, (RECORDS,))
    engine = attached(which, model)
    for only in torch.eye(RECORDS, dtype=torch.float64):
        engine.begin(RECORDS)
        with torch.autocast("cpu", dtype=dtype):
            losses = F.cross_entropy(model(x).float().mean(1), y, reduction="none")
        sums = engine.clipped_sum(losses, torch.full((RECORDS,), 1e-3, dtype=torch.float64), only)
        assert 0.99e-3 <= length(sums) <= 1e-3


@each_fast_engine
@pytest.mark.parametrize("shape", [(16, 32), (45, 45), (64, 48)])
def test_a_backward_pass_inside_autocast_computes_in_32_bits(which, shape):
    """Gram matrices, products and norms of 20 rows per record; autocast would round them to 8 bits."""
    model, x = nn.Linear(*shape), torch.randn(RECORDS, 20, shape[0])
    engine = attached(which, model)
    bounds, weights = torch.full((RECORDS,), 1e-3, dtype=torch.float64), torch.ones(RECORDS, dtype=torch.float64)
    sums = []
    for inside in (False, True):
        engine.begin(RECORDS)
        losses = model(x).square().sum((1, 2))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            sums.append(engine.clipped_sum(losses, bounds, weights))
    assert all(torch.equal(*pair) for pair in zip(*sums, strict=True))


@pytest.mark.parametrize(("is_half", "is_hooked"), [(False, False), (False, True), (True, False)])
def test_the_log_names_a_hook_that_is_not_linear_and_16_bits_are_none(is_half, is_hooked, caplog):
    model = nn.Linear(16, 3)
    x, y = torch.randn(64, 16), torch.randint(3, (64,))
    engine = attached("ghost", model)
    for _ in range(2):
        engine.begin(64)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            outputs = model(x)
        if is_hooked:
            outputs.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        losses = F.cross_entropy(outputs, y, reduction="none")
        engine.clipped_sum(losses, torch.full((64,), 0.1, dtype=torch.float64), torch.ones(64))
    assert engine.is_proven == (not is_hooked)
    reason = "a hook that is not linear alters"
    assert [reason in record.getMessage() for record in caplog.records] == [True] * is_hooked


@each_engine
def test_one_broken_record_is_blanked_not_multiplied_by_zero(which):
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(RECORDS, 3, 4)
    without = clipped("loop", model, lambda: model(x).square().sum(1) * (torch.arange(RECORDS) != 2))
    broken = x.clone()
    broken[2] = float("nan")
    engine = attached(which, model)
    engine.begin(RECORDS)
    engine.clipped_sum(model(x).square().sum(1), CLIP_NORM, torch.ones(RECORDS))
    engine.begin(RECORDS)
    try:
        sums = engine.clipped_sum(model(broken).square().sum(1), CLIP_NORM, torch.ones(RECORDS))
    except NonFiniteGradientError:
        assert which in ("loop", "vmap")  # replayed record by record
        return
    assert away(sums, without) <= 1e-6


@each_fast_engine
def test_a_compiled_model_gives_the_definitions_sum(which):
    """torch.compile hides the graph in one function, which no rule covers; the engine then uses the definition."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(RECORDS, 4)
    theirs = clipped("loop", model, lambda: model(x).square().sum(1))
    assert away(clipped(which, model, lambda: compiled(x).square().sum(1)), theirs) <= 1e-6
