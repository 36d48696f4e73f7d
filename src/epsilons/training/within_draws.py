"""What stays as it is within a draw: the optimizer's settings and state, schedules, registered objects, and modes.

How many physical batches a draw has is private: it follows from who was drawn, and from checks and replays. Whatever
moves with every batch would carry this number into the update, without noise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from .._links import docs_page
from ..errors import ModelError
from . import checkpoints
from .checkpoints import Stateful
from .independence.check import is_due
from .loops import Turns
from .modules import named_modules, tensors_of
from .parts import Parts

#: Up to this probability that any draw is empty, the body of a loop may do what must follow every update.
NEGLIGIBLE = 1e-9

#: What schedulers of torch write.
_SCHEDULED = ("lr", "momentum", "betas")
_PLAIN = {int, float, bool, str, type(None)}

_ADVICE = f""" Make such a change once after each update:

    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plan.steps)
    private.register_for_checkpointing(scheduler=scheduler)
    private.on_update(lambda _: scheduler.step())  # and no scheduler.step() in the loop

In loops of other libraries, private is loader.private (Opacus), trainer.private or strategy.private. See: """
_ADVICE += docs_page("pitfalls", "schedules-that-follow-batches")


class Settings:
    """What updates use besides gradients: it may move between draws, and not with the batches of one.

    registered        what the caller registered for checkpointing, by name
    check_trained     raises ModelError for other trained parameters than at the start
    follows_updates   True if `private.updates` was read since the last update
    """

    def __init__(self, parts: Parts, registered: Mapping[str, Stateful], check_trained: Callable[[], None]) -> None:
        self._parts, self._registered, self._check_trained = parts, registered, check_trained
        self._found: list[LRScheduler] | None = None  # None: not searched for
        self._before: dict[Any, Any] = {}  # at the start of the draw; in the body after an update, at its end
        self._is_in_body, self.follows_updates = False, False
        self._paces: dict[LRScheduler, int] = {}  # steps of each scheduler in the body after an update

    def begin_draw(self, step: int) -> None:
        # Every scheduler of torch leaves this mark, but for those that take a metric, which are registered or refused.
        is_scheduled = any("initial_lr" in group for group in self._parts.optimizer.param_groups)
        if is_scheduled and (self._found is None or is_due(step)):
            self._found = _schedulers_of(self._parts.optimizer)
        self._before = self._now()

    def begin_body(self) -> None:
        """The update was made. What follows in the body of the loop is no part of a draw, and runs after no empty one."""
        self._is_in_body, self.follows_updates = True, False
        self._before = self._now()

    def compare(self) -> None:
        """After code of the caller. Raises ModelError for a change that may follow batches, and names it."""
        if not self._before:  # between draws
            return
        now = self._now()
        moved = [key for key in self._before.keys() | now.keys() if self._before.get(key) != now.get(key)]
        if moved:
            self._check_trained()
        if moved and not self._is_in_body:
            raise ModelError(
                f"{_listed(moved)} changed within a draw. How many batches a draw has is private: it follows from who "
                f"was drawn, from checks and from replays. So nothing that updates use may follow batches.{_ADVICE}"
            )
        if self._is_in_body:
            self._check_body(moved, now)
            self._is_in_body, self._before = False, {}

    def end_draw(self) -> None:
        """The update is due. Raises what `compare` raises."""
        self.compare()
        self._before = {}

    def _check_body(self, moved: list[Any], now: dict[Any, Any]) -> None:
        if moved and (chance := chance_of_empty_draws(self._parts)) > NEGLIGIBLE:
            raise ModelError(
                f"{_listed(moved)} changed in the body of the loop. It runs after no empty draw, and this plan has an "
                f"empty draw with a probability of up to {min(chance, 1.0):.1g}. So the change would show which draws were empty.{_ADVICE}"
            )
        schedulers = [key for key in moved if isinstance(key, LRScheduler)]
        paces = {s: now[s][0] - self._before[s][0] for s in now if isinstance(s, LRScheduler) and s in self._before}
        is_even = all(self._paces.setdefault(scheduler, pace) == pace for scheduler, pace in paces.items())
        rates = [_value(group.get("lr")) for group in self._parts.optimizer.param_groups]
        is_scheduled = any(_value(s.get_last_lr()) == rates for s in schedulers if not _takes_metric(s))
        explained = _SCHEDULED if is_scheduled else ()
        by_hand = [key for key in moved if key is None or isinstance(key, tuple) and key[1] not in explained]
        if (by_hand or not is_even or any(map(_takes_metric, schedulers))) and not self.follows_updates:
            raise ModelError(
                f"{_listed(moved or schedulers)} changed in the body of the loop, and not by a schedule that moves as "
                "far in every draw. The body sees private batches, their losses and their number, and none of these "
                f"may decide. A change in the body must follow private.updates, and read it there.{_ADVICE}"
            )

    def _now(self) -> dict[Any, Any]:
        """By (group, setting); by scheduler; by name for what is registered; under None the optimizer's state."""
        groups = self._parts.optimizer.param_groups
        now: dict[Any, Any] = {
            (number, name): list(map(id, value)) if name == "params" else _value(value)
            for number, group in enumerate(groups)
            for name, value in group.items()
        }
        now[None] = checkpoints.marks(self._parts.optimizer.state)
        for scheduler in self._found or ():
            now[scheduler] = _position(scheduler)
        for name, thing in self._registered.items():
            if isinstance(thing, LRScheduler):
                now[thing] = _position(thing)
            elif isinstance(thing, nn.Module):
                now[name] = [(id(tensor), tensor._version) for tensor in tensors_of(thing)]
            else:
                now[name] = checkpoints.marks(thing.state_dict())
        return now


