"""Which library is examined, and with which seeds."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

import pytest
import torch

from .adapters import Inexpressible, Refused, Trainer
from .trainers import EACH, METHODS, TRAINERS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    library = metafunc.config.getoption("--trainer")
    if "each" in metafunc.fixturenames:
        metafunc.parametrize("each", EACH[library], ids=lambda trainer: trainer.name)
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", METHODS[library])


@pytest.fixture(scope="session")
def trainer(request: pytest.FixtureRequest) -> Trainer:
    """The library under examination, as it is used by default; `each` is every way to compute gradients."""
    return TRAINERS[request.config.getoption("--trainer")]


@pytest.fixture(scope="session")
def seeded(request: pytest.FixtureRequest) -> Callable[[str], int]:
    """A seed by a name: always the same, so that a failure is about a change and not about luck; new with --slow."""

    def seed(name: str) -> int:
        fresh = request.config.getoption("--slow")
        number = secrets.randbits(48) if fresh else int.from_bytes(hashlib.blake2b(name.encode()).digest()[:6])
        print(f"seed of {name}: {number}")
        return number

    return seed


@pytest.fixture
def seed(request: pytest.FixtureRequest, seeded: Callable[[str], int]) -> int:
    """The seed of one test."""
    return seeded(request.node.name)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """What a library cannot be asked for is skipped. What a peer declines is no promise broken, so it is, too."""
    try:
        return (yield)
    except Inexpressible as reason:
        pytest.skip(f"cannot be expressed: {reason}")
    except Refused as reason:
        if pyfuncitem.config.getoption("--trainer") == "epsilons":
            raise
        pytest.skip(f"refused: {' '.join(str(reason).split())[:160]}")
