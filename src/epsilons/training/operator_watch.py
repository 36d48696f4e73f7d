"""Watch a forward pass operator by operator: which record each value depends on, and what the pass asked for.

Below autograd, every computation is a sequence of operators, whatever module, function or `no_grad` it stands in
(`TorchDispatchMode`). The watch runs each of them and keeps:

* for every storage, which record each of its values depends on (`operator_rules`), so that views need no rules;
* the sequence of operators with their arguments that are no tensors, and small tensors that are free of records. Two
  passes over different numbers of records must agree on these, up to sizes that grow with the records;
* every value that leaves a tensor for Python: a number or a truth value can steer what comes next.

Random operators draw nothing while watched: dropout keeps everything, noise is the same everywhere. So what is computed
for a record does not change with its place or with the number of records for that reason.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .operator_rules import FREE, Call, Cause, Free, Mixed, Rows, State, Unknown, result_of

#: Of a tensor that is free of records, so many values are compared between passes; of a larger one, their sum.
FEW_VALUES = 8
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__dlpack__"}
_READS |= {"equal", "allclose", "is_nonzero", "__complex__"}
#: Defaults of these types are numbers in the schema, and mean nothing else than none.
_TYPES = ("ScalarType", "Optional[ScalarType]", "Layout", "Optional[Layout]")
#: Results this near to the losses tell how exactly these can be computed.
NEAR_THE_LOSSES = 8
MOST_VALUES = 2**20
#: Arguments of these types are sizes and places: they may grow with the number of records.
_SIZES = ("int", "Optional[int]", "List[int]", "Optional[List[int]]")


@dataclass(frozen=True)
class _Layout:
    """The value at offset o of a storage depends on record first + ((o - origin) // unit) % count."""

    unit: int
    origin: int
    first: int
    count: int


@dataclass(frozen=True)
class Step:
    """One operator that ran.

    scalars  arguments that are neither tensors nor sizes, as texts
    sizes    arguments that are sizes
    values   per tensor that is free of records: its number of values, and those that are compared
    line     of the caller's code
    """

    operator: str
    scalars: tuple[str, ...]
    sizes: tuple[int, ...]
    values: tuple[tuple[int, tuple[Any, ...]], ...]
    line: str


@dataclass(frozen=True)
class Read:
    """A value that left a tensor.

    value      its text, or a hash of many
    is_many    whether it is more than one value
    is_truth   whether it is one truth value
    state      which records it depends on
    line       of the code that asked for it
    file       where that code is
    span       of the expression there: first line and column, last line and column; None if that is not known
    is_own     False where that is code of an installed package, or of this one
    at         after how many operators
    """

    value: str
    is_many: bool
    is_truth: bool
    state: State
    line: str
    file: str
    span: tuple[int, int, int, int] | None
    is_own: bool
    at: int


@dataclass
class Watched:
    """What one forward pass did.

    records   how many there were
    steps     its operators on values that depend on records
    relevant  those of them that the losses depend on
    reads     of tensors that depend on records
    produced  how many operators had run when the losses were complete
    losses    which records the losses depend on
    is_split  whether something was done for one record, or some, apart from others
    is_coarse whether 16 bits were computed with
    scale     (records,) the largest magnitude of each record's values shortly before its loss; None if not known
    """

    records: int
    steps: list[Step] = field(default_factory=list)
    relevant: list[Step] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    produced: int = 0
    losses: State = FREE
    is_split: bool = False
    is_coarse: bool = False
    scale: Tensor | None = None


class OperatorWatch:
    """Both modes that are needed, for one forward pass.

    `begin` and `end` may be called in different functions.
    """

    def __init__(self, records: int, salt: str = "") -> None:
        self.found = Watched(records)
        self._salt = salt
        #: Per storage: itself, what its values depend on, and the steps that made them, as the bits of a number.
        self._states: dict[int, tuple[Any, _Layout | Mixed | Unknown, int]] = {}
        self._written: dict[int, int] = {}  # storage -> how many operators had run when it was last written to
        self._known: set[int] = set()
        self._latest: deque[Tensor] = deque(maxlen=NEAR_THE_LOSSES)
        self._modes: list[Any] = []

    def begin(self, batch: Sequence[tuple[Tensor, int | None]], constants: Sequence[Tensor]) -> None:
        """Watch from now on. batch: tensors, and the axis their records lie along, None if that is not known."""
        for tensor, axis in batch:
            if axis is None:
                self._put(tensor, Unknown(Cause("collate", "")), 0)
            elif self.found.records > 1:
                self._put(tensor, Rows(axis, 1, 0, self.found.records), 0)
            else:
                self._put(tensor, Rows(None, 1, 0, 1), 0)
        self._known = {t.untyped_storage()._cdata for t in constants}
        self._modes = [_Functions(self), _Operators(self)]
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> None:
        """Watch no more."""
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self._modes = []

    def of(self, losses: Tensor) -> Watched:
        """What was seen of a forward pass that came to these losses."""
        self.found.losses = self.state(losses)
        self.found.produced = self._written.get(losses.untyped_storage()._cdata, 0)
        self.found.scale = self._scale(losses)
        made = self._made(losses)
        self.found.relevant = [step for place, step in enumerate(self.found.steps) if made >> place & 1]
        self._states.clear()
        self._latest.clear()
        return self.found

    @property
    def is_running(self) -> bool:
        return bool(self._modes)

    def _scale(self, losses: Tensor) -> Tensor | None:
        found = None
        for tensor in (losses.detach(), *self._latest):
            state = self.state(tensor)
            if isinstance(state, Rows) and state.axis is not None and tensor.shape[state.axis] == self.found.records:
                axis = state.axis
            elif tensor.ndim and tensor.shape[0] == self.found.records:
                axis = 0
            else:
                continue
            each = tensor.movedim(axis, 0).reshape(self.found.records, -1).abs().amax(1).double()
            each = torch.where(torch.isfinite(each), each, 0.0).to(losses.device)
            found = each if found is None else torch.maximum(found, each)
        return found

    # -- storages --------------------------------------------------------------------------------------

    def state(self, tensor: Tensor) -> State:
        """Which records the values of this tensor depend on."""
        if tensor.layout is not torch.strided:
            return Unknown(Cause("a sparse tensor", ""))
        key = tensor.untyped_storage()._cdata
        kept = self._states.get(key)
        if kept is None or _is_gone(kept[0]):
            return FREE
        layout = kept[1]
        return rows_in(layout, tensor) if isinstance(layout, _Layout) else layout

    def _made(self, tensor: Tensor) -> int:
        """The steps that made these values, as bits."""
        if tensor.layout is not torch.strided:
            return -1
        kept = self._states.get(tensor.untyped_storage()._cdata)
        return 0 if kept is None or _is_gone(kept[0]) else kept[2]

    def _put(self, tensor: Tensor, state: State, made: int) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        self._written[storage._cdata] = len(self.found.steps)
        if isinstance(state, Free):
            self._states.pop(storage._cdata, None)
            return
        self._states[storage._cdata] = (_weak(storage), self._layout(tensor, state), made)

    def _layout(self, tensor: Tensor, state: State) -> _Layout | Mixed | Unknown:
        if not isinstance(state, Rows):
            assert not isinstance(state, Free)
            return state
        layout = layout_of(state, tensor)
        if rows_in(layout, tensor) != state:
            return Unknown(Cause("a tensor of unusual strides", ""))
        return layout

    def _write(self, tensor: Tensor, state: State, made: int) -> None:
        """A tensor was written to in place; others may show the same storage."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        self._written[storage._cdata] = len(self.found.steps)
        kept = self._states.get(storage._cdata)
        old = kept[1] if kept is not None and not _is_gone(kept[0]) else None
        new: _Layout | Mixed | Unknown | None
        if isinstance(state, Free):
            new = old
        elif isinstance(old, Mixed) or isinstance(state, Mixed):
            new = old if isinstance(old, Mixed) else state  # type: ignore[assignment]  # one of them is mixed
        else:
            new = self._layout(tensor, state)
            is_part = tensor.numel() * tensor.element_size() < storage.nbytes()
            if isinstance(old, _Layout) and new != old and isinstance(new, _Layout):
                new = old if rows_in(old, tensor) == state else Unknown(Cause("a write to a part of a tensor", ""))
            elif isinstance(old, Unknown):
                new = old
            elif old is None and is_part and isinstance(new, _Layout) and new.count == 1:
                new = Unknown(Cause("a write to a part of a tensor", ""))
        if new is None:
            self._states.pop(storage._cdata, None)
        else:
            self._states[storage._cdata] = (_weak(storage), new, made | self._made(tensor))

    # -- operators -------------------------------------------------------------------------------------

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operator itself, its result as it is, and what is to be known of it."""
        name, written, is_pointwise, types = _about(func)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # another view of what it was
        arguments = _named(func, args, kwargs)
        given = _tensors(arguments.values())
        states = {id(t): self.state(t) for t in given}
        result = _neutral(name, arguments, self._salt, len(self.found.steps))
        if result is None:
            if any(arguments.get(key) for key in _DROPOUTS):
                args, kwargs = _without_dropout(func, arguments)
            result = func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return result  # what is read is noted where it is asked for
        results = [result] if isinstance(result, Tensor) else [r for r in _flat(result) if isinstance(r, Tensor)]
        made = 0
        for tensor in given:
            made |= self._made(tensor)
        line = ""
        if any(not isinstance(s, Free) for s in states.values()):
            made |= 1 << len(self.found.steps)
            line = self._note(name, arguments, types, states, given)
        call = Call(name, arguments, states, results, Cause(name, line))
        shared = {t.untyped_storage()._cdata: t for t in given if t.layout is torch.strided}
        fresh = [r for r in results if r.layout is not torch.strided or r.untyped_storage()._cdata not in shared]
        changed = [arguments[k] for k in written if isinstance(arguments.get(k), Tensor)]
        if not fresh and not changed:
            return result  # a view
        outcome = dict(zip(map(id, results), result_of(call, is_pointwise), strict=True))
        for tensor in fresh:
            self._put(tensor, outcome[id(tensor)], made)
            self.found.is_coarse |= tensor.dtype in (torch.float16, torch.bfloat16)
            if tensor.is_floating_point() and 0 < tensor.numel() <= MOST_VALUES:
                self._latest.append(_magnitude(name, arguments, tensor))
                self._put(self._latest[-1], outcome[id(tensor)], made)
        for tensor in changed:
            state = outcome[id(tensor)] if id(tensor) in outcome else _of(call, tensor, is_pointwise)
            self._write(tensor, state, made)
        return result

    def _note(
        self,
        name: str,
        arguments: dict[str, Any],
        types: dict[str, str],
        states: dict[int, State],
        given: Sequence[Tensor],
    ) -> str:
        scalars: list[str] = []
        sizes: list[int] = []
        for key, value in arguments.items():
            if isinstance(value, Tensor) or (
                isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value)
            ):
                continue
            parts = value if isinstance(value, list | tuple) else (value,)
            is_size = types.get(key) in _SIZES or (name == "arange" and key == "end")
            if is_size and all(isinstance(part, int) for part in parts):
                sizes += parts
            else:
                scalars.append(repr(value))
        values = []
        for tensor in given:
            is_dense = tensor.layout is torch.strided and not tensor.is_complex()
            if is_dense and isinstance(states[id(tensor)], Free) and self._is_new(tensor):
                flat = tensor.detach().flatten()
                shown = flat.tolist() if len(flat) <= FEW_VALUES else [float(flat.sum(dtype=torch.float64))]
                values.append((len(flat), tuple(shown)))
        self.found.is_split |= any(isinstance(s, Rows) and s.count < self.found.records for s in states.values())
        line = _line(_caller())
        self.found.steps.append(Step(name, tuple(scalars), tuple(sizes), tuple(values), line))
        return line

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._known

    def read(self, tensor: Tensor, value: Any) -> None:
        """A value left a tensor for Python."""
        state = self.state(tensor)
        if isinstance(state, Free):
            return
        frame = _caller()
        file = "" if frame is None else frame.f_code.co_filename
        is_one = isinstance(value, bool | int | float)
        self.found.reads.append(
            Read(
                repr(value) if is_one else _hash(tensor),
                not is_one,
                isinstance(value, bool),
                state,
                _line(frame),
                file,
                _span(frame),
                bool(file) and not _is_ours() and not any(part in file for part in _INSTALLED),
                len(self.found.steps),
            )
        )


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._watch.is_running:
            return func(*args, **(kwargs or {}))
        return self._watch.run(func, args, kwargs or {})


