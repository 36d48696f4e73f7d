"""Attack a config or a run, and print the result. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console

from ..auditing import membership
from ..auditing.membership.folder import check_outside_of_runs
from ..configs.config import Config
from ..configs.config_file import environment_settings, read_config
from ..configs.prepare import Prepared, prepare
from ..core.files import sha256_of
from ..errors import DataError, InputError, RunError, json_text, printable
from ..ledger.run_folder import RunFolder
from ..ledger.run_json import Attacked
from ..ledger.signatures import is_signed
from ..models import build
from ..planning import Plan
from ..training import Performance, Records
from ..training.fitting.encoded import as_tensor
from ..training.opening import hash_of_groups
from ..training.validation import groups_of
from . import Interrupted, Terminated
from .options import console, show_plan, show_table
from .plan_inputs import AttackFlags, check_trusted
from .train_config import check_outputs, show_data

#: The flags that are also arguments of `membership.attack`.
PASSED_ON = ("shadows", "placebo", "method", "seed", "jobs", "resume", "keep_scores")


@dataclass(frozen=True)
class Target:
    """What is attacked: a config with the folder that its paths start from, and a run of it."""

    config: Config
    folder: Path
    run: RunFolder | None = None


def attack(target: Path, folder: Path, flags: AttackFlags) -> None:
    """Attack what `target` names, and write the result into `folder`."""
    check_outside_of_runs(folder)
    found = _of_run(target) if target.is_dir() else Target(read_config(target, environment_settings()), target.parent)
    if found.config.training.loss == "mse":
        raise InputError(
            'Membership inference is built for classes, and this config predicts a number (training.loss = "mse"). '
            "Attack a model of classes, for example of ranges of that number."
        )
    if found.config.training.class_weights is not None or found.config.training.balance:
        raise InputError("The attack weighs all classes alike: leave out training.class_weights and training.balance.")
    if found.config.registry is not None:
        raise InputError(
            "These people have lifetime budgets in a registry ([registry] in the config). An attack on membership "
            "trains on their records outside of every guarantee, so the registry cannot charge it, and it is refused. "
            "To test the promise of the run: epsilons audit, which trains on synthetic records alone."
        )
    out = console(quiet=flags.quiet or flags.as_json)
    notes_in = None if found.run is None else _notes_in(found.run, folder, flags)
    check_trusted([found.config.model.name, found.config.privacy.strategy], found.folder, flags.trust)
    prepared = prepare(found.config, found.folder, None if found.run is None else found.run.path)
    plan = prepared.plan() if found.run is None else _plan_of_run(found.run, prepared)
    show_data(prepared, out)
    show_plan(plan, out)
    try:
        result = _attacked(prepared, plan, folder, flags)
    except (KeyboardInterrupt, Terminated) as error:
        what = "terminated" if isinstance(error, Terminated) else "interrupted"
        raise Interrupted(
            f"{what}. Finished shadows are kept. To continue: epsilons attack {target} -o {folder} --resume, with the "
            "same options",
            error,
        ) from None
    if notes_in is not None:
        _note(notes_in, result, folder, flags)
    if flags.as_json:
        print(json_text(result.to_dict()))
    show_result(result, out)
    out.print(f"\nSaved in {printable(folder)}/: attack.html is the page, CONFIDENTIAL.", soft_wrap=True)


def show_result(result: membership.MembershipResult, out: Console) -> None:
    """How the shadows were trained, tables and sentences."""
    out.print(printable(f"{result.shadows:,} shadow models. {result.setting['why']}"), style="bold")
    show_table(result.table(), out, left=1)
    show_table(result.rate_table(), out, left=1)
    if result.differences:
        show_table(result.difference_table(), out, left=1)
    for sentence in result.sentences:
        out.print(printable(sentence))


def _notes_in(run: RunFolder, folder: Path, flags: AttackFlags) -> RunFolder | None:
    """The run, if the result may be noted in it. What its reader must know is printed."""
    out, name, is_kept = console(stderr=True, quiet=flags.quiet), printable(run.path), is_signed(run.path)
    if is_kept:
        said = f"{name} is signed, so it stays as it is: the result will be in {printable(folder)} alone, and no "
        said += "report of the run shows it. To have it in the report, attack before the run is signed."
        out.print(said, soft_wrap=True)
    if run.read_settings().get("changes"):
        said = f"{name} was continued under other settings. The attack trains all steps with those of the beginning."
        out.print(said, soft_wrap=True)
    return None if is_kept else run


def _attacked(prepared: Prepared, plan: Plan, folder: Path, flags: AttackFlags) -> membership.MembershipResult:
    config, training = prepared.config, prepared.config.training
    torch.manual_seed(flags.seed)  # the common start
    model = build(config.model.name, prepared.train.inputs.shape[1:], prepared.outputs, **config.model_options)
    rows = 1 if prepared.persons is None else training.rows_per_person
    check_outputs(model, as_tensor(prepared.train.inputs), prepared.outputs, config.model.name)
    return membership.attack(
        model,
        Records(prepared.train.whole(), persons=prepared.persons, rows_per_person=rows),
        plan,
        budgets=prepared.budgets,
        population=None if prepared.test is None else prepared.test.whole(),
        attacks=flags.names,
        dealt_at_random=config.budgets.shares is not None,
        tiers=config.budgets.levels,
        folder=folder,
        performance=Performance(**config.performance.model_dump()),
        progress=not flags.quiet,
        **training.model_dump(include={"loss", "optimizer", "lr", "momentum", "device"}),
        **{name: getattr(flags, name) for name in PASSED_ON},
    )


# -- a run -------------------------------------------------------------------------------------------------------------


def _of_run(path: Path) -> Target:
    """The config that a run keeps, and the folder that it was in. Raises RunError for a run without one."""
    run = RunFolder(path)
    if not run.settings.is_file() or not run.plan.is_file():
        raise RunError(f"{path} holds no run. Give a config, or the folder of one run, e.g. runs/first.")
    metadata = run.read_settings().get("metadata") or {}
    if not isinstance(metadata, dict) or "config" not in metadata:
        raise RunError(
            f"{path} was not trained by a config, so its data and model are not known here. Attack it from Python: "
            "epsilons.auditing.membership.attack(model, data, plan, budgets=…)."
        )
    if "folder" not in metadata:
        raise RunError(
            f"{path} does not say where its config was; an earlier version made it. Attack its config: epsilons attack "
            "CONFIG.toml."
        )
    try:
        config = Config.model_validate(metadata["config"])
    except ValidationError:
        raise RunError(
            f"{path} holds a config of another version. Attack its config: epsilons attack CONFIG.toml."
        ) from None
    return Target(config, Path(str(metadata["folder"])), run)


def _plan_of_run(run: RunFolder, prepared: Prepared) -> Plan:
    """The run's own plan. Raises DataError if the records have other budgets now."""
    plan = Plan.load(run.plan)
    try:
        roster = hash_of_groups(groups_of(prepared.budgets, plan, len(prepared.budgets)))
    except DataError:
        roster = "none"
    if run.read_settings().get("roster") != roster:
        raise DataError(
            f"Data or budgets changed since {run.path} was trained: its records had other budgets. Restore the files, "
            "or attack the config."
        )
    return plan


def _note(run: RunFolder, result: membership.MembershipResult, folder: Path, flags: AttackFlags) -> None:
    """A copy of the result in the run's folder, for its internal report."""
    lock = run.lock()
    try:
        result.save(run.membership)
        membership.draw(result, run.membership.with_suffix(".svg"))
        attacked = Attacked(
            date=datetime.now(UTC).date().isoformat(),
            shadows=flags.shadows,
            seed=flags.seed,
            folder=str(folder.resolve()),
            digest=sha256_of(run.membership),
        )
        run.note(attacked=attacked.model_dump())
    finally:
        lock.release()
