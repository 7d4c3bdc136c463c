"""The header of a safetensors file, and which tensors a checkpoint may have.

A file is 8 bytes (length of the JSON, little-endian), the JSON, then the data of all tensors
without gaps. Format: https://github.com/huggingface/safetensors. No header is ever parsed: the
manifest names a file's tensors, and there is one header for them, which the file must begin with
(reader.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, OutputError

HEADER_LIMIT = 16 << 20  # bytes of JSON
TENSORS_LIMIT = 100_000
RANK_LIMIT = 8
NAME_LIMIT = 512
INTEGER_LIMIT = 1 << 63
LENGTH_BYTES = 8
ROWS_LIMIT = 1 << 22  # of all parts of a tensor

# name in the file -> numpy dtype, little-endian; numpy has no bfloat16: its bits come as uint16
DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"},
}
_WIDTHS = {name: np.dtype(code).itemsize for name, code in DTYPES.items()}
_NAMES = {code: name for name, code in DTYPES.items() if name != "BF16"}
_CHARACTERS = re.compile(r"[A-Za-z0-9_./-]+")


class ElementRun(NamedTuple):
    """Elements of a tensor in C order: `count` times `length` of them, from `start` on, `step`
    apart.
    """

    start: int
    length: int
    step: int
    count: int

    @property
    def size(self) -> int:
        return self.length * self.count

    @property
    def stop(self) -> int:
        return self.start + (self.count - 1) * self.step + self.length

    def spans(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Elements lo to hi of the run: (number in the run, number in the tensor, how many
        follow each other).
        """
        while lo < hi:
            row, column = divmod(lo, self.length)
            n = min(self.length - column, hi - lo)
            yield lo, self.start + row * self.step + column, n
            lo += n


def rows(runs: list[tuple[int, int]]) -> list[ElementRun]:
    """Runs (start, length) in their order, where neighbours of one length that are equally far
    apart are one.
    """
    merged: list[ElementRun] = []
    for start, n in runs:
        last = merged[-1] if merged else None
        if (
            last
            and last.length == n
            and (last.count == 1 or start - last.start == last.count * last.step)
        ):
            merged[-1] = last._replace(
                step=(start - last.start) // last.count, count=last.count + 1
            )
        else:
            merged.append(ElementRun(start, n, n, 1))
    return merged


