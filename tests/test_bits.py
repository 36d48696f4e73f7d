"""Small runs at fixed keys end with the bits that were recorded: plans, weights, ledgers, reports, releases.

`python -m tests.bits` compares the same cases; after a change that is meant to change bits, --record writes them anew.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

from tests import bits

#: Cases that need packages of their own.
NEEDED = {"hugging face": "transformers", "lightning": "lightning"}

pytestmark = pytest.mark.skipif(
    bits.recorded()["environment"] != bits.environment(),
    reason=f"the bits were recorded on another processor or with other versions: {bits.recorded()['environment']}",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in bits.FAST else pytest.mark.slow) for name in bits.CASES]
)
def test_a_run_ends_with_the_bits_that_were_recorded(name: str):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    assert bits.differences(name) == []


def test_every_case_is_recorded_and_differences_are_found():
    cases = bits.recorded()["cases"]
    assert list(cases) == list(bits.CASES)
    assert all(cases.values())
    assert bits.digest({"weight": 1.0, "started": "2026-01-01"}) == bits.digest(
        {"weight": 1.0, "started": "2027-01-01"}
    )
    assert bits.digest({"weight": 1.0}) != bits.digest({"weight": 1.0000001})
