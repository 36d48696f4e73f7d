"""A trained model with its preprocessing: from a run's folder, or from a release folder alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model
from torch import nn

from ... import release_folder
from ...errors import EpsilonsError, InputError, RunError
from ...model_file import ModelFile, Named, read_model_file
from ...tabular.cells import Unread
from ..checkpoints import restoring
from ..features import FixedFeatures, features_of_run
from ..models import MODELS, build
from .predictions import Predictions, joined, predictions_of
from .records import inputs_of

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
        if release_folder.is_release(folder):
            release_folder.check_sums(folder)
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
    if not (folder / release_folder.WEIGHTS).is_file():
        inside = sorted(file.parent.name for file in folder.glob(f"*/{release_folder.WEIGHTS}"))
        hint = f"It holds {', '.join(inside)}: give one of them." if inside else "Was the run finished?"
        raise RunError(f"{folder} has no {release_folder.WEIGHTS}. {hint}")


def _built(named: Named | None, folder: Path) -> nn.Module:
    """The model of the library's table, without weights. The caller's generators do not move."""
    own = OWN_CLASS.format(path=str(folder), weights=str(folder / release_folder.WEIGHTS))
    if named is None:
        raise RunError(f"The model in {folder} is the caller's own, and the library cannot build it. {own}")
    if named.name not in MODELS:
        raise RunError(f"The model in {folder} is {named.name!r:.80}, and predictions run no code that it names. {own}")
    try:
        with torch.device("meta"):  # takes no memory: the weights have it
            return build(named.name, named.shape, named.outputs, **named.options)
    except (EpsilonsError, TypeError) as error:
        raise RunError(f"{folder / release_folder.MODEL} describes no model that can be built: {error}") from None


def _load_weights(network: nn.Module, folder: Path) -> None:
    """Raises RunError unless the file has all weights of this network, in its shapes, and no others."""
    path = folder / release_folder.WEIGHTS
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
    if isinstance(model, str) and (folder / release_folder.ENCODER).is_dir():
        features = replace(features, options={**features.options, "model": str(folder / release_folder.ENCODER)})
    if not isinstance(model, str):
        return features
    options = {name: value for name, value in features.options.items() if name != "compare"}
    found, expected = (_DIGEST.search(text) for text in (features.kind.origin((), **options), features.origin))
    if found is None or expected is None or found[1] != expected[1]:
        raise RunError(
            f"The encoder {model!r} does not have the weights that the model in {folder} was trained on. Restore them."
        )
    return features
