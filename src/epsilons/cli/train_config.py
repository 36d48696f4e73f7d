"""Train by a config, and print the outcome. Importing this module imports torch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from ..configs.config import Config
from ..configs.config_file import Setting, read_config, recorded
from ..configs.plan_choice import (
    changed_keys,
    counted_plan,
    differences_from_config,
    note_changes,
    plan_of,
    signatures_of,
)
from ..configs.prepare import Prepared, prepare
from ..configs.registry_train import NEXT, VARIABLE, Members, members_of, stored_registry
from ..core.disclosure import PLAN_SUPPRESSED, display_rows, has_small_cells, of_unit, tier_of
from ..data.arrays import Encoded, Provenance, in_words
from ..errors import InputError, ModelError, printable
from ..ledger.account import read_account
from ..ledger.plan_folder import PlanFolder, opened
from ..ledger.run_folder import RunFolder, now, run_folders
from ..ledger.signatures import Signature, check_signed
from ..models import build
from ..planning import Plan
from ..planning.display import spend_table
from ..registry import evidence
from ..tabular import release
from ..training import EvalData, Performance, Private, Randomness, Records, Training, fit, values
from ..training.distributed import check_alone, launched_processes, process_group
from ..training.fitting import tuning
from ..training.fitting.encoded import as_tensor
from ..training.fitting.evaluation import Scale
from ..training.fitting.fit_loop import Run
from ..training.fitting.losses import class_counts
from ..training.fitting.progress import MLflow, TensorBoard
from ..training.fitting.tuning import Tuned
from . import Interrupted, Terminated, Termination
from .init import describe
from .options import console, show_plan, show_table
from .plan_inputs import TrainFlags, check_trusted

# -- How far a run of `epsilons train` is


class RunProgress:
    """A callback that knows how far a run is, ends it on SIGTERM, and tells if it continues otherwise than it began.

    It warns of a new key, and writes keys of the config that changed into run.json.
    """

    def __init__(self, run_dir: Path, plan: Plan, is_resumed: bool, quiet: bool, config: dict[str, Any]) -> None:
        self.private: Private | None = None
        self._config = config
        self._ledger, self._plan, self._quiet = run_dir / "ledger.jsonl", plan, quiet
        has_begun = is_resumed and RunFolder(run_dir).has_ledger
        self._epoch = read_account(self._ledger, plan).epoch if has_begun else None

    def __call__(self, private: Private) -> None:
        if self.private is None:
            self._warn_new_key(private.ledger.epoch, f"steps from {private.updates:,} on are charged again")
            if self._epoch is not None and private.ranks.is_main:
                note_changes(RunFolder(self._ledger.parent), self._config, private.updates - 1)
            private.on_update(_end_on_sigterm)  # after all other listeners, so that a checkpoint has what they did
        self.private = private

    def on_end(self) -> None:
        if self._epoch is not None and self.private is None:
            epoch = read_account(self._ledger, self._plan).epoch
            self._warn_new_key(epoch, "all steps were charged already, so no update is left to make")

    def _warn_new_key(self, epoch: int, consequence: str) -> None:
        if self._epoch is not None and epoch > self._epoch:
            console(stderr=True, quiet=self._quiet).print(
                "Settings, data, hardware or thread count changed since the interruption, the key file is missing, or "
                f"this folder is a copy. The run continues under a new key; {consequence}."
            )

    @property
    def done(self) -> str:
        """How far the run is, in words."""
        if self.private is None:
            return "before the first update"
        return f"after {sum(self.private.ledger.charged):,} of {self._plan.steps:,} steps"


def _end_on_sigterm(private: Private) -> None:
    """After an update: if SIGTERM came on any rank, save a checkpoint and stop. Raises Terminated."""
    asked = signal.getsignal(signal.SIGTERM)
    if not isinstance(asked, Termination):
        return
    asked.makes_updates = not private.is_finished
    if private.ranks.any("the end of an update", asked.has_come) and not private.is_finished:
        private.checkpoint()
        raise Terminated


# -- Train by a config, and print the outcome. Importing this module imports torch


#: The keys of [training] that are also arguments of `fit`.
FIT_KEYS = {"loss", "optimizer", "lr", "momentum", "device"}


NEVER_BEGAN = (
    "Nothing of this run had begun, so no step was made. What was reserved for it is given back, and it is planned and "
    "reserved now."
)


def registry_url(given: str | None, file: Path, settings: tuple[Setting, ...], resumed: Path | None) -> str | None:
    """The URL on the command line, or of the environment where config or run are about a registry.

    resumed  the folder of a run to resume
    """
    if given is not None:
        return given
    is_charged = read_config(file, settings).registry is not None
    if resumed is not None and not is_charged:
        is_charged = stored_registry(resumed) is not None or evidence.noted(resumed) is not None
    return os.environ.get(VARIABLE) if is_charged else None


def train(file: Path, folder: Path, flags: TrainFlags) -> None:
    """Train into `folder` as the config in `file` says, once or once per seed; under torchrun in several processes."""
    config = read_config(file, flags.changed)
    check_trusted([config.model.name, config.privacy.strategy], file.parent, flags.trust)
    with process_group(config.training.device) as ranks:
        check_alone(flags.run_dir is not None or config.output.folder is not None or flags.resume)
        if not ranks.is_main:  # rank 0 prints and writes
            flags = replace(flags, quiet=True, as_json=False, tensorboard=False, mlflow=False)
        if ranks.is_distributed:
            torch.manual_seed(ranks.broadcast(torch.initial_seed()))  # equal initial models without a seed
        with members_of(flags.registry, flags.pepper, config, folder, flags.resume, ranks) as members:
            if members is not None and members.begins:
                console(stderr=True, quiet=flags.quiet).print(NEVER_BEGAN)
                flags = replace(flags, resume=False)
            _train(file, config, folder, flags, members)


def _train(file: Path, config: Config, folder: Path, flags: TrainFlags, members: Members | None) -> None:
    out = console(quiet=flags.quiet or flags.as_json)
    if config.data.features is not None:
        out.print(f"Computing the features {config.data.features.name!r} …", style="dim")
    prepared = _prepared(config, file.parent, members)
    folders = run_folders(folder, config.training.seeds)
    begun = [path for path in folders.values() if flags.resume and RunFolder(path).has_ledger]
    may_start = flags.starts_or_resumes
    chosen = plan_of(prepared, file.parent, [*folders.values()], flags.plan, flags.resume, may_start=may_start)
    plan, plan_folder = opened(chosen)
    if plan.select is not None:
        raise InputError(f"A selection is for epsilons tune {printable(file)} --grid …; to train once, leave it out.")
    if flags.resume:
        _check_features(prepared, list(folders.values()))
    show_data(prepared, out)
    show_plan(plan, out, config.budgets.levels)
    if new := plan_folder and [path for path in {*folders.values()} - {*begun} if plan_folder.unused(path) is None]:
        out.print(_counted(plan_folder, len(new)))
    saved = flags.plan if plan_folder is None else plan_folder.path
    signed = signatures_of(saved, list(folders.values()), plan if begun else None)
    metadata = _metadata(file, prepared, flags, signed)
    if begun:
        _say_changes(RunFolder(begun[0]), metadata["config"], plan if flags.plan is None else None, prepared, out)
    runs = [
        train_once(file, prepared, chosen, run_dir, seed, flags, metadata, members)[0]
        for seed, run_dir in folders.items()
    ]
    _show_runs(runs, _scope(plan, members), bool(config.training.seeds), out)
    out.print(f"\nSaved in {printable(folder)}/. Next: epsilons report {printable(runs[0].path)}", soft_wrap=True)
    if flags.as_json:
        print(json.dumps({"runs": [_as_json(run, prepared) for run in runs]}, indent=1))


def _say_changes(run: RunFolder, config: dict[str, Any], plan: Plan | None, prepared: Prepared, out: Console) -> None:
    """What of the config is other than when the run began. plan: that of the run; None if it was named."""
    if plan is not None and (other := differences_from_config(plan, prepared)):
        out.print(f"This run continues under its own plan, shown above. The config asks for another: {other}.")
    if changed := changed_keys(run, config):
        out.print(
            f"Keys of the config that changed since the run began: {', '.join(changed)}. Its reports state the values "
            "of the beginning, and from which step on which keys changed. To report the new values, begin another run, "
            "with --run-dir."
        )


def _prepared(config: Config, folder: Path, members: Members | None) -> Prepared:
    """The data, without the memory that only reading them took."""
    prepared = prepare(config, folder, members=members)
    if isinstance(prepared.train.inputs, Encoded):
        release()
    return prepared


def _show_runs(runs: Sequence[Run], scope: str, seeded: bool, out: Console) -> None:
    """What was charged, and how good the models are."""
    plan = runs[0].plan
    for run in runs:
        out.print(f"{sum(run.charged):,} of {plan.steps:,} steps charged{score(run)}")
        if warning := _warning(run):
            out.print(warning)
    show_table(spend_table(plan, runs[0].charged), out)
    out.print(scope, style="dim")
    if seeded:
        out.print("Seeded: with the seed, the noise can be removed. Train without seeds for a release.", style="dim")


def _scope(plan: Plan, members: Members | None) -> str:
    """Which runs the epsilons are about."""
    if members is not None:
        return (
            f"Charged to the registry {members.id}. The epsilons are levels of lifetime budgets: what a person has "
            "spent at most when this run is over, in all runs that were charged there. The promise is the lifetime "
            f"budget.\n{NEXT}"
        )
    scope = "This run alone" if plan.runs == 1 else f"All {plan.runs:,} runs of the plan together, begun or not"
    return f"{scope}: other runs on the same people, such as tuning, spend in addition."


def _counted(folder: PlanFolder, runs: int) -> str:
    """What is about to begin. Raises InputError if fewer runs are left than seeds."""
    if folder.left < runs:
        raise InputError(
            f"The plan in {folder.path} certifies {folder.plan.runs:,} runs, and {folder.begun:,} have begun; {runs:,} "
            "cannot begin. An interrupted run continues with --resume."
        )
    which = f"Run {folder.begun + 1:,}" if runs == 1 else f"Runs {folder.begun + 1:,} to {folder.begun + runs:,}"
    return f"{which} of {folder.plan.runs:,} of the plan in {printable(folder.path)}."


def _check_features(prepared: Prepared, run_dirs: list[Path]) -> None:
    """Raise InputError if a run that continues began on other inputs: its guarantee names them."""
    origin = None if prepared.features is None else prepared.features.origin
    for run in map(RunFolder, run_dirs):
        if run.settings.is_file() and run.read_settings().get("features") != origin:
            raise InputError(
                f"The run in {run.path} began on other features, which its guarantee names. Restore data.features in "
                "the config, and the constants or weights, or start a new run."
            )


def show_data(prepared: Prepared, out: Console) -> None:
    """What is trained on, in one sentence."""
    # Of budgets that people chose, the number of groups would show that somebody holds a rare one.
    simulated = f"; SIMULATED budgets in {len(prepared.budgets.epsilons):,} groups"
    simulated = simulated if prepared.config.budgets.shares is not None else ""
    target = "a number to predict" if prepared.classes is None else f"{len(prepared.classes)} classes"
    rows = " rows" if prepared.budgets.unit == "person" else ""
    tested = "no test data" if prepared.test is None else f"{len(prepared.test.targets):,}{rows} to test on"
    out.print(
        f"{printable(prepared.config.data.train)}: {_counted_units(prepared)} of shape "
        f"{prepared.train.inputs.shape[1:]}, {target}, {tested}{simulated}"
    )
    if prepared.left_out is not None:
        out.print(prepared.left_out)
    if prepared.features is not None:
        out.print(f"Inputs: {printable(prepared.features.origin)}", style="dim")
    show_provenance(prepared.config.data.provenance, out)


def show_provenance(entries: tuple[Provenance, ...], out: Console) -> None:
    """What the guarantee does not cover, because it was read off the data, or may have been."""
    read_off = [entry for entry in entries if entry.source == "read off the data"]
    not_stated = [entry for entry in entries if entry.source == "not stated"]
    if read_off:
        out.print(
            f"NOT COVERED by the guarantee, because they were read off the data: {printable(in_words(read_off))}. "
            "Replace them by what you know without looking, and correct data.read_off.",
            style="bold",
        )
    if not_stated:
        out.print(
            f"Covered only if they were not read off the data: {printable(in_words(not_stated))}. State it in "
            "data.read_off; [] says that none was.",
            style="dim",
        )


def _counted_units(prepared: Prepared) -> str:
    if prepared.persons is None:
        return f"{len(prepared.budgets):,} records"
    column = prepared.config.data.person_stated
    return f"{len(prepared.budgets):,} persons by the column {printable(repr(column))}, with records"


def records_of(prepared: Prepared, inputs: Any, targets: Any) -> Records:
    """The records to train on, with whose they are."""
    training = prepared.config.training
    rows = 1 if prepared.persons is None else training.rows_per_person
    return Records((inputs, targets), persons=prepared.persons, rows_per_person=rows, views=training.views)


def train_once(
    file: Path,
    prepared: Prepared,
    chosen: Plan | PlanFolder,
    run_dir: Path,
    seed: int | None,
    flags: TrainFlags,
    metadata: dict[str, Any],
    members: Members | None = None,
) -> tuple[Run, nn.Module]:
    plan, _ = opened(chosen)
    config, training = prepared.config, prepared.config.training
    if seed is not None:
        torch.manual_seed(seed)
    model = build(config.model.name, prepared.train.inputs.shape[1:], prepared.outputs, **config.model_options)
    check_device(training.device)
    inputs, targets = map(as_tensor, prepared.train)
    check_outputs(model, inputs, prepared.outputs, config.model.name)
    progress = RunProgress(run_dir, plan, flags.resume, flags.quiet, metadata["config"])
    boards: list[TensorBoard | MLflow] = [MLflow()] if flags.mlflow else []
    if flags.tensorboard:
        boards.append(TensorBoard(run_dir.parent / f"{run_dir.name}-tensorboard"))
    charged = nullcontext(None) if members is None else members.reserved(run_dir, plan, prepared.budgets)
    try:
        with charged as reservation:
            run = fit(
                model,
                records_of(prepared, inputs, targets),
                chosen,
                budgets=prepared.budgets,
                training=Training(
                    **training.model_dump(include=FIT_KEYS),
                    class_weights=class_weights(prepared),
                    balance=_balance(prepared, plan, run_dir) if training.balance else None,
                    progress=not flags.quiet,
                ),
                evaluation=_eval_data(prepared, plan),
                callbacks=[progress, *boards],
                run_dir=values.RunFolder(run_dir, flags.resume, training.checkpoint_every, metadata, reservation),
                seed=Randomness(training.randomness, seed),
                performance=Performance(**config.performance.model_dump()),
            )
        if run.path is not None:  # rank 0 has the folder
            describe(prepared, file.parent).write(run.path)
            if prepared.features is not None:
                prepared.features.save(run.path)
            RunFolder(run.path).note(done=now())
    except (KeyboardInterrupt, Terminated) as error:
        folder = run_dir if len(training.seeds) < 2 else run_dir.parent
        what = "terminated" if isinstance(error, Terminated) else "interrupted"
        again = f"{_command(file, flags, members)} --run-dir {folder} --"
        again += "continue" if flags.starts_or_resumes else "resume"
        again = again if plan.select is None else "the same epsilons tune"
        raise Interrupted(
            f"{what} {progress.done}. To continue: {again} (no step is charged twice unless settings, data or machine "
            "change)",
            error,
        ) from None
    for board in boards:
        board.close(run.metrics)
    progress.on_end()
    return run, model


def _balance(prepared: Prepared, plan: Plan, run_dir: Path) -> Mapping[float, Sequence[float]] | None:
    """How tiers and classes go together: as declared, or counted once, beside the run's folder."""
    if plan.class_noise is None:
        return prepared.config.tied_classes
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    file, classes = run_dir.with_name(f"{run_dir.name}.counts.json"), len(prepared.classes or ())
    labels, persons = prepared.train.targets, prepared.persons
    return class_counts(plan, labels, prepared.budgets, file, classes=classes, persons=persons)


