"""The layout of a training: where the shards of a step are computed.

Everything that must not change the result.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..comm import Communicator
from ..errors import ConfigError
from ..parallel import buckets as bucketing
from ..parallel import strategy
from ..parallel.balance import Balance
from ..parallel.mesh import Mesh
from ..parallel.strategy import Strategy

# so large a model is one bucket: several keep the activations of all shards of a rank
ONE_BUCKET_MB = 25.0
# of a larger one: the smaller, the sooner a slow network has the first and the less is left at the
# end
BUCKET_MB = 4.0


@dataclasses.dataclass(eq=False, repr=False)
class Layout:
    """Where the shards of a step are computed: everything that must not change the result."""

    comm: Communicator
    workers: int  # of this process
    threads: int  # of this process
    shard_size: int | None  # None: a function of the batch (Engine.shard_size_of)
    reduction: Strategy | str  # a Strategy once made
    execution: str
    mesh: Mesh = Mesh(1, 1, 1)  # fitted to the world
    zero: int = 0
    bucket_size_mb: float | None = None  # None: see `bucket_floats`
    overlap: bool = True
    schedule: str = "1f1b"
    rebalance: bool = False  # shards may move from rank to rank between steps
    offload: str | Path | None = None  # "cpu", or a folder for files of what a training keeps
    # the device of each worker of this process; none: they compute on the CPU
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.reduction = Strategy.of(self.reduction)
        if self.execution == "eager" and (self.split or self.zero):
            raise ConfigError(
                f"[mesh] {self.mesh} with zero={self.zero} runs recorded programs; use "
                "execution='replay'"
            )
        if self.split and self.zero > 1:
            raise ConfigError(
                f"[mesh] {self.mesh} with zero={self.zero}: gradients and parameters can be spread "
                "over replicas only where each has the whole model; use --zero 1, or --pp 1 --tp 1"
            )

        self.reduction.check(self.mesh, self.zero)
        members = self.mesh.pp * self.mesh.tp
        if self.rebalance and (self.comm.size == members > 1 or not self.reduction.same_bits):
            method = self.reduction.compression or self.reduction.reduction
            wrong = (
                f"{self.mesh}: it has one replica"
                if self.reduction.same_bits
                else f"{method}: bits would change"
            )
            raise ConfigError(
                "[train] rebalance=True moves shards from replica to replica, which does not go "
                f"with {wrong}; use --dp 2 or more and reduction='tree', 'hierarchical' or "
                "'parameter_server', or leave it out"
            )
        self.balance = None
        if self.rebalance and self.comm.size > 1:
            self.balance = Balance(self.comm, 1 if self.split else self.threads, members)
        if self.gpus:
            self._check_gpus()
        elif self.offload == "cpu":
            raise ConfigError(
                "[train] offload='cpu' keeps the optimizer's state of GPUs in host memory, where "
                "CPU workers have it; use --device gpu, name a folder on a disk, or leave it out"
            )
        if self.offload and (
            self.split or self.execution == "eager" or self.reduction.reduction in strategy.MODES
        ):
            wrong = f"{self.mesh}" if self.split else "execution='eager'"
            wrong = (
                f"reduction={self.reduction.reduction!r}"
                if self.reduction.reduction in strategy.MODES
                else wrong
            )
            raise ConfigError(
                f"[train] offload does not go with {wrong}: layers come and go in recorded steps "
                "of whole models; use --pp 1 --tp 1, or leave it out"
            )

    def _check_gpus(self) -> None:
        """Raises ConfigError for what GPUs cannot do yet."""
        unsupported = {
            f"{self.mesh}": self.split,
            f"zero={self.zero}": self.zero,
            "execution='eager'": self.execution != "replay",
            f"reduction={self.reduction.reduction!r}": self.reduction.reduction in strategy.MODES,
            f"bucket_size_mb={self.bucket_size_mb}": self.bucket_size_mb is not None,
            "overlap=False": not self.overlap,
            "rebalance=True": self.rebalance,
        }
        if wrong := next((text for text, is_set in unsupported.items() if is_set), None):
            raise ConfigError(
                f"[gpu] {wrong} is not supported on GPUs: they replicate the whole model, take "
                "steps together and sum "
                "gradients in pieces of their own; leave it out, or use --device cpu"
            )

    def bucket_floats(self, size: int) -> int:
        """Floats of a bucket of a model of `size` floats: as given, or 4 MB of a model of more
        than 25.

        With ZeRO 2 and 3, or `offload`, a rank has four buckets on top of its parts (two gathered,
        two being reduced), so by default they are at most a 32nd of the model.
        """
        if self.bucket_size_mb is not None:
            return int(self.bucket_size_mb * bucketing.FLOATS_PER_MB)
        one = size <= ONE_BUCKET_MB * bucketing.FLOATS_PER_MB
        floats = int((ONE_BUCKET_MB if one else BUCKET_MB) * bucketing.FLOATS_PER_MB)
        return min(floats, size // 32) if self.zero > 1 or self.offload else floats

    def counts(self, shards: int) -> tuple[int, ...]:
        """Returns how many of a step's shards each rank computes now; empty: equal shares."""
        return self.balance.counts(shards) if self.balance else ()

    @property
    def split(self) -> bool:
        """Returns whether several ranks make up one replica of the model."""
        return self.mesh.pp * self.mesh.tp > 1
