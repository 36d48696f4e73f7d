"""Operators that work entry by entry, and those that make, copy or fill tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..states import FREE, Call, Mixed, State, Unknown, shifted, unless
from .general import Rule, lines


def pointwise(call: Call) -> State:
    """Entry by entry, with broadcasting."""
    state = call.broadcast(call.tensors)
    places = [s for s in map(call.state, call.tensors) if isinstance(s, Unknown) and s.is_place]
    if places and call.results and (call.results[0].is_floating_point() or call.results[0].dtype is torch.bool):
        return Mixed(places[0].cause)  # a place became a value, or decides
    return state


def loss_by_entry(call: Call) -> State:
    state = pointwise(call)
    return state if call["reduction"] == 0 else unless(state, range(max(t.ndim for t in call.tensors)), call.mixed())


def copied(call: Call) -> State:
    """What is written over does not count."""
    source = call["src"] if isinstance(call["src"], Tensor) else call["value"]
    return shifted(call.state(source), call["self"].ndim - source.ndim) if isinstance(source, Tensor) else FREE


def from_nothing(call: Call) -> State:
    return FREE


#: Beside those that torch itself calls pointwise (`torch.Tag.pointwise`).
RULES: dict[str, Rule] = {
    **lines(
        pointwise,
        """_to_copy _prelu_kernel native_dropout _fused_dropout rrelu_with_noise bernoulli log_sigmoid_forward
        softplus_backward where masked_fill glu_jvp _conj _conj_physical polar complex floor_divide frexp zero normal
        uniform random exponential geometric cauchy log_normal""",
    ),
    **lines(
        loss_by_entry,
        """mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        soft_margin_loss""",
    ),
    **lines(copied, "copy fill"),
    **lines(
        from_nothing,
        """zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full
        new_empty new_empty_strided empty empty_strided zeros ones full arange lift_fresh scalar_tensor rand randn
        randint randperm eye linspace tril_indices triu_indices""",
    ),
}
