"""Several runs of one plan: what they spend together, the slots that count them, and fits on some of the records."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import random
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import epsilons
from by_hand import a_phase, by_hand
from epsilons import Budgets, Plan, PlanFolder, Recipe, SampledGaussian
from epsilons.accounting import ACCOUNTANTS, rdp
from epsilons.auditing.membership import attack
from epsilons.auditing.membership.outcomes import certified
from epsilons.auditing.membership.shadows import placebo_plan, shadow_plan
from epsilons.draws.randomness import Randomness, key_from_seed
from epsilons.errors import BudgetExceededError, DataError, PlanError, RunError
from epsilons.planning import STRATEGIES, risk
from epsilons.planning.plan_file import sealed
from epsilons.training.validation import groups_of
from options import make_flat
from program import CONFIG, people
from program import epsilons as command_line
from small_runs import (
    CLASSES,
    FEATURES,
    RECORDS,
    a_model,
    everyone,
    losses_of,
    parameters_of,
    some_budgets,
    some_data,
    train,
)
from sums import OVERSTATED

BUDGETS = Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=6000)
RECIPE = Recipe(steps=30, batch_size=100, clip_norm=1.0)
RUNS = 4
#: SHA-256 of the numbers of `by_hand(a_phase())`, computed by the version before plans for several runs.
DIGEST_BEFORE = "58dccb4923c35d1639459e334c3d49f473a498282f52f5c7c7c1d640aceae4f8"


@cache
def several(strategy: str = "scale", accountant: str = "rdp", runs: int = RUNS) -> Plan:
    return epsilons.plan(BUDGETS, RECIPE, strategy, accountant, runs=runs)


def small_plan(runs: int = 3, steps: int = 3) -> Plan:
    return epsilons.plan(some_budgets(), Recipe(steps, 12.0, 0.5), "scale", "rdp", runs=runs)


@pytest.fixture
def folder(tmp_path: Path) -> PlanFolder:
    return PlanFolder.create(tmp_path / "tuning", small_plan())


def begun(plan: Plan | PlanFolder, **options) -> tuple[nn.Module, epsilons.Private]:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"budgets": some_budgets()} | options
    data = options.pop("data", some_data())
    return model, make_flat(model, optimizer, data, plan, **options)


def trained(plan: Plan | PlanFolder, **options) -> tuple[list[torch.Tensor], epsilons.Private]:
    model, private = begun(plan, **options)
    with private:
        train(private, model)
    return parameters_of(model), private


# -- what the runs spend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_runs_together_spend_what_their_steps_one_by_one_spend(strategy, accountant):
    plan = several(strategy, accountant)
    assert (plan.epsilon_spent() <= plan.epsilons).all()
    for group in range(len(plan.groups)):
        history = [phase.history(group) for _ in range(RUNS) for phase in plan.phases]  # run after run
        spent = ACCOUNTANTS[accountant](history, plan.delta[group])
        assert plan.epsilon_spent()[group] == pytest.approx(spent, rel=1e-9)
        assert plan.of_one_run.epsilon_spent()[group] < plan.epsilon_spent()[group]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_noise_of_n_runs_is_that_of_one_run_of_n_times_as_many_steps(accountant):
    longer = Recipe(RUNS * RECIPE.steps, RECIPE.batch_size, RECIPE.clip_norm)
    once = epsilons.plan(BUDGETS, longer, "scale", accountant)
    np.testing.assert_allclose(several(accountant=accountant).noise_multiplier, once.noise_multiplier, rtol=2e-5)


def test_steps_taken_alternately_in_all_runs_spend_what_the_plan_certifies():
    """Brute force: a history of single steps, in the order in which interleaved runs make them."""
    plan = several("sequential")
    for group in range(len(plan.groups)):
        steps = [phase.history(group, steps=1) for phase in plan.phases for _ in range(RUNS * phase.steps)]
        assert rdp.epsilon(steps, plan.delta[group]) == pytest.approx(plan.epsilon_spent()[group], rel=1e-9)


def test_a_strategy_that_ignores_the_number_of_runs_is_refused():
    def forgetful(budgets, recipe, accountant):
        return STRATEGIES["scale"](budgets, recipe, rdp.epsilon)

    with pytest.raises(BudgetExceededError):
        epsilons.plan(BUDGETS, RECIPE, forgetful, "rdp", runs=2)


def test_a_custom_strategy_and_accountant_are_calibrated_for_all_runs():
    def basic(history, delta):
        return sum(10 * part.sample_rate * part.steps / part.noise_multiplier for part in history)

    def mine(budgets, recipe, accountant):
        return STRATEGIES["uniform"](budgets, recipe, accountant)

    plan = epsilons.plan(BUDGETS, RECIPE, mine, basic, runs=3)
    assert plan.accountant_fn is basic
    assert plan.epsilon_spent()[0] == pytest.approx(1.0, rel=1e-4)
    assert 3 * basic([plan.phases[0].history(0)], 1e-5) == pytest.approx(1.0, rel=1e-4)


def test_the_risk_of_several_runs_is_that_of_one_run_with_all_their_steps():
    plan = several("sample")
    phases = [dataclasses.replace(phase, steps=RUNS * phase.steps) for phase in plan.phases]
    longer = dataclasses.replace(plan, phases=tuple(phases), runs=1)
    for together, once in zip(risk(plan), risk(longer), strict=True):
        assert together.advantage == pytest.approx(once.advantage, abs=1e-9)
        assert together.tail_excess == pytest.approx(once.tail_excess, abs=1e-6)


def test_the_spend_so_far_counts_the_other_runs_in_full():
    plan = several()
    done = 10
    history = [SampledGaussian(plan.sample_rate[0], plan.noise_multiplier[0], (RUNS - 1) * RECIPE.steps + done)]
    assert plan.spent_after((done,))[0] >= rdp.epsilon(history, plan.delta[0])
    assert (plan.spent_after((RECIPE.steps,)) == plan.epsilon_spent()).all()


@pytest.mark.parametrize("runs", [0, -1, 1.5, float("nan"), True, 10**9])
def test_a_number_of_runs_that_no_plan_has_is_refused(runs):
    with pytest.raises(PlanError):
        epsilons.plan(BUDGETS, RECIPE, "scale", "rdp", runs=runs)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_plan_for_one_run_is_saved_as_before_there_were_several():
    plan = by_hand(a_phase())
    assert plan.digest == DIGEST_BEFORE
    assert plan.to_dict()["schema"] == 2
    assert "runs" not in plan.to_dict()
    assert epsilons.plan(BUDGETS, RECIPE, "scale", "rdp", runs=1) == epsilons.plan(BUDGETS, RECIPE, "scale", "rdp")


def test_a_plan_for_several_runs_is_saved_and_loaded_with_their_number(tmp_path):
    plan = several("sequential")
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    assert loaded.runs == RUNS
    assert loaded != loaded.of_one_run
    np.testing.assert_array_equal(loaded.epsilon_spent(), plan.epsilon_spent())


@pytest.mark.parametrize(
    "change", [{"runs": RUNS + 1}, {"runs": None}, {"schema": 2}, {"runs": 1.5}, {"runs": 0}, {"runs": "4"}], ids=str
)
def test_an_edited_number_of_runs_is_refused(tmp_path, change):
    values = several().to_dict() | change
    values = {key: value for key, value in values.items() if value is not None}
    (tmp_path / "plan.json").write_text(json.dumps(sealed(values)))
    with pytest.raises((PlanError, BudgetExceededError)):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_says_how_many_runs_its_promise_is_about():
    plan = several()
    assert f"These {RUNS} runs together" in plan.guarantee
    assert "This run alone" not in plan.guarantee
    assert "scores on private records" in plan.guarantee
    assert f"{RUNS} runs of 30 steps" in plan.title
    assert f"{RUNS} runs of 30 steps" in repr(plan)
    assert "This run alone" in several(runs=1).guarantee


# -- slots ------------------------------------------------------------------------------------------------------------


def test_as_many_runs_begin_as_the_plan_certifies_and_no_more(folder):
    for number in range(1, 4):
        _, private = trained(folder)
        assert private.ledger.slot is not None
        assert (private.ledger.slot.number, private.ledger.slot.of) == (number, 3)
        assert f"run {number} of 3" in str(private.ledger)
    assert folder.left == 0
    model = a_model()
    with pytest.raises(RunError, match="All 3 runs"):
        begun(folder, run_dir=folder.path.parent / "fourth")
    assert not (folder.path.parent / "fourth").exists()
    assert parameters_of(model) is not None


def test_a_plan_for_several_runs_is_refused_without_the_folder_that_counts_them(tmp_path):
    with pytest.raises(RunError, match="PlanFolder"):
        begun(small_plan())
    with pytest.raises(RunError, match="PlanFolder"):
        begun(small_plan(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_slot_is_durable_before_the_ledger_has_a_line(folder, monkeypatch):
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    run_dir = folder.path.parent / "run"
    begun(folder, run_dir=run_dir)[1].close()
    slots = folder.path / "slots"
    ledger = synced.index(str(run_dir / "ledger.jsonl"))
    assert synced.index(str(slots / "1")) < synced.index(str(slots)) < ledger


def test_an_input_that_is_refused_claims_no_slot(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    with pytest.raises(RunError, match="not empty"):
        begun(folder, run_dir=tmp_path / "full")
    with pytest.raises(RunError, match="JSON"):
        begun(folder, run_dir=tmp_path / "new", metadata={"what": object()})
    with pytest.raises(DataError):
        begun(folder, budgets=some_budgets((1.0, 2.0)))
    assert folder.begun == 0


def test_a_run_that_was_interrupted_keeps_its_slot_and_resumes_in_its_own_folder(folder, tmp_path):
    whole, _ = trained(PlanFolder.create(tmp_path / "other", small_plan()), seed=5)
    model, private = begun(folder, run_dir=tmp_path / "run", seed=5)
    with private:
        train(private, model, until=2)
    assert folder.begun == 1
    again, private = trained(folder, run_dir=tmp_path / "run", seed=5, resume=True)
    assert folder.begun == 1
    assert private.ledger.slot is not None
    assert private.ledger.slot.number == 1
    assert private.ledger.charged == (3,)
    assert all(map(torch.equal, whole, again))


def test_a_run_is_not_resumed_into_the_slots_of_another_folder(folder, tmp_path):
    begun(folder, run_dir=tmp_path / "run")[1].close()
    other = PlanFolder.create(tmp_path / "other", small_plan())
    other.claim()
    with pytest.raises(RunError, match="was not claimed"):
        begun(other, run_dir=tmp_path / "run", resume=True)


def test_a_run_is_resumed_by_its_own_plan_where_the_plan_s_folder_is_gone(folder, tmp_path):
    begun(folder, run_dir=tmp_path / "run")[1].close()
    shutil.rmtree(folder.path)
    _, private = trained(Plan.load(tmp_path / "run" / "plan.json"), run_dir=tmp_path / "run", resume=True)
    assert private.ledger.charged == (3,)


def test_a_slot_that_was_not_written_completely_stays_claimed(folder):
    (folder.path / "slots" / "1").write_text("")
    assert folder.claim().number == 2
    (folder.path / "slots" / "1").unlink()  # a lower number that is free again is not given away
    assert folder.claim().number == 3
    with pytest.raises(RunError):
        folder.claim()


def test_slots_of_another_plan_and_missing_slots_are_refused(folder):
    folder.claim()
    small_plan(runs=7).save(folder.path / "plan.json")
    with pytest.raises(RunError, match="another plan"):
        PlanFolder(folder.path).claim()
    shutil.rmtree(folder.path / "slots")
    with pytest.raises(RunError, match="cannot be read"):
        folder.claim()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_the_slots_no_more_runs_begin_than_certified(tmp_path, seed):
    """Files are damaged and strange ones appear, between claims; none is removed."""
    rng, folder = random.Random(seed), PlanFolder.create(tmp_path / "tuning", small_plan(runs=5))
    junk = [b"", b"{", b"null", b"[]", b'{"plan": 3}', b"\xff\xfe", b'{"claim": null}', b"[" * 100_000]
    claimed: list[int] = []
    for _ in range(40):
        if rng.random() < 0.5:
            with suppress(RunError):
                claimed.append(folder.claim().number)
        else:
            names = [*map(str, claimed), "07", "x", "0", "4", ".tmp"]
            (folder.path / "slots" / rng.choice(names)).write_bytes(rng.choice(junk))
    assert len(set(claimed)) == len(claimed) <= 5


def test_a_plan_s_folder_is_made_once_and_for_its_owner(folder, tmp_path):
    with pytest.raises(RunError, match="not empty"):
        PlanFolder.create(folder.path, small_plan())
    with pytest.raises(PlanError, match="holds no plan"):
        PlanFolder(tmp_path / "nowhere")
    folder.claim()
    paths = [folder.path, folder.path / "slots", folder.path / "plan.json", folder.path / "slots" / "1"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def test_copies_of_the_object_claim_in_the_same_folder(folder):
    copied = pickle.loads(pickle.dumps(folder))
    assert [folder.claim().number, copied.claim().number] == [1, 2]
    assert folder.begun == copied.begun == 2


@pytest.mark.parametrize("given", [{"seed": 1}, {"key": key_from_seed(1)}, {}], ids=["seed", "key", "secret"])
def test_two_runs_of_a_plan_never_share_a_key(folder, given):
    (one, first), (two, second) = trained(folder, **given), trained(folder, **given)
    assert first.ledger.key != second.ledger.key
    assert not torch.equal(one[0], two[0])


def claim_all(path: Path, pipe) -> None:
    folder, numbers = PlanFolder(path), []
    while True:
        try:
            numbers.append(folder.claim().number)
        except RunError:
            break
    pipe.send(numbers)


@pytest.mark.slow
def test_processes_that_claim_at_once_get_different_slots(tmp_path):
    context = multiprocessing.get_context("fork")
    for repetition in range(5):
        folder = PlanFolder.create(tmp_path / str(repetition), small_plan(runs=200))
        pipes = [context.Pipe() for _ in range(4)]
        workers = [context.Process(target=claim_all, args=(folder.path, pipe)) for _, pipe in pipes]
        for worker in workers:
            worker.start()
        claimed = [number for pipe, _ in pipes for number in pipe.recv()]
        for worker in workers:
            worker.join()
        assert sorted(claimed) == list(range(1, 201))


# -- some of the records ----------------------------------------------------------------------------------------------


def test_each_record_of_a_fold_takes_its_row_of_the_one_plan():
    budgets = some_budgets()
    strict = budgets.group != 1  # no record of the middle group
    np.testing.assert_array_equal(
        groups_of(budgets.subset(strict), small_plan(), int(strict.sum()), is_subset=True), budgets.group[strict]
    )


@pytest.mark.parametrize(
    "budgets",
    [Budgets([1.0, 3.0], delta=1e-5), Budgets([1.0] * 21), Budgets([1.0, 2.0], delta=2e-5)],
    ids=["another epsilon", "more records", "another delta"],
)
def test_records_that_the_plan_does_not_have_are_refused_as_a_fold(budgets):
    with pytest.raises(DataError, match="not some of the plan's records"):
        groups_of(budgets, small_plan(), len(budgets), is_subset=True)


def test_some_of_the_records_are_refused_unless_they_are_said_to_be(folder):
    inputs, targets = some_data()
    half = np.arange(0, RECORDS, 2)
    data = (inputs[half], targets[half])
    with pytest.raises(DataError, match="for_subset"):
        begun(folder, data=data, budgets=some_budgets().subset(half))
    trained(folder.for_subset(), data=data, budgets=some_budgets().subset(half))


def test_the_divisor_of_a_fold_is_the_plan_s(tmp_path):
    """Every record is drawn, so the update is known: clipped gradients and noise over the plan's expected batch."""
    plan, key, fold = everyone(steps=1), key_from_seed(3), np.arange(0, RECORDS, 3)
    budgets, (inputs, targets) = some_budgets((500.0, 1000.0)), some_data()
    model, before = a_model(), parameters_of(a_model())
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for i in fold:
        gradients = torch.autograd.grad(
            losses_of(model, (inputs[i : i + 1], targets[i : i + 1])).sum(), [*model.parameters()]
        )
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients))
        clip_norm = plan.clip_norm[budgets.group[i]]
        for part, gradient in zip(total, gradients, strict=True):
            part += gradient.double() * min(1.0, float(clip_norm / (OVERSTATED * norm)))
    noise = torch.from_numpy(Randomness(key).noise(0, 0, sum(p.numel() for p in total)))
    options = {"data": (inputs[fold], targets[fold]), "budgets": budgets.subset(fold), "key": key}
    after, _ = trained(PlanFolder.create(tmp_path / "folds", plan).for_subset(), **options)
    parts = torch.split(noise, [p.numel() for p in total])
    for old, new, part, drawn in zip(before, after, total, parts, strict=True):
        update = (part + plan.noise_std * drawn.reshape(part.shape)) / RECORDS
        torch.testing.assert_close(new, (old - 0.5 * update).float(), rtol=1e-5, atol=1e-6)


