"""Which reduction a training uses, with its settings: one record, checked once, and the function
that makes them.

docs/strategies.md compares them.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, NamedTuple

from ..base import registry
from ..comm import Communicator
from ..errors import ConfigError
from ..settings import recipes
from ..settings.declarations import ReductionSettings, check
from .mesh import Mesh
from .plan import Plan
from .reduction import Reduction

REDUCTIONS = {  # imported when one is made
    "tree": "hierarchical.tree",
    "mpi": "reduction.LibraryReduction",
    "ring": "ring.RingReduction",
    "hierarchical": "hierarchical.RoundsReduction",
    "parameter_server": "reduction.ServerReduction",
}
# where ranks do not take each step together (asynchronous.py)
MODES = ("async_parameter_server", "local_sgd")


class Content(NamedTuple):
    """Kind of a reduction's floats: first gradients; the rest (sums and counts) is exact
    whatever the strategy.
    """

    floats: int  # that are gradients
    shapes: tuple[tuple[int, tuple[int, ...]], ...]  # offset and shape of each parameter among them
    samples: int  # of the global batch
    # what a strategy keeps from step to step, shared by the batch sizes of a training
    memory: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Strategy(ReductionSettings):
    """How gradients are summed between ranks: the `ReductionSettings`, checked.

    Raises ConfigError: a setting is not allowed, or belongs to another kind.
    """

    def __post_init__(self) -> None:
        for name, value in check(Strategy, vars(self)).items():
            object.__setattr__(self, name, value)
        if self.compression and self.reduction != "tree":
            reason = f"compression={self.compression!r} has an exchange of its own"
            raise ConfigError(f"[train] {reason}; leave reduction={self.reduction!r} out")

    @classmethod
    def of(cls, strategy: Strategy | str) -> Strategy:
        """A strategy, or that of a reduction's name."""
        return strategy if isinstance(strategy, cls) else cls(strategy)

    @property
    def same_bits(self) -> bool:
        """Returns whether the bits are those of one process on any number of ranks and in any
        layout.
        """
        return not self.compression and recipes.REDUCTIONS[self.reduction]

    def check(self, mesh: Mesh, zero: int, precision: str = "fp32") -> None:
        """Raises ConfigError if it does not go with a fitted mesh, a ZeRO stage or a precision."""
        ranks = mesh.dp or 1
        if self.reduction in MODES:
            self._check_mode(mesh, zero, precision)
        if self.servers > ranks:
            running = f"{ranks} rank{'s' * (ranks > 1)}"
            raise ConfigError(
                f"[train] {self.servers} servers but {running}; lower --servers, or raise -n"
            )
        if self.reduction == "parameter_server" and zero:
            raise ConfigError(
                f"[train] reduction='parameter_server' keeps sums on its servers, zero={zero} a "
                "part on every rank; use reduction='tree'"
            )
        prefix = f"[train] compression={self.compression!r}"
        if self.compression and (mesh.tp or 1) > 1:
            reason = "ranks that share a layer would round its gradients differently"
            raise ConfigError(f"{prefix} with {mesh}: {reason}; use --tp 1, or no compression")
        if self.compression not in ("topk", "powersgd"):
            return
        if zero > 1:
            residual = (
                f"what it did not send, as large as all gradients, which zero={zero} is there "
                "to avoid"
            )
            raise ConfigError(f"{prefix} keeps {residual}; use zero=1, or compression='bf16'")
        if precision == "fp16":
            raise ConfigError(
                f"{prefix} adds what it did not send to a later step, but precision='fp16' changes "
                "the scale of gradients in between; use precision='bf16'"
            )

    def check_buffers(self, names: list[str]) -> None:
        """Raises ConfigError if it cannot sum what moves these buffers, exactly and in every
        step.
        """
        if names and (
            self.compression in ("topk", "powersgd") or self.reduction == "async_parameter_server"
        ):
            setting = (
                f"compression={self.compression!r}"
                if self.compression
                else f"reduction={self.reduction!r}"
            )
            raise ConfigError(
                f"[train] the model has running statistics ({names[0]}, ...), which {setting} does "
                "not keep; use reduction='tree', or a norm without them, such as GroupNorm"
            )

    def _check_mode(self, mesh: Mesh, zero: int, precision: str) -> None:
        ranks = (mesh.dp or 1) * (mesh.pp or 1) * (mesh.tp or 1)
        prefix = f"[train] reduction={self.reduction!r}"
        if ranks != (mesh.dp or 1):
            raise ConfigError(
                f"{prefix} with {mesh}: each rank needs a whole model; use --pp 1 --tp 1"
            )
        if zero:
            raise ConfigError(
                f"{prefix} with zero={zero}: each rank needs a whole model; use zero=0"
            )
        if precision == "fp16":
            raise ConfigError(
                f"{prefix} with precision='fp16': ranks would skip different steps; use "
                "precision='bf16'"
            )
        if self.reduction == "async_parameter_server" and ranks <= self.servers:
            servers = f"server{'s' * (self.servers > 1)}"
            running = f"{ranks} {'are' if ranks > 1 else 'is'} running"
            raise ConfigError(
                f"{prefix} needs a rank that works beside its {self.servers} {servers}, and "
                f"{running}; raise -n"
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
        content: says which floats are gradients of which parameters; None: none are, all must be
            exact.
        shared: whether it may work in memory that all ranks see; not if it has storage, or will
            have.
        options: scatter and storage, as for Reduction.
    """
    if comm.size > 1 and strategy.compression and content is not None and content.floats:
        kind = registry.load("compressions", strategy.compression)
    else:
        # a mode still adds up evaluations
        class_path = REDUCTIONS.get(strategy.reduction, REDUCTIONS["tree"])
        if comm.size == 1:
            class_path = "reduction.Reduction"
        elif class_path == REDUCTIONS["tree"] and hasattr(comm, "shared") and shared:
            # the same tree, in memory that all ranks see
            class_path = "shared_memory_tree.SharedReduction"
        module, _, name = class_path.partition(".")
        kind = getattr(importlib.import_module(f".{module}", __package__), name)
    return kind(comm, plan, floats, workers, strategy=strategy, content=content, **options)
