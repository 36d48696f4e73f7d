"""Weights that are parts, views or mixtures of one parameter: proved on the graph, and equal to the definition."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from functional import Model
from sums import CLOSE, away, length, sums_of
from zoo import clip_norms

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS, WIDTH = 7, 12
Parts = Sequence[Tensor]
Draw = random.Random


# -- random parts of a weight ---------------------------------------------------------------------------------


def _axis(w: Tensor, draw: Draw, least: int = 2) -> int:
    return draw.choice([axis for axis, size in enumerate(w.shape) if size >= least] or [0])


def _uneven(w: Tensor, draw: Draw) -> Parts:
    axis = _axis(w, draw)
    first = draw.randint(1, max(1, w.shape[axis] - 1))
    return w.split([first, w.shape[axis] - first], axis)


def _narrowed(w: Tensor, draw: Draw) -> Parts:
    axis = _axis(w, draw)
    begin = draw.randint(0, w.shape[axis] - 1)
    return [w.narrow(axis, begin, w.shape[axis] - begin), w]


def _sliced(w: Tensor, draw: Draw) -> Parts:
    axis = _axis(w, draw)
    return [w.movedim(axis, 0)[begin :: draw.randint(2, 3)].movedim(0, axis) for begin in range(2)]


def _selected(w: Tensor, draw: Draw) -> Parts:
    axis = _axis(w, draw)
    return [w.select(axis, draw.randrange(w.shape[axis])), w.select(axis, -1)]


def _reshaped(w: Tensor, draw: Draw) -> Parts:
    pairs = [n for n in range(2, w.numel()) if w.numel() % n == 0] or [1]
    return [w.reshape(-1, draw.choice(pairs))]


#: Each makes tensors of one.
PARTS: dict[str, Callable[[Tensor, Draw], Parts]] = {
    "chunk": lambda w, draw: w.chunk(draw.randint(2, 3), _axis(w, draw)),
    "split": lambda w, draw: w.split(draw.randint(1, 5), _axis(w, draw)),
    "split with sizes": _uneven,
    "unsafe split": lambda w, draw: torch.unsafe_split(w, draw.randint(1, 4), _axis(w, draw)),
    "unbind": lambda w, draw: w.unbind(_axis(w, draw)),
    "narrow": _narrowed,
    "slice": _sliced,
    "select": _selected,
    "reshape": _reshaped,
    "transposed": lambda w, draw: [w.T] if w.ndim == 2 else [w.transpose(0, -1)],
    "permuted": lambda w, draw: [w.permute(draw.sample(range(w.ndim), w.ndim))],
    "unsqueezed": lambda w, draw: [w.unsqueeze(draw.randint(0, w.ndim)).squeeze()],
    "stacked": lambda w, draw: [torch.stack([w, w.flip(0)]), torch.cat([w, 2 * w])],
    "indexed": lambda w, draw: [w[[0, -1, 0]]],
    "copied": lambda w, draw: [w.clone(), w.contiguous()],
    "computed": lambda w, draw: [w / (1 + w.norm()), w.tril() if w.ndim == 2 else w.tanh()],
}

#: Each reads a matrix (outputs, inputs) as a weight, and gives (records, outputs), with data (records, time, inputs).
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w).sum(1),
    "linear with bias": lambda x, w: F.linear(x[:, 0], w, w[:, 0]),
    "product": lambda x, w: (x @ w.T).tanh().sum(1),
    "product from the left": lambda x, w: (w @ x[:, 0].T).T,
    "batched product": lambda x, w: torch.bmm(x, w.T.expand(len(x), -1, -1)).sum(1),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x[:, 1], w.T, alpha=0.5),
    "einsum": lambda x, w: torch.einsum("bti,oi->bo", x, w),
    "convolution": lambda x, w: F.conv1d(x.mT, w[:, :, None]).sigmoid().sum(2),
    "embedding": lambda x, w: F.embedding((x[:, :, 0].abs() * 10).long() % len(w), w).sum((1, 2))[:, None],
    "scale": lambda x, w: (x[:, 0, None] * w).sum(2),
    "shift": lambda x, w: (x[:, 0, None] + w).tanh().sum(2),
}


def _pieces(w: Tensor, draw: Draw, depth: int) -> list[Tensor]:
    """Random parts of random parts."""
    pieces = [w]
    for _ in range(depth):
        chosen = PARTS[draw.choice(list(PARTS))]
        pieces = [part for piece in pieces for part in (chosen(piece, draw) if piece.ndim else [piece])]
        pieces = [piece for piece in pieces if piece.numel()]
        pieces = draw.sample(pieces, min(3, len(pieces)))
    return [piece.reshape(piece.shape[0], -1) if piece.ndim else piece.reshape(1, 1) for piece in pieces]


def _losses(seed: int) -> Callable[[nn.Module, Tensor], Tensor]:
    """Of a model with weights a and b, which are cut and used by a plan drawn from the seed."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        draw = Draw(seed)
        total = x.new_zeros(len(x))
        for weight in (model.a, model.b):
            for piece in _pieces(weight, draw, draw.randint(1, 4)):
                w = piece[:, : x.shape[2]]
                total = total + USES[draw.choice(list(USES))](x[:, :, : w.shape[1]], w).square().sum(1)
        return total

    return losses


