"""Which reduction a training uses, with its settings: one record, checked once, and the function that makes them.

What it is not: a reduction; those are in the files named below. docs/strategies.md compares them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..comm import Communicator
from ..errors import ConfigError
from .hierarchical import HierarchicalReduction
from .plan import Plan
from .reduction import LibraryReduction, Reduction, TreeReduction
from .ring import RingReduction
from .server import ServerReduction
from .shared import SharedReduction

REDUCTIONS: dict[str, type[Reduction]] = {
    "tree": TreeReduction,  # same bits on any world
    "mpi": LibraryReduction,  # same bits where the library gives them
    "ring": RingReduction,  # same bits on the same number of ranks
    "hierarchical": HierarchicalReduction,  # same bits on any world
    "parameter_server": ServerReduction,  # same bits on any world
}


@dataclasses.dataclass(frozen=True)
class Content:
    """What the first `floats` floats of a reduction are; the rest (sums and counts) is exact whatever the strategy.

    Args:
        floats: gradients.
        shapes: offset and shape of each parameter among them.
        samples: of the global batch.
        memory: what a strategy keeps from step to step, shared by the batch sizes of a training.
    """

    floats: int
    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    samples: int
    memory: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How gradients are summed between ranks.

    Args:
        reduction: a name of REDUCTIONS.
        servers: of "parameter_server": ranks 0 to servers - 1 add.
        ranks_per_node: of "hierarchical": so many neighbouring ranks count as a node; None: those on one machine.

    Raises:
        ConfigError: a setting is not allowed, or belongs to another kind.
    """

    reduction: str = "tree"
    servers: int = 1
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"[train] reduction is {self.reduction!r}; choose from {', '.join(REDUCTIONS)}")
        for name in ("servers", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"[train] {name} is {value!r}; it must be an integer of at least 1")
        for name, default, owners in (
            ("servers", 1, ("parameter_server",)),
            ("ranks_per_node", None, ("hierarchical",)),
        ):
            if getattr(self, name) != default and self.reduction not in owners:
                raise ConfigError(
                    f"[train] {name} is given, but reduction={self.reduction!r} has none; "
                    f"leave it out, or use reduction={owners[0]!r}"
                )

    @classmethod
    def of(cls, given: Strategy | str) -> Strategy:
        """A strategy, or that of a reduction's name."""
        return given if isinstance(given, cls) else cls(given)

    def check(self, ranks: int, zero: int) -> None:
        """Raises ConfigError if it does not go with a number of replicas and a ZeRO stage."""
        if self.servers > ranks:
            raise ConfigError(
                f"[train] {self.servers} servers but {ranks} rank{'s' * (ranks > 1)}; lower --servers, or raise -n"
            )
        if self.reduction == "parameter_server" and zero:
            raise ConfigError(
                f"[train] reduction='parameter_server' keeps sums on its servers, zero={zero} a part on every rank; "
                "use reduction='tree'"
            )


def make(
    strategy: Strategy,
    comm: Communicator,
    plan: Plan,
    floats: int,
    workers: int,
    *,
    content: Content | None = None,
    shared: bool = True,
    **options: Any,
) -> Reduction:
    """The reduction of a strategy, or none for a world of one.

    Args:
        content: says which floats are gradients of which parameters; None: none are, all must be exact.
        shared: whether it may work in memory that all ranks see; not if it has storage, or will have.
        options: scatter and storage, as for Reduction.
    """
    kind = Reduction if comm.size == 1 else REDUCTIONS[strategy.reduction]
    if kind is TreeReduction and hasattr(comm, "shared") and shared:
        kind = SharedReduction  # the same tree, in memory that all ranks see
    return kind(comm, plan, floats, workers, strategy=strategy, content=content, **options)
