"""Ranks of one machine, connected by memory that all of them see: a communicator over one of MPI
or Gloo.

Each rank has a segment of a window (shared_memory.py); all segments look alike:

    two headers     64 bytes each: number of the barrier, sequence and signature of the call
                    (Header)
    the counter     64 bytes, and 64 for the number of sleepers; only those of rank 0 are used
    two envelopes     whole headers, packed; written only for calls with a tail, and to explain a
                      mismatch
    two slots       SLOT bytes each: what this rank gives
    two results     a slot divided by the ranks: what this rank has added

Everything moves in *intervals* between barriers: what a rank writes before barrier k lies in places
number k mod 2, is read by the others between barriers k and k + 1, and written again after that. So
one barrier per piece of a slot's size is enough, for every operation, and memory does not depend on
the size of a message. At its first barrier a call compares the headers of all ranks; the check
costs no message of its own. Barriers, waiting and sums are in mojo/runtime/shared_reduce.mojo. Sums
are added along the fixed tree, whoever adds them: same bits for every rank count of a thread, and
on every call.

What it is not: a transport of its own for everything. `send` and `recv` go over the communicator
underneath, which also makes sub-groups. Ranks of several machines are refused.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base import slot
from ..base.hooks import process_space
from ..core import native
from ..errors import CollectiveError, ConfigError
from . import shared_memory
from .base import Communicator
from .calls import Call, Header, ReduceOp, caller_location, describe_call, header_bytes
from .cores import cores
from .requests import Collective, Message, Request, deadline
from .shared_memory import LINE, PAGE, process_ended, round_up
from .shm_collectives import DIRECT, DONE, SLOT, WAITING, SteppedCommunicator

# How long a wait stays in the kernel before Python looks at signals, other requests and the
# deadline.
SLICE_NS = 50_000_000
WAITED_NS = 100_000  # a sum that takes longer has waited, as a rule: status slots count it so
SHORT_NS = 20_000  # the same while calls of other groups are under way

# Looks at the counter before a rank gives its core away, about 100 us: a barrier takes 0.2 us if
# all are there. With more ranks than cores there is nothing to look for: who is waited for needs
# this core.
SPINS = 2000
YIELDS = 100

MAX_RANKS = 1024  # as in shared_reduce.mojo, where a sum has a table of so many addresses

# offsets, in bytes
_COUNTER = 128
_ENVELOPES = 256
_FLOAT = np.dtype(np.float32)

# Groups with calls under way: whoever waits for one moves the others on as well, as MPI would.
_active: set[ShmCommunicator] = set()
_messages: weakref.WeakSet[_Carried] = weakref.WeakSet()  # not complete
_moving = threading.RLock()  # of these messages: each thread that waits moves on all of them


class ShmCommunicator(SteppedCommunicator):
    """A communicator over shared memory; see the head of this file.

    over: the communicator of the same ranks underneath, which this one owns. of: the communicator
    it is a part of; None for the world. Raises ConfigError: the ranks are on several machines, or
    there is too little shared memory.
    """

    name = "shm"

    def __init__(self, over: Communicator, of: ShmCommunicator | None = None) -> None:
        super().__init__()
        self._over = over
        self.rank = over.rank
        self.size = over.size
        self.ranks = over.ranks
        self.local_rank = over.local_rank
        self.local_size = over.local_size
        if over.local_size != over.size:
            machines = int((over.all_gather(np.array([over.local_rank])) == 0).sum())
            raise ConfigError(
                f"[comm] backend 'shm' connects ranks of one machine, but {over.size} ranks are on "
                f"{machines} machines; use backend 'mpi' (or auto)"
            )
        if over.size > MAX_RANKS:
            raise ConfigError(
                f"[comm] backend 'shm' connects up to {MAX_RANKS} ranks, but {over.size} are "
                "running; use backend 'mpi'"
            )
        self._queue: deque[_Pending] = deque()
        self._lock = threading.RLock()
        self._attended = False  # a thread waits here, and moves its calls on
        self._library = native.library()
        self._signatures: dict[tuple[int, ...], tuple[int, str]] = {}
        self._windows: list[Any] = []
        if of is None:
            self._core_count = self._count_cores()
            self._crowded = self.size > self._core_count
            self.why = f"shm: {self.size} ranks on one machine"
        else:
            self._core_count = of._core_count
            self._crowded = of._crowded
            self.why = of.why
        self._world_size = over._world_size
        if over._exits is not None:
            over._exits.communicators[id(self)] = self
        self._create_segments()

    def _count_cores(self) -> int:
        """Returns the number of cores that at least one rank may use.

        Ranks that are bound to a core each are not crowded, although each of them sees one core.
        """
        if not hasattr(os, "sched_getaffinity"):
            return cores()
        core_mask = np.zeros(2048, np.uint8)
        core_mask[[core for core in os.sched_getaffinity(0) if core < len(core_mask)]] = 1
        return int(self._over.all_reduce(core_mask, "max").sum())

    def _create_segments(self) -> None:
        """Allocates the window, clears this rank's head, and waits until all ranks have done so.

        The layout of a segment is in the docstring of this module.
        """
        envelope = round_up(header_bytes(self.size), LINE)
        slots = round_up(_ENVELOPES + 2 * envelope, PAGE)
        result = SLOT // self.size // LINE * LINE + 2 * LINE  # as `_result` in shared_reduce.mojo
        self._processes = self._over.all_gather(np.array([os.getpid(), process_space()], np.int64))
        bases = self._allocate(slots + 2 * SLOT + 2 * result)
        native.memory(bases[self.rank], _ENVELOPES)[:] = 0

        def memory_at(rank: int, offset: int, size: int) -> np.ndarray:
            return native.memory(bases[rank] + offset, size)

        self._bases = np.array(bases, np.int64)
        self._heads = [
            memory_at(r, 0, 2 * LINE).view(np.int64).reshape(2, -1) for r in range(self.size)
        ]
        self._envelopes = [
            [
                memory_at(r, _ENVELOPES + i * envelope, envelope)[: header_bytes(self.size)]
                for i in range(2)
            ]
            for r in range(self.size)
        ]
        self._slots = [
            [memory_at(r, slots + i * SLOT, SLOT) for i in range(2)] for r in range(self.size)
        ]
        self._slot_addresses = [
            [bases[r] + slots + i * SLOT for r in range(self.size)] for i in range(2)
        ]
        self._team = native.Team(
            ranks=self.size,
            rank=self.rank,
            counter=bases[0] + _COUNTER,
            bases=self._bases.ctypes.data,
            slots=slots,
            slot_bytes=SLOT,
            barrier=0,
            spins=0 if self._crowded else SPINS,
            yields=YIELDS,
        )
        self._team_address = native.address(self._team)
        self._job = native.Job(item=4, dtype=0, op=0, direct=DIRECT)
        self._job_address = native.address(self._job)
        self._over.barrier()

    def shared(self, nbytes: int) -> list[np.ndarray]:
        """Memory that all ranks see: uint8 arrays of `nbytes` bytes, one per rank, each on a
        cache line of its own.

        All ranks call it with the same number. Who reads what another has written must pass a
        barrier in between. The memory lives as long as one of the arrays, on one of the ranks.
        Raises CollectiveError: the ranks give different numbers. ConfigError: there is not so much
        shared memory.
        """
        size = int(nbytes)
        self._run(Call("group", described=("", None, -1, None, f"shared {size} bytes")), True)
        arrays = shared_memory.share_nameless_files(self, self._processes, size)
        if arrays is None:  # a window, which lives as long as the group
            arrays = [native.memory(base, size) for base in self._allocate(size)]
        return arrays

    def _allocate(self, size: int) -> list[int]:
        window, addresses = shared_memory.allocate_window(self._over, self._processes, size)
        self._windows.append(window)
        return addresses

    # --- the short way: a sum of float32 that is waited for ---

    def all_reduce(
        self,
        array: np.ndarray,
        op: ReduceOp | str = "sum",
        out: np.ndarray | None = None,
        *,
        wait: bool = True,
    ) -> Any:
        if (
            op != "sum"
            or not wait
            or _active
            or _messages
            or self._broken is not None
            or type(array) is not np.ndarray
            or array.dtype is not _FLOAT
            or not array.flags.c_contiguous
            or not native.DATA
        ):
            return super().all_reduce(array, op, out, wait=wait)
        shape = array.shape
        if out is None:
            out = np.empty(shape, _FLOAT)
        elif out is not array and (
            type(out) is not np.ndarray
            or out.dtype is not _FLOAT
            or out.shape != shape
            or (array.nbytes > DIRECT and np.may_share_memory(array, out))
        ):
            return super().all_reduce(array, op, out, wait=wait)
        flags = out.flags
        if not (flags.c_contiguous and flags.writeable):
            return super().all_reduce(array, op, out, wait=wait)
        cached_signature = self._signatures.get(shape)
        signature, text = (
            self._cache_signature(shape) if cached_signature is None else cached_signature
        )
        sequence = self._sequence
        self._sequence = sequence + 1
        slot.note_short_call(sequence, self._mark[0], text)
        time_ns = time.monotonic_ns()
        state = self._library.shared_all_reduce_at_once(
            self._team_address,
            self._job_address,
            id(array) + native.DATA,
            id(out) + native.DATA,
            array.size,
            sequence,
            signature,
            SLICE_NS,
        )
        if state != DONE:
            return self._continue_sum(array, out, sequence, state)
        time_ns = time.monotonic_ns() - time_ns
        if time_ns > WAITED_NS:
            slot.count_wait(time_ns)
        return out

    def _cache_signature(self, shape: tuple[int, ...]) -> tuple[int, str]:
        """Returns signature and text of a sum of this shape, and keeps them for the next one.

        The text has no source line, because the next sum may be at another place.
        """
        if len(self._signatures) >= 4096:
            self._signatures.clear()
        signature, text = describe_call(
            "all_reduce", ("float32", shape, -1, "sum", None), *caller_location(1)
        )
        self._signatures[shape] = signature, text.rpartition(" at ")[0]
        return self._signatures[shape]

    def _continue_sum(
        self, array: np.ndarray, out: np.ndarray, sequence: int, state: int
    ) -> np.ndarray:
        """Continues a sum of the short way as an ordinary call, after its first slice of time.

        state: the result of the kernel so far: WAITING or DIFFERENT.
        """
        call = self._make_reduce("all_reduce", array, "sum", out)
        call.blocking = True
        signature_and_text = describe_call(call.kind, call.described, *caller_location(1))
        call.header = Header(sequence, *signature_and_text, (), call.kind, -1, True)
        job = native.Job.from_buffer_copy(self._job)
        pending = _Pending(self, call)
        pending.steps = self._all_reduce_steps(call, job, state)
        pending.job = next(pending.steps)
        with self._lock:
            self._queue.append(pending)
            _active.add(self)
        return pending.wait()

    # --- calls, step by step ---

    def _begin(self, call: Call) -> Request:
        if self.size == 1:
            return super()._begin(call)
        if call.send is not None:
            call.send = np.asarray(call.send)  # what was widened from no dimensions is no array
        pending = _Pending(self, call)
        with self._lock:
            self._queue.append(pending)
            _active.add(self)
            self._advance()
        return pending

    def _advance(self, nanoseconds: int = 0) -> bool:
        """Advances the calls of the queue in order; returns True if anything happened.

        It waits for at most `nanoseconds` in total.
        """
        moved = False
        library = self._library
        team = self._team_address
        with self._lock:
            while self._queue:
                head = self._queue[0]
                state = DONE
                if head.steps is None:
                    head.steps = self._steps(head.call)
                elif head.job is None:
                    state = library.shared_wait(team, nanoseconds)
                else:
                    state = library.shared_all_reduce(team, native.address(head.job), nanoseconds)
                if state == WAITING:
                    return moved
                moved = True
                nanoseconds = 0
                try:
                    head.job = head.steps.send(state if head.started else None)
                    head.started = True
                    continue
                except StopIteration:
                    head.finish()
                except CollectiveError as error:
                    head._fail(error)
                except Exception as error:  # this rank is no longer in step with the others
                    self._mark_broken(error)
                    raise
                self._queue.popleft()
            _active.discard(self)
        return moved

    # --- what MPI does underneath ---

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> Request:
        return _Carried(self, self._over._send(array, dest, tag, envelope), envelope, dest)

    def _recv(self, out: np.ndarray, source: int | None, tag: int, envelope: Header) -> Request:
        return _Carried(self, self._over._recv(out, source, tag, envelope), envelope, source)

    def _create_subgroup(self, members: tuple[int, ...]) -> ShmCommunicator:
        return ShmCommunicator(self._over._create_subgroup(members), self)

    def close(self) -> None:
        if self._is_world:
            return  # it ends with the process
        for window in self._windows:
            window.free()
        self._windows.clear()
        if self._over._exits is not None:
            self._over._exits.communicators.pop(id(self), None)
        self._over.close()
        self._mark_closed()

    def abort(self, code: int) -> None:
        self._over.abort(code)

    # --- who is missing ---

    def _mark_broken(self, error: BaseException) -> None:
        self._broken = self._over._broken = error
        with self._lock:
            for pending in self._queue:
                pending._fail(error)
            _active.discard(self)

    def _find_missing(self) -> list[int]:
        """Ranks that have not arrived at the barrier at which this rank waits."""
        number = self._team.barrier
        return [p for p, heads in enumerate(self._heads) if heads[number & 1, 0] != number]

    def _find_ended(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks that have said that they end, or whose processes are gone."""
        announced_ranks = self._over._find_ended(ranks)
        return [
            p
            for p in ranks
            if p in announced_ranks
            or (p != self.rank and process_ended(*self._processes[p].tolist()))
        ]


