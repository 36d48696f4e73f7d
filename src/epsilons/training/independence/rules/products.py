"""Matrix products, attention, convolutions and recurrent layers."""

from __future__ import annotations

from dataclasses import replace

from ..states import FREE, Call, Rows, State, unless
from .general import Rule, contraction, first_only, lines

_ATTENTION = contraction("query key value attn_mask attn_bias", "le,se,sf,ls,ls->lf")


def trilinear(call: Call) -> State:
    """The product behind nn.Bilinear: its arguments say which axes each factor lacks, and which are summed."""
    letters = "abcdefgh"[: call["i1"].ndim + len(call["expand1"])]

    def without(places: list[int]) -> str:
        return "".join(letter for place, letter in enumerate(letters) if place not in places)

    terms = ",".join(without(call[f"expand{i}"]) for i in (1, 2, 3))
    return contraction("i1 i2 i3", f"{terms}->{without(call['sumdim'])}")(call)


def convolution(call: Call) -> State:
    """Records in the first axis. In the second, all channels of a group meet; in others, what a kernel covers."""
    x = call["input"] if "input" in call.arguments else call["self"]
    state = call.state(x)
    if isinstance(state, Rows) and state.axis and state.count > 1:
        channels = x.shape[1] if call["groups"] == 1 else 1
        width = channels if state.axis == 1 else call["weight"].shape[state.axis]
        if width > state.inner:
            return call.mixed()
    if any(call.state(t) != FREE for t in call.tensors if t is not x):
        return call.unknown()
    return unless(state, range(1, x.ndim), call.unknown())


def recurrent(call: Call) -> State | list[State]:
    """One layer of an LSTM over (time, batch, features), without packed sequences."""
    state = call.state(call["input"])
    if not isinstance(state, Rows) or call["batch_sizes"]:
        return call.unknown()
    if state.axis is None:
        return call.joined([call.state(t) for t in call.tensors])
    if state.axis != 1:
        return call.mixed()
    hidden = [replace(state, axis=max(r.ndim - 2, 0)) for r in call.results[1:3]]
    return [state, *hidden, *(call.unknown() for _ in call.results[3:])]


def step_of_a_cell(call: Call) -> State:
    return call.joined([call.state(t) for t in call.tensors])


RULES: dict[str, Rule] = {
    "mm": contraction("self mat2", "nk,kp->np"),
    "addmm": contraction("mat1 mat2 self", "nk,kp,np->np"),
    "mv": contraction("self vec", "nk,k->n"),
    "addmv": contraction("mat vec self", "nk,k,n->n"),
    "dot": contraction("self tensor", "k,k->"),
    "bmm": contraction("self mat2", "bnk,bkp->bnp"),
    "baddbmm": contraction("batch1 batch2 self", "bnk,bkp,bnp->bnp"),
    "linear": contraction("input weight bias", "k,ok,o->o"),
    "mkldnn_linear": contraction("self weight bias", "k,ok,o->o"),
    **lines(contraction("x1 x2", "nk,pk->np"), "_cdist_forward _euclidean_dist"),
    "_trilinear": trilinear,
    **lines(
        first_only(_ATTENTION),
        """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable""",
    ),
    **lines(convolution, "convolution _convolution mkldnn_convolution cudnn_convolution convolution_overrideable"),
    **lines(recurrent, "mkldnn_rnn_layer _cudnn_rnn"),
    **lines(step_of_a_cell, "_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
}
