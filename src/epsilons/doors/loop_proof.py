"""What a foreign loop computes around the calls of its model keeps the records apart: proven from its own batches.

A foreign loop sees the batches that its library would give it, and none for checks. So while a check is due, the
operators that it runs are followed, from the batch to the inputs of the model's calls, and from their outputs to the
gradient of its loss by them. The calls themselves are made again in altered forms (`foreign_loop.check_calls`).

1. Each record's inputs, and each record's gradient, depend on this record alone: no operator on the way computes across
   records, or moves them. This is seen in the first batch, before its update.
2. Nothing on the way depends on the number of records, or on values of several of them that Python read. For this, two
   batches of other sizes must consist of the same operators with the same numbers. The second one comes with the next
   draw, or is the next physical batch. If they differ, the weights are set back to what they were before the first.
3. Python decides nothing by values of several records, up to the backward pass.

Taken on trust are numbers that go through files, threads or other libraries and come back the same in two batches, and
an `nn.Parameter` that the run does not train.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..independence import comparison, messages
from ..independence.states import Mixed, Rows, State, Unknown
from ..independence.watch import OperatorWatch, Watched
from ..training.private import Private

#: A round of comparisons ends with so many different sizes, odd and even ones, or after so many batches.
SIZES, MOST_BATCHES = 3, 20


class LoopProof:
    """The proof for one run."""

    def __init__(self, private: Private) -> None:
        self._private = private
        #: True if every draw has all records, so that no batch of another size ever comes.
        self._is_whole = all((phase.sample_rate == 1).all() for phase in private.plan.phases)
        self._first: Watched | None = None  # of the round
        self._sizes: list[int] = []  # of the round
        self._before: list[Tensor] = []  # the parameters' values before the round
        self._known: Watched | None = None  # of the last round that was completed, and all sizes so far
        self._range = (0, 0)

    def is_wanted(self, records: int) -> bool:
        """Whether a batch of this size is to be watched although no check is due."""
        smallest, largest = self._range
        return self._first is not None or (self._known is not None and not smallest <= records <= largest)

    def check(self, watch: OperatorWatch, given: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Check a batch that was watched. Raises BatchDependenceError.

        given      inputs of the model's calls
        gradients  of the loop's loss, by their outputs
        """
        watched = watch.of_loop(given, gradients)
        if watched.records == 1:
            return  # nothing is beside it
        for tensor in given:
            self._check_state(watch.state(tensor), watched.records)
        for gradient in gradients:
            self._check_state(watch.state(gradient), watched.records, Rows(0, 1, 0, watched.records))
        for read in watched.reads:
            if read.is_decision(is_late=read.at >= watched.produced):
                raise messages.decision(read)
        self._compare(watched)

    def _check_state(self, state: State, records: int, wanted: Rows | None = None) -> None:
        if isinstance(state, Mixed):
            raise messages.mixed_losses(state, self._private.model)
        if isinstance(state, Unknown) and not state.is_place:
            raise messages.unproven(state.cause)
        if isinstance(state, Rows) and ((state.first, state.count) != (0, records) or state != (wanted or state)):
            raise messages.unordered_losses(self._private.model)

    def _compare(self, watched: Watched) -> None:
        if self._known is not None and self.is_wanted(watched.records) and self._first is None:
            # Long after the last round, numbers may have moved with a schedule. The operators may not.
            self._refuse(self._known, watched, "operators")
            self._extend(watched.records)
            if not self._private._issuer.calls_are_due:
                return
        if self._first is None:
            if not self._is_whole:
                self._first, self._sizes = watched, [watched.records]
                self._before = [p.detach().clone() for p in self._private._parameters]
            return
        self._sizes.append(watched.records)
        if watched.records != self._first.records:
            self._refuse(self._first, watched, "values" if self._private._source.varies else "sizes")
        sizes = set(self._sizes)
        if (len(sizes) >= SIZES and len({size % 2 for size in sizes}) > 1) or len(self._sizes) >= MOST_BATCHES:
            self._known, self._first, self._before = self._first, None, []
            self._range = self._range if any(self._range) else (watched.records, watched.records)
            self._extend(*sizes)

    def _extend(self, *sizes: int) -> None:
        self._range = min(self._range[0], *sizes), max(self._range[1], *sizes)

    def _refuse(self, one: Watched, other: Watched, of: str) -> None:
        """Raise BatchDependenceError if the two differ, and set the weights back to the begin of the round."""
        found = comparison.first_difference(one, other, of)
        if found is None:
            return
        with torch.no_grad():
            for p, value in zip(self._private._parameters, self._before, strict=False):
                p.copy_(value)
        raise messages.not_repeated(*found, one.records, other.records)
