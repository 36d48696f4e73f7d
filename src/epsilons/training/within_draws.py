"""Where a run is in its plan, the order of calls in a private loop, and what stays as it is within a draw.

A batch is issued, then backward, then step. How many physical batches a draw has is private: it follows from who was
drawn, and from checks and replays. Whatever moves with every batch would carry this number into the update, without
noise: the optimizer's settings and state, schedules, registered objects, and modes.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..core.modules import named_modules, tensors_of
from ..errors import CallOrderError, ModelError
from ..independence.check import is_due
from ..ledger.ledger import Ledger
from ..planning import Plan
from . import checkpoints
from .checkpoints import Stateful

# -- Where a run is in its plan, and the order of calls


@dataclass(repr=False, eq=False)
class Position:
    """Where a run is: the next draw, and the number of noisy updates."""

    plan: Plan
    ledger: Ledger
    phase: int = 0
    step: int = 0
    updates: int = 0

    @property
    def is_finished(self) -> bool:
        return self.phase == len(self.plan.phases)

    @property
    def steps_before(self) -> int:
        """How many of the plan's steps come before the next draw."""
        return sum(phase.steps for phase in self.plan.phases[: self.phase]) + self.step

    def skip_finished_phases(self) -> None:
        """Move to the next phase if this one is done, or if its charges are used up."""
        while not self.is_finished and self.step >= self.ledger.end(self.phase):
            self.phase, self.step = self.phase + 1, 0


#: Marks an empty draw among the batches of a loop.
EMPTY_DRAW = object()

#: What may happen next. Nothing may after an error in the middle of a draw, or after the run was closed.
Turn = Literal["draw", "backward", "step", "broken", "closed"]

_ORDER = """The order is:

    for batch in private.batches:
        private.backward(losses)  # of this batch, one per record
        private.step()"""

_WHERE: dict[Turn, str] = {
    "draw": "outside a physical batch, or twice on one",
    "step": "twice on one physical batch",
    "backward": "before private.backward",
    "broken": "after an error in this draw, which is never applied",
    "closed": "after private.close()",
}


