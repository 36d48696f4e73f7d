"""The ghost engine: every chunk proved on its graph, norms that are never understated, and a way out when unproven."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from epsilons.training.clipping.ghost import AUDIT_EVERY, Ghost
from epsilons.training.clipping.loop import Loop
from epsilons.training.clipping.pieces import Outer, Rows, in_order, stable
from zoo import ZOO, Case, Doubled, Mean, build, clip_norms

CLOSE = 4e-6  # relative to the clipped sum, against the definition in 64 bits


pytestmark = pytest.mark.usefixtures("one_thread")


def length(sums: list[Tensor]) -> float:
    return math.sqrt(sum(float(s.double().square().sum()) for s in sums))


def away(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return length([a - b for a, b in zip(ours, theirs, strict=True)])


def doubled(case: Case) -> Case:
    return Case(copy.deepcopy(case.model).double(), case.inputs, case.losses)


def in_double(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def ghost(case: Case) -> Ghost:
    made = Ghost()
    made.attach(case.model, case.parameters)
    return made


def compared(case: Case, made: Ghost, records: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """(ours in 32 bits, the definition's in 64) with a clip norm and a weight per record."""
    inputs, targets = case.chunk(records, seed)
    exact = doubled(case)
    loop = Loop()
    loop.attach(exact.model, exact.parameters)
    ones = torch.ones(records)
    total = loop.clipped_sum(exact.loss_of(in_double(inputs), targets), torch.full((records,), 1e9), ones)
    clip_norm = clip_norms(records, length(total) / math.sqrt(records))
    weight = torch.linspace(1.5, 0.5, records, dtype=torch.float64)
    theirs = loop.clipped_sum(exact.loss_of(in_double(inputs), targets), clip_norm, weight)
    made.begin(records)
    return made.clipped_sum(case.loss_of(inputs, targets), clip_norm, weight), theirs


# -- models beyond the zoo ----------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen layer with a low-rank adapter beside it, and one merged into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 3)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x) + 0.5 * self.up(self.down(x)))
        return F.linear(hidden, self.head.weight + 0.1 * self.b @ self.a, self.head.bias)


class CrossAttention(nn.Module):
    """Query, key and value of different widths, the memory shared by nobody."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=batch_first, add_bias_kv=True)
        self.key, self.value = nn.Linear(6, 4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        found, _ = self.attention(x, self.key(x), self.value(x))
        return found.mean(1 if self.batch_first else 0)


class ClassToken(nn.Module):
    """A learnt first token, learnt positions, a transformer, and the first output."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(5, 6))
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=batch_first, norm_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


class Recurrent(nn.Module):
    """A recurrent layer in both conventions."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        if not self.layer.batch_first:
            outputs = outputs.transpose(0, 1)
        return self.head(outputs).logsumexp(1)


class LastStep(nn.Module):
    """Padded sequences: each record's own last output, picked by index."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.layer, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1).clamp_min(1)
        outputs, _ = self.layer(self.embedding(tokens))
        return self.head(outputs[torch.arange(len(tokens)), lengths - 1])


class FrozenMiddle(LastStep):
    """A frozen recurrent layer between trained ones, with a way around it on request."""

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


class Distances(nn.Module):
    """No layers at all: bare parameters, functions, broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.scale = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.ones(6))
        self.power = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        apart = (x[:, None] - self.centres) / (self.scale.square() + 1)
        return -apart.square().sum(2) * torch.exp(self.power)


class ExpandedTokens(nn.Module):
    """One row of tokens for everybody, expanded, not copied."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tensor([1, 5, 5, 2]).expand(len(x), -1)
        return self.head(torch.tanh(self.table(tokens) * x).sum(1))


class OverTime(nn.Module):
    """A convolution of every time step's picture: records times steps in its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.reshape(-1, 1, 2, 3)
        return self.head(self.norm(self.conv(pictures)).reshape(len(x), -1, 6).tanh().mean(1))


def _flat(records: int) -> tuple[Tensor, ...]:
    return (torch.randn(records, 6),)


def _steps(records: int) -> tuple[Tensor, ...]:
    return (torch.randn(records, 4, 6),)


def _padded_tokens(records: int) -> tuple[Tensor, ...]:
    tokens, lengths = torch.randint(1, 11, (records, 5)), torch.randint(1, 6, (records, 1))
    return (tokens.masked_fill(torch.arange(5) >= lengths, 0),)


def _of(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda records: (torch.randn(records, *shape),)


def _headed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


MORE: dict[str, Callable[[], Case]] = {
    "lora": lambda: Case(Lora(), _flat),
    "cross attention": lambda: Case(nn.Sequential(CrossAttention(True), nn.Linear(6, 3)), _steps),
    "cross attention, time first": lambda: Case(nn.Sequential(CrossAttention(False), nn.Linear(6, 3)), _steps),
    "class token": lambda: Case(ClassToken(True), _steps),
    "class token, time first": lambda: Case(ClassToken(False), _steps),
    "lstm": lambda: Case(Recurrent(nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)), _steps),
    "lstm, time first": lambda: Case(Recurrent(nn.LSTM(6, 5, 2, bidirectional=True)), _steps),
    "lstm without bias": lambda: Case(Recurrent(nn.LSTM(6, 5, bias=False, batch_first=True)), _steps),
    "lstm with projection": lambda: Case(Recurrent(nn.LSTM(6, 5, proj_size=3, batch_first=True)), _steps),
    "gru": lambda: Case(Recurrent(nn.GRU(6, 5, 2, batch_first=True, bidirectional=True)), _steps),
    "gru, time first": lambda: Case(Recurrent(nn.GRU(6, 5, 2, bidirectional=True)), _steps),
    "rnn": lambda: Case(Recurrent(nn.RNN(6, 5, batch_first=True)), _steps),
    "own last step": lambda: Case(LastStep(), _padded_tokens),
    "frozen lstm in the middle": lambda: Case(FrozenMiddle(around=False), _padded_tokens),
    "a way around two lstms": lambda: Case(FrozenMiddle(around=True), _padded_tokens),
    "distances": lambda: Case(Distances(), _flat),
    "expanded tokens": lambda: Case(ExpandedTokens(), _steps),
    "convolution over time": lambda: Case(OverTime(), _steps),
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
    "bilinear": lambda: Case(Bilinear(), _flat),
    "wide, many steps": lambda: Case(nn.Sequential(nn.Linear(64, 48), nn.Tanh(), Mean(), nn.Linear(48, 3)), _of(9, 64)),
}


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.tanh(x))


def any_case(name: str) -> Case:
    if name in ZOO:
        return build(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = MORE[name]()
        case.model(*case.inputs(3))  # lazy layers
        return case


ALIKE = [name for name in ZOO if not build(name).random] + list(MORE)


@pytest.mark.parametrize("name", ALIKE)
def test_the_sum_is_the_definitions_in_64_bits_for_every_parameter(name):
    case = any_case(name)
    made = ghost(case)
    for number, records in enumerate([2, 4, 33, 1]):
        ours, theirs = compared(case, made, records, seed=number)
        size = length(theirs)
        assert [o.shape for o in ours] == [p.shape for p in case.parameters]
        assert all(length([o - t]) <= CLOSE * size for o, t in zip(ours, theirs, strict=True))
        assert away(ours, theirs) <= CLOSE * size, f"{records} records"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ALIKE[::2]] + ALIKE[1::6])
def test_the_sum_is_the_definitions_for_large_chunks_too(name):
    case = any_case(name)
    ours, theirs = compared(case, ghost(case), 512, seed=1)
    assert away(ours, theirs) <= CLOSE * length(theirs)


@pytest.mark.parametrize("name", [*ZOO, *MORE])
def test_the_graph_of_a_usual_model_proves_itself(name):
    """Fallbacks are slow: they are for what nobody has taught the engine yet."""
    case = any_case(name)
    made = ghost(case)
    for records in (4, 6, 4):
        inputs, targets = case.chunk(records, seed=records)
        made.begin(records)
        made.clipped_sum(case.loss_of(inputs, targets), torch.ones(records), torch.ones(records))
    assert made.is_proven


# -- norms --------------------------------------------------------------------------------------------------


def common_mode(records: int, noise: float, time: int = 64, width: int = 256) -> tuple[Tensor, Tensor]:
    """Features that all time steps share, gradients of alternating sign: nearly everything cancels."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(records, 1, width, generator=generator).expand(-1, time, -1)
    features = shared + noise * torch.randn(records, time, width, generator=generator)
    sign = torch.where(torch.arange(time) % 2 == 0, 1.0, -1.0)[None, :, None]
    gradients = torch.randn(records, 1, width, generator=generator) * sign
    return features, gradients + noise * torch.randn(records, time, width, generator=generator)


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 0.0])
def test_no_contribution_is_above_its_clip_norm_however_much_cancels(noise):
    """The layer alone, where a contribution can be looked at: the sum with every other factor at 0, in 64 bits."""
    records = 256
    features, gradients = common_mode(records, noise)
    piece = Outer(Rows(features), Rows(gradients))
    norm = piece.squared_norm().sqrt()
    exact = torch.stack([(f.double().T @ g.double()).norm() for f, g in zip(features, gradients, strict=True)])
    assert (norm >= exact * (1 - 2.0**-40)).all()
    assert (norm <= exact * (1 + 2.0**-10) + 1e-6).all()
    clip_norm = 0.5 * exact.clamp_min(1e-3)
    factor = (clip_norm / norm.clamp_min(1e-300)).clamp_max(1.0) * (1 - 2.0**-20)
    for record in range(0, records, 32):
        only = torch.zeros_like(factor)
        only[record] = factor[record]
        assert float(piece.weighted(only).double().norm()) <= float(clip_norm[record])


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_a_whole_model_keeps_clip_norms_where_features_cancel(noise):
    """Through a linear layer whose outputs are summed with alternating signs: 256 records, 64 steps, 256 features."""
    records = 256
    features, _ = common_mode(records, noise)
    sign = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None]
    torch.manual_seed(1)
    model = nn.Linear(256, 256)
    case = Case(model, lambda n: (features[:n],))
    made = ghost(case)
    for record in [0, 77, 255]:
        made.begin(records)
        losses = (torch.tanh(0.01 * model(features)) * sign).sum((1, 2))
        only = torch.zeros(records, dtype=torch.float64)
        only[record] = 1.0
        found = made.clipped_sum(losses, torch.full((records,), 1e-6, dtype=torch.float64), only)
        assert 0.99e-6 <= length(found) <= 1e-6
    assert made.is_proven


