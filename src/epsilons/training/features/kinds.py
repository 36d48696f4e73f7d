"""What an entry of FEATURES consists of, and the checks that all entries share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError

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
