"""Views of tensors in arrays, and tensors that share memory, which move to such views together.

A buffer such as `register_buffer("w", p.detach())` changes with its parameter in a plain PyTorch
loop, so it also does here. Parameters that have elements in common raise an error, because their
gradients are added up separately, and a rank may own only one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from ..errors import ConfigError
from .device import PLAIN_TENSORS

ALIGN = 16  # floats; every tensor starts on a vector
Named = Sequence[tuple[str, torch.Tensor]]


def aligned_sizes(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Returns where each tensor starts in an array of all of them, and the array's size, in floats.

    Each tensor starts at a multiple of ALIGN.
    """
    starts = []
    size = 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.numel() // ALIGN) * ALIGN
    return starts, size


def view(flat: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a view of a flat tensor from float `at` on, with the shape and strides of `like`.

    Each view counts its own changes (`_version`), because `data` makes a new tensor.
    """
    part = flat.data[at : at + like.numel()]
    return part.as_strided(like.shape, like.stride(), part.storage_offset())


@dataclasses.dataclass
class Alias:
    """A tensor in the memory of another one, its owner. at: where it starts there, in elements."""

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
    """The memory of some tensors, the owners; it finds other tensors that share this memory."""

    def __init__(self, owners: Named) -> None:
        self.owners = [(name, t) for name, t in owners if t.numel()]
        self._ids = {id(t) for _, t in owners}
        ranges = np.array([_find_byte_range(t) for _, t in self.owners], np.int64).reshape(-1, 2)
        self._starts = ranges[:, 0]
        self._ends = ranges[:, 1]

    def sharing(self, t: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Returns the owners (name, tensor) that have an element in common with tensor `t`.

        The list is empty if `t` is an owner itself.
        """
        if id(t) in self._ids or not _has_memory(t):
            return []
        start, end = _find_byte_range(t)
        near = np.flatnonzero((self._starts < end) & (self._ends > start))
        candidates = [self.owners[i] for i in near]
        return [(name, owner) for name, owner in candidates if _share_element(owner, t)]

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the names of two owners that share memory with each other, in a list.

        The list has only the first such pair, and is empty if there is none.
        """
        order = np.argsort(self._starts, kind="stable")
        max_ends = np.maximum.accumulate(self._ends[order])
        # owners that start before the end of an earlier one
        for k in np.flatnonzero(self._starts[order][1:] < max_ends[:-1]) + 1:
            current = order[k]
            earlier = order[:k]
            for other in earlier[self._ends[earlier] > self._starts[current]]:
                first, second = sorted((int(current), int(other)))
                first_name, first_tensor = self.owners[first]
                second_name, second_tensor = self.owners[second]
                if _share_element(first_tensor, second_tensor):
                    return [(first_name, second_name)]
        return []

    def aliases(self, others: Iterable[tuple[str, torch.Tensor]], kind: str) -> list[Alias]:
        """Returns those of some tensors (name, tensor) that are in the memory of an owner.

        kind: what owners are, for messages. Raises ConfigError: a tensor can't stay in its owner's
        memory when the owner moves.
        """
        aliases = []
        for name, tensor in others:
            owners = self.sharing(tensor)
            if not owners:
                continue
            _, owner = owners[0]
            start, end = _find_byte_range(tensor)
            owner_start, owner_end = _find_byte_range(owner)
            offset = start - owner_start
            is_inside = start >= owner_start and end <= owner_end
            is_view = (
                len(owners) == 1
                and _is_dense(owner)
                and owner.dtype == tensor.dtype
                and is_inside
                and offset % tensor.element_size() == 0
            )
            if not is_view:
                names = " and ".join(name for name, _ in owners)
                raise ConfigError(
                    f"[torch] {name} shares memory with the {kind} {names}, which move to memory "
                    "of their own; make it "
                    "a view of one whole float32 tensor, or compute it in forward()"
                )
            aliases.append(Alias(name, tensor, owner, at=offset // tensor.element_size()))
        return aliases


def of_parameters(module: nn.Module, parameters: Named, buffers: Named) -> list[Alias]:
    """Returns the buffers and module attributes that are in the memory of parameters.

    Raises ConfigError: one of these can't stay there, or two parameters share memory.
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
    """Returns the names and values of tensors that modules keep as plain attributes."""
    return [
        (f"{path}.{name}" if path else name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) in PLAIN_TENSORS
    ]


def _has_memory(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and not t.is_meta and t.numel() > 0


def _is_dense(t: torch.Tensor) -> bool:
    """Returns whether elements are next to each other without gaps, each at its own address.

    Such a tensor keeps its strides when it is moved.
    """
    return bool(torch.ops.aten.is_non_overlapping_and_dense(t))


def _find_byte_range(t: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first byte, and one past its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _share_element(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors with overlapping ranges of addresses have an element in common.

    Views with elements of other sizes count as if they had. They are rare.
    """
    if _is_dense(a) and _is_dense(b):
        return True
    if a.element_size() != b.element_size():
        return True
    return bool(np.intersect1d(_list_addresses(a), _list_addresses(b)).size)


def _list_addresses(t: torch.Tensor) -> np.ndarray:
    """Returns the addresses of all elements."""
    addresses = np.full(1, t.data_ptr(), np.int64)
    for n, stride in zip(t.shape, t.stride(), strict=True):
        steps = np.arange(n) * stride * t.element_size()
        addresses = (addresses[:, None] + steps).reshape(-1)
    return addresses
