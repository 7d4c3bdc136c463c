"""Collectives and messages between the ranks of a group, on tensors, arrays and numbers.

The names are those of torch.distributed and mean the same: what is given is overwritten with the
result, and returned. A number, which cannot be overwritten, comes back as a number. An argument
that is refused on one rank is an error on all of them. The backend of torch.distributed and
Horovod's names (torch/) call these functions. What it is not: the converter of values (values.py),
a group (groups.py), or a transport (comm/).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..comm import Communicator, ReduceOp, Request
from ..core.program import OwnMemory
from ..core.tensor import Tensor, make
from ..errors import CollectiveError, ConfigError, ShapeError, check_number
from .groups import ProcessGroup, joined
from .values import NUMBERS, Place, array_of, in_place, like, operation, places, rows, stacked

__all__ = [
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_mean",
    "all_reduce_sum",
    "all_reduce_sum_group",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "calling",
    "gather",
    "irecv",
    "isend",
    "metric_average",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

Group = ProcessGroup | None  # None: the world
Op = ReduceOp | str
Sizes = Sequence[int] | None


class Work:
    """A collective or message under way (async_op=True).

    Its arguments must stay as they are until `wait()`.
    """

    def __init__(
        self, request: Request, finish: Callable[[Any], Any] = lambda result: result
    ) -> None:
        self._request = request
        self._finish = finish
        self._finished = False
        self._result = None

    def wait(self) -> Any:
        """Waits and returns what the blocking form does; the same again if called again.

        Raises CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        result = self._request.wait()  # which raises again what it has raised
        if not self._finished:
            self._result = self._finish(result)
            self._finished = True
        return self._result

    @property
    def source(self) -> int:
        """The place in the group of the rank from which a message came."""
        return self._request.source

    def is_completed(self) -> bool:
        """Returns True if it is over, the result in its place or lost; also makes progress."""
        over = self._request.test()
        if over:
            with contextlib.suppress(CollectiveError):
                self.wait()  # what has no contiguous memory is written here
        return over

    result = wait

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Returns the work that ends with `finish` of this one's result; this one is not to be
        used any more.
        """
        return Work(self._request, lambda value: finish(self._finish(value)))


class calling:
    """`with calling(group, what) as comm:` gives the group's communicator; an argument that is
    refused inside, before the call is made, is an error on the other ranks as well.
    """

    def __init__(self, group: ProcessGroup | None, what: str) -> None:
        self._comm = joined(group)._member(what)
        self._call_name = what

    def __enter__(self) -> Communicator:
        return self._comm

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (ConfigError, ShapeError)):
            self._comm.refuse(self._call_name, str(error))


def _make_call(
    later: bool, finish: Callable[[Any], Any], call: Callable[..., Any], *arguments: Any
) -> Any:
    """Calls a method of a communicator, and returns `finish(result)`.

    later: returns a Work instead, whose result that is.
    """
    request = call(*arguments, wait=not later)
    return Work(request, finish) if later else finish(request)


def _shift_arguments(previous_argument: Any, group: Any, async_op: bool) -> tuple[Any, bool]:
    """Returns (group, async_op) of a call with one positional argument fewer than PyTorch's.

    In such a call each of the two may be one place further left: `group` in the place of
    `previous_argument`, and `async_op` in the place of `group`.
    """
    if isinstance(group, bool):
        async_op = group
        group = None
    return previous_argument if isinstance(previous_argument, ProcessGroup) else group, async_op


def all_reduce(
    tensor: Any,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks combined, on all of them: `tensor` is overwritten and returned.

    Args:
        tensor: Tensor or array of any strides, of the same shape and dtype on all ranks; or a
            number.
        op: ReduceOp.SUM, MEAN (= AVERAGE = AVG), MAX, MIN or PROD, or its name. The mean of
            integers is refused.
        group: a group of ranks; the world by default.
        async_op: return a `Work` at once.
        out: Tensor or array that takes the result; `tensor` is then left as it is.

    Returns `tensor`, or `out`; a new number for a number; or a Work.

    Raises CollectiveError: a rank calls something else. ShapeError, ConfigError: an argument is not
    allowed.
    """
    with calling(group, "all_reduce") as comm:
        if out is None and isinstance(tensor, NUMBERS):
            return _make_call(
                async_op, partial(like, tensor), comm.all_reduce, array_of(tensor), op
            )
        a, place = in_place(tensor, out, "all_reduce")
        op = operation(op, tensor, "all_reduce")
        return _make_call(async_op, place.filled, comm.all_reduce, a, op, place.memory)


