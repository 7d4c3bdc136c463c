"""Steps of each kind of call in the segments of shm.py: writes before a barrier, reads after it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ..core import native
from ..errors import CollectiveError
from .base import Communicator
from .calls import (
    DTYPES,
    Call,
    Header,
    ReduceOp,
    Run,
    consecutive_runs,
    find_mismatch,
    pack,
    unpack,
)
from .shared_memory import LINE

# Bytes of a slot. What is copied in is added before the cache has forgotten it, so it must not be
# large; each piece costs a barrier, which is cheap while all ranks have a core and dear while other
# programs take theirs, so it must not be small. On a quiet machine 512 KiB to 1 MiB were best, on a
# busy one 1 to 2 MiB (docs/log.md).
SLOT = 1 << 20

# Up to this many bytes every rank adds everything itself: one barrier instead of three, but all
# data is read by all.
DIRECT = 32 << 10

DONE, WAITING, DIFFERENT = range(3)
_TYPES = {
    DTYPES[name]: code
    for code, name in enumerate(
        "float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
    )
}
_NOTHING = np.zeros(0, np.uint8)
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}

Steps = Generator[Any, int, None]


class SteppedCommunicator(Communicator):
    """Communicator over segments that all ranks see."""

    _slots: list[list[np.ndarray]]  # of each rank, two of each kind: also the next two
    _slot_addresses: list[list[int]]
    _envelopes: list[list[np.ndarray]]
    _team: native.Team  # this rank's place at the barriers, for the kernels
    _team_address: int
    _library: Any

    def _steps(self, call: Call) -> Steps:
        """The steps of a call: writes before a barrier, yields to wait for it, reads after it.

        Yields None to wait for the barrier at which it has arrived, or the job of an all-reduce;
        gets the state back.
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
        """The steps of a sum, which the kernel carries out.

        state: that of a sum which was started already (`ShmCommunicator.all_reduce`); else None.
        """
        if state is None or state == WAITING:
            state = yield job
        if state == DIFFERENT:
            yield from self._raise_mismatch(call)

    def _pass_barrier(self, call: Call, mark: tuple[int, int] | None = None) -> Steps:
        """The steps of one barrier, which also compares the calls of all ranks.

        mark: (sequence, signature), which must be equal on all ranks; by default those of the call.
        """
        sequence, signature = mark or (call.header.sequence, call.header.signature)
        self._library.shared_arrive(self._team_address, sequence, signature)
        state = yield None
        if state == DIFFERENT:
            yield from self._raise_mismatch(call)

    def _raise_mismatch(self, call: Call) -> Steps:
        """Raises the error for calls that differ, after an exchange of the whole headers.

        All ranks have seen at the same barrier that their calls differ, so all of them come here.
        The mark (-1, -1) is the same on all, so this barrier does not fail again.
        """
        headers = yield from self._exchange_headers(call, mark=(-1, -1))
        error = CollectiveError(
            find_mismatch(headers, self.ranks)
            or f"[comm] the calls of the ranks differ in {call.kind}"
        )
        error.raised_on_all_ranks = self.size == self._world_size
        raise error

    def _exchange_headers(
        self, call: Call, mark: tuple[int, int] | None = None
    ) -> Generator[Any, int, list[Header]]:
        """The steps of an exchange of headers; returns the headers of all ranks."""
        pack(call.header, self._envelopes[self.rank][self._next])
        yield from self._pass_barrier(call, mark)
        return unpack([envelopes[self._last] for envelopes in self._envelopes], call.header)

    @property
    def _next(self) -> int:
        """The index, 0 or 1, of the places to write to before the next barrier."""
        return (self._team.barrier + 1) & 1

    @property
    def _last(self) -> int:
        """The index, 0 or 1, of the places to read from after the latest barrier."""
        return self._team.barrier & 1

    _barrier_steps = _group_steps = _pass_barrier

    @property
    def _share(self) -> int:
        """Bytes of a slot for each rank, in calls that send different data to each rank."""
        return SLOT // self.size // LINE * LINE

    def _fill_slot(self, send: np.ndarray, sends: Sequence[Run], offset: int) -> None:
        """Copies the next bytes for each rank into this rank's slot.

        Rank p gets at most a share of the bytes sends[p], from their byte `offset` on.
        """
        slot = self._slots[self.rank][self._next]
        share = self._share
        for p, (start, end) in enumerate(sends):
            part = send[start + offset : min(end, start + offset + share)]
            slot[p * share : p * share + part.size] = part

    def _exchange_pieces(self, call: Call) -> Steps:
        """The steps of calls that send different data to each rank, a share at a time."""
        if call.kind != "all_to_all":
            headers = yield from self._exchange_headers(call)
            # the tails of headers, which the signature does not cover
            if problem := find_mismatch(headers, self.ranks):
                raise CollectiveError(problem)
        if call.kind == "scatter":
            call.place(headers[call.root].tail)
        send, received, sends, receives, longest = self._find_buffers(call)
        if call.kind == "all_to_all_v":
            # the largest count of any rank, because all must pass the same number of barriers
            longest = max(header.tail[0] for header in headers) * call.out.itemsize
        share = self._share
        slot_offset = self.rank * share
        needs_barrier = longest or call.kind != "all_to_all_v"  # that has had one, for the headers
        for offset in _piece_starts(longest, share) if needs_barrier else ():
            self._fill_slot(send, sends, offset)
            yield from self._pass_barrier(call)
            last = self._last
            for (start, end), slots in zip(receives, self._slots, strict=True):
                part = received[start + offset : min(end, start + offset + share)]
                part[:] = slots[last][slot_offset : slot_offset + part.size]

    _scatter_steps = _all_to_all_steps = _all_to_all_v_steps = _exchange_pieces

    def _reduce_scatter_steps(self, call: Call) -> Steps:
        """The steps of a reduce-scatter: each rank adds its own share of the slots of all."""
        width = call.send.nbytes // self.size
        item = call.send.itemsize
        send = _view_bytes(call.send)
        sends = consecutive_runs([width] * self.size)
        for offset in _piece_starts(width, self._share):
            self._fill_slot(send, sends, offset)
            yield from self._pass_barrier(call)
            count = min(self._share, width - offset) // item
            if count:
                slot_offset = self.rank * self._share
                buffers = np.array(self._slot_addresses[self._last], np.int64) + slot_offset
                dtype_and_op = _TYPES[call.send.dtype], _OPS[call.op]
                self._library.shared_reduce(
                    call.out.ctypes.data + offset,
                    buffers.ctypes.data,
                    self.size,
                    count,
                    *dtype_and_op,
                )

    def _copy_to_all(self, call: Call) -> Steps:
        """The steps of calls in which a rank sends the same data to all, a slot at a time."""
        send, received, sends, receives, longest = self._find_buffers(call)
        # all runs that are not empty are the same one
        send_start, send_end = max(sends, key=lambda run: run[1] - run[0])
        for offset in _piece_starts(longest, SLOT):
            part = send[send_start + offset : min(send_end, send_start + offset + SLOT)]
            self._slots[self.rank][self._next][: part.size] = part
            yield from self._pass_barrier(call)
            last = self._last
            for p, (start, end) in enumerate(receives):
                is_in_place = p == self.rank and call.send is call.out
                if start + offset < end and not is_in_place:
                    part = received[start + offset : min(end, start + offset + SLOT)]
                    part[:] = self._slots[p][last][: part.size]

    _broadcast_steps = _gather_steps = _all_gather_steps = _all_gather_v_steps = _copy_to_all

    def _find_buffers(
        self, call: Call
    ) -> tuple[np.ndarray, np.ndarray, Sequence[Run], Sequence[Run], int]:
        """Returns the memory of a call that moves numbers, and its parts.

        Returns:
            (send, out, sends, receives, longest): the bytes of the two arrays, the runs of bytes
            as in `Call.routes`, and the length of the longest run.
        """
        item = (call.out if call.send is None else call.send).itemsize
        sends, receives = call.routes(self.rank, self.size, item)
        send = _view_bytes(_NOTHING if call.send is None else call.send)
        out = _view_bytes(_NOTHING if call.out is None else call.out)
        longest = max(end - start for start, end in (*sends, *receives))
        return send, out, sends, receives, longest


def _view_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the memory of a contiguous array as uint8."""
    return array.reshape(-1).view(np.uint8)


def _piece_starts(size: int, step: int) -> Sequence[int]:
    """Returns the offsets at which the pieces of `size` bytes start.

    There is at least one piece, because every call has a barrier.
    """
    return range(0, size, step) if size else (0,)
