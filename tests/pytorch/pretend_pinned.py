"""Pinned memory for the pretended device, which PyTorch asks for from C++.

A device that is written in Python can't offer an allocator of pinned memory. So this replaces the
CPU's operations that create such memory and look at it. The memory isn't pinned: only PyTorch's
questions are answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Pinned:
    """The addresses of memory that counts as pinned. created: the tensors that were asked for."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.created = 0

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], *, pin_memory: Any = None, **options: Any
    ) -> torch.Tensor:
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        elements = last + 1 if all(size) else 0
        tensor = torch.empty(elements, dtype=options.get("dtype")).as_strided(size, stride)
        # memory that is used again is new memory
        self.addresses.discard(tensor.untyped_storage().data_ptr())
        if pin_memory:
            self.created += 1
            self.addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        return tensor.untyped_storage().data_ptr() in self.addresses


@contextlib.contextmanager
def offered() -> Iterator[Pinned]:
    """Offers pinned memory in the block."""
    pinned = Pinned()
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", pinned.empty_strided, "CPU")
    library.impl("is_pinned", pinned.is_pinned, "CPU")
    try:
        yield pinned
    finally:
        library._destroy()
