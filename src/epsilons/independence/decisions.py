"""Decisions in Python: does code that read a value out of a tensor continue differently for another value?

No operator shows what Python does with a number. So the source is followed from the place where the value was read:
through arithmetic, names, attributes, comprehensions and returns, up to a test of it (`if`, a comparison, `max`, …).
A value that only becomes a factor or a size decides nothing: other checks see its effect on the losses.

Not followed: a number that is handed to a function of another file, or goes back into a tensor.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import CodeType, FrameType

#: Functions and methods that make one value of many.
_REDUCTIONS = {"max", "min", "sum", "any", "all", "sorted", "mean", "median", "std", "var", "argmax", "argmin", "amax"}
_REDUCTIONS |= {"amin", "prod", "percentile", "quantile"}
#: Those that act on one side of a bound only, like a comparison.
_BOUNDS = {"max", "min", "round", "floor", "ceil", "clip", "maximum", "minimum", "where", "sign", "trunc", "int"}
#: Those that pass a value on.
_PASSING = {"float", "abs", "list", "tuple", "set", "bool", "str", "repr", "array", "asarray", "sqrt", "exp", "log"}
_PASSING |= {"log2", "log10", "pow", "fabs"}
#: What may follow an `if` without a decision: only people see it.
_LOGGING = {"print", "warn", "warning", "info", "debug", "error", "exception", "critical", "log", "write", "add_scalar"}


_Parents = dict[ast.AST, ast.AST]  # the node that each node is in


@dataclass(frozen=True)
class Place:
    """An expression that is being evaluated in a function: (first line, last line, first column, last column)."""

    file: str
    span: tuple[int | None, int | None, int | None, int | None]
    function: str

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        return cls(frame.f_code.co_filename, _span(frame.f_code, frame.f_lasti), frame.f_code.co_name)


def decides(
    places: Sequence[Place],
    is_each: bool,
    is_exact: bool,
    is_truth: bool,
    is_late: bool = False,
    axis: int | None = None,
    is_size: bool = False,
) -> bool:
    """Whether a value of several records that was read here decides what comes next.

    places    where it was read, and the calls that led there, innermost first
    is_each   whether it holds one value per record, and no value of several
    is_exact  whether it is an integer or a truth value: a bound on one is nearly always about lengths
    is_truth  whether it is one truth value: without readable source, it counts as a decision
    is_late   whether the loss was complete: only an `if` that chooses what backward is called for, or leaves the loop,
              decides then, there or by what a function returns
    axis      of all sizes of a tensor: the one that is the number of records
    is_size   whether it is the number of records, of which there is one at least: whether it is 0 decides nothing

    False for an assertion, and for an `if` that only raises or logs.
    """
    read = _expression(places[0]) if places else None
    if read is None:
        return is_truth
    if is_truth and isinstance(read, ast.IfExp):
        read = read.test
    following = _Following(places, is_exact, is_late)
    if axis is not None:
        return _decides_by_shape(read, axis, following)
    return following.decides_by_number(read) if is_size else following.decides(read, 0, is_each)


def _decides_by_shape(read: ast.AST, axis: int, following: _Following) -> bool:
    """The same for all sizes of a tensor, of which most do not depend on the number of records."""
    match following.parents.get(read):
        case ast.Subscript(slice=ast.Constant(value=int(place))) as part:
            return place == axis and following.decides_by_number(part)
        case ast.Subscript(slice=ast.Slice(lower=ast.Constant(value=int(place)))) if place > axis:
            return False
        case ast.Assign(targets=[ast.Tuple(elts=names)]) as node if axis < len(names):
            return following.uses(node, _targets(names[axis]))
        case ast.Compare(left=ast.Attribute() | ast.Call(), comparators=[ast.Attribute() | ast.Call()]):
            return False  # two shapes
    return following.decides(read, 0, False)


#: True or False: the value decides, or does not. Else the expression that it is in now, and whether that holds one
#: value for each record.
_Step = bool | tuple[ast.AST, bool]


class _Following:
    """
    is_chosen   what is followed was chosen by a value, once the loss was complete
    """

    def __init__(self, places: Sequence[Place], is_exact: bool, is_late: bool, is_chosen: bool = False) -> None:
        # No bound on a value decides anything by itself once the loss is complete, as of a value that is exact.
        self._places, self._is_exact, self._is_late = places, is_exact or is_late, is_late
        self._is_chosen = is_chosen
        self._seen: set[tuple[ast.AST, bool]] = set()

    @property
    def parents(self) -> _Parents:
        return _source(self._places[0].file)[1]

    def uses(self, node: ast.AST, names: frozenset[str]) -> bool:
        """Whether a use of these names, which are assigned here, decides."""
        parents = self.parents
        return self._uses(_scope(node, parents), names, 0, False, _loop_of_batches(node, parents))

    def decides_by_number(self, read: ast.AST) -> bool:
        """Whether this number of records, of which there is one at least, decides more than whether it is 0."""
        parents, uses = self.parents, [read]
        match parents.get(read):
            case ast.Assign(targets=[ast.Name(id=name)]) as node:
                inner = list(ast.walk(_scope(node, parents)))
                if sum(name in _targets(other) for other in inner if isinstance(other, ast.Name)) == 1:
                    uses = [other for other in inner if _named(other, ast.Load) == name]
        return any(not _is_emptiness(use, parents) and self.decides(use, 0, False) for use in uses)

    def decides(self, node: ast.AST, at: int, is_each: bool) -> bool:
        """Whether this expression's value decides anything, in the code of the call at this depth."""
        parents = _source(self._places[at].file)[1]
        while (node, is_each) not in self._seen:
            self._seen.add((node, is_each))
            step = self._step(node, parents, at, is_each)
            if isinstance(step, bool):
                return step
            node, is_each = step
        return False

    def _step(self, node: ast.AST, parents: _Parents, at: int, is_each: bool) -> _Step:
        match parents.get(node):
            case (ast.If() | ast.While() | ast.IfExp()) as parent if node is parent.test:
                is_free = is_each or _is_harmless(parent)
                return not is_free and (not self._is_late or self._chooses(parent, parents, at))
            case ast.Compare() as parent if self._is_late:
                return parent, False
            case ast.Compare() as parent if not is_each or any(isinstance(op, ast.In | ast.NotIn) for op in parent.ops):
                return not _is_for_harmless(parent, parents)
            case ast.BinOp(op=ast.FloorDiv() | ast.Mod()) if not is_each and not self._is_exact:
                return True
            case ast.Attribute() as parent:
                return self._of_method(parent, parents.get(parent), is_each)
            case ast.Call(func=called) as parent if called is node:
                return parent, is_each
            case (ast.Call() | ast.keyword()) as parent:
                call = parent if isinstance(parent, ast.Call) else parents[parent]
                assert isinstance(call, ast.Call)
                return self._of_call(call, node, at, is_each)
            case ast.Subscript() as parent:  # as an index, the value is a size or a place
                is_one = isinstance(parent.slice, ast.Constant | ast.UnaryOp)
                return (node is parent.value or self._is_chosen) and (parent, is_each and not is_one)
            case ast.comprehension() as parent if node is parent.iter:
                decided = not is_each and self._uses(parents[parent], _targets(parent.target), at, False)
                return decided or (parents[parent], is_each)
            case ast.comprehension():
                return not is_each
            case ast.For() as parent:
                return not is_each and self._uses(parent, _targets(parent.target), at, False)
            case (ast.Return() | ast.Lambda()) as parent:
                return self._returned(parent, parents, at, is_each)
            case (ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr()) as parent:
                return self._of_assignment(parent, parents, at, is_each)
            case ast.expr() as parent if not isinstance(parent, ast.FormattedValue):
                return parent, is_each
        return False

    def _returned(self, node: ast.AST, parents: _Parents, at: int, is_each: bool) -> bool:
        """Whether the result of the function that this is in decides where it is called."""
        function = "<lambda>" if isinstance(node, ast.Lambda) else getattr(_scope(node, parents), "name", "")
        if (
            self._is_late and function != self._places[at].function
        ):  # it is not running: the value got into it by an attribute
            named = (n for n in parents if _named(n, ast.Load) in (function, f".{function}"))
            return any(self.decides(node, at, is_each) for node in named)
        caller = _expression(self._places[at + 1]) if at + 1 < len(self._places) else None
        if self._is_chosen and not (caller and _name(caller) == function):
            return True  # code in between, which is not followed, may call backward for it
        return caller is not None and self.decides(caller, at + 1, is_each)

    def _chooses(self, node: ast.If | ast.While | ast.IfExp, parents: _Parents, at: int) -> bool:
        """Once the loss is complete: whether this leaves the loop, or chooses what backward is called for."""
        chosen = self if self._is_chosen else _Following(self._places, self._is_exact, self._is_late, is_chosen=True)
        scope = _scope(node, parents)
        inside = set(ast.walk(node)) - set(ast.walk(node.test))
        leaves = any(isinstance(inner, ast.Break | ast.Continue | ast.Return | ast.Yield) for inner in inside)
        calls = list(filter(_is_backward, ast.walk(scope)))
        of_loss = {inner.id for call in calls for inner in ast.walk(call) if isinstance(inner, ast.Name)}
        if calls and (leaves or not of_loss.isdisjoint(i.id for i in inside if isinstance(i, ast.Name))):
            return True
        if leaves:
            return chosen._returned(node, parents, at, False)
        if isinstance(node, ast.IfExp):
            return chosen.decides(node, at, False)
        names = frozenset().union(*map(_targets, inside))
        return chosen._uses(scope, names, at, False, _loop_of_batches(node, parents))

    def _of_method(self, attribute: ast.Attribute, call: ast.AST | None, is_each: bool) -> _Step:
        if not (isinstance(call, ast.Call) and call.func is attribute):
            return False  # such as .shape
        if self._is_chosen and _is_backward(call):
            return True
        is_each = is_each and attribute.attr not in _REDUCTIONS
        is_bound = not is_each and not self._is_exact and attribute.attr in _BOUNDS - _REDUCTIONS
        return is_bound or (call, is_each)

    def _of_call(self, call: ast.Call, node: ast.AST, at: int, is_each: bool) -> _Step:
        name = _name(call)
        if self._is_chosen and _is_backward(call):
            return True
        if name in _REDUCTIONS and is_each and len(call.args) == 1:
            return call, False
        if name in _BOUNDS and not is_each and not self._is_exact:
            return True
        if name not in _REDUCTIONS | _BOUNDS | _PASSING:
            return any(self._uses(*use, at, is_each) for use in self._handed(call, node, at))
        return call, is_each

    def _of_assignment(
        self,
        node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr,
        parents: _Parents,
        at: int,
        is_each: bool,
    ) -> _Step:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = frozenset(name for target in targets for name in _targets(target))
        if self._uses(_scope(node, parents), names, at, is_each, _loop_of_batches(node, parents)):
            return True
        return isinstance(node, ast.NamedExpr) and (node, is_each)

    def _handed(self, call: ast.Call, node: ast.AST, at: int) -> list[tuple[ast.AST, frozenset[str]]]:
        """The functions of this file that are handed the value, each with its parameter's name."""
        handed: list[tuple[ast.AST, frozenset[str]]] = []
        for function in ast.walk(_source(self._places[at].file)[0]):
            if isinstance(function, ast.FunctionDef) and function.name == _name(call):
                parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
                parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
                given = dict(zip(parameters, call.args, strict=False)) | {
                    k.arg: k.value for k in call.keywords if k.arg
                }
                handed += [(function, frozenset({name})) for name, value in given.items() if value is node]
        return handed

    def _uses(self, scope: ast.AST, names: frozenset[str], at: int, is_each: bool, loop: ast.AST | None = None) -> bool:
        """Whether a use of these names decides: in their function; of attributes (".name"), in the whole file.

        loop   outside of it, no use decides: the batch at hand is done
        """
        if any(name.startswith(".") for name in names):
            scope = _source(self._places[at].file)[0]
        elif loop is not None:
            scope = loop
        parents = _source(self._places[at].file)[1]
        uses = [node for node in ast.walk(scope) if _named(node, ast.Load) in names and not _is_method(node, parents)]
        return any(self.decides(node, at, is_each) for node in uses)