# -- reports, audits, attacks -----------------------------------------------------------------------------------------


def test_a_report_says_which_run_of_how_many_and_what_is_not_covered(folder, tmp_path):
    inputs, targets = some_data()
    half = np.arange(0, RECORDS, 2)
    options = {"data": (inputs[half], targets[half]), "budgets": some_budgets().subset(half)}
    trained(folder.for_subset(), run_dir=tmp_path / "run", **options)
    for release in (False, True):
        report = epsilons.report(tmp_path / "run", release=release)
        values = report.to_dict()
        assert values["runs"] == {"number": 1, "of": 3, "records": 30}
        text = " ".join([*values["summary"], *values["not_covered"]])
        assert "run 1 of 3 that share the budgets" in text
        assert "30 of 60 records" in text
        assert "scores on private records" in text
        assert "this report is about one" not in text
        assert "These 3 runs together" in values["guarantee"]


def test_a_report_refuses_a_run_that_names_no_slot_of_its_plan(folder, tmp_path):
    trained(folder, run_dir=tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    values = json.loads(path.read_text())
    for slot in (None, values["plan_slot"] | {"number": 2}):
        path.write_text(json.dumps(values | {"plan_slot": slot}))
        with pytest.raises(RunError, match="contradicts"):
            epsilons.report(tmp_path / "run")


def test_an_audit_compares_one_run_with_what_one_run_may_spend():
    plan = several(runs=2)
    result = epsilons.audit(plan, canaries=20, seed=0)
    assert result.plan == plan.digest
    assert result.setting["runs"] == 2
    assert "compared with what one run may spend" in str(result)
    assert [group.epsilon_spent for group in result.groups] == pytest.approx(plan.of_one_run.epsilon_spent())


def test_shadows_follow_one_run_and_a_placebo_is_certified_for_all():
    plan = several()
    assert shadow_plan(plan, 6000).runs == 1
    np.testing.assert_allclose(shadow_plan(plan, 6000).epsilon_spent(), plan.of_one_run.epsilon_spent())
    assert placebo_plan(plan).runs == RUNS


def test_the_advice_for_several_runs_is_that_for_one_run_of_all_their_steps():
    together = epsilons.advise(BUDGETS, RECIPE, "rdp", runs=RUNS)
    once = epsilons.advise(BUDGETS, dataclasses.replace(RECIPE, steps=RUNS * RECIPE.steps), "rdp")
    assert together.plan.runs == RUNS
    for a, b in zip(together.ways, once.ways, strict=True):
        assert (a.name, a.records) == (b.name, b.records)
        assert a.signal == pytest.approx(b.signal, rel=1e-4)
        assert a.tail_excess == pytest.approx(b.tail_excess, abs=1e-4)
    assert together.full_batch == pytest.approx(once.full_batch, rel=1e-4)


def test_an_attack_on_a_plan_for_several_runs_says_that_it_is_about_one():
    budgets = Budgets(np.resize([2.0, 8.0], RECORDS), delta=1e-3)
    plan = epsilons.plan(budgets, Recipe(4, 12.0, 1.0), "scale", "rdp", runs=5)
    result = attack(
        nn.Linear(FEATURES, CLASSES), some_data(), plan, budgets=budgets, shadows=8, attacks=["loss"], jobs=1
    )
    assert "is for 5 runs, and this is about one of them" in str(result)
    assert result.groups[0].certified_auc == certified(plan.of_one_run, np.array([0])).area


def test_a_run_s_folder_is_not_taken_for_a_plan_s_folder(folder, tmp_path):
    trained(folder, run_dir=tmp_path / "run")
    with pytest.raises(PlanError, match="slots"):
        PlanFolder(tmp_path / "run")


# -- on the command line: epsilons plan --runs, [privacy] runs, epsilons train --plan FOLDER ---------------------------


SHARES = ["--shares", "1:50%,4:50%", "--records", "600", "--batch-size", "60", "--steps", "5", "--accountant", "rdp"]
COUNTED = CONFIG + 'runs = 2\nplan_folder = "tuning"\n'


@pytest.fixture
def _in_a_folder_of_people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people())


