"""Random draws of a data set: a function of (seed, epoch, sample), whatever else is read, and by
whom.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest

if (
    not hasattr(importlib.util.find_spec("torch"), "origin")
    or importlib.util.find_spec("torch").origin is None
):
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from pytorch.worker_data import Scaled, set_factor, set_generator

from odyssey.core.random_scopes import seed_of
from odyssey.errors import DataError
from odyssey.torch import DataLoader

DRAWS = {
    "torch": lambda: torch.randn(()).item(),
    "torch, one of a pair": lambda: torch.randn((1,), dtype=torch.float64).item(),
    "numpy": np.random.standard_normal,
    "numpy's integers": lambda: float(np.random.randint(1 << 30)),
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
}


class Sometimes(torch.utils.data.Dataset):
    """Samples of which those of `kinds` draw once or more, each by a generator of its own kind."""

    def __init__(self, kinds: dict[int, tuple[str, int]], samples: int) -> None:
        self.kinds, self.samples = kinds, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        kind, times = self.kinds.get(i, ("", 0))
        return torch.tensor(
            [DRAWS[kind]() for _ in range(times)] + [0.0] * (3 - times), dtype=torch.float64
        ), i


def expected(dataset: Sometimes, seed: int, epoch: int, i: int) -> torch.Tensor:
    number = seed_of(seed, epoch, i)
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)
    return dataset[i][0]


def states() -> list[Any]:
    one, two, own = torch.get_rng_state(), np.random.get_state(), random.getstate()
    return [one.tolist(), two[0], two[1].tolist(), *two[2:], own]


@pytest.mark.parametrize("case", range(30))
def test_a_samples_draws_depend_on_nothing_else(case):
    r = random.Random(case)
    samples, seed = r.randint(1, 60), r.randrange(1 << 40)
    share = r.choice([0, 0.02, 0.1, 0.5, 1])
    kinds = {i: (r.choice([*DRAWS]), r.randint(1, 3)) for i in range(samples) if r.random() < share}
    dataset = Sometimes(kinds, samples)
    workers = (
        {"num_workers": r.choice([1, 2]), "persistent_workers": r.random() < 0.5}
        if case % 10 == 0
        else {}
    )
    loader = DataLoader(
        dataset, r.randint(1, 40), r.random() < 0.7, seed, shard_size=r.randint(1, 9), **workers
    )
    torch.manual_seed(case)
    random.seed(case)
    np.random.seed(case)
    for _ in range(r.randint(0, 3)):  # an odd number leaves half of a pair
        np.random.standard_normal(), random.gauss(0, 1)
    found: dict[tuple[int, int], torch.Tensor] = {}
    before = states()
    for epoch in range(3):
        for batch in loader:
            assert workers or states() == before
            for x, i in batch.dataset.shards.values():
                found.update({(epoch, int(k)): row for k, row in zip(i, x, strict=True)})
            if r.random() < 0.3 and not workers:  # the program draws as well
                np.random.standard_normal(), random.gauss(0, 1), torch.randn(())
                before = states()
    assert states() == before
    assert len(found) == 3 * samples
    for (epoch, i), row in found.items():
        assert torch.equal(row, expected(dataset, seed, epoch, i)), (epoch, i, kinds.get(i))


def test_generators_of_other_kinds_and_after_an_error():
    class Breaks(Sometimes):
        def __getitem__(self, i: int) -> Any:
            if i == 5:
                np.random.rand(), random.random(), torch.rand(1)
                raise KeyError(i)
            return super().__getitem__(i)

    twister = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.Philox(3))
        loader = DataLoader(Breaks({3: ("numpy", 1)}, 8), 4, shard_size=2)
        kept = (
            repr(np.random.get_state(legacy=False)),
            torch.get_rng_state().tolist(),
            random.getstate(),
        )
        with pytest.raises(KeyError):
            list(loader)
        assert kept == (
            repr(np.random.get_state(legacy=False)),
            torch.get_rng_state().tolist(),
            random.getstate(),
        )
    finally:
        np.random.set_bit_generator(twister)


def test_a_data_set_that_does_not_draw_is_read_once():
    class Counted(Sometimes):
        read: list[int] = []

        def __getitem__(self, i: int) -> Any:
            self.read.append(i)
            return super().__getitem__(i)

    list(DataLoader(dataset := Counted({}, 20), 8, shard_size=4))
    assert dataset.read == list(range(20))


def test_tables_are_read_as_they_would_be_collated():
    g = torch.Generator().manual_seed(0)
    tensors = (
        torch.randn(40, 2, 3, 4, generator=g).permute(0, 3, 1, 2),
        torch.arange(40).bool(),
        torch.arange(40),
    )
    table = torch.utils.data.TensorDataset(*tensors)
    part = torch.utils.data.Subset(
        torch.utils.data.Subset(table, range(3, 40, 2)), [5, 2, 2, 9, -1]
    )
    for dataset in (table, part):
        fast = DataLoader(dataset, 7, True, shard_size=3)
        plain = DataLoader(
            dataset, 7, True, shard_size=3, collate_fn=torch.utils.data.default_collate
        )
        for _ in range(2):
            for a, b in zip(fast, plain, strict=True):
                for s, shard in b.dataset.shards.items():
                    for one, two in zip(a.dataset.shards[s], shard, strict=True):
                        assert (
                            torch.equal(one, two)
                            and one.dtype == two.dtype
                            and one.stride() == two.stride()
                        )
                        assert type(a.dataset.shards[s]) is type(shard)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_init_fn_changes_the_data_set_of_the_user(context):
    loader = DataLoader(
        Scaled(), 4, num_workers=1, worker_init_fn=set_factor, multiprocessing_context=context
    )
    read = [batch.dataset.shard(0, 4)[0][:, 0].tolist() for batch in loader]
    assert read == [[0.0, 3.0, 6.0, 9.0], [12.0, 15.0, 18.0, 21.0]]


def test_a_generator_for_each_worker_raises_an_error():
    loader = DataLoader(Scaled(), 4, num_workers=2, worker_init_fn=set_generator)
    with pytest.raises(DataError, match="^.data. worker_init_fn gives the data set") as caught:
        list(loader)
    assert "\n" not in str(caught.value)
