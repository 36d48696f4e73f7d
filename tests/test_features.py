"""Fixed features: functions of one record alone, and scattering as its definition computes it."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from scipy.signal import convolve2d
from sklearn.datasets import load_sample_images
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import epsilons
from epsilons.errors import InputError
from epsilons.training.features import FEATURES
from epsilons.training.features.scattering import BLOCK, _coefficients, _low_pass, _wavelets, scattering


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


# -- the contract over the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
def test_a_record_s_features_have_the_same_bits_whatever_the_others_are(name, one_thread):
    extract, images = FEATURES[name], torch.rand(BLOCK + 5, 3, 32, 32)
    features = extract(images)
    for row in (0, 7, BLOCK + 2):
        others = 1e3 * torch.rand(images.shape)
        others[row] = images[row]
        assert torch.equal(extract(others)[row], features[row])
    assert torch.equal(extract(images[:3]), features[:3])


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_finite_and_repeatable_and_differ_between_records(name):
    images = torch.cat([photographs(4), torch.zeros(1, 3, 32, 32), torch.ones(1, 3, 32, 32)])
    features = FEATURES[name](images)
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    assert torch.equal(FEATURES[name](images), features)
    assert (torch.pdist(features[:5]) > 0.01).all()


# -- scattering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "pooled", "count"), [((3, 32, 32), 2, 972), ((1, 28, 28), 7, 3_969)])
def test_scattering_has_81_numbers_per_channel_and_place_and_norm_at_most_one(shape, pooled, count):
    features = scattering(torch.rand(3, *shape), pooled)
    assert features.shape == (3, count)
    assert (features.norm(dim=1) <= 1).all()
    assert (features.norm(dim=1) > 0.2).all()


def test_scattering_is_its_definition_with_every_convolution_written_out():
    """The oracle: convolutions of the whole picture by SciPy in 64 bits, of which every second place is kept."""
    image = photographs(1)[:, :1]
    ours = _coefficients(image)[0]
    picture = np.pad(image[0, 0].double().numpy(), 8, mode="reflect")

    def wave(x, scale, orientation):
        real, imaginary = (_wavelets(scale)[orientation + 8 * part, 0].double().numpy()[::-1, ::-1] for part in (0, 1))
        return np.abs(convolve2d(x, real, "same") + 1j * convolve2d(x, imaginary, "same"))

    def low(x, halvings):
        stride = 4 >> halvings
        return convolve2d(x, _low_pass(halvings)[0, 0].double().numpy(), "same")[::stride, ::stride][2:-2, 2:-2]

    np.testing.assert_allclose(ours[0], low(picture, 0), atol=1e-5)
    for i in (0, 3):
        fine = wave(picture, 0, i)
        np.testing.assert_allclose(ours[1 + i], low(fine, 0), atol=1e-5)
        np.testing.assert_allclose(ours[9 + i], low(wave(picture, 1, i)[::2, ::2], 1), atol=1e-5)
        for j in (0, 5):
            np.testing.assert_allclose(ours[17 + 8 * i + j], low(wave(fine, 1, j)[::2, ::2], 1), atol=1e-5)


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
    assert change(scattering) < 0.6


@pytest.mark.parametrize(
    ("images", "pooled", "words"),
    [
        (torch.rand(2, 3, 30, 32), 2, r"multiples of 4 .* got \(2, 3, 30, 32\)"),
        (torch.rand(2, 64), 2, r"got \(2, 64\)"),
        (torch.rand(2, 3, 8, 8), 2, "at least 12"),
        (torch.rand(0, 3, 32, 32), 2, r"got \(0, 3, 32, 32\)"),
        (torch.rand(2, 3, 32, 32), 9, "from 1 to 8 for these images, got 9"),
    ],
)
def test_images_that_cannot_be_scattered_are_refused(images, pooled, words):
    with pytest.raises(InputError, match=words):
        scattering(images, pooled)


@pytest.mark.slow
@pytest.mark.skipif("EPSILONS_DATA" not in os.environ, reason="needs the real data")
def test_a_linear_model_on_scattering_beats_pixels_by_ten_points_on_cifar10():
    train, test = (epsilons.data.load("cifar10", split) for split in ("train", "test"))

    def accuracy(features):
        inputs = [features(torch.from_numpy(part.inputs[:2_000])).flatten(1).numpy() for part in (train, test)]
        scale = inputs[0].std()
        model = LogisticRegression(C=0.01, max_iter=300).fit(inputs[0] / scale, train.targets[:2_000])
        return model.score(inputs[1] / scale, test.targets[:2_000])

    assert accuracy(scattering) > accuracy(lambda images: images) + 0.1
