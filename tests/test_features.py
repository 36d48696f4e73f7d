"""Scattering as its definition computes it, public constants, hashed texts and encoders."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from scipy.linalg import sqrtm
from sklearn.datasets import load_sample_images
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import epsilons
import scattering_twin
from encoders import TRAINED_ON, tiny_encoder
from epsilons.errors import InputError
from epsilons.training.features import FEATURES, encoder, hashed_text, sentence_encoder, wavelet_scattering
from epsilons.training.features.wavelet_scattering import _coefficients, scattering


def photographs(count: int, side: int = 32) -> Tensor:
    """(count, 3, side, side): crops of scikit-learn's two photographs."""
    pictures = [torch.tensor(p).permute(2, 0, 1) / 255 for p in load_sample_images().images]
    coins = np.random.default_rng(0)
    tops, lefts = coins.integers(0, 380, count), coins.integers(0, 590, count)
    crops = [
        pictures[i % 2][:, top : top + side, left : left + side]
        for i, (top, left) in enumerate(zip(tops, lefts, strict=True))
    ]
    return torch.stack(crops)


# -- scattering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "count"),
    [
        ((3, 32, 32), {}, 3_888),
        ((1, 28, 28), {}, 3_969),
        ((3, 32, 32), {"normalisation": "groups", "pooled": 2}, 972),
        ((3, 12, 16), {}, 3 * 81 * 9),
        ((4, 12, 12), {}, 4 * 81 * 9),
        ((1, 28, 28), {"normalisation": "public"}, 81 * 16),
    ],
)
def test_scattering_has_81_numbers_per_channel_and_place_of_size_about_one(shape, options, count):
    features = scattering(photographs(3)[:, :1].repeat(1, 4, 1, 1)[:, : shape[0], : shape[1], : shape[2]], **options)
    assert features.shape == (3, count)
    assert 0.1 < features.square().mean(1).min() <= features.square().mean(1).max() <= 1.001


def test_unit_features_have_a_norm_of_at_most_one():
    plain, unit = (scattering(photographs(3), "groups", 2, unit=unit) for unit in (False, True))
    assert (unit.norm(dim=1) <= 1).all()
    torch.testing.assert_close(unit * math.sqrt(972), plain)


def test_scattering_coefficients_are_those_of_the_slow_twin():
    image = photographs(1)[:, :1]
    ours, slow = _coefficients(image)[0], scattering_twin.coefficients(image[0, 0].double().numpy())
    np.testing.assert_allclose(ours, slow, atol=1e-5)


def test_features_in_groups_are_those_of_the_slow_twin():
    image = photographs(1)
    slow = scattering_twin.in_groups(image[0].double().numpy(), 4)
    np.testing.assert_allclose(scattering(image, "groups", 4)[0], slow, atol=1e-5)


def test_features_by_public_constants_are_those_of_the_slow_twin():
    image = photographs(1)
    matrix, offset = (FEATURES["scattering"].constants((3, 32, 32))[name].double() for name in ("matrix", "offset"))
    slow = scattering_twin.by_public_constants(image[0].double().numpy(), 4, matrix.numpy(), offset.numpy())
    ours = scattering(image)[0].double().numpy()
    assert np.linalg.norm(ours - slow) < 1e-5 * np.linalg.norm(slow)


def test_colour_features_have_the_same_bits_whatever_the_other_records_are(one_thread):
    images, others = torch.rand(2, 12, 3, 32, 32)  # one block that is full, and one that is filled up
    others[5], others[10] = images[5], images[10]
    assert torch.equal(scattering(others)[[5, 10]], scattering(images)[[5, 10]])


# -- public constants --------------------------------------------------------------------------------------------------


def test_public_constants_standardise_and_half_whiten_the_public_crops():
    """The oracle: the standardised logarithms have correlation C, so the outputs have C (C + 0.1 I)^(-1/2)."""
    constants = wavelet_scattering.public_constants(1, _coefficients)
    scattered = torch.cat([_coefficients(block) for block in wavelet_scattering.crops(1).split(100)])
    rows = torch.log(scattered.abs() + 1e-3).permute(0, 2, 3, 1).flatten(0, 2).double()  # (76,800, 81)
    outputs = rows @ constants["matrix"].double().T + constants["offset"].double()
    torch.testing.assert_close(outputs.mean(0), torch.zeros(81).double(), atol=1e-4, rtol=0)
    correlation = np.corrcoef(rows.numpy().T)
    root = sqrtm(correlation + 0.1 * np.eye(81)).real
    np.testing.assert_allclose(np.cov(outputs.numpy().T), correlation @ np.linalg.inv(root), atol=1e-3)


def test_public_constants_do_not_depend_on_the_number_of_threads(one_thread):
    """One channel: a quarter of a second. A run may continue with other threads, on the same inputs."""
    one = wavelet_scattering.public_constants.__wrapped__(1, _coefficients)
    torch.set_num_threads(2)
    two = wavelet_scattering.public_constants.__wrapped__(1, _coefficients)
    assert torch.get_num_threads() == 2
    assert all(torch.equal(values, two[name]) for name, values in one.items())


