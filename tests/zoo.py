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


class Pick(nn.Module):
    """From a recurrent layer's result: its last output, or its last hidden state."""

    def __init__(self, layer: nn.Module, what: str) -> None:
        super().__init__()
        self.layer, self.what = layer, what

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.layer(x)
        if self.what == "output":
            return outputs[:, -1]
        hidden = state[0] if isinstance(state, tuple) else state  # (layers, batch, hidden)
        return hidden[-1]


class TimeFirst(nn.Module):
    """A time-first LSTM used as it should be: its input is transposed on the way in, its output on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x.transpose(0, 1))  # (time, batch, hidden)
        return self.head(outputs.transpose(0, 1)[:, -1])


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence with itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """The embedding's weights are the output head's too, used outside the embedding's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.middle = nn.Linear(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embedding(tokens).mean(1)))
        return F.linear(hidden, self.embedding.weight)


class Shared(nn.Module):
    """One parameter registered in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class BareParameter(nn.Module):
    """A parameter on the root itself, beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(x * self.shift))


class Gated(nn.Module):
    """A residual block behind a single trainable number (ReZero)."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * torch.tanh(self.block(x)))


class Twice(nn.Module):
    """A module called twice in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class TwoInputs(nn.Module):
    """Two inputs, joined in the middle, one layer taking both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.joint, self.head = nn.Linear(6, 4), nn.Bilinear(4, 5, 4), nn.Linear(4, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.joint(torch.tanh(self.left(a)), b)))


class FlatTokens(nn.Module):
    """Tokens of all records are batch·time rows for a linear layer, and are separated again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.layer(x.view(-1, 6)))  # (batch · time, 4)
        return self.head(rows.view(len(x), -1, 4).mean(1))


class Positions(nn.Module):
    """A learnt position embedding: a layer whose input has time steps where others have records."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 5), nn.Embedding(TIME, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        both = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(torch.tanh(both).mean(1))


class InPlace(nn.Module):
    """Arithmetic in place on a layer's output, and a skip connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden += x
        hidden = F.relu_(hidden)
        return self.head(hidden + self.second(hidden).mul_(0.5))


class Unused(nn.Module):
    """A layer that is never called, and one with outputs that are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep, self.idle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.head(x)


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


ZOO: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(nn.Linear(6, CLASSES), flat),
    "two layers": lambda: Case(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)), flat),
    "regression": lambda: Case(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), flat, _regression),
    "prelu": lambda: Case(nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, CLASSES)), flat),
    "linear on sequences": lambda: Case(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Mean(), nn.Linear(5, CLASSES)), _sequence
    ),
    "conv": lambda: Case(
        nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)), _image
    ),
    "grouped conv": lambda: Case(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, CLASSES)
        ),
        _image,
    ),
    "conv on sequences": lambda: Case(
        nn.Sequential(nn.Conv1d(TIME, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)), _sequence
    ),
    "embedding": lambda: Case(
        nn.Sequential(nn.Embedding(11, 5, padding_idx=0), Mean(), nn.Linear(5, CLASSES)), _tokens
    ),
    "sparse embedding": lambda: Case(
        nn.Sequential(nn.Embedding(11, 5, sparse=True), Mean(), nn.Linear(5, CLASSES)), _tokens
    ),
    "embedding bag": lambda: Case(nn.Sequential(nn.EmbeddingBag(11, 5), nn.Linear(5, CLASSES)), _tokens),
    "layer norm": lambda: Case(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, CLASSES)), flat),
    "group norm": lambda: Case(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)), _image
    ),
    "group norm of features": lambda: Case(
        nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, CLASSES)), flat
    ),
    "instance norm": lambda: Case(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(64, CLASSES)),
        _image,
    ),
    "frozen batch norm": lambda: Case(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval(), nn.Tanh(), nn.Linear(4, CLASSES)), flat
    ),
    "weight norm": lambda: Case(
        nn.Sequential(weight_norm(nn.Linear(6, 4, bias=False)), nn.Tanh(), nn.Linear(4, CLASSES)), flat
    ),
    "attention": lambda: Case(nn.Sequential(SelfAttention(), Mean(), nn.Linear(6, CLASSES)), _sequence),
    "lstm, last output": lambda: Case(
        nn.Sequential(Pick(nn.LSTM(6, 5, batch_first=True), "output"), nn.Linear(5, CLASSES)), _sequence
    ),
    "lstm, hidden state": lambda: Case(
        nn.Sequential(Pick(nn.LSTM(6, 5, batch_first=True), "state"), nn.Linear(5, CLASSES)), _sequence
    ),
    "two-layer lstm, hidden state": lambda: Case(
        nn.Sequential(Pick(nn.LSTM(6, 5, num_layers=2, batch_first=True), "state"), nn.Linear(5, CLASSES)), _sequence
    ),
    "bidirectional lstm": lambda: Case(
        nn.Sequential(Pick(nn.LSTM(6, 4, batch_first=True, bidirectional=True), "output"), nn.Linear(8, CLASSES)),
        _sequence,
    ),
    "time-first lstm": lambda: Case(TimeFirst(), _sequence),
    "gru": lambda: Case(
        nn.Sequential(Pick(nn.GRU(6, 5, batch_first=True), "output"), nn.Linear(5, CLASSES)), _sequence
    ),
    "gru, hidden state": lambda: Case(
        nn.Sequential(Pick(nn.GRU(6, 5, batch_first=True), "state"), nn.Linear(5, CLASSES)), _sequence
    ),
    "tied weights": lambda: Case(Tied(), _tokens),
    "shared weights": lambda: Case(Shared(), flat),
    "bare parameter": lambda: Case(BareParameter(), flat),
    "gate": lambda: Case(Gated(), flat),
    "in-place relu": lambda: Case(
        nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(True), nn.Linear(5, CLASSES)),
        flat,
    ),
    "in-place arithmetic": lambda: Case(InPlace(), flat),
    "called twice": lambda: Case(Twice(), flat),
    "frozen part": lambda: Case(_frozen_part(), flat),
    "unused part": lambda: Case(Unused(), flat),
    "two inputs": lambda: Case(TwoInputs(), _pair),
    "flattened tokens": lambda: Case(FlatTokens(), _sequence),
    "positions": lambda: Case(Positions(), _tokens),
    "transformer": lambda: Case(_encoder(0.0), _sequence),
    "dropout": lambda: Case(
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES)), flat, random=True
    ),
    "dropout in attention": lambda: Case(
        nn.Sequential(SelfAttention(dropout=0.5), Mean(), nn.Linear(6, CLASSES)), _sequence, random=True
    ),
    "dropout in lstm": lambda: Case(
        nn.Sequential(Pick(nn.LSTM(6, 5, 2, batch_first=True, dropout=0.5), "output"), nn.Linear(5, CLASSES)),
        _sequence,
        random=True,
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
