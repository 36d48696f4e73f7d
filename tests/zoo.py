"""The zoo: small models that failed somewhere, each with inputs and the loss of every record.

To add a model: a function that builds a Case, and a line in ZOO. Every engine is then compared with the definition on
it. Sizes (features, time steps, records) overlap on purpose, so that a dimension taken for another one is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from functional import Model

CLASSES = 3
TIME = 4

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    model   in training mode
    inputs  records -> one tensor per input, a row per record
    losses  (batch,) from the outputs and the targets; cross-entropy by default
    random  True if the forward pass draws random numbers, so that a record alone is not what it is among others
    """

    model: nn.Module
    inputs: Callable[[int], Inputs]
    losses: Callable[[Tensor, Tensor], Tensor] = field(
        default=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")
    )
    random: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def batch(self, records: int, seed: int) -> tuple[Inputs, Tensor]:
        """(inputs, targets) of so many records."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inputs = self.inputs(records)
            return inputs, torch.randint(CLASSES, (records,))

    def loss_of(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """(batch,) one loss per record."""
        return self.losses(self.model(*inputs), targets)


def build(name: str, seed: int = 0) -> Case:
    """A new model of this name, with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ZOO[name]()


# -- inputs -------------------------------------------------------------------------------------------------


def flat(records: int) -> Inputs:
    return (torch.randn(records, 6),)


def _image(records: int) -> Inputs:
    return (torch.randn(records, 2, 6, 6),)


def _sequence(records: int) -> Inputs:
    return (torch.randn(records, TIME, 6),)


def _tokens(records: int) -> Inputs:
    return (torch.randint(11, (records, TIME)),)


def _pair(records: int) -> Inputs:
    return torch.randn(records, 6), torch.randn(records, 5)


# -- models -------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """The mean over the tokens or time steps of each record."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def last_output(layer: nn.RNNBase) -> nn.Module:
    """The last output of a recurrent layer."""
    return Model(lambda m, x: m.layer(x)[0][:, -1], layer=layer)


def last_state(layer: nn.RNNBase) -> nn.Module:
    """The hidden state (layers, batch, hidden) of a recurrent layer's last layer."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        _, state = model.layer(x)
        return state[0][-1] if isinstance(state, tuple) else state[-1]

    return Model(compute, layer=layer)


def time_first() -> nn.Module:
    """A time-first LSTM used as it should be: its input is transposed on the way in, its output on the way out."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        outputs, _ = model.lstm(x.transpose(0, 1))  # (time, batch, hidden)
        return model.head(outputs.transpose(0, 1)[:, -1])

    return Model(compute, lstm=nn.LSTM(6, 5), head=nn.Linear(5, CLASSES))


def _self_attention(dropout: float = 0.0) -> nn.Module:
    """Multi-head attention of a sequence with itself."""
    attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
    return Model(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=attention)


def _tied() -> nn.Module:
    """The embedding's weights are the output head's too, used outside the embedding's own forward."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(model.middle(model.embedding(tokens).mean(1)))
        return F.linear(hidden, model.embedding.weight)

    return Model(compute, embedding=nn.Embedding(11, 5), middle=nn.Linear(5, 5))


def _shared() -> nn.Module:
    """One parameter registered in two layers."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(6, CLASSES))


def _bare_parameter() -> nn.Module:
    """A parameter on the root itself, beside a child."""
    shift = nn.Parameter(torch.randn(6))
    return Model(lambda m, x: m.layer(torch.tanh(x * m.shift)), shift=shift, layer=nn.Linear(6, CLASSES))


def _gated() -> nn.Module:
    """A residual block behind a single trainable number (ReZero)."""
    parts = {"block": nn.Linear(6, 6), "head": nn.Linear(6, CLASSES), "gate": nn.Parameter(torch.tensor(0.3))}
    return Model(lambda m, x: m.head(x + m.gate * torch.tanh(m.block(x))), **parts)


def _called_twice() -> nn.Module:
    """A module called twice in one forward pass."""
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, CLASSES))


def _two_inputs() -> nn.Module:
    """Two inputs, joined in the middle, one layer taking both."""
    parts = {"left": nn.Linear(6, 4), "joint": nn.Bilinear(4, 5, 4), "head": nn.Linear(4, CLASSES)}
    return Model(lambda m, a, b: m.head(torch.tanh(m.joint(torch.tanh(m.left(a)), b))), **parts)


def _flat_tokens() -> nn.Module:
    """Tokens of all records are batch·time rows for a linear layer, and are separated again."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        rows = torch.tanh(model.layer(x.view(-1, 6)))  # (batch · time, 4)
        return model.head(rows.view(len(x), -1, 4).mean(1))

    return Model(compute, layer=nn.Linear(6, 4), head=nn.Linear(4, CLASSES))


def positions() -> nn.Module:
    """A learnt position embedding: a layer whose input has time steps where others have records."""

    def compute(model: nn.Module, tokens: Tensor) -> Tensor:
        both = model.token(tokens) + model.position(torch.arange(tokens.shape[1]))
        return model.head(torch.tanh(both).mean(1))

    parts = {"token": nn.Embedding(11, 5), "position": nn.Embedding(TIME, 5), "head": nn.Linear(5, CLASSES)}
    return Model(compute, **parts)


def _in_place() -> nn.Module:
    """Arithmetic in place on a layer's output, and a skip connection around it."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.first(x)
        hidden += x
        hidden = F.relu_(hidden)
        return model.head(hidden + model.second(hidden).mul_(0.5))

    return Model(compute, first=nn.Linear(6, 6), second=nn.Linear(6, 6), head=nn.Linear(6, CLASSES))


