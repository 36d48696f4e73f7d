"""Ways: all of them give the definition's sum; they are chosen without a look at data, and kept with the run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import epsilons
from epsilons.errors import InputError
from epsilons.training.clipping import engine, ways
from epsilons.training.clipping.ghost import conv, per_sample_grads
from epsilons.training.clipping.ghost.engine import Ghost
from epsilons.training.clipping.ghost.per_sample_grads import Outer, Rows
from epsilons.training.clipping.loop import Loop
from epsilons.training.clipping.ways import Ways


class Overtime(nn.Module):
    """A linear layer on 5 steps, and one on 40, where the rule goes different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        hidden = torch.tanh(self.few(x))
        return self.many(hidden.repeat(1, 8, 1) * torch.linspace(0.1, 1, 40)[:, None]).sum(1)


MODELS = {
    "linear over time": (Overtime, (5, 12)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3, 2, padding=1), nn.Tanh(), nn.Conv2d(5, 7, 2, dilation=2), nn.Flatten()
        ),
        (2, 9, 8),
    ),
    "wide convolution": (lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten()), (16, 4, 4)),
    "three axes": (
        lambda: nn.Sequential(
            nn.Conv3d(5, 4, (2, 3, 2), (1, 2, 1), padding=(0, 1, 1), dilation=(2, 1, 1)), nn.Tanh(), nn.Flatten()
        ),
        (5, 5, 6, 4),
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(5, 6, 3, (1, 2), padding=(2, 0)), nn.Tanh(), nn.Conv2d(6, 5, 2)).to(
            memory_format=torch.channels_last
        ),
        (5, 6, 7),
    ),
    "groups and one axis": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv1d(6, 2, 2, padding=1), nn.Flatten()),
        (4, 9),
    ),
}


