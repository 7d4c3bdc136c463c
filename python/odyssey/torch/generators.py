"""Generators that a loader's order is drawn from: their states, by where they are, kept and put
back.

A sampler with a generator of its own goes on in it from epoch to epoch. For a training that goes on
within an epoch, or begins the next one, in another process, they are set to what they were when
that epoch began: then the order is the same again. torch's global generator is not among them:
batches() of data.py seeds it anew for each epoch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

# of generators by where they are, such as "sampler.generator", as bytes
States = dict[str, np.ndarray]
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_HOLDERS = ("sampler", "batch_sampler", "data_source", "dataset")


def generators(loader: Any) -> Iterator[tuple[str, Any]]:
    """(place, generator) of a loader, its samplers and its data set, each generator once."""
    seen: set[int] = set()

    def search(owner: Any, at: str) -> Iterator[tuple[str, Any]]:
        if owner is None or id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, random.SystemRandom):
                continue  # it has no state
            if isinstance(value, KINDS) and id(value) not in seen:
                seen.add(id(value))
                yield f"{at}{name}", value
            elif name in _HOLDERS or isinstance(value, torch.utils.data.Sampler):
                yield from search(value, f"{at}{name}.")

    yield from search(loader, "")


def state_of(generator: Any) -> np.ndarray:
    """The state of a generator as bytes (n,) uint8."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().copy()
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    text = json.dumps(
        state, default=lambda array: {"array": array.tolist(), "dtype": array.dtype.name}
    )
    return np.frombuffer(text.encode(), np.uint8)


def set_state(generator: Any, state: np.ndarray) -> None:
    """Sets a generator to what state_of() gave.

    Raises ValueError, KeyError, TypeError, RuntimeError: it is of none.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(np.array(state)))
        return
    found = json.loads(state.tobytes(), object_hook=_array)
    if isinstance(generator, random.Random):
        version, numbers, rest = found
        generator.setstate((version, tuple(numbers), rest))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(found)
    else:
        generator.bit_generator.state = found


def _array(found: dict[str, Any]) -> Any:
    return np.array(found["array"], found["dtype"]) if found.keys() == {"array", "dtype"} else found


class Orders:
    """The generators of a fit()'s loaders. loader: gives the training's batches; validation:
    evaluations', or None.
    """

    def __init__(self, loader: Any = None, validation: Any = None) -> None:
        found = {
            f"{part}.{at}": g
            for part, one in (("train", loader), ("val", validation))
            for at, g in generators(one)
        }
        self._own = {at: g for at, g in found.items() if at.startswith("train.")}
        own = {id(g) for g in self._own.values()}
        self._all = {at: g for at, g in found.items() if at in self._own or id(g) not in own}
        # the latest epoch, and the states it began with
        self._begun: tuple[int, States] | None = None

    def begin(self, epoch: int) -> None:
        """An epoch of the training begins, for the first time or again."""
        if self._begun is not None and self._begun[0] == epoch:
            for at, state in self._begun[1].items():
                set_state(self._own[at], state)
        else:
            self._begun = epoch, self.now()

    def now(self) -> States:
        """Returns the states of the generators of the training's loader."""
        return {at: state_of(g) for at, g in self._own.items()}

    def put(self, states: States) -> None:
        """Sets the generators of the training's loader to what `now` returned."""
        for at, state in states.items():
            if at in self._own:
                set_state(self._own[at], state)

    def state(self) -> States:
        """Returns what a checkpoint keeps: the states now, and those that the latest epoch began
        with.
        """
        found = {f"now/{at}": state_of(g) for at, g in self._all.items()}
        if self._begun is not None and self._own:
            epoch, states = self._begun
            found["epoch"] = np.array([epoch], np.int64)
            found.update((f"begun/{at}", state) for at, state in states.items())
        return found

    def load(self, saved: States, name: str) -> None:
        """Takes back what state() gave, if it gave any.

        Raises CheckpointError: it is of other generators.
        """
        if not saved:
            return
        # those of a file are read when asked for
        saved = {key: np.asarray(state) for key, state in saved.items()}
        begun = {
            key.removeprefix("begun/"): state
            for key, state in saved.items()
            if key.startswith("begun/")
        }
        try:
            for at, generator in self._all.items():
                if f"now/{at}" in saved:
                    set_state(generator, saved[f"now/{at}"])
            self._begun = (
                (int(saved["epoch"][0]), begun)
                if begun.keys() == self._own.keys() and begun
                else None
            )
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as problem:
            raise CheckpointError(
                f"[resume] {name}: the state of {at} is not taken: {problem}"
            ) from problem
