"""Random data sets, batch sizes, ranks, workers and transforms against a plain loop: same
samples, order and bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import data
from odyssey.data import transforms
from odyssey.data.nested import leaves, mapped
from odyssey.data.reader import array

sys.path.insert(0, str(Path(__file__).parent))
import own_data  # noqa: E402

IMAGES = ("image", "bytes", "memory")
CASES = 40


def plain(leaf) -> np.ndarray:
    return array(leaf, "")


def drawn(case: int) -> dict:
    draw = np.random.default_rng([19, case])
    kind = str(
        draw.choice(["image", "bytes", "regression", "ids", "tree", "memory", "memory tree"])
    )
    chosen = []
    for _ in range(int(draw.integers(0, 3))):
        size = int(draw.integers(1, 6))
        names = ["noise", "crop", "flip", "cutout", "normalize"] if kind in IMAGES else ["noise"]
        made = {
            "noise": own_data.noise,
            "crop": transforms.RandomCrop((5, size), padding=2, fill=0.25),
            "flip": transforms.HorizontalFlip(0.4),
            "cutout": transforms.Cutout(2, fill=0.5, p=0.7),
            "normalize": transforms.Normalize([0.5, 1.0], 2.0),
        }
        chosen.append(made[str(draw.choice(names))])
    if kind in IMAGES and draw.random() < 0.2:
        chosen.append(transforms.Mixup(0.4))
    return {
        "kind": kind,
        "n": int(draw.integers(1, 60)),
        "size": int(draw.integers(1, 25)),
        "seed": int(draw.integers(0, 2**63)),
        "shuffle": bool(draw.random() < 0.7),
        "drop": bool(draw.random() < 0.3),
        "draws": bool(draw.random() < 0.3),
        "pieces": int(draw.choice([1, 1, 2])),
        "join": int(draw.choice([1, 1, 3])),
        "prefetch": int(draw.choice([0, 1, 2])),
        "transform": chosen,
        "first": int(draw.integers(0, 3)),
        "draw": draw,
    }


def data_set(case: dict):
    made = own_data.Made(
        case["kind"].replace("memory tree", "tree").replace("memory", "image"),
        case["n"],
        3,
        case["draws"],
    )
    if not case["kind"].startswith("memory"):
        return made
    made.set_epoch(0)
    pairs = [made[i] for i in range(len(made))]
    x, y = (
        mapped(lambda *a: np.stack(a), *(mapped(np.asarray, p[k]) for p in pairs)) for k in (0, 1)
    )
    return data.arrays(x, y, classes=3) if case["kind"] == "memory" else data.arrays(x, y)


def one_sample(case: dict, dataset, epoch: int, number: int, count: int):
    """Sample `number` after the first `count` transforms, alone: what the documentation says, in
    a plain way.
    """
    if count == 0:
        if hasattr(dataset, "gather"):
            return tuple(mapped(lambda a: a[0], t) for t in dataset.gather(np.array([number])))
        dataset.set_epoch(epoch)
        x, y = (mapped(plain, t) for t in dataset[number])
        return (x.astype(np.float32) if case["transform"] and case["kind"] == "bytes" else x), y
    x, y = one_sample(case, dataset, epoch, number, count - 1)
    transform, draw = (
        case["transform"][count - 1],
        transforms.Draw(case["seed"], epoch, np.array([number]), count - 1),
    )
    if isinstance(transform, transforms.Mixup):
        other = int(transform.partners(draw, len(dataset))[0])
        a, b = one_sample(case, dataset, epoch, other, count - 1)
        m = np.float32(draw.generator(0).beta(0.4, 0.4))
        eye = np.eye(3, dtype=np.float32)
        x, a = np.asarray(x, np.float32), np.asarray(a, np.float32)
        return m * x + (1 - m) * a, m * eye[int(y)] + (1 - m) * eye[int(b)]
    if isinstance(transform, transforms.Vectorized):
        return transform.batch(x[None], draw)[0], y
    key = np.array([case["seed"], epoch], np.uint64)
    counter = np.array([0, 0, number, count - 1], np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return mapped(plain, transform(x, rng)), y


def expected(case: dict, epoch: int) -> list[tuple[np.ndarray, list]]:
    """(numbers, samples) of every batch of an epoch."""
    dataset, n, size = data_set(case), case["n"], case["size"]
    order = data.permutation(n, case["seed"], epoch) if case["shuffle"] else np.arange(n)
    batches = [
        order[at : at + size] for at in range(0, n // size * size if case["drop"] else n, size)
    ]
    k, j = case["pieces"], case["join"]
    batches = [b[len(b) * i // k : len(b) * (i + 1) // k] for b in batches for i in range(k)]
    batches = [np.concatenate(batches[at : at + j]) for at in range(0, len(batches), j)]
    count = len(case["transform"])
    return [(b, [one_sample(case, dataset, epoch, int(i), count) for i in b]) for b in batches]


def same(batch, numbers, samples, lo: int = 0) -> None:
    found = [leaf for t in batch for leaf in leaves(t)]
    wanted = [leaves(x) + leaves(y) for x, y in samples]
    for at, leaf in enumerate(found):
        for i in range(len(samples)):
            assert (
                leaf[i].astype(np.float64).tobytes()
                == np.asarray(wanted[i][at], np.float64).tobytes()
            )
            assert leaf[i].shape == np.shape(wanted[i][at])
    own = batch.indices if batch.numbers is None else batch.numbers
    np.testing.assert_array_equal(own, numbers)


def loader_of(case: dict, **more) -> data.DataLoader | None:
    if case["drop"] and case["n"] < case["size"]:
        return None
    options = {
        "seed": case["seed"],
        "drop_last": case["drop"],
        "prefetch": case["prefetch"],
        **more,
    }
    transform = case["transform"] or None
    return data.DataLoader(
        data_set(case), case["size"], case["shuffle"], transform=transform, **options
    )


def share(n: int, parts: int, i: int) -> tuple[int, int]:
    lo, hi = n * i // parts, n * (i + 1) // parts
    return (lo, hi) if hi > lo else (0, min(n, 1))


@pytest.mark.parametrize("number", range(CASES))
def test_against_a_plain_loop(number):
    case = drawn(number)
    loader = loader_of(case)
    if loader is None:
        return
    for epoch in range(2):
        want = expected(case, epoch)
        got = list(loader.steps(pieces=case["pieces"], join=case["join"]))
        assert len(got) == len(want)
        for batch, (numbers, samples) in zip(got, want, strict=True):
            if len(numbers):
                same(batch, numbers, samples)
    if case["pieces"] == 1:
        again = loader.read_again(1, 0, case["join"])
        same(again, *want[0])
        assert loader.next_epoch == 2
        first = min(case["first"], len(loader) - 1) // case["join"] * case["join"]
        loader.start_at(1, first)
        for batch, (numbers, samples) in zip(
            loader.steps(join=case["join"]), want[first // case["join"] :], strict=True
        ):
            same(batch, numbers, samples)


@pytest.mark.parametrize("number", range(CASES))
def test_each_rank_reads_its_own(number):
    case = drawn(number)
    case["pieces"] = 1
    ranks = int(case["draw"].integers(2, 5))
    want = expected(case, 0)
    for rank in range(ranks):
        loader = loader_of(case)
        if loader is None:
            return
        for batch, (numbers, samples) in zip(
            loader.steps(join=case["join"], part=lambda n, rank=rank: share(n, ranks, rank)),
            want,
            strict=True,
        ):
            lo, hi = share(len(numbers), ranks, rank)
            assert len(batch) == len(batch.indices) == len(numbers)
            own = batch.dataset.gather(batch.indices[lo:hi])
            np.testing.assert_array_equal(batch.numbers if batch.run else numbers, numbers)
            if not loader.in_memory:
                assert len(batch.dataset) == hi - lo
            found = [leaves(t) for t in own]
            for i, (x, y) in enumerate(samples[lo:hi]):
                for own_leaves, wanted in zip(found, (x, y), strict=True):
                    for leaf, value in zip(own_leaves, leaves(wanted), strict=True):
                        assert (
                            leaf[i].astype(np.float64).tobytes()
                            == np.asarray(value, np.float64).tobytes()
                        )
            same(batch.whole(), numbers, samples)


@pytest.mark.parametrize(
    "make",
    [
        lambda: transforms.RandomCrop(padding=2),
        transforms.HorizontalFlip,
        lambda: transforms.Cutout(3),
    ],
)
def test_grey_pictures_without_a_channel_are_transformed_like_those_with_one(make):
    grey, draw = (
        np.random.default_rng(3).random((5, 7, 6), np.float32),
        transforms.Draw(1, 2, np.arange(5), 0),
    )
    found = make().batch(grey, draw)
    assert found.shape == (5, 1, 7, 6)
    np.testing.assert_array_equal(found, make().batch(grey[:, None], draw))
    assert (found[:, 0] != grey).any()
