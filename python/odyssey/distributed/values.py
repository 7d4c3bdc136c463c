"""Values of users as arrays, and arrays as their values: the one converter of all faces of the
collectives.

A value is an odyssey.Tensor, a NumPy array, a number or a tensor of PyTorch, which is not imported
for that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..comm import DTYPES, ReduceOp, bfloat16
from ..core.program import OwnMemory
from ..core.tensor import Tensor, make
from ..errors import ConfigError, ShapeError

NUMBERS = (bool, int, float, np.generic)
_NAMES = ("sum", "mean", "average", "avg", "max", "min", "prod")
_OF_BOOLEANS = {"sum": "max", "max": "max", "prod": "min", "min": "min"}  # or, and


def _torch(value: Any) -> Any:
    """PyTorch if `value` is a tensor of it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


@functools.cache
def _numbers(torch: Any) -> frozenset[Any]:
    """PyTorch's dtypes that communicators know."""
    return frozenset(getattr(torch, name) for name in DTYPES)


def array_of(value: Any, what: str = "array") -> np.ndarray:
    """Returns a value as an array: its memory, where it has some; PyTorch's are copied if they
    are on a GPU or not contiguous. A dtype that communicators do not know, bool among them,
    becomes its bytes, along one axis more. Raises ShapeError, which names the call `what`: it
    is no value.
    """
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int, float)):
        return np.asarray(value, np.float64 if isinstance(value, float) else np.int64)
    if torch := _torch(value):
        return _of_torch(value, torch, what)[0]
    raise ShapeError(
        f"[dist] {what} of a {type(value).__name__}; give a Tensor, a NumPy array or a number"
    )


def _of_torch(value: Any, torch: Any, call_name: str, read: bool = True) -> tuple[np.ndarray, bool]:
    """(`array_of` a tensor of PyTorch, whether that is its memory).

    read: False leaves the values of a copy undefined, because they will be overwritten.
    """
    if value.layout is not torch.strided:
        raise ShapeError(
            f"[dist] {call_name} takes dense tensors, and this one is sparse; use tensor.to_dense()"
        )
    value = value.detach() if value.requires_grad else value
    shared = value.is_contiguous() and value.device.type == "cpu"
    if not shared:
        # a GPU copies to and from pinned memory several times faster
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        value = copy.copy_(value) if read else copy
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy().view(bfloat16), shared
    if value.dtype in _numbers(torch):
        return value.numpy(), shared
    return value.reshape(-1).view(torch.uint8).numpy().reshape(
        *value.shape, value.element_size()
    ), shared


def like(value: Any, array: np.ndarray | None) -> Any:
    """Returns an array as what `value` is, over the array's memory; None where this rank has no
    result.
    """
    if array is None:
        return None
    array = np.asarray(array)  # a row of an array of one axis is a number
    if isinstance(value, Tensor):
        return make(OwnMemory(array), array.shape, "rows", array.dtype)
    if torch := _torch(value):
        if value.dtype is torch.bfloat16:
            tensor = torch.from_numpy(array.view(np.int16)).view(value.dtype)
        elif value.dtype in _numbers(torch):
            tensor = torch.from_numpy(array)
        else:
            tensor = torch.from_numpy(array).view(value.dtype).reshape(array.shape[:-1])
        return tensor.to(value.device)
    if isinstance(value, np.ndarray) or array.ndim:
        return array
    return array[()] if isinstance(value, np.generic) else array.item()


def operation(op: ReduceOp | str, value: Any, what: str) -> ReduceOp | str:
    """Returns what a communicator is asked for: PyTorch's booleans are combined by or (sum, max)
    and and (prod, min). Raises ConfigError: PyTorch's dtype cannot be combined so.
    """
    torch = None if isinstance(value, np.ndarray) else _torch(value)
    if torch is None or (
        value.dtype in _numbers(torch) and (isinstance(op, ReduceOp) or op in _NAMES)
    ):
        return op
    combined_op = _OF_BOOLEANS.get(op) if value.dtype is torch.bool else None
    if combined_op is None:
        raise ConfigError(
            f"[dist] {what} cannot combine {value.dtype} by {op}; use sum, mean, max, min or prod "
            "of integers or 16- to 64-bit floats, or all but the mean of booleans"
        )
    return combined_op