class Last(Ways):
    """Always the way at this place in the list; keeps what there was to choose from."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.seen = place, {}

    def choose(self, layer, usual, possible, attempt, device):
        assert usual in possible
        attempt(usual)  # goes on made-up numbers, whatever the chunk holds
        self.seen[layer] = list(possible)
        return list(possible)[self.place % len(possible)]


def sums(own, model, x, clip_norm):
    own.attach(model, list(model.parameters()))
    own.begin(len(x))
    return own.clipped_sum(model(x).square().flatten(1).sum(1), clip_norm, torch.ones(len(x)))


def length(parts) -> float:
    return math.sqrt(sum(float(p.double().square().sum()) for p in parts))


@pytest.mark.parametrize("at_once", [1, 1000, 2**18])
@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_definitions_sum(name, place, at_once, monkeypatch):
    monkeypatch.setitem(conv.VALUES_AT_ONCE, "cpu", at_once)
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(9, *shape)
    made = Ghost()
    made.ways = Last(place)
    clip_norm = torch.linspace(0.1, 30, 9, dtype=torch.float64)
    ours = sums(made, model, x, clip_norm)
    theirs = sums(Loop(), model.double(), x.double(), clip_norm)
    assert made.is_proven
    assert any(len(possible) > 1 for possible in made.ways.seen.values())
    assert length([a - b for a, b in zip(ours, theirs, strict=True)]) <= 4e-6 * length(theirs)


@pytest.mark.parametrize("way", ["written", "grams"])
@pytest.mark.parametrize("sizes", [(64, 20, 30), (4, 60, 50)])
def test_no_way_lets_a_contribution_grow_where_features_cancel(way, sizes):
    time, k, p = sizes
    torch.manual_seed(0)
    features = torch.randn(32, 1, k) + 1e-4 * torch.randn(32, time, k)
    sign = torch.where(torch.arange(time) % 2 == 0, 1.0, -1.0)[:, None]
    gradients = torch.randn(32, 1, p) * sign + 1e-4 * torch.randn(32, time, p)
    piece = Outer(Rows(features), Rows(gradients))
    piece.decide(Ways({f"products {time}x{k}x{p}": way}))
    assert piece.is_written == (way == "written")
    norm = piece.squared_norm().sqrt()
    for record in range(32):
        factor = torch.zeros(32, dtype=torch.float64)
        factor[record] = 1e-3 / norm[record] * (1 - 2.0**-20)
        assert 0.999e-3 <= float(piece.weighted(factor).double().norm()) <= 1e-3


# -- choosing -----------------------------------------------------------------------------------------------


def clocked(monkeypatch, seconds: dict[str, float]) -> list[str]:
    """Ways take as long as written here; returns the list of those that were tried."""
    now, tried = [0.0], []
    monkeypatch.setattr(ways, "_now", lambda device: now[0])

    def attempt(way: str) -> None:
        tried.append(way)
        now[0] += seconds[way]

    return attempt, tried


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"a": 1.0, "b": 0.5, "c": 2.0}, "b"),
        ({"a": 1.0, "b": 0.95, "c": 3.0}, "a"),
        ({"a": 1.0, "b": 2, "c": 0.1}, "c"),
    ],
)
def test_the_fastest_is_kept_unless_it_is_as_good_as_the_rules(monkeypatch, seconds, chosen):
    attempt, tried = clocked(monkeypatch, seconds)
    own = Ways("timed")
    possible = dict.fromkeys("abc", 1.0)
    assert own.choose("layer", "a", possible, attempt, "cpu") == chosen
    assert own.chosen == {"layer": chosen}
    before = len(tried)
    assert own.choose("layer", "a", possible, attempt, "cpu") == chosen
    assert len(tried) == before  # once per layer


def test_a_way_that_would_write_out_too_much_is_not_tried(monkeypatch):
    attempt, tried = clocked(monkeypatch, {"a": 1.0, "b": 0.1})
    assert Ways("timed").choose("layer", "a", {"a": 1e12, "b": 1e12}, attempt, "cpu") == "a"
    assert tried == []


@pytest.mark.parametrize("given", ["rule", "timed"])
def test_by_rule_and_in_deterministic_mode_nothing_is_tried(given):
    torch.use_deterministic_algorithms(given == "timed")
    try:
        own = Ways(given)
        assert own.choose("layer", "a", {"a": 1.0, "b": 1.0}, lambda way: pytest.fail("tried"), "cpu") == "a"
    finally:
        torch.use_deterministic_algorithms(False)
    assert own.chosen == {}


def test_what_is_tried_are_made_up_numbers_of_the_same_shapes_and_layout(monkeypatch):
    """The chunk is full of NaN; nothing that is tried is, and it is the same for any chunk."""
    seen = []

    def checked(like):
        found = ways.made_up(like)
        assert torch.isfinite(found).all()
        assert found.stride() == torch.empty_like(like).stride()
        seen.append(float(found.sum()))
        return found

    def all_tried(candidates, attempt, device):
        for way in candidates:
            attempt(way)
        return candidates[0]

    monkeypatch.setattr(ways, "_fastest", all_tried)
    monkeypatch.setattr(per_sample_grads, "made_up", checked)
    monkeypatch.setattr(conv, "made_up", checked)
    model = nn.Sequential(nn.Conv2d(4, 5, 3), nn.Tanh(), nn.Flatten(2), nn.Linear(36, 3), nn.Flatten())
    for x in (torch.full((4, 4, 8, 8), float("nan")), torch.randn(4, 4, 8, 8)):
        made = Ghost("timed")
        made.attach(model, list(model.parameters()))
        made.begin(4)
        try:
            made.clipped_sum(model(x).square().sum(1), torch.ones(4), torch.ones(4))
        except epsilons.training.clipping.NonFiniteGradientError:
            assert torch.isnan(x).all()
        assert sorted(layer.split()[0] for layer in made.ways.chosen) == ["convolution", "products"]
    assert seen
    assert len(seen) % 2 == 0
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_ways_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="'fast' is not known"):
        Ways("fast")
    with pytest.raises(InputError, match="'magic' for the layer 'layer'; there are: a, b"):
        Ways({"layer": "magic"}).choose("layer", "a", {"a": 1.0, "b": 1.0}, print, "cpu")
    with pytest.raises(InputError, match="vmap has one way only"):
        engine("vmap", "timed")
    with pytest.raises(InputError, match="engine you made"):
        engine(Loop(), "timed")
