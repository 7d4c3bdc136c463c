"""One flat buffer for all parameters and one of the same layout for their gradients.

A parameter is a named range of it. An optimizer is then one kernel over the whole arena, a bucket or a checkpoint piece
is a range, and the SHA-256 of the training is that of one buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import native
from .program import Range
from .tensor import Parameter, Watcher

ALIGN = 16  # floats; every parameter starts on a vector


class Arena:
    """Parameters and gradients of `named`, moved here in order; each parameter's memory becomes a range.

    `params` (size,) and `grads` (size + STATS,) are float32; STATS floats behind the gradients hold the step's loss
    sum, samples and correct predictions.
    """

    def __init__(self, named: Iterable[tuple[str, Parameter]]) -> None:
        self.named = list(named)
        if not self.named:
            raise ConfigError("[arena] the model has no parameters; give it at least one layer that has some")
        self.offsets: dict[str, int] = {}  # in floats
        size = 0
        for name, p in self.named:
            self.offsets[name] = size
            size += -(-p.size // ALIGN) * ALIGN
        self.size = size
        self._params: np.ndarray | None = native.aligned(size)
        self.grads = native.aligned(size + native.library().stats)  # the system gives memory when it is written to
        self.watcher: Watcher | None = None  # hears of backward passes that reach these parameters
        self.mirror: Any = None  # of the parameters on GPUs that train them (gpu/mirror.py)
        self._addresses = {native.PARAMS: self._params.ctypes.data, native.GRADS: self.grads.ctypes.data}
        for name, p in self.named:
            at = 4 * self.offsets[name]
            values, gradient = p.data.copy(), p.grad.data.copy()
            p.place(Range(self, native.PARAMS, at), Range(self, native.GRADS, at))
            p.name = name
            p.data[...] = values
            if gradient.any():
                p.grad.data[...] = gradient

    @classmethod
    def of(cls, named: Iterable[tuple[str, Parameter]]) -> Arena:
        """The arena these parameters already fill, or a new one."""
        named = list(named)
        placed = [p.memory.arena for _, p in named if isinstance(p.memory, Range)]
        if placed:
            arena = placed[0]
            if [id(p) for _, p in arena.named] == [id(p) for _, p in named]:
                return arena
            raise ConfigError(
                "[arena] these parameters belong to another optimizer or trainer together with others; "
                "give both the same model"
            )
        return cls(named)

    @property
    def params(self) -> np.ndarray:
        """The parameters (size,) float32.

        Raises:
            ConfigError: they are spread over the ranks (ZeRO stage 3).
        """
        if self._params is None:
            raise ConfigError(
                "[zero] the parameters are spread over the ranks (zero=3); call trainer.state_dict() on all ranks"
            )
        if self.mirror is not None:
            self.mirror.read()
        return self._params

    @property
    def host(self) -> np.ndarray:
        """The same as this process last saw them: GPUs that train them may be ahead."""
        assert self._params is not None
        return self._params

    def release_full_parameters(self) -> None:
        """The ranks keep parts of the parameters from here on (parallel/zero.py)."""
        self._params = None
        self._addresses.pop(native.PARAMS)

    def address(self, space: int) -> int:
        """Where the parameters (native.PARAMS) or the gradients (native.GRADS) start."""
        if space not in self._addresses or (space == native.PARAMS and self.mirror is not None):
            _ = self.params  # raises, or brings them from the GPUs
        return self._addresses[space]

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """The piece of an array of the arena's layout that belongs to one parameter, in its shape."""
        p = dict(self.named)[name]
        at = self.offsets[name]
        return flat[at : at + p.size].reshape(p.shape)

    def sha256(self) -> str:
        """SHA-256 over the bytes of the parameters."""
        return hashlib.sha256(self.params.tobytes()).hexdigest()

    def layout_hash(self) -> int:
        """64 bits of a hash over names, shapes and offsets; equal on ranks that can train together."""
        text = repr([(name, p.shape, self.offsets[name]) for name, p in self.named])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
