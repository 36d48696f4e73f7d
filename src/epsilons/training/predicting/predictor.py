"""A trained model with its preprocessing: from a run's folder, or from a release folder alone."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from ...core.files import for_owner
from ...core.progress_line import live_line
from ...errors import DataError, EpsilonsError, InputError, RunError
from ...ledger import model_file
from ...ledger.model_file import ModelFile, Named, Outputs, TableInputs, read_model_file
from ...models import MODELS, build
from ...tabular import UNSTATED, Marks, are_decimal, is_text
from ...tabular.cells import Unread
from ...tabular.table_files import csv, parquet, pc, pyarrow
from ..checkpoints import restoring
from ..features import FixedFeatures, features_of_run
from .table_parts import check_columns, inputs_of, parts_of

# -- Predictions for the rows of a table, as arrays and as columns of a table

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts, one row per record, in the order of the table.

    classes        names of the classes, in order; None if the target is a number
    probabilities  (rows, classes); of targets that are 0 or 1, (rows, outputs) probabilities of 1; else None
    values         (rows,) in the target's own units; (rows, outputs) if the model has several; None for classes
    """

    classes: tuple[str, ...] | None
    probabilities: Array | None
    values: Array | None

    @property
    def labels(self) -> npt.NDArray[np.str_]:
        """(rows,) the name of the most probable class. Raises RunError if the target has no classes."""
        if self.classes is None or self.probabilities is None:
            raise RunError("This model predicts no classes. Use .values, or .probabilities.")
        return np.asarray(np.array(self.classes)[self.probabilities.argmax(1)])

    def to_table(self) -> Any:
        """A pyarrow.Table: `prediction` and `probability_CLASS` of each class, or `prediction` alone for a number."""
        if self.probabilities is None:
            assert self.values is not None
            return pyarrow.table(_numbered("prediction", self.values))
        if self.classes is None:
            return pyarrow.table(_numbered("probability", self.probabilities))
        columns = zip(self.classes, self.probabilities.T, strict=True)
        return pyarrow.table({"prediction": self.labels, **{f"probability_{name}": column for name, column in columns}})

    def __len__(self) -> int:
        return len(self.values if self.probabilities is None else self.probabilities)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """The size and the classes, and no prediction: it is about a person."""
        of = "" if self.classes is None else f", classes {', '.join(self.classes)}"
        return f"Predictions({len(self):,} rows{of})"


def _numbered(name: str, values: Array) -> dict[str, Any]:
    """One column, or one per output."""
    if values.ndim == 1 or values.shape[1] == 1:
        return {name: values.reshape(len(values))}
    return {f"{name}_{number}": column for number, column in enumerate(values.T)}


def predictions_of(outputs: Tensor, meaning: Outputs) -> Predictions:
    """What the outputs (rows, …) of a model mean. Raises RunError if they do not have the shape of that meaning."""
    values = outputs.detach().double().cpu()
    values = values[:, None] if values.ndim == 1 else values.flatten(1)
    if meaning.kind == "classes":
        names = meaning.classes or tuple(map(str, range(values.shape[1])))
        if outputs.ndim != 2 or values.shape[1] != len(names):
            raise RunError(
                f"The model has outputs of shape {tuple(outputs.shape[1:])} for {len(names)} classes. Its weights or "
                "model.json belong to another model."
            )
        return Predictions(names, torch.softmax(values, 1).numpy(), None)
    if meaning.kind == "binary":
        return Predictions(None, torch.sigmoid(values).numpy(), None)
    numbers = values.numpy()
    if meaning.bounds is not None:
        numbers = in_units(numbers, *meaning.bounds)
    return Predictions(None, None, numbers[:, 0] if numbers.shape[1] == 1 else numbers)


def in_units(scaled: Array, low: float, high: float, log: bool) -> Array:
    """The inverse of the scaling of a target to -1..1 (`data.tables`). Predictions may lie beyond the bounds.

    >>> in_units(np.array([-1.0, 0.0, 1.0]), 0.0, 10.0, log=False)
    array([ 0.,  5., 10.])
    """
    ends = np.arcsinh([low, high]) if log else np.array([low, high])
    values = ends[0] + (scaled + 1) / 2 * (ends[1] - ends[0])
    return np.asarray(np.sinh(values) if log else values)


def joined(parts: Sequence[Predictions], meaning: Outputs) -> Predictions:
    """Predictions of several parts of a table, one after another."""
    if not parts:
        return predictions_of(torch.empty(0, len(meaning.classes or "1")), meaning)
    # One of both is None in all parts.
    columns = zip(*((part.probabilities, part.values) for part in parts), strict=True)
    both = (None if arrays[0] is None else np.concatenate(arrays) for arrays in columns)
    return Predictions(parts[0].classes, *both)


# -- A trained model with its preprocessing: from a run's folder, or from a release folder alone

