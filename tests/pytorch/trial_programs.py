"""Run by test_first_samples.py under mpirun: data sets that draw, count, cache or open files, with
odyssey.torch.DataLoader.

Each kind trains whole on one rank and on two or three, then it is stopped and resumed on another
number of ranks. Prints a line for each kind: its name, and for each run the hash of the weights or
the error.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data as torch_data

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from trial_data import REFUSED, Samples, draw  # noqa: E402

from odyssey import callbacks  # noqa: E402
from odyssey import comm as communication  # noqa: E402
from odyssey.comm import Communicator  # noqa: E402
from odyssey.errors import OdysseyError, Stopped  # noqa: E402
from odyssey.torch import DataLoader, DistributedTrainer  # noqa: E402

warnings.filterwarnings("ignore")


class Mix:
    """A collate function that adds a number from a generator to a shard."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.generator = np.random.default_rng(0)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = torch_data.default_collate(samples)
        numbers = {
            "held": self.generator.random,
            "unseeded": lambda: np.random.default_rng().random(),
            "torch": lambda: draw("torch"),
            "numpy": lambda: draw("numpy"),
        }
        return x + float(numbers[self.source]()), y


def made(kind: str, rank: int) -> tuple[Any, dict[str, Any]]:
    """Returns a data set and options of its loader."""
    first, _, rest = kind.partition(": ")
    if first == "collate":
        return Samples("plain"), {"collate_fn": Mix(rest)}
    if first == "split":
        rows = torch_data.TensorDataset(torch.arange(96.0).view(24, 4) / 96, torch.arange(24) % 3)
        source = Samples("plain") if "own" in rest else rows
        generator = torch.Generator().manual_seed(3) if "seeded" in rest else None
        return torch_data.random_split(source, [16, 8], generator)[0], {}
    if first == "tensors":
        torch.manual_seed(rank if "by rank" in rest else 7)
        return torch_data.TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), {}
    if first == "workers":
        return Samples(rest, rank), {"num_workers": 1, "persistent_workers": rank % 2 == 0}
    return Samples(kind, rank), {}


ALIKE = (
    "cache",
    "lazy file",
    "all three",
    "held, seeded for each sample",
    "drawn by set_epoch",
    "cached by epoch",
    "torch",
    "collate: torch",
    "collate: numpy",
    "split: seeded",
    "split: seeded, own",
    "tensors: alike",
    "workers: torch",
    "workers: lazy file",
    "workers: counter",
    "workers: drawn in later epochs",
)
BY_RANK = ("rank", "split: other", "split: other, own", "tensors: by rank", "workers: rank")
WRONG = {
    **{kind: REFUSED[kind] for kind in ("held", "unseeded", "cached after a draw")},
    "collate: held": "draws from collate.generator",
    "collate: unseeded": "a generator without a seed",
    "workers: held": "draws from dataset.generator",
}


def train(comm: Communicator, kind: str, noise: int, stop: int | None, **saving: Any) -> str:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 * noise + comm.rank)
    samples, options = made(kind, comm.rank)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = DistributedTrainer(
        net, torch.optim.SGD(net.parameters(), 0.1), shard_size=2, comm=comm
    )

    def look(context: callbacks.Context) -> None:
        if context.steps == stop:
            context.stop = "the test"

    try:
        trainer.fit(
            DataLoader(samples, 8, shuffle=True, comm=comm, **options),
            DataLoader(Samples("plain"), 6, comm=comm),
            epochs=2,
            verbose=False,
            callbacks=[callbacks.LambdaCallback(on_step_end=look)],
            **saving,
        )
    except Stopped:
        return "stopped"
    except OdysseyError as error:
        return f"{type(error).__name__} at step {trainer.steps}: {error}"
    return trainer.weights_sha256()[:10]


def main() -> None:
    world = communication.world()
    groups = {n: world.split(int(world.rank < n)) for n in (1, 2, 3)}
    folder = Path(sys.argv[1])
    for number, kind in enumerate((*ALIKE, *BY_RANK, *WRONG)):
        draws = random.Random(kind)
        path = Path(tempfile.gettempdir(), folder, str(number))
        saving = {"checkpoint_dir": path, "checkpoint_every": draws.choice([None, 1, 2])}
        first, second = draws.sample([2, 3], 2)
        runs: list[tuple[int, int | None, dict[str, Any]]] = [(1, None, {}), (first, None, {})]
        if kind in ALIKE:
            runs += [(second, draws.randrange(1, 5), saving), (draws.choice([1, 3]), None, saving)]
        results = []
        for noise, (ranks, stop, options) in enumerate(runs):
            if world.rank < ranks:
                results.append(train(groups[ranks], kind, noise, stop, **options))
            world.barrier()
        if world.rank == 0:
            print(kind, *results, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
