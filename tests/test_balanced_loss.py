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
from torch.utils.data import DataLoader, TensorDataset

import epsilons
from epsilons import Budgets, SampledGaussian
from epsilons.accounting import ACCOUNTANTS
from epsilons.errors import DataError, InfeasibleBudgetError, InputError, PlanError, RunError
from epsilons.opacus import PrivacyEngine
from epsilons.planning import balance
from epsilons.planning.risk_profile import dominating
from epsilons.reporting.plan_words import curve_of
from epsilons.training.fitting.losses import balanced_loss
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


# -- Counts of classes that the plan charges

COUNTED = Budgets([1.0, 1.0, 3.0, 3.0] * 100, delta=1e-4)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_count_of_classes_is_one_gaussian_mechanism_more_in_each_run(accountant, runs):
    recipe = epsilons.Recipe(steps=20, batch_size=40, clip_norm=1.0)
    plan, free = (
        epsilons.plan(COUNTED, recipe, "scale", accountant, runs=runs, class_noise=noise) for noise in (15.0, None)
    )
    assert (plan.noise_multiplier > free.noise_multiplier * 1.001).all()
    for group, spent in enumerate(plan.epsilon_spent()):
        steps = SampledGaussian(0.1, float(plan.noise_multiplier[group]), 20 * runs)
        whole = [steps, SampledGaussian(1.0, 15.0, runs)]
        assert spent == pytest.approx(ACCOUNTANTS[accountant](whole, 1e-4), rel=1e-9)
        assert list(plan.history(group)) == whole
        assert spent <= plan.epsilons[group]
        assert spent >= plan.epsilons[group] * 0.999
    so_far = plan.spent_after([0])
    assert so_far[0] >= ACCOUNTANTS[accountant]([SampledGaussian(1.0, 15.0, 1)], 1e-4) * (1 - 1e-9)
    assert "Gaussian noise of 15 people" in plan.guarantee
    with pytest.raises(InfeasibleBudgetError):
        epsilons.plan(COUNTED, recipe, accountant=accountant, class_noise=2.0)


