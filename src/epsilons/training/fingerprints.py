"""Fingerprints: a hash of what a value holds. Equal contents give equal fingerprints, in this process and the next.

Known are tensors, arrays, numbers, texts, images, modules, functions, and collections of them. An object of another
kind counts by its type alone, and two different functions may share their code, so different values may have the same
fingerprint. A fingerprint of data is as confidential as a hash of them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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

    def each(values: Iterable[object]) -> Iterable[bytes]:
        return (_hash(part, inside) for part in values)

    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray | memoryview):
            content = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else repr(value)
            return _joined(kind, content)
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _joined("tensor", f"{value.dtype} {tuple(value.shape)}", flat.numpy().tobytes())
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return _joined("objects", str(array.shape), *each(array.reshape(-1).tolist()))
            return _joined("array", f"{array.dtype} {array.shape}", array.tobytes())
        if isinstance(value, nn.Module):
            return _module(value, inside)
        if isinstance(value, Mapping):
            return _joined(kind, *(part for pair in value.items() for part in each(pair)))
        if isinstance(value, AbstractSet):
            return _joined(kind, *sorted(each(value)))  # a set of texts has another order in each process
        if isinstance(value, Sequence):
            return _joined(kind, *each(value))
        if isinstance(value, type):
            return _joined("class", f"{value.__module__}.{value.__qualname__}")
        if isinstance(value, types.FunctionType):
            return _function(value, inside)
        if isinstance(value, types.MethodType):
            return _joined("method", *each((value.__func__, value.__self__)))
        if isinstance(value, types.CodeType):
            return _code(value, inside)
        if isinstance(value, functools.partial):
            return _joined("partial", *each((value.func, value.args, value.keywords)))
        if isinstance(value, types.BuiltinFunctionType):
            return _joined("builtin", f"{value.__module__}.{value.__qualname__}")
        if dataclasses.is_dataclass(value):
            return _joined(kind, *each(getattr(value, field.name) for field in dataclasses.fields(value)))
        if type(value).__module__.startswith("PIL."):
            image: Any = value
            return _joined(kind, f"{image.mode} {image.size}", image.tobytes())
    except Exception:  # reading a foreign object may raise anything
        return _joined("unreadable", kind)
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
        if not _is_torchs(type(part)):
            seen |= dict.fromkeys(kind for kind in type(part).__mro__ if not _is_torchs(kind))
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
