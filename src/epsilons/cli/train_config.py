"""Training by a config: plan, train, and say what came of it. torch loads here."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..disclosure import hides
from ..errors import EpsilonsError, InputError, ModelError
from ..ledger import read_account
from ..plain import plain
from ..planning import Plan
from ..planning.display import WITHHELD, shown, spend_table
from ..run_folder import Run
from ..training import EvalData, Performance, Private, fit
from ..training.models import build
from . import config as configs
from . import launched
from .console import console, show_plan, show_table
from .prepare import Prepared, prepare


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for beside the config."""

    plan: Path | None = None
    run_dir: Path | None = None
    quiet: bool = False
    as_json: bool = False
    tensorboard: bool = False
    resume: bool = False


class Interrupted(EpsilonsError):
    """Ctrl-C while training; the text says what was charged and what can be done."""

    exit_code = 130


def train(file: Path, folder: Path, wishes: Wishes) -> None:
    """Train as the config says, once, or once per seed, into `folder`; under torchrun, in several processes."""
    config = configs.read(file)
    with launched.joined(config.training.device) as ranks:
        if not ranks.is_main:  # the first speaks, and writes, for all
            wishes = replace(wishes, quiet=True, as_json=False, tensorboard=False)
        if ranks.is_distributed:
            torch.manual_seed(ranks.broadcast(torch.initial_seed()))  # a model without a seed begins alike on all
        _train(file, config, folder, wishes)


def _train(file: Path, config: configs.Config, folder: Path, wishes: Wishes) -> None:
    prepared = prepare(config, file.parent)
    seeds = config.training.seeds
    each: list[int | None] = [*seeds] or [None]
    begun = [_place(folder, seed, seeds) / "plan.json" for seed in each if wishes.resume]
    begun = [plan_file for plan_file in begun if plan_file.is_file()]
    if wishes.resume and not begun:
        raise InputError(
            f"{folder} holds no run to go on with. Name the folder of the run with --run-dir, or leave out --resume to "
            "begin a run there."
        )
    saved = begun[0] if begun else wishes.plan  # what a run was charged under, it goes on under
    plan = Plan.load(saved) if saved else prepared.plan()
    out = console(quiet=wishes.quiet or wishes.as_json)
    show_data(prepared, out)
    show_plan(plan, out)
    if wishes.resume and (others := _differences(plan, prepared)):
        out.print(f"This run goes on under its own plan, above. The config asks for another: {others}.")
    if config.performance.compile:
        out.print("The first update compiles the step, which may take a minute.", style="dim")
    # the config's own folder, so that its model can stand beside it
    sys.path.insert(0, str(file.parent.resolve()))
    runs = [_once(file, prepared, plan, _place(folder, seed, seeds), seed, wishes) for seed in each]
    for run in runs:
        out.print(f"{sum(run.charged):,} of {plan.steps:,} steps charged{_score(run)}")
    show_table(spend_table(plan, runs[0].charged), out)
    out.print("This run alone: other runs on these people, tuning among them, spend on top.", style="dim")
    if seeds:
        out.print("Seeded: whoever knows the seed can undo the noise. Train without seeds for a release.", style="dim")
    out.print(f"\nKept in {plain(folder)}/. What to read next: epsilons report {plain(runs[0].path)}", soft_wrap=True)
    if wishes.as_json:
        print(json.dumps({"runs": [_as_json(run) for run in runs]}, indent=1))


def _differences(one: Plan, prepared: Prepared) -> str:
    """In what the plan of the config is another one; a run that goes on does not need it, so it may be impossible."""
    try:
        other = prepared.plan()
    except EpsilonsError:
        return "one that cannot be made"
    names = ("strategy", "options", "accountant", "steps", "batch_size", "clip_norm", "epsilons", "counts")
    return ", ".join(name for name in names if not np.array_equal(getattr(one, name), getattr(other, name)))


def show_data(prepared: Prepared, out: Any) -> None:
    """What is trained on, in a line or two."""
    simulated = "SIMULATED " if prepared.config.budgets.shares is not None else ""
    kinds = "a number to predict" if prepared.classes is None else f"{len(prepared.classes)} classes"
    tested = "nothing held out for testing" if prepared.test is None else f"{len(prepared.test.targets):,} to test on"
    out.print(
        f"{plain(prepared.config.data.train)}: {len(prepared.budgets):,} records of shape "
        f"{prepared.train.inputs.shape[1:]}, {kinds}, {tested}; {simulated}budgets in "
        f"{len(prepared.budgets.epsilons):,} groups"
    )


def _place(folder: Path, seed: int | None, seeds: list[int]) -> Path:
    return folder / f"seed-{seed}" if len(seeds) > 1 else folder


