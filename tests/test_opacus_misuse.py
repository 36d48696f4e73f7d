"""epsilons.opacus refuses what it cannot keep a promise for, each with its own message."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from epsilons.errors import (
    BatchDependenceError,
    CallOrderError,
    DataError,
    EpsilonsWarning,
    InputError,
    ModelError,
    UnsupportedLayerError,
)
from epsilons.opacus import PrivacyEngine
from epsilons.opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_loops import BATCH, BUDGETS, DELTA, RECORDS, distance, loader, make, net, own_loop, step, tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")

# -- arguments -----------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "per layer": ({"clipping": "per_layer"}, "clipping='per_layer' is not supported"),
    "adaptive": ({"clipping": "adaptive"}, "clipping='adaptive' is not supported"),
    "a norm per layer": ({"max_grad_norm": [0.1, 0.1]}, "max_grad_norm as one number"),
    "time first": ({"batch_first": False}, "batch_first=False"),
    "a noise generator": ({"noise_generator": torch.Generator()}, "give seed="),
    "no_op": ({"grad_sample_mode": "no_op"}, "grad_sample_mode='no_op'"),
    "ghost_fsdp": ({"grad_sample_mode": "ghost_fsdp"}, "grad_sample_mode='ghost_fsdp'"),
    "another reduction": ({"loss_reduction": "none"}, "loss_reduction must be"),
    "adaptive clipping": ({"target_unclipped_quantile": 0.5}, "no argument target_unclipped_quantile"),
    "no epochs": ({"epochs": 0}, "epochs must be a positive number"),
    "no noise": ({"noise_multiplier": 0.0}, "noise_multiplier must be a positive number"),
}


@pytest.mark.parametrize(("change", "words"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument_that_is_not_supported_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        make(**change)


def test_an_accountant_that_understates_is_refused():
    with pytest.raises(InputError, match="understates"):
        PrivacyEngine(accountant="gdp")
    with pytest.raises(InputError, match="No accountant is called 'moments'"):
        PrivacyEngine(accountant="moments")


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*tensors(), strict=True))


def _weighted():
    return WeightedRandomSampler([1.0] * RECORDS, RECORDS)


LOADERS = {
    "weights": (lambda data: DataLoader(data, batch_size=BATCH, sampler=_weighted()), "WeightedRandomSampler"),
    "a part": (
        lambda data: DataLoader(data, batch_size=BATCH, sampler=torch.utils.data.SubsetRandomSampler(range(9))),
        "use torch.utils.data.Subset",
    ),
    "batches": (
        lambda data: DataLoader(data, batch_sampler=_Batches(_weighted(), BATCH, drop_last=False)),
        "sampler",
    ),
    "no batches": (lambda data: DataLoader(data, batch_size=None), "batch_size"),
    "a stream": (lambda data: DataLoader(_Stream(), batch_size=BATCH), "IterableDataset"),
    "initialised workers": (lambda data: DataLoader(data, BATCH, worker_init_fn=print), "worker_init_fn"),
}


class _Batches(BatchSampler):
    pass


@pytest.mark.parametrize(("build", "words"), LOADERS.values(), ids=LOADERS)
def test_a_data_loader_with_a_choice_of_its_own_is_refused(build, words):
    with pytest.raises(DataError, match=words):
        make(data_loader=build(TensorDataset(*tensors())))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"poisson_sampling": False}, "poisson_sampling=False"),
        ({"data_loader": loader(generator=torch.Generator())}, "generator"),
    ],
    ids=["shuffled batches", "a generator"],
)
def test_what_has_no_effect_is_said(change, words):
    with pytest.warns(EpsilonsWarning, match=words):
        made = make(**change)
    assert distance(train(made).bare, own_loop()) < 1e-6


# -- models and optimizers -----------------------------------------------------------------------------------------


def test_layers_that_mix_records_are_refused():
    with pytest.raises(UnsupportedLayerError, match="BatchNorm1d"):
        make(module=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))


def test_distributed_wrappers_are_refused():
    class DifferentiallyPrivateDistributedDataParallel(nn.Sequential):
        pass

    class DistributedDataParallel(nn.Sequential):
        pass

    for wrapper in (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel):
        with pytest.raises(ModelError, match=f"wrapped in {wrapper.__name__}"):
            make(module=wrapper(nn.Linear(6, 3)))


def test_a_model_with_opacus_hooks_is_refused():
    opacus = pytest.importorskip("opacus")
    with pytest.raises(ModelError, match="Opacus' hooks"):
        make(module=opacus.GradSampleModule(net()))


def test_an_optimizer_over_two_models_is_refused():
    other = net()
    model = net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ModelError, match="holds 4 parameters that are not the model's"):
        make(module=model, optimizer=optimizer)


def test_one_engine_makes_one_model_private():
    made = make()
    with pytest.raises(CallOrderError, match="An engine has one run"):
        make(engine=made.engine)


def test_a_private_model_is_made_private_again_only_after_its_run():
    made = make()
    again = {"module": made.module, "optimizer": made.optimizer, "data_loader": made.loader}
    with pytest.raises(CallOrderError, match="belongs to a private run already"):
        make(**again)
    made.module.remove_hooks()
    second = train(make(**again))
    assert second.module._module is made.bare
    assert second.optimizer.original_optimizer is made.optimizer.original_optimizer
    assert distance(made.bare, own_loop()) < 1e-6


def test_the_plan_s_constants_cannot_be_set():
    made = make()
    for name in ("noise_multiplier", "max_grad_norm", "expected_batch_size"):
        with pytest.raises(InputError, match=f"{name} is fixed by the plan"):
            setattr(made.optimizer, name, 1.0)
    with pytest.raises(InputError, match="no per-record gradients"):
        _ = made.optimizer.grad_samples
    with pytest.raises(InputError, match="Leave it out"):
        made.optimizer.signal_skip_step()
    with pytest.raises(InputError, match="to the optimizer before it begins"):
        made.optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("name", ["ExponentialNoise", "ExponentialGradClip"])
def test_schedulers_of_noise_and_clipping_are_refused(name):
    schedulers = pytest.importorskip("opacus.schedulers")
    optimizer = make(target_epsilon=2.0).optimizer
    with pytest.raises(InputError, match="fixed by the plan"):
        getattr(schedulers, name)(optimizer, gamma=0.5).step()


# -- losses --------------------------------------------------------------------------------------------------------


def _weighted_mean(made, batch):
    weight = torch.tensor([0.1, 1.0, 2.0])
    nn.CrossEntropyLoss(weight=weight)(made.module(batch[0]), batch[1]).backward()


def _centred(made, batch):
    outputs = made.module(batch[0])
    F.cross_entropy(outputs - outputs.mean(0), batch[1]).backward()


def _penalty(made, batch):
    weights = sum(p.square().sum() for p in made.bare.parameters())
    (F.cross_entropy(made.module(batch[0]), batch[1]) + weights).backward()


def _per_record(made, batch):
    F.cross_entropy(made.module(batch[0]), batch[1], reduction="none").backward()


def _nothing(made, batch):
    made.module(batch[0])


def _sum(made, batch):
    F.cross_entropy(made.module(batch[0]), batch[1], reduction="sum").backward()


LOSSES = {
    "a mean weighted by classes": (_weighted_mean, BatchDependenceError, "weight for each class"),
    "centred outputs": (_centred, BatchDependenceError, "depend"),
    "a penalty on weights": (_penalty, ModelError, "weight_decay"),
    "reduction=none": (_per_record, ModelError, "one number"),
    "a step without backward": (_nothing, CallOrderError, "before loss.backward"),
    "a sum in place of a mean": (_sum, BatchDependenceError, "number of records|mean over the records"),
}


@pytest.mark.parametrize(("backward", "error", "words"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_no_mean_over_records_is_refused(backward, error, words):
    made = make()

    def one(made, batch):
        made.optimizer.zero_grad()
        backward(made, batch)
        made.optimizer.step()

    with pytest.raises(error, match=words):
        train(made, each=one)
    assert distance(made.bare, net()) == 0  # nothing was learnt


def test_no_raw_gradient_reaches_a_parameter():
    made, seen = make(), []

    def watched(made, batch):
        made.criterion(made.module(batch[0]), batch[1]).backward()
        seen.extend(p.grad for p in made.bare.parameters())
        made.optimizer.step()
        seen.extend(p.grad for p in made.bare.parameters())

    train(made, each=watched)
    assert len(seen) > 60
    assert all(gradient is None for gradient in seen)


def test_a_grad_scaler_is_refused():
    made, scaler = make(), torch.amp.GradScaler("cpu")

    def scaled(made, batch):
        scaler.scale(made.criterion(made.module(batch[0]), batch[1])).backward()
        scaler.step(made.optimizer)

    with pytest.raises(ModelError, match="Leave the scaler out"):
        train(made, each=scaled)
    scaler.scale(torch.ones(1))
    with pytest.raises(InputError, match="bfloat16"):
        scaler.step(make().optimizer)


# -- the order of calls --------------------------------------------------------------------------------------------


def test_more_epochs_than_planned_are_refused():
    made = train(make())
    with pytest.raises(CallOrderError, match=r"2 epochs of 5.*epochs that you train"):
        next(iter(made.loader))
    made = train(make(noise_multiplier=1.0), epochs=4)
    with pytest.raises(CallOrderError, match="most_epochs"):
        next(iter(made.loader))


def test_zero_grad_may_be_left_out_or_called_anywhere():
    def without(made, batch):
        made.criterion(made.module(batch[0]), batch[1]).backward()
        made.optimizer.step()

    def between(made, batch):
        outputs = made.module(batch[0])
        made.optimizer.zero_grad()
        made.criterion(outputs, batch[1]).backward()
        made.optimizer.step()
        made.module.zero_grad()

    own = own_loop()
    for each in (without, between):
        assert distance(train(make(), each=each).bare, own) < 1e-6


def test_zero_grad_forgets_the_backward_passes_before_it():
    def twice(made, batch):
        outputs = made.module(batch[0])
        (7 * made.criterion(outputs, batch[1])).backward(retain_graph=True)
        made.optimizer.zero_grad()
        made.criterion(outputs, batch[1]).backward()
        made.optimizer.step()

    assert distance(train(make(), each=twice).bare, own_loop()) < 1e-6


def test_virtual_steps_that_skip_a_batch_are_refused():
    def every_second(made, batch):
        made.criterion(made.module(batch[0]), batch[1]).backward()
        if made.count % 2:
            made.optimizer.step()
        made.count += 1

    made = make()
    made.count = 0
    with pytest.raises(CallOrderError, match="without"):
        train(made, each=every_second)
    assert distance(made.bare, net()) == 0


def test_a_step_outside_the_loop_or_twice_is_refused():
    made = make()
    with pytest.raises(CallOrderError, match="outside a batch"):
        made.optimizer.step()

    def twice(made, batch):
        step(made, batch)
        made.optimizer.step()

    with pytest.raises(CallOrderError, match="outside a batch, or twice"):
        train(made, each=twice)


def test_the_original_optimizer_cannot_step_by_itself():
    made = make()
    with pytest.raises(CallOrderError, match=r"optimizer.step\(\) was called outside"):
        made.optimizer.original_optimizer.step()


def test_a_look_at_one_batch_is_a_draw_that_is_charged_and_never_applied():
    made = make()
    next(iter(made.loader))
    assert (len(made.engine.accountant), made.engine.private.updates) == (1, 0)
    train(made)
    steps = made.engine.private.plan.steps
    assert (len(made.engine.accountant), made.engine.private.updates) == (steps, steps - 1)


def test_batch_memory_manager_needs_the_private_data_loader():
    made = make()
    with pytest.raises(InputError, match="that make_private returned"):
        BatchMemoryManager(data_loader=loader(), max_physical_batch_size=4, optimizer=made.optimizer)
    with (
        pytest.raises(DataError, match="at least 1"),
        BatchMemoryManager(data_loader=made.loader, max_physical_batch_size=0, optimizer=made.optimizer),
    ):
        pass


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_checkpoint_is_refused():
    def saved(value):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return file

    made = make()
    load = made.engine.load_checkpoint
    with pytest.raises(InputError, match="not a checkpoint of a private run"):
        load(path=saved({"model": 1}), module=made.module)
    with pytest.raises(InputError, match="run code when they are loaded"):
        load(path=saved({"module_state_dict": print}), module=made.module)
    for state in ({}, {"history": None}, {"history": [(1.0, 2.0)]}, {"history": ["abc"]}):
        with pytest.raises(InputError, match="not the state of an accountant"):
            made.engine.accountant.load_state_dict(state)
    with pytest.raises(InputError, match="Schedulers of noise"):
        made.engine.save_checkpoint(path=io.BytesIO(), module=made.module, noise_scheduler=object())


def test_weights_cannot_be_exchanged_in_the_middle_of_a_run():
    made = train(make(epochs=2), epochs=1)
    made.module.load_state_dict({key: torch.zeros_like(v) for key, v in made.module.state_dict().items()})
    with pytest.raises(ModelError, match="changed between two updates"):
        train(made, epochs=1)


def test_an_epsilon_of_unknown_options_is_refused():
    with pytest.raises(InputError, match="takes delta alone, got alphas"):
        make().engine.accountant.get_epsilon(DELTA, alphas=[2, 3])


# -- steering by losses of private records -------------------------------------------------------------------------


def losses_of(made, each=lambda made, loss: None, epochs=1, after=lambda made, losses, epoch: None):
    """A loop that keeps its losses with their numbers of records; each: after every step, after: every epoch."""
    for epoch in range(epochs):
        kept = []
        for x, y in made.loader:
            made.optimizer.zero_grad()
            loss = made.criterion(made.module(x), y)
            loss.backward()
            made.optimizer.step()
            kept.append((loss.item(), len(x)))
            each(made, loss)
        after(made, kept, epoch)


def public_loss(made) -> float:
    made.module.eval()
    with torch.no_grad():
        loss = made.criterion(made.module(torch.ones(10, 6)), torch.arange(10) % 3).item()
    made.module.train()
    return loss


def plateau(made, metric, on=lambda made: made.optimizer, evaluates=False, **options):
    """After every epoch."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(on(made), patience=0, **options)

    def after(made, losses, epoch):
        if evaluates:
            public_loss(made)
        schedule.step(metric(losses))

    losses_of(made, epochs=2, after=after)


