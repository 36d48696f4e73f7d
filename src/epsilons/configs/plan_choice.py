"""The plan that a config is trained under: its own, a saved one, that of a run to resume, or one for several runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EpsilonsError, EpsilonsWarning, InputError, PlanError
from ..ledger.plan_folder import PlanFolder, opened
from ..ledger.run_folder import RunFolder
from ..ledger.signatures import SUFFIX, Signature, check_signed, of_run, signatures
from ..planning import Plan
from .prepare import Prepared

#: What the runs of one plan have in common, besides the numbers that were computed.
_PRIVACY = ("strategy", "options", "accountant", "adjacency", "runs", "select", "class_noise")
COMMON = (*_PRIVACY, "steps", "batch_size", "groups")
#: Another version of a library may move the last digits of a computed plan.
OTHER_VERSIONS = 1e-3


def saved_plan(path: Path) -> Plan | PlanFolder:
    """The plan in this file, or in this folder, which counts its runs."""
    return PlanFolder(path) if path.is_dir() else Plan.load(path)


def plan_of(
    prepared: Prepared,
    config_folder: Path,
    run_dirs: list[Path],
    saved: Path | None,
    resume: bool = False,
    makes_folder: bool = True,
    may_start: bool = False,
) -> Plan | PlanFolder:
    """The plan of the run that continues, or the plan in --plan, or the config's.

    makes_folder  False for a dry run, which makes no folder that counts runs
    may_start     with resume: True if the run may begin now

    Raises PromiseError for a plan without the signatures that [privacy] signed_by demands, and PlanError for a saved
    plan on accounts of a registry that is not what this run would be charged for.
    """
    privacy, plan = prepared.config.privacy, _plan_of_run(run_dirs, may_start) if resume else None
    folder = None if privacy.plan_folder is None else config_folder / privacy.plan_folder
    if privacy.signed_by:
        given = signatures_of(saved or folder, run_dirs, plan)
        check_signed(given, privacy.signed_by, "The plan of this run" if plan else saved or folder or UNSAVED)
    if saved is not None:
        return _checked(saved_plan(saved), saved, prepared, plan)
    if plan is not None:  # its folder has the slots of runs that are still to begin
        return plan if folder is None or not (folder / "plan.json").is_file() else PlanFolder(folder)
    made = prepared.plan()
    if folder is None or not (makes_folder or (folder / "plan.json").is_file()):
        warn_of_unused(config_folder, made)
        return made
    return counted_plan(made, folder)


def _checked(found: Plan | PlanFolder, saved: Path, prepared: Prepared, begun: Plan | None) -> Plan | PlanFolder:
    """A saved plan; on accounts of a registry, it must be that of the run, begun or not. Raises PlanError."""
    if prepared.budgets.groups.starts is None or opened(found)[0] == (begun or prepared.plan()):
        return found
    raise PlanError(
        f"{saved} is not the plan that this run would be charged for: who takes part, what they have left, settings or "
        f"versions changed since it was made. Nothing was charged. {OF_REGISTRY}"
    )


#: In the place of its file, for messages.
UNSAVED = "This plan, which must be saved (epsilons plan CONFIG -o plan.json) and given by --plan,"
#: How a plan on what people have left in a registry is signed.
OF_REGISTRY = (
    "To sign a plan before such a run, make it right before with epsilons plan CONFIG --registry URL -o FILE, and give "
    "--plan FILE; or sign the finished run."
)


def signatures_of(saved: Path | None, run_dirs: list[Path], resumed: Plan | None = None) -> tuple[Signature, ...]:
    """The signatures of a plan in a file, or of one that counts its runs; of a run to continue, those it began with."""
    if resumed is not None:
        return of_run(RunFolder(next(one for one in run_dirs if (one / "plan.json").is_file())), resumed)
    return signatures(saved) if saved is not None and saved.exists() else ()


def warn_of_unused(folder: Path, plan: Plan) -> None:
    """Warn of a signed plan beside the config of a run that is not trained under its file, and so has no signature."""
    for file in sorted(folder.glob(f"*.json.*{SUFFIX}")):
        saved = file.with_name(file.name[: -len(SUFFIX) - 9])
        given = [one.values["plan"] for one in signatures_of(saved, []) if not one.wrong] if saved.is_file() else []
        if given:
            same = "holds the plan of this run" if plan.digest in given else "holds another plan than this run's"
            advice = (
                f"A run keeps the signatures of the file that it is trained under: give --plan {saved}."
                if plan.groups.starts is None or plan.digest in given
                else OF_REGISTRY
            )
            said = f"{saved} is signed, and {same}. {advice} This run keeps none."
            warnings.warn(said, EpsilonsWarning, stacklevel=2)
            return


def _plan_of_run(run_dirs: list[Path], may_start: bool) -> Plan | None:
    for run_dir in run_dirs:
        if (run_dir / "plan.json").is_file() and (RunFolder(run_dir).has_ledger or not may_start):
            return Plan.load(run_dir / "plan.json")
    if may_start:
        return None
    folder = run_dirs[0] if len(run_dirs) == 1 else run_dirs[0].parent
    raise InputError(
        f"{folder} holds no run to continue. Name the folder of the run with --run-dir, or leave out --resume to "
        "start a run there."
    )


def counted_plan(made: Plan, path: Path) -> PlanFolder:
    """The plan's folder, made by the first run. Raises PlanError if it holds another plan than the config asks for."""
    if not (path / "plan.json").is_file():
        return PlanFolder.create(path, made)
    folder = PlanFolder(path)
    others = [name for name in COMMON if getattr(folder.plan, name) != getattr(made, name)]
    if not others and not _same_table(folder.plan, made):
        others = ["rates, clip norms or noise"]
    if others:
        raise PlanError(
            f"The plan in {path} is another than the config asks for: {', '.join(others)}. The runs of one plan have "
            "one table: model, loss and optimizer may differ between them. Restore these settings in the config."
        )
    return folder


