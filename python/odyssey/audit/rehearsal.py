"""One rank of a layout rehearsed alone: the inside of `odyssey plan` (planner.py).

The variable ODYSSEY_REHEARSAL says which rank of which layout the first fit() of a program
rehearses, instead of training, with a trainer as that of the rank (comm/stand_in.py). Then the
process ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..base.outputs import write_json
from ..callbacks import Callback, Context
from ..comm.cores import cores
from ..comm.stand_in import Said, StandIn
from ..errors import ConfigError
from . import verify

VARIABLE = "ODYSSEY_REHEARSAL"
# least and most steps that are timed, and for how long
STEPS = (3, 40)
TIMED_SECONDS = 1.0


@dataclasses.dataclass
class Rehearsed:
    """Measurements of one rank. memory: Trainer.memory().

    The rest is of one step; all 0: there was no room for it.

    sent: bytes_per_step. shared: bytes of it that others read from shared memory. traffic: see
    stand_in.Traffic. seconds, processor: of everything but the transfers. shards: of this rank;
    all_shards: of the batch, of `samples`.
    """

    memory: dict[str, int]
    shard_size: int
    samples: int
    all_shards: int
    shards: int
    sent: float = 0.0
    shared: float = 0.0
    traffic: tuple[float, ...] = (0,) * 5
    seconds: float = 0.0
    processor: float = 0.0


@dataclasses.dataclass
class Rehearsal(Callback):
    """Rehearses `rank` of a layout with `per_node` ranks on a machine.

    What it said to others is kept in `folder`.

    limit: bytes above which no step is taken; None: however many. `file`: where the result goes.
    """

    layout: str
    rank: int
    per_node: int
    limit: int | None
    file: str
    folder: str

    @classmethod
    def current(cls) -> Rehearsal:
        """The rehearsal that the environment asks for."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def arguments(self, keywords: dict[str, Any]) -> dict[str, Any]:
        from ..parallel.strategy import MODES

        options = verify.parse(self.layout)
        if keywords.get("reduction") in MODES:
            raise ConfigError(
                f"[plan] reduction={keywords['reduction']!r}: ranks take no steps together; use "
                "another one"
            )
        messages: Said = {}
        path = Path(self.folder) / "said.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                messages = dict(file)
        self.comm = StandIn(self.rank, verify.ranks(options), self.per_node, messages)
        threads = {
            "threads": keywords.get("threads")
            or max(1, cores() // min(self.per_node, self.comm.size))
        }
        return {
            **threads,
            **verify.arguments(options),
            "comm": self.comm,
            "device": "cpu",
            "rebalance": False,
        }

    def on_fit_plan(self, context: Context) -> None:
        context.saving = dataclasses.replace(context.saving, folder=None, every=None, off=True)
        context.validate = False

    def on_fit_start(self, context: Context) -> None:
        trainer = context.trainer
        batch = trainer.read_again(context.loader, 0, 0, True)
        if batch is None:
            raise ConfigError(
                "[plan] the loader can be read once only; give fit() a DataLoader, or a list of "
                "batches"
            )
        shards, _ = trainer.rehearse(batch, prepare=True)
        samples = len(batch.indices)
        size = trainer.shard_size
        rehearsed = Rehearsed(trainer.memory(), size, samples, -(-samples // size), shards)
        if self.limit is None or sum(rehearsed.memory.values()) <= self.limit:
            self._time(trainer, batch, rehearsed)
            rehearsed.memory = trainer.memory()
        np.savez(Path(self.folder) / "said.npz", **self.comm.broadcasts)
        write_json(Path(self.file), "plan", dataclasses.asdict(rehearsed))
        raise SystemExit(0)

    def _time(self, trainer: Any, batch: Any, rehearsed: Rehearsed) -> None:
        _, read = trainer.rehearse(batch)
        traffic_before = self.comm.traffic.numbers()
        sent = trainer.traffic()[0]
        walls = []
        times = []
        start = time.perf_counter()
        while len(times) < STEPS[0] or (
            len(times) < STEPS[1] and time.perf_counter() - start < TIMED_SECONDS
        ):
            wall = time.perf_counter()
            processor = time.process_time()
            _, now_read = trainer.rehearse(batch)
            walls.append(time.perf_counter() - wall)
            times.append(time.process_time() - processor)
        steps = len(times)
        rehearsed.sent = (trainer.traffic()[0] - sent) / steps
        rehearsed.shared = (now_read - read) / steps
        traffic_after = self.comm.traffic.numbers()
        rehearsed.traffic = tuple(
            (b - a) / steps for a, b in zip(traffic_before, traffic_after, strict=True)
        )
        rehearsed.processor = float(np.median(times))
        # it waits for nobody: what is above that, others on this machine took
        rehearsed.seconds = min(*walls, rehearsed.processor)


joins = Rehearsal.current
