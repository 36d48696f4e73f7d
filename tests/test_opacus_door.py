"""epsilons.opacus: loops that are written for Opacus train under budgets, and as a loop of our own does."""

from __future__ import annotations

import copy
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import epsilons
from epsilons.errors import InputError
from epsilons.opacus import GradSampleModule, PrivacyEngine, accountants, distributed, optimizers, validators
from epsilons.opacus.arguments import budgets_of
from epsilons.opacus.import_paths import MODULES
from epsilons.opacus.utils.batch_memory_manager import BatchMemoryManager
from epsilons.opacus.validators import ModuleValidator
from epsilons.opacus.wrappers import Criterion
from opacus_loops import BATCH, BUDGETS, DELTA, RECORDS, distance, loader, make, net, own_loop, step, tensors, train
from program import python
from test_imports import WITHOUT_TORCH

ROUNDING = 1e-6
pytestmark = pytest.mark.usefixtures("one_thread")


# -- the signatures of Opacus --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["__init__", "make_private", "make_private_with_epsilon", "get_epsilon", "save_checkpoint", "load_checkpoint"],
)
def test_arguments_have_the_names_order_and_defaults_of_opacus(name):
    opacus = pytest.importorskip("opacus")
    theirs = dict(inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters)
    ours = dict(inspect.signature(getattr(PrivacyEngine, name)).parameters)
    theirs.pop("kwargs", None)
    assert [n for n in ours if n in theirs] == list(theirs)
    # Opacus' default criterion is nn.CrossEntropyLoss(), an object that its engines share; None stands for a new one.
    assert {n: p.default for n, p in theirs.items() if n != "criterion"} == {
        n: ours[n].default for n in theirs if n != "criterion"
    }


def test_batch_memory_manager_has_the_arguments_of_opacus():
    theirs = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager
    assert list(inspect.signature(BatchMemoryManager).parameters) == list(inspect.signature(theirs).parameters)


#: Of earlier versions.
GONE = "convert_batchnorm_modules"
IMPORTS = """
from epsilons.opacus import GradSampleModule, PrivacyEngine, accountants, grad_sample
from epsilons.opacus.accountants import IAccountant, PRVAccountant, RDPAccountant, create_accountant
from epsilons.opacus.accountants.rdp import RDPAccountant as same
from epsilons.opacus.accountants.utils import get_noise_multiplier
from epsilons.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from epsilons.opacus.grad_sample.functorch import make_functional
from epsilons.opacus.grad_sample.grad_sample_module import GradSampleModule
from epsilons.opacus.optimizers import DPOptimizer
from epsilons.opacus.utils.module_modification import convert_batchnorm_modules
from epsilons.opacus.validators.errors import UnsupportedModuleError
from epsilons.opacus.validators.module_validator import ModuleValidator
import epsilons.opacus.accountants.utils
assert same is accountants.RDPAccountant is epsilons.opacus.accountants.RDPAccountant
"""


def test_the_door_and_the_paths_that_scripts_import_need_no_opacus():
    python(WITHOUT_TORCH.replace("'torch'", "'opacus'").replace('"torch"', '"opacus"') + IMPORTS)


# -- import paths --------------------------------------------------------------------------------------------------


def paths_and_names(opacus) -> Iterator[tuple[str, str]]:
    """Every module of the installed Opacus with each of its names."""
    for found in pkgutil.walk_packages(opacus.__path__, "opacus."):
        if not found.name.startswith(("opacus.tests", "opacus.version")):
            module = import_module(found.name)
            defined = [n for n, thing in vars(module).items() if getattr(thing, "__module__", None) == found.name]
            names = {*defined, *getattr(module, "__all__", ())}
            yield from ((found.name, name) for name in sorted(names) if not name.startswith("_"))


def refusal(line: str) -> str | None:
    """What an import line is refused with; None if it works."""
    try:
        exec(line, {})
    except ImportError as error:
        return str(error)
    return None