def _unused() -> nn.Module:
    """A layer that is never called, and one with outputs that are not used."""
    parts = {"asleep": nn.Linear(6, 6), "idle": nn.Linear(6, 6), "head": nn.Linear(6, CLASSES)}
    return Model(lambda m, x: (m.idle(x), m.head(x))[1], **parts)


def _frozen_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def _encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=8, dropout=dropout, batch_first=True)
    return nn.Sequential(layer, Mean(), nn.Linear(6, CLASSES))


def _regression(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten() - targets).square()


def _stack(inputs: Callable[[int], Inputs], *layers: nn.Module, random: bool = False) -> Case:
    return Case(nn.Sequential(*layers), inputs, random=random)


def _head(width: int) -> nn.Module:
    return nn.Linear(width, CLASSES)


ZOO: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(_head(6), flat),
    "two layers": lambda: _stack(flat, nn.Linear(6, 5), nn.Tanh(), _head(5)),
    "regression": lambda: Case(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), flat, _regression),
    "prelu": lambda: _stack(flat, nn.Linear(6, 4), nn.PReLU(), _head(4)),
    "linear on sequences": lambda: _stack(_sequence, nn.Linear(6, 5), nn.Tanh(), Mean(), _head(5)),
    "conv": lambda: _stack(_image, nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), _head(36)),
    "grouped conv": lambda: _stack(
        _image, nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), _head(4)
    ),
    "conv on sequences": lambda: _stack(_sequence, nn.Conv1d(TIME, 3, 3), nn.Tanh(), nn.Flatten(), _head(12)),
    "embedding": lambda: _stack(_tokens, nn.Embedding(11, 5, padding_idx=0), Mean(), _head(5)),
    "sparse embedding": lambda: _stack(_tokens, nn.Embedding(11, 5, sparse=True), Mean(), _head(5)),
    "embedding bag": lambda: _stack(_tokens, nn.EmbeddingBag(11, 5), _head(5)),
    "layer norm": lambda: _stack(flat, nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), _head(4)),
    "group norm": lambda: _stack(_image, nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), _head(64)),
    "group norm of features": lambda: _stack(flat, nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), _head(8)),
    "instance norm": lambda: _stack(
        _image, nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), _head(64)
    ),
    "frozen batch norm": lambda: _stack(flat, nn.Linear(6, 4), nn.BatchNorm1d(4).eval(), nn.Tanh(), _head(4)),
    "weight norm": lambda: _stack(flat, weight_norm(nn.Linear(6, 4, bias=False)), nn.Tanh(), _head(4)),
    "attention": lambda: _stack(_sequence, _self_attention(), Mean(), _head(6)),
    "lstm, last output": lambda: _stack(_sequence, last_output(nn.LSTM(6, 5, batch_first=True)), _head(5)),
    "lstm, hidden state": lambda: _stack(_sequence, last_state(nn.LSTM(6, 5, batch_first=True)), _head(5)),
    "two-layer lstm, hidden state": lambda: _stack(
        _sequence, last_state(nn.LSTM(6, 5, num_layers=2, batch_first=True)), _head(5)
    ),
    "bidirectional lstm": lambda: _stack(
        _sequence, last_output(nn.LSTM(6, 4, batch_first=True, bidirectional=True)), _head(8)
    ),
    "time-first lstm": lambda: Case(time_first(), _sequence),
    "gru": lambda: _stack(_sequence, last_output(nn.GRU(6, 5, batch_first=True)), _head(5)),
    "gru, hidden state": lambda: _stack(_sequence, last_state(nn.GRU(6, 5, batch_first=True)), _head(5)),
    "tied weights": lambda: Case(_tied(), _tokens),
    "shared weights": lambda: Case(_shared(), flat),
    "bare parameter": lambda: Case(_bare_parameter(), flat),
    "gate": lambda: Case(_gated(), flat),
    "in-place relu": lambda: _stack(
        flat, nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(True), _head(5)
    ),
    "in-place arithmetic": lambda: Case(_in_place(), flat),
    "called twice": lambda: Case(_called_twice(), flat),
    "frozen part": lambda: Case(_frozen_part(), flat),
    "unused part": lambda: Case(_unused(), flat),
    "two inputs": lambda: Case(_two_inputs(), _pair),
    "flattened tokens": lambda: Case(_flat_tokens(), _sequence),
    "positions": lambda: Case(positions(), _tokens),
    "transformer": lambda: Case(_encoder(0.0), _sequence),
    "dropout": lambda: _stack(flat, nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), _head(8), random=True),
    "dropout in attention": lambda: _stack(_sequence, _self_attention(dropout=0.5), Mean(), _head(6), random=True),
    "dropout in lstm": lambda: _stack(
        _sequence, last_output(nn.LSTM(6, 5, 2, batch_first=True, dropout=0.5)), _head(5), random=True
    ),
    "dropout in transformer": lambda: Case(_encoder(0.5), _sequence, random=True),
}


def clip_norms(records: int, typical: float) -> Tensor:
    """A clip norm per record: some below the typical gradient, some above, no two alike."""
    return typical * torch.linspace(0.3, 1.9, records + 1, dtype=torch.float64)[1:]


class Doubled(torch.autograd.Function):
    """An operator without a rule."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


# -- More models for the engine ghost: layers in both layouts, adapters, sequences, convolutions of every kind --------


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
