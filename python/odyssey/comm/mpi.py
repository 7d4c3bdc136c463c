"""Ranks connected by MPI. The only file that imports mpi4py; buffer calls only, nothing is pickled.

Each group has two MPI communicators of its own, one for headers and one for data, so that neither meets calls that a
program makes on COMM_WORLD. A header goes to every other rank of the group by a persistent send (docs/communication.md
has what it costs); when all have come and agree, the data follow by the library's own collective.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Read by Open MPI when it starts: its UCX component for windows prints an error for every rank where there is no UCX
# device, and is passed over. A user's own choice is kept.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

_begun = time.time_ns()
from mpi4py import rc  # noqa: E402

# What mpi4py would do when MPI is imported is done here, after a look at the library: it would abort.
rc.finalize, rc.initialize = rc.initialize if rc.finalize is None else rc.finalize, False
from mpi4py import MPI  # noqa: E402

from ..base import launcher  # noqa: E402

if not MPI.Is_initialized():
    launcher.check_library(launcher.launched(), MPI.Get_library_version())
    MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
_started = time.time_ns()

from ..base import entry, slot  # noqa: E402
from ..base.proc import mapped  # noqa: E402
from ..errors import CollectiveError, ConfigError  # noqa: E402
from .base import Repeated  # noqa: E402
from .calls import (  # noqa: E402
    PREFIX,
    TAIL,
    Call,
    Header,
    ReduceOp,
    caller_location,
    check_envelope,
    describe,
    envelope_bytes,
    header_bytes,
    mismatch,
    pack,
    pack_envelope,
    unpack,
    unpack_envelope,
)
from .cores import cores  # noqa: E402
from .requests import Message, Request, Waiting, deadline  # noqa: E402
from .staged import Headed, Staged  # noqa: E402

STARTED = _begun, _started  # ns; between these MPI started, and its launcher made a file for it (run/start.py)

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MAX: MPI.MAX, ReduceOp.MIN: MPI.MIN, ReduceOp.PROD: MPI.PROD}
_NUMBERS = {
    np.dtype(name): getattr(MPI, mpi)
    for name, mpi in {
        "float32": "FLOAT",
        "float64": "DOUBLE",
        **{f"{sign}int{bits}": f"{sign}int{bits}_t".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }.items()
}
_FUNCTIONS = {  # of a kind of call: at once, and when it is done
    "broadcast": (MPI.Comm.Ibcast, MPI.Comm.Bcast),
    "reduce": (MPI.Comm.Ireduce, MPI.Comm.Reduce),
    "all_reduce": (MPI.Comm.Iallreduce, MPI.Comm.Allreduce),
    "scatter": (MPI.Comm.Iscatter, MPI.Comm.Scatter),
    "gather": (MPI.Comm.Igather, MPI.Comm.Gather),
    "all_gather": (MPI.Comm.Iallgather, MPI.Comm.Allgather),
    "reduce_scatter": (MPI.Comm.Ireduce_scatter_block, MPI.Comm.Reduce_scatter_block),
    "all_to_all": (MPI.Comm.Ialltoall, MPI.Comm.Alltoall),
    "all_to_all_v": (MPI.Comm.Ialltoallv, MPI.Comm.Alltoallv),
    "all_gather_v": (MPI.Comm.Iallgatherv, MPI.Comm.Allgatherv),
}
MEMORY_TAG = 32767  # above those of messages, which take two each; MPI promises so many
# Up to so many ranks each sends its data to each other itself (`_Repeated`); beyond that the library knows better ways.
NEAR = 32
_WORDS = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}  # for what is only moved


class _Heads:
    """A header of mine and those of the others, with the persistent requests that exchange them."""

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self.heads = np.zeros((size, header_bytes(size)), np.uint8)
        self.mine = self.heads[rank]
        others = [p for p in range(size) if p != rank]
        self.receives = {p: comm.Recv_init([self.heads[p], MPI.BYTE], p, 0) for p in others}
        self.requests = [*self.receives.values(), *(comm.Send_init([self.mine, MPI.BYTE], p, 0) for p in others)]
        self.prefix = memoryview(self.mine)[:PREFIX]
        self.prefixes = [memoryview(self.heads[p])[:PREFIX] for p in others]


class _Repeated(Headed):
    """A call that is made again and again (base.Repeated), and the request of its latest time.

    Header and data go at once, in persistent messages from each rank to each other: MPI has no way to look into data
    that it receives, but nothing is returned before all headers have come and agree. Messages of a call that differs
    may be left over, so the group is then over.
    """

    __slots__ = ("_header", "_heads", "_number_of", "_place", "_messages", "_all", "_own", "_ends", "_known")

    def __init__(self, comm: MPICommunicator, call: Call) -> None:
        super().__init__(comm, call, call.kind, -1)
        self._complete, self._all = True, []
        # Messages of two such calls do not meet: each has a tag, and all ranks count alike, or their headers differ.
        tag = 1 + comm._repeats % (MEMORY_TAG - 1)
        comm._repeats += 1
        dtype, shape, root, op, more = call.described
        text = f"again {tag}" if more is None else f"again {tag} of {str(more).replace(' ', '')}"
        call.described = (dtype, shape, root, op, text)
        self._header: Header | None = None
        me, size = comm.rank, comm.size
        self._heads = head = _Heads(comm._head, me, size)
        self._number_of = memoryview(head.mine)[:8].cast("q")
        self._place: tuple[str, int] = ("", 0)
        gives, takes = call.routes(me, size)
        self._own = None if call.send is call.out else (call.out[slice(*takes[me])], call.send[slice(*gives[me])])
        word, others = _WORDS[call.out.dtype.itemsize], [p for p in range(size) if p != me]
        self._messages = []
        for make, array, runs in ((comm._head.Recv_init, call.out, takes), (comm._head.Send_init, call.send, gives)):
            self._messages += [make([array[slice(*runs[p])], word], p, tag) for p in others if runs[p][0] < runs[p][1]]
        self._all = [*head.requests, *self._messages]
        self._ends = [
            memoryview(head.heads[p])[TAIL : TAIL + 16 * size * (call.kind == "all_to_all_v")] for p in others
        ]
        self._known: list[bytes] | None = None  # the tails of the others, once they agreed with mine
        comm._repeated_calls.add(self)

    def start(self) -> _Repeated:
        comm, call = self._comm, self.call
        if comm._broken is not None:
            raise comm._broken
        if not self._complete:
            raise CollectiveError(f"[comm] {self._text} is started again before it is complete; wait for it first")
        sequence, place = comm._sequence, caller_location(2)
        if place != self._place:
            self._place = place
            signature, self._text = describe(call.kind, call.described, *place)
            tail = (*call.send_counts, *call.receive_counts)
            self._header = Header(sequence, signature, self._text, tail, call.kind, repeated=True)
            pack(self._header, self._heads.mine)
        comm._sequence = sequence + 1
        self._sequence = self._number_of[0] = sequence
        slot.quick(sequence, comm._mark[0], self._text)
        self._result, self._error, self._complete, self.posted, self._suspect = None, None, False, False, 0
        comm._active.add(self)
        MPI.Prequest.Startall(self._all)
        if self._own is not None:
            self._own[0][...] = self._own[1]
        return self

    def test(self) -> bool:
        if self._complete:
            return True
        if not self.posted:
            if not MPI.Request.Testall(self._heads.requests):
                if self._comm._broken is None:
                    return False
                self._fail(self._comm._broken)
                return True
            wrong = self._differs()
            if wrong is not None:
                self._fail(wrong)  # it stays among the active: its messages are under way for ever
                return True
            self.posted = True
        if MPI.Request.Testall(self._messages):
            self._complete = True
            self._comm._active.discard(self)
        return self._complete

    def _differs(self) -> CollectiveError | None:
        """What is wrong, once all headers have come."""
        head = self._heads
        if self._known == self._ends and all(prefix == head.prefix for prefix in head.prefixes):
            return None
        comm, mine = self._comm, self._header._replace(sequence=self._sequence)
        headers = [unpack(h, mine) for h in head.heads]
        wrong = mismatch(headers, comm.ranks)
        if wrong is None:
            self._known = [bytes(tail) for tail in self._ends]
            return None
        return comm._different(wrong, headers)

    def _late(self) -> list[int]:
        return [] if self.posted else self._comm._missing(self._heads)

    def free(self) -> None:
        """Gives the requests back; not while they are under way."""
        requests, self._all = self._all, []
        for request in requests:
            request.Free()

    def __del__(self) -> None:
        if self._all and not MPI.Is_finalized():
            self.free()


class MPICommunicator(Staged):
    """A communicator over an mpi4py one, which it owns. Sums are added in the order of the library.

    Args:
        comm: an intra-communicator of mpi4py that nothing else uses.
        of: the communicator it is a part of; None for the world.
    """

    name = "mpi"

    def __init__(self, comm: Any, of: MPICommunicator | None = None) -> None:
        super().__init__()
        self._data, self._head = comm, comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.Get_rank(), node.Get_size()
        node.Free()
        self._heads: list[_Heads] = []  # not in use
        self._repeats = 0
        self._active: set[_Repeated] = set()
        self._repeated_calls: weakref.WeakSet[_Repeated] = weakref.WeakSet()
        self._receives: dict[tuple[int, int], deque[_Received]] = {}
        if of is None:
            self.ranks = tuple(range(self.size))
            self.why = f"mpi: {self.size} ranks, {launcher.mpi_library(MPI.Get_library_version())}"
            self._exits = _Exits(self)
            crowded = np.array([self.local_size > cores()], np.uint8)
            comm.Allreduce(MPI.IN_PLACE, crowded, MPI.MAX)
            self._crowded = bool(crowded[0])  # on all or none: a blocking call does not match one that is not
        else:
            theirs = comm.Get_group().Translate_ranks(range(self.size), of._data.Get_group())
            self.ranks = tuple(of.ranks[p] for p in theirs)
            self.why, self._exits, self._crowded = of.why, of._exits, of._crowded
        self._world_size = self._exits.size
        self._exits.communicators.add(self)

    # --- headers ---

    def _send_header(self, header: Header) -> _Heads:
        heads = self._heads.pop() if self._heads else _Heads(self._head, self.rank, self.size)
        pack(header, heads.mine)
        MPI.Prequest.Startall(heads.requests)
        return heads

    def _headers(self, heads: _Heads, mine: Header) -> list[Header] | None:
        if not MPI.Request.Testall(heads.requests):
            return None
        self._heads.append(heads)
        if not mine.tail and all(prefix == heads.prefix for prefix in heads.prefixes):
            return []
        return [unpack(head, mine) for head in heads.heads]

    def _missing(self, heads: _Heads) -> list[int]:
        return [p for p, request in heads.receives.items() if not request.Test()]

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        return [p for p in ranks if self._exits.ended(self.ranks[p])]

    # --- data ---

    def _post(self, call: Call, blocking: bool) -> Any:
        kind, send, out = call.kind, call.send, call.out
        if kind in ("barrier", "group"):
            return None  # that all headers came is all there is to it
        dtype = (send if send is not None else out).dtype
        mpi = _NUMBERS[dtype] if call.op is not None else _WORDS[dtype.itemsize]
        give = None if send is None else MPI.IN_PLACE if send is out else [send, mpi]
        take = None if out is None else [out, mpi]
        if kind == "all_to_all_v":
            give, take = [send, list(call.send_counts), mpi], [out, list(call.receive_counts), mpi]
        elif kind == "all_gather_v":
            take = [out, [b - a for a, b in call.ranges], [a for a, _ in call.ranges], mpi]
        arguments = [take] if kind == "broadcast" else [give, take]
        if call.op is not None:
            arguments.append(_OPS[call.op])
        if call.root >= 0:
            arguments.append(call.root)
        # Where ranks outnumber cores and all of them wait for this call, the blocking form is faster (docs/log.md).
        return _FUNCTIONS[kind][blocking](self._data, *arguments)

    def _posted(self, request: Any) -> bool:
        return request is None or request.Test()

    # --- one to one: an envelope that says what follows, then the data, on tags 2t + 1 and 2t ---

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> _Sent:
        return _Sent(self, array, dest, tag, envelope)

    def _recv(self, out: np.ndarray, source: int, tag: int, envelope: Header) -> _Received:
        return _Received(self, out, source, tag, envelope)

    def exchange_memory(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]
    ) -> Waiting:
        """Starts messages (rank, address, bytes) from and to memory that need not be the host's (device.py); without
        envelopes: those between two ranks are matched in the order given."""
        return _Memory(self, sends, receives)

    # --- groups and ends ---

    def _sub(self, members: tuple[int, ...]) -> MPICommunicator:
        group = self._data.Get_group()
        part = group.Incl(members)
        comm = self._data.Create_group(part)
        part.Free()
        group.Free()
        return MPICommunicator(comm, self)

    def window(self, size: int) -> Window:
        """Memory of `size` bytes on each rank that all of them see; all ranks call it."""
        return Window(self, size)

    def _repeated(self, make: Callable[[], Call]) -> Repeated | _Repeated:
        return _Repeated(self, make()) if 1 < self.size <= NEAR else super()._repeated(make)

    def meet_start(self) -> Request:
        return super().meet_start() if self._broken is None else _Meeting(self._exits.barrier())

    def unfinished(self) -> list[Waiting]:
        return [*super().unfinished(), *self._active]

    def _progress(self) -> None:
        """Calls in other groups go on. Receives that were started take their data when the envelope is there, or their
        senders could not go on."""
        super()._progress()
        for comm in self._exits.communicators:
            if not isinstance(comm, MPICommunicator):
                continue  # shared memory carries its messages over one of these
            for line in comm._receives.values():
                while line and line[0]._request.Test():
                    line.popleft()._open()

    def close(self) -> None:
        if self._is_world or self not in self._exits.communicators:
            return  # it ends with the process, or was closed before
        self._exits.communicators.discard(self)
        for heads in self._heads:
            for request in heads.requests:
                request.Free()
        self._heads.clear()
        for call in self._repeated_calls:
            call.free()
        self._head.Free()
        self._data.Free()
        self._closed()

    def abort(self, code: int) -> None:
        _abort(code)


def _abort(code: int) -> None:
    """Ends all ranks, without the files in shared memory that the library removes only at an orderly end."""
    sys.stdout.flush()
    sys.stderr.flush()
    _unname("mpich_shm_", "sm_segment.")
    if entry.hydra_abort(code):
        time.sleep(1)  # it ends this process
    MPI.COMM_WORLD.Abort(code)


def _unname(*names: str) -> None:
    """Removes the names of files in shared memory that the library has mapped here; the memory stays until all end."""
    for path in mapped():
        if path.startswith(tuple(f"/dev/shm/{name}" for name in names)):
            with contextlib.suppress(OSError):
                os.unlink(path)


class _Meeting(Request):
    """A barrier of MPI."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:
        super().__init__()
        self._complete, self._request = False, request

    def test(self) -> bool:
        self._complete = self._complete or bool(self._request.Test())
        return self._complete

    def _block(self) -> None:
        self._request.Wait()


