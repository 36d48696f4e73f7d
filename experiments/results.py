"""Finished runs: one JSON line each, in results/<table>.jsonl, found by the hash of their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Line = Mapping[str, Any]


def finished(folder: Path = RESULTS) -> dict[str, Line]:
    """Every finished run by its id, whichever table it was run for; tables may share cells."""
    found: dict[str, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").split("\n")[:-1]:  # a line without its end was cut off
            line = json.loads(text)
            found.setdefault(line["id"], line)
    return found


def keep(line: Line, folder: Path = RESULTS) -> None:
    """Append one run. A line that a crash cut off before is ended first, and then skipped by nobody: it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{line['table']}.jsonl"
    if path.exists():
        whole = path.read_bytes()
        if whole and not whole.endswith(b"\n"):
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
