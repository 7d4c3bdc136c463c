"""Arithmetic: all ranks must compute the same bits, and a resumed run those of its checkpoint.

Processors, libraries and environment variables decide which instructions compute a product or an
exponential, and so its last bits. Two things are compared:

    samples       operations with fixed inputs, as hashes      when a trainer is created, on resume
    first shard   the gradients of the batch's first shard,    before the first update of each fit()
                  which every rank computes, as a hash

A difference raises an error that names the ranks, the operations and the likely cause. If the user
allows other arithmetic, training continues, and the journal and checkpoints hold a note.
"""  # noqa: E501 - a table

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..base.variables import OTHER_ARITHMETIC, deciding
from ..comm import Communicator
from ..core import fingerprint
from ..errors import ConfigError, printable
from . import agreement

ARITHMETIC = "arithmetic"  # the key in the values of a checkpoint
FIRST_SHARD = "gradients of the first shard"
_DESCRIPTION_BYTES = 16 << 10  # by which a rank describes itself after a difference
NOT_REPEATABLE = (
    "forward() or the loss has other results when it computes the same samples again, for example "
    "because it draws from a generator without a seed (np.random.default_rng(), os.urandom); draw "
    "from torch, numpy.random or random, which odyssey seeds (docs/state.md, what is random)"
)
_MAX_CAUSES = 4
_CPU_INFO = Path("/proc/cpuinfo")


def repeats_itself(compute: Callable[[], Any], first: Any) -> bool:
    """Returns whether a computation has the same result again.

    first: the result of the first time. It may differ from all others, because the first call of a
    module may build parts of it.
    """
    second = compute()
    return second == first or compute() == second


