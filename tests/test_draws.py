"""Coins, noise and draws are functions of (key, phase, step), and look like what they should be.

Statistical checks run under fixed keys, so they never flicker; each says how often it would fail under a fresh one.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import tracemalloc
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import epsilons
from epsilons.core.columns import PART
from epsilons.draws import persons_rows
from epsilons.draws import randomness as randomness_module
from epsilons.draws.persons_rows import MOST_COINS, Draws, evenly, heads, rate_classes, subset, successes
from epsilons.draws.randomness import BLOCK, COIN_BITS, DRAWS_VERSION, SOURCES, Randomness, sample_hash, thresholds
from epsilons.errors import InputError
from options import make_flat
from small_runs import of_phases

# -- randomness -------------------------------------------------------------------------------------------------------

#: How often each statistical check below would fail by chance, under a fresh key.
FALSE_ALARM = 1e-6

KEY = bytes(range(32))

every_source = pytest.mark.parametrize("source", SOURCES)

#: Counts with one block, a part of one, and several with a partial last one, even and odd.
COUNTS = [1, 2, 3, 1_000, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK, 3 * BLOCK + 12_345]


def normals_of(subkey: bytes, count: int, source: str = "chacha20") -> np.ndarray:
    """(count,) the values that a stream begins with."""
    values = np.empty(count)
    values[:] = SOURCES[source](subkey).normals(len(values))
    return values


def subkey(*address: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, address)).encode(), key=KEY, digest_size=32).digest()


def randomness(source: str = "chacha20", key: bytes = KEY) -> Randomness:
    return Randomness(key, source)


# -- the key ------------------------------------------------------------------------------------------------


def test_a_fresh_key_has_256_bits_and_is_never_the_same_twice():
    keys = {Randomness.fresh().key for _ in range(50)}
    assert len(keys) == 50
    assert all(len(key) == 32 for key in keys)
    assert not Randomness.fresh().seeded


def test_a_seed_gives_the_same_key_of_256_bits_and_says_that_it_did():
    ours = Randomness.fresh(seed=7)
    assert ours == Randomness.fresh(seed=7)
    assert len(ours.key) == 32
    assert ours.key != Randomness.fresh(seed=8).key
    assert ours.label == "seeded"
    assert Randomness.fresh(seed=0).seeded
    assert [Randomness.fresh(source=s).label for s in SOURCES] == list(SOURCES)


@every_source
def test_no_text_shows_the_key(source):
    ours = randomness(source)
    for text in (repr(ours), str(ours), f"{ours}", ours.commitment, repr([ours])):
        assert KEY.hex() not in text
        assert str(KEY) not in text
        assert repr(KEY)[2:-1] not in text


def test_a_commitment_separates_keys_and_reveals_neither_key_nor_stream():
    ours, other = randomness(), randomness(key=bytes(32))
    assert ours.commitment == randomness("secure").commitment
    assert ours.commitment != other.commitment
    assert len(bytes.fromhex(ours.commitment)) == 32
    known = {hashlib.sha256(KEY).hexdigest(), hashlib.blake2b(KEY, digest_size=32).hexdigest(), KEY.hex()}
    assert ours.commitment not in known
    addresses = product(("coins", "noise"), (0, 1), (0, 1))
    subkeys = {ours._subkey(purpose, phase, step).hex() for purpose, phase, step in addresses}
    assert ours.commitment not in subkeys


def test_one_changed_bit_of_the_key_changes_everything():
    for bit in (0, 127, 128, 255):
        changed = bytearray(KEY)
        changed[bit // 8] ^= 1 << bit % 8
        for source in SOURCES:
            a, b = randomness(source), randomness(source, bytes(changed))
            assert not np.isin(a.coins(0, 0, 100), b.coins(0, 0, 100)).any()
            assert not np.isin(a.noise(0, 0, 100), b.noise(0, 0, 100)).any()
            assert a.seed("torch", 0, 0) != b.seed("torch", 0, 0)


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="No source of randomness is called 'dice'; there are: chacha20, secure"):
        Randomness(KEY, "dice")


@every_source
def test_a_renewed_key_is_fresh_or_for_a_seed_a_function_of_all_its_past(source):
    """Copies of one run must not meet under one new key, and only a seeded run may have a key that can be derived."""
    fresh = Randomness(KEY, source)
    renewed = [fresh.renewed(1, "past") for _ in range(3)] + [fresh]
    assert len({each.key for each in renewed}) == 4
    assert not any(each.seeded for each in renewed)
    seeded = Randomness(KEY, source, seeded=True)
    again = [seeded.renewed(epoch, past) for epoch in (1, 2) for past in ("", "past", "other")]
    assert again == [seeded.renewed(epoch, past) for epoch in (1, 2) for past in ("", "past", "other")]
    assert len({each.key for each in [*again, seeded]}) == 7
    bound = [seeded.bound_to("slot 1"), seeded.bound_to("slot 2")]
    assert len({each.key for each in [*bound, *again, seeded]}) == 9
    assert all(each.seeded and each.source == source for each in [*again, *bound])
    assert not fresh.bound_to("slot 1").seeded


# -- the addresses ------------------------------------------------------------------------------------------

ADDRESSES = [(phase, step) for phase in (0, 1, 11) for step in (0, 1, 2, 10, 11, 110, 65_536, 2**32)]


@every_source
def test_the_same_address_gives_the_same_values_and_every_other_gives_others(source):
    for draw in ("coins", "noise"):
        seen = np.concatenate([getattr(randomness(source), draw)(*address, 50) for address in ADDRESSES])
        again = np.concatenate([getattr(randomness(source), draw)(*address, 50) for address in ADDRESSES])
        assert (seen == again).all()
        assert len(np.unique(seen)) == len(seen)


@every_source
def test_noise_is_never_the_coins_stream_read_again(source):
    """Raw words of the noise's stream at every address, against the coins'; and the values made of them."""
    ours = randomness(source)
    for address in ADDRESSES:
        assert not np.isin(ours.noise(*address, 50), normals_of(subkey("coins", *address), 50, source)).any()
    coins = np.concatenate([ours.coins(*address, 100) for address in ADDRESSES])
    streams = [ours.stream("noise", *address, block) for address in ADDRESSES for block in (0, 1)]
    words = np.concatenate([stream.integers(100) >> np.uint64(11) for stream in streams])
    assert not np.isin(words, coins).any()


@every_source
def test_noise_is_not_reused_between_steps_not_even_shifted_or_negated(source):
    """The largest correlation of any two steps' noise, at any of 41 shifts, is within chance."""
    steps, count, shifts = 30, 2_000, range(-20, 21)
    noise = np.stack([randomness(source).noise(0, step, count) for step in range(steps)])
    pairs = steps * (steps - 1) // 2 * len(shifts)
    limit = stats.norm.isf(FALSE_ALARM / pairs / 2)
    for shift in shifts:
        # (steps, steps), standard normal off the diagonal
        correlation = noise @ np.roll(noise, shift, axis=1).T / count**0.5
        assert np.abs(correlation[np.triu_indices(steps, 1)]).max() <= limit


