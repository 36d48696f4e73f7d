"""The command line: list, run, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from epsilons.errors import EpsilonsError, InputError

from .results import RESULTS, finished, is_complete
from .running import run_tables
from .settings import Table
from .settings import tables as all_tables

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The paper's tables and figures, beside ours.")


def _table(name: str) -> Table:
    known = all_tables()
    if name not in known:
        raise InputError(f"No table is called {name!r}; there are: {', '.join(known)}.")
    return known[name]


@app.command("list")
def show() -> None:
    """List the tables, with the number of runs that are finished."""
    done = finished()
    for table in all_tables().values():
        runs = [cell.settings.named(seed) for cell in table.cells for seed in cell.seeds]
        complete = sum(run in done and is_complete(done[run]) for run in runs)
        print(f"{table.name:24} {complete:4}/{len(runs):<4} {table.title}")


@app.command()
def run(
    tables: Annotated[list[str], typer.Argument(help="Names that `list` shows.")],
    only: Annotated[str, typer.Option(help='The cells to run: a name, or a pattern such as "mnist-*-a".')] = "*",
    seeds: Annotated[int | None, typer.Option(help="Largest number of seeds per cell.")] = None,
    shadows: Annotated[int | None, typer.Option(help="Largest number of shadow models of a membership attack.")] = None,
    again: Annotated[
        bool, typer.Option(help="Also repeat finished runs; the new results replace the old ones.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; -1: as many as there are cores.")] = -1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each run; more than 1 helps a few long runs.")] = 1,
    backend: Annotated[str, typer.Option(help="loky (here), dask or ray (a cluster).")] = "loky",
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="The folder of finished runs, in place of this checkout's.")] = RESULTS,
) -> None:
    """Run the missing cells of these tables. After an interruption, call it again: it continues."""
    failed = run_tables(
        [_table(name) for name in tables],
        only=only,
        seeds=seeds,
        shadows=shadows,
        again=again,
        jobs=jobs,
        threads=threads,
        backend=backend,
        device=device,
        folder=out,
    )
    if failed:
        raise typer.Exit(1)


@app.command()
def report() -> None:
    """Render the pages docs/results*.md from the finished runs."""
    from .reporting import write

    for path in write():
        print(path)


@app.command()
def visits(folder: Annotated[Path, typer.Argument(help="A folder for the tables and their configs.")]) -> None:
    """Write tables of visits, where most persons have three rows, with configs for `epsilons train`."""
    from .visits import VISITS, write

    for name in VISITS:
        print(write(name, folder))


if __name__ == "__main__":
    try:
        app()
    except EpsilonsError as error:
        print(f"experiments: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
