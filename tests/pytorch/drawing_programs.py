"""Run by test_random_scopes.py under mpirun: random programs that draw random numbers in many places.

Each case runs whole on several layouts. Then it is stopped after a random step, and resumed on
another layout. Before each run the generators of each rank get other states. Prints a line for
each case: its number, the hashes of all runs, and what it is.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data as torch_data

from odyssey import callbacks
from odyssey import comm as communication
from odyssey.comm import Communicator
from odyssey.errors import OdysseyError, Stopped
from odyssey.torch import DataLoader, DistributedTrainer

warnings.filterwarnings("ignore")
SAMPLES = 44
EPOCHS = 3


def draw(library: str) -> float:
    """Returns a random number from 0 to 1."""
    if library == "torch":
        return float(torch.rand(()))
    if library == "numpy":
        return float(np.random.standard_normal() % 1)
    return random.gauss(0, 1) % 1


class Rows(torch_data.Dataset):
    """Samples, with noise if they draw."""

    def __init__(self, library: str | None) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 6, generator=g)
        self.y = torch.randint(0, 3, (SAMPLES,), generator=g)
        self.library = library
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[i] * (1 + self.epoch / 8)
        return (x if self.library is None else x + draw(self.library) / 10), self.y[i]


class Mix:
    """A collate function that mixes the samples of a shard."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self, samples: list[Any]) -> Any:
        x, y = torch_data.default_collate(samples)
        weight = 0.7 + 0.3 * draw(self.library)
        return weight * x + (1 - weight) * x.flip(0), y


class Net(nn.Module):
    """A module whose forward() may draw, from an epoch on."""

    def __init__(self, library: str | None, first_epoch: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.library = library
        self.first_epoch = first_epoch
        self.epoch = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if self.library is not None and self.epoch >= self.first_epoch and self.training:
            y = y * (0.5 + draw(self.library))
        return y


class NoisyLoss:
    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, target) * (0.5 + draw(self.library))


class SetEpoch(callbacks.Callback):
    def on_epoch_start(self, context: callbacks.Context) -> None:
        context.trainer.module.epoch = context.epoch


class Noise(callbacks.Callback):
    """Adds noise to weights at an event."""

    def __init__(self, library: str, event: str) -> None:
        setattr(self, event, self.add)
        self.library = library

    def add(self, context: callbacks.Context) -> None:
        with torch.no_grad(), context.trainer.gathered() as module:
            module.layers[0].bias += draw(self.library) / 10


class Evaluates(callbacks.Callback):
    """Evaluates in the middle of an epoch."""

    def __init__(self, source: Any, every: int) -> None:
        self.source = source
        self.every = every
        self.losses: list[float] = []

    _not_state = ("source",)

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps % self.every == 0:
            self.losses.append(context.trainer.evaluate(self.source).loss)


class StopsAt(callbacks.Callback):
    _not_state = ("step",)

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == self.step:
            context.stop = "the test"


class Case:
    """The members of a program, and its layouts."""

    def __init__(self, seed: int, index: int) -> None:
        r = random.Random(f"{seed} {index}")
        library = ["torch", "numpy", "python"]

        def maybe(chance: float) -> str | None:
            return r.choice(library) if r.random() < chance else None

        self.forward = maybe(0.35)
        self.first_epoch = r.choice([1, 2, 3])
        self.loss = maybe(0.35)
        self.rows = maybe(0.4)
        self.collate = maybe(0.4)
        self.optimizer = maybe(0.25)
        self.scheduler = maybe(0.3)
        self.noise = maybe(0.5)
        self.event = r.choice(["on_epoch_start", "on_step_end", "on_epoch_end"])
        self.evaluates = r.choice([None, None, "own", "other", "data set"])
        self.every = r.choice([1, 2, 3])
        self.loader = r.choice(["odyssey", "odyssey", "torch", "torch", "generator"])
        self.shuffle = r.random() < 0.7
        self.workers = r.choice([0, 0, 0, 1])
        self.persistent = self.workers > 0 and self.evaluates != "own" and r.random() < 0.5
        self.scheduler_interval = r.choice(["step", "epoch"])
        self.shard = r.choice([2, 4, 6])
        self.batch = r.choice([12, 16])
        steps = -(-SAMPLES // self.batch) * EPOCHS
        self.stop = r.randrange(1, steps)
        self.checkpoint_every = r.choice([None, 1, 2])
        zeros = [0] if self.optimizer else [0, 0, 1, 2, 3]
        self.layouts = [(ranks, r.choice(zeros)) for ranks in r.sample([1, 2, 3, 3], 4)]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value)


