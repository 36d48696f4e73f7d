"""More models for the engine ghost: layers in both layouts, adapters, sequences, convolutions of every kind.

To add one: a function that builds a Case, and a line in MORE.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from functional import Model
from zoo import Case, Mean, flat


def _lora() -> nn.Module:
    """A frozen layer with a low-rank adapter beside it, and one merged into its weight."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(model.base(x) + 0.5 * model.up(model.down(x)))
        return F.linear(hidden, model.head.weight + 0.1 * model.b @ model.a, model.head.bias)

    layers = {"base": nn.Linear(6, 5).requires_grad_(False), "head": nn.Linear(5, 3)}
    adapter = {"down": nn.Linear(6, 2, bias=False), "up": nn.Linear(2, 5, bias=False)}
    return Model(compute, **layers, **adapter, a=nn.Parameter(torch.randn(2, 5)), b=nn.Parameter(torch.randn(3, 2)))


def _cross_attention(batch_first: bool) -> nn.Module:
    """Query, key and value of different widths, the memory of a third."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        outputs, _ = model.attention(x, model.key(x), model.value(x))
        return outputs.mean(1 if batch_first else 0)

    attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=batch_first, add_bias_kv=True)
    return Model(compute, attention=attention, key=nn.Linear(6, 4), value=nn.Linear(6, 5))


def _class_token(batch_first: bool) -> nn.Module:
    """A learnt first token, learnt positions, a transformer, and the first output."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        x = torch.cat([model.token.expand(len(x), -1, -1), x], 1) + model.position
        x = model.layer(x) if batch_first else model.layer(x.transpose(0, 1)).transpose(0, 1)
        return model.head(x[:, 0])

    learnt = {"token": nn.Parameter(torch.randn(1, 1, 6)), "position": nn.Parameter(torch.randn(5, 6))}
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=batch_first, norm_first=True)
    return Model(compute, **learnt, layer=layer, head=nn.Linear(6, 3))


def _recurrent(layer: nn.RNNBase) -> nn.Module:
    """A recurrent layer in both conventions."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        outputs, _ = model.layer(x if layer.batch_first else x.transpose(0, 1))
        return model.head(outputs if layer.batch_first else outputs.transpose(0, 1)).logsumexp(1)

    return Model(compute, layer=layer, head=nn.LazyLinear(3))


class LastStep(nn.Module):
    """Padded sequences: the last output of each record, picked by index."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.layer, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1).clamp_min(1)
        outputs, _ = self.layer(self.embedding(tokens))
        return self.head(outputs[torch.arange(len(tokens)), lengths - 1])


class FrozenMiddle(LastStep):
    """A frozen recurrent layer between trained ones, with a path around it on request."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.layer.requires_grad_(False)
        self.second = nn.LSTM(5, 6, batch_first=True, bidirectional=True)
        self.head, self.around = nn.Linear(12, 3), around

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embedding(tokens)
        outputs, (hidden, cell) = self.second(self.layer(first)[0])
        ends = hidden.transpose(0, 1).flatten(1) + cell.transpose(0, 1).flatten(1)
        outputs = outputs.mean(1) + torch.cat([first, first], 2).sum(1) if self.around else outputs.mean(1)
        return self.head(torch.tanh(outputs + ends))


class Packed(LastStep):
    """The same sequences, packed."""

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1).clamp_min(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, True, enforce_sorted=False)
        _, (hidden, _) = self.layer(packed)
        return self.head(hidden[-1])


def _distances() -> nn.Module:
    """No layers at all: bare parameters, functions, broadcasting."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        apart = (x[:, None] - model.centres) / (model.scale.square() + 1)
        return -apart.square().sum(2) * torch.exp(model.power)

    values = {"centres": torch.randn(3, 6), "scale": torch.ones(6), "power": torch.tensor(0.3)}
    return Model(compute, **{name: nn.Parameter(value) for name, value in values.items()})


