"""Batches: how an epoch is cut, which order it has, and what the prefetch thread does when
things go wrong.
"""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from odyssey.data import ArrayDataset, Batch, DataLoader, DistributedSampler, arrays, permutation
from odyssey.errors import ConfigError, DataError


def numbered(n: int) -> ArrayDataset:
    """Sample i holds the value i in two features and has the label i % 3."""
    return arrays(
        np.repeat(np.arange(n, dtype=np.float32)[:, None], 2, 1), np.arange(n) % 3, classes=3
    )


def order_of(loader: DataLoader) -> list[int]:
    return [int(at) for batch in loader for at in batch.indices]


class Mapped:
    """A map-style data set; `fail_at` raises, `gate` blocks until it is set."""

    classes = 3

    def __init__(
        self, n: int, fail_at: int | None = None, gate: threading.Event | None = None
    ) -> None:
        self.n, self.fail_at, self.gate = n, fail_at, gate
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[object, object]:
        self.asked.append(i)
        if self.gate is not None:
            assert self.gate.wait(60)
        if i == self.fail_at:
            raise KeyError(f"sample {i} is broken")
        return np.full((1, 2, 2), i, np.float32), i % 3


_earlier: set[threading.Thread] = set()  # threads that other tests of this process have left


@pytest.fixture(autouse=True)
def _own_threads() -> None:
    _earlier.clear()
    _earlier.update(threading.enumerate())


def prefetch_threads() -> list[threading.Thread]:
    found = [thread for thread in threading.enumerate() if thread.name == "odyssey-prefetch"]
    return [thread for thread in found if thread not in _earlier]


