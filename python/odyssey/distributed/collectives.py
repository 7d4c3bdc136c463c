"""Collectives and messages between the ranks of a group, on tensors, arrays and numbers.

What it is not: a group (groups.py), or a transport (comm/): values become arrays here, results what the values were.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..comm import ReduceOp
from ..errors import CollectiveError, ConfigError, ShapeError
from ..program import Block
from ..tensor import Tensor, make
from .groups import ProcessGroup, joined

# --- values ----------------------------------------------------------------------------------------------------------


def _array(value: Any, what: str) -> np.ndarray:
    """A tensor, array or number as an array."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int)):
        return np.asarray(int(value), np.int64)
    if isinstance(value, float):
        return np.asarray(value, np.float64)
    raise ShapeError(f"[dist] {what} of a {type(value).__name__}; give a Tensor, a NumPy array or a number")


def _into(out: Any, what: str) -> np.ndarray | None:
    """The memory of an `out` argument."""
    if out is None or isinstance(out, np.ndarray):
        return out
    if not isinstance(out, Tensor):
        raise ShapeError(f"[dist] {what}: out is a {type(out).__name__}; give a Tensor or a NumPy array")
    if out.layout != "rows":
        raise ShapeError(f"[dist] {what}: out is the result of an op, whose memory is not in rows; give a Tensor(...)")
    return out.data


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as what `value` is: a tensor, an array or a number."""
    if isinstance(value, Tensor):
        return make(Block(array), array.shape, "rows", array.dtype)
    if isinstance(value, np.ndarray) or array.ndim:
        return array
    return array[()] if isinstance(value, np.generic) else array.item()


class Work:
    """A collective or message under way (async_op=True); `wait()` gives what the blocking form returns.

    The arguments must stay as they are until then.
    """

    def __init__(self, wait: Callable[[], Any], test: Callable[[], bool]) -> None:
        self._wait, self._test = wait, test
        self._done = False
        self._result: Any = None

    def wait(self) -> Any:
        """Waits and returns the result; the same again if called again.

        Raises:
            CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        if not self._done:
            self._result = self._wait()
            self._done = True
        return self._result

    def is_completed(self) -> bool:
        """Whether wait() would return, or raise, at once; calling it moves the operation on."""
        return self._done or self._test()


def _go(request: Any, finish: Callable[[Any], Any], async_op: bool) -> Any:
    work = Work(lambda: finish(request.wait()), request.test)
    return work if async_op else work.wait()


# --- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks combined, on all of them.

    Args:
        tensor: of the same shape and dtype on all ranks. It is left as it is, unless it is `out` too.
        op: ReduceOp.SUM, MEAN (= AVERAGE), MAX, MIN or PROD, or its name. The mean of integers is refused.
        group: a group of ranks; the world by default.
        async_op: return a `Work` at once.
        out: Tensor or array that takes the result.

    Returns:
        A new tensor, array or number like `tensor`; or `out`; or a Work.

    Raises:
        CollectiveError: a rank calls something else. ShapeError, ConfigError: an argument is not allowed.
    """
    comm = joined(group)._member("all_reduce")
    a, into = _array(tensor, "all_reduce"), _into(out, "all_reduce")
    request = comm.all_reduce_start(a, op, into)
    return _go(request, lambda r: _like(tensor, r) if out is None else out, async_op)


def all_reduce_sum(tensor: Any, group: ProcessGroup | None = None) -> Any:
    """The sum over the ranks."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def all_reduce_mean(tensor: Any, group: ProcessGroup | None = None) -> Any:
    """The mean over the ranks, each counting the same; `metric_average` weights them."""
    return all_reduce(tensor, ReduceOp.MEAN, group)


