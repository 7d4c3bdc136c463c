"""Buckets: the parameters cut into groups in the order in which a backward pass finishes their gradients.

Pure functions over the records of one shard's program (program.py), the same on every rank. A bucket's reduction can
start as soon as the last record that writes to it has run for all shards; with ZeRO 2 and 3 it is also the unit in
which gradients and parameters come and go. No hooks: which record writes which gradient is there to be read.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from ..core import native
from ..core.arena import Arena
from ..core.program import Range, Record
from ..errors import ConfigError

FLOATS_PER_MB = 2**20 // 4


class Piece(NamedTuple):
    """A run of floats of the arena: [lo, lo + n), and where it is within its bucket."""

    lo: int
    n: int
    at: int


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced together."""

    names: tuple[str, ...]
    pieces: tuple[Piece, ...]  # in the order of the arena; neighbours are one piece
    floats: int

    def locate(self, offset: int) -> int:
        """Where a place of the arena (in floats) is in the bucket; it must be in one of the pieces."""
        piece = self.pieces[bisect.bisect_right(self.pieces, offset, key=lambda p: p.lo) - 1]
        assert piece.lo <= offset < piece.lo + piece.n, offset
        return piece.at + offset - piece.lo

    def covers(self, lo: int, hi: int) -> list[Piece]:
        """The parts of the arena that [lo, hi) of this bucket is."""
        out = []
        for p in self.pieces:
            a, b = max(lo, p.at), min(hi, p.at + p.n)
            if a < b:
                out.append(Piece(p.lo + a - p.at, b - a, a))
        return out


class Segment(NamedTuple):
    """Records [start, stop) of a program; `params` is the bucket they read (None: any), `grads` the one they write."""

    start: int
    stop: int
    params: int | None
    grads: int | None


STATS = -1  # the "bucket" of the statistics behind the gradients


