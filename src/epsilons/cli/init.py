"""`epsilons init`: draft a commented config from a user's data."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .._links import docs_page
from ..data import DATASETS
from ..data.images import is_image_table
from ..data.infer import BUCKETS, Column, TableGuess, count_classes, guess_table
from ..data.tensors import is_folder_of_tensors
from ..disclosure import SMALLEST_SHOWN
from ..errors import DataError, InputError
from ..escaping import UNPRINTABLE, printable
from ..files import write_text
from ..tabular import TABLES, as_text
from .console import console
from .options import Quiet, option

EXAMPLES = """
[bold]Examples[/bold]

epsilons init people.csv                                     # drafts people.toml

epsilons init visits.parquet --target readmitted --budget consent --test visits-2025.parquet -o visits.toml

epsilons init mnist                                          # a data set with a name
"""

#: Models for data sets with names; all others start with an mlp.
MODELS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar10-cnn", "svhn": "cifar10-cnn"}

_SIMULATED = 'shares = { "1" = 0.34, "2" = 0.43, "3" = 0.23 }'


def command(
    data: Annotated[
        str, typer.Argument(help="A .csv or .parquet table, an image file, a folder of tensors, or a data set's name.")
    ],
    target: Annotated[str | None, option("The column to predict. Default: a guess by the names.")] = None,
    budget: Annotated[str | None, option("The column of budgets or tiers. Default: a guess by the names.")] = None,
    test: Annotated[Path | None, option("A file to test on. Default: a fifth of the records is held out.")] = None,
    output: Annotated[Path | None, option("The config to write. Default: NAME.toml.", "--output", "-o")] = None,
    quiet: Quiet = False,
) -> None:
    """Draft a config for `epsilons train` from your data.

    It guesses which column to predict and which column holds the budgets, and writes down how each other column becomes
    an input. Read the draft before you train: bounds and lists of values that were read off the data are not covered by
    the guarantee.
    """
    source = Path(data)
    config = output or Path(f"{source.stem or data}.toml")
    if config.exists():
        raise InputError(f"{config} exists already. Choose another name with -o, or remove it.")
    named_test = None if test is None else _relative(test, config)
    if data in DATASETS:
        draft = draft_arrays(data, named_test, None, is_number=False)
    elif is_folder_of_tensors(source) or is_image_table(source):
        classes = count_classes(source)
        draft = draft_arrays(_relative(source, config), named_test, classes, is_number=classes is None)
    elif source.suffix in TABLES:
        draft = draft_table(guess_table(source, target, budget), source.name, _relative(source, config), named_test)
    else:
        raise DataError(
            f"{data!r} is neither a .csv or .parquet file, a folder with inputs and targets, nor one of: "
            f"{', '.join(DATASETS)}."
        )
    lines, notes = draft
    write_text(config, "\n".join(lines) + "\n")
    out = console(quiet=quiet)
    for note in notes:
        out.print(printable(note), soft_wrap=True)
    shown = printable(config)
    out.print(f"\nDrafted {shown}. Read it, correct it, then: epsilons train {shown}", soft_wrap=True)


def draft_arrays(train: str, test: str | None, classes: int | None, is_number: bool) -> tuple[list[str], list[str]]:
    """The lines of a config for images or tensors, and the notes to print.

    classes    number of classes in a user's data; None for a named data set, or if the target is a number
    is_number  whether the target is a number
    """
    tested = [f"test = {_text(test)}"] if test else [] if train in DATASETS else ["test_share = 0.2"]
    counted = _line(f"classes = {classes}", "READ OFF THE DATA, so not covered: write how many there can be")
    lines = [
        *_head(train),
        "[data]",
        f"train = {_text(train)}",
        *tested,
        _line("# test_public = true", "if scores on the test data may be published"),
        *([] if classes is None else [counted]),
        "",
        "[budgets]",
        "# One row per record, in order:",
        '# file = "wishes.csv"',
        '# column = "epsilon"',
        "# Until you have them, SIMULATED budgets, assigned at random:",
        _SIMULATED,
        _line("delta = 1e-5", "below 1 / records; smaller is safer"),
        "",
        *_model(MODELS.get(train, "mlp")),
        *_training(batch=512, is_number=is_number),
    ]
    return lines, ["Budgets: SIMULATED; name a file of your own in [budgets]."]


def draft_table(guess: TableGuess, name: str, train: str, test: str | None) -> tuple[list[str], list[str]]:
    """The lines of a config for a table, and the notes to print.

    name         the table's file, for the heading
    train, test  paths from the config's folder
    """
    is_number = guess.classes is None
    numeric = {column.name: _numeric(column) for column in guess.columns if column.kind == "numeric"}
    categorical = {column.name: _categorical(column) for column in guess.columns if column.kind == "categorical"}
    drop = [column.name for column in guess.columns if column.kind == "drop"]
    dates = [column.name for column in guess.columns if column.dates]
    codes = [column.name for column in guess.columns if column.code]
    repeated = [_repeated(column) for column in guess.columns if column.repeats]
    if guess.bounds is not None:
        numeric[guess.target] = _bounds(guess.bounds)
    records = guess.records if test else math.floor(0.8 * guess.records)
    budget_lines, budget_note = _budgets(guess, records)
    lines = [
        *_head(name),
        "[data]",
        f"train = {_text(train)}",
        f"test = {_text(test)}" if test else _line("test_share = 0.2", "held out, not trained on"),
        _line("# test_public = true", "if scores on the test data may be published"),
        f"target = {_text(guess.target)}",
        *([] if guess.classes is None else [f"classes = {_values(guess.classes)}   # read off the data, as below"]),
        *(f"# {warning}" for warning in repeated),
        *(f"# {_bare(date)} holds dates: replace them by a number (an age, days since a date)" for date in dates),
        f"drop = [{', '.join(map(_text, drop))}]",
        "",
        "# READ OFF THE DATA, so not covered by the guarantee: replace the bounds and lists below by what you know",
        "# without looking (an age lies in 0..120). Numbers beyond a bound are clipped to it. Unlisted values are",
        f"# ignored, such as those that fewer than {SMALLEST_SHOWN} records hold.",
        _line("[data.numeric]", '[low, high]; [low, high, "log"] for numbers of very different sizes'),
        *(f"{_key(column)} = {rule}" for column, rule in numeric.items()),
        "",
        _line("[data.categorical]", "values, or a number of buckets to hash any value into"),
        *(f"{_key(column)} = {rule}" for column, rule in categorical.items()),
        "",
        *budget_lines,
        *_model("mlp"),
        *_training(batch=_round_down(min(512.0, records / 4)), is_number=is_number),
    ]
    notes = [
        f"Predicts: {guess.target!r}",
        budget_note,
        f"Inputs: {len(numeric) - is_number} numbers, {len(categorical)} categories",
    ]
    if drop:
        notes.append(f"Left out: {_listed(drop)} (identifiers, or columns with nothing to learn from)")
    notes += [f"WARNING: {warning}" for warning in repeated]
    if dates:
        notes.append(
            f"WARNING: {_listed(dates)} hold{'s' * (len(dates) == 1)} dates, which are left out. Replace them by a "
            "number (an age, days since a fixed date) to learn from them."
        )
    if codes:
        notes.append(
            f"WARNING: {_listed(codes)} may be codes, such as zip codes, and not quantities. See the comments in the "
            "draft: quantities are scaled, codes are hashed or listed in [data.categorical]."
        )
    return lines, notes


def _numeric(column: Column) -> str:
    assert column.bounds is not None
    hint = "   # a quantity? If it is a code, move it to [data.categorical]" if column.code else ""
    return _bounds(column.bounds) + hint


def _categorical(column: Column) -> str:
    if column.code:
        return f"{BUCKETS}   # a code: hashed. If it is a quantity, move it to [data.numeric]"
    return _values(column.values) if column.values else str(BUCKETS)


def _bounds(bounds: tuple[float, float, bool]) -> str:
    low, high, log = bounds
    return f"[{low:.15g}, {high:.15g}" + (', "log"]' if log else "]")


def _repeated(column: Column) -> str:
    assert column.repeats is not None
    values, cells = column.repeats
    return (
        f"'{_bare(column.name)}' has {values:,} values in {cells:,} rows: several records of one person? The guarantee "
        f"is about one record, not one person: {docs_page('pitfalls', 'several-records-of-one-person')}"
    )


def _budgets(guess: TableGuess, records: int) -> tuple[list[str], str]:
    """The section [budgets], and the note to print."""
    delta = f"delta = {min(1e-5, 10.0 ** math.floor(math.log10(1 / (records + 1)))):.0e}"
    if guess.budget is None:
        note = "Budgets: no such column was found; the draft has SIMULATED ones. Name yours in [budgets]."
        lines = [
            "# No column of budgets was found. Name yours:",
            '# column = "epsilon"',
            "# Until then, SIMULATED budgets, assigned at random:",
            _SIMULATED,
        ]
    elif guess.tiers is None:
        note, lines = f"Budgets: {guess.budget!r}", [f"column = {_text(guess.budget)}"]
    else:
        note = f"Budgets: the {len(guess.tiers)} tiers of {guess.budget!r}; WRITE DOWN the epsilon of each."
        pairs = ", ".join(f"{_key(as_text(tier))} = 0.0" for tier in guess.tiers)
        lines = [f"column = {_text(guess.budget)}", f"tiers = {{ {pairs} }}   # write the epsilon of each tier"]
    return ["[budgets]", *lines, _line(delta, "below 1 / records; smaller is safer"), ""], note


def _head(name: str) -> list[str]:
    return [
        f"# Drafted by `epsilons init` from {_bare(name)}. Every key: {docs_page('config')}",
        "# Train with: epsilons train THIS-FILE",
        "",
    ]


def _model(name: str) -> list[str]:
    options = ["options = { hidden = [64] }"] if name == "mlp" else []
    return ["[model]", f'name = "{name}"', *options, ""]


def _training(batch: float, is_number: bool) -> list[str]:
    loss = "mse" if is_number else "cross_entropy"
    return [
        "[training]",
        _line("epochs = 20", "or steps = …"),
        _line(f"batch_size = {batch:g}", "EXPECTED records per update"),
        _line("clip_norm = 1.0", "L2 norm that the tiers' clip norms average to"),
        f'loss = "{loss}"',
        'optimizer = "sgd"',
        "lr = 0.5",
        _line("# seeds = [0, 1, 2]", "repeatable runs; not for release"),
        "",
        "[privacy]",
        _line('strategy = "scale"', "uniform, sample, scale, …"),
        'accountant = "pld"',
    ]


def _round_down(value: float) -> float:
    """To two digits, and at least 1; 512 stays.

    >>> _round_down(0.3), _round_down(387.5), _round_down(512.0)
    (1.0, 380.0, 512.0)
    """
    power = 10.0 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return max(1.0, math.floor(value / power) * power) if value != 512 else value


def _relative(path: Path, config: Path) -> str:
    return Path(os.path.relpath(path, config.parent)).as_posix()


def _line(setting: str, comment: str) -> str:
    return f"{setting:<37} # {comment}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _text(text: str) -> str:
    """A text in TOML. TOML has one escape for a character beyond 16 bits, where JSON has two."""
    return UNPRINTABLE.sub(lambda match: f"\\U{ord(match[0]):08x}", json.dumps(text, ensure_ascii=False))


def _bare(text: str) -> str:
    """A text as it is shown in a comment: escaped, without quotation marks."""
    return _text(text)[1:-1]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else _text(str(value))


def _values(values: Iterable[Any]) -> str:
    return f"[{', '.join(map(_value, values))}]"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
