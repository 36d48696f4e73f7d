"""Every constructor option of torch's layers with weights: drawn at random, and each sum equal to the definition."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sums import CLOSE, attached, away, doubled, in_double, length
from zoo import Case, clip_norms

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:LSTM with projections", "ignore:enable_nested"),
]

RECORDS = 6
Draw = random.Random
#: (the layer, what it is called with, by the data; what it returns may be any nest of tensors, and the data)
Layer = tuple[nn.Module, Callable[[nn.Module, Tensor], Any], Tensor]


def _one_of(draw: Draw, *values: Any) -> Any:
    return draw.choice(values)


def _each(draw: Draw, axes: int, least: int, most: int) -> int | tuple[int, ...]:
    """One number for all axes, or one for each."""
    if draw.random() < 0.4:
        return draw.randint(least, most)
    return tuple(draw.randint(least, most) for _ in range(axes))


def _plain(layer: nn.Module, *shape: int) -> Layer:
    return layer, lambda m, x: m(x), torch.randn(RECORDS, *shape)


# -- products and tables ------------------------------------------------------------------------------------


def _linear(draw: Draw) -> Layer:
    middle = [3] * draw.randint(0, 2)
    return _plain(nn.Linear(5, draw.randint(1, 7), bias=draw.random() < 0.5), *middle, 5)


def _bilinear(draw: Draw) -> Layer:
    layer = nn.Bilinear(5, 4, draw.randint(1, 3), bias=draw.random() < 0.5)
    return layer, lambda m, x: m(x, x[..., :4].contiguous().tanh()), torch.randn(RECORDS, *[3] * draw.randint(0, 1), 5)


def _tokens(draw: Draw) -> Tensor:
    return torch.randint(9, (RECORDS, draw.randint(1, 5)))


def _embedding(draw: Draw) -> Layer:
    options = {
        "padding_idx": _one_of(draw, None, 0, -1, 3),
        "sparse": draw.random() < 0.3,
        "scale_grad_by_freq": False,
        "max_norm": _one_of(draw, None, None, 1.0),
        "norm_type": _one_of(draw, 2.0, 1.0),
    }
    return nn.Embedding(9, 4, **options), lambda m, x: m(x), _tokens(draw)


def _bag(draw: Draw) -> Layer:
    mode = _one_of(draw, "sum", "mean", "max")
    options = {"padding_idx": _one_of(draw, None, 0, 3), "sparse": mode != "max" and draw.random() < 0.3, "mode": mode}
    layer = nn.EmbeddingBag(9, 4, **options)
    if draw.random() < 0.4:
        begins = torch.arange(RECORDS + 1)
        layer = nn.EmbeddingBag(9, 4, include_last_offset=True, **options)
        return layer, lambda m, x: m(x.flatten(), begins * x.shape[1]), _tokens(draw)
    if mode == "sum" and draw.random() < 0.5:
        return layer, lambda m, x: m(x, per_sample_weights=x.to(m.weight.dtype) / 7), _tokens(draw)
    return layer, lambda m, x: m(x), _tokens(draw)


# -- convolutions -------------------------------------------------------------------------------------------


def _convolution(draw: Draw) -> Layer:
    axes, groups = draw.randint(1, 3), _one_of(draw, 1, 1, 2)
    mode = _one_of(draw, "zeros", "zeros", "reflect", "replicate", "circular")
    padding: Any = _one_of(draw, "valid", "same", _each(draw, axes, 0, 2))
    if mode == "reflect" and axes == 3:
        mode = "zeros"  # torch has no such padding
    options = {
        "kernel_size": _each(draw, axes, 1, 3),
        "stride": 1 if padding == "same" else _each(draw, axes, 1, 3),
        "padding": padding,
        "dilation": _each(draw, axes, 1, 2),
        "groups": groups,
        "bias": draw.random() < 0.5,
        "padding_mode": mode,
    }
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][axes - 1](_one_of(draw, 2, 4, 6), 2 * draw.randint(1, 5), **options)
    return _plain(layer, layer.in_channels, *[draw.randint(6, 8) for _ in range(axes)])


def _transposed(draw: Draw) -> Layer:
    axes, groups = draw.randint(1, 3), _one_of(draw, 1, 2)
    stride = [draw.randint(1, 3) for _ in range(axes)]
    dilation = [draw.randint(1, 2) for _ in range(axes)]
    options = {
        "kernel_size": _each(draw, axes, 1, 3),
        "stride": tuple(stride),
        "padding": _each(draw, axes, 0, 1),
        "output_padding": tuple(draw.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)),
        "groups": groups,
        "bias": draw.random() < 0.5,
        "dilation": tuple(dilation),
    }
    kind = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][axes - 1]
    layer = kind(_one_of(draw, 2, 4), 2 * draw.randint(1, 3), **options)
    return _plain(layer, layer.in_channels, *[draw.randint(3, 5) for _ in range(axes)])


# -- norms and activations ----------------------------------------------------------------------------------


def _layer_norm(draw: Draw) -> Layer:
    shape = _one_of(draw, [5], [4, 5], [3, 4, 5])
    options = {"eps": _one_of(draw, 1e-5, 0.1), "elementwise_affine": draw.random() < 0.8}
    layer = nn.LayerNorm(shape, bias=draw.random() < 0.5, **options)
    return _plain(nn.Sequential(nn.Linear(5, 5), layer), 3, 4, 5)


def _rms_norm(draw: Draw) -> Layer:
    options = {"eps": _one_of(draw, None, 0.1), "elementwise_affine": draw.random() < 0.8}
    return _plain(nn.Sequential(nn.Linear(5, 5), nn.RMSNorm(_one_of(draw, [5], [4, 5]), **options)), 4, 5)


def _group_norm(draw: Draw) -> Layer:
    layer = nn.GroupNorm(_one_of(draw, 1, 2, 4), 4, _one_of(draw, 1e-5, 0.1), draw.random() < 0.8)
    return _plain(nn.Sequential(nn.Conv1d(4, 4, 1), layer), 4, 5)


def _instance_norm(draw: Draw) -> Layer:
    axes = draw.randint(1, 3)
    kind = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][axes - 1]
    convolution = [nn.Conv1d, nn.Conv2d, nn.Conv3d][axes - 1](4, 4, 1)
    return _plain(nn.Sequential(convolution, kind(4, affine=draw.random() < 0.6)), 4, *[3] * axes)


def _activation(draw: Draw) -> Layer:
    layer = _one_of(
        draw,
        *(nn.PReLU(), nn.PReLU(5, 0.1), nn.GLU(1), nn.Softmax(1), nn.LogSoftmax(-1), nn.Softmin(1), nn.ELU(0.5)),
        *(nn.CELU(2.0), nn.SELU(), nn.GELU("tanh"), nn.GELU(), nn.Mish(), nn.SiLU(), nn.Hardtanh(-0.3, 0.4)),
        *(nn.Hardsigmoid(), nn.Hardswish(), nn.LeakyReLU(0.2), nn.LogSigmoid(), nn.ReLU6(), nn.Softplus(2.0, 1.0)),
        *(nn.Softshrink(0.1), nn.Hardshrink(0.1), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.1, -1.0)),
        *(nn.RReLU(0.2, 0.2), nn.Unflatten(1, (2, 3)), nn.PixelShuffle(1), nn.LocalResponseNorm(2)),
    )
    wide = 6 if isinstance(layer, nn.GLU | nn.Unflatten) else 5
    if isinstance(layer, nn.PixelShuffle):
        return _plain(nn.Sequential(nn.Conv2d(4, 8, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(2)), 4, 3, 3)
    if isinstance(layer, nn.LocalResponseNorm):
        return _plain(nn.Sequential(nn.Conv2d(4, 5, 1), layer), 4, 3, 3)
    return _plain(nn.Sequential(nn.Linear(5, wide), layer), 5)


def _pooling(draw: Draw) -> Layer:
    ceil, inside = draw.random() < 0.5, draw.random() < 0.5
    layer = _one_of(
        draw,
        nn.MaxPool2d(2, ceil_mode=ceil, padding=1),
        nn.MaxPool2d(3, 1, dilation=2),
        nn.AvgPool2d(2, ceil_mode=ceil, count_include_pad=inside, padding=1),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.AdaptiveMaxPool2d((3, None)),
        nn.LPPool2d(2, 2),
        nn.FractionalMaxPool2d(2, 3, _random_samples=torch.full((RECORDS, 4, 2), 0.4)),
        nn.Upsample(scale_factor=2, mode=_one_of(draw, "nearest", "bilinear", "bicubic")),
        nn.ZeroPad2d((1, 0, 2, 1)),
        nn.ReflectionPad2d((1, 0, 2, 1)),
        nn.CircularPad2d(1),
        nn.Unfold(2, padding=1),
        nn.Sequential(nn.Unfold(2), nn.Fold((7, 6), 2)),
    )
    return _plain(nn.Sequential(nn.Conv2d(2, 4, 1), layer), 2, 7, 6)


# -- sequences ----------------------------------------------------------------------------------------------


def _recurrent(draw: Draw) -> Layer:
    kind = _one_of(draw, nn.RNN, nn.LSTM, nn.LSTM, nn.GRU)
    options: dict[str, Any] = {
        "num_layers": draw.randint(1, 2),
        "bias": draw.random() < 0.7,
        "batch_first": draw.random() < 0.6,
        "bidirectional": draw.random() < 0.4,
    }
    if kind is nn.RNN:
        options["nonlinearity"] = _one_of(draw, "tanh", "relu")
    if kind is nn.LSTM:
        options["proj_size"] = _one_of(draw, 0, 0, 2)
    layer = kind(5, 4, **options)
    outputs = lambda m, x: m(x) if m.batch_first else m(x.transpose(0, 1))[0].transpose(0, 1)  # noqa: E731
    whole = lambda m, x: outputs(m, x)[0] if m.batch_first else outputs(m, x)  # noqa: E731
    return layer, whole, torch.randn(RECORDS, draw.randint(1, 4), 5)


def _cell(draw: Draw) -> Layer:
    layer = _one_of(draw, nn.RNNCell, nn.LSTMCell, nn.GRUCell)(5, 4, bias=draw.random() < 0.6)

    def steps(model: nn.Module, x: Tensor) -> Tensor:
        state = None
        for now in x.unbind(1):
            state = model(now, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    return layer, steps, torch.randn(RECORDS, draw.randint(1, 3), 5)


def _attention(draw: Draw) -> Layer:
    kdim, vdim = _one_of(draw, (None, None), (None, None), (5, 7), (8, 7))
    options = {
        "bias": draw.random() < 0.7,
        "add_bias_kv": draw.random() < 0.4,
        "add_zero_attn": draw.random() < 0.4,
        "batch_first": draw.random() < 0.6,
    }
    layer = nn.MultiheadAttention(8, _one_of(draw, 1, 2, 4), kdim=kdim, vdim=vdim, **options)
    call = {
        "need_weights": draw.random() < 0.5,
        "average_attn_weights": draw.random() < 0.5,
        "key_padding_mask": _one_of(draw, None, torch.arange(4).expand(RECORDS, -1) > 2),
    }
    if not options["add_bias_kv"] and not options["add_zero_attn"] and draw.random() < 0.5:
        call["attn_mask"] = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)

    def outputs(model: nn.Module, x: Tensor) -> Any:
        given = [x, 2 * x[..., : kdim or 8], 3 * x[..., : vdim or 8]]
        if not model.batch_first:
            given = [t.transpose(0, 1) for t in given]
        result, weights = model(*given, **call)
        result = result if model.batch_first else result.transpose(0, 1)
        return result if weights is None else torch.cat([result.flatten(1), weights.flatten(1)], 1)

    return layer, outputs, torch.randn(RECORDS, 4, 8)


def _transformer(draw: Draw) -> Layer:
    options = {
        "dropout": 0.0,
        "activation": _one_of(draw, "relu", "gelu", torch.tanh),
        "batch_first": draw.random() < 0.6,
        "norm_first": draw.random() < 0.5,
        "bias": draw.random() < 0.7,
        "layer_norm_eps": _one_of(draw, 1e-5, 1e-2),
    }
    is_decoder = draw.random() < 0.5
    layer = (nn.TransformerDecoderLayer if is_decoder else nn.TransformerEncoderLayer)(8, 2, 12, **options)

    def outputs(model: nn.Module, x: Tensor) -> Tensor:
        x = x if options["batch_first"] else x.transpose(0, 1)
        y = model(x, x.tanh()) if is_decoder else model(x)
        return y if options["batch_first"] else y.transpose(0, 1)

    return layer, outputs, torch.randn(RECORDS, 3, 8)


LAYERS: dict[str, tuple[Callable[[Draw], Layer], int]] = {
    "linear": (_linear, 8),
    "bilinear": (_bilinear, 6),
    "embedding": (_embedding, 24),
    "embedding bag": (_bag, 24),
    "convolution": (_convolution, 120),
    "transposed convolution": (_transposed, 60),
    "layer norm": (_layer_norm, 12),
    "rms norm": (_rms_norm, 8),
    "group norm": (_group_norm, 12),
    "instance norm": (_instance_norm, 12),
    "activation": (_activation, 60),
    "pooling": (_pooling, 40),
    "recurrent": (_recurrent, 60),
    "cell": (_cell, 16),
    "attention": (_attention, 80),
    "transformer layer": (_transformer, 30),
}


DRAWN = [
    pytest.param(make, seed, id=f"{name} {seed}") for name, (make, count) in LAYERS.items() for seed in range(count)
]


def _losses(outputs: Any) -> Tensor:
    """Each entry counts by another weight, so that an exchange is noticed."""
    flat = outputs.flatten(1)
    return (flat * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).square().mean(1)


def _sums(make: Callable[[Draw], Layer], seed: int, engines: Sequence[str]) -> tuple[list[Any], list[Tensor]]:
    torch.manual_seed(seed)
    layer, outputs, x = make(Draw(seed))
    head = nn.Parameter(torch.ones(1))  # layers without weights, too, have a parameter behind them
    layer.register_parameter("head", head)
    case = Case(layer, lambda records: ())
    exact = doubled(case)
    clip_norm, ones = clip_norms(RECORDS, 0.3), torch.ones(RECORDS)

    def losses(model: nn.Module, data: Tensor) -> Tensor:
        return _losses(outputs(model, data)) * model.head.exp()

    theirs = attached("loop", exact).clipped_sum(losses(exact.model, *in_double([x])), clip_norm, ones)
    found = []
    for name in engines:
        engine = attached(name, case)
        engine.begin(RECORDS)
        found.append((engine, engine.clipped_sum(losses(layer, x), clip_norm, ones)))
        engine.detach()
    return found, theirs


@pytest.mark.parametrize(("make", "seed"), DRAWN)
def test_every_option_of_a_layer_gives_the_definitions_sum(make, seed):
    found, theirs = _sums(make, seed, ["ghost", "vmap"])
    for engine, ours in found:
        assert away(ours, theirs) <= CLOSE * length(theirs), type(engine).__name__
    # Circular padding writes into slices of a new tensor, which the graph does not show.
    assert found[0][0].is_proven != any(isinstance(module, nn.CircularPad2d) for module in found[0][0]._model.modules())
