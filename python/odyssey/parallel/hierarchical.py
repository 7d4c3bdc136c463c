"""The tree between machines, in rounds: sums within a machine first, then between machines, then
back the same way.

Which rounds there are says routes.py, what they save docs/strategies.md. Between machines each rank
talks only to its counterparts, and only about its range of the floats; as many ranks of each
machine take part as the smallest has. The additions are those of the tree of plan.py: a machine
completes as much of it as its ranks' shards allow.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import hooks
from ..comm import Communicator, Request
from ..comm.base import Repeated
from . import routes
from .plan import Node, Plan, Run, combine
from .reduction import Kernels, Phased, Reduction, TreeReduction, adder, rows
from .ring import Both
from .routes import Machines, Round, Route


def machines(comm: Communicator, ranks_per_node: int | None) -> Machines:
    """Which ranks share a machine; a collective call. ranks_per_node: count instead of looking."""
    local_machine = hooks.machine() if ranks_per_node is None else comm.rank // ranks_per_node
    stand_in_machines = getattr(comm, "machines", None)  # of a rank that is alone: comm/stand_in.py
    everyone = (
        stand_in_machines or comm.all_gather(np.array([local_machine], np.int64)).ravel().tolist()
    )
    ranks_of_machine: dict[int, list[int]] = {}
    for rank, machine in enumerate(everyone):
        ranks_of_machine.setdefault(machine, []).append(rank)
    return tuple(tuple(ranks) for ranks in ranks_of_machine.values())


class Places:
    """Which ranks of a communicator share a machine (`near`: this one's), and the rounds'
    communicators, one a way.
    """

    _of: weakref.WeakKeyDictionary[Communicator, dict[int | None, Places]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, comm: Communicator, ranks_per_node: int | None) -> None:
        self.machines = machines(comm, ranks_per_node)
        self.near = next(frozenset(ranks) for ranks in self.machines if comm.rank in ranks)
        self._comms: dict[tuple[Route, int], tuple[Communicator | None, Communicator | None]] = {}

    @classmethod
    def of(cls, comm: Communicator, ranks_per_node: int | None) -> Places:
        """Returns the hosts of a communicator's ranks; a collective call the first time."""
        places = cls._of.setdefault(comm, {})
        if ranks_per_node not in places:
            places[ranks_per_node] = cls(comm, ranks_per_node)
        return places[ranks_per_node]

    def groups(
        self, comm: Communicator, key: tuple[Route, int], members: Sequence[int]
    ) -> tuple[Any, Any]:
        """Returns those of a round of a route, of `members`, if this rank takes part; at first a
        collective call.
        """
        if key not in self._comms:
            self._comms[key] = comm.subgroup(members), comm.subgroup(members)
        return self._comms[key]


class _Step(NamedTuple):
    """Work of a rank in one round: adds what came in the round before, packs and sends; and the
    way back.

    sent, returned: bytes, and those of them that go to other machines.
    """

    add: Kernels | None
    pack: Sequence[np.ndarray]  # into `send`; none: it is sent from where it is
    send: np.ndarray
    out: Repeated
    sent: tuple[int, int]
    back: Repeated | None
    returned: tuple[int, int]


class RoundsReduction(Phased):
    """The tree, completed along a route: exchanges and additions, round after round, and the way
    back.
    """

    in_place = True

    def _prepare(self) -> None:
        super()._prepare()
        comm = self.comm
        rank = self.comm.rank
        self.places = places = Places.of(
            comm, self.strategy.ranks_per_node if self.strategy else None
        )
        nodes = self.exchange.nodes
        shards = self.plan.shards
        self.route = route = routes.choose(nodes, shards, places.machines)
        within = max(map(len, places.machines)) > 1
        final_ranges = (
            self.ranges if self.scatter and len(set(map(len, places.machines))) == 1 else None
        )
        rounds = routes.rounds(rank, nodes, shards, route, self.floats, final_ranges)
        # The groups of the rounds see their own calls only: beside the first, all ranks say that
        # they take this step.
        self._check = comm.all_gather_v_init(np.zeros(0, np.float32), [(0, 0)] * comm.size)
        have = {node: self.buffers[b] for node, b in self.plan.partial}
        held: tuple[Run, ...] = ((0, self.floats),)
        add: Kernels | None = None
        steps: list[_Step | None] = []
        for k in range(within + route.mended + len(route.radices)):
            members = rounds[k].members if k < len(rounds) else ()
            out, back = places.groups(comm, (route, k), members)
            if k >= len(rounds):
                steps.append(None)
                continue
            returns = final_ranges is None and not (route.mended and k == within)
            step, add, have, held = self._step(
                rounds[k], out, back if returns else None, add, have, held
            )
            steps.append(step)
        self._end = add, next(iter(have.values()), None), held[0] if held else (0, 0)
        ways = [functools.partial(self._go, step, not k) for k, step in enumerate(steps)]
        for k in reversed(range(len(steps) if final_ranges is None else 0)):
            if not (route.mended and k == within):
                ways.append(functools.partial(self._come, steps[k]))
        self.phases = (*ways[: len(steps)], self._sum, *ways[len(steps) :])

    def advice(self, samples: int, shard_size: int) -> str | None:
        """Says which shard size or placement has fewer bytes between machines; see
        routes.advice.
        """
        if self.comm.rank or self.plan.counts:
            return None
        return routes.advice(samples, shard_size, self.places.machines, self.workers)

    def _step(
        self,
        round: Round,
        out: Communicator,
        back: Communicator | None,
        add: Kernels | None,
        have: dict[Node, np.ndarray],
        held: tuple[Run, ...],
    ) -> tuple[_Step, Kernels, dict[Node, np.ndarray], tuple[Run, ...]]:
        """One round, of a rank that has sums of nodes over the floats `held`; and what it has
        after it.
        """
        me = round.members.index(self.comm.rank)
        near = [p in self.places.near for p in round.members]

        def of_all(counts: Sequence[int]) -> tuple[int, int]:
            transfers = [
                (4 * n, is_near)
                for p, (n, is_near) in enumerate(zip(counts, near, strict=True))
                if p != me
            ]
            return sum(n for n, _ in transfers), sum(n for n, is_near in transfers if not is_near)

        views = [
            [have[node][a:b] for node in gives for a, b in _inside(held, runs)]
            for gives, runs in zip(round.gives, round.runs, strict=True)
        ]
        gives = [sum(view.size for view in per_member) for per_member in views]
        flat = [view for per_member in views for view in per_member]
        runs = [run for per_member in round.runs for run in per_member]
        if len(have) == 1 and runs == sorted(runs) and sum(gives) == sum(b - a for a, b in held):
            # one sum, whose ranges are already in the order of the members, is sent from where it
            # is
            send = next(iter(have.values()))
            pack = []
        else:
            send = self._take(sum(gives))
            pack = flat
        size = sum(b - a for a, b in round.runs[me])
        takes = [len(nodes) * size for nodes in round.takes]
        came = self._take(sum(takes))
        received_nodes = tuple(node for nodes in round.takes for node in nodes)
        pieces = rows(came, len(received_nodes), size)
        adds, remaining = combine(received_nodes, self.plan.shards)
        comes = None
        returned = (0, 0)
        if back is not None:
            whole_runs = [(runs[0][0], runs[-1][1]) if runs else (0, 0) for runs in round.runs]
            comes = back.all_gather_v_init(self.result, whole_runs)
            returned = of_all([size] * len(round.members))
        step = _Step(
            add,
            pack,
            send,
            out.all_to_all_v_init(send, gives, came, takes),
            of_all(gives),
            comes,
            returned,
        )
        after = {node: pieces[i] for node, i in remaining} if pieces else {}
        return step, adder(pieces, adds), after, round.runs[me]

    def _go(self, step: _Step | None, first: bool) -> Request | None:
        check = self._check.start() if first else None
        if step is None:
            return check
        if step.add is not None:
            step.add.run()
        if step.pack:
            np.concatenate(step.pack, out=step.send)
        self.bytes_sent = self.bytes_sent + step.sent[0]
        self.bytes_wire = self.bytes_wire + step.sent[1]
        request = step.out.start()
        return request if check is None else Both([check, request])

    def _sum(self) -> None:
        """The sum of this rank's range is complete."""
        add, root, (a, b) = self._end
        if add is not None:
            add.run()
        if root is not None:
            self.result[a:b] = root

    def _come(self, step: _Step | None) -> Request | None:
        if step is None or step.back is None:
            return None
        self.bytes_sent = self.bytes_sent + step.returned[0]
        self.bytes_wire = self.bytes_wire + step.returned[1]
        return step.back.start()


def _inside(held: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Where runs are in an array of the runs that it holds, one behind the other."""
    local_runs = []
    offset = 0
    for lo, hi in held:
        local_runs += [(offset + a - lo, offset + b - lo) for a, b in runs if lo <= a and b <= hi]
        offset += hi - lo
    return local_runs


def tree(comm: Communicator, plan: Plan, floats: int, workers: int, **options: Any) -> Reduction:
    """`tree` where ranks do not share memory: in rounds where they are on several machines."""
    kind = TreeReduction if comm.local_size == comm.size else RoundsReduction
    return kind(comm, plan, floats, workers, **options)
