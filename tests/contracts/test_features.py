"""Features are functions of one record and of public constants; what FEATURES lists is examined here.

At a fixed place in a fixed number of records, the bits of a record's features are equal whatever the other records are.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from encoders import TRAINED_ON, tiny_encoder
from epsilons.errors import InputError
from epsilons.training.features import FEATURES

RECORDS = 37  # more than a block, and no multiple of one
ROWS = (0, 7, RECORDS - 1)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "naïve", "dog", "42", "rivers", "sing", "of", "snow"]


def images(seed: int, count: int = RECORDS) -> torch.Tensor:
    return torch.rand(count, 1, 16, 20, generator=torch.Generator().manual_seed(seed))


def texts(seed: int, count: int = RECORDS) -> list[str]:
    """Of seed 0, short ones at ROWS and long ones between them; of other seeds short ones."""
    coins = random.Random(seed)
    most = [1 if seed or row in ROWS else 40 for row in range(count)]
    return [" ".join(coins.choices(WORDS, k=coins.randint(1, words))) for words in most]


def replaced(inputs: Any, others: Any, row: int) -> Any:
    """The other records, with one of the inputs in its place."""
    if isinstance(inputs, list):
        return [*others[:row], inputs[row], *others[row + 1 :]]
    return torch.cat([others[:row], inputs[row : row + 1], others[row + 1 :]])


@pytest.fixture(params=FEATURES)
def kind(request, tmp_path_factory):
    """(features, options, inputs of a seed)"""
    features = FEATURES[request.param]
    options: dict[str, Any] = {"normalisation": "public"} if request.param == "scattering" else {}
    if request.param == "encoder":
        pytest.importorskip("transformers", reason="the extra encoder")
        options = {"model": tiny_encoder(tmp_path_factory), "trained_on": TRAINED_ON, "tokens": 16}
    return features, options, texts if features.of_texts else images


def test_features_have_the_same_bits_whatever_the_other_records_are(kind, one_thread):
    features, options, inputs = kind
    mine = inputs(0)
    computed = features(mine, **options)
    for row in ROWS:
        assert torch.equal(features(replaced(mine, inputs(row + 1), row), **options)[row], computed[row])
    assert torch.equal(features(mine[:5], **options), computed[:5])


def test_features_are_32_bit_rows_that_are_finite_and_differ_between_records(kind):
    features, options, inputs = kind
    computed = features(inputs(0), **options)
    assert computed.dtype == torch.float32
    assert computed.ndim == 2
    assert len(computed) == RECORDS
    assert computed.isfinite().all()
    assert (torch.pdist(computed) > 0).all()
    assert not computed.requires_grad


def test_features_keep_nothing_of_earlier_records(kind, one_thread):
    """A function that learns from what it sees gives other bits the second time."""
    features, options, inputs = kind
    first = features(inputs(0), **options)
    features(inputs(1), **options)
    assert torch.equal(features(inputs(0), **options), first)


def test_the_guarantee_can_name_where_constants_come_from_and_they_can_be_stored(kind, one_thread):
    features, options, inputs = kind
    shape = () if features.of_texts else tuple(inputs(0).shape[1:])
    origin, constants = features.origin(shape, **options), features.constants(shape, **options)
    assert "record's" in origin
    assert not origin.endswith(".")
    if constants:
        stored = {name: values.clone() for name, values in constants.items()}
        assert torch.equal(features(inputs(0), **options, constants=stored), features(inputs(0), **options))
        stored = {name: 1.1 * values + 0.1 for name, values in constants.items()}
        assert not torch.allclose(features(inputs(0), **options, constants=stored), features(inputs(0), **options))


def test_unknown_options_and_inputs_of_the_other_kind_are_refused(kind):
    features, options, inputs = kind
    with pytest.raises(InputError, match=r"no option 'colour'; they take: "):
        features(inputs(0), **options, colour=3)
    with pytest.raises(InputError, match="got"):
        features(images(0) if features.of_texts else texts(0), **options)
