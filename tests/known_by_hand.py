"""Architectures of the literature written with torch alone, made small: for known_models.py.

To add one: a function (m, *inputs) of parts in ARCHITECTURES, and what it takes. Losses are cross-entropies of three
classes, unless LOSSES has another one for the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from functional import Model

CLASSES, TOKENS, FEATURES = 3, 99, 10
Losses = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]  # (records,) of a model, its inputs and classes


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def _conv(a: int, b: int, k: int = 3, **how: Any) -> nn.Sequential:
    """A convolution, a normalisation and an activation."""
    return nn.Sequential(nn.Conv2d(a, b, k, padding=k // 2, bias=False, **how), _norm(b), nn.ReLU(inplace=True))


def _head(width: int) -> nn.Module:
    return nn.Linear(width, CLASSES)


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def _mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(*(part for a, b in pairwise(widths) for part in (nn.Linear(a, b), activation())))[:-1]


def _parameter(*sizes: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(sizes))


def _encoder(width: int = 16, layers: int = 1, **how: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, **how)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _causal(steps: int) -> Tensor:
    return torch.ones(steps, steps).triu(1).bool()


# -- images ------------------------------------------------------------------------------------------------------------


def _residual(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    x = F.relu(x + m.second(m.first(x)), inplace=True)
    return m.head(_mean(F.relu(m.short(x) + m.down(x))))


def _dense_net(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    for block in m.blocks:
        x = torch.cat([x, block(x)], 1)
    return m.head(_mean(F.avg_pool2d(m.join(x), 2)))


def _inception(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    return m.head(_mean(torch.cat([m.one(x), m.three(x), m.five(x), m.pool(F.max_pool2d(x, 3, 1, 1))], 1)))


def _efficient(m: Any, x: Tensor) -> Tensor:
    """Inverted residual, squeeze and excitation, and stochastic depth, by record."""
    x = m.stem(x)
    h = m.depthwise(m.expand(x))
    h = m.project(h * m.excite(_mean(h))[..., None, None])
    keep = (torch.rand(len(x), 1, 1, 1) < 0.8) / 0.8
    return m.head(_mean(x + keep * h))


def _shuffle(m: Any, x: Tensor) -> Tensor:
    kept, moved = m.stem(x).chunk(2, 1)
    x = torch.cat([kept, m.branch(moved)], 1)
    return m.head(_mean(x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).square()))


def _convnext(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    h = m.mlp(m.norm(m.depthwise(x).permute(0, 2, 3, 1)))
    return m.head(_mean(x + (m.scale * h).permute(0, 3, 1, 2)))


def _unet(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    b = m.second(F.max_pool2d(a, 2))
    return m.out(m.third(torch.cat([a, m.up(b)], 1)))


def _vae(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_variance = m.encoder(x.flatten(1)).chunk(2, 1)
    z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    return m.decoder(z).view_as(x), mean, log_variance


def _vit(m: Any, x: Tensor) -> Tensor:
    x = m.patches(x).flatten(2).mT
    return m.head(m.encoder(torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.positions)[:, 0])


def _mixer(m: Any, x: Tensor) -> Tensor:
    x = m.patches(x).flatten(2).mT
    x = x + m.tokens(m.norm(x).mT).mT
    return m.head((x + m.channels(x)).mean(1))


def _perceiver(m: Any, x: Tensor) -> Tensor:
    x = x.flatten(2).mT[:, ::4]
    return m.head(m.encoder(m.attention(m.latents.expand(len(x), -1, -1), x, x)[0]).mean(1))


def _detr(m: Any, x: Tensor) -> Tensor:
    memory = m.patches(x).flatten(2).mT + m.positions
    return m.head(m.decoder(m.queries.expand(len(x), -1, -1), m.encoder(memory)).amax(1))


def _windows(m: Any, x: Tensor) -> Tensor:
    """Attention within shifted windows."""
    x = m.patches(x).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))  # (records, 8, 8, 16)
    w = x.unflatten(1, (2, 4)).unflatten(3, (2, 4)).transpose(2, 3).flatten(3, 4).flatten(0, 2)
    q, k, v = m.qkv(w).unflatten(-1, (3, 16)).unbind(-2)
    out = ((q @ k.mT) / 4 + m.bias).softmax(-1) @ v
    return m.head(m.norm(out).view(len(x), -1, 16).mean(1))


def _pyramid(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    b = m.second(a)
    return m.head(_mean(m.smooth(m.left(a) + F.interpolate(m.top(b), scale_factor=2, mode="nearest"))))


def _transformed(m: Any, x: Tensor) -> Tensor:
    grid = F.affine_grid(m.places(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
    return m.head(_mean(m.features(F.grid_sample(x, grid, align_corners=False))))


def _capsules(m: Any, x: Tensor) -> Tensor:
    u = torch.einsum("nid,iocd->nioc", m.features(x).flatten(2).mT, m.weight)
    route = torch.zeros(u.shape[:3])
    for _ in range(2):
        v = (route.softmax(2)[..., None] * u).sum(1)
        squared = v.square().sum(-1, keepdim=True)
        v = squared / (1 + squared) * v / (squared + 1e-9).sqrt()
        route = route + (u * v[:, None]).sum(-1).detach()
    return (v.square().sum(-1) + 1e-9).sqrt()


def _standardized(m: Any, x: Tensor) -> Tensor:
    """Weight standardization."""
    weight = m.stem.weight
    weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
    return m.head(_mean(m.norm(F.conv2d(x, weight, m.stem.bias)).relu()))


def _siamese(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return (m.body(a) - m.body(b)).square().sum(1)


# -- texts -------------------------------------------------------------------------------------------------------------


def _text_cnn(m: Any, x: Tensor) -> Tensor:
    x = m.table(x).mT
    return m.head(torch.cat([conv(x).relu().amax(2) for conv in m.convs], 1))


def _bilstm_attention(m: Any, x: Tensor) -> Tensor:
    h, _ = m.lstm(m.table(x))
    return m.head((m.score(h.tanh()).softmax(1) * h).sum(1))


def _gpt(m: Any, x: Tensor) -> Tensor:
    h = m.table(x) + m.positions
    return F.linear(m.norm(m.encoder(h, mask=_causal(x.shape[1]), is_causal=True)), m.table.weight)


def _seq2seq(m: Any, x: Tensor) -> Tensor:
    h = m.table(x)
    return m.out(m.transformer(h[:, :6], h[:, 6:], tgt_mask=_causal(6)))


def _seq2seq_lstm(m: Any, x: Tensor) -> Tensor:
    memory, state = m.encoder(m.table(x[:, :6]))
    h, _ = m.decoder(m.table(x[:, 6:]), state)
    context = (h @ m.key(memory).mT).softmax(-1) @ memory
    return m.out(torch.cat([h, context], -1))


def _seq2seq_gru(m: Any, x: Tensor) -> Tensor:
    """Additive attention, a cell, and the true token as next input."""
    memory, state = m.encoder(m.table(x[:, :6]))
    state, outputs = state[0], []
    for t in range(6, 12):
        score = m.score((m.key(memory) + m.query(state)[:, None]).tanh())
        context = (score.softmax(1) * memory).sum(1)
        state = m.cell(torch.cat([m.table(x[:, t]), context], 1), state)
        outputs.append(m.out(state))
    return torch.stack(outputs, 1)


def _prompted(m: Any, x: Tensor) -> Tensor:
    return m.head(m.encoder(torch.cat([m.prompt.expand(len(x), -1, -1), m.table(x)], 1))[:, 0])


def _lora(m: Any, x: Tensor) -> Tensor:
    h = m.table(x)
    q, v = m.q(h) + m.qb(m.qa(h)), m.v(h) + m.vb(m.va(h))
    return m.head(F.scaled_dot_product_attention(q, m.k(h), v).mean(1))


def _adapted(m: Any, x: Tensor) -> Tensor:
    h = m.encoder(m.table(x))
    return m.head((h + m.up(m.down(h).relu())).mean(1))


def _experts(m: Any, x: Tensor) -> Tensor:
    h = m.table(x)
    gate = m.gate(h)
    weight, place = gate.topk(2, -1)
    weights = torch.zeros_like(gate).scatter(-1, place, weight.softmax(-1))
    return m.head((torch.stack([e(h) for e in m.experts], -1) * weights[..., None, :]).sum(-1).mean(1))


def _linformer(m: Any, x: Tensor) -> Tensor:
    h = m.table(x)
    k, v = m.shorten(m.k(h).mT).mT, m.shorten(m.v(h).mT).mT
    return m.head(((m.q(h) @ k.mT / 4).softmax(-1) @ v).mean(1))


def _performer(m: Any, x: Tensor) -> Tensor:
    h = m.table(x)
    q, k = F.elu(m.q(h)) + 1, F.elu(m.k(h)) + 1
    return m.head(((q @ (k.mT @ m.v(h))) / (q @ k.sum(1)[..., None])).mean(1))


def _fnet(m: Any, x: Tensor) -> Tensor:
    h = m.table(x)
    h = m.norm(h + torch.fft.fft2(h, dim=(-2, -1)).real)
    return m.head((h + m.mlp(h)).mean(1))


def _rwkv(m: Any, x: Tensor) -> Tensor:
    """Time mixing by exponential decay, written as a loop."""
    h = m.table(x)
    k, v, r = m.k(h).exp(), m.v(h), m.r(h).sigmoid()
    top = bottom = torch.zeros_like(k[:, 0])
    outputs = []
    for t in range(x.shape[1]):
        top, bottom = top * m.decay.sigmoid() + k[:, t] * v[:, t], bottom * m.decay.sigmoid() + k[:, t]
        outputs.append(r[:, t] * top / (bottom + 1e-6))
    return m.head(torch.stack(outputs, 1).mean(1))


def _conv_s2s(m: Any, x: Tensor) -> Tensor:
    return m.head(F.glu(m.conv(F.pad(m.table(x).mT, (2, 0))), 1).mean(2))


def _skip_gram(m: Any, x: Tensor) -> Tensor:
    """One centre, one true context and two false ones."""
    return m.context(x[:, 1:4]) @ m.centre(x[:, 0])[..., None]


# -- signals -----------------------------------------------------------------------------------------------------------


def _wavenet(m: Any, x: Tensor) -> Tensor:
    h, skips = m.start(x[:, None]), []
    for n, layer in enumerate(m.layers):
        gate, value = layer(F.pad(h, (2**n, 0))).chunk(2, 1)
        out = gate.sigmoid() * value.tanh()
        skips.append(out)
        h = h + m.mix[n](out)
    return m.head(torch.stack(skips).sum(0).relu().mean(2))


def _tcn(m: Any, x: Tensor) -> Tensor:
    h = m.start(x[:, None])
    for n, layer in enumerate(m.layers):
        h = h + layer(F.pad(h, (2 * 2**n, 0))).relu()
    return m.head(h[..., -1])


def _crnn(m: Any, x: Tensor) -> Tensor:
    return m.head(m.gru(m.conv(x[:, None]).mT)[0].mean(1))


def _s4d(m: Any, x: Tensor) -> Tensor:
    """A diagonal state space model as a long convolution."""
    t = torch.arange(100.0)
    decay = torch.exp(-m.rate.exp()[:, None] * t) * torch.cos(m.frequency[:, None] * t)
    kernel = m.c @ decay
    h = m.start(x.view(-1, 100, 4)).mT
    h = torch.fft.irfft(torch.fft.rfft(h, 200) * torch.fft.rfft(kernel, 200), 200)[..., :100]
    return m.head(F.gelu(h).mean(2))


def _ode(m: Any, x: Tensor) -> Tensor:
    h = m.start(x)
    for _ in range(4):
        h = h + 0.25 * m.field(h)
    return m.head(h)


# -- tables ------------------------------------------------------------------------------------------------------------


def _tabnet(m: Any, x: Tensor) -> Tensor:
    prior, total, h = torch.ones_like(x), 0.0, m.start(x)
    for step, mask in zip(m.steps, m.masks, strict=True):
        chosen = (mask(h) * prior).softmax(1)
        prior = prior * (1.3 - chosen)
        h = F.glu(step(chosen * x), 1)
        total = total + h.relu()
    return m.head(total)


def _ft_transformer(m: Any, x: Tensor) -> Tensor:
    h = x[..., None] * m.weight + m.bias
    return m.head(m.encoder(torch.cat([m.token.expand(len(x), -1, -1), h], 1))[:, 0])


def _auto_int(m: Any, x: Tensor) -> Tensor:
    h = x[..., None] * m.weight
    return m.head(F.relu(m.attention(h, h, h)[0] + m.short(h)).flatten(1))


def _categories(x: Tensor) -> Tensor:
    return (x[:, :4] > 0).long() + 2 * torch.arange(4)


def _wide_deep(m: Any, x: Tensor) -> Tensor:
    return m.wide(_categories(x)).sum(1) + m.deep(torch.cat([x, m.table(_categories(x)).flatten(1)], 1))


def _cross(m: Any, x: Tensor) -> Tensor:
    h = x
    for layer in m.layers:
        h = x * layer(h) + h
    return m.head(torch.cat([h, m.deep(x)], 1))


def _deep_fm(m: Any, x: Tensor) -> Tensor:
    v = m.table(_categories(x))
    pairs = 0.5 * (v.sum(1).square() - v.square().sum(1))
    return m.first(_categories(x)).sum(1) + m.head(pairs) + m.deep(v.flatten(1))


def _dlrm(m: Any, x: Tensor) -> Tensor:
    v = torch.cat([m.bottom(x)[:, None], m.table(_categories(x))], 1)
    i, j = torch.triu_indices(5, 5, 1)
    return m.top(torch.cat([v[:, 0], (v @ v.mT)[:, i, j]], 1))


def _collaborative(m: Any, x: Tensor) -> Tensor:
    user, item = (x[:, 0] > 0).long(), (x[:, 1] > 0).long() + 2
    u, i = m.table(user), m.table(item)
    return m.head(torch.cat([u * i, m.deep(torch.cat([u, i], 1))], 1)) + m.bias(user)


def _kan(m: Any, x: Tensor) -> Tensor:
    basis = torch.exp(-((x[..., None] - m.grid) ** 2))
    return torch.einsum("nik,iok->no", basis, m.weight) + m.base(F.silu(x))


def _hyper(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.bmm(m.weights(x).view(-1, 8, FEATURES), x[..., None])[..., 0].relu())


def _flow(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Real NVP with two couplings: values and the logarithm of the determinant."""
    total: Any = 0.0
    a, b = x.chunk(2, 1)
    for net in m.nets:
        scale, shift = net(a).chunk(2, 1)
        b, total = b * scale.tanh().exp() + shift, total + scale.tanh().sum(1)
        a, b = b, a
    return torch.cat([a, b], 1), total


