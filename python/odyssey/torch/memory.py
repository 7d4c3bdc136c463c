"""The places of tensors in arrays, and tensors that share memory, which move to such places
together.

A buffer such as `register_buffer("w", p.detach())` changes with its parameter in a plain PyTorch
loop, so it does here. Parameters that have elements in common are refused: their gradients are
added up apart, and ranks may own one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from ..errors import ConfigError

ALIGN = 16  # floats; every tensor starts on a vector
Named = Sequence[tuple[str, torch.Tensor]]


def aligned_sizes(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts, in floats, and the floats of all."""
    at = []
    size = 0
    for t in tensors:
        at.append(size)
        size += -(-t.numel() // ALIGN) * ALIGN
    return at, size


def view(flat: np.ndarray, at: int, like: torch.Tensor) -> torch.Tensor:
    """The place of a tensor in an array, with its shape and strides; it counts its own changes
    (`_version`).
    """
    return torch.from_numpy(flat[at : at + like.numel()]).as_strided(like.shape, like.stride())


@dataclasses.dataclass
class Alias:
    """A tensor in the memory of another one. at: where it begins there, in elements."""

    name: str
    tensor: torch.Tensor
    owner: torch.Tensor
    at: int

    def follow(self) -> None:
        """Moves the tensor to where its owner is now, which has kept its strides."""
        owner = self.owner.detach()
        like = self.tensor
        like.data = owner.as_strided(like.shape, like.stride(), owner.storage_offset() + self.at)


class Places:
    """The memory of tensors, by which others are found that share it."""

    def __init__(self, owners: Named) -> None:
        self.owners = [(name, t) for name, t in owners if t.numel()]
        self._ids = {id(t) for _, t in owners}
        ranges = np.array([_bytes_of(t) for _, t in self.owners], np.int64).reshape(-1, 2)
        self._starts = ranges[:, 0]
        self._ends = ranges[:, 1]

    def sharing(self, t: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The owners that have an element in common with a tensor, which is none of them."""
        if id(t) in self._ids or not _has_memory(t):
            return []
        start, end = _bytes_of(t)
        near = np.flatnonzero((self._starts < end) & (self._ends > start))
        return [self.owners[i] for i in near if _meet(self.owners[i][1], t)]

    def pairs(self) -> list[tuple[str, str]]:
        """Owners that share memory with each other, by their names; only the first such pair."""
        order = np.argsort(self._starts, kind="stable")
        reach = np.maximum.accumulate(self._ends[order])
        for k in np.flatnonzero(self._starts[order][1:] < reach[:-1]) + 1:
            own = order[k]
            for other in order[:k][self._ends[order[:k]] > self._starts[own]]:
                if _meet(self.owners[own][1], self.owners[other][1]):
                    first, second = sorted((int(own), int(other)))
                    return [(self.owners[first][0], self.owners[second][0])]
        return []

    def aliases(self, others: Iterable[tuple[str, torch.Tensor]], kind: str) -> list[Alias]:
        """Finds which of some tensors lie in the memory of an owner. kind: what owners are.

        Raises ConfigError: one cannot lie there any more once the owners have moved.
        """
        found = []
        for name, t in others:
            owners = self.sharing(t)
            if not owners:
                continue
            owner = owners[0][1]
            (start, end) = _bytes_of(t)
            (first, last) = _bytes_of(owner)
            kept = len(owners) == 1 and _is_dense(owner) and owner.dtype == t.dtype
            if not kept or start < first or end > last or (start - first) % t.element_size():
                names = " and ".join(name for name, _ in owners)
                raise ConfigError(
                    f"[torch] {name} shares memory with the {kind} {names}, which move to memory "
                    "of their own; make it "
                    "a view of one whole float32 tensor, or compute it in forward()"
                )
            found.append(Alias(name, t, owner, (start - first) // t.element_size()))
        return found


def of_parameters(module: nn.Module, parameters: Named, buffers: Named) -> list[Alias]:
    """Returns the buffers, and tensors that are attributes of modules, in the memory of parameters.

    Raises ConfigError: one of these cannot stay there, or two parameters share memory.
    """
    places = Places(parameters)
    for first, second in places.pairs():
        raise ConfigError(
            f"[torch] the parameters {first} and {second} share memory, and each needs a place "
            "of its own; use one "
            "nn.Parameter in both modules, or compute one tensor from the other in forward()"
        )
    return places.aliases([*buffers, *attributes(module)], "parameters")


def attributes(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors that modules keep as plain attributes."""
    return [
        (f"{path}.{name}" if path else name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) is torch.Tensor
    ]


def _has_memory(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and t.device.type == "cpu" and t.numel() > 0


def _is_dense(t: torch.Tensor) -> bool:
    """True if elements are side by side, each at its own place; then a tensor keeps its strides
    where it is moved.
    """
    return bool(torch.ops.aten.is_non_overlapping_and_dense(t))


def _bytes_of(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and one past its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors, whose ranges of addresses overlap, have an element in common."""
    if _is_dense(a) and _is_dense(b):
        return True
    if a.element_size() != b.element_size():
        return True  # such views are rare, and what cannot be kept is refused
    return bool(np.intersect1d(_addresses(a), _addresses(b)).size)


def _addresses(t: torch.Tensor) -> np.ndarray:
    """The addresses of all elements."""
    at = np.full(1, t.data_ptr(), np.int64)
    for n, stride in zip(t.shape, t.stride(), strict=True):
        at = (at[:, None] + np.arange(n) * stride * t.element_size()).reshape(-1)
    return at
