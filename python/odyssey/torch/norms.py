"""Buffers of a module while it is trained: what normalisations keep of their inputs, and all
others.

A normalisation's rule is known, so shards change its buffers apart and their values are merged.
Running statistics are views of one array for that. A program may write into them between steps, or
put other tensors in their place: the next step begins with what is there then, as in a plain
PyTorch loop.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np
import torch
from torch import nn

from ..core import native
from ..errors import ConfigError
from .memory import Alias, Places, aligned_sizes, attributes

Named = list[tuple[str, torch.Tensor]]


class Norms:
    """The buffers of a module; running statistics are moved to one array, their values stay.

    statistics: float buffers of normalisations (name, tensor), views of `running`. counters:
    integer buffers of normalisations. kept, counts: the values of both before a step.
    fixed_buffers: buffers that a shard must leave as they are. written: by name, a fingerprint
    of all that a program wrote into statistics and counters between steps; ranks compare it,
    because the next step merges the values. parameters: their names and tensors, whose memory
    no statistics may share. Raises ConfigError: a buffer cannot be trained with; the message
    names it.
    """

    def __init__(self, module: nn.Module, parameters: Named) -> None:
        self.module = module
        self.written: dict[str, str] = {}
        of_norms = _of_norms(module)
        buffers = list(module.named_buffers())
        self.aliases: list[Alias] = []  # of statistics
        self.statistics: Named = [
            (n, b) for n, b in buffers if n in of_norms and b.is_floating_point()
        ]
        places = Places(parameters)
        for name, b in self.statistics:
            if places.sharing(b):
                raise ConfigError(
                    f"[torch] {name} shares memory with a parameter, and both change; clone one "
                    "of them"
                )
        if Places(self.statistics).pairs():
            self._part_aliases()
        rest = [(name, b) for name, b in buffers if name not in of_norms]
        self.aliases += Places(self.statistics).aliases([*rest, *attributes(module)], "statistics")
        self._shapes = [b.shape for _, b in self.statistics]
        self._places, self.floats = aligned_sizes([b for _, b in self.statistics])
        self.running, self.kept = (
            native.aligned(max(self.floats, 1))[: self.floats] for _ in range(2)
        )
        self._move()
        for alias in self.aliases:
            alias.follow()
        self._list()
        self.keep()

    def _part_aliases(self) -> None:
        """Moves statistics in the memory of others from `statistics` to `aliases`."""
        everything = self.statistics
        self.statistics = []
        for name, b in everything:
            shared = Places(self.statistics).aliases([(name, b)], "statistics")
            self.aliases += shared
            if not shared:
                self.statistics.append((name, b))

    def _move(self) -> None:
        """Moves statistics that are elsewhere into `running`."""
        for (_, b), at, shape in zip(self.statistics, self._places, self._shapes, strict=True):
            place = torch.from_numpy(self.running[at : at + shape.numel()]).view(shape)
            if b.data_ptr() != place.data_ptr() or b.dtype != place.dtype:
                place.copy_(b.detach())
                b.data = place

    def _list(self) -> None:
        """Lists the buffers that the modules have now."""
        buffers = list(self.module.named_buffers())
        of_norms = _of_norms(self.module)
        moved = {id(b) for _, b in self.statistics} | {id(alias.tensor) for alias in self.aliases}
        self.counters = [
            (name, b) for name, b in buffers if name in of_norms and id(b) not in moved
        ]
        rest = [(name, b) for name, b in buffers if name not in of_norms and id(b) not in moved]
        counters = Places(self.counters)
        self.fixed_buffers = [(name, b) for name, b in rest if not counters.sharing(b)]
        self._names = {name for name, _ in buffers if name in of_norms}
        self._held = [(part._buffers, dict(part._buffers)) for part in self.module.modules()]
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> dict[str, int]:
        """The addresses of statistics, and of what shares memory with them."""
        tensors = [*self.statistics, *((alias.name, alias.tensor) for alias in self.aliases)]
        return {name: t.data_ptr() for name, t in tensors}

    def _find_replaced(self) -> None:
        """Takes tensors that a program has put in the place of buffers.

        Raises ConfigError: a normalisation's buffer cannot be merged as before.
        """
        same = all(
            len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))
            for now, then in self._held
        )
        if same and self._addresses == self._addresses_now():
            return
        of_norms = _of_norms(self.module)
        now = {name: b for name, b in self.module.named_buffers() if name in of_norms}
        for name in sorted({*self._names, *now}):
            if problem := self._problem(name, now.get(name)):
                raise ConfigError(
                    f"[torch] the buffer {name} {problem} since the trainer was made; change "
                    "values in place "
                    "(load_state_dict, b.copy_), or make a new trainer of the module"
                )
        self.statistics = [(name, now[name]) for name, _ in self.statistics]
        self._move()
        self._list()

    def _problem(self, name: str, b: torch.Tensor | None) -> str | None:
        """Says why a buffer cannot take the place of the one that a normalisation had; None: it
        can.
        """
        if b is None:
            return "is gone"
        if name not in self._names:
            return "is new"
        shapes = {
            name: shape for (name, _), shape in zip(self.statistics, self._shapes, strict=True)
        }
        aliases = {alias.name: alias.tensor for alias in self.aliases}
        aliased = {id(alias.owner) for alias in self.aliases}
        shared = aliases | {name: t for name, t in self.statistics if id(t) in aliased}
        if name in shared and (b is not shared[name] or b.data_ptr() != self._addresses[name]):
            return "shares no memory with others any more"
        if b.device.type != "cpu" or b.is_floating_point() != (name in shapes or name in aliases):
            return f"is {str(b.dtype).removeprefix('torch.')} on {b.device}"
        if b.shape != shapes.get(name, b.shape):
            return f"has shape {tuple(b.shape)} instead of {tuple(shapes[name])}"
        return None

    def take_over(self) -> None:
        """Has what a program has written since `keep` as the values before the next step.

        Raises ConfigError: a buffer cannot be merged any more.
        """
        self._find_replaced()
        counts = [int(b) for _, b in self.counters]
        if counts == self.counts and np.array_equal(
            self.running.view(np.uint32), self.kept.view(np.uint32)
        ):
            return
        for (name, _), at, shape in zip(self.statistics, self._places, self._shapes, strict=True):
            values = self.running[at : at + shape.numel()].tobytes()
            if values != self.kept[at : at + shape.numel()].tobytes():
                self._note(name, values)
        for (name, _), count, before in zip(self.counters, counts, self.counts, strict=True):
            if count != before:
                self._note(name, str(count).encode())
        self.keep()

    def _note(self, name: str, values: bytes) -> None:
        """Adds values to the fingerprint of all that were written."""
        before = self.written.get(name, "").encode()
        self.written[name] = hashlib.blake2b(before + values, digest_size=8).hexdigest()

    def keep(self) -> None:
        """Has the values of now as those before the next step."""
        self.kept[:] = self.running
        self.counts = [int(b) for _, b in self.counters]

    def put_back(self) -> None:
        """Gives statistics and counters the values before the step."""
        self.running[:] = self.kept
        for (_, b), count in zip(self.counters, self.counts, strict=True):
            b.fill_(count)

    def settle(self, merged: torch.Tensor | None, counts: list[int]) -> None:
        """Gives statistics and counters the values after a step. merged: of all statistics; None
        if there are none.
        """
        if merged is not None:
            self.running[:] = merged.numpy()
        for (_, b), count in zip(self.counters, counts, strict=True):
            b.fill_(count)
        self.keep()


def _of_norms(module: nn.Module) -> set[str]:
    """The names of buffers that a normalisation keeps of its inputs: their rule is known."""
    norms = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
    ]
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return {f"{name}.{buffer}" if name else buffer for name in norms for buffer in kept}