def all_reduce_sum_group(tensor: Any, group: ProcessGroup) -> Any:
    """The sum over the ranks of a group."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """The values of all ranks combined, on world rank `dst`; None elsewhere."""
    g = joined(group)
    comm = g._member("reduce")
    request = comm.reduce_start(_array(tensor, "reduce"), op, g._place("reduce to rank", dst))
    return _go(request, lambda r: None if r is None else _like(tensor, r), async_op)


def broadcast(
    tensor: Any, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """The value of world rank `src`, on all ranks. All give the same shape and dtype; `out=tensor` overwrites it."""
    g = joined(group)
    comm = g._member("broadcast")
    a, into = _array(tensor, "broadcast"), _into(out, "broadcast")
    if into is None:
        into = np.array(a, order="C")
    elif out is not tensor:
        if into.shape != a.shape or into.dtype != a.dtype:
            raise ShapeError(
                f"[dist] broadcast: out is {into.dtype} {into.shape}, the value {a.dtype} {a.shape}; make them alike"
            )
        into[...] = a
    request = comm.broadcast_start(into, g._place("broadcast from rank", src))
    return _go(request, lambda r: _like(tensor, r) if out is None else out, async_op)


def all_gather(tensor: Any, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None) -> Any:
    """The values of all ranks, in their order, on all of them.

    Args:
        tensor: of the same shape and dtype on all ranks.
        out: a list of one Tensor or array per rank, or an array (ranks, ...), that takes them.

    Returns:
        A list of one per rank, or `out`, or a Work.
    """
    if isinstance(tensor, (list, tuple)):
        raise ShapeError("[dist] all_gather returns the list: write values = dist.all_gather(tensor), or out=list")
    comm = joined(group)._member("all_gather")
    a = _array(tensor, "all_gather")
    if isinstance(out, (list, tuple)):
        places = [_into(o, "all_gather") for o in out]
        if len(places) != comm.size or any(p.shape != a.shape or p.dtype != a.dtype for p in places):
            raise ShapeError(f"[dist] all_gather: out must be {comm.size} tensors of {a.dtype} {a.shape}, one per rank")
        into = None
    else:
        places, into = [], _into(out, "all_gather")

    def finish(rows: np.ndarray) -> Any:
        for place, row in zip(places, rows, strict=False):
            place[...] = row
        return [_like(tensor, row) for row in rows] if out is None else out

    return _go(comm.all_gather_start(a, into), finish, async_op)


def gather(tensor: Any, dst: int = 0, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """The values of all ranks as a list, on world rank `dst`; None elsewhere."""
    g = joined(group)
    comm = g._member("gather")
    request = comm.gather_start(_array(tensor, "gather"), g._place("gather to rank", dst))
    return _go(request, lambda r: None if r is None else [_like(tensor, row) for row in r], async_op)


def scatter(
    tensors: Any = None, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """Piece r of what world rank `src` gives, on rank r.

    Args:
        tensors: on `src` a list of one tensor or array per rank, or one with as many rows; None on the others.
        out: Tensor or array that takes the piece.

    Returns:
        A tensor if `src` gave tensors, else an array (a piece of a list of numbers is an array of no axes).
    """
    g = joined(group)
    comm = g._member("scatter")
    root = g._place("scatter from rank", src)
    kind = np.zeros(1, np.uint8)
    rows = None
    if comm.rank == root:
        if tensors is None:
            raise ShapeError(f"[dist] scatter: rank {src} gives None; give it a list of {comm.size}, one per rank")
        kind[0] = isinstance(tensors, Tensor) or any(isinstance(t, Tensor) for t in _listed(tensors))
        rows = _stacked(tensors, comm.size, "scatter")
    told = comm.broadcast_start(kind, root)  # whether it is tensors, which the others cannot know
    request = comm.scatter_start(rows, root, _into(out, "scatter"))

    def finish(piece: np.ndarray) -> Any:
        told.wait()
        if out is not None:
            return out
        return make(Block(piece), piece.shape, "rows", piece.dtype) if kind[0] else piece

    return _go(request, finish, async_op)


def reduce_scatter(
    tensor: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Rows r * n to (r + 1) * n of the combined (size * n, ...) values of all ranks, on rank r.

    A list of one tensor per rank is combined as well; rank r gets the r-th.
    """
    comm = joined(group)._member("reduce_scatter")
    if isinstance(tensor, (list, tuple)):
        first, a = tensor[0] if tensor else None, _stacked(tensor, comm.size, "reduce_scatter")
        request = comm.reduce_scatter_start(a, op)
        return _go(request, lambda r: _given(out, _like(first, r[0]), "reduce_scatter"), async_op)
    request = comm.reduce_scatter_start(_array(tensor, "reduce_scatter"), op, _into(out, "reduce_scatter"))
    return _go(request, lambda r: _like(tensor, r) if out is None else out, async_op)


