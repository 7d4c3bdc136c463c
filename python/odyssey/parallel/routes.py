"""Routes: in which rounds ranks on several machines complete the tree of plan.py.

Pure functions, no MPI.

First the ranks of a machine add, each a range of the floats; then machines add in rounds of radix
g: g neighbouring blocks of machines become one, and each rank's range is cut into g, of which it
keeps one. It goes back the same way. Where tree nodes straddle machines (a machine's shards are no
power of two), the sides of a border first meet on one of them. Each round adds what can be added of
the tree, so the bits do not depend on the route.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from .plan import Node, Nodes, Run, combine, exchange, ranges, shard_count, split

Machines = tuple[tuple[int, ...], ...]  # ranks of each machine
MAX_ROUNDS = 3  # rounds between machines
ADVICE_EXCESS = 1.2  # times the bytes that a sum needs between machines: said at the start


class Route(NamedTuple):
    """Rounds of a world: `radices` between machines, whose product is their number; `mended`:
    borders meet first.
    """

    machines: Machines
    radices: tuple[int, ...]
    mended: bool


class Round(NamedTuple):
    """One round of a rank, with some others (`members`, it among them).

    gives, takes: nodes for, and of, each. runs: of floats that each has after it.
    """

    members: tuple[int, ...]
    gives: Nodes
    takes: Nodes
    runs: tuple[tuple[Run, ...], ...]


def _combine_nodes(nodes: tuple[Node, ...], shards: int) -> tuple[Node, ...]:
    return tuple(node for node, _ in combine(nodes, shards)[1])


def _straddling(border: int, begin: int, end: int, shards: int) -> list[Node]:
    """The nodes of the tree that lie inside [begin, end) and have shards on both sides of a
    border.
    """
    nodes = []
    (lo, n) = (0, shards)
    while n > 1 and lo < border < lo + n:
        if begin <= lo and lo + n <= end:
            nodes.append((lo, n))
        left_size = split(n)
        lo, n = (lo, left_size) if border < lo + left_size else (lo + left_size, n - left_size)
    return nodes


Gifts = dict[tuple[int, int], tuple[Node, ...]]  # from a machine to another


def _mend(brought: Nodes, shards: int) -> Gifts:
    """Returns what machines give to those beside them, so that nodes on a border are completed:
    the fewer move.
    """
    gifts: Gifts = {}
    for a, b in zip(range(len(brought)), range(1, len(brought)), strict=False):
        lower = brought[a]
        right = brought[b]
        if not lower or not right or lower[-1][0] + lower[-1][1] != right[0][0]:
            continue
        best = 0.0
        for lo, n in _straddling(right[0][0], lower[0][0], right[-1][0] + right[-1][1], shards):
            sides = [
                tuple(node for node in side if lo <= node[0] and sum(node) <= lo + n)
                for side in (lower, right)
            ]
            few = min(sides, key=len)
            gain = (len(sides[0]) + len(sides[1]) - 1) * (1 - 1 / len(brought)) - len(few)
            if gain > best:
                best = gain
                gifts.pop((a, b), None), gifts.pop((b, a), None)
                gifts[(a, b) if few is sides[0] else (b, a)] = few
    return gifts


class Levels(NamedTuple):
    """State of machines before each round between them, and what they give to mend borders."""

    brought: tuple[Nodes, ...]
    gifts: Gifts


@functools.lru_cache(16)
def levels(nodes: Nodes, shards: int, route: Route) -> Levels:
    """Makes it for ranks that hand on `nodes`."""
    unmerged = (tuple(node for r in ranks for node in nodes[r]) for ranks in route.machines)
    nodes_by_machine = tuple(_combine_nodes(machine_nodes, shards) for machine_nodes in unmerged)
    nodes_by_level = [nodes_by_machine]
    gifts = _mend(nodes_by_machine, shards) if route.mended else {}
    if route.mended:
        moved: list[list[Node]] = [list(machine_nodes) for machine_nodes in nodes_by_machine]
        for (a, b), gift in gifts.items():
            moved[a] = [node for node in moved[a] if node not in gift]
            moved[b] += gift
        nodes_by_level.append(
            nodes_by_machine := tuple(
                _combine_nodes(tuple(machine_nodes), shards) for machine_nodes in moved
            )
        )
    size = 1
    for radix in route.radices[:-1]:
        size *= radix
        unions = (
            tuple(dict.fromkeys(itertools.chain(*nodes_by_machine[i : i + size])))
            for i in range(0, len(nodes_by_machine), size)
        )
        blocks = [_combine_nodes(union, shards) for union in unions]
        nodes_by_machine = tuple(blocks[b // size] for b in range(len(nodes_by_machine)))
        nodes_by_level.append(nodes_by_machine)
    return Levels(tuple(nodes_by_level), gifts)


def rounds(  # noqa: C901
    rank: int,
    nodes: Nodes,
    shards: int,
    route: Route,
    floats: int,
    final_ranges: tuple[Run, ...] | None,
) -> list[Round]:  # noqa: C901
    """Returns those of a rank; fewer if it takes no part between machines. final_ranges: of
    each rank in the end.
    """
    machines = route.machines
    radices = route.radices
    wide = min(map(len, machines))
    count = len(machines)
    machine, machine_ranks = next((m, ranks) for m, ranks in enumerate(machines) if rank in ranks)
    place = machine_ranks.index(rank)
    final: dict[tuple[int, int], Run] = {}
    cut = ranges(floats, wide * count)
    for b in range(count):
        index = 0
        quotient = b
        below = count
        for radix in radices:
            below //= radix
            index = index + quotient % radix * below
            quotient = quotient // radix
        for p in range(wide):
            final[b, p] = (
                cut[p * count + index] if final_ranges is None else final_ranges[machines[b][p]]
            )

    def held(b: int, p: int, size: int) -> tuple[Run, ...]:
        """Returns what a rank has after rounds that made blocks of so many machines."""
        if p >= wide:
            return ()
        merged_runs: list[Run] = []
        for lo, hi in sorted(final[peer, p] for peer in range(b % size, count, size)):
            if merged_runs and merged_runs[-1][1] == lo:
                merged_runs[-1] = (merged_runs[-1][0], hi)
            elif hi > lo:
                merged_runs.append((lo, hi))
        return tuple(merged_runs)

    rank_rounds = []
    if max(map(len, machines)) > 1:
        runs = tuple(held(machine, p, 1) for p in range(len(machine_ranks)))
        rank_rounds.append(
            Round(
                machine_ranks,
                (nodes[rank],) * len(machine_ranks),
                tuple(nodes[r] for r in machine_ranks),
                runs,
            )
        )
    if place >= wide:
        return rank_rounds
    nodes_by_level, gifts = levels(nodes, shards, route)
    everyone = tuple(ranks[place] for ranks in machines)
    if route.mended:
        nodes_by_machine = nodes_by_level[0]
        stays = tuple(
            node
            for node in nodes_by_machine[machine]
            if not any(node in v for (a, _), v in gifts.items() if a == machine)
        )
        gives = tuple(stays if b == machine else gifts.get((machine, b), ()) for b in range(count))
        takes = tuple(stays if b == machine else gifts.get((b, machine), ()) for b in range(count))
        rank_rounds.append(
            Round(everyone, gives, takes, tuple(held(b, place, 1) for b in range(count)))
        )
        nodes_by_level = nodes_by_level[1:]
    size = 1
    for nodes_by_machine, radix in zip(nodes_by_level, radices, strict=False):
        first = machine // (size * radix) * size * radix + machine % size
        group = range(first, first + size * radix, size)
        size *= radix
        takes = tuple(nodes_by_machine[b] for b in group)
        runs = tuple(held(b, place, size) for b in group)
        rank_rounds.append(
            Round(
                tuple(everyone[b] for b in group), (nodes_by_machine[machine],) * radix, takes, runs
            )
        )
    return rank_rounds


def traffic(nodes: Nodes, shards: int, route: Route) -> tuple[float, int]:
    """(what all machines send to others, in floats per float of the gradients; messages of a
    rank), there and back.
    """
    nodes_by_level, gifts = levels(nodes, shards, route)
    sent = float(sum(map(len, gifts.values())))
    size = 1
    messages = max(map(len, route.machines)) - 1 + route.mended
    for nodes_by_machine, radix in zip(nodes_by_level[route.mended :], route.radices, strict=False):
        sent += sum(
            len(machine_nodes) * (1 - 1 / radix) / size + (radix - 1) / (size * radix)
            for machine_nodes in nodes_by_machine
        )
        size = size * radix
        messages = messages + radix - 1
    return sent, 2 * messages


def minimum(nodes: Nodes, shards: int, machines: Machines) -> float:
    """Returns what all machines must send to others at least, in floats per float of the
    gradients, there and back: each sum of the tree is completed on some machine, so that as
    few as possible have to travel (Fitch's parsimony).
    """
    machine_of = {node: m for m, ranks in enumerate(machines) for r in ranks for node in nodes[r]}

    def least(lo: int, n: int) -> tuple[frozenset[int], int]:
        if (lo, n) in machine_of:
            return frozenset((machine_of[lo, n],)), 0
        left_size = split(n)
        (a, x) = least(lo, left_size)
        (b, y) = least(lo + left_size, n - left_size)
        return (a & b, x + y) if a & b else (a | b, x + y + 1)

    return least(0, shards)[1] + len(machines) - 1


def excess(shards: int, machines: Machines, workers: int = 1) -> float:
    """Returns `minimum` for ranks of so many workers, divided by what the sum of any numbers
    needs.
    """
    nodes = exchange(shards, sum(map(len, machines)), workers, 16).nodes
    return (
        minimum(nodes, shards, machines) / (2 * (len(machines) - 1)) if len(machines) > 1 else 1.0
    )


def placed(ranks: int, per_machine: int) -> Machines:
    """Neighbouring ranks on machines of `per_machine`."""
    return tuple(tuple(range(first, first + per_machine)) for first in range(0, ranks, per_machine))


def advice(samples: int, shard_size: int, machines: Machines, workers: int = 1) -> str | None:
    """Says, where the tree needs more than ADVICE_EXCESS between machines, what needs less: the
    shard size that is nearest and keeps all workers busy, and the placement of the same ranks
    that is nearest. None: it does not, or nothing.
    """
    shards = shard_count(samples, shard_size)
    ranks = sum(map(len, machines))
    current_ratio = excess(shards, machines, workers)
    if current_ratio <= ADVICE_EXCESS:
        return None

    def samples_per_worker(size: int) -> int:
        return -(-shard_count(samples, size) // (ranks * workers)) * size

    candidate_sizes = {
        -(-samples // (n << k)) for n in (len(machines), ranks) for k in range(samples.bit_length())
    }
    sizes = sorted(
        candidate_sizes,
        key=lambda size: (
            max(samples_per_worker(size), 1.25 * samples_per_worker(shard_size)),
            abs(math.log(size / shard_size)),
        ),
    )
    widths = sorted(
        (n for n in range(2, ranks) if ranks % n == 0),
        key=lambda n: (abs(n - ranks / len(machines)), -n),
    )
    suggestions = []
    for size in sizes:
        count = shard_count(samples, size)
        if (
            count >= min(shards, ranks * workers)
            and (ratio := excess(count, machines, workers)) <= ADVICE_EXCESS
        ):
            suggestions.append(
                f"{ratio:.2f} times with a shard size of {size} (shard_size, --shard-size; other "
                "bits)"
            )
            break
    for width in widths:
        if (ratio := excess(shards, placed(ranks, width), workers)) <= ADVICE_EXCESS:
            suggestions.append(
                f"{ratio:.2f} times on {ranks // width} machines with {width} neighbouring ranks "
                "each (same bits)"
            )
            break
    if not suggestions:
        return None
    return (
        f"[train] the sum of {shards} shards takes {current_ratio:.2f} times the bytes between "
        f"{len(machines)} machines that any sum needs; {', or '.join(suggestions)}"
    )


def _products(count: int, max_factors: int) -> list[tuple[int, ...]]:
    """Ways to write a number as a product of at most so many, in any order."""
    if count == 1:
        return [()]
    if max_factors == 1:
        return [(count,)]
    return [
        (g, *factors)
        for g in range(2, count + 1)
        if count % g == 0
        for factors in _products(count // g, max_factors - 1)
    ]


@functools.lru_cache(64)
def choose(nodes: Nodes, shards: int, machines: Machines) -> Route:
    """Returns, of the routes that send hardly more between machines than the best, that of
    fewest messages a rank.
    """
    nodes_by_machine = tuple(
        _combine_nodes(tuple(node for r in ranks for node in nodes[r]), shards)
        for ranks in machines
    )
    ways = _products(len(machines), MAX_ROUNDS)
    borders = (False, True) if _mend(nodes_by_machine, shards) else (False,)
    candidates = [Route(machines, way, mended) for way in ways for mended in borders]
    costs = [traffic(nodes, shards, route) for route in candidates]
    enough = 1.02 * min(costs)[0]
    costed_routes = zip(costs, candidates, strict=True)
    return min(
        (messages, total, route) for (total, messages), route in costed_routes if total <= enough
    )[2]