def _mixture_density(m: Any, x: Tensor) -> Tensor:
    weight, mean, scale = m.body(x).chunk(3, 1)
    normal = torch.distributions.Normal(mean, F.softplus(scale) + 1e-2)
    return torch.logsumexp(weight.log_softmax(1) + normal.log_prob(x[:, :1]), 1)


def _soft_tree(m: Any, x: Tensor) -> Tensor:
    right = m.decisions(x).sigmoid()
    left = 1 - right
    leaves = torch.stack(
        [left[:, 0] * left[:, 1], left[:, 0] * right[:, 1], right[:, 0] * left[:, 2], right[:, 0] * right[:, 2]], 1
    )
    return leaves @ m.leaves


def _tied_autoencoder(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.encoder(x).tanh(), m.encoder.weight.T, m.bias)


def _masked_autoencoder(m: Any, x: Tensor) -> Tensor:
    """MADE: masks on weights."""
    order = torch.arange(FEATURES)
    hidden = torch.arange(16) % (FEATURES - 1)
    h = F.linear(x, m.first.weight * (hidden[:, None] >= order), m.first.bias).relu()
    return F.linear(h, m.second.weight * (order[:, None] > hidden), m.second.bias)


def _highway(m: Any, x: Tensor) -> Tensor:
    for gate, layer in zip(m.gates, m.layers, strict=True):
        t = gate(x).sigmoid()
        x = t * layer(x).relu() + (1 - t) * x
    return m.head(x)


