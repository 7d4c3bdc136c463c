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
from .header import ElementRun, encode_name

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
    """A part of a tensor that is to be saved.

    stem, name: the file and the tensor.
    whole: the shape of the tensor.
    run: the elements of the tensor that the part holds.
    source, shift: a flat array with these elements; element i of the tensor is source[i + shift].
    """

    stem: str
    name: str
    whole: tuple[int, ...]
    run: ElementRun
    source: np.ndarray
    shift: int

    @classmethod
    def of(cls, stem: str, name: str, array: np.ndarray) -> TensorSlice:
        """Returns all of a tensor as one part."""
        run = ElementRun(start=0, length=array.size, step=array.size, count=1)
        return cls(stem, name, array.shape, run, array.reshape(-1), shift=0)

    @property
    def file_name(self) -> str:
        """The name of the tensor in a file of whole tensors."""
        return encode_name(self.name)

    @property
    def key(self) -> str:
        """The name of the part in a file of parts."""
        return f"{self.stem}/{self.file_name}/{self.run.start}"

    def parts(self, limit: int) -> Iterator[np.ndarray]:
        """Yields the elements in C order, at most `limit` at a time.

        One stretch of memory is yielded as a view, several as a copy.
        """
        for start in range(0, self.run.size, limit):
            stop = min(start + limit, self.run.size)
            rows = []
            for _, element, count in self.run.spans(start, stop):
                source_start = element + self.shift
                rows.append(self.source[source_start : source_start + count])
            yield rows[0] if len(rows) == 1 else np.concatenate(rows)


def step_name(step: int) -> str:
    """Returns the name of the directory of a step, for example `step_00000120`."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a directory's name; None for a name that `step_name` does not return."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def is_file_name(name: str) -> bool:
    """Returns True if a file of a checkpoint may have this name."""
    return name.endswith(SUFFIX) and _STEM.fullmatch(name[: -len(SUFFIX)]) is not None


def check_step(step: Any) -> None:
    """Raises OutputError if a checkpoint cannot have this step."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise OutputError(
            f"[checkpoint] the step of a checkpoint is a whole number below 10^18, not {step!r}"
        )


def plain_values(step: int, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the values as they will be read back: to JSON and back.

    Raises:
        OutputError: the values are not JSON.
    """
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as problem:
        raise OutputError(
            f"[checkpoint] {step_name(step)} cannot be saved: values are not JSON: {problem}"
        ) from None


def check_finite(step: int, stem: str, name: str, array: np.ndarray) -> None:
    """Raises NumericsError for NaN or infinities in the files of FINITE.

    The array is in C order. The largest and the smallest number are enough: both are NaN if one
    element is. So no array of booleans is needed, as `np.isfinite` would allocate.
    """
    if stem not in FINITE or array.dtype.kind != "f" or array.size == 0:
        return
    flat = array.reshape(-1)
    if not (math.isfinite(np.maximum.reduce(flat)) and math.isfinite(np.minimum.reduce(flat))):
        raise NumericsError(
            f"[checkpoint] {step_name(step)} is not saved: {stem}/{ascii(name)[1:-1]} holds NaN or "
            "infinity; the checkpoint before it is as it was"
        )
