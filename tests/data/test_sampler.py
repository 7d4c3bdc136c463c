"""The order of samples: golden values, that it is a permutation, and that the workers' shares
partition it.
"""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
from each_case import each

from odyssey.data import DistributedSampler, arrays, permutation, sampler
from odyssey.errors import ConfigError

SIZES = range(1, 18)
REPLICAS = range(1, 6)


def test_the_stream_is_splitmix64() -> None:
    # The outputs for seed 1234567 that implementations of SplitMix64 commonly publish.
    assert sampler._stream(1234567, np.arange(5)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def plain_permutation(n: int, seed: int, epoch: int) -> list[int]:
    """The definition again, in Python integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z &= mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mix(mix(seed + gamma) + (epoch + 1) * gamma)
    return sorted(range(n), key=lambda i: mix(start + (i + 1) * gamma))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63, 2**64 - 1])
@pytest.mark.parametrize("epoch", [0, 1, 7, 2**40])
def test_agrees_with_its_definition(seed: int, epoch: int) -> None:
    for n in (0, 1, 2, 17, 300):
        order = permutation(n, seed, epoch)
        assert order.dtype == np.int64
        assert order.tolist() == plain_permutation(n, seed, epoch)


def unmixed(word: int) -> int:
    """The number that SplitMix64's mixing turned into `word`: the three steps undone, the last
    one first.
    """
    mask = 2**64 - 1
    for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        word = word * pow(factor, -1, 2**64) & mask
        shifted = word
        for _ in range(64 // shift):
            shifted = word ^ shifted >> shift
        word = shifted
    return word


def test_keys_are_distinct_because_every_step_can_be_undone() -> None:
    """The order does not depend on how a sort treats equal keys: no two samples have the same
    key.
    """
    random = np.random.default_rng(4)
    words = [0, 1, 2**63, 2**64 - 1, *(1 << bit for bit in range(64))]
    words += random.integers(0, 2**64, 2000, np.uint64, endpoint=False).tolist()
    assert [unmixed(w) for w in sampler._mix_words(np.array(words, np.uint64)).tolist()] == words
    inverse = pow(sampler._GAMMA, -1, 2**64)  # an odd factor: counting by it meets every word once
    for start in random.integers(0, 2**64, 20, np.uint64, endpoint=False).tolist():
        numbers = [0, 1, 2**31, 2**62, *random.integers(0, 2**62, 100).tolist()]
        keys = sampler._stream(start, np.array(numbers)).tolist()
        assert [(unmixed(key) - start) * inverse % 2**64 - 1 for key in keys] == numbers


@pytest.mark.parametrize("n", [*range(130), 255, 256, 1000, 16_383, 16_384, 16_385, 300_001])
def test_the_order_is_the_only_one_that_sorts_the_keys(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [np.zeros(0, np.uint64)]
    plain = sampler._stream
    monkeypatch.setattr(sampler, "_stream", lambda *of: pieces.append(plain(*of)) or pieces[-1])
    for seed in (0, 1, 2**64 - 1):
        for epoch in (0, 3):
            order = permutation(n, seed, epoch)
            keys_in_order = np.concatenate(pieces)[order]
            del pieces[1:]
            assert (keys_in_order[1:] > keys_in_order[:-1]).all()  # sorted, and no two are equal
            assert (np.bincount(order, minlength=n) == 1).all() if n else not len(order)


def test_golden_values() -> None:
    # Orders of past runs must stay reproducible; these values never change.
    assert permutation(10, 0, 0).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
    assert permutation(60000, 0, 0)[:8].tolist() == [
        35561,
        30683,
        21634,
        29047,
        23375,
        43975,
        47890,
        55016,
    ]
    assert permutation(60000, 42, 3)[:8].tolist() == [
        59045,
        48163,
        50015,
        24924,
        26897,
        2509,
        37921,
        14649,
    ]


def test_holds_every_index_once() -> None:
    np.testing.assert_array_equal(np.sort(permutation(60000, 3, 4)), np.arange(60000))


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = [permutation(10000, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for at, one in enumerate(orders):
        for other in orders[:at]:
            # Two random orders agree in one place on average; the shifted stream would agree nearly
            # everywhere.
            assert np.count_nonzero(one == other) < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_every_order_of_three_occurs_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        order = tuple(permutation(3, 5, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())


@pytest.mark.parametrize(
    "arguments", [(10, -1, 0), (10, 2**64, 0), (10, 0, -1), (-1, 0, 0), (10, 0.5, 0), (10, "0", 0)]
)
def test_permutation_refuses_arguments_out_of_range(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"(n|seed|epoch) is .*; it must be"):
        permutation(*arguments)


# DistributedSampler


def shares(n: int, replicas: int, **options: object) -> list[list[int]]:
    return [list(DistributedSampler(n, replicas, rank, **options)) for rank in range(replicas)]  # type: ignore[arg-type]


@each("n, replicas, shuffle", itertools.product(SIZES, REPLICAS, (True, False)))
def test_shares_hold_everything_exactly_once(n: int, replicas: int, shuffle: bool) -> None:
    parts = shares(n, replicas, shuffle=shuffle, seed=9)
    assert sorted(sum(parts, [])) == list(range(n))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == [len(DistributedSampler(n, replicas, rank)) for rank in range(replicas)]


@each("n, replicas", itertools.product(SIZES, REPLICAS))
def test_drop_last_gives_equal_disjoint_shares(n: int, replicas: int) -> None:
    parts = shares(n, replicas, drop_last=True)
    together = sum(parts, [])
    assert [len(part) for part in parts] == [n // replicas] * replicas
    assert len(DistributedSampler(n, replicas, 0, drop_last=True)) == n // replicas
    assert len(set(together)) == len(together)


@each("n, replicas", itertools.product(SIZES, REPLICAS))
def test_pad_repeats_from_the_start(n: int, replicas: int) -> None:
    parts = shares(n, replicas, pad=True, seed=4)
    length = -(-n // replicas)
    assert [len(part) for part in parts] == [length] * replicas
    assert len(DistributedSampler(n, replicas, replicas - 1, pad=True)) == length
    interleaved = [part[at] for at in range(length) for part in parts]
    order = permutation(n, 4, 0).tolist()
    assert interleaved == [order[at % n] for at in range(length * replicas)]


def test_takes_every_rth_position_of_the_permutation() -> None:
    own = DistributedSampler(dataset_size=10, num_replicas=3, rank=1, seed=2)
    own.set_epoch(5)
    assert list(own) == permutation(10, 2, 5)[1::3].tolist()
    assert own.indices().dtype == np.int64


def test_set_epoch_changes_the_order_and_iterating_does_not() -> None:
    own = DistributedSampler(100, 1, 0)
    first = list(own)
    assert list(own) == first
    own.set_epoch(1)
    assert list(own) != first
    own.set_epoch(0)
    assert list(own) == first


def test_takes_a_data_set() -> None:
    data = arrays(np.zeros((7, 2), np.uint8), np.zeros(7, np.int32))
    assert len(DistributedSampler(data, 2, 0)) == 4
    assert len(DistributedSampler([0] * 7, 2, 1)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 3}, "rank is 3; it must be from 0 to 2"),
        ({"rank": -1}, "rank is -1; it must be from 0 to 2"),
        ({"num_replicas": 0}, "num_replicas is 0; it must be at least 1"),
        ({"dataset": 0}, "dataset_size is 0; it must be at least 1"),
        ({"dataset": []}, "dataset_size is 0; it must be at least 1"),
        ({"dataset": 2.5}, r"dataset_size is 2\.5; it must be an integer"),
        ({"seed": -1}, "seed is -1"),
        ({"drop_last": True, "pad": True}, "drop_last and pad"),
        ({"dataset_size": 5}, "either a data set or dataset_size"),
        ({"dataset": None}, "either a data set or dataset_size"),
    ],
)
def test_sampler_refuses_wrong_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedSampler(**{"dataset": 10, "num_replicas": 3, "rank": 0, **options})  # type: ignore[arg-type]


def test_sampler_refuses_a_wrong_epoch() -> None:
    with pytest.raises(ConfigError, match="epoch is -1"):
        DistributedSampler(10, 1, 0).set_epoch(-1)


def test_workers_come_from_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odyssey.comm.world", lambda: types.SimpleNamespace(size=4, rank=2))
    own = DistributedSampler(10)
    assert (own.num_replicas, own.rank) == (4, 2)
    with pytest.raises(ConfigError, match="rank is 2; it must be from 0 to 1"):
        DistributedSampler(10, num_replicas=2)