def test_every_path_and_name_of_opacus_is_here_or_an_import_error_names_its_replacement():
    said = {
        (path, name): refusal(f"from epsilons.{path} import {name}")
        for path, name in paths_and_names(pytest.importorskip("opacus"))
    }
    here = [(path.removeprefix("opacus."), name) for (path, name), words in said.items() if words is None]
    assert {name for _, name in here} >= {name for names in MODULES.values() for name in names} - {GONE}
    assert {path for path, _ in here} >= MODULES.keys() - {"utils.module_modification"}
    assert len(said) - len(here) > 100
    assert {
        key: words for key, words in said.items() if words and not re.search(r" is not here\. [A-Z].+\.$", words)
    } == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from epsilons.opacus.accountants import GaussianAccountant", "It understates epsilon"),
        ("from epsilons.opacus.data_loader import DPDataLoader", "Pass your own model, optimizer and data loader"),
        ("from epsilons.opacus.schedulers import ExponentialNoise", "make an epsilons.Plan"),
        ("from epsilons.opacus.lightning import DPLightningDataModule", "epsilons.lightning.PrivateStrategy"),
        (
            "from epsilons.opacus.utils.uniform_sampler import UniformWithReplacementSampler",
            "which returns the private ones",
        ),
        ("from epsilons.opacus.validators import register_module_fixer", "no rules to register"),
        ("import epsilons.opacus.nothing", "No module named"),
    ],
)
def test_the_sentence_is_the_one_for_this_path(line, words):
    with pytest.raises(ImportError, match=words):
        exec(line, {})


def test_opacus_names_of_what_make_private_returns_are_for_isinstance_alone():
    made, DPOptimizer = make(), optimizers.DPOptimizer
    assert isinstance(made.module, GradSampleModule)
    assert isinstance(made.optimizer, DPOptimizer)
    assert not isinstance(made.bare, GradSampleModule)
    parallel = distributed.DifferentiallyPrivateDistributedDataParallel
    for name in (GradSampleModule, DPOptimizer, parallel, type("Mine", (DPOptimizer,), {})):
        with pytest.raises(InputError, match=r"cannot be made by hand, .* Pass your own model"):
            name(made.bare, max_grad_norm=1.0)


# -- accountants of their own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rdp", "prv"])
def test_an_accountant_counts_steps_as_that_of_opacus(name):
    theirs = pytest.importorskip("opacus.accountants").create_accountant(name)
    ours, set_at_once = accountants.create_accountant(name), accountants.create_accountant(name)
    steps = [(1.0, 0.01)] * 40 + [(2.0, 0.02)] * 40
    for noise, rate in steps:
        ours.step(noise_multiplier=noise, sample_rate=rate)
        theirs.step(noise_multiplier=noise, sample_rate=rate)
    assert ours.history == theirs.history == [(1.0, 0.01, 40), (2.0, 0.02, 40)]
    assert len(ours) == 80
    options = {"eps_error": 0.001} if name == "prv" else {}  # which PRV adds to its epsilon
    assert ours.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5, **options), abs=2e-3)
    set_at_once.history = ours.history[:1]
    set_at_once.history.append(ours.history[1])
    assert set_at_once.get_epsilon(delta=1e-5) == ours.get_privacy_spent(delta=1e-5)[0] == ours.get_epsilon(1e-5)
    set_at_once.history[1] = (2.0, 0.02, 80)
    assert set_at_once.get_epsilon(1e-5) > ours.get_epsilon(1e-5)
    with pytest.raises(ValueError, match="noise multiplier must be positive"):
        ours.step(noise_multiplier=0.0, sample_rate=0.01)


def test_an_accountant_by_another_name_is_refused_and_engines_have_the_class_of_theirs():
    with pytest.raises(InputError, match="understates"):
        accountants.create_accountant("gdp")
    assert isinstance(PrivacyEngine(accountant="rdp").accountant, accountants.RDPAccountant)
    assert not isinstance(PrivacyEngine().accountant, accountants.RDPAccountant)


@pytest.mark.parametrize("duration", [{"epochs": 3}, {"steps": 147}])
def test_a_noise_multiplier_keeps_the_budget_and_is_that_of_opacus(duration):
    given = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 1 / 49, **duration}
    get_noise_multiplier = accountants.utils.get_noise_multiplier
    noise, spent = get_noise_multiplier(**given), accountants.RDPAccountant()
    spent.history = [(noise, 1 / 49, 147)]  # int(3 / (1 / 49)) is 147 or 146, by rounding
    assert 2 * 0.999 < spent.get_epsilon(1e-5) <= 2
    theirs = pytest.importorskip("opacus.accountants.utils").get_noise_multiplier
    assert noise == pytest.approx(theirs(**given, epsilon_tolerance=1e-4), rel=1e-3)
    with pytest.raises(InputError, match="either steps or epochs"):
        get_noise_multiplier(**given | {"steps": 1, "epochs": 1})


# -- the same training as in a loop of our own ---------------------------------------------------------------------


def test_a_loop_for_opacus_trains_as_a_loop_of_our_own():
    made = train(make())
    assert made.loader.private.updates == 2 * RECORDS // BATCH
    assert distance(made.bare, own_loop()) < ROUNDING


