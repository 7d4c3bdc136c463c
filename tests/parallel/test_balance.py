"""Shards that move from rank to rank between steps: who gets how many, and that no bit changes
wherever they go.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey.base import slot
from odyssey.comm import base, mock
from odyssey.errors import ConfigError
from odyssey.parallel import balance, plan
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
import cases

MNIST = data.load("mnist", train=True)


def test_counts_end_as_early_as_any():
    rng = np.random.default_rng(3)
    for _ in range(60):
        ranks, shards = int(rng.integers(1, 4)), int(rng.integers(0, 9))
        costs = tuple((float(rng.uniform(0.5, 4)), int(rng.integers(1, 4))) for _ in range(ranks))
        given = balance.counts(shards, costs)
        assert sum(given) == shards and (shards < ranks or min(given) > 0)
        every = (c for c in itertools.product(range(shards + 1), repeat=ranks) if sum(c) == shards)
        best = min(balance.span(c, costs) for c in every if shards < ranks or min(c) > 0)
        assert balance.span(given, costs) <= best * (1 + 1e-12)
    assert balance.counts(9, ()) == ()


def test_runs_follow_each_other_and_plans_add_all_shards():
    rng = np.random.default_rng(4)
    for _ in range(80):
        ranks, workers, threads = (int(rng.integers(1, n)) for n in (6, 4, 5))
        counts = tuple(int(n) for n in rng.integers(0, 5, ranks))
        shards = sum(counts)
        runs = plan.runs(shards, ranks, workers, counts)
        assert [a for a, _ in runs] == [0, *(b for _, b in runs[:-1])] and runs[-1][1] == shards
        plans = [plan.make(shards, r, ranks, workers, threads, counts) for r in range(ranks)]
        assert tuple(p.run[1] - p.run[0] for p in plans) == counts
        handed = plan.exchange(shards, ranks, workers, 64, counts=counts).nodes
        assert [tuple(node for node, _ in p.partial) for p in plans] == list(handed)
        if shards:
            assert plan.combine(tuple(itertools.chain(*handed)), shards)[1][0][0] == (0, shards)


class Read:
    """Samples that are read one by one, by each rank its own."""

    classes = 10

    def __len__(self):
        return 150

    def __getitem__(self, i):
        return MNIST.images[i], int(MNIST.labels[i])


def trained(comm, folder, settings, steps=None, moved=True):
    nn.manual_seed(1)
    trainer = DistributedTrainer(
        nn.Sequential(
            nn.Flatten(), nn.Linear(784, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 10)
        ),
        optim.Adam(),
        comm=comm,
        **{"threads": 1, "shard_size": 4, "device": "cpu", "check_every": 3, **settings},
    )
    if moved and comm.size > 1:
        trainer.layout.balance = cases.Anywhere(comm, 1, trainer.layout.balance.members)
    loader = data.DataLoader(
        Read(), batch_size=34, shuffle=True, transform=data.transforms.RandomCrop(padding=2)
    )
    seen = []
    take = trainer.take_step
    trainer.take_step = lambda batch: (seen.append(batch.numbers.tolist()), take(batch))[1]
    history = trainer.fit(loader, MNIST.take(30), epochs=3, steps=steps, checkpoint_dir=folder)
    weights = {k: v.tobytes() for k, v in trainer.state_dict().items()}
    state = {
        k: np.asarray(v).tobytes() for k, v in trainer.training_state.optimizer_state().items()
    }
    said = [(r["train_loss"], r["test_loss"]) for r in history.records]
    return weights, state, said, seen


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (3, {"bucket_size_mb": 1e-4}),
        (3, {"num_gpus": 2, "threads": 3}),
        (2, {"execution": "eager", "accumulation_steps": 2}),
        (3, {"zero": 1}),
        (2, {"zero": 2, "bucket_size_mb": 1e-4}),
        (3, {"zero": 3, "reduction": "hierarchical", "ranks_per_node": 2}),
        (3, {"reduction": "parameter_server", "servers": 2}),
        (4, {"mesh": Mesh(dp=2, pp=2)}),
        (6, {"mesh": Mesh(dp=3, pp=2), "zero": 1, "pipeline_schedule": "gpipe"}),
        (
            4,
            {
                "mesh": Mesh(dp=2, tp=2),
                "reduction": "hierarchical",
                "ranks_per_node": 2,
                "shard_size": 16,
            },
        ),
    ],
    ids=str,
)
def test_any_assignment_has_the_bits_and_the_order_of_one_process(tmp_path, ranks, settings):
    alone = {k: v for k, v in settings.items() if k in ("accumulation_steps", "shard_size")}
    one = mock.run(1, trained, tmp_path / "one", alone)[0]
    for got in mock.run(ranks, trained, tmp_path / "many", {**settings, "rebalance": True}):
        assert got == one
    mock.run(ranks, trained, tmp_path / "again", {**settings, "rebalance": True}, 6)
    for *got, seen in mock.run(2, trained, tmp_path / "again", {**alone, "rebalance": True}):
        # the trainer's attribute take_step has the list, so a checkpoint has it too
        assert got == list(one[:3]) and seen == one[3]


def test_ranks_agree_and_move_shards_from_who_is_slow(monkeypatch):
    """Times as given: rank 1 takes twice as long until step 40, then rank 0."""
    spent = [0.0, 0.0]
    moves = mock.run(2, _moves, monkeypatch, spent)
    assert moves[0] == moves[1]
    found = [counts for counts, line in moves[0] if line]
    assert found[0] in ((5, 3), (6, 2)) and found[-1] in ((3, 5), (2, 6)) and len(found) <= 3
    assert "[rebalance] a shard takes rank 1 2.0x as long" in next(
        line for _, line in moves[0] if line
    )


def test_a_pipeline_is_as_slow_as_its_slowest_stage(monkeypatch):
    """Rank 3, the second stage of the second of two replicas, takes twice as long as the others."""
    spent = [0.0] * 4
    moves = mock.run(4, _moves, monkeypatch, spent, 2)
    assert moves[0] == moves[1] == moves[2] == moves[3]
    found = [(counts, line) for counts, line in moves[0] if line]
    assert len(found) == 1 and found[0][0] == (6, 2)
    assert (
        "[rebalance] a shard takes ranks 2-3 2.0x as long" in found[0][1]
        and "ranks 0-1 6 instead of 4" in found[0][1]
    )


def _moves(comm, monkeypatch, spent, members=1):
    made = balance.Balance(comm, 1, members)
    monkeypatch.setattr(slot, "busy_nanoseconds", lambda: int(spent[base.here.world.rank] * 1e9))
    found = []
    for step in range(80):
        line = made.before_step(8)
        comm.barrier()
        found.append((made.counts(8), line))
        given = (made.counts(8) or (4, 4))[comm.rank // members]
        slow = (comm.rank == 1) == (step < 40) if members == 1 else comm.rank == 3
        spent[comm.rank] += given * (0.1 if slow else 0.05)
    return found


@pytest.mark.parametrize(
    ("ranks", "settings", "says"),
    [
        (2, {"mesh": Mesh(pp=2)}, "it has one replica"),
        (2, {"mesh": Mesh(tp=2)}, "it has one replica"),
        (2, {"reduction": "ring"}, "ring: bits would change"),
        (2, {"reduction": "mpi"}, "mpi: bits would change"),
        (2, {"reduction": "local_sgd"}, "local_sgd: bits would change"),
        (2, {"compression": "bf16"}, "bf16: bits would change"),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_a_line(ranks, settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        mock.run(
            ranks,
            lambda comm: DistributedTrainer(
                nn.LeNet5(), optim.SGD(), comm=comm, rebalance=True, **settings
            ),
        )
    assert "\n" not in str(error.value)
