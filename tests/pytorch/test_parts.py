"""Checkpoints of a torch module whose optimizer's state ranks have in parts (zero=1): any number
of ranks goes on.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey.comm import mock

torch = pytest.importorskip("torch")

import odyssey.torch as ot  # noqa: E402

X = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32)


def trained(comm, folder, zero: int, load: bool) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))
    made = ot.DistributedTrainer(
        net, torch.optim.Adam(net.parameters(), lr=0.01), comm=comm, zero=zero, shard_size=4
    )
    if load:
        made.load_checkpoint(folder)
    made.fit([(X, np.arange(24) % 3)] * 3, verbose=False)
    if not load:
        made.save_checkpoint(folder)
    return made.named_state()


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_writes_its_part_and_any_number_goes_on(tmp_path, ranks):
    mock.run(ranks, trained, tmp_path, 1, False)
    (path,) = tmp_path.glob("step_*")
    assert sorted(p.stem for p in path.iterdir()) == [
        "manifest",
        *(f"rank-{r:05}" for r in range(ranks)),
    ]
    (one,) = mock.run(1, trained, tmp_path, 0, True)
    for others, zero in ((2, 1), (3, 1), (2, 0)):
        for found in mock.run(others, trained, tmp_path, zero, True):
            assert found.keys() == one.keys() and all(
                np.array_equal(found[name], one[name]) for name in one
            )
