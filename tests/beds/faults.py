"""Faults as objects: what goes wrong in which rank at which step, and what is done to a running
job from outside.

    faults.kill(rank=1, at_step=7)
    faults.slow(rank=2, ms=50) & faults.raises(rank=0, at_step=9)
    faults.kill(rank=1, at_step=7).kill(rank=3, at_step=12, attempt=2)

`Faults` are carried to the ranks by one environment variable, which `job.py` (or another script of
the tests) hands to `install`; no code of the product reads it. A fault happens just before the step
it names, counted from 1, in the attempt it names (None: in each), so a restarted job goes on. What
is done to processes from outside is in `outside.py`. What this is not: a way to break files or
system calls.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import os
import signal as signals
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .outside import Job, Outside, Traces, launch_command, rank_command

__all__ = [
    "Fault",
    "Faults",
    "Job",
    "LeavesEarly",
    "Outside",
    "Traces",
    "install",
    "launch_command",
    "rank_command",
]

VARIABLE = "ODYSSEY_TEST_FAULTS"
TRIGGER = "ODYSSEY_TEST_TRIGGER"
MISMATCHES = ("op", "count", "dtype", "root")


class LeavesEarly(Exception):
    """A rank returns from its training as if it were over; the script catches it and ends with
    0.
    """


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of one rank.

    `until`: it happens in every step up to this one; `value`: code, milliseconds, ...
    """

    kind: str
    rank: int
    at_step: int = 1
    until: int | None = None
    attempt: int | None = 1
    value: Any = None

    def happens(self, step: int) -> bool:
        return self.at_step <= step <= (self.at_step if self.until is None else self.until)