@pytest.mark.parametrize(("k", "p", "time"), [(768, 3072, 16), (3, 2048, 2), (1024, 512, 33), (40, 40, 5)])
def test_gram_norms_of_any_width_are_never_understated(k, p, time):
    torch.manual_seed(k)
    left, right = torch.randn(24, time, k) + 1, torch.randn(24, time, p)
    exact = torch.bmm(left.double().mT, right.double()).flatten(1).norm(dim=1)
    norm = Outer(Rows(left), Rows(right)).squared_norm().sqrt()
    assert (norm >= exact * (1 - 2.0**-40)).all()
    assert (norm <= exact * (1 + 2e-4)).all()  # overstated by what rounding may hide: 1.1e-4 at a width of 1,024


# -- what cannot be proved ----------------------------------------------------------------------------------


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(Doubled.apply(self.first(x))))


@pytest.mark.parametrize("make", [lambda: Case(Custom(), _flat), lambda: Case(Packed(), _padded_tokens)])
def test_what_proves_nothing_is_done_by_vmap_and_said_once(make, caplog):
    torch.manual_seed(0)
    case = make()
    made = ghost(case)
    with caplog.at_level(logging.WARNING, logger="epsilons"):
        for number, records in enumerate([4, 5, 4]):
            ours, theirs = compared(case, made, records, seed=number)
            assert away(ours, theirs) <= CLOSE * length(theirs)
    assert not made.is_proven
    assert len(caplog.records) == 1
    made.detach()
    assert not any(module._forward_hooks for module in case.model.modules())


