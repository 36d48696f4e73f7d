"""Features are functions of one record and of public constants: what FEATURES lists, then each kind by its definition.

At a fixed place in a fixed number of records, the bits of a record's features are equal whatever the other records are.
"""

from __future__ import annotations

import cmath
import hashlib
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.signal import convolve2d
from sklearn.datasets import load_sample_images
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import epsilons
from encoders import TRAINED_ON, tiny_encoder
from epsilons.errors import InputError
from epsilons.training.features import FEATURES, encoder, hashed_text, sentence_encoder, wavelet_scattering
from epsilons.training.features.wavelet_scattering import _coefficients, scattering

# -- whatever FEATURES lists ------------------------------------------------------------------------------------------

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


# -- scattering by its definition, in 64 bits with numpy and SciPy alone: slow, and independent of the library --------

Array = np.ndarray[Any, Any]

BORDER = 8


def morlet(scale: int, orientation: int) -> Array:
    """(2·reach + 1, 2·reach + 1), complex, with sum 0."""
    sigma, frequency, reach = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 * 2**scale
    angle, places = orientation * math.pi / 8, range(-reach, reach + 1)
    envelope, wave = (np.zeros((2 * reach + 1, 2 * reach + 1), dtype=complex) for _ in range(2))
    for row, y in enumerate(places):
        for column, x in enumerate(places):
            along = math.cos(angle) * x + math.sin(angle) * y
            across = math.cos(angle) * y - math.sin(angle) * x
            height = math.exp(-(along**2 + across**2 / 4) / (2 * sigma**2)) / (4 * math.pi * sigma**2)
            envelope[row, column] = height
            wave[row, column] = height * cmath.exp(1j * frequency * along)
    return wave - envelope * (wave.sum() / envelope.sum())


def gaussian(sigma: float) -> Array:
    """Cut at 3.5 sigma, with sum 1."""
    reach = math.ceil(3.5 * sigma)
    values = [
        [math.exp(-(x * x + y * y) / (2 * sigma**2)) for x in range(-reach, reach + 1)]
        for y in range(-reach, reach + 1)
    ]
    return np.array(values) / np.sum(values)


def coefficients(channel: Array) -> Array:
    """(81, height / 4, width / 4) of one channel (height, width): order 0, 16 of order 1, 64 of order 2."""
    x = np.pad(channel, BORDER, mode="reflect")

    def modulus(grid: Array, scale: int, orientation: int, stride: int) -> Array:
        return np.abs(convolve2d(grid, morlet(scale, orientation), "same"))[::stride, ::stride]

    def low(grid: Array, halvings: int) -> Array:
        stride, edge = 4 >> halvings, BORDER // 4
        return convolve2d(grid, gaussian(1.6 / 2**halvings), "same")[::stride, ::stride][edge:-edge, edge:-edge]

    fine = [modulus(x, 0, i, 1) for i in range(8)]
    coarse = [modulus(x, 1, i, 2) for i in range(8)]
    second = [modulus(grid, 1, i, 2) for grid in fine for i in range(8)]
    return np.stack([low(x, 0), *(low(g, 0) for g in fine), *(low(g, 1) for g in coarse), *(low(g, 1) for g in second)])


def pooled(values: Array, side: int) -> Array:
    """(channels·side²,) means over squares of the grid, whose sides `side` divides."""
    channels, height, width = values.shape
    squares = values.reshape(channels, side, height // side, side, width // side)
    return squares.mean((2, 4)).ravel()


def standard(values: Array, groups: int) -> Array:
    """Mean 0 and variance 1 in each group of channels, with torch's 1e-5 in the root."""
    parts = values.reshape(groups, -1)
    centred = parts - parts.mean(1, keepdims=True)
    return (centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)).reshape(values.shape)


def in_groups(image: Array, side: int) -> Array:
    """Features of an image (channels, height, width) with normalisation "groups"."""
    return pooled(standard(np.concatenate([coefficients(2 * channel - 1) for channel in image]), 27), side)


def by_public_constants(image: Array, side: int, matrix: Array, offset: Array) -> Array:
    """Features with normalisation "public", for these constants."""
    logarithms = np.log(np.concatenate([coefficients(channel) for channel in image]) + 1e-3)
    return pooled(standard(np.einsum("dc,chw->dhw", matrix, logarithms) + offset[:, None, None], 1), side)


# -- each kind --------------------------------------------------------------------------------------------------------


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
    ours, slow = _coefficients(image)[0], coefficients(image[0, 0].double().numpy())
    np.testing.assert_allclose(ours, slow, atol=1e-5)


def test_features_in_groups_are_those_of_the_slow_twin():
    image = photographs(1)
    slow = in_groups(image[0].double().numpy(), 4)
    np.testing.assert_allclose(scattering(image, "groups", 4)[0], slow, atol=1e-5)


def test_features_by_public_constants_are_those_of_the_slow_twin():
    image = photographs(1)
    matrix, offset = (FEATURES["scattering"].constants((3, 32, 32))[name].double() for name in ("matrix", "offset"))
    slow = by_public_constants(image[0].double().numpy(), 4, matrix.numpy(), offset.numpy())
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


@pytest.mark.slow
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