def config(text: str, name: str = "people.toml") -> str:
    Path(name).write_text(text)
    return name


@pytest.mark.usefixtures("_in_a_folder_of_people")
def test_a_plan_for_several_runs_is_saved_as_a_folder_that_counts_them():
    command_line("plan", *SHARES, "--runs", "3", "-o", "tuning").succeeded(
        "3 runs of 5 steps", "3 runs together", "counts"
    )
    assert PlanFolder("tuning").left == 3
    command_line("plan", *SHARES, "--runs", "3", "-o", "tuning.json").is_refused(2, "kept in a folder")
    command_line("plan", *SHARES, "--runs", "0").is_refused(2)


@pytest.mark.usefixtures("_in_a_folder_of_people")
def test_a_config_trains_as_many_runs_as_it_asks_for_whatever_their_learning_rate():
    command_line("train", config(COUNTED)).succeeded("Run 1 of 2", "All 2 runs of the plan together")
    command_line("train", config(COUNTED.replace("lr = 0.2", "lr = 0.4"), "other.toml")).succeeded("Run 2 of 2")
    command_line("train", "people.toml").is_refused(2, "2 have begun")
    assert PlanFolder("tuning").left == 0


@pytest.mark.usefixtures("_in_a_folder_of_people")
@pytest.mark.parametrize(
    "change", [("steps = 4", "steps = 5"), ("batch_size = 10", "batch_size = 12"), ('"scale"', '"sample"')], ids=str
)
def test_a_config_that_asks_for_another_table_is_refused(change):
    command_line("train", config(COUNTED)).succeeded()
    command_line("train", config(COUNTED.replace(*change))).is_refused(2, "another than the config asks for")
    assert PlanFolder("tuning").begun == 1


