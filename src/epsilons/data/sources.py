"""The records that a config's [data] names: a data set with a name, an image file, a folder of tensors, or a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import DataError
from ..tabular import is_table
from . import DATASETS, load
from .arrays import Arrays, Source, check_class_indices
from .images import ImageSet, image_table, images, is_image_table
from .tables import Features, Kept, table
from .tensors import is_folder_of_tensors, tensors

#: The classes of the named data sets, ten each. They are public.
_DIGITS = tuple(map(str, range(10)))


def is_named(where: str, folder: Path) -> bool:
    """True for a data set with a name. It has its own train and test splits."""
    return where in DATASETS or _is_on_the_hub(where, folder)


def read_source(
    where: str,
    split: str,
    folder: Path,
    *,
    target: str = "label",
    classes: Sequence[str] | None = None,
    number: bool = False,
    features: Features | None = None,
    aside: Mapping[str, str] | None = None,
    pixels: bool = False,
    kept: Kept | None = None,
) -> Source:
    """The records of a file, a folder or a named data set.

    where     a path, taken from `folder`, or a name
    split     "train" or "test": of a named data set; for files it is used in messages only
    target    a table's target column
    classes   names of the classes, in order
    number    True if the target is a number, and not a class
    features  how a table's columns become inputs
    aside     column -> the key of the config that names it: columns of a table that are never inputs
    pixels    images have pixels from 0 to 1, and are not normalised
    kept      which records of a table are used

    Raises DataError if there are no such data, or they cannot be used.
    """
    path = folder / where
    what = "training data" if split == "train" else "test data"
    names = tuple(classes) if classes is not None else None
    undeclared = names is None and not number
    if where in DATASETS:
        return _named(load(where, split, pixels), names or _DIGITS, where)
    if is_folder_of_tensors(path):
        source = tensors(path, what, names)
        if source.classes is not None and undeclared:  # float targets need no classes
            raise _undeclared(str(path))
        return source
    if path.is_dir():
        raise DataError(f"The {what} folder {path} holds no inputs.npy, inputs.safetensors or inputs.pt.")
    on_the_hub = _is_on_the_hub(where, folder)
    if undeclared and (is_image_table(path) or is_table(path) or on_the_hub):
        raise _undeclared(where if on_the_hub else str(path))
    if is_image_table(path):
        return image_table(path, what, names, pixels)
    if is_table(path):
        return table(path, what, target, None if number else names, features or Features(), aside or {}, kept)
    if on_the_hub:
        return _named(images(ImageSet(where, (where,)), split, pixels), names, where)
    raise DataError(
        f"The {what} {where!r} is neither a file or folder in {folder.resolve()} nor a data set with a name "
        f"({', '.join(DATASETS)}, or a hub name owner/name)."
    )


def _undeclared(what: str) -> DataError:
    return DataError(
        f"The classes of {what} are not named: write them in data.classes, in order, or how many there are. They are "
        "not read off the data, because the set of classes that occur is an output of the data. (`epsilons init` "
        "drafts the line.)"
    )


def _is_on_the_hub(where: str, folder: Path) -> bool:
    return where.count("/") == 1 and not Path(where).suffix and not (folder / where).exists()


def _named(arrays: Arrays, classes: tuple[str, ...] | None, where: str) -> Source:
    """A named data set, with a name for every class."""
    return Source(arrays, check_class_indices(arrays.targets, classes, f"labels of {where}"))
