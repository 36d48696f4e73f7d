"""Hostile files: seeded mutations of genuine ones, and the rule that each of them must keep.

A reader of a hostile file either works or ends with one line. It runs no code from the file's folder, writes nothing
outside of what it was asked to write, and stays within memory and time.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epsilons.ledger import model_file
from epsilons.ledger.account import line_hash
from epsilons.planning.plan_file import digest_of
from program import Outcome, epsilons

#: What a process may take beyond what it has, and for how long.
MEMORY, SECONDS = 3 * 2**30, 30

#: It writes a file when it is imported, beside itself.
CANARY = "from pathlib import Path\nPath(__file__).with_name('IMPORTED').touch()\ndef go(*a, **k): pass\n"


def nested(depth: int, mapping: bool = False) -> Any:
    """A value that is nested so deep."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if mapping else [value]
    return value


#: In the place of any value. Texts in «» are written into the JSON as they are.
VALUES: list[Any] = [
    None,
    True,
    "",
    "x",
    "evilmod:go",
    "os:getcwd",
    "../../../outside",
    "/etc/passwd",
    "\x1b]8;;evil\x1b\\ \u202e",
    "x" * 100_000,
    -1,
    0,
    1,
    2,
    10**9,
    2**31,
    2**63,
    10**30,
    0.5,
    1e-300,
    1e30,
    1e308,
    "«NaN»",
    "«-Infinity»",
    "«1e999»",
    f"«{'9' * 4000}»",
    f"«{'9' * 5000}»",
    [],
    {},
    [[]],
    [8] * 200_000,
    [1e30] * 3,
    ["x", None, 1],
    {"a": {"b": 1}},
    nested(60),
    nested(90, mapping=True),
    nested(150),
    nested(300, mapping=True),
    nested(450),
    f"«{'[' * 990 + ']' * 990}»",
    f"«{'[' * 100_000 + ']' * 100_000}»",
    "«{" + '"a":{' * 5_000 + "}" * 5_001 + "»",
]


def mutated(values: Any, coins: random.Random) -> Any:
    """The same JSON value with one part replaced, removed or added, anywhere in it."""
    values = copy.deepcopy(values)
    places = list(_places(values))
    if not places or coins.random() < 0.03:
        return copy.deepcopy(coins.choice(VALUES))
    holder, key = coins.choice(places)
    how = coins.random()
    if how < 0.1:
        del holder[key]
    elif how < 0.15 and isinstance(holder, dict):
        holder["never heard of"] = copy.deepcopy(coins.choice(VALUES))
    elif how < 0.2 and isinstance(holder, list):
        holder.append(copy.deepcopy(coins.choice(VALUES)))
    else:
        holder[key] = copy.deepcopy(coins.choice(VALUES))
    return values


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def text_of(values: Any) -> str:
    """JSON of these values, without a limit on their depth."""
    written: list[str] = []
    _write(values, written)
    return "".join(written)


def _write(value: Any, written: list[str]) -> None:
    """With a stack of its own."""
    stack: list[Any] = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, _Raw):
            written.append(one)
        elif isinstance(one, dict):
            parts: list[Any] = [_Raw("{")]
            for number, (key, part) in enumerate(one.items()):
                parts += [_Raw((", " if number else "") + json.dumps(key) + ": "), part]
            stack += [_Raw("}"), *reversed(parts)]
        elif isinstance(one, list):
            parts = [_Raw("[")]
            for number, part in enumerate(one):
                parts += [_Raw(", " if number else ""), part]
            stack += [_Raw("]"), *reversed(parts)]
        elif isinstance(one, str) and one.startswith("«") and one.endswith("»"):
            written.append(one[1:-1])
        else:
            written.append(json.dumps(one))


class _Raw(str):
    """A text that is written as it is."""


# -- kinds of files ----------------------------------------------------------------------------------------------------


def change_json(file: Path, coins: random.Random) -> None:
    """Any JSON file."""
    file.write_text(text_of(mutated(json.loads(file.read_text()), coins)))


def change_plan(file: Path, coins: random.Random) -> None:
    """A plan, half of the time with the digest of its new content."""
    text = text_of(mutated(json.loads(file.read_text()), coins))
    if coins.random() < 0.5:
        try:
            values = json.loads(text)
            text = json.dumps(values | {"digest": digest_of(values)})
        except (ValueError, TypeError, RecursionError, OverflowError, AttributeError):
            pass
    file.write_text(text)