def _value(value: Any) -> Any:
    """A copy that compares by value."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    return [_value(part) for part in value] if isinstance(value, list | tuple) else repr(value)


def _position(scheduler: LRScheduler) -> list[Any]:
    """How many steps it has made, and everything else that it counts."""
    return [scheduler.last_epoch, *(value for value in vars(scheduler).values() if type(value) in _PLAIN)]


def _takes_metric(scheduler: LRScheduler) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau)


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Those of torch that the caller has built on this optimizer, or on a wrapper that shares its groups of parameters.

    An optimizer does not know them, so all objects are searched.
    """
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    return [s for s in found if getattr(vars(s).get("optimizer"), "param_groups", None) is optimizer.param_groups]


def _listed(moved: list[Any]) -> str:
    """In words: what moved, at most three things."""
    names = [
        f"{key[1]} of parameter group {key[0]}"
        if isinstance(key, tuple)
        else f"the scheduler {type(key).__name__}"
        if isinstance(key, LRScheduler)
        else f"{key!r}, which was registered for checkpointing,"
        if key is not None
        else "the optimizer's state"
        for key in moved
    ]
    return ", ".join(sorted(names)[:3])


def chance_of_empty_draws(parts: Parts) -> float:
    """An upper bound on the probability that some draw of the plan leaves some rank without a batch."""
    tilts = np.linspace(0.0, 50.0, 51)[:, None]  # P(X < ranks) <= E exp(t (ranks - 1 - X)) for every t >= 0
    few, counts = parts.ranks.size - 1, parts.plan.counts
    return float(
        sum(
            phase.steps
            * np.min(
                np.exp(few * tilts[:, 0]) * np.prod((1 - phase.sample_rate * (1 - np.exp(-tilts))) ** counts, axis=1)
            )
            for phase in parts.plan.phases
        )
    )


#: The modes of all modules, and the modules that were called in another one, with those that they were called in.
_Used = tuple[tuple[bool, ...], frozenset[tuple[nn.Module, int]]]


class Modes:
    """Modes of modules, train or eval, where losses are computed: the same in all of a draw, and seen by a check.

    They are noted at each call of a module before the losses are handed over, and for all modules then.
    """

    def __init__(self, model: nn.Module, turns: Turns) -> None:
        self._model, self._turns = model, turns
        self._modules: list[nn.Module] = []
        self._called: dict[nn.Module, int] = {}  # for the batch at hand; 1: in eval, 2: in train, 3: in both
        self._of_draw: _Used | None = None
        self._checked: set[_Used] = set()
        hook = _Hook(self)
        modules = [module for _, module in named_modules(model) if not isinstance(module, torch.jit.ScriptModule)]
        self._handles: list[RemovableHandle] = [module.register_forward_pre_hook(hook) for module in modules]

    def note_call(self, module: nn.Module) -> None:
        if self._turns.turn == "backward":  # engines call modules, too, and so do evaluations between batches
            self._called[module] = self._called.get(module, 0) | (1 + module.training)

    def begin_draw(self) -> Hashable:
        """The modes at the start of a draw."""
        self._modules = [module for _, module in named_modules(self._model)]
        self._of_draw, self._called = None, {}
        return self._now()

    def _now(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._modules])

    def check(self, is_check: bool) -> None:
        """Where losses are handed over. Raises ModelError for other modes than before in this draw, or in checks."""
        switched = frozenset((m, modes) for m, modes in self._called.items() if modes != 1 + m.training)
        used, self._called = (self._now(), switched), {}
        if is_check or not self._checked:
            self._checked.add(used)
        self._of_draw = self._of_draw or used
        if used != self._of_draw or used not in self._checked:
            names = sorted({type(module).__name__ for module, _ in switched})
            raise ModelError(
                f"Modes (train or eval) of {', '.join(names[:3]) or 'modules'} changed within a draw. How many batches a draw has is private, and no check may have seen these modes. Switch "
                "them between draws:\n\n"
                "    if private.step() and private.updates % 100 == 0:\n"
                "        model.eval()  # then validate, and afterwards:\n"
                "        model.train()\n\n"
                "Or in a function that is given to private.on_update."
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._called, self._of_draw = {}, None


class _Hook:
    """Notes calls of modules. In a copy of the model, or a file, it does nothing."""

    def __init__(self, modes: Modes | None = None) -> None:
        self._modes = modes

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._modes is not None:
            self._modes.note_call(module)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