def test_batch_memory_manager_changes_the_size_of_batches_and_not_the_training():
    made = make()
    sizes = []

    def watched(made, batch):
        sizes.append(len(batch[0]))
        step(made, batch)

    for _ in range(2):
        with BatchMemoryManager(
            data_loader=made.loader, max_physical_batch_size=7, optimizer=made.optimizer
        ) as batches:
            for batch in batches:
                watched(made, batch)
    assert max(sizes) <= 15  # some forms of the batch-independence check hold more records
    assert len([size for size in sizes if size <= 7]) > 20
    assert made.loader.private.updates == 10
    assert made.loader.private.max_physical_batch == RECORDS
    assert distance(made.bare, own_loop(most=7)) < ROUNDING


def test_the_ghost_mode_returns_a_criterion_and_trains_the_same():
    made = make(grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss())
    assert isinstance(made.criterion, Criterion)
    assert distance(train(made).bare, own_loop()) < ROUNDING


def test_after_a_run_with_sums_the_optimizer_steps_as_before():
    made = make(loss_reduction="sum")
    made.engine.close()
    for p in made.bare.parameters():
        p.grad = torch.ones_like(p)
    made.optimizer.original_optimizer.step()
    assert distance(made.bare, net()) == pytest.approx(0.5, rel=1e-5)


def test_a_model_that_takes_no_hooks_leaves_its_optimizer_usable():
    scripted = torch.jit.script(net())
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.5)
    with pytest.raises(epsilons.errors.ModelError, match="takes no hooks"):
        make(module=scripted, optimizer=optimizer)
    optimizer.step()


def test_a_sum_of_losses_gives_an_undivided_update():
    ours, own = make(loss_reduction="sum"), own_loop(reduction="sum", updates=1)
    for batch in ours.loader:
        step(ours, batch)
        if ours.loader.private.updates == 1:
            break
    for start, summed, mean in zip(net().parameters(), ours.bare.parameters(), own.parameters(), strict=True):
        assert torch.allclose(summed - start, BATCH * (mean - start), atol=1e-5)


def test_a_closure_is_called_once_per_batch():
    def by_closure(made, batch):
        x, y = batch

        def closure():
            made.optimizer.zero_grad()
            loss = made.criterion(made.module(x), y)
            loss.backward()
            return loss

        assert made.optimizer.step(closure).ndim == 0

    assert distance(train(make(), each=by_closure).bare, own_loop()) < ROUNDING


def test_the_bare_model_may_be_called_in_place_of_the_wrapped_one():
    def bare(made, batch):
        made.criterion(made.bare(batch[0]), batch[1]).backward()
        made.optimizer.step()

    assert distance(train(make(wrap_model=False), each=bare).bare, own_loop()) < ROUNDING


def test_an_evaluation_between_steps_changes_nothing():
    def evaluated(made, batch):
        step(made, batch)
        made.module.eval()
        with torch.no_grad():
            made.module(tensors()[0])
        made.module.train()

    assert distance(train(make(), each=evaluated).bare, own_loop()) < ROUNDING


