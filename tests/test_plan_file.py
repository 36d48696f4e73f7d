"""Plan files: written whole or not at all, read with suspicion, and never trusted about what they spend."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from by_hand import a_phase, by_hand
from epsilons import Budgets, Plan, Recipe, plan
from epsilons.accounting import ACCOUNTANTS, rdp
from epsilons.accounting.calibration import Histories, batch_epsilon
from epsilons.errors import BudgetExceededError, EpsilonsError, EpsilonsWarning, InputError, PlanError
from epsilons.planning import STRATEGIES
from epsilons.planning.plan_file import SCHEMA, digest_of, sealed
from epsilons.planning.plan_numbers import SHARES
from program import epsilons as program

TIERS = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}


@functools.cache
def made(strategy: str = "scale", accountant: str = "rdp") -> Plan:
    recipe = Recipe(steps=100, batch_size=600.5, clip_norm=0.2)
    return plan(Budgets.from_shares(TIERS, records=6000), recipe, strategy, accountant)


@functools.cache
def two_phases(divisors: tuple[float, float] = (20.0, 30.0)) -> Plan:
    numbers = {"weight": [1.0, 0.9], "noise_std": 3.0}
    first = a_phase(steps=50, expected_batch=divisors[0], **numbers)
    second = a_phase(steps=30, sample_rate=[0.0, 0.05], expected_batch=divisors[1], **numbers)
    return by_hand(first, second, delta=[1e-5, 1e-6], options={"weight": 0.5}).verify()


def edited(path, change, original: Plan | None = None, anew: bool = True):
    """The file of a plan with its JSON changed by `change`; its digest is computed anew, or is the one before."""
    values = copy.deepcopy((original or made()).to_dict())
    change(values)
    path.write_text(json.dumps(sealed(values) if anew else values), encoding="utf-8")
    return path


# -- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_plan_comes_back_to_the_last_bit(tmp_path, strategy, accountant):
    original = made(strategy, accountant)
    loaded = Plan.load(original.save(tmp_path / "plan.json"))
    assert loaded == original
    assert loaded.to_dict() == original.to_dict()
    for name in ("epsilons", "delta", "counts"):
        assert getattr(loaded, name).tobytes() == getattr(original, name).tobytes(), name
    for one, other in zip(loaded.phases, original.phases, strict=True):
        for name in ("sample_rate", "clip_norm", "weight", "noise_multiplier"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    np.testing.assert_array_equal(loaded.epsilon_spent(), original.epsilon_spent())


def test_several_phases_and_a_group_that_sits_one_out_come_back(tmp_path):
    loaded = Plan.load(two_phases().save(tmp_path / "plan.json"))
    assert loaded == two_phases()
    assert loaded.options == {"weight": 0.5}
    assert loaded.to_dict()["phases"][1]["groups"][0]["noise_multiplier"] is None


def test_an_accountant_of_one_s_own_is_asked_for_when_loading(tmp_path):
    def doubled(history, delta):
        return 2 * rdp.epsilon(history, delta)

    recipe = Recipe(steps=20, batch_size=100, clip_norm=1.0)
    path = plan(Budgets.from_shares(TIERS, records=6000), recipe, "scale", doubled).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="doubled"):
        Plan.load(path)
    assert (Plan.load(path, accountant=doubled).epsilon_spent() <= [1, 2, 3]).all()


def test_a_file_holds_the_keys_of_the_contract():
    # docs/concepts.md: other programs read these.
    values = json.loads(json.dumps(made().to_dict(), allow_nan=False))
    keys = "schema epsilons_version strategy options accountant adjacency records batch_size steps groups phases"
    assert {*keys.split(), "noise_std", "expected_batch"} <= set(values)
    rows = {"sample_rate", "clip_norm", "weight", "noise_multiplier"}
    assert all({"epsilon", "delta", "records", "epsilon_spent"} | rows <= set(row) for row in values["groups"])
    (phase,) = values["phases"]
    assert {"steps", "noise_std", "expected_batch", "groups"} <= set(phase)
    assert all(set(row) == rows for row in phase["groups"])
    assert [row["epsilon"] for row in values["groups"]] == [1, 2, 3]
    # Repeated at the top for a reader without loops, only where there is one phase.
    assert [[row[name] for name in rows] for row in values["groups"]] == [
        [row[name] for name in rows] for row in phase["groups"]
    ]
    two = two_phases().to_dict()
    assert "noise_std" not in two
    assert not rows & set(two["groups"][0])


# -- schema 1 ------------------------------------------------------------------------------------------------------

OLD = Path(__file__).parent / "golden" / "plans_of_schema_1"
OLD_PLANS = json.loads((OLD / "expected.json").read_text())


@pytest.mark.parametrize("name", OLD_PLANS)
def test_a_file_of_schema_1_is_read_and_has_the_digest_it_had(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)  # one of them has declared shares
        loaded = Plan.load(OLD / f"{name}.json")
        assert loaded.digest == OLD_PLANS[name]["digest"]  # ledgers of earlier runs are bound to it
        np.testing.assert_allclose(loaded.epsilon_spent(), OLD_PLANS[name]["epsilon_spent"], rtol=1e-9)
        assert Plan.load(loaded.save(tmp_path / "plan.json")) == loaded
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 2


def test_a_file_of_schema_1_that_was_edited_is_refused(tmp_path):
    values = json.loads((OLD / "scale.json").read_text())
    assert values["groups"][0]["spends"] < 1
    values["options"] = {"by": "weight"}
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(PlanError, match="changed by hand"):
        Plan.load(tmp_path / "plan.json")
    values["groups"][0]["spends"] = 0.5
    (tmp_path / "plan.json").write_text(json.dumps(sealed(values)))
    with pytest.raises(PlanError, match="epsilon_spent is not what"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_that_was_changed_in_the_middle_of_a_run_is_refused(tmp_path):
    with pytest.raises(PlanError, match="changed in the middle of a run"):
        Plan.load(OLD / "changed.json")
    for schema in (1, 2):
        path = edited(tmp_path / "plan.json", lambda values: values.update(charged_before=0, schema=schema))  # noqa: B023
        with pytest.raises(PlanError, match="changed in the middle of a run"):
            Plan.load(path)


def test_the_keys_of_schema_1_are_not_taken_in_schema_2(tmp_path):
    def old_key(values):
        values["groups"][0]["spends"] = values["groups"][0].pop("epsilon_spent")

    with pytest.raises(PlanError, match="epsilon_spent"):
        Plan.load(edited(tmp_path / "plan.json", old_key))
    with pytest.raises(PlanError, match="adjacency"):
        Plan.load(
            edited(tmp_path / "plan.json", lambda values: values.update(adjacency="replace-by-null, roster public"))
        )


def test_a_digest_stays_as_it_was_recorded():
    assert two_phases((20.0, 20.0)).digest == "48b0a9d5bd45d563987d00ddfd73f591fea1d6837ad1bf1983af5a45d041c17e"


def test_a_newer_minor_key_is_passed_over(tmp_path):
    assert Plan.load(edited(tmp_path / "plan.json", lambda values: values.update(colour="green"))) == made()


# -- whole or not at all -----------------------------------------------------------------------------------------


def test_a_file_that_could_not_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path, monkeypatch):
    path = made().save(tmp_path / "plan.json")
    before = path.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Mock(side_effect=OSError(28, "No space left on device")))
            with pytest.raises(EpsilonsError):
                made("uniform").save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["plan.json"]


def test_saving_where_no_folder_can_be_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        made().save(tmp_path / "file" / "plan.json")


def test_a_plan_cut_off_anywhere_is_refused(tmp_path):
    whole = made().save(tmp_path / "plan.json").read_bytes()
    for length in {0, 1, 2, len(whole) // 3, len(whole) // 2, len(whole) - 20, len(whole) - 3}:
        (tmp_path / "cut.json").write_bytes(whole[:length])
        with pytest.raises(PlanError, match=r"cut\.json"):
            Plan.load(tmp_path / "cut.json")


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'"plan"', b"{}", b"\xff\xfe\x00", b"{" * 100_000, b"1e999"])
def test_what_is_no_plan_is_refused(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(PlanError):
            Plan.load(path)


def test_a_newer_schema_is_refused_with_the_reason(tmp_path):
    with pytest.raises(PlanError, match="newer epsilons"):
        Plan.load(edited(tmp_path / "plan.json", lambda values: values.update(schema=SCHEMA + 1)))


@pytest.mark.parametrize("schema", [0, -1, "1", 1.5, None, True])
def test_a_schema_that_never_was_is_refused(tmp_path, schema):
    with pytest.raises(PlanError):
        Plan.load(edited(tmp_path / "plan.json", lambda values: values.update(schema=schema)))


# -- edits that contradict themselves ------------------------------------------------------------------------------


def first(values, where: str) -> dict:
    """A row of the file by name: top-level, its first group, its phase, or the phase's first group."""
    return {
        "top": values,
        "group": values["groups"][0],
        "phase": values["phases"][0],
        "row": values["phases"][0]["groups"][0],
    }[where]