def tune(file: Path, prepared: Prepared, configs: Mapping[str, Config], folder: Path) -> Tuned:
    """Make the runs of a selection among these configs, in this folder."""

    def train(candidate: str, plan: PlanFolder, run: values.RunFolder) -> nn.Module:
        own, flags = replace(prepared, config=configs[candidate]), TrainFlags(resume=True, quiet=True)
        metadata = _metadata(file, own, flags, signed)
        return train_once(file, own, plan, Path(str(run.path)), None, flags, metadata)[1]

    assert prepared.judges is not None
    signed = signatures_of(folder, [])
    if prepared.config.privacy.signed_by:
        check_signed(signed, prepared.config.privacy.signed_by, folder)
    counted, held_out = counted_plan(prepared.plan(), folder), prepared.judges.budgets
    return tuning.tune(counted, list(configs), train, lambda model: _right(model, prepared), held_out=held_out)


def _right(model: nn.Module, prepared: Prepared) -> Any:
    """(held-out,) how right the model is about each held-out record or person: the mean of their rows."""
    assert prepared.held_out is not None
    assert prepared.judges is not None
    inputs, targets = map(as_tensor, prepared.held_out)
    model.eval()
    with torch.no_grad():
        where = next(model.parameters()).device
        batches = (inputs[first : first + 1024] for first in range(0, len(inputs), 1024))
        outputs = torch.cat([model(part.to(where)).cpu() for part in batches])
    if prepared.classes is None:
        rows = 1 - (outputs.reshape(-1) - targets.reshape(-1)).abs() / 2  # numbers are scaled to -1..1
    else:
        rows = outputs.argmax(1) == targets
    right, person = rows.double().clamp(0, 1).numpy(), prepared.judges.person
    if person is None:
        return right
    people = len(prepared.judges.budgets)
    return np.bincount(person, right, people) / np.maximum(np.bincount(person, minlength=people), 1)