def late_plateau(made):
    """Made after the first epoch."""

    made_late = []

    def after(made, losses, epoch):
        if epoch == 1:
            made_late.append(torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer))
            made_late[0].step(mean(losses))

    losses_of(made, epochs=3, after=after)


def by_batch(made):
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer, patience=100)
    losses_of(made, lambda made, loss: schedule.step(loss))


def set_by(name, value):
    """A setting of the optimizer follows a loss in the body of the loop."""

    def change(made, loss):
        for group in made.optimizer.param_groups:
            group[name] = value(loss)

    return lambda made: losses_of(made, change)


def mean(losses) -> float:
    return sum(loss for loss, _ in losses) / len(losses)


def by_hand_while_an_earlier_pass_is_closed(made):
    """Iterators that were left are closed in the body of the next loop, before a setting follows its losses."""
    earlier = [iter(made.loader) for _ in range(3)]
    for batches in earlier:
        step(made, next(batches))

    def change(made, loss):
        if earlier:
            earlier.pop().close()
            for group in made.optimizer.param_groups:
                group["lr"] = 0.1 * loss.item()

    losses_of(made, change)


STEERING = {
    "a rate by hand, after another iterator": by_hand_while_an_earlier_pass_is_closed,
    "a mean of batches": lambda made: plateau(made, mean),
    "a sum": lambda made: plateau(made, lambda losses: sum(loss for loss, _ in losses)),
    "a mean of records": lambda made: plateau(made, lambda losses: sum(loss * n for loss, n in losses) / RECORDS),
    "the last": lambda made: plateau(made, lambda losses: losses[-1][0]),
    "the least": lambda made: plateau(made, lambda losses: min(loss for loss, _ in losses)),
    "scores of private batches": lambda made: plateau(made, lambda losses: float(len(losses) > 1)),
    "rounded": lambda made: plateau(made, lambda losses: round(mean(losses), 2)),
    "negated, beside an evaluation": lambda made: plateau(made, lambda x: -mean(x), evaluates=True, mode="max"),
    "a mean, beside an evaluation": lambda made: plateau(made, mean, evaluates=True),
    "of the caller's optimizer": lambda made: plateau(made, mean, lambda made: made.optimizer.original_optimizer),
    "of a later epoch": late_plateau,
    "by batch": by_batch,
    "a rate by hand": set_by("lr", lambda loss: 0.1 * loss.item()),
    "a rate by hand, by a bound": set_by("lr", lambda loss: 0.1 if loss.item() < 1.0 else 0.2),
    "a momentum": set_by("momentum", lambda loss: min(0.9, loss.item())),
    "a decay": set_by("weight_decay", lambda loss: loss.item()),
}


