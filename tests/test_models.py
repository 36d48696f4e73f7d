"""The built-in models: their sizes as published, what they refuse, and that every engine can clip them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from epsilons.errors import InputError
from epsilons.models import MODELS, build
from epsilons.models.model_checks import check_layers
from sums import CLOSE, away, length, sums_of

SHAPES = {"mnist-cnn": (1, 28, 28), "cifar10-cnn": (3, 32, 32), "resnet18-gn": (3, 32, 32)}
TEXT_MODELS = {"embedding-bag": {"buckets": 30}, "lstm": {"buckets": 30, "layers": 2}}


def ids(records: int, tokens: int = 9) -> Tensor:
    """(records, tokens) ids below 30 with the padding in front; the first record is an empty text."""
    lengths = torch.arange(records) * tokens // max(records - 1, 1)
    is_token = torch.arange(tokens) >= tokens - lengths[:, None]
    return torch.where(is_token, torch.randint(1, 30, (records, tokens)), 0)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_turns_each_record_into_its_outputs_and_mixes_nobody(name):
    x = ids(3) if name in TEXT_MODELS else torch.randn(3, *SHAPES.get(name, (2, 5)))
    model = build(name, tuple(x.shape[1:]), 7)
    check_layers(model)
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
        ("embedding-bag", (1, 28, 28), {}, r"\(tokens,\)"),
        ("embedding-bag", (9,), {"buckets": 1}, "at least 2, got 1"),
        ("embedding-bag", (9,), {"hidden": -1}, "0 for no hidden layer"),
        ("lstm", (9,), {"layers": 0}, "layers must be a whole number, at least 1"),
        ("lstm", (9,), {"bidirectional": True}, "takes: buckets, dimension, hidden, layers"),
        ("nothing", (4,), {}, "No model is called"),
        ("torch.nn:Linear", (4,), {"in_features": 4}, "cannot be made"),
    ],
)
def test_a_model_that_cannot_be_is_refused(name, shape, options, words):
    with pytest.raises(InputError, match=words):
        build(name, shape, 10, **options)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_s_gradients_are_clipped_as_the_definition_says(name):
    torch.manual_seed(0)
    model, x = build(name, (9,), 4, **TEXT_MODELS[name]), ids(8)
    clip_norm = torch.linspace(0.01, 3, 8, dtype=torch.float64)
    ours, theirs = sums_of(model, lambda model, x: model(x).square().sum(1), x, clip_norm)
    assert away(ours, theirs) <= CLOSE * length(theirs)


def test_padding_adds_nothing_to_the_mean_of_embeddings():
    torch.manual_seed(0)
    model = build("embedding-bag", (9,), 4, buckets=30)
    x = ids(5)
    torch.testing.assert_close(model(x), model(torch.cat([torch.zeros(5, 40, dtype=torch.long), x], 1)))
    mean = torch.stack([model[0].embeddings.embedding.weight[row[row > 0]].mean(0) for row in x[1:]])
    torch.testing.assert_close(model[0](x), torch.cat([torch.zeros(1, 16), mean]))


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_noise_in_the_padding_s_embedding_is_never_read(name):
    model, x = build(name, (9,), 4, **TEXT_MODELS[name]), ids(5)
    before = model(x)
    with torch.no_grad():
        model[0].embeddings.embedding.weight[0] += 7.0  # as the noise of many updates does
    assert torch.equal(model(x), before)


def test_an_lstm_reads_tokens_in_order_and_its_last_state_is_after_the_last_token():
    torch.manual_seed(0)
    model, x = build("lstm", (9,), 4, buckets=30), ids(2)
    last = model[0].lstm(model[0].embeddings(x))[1][0][-1]
    torch.testing.assert_close(model(x), model[1](last))
    assert not torch.allclose(model(x)[1], model(x.flip(1))[1])


@pytest.mark.parametrize("name", TEXT_MODELS)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32])
def test_ids_of_tokens_may_have_any_type_of_numbers(name, kind):
    model, x = build(name, (9,), 4, **TEXT_MODELS[name]), ids(3)
    assert torch.equal(model(x.to(kind)), model(x))


def test_a_model_of_one_s_own_is_imported():
    assert parameters(build("torch.nn:Linear", (4,), 3, in_features=4, out_features=3)) == 15