def test_what_others_compute_of_a_plan_with_counts_includes_them():
    recipe = epsilons.Recipe(steps=4, batch_size=40, clip_norm=1.0)
    plan = epsilons.plan(COUNTED, recipe, accountant="rdp", class_noise=15.0)
    count = SampledGaussian(1.0, 15.0, 1)
    assert dominating(plan, np.array([0, 1]))[-1] == count
    assert [line.epsilon_spent[0] for line in curve_of(plan).lines] == plan.spent_after([0]).tolist()
    assert "noise of 15 people" in str(plan)
    model = torch.nn.Linear(3, 2)
    engine = PrivacyEngine(accountant="rdp")
    data = DataLoader(TensorDataset(torch.randn(400, 3), torch.arange(400) % 2), batch_size=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data,
        target_epsilon=COUNTED,
        target_delta=None,
        epochs=0.4,  # four steps of a tenth
        max_grad_norm=1.0,
        plan=plan,
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    steps = plan.phases[0].history(1)
    assert engine.get_epsilon(1e-4) == pytest.approx(ACCOUNTANTS["rdp"]([steps, count], 1e-4))


def test_a_plan_with_counts_is_saved_and_read(tmp_path):
    plan = epsilons.plan(COUNTED, epsilons.Recipe(3, 40, 1.0), accountant="rdp", class_noise=15.0)
    assert epsilons.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert plan.to_dict()["schema"] == 7
    for key, value in (("class_noise", None), ("class_noise", 30.0), ("schema", 2)):
        (tmp_path / "other.json").write_text(json.dumps(plan.to_dict() | {key: value}))
        with pytest.raises(epsilons.EpsilonsError):
            epsilons.Plan.load(tmp_path / "other.json")
    for wrong in ({"select": epsilons.Selection("poisson", 3)}, {"class_noise": -1.0}):
        with pytest.raises(PlanError):
            epsilons.plan(COUNTED, epsilons.Recipe(3, 40, 1.0), accountant="rdp", **{"class_noise": 15.0, **wrong})


def test_classes_are_counted_once_with_the_noise_that_was_charged(tmp_path):
    plan = epsilons.plan(COUNTED, epsilons.Recipe(3, 40, 1.0), accountant="rdp", class_noise=15.0)
    labels = torch.arange(400) % 4 // 3  # class 1: one in four, all of them at 3
    expected = {1.0: [200, 0], 3.0: [100, 100]}
    draws = []
    for seed in range(300):
        counts = epsilons.class_counts(plan, labels, COUNTED, tmp_path / f"{seed}.json", classes=2, seed=seed)
        assert min(min(row) for row in counts.values()) >= 1
        draws.append([counts[1.0][0] - expected[1.0][0], *np.subtract(counts[3.0], expected[3.0])])
    assert np.abs(np.mean(draws, axis=0)).max() < 5 * 15 / math.sqrt(300)
    assert np.std(draws, axis=0) == pytest.approx([15.0] * 3, rel=5 / math.sqrt(600))
    again = epsilons.class_counts(plan, 1 - labels, COUNTED, tmp_path / "0.json", classes=2, seed=7)
    assert again[3.0][0] - 100 == draws[0][1]  # the labels are not looked at again
    loss = balanced_loss(plan, counts)
    assert loss(torch.zeros(2, 2), torch.tensor([0, 1])).isfinite().all()
    other = epsilons.plan(COUNTED, epsilons.Recipe(4, 40, 1.0), accountant="rdp", class_noise=15.0)
    with pytest.raises(RunError, match="another plan"):
        epsilons.class_counts(other, labels, COUNTED, tmp_path / "0.json", classes=2)
    free = epsilons.plan(COUNTED, epsilons.Recipe(3, 40, 1.0), accountant="rdp")
    with pytest.raises(InputError):
        epsilons.class_counts(plan, labels, COUNTED, tmp_path / "wrong.json", classes=2, persons=np.arange(400) - 1)
    for made, given, classes in ((free, labels, 2), (plan, labels[:7], 2), (plan, labels, 1), (plan, labels / 2, 2)):
        with pytest.raises(epsilons.EpsilonsError):
            epsilons.class_counts(made, given, COUNTED, tmp_path / "wrong.json", classes=classes)
    assert not (tmp_path / "wrong.json").exists()


def test_a_person_counts_once_however_many_rows_are_theirs(tmp_path):
    plan = epsilons.plan(COUNTED, epsilons.Recipe(3, 40, 1.0), accountant="rdp", class_noise=15.0)
    persons, labels = np.arange(400), np.zeros(400, dtype=np.int64)
    more = np.concatenate([persons, np.zeros(5000, dtype=np.int64)]), np.concatenate([labels, np.ones(5000, np.int64)])
    both = [
        epsilons.class_counts(plan, label, COUNTED, tmp_path / str(i), classes=2, persons=person, seed=1)
        for i, (person, label) in enumerate(((persons, labels), more))
    ]
    moved = np.array([both[1][e] for e in (1.0, 3.0)]) - np.array([both[0][e] for e in (1.0, 3.0)])
    assert 0.5 < np.linalg.norm(moved) <= 1.0 * math.sqrt(2)  # one vector of length 1 in the place of another
    assert np.abs(moved).sum() <= 2.0


def test_the_command_counts_once_and_trains_on_the_balanced_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text(people(400))
    config = CONFIG.replace("[training]", "[training]\nbalance = true").replace(
        "[privacy]", "[privacy]\nclass_noise = 10.0"
    )
    (tmp_path / "people.toml").write_text(config)
    assert command("train", "people.toml", "-o", "run").code == 0
    counts = json.loads((tmp_path / "run.counts.json").read_text())["counts"]
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settings["training"]["balance"] == [row for _, row in sorted(counts.items())]
    assert "people of each class" in settings["guarantee"]
