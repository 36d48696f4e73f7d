"""Random models: two to four blocks and a head, from a table of layers with random options and one of computations.

To add a layer: a line in LAYERS. To add a computation: a line in COMPUTED, a function (m, x) of parts that are made
when it first asks for them (PARTS). A block takes records of one kind, and `a > b` gives those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, rnn, weight_norm
from torch.utils.checkpoint import checkpoint

CLASSES, VOCABULARY = 3, 9
Compute = Callable[[Any, Tensor], Tensor]


class Computed(nn.Module):
    """A function (m, x). Its parts are made for the sizes of one record, when it is first called."""

    def __init__(self, compute: Compute, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.compute, self.sizes = compute, sizes

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def extra_repr(self) -> str:
        return f"families.py:{self.compute.__code__.co_firstlineno}"

    def __getattr__(self, name: str) -> Any:
        if name in PARTS and name not in self._modules and name not in self._parameters:
            setattr(self, name, PARTS[name](*self.sizes))
        return super().__getattr__(name)


def _parameter(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(sizes))


def _same_weight(layer: nn.Linear) -> nn.ModuleList:
    other = nn.Linear(layer.in_features, layer.out_features)
    other.weight = layer.weight
    return nn.ModuleList([layer, other])


#: d is the last of a record's sizes, its features; c the first, its channels or steps.
PARTS: dict[str, Callable[..., Any]] = {
    "layer": lambda *s: nn.Linear(s[-1], s[-1]),
    "other": lambda *s: nn.Linear(s[-1], s[-1], bias=False),
    "frozen": lambda *s: nn.Linear(s[-1], s[-1]).requires_grad_(False),
    "to_one": lambda *s: nn.Linear(s[-1], 1),
    "to_four": lambda *s: nn.Linear(s[-1], 4),
    "to_twelve": lambda *s: nn.Linear(s[-1], 12),
    "two": lambda *s: _same_weight(nn.Linear(s[-1], s[-1])),
    "experts": lambda *s: nn.ModuleList(nn.Linear(s[-1], 4) for _ in range(3)),
    "generated": lambda *s: nn.Linear(s[-1], 4 * s[-1]),
    "bilinear": lambda *s: nn.Bilinear(s[-1], s[-1], 3),
    "brain": lambda *s: nn.Linear(s[-1], 4).bfloat16(),
    "sixteen": lambda *s: nn.Linear(s[-1], 4).half(),
    "scale": lambda *s: _parameter(s[-1]),
    "shift": lambda *s: _parameter(1, s[-1]),
    "gate": lambda *s: nn.Parameter(torch.tensor(0.3)),
    "points": lambda *s: _parameter(5, s[-1]),
    "packed": lambda *s: nn.Parameter(torch.randn(3 * s[-1], s[-1]) / s[-1] ** 0.5),
    "a": lambda *s: _parameter(s[-1], 2),
    "b": lambda *s: _parameter(2, s[-1]),
    "complex": lambda *s: _parameter(s[-1], 4, 2),
    "bands": lambda *s: _parameter(s[-1] // 2 + 1, 2),
    "grid": lambda *s: nn.Parameter(torch.linspace(-2, 2, 4)),
    "splines": lambda *s: _parameter(s[-1], 3, 4),
    "table": lambda *s: nn.Embedding(VOCABULARY, 4),
    "rows": lambda *s: nn.Embedding(s[0], s[-1], sparse=True),
    "distances": lambda *s: _parameter(5),
    "positions": lambda *s: _parameter(*s),
    "first": lambda *s: _parameter(1, 1, s[-1]),
    "mixer": lambda *s: nn.Linear(s[0], s[0]),
    "cell": lambda *s: nn.LSTMCell(s[-1], 4),
    "gru": lambda *s: nn.GRU(s[-1], 4, batch_first=True),
    "causal": lambda *s: nn.Conv1d(s[-1], s[-1], 2, dilation=2),
    "channels": lambda *s: nn.Linear(s[0], s[0]),
    "places": lambda *s: nn.Linear(s[0], 6),
    "patches": lambda *s: nn.Linear(4 * s[0], 3),
    "norm": lambda *s: nn.LayerNorm(s[0]),
    "same": lambda *s: _convolution(s)(s[0], s[0], 3, padding=1),
    "point": lambda *s: _convolution(s)(s[0], s[0], 1),
    "fours": lambda *s: _convolution(s)(s[0], 4 * s[0], 1),
    "bag": lambda *s: nn.EmbeddingBag(VOCABULARY, 4, mode="sum"),
    "bag_weights": lambda *s: _parameter(*s),
}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _by_inputs(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.autograd.grad(m.layer(x).tanh().sum(), x, create_graph=True)[0]


def _dense_experts(m: Any, x: Tensor) -> Tensor:
    weight, place = m.to_four(x)[:, :3].topk(2, -1)
    outputs = torch.stack([expert(x) for expert in m.experts], 1)
    return (outputs.gather(1, place[..., None].expand(-1, -1, 4)) * weight.softmax(-1)[..., None]).sum(1)


def _routed_experts(m: Any, x: Tensor) -> Tensor:
    weight, place = m.to_four(x)[:, :3].softmax(-1).max(-1)
    total = x.new_zeros(len(x), 4)
    for k, expert in enumerate(m.experts):
        rows = (place == k).nonzero()[:, 0]
        total = total.index_add(0, rows, expert(x[rows]) * weight[rows, None])
    return total


def _nearest(m: Any, x: Tensor) -> Tensor:
    near = m.points[torch.cdist(x, m.points).argmin(1)]
    return x + (near - x).detach() + 0.1 * (near - x.detach())


def _solved(m: Any, x: Tensor) -> Tensor:
    matrix = m.to_four(x).view(-1, 2, 2)
    return torch.linalg.solve(matrix @ matrix.mT + torch.eye(2).to(x), x[:, :2, None])[..., 0]


def _recurrent_by_cell(m: Any, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1):
        state = m.cell(step, state)
    return state[0]


def _packed_sequences(m: Any, x: Tensor) -> Tensor:
    lengths = (x[:, :, 0] > 0).sum(1).clamp_min(1).cpu()
    return m.gru(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][-1]


def _rotated(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.to_twelve(x).chunk(3, -1)
    angle = torch.arange(x.shape[1])[:, None].to(x) * torch.tensor([1.0, 0.1]).to(x)
    a, b = q.chunk(2, -1)
    q = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return (q @ k.mT).softmax(-1) @ v


def _by_distance(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.to_twelve(x).unflatten(-1, (3, 4)).permute(2, 0, 1, 3)
    far = torch.arange(x.shape[1])
    return ((q @ k.mT) / 2 + m.distances[(far[:, None] - far) % 5]).softmax(-1) @ v


def _written_over(m: Any, x: Tensor) -> Tensor:
    out = m.positions.expand(len(x), -1, -1).clone()
    out[:, 0] = m.layer(x[:, 0])
    return out


def _sampled(m: Any, x: Tensor) -> Tensor:
    grid = F.affine_grid(m.places(x.mean((2, 3))).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _space(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _of_all(values: Tensor, like: Tensor) -> Tensor:
    """(records, channels) as (records, channels, 1, …)."""
    return values.view(*values.shape, *(1 for _ in _space(like)))


def _linear(m: Any, x: Tensor, parts: Any) -> Tensor:
    return sum((F.linear(x, part)[:, :2].tanh() for part in parts), x[:, :2])


COMPUTED: dict[str, list[Compute]] = {
    "flat": [
        lambda m, x: m.layer(m.layer(x).tanh()),
        lambda m, x: F.linear(m.layer(x).tanh(), m.layer.weight.T),
        lambda m, x: m.two[0](x).relu() + m.two[1](x),
        lambda m, x: F.linear(x, m.layer.weight + m.a @ m.b, m.layer.bias),
        lambda m, x: m.frozen(x) + x @ m.a @ m.b,
        lambda m, x: F.linear(x, m.frozen.weight + m.a @ m.b),
        lambda m, x: x @ torch.cat([m.a, m.b.T], 1)[:, ::2],
        lambda m, x: _linear(m, x, m.packed.chunk(3)),
        lambda m, x: _linear(m, x, m.packed.split([x.shape[1] + 1, x.shape[1] - 1, x.shape[1]])[::2]),
        lambda m, x: _linear(m, x, m.packed.view(3, *2 * x.shape[1:]).unbind()),
        lambda m, x: _linear(m, x, m.packed.unflatten(0, (3, -1)).transpose(1, 2).unbind(0)),
        lambda m, x: _linear(m, x, (m.packed[: x.shape[1]], m.packed[-x.shape[1] :])),
        lambda m, x: m.bilinear(x, x.tanh()),
        lambda m, x: x * m.scale + m.shift,
        lambda m, x: x + m.gate * m.layer(x).tanh(),
        lambda m, x: torch.addcmul(x, x, m.scale) - m.shift.expand(len(x), -1),
        lambda m, x: torch.where(x > m.gate, x, m.scale),
        lambda m, x: m.layer(x).mul_(m.scale).add_(m.shift),
        lambda m, x: torch.stack([x, m.scale.expand_as(x)], -1).logsumexp(-1),
        lambda m, x: _Square.apply(m.layer(x).tanh()),
        lambda m, x: checkpoint(m.layer, x, use_reentrant=False),
        lambda m, x: checkpoint(m.layer, m.other(x), use_reentrant=True),
        lambda m, x: torch.func.vmap(m.layer)(x),
        lambda m, x: torch.func.vmap(torch.func.grad(lambda row: m.layer(row).tanh().sum()))(x),
        lambda m, x: torch.bmm(m.generated(x).view(len(x), 4, -1), m.layer(x)[..., None])[..., 0],
        lambda m, x: -torch.cdist(x, m.points),
        lambda m, x: 10 * F.normalize(x, dim=-1) @ F.normalize(m.points, dim=-1).T,
        lambda m, x: torch.exp(-((x[:, None] - m.points) ** 2).sum(-1)),
        lambda m, x: torch.einsum("nd,pd->np", x, m.points),
        lambda m, x: torch.einsum("nik,iok->no", torch.exp(-((x[..., None] - m.grid) ** 2)), m.splines),
        lambda m, x: (torch.complex(x, x) @ torch.view_as_complex(m.complex)).abs(),
        lambda m, x: torch.view_as_real(torch.fft.rfft(x) * torch.view_as_complex(m.bands)).flatten(1),
        lambda m, x: torch.fft.fft(m.to_four(x)).real,
        lambda m, x: torch.linalg.matrix_exp(m.to_four(x).tanh().view(-1, 2, 2)).flatten(1),
        lambda m, x: m.layer(x).sort(1).values,
        lambda m, x: m.layer(x).topk(2, 1).values,
        lambda m, x: m.layer(x).sigmoid().cumprod(1).cumsum(1),
        lambda m, x: m.layer(x).gather(1, x.argsort(1)).roll(1, 1).flip(1),
        lambda m, x: m.layer(x).masked_fill(x > 0, 0.5).clamp(-2, 2),
        lambda m, x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), m.layer(x)),
        lambda m, x: m.table((x > 0).long() + 2 * (x > 1).long()).flatten(1),
        lambda m, x: m.brain(x.to(m.brain.weight.dtype)).to(x.dtype),
        lambda m, x: m.sixteen(x.to(m.sixteen.weight.dtype)).to(x.dtype),
        lambda m, x: (m.other(x), m.layer(x))[1],
        _by_inputs, _dense_experts, _routed_experts, _nearest, _solved,
    ],
    "flat > steps": [lambda m, x: m.to_twelve(x).view(len(x), -1, 4), lambda m, x: m.to_twelve(x).unflatten(1, (6, 2))],
    "steps": [
        lambda m, x: m.layer(x.reshape(-1, x.shape[-1])).view(x.shape),
        lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1).tanh(),
        lambda m, x: torch.einsum("ntd,kd->ntk", x, m.layer.weight),
        lambda m, x: torch.bmm(x, m.layer.weight.T.expand(len(x), -1, -1)),
        lambda m, x: m.layer(x) * m.other(x).sigmoid(),
        lambda m, x: x + m.mixer(x.transpose(1, 2)).transpose(1, 2),
        lambda m, x: x + m.causal(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2).relu(),
        lambda m, x: (m.layer(x) * m.other(x).sigmoid()).cumsum(1).tanh(),
        lambda m, x: torch.fft.fft2(m.layer(x), dim=(-2, -1)).real,
        lambda m, x: m.layer(x).logcumsumexp(1),
        lambda m, x: F.scaled_dot_product_attention(*m.to_twelve(x).chunk(3, -1)),
        lambda m, x: F.scaled_dot_product_attention(*m.to_twelve(x).split(4, -1), is_causal=True),
        lambda m, x: F.scaled_dot_product_attention(*m.to_twelve(x).unflatten(-1, (3, 4)).unbind(-2)),
        lambda m, x: (F.elu(m.layer(x)) + 1) @ ((F.elu(m.other(x)) + 1).mT @ x) / x.shape[1],
        lambda m, x: torch.cat([m.first.expand(len(x), -1, -1), x + m.positions], 1),
        lambda m, x: torch.cat([x, m.first.repeat(len(x), 1, 1)], 1),
        lambda m, x: x + m.rows(torch.arange(x.shape[1])),
        _rotated, _by_distance, _written_over,
    ],
    "steps > flat": [
        lambda m, x: x.mean(1),
        lambda m, x: x[:, -1],
        lambda m, x: x.amax(1),
        lambda m, x: x.logsumexp(1),
        lambda m, x: x.flatten(1),
        lambda m, x: (m.to_one(x).softmax(1) * x).sum(1),
        lambda m, x: (m.first.expand(len(x), -1, -1) @ x.mT).softmax(-1).bmm(x)[:, 0],
        lambda m, x: ((x[..., :1] > 0) * x).sum(1) / (x[..., :1] > 0).sum(1).clamp_min(1),
        _recurrent_by_cell, _packed_sequences,
    ],
    "planes": [
        lambda m, x: x + m.same(x).relu(),
        lambda m, x: torch.cat([x, m.same(x), m.point(x).relu_()], 1),
        lambda m, x: x * _of_all(m.channels(x.mean(_space(x))).sigmoid(), x),
        lambda m, x: m.point(torch.cat([x, 2 * x], 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)[:, ::2]),
        lambda m, x: m.norm(m.same(x).movedim(1, -1)).movedim(-1, 1) * m.gate + x,
        lambda m, x: m.patches(F.unfold(x, 2).mT).mT.unflatten(2, (x.shape[2] - 1, x.shape[3] - 1)),
        lambda m, x: F.pixel_shuffle(m.fours(x), 2),
        lambda m, x: F.max_unpool2d(*F.max_pool2d(m.fours(x), 2, return_indices=True), 2),
        _sampled,
    ],
    "planes > flat": [lambda m, x: x.mean(_space(x)), lambda m, x: x.amax(_space(x)), lambda m, x: x.flatten(1)],
    "planes > steps": [lambda m, x: x.flatten(2).transpose(1, 2)],
    "tokens > steps": [
        lambda m, x: m.table(x),
        lambda m, x: F.one_hot(x, VOCABULARY).to(m.table.weight.dtype) @ m.table.weight,
        lambda m, x: F.linear(m.table(x).tanh(), m.table.weight),
    ],
    "tokens > flat": [
        lambda m, x: m.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1])),
        lambda m, x: m.bag(x, per_sample_weights=m.bag_weights.expand(len(x), -1)),
        lambda m, x: (m.table.weight[x] * (x > 0)[..., None]).sum(1),
    ],
}  # fmt: skip


# -- layers with random options ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Random choices: `options.flag` is a new one each time."""

    pick: Random

    @property
    def flag(self) -> bool:
        return self.pick.random() < 0.5

    def one(self, *choices: Any) -> Any:
        return self.pick.choice(choices)

    def groups(self, width: int) -> int:
        return self.one(*(g for g in range(1, width) if width % g == 0), *(() if width > 1 else (1,)))


