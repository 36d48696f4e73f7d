"""model.json: how a trained model is built, how a record becomes its input, what its outputs mean. No torch in here.

The file holds what the config stated and nothing of a record: no path, no budget, no count. With model.safetensors, and
features.safetensors if there are fixed features, it is all that predictions need.

{
  "document": "epsilons model", "schema": 1,
  "model": {"name": "mlp", "options": {"hidden": [64]}, "shape": [12], "outputs": 2},
  "inputs": {"kind": "table", "features": {"numeric": {"age": [0, 120, false]}, "categorical": {"job": 8}, …}},
  "outputs": {"kind": "classes", "target": "income", "classes": ["no", "yes"], "bounds": null},
  "fixed_features": false,
  "provenance": [{"column": "age", "what": "bounds", "source": "declared"}, …],
  "not_covered": []
}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.files import sha256_of, write_bytes, write_json
from ..data.arrays import HowKnown, What
from ..data.tables import Features
from ..errors import RunError

FILE = "model.json"
#: More inputs of one record are refused: 1,024 records of as many take 1 GB.
MOST_INPUTS = 2**18

Size = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Named(_Section):
    """A model of the library's table, with the shape of one record's input and the number of outputs."""

    name: str
    options: dict[str, Any] = {}
    shape: Annotated[tuple[Size, ...], Field(max_length=64)]  # as of any array
    outputs: Size


class TableInputs(_Section):
    """Columns of a table become inputs by these rules, which hold neither target nor columns left out."""

    kind: Literal["table"] = "table"
    features: Features


class ImageInputs(_Section):
    """Encoded images: pixels from 0 to 1, minus mean, divided by std, one of each per channel or one for all."""

    kind: Literal["images"] = "images"
    mean: Annotated[tuple[Finite, ...], Field(min_length=1, max_length=4)]
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, max_length=4)]


class ArrayInputs(_Section):
    """Arrays (records, …) as in training; 8-bit unsigned integers are scaled to 0..1."""

    kind: Literal["arrays"] = "arrays"


class Outputs(_Section):
    """What the model's outputs mean.

    kind     "classes": one logit per class; "binary": logits of 0 or 1; "number"; "raw": the caller's own
    target   the column that was predicted
    classes  their names, in order
    bounds   (low, high, log) between which a number was scaled to -1..1; None if it was not scaled
    """

    kind: Literal["classes", "binary", "number", "raw"]
    target: str | None = None
    classes: tuple[str, ...] | None = None
    bounds: tuple[Finite, Finite, bool] | None = None


class Origin(_Section):
    """Where bounds, categories or classes come from, as in `data.provenance`."""

    column: str
    what: What
    source: HowKnown


class ModelFile(_Section):
    """The content of model.json.

    model           None if the library cannot build it: the caller's own
    fixed_features  True if features.safetensors holds what computes the inputs
    not_covered     in a release: why the guarantee does not cover all of it; empty if it does
    """

    document: Literal["epsilons model"] = "epsilons model"
    schema_: Literal[1] = Field(1, alias="schema")
    model: Named | None
    inputs: Annotated[TableInputs | ImageInputs | ArrayInputs, Field(discriminator="kind")]
    outputs: Outputs
    fixed_features: bool = False
    provenance: tuple[Origin, ...] = ()
    not_covered: tuple[str, ...] = ()

    @property
    def undeclared(self) -> list[Origin]:
        """What was read off the data, or may have been."""
        return [origin for origin in self.provenance if origin.source != "declared"]

    def write(self, folder: Path, release: bool = False) -> Path:
        """Write model.json into a folder."""
        return write_json(folder / FILE, self.model_dump(mode="json", by_alias=True), release)


def read_model_file(folder: Path) -> ModelFile:
    """The model.json of a run's folder or of a release. Raises RunError if there is none, or it is damaged."""
    path = folder / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise RunError(
            f"{folder} has no {FILE}, which says how a record becomes an input. `epsilons train` and `fit` write it "
            "at the end of a run; runs of earlier versions, and of make_private, have none. Load model.safetensors "
            "into your own class with safetensors.torch.load_model."
        ) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None
    try:
        return _bounded(ModelFile.model_validate_json(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise RunError(
            f"{path} is damaged, or of a newer version: {key}: {first['msg'].lower()}. Restore the file."
        ) from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}. Restore the file.") from None


def _bounded(file: ModelFile) -> ModelFile:
    """The same. Raises ValueError if columns give other inputs than the model takes: its weights bound their number."""
    if isinstance(file.inputs, TableInputs):
        rules = file.inputs.features
        sizes = [values if isinstance(values, int) else len(values) for values in rules.categorical.values()]
        width = sum(sizes, len(rules.numeric) + len(rules.dates)) if rules.tokens is None else rules.tokens.length
        takes = (width,) if file.model is None or file.fixed_features else file.model.shape
        if min(sizes, default=1) < 1 or width > MOST_INPUTS or takes != (width,):
            raise ValueError(f"its columns give {width:,} inputs, and the model takes {takes}")
    return file


# -- A release folder: the files that are copied to those who use a model, with their checksums. No torch in here
#
# release/
#       README.md              the model card, as Hugging Face uses it
#       guarantee.txt          the guarantee in words
#       model.json             how the model is built, how a record becomes its input, what its outputs mean
#       model.safetensors      the weights
#       features.safetensors   with fixed features: their name, options and public constants
#       encoder/               with an encoder from a local folder: its files
#       SHA256SUMS             a checksum of every file above, as `sha256sum -c` reads it
#
# The checksums find damage and careless edits. They are no signature: who can change a file can change them, too.

SUMS = "SHA256SUMS"
CARD, GUARANTEE, WEIGHTS = "README.md", "guarantee.txt", "model.safetensors"
FIXED, ENCODER, MODEL = "features.safetensors", "encoder", "model.json"

#: The files that every release has.
NEEDED = (CARD, GUARANTEE, MODEL, WEIGHTS)

_LINE = re.compile(r"([0-9a-f]{64})  ((?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*)")


def is_release(folder: Path) -> bool:
    """True for a folder with checksums."""
    return (folder / SUMS).is_file()


def write_sums(folder: Path) -> Path:
    """Write the checksums of all files in the folder."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in files if name != SUMS]
    return write_bytes(folder / SUMS, "".join(lines).encode("ascii"), release=True)


def check_sums(folder: Path) -> tuple[str, ...]:
    """The names of the files that are as they were released. Raises RunError if one of them is missing or changed."""
    sums = _read_sums(folder)
    missing = [name for name in (*NEEDED, *sums) if name not in sums or not (folder / name).is_file()]
    if missing:
        raise RunError(f"The release {folder} is not complete: {missing[0]} is missing. Copy the whole folder again.")
    for name, digest in sums.items():
        if sha256_of(folder / name) != digest:
            raise RunError(
                f"{folder / name} is not as it was released: its checksum differs from that in {SUMS}. Copy the whole "
                "folder again."
            )
    return tuple(sums)


def _read_sums(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    try:
        lines = (folder / SUMS).read_bytes().decode("ascii").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError):
        lines = ["?"]
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in matches if match is not None}
    if len(sums) != len(lines) - 1 or lines[-1] or not sums:
        raise RunError(f"{folder / SUMS} is damaged: it is not a list of checksums. Copy the whole folder again.")
    return sums
