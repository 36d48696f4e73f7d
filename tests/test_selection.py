"""Private selection: the theorems against enumeration, `tune` under interruptions, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import poisson
from torch import nn

import epsilons
from epsilons import Budgets, Plan, PlanFolder, Recipe, SampledGaussian, Selection
from epsilons.accounting import ACCOUNTANTS, noise_for, pld, rdp
from epsilons.accounting.selection import LINES, ORDERS, Selected, SelectedProfile
from epsilons.auditing.membership import attack
from epsilons.errors import EpsilonsError, InputError, PlanError, RunError
from epsilons.ledger.account import read_charges
from epsilons.planning import risk
from epsilons.planning.advice import tuning_costs
from epsilons.planning.plan_file import sealed
from epsilons.training.fitting import tuning
from program import CONFIG, people
from program import epsilons as command_line
from small_runs import CLASSES, FEATURES, a_model

BOTH = [Selection("logarithmic", 3.0), Selection("poisson", 3.0), Selection("logarithmic", 10), Selection("poisson", 9)]
CIFAR = SampledGaussian(8192 / 50_000, 9.0, 200)

# -- The number of runs


def probabilities(select: Selection, most: int) -> np.ndarray:
    """(most + 1,) of each number of runs, by the definitions in the papers."""
    k = np.arange(most + 1)
    if select.distribution == "poisson":
        return poisson.pmf(k, select.mean)
    part = np.zeros(most + 1)
    part[1:] = (1 - select.gamma) ** k[1:] / (k[1:] * math.log(1 / select.gamma))
    return part


@pytest.mark.parametrize("select", BOTH, ids=str)
def test_the_number_of_runs_has_the_distribution_that_the_theorem_is_about(select: Selection) -> None:
    points = 20_000
    drawn = np.bincount([select.number((i + 0.5) / points) for i in range(points)], minlength=2000) / points
    expected = probabilities(select, len(drawn) - 1)
    assert np.abs(drawn - expected).max() <= 1 / points
    k = np.arange(100_000)
    assert probabilities(select, 99_999) @ k == pytest.approx(select.mean, rel=1e-6)


def test_a_selection_is_written_and_read() -> None:
    for select in (*BOTH, Selection("poisson", 2.5)):
        assert Selection.of(str(select)) == select
    for wrong in ("logarithmic", "logarithmic:1", "normal:3", "poisson:0", "poisson:inf", "poisson:nan", "10"):
        with pytest.raises(PlanError):
            Selection.of(wrong)


# -- The theorems, against selections that are computed exactly


def selected_exactly(outcomes: np.ndarray, select: Selection, most: int = 3000) -> np.ndarray:
    """(outcomes,) probabilities of what is released: outcomes are in rising order of their score.

    Of k runs the best is at most y with probability F(y)^k. With no run, an outcome below all others is released.
    """
    k, below = np.arange(most + 1), np.concatenate([[0.0], np.cumsum(outcomes)])
    below[-1] = 1.0
    with np.errstate(divide="ignore"):
        at_most = np.where(k == 0, 1.0, np.exp(np.maximum(k, 1) * np.log(below)[:, None])) @ probabilities(select, most)
    at_most[0] = probabilities(select, 0)[0]
    return np.concatenate([[at_most[0]], np.maximum(np.diff(at_most), 0)])  # of rounding, not below 0


def by_enumeration(outcomes: np.ndarray, select: Selection, most: int) -> np.ndarray:
    """The same for at most so many runs, by listing every sequence of runs."""
    found = np.zeros(len(outcomes) + 1)
    found[0] = probabilities(select, 0)[0]
    for k in range(1, most + 1):
        for runs in itertools.product(range(len(outcomes)), repeat=k):
            found[max(runs) + 1] += probabilities(select, k)[k] * math.prod(outcomes[list(runs)])
    return found


def renyi(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(ORDERS,) of two distributions on the same outcomes, where neither is 0 alone."""
    both = (p > 0) & (q > 0)
    log_p, log_q = np.log(p[both]), np.log(q[both])
    return logsumexp(ORDERS[:, None] * log_p + (1 - ORDERS[:, None]) * log_q, axis=1) / (ORDERS - 1)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def some_pair(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two distributions on a few outcomes, at different distances from each other."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(int(rng.integers(2, 9)), rng.choice([0.3, 1.0, 10.0]))) + 1e-9
    q = p * np.exp(rng.choice([0.05, 0.5, 2.0]) * rng.uniform(-1, 1, len(p)))
    return p / p.sum(), q / q.sum()


def both_ways(of: Callable[[np.ndarray, np.ndarray], np.ndarray], p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.maximum(of(p, q), of(q, p))


def deltas_of(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.array([hockey_stick(p, q, math.log1p(1 / (order - 1))) for order in ORDERS])


@pytest.mark.parametrize("select", BOTH[:2], ids=str)
def test_the_formula_of_what_is_released_is_that_of_every_sequence_of_runs(select: Selection) -> None:
    p = np.array([0.2, 0.5, 0.3])
    few = by_enumeration(p, select, 9)
    whole = selected_exactly(p, select)
    assert (whole >= few - 1e-12).all()
    assert whole.sum() - few.sum() == pytest.approx(1 - probabilities(select, 9).sum(), abs=1e-9)


@pytest.mark.parametrize("select", BOTH, ids=str)
def test_a_selection_that_is_computed_exactly_is_never_above_the_bound(select: Selection) -> None:
    closest = {"whole": math.inf, "one run": math.inf}
    for seed in range(300):
        p, q = some_pair(seed)
        exact = both_ways(renyi, *(selected_exactly(one, select) for one in (p, q)))
        base, deltas = both_ways(renyi, p, q)[None], both_ways(deltas_of, p, q)[None]
        bound = select.released(base, deltas if select.distribution == "poisson" else None)[0]
        bounds = {"whole": bound, "one run": base[0]}
        closest = {name: min(least, float((bounds[name] - exact).min())) for name, least in closest.items()}
    assert closest["whole"] >= -1e-9
    assert closest["one run"] < -0.1  # the pairs are hard: a bound that counts one run is noticed


@pytest.mark.parametrize("select", BOTH, ids=str)
@pytest.mark.parametrize("mechanism", [CIFAR, SampledGaussian(0.02, 1.2, 500), SampledGaussian(1.0, 5.0, 1)], ids=str)
def test_bounds_are_those_of_dp_accounting(select: Selection, mechanism: SampledGaussian) -> None:
    events, privacy = pytest.importorskip("dp_accounting.dp_event"), pytest.importorskip("dp_accounting.rdp")
    run = events.PoissonSampledDpEvent(mechanism.sample_rate, events.GaussianDpEvent(mechanism.noise_multiplier))
    run = events.SelfComposedDpEvent(run, mechanism.steps)
    other = privacy.RdpAccountant(ORDERS.tolist())
    shape = 0.0 if select.distribution == "logarithmic" else math.inf
    other.compose(events.RepeatAndSelectDpEvent(run, mean=select.mean, shape=shape))
    theirs = other.get_epsilon(1e-5)
    assert Selected(select, pld.epsilon)([mechanism], 1e-5) <= Selected(select, rdp.epsilon)([mechanism], 1e-5)
    if select.distribution == "logarithmic":
        assert Selected(select, rdp.epsilon)([mechanism], 1e-5) == pytest.approx(theirs, rel=1e-4)
        return
    # They take δ of one run from its RDP. With that, the bounds are equal; PLD's is smaller.
    base = mechanism.steps * rdp.divergence(mechanism.sample_rate, mechanism.noise_multiplier, ORDERS)[None]
    at = np.log1p(1 / (ORDERS - 1))
    deltas = np.minimum.reduce([rdp.delta_of(base[0], ORDERS, at)])[None]
    same = rdp.converted(select.released(base, deltas), np.array([1e-5]), ORDERS)[0]
    assert same == pytest.approx(theirs, rel=0.02)
    assert Selected(select, rdp.epsilon)([mechanism], 1e-5) <= theirs * (1 + 1e-9)


def test_noise_of_ten_and_of_twenty_runs_and_which_way_needs_least() -> None:
    budgets, recipe = Budgets.from_shares({1.0: 0.5, 2.0: 0.5}, records=50_000), Recipe(200, 8192, 1.0)
    costs = {
        which: {runs: tuning_costs(budgets, recipe, ACCOUNTANTS[which], runs) for runs in (3, 10, 20)}
        for which in ("pld", "rdp")
    }
    assert costs["pld"][10]["logarithmic:10"] <= 1.5
    assert costs["pld"][20]["logarithmic:20"] <= 1.6
    assert costs["rdp"][10]["logarithmic:10"] <= 1.9 / 1.08  # of one run by RDP
    assert [min(of, key=of.get) for of in costs["rdp"].values()] == ["poisson:3", "logarithmic:10", "logarithmic:20"]
    assert costs["pld"][10]["all runs released"] > 3
    advice = epsilons.advise(budgets, recipe, runs=10)
    assert "The least noise: logarithmic:10." in str(advice)
    assert advice.to_dict()["tuning"] == costs["pld"][10]


def slope(select: Selection, t: np.ndarray) -> np.ndarray:
    """φ′(t), φ(t) = E[t^K], as a sum."""
    k = np.arange(1, 4000)
    return (probabilities(select, 3999)[1:] * k) @ np.power(np.asarray(t)[None, :], (k - 1)[:, None])


@pytest.mark.parametrize("select", BOTH, ids=str)
def test_the_shift_is_an_upper_bound_on_how_fast_the_number_of_runs_lets_a_selection_change(select: Selection) -> None:
    t = np.unique(np.concatenate([np.linspace(0, 1, 401), 1 - np.geomspace(1e-4, 1, 200)]))
    for seed in range(20):
        p, q = some_pair(seed)
        deltas = np.array([max(hockey_stick(p, q, x), hockey_stick(q, p, x)) for x in LINES])
        lines = [
            np.exp(-LINES[:, None]) * (t - deltas[:, None]),
            1 - np.exp(LINES[:, None]) * (1 - t) - deltas[:, None],
        ]
        least = np.vstack(lines).max(axis=0).clip(0, 1)  # of the other probability of an event with probability t
        exact = float(np.log(slope(select, t) / slope(select, least)).max())
        assert exact - 1e-6 <= select.shift(deltas) <= exact + 0.05 + 0.02 * exact


@pytest.mark.parametrize("select", BOTH, ids=str)
def test_a_selection_that_is_computed_exactly_is_never_above_its_profile(select: Selection) -> None:
    closest = {"whole": math.inf, "no shift": math.inf, "no mean": math.inf}
    for seed in range(200):
        p, q = some_pair(seed)
        released = [selected_exactly(one, select) for one in (p, q)]
        deltas = np.array([max(hockey_stick(p, q, x), hockey_stick(q, p, x)) for x in LINES])
        shift = select.shift(deltas)
        for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
            exact = max(hockey_stick(*released, epsilon), hockey_stick(*released[::-1], epsilon))
            of_one = {at: max(hockey_stick(p, q, at), hockey_stick(q, p, at)) for at in (epsilon - shift, epsilon)}
            bounds = {
                "whole": select.mean * of_one[epsilon - shift],
                "no shift": select.mean * of_one[epsilon],
                "no mean": of_one[epsilon - shift],
            }
            closest = {name: min(least, bounds[name] - exact) for name, least in closest.items()}
    assert closest["whole"] >= -1e-9
    assert closest["no shift"] < -1e-3  # a bound that forgets a term is noticed
    assert closest["no mean"] < -1e-3


@pytest.mark.parametrize("select", BOTH, ids=str)
def test_the_profile_of_a_selection_bounds_what_is_computed_exactly(select: Selection) -> None:
    history = (SampledGaussian(1.0, 6.0, 1),)
    profile = SelectedProfile(history, select=select)
    # One Gaussian release whose value is also its score, on a fine grid.
    z = np.linspace(-60, 60, 24_001)
    densities = [np.exp(-((z - shift) ** 2) / 72) for shift in (0.0, 1.0)]
    p, q = (selected_exactly(one / one.sum(), select, 400) for one in densities)
    for i in range(0, len(profile.grid), 20):
        exact = max(hockey_stick(p, q, profile.grid[i]), hockey_stick(q, p, profile.grid[i]))
        assert profile.divergence[:, i].min() >= exact - 1e-6
    assert profile.advantage >= hockey_stick(p, q, 0.0) - 1e-6
    assert profile.advantage < 0.5


@pytest.mark.parametrize("select", [Selection("logarithmic", 3), Selection("logarithmic", 20)], ids=str)
def test_with_pld_the_profile_of_one_run_is_shifted_and_multiplied(select: Selection) -> None:
    history, delta = (SampledGaussian(0.05, 1.5, 100),), 1e-5
    spent = Selected(select, pld.epsilon)(history, delta)
    shift = select.shift(pld.divergences(history, LINES).max(axis=0))
    assert spent == pytest.approx(shift + pld.epsilon(history, delta / select.mean), rel=1e-6)
    assert spent < 0.9 * Selected(select, rdp.epsilon)(history, delta)
    profile = SelectedProfile(history, np.array([spent]), select=select)
    assert profile.divergence.max() == pytest.approx(delta, rel=1e-3)
    assert profile.epsilons[4] == pytest.approx(spent, rel=1e-6)
    tiny = Selected(select, pld.epsilon)(history, 1e-9)  # of one run, PLD would need a smaller delta than it can
    assert tiny == Selected(select, rdp.epsilon)(history, 1e-9)


def test_who_sees_the_number_of_runs_or_a_losing_run_learns_more_than_delta() -> None:
    """An adversary's base mechanism. The real release keeps (epsilon, delta); with K, or a losing run, it does not."""
    select, delta = Selection("logarithmic", 10), 1e-5
    p = np.array([0.98, 0.02])  # the better outcome is rare
    q = np.array([0.99, 0.01])
    base = both_ways(renyi, p, q)[None]
    epsilon = float(rdp.converted(select.released(base), np.array([delta]), ORDERS)[0])
    real = [selected_exactly(one, select) for one in (p, q)]
    with_k = [
        np.concatenate(
            [probabilities(select, 600)[k] * np.array([one[0] ** k, 1 - one[0] ** k]) for k in range(1, 601)]
        )
        for one in (p, q)
    ]
    all_runs = [
        np.concatenate([probabilities(select, 600)[k] * _number_of_better(one, k) for k in range(1, 601)])
        for one in (p, q)
    ]
    assert max(hockey_stick(*real, epsilon), hockey_stick(*real[::-1], epsilon)) <= delta
    assert max(hockey_stick(*with_k, epsilon), hockey_stick(*with_k[::-1], epsilon)) > 5 * delta
    assert max(hockey_stick(*all_runs, epsilon), hockey_stick(*all_runs[::-1], epsilon)) > 5 * delta


def _number_of_better(outcomes: np.ndarray, runs: int) -> np.ndarray:
    """(runs + 1,) how likely each number of runs with the better outcome is."""
    from scipy.stats import binom

    return binom.pmf(np.arange(runs + 1), runs, outcomes[1])


# -- The plan


def people_of(count: int, shift: int = 0) -> Budgets:
    return Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=count, delta=1e-4, seed=shift)


def a_plan(select: Selection = BOTH[0], **options: Any) -> Plan:
    return epsilons.plan(people_of(120), Recipe(3, 20.0, 1.0), accountant="rdp", select=select, **options)


@pytest.mark.parametrize("strategy", ["scale", "sample", "mix", "uniform", "exclude"])
@pytest.mark.parametrize("select", BOTH[:2], ids=str)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_every_group_uses_up_its_budget_with_the_whole_selection(
    strategy: str, select: Selection, accountant: str
) -> None:
    options = {"threshold": 3.0} if strategy == "exclude" else {}
    plan = epsilons.plan(people_of(1000), Recipe(20, 100, 1.0), strategy, accountant, select=select, **options)
    assert plan.accountant == accountant
    certify = Selected(select, ACCOUNTANTS[accountant])
    for group, spent in enumerate(plan.epsilon_spent()):
        history = plan.history(group)
        assert spent == pytest.approx(0.0 if history[0].is_silent else certify(history, 1e-4), rel=1e-9)
    assert (plan.epsilon_spent() <= plan.epsilons).all()
    assert plan.epsilon_spent()[-1] >= plan.epsilons[-1] * (0.999 if strategy != "uniform" else 0.3)
    assert (plan.of_one_run.epsilon_spent() < plan.epsilon_spent() + 1e-12).all()
    assert (plan.spent_after([0]) == plan.epsilon_spent()).all()
    scores = [certify([SampledGaussian(1.0, noise, 1)], 1e-4) for noise in plan.score_noise]
    assert (np.array(scores) <= plan.epsilons).all()
    assert (np.array(scores) >= plan.epsilons * 0.999).all()
    odds = [one.advantage for one in risk(plan)]
    exact = [SelectedProfile(plan.history(group), select=select).advantage for group in range(2)]
    assert odds == pytest.approx(exact, rel=1e-9)
    assert all(0 < one < 1 or (one == 0 and spent == 0) for one, spent in zip(odds, plan.epsilon_spent(), strict=True))


def test_a_plan_of_a_selection_is_saved_read_and_worded(tmp_path: Path) -> None:
    plan, one = a_plan(), a_plan().of_one_run
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again == plan
    assert again.select == plan.select
    assert plan.digest not in (one.digest, a_plan(BOTH[1]).digest)
    assert plan.to_dict()["schema"] == 7
    for words in ("secret number of runs (logarithmic, 3 in expectation)", "the number of runs, anything about the"):
        assert words in plan.guarantee
    assert "about 3 secret runs" in str(plan)
    for key, value in (("select", "poisson:3"), ("select", None), ("schema", 2), ("runs", 2)):
        changed = plan.to_dict() | {key: value}
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        with pytest.raises(EpsilonsError):
            Plan.load(tmp_path / "changed.json")


def test_what_no_selection_takes_is_refused() -> None:
    budgets, recipe, select = people_of(120), Recipe(3, 20.0, 1.0), BOTH[0]
    by_risk = Budgets.by_risk({"all": epsilons.Risk(odds=60)}, tail=(3.0, 1e-4), tiers=["all"] * 120)
    for wrong in (
        lambda: epsilons.plan(budgets, recipe, runs=2, select=select),
        lambda: epsilons.plan(budgets, recipe, accountant="filter", select=select),
        lambda: epsilons.plan(budgets, recipe, select=select, public_shares={1.0: 0.5, 3.0: 0.5}, public_records=120),
        lambda: epsilons.plan(by_risk, recipe, select=select),
    ):
        with pytest.raises(PlanError):
            wrong()


def test_no_plan_is_both_a_selection_and_something_that_its_certificate_leaves_out(tmp_path: Path) -> None:
    plan, select = a_plan(), BOTH[0]
    by_risk = Budgets.by_risk({"all": epsilons.Risk(odds=60)}, tiers=["all"] * 120, tail=(3.0, 1e-4))
    risky = epsilons.plan(by_risk, Recipe(3, 20.0, 1.0))
    counted = epsilons.plan(people_of(120), Recipe(3, 20.0, 1.0), accountant="rdp", class_noise=30.0)
    for other, added in (
        (plan, {"class_noise": 30.0}),
        (counted, {"select": select}),
        (risky, {"select": select}),
        (plan, {"runs": 2}),
    ):
        with pytest.raises(PlanError, match="A selection is certified"):
            dataclasses.replace(other, **added)
    written = plan.to_dict() | {"class_noise": 30.0}
    (tmp_path / "both.json").write_text(json.dumps(sealed(written)))
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "both.json")


def test_a_selected_run_is_not_attacked_as_if_it_were_a_single_one() -> None:
    data = torch.randn(120, FEATURES), torch.arange(120) % CLASSES
    with pytest.raises(InputError, match="of_one_run"):
        attack(a_model(), data, a_plan(), budgets=people_of(120), shadows=4)


# -- The runs

HELD_OUT = 40
CANDIDATES = [0.01, 0.1, 1.0]


class Interruption(Exception):
    """Stands for a kill."""


class Tuning:
    """A small selection, whose calls can be interrupted at any place."""

    def __init__(self, parent: Path, seed: int = 8, select: Selection = BOTH[0]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(160, FEATURES, generator=generator)
        self.targets = self.inputs[:, :CLASSES].argmax(1)
        self.plan, self.seed, self.made = a_plan(select), seed, 0
        self.folder = PlanFolder.create(parent / "tuning", self.plan)
        self.interrupt: Iterator[bool] = itertools.repeat(False)

    def step(self, *_: Any) -> None:
        if next(self.interrupt):
            raise Interruption

    def train(self, lr: float, plan: PlanFolder, run_dir: epsilons.RunFolder) -> nn.Module:
        self.step()
        model = a_model()
        how = epsilons.Training(lr=lr)
        records, budgets = (self.inputs[:120], self.targets[:120]), people_of(120)
        where = epsilons.RunFolder(run_dir.path, resume=True, checkpoint_every=1)
        epsilons.fit(model, records, plan, budgets=budgets, training=how, callbacks=[self.step], run_dir=where, seed=4)
        self.made += 1
        self.step()
        return model

    def score(self, model: nn.Module) -> torch.Tensor:
        self.step()
        return model(self.inputs[120:]).argmax(1) == self.targets[120:]

    def __call__(self) -> epsilons.Tuned:
        return epsilons.tune(
            self.folder, CANDIDATES, self.train, self.score, held_out=people_of(HELD_OUT, 1), seed=self.seed
        )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def seed_with_runs(select: Selection, least: int) -> int:
    """A seed under which at least so many runs are made."""
    for seed in itertools.count():
        stream = tuning.Randomness.fresh(seed).stream("runs")
        if least <= select.number(tuning._uniform(stream)) <= least + 3:
            return seed
    raise AssertionError


@pytest.mark.parametrize("case", range(6))
def test_an_interrupted_selection_ends_as_one_that_was_not(
    case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, rng = seed_with_runs(BOTH[0], 4), random.Random(case)
    whole = Tuning(tmp_path / "whole", seed)
    expected = whole()
    assert expected.path is not None
    broken = Tuning(tmp_path / "broken", seed)
    broken.interrupt = (rng.random() < 0.25 for _ in itertools.count())
    remove, rename, write = shutil.rmtree, Path.rename, tuning.write_json
    for module, name, real in ((shutil, "rmtree", remove), (Path, "rename", rename), (tuning, "write_json", write)):

        def sometimes(*arguments: Any, _real: Any = real, **named: Any) -> Any:
            before, after = rng.random() < 0.1, rng.random() < 0.1
            if before:
                raise Interruption
            result = _real(*arguments, **named)
            if after:
                raise Interruption
            return result

        monkeypatch.setattr(module, name, sometimes)
    interrupted, found = 0, None
    while found is None:
        try:
            found = broken()
        except Interruption:
            interrupted += 1
    monkeypatch.undo()
    assert interrupted >= 2
    assert (found.candidate, found.score) == (expected.candidate, expected.score)
    same = [(run.path / "model.safetensors").read_bytes() for run in (found, expected) if run.path is not None]
    assert same[0] == same[1]
    assert found.path is not None
    assert read_charges(found.path / "ledger.jsonl", broken.plan) == (3,)
    assert files_of(broken.folder.path).keys() == files_of(whole.folder.path).keys()
    assert broken() == found  # called once more, it makes nothing
    assert broken.made >= whole.made


def test_nothing_that_is_left_tells_how_many_runs_there_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EPSILONS_COUNT_RUNS", "1")
    left = []
    for least in (1, 5):
        made = Tuning(tmp_path / f"of-{least}", seed_with_runs(BOTH[0], least))
        found = made()
        assert made.made >= least
        assert not any((made.folder.path / "slots").iterdir())
        assert not (made.folder.path / "secret").exists()
        assert found.path is not None
        left.append(files_of(made.folder.path))
        run = json.loads(left[-1]["best/run.json"])
        assert (run["plan_slot"]["number"], run["plan_slot"]["of"]) == (0, 0)
        report = epsilons.report(found.path)
        assert "best of a secret number of runs" in report.to_html()
    assert left[0].keys() == left[1].keys()
    assert {*json.loads(left[0]["selection.json"])} == {"digest", "candidate", "score", "is_finished"}
    assert not (tmp_path / "state" / "epsilons" / "runs.jsonl").exists()  # a count of runs


def test_the_worse_run_is_gone_before_the_next_begins(tmp_path: Path) -> None:
    made = Tuning(tmp_path, seed_with_runs(BOTH[0], 5))
    seen, train = [], made.train

    def watching(*arguments: Any) -> nn.Module:
        seen.append(sorted(file.name for file in made.folder.path.iterdir() if file.is_dir()))
        return train(*arguments)

    made.train = watching  # type: ignore[method-assign]
    made()
    assert seen[0] == ["secret", "slots"]
    assert all(names == ["best", "secret", "slots"] for names in seen[1:])


@pytest.mark.parametrize("tier", [0, 1])
def test_a_held_out_member_moves_a_score_by_no_more_than_its_noise_allows(
    tier: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score without noise, of two data sets that differ in one held-out record, and the noise's spread."""
    held_out, scores = people_of(HELD_OUT, 1), []
    member = int(np.flatnonzero(held_out.group == tier)[0])
    selection = Selection("poisson", 40)
    monkeypatch.setattr(tuning._State, "settle", lambda self, n, c, s: scores.append(s))
    for right in (0.0, 1e9):  # a score is never more than 1
        made = Tuning(tmp_path / str(right), seed=8, select=selection)
        monkeypatch.setattr(made, "train", lambda *_: a_model())
        monkeypatch.setattr(tuning, "_check_made", lambda *_: None)
        given = np.zeros(HELD_OUT)
        given[member] = right
        monkeypatch.setattr(made, "score", lambda _, given=given: given)
        made()
    half = len(scores) // 2
    without, moved = np.array(scores[:half]), np.array(scores[half:]) - np.array(scores[:half])
    assert moved == pytest.approx(np.full(half, moved[0]))
    multiplier = made.plan.score_noise[tier]
    spread = np.sqrt((without**2).mean())
    assert half >= 25
    assert spread / moved[0] == pytest.approx(multiplier, rel=5 / math.sqrt(2 * half))
    normals = [tuning.Randomness.fresh(8).stream("score", n).normals(1)[0] for n in range(1, half + 1)]
    assert without / np.array(normals) == pytest.approx(np.full(half, multiplier * moved[0]))


def test_a_run_outside_of_tune_is_refused(tmp_path: Path) -> None:
    made = Tuning(tmp_path)
    data, budgets = (made.inputs[:120], made.targets[:120]), people_of(120)
    for plan in (made.plan, made.folder):
        with pytest.raises(RunError, match="tune"):
            epsilons.fit(a_model(), data, plan, budgets=budgets, run_dir=tmp_path / "outside")

    def twice(lr: float, plan: PlanFolder, run_dir: epsilons.RunFolder) -> nn.Module:
        epsilons.fit(a_model(), data, plan, budgets=budgets, run_dir=run_dir)
        epsilons.fit(a_model(), data, plan, budgets=budgets, run_dir=tmp_path / "second")
        return a_model()

    with pytest.raises(RunError, match="begun elsewhere"):
        epsilons.tune(made.folder, CANDIDATES, twice, made.score, held_out=people_of(HELD_OUT, 1))


def test_wrong_use_of_tune_is_named(tmp_path: Path) -> None:
    made = Tuning(tmp_path, seed_with_runs(BOTH[0], 2))
    held_out = people_of(HELD_OUT, 1)
    with pytest.raises(RunError, match="made no run"):
        epsilons.tune(made.folder, CANDIDATES, lambda *_: a_model(), made.score, held_out=held_out, seed=made.seed)
    with pytest.raises(InputError, match="40 numbers"):
        epsilons.tune(made.folder, CANDIDATES, made.train, lambda _: [1.0], held_out=held_out, seed=made.seed)
    made()
    with pytest.raises(InputError, match="other candidates"):
        epsilons.tune(made.folder, [0.5], made.train, made.score, held_out=held_out)
    with pytest.raises(InputError, match="other candidates"):
        epsilons.tune(made.folder, CANDIDATES, made.train, made.score, held_out=people_of(HELD_OUT, 2))
    one = PlanFolder.create(tmp_path / "one", made.plan.of_one_run)
    with pytest.raises(PlanError, match="selects nothing"):
        epsilons.tune(one, CANDIDATES, made.train, made.score, held_out=held_out)


def test_a_lost_key_ends_a_selection(tmp_path: Path) -> None:
    made = Tuning(tmp_path, seed_with_runs(BOTH[0], 4))
    made.interrupt = (i == 12 for i in itertools.count())
    with pytest.raises(Interruption):
        made()
    (made.folder.path / "secret" / "key").unlink()
    with pytest.raises(RunError, match="lost"):
        made()


def test_a_selection_may_have_no_run(tmp_path: Path) -> None:
    select = Selection("poisson", 1.2)
    seed = next(
        seed
        for seed in itertools.count()
        if not select.number(tuning._uniform(tuning.Randomness.fresh(seed).stream("runs")))
    )
    made = Tuning(tmp_path, seed, select)
    assert made() == epsilons.Tuned(None, None, None)
    assert made.made == 0


# -- The command


def test_the_command_tries_a_grid_and_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text(people(160))
    (tmp_path / "people.toml").write_text(CONFIG)
    asked = ["tune", "people.toml", "--grid", "lr=0.1,0.5", "--grid", "model.options.hidden=[4]", "-o", "tuned"]
    asked += ["--select", "logarithmic:2", "--held-out", "0.2"]
    shown = command_line(*asked, "--dry-run")
    assert shown.code == 0
    assert "96 records, about 2 secret runs" in shown.out  # of 160, a quarter is for the test, and a fifth held out
    assert not (tmp_path / "tuned").exists()
    first = command_line(*asked, "--json")
    assert first.code == 0, first.err
    again = command_line(*asked, "--json")
    assert json.loads(again.out) == json.loads(first.out)
    found = json.loads(first.out)
    assert found["selected"]["training.lr"] in (0.1, 0.5)
    assert (
        json.loads((tmp_path / "tuned/best/run.json").read_text())["training"]["lr"] == found["selected"]["training.lr"]
    )
    several = command_line("tune", "people.toml", "--grid", "model.options.hidden=[4,3],[5]", "-o", "lists", "--json")
    assert json.loads(several.out)["selected"]["model.options.hidden"] in ([4, 3], [5])
    assert command_line(*asked, "--dry-run", "--json").code == 2
    refused = command_line("tune", "people.toml", "--grid", "batch_size=10,20")
    assert refused.code == 2
    assert "A plan depends on all others" in refused.err
    trained = command_line("train", "people.toml", "--set", "privacy.select=logarithmic:2")
    assert trained.code == 2
    assert "epsilons tune" in trained.err


def test_a_command_that_is_interrupted_says_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epsilons.cli import train_config

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text(people(160))
    (tmp_path / "people.toml").write_text(CONFIG)
    asked = ["tune", "people.toml", "--grid", "lr=0.1,0.5", "--select", "logarithmic:2"]
    with monkeypatch.context() as patched:
        patched.setattr(train_config, "fit", interrupted)
        stopped = command_line(*asked)
    assert stopped.code == 130
    assert "the same epsilons tune" in stopped.err
    assert command_line(*asked).code == 0


def test_noise_of_a_selection_is_found_like_that_of_one_run() -> None:
    noise = noise_for(1.0, 0.1, 100, 1e-5, Selected(BOTH[2], pld.epsilon))
    assert 0.999 <= Selected(BOTH[2], pld.epsilon)([SampledGaussian(0.1, noise, 100)], 1e-5) <= 1.0
