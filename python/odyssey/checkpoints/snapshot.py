"""Snapshot: contents of one checkpoint in memory, and the names that it may use.

Nothing here touches a disk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import NumericsError, OutputError
from .header import ElementRun

FINITE = ("parameters", "optimizer")  # files in which a NaN or an infinity is never saved
SUFFIX = ".safetensors"
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_STEP = re.compile(r"step_([0-9]{8,18})")


@dataclass
class Snapshot:
    """The state of a training after `step` steps.

    `arrays` are files and their tensors: `{"parameters": {"conv1.weight": array}, "optimizer":
    {...}}`; any shape of at most 8 dimensions, little-endian floats of 16 to 64 bits, integers of 8
    to 64 and bool. `values` is everything else, as JSON has it: cursor, seed, configuration,
    schedule, scaler, history; no NaN, and keys are strings.
    """

    step: int
    arrays: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    make: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty  # of copies of arrays
    # of a rank: its parts of tensors, beside `arrays`
    pieces: list[TensorSlice] = field(default_factory=list)
    # of tensors that are read when asked for: directory, SHA-256 of its manifest
    source: tuple[str, str] | None = None


class TensorSlice(NamedTuple):
    """A part of a tensor: `run` of `stem`/`name` of shape `whole`, whose element i is i +
    `shift` of `source` (n,).
    """

    stem: str
    name: str
    whole: tuple[int, ...]
    run: ElementRun
    source: np.ndarray
    shift: int

    @classmethod
    def of(cls, stem: str, name: str, array: np.ndarray) -> TensorSlice:
        """A whole tensor."""
        return cls(
            stem, name, array.shape, ElementRun(0, array.size, array.size, 1), array.reshape(-1), 0
        )

    @property
    def key(self) -> str:
        """Its name in a file of parts."""
        return f"{self.stem}/{self.name}/{self.run.start}"

    def parts(self, most: int) -> Iterator[np.ndarray]:
        """Its elements, at most so many at a time, in C order."""
        for a in range(0, self.run.size, most):
            cut = [
                (i + self.shift, n) for _, i, n in self.run.spans(a, min(a + most, self.run.size))
            ]
            rows = [self.source[i : i + n] for i, n in cut]
            yield rows[0] if len(rows) == 1 else np.concatenate(rows)


def step_name(step: int) -> str:
    """The directory of a step: 120 is `step_00000120`."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step a directory's name says; None for any other name. Each step has one name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def is_file_name(name: str) -> bool:
    """Returns whether a file of a checkpoint can be called so."""
    return name.endswith(SUFFIX) and _STEM.fullmatch(name[: -len(SUFFIX)]) is not None


def check_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise OutputError(
            f"[checkpoint] the step of a checkpoint is a whole number below 10^18, not {step!r}"
        )


def plain_values(step: int, values: dict[str, Any]) -> dict[str, Any]:
    """A copy of the values as they will be read back: through JSON and back."""
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as problem:
        raise OutputError(
            f"[checkpoint] {step_name(step)} cannot be saved: values are not JSON: {problem}"
        ) from None


def check_finite(step: int, stem: str, name: str, array: np.ndarray) -> None:
    """Refuses NaN and infinities in the files of FINITE; the array is in C order.

    The largest and the smallest number say it, without an array of answers; both are NaN if one is.
    """
    if stem not in FINITE or array.dtype.kind != "f" or array.size == 0:
        return
    flat = array.reshape(-1)
    if not (math.isfinite(np.maximum.reduce(flat)) and math.isfinite(np.minimum.reduce(flat))):
        raise NumericsError(
            f"[checkpoint] {step_name(step)} is not saved: {stem}/{ascii(name)[1:-1]} holds NaN "
            "or infinity; "
            "the checkpoint before it is as it was"
        )
