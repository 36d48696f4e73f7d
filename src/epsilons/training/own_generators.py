"""Random generators that a data set holds: found in it, and seeded for each record.

The state of such a generator depends on all records that were read before. Seeded for each record, as the global
generators are, it gives a record the same numbers in any order of reading.

Found are generators in attributes, collections, closures, and in globals that methods and functions of the data set
name. Others (in C, in another process) are not: a record that they change is refused, because it is not the same when
it is read again.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from .fingerprints import content

Own = np.random.Generator | np.random.RandomState | np.random.BitGenerator | random.Random | torch.Generator

#: Steps from the data set, length of a collection that is no data, and number of values that are looked at, at most.
DEPTH, LONGEST, MOST = 12, 1000, 50_000
#: They draw from the global generators, or from generators that they are given.
_WITHOUT = {*sys.stdlib_module_names, "numpy", "torch", "epsilons"}
_GLOBAL: tuple[Any, ...] = (random._inst, np.random.mtrand._rand, torch.default_generator)  # type: ignore[attr-defined]
_PLAIN = str | bytes | int | float | np.ndarray | torch.Tensor | types.ModuleType | type | None
#: Where methods, partial functions and properties hold what they call.
_CALLED = ("func", "args", "keywords", "__func__", "__self__", "fget")


def of(dataset: object) -> list[Own]:
    """All that are found, each once, in the same order in every process."""
    seen: dict[int, Any] = {id(value): value for value in _GLOBAL}
    found: list[Own] = []
    level: list[Any] = [dataset]
    for _ in range(DEPTH):
        fresh = {id(value): value for value in level if id(value) not in seen}
        seen |= fresh
        found += [value for value in fresh.values() if isinstance(value, Own)]
        level = [part for value in fresh.values() for part in _held(value)] if len(seen) < MOST else []
    return found


def seed(generator: Own, number: int) -> None:
    """Set its state to the one that this number gives."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(type(generator._bit_generator)(number).state)  # also forgets a number drawn in advance
    else:
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(number).state


def _held(value: Any) -> Iterable[Any]:
    """What a value holds, without what cannot hold a generator."""
    if isinstance(value, _PLAIN):
        return ()
    if isinstance(value, types.FunctionType):
        return () if _is_without(value) else _named(value)
    kinds = [kind for kind in type(value).__mro__ if not _is_without(kind)]
    held = [getattr(value, name, None) for kind in kinds for name in vars(kind).get("__slots__", ())]
    held += [part for kind in kinds for part in vars(kind).values()]
    if isinstance(value, functools.partial | types.MethodType | types.BuiltinMethodType | staticmethod | property):
        held += [getattr(value, name, None) for name in _CALLED]
    if isinstance(value, list | tuple | set | dict) and len(value) <= LONGEST:
        held += value.values() if isinstance(value, dict) else value
    return [*held, *getattr(value, "__dict__", {}).values()]


def _is_without(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _WITHOUT


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Its closure, its defaults, and the globals that its code names, also those of modules."""
    yield from (content(cell) for cell in function.__closure__ or ())
    yield from (function.__defaults__, function.__kwdefaults__)
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        known = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        modules = [vars(value) for value in known if isinstance(value, types.ModuleType)]
        yield from (*known, *(names[name] for names in modules for name in code.co_names if name in names))
