"""Which reduction a training uses, with its settings: one record, checked once, and the function that makes them.

What it is not: a reduction; those are in the files named below. docs/strategies.md compares them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..comm import Communicator
from ..errors import ConfigError
from .compression import COMPRESSIONS, check_ratio
from .hierarchical import HierarchicalReduction
from .mesh import Mesh
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
MODES = ("async_parameter_server", "local_sgd")  # where ranks do not take each step together (asynchronous.py)


#: (setting, the setting it belongs to, and which values of that have it)
OWNERS = (
    ("staleness", "reduction", "async_parameter_server"),
    ("local_steps", "reduction", "local_sgd"),
    ("servers", "reduction", "parameter_server", "async_parameter_server"),
    ("ranks_per_node", "reduction", "hierarchical"),
    ("compression_ratio", "compression", "topk"),
    ("compression_warmup_steps", "compression", "topk"),
    ("powersgd_rank", "compression", "powersgd"),
)


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
        reduction: a name of REDUCTIONS or MODES.
        servers: of "parameter_server": ranks 0 to servers - 1 add; of "async_parameter_server": they serve.
        ranks_per_node: of "hierarchical": so many neighbouring ranks count as a node; None: those on one machine.
        compression: None, or a name of COMPRESSIONS, which takes the place of the reduction's own exchange.
        compression_ratio: of "topk": the share of the gradients that is sent.
        compression_warmup_steps: of "topk": steps in which the ratio falls to that.
        powersgd_rank: of "powersgd".
        staleness: of "async_parameter_server": steps that a worker may be ahead of the slowest before it waits.
        local_steps: of "local_sgd": steps from one average to the next.

    Raises:
        ConfigError: a setting is not allowed, or belongs to another kind.
    """

    reduction: str = "tree"
    servers: int = 1
    ranks_per_node: int | None = None
    compression: str | None = None
    compression_ratio: float = 0.01
    compression_warmup_steps: int = 0
    powersgd_rank: int = 2
    staleness: int = 4
    local_steps: int = 8

    def __post_init__(self) -> None:
        allowed = (*REDUCTIONS, *MODES)
        if self.reduction not in allowed:
            raise ConfigError(f"[train] reduction is {self.reduction!r}; choose from {', '.join(allowed)}")
        if self.compression is not None and self.compression not in COMPRESSIONS:
            raise ConfigError(
                f"[train] compression is {self.compression!r}; choose from {', '.join(COMPRESSIONS)}, or None"
            )
        for name, low in (
            ("servers", 1),
            ("ranks_per_node", 1),
            ("compression_warmup_steps", 0),
            ("powersgd_rank", 1),
            ("staleness", 0),
            ("local_steps", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise ConfigError(f"[train] {name} is {value!r}; it must be an integer of at least {low}")
        check_ratio("train", "compression_ratio", self.compression_ratio)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, setting, *owners in OWNERS:
            if getattr(self, name) != defaults[name] and getattr(self, setting) not in owners:
                raise ConfigError(
                    f"[train] {name} is given, but {setting}={getattr(self, setting)!r} has none; "
                    f"leave it out, or use {setting}={' or '.join(map(repr, owners))}"
                )
        if self.compression and self.reduction != "tree":
            raise ConfigError(
                f"[train] compression={self.compression!r} has an exchange of its own; "
                f"leave reduction={self.reduction!r} out"
            )

    @classmethod
    def of(cls, given: Strategy | str) -> Strategy:
        """A strategy, or that of a reduction's name."""
        return given if isinstance(given, cls) else cls(given)

    def check(self, mesh: Mesh, zero: int, precision: str = "fp32") -> None:
        """Raises ConfigError if it does not go with a fitted mesh, a ZeRO stage or a precision."""
        ranks = mesh.dp or 1
        if self.reduction in MODES:
            self._check_mode(mesh, zero, precision)
        if self.servers > ranks:
            raise ConfigError(
                f"[train] {self.servers} servers but {ranks} rank{'s' * (ranks > 1)}; lower --servers, or raise -n"
            )
        if self.reduction == "parameter_server" and zero:
            raise ConfigError(
                f"[train] reduction='parameter_server' keeps sums on its servers, zero={zero} a part on every rank; "
                "use reduction='tree'"
            )
        if self.compression and (mesh.tp or 1) > 1:
            raise ConfigError(
                f"[train] compression={self.compression!r} with {mesh}: ranks that share a layer would round its "
                "gradients differently; use --tp 1, or no compression"
            )
        if self.compression not in ("topk", "powersgd"):
            return
        if zero > 1:
            raise ConfigError(
                f"[train] compression={self.compression!r} keeps what it did not send, as large as all gradients, "
                f"which zero={zero} is there to avoid; use zero=1, or compression='bf16'"
            )
        if precision == "fp16":
            raise ConfigError(
                f"[train] compression={self.compression!r} adds what it did not send to a later step, but "
                "precision='fp16' changes the scale of gradients in between; use precision='bf16'"
            )

    def _check_mode(self, mesh: Mesh, zero: int, precision: str) -> None:
        ranks, kind = (mesh.dp or 1) * (mesh.pp or 1) * (mesh.tp or 1), self.reduction
        if ranks != (mesh.dp or 1):
            raise ConfigError(
                f"[train] reduction={kind!r} with {mesh}: each rank needs a whole model; use --pp 1 --tp 1"
            )
        if zero:
            raise ConfigError(f"[train] reduction={kind!r} with zero={zero}: each rank needs a whole model; use zero=0")
        if precision == "fp16":
            raise ConfigError(
                f"[train] reduction={kind!r} with precision='fp16': ranks would skip different steps; "
                "use precision='bf16'"
            )
        if kind == "async_parameter_server" and ranks <= self.servers:
            raise ConfigError(
                f"[train] reduction={kind!r} needs a rank that works beside its {self.servers} "
                f"server{'s' * (self.servers > 1)}, and {ranks} {'are' if ranks > 1 else 'is'} running; raise -n"
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
    kind: type[Reduction]
    if comm.size == 1:
        kind = Reduction
    elif strategy.compression and content is not None and content.floats:
        kind = COMPRESSIONS[strategy.compression]
    else:
        kind = REDUCTIONS.get(strategy.reduction, TreeReduction)  # a mode still adds up evaluations
    if kind is TreeReduction and hasattr(comm, "shared") and shared:
        kind = SharedReduction  # the same tree, in memory that all ranks see
    return kind(comm, plan, floats, workers, strategy=strategy, content=content, **options)
