"""Ranks connected by MPI.

The only file that imports mpi4py; buffer calls only, nothing is pickled.

Each group has two MPI communicators of its own, one for headers and one for data, so that neither
meets calls that a program makes on COMM_WORLD. The ranks learn in rounds of persistent messages
(call_checks.py; its costs are in docs/communication.md) whether they make the same call; if so, the
data follow by the library's own collective.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Read by Open MPI when it starts: its UCX component for windows prints an error for every rank
# where there is no UCX device, and is passed over. A user's own choice is kept.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

_import_started = time.time_ns()
from mpi4py import rc  # noqa: E402

# What mpi4py would do when MPI is imported is done here, after a look at the library: it would
# abort.
rc.finalize = rc.initialize if rc.finalize is None else rc.finalize
rc.initialize = False
from mpi4py import MPI  # noqa: E402

from ..base import launcher, mpi_programs  # noqa: E402
from ..base.proc import mpi_file  # noqa: E402


def mpirun_advice() -> str:
    """Returns what starts ranks with the MPI library of this process, for a message."""
    library = launcher.mpi_library(MPI.Get_library_version())
    return mpi_programs.advice(mpi_programs.Library(library, mpi_file()))


if not MPI.Is_initialized():
    launcher.check_library(launcher.launched(), MPI.Get_library_version(), mpirun_advice)
    MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
_started = time.time_ns()

from ..base import exits, slot  # noqa: E402
from ..base.proc import mapped  # noqa: E402
from ..errors import CollectiveError, ConfigError  # noqa: E402
from .base import Repeated  # noqa: E402
from .call_checks import Heads, Roll  # noqa: E402
from .calls import (  # noqa: E402
    Call,
    Header,
    ReduceOp,
    caller_location,
    check_envelope,
    describe_call,
    envelope_bytes,
    find_mismatch,
    pack_envelope,
    unpack,
    unpack_envelope,
)
from .cores import cores  # noqa: E402
from .finalize import Exits  # noqa: E402
from .gather_rounds import gather_rounds, passes_on  # noqa: E402
from .link_times import Links  # noqa: E402
from .requests import Message, Request, Waiting  # noqa: E402
from .staged import Headed, Met, Staged  # noqa: E402

# threads wait in groups of their own, and move on what others receive
_receiving = threading.RLock()
# ns; between these MPI started, and its launcher made a file for it (watch/start_watcher.py)
STARTED = _import_started, _started

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.PROD: MPI.PROD,
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
DATA_TAG = 200  # of calls made again and again, beside the headers: above those of call_checks.py
# Up to so many ranks each sends its data to each other itself (`_Repeated`); beyond that the
# library knows better ways. An all-gather of more ranks than gather_rounds.DIRECT goes in rounds.
NEAR = 32
_Memories = Sequence[tuple[int, int, int]]  # rank, address, bytes
# for what is only moved
_WORDS = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}


def _leave_fork(rank_process: int) -> None:
    """Ends a process that was forked from the rank before MPI's own exit handler, which would end
    the rank's MPI.
    """
    if os.getpid() != rank_process:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(exits.leaving()[0])


atexit.register(_leave_fork, os.getpid())


class _Repeated(Headed):
    """A call that is made again and again (base.Repeated), and the request of its latest time.

    Header and data go at once, in persistent messages from each rank to each other: MPI has no way
    to look into data that it receives, but nothing is returned before all headers have come and
    agree. Messages of a call that differs may be left over, so the group is then over.

    An all-gather of many ranks goes in rounds (gather_rounds.py). Its receives and the first sends
    start at once. A later round starts when the words agree and the data that it passes on are
    here.
    """

    __slots__ = (
        "_begun_rounds",
        "_due",
        "_far",
        "_header",
        "_heads",
        "_messages",
        "_own_copy",
        "_place",
        "_rounds",
        "_since",
        "_types",
    )

    def __init__(self, comm: MPICommunicator, call: Call) -> None:
        super().__init__(comm, call, call.kind, -1)
        self._complete = True
        # Messages of two such calls do not meet: each has a tag, and all ranks count alike, or
        # their headers differ.
        tag = 1 + comm._repeats % (MEMORY_TAG - DATA_TAG - 1)
        comm._repeats += 1
        dtype, shape, root, op, details = call.described
        text = (
            f"again {tag}" if details is None else f"again {tag} of {str(details).replace(' ', '')}"
        )
        call.described = (dtype, shape, root, op, text)
        me = comm.rank
        size = comm.size
        self._heads = Heads(comm._head, me, size)
        tail, balance = call.tail(me)
        self._header = Header(0, 0, "", tail, call.kind, repeated=True, balance=balance)
        self._place: tuple[str, int] = ("", 0)
        gives, takes = call.routes(me, size)
        self._own_copy = (
            None
            if call.send is call.out
            else (call.out[slice(*takes[me])], call.send[slice(*gives[me])])
        )
        word = _WORDS[call.out.dtype.itemsize]
        other_ranks = [p for p in range(size) if p != me]
        self._messages: list[Any] = []
        # receives and sends of each, if there are any
        self._rounds: list[tuple[list[Any], list[Any]]] = []
        self._types: list[Any] = []  # of messages that carry several pieces of the array
        self._begun_rounds = 0
        self._far: list[Any] = []
        comm._repeated_calls.add(self)
        if call.kind == "all_gather_v" and passes_on(call.ranges):
            self._prepare_rounds(DATA_TAG + tag)
            return
        for make, array, runs in (
            (comm._head.Recv_init, call.out, takes),
            (comm._head.Send_init, call.send, gives),
        ):
            self._messages += [
                make([array[slice(*runs[p])], word], p, DATA_TAG + tag)
                for p in other_ranks
                if runs[p][0] < runs[p][1]
            ]
        came = [p for p in other_ranks if takes[p][0] < takes[p][1]]  # first among the messages
        self._far = [
            (m, comm.ranks[p], (takes[p][1] - takes[p][0]) * call.out.itemsize)
            for m, p in zip(self._messages, came, strict=False)
            if comm.ranks[p] not in comm._links.near
        ]

    def _prepare_rounds(self, tag: int) -> None:
        """Makes the messages of all rounds.

        How long they take says nothing of a link: they wait for other ranks.
        """
        comm = self._comm
        for gather_round in gather_rounds(comm.rank, self.call.ranges):
            receives = [
                comm._head.Recv_init(self._describe_memory(m.runs), m.peer, tag)
                for m in gather_round.receives
            ]
            sends = [
                comm._head.Send_init(self._describe_memory(m.runs), m.peer, tag)
                for m in gather_round.sends
            ]
            self._rounds.append((receives, sends))
        self._messages = [request for receives, _ in self._rounds for request in receives]
        self._messages += [request for _, sends in self._rounds for request in sends]
        self._begun_rounds = len(self._rounds)  # nothing is under way

    def _describe_memory(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        """Returns the memory of a message with these runs of the array, in mpi4py's form."""
        out = self.call.out
        word = _WORDS[out.dtype.itemsize]
        if len(runs) == 1:
            return [out[slice(*runs[0])], word]
        lengths = [end - start for start, end in runs]
        starts = [start for start, _ in runs]
        indexed_type = word.Create_indexed(lengths, starts).Commit()
        self._types.append(indexed_type)
        return [out, 1, indexed_type]

    def start_due_rounds(self) -> bool:
        """Starts the rounds whose data have come, and returns True if all rounds have started.

        The caller holds the communicator's lock. Other ranks wait for these rounds, so this is
        also called while this rank waits for something else (`listen`).
        """
        if self._begun_rounds < len(self._rounds):
            outcome = self._comm._poll_outcome(self._heads, self._header)
            if outcome is None or outcome.headers:
                return False
        while self._begun_rounds < len(self._rounds):
            receives, _ = self._rounds[self._begun_rounds - 1]
            if receives and not receives[0].Testall(receives):
                return False
            _, sends = self._rounds[self._begun_rounds]
            if sends:
                MPI.Prequest.Startall(sends)
            self._begun_rounds += 1
        return True

    def start(self) -> _Repeated:
        comm = self._comm
        call = self.call
        if comm._broken is not None:
            raise comm._broken
        if not self._complete:
            raise CollectiveError(
                f"[comm] {self._text} is started again before it is complete; wait for it first"
            )
        place = caller_location(2)
        if place != self._place:
            self._place = place
            signature, self._text = describe_call(call.kind, call.described, *place)
            self._header = self._header._replace(signature=signature, text=self._text)
        self._sequence = comm._sequence
        comm._sequence += 1
        slot.note_short_call(self._sequence, comm._mark[0], self._text)
        self._result = None
        self._error = None
        self._complete = False
        self.posted = False
        self._suspect = 0
        comm._active.add(self)
        with comm._lock:
            MPI.Prequest.Startall(
                comm._join_call(self._heads, self._header, self._sequence) + self._first_requests()
            )
        if self._own_copy is not None:
            self._own_copy[0][...] = self._own_copy[1]
        return self

    def _first_requests(self) -> list[Any]:
        """Returns the requests that start with the call.

        With rounds these are all receives, and the sends of the first round.
        """
        if not self._rounds:
            return self._messages
        self._begun_rounds = 1
        receives = [request for receives, _ in self._rounds for request in receives]
        return receives + self._rounds[0][1]

    def test(self) -> bool:
        if self._complete:
            return True
        if not self.posted:
            with self._comm._lock:
                outcome = self._comm._poll_outcome(self._heads, self._header)
            if outcome is None:
                if self._comm._broken is None:
                    return False
                self._fail(self._comm._broken)
                return True
            if outcome.headers:
                problem = find_mismatch(outcome.headers, self._comm.ranks) or ""
                self._fail(self._comm._make_mismatch_error(problem, outcome.headers))
                return True  # it stays among the active: its messages are under way for ever
            self.posted = True
            if self._header.balance:  # counts are compared the first time: they stay what they are
                self._header = self._header._replace(balance=0)
            self._since = time.monotonic_ns() if self._far else 0
            self._due = self._far
        if self._rounds:  # which another thread may be passing on
            with self._comm._lock:
                is_complete = self.start_due_rounds() and MPI.Request.Testall(self._messages)
        else:
            is_complete = MPI.Request.Testall(self._messages)
        if self._far:
            self._measure_links(is_complete)
        if is_complete:
            self._complete = True
            self._comm._active.discard(self)
        return self._complete

    def _find_late(self) -> list[int]:
        return [] if self.posted else self._comm._find_missing(self._heads)

    def _measure_links(self, is_complete: bool) -> None:
        """Counts how long data from other machines have taken."""
        time_ns = time.monotonic_ns()
        links = self._comm._links
        due = []
        for far in self._due:
            request, rank, nbytes = far
            if is_complete or request.Test():
                links.came(rank, nbytes, time_ns - self._since)
            else:
                due.append(far)
        self._due = due
        if is_complete:
            links.judge(time_ns)

    def free(self) -> None:
        """Frees the requests; they must not be under way."""
        requests = self._messages + self._heads.requests
        self._messages = []
        self._heads.requests = []
        self._far = []
        self._rounds = []
        for request in requests:
            request.Free()
        while self._types:
            self._types.pop().Free()

    def __del__(self) -> None:
        if self._heads.requests and not MPI.Is_finalized():
            self.free()