class _Pairs(Dataset):
    """A map-style data set of (inputs, target)."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        x, y = tensors()
        return x[index], int(y[index])


@pytest.mark.slow
def test_a_map_style_data_set_is_read_by_workers():
    made = train(make(data_loader=DataLoader(_Pairs(), batch_size=BATCH, num_workers=1), target_epsilon=2.0))
    assert made.engine.get_epsilon(DELTA) == pytest.approx(2.0, rel=1e-3)


def test_a_collate_function_is_used_on_a_tensor_data_set_too():
    seen = []

    def doubled(records):
        seen.append(len(records))
        x, y = torch.utils.data.default_collate(records)
        return 2 * x, y

    made = make(data_loader=loader(collate_fn=doubled))
    x, _ = next(iter(made.loader))
    assert seen
    assert any(torch.equal(x[0], 2 * row) for row in tensors()[0])


# -- a private discriminator, and a generator that sees it alone ----------------------------------------------------


def gan(steps: int = 1, generator_first: bool = False) -> tuple[nn.Module, float]:
    """Two epochs of the loop of Opacus' dcgan.py: the discriminator, and how far the generator moved.

    steps            of the discriminator per batch
    generator_first  its step is made before that of the discriminator
    """
    judge, generator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)), nn.Linear(4, 6)
    made = make(engine=PrivacyEngine(accountant="rdp"), module=judge)
    start = copy.deepcopy(generator)
    of_generator, criterion = torch.optim.Adam(generator.parameters(), lr=0.1), nn.BCEWithLogitsLoss()

    def learn() -> None:
        of_generator.zero_grad()
        criterion(made.module(generator(torch.randn(BATCH, 4))), torch.ones(BATCH, 1)).backward()
        of_generator.step()

    for _ in range(2):
        for real, _ in made.loader:
            ones, fake = torch.ones(len(real), 1), generator(torch.randn(len(real), 4)).detach()
            losses = [criterion(made.module(fake), 0 * ones), criterion(made.module(real), ones)]
            for loss in losses if steps == 2 else [sum(losses)]:
                made.optimizer.zero_grad()
                loss.backward()
                if generator_first:
                    learn()
                made.optimizer.step()
            learn()
    assert made.loader.private.is_finished
    assert made.engine.get_epsilons(DELTA).keys() == {1.0, 3.0}
    return judge, distance(generator, start)


def test_a_generator_learns_from_a_private_discriminator():
    judge, moved = gan()
    assert moved > 0.1
    assert all(p.grad is None for p in judge.parameters())  # the generator's loss leaves no gradient there


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"steps": 2}, epsilons.errors.CallOrderError, "outside a batch, or twice"),
        ({"generator_first": True}, epsilons.errors.ModelError, "depends on parameters that the model does not have"),
    ],
)
def test_other_orders_of_the_two_steps_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        gan(**change)


# -- budgets -------------------------------------------------------------------------------------------------------


def test_every_tier_spends_its_own_budget():
    tiers = ["open" if epsilon == 3.0 else "strict" for epsilon in BUDGETS]
    made = train(make(target_epsilon={"strict": 1.0, "open": 3.0}, tiers=tiers))
    spent = made.engine.get_epsilons(DELTA)
    assert list(spent) == [1.0, 3.0]
    for budget, epsilon in spent.items():
        assert 0.999 * budget < epsilon <= budget
    assert made.engine.get_epsilon(DELTA) == spent[3.0]
    history = [epsilons.SampledGaussian(rate, noise, steps) for noise, rate, steps in made.engine.accountant.history]
    assert epsilons.accounting.rdp.epsilon(history, DELTA) == pytest.approx(spent[3.0], rel=1e-9)
    assert distance(made.bare, own_loop()) < ROUNDING


@pytest.mark.parametrize(
    "target",
    [BUDGETS.tolist(), torch.tensor(BUDGETS), epsilons.Budgets(BUDGETS, delta=DELTA)],
    ids=["list", "tensor", "Budgets"],
)
def test_budgets_per_record_come_in_several_forms(target):
    made = make(target_epsilon=target)
    assert made.loader.private.plan.counts.tolist() == [80, 40]


def test_one_epsilon_for_all_is_plain_dp_sgd():
    plan = make(target_epsilon=2.0).loader.private.plan
    assert len(plan.groups) == 1
    assert plan.sample_rate.tolist() == [0.2]
    assert plan.expected_batch == BATCH


@pytest.mark.parametrize(("batch_size", "drop_last", "batches"), [(18, False, 7), (25, True, 4), (120, False, 1)])
def test_rate_and_divisor_follow_from_the_number_of_batches(batch_size, drop_last, batches):
    """Opacus rounds the divisor down, by which the mean of its updates is too large."""
    data = DataLoader(TensorDataset(*tensors()), batch_size=batch_size, drop_last=drop_last)
    made = make(data_loader=data, target_epsilon=2.0)
    plan = made.loader.private.plan
    assert len(made.loader) == batches
    assert plan.sample_rate.tolist() == [1 / batches]
    assert plan.expected_batch == made.optimizer.expected_batch_size == RECORDS / batches
    assert plan.steps == 2 * batches


def test_the_spend_of_a_noise_multiplier_is_that_of_opacus():
    opacus = pytest.importorskip("opacus")
    made = train(make(noise_multiplier=1.3))
    theirs = opacus.accountants.RDPAccountant()
    theirs.history = [(1.3, 0.2, 10)]
    assert made.engine.accountant.history == theirs.history
    assert len(made.engine.accountant) == 10
    assert made.engine.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)
    assert made.engine.get_epsilons(1e-5).popitem()[1] == made.engine.get_epsilon(1e-5)


def test_the_accountant_prv_is_our_pld_and_not_rdp():
    accountants, history = {}, {"history": [(1.3, 0.2, 10)], "mechanism": "prv"}
    for name in ("prv", "pld", "rdp"):
        accountants[name] = PrivacyEngine(accountant=name).accountant
        accountants[name].load_state_dict(history)
    tight = epsilons.accounting.pld.epsilon([epsilons.SampledGaussian(0.2, 1.3, 10)], 1e-5)
    assert accountants["prv"].get_epsilon(1e-5) == pytest.approx(tight, rel=1e-3)
    assert accountants["pld"].get_epsilon(1e-5) == accountants["prv"].get_epsilon(1e-5)
    assert accountants["rdp"].get_epsilon(1e-5) > 1.02 * tight
    assert inspect.signature(PrivacyEngine).parameters["accountant"].default == "prv"


def test_epsilon_follows_the_delta_that_is_asked_for():
    accountant = PrivacyEngine(accountant="rdp").accountant
    accountant.load_state_dict({"history": [(1.3, 0.2, 10)], "mechanism": "rdp"})
    for delta in (1e-5, 1e-2, 1e-8, 1e-5):
        alone = epsilons.accounting.rdp.epsilon([epsilons.SampledGaussian(0.2, 1.3, 10)], delta)
        assert accountant.get_epsilon(delta) == pytest.approx(alone, rel=1e-9)


def test_the_secure_mode_adds_up_four_values_for_each():
    for secure_mode, kind in ((True, "secure"), (False, "chacha20")):
        private = make(engine=PrivacyEngine(accountant="rdp", secure_mode=secure_mode), seed=None).loader.private
        assert private._draws.randomness.label == kind


def test_nothing_is_spent_before_the_first_draw_and_then_each_draw_is():
    made = make(noise_multiplier=1.3)
    assert (made.engine.get_epsilon(1e-5), len(made.engine.accountant), made.engine.accountant.history) == (0.0, 0, [])
    seen = [made.engine.get_epsilon(1e-5) for batch in made.loader if step(made, batch) is None]
    assert len(made.engine.accountant) == 5
    assert seen == sorted(seen)
    assert made.engine.get_epsilon(1e-5) == seen[-1] > seen[0] > 0


def test_small_groups_are_not_shown_by_what_the_engine_says_of_spending():
    budgets = np.where(np.arange(RECORDS) < 3, 2.7, 1.0)  # three records
    made = train(make(target_epsilon=budgets), epochs=1)
    assert made.engine.get_epsilons(DELTA) == {}
    assert made.engine.get_epsilon(DELTA) == 5.0  # the whole plan's 2.7, rounded up
    with pytest.raises(epsilons.errors.InputError, match="Fewer than 20 records"):
        _ = made.engine.accountant.history
    with pytest.raises(epsilons.errors.InputError, match="Fewer than 20 records"):
        made.engine.save_checkpoint(path=io.BytesIO(), module=made.module)


def test_budgets_that_do_not_fit_are_refused_without_their_values():
    for target, tiers, word in [
        ({"a": 1.0}, None, "needs tiers="),
        ({"a": 1.0}, ["a"], "one name per record"),
        ({"a": 1.0}, ["a", "b", "b"], "Fewer than 20 records"),
        (1.25, ["a"] * 3, "tiers= belongs"),
        (epsilons.Budgets([1.25] * 3, delta=1e-4), None, "deltas of its own"),
    ]:
        with pytest.raises(epsilons.errors.BudgetError, match=word) as raised:
            budgets_of(target, 1e-3, 3, tiers)
        assert "1.25" not in str(raised.value)


def several_runs(**changes):
    budgets = epsilons.Budgets(BUDGETS, delta=DELTA)
    recipe = epsilons.Recipe(**{"steps": 10, "batch_size": BATCH, "clip_norm": 0.7} | changes)
    return epsilons.plan(budgets, recipe, accountant="rdp", runs=2)


def test_every_run_of_a_plan_for_several_claims_a_slot_and_counts_all_of_them(tmp_path):
    folder = epsilons.PlanFolder.create(tmp_path / "plan", several_runs())
    first = make(plan=folder)
    assert first.engine.get_epsilon(DELTA) > 1.5  # the other run may have spent its part already
    spent = train(first).engine.get_epsilons(DELTA)
    assert all(0.999 * budget < epsilon <= budget for budget, epsilon in spent.items())
    later = PrivacyEngine(accountant="rdp").accountant
    later.load_state_dict(first.engine.accountant.state_dict())
    assert later.get_epsilon(DELTA) == pytest.approx(spent[3.0], rel=1e-9)
    train(make(plan=folder, seed=4))
    assert folder.begun == 2
    with pytest.raises(epsilons.errors.RunError, match="All 2 runs"):
        make(plan=folder)


def test_a_plan_for_several_runs_hides_small_groups_by_the_spend_of_all(tmp_path):
    budgets = np.where(np.arange(RECORDS) < 3, 2.7, 1.0)
    made = epsilons.plan(
        epsilons.Budgets(budgets, delta=DELTA), epsilons.Recipe(10, BATCH, 0.7), accountant="rdp", runs=2
    )
    folder = epsilons.PlanFolder.create(tmp_path / "plan", made)
    assert make(plan=folder, target_epsilon=budgets).engine.get_epsilon(DELTA) == 5.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: several_runs(steps=9), "The plan has 9 steps, and 2 epochs of 5 batches have 10"),
        (lambda: several_runs(batch_size=12), "expects 12 records in a draw"),
        (lambda: "plan.json", "got a str. For a file: Plan.load"),
    ],
    ids=["steps", "batches", "a file"],
)
def test_a_plan_for_other_draws_than_the_loop_makes_is_refused(given, words):
    with pytest.raises(epsilons.errors.InputError, match=words):
        make(plan=given())


def test_a_plan_for_several_runs_needs_its_folder():
    with pytest.raises(epsilons.errors.EpsilonsError, match="PlanFolder"):
        make(plan=several_runs())


# -- epochs, draws, schedulers -------------------------------------------------------------------------------------


def test_empty_draws_are_charged_and_counted_in_their_epoch():
    data = DataLoader(TensorDataset(*tensors()), batch_size=1)
    made = make(data_loader=data, target_epsilon=2.0, epochs=1)
    rates = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: 0.99**step)
    sizes, hooks = [], []
    made.optimizer.attach_step_hook(hooks.append)
    for batch in made.loader:
        step(made, batch)
        rates.step()
        sizes.append(len(batch[0]))
    assert made.loader.private.updates == len(data) == RECORDS == len(sizes) == len(hooks) == rates.last_epoch
    assert 20 < sizes.count(0) < RECORDS - 40


def test_a_batch_of_an_empty_draw_changes_nothing_whatever_is_done_with_it():
    """Skipped, stepped twice, or a record of zeros: the weights are those of a loop that sees no such batch."""

    def passes_by(made, batch):
        if len(batch[0]):
            step(made, batch)

    def twice(made, batch):
        step(made, batch)
        if not len(batch[0]):
            step(made, batch)

    found = []
    for each, rows in ((passes_by, False), (step, False), (twice, False), (step, True)):
        made = make(data_loader=DataLoader(TensorDataset(*tensors()), batch_size=1), target_epsilon=2.0, epochs=1)
        made.loader.rand_on_empty = rows
        train(made, 1, each)
        found.append(made.bare)
    assert max(distance(found[0], other) for other in found[1:]) == 0


def test_a_loop_that_is_left_at_an_empty_batch_goes_on_in_the_next_pass():
    made = make(data_loader=DataLoader(TensorDataset(*tensors()), batch_size=1), target_epsilon=2.0, epochs=3)
    for batch in made.loader:
        if not len(batch[0]):
            break
        step(made, batch)
    before = made.loader.private.updates
    for batch in made.loader:
        step(made, batch)
    assert made.loader.private.updates - before > RECORDS / 2


def test_a_scheduler_of_the_private_optimizer_changes_the_learning_rate():
    made = make()
    schedule = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
    for _ in range(2):
        for batch in made.loader:
            step(made, batch)
        schedule.step()
    assert made.optimizer.original_optimizer.param_groups[0]["lr"] == 0.125
    assert distance(made.bare, own_loop()) > 1e-3


def test_a_loop_may_be_left_after_a_step_and_entered_again():
    made = make(epochs=2)
    for batch in made.loader:
        step(made, batch)
        if made.loader.private.updates == 3:
            break
    for batch in made.loader:
        step(made, batch)
    assert made.loader.private.updates == 8


class _HandsOn:
    """An iterator of the caller, as prefetchers are written."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        self._iterator = iter(self._batches)
        return self

    def __next__(self):
        return next(self._iterator)


