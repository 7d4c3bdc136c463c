"""Collectives and messages between the ranks of a group, on tensors, arrays and numbers.

The names are those of torch.distributed and mean the same: what is given is overwritten with the result, and returned.
A number, which cannot be overwritten, comes back as a number. An argument that is refused on one rank is an error on
all of them. What it is not: a group (groups.py), or a transport (comm/): values become arrays here, results what the
values were.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..comm import ReduceOp, Request, bfloat16
from ..core.program import Block
from ..core.tensor import Tensor, make
from ..errors import CollectiveError, ConfigError, ShapeError, check_number
from .groups import ProcessGroup, joined

Group = ProcessGroup | None  # None: the world
Op = ReduceOp | str
Sizes = Sequence[int] | None
_NUMBERS = (bool, int, float, np.generic)


def _torch(value: Any) -> Any:
    """PyTorch, which is not imported for that, if it is a tensor of it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


def _array(value: Any, what: str) -> np.ndarray:
    """A tensor, array or number as an array; its memory, if it has some in rows."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int, float)):
        return np.asarray(value, np.float64 if isinstance(value, float) else np.int64)
    if torch := _torch(value):
        if value.device.type != "cpu":
            raise ShapeError(f"[dist] {what} of a torch tensor on {value.device}; give one on the CPU, tensor.cpu()")
        flat = value.detach()
        return flat.view(torch.int16).numpy().view(bfloat16) if flat.dtype == torch.bfloat16 else flat.numpy()
    raise ShapeError(f"[dist] {what} of a {type(value).__name__}; give a Tensor, a NumPy array or a number")


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as what `value` is: a tensor, an array or a number."""
    array = np.asarray(array)  # a row of an array of one axis is a number
    if isinstance(value, Tensor):
        return make(Block(array), array.shape, "rows", array.dtype)
    if torch := _torch(value):
        return torch.from_numpy(array.view(np.int16) if array.dtype == bfloat16 else array).view(value.dtype)
    if isinstance(value, np.ndarray) or array.ndim:
        return array
    return array[()] if isinstance(value, np.generic) else array.item()


class _Place:
    """Where a result goes: a tensor or array of the caller, of any strides and layout, of this shape and dtype.

    array: its values. memory: contiguous memory for the transport, which is its own where that is contiguous.
    """

    def __init__(self, value: Any, what: str, shape: Sequence[int] | None = None, dtype: Any = None) -> None:
        if not (isinstance(value, (Tensor, np.ndarray)) or _torch(value)):
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


def _places(values: Sequence[Any], what: str, size: int, shape: Sizes = None, dtype: Any = None) -> list[_Place]:
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


class Work:
    """A collective or message under way (async_op=True). Its arguments must stay as they are until `wait()`."""

    def __init__(self, request: Request, finish: Callable[[Any], Any]) -> None:
        self._request, self._finish = request, finish
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Waits and returns what the blocking form does; the same again if called again. Raises CollectiveError: the
        ranks' calls differ, or one did not come before the deadline."""
        if not self._done:
            try:
                self._result = self._finish(self._request.wait())
            except CollectiveError as error:
                self._error = error
            self._done = True
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether it is over, and the result in its place or lost; calling it moves the operation on."""
        if not self._done and self._request.test():
            with contextlib.suppress(CollectiveError):
                self.wait()  # what has no contiguous memory is written here
        return self._done

    result = wait


def collective(body: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a collective of a generator: it yields (group, async_op), is sent the group's communicator, checks its
    arguments and yields the request; is sent what that gave, and returns the result. An argument that it refuses is an
    error on the other ranks as well. Its `start` gives a Work, whatever async_op is."""
    what = body.__name__

    def run(later: bool, args: Any, named: Any) -> Any:
        steps = body(*args, **named)
        group, async_op = next(steps)
        comm = joined(group)._member(what)
        try:
            request = steps.send(comm)
        except (ConfigError, ShapeError) as error:
            comm.refuse(what, str(error))
            raise

        def finish(value: Any) -> Any:
            try:
                raise AssertionError(f"{what} makes a second request, {steps.send(value)}")
            except StopIteration as end:
                return end.value

        return Work(request, finish) if async_op or later else finish(request.wait())

    @functools.wraps(body)
    def call(*args: Any, **named: Any) -> Any:
        return run(False, args, named)

    call.start = lambda *args, **named: run(True, args, named)  # type: ignore[attr-defined]
    return call


