"""The recipes of docs/recipes.md run, log public numbers only, and an average of weights resumes to the same bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import epsilons
import trackers
from options import fit_flat
from pages import ROOT, blocks, run_python

PAGE = ROOT / "docs" / "recipes.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def page(folder) -> SimpleNamespace:
    """The names that the page defines, run from top to bottom, and what its trackers were given."""
    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        logged = trackers.install(monkeypatch)
        for block in blocks(PAGE, "python"):
            run_python(block, PAGE, names)
    return SimpleNamespace(**names, logged=logged)


# -- an average of the weights -----------------------------------------------------------------------------------------


class Cut(Exception):
    pass


@pytest.mark.parametrize("at", [1, 17, 39])
def test_an_average_of_weights_resumes_to_the_same_bits(page, tmp_path, at):
    def cut(private: epsilons.Private) -> None:
        if private.updates == at:
            raise Cut

    whole = page.train_with_average(tmp_path / "whole", seed=3)
    with pytest.raises(Cut):
        page.train_with_average(tmp_path / "cut", seed=3, callback=cut)
    resumed = page.train_with_average(tmp_path / "cut", seed=3, resume=True)
    assert resumed.n_averaged == whole.n_averaged == page.plan.steps
    assert torch.equal(resumed.module.weight, whole.module.weight)


def test_the_average_is_that_of_the_weights_after_each_update(page, tmp_path):
    after: list[torch.Tensor] = []
    average = page.train_with_average(
        tmp_path / "run", callback=lambda private: after.append(private.model.weight.detach().double().clone())
    )
    expected = after[0]  # AveragedModel starts with the first weights that it is given
    for weight in after[1:]:
        expected = 0.9 * expected + 0.1 * weight
    assert len(after) == page.plan.steps
    torch.testing.assert_close(average.module.weight.double(), expected, rtol=1e-4, atol=1e-6)


# -- Adam with bias correction -----------------------------------------------------------------------------------------


def test_the_noise_of_the_plan_is_that_of_an_update(page):
    """Losses without a gradient: every update is noise alone, and the second moment estimates its variance."""
    model = torch.nn.Linear(64, 100)
    made = []

    def optimizer(parameters):
        made.append(page.AdamBC(parameters, page.noise_of_average(page.plan)))
        return made[0]

    nothing = lambda outputs, targets: 0.0 * outputs.sum(1)  # noqa: E731
    epsilons.fit(
        model,
        (page.inputs, page.targets),
        page.plan,
        budgets=page.budgets,
        training=epsilons.Training(loss=nothing, optimizer=optimizer),
    )
    state = made[0].state[model.weight]
    assert state["step"] == page.plan.steps
    second = state["second"] / (1 - 0.999 ** state["step"])
    assert second.mean().sqrt().item() == pytest.approx(page.noise_of_average(page.plan), rel=0.02)


def test_without_noise_and_floor_it_is_adam(page):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    corrected = page.AdamBC([ours], noise_std=0.0, lr=0.1, floor=0.0)
    adam = torch.optim.Adam([theirs], lr=0.1, eps=0.0)
    for _ in range(20):
        ours.grad = theirs.grad = torch.randn(5)
        corrected.step()
        adam.step()
    torch.testing.assert_close(ours, theirs)


def test_the_variance_of_the_noise_is_subtracted_and_the_floor_kept(page):
    """One step, by hand: the moments after bias correction are the gradient g and g². Algorithm 1 of Tang et al."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.tensor([5.0, 3.5, 0.1], dtype=torch.float64)
    page.AdamBC([p], noise_std=3.0, lr=1.0, floor=0.25).step()
    expected = [-5 / 4, -3.5 / 3.25**0.5, -0.1 / 0.5]
    torch.testing.assert_close(p.detach(), torch.tensor(expected, dtype=torch.float64))


def test_a_plan_of_several_phases_has_no_one_noise(page):
    phases = SimpleNamespace(phases=(page.plan.phases[0],) * 2)
    with pytest.raises(ValueError, match="too many values"):
        page.noise_of_average(phases)


def test_adam_with_bias_correction_resumes_to_the_same_bits(page, tmp_path):
    def fitted(run_dir, resume=False, at=None):
        def cut(private: epsilons.Private) -> None:
            if private.updates == at:
                raise Cut

        torch.manual_seed(0)
        model = torch.nn.Linear(64, 10)
        noise = page.noise_of_average(page.plan)
        data = (page.inputs, page.targets)
        options = {"budgets": page.budgets, "seed": 5, "run_dir": run_dir, "resume": resume, "callbacks": [cut]}
        fit_flat(model, data, page.plan, optimizer=lambda parameters: page.AdamBC(parameters, noise), **options)
        return model

    whole = fitted(tmp_path / "whole")
    with pytest.raises(Cut):
        fitted(tmp_path / "cut", at=11)
    assert torch.equal(fitted(tmp_path / "cut", resume=True).weight, whole.weight)


# -- trackers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_tracker_is_given_steps_and_spends_alone(page, tracker):
    logged = page.logged[tracker]
    assert [step for step, _ in logged] == [10, 20, 30, 40]
    for step, values in logged:
        assert set(values) == {"steps charged", "epsilon charged/0.5", "epsilon charged/2"}
        assert values["steps charged"] == step
    last = logged[-1][1]
    assert last["epsilon charged/0.5"] <= 0.5
    assert last["epsilon charged/2"] == pytest.approx(2.0, rel=1e-3)


def test_tensorboard_is_given_the_same_numbers(page, folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "runs" / "board")).Reload()
    assert set(events.Tags()["scalars"]) == {"steps charged", "epsilon charged/0.5", "epsilon charged/2"}
    assert [event.value for event in events.Scalars("steps charged")] == list(range(1, 41))


def test_trackers_are_given_no_spend_where_few_records_hold_some_budget(page):
    budgets = epsilons.Budgets([1.0] * 90 + [2.0] * 10, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(3, 20, 1.0), accountant="rdp")
    seen = []
    data = torch.randn(100, 4), torch.arange(100) % 2
    epsilons.fit(
        torch.nn.Linear(4, 2),
        data,
        plan,
        budgets=budgets,
        callbacks=[lambda private: seen.append(page.public_numbers(private))],
    )
    assert seen == [{"steps charged": 1}, {"steps charged": 2}, {"steps charged": 3}]
