"""The position of a loader that has `state_dict()` and `load_state_dict()`.

torchdata's StatefulDataLoader and the loaders of MosaicML's streaming have these two methods. Such
a loader continues where it was, and does not start again whenever it is iterated.

A checkpoint holds the state of the loader before the last step. A resumed run loads this state,
reads the batches of that step again, and compares them with those that were used. Then it
continues with the same iterator. So a loader that does not continue right is reported, and no
loader needs a state for the time after its last batch.

Loaders may read with random numbers of the process (torch, NumPy, Python), or of generators that
they hold. A checkpoint holds those that the loader has used, before the last step and now.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..capture import values
from ..errors import CheckpointError, ConfigError
from . import agreement, resume

if TYPE_CHECKING:
    from ..checkpoints import Snapshot
    from ..comm import Communicator
    from ..data import Batch

FILE = "loader"  # the file of a checkpoint with the arrays, and the name of the values
_METHODS = ("state_dict", "load_state_dict")


def is_stateful(loader: Any) -> bool:
    """Returns whether a loader has a state that a checkpoint keeps.

    It is False for odyssey's own loaders, which are told where to start.
    """
    if hasattr(loader, "start_at"):
        return False
    return all(callable(getattr(loader, name, None)) for name in _METHODS)


class ProcessGenerator(NamedTuple):
    """A random number generator that a whole process shares.

    Attributes:
        read: returns its state, as `capture.values` encodes it.
        write: sets the state that `read` returned.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_python() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, np.array(numbers, np.int64), gauss]


def _write_python(state: list[Any]) -> None:
    version, numbers, gauss = state
    random.setstate((version, tuple(np.asarray(numbers).tolist()), gauss))


PROCESS_GENERATORS = {
    "python": ProcessGenerator(_read_python, _write_python),
    "numpy": ProcessGenerator(lambda: np.random.get_state(legacy=False), np.random.set_state),
}


class Source(Protocol):
    """What a LoaderState asks its feed for."""

    process_generators: dict[str, ProcessGenerator]

    def order_states(self) -> dict[str, np.ndarray]:
        """Returns the states of the generators that the loader holds, by their places."""

    def put_order_states(self, states: dict[str, np.ndarray]) -> None:
        """Sets the states that `order_states` returned."""


@dataclasses.dataclass
class Position:
    """Where a loader is before a batch is read.

    Attributes:
        state: what its state_dict() returned.
        orders: states of the generators that the loader holds, by their places.
        generators: states of the generators of the process, by their names.
    """

    state: Any
    orders: dict[str, np.ndarray]
    generators: dict[str, Any]