def test_seeds_differ_by_purpose_and_address_and_have_63_bits():
    ours = randomness()
    addresses = [("torch", 0, 0, 0, -1), ("torch", 0, 0, 0, 0), ("torch", 0, 0, 1, -1), ("torch", 0, 1, 0, -1)]
    addresses += [("record", 0, 0, i) for i in range(1000)]
    addresses += [("record", 0, 1, 10), ("record", 0, 11, 0), ("record", 1, 0, 10)]
    seeds = [ours.seed(*address) for address in addresses]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


# -- the coins ----------------------------------------------------------------------------------------------


@given(st.floats(0, 1, allow_subnormal=True))
def test_a_threshold_is_the_rate_rounded_down_never_up(rate):
    """The oracle: exact fractions."""
    limit = int(thresholds([rate])[0])
    assert Fraction(limit, 2**COIN_BITS) <= Fraction(rate) < Fraction(limit + 1, 2**COIN_BITS)


def test_a_rate_of_a_millionth_is_not_drawn_more_often_as_float32_would():
    limit = int(thresholds([1e-6])[0])
    assert abs(limit / 2**53 / 1e-6 - 1) < 1e-9


@every_source
def test_a_coin_is_a_whole_number_below_two_to_the_53(source):
    coins = np.concatenate([randomness(source).coins(0, step, 10_000) for step in range(20)])
    assert coins.dtype == np.uint64
    assert coins.max() < 2**COIN_BITS
    assert coins.max() > 2**COIN_BITS * (1 - 1e-3)


@every_source
def test_coins_are_uniform_in_every_bit(source):
    coins = np.concatenate([randomness(source).coins(0, step, 10_000) for step in range(20)])
    ones = ((coins[:, None] >> np.arange(COIN_BITS, dtype=np.uint64)) & np.uint64(1)).sum(0)
    low, high = stats.binom.ppf([FALSE_ALARM / COIN_BITS / 2, 1 - FALSE_ALARM / COIN_BITS / 2], len(coins), 0.5)
    assert ((ones >= low) & (ones <= high)).all()
    assert stats.kstest(coins / 2.0**COIN_BITS, "uniform").pvalue > FALSE_ALARM


@every_source
def test_a_record_keeps_its_coin_however_many_records_come_after_it(source):
    assert (randomness(source).coins(0, 3, 10) == randomness(source).coins(0, 3, 1000)[:10]).all()


# -- the noise ----------------------------------------------------------------------------------------------


@every_source
def test_noise_is_standard_normal(source):
    """Kolmogorov–Smirnov on 200,000 values, of one step and across steps; each fails one key in a million."""
    one = randomness(source).noise(0, 0, 200_000)
    many = np.concatenate([randomness(source).noise(1, step, 20) for step in range(10_000)])
    for values in (one, many):
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        assert stats.kstest(values, "norm").pvalue > FALSE_ALARM


