"""The size of the house, by house.toml: a number that rises is raised there, in its own commit, with the reason."""

from __future__ import annotations

import ast
import io
import json
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import epsilons
from program import python
from test_imports import imported_modules, module_name

SOURCE, ROOT = Path(epsilons.__file__).parent, Path(__file__).parents[1]
LIMITS = tomllib.loads((ROOT / "house.toml").read_text(encoding="utf-8"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.AsyncFor)
#: Their parameters are those of another library's function of the same name.
GIVEN_BY_OTHERS = ("opacus/privacy_engine.py", "huggingface/trainer.py", "sklearn/estimators.py", "cli/")


@cache
def trees(folder: Path) -> dict[str, tuple[str, ast.Module]]:
    """Path below the folder -> code and syntax tree."""
    codes = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    return {path: (code, ast.parse(code)) for path, code in codes.items()}


@cache
def code_lines(code: str, tree: ast.Module) -> int:
    """Lines that hold code: no blank lines, comments and docstrings."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            texts.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(code).readline) if t.type not in silent]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - texts)


def complexity(function: ast.AST) -> int:
    """McCabe's number: 1, and 1 for each branch; functions inside count for themselves."""
    total, rest = 1, list(ast.iter_child_nodes(function))
    while rest:
        node = rest.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        total += isinstance(node, BRANCHES) + (len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0)
        rest += ast.iter_child_nodes(node)
    return total


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def functions() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {
        f"{path}:{node.lineno} {node.name}": node
        for path, (_, tree) in trees(SOURCE).items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    }


def room(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def test_no_room_has_more_lines_of_code():
    found = Counter()
    for path, (code, tree) in trees(SOURCE).items():
        found[room(path)] += code_lines(code, tree)
    limits = LIMITS["lines"]
    assert {name: lines for name, lines in found.items() if lines > limits.get(name, 0)} == {}
    assert sum(found.values()) <= LIMITS["source"]["lines"]
    assert limits.keys() <= found.keys(), "a room is gone: take it out of house.toml"


def test_the_source_has_no_more_files_nor_folders_with_more_and_no_name_twice():
    paths = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    stems = Counter(path.stem for path in paths if path.suffix == ".py" and path.stem != "__init__")
    folders = Counter(str(path.parent.relative_to(SOURCE)) for path in paths)
    assert sum(path.suffix == ".py" for path in paths) <= LIMITS["source"]["files"]
    assert [name for name, count in stems.items() if count > 1] == []
    assert {name: count for name, count in folders.items() if count > 15} == {}
    assert folders["."] <= 7  # six modules, and py.typed


def test_modules_import_no_more_of_one_another():
    modules = {module_name(path) for path in trees(SOURCE)}
    edges, lines, share = 0, 0, 0
    for path, (code, tree) in trees(SOURCE).items():
        own = {
            next((m for m in (name, name.rpartition(".")[0]) if m in modules), "")
            for name in imported_modules(code, path)
        }
        edges += len(own - {"", module_name(path)})
        lines += code_lines(code, tree)
        share += sum(
            (n.end_lineno or 0) - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
        )
    assert 1000 * edges / lines <= LIMITS["source"]["imports_per_1000_lines"]
    assert 100 * share / lines <= LIMITS["source"]["import_lines_percent"]


def test_functions_are_no_more_complex_and_take_no_more_parameters():
    complex_ones = {name: complexity(node) for name, node in functions().items() if complexity(node) > 15}
    assert max(complex_ones.values(), default=0) <= LIMITS["functions"]["complexity"], complex_ones
    assert len(complex_ones) <= LIMITS["functions"]["complex"], complex_ones
    public = {name: parameters(node) for name, node in functions().items() if not node.name.startswith("_")}
    ours = {name: count for name, count in public.items() if not name.startswith(GIVEN_BY_OTHERS)}
    assert {name: count for name, count in ours.items() if count > 10} == {}
    many = {name: count for name, count in public.items() if count > 8}
    assert len(many) <= LIMITS["functions"]["with_many_parameters"], many


def test_the_tests_and_pages_have_no_more_files_lines_and_words():
    tests = trees(ROOT / "tests")
    assert len(tests) <= LIMITS["tests"]["files"]
    assert sum(code_lines(code, tree) for code, tree in tests.values()) <= LIMITS["tests"]["lines"]
    pages = [path for path in (ROOT / "docs").rglob("*.md") if not path.name.startswith("results")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= LIMITS["pages"]["words"]
    for name in ("README.md", "CHANGELOG.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").split()) <= LIMITS["pages"][name], name


# -- at run time -----------------------------------------------------------------------------------------------------

UPDATE = """
import json, os, sys
import torch
torch.set_num_threads(1)
import epsilons
from torch.nn import functional as F
torch.manual_seed(0)
data = torch.randn(400, 8), torch.arange(400) % 3
levels = [2.0 if i % 3 else 0.5 for i in range(400)]
model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
OWN = """
budgets = epsilons.Budgets(levels, delta=1e-5)
plan = epsilons.plan(budgets, epsilons.Recipe(steps=60, batch_size=50, clip_norm=1.0), accountant="rdp")
private = epsilons.make_private(model, optimizer, data, plan, budgets=budgets, run_dir="run", seed=1)
batches = iter(private.batches)
loaded = [m for m in sys.modules if m.split(".")[0] == "epsilons"]
others = sorted({"pydantic", "rich", "pyarrow", "sklearn", "joblib", "matplotlib"} & sys.modules.keys())

def update():
    before = private.updates
    while private.updates == before:
        x, y = next(batches)
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        private.step()
"""
OPACUS = """
from epsilons.opacus import PrivacyEngine
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=50)
levels = [2.0 if (i // 3) % 3 else 0.5 for i in range(400)]
made = PrivacyEngine().make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, epochs=6, target_epsilon=levels, target_delta=1e-5,
    max_grad_norm=1.0, seed=1,
)
model, optimizer, loader = made
batches = (batch for _ in range(6) for batch in loader)
loaded, others = [], []

def update():
    x, y = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
COUNTED = """
for _ in range(30):
    update()
seen, source = set(), os.path.dirname(epsilons.__file__) + "/"

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(source) and code.co_flags & 2:
        seen.add((code.co_filename, code.co_qualname))

sys.setprofile(note)
update()
sys.setprofile(None)
print(json.dumps({"files": len({f for f, _ in seen}), "functions": len(seen), "loaded": len(loaded), "others": others}))
"""


HELP = """
import os, sys
sys.argv = ["epsilons", "--help"]
from epsilons.cli import main
try:
    main()
except SystemExit:
    print(sum(os.times()[:2]))
"""


@pytest.mark.parametrize("door", ["own", "opacus"])
def test_an_update_crosses_no_more_files_and_functions(door, tmp_path):
    found = json.loads(python(UPDATE + (OWN if door == "own" else OPACUS) + COUNTED, tmp_path).splitlines()[-1])
    limits = LIMITS["update"][door]
    assert found["files"] <= limits["files"], found
    assert found["functions"] <= limits["functions"], found
    if door == "own":
        assert found["loaded"] <= LIMITS["source"]["loaded_by_make_private"]
        assert found["others"] == [], "make_private loads what only reports, tables and commands need"


def test_help_takes_little_time(tmp_path):
    """In seconds of processor time; the limit has room for slow machines."""
    assert float(python(HELP, tmp_path).splitlines()[-1]) <= LIMITS["source"]["seconds_of_help"]
