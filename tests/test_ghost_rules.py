"""Rules by operator: each is proved on a graph that uses it, right by the definition, and refused across records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.clipping.ghost.operator_rules import RULES, operator
from epsilons.core.modules import nodes_of
from functional import Model
from fuzzing import families
from sums import CLOSE, attached, away, doubled, in_double, length, sums_of
from zoo import Case, clip_norms

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS = 6
Function = Callable[[Tensor], Tensor]


def _places(h: Tensor) -> Tensor:
    """(records, 4) numbers from 0 to 3, others for each record."""
    return torch.arange(len(h) * 4).reshape(len(h), 4) % 5 % 4


def _theta(h: Tensor) -> Tensor:
    return h[:, 0, :3, :2].mT


#: h (records, 4, 6, 6), between 0.2 and 0.8 -> anything with the records in front.
WITHIN: dict[str, Function] = {
    "PixelShuffle": lambda h: F.pixel_shuffle(h, 2),
    "PixelUnshuffle": lambda h: F.pixel_unshuffle(h, 2),
    "ChannelShuffle": lambda h: F.channel_shuffle(h, 2),
    "Im2Col": lambda h: F.unfold(h, (2, 3), stride=2, padding=1),
    "Col2Im": lambda h: F.fold(h.reshape(len(h), 4, 36), (7, 7), 2),
    "FractionalMaxPool2D": lambda h: F.fractional_max_pool2d(h, 2, 3, _random_samples=h.new_full((len(h), 4, 2), 0.3)),
    "FractionalMaxPool3D": lambda h: F.fractional_max_pool3d(
        h[:, None], 2, 2, _random_samples=h.new_full((len(h), 1, 3), 0.3)
    ),
    "MaxUnpool2D": lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2),
    "MaxUnpool3D": lambda h: F.max_unpool3d(*F.max_pool3d(h[:, None], 2, return_indices=True), 2),
    "GridSampler2D": lambda h: F.grid_sample(h, h[:, :2, :3].permute(0, 2, 3, 1), align_corners=True),
    "GridSampler3D": lambda h: F.grid_sample(h[:, None], h[:, None, :, :, :3], align_corners=True),
    "AffineGridGenerator": lambda h: F.affine_grid(_theta(h), [len(h), 1, 4, 4], align_corners=True),
    "RreluWithNoise": lambda h: F.rrelu(h - 0.5, 0.2, 0.2, training=True),
    "Atan2": lambda h: torch.atan2(h, h[:, :1] + 1),
    "Fmod": lambda h: torch.fmod(h, 0.3),
    "Remainder": lambda h: torch.remainder(h, 0.3),
    "Floor": lambda h: h.floor() + h,
    "Ceil": lambda h: h.ceil() + h,
    "Round": lambda h: h.round() + h,
    "Trunc": lambda h: h.trunc() + h,
    "Frac": lambda h: (3 * h).frac(),
    "Sinc": lambda h: h.sinc(),
    "Lgamma": lambda h: h.lgamma(),
    "Digamma": lambda h: h.digamma(),
    "Erfinv": lambda h: h.erfinv(),
    "Asinh": lambda h: h.asinh(),
    "Acosh": lambda h: (h + 1).acosh(),
    "Atanh": lambda h: h.atanh(),
    "Logit": lambda h: h.logit(),
    "Hypot": lambda h: torch.hypot(h, h[:, :, :1]),
    "Fmax": lambda h: torch.fmax(h, h.roll(1, 3)),
    "Fmin": lambda h: torch.fmin(h, h.roll(1, 3)),
    "NanToNum": lambda h: h.nan_to_num(),
    "Logaddexp2": lambda h: torch.logaddexp2(h, h[:, :1]),
    "Nansum": lambda h: h.nansum((1, 2)),
    "Logcumsumexp": lambda h: h.logcumsumexp(2),
    "Cumprod": lambda h: h.cumprod(3),
    "Cummax": lambda h: h.cummax(2).values,
    "Cummin": lambda h: h.cummin(-1).values,
    "Scatter": lambda h: h[:, :, 0, 0].scatter(1, _places(h)[:, :2], h[:, :2, 1, 1]),
    "ScatterAdd": lambda h: h.new_zeros(len(h), 9).scatter_add(1, _places(h), h[:, :, 0, 0]),
    "ScatterReduce": lambda h: h[:, :, 0, 0].scatter_reduce(1, _places(h), h[:, :, 1, 1], "prod"),
    "IndexAdd": lambda h: h[:, :, 0].index_add(1, torch.tensor([3, 3, 0]), h[:, :3, 1], alpha=2.0),
    "IndexCopy": lambda h: h[:, :, 0].index_copy(1, torch.tensor([3, 0]), h[:, :2, 1]),
    "IndexFill": lambda h: h.index_fill(2, torch.tensor([1, 4]), 0.5),
    "Index": lambda h: h[:, [2, 0, 0]].flatten(1).cumsum(1)[:, :12] * h[:, :3, [[1], [2]], [0, 3]].flatten(1),
    "Unfold": lambda h: h.unfold(2, 3, 2),
    "FftR2C": lambda h: torch.fft.rfft2(h).abs(),
    "FftC2C": lambda h: torch.fft.fft(torch.fft.fft(h, dim=3), dim=2).real,
    "FftC2R": lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=2) * 1j, dim=2, n=6),
    "ViewAsReal": lambda h: torch.view_as_real(torch.fft.rfft(h)),
    "ViewAsComplex": lambda h: torch.view_as_complex(h.reshape(len(h), 72, 2)).abs(),
    "Conj": lambda h: (torch.fft.rfft(h) * torch.fft.rfft(h.flip(1)).conj()).resolve_conj().abs(),
    "Mv": lambda h: h @ h.new_tensor([1.0, 2, 3, 4, 5, 6]),
    "SoftMarginLoss": lambda h: F.soft_margin_loss(h, h.detach().round() * 2 - 1, reduction="none"),
    "MultiMarginLoss": lambda h: F.multi_margin_loss(h[:, :, 0, 0], _places(h)[:, 0], reduction="none")[:, None],
    "MultilabelMarginLoss": lambda h: F.multilabel_margin_loss(h[:, :, 0, 0], _places(h), reduction="none")[:, None],
    "AdaptiveMaxPool3D": lambda h: F.adaptive_max_pool3d(h[:, None], 2),
    "ReflectionPad3D": lambda h: F.pad(h[:, None], (1, 2, 0, 1, 1, 1), mode="reflect"),
    "UpsampleNearestExact1D": lambda h: F.interpolate(h[:, 0], scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact2D": lambda h: F.interpolate(h, scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact3D": lambda h: F.interpolate(h[:, None], scale_factor=1.5, mode="nearest-exact"),
    "UpsampleBilinear2DAa": lambda h: F.interpolate(h, scale_factor=0.5, mode="bilinear", antialias=True),
    "UpsampleBicubic2DAa": lambda h: F.interpolate(h, scale_factor=0.5, mode="bicubic", antialias=True),
}  # fmt: skip


def _losses(model: nn.Module, x: Tensor, function: Function) -> Tensor:
    h = 0.2 + 0.6 * model.layer(x).sigmoid()
    result = function(h).flatten(1)
    return (result * torch.linspace(0.5, 1.5, result.shape[1], dtype=result.dtype)).square().mean(1)


def _operators(losses: Tensor) -> set[str]:
    return {operator(node) for node in nodes_of([losses])}


@pytest.mark.parametrize("name", WITHIN)
def test_an_operator_within_records_is_proved_and_right(name):
    torch.manual_seed(0)
    model, x = Model(lambda m, x: x, layer=nn.Conv2d(3, 4, 1)), torch.randn(RECORDS, 3, 6, 6)
    assert name in RULES
    assert name in _operators(_losses(model, x, WITHIN[name]))
    ours, theirs = sums_of(model, lambda m, x: _losses(m, x, WITHIN[name]), x, clip_norms(RECORDS, 0.3))
    assert away(ours, theirs) <= CLOSE * length(theirs)


#: h (records, 4, 6, 6) -> records, mixed by the same operators.
ACROSS: dict[str, Function] = {
    "Softmax": lambda h: h.softmax(0),
    "Cumsum": lambda h: h.cumsum(0),
    "Flip": lambda h: h.flip(0) + h,
    "Roll": lambda h: h.roll(1, 0),
    "Roll, flat": lambda h: h.roll(2),
    "Mean": lambda h: h - h.mean(0),
    "Mm": lambda h: h.flatten(1) @ h.flatten(1).T,
    "View, askew": lambda h: h.reshape(3, -1).cumsum(1).view(RECORDS, -1),
    "NativeBatchNorm": lambda h: F.batch_norm(h, None, None, training=True),
    "Amax": lambda h: torch.maximum(h, h.amax(0, keepdim=True).detach() * h.sum()),
    "Cumprod": lambda h: h.cumprod(0),
    "Cummax": lambda h: h.cummax(0).values,
    "Logcumsumexp": lambda h: h.logcumsumexp(0),
    "PixelShuffle": lambda h: F.pixel_shuffle(h.transpose(0, 1).flatten(0, 1)[None], 2).reshape(RECORDS, -1),
    "ChannelShuffle": lambda h: F.channel_shuffle(h.transpose(0, 1)[..., None], 2).transpose(0, 1),
    "Im2Col": lambda h: F.unfold(h.transpose(0, 1), 2)[:, :RECORDS].transpose(0, 1),
    "GridSampler2D": lambda h: F.grid_sample(h, h.flip(0)[:, :2, :3].permute(0, 2, 3, 1), align_corners=True),
    "GridSampler2D, one image": lambda h: F.grid_sample(
        h.transpose(0, 1), h[:4, :2].permute(0, 2, 3, 1), align_corners=True
    ).transpose(0, 1),
    "ScatterAdd": lambda h: torch.zeros(RECORDS, 6).scatter_add(0, _places(h), h[:, :, 0, 0]),
    "Scatter": lambda h: h[:, :, 0, 0].scatter(0, _places(h), h[:, :, 1, 1]),
    "ScatterReduce": lambda h: h[:, :, 0, 0].scatter_reduce(0, _places(h), h[:, :, 1, 1], "sum"),
    "IndexAdd": lambda h: h.index_add(0, torch.tensor([1, 0]), h[4:]),
    "IndexCopy": lambda h: h.index_copy(0, torch.tensor([1, 0]), h[4:]),
    "Index": lambda h: h[[1, 0, 2, 3, 5, 4]],
    "Index, picked axes first": lambda h: h[:, [0, 1, 2, 3, 0, 1], :, [0, 1, 2, 3, 4, 5]],
    "Unfold": lambda h: h.unfold(0, 2, 1).sum(4).repeat(2, 1, 1, 1)[:RECORDS],
    "FftR2C": lambda h: torch.fft.rfft(h, dim=0).abs().repeat(2, 1, 1, 1)[:RECORDS],
    "FftC2C": lambda h: torch.fft.fft2(h, dim=(0, 3)).abs(),
    "ViewAsComplex": lambda h: torch.view_as_complex(h[:2].permute(1, 2, 3, 0).contiguous()).abs()[0][:, None],
    "Mv": lambda h: (h.flatten(1).T @ h[:, 0, 0, 0])[:RECORDS, None],
    "MultiMarginLoss": lambda h: F.multi_margin_loss(
        h[:, :, 0, :4].transpose(0, 1).flatten(1)[:, :RECORDS], torch.tensor([0, 1, 2, 3]), reduction="none"
    ).repeat(2)[:RECORDS, None],
}  # fmt: skip


@pytest.mark.parametrize("name", ACROSS)
def test_the_same_operator_across_records_proves_nothing(name, monkeypatch):
    """The walk itself refuses it: the random check is not asked."""
    torch.manual_seed(0)
    case = Case(nn.Conv2d(3, 4, 1), lambda records: ())
    model, x = Model(lambda m, x: x, layer=case.model), torch.randn(RECORDS, 3, 6, 6)
    engine = attached("ghost", case)
    monkeypatch.setattr(engine, "_agrees", lambda *given: True)
    theirs = attached("loop", case).clipped_sum(
        _losses(model, x, ACROSS[name]), clip_norms(RECORDS, 0.1), torch.ones(RECORDS)
    )
    engine.begin(RECORDS)
    ours = engine.clipped_sum(_losses(model, x, ACROSS[name]), clip_norms(RECORDS, 0.1), torch.ones(RECORDS))
    assert not engine.is_proven
    assert away(ours, theirs) <= 1e-5 * length(theirs)


def _by_pairs(weight: Tensor) -> Tensor:
    return torch.view_as_complex(weight)


#: Complex weights, made of pairs, against x (records, 4, 6).
COMPLEX: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "product": lambda m, x: torch.fft.fft(x) @ _by_pairs(m.w),
    "one product": lambda m, x: torch.fft.fft(x)[:, 0] @ _by_pairs(m.w),
    "einsum": lambda m, x: torch.einsum("bti,io->bot", torch.fft.fft(x), _by_pairs(m.w)),
    "scale": lambda m, x: torch.fft.rfft(x, dim=1) * _by_pairs(m.w)[:, 0],
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_weights_have_the_gradients_of_their_pairs(name):
    torch.manual_seed(0)
    model = Model(lambda m, x: x, w=nn.Parameter(torch.randn(6, 5, 2)))

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return torch.view_as_real(COMPLEX[name](model, x)).tanh().flatten(1).cumsum(1).square().mean(1)

    ours, theirs = sums_of(model, losses, torch.randn(RECORDS, 4, 6), clip_norms(RECORDS, 0.3))
    assert away(ours, theirs) <= CLOSE * length(theirs)


def test_a_vector_as_a_weight_is_proved_and_right():
    torch.manual_seed(0)
    model = Model(lambda m, x: x, v=nn.Parameter(torch.randn(6)))
    x = torch.randn(RECORDS, 4, 6)
    ours, theirs = sums_of(model, lambda m, x: (x @ m.v).sin().sum(1), x, clip_norms(RECORDS, 0.3))
    assert away(ours, theirs) <= CLOSE * length(theirs)


# -- layers of torch with random options ---------------------------------------------------------------------

ACTIVATIONS = [
    *(nn.PReLU(5, 0.1), nn.GLU(1), nn.Softmax(1), nn.LogSoftmax(-1), nn.Softmin(1), nn.CELU(2.0), nn.GELU("tanh")),
    *(nn.Hardtanh(-0.3, 0.4), nn.Hardsigmoid(), nn.LogSigmoid(), nn.ReLU6(), nn.Softplus(2.0, 1.0), nn.Softshrink(0.1)),
    *(nn.Hardshrink(0.1), nn.Tanhshrink(), nn.Threshold(0.1, -1.0), nn.RReLU(0.2, 0.2), nn.Unflatten(1, (2, 3))),
]
POOLING = [
    *(nn.MaxPool2d(2, ceil_mode=True, padding=1), nn.MaxPool2d(3, 1, dilation=2), nn.AdaptiveAvgPool2d((2, 3))),
    *(nn.AvgPool2d(2, count_include_pad=False, padding=1), nn.AdaptiveMaxPool2d((3, None)), nn.ZeroPad2d((1, 0, 2, 1))),
    *(nn.FractionalMaxPool2d(2, 3, _random_samples=torch.full((RECORDS, 4, 2), 0.4)), nn.Upsample(scale_factor=2)),
    *(nn.Upsample(scale_factor=2, mode="bicubic"), nn.CircularPad2d(1), nn.Unfold(2, padding=1)),
    nn.Sequential(nn.Unfold(2), nn.Fold((7, 6), 2)),
]


def _by_cell(kind: type[nn.RNNCellBase]) -> families.Computed:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        state = None
        for now in x.unbind(1):
            state = model.cell(now, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    block = families.Computed(compute, (3, 5))
    block.cell = kind(5, 4, bias=kind is not nn.GRUCell)
    return block


Made = tuple[nn.Module, str, tuple[int, ...]]  # a layer, what it takes, and the sizes of a record
MADE: list[Made] = [
    *((nn.Sequential(nn.Linear(5, 6 if isinstance(a, nn.GLU | nn.Unflatten) else 5), a), "flat", (5,))
      for a in ACTIVATIONS),
    *((nn.Sequential(nn.Conv2d(2, 4, 1), pool), "planes", (2, 7, 6)) for pool in POOLING),
    *((_by_cell(kind), "steps", (3, 5)) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
]  # fmt: skip


def _drawn(kind: str, place: int, seed: int) -> Made:
    """The layer at this place of families.LAYERS, with random options and sizes that fit them."""
    pick, takes = Random(seed), kind.split(" > ")[0]
    while True:
        sizes = pick.choice(families.SIZES[takes])
        try:
            layer = families.LAYERS[kind][place](families.Options(pick), *sizes)
            with torch.no_grad():
                is_empty = layer(families.sample(takes, sizes, 2)).numel() == 0
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue
        if not is_empty:
            return layer, takes, sizes


def _seeds() -> Iterator[Any]:
    """Each layer of the random models (tests/fuzzing) with random options, then those above."""
    for kind, layers in families.LAYERS.items():
        for make in dict.fromkeys(layers):
            place = layers.index(make)
            for seed in range(40 if make.__name__ in ("_any_convolution", "_attention") else 15):
                drawn = functools.partial(_drawn, kind, place, seed)
                yield pytest.param(drawn, id=f"{kind} {make.__name__} {seed}")
    yield from (pytest.param(lambda made=made: made, id=str(i)) for i, made in enumerate(MADE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", list(_seeds()))
def test_every_option_of_a_layer_gives_the_definitions_sum(make):
    torch.manual_seed(0)
    layer, takes, sizes = make()
    layer.register_parameter("head", nn.Parameter(torch.ones(1)))  # layers without weights have one behind them, too
    x, clip_norm, ones = families.sample(takes, sizes, RECORDS), clip_norms(RECORDS, 0.3), torch.ones(RECORDS)
    case = Case(layer, lambda records: ())
    exact = doubled(case)

    def losses(model: nn.Module, data: Tensor) -> Tensor:
        """Each entry counts by another weight, so that an exchange is noticed."""
        flat = model(data).flatten(1)
        weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
        return (flat * weights).square().mean(1) * model.head.exp()

    theirs = attached("loop", exact).clipped_sum(losses(exact.model, *in_double([x])), clip_norm, ones)
    # Circular padding writes into slices of a new tensor, which the graph does not show.
    is_circular = any(
        getattr(m, "padding_mode", "") == "circular" or isinstance(m, nn.CircularPad2d) for m in layer.modules()
    )
    # Where rounding in 32 bits moves the losses themselves, one record at a time is as far from 64 bits.
    rounded = attached("loop", case).clipped_sum(losses(layer, x), clip_norm, ones)
    for name in ("ghost", "vmap"):
        engine = attached(name, case)
        engine.begin(RECORDS)
        ours = engine.clipped_sum(losses(layer, x), clip_norm, ones)
        assert min(away(ours, theirs), away(ours, rounded)) <= CLOSE * length(theirs), name
        assert name == "vmap" or engine.is_proven or is_circular
        engine.detach()