REPEATED = {
    "row": "noise_multiplier sample_rate clip_norm weight",
    "group": "noise_multiplier sample_rate clip_norm weight records",
    "phase": "noise_std expected_batch steps",
    "top": "noise_std expected_batch steps records",
}
CONTRADICTIONS = [(where, key) for where, keys in REPEATED.items() for key in keys.split()]


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize(("where", "key"), CONTRADICTIONS)
def test_a_file_edited_in_one_place_only_contradicts_itself_and_is_refused(tmp_path, where, key, factor):
    def change(values):
        row = first(values, where)
        row[key] = type(row[key])(row[key] * factor)

    with pytest.raises(PlanError):
        Plan.load(edited(tmp_path / "plan.json", change))


def less_noise(values, factor):
    """Lower the noise everywhere it is written, so that nothing contradicts anything."""
    for row in (values, *values["phases"]):
        row["noise_std"] *= factor
    for row in (*values["groups"], *(row for phase in values["phases"] for row in phase["groups"])):
        row["noise_multiplier"] *= factor


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("factor", [0.999, 0.9, 0.1])
def test_a_file_edited_consistently_so_that_it_overspends_is_refused(tmp_path, accountant, factor):
    path = edited(tmp_path / "plan.json", lambda values: less_noise(values, factor), made("scale", accountant))
    with pytest.raises(BudgetExceededError) as caught:
        Plan.load(path)
    assert caught.value.exit_code == 3