@every_source
def test_noise_has_the_moments_and_the_tails_of_a_normal(source):
    values = randomness(source).noise(0, 0, 400_000)
    z = stats.norm.isf(FALSE_ALARM / 8)
    assert abs(values.mean()) <= z / len(values) ** 0.5
    assert abs((values**2).mean() - 1) <= z * (2 / len(values)) ** 0.5
    assert abs((values**3).mean()) <= z * (15 / len(values)) ** 0.5
    assert abs((values**4).mean() - 3) <= z * (96 / len(values)) ** 0.5
    for far in (2.0, 3.0, 4.0):
        low, high = stats.binom.ppf([FALSE_ALARM, 1 - FALSE_ALARM], len(values), 2 * stats.norm.sf(far))
        assert low <= (np.abs(values) > far).sum() <= high


@every_source
def test_the_noise_of_one_step_is_independent_between_its_values(source):
    """Neighbours, and the two halves: Box–Muller makes its values in pairs."""
    values = randomness(source).noise(0, 0, 200_001)
    limit = stats.norm.isf(FALSE_ALARM / 12)
    half = len(values) // 2
    for a, b in [
        (values[:-1], values[1:]),
        (values[:half], values[half + 1 :]),
        (values[:half], values[half : 2 * half]),
    ]:
        for x, y in [(a, b), (a**2 - 1, b**2 - 1)]:
            scale = np.sqrt((x**2).mean() * (y**2).mean() * len(x))
            assert abs((x * y).sum()) / scale <= limit


@every_source
def test_the_two_halves_of_a_pair_are_independent(source):
    """Cosine and sine of one angle at one radius: as values, as squares, and in the tails."""
    values = normals_of(KEY, 200_000, source)
    a, b = values[:100_000], values[100_000:]
    limit = stats.norm.isf(FALSE_ALARM / 10)
    for x, y in [(a, b), (a**2 - 1, b**2 - 1), (a**2 - 1, b), (np.sign(a), np.sign(b))]:
        scale = np.sqrt((x**2).mean() * (y**2).mean() * len(x))
        assert abs((x * y).sum()) / scale <= limit
    # The angle of a pair is uniform and does not depend on its radius.
    angle = np.arctan2(b, a) / (2 * np.pi) + 0.5
    far = a**2 + b**2 > 2 * np.log(2)
    for part in (angle, angle[far], angle[~far]):
        assert stats.kstest(part, "uniform").pvalue > FALSE_ALARM / 3


@every_source
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_noise_comes_in_any_number(source, count):
    assert randomness(source).noise(0, 0, count).shape == (count,)
    assert randomness(source).coins(0, 0, count).shape == (count,)


# -- blocks and threads -------------------------------------------------------------------------------------


def block_by_block(source: str, count: int) -> np.ndarray:
    """The definition of noise: one block after the other, each from the stream with its number."""
    sizes = [min(BLOCK, count - start) for start in range(0, count, BLOCK)]
    blocks = [normals_of(subkey("noise", 3, 14, number), size, source) for number, size in enumerate(sizes)]
    return np.concatenate(blocks)


@every_source
def test_noise_has_the_same_bits_for_any_number_of_threads(source):
    for count in COUNTS:
        expected = block_by_block(source, count)
        for threads in (1, 2, 3, 5):
            assert randomness(source).noise(3, 14, count, threads).tobytes() == expected.tobytes()


def test_threads_share_the_blocks_and_an_error_in_any_of_them_is_raised(monkeypatch):
    """The last three wait until all have begun: with one thread this would never end."""
    begun, true, calls = threading.Barrier(3, timeout=30), randomness_module.fill, itertools.count()

    def fill(words: np.ndarray, values: np.ndarray) -> None:
        if next(calls) >= 4:
            begun.wait()
        true(words, values)
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("from a thread")

    monkeypatch.setattr(randomness_module, "fill", fill)
    with pytest.raises(ArithmeticError, match="from a thread"):
        randomness().noise(0, 0, 7 * BLOCK, 3)


