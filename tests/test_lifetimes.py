"""Reports of runs that are charged to a registry: tiers, lifetimes, odds; and what two of them tell together, with and
without a registry.

The adversary knows the data, everyone else's budget and history, and which person withdrew, joined or changed between
two runs. They see all that may be published of both. They know a budget if the same pair of runs, with that person in
another tier, would have been published differently.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import epsilons
from epsilons.accounting import filter as filter_
from epsilons.accounting.profile import Profile
from epsilons.core import disclosure
from epsilons.core.mechanism import Groups
from epsilons.errors import RunError
from epsilons.ledger import model_file
from epsilons.ledger.run_json import MetricsRow, RunSettings
from epsilons.planning.risk_profile import right_of_advantage, right_of_promise, right_over_lifetime
from epsilons.registry import Registry
from epsilons.registry.accounts import Accounts
from epsilons.reporting import annex, html, releasing, sheets
from epsilons.reporting.content import Content, make_content
from epsilons.reporting.load_run import RunRecord
from shares import share

TIERS = {"strict": 1.0, "middle": 3.0, "open": 8.0}
NAMES = list(TIERS)
DELTA, STEPS = 1e-5, 5
GROUPS = ("withdrawal", "newcomer", "change")


# -- runs without training -------------------------------------------------------------------------------------------


def accounts_of(tier: np.ndarray, used: np.ndarray, homes: np.ndarray) -> Accounts:
    """Accounts of people in these tiers who used this part of their budgets. tier, used, homes: (people,)"""
    epsilon = np.array([*TIERS.values()])[tier]
    rows, people = np.arange(len(tier)), len(tier)
    capacity = epsilon - filter_.offsets(DELTA, homes)[rows, homes]
    step = filter_.sums(np.array([[0.1]]), np.array([[5.0]]), [1], 1)[0]
    spent = (used * capacity / step[homes])[:, None] * step
    ids = [f"p{i}" for i in range(people)]
    return Accounts(ids, rows, epsilon, np.full(people, DELTA), homes, spent, np.zeros(people, bool))


def tabled(budgets: Any, recipe: Any, accountant: Any) -> epsilons.Plan:
    """A table that depends on everybody, like those of the library's strategies, without a search."""
    groups = budgets.groups
    norms = groups.epsilons / (groups.epsilons @ groups.counts / groups.records)
    rates, ones = np.full(len(groups), recipe.batch_size / groups.records), np.ones(len(groups))
    phase = epsilons.Phase(recipe.steps, rates, norms, ones, 40 + float(norms.max()), recipe.batch_size)
    return epsilons.Plan.of(budgets, recipe, accountant, phase, strategy="tabled")


