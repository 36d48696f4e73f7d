"""Progress of a run, on stderr or in a notebook: steps charged and allowed, epsilon per group, time left.

Never a private loss. A notebook keeps the last state in its file, so it shows what the terminal shows and no more.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core import notebook
from ...core.disclosure import has_small_cells
from ...core.files import close_folder
from ...core.progress_line import Pace, can_rewrite, live_line, log
from ...errors import InputError
from ...planning.plan_numbers import CURVE_POINTS
from ..private import Private

MOST_GROUPS = 6  # more do not fit on a line
SECONDS_PER_DISPLAY = 0.2  # in a notebook, which handles one message per change


def is_live() -> bool:
    """True if progress can be rewritten in place: in a terminal or a notebook."""
    return sys.stderr.isatty() or notebook.is_running()


@contextmanager
def watched(
    private: Private, shown: bool = True, what: str = "charged", details: Callable[[Private], str] | None = None
) -> Iterator[None]:
    """Progress, moved by every update: a live line in a terminal or notebook, elsewhere a line on stderr now and then.

    what: verb for the steps; details: text beside them, by default what each group has spent.
    """
    details = details or spent
    if not shown:
        yield
    elif can_rewrite():
        with _bar(private, what, details):
            yield
    elif notebook.is_running():
        with _display(private, what, details):
            yield
    else:
        with _lines(private, what, details):
            yield


@contextmanager
def _bar(private: Private, what: str, details: Callable[[Private], str]) -> Iterator[None]:
    columns = [what, "<count>", "<bar>", "<remaining>", "{task.fields[spent]}"]
    with live_line(columns, private.plan.steps, spent=details(private)) as update:

        def tick(private: Private) -> None:
            update(completed=sum(private.ledger.charged), spent=details(private))

        private.on_update(tick)
        yield


@contextmanager
def _display(private: Private, what: str, details: Callable[[Private], str]) -> Iterator[None]:
    pace = Pace(private.plan.steps, SECONDS_PER_DISPLAY)

    def shown() -> dict[str, str]:
        line = _line(private, pace, what, details(private))
        return notebook.progress_bar(sum(private.ledger.charged), private.plan.steps, line)

    rewrite = notebook.display_bundle(shown())

    def tick(private: Private) -> None:
        if pace.is_due(sum(private.ledger.charged), private.is_finished):
            rewrite(shown())

    private.on_update(tick)
    try:
        yield
    finally:
        rewrite(shown())  # an interrupted run, too, leaves the charged steps


@contextmanager
def _lines(private: Private, what: str, details: Callable[[Private], str]) -> Iterator[None]:
    pace = Pace(private.plan.steps)

    def tick(private: Private) -> None:
        if pace.is_due(sum(private.ledger.charged), private.is_finished):
            run = private.folder.path if private.folder else "no folder"
            log(run, _line(private, pace, what, details(private)).rstrip())

    private.on_update(tick)
    yield


def _line(private: Private, pace: Pace, what: str, details: str) -> str:
    """ "charged 72/100  0:00:28 left  ε 0.31/0.5"."""
    left = "" if pace.left is None else f"{pace.left} left  "
    return f"{what} {sum(private.ledger.charged):,}/{private.plan.steps:,}  {left}{details}"


def spent(private: Private) -> str:
    """Epsilon charged and promised per group: "ε 0.31/0.5  0.62/1"; nothing where few hold some budget."""
    plan = private.plan
    if has_small_cells(plan.groups):  # a spend may reveal what these few chose, as everyone's does under uniform
        return ""
    groups = range(len(plan.epsilons))[:MOST_GROUPS]
    charged = plan.spent_after(private.ledger.charged, groups)
    shown = [
        f"{_rounded_up(spent, float(plan.epsilons[group]))}/{plan.epsilons[group]:g}"
        for group, spent in zip(groups, charged, strict=True)
    ]
    unit = "ε " if plan.groups.starts is None else "level ε "
    return unit + "  ".join(shown) + ("" if len(shown) == len(plan.epsilons) else " …")


def _rounded_up(spent: float, level: float) -> str:
    """To two places, or to three digits of a level below 0.1; never above the level, which a plan keeps.

    >>> _rounded_up(0.1234, 1.0), _rounded_up(0.0012341, 0.005), _rounded_up(1.9999, 2.0)
    ('0.13', '0.00124', '2.00')
    """
    places = max(2, 2 - math.floor(math.log10(level)))
    return f"{min(math.ceil(spent * 10**places) / 10**places, level):.{places}f}"


# -- TensorBoard: scores on the test data and the epsilon charged per group, as a callback of `fit`
#
# What it writes is as confidential as metrics.jsonl. Where fewer than 20 records hold some budget, no epsilon is
# written:
# anyone's may reveal what those few chose. Only the owner may read the folder.


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


# -- MLflow: the epsilon charged per tier and nothing else, because others can read a tracking server


class MLflow:
    """Logs the epsilon charged of each tier, as a callback of `fit`; no loss and no score. `close` ends MLflow's run.

    Nothing is logged where fewer than 20 hold some budget, or where groups are levels of lifetime budgets. MLflow's own
    variables say where it goes: MLFLOW_TRACKING_URI. Raises InputError where the extra `mlflow` is not installed.
    """

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError:
            raise InputError('MLflow is not installed: pip install "mlflow-skinny>=3".') from None
        self._mlflow: Any = mlflow

    def __call__(self, private: Private) -> None:
        """After an update: the spends at every point of the spend curve."""
        plan, step = private.plan, sum(private.ledger.charged)
        is_due = step % max(1, plan.steps // CURVE_POINTS) == 0 or step == plan.steps
        spent = private.epsilon_spent().tolist() if is_due and private.ranks.is_main else []
        if spent and plan.groups.starts is None:
            names = [f"epsilon charged/of {epsilon:g}" for epsilon in plan.epsilons]
            self._mlflow.log_metrics(dict(zip(names, spent, strict=True)), step=step)

    def close(self, metrics: Any) -> None:
        """End the run of MLflow that the first spend began."""
        self._mlflow.end_run()
