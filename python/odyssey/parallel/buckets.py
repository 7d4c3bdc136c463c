"""Buckets: groups of parameters, in the order in which a backward pass finishes their gradients.

Pure functions over the records of one shard's program (program.py), with the same results on every
rank. The reduction of a bucket can start when the last record that writes to the bucket has run for
all shards. With ZeRO 2 and 3 the gradients and parameters of a bucket are allocated and gathered
together. Hooks aren't necessary, because the records show which gradients they write.

Buckets are cut once, by the first program, and are then used for all programs. In another program
layers may be frozen, or forward() may take another branch. A program may add to a gradient before
the segment of its bucket. For example, the output layer adds to the embedding's weight if both
share it. Such additions go to a sum in the shard's workspace first (`segments`).

In these functions a parameter is its offset in the arena.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from ..core import native
from ..core.arena import Arena
from ..core.program import Range, Record, Slot
from .plan import VECTOR

FLOATS_PER_MB = 2**20 // 4


class BucketRange(NamedTuple):
    """A run of floats of the arena, [lo, lo + n), that starts at float `at` of its bucket."""

    lo: int
    n: int
    at: int


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced together."""

    names: tuple[str, ...]
    pieces: tuple[BucketRange, ...]  # in the order of the arena; neighbours are one piece
    floats: int

    def locate(self, offset: int) -> int:
        """Returns the float of the bucket that a float of the arena is.

        The float must be in one of the bucket's pieces.
        """
        piece = self.pieces[bisect.bisect_right(self.pieces, offset, key=lambda p: p.lo) - 1]
        assert piece.lo <= offset < piece.lo + piece.n, offset
        return piece.at + offset - piece.lo

    def covers(self, lo: int, hi: int) -> list[BucketRange]:
        """Returns the runs of the arena that the floats [lo, hi) of this bucket are."""
        runs = []
        for piece in self.pieces:
            start = max(lo, piece.at)
            stop = min(hi, piece.at + piece.n)
            if start < stop:
                runs.append(BucketRange(piece.lo + start - piece.at, stop - start, start))
        return runs


class Segment(NamedTuple):
    """The records [start, stop) of a program, which run before the next segment starts."""

    start: int
    stop: int
    params: tuple[int, ...]  # buckets of parameters that the records read
    grads: int | None  # the bucket of gradients that they write, or STATS, or None


STATS = -1  # the "bucket" of the statistics, which follow the gradients in a buffer
# Buckets of parameters that a segment with gradients may read. ZeRO 3 has two slots (zero.py).
MAX_BUCKETS_READ = 2


def touched(record: Record, arena: Arena, space: int) -> list[int]:
    """Returns the offsets (in floats) of the parameters or gradients that a record uses.

    `space` is native.PARAMS or native.GRADS.
    """
    return [
        a.offset // 4
        for a in record.args
        if isinstance(a, Range) and a.arena is arena and a.space == space
    ]


def same_range(a: object, b: Range) -> bool:
    """Returns True if an argument `a` is the same piece of an arena as b."""
    return (
        isinstance(a, Range) and a.arena is b.arena and (a.space, a.offset) == (b.space, b.offset)
    )


def unused(records: list[Record], arena: Arena) -> list[str]:
    """Returns the names of trained parameters whose gradients no record writes."""
    written_offsets = {o for r in records for o in touched(r, arena, native.GRADS)}
    return [
        name
        for name, p in arena.named
        if p.requires_grad and arena.offsets[name] not in written_offsets
    ]


def cut(records: list[Record], arena: Arena, limit: int) -> list[Bucket]:
    """Cuts the parameters into buckets, in the order in which their gradients are finished.

    Each bucket has at least `limit` floats. Only the last one may be smaller.

    Parameters that one record uses are in the same bucket. So are parameters whose ops take turns,
    as in a recurrent layer. If a parameter is used again after `limit` floats of other parameters,
    it is in a bucket with other parameters of this kind, because its gradient is finished late. A
    frozen parameter is in the bucket in which it would be if it were trained. Parameters that no
    record uses come last.
    """
    sizes = padded(arena)
    spans = _find_spans(records, arena, sizes)
    used_again = {
        offset
        for offset, span in spans.items()
        if _count_floats_within(span, spans, sizes) >= max(limit, 1)
    }
    position = _find_positions(records, arena, sizes, spans)
    keyed_groups: list[tuple[tuple[float, int], list[int]]] = []
    for chosen in (sizes.keys() - used_again, used_again):
        # The spans of parameters that are used again contain many others. They don't count.
        turn_spans = {} if chosen is used_again else spans
        units = _join_inseparable(records, arena, chosen, turn_spans)
        keyed_units = sorted((max(position[o] for o in unit), sorted(unit)) for unit in units)
        groups = _group_units([unit for _, unit in keyed_units], sizes, limit)
        keyed_groups += [(max(position[o] for o in group), group) for group in groups]
    return _make_buckets(arena, [group for _, group in sorted(keyed_groups)])