def record_of(
    accounts: Accounts,
    path: Path,
    tiers: dict[str, float] | None = TIERS,
    strategy: Any = tabled,
    batch: float = 10,
    charged: bool = True,
    **changes: Any,
) -> RunRecord:
    """A run of these people as `load_run` reads it, with public scores by group and counts of who takes part.

    charged  False for a run without a registry, whose budgets are those of the accounts
    """
    alone = epsilons.Budgets(accounts.epsilon, accounts.delta, unit="person")
    budgets = accounts.budgets(0.5) if charged else alone
    plan = epsilons.plan(
        budgets, epsilons.Recipe(STEPS, batch, 1.0), strategy, accountant="filter" if charged else "rdp"
    )
    of_registry = {"registry": {"id": "R1", "run": "a"}, "lifetimes": accounts.lifetimes(budgets.group)}
    counts = plan.counts.tolist()
    consent = {"ids": [], "table": [{"file": "wishes.csv", "what": "take part", "count": f"{plan.records:,}"}]}
    values = {
        "schema": 1,
        "randomness": "chacha20",
        "roster": "people",
        **(of_registry if charged else {}),
        "eval_data": {"data": "public", "records": 4 * plan.records},
        "started": "2030-01-12T09:00:00Z",
        "ended": "2030-01-12T10:00:00Z",
        "metadata": {"tiers": tiers, "provenance": [], "person": "id", "consent": consent},
    }
    metrics = MetricsRow.model_validate(
        {"step": STEPS, "accuracy": 0.75, "per_group": [[3 * n, 4 * n] for n in counts], "per_class": [[3, 4]] * 2}
    )
    return RunRecord(
        path, plan, RunSettings.model_validate(values | changes), (STEPS,), (STEPS,), 1, (metrics,), None,
        {"plan.json": plan.digest, "model.safetensors": "0" * 64}, plan.digest, False, True,
    )  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two successive runs on nearly the same people; `others` are in both, and the person is number 0.

    tier, used  (others,) of the others
    event       one of GROUPS
    before, after  the person's tier at each run; one of them does not count if the person is in one run
    """

    tier: np.ndarray
    used: np.ndarray
    event: str
    before: int
    after: int

    def worlds(self) -> Iterator[Pair]:
        """The same pair, as the adversary may imagine it: with the person in every other tier."""
        for before in range(len(TIERS)):
            for after in range(len(TIERS)) if self.event == "change" else [before]:
                if self.event != "change" or before != after:
                    yield replace(self, before=before, after=after)

    def runs(self) -> list[Accounts]:
        """Accounts of both runs. The others spent a quarter of what they had left in the first."""
        first = filter_.home_orders([*TIERS.values()], DELTA)
        made = []
        for number, tier in enumerate((self.before, self.after)):
            is_in = (self.event, number) not in (("withdrawal", 1), ("newcomer", 0))
            used = self.used if number == 0 else self.used + 0.25 * (1 - self.used)
            own = 0.25 if number and self.event != "newcomer" else 0.0
            # A change keeps the home order, here that of a first budget in the strictest tier.
            homes = first[np.array([0 if self.event == "change" else self.before, *self.tier])]
            whole = accounts_of(np.array([tier, *self.tier]), np.array([own, *used]), homes)
            made.append(whole.subset(np.arange(len(whole)) >= (not is_in)))
        return made

    @property
    def truth(self) -> tuple[int, int]:
        return self.before, self.after


def random_pair(seed: int) -> Pair:
    """Tiers of 1 to 150 people, or of none, near 20 in every third pair; histories of up to two runs."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 150, len(TIERS))
    if seed % 3 == 0:
        counts[rng.integers(len(TIERS))] = rng.integers(18, 22)
    counts[rng.integers(len(TIERS))] += 20
    tier = rng.permutation(np.repeat(np.arange(len(TIERS)), counts))
    used = rng.choice([0.0, 0.2, 0.6], len(tier))
    before, after = rng.permutation(len(TIERS))[:2].tolist()
    event = GROUPS[seed % len(GROUPS)]
    return Pair(tier, used, event, before, after if event == "change" else before)


