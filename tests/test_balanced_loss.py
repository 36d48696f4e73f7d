"""The balanced loss: what each class weighs under a plan, the shift that makes up for it, and where it is applied."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import epsilons
from epsilons.errors import DataError, InputError, PlanError
from epsilons.planning import balance
from options import fit_flat
from program import CONFIG, change, people
from program import epsilons as command

#: People of each tier in each of three classes, as declared.
TIED = {1.0: [30, 0, 70], 2.0: [1, 1, 1], 4.0: [0.0, 0.75, 0.25]}
PEOPLE = {1.0: 100, 2.0: 300, 4.0: 200}


def plan_of(people, strategy="scale", **options):
    budgets = epsilons.Budgets([e for e, count in people.items() for _ in range(count)], delta=1e-5)
    recipe = epsilons.Recipe(steps=30, batch_size=40, clip_norm=0.5)
    return epsilons.plan(budgets, recipe, strategy, "rdp", **options)


def weights_by_hand(plan, people, tied):
    """Weights and numbers of people of each class, group by group and class by class."""
    weight, count = [0.0] * 3, [0.0] * 3
    for group, epsilon in enumerate(plan.epsilons.tolist()):
        for k, number in enumerate(tied[epsilon]):
            of_class = people[epsilon] * number / sum(tied[epsilon])
            count[k] += of_class
            for phase in plan.phases:
                length = float(phase.clip_norm[group] * phase.weight[group])
                weight[k] += phase.steps * float(phase.sample_rate[group]) * length * of_class
    return np.array(weight), np.array(count)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["uniform", "scale", "sample", "mix"])
def test_a_class_weighs_what_its_people_can_add_to_the_sum(strategy):
    plan = plan_of(PEOPLE, strategy)
    found = balance(plan, TIED)
    weight, count = weights_by_hand(plan, PEOPLE, TIED)
    assert found.weight == pytest.approx(weight / weight.sum())
    assert found.share == pytest.approx(count / count.sum())
    signal = math.sqrt(sum(p.steps for p in plan.phases)) * weight.sum() / plan.steps / plan.phases[0].noise_std
    assert found.signal == pytest.approx(signal / 3)


def test_rows_count_relative_to_their_own_sum():
    plan = plan_of(PEOPLE)
    as_shares = {epsilon: [number / sum(row) for number in row] for epsilon, row in TIED.items()}
    one, other = balance(plan, TIED), balance(plan, as_shares)
    assert one.shift == pytest.approx(other.shift)


def test_classes_with_strict_people_are_shifted_down_in_training_and_so_learned_more():
    found = balance(plan_of(PEOPLE), {1.0: [1, 0], 2.0: [0, 1], 4.0: [0, 1]})
    assert found.relative[0] < 1 < found.relative[1]
    by_hand = np.log(found.weight) + (found.tau - 1) * np.log(found.weight / found.share)
    assert found.shift == pytest.approx(by_hand)
    assert found.shift[0] < np.log(found.share[0])


@pytest.mark.parametrize("strategy", ["uniform", "scale", "sample"])
def test_tiers_that_are_not_tied_to_classes_leave_the_shares_alone(strategy):
    found = balance(plan_of(PEOPLE, strategy), {epsilon: [1, 2, 5] for epsilon in PEOPLE})
    assert found.relative == pytest.approx(np.ones(3))
    assert found.shift == pytest.approx(np.log([1 / 8, 2 / 8, 5 / 8]))
    assert found.warning(["a", "b", "c"]) is None


def test_a_class_of_low_weight_is_warned_of_by_name():
    warning = balance(plan_of(PEOPLE), {1.0: [1, 0], 2.0: [0, 1], 4.0: [0, 1]}).warning(["sick", "well"])
    assert "'sick'" in warning
    assert "'well'" not in warning


@pytest.mark.parametrize(
    "classes",
    [
        {1.0: [1, 2], 2.0: [1, 2]},  # a row is missing
        {1.0: [1, 2], 2.0: [1, 2], 4.0: [1, 2, 3]},
        {1.0: [1], 2.0: [1], 4.0: [1]},
        {1.0: [1, -2], 2.0: [1, 2], 4.0: [1, 2]},
        {1.0: [1, math.nan], 2.0: [1, 2], 4.0: [1, 2]},
        {1.0: [1, math.inf], 2.0: [1, 2], 4.0: [1, 2]},
        {1.0: [0, 0], 2.0: [1, 2], 4.0: [1, 2]},
        {1.0: [1, 0], 2.0: [1, 0], 4.0: [1, 0]},  # nobody is in the second class
    ],
)
def test_classes_that_do_not_fit_the_plan_are_refused(classes):
    with pytest.raises(PlanError, match="classes needs"):
        epsilons.balanced_loss(plan_of(PEOPLE), classes)


def test_a_class_that_is_never_drawn_has_no_loss():
    plan = plan_of(PEOPLE, "exclude", threshold=2.0)
    classes = {1.0: [1, 0], 2.0: [0, 1], 4.0: [0, 1]}
    assert balance(plan, classes).relative[0] == 0
    with pytest.raises(PlanError, match="ever drawn"):
        epsilons.balanced_loss(plan, classes)


def test_tau_follows_from_the_plan_and_declared_numbers_alone():
    """No argument takes data, so neither counts of the training labels nor scores on test data can enter."""
    assert list(inspect.signature(epsilons.balanced_loss).parameters) == ["plan", "classes"]
    assert list(inspect.signature(balance).parameters) == ["plan", "classes"]
    found = balance(plan_of(PEOPLE), TIED)
    assert found.tau == pytest.approx(max(1.0, found.signal ** (1 / 8)))
    quiet = plan_of({epsilon: 20 * count for epsilon, count in PEOPLE.items()})
    assert balance(quiet, TIED).tau > found.tau >= 1.0


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_shifted_logits_record_by_record():
    plan = plan_of(PEOPLE)
    logits, targets = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3
    shift = torch.from_numpy(balance(plan, TIED).shift)
    before = logits.clone()
    losses = epsilons.balanced_loss(plan, TIED)(logits, targets)
    by_hand = [-torch.log_softmax(z.double() + shift, 0)[k] for z, k in zip(logits, targets, strict=True)]
    assert losses == pytest.approx(torch.stack(by_hand).numpy(), abs=1e-5)
    assert torch.equal(logits, before)


def test_the_loss_of_a_record_does_not_depend_on_other_records():
    loss = epsilons.balanced_loss(plan_of(PEOPLE), TIED)
    logits, targets = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    together = loss(logits, targets)
    alone = torch.cat([loss(logits[i : i + 1], targets[i : i + 1]) for i in range(40)])
    assert torch.allclose(together, alone, atol=1e-6)


def test_logits_of_another_shape_are_refused():
    loss = epsilons.balanced_loss(plan_of(PEOPLE), TIED)
    for shape in ((4, 2), (4,), (4, 3, 5)):
        with pytest.raises(DataError, match=r"\(records, 3\)"):
            loss(torch.zeros(shape), torch.zeros(shape[:1], dtype=torch.long))


def test_the_loss_does_not_show_the_shift():
    assert repr(epsilons.balanced_loss(plan_of(PEOPLE), TIED)) == "balanced_loss of 3 classes"


def digits(split):
    data = epsilons.data.load("digits", split)
    return torch.from_numpy(data.inputs), torch.from_numpy(data.targets)


@pytest.mark.filterwarnings("ignore:The budgets differ, and each class has one")
def test_a_class_of_strict_people_is_learned_and_the_plan_is_the_same():
    (inputs, targets), (test_inputs, test_targets) = digits("train"), digits("test")
    strict = 8
    budgets = epsilons.Budgets.by_class(targets.numpy(), {k: 1.0 if k == strict else 3.0 for k in range(10)})
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=100, batch_size=256, clip_norm=2.0))
    digest, spent = plan.digest, plan.epsilon_spent().tolist()
    classes = {1.0: [float(k == strict) for k in range(10)], 3.0: [float(k != strict) for k in range(10)]}

    def trained(loss):
        model = torch.nn.Linear(64, 10)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        private = epsilons.make_private(model, optimizer, (inputs, targets), plan, budgets=budgets, seed=0)
        for x, y in private.batches:
            private.backward(loss(model(x), y))
            private.step()
        private.close()
        assert private.plan.digest == digest
        assert private.plan.epsilon_spent().tolist() == spent
        right = (model(test_inputs).argmax(1) == test_targets).double()
        return float(right.mean()), float(right[test_targets == strict].mean())

    plain = trained(lambda z, y: F.cross_entropy(z, y, reduction="none"))
    balanced = trained(epsilons.balanced_loss(plan, classes))
    assert plain[1] < 0.3
    assert balanced[1] > 0.6
    assert balanced[0] > plain[0] + 0.03


# -- fit ---------------------------------------------------------------------------------------------------------------


def fitted(**options):
    budgets = epsilons.Budgets([1.0, 1.0, 4.0, 4.0] * 20, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=20, clip_norm=0.5), accountant="rdp")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    data = torch.randn(80, 3, generator=torch.Generator().manual_seed(1)), torch.arange(80) % 2
    run = fit_flat(model, data, plan, budgets=budgets, evaluation=data, key=b"k" * 32, **options)
    return [p.detach() for p in model.parameters()], run.metrics[-1], plan, model, data


CLASSES = {1.0: [90, 10], 4.0: [20, 80]}


def test_fit_trains_on_the_balanced_loss_and_scores_the_logits_as_they_are():
    plain, _, plan, _, _ = fitted()
    by_name, metrics, _, model, (inputs, targets) = fitted(balance=CLASSES)
    by_hand, _, _, _, _ = fitted(loss=epsilons.balanced_loss(plan, CLASSES))
    assert all(torch.equal(one, other) for one, other in zip(by_name, by_hand, strict=True))
    assert not torch.equal(plain[0], by_name[0])
    logits = model(inputs).detach()
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, targets)), abs=1e-6)
    assert metrics["accuracy"] == float((logits.argmax(1) == targets).double().mean())


def test_balance_is_for_cross_entropy():
    with pytest.raises(InputError, match="balance is for the loss cross_entropy"):
        fitted(balance=CLASSES, loss=lambda z, y: F.cross_entropy(z, y, reduction="none"))


# -- configs and the command line --------------------------------------------------------------------------------------

BALANCE = "classes = { 1 = { no = 9, yes = 1 }, 4 = { yes = 1 } }"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people(120))
    Path("people.toml").write_text(CONFIG)
    change("delta = 1e-3", f"delta = 1e-3\n{BALANCE}")


def test_a_config_with_balance_trains_under_the_same_plan(folder):
    command("train", "people.toml").succeeded()
    change("steps = 4", "steps = 4\nbalance = true")
    command("train", "people.toml").succeeded()
    plans = [json.loads(Path(f"runs/people-{i}/plan.json").read_text()) for i in (1, 2)]
    assert plans[0]["digest"] == plans[1]["digest"]
    stated = [json.loads(Path(f"runs/people-{i}/run.json").read_text())["training"] for i in (1, 2)]
    assert "balance" not in stated[0]
    assert stated[1]["balance"] == [[9.0, 1.0], [0.0, 1.0]]


def test_plan_says_what_classes_weigh_before_training(folder):
    command("plan", "people.toml").succeeded("weight / people", "WARNING", "'no'", "balance = true")
    flags = ["--shares", "1:50%,4:50%", "--records", "400", "--batch-size", "20", "--steps", "5", "--accountant", "rdp"]
    command("plan", *flags, "--classes", "1:9/1,4:0/1").succeeded("weight / people", "WARNING", "'0'")
    untied = command("plan", *flags, "--classes", "1:1/1,4:1/1")
    untied.succeeded("1.00")
    assert "WARNING" not in untied.out
    command("advise", *flags, "--classes", "1:9/1,4:0/1").succeeded("weight / people", "class 0", "balance = true")
    for wrong in ("1:9/1", "1:9/one,4:0/1", "1:9/1,4:-1/2"):
        command("plan", *flags, "--classes", wrong).is_refused(2, "lasses")


def test_weights_of_classes_are_not_shown_where_a_group_is_small(folder):
    """They follow from all clip norms, which follow from what a few people chose."""
    flags = ["--shares", "1:97%,4:3%", "--records", "400", "--batch-size", "20", "--steps", "5", "--accountant", "rdp"]
    printed = command("plan", *flags, "--classes", "1:9/1,4:0/1")
    printed.succeeded("epsilon_spent")
    assert "weight / people" not in printed.out
    assert "WARNING" not in printed.out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (BALANCE, "", ["training.balance needs budgets.classes"]),
        ("yes = 1 } }", "maybe = 1 } }", ["maybe", "data.classes"]),
        ("4 = { yes", "open = { yes", ["'open'", "no tier"]),
        ("no = 9", "no = -9", ["budgets.classes"]),
    ],
)
def test_declared_classes_that_do_not_fit_are_refused(folder, old, new, words):
    change("steps = 4", "steps = 4\nbalance = true")
    change(old, new)
    command("train", "people.toml").is_refused(2, *words)


def test_attacks_and_registries_do_not_take_a_balanced_config(folder):
    change("steps = 4", "steps = 4\nbalance = true")
    command("attack", "people.toml").is_refused(2, "training.balance")
    change('target = "label"', 'target = "label"\nperson = "id"')
    change('drop = ["id"]', "drop = []")
    change("[model]", "[registry]\nshare = 0.5\n[model]")
    command("train", "people.toml").is_refused(2, "budgets.classes does not go with [registry]")