@pytest.mark.parametrize("wrap", [_HandsOn, lambda batches: (batch for batch in batches), lambda b: map(tuple, b)])
def test_batches_may_go_through_iterators_of_the_caller(wrap):
    made = make()
    for _ in range(2):
        for batch in wrap(made.loader):
            step(made, batch)
    assert distance(made.bare, own_loop()) < ROUNDING


def test_the_loop_sees_no_check():
    made = make()
    batches = [step(made, batch) for _ in range(2) for batch in made.loader]
    assert len(batches) == made.loader.private.updates == 10
    assert distance(made.bare, own_loop()) < ROUNDING


def test_step_hooks_run_after_every_update():
    made, updates = make(), []
    made.optimizer.attach_step_hook(lambda _: updates.append(made.loader.private.updates))
    train(made)
    assert updates == list(range(1, 11))


def test_a_run_is_resumed_in_its_epoch(tmp_path):
    def one(run_dir, epochs, resume, stop_at=None):
        made = make(run_dir=run_dir, resume=resume, target_epsilon=2.0, epochs=3)
        made_in = []
        for _ in range(epochs):
            before = made.loader.private.updates
            for batch in made.loader:
                step(made, batch)
                if made.loader.private.updates == stop_at:
                    made.engine.close()
                    return made, made_in
            made_in.append(made.loader.private.updates - before)
        return made, made_in

    whole, _ = one(tmp_path / "whole", 3, False)
    one(tmp_path / "cut", 3, False, stop_at=7)
    resumed, made_in = one(tmp_path / "cut", 3, True)
    assert made_in == [0, 4, 5]  # the last draw before the end is replayed
    assert distance(resumed.bare, whole.bare) == 0
    assert resumed.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)