def test_public_crops_are_1200_squares_of_the_two_photographs_shrunk():
    crops = wavelet_scattering.crops(3)
    assert crops.shape == (1_200, 3, 32, 32)
    assert 0 <= crops.min() < crops.max() <= 1
    picture = torch.tensor(load_sample_images().images[0]).permute(2, 0, 1)[None] / 255
    halved = torch.nn.functional.avg_pool2d(picture, 2)[0]
    top, left = np.random.default_rng(0).integers(0, [halved.shape[1] - 31, halved.shape[2] - 31])
    torch.testing.assert_close(crops[0], halved[:, top : top + 32, left : left + 32])
    torch.testing.assert_close(wavelet_scattering.crops(1), crops.mean(1, keepdim=True))


def test_pictures_with_another_hash_are_refused(monkeypatch):
    monkeypatch.setitem(wavelet_scattering.PICTURES, "china.jpg", "0" * 64)
    with pytest.raises(InputError, match=r"china.jpg must have the SHA-256 0000.*, got 8378025a"):
        wavelet_scattering.crops(3)


# -- properties ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, 1])
def test_a_grating_is_strongest_in_the_wavelet_of_its_frequency_and_orientation(scale):
    y, x = torch.meshgrid(*2 * [torch.arange(32.0)], indexing="ij")
    for orientation in range(8):
        angle = orientation * math.pi / 8
        phase = 0.75 * math.pi / 2**scale * (math.cos(angle) * x + math.sin(angle) * y)
        grating = (0.5 + 0.5 * torch.cos(phase))[None, None]
        first = _coefficients(grating)[0, 1:17, 3:5, 3:5].mean((1, 2))
        assert int(first.argmax()) == 8 * scale + orientation


def test_a_flat_picture_has_its_mean_and_no_waves():
    coefficients = _coefficients(torch.full((1, 1, 48, 48), 0.7))[0]
    torch.testing.assert_close(coefficients[0], torch.full((12, 12), 0.7))
    assert coefficients[1:, 5:7, 5:7].max() < 1e-6
    assert coefficients[1:].max() < 2e-3  # near the border the filters meet zeros


def test_a_shift_by_one_pixel_changes_scattering_less_than_half_as_much_as_pixels():
    """Textures without large parts, beside their distance from one another."""
    textures = torch.rand(60, 3, 32, 33, generator=torch.Generator().manual_seed(0))

    def change(features):
        one, moved = (features(textures[..., at : at + 32]).flatten(1) for at in (0, 1))
        return float((one - moved).norm() / (one - one.mean(0)).norm())

    assert change(lambda images: images) > 1.3  # the square root of 2 in expectation
    assert change(lambda images: scattering(images, "groups", 2)) < 0.6


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (torch.rand(2, 3, 30, 32), {}, r"multiples of 4 .* got \(2, 3, 30, 32\)"),
        (torch.rand(2, 64), {}, r"got \(2, 64\)"),
        (torch.rand(2, 3, 8, 8), {}, "at least 12"),
        (torch.rand(0, 3, 32, 32), {}, r"got \(0, 3, 32, 32\)"),
        (["a", "text"], {}, "got list"),
        (torch.rand(2, 3, 32, 32), {"pooled": 9}, "from 1 to 8 for these images, got 9"),
        (torch.rand(2, 3, 32, 32), {"pooled": 2.5}, "got 2.5"),
        (torch.rand(2, 2, 32, 32), {"normalisation": "public"}, "1 or 3 channels, got 2"),
        (
            torch.rand(2, 3, 32, 32),
            {"normalisation": "batch"},
            "no normalisation 'batch'|normalisation is called 'batch'",
        ),
        (255 * torch.rand(2, 3, 32, 32), {}, "from 0 to 1"),
        (torch.full((2, 3, 32, 32), math.nan), {}, "from 0 to 1"),
    ],
)
def test_images_that_cannot_be_scattered_are_refused(images, options, words):
    with pytest.raises(InputError, match=words):
        scattering(images, **options)


# -- hashed texts --------------------------------------------------------------------------------------------------


