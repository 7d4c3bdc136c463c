"""Buckets: the parameters cut into groups in the order in which a backward pass finishes their
gradients.

Pure functions over the records of one shard's program (program.py), the same on every rank. A
bucket's reduction can start as soon as the last record that writes to it has run for all shards;
with ZeRO 2 and 3 it is also the unit in which gradients and parameters come and go. No hooks: which
record writes which gradient is there to be read.

Buckets are cut once, by the first program, and then fit any other: one in which layers are frozen
or not any more, or whose forward pass takes another way. What a program adds to a gradient before
the segment of its bucket, as the output layer does to a weight that is the embedding's too, is
summed in the shard's workspace until then (`segments`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from ..core import native
from ..core.arena import Arena
from ..core.program import Range, Record, Slot

FLOATS_PER_MB = 2**20 // 4


class BucketRange(NamedTuple):
    """A run of floats of the arena: [lo, lo + n), and where it is within its bucket."""

    lo: int
    n: int
    at: int


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced together."""

    names: tuple[str, ...]
    pieces: tuple[BucketRange, ...]  # in the order of the arena; neighbours are one piece
    floats: int

    def locate(self, offset: int) -> int:
        """Where a place of the arena (in floats) is in the bucket; it must be in one of the
        pieces.
        """
        piece = self.pieces[bisect.bisect_right(self.pieces, offset, key=lambda p: p.lo) - 1]
        assert piece.lo <= offset < piece.lo + piece.n, offset
        return piece.at + offset - piece.lo

    def covers(self, lo: int, hi: int) -> list[BucketRange]:
        """The parts of the arena that [lo, hi) of this bucket is."""
        out = []
        for p in self.pieces:
            a = max(lo, p.at)
            b = min(hi, p.at + p.n)
            if a < b:
                out.append(BucketRange(p.lo + a - p.at, b - a, a))
        return out


class Segment(NamedTuple):
    """Records [start, stop) of a program; `params` are the buckets they read, `grads` the one
    they write.
    """

    start: int
    stop: int
    params: tuple[int, ...]
    grads: int | None


STATS = -1  # the "bucket" of the statistics behind the gradients
# buckets of parameters that a segment with gradients reads: so many are there at a time (zero.py)
MAX_BUCKETS_READ = 2


def touched(record: Record, arena: Arena, space: int) -> list[int]:
    """Offsets (in floats) of the arena's parameters (native.PARAMS) or gradients (native.GRADS)
    a record uses.
    """
    return [
        a.offset // 4
        for a in record.args
        if isinstance(a, Range) and a.arena is arena and a.space == space
    ]


def same_range(a: object, b: Range) -> bool:
    """Returns whether an argument is this piece of an arena."""
    return (
        isinstance(a, Range) and a.arena is b.arena and (a.space, a.offset) == (b.space, b.offset)
    )


def unused(records: list[Record], arena: Arena) -> list[str]:
    """Names of the parameters that no record gives a gradient to, though they are to be trained."""
    written_offsets = {o for r in records for o in touched(r, arena, native.GRADS)}
    return [
        name
        for name, p in arena.named
        if p.requires_grad and arena.offsets[name] not in written_offsets
    ]


def cut(records: list[Record], arena: Arena, limit: int) -> list[Bucket]:
    """Buckets of at least `limit` floats (the last may be smaller), in the order in which they
    are finished.

    Parameters that one record uses stay together, and so do those whose ops take turns, as a
    recurrent layer's. A parameter that is used again after others, of `limit` floats or more, is in
    a bucket of such parameters alone. One that is frozen is where it would be if it were trained;
    those that no record uses come last.
    """
    sizes = padded(arena)
    spans = _spans(records, arena, sizes)
    far = {o for o, span in spans.items() if _within(span, spans, sizes) >= max(limit, 1)}
    position = _positions(records, arena, sizes, spans)
    keyed_groups: list[tuple[tuple[float, int], list[int]]] = []
    for chosen in (sizes.keys() - far, far):
        units = _together(records, arena, chosen, {} if chosen is far else spans)
        keyed = sorted((max(position[o] for o in unit), sorted(unit)) for unit in units)
        groups = _grouped([unit for _, unit in keyed], sizes, limit)
        keyed_groups += [(max(position[o] for o in group), group) for group in groups]
    return _make_buckets(arena, [group for _, group in sorted(keyed_groups)])


