"""Banded noise: against dense matrices, an adversary that sees every update, and dp-accounting."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from epsilons import SampledGaussian
from epsilons.accounting import pld
from experiments import banded, banded_page

PARTS = 3


def dense(bands, steps: int) -> np.ndarray:
    """C, entry by entry."""
    return toeplitz([*bands, *[0.0] * (steps - len(bands))], [bands[0], *[0.0] * (steps - 1)])


def noise_of(normals: torch.Tensor, bands) -> np.ndarray:
    return torch.stack(list(banded.correlated(normals, bands))).numpy()


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_noise_is_that_of_the_dense_matrix(count):
    normals = torch.randn(12, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    bands = banded.best_bands(count, 12, 0.9)
    assert np.square(bands).sum() == pytest.approx(1)
    slow = np.linalg.inv(dense(bands, 12)) @ normals.numpy().reshape(12, -1)
    np.testing.assert_allclose(noise_of(normals, bands).reshape(12, -1), slow, rtol=1e-9, atol=1e-12)
    assert np.abs(slow - normals.numpy().reshape(12, -1)).max() > 0.1 or count == 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_error_is_that_of_weights_which_sum_up_the_noise(momentum):
    """A by running SGD on each unit vector; the error also from many simulated runs."""
    steps, updates = 20, np.eye(20)
    bands = banded.best_bands(4, steps, momentum)
    velocity, weights = np.zeros((2, steps))
    rows = []
    for update in updates:
        velocity = momentum * velocity + update
        weights = weights + velocity
        rows.append(weights)
    slow = np.linalg.norm(np.array(rows) @ np.linalg.inv(dense(bands, steps))) / math.sqrt(steps)
    assert float(banded.error(bands, steps, momentum)) == pytest.approx(slow, rel=1e-9)
    simulated = np.array(rows) @ noise_of(torch.randn(steps, 20_000, generator=torch.Generator().manual_seed(0)), bands)
    assert math.sqrt(np.square(simulated).mean()) == pytest.approx(slow, rel=0.03)


def test_no_bands_nearby_have_less_error_and_more_bands_have_less():
    found = [float(banded.error(banded.best_bands(count, 40, 0.9), 40, 0.9)) for count in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True)
    best, coins = np.array(banded.best_bands(4, 40, 0.9)), np.random.default_rng(0)
    for _ in range(50):
        other = best + coins.normal(0, 0.03, 4)
        assert float(banded.error(other, 40, 0.9)) >= found[2]


@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_a_record_is_drawn_only_in_steps_of_its_block_at_the_rate(blocks):
    records, steps, rate = 997, 240, 0.4
    taken = np.zeros((steps, records), dtype=bool)
    for step, rows in enumerate(banded.drawn(records, blocks, rate, steps, torch.Generator().manual_seed(3))):
        taken[step, rows.numpy()] = True
        assert len(set(rows.tolist())) == len(rows)
    block = np.array([taken[k::blocks].any(axis=0) for k in range(blocks)])
    assert block.sum(axis=0).tolist() == [1] * records  # so two steps of a record are at least `blocks` apart
    sizes = block.sum(axis=1)
    assert sizes.max() - sizes.min() <= 1
    deviation = math.sqrt(rate * (1 - rate) * records * steps / blocks)
    assert abs(taken.sum() - rate * records * steps / blocks) < 5 * deviation
    assert len({tuple(row) for row in taken.T}) > 900  # coins of different records differ


def test_each_part_of_a_record_has_rows_of_its_own_and_moves_them_by_its_clip_norm_at_most():
    """Random gradients of the largest norm, in the steps of one record. Steps one closer overlap, and exceed it."""
    steps, count, coins = 24, 4, np.random.default_rng(1)
    matrix, clip_norm = dense(banded.best_bands(count, steps, 0.0), steps), 0.7

    def moves(taken: list[int]) -> list[np.ndarray]:
        gradients = coins.normal(size=(steps, 5))
        gradients *= clip_norm / np.linalg.norm(gradients, axis=1, keepdims=True)
        return [np.outer(matrix[:, step], gradients[step]) for step in taken]

    for start in range(count):
        parts = moves(list(range(start, steps, count)))
        assert max(np.linalg.norm(part) for part in parts) <= clip_norm * (1 + 1e-12)
        assert sum((np.abs(part).sum(axis=1) > 0).astype(int) for part in parts).max() == 1
    closer = moves(list(range(0, steps, count - 1)))
    assert sum((np.abs(part).sum(axis=1) > 0).astype(int) for part in closer).max() == 2
    same = [np.outer(matrix[:, step], [clip_norm]) for step in (0, 3, 6)]
    assert np.square(sum(same)).sum() > 3 * clip_norm**2 * 1.01


def delta_seen(bands, epsilon: float, noise: float, rate: float, blocks: int) -> float:
    """δ at this epsilon of an adversary who sees all updates, of one record of the first block with clip norm 1.

    The mean over many runs of the program's own draws and noise; the likelihood ratio is exact, by the densities of all
    ways to take part.
    """
    runs, steps = 300_000, PARTS * len(bands)
    matrix = dense(bands, steps)
    members = next(banded.drawn(runs, blocks, 1.0, 1, torch.Generator().manual_seed(5)))
    taken = torch.zeros(steps, runs, dtype=torch.float64)
    coins = torch.Generator().manual_seed(5)
    for step, rows in enumerate(banded.drawn(runs, blocks, rate, steps, coins)):
        taken[step, rows] = 1.0
    normals = noise * torch.randn(steps, len(members), dtype=torch.float64, generator=coins)
    seen = matrix @ (taken[:, members].numpy() + noise_of(normals, bands))
    ratio = np.zeros(len(members))
    for ways in itertools.product([0, 1], repeat=len(range(0, steps, blocks))):
        moved = matrix[:, ::blocks] @ ways
        chance = math.prod(rate if way else 1 - rate for way in ways)
        ratio += chance * np.exp((seen.T @ moved - moved @ moved / 2) / noise**2)
    return float(np.maximum(1 - math.exp(epsilon) / ratio, 0).mean())


@pytest.mark.parametrize(("bands", "blocks", "is_sound"), [
    (banded.best_bands(3, 9, 0.0), 3, True),
    (banded.best_bands(2, 6, 0.9), 2, True),
    (banded.best_bands(3, 9, 0.0), 1, False),  # drawn in every step, as if bands did not matter
    (banded.best_bands(3, 9, 0.0), 2, False),  # blocks come back before the bands end
    ((1.0, 0.5, 0.375), 3, False),  # columns of norm 1.18
])  # fmt: skip
def test_an_adversary_learns_what_was_certified_and_more_from_wrong_draws_or_bands(bands, blocks, is_sound):
    delta, noise, rate = 0.02, 1.0, 0.3
    parts = len(range(0, PARTS * len(bands), blocks))
    certified = pld.epsilon([SampledGaussian(rate, noise, parts)], delta)
    found = delta_seen(bands, certified, noise, rate, blocks)
    assert (found == pytest.approx(delta, rel=0.04)) if is_sound else (found > 1.2 * delta)


@pytest.mark.parametrize(("data", "batch", "count"), [("mnist", 512, 1), ("mnist", 512, 16), ("imdb", 2048, 4)])
def test_each_group_spends_its_budget_by_dp_accounting(data, batch, count):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    how = banded.mechanism(data, "1 / 2 / 3", batch, 0.9, count)
    assert how.sample_rate == pytest.approx(batch * count / banded.RECORDS[data])
    assert how.steps == round(4 * banded.RECORDS[data] / batch)
    for epsilon, clip_norm in zip((1, 2, 3), how.clip_norm, strict=True):
        one = PoissonSampledDpEvent(how.sample_rate, GaussianDpEvent(how.noise_std / clip_norm))
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        accountant.compose(SelfComposedDpEvent(one, math.ceil(how.steps / count)))
        assert 0.99 * epsilon < accountant.get_epsilon(banded.DELTA) < 1.005 * epsilon


def test_a_block_smaller_than_a_batch_or_bands_longer_than_the_run_are_no_choice():
    assert banded.mechanism("imdb", "8", 8192, 0.0, 4) is None
    chosen = banded.methods("imdb", "8", 8192, 0.0)
    assert (len(chosen["independent"].bands), len(chosen["banded"].bands)) == (1, 2)
    every = [banded.mechanism("mnist", "8", 512, 0.0, count) for count in banded.BANDS]
    assert banded.methods("mnist", "8", 512, 0.0)["banded"].error == min(one.error for one in every)


# -- training --------------------------------------------------------------------------------------------------------


def small(records: int = 40) -> banded.Data:
    coins = torch.Generator().manual_seed(2)
    return banded.Data(torch.randn(records, 6, generator=coins), torch.randint(3, (records,), generator=coins))


def test_clipped_sums_are_those_of_a_loop_over_records():
    data, coins = small(), torch.Generator().manual_seed(4)
    weights, clip_norm = torch.randn(2, 3, 6, generator=coins), 0.2 + torch.rand(40, generator=coins)
    slow = torch.zeros_like(weights)
    clipped = 0
    for model, (x, y, bound) in itertools.product(range(2), zip(*data, clip_norm, strict=True)):
        own = weights[model].clone().requires_grad_()
        torch.nn.functional.cross_entropy(own @ x, y).backward()
        clipped += bool(own.grad.norm() > bound)
        slow[model] += own.grad * min(1.0, float(bound / own.grad.norm()))
    assert 10 < clipped < 80
    torch.testing.assert_close(banded.clipped_sums(weights, data, clip_norm), slow, rtol=1e-4, atol=1e-5)


def test_training_is_momentum_sgd_on_the_noisy_sums_of_each_block():
    """At rate 1 nothing is random but the blocks and Z, which are drawn again here."""
    data, groups = small(), torch.arange(40) % 2
    how = banded.Mechanism(7, banded.best_bands(2, 7, 0.5), 1.0, 0.3, (0.1, 0.4), 0.0)
    rates = torch.tensor([0.5, 2.0])
    found = banded.train(data, groups, how, rates, 0.5, seed=9, classes=3)
    coins = torch.Generator().manual_seed(9)
    draws, normals = [], []
    members = torch.randperm(40, generator=coins).tensor_split(2)
    for step in range(7):
        draws.append(members[step % 2])
        torch.rand(20, generator=coins)
        normals.append(0.3 * torch.randn(3, 6, generator=coins))
    noise = np.linalg.solve(dense(how.bands, 7), torch.stack(normals).double().reshape(7, -1).numpy())
    for model, lr in enumerate(rates):
        weights = torch.zeros(3, 6, requires_grad=True)
        optimizer = torch.optim.SGD([weights], lr=float(lr), momentum=0.5)
        for rows, extra in zip(draws, noise, strict=True):
            bounds = torch.tensor(how.clip_norm)[groups[rows]]
            total = banded.clipped_sums(weights.detach()[None], data.at(rows), bounds)[0]
            weights.grad = (total + torch.from_numpy(extra).float().reshape(3, 6)) / 20
            optimizer.step()
        torch.testing.assert_close(found[model], weights.detach(), rtol=1e-4, atol=1e-5)


def test_trials_never_read_the_test_data_and_methods_have_equal_trials(monkeypatch):
    """The fake accuracy prefers the largest travel; more seeds prefer the second largest."""
    known, test, read = small(50), small(30), []
    largest, second = banded.TRAVELS["imdb"][:-3:-1]

    def run(train_on, test_on, tiers, how, momentum, travels, seed):
        read.append((len(train_on.targets), test_on is test, len(how.bands) > 1, len(travels), seed))
        assert test_on is test or not set(train_on.inputs[:, 0].tolist()) & set(test_on.inputs[:, 0].tolist())
        preferred = second if seed in banded.FINAL_SEEDS else largest
        return [50.0 + travel / 1e6 + (travel == preferred) for travel in travels]

    monkeypatch.setattr(banded, "run", run)
    monkeypatch.setattr(banded, "FINALISTS", 10)
    found = banded.compared("imdb", "8", known, test)
    assert {count for count, is_test, *_ in read if not is_test} == {40}
    for is_banded in (False, True):
        own = [row for row in read if row[2] == is_banded]
        trials = [row for row in own if row[4] in banded.TRIAL_SEEDS]
        assert len(trials) == len(banded.BATCHES) * len(banded.MOMENTA) * len(banded.TRIAL_SEEDS)
        assert len([row for row in own if row[4] in banded.FINAL_SEEDS]) == 10 * len(banded.FINAL_SEEDS)
        assert [row for row in own if row[1]] == [(50, True, is_banded, 1, seed) for seed in banded.SEEDS]
    assert {len(points) for points in found["trials"].values()} == {72}
    assert {one["travel"] for one in found["chosen"].values()} == {second}
    assert len({*banded.TRIAL_SEEDS, *banded.FINAL_SEEDS, *banded.SEEDS}) == 12


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_the_errors_in_the_file_are_those_of_dense_matrices_at_equal_budgets(epsilon):
    """The noise multipliers behind a ratio, from the ratio, spend the same ε."""
    rows = json.loads(banded.FILE.read_text(encoding="utf-8"))["errors"]
    wanted = {"data": "imdb", "batch": 512, "epochs": 4, "epsilon": epsilon}
    (ratios,) = (row["ratios"] for row in rows if wanted.items() <= row.items())
    assert list(ratios) == ["1", "2", "4", "8", "16", "32"]
    steps, running = 195, np.tril(np.ones((195, 195)))
    plain = banded.noise_for(epsilon, 512 / 25_000, steps, banded.DELTA, pld.epsilon)
    for count, ratio in ((int(count), ratio) for count, ratio in ratios.items()):
        matrix = dense(banded.best_bands(count, steps, 0.0), steps)
        own = ratio * plain * np.linalg.norm(running) / np.linalg.norm(running @ np.linalg.inv(matrix))
        spent = pld.epsilon([SampledGaussian(512 * count / 25_000, own, math.ceil(steps / count))], banded.DELTA)
        assert spent == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize(("gains", "error", "said"), [
    ((0.4, 0.3, -1.0), 0.8, "the library keeps banded noise"),
    ((0.4, 0.29, 0.29), 0.8, "the library does not get banded noise"),
    ((0.4, 0.4, 0.4), 0.81, "the library does not get banded noise"),
])  # fmt: skip
def test_the_verdict_is_that_of_the_rule(gains, error, said):
    """Gains with budgets of 8 do not count."""
    runs, errors = [], []
    for data, gain in zip(banded.RECORDS, gains, strict=True):
        chosen = {"banded": {"batch": 512, "test": [50.0 + gain + 1e-9] * 3}, "independent": {"test": [50.0] * 3}}
        trials = {noise: [{"error": 1.0, "momentum": 0.0}] for noise in chosen}
        runs += [{"data": data, "tiers": tiers, "chosen": chosen, "trials": trials} for tiers in banded.TIERS]
        errors.append({"data": data, "batch": 512, "epochs": 4, "epsilon": 3.0, "ratios": {"1": 1.0, "8": error}})
    assert said in banded_page.verdict({"errors": errors, "runs": runs})
    for run in runs:
        if run["tiers"] == "8":
            run["chosen"] = {"banded": {"batch": 512, "test": [99.0] * 3}, "independent": {"test": [50.0] * 3}}
    assert said in banded_page.verdict({"errors": errors, "runs": runs})
