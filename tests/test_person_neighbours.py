"""Promise: without one person's rows, a run differs by that person's one clipped gradient, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from epsilons.clipping import ENGINES
from people import NO_PERSON, NORMS, SIZES, STEPS, WEIGHTS, clipped, drawn, rows_seen, run, visits

DATA = visits()


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("rows_per_person", [1, 4, 50])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_drawn_person_adds_one_clipped_gradient_of_the_mean(engine: str, rows_per_person: int, views: int):
    """Sums, drawn persons and numbers of rows against the definition, written out person by person."""
    trace = run(DATA, engine=engine, rows_per_person=rows_per_person, views=views, largest=100)
    for step in range(STEPS):
        by_person = rows_seen(DATA, trace.seen[step])
        assert sorted(by_person) == [p for p in drawn(step) if SIZES[p]], "persons are drawn, whatever their rows"
        for person, rows in by_person.items():
            chosen = rows[::views]
            assert rows == [row for row in chosen for _ in range(views)]
            assert chosen == sorted(set(chosen))
            assert len(chosen) == min(rows_per_person, SIZES[person])
        expected = sum(clipped(DATA, person, rows) for person, rows in by_person.items())
        assert np.abs(trace.sums[step] - expected).max() <= 1e-6


@pytest.mark.parametrize("rows_per_person", [1, 3])
@pytest.mark.parametrize("who", [0, 1, 2, 4, 10], ids=lambda who: f"{SIZES[who]} rows")
def test_without_a_person_s_rows_only_their_clipped_vector_is_missing(who: int, rows_per_person: int):
    """Other rows get other indices: nobody's choice, coin or noise depends on them."""
    whole, without = (run(d, rows_per_person=rows_per_person, largest=9) for d in (DATA, DATA.without(who)))
    times = 0
    for step in range(STEPS):
        seen = rows_seen(DATA, whole.seen[step])
        mine = seen.pop(who, [])
        others = [n for n in whole.seen[step] if n not in DATA.numbers[DATA.rows_of(who)].tolist()]
        assert others == without.seen[step]
        assert bool(mine) == (who in drawn(step))
        difference = whole.sums[step] - without.sums[step]
        times += bool(mine)
        assert np.abs(difference - (clipped(DATA, who, mine) if mine else 0.0)).max() <= 2e-6 * NORMS[who % 2]
        assert np.linalg.norm(difference) <= WEIGHTS[who % 2] * NORMS[who % 2] * (1 + 1e-9)
    assert 0 < times < STEPS


def test_a_person_without_rows_is_drawn_and_adds_nothing():
    assert any(NO_PERSON in drawn(step) for step in range(STEPS))
    trace = run(DATA)
    assert len(trace.sums) == STEPS
    only = visits((*(0 for _ in SIZES[:-1]), 1))
    empty = run(only)
    for step, (seen, total) in enumerate(zip(empty.seen, empty.sums, strict=True)):
        expected = clipped(only, len(SIZES) - 1, [0]) if len(SIZES) - 1 in drawn(step) else 0.0
        assert len(seen) == (len(SIZES) - 1 in drawn(step))
        assert np.abs(total - expected).max() <= 1e-6
