"""No error of torch, or of a rule or sampler, leaves an engine as it is: the next engine takes over, and says why."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.clipping import ENGINES
from epsilons.clipping.ghost import backward, ghost, grad_samplers
from epsilons.errors import EpsilonsError, ModelError
from functional import Model
from sums import CLOSE, attached, away, length
from zoo import Case, clip_norms, flat

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS = 5
ERRORS = [RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, ZeroDivisionError, AssertionError]
ERRORS += [NotImplementedError, OverflowError, RecursionError]


def _case() -> Case:
    torch.manual_seed(0)
    return Case(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)), flat)


def _sums(case: Case, engine: object, seed: int = 0) -> list[Tensor]:
    inputs, targets = case.batch(RECORDS, seed)
    engine.begin(RECORDS)
    return engine.clipped_sum(case.loss_of(inputs, targets), clip_norms(RECORDS, 0.3), torch.ones(RECORDS))


def _assert_right(case: Case, engine: object, seed: int = 0) -> None:
    theirs = _sums(case, attached("loop", case), seed)
    assert away(_sums(case, engine, seed), theirs) <= 1e-5 * length(theirs)


def _fails(error: BaseException) -> Callable[..., Tensor]:
    def fail(*given: object, **more: object) -> Tensor:
        raise error

    return fail


#: Where an error is raised: when a sampler reads the graph, after the backward pass, and while norms are computed.
PLACES = {
    "before": lambda patch, error: patch.setitem(grad_samplers.GRAD_SAMPLERS, "NativeLayerNorm", _fails(error)),
    "after": lambda patch, error: patch.setitem(
        grad_samplers.GRAD_SAMPLERS, "NativeLayerNorm", lambda *given: _fails(error)
    ),
    "views": lambda patch, error: patch.setattr(backward, "_through_views", _fails(error)),
    "norms": lambda patch, error: patch.setattr(ghost, "squared_norms", _fails(error)),
    "walk": lambda patch, error: patch.setattr(ghost, "trace", _fails(error)),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_ghost_leaves_the_batch_to_vmap_and_is_logged_once(place, kind, monkeypatch, caplog):
    case = _case()
    engine = attached("ghost", case)
    PLACES[place](monkeypatch, kind("sizes differ."))
    with caplog.at_level(logging.WARNING, logger="epsilons"):
        for seed in range(3):  # the graph is kept for the second physical batch, too
            _assert_right(case, engine, seed)
    assert not engine.is_proven
    (line,) = caplog.messages
    assert f"{kind.__name__}: " in line
    assert "sizes differ" in line
    if place in ("before", "after"):
        assert "NativeLayerNorm: " in line


def test_an_error_without_a_graph_names_the_operator_and_the_engine_that_works(monkeypatch):
    case = _case()
    engine = attached("ghost", case)
    _assert_right(case, engine)
    with monkeypatch.context() as patch:
        PLACES["after"](patch, ValueError("sizes differ"))
        with pytest.raises(ModelError, match=r'NativeLayerNorm: ValueError: sizes differ.*engine="vmap"'):
            _sums(case, engine)
        _assert_right(case, engine)  # from now on graphs are kept
    for seed in range(3):
        _assert_right(case, engine, seed)


def test_a_pattern_that_always_ends_in_an_error_is_left_to_vmap_for_good(monkeypatch):
    case, calls = _case(), []
    engine = attached("ghost", case)

    def failing(*given: object) -> object:
        calls.append(given)
        raise ValueError

    monkeypatch.setitem(grad_samplers.GRAD_SAMPLERS, "NativeLayerNorm", failing)
    for _ in range(ghost.AUDIT_EVERY + 5):
        _sums(case, engine)
    assert len(calls) == ghost.AUDIT_EVERY


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_too_little_memory_is_no_reason_for_another_engine(error, monkeypatch):
    case = _case()
    engine = attached("ghost", case)
    PLACES["after"](monkeypatch, error)
    with pytest.raises(type(error)):
        _sums(case, engine)
    assert engine.is_proven


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("not written yet")


@pytest.mark.parametrize("which", ENGINES)
def test_a_backward_pass_that_raises_is_named_in_the_librarys_error(which):
    case = Case(Model(lambda m, x: _Broken.apply(m.layer(x)), layer=nn.Linear(6, 3)), flat)
    with pytest.raises(ModelError, match=r"in backward \(.*test_bare_errors\.py:\d+\): ValueError: not written yet"):
        _sums(case, attached(which, case))

    def doubling(module: nn.Module, gradients: tuple[Tensor, ...], _: object) -> tuple[Tensor, ...]:
        return (2 * gradients[0],)

    case = Case(Model(lambda m, x: m.layer(x), layer=nn.Linear(6, 3)), flat)
    case.model.layer.register_full_backward_hook(doubling)  # the layer's input is data, and has no gradient
    with pytest.raises(ModelError, match=r"in doubling \(.*test_bare_errors\.py:\d+\): TypeError: .*'NoneType'"):
        _sums(case, attached(which, case))


@pytest.mark.parametrize("which", ENGINES)
def test_losses_that_were_differentiated_already_are_refused(which):
    case = _case()
    engine = attached(which, case)
    inputs, targets = case.batch(RECORDS, 0)
    engine.begin(RECORDS)
    losses = case.loss_of(inputs, targets)
    losses.sum().backward()
    with pytest.raises(ModelError, match=r"do not call losses.backward\(\) yourself"):
        engine.clipped_sum(losses, torch.ones(RECORDS), torch.ones(RECORDS))


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 6))])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torchscript_give_the_definitions_sum(which, make):
    """They take no hooks. (copy.deepcopy of one has parameters that are no leaves, which torch's optimizers refuse.)"""
    case = _case()
    scripted = Case(make(case.model), flat)
    engine = ENGINES[which]()
    engine.attach(scripted.model, scripted.parameters)
    theirs = _sums(case, attached("loop", case))
    assert away(_sums(scripted, engine), theirs) <= 1e-5 * length(theirs)
    engine.detach()


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_sizes_reach_no_engine_as_an_error(which):
    def nested(model: nn.Module, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor(list(x[:, None]), layout=torch.strided)
        return torch.nested.to_padded_tensor(model.layer(rows), 0.0)[:, 0]

    case = Case(Model(nested, layer=nn.Linear(6, 3)), flat)
    plain = Case(Model(lambda m, x: m.layer(x), layer=case.model.layer), flat)
    theirs = _sums(plain, attached("loop", plain))
    assert away(_sums(case, attached(which, case)), theirs) <= CLOSE * length(theirs)


# -- what a failed check says ---------------------------------------------------------------------------------


def _hooked(hook: Callable[[Tensor], Tensor]) -> Case:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(model.first(x))
        if hidden.requires_grad:
            hidden.register_hook(hook)
        return model.head(hidden)

    torch.manual_seed(0)
    return Case(Model(compute, first=nn.Linear(6, 5), head=nn.Linear(5, 3)), flat)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (lambda g: g.clamp(-0.01, 0.01), "a hook that is not linear alters the gradients of"),
        (lambda g: g / (1e-3 + g.norm()), "a hook that is not linear alters the gradients of"),
        (lambda g: g - g.mean(0), "a hook mixes the records' gradients of"),
        (lambda g: g.flip(0), "a hook mixes the records' gradients of"),
    ],
)
def test_a_hook_is_named_with_the_parameters_that_it_alters(hook, reason, caplog):
    case = _hooked(hook)
    with caplog.at_level(logging.WARNING, logger="epsilons"):
        _assert_right(case, attached("ghost", case))
    (line,) = caplog.messages
    assert f"{reason} first.weight (Addmm), first.bias (Addmm)." in line
    assert "head" not in line