def test_a_file_edited_consistently_so_that_it_spends_less_is_taken(tmp_path):
    path = edited(tmp_path / "plan.json", lambda values: less_noise(values, 1.1))
    assert (Plan.load(path).epsilon_spent() < made().epsilon_spent()).all()


def test_more_steps_a_stricter_budget_or_a_smaller_delta_is_noticed(tmp_path):
    def longer(values):
        values["steps"] += 1
        values["phases"][0]["steps"] += 1

    def stricter(values):
        values["groups"][1]["epsilon"] *= 0.999

    def smaller(values):
        values["groups"][2]["delta"] = 9e-6

    for change in (longer, stricter, smaller):
        with pytest.raises(BudgetExceededError):
            Plan.load(edited(tmp_path / "plan.json", change))


def test_the_spends_a_file_claims_are_recomputed_and_not_believed(tmp_path):
    def boast(values):
        less_noise(values, 0.8)
        for row in values["groups"]:
            row["epsilon_spent"] = 0.001

    with pytest.raises(BudgetExceededError):
        Plan.load(edited(tmp_path / "plan.json", boast))
    for claim in (0.001, 0.99, 1.1, 1e308):
        with pytest.raises(PlanError, match="epsilon_spent"):
            Plan.load(edited(tmp_path / "plan.json", lambda values: values["groups"][0].update(epsilon_spent=claim)))  # noqa: B023
    other_version = Plan.load(
        edited(tmp_path / "plan.json", lambda values: values["groups"][0].update(epsilon_spent=0.9999))
    )
    np.testing.assert_array_equal(other_version.epsilon_spent(), made().epsilon_spent())


def test_a_named_accountant_cannot_be_replaced_when_loading(tmp_path):
    path = edited(tmp_path / "plan.json", lambda values: less_noise(values, 0.8))
    with pytest.raises(BudgetExceededError):
        Plan.load(path, accountant=lambda history, delta: 0.0)


def test_nothing_that_a_person_asked_for_is_in_an_error_about_a_file(tmp_path):
    recipe = Recipe(steps=10, batch_size=100, clip_norm=1.0)
    odd = plan(Budgets([7.7777] * 500 + [1.0] * 500, delta=1e-5), recipe, "scale", "rdp")
    changes = [
        lambda values: values["groups"][1].update(epsilon="7.7777"),
        lambda values: values["groups"][1].update(records=-7.7777),
        lambda values: values["groups"][1].update(sample_rate=7.7777),
        lambda values: values["groups"][1].update(delta=1e-12),
        lambda values: values["groups"].reverse(),
        lambda values: less_noise(values, 0.5),
    ]
    for change in changes:
        with pytest.raises(EpsilonsError) as caught:
            Plan.load(edited(tmp_path / "plan.json", change, odd))
        assert "7.77" not in str(caught.value)


