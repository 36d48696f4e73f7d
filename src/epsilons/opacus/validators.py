"""ModuleValidator under Opacus' name, by the checks of this library."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

from torch import nn

from ..errors import EpsilonsError, InputError
from ..models import model_checks
from ..models.mending import group_count, replaced

_log = logging.getLogger(__name__)


class ModuleValidator:
    """Finds layers that mix records. Recurrent layers and attention need no replacement here, as they do in Opacus."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[EpsilonsError]:
        """The first error of a model that cannot be trained, in a list, or an empty list; strict raises it.

        >>> [type(error).__name__ for error in ModuleValidator.validate(nn.BatchNorm1d(4))]
        ['UnsupportedLayerError']
        """
        try:
            model_checks.check_whole(module)
            model_checks.check_layers(module)
        except EpsilonsError as error:
            if strict:
                raise
            return [error]
        return []

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """True if `validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, *, num_groups: int | None = None, replace_bn_with_in: bool = False) -> nn.Module:
        """A copy that can be trained: GroupNorm replaces BatchNorm, with its weight and bias. What changed is logged.

        num_groups          of each GroupNorm; None: the largest number that divides 32 and the channels, as in Opacus.
                            (BatchNorm1d gets fewer groups, as by `epsilons.mend`, where one channel would be left.)
        replace_bn_with_in  True: one group for each channel, as in InstanceNorm

        Raises UnsupportedLayerError for a layer that cannot be replaced, ModelError for a model that is wrapped, and
        InputError for numbers of groups that do not divide the channels, or both arguments.

        >>> ModuleValidator.fix(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
        16
        """
        if replace_bn_with_in and num_groups is not None:
            raise InputError("num_groups and replace_bn_with_in exclude one another. Give one of them.")

        def groups_of(layer: Any) -> int:
            channels: int = layer.num_features
            if channels % (num_groups or 1):
                raise InputError(f"num_groups={num_groups} does not divide the {channels:,} channels of a BatchNorm.")
            is_single = isinstance(layer, nn.BatchNorm1d) and math.gcd(32, channels) == channels
            default = group_count(channels) if is_single else math.gcd(32, channels)
            return channels if replace_bn_with_in else num_groups or default

        fixed = copy.deepcopy(module)
        for line in replaced(fixed, groups_of):
            _log.info(line)
        cls.validate(fixed, strict=True)
        return fixed

    #: `fix` validates what it returns.
    fix_and_validate = fix