def _activation(o: Options, width: int) -> nn.Module:
    smooth = (nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.SELU, nn.Mish, nn.Hardswish, nn.Softsign)
    return o.one(o.one(*smooth)(), nn.ReLU(inplace=o.flag), nn.LeakyReLU(), nn.PReLU(o.one(1, width)), nn.Dropout(0.0))


def _convolution(sizes: tuple[int, ...]) -> Any:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(sizes) - 2]


def _any_convolution(o: Options, c: int, *space: int) -> nn.Module:
    padding = o.one(0, 1, "same", "valid")
    how = {"stride": 1 if padding == "same" else o.one(1, 2), "dilation": o.one(1, 1, 2), "groups": o.one(1, c)}
    how |= {"bias": o.flag, "padding_mode": o.one("zeros", "zeros", "zeros", "circular", "reflect", "replicate")}
    layer = _convolution((c, *space))(c, c * o.one(1, 2), o.one(1, 2, 3), padding=padding, **how)
    return nn.Sequential(o.one(layer, layer, parametrizations.weight_norm(layer)), _activation(o, layer.out_channels))


def _transposed_convolution(o: Options, c: int, *space: int) -> nn.Module:
    kind, stride = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(space) - 1], o.one(1, 2)
    how = {"padding": o.one(0, 1), "output_padding": stride - 1, "groups": o.one(1, c), "dilation": o.one(1, 2)}
    return kind(c, 2 * c, o.one(2, 3), stride=stride, bias=o.flag, **how)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def _made_weight(o: Options, d: int) -> nn.Module:
    def symmetric(layer: nn.Module) -> nn.Module:
        return parametrize.register_parametrization(layer, "weight", _Symmetric())

    made: nn.Module = o.one(parametrizations.weight_norm, parametrizations.orthogonal, weight_norm, symmetric)(
        nn.Linear(d, d, bias=o.flag)
    )
    return made


