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
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, overrides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .decisions import Place
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
    places     of that code, and of the calls that led there, innermost first
    is_own     False where that is code of an installed package
    is_exact   whether it is a whole number or a truth value
    at         after how many operators
    """

    value: str
    is_many: bool
    is_truth: bool
    state: State
    line: str
    places: tuple[Place, ...]
    is_own: bool
    is_exact: bool
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


class Coins:
    """What random operators that draw one number alone, such as a coin for the whole batch, give while watched.

    The same at every call of a line of code: once per batch, or once per record. 0 at the first check and 1 at the
    second, or nearly, so that both sides of a rare decision are seen.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._alone: dict[str, bool] = {}

    def at(self, line: str, is_alone: bool, records: int) -> float:
        """is_alone: whether one number is drawn. With one record, a number for each record looks the same."""
        if records > 1:
            self._alone[line] = is_alone
        if not (is_alone and self._alone.get(line, True)):
            return 0.5
        if self._step < 2:
            return (2.0**-20, 1 - 2.0**-20)[self._step]
        return _unit(f"{self._step} {line}")


class OperatorWatch:
    """Both modes that are needed, for one forward pass.

    `begin` and `end` may be called in different functions.
    """

    def __init__(self, records: int, coins: Coins | None = None) -> None:
        self.found = Watched(records)
        self._coins = coins or Coins(0)
        #: Per storage: itself, what its values depend on, and the steps that made them, as the bits of a number.
        self._states: dict[int, tuple[Any, _Layout | Mixed | Unknown, int]] = {}
        self._written: dict[int, int] = {}  # storage -> how many operators had run when it was last written to
        self._known: set[int] = set()
        self._latest: deque[Tensor] = deque(maxlen=NEAR_THE_LOSSES)
        self._modes: list[Any] = []
        self._caller: FrameType | None = None
        self._thread = 0

    def begin(self, batch: Sequence[tuple[Tensor, int | None]], constants: Sequence[Tensor]) -> None:
        """Watch from now on. batch: tensors, and the axis their records lie along, None if that is not known."""
        for tensor, axis in batch:
            if axis is None:
                self._put(tensor, Unknown(Cause("collate", "")), 0)
            elif self.found.records > 1:
                self._put(tensor, Rows(axis, 1, 0, self.found.records), 0)
            else:
                self._put(tensor, Rows(None, 1, 0, 1), 0)
        self._begin(constants)

    def begin_apart(self, records: Sequence[Sequence[Tensor]]) -> None:
        """Watch from now on. records: the tensors of each, before they are collated."""
        for place, tensors in enumerate(records):
            for tensor in tensors:
                self._put(tensor, Rows(None, 1, place, 1), 0)
        self._begin([])

    def _begin(self, constants: Sequence[Tensor]) -> None:
        self._known = {t.untyped_storage()._cdata for t in constants}
        self._modes = [_Functions(self), _Operators(self)]
        self._thread, self._caller = threading.get_ident(), _caller()
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> None:
        """Watch no more. Modes that the caller's code entered and has not left stay; those that are gone, stay gone."""
        modes, self._modes, self._caller = self._modes, [], None
        for mode in reversed(modes):
            _leave(mode)

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
        """Whether to watch: not once the code that the batch was handed to is left, by an error or for good."""
        if not self._modes or self._caller is None or threading.get_ident() != self._thread:
            return bool(self._modes)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is self._caller:
                return True
            frame = frame.f_back
        return False

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
        if not _is_dense(tensor):
            return Unknown(Cause("a sparse or nested tensor", ""))
        key = tensor.untyped_storage()._cdata
        kept = self._states.get(key)
        if kept is None or _is_gone(kept[0]):
            return FREE
        layout = kept[1]
        return rows_in(layout, tensor) if isinstance(layout, _Layout) else layout

    def _made(self, tensor: Tensor) -> int:
        """The steps that made these values, as bits."""
        if not _is_dense(tensor):
            return -1
        kept = self._states.get(tensor.untyped_storage()._cdata)
        return 0 if kept is None or _is_gone(kept[0]) else kept[2]

    def _put(self, tensor: Tensor, state: State, made: int) -> None:
        if not _is_dense(tensor):
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
        if not _is_dense(tensor):
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
        result = _neutral(name, arguments, self._coin) if name in _RANDOM or name in _RANDOM_LAYERS else None
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
        shared = {t.untyped_storage()._cdata: t for t in given if _is_dense(t)}
        fresh = [r for r in results if not _is_dense(r) or r.untyped_storage()._cdata not in shared]
        changed = [arguments[k] for k in written if isinstance(arguments.get(k), Tensor)]
        if not fresh and not changed:
            return result  # a view
        outcome = dict(zip(map(id, results), result_of(call, is_pointwise), strict=True))
        for tensor in fresh:
            self._put(tensor, outcome[id(tensor)], made)
            self.found.is_coarse |= tensor.dtype in (torch.float16, torch.bfloat16)
            if tensor.is_floating_point() and _is_dense(tensor) and 0 < tensor.numel() <= MOST_VALUES:
                self._latest.append(_magnitude(name, arguments, tensor))
                self._put(self._latest[-1], outcome[id(tensor)], made)
        for tensor in changed:
            state = outcome[id(tensor)] if id(tensor) in outcome else _of(call, tensor, is_pointwise)
            self._write(tensor, state, made)
        return result

    def _coin(self, tensor: Tensor) -> float:
        """Between 0 and 1: the middle, or a draw where one number alone is drawn."""
        line, *_ = _line()
        return self._coins.at(line, tensor.numel() == 1, self.found.records)

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
            is_dense = _is_dense(tensor) and not tensor.is_complex()
            if is_dense and isinstance(states[id(tensor)], Free) and self._is_new(tensor):
                flat = tensor.detach().flatten()
                shown = flat.tolist() if len(flat) <= FEW_VALUES else [float(flat.sum(dtype=torch.float64))]
                values.append((len(flat), tuple(shown)))
        self.found.is_split |= any(isinstance(s, Rows) and s.count < self.found.records for s in states.values())
        line, *_ = _line()
        self.found.steps.append(Step(name, tuple(scalars), tuple(sizes), tuple(values), line))
        return line

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._known

    def read(self, tensor: Tensor, value: Any) -> None:
        """A value left a tensor for Python."""
        state = self.state(tensor)
        if isinstance(state, Free):
            return
        line, _, is_own = _line()
        is_many = not isinstance(value, bool | int | float)
        text = _hash(tensor) if is_many else repr(value)
        is_exact = not tensor.is_floating_point() and not tensor.is_complex()
        places = _places() if is_own else ()
        is_truth, at = isinstance(value, bool), len(self.found.steps)
        read = Read(text, is_many, is_truth, state, line, places, is_own, is_exact, at)
        self.found.reads.append(read)


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, *_ = _about(func)
        if name not in _RANDOM:
            return func(*args, **(kwargs or {}))
        return _neutral(name, _named(func, args, kwargs or {}), lambda _: 0.499)


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


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values lie in one storage at its strides: neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in _flat(list(values)) if isinstance(t, Tensor)]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [part for item in value for part in _flat(item)]
    return [value]


