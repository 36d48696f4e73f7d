"""An optimizer around the caller's own: `step` is another one, and everything else is the caller's."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import InputError


class WrappedOptimizer(Optimizer):
    """Shares groups, state and defaults with `original_optimizer`, so schedules of either work. Subclasses step."""

    def __init__(self, optimizer: Optimizer) -> None:
        # Not Optimizer.__init__: everything that it sets up is the original optimizer's.
        self.original_optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise InputError("Parameters cannot be added to a private run. Give them to the optimizer before it begins.")

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self.original_optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.original_optimizer!r})"