def _expanded_tokens() -> nn.Module:
    """One row of tokens for all records, expanded, not copied."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        tokens = torch.tensor([1, 5, 5, 2]).expand(len(x), -1)
        return model.head(torch.tanh(model.table(tokens) * x).sum(1))

    return Model(compute, table=nn.Embedding(11, 6), head=nn.Linear(6, 3))


def _two_lookups() -> nn.Module:
    """Two texts by one table: one by its mean, the other token by token."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        first, second = tokens.split([2, 3], 1)
        return model.head(model.table(first).mean(1) + torch.tanh(model.table(second)).sum(1))

    return Model(compute, table=nn.Embedding(11, 6), head=nn.Linear(6, 3))


def _two_means() -> nn.Module:
    """Two texts by the means of one table's rows."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        first, second = tokens.split([2, 3], 1)
        return model.head(torch.cat([model.table(first).mean(1), model.table(second).mean(1)], 1))

    return Model(compute, table=nn.Embedding(11, 6), head=nn.Linear(12, 3))


def _masked_mean() -> nn.Module:
    """The mean of all embeddings but the padding's."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        is_token = (tokens != 0).unsqueeze(2)
        return model.head((model.table(tokens) * is_token).sum(1) / is_token.sum(1).clamp_min(1))

    return Model(compute, table=nn.Embedding(11, 6), head=nn.Linear(6, 3))


def _learnt_weights() -> nn.Module:
    """A weighted mean of embeddings, with weights that are computed from the embeddings, and time first."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        rows = model.table(tokens.T)
        weight = torch.softmax(model.score(model.other(tokens.T)), 0)
        return model.head((2 * (weight * rows)).sum(0, keepdim=True).squeeze(0))

    tables = {"table": nn.Embedding(11, 6, padding_idx=0), "other": nn.Embedding(11, 4)}
    return Model(compute, **tables, score=nn.Linear(4, 1), head=nn.Linear(6, 3))


def _bags() -> nn.Module:
    """Bags of several lengths, and empty ones, with a weight for each token."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1) - 1
        flat = tokens[torch.arange(tokens.shape[1]) < lengths[:, None]]
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        weights = (flat.float() / 4).to(model.head.weight.dtype)
        return model.head(model.sum(flat, offsets, weights) + model.mean(flat, offsets[:-1]))

    tables = {
        "sum": nn.EmbeddingBag(11, 6, mode="sum", include_last_offset=True),
        "mean": nn.EmbeddingBag(11, 6, padding_idx=3),
    }
    return Model(compute, **tables, head=nn.Linear(6, 3))


