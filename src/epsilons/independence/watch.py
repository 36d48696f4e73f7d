"""Follow a forward pass operator by operator: which record each value depends on, and what the pass asked for.

Below autograd, every computation is a sequence of ATen operators, whatever module, function or `no_grad` it is written
in (`TorchDispatchMode`). The watch runs each of them and keeps:

* for every storage, which record each of its values depends on (`states`, `rules`);
* the sequence of operators with their arguments that are no tensors, and small tensors that are free of records. Two
  passes over different numbers of records must agree on these, up to sizes that grow with the records;
* every value that Python reads out of a tensor: a number or a truth value can decide what is computed next.

In checks, random operators draw nothing meanwhile (`fixed_draws`).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.modules import leave
from . import states
from .decisions import Place, decides
from .fixed_draws import DRAWS, Coins, fixed
from .rules import result_of

# -- Which line of the caller's code is being run: not torch's, not this library's

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTERNAL = (_TORCH, _LIBRARY, "<frozen")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Files that are on the way of every value out of a tensor.
_ON_THE_WAY = (
    _HERE,
    os.path.join(_LIBRARY, "doors", "mean_losses.py"),
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


def caller_line() -> tuple[str, bool]:
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


# -- Follow a forward pass operator by operator: which record each value depends on, and what the pass asked for

#: Of a tensor that is free of records, so many values are compared between passes; of a larger one, their sum.
FEW_VALUES = 8
#: Python reads values out of tensors by these.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__dlpack__"}
_READS |= {"equal", "allclose", "is_nonzero", "__complex__"}
#: Python reads the sizes of tensors by these.
_SIZES = {"__len__", "size", "numel", "nelement"}
#: The cause of a decision by them.
SIZE = "size"
#: Stands for the operator of a random number that Python read.
RANDOM = "random"
#: So many calls are followed from where a value is read.
MOST_CALLS = 8
#: So many results before the losses, of so many values at most, show how exactly the losses can be computed.
NEAR_THE_LOSSES, MOST_VALUES, MOST_PRODUCTS = 8, 2**20, 2**18
#: Products; terms may cancel in them, so rounding goes by the sum of the terms' sizes. Some add the first argument.
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}


@dataclass(frozen=True)
class Step:
    """One operator that ran on values that depend on records.

    arguments  sizes as they are; of tensors that are free of records, their number of values and those that are
               compared; everything else but tensors as texts
    line       of the caller's code
    is_apart   whether it ran on values of which each depends on one record
    """

    operator: str
    arguments: tuple[int | str | tuple[int, tuple[Any, ...]], ...]
    line: str
    is_apart: bool = False


@dataclass(frozen=True)
class Read:
    """A value that Python read out of a tensor.

    value      its text, or a hash of many
    is_many    whether it is more than one value
    is_truth   whether it is one truth value
    is_exact   whether it is an integer or a truth value
    state      which records it depends on
    line       of the code that asked for it
    places     of that code, and of the calls that led there, innermost first; empty for code of an installed package
    at         after how many operators
    axis       of a size: the axis of the records; None for a value, or for one size
    """

    value: str
    is_many: bool
    is_truth: bool
    is_exact: bool
    state: states.State
    line: str
    places: tuple[Place, ...]
    at: int
    axis: int | None = None

    def is_decision(self, is_late: bool = False) -> bool:
        """Whether the caller's code decides by values of several records. is_late: as of `decisions.decides`"""
        is_one = isinstance(self.state, states.Rows) and self.state.axis is None
        is_each = not isinstance(self.state, states.Mixed)
        is_size = isinstance(self.state, states.Mixed) and self.state.cause.operator == SIZE
        how = self.is_exact, self.is_truth, is_late, self.axis, is_size
        return bool(self.places) and not is_one and decides(self.places, is_each, *how)


@dataclass
class Watched:
    """What one forward pass did.

    records   how many there were
    steps     its operators on values that depend on records
    relevant  those of them that the losses depend on
    reads     of tensors that depend on records
    produced  how many operators had run when the losses were complete
    counted   how many of the reads came before the last backward pass of a foreign loop; None: all count
    losses    which records the losses depend on
    is_seen   whether the losses were computed while they were watched: not in another thread, for example
    is_split  whether something was done for one record, or some, apart from others
    is_coarse whether 16 bits were computed with
    scale     (records,) the largest magnitude of each record's values shortly before its loss; None if not known
    """

    records: int
    steps: list[Step] = field(default_factory=list)
    relevant: list[Step] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    produced: int = 0
    counted: int | None = None
    losses: states.State = states.FREE
    is_seen: bool = False
    is_split: bool = False
    is_coarse: bool = False
    scale: Tensor | None = None