def _once(file: Path, prepared: Prepared, plan: Plan, run_dir: Path, seed: int | None, wishes: Wishes) -> Run:
    config, training = prepared.config, prepared.config.training
    if seed is not None:
        torch.manual_seed(seed)
    model = build(config.model.name, prepared.train.inputs.shape[1:], prepared.outputs, **config.model.options)
    device = _device(training.device)
    inputs, targets = (torch.from_numpy(array) for array in prepared.train)
    check_outputs(model, inputs, prepared.outputs, config.model.name)
    test = None
    if prepared.test is not None:
        test = EvalData(
            tuple(torch.from_numpy(array) for array in prepared.test),
            public=config.data.test_public,
            classes=prepared.classes,
            groups=prepared.test_groups(plan),
        )
    seen: list[Private] = []
    ledger = run_dir / "ledger.jsonl"
    epoch = read_account(ledger, plan).epoch if wishes.resume and ledger.is_file() else None

    def tell(now: int, consequence: str) -> None:
        if epoch is not None and now > epoch:
            console(stderr=True, quiet=wishes.quiet).print(
                "What may move a sum is not as it was when this run was cut off (settings, data, machine, threads), "
                f"its key is gone, or this folder is a copy: it goes on under a new key, and {consequence}."
            )

    def see(private: Private) -> None:
        if not seen:
            tell(private.ledger.epoch, f"steps from {private.updates:,} on are charged again")
        seen[:] = [private]

    board = None
    if wishes.tensorboard:
        from ..training.tensorboard import TensorBoard

        board = TensorBoard(run_dir.parent / f"{run_dir.name}-tensorboard")
    try:
        run = fit(
            model,
            (inputs, targets),
            plan,
            budgets=prepared.budgets,
            loss=training.loss,
            optimizer=training.optimizer,
            lr=training.lr,
            momentum=training.momentum,
            eval_data=test,
            eval_every=training.eval_every,
            device=device,
            performance=Performance(**config.performance.model_dump()),
            seed=seed,
            randomness=training.randomness,
            run_dir=run_dir,
            resume=wishes.resume,
            checkpoint_every=training.checkpoint_every,
            callbacks=[see, *([board] if board else [])],
            progress=not wishes.quiet,
            metadata={
                "config": config.model_dump(mode="json"),
                "tiers": config.budgets.tiers,
                "simulated": config.budgets.shares is not None,
            },
        )
    except KeyboardInterrupt:
        done = f"after {sum(seen[0].ledger.charged):,} of {plan.steps:,} steps" if seen else "before the first update"
        started_by = "torchrun … -m " if launched.processes() > 1 else ""
        raise Interrupted(
            f"interrupted {done}. To go on, which spends nothing twice if all is as it was: {started_by}epsilons train "
            f"{file} --run-dir {run_dir if len(config.training.seeds) < 2 else run_dir.parent} --resume"
        ) from None
    if board:
        board.close(run.metrics)
    if epoch is not None and not seen:
        tell(read_account(ledger, plan).epoch, "steps that were charged already leave none to make again")
    return run


def _device(name: str) -> str:
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, NotImplementedError):
            raise InputError(f'training.device {name!r} is not on this machine; "auto" takes what there is.') from None
    return name


def check_outputs(model: nn.Module, inputs: Tensor, outputs: int, name: str) -> None:
    """Refuse a model that does not turn two records into two rows of `outputs` numbers. Raises ModelError."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            made = model(inputs[:2])
    except Exception as error:  # a model of one's own may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"The model {name!r} cannot take these records (shape {tuple(inputs.shape[1:])}): {reason}. Choose another "
            "model, or mend its options."
        ) from None
    finally:
        model.train(was_training)
    expected = (len(inputs[:2]), outputs)
    if not isinstance(made, Tensor) or tuple(made.shape) != expected:
        arrived = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ModelError(f"The model {name!r} must turn two records into shape {expected}; {arrived} arrived.")


def _score(run: Run) -> str:
    if not run.metrics:
        return ""
    last = run.metrics[-1]
    if "accuracy" in last:
        return f"; test accuracy {last['accuracy']:.1%}"
    return f"; test loss {last['loss']:.4g}"


def _as_json(run: Run) -> dict[str, Any]:
    """The run in numbers; where few records hold some budget, with the rows and silences of the printed tables."""
    plan = run.plan
    metrics = dict(run.metrics[-1]) if run.metrics else None
    made = {"path": str(run.path), "steps": plan.steps, "charged": sum(run.charged)}
    if hides(plan):
        told = "label", "epsilon", "at_least", "at_most", "delta", "records"
        groups = [{name: getattr(row, name) for name in told} for row in shown(plan)]
        if metrics is not None:
            metrics.pop("per_group", None)
        return {**made, "groups": groups, "metrics": metrics, "withheld": WITHHELD}
    columns = plan.epsilons, plan.delta, plan.counts, plan.spent_after(run.charged), plan.epsilon_spent()
    names = "epsilon", "delta", "records", "charged", "certified"
    groups = [dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in columns), strict=True)]
    return {**made, "groups": groups, "metrics": metrics}
