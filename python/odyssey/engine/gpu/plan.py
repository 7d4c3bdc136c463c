"""Plans for the GPUs of one process: in which pieces shards are computed, and how the sums of
its workers meet.

Pure functions. The tree is that of parallel/plan.py; what is computed in one go, and where, does
not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...parallel.plan import Action, Node, combine, nodes, split

# Shards whose parameter gradients a kernel adds before they go to memory: at most 8, and only where
# at least this many sums are left to compute side by side.
FOLD = 8
SIDE_BY_SIDE = 32


class ComputeNode(NamedTuple):
    """Computes the node (first shard, shards) in one go, `fold` shards per gradient buffer, into
    sum `to`.
    """

    first: int
    shards: int
    fold: int
    to: int


class WorkerPlan(NamedTuple):
    """Plan of one worker: actions in order; afterwards sum i is that of node i of `nodes`, for
    all of them.

    It needs room for `sums` sums, and for the largest piece: `pieces` gradient buffers and `shards`
    workspaces.
    """

    actions: tuple[ComputeNode | Action, ...]
    nodes: tuple[Node, ...]
    sums: int
    pieces: int
    shards: int


def fold_of(shards: int, max_fold: int = FOLD) -> int:
    """How many shards share a gradient buffer in a piece of so many: a power of two."""
    fold = 1
    while fold < max_fold and shards >= 2 * fold * SIDE_BY_SIDE:
        fold *= 2
    return fold


def worker(run: tuple[int, int], shards: int, limit: int, max_fold: int = FOLD) -> WorkerPlan:
    """The plan of a worker that owns shards run[0] .. run[1]-1 of `shards`, and has memory for
    `limit` at a time.

    max_fold: largest fold allowed, 1 where gradients of a parameter come from several ops.
    """
    owned_nodes = tuple(nodes(run, shards))
    actions: list[ComputeNode | Action] = []
    sums = len(owned_nodes)
    largest = pieces = 0
    free: list[int] = []

    def compute(node: Node, to: int) -> None:
        nonlocal sums, largest, pieces
        first, n = node
        if n <= limit:
            fold = fold_of(n, max_fold)
            actions.append(ComputeNode(first, n, fold, to))
            largest = max(largest, n)
            pieces = max(pieces, -(-n // fold))
            return
        left_shards = split(n)
        compute((first, left_shards), to)
        if free:
            buffer = free.pop()
        else:
            buffer = sums
            sums = sums + 1
        compute((first + left_shards, n - left_shards), buffer)
        actions.append(Action("add", to, buffer))
        free.append(buffer)

    for i, node in enumerate(owned_nodes):
        compute(node, i)
    return WorkerPlan(tuple(actions), owned_nodes, sums, pieces, largest)


class Meeting(NamedTuple):
    """How the sums of a process's workers become those of its own nodes.

    Sums are numbered through, worker after worker. After the `adds`, in order, places[i] is that
    of node nodes[i].
    """

    adds: tuple[Action, ...]
    nodes: tuple[Node, ...]
    places: tuple[int, ...]


def meeting(workers: Sequence[Sequence[Node]], shards: int) -> Meeting:
    """The plan for workers that have the sums of these nodes, of a process with the shards of
    all of them.
    """
    adds, roots = combine(tuple(node for worker_nodes in workers for node in worker_nodes), shards)
    return Meeting(adds, tuple(node for node, _ in roots), tuple(place for _, place in roots))
