"""Small models to start from, none with a layer that mixes records.

To add one: a function `(shape, outputs, **options) -> nn.Module` and a line in MODELS. `shape` is that of one record's
input, `outputs` the number of classes, or 1 for a number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import EpsilonsError, InputError, app_packages
from ..planning.planner import imported
from .networks import cifar10_cnn, embedding_bag, logistic, lstm, mlp, mnist_cnn, resnet18_gn

if TYPE_CHECKING:
    from ..ledger.model_file import Named

MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "mnist-cnn": mnist_cnn,
    "cifar10-cnn": cifar10_cnn,
    "resnet18-gn": resnet18_gn,
    "embedding-bag": embedding_bag,
    "lstm": lstm,
}

#: A larger model of the table is refused before it takes memory.
MOST_PARAMETERS = 2**31

#: The models that `build` made, as long as they are in use.
_NAMED: WeakKeyDictionary[nn.Module, Named] = WeakKeyDictionary()


def build(name: str, shape: tuple[int, ...], outputs: int, **options: Any) -> nn.Module:
    """A model by its name in MODELS, or by import path "package.module:callable", which gets the options alone.

    Raises InputError if there is no such model, an option is unknown, or the import path leads to no nn.Module.
    """
    if name in MODELS:
        with app_packages():
            from ..ledger.model_file import Named

        make = MODELS[name]
        known = list(inspect.signature(make).parameters)[2:]
        for option in options:
            if option not in known:
                takes = ", ".join(known) or "none"
                raise InputError(f"The model {name!r} has no option {option!r}; it takes: {takes}.")
        with torch.device("meta"):  # takes no memory
            size = sum(p.numel() for p in _made(name, lambda: make(shape, outputs, **options)).parameters())
        if size > MOST_PARAMETERS:
            raise InputError(f"The model {name!r} cannot be made: {size:,} parameters, at most {MOST_PARAMETERS:,}.")
        made = _made(name, lambda: make(shape, outputs, **options))
        _NAMED[made] = Named(name=name, options=options, shape=tuple(shape), outputs=outputs)
        return made
    if ":" not in name:
        raise InputError(
            f"No model is called {name!r}; there are: {', '.join(MODELS)}. For one of your own write its import path, "
            '"package.module:callable".'
        )
    own = imported(name, "model")
    return _made(name, lambda: own(**options))


def name_of(model: nn.Module) -> Named | None:
    """How `build` makes this model again; None if it did not make it."""
    return _NAMED.get(model)


def _made(name: str, make: Callable[[], Any]) -> nn.Module:
    try:
        made = make()
    except EpsilonsError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"The model {name!r} cannot be made with these options: {error!s:.200}.") from None
    if not isinstance(made, nn.Module):
        raise InputError(f"{name} returned a {type(made).__name__}; expected a torch.nn.Module.")
    return made


__all__ = ["MODELS", "build", "name_of"]