def _same_table(one: Plan, other: Plan) -> bool:
    names = ("steps", "sample_rate", "clip_norm", "weight", "noise_std", "expected_batch")
    return len(one.phases) == len(other.phases) and all(
        np.allclose(getattr(a, name), getattr(b, name), rtol=OTHER_VERSIONS, atol=0)
        for a, b in zip(one.phases, other.phases, strict=True)
        for name in names
    )


def differences_from_config(plan: Plan, prepared: Prepared) -> str:
    """What the plan of a run and that of its config differ in. The config's plan is not needed, so it may fail."""
    try:
        other = prepared.plan()
    except EpsilonsError:
        return "one that cannot be made"
    names = (
        "strategy",
        "options",
        "accountant",
        "steps",
        "batch_size",
        "runs",
        "select",
        "clip_norm",
        "epsilons",
        "counts",
    )
    return ", ".join(name for name in names if not np.array_equal(getattr(plan, name), getattr(other, name)))


def changed_keys(run: RunFolder, config: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ from those of the config that the run began with, as run.json keeps it."""
    began = last_config({**run.read_settings(), "changes": None})
    return list(_differences(began, config)) if isinstance(began, dict) else []


def last_config(settings: Mapping[str, Any]) -> Any:
    """The config that the last update of a run was made under, as run.json (`settings`) keeps it; None without one."""
    metadata, changes = settings.get("metadata"), settings.get("changes")
    return changes[-1]["config"] if changes else metadata.get("config") if isinstance(metadata, dict) else None


def note_changes(run: RunFolder, config: Mapping[str, Any], step: int) -> None:
    """Write into run.json which keys have other values after this step than before it, and the config from there on."""
    settings = run.read_settings()
    before = last_config(settings)
    if isinstance(before, dict) and (keys := list(_differences(before, config))):
        run.note(changes=[*(settings.get("changes") or []), {"step": step, "keys": keys, "config": config}])


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key in sorted({*one, *other}):
        before, now = one.get(key), other.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now, f"{above}{key}.")
        elif before != now:
            yield f"{above}{key}"
