"""Which record each entry of an operator's result depends on, given which record each entry of its inputs depends on.

A tensor is `FREE` of records, or made of `Rows`, one record beside the other along one axis, or `Mixed`, or `Unknown`.
The rules are facts about operators. `Mixed` is certain: an entry was computed from several records. `Unknown` is not:
an operator without a rule, or one that moves records about, such as sorting. For some operators with a rule, only the
use that keeps records apart is known; every other use of those is `Mixed` or `Unknown`.

To teach an operator: a function (call) -> state of the outputs, and a line in RULES.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Entry p of `axis` depends on record first + (p // inner) % count alone. axis None: every entry on record first.

    axis   the axis along which the records lie
    inner  entries of the axis per record: (records · time, features) has inner = time
    first  the first record
    count  how many records there are
    """

    axis: int | None
    inner: int
    first: int
    count: int


@dataclass(frozen=True)
class Free:
    """Depends on no record."""


@dataclass(frozen=True)
class Cause:
    """Where something happened: an operator, and the line of the caller's code that ran it."""

    operator: str
    line: str

    def __str__(self) -> str:
        return f"the operator {self.operator} at {self.line}" if self.line else f"the operator {self.operator}"


@dataclass(frozen=True)
class Mixed:
    """An entry depends on several records."""

    cause: Cause


@dataclass(frozen=True)
class Unknown:
    """Nothing is known.

    is_place  whether these are whole numbers that depend on several records: sound as places, and as nothing else
    """

    cause: Cause
    is_place: bool = False


FREE = Free()
State = Rows | Free | Mixed | Unknown


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    name       its name, without the underscore of the version that works in place
    arguments  by the names of its schema
    states     of every tensor among the arguments, by id
    results    the tensors that came out
    cause      for `Mixed` and `Unknown`
    """

    name: str
    arguments: dict[str, Any]
    states: dict[int, State]
    results: Sequence[Tensor]
    cause: Cause

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def state(self, value: Any) -> State:
        return self.states[id(value)] if isinstance(value, Tensor) else FREE

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        found = []
        for value in self.arguments.values():
            parts = value if isinstance(value, list | tuple) else (value,)
            found += [part for part in parts if isinstance(part, Tensor)]
        return found

    def mixed(self) -> Mixed:
        return Mixed(self.cause)

    def unknown(self) -> Unknown:
        return Unknown(self.cause)


Rule = Callable[[Call], "State | list[State]"]


def worst(states: Sequence[State]) -> State | None:
    """The first state that is mixed, or else unknown; None if none is."""
    return next((s for s in states if isinstance(s, Mixed)), next((s for s in states if isinstance(s, Unknown)), None))


def joined(call: Call, states: Sequence[State]) -> State:
    """Of results whose entries are computed from one entry of each; axes are the result's."""
    bad = worst(states)
    if bad is not None:
        return bad
    rows = [s for s in states if isinstance(s, Rows)]
    if not rows:
        return FREE
    return rows[0] if all(r == rows[0] for r in rows) else call.mixed()


def in_axes_of(call: Call, value: Any, ndim: int) -> State:
    """The state of an argument that is broadcast to `ndim` axes."""
    state = call.state(value)
    if isinstance(state, Rows) and state.axis is not None:
        return replace(state, axis=state.axis + ndim - value.ndim)
    return state


