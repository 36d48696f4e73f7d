"""What a GPU would have to do for a piece of code: kernels, reads that wait for them, and copies to the host.

They are counted on a CPU, where the same operators run. A call of an operator counts as one kernel; on a GPU some take
two or three.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators that launch nothing: views, and memory without contents.
_VIEWS = """view _unsafe_view t numpy_T transpose permute expand slice select unsqueeze squeeze detach alias as_strided
split split_with_sizes unbind reshape diagonal unfold _reshape_alias chunk lift_fresh narrow is_same_size empty
empty_like empty_strided new_empty new_empty_strided resize_ _record_function_enter_new _record_function_exit"""
#: Operators with a result that the host needs before it goes on.
_READS = "_local_scalar_dense is_nonzero nonzero equal allclose masked_select bincount unique_consecutive _unique2"
VIEWS, READS = frozenset(_VIEWS.split()), frozenset(_READS.split())


class Kernels(TorchDispatchMode):
    """Counts within a `with` block. Noise is made on the CPU in any case, and is not counted.

    kernels     {operator: calls}
    in_64_bits  how many of them have a 64-bit result
    reads       {operator, and the line of the library that waits: reads}
    copies      {method: calls} of `counting_copies`: cpu, tolist, and numpy where the tensor was not copied before
    update      how many of each belong to the noisy update: "kernels", "in 64 bits", "copies"
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.reads, self.copies = Counter[str](), Counter[str](), Counter[str]()
        self.in_64_bits, self.update = 0, Counter[str]()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        result = func(*args, **(kwargs or {}))
        where, is_update = place()
        if where.startswith("draws/randomness.py"):
            return result
        if name in READS or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            self.reads[f"{name} {where}"] += 1
        elif name not in VIEWS:
            self.kernels[name] += 1
            self.update["kernels"] += is_update
            if isinstance(result, Tensor) and result.dtype == torch.float64:
                self.in_64_bits += 1
                self.update["in 64 bits"] += is_update
        return result


def place() -> tuple[str, bool]:
    """(the library's line that is running, whether it runs for the noisy update)."""
    frame, where, is_update = sys._getframe(2), "", False
    while frame is not None:
        name = frame.f_code.co_filename
        if "/epsilons/" in name:
            where = where or f"{name.split('/epsilons/')[-1]}:{frame.f_lineno}"
            is_update |= name.endswith(("noisy_update.py", "checksums.py"))
        frame = frame.f_back
    return where, is_update


@contextmanager
def counting_copies(counted: Kernels) -> Iterator[None]:
    """Inside, calls that copy a tensor to the host are counted."""

    on_host, methods = set[int](), {name: getattr(Tensor, name) for name in ("cpu", "tolist", "numpy")}

    def counting(name: str) -> Callable[..., Any]:
        def method(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if name != "numpy" or tensor.untyped_storage().data_ptr() not in on_host:
                counted.copies[name] += 1
                counted.update["copies"] += place()[1]
            result = methods[name](tensor.clone() if name == "cpu" else tensor, *args, **options)
            if name == "cpu":
                on_host.add(result.untyped_storage().data_ptr())
            return result

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in methods:
            patch.setattr(Tensor, name, counting(name))
        yield