# -- sets and graphs ---------------------------------------------------------------------------------------------------


def _point_net(m: Any, x: Tensor) -> Tensor:
    turn = m.turn(m.small(x.mT).amax(2)).view(-1, 3, 3) + torch.eye(3)
    return m.head(m.features((x @ turn).mT).amax(2))


def _set_transformer(m: Any, x: Tensor) -> Tensor:
    h = m.start(x)
    h = h + m.mlp(m.among(h, h, h)[0])
    return m.head(m.pool(m.seed.expand(len(x), -1, -1), h, h)[0][:, 0])


def _gcn(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    a = (edges + edges.mT) / 2 + torch.eye(edges.shape[1])
    degree = a.sum(2).rsqrt()
    a = degree[..., None] * a * degree[:, None]
    return m.head((a @ m.second((a @ m.first(x)).relu())).mean(1))


def _gat(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = m.first(x)
    score = F.leaky_relu(m.source(h) + m.target(h).mT, 0.2).masked_fill(edges < 0.3, -1e9)
    return m.head((score.softmax(-1) @ h).relu().mean(1))


def _gin(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    return m.head(m.mlp((1 + m.epsilon) * x + (edges > 0.5).float() @ x).sum(1))


def _message_passing(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = m.start(x)
    for _ in range(2):
        pairs = torch.cat([h[:, :, None].expand(-1, -1, h.shape[1], -1), h[:, None].expand(-1, h.shape[1], -1, -1)], -1)
        message = (m.message(pairs).relu() * edges[..., None]).sum(2)
        h = m.cell(message.flatten(0, 1), h.flatten(0, 1)).view_as(h)
    return m.head(h.mean(1))


def _modules(count: int, make: Callable[..., nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(make(n) for n in range(count))


def _qkv() -> dict[str, nn.Module]:
    return {name: nn.Linear(16, 16) for name in "qkv"} | {"table": nn.Embedding(TOKENS, 16), "head": _head(16)}


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


Parts = Callable[[], Mapping[str, Any]]
_TABLE: Parts = lambda: {"table": nn.Embedding(TOKENS, 16), "head": _head(16)}  # noqa: E731
_ATTENDS: Parts = lambda: {"encoder": _encoder(), "positions": _parameter(12, 16)}  # noqa: E731

#: What it takes, the function, and its parts.
ARCHITECTURES: dict[str, tuple[str, Callable[..., Any] | None, Parts]] = {
    "LeNet": ("image", None, lambda: {"0": nn.Sequential(nn.Conv2d(3, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6,
        16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 32), nn.Tanh(), _head(32))}),
    "AlexNet": ("image", None, lambda: {"0": nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(inplace=True),
        nn.LocalResponseNorm(3), nn.MaxPool2d(3, 2), nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Dropout(), nn.Linear(144, 16), nn.ReLU(), _head(16))}),
    "VGG, GroupNorm": ("image", None, lambda: {"0": nn.Sequential(_conv(3, 8), _conv(8, 8), nn.MaxPool2d(2), _conv(8,
        16), nn.AdaptiveMaxPool2d(2), nn.Flatten(), _head(64))}),
    "All convolutional": ("image", lambda m, x: _mean(m.body(x)), lambda: {"body": nn.Sequential(_conv(3, 8,
        stride=2), _conv(8, 8), nn.Conv2d(8, CLASSES, 1, padding="valid"))}),
    "ResNet, GroupNorm": ("image", _residual, lambda: {"stem": _conv(3, 8), "first": _conv(8, 8),
        "second": nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), _norm(8)), "down": _conv(8, 16, stride=2),
        "short": nn.Conv2d(8, 16, 1, 2), "head": _head(16)}),
    "ResNeXt": ("image", lambda m, x: m.head(_mean(F.relu((h := m.stem(x)) + m.body(h)))), lambda: {"stem": _conv(3,
        16), "body": nn.Sequential(_conv(16, 8, 1), _conv(8, 8, groups=4), nn.Conv2d(8, 16, 1)), "head": _head(16)}),
    "DenseNet": ("image", _dense_net, lambda: {"stem": _conv(3, 8), "blocks": _modules(3, lambda n: _conv(8 + 4 * n,
        4)), "join": _conv(20, 8, 1), "head": _head(8)}),
    "Inception": ("image", _inception, lambda: {"stem": _conv(3, 8, stride=2), "one": _conv(8, 4, 1),
        "three": nn.Sequential( _conv(8, 4, 1), _conv(4, 6)), "five": _conv(8, 4, 5), "pool": _conv(8, 4, 1),
        "head": _head(18)}),
    "MobileNetV2, GroupNorm": ("image", lambda m, x: m.head(_mean((h := m.stem(x)) + m.body(h))),
        lambda: {"stem": _conv(3, 8), "body": nn.Sequential(nn.Conv2d(8, 24, 1), nn.ReLU6(inplace=True), nn.Conv2d(24,
        24, 3, padding=1, groups=24), _norm(24), nn.ReLU6(inplace=True), nn.Conv2d(24, 8, 1)), "head": _head(8)}),
    "EfficientNet, stochastic depth": ("image", _efficient, lambda: {"stem": _conv(3, 8), "expand": _conv(8, 16, 1),
        "depthwise": _conv(16, 16, groups=16), "excite": nn.Sequential(_mlp(16, 4, 16, activation=nn.SiLU),
        nn.Sigmoid()), "project": nn.Conv2d(16, 8, 1), "head": _head(8)}),
    "ShuffleNetV2": ("image", _shuffle, lambda: {"stem": _conv(3, 16), "branch": nn.Sequential(_conv(8, 8, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), _conv(8, 8, 1)), "head": _head(16)}),
    "ConvNeXt": ("image", _convnext, lambda: {"stem": nn.Conv2d(3, 8, 4, 4), "depthwise": nn.Conv2d(8, 8, 7,
        padding=3, groups=8), "norm": nn.LayerNorm(8), "mlp": _mlp(8, 32, 8, activation=nn.GELU),
        "scale": _parameter(8), "head": _head(8)}),
    "U-Net": ("image", _unet, lambda: {"first": _conv(3, 8), "second": _conv(8, 16), "up": nn.ConvTranspose2d(16, 8,
        2, 2), "third": _conv(16, 8), "out": nn.Conv2d(8, CLASSES, 1)}),
    "Variational autoencoder": ("image", _vae, lambda: {"encoder": _mlp(3072, 16, 8), "decoder": _mlp(4, 16, 3072)}),
    "Convolutional autoencoder": ("image", lambda m, x: m.decoder(m.encoder(x)), lambda: {"encoder": _conv(3, 8,
        stride=2), "decoder": nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 3,
        padding="same"))}),
    "GAN discriminator": ("image", lambda m, x: m.body(x).flatten(), lambda: {"body": nn.Sequential(nn.Conv2d(3, 8, 4,
        2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2,
        inplace=True), nn.Conv2d(16, 1, 8))}),
    "Vision transformer": ("image", _vit, lambda: {"patches": nn.Conv2d(3, 16, 8, 8, padding="valid"),
        "token": _parameter(1, 1, 16), "positions": _parameter(17, 16), "encoder": _encoder(norm_first=True,
        activation="gelu"), "head": _head(16)}),
    "MLP-Mixer": ("image", _mixer, lambda: {"patches": nn.Conv2d(3, 16, 8, 8), "norm": nn.LayerNorm(16),
        "tokens": _mlp(16, 8, 16), "channels": _mlp(16, 32, 16, activation=nn.GELU), "head": _head(16)}),
    "Perceiver": ("image", _perceiver, lambda: {"latents": _parameter(1, 4, 16),
        "attention": nn.MultiheadAttention(16, 2, kdim=3, vdim=3, batch_first=True), "encoder": _encoder(),
        "head": _head(16)}),
    "DETR": ("image", _detr, lambda: {"patches": nn.Conv2d(3, 16, 8, 8), "positions": _parameter(16, 16),
        "queries": _parameter(1, 3, 16), "encoder": _encoder(),
        "decoder": nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1),
        "head": _head(16)}),
    "Swin": ("image", _windows, lambda: {"patches": nn.Conv2d(3, 16, 4, 4), "qkv": nn.Linear(16, 48),
        "bias": _parameter(16, 16), "norm": nn.LayerNorm(16), "head": _head(16)}),
    "Feature pyramid": ("image", _pyramid, lambda: {"first": _conv(3, 8, stride=2), "second": _conv(8, 16, stride=2),
        "left": nn.Conv2d(8, 8, 1), "top": nn.Conv2d(16, 8, 1), "smooth": _conv(8, 8), "head": _head(8)}),
    "Spatial transformer": ("image", _transformed, lambda: {"places": _mlp(3072, 8, 6), "features": _conv(3, 8),
        "head": _head(8)}),
    "Capsules": ("image", _capsules, lambda: {"features": nn.Conv2d(3, 8, 9, 8), "weight": _parameter(9, CLASSES, 4,
        8)}),
    "Weight standardization": ("image", _standardized, lambda: {"stem": nn.Conv2d(3, 8, 3), "norm": _norm(8),
        "head": _head(8)}),
    "Siamese": ("pair", _siamese, lambda: {"body": nn.Sequential(_conv(3, 8, stride=4), nn.Flatten(), nn.Linear(512,
        8))}),
    "fastText": ("text", None, lambda: {"0": nn.EmbeddingBag(TOKENS, 16), "1": _head(16)}),
    "TextCNN": ("text", _text_cnn, lambda: {"table": nn.Embedding(TOKENS, 16, padding_idx=0), "convs": _modules(3,
        lambda n: nn.Conv1d(16, 4, n + 2)), "head": _head(12)}),
    "BiLSTM with attention": ("text", _bilstm_attention, lambda: {**_TABLE(), "lstm": nn.LSTM(16, 8, batch_first=True,
        bidirectional=True), "score": nn.Linear(16, 1)}),
    "GRU": ("text", lambda m, x: m.head(m.gru(m.table(x))[1][-1]), lambda: {**_TABLE(), "gru": nn.GRU(16, 16, 2,
        batch_first=True)}),
    "Transformer encoder": ("text", lambda m, x: m.head(m.encoder(m.table(x) + m.positions,
        src_key_padding_mask=x < 9)[:, 0]), lambda: {**_TABLE(), **_ATTENDS()}),
    "GPT with tied weights": ("text", _gpt, lambda: {"table": nn.Embedding(TOKENS, 16), **_ATTENDS(),
        "norm": nn.LayerNorm(16)}),
    "Transformer, sequence to sequence": ("text", _seq2seq, lambda: {"table": nn.Embedding(TOKENS, 16),
        "out": nn.Linear(16, TOKENS), "transformer": nn.Transformer(16, 2, 1, 1, 32, batch_first=True)}),
    "LSTM, sequence to sequence": ("text", _seq2seq_lstm, lambda: {"table": nn.Embedding(TOKENS, 16),
        "encoder": nn.LSTM(16, 16, batch_first=True), "decoder": nn.LSTM(16, 16, batch_first=True),
        "key": nn.Linear(16, 16), "out": nn.Linear(32, TOKENS)}),
    "GRU, sequence to sequence": ("text", _seq2seq_gru, lambda: {"table": nn.Embedding(TOKENS, 16),
        "encoder": nn.GRU(16, 16, batch_first=True), "cell": nn.GRUCell(32, 16), "key": nn.Linear(16, 8),
        "query": nn.Linear(16, 8), "score": nn.Linear(8, 1), "out": nn.Linear(16, TOKENS)}),
    "Prompt tuning": ("text", _prompted, lambda: {"table": _frozen(nn.Embedding(TOKENS, 16)),
        "encoder": _frozen(_encoder()), "prompt": _parameter(1, 4, 16), "head": _head(16)}),
    "LoRA": ("text", _lora, lambda: {**{name: _frozen(part) if name != "head" else part for name,
        part in _qkv().items()}, "qa": nn.Linear(16, 2, False), "qb": nn.Linear(2, 16, False), "va": nn.Linear(16, 2,
        False), "vb": nn.Linear(2, 16, False)}),
    "Adapters": ("text", _adapted, lambda: {"table": _frozen(nn.Embedding(TOKENS, 16)),
        "encoder": _frozen(_encoder()), "down": nn.Linear(16, 4), "up": nn.Linear(4, 16), "head": _head(16)}),
    "Mixture of experts": ("text", _experts, lambda: {**_TABLE(), "gate": nn.Linear(16, 4), "experts": _modules(4,
        lambda n: _mlp(16, 8, 16))}),
    "Linformer": ("text", _linformer, lambda: {**_qkv(), "shorten": nn.Linear(12, 4)}),
    "Performer": ("text", _performer, _qkv),
    "FNet": ("text", _fnet, lambda: {**_TABLE(), "norm": nn.LayerNorm(16), "mlp": _mlp(16, 32, 16)}),
    "RWKV": ("text", _rwkv, lambda: {**_qkv(), "r": nn.Linear(16, 16), "decay": _parameter(16)}),
    "Convolutional sequence": ("text", _conv_s2s, lambda: {**_TABLE(), "conv": weight_norm(nn.Conv1d(16, 32, 3))}),
    "Skip-gram": ("text", _skip_gram, lambda: {"centre": nn.Embedding(TOKENS, 8), "context": nn.Embedding(TOKENS,
        8)}),
    "WaveNet": ("signal", _wavenet, lambda: {"start": nn.Conv1d(1, 8, 1), "layers": _modules(3, lambda n: nn.Conv1d(8,
        16, 2, dilation=2**n)), "mix": _modules(3, lambda n: nn.Conv1d(8, 8, 1)), "head": _head(8)}),
    "TCN": ("signal", _tcn, lambda: {"start": nn.Conv1d(1, 8, 1), "layers": _modules(3,
        lambda n: weight_norm(nn.Conv1d(8, 8, 3, dilation=2**n))), "head": _head(8)}),
    "CRNN": ("signal", _crnn, lambda: {"conv": nn.Sequential(nn.Conv1d(1, 8, 9, 8, padding="valid"), nn.ReLU(),
        nn.MaxPool1d(2)), "gru": nn.GRU(8, 8, batch_first=True, bidirectional=True), "head": _head(16)}),
    "S4D": ("signal", _s4d, lambda: {"start": nn.Linear(4, 8), "rate": _parameter(4), "frequency": _parameter(4),
        "c": _parameter(8, 4), "head": _head(8)}),
    "Transformer on patches of a signal": ("signal", lambda m, x: m.head(m.encoder(m.start(x.view(-1, 25,
        16)) + m.positions).flatten(1)), lambda: {"start": nn.Linear(16, 16), "positions": _parameter(25, 16),
        "encoder": _encoder(), "head": _head(400)}),
    "Self-normalising network": ("table", None, lambda: {"0": nn.Sequential(nn.Linear(FEATURES, 16), nn.SELU(),
        nn.AlphaDropout(0.1), _head(16))}),
    "Neural ODE by Euler's steps": ("table", _ode, lambda: {"start": nn.Linear(FEATURES, 8), "field": _mlp(8, 16, 8,
        activation=nn.Tanh), "head": _head(8)}),
    "TabNet": ("table", _tabnet, lambda: {"start": nn.Linear(FEATURES, 8), "steps": _modules(3,
        lambda n: nn.Linear(FEATURES, 16)), "masks": _modules(3, lambda n: nn.Linear(8, FEATURES)),
        "head": _head(8)}),
    "FT-Transformer": ("table", _ft_transformer, lambda: {"weight": _parameter(FEATURES, 16),
        "bias": _parameter(FEATURES, 16), "token": _parameter(1, 1, 16), "encoder": _encoder(norm_first=True),
        "head": _head(16)}),
    "AutoInt": ("table", _auto_int, lambda: {"weight": _parameter(FEATURES, 8), "attention": nn.MultiheadAttention(8,
        2, batch_first=True), "short": nn.Linear(8, 8, False), "head": _head(8 * FEATURES)}),
    "Wide and deep": ("table", _wide_deep, lambda: {"wide": nn.Embedding(8, CLASSES), "table": nn.Embedding(8, 4),
        "deep": _mlp(FEATURES + 16, 16, CLASSES)}),
    "Deep and cross": ("table", _cross, lambda: {"layers": _modules(2, lambda n: nn.Linear(FEATURES, FEATURES)),
        "deep": _mlp(FEATURES, 16, 8), "head": _head(FEATURES + 8)}),
    "DeepFM": ("table", _deep_fm, lambda: {"table": nn.Embedding(8, 4), "first": nn.Embedding(8, CLASSES),
        "deep": _mlp(16, 8, CLASSES), "head": _head(4)}),
    "DLRM": ("table", _dlrm, lambda: {"bottom": _mlp(FEATURES, 8, 4), "table": nn.Embedding(8, 4), "top": _mlp(14, 8,
        CLASSES)}),
    "Neural collaborative filtering": ("table", _collaborative, lambda: {"table": nn.Embedding(4, 8), "deep": _mlp(16,
        8, 8), "head": _head(16), "bias": nn.Embedding(4, CLASSES)}),
    "KAN": ("table", _kan, lambda: {"grid": nn.Parameter(torch.linspace(-2, 2, 5), requires_grad=False),
        "weight": _parameter(FEATURES, CLASSES, 5), "base": nn.Linear(FEATURES, CLASSES)}),
    "SIREN": ("table", lambda m, x: m.head(torch.sin(30 * m.second(torch.sin(30 * m.first(x))))),
        lambda: {"first": nn.Linear(FEATURES, 16), "second": nn.Linear(16, 16), "head": _head(16)}),
    "Hypernetwork": ("table", _hyper, lambda: {"weights": nn.Linear(FEATURES, 8 * FEATURES), "head": _head(8)}),
    "Normalising flow": ("table", _flow, lambda: {"nets": _modules(2, lambda n: _mlp(5, 16, 10))}),
    "Mixture density network": ("table", _mixture_density, lambda: {"body": _mlp(FEATURES, 16, 12,
        activation=nn.Tanh)}),
    "Soft decision tree": ("table", _soft_tree, lambda: {"decisions": nn.Linear(FEATURES, 3), "leaves": _parameter(4,
        CLASSES)}),
    "Autoencoder with tied weights": ("table", _tied_autoencoder, lambda: {"encoder": nn.Linear(FEATURES, 4),
        "bias": _parameter(FEATURES)}),
    "MADE": ("table", _masked_autoencoder, lambda: {"first": nn.Linear(FEATURES, 16), "second": nn.Linear(16,
        FEATURES)}),
    "Highway network": ("table", _highway, lambda: {"gates": _modules(2, lambda n: nn.Linear(FEATURES, FEATURES)),
        "layers": _modules(2, lambda n: nn.Linear(FEATURES, FEATURES)), "head": _head(FEATURES)}),
    "Orthogonal weights": ("table", None, lambda: {"0": nn.Sequential(orthogonal(nn.Linear(FEATURES, 8)), nn.Tanh(),
        _head(8))}),
    "Spectral normalisation": ("table", None,
        lambda: {"0": nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.ReLU(),
        _head(8))}),
    "DeepSets": ("points", lambda m, x: m.after(m.before(x).sum(1)), lambda: {"before": _mlp(3, 16, 8),
        "after": _mlp(8, 16, CLASSES)}),
    "PointNet": ("points", _point_net, lambda: {"small": nn.Conv1d(3, 8, 1), "turn": nn.Linear(8, 9),
        "features": nn.Sequential(nn.Conv1d(3, 16, 1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv1d(16, 16, 1)),
        "head": _head(16)}),
    "Set transformer": ("points", _set_transformer, lambda: {"start": nn.Linear(3, 16),
        "among": nn.MultiheadAttention(16, 2, batch_first=True), "mlp": _mlp(16, 16, 16), "seed": _parameter(1, 1,
        16), "pool": nn.MultiheadAttention(16, 2, batch_first=True), "head": _head(16)}),
    "Graph convolutions": ("graph", _gcn, lambda: {"first": nn.Linear(4, 8), "second": nn.Linear(8, 8),
        "head": _head(8)}),
    "Graph attention": ("graph", _gat, lambda: {"first": nn.Linear(4, 8), "source": nn.Linear(8, 1),
        "target": nn.Linear(8, 1), "head": _head(8)}),
    "Graph isomorphism": ("graph", _gin, lambda: {"epsilon": nn.Parameter(torch.tensor(0.1)), "mlp": _mlp(4, 16, 8),
        "head": _head(8)}),
    "Message passing": ("graph", _message_passing, lambda: {"start": nn.Linear(4, 8), "message": nn.Linear(16, 8),
        "cell": nn.GRUCell(8, 8), "head": _head(8)}),
}  # fmt: skip


