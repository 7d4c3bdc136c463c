"""The default shard size: a function of the first global batch and of the rows of a sample, the
same on any layout.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey.comm import mock
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.plan import default_shard_size, idle
from odyssey.train.trainer import DistributedTrainer

RNG = np.random.default_rng(0)
CONTEXT = 64
IDS = RNG.integers(0, 29, (60, CONTEXT + 1)).astype(np.int32)
TEXTS = data.arrays(IDS[:, :-1].copy(), IDS[:, 1:].copy())
IMAGES = data.arrays(
    RNG.standard_normal((60, 1, 28, 28)).astype(np.float32), RNG.integers(0, 10, 60)
)


class Listed:
    """The same samples, one at a time: their form is known when a batch has been read."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, i):
        return IDS[i, :-1], IDS[i, 1:]


def made(comm, name="gpt", **settings):
    sizes = (
        {"vocab_size": 29, "context": CONTEXT, "layers": 2, "heads": 2, "width": 16}
        if name == "gpt"
        else {}
    )
    model = nn.models.build(name, seed=3, **sizes)
    return DistributedTrainer(
        model, optim.AdamW(lr=1e-2), comm=comm, device="cpu", **{"threads": 1, **settings}
    )


def fitted(comm, batch, samples=TEXTS, settings=None, name="gpt", **fit):
    trainer = made(comm, name, **(settings or {}))
    trainer.fit(data.DataLoader(samples, batch_size=batch), **{"steps": 2, **fit})
    return trainer.shard_size, trainer.weights_sha256()


def test_the_rule():
    assert [default_shard_size(n, 256) for n in (1, 7, 8, 9, 16, 17, 32, 64, 1000)] == [
        1,
        1,
        1,
        2,
        2,
        3,
        4,
        4,
        4,
    ]
    assert [default_shard_size(64, rows) for rows in (2, 64, 128, 1024, 5000)] == [8, 8, 8, 1, 1]
    assert all(
        idle(8, 8 * k, default_shard_size(8 * k, rows)) == 0
        for k in range(1, 20)
        for rows in (2, 64, 256, 9999)
    )
    assert [default_shard_size(n, 1) for n in (8, 32, 128)] == [32, 16, 32]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {"threads": 3}), (8, {}), (2, {"zero": 3}), (2, {"mesh": Mesh(tp=2)}), (2, {"mesh": Mesh(pp=2)}),
     (1, {"execution": "eager"}), (1, {"num_gpus": 2}), (3, {"reduction": "hierarchical", "ranks_per_node": 2})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("batch", [8, 20])
def test_it_is_the_same_on_any_layout(ranks, settings, batch, capfd):
    one = mock.run(1, fitted, batch)[0]
    assert one[0] == -(-batch // 8)
    assert mock.run(ranks, fitted, batch, TEXTS, settings) == [one] * ranks
    assert ("idle" in capfd.readouterr().err) == (batch == 20 and ranks == 8)  # seven shards


def test_samples_one_at_a_time_and_loops_of_ones_own():
    def loop(comm):
        trainer = made(comm)
        for step, batch in enumerate(data.DataLoader(TEXTS, batch_size=20)):
            if step < 2:
                trainer.train_step(batch)
        return trainer.shard_size, trainer.weights_sha256()

    one = mock.run(1, fitted, 20)[0]
    assert mock.run(2, fitted, 20, Listed()) == [one] * 2
    assert mock.run(2, loop) == [one] * 2
    accumulated = mock.run(2, fitted, 10, TEXTS, {"accumulation_steps": 2})
    assert accumulated == [one] * 2


def test_it_does_not_go_by_precision():
    sizes = [
        mock.run(1, fitted, 8, TEXTS, {"precision": p})[0][0] for p in ("fp32", "bf16", "fp16")
    ]
    assert sizes == [1] * 3


def test_images_keep_theirs():
    assert mock.run(2, fitted, 32, IMAGES, {}, "lenet5")[0][0] == 16
    assert mock.run(1, fitted, 8, IMAGES, {}, "lenet5")[0][0] == 32


def test_a_rank_whose_model_records_something_else_takes_rank_0s():
    def sizes(comm):
        trainer = made(comm)
        if comm.rank:
            trainer.stepper.engine.programs.rows = lambda form: 1 / 0
        return trainer.stepper.rows_of_sample(TEXTS.form)

    assert mock.run(3, sizes) == [CONTEXT] * 3


def test_a_resume_keeps_it(tmp_path):
    def steps(comm, number, **fit):
        return fitted(comm, 20, steps=number, epochs=2, **fit)

    whole = mock.run(1, steps, 4)[0]
    mock.run(2, lambda comm: steps(comm, 2, checkpoint_dir=tmp_path))
    found = mock.run(3, lambda comm: steps(comm, 4, checkpoint_dir=tmp_path))
    assert found == [whole] * 3


def test_a_checkpoint_of_before_the_first_step_leaves_it_to_the_first_batch():
    def size(comm):
        first, second = made(comm), made(comm)
        second.load(first.state({}), "a checkpoint")
        second.train_step(next(iter(data.DataLoader(TEXTS, batch_size=20))))
        return second.shard_size

    assert mock.run(1, size) == [3]


@pytest.mark.parametrize(("batch", "ranks", "size"), [(20, 8, 2), (9, 8, 1), (5, 8, None)])
def test_the_line_about_idle_workers_says_what_to_set(batch, ranks, size, capfd):
    mock.run(ranks, fitted, batch)
    line = next(line for line in capfd.readouterr().err.splitlines() if "idle" in line)
    if size is None:
        assert f"each has one with a global batch of at least {ranks} and a shard size of 1" in line
        return
    assert f"each has one with a shard size of {size} (shard_size, --shard-size)" in line
    mock.run(ranks, fitted, batch, TEXTS, {"shard_size": size})
    assert "idle" not in capfd.readouterr().err