@pytest.mark.usefixtures("_in_a_folder_of_people")
def test_every_seed_is_a_run_of_the_plan():
    seeds = COUNTED.replace("lr = 0.2", "lr = 0.2\nseeds = [0, 1, 2]")
    command_line("train", config(seeds)).is_refused(2, "3 cannot begin")
    command_line("train", config(seeds.replace("[0, 1, 2]", "[0, 1]"))).succeeded("Runs 1 to 2 of 2")
    assert PlanFolder("tuning").left == 0


@pytest.mark.usefixtures("_in_a_folder_of_people")
def test_an_interrupted_run_continues_without_another_slot():
    command_line("train", config(COUNTED), "--run-dir", "run").succeeded()
    command_line("train", "people.toml", "--run-dir", "run", "--resume").succeeded()
    assert PlanFolder("tuning").begun == 1


@pytest.mark.usefixtures("_in_a_folder_of_people")
def test_a_plan_s_folder_is_given_in_place_of_a_plan():
    command_line("train", config(COUNTED)).succeeded()
    Path("tuning").rename("moved")
    command_line("train", config(CONFIG), "--plan", "moved").succeeded("Run 2 of 2")
    command_line("train", config(CONFIG), "--plan", "moved/plan.json").is_refused(2, "PlanFolder")
    command_line("train", config(CONFIG), "--plan", "moved").is_refused(2, "2 have begun")


@pytest.mark.usefixtures("_in_a_folder_of_people")
@pytest.mark.parametrize("lines", ["runs = 2", 'plan_folder = "tuning"', 'runs = 0\nplan_folder = "tuning"'])
def test_a_number_of_runs_and_the_folder_that_counts_them_belong_together(lines):
    command_line("train", config(CONFIG + lines + "\n")).is_refused(2, "runs")


def test_a_run_that_was_cut_off_before_its_ledger_keeps_its_slot_and_a_copy_of_it_does_not(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    first = folder.claim(run)
    shutil.copytree(run, tmp_path / "copy")
    assert folder.claim(run) == first  # nothing was charged in between
    assert folder.claim(tmp_path / "copy").number == 2
    (run / "ledger.jsonl").write_text("{}\n{}\n")
    assert folder.claim(run).number == 3
