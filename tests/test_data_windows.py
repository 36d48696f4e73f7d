"""Documents cut into records of equal length, with the person of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epsilons.data import windows
from epsilons.errors import DataError


def by_hand(documents: list[list[int]], length: int, step: int, pad: int | None) -> tuple[list[list[int]], list[int]]:
    """One record after the other."""
    records, persons = [], []
    for person, document in enumerate(documents):
        start, end = 0, 0
        while start < len(document) and (start + length <= len(document) or (pad is not None and end < len(document))):
            record = document[start : start + length]
            records.append(record + [pad or 0] * (length - len(record)))
            persons.append(person)
            start, end = start + step, start + length
    return records, persons


@pytest.mark.parametrize("pad", [None, 99])
@pytest.mark.parametrize(("length", "step"), [(1, 1), (3, 1), (3, 2), (3, 3), (2, 5), (7, 4)])
def test_records_and_persons_are_those_of_a_loop_over_documents(length: int, step: int, pad: int | None) -> None:
    coins = np.random.default_rng(0)
    documents = [coins.integers(1, 50, int(n)).tolist() for n in [0, 1, 2, 3, 6, 7, 8, 11, 20]]
    cut = windows(documents, length, step, pad=pad)
    records, persons = by_hand(documents, length, step, pad)
    assert cut.records.tolist() == records
    assert cut.persons.tolist() == persons
    assert cut.records.dtype == np.int64


def test_windows_of_tensors_and_series_keep_their_values_and_share_no_memory() -> None:
    series = torch.arange(24.0).reshape(12, 2)
    cut = windows([series, series.numpy()], length=5, step=3, ids=["a", "b"])
    assert torch.equal(torch.from_numpy(cut.records[1]), series[3:8])
    assert cut.persons.tolist() == ["a", "a", "a", "b", "b", "b"]
    cut.records[:] = 0
    assert series[3, 1] == 7


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([[1, 2]], 0), "length must be a whole number of at least 1, got 0"),
        (([[1, 2]], 2, 1.5), "step must be a whole number of at least 1, got 1.5"),
        (([[1, 2]], True), "length must be"),
        ((["a text"], 2), "Turn texts into token ids"),
        (([3], 2), "sequences of token ids"),
        (([[[1, 2]], [[1, 2, 3]]], 1), "rows of one shape"),
        (([[1, 2]], 2, None, ["a", "b"]), "got 2 for 1 documents"),
        (([[1, 2]], 3), "No document has 3 positions"),
        (([], 3), "No document"),
    ],
)
def test_other_documents_lengths_and_ids_are_refused(given: tuple[object, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        windows(*given)  # type: ignore[arg-type]