# -- the adversary ---------------------------------------------------------------------------------------------------


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a JSON, and every number in its texts, by its path."""
    if isinstance(values, dict):
        for name, one in values.items():
            yield from leaves(one, f"{path}/{name}")
    elif isinstance(values, list | tuple):
        yield f"{path}/length", len(values)
        for place, one in enumerate(values):
            yield from leaves(one, f"{path}/{place}")
    elif isinstance(values, str):
        for place, number in enumerate(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", values)):
            yield f"{path}#{place}", float(number.replace(",", ""))
    elif isinstance(values, bool) or values is None:
        yield path, float(values is True)
    else:
        yield path, values


def differences(first: Any, second: Any) -> dict[str, Any]:
    """What one adds to the other, number by number; a number that is in one of them alone counts in full."""
    one, two = dict(leaves(first)), dict(leaves(second))
    return {path: two.get(path, 0.0) - one.get(path, 0.0) for path in {*one, *two}}


def determined(pair: Pair, published: Callable[[Accounts], Any]) -> bool:
    """Whether the adversary is left with one tier, or one pair of tiers, for the person: by all that both runs publish,
    or by the differences of their numbers."""
    seen: dict[tuple[int, int], Any] = {}
    for world in pair.worlds():
        first, second = map(published, world.runs())
        seen[world.truth] = (json.dumps([first, second], sort_keys=True), differences(first, second))
    truth = seen[pair.truth]
    fitting = [[world for world, one in seen.items() if one[part] == truth[part]] for part in (0, 1)]
    assert all(pair.truth in worlds for worlds in fitting)
    return min(map(len, fitting)) < len(seen)


def artefacts(
    accounts: Accounts, path: Path, charged: bool = True, tiers: dict[str, float] | None = TIERS
) -> dict[str, Any]:
    """All that may be published of a run but its weights: the report, card, guarantee, sheets, annexes."""
    record = record_of(accounts, path, tiers, charged=charged)
    content = make_content(record, release=True)
    model = model_file.ModelFile.model_validate(
        {"model": None, "inputs": {"kind": "arrays"}, "outputs": {"kind": "classes"}}
    )
    return {
        "json": content.to_dict(),
        "html": html.page(content),
        "card": releasing.card(content, model, "person", False),
        "guarantee": releasing.guarantee(content, model),
        "sheets": sheets_of(content, record),
        "annexes": annex.annexes(record),
    }


def sheets_of(content: Content, record: RunRecord) -> list[Any]:
    promised = {group.epsilon: group.right_guesses for group in content.groups}
    return [sorted(map(str, promised.items())), sheets._reasons(content, TIERS, promised, 1), len(record.path.parts)]


# -- programs that are wrong -----------------------------------------------------------------------------------------


def tiers_held(accounts: Accounts) -> Groups:
    epsilon, counts = np.unique(accounts.epsilon, return_counts=True)
    return Groups(epsilon, np.full(len(epsilon), DELTA), counts)


def exact_counts(accounts: Accounts, path: Path) -> Any:
    return tiers_held(accounts).counts.tolist()


def counts_rounded_to_twenty(accounts: Accounts, path: Path) -> Any:
    return [disclosure.at_least(int(count)) for count in tiers_held(accounts).counts]


def the_rule_of_20_in_each_report(accounts: Accounts, path: Path) -> Any:
    """Rows are merged, and only which rows there are is shown."""
    return [row.label for row in disclosure.display_rows(tiers_held(accounts), TIERS, release=True)]


def the_plan_s_table(accounts: Accounts, path: Path) -> Any:
    return record_of(accounts, path).plan.phases[0].noise_std


def scores_by_tier(accounts: Accounts, path: Path) -> Any:
    return record_of(accounts, path).metrics[-1].per_group


def tiers_alone(accounts: Accounts) -> RunRecord:
    """Without a registry, as if the tiers were assigned at random."""
    record = record_of(accounts, Path("run"), charged=False)
    metadata = record.settings.metadata.model_copy(update={"simulated": True})
    return replace(record, settings=record.settings.model_copy(update={"metadata": metadata}))


def the_plan_for_release(accounts: Accounts, path: Path) -> Any:
    return make_content(tiers_alone(accounts), release=True).to_dict()


def the_plan_of_a_rare_tier_for_release(accounts: Accounts, path: Path) -> Any:
    """Rows are merged, and nothing that was solved is shown."""
    content = make_content(tiers_alone(accounts), release=True)
    return [(row.label, row.tier) for row in content.groups]


def the_internal_report(accounts: Accounts, path: Path) -> Any:
    values = make_content(record_of(accounts, path), release=False).to_dict()
    return {name: one for name, one in values.items() if name != "hashes"}


# -- no pair of releases determines a budget ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", share(range(8), 1))
def test_two_releases_never_tell_what_the_person_chose_who_withdrew_joined_or_changed(part, tmp_path):
    """220 random pairs, 27 or 28 in each part."""
    for seed in range(part, 220, 8):
        assert not determined(random_pair(seed), lambda accounts: artefacts(accounts, tmp_path)), seed


@pytest.mark.parametrize("part", share(range(8), 1))
def test_nor_do_two_releases_without_a_registry(part, tmp_path):
    """Another 220 pairs: of budgets with declared tiers, and, in each third part, of numbers without names."""
    for seed in range(part, 220, 8):
        tiers = None if seed % 3 == 1 else TIERS
        assert not determined(random_pair(seed), lambda one: artefacts(one, tmp_path, False, tiers)), seed  # noqa: B023


@pytest.mark.parametrize(
    ("wrong", "least"),
    [
        (the_plan_for_release, 30),
        (the_plan_of_a_rare_tier_for_release, 1),
        (exact_counts, 30),
        (counts_rounded_to_twenty, 1),
        (the_rule_of_20_in_each_report, 1),
        (the_plan_s_table, 30),
        (scores_by_tier, 30),
        (the_internal_report, 30),
    ],
)
def test_the_adversary_finds_it_in_a_wrong_program(wrong, least, tmp_path):
    """Of the first 30 pairs; merging by the rule of 20 in each report alone is such a program."""
    found = [determined(random_pair(seed), lambda accounts: wrong(accounts, tmp_path)) for seed in range(30)]
    assert sum(found) >= least


def test_differences_count_numbers_in_texts_and_rows_that_are_in_one_report():
    assert differences({"a": [1, "5 of 1,000"]}, {"a": [2, "6 of 1,000", 7.0]}) == {
        "/a/length": 1, "/a/0": 1, "/a/1#0": 1.0, "/a/1#1": 0.0, "/a/2": 7.0,
    }  # fmt: skip


def test_one_person_with_another_budget_or_delta_changes_no_release(tmp_path):
    tier = np.arange(90) % 3
    usual = accounts_of(tier, np.zeros(90), filter_.home_orders([*TIERS.values()], DELTA)[tier])
    for charged in (False, True):
        seen = [artefacts(usual, tmp_path, charged)]
        for name, value in (("epsilon", 2.7), ("delta", 1e-4)):
            column = getattr(usual, name).copy()
            column[0] = value
            seen.append(artefacts(replace(usual, **{name: column}), tmp_path, charged))
        assert seen[0] == seen[1] == seen[2]


def test_without_declared_tiers_or_people_in_them_a_release_shows_none(tmp_path):
    tier = np.arange(90) % 3
    accounts = accounts_of(tier, np.zeros(90), filter_.home_orders([*TIERS.values()], DELTA)[tier])
    for tiers in (None, {"other": 2.0}, {"strict": 1.0}):
        content = make_content(record_of(accounts, tmp_path, tiers), release=True)
        [row] = content.groups
        assert (row.label, row.epsilon, row.right_guesses, content.odds) == ("all", None, None, ())
        assert "No tier is shown" in html.page(content)


# -- the internal report -------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path) -> RunRecord:
    """People of each tier who were in no run before, and people who used 60 % of their budgets."""
    tier = np.arange(120) % 3
    used = np.where(np.arange(120) < 60, 0.0, 0.6)
    accounts = accounts_of(tier, used, filter_.home_orders([*TIERS.values()], DELTA)[tier])
    return record_of(accounts, tmp_path, strategy="scale", batch=60)


def test_a_row_is_a_tier_and_says_what_its_people_used(mixed):
    """The oracle adds up each person's divergences at their home order."""
    content = make_content(mixed, release=False)
    assert [(row.tier, row.epsilon, row.records) for row in content.groups] == [(n, e, 40) for n, e in TIERS.items()]
    plan, [phase] = mixed.plan, mixed.plan.phases
    for row in content.groups:
        home = int(filter_.home_orders(row.epsilon, DELTA)[0])
        capacity = row.epsilon - filter_.offsets(DELTA, [home])[0, home]
        mine = [g for g, (epsilon, _) in enumerate(mixed.settings.lifetimes) if epsilon == row.epsilon]
        costs = [filter_.epsilon([phase.history(g)], DELTA, np.zeros(16)) for g in mine]
        at_home = [
            filter_.sums(phase.sample_rate[[g]][None], phase.noise_multiplier[[g]][None], [STEPS], 1)[0, home]
            / capacity
            for g in mine
        ]
        assert len(mine) == 2
        assert min(costs) >= 0
        assert row.lifetime.used_before == pytest.approx((0.0, 0.6))
        assert row.lifetime.used_by_run == pytest.approx((min(at_home), max(at_home)))
        left = [1 - used - cost for used, cost in zip(sorted(plan_used(mixed, mine)), at_home, strict=True)]
        assert row.lifetime.left == pytest.approx((min(left), max(left)), abs=1e-9)
    assert plan.groups.starts is not None