def _attention(o: Options, t: int, d: int) -> nn.Module:
    heads, is_first, is_self, width = o.one(1, 2), o.flag, o.flag, o.one(4, 8)
    how = {"bias": o.flag, "add_bias_kv": o.flag, "add_zero_attn": o.flag, "batch_first": is_first}
    widths = {} if is_self or o.flag else {"kdim": width, "vdim": width}
    masked, padded, call = is_self and o.flag, o.flag, {"need_weights": o.flag}

    def compute(m: Any, x: Tensor) -> Tensor:
        query = m.query(x if is_first else x.transpose(0, 1))
        memory = query if is_self else m.memory(x[:, :2] if is_first else x.transpose(0, 1)[:2])
        steps = memory.shape[1 if is_first else 0]
        last = (torch.arange(steps) == steps - 1).expand(len(x), -1) if padded and steps > 1 else None
        mask = torch.ones(t, t).triu(1).bool() if masked else None
        out = m.attention(query, memory, memory, key_padding_mask=last, attn_mask=mask, **call)[0]
        return out if is_first else out.transpose(0, 1)

    block = Computed(compute, (t, d))
    block.query, block.memory = nn.Linear(d, 4 * heads), nn.Linear(d, width if widths else 4 * heads)
    block.attention = nn.MultiheadAttention(4 * heads, heads, **how, **widths)
    return block