OWN_CLASS = (
    "Build it yourself and pass it: epsilons.Predictor.load({path!r}, model=yours). Or load the weights into your own "
    "class: safetensors.torch.load_model(yours, {weights!r})."
)
_DIGEST = re.compile("SHA-256 ([0-9a-f]{16})")


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model that predicts rows of tables, with the preprocessing of its training.

    path         the folder it was loaded from
    model        the network, in evaluation mode
    description  how a record becomes an input, and what outputs mean (`model.json`)
    features     the fixed features of the inputs; None without
    """

    path: Path
    model: nn.Module
    description: ModelFile
    features: FixedFeatures | None

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None, device: str | torch.device = "cpu") -> Predictor:
        """The model in a run's folder (`epsilons train`, `fit`) or in a release folder.

        model   your own network of the same class, which gets the weights; None for models of the library's table
        device  where predictions are computed; "auto" for a GPU if there is one

        No code is loaded from the folder, and no pickle is read. Raises RunError if the folder holds no trained model,
        a file of it is missing or damaged, or the library cannot build the model.
        """
        folder = Path(path)
        if model_file.is_release(folder):
            model_file.check_sums(folder)
        _check_folder(folder)
        description = read_model_file(folder)
        with restoring(f"The features in {folder} cannot be loaded"):
            features = _features(folder) if description.fixed_features else None
        network = _built(description.model, folder) if model is None else model
        _load_weights(network, folder)
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        return cls(folder, network.to(where).eval(), description, features)

    def predict(self, table: Any) -> Predictions:
        """Predict every row of a table.

        table  a path to a .csv or .parquet file, a pyarrow.Table, a dict of columns, or a DataFrame of pandas or
               polars; for models of arrays an array (records, …), an .npy file, or a folder with `inputs`

        Columns may be in any order, and others than those of training are ignored: the target, too. Unknown categories
        and empty cells are handled as in training. Raises DataError for a missing column, which it names, and for a
        cell that is not a number where training had numbers.
        """
        return joined(list(self.stream(table)), self.description.outputs)

    @torch.no_grad()
    def stream(self, table: Any, unread: Unread = None) -> Iterator[Predictions]:
        """The same, for about 1,000 rows at a time, so that memory is bounded however long a file is.

        unread  a list that takes note of cells that are no number or date, before the predictions of their rows, in
                which they count as empty; without it, they are refused
        """
        where = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for inputs in inputs_of(table, self.description, self.features, unread):
            try:
                outputs = self.model(torch.from_numpy(inputs).to(where))
            except EpsilonsError:
                raise
            except Exception as error:  # a network of the caller may raise anything
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise InputError(f"The model cannot take these records (shape {inputs.shape[1:]}): {reason}.") from None
            yield predictions_of(outputs, self.description.outputs)

    def __repr__(self) -> str:
        named = self.description.model
        return f"Predictor({str(self.path)!r}, {type(self.model).__name__ if named is None else named.name})"


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder. Give the folder of a run, e.g. runs/first, or of a release.")
    if not (folder / model_file.WEIGHTS).is_file():
        inside = sorted(file.parent.name for file in folder.glob(f"*/{model_file.WEIGHTS}"))
        hint = f"It holds {', '.join(inside)}: give one of them." if inside else "Was the run finished?"
        raise RunError(f"{folder} has no {model_file.WEIGHTS}. {hint}")


def _built(named: Named | None, folder: Path) -> nn.Module:
    """The model of the library's table, without weights. The caller's generators do not move."""
    own = OWN_CLASS.format(path=str(folder), weights=str(folder / model_file.WEIGHTS))
    if named is None:
        raise RunError(f"The model in {folder} is the caller's own, and the library cannot build it. {own}")
    if named.name not in MODELS:
        raise RunError(f"The model in {folder} is {named.name!r:.80}, and predictions run no code that it names. {own}")
    try:
        with torch.device("meta"):  # takes no memory: the weights have it
            return build(named.name, named.shape, named.outputs, **named.options)
    except (EpsilonsError, TypeError) as error:
        raise RunError(f"{folder / model_file.MODEL} describes no model that can be built: {error}") from None


def _load_weights(network: nn.Module, folder: Path) -> None:
    """Raises RunError unless the file has all weights of this network, in its shapes, and no others."""
    path = folder / model_file.WEIGHTS
    with restoring(f"The weights in {path} cannot be loaded into {type(network).__name__}"):
        if any(p.is_meta for p in network.parameters()):
            weights = {name: value.to(torch.float32, copy=True) for name, value in load_file(path).items()}
            network.load_state_dict(weights, assign=True)
        else:
            load_model(network, str(path))


def _features(folder: Path) -> FixedFeatures:
    """The fixed features of a run or a release. Raises RunError if an encoder is not the one of training."""
    features = features_of_run(folder)
    model = features.options.get("model")
    if isinstance(model, str) and (folder / model_file.ENCODER).is_dir():
        features = replace(features, options={**features.options, "model": str(folder / model_file.ENCODER)})
    if not isinstance(model, str):
        return features
    options = {name: value for name, value in features.options.items() if name != "compare"}
    found, expected = (_DIGEST.search(text) for text in (features.kind.origin((), **options), features.origin))
    if found is None or expected is None or found[1] != expected[1]:
        raise RunError(
            f"The encoder {model!r} does not have the weights that the model in {folder} was trained on. Restore them."
        )
    return features


# -- Predictions into a .csv or .parquet file, part by part: whole or not at all, and readable by the owner alone


def write(predictor: Predictor, table: Path, output: Path, keep: list[str], quiet: bool, mark: bool) -> tuple[int, int]:
    """Predict every row of the table in a file, and write the predictions. Returns the numbers of rows: all, and bad.

    keep  columns of the table that are copied in front of the predictions
    mark  True to leave the predictions of rows with unreadable cells empty, with the reason in a last column

    Raises DataError for a table that does not fit, InputError if the output cannot be written.
    """
    rows = bad = 0
    unread: Unread = [] if mark else None
    rules = predictor.description.inputs
    kept = _kept(table, keep, rules.features.marks if isinstance(rules, TableInputs) else UNSTATED)
    with _written(output) as temporary, ExitStack() as stack:
        hidden, writer = quiet or not sys.stderr.isatty(), None
        show = stack.enter_context(live_line(["{task.completed:,.0f} rows predicted"], hidden=hidden))
        for part in predictor.stream(table, unread):
            columns = part.to_table() if unread is None else _marked(part.to_table(), unread)
            bad += columns.column(0).null_count
            if keep:
                columns = _beside(next_rows(kept, len(part)), columns)
            columns = inert(columns) if output.suffix == ".csv" else columns
            if writer is None:  # the first part has the columns of all
                writer = stack.enter_context(_opened(temporary, output.suffix == ".csv", columns.schema))
            writer.write_table(columns)
            rows += len(part)
            show(completed=rows)
        if not rows:
            raise DataError(f"{table} has no rows to predict.")
    return rows, bad


def _marked(columns: Any, unread: list[Any]) -> Any:
    """The predictions of one part, empty for rows with such cells, and why. The next part begins without any."""
    reasons = ["; ".join(why for bad, why in unread if bad[row]) for row in range(len(columns))]
    unread.clear()
    good = pyarrow.array([not reason for reason in reasons])
    cells = [pc.if_else(good, column, pyarrow.scalar(None, column.type)) for column in columns.columns]
    return pyarrow.table([*cells, reasons], [*columns.column_names, "not_predicted"])


# -- columns that are kept ---------------------------------------------------------------------------------------------


def _kept(table: Path, keep: Sequence[str], marks: Marks) -> Iterator[Any]:
    """Parts of the columns to keep."""
    if not keep:
        return iter(())
    path, names, parts = parts_of(table, keep, marks)
    check_columns(keep, names, path, "which --keep names")
    return (part.select(list(keep)) for part in parts)


def next_rows(parts: Iterator[Any], rows: int) -> Any:
    """The next rows of these parts, which are cut as those of the inputs. Raises DataError if they are not."""
    part = next(parts, None)
    if part is None or len(part) != rows:
        raise DataError("The table changed while it was read. Predict again.")
    return part


def _beside(kept: Any, columns: Any) -> Any:
    for name in kept.column_names:
        if name in columns.column_names:
            raise InputError(f"--keep {name!r}: the output has a column of this name. Rename it in the table.")
    for index, name in enumerate(columns.column_names):
        kept = kept.append_column(columns.schema.field(index), columns.column(name))
    return kept


# -- the file ----------------------------------------------------------------------------------------------------------


def inert(columns: Any) -> Any:
    """Columns for a .csv file that is safe in a spreadsheet program: no text, and no name, is taken for a formula.

    An apostrophe is written before = + - @ where a text begins, or after a mark that may separate cells there. Texts
    that are numbers, such as -5.2, stay as they are.
    """

    def of(texts: Any) -> Any:
        changed = pc.replace_substring_regex(texts, "(^|[;|\t\r\n])([ \u00a0]*)([=+@＝＋－＠-])", r"\1\2'\3")
        return pc.if_else(pc.or_(are_decimal(texts), are_decimal(texts, ",")), texts, changed)

    cells = [of(column) if is_text(column) else column for column in columns.columns]
    return pyarrow.table(cells, of(pyarrow.array(columns.column_names)).to_pylist())


def _opened(path: Path, is_csv: bool, schema: Any) -> Any:
    if is_csv:
        return csv.CSVWriter(path, schema, write_options=csv.WriteOptions(quoting_style="needed"))
    return parquet.ParquetWriter(path, schema)


@contextmanager
def _written(output: Path) -> Iterator[Path]:
    """A temporary file, which gets its name when all is written."""
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        os.close(for_owner(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield temporary
        os.replace(temporary, output)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}. Choose another place.") from None
    finally:
        temporary.unlink(missing_ok=True)
