"""Random operators that draw nothing: dropout keeps every entry, and noise is the same number everywhere.

So what is computed for a record changes neither with its place nor with the number of records. An operator that draws
one number alone, such as a coin for the whole batch, gives numbers from the ends of its range: both sides of a rare
decision are then seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .states import schema_of

#: Gives a number between 0 and 1 for so many numbers.
Coin = Callable[[int], float]
#: What every random number comes from, where many are drawn.
MIDDLE = 0.5
#: Names of arguments that are the chance of dropout, such as that of attention.
_DROPOUTS = ("dropout_p", "dropout")


class Coins:
    """The results of operators that draw one number alone, by the line of code that calls them.

    Nearly 0 in the first check, nearly 1 in the second, then a hash of the line. A line that draws for each record, in
    a loop or in one operator, gives the same number for all.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._alone: dict[str, bool] = {}

    def at(self, line: str, is_alone: bool, records: int) -> float:
        """is_alone: whether one number is drawn. With one record, a number for each record looks the same."""
        if records > 1:
            self._alone[line] = is_alone
        if not (is_alone and self._alone.get(line, True)):
            return MIDDLE
        if self._step < 2:
            return (2.0**-20, 1 - 2.0**-20)[self._step]
        digest = hashlib.blake2b(f"{self._step} {line}".encode(), digest_size=4).digest()
        return (int.from_bytes(digest) + 0.5) / 2**32


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operators draw nothing inside. A single coin gives its likelier side."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        result = fixed(func, schema.named(args, kwargs or {}), lambda _: 0.499) if schema.name in DRAWS else None
        return func(*args, **(kwargs or {})) if result is None else result


def fixed(func: Any, arguments: dict[str, Any], coin: Coin) -> Any:
    """The result of an operator without its randomness; None for an operator that draws nothing."""
    schema = schema_of(func)
    if schema.name in DRAWS:
        return _drawn(DRAWS[schema.name], arguments, "self" in schema.written, coin)
    if schema.name == "native_dropout":
        x = arguments["input"]
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if schema.name == "rrelu_with_noise" and arguments.get("training"):
        slope = (float(arguments["lower"]) + float(arguments["upper"])) / 2
        x, noise = arguments["self"], arguments["noise"]
        noise.copy_(torch.where(x > 0, 1.0, slope))  # what the backward pass multiplies by
        return x * noise
    if any(arguments.get(name) for name in _DROPOUTS):
        return func(**arguments | {name: 0.0 for name in _DROPOUTS if name in arguments})
    return None


#: (arguments, a number between 0 and 1) -> one number for all entries, or a tensor.
Draw = Callable[[dict[str, Any], Callable[[], float]], float | Tensor]


def _drawn(draw: Draw, arguments: dict[str, Any], is_in_place: bool, coin: Coin) -> Tensor:
    x = arguments.get("self")
    value = draw(arguments, lambda: coin(math.prod(arguments["size"]) if x is None else x.numel()))
    with torch.no_grad():
        if is_in_place:
            return arguments["self"].copy_(torch.as_tensor(value))  # type: ignore[no-any-return]
        return value if isinstance(value, Tensor) else _new(arguments).fill_(value)


def _new(arguments: dict[str, Any]) -> Tensor:
    """A new tensor like this one, or of this size."""
    options = {name: arguments[name] for name in ("dtype", "device") if arguments.get(name) is not None}
    if "self" in arguments:
        return torch.empty_like(arguments["self"], **options)
    return torch.empty(list(arguments["size"]), **({"dtype": torch.int64} if "high" in arguments else {}) | options)


def _integer(arguments: dict[str, Any], unit: Callable[[], float]) -> float:
    low, high = arguments.get("low", arguments.get("from")) or 0, arguments.get("high", arguments.get("to"))
    return int(low) if high is None else int(low) + int(unit() * (int(high) - int(low)))


def _normal(arguments: dict[str, Any], unit: Callable[[], float]) -> float | Tensor:
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    are_many = isinstance(mean, Tensor) or isinstance(std, Tensor)
    return mean + std * (2 * (MIDDLE if are_many else unit()) - 0.5)  # type: ignore[no-any-return]


def _coins(arguments: dict[str, Any], unit: Callable[[], float]) -> float | Tensor:
    """One chance for all entries, or a tensor of chances: then an entry is 1 if its chance is large enough."""
    chances, place = arguments.get("p", arguments["self"]), unit()
    if isinstance(chances, Tensor):
        return (chances > place).to(arguments["self"].dtype)
    return float(chances > 0 if place == MIDDLE else place < chances)