class Entry(NamedTuple):
    """One tensor of a file, or `run` of one of shape `whole`: bytes `begin` to `end` of what
    follows the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    whole: tuple[int, ...] | None = None
    run: ElementRun | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def key(self) -> tuple[str, str]:
        """Returns, of a part, the stem of the file that its tensor would be in otherwise, and
        the tensor's name.
        """
        stem, _, name = self.name.rpartition("/")[0].partition("/")
        return stem, name


def name_problem(name: Any) -> str | None:
    """Returns what is wrong with the name of a tensor; None if nothing is."""
    if type(name) is not str or not 1 <= len(name) <= NAME_LIMIT or not _CHARACTERS.fullmatch(name):
        return f"a tensor's name is 1 to {NAME_LIMIT} characters of A-Z a-z 0-9 _ . / -"
    if name.startswith("/") or ".." in name.split("/"):
        return "a tensor's name is neither absolute nor has .. in it"
    return None


def check_tensor(name: Any, dtype: Any, shape: Any, offsets: Any, space: int) -> Entry:
    """The tensor that a file describes; CheckpointError if it cannot be one within `space` bytes
    of data.
    """
    problem = name_problem(name)
    if problem:
        raise CheckpointError(f"{ascii(name)[:80]}: {problem}")
    if type(dtype) is not str or dtype not in DTYPES:
        raise CheckpointError(f"{name}: dtype {ascii(dtype)[:40]} is none of {' '.join(DTYPES)}")
    if not _whole_numbers(shape) or len(shape) > RANK_LIMIT:
        raise CheckpointError(
            f"{name}: a shape is at most {RANK_LIMIT} whole numbers, not {ascii(shape)[:60]}"
        )
    if not _whole_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= space:
        raise CheckpointError(
            f"{name}: bytes {ascii(offsets)[:60]} are not within the {space} bytes of data"
        )
    begin, end = offsets
    if math.prod(shape) * _WIDTHS[dtype] != end - begin:
        raise CheckpointError(
            f"{name}: {dtype} of shape {ascii(shape)[:80]} is not {end - begin} bytes"
        )
    return Entry(name, dtype, tuple(shape), begin, end)


def check_tiling(tensors: list[Entry], space: int) -> None:
    """Refuses tensors that leave gaps, overlap, or do not fill the data exactly."""
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != offset:
            raise CheckpointError(
                f"{tensor.name}: its bytes begin at {tensor.begin}, not at {offset}: a gap or an "
                "overlap"
            )
        offset = tensor.end
    if offset != space:
        raise CheckpointError(f"the tensors fill {offset} bytes, the file has {space} of data")


def check_part(tensor: Entry, whole: Any, run: Any) -> Entry:
    """The tensor of a file as a part of another one; CheckpointError if it cannot be."""
    if (
        not _whole_numbers(whole)
        or len(whole) > RANK_LIMIT
        or not _whole_numbers(run)
        or len(run) != 4
    ):
        raise CheckpointError(
            f"{tensor.name}: whole and run are whole numbers, not {ascii([whole, run])[:80]}"
        )
    element_run = ElementRun(*run)
    name = tensor.key[1]
    fits = element_run.count == 1 or element_run.length <= element_run.step
    if (
        not name
        or not fits
        or element_run.count < 1
        or (element_run.size,) != tensor.shape
        or element_run.stop > math.prod(whole)
    ):
        raise CheckpointError(
            f"{tensor.name}: {ascii(run)[:80]} is no part of a tensor of shape {ascii(whole)[:80]}"
        )
    return tensor._replace(whole=tuple(whole), run=element_run)


def check_parts(parts: Sequence[Entry]) -> None:
    """Refuses parts of one tensor that leave gaps, overlap, or are of several kinds."""
    first = parts[0]
    size = math.prod(first.whole or ())
    if any((one.dtype, one.whole) != (first.dtype, first.whole) for one in parts):
        raise CheckpointError(f"{'/'.join(first.key)}: its parts are of several dtypes or shapes")
    runs = [one.run for one in parts if one.run is not None and one.run.size]
    if sum(run.size for run in runs) != size or sum(run.count for run in runs) > ROWS_LIMIT:
        raise CheckpointError(
            f"{'/'.join(first.key)}: its parts are not {size} elements in at most {ROWS_LIMIT} rows"
        )
    starts = np.concatenate(
        [np.zeros(0, np.int64), *(run.start + run.step * np.arange(run.count) for run in runs)]
    )
    lengths = np.repeat([run.length for run in runs], [run.count for run in runs])
    order = np.argsort(starts)
    if len(runs) and (starts[order] != np.concatenate([[0], np.cumsum(lengths[order])[:-1]])).any():
        raise CheckpointError(f"{'/'.join(first.key)}: its parts leave a gap, or overlap")


def encode_header(tensors: Sequence[Entry]) -> bytes:
    """The header of a file with these tensors: length and JSON."""
    entries = {
        t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.begin, t.end]}
        for t in tensors
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def make_header(forms: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """The header for tensors of these dtypes and shapes (length and JSON), and their places in
    the order of the data. Wide dtypes come first, so each tensor is aligned; then by name:
    the same arrays give the same bytes. Raises OutputError: a name or a dtype that the
    format, or its limits, do not have.
    """
    for name, (dtype, shape) in forms.items():
        problem = name_problem(name)
        if problem is None and dtype.str not in _NAMES:
            problem = f"dtype {dtype} cannot be saved; {' '.join(sorted(_NAMES.values()))} can"
        if problem is None and len(shape) > RANK_LIMIT:
            problem = f"{len(shape)} dimensions are more than {RANK_LIMIT}"
        if problem:
            raise OutputError(f"{ascii(name)[:80]}: {problem}")
    if len(forms) > TENSORS_LIMIT:
        raise OutputError(f"{len(forms)} tensors in one file are more than {TENSORS_LIMIT}")
    tensors = []
    offset = 0
    for name, (dtype, shape) in sorted(
        forms.items(), key=lambda item: (-item[1][0].itemsize, item[0])
    ):
        end = offset + math.prod(shape) * dtype.itemsize
        tensors.append(Entry(name, _NAMES[dtype.str], shape, offset, end))
        offset = end
    header = encode_header(tensors)
    if len(header) - LENGTH_BYTES > HEADER_LIMIT:
        raise OutputError(
            f"a header of {len(header)} bytes is longer than {HEADER_LIMIT}; use fewer tensors "
            "per file"
        )
    return header, tensors


def _whole_numbers(value: Any) -> bool:
    return type(value) is list and all(
        type(one) is int and 0 <= one < INTEGER_LIMIT for one in value
    )
