"""Plan files changed by hand: refused, or warned about, or they promise no more than their numbers give.

A generator changes every value of saved plans of every strategy, at one place and at all places that repeat it. Each
change is tried three ways: with the digest as it was (a hand edit), without one, and with the digest computed anew
(somebody who means it).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.accounting import rdp
from epsilons.accounting.calibration import Histories, batch_epsilon
from epsilons.errors import EpsilonsError, EpsilonsWarning, PlanError
from epsilons.planning import STRATEGIES
from epsilons.planning.plan_file import digest_of, sealed
from epsilons.planning.plan_numbers import SHARES
from program import epsilons as program

TIERS = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
RECIPE = Recipe(steps=60, batch_size=61.25, clip_norm=0.2)
OPTIONS: dict[str, dict[str, Any]] = {"exclude": {"threshold": 2.0}, "scale": {"by": "weight"}, "mix": {"floor": 0.02}}


@functools.cache
def budgets(deltas: bool = False) -> Budgets:
    one = Budgets.from_shares(TIERS, records=600)
    if not deltas:
        return one
    epsilon = one.epsilons[one.group]
    return Budgets(epsilon, np.where((epsilon == 2) & (np.arange(600) % 2 == 0), 1e-6, 1e-5))


#: Every strategy, with options; several deltas; declared shares.
PLANS: dict[str, Callable[[], Plan]] = {
    **{name: functools.partial(plan, budgets(), RECIPE, name, "rdp") for name in STRATEGIES},
    **{
        f"{name} {options}": functools.partial(plan, budgets(), RECIPE, name, "rdp", **options)
        for name, options in OPTIONS.items()
    },
    "two deltas": functools.partial(plan, budgets(deltas=True), RECIPE, "sample", "rdp"),
    "declared": functools.partial(plan, budgets(), RECIPE, "scale", "rdp", public_shares=TIERS, public_records=700),
}


@functools.cache
def made(name: str) -> Plan:
    return PLANS[name]()


def loaded(path, values: Any) -> tuple[Plan | None, list[str]]:
    """The plan, None if it was refused, and what was warned about."""
    path.write_text(json.dumps(values), encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = Plan.load(path)
        except EpsilonsError:
            found = None
    return found, [str(w.message) for w in caught if issubclass(w.category, EpsilonsWarning)]


# -- the edits -----------------------------------------------------------------------------------------------------


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the JSON, as a path of keys, the guarantee's words and the digest aside."""
    if path and path[-1] not in ("guarantee", "digest", "epsilons_version"):
        yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def at(values: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda inner, key: inner[key], path, values)


