"""One flat buffer for all parameters and one of the same layout for their gradients.

A parameter is a named range of it. An optimizer is then one kernel over the whole arena, a bucket
or a checkpoint piece is a range, and the SHA-256 of the training is that of one buffer.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import native, setting_versions
from .offload import maker
from .program import Range
from .tape import BackwardWatcher, Parameter

ALIGN = 16  # floats; every parameter starts on a vector
# bytes of parameters that move before the room they leave is given back to the system
TRIM = 16 << 20


class Buffer(Parameter):
    """A tensor of a module that is part of its state and trained by no optimizer: a running
    statistic, a constant.

    In a trainer's step one that `moves` has a gradient, as a parameter has: what each shard's
    samples take away from it. It goes along the tree, over the network and to its owner as
    gradients do; divided by the samples of the global batch, it is subtracted (optim.Optimizer).
    """

    __slots__ = ()

    def __init__(self, data: Any, moves: bool = False) -> None:
        super().__init__(data)
        self.requires_grad = moves


class Arena:
    """Parameters and gradients of `named`, moved here in order, buffers behind them; each one's
    memory becomes a range.

    `params` (size,) and `grads` (size + STATS,) are float32; STATS floats behind the gradients hold
    the step's loss sum, samples and correct predictions. From float `trained` on there are buffers.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        buffers: Iterable[tuple[str, Buffer]] = (),
        make: Any = None,
    ) -> None:
        self.named: list[tuple[str, Parameter]] = []
        self.offsets: dict[str, int] = {}  # in floats
        self.size = 0
        # hears of backward passes that reach these parameters
        self.watcher: BackwardWatcher | None = None
        self.mirror: Any = None  # of the parameters on GPUs that train them (gpu/mirror.py)
        # ranks have parts of the parameters: a write on one of them would be lost, or theirs alone
        self.locked = False
        self._frozen: tuple[Any, list[tuple[int, int]]] = (None, [])
        # of arrays that a training keeps: as native.aligned, or in files (offload.py)
        self.make = make or maker()
        named_parameters = list(named_parameters)
        buffers = list(buffers)
        if not named_parameters:
            raise ConfigError(
                "[arena] the model has no parameters; give it at least one layer that has some"
            )
        self._add([*named_parameters, *buffers])
        self.trained = self.offsets[buffers[0][0]] if buffers else self.size

    def _add(self, named_tensors: list[tuple[str, Parameter]]) -> None:
        """Moves these in, behind what is here, whose offsets stay."""
        moved = [p for _, p in (*self.named, *named_tensors)]
        for name, p in named_tensors:
            self.offsets[name] = self.size
            p.name = name
            self.size += -(-p.size // ALIGN) * ALIGN
        self.named += named_tensors
        params = self.make(self.size)
        grads = self.make(self.size + native.library().stats)
        freed = 0  # bytes that have not been given back yet
        for p in moved:
            offset = self.offsets[p.name]
            params[offset : offset + p.size].reshape(p.shape)[...] = p.data
            if p.grad.data.any():
                grads[offset : offset + p.size].reshape(p.shape)[...] = p.grad.data
            p.place(Range(self, native.PARAMS, 4 * offset), Range(self, native.GRADS, 4 * offset))
            freed += 4 * p.size
            if freed > TRIM:
                native.trim()
                freed = 0
        self._params: np.ndarray | None = params
        self.grads = grads  # the system gives memory that is written to
        self._addresses: dict[int, int] = {
            native.PARAMS: params.ctypes.data,
            native.GRADS: grads.ctypes.data,
        }

    # --- copies: parameters have their own memory (tape.Parameter), which a new arena takes ---

    def __deepcopy__(self, memo: dict[int, Any]) -> Arena:
        new = Arena.__new__(Arena)
        memo[id(self)] = new
        new.__setstate__({**copy.deepcopy(self.__getstate__(), memo), "make": self.copy_maker})
        return new

    def __copy__(self) -> Arena:
        raise ConfigError(
            "[copy] an arena can't be copied without its parameters; use copy.deepcopy"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything that pickle keeps: the names and the parameters, which have the values."""
        self.check_copied()
        buffers = self.buffers
        named_parameters = self.named[: len(self.named) - len(buffers)]
        return {"named_parameters": named_parameters, "buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Becomes what `__getstate__` described."""
        self.__init__(**state)  # type: ignore[misc]

    def check_copied(self) -> None:
        """Raises ConfigError if this rank does not have the values of all parameters as they are
        now.
        """
        if self.locked or self._params is None:
            raise ConfigError(
                "[copy] ranks have parts of the weights on this layout, so a copy on one would "
                "miss the others' parts; "
                "copy within `with trainer.writing():`, on all ranks, or use trainer.state_dict()"
            )

    @property
    def copy_maker(self) -> Any:
        """The function that allocates copies of the parameters: in files, if the parameters are
        in files.
        """
        return maker() if self.make is native.aligned else self.make

    def move_to(self, make: Any) -> None:
        """Moves everything into memory that `make` makes (offload.Files), unless it is in files
        already.
        """
        if self.make is native.aligned is not make:
            self.make = make
            self._add([])

    @property
    def buffers(self) -> list[tuple[str, Parameter]]:
        """The buffers among `named`."""
        return [(name, p) for name, p in self.named if self.offsets[name] >= self.trained]

    @classmethod
    def of(
        cls,
        named_parameters: Iterable[tuple[str, Parameter]],
        buffers: Iterable[tuple[str, Buffer]] = (),
    ) -> Arena:
        """The arena these parameters already fill, or a new one.

        Buffers that it has not are added.
        """
        named_parameters = list(named_parameters)
        buffers = list(buffers)
        (name, times), *_ = Counter(name for name, _ in (*named_parameters, *buffers)).most_common(
            1
        ) or [("", 0)]
        if times > 1:
            raise ConfigError(
                f"[arena] {times} parameters are called {name}; give attributes names without dots"
            )
        placed = [p.memory.arena for _, p in named_parameters if isinstance(p.memory, Range)]
        if placed:
            arena = placed[0]
            expected_ids = [id(p) for _, p in named_parameters]
            if (
                buffers
                and arena.trained == arena.size
                and [id(p) for _, p in arena.named] == expected_ids
            ):
                arena._add(buffers)
            expected_ids += (
                [id(b) for _, b in buffers] if buffers else [id(b) for _, b in arena.buffers]
            )
            if [id(p) for _, p in arena.named] == expected_ids:
                return arena
            raise ConfigError(
                "[arena] these parameters belong to another optimizer or trainer together with "
                "others; give both the same model and set requires_grad = False of those that are "
                "not to be trained, or copy the layers with copy.deepcopy()"
            )
        return cls(named_parameters, buffers)

    @property
    def params(self) -> np.ndarray:
        """The parameters (size,) float32.

        Raises ConfigError: they are spread over the ranks (ZeRO stage 3).
        """
        if self._params is None:
            raise ConfigError(
                "[zero] the parameters are spread over the ranks (zero=3); call "
                "trainer.state_dict() on all ranks"
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

    @property
    def frozen(self) -> list[tuple[int, int]]:
        """Runs (first, one past the last) of parameters that are not to be trained, in order."""
        stamp = setting_versions.models.value, self.size, self.trained
        if self._frozen[0] != stamp:  # an update asks in every step
            sizes = ((self.offsets[name], p) for name, p in self.named if not p.requires_grad)
            self._frozen = (
                stamp,
                [
                    (start, start + -(-p.size // ALIGN) * ALIGN)
                    for start, p in sizes
                    if start < self.trained
                ],
            )
        return self._frozen[1]

    @contextmanager
    def lent(self, flat: np.ndarray) -> Iterator[None]:
        """Ops that run inside read the parameters from an array of this layout: where ranks have
        parts of them.
        """
        previous_addresses = self._addresses
        self._addresses = {**self._addresses, native.PARAMS: flat.ctypes.data}
        try:
            yield
        finally:
            self._addresses = previous_addresses

    @contextmanager
    def whole(self, flat: np.ndarray) -> Iterator[None]:
        """Inside, parameters are those of an array of this layout, which may be written."""
        previous_params = self._params
        locked = self.locked
        self._params = flat
        self.locked = False
        try:
            with self.lent(flat):
                yield
        finally:
            self._params = previous_params
            self.locked = locked

    def address(self, space: int) -> int:
        """Where the parameters (native.PARAMS) or the gradients (native.GRADS) start."""
        if space not in self._addresses or (space == native.PARAMS and self.mirror is not None):
            _ = self.params  # raises, or brings them from the GPUs
        return self._addresses[space]

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """The piece of an array of the arena's layout that belongs to one parameter, in its
        shape.
        """
        p = dict(self.named)[name]
        offset = self.offsets[name]
        return flat[offset : offset + p.size].reshape(p.shape)

    def sha256(self) -> str:
        """SHA-256 over the bytes of the parameters."""
        return hashlib.sha256(self.params).hexdigest()

    def layout_hash(self) -> int:
        """64 bits of a hash over names, shapes and offsets; equal on ranks that can train
        together.
        """
        text = repr([(name, p.shape, self.offsets[name]) for name, p in self.named])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
