"""What a training does about a NaN, and how a flipped bit in one replica's weights is found."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey.errors import NumericsError
from odyssey.train.trainer import DistributedTrainer

POISON = 70  # the sample whose sums overflow


def poisoned() -> data.DataLoader:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(160, 1, 6, 6)).astype(np.float32)
    x[POISON] = 3e38
    return data.DataLoader(data.arrays(x, draw.integers(0, 4, 160)), batch_size=32)


def trainer(nonfinite: str) -> DistributedTrainer:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    for p in layers.parameters():
        p.data[...] *= 20
    return DistributedTrainer(
        layers, optim.SGD(lr=0.05, momentum=0.9), shard_size=8, nonfinite=nonfinite
    )


def test_stop_changes_nothing(tmp_path):
    t = trainer("stop")
    with pytest.raises(NumericsError, match=r"not finite at step 3 \(epoch 1, batch 3"):
        t.fit(poisoned(), epochs=2, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert t.steps == 2
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]


def test_skip_counts_the_step_and_goes_on(capfd):
    t = trainer("skip")
    history = t.fit(poisoned(), epochs=2)
    assert (history.steps, t.steps) == (10, 10)
    assert np.isfinite(history.train_loss)
    assert capfd.readouterr().err.count("the step is skipped") == 2


def test_skip_and_rollback_without_loss_of_steps_give_the_same_weights(tmp_path):
    """With a checkpoint of the step before, going back and leaving the batch out is skipping."""
    skip, back = trainer("skip"), trainer("rollback")
    for a, b in zip(skip.arena.named, back.arena.named, strict=True):
        b[1].data[...] = a[1].data
    skip.fit(poisoned(), epochs=2)
    history = back.fit(poisoned(), epochs=2, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert back.weights_sha256() == skip.weights_sha256()
    assert history.steps == 10


def test_rollback_takes_the_steps_since_the_checkpoint_again(tmp_path, capfd):
    skip, back = trainer("skip"), trainer("rollback")
    for a, b in zip(skip.arena.named, back.arena.named, strict=True):
        b[1].data[...] = a[1].data
    skip.fit(poisoned(), epochs=2)
    back.fit(poisoned(), epochs=2, checkpoint_dir=tmp_path, checkpoint_every=2)
    assert "going back to step 2 and leaving this batch out" in capfd.readouterr().err
    assert back.weights_sha256() == skip.weights_sha256()


def test_an_epoch_whose_only_batch_is_left_out_has_no_samples(tmp_path):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(32, 1, 6, 6)).astype(np.float32)
    good, bad = (x, np.arange(32) % 4), (np.full_like(x, 3e38), np.arange(32) % 4)

    class Epochs:
        number = 0

        def __iter__(self):
            self.number += 1
            yield good if self.number == 1 else bad

    t = trainer("rollback")
    history = t.fit(Epochs(), epochs=2, checkpoint_dir=tmp_path)
    assert (t.steps, history.samples, [np.isfinite(r["train_loss"]) for r in history.records]) == (
        2,
        32,
        [True, False],
    )


def test_rollback_needs_a_checkpoint():
    with pytest.raises(NumericsError, match="no checkpoint to go back to"):
        trainer("rollback").fit(poisoned())


SCRIPT = """
import numpy as np
from odyssey import comm, data, nn, optim
from odyssey.train.trainer import DistributedTrainer

world = comm.world()
draw = np.random.default_rng(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
trainer = DistributedTrainer(
    model, optim.SGD(lr=0.05), shard_size=8, check_every=3, comm=world, threads=1
)
take = trainer.train_step


def train_step(batch):
    result = take(batch)
    if trainer.steps == 4 and world.rank == 1:
        trainer.arena.params.view(np.uint32)[17] ^= 1 << 12
    return result


trainer.train_step = train_step
x = draw.normal(size=(320, 1, 6, 6)).astype(np.float32)
trainer.fit(data.DataLoader(data.arrays(x, draw.integers(0, 4, 320)), batch_size=32))
"""


def test_a_flipped_weight_is_found_and_its_rank_named(launch):
    script = launch.folder / "flip.py"
    script.write_text(SCRIPT)
    done = launch.python(script, ranks=3)
    assert done.returncode != 0
    assert "step 6: the weights of rank 1 differ from those of ranks 0, 2" in done.stderr
