"""Checks that all ranks train a torch module the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .. import callbacks
from .. import data as datasets
from ..base import Run
from ..capture import Capture
from ..checkpoints import Mode
from ..core import fingerprint
from ..errors import ConfigError
from ..parallel import Strategy
from ..train import RankChecks, agreement, check_replicas
from .changing import share
from .first_shard import FirstShard
from .stepper import ModuleStepper


class ModuleChecks(RankChecks):
    """The checks of a trainer of a torch module.

    Args:
        first_shard: compares the gradients of the first shard of a batch.
        strategy: how gradients are summed.
    """

    def __init__(
        self,
        mode: Mode,
        stepper: ModuleStepper,
        *,
        first_shard: FirstShard,
        strategy: Strategy,
        check_every: int,
        say: Callable[[str], None],
        capture: Capture,
    ) -> None:
        super().__init__(mode, check_every, say, capture)
        self.stepper = stepper
        self.first_shard = first_shard
        self.strategy = strategy

    def begin_fit(
        self, context: callbacks.Context, compared_data: datasets.ArrayDataset | None
    ) -> None:
        if torch.is_autocast_enabled(self.stepper.arena.device.type):
            raise ConfigError(
                "[torch] fit() within torch.autocast would keep old weights; use precision='bf16'"
            )
        if self.strategy.compression in ("topk", "powersgd") and (
            context.saving.folder or Run.current()
        ):
            raise ConfigError(
                f"[torch] compression={self.strategy.compression!r} keeps on each rank what it has "
                "not sent, which checkpoints of torch modules do not hold; use compression='bf16', "
                "or no checkpoints"
            )
        self.stepper.forward_watch.remember()
        self.stepper.forward_check.is_due = True
        self.stepper.forward_check.tries_again = self.comm.size == 1 and not self.comm.in_threads
        self.first_shard.is_due = True
        self.stepper.shards.modes.check_threads()
        super().begin_fit(context, compared_data)

    def before_step(self, batch: datasets.Batch) -> None:
        """Compares what is due before a step: data, and what ranks compute from it."""
        steps = self.stepper.steps
        self.watch.batch(batch, steps)
        self.first_shard.compare(batch, steps)

    def begin_epoch(self) -> None:
        self.stepper.forward_check.is_due = True

    def compare_captured(self) -> None:
        share(self.comm, self.capture)
        super().compare_captured()

    def of_update(self) -> dict[str, Any]:
        """Returns what an update reads beside gradients and state, as it is now: ranks must have
        it alike.
        """
        self.stepper.parts.normalize_groups()
        optimizer = self.stepper.parts.state
        groups: dict[str, Any] = {
            f"group {i} of the optimizer": group
            for i, group in enumerate(optimizer.describe_groups())
        }
        members = {
            f"the list of parameters in group {i} of the optimizer": names
            for i, names in enumerate(optimizer.group_names())
        }
        prints = {
            f"the fingerprint of values written into {name} between steps": value
            for name, value in self.stepper.arena.norms.written.items()
        }
        return {
            **groups,
            **members,
            "clip_norm": self.stepper.clip_norm,
            **prints,
        }

    def check_alike(self) -> None:
        share(self.comm, self.capture)
        with contextlib.suppress(ConfigError):  # the next step raises it, on all ranks
            self.stepper.arena.norms.take_over()
        agreement.standing(
            self.comm, f"step {self.stepper.steps}", self.of_update(), self.captured()
        )
        self.check_replicas()

    def check_replicas(self) -> None:
        """Compares parameters and running statistics; with zero=3 the latter alone."""
        arena = self.stepper.arena
        tensors = (arena.params, arena.norms.running)
        prints = [arena.device.fingerprint([(tensor, 0)]) for tensor in tensors]
        weights = fingerprint.hash_of(prints)
        check_replicas(self.comm, self.stepper.steps, {"weights": weights})
