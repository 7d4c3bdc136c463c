"""Ranks of one machine, connected by memory that all of them see: a communicator over an MPI shared-memory window.

Each rank has a segment of the window; all segments look alike:

    two headers     64 bytes each: number of the barrier, sequence and signature of the call (Header)
    the counter     64 bytes, and 64 for the number of sleepers; only those of rank 0 are used
    two letters     whole headers, packed; written only for calls with a tail, and to explain a mismatch
    two slots       SLOT bytes each: what this rank gives
    two results     a slot divided by the ranks: what this rank has added

Everything moves in *intervals* between barriers: what a rank writes before barrier k lies in places number k mod 2, is
read by the others between barriers k and k + 1, and written again after that. So one barrier per piece of a slot's size
is enough, for every operation, and memory does not depend on the size of a message. At its first barrier a call
compares the headers of all ranks; the check costs no message of its own. Barriers, waiting and sums are in
mojo/kernels/shared_reduce.mojo. Sums are added along the fixed tree, whoever adds them: same bits for every rank count
of a thread, and on every call.

What it is not: a transport of its own for everything. `send` and `recv` go over the MPI communicator underneath, which
also makes sub-groups. Ranks of several machines are refused.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from .. import native
from ..errors import CollectiveError, ConfigError
from ..watch import slot
from . import mpi
from .base import Communicator, Request, Waiting, cores, deadline, did_not_come, site
from .calls import DTYPES, Call, Header, ReduceOp, describe, header_bytes, pack, piece, unpack, verdict

# Bytes of a slot. What is copied in is added before the cache has forgotten it, so it must not be large; each piece
# costs a barrier, which is cheap while all ranks have a core and dear while other programs take theirs, so it must not
# be small. On a quiet machine 512 KiB to 1 MiB were best, on a busy one 1 to 2 MiB (docs/log.md).
SLOT = 1 << 20

# Up to this many bytes every rank adds everything itself: one barrier instead of three, but all data is read by all.
DIRECT = 32 << 10

# How long a wait stays in the kernel before Python looks at signals, other requests and the deadline.
SLICE_NS = 50_000_000
WAITED_NS = 100_000  # a sum that takes longer has waited, as a rule: status slots count it so
SHORT_NS = 20_000  # the same while calls of other groups are under way

# Looks at the counter before a rank gives its core away, about 100 us: a barrier takes 0.2 us if all are there. With
# more ranks than cores there is nothing to look for: who is waited for needs this core.
SPINS, YIELDS = 2000, 100

MAX_RANKS = 1024  # as in shared_reduce.mojo, where a sum has a table of so many addresses

DONE, WAITING, DIFFERENT = range(3)
_HEADER, _COUNTER, _LETTERS = 64, 128, 256  # bytes; offsets
_PAGE = 4096
_TYPES = {
    DTYPES[name]: code
    for code, name in enumerate("float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())
}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
_FLOAT = np.dtype(np.float32)

# Groups with calls under way: whoever waits for one moves the others on as well, as MPI would.
_active: set[ShmCommunicator] = set()
_messages: weakref.WeakSet[_Carried] = weakref.WeakSet()  # not complete
_lock = threading.RLock()

Steps = Generator[Any, int, None]


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class ShmCommunicator(Communicator):
    """A communicator over shared memory; see the head of this file.

    Args:
        over: the MPI communicator of the same ranks, which this one owns.
        of: the communicator it is a part of; None for the world.

    Raises:
        ConfigError: the ranks are on several machines, or there is too little shared memory.
    """

    name = "shm"

    def __init__(self, over: mpi.MPICommunicator, of: ShmCommunicator | None = None) -> None:
        super().__init__()
        self._over = over
        self.rank, self.size, self.ranks = over.rank, over.size, over.ranks
        self.local_rank, self.local_size = over.local_rank, over.local_size
        if over.local_size != over.size:
            raise ConfigError(
                f"[comm] backend 'shm' connects ranks of one machine, but {over.size} ranks are on "
                f"{_machines(over)} machines; use backend 'mpi' (or auto)"
            )
        if over.size > MAX_RANKS:
            raise ConfigError(
                f"[comm] backend 'shm' connects up to {MAX_RANKS} ranks, but {over.size} are running; use backend 'mpi'"
            )
        self._queue: deque[_Pending] = deque()
        self._library = native.library()
        self._signatures: dict[tuple[int, ...], tuple[int, str]] = {}
        self._windows: list[mpi.Window] = []
        if of is None:
            self._core_count = self._all_cores()
            self._crowded = self.size > self._core_count
            self.why = f"shm: {self.size} ranks on one machine"
        else:
            self._core_count, self._crowded, self.why = of._core_count, of._crowded, of.why
        self._is_world, self._world_size = of is None, over._world_size
        over._exits.communicators.add(self)
        self._lay_out()

    def _all_cores(self) -> int:
        """Cores that at least one rank may use: ranks that are bound to a core each are not crowded."""
        if not hasattr(os, "sched_getaffinity"):
            return cores()
        mine = np.zeros(2048, np.uint8)
        mine[[core for core in os.sched_getaffinity(0) if core < len(mine)]] = 1
        return int(self._over.all_reduce(mine, "max").sum())

    def _lay_out(self) -> None:
        """Makes the window, clears the heads of the segments and waits until all have."""
        letter = _up(header_bytes(self.size), _HEADER)
        slots = _up(_LETTERS + 2 * letter, _PAGE)
        result = SLOT // self.size // _HEADER * _HEADER + 2 * _HEADER  # as `_result` in shared_reduce.mojo
        bases = self._window(slots + 2 * SLOT + 2 * result)
        native.memory(bases[self.rank], _LETTERS)[:] = 0

        def memory(rank: int, offset: int, size: int) -> np.ndarray:
            return native.memory(bases[rank] + offset, size)

        self._bases = np.array(bases, np.int64)
        self._heads = [memory(r, 0, 2 * _HEADER).view(np.int64).reshape(2, -1) for r in range(self.size)]
        self._letters = [
            [memory(r, _LETTERS + i * letter, letter)[: header_bytes(self.size)] for i in range(2)]
            for r in range(self.size)
        ]
        self._slots = [[memory(r, slots + i * SLOT, SLOT) for i in range(2)] for r in range(self.size)]
        self._slot_addresses = [[bases[r] + slots + i * SLOT for r in range(self.size)] for i in range(2)]
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
        self._processes = self._over.all_gather(np.array([os.getpid(), _process_space()], np.int64))
        self._over.barrier()

    def _window(self, size: int) -> list[int]:
        """Shared memory of `size` bytes on each rank; all ranks call it. Addresses of whole cache lines."""
        size = _up(size + _HEADER, _PAGE)
        free = int(self._over.all_reduce(np.array([_free()]), "min")[0])
        if size * self.size > free:
            raise ConfigError(
                f"[comm] {self.size} ranks need {size * self.size >> 20} MiB of shared memory, but /dev/shm has "
                f"{free >> 20} MiB left; make it larger (docker run --shm-size), or use backend 'mpi'"
            )
        window = mpi.Window(self._over, size)
        self._windows.append(window)
        return [_up(address, _HEADER) for address in window.addresses]

    def shared(self, nbytes: int) -> list[np.ndarray]:
        """Memory that all ranks see: uint8 arrays of `nbytes` bytes, one per rank, each on a cache line of its own.

        All ranks call it with the same number. Who reads what another has written must pass a barrier in between. The
        memory lives as long as one of the arrays, on one of the ranks.

        Raises:
            CollectiveError: the ranks give different numbers.
            ConfigError: there is not so much shared memory.
        """
        size = int(nbytes)
        self._now(Call("group", described=("", None, -1, None, f"shared {size} bytes")))
        found = self._anonymous(size)
        if found is None:  # a window, which lives as long as the group
            found = [native.memory(base, size) for base in self._window(size)]
        return found

    def _anonymous(self, size: int) -> list[np.ndarray] | None:
        """Files without a name: no rank that ends in whatever way leaves one behind. None where that does not work.

        The others open them through the number of the process, so all must agree on what these numbers mean.
        """
        handle, mine = -1, [os.getpid(), -1, 0]
        try:
            handle = os.memfd_create("odyssey")
            os.ftruncate(handle, _up(max(size, 1), _PAGE))
            mine[1:] = handle, os.fstat(handle).st_ino
        except (AttributeError, OSError, OverflowError):
            pass
        places = self.all_gather(np.array(mine))
        maps: list[mmap.mmap] = []
        try:
            for (process, number, inode), (_, space) in zip(places.tolist(), self._processes.tolist(), strict=True):
                if number < 0 or not space or space != _process_space():
                    break
                theirs = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
                try:
                    if os.fstat(theirs).st_ino == inode:
                        maps.append(mmap.mmap(theirs, _up(max(size, 1), _PAGE)))
                finally:
                    os.close(theirs)
        except (OSError, OverflowError, ValueError):
            pass
        complete = self.all_reduce(np.array([len(maps) == self.size], np.int8), "min")[0]
        if handle >= 0:
            os.close(handle)  # all have opened it
        return [np.frombuffer(m, np.uint8)[:size] for m in maps] if complete else None

    # --- the short way: a sum of float32 that is waited for ---

    def all_reduce(self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None) -> np.ndarray:
        if (
            op != "sum"
            or _active
            or _messages
            or self._broken is not None
            or type(array) is not np.ndarray
            or array.dtype is not _FLOAT
            or not array.flags.c_contiguous
            or not native.DATA
        ):
            return super().all_reduce(array, op, out)
        shape = array.shape
        if out is None:
            out = np.empty(shape, _FLOAT)
        elif out is not array:
            if (
                type(out) is not np.ndarray
                or out.dtype is not _FLOAT
                or out.shape != shape
                or (array.nbytes > DIRECT and np.may_share_memory(array, out))
            ):
                return super().all_reduce(array, op, out)
        flags = out.flags
        if not (flags.c_contiguous and flags.writeable):
            return super().all_reduce(array, op, out)
        known = self._signatures.get(shape)
        signature, text = self._signature(shape) if known is None else known
        sequence = self._sequence
        self._sequence = sequence + 1
        slot.quick(sequence, self._mark[0], text)
        begun = time.monotonic_ns()
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
            return self._go_on(array, out, sequence, state)
        begun = time.monotonic_ns() - begun
        if begun > WAITED_NS:
            slot.waited(begun)
        return out

    def _signature(self, shape: tuple[int, ...]) -> tuple[int, str]:
        """Of a sum; and what it is, without the place, which may be another the next time."""
        if len(self._signatures) >= 4096:
            self._signatures.clear()
        signature, text = describe("all_reduce", ("float32", shape, -1, "sum", None), *site(1))
        self._signatures[shape] = signature, text.rpartition(" at ")[0]
        return self._signatures[shape]

    def _go_on(self, array: np.ndarray, out: np.ndarray, sequence: int, state: int) -> np.ndarray:
        """The short way did not get to its end in one slice: from here on it is a call like others."""
        call = self._reduce("all_reduce", array, "sum", out)
        call.blocking = True
        call.header = Header(sequence, *describe(call.kind, call.described, *site(1)), (), call.kind, -1, True)
        job = native.Job.from_buffer_copy(self._job)
        pending = _Pending(self, call)
        pending.steps = self._all_reduce_steps(call, job, state)
        pending.job = next(pending.steps)
        with _lock:
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
        with _lock:
            self._queue.append(pending)
            _active.add(self)
            self._advance()
        return pending

    def _advance(self, pending: Any = None, nanoseconds: int = 0) -> bool:
        """Moves the first call of the queue on, and the next when it is complete; True if anything happened.

        At most one wait takes `nanoseconds`.
        """
        moved = False
        library, team = self._library, self._team_address
        with _lock:
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
                moved, nanoseconds = True, 0
                try:
                    head.job = head.steps.send(state if head.begun else None)
                    head.begun = True
                    continue
                except StopIteration:
                    head.finish()
                except CollectiveError as error:
                    head._fail(error)
                except Exception as error:  # this rank is no longer in step with the others
                    self._broke(error)
                    raise
                self._queue.popleft()
            _active.discard(self)
        return moved

    def _steps(self, call: Call) -> Steps:
        """The steps of a call: writes before a barrier, yields to wait for it, reads after it.

        Yields None to wait for the barrier at which it has arrived, or the job of an all-reduce; gets the state back.
        """
        if call.kind in ("all_reduce", "reduce"):
            job = native.Job(
                x=call.send.ctypes.data,
                y=0 if call.out is None else call.out.ctypes.data,
                count=call.send.size,
                item=call.send.itemsize,
                dtype=_TYPES[call.send.dtype],
                op=_OPS[call.op],
                direct=DIRECT,
                sequence=call.header.sequence,
                signature=call.header.signature,
            )
            return self._all_reduce_steps(call, job, None)
        return getattr(self, f"_{call.kind}_steps")(call)

    def _all_reduce_steps(self, call: Call, job: native.Job, state: int | None) -> Steps:
        if state is None or state == WAITING:
            state = yield job
        if state == DIFFERENT:
            yield from self._explain(call)

    def _meet(self, call: Call) -> Steps:
        """One barrier."""
        self._library.shared_arrive(self._team_address, call.header.sequence, call.header.signature)
        state = yield None
        if state == DIFFERENT:
            yield from self._explain(call)

    def _explain(self, call: Call) -> Steps:
        """All ranks have seen that their headers differ: they show each other the whole of them. Raises the error."""
        headers = yield from self._exchange(call, -1, -1)
        error = CollectiveError(verdict(headers, self.ranks) or f"[comm] the calls of the ranks differ in {call.kind}")
        error.everywhere = len(self.ranks) == self._world_size
        raise error

    def _exchange(self, call: Call, sequence: int, signature: int) -> Generator[Any, int, list[Header]]:
        """The headers of all ranks."""
        pack(call.header, self._letters[self.rank][self._next])
        self._library.shared_arrive(self._team_address, sequence, signature)
        state = yield None
        if state == DIFFERENT:
            yield from self._explain(call)
        return [unpack(letters[self._last], call.header) for letters in self._letters]

    @property
    def _next(self) -> int:
        """Number of the places to write in before the coming barrier."""
        return (self._team.barrier + 1) & 1

    @property
    def _last(self) -> int:
        """Number of the places to read from after the barrier that was passed."""
        return self._team.barrier & 1

    def _barrier_steps(self, call: Call) -> Steps:
        yield from self._meet(call)

    _group_steps = _barrier_steps

    def _broadcast_steps(self, call: Call) -> Steps:
        data = _bytes(call.out)
        for a in _pieces(data.size, SLOT):
            part = data[a : a + SLOT]
            if self.rank == call.root:
                self._slots[self.rank][self._next][: part.size] = part
            yield from self._meet(call)
            if self.rank != call.root:
                part[:] = self._slots[call.root][self._last][: part.size]

    def _gather_steps(self, call: Call) -> Steps:
        data = _bytes(call.send)
        rows = None if call.out is None else _bytes(call.out).reshape(self.size, -1)
        for a in _pieces(data.size, SLOT):
            part = data[a : a + SLOT]
            self._slots[self.rank][self._next][: part.size] = part
            yield from self._meet(call)
            if rows is not None:
                for row, slots in zip(rows, self._slots, strict=True):
                    row[a : a + SLOT] = slots[self._last][: part.size]

    _all_gather_steps = _gather_steps

    @property
    def _share(self) -> int:
        """Bytes of a slot for each rank, where a rank has something else for each."""
        return SLOT // self.size // _HEADER * _HEADER

    def _put(self, rows: np.ndarray, a: int) -> None:
        """Bytes a to a + share of row p into my slot's part for rank p."""
        part = rows[:, a : a + self._share]
        slot = self._slots[self.rank][self._next]
        slot[: self.size * self._share].reshape(self.size, -1)[:, : part.shape[1]] = part

    def _scatter_steps(self, call: Call) -> Steps:
        headers = yield from self._exchange(call, call.header.sequence, call.header.signature)
        wrong = verdict(headers, self.ranks)
        if wrong:
            raise CollectiveError(wrong)
        call.place(*piece(headers[call.root].tail))
        data = _bytes(call.out)
        rows = None if call.send is None else _bytes(call.send).reshape(self.size, -1)
        for a in _pieces(data.size, self._share):
            if rows is not None:
                self._put(rows, a)
            yield from self._meet(call)
            part = data[a : a + self._share]
            at = self.rank * self._share
            part[:] = self._slots[call.root][self._last][at : at + part.size]

    def _reduce_scatter_steps(self, call: Call) -> Steps:
        rows = _bytes(call.send).reshape(self.size, -1)
        item = call.send.itemsize
        for a in _pieces(rows.shape[1], self._share):
            self._put(rows, a)
            yield from self._meet(call)
            count = min(self._share, rows.shape[1] - a) // item
            if count:
                at = self.rank * self._share
                buffers = np.array(self._slot_addresses[self._last], np.int64) + at
                self._library.shared_reduce(
                    call.out.ctypes.data + a,
                    buffers.ctypes.data,
                    self.size,
                    count,
                    _TYPES[call.send.dtype],
                    _OPS[call.op],
                )

    def _all_to_all_steps(self, call: Call) -> Steps:
        rows, received = (_bytes(array).reshape(self.size, -1) for array in (call.send, call.out))
        for a in _pieces(rows.shape[1], self._share):
            self._put(rows, a)
            yield from self._meet(call)
            width = min(self._share, rows.shape[1] - a)
            at = self.rank * self._share
            for row, slots in zip(received, self._slots, strict=True):
                row[a : a + width] = slots[self._last][at : at + width]

    def _all_to_all_v_steps(self, call: Call) -> Steps:
        headers = yield from self._exchange(call, call.header.sequence, call.header.signature)
        wrong = verdict(headers, self.ranks)
        if wrong:
            raise CollectiveError(wrong)
        item, share = call.send.itemsize, self._share
        send, received = _bytes(call.send), _bytes(call.out)
        gives, wants = _ranges(call.send_counts, item), _ranges(call.receive_counts, item)
        longest = max(max(header.tail[: self.size]) for header in headers) * item
        for a in _pieces(longest, share) if longest else ():
            slot = self._slots[self.rank][self._next]
            for p, (lo, hi) in enumerate(gives):
                part = send[lo + a : min(hi, lo + a + share)]
                slot[p * share : p * share + part.size] = part
            yield from self._meet(call)
            for (lo, hi), slots in zip(wants, self._slots, strict=True):
                part = received[lo + a : min(hi, lo + a + share)]
                at = self.rank * share
                part[:] = slots[self._last][at : at + part.size]

    def _all_gather_v_steps(self, call: Call) -> Steps:
        data, item = _bytes(call.out), call.out.itemsize
        ranges = [(a * item, b * item) for a, b in call.ranges]
        lo, hi = ranges[self.rank]
        for a in _pieces(max(b - a for a, b in ranges), SLOT):
            part = data[lo + a : min(hi, lo + a + SLOT)] if lo + a < hi else data[:0]
            self._slots[self.rank][self._next][: part.size] = part
            yield from self._meet(call)
            for p, (first, end) in enumerate(ranges):
                if p != self.rank and first + a < end:
                    part = data[first + a : min(end, first + a + SLOT)]
                    part[:] = self._slots[p][self._last][: part.size]

    # --- what MPI does underneath ---

    def _send(self, array: np.ndarray, dest: int, tag: int, letter: Header) -> Request:
        return _Carried(self, self._over._send(array, dest, tag, letter))

    def _recv(self, out: np.ndarray, source: int, tag: int, letter: Header) -> Request:
        return _Carried(self, self._over._recv(out, source, tag, letter))

    def _sub(self, members: tuple[int, ...]) -> ShmCommunicator:
        return ShmCommunicator(self._over._sub(members), self)

    def close(self) -> None:
        if self._is_world:
            return  # it ends with the process
        for window in self._windows:
            window.free()
        self._windows.clear()
        self._over._exits.communicators.discard(self)
        self._over.close()
        self._closed()

    def abort(self, code: int) -> None:
        self._over.abort(code)

    # --- who is missing ---

    def _broke(self, error: BaseException) -> None:
        self._broken = self._over._broken = error
        with _lock:
            for pending in self._queue:
                pending._fail(error)
            _active.discard(self)

    def unfinished(self) -> list[Waiting]:
        """Calls under way."""
        return list(self._queue)

    def _missing(self) -> list[int]:
        """Ranks that have not arrived at the barrier at which this rank waits."""
        k = self._team.barrier
        return [p for p, heads in enumerate(self._heads) if heads[k & 1, 0] != k]

    def _ended(self, rank: int) -> bool:
        """Whether a rank of this group has said that it ends, or its process is gone."""
        if rank == self.rank:
            return False
        if self._over._gone([rank]):
            return True
        process, space = (int(n) for n in self._processes[rank])
        if not space or space != _process_space():
            return False
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


