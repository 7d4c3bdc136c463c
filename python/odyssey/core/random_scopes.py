"""Scopes of random numbers: code in a scope draws numbers that depend only on the scope's key.

Python's `random`, NumPy's global generator and torch's have one state for the whole process. What a
callback draws from them would depend on what ran before it, for example on the number of ranks or
on a resume. So code of the user runs in a scope. A scope seeds these generators by its key, and
sets them afterwards to the states that they had before:

    with scope(seed, "callback", 0, "on_step_end", 17):
        callback.on_step_end(context)

Scopes may be nested, in one thread. Two calls with one key draw the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError
from . import native


class SharedGenerator(Protocol):
    """A random number generator that a whole process shares."""

    def mark(self) -> Any:
        """Returns a value that changes with each draw."""

    def state(self) -> Any:
        """Returns the state, for `restore`."""

    def restore(self, state: Any) -> None:
        """Sets the state that `state` returned, if it has changed since then."""

    def seed(self, number: int) -> None:
        """Sets the state that belongs to a number of 63 bits."""


class PythonGenerator:
    """The generator of the module `random`, a Mersenne twister.

    Python needs 12 us to read or to write its state. So this class reads and writes the memory of
    the twister.
    """

    _BYTES = 4 * 625  # the position in 624 numbers, and the numbers

    def __init__(self) -> None:
        self._twister = random.seed.__self__  # type: ignore[attr-defined]
        self._memory = np.zeros(0, np.uint8)
        self._has_memory = sys.implementation.name == "cpython" and self._is_state_in_memory()

    def _is_state_in_memory(self) -> bool:
        """Returns whether the twister's memory is as in the versions of Python known today."""
        if type(self._twister).__basicsize__ < object.__basicsize__ + self._BYTES:
            return False
        address = id(self._twister) + object.__basicsize__
        self._memory = native.memory(address, self._BYTES)
        position, *numbers = self._memory.view(np.uint32).tolist()
        return (*numbers, position) == random.getstate()[1]

    def mark(self) -> Any:
        if not self._has_memory:
            return random.getstate()
        return self._memory.tobytes(), self._twister.gauss_next

    def state(self) -> Any:
        return self.mark()

    def restore(self, state: Any) -> None:
        if self.mark() == state:
            return
        if not self._has_memory:
            random.setstate(state)
            return
        memory, self._twister.gauss_next = state
        self._memory[:] = np.frombuffer(memory, np.uint8)

    def seed(self, number: int) -> None:
        random.seed(number)


class NumpyGenerator:
    """The generator behind `numpy.random.rand` and its siblings.

    It is a Mersenne twister, unless a program has set another one. NumPy needs 100 us to read or to
    write its state. So this class reads and writes the memory of the twister.

    NumPy draws normal numbers in pairs and holds the second one back. So a mark is the memory of
    the twister, and 16 bytes for this number: 1 if there is one, and the number. The two numbers of
    a pair have the same memory of the twister.
    """

    _BYTES = 4 * 625  # 624 numbers, and the position in them

    def __init__(self) -> None:
        self._twister: Any = None
        self._memory = np.zeros(0, np.uint8)
        self._held_back: np.ndarray | None = None

    def _is_twister(self) -> bool:
        """Returns whether the generator is a Mersenne twister whose memory can be read."""
        current = np.random.get_bit_generator()
        if current is not self._twister:
            if type(current) is not np.random.MT19937:
                return False
            offset = _offset_of_held_back()
            if offset is None:
                return False
            self._twister = current
            self._memory = native.memory(current.ctypes.state_address, self._BYTES)
            owner = np.random.mtrand._rand  # type: ignore[attr-defined]
            self._held_back = native.memory(id(owner) + offset, 16)
        return True

    def mark(self) -> Any:
        if not self._is_twister():
            return repr(np.random.get_state(legacy=False))
        assert self._held_back is not None
        return self._memory.tobytes(), self._held_back.tobytes()

    def state(self) -> Any:
        return self.mark() if self._is_twister() else np.random.get_state(legacy=False)

    def restore(self, state: Any) -> None:
        if isinstance(state, dict):
            if self.mark() != repr(state):
                np.random.set_state(state)
            return
        if not self._is_twister():
            raise ConfigError(
                "[train] the generator of numpy.random was replaced while odyssey had seeded it; "
                "call numpy.random.set_bit_generator before fit()"
            )
        memory, held_back = state
        assert self._held_back is not None
        self._memory[:] = np.frombuffer(memory, np.uint8)
        self._held_back[:] = np.frombuffer(held_back, np.uint8)

    def seed(self, number: int) -> None:
        twister = np.random.get_bit_generator()
        if type(twister) is np.random.MT19937:
            np.random.seed(number & 0xFFFFFFFF)
        else:
            np.random.set_state(type(twister)(number).state)


@functools.cache
def _offset_of_held_back() -> int | None:
    """Returns where in its object a generator of NumPy holds a normal number back: 1 and the
    number, 8 bytes each. None if that isn't as in the versions of NumPy known today.
    """
    if sys.implementation.name != "cpython":
        return None
    probe = np.random.RandomState(1)
    probe.standard_normal()
    wanted = struct.pack("<qd", 1, probe.get_state()[4])
    content = native.copied(id(probe), type(probe).__basicsize__)
    offset = content.find(wanted)
    probe.standard_normal()
    empty = native.copied(id(probe) + offset, 16) if offset > 0 else b""
    return offset if empty == bytes(16) else None