def by_hand(counts: dict[tuple[str, str], int], buckets: int, salt: str = "epsilons") -> np.ndarray:
    """The documented hash, value by value."""
    sums = np.zeros(buckets)
    for (kind, n_gram), count in counts.items():
        digest = hashlib.blake2b(f"{salt}\0{kind}\0{n_gram}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        sums[(value >> 1) % buckets] += count if value % 2 else -count
    logarithms = np.sign(sums) * np.log(1 + abs(sums))
    return logarithms / np.linalg.norm(logarithms)


def test_hashed_words_are_the_documented_hash_of_words_and_pairs():
    words = {("word", w): n for w, n in {"ab": 2, "cd": 1, "ab cd": 1, "cd ab": 1}.items()}
    np.testing.assert_allclose(hashed_text(["Ab, cd! x AB"], buckets=50)[0], by_hand(words, 50), atol=1e-6)


def test_hashed_characters_mark_the_start_and_the_end():
    pieces = {("char", piece): 1 for piece in ("^i", "if", "f$", "^if", "if$")}
    features = hashed_text(["If"], buckets=50, words=[], characters=[2, 3], salt="x")
    np.testing.assert_allclose(features[0], by_hand(pieces, 50, "x"), atol=1e-6)


def test_hashed_texts_have_norm_one_or_are_zero_without_words():
    features = hashed_text(["a good film", "", "?!", "good"])
    torch.testing.assert_close(features.norm(dim=1), torch.tensor([1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ("one text", {}, "got str"),
        ([], {}, "at least one text"),
        (["a", None], {}, "a list of texts, one for each record, got list"),
        (["a"], {"buckets": 0}, r"from 1 to 1,048,576, got 0"),
        (["a"], {"buckets": 2**21}, "buckets must be"),
        (["a"], {"words": "12"}, r"e.g. \[1, 2\], got '12'"),
        (["a"], {"words": [], "characters": []}, "needs a length"),
        (["a"], {"characters": [0]}, "from 1 to 20"),
    ],
)
def test_texts_that_cannot_be_hashed_are_refused(texts, options, words):
    with pytest.raises(InputError, match=words):
        hashed_text(texts, **options)


# -- encoder -------------------------------------------------------------------------------------------------------


def test_an_encoder_needs_a_statement_of_what_it_was_trained_on():
    with pytest.raises(InputError, match="'encoder' need the option 'trained_on'"):
        FEATURES["encoder"](["a"], model="some/model")
    for wrong in ("", "  ", 3, "x" * 501):
        with pytest.raises(InputError, match="trained_on must state in 1 to 500 characters"):
            encoder(["a"], "some/model", wrong)


@pytest.mark.parametrize("options", [{"model": ""}, {"tokens": 1}, {"tokens": 10**6}])
def test_options_of_an_encoder_out_of_range_are_refused(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} must be"):
        encoder(["a"], **{"model": "some/model", "trained_on": TRAINED_ON} | options)


def test_an_encoder_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match='pip install "transformers'):
        encoder(["a"], "missing/model", TRAINED_ON)


def test_an_encoder_reads_blocks_of_one_shape_whatever_the_texts_are(tmp_path_factory):
    """In a large network, products of another shape may add in another order."""
    pytest.importorskip("transformers", reason="the extra encoder")
    folder, shapes = tiny_encoder(tmp_path_factory), set()
    _, network, _ = sentence_encoder._loaded(folder, None)
    network.embeddings.register_forward_hook(lambda module, inputs, states: shapes.add(tuple(states.shape[:2])))
    for texts in (["a"], ["fox"] * 20, ["rain " * 40] * 2):
        encoder(texts, folder, TRAINED_ON, tokens=12)
    assert shapes == {(sentence_encoder.BLOCK, 12)}


def test_an_encoder_embeds_the_mean_of_its_last_states_and_names_its_weights(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="the extra encoder")
    folder = tiny_encoder(tmp_path_factory)
    texts = ["a quick fox", "rain " * 40]
    features = encoder(texts, folder, TRAINED_ON, tokens=12)
    read, network = (kind.from_pretrained(folder) for kind in (transformers.AutoTokenizer, transformers.AutoModel))
    for text, row in zip(texts, features, strict=True):  # alone, without filling up
        states = network(**read(text, truncation=True, max_length=12, return_tensors="pt")).last_hidden_state
        mean = states.mean(1)[0]
        torch.testing.assert_close(row, mean / mean.norm(), atol=1e-5, rtol=0)
    origin = FEATURES["encoder"].origin((), model=folder, trained_on=TRAINED_ON)
    assert f'"{TRAINED_ON}"' in origin
    assert "SHA-256" in origin
    assert str(Path(folder).parent) not in origin  # folders are private
    with pytest.raises(InputError, match="cannot be loaded from the folder"):
        encoder(["a"], str(tmp_path_factory.mktemp("empty")), TRAINED_ON)


@pytest.mark.slow
@pytest.mark.skipif("EPSILONS_DATA" not in os.environ, reason="needs the real data")
def test_a_linear_model_on_scattering_beats_pixels_by_ten_points_on_cifar10():
    train, test = (epsilons.data.load("cifar10", split, pixels=True) for split in ("train", "test"))

    def accuracy(features):
        inputs = [features(torch.from_numpy(part.inputs[:2_000])).flatten(1).numpy() for part in (train, test)]
        scale = inputs[0].std()
        model = LogisticRegression(C=0.01, max_iter=300).fit(inputs[0] / scale, train.targets[:2_000])
        return model.score(inputs[1] / scale, test.targets[:2_000])

    assert accuracy(scattering) > accuracy(lambda images: images) + 0.1