def _metadata(file: Path, prepared: Prepared, flags: TrainFlags, signed: Sequence[Signature]) -> dict[str, Any]:
    """What run.json says about the config."""
    config, features = prepared.config, prepared.features
    found = {
        "config": config.model_dump(mode="json"),
        "folder": str(file.parent.resolve()),  # the config's paths start here
        "about": config.about.model_dump(mode="json", exclude_defaults=True),
        "tiers": config.budgets.levels,
        "left_out": prepared.left_out,
        "consent": prepared.consent,
        "simulated": config.budgets.shares is not None,
        "person": config.data.person_stated,
        "set": recorded(flags.changed) if flags.changed else None,
        "provenance": [entry.to_dict() for entry in config.data.provenance],
        "features": None if features is None else features.origin,
        "signatures": [dict(one.values) for one in signed if not one.wrong] or None,
    }
    return {key: value for key, value in found.items() if value is not None or key == "tiers"}


def _command(file: Path, flags: TrainFlags, members: Members | None) -> str:
    """The command that was given, without the run's folder."""
    launcher = "torchrun … -m " if launched_processes() > 1 else ""
    changed = "".join(f" {setting.flag}" for setting in flags.changed)
    changed += ("" if members is None else " --registry URL") + (" --trust" if flags.trust else "")
    return f"{launcher}epsilons train {file}{changed}"


