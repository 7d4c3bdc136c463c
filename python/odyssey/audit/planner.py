"""`odyssey plan`: what a training would take on so many ranks, for each layout, without them.

For each layout one rank of each pipeline stage is rehearsed alone (rehearsal.py), by the program
itself: so memory and bytes are what the trainer says of that rank, and its own time is measured.
Only transfers are estimated here: calls, messages and bytes, which were counted, times what they
take on two kinds of links.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..base import runs
from ..base.launcher import VARIABLES
from ..comm import cores
from ..errors import ConfigError
from ..parallel import routes
from ..parallel.mesh import PARTS, Mesh
from ..parallel.plan import busy
from . import measure_link, verify
from .rehearsal import VARIABLE, Rehearsed

# what a rank that is rehearsed is not told
ALONE = (*VARIABLES, runs.RUN_DIR, runs.ATTEMPT, runs.EXPECTED_RANKS)
STAGES = 8  # most stages of a pipeline that are looked at unasked


class Link(NamedTuple):
    """Seconds that a message takes, and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, messages: float, nbytes: float) -> float:
        """Returns what messages of so many bytes altogether take, one after the other."""
        return messages * self.latency + nbytes / self.bandwidth


#: Within a machine: a call of two ranks, and its bytes copied (docs/log.md); between machines:
#: Ethernet at 10 Gbit/s.
NEAR = Link(6e-5, 2.5e9)
FAR = Link(5e-5, 1.25e9)


@dataclasses.dataclass
class Planned:
    """Prediction of a layout: of its largest and slowest ranks. seconds: of a step; 0: it was
    not rehearsed.

    memory: bytes of a rank. sent, wire: bytes it sends in a step, and of them to other machines.
    why: it does not go.
    """

    layout: str
    memory: int = 0
    seconds: float = 0.0
    computes: float = 0.0  # of them
    sent: int = 0
    wire: int = 0
    why: str | None = None


