"""Plans: which worker computes which shard, and in which order shard gradients are added.

Pure functions, no MPI.

Shards 0..V-1 of a global batch are added along one fixed binary tree: a node over n shards splits
after the largest power of two smaller than n. Whoever owns a run of shards computes the largest
nodes that lie inside it; the rest of the tree is completed from those. So the result depends on V
alone, not on who computed what (docs/determinism.md).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

Node = tuple[int, int]  # first shard, number of shards
Nodes = tuple[tuple[Node, ...], ...]  # of each rank
Run = tuple[int, int]  # first shard, one past the last
LINE = 8  # numbers of a cache line


class Action(NamedTuple):
    """One line of a plan: compute shard `a` into buffer `b`, or add buffer `b` to buffer `a`."""

    kind: str  # "run" or "add"
    a: int
    b: int

    def __str__(self) -> str:
        return f"b{self.b} = shard {self.a}" if self.kind == "run" else f"b{self.a} += b{self.b}"


class Plan(NamedTuple):
    """Plan of what one process does in one step.

    `threads` are the lists of actions that run side by side, `final` what follows when all have
    ended. `partial` are the nodes of the tree that are complete then, in order, with the buffers
    they are in. It needs `buffers` buffers.

    That is how it goes where all threads are equally fast. The executor has a thread that is done
    take shards of the others (`tables`): a shard then has a buffer of `pool`, the first of a
    partial node always that of the node.
    """

    shards: int
    run: Run
    threads: tuple[tuple[Action, ...], ...]
    final: tuple[Action, ...]
    partial: tuple[tuple[Node, int], ...]
    buffers: int
    pool: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()  # shards of each process, where they are not shared out equally

    def tables(self) -> list[int]:
        """The plan as the executor reads it, as int64: `Tables` in mojo/runtime/executor.mojo
        says what lies where.

        It has room for the executor's own numbers of a step, so two steps must not use one at the
        same time.
        """
        lo, hi = self.run
        number = {(s, 1): s - lo for s in range(lo, hi)}
        sums: list[Node] = []
        todo = [node for node, _ in self.partial]
        while todo:
            first, n = todo.pop()
            if n > 1:
                number[first, n] = hi - lo + len(sums)
                sums.append((first, n))
                todo += [(first, split(n)), (first + split(n), n - split(n))]
        parent, left, right = ([-1] * len(number) for _ in range(3))
        for first, n in sums:
            index = number[first, n]
            left[index] = number[first, split(n)]
            right[index] = number[first + split(n), n - split(n)]
            parent[left[index]] = parent[right[index]] = index
        fixed = [-1] * (hi - lo)
        for (first, _), b in self.partial:
            fixed[first - lo] = b
        runs = [share(hi - lo, len(self.threads), t) for t in range(len(self.threads))]
        head = [lo, hi - lo, len(number), len(runs), len(self.pool)]
        head += [0] * (LINE - len(head))
        scratch = [0] * (2 * len(number) + len(self.pool) + LINE * len(runs))
        return [
            *head,
            *parent,
            *left,
            *right,
            *fixed,
            *(a for a, _ in runs),
            *(b for _, b in runs),
            *self.pool,
            *scratch,
        ]


def shard_count(samples: int, shard_size: int) -> int:
    """Shards of a global batch; the last may be partly filled."""
    return -(-samples // shard_size)


ROWS = 1024  # of a shard of sequences: they keep the kernels busy, and their activations stay small


def default_shard_size(samples: int, rows: int = 1) -> int:
    """Samples per shard where nothing else is given, for a global batch of so many samples of so
    many rows each.

    Where a row is a sample fewer than 16 would leave lanes empty: shards of 32 keep the kernels
    busy, and from 32 samples on there are at least two, for two workers. Sequences fill lanes by
    themselves: shards of about ROWS rows, but of at most an eighth of the batch, for eight workers.
    """
    if rows > 1:
        return max(1, min(ROWS // rows, -(-samples // 8)))
    return 16 if 32 <= samples < 128 else 32


def busy(workers: int, sharing: int, samples: int) -> str:
    """Returns what to set so that each of the workers has a shard, of which `sharing` share the
    fewest samples.
    """
    if samples < sharing:
        return (
            f"each has one with a global batch of at least {workers} and a shard size of 1, "
            "and other bits"
        )
    size = (samples - 1) // (sharing - 1)
    return f"each has one with a shard size of {size} (shard_size, --shard-size), and other bits"


def idle(workers: int, samples: int, shard_size: int) -> int:
    """How many of the workers that share out so many samples have no shard."""
    return max(0, workers - shard_count(samples, shard_size))


def share(n: int, parts: int, i: int) -> Run:
    """Part i of 0..n-1 cut into contiguous runs whose lengths differ by at most one."""
    return (n * i // parts, n * (i + 1) // parts)


def runs(shards: int, ranks: int, workers: int, counts: tuple[int, ...] = ()) -> list[Run]:
    """The shards of each worker of each rank, in order: equal shares, or `counts` of them for
    each rank.
    """
    if not counts:
        return [share(shards, ranks * workers, w) for w in range(ranks * workers)]
    starts = [sum(counts[:r]) for r in range(ranks)]
    cuts = (
        (start, share(n, workers, w))
        for start, n in zip(starts, counts, strict=True)
        for w in range(workers)
    )
    return [(start + a, start + b) for start, (a, b) in cuts]


def split(n: int) -> int:
    """Leaves of the left child of a node over n > 1 leaves: the largest power of two smaller
    than n.
    """
    return 1 << (n - 1).bit_length() - 1


def nodes(run: Run, shards: int) -> list[Node]:
    """The largest nodes of the tree over `shards` leaves that lie inside a run, in order."""

    def inside(lo: int, n: int) -> list[Node]:
        if run[1] <= lo or lo + n <= run[0]:
            return []
        if run[0] <= lo and lo + n <= run[1]:
            return [(lo, n)]
        left_size = split(n)
        return inside(lo, left_size) + inside(lo + left_size, n - left_size)

    return inside(0, shards) if shards else []


@functools.lru_cache(maxsize=64)
def combine(
    partial: tuple[Node, ...], shards: int
) -> tuple[tuple[Action, ...], tuple[tuple[Node, int], ...]]:
    """The additions that complete as much of the tree over `shards` leaves as some of its nodes
    allow. Returns (adds, remaining): actions over the numbers of `partial`; the nodes that remain,
    in order, and where they are.
    """
    number = {node: i for i, node in enumerate(partial)}
    begin = min((lo for lo, _ in partial), default=0)
    end = max((lo + n for lo, n in partial), default=0)
    adds: list[Action] = []
    remaining: list[tuple[Node, int]] = []

    def complete(lo: int, n: int) -> int | None:
        if (lo, n) in number:
            return number[lo, n]
        if n == 1 or lo >= end or lo + n <= begin:
            return None
        left_size = split(n)
        children = ((lo, left_size), (lo + left_size, n - left_size))
        a, b = (complete(*child) for child in children)
        if a is not None and b is not None:
            adds.append(Action("add", a, b))
            return a
        remaining.extend(
            (child, index)
            for child, index in zip(children, (a, b), strict=True)
            if index is not None
        )
        return None

    root = complete(0, shards) if partial else None
    if root is not None:
        remaining.append(((0, shards), root))
    return tuple(adds), tuple(sorted(remaining))


@functools.lru_cache(maxsize=64)
def make(
    shards: int, rank: int, ranks: int, workers: int, threads: int, counts: tuple[int, ...] = ()
) -> Plan:
    """The plan of process `rank` of `ranks`, each with `workers` workers whose shards `threads`
    threads compute.

    Worker w of all ranks * workers owns run w, which is empty for some if a batch has fewer shards
    than workers. Threads take whole workers, or share one if there are more threads. counts: see
    `runs`.
    """
    local_runs = runs(shards, ranks, workers, counts)[rank * workers : (rank + 1) * workers]
    local_span = (local_runs[0][0], local_runs[-1][1])
    pieces = max(1, threads // workers)
    cut = [
        (lo + a, lo + b)
        for lo, hi in local_runs
        for a, b in (share(hi - lo, pieces, i) for i in range(pieces))
        if b > a
    ]
    threads = max(1, min(threads, len(cut)))
    fresh = itertools.count()  # buffers
    have: dict[Node, int] = {}
    lists: list[tuple[Action, ...]] = []
    for t in range(threads):
        actions: list[Action] = []
        free: list[int] = []  # buffers are not handed from thread to thread

        def subtree(node: Node, actions: list[Action] = actions, free: list[int] = free) -> int:
            lo, n = node
            if n == 1:
                b = free.pop() if free else next(fresh)
                actions.append(Action("run", lo, b))
                return b
            left_size = split(n)
            a = subtree((lo, left_size))
            b = subtree((lo + left_size, n - left_size))
            actions.append(Action("add", a, b))
            free.append(b)
            return a

        for i in range(*share(len(cut), threads, t)):
            for node in nodes(cut[i], shards):
                have[node] = subtree(node)
        lists.append(tuple(actions))

    buffers = list(have.values())
    adds, remaining = combine(tuple(have), shards)
    final = tuple(Action("add", buffers[add.a], buffers[add.b]) for add in adds)
    partial = tuple((node, buffers[i]) for node, i in remaining)
    fixed = {b for _, b in partial}
    first = {lo for (lo, _), _ in partial}
    parts = (share(local_span[1] - local_span[0], threads, t) for t in range(threads))
    pool_buffers = sum(
        _pooled((local_span[0] + a, local_span[0] + b), shards, first) for a, b in parts
    )
    count = max(next(fresh), len(fixed) + pool_buffers, 1)
    pool = tuple(b for b in range(count) if b not in fixed)
    return Plan(shards, local_span, tuple(lists), final, partial, count, pool, counts)


def _pooled(run: Run, shards: int, fixed: set[int]) -> int:
    """Buffers of the pool that are in use at the most while a run is computed in its order.

    With so many for every run there is always one for the next shard of a run of which none is
    being computed, so no thread waits for a buffer for ever. Shards of `fixed` have buffers of
    their own.
    """
    peak = 0
    for shard in range(*run):
        if shard not in fixed:
            complete_nodes = nodes((run[0], shard), shards)
            peak = max(peak, 1 + sum(lo not in fixed for lo, _ in complete_nodes))
    return peak


def unshared(plan: Plan) -> Plan:
    """The same plan on one thread with a buffer for every shard, for shards that are not
    completed one by one.
    """
    lo, hi = plan.run
    runs = tuple(Action("run", s, s - lo) for s in range(lo, hi))
    adds, partial = combine(tuple((s, 1) for s in range(lo, hi)), plan.shards)
    return Plan(
        plan.shards, plan.run, ((*runs, *adds),), (), partial, max(hi - lo, 1), counts=plan.counts
    )


class Exchange(NamedTuple):
    """How the ranks complete the tree: rank p sums range p of the arena over all nodes of all
    ranks.

    `ranges` are in floats. `nodes[r]` are those rank r hands on, in order; `adds` go over all; node
    0 is the sum.
    """

    ranges: tuple[Run, ...]
    nodes: Nodes
    adds: tuple[Action, ...]


def ranges(floats: int, parts: int) -> tuple[Run, ...]:
    """0..floats-1 cut into `parts` ranges at multiples of a vector of 16; some may be empty."""
    cut = (share(-(-floats // 16), parts, p) for p in range(parts))
    return tuple((min(a * 16, floats), min(b * 16, floats)) for a, b in cut)


@functools.lru_cache(maxsize=64)
def exchange(
    shards: int, ranks: int, workers: int, floats: int, counts: tuple[int, ...] = ()
) -> Exchange:
    """The plan of the reduction between `ranks` processes of `workers` workers over buffers of
    `floats` floats.
    """
    cuts = runs(shards, ranks, workers, counts)
    per_rank = tuple(
        tuple(nodes((cuts[r * workers][0], cuts[(r + 1) * workers - 1][1]), shards))
        for r in range(ranks)
    )
    adds, _ = combine(tuple(node for rank_nodes in per_rank for node in rank_nodes), shards)
    return Exchange(ranges(floats, ranks), per_rank, adds)