def _over_time() -> nn.Module:
    """A convolution of an image per time step: records times steps in its first dimension."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        pictures = x.reshape(-1, 1, 2, 3)
        return model.head(model.norm(model.conv(pictures)).reshape(len(x), -1, 6).tanh().mean(1))

    return Model(compute, conv=nn.Conv2d(1, 3, 2), norm=nn.GroupNorm(1, 3), head=nn.Linear(6, 3))


def _bilinear() -> nn.Module:
    return Model(lambda m, x: m.layer(x, torch.tanh(x)), layer=nn.Bilinear(6, 6, 3))


def _steps(records: int) -> tuple[Tensor, ...]:
    return (torch.randn(records, 4, 6),)


def padded_tokens(records: int) -> tuple[Tensor, ...]:
    tokens, lengths = torch.randint(1, 11, (records, 5)), torch.randint(1, 6, (records, 1))
    return (tokens.masked_fill(torch.arange(5) >= lengths, 0),)


def _of(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda records: (torch.randn(records, *shape),)


def _headed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


MORE: dict[str, Callable[[], Case]] = {
    "lora": lambda: Case(_lora(), flat),
    "cross attention": lambda: Case(nn.Sequential(_cross_attention(True), nn.Linear(6, 3)), _steps),
    "cross attention, time first": lambda: Case(nn.Sequential(_cross_attention(False), nn.Linear(6, 3)), _steps),
    "class token": lambda: Case(_class_token(True), _steps),
    "class token, time first": lambda: Case(_class_token(False), _steps),
    "lstm": lambda: Case(_recurrent(nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)), _steps),
    "lstm, time first": lambda: Case(_recurrent(nn.LSTM(6, 5, 2, bidirectional=True)), _steps),
    "lstm without bias": lambda: Case(_recurrent(nn.LSTM(6, 5, bias=False, batch_first=True)), _steps),
    "lstm with projection": lambda: Case(_recurrent(nn.LSTM(6, 5, proj_size=3, batch_first=True)), _steps),
    "gru": lambda: Case(_recurrent(nn.GRU(6, 5, 2, batch_first=True, bidirectional=True)), _steps),
    "gru, time first": lambda: Case(_recurrent(nn.GRU(6, 5, 2, bidirectional=True)), _steps),
    "rnn": lambda: Case(_recurrent(nn.RNN(6, 5, batch_first=True)), _steps),
    "last step of each": lambda: Case(LastStep(), padded_tokens),
    "frozen lstm in the middle": lambda: Case(FrozenMiddle(around=False), padded_tokens),
    "a path around two lstms": lambda: Case(FrozenMiddle(around=True), padded_tokens),
    "distances": lambda: Case(_distances(), flat),
    "expanded tokens": lambda: Case(_expanded_tokens(), _steps),
    "two lookups": lambda: Case(_two_lookups(), padded_tokens),
    "two means": lambda: Case(_two_means(), padded_tokens),
    "masked mean": lambda: Case(_masked_mean(), padded_tokens),
    "learnt weights": lambda: Case(_learnt_weights(), padded_tokens),
    "bags": lambda: Case(_bags(), padded_tokens),
    "largest of a bag": lambda: Case(nn.Sequential(nn.EmbeddingBag(11, 6, mode="max"), nn.Linear(6, 3)), padded_tokens),
    "convolution over time": lambda: Case(_over_time(), _steps),
    "conv 1d": lambda: Case(_headed(nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2)), _of(4, 9)),
    "conv 2d same": lambda: Case(_headed(nn.Conv2d(2, 3, (3, 2), padding="same"), nn.ELU()), _of(2, 5, 4)),
    "conv 2d circular": lambda: Case(_headed(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), _of(2, 5, 4)),
    "conv 2d depthwise": lambda: Case(_headed(nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.SiLU()), _of(4, 5, 4)),
    "conv 2d, few positions": lambda: Case(
        _headed(nn.Conv2d(2, 9, 3, padding=1), nn.Tanh(), nn.Conv2d(9, 12, 3, stride=2, padding=1, dilation=1)),
        _of(2, 3, 4),
    ),
    "conv 2d, one channel": lambda: Case(_headed(nn.Conv2d(1, 3, (3, 2), (2, 1), (1, 0), (1, 2))), _of(1, 6, 5)),
    "conv 3d": lambda: Case(_headed(nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), nn.MaxPool3d(2)), _of(2, 4, 6, 4)),
    "transposed conv": lambda: Case(
        _headed(nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), nn.AvgPool2d(2)), _of(4, 3, 4)
    ),
    "channels last": lambda: Case(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 3)
        ).to(memory_format=torch.channels_last),
        lambda records: (torch.randn(records, 3, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "pooled to one, channels last": lambda: Case(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).to(
            memory_format=torch.channels_last
        ),
        lambda records: (torch.randn(records, 3, 5, 5).to(memory_format=torch.channels_last),),
    ),
    "norms": lambda: Case(
        _headed(
            nn.Conv2d(2, 4, 3),
            nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4),
            nn.LayerNorm([4, 3, 3]),
            nn.Tanh(),
        ),
        _of(2, 5, 5),
    ),
    "rms norm": lambda: Case(_headed(nn.Linear(6, 5), nn.RMSNorm(5), nn.GELU()), _steps),
    "weight norm on a convolution": lambda: Case(_headed(weight_norm(nn.Conv2d(2, 3, 2)), nn.Tanh()), _of(2, 4, 4)),
    "linear in four dimensions": lambda: Case(_headed(nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 4)), _of(2, 3, 6)),
    "bilinear": lambda: Case(_bilinear(), flat),
    "wide, many steps": lambda: Case(nn.Sequential(nn.Linear(64, 48), nn.Tanh(), Mean(), nn.Linear(48, 3)), _of(9, 64)),
}
