"""Leaving a loop: wherever it is interrupted, the run goes on to the bits of one that was not, and loses one draw."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import epsilons
from epsilons.errors import CallOrderError
from epsilons.ledger.ledger import read_account, read_charges
from epsilons.training import checkpoints, private
from functional import Records
from shares import share
from small_runs import Training, points, sampled

STEPS = 12
#: Interrupted are the loop below and whatever it calls in these files.
FILES = {__file__, private.__file__, checkpoints.__file__, epsilons.ledger.ledger.__file__}

pytestmark = pytest.mark.usefixtures("one_thread")


def random_point(index: int) -> tuple[Tensor, Tensor]:
    """Read record by record, with random numbers from all three generators."""
    x, y = points()
    return x[index] * (1 + torch.rand(()) + np.random.rand() + random.random()).float(), y[index]


class Loop(Training):
    """A loop that moves all that a checkpoint holds after each update, and generators in its body, too."""

    def __init__(self, run_dir: Path | None, batch_size: float = 4.0, **options: Any) -> None:
        np.random.seed(1)
        random.seed(2)
        options = {"decay": 0.9, "max_physical_batch": 3, "plan": sampled(STEPS, batch_size)} | options
        super().__init__(run_dir, **options)
        self.private.on_update(lambda _: self.move())

    def body(self, x: Tensor, y: Tensor) -> None:
        self.private.backward(F.cross_entropy(self.model(x), y, reduction="none"))
        if self.private.step():
            self.end_body()

    def end_body(self) -> None:
        np.random.rand()
        random.random()

    def move(self) -> None:
        self.schedule.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 + 0.1 * np.random.rand() + 0.1 * random.random()

    def run(self) -> Loop:
        with self.private:
            for x, y in self.private.batches:
                self.body(x, y)
        return self


class Lines:
    """Counts lines as they are run in FILES, and raises KeyboardInterrupt at one of them, as Ctrl-C does."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ("close", "__exit__"):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@contextmanager
def traced(lines: Lines) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(before)


KINDS = {
    "tensors": {},
    "data set": {"data": Records(random_point, 60)},
    "empty draws": {"batch_size": 1.0},
    "ghost": {"engine": "ghost"},
    "one by one": {"max_physical_batch": 1, "batch_size": 2.0},
}


