"""The handwritten digits of scikit-learn: 1,797 real 8x8 images (UCI, Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from .arrays import Arrays

#: The test split: 360 of the 1,797 images, chosen by a fixed permutation.
TEST_RECORDS = 360
_SPLIT_SEED = 0


def digits(split: str) -> Arrays:
    """Pixels scaled from 0..16 to 0..1, flattened to 64; "train" has 1,437 records, "test" 360.

    >>> digits("train").inputs.shape, digits("test").inputs.shape
    ((1437, 64), (360, 64))
    """
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    chosen = order[:TEST_RECORDS] if split == "test" else order[TEST_RECORDS:]
    return Arrays((pixels[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int64))