def _spans(
    records: list[Record], arena: Arena, sizes: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """The numbers of the first and last forward op that use a parameter, by its offset."""
    spans: dict[int, tuple[int, int]] = {}
    for r in records:
        for o in _used(r, arena):
            if o in sizes and r.tag >= 0:
                lo, hi = spans.get(o, (r.tag, r.tag))
                spans[o] = (min(lo, r.tag), max(hi, r.tag))
    return spans


def _within(span: tuple[int, int], spans: dict[int, tuple[int, int]], sizes: dict[int, int]) -> int:
    """Floats of the parameters that are used between the first and the last op of a span alone."""
    lo, hi = span
    return sum(sizes[o] for o, (a, b) in spans.items() if lo < a and b < hi) if hi - lo > 1 else 0


def _positions(
    records: list[Record], arena: Arena, sizes: dict[int, int], spans: dict[int, tuple[int, int]]
) -> dict[int, tuple[float, int]]:
    """For each parameter a key of the order in which gradients are finished: by the last record
    of the backward pass that writes one, or, where none does, by where the backward of its
    first op would be.
    """
    pass_back = [(i, r) for i, r in enumerate(records) if r.phase == "backward"]
    # gradients that no kernel adds itself are added when all ops are through
    summed = (i for i, r in pass_back if r.op == "accumulate" and touched(r, arena, native.GRADS))
    end = next(summed, len(records))
    write_positions = {
        o: (i, 0) for i, r in pass_back for o in touched(r, arena, native.GRADS) if o in sizes
    }
    positions: dict[int, tuple[float, int]] = {}
    for o in sizes:
        if o in write_positions:
            positions[o] = write_positions[o]
        elif o in spans:
            first = spans[o][0]
            next_index = next((i for i, r in pass_back if r.tag < first and i < end), end)
            positions[o] = (next_index - 0.5, -first)
        else:
            positions[o] = (float("inf"), 0)
    return positions


def _together(
    records: list[Record], arena: Arena, chosen: Iterable[int], spans: dict[int, tuple[int, int]]
) -> list[list[int]]:
    """Some parameters in groups that must not be apart: of one record, or of ops that take turns
    by their `spans`.
    """
    head = {o: o for o in chosen}

    def find(o: int) -> int:
        while head[o] != o:
            head[o] = o = head[head[o]]
        return o

    for r in records:
        offsets = [o for o in _used(r, arena) if o in head]
        for o in offsets[1:]:
            head[find(o)] = find(offsets[0])
    while True:
        extents: dict[int, tuple[int, int]] = {}
        for o, (a, b) in spans.items():
            if o in head and a < b:
                lo, hi = extents.get(find(o), (a, b))
                extents[find(o)] = (min(lo, a), max(hi, b))
        head_extents = extents.items()
        turns = [
            (x, y) for x, (a, b) in head_extents for y, (c, d) in head_extents if a < c < b < d
        ]
        if not turns:
            break
        for x, y in turns:
            head[find(x)] = find(y)
    groups: dict[int, list[int]] = {}
    for o in head:
        groups.setdefault(find(o), []).append(o)
    return list(groups.values())


def _used(record: Record, arena: Arena) -> list[int]:
    """Offsets of the parameters that a record reads, or whose gradients it writes."""
    return [*touched(record, arena, native.PARAMS), *touched(record, arena, native.GRADS)]


def from_the_end(arena: Arena, limit: int) -> list[Bucket]:
    """Buckets of at least `limit` floats for programs that are not recorded: the last parameters
    first, as backward passes mostly finish them; each is one piece of the arena.
    """
    sizes = padded(arena)
    return _make_buckets(arena, _grouped([[o] for o in sorted(sizes, reverse=True)], sizes, limit))


def padded(arena: Arena) -> dict[int, int]:
    """Floats of each parameter, with what follows it up to a vector boundary, by its offset."""
    return {arena.offsets[name]: -(-p.size // 16) * 16 for name, p in arena.named}


def _make_buckets(arena: Arena, cuts: list[list[int]]) -> list[Bucket]:
    names = {o: n for n, o in arena.offsets.items()}
    return [of_names(arena, tuple(names[o] for o in sorted(offsets))) for offsets in cuts]


def _grouped(units: list[list[int]], sizes: dict[int, int], limit: int) -> list[list[int]]:
    """Units of parameters in order, a new group once one has `limit` floats."""
    cuts: list[list[int]] = []
    floats = 0
    for unit in units:
        if not cuts or floats >= limit:
            cuts.append([])
            floats = 0
        cuts[-1] += unit
        floats += sum(sizes[o] for o in unit)
    return cuts


def of_names(arena: Arena, names: Iterable[str]) -> Bucket:
    """One bucket of some parameters."""
    sizes = padded(arena)
    return of_ranges([(arena.offsets[n], sizes[arena.offsets[n]]) for n in names], tuple(names))


def of_ranges(ranges: Iterable[tuple[int, int]], names: tuple[str, ...]) -> Bucket:
    """One bucket of ranges of the arena (start, floats), each from a vector boundary of the
    bucket.
    """
    pieces: list[BucketRange] = []
    offset = 0
    for lo, n in sorted(ranges):
        if pieces and pieces[-1].lo + pieces[-1].n == lo and pieces[-1].at + pieces[-1].n == offset:
            pieces[-1] = BucketRange(pieces[-1].lo, pieces[-1].n + n, pieces[-1].at)
        else:
            pieces.append(BucketRange(lo, n, offset))
        offset += -(-n // 16) * 16
    return Bucket(names, tuple(pieces), offset)


def too_large(buckets: list[Bucket], setting: str) -> list[str]:
    """Returns a line for the user where one bucket is more than half of a model, as that much is
    kept whole.

    setting: what saves little memory then, as the user wrote it.
    """
    bucket = max(buckets, key=lambda b: b.floats)
    total = sum(b.floats for b in buckets)
    if 2 * bucket.floats <= total:
        return []
    names = ", ".join(bucket.names[:2]) + (
        f" and {len(bucket.names) - 2} more" if len(bucket.names) > 2 else ""
    )
    return [
        f"{names} are one bucket with {100 * bucket.floats / total:.0f} % of the parameters, which "
        f"{setting} has whole "
        "in memory while it is used; for less, lower bucket_size_mb if it has several layers, "
        "else use smaller layers, "
        "or share them with tp"
    ]


def segments(
    records: list[Record], arena: Arena, buckets: list[Bucket], *, by_params: bool
) -> tuple[list[Record], list[Segment]]:
    """The program cut so that each bucket of gradients is written by one segment and, if
    `by_params`, most segments read parameters of one bucket. Returns the records to be run,
    and which of them each segment has.

    A bucket's gradients are complete after its segment; what comes between two of them is a segment
    without gradients. What is added to a gradient before the segment of its bucket goes to a sum in
    the shard's workspace, with which that segment begins: the additions and their order are those
    of the program, so no bit changes.
    """
    bucket_of = {arena.offsets[name]: i for i, b in enumerate(buckets) for name in b.names}
    writes = [
        [STATS if o >= arena.size else bucket_of[o] for o in touched(r, arena, native.GRADS)]
        for r in records
    ]
    reads = [
        {bucket_of[o] for o in touched(r, arena, native.PARAMS)} if by_params else set()
        for r in records
    ]
    out: list[Record] = []
    parts: list[Segment] = []

    def plain(start: int, stop: int) -> None:
        """Appends records without gradients, in segments of one bucket of parameters each where
        that is possible.
        """
        segment_start = len(out)
        current = set()
        for r, read_buckets in zip(early[start:stop], reads[start:stop], strict=True):
            if current and not read_buckets <= current:
                parts.append(Segment(segment_start, len(out), tuple(sorted(current)), None))
                segment_start = len(out)
                current = set()
            current |= read_buckets
            out.extend(r)
        if segment_start < len(out):
            parts.append(Segment(segment_start, len(out), tuple(sorted(current)), None))

    regions = _regions(writes, reads, by_params)
    early, sums = _early(records, arena, bucket_of, {b: start for b, start, _ in regions})
    position = 0
    for b, start, stop in regions:
        plain(position, start)
        segment_start = len(out)
        out += sums.get(b, [])
        for r in early[start:stop]:
            out += r
        parts.append(
            Segment(segment_start, len(out), tuple(sorted(set().union(*reads[start:stop]))), b)
        )
        position = stop
    plain(position, len(records))
    return out, parts


def _regions(
    writes: list[list[int]], reads: list[set[int]], by_params: bool
) -> list[tuple[int, int, int]]:
    """For each bucket that is written (or STATS) the records [start, stop) that may write to it,
    in order: those up to the last that does, from the first that does after the bucket before
    it is complete. They may be none.
    """
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for i, bucket_ids in enumerate(writes):
        for b in bucket_ids:
            begin.setdefault(b, i)
            end[b] = i
    if STATS in end:
        first = begin[STATS] if by_params else 0
        # what is finished meanwhile comes right after them
        end = {b: max(i, end[STATS]) if i >= first else i for b, i in end.items()}
    regions: list[tuple[int, int, int]] = []
    position = 0
    for b, last in sorted(end.items(), key=lambda item: (item[1], item[0])):
        start = stop = max(last + 1, position)
        read_buckets: set[int] = set()
        for i in range(last, position - 1, -1):
            read_buckets |= reads[i]
            if b != STATS and len(read_buckets) > MAX_BUCKETS_READ and i < last:
                # the workspace keeps what was added before: parameters of more buckets would have
                # to be there
                break
            if b in writes[i]:
                start = i
        if b == STATS and not by_params:
            start = position
        regions.append((b, start, stop))
        position = stop
    return regions


def _early(
    records: list[Record], arena: Arena, bucket_of: dict[int, int], starts: dict[int, int]
) -> tuple[list[list[Record]], dict[int, list[Record]]]:
    """The records that stand for each one where a gradient is added to too early, and those that
    segments begin with.

    starts: the first record of the segment of a bucket.
    """
    sizes = padded(arena)
    slots: dict[int, Slot] = {}
    out: list[list[Record]] = []
    sums: dict[int, list[Record]] = {}
    for i, r in enumerate(records):
        new = [r]
        for o in dict.fromkeys(touched(r, arena, native.GRADS)):
            if o >= arena.size or i >= starts[bucket_of[o]]:
                continue
            gradient = Range(arena, native.GRADS, 4 * o)
            if o not in slots:
                slots[o] = Slot(4 * sizes[o])
                new.insert(
                    0,
                    r.changed(
                        op="fill", args=[slots[o], 0.0, sizes[o]], layout="lanes", dtype="fp32"
                    ),
                )
                added = [gradient, slots[o], sizes[o]]
                sums.setdefault(bucket_of[o], []).append(
                    Record("accumulate", added, tag=r.tag, phase="backward")
                )
            new[-1] = new[-1].changed(
                args=[slots[o] if same_range(a, gradient) else a for a in new[-1].args]
            )
        out.append(new)
    return out, sums