DRAWS: dict[str, Draw] = {
    "bernoulli": _coins,
    "uniform": lambda a, unit: float(a["from"]) + unit() * (float(a["to"]) - float(a["from"])),
    "normal": _normal,
    **dict.fromkeys(["exponential", "log_normal", "geometric", "cauchy"], lambda a, unit: 1.0),
    **dict.fromkeys(["rand", "rand_like"], lambda a, unit: unit()),
    **dict.fromkeys(["randn", "randn_like"], _normal),
    **dict.fromkeys(["random", "randint", "randint_like"], _integer),
    # A permutation, and not the identity: it moves records.
    "randperm": lambda a, unit: torch.arange(int(a["n"]) - 1, -1, -1, device=a.get("device")),
    "multinomial": lambda a, unit: a["self"].argsort(-1, descending=True)[..., : a["num_samples"]],
}


# -- The altered forms in which a physical batch is computed
#
# as it is    the form that all others are compared with
# exchanged   some records kept, the others replaced by copies of one of them; every record is kept in some form
# resized     one record less; half of them, or more than there are, by copies
# copied      a single record, with copies of itself
# earlier     all records, with numbers in attributes of modules as they were before in a draw
# alone       one record; the shortest one alone, so that padding has another length. For a foreign loop with a copy of
#             itself, because such loops drop the dimension of the records if it is 1 (squeeze)

#: Draws seldom hold more records than expected and this many of its roots.
ROOTS = 8


@dataclass(frozen=True)
class Variant:
    """One altered form of a physical batch of n records.

    rows   the record in each place
    here   the places of the records that are compared
    there  their places in the batch as it is
    kind   "as it is", "exchanged", "resized", "copied", "earlier" or "alone"
    """

    rows: Sequence[int]
    here: Sequence[int]
    there: Sequence[int]
    kind: str


@dataclass
class Variants:
    """All forms of one physical batch.

    count     how many records it holds
    most      how many a physical batch can hold
    step      of the run: which halves are exchanged changes from check to check
    lengths   (count,) how much each record holds; all equal if that is not known
    fewest    how many records a form holds at least, by copies
    """

    count: int
    most: int
    step: int
    lengths: Sequence[int]
    fewest: int = 1

    def __post_init__(self) -> None:
        half = np.random.default_rng(self.step).permutation(self.count)[: self.count // 2].tolist()
        #: Sets of records that are kept where the others are exchanged.
        self.halves = [sorted(half), sorted(set(range(self.count)) - set(half))] if self.count > 1 else [[0]]
        self.shortest, longest = int(np.argmin(self.lengths)), int(np.argmax(self.lengths))
        #: A record that is padded to the batch's own length.
        self.longest = longest if self.varies else self.count - 1

    @property
    def varies(self) -> bool:
        """Whether records may be padded to different lengths."""
        return len(set(self.lengths)) > 1

    def separate_all(self) -> None:
        """More exchanged forms, so that any two records are in different halves of some form."""
        bits, records = range(max(1, (self.count - 1).bit_length())), range(self.count)
        halves = [[i for i in records if (i >> bit & 1) == side] for bit in bits for side in (0, 1)]
        self.halves = [half for half in halves if half]

    @property
    def alone(self) -> list[int]:
        """Records that are computed alone."""
        return [self.longest, self.shortest] if self.varies else [self.longest]

    def exchanged(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Others replaced by copies of a kept record; of the longest, so that nothing is padded to another length."""
        copied, kept_places = self.longest if self.varies else kept[-1], set(kept)
        return tuple(i if i in kept_places else copied for i in range(self.count))

    def __iter__(self) -> Iterator[Variant]:
        everyone = range(self.count)
        yield Variant(everyone, everyone, everyone, "as it is")
        if self.count == 1:
            yield Variant(everyone, everyone, everyone, "as it is")
            for records in sorted({min(2, self._largest), self._largest} - {1}):
                yield Variant([0] * records, [0], [0], "copied")
            return
        for kept in self.halves:
            yield Variant(self.exchanged(kept), kept, kept, "exchanged")
        for rows in self._resized():
            yield Variant(rows, range(len(rows)), rows, "resized")
        for place in self.alone:
            yield Variant([place] * self.fewest, [0], [place], "alone")

    def _resized(self) -> list[tuple[int, ...]]:
        """One record less, and half of them; in every second check as many as a draw may hold.

        The places of all records change.
        """
        more = [n for n in range(self.count + 1, self._largest + 1) if math.gcd(n - self.count, 6) == 1]
        if more and self.step > 0 and round(math.log10(self.step)) % 2 == 0:
            return [tuple((i + 1) % self.count for i in range(more[-1]))]
        everyone = range(self.count)
        dropped = 0 if self.longest != 0 else 1
        one_less = tuple(i for i in everyone if i != dropped)
        half = tuple(sorted({*everyone[: self.count // 2], self.longest}))
        return [rows for rows in dict.fromkeys([one_less, half]) if len(rows) not in (1, self.count)]

    @property
    def _largest(self) -> int:
        return min(self.most, self.count + math.ceil(ROOTS * math.sqrt(self.count)))