def make(name: str) -> nn.Module:
    _, compute, parts = ARCHITECTURES[name]
    return nn.Sequential(*parts().values()) if compute is None else Model(compute, **parts())


def inputs_of(takes: str, records: int) -> tuple[Tensor, ...]:
    """What known_models.py has no inputs for."""
    generator = torch.Generator().manual_seed(1)
    sizes = {
        "table": [(FEATURES,)],
        "points": [(7, 3)],
        "pair": [(3, 32, 32), (3, 32, 32)],
        "graph": [(6, 4)],
    }[takes]
    inputs = tuple(torch.randn(records, *size, generator=generator) for size in sizes)
    return (*inputs, torch.rand(records, 6, 6, generator=generator)) if takes == "graph" else inputs


# -- losses of other kinds: (records,) ---------------------------------------------------------------------------------


def next_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none").mean(1)


def _rebuilt(model: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    return (model(*inputs) - inputs[0]).square().flatten(1).mean(1)


def _of_vae(model: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    rebuilt, mean, log_variance = model(*inputs)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (rebuilt - inputs[0]).square().flatten(1).sum(1) + divergence


def _of_pixels(model: nn.Module, inputs: tuple[Tensor, ...], classes: Tensor) -> Tensor:
    return F.cross_entropy(model(*inputs), classes.view(-1, 1, 1).expand(-1, 32, 32), reduction="none").mean((1, 2))


def _of_flow(model: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    values, log_determinant = model(*inputs)
    return 0.5 * values.square().sum(1) - log_determinant


def _of_pairs(model: nn.Module, inputs: tuple[Tensor, ...], classes: Tensor) -> Tensor:
    apart = model(*inputs)
    return torch.where(classes == 0, apart, F.relu(1 - (apart + 1e-9).sqrt()).square())


def _of_discriminator(model: nn.Module, inputs: tuple[Tensor, ...], classes: Tensor) -> Tensor:
    """Each record beside one made-up image, which depends on nothing private."""
    made_up = model(torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32).expand_as(inputs[0]))
    return F.softplus(-model(*inputs)) + F.softplus(made_up)


LOSSES: dict[str, Losses] = {
    "U-Net": _of_pixels,
    "Variational autoencoder": _of_vae,
    "Convolutional autoencoder": _rebuilt,
    "Autoencoder with tied weights": _rebuilt,
    "MADE": _rebuilt,
    "Normalising flow": _of_flow,
    "Mixture density network": lambda model, inputs, _: -model(*inputs),
    "Siamese": _of_pairs,
    "GAN discriminator": _of_discriminator,
    "GPT with tied weights": lambda model, inputs, _: next_tokens(model(*inputs), inputs[0]),
    "Skip-gram": lambda model, inputs, _: F.cross_entropy(
        model(*inputs)[..., 0], torch.zeros_like(inputs[0][:, 0]), reduction="none"
    ),
} | {
    f"{name}, sequence to sequence": lambda model, inputs, _: next_tokens(model(*inputs), inputs[0][:, 6:])
    for name in ("Transformer", "LSTM", "GRU")
}
