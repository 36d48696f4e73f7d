"""Checkpoints of a run, resuming from them, and key epochs.

A run that is closed resumes at the start of its last draw. Only there its state is known to be that of an uninterrupted
run. Within a draw only generators and the engine change, and both are noted. After the update, the rest of the loop's
body or a listener may be missing, so the state before the update is kept in memory until the next draw begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..clipping import Ghost
from ..core.checksums import check_sum
from ..core.modules import local, tensors_of, writes
from ..draws.persons_rows import Draws
from ..errors import RunError
from ..ledger.run_folder import RunFolder
from ..models import model_checks
from . import checkpoints
from .checkpoints import Stateful
from .distributed import Ranks
from .opening import Inputs, Request
from .within_draws import Position

#: The parts of a state that the next update writes to.
CHANGING = ("model", "parameters", "optimizer", "kept")
#: Without checkpoint_every, a checkpoint is saved about this often.
SECONDS_PER_CHECKPOINT = 300.0


@dataclass(frozen=True)
class _Start:
    """State at the start of a draw, as far as the draw changes it, and marks of everything else."""

    generators: Mapping[str, Any]
    fell_back: bool
    marks: list[Any]


class Checkpointer:
    """Saves the state of a run between draws, and restores it. Without a folder, nothing is saved.

    registered   what the caller registered for checkpointing, by name
    """

    def __init__(
        self, request: Request, inputs: Inputs, folder: RunFolder | None, position: Position, ranks: Ranks
    ) -> None:
        self._model, self._optimizer, self._every = request.model, request.optimizer, request.folder.checkpoint_every
        self._parameters, self._engine, self._fingerprint = inputs.parameters, inputs.engine, inputs.fingerprint
        self._folder, self._ledger, self._position, self._ranks = folder, position.ledger, position, ranks
        self._path, self._shards = folder.checkpoints if folder else None, ranks.shards  # where this rank saves
        if ranks.shards and request.folder.path is not None:
            self._path = RunFolder(Path(request.folder.path)).checkpoints
        self.registered: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}  # states from the checkpoint whose objects are not registered yet
        self._generators: Mapping[str, Any] | None = None  # from the checkpoint, until the loop begins
        self._start: _Start | None = None  # of the draw that is being made, until its update is applied
        self._before: dict[str, Any] | None = None  # the state before the last update, until the next draw begins
        self._copies = checkpoints.Copies()  # of what the last update wrote to
        self._saved, self._saved_at = -1, time.monotonic()
        self._line = ""  # the ledger's last line when a checkpoint was saved

    # -- what goes into checkpoints ------------------------------------------------------------------

    def register(self, name: str, thing: Stateful) -> None:
        model_checks.check_kept(name, thing)
        if name in self._unclaimed:
            thing.load_state_dict(self._unclaimed.pop(name))
        self.registered[name] = thing

    def check_registered(self) -> None:
        """Raises RunError if the checkpoint holds states of objects that were not registered."""
        if self._unclaimed:
            raise RunError(
                f"The checkpoint holds states of objects that are missing: {', '.join(self._unclaimed)}. Call "
                "private.register_for_checkpointing(name=object) for each before the loop, as when the run began."
            )

    def _state(self, generators: Mapping[str, Any], fell_back: bool) -> dict[str, Any]:
        at = self._position
        return {
            "phase": at.phase,
            "step": at.step,
            "updates": at.updates,
            "epoch": self._ledger.epoch,
            "fingerprint": dict(self._fingerprint),
            "model": checkpoints.of_model(self._model),
            "parameters": [] if self._shards else [p.detach() for p in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "kept": self._kept(),
            "generators": generators,
            "fell_back": fell_back,
        }

    @property
    def _fell_back(self) -> bool:
        return isinstance(self._engine, Ghost) and not self._engine.is_proven

    # -- saving ----------------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """True if there is nothing to save: no folder, or a checkpoint after the last update."""
        return self._path is None or self._saved == self._position.updates

    @property
    def is_due(self) -> bool:
        """True if a checkpoint should be saved before the next draw; with shards, of all ranks."""
        shared = self._shards and self._path is not None
        return self._ranks.any("before a draw", self._is_due) if shared else self._is_due

    @property
    def _is_due(self) -> bool:
        if self._path is None or self._saved < 0:
            return self._path is not None
        if self._every is not None:
            return self._position.updates - self._saved >= self._every
        return time.monotonic() - self._saved_at >= SECONDS_PER_CHECKPOINT

    def save(self) -> None:
        """Save the state between two draws, durably."""
        self._save(self._state(self._generators or checkpoints.of_generators(), self._fell_back))

    def _save(self, state: dict[str, Any]) -> None:
        assert self._path is not None
        frozen = [] if self._shards else checkpoints.unwritten(self._model, self._parameters)
        if self._shards:
            state = self._shards.saved(state, self._path, checkpoints.next_number(self._path))
        if self._ranks.is_main:
            self._ledger.sync()  # the line that the checkpoint names is durable before it
            self._line = self._ledger.last_line
            checkpoints.save(self._path, {**state, "ledger": self._line}, frozen)
        self._saved, self._saved_at = state["updates"], time.monotonic()

    def note_start(self, frees_memory: bool) -> None:
        """A draw begins. frees_memory: copies get new memory, because the draw needs it"""
        if self._path is not None:
            marks = self._marks(self._optimizer.state_dict(), self._kept())
            self._start = _Start(checkpoints.of_generators(), self._fell_back, marks)
        self._before = None
        if frees_memory:
            self._copies = checkpoints.Copies()

    def note_update(self) -> None:
        """The draw's update is about to be applied."""
        state = self._at_start()
        if state is not None:  # nothing writes to the rest of it
            changing = {name: state[name] for name in CHANGING}
            frozen = checkpoints.unwritten(self._model, self._parameters)
            state |= self._copies.of(changing, {local(t).data_ptr() for t in frozen})
        self._before = state
        self._start = None

    def save_last(self, is_changed: bool, is_frozen_changed: bool) -> None:
        """Save the state at the start of the last draw, if no newer one is saved, with the ledger's last line.

        is_changed          whether something else than an update wrote to parameters or buffers
        is_frozen_changed   whether it wrote to what no update changes: it was not copied before the update
        """
        state = None if is_frozen_changed else self._before
        if self._start is not None:
            state = None if is_changed else self._at_start()
        if self._shards and self._path is not None and self._ranks.any("closing", state is None):
            return
        if state is None or state["updates"] < self._saved:
            return
        if state["updates"] > self._saved or self._ledger.last_line != self._line:
            self._save(state)

    def forget(self) -> None:
        """Free the states in memory."""
        self._start, self._before, self._copies = None, None, checkpoints.Copies()

    def _at_start(self) -> dict[str, Any] | None:
        """The state at the start of the current draw; None if it is unknown, because something was changed since."""
        if self._start is None:
            return None
        state = self._state(self._start.generators, self._start.fell_back)
        return state if self._start.marks == self._marks(state["optimizer"], state["kept"]) else None

    def _kept(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self.registered.items()} | self._unclaimed

    def _marks(self, optimizer: Mapping[str, Any], kept: Mapping[str, Any]) -> list[Any]:
        """Values that no loop changes within a draw, if the draw can be repeated from its start."""
        tensors = (*self._parameters, *tensors_of(self._model))
        return [
            [(id(tensor), writes(tensor)) for tensor in tensors],
            checkpoints.marks(optimizer),
            checkpoints.marks(kept),
            check_sum(checkpoints.tensors_in(kept)),
        ]

    # -- resuming --------------------------------------------------------------------------------------

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set model, optimizer, engine and position to this checkpoint; generators follow when the loop begins."""
        if ("shards" in state) != (self._shards is not None):
            raise RunError("The checkpoint was saved with fully_shard and the run resumes without it, or vice versa.")
        with checkpoints.restoring("The checkpoint cannot be restored"), torch.no_grad():
            if self._shards:
                assert self._path is not None
                state = self._shards.loaded(state, self._path)
            checkpoints.into_model(self._model, state["model"])
            for p, value in zip([] if self._shards else self._parameters, state["parameters"], strict=True):
                p.copy_(value)
            self._restore_optimizer(state)
            at = self._position
            at.phase, at.step, at.updates = state["phase"], state["step"], state["updates"]
            self._saved = at.updates
            self._unclaimed = dict(state["kept"])
            self._generators = state["generators"]
        if state.get("fell_back") and isinstance(self._engine, Ghost):
            self._engine.fall_back()

    def _restore_optimizer(self, state: Mapping[str, Any]) -> None:
        """If the optimizer was built with other settings than before, these are kept."""
        optimizer = self._optimizer
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        if state["fingerprint"].get("optimizer") != self._fingerprint["optimizer"]:
            for group, given in zip(optimizer.param_groups, settings, strict=True):
                group.update(given)

    def restore_generators(self) -> None:
        """Set the global generators to the restored checkpoint's, once."""
        if self._generators is not None:
            with checkpoints.restoring("The checkpoint's states of generators cannot be restored"):
                checkpoints.into_generators(self._generators)
            self._generators = None

    def fits(self, state: Mapping[str, Any] | None) -> bool:
        """True if the run can go on from this state under the same key: nothing that may change a sum is different."""
        if state is None:  # interrupted before its first checkpoint, and so before its first draw
            return self._ledger.is_untouched
        return bool(state.get("fingerprint") == self._fingerprint) and state.get("epoch") == self._ledger.epoch

    def new_epoch(self, draws: Draws) -> Draws:
        """Draws under another key from this step on: what was reserved stays charged, later steps are charged again."""
        history = f"{self._ledger.last_line} {dict(self._fingerprint)}"
        randomness = self._ranks.broadcast(draws.randomness.renewed(self._ledger.epoch + 1, history))
        key_file = ""
        if self._folder:
            self._folder.write_key(randomness.key)
            key_file = self._folder.key_file()
        at = self._position
        done = [phase.steps for phase in at.plan.phases[: at.phase]]
        later = [0] * (len(at.plan.phases) - at.phase - 1)
        self._ledger.new_epoch(randomness.commitment, [*done, at.step, *later], key_file)
        self._saved = -1  # the epoch begins with a checkpoint
        return replace(draws, randomness=randomness)
