"""The weights of INO-SGD: no record moves the sum of a batch by more than its clip norm. By brute force."""

from __future__ import annotations

import pytest
import torch

from experiments.ino import Weights, all_ones, exact_weights


def worst(weigh: Weights, trials: int = 300) -> float:
    """The largest displacement of a sum by one record over its clip norm. Half of the batches are adversarial: all
    gradients point alike, and are as long as they may be.
    """
    draw = torch.Generator().manual_seed(0)
    found = 0.0
    for trial in range(trials):
        records = int(torch.randint(2, 40, (1,), generator=draw))
        clip_norms = torch.rand(records, generator=draw, dtype=torch.float64) ** 3 + 0.01
        losses = torch.randint(0, 5, (records,), generator=draw) + torch.rand(1, generator=draw)  # many are equal
        gradients = torch.randn(records, 3, generator=draw, dtype=torch.float64)
        lengths = torch.rand(records, generator=draw, dtype=torch.float64)
        if trial % 2:
            gradients, lengths = torch.ones_like(gradients), torch.ones_like(lengths)
        gradients *= (clip_norms * lengths / gradients.norm(dim=1))[:, None]
        whole = weigh(losses, clip_norms) @ gradients
        for record in range(records):
            rest = torch.arange(records) != record
            without = weigh(losses[rest], clip_norms[rest]) @ gradients[rest]
            found = max(found, float((whole - without).norm() / clip_norms[record]))
    return found


@pytest.mark.parametrize("rise", [0.1, 1.0, 5.0, 100.0])
def test_exact_weights_move_a_sum_by_at_most_the_own_clip_norm(rise):
    assert worst(exact_weights(rise)) <= 1 + 1e-9


def test_the_bound_is_reached():
    assert worst(exact_weights(0.1)) > 0.999
    assert worst(all_ones) == pytest.approx(1)


def test_weights_that_are_scaled_by_their_batch_break_it():
    def by_rank(losses, clip_norms):
        return (torch.argsort(torch.argsort(losses, stable=True)) + 1.0).double() / len(losses)

    def normalised(losses, clip_norms):
        found = exact_weights(5.0)(losses, clip_norms)
        return found / found.max()

    assert worst(by_rank) > 1.5
    assert worst(normalised) > 1.5
