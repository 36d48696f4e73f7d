"""Which line of the caller's code is being run: not torch's, not this library's."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.dirname(os.path.dirname(_HERE))) + os.sep
_INTERNAL = (_TORCH, _LIBRARY, "<frozen")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Files that are on the way of every value out of a tensor.
_ON_THE_WAY = (
    _HERE,
    os.path.join(os.path.dirname(_HERE[: -len(os.sep)]), "mean_losses.py"),
    "<frozen",
    f"{_TORCH}overrides.py",
    f"{_TORCH}_tensor.py",
    f"{_TORCH}utils{os.sep}_contextlib.py",
)


@cache
def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL)


@cache
def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED)


def own_frames() -> Iterator[FrameType]:
    """The caller's own code that is being run, without that of installed packages, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_internal(file) and not _is_installed(file):
            yield frame
        frame = frame.f_back


def handed_to() -> FrameType | None:
    """The caller's code that a batch is handed to. Generators that hand it on are not run while it is processed."""
    passing = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return next((frame for frame in own_frames() if not frame.f_code.co_flags & passing), None)


def is_run_by(caller: FrameType) -> bool:
    """Whether this code is still being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def line() -> tuple[str, bool]:
    """(file:line of the code that called, whether it is the caller's own and not torch's or another package's)."""
    frame: FrameType | None = sys._getframe(1)
    is_own = True
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_internal(file):
            return f"{os.path.basename(file)}:{frame.f_lineno}", is_own and not _is_installed(file)
        is_own = is_own and file.startswith(_ON_THE_WAY)  # torch itself may ask, such as its distributions
        frame = frame.f_back
    return "", False