class _Pending(Waiting):
    """A call under way: its generator, and the job of an all-reduce that it waits for."""

    __slots__ = ("call", "steps", "job", "begun", "_text", "_suspect", "_sequence")
    _spins = 0  # the library spins itself

    def __init__(self, comm: ShmCommunicator, call: Call) -> None:
        super().__init__(comm)
        self.call, self.steps, self.job, self.begun = call, None, None, False
        self._text, self._suspect, self._sequence = call.header.text, 0, call.header.sequence

    def finish(self) -> None:
        self._result, self._complete = self.call.result(), True
        self.call = self.steps = self.job = None

    def test(self) -> bool:
        if not self._complete:
            _move()
        return self._complete

    def _number(self) -> int:
        return self._sequence

    def _test_on(self) -> None:
        comm = self._comm
        start = time.monotonic()
        timeout = deadline()
        look = start + 0.25
        while not self._complete:
            alone = len(_active) == 1 and not _messages
            if not alone:
                _move()
            if comm._advance(nanoseconds=SLICE_NS if alone else SHORT_NS):
                continue
            now = time.monotonic()
            if now - start > timeout:
                self._fail(CollectiveError(f"[comm] waited {timeout:g} s in {self._text}: {self._absent()}"))
                comm._broke(self._error)
            elif now > look:
                look = now + 0.25
                self._look()

    def _absent(self) -> str:
        comm = self._comm
        return did_not_come([comm.ranks[p] for p in comm._missing()])

    def _look(self) -> bool:
        comm = self._comm
        missing = comm._missing()
        slot.missing([comm.ranks[p] for p in missing])
        gone = [comm.ranks[p] for p in missing if comm._ended(p)]
        self._suspect += bool(gone)
        if self._suspect > 1:  # seen twice: it did not arrive just before its end
            names = ", ".join(map(str, gone))
            self._fail(CollectiveError(f"[comm] rank {names} has ended; {self._text} waits for it for ever"))
            comm._broke(self._error)
        return bool(gone)

    def describe(self) -> str:
        return self._text