def wait_until(condition: object, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False


# cutting


@pytest.mark.parametrize(
    ("n", "size", "drop", "lengths"),
    [
        (10, 4, False, [4, 4, 2]),
        (10, 4, True, [4, 4]),
        (8, 4, False, [4, 4]),
        (8, 4, True, [4, 4]),
        (3, 64, False, [3]),
        (3, 1, False, [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("kind", [numbered, Mapped])
def test_batches_of_an_epoch(n: int, size: int, drop: bool, lengths: list[int], kind: type) -> None:
    loader = DataLoader(kind(n), size, drop_last=drop)
    batches = list(loader)
    assert [len(batch) for batch in batches] == lengths
    assert len(loader) == len(lengths)
    assert [batch.index for batch in batches] == list(range(len(lengths)))
    assert [batch.epoch for batch in batches] == [0] * len(lengths)
    values = np.concatenate(
        [batch.dataset.gather(batch.indices)[0].reshape(len(batch), -1)[:, 0] for batch in batches]
    )
    np.testing.assert_array_equal(values, np.arange(sum(lengths)))


def test_a_batch_unpacks_into_images_and_labels() -> None:
    loader = DataLoader(numbered(10), 4, True, seed=3)
    batch = next(iter(loader))
    assert isinstance(batch, Batch)
    assert batch.dataset is loader.dataset
    assert batch.indices.dtype == np.int64
    x, y = batch
    np.testing.assert_array_equal(x[:, 0], batch.indices)
    np.testing.assert_array_equal(y, batch.indices % 3)
    assert (x.dtype, x.shape) == (np.float32, (4, 2))
    assert (y.dtype, y.shape) == (np.int32, (4,))


def test_defaults() -> None:
    loader = DataLoader(numbered(100))
    assert loader.batch_size == 64
    assert order_of(loader) == list(range(100))


def test_indices_cannot_be_written() -> None:
    batch = next(iter(DataLoader(numbered(10), 4, True)))
    with pytest.raises(ValueError, match="read-only"):
        batch.indices[0] = 0


# epochs


@pytest.mark.parametrize("prefetch", [0, 2])
def test_epochs_count_up_and_differ(prefetch: int) -> None:
    loader = DataLoader(numbered(50), 8, True, seed=7, prefetch=prefetch)
    for epoch in range(4):
        assert order_of(loader) == permutation(50, 7, epoch).tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_set_epoch_fixes_the_next_epoch_and_counting_goes_on(prefetch: int) -> None:
    loader = DataLoader(numbered(50), 8, True, seed=7, prefetch=prefetch)
    for epoch in (5, 5, 0, 3):
        loader.set_epoch(epoch)
        assert order_of(loader) == permutation(50, 7, epoch).tolist()
    batches = list(loader)
    assert {batch.epoch for batch in batches} == {4}
    assert (
        np.concatenate([batch.indices for batch in batches]).tolist()
        == permutation(50, 7, 4).tolist()
    )


def test_an_abandoned_epoch_counts() -> None:
    loader = DataLoader(numbered(50), 8, True)
    next(iter(loader))
    assert next(iter(loader)).epoch == 1


def test_two_iterations_at_once_do_not_disturb_each_other() -> None:
    loader = DataLoader(numbered(20), 5, True)
    pairs = list(zip(loader, loader, strict=True))
    assert (
        np.concatenate([one.indices for one, _ in pairs]).tolist() == permutation(20, 0, 0).tolist()
    )
    assert (
        np.concatenate([other.indices for _, other in pairs]).tolist()
        == permutation(20, 0, 1).tolist()
    )


def test_map_style_has_the_same_order_as_arrays() -> None:
    data = Mapped(20)
    loader = DataLoader(data, 6, True, seed=5)
    labels = np.concatenate([batch.dataset.labels for batch in loader])
    np.testing.assert_array_equal(labels, permutation(20, 5, 0) % 3)
    assert data.asked == permutation(20, 5, 0).tolist()


# samplers


def test_a_distributed_sampler_is_cut_into_batches_and_told_the_epoch() -> None:
    data = numbered(23)
    loaders = [
        DataLoader(data, 4, sampler=DistributedSampler(data, 3, rank, seed=1)) for rank in range(3)
    ]
    for epoch in range(3):
        parts = [order_of(loader) for loader in loaders]
        assert parts == [permutation(23, 1, epoch)[rank::3].tolist() for rank in range(3)]
    assert [len(loader) for loader in loaders] == [2, 2, 2]


def test_an_epoch_set_on_the_sampler_is_used() -> None:
    own = DistributedSampler(30, 2, 1)
    loader = DataLoader(numbered(30), 4, sampler=own)
    for epoch in (5, 5, 2):
        own.set_epoch(epoch)
        assert order_of(loader) == permutation(30, 0, epoch)[1::2].tolist()
    assert next(iter(loader)).epoch == 3
    loader.set_epoch(9)
    assert order_of(loader) == permutation(30, 0, 9)[1::2].tolist()
    assert own.epoch == 9


def test_any_iterable_of_indices_is_a_sampler() -> None:
    loader = DataLoader(numbered(10), 2, sampler=[9, 0, 9, 4, 1], drop_last=True)
    assert order_of(loader) == [9, 0, 9, 4]
    assert len(loader) == 2


@pytest.mark.parametrize("wrong", [-1, 10])
def test_a_sampler_index_outside_is_refused(wrong: int) -> None:
    with pytest.raises(ConfigError, match=f"the sampler gave the index {wrong}; 0 to 9"):
        iter(DataLoader(numbered(10), 2, sampler=[0, wrong]))


# settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"^\[data\] batch_size is 0; it must be at least 1$"),
        ({"batch_size": -3}, r"^\[data\] batch_size is -3; it must be at least 1$"),
        ({"batch_size": 1.5}, r"\[data\] batch_size is 1\.5; it must be an integer at least 1"),
        ({"prefetch": -1}, r"\[data\] prefetch is -1"),
        ({"seed": 2**64}, r"\[data\] seed is 18446744073709551616; it must be from 0"),
        ({"shuffle": True, "sampler": [0]}, "shuffle is True and a sampler"),
        ({"batch_size": 11, "drop_last": True}, "no batch would be left"),
        ({"dataset": 5}, "the data set is a int"),
        ({"dataset": []}, "is empty"),
    ],
)
def test_refuses_wrong_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(**{"dataset": numbered(10), **options})  # type: ignore[arg-type]


def test_refuses_a_wrong_epoch() -> None:
    with pytest.raises(ConfigError, match="epoch is -1"):
        DataLoader(numbered(10)).set_epoch(-1)


# map-style data sets


def test_map_style_batches_hold_their_own_samples() -> None:
    first, second = DataLoader(Mapped(5), 3)
    assert first.indices.tolist() == [0, 1, 2]
    assert second.indices.tolist() == [0, 1]
    assert second.dataset.classes == 3
    x, y = second
    assert (x.shape, x.dtype) == ((2, 1, 2, 2), np.float32)
    assert x[:, 0, 0, 0].tolist() == [3.0, 4.0]
    assert y.tolist() == [0, 1]


def test_map_style_accepts_a_list_of_pairs() -> None:
    pairs = [([[0.5, 1.0]], np.int64(4)), ([[1.5, 2.0]], np.int64(2))]
    (batch,) = DataLoader(pairs, 8)
    x, y = batch
    assert x.shape == (2, 1, 1, 2)
    assert y.tolist() == [4, 2]
    assert batch.dataset.classes == 5


class Listed(list):  # type: ignore[type-arg]
    """A list of pairs with class names, as torchvision's data sets have them."""

    classes = ("zero", "one")


IMAGE = np.zeros((1, 2, 2), np.float32)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((IMAGE, 2), r"label 2 of sample 3; 0 to 1 are allowed"),
        ((IMAGE, -1), r"label -1 of sample 3; 0 to 1 are allowed"),
        (
            (IMAGE, 0.5),
            r"the target of sample 3 is float32 \(\), an earlier one is int64 \(\); all samples "
            r"must",
        ),
        (
            (IMAGE, "two"),
            r"the target of sample 3 has a part that is a str \(of <U3\); arrays of numbers, "
            r"numbers, and tu",
        ),
        ((IMAGE,), r"sample 3 is tuple \(ndarray\); \(sample, target\) expected"),
        (
            {"image": IMAGE, "label": 0},
            r"sample 3 is a dict with 'image', 'label'; .* with data\.columns",
        ),
        (IMAGE[0, 0, 0], r"sample 3 is float32"),
        (
            (IMAGE[:, :1], 0),
            r"sample 3 is float32 \(1, 1, 2\), an earlier one is float32 \(1, 2, 2\)",
        ),
        ((IMAGE.astype(np.uint8), 0), r"sample 3 is uint8"),
        ((IMAGE + np.nan, 0), r"Listed: sample 3 holds NaN or infinity; clean it"),
    ],
)
def test_unsuitable_samples_are_refused(sample: object, message: str, prefetch: int) -> None:
    data = Listed([(IMAGE, 0), (IMAGE, 1), (IMAGE, 0), sample])
    with pytest.raises(DataError, match=message):
        list(DataLoader(data, 4, prefetch=prefetch))


def test_unsuitable_classes_attribute() -> None:
    data = Mapped(3)
    data.classes = "three"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="classes of Mapped is 'three'; it must be an integer"):
        DataLoader(data)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_data_sets_own_exception_comes_through_after_the_good_batches(prefetch: int) -> None:
    seen = []
    with pytest.raises(KeyError, match="sample 7 is broken"):
        for batch in DataLoader(Mapped(12, fail_at=7), 3, prefetch=prefetch):
            seen.append(batch.index)
    assert seen == [0, 1]
    assert wait_until(lambda: not prefetch_threads())