class Calm(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operators draw nothing inside; see `OperatorWatch`. Coins fall as they are more likely to."""

    def __init__(self, salt: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._salt, self._number = salt, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, *_ = _about(func)
        self._number += 1
        found = None
        if name in _RANDOM:
            found = _neutral(name, _named(func, args, kwargs or {}), self._salt, self._number, is_likely=True)
        return func(*args, **(kwargs or {})) if found is None else found


class _Functions(TorchFunctionMode):
    """Sees values leave tensors, which no operator shows."""

    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._watch.is_running and getattr(func, "__name__", "") in _READS and args and isinstance(args[0], Tensor):
            self._watch.read(args[0], result)
        return result


def _weak(storage: Any) -> Any:
    """A reference that does not keep the storage, but its address: no other storage takes it meanwhile."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(reference: Any) -> bool:
    return bool(reference.expired())


# -- where the records lie --------------------------------------------------------------------------------------------


def layout_of(rows: Rows, tensor: Tensor) -> _Layout:
    """The same for the storage of a dense tensor."""
    if rows.axis is None:
        return _Layout(1, 0, rows.first, 1)
    return _Layout(int(tensor.stride(rows.axis)) * rows.inner, int(tensor.storage_offset()), rows.first, rows.count)


def rows_in(layout: _Layout, tensor: Tensor) -> State:
    """Which records the values of this view of a storage depend on."""
    unit, count = layout.unit, layout.count
    if count == 1:
        return Rows(None, 1, layout.first, 1)
    unknown = Unknown(Cause("a view across records", ""))
    start = tensor.storage_offset() - layout.origin
    if start < 0 or unit <= 0:
        return unknown
    within, found = start % unit, None
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size <= 1 or stride == 0 or stride % (unit * count) == 0:
            continue
        if stride * size <= unit or (stride < unit and within + stride * (size - 1) < unit and unit % stride):
            within += stride * (size - 1)
            continue
        if found is not None:
            return unknown
        found = (axis, size, stride)
    record = start // unit % count
    if found is None:
        return Rows(None, 1, layout.first + record, 1) if within < unit else unknown
    axis, size, stride = found
    if stride >= unit:
        if stride != unit or within >= unit:
            return unknown
        inner = 1
    else:
        if unit % stride or size % (unit // stride) or within >= stride:
            return unknown
        inner = unit // stride
    span = size // inner
    if span % count == 0 and record == 0:
        return Rows(axis, inner, layout.first, count)
    if record + span > count:
        return unknown
    return Rows(axis, inner, layout.first + record, span) if span > 1 else Rows(None, 1, layout.first + record, 1)


# -- operators ---------------------------------------------------------------------------------------------------------


@cache
def _about(func: Any) -> tuple[str, tuple[str, ...], bool, dict[str, str]]:
    """(name, arguments that are written to, whether it works entry by entry, the types of its arguments)."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    types = {a.name: str(a.type) for a in schema.arguments}
    return name, written, torch.Tag.pointwise in func.tags, types


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults among them."""
    found = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            found[argument.name] = args[place]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value() and str(argument.real_type) not in _TYPES:
            found[argument.name] = argument.default_value
    return found


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in _flat(list(values)) if isinstance(t, Tensor)]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [part for item in value for part in _flat(item)]
    return [value]


def _of(call: Call, written: Tensor, is_pointwise: bool) -> State:
    """The state of an argument that is written to and is no result."""
    return result_of(Call(call.name, call.arguments, call.states, [written], call.cause), is_pointwise)[0]


def _neutral(name: str, arguments: dict[str, Any], salt: str, number: int, is_likely: bool = False) -> Any:
    """What a random operator gives while it is watched; None for all others.

    One number alone, such as a coin for the whole batch, is drawn from the salt: another one at every check. Of many
    coins, all fall on 1, so that dropout keeps everything; is_likely: on what is more likely.
    """
    if is_likely and name == "bernoulli" and isinstance(arguments.get("p"), float):
        x: Tensor = arguments["self"]
        return x.fill_(float((_unit(salt, number) if x.numel() == 1 else 0.5) < arguments["p"]))
    if name == "native_dropout":
        x = arguments["input"]
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if name == "rrelu_with_noise" and arguments.get("training"):
        slope = (float(arguments["lower"]) + float(arguments["upper"])) / 2
        x, noise = arguments["self"], arguments["noise"]
        noise.copy_(torch.where(x > 0, 1.0, slope))  # what the backward pass multiplies by
        return x * noise
    if name not in _RANDOM:
        return None
    return _RANDOM[name](arguments, _unit(salt, number))


#: Operators take their own dropout by these names, such as attention.
_DROPOUTS = ("dropout_p", "dropout")


def _without_dropout(func: Any, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    given = {name: 0.0 if name in _DROPOUTS else value for name, value in arguments.items()}
    only_by_name = {a.name for a in func._schema.arguments if a.kwarg_only}
    return [v for k, v in given.items() if k not in only_by_name], {k: v for k, v in given.items() if k in only_by_name}


def _unit(salt: str, number: int) -> float:
    """Between 0 and 1, by the salt and the place in the sequence of operators."""
    digest = hashlib.blake2b(f"{salt} {number}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest) + 0.5) / 2**32


def _filled(value: Callable[[dict[str, Any], float], float]) -> Callable[[dict[str, Any], float], Tensor]:
    """Writes into `self`: the middle of the distribution, or, for one number alone, a draw."""

    def fill(arguments: dict[str, Any], unit: float) -> Tensor:
        x: Tensor = arguments["self"]
        with torch.no_grad():
            return x.fill_(value(arguments, unit if x.numel() == 1 else 0.5))

    return fill


def _made(value: Callable[[float], float]) -> Callable[[dict[str, Any], float], Tensor]:
    """A new tensor of this size, or like this one."""

    def make(arguments: dict[str, Any], unit: float) -> Tensor:
        options = {k: arguments[k] for k in ("dtype", "device") if arguments.get(k) is not None}
        x = (
            arguments["self"].new_empty(arguments["self"].shape, **options)
            if "self" in arguments
            else torch.empty(list(arguments["size"]), **options)
        )
        return x.fill_(value(unit if x.numel() == 1 else 0.5))

    return make


def _whole(arguments: dict[str, Any], unit: float) -> int:
    low, high = arguments.get("low", arguments.get("from", 0)) or 0, arguments.get("high", arguments.get("to"))
    return int(low) if high is None else int(low) + int(unit * (int(high) - int(low)))


def _integers(arguments: dict[str, Any], unit: float) -> Tensor:
    options = {"dtype": torch.int64} | {k: arguments[k] for k in ("dtype", "device") if arguments.get(k) is not None}
    x = (
        arguments["self"].new_empty(arguments["self"].shape)
        if "self" in arguments
        else torch.empty(list(arguments["size"]), **options)
    )
    return x.fill_(_whole(arguments, unit if x.numel() == 1 else 0.5))


def _backwards(arguments: dict[str, Any], unit: float) -> Tensor:
    """A permutation: not the identity, so that it moves records."""
    return torch.arange(int(arguments["n"]) - 1, -1, -1, device=arguments.get("device"))


def _likely(arguments: dict[str, Any], unit: float) -> Tensor:
    """Coins of given chances, each by its own chance alone."""
    x: Tensor = arguments["self"]
    p = arguments.get("p")
    chance: Tensor = p if isinstance(p, Tensor) else x
    found = (chance > (unit if chance.numel() == 1 else 0.5)).to(x.dtype)
    return x.copy_(found) if isinstance(p, Tensor) else found


def _coins(arguments: dict[str, Any], unit: float) -> Tensor:
    x: Tensor = arguments["self"]
    p = arguments.get("p", 0.5)
    if isinstance(p, Tensor):
        return _likely(arguments, unit)
    with torch.no_grad():
        return x.fill_(float(unit < p) if x.numel() == 1 else float(p > 0))


def _bernoulli(arguments: dict[str, Any], unit: float) -> Tensor:
    """In place with a chance for all, or from a tensor of chances."""
    return _coins(arguments, unit) if "p" in arguments else _likely(arguments, unit)


def _chosen(arguments: dict[str, Any], unit: float) -> Tensor:
    x: Tensor = arguments["self"]
    return x.argsort(-1, descending=True)[..., : arguments["num_samples"]]


_RANDOM: dict[str, Callable[[dict[str, Any], float], Tensor]] = {
    "bernoulli": _bernoulli,
    "uniform": _filled(lambda a, u: float(a["from"]) + u * (float(a["to"]) - float(a["from"]))),
    "normal": _filled(lambda a, u: float(a.get("mean", 0.0)) + float(a.get("std", 1.0)) * (2 * u - 0.5)),
    "exponential": _filled(lambda a, u: 1.0),
    "log_normal": _filled(lambda a, u: 1.0),
    "cauchy": _filled(lambda a, u: 0.5),
    "geometric": _filled(lambda a, u: 1.0),
    "random": _filled(lambda a, u: float(_whole(a, u))),
    "rand": _made(lambda u: u),
    "randn": _made(lambda u: 2 * u - 0.5),
    "rand_like": _made(lambda u: u),
    "randn_like": _made(lambda u: 2 * u - 0.5),
    "randint": _integers,
    "randint_like": _integers,
    "randperm": _backwards,
    "multinomial": _chosen,
}


# -- the caller's code ---------------------------------------------------------------------------------------------


def _caller() -> FrameType | None:
    """The nearest code that is neither torch's nor this library's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE)) and not name.startswith("<frozen"):
            return frame
        frame = frame.f_back
    return None


def _is_ours() -> bool:
    """Whether the nearest code beside torch's is this library's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith((_TORCH, "<frozen")):
            return name.startswith(_HERE)
        frame = frame.f_back
    return False


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _span(frame: FrameType | None) -> tuple[int, int, int, int] | None:
    """What of the source is being computed."""
    if frame is None:
        return None
    places = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if places is None or None in places:
        return None
    first, last, start, end = places
    return first, start, last, end  # type: ignore[return-value]  # none of them is None


#: Products: the names of both sides. Terms may cancel in them, so rounding goes by the sum of the terms' sizes.
_SIDES = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
}
MOST_PRODUCTS = 2**18


def _magnitude(name: str, arguments: dict[str, Any], result: Tensor) -> Tensor:
    """How large the terms are that a result was added up from; the result itself where it is no product."""
    if name not in _SIDES or result.numel() > MOST_PRODUCTS:
        return result.detach()
    left, right = (arguments[side].detach() for side in _SIDES[name])
    return torch.maximum(left.abs() @ right.abs(), result.detach().abs())


def _hash(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