class _Sent(Message):
    __slots__ = ("_array", "_envelope", "_requests")

    def __init__(self, comm: MPICommunicator, array: np.ndarray, dest: int, tag: int, envelope: Header) -> None:
        super().__init__(comm, envelope, dest)
        self._array, self._envelope = array, pack_envelope(envelope)
        self._requests = [
            comm._data.Isend([self._envelope, MPI.BYTE], dest, 2 * tag + 1),
            comm._data.Isend([array, _WORDS[array.dtype.itemsize]], dest, 2 * tag),
        ]

    def test(self) -> bool:
        if not self._complete and MPI.Request.Testall(self._requests):
            self._complete, self._array = True, None
        return self._complete


class _Received(Message):
    __slots__ = ("_out", "_envelope", "_mine", "_request", "_line", "_tag", "_wrong")

    def __init__(self, comm: MPICommunicator, out: np.ndarray, source: int, tag: int, mine: Header) -> None:
        super().__init__(comm, mine, source)
        self._out, self._mine, self._tag, self._wrong = out, mine, 2 * tag, None
        self._envelope = np.zeros(envelope_bytes(), np.uint8)
        self._request = comm._data.Irecv([self._envelope, MPI.BYTE], source, 2 * tag + 1)
        # Data must be received in the order of their envelopes: only the first of a line may read its envelope.
        self._line = comm._receives.setdefault((source, tag), deque())
        self._line.append(self)

    def test(self) -> bool:
        line = self._line
        while not self._complete and line and line[0]._request.Test():
            line.popleft()._open()
        if not self._complete and self._envelope is None and self._request.Test():
            if self._wrong:
                self._fail(CollectiveError(self._wrong))
            else:
                self._result, self._complete = self._out, True
            self._out = None
        return self._complete

    def _open(self) -> None:
        """Reads the envelope and has the data come into the array, or, if they do not fit, out of the way."""
        sent, text = unpack_envelope(self._envelope)
        self._envelope = None
        comm, source = self._comm, self._peer
        self._wrong = check_envelope(sent, text, self._out, self._mine, comm.ranks[source], comm.ranks[comm.rank])
        if self._wrong:
            status = MPI.Status()
            comm._data.Probe(source, self._tag, status)
            self._out = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._request = comm._data.Irecv([self._out, _WORDS[self._out.dtype.itemsize]], source, self._tag)

    def _late(self) -> Sequence[int]:
        return () if self._envelope is None else (self._peer,)  # behind an envelope the data are on their way