def _transformer(o: Options, t: int, d: int) -> nn.Module:
    how: dict[str, Any] = {"nhead": 2, "dim_feedforward": 6, "dropout": 0.0, "batch_first": True, "bias": o.flag}
    how |= {"norm_first": o.flag, "activation": o.one("relu", "gelu")}
    which = o.one("encoder", "decoder", "both")
    block = Computed(
        lambda m, x: m.stack(m.to_four(x)) if which == "encoder" else m.stack(m.to_four(x), m.to_four(x[:, :2])), (t, d)
    )
    kinds = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}
    one_each = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    block.stack = nn.Transformer(4, **one_each, **how) if which == "both" else kinds[which](4, **how)
    return block


def _recurrent(o: Options, t: int, d: int) -> nn.Module:
    kind, is_first = o.one(nn.LSTM, nn.GRU, nn.RNN), o.flag
    how = {"num_layers": o.one(1, 2), "bidirectional": o.flag, "bias": o.flag, "batch_first": is_first}
    how |= (
        {"proj_size": o.one(0, 2)}
        if kind is nn.LSTM
        else {"nonlinearity": o.one("tanh", "relu")}
        if kind is nn.RNN
        else {}
    )
    flip = (lambda x: x) if is_first else (lambda x: x.transpose(0, 1))
    block = Computed(lambda m, x: flip(m.recurrent(flip(x))[0]), (t, d))
    block.recurrent = kind(d, 4, **how)
    return block