# -- Plan files changed by hand: refused, or warned about, or they promise no more than their numbers give -----------


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
def of(name: str) -> Plan:
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
    values, path = json.loads(json.dumps(of(name).to_dict())), tmp_path / "plan.json"
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
    saved = json.loads(of(name).save(tmp_path / "plan.json").read_text())
    found, warned = loaded(tmp_path / "plan.json", saved)
    assert found == of(name)
    assert ["declared by the caller" in words for words in warned] == [True] * (name == "declared")


def test_a_plan_of_more_levels_than_are_solved_for_is_taken_as_it_was_made(tmp_path):
    many = Budgets(np.linspace(1, 4, 1200))
    for strategy in ("sample", "exclude"):  # rates of rounded budgets, and of all
        one = plan(many, Recipe(steps=20, batch_size=100, clip_norm=1.0), strategy, "rdp")
        assert Plan.load(one.save(tmp_path / "plan.json")) == one


# -- those that were found ------------------------------------------------------------------------------------------


def loaded_after(tmp_path, change: Callable[[dict[str, Any]], None], anew: bool, name: str = "scale") -> list[str]:
    path = edited(tmp_path / "plan.json", change, of(name), anew)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Plan.load(path)
    return [str(w.message) for w in caught]


def test_a_roster_edited_into_declared_shares_is_refused_or_warned_about(tmp_path):
    def swap(values):
        values["adjacency"] = SHARES

    with pytest.raises(PlanError, match="changed by hand"):
        loaded_after(tmp_path, swap, anew=False)
    assert ["declared by the caller" in words for words in loaded_after(tmp_path, swap, anew=True)] == [True]
    with pytest.raises(PlanError, match="one delta for all"):  # planning gives no such plan under declared shares
        loaded_after(tmp_path, swap, anew=True, name="two deltas")


def test_a_delta_that_permits_to_publish_a_record_is_warned_about(tmp_path):
    for delta, told in ((1 / 601, False), (1 / 600, True), (0.9, True)):
        scaled = of("scale")
        groups = dataclasses.replace(scaled.groups, deltas=[delta, 1e-5, 1e-5])

        def change(values, delta=delta, scaled=scaled, groups=groups):
            values["groups"][0].update(delta=delta, epsilon_spent=0.0)
            values["groups"][0]["epsilon_spent"] = float(dataclasses.replace(scaled, groups=groups).epsilon_spent()[0])

        assert ["1/records" in words for words in loaded_after(tmp_path, change, anew=True)] == [True] * told
        with pytest.raises(PlanError, match="changed by hand"):
            loaded_after(tmp_path, change, anew=False)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("factor", [1e-300, 0.5, 1.001, 1e300])
def test_an_expected_batch_that_the_rates_do_not_give_is_refused(tmp_path, name, factor):
    def change(values):
        for place in (values, values["phases"][-1]):
            if "expected_batch" in place:
                place["expected_batch"] *= factor

    with pytest.raises(PlanError, match="expected_batch"), warnings.catch_warnings():
        loaded_after(tmp_path, change, anew=True, name=name)


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
    text = of("scale").save(tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("{", "{" + inserted, 1))
    with pytest.raises(PlanError, match="not complete JSON"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_was_only_written_out_anew_is_the_same_file(tmp_path):
    values = of("scale").to_dict()
    shuffled = dict(reversed(list(values.items())))
    shuffled["records"], shuffled["options"] = float(600), {}
    text = json.dumps(shuffled, ensure_ascii=True).replace('"records": 600.0', '"records": 600')
    (tmp_path / "plan.json").write_text(text.replace("61.25", "6.125e1"))
    assert Plan.load(tmp_path / "plan.json") == of("scale")


def test_what_the_command_line_prints_as_json_is_a_plan_file_with_risks_too(tmp_path):
    who = ["--shares", "1:50%,2:50%", "--records", "400", "--batch-size", "40", "--steps", "10", "--accountant", "rdp"]
    for more in ([], ["--risk"]):
        printed = program("plan", *who, "--json", *more).out
        assert ("risk" in json.loads(printed)) == bool(more)
        (tmp_path / "plan.json").write_text(printed)
        assert Plan.load(tmp_path / "plan.json").records == 400
