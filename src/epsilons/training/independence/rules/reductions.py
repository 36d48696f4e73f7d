"""Operators over whole axes: sums, softmax, sorting, pooling, norms within a record."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..states import FREE, Call, Mixed, Rows, State, Unknown, axes, unless
from .general import Rule, all_but_the_first, dim, every_axis, last, lines, meet


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


RULES: dict[str, Rule] = {
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
}
