"""ModuleValidator under Opacus' name, by the checks of this library."""

from __future__ import annotations

import copy
import logging

from torch import nn

from ..errors import EpsilonsError
from ..models import model_checks
from ..training import mend

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
    def fix(cls, module: nn.Module) -> nn.Module:
        """A copy that can be trained: `epsilons.mend` replaces BatchNorm by GroupNorm. What it changed is logged.

        Raises UnsupportedLayerError for a layer that cannot be replaced, and ModelError for a model that is wrapped.
        """
        fixed = copy.deepcopy(module)
        for line in mend(fixed):
            _log.info(line)
        cls.validate(fixed, strict=True)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """The same as `fix`."""
        return cls.fix(module)
