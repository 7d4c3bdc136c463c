"""The header of a safetensors file, and the tensors that a checkpoint may have.

A file is 8 bytes (length of the JSON, little-endian), the JSON, then the data of all tensors
without gaps. Format: https://github.com/huggingface/safetensors. odyssey never parses a header.
The manifest lists the tensors of a file, and there is exactly one header for them. reader.py
encodes that header and compares it with the start of the file.
"""

from __future__ import annotations

import json
import math
import re
import urllib.parse
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
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_./-]+")
_CHARACTERS = re.compile(r"(?:[A-Za-z0-9_./-]|%[0-9A-F]{2})+")


class ElementRun(NamedTuple):
    """Some elements of a tensor, in C order: `count` rows of `length` elements.

    The first row starts at element `start`, and each row starts `step` elements after the one
    before. For example, columns 2 to 4 of a (10, 8) tensor are ElementRun(2, 3, 8, 10).
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
        """Yields the elements lo to hi of the run, cut at the ends of rows.

        Each item is (index in the run, index in the tensor, number of elements in a row).
        """
        while lo < hi:
            row, column = divmod(lo, self.length)
            count = min(self.length - column, hi - lo)
            yield lo, self.start + row * self.step + column, count
            lo += count


def merge_runs(runs: list[tuple[int, int]]) -> list[ElementRun]:
    """Returns rows (start, length) as few ElementRuns, in the same order.

    Successive rows of one length become one run if they are equally far apart.
    """
    merged: list[ElementRun] = []
    for start, length in runs:
        last = merged[-1] if merged else None
        # the second row of a run decides the distance between its rows
        if (
            last
            and last.length == length
            and (last.count == 1 or start - last.start == last.count * last.step)
        ):
            step = (start - last.start) // last.count
            merged[-1] = last._replace(step=step, count=last.count + 1)
        else:
            merged.append(ElementRun(start, length, step=length, count=1))
    return merged


class Entry(NamedTuple):
    """One tensor of a file, or a part of a tensor.

    begin, end: its bytes, counted from the end of the header.
    whole, run: of a part, the shape of its tensor and the elements that the part holds; otherwise
        None. `shape` is then that of the part, (run.size,).
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
        """The stem and the name of the tensor that a part belongs to.

        The stem is that of the file in which a checkpoint of whole tensors has the tensor. The
        part is called STEM/NAME/START (see `TensorSlice.key`).
        """
        stem, _, name = self.name.rpartition("/")[0].partition("/")
        return stem, name


def find_name_problem(name: Any) -> str | None:
    """Returns the reason why a tensor cannot have this name; None if it can."""
    if type(name) is not str or not 1 <= len(name) <= NAME_LIMIT or not _CHARACTERS.fullmatch(name):
        return (
            f"a tensor's name is 1 to {NAME_LIMIT} characters of A-Z a-z 0-9 _ . / -, and %XX for "
            "bytes of others"
        )
    if name.startswith("/") or ".." in name.split("/"):
        return "a tensor's name is neither absolute nor has .. in it"
    # One way to write a name, so that two entries cannot be one tensor.
    try:
        is_canonical = encode_name(decode_name(name)) == name
    except UnicodeDecodeError:
        is_canonical = False
    return None if is_canonical else "the %XX of a tensor's name are UTF-8 of other characters"


def encode_name(name: str) -> str:
    """Returns the name that a tensor has in files: bytes of characters other than A-Z a-z 0-9 _ .
    / - as %XX, as in URLs (RFC 3986).
    """
    return _OTHER_CHARACTERS.sub(
        lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "replace")), name
    )


def decode_name(name: str) -> str:
    """Returns the tensor's own name. `encode_name` is the inverse.

    Raises UnicodeDecodeError: the bytes are no UTF-8.
    """
    return urllib.parse.unquote(name, errors="strict")