class _Pending(Collective):
    """A call under way: its generator, and the job of an all-reduce that it waits for."""

    __slots__ = ("steps", "job", "started")
    _spins = 0  # the library spins itself
    _looks = 1  # it did not arrive just before its end

    def __init__(self, comm: ShmCommunicator, call: Call) -> None:
        super().__init__(comm, call, call.header.text, call.header.sequence)
        self.steps = None
        self.job = None
        self.started = False

    def finish(self) -> None:
        """Completes the call after its last step."""
        self._result = self.call.result()
        self._complete = True
        self.call = self.steps = self.job = None

    def test(self) -> bool:
        if not self._complete:
            _advance_all()
        return self._complete

    def _test_until_complete(self) -> None:
        comm = self._comm
        start = time.monotonic()
        timeout = comm.timeout or deadline()
        look = start + 0.25
        comm._attended = True
        try:
            while not self._complete:
                others_attended = not _messages and all(
                    active_comm._attended for active_comm in tuple(_active)
                )
                if not others_attended:
                    _advance_all()
                if comm._advance(SLICE_NS if others_attended else SHORT_NS):
                    continue
                checked_at = time.monotonic()
                if checked_at - start > (allowed := self._allowed_seconds(timeout, start)):
                    self._give_up(self._describe_timeout(allowed))
                elif checked_at > look:
                    look = checked_at + 0.25
                    self._check_awaited()
        finally:
            comm._attended = False

    def _find_late(self) -> Sequence[int]:
        return self._comm._find_missing()


class _Carried(Message):
    """A message over MPI; whoever waits for it moves shared-memory calls on as well."""

    __slots__ = ("_inner",)

    def __init__(
        self, comm: ShmCommunicator, inner: Message, envelope: Header, peer: int | None
    ) -> None:
        super().__init__(comm, envelope, peer)
        self._inner = inner
        with _moving:
            _messages.add(self)

    def test(self) -> bool:
        if not self._complete:
            _advance_all()
        return self._complete

    def _poll_message(self) -> None:
        if self._follow(self._inner):
            _messages.discard(self)
        self.source = self._inner.source  # known by now, perhaps

    def _find_late(self) -> Sequence[int]:
        return self._inner._find_late()


def _advance_all() -> None:
    """Advances all calls and messages of this process.

    Other ranks may wait for a call that this rank does not wait for.
    """
    for comm in tuple(_active):
        # if the lock is taken, another thread does the same
        if comm._lock.acquire(blocking=False):
            try:
                comm._advance()
            finally:
                comm._lock.release()
    with _moving:
        for message in tuple(_messages):
            message._poll_message()