class _Memory(Waiting):
    __slots__ = ("_requests", "_peers")

    def __init__(
        self, comm: MPICommunicator, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]
    ) -> None:
        self._peers, data = sorted({p for p, _, _ in (*sends, *receives)}), comm._data
        names = ", ".join(str(comm.ranks[p]) for p in self._peers)
        super().__init__(comm, f"an exchange of device memory with rank {names}")
        self._requests = [
            *(data.Irecv([MPI.memory.fromaddress(at, n), MPI.BYTE], p, MEMORY_TAG) for p, at, n in receives),
            *(data.Isend([MPI.memory.fromaddress(at, n), MPI.BYTE], p, MEMORY_TAG) for p, at, n in sends),
        ]

    def test(self) -> bool:
        if not self._complete and MPI.Request.Testall(self._requests):
            self._complete = True
        return self._complete

    def _waited_for(self) -> tuple[int, str]:
        return 0, slot.ranges([self._comm.ranks[p] for p in self._peers])

    def _late(self) -> Sequence[int]:
        return self._peers


class _Exits:
    """Ranks that end tell the others, so that nobody waits for them until the deadline; and nobody hangs at the end.

    At the end of the interpreter each rank sends a notice to all others and waits for theirs, sleeping, before
    MPI_Finalize, which would wait as well, but on a core. A rank with an operation that never completed, or one that
    gave up waiting, cannot finalize: it ends all ranks with the exit code of a CollectiveError.
    """

    def __init__(self, world: MPICommunicator) -> None:
        self.owner = weakref.ref(world)
        self.rank, self.size = world.rank, world.size
        self.communicators: weakref.WeakSet[MPICommunicator] = weakref.WeakSet()
        self._alarm = world._data.Dup()
        if self.size > 1:
            atexit.register(self._leave, os.getpid())

    def ended(self, rank: int) -> bool:
        """Whether this world rank has said that it ends, in order."""
        return rank != self.rank and self._alarm.Iprobe(rank, 0)

    def barrier(self) -> Any:
        """Starts a barrier of all ranks of the world."""
        return self._alarm.Ibarrier()

    def _leave(self, process: int) -> None:
        if os.getpid() != process or MPI.Is_finalized():
            return
        code, why = entry.leaving()
        # Others may be late with a call of this rank, but they come; with one that fails they are not waited for long.
        until = time.monotonic() + (ALONE_S if code else deadline())
        for comm in list(self.communicators):
            known = comm._broken is not None
            if not known:
                self._wait_for_last(comm, until)
            if comm._broken is not None or comm.unfinished():
                sys.stdout.flush()
                if not known:
                    first = next((r.describe() for r in comm.unfinished()), "")
                    if code:
                        entry.end(code, f"{why}, while {first} is unfinished; all are ended", world=self.owner())
                    text = str(comm._broken or f"[comm] ends while {first} is unfinished")
                    print(f"odyssey: [rank {self.rank}] {text}", file=sys.stderr)
                    entry.record(CollectiveError.exit_code, text)
                sys.stderr.flush()
                time.sleep(0.5)  # the others say what they have to say, and the launcher reads it, before all is ended
                _abort(CollectiveError.exit_code)
        slot.phase("end")
        entry.record(code, why)
        others = [p for p in range(self.size) if p != self.rank]
        notes = np.zeros((self.size, 1), np.uint8)
        # On tag 1 of a rank that fails: it ends all itself, if the others do not do the same.
        requests = [self._alarm.Isend([notes[self.rank], MPI.BYTE], p, int(code != 0)) for p in others]
        requests += [self._alarm.Irecv([notes[p], MPI.BYTE], p, MPI.ANY_TAG) for p in others]
        nap, patience = 1e-5, time.monotonic() + ALONE_S
        while not MPI.Request.Testall(requests):
            if code and time.monotonic() > patience:
                line = f"{why}, and others go on; all are ended"
                entry.end(code, line, world=self.owner())
            time.sleep(nap)
            nap = min(1.5 * nap, 5e-3)

    def _wait_for_last(self, comm: MPICommunicator, until: float) -> None:
        """Waits for the calls of a group that are under way, as long as others may still come to them."""
        shown = None
        while (left := [r for r in comm.unfinished() if not r.test()]) and (now := time.monotonic()) <= until:
            if left[0] is not shown:  # the watcher is to see that this rank waits, and in what
                shown = left[0]
                slot.enter(shown._number(), shown.describe(), shown._waited_for())
            if until - now > LAST_S and any(map(self.ended, comm.ranks)):
                until = now + LAST_S
            time.sleep(1e-3)
        slot.leave()


