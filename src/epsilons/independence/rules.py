"""Which record each entry of an operator's result depends on, given the same of its arguments.

The rules are facts about ATen operators, grouped by kind:

    pointwise    entry by entry; copies and new tensors
    reductions   sums, softmax, sorting, pooling, norms: entries meet along some axes
    products     matrix products, attention, convolutions, recurrent layers
    indexing     picking, writing, joining by places
    layers       batch norm, embeddings, losses of classes

To add an operator: give a rule (`general` builds most of them) and add its name to the table of its kind. Without a
rule, the result is unknown, which refuses nothing: losses and gradients are then compared in more forms. For some
operators with a rule, only the use that keeps records apart is known; every other use of those is mixed or unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .states import FREE, Call, Free, Mixed, Rows, State, Unknown, axes, shifted, unless, worst

# -- How rules are built: entries that meet along some axes, and products that are summed over an index

#: A rule gives the state of all results, or of each. `result_of` calls it only if no argument is mixed or unknown.
Rule = Callable[[Call], State | list[State]]
Axes = Callable[[Call, Tensor], Collection[int]]


def lines(rule: Rule, names: str) -> dict[str, Rule]:
    """The same rule for operators of these names."""
    return dict.fromkeys(names.split(), rule)


def dim(call: Call, x: Tensor) -> tuple[int, ...]:
    """The axes that the operator was called with."""
    return axes(call["dims"] if "dims" in call.arguments else call["dim"], x.ndim)


def every_axis(call: Call, x: Tensor) -> range:
    return range(x.ndim)


def all_but_the_first(call: Call, x: Tensor) -> range:
    return range(1, x.ndim)


def last(count: int) -> Axes:
    return lambda call, x: range(x.ndim - count, x.ndim)


def meet(
    along: Axes,
    otherwise: Callable[[Call], State] = Call.mixed,
    data: str = "",
    others: Callable[[Call], State] = Call.unknown,
) -> Callable[[Call], State]:
    """Entries of `data` meet along some axes, and nowhere else.

    otherwise  the state of the result if the records lie along one of these axes
    data       names of the arguments that hold records; the first tensor if none is given
    others     the state of the result if another argument depends on records
    """

    def rule(call: Call) -> State:
        parts = call.given(data) if data else call.tensors[:1]
        if any(call.state(t) != FREE for t in call.tensors if all(t is not part for part in parts)):
            return others(call)
        return unless(call.joined([call.state(part) for part in parts]), along(call, parts[0]), otherwise(call))

    return rule


def first_only(rule: Callable[[Call], State]) -> Rule:
    """The rule for the first result; nothing is known of the others."""
    return lambda call: [rule(call), *(call.unknown() for _ in call.results[1:])]


def contraction(names: str, spec: str) -> Callable[[Call], State]:
    """A product that is summed over every index that the result lacks, as `torch.einsum` writes it.

    Axes in front of those in `spec` are broadcast. Arguments may have fewer axes than their term.

    >>> rule = contraction("self mat2", "nk,kp->np")  # records along n or p stay apart; along k they meet
    """
    inputs, result = spec.split("->")

    def index(argument: Any, term: str, axis: int) -> tuple[str, int]:
        """The letter of an axis, or how many axes in front of the term it lies."""
        place = axis - argument.ndim + len(term)
        return (term[place], 0) if place >= 0 else ("", place)

    def rule(call: Call) -> State:
        states: list[State] = []
        for name, term in zip(names.split(), inputs.split(","), strict=True):
            state = call.state(call[name])
            if isinstance(state, Rows) and state.axis is not None:
                letter, before = index(call[name], term, state.axis)
                if letter and letter not in result:
                    return call.mixed()
                place = result.index(letter) if letter else before
                state = replace(state, axis=call.results[0].ndim - len(result) + place)
            states.append(state)
        return call.joined(states)

    return rule


# -- Operators that pick, write or join entries by their places

#: Slices are added to others: records that share one are added up.
_added = meet(dim, data="self source value", others=Call.mixed)


def index_copy(call: Call) -> State:
    """Writes slices over others: what meets is not added up, but records may come out in another order."""
    state = _added(call)
    return call.unknown() if isinstance(state, Mixed) else state


def index_select(call: Call) -> State:
    x, index = call["self"], call["index"]
    (axis,) = dim(call, x)
    state, chosen = call.state(x), call.state(index)
    if chosen == FREE:
        return state if _is_in_order(index, x.shape[axis]) else unless(state, (axis,), call.unknown())
    if state != FREE or not isinstance(chosen, Rows):
        return call.unknown()
    return replace(chosen, axis=None if chosen.axis is None else axis)


def _is_in_order(index: Tensor, size: int) -> bool:
    """Whether all places are chosen in order, the same along all further axes."""
    if index.ndim == 0 or len(index) != size:
        return False
    flat = index.reshape(size, -1)
    return bool((flat == torch.arange(size, device=index.device)[:, None]).all())


def index(call: Call) -> State:
    """x[…] with tensors: a table looked up by records, or x[arange(n), …], or features picked the same for all."""
    x, indices = call["self"], call["indices"]
    places = [place for place, i in enumerate(indices) if i is not None]
    given = [indices[place] for place in places]
    state = call.state(x)
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return _masked(call, state, places[0], given)
    ndim = max(i.ndim for i in given)
    are_adjacent = places == list(range(places[0], places[0] + len(places)))
    start = places[0] if are_adjacent else 0
    chosen = shifted(call.broadcast(given), start)
    if state == FREE or not isinstance(chosen, Rows | Free):
        return chosen
    assert isinstance(state, Rows)
    if state.axis is None:
        return call.joined([state, chosen])
    if state.axis in places:
        is_own = state.inner == 1 and _is_each_its_own(
            call, given, given[places.index(state.axis)], x.shape[state.axis]
        )
        return call.joined([replace(state, axis=start), chosen]) if is_own else call.unknown()
    before = sum(place < state.axis for place in places)
    behind = ndim if not are_adjacent or places[0] < state.axis else 0
    return call.joined([replace(state, axis=state.axis - before + behind), chosen])


def _is_each_its_own(call: Call, given: Sequence[Tensor], which: Tensor, size: int) -> bool:
    """Whether each record picks from itself. which: the tensor among these that picks records"""
    shape = torch.broadcast_shapes(*(i.shape for i in given))  # type: ignore[no-untyped-call]
    is_whole = which.ndim == max(i.ndim for i in given) and shape[:1] == (size,)
    return call.state(which) == FREE and is_whole and _is_in_order(which, size)


def _masked(call: Call, state: State, start: int, given: Sequence[Tensor]) -> State:
    """x[mask]: as many entries as the mask has; nothing is known where it picks records, or depends on them."""
    if len(given) > 1 or call.state(given[0]) != FREE:
        return call.unknown()
    if not isinstance(state, Rows) or state.axis is None or state.axis < start:
        return state
    return call.unknown() if state.axis < start + given[0].ndim else shifted(state, 1 - given[0].ndim)


def cat(call: Call) -> State:
    parts = [t for t in call["tensors"] if t.ndim != 1 or len(t)]
    (axis,) = axes(call["dim"] or 0, call.results[0].ndim)
    states = [call.state(t) for t in parts]
    if all(not isinstance(s, Rows) or s.axis not in (axis, None) for s in states):
        return _beside(call, states)
    return _side_by_side(call, states, [t.shape[axis] for t in parts], axis)


def stack(call: Call) -> State:
    (axis,) = axes(call["dim"] or 0, call.results[0].ndim)
    states = [call.state(t) for t in call["tensors"]]
    if all(isinstance(s, Rows) and s.axis is None for s in states):
        return _side_by_side(call, states, [1] * len(states), axis)
    state = _beside(call, states)
    return shifted(state, 1) if isinstance(state, Rows) and state.axis is not None and state.axis >= axis else state


def _beside(call: Call, states: Sequence[State]) -> State:
    """Parts of different records lie beside each other and never meet."""
    state = call.joined(states)
    return call.unknown() if isinstance(state, Mixed) else state


def _side_by_side(call: Call, states: Sequence[State], sizes: Sequence[int], axis: int) -> State:
    """Parts laid one after the other along the records' axis."""
    rows = [s for s in states if isinstance(s, Rows) and s.axis in (axis, None)]
    if len(rows) < len(states):
        return call.unknown()
    if all(r == rows[0] for r in rows):
        return rows[0]  # all of them, once more; or one record alone
    inner = {size // r.count for size, r in zip(sizes, rows, strict=True)}
    follow = all(b.first == a.first + a.count for a, b in itertools.pairwise(rows))
    if not follow or len(inner) > 1 or any(s % r.count for s, r in zip(sizes, rows, strict=True)):
        return call.unknown()
    return Rows(axis, inner.pop(), rows[0].first, sum(r.count for r in rows))


def repeat(call: Call) -> State:
    return shifted(call.state(call["self"]), len(call["repeats"]) - call["self"].ndim)


def backward_of_slice(call: Call) -> State:
    """The gradient of x[…, start:end] or x[…, i]: zeros but there. Nothing is known where it cut along the records."""
    grad, size = call["grad_output"], list(call["input_sizes"])
    (axis,) = axes(call["dim"], len(size))
    state = call.state(grad)
    if not isinstance(state, Rows) or state.axis is None:
        return state
    if call.name == "select_backward":
        return replace(state, axis=state.axis + (axis <= state.axis))
    return state if axis != state.axis or grad.shape[axis] == size[axis] else call.unknown()


def index_put(call: Call) -> State:
    """The gradient of x[arange(n), …] by x: each record's values at places of its own."""
    x, given = call["self"], [i for i in call["indices"] if i is not None]
    values = call.state(call["values"])
    is_own = (
        call["indices"][0] is not None and call.state(x) == FREE and _is_each_its_own(call, given, given[0], x.shape[0])
    )
    in_order = Rows(0, 1, 0, x.shape[0])
    return in_order if is_own and {values, *map(call.state, given[1:])} <= {FREE, in_order} else call.unknown()


INDEXING: dict[str, Rule] = {
    **lines(backward_of_slice, "select_backward slice_backward"),
    "index_put": index_put,
    "gather": meet(dim, Call.unknown, data="self index"),
    **lines(meet(dim, data="self index src value"), "scatter scatter_add scatter_reduce"),
    **lines(_added, "index_add index_reduce"),
    **lines(index_copy, "index_copy index_fill"),
    "index_select": index_select,
    "index": index,
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
}


# -- Layers and losses with rules of their own: batch norm, embeddings, losses of classes


def batch_norm(call: Call) -> State | list[State]:
    """Channels in axis 1 never meet, and instance norm puts the records there; the others do, while training."""
    x = call["input"]
    state, rest = call.state(x), [call.state(t) for t in call.tensors if t is not x]
    statistics = replace(state, axis=0) if isinstance(state, Rows) and state.axis == 1 else FREE
    if any(s not in (FREE, statistics) for s in rest):
        return call.unknown()
    is_frozen = call["training"] is False or call.name.endswith(("no_training", "no_update"))
    if isinstance(state, Rows) and state.axis != 1 and not is_frozen:
        return call.mixed()
    return [state, *(statistics for _ in call.results[1:])]


def bag(call: Call) -> State | list[State]:
    """Bags of equal size, one or more per record."""
    indices, offsets = call["indices"], call["offsets"]
    state = call.state(indices)
    if not isinstance(state, Rows) or any(call.state(t) != FREE for t in call.tensors if t is not indices):
        return call.unknown()
    size = len(indices) // max(len(offsets), 1)
    is_even = torch.equal(offsets, torch.arange(len(offsets), device=offsets.device) * size)
    if state.axis != 0 or not is_even or len(offsets) * size != len(indices) or state.inner % max(size, 1):
        return call.unknown()
    return [replace(state, inner=state.inner // size), *(call.unknown() for _ in call.results[1:])]


_of_classes = meet(all_but_the_first, Call.unknown, data="grad_output self target is_target", others=Call.mixed)
_of_all = meet(every_axis, data="self target", others=Call.mixed)


def class_loss(call: Call) -> State | list[State]:
    """(n, classes, …) and (n, …). The total weight goes beyond a record."""
    if call["reduction"] != 0:
        return _of_all(call)
    return [_of_classes(call), *(call.mixed() for _ in call.results[1:])]


def margin_loss(call: Call) -> State:
    """multilabel_margin_loss: (n, classes) and (n, classes), and which of them are targets."""
    return _of_classes(call) if call["reduction"] == 0 else _of_all(call)


def class_loss_backward(call: Call) -> State:
    """The total weight counts for means only."""
    unused = () if call["reduction"] == 1 else ("total_weight",)
    return _of_classes(replace(call, arguments={k: v for k, v in call.arguments.items() if k not in unused}))


LAYERS: dict[str, Rule] = {
    **lines(
        batch_norm,
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
        _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update""",
    ),
    "embedding": meet(lambda call, x: (), data="indices"),
    **lines(bag, "_embedding_bag _embedding_bag_forward_only"),
    **lines(class_loss, "nll_loss_forward nll_loss2d_forward multi_margin_loss"),
    "multilabel_margin_loss_forward": margin_loss,
    **lines(margin_loss, "multi_margin_loss_backward multilabel_margin_loss_backward"),
    **lines(class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
}


# -- Operators that work entry by entry, and those that make, copy or fill tensors


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


def loss_by_entry_backward(call: Call) -> State:
    """A mean divides by the number of entries where no other operator sees it."""
    return call.unknown() if call["reduction"] == 1 else pointwise(call)


def copied(call: Call) -> State:
    """What is written over does not count."""
    source = call["src"] if isinstance(call["src"], Tensor) else call["value"]
    return shifted(call.state(source), call["self"].ndim - source.ndim) if isinstance(source, Tensor) else FREE


def from_nothing(call: Call) -> State:
    return FREE


#: Beside those that torch itself calls pointwise (`torch.Tag.pointwise`).
POINTWISE: dict[str, Rule] = {
    **lines(
        pointwise,
        """_to_copy _prelu_kernel native_dropout _fused_dropout rrelu_with_noise bernoulli log_sigmoid_forward
        hardswish softplus_backward log_sigmoid_backward leaky_relu_backward elu_backward hardsigmoid_backward
        hardswish_backward hardtanh_backward mish_backward rrelu_with_noise_backward
        where masked_fill glu_jvp _conj _conj_physical polar complex
        floor_divide frexp zero normal
        uniform random exponential geometric cauchy log_normal""",
    ),
    **lines(
        loss_by_entry,
        """mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        soft_margin_loss""",
    ),
    **lines(
        loss_by_entry_backward,
        """mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
        soft_margin_loss_backward""",
    ),
    **lines(copied, "copy fill"),
    **lines(
        from_nothing,
        """zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full
        new_empty new_empty_strided empty empty_strided zeros ones full arange lift_fresh scalar_tensor rand randn
        randint randperm eye linspace tril_indices triu_indices""",
    ),
}


# -- Matrix products, attention, convolutions and recurrent layers

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


PRODUCTS: dict[str, Rule] = {
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


# -- Operators over whole axes: sums, softmax, sorting, pooling, norms within a record


def reduction(call: Call) -> State:
    """A sum, mean, maximum, norm … over some axes, which the result may lack."""
    x = call["self"]
    dims = axes(call["dim"], x.ndim)
    state = unless(call.state(x), dims, call.mixed())
    if isinstance(state, Rows) and state.axis is not None and not call["keepdim"]:
        return replace(state, axis=state.axis - sum(d < state.axis for d in dims))
    return state


def rolled(call: Call) -> State:
    shifts = call["shifts"] if isinstance(call["shifts"], list | tuple) else [call["shifts"]]
    return unless(call.state(call["self"]), dim(call, call["self"]) if any(shifts) else (), call.mixed())


def running(call: Call) -> State:
    """Running sums. Those of integers are mostly places: where a record begins among all entries."""
    x = call["self"]
    state = unless(call.state(x), dim(call, x), call.mixed())
    return Unknown(call.cause, True) if isinstance(state, Mixed) and not x.is_floating_point() else state


def looked_up(call: Call) -> State:
    """Entries of one tensor looked up in all of another."""
    names = {"searchsorted": ("self", "sorted_sequence"), "bucketize": ("self", "boundaries")}
    entries, table = (call[name] for name in names.get(call.name, ("elements", "test_elements")))
    state = call.state(table)
    if state == FREE:
        return call.state(entries)
    first = table.ndim - 1 if call.name == "searchsorted" else 0  # in front of it lie separate tables
    searched = range(first, table.ndim)
    return call.joined([call.state(entries), unless(state, searched, call.mixed())])


def padded_axes(call: Call, x: Tensor) -> list[int]:
    return [x.ndim - 1 - i // 2 for i, amount in enumerate(call["pad"]) if amount]


def normalised_axes(call: Call, x: Tensor) -> range:
    return range(x.ndim - len(call["normalized_shape"]), x.ndim)


def axes_of_slices(call: Call, x: Tensor) -> list[int]:
    """All but the one along which the slices lie that are renormed."""
    return [axis for axis in range(x.ndim) if axis not in dim(call, x)]


REDUCTIONS: dict[str, Rule] = {
    **lines(
        reduction,
        """sum mean amax amin max min prod any all std var var_mean std_mean norm linalg_vector_norm logsumexp argmax
        argmin nansum median nanmedian mode kthvalue count_nonzero aminmax""",
    ),
    **lines(
        meet(dim),
        """_softmax _log_softmax _safe_softmax cumprod logcumsumexp cummax cummin glu topk flip _fft_r2c _fft_c2c
        _fft_c2r""",
    ),
    "roll": rolled,
    "sort": meet(dim, Call.unknown),
    "cumsum": running,
    "renorm": meet(axes_of_slices),
    **lines(looked_up, "bucketize searchsorted isin"),
    **lines(meet(every_axis, data="self weights"), "bincount histc"),
    "multinomial": meet(last(1)),
    **lines(meet(last(1), Call.unknown), "reflection_pad1d replication_pad1d upsample_nearest1d upsample_linear1d"),
    **lines(
        meet(last(2), Call.unknown),
        """max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d mkldnn_max_pool2d
        fractional_max_pool2d reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d
        upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa tril triu linalg_cholesky_ex
        linalg_inv_ex _linalg_eigh _linalg_svd _linalg_det linalg_qr cholesky linalg_matrix_exp""",
    ),
    **lines(
        meet(last(3), Call.unknown),
        """max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d replication_pad3d pixel_shuffle pixel_unshuffle
        channel_shuffle upsample_nearest3d upsample_trilinear3d""",
    ),
    "constant_pad_nd": meet(padded_axes, Call.unknown),
    **lines(meet(normalised_axes), "native_layer_norm _fused_rms_norm rms_norm"),
    **lines(meet(dim, data="grad_output output"), "_softmax_backward_data _log_softmax_backward_data"),
    "native_group_norm": meet(all_but_the_first, Call.unknown),
    # Backward passes: the gradient by the first argument. Those by weights are no part of a loss.
    "_prelu_kernel_backward": first_only(pointwise),
    "glu_backward": meet(dim, data="grad_output self"),
    **lines(
        first_only(meet(normalised_axes, data="grad_out input mean rstd")),
        "native_layer_norm_backward _fused_rms_norm_backward",
    ),
    "native_group_norm_backward": first_only(meet(all_but_the_first, Call.unknown, "grad_out input mean rstd")),
    "convolution_backward": first_only(meet(all_but_the_first, Call.unknown, "grad_output input")),
    "native_batch_norm_backward": first_only(
        lambda call: call.unknown() if call["train"] else meet(all_but_the_first, data="grad_out input")(call)
    ),
    **lines(meet(last(1), Call.unknown, "grad_output self"), "reflection_pad1d_backward replication_pad1d_backward"),
    **lines(
        meet(last(2), Call.unknown, "grad_output self indices"),
        """max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward
        adaptive_max_pool2d_backward reflection_pad2d_backward replication_pad2d_backward
        upsample_nearest2d_backward _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward""",
    ),
}


# -- Which record each entry of an operator's result depends on, given the same of its arguments

RULES: dict[str, Rule] = {**POINTWISE, **REDUCTIONS, **PRODUCTS, **INDEXING, **LAYERS}
#: These do not use all of their arguments.
_PARTIAL = (from_nothing, copied, class_loss_backward)
#: These may give another result than unknown where an argument is unknown.
_OWN_JUDGEMENT = (*_PARTIAL, pointwise, loss_by_entry)


def result_of(call: Call, is_pointwise: bool) -> list[State]:
    """The state of every result. is_pointwise: what torch itself says of an operator without a rule here."""
    rule = RULES.get(call.name) or (pointwise if is_pointwise else Call.unknown)
    state = _by_arguments([s for s in call.states.values() if not isinstance(s, Free)], rule)
    if state is not None:
        return [state] * len(call.results)
    try:
        result = rule(call)
    except Exception:  # a use that the rule was not written for
        result = call.unknown()
    if isinstance(result, list):
        return (result + [call.unknown()] * len(call.results))[: len(call.results)]
    return [result] * len(call.results)


def _by_arguments(states: list[State], rule: Rule) -> State | None:
    """The state of all results where the states of the arguments settle it; states: of those that are not free."""
    if not states:
        return FREE
    if rule not in _PARTIAL and all(isinstance(s, Rows) and s.axis is None and s == states[0] for s in states):
        return states[0]  # whatever an operator does to values of one record alone, its results are that record's
    return None if rule in _OWN_JUDGEMENT else worst(states)
