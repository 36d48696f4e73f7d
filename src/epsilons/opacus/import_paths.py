"""The import paths of Opacus 1.6 under `epsilons.opacus`: what is there, and what replaces everything else.

MODULES lists the modules that have no file of their own, with their names. Importing another path or name of Opacus
raises an ImportError with the sentence of REPLACED for this name, this path, or the nearest path above it.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any, NoReturn

from ..errors import InputError, ModelError, UnsupportedLayerError
from . import accountant, privacy_engine, validators
from .utils import batch_memory_manager
from .validators import ModuleValidator
from .wrappers import PrivateModule, PrivateOptimizer

_OWN = "Pass your own model, optimizer and data loader to PrivacyEngine.make_private, which returns the private ones."
#: Path -> sentence, for names and paths that are not here.
REPLACED = {
    **dict.fromkeys(("data_loader", "grad_sample", "optimizers", "privacy_engine", "utils"), _OWN),
    "GaussianAccountant": "It understates epsilon. Use PRVAccountant or RDPAccountant.",
    "accountants": "Use epsilons.accounting: rdp.epsilon and pld.epsilon take a history of epsilons.SampledGaussian.",
    "distributed": "This door trains in one process. For several use epsilons.make_private on every rank.",
    "layers": "Import layers from epsilons.opacus.layers.",
    "lightning": "Use epsilons.lightning.PrivateStrategy as the strategy of the Trainer.",
    "schedulers": "The plan fixes noise and clip norms, and certifies them. For several phases make an epsilons.Plan.",
    "utils.adaptive_clipping": "The plan certifies the clip norms before training. Use max_grad_norm.",
    "utils.fast_gradient_clipping_utils": 'Use grad_sample_mode="ghost": make_private then returns the criterion.',
    "validators": "Use ModuleValidator. Layers are checked by computation, so there are no rules to register.",
}


class _Returned(type):
    """The type of Opacus' names for what make_private returns: for annotations and isinstance, not to be called."""

    ours: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.ours)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(f"{cls.__name__} cannot be made by hand, nor trained in several processes. {_OWN}")


_ACCOUNTANTS = {name: getattr(accountant, name) for name in ("PRVAccountant", "RDPAccountant", "create_accountant")}
_MODULE = {"GradSampleModule": _Returned("GradSampleModule", (), {"ours": PrivateModule})}
_OPTIMIZER = {"DPOptimizer": _Returned("DPOptimizer", (), {"ours": PrivateOptimizer})}
_PARALLEL = "DifferentiallyPrivateDistributedDataParallel"
_ERRORS = ("Unsupported", "UnsupportedModule", "NotYetSupportedModule", "IllegalModuleConfiguration")
#: Path -> the names that are there, beside those of a file.
MODULES: dict[str, dict[str, Any]] = {
    "accountants": _ACCOUNTANTS | {"IAccountant": accountant.Accountant},
    **{f"accountants.{name}": _ACCOUNTANTS for name in ("prv", "rdp", "registry")},
    "accountants.accountant": {"IAccountant": accountant.Accountant},
    "accountants.utils": {"get_noise_multiplier": accountant.get_noise_multiplier},
    "distributed": {_PARALLEL: _Returned(_PARALLEL, (), {})},
    "grad_sample": _MODULE,
    "grad_sample.grad_sample_module": _MODULE,
    "grad_sample.functorch": {"make_functional": _Returned("make_functional", (), {})},
    "optimizers": _OPTIMIZER,
    "optimizers.optimizer": _OPTIMIZER,
    "utils.module_modification": {"convert_batchnorm_modules": ModuleValidator.fix},
    "validators.module_validator": {"ModuleValidator": ModuleValidator},
    "validators.errors": {f"{name}Error": ModelError for name in _ERRORS}
    | dict.fromkeys(("ShouldReplaceModuleError", "UnsupportableModuleError"), UnsupportedLayerError),
}


class _Replaced(MetaPathFinder):
    """Python asks it last, for paths below `epsilons.opacus` that are nowhere."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> None:
        """None, or an ImportError with the sentence of REPLACED."""
        if fullname.startswith(f"{__package__}."):
            parts = fullname.removeprefix(f"{__package__}.").split(".")
            for key in (parts[-1], *(".".join(parts[:end]) for end in range(len(parts), 0, -1))):
                if key in REPLACED:
                    raise ImportError(f"{fullname} is not here. {REPLACED[key]}", name=fullname)


for path, names in MODULES.items():
    made = module_from_spec(ModuleSpec(f"{__package__}.{path}", None, is_package=True))
    vars(made).update(names)
    sys.modules[made.__name__] = made
    parent, _, name = made.__name__.rpartition(".")
    setattr(sys.modules[parent], name, made)
vars(sys.modules[str(__package__)]).update(_MODULE)
for file in (batch_memory_manager, privacy_engine, validators):  # so that Python asks _Replaced for what they lack
    file.__path__ = []
sys.meta_path.append(_Replaced())