def all_reduce_sum(tensor: Any, group: Group = None) -> Any:
    """Returns the sum over the ranks as a new value; `tensor` is left as it is."""
    return _combine_copy(tensor, ReduceOp.SUM, group)


all_reduce_sum_group = all_reduce_sum  # which some platforms call so where there is a group


def all_reduce_mean(tensor: Any, group: Group = None) -> Any:
    """Returns the mean over the ranks as a new value; each rank counts the same,
    `metric_average` weights them.
    """
    return _combine_copy(tensor, ReduceOp.MEAN, group)


def _combine_copy(tensor: Any, op: Op, group: Group) -> Any:
    """Returns the values of all ranks combined as a new value."""
    with calling(group, "all_reduce") as comm:
        a = array_of(tensor, "all_reduce")
        op = operation(op, tensor, "all_reduce")
        return _make_call(False, partial(like, tensor), comm.all_reduce, a, op)


def reduce(
    tensor: Any, dst: int = 0, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """The values of all ranks combined: in place and returned on world rank `dst`; elsewhere
    None, nothing written.
    """
    with calling(group, "reduce") as comm:
        root = joined(group)._place("reduce to rank", dst)
        op = operation(op, tensor, "reduce")
        if comm.rank != root or isinstance(tensor, NUMBERS):
            return _make_call(
                async_op, partial(like, tensor), comm.reduce, array_of(tensor, "reduce"), op, root
            )
        a, place = in_place(tensor, None, "reduce")
        return _make_call(async_op, place.filled, comm.reduce, a, op, root, place.memory)


def broadcast(
    tensor: Any, src: int = 0, group: Group = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """The value of world rank `src`, on all ranks: `tensor`, of one shape and dtype there, is
    overwritten and returned; `out` takes the value instead, and `tensor` is left as it is.
    """
    with calling(group, "broadcast") as comm:
        root = joined(group)._place("broadcast from rank", src)
        if out is None and isinstance(tensor, NUMBERS):
            return _make_call(
                async_op, partial(like, tensor), comm.broadcast, np.array(array_of(tensor)), root
            )
        if out is None and comm.rank == root:  # only read
            a = np.asarray(array_of(tensor, "broadcast"), order="C")
            return _make_call(async_op, lambda _: tensor, comm.broadcast, a, root)
        a, place = in_place(tensor, out, "broadcast")
        if comm.rank == root:
            place.memory[...] = a
        return _make_call(async_op, place.filled, comm.broadcast, place.memory, root)


def all_gather(
    tensor_list: Any = None,
    tensor: Any = None,
    group: Group = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks, in their order, on all of them: all_gather(list, tensor), or list
    = all_gather(tensor).

    Args:
        tensor_list: a list of one Tensor or array per rank, which are overwritten. Without it, a
            new list is returned:
            `all_gather(tensor, group, async_op)`.
        tensor: of the same shape and dtype on all ranks.
        out: in the second form, a list as in the first, or an array (ranks, ...), that takes them.

    Returns the list, or `out`, or a Work.
    """
    listed = isinstance(tensor_list, (list, tuple))
    if (
        not listed
        and tensor_list is not None
        and (tensor is None or isinstance(tensor, ProcessGroup))
    ):
        group, async_op = _shift_arguments(tensor, group, async_op)
        tensor = tensor_list
        tensor_list = None
    with calling(group, "all_gather") as comm:
        if tensor is None or (tensor_list is not None and not listed):
            raise ShapeError(
                "[dist] all_gather: write all_gather(list, tensor), values = all_gather(tensor), "
                "or all_gather_into_tensor(array, tensor)"
            )
        into = tensor_list if listed else out
        if into is None or isinstance(into, (list, tuple)):
            a = array_of(tensor, "all_gather")
            return _make_call(
                async_op, _list_rows("all_gather", comm, tensor, a, into), comm.all_gather, a
            )
    return all_gather_into_tensor(into, tensor, group, async_op)


def _list_rows(
    call_name: str, comm: Communicator, value: Any, a: np.ndarray, into: Any
) -> Callable[[Any], Any]:
    """Returns a function that turns the rows of a result into a list.

    into: a list of tensors or arrays that takes the rows; None makes a new list of values of the
        kind of `value`, whose array is `a`.
    """
    if into is None:
        return lambda rows: None if rows is None else [like(value, row) for row in rows]
    return partial(_put_rows, into, places(into, call_name, comm.size, a.shape, a.dtype))


def _put_rows(values: Any, places: Sequence[Place], rows: Sequence[np.ndarray]) -> Any:
    """Puts rows into their places, which are those of `values`; returns these."""
    for place, row in zip(places, rows, strict=True):
        place.put(row)
    return values


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False
) -> Any:
    """The values of all ranks, in `output_tensor`: one below the other or stacked, as its shape
    says.
    """
    with calling(group, "all_gather_into_tensor") as comm:
        a = array_of(input_tensor, "all_gather_into_tensor")
        place = Place(output_tensor, "all_gather_into_tensor", read=False)
        pieces = rows(place.memory, a.shape, comm.size, "all_gather_into_tensor")
        return _make_call(async_op, place.filled, comm.all_gather, a, pieces)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | Group = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """The values of all ranks as a list, on world rank `dst`; None elsewhere.

    `gather_list` of one tensor or array per rank, on `dst` only, is overwritten and returned;
    without it the list is new, and `gather(tensor, dst, group, async_op)` will do.
    """
    if isinstance(gather_list, (int, np.integer)):
        group, async_op = _shift_arguments(dst, group, async_op)
        dst = gather_list
        gather_list = None
    with calling(group, "gather") as comm:
        root = joined(group)._place("gather to rank", dst)
        if gather_list is not None and comm.rank != root:
            raise ShapeError(
                f"[dist] gather: gather_list is given on a rank other than {dst}; leave it out "
                "there"
            )
        a = array_of(tensor, "gather")
        return _make_call(
            async_op, _list_rows("gather", comm, tensor, a, gather_list), comm.gather, a, root
        )


def scatter(
    tensor: Any = None,
    scatter_list: Any = None,
    src: int | Group = 0,
    group: Group = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Piece r of what world rank `src` gives, on rank r: scatter(tensor, list), or tensor =
    scatter(list).

    Args:
        tensor: takes the piece. Without it the piece is new, and `scatter(list, src, group,
            async_op)` will do, where the list may be one tensor or array of as many rows; None on
            the other ranks.
        scatter_list: on `src` only, one tensor or array per rank.
        out: in the second form, takes the piece.

    Returns `tensor` or `out`; else a tensor if `src` gave tensors, or an array (of a list of
    numbers, of no axes).
    """
    if isinstance(scatter_list, (int, np.integer)):
        group, async_op = _shift_arguments(src, group, async_op)
        src = scatter_list
        scatter_list = None
    with calling(group, "scatter") as comm:
        root = joined(group)._place("scatter from rank", src)
        pieces = scatter_list
        into = tensor if out is None else out
        if scatter_list is None and (comm.rank == root or isinstance(tensor, (list, tuple))):
            pieces = tensor
            into = out
        elif comm.rank != root and scatter_list is not None:
            raise ShapeError(
                f"[dist] scatter: scatter_list is given on a rank other than {src}; give None there"
            )
        kind = np.zeros(1, np.uint8)
        stacked_pieces = None
        shape_and_dtype = ()
        if comm.rank == root:
            if pieces is None:
                raise ShapeError(
                    f"[dist] scatter: rank {src} gives None; give it a list of {comm.size}, one "
                    "per rank"
                )
            kind[0] = any(
                isinstance(t, Tensor)
                for t in (pieces if isinstance(pieces, (list, tuple)) else [pieces])
            )
            stacked_pieces = stacked(pieces, comm.size, "scatter")
            shape_and_dtype = (stacked_pieces.shape[1:], stacked_pieces.dtype)
        place = None if into is None else Place(into, "scatter", *shape_and_dtype, read=False)
        request = comm.scatter(
            stacked_pieces, root, None if place is None else place.memory, wait=False
        )
        # whether it is tensors, which the others cannot know
        kinds = comm.broadcast(kind, root, wait=False)

    def finish(piece: np.ndarray) -> Any:
        kinds.wait()
        result = make(OwnMemory(piece), piece.shape, "rows", piece.dtype) if kind[0] else piece
        return result if place is None else place.filled()

    return Work(request, finish) if async_op else finish(request.wait())


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

    reduce_scatter(output, list): `output` is overwritten with the r-th of a list of one per rank,
    and returned. piece = reduce_scatter(tensor, op, group, async_op): rows r * n to (r + 1) * n of
    a tensor or array of (size * n, ...), or the r-th of a list; `out` takes it.
    """
    wrong = not isinstance(input_list, (list, tuple, str, type(None)))
    if not isinstance(input_list, (list, tuple)):
        if input_list is not None:
            op, group, async_op = input_list, *_shift_arguments(op, group, async_op)
        input_list = output
        output = out
    listed = isinstance(input_list, (list, tuple))
    if output is not None and not (listed or wrong):
        return reduce_scatter_tensor(output, input_list, op, group, async_op)
    with calling(group, "reduce_scatter") as comm:
        if wrong:
            raise ShapeError(
                f"[dist] reduce_scatter of a {type(op).__name__}; write reduce_scatter(output, "
                "list), piece = reduce_scatter(tensor), or reduce_scatter_tensor(output, tensor)"
            )
        a = stacked(input_list, comm.size, "reduce_scatter")
        one = input_list[0] if listed else input_list
        place = None
        if output is not None:
            place = Place(output, "reduce_scatter", a.shape[1:], a.dtype, read=False)

        def finish(piece: np.ndarray) -> Any:
            return like(one, piece[0] if listed else piece) if place is None else place.put(piece)

        return _make_call(
            async_op, finish, comm.reduce_scatter, a, operation(op, one, "reduce_scatter")
        )


def reduce_scatter_tensor(
    output: Any, input: Any, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Piece r of the combined `input` of all ranks, in `output` of rank r.

    Pieces lie one below another, or stacked.
    """
    with calling(group, "reduce_scatter_tensor") as comm:
        a = array_of(input, "reduce_scatter_tensor")
        place = Place(output, "reduce_scatter_tensor", read=False)
        pieces = rows(a, place.array.shape, comm.size, "reduce_scatter_tensor")
        op = operation(op, input, "reduce_scatter_tensor")
        return _make_call(
            async_op, place.filled, comm.reduce_scatter, pieces, op, place.memory[None]
        )


def all_to_all(
    output_tensor_list: Any,
    input_tensor_list: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Item p of the input goes to rank p; item p of the output came from rank p.

    all_to_all(outputs, inputs): lists of one tensor or array per rank, of any shapes; `outputs` is
    overwritten and returned. outputs = all_to_all(inputs, group, async_op): inputs of one shape; an
    array or tensor of as many rows as ranks does as well, and then the result is one too.
    """
    outputs = output_tensor_list
    inputs = input_tensor_list
    call_name = "all_to_all"
    if not isinstance(inputs, (list, tuple)):
        of, async_op = _shift_arguments(inputs, group, async_op)
        with calling(of, call_name) as comm:
            if not isinstance(inputs, (ProcessGroup, type(None))):
                raise ShapeError(
                    "[dist] all_to_all takes two lists, or one; for arrays there is "
                    "all_to_all_single"
                )
            a = stacked(outputs, comm.size, call_name)
            listed = isinstance(outputs, (list, tuple))
            if listed:
                finish = _list_rows(call_name, comm, outputs[0], a, None)
            else:
                finish = partial(like, outputs)
            return _make_call(async_op, finish, comm.all_to_all, a)
    with calling(group, call_name) as comm:
        if not isinstance(outputs, (list, tuple)) or not len(outputs) == len(inputs) == comm.size:
            raise ShapeError(
                f"[dist] all_to_all takes two lists of {comm.size}, one for each rank of the group"
            )
        targets = places(outputs, call_name, comm.size)
        arrays = [array_of(t, call_name) for t in inputs]
        dtypes = {a.dtype for a in (*arrays, *(t.array for t in targets))}
        if len(dtypes) > 1:
            raise ShapeError(
                f"[dist] all_to_all of {', '.join(sorted(map(str, dtypes)))}; give one dtype"
            )
        counts = [t.array.size for t in targets]
        sent = np.concatenate([a.reshape(-1) for a in arrays])
        received = np.empty(sum(counts), arrays[0].dtype)

        def finish(_: None) -> Any:
            return _put_rows(outputs, targets, np.split(received, np.cumsum(counts)[:-1]))

        return _make_call(
            async_op, finish, comm.all_to_all_v, sent, [a.size for a in arrays], received, counts
        )


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sizes = None,
    input_split_sizes: Sizes = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Rows of `input` to ranks 0, 1, ..., and theirs into `output`; as many each as the sizes
    say, or equally many.
    """
    with calling(group, "all_to_all_single") as comm:
        a = array_of(input, "all_to_all_single")
        place = Place(output, "all_to_all_single", read=False)
        if (
            a.dtype != place.array.dtype
            or a.shape[1:] != place.array.shape[1:]
            or not (a.ndim and place.array.ndim)
        ):
            raise ShapeError(
                f"[dist] all_to_all_single of {a.dtype} {a.shape} into {place.array.dtype} "
                f"{place.array.shape}; give one dtype, and rows of one shape"
            )
        row = math.prod(a.shape[1:])
        counts = []
        for name, array, sizes in (
            ("input", a, input_split_sizes),
            ("output", place.array, output_split_sizes),
        ):
            row_counts = list(sizes) if sizes else [len(array) // comm.size] * comm.size
            if len(row_counts) != comm.size or sum(row_counts) != len(array):
                raise ShapeError(
                    f"[dist] all_to_all_single: {name} of {len(array)} rows is cut into "
                    f"{row_counts} for {comm.size} ranks; give {name}_split_sizes of one per rank "
                    "that add up to the rows"
                )
            counts.append([n * row for n in row_counts])
        return _make_call(
            async_op, place.filled, comm.all_to_all_v, a, counts[0], place.memory, counts[1]
        )


def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Waits until all ranks of the group are here."""
    with calling(group, "barrier") as comm:
        return _make_call(async_op, lambda _: None, comm.barrier)


def send(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> None:
    """Sends to world rank `dst`. May wait until it is received: in a ring, use isend or irecv."""
    isend(tensor, dst, group, tag).wait()


def isend(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> Work:
    """`send`, not waited for; the tensor must stay as it is until the Work is complete."""
    g = joined(group)
    comm = g._member("send")
    array = array_of(tensor, "send")
    return Work(comm.send(array, g._place("send to rank", dst), tag, wait=False))


def recv(tensor: Any, src: int, group: Group = None, tag: int = 0) -> Any:
    """Receives what world rank `src` sent with this tag into a Tensor or array, and returns it.

    Raises CollectiveError: what was sent has another dtype or number of elements.
    """
    return irecv(tensor, src, group, tag).wait()


def irecv(tensor: Any, src: int, group: Group = None, tag: int = 0) -> Work:
    """`recv`, not waited for."""
    g = joined(group)
    comm = g._member("recv")
    place = Place(tensor, "recv", read=False)
    return Work(
        comm.recv(place.memory, g._place("recv from rank", src), tag, wait=False), place.filled
    )


def metric_average(
    value: Any, name: str = "metric", weight: float = 1.0, group: Group = None
) -> float:
    """The mean of a number over the ranks, weighted: sum of value * weight / sum of weight, the
    same on all ranks.

    Args:
        value: a number, or a tensor or array of one element.
        name: of the metric; must be the same on all ranks, so that a loss is not averaged with an
            accuracy.
        weight: of this rank, at least 0: its number of samples, say. Of a rank that gives 0 the
            value does not matter.

    Returns the mean; NaN if all weights are 0. Added up exactly, so it does not depend on the order
    of ranks.

    Raises CollectiveError: another rank averages another metric.
    """
    with calling(group, "metric_average") as comm:
        check_number("[dist] metric_average: weight", weight, 0)
        a = array_of(value, "metric_average")
        if a.size != 1:
            raise ShapeError(f"[dist] metric_average of shape {a.shape}; give one number")
        number = float(a.reshape(-1)[0]) if weight else 0.0
        # exact in float64
        digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
        everyone = comm.all_gather(np.array([number, weight, digest], np.float64))
    differing_ranks = np.flatnonzero(everyone[:, 2] != everyone[0, 2])
    if len(differing_ranks):
        members = joined(group).ranks
        raise CollectiveError(
            f"[dist] rank {members[comm.rank]} averages {name!r}, but ranks {members[0]} and "
            f"{members[differing_ranks[0]]} name "
            "different metrics; all ranks average the same ones in the same order"
        )
    total = math.fsum(everyone[:, 1])
    if not total:
        return math.nan
    products = everyone[:, 0] * everyone[:, 1]
    return (
        math.fsum(products) / total
        if np.isfinite(products).all()
        else float(products.sum() / total)
    )
