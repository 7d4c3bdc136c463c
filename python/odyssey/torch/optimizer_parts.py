"""Which parameters a rank updates: with ZeRO each rank has the optimizer's state of a part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture import mark
from ..comm import Communicator
from ..core import fingerprint
from ..errors import ConfigError
from ..train import resume
from .arena import ModuleArena
from .optimizer_state import OptimizerState, SavedState
from .shards import Shards


class OptimizerParts:
    """Which parameters this rank updates, and the optimizer's state of them.

    Args:
        optimizer: of all parameters; on this rank its state of others is never used.
        shards: have the places of gradients.
        arena: has the parameters.
        comm: the ranks that share them out.
        zero: the ZeRO stage; 0: every rank updates all.

    Attributes:
        state: the optimizer's groups and state on this rank, as checkpoints hold them.
        version: rises whenever parameters get other places.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Shards,
        arena: ModuleArena,
        comm: Communicator,
        zero: int,
    ) -> None:
        self.optimizer = optimizer
        self.shards = shards
        self.arena = arena
        self.comm = comm
        self.zero = zero
        self.state = OptimizerState(optimizer, arena)
        self.version = 0
        self._shared_out = self._share_out()

    def _share_out(self) -> list[range]:
        """Returns the trained parameters that each rank updates: with ZeRO a run of them, else
        all.
        """
        trained = self.arena.trained
        ranks = self.comm.size
        return self.arena.shares(0, trained, ranks) if self.zero else [range(trained)] * ranks

    @property
    def in_parts(self) -> bool:
        """True if ranks have state that no other rank has."""
        return self.zero > 0 and self.comm.size > 1

    @property
    def owned(self) -> range:
        """The parameters that this rank updates, by their numbers."""
        return self._shared_out[self.comm.rank]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The floats of the parameters that each rank updates."""
        return [(self.arena.end(r.start), self.arena.end(r.stop)) for r in self._shared_out]

    @property
    def saved_here(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose state this rank saves, with their names.

        All ranks keep the state of parameters that are not trained, and the last rank saves it.
        """
        is_last = self.comm.rank == self.comm.size - 1
        frozen = self.arena.named[self.arena.trained :] if is_last or not self.in_parts else []
        return [*self.arena.named[self.owned.start : self.owned.stop], *frozen]

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that have places for gradients."""
        return [name for name, _ in self.arena.named[: self.arena.trained]]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors in the optimizer's state on this rank."""
        tensors = {
            id(leaf): leaf.nbytes
            for leaf in tree_leaves(list(self.optimizer.state.values()))
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
        }
        return sum(tensors.values())

    def normalize_groups(self) -> None:
        """Turns hyperparameters into Python numbers; see `OptimizerState.normalize_groups`.

        Raises:
            ConfigError: with ZeRO, the optimizer has state under a key that is not a parameter.
        """
        self.state.normalize_groups()
        for key in self.optimizer.state if self.zero else ():
            if not isinstance(key, torch.Tensor):
                raise ConfigError(
                    f"[torch] zero={self.zero} with {type(self.optimizer).__name__}, which has "
                    f"state under {key!r}, which is not a parameter; use zero=0"
                )

    def check_saved(self, saved: Any, name: str) -> None:
        """Checks that the optimizer can take what a checkpoint has of one.

        saved: the optimizer's part of the checkpoint's values. name: of the checkpoint.

        Raises:
            ConfigError: with ZeRO, there is state under a key that is not a parameter.
            CheckpointError: the groups don't fit the module.
        """
        self.state.check_groups(saved, name)
        if self.zero and saved.get("others"):
            raise ConfigError(
                f"[resume] {name} has state of the optimizer under {saved['others'][0][0]!r}, "
                f"which is not a parameter, and zero is {self.zero}; use zero=0"
            )

    def arrange(self, trained: list[str]) -> None:
        """Gives these parameters places for their gradients; a collective call with ZeRO, where
        others update them then.
        """
        saved = self.gathered() if self.zero else None
        self.shards.arrange(trained)
        self.version += 1
        self._shared_out = self._share_out()
        if saved is not None:
            self.state.replace(self.decode(saved))

    def unfreeze(self) -> None:
        """Gives parameters that a callback has unfrozen places for their gradients."""
        if any(p.requires_grad for _, p in self.arena.named[self.arena.trained :]):
            trained = {name for name, p in self.arena.named if p.requires_grad} | set(self.trained)
            self.arrange([name for name, _ in self.arena.named if name in trained])

    def agree(self) -> None:
        """Gives all ranks the state of rank 0's optimizer, as they get its weights.

        With ZeRO, each rank keeps the state of its parameters only. A collective call.

        Raises:
            ConfigError: on all ranks, if a checkpoint can't hold groups or state of a rank.
        """
        with resume.on_all_ranks(self.comm):
            self.normalize_groups()
            self.state.encode_groups({})
            saved = self.state.encode(self.arena.named)
        state_hash = np.array([fingerprint.hash_of(mark(list(saved)))], np.int64)
        if len(np.unique(self.comm.all_gather(state_hash))) > 1:
            saved = SavedState(*resume.spread(self.comm, list(saved)))
            if self.comm.rank:
                self.state.replace(self.decode(saved))
        if self.in_parts:  # some optimizers create the state of all parameters at once
            for i, (_, p) in enumerate(self.arena.named[: self.arena.trained]):
                if i not in self.owned:
                    self.optimizer.state.pop(p, None)

    def gathered(self, parts: bool = False) -> SavedState:
        """Returns the optimizer's state; of all ranks with ZeRO, a collective call.

        parts: True returns only this rank's arrays.

        Raises:
            ConfigError: a checkpoint can't hold a value; on all ranks with ZeRO.
        """
        with resume.on_all_ranks(self.comm, self.in_parts):
            saved = self.state.encode(self.saved_here)
        if not self.in_parts:
            return saved
        whole = SavedState({}, {}, [], {})
        sent = saved._replace(tensors={}, arrays={}) if parts else saved
        for rank in range(self.comm.size):
            of_rank = SavedState(*resume.spread(self.comm, list(sent), rank))
            whole.tensors.update(of_rank.tensors)
            whole.numbers.update(of_rank.numbers)
            whole.arrays.update(of_rank.arrays)
        return saved._replace(numbers=whole.numbers) if parts else whole

    def decode(self, saved: SavedState) -> dict[Any, Any]:
        """Returns the part of a saved state that this rank keeps, by parameter and other keys.

        Raises:
            KeyError, TypeError, ValueError: the checkpoint is damaged.
        """
        owned = self.arena.named[self.owned.start : self.owned.stop]
        frozen = self.arena.named[self.arena.trained :]
        with self.shards.holding():  # strides of states are those of parameters
            return self.state.decode(saved, dict([*owned, *frozen]))