LAST_S = 2.0  # what a rank that has ended had sent before has arrived by then
ALONE_S = 0.7  # a rank that ends with an exit code other than 0 waits so long for the others to do the same


class Window:
    """Memory that all ranks of a communicator see, `size` bytes from each; all of them make it and free it.

    addresses: where the part of each rank begins, in this process.
    """

    def __init__(self, comm: MPICommunicator, size: int) -> None:
        try:
            self._window = MPI.Win.Allocate_shared(size, 1, comm=comm._data)
        except MPI.Exception as problem:
            raise ConfigError(
                f"[comm] {size / 2**20:.0f} MiB of memory that ranks share cannot be had from this rank; look at the "
                "size of /dev/shm and the limits (ulimit -f, ulimit -v): `odyssey doctor` does"
            ) from problem
        self.addresses = [self._window.Shared_query(p)[0].address for p in range(comm.size)]

    def free(self) -> None:
        self._window.Free()


def connect() -> MPICommunicator:
    """All processes that MPI knows; called once per process."""
    world = MPI.COMM_WORLD.Dup()
    _unname("mpich_shm_")  # all ranks have it by now; MPICH would keep the name to the end, and a killed job leave it
    return MPICommunicator(world)


def finalize() -> None:
    """Ends MPI in a process whose end is not that of its interpreter (base/entry.py); nothing is called after."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
