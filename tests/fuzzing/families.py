"""Families of blocks with random options, and random models of two to four blocks and a head.

To add a family: a function (choice, *sizes of one record) -> module, with the kind of records that it takes. Blocks of
any kinds can follow each other: the sizes after a block are those that it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from functional import Model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

CLASSES, VOCABULARY = 3, 9
#: flat (d), steps (t, d), planes (c, *space), tokens (t)
KINDS = ("flat", "steps", "planes", "tokens")


@dataclass(frozen=True)
class Family:
    """Blocks that take records of one kind, and give records of the same kind or another."""

    takes: str
    gives: str
    make: Callable[..., nn.Module]


FAMILIES: dict[str, Family] = {}


def _family(takes: str, gives: str = "") -> Callable[[Callable[..., nn.Module]], None]:
    def note(make: Callable[..., nn.Module]) -> None:
        FAMILIES[make.__name__.strip("_")] = Family(takes, gives or takes, make)

    return note


def _activation(pick: Random, width: int) -> nn.Module:
    plain = [nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.SELU, nn.Mish, nn.Hardswish, nn.LeakyReLU, nn.Softsign]
    return pick.choice(
        [*(make() for make in plain), nn.ReLU(inplace=pick.random() < 0.5), nn.PReLU(), nn.PReLU(width), nn.RReLU(1, 1)]
    )


def _groups(pick: Random, width: int) -> int:
    return pick.choice([g for g in range(1, width + 1) if width % g == 0 and width // g > 1] or [1])


def _flag(pick: Random) -> bool:
    return pick.random() < 0.5


# -- flat: (records, d) ------------------------------------------------------------------------------------------------


@_family("flat")
def _linear(pick: Random, d: int) -> nn.Module:
    layer = nn.Linear(d, pick.randint(2, 8), bias=_flag(pick))
    return nn.Sequential(layer, _activation(pick, layer.out_features))


@_family("flat")
def _norm(pick: Random, d: int) -> nn.Module:
    options = {"elementwise_affine": _flag(pick)}
    group = nn.GroupNorm(_groups(pick, d), d, affine=_flag(pick))
    return pick.choice([nn.LayerNorm(d, bias=_flag(pick)), nn.LayerNorm(d, **options), nn.RMSNorm(d, **options), group])


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@_family("flat")
def _weight_from_parameters(pick: Random, d: int) -> nn.Module:
    layer = nn.Linear(d, d)
    old: Any = nn.utils.weight_norm  # deprecated, and used
    symmetric = nn.utils.parametrize.register_parametrization
    wraps = [parametrizations.weight_norm, parametrizations.orthogonal, old]
    return pick.choice([*wraps, lambda made: symmetric(made, "weight", _Symmetric())])(layer)


@_family("flat")
def _merged_weight(pick: Random, d: int) -> nn.Module:
    parts = {"a": nn.Parameter(torch.randn(d, 2)), "b": nn.Parameter(torch.randn(2, d)), "base": nn.Linear(d, d)}
    parts["base"].requires_grad_(_flag(pick))
    ways = [
        lambda m, x: F.linear(x, m.base.weight + m.a @ m.b, m.base.bias),
        lambda m, x: m.base(x) + x @ m.a @ m.b,
        lambda m, x: x @ torch.cat([m.a, m.b.T], 1)[:, ::2],
    ]
    return Model(pick.choice(ways), **parts)


@_family("flat")
def _weight_in_parts(pick: Random, d: int) -> nn.Module:
    """Equal and unequal parts of one packed weight, by slices, chunk, split and unbind."""
    weight = nn.Parameter(torch.randn(3 * d, d) / d**0.5)
    ways = [
        lambda w: w.chunk(3),
        lambda w: w.split([d + 1, d - 1, d])[::2],
        lambda w: w.view(3, d, d).unbind(),
        lambda w: (w[:d], w[d : 2 * d]),
        lambda w: w.unflatten(0, (3, -1)).transpose(1, 2).unbind(0),
    ]
    parts = pick.choice(ways)
    return Model(lambda m, x: sum((F.linear(x, p)[:, :2].tanh() for p in parts(m.weight)), x[:, :2]), weight=weight)


@_family("flat")
def _bilinear(pick: Random, d: int) -> nn.Module:
    layer = nn.Bilinear(d, d, pick.randint(2, 5), bias=_flag(pick))
    return Model(lambda m, x: m.layer(x, x.tanh()), layer=layer)


@_family("flat")
def _experts(pick: Random, d: int) -> nn.Module:
    def dense(m: Any, x: Tensor) -> Tensor:
        weight, place = m.gate(x).topk(2, -1)
        outputs = torch.stack([expert(x) for expert in m.experts], 1)
        return (outputs.gather(1, place[..., None].expand(-1, -1, 4)) * weight.softmax(-1)[..., None]).sum(1)

    def routed(m: Any, x: Tensor) -> Tensor:
        weight, place = m.gate(x).softmax(-1).max(-1)
        total = x.new_zeros(len(x), 4)
        for k, expert in enumerate(m.experts):
            rows = (place == k).nonzero()[:, 0]
            total = total.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return total

    experts = nn.ModuleList(nn.Linear(d, 4) for _ in range(3))
    return Model(pick.choice([dense, routed]), gate=nn.Linear(d, 3), experts=experts)


@_family("flat")
def _scaled(pick: Random, d: int) -> nn.Module:
    ways = [
        lambda m, x: x * m.scale + m.shift,
        lambda m, x: x + m.gate * m.layer(x).tanh(),
        lambda m, x: torch.addcmul(x, x, m.scale) - m.shift[None].expand(len(x), -1),
        lambda m, x: torch.where(x > m.gate, x, m.scale),
        lambda m, x: m.layer(x).mul_(m.scale).add_(m.shift),
        lambda m, x: torch.stack([x, m.scale.expand_as(x)], -1).logsumexp(-1),
    ]
    parts = {"scale": nn.Parameter(torch.randn(d)), "shift": nn.Parameter(torch.randn(d))}
    return Model(pick.choice(ways), **parts, gate=nn.Parameter(torch.tensor(0.3)), layer=nn.Linear(d, d))


@_family("flat")
def _used_twice(pick: Random, d: int) -> nn.Module:
    ways = [
        lambda m, x: m.layer(m.layer(x).tanh()),
        lambda m, x: F.linear(m.layer(x).tanh(), m.layer.weight.T),
        lambda m, x: m.layer(x).relu() + m.other(x),
    ]
    layer, other = nn.Linear(d, d), nn.Linear(d, d)
    other.weight = layer.weight
    return Model(pick.choice(ways), layer=layer, other=other)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@_family("flat")
def _own_functions(pick: Random, d: int) -> nn.Module:
    def of_inputs(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            return torch.autograd.grad(m.layer(x).tanh().sum(), x, create_graph=True)[0]

    ways = [
        lambda m, x: _Square.apply(m.layer(x).tanh()),
        lambda m, x: checkpoint(m.layer, x, use_reentrant=False),
        lambda m, x: checkpoint(m.layer, m.layer(x), use_reentrant=True),
        lambda m, x: torch.func.vmap(m.layer)(x),
        lambda m, x: torch.func.vmap(torch.func.grad(lambda row: m.layer(row).tanh().sum()))(x),
        of_inputs,
    ]
    return Model(pick.choice(ways), layer=nn.Linear(d, d))


@_family("flat")
def _generated_weights(pick: Random, d: int) -> nn.Module:
    return Model(
        lambda m, x: torch.bmm(m.weights(x).view(len(x), 4, d), m.layer(x)[..., None])[..., 0],
        weights=nn.Linear(d, 4 * d),
        layer=nn.Linear(d, d),
    )


@_family("flat")
def _to_points(pick: Random, d: int) -> nn.Module:
    """Distances and similarities to points that are parameters, and one of them chosen."""

    def quantised(m: Any, x: Tensor) -> Tensor:
        near = m.points[torch.cdist(x, m.points).argmin(1)]
        return x + (near - x).detach() + 0.1 * (near - x.detach())

    ways = [
        lambda m, x: -torch.cdist(x, m.points),
        lambda m, x: 10 * F.normalize(x, dim=-1) @ F.normalize(m.points, dim=-1).T,
        lambda m, x: torch.exp(-((x[:, None] - m.points) ** 2).sum(-1)),
        lambda m, x: torch.einsum("nd,pd,p->np", x, m.points, m.points[:, 0]),
        quantised,
    ]
    return Model(pick.choice(ways), points=nn.Parameter(torch.randn(5, d)))


@_family("flat")
def _complex(pick: Random, d: int) -> nn.Module:
    ways = [
        lambda m, x: (torch.complex(x, x) @ torch.view_as_complex(m.weight)).abs(),
        lambda m, x: torch.view_as_real(torch.fft.rfft(x) * torch.view_as_complex(m.bands)).flatten(1),
        lambda m, x: torch.fft.fft(x @ m.weight[..., 0]).real,
    ]
    parts = {"weight": nn.Parameter(torch.randn(d, 4, 2)), "bands": nn.Parameter(torch.randn(d // 2 + 1, 2))}
    return Model(pick.choice(ways), **parts)


@_family("flat")
def _solved(pick: Random, d: int) -> nn.Module:
    def solve(m: Any, x: Tensor) -> Tensor:
        matrix = m.layer(x).view(-1, 2, 2)
        return torch.linalg.solve(matrix @ matrix.mT + torch.eye(2).to(x), x[:, :2, None])[..., 0]

    ways = [solve, lambda m, x: torch.linalg.matrix_exp(m.layer(x).tanh().view(-1, 2, 2)).flatten(1)]
    return Model(pick.choice(ways), layer=nn.Linear(d, 4))


@_family("flat")
def _chosen(pick: Random, d: int) -> nn.Module:
    def scattered(m: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), d)
        return out.scatter_add(1, (x > 0).long(), m.layer(x))

    ways = [
        lambda m, x: m.layer(x).sort(1).values,
        lambda m, x: m.layer(x).topk(2, 1).values,
        lambda m, x: m.layer(x).cumsum(1),
        lambda m, x: m.layer(x).gather(1, x.argsort(1)),
        lambda m, x: m.layer(x).roll(1, 1).flip(1)[:, ::2],
        lambda m, x: m.layer(x).masked_fill(x > 0, 0.5).clamp(-2, 2),
        lambda m, x: m.layer(x).sigmoid().cumprod(1),
        scattered,
    ]
    return Model(pick.choice(ways), layer=nn.Linear(d, d))


@_family("flat")
def _looked_up(pick: Random, d: int) -> nn.Module:
    table = nn.Embedding(5, 3, sparse=_flag(pick))
    return Model(lambda m, x: m.table(torch.bucketize(x.nan_to_num(), m.bounds)).flatten(1), table=table,
                 bounds=nn.Parameter(torch.linspace(-1, 1, 4), requires_grad=False))  # fmt: skip


@_family("flat")
def _splines(pick: Random, d: int) -> nn.Module:
    parts = {"grid": nn.Parameter(torch.linspace(-2, 2, 4)), "weight": nn.Parameter(torch.randn(d, 3, 4))}
    return Model(lambda m, x: torch.einsum("nik,iok->no", torch.exp(-((x[..., None] - m.grid) ** 2)), m.weight), **parts)


@_family("flat")
def _sixteen_bits(pick: Random, d: int) -> nn.Module:
    layer = nn.Linear(d, 4).to(pick.choice([torch.bfloat16, torch.float16]))
    return Model(lambda m, x: m.layer(x.to(m.layer.weight.dtype)).to(x.dtype), layer=layer)


@_family("flat")
def _partly_trained(pick: Random, d: int) -> nn.Module:
    """Frozen weights or biases, and layers that are not used."""
    layer, unused = nn.Linear(d, d), nn.Linear(2, 2)
    pick.choice([layer.weight, layer.bias]).requires_grad_(False)
    return Model(lambda m, x: m.layer(x), layer=layer, unused=unused)


@_family("flat", gives="steps")
def _in_steps(pick: Random, d: int) -> nn.Module:
    steps = pick.randint(1, 5)
    return nn.Sequential(nn.Linear(d, steps * 4), nn.Unflatten(1, (steps, 4)))


# -- steps: (records, t, d) --------------------------------------------------------------------------------------------


@_family("steps")
def _linear_of_steps(pick: Random, t: int, d: int) -> nn.Module:
    layer = nn.Linear(d, pick.randint(2, 8), bias=_flag(pick))
    ways = [
        lambda m, x: m.layer(x),
        lambda m, x: m.layer(x.reshape(-1, d)).view(len(x), t, -1),
        lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1).tanh(),
        lambda m, x: torch.einsum("ntd,kd->ntk", x, m.layer.weight),
        lambda m, x: torch.bmm(x, m.layer.weight.T.expand(len(x), -1, -1)),
        lambda m, x: m.layer(x) * m.layer(x).sigmoid(),
    ]
    return Model(pick.choice(ways), layer=layer)


@_family("steps")
def _norm_of_steps(pick: Random, t: int, d: int) -> nn.Module:
    return pick.choice([nn.LayerNorm(d), nn.LayerNorm((t, d)), nn.RMSNorm(d), nn.GroupNorm(1, t), nn.PReLU(t)])


@_family("steps")
def _over_steps(pick: Random, t: int, d: int) -> nn.Module:
    """Layers along time: a mixer, convolutions with every kind of padding, sums so far, Fourier transforms."""
    k, causal = pick.randint(1, min(3, t)), nn.Conv1d(d, d, 2, dilation=pick.randint(1, 2))
    padding: dict[str, Any] = {"padding": pick.choice([0, "same", "valid"])}
    convolution = nn.Conv1d(d, d, k, groups=pick.choice([1, d]), padding_mode=pick.choice(["zeros", "circular"]), **padding)
    ways = [
        lambda m, x: x + m.mixer(x.transpose(1, 2)).transpose(1, 2),
        lambda m, x: m.convolution(x.transpose(1, 2)).transpose(1, 2),
        lambda m, x: x + m.causal(F.pad(x.transpose(1, 2), (m.causal.dilation[0], 0))).transpose(1, 2).relu(),
        lambda m, x: (m.layer(x) * m.gate(x).sigmoid()).cumsum(1).tanh(),
        lambda m, x: torch.fft.fft2(m.layer(x), dim=(-2, -1)).real,
        lambda m, x: m.layer(x).logcumsumexp(1),
    ]
    parts = {"mixer": nn.Linear(t, t), "layer": nn.Linear(d, d), "gate": nn.Linear(d, d)}
    return Model(pick.choice(ways), **parts, convolution=convolution, causal=causal)


@_family("steps")
def _attention(pick: Random, t: int, d: int) -> nn.Module:
    heads, is_first, width = pick.choice([1, 2]), _flag(pick), pick.randint(2, 5)
    options = {"bias": _flag(pick), "add_bias_kv": _flag(pick), "add_zero_attn": _flag(pick), "batch_first": is_first}
    is_self = _flag(pick)
    widths = {} if is_self or _flag(pick) else {"kdim": width, "vdim": width}
    call = {"need_weights": _flag(pick)}

    def compute(m: Any, x: Tensor) -> Tensor:
        x = m.into(x if is_first else x.transpose(0, 1))
        memory = x if is_self else m.memory(x[:, :2] if is_first else x[:2])
        outputs = m.attention(x, memory, memory, **call)[0]
        return outputs if is_first else outputs.transpose(0, 1)

    attention = nn.MultiheadAttention(4 * heads, heads, **options, **widths)
    memory = nn.Linear(4 * heads, width if widths else 4 * heads)
    return Model(compute, into=nn.Linear(d, 4 * heads), attention=attention, memory=memory)


@_family("steps")
def _packed_attention(pick: Random, t: int, d: int) -> nn.Module:
    """Query, key and value from one projection, divided in several ways; rotated; with a bias by distance."""
    ways = [
        lambda h: h.chunk(3, -1),
        lambda h: h.split(4, -1),
        lambda h: h.unflatten(-1, (3, 4)).unbind(-2),
        lambda h: h.unflatten(-1, (3, 4)).permute(2, 0, 1, 3),
    ]
    divide, how = pick.choice(ways), pick.choice(["sdpa", "causal", "softmax", "linear", "rotated"])

    def compute(m: Any, x: Tensor) -> Tensor:
        q, k, v = divide(m.packed(x))
        if how in ("sdpa", "causal"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=how == "causal")
        if how == "linear":
            return (F.elu(q) + 1) @ ((F.elu(k) + 1).transpose(1, 2) @ v)
        if how == "rotated":
            angle = torch.arange(t)[:, None].to(x) * torch.tensor([1.0, 0.1]).to(x)
            a, b = q.chunk(2, -1)
            q = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        far = torch.arange(t)
        return ((q @ k.transpose(1, 2)) / 2 + m.bias[(far[:, None] - far) % 5]).softmax(-1) @ v

    return Model(compute, packed=nn.Linear(d, 12), bias=nn.Parameter(torch.randn(5)))


@_family("steps")
def _transformer(pick: Random, t: int, d: int) -> nn.Module:
    options: dict[str, Any] = {"nhead": 2, "dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
    options |= {"norm_first": _flag(pick), "activation": pick.choice(["relu", "gelu"]), "bias": _flag(pick)}
    encoder = nn.TransformerEncoderLayer(4, **options)
    decoder = nn.TransformerDecoderLayer(4, **options)
    whole = nn.Transformer(4, num_encoder_layers=1, num_decoder_layers=1, **options)
    ways = [lambda m, x: m.layer(x), lambda m, x: m.layer(x, 2 * x[:, :2])]
    layer, way = pick.choice([(encoder, ways[0]), (decoder, ways[1]), (whole, ways[1])])
    return Model(lambda m, x: way(m, m.into(x)), into=nn.Linear(d, 4), layer=layer)


@_family("steps")
def _recurrent(pick: Random, t: int, d: int) -> nn.Module:
    kind, is_first = pick.choice([nn.LSTM, nn.GRU, nn.RNN]), _flag(pick)
    options: dict[str, Any] = {"num_layers": pick.randint(1, 2), "bidirectional": _flag(pick), "bias": _flag(pick)}
    if kind is nn.LSTM and _flag(pick):
        options["proj_size"] = 2
    if kind is nn.RNN:
        options["nonlinearity"] = pick.choice(["tanh", "relu"])
    layer = kind(d, 4, batch_first=is_first, **options)
    if is_first:
        return Model(lambda m, x: m.layer(x)[0], layer=layer)
    return Model(lambda m, x: m.layer(x.transpose(0, 1))[0].transpose(0, 1), layer=layer)


@_family("steps", gives="flat")
def _cells(pick: Random, t: int, d: int) -> nn.Module:
    def by_cell(m: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state[0] if isinstance(state, tuple) else state

    def packed(m: Any, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(1).clamp_min(1).cpu()
        sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.layer(sequence)[1][-1]

    cell = pick.choice([nn.LSTMCell, nn.GRUCell, nn.RNNCell])(d, 4, bias=_flag(pick))
    return Model(pick.choice([by_cell, by_cell, packed]), cell=cell, layer=nn.GRU(d, 4, batch_first=True))


@_family("steps")
def _learnt_steps(pick: Random, t: int, d: int) -> nn.Module:
    """A learnt first step, learnt positions, and steps that are written over."""

    def written(m: Any, x: Tensor) -> Tensor:
        out = m.positions.expand(len(x), -1, -1).clone()
        out[:, 0] = m.layer(x[:, 0])
        return out

    ways = [
        lambda m, x: torch.cat([m.first.expand(len(x), -1, -1), x + m.positions], 1),
        lambda m, x: x + m.table(torch.arange(t, device=x.device)),
        lambda m, x: torch.cat([x, m.first.repeat(len(x), 1, 1)], 1),
        written,
    ]
    parts = {"first": nn.Parameter(torch.randn(1, 1, d)), "positions": nn.Parameter(torch.randn(t, d))}
    return Model(pick.choice(ways), **parts, table=nn.Embedding(t, d), layer=nn.Linear(d, d))


@_family("steps", gives="flat")
def _pooled_steps(pick: Random, t: int, d: int) -> nn.Module:
    ways = [
        lambda m, x: x.mean(1),
        lambda m, x: x[:, -1],
        lambda m, x: x.amax(1),
        lambda m, x: x.logsumexp(1),
        lambda m, x: (m.score(x).softmax(1) * x).sum(1),
        lambda m, x: (m.query.expand(len(x), 1, -1) @ x.transpose(1, 2)).softmax(-1).bmm(x)[:, 0],
        lambda m, x: ((x[..., :1] > 0) * x).sum(1) / (x[..., :1] > 0).sum(1).clamp_min(1),
    ]
    return Model(pick.choice(ways), score=nn.Linear(d, 1), query=nn.Parameter(torch.randn(1, 1, d)))


@_family("steps", gives="flat")
def _flat_steps(pick: Random, t: int, d: int) -> nn.Module:
    return nn.Flatten()


# -- planes: (records, channels, *space) -------------------------------------------------------------------------------


@_family("planes")
def _convolution(pick: Random, c: int, *space: int) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(space) - 1]
    padding = pick.choice([0, 1, "same", "valid"])
    options: dict[str, Any] = {
        "stride": 1 if padding == "same" else pick.randint(1, 2),
        "dilation": pick.randint(1, 2),
        "groups": pick.choice([1, c]),
        "bias": _flag(pick),
        "padding_mode": pick.choice(["zeros", "zeros", "circular", "reflect", "replicate"]),
    }
    layer = kind(c, c * pick.randint(1, 2), pick.choice([1, 2, 3]), padding=padding, **options)
    layer = parametrizations.weight_norm(layer) if pick.random() < 0.15 else layer
    return nn.Sequential(layer, _activation(pick, layer.out_channels))


@_family("planes")
def _transposed_convolution(pick: Random, c: int, *space: int) -> nn.Module:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(space) - 1]
    stride = pick.randint(1, 2)
    options = {"padding": pick.randint(0, 1), "output_padding": stride - 1, "groups": pick.choice([1, c])}
    return kind(c, 2 * c, pick.randint(2, 3), stride=stride, dilation=pick.randint(1, 2), bias=_flag(pick), **options)


@_family("planes")
def _norm_of_planes(pick: Random, c: int, *space: int) -> nn.Module:
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(space) - 1]
    last = Model(lambda m, x: m.norm(x.movedim(1, -1)).movedim(-1, 1), norm=nn.LayerNorm(c))
    made = [nn.GroupNorm(_groups(pick, c), c), instance(c, affine=True), nn.LayerNorm((c, *space)), last]
    return pick.choice([*made, nn.LocalResponseNorm(2), nn.PReLU(c)])


@_family("planes")
def _resized(pick: Random, c: int, *space: int) -> nn.Module:
    pools: list[Any] = [
        (nn.MaxPool1d(2), nn.AvgPool1d(2, padding=1), nn.AdaptiveAvgPool1d(2), nn.Upsample(scale_factor=2)),
        (nn.MaxPool2d(2, 1), nn.AvgPool2d(2, ceil_mode=True), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2),
         nn.Upsample(scale_factor=2, mode="bilinear"), nn.ZeroPad2d(1), nn.ReflectionPad2d(1)),
        (nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(1)),
    ]  # fmt: skip
    return pick.choice(pools[len(space) - 1])


@_family("planes")
def _channels(pick: Random, c: int, *space: int) -> nn.Module:
    """Branches that are added, joined, shuffled or weighted."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(space) - 1]
    over = tuple(range(2, 2 + len(space)))
    ways = [
        lambda m, x: x + m.same(x).relu(),
        lambda m, x: torch.cat([x, m.same(x), m.point(x).relu_()], 1),
        lambda m, x: x * m.gate(x.mean(over)).sigmoid().view(len(x), c, *(1 for _ in space)),
        lambda m, x: m.point(torch.cat([x, x], 1).unflatten(1, (2, c)).transpose(1, 2).flatten(1, 2)[:, :c]),
        lambda m, x: m.scale.view(-1, *(1 for _ in space)) * m.gate(m.same(x).movedim(1, -1)).movedim(-1, 1) + x,
    ]
    parts = {"same": kind(c, c, 3, padding=1), "point": kind(c, c, 1), "gate": nn.Linear(c, c)}
    return Model(pick.choice(ways), **parts, scale=nn.Parameter(torch.ones(c)))