def change_lines(file: Path, coins: random.Random) -> None:
    """A ledger or metrics: one line changed, and all later hashes computed again."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    number = coins.randrange(len(lines))
    lines[number] = mutated(lines[number], coins)
    texts, last = [], None
    for line in lines:
        if isinstance(line, dict) and "hash" in line:
            line = line if last is None else line | {"prev": last}
            try:
                last = line_hash(json.loads(text_of(line)))
                line = line | {"hash": last}
            except (ValueError, TypeError, RecursionError, OverflowError):
                last = None
        texts.append(text_of(line))
    file.write_text("\n".join(texts) + "\n")


def change_bytes(file: Path, coins: random.Random) -> None:
    """Any file: bytes changed, cut off, added, or all of it replaced."""
    content = bytearray(file.read_bytes())
    how = coins.randrange(5)
    if how == 0:
        content = content[: coins.randrange(len(content) + 1)]
    elif how == 1:
        content += coins.randbytes(1000)
    elif how == 2:
        content = bytearray(coins.randbytes(coins.choice([0, 1, 8, 1000])))
    else:
        for _ in range(coins.choice([1, 3, 30])):
            content[coins.randrange(len(content))] = coins.randrange(256)
    file.write_bytes(content)


def change_safetensors(file: Path, coins: random.Random) -> None:
    """The header of a file of tensors: names, types, shapes and places; or its bytes."""
    if coins.random() < 0.2:
        return change_bytes(file, coins)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = text_of(mutated(json.loads(content[8 : 8 + size]), coins)).encode()
    length = coins.choice([len(header)] * 8 + [0, 2**63, 10**9])
    file.write_bytes(length.to_bytes(8, "little") + header + content[8 + size :])
    return None


def change_toml(file: Path, coins: random.Random) -> None:
    """A config: one value replaced, or a line added, cut or doubled."""
    lines = file.read_text().splitlines()
    number = coins.choice([n for n, line in enumerate(lines) if line.strip()])
    name, equals, _ = lines[number].partition(" = ")
    values = [
        *[
            "true",
            '""',
            "-1",
            "0",
            "2.5",
            "1e30",
            "nan",
            "inf",
            "9" * 400,
            "[]",
            "{}",
            '"evilmod:go"',
            '"../../outside"',
        ],
        *[f"[{'8,' * 200_000}]", "[" * 150 + "]" * 150, "[" * 100_000 + "]" * 100_000, '["x", 1, []]', "2024-02-30"],
        *["{ hidden = [100000, 100000] }", "{ hidden = [1000000000000, 5] }", "{ a.b.c = 1 }", '"\\u001b[31m"'],
        "{ " + ".".join("a" * 400) + " = 1 }",
    ]
    if equals and coins.random() < 0.9:
        lines[number] = f"{name} = {coins.choice(values)}"
    else:
        lines[number:number] = coins.choice([[lines[number]], ["x = 1"], [f"[{'.'.join('a' * 3_000)}]"], ["\x00"]])
    file.write_text("\n".join(lines))


def change_table(file: Path, coins: random.Random) -> None:
    """Cells of a text table, or its bytes."""
    if coins.random() < 0.3:
        return change_bytes(file, coins)
    rows = [line.split(",") for line in file.read_text().splitlines()]
    cells = [
        "",
        "nan",
        "inf",
        "1e400",
        "9" * 5000,
        "-0",
        "0x10",
        '"',
        "a\x00b",
        "=cmd()",
        "\u202e",
        "x" * 200_000,
        "1e-320",
    ]
    for _ in range(coins.choice([1, 5, 50])):
        row = coins.choice(rows)
        row[coins.randrange(len(row))] = coins.choice(cells)
    file.write_text("\n".join(map(",".join, rows)) + "\n")
    return None


#: By the name's end, the first that fits.
CHANGES: dict[str, Callable[[Path, random.Random], None]] = {
    "plan.json": change_plan,
    ".json": change_json,
    ".jsonl": change_lines,
    ".safetensors": change_safetensors,
    ".toml": change_toml,
    ".csv": change_table,
    "": change_bytes,
}


def change(file: Path, coins: random.Random) -> None:
    """Change a file as its kind is changed."""
    next(CHANGES[end] for end in CHANGES if file.name.endswith(end))(file, coins)


# -- the rule ----------------------------------------------------------------------------------------------------------


@contextmanager
def limits() -> Iterator[None]:
    """No more memory and time than a hostile file may take."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    old = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


def fingerprints(folder: Path) -> dict[str, str]:
    """Path -> what is there, of all files in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or path.is_file():
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def read_hostile(folder: Path, *arguments: object) -> Outcome:
    """Run a command in `folder`, which holds hostile files, and assert the rule.

    The folder's parent holds only it: what is written beside it is found there.
    """
    outside = {path: value for path, value in fingerprints(folder.parent).items() if not path.startswith(folder.name)}
    modules = set(sys.modules)
    with limits():
        outcome = epsilons(*arguments)
    where = f"{arguments}: {outcome.err[-3000:]}"
    assert outcome.code in (0, 2, 3), where
    if outcome.code:
        lines = [line for line in outcome.err.splitlines() if not line.startswith("epsilons: warning: ")]
        assert lines, where
        assert lines[-1].startswith("epsilons: "), where
    assert "Traceback" not in outcome.err, where
    assert len(outcome.err) < 5_000, where
    assert not list(folder.parent.rglob("IMPORTED")), arguments
    assert "evilmod" not in set(sys.modules) - modules, arguments
    after = {path: value for path, value in fingerprints(folder.parent).items() if not path.startswith(folder.name)}
    assert after == outside, arguments
    return outcome


def hostile_copy(genuine: Path, parent: Path, name: str) -> Path:
    """A copy with modules that must not be imported."""
    folder = parent / name / "copy"
    shutil.copytree(genuine, folder, symlinks=True)
    for place in [folder, *[path for path in folder.rglob("*") if path.is_dir()]]:
        if place.name not in ("slots", "secret", "checkpoints"):
            (place / "evilmod.py").write_text(CANARY)
    for file in folder.rglob("run.json"):
        values = json.loads(file.read_text())
        values["metadata"]["folder"] = str(folder)
        file.write_text(json.dumps(values))
    return folder


def seal(folder: Path) -> None:
    """Write fitting checksums for a release."""
    (folder / model_file.SUMS).unlink(missing_ok=True)
    model_file.write_sums(folder)