class MPICommunicator(Staged):
    """A communicator over an mpi4py one, which it owns.

    Sums are added in the order of the library.

    comm: an intra-communicator of mpi4py that nothing else uses. of: what it is a part of; None for
    the world.
    """

    name = "mpi"
    moved_by_calls = MPI.Query_thread() >= MPI.THREAD_SERIALIZED

    def __init__(self, comm: Any, of: MPICommunicator | None = None) -> None:
        super().__init__()
        self._head = comm.Dup()
        self._data = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = node.Get_rank()
        self.local_size = node.Get_size()
        near = (
            node.Get_group().Translate_ranks(range(self.local_size), comm.Get_group())
            if of is None
            else ()
        )
        self._links = of._links if of is not None else Links(near)
        node.Free()
        self._heads: list[Heads] = []  # not in use
        # of calls under way whose words have not all come, in order
        self._meeting: deque[Heads] = deque()
        self._roll = Roll(self._head, self.rank, self.size)
        self._repeats = 0
        self._active: set[_Repeated] = set()
        self._repeated_calls: weakref.WeakSet[_Repeated] = weakref.WeakSet()
        self._receives: dict[tuple[int, int], deque[_Received]] = {}
        if of is None:
            self.ranks = tuple(range(self.size))
            self.why = f"mpi: {self.size} ranks, {launcher.mpi_library(MPI.Get_library_version())}"
            self._exits = Exits(self, MPI.Is_finalized, _abort)
            crowded = np.array([self.local_size > cores()], np.uint8)
            comm.Allreduce(MPI.IN_PLACE, crowded, MPI.MAX)
            # on all or none: a blocking call does not match one that is not
            self._crowded = bool(crowded[0])
        else:
            theirs = comm.Get_group().Translate_ranks(range(self.size), of._data.Get_group())
            self.ranks = tuple(of.ranks[p] for p in theirs)
            self.why = of.why
            self._exits = of._exits
            self._crowded = of._crowded
        self._world_size = self._exits.size
        self._exits.communicators[id(self)] = self

    # --- headers ---

    def _send_header(self, header: Header) -> Heads:
        heads = self._heads.pop() if self._heads else Heads(self._head, self.rank, self.size)
        MPI.Prequest.Startall(self._join_call(heads, header, header.sequence))
        return heads

    def _join_call(self, heads: Heads, header: Header, sequence: int) -> list[Any]:
        """Adds a call to those whose words are under way; returns the requests to start."""
        if self._roll.is_needed:
            # otherwise the notes for a rank that never waits long would pile up
            self._roll.listen(self._sequence)
        self._meeting.append(heads)
        return heads.start(header, sequence)

    def _advance_words(self, until: Heads | None = None) -> None:
        """Advances the words of calls in the order of the calls, up to those of `until`.

        A call may only start rounds that the call before has started; see `Heads.advance`.
        """
        limit = sys.maxsize
        if until is self._meeting[0]:
            if until.advance(limit):
                self._meeting.popleft()
                until.finish()
            return
        for heads in tuple(self._meeting):
            finished = heads.advance(limit)
            limit = heads.rounds_begun
            if finished and heads is self._meeting[0]:
                self._meeting.popleft().finish()
                limit = sys.maxsize
            if heads is until:
                break

    def _poll_outcome(self, heads: Heads, local_header: Header) -> Met | None:
        if not heads.over:
            self._advance_words(heads)
            if not heads.over:
                return None
        if heads.texts is None:
            return heads.agreed()
        packed_headers, request = heads.texts
        return Met(unpack(packed_headers, local_header)) if request.Test() else None

    def _poll_headers(self, heads: Heads, local_header: Header) -> Met | None:
        outcome = self._poll_outcome(heads, local_header)
        if outcome is not None:
            self._heads.append(heads)
        return outcome

    def listen(self) -> None:
        """Advances calls, and answers ranks that ask for the latest call of this one.

        Does nothing while another thread tests the calls.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self._meeting:
                    self._advance_words()
                for call in tuple(self._active):
                    call.start_due_rounds()
                self._roll.listen(self._sequence)
            finally:
                self._lock.release()

    def _find_missing(self, heads: Heads) -> list[int]:
        with self._lock:
            return self._roll.missing(heads, self._sequence)

    def _find_ended(self, ranks: Sequence[int]) -> list[int]:
        return [p for p in ranks if self._exits.ended(self.ranks[p])]

    # --- data ---

    def _post(self, call: Call, blocking: bool) -> Any:
        kind = call.kind
        send = call.send
        out = call.out
        if kind in ("barrier", "group"):
            return None  # that all headers came is all there is to it
        # Numbers that are only moved are words of their size. For numbers that are combined the
        # type is None, and mpi4py finds it from the array.
        mpi_type = _WORDS[(out if send is None else send).itemsize] if call.op is None else None
        give = None if send is None else MPI.IN_PLACE if send is out else [send, mpi_type]
        take = None if out is None else [out, mpi_type]
        if kind == "all_to_all_v":
            give = [send, list(call.send_counts), mpi_type]
            take = [out, list(call.receive_counts), mpi_type]
        elif kind == "all_gather_v":
            lengths = [end - start for start, end in call.ranges]
            starts = [start for start, _ in call.ranges]
            take = [out, lengths, starts, mpi_type]
        arguments = [take] if kind == "broadcast" else [give, take]
        if call.op is not None:
            arguments.append(_OPS[call.op])
        if call.root >= 0:
            arguments.append(call.root)
        # If there are more ranks than cores and all of them wait for this call, the blocking form
        # is faster (docs/log.md).
        return _FUNCTIONS[kind][blocking](self._data, *arguments)

    def _data_arrived(self, request: Any) -> bool:
        return request is None or request.Test()

    # --- one to one: an envelope that says what follows, then the data, on tags 2t + 1 and 2t ---

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> _Sent:
        return _Sent(self, array, dest, tag, envelope)

    def _recv(
        self, out: np.ndarray, source: int | None, tag: int, envelope: Header
    ) -> _Received | _FromAny:
        with _receiving:
            return (_FromAny if source is None else _Received)(self, out, source, tag, envelope)

    def exchange_memory(self, sends: _Memories, receives: _Memories) -> Waiting:
        """Starts messages of memory that need not be the host's (device.py), between two ranks
        in order.
        """
        return _Memory(self, sends, receives)

    # --- groups and ends ---

    def _create_subgroup(self, members: tuple[int, ...]) -> MPICommunicator:
        group = self._data.Get_group()
        part = group.Incl(members)
        comm = self._data.Create_group(part)
        part.Free()
        group.Free()
        return MPICommunicator(comm, self)

    def window(self, size: int) -> Window:
        """Memory of `size` bytes on each rank that all of them see; all ranks call it."""
        return Window(self, size)

    def _make_repeated(self, make: Callable[[], Call]) -> Repeated | _Repeated:
        call = make()
        of_ranges = call.kind == "all_gather_v"
        # the same on all ranks
        senders = sum(a < b for a, b in call.ranges) if of_ranges else self.size
        if self.size > 1 and (senders <= NEAR or of_ranges):
            return _Repeated(self, call)
        return super()._make_repeated(make)

    def meet_start(self) -> Request:
        return super().meet_start() if self._broken is None else _Meeting(self._exits.barrier())

    def unfinished(self) -> list[Waiting]:
        return [*super().unfinished(), *self._active]

    def _progress(self) -> None:
        """Calls in other groups go on.

        Receives take their data once the envelope is there: senders wait for it.
        """
        super()._progress()
        for comm in self._exits.open():
            if not isinstance(comm, MPICommunicator):
                continue  # shared memory carries its messages over one of these
            comm.listen()
            with _receiving:
                for line in comm._receives.values():
                    while line and line[0]._request.Test():
                        line.popleft()._receive_data()

    def close(self) -> None:
        if self._is_world or self._exits.communicators.pop(id(self), None) is None:
            return  # it ends with the process, or was closed before
        for heads in self._heads:
            for request in heads.requests:
                request.Free()
        self._heads.clear()
        for call in self._repeated_calls:
            call.free()
        self._head.Free()
        self._data.Free()
        self._mark_closed()

    def abort(self, code: int) -> None:
        _abort(code)


def _abort(code: int) -> None:
    """Ends all ranks, and removes the files in shared memory that the library would leave behind.

    The library removes them itself only at an orderly end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _unlink_shared_files("mpich_shm_", "sm_segment.")
    if exits.hydra_abort(code):
        time.sleep(1)  # it ends this process
    MPI.COMM_WORLD.Abort(code)