def touched(record: Record, arena: Arena, space: int) -> list[int]:
    """Offsets (in floats) of the arena's parameters (native.PARAMS) or gradients (native.GRADS) a record uses."""
    return [a.offset // 4 for a in record.args if isinstance(a, Range) and a.arena is arena and a.space == space]


def unused(records: list[Record], arena: Arena) -> list[str]:
    """Names of the parameters that no record gives a gradient to, though they are to be trained."""
    written = {o for r in records for o in touched(r, arena, native.GRADS)}
    return [name for name, p in arena.named if p.requires_grad and arena.offsets[name] not in written]


def cut(records: list[Record], arena: Arena, limit: int, *, by_params: bool = False) -> list[Bucket]:
    """Buckets of at least `limit` floats (the last may be smaller), in the order in which they are finished.

    Parameters written by one record stay together. A bucket takes in everything that would still be written while a
    later one is being filled. Parameters without a gradient come last, in the order in which they are read.

    by_params: parameters that one record reads stay together as well, and whatever is read while a bucket's
        gradients are written is in that bucket: what `segments` needs to have parameters of one bucket at a time.
    """
    writes = [[o for o in touched(r, arena, native.GRADS) if o < arena.size] for r in records]
    reads = [touched(r, arena, native.PARAMS) if by_params else [] for r in records]
    last = {o: i for i, found in enumerate(writes) for o in found}
    sizes = padded(arena)
    begun = {o: i for i, r in reversed(list(enumerate(records))) for o in touched(r, arena, native.PARAMS)}
    rest = sorted((o for o in sizes if o not in last), key=lambda o: (begun.get(o, len(records)), o))
    cuts = _grouped([*sorted(last, key=lambda o: (last[o], o)), *rest], sizes, limit, last)
    while (joined := _joined(cuts, writes, reads)) != cuts:
        cuts = joined
    return _named(arena, cuts)


def from_the_end(arena: Arena, limit: int) -> list[Bucket]:
    """Buckets of at least `limit` floats for programs that are not recorded: the last parameters first, as backward
    passes mostly finish them; each is one piece of the arena."""
    sizes = padded(arena)
    return _named(arena, _grouped(sorted(sizes, reverse=True), sizes, limit, {}))


def padded(arena: Arena) -> dict[int, int]:
    """Floats of each parameter, with what follows it up to a vector boundary, by its offset."""
    return {arena.offsets[name]: -(-p.size // 16) * 16 for name, p in arena.named}


def _named(arena: Arena, cuts: list[list[int]]) -> list[Bucket]:
    names = {o: n for n, o in arena.offsets.items()}
    return [some(arena, tuple(names[o] for o in sorted(offsets))) for offsets in cuts]


def _grouped(order: list[int], sizes: dict[int, int], limit: int, last: dict[int, int]) -> list[list[int]]:
    """Parameters in order, a new group once one has `limit` floats; those that have one record as their `last` to write
    them stay together."""
    cuts: list[list[int]] = []
    before = None
    for o in order:
        together = o in last and last[o] == before
        if cuts and (together or sum(sizes[x] for x in cuts[-1]) < limit):
            cuts[-1].append(o)
        else:
            cuts.append([o])
        before = last.get(o)
    return cuts


def _joined(cuts: list[list[int]], writes: list[list[int]], reads: list[list[int]]) -> list[list[int]]:
    """The same groups of parameters, those made one that cannot be apart; writes and reads: of each record."""
    group = {o: i for i, offsets in enumerate(cuts) for o in offsets}
    spans: dict[int, list[int]] = {}
    for i, found in enumerate(writes):
        for o in found:
            spans.setdefault(group[o], [i, i])[1] = i
    head = list(range(len(cuts)))  # the first group of those that are one

    def join(a: int, b: int) -> None:
        a, b = sorted((head[a], head[b]))
        if a != b:
            head[:] = [a if h == b else h for h in head]

    writing: list[int | None] = [None] * len(writes)
    for g, (start, stop) in spans.items():
        for i in range(start, stop + 1):
            if writing[i] is not None:
                join(writing[i], g)
            writing[i] = g
    for g, found in zip(writing, reads, strict=True):
        together = [group[o] for o in found] + ([] if g is None else [g])
        for other in together[1:] if found else ():
            join(together[0], other)
    return [[o for i, offsets in enumerate(cuts) if head[i] == h for o in offsets] for h in dict.fromkeys(sorted(head))]


def some(arena: Arena, names: Iterable[str]) -> Bucket:
    """One bucket of some parameters."""
    sizes = padded(arena)
    return of_ranges([(arena.offsets[n], sizes[arena.offsets[n]]) for n in names], tuple(names))


def of_ranges(ranges: Iterable[tuple[int, int]], names: tuple[str, ...]) -> Bucket:
    """One bucket of ranges of the arena (start, floats), each from a vector boundary of the bucket."""
    pieces: list[Piece] = []
    at = 0
    for lo, n in sorted(ranges):
        if pieces and pieces[-1].lo + pieces[-1].n == lo and pieces[-1].at + pieces[-1].n == at:
            pieces[-1] = Piece(pieces[-1].lo, pieces[-1].n + n, pieces[-1].at)
        else:
            pieces.append(Piece(lo, n, at))
        at += -(-n // 16) * 16
    return Bucket(names, tuple(pieces), at)


def segments(records: list[Record], arena: Arena, buckets: list[Bucket], *, by_params: bool) -> list[Segment]:
    """The program cut so that each bucket of gradients is written by one segment and, if `by_params`, each segment
    reads parameters of one bucket.

    A bucket's gradients are complete after its segment; what comes between two of them is a segment without gradients.
    """
    bucket_of = {arena.offsets[name]: i for i, b in enumerate(buckets) for name in b.names}
    spans: dict[int, list[int]] = {}
    for i, r in enumerate(records):
        for o in touched(r, arena, native.GRADS):
            spans.setdefault(bucket_of[o] if o < arena.size else STATS, [i, i])[1] = i
    if STATS in spans and not by_params:
        spans[STATS][0] = 0
    out: list[Segment] = []
    at = 0
    for b, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first < at:
            raise ConfigError(
                "[train] a gradient is written again after its bucket is complete: this batch runs other ops than the "
                "first one; raise bucket_size_mb"
            )
        out += _by_params(records, arena, bucket_of, at, first, None, by_params)
        inside = _by_params(records, arena, bucket_of, first, last + 1, b, by_params)
        if len(inside) > 1:
            raise ConfigError(
                "[zero] a bucket's gradients need parameters of another one: this batch runs other ops than the first "
                "one; raise bucket_size_mb"
            )
        out += inside
        at = last + 1
    return out + _by_params(records, arena, bucket_of, at, len(records), None, by_params)


def _by_params(
    records: list[Record],
    arena: Arena,
    bucket_of: dict[int, int],
    start: int,
    stop: int,
    grads: int | None,
    by_params: bool,
) -> list[Segment]:
    """Records [start, stop) as segments of one bucket of parameters each."""
    if start == stop:
        return []
    if not by_params:
        return [Segment(start, stop, None, grads)]
    out: list[Segment] = []
    begun, current = start, None
    for i in range(start, stop):
        for o in touched(records[i], arena, native.PARAMS):
            if current not in (None, bucket_of[o]):
                out.append(Segment(begun, i, current, grads))
                begun = i
            current = bucket_of[o]  # all that a record reads is in one bucket (cut)
    return [*out, Segment(begun, stop, current, grads)]