def test_gradients_that_are_mostly_rounding_are_called_so(caplog):
    """Targets of 1e6 that add up to 0 over time: the gradient of the bias is what rounding leaves."""
    torch.manual_seed(0)
    model, time, wide = nn.Linear(64, 64), 64, 64
    sign = torch.where(torch.arange(time) % 2 == 0, 1.0, -1.0)[:, None]
    x = torch.cat([torch.randn(1, 1, wide) + torch.randn(4, time, wide), torch.zeros(1, time, wide)])
    theirs = 1e6 * torch.randn(1, time, wide)
    theirs[:, -1] -= theirs.sum(1)
    y = torch.cat([model(x[:4]).detach() - sign * torch.randn(1, 1, wide), theirs + model.bias.detach()])
    engine = ENGINES["ghost"]()
    engine.attach(model, list(model.parameters()))
    engine.begin(5)
    with caplog.at_level(logging.WARNING, logger="epsilons"):
        engine.clipped_sum((model(x) - y).square().sum((1, 2)), torch.ones(5), torch.ones(5))
    (line,) = caplog.messages
    assert "the gradients of bias (Addmm) are mostly rounding." in line


# -- before the first batch -----------------------------------------------------------------------------------


def _with_sparse_buffer() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_buffer("adjacency", torch.eye(6).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [(_with_sparse_buffer, "adjacency is a sparse tensor"), (lambda: nn.LazyLinear(3), "weight has no values yet")],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_tensors_that_cannot_be_followed_are_refused_before_training(make, message):
    model, budgets = make(), epsilons.Budgets([1.0] * 8, delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(2, 4.0, 1.0), accountant="rdp")
    data = torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(EpsilonsError, match=message):
        epsilons.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan, budgets=budgets, seed=1)


# -- 16 bits --------------------------------------------------------------------------------------------------


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding="valid"), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.end = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.relu(self.down(x))
        low = self.up(torch.relu(self.deep(high)))
        return self.end(torch.cat([high, low], 1)).mean((2, 3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("which", ENGINES)
def test_a_u_net_under_autocast_to_16_bits_gives_nearly_the_definitions_sum(which, layout):
    torch.manual_seed(0)
    case = Case(_UNet().to(memory_format=layout), lambda n: (torch.randn(n, 3, 10, 10).to(memory_format=layout),))
    theirs = _sums(case, attached("loop", case))
    inputs, targets = case.batch(RECORDS, 0)
    engine = attached(which, case)
    engine.begin(RECORDS)
    with torch.autocast("cpu", dtype=torch.float16):
        losses = case.loss_of(inputs, targets)
    ours = engine.clipped_sum(losses.float(), clip_norms(RECORDS, 0.3), torch.ones(RECORDS))
    assert away(ours, theirs) <= 0.01 * length(theirs)
