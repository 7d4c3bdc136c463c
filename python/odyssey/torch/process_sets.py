"""Horovod's init, its process sets and its questions about ranks; horovod.py has them for users."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..comm import Communicator
from ..distributed import ProcessGroup, World, destroy_process_group
from ..errors import ConfigError


class ProcessSet(ProcessGroup):
    """Some of the ranks, for `process_set=`; usable once `init(process_sets=)` or
    `add_process_set` has made it.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        # type: ignore[assignment]
        self.ranks = sorted({int(r) for r in ranks})
        self.comm = None

    def included(self) -> bool:
        """Returns whether this process is one of them."""
        return rank() in self.ranks

    def _member(self, what: str) -> Communicator:
        if self.process_set_id is None:
            call = (
                "hvd.init()"
                if self is global_process_set
                else "hvd.add_process_set() of the process set"
            )
            raise ConfigError(f"[horovod] {what} before {call}; call it first, on all ranks")
        return super()._member(what)


global_process_set = ProcessSet(())
_number = itertools.count(1)


def init(comm: Any = None, process_sets: Iterable[ProcessSet | list[int]] | None = None) -> None:
    """Meets the other ranks. comm: None, or the list of all ranks; other subsets are process
    sets.
    """
    world_group = World()
    if comm is not None and list(comm) != list(world_group.ranks):
        raise ConfigError(
            "[horovod] init(comm=...) takes all ranks or None; use process_sets= for some of them"
        )
    every = global_process_set
    # type: ignore[assignment]
    every.ranks = list(world_group.ranks)
    every.comm = world_group.comm
    every.process_set_id = 0
    for process_set in process_sets or ():
        add_process_set(process_set)


def shutdown() -> None:
    """Ends the use of Horovod's names; the ranks stay connected until they end."""
    global_process_set.comm = global_process_set.process_set_id = None


def is_initialized() -> bool:
    """Returns whether init() was called."""
    return global_process_set.comm is not None


def add_process_set(process_set: ProcessSet | list[int]) -> ProcessSet:
    """Makes a group of ranks; all ranks call it."""
    group = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    group._open(group.ranks, world("add_process_set").group(group.ranks))
    group.process_set_id = next(_number)
    return group


def remove_process_set(process_set: ProcessSet) -> bool:
    """Gives a group of ranks back; all its ranks call it."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    destroy_process_group(process_set)
    process_set.process_set_id = None
    return True


def name_function(name: str, text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function its name and docstring, and returns it."""
    function.__name__ = name
    function.__doc__ = text
    return function


def _make_query(name: str, text: str, of: Callable[[Communicator], int]) -> Callable[[], int]:
    return name_function(name, text, lambda: of(world(name)))


world = global_process_set._member
rank = _make_query("rank", "This process's number, from 0.", lambda c: c.rank)
size = _make_query("size", "Number of processes.", lambda c: c.size)
local_rank = _make_query(
    "local_rank", "This process's number on its machine.", lambda c: c.local_rank
)
local_size = _make_query("local_size", "Processes on this machine.", lambda c: c.local_size)
# where all machines have as many ranks:
cross_rank = _make_query("cross_rank", "This machine's number.", lambda c: c.rank // c.local_size)
cross_size = _make_query("cross_size", "Number of machines.", lambda c: -(-c.size // c.local_size))


def is_homogeneous() -> bool:
    """Returns whether all machines have as many ranks; asks them."""
    return (
        len(set(world("is_homogeneous").all_gather(np.array([local_size()]))[:, 0].tolist())) == 1
    )


mpi_built = mpi_enabled = mpi_threads_supported = name_function(
    "mpi_built", "True: ranks meet by MPI.", lambda: True
)
gloo_built = name_function("gloo_built", "False: no other way of Horovod's is here.", lambda: False)
gloo_enabled = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = gloo_built
