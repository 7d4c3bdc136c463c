"""ZeRO: which rank keeps which part of the parameters, gradients and optimizer state
(Rajbhandari et al. 2020).

Stage 1 splits the optimizer's state between the ranks, stage 2 also the gradients, and stage 3 also
the parameters. A part is a range of a bucket (buckets.py). Rank r of the data-parallel group has
range r of `plan.exchange`, which is also the range whose gradients it sums. An update is
elementwise, so the result doesn't depend on the rank that computes it.

With stage 3 the parameters of a bucket are gathered into one of two slots just before a segment
needs them, and are overwritten afterwards. The parameters of the next segment are gathered during
the segment before it. Both slots have the size of the largest bucket that uses them. If separate
memory for the largest buckets takes less, they have it (`kept`). Such a bucket is gathered once in
each step and stays from its first use to its last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..comm import Communicator, Request
from ..core import native
from ..core.arena import Arena
from ..optim import Update
from .buckets import Bucket, BucketRange
from .plan import Run, exchange


class Gathering(NamedTuple):
    """The buckets that one segment of a program needs, and the buckets gathered while it runs."""

    at: dict[int, int]  # bucket -> slot
    ahead: list[tuple[int, int]]  # (bucket, slot)


def unshared_buckets(floats: list[int]) -> tuple[int, ...]:
    """Returns the buckets that have separate memory instead of sharing two slots.

    They are the n largest buckets, where n makes the memory smallest: the sum of their sizes plus
    two slots for the next largest bucket.

    Args:
        floats: the size of each bucket.
    """
    largest_first = sorted(range(len(floats)), key=lambda b: (-floats[b], b))
    sizes = [*(floats[b] for b in largest_first), 0]
    needs = [sum(sizes[:n]) + 2 * sizes[n] for n in range(len(sizes))]
    least = min(needs)
    separate = max(n for n, need in enumerate(needs) if need == least)
    return tuple(largest_first[:separate])


class Parts:
    """The parts of all buckets over one data-parallel group, and with stage 3 the parameters
    themselves.

    Attributes:
        ranges: ranges[b][r] is the range (start, end) of floats of bucket b that rank r has. At
            stage 0 each rank has all of them.
        own: own[b] is this rank's range of bucket b.
        starts: starts[b] is the place of this range in the optimizer's state.
        floats: the floats of the optimizer's state on this rank.
        bytes_sent: the bytes of parameters that this rank has sent so far to ranks that compute
            with them.
        whole: True if the optimizer's state has the layout of the arena.
        partitioned: True if this rank keeps only its part of the parameters.
    """

    def __init__(self, stage: int, buckets: list[Bucket], comm: Communicator, arena: Arena) -> None:
        self.stage = stage
        self.buckets = buckets
        self.comm = comm
        self.arena = arena
        self.bytes_sent = 0
        has_everything = stage == 0 or comm.size == 1
        self.ranges: list[tuple[Run, ...]] = [
            ((0, bucket.floats),) * comm.size
            if has_everything
            else exchange(comm.size, comm.size, 1, bucket.floats).ranges
            for bucket in buckets
        ]
        self.own: list[Run] = [rank_ranges[comm.rank] for rank_ranges in self.ranges]
        lengths = (hi - lo for lo, hi in self.own)
        *self.starts, self.floats = itertools.accumulate(lengths, initial=0)
        # `floats` isn't comparable with the size of the arena, because it includes padding.
        floats_in_pieces = sum(piece.n for bucket in buckets for piece in bucket.pieces)
        self.whole = has_everything and floats_in_pieces == arena.size
        self.partitioned = stage == 3 and comm.size > 1
        if self.partitioned:
            self._partition_parameters()

    def _partition_parameters(self) -> None:
        """Copies this rank's part of the parameters, allocates slots, and releases the arena's."""
        arena = self.arena
        buckets = self.buckets
        self._store = []  # this rank's part of each bucket
        for bucket, (lo, hi) in zip(buckets, self.own, strict=True):
            self._store.append(self._copy_range(arena.params, bucket, lo, hi, arena.make))
            # The memory of the whole bucket is freed now. So the peak is less than all parameters
            # and this rank's part of them.
            for piece in bucket.pieces:
                native.discard(arena.params[piece.lo : piece.lo + piece.n])
        self.kept = unshared_buckets([bucket.floats for bucket in buckets])
        sharing = (bucket for b, bucket in enumerate(buckets) if b not in self.kept)
        self._shared_floats = max((bucket.floats for bucket in sharing), default=0)
        # One slot for each kept bucket, in the order of `kept`, then the slots of the others.
        self._slots: list[np.ndarray] = []
        self._holds: list[int | None] = []  # the bucket in each slot
        self._requests: list[Request | None] = []  # the gathering into each slot that isn't over
        for b in self.kept:
            self._add_slot(buckets[b].floats)
        if self._shared_floats:
            self._add_slot(self._shared_floats)
            self._add_slot(self._shared_floats)
        arena.release_full_parameters()

    def _add_slot(self, floats: int) -> None:
        """Allocates one more slot, which holds no bucket."""
        self._slots.append(native.aligned(floats))
        self._holds.append(None)
        self._requests.append(None)

    @staticmethod
    def _copy_range(
        flat: np.ndarray, bucket: Bucket, lo: int, hi: int, make: Any = native.aligned
    ) -> np.ndarray:
        """Returns a copy of the floats [lo, hi) of a bucket.

        `flat` is an array of the arena's layout, and `make` allocates the copy.
        """
        part = make(hi - lo)
        for piece in bucket.covers(lo, hi):
            start = piece.at - lo
            part[start : start + piece.n] = flat[piece.lo : piece.lo + piece.n]
        return part

    def pieces(self, b: int) -> list[BucketRange]:
        """Returns this rank's part of bucket b as runs of the arena."""
        return self.buckets[b].covers(*self.own[b])

    def param_address(self, b: int, piece: BucketRange) -> int:
        """Returns the address of the parameters of a piece of this rank's part of bucket b."""
        if self.partitioned:
            part_start, _ = self.own[b]
            return self._store[b].ctypes.data + 4 * (piece.at - part_start)
        return self.arena.address(native.PARAMS) + 4 * piece.lo

    def updates(self, b: int, grads: Callable[[BucketRange], int]) -> list[Update]:
        """Returns the updates of this rank's part of bucket b.

        `grads` returns the address of the gradients of a piece.
        """
        return [
            Update(
                params=self.param_address(b, piece),
                grads=grads(piece),
                state=self.state_at(b, piece),
                n=piece.n,
                at=piece.lo,
            )
            for piece in self.pieces(b)
        ]

    # --- stage 3: parameters come and go ---

    def places(self, reads: list[tuple[int, ...]]) -> list[Gathering]:
        """Plans the slots of the parameters of each segment, and when they are gathered.

        A bucket is gathered as early as possible: not before the last segment that a gathering was
        for, and not before its slot is free. If a segment reads more buckets than there are slots,
        further slots are allocated.

        Args:
            reads: the buckets that each segment of a program reads.
        """
        kept_slot = {b: slot for slot, b in enumerate(self.kept)}
        bucket_in: dict[int, int] = {}  # slot -> bucket
        # shared slot -> the last segment that reads it
        last_reader = dict.fromkeys(range(len(kept_slot), len(self._slots)), -1)
        gatherings: list[Gathering] = []
        last_gathered = 0  # the segment for which something was gathered last
        for i, buckets_read in enumerate(reads):
            slot_of: dict[int, int] = {}
            gathered = False
            for b in buckets_read:
                slot = next((s for s, held in bucket_in.items() if held == b), kept_slot.get(b))
                if slot is None:
                    free_slots = [s for s in last_reader if bucket_in.get(s) not in buckets_read]
                    if not free_slots:
                        new_slot = len(self._slots)
                        self._add_slot(self._shared_floats)
                        last_reader[new_slot] = -1
                        free_slots = [new_slot]
                    slot = min(free_slots, key=lambda s: last_reader[s])
                if bucket_in.get(slot) != b:
                    # From this segment on, no segment reads the slot's old bucket.
                    earliest = max(last_gathered, last_reader.get(slot, -1) + 1)
                    if earliest < i:
                        gatherings[earliest].ahead.append((b, slot))
                    bucket_in[slot] = b
                    gathered = True
                if slot in last_reader:
                    last_reader[slot] = i
                slot_of[b] = slot
            gatherings.append(Gathering(at=slot_of, ahead=[]))
            if gathered:
                last_gathered = i
        return gatherings

    def address(self, slot: int) -> int:
        """Returns the address of a slot, which never changes."""
        return self._slots[slot].ctypes.data

    def prefetch(self, b: int, slot: int) -> None:
        """Starts to gather bucket b into a slot, unless the bucket is in the slot already.

        No segment may be reading the slot. Collective.
        """
        if self._holds[slot] == b:
            return
        self._empty_slot(slot)
        lo, hi = self.own[b]
        parameters = self._slots[slot][: self.buckets[b].floats]
        parameters[lo:hi] = self._store[b]
        self._holds[slot] = b
        self._requests[slot] = self.comm.all_gather_v(parameters, self.ranges[b], wait=False)
        self.bytes_sent += 4 * (hi - lo) * (self.comm.size - 1)

    def use(self, b: int, slot: int) -> None:
        """Waits until the parameters of bucket b are in a slot.

        They stay until another bucket is gathered into the slot. Collective.
        """
        self.prefetch(b, slot)
        if self._requests[slot] is not None:
            self._requests[slot].wait()
            self._requests[slot] = None

    def _empty_slot(self, slot: int) -> None:
        """Marks a slot as empty, after waiting for a gathering that isn't over."""
        if self._requests[slot] is not None:
            self._requests[slot].wait()
        self._holds[slot] = self._requests[slot] = None

    def changed(self) -> None:
        """Replaces old parameters after an update. Collective.

        With stage 3 the slots are emptied, because they hold old values. With stages 1 and 2 this
        rank gets the new values of the other ranks' parts.
        """
        if self.comm.size == 1 or self.stage == 0:
            return
        if self.partitioned:
            for slot in range(len(self._slots)):
                self._empty_slot(slot)
            return
        self.fill(self.arena.params)
        self.bytes_sent += 4 * self.floats * (self.comm.size - 1)

    def fill(self, flat: np.ndarray) -> None:
        """Completes an array of the arena's layout in which each rank has its parts. Collective.

        Afterwards all ranks have the same values.
        """
        if self.comm.size == 1:
            return
        gatherings = []
        for b, bucket in enumerate(self.buckets):
            first = bucket.pieces[0].lo if bucket.pieces else 0
            # A bucket in one piece is gathered in place, unless its padding is beyond the array.
            in_place = len(bucket.pieces) == 1 and first + bucket.floats <= flat.size
            if in_place:
                values = flat[first : first + bucket.floats]
            else:
                values = np.empty(bucket.floats, flat.dtype)
                for piece in self.pieces(b):
                    values[piece.at : piece.at + piece.n] = flat[piece.lo : piece.lo + piece.n]
            request = self.comm.all_gather_v(values, self.ranges[b], wait=False)
            gatherings.append((bucket, values, in_place, request))
        for bucket, values, in_place, request in gatherings:
            request.wait()
            if not in_place:
                for piece in bucket.pieces:
                    flat[piece.lo : piece.lo + piece.n] = values[piece.at : piece.at + piece.n]

    def parameters(self) -> np.ndarray:
        """Returns all parameters of these buckets in an array of the arena's layout.

        Collective with stage 3. Otherwise the array is the arena's.
        """
        if not self.partitioned:
            return self.arena.params
        flat = self.arena.make(self.arena.size)
        for lo, params, _ in self.held():
            flat[lo : lo + params.size] = params
        self.fill(flat)
        return flat

    def load(self, read: Callable[[int, np.ndarray], None]) -> None:
        """Loads the parameters that this rank keeps.

        Args:
            read: called as read(place, array), fills the array with the parameters that start at
                a place (in floats) of the arena.
        """
        if not self.partitioned:
            read(0, self.arena.params)
            return
        self.changed()
        for lo, params, _ in self.held():
            read(lo, params)

    def held(self) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yields this rank's parts.

        Each is (first float in the arena, parameters, first float in the optimizer's state).
        """
        if self.whole and not self.partitioned:
            yield 0, self.arena.params, 0
            return
        for b, (part_start, _) in enumerate(self.own):
            for piece in self.pieces(b):
                if self.partitioned:
                    start = piece.at - part_start
                    parameters = self._store[b][start : start + piece.n]
                else:
                    parameters = self.arena.params[piece.lo : piece.lo + piece.n]
                yield piece.lo, parameters, self.state_at(b, piece)

    def state_at(self, b: int, piece: BucketRange) -> int:
        """Returns the place of a piece of this rank's part of bucket b in the optimizer's state.

        It is in floats.
        """
        if self.whole:
            return piece.lo
        part_start, _ = self.own[b]
        return self.starts[b] + piece.at - part_start

    def state(self, local_state: np.ndarray) -> np.ndarray:
        """Returns an array of the optimizer's state in the arena's layout, with all ranks' parts.

        It is the inverse of `cut_state`. Collective from stage 1 on.
        """
        if self.whole:
            return local_state
        flat = self.arena.make(self.arena.size)
        for lo, params, start in self.held():
            flat[lo : lo + params.size] = local_state[start : start + params.size]
        if self.stage:
            self.fill(flat)
        return flat

    def cut_state(self, flat: np.ndarray) -> np.ndarray:
        """Returns this rank's parts of an array of the arena's layout, as the optimizer has it."""
        if self.whole:
            return flat
        local_state = self.arena.make(self.floats)
        for lo, params, start in self.held():
            local_state[start : start + params.size] = flat[lo : lo + params.size]
        return local_state

    @property
    def nbytes(self) -> int:
        """The bytes of parameters that this rank keeps, with the slots."""
        if not self.partitioned:
            return self.arena.params.nbytes
        return sum(a.nbytes for a in (*self._store, *self._slots))
