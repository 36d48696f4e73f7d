"""PLD: held to other programs' values, to Opacus' PRV, and to closed forms; more in contracts/."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import fft, special

import oracles
from epsilons import SampledGaussian
from epsilons.accounting import noise_for, pld, rate_for, rdp
from epsilons.accounting.pld import Losses, Recent, coarsened
from epsilons.accounting.profile import Profile
from epsilons.core.mechanism import SMALLEST_DELTA
from epsilons.errors import BudgetError
from shares import examples, share

#: Where calibration grids differ, epsilon jitters by this much.
JITTER = 5e-4


def mechanism(row: dict) -> list[SampledGaussian]:
    return [SampledGaussian(row["q"], row["sigma"], row["steps"])]


def too_high(row: dict) -> float:
    """How much too high a recorded value may be: at one row it is by 7.84e-6, as fifty digits show below."""
    return 7.9e-6 if (row["q"], row["sigma"], row["steps"]) == (1e-4, 5.0, 100_000) else 1e-9


def test_at_the_recorded_grid_the_golden_values_come_out(golden):
    for row in golden["accountant"]:
        ours = pld.epsilon(mechanism(row), row["delta"], grid=row["value_discretization_interval"])
        recorded = row["eps_pld_dp_accounting_upper"]
        # The recorded values were read at delta itself, ours at delta − slack (what the FFT's rounding may hide):
        # above by (slack / delta) / (d ln 1/delta / d ln epsilon), which stays under 10 · slack / delta here.
        above = 1e-6 + 40 * pld.slack(mechanism(row)) / row["delta"] * (row["delta"] < 1e-6)
        above = max(above, 2 * pld.slack(mechanism(row)) / row["delta"])
        assert recorded * (1 - too_high(row)) <= ours <= recorded * (1 + above), row
        assert ours >= max(row["eps_pld_remove"], row["eps_pld_add"]) * (1 - too_high(row)), row


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "grid"),
    [(1e-4, 5.0, 100_000, 1.01e-6), (512 / 60_000, 6.3943, 9375, 6.71e-5), (0.3, 2.0, 1000, 0.02)],
)
def test_one_step_s_probabilities_are_those_of_fifty_digits(q, sigma, steps, grid):
    # dp-accounting loses up to 5e-10 of each here, which adds 7.8e-6 to epsilon after 100,000 steps.
    one = pld.removing(SampledGaussian(q, sigma, steps), grid)
    exact, infinite = oracles.connected_dots(q, sigma, grid, one.lowest, len(one.probability))
    np.testing.assert_allclose(one.probability, exact, rtol=0, atol=1e-13)
    assert infinite <= one.infinite * (1 + 1e-9) + 1e-30
    composed = pld.self_composed(Losses(grid, one.lowest, exact, infinite), steps).epsilons(
        np.array([1e-5 - pld.slack([SampledGaussian(q, sigma, steps)])])
    )
    assert pld.epsilon([SampledGaussian(q, sigma, steps)], 1e-5, grid) == pytest.approx(composed[0], rel=1e-8)


@examples(12, 40)
@given(
    st.floats(math.log(1e-3), 0.0).map(math.exp),
    st.floats(math.log(0.4), math.log(20)).map(math.exp),
    st.floats(0.0, math.log(3000)).map(lambda x: round(math.exp(x))),
)
def test_epsilon_and_delta_are_those_of_dp_accounting_on_the_same_grid(q, sigma, steps):
    one = SampledGaussian(q, sigma, steps)
    grid = 4 * pld.fitted_grid(one)
    twin = oracles.dp_accounting_pld(q, sigma, steps, grid)
    deltas = np.array([1e-8, 1e-5, 1e-2])
    theirs = [twin.get_epsilon_for_delta(delta - pld.slack([one])) for delta in deltas]
    # At 1e-8 both carry the FFT's rounding, near 1e-13.
    np.testing.assert_allclose(pld.epsilon_at([one], deltas, grid), theirs, rtol=1e-5, atol=1e-9)
    epsilons = np.array([-0.3, 0.0, 0.5, 2.0])
    directions = pld.both_directions([one], grid)
    ours = np.maximum.reduce([losses.deltas(epsilons) for losses in directions])
    np.testing.assert_allclose(ours, [twin.get_delta_for_epsilon(float(e)) for e in epsilons], rtol=1e-5, atol=1e-9)


def test_several_deltas_at_once_are_the_same_one_by_one():
    history = [SampledGaussian(0.02, 1.5, 200), SampledGaussian(0.3, 9.0, 100)]
    deltas = np.geomspace(1e-9, 0.5, 30)
    together = pld.epsilon_at(history, deltas)
    np.testing.assert_array_equal(together, [pld.epsilon(history, delta) for delta in deltas])
    assert (np.diff(together) <= 0).all()


def slowly_composed(one: Losses, steps: int, first: int, length: int) -> np.ndarray:
    """Probabilities of the sum of so many steps from index `first` on, by the same transform in 80-bit arithmetic."""
    power = fft.irfft(pld.raised(fft.rfft(one.probability.astype(np.longdouble), length), steps), length)
    return np.roll(power, -(first % length))


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "grid", "wide_search"),
    [
        *((0.01, 0.8, steps, 0.01, False) for steps in (7, 1000, 30_000)),
        *((*row, None, True) for row in ((1 / 60_000, 0.6914, 4_800_000), (1e-3, 30.0, 10**6), (0.01, 0.8, 30_000))),
    ],
)
def test_losses_outside_a_window_are_less_likely_than_what_counts_as_infinite(q, sigma, steps, grid, wide_search):
    mechanism = SampledGaussian(q, sigma, steps)
    for one in pld.losses_of_step(mechanism, grid or 16 * pld.fitted_grid(mechanism)):
        first, last = pld.window(one.probability, steps, wide_search)
        near = pld.window(one.probability, steps)
        assert last - first <= (near[1] - near[0]) * 1.2
        width = last - first
        # Slow twin: no window at all, or, where that is too long, one four times as wide.
        shortest = min((len(one.probability) - 1) * steps + 1, 4 * width + len(one.probability))
        length, start = fft.next_fast_len(shortest, real=True), max(0, first - width)
        wide = slowly_composed(one, steps, start, length)
        outside = wide[: first - start].sum() + wide[last + 1 - start :].sum()
        assert outside <= 1e-15 + max(steps * 1e-18, 1e-16)  # the second is the rounding of 80 bits


def test_on_its_own_grid_the_golden_values_are_reached_and_hardly_exceeded(golden):
    for row in golden["accountant"]:
        ratio = pld.epsilon(mechanism(row), row["delta"]) / row["eps_pld_dp_accounting_upper"]
        assert 0.998 <= ratio <= 1.0005, (ratio, row)


def check_against_prv(rows: tuple[tuple[float, float, int], ...], delta: float) -> None:
    lower, estimate, upper = oracles.prv(rows, delta)
    ours = pld.epsilon([SampledGaussian(*row) for row in rows], delta)
    assert lower <= ours <= upper
    # Its estimate is far better than its bounds: ours is above by no more than the cost of the grid.
    assert estimate * (1 - 5e-5) <= ours <= estimate * (1 + JITTER)


# Sizes of people, rates and noise that training meets; the first three are the paper's.
SETTINGS = [
    (512 / 60_000, 3.1789, 9375, 1e-5),
    (1024 / 73_257, 1.5, 2146, 1e-5),
    (1024 / 50_000, 1.1, 1465, 1e-5),
    (0.001, 0.8, 5000, 1e-6),
    (0.1, 9.15, 500, 1e-5),
    (0.28, 7.6, 50, 1e-5),
    (0.77, 7.6, 50, 1e-5),
    (0.5, 20.0, 1000, 1e-6),
    (1.0, 26.4, 50, 1e-5),
    (0.05, 4.0, 4000, 1e-6),
    (0.02, 1.0, 1, 1e-5),
    (0.3, 72.0, 1000, 1e-4),
]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), share(SETTINGS, 5))
def test_epsilon_lies_within_the_bounds_of_opacus_prv(q, sigma, steps, delta):
    check_against_prv(((q, sigma, steps),), delta)


def test_a_history_of_different_mechanisms_lies_within_the_bounds_of_opacus_prv():
    check_against_prv(((0.02, 1.5, 200), (0.05, 3.0, 100), (0.01, 1.1, 400)), 1e-5)


@pytest.mark.slow
def test_epsilon_lies_within_the_bounds_of_opacus_prv_at_a_hundred_random_settings():
    random = np.random.default_rng(0)
    for _ in range(100):
        q = float(10 ** random.uniform(-3, 0))
        steps = int(10 ** random.uniform(0, 4))
        sigma = float(max(0.6, q * math.sqrt(steps) * 10 ** random.uniform(0, 1)))
        lower, _, upper = oracles.prv(((q, sigma, steps),), 1e-5)
        ours = pld.epsilon([SampledGaussian(q, sigma, steps)], 1e-5)
        assert lower <= ours <= upper, (q, sigma, steps)


@pytest.mark.parametrize("delta", [1e-9, 1e-8, 1e-7, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (5.0, 10), (28.6, 50), (14.9321, 100)])
def test_without_sampling_it_is_at_or_just_above_the_exact_gaussian(sigma, steps, delta):
    exact = oracles.gaussian(sigma, steps, delta)
    ours = pld.epsilon([SampledGaussian(1.0, sigma, steps)], delta)
    assert exact <= ours <= exact * 1.002 + 1e-6


@examples(12, 40)
@given(
    st.floats(math.log(1e-3), 0.0).map(math.exp),
    st.floats(math.log(0.5), math.log(20)).map(math.exp),
    st.floats(math.log(1e-8), math.log(1e-3)).map(math.exp),
)
def test_one_step_is_never_below_its_closed_form_and_close_to_it(q, sigma, delta):
    exact = max(oracles.one_step(q, sigma, delta, direction) for direction in oracles.DIRECTIONS)
    ours = pld.epsilon([SampledGaussian(q, sigma, 1)], delta)
    # Read at delta − 1e-12, and on a grid of 1/20 of the loss' deviation: both only ever above.
    nearly = max(oracles.one_step(q, sigma, delta - 1e-10, direction) for direction in oracles.DIRECTIONS)
    assert exact <= ours <= nearly * 1.02 + 1e-4


def test_a_coarser_grid_only_ever_raises_the_bound():
    # The doubled grids share their points with the finest, so each is a coarsening of the one before.
    history = [SampledGaussian(0.02048, 1.4006, 1465)]
    bounds = [pld.epsilon(history, 1e-5, grid=1e-4 * 2**k) for k in range(7)]
    assert bounds == sorted(bounds)


def test_the_order_of_the_history_is_irrelevant_to_the_last_bit():
    parts = [SampledGaussian(0.02, 1.5, 200), SampledGaussian(0.05, 3.0, 100), SampledGaussian(1.0, 40.0, 7)]
    assert len({pld.epsilon(order, 1e-5) for order in (parts, parts[::-1], [parts[1], parts[2], parts[0]])}) == 1


@pytest.mark.parametrize("delta", [SMALLEST_DELTA / 1.01, 0.0, -1e-5, 1.0, 2.0, math.nan])
def test_a_delta_beyond_double_precision_is_refused(delta):
    with pytest.raises(BudgetError, match="delta"):
        pld.epsilon([SampledGaussian(0.1, 1.0, 1)], delta)


@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [
        pytest.param(1e-6, 0.5, 10, marks=pytest.mark.slow),  # the widest loss there is on the finest grid
        (1e-5, 0.3, 100),
        (1e-4, 0.4, 1000),
        (1e-9, 1.0, 1),
        (1.0, 0.05, 1),
        (0.5, 1e4, 10),
    ],
)
def test_at_the_edges_it_stays_an_upper_bound_on_one_step_and_finite_or_inf(q, sigma, steps):
    ours = pld.epsilon([SampledGaussian(q, sigma, steps)], 1e-5)
    exact = max(oracles.one_step(q, sigma, 1e-5, direction) for direction in oracles.DIRECTIONS)
    assert ours >= exact  # more steps never cost less than the first
    assert not math.isnan(ours)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "part"),
    [
        *((*row, 0.5) for row in ((1e-4, 5.0, 100_000), (0.01, 4.0, 100_000), (512 / 60_000, 3.4, 9375))),
        *((*row, 1.0) for row in ((1e-3, 100.0, 10**6), (1e-6, 2.3, 10**8), (1e-3, 0.6, 10**5))),
    ],
)
def test_what_rounding_takes_off_a_tail_stays_within_the_slack(q, sigma, steps, part):
    """Against the same transforms in 80-bit arithmetic. part: of the slack; long histories need all of it"""
    one = SampledGaussian(q, sigma, steps)
    for losses in pld.losses_of_step(one, pld.fitted_grid(one)):
        start, end = pld.window(losses.probability, steps, wide_search=part == 1)
        composed = pld.self_composed(losses, steps, (start, end))
        length = fft.next_fast_len(max(end - start + 1, len(losses.probability)), real=True)
        exact = slowly_composed(losses, steps, start, length)[: end - start + 1]
        tails = [np.cumsum(p[::-1])[::-1] for p in (exact, composed.probability)]
        assert float((tails[0] - tails[1])[tails[0] < 0.1].max()) < part * pld.slack([one])


# -- The PLD accountant on long histories: bounded memory and time, never above RDP, never below a finer grid --------


#: Asked for 42 GiB before memory was bounded.
HUGE = (1 / 60_000, 0.6914, 4_800_000)
GIB, SECONDS = 2.0, 60.0

Case = tuple[float, float, int, float]  # rate, noise multiplier, steps, delta


def random_cases(seed: int, many: int) -> list[Case]:
    random = np.random.default_rng(seed)
    exponents = random.uniform([-8, math.log10(0.3), 0, -9], [0, 2, 8, -1], (many, 4))
    return [(q, sigma, int(steps), delta) for q, sigma, steps, delta in (10**exponents).tolist()]


CASES = random_cases(1, 200)
FEW = [*CASES[:200:36], (*HUGE, 1e-5)]


def measured(cases: list[Case]) -> list[dict[str, float]]:
    """Epsilon, seconds, and the largest memory so far in GiB, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(cases)], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


