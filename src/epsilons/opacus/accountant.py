"""What was spent, under the names of Opacus' accountants."""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..accounting import ACCOUNTANTS, noise_for
from ..accounting.calibration import Histories, batch_epsilon
from ..core.disclosure import SMALLEST_SHOWN, has_small_cells, rounded_up
from ..core.mechanism import FloatArray, SampledGaussian
from ..errors import EpsilonsWarning, InputError, named
from ..training.private import Private

#: The accountants of Opacus and ours for them.
NAMES = {"prv": "pld", "pld": "pld", "rdp": "rdp"}

_SPENT_BEFORE = (
    "The checkpoint that was loaded has spent privacy on these records already, and the plan would spend the whole "
    "budgets once more. To be able to continue an interrupted run, give make_private_with_epsilon run_dir= and "
    "resume=True from the beginning. To train on other records, load the weights alone: module.load_state_dict."
)

_CUT_SHORT = (
    "This is what was charged. Training was ended, or a pass over the data loader was left, before all planned steps "
    "were made. If losses or other values of private records led to it, what the whole plan spends must be claimed: "
    "loader.private.epsilon_spent()."
)

#: (noise multiplier, sample rate, steps), as Opacus keeps them.
Entry = tuple[float, float, int]


class Accountant:
    """The spend of an engine's run, and of what was charged before it (`load_state_dict`).

    Where fewer than 20 records hold some budget, exact spends would show what these records chose: see each method.
    """

    def __init__(self, name: str = "prv") -> None:
        if name == "gdp":
            raise InputError(
                "accountant='gdp' understates epsilon: it is an approximation for many steps. Use 'prv' or 'rdp'."
            )
        self._name, self._function = name, ACCOUNTANTS[named(NAMES, name, "accountant")]
        self._earlier: list[Entry] = []
        self._private: Private | None = None
        self._has_budgets = False
        self._known: dict[tuple[Any, ...], FloatArray] = {}

    @property
    def function(self) -> Any:
        """(history, delta) -> epsilon."""
        return self._function

    def begin(self, has_budgets: bool) -> None:
        """Before a run. has_budgets: it spends whole budgets, so nothing may have been spent before."""
        self._has_budgets = has_budgets
        self.check_unspent()

    def watch(self, private: Private) -> None:
        """Count this run."""
        self._private = private

    def check_unspent(self) -> None:
        """Raise InputError if a plan for budgets is to be spent on top of what a checkpoint has spent."""
        if self._has_budgets and self._earlier:
            raise InputError(_SPENT_BEFORE)

    def mechanism(self) -> str:
        """The name that the engine was given."""
        return self._name

    def __len__(self) -> int:
        """Number of draws that were charged."""
        return sum(steps for _, _, steps in self._earlier) + sum(self._private.ledger.charged if self._private else ())

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step of a loop of your own. An engine's accountant counts the steps of its run without it.

        noise_multiplier  noise / clip norm
        sample_rate       probability that a record is drawn

        Raises InputError for numbers that no step has.

        >>> accountant = RDPAccountant()
        >>> for _ in range(100):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> accountant.history, round(accountant.get_epsilon(1e-5), 3)
        ([(1.0, 0.01, 100)], 1.214)
        """
        SampledGaussian(sample_rate, noise_multiplier, 1)
        if not self._earlier or self._earlier[-1][:2] != (noise_multiplier, sample_rate):
            self._earlier.append((noise_multiplier, sample_rate, 0))
        self._earlier[-1] = (noise_multiplier, sample_rate, self._earlier[-1][2] + 1)

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """(`get_epsilon`, NaN), as earlier versions of Opacus return it with a Rényi order; alphas: without effect."""
        return self.get_epsilon(delta), math.nan

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Epsilon of the records that have spent most, at this delta. All other runs of the plan count in full.

        If fewer than 20 records hold some budget: what the whole plan spends, rounded up to 1, 2, 5, 10, ….
        """
        if options:
            raise InputError(f"get_epsilon takes delta alone, got {', '.join(options)}.")
        if not any(self._steps) and not self._earlier:
            return 0.0
        if self.is_hidden:
            assert self._private is not None
            plan = self._private.plan
            return rounded_up(float(self._spent([plan.runs * p.steps for p in plan.phases], delta).max()))
        if self._private is not None and self._private._is_cut_short:
            warnings.warn(_CUT_SHORT, EpsilonsWarning, stacklevel=2)
        return float(self.epsilons(delta).max())

    @property
    def is_hidden(self) -> bool:
        """True if exact numbers would show what fewer than 20 records chose."""
        return self._private is not None and has_small_cells(self._private.plan.groups)

    def epsilons(self, delta: float) -> FloatArray:
        """(groups,) epsilon that each group has spent, with all other runs; one number before there is a run."""
        return self._spent(self._steps, delta)

    @property
    def _steps(self) -> list[int]:
        """Steps to count in each phase: those that were charged, and all of the other runs of the plan."""
        if self._private is None:
            return []
        plan, charged = self._private.plan, self._private.ledger.charged
        return [done + (plan.runs - 1) * p.steps for p, done in zip(plan.phases, charged, strict=True)]

    def _spent(self, steps: Sequence[int], delta: float) -> FloatArray:
        key = (*steps, delta, *self._earlier)
        if key not in self._known:
            histories = self._histories(steps)
            deltas = np.full(histories.rates.shape[1], float(delta))
            plan = None if self._private is None else self._private.plan
            function = self._function if plan is None else plan.certified_by(self._function)
            self._known = {key: batch_epsilon(function, histories, deltas)}
        return self._known[key]

    def _histories(self, counted: Sequence[int]) -> Histories:
        groups = len(self._private.plan.groups) if self._private else 1
        one = np.ones(groups)
        rows = [(rate * one, noise * one, steps) for noise, rate, steps in self._earlier]
        phases = self._private.plan.phases if self._private else ()
        rows += [(p.sample_rate, p.noise_multiplier, n) for p, n in zip(phases, counted, strict=True) if n]
        rates, noises, steps = zip(*rows, strict=True) if rows else ([0 * one], [one], [0])
        return Histories(np.array(rates), np.array(noises), tuple(steps))

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def history(self) -> list[Entry]:
        """(noise multiplier, sample rate, steps) that no record exceeds; Opacus' accountants can read it.

        If groups differ in rates alone, or in noise alone, it is that of the records that spend most.
        Raises InputError if fewer than 20 records hold some budget.
        """
        if self._private is None or not any(self._steps):
            return self._earlier
        if self.is_hidden:
            raise InputError(
                f"Fewer than {SMALLEST_SHOWN} records hold some of the budgets, and the history of the records that "
                "spend most would show what they chose."
            )
        rows = zip(self._private.plan.phases, self._steps, strict=True)
        # Which group spends most may depend on the delta that is asked for later, so each bound is taken over all.
        made = [(float(p.noise_multiplier.min()), float(p.sample_rate.max()), int(n)) for p, n in rows if n]
        return self._earlier + made

    @history.setter
    def history(self, entries: Sequence[Entry]) -> None:
        self.load_state_dict({"history": entries})

    def state_dict(self) -> dict[str, Any]:
        """As Opacus' accountants save it."""
        return {"history": list(self.history), "mechanism": self.mechanism()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Count what a checkpoint has spent, of this class or of Opacus. Raises InputError for anything else."""
        history = state_dict.get("history") if state_dict else None
        try:
            entries = [(float(noise), float(rate), int(steps)) for noise, rate, steps in history or []]
            for noise, rate, steps in entries:
                SampledGaussian(rate, noise, steps)
        except (TypeError, ValueError) as error:
            raise InputError("This is not the state of an accountant: its history has other entries.") from error
        if history is None:
            raise InputError("This is not the state of an accountant: it has no history.")
        self._earlier, self._known = [entry for entry in entries if entry[2]], {}


class PRVAccountant(Accountant):
    """Opacus' PRVAccountant, computed by our PLD."""


class RDPAccountant(Accountant):
    """Opacus' RDPAccountant, at its default orders."""

    def __init__(self) -> None:
        super().__init__("rdp")


def create_accountant(mechanism: str) -> Accountant:
    """The accountant of this name, "prv" or "rdp". Raises InputError for another name.

    >>> type(create_accountant("rdp")).__name__
    'RDPAccountant'
    """
    return {"prv": PRVAccountant, "rdp": RDPAccountant}.get(mechanism, lambda: Accountant(mechanism))()


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
) -> float:
    """The smallest noise multiplier found that spends at most target_epsilon, with which make_private may be called.

    target_epsilon, target_delta  one budget for all records
    sample_rate                   probability that a record is drawn: 1 / len(data_loader)
    epochs, steps                 one of them; an epoch has 1 / sample_rate steps, and the product is rounded up
    accountant                    "rdp" or "prv"
    epsilon_tolerance             without effect: the search ends within a millionth of the budget

    Raises InputError for other arguments, InfeasibleBudgetError for a budget that no noise keeps.

    >>> round(get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, epochs=5), 2)
    0.93
    """
    if (steps is None) == (epochs is None):
        raise InputError("get_noise_multiplier takes either steps or epochs.")
    count = steps if steps is not None else math.ceil(cast("float", epochs) / sample_rate * (1 - 1e-12))
    return noise_for(target_epsilon, sample_rate, count, target_delta, create_accountant(accountant).function)


