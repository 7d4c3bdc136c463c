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
import hashlib
import random
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
        """Sets the state that `state` returned."""

    def seed(self, number: int) -> None:
        """Sets the state that belongs to a number of 63 bits."""


class PythonGenerator:
    """The generator of the module `random`, a Mersenne twister.

    Python needs 12 us to read its state. So this class reads the memory of the twister, and asks
    Python only if that memory has changed.
    """

    _BYTES = 4 * 625  # the position in 624 numbers, and the numbers

    def __init__(self) -> None:
        self._twister = random.seed.__self__  # type: ignore[attr-defined]
        self._address = id(self._twister) + object.__basicsize__
        self._has_memory = sys.implementation.name == "cpython" and self._is_state_in_memory()
        self._latest: tuple[Any, Any] = (None, None)

    def _is_state_in_memory(self) -> bool:
        """Returns whether the twister's memory is as in the versions of Python known today."""
        if type(self._twister).__basicsize__ < object.__basicsize__ + self._BYTES:
            return False
        position, *numbers = np.frombuffer(
            native.copied(self._address, self._BYTES), np.uint32
        ).tolist()
        return (*numbers, position) == random.getstate()[1]

    def mark(self) -> Any:
        if not self._has_memory:
            return random.getstate()
        return native.copied(self._address, self._BYTES), self._twister.gauss_next

    def state(self) -> Any:
        mark = self.mark()
        if self._latest[0] != mark:
            self._latest = mark, random.getstate()
        return self._latest

    def restore(self, state: Any) -> None:
        random.setstate(state[1])

    def seed(self, number: int) -> None:
        random.seed(number)


class NumpyGenerator:
    """The generator behind `numpy.random.rand` and its siblings.

    It is a Mersenne twister, unless a program has set another one. NumPy needs 100 us to read or to
    write its state. So this class reads the memory of the twister, and asks NumPy only if that
    memory has changed.
    """

    _BYTES = 4 * 625  # 624 numbers, and the position in them

    def __init__(self) -> None:
        # the mark and the state when NumPy was asked last
        self._latest: tuple[Any, Any] = (None, None)

    def mark(self) -> Any:
        """Returns the memory of the twister, 1 if a normal number is held back, and that number.

        NumPy draws normal numbers in pairs, so a draw may leave the memory as it is.
        """
        return self.state()[0]

    def state(self) -> Any:
        twister = np.random.get_bit_generator()
        if type(twister) is not np.random.MT19937:
            value = np.random.get_state(legacy=False)
            return (repr(value), 1, 0.0), value
        memory = native.copied(twister.ctypes.state_address, self._BYTES)
        if self._latest[0] != (memory, 0, 0.0):
            value = np.random.get_state()
            self._latest = (memory, *value[3:]), value
        return self._latest

    def restore(self, state: Any) -> None:
        (memory, is_held_back, _), value = state
        twister = np.random.get_bit_generator()
        if is_held_back or type(twister) is not np.random.MT19937:
            np.random.set_state(value)
            return
        np.random.seed(0)  # drops a normal number that is held back now
        address = twister.ctypes.state_address
        native.memory(address, self._BYTES)[:] = np.frombuffer(memory, np.uint8)

    def seed(self, number: int) -> None:
        twister = np.random.get_bit_generator()
        if type(twister) is np.random.MT19937:
            np.random.seed(number & 0xFFFFFFFF)
        else:
            np.random.set_state(type(twister)(number).state)


class TorchGenerator:
    """The generator of torch for the CPU."""

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


#: How long a thread waits for the scope of another thread, in seconds.
PATIENCE = 60.0

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
    with hold_generators():
        for generator in generators().values():
            generator.seed(number)


def states() -> list[Any]:
    """Returns the states of all generators, for `restore`."""
    return [(one, one.mark(), one.state()) for one in generators().values()]


def restore(saved_states: list[Any]) -> None:
    """Sets all generators to the states that `states` returned."""
    for generator, mark, state in saved_states:
        # Python and NumPy need longer to set a state than to compare it.
        if generator.mark() != mark:
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


@contextlib.contextmanager
def hold_generators(patience: float = PATIENCE) -> Iterator[None]:
    """Keeps other threads out of scopes during the block, because all threads draw from the same
    generators.

    A thread waits for at most `patience` seconds until the other one has left its scope.

    Raises:
        ConfigError: The other thread is still in its scope.
    """
    _enter(patience)
    try:
        yield
    finally:
        _leave()


def _enter(patience: float) -> None:
    global _depth, _owner
    thread = getattr(_group, "number", threading.get_ident())
    with _scope_ended:
        if not _scope_ended.wait_for(lambda: not _depth or _owner == thread, patience):
            raise ConfigError(
                "[train] another thread of this process trains at the same time, and both draw "
                "from the same generators of random, numpy and torch; run one training after the "
                "other, or each in a process"
            )
        _owner = thread
        _depth += 1


def _leave() -> None:
    global _depth
    with _scope_ended:
        _depth -= 1
        _scope_ended.notify_all()
