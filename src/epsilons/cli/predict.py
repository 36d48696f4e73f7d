"""`epsilons predict`: the predictions of a trained model for every row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import InputError
from ..escaping import printable
from .console import console
from .options import Quiet, option

EXAMPLES = """
[bold]Examples[/bold]

epsilons predict runs/people-1 new.csv -o scored.csv

epsilons predict release new.parquet -o scored.parquet --keep id   # a copied release folder

[bold]From Python[/bold]

epsilons.Predictor.load("release").predict("new.csv").to_table()
"""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a release folder.", show_default=False)],
    table: Annotated[
        Path,
        typer.Argument(help="A .csv, .tsv or .parquet table; for models of arrays an .npy file.", show_default=False),
    ],
    output: Annotated[Path, option("The .csv or .parquet file to write.", "--output", "-o")],
    keep: Annotated[list[str] | None, option("Copy this column into the output. May be repeated.", "--keep")] = None,
    bad_rows: Annotated[Literal["refuse", "mark"], option("What to do about unreadable cells.")] = "refuse",
    device: Annotated[str, option("cpu, cuda, …, or auto for a GPU if there is one.")] = "cpu",
    quiet: Quiet = False,
) -> int:
    """Predict every row of a table with a trained model, and write one row for each, in the same order.

    The preprocessing of training is applied to each row: bounds, categories, texts, fixed features. Columns may be in
    any order and others are ignored; a missing column is named. Empty cells and unknown categories count as in
    training. The output has a column `prediction`, and one `probability_CLASS` per class.

    With --bad-rows mark, rows with a cell that is no number or date are not refused: they have no prediction, and the
    reason in a last column, `not_predicted`; the exit code is then 4. In a .csv file, an apostrophe is written before
    texts that a spreadsheet would take for a formula.

    A file may be larger than the memory. Predictions about people are confidential: only you may read the file.
    """
    if output.suffix not in (".csv", ".parquet"):
        raise InputError(f"--output must end in .csv or .parquet, got {output.name!r}.")
    if output.exists():
        raise InputError(f"{output} exists already. Choose another name with -o, or remove it.")
    from ..training.predicting import Predictor  # torch is imported here
    from ..training.predicting.writing import write

    predictor = Predictor.load(run, device=device)
    for reason in predictor.description.not_covered:
        console(stderr=True, quiet=quiet).print(f"NOT COVERED by the guarantee: {printable(reason)}", soft_wrap=True)
    rows, bad = write(predictor, table, output, list(dict.fromkeys(keep or [])), quiet, bad_rows == "mark")
    words = f"{rows - bad:,} rows predicted in {printable(output)}" + f", and {bad:,} not" * bool(bad)
    console(quiet=quiet).print(words, soft_wrap=True)
    return 4 if bad else 0
