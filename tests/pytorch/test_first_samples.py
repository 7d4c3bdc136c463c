"""A data set of odyssey.torch.DataLoader raises an error before the first step if ranks read other
samples, or if a second reading gives other samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from odyssey import data  # noqa: E402
from odyssey.comm import Communicator, mock  # noqa: E402
from odyssey.errors import DataError  # noqa: E402
from odyssey.torch import DataLoader, DistributedTrainer  # noqa: E402

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "data")]
from trial_data import Samples  # noqa: E402
from trial_programs import ALIKE, BY_RANK, WRONG  # noqa: E402

PROGRAMS = Path(__file__).with_name("trial_programs.py")


def test_kinds_of_data_sets_on_ranks_and_after_a_resume(launch, tmp_path):
    done = launch.python(PROGRAMS, tmp_path, ranks=3)
    assert done.returncode == 0, done.stderr
    results = dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)
    assert list(results) == [*ALIKE, *BY_RANK, *WRONG]
    for kind in ALIKE:
        whole, other, stopped, resumed = results[kind].split(" | ")
        assert len(whole) == 10, (kind, whole)
        assert (other, stopped, resumed) == (whole, "stopped", whole), kind
    for kind in BY_RANK:
        whole, other = results[kind].split(" | ")
        assert len(whole) == 10
        assert other.startswith("DataError at step 0: [data] sample "), kind
        assert "of the training data has other values on rank 1 than on rank 0" in other, kind
    for kind, cause in WRONG.items():
        whole, other = results[kind].split(" | ")
        assert whole == other, kind
        assert whole.startswith("DataError at step 0: [data] "), kind
        assert cause in whole, kind


def make(comm: Any = None) -> DistributedTrainer:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    comm = comm or Communicator()
    return DistributedTrainer(net, torch.optim.SGD(net.parameters(), 0.1), shard_size=2, comm=comm)


@pytest.mark.parametrize("kind", ["other files", "other split"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_with_other_data(tmp_path, kind, stop):
    def loader(changed: bool) -> DataLoader:
        samples: Any = Samples("plain")
        if kind == "other files":
            samples.x += changed
        else:
            generator = torch.Generator().manual_seed(int(changed))
            samples = torch.utils.data.random_split(samples, [24, 0], generator)[0]
        return DataLoader(samples, 8, shuffle=True, comm=Communicator())

    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "verbose": False}
    make().fit(loader(False), epochs=2, steps=stop, **saving)
    with pytest.raises(DataError, match="differ from those of the run: sample .* isn't the one"):
        make().fit(loader(True), epochs=2, **saving)
    make().fit(loader(False), epochs=2, **saving)


def test_a_checkpoint_without_hashes_of_samples(tmp_path, monkeypatch):
    from odyssey.torch.feed import ModuleFeed

    saving = {"checkpoint_dir": tmp_path, "verbose": False}
    loaders = [DataLoader(Samples("plain"), 8, comm=Communicator()) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(ModuleFeed, "hash_samples", lambda *arguments: {})
        make().fit(loaders[0], epochs=2, steps=2, **saving)
    loaders[1].dataset.x += 1
    trainer = make()
    trainer.fit(loaders[1], epochs=2, **saving)
    assert trainer.steps == 6


def test_evaluations_are_checked_once():
    trainer = make()
    samples = Samples("counter")
    loader = DataLoader(samples, 8, comm=Communicator())
    reads = []
    samples.__class__ = type("Counted", (Samples,), {"added": lambda self, i: reads.append(i) or 0})
    for _ in range(3):
        trainer.evaluate(loader)
        trainer.predict(loader)
    # `reads` is put back after the check
    assert reads == list(range(24)) * 6
    with pytest.raises(DataError, match="the validation data"):
        trainer.evaluate(Samples("unseeded"))

    def evaluate(comm: Any) -> None:
        with pytest.raises(DataError, match="the validation data has other values on rank 1"):
            make(comm).evaluate(Samples("rank", comm.rank))

    mock.run(2, evaluate)


def test_a_trainer_of_odysseys_modules():
    from odyssey import DistributedTrainer as OwnTrainer
    from odyssey import nn as own_nn
    from odyssey import optim
    from odyssey.errors import ConfigError

    def train(comm: Any, kind: str) -> str:
        own_nn.manual_seed(0)
        torch.manual_seed(comm.rank)
        trainer = OwnTrainer(
            own_nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=2, threads=1, comm=comm
        )
        with pytest.raises(ConfigError, match="is for modules of PyTorch; use odyssey.data"):
            trainer.fit(DataLoader(Samples(kind), 8, comm=comm), verbose=False)
        loader = data.DataLoader(Samples(kind), 8, shuffle=True)
        trainer.fit(loader, epochs=2, verbose=False)
        return trainer.weights_sha256()

    for kind in ("plain", "torch", "all three"):
        assert mock.run(3, train, kind) == [train(Communicator(), kind)] * 3
