"""Run by test_own_loop_resume.py under mpirun: random loops of one's own, whole and resumed.

Each case runs whole, and again up to a random step. Its state goes through torch.save, and a new
net resumes from it on another number of ranks. Prints a line for each case, with the hash of all
weights, buffers and optimizer states of both runs. `--lose` rebuilds the state dicts, which loses
their progress: then cases with dropout must differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from odyssey import comm as communication
from odyssey.comm import Communicator
from odyssey.torch import DataLoader, DistributedDataParallel

LOSE = "--lose" in sys.argv
SAMPLES = 38  # no shard has one sample, which BatchNorm does not support
CLASSES = 3


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 6, num_layers=2, dropout=dropout, batch_first=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x.view(-1, 2, 4))[0][:, -1])


def multilayer(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, CLASSES))


def normalised(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.BatchNorm1d(12, momentum=None),
        nn.AlphaDropout(dropout),
        nn.Linear(12, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, CLASSES),
    )


def convolutions(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 3, 3),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.Dropout1d(dropout),
        nn.Flatten(),
        nn.Linear(18, CLASSES),
    )


def attention(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, CLASSES))


MODELS = [multilayer, normalised, convolutions, Recurrent, attention]
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    lambda p: torch.optim.NAdam(p, 1e-2),
    lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5),
    lambda p: torch.optim.Adagrad(p, 1e-2),
    lambda p: torch.optim.Rprop(p, 1e-2),
]


@dataclasses.dataclass
class Case:
    """The settings of a loop, and the place where it stops."""

    index: int

    def __post_init__(self) -> None:
        r = random.Random(self.index)
        self.model = r.choice(MODELS)
        self.dropout = r.choice([0.0, 0.2, 0.5, 0.5])
        self.optimizer = r.choice(OPTIMIZERS)
        self.nets = r.choice([1, 1, 2])
        self.accumulate = r.choice([1, 1, 2, 3])
        self.shard_size = r.choice([2, 3, 4])
        self.batch_size = r.choice([8, 12, 18])
        self.shuffle = r.random() < 0.7
        self.whole_batches = r.random() < 0.25  # of the program, the same on all ranks
        self.decays = r.random() < 0.5
        batches = -(-SAMPLES // self.batch_size)
        self.steps = batches * 3
        stops = range(self.accumulate, self.steps, self.accumulate)
        self.stop = r.choice(stops)
        self.ranks = r.sample([1, 2, 3], 3)  # of the whole run, up to the stop, and after it


def run(
    case: Case, comm: Communicator, first: int, stop: int, text: bytes | None
) -> tuple[bytes, str]:
    """Takes the steps from `first` to `stop` - 1; returns the saved state, and a hash of it.

    text: a saved state to resume from.
    """
    g = torch.Generator().manual_seed(case.index)
    x = torch.randn(SAMPLES, 8, generator=g)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=g)
    torch.manual_seed(case.index if text is None else 99)  # a resumed program may have other values
    nets = [
        DistributedDataParallel(case.model(case.dropout), case.shard_size, seed=n, comm=comm)
        for n in range(case.nets)
    ]
    optimizers = [case.optimizer(net.parameters()) for net in nets]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    data = torch.utils.data.TensorDataset(x, y)
    loader = DataLoader(
        data, case.batch_size, case.shuffle, seed=5, shard_size=case.shard_size, comm=comm
    )
    if text is not None:
        saved = torch.load(io.BytesIO(text))
        for net, optimizer, scheduler, parts in zip(
            nets, optimizers, schedulers, saved["parts"], strict=True
        ):
            net.load_state_dict(parts[0])
            optimizer.load_state_dict(parts[1])
            scheduler.load_state_dict(parts[2])
        assert saved["step"] == first
    step = first
    while step < stop:
        epoch, number = divmod(step, len(loader))
        loader.start_at(epoch, number)
        source: Any = loader
        if case.whole_batches:
            places = range(number * case.batch_size, SAMPLES, case.batch_size)
            source = [(x[at : at + case.batch_size], y[at : at + case.batch_size]) for at in places]
        for batch in source:
            for net, optimizer, scheduler in zip(nets, optimizers, schedulers, strict=True):
                for a, b in net.shards(batch):
                    F.cross_entropy(net(a), b).backward()
                if (step + 1) % case.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    if case.decays:
                        scheduler.step()
            step += 1
            if step == stop:
                break
    parts = [
        (net.state_dict(), optimizer.state_dict(), scheduler.state_dict())
        for net, optimizer, scheduler in zip(nets, optimizers, schedulers, strict=True)
    ]
    tensors = [t for values, _, _ in parts for t in values.values()]
    for _, state, _ in parts:
        for of_parameter in state["state"].values():
            tensors += [t for t in of_parameter.values() if isinstance(t, torch.Tensor)]
    hashed = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors))
    if LOSE:
        parts = [(dict(values), *others) for values, *others in parts]
    file = io.BytesIO()
    torch.save({"parts": parts, "step": step}, file)
    return file.getvalue(), hashed.hexdigest()[:16]


def on_ranks(
    world: Communicator, groups: dict[int, Communicator], ranks: int, *arguments: Any
) -> tuple[bytes, str]:
    """Runs on the first ranks of the world; all ranks return what rank 0 has."""
    case, *others = arguments
    text, digest = run(case, groups[ranks], *others) if world.rank < ranks else (b"", "")
    size = int(world.broadcast(np.array([len(text)], np.int64), 0)[0])
    buffer = np.frombuffer(text, np.uint8).copy() if world.rank == 0 else np.zeros(size, np.uint8)
    return world.broadcast(buffer, 0).tobytes(), digest


def main() -> None:
    world = communication.world()
    groups = {n: world.split(int(world.rank < n)) for n in (1, 2, 3)}
    for index in range(int(sys.argv[1])):
        case = Case(index)
        whole, part, rest = case.ranks
        _, expected = on_ranks(world, groups, whole, case, 0, case.steps, None)
        text, _ = on_ranks(world, groups, part, case, 0, case.stop, None)
        _, digest = on_ranks(world, groups, rest, case, case.stop, case.steps, text)
        if world.rank == 0:
            draws = case.dropout > 0
            print(index, "draws" if draws else "fixed", expected, digest, case.ranks, flush=True)


if __name__ == "__main__":
    main()