def _named(node: ast.AST, context: type[ast.expr_context]) -> str:
    """The name that is read or written here, ".name" for an attribute; "" for anything else."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, context):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) else ""


def _is_method(node: ast.AST, parents: _Parents) -> bool:
    """Whether this is an attribute that is called: no value that was assigned, but a method of the same name."""
    parent = parents.get(node)
    return isinstance(node, ast.Attribute) and isinstance(parent, ast.Call) and parent.func is node


def _targets(target: ast.AST) -> frozenset[str]:
    return frozenset(_named(node, ast.Store) for node in ast.walk(target)) - {""}


def _name(function: ast.AST) -> str:
    """Of a function, or of that which is called."""
    function = function.func if isinstance(function, ast.Call) else function
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _scope(node: ast.AST, parents: _Parents) -> ast.AST:
    while node in parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = parents[node]
    return node


def _loop_of_batches(node: ast.AST, parents: _Parents) -> ast.AST | None:
    """The innermost loop around it in which `step` of some object is called: each of its turns ends a batch."""
    while node in parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = parents[node]
        if isinstance(node, ast.For | ast.While) and any(map(_is_step, ast.walk(node))):
            return node
    return None


def _is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"


def _is_for_harmless(node: ast.AST, parents: _Parents) -> bool:
    """Whether a comparison is in an assertion, or in the test of an `if` that only raises or logs."""
    while isinstance(node, ast.expr) and node in parents:
        node = parents[node]
    return isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _is_harmless(node))


def _is_emptiness(node: ast.AST, parents: _Parents) -> bool:
    """Whether a number of at least 1 is in a test of `not n`, `n`, `n == 0`, `n != 0`, `n > 0`, `n < 1` or `n >= 1`."""
    match parents.get(node):
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp() as parent:
            return _is_emptiness(parent, parents)
        case (ast.If() | ast.While() | ast.IfExp()) as parent:
            return node is parent.test
        case ast.Compare(ops=[op], comparators=[ast.Constant(value=int(bound))]) as parent if node is parent.left:
            kinds = (ast.Eq, ast.NotEq, ast.Gt, ast.LtE) if bound == 0 else (ast.Lt, ast.GtE)
            return bound in (0, 1) and isinstance(op, kinds)
    return False


def _is_harmless(node: ast.AST) -> bool:
    def is_logging(inner: ast.stmt) -> bool:
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            return _name(inner.value) in _LOGGING
        return isinstance(inner, ast.Raise | ast.Pass)

    return isinstance(node, ast.If) and not node.orelse and all(map(is_logging, node.body))


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node) in ("backward", "manual_backward")


# -- source -----------------------------------------------------------------------------------------------------


@cache
def _span(code: CodeType, instruction: int) -> tuple[int | None, int | None, int | None, int | None]:
    return next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))


def _expression(place: Place) -> ast.AST | None:
    """The expression there; None where the source cannot be read."""
    return _by_span(place.file).get(place.span)


@cache
def _by_span(file: str) -> dict[tuple[int | None, ...], ast.AST]:
    by_span: dict[tuple[int | None, ...], ast.AST] = {}
    for node in ast.walk(_source(file)[0]):
        if isinstance(node, ast.expr | ast.stmt):
            span = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            if isinstance(node, ast.If | ast.While | ast.Assert):
                by_span.setdefault(span, node.test)  # the jump of a statement is by its test
            elif isinstance(node, ast.expr):
                by_span.setdefault(span, node)
    return by_span


@cache
def _source(file: str) -> tuple[ast.Module, _Parents]:
    """The parsed file, and every node's parent; empty where the source cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        tree = ast.Module([], [])
    return tree, {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