def plan_used(record: RunRecord, groups: list[int]) -> list[float]:
    found = []
    for g in groups:
        epsilon, order = record.settings.lifetimes[g]
        home = filter_.ORDERS.tolist().index(order)
        offset = filter_.offsets(DELTA, [home])[0, home]
        found.append((record.plan.groups.starts[g, home] - offset) / (epsilon - offset))
    return found


def test_odds_of_a_tier_do_not_fall_because_some_were_in_earlier_runs(mixed):
    """Over the lifetime they follow from the promise; from this run they are those of whoever it shows most about."""
    content = make_content(mixed, release=False)
    lifetimes = [row.right_guesses for row in content.groups]
    assert lifetimes == [right_over_lifetime(epsilon, DELTA) for epsilon in TIERS.values()]
    assert all(one <= other for one, other in pairwise(lifetimes))
    differ = False
    for row in content.groups:
        mine = [g for g, (epsilon, _) in enumerate(mixed.settings.lifetimes) if epsilon == row.epsilon]
        each = [right_of_advantage(Profile((mixed.plan.phases[0].history(g),)).advantage) for g in mine]
        differ |= max(each) > min(each)
        assert max(each) <= row.lifetime.right_from_this_run <= row.right_guesses
        assert row.lifetime.right_from_this_run <= max(each) + 1
    assert differ, "in some tier it shows more about those who were in no run before"
    released = make_content(mixed, release=True)
    assert [row.right_guesses for row in released.groups] == lifetimes