def _eval_data(prepared: Prepared, plan: Plan) -> EvalData | None:
    if prepared.test is None:
        return None
    inputs, targets = map(as_tensor, prepared.test)
    public = prepared.config.data.test_public
    bounds = prepared.config.data.columns.numeric.get(prepared.config.data.target)
    scale = Scale(*bounds) if bounds is not None and prepared.classes is None else None
    return EvalData(
        (inputs, targets), public, prepared.classes, prepared.test_groups(plan), scale,
        every=prepared.config.training.eval_every, persons=prepared.test_persons,
    )  # fmt: skip


def class_weights(prepared: Prepared) -> list[float] | None:
    """(classes,) the weight of each class; None without any."""
    weights = prepared.config.training.class_weights
    return None if weights is None else [weights[name] for name in prepared.classes or ()]


def check_device(name: str) -> None:
    if name == "auto":
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(
            f'training.device must be on this machine, got {name!r}; "auto" uses a GPU if there is one.'
        ) from None


def check_outputs(model: nn.Module, inputs: Tensor, outputs: int, name: str) -> None:
    """Raise ModelError for a model that does not turn two records into two rows of `outputs` numbers."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            predicted = model(inputs[:2])
    except Exception as error:  # a user's model may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"The model {name!r} cannot take these records (shape {tuple(inputs.shape[1:])}): {reason}. Choose another "
            "model, or correct its options."
        ) from None
    finally:
        model.train(was_training)
    expected = (len(inputs[:2]), outputs)
    if not isinstance(predicted, Tensor) or tuple(predicted.shape) != expected:
        got = f"shape {tuple(predicted.shape)}" if isinstance(predicted, Tensor) else f"a {type(predicted).__name__}"
        raise ModelError(f"The model {name!r} must turn two records into shape {expected}, got {got}.")


def score(run: Run) -> str:
    if not run.metrics:
        return ""
    last = run.metrics[-1]
    if "balanced_accuracy" in last:
        area = f", AUC {last['auc']:.3f}" if last.get("auc") is not None else ""
        return f"; test accuracy {last['accuracy']:.1%}, balanced {last['balanced_accuracy']:.1%}{area}"
    if "accuracy" in last:
        return f"; test accuracy {last['accuracy']:.1%}"
    if "rmse" in last:
        r2 = f", R² {last['r2']:.3f}" if last["r2"] is not None else ""
        error, root = last["mean_absolute_error"], last["rmse"]
        return f"; mean absolute error {error:.4g}, root mean squared error {root:.4g} (unit of the target){r2}"
    return f"; test loss {last['loss']:.4g}"


def _warning(run: Run) -> str | None:
    """A warning if the model is not better than naming the most frequent class of the test data."""
    last = run.metrics[-1] if run.metrics else {}
    if "majority" not in last or last["accuracy"] > last["majority"]:
        return None
    return (
        f"WARNING: the test accuracy of {last['accuracy']:.1%} is not above {last['majority']:.1%}, the accuracy of "
        "always naming the most frequent class. Compare the balanced accuracy and the AUC; class_weights, more steps "
        "or another learning rate may help."
    )


def _as_json(run: Run, prepared: Prepared) -> dict[str, Any]:
    """The run in numbers, with the names of classes and tiers.

    With small groups, it shows the merged rows of the printed tables and suppresses the rest.
    """
    plan = run.plan
    metrics = {**run.metrics[-1], "classes": prepared.classes} if run.metrics else None
    values: dict[str, Any] = {"path": str(run.path), "steps": plan.steps, "charged": sum(run.charged)}
    values |= {"runs": plan.runs} if plan.runs > 1 else {}
    values["groups"] = groups_as_json(plan, prepared.config.budgets.levels, run.charged)
    if has_small_cells(plan.groups):
        if metrics is not None:
            metrics = {name: one for name, one in metrics.items() if name not in ("per_group", "per_class_group")}
        return {**values, "metrics": metrics, "suppressed": of_unit(PLAN_SUPPRESSED, plan.unit)}
    return {**values, "metrics": metrics}


def groups_as_json(plan: Plan, tiers: dict[str, float] | None, charged: Sequence[int] = ()) -> list[dict[str, Any]]:
    """One row per group with what it was charged, of a run that has begun; with small groups, the merged rows."""
    if has_small_cells(plan.groups):
        names = "label", "tier", "epsilon", "at_least", "at_most", "delta", "records"
        shown = display_rows(plan.groups, tiers, release=True)
        return [{name: getattr(row, name) for name in names if tiers or name != "tier"} for row in shown]
    columns = {"epsilon": plan.epsilons, "delta": plan.delta, "records": plan.counts}
    columns |= {"charged": plan.spent_after(charged)} if charged else {}
    columns["certified"] = plan.epsilon_spent()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    return [row | ({"tier": tier_of(tiers, row["epsilon"])} if tiers else {}) for row in rows]
