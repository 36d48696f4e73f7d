"""Draw the rooms of epsilons and what they import, as docs/assets/architecture.svg.

    python docs/picture.py

The rows are those of tests/test_imports.py, where a test compares the file with this script. An
arrow leads from a room to one that it imports, unless a longer way leads there as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from test_imports import ROWS, SOURCE, imported_modules, source_files  # noqa: E402

FILE = ROOT / "docs" / "assets" / "architecture.svg"
WIDTH, HEIGHT = 112, 32  # of a box, in pixels
STEP_X, STEP_Y, MARGIN = 120, 60, 20

#: Columns, chosen so that no arrow crosses a box.
COLUMN = {
    "opacus": 0.75, "cli": 1.75, "lightning": 2.75, "huggingface": 4.0,
    "flower": 5.0, "nvflare": 6.0,
    "auditing": 0.75, "configs": 1.75, "doors": 2.75, "sklearn": 3.75,
    "training": 2.75, "independence": 3.5, "models": 4.5,
    "reporting": 0.75, "registry": 1.75, "draws": 3.0, "ledger": 1.75, "planning": 1.0,
    "accounting": 0.0, "budgets": 1.0, "data": 2.0, "clipping": 3.75,
    "tabular": 0.5, "core": 1.5, "errors": 0.5,
}  # fmt: skip


def imports() -> dict[str, set[str]]:
    """Room (or file) -> those that it imports, and "torch" if a module of it needs torch."""
    graph: dict[str, set[str]] = {unit: set() for row in ROWS for unit in row}
    for path, code in source_files().items():
        unit = Path(path).with_suffix("").parts[0]
        if unit in graph:
            names = [name.split(".") for name in imported_modules(code, path)]
            own = {parts[1] for parts in names if parts[0] == "epsilons"}
            graph[unit] |= (own & graph.keys() - {unit}) | (
                {"torch"} & {parts[0] for parts in names}
            )
    return graph


def arrows(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of packages with no longer way between them, from the top down."""

    def below(unit: str) -> set[str]:
        direct = graph.get(unit, set())
        return direct.union(*map(below, direct))

    pairs = [(unit, other) for unit in units() for other in units() if other in graph[unit]]
    return [(a, b) for a, b in pairs if not any(b in below(between) for between in graph[a])]


def units() -> list[str]:
    return [unit for row in ROWS for unit in sorted(row)]


def middle(unit: str) -> tuple[float, float]:
    """The middle of a box, in pixels."""
    row = next(number for number, row in enumerate(ROWS) if unit in row)
    x = MARGIN + WIDTH / 2 + STEP_X * COLUMN[unit]
    return x, MARGIN + HEIGHT / 2 + STEP_Y * row


def arrow(start: str, end: str) -> str:
    (x, y), (to_x, to_y) = middle(start), middle(end)
    return f'<path d="M{x:.0f} {y + HEIGHT / 2:.0f} {to_x:.0f} {to_y - HEIGHT / 2:.0f}"/>'


def box(unit: str, needs_torch: bool) -> str:
    x, y = middle(unit)
    corner = f'x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}"'
    fill = "#b2dfdb" if needs_torch else "#ffffff"
    is_folder = (SOURCE / unit).is_dir()
    return (
        f'<rect {corner} width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{fill}" stroke="#37474f"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}" font-weight="{600 if is_folder else 400}">'
        f"{unit if is_folder else unit + '.py'}</text>"
    )


def svg() -> str:
    graph = imports()
    right = 2 * MARGIN + WIDTH + STEP_X * max(COLUMN.values())
    bottom = 2 * MARGIN + HEIGHT + STEP_Y * (len(ROWS) - 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom}"'
            f' width="{right:.0f}" height="{bottom}" font-family="sans-serif" font-size="14">',
            "<title>The rooms of epsilons and what they import</title>",
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0 0 8 4 0 8z" fill="#607d8b"/></marker>',
            f'<rect width="{right:.0f}" height="{bottom}" rx="8" fill="#fafafa"/>',
            '<g stroke="#607d8b" fill="none" marker-end="url(#tip)">',
            *(arrow(*pair) for pair in arrows(graph)),
            '</g><g text-anchor="middle" fill="#212121">',
            *(box(unit, "torch" in graph[unit]) for unit in units()),
            "</g></svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(svg(), encoding="utf-8")
