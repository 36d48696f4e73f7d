"""Features with their options and constants, as a run keeps them: the same function for training and for later records.

runs/first/
  features.safetensors   name, options and origin, and the constants; no number of a record
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, from_numpy

from ...core.files import write_bytes
from ...errors import InputError, RunError, parsed_json

# -- What an entry of FEATURES consists of, and the checks that all entries share

#: The argument of stored constants, which is no option of a config.
CONSTANTS = "constants"
#: The option of all features of texts that compares the two texts of a record.
COMPARE = "compare"


def no_constants(shape: tuple[int, ...], **options: Any) -> dict[str, Tensor]:
    """For features without stored constants."""
    return {}


@dataclass(frozen=True)
class Features:
    """One kind of features: a function of one record and of public constants.

    compute    (inputs, **options) -> (records, features), 32-bit floats
    origin     (shape of a record, **options) -> what is computed, and where the constants come from, for the guarantee
    constants  (shape of a record, **options) -> what to store with a model; `compute` takes it as `constants`
    of_texts   True if the inputs are texts, False if they are images

    Features of texts also take records of several texts, as tuples: the features of each text one after another. With
    the option compare, of pairs of texts a and b: (a, b, |a - b|, a·b).
    """

    compute: Callable[..., Tensor]
    origin: Callable[..., str]
    constants: Callable[..., dict[str, Tensor]] = field(default=no_constants)
    of_texts: bool = False

    def __call__(self, inputs: Any, **options: Any) -> Tensor:
        """The features of these records. Raises InputError for an unknown option, or inputs that do not fit."""
        self.check(options)
        compare = bool(options.pop(COMPARE, False))
        if not (self.of_texts and (compare or are_tuples(inputs))):
            return self.compute(inputs, **options)
        return joined([self.compute(texts, **options) for texts in columns_of(inputs, compare)], compare)

    @property
    def name(self) -> str:
        """The name in FEATURES."""
        return self.compute.__name__.replace("_", "-")

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InputError for an option that these features do not take, or one that is missing."""
        parameters = list(inspect.signature(self.compute).parameters.values())[1:]
        known = [*(parameter.name for parameter in parameters), *([COMPARE] if self.of_texts else [])]
        if not isinstance(options.get(COMPARE, False), bool):
            raise InputError(f"{COMPARE} must be true or false, got {options[COMPARE]!r}.")
        shown = ", ".join(option for option in known if option != CONSTANTS)
        for option in options:
            if option not in known:
                raise InputError(f"The features {self.name!r} have no option {option!r}; they take: {shown}.")
        for parameter in parameters:
            if parameter.default is parameter.empty and parameter.name not in options:
                raise InputError(f"The features {self.name!r} need the option {parameter.name!r}.")


def blocks(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows; the last one may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def check_texts(texts: Sequence[str], name: str) -> None:
    """Raise InputError unless the records are texts, at least one."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        shape = getattr(texts, "shape", None)
        got = type(texts).__name__ if shape is None else f"records of shape {tuple(shape[1:])}"
        raise InputError(f"The features {name!r} take a list of texts, one for each record, got {got}.")
    if not texts:
        raise InputError(f"The features {name!r} take at least one text, got none.")


def are_tuples(records: Any) -> bool:
    """Whether each record is a tuple or list, of several texts."""
    return isinstance(records, list | tuple) and len(records) > 0 and all(isinstance(r, list | tuple) for r in records)


def columns_of(records: Any, compare: bool) -> list[list[Any]]:
    """The first texts of all records, the second texts, …. Raises InputError for records of different length."""
    lengths = {len(record) for record in records} if are_tuples(records) else set()
    if len(lengths) != 1 or 0 in lengths or (compare and lengths != {2}):
        needed = "two texts" if compare else "the same number of texts"
        raise InputError(f"Every record needs {needed}, as a tuple, got {sorted(lengths) or 'records of one text'}.")
    return [list(texts) for texts in zip(*records, strict=True)]


def joined(parts: Sequence[Tensor], compare: bool) -> Tensor:
    """(records, features) of each text -> (records, all features)."""
    if not compare:
        return torch.cat(list(parts), 1)
    a, b = parts
    return torch.cat([a, b, (a - b).abs(), a * b], 1)


# -- Features with their options and constants, as a run keeps them: the same function for training and for later
# records

#: The file in a run's folder.
FILE = "features.safetensors"


@dataclass(frozen=True, eq=False)
class FixedFeatures:
    """A function of one record: a kind of features, its options, and its constants.

    name, options  as in a config
    origin         what is computed, and where the constants come from; the guarantee repeats it
    constants      public constants that are kept with the model; often none
    """

    kind: Features
    name: str
    options: Mapping[str, Any]
    origin: str
    constants: Mapping[str, Tensor]

    def __call__(self, inputs: Any) -> Tensor:
        """(records, features) of images (records, channels, height, width) from 0 to 1, or of texts.

        With several columns of texts, each record is a tuple of texts.
        """
        stored = {CONSTANTS: self.constants} if self.constants else {}
        return self.kind(inputs, **self.options, **stored)

    def in_place_of(self, inputs: npt.NDArray[Any], texts: npt.NDArray[np.object_] | None) -> npt.NDArray[np.float32]:
        """(records, features): those of the inputs; or, with texts (records, columns), theirs and then the inputs."""
        if texts is None:
            return np.asarray(self(from_numpy(inputs)).numpy())
        records = texts[:, 0].tolist() if texts.shape[1] == 1 else [tuple(row) for row in texts.tolist()]
        computed = self(records).numpy()
        return np.concatenate([computed, inputs], axis=1) if inputs.shape[1] else np.asarray(computed)

    def save(self, folder: Path) -> None:
        """Write name, options, origin and constants into a run's folder."""
        header = {"name": self.name, "options": json.dumps(self.options), "origin": self.origin}
        write_bytes(folder / FILE, save(dict(self.constants), metadata=header))


def fixed(table: Mapping[str, Features], name: str, options: Mapping[str, Any], inputs: Any) -> FixedFeatures:
    """The features of this name for records like these, of which only the shape is used. Raises InputError."""
    if name not in table:
        raise InputError(f"No features are called {name!r}; there are: {', '.join(table)}.")
    kind = table[name]
    if CONSTANTS in options:
        raise InputError(f"The features {name!r} have no option {CONSTANTS!r}.")
    kind.check(options)
    shape = tuple(getattr(inputs, "shape", ())[1:])
    own = {option: value for option, value in options.items() if option != COMPARE}
    origin = kind.origin(shape, **own) + ("; the two texts of a record are compared" if options.get(COMPARE) else "")
    return FixedFeatures(kind, name, options, origin, kind.constants(shape, **own))


def load_fixed(table: Mapping[str, Features], path: str | Path) -> FixedFeatures:
    """The features that a run was trained on. Raises RunError if the folder holds none."""
    file = Path(path) / FILE
    try:
        with safe_open(file, framework="pt") as content:
            header, names = content.metadata(), list(content.keys())
            constants = {name: content.get_tensor(name) for name in names}
        options = parsed_json(header["options"])
        table[header["name"]].check(options)
        return FixedFeatures(table[header["name"]], header["name"], options, header["origin"], constants)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        raise RunError(f"{file} cannot be read. A run on fixed features that was finished has this file.") from None
