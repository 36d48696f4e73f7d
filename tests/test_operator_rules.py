# ruff: noqa: E501
"""What the watch says an operator's result depends on is true: one record is changed, and what moves is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.independence.fixed_draws import DRAWS
from epsilons.independence.states import Free, Mixed, Rows, Unknown
from epsilons.independence.watch import OperatorWatch

RECORDS, TIME, WIDTH = 5, 4, 6
Function = Callable[[Tensor], Tensor]


def _weights(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


_LSTM = nn.LSTM(WIDTH, 3, batch_first=True).float()
_GRU = nn.GRU(WIDTH, 3, batch_first=True, bidirectional=True).float()
_CONV = nn.Conv1d(TIME, 8, 3, padding=1).double()
_ATTENTION = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
_ENCODER = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True).double()
_TABLE = _weights(50, 3)


def _into(x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found[:, 0] = x[:, 1]
    found[:, 1].add_(x[:, 2], alpha=2)
    return found


def _rows(x: Tensor) -> Tensor:
    return torch.stack([row.mean(0) for row in x])


def _slices(x: Tensor) -> Tensor:
    return torch.cat([x[i : i + 1] * (i + 1) for i in range(len(x))])


def _written(x: Tensor) -> Tensor:
    found = torch.empty(len(x), WIDTH, dtype=x.dtype)
    for i in range(len(x)):
        found[i] = x[i].sum(0)
    return found


def _whole_numbers(x: Tensor) -> Tensor:
    return x.abs().mul(9).long().clamp(0, 49)


#: x (records, time, width) -> anything. True: the rules know that records stay apart.
APART: dict[str, Function] = {
    "arithmetic": lambda x: (x * 2 + 1).tanh() / 3 - x.exp().clamp(max=2),
    "with constants": lambda x: x * _weights(WIDTH) + _weights(TIME, 1),
    "in place": lambda x: x.clone().mul_(2).add_(x).relu_(),
    "into slices": _into,
    "transposed": lambda x: x.transpose(0, 1).sum(0),
    "permuted and back": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0).flatten(1),
    "flattened": lambda x: x.flatten(1) @ _weights(TIME * WIDTH, 3),
    "tokens side by side": lambda x: (x.reshape(-1, WIDTH) @ _weights(WIDTH, 3)).reshape(RECORDS, TIME, 3),
    "linear": lambda x: F.linear(x, _weights(3, WIDTH), _weights(3)),
    "by einsum": lambda x: torch.einsum("btf,fg->btg", x, _weights(WIDTH, 2)),
    "by batched products": lambda x: torch.bmm(x, x.mT).softmax(2) @ x,
    "by heads": lambda x: x.reshape(RECORDS, TIME, 2, 3).transpose(1, 2) @ x.reshape(RECORDS, TIME, 2, 3).permute(0, 2, 3, 1),
    "mean over time": lambda x: x.mean(1),
    "maximum over time": lambda x: x.max(1).values,
    "norm": lambda x: x.norm(dim=(1, 2), keepdim=True) + x.var(2, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(2),
    "softmax": lambda x: x.softmax(1) + x.log_softmax(-1),
    "sums along time": lambda x: x.cumsum(1).flip(1).roll(1, 2),
    "sorted": lambda x: x.sort(2).values.topk(2, 1).values,
    "gathered": lambda x: x.gather(2, x.argmax(2, keepdim=True)),
    "picked": lambda x: x[torch.arange(RECORDS), _whole_numbers(x[:, 0, 0]) % TIME],
    "picked by constants": lambda x: x[:, [2, 0]][..., torch.tensor([1, 3])],
    "looked up": lambda x: _TABLE[_whole_numbers(x[:, :, 0])],
    "embedded": lambda x: F.embedding(_whole_numbers(x[:, 0]), _TABLE),
    "bags": lambda x: F.embedding_bag(_whole_numbers(x[:, 0]), _TABLE, mode="mean"),
    "one hot": lambda x: F.one_hot(_whole_numbers(x[:, 0, 0]), 50).double(),
    "scattered": lambda x: torch.zeros_like(x).scatter_(2, _whole_numbers(x) % WIDTH, x),
    "joined": lambda x: torch.cat([x, x[:, :1]], 1).repeat(1, 2, 1),
    "twice the records": lambda x: torch.cat([x, -x]).chunk(2)[1],
    "repeated": lambda x: x.repeat_interleave(3, 0).reshape(RECORDS, 3, TIME, WIDTH).sum(1),
    "stacked": lambda x: torch.stack([x, x + 1], 1).unbind(1)[0],
    "row by row": _rows,
    "slice by slice": _slices,
    "padded": lambda x: F.pad(x, (1, 2, 0, 3), value=1.0),
    "convolved": lambda x: _CONV(x).detach(),
    "windows": lambda x: x.unfold(1, 2, 1).mean(1),
    "pooled": lambda x: F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 3),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": lambda x: F.instance_norm(x),
    "frozen batch norm": lambda x: F.batch_norm(x, _weights(TIME), _weights(TIME).abs()),
    "dropout": lambda x: F.dropout(x, 0.5) + F.dropout1d(x, 0.2) + F.alpha_dropout(x, 0.1),
    "noise": lambda x: x + torch.randn_like(x) + torch.rand(RECORDS, 1, 1) + torch.empty_like(x).normal_(),
    "masked": lambda x: x.masked_fill(x > 0, -1.0).where(x < 1, 2.0),
    "triangles": lambda x: torch.bmm(x, x.mT).tril() @ x,
    "attention": lambda x: _ATTENTION(x, x, x)[0].detach(),
    "masked attention": lambda x: _ATTENTION(x, x, x, key_padding_mask=x[:, :, 0] > 1)[0].detach(),
    "encoder": lambda x: _ENCODER(x).detach(),
    "causal": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "lstm": lambda x: _LSTM(x.float())[0].detach(),
    "lstm's last": lambda x: _LSTM(x.float())[1][0][-1].detach(),
    "gru": lambda x: _GRU(x.float())[0].detach(),
    "bilinear": lambda x: F.bilinear(x[:, 0], x[:, 1], _weights(3, WIDTH, WIDTH)),
    "cross-entropy": lambda x: F.cross_entropy(x[:, 0], _whole_numbers(x[:, 1, 0]) % WIDTH, reduction="none"),
    "cross-entropy of tokens": lambda x: F.cross_entropy(x.mT, _whole_numbers(x[:, :, 0]) % WIDTH, reduction="none").mean(1),
    "smoothed": lambda x: F.cross_entropy(x[:, 0], _whole_numbers(x[:, 1, 0]) % WIDTH, _weights(WIDTH).abs(), reduction="none", label_smoothing=0.1),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double(), reduction="none").mean((1, 2)),
    "distances": lambda x: (torch.cdist(x, x) + torch.cdist(x, _weights(TIME, WIDTH))).flatten(1),
    "distances to constants": lambda x: torch.cdist(_weights(3, WIDTH), x[:, 0]).T,
    "products with constants": lambda x: (_weights(3, WIDTH) @ x[:, 0].T).T + torch.mv(x[:, 0], _weights(WIDTH))[:, None],
    "queries": lambda x: F.scaled_dot_product_attention(x[:, 0], _weights(7, WIDTH), _weights(7, WIDTH)),
    "drawn around": lambda x: torch.normal(x, 0.1) + torch.normal(0.0, x.abs()),
    "fourier": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "in 32 bits": lambda x: x.float().half().double(),
    "strided": lambda x: x[:, ::2].as_strided((RECORDS, 2, 3), (TIME * WIDTH, 2 * WIDTH, 1)),
    "matrices": lambda x: torch.linalg.inv(torch.bmm(x, x.mT) + torch.eye(TIME)),
}  # fmt: skip

#: What mixes records, and what moves them or has no rule. Never may these be said to stay apart.
TOGETHER: dict[str, Function] = {
    "mean": lambda x: x - x.mean(0),
    "mean of all": lambda x: x / x.mean(),
    "softmax": lambda x: x.softmax(0),
    "sums": lambda x: x.cumsum(0),
    "sorted": lambda x: x.sort(0).values,
    "rolled": lambda x: x + x.roll(1, 0),
    "rolled flat": lambda x: x.roll(1),
    "mirrored": lambda x: x.flip(0),
    "shuffled": lambda x: x[[1, 0, 3, 2, 4]],
    "chosen": lambda x: x[x[:, 0, 0].argsort()],
    "by a mask": lambda x: x.masked_select(x > 0).sum().expand(RECORDS),
    "similarity": lambda x: x.flatten(1) @ x.flatten(1).T,
    "of a neighbour": lambda x: torch.cat([x[1:], x[:1]]),
    "differences": lambda x: F.pad(x[1:] - x[:-1], (0, 0, 0, 0, 0, 1)),
    "first": lambda x: x - x[0],
    "last": lambda x: x * x[-1:],
    "half": lambda x: x[: RECORDS // 2].sum(0).expand(RECORDS, TIME, WIDTH),
    "reshaped": lambda x: x.reshape(TIME, RECORDS, WIDTH).sum(0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "normalised over records": lambda x: F.layer_norm(x.permute(1, 2, 0), (RECORDS,)).permute(2, 0, 1),
    "convolved over records": lambda x: F.conv1d(x.transpose(0, 1), _weights(RECORDS, RECORDS, 1).repeat(1, 1, 1)).transpose(0, 1),
    "attention over records": lambda x: F.scaled_dot_product_attention(*(x.transpose(0, 1),) * 3).transpose(0, 1),
    "lstm over records": lambda x: nn.LSTM(WIDTH, 3)(x.float())[0].detach(),
    "added by key": lambda x: torch.zeros(50, WIDTH, dtype=x.dtype).index_add_(0, _whole_numbers(x[:, 0, 0]), x[:, 0])[
        _whole_numbers(x[:, 0, 0])
    ],
    "counted": lambda x: torch.bincount(_whole_numbers(x[:, 0, 0]), minlength=50)[_whole_numbers(x[:, 0, 0])].double(),
    "distances": lambda x: torch.cdist(x.flatten(1), x.flatten(1)).sum(1),
    "pairs": lambda x: (x[:, None] - x[None]).abs().sum((1, 2, 3)),
    "written over": lambda x: x.clone().copy_(x.flip(0)),
    "row by row": _written,
    "in place into another": lambda x: torch.zeros_like(x).add_(x.mean(0)),
    "view of a row": lambda x: x.as_strided((RECORDS, WIDTH), (0, 1)),
    "every other": lambda x: x[::2].repeat(2, 1, 1)[:RECORDS],
    "weights made of records": lambda x: F.linear(x[:, 0], x[:, 1]),
    "statistics of records": lambda x: F.batch_norm(torch.ones(2, WIDTH, dtype=x.dtype), x.mean((0, 1)), x.var((0, 1))),
    "constants and keys": lambda x: F.scaled_dot_product_attention(_weights(RECORDS, WIDTH), x[:, 0], x[:, 1]),
    "loss with a mean": lambda x: F.mse_loss(x[:, 0], x[:, 1]).expand(RECORDS),
}  # fmt: skip


def _seen(function: Function, x: Tensor) -> tuple[Tensor, Any]:
    watch = OperatorWatch(RECORDS)
    watch.begin([(x, 0)], [])
    try:
        found = function(x)
    finally:
        watch.end()
    return found, watch.of(found).losses


def _assert_true(state: Rows, function: Function, x: Tensor, result: Tensor, records: Iterable[int], what: Any) -> None:
    """Where one record is replaced, only entries that depend on it differ. Random operators draw nothing."""
    entries = result.shape[state.axis] if state.axis is not None else 1
    owner = state.first + torch.arange(entries) // state.inner % state.count
    owner = owner.reshape(-1, *(1 for _ in result.shape[state.axis + 1 :])) if state.axis is not None else owner
    for record in records:
        other = x.clone()
        other[record] = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(99), dtype=x.dtype)
        after = _seen(function, other)[0]
        moved = (result != after) & ~(result.isnan() & after.isnan())
        assert not (moved & (owner != record)).any(), what


def _data() -> Tensor:
    return torch.randn(RECORDS, TIME, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", APART)
def test_records_that_stay_apart_are_known_to(name: str):
    x = _data()
    result, state = _seen(APART[name], x)
    assert state == Rows(0, 1, 0, RECORDS)
    _assert_true(state, APART[name], x, result, range(RECORDS), name)


@pytest.mark.parametrize("name", TOGETHER)
def test_records_that_meet_are_never_said_to_stay_apart(name: str):
    x = _data()
    result, state = _seen(TOGETHER[name], x)
    if not isinstance(state, Mixed | Unknown):  # another order may be known: then it is the right one
        assert isinstance(state, Rows)
        assert state != Rows(0, 1, 0, RECORDS)
        _assert_true(state, TOGETHER[name], x, result, range(RECORDS), name)


def _gradient(function: Function) -> Function:
    """By x, of a sum in which each entry's share depends on the entry."""

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).square().sum(), leaf)[0]

    return gradient