# -- state dicts and checkpoints -----------------------------------------------------------------------------------


def test_the_module_is_named_as_in_opacus_and_loads_every_form():
    made = make()
    keys = list(made.module.state_dict())
    assert keys[0] == "_module.0.weight"
    assert made.module._module[0].weight is made.bare[0].weight
    for state in (made.module.state_dict(), made.bare.state_dict()):
        zeros = {key: torch.zeros_like(value) for key, value in state.items()}
        made.module.load_state_dict(zeros)
        assert not made.bare[0].weight.any()


def test_copies_of_a_model_are_averages_of_weights_and_not_copies_of_the_run():
    made = make()
    averages = [torch.optim.swa_utils.AveragedModel(model) for model in (made.module, made.bare)]

    def averaged(made, batch):
        step(made, batch)
        for average in averages:
            average.update_parameters(made.module)

    train(made, each=averaged)
    assert distance(made.bare, own_loop()) < ROUNDING
    assert distance(averages[0], averages[1]) == 0 < distance(averages[0].module, made.bare)
    assert averages[0].module._loop is made.module._loop
    for model in (made.module, made.bare):
        with pytest.raises(epsilons.errors.InputError, match="secret key"):
            torch.save(model, io.BytesIO())
    made.engine.close()
    torch.save(made.bare, io.BytesIO())


