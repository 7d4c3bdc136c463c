"""Data sets and samplers whose length goes by the epoch: every epoch has its own length, also
after a resume.
"""

from __future__ import annotations

import pytest
from resume.growing import LENGTHS, Everything, Growing, GrowingSampler

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.comm import mock

BATCH = 8


def make_loader(kind):
    if kind == "sampler":
        return data.DataLoader(Everything(), BATCH, sampler=GrowingSampler())
    return data.DataLoader(
        Growing(),
        BATCH,
        shuffle=kind != "in order",
        num_workers=2 if kind == "workers" else 0,
        drop_last=kind == "drop_last",
    )


def trained(kind, folder=None, steps=None, comm=None, every=None):
    nn.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = DistributedTrainer(net, optim.Adam(lr=0.01), shard_size=4, threads=1, comm=comm)
    trainer.fit(
        make_loader(kind),
        epochs=len(LENGTHS),
        steps=steps,
        checkpoint_dir=folder,
        checkpoint_every=every,
        verbose=False,
    )
    return trainer.steps, trainer.weights_sha256()


def steps_of(kind):
    if kind == "drop_last":
        return [length // BATCH for length in LENGTHS]
    return [-(-length // BATCH) for length in LENGTHS]


KINDS = ["in order", "shuffled", "drop_last", "sampler", "workers"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_its_own_length(kind):
    loader = make_loader(kind)
    assert [len(list(loader)) for _ in LENGTHS] == steps_of(kind)
    seen = []
    for epoch in (2, 0, 3, 1):
        loader.set_epoch(epoch)
        assert len(loader) == steps_of(kind)[epoch]
        seen.append(sum(len(batch.indices) for batch in loader))
    whole = [n // BATCH * BATCH if kind == "drop_last" else n for n in LENGTHS]
    assert seen == [whole[epoch] for epoch in (2, 0, 3, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_is_resumed_takes_the_same_steps(kind, tmp_path):
    whole = trained(kind)
    assert whole[0] == sum(steps_of(kind))
    for stop in range(1, whole[0]):
        folder = tmp_path / str(stop)
        trained(kind, folder, steps=stop, every=1)
        assert trained(kind, folder, every=1) == whole, f"stopped after step {stop}"


@pytest.mark.parametrize("kind", ["shuffled", "sampler"])
def test_ranks_take_the_same_steps(kind, tmp_path):
    whole = trained(kind)
    assert mock.run(2, lambda comm: trained(kind, comm=comm)) == [whole] * 2
    mock.run(2, lambda comm: trained(kind, tmp_path, steps=5, comm=comm, every=2))
    assert mock.run(3, lambda comm: trained(kind, tmp_path, comm=comm, every=2)) == [whole] * 3
