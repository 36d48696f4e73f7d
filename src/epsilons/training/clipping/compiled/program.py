"""Compiled chunks: forward pass, losses, backward pass, norms and weighted sum of a chunk as one program.

The engine `ghost` is recorded once, on a chunk of fixed size, with its proof: the operators recorded are the operators
proved, and they are all that runs on every chunk to come (torch.fx records, TorchInductor compiles). Shorter chunks are
filled up with copies of their first record at clip norm and weight 0. A record that is not finite would spoil what all
share; the program only tells, and such a chunk is left to the engine whole.

Norms bound what is added only if both are taken of the very same numbers, but a compiler computes a number anew where
it is used twice, and not always to the last bit alike. So all that norms and sums read goes out of the program as
well: it is stored once, and read from there.

Before it counts, the first sum is compared with that of a new engine on the same chunk, whose own comparison with
autograd then finds hooks that alter gradients; so is the second, lest the first one's data be part of the program, and
every AUDIT_EVERY-th. What was recorded must agree closely; compiled, in the large. A model that cannot be recorded or
proved, or a sum that differs, leaves all chunks of the run to the engine, and this is logged once.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

from ....errors import InputError, ModelError
from ..engine import NonFiniteGradientError
from ..ghost import batch_axis
from ..ghost.batch_axis import UnsupportedOp
from ..ghost.engine import AUDIT_EVERY, Ghost
from ..precision import full_precision
from .traceable import DRAWS, traceable_sums

#: (model, batch) -> (batch,) losses
BatchLoss = Callable[[nn.Module, Any], Tensor]

#: What was recorded, run by the operators that the engine uses, may differ by this from it, relative to its sum.
AGREEMENT = 1e-5
#: Compiled, rounding decides anew which of nearly equal values is a maximum, and where a gradient goes.
COMPILED = 0.05
#: A program for each shape of batch; at this many a word about it is due.
MANY_SHAPES = 4
#: What a program takes for granted may change from time to time, such as a mode. More often, and compiling never ends.
MOST_PROGRAMS = 8
#: Views: what they show is stored by another.
_VIEWS = {"alias", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view"}
_VIEWS |= {"_unsafe_view", "_reshape_alias"}
#: More operators than this would be compiled for many minutes.
MOST_OPERATORS = 20_000

_log = logging.getLogger(__name__)


def check_compiler(device: torch.device) -> None:
    """Raises InputError where nothing can be compiled."""
    if device.type != "cpu":
        raise InputError(f"compile= works on CPUs so far; the model is on {device}. Leave it out.")
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, RuntimeError) as e:
        raise InputError(
            "compile= needs a C++ compiler, and none was found. Install g++ or clang++ (or name one in the "
            "environment variable CXX), or leave compile= out."
        ) from e


class Compiled:
    """The sums of one run's chunks by programs, one for each shape that chunks have.

    model, parameters, loss   what is differentiated; loss: (model, batch) -> (batch,)
    records                   how many records a program takes
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], loss: BatchLoss, records: int) -> None:
        self._model, self._parameters, self._loss = model, list(parameters), loss
        self.records = records
        self._step = _Step(model, loss)
        self._programs: dict[Any, _Program] = {}
        self._made: dict[Any, int] = {}  # how many programs for each shape of batch
        self.refused = ""  # why all chunks are left to the engine

    def takes(self, count: int) -> bool:
        """True for chunks that programs are for."""
        return 1 < count <= self.records and not self.refused

    def sums(self, batch: Any, count: int, clip_norm: Tensor, weight: Tensor) -> list[Tensor] | None:
        """As `Engine.clipped_sum` of this batch's losses; None if the chunk must be left to the engine.

        Raises ModelError for a batch that is not made of tensors with a row per record. Random numbers are drawn as
        in the forward pass; where None is returned, none were.
        """
        leaves, spec = tree.tree_flatten(batch)
        _check_rows(leaves, count)
        generator = torch.get_rng_state()
        try:
            with full_precision():
                found = self._found(leaves, spec, clip_norm, weight, generator)
        except _Refused as reason:
            self.refused = str(reason)
            _log.warning("Chunks are not compiled, and all are left to the engine: %s.", reason)
            found = None
        if found is None:
            torch.set_rng_state(generator)
        return found

    def _found(
        self, leaves: list[Tensor], spec: Any, clip_norm: Tensor, weight: Tensor, generator: Tensor
    ) -> list[Tensor] | None:
        key = (spec, tuple((t.shape[1:], t.dtype) for t in leaves), self._frozen())
        program, right = self._programs.get(key), None
        if program is not None and program.is_stale:
            program = None
        is_compared = program is None or program.is_due
        whole = [_filled(t, self.records) for t in leaves]
        bounds = [_filled(t.double(), self.records, 0.0) for t in (clip_norm, weight)]
        if is_compared:
            right = self._by_engine(tree.tree_unflatten(whole, spec), *bounds)
            if self._frozen() != key[-1]:
                raise _Refused("the forward pass changes attributes of the model, which a program would not")
            torch.set_rng_state(generator)
        if program is None:
            if self._made.get(key[:2], 0) >= MOST_PROGRAMS:
                raise _Refused(
                    "attributes of the model or the loss change again and again, which is compiled each time"
                )
            program = self._programs[key] = self._new(whole, spec, bounds)
            if key[:2] not in self._made and len(self._made) + 1 == MANY_SHAPES:
                _log.warning(
                    "Batches came in %d shapes, and each is compiled anew. Pad them to one, or leave compile= out.",
                    MANY_SHAPES,
                )
            self._made[key[:2]] = self._made.get(key[:2], 0) + 1
            torch.set_rng_state(generator)
        given = [t.detach() for t in _held(self._step)] + whole + bounds
        with torch.no_grad(), _tried() if is_compared else nullcontext():
            *sums, is_finite = program.run(given)
            if not bool(is_finite):
                return None
            if is_compared:
                torch.set_rng_state(generator)
                *recorded, _ = program.run(given, is_compiled=False)
        if is_compared and not (right and _agree(recorded, right, AGREEMENT) and _agree(sums, right, COMPILED)):
            raise _Refused("the recorded step's sum differs from the engine's")
        program.runs += 1
        return sums

    def _by_engine(self, batch: Any, clip_norm: Tensor, weight: Tensor) -> list[Tensor] | None:
        """A new engine's sum, compared with autograd; None if a record is not finite. Raises _Refused if unproven."""
        engine = _engine(self._model, self._parameters)
        engine.begin(self.records)
        losses = self._loss(self._model, batch)
        if not isinstance(losses, Tensor) or losses.shape != (self.records,) or not losses.requires_grad:
            raise _Refused("the loss is not one number per record that depends on a trained parameter")
        try:
            found: list[Tensor] | None = engine.clipped_sum(losses, clip_norm, weight)
        except NonFiniteGradientError:
            found = None
        engine.detach()
        if not engine.is_proven:
            raise _Refused("the model, or a part of it, is not proved on its graph")
        return found

    def _new(self, whole: Sequence[Tensor], spec: Any, bounds: Sequence[Tensor]) -> _Program:
        _log.info("Compiling the step for chunks of %d records, once; this may take a minute …", self.records)
        # Clones, so that a tensor that stands in two places is not taken for one.
        example = [t.detach() for t in _held(self._step)] + [t.clone() for t in (*whole, *bounds)]
        with _tried():
            graph, asked = self._record(example, spec)
            constants = asked + [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
            return _Program(_compile(graph, example), graph, len(self._parameters) + 1, constants)

    def _record(self, example: Sequence[Tensor], spec: Any) -> tuple[torch.fx.GraphModule, list[Tensor]]:
        """One chunk's operators: (parameters and buffers, batch, clip norms, weights) -> (sums, whether finite, …).

        And tensors whose values were asked for on the way.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        names = dict([*self._step.named_parameters(), *self._step.named_buffers()])
        place = {id(t): i for i, t in enumerate(names.values())}
        if any(id(p) not in place for p in self._parameters):
            raise _Refused("not all trained parameters are the model's own")
        written = [t._version for t in example]

        def chunk(*given: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                # Leaves of this recording's own graph.
                own = [
                    t.detach().requires_grad_(original.requires_grad)
                    for t, original in zip(given, names.values(), strict=False)
                ]
                batch = tree.tree_unflatten(list(given[len(own) : -2]), spec)
                losses = torch.func.functional_call(self._step, dict(zip(names, own, strict=True)), (batch,))
            if losses.shape != (self.records,):
                raise _Refused("losses are not one number per record")
            with torch.autocast("cpu", enabled=False):
                trained = [own[place[id(p)]] for p in self._parameters]
                sums, is_finite, read = traceable_sums(losses, trained, *given[-2:])
            return [*sums, is_finite, *read]

        with _asked_of_the_recording(), _Unread() as unread:
            graph = make_fx(chunk, decomposition_table=DRAWS)(*example)
        if written != [t._version for t in example]:
            raise _Refused("the forward pass writes to its input, or to parameters or buffers")
        _check_recording(graph, [*example, *_held(self._step)])
        _store_bases(graph, len(self._parameters) + 1)
        return graph, unread.asked

    def _frozen(self) -> tuple[Any, ...]:
        """What a recording takes for granted, beside shapes: it holds while this stays the same."""
        found: list[Any] = [
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        ]
        found += [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in _held(self._step)]
        for module in self._step.modules():  # a loss may be one, too
            given = ("_parameters", "_buffers", "_modules")
            own = {name: value for name, value in vars(module).items() if name not in given}
            found += [_Same(module), _taken_for_granted(own)]
        return tuple(found)


class _Refused(Exception):
    """Why nothing is compiled."""


@contextmanager
def _tried() -> Iterator[None]:
    """Recording, compiling and a first run fail in many ways; the engine does without them."""
    try:
        yield
    except _Refused:
        raise
    except UnsupportedOp as e:
        raise _Refused(f"{e} is not proved for every chunk to come") from e
    except Exception as e:
        first, *_ = str(e).strip().splitlines() or [""]
        raise _Refused(f"{type(e).__name__}: {first}") from e


class _Step(nn.Module):
    """The loss as a module of its own, so that torch.func can put other tensors in the model's place."""

    def __init__(self, model: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class _Program:
    """A compiled chunk.

    runs       how many sums of its were used
    constants  tensors that are neither parameters, buffers nor batch
    """

    def __init__(
        self, compiled: Callable[..., Any], graph: torch.fx.GraphModule, outputs: int, constants: Sequence[Any]
    ) -> None:
        self._compiled, self._graph, self._outputs = compiled, graph, outputs
        self._constants = [(t, t._version) for t in constants if isinstance(t, Tensor)]
        self.runs = 0

    @property
    def is_due(self) -> bool:
        """Whether the next sum is to be compared: the first, one of other data, and now and then."""
        return self.runs < 2 or self.runs % AUDIT_EVERY == 0

    @property
    def is_stale(self) -> bool:
        """True once a constant was written to."""
        return any(t._version != version for t, version in self._constants)

    def run(self, given: Sequence[Tensor], is_compiled: bool = True) -> list[Tensor]:
        """(sums…, whether they are finite), compiled, or as recorded by the operators that the engine uses."""
        run = self._compiled if is_compiled else self._graph
        return list(run(*given))[: self._outputs]


class _Same:
    """Equal to itself alone; and it keeps what it stands for, lest another be taken for it later."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


_PLAIN = frozenset({bool, int, float, str, type(None)})


def _taken_for_granted(value: object) -> object:
    """What tells another number, text, tensor, function or object from this one, in lists and mappings, too."""
    kind = type(value)
    if kind is OrderedDict and not value:  # most attributes of a module: no hooks; asked at every chunk
        return ()
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Mapping):
        return tuple([(key, _taken_for_granted(v)) for key, v in value.items()])
    if isinstance(value, list | tuple):
        return tuple(map(_taken_for_granted, value))
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # parameters are given
        return _Same(value), value._version
    return (kind, value) if isinstance(value, int | float | str) else _Same(value)  # NumPy's numbers, for some


def _held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _engine(model: nn.Module, parameters: Sequence[Any]) -> Ghost:
    engine = Ghost()
    engine.attach(model, parameters)
    return engine


def _check_rows(leaves: Sequence[Any], count: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != count:
            what = f"one of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ModelError(
                f"Compiled chunks need batches of tensors (in tuples, lists or dicts) with the {count} records in the "
                f"first dimension of each; {what} arrived. Have the data set give tensors, or leave compile= out."
            )


def _filled(tensor: Tensor, records: int, value: float | None = None) -> Tensor:
    """So many rows: more copies of the first, or a value."""
    missing = records - len(tensor)
    if missing:
        rest = tensor[:1].expand(missing, *tensor.shape[1:])
        tensor = torch.cat([tensor, rest if value is None else torch.full_like(rest, value)])
    return tensor.detach().contiguous()


def _agree(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float) -> bool:
    apart = math.hypot(*(float((a - b).norm()) for a, b in zip(ours, theirs, strict=True)))
    return apart <= tolerance * math.hypot(*(float(b.norm()) for b in theirs)) + torch.finfo(torch.float32).tiny


# -- recording ----------------------------------------------------------------------------------------------


class _Unread(TorchFunctionMode):
    """Values that go out of tensors come back as constants: what one chunk held would be part of all later ones.

    A number or an answer (`float(t)`, `if t:`) is torch's to refuse where it comes from what is given; of other
    tensors it holds for as long as nobody writes to them: `asked`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("numpy", "__array__", "tolist", "item", "data_ptr", "__dlpack__"):
            raise _Refused("the forward pass or the loss reads values out of tensors")
        if getattr(func, "__name__", "") in ("__float__", "__int__", "__bool__", "__index__", "__complex__"):
            self.asked.append(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _asked_of_the_recording() -> Iterator[None]:
    """Tests of values, as rules for lanes ask them, hold only where the values come from nothing that is given."""
    from torch.fx.experimental import proxy_tensor

    def holds(on: Tensor, test: Callable[[], Tensor]) -> bool:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            return bool(test())
        slot = proxy_tensor.get_proxy_slot(on, mode.tracer, None)
        if slot is not None and _comes_from_outside(slot.proxy.node):
            return False
        with proxy_tensor.disable_proxy_modes_tracing():
            return bool(test())

    token = batch_axis.holds.set(holds)
    try:
        yield
    finally:
        batch_axis.holds.reset(token)


def _comes_from_outside(node: torch.fx.Node) -> bool:
    stack, seen = [node], set()
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False


def _check_recording(graph: torch.fx.GraphModule, given: Sequence[Tensor]) -> None:
    """Refuse what would be frozen in, numbers of 16 bits, whose rounding a compiler may leave out, and the endless."""
    if len(graph.graph.nodes) > MOST_OPERATORS:
        raise _Refused(f"the step has {len(graph.graph.nodes):,} operators, too many to compile")
    storages = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            if isinstance(constant, Tensor) and constant.untyped_storage().data_ptr() in storages:
                raise _Refused("the loss reaches parameters or data on another way than through model and batch")
        for value in tree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                raise _Refused("a part of the model computes in 16 bits")


def _store_bases(graph: torch.fx.GraphModule, kept: int) -> None:
    """Make what is read (all outputs but the first so many) outputs as they are stored: whatever views show."""
    (output,) = graph.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    bases: dict[torch.fx.Node, None] = {}
    for node in outputs[kept:]:
        while node.op == "call_function" and getattr(node.target, "overloadpacket", None) is not None:
            if node.target.overloadpacket.__name__ not in _VIEWS:
                break
            node = node.args[0]
        if node.op == "call_function":
            bases[node] = None
    output.args = ([*outputs[:kept], *bases],)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _compile(graph: torch.fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
    import torch._inductor as inductor

    options: dict[str, Any] = {
        "fallback_random": True,  # torch's own random numbers, in its order
        "deterministic": True,
        "max_autotune": False,  # nothing is chosen by timing
        "freezing": False,
        "compile_threads": 1,
        "cpp.dynamic_threads": False,
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
    }
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if torch.get_num_threads() > 1:  # sums by atomic additions come in any order
            torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            compiled: Callable[..., Any] = inductor.compile(graph, list(example), options=options)
            return compiled
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


__all__ = ["BatchLoss", "Compiled", "check_compiler"]
