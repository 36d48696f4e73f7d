"""Ways: which of several ways to one layer's norms and weighted sum is taken, where all give the same but for rounding.

rule     by shapes alone: the same in every run, on every machine
timed    on first meeting a layer, each way is tried on made-up numbers of the same shapes, and the fastest is kept
pinned   as given: {layer: way}, such as another run's

Never on data: a value that makes products slow or norms cancel must not decide. What was chosen is part of a run, for
it sets the order of sums; `Private` writes it down before the first update that rests on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError

#: Another way than the rule's must be faster by this, lest chance decides between equals.
FASTER = 0.9
ROUNDS = 3
#: Nothing is tried that writes out more values than this.
MOST_VALUES = 2**26

#: What may be given: "rule", "timed", or {layer: way}.
Given = str | Mapping[str, str]


class Ways:
    """What is chosen, layer by layer.

    given   what was asked for
    chosen  {layer: way}; layers that are not in it go by the rule, or are timed
    """

    def __init__(self, given: Given = "rule") -> None:
        if isinstance(given, str) and given not in ("rule", "timed"):
            raise InputError(f'ways={given!r} is not known; "rule", "timed", or the ways of another run as a dict.')
        self.given: str | dict[str, str] = given if isinstance(given, str) else dict(given)
        self.is_timed = given == "timed"
        self.chosen: dict[str, str] = {} if isinstance(given, str) else dict(given)

    def choose(
        self, layer: str, usual: str, possible: Mapping[str, float], attempt: Callable[[str], object], device: str
    ) -> str:
        """The way for this layer.

        usual     what the rule says
        possible  every way there is, and how many values it writes out
        attempt   go a way once, on numbers from `made_up`
        """
        if layer in self.chosen:
            if self.chosen[layer] not in possible:
                raise InputError(
                    f"ways says {self.chosen[layer]!r} for the layer {layer!r}; there are: {', '.join(possible)}."
                )
            return self.chosen[layer]
        # Deterministic mode asks for the same sums in every run.
        if not self.is_timed or torch.are_deterministic_algorithms_enabled():
            return usual
        candidates = [usual, *(w for w, size in possible.items() if w != usual and size <= MOST_VALUES)]
        self.chosen[layer] = _fastest(candidates, attempt, device) if len(candidates) > 1 else usual
        return self.chosen[layer]


def made_up(like: Tensor) -> Tensor:
    """Normal numbers in the same shape and layout, always the same ones."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return torch.empty_like(like).copy_(numbers)


def _fastest(candidates: Sequence[str], attempt: Callable[[str], Any], device: str) -> str:
    """The first one, unless another is faster by enough; the best of a few rounds, in turn."""
    best = dict.fromkeys(candidates, float("inf"))
    for number in range(ROUNDS + 1):
        for way in candidates:
            start = _now(device)
            attempt(way)
            if number:  # the first builds kernels
                best[way] = min(best[way], _now(device) - start)
    fastest = min(candidates, key=best.__getitem__)
    return fastest if best[fastest] < FASTER * best[candidates[0]] else candidates[0]


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
