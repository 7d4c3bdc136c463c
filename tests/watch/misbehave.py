"""Run under a launcher by test_ends.py: rank 1 misbehaves at step 2 in the way that is named in
the argument.

Every rank prints the sum of its weights after each step that it took, so that a test can see that
none was wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
from starved import starved

import odyssey
from odyssey import comm
from odyssey.base import slot
from odyssey.data import DataLoader
from odyssey.errors import ConfigError

how = sys.argv[1]
mine = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if mine == 1 and how == "raises before MPI":
    raise ValueError("before")
if mine == 1 and how == "exits before MPI":
    sys.exit(3)

world = comm.world(sys.argv[2] if len(sys.argv) > 2 else "auto")
rank, last = world.rank, world.rank == world.size - 1
weights = np.zeros(8, np.float32)


class Exits:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> None:
        sys.exit(5)


def now() -> None:
    print(f"now {time.time():.3f} {starved():.3f}\n", end="", flush=True)


def misbehave() -> None:
    now()
    if how == "raises":
        raise ValueError("a defect of this rank")
    if how == "raises an error of odyssey":
        raise ConfigError("[test] a wrong setting")
    if how == "raises in a thread":
        threading.Thread(target=lambda: 1 // 0, name="worker").start()
        time.sleep(60)
    if how == "exits":
        sys.exit(3)
    if how == "exits in a data set":
        next(iter(DataLoader(Exits())))
    if how == "os._exit":
        os._exit(0)
    if how == "os._exit with a code":
        os._exit(4)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is interrupted":
        raise KeyboardInterrupt
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleeps":
        time.sleep(60)
    if how == "loops":
        # the interpreter's lock is held all but now and then; the next one holds it for ever
        while True:
            pass
    if how == "loops in C":
        sum(range(10**12))
    if how == "waits elsewhere":
        world.recv(weights, 0)
    if how == "other op":
        world.all_reduce(weights, "max")
    if how == "other count":
        world.all_reduce(np.zeros(9, np.float32))
    if how == "other dtype":
        world.all_reduce(np.zeros(8))
    if how == "other call":
        world.broadcast(weights)


def step(i: int) -> None:
    gradient = np.full(8, rank + 1, np.float32)
    if rank == 1 and i == 2:
        if how == "returns":
            now()
            raise StopIteration
        if how == "skips":
            return
        misbehave()
    if how == "other root":
        world.broadcast(gradient, root=int(rank == 1 and i == 2))
    else:
        world.all_reduce(gradient, out=gradient)
    weights[:] += gradient
    slot.step(i + 1, 8)
    print(f"rank {rank} step {i} weights {weights[0]:g}\n", end="", flush=True)


def main() -> None:
    half = world.split(0 if rank < 2 else 1) if how == "waits for a group" else None
    for i in range(4):
        if how == "all raise" and i == 2:
            raise ZeroDivisionError
        if how == "all exit" and i == 2:
            now()
            sys.exit(5)
        if how == "an exit is caught" and i == 2:
            try:
                sys.exit(5)
            except SystemExit:
                pass
        if half is not None and i == 2:
            if rank == 1:
                misbehave()
                time.sleep(60)
            half.barrier()
        try:
            step(i)
        except StopIteration:
            return
    print(odyssey.__version__)


main()
