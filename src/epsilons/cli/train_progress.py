"""How far a run of `epsilons train` is."""

from __future__ import annotations

from pathlib import Path

from ..account import read_account
from ..planning import Plan
from ..training import Private
from .console import console


class RunProgress:
    """A callback that knows how far a run is, and warns if the run continues under a new key."""

    def __init__(self, run_dir: Path, plan: Plan, is_resumed: bool, quiet: bool) -> None:
        self.private: Private | None = None
        self._ledger, self._plan, self._quiet = run_dir / "ledger.jsonl", plan, quiet
        self._epoch = read_account(self._ledger, plan).epoch if is_resumed and self._ledger.is_file() else None

    def __call__(self, private: Private) -> None:
        if self.private is None:
            self._warn_new_key(private.ledger.epoch, f"steps from {private.updates:,} on are charged again")
        self.private = private

    def on_end(self) -> None:
        if self._epoch is not None and self.private is None:
            epoch = read_account(self._ledger, self._plan).epoch
            self._warn_new_key(epoch, "all steps were charged already, so no update is left to make")

    def _warn_new_key(self, epoch: int, consequence: str) -> None:
        if self._epoch is not None and epoch > self._epoch:
            console(stderr=True, quiet=self._quiet).print(
                "Settings, data, hardware or thread count changed since the interruption, the key file is missing, or "
                f"this folder is a copy. The run continues under a new key; {consequence}."
            )

    @property
    def done(self) -> str:
        """How far the run is, in words."""
        if self.private is None:
            return "before the first update"
        return f"after {sum(self.private.ledger.charged):,} of {self._plan.steps:,} steps"
