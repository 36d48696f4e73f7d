"""Imports point one way (docs/architecture.md), and planning never needs torch."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import epsilons
from program import python

SOURCE = Path(epsilons.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = "epsilons"

#: Floors, from the top down; a unit (a folder, or a file of the package's root) may import from lower floors only.
#: Units of one floor do not know each other.
ROWS = [
    {"cli", "opacus", "huggingface", "lightning", "flower", "nvflare"},
    {"auditing", "configs", "doors", "sklearn"},
    {"training"},
    {"independence", "models"},
    {"draws", "registry", "reporting"},
    {"ledger"},
    {"planning"},
    {"accounting", "budgets", "clipping", "data"},
    {"core", "tabular"},
    {"errors"},
]
ROW = {unit: number for number, row in enumerate(ROWS) for unit in row}
ANYONE = {"_version"}
EXEMPT = {"__init__", "__main__"}  # of the package's root: they open the doors to all of it


def module_name(path: str) -> str:
    """The dotted name of a file inside the package."""
    return ".".join([PACKAGE, *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def imported_modules(code: str, path: str) -> set[str]:
    """Absolute dotted names of all that a file of the package imports, also inside functions and TYPE_CHECKING.

    `from x import y` counts as x.y, because y may be a module; import_module("…") counts, too.
    """
    names: set[str] = set()
    folders = [PACKAGE, *Path(path).parts[:-1]]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folders[: len(folders) - node.level + 1] if node.level else []
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
    return names


def source_files() -> dict[str, str]:
    """Path inside the package -> code."""
    return {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}


def violations(files: dict[str, str]) -> list[str]:
    """What in these files (path inside the package -> code) imports against the direction."""
    wrong = []
    for path, code in files.items():
        unit = Path(path).with_suffix("").parts[0]
        if unit in EXEMPT or unit in ANYONE:
            continue
        if unit not in ROW:
            wrong.append(f"{path}: {unit!r} is in no row; add it to ROWS")
            continue
        for name in sorted(imported_modules(code, path)):
            if name != PACKAGE and not name.startswith(PACKAGE + "."):
                continue
            other = name.split(".")[1] if "." in name else ""
            if other == unit or other in ANYONE:
                continue
            if other not in ROW:
                wrong.append(f"{path} imports {name}: from the package itself, and so from all of it")
            elif ROW[other] <= ROW[unit]:
                wrong.append(f"{path} imports {name}: {unit} is not above {other}")
    return wrong


def test_imports_point_one_way():
    assert {"budgets/budgets.py", "ledger/ledger.py", "ledger/run_folder.py"} <= source_files().keys()
    assert violations(source_files()) == []


def test_the_picture_of_the_architecture_is_drawn_from_the_imports():
    """If it is out of date: python docs/picture.py."""
    picture = runpy.run_path(str(DOCS / "picture.py"))
    assert picture["FILE"].read_text(encoding="utf-8") == picture["svg"]()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("planning/plans.py", "from ..training import fit"),
        ("planning/plans.py", "from .. import ledger"),
        ("planning/plans.py", "def late():\n    from ..ledger.run_folder import RunFolder"),
        ("planning/plans.py", "import epsilons.cli"),
        ("planning/plans.py", "import epsilons"),
        ("planning/plans.py", "from epsilons import Budgets"),
        ("planning/__init__.py", "from ..ledger import Ledger"),
        ("planning/deep/mix.py", "from ...ledger import Ledger"),
        (
            "planning/plans.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ledger.run_folder import Run",
        ),
        ("planning/plans.py", "from importlib import import_module\nimport_module('epsilons.training')"),
        ("reporting/loop.py", "from ..registry import Registry"),
        ("reporting/html.py", "from ..training import fit"),
        ("accounting/pld.py", "from ..data import load"),
        ("data/tables.py", "from ..accounting import ACCOUNTANTS"),
        ("core/mechanism.py", "from ..budgets.budgets import Budgets"),
        ("errors.py", "from . import budgets"),
        ("ledger/run_folder.py", "from ..training import Ledger"),
        ("novelty.py", "x = 1"),
    ],
)
def test_the_check_itself_finds_an_import_against_the_direction(path, code):
    assert len(violations({path: code})) >= 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("cli/plan.py", "from .. import planning\nfrom ..budgets import Budgets\nfrom .show import table"),
        ("training/private.py", "import torch\nfrom ..ledger import Ledger\nfrom .clipping import loop"),
        ("planning/plans.py", "from .._version import __version__\nfrom .. import accounting\nimport epsilonsish"),
        ("planning/__init__.py", "from . import mix\nfrom ..errors import PlanError"),
        ("__init__.py", "from .cli import main"),
    ],
)
def test_the_check_itself_lets_the_right_direction_pass(path, code):
    assert violations({path: code}) == []


# -- no circles ----------------------------------------------------------------------------------------------------


def circles(files: dict[str, str]) -> list[list[str]]:
    """Modules of these files that import one another, at the top, in functions or under TYPE_CHECKING."""
    names = {path: module_name(path) for path in files}
    modules = set(names.values())

    def module_of(name: str) -> str | None:
        """The module that an imported name belongs to: its longest part that is a module."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    graph = {}
    for path, code in files.items():
        imported = imported_modules(code, path)
        graph[names[path]] = {module_of(name) for name in imported} - {None, names[path]}
    seen, found = set(), []

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in seen:
            for other in sorted(graph[module]):
                visit(other, [*trail, module])
            seen.add(module)

    for module in sorted(modules):
        visit(module, [])
    return found