class LoaderState:
    """Keeps, and restores, the position of a loader during a fit().

    Args:
        loader: has `state_dict()` and `load_state_dict()`.
        source: the feed that reads it.

    Attributes:
        active: positions are kept. A fit() without checkpoints needs none.
        restored: the loader was set to the position of a checkpoint.
    """

    def __init__(self, loader: Any, source: Source) -> None:
        self.loader = loader
        self.source = source
        self.active = False
        self.restored = False
        self._is_checked = False  # the state is one that a checkpoint can hold
        self._next: Position | None = None  # before the batch that is read next
        self._read: deque[tuple[Batch, Position]] = deque()  # batches that are not used yet
        self._used: Position | None = None  # before the batch that was used last
        self._drawn: set[str] = set()  # generators of the process that the loader has drawn from
        # starts the iterator from a loaded state, once
        self._load: Callable[[], Iterator[Any]] | None = None
        # the epoch that a resumed run is in, and its steps that are left
        self._left: tuple[int, Iterator[Batch]] | None = None
        # states of generators at the time of the checkpoint, until the next batch is read
        self._generators_then: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        """The name of the loader's class."""
        return type(self.loader).__name__

    # --- while batches are read ---

    def start(self, begin: Callable[[], None]) -> Iterator[Any]:
        """Starts an iterator over the loader.

        Args:
            begin: prepares an epoch: it seeds, and sets the number of the epoch.

        Raises ConfigError: checkpoints can't hold the state. CheckpointError: the loader does not
        accept the state of a checkpoint.
        """
        self._put_generators_back()
        begin()
        load = self._load
        self._load = None
        if load is not None:
            return load()
        # before the iterator is created, because some loaders create it in state_dict()
        self._next = self._position()
        return iter(self.loader)

    def tracked(self, steps: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches of steps, and keeps the position before each of them."""
        iterator = iter(steps)
        self._read.clear()
        batch = next(iterator, None)
        while batch is not None:
            if self.active and self._next is not None:
                self._note_draws(self._next)
                self._read.append((batch, self._next))
            yield batch
            if self.active:
                self._next = self._position()
            batch = next(iterator, None)

    def used(self, batch: Batch) -> None:
        """Notes that a step has used a batch, or skipped it."""
        while self._read:
            candidate, position = self._read.popleft()
            if candidate is batch:
                self._used = position
                return

    def _position(self) -> Position | None:
        """Returns the position of the loader now; None if it has no state.

        Raises ConfigError: checkpoints can't hold the state.
        """
        if not self.active:
            return None
        state = self.loader.state_dict()
        if state is None:
            self.active = False
            return None
        if not self._is_checked:
            self._encode(state, {}, "state")
            self._is_checked = True
        return Position(copy.deepcopy(state), self.source.order_states(), self._generators())

    def _generators(self) -> dict[str, Any]:
        return {name: one.read() for name, one in self.source.process_generators.items()}

    def _note_draws(self, before: Position) -> None:
        """Notes which generators of the process have moved while a batch was read."""
        for name, one in self.source.process_generators.items():
            if name in self._drawn or name not in before.generators:
                continue
            if not _is_equal(one.read(), before.generators[name]):
                self._drawn.add(name)

    def _put_generators_back(self) -> None:
        for name, state in self._generators_then.items():
            if name in self.source.process_generators:
                self.source.process_generators[name].write(state)
        self._generators_then = {}

    def _encode(self, value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
        """Returns a value as JSON. Raises ConfigError: checkpoints can't hold it."""
        try:
            return values.encode(value, arrays, path)
        except (TypeError, ValueError, RecursionError) as problem:
            raise ConfigError(
                f"[checkpoint] state_dict() of the {self.kind} returned a value that checkpoints "
                f"can't hold: {problem}; return numbers, strings, arrays, tensors, bytes, and "
                "lists and dicts of them"
            ) from problem

    # --- checkpoints ---

    def save(self, snapshot: Snapshot) -> None:
        """Puts the position before the last step into a snapshot. It does nothing before a step.

        Raises ConfigError: checkpoints can't hold the state.
        """
        position = self._used
        if not self.active or position is None:
            return
        # a batch may have been read ahead
        now = self._read[0][1].generators if self._read else self._generators()
        arrays: dict[str, np.ndarray] = {}
        snapshot.values[FILE] = {
            "class": self.kind,
            "state": self._encode(position.state, arrays, "state"),
            "orders": self._encode(position.orders, arrays, "orders"),
            "generators": self._encode(self._only_drawn(position.generators), arrays, "before"),
            "generators now": self._encode(self._only_drawn(now), arrays, "now"),
        }
        if arrays:
            snapshot.arrays[FILE] = arrays

    def _only_drawn(self, states: dict[str, Any]) -> dict[str, Any]:
        return {name: state for name, state in states.items() if name in self._drawn}

    def restore(
        self,
        snapshot: Snapshot,
        name: str,
        steps_of_epoch: Callable[[int], Iterable[Batch]],
        comm: Communicator,
        in_epoch: bool,
    ) -> tuple[int, int, Batch | None, np.ndarray] | None:
        """Sets the loader to the position of a checkpoint, and reads the batch of the last step.

        A collective call.

        Args:
            snapshot, name: the checkpoint, and its name for messages.
            steps_of_epoch: reads the steps of an epoch.
            in_epoch: False if the checkpoint is of the end of an epoch.

        Returns:
            The epoch, the step in it, its batch, and for each rank whether the batch is the one
            that was used. None if the checkpoint has no position of a loader.

        Raises:
            CheckpointError: The loader does not accept the state, or the checkpoint is damaged.
        """
        saved = snapshot.values.get(FILE)
        last = snapshot.values.get("last batch")
        self._left = None
        self._read.clear()
        if saved is None or last is None:
            return None
        try:
            arrays = {key: np.asarray(a) for key, a in snapshot.arrays.get(FILE, {}).items()}
            position = Position(
                values.decode(saved["state"], arrays),
                values.decode(saved["orders"], arrays),
                values.decode(saved["generators"], arrays),
            )
            generators_now = values.decode(saved["generators now"], arrays)
            epoch = int(last["epoch"])
            step = int(last["step"])
            expected = int(last["fingerprint"], 16)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
            raise CheckpointError(
                f"[resume] {name} has no valid state of the loader: {problem}; use another "
                "checkpoint"
            ) from problem
        self.active = True
        self._is_checked = True
        orders_now = self.source.order_states()
        attempts = [self._load_here]
        if position.orders or position.generators:
            # a loader that skips batches of an epoch needs the generators of the epoch's start
            attempts.append(self._load_at_start)
        for attempt in attempts:
            self._load = functools.partial(attempt, position, name)
            steps = self.tracked(steps_of_epoch(epoch))
            with resume.on_all_ranks(comm):
                batch = next(steps, None)
                if batch is None and step == 0:
                    # the state of the end of an epoch: this iterator ends that epoch
                    steps = self.tracked(steps_of_epoch(epoch))
                    batch = next(steps, None)
            matches = batch is not None and agreement.of_batch(batch.whole()) == expected
            rank_matches = comm.all_gather(np.array([matches], np.int32))[:, 0]
            if rank_matches.all():
                break
        self.restored = True
        self._read.clear()
        self._used = position
        self._drawn = {*self._drawn, *position.generators}
        if in_epoch:
            self._left = epoch, steps
        else:
            next(steps, None)  # the iterator ends
            steps.close()
            self._read.clear()
        self.source.put_order_states(orders_now)
        self._generators_then = generators_now
        return epoch, step, batch, rank_matches

    def take_left(self, epoch: int) -> Iterator[Batch] | None:
        """Returns the steps that are left of the epoch that a resumed run is in, once.

        None if the epoch starts with its first step.
        """
        if self._left is None or self._left[0] != epoch:
            return None
        _, steps = self._left
        self._left = None
        return self._continued(steps)

    def _continued(self, steps: Iterator[Batch]) -> Iterator[Batch]:
        self._put_generators_back()
        yield from steps

    def _load_here(self, position: Position, name: str) -> Iterator[Any]:
        """Loads a state, with all generators as they were then."""
        self.source.put_order_states(position.orders)
        iterator = self._load_at_start(position, name)
        for generator, state in position.generators.items():
            if generator in self.source.process_generators:
                self.source.process_generators[generator].write(state)
        return iterator

    def _load_at_start(self, position: Position, name: str) -> Iterator[Any]:
        """Loads a state, with all generators as they are when an epoch starts.

        Raises CheckpointError: the loader does not accept it.
        """
        try:
            self.loader.load_state_dict(copy.deepcopy(position.state))
        except Exception as problem:
            raise CheckpointError(
                f"[resume] {name}: load_state_dict() of the {self.kind} failed: "
                f"{type(problem).__name__}: {problem}; use the loader that the checkpoint was made "
                "with, or start anew (resume='never' and another directory)"
            ) from problem
        self._next = position
        return iter(self.loader)


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two states of a generator are equal."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return one == other
