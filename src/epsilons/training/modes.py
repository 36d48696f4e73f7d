"""Modes of torch (`with` blocks that see every function or operator) that begin and end in different functions."""

from __future__ import annotations

from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch


def leave(mode: Any) -> None:
    """Remove a mode from the stack of active modes, at any depth. Nothing happens if it is not there."""
    kind, stack = (
        (overrides, overrides._get_current_function_mode_stack)
        if isinstance(mode, TorchFunctionMode)
        else (_python_dispatch, _python_dispatch._get_current_dispatch_mode_stack)
    )
    if not any(other is mode for other in stack()):
        return
    above = []
    while stack()[-1] is not mode:
        above.append(kind._pop_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        kind._push_mode(other)