@dataclasses.dataclass(frozen=True)
class Faults:
    """Several faults; every method returns them and one more. `a & b` has those of both."""

    each: tuple[Fault, ...] = ()

    def __and__(self, other: Faults) -> Faults:
        return Faults(self.each + other.each)

    def and_(self, kind: str, rank: int, at_step: int, attempt: int | None, **more: Any) -> Faults:
        """These and one more."""
        return Faults((*self.each, Fault(kind, rank, at_step, attempt=attempt, **more)))

    # --- the process ends or stands still ---

    def kill(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """SIGKILL."""
        return self.signal(rank, at_step, signals.SIGKILL, attempt)

    def signal(
        self, rank: int, at_step: int = 1, number: int = signals.SIGTERM, attempt: int | None = 1
    ) -> Faults:
        """A signal to itself: SIGSEGV and SIGBUS too."""
        return self.and_("signal", rank, at_step, attempt, value=int(number))

    def stop(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """SIGSTOP: it neither ends nor goes on."""
        return self.signal(rank, at_step, signals.SIGSTOP, attempt)

    def loop(
        self, rank: int, at_step: int = 1, holding_gil: bool = False, attempt: int | None = 1
    ) -> Faults:
        """An endless loop, in Python or in C without letting go of the interpreter's lock."""
        return self.and_("loop", rank, at_step, attempt, value=holding_gil)

    def raises(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """RuntimeError("a defect of rank R at step K")."""
        return self.and_("raises", rank, at_step, attempt)

    def exits(self, rank: int, code: int = 3, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """sys.exit(code)."""
        return self.and_("exits", rank, at_step, attempt, value=code)

    def _exit(self, rank: int, code: int = 0, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """os._exit(code)."""
        return self.and_("_exit", rank, at_step, attempt, value=code)

    def returns_early(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """It leaves the training and ends with 0."""
        return self.and_("returns_early", rank, at_step, attempt)

    def eats_memory(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """Takes memory until it is ended; for a job with a limit (`Job(memory_mb=)`)."""
        return self.and_("eats_memory", rank, at_step, attempt)

    # --- calls differ ---

    def skips_collective(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """All ranks but this one make one more all-reduce; this one goes on to the step."""
        return self.and_("skips", rank, at_step, attempt)

    def differs(self, rank: int, what: str, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """All ranks make one more collective; that of this rank has another "op", "count",
        "dtype" or "root".
        """
        if what not in MISMATCHES:
            raise ValueError(f"{what!r}: choose from {MISMATCHES}")
        return self.and_("differs", rank, at_step, attempt, value=what)

    # --- numbers differ ---

    def flips_weight(
        self, rank: int, at_step: int = 1, bit: int = 20, attempt: int | None = 1
    ) -> Faults:
        """One bit of the first weight, in this rank's memory only; bit 20 of a float32 changes
        it by some per cent.
        """
        return self.and_("flips_weight", rank, at_step, attempt, value=bit)

    def nan_gradient(self, rank: int, at_step: int = 1, attempt: int | None = 1) -> Faults:
        """A NaN in what this rank adds to the gradient; its loss stays finite."""
        return self.and_("nan_gradient", rank, at_step, attempt)

    # --- slow ---

    def slow(
        self,
        rank: int,
        ms: int,
        at_step: int = 1,
        until: int | None = 1 << 60,
        attempt: int | None = None,
    ) -> Faults:
        """So much later into each step: as if it computed longer."""
        return self.and_("slow", rank, at_step, attempt, value=ms, until=until)

    def slow_data(
        self, rank: int, ms: int, at_step: int = 1, until: int = 1 << 60, attempt: int | None = None
    ) -> Faults:
        """So much longer in making each batch."""
        return self.and_("slow_data", rank, at_step, attempt, value=ms, until=until)

    # --- how they travel ---

    def environment(self) -> dict[str, str]:
        """What a job's environment must have for its ranks to know them."""
        return {VARIABLE: json.dumps([dataclasses.asdict(f) for f in self.each])}

    @classmethod
    def carried(cls) -> Faults:
        """Those of this process's environment."""
        return cls(tuple(Fault(**f) for f in json.loads(os.environ.get(VARIABLE, "[]"))))


none = Faults()
kill, signal, stop, loop = none.kill, none.signal, none.stop, none.loop
raises, exits, _exit, returns_early, eats_memory = (
    none.raises,
    none.exits,
    none._exit,
    none.returns_early,
    none.eats_memory,
)
skips_collective, differs = none.skips_collective, none.differs
flips_weight, nan_gradient = none.flips_weight, none.nan_gradient
slow, slow_data = none.slow, none.slow_data


def install(trainer: Any, faults: Faults | None = None) -> None:
    """Has this rank's faults happen in a DistributedTrainer; in a rank without faults it changes
    nothing.
    """
    faults = Faults.carried() if faults is None else faults
    attempt = int(os.environ.get("ODYSSEY_ATTEMPT", "1"))
    now = [f for f in faults.each if f.attempt in (None, attempt)]
    rank = trainer.comm.rank
    mine = [f for f in now if f.rank == rank or f.kind in ("skips", "differs")]
    file = Path(os.environ[TRIGGER]) if TRIGGER in os.environ else None
    if not mine and file is None:
        return
    if any(f.kind == "slow_data" for f in mine):
        _slow_batches(trainer, [f for f in mine if f.kind == "slow_data"])
    take = trainer.train_step

    @functools.wraps(take)
    def train_step(batch: Any) -> Any:
        for fault in mine:
            if fault.happens(trainer.steps + 1):
                _happen(fault, trainer)
        if file is not None and (fault := _triggered(file, rank)) is not None:
            _happen(fault, trainer)
        return take(batch)

    trainer.train_step = train_step


def trigger(file: Path, faults: Faults) -> None:
    """Has the only fault of `faults` happen in a running job, before the next step of its rank.

    file: that which the job's environment names as TRIGGER. Not for those in which all ranks take
    part.
    """
    (fault,) = faults.each
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(dataclasses.asdict(fault)))
    aside.replace(file)


def _triggered(file: Path, rank: int) -> Fault | None:
    """What was triggered for this rank; once."""
    try:
        fault = Fault(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    if fault.rank != rank:
        return None
    file.unlink()
    return fault


def _happen(fault: Fault, trainer: Any) -> None:
    kind, value = fault.kind, fault.value
    if kind == "signal":
        os.kill(os.getpid(), value)
    elif kind == "loop":
        if value:
            # in C from here on: no bytecode, no signal handler
            collections.deque(itertools.repeat(0), maxlen=0)
        while True:
            pass
    elif kind == "raises":
        raise RuntimeError(f"a defect of rank {fault.rank} at step {fault.at_step}")
    elif kind == "exits":
        sys.exit(value)
    elif kind == "_exit":
        os._exit(value)
    elif kind == "returns_early":
        raise LeavesEarly
    elif kind == "eats_memory":
        taken = []
        while True:
            taken.append(np.ones(1 << 21))
    elif kind == "skips":
        if trainer.comm.rank != fault.rank:
            trainer.comm.all_reduce(np.ones(3, np.float32))
    elif kind == "differs":
        _differ(trainer.comm, value, trainer.comm.rank == fault.rank)
    elif kind == "flips_weight":
        trainer.arena.params.view(np.uint32)[0] ^= np.uint32(1 << value)
    elif kind == "nan_gradient":
        _poison(trainer)
    elif kind == "slow":
        time.sleep(value / 1000)


def _differ(comm: Any, what: str, other: bool) -> None:
    values = np.ones(
        4 if what == "count" and other else 3, np.int32 if what == "dtype" and other else np.float32
    )
    if what == "root":
        comm.broadcast(values, 1 if other else 0)
    elif what == "op" and other:
        comm.broadcast(values, 0)
    else:
        comm.all_reduce(values)


def _poison(trainer: Any) -> None:
    """Before the next reduction that this rank starts, NaN for the first float that it adds to
    the sum.
    """
    from odyssey.parallel import reduction

    def kinds(of: type) -> set[type]:
        return {of}.union(*(kinds(c) for c in of.__subclasses__()))

    originals = {
        kind: kind.__dict__["start"]
        for kind in kinds(reduction.Reduction)
        if "start" in kind.__dict__
    }

    def poisoned(original: Any) -> Any:
        def start(self: Any) -> None:
            if self.floats > 16 and self.plan.partial:  # not that of the losses alone
                self.buffers[self.plan.partial[0][1]][0] = np.nan
                for kind, was in originals.items():
                    kind.start = was
            original(self)

        return start

    for kind, original in originals.items():
        kind.start = poisoned(original)


def _slow_batches(trainer: Any, faults: list[Fault]) -> None:
    from odyssey.data.loader import Batch

    make = Batch.__init__

    def slowly(self: Any, *arguments: Any) -> None:
        for fault in faults:
            if fault.happens(trainer.steps + 1):
                time.sleep(fault.value / 1000)
        make(self, *arguments)

    Batch.__init__ = slowly
