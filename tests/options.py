"""Options of a run in one flat dict, as tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from epsilons import EvalData, Performance, Private, Randomness, Records, Run, RunFolder, Training, fit, make_private

_FIELDS = {kind: {field.name for field in fields(kind)} for kind in (Performance, Records, RunFolder, Training)}


def _taken(options: dict[str, Any], kind: type) -> dict[str, Any]:
    return {name: options.pop(name) for name in _FIELDS[kind] if name in options}


def grouped(data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for `make_private`, in its objects."""
    rest = dict(options)
    records, folder, speed = (_taken(rest, kind) for kind in (Records, RunFolder, Performance))
    if folder:
        rest["run_dir"] = RunFolder(rest.get("run_dir"), **folder)
    renamed = {"key": "key", "run_index": "index", "randomness": "source"}
    if renamed.keys() & rest.keys():
        own = {renamed[name]: rest.pop(name) for name in renamed if name in rest}
        rest["seed"] = Randomness(seed=rest.get("seed"), **own)
    if speed:
        rest["performance"] = Performance(**speed)
    return {"data": Records(data, **records) if records else data} | rest


def make_flat(model: Any, optimizer: Any, data: Any, plan: Any, **options: Any) -> Private:
    return make_private(model, optimizer, plan=plan, **grouped(data, options))


def fit_flat(model: Any, data: Any, plan: Any, **options: Any) -> Run:
    training, held_out = _taken(options, Training), options.pop("eval_data", None)
    every = options.pop("eval_every", None)
    if every is not None:
        held_out = EvalData(held_out, every=every)
    if held_out is not None:
        options["evaluation"] = held_out
    given = grouped(data, options) | ({"training": Training(**training)} if training else {})
    return fit(model, plan=plan, **given)


def split(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, with those of Performance gathered under performance=."""
    rest = dict(options)
    chosen = _taken(rest, Performance)
    return rest | ({"performance": Performance(**chosen)} if chosen else {})
