"""`epsilons init`: a commented config, drafted from one's data, to be read and mended before training."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..budgets import SMALLEST_SHOWN
from ..data import DATASETS
from ..data.images import classes_in as classes_of_images
from ..data.images import is_image_table
from ..data.tables import check_texts, holds_dates, is_bytes
from ..data.tensors import classes_in as classes_of_tensors
from ..data.tensors import is_folder_of_tensors
from ..errors import DataError, InputError
from ..escaping import UNPRINTABLE, printable
from ..files import write_text
from ..tabular import TABLES, as_text, column_of, numbers, read_table
from .console import console

EXAMPLES = """
[bold]Examples[/bold]

epsilons init people.csv                                     # drafts people.toml

epsilons init visits.parquet --target readmitted --budget consent --test visits-2025.parquet -o visits.toml

epsilons init mnist                                          # a data set with a name
"""

TARGETS = ("label", "target", "class", "outcome", "y")
BUDGETS = ("epsilon", "eps", "budget", "privacy", "consent", "tier")
MOST_CLASSES = 100
MOST_VALUES = 50  # a text column with more is hashed
BUCKETS = 64

#: Columns that tell who somebody is, or which record it is: left out.
IDENTIFIERS = re.compile(
    r"(.*[_\W])?(ids?|mrn|ssn|uuid|guid|pid|uid)"
    r"|(patient|person|people|subject|participant|respondent|member|customer|client|user|employee|student|pupil"
    r"|individual|household)s?([_\W]?(ids?|no|nr|num|number|key|code|ref|name))?"
)
#: Columns of digits that are names, not quantities: one is not larger than another.
CODES = re.compile(r"(.*[_\W])?(zip|zip_?codes?|postal|postal_?codes?|post_?codes?|plz|codes?)([_\W]?[45])?")
#: So many different whole numbers, in more than half of the rows, are as likely codes as quantities.
MANY_NUMBERS = 1000

SEVERAL_RECORDS = "docs/pitfalls.md#several-records-of-one-person"

#: Models for data sets with names; all others begin with an mlp.
MODELS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar10-cnn", "svhn": "cifar10-cnn"}


def command(
    data: Annotated[str, typer.Argument(help="A .csv or .parquet table, an image file, a folder of tensors, a name.")],
    target: Annotated[str | None, typer.Option(help="The column to predict; guessed by its name otherwise.")] = None,
    budget: Annotated[str | None, typer.Option(help="The column of budgets, or of tiers; guessed otherwise.")] = None,
    test: Annotated[
        Path | None, typer.Option(help="A file to test on; otherwise a fifth of the records is held out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; by default NAME.toml where you are.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Draft a config for `epsilons train` from your data.

    It looks at a table's columns, guesses what is to be predicted and where the budgets are, and writes down how each
    column becomes an input. Read it before you train: bounds and lists of values that were read off the data are not
    covered by the guarantee.
    """
    where = Path(data)
    file = output or Path(f"{where.stem or data}.toml")
    if file.exists():
        raise InputError(f"{file} exists already. Choose another name with -o, or remove it.")
    if data in DATASETS or is_folder_of_tensors(where) or is_image_table(where):
        text, notes = draft_arrays(
            data if data in DATASETS else _from(where, file),
            None if test is None else _from(test, file),
            None if data in DATASETS else classes_in(where),
        )
    elif where.suffix in TABLES:
        text, notes = draft_table(where, file, target, budget, test)
    else:
        raise DataError(
            f"{data!r} is neither a .csv or .parquet file, a folder with inputs and targets, nor one of: "
            f"{', '.join(DATASETS)}."
        )
    write_text(file, text)
    out = console(quiet=quiet)
    for note in notes:
        out.print(printable(note), soft_wrap=True)
    out.print(f"\nDrafted {printable(file)}. Read it, mend it, then: epsilons train {printable(file)}", soft_wrap=True)


def classes_in(path: Path) -> int | None:
    """How many classes occur in an image table or a folder of tensors; None where the target is a number."""
    return classes_of_images(path) if is_image_table(path) else classes_of_tensors(path)


def draft_arrays(train: str, test: str | None, classes: int | None) -> tuple[str, list[str]]:
    """A config for images or tensors, whose budgets stand elsewhere or are simulated.

    classes  how many occur in one's own data; None for data sets with a name, and where the target is a number
    """
    model = MODELS.get(train, "mlp")
    is_number = classes is None and train not in DATASETS
    counted = _line(f"classes = {classes}", "READ OFF THE DATA, and so not covered: write how many there can be")
    tested = [f"test = {_text(test)}"] if test else [] if train in DATASETS else ["test_share = 0.2"]
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
        "# Until you have them, SIMULATED ones, dealt out at random:",
        'shares = { "1" = 0.34, "2" = 0.43, "3" = 0.23 }',
        _line("delta = 1e-5", "below 1 / records; the smaller, the safer"),
        "",
        *_model(model),
        *_training(batch=512, epochs=20, lr=0.5, loss="mse" if is_number else "cross_entropy"),
    ]
    return "\n".join(lines) + "\n", ["Budgets: SIMULATED; name a file of your own in [budgets]."]


