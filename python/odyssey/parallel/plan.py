"""Plans: which worker computes which shard, and in which order shard gradients are added. Pure functions, no MPI.

Shards 0..V-1 of a global batch are added along one fixed binary tree: a node over n shards splits after the largest
power of two smaller than n. Whoever owns a run of shards computes the largest nodes that lie inside it; the rest of the
tree is completed from those. So the result depends on V alone, not on who computed what (docs/determinism.md).
"""

from __future__ import annotations

import dataclasses
import functools

from ..errors import ConfigError

Node = tuple[int, int]  # first shard, number of shards
Run = tuple[int, int]  # first shard, one past the last


@dataclasses.dataclass(frozen=True)
class Action:
    """One line of a plan: compute shard `a` into buffer `b`, or add buffer `b` to buffer `a`."""

    kind: str  # "run" or "add"
    a: int
    b: int

    def __str__(self) -> str:
        return f"b{self.b} = shard {self.a}" if self.kind == "run" else f"b{self.a} += b{self.b}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one process does in one step.

    `threads` are the lists of actions that run side by side, `final` what follows when all have ended. `partial` are
    the nodes of the tree that are complete then, in order, with the buffers they are in. It needs `buffers` buffers.
    """

    shards: int
    run: Run
    threads: tuple[tuple[Action, ...], ...]
    final: tuple[Action, ...]
    partial: tuple[tuple[Node, int], ...]
    buffers: int


def shard_count(samples: int, shard_size: int) -> int:
    """Shards of a global batch; the last may be partly filled."""
    return -(-samples // shard_size)


def share(n: int, parts: int, i: int) -> Run:
    """Part i of 0..n-1 cut into contiguous runs whose lengths differ by at most one."""
    return (n * i // parts, n * (i + 1) // parts)


def split(n: int) -> int:
    """Leaves of the left child of a node over n > 1 leaves: the largest power of two smaller than n."""
    return 1 << (n - 1).bit_length() - 1


def nodes(run: Run, shards: int) -> list[Node]:
    """The largest nodes of the tree over `shards` leaves that lie inside a run, in order."""

    def inside(lo: int, n: int) -> list[Node]:
        if run[1] <= lo or lo + n <= run[0]:
            return []
        if run[0] <= lo and lo + n <= run[1]:
            return [(lo, n)]
        left = split(n)
        return inside(lo, left) + inside(lo + left, n - left)

    return inside(0, shards) if shards else []


def check_workers(workers: int, samples: int, shard_size: int) -> None:
    """Raises ConfigError if some worker would have no shard."""
    shards = shard_count(samples, shard_size)
    if workers > shards:
        raise ConfigError(
            f"[train] {workers} workers but {shards} shards (global batch {samples} / shard size {shard_size}); "
            "use fewer workers, or smaller shards, or a larger global batch"
        )


@functools.lru_cache(maxsize=64)
def make(shards: int, rank: int, ranks: int, workers: int, threads: int) -> Plan:
    """The plan of process `rank` of `ranks`, each with `workers` workers whose shards `threads` threads compute.

    Worker w of all ranks * workers owns run w, which is empty for some if a last batch has fewer shards than workers.
    Threads take whole workers, or share one if there are more threads.
    """
    runs = [share(shards, ranks * workers, rank * workers + w) for w in range(workers)]
    own = (runs[0][0], runs[-1][1])
    pieces = max(1, threads // workers)
    cut = [(lo + a, lo + b) for lo, hi in runs for a, b in (share(hi - lo, pieces, i) for i in range(pieces)) if b > a]
    threads = max(1, min(threads, len(cut)))
    free: list[int] = []
    count = 0
    have: dict[Node, int] = {}
    lists: list[tuple[Action, ...]] = []
    for t in range(threads):
        actions: list[Action] = []
        free = []  # buffers are not handed from thread to thread

        def subtree(node: Node, actions: list[Action] = actions, free: list[int] = free) -> int:
            nonlocal count
            lo, n = node
            if n == 1:
                if free:
                    b = free.pop()
                else:
                    b, count = count, count + 1
                actions.append(Action("run", lo, b))
                return b
            left = split(n)
            a, b = subtree((lo, left)), subtree((lo + left, n - left))
            actions.append(Action("add", a, b))
            free.append(b)
            return a

        for i in range(*share(len(cut), threads, t)):
            for node in nodes(cut[i], shards):
                have[node] = subtree(node)
        lists.append(tuple(actions))

    final: list[Action] = []

    def complete(node: Node) -> int:
        if node in have:
            return have[node]
        lo, n = node
        left = split(n)
        a, b = complete((lo, left)), complete((lo + left, n - left))
        final.append(Action("add", a, b))
        return a

    partial = tuple((node, complete(node)) for node in nodes(own, shards))
    return Plan(shards, own, tuple(lists), tuple(final), partial, max(count, 1))


def unshared(plan: Plan) -> Plan:
    """The same plan on one thread with a buffer for every shard, for shards that are not completed one by one."""
    lo, hi = plan.run
    actions = [Action("run", s, s - lo) for s in range(lo, hi)]

    def subtree(first: int, n: int) -> int:
        if n == 1:
            return first - lo
        left = split(n)
        a, b = subtree(first, left), subtree(first + left, n - left)
        actions.append(Action("add", a, b))
        return a

    partial = tuple(((first, n), subtree(first, n)) for first, n in nodes(plan.run, plan.shards))
    return Plan(plan.shards, plan.run, (tuple(actions),), (), partial, max(hi - lo, 1))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the ranks complete the tree: rank p sums range p of the arena over all nodes of all ranks.

    `ranges` are in floats. `nodes[r]` are the nodes rank r hands on, in order; `adds` the additions over all of them,
    numbered through; the sum ends in node 0.
    """

    ranges: tuple[Run, ...]
    nodes: tuple[tuple[Node, ...], ...]
    adds: tuple[Action, ...]


def ranges(floats: int, parts: int, align: int = 16) -> tuple[Run, ...]:
    """0..floats-1 cut into `parts` ranges at multiples of `align`; some may be empty."""
    cut = (share(-(-floats // align), parts, p) for p in range(parts))
    return tuple((min(a * align, floats), min(b * align, floats)) for a, b in cut)


@functools.lru_cache(maxsize=64)
def exchange(shards: int, ranks: int, workers: int, floats: int, align: int = 16) -> Exchange:
    """The plan of the reduction between `ranks` processes of `workers` workers over buffers of `floats` floats."""
    per_rank = tuple(
        tuple(
            nodes(
                (
                    share(shards, ranks * workers, r * workers)[0],
                    share(shards, ranks * workers, (r + 1) * workers - 1)[1],
                ),
                shards,
            )
        )
        for r in range(ranks)
    )
    number = {node: i for i, node in enumerate(n for ns in per_rank for n in ns)}
    adds: list[Action] = []

    def complete(lo: int, n: int) -> int:
        if (lo, n) in number:
            return number[lo, n]
        left = split(n)
        a, b = complete(lo, left), complete(lo + left, n - left)
        adds.append(Action("add", a, b))
        return a

    complete(0, shards)
    return Exchange(ranges(floats, ranks, align), per_rank, tuple(adds))