def test_the_lifetime_odds_rise_with_epsilon_and_are_no_higher_than_the_promise():
    epsilons_ = np.geomspace(0.05, 12, 60).tolist()
    for delta in (1e-9, 1e-5, 1e-2):
        found = [right_over_lifetime(epsilon, delta) for epsilon in epsilons_]
        assert all(one <= other for one, other in pairwise(found))
        assert all(one <= right_of_promise(epsilon, delta) for one, epsilon in zip(found, epsilons_, strict=True))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_no_history_that_the_filter_allows_exceeds_the_lifetime_curve(epsilon):
    """Gaussian steps, sampled or not, until the rule allows no more; the exact profile is the oracle."""
    start = filter_.offsets(DELTA, filter_.home_orders(epsilon, DELTA))[0]
    for rate, noise in ((1.0, 20.0), (0.05, 4.0), (0.3, 6.0)):
        steps = [1]
        while filter_.epsilon([epsilons.SampledGaussian(rate, noise, 2 * steps[-1])], DELTA, start) <= epsilon:
            steps.append(2 * steps[-1])
        profile = Profile((epsilons.SampledGaussian(rate, noise, steps[-1]),))
        assert len(steps) > 1, "some steps are allowed"
        assert right_of_advantage(profile.advantage) <= right_over_lifetime(epsilon, DELTA)
        points = epsilon * np.array([0.5, 0.8, 0.95, 1.0])
        assert (profile._divergence(points) <= filter_.lifetime_deltas(epsilon, DELTA, points)).all()