def draft_table(
    path: Path, config: Path, target: str | None, budget: str | None, test: Path | None
) -> tuple[str, list[str]]:
    """A config for a table, and what to tell about the guesses in it."""
    table = read_table(path, "data", DataError)
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows.")
    names = list(table.column_names)
    for name in {name for name in names if names.count(name) > 1}:
        column_of(table, name, path, DataError)
    if path.suffix == ".csv":  # a .parquet file may well hold bytes, which are left out
        check_texts(table, names, path)
    budget = _chosen(budget, names, BUDGETS, path, "--budget")
    if target is not None and target == budget:
        raise DataError(f"Column {target!r} of {path} cannot be both --target and --budget; name two columns.")
    if path.suffix == ".csv":  # what the config will list is compared with what is written
        listed = [
            name for name in names if not _is_number(table, name) and (name == budget or not _is_bool(table, name))
        ]
        table = read_table(path, "data", DataError, listed)
    target = _chosen(target, [n for n in names if n != budget], TARGETS, path, "--target")
    if target is None:
        others = [name for name in reversed(names) if name != budget]
        target = next((name for name in others if not _is_identifier(name)), others[0] if others else None)
    if target is None:
        raise DataError(f"{path} has no column to predict beside that of the budgets, {budget!r}.")
    check_texts(table, [target, *([budget] if budget else [])], path)
    notes = [f"Predicts: {target!r}"]
    classes = _values(table, target)
    is_number = _is_number(table, target) and len(classes) > 20
    if not is_number and len(classes) > MOST_CLASSES:
        raise DataError(f"Column {target!r} of {path} holds {len(classes):,} different texts; name another --target.")
    numeric: list[tuple[str, str]] = []
    categorical: list[tuple[str, str]] = []
    drop: list[tuple[str, str]] = []
    dates: list[str] = []
    codes: list[str] = []
    written_as = read_table(path, "data", DataError, names) if path.suffix == ".csv" else table
    for name in names:
        if name in (target, budget):
            continue
        kind, written = _feature(table, name, path)
        if kind == "drop" and holds_dates(table.column(name)):
            dates.append(name)
        elif kind == "numeric" and (likely := _as_code(table, name, written_as.column(name))):
            codes.append(name)
            if likely == "a code":
                kind, written = "categorical", f"{BUCKETS}   # a code: hashed. A quantity? Then into [data.numeric]"
            else:
                written += "   # a quantity? A code? Then into [data.categorical]"
        {"numeric": numeric, "categorical": categorical, "drop": drop}[kind].append((name, written))
    repeated = [told for name, _ in drop if (told := _repeats(table, name))]
    if is_number:
        numeric.append((target, _bounds(table, target, path)))
    if path.suffix == ".csv":  # `train` will refuse 0x10, which its reader takes for 16
        written = read_table(path, "data", DataError, names)
        for name in (*(name for name, _ in numeric), *([budget] if budget and _is_number(table, budget) else [])):
            numbers(written.column(name), name, path, DataError)
    records = table.num_rows if test else math.floor(0.8 * table.num_rows)
    lines = [
        *_head(path.name),
        "[data]",
        f"train = {_text(_from(path, config))}",
        f"test = {_text(_from(test, config))}" if test else _line("test_share = 0.2", "held out, not trained on"),
        _line("# test_public = true", "if scores on the test data may be published"),
        f"target = {_text(target)}",
        *(
            []
            if is_number
            else [f"classes = [{', '.join(map(_value, classes))}]   # read off the data, as what is below"]
        ),
        *(f"# {told}" for told in repeated),
        *(
            f"# {_text(name)[1:-1]} holds dates: put a number in its place (an age, days since a date)"
            for name in dates
        ),
        f"drop = [{', '.join(_text(name) for name, _ in drop)}]",
        "",
        "# READ OFF THE DATA, and so not covered by the guarantee: replace the bounds and lists below by what you know",
        "# without looking (an age lies in 0..120). Numbers beyond a bound are cut off. Values not listed are ignored,",
        f"# such as those that fewer than {SMALLEST_SHOWN} records hold.",
        _line("[data.numeric]", '[low, high]; [low, high, "log"] for numbers of very different sizes'),
        *(f"{_key(name)} = {written}" for name, written in numeric),
        "",
        _line("[data.categorical]", "values, or a number of buckets to hash any value into"),
        *(f"{_key(name)} = {written}" for name, written in categorical),
        "",
        *_budgets(table, budget, notes, records),
        *_model("mlp"),
        *_training(
            batch=_round(min(512.0, records / 4)), epochs=20, lr=0.5, loss="mse" if is_number else "cross_entropy"
        ),
    ]
    notes.append(f"Inputs: {len(numeric) - is_number} numbers, {len(categorical)} categories")
    if drop:
        notes.append(f"Left out: {', '.join(repr(name) for name, _ in drop)} (identifiers, or nothing to learn from)")
    notes += [f"WARNING: {told}" for told in repeated]
    if dates:
        notes.append(
            f"WARNING: {_listed(dates)} hold{'s' * (len(dates) == 1)} dates, which are left out. Put a number in their "
            "place (an age, days since a fixed date) to learn from them."
        )
    if codes:
        notes.append(
            f"WARNING: {_listed(codes)} may be codes, such as zip codes, and no quantities. See the comments in the "
            "draft: quantities are scaled, codes are hashed or listed in [data.categorical]."
        )
    return "\n".join(lines) + "\n", notes


