"""Finished runs: one JSON line each in results/<table>.jsonl, with the hash of the settings as id.

The keys of a line are those of the first runs: `levels` are the epsilons of the groups, `spent` the epsilons spent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epsilons.draws import randomness

RESULTS = Path(__file__).resolve().parent / "results"

Line = Mapping[str, Any]

#: Changes whenever coins or noise do: a run of another version has other digits. Runs of the first versions have none.
DRAWS_VERSION: int = randomness.DRAWS_VERSION


def finished(folder: Path = RESULTS) -> dict[str, Line]:
    """All finished runs by their ids. Tables may share cells, so a run may be in the file of another table."""
    runs: dict[str, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").split("\n")[:-1]:  # a last line without its end is incomplete
            line = json.loads(text)
            runs.setdefault(line["id"], line)
    return runs


def is_complete(line: Line) -> bool:
    """False for a membership attack with fewer shadows than its settings ask for."""
    return bool(line.get("shadows", 0) >= line.get("settings", {}).get("shadows", 0))


def is_current(line: Line) -> bool:
    """Whether a run has the coins and noise of this version, so that it can be repeated to its digits."""
    return bool(line.get("draws_version") == DRAWS_VERSION)


def keep(line: Line, folder: Path = RESULTS) -> None:
    """Append one run, and remove an earlier line of the same run from every file."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        if line["id"] in text:
            others = [row for row in text.split("\n")[:-1] if json.loads(row)["id"] != line["id"]]
            new = path.with_suffix(".new")
            new.write_text("".join(f"{row}\n" for row in others), encoding="utf-8")
            new.replace(path)
    append(folder / f"{line['table']}.jsonl", line)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a file of JSON lines, which may not exist. An incomplete last line is removed first."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