_KERNEL, _KERNEL_2D, _ONES = _weights(TIME, TIME, 3), _weights(2, 1, 2, 2), torch.ones(TIME, dtype=torch.float64)
#: Layers as a loss may use them: records stay apart in their backward passes.
GRADIENTS: dict[str, Function] = {
    "leaky": F.leaky_relu, "elu": F.elu, "hard sigmoid": F.hardsigmoid, "hard swish": F.hardswish,
    "hard tanh": F.hardtanh, "mish": F.mish, "glu": F.glu, "prelu": lambda x: F.prelu(x, _ONES),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)), "rms norm": lambda x: F.rms_norm(x, (TIME, WIDTH)),
    "group norm": lambda x: F.group_norm(x, 2), "convolution": lambda x: F.conv1d(x, _KERNEL),
    "convolution of pictures": lambda x: F.conv2d(x[:, None], _KERNEL_2D),
    "transposed convolution": lambda x: F.conv_transpose1d(x, _KERNEL),
    "batch norm of a trained network": lambda x: F.batch_norm(x, _ONES, _ONES),
    "largest": lambda x: F.max_pool2d(x[:, None], 2), "average": lambda x: F.avg_pool2d(x[:, None], 2),
    "average to a size": lambda x: F.adaptive_avg_pool2d(x[:, None], (3, 2)),
    "largest to a size": lambda x: F.adaptive_max_pool2d(x[:, None], 2),
    "upsampled": lambda x: F.interpolate(x[:, None], scale_factor=2),
    "reflected": lambda x: F.pad(x, (1, 1), "reflect"), "repeated": lambda x: F.pad(x[:, None], (1, 1, 1, 1), "replicate"),
}  # fmt: skip
#: The same where records lie along an axis of the layer.
GRADIENTS_TOGETHER: dict[str, Function] = {
    "glu": lambda x: F.glu(x[:4], 0),
    "layer norm": lambda x: F.layer_norm(x, tuple(x.shape)),
    "group norm": lambda x: F.group_norm(x[None, :, 0], 1),
    "convolution": lambda x: F.conv1d(x.permute(2, 1, 0), _KERNEL),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "largest": lambda x: F.max_pool2d(x.permute(1, 0, 2)[:, None], 2),
    "average": lambda x: F.avg_pool2d(x.permute(1, 0, 2)[:, None], 2),
    "average to a size": lambda x: F.adaptive_avg_pool2d(x.permute(1, 0, 2)[:, None], 2),
    "upsampled": lambda x: F.interpolate(x.permute(1, 0, 2)[:, None], scale_factor=2),
    "reflected": lambda x: F.pad(x.permute(1, 2, 0), (1, 1), "reflect"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_records_stay_apart_in_backward_passes(name: str):
    x, function = _data(), _gradient(GRADIENTS[name])
    result, state = _seen(function, x)
    assert state == Rows(0, 1, 0, RECORDS)
    _assert_true(state, function, x, result, range(RECORDS), name)


@pytest.mark.parametrize("name", GRADIENTS_TOGETHER)
def test_records_that_meet_in_a_backward_pass_are_never_said_to_stay_apart(name: str):
    assert isinstance(_seen(_gradient(GRADIENTS_TOGETHER[name]), _data())[1], Mixed | Unknown)


def test_what_does_not_depend_on_records_is_free_of_them():
    for function in (lambda x: torch.ones(3), lambda x: _weights(3).sum(), lambda x: torch.arange(len(x)) / 2):
        assert isinstance(_seen(function, _data())[1], Free)


@pytest.mark.parametrize("record", range(3))
def test_random_stacks_of_operators_are_judged_as_what_they_do(record: int):
    """Compositions drawn at random: whatever is said to be rows, moves in its own row alone."""
    generator = torch.Generator().manual_seed(record)
    names = list(APART)
    judged = 0
    for _ in range(40):
        chosen = [names[int(i)] for i in torch.randint(len(names), (3,), generator=generator)]

        def stack(x: Tensor, chosen: list[str] = chosen) -> Tensor:
            for name in chosen:
                x = APART[name](x)
                x = x if x.dtype == torch.float64 else x.double()
            return x

        try:
            result, state = _seen(stack, _data())
        except (RuntimeError, IndexError, ValueError, AssertionError):
            continue  # shapes that do not fit
        if not isinstance(state, Rows):
            continue  # such as padding where the records lie
        _assert_true(state, stack, _data(), result, [record], chosen)
        judged += 1
    assert judged >= 4


@pytest.mark.parametrize("name", DRAWS)
def test_random_operators_that_are_replaced_exist(name: str):
    assert hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_")
