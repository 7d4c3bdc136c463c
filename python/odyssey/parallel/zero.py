"""ZeRO: which rank keeps which part of the parameters, gradients and optimizer state
(Rajbhandari et al. 2020).

Stage 1 keeps the optimizer state in parts, stage 2 the gradients as well, stage 3 the parameters
too. A part is a range of a bucket (buckets.py): rank r of the data-parallel group has the r-th of
`plan.exchange`'s ranges, which is also the range whose gradients it sums. An update is elementwise,
so where it is computed changes no bit.

With stage 3 a bucket's parameters are gathered into one of two slots just before a segment needs
them, the next one's while it computes, and are overwritten afterwards. A bucket so large that two
slots of its size would take more has memory of its own (`kept`): it is gathered once per step and
there from its first use to its last.
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
    """Buckets that a segment of a program needs, with their slots, and those that are gathered
    while it runs.
    """

    at: dict[int, int]
    ahead: list[tuple[int, int]]


def unshared_buckets(floats: list[int]) -> tuple[int, ...]:
    """Which buckets of these sizes have memory of their own, so that this and two slots for the
    others are smallest.
    """
    order = sorted(range(len(floats)), key=lambda b: (-floats[b], b))
    sizes = [*(floats[b] for b in order), 0]
    needs = [sum(sizes[:n]) + 2 * sizes[n] for n in range(len(sizes))]
    return tuple(order[: max(n for n in range(len(sizes)) if needs[n] == min(needs))])


class Parts:
    """The parts of all buckets over one data-parallel group, and with stage 3 the parameters
    themselves.

    ranges[b][r]: floats of bucket b that rank r has (all of them for everyone at stage 0). own[b]:
    this rank's. starts[b]: where they begin in the state of the optimizer. floats: of the
    optimizer's state on this rank. bytes_sent: by this rank so far, of parameters that others
    compute with.
    """

    def __init__(self, stage: int, buckets: list[Bucket], comm: Communicator, arena: Arena) -> None:
        self.stage = stage
        self.buckets = buckets
        self.comm = comm
        self.arena = arena
        self.bytes_sent = 0
        everything = stage == 0 or comm.size == 1
        self.ranges: list[tuple[Run, ...]] = [
            ((0, b.floats),) * comm.size
            if everything
            else exchange(comm.size, comm.size, 1, b.floats).ranges
            for b in buckets
        ]
        self.own: list[Run] = [r[comm.rank] for r in self.ranges]
        *self.starts, self.floats = itertools.accumulate((b - a for a, b in self.own), initial=0)
        # The state is then of the arena's own layout. `floats` would not do: it counts the padding
        # of pieces as well.
        self.whole = everything and sum(p.n for b in buckets for p in b.pieces) == arena.size
        self.partitioned = stage == 3 and comm.size > 1
        if self.partitioned:
            self._store = []
            for bucket, run in zip(buckets, self.own, strict=True):
                self._store.append(self._cut(arena.params, bucket, *run, arena.make))
                # not to have all parameters and this rank's part at once
                for piece in bucket.pieces:
                    native.discard(arena.params[piece.lo : piece.lo + piece.n])
            self.kept = unshared_buckets([b.floats for b in buckets])
            self._shared = max(
                (b.floats for i, b in enumerate(buckets) if i not in self.kept), default=0
            )
            # of those that are kept, in order, then of the others
            self._slots: list[np.ndarray] = []
            self._holds: list[int | None] = []
            self._requests: list[Request | None] = []
            for floats in (
                *(buckets[b].floats for b in self.kept),
                *[self._shared] * (2 if self._shared else 0),
            ):
                self._add_slot(floats)
            arena.release_full_parameters()

    def _add_slot(self, floats: int) -> None:
        self._slots.append(native.aligned(floats))
        self._holds.append(None)
        self._requests.append(None)

    @staticmethod
    def _cut(
        flat: np.ndarray, bucket: Bucket, a: int, b: int, make: Any = native.aligned
    ) -> np.ndarray:
        out = make(b - a)
        for piece in bucket.covers(a, b):
            out[piece.at - a : piece.at - a + piece.n] = flat[piece.lo : piece.lo + piece.n]
        return out

    def pieces(self, b: int) -> list[BucketRange]:
        """This rank's part of bucket b as runs of the arena."""
        return self.buckets[b].covers(*self.own[b])

    def param_address(self, b: int, piece: BucketRange) -> int:
        """Where the parameters of a piece of this rank's part are updated."""
        if self.partitioned:
            return self._store[b].ctypes.data + 4 * (piece.at - self.own[b][0])
        return self.arena.address(native.PARAMS) + 4 * piece.lo

    def updates(self, b: int, grads: Callable[[BucketRange], int]) -> list[Update]:
        """The updates of this rank's part of bucket b; `grads`: the address of a piece's
        gradients.
        """
        return [
            Update(self.param_address(b, p), grads(p), self.state_at(b, p), p.n, p.lo)
            for p in self.pieces(b)
        ]

    # --- stage 3: parameters come and go ---

    def places(self, reads: list[tuple[int, ...]]) -> list[Gathering]:
        """Where the parameters of each segment of a program will be, and what is gathered when.

        reads: buckets that each segment reads. Makes further slots where one reads more than fit.
        """
        kept_slot = {b: i for i, b in enumerate(self.kept)}
        holds: dict[int, int] = {}  # slot -> bucket
        # shared slot -> the last segment that reads it
        used = dict.fromkeys(range(len(kept_slot), len(self._slots)), -1)
        gatherings: list[Gathering] = []
        last_gathered = 0  # the segment for which something was gathered last
        for i, bucket_ids in enumerate(reads):
            slot_of: dict[int, int] = {}
            gathered = False
            for b in bucket_ids:
                slot = next((s for s, held in holds.items() if held == b), kept_slot.get(b))
                if slot is None:
                    free = [s for s in used if holds.get(s) not in bucket_ids]
                    if not free:
                        self._add_slot(self._shared)
                        free = [len(self._slots) - 1]
                        used[free[0]] = -1
                    slot = min(free, key=lambda s: used[s])
                if holds.get(slot) != b:
                    # nobody reads the slot from there on
                    early = max(last_gathered, used.get(slot, -1) + 1)
                    if early < i:
                        gatherings[early].ahead.append((b, slot))
                    holds[slot] = b
                    gathered = True
                if slot in used:
                    used[slot] = i
                slot_of[b] = slot
            gatherings.append(Gathering(slot_of, []))
            last_gathered = i if gathered else last_gathered
        return gatherings

    def address(self, slot: int) -> int:
        """Where a slot is; it stays there."""
        return self._slots[slot].ctypes.data

    def prefetch(self, b: int, slot: int) -> None:
        """Starts to gather a bucket into a slot, which nobody reads now; nothing to do where it
        is there already.
        """
        if self._holds[slot] == b:
            return
        self._abandon(slot)
        lo, hi = self.own[b]
        into = self._slots[slot][: self.buckets[b].floats]
        into[lo:hi] = self._store[b]
        self._holds[slot] = b
        self._requests[slot] = self.comm.all_gather_v(into, self.ranges[b], wait=False)
        self.bytes_sent += 4 * (hi - lo) * (self.comm.size - 1)

    def use(self, b: int, slot: int) -> None:
        """Completes a bucket's parameters in a slot, until another one is gathered into it."""
        self.prefetch(b, slot)
        if self._requests[slot] is not None:
            self._requests[slot].wait()
            self._requests[slot] = None

    def _abandon(self, slot: int) -> None:
        if self._requests[slot] is not None:
            self._requests[slot].wait()
        self._holds[slot] = self._requests[slot] = None

    def changed(self) -> None:
        """After an update: what was gathered is out of date (stage 3), or the others' parts are
        (stages 1 and 2).
        """
        if self.comm.size == 1 or self.stage == 0:
            return
        if self.partitioned:
            for slot in range(len(self._slots)):
                self._abandon(slot)
            return
        self.fill(self.arena.params)
        self.bytes_sent += 4 * self.floats * (self.comm.size - 1)

    def fill(self, flat: np.ndarray) -> None:
        """Completes an array of the arena's layout, in which each rank has its parts, on every
        rank.
        """
        if self.comm.size == 1:
            return
        requests = []
        for b, bucket in enumerate(self.buckets):
            first = bucket.pieces[0].lo if bucket.pieces else 0
            # padded, it may be longer
            direct = len(bucket.pieces) == 1 and first + bucket.floats <= flat.size
            full_bucket = (
                flat[first : first + bucket.floats]
                if direct
                else np.empty(bucket.floats, flat.dtype)
            )
            if not direct:
                for p in self.pieces(b):
                    full_bucket[p.at : p.at + p.n] = flat[p.lo : p.lo + p.n]
            requests.append(
                (
                    bucket,
                    full_bucket,
                    direct,
                    self.comm.all_gather_v(full_bucket, self.ranges[b], wait=False),
                )
            )
        for bucket, full_bucket, direct, request in requests:
            request.wait()
            if not direct:
                for p in bucket.pieces:
                    flat[p.lo : p.lo + p.n] = full_bucket[p.at : p.at + p.n]

    def parameters(self) -> np.ndarray:
        """All parameters of these buckets in an array of the arena's layout; a collective call
        at stage 3.
        """
        if not self.partitioned:
            return self.arena.params
        flat = self.arena.make(self.arena.size)
        for lo, params, _ in self.held():
            flat[lo : lo + params.size] = params
        self.fill(flat)
        return flat

    def load(self, read: Callable[[int, np.ndarray], None]) -> None:
        """Takes what this rank has from `read`, which puts the arena's parameters from a place
        on into an array.
        """
        if not self.partitioned:
            read(0, self.arena.params)
            return
        self.changed()
        for lo, params, _ in self.held():
            read(lo, params)

    def held(self) -> Iterator[tuple[int, np.ndarray, int]]:
        """This rank's parts: first float in the arena, parameters, first float in the
        optimizer's state.
        """
        if self.whole and not self.partitioned:
            yield 0, self.arena.params, 0
            return
        for b, (lo, _) in enumerate(self.own):
            for p in self.pieces(b):
                flat, start = (
                    (self._store[b], p.at - lo) if self.partitioned else (self.arena.params, p.lo)
                )
                yield p.lo, flat[start : start + p.n], self.state_at(b, p)

    def state_at(self, b: int, piece: BucketRange) -> int:
        """Where a piece of this rank's part of bucket b is in the optimizer's state, in floats."""
        return piece.lo if self.whole else self.starts[b] + piece.at - self.own[b][0]

    def state(self, local_state: np.ndarray) -> np.ndarray:
        """An optimizer's array of this rank's parts as an array of the arena's layout;
        collective from stage 1 on.
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
        """The inverse of `state`: this rank's parts of an array of the arena's layout."""
        if self.whole:
            return flat
        local_state = self.arena.make(self.floats)
        for lo, params, start in self.held():
            local_state[start : start + params.size] = flat[lo : lo + params.size]
        return local_state

    @property
    def nbytes(self) -> int:
        """Bytes of parameters on this rank that this object keeps."""
        if not self.partitioned:
            return self.arena.params.nbytes
        return sum(a.nbytes for a in (*self._store, *self._slots))
