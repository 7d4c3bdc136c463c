"""Batches with fewer shards than there are workers: the same bits as in one process, and one
line that says so.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core.tensor import Tensor
from odyssey.distributed.ddp import DistributedDataParallel
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.plan import default_shard_size, shard_count
from odyssey.train.trainer import DistributedTrainer

RNG = np.random.default_rng(0)
DATA = data.arrays(RNG.standard_normal((210, 20)).astype(np.float32), RNG.integers(0, 6, 210))


class Small(nn.Module):
    """Two layers and a dropout between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 32), nn.Linear(32, 6)

    def forward(self, x):
        return self.b(F.dropout(F.relu(self.a(x)), 0.2, self.training))


def made(comm, **settings):
    nn.manual_seed(3)
    optimizer = optim.SGD(lr=0.05, momentum=0.9)
    return DistributedTrainer(
        Small(), optimizer, comm=comm, device="cpu", **{"threads": 1, **settings}
    )


def state_of(trainer):
    optimizer = {
        k: v.tobytes() if isinstance(v, np.ndarray) else v
        for k, v in trainer.training_state.optimizer_state().items()
    }
    return trainer.weights_sha256(), optimizer


def train(comm, samples, batch, settings):
    """Everything that a rank holds after an epoch."""
    trainer = made(comm, **settings)
    loader = data.DataLoader(DATA.take(samples), batch_size=batch, shuffle=True)
    loss = trainer.fit(loader, epochs=1).train_loss
    return loss, trainer.evaluate(DATA.take(batch)), *state_of(trainer)


#: Ways to share the work that keep the bits of one process: (ranks that they need, settings).
LAYOUTS = (
    (1, {}),
    (1, {"bucket_size_mb": 1e-4}),
    *((2, {"zero": stage}) for stage in (1, 2, 3)),
    (2, {"zero": 2, "bucket_size_mb": 1e-4, "overlap": False}),
    (2, {"reduction": "parameter_server", "servers": 2}),
    (2, {"reduction": "hierarchical", "ranks_per_node": 2}),
    (2, {"mesh": Mesh(pp=2)}),
    (2, {"mesh": Mesh(tp=2)}),
    (2, {"mesh": Mesh(pp=2), "pipeline_schedule": "gpipe"}),
)


def draw(rng):
    """A batch size, samples in all, ranks and settings."""
    least, layout = rng.choice(LAYOUTS)
    # tensor parallelism refuses batches of up to four
    fewest = 5 if layout.get("mesh", Mesh()).tp else 1
    batch = rng.randint(fewest, 70)
    rest = rng.randrange(batch)
    samples = batch * rng.randint(1, 2) + (rest if rest >= fewest else 0)
    ranks = 2 * rng.randint(1, 2) if "mesh" in layout else rng.randint(least, 4)
    settings = {"num_gpus": rng.randint(1, 8), "threads": rng.randint(1, 4), **layout}
    return samples, batch, ranks, settings


@pytest.mark.parametrize("seed", range(8))
def test_any_batch_on_any_number_of_workers(seed, capfd):
    rng = random.Random(seed)
    for _ in range(8):
        samples, batch, ranks, settings = draw(rng)
        common = {"accumulation_steps": rng.choice((1, 1, 2)), "clip_norm": rng.choice((None, 0.3))}
        one = mock.run(1, train, samples, batch, common)[0]
        capfd.readouterr()
        found = mock.run(ranks, train, samples, batch, {**settings, **common})
        case = f"{samples} samples in batches of {batch} on {ranks} ranks with {settings}, {common}"
        assert found == [one] * ranks, case
        batch *= common["accumulation_steps"]
        mesh = settings.get("mesh", Mesh())
        workers, shards = (
            settings["num_gpus"] * mesh.fit(ranks, 1).dp,
            shard_count(batch, default_shard_size(batch)),
        )
        lines = [line for line in capfd.readouterr().err.splitlines() if "idle" in line]
        assert len(lines) == (workers > shards), case
        if lines:
            assert (
                f"{workers} workers but {shards} shard" in lines[0]
                and f": {workers - shards} " in lines[0]
            ), case


def repeated(ranks, samples, batch, settings):
    """What all ranks hold alike, the same twice."""
    first, again = (mock.run(ranks, train, samples, batch, settings) for _ in range(2))
    assert first == again and all(rank[2:] == first[0][2:] for rank in first)
    return first[0]


