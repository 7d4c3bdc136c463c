"""A script for tests of the launcher: ranks that count together, keep a checkpoint's name, stop
when they are asked.

    counting.py STEPS PAUSE [FAULT ...]     a fault is ATTEMPT:RANK:STEP:WHAT, e.g. 1:2:7:kill, *:0:3:exit70

It needs mpi4py but no trainer and no kernels. A line "step S of N on R ranks, attempt A" every step
from rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from odyssey.base import runs

comm = MPI.COMM_WORLD
run = runs.Run.current()
assert run is not None
steps, pause = int(sys.argv[1]), float(sys.argv[2])
faults = [word.split(":") for word in sys.argv[3:]]


def fail(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what.startswith("exit"):
        os._exit(int(what[4:]))
    elif what == "raise":
        (run.ends / f"{comm.rank}.reason.json").write_text(
            json.dumps({"attempt": run.attempt, "reason": "ValueError: bad\x1b[2J", "step": step})
        )
        os._exit(70)


def asked() -> bool:
    try:
        return json.loads(run.control.read_text())["attempt"] == run.attempt
    except (OSError, ValueError):
        return False


names = sorted(run.checkpoints.glob("step_*")) if run.checkpoints.exists() else []
state = np.zeros(2)
state[0] = int(names[-1].name[5:]) if names else 0
comm.Bcast(state)
first = int(state[0])
for step in range(first + 1, steps + 1):
    for attempt, rank, at, what in faults:
        if attempt in ("*", str(run.attempt)) and int(rank) == comm.rank and int(at) == step:
            fail(what)
    state[:] = step if comm.rank == 0 else 0, asked() if comm.rank == 0 else 0
    comm.Allreduce(MPI.IN_PLACE, state)
    assert state[0] == step
    time.sleep(pause)
    if comm.rank == 0:
        print(
            f"step {step} of {steps} on {comm.size} ranks, attempt {run.attempt} at "
            f"{time.time():.3f}",
            flush=True,
        )
        if step % 5 == 0 or state[1]:
            (run.checkpoints / f"step_{step:08}").mkdir(parents=True, exist_ok=True)
    comm.Barrier()
    if state[1]:
        MPI.Finalize()
        os._exit(75)
if comm.rank == 0:
    run.done.write_text(json.dumps({"steps": steps, "weights_sha256": "0"}))
