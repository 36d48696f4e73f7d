"""Fixed features: functions of one record and of public constants. Nothing is fitted, so features cost no privacy.

To add one: a function `(inputs, **options) -> (records, features)` in a new file, and a line in FEATURES. Contract: the
features of a record have the same bits whatever the other records are.
"""

from __future__ import annotations

from pathlib import Path

from .fixed import Features, FixedFeatures, load_fixed
from .sentence_encoder import ENCODER, encoder
from .text_hashing import HASHED_TEXT, hashed_text
from .wavelet_scattering import SCATTERING, scattering

FEATURES: dict[str, Features] = {"scattering": SCATTERING, "hashed-text": HASHED_TEXT, "encoder": ENCODER}


def features_of_run(path: str | Path) -> FixedFeatures:
    """The features that the run in this folder was trained on: a function for later records, with the same constants.

    Raises RunError if the folder holds none.
    """
    return load_fixed(FEATURES, path)


__all__ = ["FEATURES", "Features", "FixedFeatures", "encoder", "features_of_run", "hashed_text", "scattering"]
