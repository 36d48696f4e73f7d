"""Performance: the settings of speed, what they record and change; products stay in full precision."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epsilons
from epsilons.cli.config_training import PerformanceSection
from epsilons.errors import InputError
from epsilons.training import performance
from epsilons.training.clipping import ENGINES
from epsilons.training.clipping.precision import _switches, full_precision, in_use
from small_runs import parameters_of, private_over, some_plan, train


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


def begun(**options):
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(60, 3, 8, 8, generator=generator), torch.randint(0, 4, (60,), generator=generator))
    model = network()
    return model, private_over(model, data, some_plan(steps=3), lr=0.1, **options)


def trained(**options) -> nn.Module:
    model, private = begun(**options)
    with private:
        train(private, model)
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_last_is_another_layout_of_the_same_training(engine):
    usual, ours = trained(engine=engine), trained(engine=engine, channels_last=True)
    assert ours[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not ours[0].weight.is_contiguous()
    torch.testing.assert_close(parameters_of(ours), parameters_of(usual), atol=1e-6, rtol=1e-5)


def test_what_was_tuned_is_in_the_run_and_another_layout_is_another_sum(tmp_path):
    _, private = begun(run_dir=tmp_path / "run", channels_last=True, allocator=True)
    described = private._parts.fingerprint
    private.close()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["performance"] == {
        "engine": "ghost", "max_physical_batch": None, "num_workers": 0, "compile": False,
        "allocator": True, "channels_last": True,
    }  # fmt: skip
    _, private = begun(run_dir=tmp_path / "other")
    assert private._parts.fingerprint != described
    private.close()


def test_make_private_takes_at_most_16_keywords_and_fit_at_most_25():
    for function, most in ((epsilons.make_private, 16), (epsilons.fit, 25)):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert kinds.count(inspect.Parameter.KEYWORD_ONLY) <= most


def test_the_config_has_the_fields_of_performance_with_their_defaults():
    """Its data are in memory, so it needs no workers."""
    assert PerformanceSection().model_dump() | {"num_workers": 0} == asdict(epsilons.Performance())


def test_make_private_does_not_compile():
    with pytest.raises(InputError, match="does not see the loss"):
        begun(compile=True)


def test_the_allocator_is_refused_where_it_cannot_be_set(monkeypatch):
    monkeypatch.setattr(performance.ctypes, "CDLL", lambda _: object())
    with pytest.raises(InputError, match="glibc"):
        begun(allocator=True)


def _set(name: str) -> None:
    backends = torch.backends
    if name == "older":
        torch.set_float32_matmul_precision("medium")
    elif not hasattr(backends.mkldnn, "matmul"):
        pytest.skip("needs torch 2.9")
    elif name == "newer":
        backends.mkldnn.matmul.fp32_precision = "bf16"
    else:
        backends.fp32_precision = "tf32"


@pytest.fixture(params=["older", "newer", "all"])
def coarse(request):
    """Every way to ask torch for coarser products."""
    own = [part.fp32_precision for part in _switches()]
    before = getattr(torch.backends, "fp32_precision", None)
    _set(request.param)
    yield
    torch.set_float32_matmul_precision("highest")
    if before is not None:
        torch.backends.fp32_precision = before
    for part, precision in zip(_switches(), own, strict=True):
        part.fp32_precision = precision
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_norms_and_sums_are_full_precision_whatever_torch_is_set_to(engine, coarse):
    before = in_use()
    assert "bf16" in before or "tf32" in before or before == "medium"
    inside = []
    own = ENGINES[engine]()
    model = network()
    own.attach(model, list(model.parameters()))
    x, y = torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
    for record in (0, 5):
        only = torch.zeros(6, dtype=torch.float64)
        only[record] = 1.0
        own.begin(6)
        hidden = model(x)
        hidden.register_hook(lambda g: inside.append(in_use()))
        losses = F.cross_entropy(hidden, y, reduction="none")
        found = own.clipped_sum(losses, torch.full((6,), 1e-3, dtype=torch.float64), only)
        assert 0.999e-3 <= sum(float(f.square().sum()) for f in found) ** 0.5 <= 1e-3
    assert inside
    assert all(precision == "highest" or set(precision.split()) == {"ieee"} for precision in inside)
    assert in_use() == before


def test_full_precision_is_left_by_errors_too():
    before = in_use()
    with pytest.raises(ValueError, match="out"), full_precision():
        raise ValueError("out")
    assert in_use() == before