def test_a_block_is_used_after_all_up_to_half_its_number():
    """A rounded block of an update is written where the sums of those blocks were."""
    ended: list[int] = []

    def use(start: int, values: np.ndarray) -> None:
        block = start // BLOCK
        assert set(ended) >= set(range(block // 2 + 1)) - {block}
        time.sleep(0.002 * (block % 3))
        ended.append(block)

    randomness().each_block(0, 0, 40 * BLOCK - 5, use, 4)
    assert sorted(ended) == list(range(40))
    assert ended != sorted(ended)


@every_source
def test_no_two_blocks_or_steps_share_a_value(source):
    """Also not shifted by a block, and not between the last block of a step and the first of another."""
    count = 2 * BLOCK + 1_000
    seen = np.concatenate([randomness(source).noise(phase, step, count) for phase, step in [(0, 0), (0, 1), (1, 0)]])
    assert len(np.unique(np.abs(seen))) == len(seen)


@every_source
def test_blocks_are_uncorrelated_and_each_is_normal(source):
    noise = randomness(source).noise(0, 0, 4 * BLOCK + 5_000)
    blocks = noise[: 4 * BLOCK].reshape(4, BLOCK)
    limit = stats.norm.isf(FALSE_ALARM / 24)
    for power in (1, 2):
        scaled = (blocks**power - (power == 2)) / np.sqrt([1, 2][power - 1])
        correlation = scaled @ scaled.T / BLOCK**0.5
        assert np.abs(correlation[np.triu_indices(4, 1)]).max() <= limit
    for part in (*blocks, noise[4 * BLOCK :]):
        assert stats.kstest(part, "norm").pvalue > FALSE_ALARM / 5


def test_no_pool_is_made_for_one_block(monkeypatch):
    monkeypatch.setattr("epsilons.core.threads.ThreadPoolExecutor", None)
    assert len(randomness().noise(0, 0, BLOCK, 8)) == BLOCK
    with pytest.raises(TypeError):
        randomness().noise(0, 0, 4 * BLOCK, 8)


# -- the transform ------------------------------------------------------------------------------------------


def exactly(first: int, second: int) -> tuple[float, float, float]:
    """Box and Muller's pair from two words, and its radius, to 60 digits."""
    with mpmath.workdps(60):
        u = mpmath.mpf(float(first >> 1) + 1.0) / 2**63  # the word is rounded, and nothing after it
        turns = mpmath.mpf(second - 2**64 if second >= 2**63 else second) / 2**64
        radius = mpmath.sqrt(-2 * mpmath.log(u))
        return radius * mpmath.cos(2 * mpmath.pi * turns), radius * mpmath.sin(2 * mpmath.pi * turns), radius


EDGES = [0, 1, 2, 3, 2**11 - 1, 2**11, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 2**12, 2**64 - 2**11, 2**64 - 1]


def test_a_pair_is_box_and_mullers_to_the_last_digits():
    """Random words, and all pairs of words at the edges: 0, all ones, the axes, the diagonals."""
    words = np.random.default_rng(0).integers(0, 2**64, (2, 300), dtype=np.uint64)
    words = np.concatenate([words, np.array(list(product(EDGES, EDGES)), dtype=np.uint64).T], axis=1)
    pairs = [exactly(int(a), int(b)) for a, b in words.T]
    values = np.empty(2 * len(pairs))
    randomness_module.fill(words.reshape(-1).copy(), values)
    wanted = [a for a, _, _ in pairs] + [b for _, b, _ in pairs]
    for found, value, radius in zip(values, wanted, 2 * [r for _, _, r in pairs], strict=True):
        assert abs(found - value) <= 2.0**-50 * radius


def test_an_odd_count_leaves_out_the_last_pair_s_second_half():
    words = np.random.default_rng(0).integers(0, 2**64, 10, dtype=np.uint64)
    odd, even = np.empty(9), np.empty(10)
    randomness_module.fill(words.copy(), odd)
    randomness_module.fill(words.copy(), even)
    assert odd.tolist() == even[:9].tolist()


def test_the_largest_value_is_that_of_the_docstring():
    values = np.empty(2)
    randomness_module.fill(np.zeros(2, dtype=np.uint64), values)
    assert values.max() == pytest.approx(np.sqrt(126 * np.log(2)), rel=1e-15)
    assert "9.345" in randomness_module.fill.__doc__
    assert round(values.max(), 3) == 9.345
    assert 2 * stats.norm.sf(values.max()) == pytest.approx(9e-21, rel=0.05)


def test_the_tails_are_as_heavy_as_they_must_be_beyond_five_sigma():
    """The words are drawn so that u is below 2⁻¹²: values beyond 5 are as frequent among them as they must be."""
    generator, pairs = np.random.default_rng(1), 400_000
    words = generator.integers(0, 2**64, 2 * pairs, dtype=np.uint64)
    words[:pairs] >>= np.uint64(12)
    values = np.empty(2 * pairs)
    randomness_module.fill(words, values)
    for far in (5.0, 5.5, 6.0, 6.5):
        assert far**2 / 2 > 12 * np.log(2)  # such values have a radius of at least as much, and so a u below 2⁻¹²
        expected = 2 * stats.norm.sf(far) * 2**12
        low, high = stats.binom.ppf([FALSE_ALARM, 1 - FALSE_ALARM], 2 * pairs, expected)
        assert low <= (np.abs(values) > far).sum() <= high
        assert high > 0
    beyond = np.abs(values[np.abs(values) > 5])
    assert stats.kstest(beyond, lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(5)).pvalue > FALSE_ALARM


@every_source
@pytest.mark.slow
def test_twenty_million_values_are_standard_normal(source):
    """Kolmogorov–Smirnov, moments up to the eighth, tails up to 5; each fails one key in a million."""
    values = np.concatenate([randomness(source).noise(2, step, 2_000_000, 2) for step in range(10)])
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    z = stats.norm.isf(FALSE_ALARM / 16)
    for power in range(1, 9):
        mean, square = stats.norm.moment(power), stats.norm.moment(2 * power)
        assert abs((values**power).mean() - mean) <= z * ((square - mean**2) / len(values)) ** 0.5
    for far in (3.0, 4.0, 4.5, 5.0):
        low, high = stats.binom.ppf([FALSE_ALARM, 1 - FALSE_ALARM], len(values), 2 * stats.norm.sf(far))
        assert low <= (np.abs(values) > far).sum() <= high


# -- the sources --------------------------------------------------------------------------------------------


@every_source
def test_the_words_are_chacha20s_with_the_answers_of_rfc_8439(source):
    """Appendix A.1, test vectors 1 and 2: key 0, nonce 0, block counters 0 and 1."""
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    stream = SOURCES[source](bytes(32))
    words = np.concatenate([stream.integers(5), stream.integers(11)])  # read on, not begun again
    assert words.astype("<u8").tobytes().hex() == expected


@every_source
def test_the_cipher_is_that_of_cryptography_under_the_whole_subkey(source):
    """Over several pieces, whole and partial."""
    count = BLOCK + 100
    keystream = Cipher(algorithms.ChaCha20(KEY, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    assert SOURCES[source](KEY).integers(count).astype("<u8").tobytes() == keystream


def test_secure_noise_is_half_the_sum_of_four_normals_on_that_stream():
    """Over several pieces: every value has four normals of its own."""
    count = BLOCK // 4 + 5
    words = SOURCES["secure"](KEY).integers(4 * count)
    four = [np.empty((4, BLOCK // 4)), np.empty((4, 5))]
    randomness_module.fill(words[:BLOCK].copy(), four[0].reshape(-1))
    randomness_module.fill(words[BLOCK:].copy(), four[1].reshape(-1))
    expected = np.concatenate([part.sum(0) / 2 for part in four])
    assert np.allclose(normals_of(KEY, count, "secure"), expected, rtol=1e-12)


def test_a_stream_is_addressed_by_blake2b_of_its_name_under_the_key():
    for source in SOURCES:
        assert (randomness(source).noise(3, 14, 5) == normals_of(subkey("noise", 3, 14, 0), 5, source)).all()
        coins = SOURCES[source](subkey("coins", 3, 14)).integers(5) >> np.uint64(11)
        assert (randomness(source).coins(3, 14, 5) == coins).all()


@every_source
@pytest.mark.parametrize(("library", "name"), [(np, "log"), (torch, "cos"), (torch, "sin")])
def test_a_hash_of_noise_differs_with_the_last_bit_of_each_function(source, library, name, monkeypatch):
    """As another version of NumPy or torch, or another processor: one value in a thousand is rounded elsewhere."""
    sample_hash.cache_clear()
    ours, true = sample_hash(source), getattr(library, name)

    def rounded(x, out):
        true(x, out=out)
        part = np.asarray(out)[::1000]
        part[:] = np.nextafter(part, -np.inf)
        return out

    sample_hash.cache_clear()
    assert sample_hash(source) == ours
    sample_hash.cache_clear()
    monkeypatch.setattr(library, name, rounded)
    assert sample_hash(source) != ours
    sample_hash.cache_clear()


def test_what_a_key_gives_is_that_of_this_version_of_draws():
    """If coins or noise change, DRAWS_VERSION rises, and these values are recorded with it."""
    one = randomness()
    assert DRAWS_VERSION == 3
    assert hashlib.sha256(one.coins(1, 2, 1_000).astype("<u8").tobytes()).hexdigest()[:16] == "788144c169bd4154"
    assert (
        hashlib.sha256(np.round(one.noise(1, 2, 1_000), 9).astype("<f8").tobytes()).hexdigest()[:16]
        == "1ae9e73936054167"
    )
    secure = randomness("secure").noise(1, 2, 1_000)
    assert hashlib.sha256(np.round(secure, 9).astype("<f8").tobytes()).hexdigest()[:16] == "cbf9c2e00b38f051"
    drawn = np.concatenate([draws().by_coins(0, 5), draws().by_counts(0, 5)])
    assert hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()[:16] == "86a45cb120a9f122"


# -- sampling ---------------------------------------------------------------------------------------------------------

RATES = (0.0, 0.003, 0.05, 0.3, 0.7, 1.0)
EACH = 40  # records per group
STEPS = 3_000


def even(groups: int) -> dict[str, np.ndarray]:
    return {"clip_norm": np.ones(groups), "weight": np.ones(groups)}


def draws(rates: tuple[float, ...] = RATES, source: str = "chacha20", phases: int = 1, key: bytes = bytes(32)) -> Draws:
    """A group per rate; the groups' records lie mixed among each other."""
    count = len(rates)
    budgets = epsilons.Budgets(np.resize(np.arange(1, count + 1) * 1e4, EACH * count))
    table = {"steps": STEPS, "sample_rate": rates, **even(count), "noise_std": 3.0, "expected_batch": 50.0}
    plan = of_phases(*[table] * phases, budgets=budgets)
    return Draws(plan, budgets.group, Randomness(key, source))


#: The two ways to one distribution.
METHODS = ("by_coins", "by_counts")
every_method = pytest.mark.parametrize("method", METHODS)
every_source_and_method = pytest.mark.parametrize(("source", "method"), list(product(SOURCES, METHODS)))


@cache
def drawn(source: str, method: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, records) who was drawn, and (records,) at which rate."""
    ours = getattr(draws(source=source), method)
    rate = np.array(RATES)[draws().group]
    table = np.zeros((STEPS, len(rate)), dtype=bool)
    for step in range(STEPS):
        table[step, ours(0, step)] = True
    return table, rate


def standardised(table: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1 where the rate is neither 0 nor 1; only those records."""
    random = (rate > 0) & (rate < 1)
    return (table[:, random] - rate[random]) / np.sqrt(rate[random] * (1 - rate[random]))


@every_source_and_method
def test_every_record_is_drawn_at_its_own_rate(source, method):
    """A binomial count per record and per group; over all of them together one key in a million fails."""
    table, rate = drawn(source, method)
    counts = table.sum(0)
    level = FALSE_ALARM / len(rate) / 2
    assert (counts >= stats.binom.ppf(level, STEPS, rate)).all()
    assert (counts <= stats.binom.isf(level, STEPS, rate)).all()
    for q in RATES:
        trials = STEPS * EACH
        low, high = stats.binom.ppf([FALSE_ALARM / 10, 1 - FALSE_ALARM / 10], trials, q)
        assert low <= counts[rate == q].sum() <= high


@every_source_and_method
def test_a_rate_of_zero_is_never_drawn_and_a_rate_of_one_always(source, method):
    table, rate = drawn(source, method)
    assert not table[:, rate == 0].any()
    assert table[:, rate == 1].all()


@every_source_and_method
def test_the_size_of_a_draw_varies_as_independent_coins_make_it_vary(source, method):
    """A fixed-size batch or a shuffle has the right rates and the wrong variance, sum of q(1 − q)."""
    table, rate = drawn(source, method)
    sizes = table.sum(1)
    variance = (rate * (1 - rate)).sum()
    spread = ((sizes - rate.sum()) ** 2).sum() / variance  # chi-squared with STEPS degrees, nearly
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], STEPS)
    assert low <= spread <= high
    assert abs(sizes.mean() - rate.sum()) <= stats.norm.isf(FALSE_ALARM / 2) * (variance / STEPS) ** 0.5


@every_source_and_method
def test_no_two_records_are_drawn_together_more_or_less_often_than_chance(source, method):
    """The largest correlation of any pair, but for the rarest group, whose counts are too small for a normal limit."""
    table, rate = drawn(source, method)
    common = rate >= 0.05
    values = standardised(table[:, common], rate[common])
    pairs = np.triu_indices(values.shape[1], 1)
    together = (values.T @ values)[pairs] / STEPS**0.5
    assert np.abs(together).max() <= stats.norm.isf(FALSE_ALARM / len(together) / 2) * 1.05
    assert stats.kstest(together, "norm").pvalue > FALSE_ALARM


@every_source_and_method
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_having_been_drawn_says_nothing_about_the_next_steps(source, method, lag):
    """The mean over records of each one's correlation with itself `lag` steps later, and with its neighbour."""
    table, rate = drawn(source, method)
    values = standardised(table, rate)
    for later in (values, np.roll(values, 1, axis=1)):
        product = (values[:-lag] * later[lag:]).mean()
        count = (STEPS - lag) * values.shape[1]
        assert abs(product) * count**0.5 <= stats.norm.isf(FALSE_ALARM / 4)


@every_source_and_method
def test_a_draw_is_a_function_of_key_phase_and_step(source, method):
    ours, again = draws(source=source, phases=2), draws(source=source, phases=2)
    other = draws(source=source, phases=2, key=b"\1" + bytes(31))
    for step in (0, 1, 2_999):
        assert (getattr(ours, method)(0, step) == getattr(again, method)(0, step)).all()
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(ours, method)(1, step))
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(ours, method)(0, step + 1))
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(other, method)(0, step))


@every_method
def test_a_draw_is_in_ascending_order_and_names_no_record_twice(method):
    for step in range(50):
        found = getattr(draws(), method)(0, step)
        assert (np.diff(found) > 0).all()
        assert found.dtype == np.int64


def test_a_larger_rate_under_the_same_coins_draws_the_same_records_and_more():
    few, many = draws(rates=(0.2, 0.4)), draws(rates=(0.3, 0.4))
    for step in range(50):
        assert np.isin(few.at(0, step), many.at(0, step)).all()


@given(
    st.lists(st.sampled_from([0.0, 2.0**-53, 0.01, 0.3, 1 - 2.0**-53, 1.0]), min_size=1, max_size=4), st.integers(0, 9)
)
def test_a_record_is_drawn_if_and_only_if_its_coin_is_below_its_limit(rates, seed):
    """The definition, record by record, for coins at and beside the limits and anywhere."""
    group = np.resize(np.arange(len(rates)), 40)
    limits = [int(rate * 2**53) for rate in np.array(rates)[group]]
    chance = np.random.default_rng(seed)
    near = [min(max(limit + int(chance.integers(-1, 2)), 0), 2**53 - 1) for limit in limits]
    coins = np.where(
        chance.random(40) < 0.5, np.array(near, dtype=np.uint64), chance.integers(2**53, size=40, dtype=np.uint64)
    )
    plan = SimpleNamespace(records=40, phases=[SimpleNamespace(sample_rate=np.array(rates))])
    ours = Draws(plan, group, SimpleNamespace(coins=lambda phase, step, records: coins))
    expected = [i for i, (coin, limit) in enumerate(zip(coins.tolist(), limits, strict=True)) if coin < limit]
    assert ours.by_coins(0, 0).tolist() == expected


@pytest.mark.slow
@every_source
def test_a_rare_record_is_not_drawn_too_often(source):
    """A hundred million coins at q = 1e-4: the count is within chance, but for one key in a million."""
    randomness, count, steps, q = Randomness(bytes(32), source), 1_000_000, 100, 1e-4
    limit = np.uint64(int(q * 2**53))
    found = sum(int((randomness.coins(0, step, count) < limit).sum()) for step in range(steps))
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count * steps, q)
    assert low <= found <= high


@given(st.integers(0, 500), st.integers(1, 60))
def test_physical_batches_are_the_draw_in_order_in_nearly_equal_pieces(count, largest):
    """numpy.array_split is the definition."""
    bounds, parts = evenly(count, largest), -(-count // largest)
    assert (len(bounds), bounds[0], bounds[-1]) == (parts + 1, 0, count)
    assert all(1 <= last - first <= largest for first, last in pairwise(bounds))
    if parts:
        assert np.diff(bounds).tolist() == [len(part) for part in np.array_split(np.arange(count), parts)]


# -- counts and subsets ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0, 2.0**-53, 1 - 2.0**-53, 1e-300])), min_size=1)
)
def test_halvings_and_coins_together_are_the_threshold_exactly(rates):
    """No rounding: 2^-h times the coin's probability is the threshold, which is the rate rounded down."""
    limits, whole = thresholds(rates), 2**53
    parts = rate_classes(limits, np.arange(len(rates)))
    assert sorted(int(i) for part in parts for i in part.members) == np.flatnonzero(limits).tolist()
    for part in parts:
        for i in part.members:
            assert Fraction(int(part.limits[i]), whole) / 2**part.halvings == Fraction(int(limits[i]), whole)
            assert whole // 2 < part.limits[i] <= whole


@pytest.mark.parametrize("coins", [0, 1, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("at_once", [1, 2, 2**20])
def test_heads_are_the_ones_among_exactly_so_many_bits(coins, at_once, monkeypatch):
    monkeypatch.setattr(persons_rows, "WORDS_AT_ONCE", at_once)
    bits, left, words = 0, coins, Randomness(bytes(32)).stream("coins")
    while left > 0:
        word = int(words.integers(1)[0])
        bits += (word >> max(64 - left, 0)).bit_count()
        left -= 64
    assert heads(coins, Randomness(bytes(32)).stream("coins")) == bits


@every_source
@pytest.mark.parametrize(("trials", "halvings"), [(40, 1), (200, 3), (5_000, 7)])
def test_successes_are_binomial(source, trials, halvings):
    """Chi-squared over 20 classes of about equal probability; it fails one key in a million."""
    stream = Randomness(bytes(32), source).stream("test", trials)
    assert successes(trials, 0, stream) == trials
    counts = [successes(trials, halvings, stream) for _ in range(2_000)]
    cuts = np.unique(stats.binom.ppf(np.linspace(0, 1, 21)[1:-1], trials, 2.0**-halvings))
    chances = np.diff([0, *stats.binom.cdf(cuts, trials, 2.0**-halvings), 1])
    seen = np.bincount(np.searchsorted(cuts, counts), minlength=len(cuts) + 1)
    assert stats.chisquare(seen[chances > 0], chances[chances > 0] * len(counts)).pvalue > FALSE_ALARM
    assert seen[chances == 0].sum() == 0


@pytest.mark.parametrize("size", range(6))
def test_every_subset_is_equally_likely(size):
    """Chi-squared over all subsets of 5; it fails one key in a million."""
    stream = Randomness(bytes(32)).stream("test", size)
    found = [tuple(subset(size, 5, stream).tolist()) for _ in range(3_000)]
    names, counts = np.unique([" ".join(map(str, one)) for one in found], return_counts=True)
    assert all(list(one) == sorted({*one}) and {*one} <= {*range(5)} and len(one) == size for one in found)
    assert len(names) == [1, 5, 10, 10, 5, 1][size]
    assert len(names) == 1 or stats.chisquare(counts).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("size", "count"), [(0, 0), (0, 1), (1, 1), (3, 2**33), (900, 1_000), (1_000, 1_000)])
def test_a_subset_is_ascending_and_has_its_size(size, count):
    found = subset(size, count, Randomness(bytes(32)).stream("test"))
    assert len(found) == size
    assert (np.diff(found) > 0).all()
    assert not size or 0 <= found[0] <= found[-1] < count


def plan_for(records: int, rates=(1e-4, 3e-3, 0.6)) -> epsilons.Plan:
    budgets = epsilons.Budgets(np.resize([1e4, 2e4, 3e4], records), delta=1e-7)
    table = {"steps": 3, "sample_rate": rates, **even(3), "noise_std": 9.0, "expected_batch": 50.0}
    return of_phases(table, budgets=budgets)


def test_the_plans_number_of_records_alone_chooses_the_method():
    for records, method in [(MOST_COINS, "coins"), (MOST_COINS + 1, "counts")]:
        plan = plan_for(records, (1e-5, 2e-5, 4e-5))
        group = np.resize([0, 1, 2], records)
        ours = Draws(plan, group, Randomness(bytes(32)))
        assert ours.method == method
        assert (ours.at(0, 1) == getattr(ours, f"by_{method}")(0, 1)).all()
        few = Draws(plan, group[:60], Randomness(bytes(32)))  # the number of records in the data does not matter
        assert few.method == method


@pytest.mark.parametrize("largest", [3, 1000])
def test_a_run_hands_out_those_records_whatever_the_physical_batches(largest, monkeypatch):
    monkeypatch.setattr(persons_rows, "MOST_COINS", 10)
    budgets = epsilons.Budgets(np.resize([1e4, 2e4, 3e4], 300), delta=1e-7)
    plan, model = plan_for(300), torch.nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.arange(300.0)[:, None], torch.zeros(300, dtype=torch.long)
    options = {"budgets": budgets, "key": bytes(32), "max_physical_batch": largest, "engine": "loop"}
    private = make_flat(model, optimizer, (x, y), plan, **options)
    seen: list[list[int]] = [[], [], []]
    with private:
        for inputs, targets in private.batches:
            if not private.is_check:
                seen[private._position.step] += inputs[:, 0].long().tolist()
            private.backward(torch.nn.functional.cross_entropy(model(inputs / 300), targets, reduction="none"))
            private.step()
    ours = Draws(plan, budgets.group, Randomness(bytes(32)))
    assert seen == [ours.by_counts(0, step).tolist() for step in range(3)]
    assert seen[0] != ours.by_coins(0, 0).tolist()


@pytest.mark.slow
@every_source
@pytest.mark.parametrize("rate", [1e-6, 1e-4, 2.0**-10, 2.0**-10 + 2.0**-40, 0.0501])
def test_rare_records_are_drawn_at_their_rate_wherever_they_lie(source, rate):
    """Some ten thousand draws or a million, in all and by place; each fails one key in a million."""
    count, steps = 2_000_000, 200 if rate < 0.01 else 20
    ours = Draws(plan_for(count, (rate,) * 3), np.resize([0, 1, 2], count), Randomness(bytes(32), source))
    places = np.zeros(200, dtype=np.int64)
    for step in range(steps):
        places += np.bincount(ours.by_counts(0, step) // (count // 200), minlength=200)
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count * steps, rate)
    assert low <= places.sum() <= high
    assert stats.chisquare(places).pvalue > FALSE_ALARM


# -- Draws read each record's group in parts, whatever type its number has


def at_once(ours: Draws, step: int) -> np.ndarray:
    """What `by_counts` draws, from arrays of all records."""

    def chosen(size: int, count: int, stream: Any) -> np.ndarray:
        if 2 * size > count:
            return np.setdiff1d(np.arange(count), subset(count - size, count, stream))
        return subset(size, count, stream)

    limits, found = thresholds(ours.plan.phases[0].sample_rate), []
    halvings = np.array([COIN_BITS - (int(limit) - 1).bit_length() if limit else -1 for limit in limits])
    for h in sorted({*halvings.tolist()} - {-1}):
        members = np.flatnonzero(halvings[ours.group] == h)
        stream = ours.randomness.stream("counts", 0, step, h)
        count = successes(len(members), h, stream)
        candidates = members[chosen(count, len(members), stream)]
        coins = stream.integers(count) >> np.uint64(64 - COIN_BITS)
        found.append(candidates[coins < (limits << np.uint64(h))[ours.group[candidates]]])
    return np.sort(np.concatenate(found))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64])
