"""Activation checkpointing: less memory for a second forward computation.

Not checkpoints on disk.

The values between the layers of a checkpoint are not kept for the backward pass; they are computed
again when it comes there (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The
same kernels on the same numbers, dropout masks included, so every gradient keeps its bits. In a
recorded step the workspace of a shard shrinks; in eager mode the arrays are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..core.tensor import Parameter, Tensor, checkpointed
from ..errors import ConfigError
from .module import Module


class Checkpoint(Module):
    """A module whose inner activations are computed again in the backward pass; its parameters
    keep their names.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        return checkpointed(self.module, args)

    def _walk_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        return self.module._walk_parameters(prefix)


def checkpoint(fn: Callable[..., Tensor], *args: Any) -> Any:
    """fn(*args) without keeping what is computed on the way; the backward pass computes it again.

    Args:
        fn: a module or a function of tensors that gives one tensor. It may use parameters and
            tensors from outside, and must do the same each time. All of it runs on one place.
        args: its arguments. Without any, checkpoint(fn) is what takes them: a module if fn is one.

    Raises ConfigError: fn cannot be called. ShapeError: fn gives something else than a tensor.
    DeviceError: fn moves a value to another place.
    """
    if not callable(fn):
        raise ConfigError(
            f"[checkpoint] a {type(fn).__name__} was given; give a module or a function"
        )
    if args:
        return checkpointed(fn, args)
    if isinstance(fn, Module):
        return Checkpoint(fn)
    return lambda *later: checkpointed(fn, later)
