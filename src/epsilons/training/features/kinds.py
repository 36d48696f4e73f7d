"""What an entry of FEATURES consists of, and the checks that all entries share."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...errors import InputError

#: The argument of stored constants, which is no option of a config.
CONSTANTS = "constants"


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
    """

    compute: Callable[..., Tensor]
    origin: Callable[..., str]
    constants: Callable[..., dict[str, Tensor]] = field(default=no_constants)
    of_texts: bool = False

    def __call__(self, inputs: Any, **options: Any) -> Tensor:
        """The features of these records. Raises InputError for an unknown option, or inputs that do not fit."""
        self.check(options)
        return self.compute(inputs, **options)

    @property
    def name(self) -> str:
        """The name in FEATURES."""
        return self.compute.__name__.replace("_", "-")

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InputError for an option that these features do not take, or one that is missing."""
        parameters = list(inspect.signature(self.compute).parameters.values())[1:]
        known = [parameter.name for parameter in parameters]
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


def digest_of(constants: Mapping[str, Tensor]) -> str:
    """SHA-256 of constants, in the order of their names.

    >>> from torch import zeros
    >>> digest_of({"matrix": zeros(2)})[:8]
    '761c88cf'
    """
    whole = hashlib.sha256()
    for name, values in sorted(constants.items()):
        whole.update(f"{name} {tuple(values.shape)}".encode())
        whole.update(values.contiguous().numpy().tobytes())
    return whole.hexdigest()