@pytest.mark.parametrize("way", STEERING.values(), ids=STEERING)
def test_settings_that_follow_losses_of_private_records_are_refused(way):
    with pytest.raises(ModelError, match=r"private|losses"):
        way(make(epochs=3))


def test_a_plateau_of_a_public_metric_is_taken():
    made = make()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer, patience=0, mode="max")
    losses_of(made, epochs=2, after=lambda made, losses, epoch: schedule.step(public_loss(made)))
    assert made.loader.private.is_finished


def broken_off(made):
    for batch in made.loader:
        step(made, batch)
        if made.criterion(made.module(batch[0]), batch[1]).item() < 100:
            break


def broken_off_within(made):
    for x, y in made.loader:
        loss = made.criterion(made.module(x), y)
        loss.backward()
        if loss.item() < 100:
            break
        made.optimizer.step()


def raised(made):
    with pytest.raises(KeyError):
        losses_of(made, lambda made, loss: {}[loss.item()])


ENDS = {
    "break": broken_off,
    "break before the step": broken_off_within,
    "an error": raised,
    "closed after an epoch": lambda made: (losses_of(made), made.engine.close()),
    "hooks removed": lambda made: (losses_of(made), made.module.remove_hooks()),
    "stopped": lambda made: losses_of(made, lambda made, loss: loss.item() < 100 and made.loader.private.stop()),
    "finished": lambda made: (losses_of(made), made.loader.private.finish()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_after_an_end_that_may_follow_losses_the_whole_plan_is_claimed(end):
    made = make()
    private = made.loader.private
    end(made)
    assert private.epsilon_spent().tolist() == private.plan.epsilon_spent().tolist()
    with pytest.warns(EpsilonsWarning, match="whole plan"):
        assert 0 < made.engine.get_epsilon(DELTA) < max(private.epsilon_spent())


def test_a_loop_that_is_left_after_its_last_batch_is_complete():
    made = make()
    for epoch in range(2):
        for number, batch in enumerate(made.loader):
            step(made, batch)
            if number == len(made.loader) - 1:
                break
        assert (made.loader.private.epsilon_spent()[1] > 2.9) == (epoch == 1)
    assert made.engine.get_epsilon(DELTA) == pytest.approx(BUDGETS.max(), rel=1e-3)
