"""How bytes move between processes: one contract (`Communicator`), several backends, and who
picks which.

| backend | file | ranks are |
|---|---|---|
| local | base.py | this process alone |
| mpi | mpi.py | processes under an MPI launcher |
| shm | shm.py | the same, or Gloo's, on one machine, through shared memory |
| nccl | nccl.py | mpi or shm, and NVIDIA's NCCL between the GPUs of the ranks, one of its own each |
| mock | mock.py | threads of this process, for tests: `mock.run(ranks, function)` |

Others are provided by other folders (base/registry.py), as Gloo for processes with the variables of
env:// is.

docs/communication.md explains the contract.
"""  # noqa: E501 - a table

from __future__ import annotations

import importlib
import os
import sys

from ..base import hooks, launcher, limits, registry
from ..base.lazy import attach
from ..errors import BuildError, ConfigError
from ..settings.recipes import BACKENDS
from . import base
from .base import Communicator, Request
from .calls import DTYPES, ReduceOp, bfloat16
from .meeting import announced

__getattr__, _, _back_end_names = attach(  # what a back end of another folder is made of
    __name__,
    {
        "comm.base": "base",
        "comm.calls": "CODES Call Header Run calls check_envelope envelope_bytes header_bytes "
        "pack pack_envelope "
        "tree_reduce unpack unpack_envelope",
        "comm.cores": "cores",
        "comm.device": "Exchanged",
        "comm.mock": "mock",
        "comm.peer": "PeerTransport",
        "comm.requests": "Message deadline",
        "comm.staged": "Met Staged",
    },
)
__all__ = [
    "DTYPES",
    "Communicator",
    "ReduceOp",
    "Request",
    "bfloat16",
    "adopt",
    "world",
    *_back_end_names,
]

ASKED = "ODYSSEY_BACKEND"  # what "auto" stands for, where that is not to be found out

# Modules of this package with a function `connect() -> Communicator`, all processes of the run.
_OVER_MPI = {"mpi": ".mpi", "nccl": ".nccl"}

_worlds: dict[str, Communicator] = {}


