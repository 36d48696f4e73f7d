"""What `epsilons registry show` prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from ..errors import InputError
from ..escaping import printable
from ..registry import Registry
from .console import console, show_table

CONFIDENTIAL = "CONFIDENTIAL: this is one person's own account. Give it to that person alone, and keep no copy."


def show_all(registry: Registry, as_json: bool) -> None:
    """Aggregates: wishes, projects, runs."""
    found = registry.summary()
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return
    out = console()
    out.print(f"Registry {found.registry}: {found.people} people, {found.events:,} events", style="bold")
    out.print("Lifetime budgets. Used: spent and reserved, on average over the people of the row.")
    wishes = [[w.label, _of(w.people), _part(w.used), w.can_take_part] for w in found.wishes]
    show_table((["epsilon", "people", "used", "can take part"], wishes), out, left=1)
    if found.projects:
        projects = [
            [p.project or "(none)", f"{p.runs:,}", _part(p.quota), _part(p.used), p.people] for p in found.projects
        ]
        show_table((["project", "runs", "quota", "used", "people"], projects), out, left=1)
    if found.runs:
        runs = [
            [r.run, r.project or "(none)", r.kind, r.state, f"{r.steps:,}", _of(r.charged), r.people]
            for r in found.runs
        ]
        show_table((["run", "project", "kind", "state", "reserved", "charged", "people"], runs), out, left=4)
    if any(r.state in ("reserved", "running") for r in found.runs):
        out.print(
            "Runs that are not settled stay charged for all reserved steps. An interrupted run continues (epsilons "
            "train … --resume), or is given up: epsilons registry settle URL RUN --abandon. So is a run that never "
            "began; without its folder: epsilons registry settle URL --cancel NAME.",
            style="dim",
        )


def show_run(registry: Registry, name: str, as_json: bool) -> None:
    """One run. Raises InputError if there is none of this name."""
    found = [run for run in registry.summary().runs if run.run == name]
    if not found:
        raise InputError(f"The registry has no run {name!r}. epsilons registry show URL lists all.")
    _show(asdict(found[0]), as_json)


def show_person(registry: Registry, one: str, as_json: bool) -> None:
    """One person's own account."""
    account = registry.account([one])
    used = float(account.used_share[0])
    values: dict[str, Any] = {
        "registry": registry.id,
        "epsilon": float(account.epsilon[0]),
        "delta": float(account.delta[0]),
        "used": round(used, 6) if np.isfinite(used) else None,
        "withdrawn": bool(account.withdrawn[0]),
        "can_take_part": bool(account.can_take_part[0]),
        "runs": [asdict(run) | {"used": round(run.used, 6)} for run in registry.runs_of(one)],
    }
    console(stderr=as_json).print(CONFIDENTIAL, style="bold")
    if as_json:
        print(json.dumps(values, indent=1))
        return
    runs = values.pop("runs")
    _show(values, as_json)
    rows = [[run["run"], run["project"] or "(none)", run["kind"], run["state"], _part(run["used"])] for run in runs]
    show_table((["run", "project", "kind", "state", "used"], rows), console(), left=4)


def _show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=1))
        return
    for name, value in values.items():
        print(f"{name.replace('_', ' '):<14} {printable(_text(value))}", file=sys.stdout)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _of(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