@_family("planes")
def _of_images(pick: Random, c: int, height: int, width: int) -> nn.Module:
    """What only two dimensions have: windows, pixels as channels, sampling at computed places, unpooling."""

    def sampled(m: Any, x: Tensor) -> Tensor:
        grid = F.affine_grid(m.places(x.mean((2, 3))).view(-1, 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    ways = [
        lambda m, x: m.mix(F.unfold(x, 2).transpose(1, 2)).transpose(1, 2).unflatten(2, (height - 1, width - 1)),
        lambda m, x: F.pixel_shuffle(m.wide(x), 2),
        lambda m, x: F.max_unpool2d(*F.max_pool2d(m.wide(x), 2, return_indices=True), 2),
        sampled,
    ]
    parts = {"mix": nn.Linear(4 * c, 3), "wide": nn.Conv2d(c, 4 * c, 1), "places": nn.Linear(c, 6)}
    return Model(pick.choice(ways), **parts)


@_family("planes", gives="flat")
def _pooled_planes(pick: Random, c: int, *space: int) -> nn.Module:
    over = tuple(range(2, 2 + len(space)))
    ways = [lambda m, x: x.mean(over), lambda m, x: x.amax(over), lambda m, x: x.flatten(1), lambda m, x: x.sum(over)]
    return Model(pick.choice(ways))


@_family("planes", gives="steps")
def _patches(pick: Random, c: int, *space: int) -> nn.Module:
    return Model(lambda m, x: x.flatten(2).transpose(1, 2))


# -- tokens: (records, t) ----------------------------------------------------------------------------------------------


@_family("tokens", gives="steps")
def _embedding(pick: Random, t: int) -> nn.Module:
    table = nn.Embedding(VOCABULARY, 4, padding_idx=pick.choice([None, 0]), sparse=_flag(pick))
    tied = [
        lambda m, x: m.table(x),
        lambda m, x: F.one_hot(x, VOCABULARY).to(m.table.weight.dtype) @ m.table.weight,
        lambda m, x: F.linear(m.layer(m.table(x)).tanh(), m.table.weight),
    ]
    way = pick.choice(tied[:2] if table.sparse else tied)
    return Model(way, table=table, layer=nn.Linear(4, 4))


@_family("tokens", gives="flat")
def _bag(pick: Random, t: int) -> nn.Module:
    table = nn.EmbeddingBag(VOCABULARY, 4, mode=pick.choice(["sum", "mean", "max"]), padding_idx=pick.choice([None, 0]))
    weighted = nn.EmbeddingBag(VOCABULARY, 4, mode="sum")
    ways = [
        lambda m, x: m.table(x),
        lambda m, x: m.table(x.flatten(), torch.arange(0, x.numel(), t, device=x.device)),
        lambda m, x: m.weighted(x, per_sample_weights=m.weights.expand(len(x), -1)),
        lambda m, x: (m.weighted.weight[x] * (x > 0)[..., None]).sum(1),
    ]
    return Model(pick.choice(ways), table=table, weighted=weighted, weights=nn.Parameter(torch.randn(t)))


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A model, the sizes of one record, its blocks' families, and losses (records,) of outputs and targets."""

    model: nn.Module
    takes: str
    sizes: tuple[int, ...]
    blocks: tuple[str, ...]
    loss: str

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return LOSSES[self.loss](outputs, targets)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "smoothed": lambda out, y: F.cross_entropy(out, y, reduction="none", label_smoothing=0.1),
    "weighted": lambda out, y: F.cross_entropy(out, y, reduction="none", weight=torch.tensor([1.0, 3.0, 0.2]).to(out)),
    "squares": lambda out, y: (out - F.one_hot(y, CLASSES)).square().mean(1),
    "logistic": lambda out, y: F.binary_cross_entropy_with_logits(
        out, F.one_hot(y, CLASSES).to(out), reduction="none"
    ).sum(1),
    "margin": lambda out, y: F.multi_margin_loss(out, y, reduction="none"),
    "huber": lambda out, y: F.smooth_l1_loss(out, F.one_hot(y, CLASSES).to(out), reduction="none").sum(1),
}

SIZES: dict[str, Callable[[Random], tuple[int, ...]]] = {
    "flat": lambda pick: (pick.randint(2, 9),),
    "steps": lambda pick: (pick.choice([1, 2, 3, 5, 9, 33]), pick.randint(2, 6)),
    "planes": lambda pick: (pick.randint(1, 4), *(pick.randint(3, 7),) * pick.choice([1, 2, 2, 3])),
    "tokens": lambda pick: (pick.randint(1, 9),),
}


def sample(takes: str, sizes: tuple[int, ...], records: int) -> Tensor:
    if takes == "tokens":
        return torch.randint(VOCABULARY, (records, *sizes))
    return torch.randn(records, *sizes)


def draw_model(pick: Random) -> Drawn:
    """Two to four blocks, a pooling if there is none, and a linear head. torch's generator gives the weights."""
    takes = kind = pick.choice(KINDS)
    sizes = SIZES[takes](pick)
    x = sample(takes, sizes, 2)
    layers: list[nn.Module] = []
    names: list[str] = []
    wanted = pick.randint(2, 4)
    while len(layers) < wanted or kind != "flat":
        ends = len(layers) >= wanted  # only what leads to flat records
        fitting = [n for n, f in FAMILIES.items() if f.takes == kind and (not ends or f.gives != kind)]
        name = pick.choice(fitting)
        try:
            layer = FAMILIES[name].make(pick, *x.shape[1:])
            with torch.no_grad():
                out = layer(x)
        except (RuntimeError, ValueError, TypeError, AssertionError):
            continue  # options that do not fit these sizes
        if out.shape[0] != 2 or not 0 < out[0].numel() <= 600 or out.dtype is not torch.float32:
            continue
        layers, names, kind, x = [*layers, layer], [*names, name], FAMILIES[name].gives, out
    head = nn.Linear(x.shape[1], CLASSES)
    return Drawn(nn.Sequential(*layers, head), takes, sizes, tuple(names), pick.choice([*LOSSES]))
