"""Plans: which worker computes which shard, and in which order shard gradients are added.

Pure functions, no MPI.

Shards 0..V-1 of a global batch are added along one fixed binary tree. A node over n shards splits
after the largest power of two smaller than n. A process with a run of shards computes the largest
nodes that are inside its run. The rest of the tree is completed from these nodes. So the result
depends only on V, and not on which process computed which shard (docs/determinism.md).

A thread may compute the shards of one node together (docs/kernels.md, "Runs of shards"). Such a
node is a leaf of the plan. Without runs of shards the leaves are the single shards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

VECTOR = 16  # floats
Node = tuple[int, int]  # first shard, number of shards
Nodes = tuple[tuple[Node, ...], ...]  # nodes of each rank
Run = tuple[int, int]  # first shard, one past the last
LINE = 8  # numbers (int64) in a cache line


class Action(NamedTuple):
    """One line of a plan.

    A "run" computes the `n` shards from shard `a` on, and puts their sum into buffer `b`. An "add"
    adds buffer `b` to buffer `a`.
    """

    kind: str  # "run" or "add"
    a: int
    b: int
    n: int = 1

    def __str__(self) -> str:
        if self.kind == "add":
            return f"b{self.a} += b{self.b}"
        last = self.a + self.n - 1
        shards = f"shard {self.a}" if self.n == 1 else f"shards {self.a} to {last}"
        return f"b{self.b} = {shards}"


class Plan(NamedTuple):
    """Plan of what one process does in one step.

    It describes a step in which all threads are equally fast. In the native executor a thread that
    has finished takes leaves of the other threads (`tables`). A leaf then uses any buffer of
    `pool`, but the first leaf of a node in `partial` always uses the buffer of the node.
    """

    shards: int  # of the global batch
    run: Run  # shards of this process
    threads: tuple[tuple[Action, ...], ...]  # the actions of each thread, which run in parallel
    final: tuple[Action, ...]  # actions after all threads have ended
    # The nodes of the tree that are complete then, in order, with the buffers that they are in.
    partial: tuple[tuple[Node, int], ...]
    buffers: int  # number of buffers
    pool: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()  # shards of each process. Empty if the shares are equal
    leaves: tuple[Node, ...] = ()  # nodes whose shards one thread computes together, in order

    def tables(self) -> list[int]:
        """Returns the plan as numbers (int64) for the executor.

        `Tables` in mojo/runtime/executor.mojo describes their order. The end is scratch memory of
        the executor, so two steps must not use the same tables at the same time.
        """
        count = len(self.leaves)
        # Nodes have numbers: first the leaves, then the sums.
        number = {leaf: i for i, leaf in enumerate(self.leaves)}
        sums: list[Node] = []
        todo = [node for node, _ in self.partial]
        while todo:
            node = todo.pop()
            if node not in number:
                number[node] = count + len(sums)
                sums.append(node)
                todo += children(node)
        parent, left, right = ([-1] * len(number) for _ in range(3))
        for node in sums:
            index = number[node]
            left_child, right_child = children(node)
            left[index] = number[left_child]
            right[index] = number[right_child]
            parent[left[index]] = parent[right[index]] = index
        buffer_of = {first: buffer for (first, _), buffer in self.partial}
        fixed_buffers = [buffer_of.get(first, -1) for first, _ in self.leaves]
        thread_leaves = [share(count, len(self.threads), t) for t in range(len(self.threads))]
        head = [count, len(number), len(thread_leaves), len(self.pool)]
        head += [0] * (LINE - len(head))
        scratch = [0] * (2 * len(number) + len(self.pool) + LINE * len(thread_leaves))
        return [
            *head,
            *parent,
            *left,
            *right,
            *fixed_buffers,
            *(first for first, _ in self.leaves),
            *(n for _, n in self.leaves),
            *(start for start, _ in thread_leaves),
            *(end for _, end in thread_leaves),
            *self.pool,
            *scratch,
        ]


def shard_count(samples: int, shard_size: int) -> int:
    """Returns the number of shards of a global batch. The last one may have fewer samples."""
    return -(-samples // shard_size)


# Rows of a shard of sequences. They keep the kernels busy, and their activations stay small.
ROWS = 1024


def default_shard_size(samples: int, rows: int = 1) -> int:
    """Returns the default number of samples per shard.

    If a sample is one row, shards of fewer than 16 samples would leave lanes empty. Shards of 32
    samples keep the kernels busy. Batches of 32 samples or more have at least two shards, for two
    workers. A sequence fills lanes by itself. Its shards have about ROWS rows, but at most an
    eighth of the batch, for eight workers.

    Args:
        samples: the samples of the global batch.
        rows: the rows of a sample, such as the tokens of a text.
    """
    if rows > 1:
        return max(1, min(ROWS // rows, -(-samples // 8)))
    return 16 if 32 <= samples < 128 else 32


def busy(workers: int, sharing: int, samples: int) -> str:
    """Returns advice for the user on settings that give each worker a shard.

    Args:
        workers: the number of all workers.
        sharing: the number of workers that share the smallest part of the batch.
        samples: the samples of this part.
    """
    if samples < sharing:
        return (
            f"each has one with a global batch of at least {workers} and a shard size of 1, "
            "and other bits"
        )
    size = (samples - 1) // (sharing - 1)
    return f"each has one with a shard size of {size} (shard_size, --shard-size), and other bits"


def idle(workers: int, samples: int, shard_size: int) -> int:
    """Returns the number of workers that have no shard of `samples` samples."""
    return max(0, workers - shard_count(samples, shard_size))


def share(n: int, parts: int, i: int) -> Run:
    """Returns part i of the numbers 0..n-1, as (first, one past the last).

    The parts are contiguous, and their lengths differ by at most one.
    """
    return (n * i // parts, n * (i + 1) // parts)


def runs(shards: int, ranks: int, workers: int, counts: tuple[int, ...] = ()) -> list[Run]:
    """Returns the run of shards of each worker of each rank, in order.

    Args:
        shards: the shards of the global batch.
        ranks: the number of ranks.
        workers: the workers of each rank.
        counts: the shards of each rank. Empty: all workers have equal shares.
    """
    if not counts:
        return [share(shards, ranks * workers, w) for w in range(ranks * workers)]
    worker_runs = []
    rank_start = 0
    for count in counts:
        for w in range(workers):
            first, end = share(count, workers, w)
            worker_runs.append((rank_start + first, rank_start + end))
        rank_start += count
    return worker_runs


def split(n: int) -> int:
    """Returns the leaves of the left child of a node over n > 1 leaves.

    That is the largest power of two smaller than n.
    """
    return 1 << (n - 1).bit_length() - 1


def children(node: Node) -> tuple[Node, Node]:
    """Returns the left and the right child of a node over more than one shard."""
    first, n = node
    left_size = split(n)
    return (first, left_size), (first + left_size, n - left_size)


def nodes(run: Run, shards: int) -> list[Node]:
    """Returns the largest nodes inside a run, in order, of the tree over `shards` leaves."""
    run_start, run_end = run

    def list_inside(node: Node) -> list[Node]:
        first, n = node
        if run_end <= first or first + n <= run_start:
            return []
        if run_start <= first and first + n <= run_end:
            return [node]
        left_child, right_child = children(node)
        return list_inside(left_child) + list_inside(right_child)

    return list_inside((0, shards)) if shards else []


def cut(nodes: Iterable[Node], length: int, lone: int | None = None) -> tuple[Node, ...]:
    """Cuts nodes into nodes of at most `length` shards, in order.

    Args:
        nodes: nodes of the tree.
        length: the shards of a node, at most.
        lone: a shard that becomes a node of one shard. None: no shard has to.
    """
    pieces: list[Node] = []
    for node in nodes:
        first, n = node
        if n > 1 and (n > length or lone is not None and first <= lone < first + n):
            pieces += cut(children(node), length, lone)
        else:
            pieces.append(node)
    return tuple(pieces)


@functools.lru_cache(maxsize=64)
def combine(
    partial: tuple[Node, ...], shards: int
) -> tuple[tuple[Action, ...], tuple[tuple[Node, int], ...]]:
    """Plans the additions that complete as much of the tree as some of its nodes allow.

    Args:
        partial: the complete nodes. Buffer i has node i.
        shards: the leaves of the tree.

    Returns:
        The additions, and then the nodes that are complete after them, in order. A node comes with
        the buffer that it is in.
    """
    buffer_of = {node: i for i, node in enumerate(partial)}
    begin = min((first for first, _ in partial), default=0)
    end = max((first + n for first, n in partial), default=0)
    adds: list[Action] = []
    remaining: list[tuple[Node, int]] = []

    def complete(node: Node) -> int | None:
        """Returns the buffer of a node after planning its additions.

        If that isn't possible, it returns None and adds complete children to `remaining`.
        """
        if node in buffer_of:
            return buffer_of[node]
        first, n = node
        if n == 1 or first >= end or first + n <= begin:
            return None
        left_child, right_child = children(node)
        left_buffer = complete(left_child)
        right_buffer = complete(right_child)
        if left_buffer is not None and right_buffer is not None:
            adds.append(Action("add", left_buffer, right_buffer))
            return left_buffer
        if left_buffer is not None:
            remaining.append((left_child, left_buffer))
        if right_buffer is not None:
            remaining.append((right_child, right_buffer))
        return None

    root = complete((0, shards)) if partial else None
    if root is not None:
        remaining.append(((0, shards), root))
    return tuple(adds), tuple(sorted(remaining))


@functools.lru_cache(maxsize=64)
def make(
    shards: int,
    rank: int,
    ranks: int,
    workers: int,
    threads: int,
    counts: tuple[int, ...] = (),
    length: int = 1,
    lone: int | None = None,
) -> Plan:
    """Returns the plan of process `rank`.

    Worker w of all ranks * workers has run w of `runs`. If a batch has fewer shards than workers,
    the runs of some are empty. A thread computes the runs of whole workers. If there are more
    threads than workers, several threads share a worker's run. A leaf belongs to the thread that
    its first shard belongs to.

    Args:
        shards: the shards of the global batch.
        rank: the process that the plan is for.
        ranks: the number of processes.
        workers: the workers of each process.
        threads: the threads of each process.
        counts: the shards of each process. Empty: all workers have equal shares.
        length: the shards that one thread computes together, at most.
        lone: a shard that is computed alone, whatever the `length`.
    """
    worker_runs = runs(shards, ranks, workers, counts)[rank * workers : (rank + 1) * workers]
    run_start, _ = worker_runs[0]
    _, run_end = worker_runs[-1]
    leaves = cut(nodes((run_start, run_end), shards), length, lone)
    pieces_per_worker = max(1, threads // workers)
    pieces = []  # runs that one thread computes, of whole leaves
    for start, end in worker_runs:
        for i in range(pieces_per_worker):
            first, stop = share(end - start, pieces_per_worker, i)
            inside = [leaf for leaf in leaves if start + first <= leaf[0] < start + stop]
            if inside:
                pieces.append((inside[0][0], sum(inside[-1])))
    threads = max(1, min(threads, len(pieces)))
    new_buffers = itertools.count()
    buffer_of: dict[Node, int] = {}
    thread_actions: list[tuple[Action, ...]] = []
    leaf_set = set(leaves)
    for t in range(threads):
        actions: list[Action] = []
        # A thread uses its own buffers again, never those of another thread.
        free: list[int] = []

        def add_subtree(node: Node, actions: list[Action] = actions, free: list[int] = free) -> int:
            """Appends the actions that compute a node, and returns its buffer."""
            if node in leaf_set:
                first, n = node
                buffer = free.pop() if free else next(new_buffers)
                actions.append(Action("run", first, buffer, n))
                return buffer
            left_child, right_child = children(node)
            left_buffer = add_subtree(left_child)
            right_buffer = add_subtree(right_child)
            actions.append(Action("add", left_buffer, right_buffer))
            free.append(right_buffer)
            return left_buffer

        for i in range(*share(len(pieces), threads, t)):
            for node in nodes(pieces[i], shards):
                buffer_of[node] = add_subtree(node)
        thread_actions.append(tuple(actions))

    node_buffers = list(buffer_of.values())
    adds, remaining = combine(tuple(buffer_of), shards)
    final = tuple(Action("add", node_buffers[add.a], node_buffers[add.b]) for add in adds)
    partial = tuple((node, node_buffers[i]) for node, i in remaining)
    fixed_buffers = {buffer for _, buffer in partial}
    fixed_shards = {first for (first, _), _ in partial}
    pool_size = 0
    for t in range(threads):
        first, stop = share(len(leaves), threads, t)
        pool_size += _count_pool_buffers(leaves[first:stop], shards, fixed_shards)
    buffers = max(next(new_buffers), len(fixed_buffers) + pool_size, 1)
    return Plan(
        shards=shards,
        run=(run_start, run_end),
        threads=tuple(thread_actions),
        final=final,
        partial=partial,
        buffers=buffers,
        pool=tuple(buffer for buffer in range(buffers) if buffer not in fixed_buffers),
        counts=counts,
        leaves=leaves,
    )


def _count_pool_buffers(leaves: tuple[Node, ...], shards: int, fixed_shards: set[int]) -> int:
    """Returns how many buffers of the pool a thread needs at most while it computes some leaves.

    The thread computes them in order. If the pool has this many for the leaves of every thread, no
    thread waits forever: a buffer is always free for the next leaf of a thread. The leaves and
    nodes that start with a shard of `fixed_shards` have buffers outside of the pool.
    """
    peak = 0
    for first, _ in leaves:
        if first not in fixed_shards:
            complete_nodes = nodes((leaves[0][0], first), shards)
            in_pool = sum(start not in fixed_shards for start, _ in complete_nodes)
            peak = max(peak, 1 + in_pool)
    return peak


def unshared(plan: Plan) -> Plan:
    """Returns the plan for one thread and with a buffer for every shard.

    It is for pipelines that have several incomplete shards at the same time.
    """
    start, end = plan.run
    computing = tuple(Action("run", shard, shard - start) for shard in range(start, end))
    adds, partial = combine(tuple((shard, 1) for shard in range(start, end)), plan.shards)
    return Plan(
        shards=plan.shards,
        run=plan.run,
        threads=((*computing, *adds),),
        final=(),
        partial=partial,
        buffers=max(end - start, 1),
        counts=plan.counts,
        leaves=tuple((shard, 1) for shard in range(start, end)),
    )


class Exchange(NamedTuple):
    """How the ranks complete the tree: rank p adds range p of the floats of all nodes."""

    ranges: tuple[Run, ...]  # floats of each rank
    nodes: Nodes  # nodes[r] are the ones that rank r sends, in order
    # Additions of nodes, which have numbers in the order of `nodes`. Node 0 has the sum at the end.
    adds: tuple[Action, ...]


def ranges(floats: int, parts: int) -> tuple[Run, ...]:
    """Returns the floats 0..floats-1 as `parts` ranges (start, end).

    Ranges start at multiples of a vector. Some may be empty.
    """
    vectors = -(-floats // VECTOR)
    vector_runs = (share(vectors, parts, p) for p in range(parts))
    return tuple(
        (min(first * VECTOR, floats), min(stop * VECTOR, floats)) for first, stop in vector_runs
    )


@functools.lru_cache(maxsize=64)
def exchange(
    shards: int, ranks: int, workers: int, floats: int, counts: tuple[int, ...] = ()
) -> Exchange:
    """Returns the plan of the reduction between processes.

    Args:
        shards: the shards of the global batch.
        ranks: the number of processes.
        workers: the workers of each process.
        floats: the floats of each buffer.
        counts: the shards of each process. Empty: all workers have equal shares.
    """
    worker_runs = runs(shards, ranks, workers, counts)
    nodes_by_rank = []
    for r in range(ranks):
        first, _ = worker_runs[r * workers]
        _, end = worker_runs[(r + 1) * workers - 1]
        nodes_by_rank.append(tuple(nodes((first, end), shards)))
    adds, _ = combine(tuple(itertools.chain(*nodes_by_rank)), shards)
    return Exchange(ranges(floats, ranks), tuple(nodes_by_rank), adds)
