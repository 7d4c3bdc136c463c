"""A training whose samples are read or transformed: each rank reads its own, and the bits are
those of one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odyssey import data, manual_seed, nn, optim
from odyssey.comm import mock
from odyssey.data import sources, transforms
from odyssey.errors import ConfigError, DataError
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

sys.path.insert(0, str(Path(__file__).parent))
import own_data  # noqa: E402


class Counted(own_data.Made):
    """Notes which samples were read."""

    def __init__(self, n: int) -> None:
        super().__init__("image", n)
        self.read: list[int] = []

    def __getitem__(self, i: int):
        self.read.append(i)
        return super().__getitem__(i)


class Stateful(own_data.Made):
    """Draws from a generator that goes on, as in many programs for PyTorch."""

    def __init__(self, n: int) -> None:
        super().__init__("image", n)
        self.draw = np.random.default_rng(0)

    def __getitem__(self, i: int):
        x, y = super().__getitem__(i)
        return x + np.float32(self.draw.random()), y


def net() -> nn.Module:
    manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 3, 3))


def fitted(
    comm: Any,
    dataset: Any,
    fit: dict | None = None,
    val: Any = None,
    loader: dict | None = None,
    **settings,
):
    t = DistributedTrainer(
        net(), optim.SGD(lr=0.05), comm=comm, threads=1, **{"shard_size": 4, **settings}
    )
    options = {"batch_size": 24, "shuffle": True, "seed": 3, **(loader or {})}
    history = t.fit(data.DataLoader(dataset, **options), val, **{"epochs": 2, **(fit or {})})
    return t.weights_sha256(), history.train_loss, history.test_loss


AUGMENTED = {
    "transform": [transforms.RandomCrop(padding=1), transforms.HorizontalFlip(), own_data.noise],
    "num_workers": 0,
}


@pytest.mark.parametrize(
    "settings", [{}, {"accumulation_steps": 2}, {"num_gpus": 3, "device": "cpu"}, {"zero": 2}]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_its_own_and_the_bits_stay(ranks, settings):
    if "num_gpus" in settings and ranks == 3:
        settings = {**settings, "num_gpus": 2}
    batch = {"batch_size": 24 // settings.get("accumulation_steps", 1)}
    sets = [Counted(66) for _ in range(ranks)]
    alone = fitted(
        None,
        own_data.Made("image", 66),
        val=data.DataLoader(own_data.Made("image", 30), batch_size=12),
    )

    def rank(comm):
        val = data.DataLoader(own_data.Made("image", 30), batch_size=12)
        return fitted(comm, sets[comm.rank], {}, val, batch, check_every=0, **settings)

    assert mock.run(ranks, rank) == [alone] * ranks
    first = settings.get("accumulation_steps", 1)  # the first step is compared: all read all of it
    for made in sets:
        assert len(made.read) < 2 * 66 / ranks + 24 + 8 * 2 * first
    assert {i for made in sets for i in made.read} == set(range(66))


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 1), (1, 1, 2)])
def test_ranks_that_share_a_replica_read_the_same(mesh):
    alone = fitted(None, own_data.Made("image", 30), shard_size=8)
    mesh = Mesh(*mesh)

    def rank(comm):
        return fitted(comm, own_data.Made("image", 30), mesh=mesh, shard_size=8)

    assert mock.run(mesh.dp * mesh.pp * mesh.tp, rank) == [alone] * (mesh.dp * mesh.pp * mesh.tp)


def test_a_data_set_that_draws_by_itself_is_named_at_once():
    def rank(comm):
        try:
            return fitted(comm, Stateful(48))
        except DataError as error:
            return str(error)

    said = mock.run(2, rank)
    assert said[0] == said[1]
    assert "has other values when it is read again: it draws from dataset.draw" in said[0]


@pytest.mark.parametrize("kind", ["made", "memory"])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_augmented_samples_are_the_same_on_any_ranks_and_after_a_resume(tmp_path, kind, steps):
    def dataset():
        made = own_data.Made("image", 66)
        if kind == "made":
            return made
        return data.arrays(
            *map(np.array, zip(*(made[i] for i in range(66)), strict=True)), classes=3
        )

    whole = fitted(None, dataset(), loader=AUGMENTED)
    assert whole != fitted(None, dataset())
    assert mock.run(3, lambda comm: fitted(comm, dataset(), loader=AUGMENTED)) == [whole] * 3
    fitted(None, dataset(), {"steps": steps, "checkpoint_dir": tmp_path}, loader=AUGMENTED)
    again = mock.run(
        2, lambda comm: fitted(comm, dataset(), {"checkpoint_dir": tmp_path}, loader=AUGMENTED)
    )
    assert [a[0] for a in again] == [whole[0]] * 2


class OfText(nn.Module):
    """Numbers made of ids, and one for each id that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, ids):
        return self.layer(ids.float() * (1 / 76))


def test_a_checkpoint_of_a_training_on_text_has_its_vocabulary(tmp_path):
    def fit(part, comm=None, **more):
        manual_seed(0)
        loss = lambda y, target: nn.MSELoss()(y, target.float() * (1 / 76))  # noqa: E731
        t = DistributedTrainer(
            OfText(), optim.SGD(lr=0.05), comm=comm, loss=loss, shard_size=4, threads=1
        )
        t.fit(data.DataLoader(part, 16, True), epochs=2, **more)
        return t.weights_sha256()

    plays = data.shakespeare(length=8, train=False)
    some = sources.Subset(plays, np.arange(50))
    whole = fit(some)
    saving = {"checkpoint_dir": tmp_path / "kept"}
    mock.run(2, lambda comm: fit(some, comm, steps=3, **saving))
    assert mock.run(3, lambda comm: fit(some, comm, **saving)) == [whole] * 3
    (newest, *_) = sorted((tmp_path / "kept").glob("step_*"), reverse=True)
    back = data.Vocabulary.of_checkpoint(newest)
    assert back == plays.vocabulary and len(back) == 76
    assert back.decode(back.encode("To be, or not to be")) == "To be, or not to be"
    (tmp_path / "other.txt").write_text("abc" * 200)
    other = sources.Subset(data.text(tmp_path / "other.txt", length=8), np.arange(50))
    with pytest.raises(
        ConfigError, match=r'was made with vocabulary .*, this training has \{"characters": "abc"\}'
    ):
        fit(other, **saving)
    with pytest.raises(
        DataError,
        match="has no manifest.json with a vocabulary; give a checkpoint of a training on",
    ):
        data.Vocabulary.of_checkpoint(tmp_path)