def _line(setting: str, comment: str) -> str:
    return f"{setting:<37} # {comment}"


def _head(what: str) -> list[str]:
    return [
        f"# Drafted by `epsilons init` from {_text(what)[1:-1]}. Every key: see the docs, Config files.",
        "# Train with: epsilons train THIS-FILE",
        "",
    ]


def _budgets(table: Any, column: str | None, notes: list[str], records: int) -> list[str]:
    delta = f"delta = {min(1e-5, 10.0 ** math.floor(math.log10(1 / (records + 1)))):.0e}"
    lines = ["[budgets]"]
    if column is None:
        notes.append("Budgets: no such column was found; SIMULATED ones are in the draft. Name yours in [budgets].")
        lines += [
            "# No column of budgets was found. Name yours:",
            '# column = "epsilon"',
            "# SIMULATED ones until then, dealt out at random:",
            'shares = { "1" = 0.34, "2" = 0.43, "3" = 0.23 }',
        ]
    elif _is_number(table, column):
        notes.append(f"Budgets: {column!r}")
        lines.append(f"column = {_text(column)}")
    else:
        tiers = _values(table, column)
        if len(tiers) > MOST_CLASSES:
            raise DataError(f"Column {column!r} holds {len(tiers):,} different texts; name another --budget.")
        notes.append(f"Budgets: the {len(tiers)} tiers of {column!r}; WRITE DOWN what epsilon each stands for.")
        pairs = ", ".join(f"{_key(as_text(tier))} = 0.0" for tier in tiers)
        lines += [f"column = {_text(column)}", f"tiers = {{ {pairs} }}   # write the epsilon of each tier"]
    return [*lines, _line(delta, "below 1 / records; the smaller, the safer"), ""]


def _model(name: str) -> list[str]:
    options = ["options = { hidden = [64] }"] if name == "mlp" else []
    return ["[model]", f'name = "{name}"', *options, ""]


def _training(batch: float, epochs: int, lr: float, loss: str) -> list[str]:
    return [
        "[training]",
        _line(f"epochs = {epochs}", "or steps = …"),
        _line(f"batch_size = {batch:g}", "EXPECTED records per update"),
        _line("clip_norm = 1.0", "L2 norm that the tiers' clip norms average to"),
        f'loss = "{loss}"',
        'optimizer = "sgd"',
        f"lr = {lr:g}",
        _line("# seeds = [0, 1, 2]", "repeatable runs; nothing to release"),
        "",
        "[privacy]",
        _line('strategy = "scale"', "uniform, sample, scale, …"),
        'accountant = "pld"',
    ]


def _chosen(asked: str | None, names: Sequence[str], usual: Sequence[str], path: Path, flag: str) -> str | None:
    if asked is not None:
        if asked not in names:
            raise DataError(f"{path} has no column {asked!r} for {flag}; it has: {', '.join(map(repr, names))}.")
        return asked
    lower = {name.lower(): name for name in reversed(list(names))}
    exact = [lower[name] for name in usual if name in lower]
    partly = [name for name in names for word in usual if len(word) > 2 and word in re.split(r"[^a-z]+", name.lower())]
    return (exact + partly + [None])[0]