@pytest.mark.parametrize("batch", [1, 3, 16, 33])
@pytest.mark.parametrize(
    "settings",
    [{"reduction": "ring"}, {"reduction": "mpi"}, {"compression": "bf16"}, {"compression": "topk"},
     {"compression": "powersgd"}, {"reduction": "local_sgd", "local_steps": 2}],
    ids=str,
)  # fmt: skip
def test_reductions_with_bits_of_their_own(settings, batch):
    """They promise the same bits in every run on the same number of ranks, and are near one
    process at first.
    """
    found = repeated(3, 2 * batch, batch, {"num_gpus": 2, **settings})
    one = mock.run(1, train, 2 * batch, batch, {})[0]
    assert np.isfinite(found[0]) and abs(found[0] - one[0]) < 0.5


def test_an_asynchronous_server_with_batches_of_one_shard(capfd):
    settings = {"num_gpus": 3, "reduction": "async_parameter_server"}
    found = mock.run(3, train, 40, 10, settings)
    assert len({rank[2] for rank in found}) == 1 and np.isfinite(found[0][0])
    assert (
        capfd.readouterr().err.count(
            "3 workers but 1 shard (global batch 10, shard size 32): 2 are idle"
        )
        == 1
    )


def test_the_shard_size_is_a_function_of_the_global_batch():
    sizes = {n: default_shard_size(n) for n in range(1, 300)}
    assert all(shard_count(n, size) == 1 for n, size in sizes.items() if n < 32)
    assert all(size == (16 if n < 128 else 32) for n, size in sizes.items() if n >= 32)

    def sizes_of(comm):
        trainer, found = made(comm), []
        for batch, samples in ((32, 150), (128, 200), (20, 150), (128, 40)):
            trainer.fit(data.DataLoader(DATA.take(samples), batch_size=batch))
            found.append(trainer.shard_size)  # that of whole batches, whatever the last one has
        given = made(comm, shard_size=8)
        given.fit(data.DataLoader(DATA, batch_size=128))
        return [*found, given.shard_size]

    assert mock.run(1, sizes_of) == [[16, 32, 32, 32, 8]]


def test_loops_of_ones_own():
    """train_step on batches of any size: the first is the global batch, as in a loop over a
    loader.
    """

    def steps(comm, **settings):
        trainer = made(comm, **settings)
        for batch in data.DataLoader(DATA.take(101), batch_size=40):  # 40, 40, 21
            trainer.train_step(batch)
        return trainer.shard_size, *state_of(trainer)

    def fit(comm):
        trainer = made(comm)
        trainer.fit(data.DataLoader(DATA.take(101), batch_size=40))
        return trainer.shard_size, *state_of(trainer)

    one = mock.run(1, fit)[0]
    assert one[0] == 16
    assert (
        mock.run(1, steps) == [one]
        and mock.run(4, lambda comm: steps(comm, num_gpus=2)) == [one] * 4
    )


def test_a_loop_over_ddp_in_which_most_ranks_have_no_data():
    def loop(comm):
        nn.manual_seed(3)
        dist.init_process_group()
        net = DistributedDataParallel(Small().eval(), average="samples")
        x, y = DATA.gather(np.arange(2))
        mine = (
            [(x[comm.rank : comm.rank + 1], y[comm.rank : comm.rank + 1])] if comm.rank < 2 else []
        )
        for a, b in net.join(mine):
            F.cross_entropy(net(Tensor(a)), b).backward()
        dist.destroy_process_group()
        return net._arena.grads.tobytes()

    assert len(set(mock.run(4, loop))) == 1


def test_a_resume_takes_the_shard_size_of_its_checkpoint(tmp_path):
    """One that was made with --shard-size 8, or by a version with another default."""

    def part(comm, where, steps, settings):
        loader = data.DataLoader(DATA, batch_size=50, shuffle=True)
        trainer = made(comm, **settings)
        trainer.fit(loader, epochs=2, steps=steps, checkpoint_dir=where, checkpoint_every=2)
        return trainer.shard_size, *state_of(trainer)

    whole = mock.run(1, part, tmp_path / "whole", 5, {"shard_size": 8})[0]
    mock.run(2, part, tmp_path / "parts", 2, {"shard_size": 8})
    assert mock.run(3, part, tmp_path / "parts", 5, {}) == [whole] * 3 and whole[0] == 8