def _unlink_shared_files(*names: str) -> None:
    """Unlinks files in /dev/shm that this process has mapped and whose names start like `names`.

    The memory stays until all processes have ended.
    """
    for path in mapped():
        if path.startswith(tuple(f"/dev/shm/{name}" for name in names)):
            with contextlib.suppress(OSError):
                os.unlink(path)


class _Meeting(Request):
    """A barrier of MPI."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:
        super().__init__()
        self._complete = False
        self._request = request

    def test(self) -> bool:
        self._complete = self._complete or bool(self._request.Test())
        return self._complete


class _Sent(Message):
    __slots__ = ("_array", "_envelope", "_requests")

    def __init__(
        self, comm: MPICommunicator, array: np.ndarray, dest: int, tag: int, envelope: Header
    ) -> None:
        super().__init__(comm, envelope, dest)
        self._envelope = pack_envelope(envelope)
        self._array = array
        self._requests = [
            comm._data.Isend([self._envelope, MPI.BYTE], dest, 2 * tag + 1),
            comm._data.Isend([array, _WORDS[array.dtype.itemsize]], dest, 2 * tag),
        ]

    def test(self) -> bool:
        if not self._complete and MPI.Request.Testall(self._requests):
            self._complete = True
            self._array = None
        return self._complete


class _Received(Message):
    __slots__ = ("_out", "_envelope", "_local_header", "_request", "_line", "_tag", "_problem")

    def __init__(
        self, comm: MPICommunicator, out: np.ndarray, source: int, tag: int, local_header: Header
    ) -> None:
        super().__init__(comm, local_header, source)
        self._out = out
        self._local_header = local_header
        self._tag = 2 * tag
        self._problem = None
        self._envelope = np.zeros(envelope_bytes(), np.uint8)
        self._request = comm._data.Irecv([self._envelope, MPI.BYTE], source, 2 * tag + 1)
        # Data must be received in the order of their envelopes: only the first of a line may read
        # its envelope.
        self._line = comm._receives.setdefault((source, tag), deque())
        self._line.append(self)

    def test(self) -> bool:
        line = self._line
        with _receiving:
            while not self._complete and line and line[0]._request.Test():
                line.popleft()._receive_data()
            if not self._complete and self._envelope is None and self._request.Test():
                if self._problem:
                    self._fail(CollectiveError(self._problem))
                else:
                    self._result = self._out
                    self._complete = True
                self._out = None
        return self._complete

    def _receive_data(self) -> None:
        """Reads the envelope, and starts to receive the data.

        Data that do not fit the array go into memory that nobody reads. They must be received,
        because the next message of this sender and tag is behind them.
        """
        sent, text = unpack_envelope(self._envelope)
        self._envelope = None
        comm = self._comm
        source = self.source
        self._problem = check_envelope(
            sent, text, self._out, self._local_header, comm.ranks[source], comm.ranks[comm.rank]
        )
        if self._problem:
            status = MPI.Status()
            comm._data.Probe(source, self._tag, status)
            self._out = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._request = comm._data.Irecv(
            [self._out, _WORDS[self._out.dtype.itemsize]], source, self._tag
        )

    def _find_late(self) -> Sequence[int]:
        # once the envelope has come, the data are on their way
        return () if self._envelope is None else (self.source,)


class _FromAny(Message):
    """A message from the rank of which one arrives first: received from that one then."""

    __slots__ = ("_received", "_receive_arguments")

    def __init__(
        self, comm: MPICommunicator, out: np.ndarray, source: None, tag: int, local_header: Header
    ) -> None:
        super().__init__(comm, local_header, source)
        self._received = None
        self._receive_arguments = (out, tag, local_header)

    def test(self) -> bool:
        with _receiving:
            if self._received is None:
                status = MPI.Status()
                (out, tag, local_header) = self._receive_arguments
                if self._comm._data.Iprobe(MPI.ANY_SOURCE, 2 * tag + 1, status):
                    self.source = status.Get_source()
                    self._received = _Received(self._comm, out, self.source, tag, local_header)
            if not self._complete and self._received is not None:
                self._follow(self._received)
        return self._complete


class _Memory(Waiting):
    __slots__ = ("_requests", "_peers")

    def __init__(self, comm: MPICommunicator, sends: _Memories, receives: _Memories) -> None:
        self._peers = sorted({p for p, _, _ in (*sends, *receives)})
        data = comm._data
        names = ", ".join(str(comm.ranks[p]) for p in self._peers)
        super().__init__(comm, f"an exchange of device memory with rank {names}")
        self._requests = [
            *(
                data.Irecv([MPI.memory.fromaddress(address, n), MPI.BYTE], p, MEMORY_TAG)
                for p, address, n in receives
            ),
            *(
                data.Isend([MPI.memory.fromaddress(address, n), MPI.BYTE], p, MEMORY_TAG)
                for p, address, n in sends
            ),
        ]

    def test(self) -> bool:
        if not self._complete and MPI.Request.Testall(self._requests):
            self._complete = True
        return self._complete

    def _describe_awaited(self) -> tuple[int, str]:
        return 0, slot.format_ranks([self._comm.ranks[p] for p in self._peers])

    def _find_late(self) -> Sequence[int]:
        return self._peers


class Window:
    """Memory that all ranks of a communicator share, `size` bytes from each.

    All ranks make it and free it.
    addresses: the address of the part of each rank, in this process.
    """

    def __init__(self, comm: MPICommunicator, size: int) -> None:
        try:
            self._window = MPI.Win.Allocate_shared(size, 1, comm=comm._data)
        except MPI.Exception as problem:
            raise ConfigError(
                f"[comm] {size / 2**20:.0f} MiB of memory that ranks share cannot be had from "
                "this rank; look at the "
                "size of /dev/shm and the limits (ulimit -f, ulimit -v): `odyssey doctor` does"
            ) from problem
        self.addresses = [self._window.Shared_query(p)[0].address for p in range(comm.size)]

    def free(self) -> None:
        self._window.Free()


def connect() -> MPICommunicator:
    """Returns the communicator of all processes of MPI; to be called once per process."""
    world = MPI.COMM_WORLD.Dup()
    # All ranks have mapped it by now. MPICH keeps the name to its end, and a killed job leaves it.
    _unlink_shared_files("mpich_shm_")
    return MPICommunicator(world)


def thread_level() -> str:
    """Returns how many threads of a process may call MPI, by the name that MPI gives the level."""
    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
    }
    return names.get(MPI.Query_thread(), "multiple")


def finalize() -> None:
    """Ends MPI in a process whose end is not that of its interpreter (base/exits.py): the last
    call.
    """
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