@pytest.mark.parametrize(
    ("kind", "number"),
    [("empty draws", 4), ("ghost", 4), *(pytest.param(kind, 300, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_a_run_that_is_interrupted_at_any_line_goes_on_to_the_same_bits(kind, number, tmp_path):
    options = KINDS[kind]
    expected = Loop(None, **options).run().bits()
    lines = Lines(None)
    whole = Loop(tmp_path / "whole", **options)
    with traced(lines):
        whole.run()
    assert whole.bits() == expected
    assert lines.count > 1000
    for at in random.Random(3).sample(range(1, lines.count), number):
        run_dir = tmp_path / f"{at}"
        first = Loop(run_dir, **options)
        with pytest.raises(KeyboardInterrupt), traced(Lines(at)):
            first.run()
        second = Loop(run_dir, resume=True, **options)
        if not second.private.is_finished:
            assert second.private.updates >= first.private.updates - 1, f"interrupted at line {at} of {lines.count}"
        assert second.run().bits() == expected, f"interrupted at line {at} of {lines.count}"
        account = read_account(run_dir / "ledger.jsonl", second.private.plan)
        assert (account.epoch, account.charged) == (0, (STEPS,))


HOW = ("break", "close", "exception", "swallowed")
PLACES = ("handed out", "after backward", "after the update", "at the end of the body")


@pytest.mark.parametrize(("how", "until", "place"), share(product(HOW, [1, 7], PLACES), 8))
def test_leaving_in_whatever_way_keeps_the_start_of_the_last_draw(how, until, place, tmp_path):
    """`until`: updates that were made; the draw after them is left at this place, or the body of its update is."""
    loop = Loop(tmp_path / "run")
    made = loop.private

    def leave(now: str) -> bool:
        if now != place or made.updates != until or made.is_check:
            return False
        if how == "close":
            made.close()
        elif how != "break":
            raise ZeroDivisionError
        return True

    def run() -> None:
        for x, y in made.batches:
            if leave("handed out"):
                return
            made.backward(F.cross_entropy(loop.model(x), y, reduction="none"))
            if leave("after backward"):
                return
            if made.step():
                if leave("after the update"):
                    return
                loop.end_body()
                if leave("at the end of the body"):
                    return

    raised = pytest.raises(ZeroDivisionError) if how in ("swallowed", "exception") else nullcontext()
    with raised, nullcontext() if how == "swallowed" else made:
        run()
    made.close()
    again = Loop(tmp_path / "run", resume=True)
    assert again.private.updates == (until if place in ("handed out", "after backward") else until - 1)
    assert again.run().bits() == Loop(None).run().bits()
    assert read_charges(tmp_path / "run" / "ledger.jsonl", sampled(STEPS, 4.0)) == (STEPS,)


def tensors_of(folder: Path) -> list[bytes]:
    state = checkpoints.latest(folder / "checkpoints")
    return [t.numpy().tobytes() for t in checkpoints.tensors_in(state)]


@pytest.mark.parametrize("draw", [0, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_in_the_middle_of_a_draw_nothing_is_kept_but_the_state_at_its_start(draw, batch, tmp_path):
    """Held, tensor by tensor, to the checkpoint that a twin leaves at the start of that draw."""

    def left(run_dir: Path, is_cut: bool, **options: Any) -> Loop:
        loop = Loop(run_dir, batch_size=8.0, **options)
        if is_cut:
            loop.private._leave_checkpoint = lambda: None
        with loop.private as made:
            seen = 0
            for x, y in made.batches:
                made.backward(F.cross_entropy(loop.model(x), y, reduction="none"))
                seen += not made.is_check and made.updates == draw
                if seen == batch:
                    break
                made.step()
                if made.updates == draw + 1:
                    raise AssertionError("the draw has fewer physical batches")
        return loop

    left(tmp_path / "closed", is_cut=False, checkpoint_every=1000)
    left(tmp_path / "twin", is_cut=True, checkpoint_every=1)
    assert tensors_of(tmp_path / "closed") == tensors_of(tmp_path / "twin")
    state = checkpoints.latest(tmp_path / "closed" / "checkpoints")
    assert (state["phase"], state["step"], state["updates"]) == (0, draw, draw)


@pytest.mark.parametrize("what", share(["the schedule", "the average", "a parameter", "the momentum"], 2))
def test_if_the_start_of_the_draw_is_unknown_an_older_checkpoint_stays(what, tmp_path):
    """The loop moves in the middle of a draw what is moved between draws elsewhere: the start is not there any more."""
    loop = Loop(tmp_path / "run", checkpoint_every=4)
    made = loop.private
    with made:
        for x, y in made.batches:
            if made.updates == 6:
                with torch.no_grad():
                    if what == "the schedule":
                        loop.schedule.step()
                    elif what == "the average":
                        next(loop.average.parameters()).add_(1.0)
                    elif what == "a parameter":
                        next(loop.model.parameters()).add_(1.0)
                    else:
                        next(iter(loop.optimizer.state.values()))["momentum_buffer"].add_(1.0)
                break
            loop.body(x, y)
    again = Loop(tmp_path / "run", resume=True, checkpoint_every=4)
    assert again.private.updates == 4
    assert again.run().bits() == Loop(None).run().bits()


def test_a_checkpoint_newer_than_the_last_draw_is_not_replaced(tmp_path):
    loop = Loop(tmp_path / "run")
    with loop.private as made:
        for x, y in made.batches:
            loop.body(x, y)
            if made.updates == 5:
                made.checkpoint()
                break
    again = Loop(tmp_path / "run", resume=True)
    assert again.private.updates == 5
    assert again.run().bits() == Loop(None).run().bits()


def test_a_checkpoint_that_cannot_be_written_hides_no_error_of_the_loop(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "run")
    full = Mock(side_effect=epsilons.errors.RunError("No space left"))

    def run() -> None:
        with loop.private as made:
            for x, y in made.batches:
                loop.body(x, y)
                if made.updates == 3:
                    monkeypatch.setattr(checkpoints, "save", full)
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert loop.private.ledger.is_closed


# -- stop -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "stop_at"), share(product(KINDS, [1, 5, STEPS]), 8))
def test_a_loop_that_is_stopped_makes_no_further_draw_and_can_go_on(kind, stop_at, tmp_path):
    options = KINDS[kind]
    loop = Loop(tmp_path / "run", **options)
    loop.private.on_update(lambda made: made.stop() if made.updates == stop_at else None)
    loop.run()
    assert loop.private.updates == stop_at
    assert loop.private.is_finished is (stop_at == STEPS)
    again = Loop(tmp_path / "run", resume=True, **options)
    assert again.private.updates == stop_at
    assert again.run().bits() == Loop(None, **options).run().bits()


def test_a_draw_is_finished_before_a_stop_and_later_loops_are_empty():
    loop = Loop(None, batch_size=8.0)
    with loop.private as made:
        for number, (x, y) in enumerate(made.batches):
            if number == 0:
                made.stop()
            loop.body(x, y)
        assert made.updates == 1
        assert made.ledger.charged == (1,)
        assert list(made.batches) == []
        assert list(made.draws) == []
        assert list(made.epochs(3)) == []
        made.finish()
        assert made.ledger.charged == (1,)
    with pytest.raises(CallOrderError, match="closed"):
        next(iter(made.batches))
