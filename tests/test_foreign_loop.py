"""A foreign loop: one mean loss, loss.backward(), and the same weights as a loop of our own at the same key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from epsilons.doors.foreign_loop import ForeignLoop
from epsilons.errors import BatchDependenceError, CallOrderError, InputError, ModelError, UnsupportedLayerError
from shares import share
from small_runs import (
    CLASSES,
    FEATURES,
    close,
    everyone,
    of_phases,
    parameters_of,
    private_over,
    same,
    some_budgets,
    some_data,
    some_plan,
)

# ruff: noqa: PT012  (a loop is what raises)
pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """An encoder and a head that can be called apart, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.encoder, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())


def apart(model: Net, x: Tensor) -> Tensor:
    return model.head(model.encoder(x).tanh())


def own(model: Net, losses: Callable[..., Tensor], steps: int = 20, **options: Any) -> list[Tensor]:
    """A loop of our own, over (batch,) losses."""
    with private_over(model, plan=some_plan(steps=steps), **options) as private:
        for batch in private.batches:
            private.backward(losses(model, *batch))
            private.step()
    return parameters_of(model)


def foreign(
    model: Net,
    loss: Callable[..., Tensor],
    backward: Callable[[ForeignLoop, Tensor], None] | None = None,
    steps: int = 20,
    reduction: Any = "mean",
    **options: Any,
) -> list[Tensor]:
    """As an Opacus script: zero_grad, loss, backward, step. No raw gradient may reach a parameter."""
    private = private_over(model, **({"plan": some_plan(steps=steps)} | options))
    with ForeignLoop(private, reduction) as loop:
        for batch in loop.batches:
            loop.zero_grad()
            value = loss(model, *batch)
            if backward is None:
                value.backward()
            else:
                backward(loop, value)
            assert all(p.grad is None for p in model.parameters())
            loop.step()
        assert private.is_finished
    assert torch._C._len_torch_function_stack() == 0
    return parameters_of(model)


