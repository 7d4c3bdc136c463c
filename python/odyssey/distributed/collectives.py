"""Collectives and messages between the ranks of a group, on tensors, arrays and numbers.

The names are those of torch.distributed and mean the same: what is given is overwritten with the result, and returned.
A number, which cannot be overwritten, comes back as a number. An argument that is refused on one rank is an error on
all of them. What it is not: a group (groups.py), or a transport (comm/): values become arrays here, results what the
values were.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..comm import Communicator, ReduceOp, bfloat16
from ..core.program import Block
from ..core.tensor import Tensor, make
from ..errors import CollectiveError, ConfigError, ShapeError
from .groups import ProcessGroup, joined

# --- values ----------------------------------------------------------------------------------------------------------


def _is_torch(value: Any) -> bool:
    """Whether it is a tensor of PyTorch, which is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: Any, what: str) -> np.ndarray:
    """A tensor, array or number as an array; its memory, if it has some in rows."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int)):
        return np.asarray(int(value), np.int64)
    if isinstance(value, float):
        return np.asarray(value, np.float64)
    if _is_torch(value):
        if value.device.type != "cpu":
            raise ShapeError(f"[dist] {what} of a torch tensor on {value.device}; give one on the CPU, tensor.cpu()")
        torch = sys.modules["torch"]
        flat = value.detach()
        return flat.view(torch.int16).numpy().view(bfloat16) if flat.dtype == torch.bfloat16 else flat.numpy()
    raise ShapeError(f"[dist] {what} of a {type(value).__name__}; give a Tensor, a NumPy array or a number")


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as what `value` is: a tensor, an array or a number."""
    array = np.asarray(array)  # a row of an array of one axis is a number
    if isinstance(value, Tensor):
        return make(Block(array), array.shape, "rows", array.dtype)
    if _is_torch(value):
        torch = sys.modules["torch"]
        whole = array.view(np.int16) if array.dtype == bfloat16 else array
        return torch.from_numpy(whole).view(value.dtype)
    if isinstance(value, np.ndarray) or array.ndim:
        return array
    return array[()] if isinstance(value, np.generic) else array.item()


class _Place:
    """Where a result goes: a tensor or array of the caller, of any strides and layout.

    Attributes:
        array: its values. memory: contiguous memory for the transport, which is its own where that is contiguous.

    Raises:
        ShapeError: it is no tensor or array, or read-only; or not of this shape and dtype.
    """

    def __init__(self, value: Any, what: str, shape: Sequence[int] | None = None, dtype: Any = None) -> None:
        if not (isinstance(value, (Tensor, np.ndarray)) or _is_torch(value)):
            raise ShapeError(
                f"[dist] {what} into a {type(value).__name__}, which cannot be overwritten; give a Tensor or an array"
            )
        self.value, self.array = value, _array(value, what)
        if not self.array.flags.writeable:
            raise ShapeError(
                f"[dist] {what} overwrites the array that it is given, and this one is read-only; give array.copy()"
            )
        if shape is not None and (self.array.shape != tuple(shape) or self.array.dtype != dtype):
            raise ShapeError(
                f"[dist] {what}: the result is {dtype} {tuple(shape)}, but it is to go into {self.array.dtype} "
                f"{self.array.shape}; give one of the same shape and dtype"
            )
        self.memory = self.array if self.array.flags.c_contiguous else np.empty(self.array.shape, self.array.dtype)

    def put(self, result: np.ndarray) -> Any:
        """Writes a result that is elsewhere; returns what the caller gave."""
        if isinstance(self.value, Tensor) and self.value.layout != "rows":
            self.value.data = result.reshape(self.array.shape)
        elif result is not self.array:
            self.array[...] = result.reshape(self.array.shape)
        return self.value

    def filled(self, _: Any = None) -> Any:
        """The result is in `memory`: it is brought to its place. Returns what the caller gave."""
        return self.put(self.memory)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.generic))


def _places(values: Sequence[Any], what: str, size: int, shape: Sequence[int], dtype: Any) -> list[_Place]:
    """One place per rank."""
    if len(values) != size:
        raise ShapeError(f"[dist] {what} into a list of {len(values)}, but the group has {size} ranks; give one each")
    if len({id(v) for v in values}) != size:
        raise ShapeError(f"[dist] {what} into a list that has one array several times; give one each")
    return [_Place(v, what, shape, dtype) for v in values]


