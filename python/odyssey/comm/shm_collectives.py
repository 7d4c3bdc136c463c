"""Steps of each kind of call in the segments of shm.py: writes before a barrier, reads after it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ..core import native
from ..errors import CollectiveError
from .base import Communicator
from .calls import DTYPES, Call, Header, ReduceOp, Run, mismatch, pack, runs, unpack
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
        if state is None or state == WAITING:
            state = yield job
        if state == DIFFERENT:
            yield from self._explain(call)

    def _meet(self, call: Call, mark: tuple[int, int] | None = None) -> Steps:
        """One barrier, at which all ranks have the same mark, or the calls differ."""
        sequence, signature = mark or (call.header.sequence, call.header.signature)
        self._library.shared_arrive(self._team_address, sequence, signature)
        state = yield None
        if state == DIFFERENT:
            yield from self._explain(call)

    def _explain(self, call: Call) -> Steps:
        """All ranks have seen that their headers differ: they show each other the whole of them.

        Raises the error.
        """
        headers = yield from self._exchange(call, (-1, -1))
        error = CollectiveError(
            mismatch(headers, self.ranks) or f"[comm] the calls of the ranks differ in {call.kind}"
        )
        error.raised_on_all_ranks = self.size == self._world_size
        raise error

    def _exchange(
        self, call: Call, mark: tuple[int, int] | None = None
    ) -> Generator[Any, int, list[Header]]:
        """The headers of all ranks."""
        pack(call.header, self._envelopes[self.rank][self._next])
        yield from self._meet(call, mark)
        return unpack([envelopes[self._last] for envelopes in self._envelopes], call.header)

    @property
    def _next(self) -> int:
        """Number of the places to write in before the coming barrier."""
        return (self._team.barrier + 1) & 1

    @property
    def _last(self) -> int:
        """Number of the places to read from after the barrier that was passed."""
        return self._team.barrier & 1

    _barrier_steps = _group_steps = _meet

    @property
    def _share(self) -> int:
        """Bytes of a slot for each rank, where a rank has something else for each."""
        return SLOT // self.size // LINE * LINE

    def _fill_slot(self, send: np.ndarray, gives: Sequence[tuple[int, int]], a: int) -> None:
        """A share of bytes gives[p], from their a-th, into my slot's part for rank p."""
        slot = self._slots[self.rank][self._next]
        share = self._share
        for p, (lo, hi) in enumerate(gives):
            part = send[lo + a : min(hi, lo + a + share)]
            slot[p * share : p * share + part.size] = part

    def _swap(self, call: Call) -> Steps:
        """Something else for each rank."""
        if call.kind != "all_to_all":
            headers = yield from self._exchange(call)
            # in numbers that each rank may have of its own
            if wrong := mismatch(headers, self.ranks):
                raise CollectiveError(wrong)
        if call.kind == "scatter":
            call.place(headers[call.root].tail)
        send, received, gives, wants, longest = self._bytes_of(call)
        if call.kind == "all_to_all_v":
            longest = max(header.tail[0] for header in headers) * call.out.itemsize
        share = self._share
        slot_offset = self.rank * share
        for a in _pieces(longest, share) if longest or call.kind != "all_to_all_v" else ():
            self._fill_slot(send, gives, a)
            yield from self._meet(call)
            last = self._last
            for (lo, hi), slots in zip(wants, self._slots, strict=True):
                part = received[lo + a : min(hi, lo + a + share)]
                part[:] = slots[last][slot_offset : slot_offset + part.size]

    _scatter_steps = _all_to_all_steps = _all_to_all_v_steps = _swap

    def _reduce_scatter_steps(self, call: Call) -> Steps:
        width = call.send.nbytes // self.size
        item = call.send.itemsize
        send = _bytes(call.send)
        gives = runs([width] * self.size)
        for a in _pieces(width, self._share):
            self._fill_slot(send, gives, a)
            yield from self._meet(call)
            count = min(self._share, width - a) // item
            if count:
                slot_offset = self.rank * self._share
                buffers = np.array(self._slot_addresses[self._last], np.int64) + slot_offset
                dtype_and_op = _TYPES[call.send.dtype], _OPS[call.op]
                self._library.shared_reduce(
                    call.out.ctypes.data + a, buffers.ctypes.data, self.size, count, *dtype_and_op
                )

    def _copy_to_all(self, call: Call) -> Steps:
        """The same from a rank to all others."""
        send, received, gives, wants, longest = self._bytes_of(call)
        lo, hi = max(gives, key=lambda run: run[1] - run[0])
        for a in _pieces(longest, SLOT):
            part = send[lo + a : min(hi, lo + a + SLOT)]
            self._slots[self.rank][self._next][: part.size] = part
            yield from self._meet(call)
            last = self._last
            for p, (first, end) in enumerate(wants):
                if first + a < end and not (p == self.rank and call.send is call.out):
                    part = received[first + a : min(end, first + a + SLOT)]
                    part[:] = self._slots[p][last][: part.size]

    _broadcast_steps = _gather_steps = _all_gather_steps = _all_gather_v_steps = _copy_to_all

    def _bytes_of(
        self, call: Call
    ) -> tuple[np.ndarray, np.ndarray, Sequence[Run], Sequence[Run], int]:
        """The memory of a call that moves numbers, which bytes go to and come from each rank,
        the most of these.
        """
        item = (call.out if call.send is None else call.send).itemsize
        gives, takes = call.routes(self.rank, self.size, item)
        send, out = (
            _bytes(_NOTHING if array is None else array) for array in (call.send, call.out)
        )
        return send, out, gives, takes, max(b - a for a, b in (*gives, *takes))


def _bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array as uint8."""
    return array.reshape(-1).view(np.uint8)


def _pieces(size: int, step: int) -> Sequence[int]:
    """Where the pieces of `size` bytes begin; there is at least one, as every call has a
    barrier.
    """
    return range(0, size, step) if size else (0,)
