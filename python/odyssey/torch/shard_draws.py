"""Random numbers that shards draw from the generators of the process.

Each shard is seeded by the training's seed, the step and the shard, so its draws don't depend on
which rank runs it. Seeding torch's generator takes a microsecond, so it is done for every shard.
Seeding those of Python and NumPy takes 15 us, and few modules draw from them. So a trainer seeds
them in the first step, and afterwards only if a shard has drawn from them. If a shard first draws
from them in a later step, the trainer repeats that step with seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..core import random_scopes
from .device import Device

generator = torch.random.default_generator
#: The generators that are seeded only if shards draw from them, in the order of their flags.
SELDOM_USED = ("python", "numpy")


def seldom_used_marks() -> list[Any]:
    """Returns the marks of the generators of `SELDOM_USED`, to find out if they were used."""
    return [random_scopes.generators()[name].mark() for name in SELDOM_USED]


def runs_own_code(part: Any) -> bool:
    """Returns whether an optimizer or scheduler calls functions that the user has written."""
    if type(part).__module__.partition(".")[0] != "torch":
        return True
    names = (
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "lr_lambdas",
        "_scale_fn_ref",
    )
    if any(getattr(part, name, None) for name in names):
        return True
    return any(runs_own_code(one) for one in getattr(part, "_schedulers", ()))


class ShardDraws:
    """Seeds the generators of the process for each shard, and notes which of them it draws from.

    Args:
        device: the device of the module, whose generator is seeded as torch's of the CPU is.
        in_threads: True if ranks are threads, which share the generators. Then only those of torch
            are seeded.
        repeats: True if the caller can repeat a step. If False, all generators are seeded for each
            shard.
    """

    def __init__(self, device: Device, in_threads: bool, repeats: bool) -> None:
        self.in_threads = in_threads
        self.repeats = repeats
        names = () if in_threads else SELDOM_USED
        all_generators = random_scopes.generators()
        self._seldom_used = {name: all_generators[name] for name in names}
        torch_names = ("torch",) if device.is_host else ("torch", device.name)
        self._of_torch = {name: all_generators[name] for name in torch_names}
        self._seeded = set(names)
        self._is_first_step = True
        self._marks: dict[str, Any] = {}  # of the generators, before the shard drew from them

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Restores, after the block, the states that all generators had before it.

        Raises ConfigError: another thread trains at the same time. It would not help to wait for
        it, because a program may draw in a thread at any time, for example to create a module.
        """
        watched_generators = [*self._of_torch.values(), *self._seldom_used.values()]
        with self._alone():
            states = [(one, one.state()) for one in watched_generators]
            outer_marks = self._marks
            self._marks = {name: one.mark() for name, one in self._seldom_used.items()}
            try:
                yield
            finally:
                self._marks = outer_marks
                random_scopes.restore(states)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no other thread trains."""
        if self.in_threads:
            return contextlib.nullcontext()
        return random_scopes.hold_generators(patience=0.0)

    def seed(self, number: int, everything: bool = False) -> None:
        """Seeds the generators for a shard, or for a computation that is the same on all ranks.

        everything: True if all generators are seeded, also those that no shard has drawn from.
        """
        for one in self._of_torch.values():
            one.seed(number)
        for name, one in self._seldom_used.items():
            if everything or name in self._seeded:
                one.seed(number)
                self._marks[name] = one.mark()

    @contextlib.contextmanager
    def scope(self, number: int, everything: bool) -> Iterator[None]:
        """Seeds the generators in the block, for code between the shards of two steps.

        It does nothing if ranks are threads. everything: as for `seed`.
        """
        if self.in_threads:
            yield
            return
        with self.watched():
            self.seed(number, everything)
            yield

    def flags(self) -> list[float]:
        """Returns 1 for each generator of `SELDOM_USED` that the shard has drawn from, else 0."""
        flags = [0.0] * len(SELDOM_USED)
        for place, name in enumerate(SELDOM_USED):
            if name in self._seldom_used:
                flags[place] = float(self._seldom_used[name].mark() != self._marks[name])
        return flags

    def learn(self, drawn: Sequence[bool]) -> bool:
        """Notes which generators the shards of a step have drawn from, on any rank.

        Returns True if one of them was not seeded. Then the step must be repeated.
        """
        names = {name for name, is_drawn in zip(SELDOM_USED, drawn, strict=True) if is_drawn}
        if self.in_threads or not self.repeats:
            return False
        must_repeat = not names <= self._seeded
        self._seeded = names if self._is_first_step else self._seeded | names
        self._is_first_step = False
        return must_repeat