def _stacked(values: Any, size: int, what: str) -> np.ndarray:
    """One value per rank as an array of as many rows."""
    if not isinstance(values, (list, tuple)):
        return _array(values, what)
    arrays = [_array(v, what) for v in values]
    if len(arrays) != size:
        raise ShapeError(f"[dist] {what} of {len(arrays)} values for {size} ranks; give one each")
    for a in arrays:
        if a.shape != arrays[0].shape or a.dtype != arrays[0].dtype:
            raise ShapeError(
                f"[dist] {what} of {arrays[0].dtype} {arrays[0].shape} and {a.dtype} {a.shape}; give one shape and "
                "dtype for all ranks"
            )
    return np.stack(arrays)


def _rows(array: np.ndarray, shape: tuple[int, ...], size: int, what: str) -> np.ndarray:
    """An array of the pieces of all ranks, one below the other or stacked, as (size, *shape)."""
    if array.shape not in ((size, *shape), (size * shape[0], *shape[1:]) if shape else None):
        raise ShapeError(
            f"[dist] {what}: {array.shape} does not hold {size} pieces of {shape}, one for each rank; give "
            f"{(size, *shape)}" + (f" or {(size * shape[0], *shape[1:])}" if shape else "")
        )
    return array.reshape((size, *shape))


# --- work under way --------------------------------------------------------------------------------------------------