def _resized(o: Options, *sizes: int) -> nn.Module:
    two = (nn.MaxPool2d(2, 1), nn.AvgPool2d(2, ceil_mode=True), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2))
    more = (nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReflectionPad2d(1), nn.LocalResponseNorm(2))
    one = (nn.MaxPool1d(2), nn.AvgPool1d(2, padding=1), nn.AdaptiveAvgPool1d(2), nn.Upsample(scale_factor=2))
    return o.one(*{1: one, 2: two + more, 3: (nn.MaxPool3d(2), nn.AvgPool3d(2))}[len(sizes) - 1])


def _norm(o: Options, *sizes: int) -> nn.Module:
    groups = nn.GroupNorm(o.groups(sizes[0]), sizes[0], affine=o.flag)
    last = nn.LayerNorm(sizes[-1], elementwise_affine=o.flag)
    return o.one(nn.LayerNorm(sizes, bias=o.flag), last, groups, nn.RMSNorm(sizes[-1]), nn.PReLU(sizes[0]))


def _instance_norm(o: Options, c: int, *space: int) -> nn.Module:
    """Not nn.InstanceNorm2d: its gradient in torch is wrong for a batch of one if that of its output is transposed."""
    return nn.GroupNorm(c, c)


#: By kind, repeated where they should occur more often.
LAYERS: dict[str, list[Callable[..., nn.Module]]] = {
    "flat": 3 * [lambda o, d: nn.Sequential(nn.Linear(d, o.one(2, 5, 8), bias=o.flag), nn.Tanh())]
    + [lambda o, d: nn.Sequential(nn.Linear(d, d), _activation(o, d)), _made_weight, _made_weight, _norm, _norm],
    "steps": 2
    * [lambda o, t, d: nn.Linear(d, o.one(2, 8, d), bias=o.flag), _attention, _transformer, _recurrent, _norm],
    "planes": [*4 * [_any_convolution], _transposed_convolution, _resized, _norm, _instance_norm],
    "tokens > steps": 2 * [lambda o, t: nn.Embedding(VOCABULARY, 4, padding_idx=o.one(None, 0), sparse=o.flag)],
    "tokens > flat": [
        lambda o, t: nn.EmbeddingBag(VOCABULARY, 4, mode=o.one("sum", "mean", "max"), padding_idx=o.one(None, 0))
    ],
}

