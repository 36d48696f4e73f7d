"""Layers that mix records are replaced by layers that do not: BatchNorm by GroupNorm, or by its frozen statistics.

All of a model is looked at before any of it is changed, so a model that cannot be mended stays as it was.
GroupNorm: Wu and He, Group Normalization (arXiv 1803.08494v3), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from ..errors import InputError, ModelError, UnsupportedLayerError
from .model_checks import check_whole, is_batchwise_depth, keeps_statistics

# -- The layers that `mend` puts in the place of BatchNorm: none of them mixes records


class FrozenNorm(nn.Module):
    """A BatchNorm with constant statistics: (x - running_mean) / sqrt(running_var + eps) * weight + bias, per channel.

    The statistics are buffers that no forward pass changes, in either mode. Weight and bias are those of the layer
    that is frozen, and are trained if they were trained before. The names of parameters and buffers are those of
    BatchNorm, so the same state_dict can be loaded.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.modules.batchnorm._NormBase) -> None:
        super().__init__()
        self.num_features, self.eps = norm.num_features, norm.eps
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, …) -> the same shape."""
        weight, bias = cast("Tensor | None", self.weight), cast("Tensor | None", self.bias)
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


class Activated(nn.Module):
    """Adds the dropout and the activation of a layer of timm, under the names that they have there."""

    drop: nn.Module
    act: nn.Module

    def activate_as(self, norm: nn.Module) -> None:
        self.drop = getattr(norm, "drop", None) or nn.Identity()
        self.act = getattr(norm, "act", None) or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.act(self.drop(super().forward(x))))


class GroupNormAct(Activated, nn.GroupNorm):
    """GroupNorm, then dropout and activation."""


class FrozenNormAct(Activated, FrozenNorm):
    """FrozenNorm, then dropout and activation."""


# -- Layers that mix records are replaced by layers that do not: BatchNorm by GroupNorm, or by its frozen statistics
#

#: Channels of a group, and groups, that are aimed at when the caller states no number of groups.
GROUP_SIZE, MOST_GROUPS = 8, 32

#: Forward methods that do nothing but normalise.
PLAIN = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, _InstanceNorm)}

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

#: Layers of timm that normalise, then apply `drop` and `act`.
OF_TIMM = ("BatchNormAct2d", "SyncBatchNormAct")


def mend(model: nn.Module, batch_norm: Literal["group", "freeze"] = "group", groups: int | None = None) -> list[str]:
    """Replace the layers of a model that mix records, in place. Returns what was replaced, one line per layer.

    The model itself is changed, so keep it: `model = mend(model)` would lose it.

    model       any module that contains the layers; a layer itself cannot be replaced in place
    batch_norm  "group": BatchNorm becomes GroupNorm, with the same weight and bias. The outputs change, so train
                the model after it. "freeze": the running statistics become constants, as in eval mode, and later calls
                of `train()` do not change this. For models that were trained on public data: no guarantee covers the
                statistics
    groups      at most so many groups for each GroupNorm (default: at most 32, of at least 8 channels where there
                are as many). A number is chosen that divides the channels and leaves at least 2 in each group: of
                a single value, GroupNorm would leave nothing

    Also: InstanceNorm keeps no running statistics any more, or uses them as constants ("freeze"), and StochasticDepth
    drops rows in place of batches. A layer that is used in several places stays one layer. Parameters stay the same
    objects, so an optimizer that holds them stays valid.

    Raises UnsupportedLayerError for a layer that cannot be replaced, ModelError for a model that is wrapped, and
    InputError for other arguments. The model is then unchanged.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    >>> mend(model)
    ['1: BatchNorm2d(16) is now GroupNorm(2, 16). Weight and bias are kept, the outputs change.']
    """
    _check_arguments(model, batch_norm, groups)
    choose = None if batch_norm == "freeze" else lambda layer: group_count(layer.num_features, groups)
    return replaced(model, choose)


def replaced(model: nn.Module, choose: Callable[[Any], int] | None) -> list[str]:
    """The same; choose: the number of groups for a BatchNorm layer, None to freeze it. Raises what `mend` raises."""
    check_whole(model)
    found = list(_found(model))
    for layer in found:
        _check_place(layer, model)
        _check_kind(layer)
    changes = [_changed(layer, choose) for layer in found]
    for change in changes:
        change.apply()
    return [change.line for change in changes]


@dataclass(frozen=True)
class _Layer:
    """A layer that mixes records or keeps statistics of them, and every place in the model where it is."""

    module: nn.Module
    places: tuple[tuple[nn.Module, str], ...]  # (parent, name in the parent)
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its type and size, at its paths: "BatchNorm2d(64)"."""
        channels = getattr(self.module, "num_features", None)
        return type(self.module).__name__ + (f"({channels})" if channels is not None else "")

    @property
    def where(self) -> str:
        return ", ".join(self.paths) + (" (one layer)" if len(self.paths) > 1 else "")

    def refusal(self, problem: str) -> UnsupportedLayerError:
        return UnsupportedLayerError(f"{type(self.module).__name__} ({self.where or 'the model itself'}) {problem}")