# -- Checkpoints in the format of Opacus: weights, the optimizer's state, and what was spent

Path = str | os.PathLike[str] | BinaryIO | IO[bytes]


def save(
    path: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    accountant: Accountant,
    more: Mapping[str, Any] | None,
    of_module: Mapping[str, Any] | None,
    of_torch: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint that Opacus can load."""
    checkpoint: dict[str, Any] = dict(more or {})
    checkpoint["module_state_dict"] = module.state_dict(**(of_module or {}))
    checkpoint["privacy_accountant_state_dict"] = accountant.state_dict()
    if optimizer is not None:
        checkpoint["optimizer_state_dict"] = optimizer.state_dict()
    torch.save(checkpoint, path, **(of_torch or {}))


def load(
    path: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    accountant: Accountant,
    of_module: Mapping[str, Any] | None,
    of_torch: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Read a checkpoint, of this function or of Opacus; the content without the optimizer's state.

    Raises InputError for a file that is no such checkpoint, or holds more than tensors and plain values.
    """
    try:
        checkpoint = torch.load(path, **({"weights_only": True} | dict(of_torch or {})))
    except pickle.UnpicklingError as error:
        raise InputError(
            "The checkpoint holds objects that run code when they are loaded. If you trust the file: "
            "load_checkpoint(…, torch_load_kwargs={'weights_only': False})."
        ) from error
    missing = {"module_state_dict", "privacy_accountant_state_dict"} - set(checkpoint)
    if missing:
        raise InputError(f"This is not a checkpoint of a private run: it has no {', '.join(sorted(missing))}.")
    state = checkpoint.pop("optimizer_state_dict", None)
    if (optimizer is None) != (state is None):
        given, held = ("no optimizer", "one") if optimizer is None else ("an optimizer", "none")
        text = f"Got {given}, and the checkpoint holds the state of {held}: the optimizer's state is not loaded."
        warnings.warn(text, EpsilonsWarning, stacklevel=3)
    module.load_state_dict(checkpoint["module_state_dict"], **(of_module or {}))
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)
    accountant.load_state_dict(checkpoint["privacy_accountant_state_dict"])
    return dict(checkpoint)