class OperatorWatch:
    """Follows one forward pass. `begin` and `end` may be called in different functions.

    >>> def compute(x):
    ...     watch = OperatorWatch(records=len(x))
    ...     watch.begin([(x, 0)], constants=[])
    ...     losses, centred = (x - 1).sum(1), x - x.mean(0)
    ...     watch.end()
    ...     return watch.state(losses), watch.state(centred)
    >>> losses, centred = compute(torch.ones(3, 2))
    >>> losses
    Rows(axis=0, inner=1, first=0, count=3)
    >>> centred.cause.operator
    'mean'
    """

    def __init__(self, records: int, coins: Coins | None = None, is_check: bool = True) -> None:
        self.watched = Watched(records)
        self._coins, self._is_check = coins or Coins(0), is_check
        self._storages = states.Storages()
        self._constants: set[int] = set()
        self.is_elsewhere: Callable[[], bool] = lambda: False  # while True, what Python reads is checked elsewhere
        self._forward = 0  # the operators that made the losses of a foreign loop, as bits
        self._latest: deque[Tensor] = deque(maxlen=NEAR_THE_LOSSES)
        self._modes: list[Any] = []
        self._caller: FrameType | None = None
        self._thread = 0

    def begin(
        self, batch: Sequence[tuple[Tensor, int | None]], constants: Sequence[Tensor], earlier: Sequence[Tensor] = ()
    ) -> None:
        """Watch from now on.

        batch      its tensors, each with the axis that its records lie along; None if that is not known
        constants  tensors that are the same for every number of records, such as parameters
        earlier    of the batch before
        """
        for tensor in earlier:
            self._storages.put(tensor, states.Mixed(states.Cause("that the batch before came from", "")))
        for tensor, axis in batch:
            state: states.State = states.Unknown(states.Cause("collate", ""))
            if axis is not None:
                records = self.watched.records
                state = states.Rows(axis, 1, 0, records) if records > 1 else states.Rows(None, 1, 0, 1)
            self._storages.put(tensor, state)
        self._constants = {states.key_of(t) for t in constants}
        self._enter()

    def begin_apart(self, records: Sequence[Sequence[Tensor]]) -> None:
        """Watch from now on. records: the tensors of each, before they are collated."""
        for place, tensors in enumerate(records):
            for tensor in tensors:
                self._storages.put(tensor, states.Rows(None, 1, place, 1))
        self._enter()

    def _enter(self) -> None:
        self._modes = [_Functions(self), _Operators(self)]
        self._thread, self._caller = threading.get_ident(), handed_to()
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> None:
        """Watch no more. Modes that the caller's code entered and has not left stay. In another thread, this waits."""
        if self._thread != threading.get_ident():
            return  # modes belong to the thread that entered them
        modes, self._modes, self._caller = self._modes, [], None
        for mode in reversed(modes):
            leave(mode)

    def begins_backward(self, loss: Tensor) -> None:
        """A foreign loop calls backward for this loss."""
        self._forward |= self._storages.steps([loss])

    def has_gradients(self) -> None:
        """A foreign loop has called backward: what is read from now on shapes no loss, unless it calls it again."""
        self.watched.counted = len(self.watched.reads)

    def is_cut(self, output: Tensor) -> None:
        """What made these outputs of a model is checked elsewhere: each entry of axis 0 is one record's from now on."""
        records = self.watched.records
        self._storages.put(output, states.Rows(0, 1, 0, records) if records > 1 else states.Rows(None, 1, 0, 1))

    def of_loop(self, given: Sequence[Tensor], gradients: Sequence[Tensor]) -> Watched:
        """What a foreign loop did around the calls of its model, so far.

        given      inputs of the calls
        gradients  of its loss, by the outputs of the calls
        """
        watched, made = self.watched, self._storages.steps([*given, *gradients])
        relevant = []
        for number, step in enumerate(watched.steps):
            if made >> number & 1:
                relevant.append(step)
            elif step.is_apart and self._forward >> number & 1:
                # A number may still cancel out in the gradient, as in (losses / n).sum(); places show there alone.
                relevant.append(replace(step, arguments=tuple(a for a in step.arguments if not isinstance(a, str))))
        produced = self._forward.bit_length()
        return replace(watched, relevant=relevant, reads=watched.reads[: watched.counted], produced=produced)

    def of(self, losses: Tensor) -> Watched:
        """What was seen of a forward pass that gave these losses."""
        watched, made = self.watched, self._storages.steps([losses])
        watched.losses, watched.is_seen = self.state(losses), states.key_of(losses) in self._storages.written
        watched.produced = self._storages.written.get(states.key_of(losses), 0)
        watched.reads = watched.reads[: watched.counted]
        watched.scale = self._scale(losses)
        watched.relevant = [step for number, step in enumerate(watched.steps) if made >> number & 1]
        self._storages.clear()
        self._latest.clear()
        return watched

    def state(self, tensor: Tensor) -> states.State:
        """Which records the values of this tensor depend on."""
        return self._storages.state(tensor)

    @property
    def is_running(self) -> bool:
        """Whether to watch: not once the code that the batch was handed to is left, by an error or for good."""
        if not self._modes or self._caller is None or threading.get_ident() != self._thread:
            return bool(self._modes)
        return is_run_by(self._caller)

    def _scale(self, losses: Tensor) -> Tensor | None:
        scale, records = None, self.watched.records
        for tensor in (losses.detach(), *self._latest):
            state = self.state(tensor)
            axis = state.axis if isinstance(state, states.Rows) and state.axis is not None else 0
            if tensor.ndim == 0 or records not in (tensor.shape[axis], tensor.shape[0]):
                continue
            axis = axis if tensor.shape[axis] == records else 0
            sizes = tensor.movedim(axis, 0).reshape(records, -1).abs().amax(1).double()
            sizes = torch.where(torch.isfinite(sizes), sizes, 0.0).to(losses.device)
            scale = sizes if scale is None else torch.maximum(scale, sizes)
        return scale

    # -- operators -------------------------------------------------------------------------------------

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operator's result; what is known of it is kept."""
        schema = states.schema_of(func)
        if schema.is_view:
            return func(*args, **kwargs)
        arguments = schema.named(args, kwargs)
        given = states.tensors_in(arguments.values())
        known = {id(t): self.state(t) for t in given}
        is_read = schema.name == "_local_scalar_dense"  # by Python: it is noted where Python asks for it
        made, line = self._storages.steps(given), ""
        is_free = all(isinstance(s, states.Free) for s in known.values())
        if not is_free and not is_read:
            made |= 1 << len(self.watched.steps)
            line = self._note(schema, arguments, known)  # before an argument is written to
        result = fixed(func, arguments, self._coin) if self._is_check else None
        if result is None:
            result = func(*args, **kwargs)
        if is_read:
            return result
        if schema.name in DRAWS or (is_free and any(self._storages.is_drawn(t) for t in given)):
            self._storages.put_drawn(states.tensors_in([result]))
        self._keep(
            states.Call(schema.name, arguments, known, states.tensors_in([result]), states.Cause(schema.name, line)),
            schema,
            made,
        )
        return result

    def _keep(self, call: states.Call, schema: states.Schema, made: int) -> None:
        """Keep what is known of the results, and of arguments that were written to; views need nothing."""
        shared = {states.key_of(t) for t in call.tensors if states.is_dense(t)}
        new = [r for r in call.results if not states.is_dense(r) or states.key_of(r) not in shared]
        changed = [call[name] for name in schema.written if isinstance(call[name], Tensor)]
        if not new and not changed:
            return
        known = dict(zip(map(id, call.results), result_of(call, schema.is_pointwise), strict=True))
        at = len(self.watched.steps)
        for tensor in new:
            self._storages.put(tensor, known[id(tensor)], made, at)
            self.watched.is_coarse |= tensor.dtype in (torch.float16, torch.bfloat16)
            if tensor.is_floating_point() and states.is_dense(tensor) and 0 < tensor.numel() <= MOST_VALUES:
                self._latest.append(_magnitude(call, tensor))
                self._storages.put(self._latest[-1], known[id(tensor)], made, at)
        for tensor in changed:
            if id(tensor) not in known:  # written to, and no result
                known[id(tensor)] = result_of(replace(call, results=[tensor]), schema.is_pointwise)[0]
            self._storages.write(tensor, known[id(tensor)], made, at)

    def _coin(self, count: int) -> float:
        """Between 0 and 1: the middle, or a draw where one number alone is drawn."""
        return self._coins.at(caller_line()[0], count == 1, self.watched.records)

    def _note(self, schema: states.Schema, arguments: dict[str, Any], known: dict[int, states.State]) -> str:
        """Keep a step; its line."""
        noted: list[Any] = []
        for name, value in arguments.items():
            parts = value if isinstance(value, list | tuple) else [value]
            tensors = states.tensors_in(parts)
            if tensors:
                free = [t for t in tensors if isinstance(known[id(t)], states.Free) and self._is_compared(t)]
                noted += [_compared(t) if self._is_check else _range(t) for t in free]
            elif name in schema.sizes and all(isinstance(part, int) for part in parts):
                noted += parts
            else:
                noted.append(repr(value))
        watched, (line, _) = self.watched, caller_line()
        watched.is_split |= any(isinstance(s, states.Rows) and s.count < watched.records for s in known.values())
        watched.steps.append(
            Step(schema.name, tuple(noted), line, any(isinstance(s, states.Rows) for s in known.values()))
        )
        return line

    def _is_compared(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return self._is_check  # of another model, which may be trained between two draws
        is_known = states.key_of(tensor) in self._constants or self._storages.is_drawn(tensor)
        return not tensor.is_complex() and not is_known

    def read(self, tensor: Tensor, value: Any) -> None:
        """Python read a value out of a tensor."""
        state = self.state(tensor)
        if self._storages.is_drawn(tensor) and not self._is_check:
            state = states.Mixed(states.Cause(RANDOM, ""))
        if isinstance(state, states.Free) or self.is_elsewhere():
            return
        line, is_own = caller_line()
        places = tuple(map(Place.of, islice(own_frames(), MOST_CALLS))) if is_own else ()
        is_many, is_truth = not isinstance(value, bool | int | float), isinstance(value, bool)
        is_exact = not tensor.is_floating_point() and not tensor.is_complex()
        text = _hash(tensor) if is_many else repr(value)
        at = len(self.watched.steps)
        self.watched.reads.append(Read(text, is_many, is_truth, is_exact, state, line, places, at))

    def read_size(self, tensor: Tensor, dim: Any, is_shape: bool) -> None:
        """Python read the sizes of a tensor, or that of one dimension, in a foreign loop: the number of records."""
        state = self.state(tensor)
        line, is_own = caller_line()
        if (
            self._is_check
            or not is_own
            or self.is_elsewhere()
            or not isinstance(state, states.Rows)
            or state.axis is None
        ):
            return
        if dim is None or dim % tensor.ndim == state.axis:
            places = tuple(map(Place.of, islice(own_frames(), MOST_CALLS)))
            number, axis = states.Mixed(states.Cause(SIZE, "")), state.axis if is_shape else None
            at = len(self.watched.steps)
            self.watched.reads.append(Read("", False, False, True, number, line, places, at, axis))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._watch.is_running:
            return func(*args, **(kwargs or {}))
        return self._watch.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees Python read values, which no operator shows."""

    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        is_shape = name == "__get__" and getattr(func, "__self__", None) is Tensor.shape
        if (name in _SIZES or is_shape) and self._watch.is_running:
            dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0 if name == "__len__" else None)
            self._watch.read_size(args[0], dim, dim is None and name not in ("numel", "nelement"))
        if name in _READS and args and isinstance(args[0], Tensor) and self._watch.is_running:
            self._watch.read(args[0], result)
        return result


def _compared(tensor: Tensor) -> tuple[int, tuple[Any, ...]]:
    """(number of values, those that are compared between passes)."""
    flat = tensor.detach().flatten()
    return len(flat), tuple(flat.tolist() if len(flat) <= FEW_VALUES else [float(flat.sum(dtype=torch.float64))])


def _range(tensor: Tensor) -> tuple[int, tuple[Any, ...]]:
    """(number of values, their range as a text); places one after the other have none."""
    flat = tensor.detach().flatten().double()
    if not len(flat):
        return 0, ()
    if len(flat) > 1 and torch.equal(flat, torch.arange(len(flat), dtype=flat.dtype, device=flat.device)):
        return len(flat), ()
    return len(flat), (f"{float(flat.min()):.5g} to {float(flat.max()):.5g}",)


def _magnitude(call: states.Call, result: Tensor) -> Tensor:
    """How large the terms are that a result was added up from; the result itself where it is no product."""
    if call.name not in _PRODUCTS or result.numel() > MOST_PRODUCTS:
        return result.detach()
    left, right = (factor.detach().abs() for factor in call.tensors[_PRODUCTS[call.name] :][:2])
    return torch.maximum(left @ right, result.detach().abs())


def _hash(tensor: Tensor) -> str:
    values = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
