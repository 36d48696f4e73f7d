"""Programs: one for each shape of physical batch; what they depend on, and when their sums are compared.

Shorter physical batches are filled up with copies of their first record at clip norm and weight 0. A record that is not
finite would spoil what all share: the program only reports it, and the engine computes such a physical batch. Persons
must have equally many rows: then a program is for this number of rows, and is filled up with whole persons.

Norms bound what is added only if both are computed from the same numbers. A compiler may compute a number twice, and
round it differently. So all that norms and sums read is an output of the program: stored once, and read from there.

The first sum is compared with that of a new engine on the same physical batch, which itself passes the random check.
So is the second, in case data of the first became part of the program, and every 64th. What was recorded must agree
closely; compiled, roughly. A model that cannot be recorded or proved, or a sum that differs, leaves all physical
batches of the run to the engine, and this is logged once.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from ....errors import InputError, ModelError
from ..engine import NonFiniteGradientError
from ..ghost.ghost import AUDIT_EVERY, Ghost
from ..precision import full_precision
from .recording import Refused, attempted, compile_graph, record
from .traceable import equal_sizes

#: (model, batch) -> (batch,) losses
BatchLoss = Callable[[nn.Module, Any], Tensor]

#: What was recorded, run by the engine's operators, may differ by this from the engine, relative to its sum: both round
#: in 32 bits, in the same order but for a few sums. Both weights of an LSTM have one norm from Gram matrices in the
#: engine, and a recording may compute the entries of one: bounds on its norm, and so sums, were seen to differ by 4e-5.
AGREEMENT = 1e-4
#: Compiled, rounding may choose another of nearly equal values as a maximum, and so where a gradient goes. The sum of
#: the CIFAR CNN, which pools, was seen to move by 5e-4.
COMPILED = 0.05
#: A program for each shape of batch takes up to a minute to compile. At this many, a warning is due.
MANY_SHAPES = 4
#: A program depends on modes, hooks and attributes, which may change now and then. If they change more often than this,
#: compiling never ends.
MOST_PROGRAMS = 8

_log = logging.getLogger(__name__)


def check_compiler(device: torch.device) -> None:
    """Raises InputError where nothing can be compiled."""
    if device.type != "cpu":
        raise InputError(f"compile=True works on CPUs so far, got a model on {device}. Leave it out.")
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, RuntimeError) as e:
        raise InputError(
            "compile=True needs a C++ compiler, and none was found. Install g++ or clang++ (or name one in the "
            "environment variable CXX), or leave compile out."
        ) from e


class Compiled:
    """The sums of one run's physical batches by programs, one for each shape of batch.

    model, parameters, loss   what is differentiated; loss: (model, batch) -> (batch,)
    records                   how many rows a program takes, at most
    refused                   why all physical batches are left to the engine; "" while they are not
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], loss: BatchLoss, records: int) -> None:
        self._step, self._parameters, self.records = Step(model, loss), list(parameters), records
        self._programs: dict[Any, _Program] = {}
        self._counts: dict[Any, int] = {}  # how many programs were compiled for each shape of batch
        self.refused = ""

    def takes(self, count: int) -> bool:
        """True for physical batches that programs are for."""
        return 1 < count <= self.records and not self.refused

    def sums(
        self, batch: Any, count: int, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor] | None:
        """As `Engine.clipped_sum` of this batch's losses; None if the physical batch must be left to the engine.

        count: number of rows. Persons with different numbers of rows are left to the engine.

        Raises ModelError for a batch that is not made of tensors with a row per record. Random numbers are drawn as in
        the forward pass; where None is returned, none were.
        """
        leaves, spec = tree.tree_flatten(batch)
        _check_rows(leaves, count)
        size = 1 if sizes is None or len(sizes) == 0 else int(sizes[0])
        persons = self.records // size
        if len(clip_norm) > persons or (sizes is not None and any(own != size for own in sizes)):
            return None
        if count != size * len(clip_norm):
            raise InputError(f"Expected {size * len(clip_norm)} rows for {len(clip_norm)} clip norms, got {count}.")
        generator = torch.get_rng_state()
        filled = [_filled(t, persons * size) for t in leaves]
        bounds = [_filled(t.double(), persons, 0.0) for t in (clip_norm, weight)]
        try:
            with full_precision():
                sums = self._sums(filled, spec, bounds, generator)
        except Refused as reason:
            self.refused = str(reason)
            _log.warning("Physical batches are not compiled, and all are left to the engine: %s.", reason)
            sums = None
        if sums is None:
            torch.set_rng_state(generator)
        return sums

    def _sums(self, filled: list[Tensor], spec: Any, bounds: list[Tensor], generator: Tensor) -> list[Tensor] | None:
        shapes = (spec, len(bounds[0]), tuple((t.shape, t.dtype) for t in filled))
        frozen = self._frozen()
        program = self._programs.get((shapes, frozen))
        if program is not None and program.is_stale:
            program = None
        is_compared = program is None or program.is_due
        theirs = None
        if is_compared:
            theirs = self._by_engine(tree.tree_unflatten(filled, spec), *bounds)
            if self._frozen() != frozen:
                raise Refused("the forward pass changes attributes of the model, which a program would not")
            torch.set_rng_state(generator)
        if program is None:
            program = self._new(shapes, filled, spec, bounds)
            # Recording replaces weights for a while. nn.LSTM notices it in its next forward pass and renews attributes.
            with torch.no_grad():
                self._step(tree.tree_unflatten(filled, spec))
            self._programs[shapes, self._frozen()] = program
            torch.set_rng_state(generator)
        given = [t.detach() for t in held(self._step)] + filled + bounds
        with torch.no_grad(), attempted() if is_compared else nullcontext():
            *ours, is_finite = program.run(given)
            if not bool(is_finite):
                return None
            if is_compared:
                torch.set_rng_state(generator)
                *recorded, _ = program.run(given, is_compiled=False)
        if is_compared and not (theirs and _agree(recorded, theirs, AGREEMENT) and _agree(ours, theirs, COMPILED)):
            raise Refused("the recorded step's sum differs from the engine's")
        program.runs += 1
        return ours

    def _by_engine(self, batch: Any, clip_norm: Tensor, weight: Tensor) -> list[Tensor] | None:
        """A new engine's sum, which passed the random check; None if a record is not finite. Raises Refused."""
        engine = Ghost()
        engine.attach(self._step.model, self._parameters)
        rows = len(tree.tree_leaves(batch)[0])
        engine.begin(rows)
        losses = self._step(batch)
        if not isinstance(losses, Tensor) or losses.shape != (rows,) or not losses.requires_grad:
            raise Refused("the loss is not one number per record that depends on a trained parameter")
        try:
            sizes = equal_sizes(rows, len(clip_norm))
            sums: list[Tensor] | None = engine.clipped_sum(losses, clip_norm, weight, sizes)
        except NonFiniteGradientError:
            sums = None
        engine.detach()
        if not engine.is_proven:
            raise Refused("the model, or a part of it, is not proved on its graph")
        return sums

    def _new(self, shapes: Any, filled: Sequence[Tensor], spec: Any, bounds: Sequence[Tensor]) -> _Program:
        count = self._counts.get(shapes, 0)
        if count >= MOST_PROGRAMS:
            raise Refused("attributes of the model or the loss change again and again, which is compiled each time")
        _log.info("Compiling the step for %d records, once; this may take a minute …", self.records)
        # Clones, so that one tensor in two arguments is not recorded as one.
        example = [t.detach() for t in held(self._step)] + [t.clone() for t in (*filled, *bounds)]
        with attempted():
            graph, asked = record(self._step, self._parameters, example, spec, len(filled[0]))
            constants = asked + [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
            program = _Program(compile_graph(graph, example), graph, len(self._parameters) + 1, constants)
        self._counts[shapes] = count + 1
        if count == 0 and len(self._counts) == MANY_SHAPES:
            _log.warning(
                "Batches have %d shapes, and a program is compiled for each. Pad them to one, or leave out compile.",
                MANY_SHAPES,
            )
        return program

    def _frozen(self) -> tuple[Any, ...]:
        """What a recording depends on, beside shapes: it is valid while this stays the same."""
        values: list[Any] = [
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        ]
        values += [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in held(self._step)]
        given = ("_parameters", "_buffers", "_modules")
        for module in self._step.modules():  # a loss may be one, too
            attributes = {name: value for name, value in vars(module).items() if name not in given}
            values += [_Same(module), _identity(attributes)]
        return tuple(values)


class Step(nn.Module):
    """The loss with its model, as one module, so that torch.func can replace the tensors of both."""

    def __init__(self, model: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class _Program:
    """A compiled step.

    runs       how many of its sums were used
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
        """Whether the next sum is compared: the first, the second (of other data), and every 64th."""
        return self.runs < 2 or self.runs % AUDIT_EVERY == 0

    @property
    def is_stale(self) -> bool:
        """True once a constant was written to."""
        return any(t._version != version for t, version in self._constants)

    def run(self, given: Sequence[Tensor], is_compiled: bool = True) -> list[Tensor]:
        """(sums…, whether they are finite), compiled, or as recorded with the engine's operators."""
        run = self._compiled if is_compiled else self._graph
        return list(run(*given))[: self._outputs]


# -- what a program depends on ------------------------------------------------------------------------------


class _Same:
    """Equal to itself alone. It keeps the object alive, so that no other gets its id."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


_PLAIN = frozenset({bool, int, float, str, type(None)})


def _identity(value: object) -> object:
    """A key that changes with a number, text, tensor, function or object, in lists and mappings, too."""
    kind = type(value)
    if kind is OrderedDict and not value:  # a module without hooks: the usual case, at every physical batch
        return ()
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Mapping):
        return tuple([(key, _identity(v)) for key, v in value.items()])
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # parameters are arguments
        return _Same(value), value._version
    return (kind, value) if isinstance(value, int | float | str) else _Same(value)  # e.g. NumPy's numbers


def held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


# -- batches ------------------------------------------------------------------------------------------------


def _check_rows(leaves: Sequence[Any], count: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != count:
            what = f"one of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ModelError(
                f"Compiled steps need batches of tensors (in tuples, lists or dicts) with the {count} records in the "
                f"first dimension of each, got {what}. Have the data set return tensors, or leave out compile."
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