def _compare(model: nn.Module, losses: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> None:
    ours, theirs = sums_of(model, losses, x, clip_norms(len(x), 1.0))
    assert away(ours, theirs) <= CLOSE * length(theirs)


@pytest.mark.parametrize("seed", range(60))
def test_weights_cut_at_random_are_proved_and_right(seed):
    torch.manual_seed(seed)
    model = Model(lambda m, x: x, a=nn.Parameter(torch.randn(6, 8)), b=nn.Parameter(torch.randn(3, 4, 2)))
    _compare(model, _losses(seed), torch.randn(RECORDS, 4, WIDTH))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("use", USES)
def test_every_part_of_a_weight_is_proved_in_every_use(part, use):
    """Both outputs of a split are read, by uses with other gradients: to exchange them would be noticed."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        parts = PARTS[part](model.w.T, Draw(1))
        matrices = [p.reshape(p.shape[0], -1)[:, :WIDTH] for p in parts[:3]]
        results = [(k + 1) * USES[use](x[:, :, : w.shape[1]], w).square().sum(1) for k, w in enumerate(matrices)]
        return torch.stack(results).sum(0)

    torch.manual_seed(0)
    model = Model(lambda m, x: x, w=nn.Parameter(torch.randn(6, 8)))
    _compare(model, losses, torch.randn(RECORDS, 4, WIDTH))


# -- attention with packed weights ----------------------------------------------------------------------------

ATTENTION: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]]] = {
    "self": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "keys are values": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, 2 * x, 2 * x)[0]),
    "keys are values, one tensor": lambda: (
        nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: (lambda y: m(x, y, y)[0])(2 * x),
    ),
    "all differ": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x * 2, x * 3)[0]),
    "other lengths": lambda: (
        nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: (lambda y: m(x, y, y, need_weights=False)[0])(x.tanh()[:, :2]),
    ),
    "time first": lambda: (
        nn.MultiheadAttention(8, 2),
        lambda m, x: (lambda y: m(x.transpose(0, 1), y, y)[0].transpose(0, 1))(x.transpose(0, 1).tanh()),
    ),
    "decoder layer": lambda: (nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), lambda m, x: m(x, x.tanh())),
    "decoder": lambda: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True), 2),
        lambda m, x: m(x, x.tanh()),
    ),
    "transformer": lambda: (nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True), lambda m, x: m(x, x.tanh())),
    "transformer, time first": lambda: (
        nn.Transformer(8, 2, 2, 1, 12, 0.0, bias=False),
        lambda m, x: m(x.transpose(0, 1), x.transpose(0, 1).tanh()[:3]).transpose(0, 1),
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_over_another_sequence_is_proved_and_right(name):
    torch.manual_seed(0)
    model, outputs = ATTENTION[name]()
    _compare(model, lambda m, x: (outputs(m, x) * torch.arange(1, 9)).sum((1, 2)), torch.randn(RECORDS, 4, 8))
