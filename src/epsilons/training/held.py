"""What a data set holds: the values in it, among them random generators, which are seeded for each record.

The state of such a generator depends on all records that were read before. Seeded for each record, as the global
generators are, it gives a record the same numbers in any order of reading.

Found are values in attributes, collections, closures, and in globals that methods and functions of the data set name.
Generators elsewhere (in C, in another process) are not found: a record that they change is refused, because it is not
the same when it is read again.
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
#: Packages whose code draws from the global generators, or from generators that it is given.
_WITHOUT = {*sys.stdlib_module_names, "numpy", "torch", "epsilons"}
_GLOBAL: tuple[Any, ...] = (random._inst, np.random.mtrand._rand, torch.default_generator)
_PLAIN = str | bytes | int | float | np.ndarray | torch.Tensor | types.ModuleType | type | None
#: Where methods, partial functions and properties hold what they call.
_CALLED = ("func", "args", "keywords", "__func__", "__self__", "fget")


def by(dataset: object) -> list[Any]:
    """All values that are found, each once, in the same order in every process."""
    found: dict[int, Any] = {}
    level: list[Any] = [dataset]
    for _ in range(DEPTH):
        fresh = {id(value): value for value in level if id(value) not in found}
        found |= fresh
        level = [part for value in fresh.values() for part in _parts(value)] if len(found) < MOST else []
    return list(found.values())


def generators(dataset: object) -> list[Own]:
    """Those that the data set holds, without the global ones."""
    return [value for value in by(dataset) if isinstance(value, Own) and not any(value is g for g in _GLOBAL)]


def seed(generator: Own, number: int) -> None:
    """Set its state to the one that this number gives."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(
            dict(type(generator._bit_generator)(number).state)
        )  # also forgets a number drawn in advance
    else:
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(number).state


def _parts(value: Any) -> Iterable[Any]:
    """What a value holds, without what cannot hold a generator."""
    if isinstance(value, _PLAIN) or (isinstance(value, types.FunctionType) and _is_without(value)):
        return ()
    kinds = [kind for kind in type(value).__mro__ if not _is_without(kind)]
    held = [getattr(value, name, None) for kind in kinds for name in vars(kind).get("__slots__", ())]
    held += [part for kind in kinds for part in vars(kind).values()]
    if isinstance(value, functools.partial | types.MethodType | types.BuiltinMethodType | staticmethod | property):
        held += [getattr(value, name, None) for name in _CALLED]
    if isinstance(value, list | tuple | set | dict) and len(value) <= LONGEST:
        held += value.values() if isinstance(value, dict) else value
    if isinstance(value, types.FunctionType):
        held += _named(value)
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