def check_tensor(name: Any, dtype: Any, shape: Any, offsets: Any, space: int) -> Entry:
    """Returns the tensor that a manifest describes with these values.

    offsets: its first byte and the byte after its last one, in the data of the file.
    space: the size of the file in bytes.

    Raises:
        CheckpointError: a value is not allowed, or the tensor does not fit into `space`.
    """
    problem = find_name_problem(name)
    if problem:
        raise CheckpointError(f"{ascii(name)[:80]}: {problem}")
    if type(dtype) is not str or dtype not in DTYPES:
        raise CheckpointError(f"{name}: dtype {ascii(dtype)[:40]} is none of {' '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > RANK_LIMIT:
        raise CheckpointError(
            f"{name}: a shape is at most {RANK_LIMIT} whole numbers, not {ascii(shape)[:60]}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= space:
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
    """Raises CheckpointError if tensors leave gaps, overlap, or do not fill `space` bytes."""
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


def check_part(tensor: Entry, full_shape: Any, run: Any) -> Entry:
    """Returns the tensor of a file as a part of a tensor of shape `full_shape`.

    run: start, length, step and count of its elements, as in ElementRun.

    Raises:
        CheckpointError: it cannot be such a part.
    """
    if (
        not _are_sizes(full_shape)
        or len(full_shape) > RANK_LIMIT
        or not _are_sizes(run)
        or len(run) != 4
    ):
        raise CheckpointError(
            f"{tensor.name}: whole and run are whole numbers, not {ascii([full_shape, run])[:80]}"
        )
    element_run = ElementRun(*run)
    _, name = tensor.key
    rows_overlap = element_run.count > 1 and element_run.length > element_run.step
    if (
        not name
        or rows_overlap
        or element_run.count < 1
        or (element_run.size,) != tensor.shape
        or element_run.stop > math.prod(full_shape)
    ):
        raise CheckpointError(
            f"{tensor.name}: {ascii(run)[:80]} is no part of a tensor of shape "
            f"{ascii(full_shape)[:80]}"
        )
    return tensor._replace(whole=tuple(full_shape), run=element_run)


def check_parts(parts: Sequence[Entry]) -> None:
    """Raises CheckpointError if the parts of one tensor leave gaps, overlap, or do not match."""
    first = parts[0]
    tensor_name = "/".join(first.key)
    size = math.prod(first.whole or ())
    if any((part.dtype, part.whole) != (first.dtype, first.whole) for part in parts):
        raise CheckpointError(f"{tensor_name}: its parts are of several dtypes or shapes")
    runs = [part.run for part in parts if part.run is not None and part.run.size]
    # the limit of rows comes before the arrays below, which have one element per row
    if sum(run.size for run in runs) != size or sum(run.count for run in runs) > ROWS_LIMIT:
        raise CheckpointError(
            f"{tensor_name}: its parts are not {size} elements in at most {ROWS_LIMIT} rows"
        )
    if not runs:
        return
    starts = np.concatenate([run.start + run.step * np.arange(run.count) for run in runs])
    lengths = np.repeat([run.length for run in runs], [run.count for run in runs])
    order = np.argsort(starts)
    # in order, each row must start where the one before it ends
    expected_starts = np.concatenate([[0], np.cumsum(lengths[order])[:-1]])
    if (starts[order] != expected_starts).any():
        raise CheckpointError(f"{tensor_name}: its parts leave a gap, or overlap")


def encode_header(tensors: Sequence[Entry]) -> bytes:
    """Returns the header of a file with these tensors: the length and the JSON.

    Spaces at the end of the JSON align the data to LENGTH_BYTES.
    """
    entries = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.begin, tensor.end],
        }
        for tensor in tensors
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def make_header(forms: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """Returns the header of a file with tensors of these dtypes and shapes, and its entries.

    The entries are in the order of the data. Wide dtypes come first, so each tensor is aligned.
    Tensors of one width are ordered by name, so the same arrays result in the same bytes.

    forms: dtype and shape by name.

    Raises:
        OutputError: the format, or its limits, do not allow a name, a dtype, a rank or the number
            of tensors.
    """

    def order_of(form: tuple[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[int, str]:
        name, (dtype, _) = form
        return -dtype.itemsize, name

    for name, (dtype, shape) in forms.items():
        problem = find_name_problem(name)
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
    for name, (dtype, shape) in sorted(forms.items(), key=order_of):
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


def _are_sizes(value: Any) -> bool:
    """Returns True for a list of whole numbers from 0; a bool is not a number here."""
    return type(value) is list and all(
        type(number) is int and 0 <= number < INTEGER_LIMIT for number in value
    )