def all_to_all(tensors: Any, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Item p of a list of one per rank goes to rank p; item p of the result came from rank p.

    An array or tensor of as many rows as ranks does as well; then the result is one too.
    """
    comm = joined(group)._member("all_to_all")
    a = _stacked(tensors, comm.size, "all_to_all")

    def finish(rows: np.ndarray) -> Any:
        if isinstance(tensors, (list, tuple)):
            return [_like(tensors[0], row) for row in rows]
        return _like(tensors, rows)

    return _go(comm.all_to_all_start(a), finish, async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Waits until all ranks of the group are here."""
    comm = joined(group)._member("barrier")
    return _go(comm.barrier_start(), lambda r: None, async_op)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _stacked(values: Any, size: int, what: str) -> np.ndarray:
    """One value per rank as an array of as many rows."""
    if not isinstance(values, (list, tuple)):
        return _array(values, what)
    arrays = [_array(v, what) for v in values]
    if len(arrays) != size or any(a.shape != arrays[0].shape or a.dtype != arrays[0].dtype for a in arrays):
        raise ShapeError(
            f"[dist] {what} of {len(arrays)} values for {size} ranks; give one each, of one shape and dtype"
        )
    return np.stack(arrays)


def _given(out: Any, value: Any, what: str) -> Any:
    """A result, or `out` with it."""
    if out is None:
        return value
    into, a = _into(out, what), _array(value, what)
    if into.shape != a.shape or into.dtype != a.dtype:
        raise ShapeError(f"[dist] {what}: out is {into.dtype} {into.shape}; it must be {a.dtype} {a.shape}")
    into[...] = a
    return out


# --- one to one ------------------------------------------------------------------------------------------------------


def send(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Sends to world rank `dst`. May wait until it is received: in a ring, use isend or irecv."""
    isend(tensor, dst, group, tag).wait()


def isend(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`send`, not waited for; the tensor must stay as it is until the Work is complete."""
    g = joined(group)
    a = _array(tensor, "send")
    return _go(g._member("send").send_start(a, g._place("send to rank", dst), tag), lambda r: None, True)


def recv(tensor: Any, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Receives what world rank `src` sent with this tag into a Tensor or array, and returns it.

    Raises:
        CollectiveError: what was sent has another dtype or number of elements.
    """
    return irecv(tensor, src, group, tag).wait()


def irecv(tensor: Any, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`recv`, not waited for."""
    g = joined(group)
    into = _into(tensor, "recv")
    if into is None:
        raise ShapeError("[dist] recv into nothing; give a Tensor or NumPy array of what is sent")
    return _go(g._member("recv").recv_start(into, g._place("recv from rank", src), tag), lambda r: tensor, True)


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
    if not 0 <= weight < math.inf:
        raise ConfigError(f"[dist] metric_average: weight is {weight!r}; it must be at least 0 and finite")
    a = _array(value, "metric_average")
    if a.size != 1:
        raise ShapeError(f"[dist] metric_average of shape {a.shape}; give one number")
    number = float(a.reshape(-1)[0]) if weight else 0.0
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")  # exact in float64
    rows = comm.all_gather(np.array([number, weight, digest], np.float64))
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