def test_the_lifetime_curve_is_the_sum_over_orders_that_can_vouch():
    """The slow twin: for each home order, each order whose cap is not negative adds w·δ·e^{(α−1)(ε−at)}."""
    for epsilon, at in ((1.0, 0.8), (3.0, 2.9), (0.2, 0.2)):
        worst = 0.0
        for home in range(16):
            total = 0.0
            for place, order in enumerate(filter_.ORDERS):
                delta = DELTA * (0.9 if place == home else 0.1 / 15)
                if epsilon - filter_.conversion(np.full(16, delta))[place] > 0:
                    total += delta * np.exp((order - 1) * (epsilon - at))
            worst = max(worst, total)
        assert filter_.lifetime_deltas(epsilon, DELTA, [at])[0] == pytest.approx(min(worst, 1.0))


def test_the_page_speaks_of_tiers_and_of_no_level(mixed):
    for release in (False, True):
        page = html.page(make_content(mixed, release))
        body = page[page.index("<body>") : page.index("The formal guarantee")]
        assert "level" not in re.sub(r"<[^>]+>", " ", body).replace("levels of lifetime budgets", "")
        assert "strict" in body
    assert "used before" in html.page(make_content(mixed, False))


def test_the_page_says_why_no_accuracy_is_shown_by_budget_also_where_none_was_counted(mixed):
    row = mixed.metrics[-1].model_copy(update={"per_class": [(30, 40)] * 2})
    for metrics in (row, row.model_copy(update={"per_group": None})):
        for release in (False, True):
            content = make_content(replace(mixed, metrics=(metrics,)), release)
            assert content.accuracy is not None
            assert content.accuracy.groups == ()
            why = "show by their difference" if release else "people of one tier may be in several of them"
            assert why in content.suppressed["accuracy_per_group"]
            assert content.suppressed["accuracy_per_group"] in html.page(content)


def test_a_run_of_an_earlier_version_says_that_lifetimes_were_not_recorded(mixed):
    old = replace(mixed, settings=mixed.settings.model_copy(update={"lifetimes": []}))
    for release in (False, True):
        content = make_content(old, release)
        assert [row.label for row in content.groups] == ["all"]
        assert content.odds == ()
    assert "did not record the lifetime budgets" in html.page(make_content(old, False))


# -- real runs -------------------------------------------------------------------------------------------------------


PEOPLE = [f"p{i}" for i in range(45)]


def real_pair(root: Path, event: str, tier: int) -> None:
    """Two trained runs with a person in this tier, and all that is written about them."""
    root.mkdir()
    with Registry.create(f"sqlite:///{root}/people.db") as registry:
        registry.enrol(PEOPLE[1:], [[*TIERS.values()][i % 3] for i in range(1, 45)])
        if event != "newcomer":
            registry.enrol(PEOPLE[:1], [*TIERS.values()][tier])
        for number in range(2):
            if number and event == "newcomer":
                registry.enrol(PEOPLE[:1], [*TIERS.values()][tier])
            elif number and event == "withdrawal":
                registry.withdraw(PEOPLE[:1])
            elif number:
                registry.change(PEOPLE[:1], [*TIERS.values()][(tier + 1) % 3])
            who = PEOPLE[int((event, number) in (("newcomer", 0), ("withdrawal", 1))) :]
            a_run(registry, root / f"run{number}", who)


def real_pair_alone(root: Path, event: str, tier: int) -> None:
    """The same without a registry."""
    for number in range(2):
        own = [*TIERS.values()][(tier + (number and event == "change")) % 3]
        levels = {one: [*TIERS.values()][i % 3] for i, one in enumerate(PEOPLE)} | {PEOPLE[0]: own}
        who = PEOPLE[int((event, number) in (("newcomer", 0), ("withdrawal", 1))) :]
        budgets = epsilons.Budgets([levels[one] for one in who], DELTA, unit="person", ids=who)
        plan = epsilons.plan(budgets, epsilons.Recipe(4, 10, 1.0), accountant="rdp")
        trained(root / f"run{number}", who, plan, budgets, None)