class _Carried(Waiting):
    """A message over MPI; whoever waits for it moves shared-memory calls on as well."""

    __slots__ = ("_inner",)

    def __init__(self, comm: ShmCommunicator, inner: Waiting) -> None:
        super().__init__(comm)
        self._inner = inner
        _messages.add(self)

    def test(self) -> bool:
        if not self._complete:
            _move()
        return self._complete

    def _try(self) -> None:
        if self._inner.test():
            self._result, self._error, self._complete = self._inner._result, self._inner._error, True
            _messages.discard(self)

    def _waited_for(self) -> tuple[int, str]:
        return self._inner._waited_for()

    def describe(self) -> str:
        return self._inner.describe()

    def _absent(self) -> str:
        return self._inner._absent()

    def _look(self) -> bool:
        return self._inner._look()


def _free() -> int:
    """Bytes left where shared memory comes from; very many where that is not known."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 2**62
    return found.f_bavail * found.f_frsize


def _machines(over: mpi.MPICommunicator) -> int:
    return int((over.all_gather(np.array([over.local_rank])) == 0).sum())


def _move() -> None:
    """Moves on what is under way in this process: a rank that waits for one thing must not hold up another."""
    for comm in tuple(_active):
        comm._advance()
    for message in tuple(_messages):
        message._try()


def _bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array as uint8."""
    return array.reshape(-1).view(np.uint8)


def _pieces(size: int, step: int) -> Sequence[int]:
    """Where the pieces of `size` bytes begin; there is at least one, as every call has a barrier."""
    return range(0, size, step) if size else (0,)


def _ranges(counts: Sequence[int], item: int) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *counts]) * item
    return [(int(a), int(b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _process_space() -> int:
    """Names the space in which process numbers mean something; 0 where that is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def connect() -> ShmCommunicator:
    """All processes that MPI knows, over the world of backend "mpi"; called once per process.

    Raises:
        ConfigError: they are on several machines, or there is too little shared memory.
    """
    from . import world

    return ShmCommunicator(world("mpi"))
