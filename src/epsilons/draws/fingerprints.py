"""Fingerprints: a hash of what a value holds. Equal contents give equal fingerprints, in this process and the next.

Known are tensors, arrays, numbers, texts, images, modules, functions, and collections of them. An object of another
kind counts by its type alone, and two different functions may share their code, so different values may have the same
fingerprint. A fingerprint of data is as confidential as a hash of them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.modules import is_sharded

BYTES = 16
#: Deeper than any sensible record; what lies below counts by its type.
DEPTH = 32


def of(value: object) -> str:
    """32 hex digits.

    >>> of([1, 2]) == of([1, 2]), of([1, 2]) == of((1, 2))
    (True, False)
    """
    return _hash(value, ()).hex()


def _hash(value: object, above: tuple[int, ...]) -> bytes:
    """above: identities of the values that hold this one, so that a list that holds itself ends."""
    if id(value) in above or len(above) > DEPTH:
        return _joined("again", type(value).__qualname__)
    inside = (*above, id(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        found = _of_numbers(value, kind, inside) or _of_collection(value, kind, inside) or _of_code(value, inside)
        return found or _of_object(value, kind, inside)
    except Exception:  # reading a foreign object may raise anything
        return _joined("unreadable", kind)


def _each(values: Iterable[object], inside: tuple[int, ...]) -> Iterable[bytes]:
    return (_hash(part, inside) for part in values)


def _of_numbers(value: object, kind: str, inside: tuple[int, ...]) -> bytes | None:
    """Of numbers, texts, bytes and arrays of them; None for others."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray | memoryview):
        content = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else repr(value)
        return _joined(kind, content)
    if isinstance(value, Tensor) and is_sharded(value):  # each process holds other rows
        return _joined("sharded", f"{value.dtype} {tuple(value.shape)}")
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _joined("tensor", f"{value.dtype} {tuple(value.shape)}", flat.numpy().tobytes())
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return _joined("objects", str(array.shape), *_each(array.reshape(-1).tolist(), inside))
        return _joined("array", f"{array.dtype} {array.shape}", array.tobytes())
    return None


def _of_collection(value: object, kind: str, inside: tuple[int, ...]) -> bytes | None:
    if isinstance(value, nn.Module):
        return _module(value, inside)
    if isinstance(value, Mapping):
        return _joined(kind, *(part for pair in value.items() for part in _each(pair, inside)))
    if isinstance(value, AbstractSet):
        return _joined(kind, *sorted(_each(value, inside)))  # a set of texts has another order in each process
    return _joined(kind, *_each(value, inside)) if isinstance(value, Sequence) else None


def _of_code(value: object, inside: tuple[int, ...]) -> bytes | None:
    """Of classes, and of what can be called."""
    if isinstance(value, type):
        return _joined("class", f"{value.__module__}.{value.__qualname__}")
    if isinstance(value, types.FunctionType):
        return _function(value, inside)
    if isinstance(value, types.MethodType):
        return _joined("method", *_each((value.__func__, value.__self__), inside))
    if isinstance(value, types.CodeType):
        return _code(value, inside)
    if isinstance(value, functools.partial):
        return _joined("partial", *_each((value.func, value.args, value.keywords), inside))
    if isinstance(value, types.BuiltinFunctionType):
        return _joined("builtin", f"{value.__module__}.{value.__qualname__}")
    return None


def _of_object(value: object, kind: str, inside: tuple[int, ...]) -> bytes:
    if dataclasses.is_dataclass(value):
        return _joined(kind, *_each((getattr(value, field.name) for field in dataclasses.fields(value)), inside))
    if type(value).__module__.startswith("PIL."):
        image: Any = value
        return _joined(kind, f"{image.mode} {image.size}", image.tobytes())
    return _joined("some", kind)


def _joined(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=BYTES)
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


def _function(function: types.FunctionType, above: tuple[int, ...]) -> bytes:
    """Its code, its defaults and its closure, so that two lambdas differ."""
    cells = [content(cell) for cell in function.__closure__ or ()]
    parts = (function.__code__, function.__defaults__, function.__kwdefaults__, cells)
    name = f"{function.__module__}.{function.__qualname__}"
    return _joined("function", name, *(_hash(part, above) for part in parts))


def content(cell: types.CellType) -> object:
    """What a closure holds in this cell."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _code(code: types.CodeType, above: tuple[int, ...]) -> bytes:
    return _joined("code", code.co_code, *code.co_names, *(_hash(constant, above) for constant in code.co_consts))


def _module(module: nn.Module, above: tuple[int, ...]) -> bytes:
    """Its layers with their settings, code and attributes, its parameters and its buffers."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(module))
    values = [_joined(name, _hash(t, above)) for name, t in (*module.named_parameters(), *module.named_buffers())]
    return _joined("module", text, *values, *_written(module, above))


def _written(module: nn.Module, above: tuple[int, ...]) -> Iterable[bytes]:
    """Of layers that are not torch's: the code of their classes, and attributes that their repr may not show."""
    seen: dict[type, None] = {}
    for part in module.modules():
        yield _joined(f"{type(part).__module__}.{type(part).__qualname__} {part.training}")
        own = [kind for kind in type(part).__mro__ if not _is_torchs(kind)]  # `fully_shard` makes a subclass of torch's
        if own:
            seen |= dict.fromkeys(own)
            public = {name: value for name, value in vars(part).items() if not name.startswith("_")}
            yield from (_joined(name, _hash(value, above)) for name, value in sorted(public.items()))
    for kind in seen:
        for name, function in sorted(vars(kind).items()):
            if isinstance(function, types.FunctionType):
                yield _joined(name, _hash(function, above))


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


def as_text(values: Mapping[str, Any]) -> str:
    """Settings as a text that is the same for the same settings, in this process and the next."""
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))


# -- What a data set holds: the values in it, among them random generators, which are seeded for each record
#
# The state of such a generator depends on all records that were read before. Seeded for each record, as the global
# generators are, it gives a record the same numbers in any order of reading.
#
# Found are values in attributes, collections, closures, and in globals that methods and functions of the data set
# name. Generators elsewhere (in C, in another process) are not found: a record that they change is refused, because it
# is not the same when it is read again.

Own = np.random.Generator | np.random.RandomState | np.random.BitGenerator | random.Random | torch.Generator

#: Steps from the data set, length of a collection that is no data, and number of values that are looked at, at most.
HELD_DEPTH, LONGEST, MOST = 12, 1000, 50_000
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
    for _ in range(HELD_DEPTH):
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