def test_no_modules_import_one_another_in_a_circle():
    # A message names the type of what it is about, under TYPE_CHECKING.
    known = ["epsilons.independence." + name for name in ("check", "messages", "check")]
    assert [circle for circle in circles(source_files()) if circle != known] == []


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from . import b", "b.py": "from .c import x", "c.py": "def late():\n    from .a import y"},
        {"a.py": "import typing\nif typing.TYPE_CHECKING:\n    from .b import x", "b.py": "from .a import y"},
        {"p/__init__.py": "from .q import x", "p/q.py": "from . import y"},
        {"p/__init__.py": "", "p/q.py": "from .r import x", "p/r.py": "from ..p.q import y"},
    ],
)
def test_the_check_itself_finds_a_circle(files):
    assert len(circles(files)) == 1
    assert circles({"p/__init__.py": "from .q import x", "p/q.py": "from . import r", "p/r.py": ""}) == []


def test_whose_code_is_run_is_told_by_the_folder_of_this_package_alone():
    """Checks of decisions skip the library's own code. Code beside it, in site-packages, is the caller's."""
    pytest.importorskip("torch")
    from epsilons.independence import watch

    assert str(SOURCE) + "/" == watch._LIBRARY
    assert not watch._is_internal(str(SOURCE.parent / "others" / "model.py"))
    assert all(Path(path).exists() for path in watch._ON_THE_WAY if path != "<frozen")


# -- planning needs no torch ---------------------------------------------------------------------------------------

PLANNING = """
budgets = epsilons.Budgets.from_shares({1.0: .5, 2.0: .5}, records=1000)
recipe = epsilons.Recipe(steps=20, batch_size=100, clip_norm=1.0)
for strategy in epsilons.planning.STRATEGIES:
    for accountant in ("pld", "rdp"):
        made = epsilons.plan(budgets, recipe, strategy=strategy, accountant=accountant)
        assert (made.epsilon_spent() <= made.epsilons).all()
print(made)
"""


WITHOUT_TORCH = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, Absent())
import epsilons
"""


def test_planning_leaves_torch_unloaded(tmp_path):
    absent = "assert 'torch' not in sys.modules\nassert 'sklearn' not in sys.modules"
    python("import sys, epsilons\n" + PLANNING + absent, tmp_path)


def test_planning_a_run_s_folder_and_a_ledger_work_where_torch_is_not_installed(tmp_path):
    code = (
        WITHOUT_TORCH
        + PLANNING
        + """
from pathlib import Path
from epsilons import Ledger
from epsilons.ledger.ledger import read_charges
from epsilons.ledger.run_folder import RunFolder
folder = RunFolder.create("run", made, {})
assert epsilons.Plan.load(folder.plan) == made
ledger = Ledger(made, folder.ledger)
ledger.charge(0, 0)
ledger.close()
assert read_charges(folder.ledger, made) == (made.phases[0].steps, *[0] * (len(made.phases) - 1))
try:
    epsilons.make_private
except ImportError:
    pass
else:
    raise AssertionError("make_private without torch")
"""
    )
    python(code, tmp_path)


def test_the_package_shows_its_public_names_and_no_others():
    assert dir(epsilons) == sorted(epsilons.__all__)
    for name in epsilons.__all__:
        assert getattr(epsilons, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        epsilons.nothing  # noqa: B018


# -- public and internal -------------------------------------------------------------------------------------------

#: A user may import what these export, and nothing else; docs/api is their reference.
PUBLIC = [
    PACKAGE,
    *(f"{PACKAGE}.{name}" for name in ("accounting", "auditing", "data", "errors", "planning", "training")),
    f"{PACKAGE}.auditing.membership",
    f"{PACKAGE}.flower",
    f"{PACKAGE}.huggingface",
    f"{PACKAGE}.lightning",
    f"{PACKAGE}.opacus",
    f"{PACKAGE}.registry",
    f"{PACKAGE}.sklearn",
    f"{PACKAGE}.training.features",
]


def exports(package: str) -> dict[str, object]:
    return {f"{package}.{name}": resolve_name(f"{package}.{name}") for name in import_module(package).__all__}


def test_the_reference_has_every_public_name_and_no_other():
    """A page may also show the members of an exported module, and the entries of an exported table."""
    pytest.importorskip("torch")
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = {name: resolve_name(name) for name in re.findall(r"(?:^::: |`)(epsilons\.[\w.]+)", pages, flags=re.M)}
    exported = {name: thing for package in PUBLIC for name, thing in exports(package).items()}
    tables = [thing.values() for thing in exported.values() if isinstance(thing, dict)]
    public = {id(thing) for things in (exported.values(), *tables) for thing in things}
    modules = tuple(f"{name}." for name, thing in exported.items() if inspect.ismodule(thing))
    assert [name for name, thing in listed.items() if id(thing) not in public and not name.startswith(modules)] == []

    members = [exports(name).values() for name, thing in listed.items() if inspect.ismodule(thing)]
    shown = {id(thing) for things in (listed.values(), *members) for thing in things}
    shown |= {id(resolve_name(name.rpartition(".")[0])) for name in listed}  # a module of which members are shown
    assert [name for name, thing in exported.items() if id(thing) not in shown] == [f"{PACKAGE}.__version__"]
