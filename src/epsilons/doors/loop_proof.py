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
from torch import Tensor, nn

from ..independence import comparison, messages
from ..independence.states import Mixed, Rows, State, Unknown
from ..independence.watch import OperatorWatch, Watched


class LoopProof:
    """The proof for one run.

    is_open   whether a batch is compared with the next one of another size
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], always_all: bool) -> None:
        """always_all: whether every draw has all records, so that no other size ever comes"""
        self._model, self._parameters, self._always_all = model, parameters, always_all
        self._first: Watched | None = None
        self._before: list[Tensor] = []  # the parameters' values before the first of the two

    @property
    def is_open(self) -> bool:
        return self._first is not None

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
            raise messages.mixed_losses(state, self._model)
        if isinstance(state, Unknown) and not state.is_place:
            raise messages.unproven(state.cause)
        if isinstance(state, Rows) and ((state.first, state.count) != (0, records) or state != (wanted or state)):
            raise messages.unordered_losses(self._model)

    def _compare(self, watched: Watched) -> None:
        first = self._first
        if first is None:
            if not self._always_all:
                self._first, self._before = watched, [p.detach().clone() for p in self._parameters]
            return
        if first.records == watched.records:
            return
        difference = comparison.first_difference(first, watched)
        if difference is not None:
            with torch.no_grad():
                for p, value in zip(self._parameters, self._before, strict=True):
                    p.copy_(value)
            raise messages.not_repeated(*difference, first.records, watched.records)
        self._first, self._before = None, []