class Turns:
    """Whose turn it is.

    turn        the call that must come next
    in_draw     True from a draw's charge to its update
    ended       number of draws that ended in this process, applied or not
    is_stopped  True if no further draw is to be made
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.turn: Turn = "draw"
        self.in_draw, self.is_stopped = False, False
        self.ended = 0
        self._loops = 0  # how many loops over the batches were begun; only the latest may go on
        self._lock = threading.Lock()

    @property
    def has_next(self) -> bool:
        """True if there is another draw to make."""
        return not self._position.is_finished and not self.is_stopped

    def end_draw(self) -> None:
        self.in_draw = False
        self.ended += 1

    def take(self, turn: Literal["backward", "step"], then: Turn) -> None:
        """Raises CallOrderError if it is not the turn of this call. Of two threads, one has it."""
        with self._lock:
            if self.turn != turn:
                raise CallOrderError(f"private.{turn} was called {_WHERE[self.turn]}. {_ORDER}")
            self.turn = then

    def begin_loop(self) -> int:
        """The number of a new loop. Raises CallOrderError in the middle of a draw, and after closing."""
        if self.turn == "closed":
            raise CallOrderError("This run is closed. Call make_private again for another one.")
        if self.in_draw:
            raise CallOrderError(
                "The loop over private.batches was left in the middle of a draw and entered again. A draw must be "
                "finished: drawing again after looking at it would not be Poisson sampling. " + _ORDER
            )
        with self._lock:
            self._loops += 1
            return self._loops

    def check_latest(self, loop: int, is_next: bool = True) -> None:
        """Raises CallOrderError if another loop was begun after this one.

        is_next   False if the loop's draw is not the next one. An older loop may have made it in advance, and its noise
                  must never be added to a second sum
        """
        if loop != self._loops or not is_next:
            raise CallOrderError("Another loop over private.batches was begun since; go on with that one.")

    def check_batch_is_done(self, loop: int) -> None:
        """Raises CallOrderError if a loop asks for the next batch without having finished the last one."""
        self.check_latest(loop)
        if self.turn == "closed":
            middle = " in the middle of a draw, which is never applied" if self.in_draw else ""
            raise CallOrderError(f"This run was closed{middle}. Leave the loop after private.close().")
        if self.turn == "broken":
            raise CallOrderError(
                "private.backward failed on a physical batch of this draw, so the draw cannot be finished."
            )
        if self.turn != "draw":
            missing = "private.backward(losses)" if self.turn == "backward" else "private.step()"
            self.turn = "broken"
            raise CallOrderError(f"The loop went on to the next physical batch without {missing}. {_ORDER}")


def by_draw(batches: Iterator[Any], turns: Turns, end_body: Callable[[], None]) -> Iterator[Iterator[Any]]:
    """The batches of a loop, in one iterable per remaining draw.

    end_body   called after the body of a draw's last batch; what the caller does then follows empty draws, too
    """
    while turns.has_next:
        ended = turns.ended
        yield _of_one_draw(batches, turns, end_body)
        if turns.ended == ended:
            raise CallOrderError(
                "The next of private.draws was asked for before the last one was made. Iterate each to its end:\n\n"
                "    for draw in private.draws:\n"
                "        for batch in draw:\n"
                "            private.backward(losses)  # of this batch, one per record\n"
                "            private.step()"
            )
    next(batches, None)  # runs the end of the loop: no draw is left


def by_part(
    batches: Iterator[Any], turns: Turns, end_body: Callable[[], None], position: Position, n: int
) -> Iterator[Iterator[Any]]:
    """The batches of a loop, in one iterable per remaining part of n. end_body: as of `by_draw`"""

    def until(end: int) -> Iterator[Any]:
        while position.steps_before < end and turns.has_next:
            yield from _of_one_draw(batches, turns, end_body)

    for part in range(1, n + 1):
        end = part * position.plan.steps // n
        if position.steps_before >= end:
            continue
        if not turns.has_next:
            break
        yield until(end)
        if turns.in_draw:
            raise CallOrderError(
                "The next of private.epochs was asked for in the middle of a draw. Leave a part only after "
                "private.step() returned True, or iterate it to its end. " + _ORDER
            )
    next(batches, None)


def _of_one_draw(batches: Iterator[Any], turns: Turns, end_body: Callable[[], None]) -> Iterator[Any]:
    for batch in batches:
        if batch is EMPTY_DRAW:
            return
        yield batch
        if not turns.in_draw:
            end_body()
            return


# -- What stays as it is within a draw

#: Up to this probability that some draw is empty, the body of a loop may do what must follow every update.
NEGLIGIBLE = 1e-9

#: Settings that schedules of torch write.
_SCHEDULED = ("lr", "momentum", "betas")
_PLAIN = {int, float, bool, str, type(None)}
_Key = tuple[str, str]

_WITHIN = (
    "within a draw. How many batches a draw has is private: it follows from who was drawn, from checks and from "
    "replays. So nothing that updates use may follow batches."
)
_EMPTY = (
    "in the body of the loop, which does not run for empty draws. Under this plan a draw may be empty, and the change "
    "would show which."
)
_BY_HAND = (
    "in the body of the loop, and not by a schedule that makes as many steps in every draw. The body sees the losses "
    "and the number of private batches, which must not decide. What is changed there must follow private.updates, and "
    "read it there."
)
_ADVICE = """Change it once after each update, in three lines:

    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plan.steps)
    private.register_for_checkpointing(scheduler=scheduler)
    private.on_update(lambda _: scheduler.step())  # and no scheduler.step() in the loop