def layouts(ranks: int) -> Iterator[str]:
    """The layouts of so many ranks that are looked at unasked."""
    for tp in (t for t in range(1, PARTS + 1) if ranks % t == 0):
        for pp in (p for p in range(1, STAGES + 1) if p & (p - 1) == 0 and ranks // tp % p == 0):
            dp = ranks // tp // pp
            axes = [f"{name}={n}" for name, n in (("dp", dp), ("pp", pp), ("tp", tp)) if n > 1]
            for zero in range(1 + (dp > 1) * (1 if pp * tp > 1 else 3)):
                yield ",".join([*(axes or ["dp=1"]), *[f"zero={zero}"] * (zero > 0)])


def shards(rehearsed: Rehearsed, ranks: int, per_node: int) -> str:
    """A line about the shard size: it is part of a training's bits, so it is chosen for its
    largest world.
    """
    samples = rehearsed.samples
    shard_count = rehearsed.all_shards
    line = f"a batch of {samples} samples is {shard_count} shards of {rehearsed.shard_size}"
    idle = ranks - shard_count
    if idle > 0:
        return f"{line}, so of {ranks} replicas {idle} are idle: {busy(ranks, ranks, samples)}"
    advice = routes.advice(samples, rehearsed.shard_size, routes.placed(ranks, per_node))
    return (
        f"{line}, which suits {ranks} replicas"
        if advice is None
        else f"{line}: {advice.partition('] ')[2]}"
    )


def seconds(stages: Sequence[Rehearsed], near: Link, far: Link) -> float:
    """Returns the seconds of a step whose stages take so much: the slowest is busy with all its
    micro-batches, the others with one more before and after. Transfers are counted as if
    nothing overlapped them.
    """

    def stage_seconds(r: Rehearsed) -> float:
        calls, *sent = r.traffic
        return r.seconds + near.seconds(max(calls, sent[0]), sent[1]) + far.seconds(*sent[2:])

    shard_seconds = [stage_seconds(r) / max(r.shards, 1) for r in stages]
    return sum(shard_seconds) + max(shard_seconds) * (max(r.shards for r in stages) - 1)


@dataclasses.dataclass
class Planner:
    """Plans the training of a command, e.g. [sys.executable, "-m", "odyssey.train", ...] or a
    script.
    """

    command: Sequence[str]
    per_node: int  # ranks of a machine
    memory: int | None = None  # bytes that a rank may have; None: any number
    near: Link = NEAR  # within machines
    far: Link = FAR  # between them
    timeout: float = 600  # seconds that the rehearsal of a rank may take
    sharing: Rehearsed | None = None  # of the latest layout: how a batch is cut

    def __call__(
        self, layouts: Sequence[str], show: Callable[[Planned], None] = lambda planned: None
    ) -> list[Planned]:
        """One prediction per layout, shown when it is there.

        Raises ConfigError: one is wrong, or none is possible.
        """
        for text in layouts:
            verify.ranks(verify.parse(text))
        plans = []
        for text in layouts:
            plans.append(self.plan(text))
            show(plans[-1])
        if all(p.memory == 0 for p in plans):
            raise ConfigError(f"[plan] no layout can be trained; {plans[0].layout}: {plans[0].why}")
        return plans

    def plan(self, layout: str) -> Planned:
        """The prediction of a layout."""
        options = verify.parse(layout)
        mesh = Mesh(*(options.get(axis, 1) for axis in ("dp", "pp", "tp")))
        with tempfile.TemporaryDirectory(prefix="odyssey-plan-") as folder:
            rehearsals = []
            # the first replica, whose rank 0 cuts the model; without stages the last, which has no
            # fewer shards
            for rank in (
                [mesh.rank(0, p, 0) for p in range(mesh.pp)]
                if mesh.pp > 1
                else [mesh.rank(mesh.dp - 1, 0, 0)]
            ):
                outcome = self._rehearsed(layout, rank, Path(folder))
                if isinstance(outcome, str):
                    return Planned(layout, why=outcome)
                rehearsals.append(outcome)
        self.sharing = rehearsals[0]
        planned = Planned(layout, memory=max(sum(r.memory.values()) for r in rehearsals))
        if any(not r.seconds for r in rehearsals):
            planned.why = (
                f"takes {planned.memory:,} bytes of the {self.memory:,} that a rank may have"
            )
            return planned
        planned.computes = max(r.seconds for r in rehearsals)
        planned.sent = max(round(r.shared + r.traffic[2] + r.traffic[4]) for r in rehearsals)
        planned.wire = max(round(r.traffic[4]) for r in rehearsals)
        planned.seconds = seconds(rehearsals, self.near, self.far)
        return planned

    def _rehearsed(self, layout: str, rank: int, folder: Path) -> Rehearsed | str:
        """Returns what one rank has, or the line that says why it cannot be."""
        file = folder / f"{rank}.json"
        request: dict[str, Any] = {
            "layout": layout,
            "rank": rank,
            "per_node": self.per_node,
            "limit": self.memory,
        }
        variables = {VARIABLE: json.dumps({**request, "file": str(file), "folder": str(folder)})}
        problem = verify.failure_of(self.command, variables, ALONE, timeout=self.timeout)
        if problem is None and not file.exists():
            problem = "it called no fit() of a DistributedTrainer"
        if problem is not None:
            return problem.removeprefix("odyssey: error: ")
        fields = json.loads(file.read_text())
        return Rehearsed(**{**fields, "traffic": tuple(fields["traffic"])})


def machine_memory() -> int:
    """Bytes of memory of this machine, or of what its control groups allow."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, cores.memory_limit() or physical)


def measured(launcher: str | None) -> tuple[Link, bool]:
    """The link between two ranks that a launcher starts, and whether they share a machine.

    Raises ConfigError.
    """
    words = verify.started(
        [sys.executable, "-m", measure_link.__name__], 2, verify.launcher_words(launcher, "plan")
    )
    with tempfile.TemporaryDirectory(prefix="odyssey-plan-") as folder:
        file = Path(folder) / "link.json"
        problem = verify.failure_of([*words, str(file)], {}, ALONE, timeout=120)
        if problem is None and not file.exists():
            problem = f"{words[0]} started no two ranks"
        if problem is not None:
            raise ConfigError(
                f"[plan] --measure: {problem}; give --launcher, or --latency and --bandwidth"
            )
        measurement = json.loads(file.read_text())
    return Link(measurement["latency"], measurement["bandwidth"]), measurement["near"]


def best(plans: Sequence[Planned], count: int = 3) -> list[Planned]:
    """The fastest layouts that fit; of those within a hundredth of each other the one that takes
    less memory.
    """
    fit = sorted((p for p in plans if p.why is None), key=lambda p: p.seconds)
    best_plans: list[Planned] = []
    while fit and len(best_plans) < count:
        near = [p for p in fit if p.seconds <= 1.01 * fit[0].seconds]
        best_plans.append(min(near, key=lambda p: p.memory))
        fit.remove(best_plans[-1])
    return best_plans
