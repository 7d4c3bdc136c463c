"""The buffers of a module while it is trained: those of normalisations, and all others.

A normalisation keeps running statistics of its inputs, and a counter of batches. The rule by which
it updates them is known. So each shard updates them separately, and the step merges the values. For
that, running statistics become views of one tensor. A program may write into them between steps, or
replace them by other tensors: the next step starts with the new values, as in a plain PyTorch loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import ConfigError
from .device import Device, host_array
from .memory import Alias, Places, aligned_sizes, attributes

Named = list[tuple[str, torch.Tensor]]


class Norms:
    """The buffers of a module. It moves running statistics to one tensor; their values stay.

    Args:
        module: what is trained.
        parameters: the names and tensors of its parameters. Statistics may not share their memory.
        device: the device of the module.

    Attributes:
        statistics: float buffers of normalisations (name, tensor), views of `running`.
        counters: integer buffers of normalisations.
        kept, counts: the values of statistics and counters before the step.
        fixed_buffers: buffers that a shard must leave as they are.
        aliases: tensors in the memory of statistics.
        written: for each name, a fingerprint of everything that a program wrote into statistics and
            counters between steps. Ranks compare it, because the next step merges the values.

    Raises:
        ConfigError: A buffer isn't supported; the message names it.
    """

    def __init__(self, module: nn.Module, parameters: Named, device: Device) -> None:
        self.module = module
        self.device = device
        self.written: dict[str, str] = {}
        norm_names = _find_norm_buffers(module)
        buffers = list(module.named_buffers())
        self.aliases: list[Alias] = []
        self.statistics: Named = [
            (name, buffer)
            for name, buffer in buffers
            if name in norm_names and buffer.is_floating_point()
        ]
        places = Places(parameters)
        for name, buffer in self.statistics:
            if places.sharing(buffer):
                raise ConfigError(
                    f"[torch] {name} shares memory with a parameter, and both change; clone one "
                    "of them"
                )
        if Places(self.statistics).pairs():
            self._split_off_aliases()
        other_buffers = [(name, buffer) for name, buffer in buffers if name not in norm_names]
        self.aliases += Places(self.statistics).aliases(
            [*other_buffers, *attributes(module)], kind="statistics"
        )
        self._shapes = [statistic.shape for _, statistic in self.statistics]
        self._offsets, self.floats = aligned_sizes([statistic for _, statistic in self.statistics])
        self.running = device.zeros(self.floats)
        self.kept = device.zeros(self.floats)
        self._move_statistics()
        for alias in self.aliases:
            alias.follow()
        self.list_buffers()
        self.keep()

    def _split_off_aliases(self) -> None:
        """Moves statistics that are in the memory of others from `statistics` to `aliases`."""
        all_statistics = self.statistics
        self.statistics = []
        for name, statistic in all_statistics:
            aliases = Places(self.statistics).aliases([(name, statistic)], kind="statistics")
            self.aliases += aliases
            if not aliases:
                self.statistics.append((name, statistic))

    def _move_statistics(self) -> None:
        """Moves statistics that are elsewhere into `running`, as views with their values."""
        for (_, statistic), offset, shape in zip(
            self.statistics, self._offsets, self._shapes, strict=True
        ):
            place = self.running.data[offset : offset + shape.numel()].view(shape)
            if statistic.data_ptr() != place.data_ptr() or statistic.dtype != place.dtype:
                place.copy_(statistic.detach())
                statistic.data = place

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores statistics and counters after the block."""
        running = self.running.clone()
        counters = [(counter, counter.clone()) for _, counter in self.counters]
        try:
            yield
        finally:
            self.running.copy_(running)
            with torch.no_grad():
                for counter, value in counters:
                    counter.copy_(value)

    def list_buffers(self) -> None:
        """Sorts the current buffers of the modules into counters and fixed buffers, and notes all
        of them, so that `_adopt_replaced` finds replaced ones.
        """
        buffers = list(self.module.named_buffers())
        norm_names = _find_norm_buffers(self.module)
        moved_ids = {id(statistic) for _, statistic in self.statistics}
        moved_ids |= {id(alias.tensor) for alias in self.aliases}
        unmoved = [(name, buffer) for name, buffer in buffers if id(buffer) not in moved_ids]
        self.counters = [(name, buffer) for name, buffer in unmoved if name in norm_names]
        counters = Places(self.counters)
        self.fixed_buffers = [
            (name, buffer)
            for name, buffer in unmoved
            if name not in norm_names and not counters.sharing(buffer)
        ]
        self._names = {name for name, _ in buffers if name in norm_names}
        # each module's dict of buffers, and a copy of it
        self._buffer_dicts = [
            (part._buffers, dict(part._buffers)) for part in self.module.modules()
        ]
        self._addresses = self._read_addresses()

    def _read_addresses(self) -> dict[str, int]:
        """Returns the addresses of statistics, and of tensors that share memory with them."""
        tensors = [*self.statistics, *((alias.name, alias.tensor) for alias in self.aliases)]
        return {name: tensor.data_ptr() for name, tensor in tensors}

    def _adopt_replaced(self) -> None:
        """Continues with the tensors by which a program has replaced buffers.

        Raises ConfigError: a normalisation's buffer can't be merged as before.
        """
        is_same = all(
            len(current) == len(old) and all(map(operator.is_, current.values(), old.values()))
            for current, old in self._buffer_dicts
        )
        if is_same and self._addresses == self._read_addresses():
            return
        norm_names = _find_norm_buffers(self.module)
        current = {
            name: buffer for name, buffer in self.module.named_buffers() if name in norm_names
        }
        for name in sorted({*self._names, *current}):
            if problem := self._describe_problem(name, current.get(name)):
                raise ConfigError(
                    f"[torch] the buffer {name} {problem} since the trainer was made; change "
                    "values in place "
                    "(load_state_dict, b.copy_), or make a new trainer of the module"
                )
        self.statistics = [(name, current[name]) for name, _ in self.statistics]
        self._move_statistics()
        self.list_buffers()

    def _describe_problem(self, name: str, buffer: torch.Tensor | None) -> str | None:
        """Returns why a buffer can't replace the one of this name, for a message; None if it can.

        buffer: None if the modules have none of this name.
        """
        if buffer is None:
            return "is gone"
        if name not in self._names:
            return "is new"
        shapes = {
            name: shape for (name, _), shape in zip(self.statistics, self._shapes, strict=True)
        }
        aliases = {alias.name: alias.tensor for alias in self.aliases}
        owner_ids = {id(alias.owner) for alias in self.aliases}
        owners = {name: tensor for name, tensor in self.statistics if id(tensor) in owner_ids}
        shared = aliases | owners
        if name in shared:
            is_moved = buffer.data_ptr() != self._addresses[name]
            if buffer is not shared[name] or is_moved:
                return "shares no memory with others any more"
        is_float = name in shapes or name in aliases
        if buffer.device != self.device.torch_device or buffer.is_floating_point() != is_float:
            return f"is {str(buffer.dtype).removeprefix('torch.')} on {buffer.device}"
        if buffer.shape != shapes.get(name, buffer.shape):
            return f"has shape {tuple(buffer.shape)} instead of {tuple(shapes[name])}"
        return None

    def take_over(self) -> None:
        """Makes the current values those before the next step, and notes what a program has written
        since `keep`.

        Raises ConfigError: a buffer can't be merged any more.
        """
        self._adopt_replaced()
        counts = self._read_counts()
        # compared as integers, because a NaN doesn't equal itself
        is_same = not self.floats or torch.equal(
            self.running.view(torch.int32), self.kept.view(torch.int32)
        )
        if is_same and counts == self.counts:
            return
        running = host_array(self.running)
        kept = host_array(self.kept)
        for (name, _), offset, shape in zip(
            self.statistics, self._offsets, self._shapes, strict=True
        ):
            span = slice(offset, offset + shape.numel())
            values = running[span].tobytes()
            if values != kept[span].tobytes():
                self._note_write(name, values)
        for (name, _), count, before in zip(self.counters, counts, self.counts, strict=True):
            if count != before:
                self._note_write(name, str(count).encode())
        self.keep()

    def _note_write(self, name: str, values: bytes) -> None:
        """Adds values to the fingerprint of all values that were written into this buffer."""
        before = self.written.get(name, "").encode()
        self.written[name] = hashlib.blake2b(before + values, digest_size=8).hexdigest()

    def keep(self) -> None:
        """Makes the current values those before the next step."""
        self.kept.copy_(self.running)
        self.counts = self._read_counts()

    def _read_counts(self) -> list[int]:
        """Returns the values of the counters; the host waits for the device once."""
        counters = [counter.detach().reshape(()) for _, counter in self.counters]
        return torch.stack(counters).tolist() if counters else []

    def put_back(self) -> None:
        """Sets statistics and counters to their values before the step."""
        self.running.copy_(self.kept)
        for (_, counter), count in zip(self.counters, self.counts, strict=True):
            counter.fill_(count)

    def settle(self, merged: torch.Tensor | None, counts: list[int]) -> None:
        """Sets statistics and counters to their values after a step.

        merged: the values of all statistics; None if there are none.
        """
        if merged is not None:
            self.running.copy_(merged)
        for (_, counter), count in zip(self.counters, counts, strict=True):
            counter.fill_(count)
        self.keep()


def _find_norm_buffers(module: nn.Module) -> set[str]:
    """Returns the names of the buffers that normalisations update by a known rule."""
    norms = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
    ]
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return {f"{name}.{buffer}" if name else buffer for name in norms for buffer in kept}
