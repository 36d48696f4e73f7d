"""Bounds for many histories are never below what each loses, and close to those of `pld.epsilon`, the slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import fft
from scipy.special import ndtr

import epsilons
from epsilons.accounting import calibration, chords, pld
from epsilons.core.mechanism import SampledGaussian
from epsilons.planning.plan_numbers import unweighted
from shares import share


def removing(rate, noise, at):
    """δ of (1−q)·N(0,σ²) + q·N(1,σ²) against N(0,σ²) at these epsilons, from the two normal distributions."""
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.log((np.expm1(at) + rate) / rate)  # of the Gaussian alone
        x = noise * loss + 0.5 / noise
        value = rate * ndtr(1 / noise - x) - (np.expm1(at) + rate) * ndtr(-x)
    return np.where(np.expm1(at) + rate > 0, value, -np.expm1(at))


def adding(rate, noise, at):
    return 1 - np.exp(at) + np.exp(at) * removing(rate, noise, -at)  # Q against P, by symmetry


def mixture(common, value):
    """The two nodes of the lattice around this noise or rate, and the chance of the one that loses more."""
    nodes = common.nodes(int(common.blocks(np.array([value]))[0]))
    safe, unsafe, chance = chords._places(common.loss(nodes), common.loss(np.array([value])))
    return nodes[safe[0]], nodes[unsafe[0]], float(chance[0])


@pytest.mark.parametrize("case", range(60))
def test_a_step_is_dominated_by_the_choice_between_its_neighbours(case, monkeypatch):
    monkeypatch.setattr(chords, "NOISE_STEP", 0.1)  # far apart, so that another chance than ours shows
    monkeypatch.setattr(chords, "RATE_STEP", 0.3)
    random = np.random.default_rng(case)
    of_noise = bool(case % 2)
    rate, noise = 1.0 if case % 4 == 1 else random.uniform(0.01, 1), np.exp(random.uniform(-0.7, 2.5))
    common = chords.Line(rate if of_noise else noise, 100, of_noise)
    value = noise if of_noise else rate
    safe, unsafe, chance = mixture(common, value)
    at = np.concatenate([np.linspace(-3, 3, 2001), [np.log1p(-rate) if rate < 1 else 0.0, 0.0]])
    pairs = [(common.fixed, one) if of_noise else (one, common.fixed) for one in (safe, value, unsafe)]
    for way in (removing, adding):
        less, own, more = (way(*pair, at) for pair in pairs)
        assert (own <= chance * more + (1 - chance) * less + 1e-13).all()
        assert (less <= own + 1e-13).all()
        assert (own <= more + 1e-13).all()
    if of_noise and 0.05 < chance < 0.95:  # and no smaller chance is enough
        less, own, more = (removing(*pair, at) for pair in pairs)
        assert (own > (chance - 1e-4) * more + (1 - chance + 1e-4) * less).any()


def test_the_directions_of_the_twin_are_those_of_the_library():
    at, one = np.linspace(-0.2, 0.4, 25), SampledGaussian(0.1, 1.3, 1)
    expected = pld.divergences([one], at)
    assert np.stack([removing(0.1, 1.3, at), adding(0.1, 1.3, at)]) == pytest.approx(expected, abs=2e-5)


def mechanisms(random, rate, noise, steps, count):
    """On a line of one rate (0) or of one noise (1), or in a rectangle (2): and how to compute them."""
    kind = int(random.integers(3))
    near = np.exp(random.uniform(-0.05, 0.05, (2, count)))
    rates = np.minimum(rate * (near[0] if kind > 0 else np.ones(count)), 1.0)
    noises = noise * (near[1] if kind != 1 else np.ones(count))
    common = chords.Line(rate if kind == 0 else noise, steps, kind == 0) if kind < 2 else None
    return [SampledGaussian(q, s, steps) for q, s in zip(rates.tolist(), noises.tolist(), strict=True)], common


@pytest.mark.parametrize("case", range(18))
def test_bounds_are_a_little_above_those_of_a_finer_grid(case):
    random = np.random.default_rng(case)
    steps, rate, noise = int(10 ** random.uniform(2, 4)), 10 ** random.uniform(-2.5, -0.3), random.uniform(0.7, 6)
    delta = 10 ** random.uniform(-7, -4)
    ones, common = mechanisms(random, rate, noise, steps, 5)
    bounds = chords.epsilons(ones, np.arange(5), np.full(5, delta), common)
    computed = np.flatnonzero(~np.isnan(bounds))
    for i in computed:
        own = pld.epsilon([ones[i]], delta)
        assert pld.epsilon([ones[i]], delta, grid=pld.fitted_grid(ones[i]) / 4) <= bounds[i]
        assert bounds[i] <= (1.0002 if common is None else 1.002) * own
    assert computed.any()


@pytest.mark.slow
@pytest.mark.parametrize("case", range(300))
def test_bounds_hold_on_random_lines_and_rectangles(case):
    random = np.random.default_rng([1, case])
    steps, rate, noise = (
        int(10 ** random.uniform(1.7, 4.5)),
        10 ** random.uniform(-4, 0),
        np.exp(random.uniform(-0.8, 3)),
    )
    delta = 10 ** random.uniform(-9, -2)
    ones, common = mechanisms(random, rate, noise, steps, 3)
    for one, bound in zip(ones, chords.epsilons(ones, np.arange(3), np.full(3, delta), common), strict=True):
        finest = max(pld.fitted_grid(one) / 4, pld.reach(one) / 1e6)
        alike = delta + pld.slack([one])  # what rounding may take off the twin is not counted twice
        assert np.isnan(bound) or pld.epsilon([one], alike, grid=finest) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("case", range(20))
def test_a_step_on_a_sparse_grid_has_the_chords_of_its_curve(case, monkeypatch):
    monkeypatch.setattr(chords, "SPARSENESS", 0.05)
    random = np.random.default_rng(case)
    rates = np.minimum(10 ** random.uniform(-3, 0.2) * np.array([1.0, 0.98]), 1.0)
    noise = np.exp(random.uniform(-0.7, 2))
    ones = [SampledGaussian(float(q), noise, 1) for q in rates]
    spacing = chords._spacing(ones, pld.MOST_STEP_POINTS)
    for exact, (index, probability, infinite) in zip((removing, adding), chords._steps(ones, spacing), strict=True):
        loss = spacing * index
        assert (np.diff(index) > 1).any() or rates[0] > 0.02
        for q, mass, rest in zip(rates, probability, infinite, strict=True):
            assert mass.sum() + rest == pytest.approx(1, abs=1e-12)
            low, high = loss[:-1], loss[1:]
            at = low + random.uniform(0, 1, len(low)) * (high - low)
            part = np.expm1(at - low) / np.expm1(high - low)
            chord = (1 - part) * exact(q, noise, low) + part * exact(q, noise, high)
            some = np.flatnonzero(np.abs(at) < 4)[::3]  # beyond, the twin rounds
            bound = (mass * np.maximum(0, -np.expm1(at[some, None] - loss))).sum(axis=1) + rest
            assert bound == pytest.approx(chord[some], abs=1e-12)
            assert (exact(q, noise, at)[some] <= bound + 1e-13).all()


def test_the_phase_of_a_loss_is_exact_after_very_many_steps():
    sums = chords.Sums(1.0, 1, 0, 0, 2**22, np.array([2**21 - 1]), np.ones((1, 1), complex), np.zeros(1))
    index = 10**14 + 7  # its product with the frequency is above 2⁶³
    exact = (index * (2**21 - 1)) % 2**22  # of Python's integers
    assert sums.turned(np.array([[index]]))[0, 0] == pytest.approx(np.exp(2j * np.pi * exact / 2**22), abs=1e-9)


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [(1e-3, 0.6, 1000), (6e-4, 0.66, 14_191), (512 / 60_000, 3.4, 9375), (0.01, 4.0, 100_000), (1.0, 40.0, 500)],
)
def test_what_rounding_takes_off_a_divergence_stays_within_the_slack(rate, noise, steps):
    """Against the same sums in 80-bit arithmetic, with all coefficients and in a window four times as wide."""
    one = SampledGaussian(rate, noise, steps)
    spacing = chords._spacing([one], pld.MOST_STEP_POINTS)
    both = zip(chords._steps([one], spacing), chords._directions([one], spacing), strict=True)
    for (index, probability, _), sums in both:
        wide = 4 * sums.length
        step = np.zeros(wide, dtype=np.longdouble)
        np.add.at(step, (index - index[0]) % wide, probability[0].astype(np.longdouble))
        total = np.roll(fft.irfft(pld.raised(fft.rfft(step), steps), wide), sums.length - sums.first)
        loss = sums.spacing * (sums.lowest - sums.length + np.arange(wide))
        at = np.linspace(0, sums.spacing * (sums.lowest + sums.length), 60)
        exact = np.array([total @ np.maximum(0, -np.expm1(epsilon - loss)) for epsilon in at], dtype=np.longdouble)
        own = sums.of(*np.zeros((2, 60), np.int64), np.zeros(60))
        found = own.divergences(at)[0]
        assert float((exact - (found - own.infinite))[exact < 0.1].max()) < 0.5 * pld.slack([one])
        assert found - own.infinite == pytest.approx(exact.astype(float), rel=1e-6, abs=1e-11)


def many_budgets(count=200, records=100_000):
    return epsilons.Budgets(np.linspace(1.0, 2.0, count)[np.arange(records) % count], delta=1e-6)


@pytest.mark.parametrize("strategy", ["scale", "sample", "mix"])
def test_plans_for_many_budgets_keep_each_by_the_slow_twin(strategy):
    recipe = epsilons.Recipe(steps=500, batch_size=500, clip_norm=1.0)
    plan = epsilons.plan(many_budgets(), recipe, strategy)
    assert chords.way(plan.sample_rate, plan.noise_multiplier) == ("each" if strategy == "mix" else "chords")
    for group in range(0, 200, 17):
        part = pld.epsilon(plan.history(group), 1e-6) / plan.epsilons[group]
        assert 1 - 1e-3 < part <= 1
    chords._block.cache_clear()
    assert epsilons.plan(many_budgets(), recipe, strategy) == plan  # whatever was computed before


def keeps_each_budget_by_the_slow_twin(seed, groups):
    """A mix of a random roster; of so many of its groups."""
    random = np.random.default_rng(seed)
    levels, records = int(random.integers(100, 301)), int(10 ** random.uniform(4, 6))
    offered = np.exp(random.uniform(np.log(0.3), np.log(8), levels))
    deltas = random.choice(10 ** random.uniform(-8, -6.01, random.integers(1, 4)), levels)
    level = np.concatenate([np.arange(levels), random.integers(levels, size=records - levels)])
    budgets = epsilons.Budgets(offered[level], deltas[level])
    steps, rate = int(10 ** random.uniform(2, 3.5)), 10 ** random.uniform(-3, -1)
    recipe = epsilons.Recipe(steps=steps, batch_size=max(1, round(rate * records)), clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, "mix", weight=random.uniform(0.1, 0.9))
    for group in np.linspace(0, levels - 1, groups).astype(int):
        one = plan.history(group)
        grid = pld.fitted_grid(one[0]) / 2
        assert 0.99 < pld.epsilon(one, plan.delta[group], grid=grid) / plan.epsilons[group] <= 1


@pytest.mark.parametrize("seed", share(range(2), 1))
def test_mixes_of_random_rosters_keep_each_budget_by_the_slow_twin(seed):
    keeps_each_budget_by_the_slow_twin(seed, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_mixes_of_many_random_rosters_keep_each_budget_by_the_slow_twin(seed):
    keeps_each_budget_by_the_slow_twin(seed, 100)


def test_a_plan_that_the_slow_twin_certifies_is_certified():
    """A strategy of one's own calls `noise_for` group by group, and uses up what chords leave."""

    def each(budgets, recipe, accountant):
        rate = recipe.batch_size / budgets.records
        noises = [calibration.noise_for(e, rate, recipe.steps, 1e-6, accountant) for e in budgets.epsilons]
        phase = unweighted(recipe.steps, np.full(len(noises), rate), 1 / np.array(noises), 1.0, recipe.batch_size)
        return epsilons.Plan.of(budgets, recipe, accountant, phase, strategy="each")

    budgets, recipe = many_budgets(130, 50_000), epsilons.Recipe(steps=200, batch_size=500, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, each)
    common = chords.line(plan.sample_rate, plan.noise_multiplier, 200)
    ones = [common.mechanism(float(noise)) for noise in plan.noise_multiplier]
    assert (chords.epsilons(ones, np.arange(len(ones)), budgets.delta, common) > plan.epsilons).any()
    assert (plan.epsilon_spent() <= plan.epsilons).all()