def repeated(values: dict[str, Any], path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """This place, and all others that say the same: in a phase, and at the top of one-phase plans."""
    if len(values["phases"]) > 1:
        return [path]
    if len(path) == 1 and path[0] in ("noise_std", "expected_batch", "steps"):
        return [path, ("phases", 0, path[0])]
    if len(path) == 3 and path[0] == "groups" and path[2] in values["phases"][0]["groups"][0]:
        return [path, ("phases", 0, *path)]
    return [path]


WORDS = ["", "rdp", "pld", "add-or-remove, shares declared", "zero-out, roster public", "3", "1e-300", "\x1b[31m"]
ODDITIES = [None, True, False, -1, 0, 1, 2, -0.0, 1e-300, 1e-9, 1 / 600, 0.5, 0.9, 0.999, 1e300, 10**18, 10**400]
ODDITIES += [math.nan, math.inf, -math.inf, [], {}, [{}], *WORDS]


def changes(value: Any) -> list[Any]:
    """Other values for this one."""
    found = list(ODDITIES)
    if isinstance(value, int | float) and not isinstance(value, bool):
        found += [value * factor for factor in (0.5, 2, 10, 1e-3, 1 - 1e-4, 1 + 1e-4, -1)]
        found += [value + 1, value - 1, str(value), float(value), round(value)]
    return found


def edits(values: dict[str, Any], seed: int, many: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many changed copies, with what was changed: set, taken away, swapped with another, put in twice or new."""
    chosen, every = random.Random(seed), list(places(values))
    for number in range(many):
        path, kind = chosen.choice(every), number % 8
        copied, where = copy.deepcopy(values), "/".join(map(str, path))
        if kind < 5:
            other = chosen.choice(changes(at(values, path)))
            for place in repeated(values, path) if kind % 2 else [path]:
                at(copied, place[:-1])[place[-1]] = other
            yield f"{where} = {other!r}", copied
        elif kind == 5:
            del at(copied, path[:-1])[path[-1]]
            yield f"{where} missing", copied
        elif kind == 6:
            alike = [other for other in every if other[-1] == path[-1] and len(other) == len(path) and other != path]
            if alike:
                other = chosen.choice(alike)
                at(copied, path[:-1])[path[-1]], at(copied, other[:-1])[other[-1]] = at(values, other), at(values, path)
                yield f"{where} swapped with {'/'.join(map(str, other))}", copied
        else:
            holder = at(copied, path[:-1])
            if isinstance(holder, list):
                holder.append(copy.deepcopy(at(values, path)))
            else:
                holder["another"] = at(values, path)
            yield f"{where} put in once more", copied


def check_promise(found: Plan, warned: list[str], values: dict[str, Any], what: str) -> None:
    """The promise is what the accountant gives for the numbers in the file, or there was a warning."""
    rates = np.array([[row["sample_rate"] for row in phase["groups"]] for phase in values["phases"]])
    noises = np.array(
        [
            [phase["noise_std"] / (row["weight"] * row["clip_norm"]) for row in phase["groups"]]
            for phase in values["phases"]
        ]
    )
    steps = tuple(phase["steps"] for phase in values["phases"])
    epsilon, delta, records = (
        np.array([row[key] for row in values["groups"]]) for key in ("epsilon", "delta", "records")
    )
    truth = batch_epsilon(rdp.epsilon, Histories(rates, noises, steps), delta)
    assert (truth <= epsilon * (1 + 1e-12)).all(), what
    assert (found.epsilons == epsilon).all(), what
    assert (found.delta == delta).all(), what
    assert (np.array([row["epsilon_spent"] for row in values["groups"]]) >= truth * 0.999).all(), what
    for phase, rate in zip(values["phases"], rates, strict=True):
        as_drawn = phase["expected_batch"] == pytest.approx(float(records @ rate), rel=1e-5)
        assert as_drawn or any("expected_batch" in words for words in warned), what
    if found.adjacency == SHARES:
        assert any("declared by the caller" in words for words in warned), what
    if (delta >= 1 / records.sum()).any():
        assert any("1/records" in words for words in warned), what


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # absurd numbers are part of it
@pytest.mark.parametrize("name", PLANS)
def test_an_edited_file_is_refused_or_warned_about_or_its_promise_is_true(tmp_path, request, name):
    values, path = json.loads(json.dumps(made(name).to_dict())), tmp_path / "plan.json"
    refused = taken = 0
    many = 400 if request.config.getoption("--slow") else 32
    for what, changed in edits(values, seed=len(name), many=many):
        found, warned = loaded(path, sealed(changed))
        refused, taken = refused + (found is None), taken + (found is not None)
        if found is not None:
            check_promise(found, warned, changed, f"{name}: {what}")
        if digest_of(changed) == digest_of(values):
            continue
        assert loaded(path, {**changed, "digest": values["digest"]})[0] is None, f"{name}: {what}, by hand"
        changed.pop("digest", None)
        found, warned = loaded(path, changed)
        assert found is None or any("no digest" in words for words in warned), f"{name}: {what}, without a digest"
    assert refused > many // 4
    assert taken > 2


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_as_it_was_made_is_taken_and_only_what_it_cannot_show_is_warned_about(tmp_path, name):
    saved = json.loads(made(name).save(tmp_path / "plan.json").read_text())
    found, warned = loaded(tmp_path / "plan.json", saved)
    assert found == made(name)
    assert len(warned) == (name == "declared")


def test_a_plan_of_more_levels_than_are_solved_for_is_taken_as_it_was_made(tmp_path):
    many = Budgets(np.linspace(1, 4, 1200))
    for strategy in ("sample", "scale", "exclude", "uniform"):
        one = plan(many, Recipe(steps=20, batch_size=100, clip_norm=1.0), strategy, "rdp")
        assert Plan.load(one.save(tmp_path / "plan.json")) == one


# -- those that were found ------------------------------------------------------------------------------------------


def by_hand(tmp_path, change: Callable[[dict[str, Any]], None], anew: bool, name: str = "scale") -> list[str]:
    values = made(name).to_dict()
    change(values)
    (tmp_path / "plan.json").write_text(json.dumps(sealed(values) if anew else values), encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Plan.load(tmp_path / "plan.json")
    return [str(w.message) for w in caught]


def test_a_roster_edited_into_declared_shares_is_refused_or_warned_about(tmp_path):
    def swap(values):
        values["adjacency"] = SHARES

    with pytest.raises(PlanError, match="changed by hand"):
        by_hand(tmp_path, swap, anew=False)
    assert ["declared by the caller" in words for words in by_hand(tmp_path, swap, anew=True)] == [True]
    with pytest.raises(PlanError, match="one delta for all"):  # planning gives no such plan under declared shares
        by_hand(tmp_path, swap, anew=True, name="two deltas")


def test_a_delta_that_permits_to_publish_a_record_is_warned_about(tmp_path):
    for delta, told in ((1 / 601, False), (1 / 600, True), (0.9, True)):
        scaled = made("scale")
        groups = dataclasses.replace(scaled.groups, deltas=[delta, 1e-5, 1e-5])

        def change(values, delta=delta, scaled=scaled, groups=groups):
            values["groups"][0].update(delta=delta, epsilon_spent=0.0)
            values["groups"][0]["epsilon_spent"] = float(dataclasses.replace(scaled, groups=groups).epsilon_spent()[0])

        assert ["1/records" in words for words in by_hand(tmp_path, change, anew=True)] == [True] * told
        with pytest.raises(PlanError, match="changed by hand"):
            by_hand(tmp_path, change, anew=False)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("factor", [1e-300, 0.5, 1.001, 1e300])
def test_an_expected_batch_that_the_rates_do_not_give_is_refused(tmp_path, name, factor):
    def change(values):
        for place in (values, values["phases"][-1]):
            if "expected_batch" in place:
                place["expected_batch"] *= factor

    with pytest.raises(PlanError, match="expected_batch"), warnings.catch_warnings():
        by_hand(tmp_path, change, anew=True, name=name)


def test_a_strategy_of_one_s_own_may_divide_by_another_number_and_its_file_says_so(tmp_path):
    def mine(budgets, recipe, accountant):
        right = STRATEGIES["scale"](budgets, recipe, accountant)
        return dataclasses.replace(right, phases=[dataclasses.replace(right.phases[0], expected_batch=64.0)])

    saved = plan(budgets(), RECIPE, mine, "rdp").save(tmp_path / "plan.json")
    with pytest.warns(EpsilonsWarning, match="expected_batch, by which updates are divided"):
        assert Plan.load(saved).expected_batch == 64.0
    values = json.loads(saved.read_text())
    values["strategy"] = "scale"
    saved.write_text(json.dumps(sealed(values)))
    with pytest.raises(PlanError, match="expected_batch"):
        Plan.load(saved)


@pytest.mark.parametrize("inserted", ['"accountant": "pld",', '"records": 1,', '"x": NaN,', '"x": -Infinity,'])
def test_a_key_given_twice_and_what_is_no_number_are_refused(tmp_path, inserted):
    text = made("scale").save(tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("{", "{" + inserted, 1))
    with pytest.raises(PlanError, match="not complete JSON"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_was_only_written_out_anew_is_the_same_file(tmp_path):
    values = made("scale").to_dict()
    shuffled = dict(reversed(list(values.items())))
    shuffled["records"], shuffled["options"] = float(600), {}
    text = json.dumps(shuffled, ensure_ascii=True).replace('"records": 600.0', '"records": 600')
    (tmp_path / "plan.json").write_text(text.replace("61.25", "6.125e1"))
    assert Plan.load(tmp_path / "plan.json") == made("scale")


def test_what_the_command_line_prints_as_json_is_a_plan_file_with_risks_too(tmp_path):
    who = ["--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "10", "--accountant", "rdp"]
    for more in ([], ["--risk"]):
        printed = program("plan", *who, "--json", *more).out
        assert ("risk" in json.loads(printed)) == bool(more)
        (tmp_path / "plan.json").write_text(printed)
        assert Plan.load(tmp_path / "plan.json").records == 400