In a loop of another library, private is loader.private (Opacus), trainer.private or strategy.private. See: \
epsilons docs concepts"""


class Settings:
    """What updates use besides gradients: it may move between draws, and not with the batches of one.

    registered        what the caller registered for checkpointing, by name
    check_trained     raises ModelError for other trained parameters than at the start
    follows_updates   True if `private.updates` was read since the last update
    sees_every_draw   True if the body runs for empty draws, too
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Plan,
        ranks: int,
        registered: Mapping[str, Stateful],
        check_trained: Callable[[], None],
    ) -> None:
        self._optimizer, self._plan, self._ranks, self._check_trained = optimizer, plan, ranks, check_trained
        self._registered, self._found = registered, dict[str, LRScheduler]()
        self._before: dict[_Key, Any] = {}  # at the start of the draw, or after its update; empty between draws
        self._is_in_body, self.follows_updates, self.sees_every_draw = False, False, False
        self._left: dict[_Key, Any] | None = None  # where the loop was left
        self._paces: dict[_Key, int] = {}  # how many steps each scheduler makes in the body after an update

    def begin_draw(self, step: int) -> None:
        # Schedulers of torch leave this mark, but for those that follow a metric, whose steps count as made by hand.
        is_scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        if is_scheduled and (is_due(step) or not self._found):
            self._found = {f"{type(s).__name__} {i}": s for i, s in enumerate(schedulers_of(self._optimizer))}
        self._before, self._left = self._now(), None

    def end_draw(self) -> None:
        """The update is due. Raises what `compare` raises."""
        self.compare()
        self._before = {}

    def forget(self) -> None:
        """The draw is over without an update."""
        self._before = {}

    def begin_body(self) -> None:
        """The update was made by a call in the body of a loop. The rest of the body does not run for empty draws."""
        self._is_in_body, self.follows_updates, self._before = True, False, self._now()

    def leave(self) -> None:
        """The loop was left: what the caller does from now on is no part of its body."""
        self._left = self._now() if self._is_in_body else None

    def compare(self) -> None:
        """After code of the caller. Raises ModelError for what moved with the batches, or may have."""
        if not self._before:
            return
        before, now, self._left = self._before, self._left or self._now(), None
        keys = before.keys() | now.keys() if before != now else set()
        moved = [key for key in keys if before.get(key) != now.get(key)]
        if moved:
            self._check_trained()
        if moved and not self._is_in_body:
            raise _refused(moved, _WITHIN)
        if self._is_in_body:
            self._check_body(moved, before, now)
            self._is_in_body, self._before = False, {}

    def _check_body(self, moved: list[_Key], before: Mapping[_Key, Any], now: Mapping[_Key, Any]) -> None:
        if moved and self._may_miss_draws:
            raise _refused(moved, _EMPTY)
        paces = {key: now[key][0] - before[key][0] for key in now if key[0] == "position" and key in before}
        is_even = all(self._paces.setdefault(key, pace) == pace for key, pace in paces.items())
        stepped = [s for name, s in self._found.items() if ("position", name) in moved]
        rates = [_value(s.get_last_lr()) for s in stepped if not isinstance(s, ReduceLROnPlateau)]
        is_scheduled = [_value(group.get("lr")) for group in self._optimizer.param_groups] in rates
        known = ("position", "content", *(_SCHEDULED if is_scheduled else ()))
        if not (is_even and all(what in known for what, _ in moved)) and not self.follows_updates:
            raise _refused(moved or [*paces], _BY_HAND)

    @property
    def _may_miss_draws(self) -> bool:
        return not self.sees_every_draw and chance_of_empty_draws(self._plan, self._ranks) > NEGLIGIBLE

    def _now(self) -> dict[_Key, Any]:
        """Values by what they are, and of what."""
        parts = [part.values() if isinstance(part, dict) else [part] for part in self._optimizer.state.values()]
        written = [(id(value), getattr(value, "_version", 0)) for part in parts for value in part]
        now: dict[_Key, Any] = {("state", "the optimizer"): written}
        for number, group in enumerate(self._optimizer.param_groups):
            where = f"parameter group {number}"
            settings = [(name, value) for name, value in group.items() if name != "params"]
            now |= {(name, where): value if type(value) in _PLAIN else _value(value) for name, value in settings}
            now["params", where] = [*map(id, group["params"])]
        for name, scheduler in self._found.items():
            plain = [value for value in vars(scheduler).values() if type(value) in _PLAIN]
            now["position", name] = [_steps_of(scheduler), *plain]
        for name, thing in self._registered.items():
            tensors = tensors_of(thing) if isinstance(thing, nn.Module) else None
            marks = checkpoints.marks(thing.state_dict()) if tensors is None else [(id(t), t._version) for t in tensors]
            now["content", name] = marks
        return now


