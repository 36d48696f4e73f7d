"""Random operators that draw nothing: dropout keeps every entry, and noise is the same number everywhere.

So what is computed for a record changes neither with its place nor with the number of records. An operator that draws
one number alone, such as a coin for the whole batch, gives numbers from the ends of its range: both sides of a rare
decision are then seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .schemas import schema_of

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
