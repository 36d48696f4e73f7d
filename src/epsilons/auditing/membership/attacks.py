"""The attacks by name.

To add an attack: write a function `(signals) -> scores` in a new file, and add a line to ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .lira import lira, lira_fixed, lira_offline, lira_raw
from .lira_shrunk import lira_shrunk
from .loss import loss
from .rmia import rmia, rmia_offline
from .signals import Float32Array, Signals

#: An attack gives every shadow, as the target of all others, one score per record, (shadows, records) in 32 bits. A
#: higher score is evidence for "member". A score must not depend on the target's own coins, which are to be guessed.
Attack = Callable[[Signals], Float32Array]

ATTACKS: Mapping[str, Attack] = {
    "lira": lira,
    "lira-offline": lira_offline,
    "lira-fixed": lira_fixed,
    "lira-shrunk": lira_shrunk,
    "lira-raw": lira_raw,
    "rmia": rmia,
    "rmia-offline": rmia_offline,
    "loss": loss,
}

DEFAULT_ATTACKS = ("lira-shrunk", "rmia")

#: Attacks that refuse signals without a population.
POPULATION_ATTACKS = frozenset({"rmia", "rmia-offline"})