# the thread


@pytest.mark.parametrize("prefetch", [1, 3])
def test_runs_ahead_by_no_more_than_prefetch(prefetch: int) -> None:
    data = Mapped(100)
    batches = iter(DataLoader(data, 2, prefetch=prefetch))
    next(batches)
    ahead = 2 * (1 + prefetch)
    assert wait_until(lambda: len(data.asked) == ahead)
    time.sleep(0.05)
    assert len(data.asked) == ahead


def test_without_prefetch_there_is_no_thread() -> None:
    data = Mapped(10)
    before = set(threading.enumerate())
    batches = iter(DataLoader(data, 2, True, prefetch=0))
    next(batches)
    assert set(threading.enumerate()) <= before
    assert len(data.asked) == 2


def test_the_thread_ends_with_the_epoch() -> None:
    assert len(list(DataLoader(Mapped(10), 2))) == 5
    assert wait_until(lambda: not prefetch_threads())


@pytest.mark.parametrize("how", ["break", "close", "collect"])
def test_an_abandoned_iteration_stops_its_thread(how: str) -> None:
    data = Mapped(1000)
    batches = iter(DataLoader(data, 2))
    next(batches)
    assert prefetch_threads()
    if how == "close":
        batches.close()  # type: ignore[attr-defined]
    elif how == "break":
        for _ in batches:
            break
    del batches
    gc.collect()
    assert wait_until(lambda: not prefetch_threads())
    assert len(data.asked) <= 2 * 5


def test_closing_does_not_wait_for_a_slow_sample() -> None:
    gate = threading.Event()
    gate.set()
    data = Mapped(1000, gate=gate)
    batches = iter(DataLoader(data, 2, prefetch=2))
    next(batches)
    assert wait_until(lambda: len(data.asked) == 6)
    gate.clear()
    next(batches)
    assert wait_until(lambda: len(data.asked) == 7)
    batches.close()  # type: ignore[attr-defined]
    assert prefetch_threads()  # it waits in the sample still
    gate.set()
    assert wait_until(lambda: not prefetch_threads())
    assert len(data.asked) == 7


def test_the_consumer_does_not_wait_for_the_next_epochs_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def recorded(n: int, seed: int, epoch: int) -> np.ndarray:
        threads.append(threading.current_thread().name)
        return permutation(n, seed, epoch)

    monkeypatch.setattr("odyssey.data.loader.permutation", recorded)
    loader = DataLoader(numbered(30), 8, True)
    for _ in range(3):
        list(loader)
    assert wait_until(lambda: len(threads) == 4)
    assert set(threads[1:]) == {"odyssey-order"}  # the first one nobody could begin before


def test_the_page_s_data_set_repeats_itself():
    """docs/determinism.md: samples that are a function of (seed, epoch, sample index)."""
    page = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text()
    code = page.split("### Samples that are drawn")[1].split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(code, names)
    images = np.arange(40 * 4, dtype=np.float32).reshape(40, 1, 2, 2)
    a, b = (
        DataLoader(names["Flipped"](images, np.arange(40) % 10), 8, True, seed=3) for _ in range(2)
    )
    epochs = [[next(iter(batch)) for batch in a] for _ in range(3)]
    b.start_at(2, 1)
    assert all(np.array_equal(x, next(iter(y))) for x, y in zip(epochs[2][1:], b, strict=True))
    b.set_epoch(0)
    assert all(np.array_equal(x, next(iter(y))) for x, y in zip(epochs[0], b, strict=True))
    flips = [{x.tobytes() for x in np.concatenate(e)} for e in epochs]
    assert flips[0] != flips[1]