def cross_entropy(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def losses(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@dataclass(frozen=True)
class Style:
    """How a foreign loop gets its gradients, and a loop of our own with the same losses."""

    loss: Callable[..., Tensor] = cross_entropy
    own: Callable[..., Tensor] = losses
    backward: Callable[[ForeignLoop, Tensor], None] | None = None
    reduction: str = "mean"
    steps: int = 5


def in_two_halves(loop: ForeignLoop, loss: Tensor) -> None:
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()


STYLES = {
    "a mean": Style(steps=20),
    "a module's mean": Style(lambda m, x, y: nn.CrossEntropyLoss()(m(x), y)),
    "a sum": Style(lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), reduction="sum"),
    "a mean by hand": Style(lambda m, x, y: losses(m, x, y).sum() / len(x)),
    "losses by record": Style(losses, backward=lambda loop, value: loop.backward(value)),
    "a door's own call": Style(backward=lambda loop, value: loop.backward(value)),
    "two backward passes": Style(backward=in_two_halves),
    "encoder and head apart": Style(lambda m, x, y: F.cross_entropy(apart(m, x), y), steps=20),
    "two calls": Style(
        lambda m, x, y: F.cross_entropy(m(x), y) + F.cross_entropy(m(x + 1), y),
        lambda m, x, y: losses(m, x, y) + losses(m, x + 1, y),
    ),
    "a shared encoder": Style(
        lambda m, x, y: (lambda z: F.cross_entropy(m.head(z.tanh()), y) + z.square().mean())(m.encoder(x)),
        lambda m, x, y: (lambda z: F.cross_entropy(m.head(z.tanh()), y, reduction="none") + z.square().mean(1))(
            m.encoder(x)
        ),
    ),
    "writing to the outputs": Style(
        lambda m, x, y: F.cross_entropy(m(x).mul_(0.5), y),
        lambda m, x, y: F.cross_entropy(m(x) / 2, y, reduction="none"),
    ),
    "a squared error": Style(
        lambda m, x, y: F.mse_loss(m(x), F.one_hot(y, CLASSES).float()),
        lambda m, x, y: (m(x) - F.one_hot(y, CLASSES)).square().mean(1),
    ),
    "a divergence": Style(
        lambda m, x, y: F.kl_div(m(x).log_softmax(1), F.one_hot(y, CLASSES) * 0.7 + 0.1, reduction="batchmean"),
        lambda m, x, y: F.kl_div(m(x).log_softmax(1), F.one_hot(y, CLASSES) * 0.7 + 0.1, reduction="none").sum(1),
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_foreign_loop_gives_the_weights_of_our_own(style):
    how = STYLES[style]
    expected = own(Net(), how.own, how.steps, max_physical_batch=5)
    got = foreign(Net(), how.loss, how.backward, how.steps, how.reduction, max_physical_batch=5)
    assert close(got, expected, within=1e-6)
    assert not close(got, parameters_of(Net()), within=1e-3)


@pytest.mark.parametrize("engine", ["loop", "vmap", "ghost"])
def test_every_engine_takes_the_losses_of_calls_that_feed_each_other(engine):
    expected = own(Net(), losses, engine=engine)
    assert close(foreign(Net(), STYLES["encoder and head apart"].loss, engine=engine), expected, within=1e-6)


def test_the_default_engine_proves_the_graph_of_a_foreign_loop():
    private = private_over(Net(), engine="ghost")
    with ForeignLoop(private) as loop:
        for x, y in loop.batches:
            F.cross_entropy(apart(private.model, x), y).backward()
            loop.step()
        assert private._clipper._engine.is_proven


# -- what is refused -----------------------------------------------------------------------------------------------


class OwnLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


class Centred(Net):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs - outputs.mean(0)


class TimeFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).T


def penalty(model: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.cross_entropy(outputs, y) + slope.square().mean()


def scaled(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.amp.GradScaler("cpu").scale(cross_entropy(model, x, y))


OTHER_ROWS, OTHER_TARGETS = torch.ones(7, FEATURES), torch.zeros(7, dtype=torch.long)
OUTSIDER = nn.Linear(CLASSES, CLASSES)

#: A loss and the model -> the error and its words.
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "class weights": (
        Net,
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 3.0])),
        BatchDependenceError,
        "a weight for each class.*divides by the weights of all classes",
    ),
    "class weights of nll": (
        Net,
        lambda m, x, y: nn.NLLLoss(torch.tensor([1.0, 2.0, 3.0]))(m(x).log_softmax(1), y),
        BatchDependenceError,
        "a weight for each class",
    ),
    "ignored targets": (
        Net,
        lambda m, x, y: F.cross_entropy(m(x), torch.where(y == 2, -100, y)),
        BatchDependenceError,
        r"ignored ones \(ignore_index\).*each record's own targets first",
    ),
    "a mask's mean": (
        Net,
        lambda m, x, y: (losses(m, x, y) * (y < 2)).sum() / (y < 2).sum(),
        BatchDependenceError,
        r"computes across records.*In this loop the loss must be the mean over the records",
    ),
    "outputs less their mean": (
        Net,
        lambda m, x, y: (lambda o: F.cross_entropy(o - o.mean(0), y))(m(x)),
        BatchDependenceError,
        "operator mean .* computes across records",
    ),
    "a model that mixes": (Centred, cross_entropy, BatchDependenceError, "operator mean .* computes across records"),
    "a sum for a mean": (
        Net,
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
        BatchDependenceError,
        r'may depend on the number of records.*must be the mean .* reduction="mean"',
    ),
    "a constant divisor": (
        Net,
        lambda m, x, y: losses(m, x, y).sum() / 12,
        BatchDependenceError,
        "number of records|adding copies",
    ),
    "a gradient penalty": (Net, penalty, ModelError, "a gradient penalty, or gradients by the inputs"),
    "one number": (OwnLoss, lambda m, x, y: m(x, y), ModelError, "a single number, which has mixed the records"),
    "time first": (
        TimeFirst,
        lambda m, x, y: F.cross_entropy(m(x).T, y),
        ModelError,
        r"shape \(3, \d+\), in a batch of \d+ records",
    ),
    "other rows": (
        Net,
        lambda m, x, y: cross_entropy(m, x, y) + cross_entropy(m, OTHER_ROWS, OTHER_TARGETS),
        ModelError,
        r"shape \(7, 3\), in a batch of \d+ records",
    ),
    "a parameter by itself": (
        Net,
        lambda m, x, y: F.cross_entropy(m(x) * m.scale, y),
        ModelError,
        r"uses trained parameters \(scale\) outside a call",
    ),
    "a penalty on weights": (
        Net,
        lambda m, x, y: cross_entropy(m, x, y) + sum(p.square().sum() for p in m.parameters()),
        ModelError,
        r"trained parameters \(.*\) outside a call.*weight_decay",
    ),
    "parameters alone": (Net, lambda m, x, y: m.scale.square().sum(), ModelError, "that this loop does not see"),
    "another model": (
        Net,
        lambda m, x, y: F.cross_entropy(OUTSIDER(m(x)), y),
        ModelError,
        r"are no output of the model \(shapes .*\(3, 3\)",
    ),
    "a scaled loss": (Net, scaled, ModelError, "scaled by a GradScaler"),
    "losses of all": (Net, losses, ModelError, r"needs one number.*got a loss of shape \(\d+,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_no_mean_over_records_is_refused_and_trains_nothing(name):
    make, loss, error, words = REFUSED[name]
    model = make()
    before = parameters_of(model)
    with pytest.raises(error, match=words):
        foreign(model, loss, steps=2)
    assert same(parameters_of(model), before)
    assert torch._C._len_torch_function_stack() == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("late", [torch.tensor([1.0, 2.0, 3.0]), None], ids=["class weights", "ignored targets"])
def test_a_mean_that_mixes_is_refused_in_every_batch_not_only_where_it_is_checked(late):
    """A target that is ignored may be rare, so that no check sees one."""
    model = Net()
    private = private_over(model, plan=some_plan(steps=6))
    with ForeignLoop(private) as loop, pytest.raises(BatchDependenceError):
        for x, y in loop.batches:
            targets = torch.where(y == 2, -100, y) if private.updates == 4 and late is None else y
            weight = late if private.updates == 4 else None
            F.cross_entropy(model(x), targets, weight=weight).backward()
            loop.step()
    assert private.updates == 4


def test_class_weights_without_a_common_denominator_are_taken():
    weight = torch.tensor([1.0, 2.0, 3.0])
    expected = own(Net(), lambda m, x, y: F.cross_entropy(m(x), y, weight=weight, reduction="none"))
    got = foreign(Net(), lambda m, x, y: (weight[y] * losses(m, x, y)).mean())
    assert close(got, expected, within=1e-6)


ORDERS: dict[str, tuple[Callable[[ForeignLoop, Net, Tensor, Tensor], None], type[Exception], str]] = {
    "no backward": (
        lambda loop, m, x, y: (cross_entropy(m, x, y), loop.step()),  # type: ignore[dict-item, return-value]
        CallOrderError,
        r"before loss.backward\(\)",
    ),
    "zero_grad after backward": (
        lambda loop, m, x, y: (cross_entropy(m, x, y).backward(), loop.zero_grad(), loop.step()),  # type: ignore[dict-item]
        CallOrderError,
        r"before loss.backward\(\)",
    ),
    "no step": (
        lambda loop, m, x, y: cross_entropy(m, x, y).backward(),  # type: ignore[dict-item]
        CallOrderError,
        r"to the next batch without optimizer.step\(\)",
    ),
    "two steps": (
        lambda loop, m, x, y: (cross_entropy(m, x, y).backward(), loop.step(), loop.step()),  # type: ignore[dict-item]
        CallOrderError,
        "outside a batch, or twice",
    ),
    "backward of torch.autograd": (
        lambda loop, m, x, y: (torch.autograd.backward([cross_entropy(m, x, y)]), loop.step()),  # type: ignore[dict-item]
        ModelError,
        "that this loop does not see",
    ),
    "a graph of the gradient": (
        lambda loop, m, x, y: cross_entropy(m, x, y).backward(create_graph=True),  # type: ignore[dict-item]
        ModelError,
        "create_graph=True",
    ),
    "no outputs in the loss": (
        lambda loop, m, x, y: loop.backward(torch.ones((), requires_grad=True)),  # type: ignore[dict-item]
        ModelError,
        "no output that the model gave for this batch",
    ),
    "a loss of another shape": (
        lambda loop, m, x, y: loop.backward(m(x)),  # type: ignore[dict-item]
        ModelError,
        r"one number, or one per record, shape \(\d+,\)",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_another_order_of_calls_is_refused(name):
    act, error, words = ORDERS[name]
    model = Net()
    before = parameters_of(model)
    with ForeignLoop(private_over(model, plan=some_plan(steps=2))) as loop, pytest.raises(error, match=words):
        for x, y in loop.batches:
            act(loop, model, x, y)
    assert same(parameters_of(model), before) == (name != "two steps")  # of which the first is made


def test_a_loss_of_a_former_batch_is_refused():
    model, kept = Net(), []
    with ForeignLoop(private_over(model)) as loop, pytest.raises(CallOrderError, match="gave for a former batch"):
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            loss.backward(retain_graph=True)
            kept.append(loss)
            kept[0].backward(retain_graph=True)
            loop.step()


def test_a_state_that_is_carried_with_its_graph_is_refused():
    model, states = Net(), [torch.zeros(())]
    with ForeignLoop(private_over(model)) as loop, pytest.raises(CallOrderError, match="must not be carried"):
        for x, y in loop.batches:
            state = model.encoder(x + states[-1])
            F.cross_entropy(model.head(state), y).backward()
            states.append(state.mean())
            loop.step()


def test_a_raw_gradient_of_another_loss_never_stays_on_a_parameter():
    """A validation loss with gradients on, between two batches; and outputs of the last batch, after its step."""
    model, seen = Net(), []
    expected = own(Net(), losses)
    with ForeignLoop(private_over(model, plan=some_plan(steps=20))) as loop:
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            loss.backward(retain_graph=True)
            loop.step()
            cross_entropy(model, OTHER_ROWS, OTHER_TARGETS).backward()
            loss.backward()
            seen += [p.grad for p in model.parameters()]
    assert all(gradient is None for gradient in seen)
    assert close(parameters_of(model), expected, within=1e-6)


def test_gradients_by_other_tensors_flow_outside_a_batch():
    """As in a GAN, where the generator learns through the discriminator."""
    model, x = Net(), torch.ones(2, FEATURES, requires_grad=True)
    with ForeignLoop(private_over(model, plan=some_plan(steps=1))) as loop:
        for batch in loop.batches:
            cross_entropy(model, *batch).backward()
            loop.step()
            model(x).sum().backward()
        assert x.grad.abs().max() > 0
    cross_entropy(model, OTHER_ROWS, OTHER_TARGETS).backward()  # closed: all is as before
    assert all(p.grad is not None for p in (model.encoder.weight, model.head.weight))


def test_a_loop_that_is_left_by_an_error_leaves_no_hook_and_no_mode():
    model = Net()
    with pytest.raises(ZeroDivisionError), ForeignLoop(private_over(model)) as loop:
        for x, y in loop.batches:
            cross_entropy(model, x, y)
            raise ZeroDivisionError
    assert torch._C._len_torch_function_stack() == 0
    assert not [*model._forward_hooks, *model.encoder._forward_pre_hooks]


def test_an_error_in_the_model_does_not_leave_its_next_calls_uncut():
    model = Net()
    with ForeignLoop(private_over(model)) as loop:
        batches = loop.batches
        x, y = next(batches)
        with pytest.raises(RuntimeError):
            model(x[:, :2])
        assert cross_entropy(model, x, y).grad_fn is not None
        assert len(loop.calls.cuts) == 1


def test_a_decision_by_the_loss_of_several_records_is_refused():
    model = Net()
    with ForeignLoop(private_over(model)) as loop, pytest.raises(BatchDependenceError, match="decides by values"):
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            if loss.item() > 0.01:
                loss = 2 * loss
            loss.backward()
            loop.step()


def test_a_decision_by_what_was_read_after_the_backward_pass_is_none_of_the_loss():
    """Such as a script that saves the best epoch."""
    model, best, total = Net(), 100.0, 0.0
    with ForeignLoop(private_over(model)) as loop:
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            loss.backward()
            total += loss.item()
            loop.step()
        assert loop.private.is_finished
    assert min(total, best) == total


def test_an_encoder_outside_of_the_private_model_is_refused():
    """It would get no gradient, and stay as it is."""
    model, encoder = Net(), nn.Linear(FEATURES, FEATURES)
    with (
        ForeignLoop(private_over(model)) as loop,
        pytest.raises(ModelError, match="parameters that the model does not"),
    ):
        for x, y in loop.batches:
            cross_entropy(model, encoder(x), y).backward()
            loop.step()
    with ForeignLoop(private_over(model)) as loop:
        for x, y in loop.batches:
            with torch.no_grad():
                x = encoder(x)
            cross_entropy(model, x.requires_grad_(), y).backward()
            loop.step()
        assert loop.private.is_finished


def test_a_running_total_may_be_compared_after_the_loop_over_batches():
    model, best, total = Net(), 100.0, 0.0
    with ForeignLoop(private_over(model)) as loop:
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            total += loss.item()  # before the backward pass
            loss.backward()
            loop.step()
        if total < best:
            best = total
        assert loop.private.is_finished
    assert best == total


def test_a_total_that_is_compared_within_its_batch_is_refused():
    """Also behind an inner loop, in which no batch ends, and at the end of the batch, before the next one."""
    model = Net()
    with ForeignLoop(private_over(model)) as loop, pytest.raises(BatchDependenceError, match="decides by values"):
        for x, y in loop.batches:
            total = 0.0
            loss = cross_entropy(model, x, y)
            for part in (loss, 2 * loss):
                total += part.item()
            if total > 0.01:
                loss = 2 * loss
            loss.backward()
            loop.step()

    model, sums = Net(), 0.0
    with ForeignLoop(private_over(model)) as loop, pytest.raises(BatchDependenceError, match="decides by values"):
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            sums += loss.item()
            loss.backward()
            loop.step()
            if sums > 100:
                break


def test_a_second_backward_pass_counts_what_was_read_before_it():
    model = Net()
    with ForeignLoop(private_over(model)) as loop, pytest.raises(BatchDependenceError, match="decides by values"):
        for x, y in loop.batches:
            loss = cross_entropy(model, x, y)
            loss.backward(retain_graph=True)
            if loss.item() > 0.01:
                (2 * loss).backward()
            loop.step()


def test_a_scripted_model_is_refused_and_keeps_no_hook():
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), torch.jit.script(nn.Linear(CLASSES, CLASSES)))
    with private_over(model) as private, pytest.raises(ModelError, match=r"module 1 .* takes no hooks"):
        ForeignLoop(private)
    assert not [*model._forward_hooks, *model[0]._forward_pre_hooks]


def test_a_loss_may_be_logged_before_its_backward_pass():
    model, log = Net(), []
    with ForeignLoop(private_over(model)) as loop:
        for x, y in loop.batches:
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            log.append((loss.item(), float((outputs.argmax(1) == y).float().mean())))
            loss.backward()
            loop.step()
        assert loop.private.is_finished


def test_a_copy_of_the_model_holds_nothing_of_the_run_and_a_file_is_refused(tmp_path):
    """Hooks lead to the loop, and the loop to the secret key."""
    model = Net()
    with ForeignLoop(private_over(model)) as loop:
        for x, y in loop.batches:
            twin = copy.deepcopy(model)
            with pytest.raises(InputError, match="secret key"):
                torch.save(model, tmp_path / "model.pt")
            torch.save(twin.state_dict(), tmp_path / "state.pt")
            twin(x).sum().backward()
            assert twin.head.weight.grad.abs().max() > 0
            cross_entropy(model, x, y).backward()
            loop.step()
            break
    torch.save(model, tmp_path / "model.pt")


def test_another_reduction_is_refused():
    with private_over(Net()) as private, pytest.raises(InputError, match=r"must be .* got"):
        ForeignLoop(private, "none")


# -- the proof from the loop's own batches ---------------------------------------------------------------------------

#: (outputs, classes, targets) -> a mean over the records.
MEANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "smooth": lambda o, y, t: F.cross_entropy(o, y, label_smoothing=0.1),
    "probabilities": lambda o, y, t: F.cross_entropy(o, t.softmax(1)),
    "huber": lambda o, y, t: F.huber_loss(o, t),
    "binary": lambda o, y, t: F.binary_cross_entropy(o.sigmoid(), t.sigmoid()),
    "weighted classes": lambda o, y, t: F.binary_cross_entropy_with_logits(
        o, t.sigmoid(), pos_weight=torch.arange(3.0)
    ),
    "divergence": lambda o, y, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "poisson": lambda o, y, t: F.poisson_nll_loss(o, t.abs()),
    "gaussian": lambda o, y, t: F.gaussian_nll_loss(o[:, 0], t[:, 0], F.softplus(o[:, 1])),
    "embedding": lambda o, y, t: F.hinge_embedding_loss(o, t.sign()),
    "cosine": lambda o, y, t: F.cosine_embedding_loss(o, t, t[:, 0].sign()),
    "margins": lambda o, y, t: F.multi_margin_loss(o, y),
    "margins of labels": lambda o, y, t: F.multilabel_margin_loss(o, F.pad(y[:, None], (0, 2), value=-1)),
    "triplets within a record": lambda o, y, t: F.triplet_margin_loss(o, t, t + 1),
    "soft margins": lambda o, y, t: F.multilabel_soft_margin_loss(o, (t > 0).float()),
    "places": lambda o, y, t: -o.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "a sum over n": lambda o, y, t: -(o.log_softmax(1) * F.one_hot(y, 3)).sum() / o.shape[0],
    "losses over n": lambda o, y, t: (F.cross_entropy(o, y, reduction="none") / len(y)).sum(),
    "focal": lambda o, y, t: ((1 - (-F.cross_entropy(o, y, reduction="none")).exp()) ** 2).mean(),
    "elbo": lambda o, y, t: (F.mse_loss(o, t, reduction="sum") - (1 + o - o.pow(2) - o.exp()).sum() / 2) / len(o),
    "a quarter": lambda o, y, t: F.cross_entropy(o, y) / 4,
    "column by column": lambda o, y, t: sum(F.mse_loss(o[:, i], t[:, i]) for i in range(3)),  # type: ignore[misc]
    "noisy labels": lambda o, y, t: F.mse_loss(o, 0.8 + 0.2 * torch.rand(len(o), 3)),
    "a distribution": lambda o, y, t: -torch.distributions.Categorical(logits=o).log_prob(y).mean(),
    "own labels": lambda o, y, t: F.cross_entropy(o, o.detach().argmax(1)),
    "unless it is empty": lambda o, y, t: F.cross_entropy(o, y) if len(o) else o.sum(),
    "unless its shape is empty": lambda o, y, t: o.sum() if o.shape[0] == 0 else F.cross_entropy(o, y),
    "if it has any": lambda o, y, t: F.cross_entropy(o, y) if o.size(0) > 0 and True else o.sum(),
    "not if it has none": lambda o, y, t: o.sum() if not len(y) or len(y) < 1 else F.cross_entropy(o, y),
    "labels of NumPy": lambda o, y, t: F.cross_entropy(o, torch.from_numpy(y.numpy())),
}


def by_parity(o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    n = len(o)
    n = n % 2
    return F.cross_entropy(o, y) * 2 if n else F.cross_entropy(o, y)


def by_what_is_written_over(o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    n = len(o)
    n -= 1000
    if n > 0:
        o = 2 * o
    return F.cross_entropy(o, y)


def by_what_is_left(o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    n = o.shape[0]
    left = n - 1000
    if left > 0:
        o = 2 * o
    return F.cross_entropy(o, y)


#: The same, with losses that depend on other records, or on their number.
MIXED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a root of n": lambda o, y, t: F.cross_entropy(o, y, reduction="sum") / len(o) ** 0.5,
    "n inside": lambda o, y, t: F.mse_loss(o / len(o), t),
    "centred": lambda o, y, t: F.mse_loss(o - o.mean(0), t),
    "the hardest": lambda o, y, t: F.cross_entropy(o, y, reduction="none").topk(3).values.mean(),
    "the hardest by NumPy": lambda o, y, t: (
        (o - t).pow(2)[torch.from_numpy(o.detach().numpy()[:, 0].argsort()[:4])].mean()
    ),
    "half": lambda o, y, t: F.cross_entropy(o[: len(o) // 2], y[: len(o) // 2]),
    "a number of all": lambda o, y, t: F.cross_entropy(o, y) * F.cross_entropy(o, y).item(),
    "a mean by NumPy": lambda o, y, t: F.mse_loss(o - torch.from_numpy(o.detach().numpy().mean(0)), t),
    "a decision": lambda o, y, t: F.cross_entropy(o, y) * (2 if F.cross_entropy(o, y).item() > 100 else 1),
    "a decision by n": lambda o, y, t: F.cross_entropy(o, y) * (2 if len(o) > 1000 else 1),
    "a decision by chance": lambda o, y, t: F.cross_entropy(o, y if torch.rand(()) < 0.99 else y.flip(0)),
    "pairs": lambda o, y, t: (o[1:] - o[:-1]).pow(2).mean(),
    "other targets": lambda o, y, t: F.mse_loss(o, t[torch.randperm(len(t))]),
    "mixed up": lambda o, y, t: 0.7 * F.cross_entropy(o, y) + 0.3 * F.cross_entropy(o, y.roll(1)),
    "balanced": lambda o, y, t: (F.cross_entropy(o, y, reduction="none") / torch.bincount(y, minlength=3)[y]).mean(),
    "contrastive": lambda o, y, t: F.cross_entropy(o @ t.T, torch.arange(len(o))),
    "a spread": lambda o, y, t: F.mse_loss(o, t) / o.std().detach(),
}


@pytest.mark.parametrize("name", share(MEANS, 13))
def test_a_mean_of_losses_by_record_is_proven(name):
    def loss(model: Net, x: Tensor, y: Tensor) -> Tensor:
        return MEANS[name](model(x), y, x[:, :3])

    assert not same(foreign(Net(), loss, steps=4), parameters_of(Net()))


@pytest.mark.parametrize("name", share(MIXED, 10))
def test_a_loss_that_mixes_records_is_refused_and_leaves_the_model_as_it_was(name):
    model = Net()
    before = parameters_of(model)
    with pytest.raises(BatchDependenceError, match="In this loop the loss must be the mean"):
        foreign(model, lambda m, x, y: MIXED[name](m(x), y, x[:, :3]), steps=4)
    assert same(parameters_of(model), before)


#: Losses that decide by the number of records, which ends at a bound that no batch here reaches.
BY_NUMBER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the parity of n": by_parity,
    "n, which is written over": by_what_is_written_over,
    "what is left of n": by_what_is_left,
    "n and another": lambda o, y, t: F.cross_entropy(o, y) * (2 if len(o) and len(o) > 1000 else 1),
    "whether n is 1": lambda o, y, t: F.cross_entropy(o, y) * (2 if len(o) == 1 else 1),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_a_loss_that_decides_by_the_number_of_records_is_refused(name):
    with pytest.raises(BatchDependenceError, match="In this loop the loss must be the mean"):
        foreign(Net(), lambda m, x, y: BY_NUMBER[name](m(x), y, x[:, :3]), steps=4)


class Meter:
    """As scripts have one."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n

    @property
    def average(self) -> float:
        return self.sum / self.count if self.count > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.average:.3f}" if self.count else "-"


def accuracy(o: Tensor, y: Tensor) -> list[Tensor]:
    n = y.size(0)
    if n == 1:
        return [torch.zeros(1)]
    return [(o.argmax(1) == y).float().sum().mul_(100.0 / n)]


def f1(o: Tensor, y: Tensor) -> float:
    found, right = (o.argmax(1) == 1).sum().item(), ((o.argmax(1) == 1) & (y == 1)).sum().item()
    if found == 0 or right == 0:
        return 0.0
    precision, recall = right / found, right / (y == 1).sum().item()
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def shown_by_meters(o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    losses, scores, best = Meter(), Meter(), 0.0
    losses.update(loss.item(), y.size(0))
    scores.update(accuracy(o.detach(), y)[0].item(), len(y))
    score = f1(o, y)
    if score > best:
        best = score
    print(losses, scores.average, best)
    return loss


def printed_if_large(o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    large = loss.item() > 1e9
    if large:
        print(loss)
        large = False
    return loss


class Latest:
    """A meter, too, with names of its own: uses of an attribute count in the whole file."""

    def put(self, value: float) -> None:
        self.latest = value

    @property
    def above(self) -> float:
        return self.latest if self.latest > 0 else 0.0


def one_of_two(double: Tensor, loss: Tensor, o: Tensor) -> Tensor:
    return double if len(o) > 1000 else loss


def large(o: Tensor) -> int:
    if o.shape[0] > 1000:
        return 1
    return 0


def chosen_by_a_flag(o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    double, is_doubled = 2 * loss, False
    if f1(o, y) > 0.99:
        is_doubled = True
    return double if is_doubled else loss


def chosen_by_a_meter(o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    double, meter = 2 * loss, Latest()
    meter.put(loss.item())
    if meter.above > 1000:
        return double
    return loss


def chosen_in_branches(o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    given = loss
    double = 2 * loss
    if o.shape[0] > 1000:
        given = double
    return given


#: What is done with a complete loss: it is shown, or one of two losses is chosen.
SHOWN = {"by meters": shown_by_meters, "by a print": printed_if_large}
CHOSEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "by a function": lambda o, y, loss: one_of_two(2 * loss, loss, o),
    "by an expression": lambda o, y, loss: (lambda double: double if len(o) > 1000 else loss)(2 * loss),
    "by a number": lambda o, y, loss: [loss, 2 * loss][large(o)],
    "by a flag": chosen_by_a_flag,
    "by a meter": chosen_by_a_meter,
    "in branches": chosen_in_branches,
}


@pytest.mark.parametrize("use", SHOWN.values(), ids=SHOWN)
def test_what_only_shows_a_complete_loss_is_free(use):
    def loss(model: Net, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return use(outputs, y, F.cross_entropy(outputs, y))

    assert close(foreign(Net(), loss), foreign(Net(), cross_entropy), within=1e-7)


@pytest.mark.parametrize("use", CHOSEN.values(), ids=CHOSEN)
def test_a_loss_that_is_chosen_by_values_of_other_records_is_refused(use):
    def loss(model: Net, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return use(outputs, y, F.cross_entropy(outputs, y))

    with pytest.raises(BatchDependenceError, match="decides"):
        foreign(Net(), loss, steps=4)


def test_what_is_read_of_a_complete_loss_is_free_unless_it_may_change_it():
    def printed(model: Net, x: Tensor, y: Tensor, is_scaled: bool = False) -> Tensor:
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        accuracy = (outputs.detach().numpy().argmax(1) == y.numpy()).mean()
        if loss.item() > 1e6 or accuracy > 2:
            seen.append(accuracy)
        if is_scaled and loss.item() > 1e6:
            loss = loss / 10
        loss.backward()
        return loss

    seen: list[float] = []
    taken = lambda loop, value: None  # noqa: E731  # backward was called
    assert close(foreign(Net(), printed, taken), foreign(Net(), cross_entropy), within=1e-7)
    with pytest.raises(BatchDependenceError, match="decides by values of several records"):
        foreign(Net(), lambda m, x, y: printed(m, x, y, True), taken)


def test_a_size_that_comes_late_and_changes_the_operators_is_refused():
    """Batches of more or fewer records than any before are watched, too."""
    large = of_phases({"steps": 8, "sample_rate": [0.2, 0.2]}, {"steps": 1, "sample_rate": [0.95, 0.95]})
    sizes = {}

    def loss(model: Net, x: Tensor, y: Tensor) -> Tensor:
        sizes["few"] = bool(sizes.get("few", True)) and len(x.tolist()) < 40  # a list hides the number
        losses = F.cross_entropy(model(x), y, reduction="none")
        return losses.mean() if sizes["few"] else losses.square().mean()

    budgets = some_budgets(tuple(large.epsilons.tolist()))
    with pytest.raises(BatchDependenceError, match="does not compute the same of every batch"):
        foreign(Net(), loss, plan=large, budgets=budgets, max_physical_batch=60)


def test_a_loop_that_is_left_within_a_draw_goes_on_with_the_next_one():
    private = private_over(model := Net(), plan=some_plan(steps=5))
    with ForeignLoop(private) as loop:
        for number, (x, y) in enumerate(loop.batches):
            if number == 2:
                break
            cross_entropy(model, x, y).backward()
            loop.step()
        for x, y in loop.batches:
            cross_entropy(model, x, y).backward()
            loop.step()
        assert (private.updates, private.ledger.charged, private.is_finished) == (4, (5,), True)


# -- checks of the model's calls -------------------------------------------------------------------------------------


def test_with_checks_of_the_model_the_loop_never_sees_a_check():
    seen = []

    def counted(model: Net, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        return F.cross_entropy(apart(model, x), y)

    expected = own(Net(), losses, max_physical_batch=100)
    got = foreign(Net(), counted, max_physical_batch=100)
    assert close(got, expected, within=1e-6)
    assert len(seen) == 20


class Checkpointed(Net):
    """A part of it is recorded in the backward pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("most", [1, 100])
def test_a_part_that_is_recorded_in_the_backward_pass_is_refused(most):
    model = Checkpointed()
    before = parameters_of(model)
    with pytest.raises(UnsupportedLayerError, match="use_reentrant=False"):
        foreign(model, cross_entropy, max_physical_batch=most)
    assert same(parameters_of(model), before)


def test_checks_of_the_model_refuse_a_model_that_mixes():
    model = Centred()
    before = parameters_of(model)
    with pytest.raises(BatchDependenceError, match=r"operator mean .* across records"):
        foreign(model, cross_entropy)
    assert same(parameters_of(model), before)


class Several(Net):
    """Two outputs, and parts that can be called one after the other; one of them mixes."""

    def __init__(self, mixing: int) -> None:
        super().__init__()
        self.mixing = mixing

    def part(self, x: Tensor, number: int) -> Tensor:
        return x - x.mean(0) if number == self.mixing else x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.part(self.head(self.encoder(x).tanh()), number) for number in range(3))  # type: ignore[return-value]


class Part(nn.Linear):
    """A layer of its own; one of them mixes."""

    is_mixing = False

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs - outputs.mean(0) if self.is_mixing else outputs


@pytest.mark.parametrize("mixing", [0, 1, 2, None])
@pytest.mark.parametrize("way", ["outputs", "calls"])
def test_checks_of_the_model_see_every_output_and_every_call(way, mixing):
    def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x) if way == "outputs" else [layer(x) for layer in model]
        return sum(F.cross_entropy(output, y) for output in outputs)

    if way == "outputs":
        model: nn.Module = Several(-1 if mixing is None else mixing)
    else:
        model = nn.ModuleList(Part(FEATURES, CLASSES) for _ in range(3))
        for number, layer in enumerate(model):
            layer.is_mixing = number == mixing
    before = parameters_of(model)
    if mixing is None:
        assert not same(foreign(model, summed, steps=3), before)
        return
    with pytest.raises(BatchDependenceError, match=r"operator mean .* across records"):
        foreign(model, summed, steps=3)
    assert same(parameters_of(model), before)


class Meeting(Net):
    """Records that the last feature names get their mean, through values that no operator shows."""

    def forward(self, x: Tensor) -> Tensor:
        inputs, named = x.numpy(), x[:, -1:].numpy() > 50
        mean = (inputs * named).sum(0) / max(1, named.sum())
        return super().forward(torch.from_numpy(inputs + named * (mean - inputs)).float().clamp(-9, 9))


def test_checks_of_the_model_find_a_few_records_that_meet_out_of_sight():
    """Any two records are in different halves of some form."""
    inputs, targets = some_data()
    for one, other in [(0, 1), (7, 8), (14, 15), (21, 59), (28, 29), (35, 36), (44, 45), (50, 51)]:
        named = inputs.clone()
        named[:, -1] = 0.0
        named[[one, other], -1] = 99.0
        with pytest.raises(BatchDependenceError, match="moved the"):
            foreign(Meeting(), cross_entropy, plan=everyone(1), data=(named, targets))


# -- precision, resuming, randomness -------------------------------------------------------------------------------


def test_products_that_cancel_in_16_bits_raise_no_false_alarm():
    """Logits far from 0: their products with gradients that add up to 0 cancel."""

    class Far(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 300

    def in_16_bits(model: Net, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).bfloat16(), y)

    with pytest.raises(BatchDependenceError):
        foreign(Far(), lambda m, x, y: in_16_bits(m, x - x.mean(0), y), steps=2)
    assert not same(foreign(Far(), in_16_bits, steps=12), parameters_of(Far()))


def test_a_foreign_run_that_is_resumed_has_the_same_bits(tmp_path):
    def run(folder: str, until: int | None = None, resume: bool = False) -> list[Tensor]:
        model = Net()
        model.dropped = nn.Dropout(0.3)
        private = private_over(model, run_dir=tmp_path / folder, resume=resume, seed=5)
        with ForeignLoop(private) as loop:
            for x, y in loop.batches:
                F.cross_entropy(model.dropped(model(x)), y).backward()
                if loop.step() and private.updates == until:
                    break
        return parameters_of(model)

    whole = run("whole")
    assert not same(run("parts", until=3), whole)
    assert same(run("parts", resume=True), whole)


def test_records_with_a_gradient_that_is_not_finite_contribute_nothing():
    inputs, targets = some_data()
    spoilt = inputs.clone()
    spoilt[::7] = torch.inf
    expected = own(Net(), losses, data=(spoilt, targets))
    assert close(foreign(Net(), cross_entropy, data=(spoilt, targets)), expected, within=1e-6)


def test_outputs_that_the_loss_masks_may_be_infinite():
    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.tensor([False, False, True]), -torch.inf)

    some = (some_data()[0], some_data()[1].clamp_max(1))
    expected = own(Masked(), losses, data=some)
    assert close(foreign(Masked(), cross_entropy, data=some), expected, within=1e-6)
    assert not same(expected, parameters_of(Masked()))
