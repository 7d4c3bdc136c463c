"""How bytes move between processes: a communicator over mpi4py, or none at all for a world of one.

The only file that imports mpi4py, and only when a launcher started several processes (or backend="mpi" asks for it).
Buffers are C-contiguous NumPy arrays; nothing is pickled.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import ConfigError

BACKENDS = ("auto", "mpi", "local")

# What the launchers put into the environment: (rank, size, size on this node).
_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)


class Communicator:
    """A world of one: every operation is a no-op, and no MPI is needed."""

    rank = 0
    size = 1
    local_size = 1
    name = "local"

    def barrier(self) -> None:
        """Waits until all ranks are here."""

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Overwrites `array` on all ranks with that of `root`; returns it."""
        return array

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Overwrites `array` with the sum, max or min over ranks, in the library's own order; returns it."""
        _operation(op)
        return array

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, equal in shape, along a new first axis."""
        return array[None].copy()

    def all_to_all(
        self, send: np.ndarray, send_counts: Sequence[int], receive: np.ndarray, receive_counts: Sequence[int]
    ) -> None:
        """Sends consecutive pieces of `send` to ranks 0, 1, ... and receives theirs, in order. Counts in elements."""
        receive[: receive_counts[0]] = send[: send_counts[0]]

    def all_gather_pieces(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        """Fills all of `array`, of which rank r holds elements ranges[r]."""

    def abort(self, code: int) -> None:
        """Ends all ranks at once with an exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class MPICommunicator(Communicator):
    """A communicator over an mpi4py one."""

    name = "mpi"

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_size = node.Get_size()
        node.Free()

    def barrier(self) -> None:
        self._comm.Barrier()

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        self._comm.Bcast(array, root=root)
        return array

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        self._comm.Allreduce(self._mpi.IN_PLACE, array, op=getattr(self._mpi, _operation(op)))
        return array

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        out = np.empty((self.size, *array.shape), array.dtype)
        self._comm.Allgather(np.ascontiguousarray(array), out)
        return out

    def all_to_all(
        self, send: np.ndarray, send_counts: Sequence[int], receive: np.ndarray, receive_counts: Sequence[int]
    ) -> None:
        self._comm.Alltoallv([send, send_counts], [receive, receive_counts])

    def all_gather_pieces(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        counts, starts = [b - a for a, b in ranges], [a for a, _ in ranges]
        self._comm.Allgatherv(self._mpi.IN_PLACE, [array, counts, starts, self._mpi.FLOAT])

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(code)


def _operation(op: str) -> str:
    if op not in ("sum", "max", "min", "prod"):
        raise ConfigError(f"[comm] operation {op!r}; it must be sum, max, min or prod")
    return op.upper()


def launched() -> tuple[int, int, int] | None:
    """(rank, size, size on this node) that a launcher announced in the environment, or None."""
    for rank, size, local in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            here = os.environ.get(local, "")
            n = int(os.environ[size])
            return int(os.environ[rank]), n, int(here) if here.isdigit() else n
    return None


@functools.cache
def world(backend: str = "auto") -> Communicator:
    """All processes of this run.

    Args:
        backend: "local" for this process alone, "mpi" for MPI, "auto" for MPI if a launcher (mpirun, srun) started
            several processes.

    Raises:
        ConfigError: unknown backend, or a launcher started several processes and MPI sees only one.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"[comm] backend {backend!r} is unknown; choose from {', '.join(BACKENDS)}")
    found = launched()
    if backend == "local" or (backend == "auto" and (found is None or found[1] == 1)):
        return Communicator()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        raise ConfigError(
            f"[comm] MPI cannot be loaded ({e}); pip install mpi4py mpich, or load your site's MPI"
        ) from e
    comm = MPICommunicator(MPI, MPI.COMM_WORLD)
    if found is not None and found[1] > 1 and comm.size == 1:
        raise ConfigError(
            f"[comm] the launcher started {found[1]} processes but each sees a world of one: the mpirun in use and the "
            "MPI library of mpi4py are different; use the mpirun of this environment"
        )
    return comm