def world(backend: str = "auto") -> Communicator:
    """All processes of this run; the same object whenever it is asked for again.

    Args:
        backend: "local" for this process alone, "mpi", "shm", "nccl" or "gloo" for that, or "auto":
            MPI if a launcher (mpirun, srun) started several processes, Gloo if RANK, WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT say that there are several, and instead of either shared
            memory where all are on one machine; else local; whatever else ODYSSEY_BACKEND names.
            `why` of the result says what was picked. In a thread of `mock.run`, "auto" is the rank
            that this thread is.

    Raises ConfigError: the backend is unknown or not installed, or of several processes MPI sees
    only one.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"[comm] backend {backend!r} is unknown; choose from {', '.join(BACKENDS)}"
        )
    if backend == "auto":
        mocked = getattr(base.here, "world", None)
        if mocked is not None:
            return mocked
        if "auto" not in _worlds:
            picked, reason = _pick()
            if picked in ("mpi", "gloo") and not os.environ.get(ASKED):
                picked, reason = nearer(world(picked), reason)
            _worlds["auto"] = world(picked)
            _worlds["auto"].why += f"; {reason}"
        return _worlds["auto"]
    if backend not in _worlds:
        _open(backend, Communicator() if backend == "local" else _connect(backend))
    return _worlds[backend]


def _open(backend: str, comm: Communicator) -> None:
    _worlds[backend] = comm
    comm._is_world = True
    hooks.worlds.append(comm)
    for hook in hooks.on_world:
        hook(comm)


def adopt(over: Communicator, reason: str) -> Communicator:
    """All processes of this run from now on are those of `over`, which have met by means of
    their own; those of before are closed. Returns what `world` gives: shared memory in its
    place if all are on one machine.
    """
    for old in {_worlds.pop(name, None) for name in (over.name, "shm", "auto")} - {
        None,
        _worlds.get("local"),
    }:
        hooks.worlds.remove(old)
        old._is_world = False
        old.close()
    _open(over.name, over)
    picked, reason = (
        (over.name, reason) if os.environ.get(ASKED) == over.name else nearer(over, reason)
    )
    _worlds["auto"] = world(picked)
    _worlds["auto"].why += f"; {reason}"
    return _worlds["auto"]


def met() -> Communicator | None:
    """Returns what `world("auto")` has given to this process; None if it was not asked yet."""
    return _worlds.get("auto")


def _pick() -> tuple[str, str]:
    """(backend, why) that "auto" stands for here."""
    requested = os.environ.get(ASKED)
    if requested:
        if requested not in BACKENDS[1:]:
            raise ConfigError(
                f"[comm] {ASKED}={requested}; choose from {', '.join(BACKENDS[1:])}, or leave it "
                "out"
            )
        return requested, f"{ASKED} asks for it"
    return _detect_backend()


def _detect_backend() -> tuple[str, str]:
    """(backend, why) of what the environment says."""
    if line := launcher.leave_job_of_parent():
        print(f"odyssey: {line}", file=sys.stderr)
    launch = launcher.launched()
    if launch is not None and launch.size > 1:
        return "mpi", f"{launch.launcher} started {launch.size} processes"
    rendezvous = launcher.rendezvous()
    if launch is None and rendezvous is not None and rendezvous.size > 1:
        reason = f"WORLD_SIZE is {rendezvous.size} and there is no MPI launcher"
        for name in registry.provided("backends"):
            return name, reason
        raise ConfigError(
            f"[comm] {reason}, and no back end of this installation meets by MASTER_ADDR; use "
            "mpirun"
        )
    return "local", "no launcher" if launch is None else f"{launch.launcher} started one"


def nearer(over: Communicator, reason: str) -> tuple[str, str]:
    """Shared memory instead of MPI or Gloo if all ranks are on one machine.

    There is no size from which it does not pay: from 1 KB to 64 MB an all-reduce takes 0.2 to 0.75
    of the time of MPI_Allreduce on 2 and on 4 ranks of 2 cores (docs/log.md; single lines fall out
    on a busy machine).
    """
    if over.size == 1 or over.local_size < over.size:
        return over.name, reason
    try:
        world("shm")
    # on all ranks alike: too little shared memory, no kernels
    except (ConfigError, BuildError) as e:
        return over.name, f"{reason}; {e}"
    return "shm", reason


def _connect(backend: str) -> Communicator:
    if backend == "shm":
        over = world("gloo" if "gloo" in (_detect_backend()[0], *_worlds) else "mpi")
        return importlib.import_module(".shm", __name__).ShmCommunicator(over)
    launch = launcher.launched()
    if backend not in _OVER_MPI:
        place = ":".join(os.environ.get(name, "?") for name in launcher.RENDEZVOUS[2:])
        with announced(launcher.rendezvous() or launch, f"at {place}"):
            return registry.load("backends", backend).connect()
    limits.before_mpi(launch)
    try:
        with announced(launch, "in MPI_Init"):
            importlib.import_module(".mpi", __name__)
    except (ImportError, RuntimeError) as e:
        raise ConfigError(
            f"[comm] MPI cannot be loaded ({e}); pip install mpi4py mpich, or load your site's MPI"
        ) from e
    comm = importlib.import_module(_OVER_MPI[backend], __name__).connect()
    if launch is not None and launch.size > 1 and comm.size == 1:
        mpi = importlib.import_module(".mpi", __name__)
        variables = launcher.variables_of(launch)
        advice = (
            f"mpi4py loads {launcher.mpi_library(mpi.MPI.Get_library_version())}, and another MPI "
            f"started it, or nothing did; {mpi.mpirun_advice()}, or unset what a job has left "
            f"({variables})"
            if launch.mpi
            else "srun offers no PMI that MPI understands; use srun --mpi=pmi2 (MPICH) or "
            "--mpi=pmix (Open MPI), or "
            "mpirun inside the job (and for one process alone, unset SLURM_STEP_NUM_TASKS; "
            f"{variables})"
        )
        raise ConfigError(
            f"[comm] the launcher started {launch.size} processes but each sees a world of one: "
            f"{advice}"
        )
    return comm
