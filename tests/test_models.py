"""The built-in models: their sizes as published, what they refuse, and that every engine can clip them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epsilons.errors import InputError
from epsilons.training.model_checks import check_layers
from epsilons.training.models import MODELS, build

SHAPES = {"mnist-cnn": (1, 28, 28), "cifar10-cnn": (3, 32, 32), "resnet18-gn": (3, 32, 32)}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_turns_each_record_into_its_outputs_and_mixes_nobody(name):
    shape = SHAPES.get(name, (2, 5))
    model = build(name, shape, 7)
    check_layers(model)
    x = torch.randn(3, *shape)
    together = model.eval()(x)
    assert together.shape == (3, 7)
    alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("mnist-cnn", (1, 28, 28), {}, 26_010),  # the paper's, counted in its published code
        ("cifar10-cnn", (3, 32, 32), {}, 550_570),
        ("resnet18-gn", (3, 224, 224), {"stem": "large"}, 11_181_642),  # ResNet-18 with 10 classes
        ("logistic", (64,), {}, 650),
        ("mlp", (64,), {"hidden": [32, 16]}, 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10),
    ],
)
def test_a_model_has_the_parameters_that_were_published(name, shape, options, count):
    assert parameters(build(name, shape, 10, **options)) == count


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("mnist-cnn", (64,), {}, r"\(1, 28, 28\)"),
        ("cifar10-cnn", (1, 28, 28), {}, r"\(3, 32, 32\)"),
        ("resnet18-gn", (3, 4, 4), {}, "at least 8"),
        ("resnet18-gn", (3, 32, 32), {"norm_groups": 3}, "divide 64"),
        ("resnet18-gn", (3, 32, 32), {"stem": "tall"}, "'tall'"),
        ("mlp", (4,), {"hidden": [0]}, "layer widths"),
        ("mlp", (4,), {"activation": "sine"}, "'sine'"),
        ("mlp", (4,), {"hidden": [10**15]}, "cannot be made"),
        ("nothing", (4,), {}, "No model is called"),
        ("torch.nn:Linear", (4,), {"in_features": 4}, "cannot be made"),
    ],
)
def test_a_model_that_cannot_be_is_refused(name, shape, options, words):
    with pytest.raises(InputError, match=words):
        build(name, shape, 10, **options)


def test_a_model_of_one_s_own_is_imported():
    assert parameters(build("torch.nn:Linear", (4,), 3, in_features=4, out_features=3)) == 15
