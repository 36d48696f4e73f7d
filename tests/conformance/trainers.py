"""The libraries that the suite examines. To add one: a class that meets `adapters.Trainer`, and a line per table."""

from __future__ import annotations

import epsilons
from epsilons.clipping import ENGINES

from .adapters import Ours, Trainer
from .opacus_adapter import Opacus

#: By the name that --trainer takes: a library as it is used by default.
TRAINERS: dict[str, Trainer] = {"epsilons": Ours(), "opacus": Opacus()}
#: All its ways to compute gradients.
EACH: dict[str, list[Trainer]] = {
    "epsilons": [Ours(name) for name in ENGINES],
    "opacus": [Opacus(mode) for mode in ("hooks", "functorch")],
}
#: What `solve` takes as `how`.
METHODS: dict[str, list[str]] = {
    "epsilons": [f"{s}, {a}" for s in (*epsilons.planning.STRATEGIES, "scale by weight") for a in ("pld", "rdp")],
    "opacus": ["uniform, prv", "uniform, rdp"],
}