def _find_spans(
    records: list[Record], arena: Arena, sizes: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """Returns the numbers of the first and the last forward op that use each parameter."""
    spans: dict[int, tuple[int, int]] = {}
    for record in records:
        op = record.tag
        for offset in _list_used(record, arena):
            if offset in sizes and op >= 0:
                first, last = spans.get(offset, (op, op))
                spans[offset] = (min(first, op), max(last, op))
    return spans


def _count_floats_within(
    span: tuple[int, int], spans: dict[int, tuple[int, int]], sizes: dict[int, int]
) -> int:
    """Returns the floats of the parameters that are used only between the two ops of a span."""
    start, end = span
    if end - start <= 1:
        return 0
    return sum(
        sizes[offset] for offset, (first, last) in spans.items() if start < first and last < end
    )


def _find_positions(
    records: list[Record], arena: Arena, sizes: dict[int, int], spans: dict[int, tuple[int, int]]
) -> dict[int, tuple[float, int]]:
    """Returns for each parameter a key of the order in which gradients are finished.

    The key is the number of the last backward record that writes the gradient. If no record does,
    it is the place between two records where the backward of the parameter's first op would be.
    """
    backward = [(i, record) for i, record in enumerate(records) if record.phase == "backward"]
    # Gradients that no kernel adds to itself are added after the backward of all ops.
    accumulations = (
        i
        for i, record in backward
        if record.op == "accumulate" and touched(record, arena, native.GRADS)
    )
    ops_end = next(accumulations, len(records))
    last_write = {
        offset: i
        for i, record in backward
        for offset in touched(record, arena, native.GRADS)
        if offset in sizes
    }
    positions: dict[int, tuple[float, int]] = {}
    for offset in sizes:
        if offset in last_write:
            positions[offset] = (last_write[offset], 0)
        elif offset in spans:
            first_op, _ = spans[offset]
            earlier_ops = (i for i, record in backward if record.tag < first_op and i < ops_end)
            next_record = next(earlier_ops, ops_end)
            positions[offset] = (next_record - 0.5, -first_op)
        else:
            positions[offset] = (float("inf"), 0)
    return positions


def _join_inseparable(
    records: list[Record], arena: Arena, chosen: Iterable[int], spans: dict[int, tuple[int, int]]
) -> list[list[int]]:
    """Returns the chosen parameters in groups that must be in one bucket.

    Parameters of one record are in the same group. So are parameters whose ops take turns: their
    spans overlap, and neither contains the other.
    """
    # Union-find: each parameter points to another one of its group, up to the group's head.
    parent = {offset: offset for offset in chosen}

    def find_head(offset: int) -> int:
        while parent[offset] != offset:
            parent[offset] = offset = parent[parent[offset]]
        return offset

    for record in records:
        offsets = [offset for offset in _list_used(record, arena) if offset in parent]
        for offset in offsets[1:]:
            parent[find_head(offset)] = find_head(offsets[0])
    while True:
        group_spans: dict[int, tuple[int, int]] = {}  # by head
        for offset, (first, last) in spans.items():
            if offset in parent and first < last:
                head = find_head(offset)
                group_first, group_last = group_spans.get(head, (first, last))
                group_spans[head] = (min(group_first, first), max(group_last, last))
        taking_turns = [
            (head, later_head)
            for head, (first, last) in group_spans.items()
            for later_head, (later_first, later_last) in group_spans.items()
            if first < later_first < last < later_last
        ]
        if not taking_turns:
            break
        # Joined groups have longer spans, which may take turns with further groups.
        for head, later_head in taking_turns:
            parent[find_head(head)] = find_head(later_head)
    groups: dict[int, list[int]] = {}
    for offset in parent:
        groups.setdefault(find_head(offset), []).append(offset)
    return list(groups.values())


def _list_used(record: Record, arena: Arena) -> list[int]:
    """Returns the parameters that a record reads, or whose gradients it writes."""
    return [*touched(record, arena, native.PARAMS), *touched(record, arena, native.GRADS)]


def from_the_end(arena: Arena, limit: int) -> list[Bucket]:
    """Cuts the parameters into buckets of at least `limit` floats without a recorded program.

    The last parameters come first, because most backward passes finish them first. Each bucket is
    one piece of the arena.
    """
    sizes = padded(arena)
    units = [[offset] for offset in sorted(sizes, reverse=True)]
    return _make_buckets(arena, _group_units(units, sizes, limit))


def padded(arena: Arena) -> dict[int, int]:
    """Returns the floats of each parameter, with the padding after it up to a vector boundary."""
    return {arena.offsets[name]: _round_up(p.size) for name, p in arena.named}


def _round_up(floats: int) -> int:
    """Returns the floats of as many whole vectors as `floats` need."""
    return -(-floats // VECTOR) * VECTOR


def _make_buckets(arena: Arena, groups: list[list[int]]) -> list[Bucket]:
    """Returns a bucket for each group of parameters."""
    name_of = {offset: name for name, offset in arena.offsets.items()}
    return [of_names(arena, tuple(name_of[o] for o in sorted(group))) for group in groups]


def _group_units(units: list[list[int]], sizes: dict[int, int], limit: int) -> list[list[int]]:
    """Joins units of parameters, in order, to groups of at least `limit` floats."""
    groups: list[list[int]] = []
    floats = 0  # of the last group
    for unit in units:
        if not groups or floats >= limit:
            groups.append([])
            floats = 0
        groups[-1] += unit
        floats += sum(sizes[offset] for offset in unit)
    return groups


def of_names(arena: Arena, names: Iterable[str]) -> Bucket:
    """Returns one bucket of some parameters, by their names."""
    sizes = padded(arena)
    return of_ranges([(arena.offsets[n], sizes[arena.offsets[n]]) for n in names], tuple(names))


def of_ranges(ranges: Iterable[tuple[int, int]], names: tuple[str, ...]) -> Bucket:
    """Returns one bucket of ranges of the arena (start, floats).

    In the bucket each range starts on a vector boundary. Ranges that are next to each other, in the
    arena and in the bucket, become one piece.
    """
    pieces: list[BucketRange] = []
    offset = 0  # in the bucket
    for start, floats in sorted(ranges):
        last = pieces[-1] if pieces else None
        if last and last.lo + last.n == start and last.at + last.n == offset:
            pieces[-1] = BucketRange(last.lo, last.n + floats, last.at)
        else:
            pieces.append(BucketRange(start, floats, offset))
        offset += _round_up(floats)
    return Bucket(names, tuple(pieces), offset)


def too_large(buckets: list[Bucket], setting: str) -> list[str]:
    """Returns a warning if one bucket is more than half of a model, otherwise an empty list.

    A bucket is in memory as a whole, so splitting the model saves little memory then.

    Args:
        buckets: all buckets of the model.
        setting: the setting that splits the model, as the user wrote it.
    """
    bucket = max(buckets, key=lambda b: b.floats)
    total = sum(b.floats for b in buckets)
    if 2 * bucket.floats <= total:
        return []
    names = ", ".join(bucket.names[:2])
    if len(bucket.names) > 2:
        names += f" and {len(bucket.names) - 2} more"
    return [
        f"{names} are one bucket with {100 * bucket.floats / total:.0f} % of the parameters, which "
        f"{setting} has whole in memory while it is used; for less, lower bucket_size_mb if it has "
        "several layers, else use smaller layers, or share them with tp"
    ]


def segments(
    records: list[Record], arena: Arena, buckets: list[Bucket], *, by_params: bool
) -> tuple[list[Record], list[Segment]]:
    """Cuts a program into segments, of which one writes the gradients of each bucket.

    The gradients of a bucket are complete after its segment. Records between these segments are in
    segments without gradients. A program may add to a gradient before the segment of its bucket.
    Such additions go to a sum in the shard's workspace, and the bucket's segment starts with it.
    The additions and their order are the ones of the program, so the results are the same.

    Args:
        records: the program of a shard.
        arena: the parameters.
        buckets: all buckets.
        by_params: True: most segments read parameters of one bucket only.

    Returns:
        The records to run, and the segments. These refer to the records by number.
    """
    bucket_of = {arena.offsets[name]: i for i, b in enumerate(buckets) for name in b.names}
    # Of each record: the buckets of gradients that it writes, and the buckets that it reads.
    writes = [
        [
            STATS if offset >= arena.size else bucket_of[offset]
            for offset in touched(record, arena, native.GRADS)
        ]
        for record in records
    ]
    reads = [
        {bucket_of[offset] for offset in touched(record, arena, native.PARAMS)}
        if by_params
        else set()
        for record in records
    ]
    new_records: list[Record] = []
    new_segments: list[Segment] = []

    def end_segment(start: int, buckets_read: set[int], bucket: int | None) -> None:
        """Makes a segment of the new records from `start` on."""
        params = tuple(sorted(buckets_read))
        new_segments.append(Segment(start, len(new_records), params, bucket))

    def add_plain_segments(start: int, stop: int) -> None:
        """Adds records without gradients, in segments of one bucket of parameters if possible."""
        segment_start = len(new_records)
        current_reads: set[int] = set()
        for replacements, buckets_read in zip(
            replaced_records[start:stop], reads[start:stop], strict=True
        ):
            if current_reads and not buckets_read <= current_reads:
                end_segment(segment_start, current_reads, None)
                segment_start = len(new_records)
                current_reads = set()
            current_reads |= buckets_read
            new_records.extend(replacements)
        if segment_start < len(new_records):
            end_segment(segment_start, current_reads, None)

    regions = _find_regions(writes, reads, by_params)
    region_starts = {bucket: start for bucket, start, _ in regions}
    replaced_records, sums = _redirect_early_writes(records, arena, bucket_of, region_starts)
    position = 0
    for bucket, start, stop in regions:
        add_plain_segments(position, start)
        segment_start = len(new_records)
        new_records += sums.get(bucket, [])
        for replacements in replaced_records[start:stop]:
            new_records += replacements
        end_segment(segment_start, set().union(*reads[start:stop]), bucket)
        position = stop
    add_plain_segments(position, len(records))
    return new_records, new_segments


def _find_regions(
    writes: list[list[int]], reads: list[set[int]], by_params: bool
) -> list[tuple[int, int, int]]:
    """Returns for each bucket (or STATS) that is written the records of its segment.

    A region is (bucket, start, stop). It ends after the last record that writes to the bucket. It
    starts with the first record that writes to the bucket after the end of the previous region. A
    region may be empty.

    Args:
        writes: the buckets of gradients that each record writes.
        reads: the buckets of parameters that each record reads. Empty sets if not `by_params`.
        by_params: see `segments`.
    """
    first_write: dict[int, int] = {}
    last_write: dict[int, int] = {}
    for i, written_buckets in enumerate(writes):
        for b in written_buckets:
            first_write.setdefault(b, i)
            last_write[b] = i
    if STATS in last_write:
        # Buckets that are complete while statistics are written get regions after the statistics.
        first = first_write[STATS] if by_params else 0
        end = last_write[STATS]
        last_write = {b: max(i, end) if i >= first else i for b, i in last_write.items()}
    regions: list[tuple[int, int, int]] = []
    position = 0
    for b, last in sorted(last_write.items(), key=lambda item: (item[1], item[0])):
        stop = max(last + 1, position)
        start = stop
        buckets_read: set[int] = set()
        for i in range(last, position - 1, -1):
            buckets_read |= reads[i]
            if b != STATS and len(buckets_read) > MAX_BUCKETS_READ and i < last:
                # A longer region would need the parameters of more buckets at the same time. The
                # workspace collects the earlier additions.
                break
            if b in writes[i]:
                start = i
        if b == STATS and not by_params:
            start = position
        regions.append((b, start, stop))
        position = stop
    return regions


def _redirect_early_writes(
    records: list[Record], arena: Arena, bucket_of: dict[int, int], starts: dict[int, int]
) -> tuple[list[list[Record]], dict[int, list[Record]]]:
    """Makes records that add to a gradient too early add to a sum in the workspace instead.

    Args:
        records: the program of a shard.
        arena: the parameters.
        bucket_of: the bucket of each parameter.
        starts: the first record of each bucket's segment.

    Returns:
        For each record the records that replace it, and for each bucket the records that add the
        sums to its gradients. The bucket's segment must start with the latter.
    """
    sizes = padded(arena)
    slots: dict[int, Slot] = {}
    replaced_records: list[list[Record]] = []
    sums: dict[int, list[Record]] = {}
    for i, record in enumerate(records):
        replacements = [record]
        for offset in dict.fromkeys(touched(record, arena, native.GRADS)):
            if offset >= arena.size or i >= starts[bucket_of[offset]]:
                continue
            gradient = Range(arena, native.GRADS, 4 * offset)
            floats = sizes[offset]
            if offset not in slots:
                slots[offset] = Slot(4 * floats)
                clearing = record.changed(
                    op="fill", args=[slots[offset], 0.0, floats], layout="lanes", dtype="fp32"
                )
                replacements.insert(0, clearing)
                addition = Record(
                    "accumulate",
                    [gradient, slots[offset], floats],
                    tag=record.tag,
                    phase="backward",
                )
                sums.setdefault(bucket_of[offset], []).append(addition)
            slot = slots[offset]
            new_args = [slot if same_range(a, gradient) else a for a in replacements[-1].args]
            replacements[-1] = replacements[-1].changed(args=new_args)
        replaced_records.append(replacements)
    return replaced_records, sums