def test_checkpoints_go_to_opacus_and_back():
    opacus = pytest.importorskip("opacus")
    made = train(make(noise_multiplier=1.3), epochs=1)
    file = io.BytesIO()
    made.engine.save_checkpoint(path=file, module=made.module, optimizer=made.optimizer, checkpoint_dict={"epoch": 1})

    model = net()
    theirs = opacus.PrivacyEngine(accountant="rdp")
    module, optimizer, _ = theirs.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader(),
        noise_multiplier=1.3, max_grad_norm=1.0,
    )  # fmt: skip
    file.seek(0)
    assert theirs.load_checkpoint(path=file, module=module, optimizer=optimizer)["epoch"] == 1
    assert distance(model, made.bare) == 0
    assert theirs.get_epsilon(1e-5) == pytest.approx(made.engine.get_epsilon(1e-5), abs=1e-6)

    file = io.BytesIO()
    theirs.save_checkpoint(path=file, module=module, optimizer=optimizer)
    file.seek(0)
    later = make(noise_multiplier=1.3)
    later.engine.load_checkpoint(path=file, module=later.module, optimizer=later.optimizer)
    assert distance(later.bare, made.bare) == 0
    assert later.engine.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)


def test_what_a_checkpoint_has_spent_is_added_to_the_run():
    made = make(noise_multiplier=1.3)
    made.engine.accountant.load_state_dict({"history": [(1.3, 0.2, 10)], "mechanism": "rdp"})
    train(made, epochs=1)
    twice = epsilons.accounting.rdp.epsilon([epsilons.SampledGaussian(0.2, 1.3, 15)], 1e-5)
    assert made.engine.get_epsilon(1e-5) == pytest.approx(twice, rel=1e-9)
    assert len(made.engine.accountant) == 15


def test_another_checkpoint_of_the_same_length_is_counted_anew():
    accountant = PrivacyEngine(accountant="rdp").accountant
    for history in ((1.3, 0.2, 10), (1.3, 0.2, 20)):
        accountant.load_state_dict({"history": [history], "mechanism": "rdp"})
        noise, rate, steps = history
        alone = epsilons.accounting.rdp.epsilon([epsilons.SampledGaussian(rate, noise, steps)], 1e-5)
        assert accountant.get_epsilon(1e-5) == pytest.approx(alone, rel=1e-9)


def test_a_checkpoint_holds_the_largest_spend_at_every_delta():
    """At their own deltas epsilon 2 is the largest spend, at a common one 1.9 is."""
    is_odd = np.arange(RECORDS) % 2
    made = train(make(target_epsilon=np.where(is_odd, 2.0, 1.9), target_delta=np.where(is_odd, 1e-6, 5e-3)))
    later = PrivacyEngine(accountant="rdp").accountant
    later.load_state_dict(made.engine.accountant.state_dict())
    for delta in (1e-2, 1e-4, 1e-7):
        assert later.get_epsilon(delta) >= made.engine.get_epsilon(delta) * (1 - 1e-9)


