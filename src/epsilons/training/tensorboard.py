"""TensorBoard: scores on the test data and the epsilon charged per group, as a callback of `fit`.

What it writes is as confidential as metrics.jsonl. Where fewer than 20 records hold some budget, no epsilon is written:
anyone's may reveal what those few chose. Only the owner may read the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..disclosure import has_small_cells
from ..errors import InputError
from ..files import close_folder
from ..planning.plan_numbers import CURVE_POINTS
from .private import Private


class TensorBoard:
    """Writes into `folder`. Pass it to `fit(callbacks=[…])`, and call `close(metrics)` with the run's when it is done.

    Raises InputError where the extra `tensorboard` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError('TensorBoard is not installed: pip install "tensorboard>=2.14".') from None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        close_folder(folder)
        self._writer: Any = SummaryWriter(str(folder))
        self._rows = 0

    def __call__(self, private: Private) -> None:
        """After an update: the spends at every point of the spend curve, and the rows of metrics that are new."""
        plan, charged = private.plan, private.ledger.charged
        step = sum(charged)
        if step % max(1, plan.steps // CURVE_POINTS) == 0 or step == plan.steps:
            groups = [] if has_small_cells(plan.groups) else range(len(plan.epsilons))
            for group, spent in zip(groups, plan.spent_after(charged, groups), strict=True):
                self._writer.add_scalar(f"epsilon charged/of {plan.epsilons[group]:g}", float(spent), step)
            if private.folder and private.folder.metrics.exists():
                lines = private.folder.metrics.read_text(encoding="utf-8").splitlines()
                self._write([json.loads(line) for line in lines])

    def close(self, metrics: Any) -> None:
        """The rest of the metrics, and the end of the file."""
        self._write(metrics)
        self._writer.close()

    def _write(self, rows: Any) -> None:
        for row in rows[self._rows :]:
            for name in ("loss", "accuracy"):
                if row.get(name) is not None:
                    self._writer.add_scalar(f"test/{name}", float(row[name]), int(row["step"]))
        self._rows = len(rows)