# -- models ------------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "smoothed": lambda out, y: F.cross_entropy(out, y, reduction="none", label_smoothing=0.1),
    "weighted": lambda out, y: F.cross_entropy(out, y, reduction="none", weight=torch.tensor([1.0, 3.0, 0.2]).to(out)),
    "squares": lambda out, y: (out - F.one_hot(y, CLASSES)).square().mean(1),
    "logistic": lambda out, y: F.softplus(out * (1 - 2 * F.one_hot(y, CLASSES))).sum(1),
    "margin": lambda out, y: F.multi_margin_loss(out, y, reduction="none"),
    "huber": lambda out, y: F.smooth_l1_loss(out, F.one_hot(y, CLASSES).to(out), reduction="none").sum(1),
}
#: Sizes of a record. Wide steps are clipped by Gram matrices, narrow ones by all entries.
SIZES: dict[str, list[tuple[int, ...]]] = {
    "flat": [(2,), (3,), (5,), (9,)],
    "steps": [(1, 4), (2, 3), (3, 4), (5, 2), (9, 6), (33, 3), (2, 96), (3, 96), (17, 96)],
    "planes": [(2, 9), (4, 9), (1, 5, 6), (3, 7, 7), (4, 5, 5), (2, 4, 4, 5)],
    "tokens": [(1,), (4,), (9,)],
}
#: Values of a record after a block, and parameters of a block.
LARGEST, LARGEST_STEPS, MOST_PARAMETERS = 600, 2_000, 20_000


