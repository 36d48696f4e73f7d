"""Features with their options and constants, as a run keeps them: the same function for training and for later records.

runs/first/
  features.safetensors   name, options and origin, and the constants; no number of a record
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, from_numpy

from ...errors import InputError, RunError
from ...escaping import parsed_json
from ...files import write_bytes
from .kinds import COMPARE, CONSTANTS, Features

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