def axes(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions as an operator takes them, from 0; none given are all."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in ((dims,) if isinstance(dims, int) else dims))


# -- rules ------------------------------------------------------------------------------------------------------------


def pointwise(call: Call) -> State:
    """Entry by entry, with broadcasting."""
    ndim = call.results[0].ndim if call.results else 0
    states = [in_axes_of(call, t, ndim) for t in call.tensors]
    places = [s for s in states if isinstance(s, Unknown) and s.is_place]
    if places and call.results and (call.results[0].is_floating_point() or call.results[0].dtype is torch.bool):
        return Mixed(places[0].cause)  # a place became a value, or decides
    return places[0] if places and worst(states) in places else joined(call, states)


def like(call: Call) -> State:
    return call.state(call["self"])


def copied(call: Call) -> State:
    """What is written over does not count."""
    source = call["src"] if isinstance(call["src"], Tensor) else call["value"]
    return in_axes_of(call, source, call["self"].ndim) if isinstance(source, Tensor) else FREE


def from_nothing(call: Call) -> State:
    return FREE


def same(state: State, test: Callable[[int], bool], otherwise: State) -> State:
    """The state itself if its axis passes the test."""
    if isinstance(state, Rows) and state.axis is not None and not test(state.axis):
        return otherwise
    return state


def reduction(call: Call) -> State:
    """A sum, mean, maximum, norm … over some axes."""
    x, keepdim = call["self"], bool(call["keepdim"])
    dims = axes(call["dim"], x.ndim)
    state = same(call.state(x), lambda axis: axis not in dims, call.mixed())
    if isinstance(state, Rows) and state.axis is not None and not keepdim:
        return replace(state, axis=state.axis - sum(d < state.axis for d in dims))
    return state


def along(call: Call) -> State:
    """Mixes along some axes, such as softmax."""
    x = call.tensors[0]
    given = call["dims"] if "dims" in call.arguments else call["dim"]
    dims = axes(given, x.ndim)
    return same(call.state(x), lambda axis: axis not in dims, call.mixed())


def moving(call: Call) -> State:
    """Puts entries of one axis into another order: nothing is known if that is the records'."""
    found = along(call)
    return call.unknown() if isinstance(found, Mixed) and found.cause is call.cause else found


def rolled(call: Call) -> State:
    shifts = call["shifts"] if isinstance(call["shifts"], list | tuple) else [call["shifts"]]
    return along(call) if any(shifts) else call.state(call["self"])


def leading(last: int) -> Rule:
    """Mixes the last axes in any way: pooling, interpolation, matrix decompositions."""

    def rule(call: Call) -> State:
        x = call.tensors[0]
        others = [call.state(t) for t in call.tensors[1:]]
        bad = worst(others)
        if bad is not None:
            return bad
        if any(isinstance(s, Rows) for s in others) and joined(call, [call.state(x), *others]) != call.state(x):
            return call.unknown()
        return same(call.state(x), lambda axis: axis < x.ndim - last, call.unknown())

    return rule


def running(call: Call) -> State:
    """Running sums. Those of integers are mostly places: where a record begins among all entries."""
    found = along(call)
    is_place = not call.tensors[0].is_floating_point()
    return Unknown(call.cause, True) if is_place and isinstance(found, Mixed) and found.cause is call.cause else found


def slices(call: Call) -> State:
    """Brings the norm of every slice along one axis under a bound."""
    x = call["self"]
    (dim,) = axes(call["dim"], x.ndim)
    return same(call.state(x), lambda axis: axis == dim, call.mixed())


def looked_up(call: Call) -> State:
    """Entries of the first tensor looked up in all of the second."""
    names = {"searchsorted": ("self", "sorted_sequence"), "bucketize": ("self", "boundaries")}
    entries, table = names.get(call.name, ("elements", "test_elements"))
    own, whole = call.state(call[entries]), call.state(call[table])
    if isinstance(own, Mixed | Unknown) or whole == FREE:
        return own
    if isinstance(whole, Mixed | Unknown):
        return whole
    sequence = call[table]
    if call.name == "searchsorted" and sequence.ndim > 1:
        return same(joined(call, [own, whole]), lambda axis: axis < sequence.ndim - 1, call.mixed())
    assert isinstance(whole, Rows)
    return joined(call, [own, whole]) if whole.axis is None else call.mixed()


def padded(call: Call) -> State:
    x = call["self"]
    touched = [x.ndim - 1 - i // 2 for i, amount in enumerate(call["pad"]) if amount]
    return same(call.state(x), lambda axis: axis not in touched, call.unknown())


def matrices(call: Call) -> State:
    """(n, k) @ (k, p), or with a vector on either side, plus a bias."""
    left, right = ("self", "mat2") if call.name == "mm" else ("mat1", "mat2")
    left, right = {"mv": ("self", "vec"), "addmv": ("mat", "vec"), "dot": ("self", "tensor")}.get(
        call.name, (left, right)
    )
    a, b = call.state(call[left]), call.state(call[right])
    product = _product(call, a, b, call[left].ndim - 1, 0, rows=0, columns=call[right].ndim - 1)
    if call.name in ("addmm", "addmv"):
        return joined(call, [product, in_axes_of(call, call["self"], call.results[0].ndim)])
    return product


def _product(call: Call, a: State, b: State, inner_a: int, inner_b: int, rows: int, columns: int) -> State:
    """Of a product over `inner_a` of the left and `inner_b` of the right side."""
    bad = worst([a, b])
    if bad is not None:
        return bad
    whole = [s for s in (a, b) if isinstance(s, Rows)]
    if not whole:
        return FREE
    if all(s.axis is None for s in whole):
        return joined(call, whole)
    if len(whole) == 2:
        return call.mixed()
    if isinstance(a, Rows):
        return a if a.axis == rows and a.axis != inner_a else call.mixed()
    assert isinstance(b, Rows)
    if b.axis == inner_b:
        return call.mixed()
    return replace(b, axis=call.results[0].ndim - 1 if b.axis == columns else b.axis)


def batched_matrices(call: Call) -> State:
    """(batch, n, k) @ (batch, k, p)."""
    if call.name == "baddbmm":
        left, right = call["batch1"], call["batch2"]
    else:
        left, right = call["self"], call["mat2"]
    a, b = call.state(left), call.state(right)
    bad = worst([a, b])
    if bad is not None:
        return bad
    found: State
    if all(not isinstance(s, Rows) or s.axis in (0, None) for s in (a, b)):
        found = joined(call, [a, b])
    elif a == FREE or b == FREE:
        found = same(a, lambda axis: axis != 2, call.mixed()) if b == FREE else same(b, lambda x: x != 1, call.mixed())
    else:
        found = call.mixed()
    if call.name == "baddbmm":
        return joined(call, [found, in_axes_of(call, call["self"], 3)])
    return found


def linear(call: Call) -> State:
    """input, weight, bias in one operator."""
    x = call["input"] if "input" in call.arguments else call["self"]
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    if any(call.state(t) != FREE for t in call.tensors if t is not x):
        return call.unknown()
    return same(call.state(x), lambda axis: axis != x.ndim - 1, call.mixed())


def convolution(call: Call) -> State:
    """Records in the first axis. In the second, all channels of a group meet; in others, what a kernel covers."""
    x = call["input"] if "input" in call.arguments else call["self"]
    state = call.state(x)
    if isinstance(state, Rows) and state.axis and state.count > 1:
        kernel = call["weight"].shape[2:]
        width = (x.shape[1] if call["groups"] == 1 else 1) if state.axis == 1 else kernel[state.axis - 2]
        if width > state.inner:
            return call.mixed()
    return _first_axis(call, x)


def group_norm(call: Call) -> State:
    return _first_axis(call, call["input"])


def _first_axis(call: Call, x: Tensor) -> State:
    """Records in the first axis, and weights that are free of them."""
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    if any(call.state(t) != FREE for t in call.tensors if t is not x):
        return call.unknown()
    return same(call.state(x), lambda axis: axis == 0, call.unknown())


def layer_norm(call: Call) -> State:
    x = call["input"]
    size = len(call["normalized_shape"])
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    if any(call.state(t) != FREE for t in call.tensors if t is not x):
        return call.unknown()
    return same(call.state(x), lambda axis: axis < x.ndim - size, call.mixed())


def batch_norm(call: Call) -> State | list[State]:
    """Channels in axis 1 never meet, and instance norm puts the records there; the others do, while training."""
    x = call["input"]
    state = call.state(x)
    rest = [call.state(t) for t in call.tensors if t is not x]
    bad = worst([state, *rest])
    if bad is not None:
        return bad
    if not isinstance(state, Rows) or state.axis is None:
        return state
    is_training = (
        bool(call["training"]) if "training" in call.arguments else call.name != "_native_batch_norm_no_training"
    )
    if state.axis == 1:
        own = replace(state, axis=0)
        of_each = [s for s in rest if isinstance(s, Rows)]
        if any(s != own for s in of_each):
            return call.unknown()
        return [state, *(own for _ in call.results[1:])]
    if any(s != FREE for s in rest):
        return call.unknown()
    return call.mixed() if is_training else [state, *(FREE for _ in call.results[1:])]


def embedding(call: Call) -> State:
    if call.state(call["weight"]) != FREE:
        bad = worst([call.state(call["weight"])])
        return bad or call.unknown()
    return call.state(call["indices"])


def bag(call: Call) -> State | list[State]:
    """Bags of equal size, one or more per record."""
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    state = call.state(call["indices"])
    others = [call.state(t) for t in call.tensors if t is not call["indices"]]
    if not isinstance(state, Rows) or any(s != FREE for s in others):
        return FREE if state == FREE and all(s == FREE for s in others) else call.unknown()
    offsets = call["offsets"]
    size = len(call["indices"]) // max(len(offsets), 1)
    is_even = torch.equal(offsets, torch.arange(len(offsets), device=offsets.device) * size)
    if state.axis != 0 or not is_even or len(offsets) * size != len(call["indices"]) or state.inner % max(size, 1):
        return call.unknown()
    return [replace(state, inner=state.inner // size), *(call.unknown() for _ in call.results[1:])]


def loss_by_entry(call: Call) -> State:
    if call["reduction"] != 0:
        return same(pointwise_of_inputs(call), lambda axis: False, call.mixed())
    return pointwise(call)


def pointwise_of_inputs(call: Call) -> State:
    ndim = max((t.ndim for t in call.tensors), default=0)
    return joined(call, [in_axes_of(call, t, ndim) for t in call.tensors])


def class_loss(call: Call) -> State | list[State]:
    """(n, classes, …) and (n, …): losses of classes. The total weight goes beyond a record."""
    x, target = call["self"], call["target"]
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    if call["weight"] is not None and call.state(call["weight"]) != FREE:
        return call.mixed()
    found = joined(call, [same(call.state(t), lambda axis: axis == 0, call.unknown()) for t in (x, target)])
    if call["reduction"] != 0 and isinstance(found, Rows) and found.axis is not None:
        return call.mixed()
    return [found, *(call.mixed() for _ in call.results[1:])]


def class_loss_backward(call: Call) -> State:
    """The total weight counts for means only."""
    x, target = call["self"], call["target"]
    parts = [call["grad_output"], x, target, *([call["total_weight"]] if call["reduction"] == 1 else [])]
    if call["weight"] is not None and call.state(call["weight"]) != FREE:
        return call.mixed()
    return joined(call, [same(call.state(t), lambda axis: axis == 0, call.unknown()) for t in parts])


def along_backward(call: Call) -> State:
    """Gradient and output of something that mixes along one axis."""
    x = call["output"]
    (dim,) = axes(call["dim"], x.ndim)
    return same(pointwise(call), lambda axis: axis != dim, call.mixed())


def gather(call: Call) -> State:
    x = call["self"]
    (dim,) = axes(call["dim"], x.ndim)
    found = joined(call, [call.state(x), call.state(call["index"])])
    return same(found, lambda axis: axis != dim, call.unknown())


def scatter(call: Call) -> State:
    x = call["self"]
    (dim,) = axes(call["dim"], x.ndim)
    found = joined(call, [call.state(t) for t in call.tensors])
    return same(found, lambda axis: axis != dim, call.mixed())


def index_select(call: Call) -> State:
    x, index = call["self"], call["index"]
    (dim,) = axes(call["dim"], x.ndim)
    own, chosen = call.state(x), call.state(index)
    bad = worst([own, chosen])
    if bad is not None:
        return bad
    if chosen == FREE:
        return same(own, lambda axis: axis != dim or _in_order(index, x.shape[dim]), call.unknown())
    if own != FREE or not isinstance(chosen, Rows):
        return call.unknown()
    return replace(chosen, axis=None if chosen.axis is None else dim)


def index_copy(call: Call) -> State:
    """Writes slices over others: what meets is not added up, but records may stand in another order."""
    found = index_add(call)
    return call.unknown() if isinstance(found, Mixed) and found.cause is call.cause else found


def index_add(call: Call) -> State:
    """Adds slices to others: records that share one are added up."""
    x = call["self"]
    (dim,) = axes(call["dim"], x.ndim)
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    if call.state(call["index"]) != FREE:
        return call.mixed()
    found = joined(call, [call.state(t) for t in call.tensors if t is not call["index"]])
    return same(found, lambda axis: axis != dim, call.mixed())


def _in_order(index: Tensor, size: int) -> bool:
    return index.ndim == 1 and len(index) == size and torch.equal(index, torch.arange(size, device=index.device))


def index(call: Call) -> State:
    """x[…] with tensors: a table looked up by records, or x[arange(n), …], or features picked the same for all."""
    x, indices = call["self"], call["indices"]
    own, chosen = call.state(x), [call.state(i) for i in indices if i is not None]
    bad = worst([own, *chosen])
    if bad is not None:
        return bad
    places = [k for k, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        if all(s == FREE for s in chosen) and len(given) == 1:
            axis = own.axis if isinstance(own, Rows) else None
            touched = range(places[0], places[0] + given[0].ndim)
            if own == FREE or axis is None or axis < places[0]:
                return own
            return call.unknown() if axis in touched else replace(own, axis=axis - given[0].ndim + 1)
        return call.unknown()
    ndim = max(i.ndim for i in given)
    adjacent = places == list(range(places[0], places[0] + len(places)))
    start = places[0] if adjacent else 0
    looked_up = joined(
        call,
        [replace(s, axis=s.axis + ndim - i.ndim) if isinstance(s, Rows) and s.axis is not None else s
         for s, i in zip(chosen, given, strict=True)],
    )  # fmt: skip
    if isinstance(looked_up, Rows) and looked_up.axis is not None:
        looked_up = replace(looked_up, axis=looked_up.axis + start)
    if isinstance(looked_up, Mixed | Unknown):
        return looked_up
    if own == FREE:
        return looked_up
    assert isinstance(own, Rows)
    if own.axis is None:
        return joined(call, [own, looked_up])
    if own.axis not in places:
        before = sum(p < own.axis for p in places)
        moved = replace(own, axis=own.axis - before + (ndim if (not adjacent or places[0] < own.axis) else 0))
        return joined(call, [moved, looked_up])
    which = given[places.index(own.axis)]
    flat = which.reshape(which.shape[0], -1) if which.ndim else which
    shape = torch.broadcast_shapes(*(i.shape for i in given))  # type: ignore[no-untyped-call]
    is_own = (
        call.state(which) == FREE
        and own.inner == 1
        and which.ndim == ndim
        and shape[0] == x.shape[own.axis]
        and len(flat) == x.shape[own.axis]
        and bool((flat == torch.arange(len(flat), device=flat.device)[:, None]).all())
    )
    if not is_own:
        return call.unknown()
    return joined(call, [replace(own, axis=start), looked_up])


def index_put(call: Call) -> State:
    states = [call.state(t) for t in call.tensors]
    bad = worst(states)
    if bad is not None:
        return bad
    return FREE if all(s == FREE for s in states) else call.unknown()


def cat(call: Call) -> State:
    parts = [t for t in call["tensors"] if t.ndim != 1 or len(t)]
    (dim,) = axes(call["dim"] or 0, call.results[0].ndim)
    states = [call.state(t) for t in parts]
    bad = worst(states)
    if bad is not None:
        return bad
    if all(s == FREE for s in states):
        return FREE
    if all(not isinstance(s, Rows) or s.axis not in (dim, None) for s in states):
        found = joined(call, states)
        return call.unknown() if isinstance(found, Mixed) else found  # parts of different records never meet
    return _side_by_side(call, states, [t.shape[dim] for t in parts], dim)


def stack(call: Call) -> State:
    parts = call["tensors"]
    (dim,) = axes(call["dim"] or 0, call.results[0].ndim)
    states = [call.state(t) for t in parts]
    bad = worst(states)
    if bad is not None:
        return bad
    if all(isinstance(s, Rows) and s.axis is None for s in states):
        return _side_by_side(call, states, [1] * len(parts), dim)
    found = joined(call, states)
    if isinstance(found, Rows) and found.axis is not None:
        return replace(found, axis=found.axis + (found.axis >= dim))
    return call.unknown() if isinstance(found, Mixed) else found  # parts of different records never meet


def _side_by_side(call: Call, states: Sequence[State], sizes: Sequence[int], dim: int) -> State:
    """Parts laid one after the other along the records' axis."""
    if not all(isinstance(s, Rows) and s.axis in (dim, None) for s in states):
        return call.unknown()
    rows = [s for s in states if isinstance(s, Rows)]
    if all(r == rows[0] for r in rows):
        return rows[0]  # all of them, once more; or one record alone
    inner = [size // r.count for size, r in zip(sizes, rows, strict=True)]
    follow = all(b.first == a.first + a.count for a, b in itertools.pairwise(rows))
    if not follow or len(set(inner)) > 1 or any(s % r.count for s, r in zip(sizes, rows, strict=True)):
        return call.unknown()
    return Rows(dim, inner[0], rows[0].first, sum(r.count for r in rows))


def repeat(call: Call) -> State:
    x = call["self"]
    state = call.state(x)
    if isinstance(state, Rows) and state.axis is not None:
        return replace(state, axis=state.axis + len(call["repeats"]) - x.ndim)
    return state


def attention(call: Call) -> State | list[State]:
    """Query, key, value (batch, heads, time, features): batch and heads never meet."""
    query = call["query"]
    parts = [query, call["key"], call["value"]]
    mask = next((call[name] for name in ("attn_mask", "attn_bias") if isinstance(call[name], Tensor)), None)
    states = [call.state(t) for t in parts]
    if mask is not None:
        states.append(in_axes_of(call, mask, query.ndim))
    found = same(joined(call, states), lambda axis: axis < query.ndim - 2, call.mixed())
    return [found, *(call.unknown() for _ in call.results[1:])]


def recurrent(call: Call) -> State | list[State]:
    """One layer of an LSTM over (time, batch, features), or a step of it."""
    bad = worst([call.state(t) for t in call.tensors])
    if bad is not None:
        return bad
    if call.name.startswith("_thnn"):
        return joined(call, [call.state(t) for t in call.tensors])
    state = call.state(call["input"])
    if not isinstance(state, Rows):
        return call.unknown() if any(call.state(t) != FREE for t in call.tensors) else FREE
    if call["batch_sizes"] is not None and len(call["batch_sizes"]):
        return call.unknown()
    if state.axis is None:
        return joined(call, [call.state(t) for t in call.tensors])
    if state.axis != 1:
        return call.mixed()
    hidden = [replace(state, axis=max(r.ndim - 2, 0)) for r in call.results[1:3]]
    return [state, *hidden, *(call.unknown() for _ in call.results[3:])]


def pairs(call: Call) -> State:
    """Distances of all rows of one to all rows of the other."""
    a, b = call.tensors[:2]
    left, right = call.state(a), call.state(b)
    bad = worst([left, right])
    if bad is not None:
        return bad
    if left == FREE:
        return same(right, lambda axis: axis < b.ndim - 2, call.mixed())
    if right == FREE:
        return same(left, lambda axis: axis < a.ndim - 1, call.mixed())
    return same(joined(call, [left, right]), lambda axis: axis < a.ndim - 2, call.mixed())


def trilinear(call: Call) -> State:
    """As nn.Bilinear uses it: (rows, n), (out, n, m), (rows, m) -> (rows, out)."""
    parts = [call[f"i{k}"] for k in (1, 2, 3)]
    expands = [tuple(call[f"expand{k}"]) for k in (1, 2, 3)]
    states = [call.state(t) for t in parts]
    bad = worst(states)
    if bad is not None:
        return bad
    if expands != [(1, 3), (0,), (1, 2)] or states[1] != FREE:
        return call.unknown()
    return same(joined(call, [states[0], states[2]]), lambda axis: axis == 0, call.unknown())


def draw_from(call: Call) -> State:
    x = call["self"]
    return same(call.state(x), lambda axis: x.ndim == 2 and axis == 0, call.mixed())


def counted(call: Call) -> State:
    """Counts over everything."""
    states = [call.state(t) for t in call.tensors]
    bad = worst(states)
    if bad is not None:
        return bad
    rows = [s for s in states if isinstance(s, Rows)]
    return FREE if not rows else (call.mixed() if any(r.axis is not None for r in rows) else joined(call, rows))


def not_known(call: Call) -> State:
    """No rule: whatever is free stays free."""
    states = [call.state(t) for t in call.tensors]
    bad = worst(states)
    if bad is not None:
        return bad
    return call.unknown() if any(isinstance(s, Rows) for s in states) else FREE


def _lines(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_lines(
        pointwise,
        """_to_copy prelu _prelu_kernel native_dropout _fused_dropout rrelu_with_noise bernoulli to dropout
        log_sigmoid_forward softplus_backward addcmul addcdiv lerp where masked_fill nan_to_num clamp glu_jvp
        _conj _conj_physical positive real imag polar complex view_as_real
        view_as_complex floor_divide frexp special_erf special_expit fake_quantize_per_tensor_affine""",
    ),
    **_lines(copied, "copy fill"),
    **_lines(
        reduction,
        """sum mean amax amin max min prod any all std var var_mean std_mean norm linalg_vector_norm logsumexp argmax
        argmin nansum median nanmedian mode kthvalue count_nonzero aminmax""",
    ),
    **_lines(
        along,
        """_softmax _log_softmax _safe_softmax cumprod logcumsumexp cummax cummin glu topk flip
        _fft_r2c _fft_c2c _fft_c2r diff""",
    ),
    "roll": rolled,
    **_lines(moving, "sort argsort"),
    "cumsum": running,
    "renorm": slices,
    **_lines(looked_up, "bucketize searchsorted isin"),
    **_lines(
        leading(1),
        """max_pool1d avg_pool1d adaptive_avg_pool1d reflection_pad1d replication_pad1d upsample_nearest1d
        upsample_linear1d""",
    ),
    **_lines(
        leading(2),
        """max_pool2d_with_indices max_pool2d avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d
        mkldnn_max_pool2d fractional_max_pool2d reflection_pad2d replication_pad2d upsample_nearest2d
        upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa tril triu
        linalg_cholesky_ex linalg_inv_ex _linalg_eigh _linalg_svd _linalg_det linalg_qr cholesky
        linalg_matrix_exp""",
    ),
    **_lines(leading(3), "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d replication_pad3d pixel_shuffle"),
    **_lines(leading(3), "pixel_unshuffle channel_shuffle upsample_nearest3d upsample_trilinear3d"),
    "constant_pad_nd": padded,
    **_lines(matrices, "mm addmm mv addmv dot"),
    **_lines(batched_matrices, "bmm baddbmm"),
    **_lines(linear, "linear mkldnn_linear _mkldnn_linear"),
    **_lines(convolution, "convolution _convolution mkldnn_convolution cudnn_convolution convolution_overrideable"),
    "native_group_norm": group_norm,
    **_lines(layer_norm, "native_layer_norm _fused_rms_norm rms_norm"),
    **_lines(
        batch_norm,
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
        _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update""",
    ),
    "embedding": embedding,
    **_lines(bag, "_embedding_bag _embedding_bag_forward_only"),
    **_lines(
        loss_by_entry,
        """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        soft_margin_loss""",
    ),
    **_lines(class_loss, "nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward"),
    **_lines(class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    **_lines(along_backward, "_softmax_backward_data _log_softmax_backward_data"),
    "gather": gather,
    **_lines(scatter, "scatter scatter_add scatter_reduce"),
    "index_select": index_select,
    **_lines(index_add, "index_add index_reduce"),
    **_lines(index_copy, "index_copy index_fill"),
    "index": index,
    **_lines(index_put, "index_put _index_put_impl _unsafe_index_put"),
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    **_lines(
        attention,
        """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable""",
    ),
    **_lines(recurrent, "mkldnn_rnn_layer _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    **_lines(pairs, "_cdist_forward _euclidean_dist"),
    "_trilinear": trilinear,
    "multinomial": draw_from,
    **_lines(counted, "bincount histc"),
    **_lines(
        like,
        "zero normal uniform random exponential geometric cauchy log_normal",
    ),
    **_lines(
        from_nothing,
        """zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full
        new_empty new_empty_strided empty empty_strided zeros ones full arange lift_fresh
        scalar_tensor rand randn randint randperm eye linspace tril_indices triu_indices""",
    ),
}


def result_of(call: Call, is_pointwise: bool) -> list[State]:
    """The state of every result. is_pointwise: what torch itself says of an operator without a rule here."""
    one = _one_record(call)
    if one is not None:
        return [one] * len(call.results)
    rule = RULES.get(call.name) or (pointwise if is_pointwise else not_known)
    try:
        found = rule(call)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, AssertionError):
        found = call.unknown()
    if isinstance(found, list):
        return (found + [call.unknown()] * len(call.results))[: len(call.results)]
    return [found] * len(call.results)


def _one_record(call: Call) -> Rows | None:
    """Whatever an operator does to values of one record alone, its results are that record's."""
    rows = [state for state in call.states.values() if not isinstance(state, Free)]
    is_one = rows and all(isinstance(r, Rows) and r.axis is None and r == rows[0] for r in rows)
    return rows[0] if is_one and RULES.get(call.name) not in (from_nothing, copied) else None  # type: ignore[return-value]