@dataclass(frozen=True)
class Drawn:
    """A model, what it takes, the sizes of one record, and the name of a loss (records,) of outputs and targets."""

    model: nn.Module
    takes: str
    sizes: tuple[int, ...]
    loss: str

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return LOSSES[self.loss](outputs, targets)


def sample(takes: str, sizes: tuple[int, ...], records: int) -> Tensor:
    return torch.randint(VOCABULARY, (records, *sizes)) if takes == "tokens" else torch.randn(records, *sizes)


def draw_model(pick: Random) -> Drawn:
    """Two to four blocks, or more until records are flat, and a linear head. torch's generator gives the weights."""
    takes = kind = pick.choice(["flat", "steps", "steps", "planes", "planes", "tokens"])
    sizes = pick.choice(SIZES[takes])
    x, layers, wanted = sample(takes, sizes, 2), [], pick.randint(2, 4)
    while len(layers) < wanted or kind != "flat":
        fitting = [name for name in {**COMPUTED, **LAYERS} if name.split(" > ")[0] == kind]
        is_last, other = len(layers) >= wanted, [name for name in fitting if ">" in name]
        name = kind if kind in fitting and not is_last and pick.random() < 0.7 else pick.choice(other)
        gives = name.split(" > ")[-1]
        try:
            block = _block(pick, name, tuple(x.shape[1:]))
            with torch.no_grad():
                out = block(x)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue  # a block that does not fit these sizes
        largest = LARGEST_STEPS if gives == "steps" else LARGEST
        if not 0 < out[0].numel() <= largest or sum(p.numel() for p in block.parameters()) > MOST_PARAMETERS:
            continue
        layers, kind, x = [*layers, block], gives, out
    return Drawn(nn.Sequential(*layers, nn.Linear(x.shape[1], CLASSES)), takes, sizes, pick.choice([*LOSSES]))


def _block(pick: Random, name: str, sizes: tuple[int, ...]) -> nn.Module:
    layers, computed = LAYERS.get(name, []), COMPUTED.get(name, [])
    if layers and (not computed or pick.random() < 0.6):
        return pick.choice(layers)(Options(pick), *sizes)
    return Computed(pick.choice(computed), sizes)