class TorchGenerator:
    """The generator of torch for the CPU, whose state is set faster than it is compared."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def mark(self) -> Any:
        return self._generator.get_state().numpy().tobytes()

    def state(self) -> Any:
        return self._generator.get_state()

    def restore(self, state: Any) -> None:
        self._generator.set_state(state)

    def seed(self, number: int) -> None:
        self._generator.manual_seed(number)


_generators: dict[str, SharedGenerator] = {"python": PythonGenerator(), "numpy": NumpyGenerator()}


def generators() -> dict[str, SharedGenerator]:
    """Returns the generators that scopes seed, by name. torch's is one if torch is imported."""
    if "torch" not in _generators:
        module = getattr(sys.modules.get("torch"), "random", None)
        generator = getattr(module, "default_generator", None)
        if generator is not None:
            _generators["torch"] = TorchGenerator(generator)
    return _generators


def add(name: str, generator: SharedGenerator) -> None:
    """Has scopes seed one more generator, for example that of a GPU. A name is added once."""
    _generators.setdefault(name, generator)


#: How long a thread waits for the scope of another thread, in seconds.
PATIENCE = 60.0

# held while samples are read: ranks that are threads share the generators
_reading = threading.RLock()
_scope_ended = threading.Condition()  # notified when a scope ends
_owner = 0  # the thread, or group of threads, that is in a scope
_depth = 0  # its open scopes, one in another
_group = threading.local()  # the number of this thread's group, if it has one


def number_of(seed: int, *key: int | str) -> int:
    """Returns a number of 63 bits that depends on a seed and a key. Numbers of different keys are
    unrelated.
    """
    text = repr((seed, *key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_of(*numbers: int) -> int:
    """Returns a seed of 63 bits that depends on these numbers, of 64 bits each.

    Equal numbers give equal seeds. Seeds of different numbers are unrelated.
    """
    data = struct.pack(f"<{len(numbers)}Q", *(n & (1 << 64) - 1 for n in numbers))
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def join_group(number: int) -> None:
    """Makes this thread one of a group that runs one training run, such as ranks that are threads.

    Threads of a group wait for each other in collective calls. So they don't wait for each other's
    scopes, and share the generators.
    """
    _group.number = number


def marks() -> list[Any]:
    """Returns the marks of all generators. They are equal if nobody has drawn in between."""
    return [generator.mark() for generator in generators().values()]


def seed_all(number: int) -> None:
    """Seeds all generators of the process."""
    with hold_generators(), _reading:
        for generator in generators().values():
            generator.seed(number)


def states() -> list[Any]:
    """Returns the states of all generators, for `restore`."""
    return [(generator, generator.state()) for generator in generators().values()]


def restore(saved_states: list[Any]) -> None:
    """Sets all generators to the states that `states` returned."""
    with _reading:
        for generator, state in saved_states:
            generator.restore(state)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Sets all generators, after the block, to the states that they had before it."""
    with hold_generators():
        saved_states = states()
        try:
            yield
        finally:
            restore(saved_states)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Does the same as `restored`, for samples. Of ranks that are threads one reads at a time."""
    with hold_generators(), _reading, restored():
        yield


@contextlib.contextmanager
def scope(seed: int, *key: int | str) -> Iterator[None]:
    """Seeds all generators by a key, and restores their states after the block.

    For example, `with scope(3, "optimizer", 17)` is for the optimizer in step 17 of a training run
    with seed 3.

    Raises:
        ConfigError: Another thread is in a scope.
    """
    with restored():
        seed_all(number_of(seed, *key))
        yield


def hold_generators(patience: float = PATIENCE) -> contextlib.AbstractContextManager[None]:
    """Keeps other threads out of scopes during the block, because all threads draw from the same
    generators.

    A thread waits for at most `patience` seconds until the other one has left its scope.

    Raises:
        ConfigError: The other thread is still in its scope.
    """
    return _Hold(patience)


class _Hold:
    """A block in which only one thread, or group of threads, is; see `hold_generators`."""

    __slots__ = ("_patience",)

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def __enter__(self) -> None:
        global _depth, _owner
        thread = getattr(_group, "number", None) or threading.get_ident()
        with _scope_ended:
            if _depth and _owner != thread:
                _wait_for(thread, self._patience)
            _owner = thread
            _depth += 1

    def __exit__(self, *problem: object) -> None:
        global _depth
        with _scope_ended:
            _depth -= 1
            if not _depth:
                _scope_ended.notify_all()


def _wait_for(thread: int, patience: float) -> None:
    """Waits until no other thread is in a scope. The caller holds `_scope_ended`."""
    if not _scope_ended.wait_for(lambda: not _depth or _owner == thread, patience):
        raise ConfigError(
            "[train] another thread of this process trains at the same time, and both draw from "
            "the same generators of random, numpy and torch; run one training after the other, or "
            "each in a process"
        )
