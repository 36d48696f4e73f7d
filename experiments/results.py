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
    """Append one run, in place of an earlier line of the same run, whichever table that was run for."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.jsonl"):
        whole = path.read_text(encoding="utf-8")
        if line["id"] in whole:
            others = [text for text in whole.split("\n")[:-1] if json.loads(text)["id"] != line["id"]]
            new = path.with_suffix(".new")
            new.write_text("".join(f"{text}\n" for text in others), encoding="utf-8")
            new.replace(path)
    append(folder / f"{line['table']}.jsonl", line)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a file of JSON lines, which may not exist; a line that a crash cut off is removed first."""
    if path.exists():
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