def _value(value: Any) -> Any:
    """A copy that compares by value."""
    if isinstance(value, list | tuple):
        return [_value(part) for part in value]
    return value if type(value) in _PLAIN else value.tolist() if isinstance(value, Tensor) else repr(value)


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Those of torch on this optimizer, or on a wrapper of it. It does not know them, so all objects are searched."""
    objects, kinds = gc.get_objects(), _subclasses(LRScheduler)
    found = list(compress(objects, map(kinds.__contains__, map(type, objects))))  # no bytecode for each of millions
    parts = {id(part) for scheduler in found for part in getattr(scheduler, "_schedulers", ())}
    own = [s for s in found if getattr(vars(s).get("optimizer"), "param_groups", None) is optimizer.param_groups]
    return [scheduler for scheduler in own if id(scheduler) not in parts]


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _steps_of(scheduler: Any) -> int:
    """How many steps it has made; a chain, those of its parts."""
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else sum(map(_steps_of, scheduler._schedulers))


def _refused(moved: Iterable[_Key], why: str) -> ModelError:
    names = sorted(f"{what} of {where}" for what, where in moved)
    return ModelError(f"{', '.join(names[:3])} changed {why} {_ADVICE}")


def chance_of_empty_draws(plan: Plan, ranks: int) -> float:
    """An upper bound on the probability that in some draw of the plan some rank has no batch.

    Of fewer than n of X records: P(X < n) <= E exp(t (n - 1 - X)), for every t > 0.
    """
    t, few, counts = 5.0, ranks - 1, plan.counts
    empty = [np.prod((1 - phase.sample_rate * -math.expm1(-t)) ** counts) for phase in plan.phases]
    return math.exp(t * few) * sum(p.steps * float(q) for p, q in zip(plan.phases, empty, strict=True))


#: The modes of all modules; and those modules that were called in another one, with all that they were called in.
_Used = tuple[tuple[bool, ...], frozenset[tuple[nn.Module, int]]]


class Modes:
    """Modes of modules, train or eval, where losses are computed: the same in all of a draw, and seen by a check.

    They are noted at each call of a module before the losses are handed over, and for all modules then.
    """

    def __init__(self, model: nn.Module, turns: Turns | None) -> None:
        self._model, self._turns = model, turns
        self._modules: list[nn.Module] = []
        self._called: dict[nn.Module, int] = {}  # for the batch at hand; 1: in eval, 2: in train, 3: in both
        self._of_draw: _Used | None = None
        self._checked: set[_Used] = set()
        modules = [module for _, module in named_modules(model) if not isinstance(module, torch.jit.ScriptModule)]
        self._handles = [module.register_forward_pre_hook(self) for module in modules]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """A module is called: by the loop, or by an engine, or in an evaluation."""
        if self._turns is not None and self._turns.turn == "backward":
            self._called[module] = self._called.get(module, 0) | (1 + module.training)

    def __reduce__(self) -> tuple[Any, ...]:
        return Modes, (nn.Module(), None)  # in a copy of the model, or a file, the hooks do nothing

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
            names = ", ".join(sorted({type(module).__name__ for module, _ in switched})[:3])
            raise ModelError(
                f"Modes (train or eval) of {names or 'modules'} changed within a draw. How many batches a draw has is "
                "private, and no check may have seen these modes. Switch them between draws: after private.step() "
                "returned True, or in a function that is given to private.on_update:\n\n"
                "    if private.step() and private.updates % 100 == 0:\n"
                "        model.eval()  # then validate, and switch back:\n"
                "        model.train()"
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._called, self._of_draw = {}, None