class Arithmetic:
    """Compares what ranks, and a checkpoint, compute from the same numbers.

    Args:
        comm: all ranks.
        sample: returns the hash of each kind of operation, by its name. It is called once, when a
            hash is needed.
        libraries: the versions of what computes, by name.
        allowed: True reports differences instead of raising them.
        say: reports a line to the user.

    Attributes:
        notes: the differences that were allowed. Each is {"step": S, "text": T}.
    """

    def __init__(
        self,
        comm: Communicator,
        sample: Callable[[], dict[str, str]],
        libraries: Mapping[str, str],
        *,
        allowed: bool,
        say: Callable[[str], None],
    ) -> None:
        self.comm = comm
        self.libraries = dict(libraries)
        self.allowed = allowed or os.environ.get(OTHER_ARITHMETIC, "") not in ("", "0")
        self.say = say
        self.notes: list[dict[str, Any]] = []
        self._sample = sample

    @functools.cached_property
    def samples(self) -> dict[str, str]:
        """The hash of each kind of operation, by its name."""
        return self._sample()

    def compare(
        self, settings: Mapping[str, Any], machine: Mapping[str, Any] | None = None
    ) -> None:
        """Compares settings, and what this process computes, with the other ranks; a collective
        call.

        Args:
            settings: must be the same on all ranks.
            machine: settings of libraries, which must be the same unless other arithmetic is
                allowed.

        Raises ConfigError, on all ranks: ranks differ.
        """
        if self.comm.size == 1:
            return
        settings = {**settings, "permission to use other arithmetic": self.allowed}
        machine = {**(machine or {}), **self.samples}
        others = agreement.differences(self.comm, {**settings, **machine})
        for name, other in others.items():
            if name in settings:
                message = agreement.told(self.comm, name, other)
                raise ConfigError(f"[train] {message}").on_all_ranks()
        self._handle(others, step=0)

    def compare_first_shard(
        self, gradients: int | None, step: int, compute: Callable[[], int | None]
    ) -> None:
        """Compares the fingerprint of the gradients of a batch's first shard; a collective call.

        Args:
            gradients: None if this rank could not compute them. A rank that can't is not compared,
                because the step reports its error.
            step: the number of the step.
            compute: computes the fingerprint again. If a rank's own results differ, its processor
                and libraries are not the cause. It may be a collective call.

        Raises ConfigError, on all ranks: they differ.
        """
        row = [gradients is not None, fingerprint.signed(gradients or 0)]
        everyone = self.comm.all_gather(np.array(row, np.int64))
        computed = np.flatnonzero(everyone[:, 0])
        if computed.size < 2:
            return
        first = int(computed[0])
        others = computed[everyone[computed, 1] != everyone[first, 1]]
        if others.size:
            self._check_repeats(gradients, compute)
            self._handle({FIRST_SHARD: int(others[0])}, step, first)

    def _check_repeats(self, gradients: int | None, compute: Callable[[], int | None]) -> None:
        """Raises ConfigError, on all ranks: a rank has other results when it computes a shard
        again; a collective call.
        """
        # All ranks compute equally often, because computing may be a collective call.
        second, third = compute(), compute()
        repeats = gradients is None or second in (gradients, third)
        everyone = self.comm.all_gather(np.array([repeats], np.int32))[:, 0]
        if not everyone.all():
            rank = self.comm.ranks[int(np.argmin(everyone))]
            raise ConfigError(f"[train] on rank {rank} {NOT_REPEATABLE}").on_all_ranks()

    def _handle(self, others: Mapping[str, int], step: int, first: int = 0) -> None:
        """Raises or notes that ranks differ in some operations; a collective call if they do.

        others: by operation, the first rank that differs from rank `first`.
        """
        if not others:
            return
        rank = min(others.values())
        names = [name for name, other in others.items() if other == rank]
        described = agreement.texts(
            self.comm, json.dumps(self._describe_process()), _DESCRIPTION_BYTES
        )
        pair = [_parse_description(described[r]) for r in (rank, first)]
        numbers = self.comm.ranks[rank], self.comm.ranks[first]
        causes = _find_causes(*pair, *(f"on rank {number}" for number in numbers))
        text = (
            f"rank {numbers[0]} and rank {numbers[1]} compute different results from the same "
            f"numbers ({', '.join(names)}); {causes}"
        )
        if not self.allowed:
            raise ConfigError(
                f"[train] {text}. Use the same variables, libraries and kind of processor for all "
                "ranks, or other_arithmetic=True (--other-arithmetic) if results may depend on "
                "which rank has which shard"
            ).on_all_ranks()
        self.note(text, step)

    def note(self, text: str, step: int) -> None:
        """Reports a difference that is allowed, and notes it for the journal and checkpoints."""
        if any(note["text"] == text for note in self.notes):
            return
        self.notes.append({"step": step, "text": text})
        self.say(f"[train] {text}. Training continues, because other arithmetic is allowed")

    # --- checkpoints ---

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint and the journal hold of it, as JSON values."""
        return {"samples": self.samples, **self._describe_process(), "notes": self.notes}

    def check_saved(
        self, saved: Any, name: str, step: int, libraries: Mapping[str, tuple[Any, Any]] = {}
    ) -> None:
        """Compares the operations of this process with those of a checkpoint.

        Args:
            saved: what `state` returned. Checkpoints before 0.3 have nothing, which is accepted.
            name: of the checkpoint, for messages.
            step: of the checkpoint.
            libraries: properties of libraries that differ, as (now, in the checkpoint) by name.

        Raises ConfigError: they differ, and other arithmetic isn't allowed.
        """
        saved = saved if isinstance(saved, dict) else {}
        for note in saved.get("notes") or []:
            if note not in self.notes:
                self.notes.append(note)
        names = [f"{key} {now} instead of {before}" for key, (now, before) in libraries.items()]
        if isinstance(saved_samples := saved.get("samples"), dict):
            names += [n for n, own in self.samples.items() if saved_samples.get(n, own) != own]
        if not names:
            return
        causes = "the checkpoint doesn't say on what it was computed"
        if saved:
            causes = _find_causes(self._describe_process(), saved, "now", f"in {name}")
        text = (
            f"this process computes different results from the same numbers than the one that "
            f"wrote {name} ({', '.join(names)}); {causes}"
        )
        if not self.allowed:
            raise ConfigError(
                f"[resume] {text}. Resume with the same variables, libraries and kind of "
                "processor, or with other_arithmetic=True (--other-arithmetic) if results may "
                "differ from a run that never stopped"
            )
        self.note(text, step)

    def _describe_process(self) -> dict[str, Any]:
        """Returns what may be the cause of a difference: variables, processor and libraries."""
        return {
            "variables": deciding(os.environ),
            "processor": _read_processor(),
            "libraries": self.libraries,
        }


@functools.cache
def _read_processor() -> str:
    """Returns the name of the processor, and a hash of its instruction sets."""
    lines: dict[str, str] = {}
    try:
        for line in _CPU_INFO.read_text(errors="replace").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            lines[name.strip()] = value.strip()
    except OSError:  # as on macOS
        return platform.processor() or platform.machine()
    model = lines.get("model name") or lines.get("CPU part") or platform.machine()
    flags = lines.get("flags") or lines.get("Features") or ""
    return f"{model}, instruction sets {fingerprint.hash_of(flags.split()) & 0xFFFFFFFF:08x}"


def _parse_description(text: str) -> dict[str, Any]:
    """Returns the description of a rank; empty if it was cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _find_causes(
    here: Mapping[str, Any], there: Mapping[str, Any], here_place: str, there_place: str
) -> str:
    """Returns in words how two processes differ, besides their results.

    here_place, there_place: where the two are, for example "on rank 1" and "on rank 0".
    """
    values: list[tuple[str, Any, Any]] = []
    for kind in ("variables", "libraries"):
        own = here.get(kind) or {}
        other = there.get(kind) or {}
        values += [(name, own.get(name), other.get(name)) for name in sorted({**own, **other})]
    values.append(("the processor", here.get("processor"), there.get("processor")))
    causes = [
        f"{name} is {_show_value(own)} {here_place} and {_show_value(other)} {there_place}"
        for name, own, other in values
        if own != other
    ]
    if not causes:
        return "they have the same variables, libraries and processor"
    surplus = len(causes) - _MAX_CAUSES
    more = f", and {surplus} more" if surplus > 0 else ""
    return f"likely cause: {', '.join(causes[:_MAX_CAUSES])}{more}"


def _show_value(value: Any) -> str:
    return "not set" if value is None else printable(str(value), limit=80)