def test_packed_and_padded_sequences_give_one_sum():
    torch.manual_seed(0)
    padded, packed = Case(LastStep(), _padded_tokens), Case(Packed(), _padded_tokens)
    packed.model.load_state_dict(padded.model.state_dict())
    sums = []
    for case in (padded, packed):
        inputs, targets = case.chunk(6, seed=0)
        made = ghost(case)
        made.begin(6)
        sums.append(made.clipped_sum(case.loss_of(inputs, targets), clip_norms(6, 0.3), torch.ones(6)))
    assert away(*sums) <= CLOSE * length(sums[0])


def test_a_hook_on_a_parameter_is_part_of_the_definition():
    torch.manual_seed(0)
    case = Case(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), _flat)
    made, loop = ghost(case), Loop()
    loop.attach(case.model, case.parameters)
    inputs, targets = case.chunk(5, seed=0)
    made.begin(5)
    made.clipped_sum(case.loss_of(inputs, targets), torch.ones(5), torch.ones(5))
    case.parameters[0].register_hook(lambda g: g.clamp(-0.01, 0.01))
    for _ in range(2):
        theirs = loop.clipped_sum(case.loss_of(inputs, targets), torch.ones(5), torch.ones(5))
        made.begin(5)
        ours = made.clipped_sum(case.loss_of(inputs, targets), torch.ones(5), torch.ones(5))
        assert away(ours, theirs) <= CLOSE * length(theirs)