def loader_of(case: Case, rows: Rows, comm: Communicator) -> Any:
    """Returns a loader of odyssey.torch or of torch, or an iterable that draws its order."""
    options: dict[str, Any] = {"num_workers": case.workers, "persistent_workers": case.persistent}
    if case.collate is not None:
        options["collate_fn"] = Mix(case.collate)
    if case.loader == "odyssey":
        return DataLoader(
            rows, case.batch, case.shuffle, seed=4, shard_size=case.shard, comm=comm, **options
        )
    if case.loader == "torch":
        return torch_data.DataLoader(rows, case.batch, shuffle=case.shuffle, **options)
    return Batches(rows, case.batch)


class Batches:
    """Batches in an order that NumPy's generator gives."""

    def __init__(self, rows: Rows, batch: int) -> None:
        self.rows = rows
        self.batch = batch

    def __len__(self) -> int:
        return -(-SAMPLES // self.batch)

    def __iter__(self) -> Any:
        order = np.random.permutation(SAMPLES).tolist()
        for at in range(0, SAMPLES, self.batch):
            yield torch_data.default_collate([self.rows[i] for i in order[at : at + self.batch]])


def train(
    case: Case, comm: Communicator, zero: int, noise: int, stop: int | None, **saving: Any
) -> str:
    """Returns a hash of the weights and of what the callbacks hold."""
    torch.manual_seed(0)
    net = Net(case.forward, case.first_epoch)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 * noise + comm.rank)
    if case.optimizer is None:
        optimizer: Any = torch.optim.AdamW(net.parameters(), 0.01)
    else:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def add_noise(one: Any, arguments: Any, keywords: Any) -> None:
            for group in one.param_groups:
                group["lr"] = 0.1 * (0.5 + draw(case.optimizer))

        optimizer.register_step_pre_hook(add_noise)
    scheduler = None
    if case.scheduler is not None and case.optimizer is None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 + draw(case.scheduler) if step else 1.0
        )
    rows = Rows(case.rows)
    loader = loader_of(case, rows, comm)
    listeners: list[Any] = [SetEpoch()]
    if case.noise is not None:
        listeners.append(Noise(case.noise, case.event))
    if case.evaluates is not None:
        other = torch_data.DataLoader(Rows(case.rows), 10)
        source = {"own": loader, "other": other, "data set": rows}[case.evaluates]
        listeners.append(Evaluates(source, case.every))
    listeners.append(StopsAt(stop))
    trainer = DistributedTrainer(
        net,
        optimizer,
        None if case.loss is None else NoisyLoss(case.loss),
        scheduler=scheduler,
        scheduler_interval=case.scheduler_interval,
        shard_size=case.shard,
        zero=zero,
        comm=comm,
    )
    trainer.fit(loader, epochs=EPOCHS, callbacks=listeners, verbose=False, **saving)
    evaluation = trainer.evaluate(torch_data.DataLoader(rows, 9))
    numbers = [trainer.weights_sha256(), evaluation.loss]
    numbers += [one.losses for one in listeners if isinstance(one, Evaluates)]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:10]


def attempt(*arguments: Any, **saving: Any) -> str:
    try:
        return train(*arguments, **saving)
    except Stopped:
        return "stopped"
    except OdysseyError as error:
        return f"{type(error).__name__}: {error}"


def play(case: Case, world: Communicator, groups: dict[int, Communicator]) -> list[str]:
    """Returns what rank 0 has after each run."""
    results = []

    def run(layout: tuple[int, int], *arguments: Any, **saving: Any) -> None:
        ranks, zero = layout
        noise = len(results) + 1
        text = ""
        if world.rank < ranks:
            text = attempt(case, groups[ranks], zero, noise, *arguments, **saving)
        results.append(text)
        world.barrier()

    name = np.zeros(256, np.uint8)
    folder = tempfile.TemporaryDirectory() if world.rank == 0 else None
    if folder is not None:
        name[: len(folder.name)] = np.frombuffer(folder.name.encode(), np.uint8)
    world.broadcast(name)
    path = Path(name.tobytes().rstrip(b"\0").decode())
    first, second, third, fourth = case.layouts
    run(first, None)
    run(second, None)
    saving = {"checkpoint_dir": path, "checkpoint_every": case.checkpoint_every}
    run(third, case.stop, **saving)
    run(fourth, None, **saving)
    if folder is not None:
        folder.cleanup()
    return results


def main() -> None:
    count, first, seed = (int(text) for text in sys.argv[1:4])
    world = communication.world()
    groups = {n: world.split(int(world.rank < n)) for n in (1, 2, 3)}
    for index in range(first, first + count):
        case = Case(seed, index)
        whole, other, stopped, resumed = play(case, world, groups)
        if world.rank == 0:
            is_same = whole == other == resumed and stopped == "stopped"
            kind = "same" if is_same else "differs"
            print(index, kind, whole, other, stopped, resumed, case, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
