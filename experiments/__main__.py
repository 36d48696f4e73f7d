"""The command line: list, run, queue, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from epsilons.errors import EpsilonsError, InputError

from .costs import listed
from .protocol import protocols, run_protocol
from .results import RESULTS
from .running import run_tables
from .settings import HERE, Table
from .settings import tables as all_tables

#: What `queue` runs: one table per line, with a pattern of cells, and "again" if runs of other versions are repeated.
QUEUE = HERE / "queue.txt"

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The paper's tables and figures, beside ours.")


def _table(name: str) -> Table:
    known = all_tables()
    if name not in known:
        raise InputError(f"No table is called {name!r}; there are: {', '.join(known)}.")
    return known[name]


@app.command("list")
def show(out: Annotated[Path, typer.Option(help="The folder of finished runs.")] = RESULTS) -> None:
    """List the tables: runs that are finished, those with the coins of this version, hours that the others take."""
    print(f"{'table':24} {'done':>9} {'current':>7} {'hours of one core':>17}")
    for row in listed(out):
        more = f" + {row.unknown} unknown runs" if row.unknown else ""
        print(f"{row.table:24} {row.done:4}/{row.needed:<4} {row.current:7} {row.hours:17.1f}  {row.title}{more}")


@app.command()
def queue(
    jobs: Annotated[int, typer.Option(help="Runs at the same time; -1: as many as there are cores.")] = -1,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="The folder of finished runs, in place of this checkout's.")] = RESULTS,
) -> None:
    """Run what is missing of queue.txt, in its order. After an interruption, call it again: it continues."""
    failed = []
    for name, *rest in queued():
        only, outdated = (rest or ["*"])[0], "again" in rest[1:]
        print(f"== {name} {only}", file=sys.stderr, flush=True)
        if name in protocols():
            failed += run_protocol(protocols()[name], folder=out, jobs=jobs, device=device)
        else:
            failed += run_tables([_table(name)], only=only, outdated=outdated, folder=out, jobs=jobs, device=device)
    if failed:
        raise typer.Exit(1)


def queued(path: Path = QUEUE) -> list[list[str]]:
    """The words of each line of the queue, without comments."""
    lines = (line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return [words for words in lines if words]


@app.command()
def run(
    tables: Annotated[list[str], typer.Argument(help="Names that `list` shows.")],
    only: Annotated[str, typer.Option(help='The cells to run: a name, or a pattern such as "mnist-*-a".')] = "*",
    seeds: Annotated[int | None, typer.Option(help="Largest number of seeds per cell.")] = None,
    shadows: Annotated[int | None, typer.Option(help="Largest number of shadow models of a membership attack.")] = None,
    again: Annotated[
        bool, typer.Option(help="Also repeat finished runs; the new results replace the old ones.")
    ] = False,
    outdated: Annotated[
        bool, typer.Option(help="Also repeat finished runs whose coins and noise were those of another version.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; -1: as many as there are cores.")] = -1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each run; more than 1 helps a few long runs.")] = 1,
    backend: Annotated[str, typer.Option(help="loky (here), dask or ray (a cluster).")] = "loky",
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="The folder of finished runs, in place of this checkout's.")] = RESULTS,
) -> None:
    """Run the missing cells of these tables. After an interruption, call it again: it continues."""
    how: dict[str, Any] = {"jobs": jobs, "threads": threads, "backend": backend, "device": device, "folder": out}
    failed = [
        one for name in tables if name in protocols() for one in run_protocol(protocols()[name], only=only, **how)
    ]
    wanted = [_table(name) for name in tables if name not in protocols()]
    if wanted:
        failed += run_tables(wanted, only=only, seeds=seeds, shadows=shadows, again=again, outdated=outdated, **how)
    if failed:
        raise typer.Exit(1)


@app.command()
def banded() -> None:
    """Train with banded noise and with independent noise: what is missing of results/banded.json."""
    from .banded import experiment

    experiment()


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