def _feature(table: Any, name: str, path: Path) -> tuple[str, str]:
    """("numeric" | "categorical" | "drop", what to write) for one column."""
    rows = table.num_rows
    values = _values(table, name)
    if len(values) <= 1:
        return "drop", ""
    if _is_identifier(name) or is_bytes(table.schema.field(name)) or holds_dates(table.column(name)):
        return "drop", ""
    if _is_number(table, name):
        identifies = len(values) == rows and re.fullmatch(r"(.*[_\W])?(no|nr|number|index|key)", name.lower())
        return ("drop", "") if identifies else ("numeric", _bounds(table, name, path))
    if len(values) > max(MOST_VALUES, 0.5 * rows):
        return "drop", ""
    counts = Counter(table.column(name).to_pylist())
    common = [value for value in values if counts[value] >= SMALLEST_SHOWN]
    if len(common) > MOST_VALUES or not common:
        return "categorical", str(BUCKETS)
    return "categorical", f"[{', '.join(map(_value, common))}]"


def _is_identifier(name: str) -> bool:
    """Whether a column is called as those are that tell who somebody is.

    >>> [name for name in ("mrn", "Patient", "patientId", "visit_id", "aid", "subjective") if _is_identifier(name)]
    ['mrn', 'Patient', 'patientId', 'visit_id']
    """
    return IDENTIFIERS.fullmatch(name.strip().lower()) is not None


def _as_code(table: Any, name: str, cells: Any) -> str:
    """Whether a column of numbers looks like "a code", or may be "either"; "" for quantities.

    cells  the column as its file has it: 007 and not 7
    """
    values = [value for value in _values(table, name) if float(value).is_integer()]
    if len(values) < len(_values(table, name)):
        return ""
    is_padded = any(isinstance(text, str) and re.fullmatch(r"0\d+", text.strip()) for text in cells.to_pylist())
    if is_padded or CODES.fullmatch(name.strip().lower()):
        return "a code"
    return "either" if len(values) >= MANY_NUMBERS and len(values) > table.num_rows / 2 else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _repeats(table: Any, name: str) -> str | None:
    """What to tell of an identifier that several records share, if they do."""
    values, cells = len(_values(table, name)), table.num_rows - table.column(name).null_count
    if not _is_identifier(name) or values in (0, 1, cells):
        return None
    return (
        f"'{_text(name)[1:-1]}' has {values:,} values in {cells:,} rows: several records of one person? The guarantee "
        f"is about one record, not one person: {SEVERAL_RECORDS}"
    )


def _bounds(table: Any, name: str, path: Path) -> str:
    cells = numbers(table.column(name), name, path, DataError)
    cells = cells[np.isfinite(cells)]
    low, high = (float(cells.min()), float(cells.max())) if len(cells) else (0.0, 1.0)
    bulk = float(np.quantile(np.abs(cells), 0.9)) if len(cells) else 1.0
    heavy = ', "log"' if max(abs(low), abs(high)) > 20 * (bulk + 1) else ""
    low, high = _outward(low, down=True), _outward(high, down=False)
    if not low < high:
        high = low + 1
    return f"[{low:.15g}, {high:.15g}{heavy}]"


def _outward(value: float, down: bool) -> float:
    """The next round number (1, 2, 3, 5, 10 times a power of ten) away from the data.

    >>> _outward(17, down=True), _outward(90, down=False), _outward(-8, down=True), _outward(0, down=True)
    (10.0, 100.0, -10.0, 0.0)
    """
    if value == 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(abs(value)))
    steps = [factor * power for factor in (1, 2, 3, 5, 10)]
    grows = (value < 0) == down
    if grows:
        size = next(step for step in steps if step >= abs(value) * (1 - 1e-12))
    else:
        size = next(step for step in reversed(steps) if step <= abs(value) * (1 + 1e-12))
    return math.copysign(size, value)


def _round(value: float) -> float:
    """To two digits, downwards, and at least 1."""
    power = 10.0 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return max(1.0, math.floor(value / power) * power) if value != 512 else value


def _is_number(table: Any, name: str) -> bool:
    from pyarrow import types

    kind = table.schema.field(name).type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_bool(table: Any, name: str) -> bool:
    from pyarrow import types

    return bool(types.is_boolean(table.schema.field(name).type))


def _values(table: Any, name: str) -> list[Any]:
    """Distinct values of a column, sorted, without empty cells."""
    return sorted({v for v in table.column(name).to_pylist() if v is not None}, key=lambda v: (str(type(v)), v))


def _from(path: Path, config: Path) -> str:
    return Path(os.path.relpath(path, config.parent)).as_posix()


def _text(text: str) -> str:
    """A text in TOML, where a character has one escape, never JSON's two for those beyond 16 bits."""
    return UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08x}", json.dumps(text, ensure_ascii=False))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else _text(str(value))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