def a_run(registry: Registry, path: Path, who: list[str]) -> None:
    accounts = registry.account(who)
    budgets = accounts.budgets(0.25)
    plan = epsilons.plan(budgets, epsilons.Recipe(4, 10, 1.0), accountant="filter")
    trained(path, who, plan, budgets, registry.reserve(path.name, plan, accounts, budgets=budgets))


def trained(path: Path, who: list[str], plan: epsilons.Plan, budgets: epsilons.Budgets, reservation: Any) -> None:
    """A run, and all that is written about it."""
    torch.manual_seed(0)
    data = torch.randn(len(who), 3), torch.arange(len(who)) % 2
    metadata = {"tiers": TIERS, "provenance": [], "about": {"purpose": "A test."}}
    folder = epsilons.RunFolder(path, reservation=reservation, metadata=metadata)
    epsilons.fit(torch.nn.Linear(3, 2), epsilons.Records(data, persons=who), plan, budgets=budgets, run_dir=folder)
    for release in (False, True):
        for kind in ("html", "json"):
            epsilons.report(path, release).save(path / f"report{'-release' if release else ''}.{kind}")
    releasing.release(path)
    sheets.save_sheets(path, path / "sheets")


def published(root: Path) -> dict[str, str]:
    """Texts of all that may be published of both runs, without days, the registry's id and what the weights decide."""
    files = [*root.glob("run?/report-release.*"), *root.glob("run?/release/*"), *root.glob("run?/sheets/*")]
    weights = {"model.safetensors", "SHA256SUMS"}
    texts = {str(file.relative_to(root)): file.read_text() for file in files if file.name not in weights}
    return {name: re.sub(r"\b[0-9a-f]{32,64}\b", "HASH", text) for name, text in texts.items()}


@pytest.mark.parametrize("make", [real_pair, real_pair_alone])
@pytest.mark.parametrize("event", GROUPS)
def test_real_pairs_of_runs_are_published_alike_whatever_the_person_chose(event, make, tmp_path):
    for tier in (0, 1):
        make(tmp_path / str(tier), event, tier)
    one, other = published(tmp_path / "0"), published(tmp_path / "1")
    assert len(one) == 2 * (2 + 3 + 6)  # reports; card, guarantee, model.json; sheets
    assert one == other
    inside = [json.loads((tmp_path / f"{tier}/run1/report.json").read_text())["groups"] for tier in (0, 1)]
    assert event == "withdrawal" or inside[0] != inside[1]
    for file in (tmp_path / "0").rglob("*"):
        if file.is_file() and file.suffix in (".json", ".jsonl", ".html", ".db"):
            name = str(file.relative_to(tmp_path / "0"))
            assert (stat.S_IMODE(file.stat().st_mode) == 0o600) == (name not in one), name
    assert "Internal, confidential" in (tmp_path / "0/run0/report.html").read_text()
    assert json.loads((tmp_path / "0/run0/report.json").read_text())["version"] == "internal"


@pytest.mark.parametrize(
    "change", [lambda one: [9.0, one[1]], lambda one: [one[0] / 4, one[1]], lambda one: [one[0], 7.0]]
)
def test_lifetimes_that_are_not_those_of_the_run_are_found(change, tmp_path):
    """By the ledger's first line; and without it by the plan, unless the budget was only made larger."""
    with Registry.create(f"sqlite:///{tmp_path}/people.db") as registry:
        registry.enrol(PEOPLE, [[*TIERS.values()][i % 3] for i in range(45)])
        a_run(registry, tmp_path / "run", PEOPLE)
    file = tmp_path / "run/run.json"
    values = json.loads(file.read_text())
    assert (
        values["lifetimes"]
        == json.loads((tmp_path / "run/ledger.jsonl").read_text().split("\n")[0])["rests_on"]["lifetimes"]
    )
    values["lifetimes"][0] = change(values["lifetimes"][0])
    file.write_text(json.dumps(values))
    with pytest.raises(RunError, match="contradicts"):
        epsilons.report(tmp_path / "run")
