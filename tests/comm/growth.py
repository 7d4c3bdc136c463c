"""How what a rank sends grows with the ranks: communicators of threads that count, and what is
done with them.

`counted(ranks, function)` runs a function on so many ranks; it gives what each has counted, by the
name of the part (`part`) in which it was. Words are counted as backend "mpi" sends them; data as
what goes from this rank to others. A sum of the library (`all_reduce` of a few numbers) counts as
log2 messages of its array.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.callbacks import LambdaCallback
from odyssey.comm import mock
from odyssey.comm.call_checks import WORD, distances
from odyssey.comm.calls import envelope_bytes
from odyssey.comm.gather_rounds import gather_rounds, passes_on


class Count(NamedTuple):
    """Of one rank in one part of a run."""

    calls: int = 0
    words: int = 0  # messages of headers
    header_bytes: int = 0
    messages: int = 0
    data_bytes: int = 0
    envelopes: int = 0  # of the words: those of messages from one rank to another

    def __add__(self, other):
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


here = threading.local()


@contextlib.contextmanager
def part(name: str):
    """What is counted inside belongs to a part of the run."""
    before, here.part = here.part, name
    try:
        yield
    finally:
        here.part = before


def words(ranks: int) -> int:
    """Words that a rank sends in a call."""
    return sum(map(len, distances(ranks)))


class Counting(mock.MockCommunicator):
    """A rank of a mock world that counts."""

    def _begin(self, call):
        if self.size > 1:
            data = [0]
            if call.kind == "all_gather_v" and passes_on(call.ranges):
                messages = [m for one in gather_rounds(self.rank, call.ranges) for m in one.sends]
                data = [call.out.itemsize * sum(b - a for a, b in m.runs) for m in messages]
            elif call.op is not None:
                data = [call.send.nbytes] * int(np.ceil(np.log2(self.size)))
            elif call.kind not in ("barrier", "group"):
                bulk = call.send if call.send is not None else call.out
                unit = 1 if bulk is None else bulk.itemsize
                gives = call.routes(self.rank, self.size, unit)[0]
                data = [b - a for p, (a, b) in enumerate(gives) if p != self.rank]
            sent = [n for n in data if n]
            here.counts[here.part] += Count(
                1, words(self.size), WORD * words(self.size), len(sent), sum(sent)
            )
        return super()._begin(call)

    def _send(self, array, dest, tag, envelope):
        here.counts[here.part] += Count(0, 1, envelope_bytes(), 1, array.nbytes, 1)
        return super()._send(array, dest, tag, envelope)


def counted(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[dict[str, Count]]:
    """Runs function(communicator, *arguments) on ranks; what each has counted."""

    def rank(comm):
        here.counts, here.part = collections.defaultdict(Count), "start"
        function(comm, *arguments)
        return dict(here.counts)

    plain, mock.MockCommunicator = mock.MockCommunicator, Counting
    try:
        return mock.run(ranks, rank)
    finally:
        mock.MockCommunicator = plain


def largest(counts: list[dict[str, Count]]) -> dict[str, Count]:
    """The most of any rank, by part."""
    names = {name for one in counts for name in one}
    return {
        name: Count(
            *(
                max(column)
                for column in zip(*(one.get(name, Count()) for one in counts), strict=True)
            )
        )
        for name in sorted(names)
    }


def train_in_steps(comm) -> None:
    """A `fit` of several steps, each counted as a part of its own: "step 2", "step 3", ..."""
    nn.manual_seed(1)
    x = np.random.default_rng(0).standard_normal((32 * comm.size, 6)).astype(np.float32)
    loader = data.DataLoader(data.arrays(x, np.arange(len(x)) % 3), batch_size=8 * comm.size)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    trainer = DistributedTrainer(
        model, optim.Adam(lr=0.01), comm=comm, shard_size=8, device="cpu", threads=1
    )

    def next_part(context) -> None:
        here.part = f"step {context.steps + 1}"

    trainer.fit(loader, epochs=1, verbose=False, callbacks=[LambdaCallback(on_step_end=next_part)])


def train(comm, settings: dict[str, Any], folder: Path | None = None) -> None:
    """A training of two steps: what is counted of the second, of an evaluation, a digest, a
    checkpoint and a resume.
    """
    nn.manual_seed(1)
    x = np.random.default_rng(0).standard_normal((8 * comm.size, 6)).astype(np.float32)
    loader = data.DataLoader(data.arrays(x, np.arange(len(x)) % 3), batch_size=len(x))
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    settings = {"shard_size": 8, "device": "cpu", "threads": 1, **settings}
    trainer = DistributedTrainer(model, optim.Adam(lr=0.01), comm=comm, **settings)
    trainer.fit(loader, epochs=1)
    with part("step"):
        batch = next(iter(loader))
        trainer.train_step(batch)
    with part("evaluate"):
        trainer.evaluate(loader)
    with part("digest"):
        trainer.weights_sha256()
    if folder is not None:
        with part("save"):
            trainer.save_checkpoint(folder)
        with part("load"):
            trainer.load_checkpoint(folder)