class Place:
    """Where a result goes: a tensor or array of the caller, of any strides and layout, of this
    shape and dtype. array: its values, _shared: in its own memory. memory: for the transport,
    contiguous; the same where that is.

    read: False if nobody reads `array` before the result is in it, so a tensor on a GPU isn't
    copied to the host for that.
    """

    __slots__ = ("value", "array", "memory", "_shared")

    def __init__(
        self,
        value: Any,
        what: str,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        read: bool = True,
    ) -> None:
        self.value = value
        if isinstance(value, (np.ndarray, Tensor)):
            self.array = array_of(value)
            self._shared = getattr(value, "layout", "rows") == "rows"
        elif torch := _torch(value):
            self.array, self._shared = _of_torch(value, torch, what, read)
        else:
            raise ShapeError(
                f"[dist] {what} into a {type(value).__name__}, which cannot be overwritten; give "
                "a Tensor or an array"
            )
        flags = self.array.flags
        if not flags.writeable:
            raise ShapeError(
                f"[dist] {what} overwrites its array, and this one is read-only; give array.copy()"
            )
        if shape is not None and (self.array.shape != tuple(shape) or self.array.dtype != dtype):
            raise ShapeError(
                f"[dist] {what}: the result is {dtype} {tuple(shape)}, but it is to go into "
                f"{self.array.dtype} {self.array.shape}; give one of the same shape and dtype"
            )
        self.memory = (
            self.array if flags.c_contiguous else np.empty(self.array.shape, self.array.dtype)
        )

    def put(self, result: np.ndarray) -> Any:
        """Writes a result that is elsewhere; returns what the caller gave."""
        result = result.reshape(self.array.shape)
        if self._shared:
            self.array[...] = result
        elif isinstance(self.value, Tensor):
            self.value.data = result
        else:
            self.value.detach().copy_(like(self.value, result))
        return self.value

    def filled(self, _: Any = None) -> Any:
        """The result is in `memory`: it is brought to its place. Returns what the caller gave."""
        return self.value if self._shared and self.memory is self.array else self.put(self.memory)


def in_place(value: Any, out: Any, what: str) -> tuple[np.ndarray, Place]:
    """Returns the array of `value`, and the place of a result like it: `out`, or where that is
    None `value` itself.
    """
    if out is None:
        try:
            place = Place(value, what)
        except ShapeError:
            array_of(value, what)  # says what is given, if it is no value at all
            raise
        return place.array, place
    array = array_of(value, what)
    return array, Place(out, what, array.shape, array.dtype, read=False)


def places(
    values: Sequence[Any],
    what: str,
    size: int,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
) -> Any:
    """Returns a Place per rank, for values of one shape and dtype where they are given."""
    if len(values) != size:
        raise ShapeError(
            f"[dist] {what} into a list of {len(values)}, but the group has {size} ranks; give "
            "one each"
        )
    if len({id(v) for v in values}) != size:
        raise ShapeError(
            f"[dist] {what} into a list that has one array several times; give one each"
        )
    return [Place(v, what, shape, dtype, read=False) for v in values]


def stacked(values: Any, size: int, what: str) -> np.ndarray:
    """Returns one value per rank as an array of as many rows; a value that is no list as an
    array.
    """
    if not isinstance(values, (list, tuple)):
        return array_of(values, what)
    arrays = [array_of(v, what) for v in values]
    if len(arrays) != size:
        raise ShapeError(f"[dist] {what} of {len(arrays)} values for {size} ranks; give one each")
    for a in arrays:
        if a.shape != arrays[0].shape or a.dtype != arrays[0].dtype:
            raise ShapeError(
                f"[dist] {what} of {arrays[0].dtype} {arrays[0].shape} and {a.dtype} {a.shape}; "
                "give one shape and dtype for all ranks"
            )
    return np.stack(arrays)


def rows(array: np.ndarray, shape: tuple[int, ...], size: int, what: str) -> np.ndarray:
    """Returns an array of the pieces of all ranks, one below the other or stacked, as (size,
    *shape).
    """
    if array.shape not in ((size, *shape), (size * shape[0], *shape[1:]) if shape else None):
        raise ShapeError(
            f"[dist] {what}: {array.shape} does not hold {size} pieces of {shape}, one for each "
            "rank; give "
            f"{(size, *shape)}" + (f" or {(size * shape[0], *shape[1:])}" if shape else "")
        )
    return array.reshape((size, *shape))