class Watched(nn.Module):
    """From some chunk on, a hook alters what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.is_on:
            hidden.register_hook(lambda g: g / (1e-3 + g.norm()))
        return self.head(hidden)


def test_a_hook_that_appears_later_is_found_at_the_next_audit_and_never_trusted_again():
    torch.manual_seed(0)
    case = Case(Watched(), _flat)
    made, loop = ghost(case), Loop()
    loop.attach(case.model, case.parameters)
    wrong = []
    for number in range(AUDIT_EVERY + 3):
        case.model.is_on = number >= AUDIT_EVERY - 1
        inputs, targets = case.chunk(4, seed=number)
        theirs = loop.clipped_sum(case.loss_of(inputs, targets), torch.full((4,), 0.1), torch.ones(4))
        made.begin(4)
        ours = made.clipped_sum(case.loss_of(inputs, targets), torch.full((4,), 0.1), torch.ones(4))
        if away(ours, theirs) > 1e-5:
            wrong.append(number)
    assert wrong == [AUDIT_EVERY - 1]


MIXING = {
    "softmax": lambda h: h.softmax(0),
    "cumulative sum": lambda h: h.cumsum(0),
    "turned round": lambda h: h.flip(0) + h,
    "roll": lambda h: h.roll(1, 0),
    "flat roll": lambda h: h.roll(2),
    "batch mean": lambda h: h - h.mean(0),
    "products": lambda h: h @ h.T,
    "shuffled": lambda h: h[torch.tensor([1, 0, 2, 5, 4, 3])],
    "reshaped askew": lambda h: h.view(3, 6).cumsum(1).view(6, 3),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "maximum over the batch": lambda h: torch.maximum(h, h.amax(0, keepdim=True).detach() * h.sum()),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_known_operators_that_are_used_across_records_prove_nothing(mix):
    """Rehearsals refuse most of these; an engine that meets them anyway must give the definition's sum."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    made, loop = ghost(Case(layer, _flat)), Loop()
    loop.attach(layer, list(layer.parameters()))
    x, clip_norm = torch.randn(6, 6), clip_norms(6, 0.1)

    def losses() -> Tensor:
        return mix(layer(x)).square().sum(1)

    theirs = loop.clipped_sum(losses(), clip_norm, torch.ones(6))
    made.begin(6)
    ours = made.clipped_sum(losses(), clip_norm, torch.ones(6))
    assert not made.is_proven
    assert away(ours, theirs) <= 1e-5 * length(theirs)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (7, 40), (64, 129)])
@pytest.mark.parametrize("highest", [2, 50, 2**40, 2**61])
def test_values_in_order_are_those_of_a_stable_sort(shape, highest):
    index = torch.randint(0, highest, shape)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(in_order(index), stable(index), strict=True))