def test_weights_that_have_spent_privacy_are_not_trained_under_budgets():
    engine = PrivacyEngine(accountant="rdp")
    engine.accountant.load_state_dict({"history": [(1.3, 0.2, 10)], "mechanism": "rdp"})
    with pytest.raises(epsilons.errors.InputError, match="spent privacy on these records already"):
        make(engine=engine)
    late = make()
    late.engine.accountant.load_state_dict({"history": [(1.3, 0.2, 10)], "mechanism": "rdp"})
    with pytest.raises(epsilons.errors.InputError, match="spent privacy on these records already"):
        next(iter(late.loader))


# -- criterion and validators --------------------------------------------------------------------------------------


def test_the_criterion_weights_classes_without_mixing_records():
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    weight = torch.tensor([1.0, 5.0, 2.0])
    expected = (weight[targets] * F.cross_entropy(outputs, targets, reduction="none")).mean()
    assert torch.equal(Criterion(nn.CrossEntropyLoss(weight=weight))(outputs, targets), expected)
    with pytest.raises(epsilons.errors.InputError, match="Make them the same"):
        Criterion(nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_criterion_reduces_tokens_to_sequences_as_opacus_does(reduction):
    made = pytest.importorskip("opacus.utils.fast_gradient_clipping_utils").DPLossFastGradientClipping
    outputs, targets = torch.randn(4 * 5, 3), torch.randint(3, (4 * 5,))
    targets[3:6] = 1
    criterion = nn.CrossEntropyLoss(ignore_index=1, reduction=reduction)
    stub = type("Stub", (), {"loss_reduction": reduction})()
    theirs = made(stub, stub, criterion, reduction)(outputs, targets, shape=(4, 5, 3)).item()
    assert Criterion(criterion, reduction)(outputs, targets, shape=(4, 5, 3)).item() == pytest.approx(theirs)


def test_validators_refuse_what_mixes_records():
    mixing = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    assert ModuleValidator.is_valid(net())
    assert not ModuleValidator.is_valid(mixing)
    assert len(ModuleValidator.validate(mixing)) == 1
    with pytest.raises(epsilons.errors.UnsupportedLayerError, match="BatchNorm2d"):
        ModuleValidator.validate(mixing, strict=True)
    assert not PrivacyEngine().is_compatible(module=mixing, optimizer=None, data_loader=None)
    mended = PrivacyEngine.get_compatible_module(mixing)
    assert [type(layer) for layer in mended] == [nn.Conv2d, nn.GroupNorm]
    assert type(mixing[1]) is nn.BatchNorm2d
    with pytest.raises(epsilons.errors.UnsupportedLayerError, match="has one channel"):
        ModuleValidator.fix(nn.Sequential(nn.BatchNorm1d(1)))
    model = net()
    copied = PrivacyEngine.get_compatible_module(model)
    assert copied is not model
    assert distance(copied, model) == 0


@pytest.mark.parametrize("options", [{}, {"num_groups": 4}])
@pytest.mark.parametrize("channels", [4, 12, 16, 48, 64, 96])
def test_fixed_layers_have_as_many_groups_as_those_of_opacus(channels, options):
    theirs = pytest.importorskip("opacus.validators").ModuleValidator
    model = nn.Sequential(nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.BatchNorm3d(2 * channels))
    nn.init.normal_(model[1].weight)
    fixed = ModuleValidator.fix(model, **options)
    assert [layer.num_groups for layer in fixed[1:]] == [layer.num_groups for layer in theirs.fix(model, **options)[1:]]
    assert torch.equal(fixed[1].weight, model[1].weight)


def test_a_fix_with_instance_norm_normalises_each_channel_and_no_layer_loses_single_values():
    model, x = nn.Sequential(nn.BatchNorm2d(6)), torch.randn(3, 6, 5, 5)
    torch.testing.assert_close(ModuleValidator.fix(model, replace_bn_with_in=True)(x), nn.InstanceNorm2d(6)(x))
    assert ModuleValidator.fix(nn.Sequential(nn.BatchNorm1d(32), nn.BatchNorm1d(64)))[0].num_groups == 4
    for options, words in [({"num_groups": 4}, "does not divide the 6"), ({"num_groups": 2}, "exclude one another")]:
        with pytest.raises(ValueError, match=words):
            ModuleValidator.fix(model, **options, replace_bn_with_in="exclude" in words)


def test_a_script_that_catches_opacus_errors_repairs_its_model():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    for kind in (validators.errors.UnsupportedModuleError, validators.errors.ShouldReplaceModuleError, ValueError):
        with pytest.raises(kind):
            ModuleValidator.validate(model, strict=True)
    assert ModuleValidator.is_valid(ModuleValidator.fix_and_validate(model))