MEASURE = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from epsilons import SampledGaussian
from epsilons.accounting import pld
unit = 2**30 if sys.platform == "darwin" else 2**20
out = []
for *mechanism, delta in json.loads(sys.argv[1]):
    start = time.process_time()
    epsilon = pld.epsilon([SampledGaussian(*mechanism)], delta)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    out.append({"epsilon": epsilon, "seconds": seconds, "peak": peak})
print(json.dumps(out))
"""


def finer_grid(mechanism: SampledGaussian, delta: float, grid: float) -> float:
    """Epsilon at `delta` on this grid, in 80-bit arithmetic, and without an allowance for rounding.

    It shares one step's probabilities with the library, which a test below holds to fifty digits. The window is twice
    as wide as it must be, and epsilon is found by bisection of the divergence's definition.
    """
    return max(_read_slowly(one, mechanism.steps, delta) for one in pld.losses_of_step(mechanism, grid))


def _read_slowly(one: Losses, steps: int, delta: float) -> float:
    first, last = pld.window(one.probability, steps, wide_search=True)
    width = last - first + 1
    first = max(0, first - width // 2)
    length = fft.next_fast_len(max(2 * width, len(one.probability)), real=True)
    loss = one.spacing * (one.lowest * steps + first + np.arange(length, dtype=np.longdouble))
    probability, loss = slowly_composed(one, steps, first, length)[loss > 0], loss[loss > 0]

    def divergence(epsilon: float) -> float:
        return float((probability * np.maximum(-np.expm1(epsilon - loss), 0.0)).sum()) + steps * one.infinite

    return oracles.smallest_epsilon(divergence, delta) if len(loss) else 0.0


def is_affordable(case: Case, points: float) -> bool:
    directions = pld.both_directions([SampledGaussian(*case[:3])])
    return max(len(losses.probability) for losses in directions or ()) < points


def check_case(case: Case, measure: dict[str, float], points: float) -> None:
    mechanism, delta = SampledGaussian(*case[:3]), case[3]
    ours, by_rdp = measure["epsilon"], rdp.epsilon([mechanism], delta)
    assert measure["peak"] <= GIB, case
    assert measure["seconds"] <= SECONDS, case
    assert ours <= by_rdp, case
    assert math.isfinite(ours), case
    assert ours <= pld.epsilon([SampledGaussian(*case[:2], math.ceil(1.1 * case[2]))], delta) * (1 + 1e-6), case
    if is_affordable(case, points):
        finer = finer_grid(mechanism, delta, pld.fitted_grid(mechanism) / 2)
        assert ours >= min(finer, by_rdp) * (1 - 1e-9), case


def test_epsilon_fits_into_two_gib_and_lies_between_a_finer_grid_and_rdp():
    for case, measure in zip(FEW, measured(FEW), strict=True):
        check_case(case, measure, points=2**15)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "{:.1e} {:.2f} {} {:.0e}".format(*case))
def test_200_settings_fit_into_two_gib_between_a_finer_grid_and_rdp(case):
    check_case(case, measured([case])[0], points=2**17)


@pytest.mark.slow
def test_noise_is_calibrated_within_two_gib_where_it_was_killed_at_19():
    code = MEASURE.split("out = []")[0] + (
        "from epsilons.accounting import noise_for\n"
        "noise = noise_for(1.0, 1 / 60_000, 4_800_000, 1e-5, pld.epsilon)\n"
        "print(json.dumps([noise, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    noise, peak = json.loads(done.stdout)
    assert peak <= GIB
    assert 0.999 <= pld.epsilon([SampledGaussian(HUGE[0], noise, HUGE[2])], 1e-5) <= 1.0


@pytest.fixture(params=[2**12, 2**15])
def few_points(monkeypatch, request):
    """Grids of at most this many points, so that ordinary histories meet the bound."""
    monkeypatch.setattr(pld, "MOST_POINTS", request.param)
    pld._composed.cache_clear()
    pld._one.cache_clear()
    yield request.param
    pld._composed.cache_clear()
    pld._one.cache_clear()


def test_calibration_at_the_bound_keeps_the_budget_and_uses_it_up(few_points):
    for epsilon, q, steps, delta in ((2.0, 0.001, 20_000, 1e-6), (1.0, 0.02, 1465, 1e-5), (8.0, 0.1, 500, 1e-5)):
        noise = noise_for(epsilon, q, steps, delta, pld.epsilon)
        assert epsilon * 0.9999 <= pld.epsilon([SampledGaussian(q, noise, steps)], delta) <= epsilon
        rate = rate_for(epsilon, noise, steps, delta, pld.epsilon)
        assert epsilon * 0.9999 <= pld.epsilon([SampledGaussian(rate, noise, steps)], delta) <= epsilon


@pytest.mark.slow
def test_calibration_of_long_histories_keeps_the_budget():
    for epsilon, q, steps, delta in ((0.3, 1e-6, 10**8, 1e-6), (2.0, 0.01, 10**8, 1e-7), (5.0, 1e-7, 10**7, 1e-9)):
        noise = noise_for(epsilon, q, steps, delta, pld.epsilon)
        # At 10^8 steps the transform's rounding moves epsilon by half a percent, within the slack.
        assert epsilon * 0.97 <= pld.epsilon([SampledGaussian(q, noise, steps)], delta) <= epsilon


@pytest.mark.parametrize("change", ["steps", "rate", "noise"])
def test_epsilon_rises_with_steps_rate_and_less_noise_across_the_bound(few_points, change):
    mechanisms = [
        SampledGaussian(
            0.002 * (factor if change == "rate" else 1),
            1.2 / (factor if change == "noise" else 1),
            round(3000 * (factor if change == "steps" else 1)),
        )
        for factor in 1.15 ** np.arange(-7, 8)
    ]
    epsilons = [pld.epsilon([m], 1e-5) for m in mechanisms]
    jitter = 1e-3 if few_points == 2**15 else 0.1  # a grid that is thirty times as wide costs that much
    assert all(more >= less * (1 - jitter) for less, more in pairwise(epsilons))
    if few_points == 2**15:
        coarse = [pld.both_directions([m])[0].spacing > pld.fitted_grid(m) for m in mechanisms]
        assert set(coarse) == {True, False}


@pytest.mark.parametrize(
    ("sigma", "steps"), [(3e3, 10**6), (100.0, 3 * 10**5), pytest.param(3e4, 10**8, marks=pytest.mark.slow)]
)
def test_long_histories_without_sampling_cost_the_exact_gaussian_or_just_more(sigma, steps):
    for delta in (1e-8, 1e-5, 1e-2):
        exact = oracles.gaussian(sigma, steps, delta)
        one = [SampledGaussian(1.0, sigma, steps)]
        above = 1.02 if pld.slack(one) < delta / 10 else 1.1  # RDP's bound
        assert exact <= pld.epsilon(one, delta) <= exact * above


@pytest.mark.parametrize(("sigma", "steps"), [(300, 10**8), (100, 10**7), (3, 10**6)])
def test_large_deltas_of_long_histories_are_not_below_the_exact_gaussian_s(sigma, steps):
    mu = math.sqrt(steps) / sigma
    history = [SampledGaussian(1.0, sigma, steps)]
    at = np.array([-5.0, 0.0, 1.0, 5.0, mu**2 / 2, mu**2 / 2 + 5 * mu])
    exact = special.ndtr(mu / 2 - at / mu) - np.exp(at + special.log_ndtr(-mu / 2 - at / mu))
    assert (pld.divergences(history, at).max(axis=0) >= np.minimum(exact, 1)).all()
    for missed in (0.5, 1e-3, 1e-6):  # 1 - delta
        epsilon = pld.epsilon(history, 1 - missed)
        delta = special.ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
        assert delta <= 1 - missed


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "at_most"),
    [(*HUGE, 0.3334), (1.7e-4, 1.12, 1_660_936, 0.896), (1e-4, 1.47, 4_230_000, 0.561)],
)
def test_neither_rounding_nor_a_wide_window_raises_a_long_history_s_epsilon(q, sigma, steps, at_most):
    mechanism = SampledGaussian(q, sigma, steps)
    removing, adding = pld.both_directions([mechanism])
    assert removing.spacing == adding.spacing == pld.fitted_grid(mechanism)
    assert adding.epsilons(np.array([1e-5])) <= removing.epsilons(np.array([1e-5]))
    assert pld.epsilon([mechanism], 1e-5) <= at_most


# -- a grid that does not fit is coarsened, from above ---------------------------------------------------------


def random_losses(random: np.random.Generator) -> Losses:
    probability = random.dirichlet(np.full(int(random.integers(1, 60)), 0.3))
    infinite = float(random.choice([0.0, 0.01]))
    return Losses(
        float(10 ** random.uniform(-3, 0)), int(random.integers(-70, 20)), probability * (1 - infinite), infinite
    )


def test_coarsening_never_lowers_a_divergence_and_keeps_both_totals():
    random = np.random.default_rng(0)
    for _ in range(60):
        fine = random_losses(random)
        factor = int(random.integers(1, 9))
        coarse = coarsened(fine, factor)
        assert coarse.spacing == fine.spacing * factor
        assert coarse.infinite == fine.infinite
        reach = fine.spacing * 90
        epsilons = random.uniform(-reach, reach, 100)
        higher, lower = coarse.deltas(epsilons), fine.deltas(epsilons)
        assert (higher >= lower - 1e-12).all()
        # A wider grid moves no loss by more than its spacing.
        assert (coarse.deltas(epsilons + coarse.spacing) <= lower + 1e-12).all()
        assert coarse.probability.sum() == pytest.approx(fine.probability.sum(), rel=1e-12)
        # Doubling by connect-the-dots on a divergence's own dots gives the same distribution.
        at = coarse.spacing * (coarse.lowest + np.arange(len(coarse.probability)))
        np.testing.assert_allclose(coarse.deltas(at), fine.deltas(at), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "history",
    [
        [(0.002, 1.2, 3000)],
        [(0.02, 1.5, 2000), (0.05, 3.0, 1000), (0.01, 1.1, 400)],
        [(1.0, 30.0, 400), (1e-3, 0.8, 1)],
    ],
)
def test_a_smaller_bound_on_points_gives_fewer_points_and_a_larger_epsilon(few_points, monkeypatch, history):
    parts = [SampledGaussian(*row) for row in history]
    directions = pld.both_directions(parts)
    assert max(len(losses.probability) for losses in directions) <= few_points
    bounded = max(float(losses.epsilons(np.array([1e-5]))[0]) for losses in directions)
    monkeypatch.undo()
    finest = pld.both_directions(parts, grid=min(map(pld.fitted_grid, parts)) / 2)
    finer = max(float(losses.epsilons(np.array([1e-5]))[0]) for losses in finest)
    assert finer * (1 - 1e-8) <= bounded <= finer * 1.5


def test_where_both_fit_the_bounded_composition_agrees_with_the_plain_one():
    for row in ((0.02, 1.1, 1465), (0.5, 3.0, 100), (1.0, 20.0, 50), (0.01, 0.8, 500), (0.05, 0.5, 300)):
        history = (SampledGaussian(*row),)
        spacing = pld.fitted_grid(history[0])
        for direction in (0, 1):
            plain = pld._as_asked(history, spacing, direction)
            bounded = pld._bounded(history, spacing, direction)
            deltas = np.array([1e-8, 1e-5, 1e-2])
            np.testing.assert_allclose(bounded.epsilons(deltas), plain.epsilons(deltas), rtol=1e-6)


@examples(6, 30)
@given(
    st.floats(math.log(1e-6), 0.0).map(math.exp),
    st.floats(math.log(0.4), math.log(100)).map(math.exp),
)
def test_the_directions_without_rounding_are_those_computed_alone(q, sigma):
    one = SampledGaussian(q, sigma, 1)
    grid = max(pld.fitted_grid(one), 1e-5)
    for alone, paired in zip(
        (pld.removing(one, grid), pld.adding(one, grid)), pld.losses_of_step(one, grid), strict=True
    ):
        assert paired.probability.sum() + paired.infinite == pytest.approx(1.0, abs=1e-14)
        epsilons = grid * np.arange(-20, 21)
        np.testing.assert_allclose(paired.deltas(epsilons), alone.deltas(epsilons), rtol=1e-7, atol=1e-13)


@pytest.mark.parametrize(
    ("q", "sigma", "grid"), [(1e-5, 0.9, 2e-3), (0.5, 50.0, 5e-4), (1.0, 3.0, 0.05), (0.99, 1.0, 0.1)]
)
def test_the_paired_probabilities_are_those_of_fifty_digits(q, sigma, grid):
    removing, adding = pld.losses_of_step(SampledGaussian(q, sigma, 1), grid)
    exact, infinite = oracles.connected_dots(q, sigma, grid, removing.lowest, len(removing.probability))
    np.testing.assert_allclose(removing.probability, exact, rtol=0, atol=1e-12)
    assert infinite <= removing.infinite * (1 + 1e-9) + 1e-30
    if q == 1:
        assert adding.infinite == pytest.approx(removing.infinite, rel=1e-3, abs=0)  # the same distribution
    # The other direction has the opposite losses, each with probability e^−loss of before.
    loss = grid * (removing.lowest + np.arange(len(exact)))
    mirrored = (exact * np.exp(-loss))[::-1]
    assert adding.lowest == -(removing.lowest + len(exact) - 1)
    np.testing.assert_allclose(adding.probability, mirrored, rtol=0, atol=1e-12)


# -- the smaller of PLD's and RDP's bound ----------------------------------------------------------------------


@examples(15, 400)
@given(
    st.floats(math.log(1e-5), 0.0).map(math.exp),
    st.floats(math.log(0.4), math.log(100)).map(math.exp),
    st.floats(0.0, math.log(1e5)).map(lambda x: round(math.exp(x))),
    st.floats(math.log(1e-9), math.log(0.5)).map(math.exp),
)
def test_ordinary_histories_never_cost_more_than_under_rdp(q, sigma, steps, delta):
    one = [SampledGaussian(q, max(sigma, 0.7 if q < 1e-3 else 0.4), steps)]
    assert pld.epsilon(one, delta) <= rdp.epsilon(one, delta) + 1e-12


ROUGH = [
    [(1e-7, 5.0, 10**8)],
    [(1e-5, 30.0, 10**8)],
    [(0.3, 400.0, 5 * 10**6)],  # a fine grid; the slack is 1e-9
    [(0.5, 0.04, 3)],
    pytest.param([(0.3, 40.0, 10**8)], marks=pytest.mark.slow),
    pytest.param([(0.01, 2.0, 10**12)], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("history", ROUGH)
def test_the_profile_promises_no_less_than_epsilon(history):
    parts = [SampledGaussian(*row) for row in history]
    profile = Profile(parts)
    for delta in (1e-9, 3e-8, 1e-5, 1e-2):
        epsilon = pld.epsilon(parts, delta)
        assert epsilon <= rdp.epsilon(parts, delta)
        if epsilon < 1e6:
            assert profile._divergence(np.array([epsilon])).max() <= delta * (1 + 1e-6)
    epsilons = np.linspace(-5, 20, 200)
    at = profile._divergence(epsilons)
    assert (np.diff(at, axis=1) <= 1e-15).all()
    assert (at >= np.maximum(-np.expm1(epsilons), 0) - 1e-15).all()
    # And no more: at the delta that the profile shows, epsilon is the one asked for or less.
    for epsilon, delta in zip(epsilons[::10], at.max(axis=0)[::10], strict=True):
        if 1e-9 <= delta < 0.5:
            assert pld.epsilon(parts, delta) <= max(epsilon, 0) * (1 + 1e-6) + 1e-9


@examples(15, 60)
@given(
    st.floats(math.log(1e-4), 0.0).map(math.exp),
    st.floats(math.log(0.5), math.log(20)).map(math.exp),
    st.floats(0.0, 8.0),
    st.sampled_from(oracles.DIRECTIONS),
)
def test_rdp_s_delta_is_never_below_one_step_s_and_inverts_its_epsilon(q, sigma, epsilon, direction):
    one = [SampledGaussian(q, sigma, 1)]
    delta = float(rdp.delta_at(one, np.array([epsilon]))[0])
    assert oracles.one_step(q, sigma, delta, direction) <= epsilon * (1 + 1e-9) + 1e-12 if delta < 1 else True
    if 1e-300 < delta < 1 and epsilon > 0:
        assert rdp.epsilon(one, delta) == pytest.approx(epsilon, rel=1e-9)


def test_where_no_pld_exists_rdp_s_bound_counts():
    one = [SampledGaussian(0.5, 0.04, 3)]
    assert pld.both_directions(one) is None
    assert pld.epsilon(one, 1e-5) == rdp.epsilon(one, 1e-5)


# -- the cache -------------------------------------------------------------------------------------------------


def test_the_cache_is_bounded_by_points_and_entries_and_returns_what_it_keeps():
    calls = []

    def compose(history, spacing):
        calls.append(spacing)
        one = Losses(spacing, 0, np.zeros(100), 0.0)
        return one, one

    kept = Recent(compose, entries=4, size=700)
    for spacing in (1.0, 2.0, 3.0, 1.0, 4.0):  # 200 points each: the fourth is found
        kept((), spacing)
    assert calls == [1.0, 2.0, 3.0, 4.0]
    assert kept.points == 600
    kept((), 1.0)  # 2.0 was the oldest
    kept((), 2.0)
    assert calls == [1.0, 2.0, 3.0, 4.0, 2.0]
    few = Recent(compose, entries=2, size=10**9)
    for spacing in (1.0, 2.0, 3.0):
        few((), spacing)
    assert few.points == 400
    kept.cache_clear()
    assert kept.points == 0