def _of(call: Call, written: Tensor, is_pointwise: bool) -> State:
    """The state of an argument that is written to and is no result."""
    return result_of(Call(call.name, call.arguments, call.states, [written], call.cause), is_pointwise)[0]


#: The first argument tells how many numbers are drawn.
Coin = Callable[[Tensor], float]


def _neutral(name: str, arguments: dict[str, Any], coin: Coin) -> Any:
    """What a random operator gives while it is watched; None for an operator that is not at random here."""
    if name == "native_dropout":
        x = arguments["input"]
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if name == "rrelu_with_noise":
        if not arguments.get("training"):
            return None
        slope = (float(arguments["lower"]) + float(arguments["upper"])) / 2
        x, noise = arguments["self"], arguments["noise"]
        noise.copy_(torch.where(x > 0, 1.0, slope))  # what the backward pass multiplies by
        return x * noise
    return _RANDOM[name](arguments, coin)


#: Random operators that are layers.
_RANDOM_LAYERS = ("native_dropout", "rrelu_with_noise")
#: Operators take their own dropout by these names, such as attention.
_DROPOUTS = ("dropout_p", "dropout")


def _without_dropout(func: Any, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    given = {name: 0.0 if name in _DROPOUTS else value for name, value in arguments.items()}
    only_by_name = {a.name for a in func._schema.arguments if a.kwarg_only}
    return [v for k, v in given.items() if k not in only_by_name], {k: v for k, v in given.items() if k in only_by_name}


def _unit(text: str) -> float:
    """Between 0 and 1, by a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return (int.from_bytes(digest) + 0.5) / 2**32


def _filled(value: Callable[[dict[str, Any], float], float]) -> Callable[[dict[str, Any], Coin], Tensor]:
    """Writes into `self`: the middle of the distribution, or, for one number alone, a draw."""

    def fill(arguments: dict[str, Any], coin: Coin) -> Tensor:
        x: Tensor = arguments["self"]
        with torch.no_grad():
            return x.fill_(value(arguments, coin(x)))

    return fill


def _new(arguments: dict[str, Any], **options: Any) -> Tensor:
    """A new tensor of this size, or like this one."""
    options |= {k: arguments[k] for k in ("dtype", "device") if arguments.get(k) is not None}
    if "self" in arguments:
        return arguments["self"].new_empty(arguments["self"].shape, **options)  # type: ignore[no-any-return]
    return torch.empty(list(arguments["size"]), **options)


def _made(value: Callable[[float], float]) -> Callable[[dict[str, Any], Coin], Tensor]:
    def make(arguments: dict[str, Any], coin: Coin) -> Tensor:
        x = _new(arguments)
        return x.fill_(value(coin(x)))

    return make


def _whole(arguments: dict[str, Any], unit: float) -> int:
    low, high = arguments.get("low", arguments.get("from", 0)) or 0, arguments.get("high", arguments.get("to"))
    return int(low) if high is None else int(low) + int(unit * (int(high) - int(low)))


def _integers(arguments: dict[str, Any], coin: Coin) -> Tensor:
    x = _new(arguments) if "self" in arguments else _new(arguments, dtype=torch.int64)
    return x.fill_(_whole(arguments, coin(x)))


def _backwards(arguments: dict[str, Any], coin: Coin) -> Tensor:
    """A permutation: not the identity, so that it moves records."""
    return torch.arange(int(arguments["n"]) - 1, -1, -1, device=arguments.get("device"))


def _likely(arguments: dict[str, Any], coin: Coin) -> Tensor:
    """Coins of given chances, each by its own chance alone."""
    x: Tensor = arguments["self"]
    p = arguments["p"] if isinstance(arguments.get("p"), Tensor) else x
    found = (p > coin(p)).to(x.dtype)
    return x.copy_(found) if isinstance(arguments.get("p"), Tensor) else found


def _coins(arguments: dict[str, Any], coin: Coin) -> Tensor:
    """In place with a chance for all, or from a tensor of chances."""
    x: Tensor = arguments["self"]
    if isinstance(arguments.get("p", x), Tensor):
        return _likely(arguments, coin)
    p, unit = float(arguments["p"]), coin(x)
    with torch.no_grad():
        return x.fill_(float(p > 0) if unit == 0.5 else float(unit < p))


def _chosen(arguments: dict[str, Any], coin: Coin) -> Tensor:
    return arguments["self"].argsort(-1, descending=True)[..., : arguments["num_samples"]]  # type: ignore[no-any-return]


_RANDOM: dict[str, Callable[[dict[str, Any], Coin], Tensor]] = {
    "bernoulli": _coins,
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


#: So many calls are followed from where a value is read.
MOST_CALLS = 8
#: Files of torch that are on the way of every value out of a tensor.
_ON_THE_WAY = (f"{_TORCH}overrides.py", f"{_TORCH}_tensor.py", f"{_TORCH}utils{os.sep}_contextlib.py")


def _line() -> tuple[str, str, bool]:
    """(file:line of the code that called, its path, whether it is the caller's own and not an installed package's)."""
    frame: FrameType | None = sys._getframe(2)
    is_own = True
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE)) and not name.startswith("<frozen"):
            is_own &= not any(part in name for part in _INSTALLED)
            return f"{Path(name).name}:{frame.f_lineno}", name, is_own
        # Torch itself asks, such as its distributions, or this library does.
        is_own &= name == __file__ or name.startswith((*_ON_THE_WAY, "<frozen"))
        frame = frame.f_back
    return "", "", False


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


def _caller() -> FrameType | None:
    """The caller's own code that is being run; None if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, "<frozen")) and not any(part in name for part in _INSTALLED):
            return frame
        frame = frame.f_back
    return None


def _leave(mode: Any) -> None:
    """Take a mode out of the modes that are on, wherever it stands among them."""
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


def _places() -> tuple[Place, ...]:
    """The caller's own code that is being run, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    found: list[Place] = []
    while frame is not None and len(found) < MOST_CALLS:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, "<frozen")) and not any(part in name for part in _INSTALLED):
            found.append(Place.of(frame))
        frame = frame.f_back
    return tuple(found)


def _hash(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