def _shifted(before: Any, group: Any, async_op: bool) -> tuple[Any, bool]:
    """(group, async_op) of the form with one argument fewer than PyTorch's: each may stand one place further left."""
    if isinstance(group, bool):
        group, async_op = None, group
    return before if isinstance(before, ProcessGroup) else group, async_op


@collective
def all_reduce(
    tensor: Any, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """The values of all ranks combined, on all of them: `tensor` is overwritten and returned.

    Args:
        tensor: Tensor or array of any strides, of the same shape and dtype on all ranks; or a number.
        op: ReduceOp.SUM, MEAN (= AVERAGE = AVG), MAX, MIN or PROD, or its name. The mean of integers is refused.
        group: a group of ranks; the world by default.
        async_op: return a `Work` at once.
        out: Tensor or array that takes the result; `tensor` is then left as it is.

    Returns `tensor`, or `out`; a new number for a number; or a Work.

    Raises CollectiveError: a rank calls something else. ShapeError, ConfigError: an argument is not allowed.
    """
    comm = yield group, async_op
    a = _array(tensor, "all_reduce")
    if out is None and isinstance(tensor, _NUMBERS):
        return _like(tensor, (yield comm.all_reduce(a, op, wait=False)))
    place = _Place(tensor, "all_reduce") if out is None else _Place(out, "all_reduce", a.shape, a.dtype)
    return place.filled((yield comm.all_reduce(place.array if out is None else a, op, place.memory, wait=False)))


def all_reduce_sum(tensor: Any, group: Group = None) -> Any:
    """The sum over the ranks, in place and returned."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def all_reduce_mean(tensor: Any, group: Group = None) -> Any:
    """The mean over the ranks, in place and returned; each counts the same, `metric_average` weights them."""
    return all_reduce(tensor, ReduceOp.MEAN, group)


def all_reduce_sum_group(tensor: Any, group: ProcessGroup) -> Any:
    """The sum over the ranks of a group, in place and returned."""
    return all_reduce(tensor, ReduceOp.SUM, group)


@collective
def reduce(tensor: Any, dst: int = 0, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """The values of all ranks combined: in place and returned on world rank `dst`; elsewhere None, nothing written."""
    comm = yield group, async_op
    root = joined(group)._place("reduce to rank", dst)
    a = _array(tensor, "reduce")
    if comm.rank != root or isinstance(tensor, _NUMBERS):
        total = yield comm.reduce(a, op, root, wait=False)
        return None if total is None else _like(tensor, total)
    place = _Place(tensor, "reduce")
    return place.filled((yield comm.reduce(place.array, op, root, place.memory, wait=False)))


@collective
def broadcast(tensor: Any, src: int = 0, group: Group = None, async_op: bool = False, *, out: Any = None) -> Any:
    """The value of world rank `src`, on all ranks: `tensor` is overwritten and returned.

    It has one shape and dtype on all ranks. `out` takes the value instead, and `tensor` is left as it is.
    """
    comm = yield group, async_op
    root = joined(group)._place("broadcast from rank", src)
    a = _array(tensor, "broadcast")
    if out is None and isinstance(tensor, _NUMBERS):
        return _like(tensor, (yield comm.broadcast(np.array(a, order="C"), root, wait=False)))
    if out is None and comm.rank == root:
        yield comm.broadcast(np.asarray(a, order="C"), root, wait=False)
        return tensor
    place = _Place(tensor, "broadcast") if out is None else _Place(out, "broadcast", a.shape, a.dtype)
    if comm.rank == root and place.memory is not a:
        place.memory[...] = a
    return place.filled((yield comm.broadcast(place.memory, root, wait=False)))


@collective
def all_gather(
    tensor_list: Any = None, tensor: Any = None, group: Group = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """The values of all ranks, in their order, on all of them: all_gather(list, tensor), or list = all_gather(tensor).

    Args:
        tensor_list: a list of one Tensor or array per rank, which are overwritten. Without it, a new list is returned:
            `all_gather(tensor, group, async_op)`.
        tensor: of the same shape and dtype on all ranks.
        out: in the second form, a list as in the first, or an array (ranks, ...), that takes them.

    Returns the list, or `out`, or a Work.
    """
    listed = isinstance(tensor_list, (list, tuple))
    if not listed and tensor_list is not None and (tensor is None or isinstance(tensor, ProcessGroup)):
        tensor_list, tensor, group, async_op = None, tensor_list, *_shifted(tensor, group, async_op)
    comm = yield group, async_op
    if tensor is None or (tensor_list is not None and not listed):
        raise ShapeError(
            "[dist] all_gather: write all_gather(list, tensor), values = all_gather(tensor), or "
            "all_gather_into_tensor(array, tensor)"
        )
    a = _array(tensor, "all_gather")
    into = tensor_list if listed else out
    if into is not None and not isinstance(into, (list, tuple)):
        place = _Place(into, "all_gather", (comm.size, *a.shape), a.dtype)
        return place.filled((yield comm.all_gather(a, place.memory, wait=False)))
    places = into and _places(into, "all_gather", comm.size, a.shape, a.dtype)
    return _listed(tensor, places, into, (yield comm.all_gather(a, wait=False)))


def _listed(like: Any, places: Sequence[_Place] | None, values: Any, rows: Sequence[np.ndarray] | None) -> Any:
    """The rows of a result as a list of what `like` is, or put into `values`, whose places these are."""
    if places is None or rows is None:
        return None if rows is None else [_like(like, row) for row in rows]
    for place, row in zip(places, rows, strict=True):
        place.put(row)
    return values


@collective
def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False) -> Any:
    """The values of all ranks, in `output_tensor`: one below the other or stacked, as its shape says."""
    comm = yield group, async_op
    a, place = _array(input_tensor, "all_gather_into_tensor"), _Place(output_tensor, "all_gather_into_tensor")
    rows = _rows(place.memory, a.shape, comm.size, "all_gather_into_tensor")
    return place.filled((yield comm.all_gather(a, rows, wait=False)))


@collective
def gather(
    tensor: Any, gather_list: Any = None, dst: int | Group = 0, group: Group = None, async_op: bool = False
) -> Any:
    """The values of all ranks as a list, on world rank `dst`; None elsewhere.

    `gather_list` of one tensor or array per rank, on `dst` only, is overwritten and returned; without it the list is
    new, and `gather(tensor, dst, group, async_op)` will do.
    """
    if isinstance(gather_list, (int, np.integer)):
        dst, gather_list, group, async_op = gather_list, None, *_shifted(dst, group, async_op)
    comm = yield group, async_op
    root = joined(group)._place("gather to rank", dst)
    a, places = _array(tensor, "gather"), None
    if gather_list is not None:
        if comm.rank != root:
            raise ShapeError(f"[dist] gather: gather_list is given on a rank other than {dst}; leave it out there")
        places = _places(gather_list, "gather", comm.size, a.shape, a.dtype)
    return _listed(tensor, places, gather_list, (yield comm.gather(a, root, wait=False)))


@collective
def scatter(
    tensor: Any = None,
    scatter_list: Any = None,
    src: int | Group = 0,
    group: Group = None,
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

    Returns `tensor` or `out`; else a tensor if `src` gave tensors, or an array (a piece of a list of numbers is an
    array of no axes).
    """
    if isinstance(scatter_list, (int, np.integer)):
        src, scatter_list, group, async_op = scatter_list, None, *_shifted(src, group, async_op)
    comm = yield group, async_op
    root = joined(group)._place("scatter from rank", src)
    pieces, into = scatter_list, tensor if out is None else out
    if scatter_list is None and (comm.rank == root or isinstance(tensor, (list, tuple))):
        pieces, into = tensor, out
    elif comm.rank != root and scatter_list is not None:
        raise ShapeError(f"[dist] scatter: scatter_list is given on a rank other than {src}; give None there")
    kind, rows = np.zeros(1, np.uint8), None
    if comm.rank == root:
        if pieces is None:
            raise ShapeError(f"[dist] scatter: rank {src} gives None; give it a list of {comm.size}, one per rank")
        kind[0] = any(isinstance(t, Tensor) for t in (pieces if isinstance(pieces, (list, tuple)) else [pieces]))
        rows = _stacked(pieces, comm.size, "scatter")
        if not rows.ndim or len(rows) != comm.size:
            raise ShapeError(
                f"[dist] scatter of shape {rows.shape} from rank {src}; give a list of {comm.size}, one per rank"
            )
    place = None if into is None else _Place(into, "scatter", *(() if rows is None else (rows.shape[1:], rows.dtype)))
    kinds = comm.broadcast(kind, root, wait=False)  # whether it is tensors, which the others cannot know
    piece = yield comm.scatter(rows, root, None if place is None else place.memory, wait=False)
    kinds.wait()
    made = make(Block(piece), piece.shape, "rows", piece.dtype) if kind[0] else piece
    return made if place is None else place.filled()


@collective
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
    comm = yield group, async_op
    if wrong:
        raise ShapeError(
            f"[dist] reduce_scatter of a {type(op).__name__}; write reduce_scatter(output, list), "
            "piece = reduce_scatter(tensor), or reduce_scatter_tensor(output, tensor)"
        )
    a, place = _stacked(input_list, comm.size, "reduce_scatter"), None
    listed = isinstance(input_list, (list, tuple))
    if output is not None and (listed or (a.ndim and not a.shape[0] % comm.size)):  # else refused below
        rows = () if listed else (a.shape[0] // comm.size,)
        place = _Place(output, "reduce_scatter", (*rows, *a.shape[1:]), a.dtype)
    piece = yield comm.reduce_scatter(a, op, wait=False)
    if place is not None:
        return place.put(piece)
    return _like(input_list[0], piece[0]) if listed else _like(input_list, piece)


@collective
def reduce_scatter_tensor(
    output: Any, input: Any, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Piece r of the combined `input` of all ranks, in `output` of rank r. Pieces lie one below another, or stacked."""
    comm = yield group, async_op
    a, place = _array(input, "reduce_scatter_tensor"), _Place(output, "reduce_scatter_tensor")
    rows = _rows(a, place.array.shape, comm.size, "reduce_scatter_tensor")
    if a.dtype != place.array.dtype:
        raise ShapeError(f"[dist] reduce_scatter_tensor of {a.dtype} into {place.array.dtype}; give one dtype")
    return place.put((yield comm.reduce_scatter(rows, op, wait=False)))


@collective
def all_to_all(
    output_tensor_list: Any, input_tensor_list: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Item p of the input goes to rank p; item p of the output came from rank p.

    all_to_all(outputs, inputs): lists of one tensor or array per rank, of any shapes; `outputs` is overwritten and
    returned. outputs = all_to_all(inputs, group, async_op): inputs of one shape; an array or tensor of as many rows as
    ranks does as well, and then the result is one too.
    """
    outputs, inputs = output_tensor_list, input_tensor_list
    if not isinstance(inputs, (list, tuple)):
        comm = yield _shifted(inputs, group, async_op)
        if not isinstance(inputs, (ProcessGroup, type(None))):
            raise ShapeError("[dist] all_to_all takes two lists, or one; for arrays there is all_to_all_single")
        rows = yield comm.all_to_all(_stacked(outputs, comm.size, "all_to_all"), wait=False)
        return _listed(outputs[0], None, None, rows) if isinstance(outputs, (list, tuple)) else _like(outputs, rows)
    comm = yield group, async_op
    if not isinstance(outputs, (list, tuple)) or not len(outputs) == len(inputs) == comm.size:
        raise ShapeError(f"[dist] all_to_all takes two lists of {comm.size}, one for each rank of the group")
    places = _places(outputs, "all_to_all", comm.size)
    arrays = [_array(t, "all_to_all") for t in inputs]
    dtypes = {a.dtype for a in arrays} | {p.array.dtype for p in places}
    if len(dtypes) > 1:
        raise ShapeError(f"[dist] all_to_all of {', '.join(sorted(map(str, dtypes)))}; give one dtype")
    counts = [p.array.size for p in places]
    sent, received = np.concatenate([a.reshape(-1) for a in arrays]), np.empty(sum(counts), arrays[0].dtype)
    yield comm.all_to_all_v(sent, [a.size for a in arrays], received, counts, wait=False)
    return _listed(None, places, outputs, np.split(received, np.cumsum(counts)[:-1]))


@collective
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sizes = None,
    input_split_sizes: Sizes = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Rows of `input` to ranks 0, 1, ..., and theirs into `output`; as many each as the sizes say, or equally many."""
    comm = yield group, async_op
    a, place = _array(input, "all_to_all_single"), _Place(output, "all_to_all_single")
    if a.dtype != place.array.dtype or a.shape[1:] != place.array.shape[1:] or not (a.ndim and place.array.ndim):
        raise ShapeError(
            f"[dist] all_to_all_single of {a.dtype} {a.shape} into {place.array.dtype} {place.array.shape}; give "
            "one dtype, and rows of one shape"
        )
    row, counts = math.prod(a.shape[1:]), []
    for name, array, sizes in (("input", a, input_split_sizes), ("output", place.array, output_split_sizes)):
        given = list(sizes) if sizes else [len(array) // comm.size] * comm.size
        if len(given) != comm.size or sum(given) != len(array):
            raise ShapeError(
                f"[dist] all_to_all_single: {name} of {len(array)} rows is cut into {given} for {comm.size} ranks; "
                f"give {name}_split_sizes of one per rank that add up to the rows"
            )
        counts.append([n * row for n in given])
    return place.filled((yield comm.all_to_all_v(a, counts[0], place.memory, counts[1], wait=False)))


@collective
def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Waits until all ranks of the group are here."""
    comm = yield group, async_op
    yield comm.barrier(wait=False)


def send(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> None:
    """Sends to world rank `dst`. May wait until it is received: in a ring, use isend or irecv."""
    isend(tensor, dst, group, tag).wait()


def isend(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> Work:
    """`send`, not waited for; the tensor must stay as it is until the Work is complete."""
    g = joined(group)
    comm, array = g._member("send"), _array(tensor, "send")
    return Work(comm.send(array, g._place("send to rank", dst), tag, wait=False), lambda _: None)


def recv(tensor: Any, src: int, group: Group = None, tag: int = 0) -> Any:
    """Receives what world rank `src` sent with this tag into a Tensor or array, and returns it.

    Raises CollectiveError if what was sent has another dtype or number of elements."""
    return irecv(tensor, src, group, tag).wait()


def irecv(tensor: Any, src: int, group: Group = None, tag: int = 0) -> Work:
    """`recv`, not waited for."""
    g = joined(group)
    comm, place = g._member("recv"), _Place(tensor, "recv")
    return Work(comm.recv(place.memory, g._place("recv from rank", src), tag, wait=False), place.filled)


@collective
def metric_average(value: Any, name: str = "metric", weight: float = 1.0, group: Group = None) -> float:
    """The mean of a number over the ranks, weighted: sum of value * weight / sum of weight, the same on all ranks.

    Args:
        value: a number, or a tensor or array of one element.
        name: of the metric; must be the same on all ranks, so that a loss is not averaged with an accuracy.
        weight: of this rank, at least 0: its number of samples, say. A rank without samples gives 0, and its value is
            not looked at.

    Returns the mean; NaN if all weights are 0. Added up exactly, so it does not depend on the order of ranks.

    Raises CollectiveError: another rank averages another metric.
    """
    comm = yield group, False
    check_number("[dist] metric_average: weight", weight, 0)
    a = _array(value, "metric_average")
    if a.size != 1:
        raise ShapeError(f"[dist] metric_average of shape {a.shape}; give one number")
    number = float(a.reshape(-1)[0]) if weight else 0.0
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")  # exact in float64
    rows = yield comm.all_gather(np.array([number, weight, digest], np.float64), wait=False)
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