@dataclass(frozen=True)
class _Change:
    """What a layer is replaced by, None if its mode alone changes, and the line that says so."""

    layer: _Layer
    new: nn.Module | None
    line: str

    def apply(self) -> None:
        if self.new is None:
            cast("Any", self.layer.module).mode = "row"
            return
        self.new.train(self.layer.module.training)
        for parent, name in self.layer.places:
            parent._modules[name] = self.new


def _check_arguments(model: nn.Module, batch_norm: str, groups: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a torch module, got {type(model).__name__}. mend(model) returns lines, no model.")
    if batch_norm not in ("group", "freeze"):
        raise InputError(f'batch_norm must be "group" or "freeze", got {batch_norm!r}.')
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        raise InputError(f"groups must be a whole number of at least 1, got {groups!r}.")
    if groups is not None and batch_norm == "freeze":
        raise InputError('groups is the number of groups of GroupNorm. Leave it out with batch_norm="freeze".')
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError("Got a model with parts compiled by torch.jit. Mend the model before it is compiled.")


def _found(model: nn.Module) -> Iterator[_Layer]:
    """Every layer to be changed, once, in the order of the model."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    paths: dict[nn.Module, list[str]] = {}
    parents: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parents[path] = module
        if not (isinstance(module, _BatchNorm) or keeps_statistics(module) or is_batchwise_depth(module)):
            continue
        parent, _, name = path.rpartition(".")
        places.setdefault(module, [])
        paths.setdefault(module, []).append(path)
        if path:
            places[module].append((parents[parent], name))
    for module, where in places.items():
        yield _Layer(module, tuple(where), tuple(paths[module]))


def _check_place(layer: _Layer, model: nn.Module) -> None:
    """Refuse a layer that would still be used at a place that a replacement does not reach."""
    if is_batchwise_depth(layer.module):
        return  # changed itself, so it may be anywhere
    if not layer.places:
        raise layer.refusal("cannot be replaced in place. Pass a model that contains it, e.g. nn.Sequential(layer).")
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name != "_modules" and _holds(value, layer.module):
                raise layer.refusal(
                    f"is also in the plain attribute {name!r} of {path or 'the model'}, where a replacement would not "
                    "be seen. Keep layers in nn.ModuleList or nn.ModuleDict."
                )


def _holds(value: object, module: nn.Module) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
    return any(one is module for one in values)


def _check_kind(layer: _Layer) -> None:
    """Refuse a layer that does more than its type shows."""
    module = layer.module
    if is_batchwise_depth(module):
        return
    if any(is_lazy(value) for value in (*module.parameters(), *module.buffers())) or not module.num_features:
        raise layer.refusal("has no number of channels yet. Call the model once, on made-up inputs, then mend it.")
    if hasattr(module, "parametrizations"):
        raise layer.refusal("has parametrizations. Remove them by torch.nn.utils.parametrize.remove_parametrizations.")
    if _own_hooks(module):
        raise layer.refusal("has hooks, which a replacement would lose. Remove them, mend, and add them again.")
    if "forward" in vars(module) or (type(module).forward not in PLAIN and not _is_of_timm(module)):
        raise layer.refusal(
            "has a forward method of its own, so nothing is known to compute the same without other records. Replace "
            "it by a layer of yours, then mend the rest."
        )


def _own_hooks(module: nn.Module) -> bool:
    """True for hooks that calls of this very module run."""
    return any(
        getattr(module, f"_{kind}_hooks", None) for kind in ("forward", "forward_pre", "backward", "backward_pre")
    )


def _is_of_timm(module: nn.Module) -> bool:
    return type(module).__name__ in OF_TIMM and type(module).__module__.startswith("timm.")


def group_count(channels: int, most: int | None = None) -> int:
    """The number of groups for so many channels: the largest divisor that leaves groups large enough.

    most  at most so many groups, of at least 2 channels; without it at most 32 groups of at least 8 channels

    >>> group_count(64), group_count(512), group_count(13), group_count(64, 16)
    (8, 32, 1, 16)
    """
    size = GROUP_SIZE if most is None else 2
    limit = min(channels // size, MOST_GROUPS if most is None else most)
    return max((g for g in range(1, limit + 1) if channels % g == 0), default=1)


def _changed(layer: _Layer, choose: Callable[[Any], int] | None) -> _Change:
    if is_batchwise_depth(layer.module):
        return _Change(layer, None, f"{layer.where}: StochasticDepth now drops the layer for each record alone.")
    if choose is None:
        return _frozen(layer)
    return _without_statistics(layer) if isinstance(layer.module, _InstanceNorm) else _grouped(layer, choose)


def _grouped(layer: _Layer, choose: Callable[[Any], int]) -> _Change:
    module = cast("Any", layer.module)
    if module.num_features < 2:
        raise layer.refusal(
            "has one channel. GroupNorm over a single value leaves nothing of it. Remove the layer, or use "
            'batch_norm="freeze" if its statistics come from public data.'
        )
    count = choose(module)
    kind = GroupNormAct if _is_of_timm(module) else nn.GroupNorm
    new = kind(count, module.num_features, eps=module.eps, affine=False)
    _keep_affine(new, module)
    line = f"{layer.where}: {layer.name} is now GroupNorm({count}, {module.num_features})"
    line += f"{_activation(new, module)}. {_kept(module)}the outputs change."
    if module.num_features == 2 * count:
        line += " Of two values in a group, GroupNorm keeps little more than the order; wider layers keep more."
    return _Change(layer, new, line)


def _keep_affine(new: nn.Module, old: Any) -> None:
    """Give the new layer the very parameters of the old one, or none."""
    cast("Any", new).affine = old.weight is not None
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(old, name))


def _kept(module: Any) -> str:
    if module.bias is not None:
        return "Weight and bias are kept, "
    return "The weight is kept, " if module.affine else "It had no weight, "


def _activation(new: nn.Module, old: nn.Module) -> str:
    """Carry over what timm does after normalising. Returns the words for it."""
    if not isinstance(new, Activated):
        return ""
    new.activate_as(old)
    return f", then {type(new.act).__name__} as before"


def _without_statistics(layer: _Layer) -> _Change:
    module = cast("Any", layer.module)
    kind = next(kind for kind in INSTANCE_NORMS if isinstance(module, kind))
    new = kind(module.num_features, eps=module.eps, affine=False, track_running_stats=False)
    _keep_affine(new, module)
    line = (
        f"{layer.where}: {layer.name} keeps no running statistics, which would show records without noise. In eval "
        "mode it normalises as in training."
    )
    return _Change(layer, new, line)


def _frozen(layer: _Layer) -> _Change:
    module = cast("_NormBase", layer.module)
    if module.running_mean is None or module.running_var is None:
        raise layer.refusal('has no running statistics to freeze. Use batch_norm="group".')
    new = FrozenNormAct(module) if _is_of_timm(module) else FrozenNorm(module)
    line = f"{layer.where}: {layer.name} is frozen{_activation(new, module)}. "
    if _never_updated(module):
        line += "Its statistics were never updated (mean 0, variance 1), so it normalises nothing."
    else:
        line += "Its statistics are constants that no guarantee covers: they must come from public data."
    return _Change(layer, new, line)


def _never_updated(module: _NormBase) -> bool:
    """True for the statistics of a new layer, also if they were loaded."""
    mean, variance = cast("torch.Tensor", module.running_mean), cast("torch.Tensor", module.running_var)
    return bool((mean == 0).all() and (variance == 1).all())
