"""Edits of the library's functions on their syntax trees, made in memory only: `scope: pattern -> replacement`.

scope        parts of a function's dotted name, in order: "Ledger.charge", "Private", "ghost._norms"
pattern      Python: an expression or statements. One capital letter matches anything (the same wherever it occurs),
             … for any arguments, items or statements. It must match once in all functions of the scope. Empty: the
             beginning of the only function there is
replacement  Python; letters and … become what they matched. Statements in place of an expression replace the
             statement that holds the expression

With => in place of ->, every match is replaced. Formatting, file names and, with a wide scope, the names of functions
do not matter. LookupError says which edit fits no longer, and where else its pattern matches.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import epsilons

PACKAGE = Path(epsilons.__file__).parent
EDIT = re.compile(r"\s*(?P<scope>[\w.]+):\s(?P<pattern>.*?)\s*(?P<arrow>->|=>)\s(?P<replacement>.*)", re.DOTALL)
REST = "…"


@dataclass(frozen=True)
class Function:
    """A function or method of the package, as its file has it."""

    module: str
    qualname: str
    node: ast.FunctionDef

    def is_in(self, scope: str) -> bool:
        parts = iter([*self.module.split("."), *self.qualname.split(".")])
        return all(part in parts for part in scope.split("."))


@dataclass(frozen=True)
class Match:
    """Where a pattern matches: items[start:end] of a list of nodes, or a single field (end is None).

    statement  the list of statements that holds the match, and the place in it
    bound      letter or … -> what it matched
    """

    parent: ast.AST
    field: str
    start: int
    end: int | None
    statement: tuple[list[ast.stmt], int]
    bound: dict[str, Any]


@functools.cache
def functions() -> tuple[Function, ...]:
    """All functions and methods of the package; what is nested in one is a part of it."""
    result = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(["epsilons", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        result += [Function(module, name, node) for name, node in _functions_in(ast.parse(path.read_text("utf-8")))]
    return tuple(result)


def _functions_in(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions_in(node, f"{prefix}{node.name}.")


# -- matching -----------------------------------------------------------------------------------------------------


def _is_letter(name: Any) -> bool:
    return isinstance(name, str) and len(name) == 1 and name.isupper()


def _is_rest(node: Any) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return ast.unparse(one) == ast.unparse(other)
    return bool(one == other)


def _matches(pattern: Any, node: Any, bound: dict[str, Any]) -> bool:
    if isinstance(pattern, ast.Name) and _is_letter(pattern.id):
        return isinstance(node, ast.expr) and _same(bound.setdefault(pattern.id, node), node)
    if isinstance(pattern, list):
        return isinstance(node, list) and _lists_match(pattern, node, bound)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    fields = [name for name in pattern._fields if name not in ("ctx", "type_comment")]
    if isinstance(pattern, ast.Attribute) and _is_letter(pattern.attr):
        fields.remove("attr")
        if not _same(bound.setdefault(pattern.attr, node.attr), node.attr):
            return False
    if isinstance(pattern, ast.Call) and any(map(_is_rest, pattern.args)):
        fields.remove("keywords")
        bound[REST + "="] = node.keywords
    return all(_matches(getattr(pattern, name), getattr(node, name), bound) for name in fields)


def _lists_match(pattern: list[Any], nodes: list[Any], bound: dict[str, Any]) -> bool:
    rest = next((i for i, node in enumerate(pattern) if _is_rest(node)), None)
    if rest is not None:
        after = len(pattern) - rest - 1
        if len(nodes) < rest + after:
            return False
        bound[REST] = nodes[rest : len(nodes) - after]
        nodes = nodes[:rest] + nodes[len(nodes) - after :]
        pattern = pattern[:rest] + pattern[rest + 1 :]
    return len(pattern) == len(nodes) and all(map(_matches, pattern, nodes, [bound] * len(nodes)))


def _places(node: ast.AST, statement: Any = None) -> Iterator[tuple[ast.AST, str, int | None, Any]]:
    """(parent, field, index in a list or None, the statement around it) of everything below a node, outermost first."""
    for field, value in ast.iter_fields(node):
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                around = (value, i) if isinstance(child, ast.stmt) else statement
                yield node, field, i if isinstance(value, list) else None, around
                yield from _places(child, around)


def matches(pattern: str, function: ast.FunctionDef) -> list[Match]:
    """Everywhere in the function; of an empty pattern the beginning of its body."""
    wanted = _parsed(pattern)
    if not wanted:
        start = int(ast.get_docstring(function) is not None)
        return [Match(function, "body", start, start, (function.body, start), {})]
    if not _names(pattern) <= _names_in(function):
        return []
    result = []
    for parent, field, i, statement in _places(function):
        bound: dict[str, Any] = {}
        value = getattr(parent, field)
        if isinstance(wanted[0], ast.Expr) and len(wanted) == 1:
            if _matches(wanted[0].value, value if i is None else value[i], bound):
                result.append(Match(parent, field, i or 0, None if i is None else i + 1, statement, bound))
        elif i is not None and _lists_match(list(wanted), value[i : i + len(wanted)], bound):
            result.append(Match(parent, field, i, i + len(wanted), statement, bound))
    return result


@functools.cache
def _names(pattern: str) -> frozenset[str]:
    return frozenset(name for part in _parsed(pattern) for name in _names_in(part) if not _is_letter(name))


def _names_in(node: ast.AST) -> frozenset[str]:
    if not hasattr(node, "names_in"):
        nodes = list(ast.walk(node))
        named = [n.id for n in nodes if isinstance(n, ast.Name)] + [
            n.attr for n in nodes if isinstance(n, ast.Attribute)
        ]
        node.names_in = frozenset(named)  # type: ignore[attr-defined]
    return node.names_in  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _parsed(code: str) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(textwrap.dedent(code).replace(REST, "...")).body)


def _is_expression(code: Sequence[ast.stmt]) -> bool:
    return len(code) == 1 and isinstance(code[0], ast.Expr)


# -- replacing ----------------------------------------------------------------------------------------------------


class _Filled(ast.NodeTransformer):
    """A replacement with what the letters and … matched."""

    def __init__(self, bound: dict[str, Any]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> Any:
        value = copy.deepcopy(self.bound.get(node.id, node))
        if hasattr(value, "ctx"):
            value.ctx = node.ctx
        return value

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        name = self.bound.get(node.attr)
        node.attr = name if isinstance(name, str) else node.attr
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        return copy.deepcopy(self.bound[REST]) if _is_rest(node) and REST in self.bound else node

    def visit_Expr(self, node: ast.Expr) -> Any:
        if _is_rest(node) and REST in self.bound:
            return copy.deepcopy(self.bound[REST])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if any(map(_is_rest, node.args)):
            node.keywords = [*node.keywords, *copy.deepcopy(self.bound.get(REST + "=", []))]
        return self.generic_visit(node)


def _replace(match: Match, pattern: str, replacement: str) -> None:
    code = [_Filled(match.bound).visit(copy.deepcopy(statement)) for statement in _parsed(replacement)]
    code = [node for part in code for node in (part if isinstance(part, list) else [part])]
    if not _is_expression(_parsed(pattern)):
        getattr(match.parent, match.field)[match.start : match.end] = code
    elif not _is_expression(code):
        statements, at = match.statement
        statements[at : at + 1] = code
    elif match.end is None:
        setattr(match.parent, match.field, code[0].value)
    else:
        getattr(match.parent, match.field)[match.start : match.end] = [code[0].value]


def edited(edits: Sequence[str]) -> dict[Function, ast.FunctionDef]:
    """The functions that these edits change, changed. Raises LookupError if an edit does not fit the library."""
    changed: dict[Function, ast.FunctionDef] = {}
    for edit in edits:
        parts = EDIT.fullmatch(edit)
        if parts is None:
            raise LookupError(f"mend the edit {edit!r}: it is not of the form `scope: pattern -> replacement`")
        scope, pattern, arrow, replacement = parts.groups()
        count = {f: len(matches(pattern, changed.get(f, f.node))) for f in functions() if f.is_in(scope)}
        fits = [function for function in count if count[function]]
        if sum(count.values()) != 1 and not (fits and arrow == "=>"):
            everywhere = [f"{f.module}.{f.qualname}" for f in functions() if pattern and matches(pattern, f.node)]
            raise LookupError(
                f"mend the edit {edit!r}: it fits {sum(count.values())} times, in {[f.qualname for f in fits]}; "
                f"the pattern is in {everywhere}"
            )
        for function in fits:
            tree = changed.setdefault(function, copy.deepcopy(function.node))
            for match in reversed(matches(pattern, tree)):
                _replace(match, pattern, replacement)
            vars(tree).pop("names_in", None)
    return changed


# -- in the running library ---------------------------------------------------------------------------------------


def compiled(function: Function, node: ast.FunctionDef) -> types.CodeType:
    """The code of a changed function."""
    node.decorator_list = []
    tree = ast.parse("from __future__ import annotations")
    inner = tree.body
    for name in function.qualname.split(".")[:-1]:
        inner.append(ast.parse(f"class {name}: pass").body[0])
        inner = inner[-1].body  # type: ignore[attr-defined]
    inner.append(node)
    code = compile(ast.fix_missing_locations(tree), f"<mutant of {function.qualname}>", "exec")
    for _ in function.qualname.split("."):
        code = [part for part in code.co_consts if isinstance(part, types.CodeType)][-1]
    return code


def apply(edits: Sequence[str]) -> None:
    """Change the library that this process has loaded, for good. Raises LookupError if an edit does not fit."""
    for function, node in edited(edits).items():
        thing: Any = importlib.import_module(function.module)
        for name in function.qualname.split("."):
            thing = vars(thing)[name]
        _plain(thing).__code__ = compiled(function, node)
    for thing in [v for n, m in sys.modules.items() if n.split(".")[0] == "epsilons" for v in vars(m).values()]:
        if hasattr(thing, "cache_clear") and not isinstance(thing, type):  # what it keeps is from before the change
            thing.cache_clear()


def _plain(thing: Any) -> Any:
    """The plain function inside a property, a class method or a cache."""
    thing = getattr(thing, "fget", None) or getattr(thing, "func", None) or getattr(thing, "__func__", thing)
    return inspect.unwrap(thing)