def test_draws_in_parts_are_those_of_whole_arrays_whatever_the_type_of_the_groups(kind):
    rates, count = (0.0, 1e-3, 0.01, 0.3, 0.6, 0.9, 1.0), 2 * PART + 41
    table = {"steps": 3, "sample_rate": rates, **even(7), "noise_std": 3.0, "expected_batch": 50.0}
    plan = of_phases(table, budgets=epsilons.Budgets(np.resize(np.arange(1, 8) * 1e4, 700)))
    group = np.random.default_rng(0).integers(len(rates), size=count)
    ours = Draws(plan, group.astype(kind), Randomness(bytes(32)))
    for step in range(3):
        drawn = ours.by_counts(0, step)
        assert drawn.dtype == np.int64
        assert drawn.tolist() == at_once(Draws(plan, group, Randomness(bytes(32))), step).tolist()
        coins = Randomness(bytes(32)).stream("coins", 0, step).integers(count) >> np.uint64(11)
        assert ours.by_coins(0, step).tolist() == np.flatnonzero(coins < thresholds(rates)[group]).tolist()


def test_a_draw_by_counts_takes_few_bytes_a_record_and_another_one_next_to_none():
    count = MOST_COINS + 1
    table = {"steps": 3, "sample_rate": (1e-4, 1e-3), **even(2), "noise_std": 3.0, "expected_batch": 50.0}
    ours = Draws(of_phases(table), np.resize(np.array([0, 1], dtype=np.uint8), count), Randomness(bytes(32)))
    peaks = []
    for step in range(2):
        tracemalloc.start()
        ours.by_counts(0, step)
        peaks.append(tracemalloc.get_traced_memory()[1] / count)
        tracemalloc.stop()
    assert peaks[0] <= 9
    assert peaks[1] <= 0.6  # the coins of a count, 8 MB at most for any number of records