class Work:
    """A collective or message under way (async_op=True); `wait()` gives what the blocking form returns.

    The arguments must stay as they are until then.
    """

    def __init__(self, wait: Callable[[], Any], test: Callable[[], bool]) -> None:
        self._wait, self._test = wait, test
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Waits and returns the result; the same again if called again.

        Raises:
            CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        if not self._done:
            try:
                self._result = self._wait()
            except CollectiveError as error:
                self._error = error
            self._done = True
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether it is over, and the result in its place or lost; calling it moves the operation on."""
        if not self._done and self._test():
            try:
                self.wait()  # what has no contiguous memory is written here
            except CollectiveError:
                pass
        return self._done

    def result(self) -> Any:
        """Same as `wait()`."""
        return self.wait()


def _go(
    comm: Communicator, what: str, begin: Callable[[], tuple[Any, Callable[[Any], Any]]], async_op: bool = False
) -> Any:
    """Starts an operation: begin() checks its arguments and gives (request, what makes the result of the request's)."""
    try:
        request, finish = begin()
    except (ConfigError, ShapeError) as error:
        comm.refuse(what, str(error))
        raise
    work = Work(lambda: finish(request.wait()), request.test)
    return work if async_op else work.wait()


def _shifted(before: Any, group: Any, async_op: bool) -> tuple[Any, bool]:
    """(group, async_op) of the form with one argument fewer than PyTorch's: each may stand one place further left."""
    if isinstance(group, bool):
        group, async_op = None, group
    return before if isinstance(before, ProcessGroup) else group, async_op


# --- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks combined, on all of them: `tensor` is overwritten and returned.

    Args:
        tensor: Tensor or array of any strides, of the same shape and dtype on all ranks; or a number.
        op: ReduceOp.SUM, MEAN (= AVERAGE = AVG), MAX, MIN or PROD, or its name. The mean of integers is refused.
        group: a group of ranks; the world by default.
        async_op: return a `Work` at once.
        out: Tensor or array that takes the result; `tensor` is then left as it is.

    Returns:
        `tensor`, or `out`; a new number for a number; or a Work.

    Raises:
        CollectiveError: a rank calls something else. ShapeError, ConfigError: an argument is not allowed.
    """
    comm = joined(group)._member("all_reduce")

    def begin() -> Any:
        a = _array(tensor, "all_reduce")
        if out is None and _is_number(tensor):
            return comm.all_reduce(a, op, wait=False), lambda r: _like(tensor, r)
        place = _Place(tensor, "all_reduce") if out is None else _Place(out, "all_reduce", a.shape, a.dtype)
        return comm.all_reduce(place.array if out is None else a, op, place.memory, wait=False), place.filled

    return _go(comm, "all_reduce", begin, async_op)


def all_reduce_sum(tensor: Any, group: ProcessGroup | None = None) -> Any:
    """The sum over the ranks, in place and returned."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def all_reduce_mean(tensor: Any, group: ProcessGroup | None = None) -> Any:
    """The mean over the ranks, in place and returned; each counts the same, `metric_average` weights them."""
    return all_reduce(tensor, ReduceOp.MEAN, group)


def all_reduce_sum_group(tensor: Any, group: ProcessGroup) -> Any:
    """The sum over the ranks of a group, in place and returned."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """The values of all ranks combined: in place and returned on world rank `dst`; elsewhere None, nothing written."""
    g = joined(group)
    comm = g._member("reduce")

    def begin() -> Any:
        root = g._place("reduce to rank", dst)
        a = _array(tensor, "reduce")
        if comm.rank != root or _is_number(tensor):
            return comm.reduce(a, op, root, wait=False), lambda r: None if r is None else _like(tensor, r)
        place = _Place(tensor, "reduce")
        return comm.reduce(place.array, op, root, place.memory, wait=False), place.filled

    return _go(comm, "reduce", begin, async_op)


def broadcast(
    tensor: Any, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """The value of world rank `src`, on all ranks: `tensor` is overwritten and returned.

    It has one shape and dtype on all ranks. `out` takes the value instead, and `tensor` is left as it is.
    """
    g = joined(group)
    comm = g._member("broadcast")

    def begin() -> Any:
        root = g._place("broadcast from rank", src)
        a = _array(tensor, "broadcast")
        if out is None and (comm.rank == root or _is_number(tensor)):
            number = _is_number(tensor)
            sent = np.array(a, order="C") if number else np.asarray(a, order="C")
            return comm.broadcast(sent, root, wait=False), lambda r: _like(tensor, r) if number else tensor
        place = _Place(tensor, "broadcast") if out is None else _Place(out, "broadcast", a.shape, a.dtype)
        if comm.rank == root and place.memory is not a:
            place.memory[...] = a
        return comm.broadcast(place.memory, root, wait=False), place.filled

    return _go(comm, "broadcast", begin, async_op)


def all_gather(
    tensor_list: Any = None,
    tensor: Any = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks, in their order, on all of them: all_gather(list, tensor), or list = all_gather(tensor).

    Args:
        tensor_list: a list of one Tensor or array per rank, which are overwritten. Without it, a new list is returned:
            `all_gather(tensor, group, async_op)`.
        tensor: of the same shape and dtype on all ranks.
        out: in the second form, a list as in the first, or an array (ranks, ...), that takes them.

    Returns:
        The list, or `out`, or a Work.
    """
    listed = isinstance(tensor_list, (list, tuple))
    if not listed and tensor_list is not None:
        if tensor is None or isinstance(tensor, ProcessGroup):
            tensor_list, tensor, group, async_op = None, tensor_list, *_shifted(tensor, group, async_op)
    comm = joined(group)._member("all_gather")

    def begin() -> Any:
        if tensor is None or (tensor_list is not None and not listed):
            raise ShapeError(
                "[dist] all_gather: write all_gather(list, tensor), values = all_gather(tensor), or "
                "all_gather_into_tensor(array, tensor)"
            )
        a = _array(tensor, "all_gather")
        into = tensor_list if listed else out
        if into is None:
            return comm.all_gather(a, wait=False), lambda rows: [_like(tensor, row) for row in rows]
        if not isinstance(into, (list, tuple)):
            place = _Place(into, "all_gather", (comm.size, *a.shape), a.dtype)
            return comm.all_gather(a, place.memory, wait=False), place.filled
        places = _places(into, "all_gather", comm.size, a.shape, a.dtype)
        return comm.all_gather(a, wait=False), lambda rows: _put_all(places, rows, into)

    return _go(comm, "all_gather", begin, async_op)


def _put_all(places: Sequence[_Place], rows: Sequence[np.ndarray], values: Any) -> Any:
    for place, row in zip(places, rows, strict=True):
        place.put(row)
    return values


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """The values of all ranks, in `output_tensor`: one below the other or stacked, as its shape says."""
    comm = joined(group)._member("all_gather_into_tensor")

    def begin() -> Any:
        a, place = _array(input_tensor, "all_gather_into_tensor"), _Place(output_tensor, "all_gather_into_tensor")
        rows = _rows(place.memory, a.shape, comm.size, "all_gather_into_tensor")
        return comm.all_gather(a, rows, wait=False), place.filled

    return _go(comm, "all_gather_into_tensor", begin, async_op)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | ProcessGroup | None = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """The values of all ranks as a list, on world rank `dst`; None elsewhere.

    `gather_list` of one tensor or array per rank, on `dst` only, is overwritten and returned; without it the list is
    new, and `gather(tensor, dst, group, async_op)` will do.
    """
    if isinstance(gather_list, (int, np.integer)):
        dst, gather_list, group, async_op = gather_list, None, *_shifted(dst, group, async_op)
    g = joined(group)
    comm = g._member("gather")

    def begin() -> Any:
        root = g._place("gather to rank", dst)
        a = _array(tensor, "gather")
        if gather_list is None:
            return comm.gather(a, root, wait=False), lambda r: None if r is None else [_like(tensor, row) for row in r]
        if comm.rank != root:
            raise ShapeError(f"[dist] gather: gather_list is given on a rank other than {dst}; leave it out there")
        places = _places(gather_list, "gather", comm.size, a.shape, a.dtype)
        return comm.gather(a, root, wait=False), lambda rows: _put_all(places, rows, gather_list)

    return _go(comm, "gather", begin, async_op)


def scatter(
    tensor: Any = None,
    scatter_list: Any = None,
    src: int | ProcessGroup | None = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Piece r of what world rank `src` gives, on rank r: scatter(tensor, list), or tensor = scatter(list).

    Args:
        tensor: takes the piece. Without it the piece is new, and `scatter(list, src, group, async_op)` will do, where
            the list may be one tensor or array of as many rows; None on the other ranks.
        scatter_list: on `src` only, one tensor or array per rank.
        out: in the second form, takes the piece.

    Returns:
        `tensor` or `out`; else a tensor if `src` gave tensors, or an array (a piece of a list of numbers is an array of
        no axes).
    """
    if isinstance(scatter_list, (int, np.integer)):
        src, scatter_list, group, async_op = scatter_list, None, *_shifted(src, group, async_op)
    g = joined(group)
    comm = g._member("scatter")

    def begin() -> Any:
        root = g._place("scatter from rank", src)
        pieces, into = scatter_list, tensor if out is None else out
        if scatter_list is None and (comm.rank == root or isinstance(tensor, (list, tuple))):
            pieces, into = tensor, out
        elif comm.rank != root and scatter_list is not None:
            raise ShapeError(f"[dist] scatter: scatter_list is given on a rank other than {src}; give None there")
        kind = np.zeros(1, np.uint8)
        rows = None
        if comm.rank == root:
            if pieces is None:
                raise ShapeError(f"[dist] scatter: rank {src} gives None; give it a list of {comm.size}, one per rank")
            listed = pieces if isinstance(pieces, (list, tuple)) else [pieces]
            kind[0] = any(isinstance(t, Tensor) for t in listed)
            rows = _stacked(pieces, comm.size, "scatter")
            if not rows.ndim or len(rows) != comm.size:
                raise ShapeError(
                    f"[dist] scatter of shape {rows.shape} from rank {src}; give a list of {comm.size}, one per rank"
                )
        place = None if into is None else _Place(into, "scatter")
        if place is not None and rows is not None:
            _Place(into, "scatter", rows.shape[1:], rows.dtype)
        told = comm.broadcast(kind, root, wait=False)  # whether it is tensors, which the others cannot know
        request = comm.scatter(rows, root, None if place is None else place.memory, wait=False)

        def finish(piece: np.ndarray) -> Any:
            told.wait()
            if place is not None:
                return place.filled()
            return make(Block(piece), piece.shape, "rows", piece.dtype) if kind[0] else piece

        return request, finish

    return _go(comm, "scatter", begin, async_op)


def reduce_scatter(
    output: Any,
    input_list: Any = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks combined, and piece r of that on rank r.

    reduce_scatter(output, list): `output` is overwritten with the r-th of a list of one per rank, and returned.
    piece = reduce_scatter(tensor, op, group, async_op): rows r * n to (r + 1) * n of a tensor or array of
    (size * n, ...), or the r-th of a list; `out` takes it.
    """
    wrong = not isinstance(input_list, (list, tuple, str, type(None)))
    if not isinstance(input_list, (list, tuple)):
        if input_list is not None:
            op, group, async_op = input_list, *_shifted(op, group, async_op)
        input_list, output = output, out
    comm = joined(group)._member("reduce_scatter")

    def begin() -> Any:
        if wrong:
            raise ShapeError(
                f"[dist] reduce_scatter of a {type(op).__name__}; write reduce_scatter(output, list), "
                "piece = reduce_scatter(tensor), or reduce_scatter_tensor(output, tensor)"
            )
        a = _stacked(input_list, comm.size, "reduce_scatter")
        listed = isinstance(input_list, (list, tuple))
        if output is None:
            first = input_list[0] if listed else input_list
            return comm.reduce_scatter(a, op, wait=False), lambda r: _like(first, r[0] if listed else r)
        if not listed and (not a.ndim or a.shape[0] % comm.size):
            return comm.reduce_scatter(a, op, wait=False), None  # raises
        shape = a.shape[1:] if listed else (a.shape[0] // comm.size, *a.shape[1:])
        place = _Place(output, "reduce_scatter", shape, a.dtype)
        return comm.reduce_scatter(a, op, wait=False), place.put

    return _go(comm, "reduce_scatter", begin, async_op)


def reduce_scatter_tensor(
    output: Any,
    input: Any,  # noqa: A002  as it is called there
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Piece r of the combined `input` of all ranks, in `output` of rank r. Pieces lie one below another, or stacked."""
    comm = joined(group)._member("reduce_scatter_tensor")

    def begin() -> Any:
        a, place = _array(input, "reduce_scatter_tensor"), _Place(output, "reduce_scatter_tensor")
        rows = _rows(a, place.array.shape, comm.size, "reduce_scatter_tensor")
        if a.dtype != place.array.dtype:
            raise ShapeError(f"[dist] reduce_scatter_tensor of {a.dtype} into {place.array.dtype}; give one dtype")
        return comm.reduce_scatter(rows, op, wait=False), place.put

    return _go(comm, "reduce_scatter_tensor", begin, async_op)


def all_to_all(
    output_tensor_list: Any, input_tensor_list: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Item p of the input goes to rank p; item p of the output came from rank p.

    all_to_all(outputs, inputs): lists of one tensor or array per rank, of any shapes; `outputs` is overwritten and
    returned. outputs = all_to_all(inputs, group, async_op): inputs of one shape; an array or tensor of as many rows as
    ranks does as well, and then the result is one too.
    """
    if not isinstance(input_tensor_list, (list, tuple)):
        given = output_tensor_list
        group, async_op = _shifted(input_tensor_list, group, async_op)
        comm = joined(group)._member("all_to_all")

        def begin() -> Any:
            if not isinstance(input_tensor_list, (ProcessGroup, type(None))):
                raise ShapeError("[dist] all_to_all takes two lists, or one; for arrays there is all_to_all_single")
            a = _stacked(given, comm.size, "all_to_all")
            if isinstance(given, (list, tuple)):
                return comm.all_to_all(a, wait=False), lambda rows: [_like(given[0], row) for row in rows]
            return comm.all_to_all(a, wait=False), lambda rows: _like(given, rows)

        return _go(comm, "all_to_all", begin, async_op)
    comm = joined(group)._member("all_to_all")

    def begin_in_place() -> Any:
        outputs = output_tensor_list
        if not isinstance(outputs, (list, tuple)) or not len(outputs) == len(input_tensor_list) == comm.size:
            raise ShapeError(f"[dist] all_to_all takes two lists of {comm.size}, one for each rank of the group")
        if len({id(o) for o in outputs}) != comm.size:
            raise ShapeError("[dist] all_to_all into a list that has one array several times; give one each")
        arrays = [_array(t, "all_to_all") for t in input_tensor_list]
        places = [_Place(o, "all_to_all") for o in outputs]
        dtypes = {a.dtype for a in arrays} | {p.array.dtype for p in places}
        if len(dtypes) > 1:
            raise ShapeError(f"[dist] all_to_all of {', '.join(sorted(map(str, dtypes)))}; give one dtype")
        counts = [p.array.size for p in places]
        received = np.empty(sum(counts), arrays[0].dtype)
        sent = np.concatenate([a.reshape(-1) for a in arrays])
        request = comm.all_to_all_v(sent, [a.size for a in arrays], received, counts, wait=False)
        pieces = np.split(received, np.cumsum(counts)[:-1])
        return request, lambda _: _put_all(places, pieces, outputs)

    return _go(comm, "all_to_all", begin_in_place, async_op)


def all_to_all_single(
    output: Any,
    input: Any,  # noqa: A002  as it is called there
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Rows of `input` to ranks 0, 1, ..., and theirs into `output`; as many each as the sizes say, or equally many."""
    comm = joined(group)._member("all_to_all_single")

    def begin() -> Any:
        a, place = _array(input, "all_to_all_single"), _Place(output, "all_to_all_single")
        if a.dtype != place.array.dtype or a.shape[1:] != place.array.shape[1:] or not (a.ndim and place.array.ndim):
            raise ShapeError(
                f"[dist] all_to_all_single of {a.dtype} {a.shape} into {place.array.dtype} {place.array.shape}; give "
                "one dtype, and rows of one shape"
            )
        row = math.prod(a.shape[1:])
        counts = []
        for name, array, sizes in (("input", a, input_split_sizes), ("output", place.array, output_split_sizes)):
            given = list(sizes) if sizes else [len(array) // comm.size] * comm.size
            if len(given) != comm.size or sum(given) != len(array):
                raise ShapeError(
                    f"[dist] all_to_all_single: {name} of {len(array)} rows is cut into {given} for {comm.size} ranks; "
                    f"give {name}_split_sizes of one per rank that add up to the rows"
                )
            counts.append([n * row for n in given])
        request = comm.all_to_all_v(a, counts[0], place.memory, counts[1], wait=False)
        return request, place.filled

    return _go(comm, "all_to_all_single", begin, async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Waits until all ranks of the group are here."""
    comm = joined(group)._member("barrier")
    return _go(comm, "barrier", lambda: (comm.barrier(wait=False), lambda r: None), async_op)


# --- one to one ------------------------------------------------------------------------------------------------------


def send(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Sends to world rank `dst`. May wait until it is received: in a ring, use isend or irecv."""
    isend(tensor, dst, group, tag).wait()


def isend(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`send`, not waited for; the tensor must stay as it is until the Work is complete."""
    g = joined(group)
    request = g._member("send").send(_array(tensor, "send"), g._place("send to rank", dst), tag, wait=False)

    def wait() -> None:
        request.wait()

    return Work(wait, request.test)


def recv(tensor: Any, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Receives what world rank `src` sent with this tag into a Tensor or array, and returns it.

    Raises:
        CollectiveError: what was sent has another dtype or number of elements.
    """
    return irecv(tensor, src, group, tag).wait()


def irecv(tensor: Any, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`recv`, not waited for."""
    g = joined(group)
    comm, place = g._member("recv"), _Place(tensor, "recv")
    request = comm.recv(place.memory, g._place("recv from rank", src), tag, wait=False)
    return Work(lambda: place.filled(request.wait()), request.test)


# --- metrics ---------------------------------------------------------------------------------------------------------


def metric_average(value: Any, name: str = "metric", weight: float = 1.0, group: ProcessGroup | None = None) -> float:
    """The mean of a number over the ranks, weighted: sum of value * weight / sum of weight, the same on all ranks.

    Args:
        value: a number, or a tensor or array of one element.
        name: of the metric; must be the same on all ranks, so that a loss is not averaged with an accuracy.
        weight: of this rank, at least 0: its number of samples, say. A rank without samples gives 0, and its value is
            not looked at.

    Returns:
        The mean; NaN if all weights are 0. Added up exactly, so it does not depend on the order of ranks.

    Raises:
        CollectiveError: another rank averages another metric.
    """
    comm = joined(group)._member("metric_average")

    def begin() -> Any:
        if not 0 <= weight < math.inf:
            raise ConfigError(f"[dist] metric_average: weight is {weight!r}; it must be at least 0 and finite")
        a = _array(value, "metric_average")
        if a.size != 1:
            raise ShapeError(f"[dist] metric_average of shape {a.shape}; give one number")
        number = float(a.reshape(-1)[0]) if weight else 0.0
        digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")  # exact in float64
        return comm.all_gather(np.array([number, weight, digest], np.float64), wait=False), lambda rows: rows

    rows = _go(comm, "metric_average", begin)
    other = np.flatnonzero(rows[:, 2] != rows[0, 2])
    if len(other):
        members = joined(group).ranks
        raise CollectiveError(
            f"[dist] rank {members[comm.rank]} averages {name!r}, but ranks {members[0]} and {members[other[0]]} name "
            "different metrics; all ranks average the same ones in the same order"
        )
    total = math.fsum(rows[:, 1])
    if not total:
        return math.nan
    products = rows[:, 0] * rows[:, 1]
    return math.fsum(products) / total if np.isfinite(products).all() else float(products.sum() / total)
