"""The fingerprint of floats: the formula in NumPy, any cut, any single bit; ranks' parts add up
to the whole.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey.core import fingerprint, native
from odyssey.errors import ShapeError

ROW = 32
ROWS_SEED, COLUMNS_SEED = 0x6F64797373657900, 0x66696E6765727072


def split_mix(seed, i):
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + (i.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keys(i):
    one = np.uint64(1)
    return (split_mix(ROWS_SEED, i // ROW) | one) * (split_mix(COLUMNS_SEED, i % ROW) | one)


def formula(values, start=0):
    words = values.ravel().view(np.uint32).astype(np.uint64)
    return int((keys(start + np.arange(words.size)) * words).sum(dtype=np.uint64))


def some(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def test_split_mix_is_the_published_one():
    # The first numbers of SplitMix64 from the seed 1234567, as Rosetta Code and the reference C
    # program print them.
    assert [int(x) for x in split_mix(1234567, np.arange(3))] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 63, 64, 100, 1000, 61706])
@pytest.mark.parametrize("start", [0, 1, 16, 31, 32, 33, 2**40 + 5])
def test_formula(n, start):
    x = some(n)
    assert fingerprint.of(x, start) == formula(x, start)


def test_unaligned_memory():
    x = some(200)
    for skip in range(1, 20):
        assert fingerprint.of(x[skip:], skip) == formula(x[skip:], skip)


def test_any_cut_gives_the_same():
    x, rng = some(500), np.random.default_rng(1)
    whole = fingerprint.of(x)
    for cut in range(501):
        assert fingerprint.add([fingerprint.of(x[:cut]), fingerprint.of(x[cut:], cut)]) == whole
    for _ in range(200):
        ends = np.sort(rng.integers(0, 501, rng.integers(0, 9)))
        pieces = list(zip([0, *ends], [*ends, 500], strict=True))
        rng.shuffle(pieces)
        assert fingerprint.add(fingerprint.of(x[a:b], int(a)) for a, b in pieces) == whole
        runs = [(x.ctypes.data + 4 * int(a), int(b - a), int(a)) for a, b in pieces]
        assert fingerprint.Runs(runs)() == whole


def test_each_single_bit_changes_it():
    x = some(150)
    bits = x.view(np.uint32)
    whole, seen = fingerprint.of(x), set()
    for i in range(150):
        for bit in range(32):
            bits[i] ^= np.uint32(1 << bit)
            seen.add(fingerprint.of(x))
            bits[i] ^= np.uint32(1 << bit)
    assert fingerprint.of(x) == whole
    assert whole not in seen and len(seen) == 150 * 32


def test_keys_are_odd_and_differ():
    k = keys(np.arange(1 << 16))
    assert (k & np.uint64(1)).all()
    assert len(np.unique(k)) == len(k)


def test_swapped_and_moved_values_change_it():
    x = some(128)
    found = {fingerprint.of(x), fingerprint.of(x, 1), fingerprint.of(x[::-1].copy())}
    for a, b in ((0, 1), (0, 32), (5, 69), (31, 32)):
        y = x.copy()
        y[[a, b]] = y[[b, a]]
        found.add(fingerprint.of(y))
    assert len(found) == 7


def test_random_changes_of_several_signs_do_not_cancel():
    x, rng = (
        np.abs(np.random.default_rng(2).standard_normal(4096)).astype(np.float32),
        np.random.default_rng(3),
    )
    seen = {fingerprint.of(x)}
    for _ in range(3000):
        y = x.copy()
        y[rng.choice(4096, 4, replace=False)] *= -1
        seen.add(fingerprint.of(y))
    assert len(seen) == 3001


def test_bits_are_bits_and_zeros_count_nothing():
    x = some(40)
    assert fingerprint.of(np.float32([0.0])) == 0 != fingerprint.of(np.float32([-0.0]))
    assert fingerprint.of(np.concatenate([x, np.zeros(24, np.float32)])) == fingerprint.of(x)
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert fingerprint.of(nans[:1]) != fingerprint.of(nans[1:])


def test_runs_follow_the_memory():
    x = native.aligned(64)
    taken = fingerprint.Runs([(x.ctypes.data, 64, 0)])
    assert taken() == 0
    x[3] = 1.5
    assert taken() == formula(x)


def test_signed_goes_there_and_back():
    for value in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert fingerprint.unsigned(np.int64(fingerprint.signed(value))) == value
    parts = [fingerprint.of(some(100, seed), 100 * seed) for seed in range(4)]
    summed = np.array([fingerprint.signed(p) for p in parts], np.int64).sum()
    assert fingerprint.unsigned(summed) == fingerprint.add(parts)


@pytest.mark.parametrize(
    "values", [np.zeros(4), np.zeros((4, 4), np.float32).T[1:], np.zeros(8, np.float32)[::2]]
)
def test_other_arrays_are_refused(values):
    with pytest.raises(ShapeError, match="float32"):
        fingerprint.of(values)


@pytest.mark.parametrize("run", [(0, 4, 0), (64, -1, 0), (64, 1, -1)])
def test_no_run(run):
    with pytest.raises(ShapeError, match="is no run of memory"):
        fingerprint.Runs([run])
