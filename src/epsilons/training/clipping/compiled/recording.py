"""Recording: one physical batch's operators as a graph, and the graph as a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

from ..ghost import batch_axis
from ..ghost.batch_axis import UnsupportedOp
from ..products import is_recorded
from ..replaced import called_with
from .traceable import DRAWS, traceable_sums

#: More operators than this would be compiled for many minutes.
MOST_OPERATORS = 20_000
#: Views show values that another operator's output stores.
_VIEWS = {"alias", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view"}
_VIEWS |= {"_unsafe_view", "_reshape_alias"}


class Refused(Exception):
    """The reason why nothing is compiled."""


@contextmanager
def attempted() -> Iterator[None]:
    """Recording, compiling and a first run fail in many ways: each becomes a Refused, and the engine goes on alone."""
    try:
        yield
    except Refused:
        raise
    except UnsupportedOp as e:
        raise Refused(f"{e} is not proved for all physical batches") from e
    except Exception as e:
        first, *_ = str(e).strip().splitlines() or [""]
        raise Refused(f"{type(e).__name__}: {first}") from e


def record(
    step: nn.Module, parameters: Sequence[nn.Parameter], example: Sequence[Tensor], spec: Any, rows: int
) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """(parameters and buffers, batch, clip norms, weights) -> (sums, whether finite, what they were computed from).

    And the tensors that the forward pass read values of. spec: of the batch's structure; rows: of the batch
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names = dict([*step.named_parameters(), *step.named_buffers()])
    place = {id(t): i for i, t in enumerate(names.values())}
    if any(id(p) not in place for p in parameters):
        raise Refused("not all trained parameters are the model's own")
    versions = [t._version for t in example]

    def recorded(*given: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            # Leaves of this recording's graph.
            leaves = [
                t.detach().requires_grad_(original.requires_grad)
                for t, original in zip(given, names.values(), strict=False)
            ]
            batch = tree.tree_unflatten(list(given[len(leaves) : -2]), spec)
            losses = called_with(step, dict(zip(names, leaves, strict=True)), (batch,))
        if losses.shape != (rows,):
            raise Refused("losses are not one number per row")
        with torch.autocast("cpu", enabled=False):
            trained = [leaves[place[id(p)]] for p in parameters]
            sums, is_finite, stored = traceable_sums(losses, trained, *given[-2:])
        return [*sums, is_finite, *stored]

    with _traced(), _Reads() as reads:
        graph = make_fx(recorded, decomposition_table=DRAWS)(*example)
    if versions != [t._version for t in example]:
        raise Refused("the forward pass writes to its input, or to parameters or buffers")
    _check_recording(graph, [*example, *names.values()])
    _store_bases(graph, len(parameters) + 1)
    return graph, reads.asked


class _Reads(TorchFunctionMode):
    """Values that are read out of tensors become constants: one physical batch's would be part of all later ones.

    Torch itself refuses a number or an answer (`float(t)`, `if t:`) that comes from the arguments. For other tensors
    it is valid until they are written to: `asked`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__", "tolist", "item", "data_ptr", "__dlpack__"):
            raise Refused("the forward pass or the loss reads values out of tensors")
        if name in ("__float__", "__int__", "__bool__", "__index__", "__complex__"):
            self.asked.append(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _traced() -> Iterator[None]:
    """Tests of values in the rules of `ghost` hold only where the values come from no argument.

    And products of all records are one operator.
    """
    from torch.fx.experimental import proxy_tensor

    def holds(on: Tensor, test: Callable[[], Tensor]) -> bool:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            return bool(test())
        slot = proxy_tensor.get_proxy_slot(on, mode.tracer, None)
        if slot is not None and _depends_on_arguments(slot.proxy.node):
            return False
        with proxy_tensor.disable_proxy_modes_tracing():
            return bool(test())

    token, other = batch_axis.holds.set(holds), is_recorded.set(True)
    try:
        yield
    finally:
        batch_axis.holds.reset(token)
        is_recorded.reset(other)


def _depends_on_arguments(node: torch.fx.Node) -> bool:
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
    """Refuse arguments that became constants, 16-bit numbers (a compiler may skip their rounding), and huge graphs."""
    if len(graph.graph.nodes) > MOST_OPERATORS:
        raise Refused(f"the step has {len(graph.graph.nodes):,} operators, too many to compile")
    storages = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            if isinstance(constant, Tensor) and constant.untyped_storage().data_ptr() in storages:
                raise Refused("the loss uses parameters or data that do not come from model and batch")
        for value in tree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                raise Refused("a part of the model computes in 16 bits")


def _store_bases(graph: torch.fx.GraphModule, kept: int) -> None:
    """Make outputs of all tensors that norms and sums read (all but the first so many), as they are stored."""
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


def compile_graph(graph: torch.fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
    """The graph as a program, the same in every process."""
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
        if torch.get_num_threads() > 1:  # atomic additions come in any order
            torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            compiled: Callable[..., Any] = inductor.compile(graph, list(example), options=options)
            return compiled
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
