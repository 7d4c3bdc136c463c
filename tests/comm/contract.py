"""What every communicator must do, written once: each case is run on every rank of a group, over
every backend.

A case is a function of a communicator; it asserts on its own rank and leaves the group in step.
test_backends.py runs them on threads, contract_ranks.py under a launcher.
"""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

from odyssey.comm import DTYPES, Communicator, ReduceOp, bfloat16
from odyssey.comm.calls import narrow, widen
from odyssey.errors import CollectiveError, ConfigError, ShapeError

CASES = {}

SHAPES = ((), (1,), (5,), (2, 3), (0,), (3, 0, 2))
NUMPY = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def case(function):
    CASES[function.__name__] = function
    return function


def array(dtype: np.dtype, shape, rank: int) -> np.ndarray:
    """Small numbers that differ by rank and element, exact in every dtype, also when multiplied
    over 4 ranks.
    """
    x = (np.arange(int(np.prod(shape))) + rank) % 3 + 1
    return cast(x.reshape(shape), dtype)


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == bfloat16:
        return narrow(np.asarray(x, np.float32), np.empty(np.shape(x), bfloat16))
    return np.asarray(x).astype(dtype)


def number(x: np.ndarray) -> np.ndarray:
    return widen(x) if x.dtype == bfloat16 else x


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.tobytes() == np.ascontiguousarray(b).tobytes()
    )


def everyone(c: Communicator, dtype, shape) -> list[np.ndarray]:
    return [array(dtype, shape, p) for p in range(c.size)]


def combined(c: Communicator, dtype, shape, op: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = NUMPY[op](np.stack([number(a) for a in everyone(c, dtype, shape)]), axis=0)
    return cast(x, dtype)


# --- place ----------------------------------------------------------------------------------------


@case
def place_in_the_group(c):
    assert 0 <= c.rank < c.size == len(c.ranks) == len(set(c.ranks))
    assert 0 <= c.local_rank < c.local_size <= c.size
    assert c.name in c.why and "\n" not in c.why
    assert c.all_gather(np.array(c.ranks[c.rank])).tolist() == list(c.ranks)
    assert f"rank {c.rank} of {c.size}" in repr(c)


@case
def barriers(c):
    for _ in range(3):
        c.barrier()
    request = c.barrier(wait=False)
    assert request.wait() is None and request.wait() is None and request.test()


# --- one to all, all to one -----------------------------------------------------------------------


@case
def broadcast_of_every_dtype_shape_and_root(c):
    for dtype, shape in itertools.product(DTYPES.values(), SHAPES):
        for root in range(c.size):
            a = array(dtype, shape, c.rank)
            assert c.broadcast(a, root) is a
            assert equal(a, array(dtype, shape, root))


@case
def reduce_with_every_op_dtype_and_root(c):
    for dtype, op in itertools.product(DTYPES.values(), NUMPY):
        for root in range(c.size):
            result = c.reduce(array(dtype, (2, 3), c.rank), op, root)
            assert (
                result is None if c.rank != root else equal(result, combined(c, dtype, (2, 3), op))
            ), (dtype, op)
    for shape in SHAPES:
        a = array(np.dtype("float32"), shape, c.rank)
        result = c.reduce(a, "sum", c.size - 1, out=a)
        if c.rank == c.size - 1:
            assert result is a and equal(a, combined(c, a.dtype, shape, "sum"))
        else:
            assert result is None and equal(a, array(a.dtype, shape, c.rank))


@case
def all_reduce_with_every_op_dtype_and_shape(c):
    for dtype, op, shape in itertools.product(DTYPES.values(), NUMPY, SHAPES):
        a = array(dtype, shape, c.rank)
        result = c.all_reduce(a, op)
        assert result is not a and equal(result, combined(c, dtype, shape, op)), (dtype, op, shape)
        assert equal(a, array(dtype, shape, c.rank))
        out = np.zeros(shape, dtype)
        assert c.all_reduce(a, ReduceOp(op), out=out) is out and equal(out, result)
        assert c.all_reduce(a, op, out=a) is a and equal(a, result)


@case
def means_of_floats_only(c):
    for dtype in DTYPES.values():
        a = array(dtype, (4,), c.rank)
        if dtype.kind in "iu":
            for call in (c.all_reduce, c.reduce, c.reduce_scatter):
                with pytest.raises(ConfigError, match="mean of"):
                    call(a, "mean")
            continue
        x = np.sum(np.stack([number(b) for b in everyone(c, dtype, (4,))]), axis=0)
        wanted = cast(
            x / x.dtype.type(c.size) if dtype.itemsize > 2 else np.float32(x) / np.float32(c.size),
            dtype,
        )
        for op in ("mean", "average", "avg", ReduceOp.MEAN, ReduceOp.AVERAGE):
            assert equal(c.all_reduce(a, op), wanted), dtype
        root = c.reduce(a, "mean", 0)
        assert root is None if c.rank else equal(root, wanted)
        rows = np.repeat(a[None], c.size, 0)
        assert equal(c.reduce_scatter(rows, "mean")[0], wanted)
        assert c.all_reduce(a, "mean", out=a) is a and equal(a, wanted)


@case
def sixteen_bits_are_added_in_float32(c):
    """1 + 2^-11 + ... : in float16 every addition would round the small terms away."""
    for dtype, small in ((np.dtype(np.float16), 2.0**-11), (bfloat16, 2.0**-8)):
        a = cast(np.array([1.0 if c.rank == 0 else small]), dtype)
        assert equal(c.all_reduce(a), cast(np.array([1 + small * (c.size - 1)], np.float32), dtype))
    big = np.full(2, 60000, np.float16)
    assert np.isinf(c.all_reduce(big)).all() == (c.size > 1)
    nan = cast(np.array([np.nan, 1]), bfloat16)
    assert np.isnan(widen(c.all_reduce(nan))).tolist() == [True, False]


@case
def scatter_to_ranks_that_know_the_shape_or_do_not(c):
    for dtype, shape in itertools.product(DTYPES.values(), SHAPES):
        for root in range(c.size):
            rows = np.stack(everyone(c, dtype, shape)) if c.rank == root else None
            assert equal(c.scatter(rows, root), array(dtype, shape, c.rank))
            out = np.zeros(shape, dtype) if (c.rank + root) % 2 else None
            result = c.scatter(rows, root, out)
            assert (out is None or result is out) and equal(result, array(dtype, shape, c.rank))
    with pytest.raises(ShapeError, match="rows, one per rank"):
        if c.rank == 0:
            c.scatter(np.zeros((c.size + 1, 2)), 0)
        else:
            raise ShapeError("rows, one per rank")  # only the root gives an array
    with pytest.raises(ShapeError, match="gives None"):
        c.scatter(None, c.rank)


@case
def gather_and_all_gather(c):
    for dtype, shape in itertools.product(DTYPES.values(), SHAPES):
        a, wanted = array(dtype, shape, c.rank), np.stack(everyone(c, dtype, shape))
        assert equal(c.all_gather(a), wanted)
        out = np.zeros((c.size, *shape), dtype)
        assert c.all_gather(a, out) is out and equal(out, wanted)
        for root in range(c.size):
            result = c.gather(a, root)
            assert result is None if c.rank != root else equal(result, wanted)
    out[c.rank] = a
    assert c.all_gather(out[c.rank], out) is out and equal(out, wanted)  # a row of out itself


# --- all to all -----------------------------------------------------------------------------------


@case
def reduce_scatter_gives_each_rank_its_rows(c):
    for dtype, op in itertools.product(DTYPES.values(), NUMPY):
        for shape in ((c.size,), (2 * c.size, 3), (0, 2), (c.size, 0)):
            n = shape[0] // c.size
            wanted = combined(c, dtype, shape, op)[c.rank * n : (c.rank + 1) * n]
            a = array(dtype, shape, c.rank)
            assert equal(c.reduce_scatter(a, op), wanted), (dtype, op, shape)
            out = np.zeros(wanted.shape, dtype)
            assert c.reduce_scatter(a, op, out=out) is out and equal(out, wanted)
    if c.size > 1:
        for shape in ((), (c.size + 1,)):
            with pytest.raises(ShapeError, match="do not divide"):
                c.reduce_scatter(np.zeros(shape))


@case
def all_to_all_exchanges_rows(c):
    for dtype, shape in itertools.product(DTYPES.values(), SHAPES):
        a = np.stack([array(dtype, shape, 10 * c.rank + p) for p in range(c.size)])
        wanted = np.stack([array(dtype, shape, 10 * p + c.rank) for p in range(c.size)])
        assert equal(c.all_to_all(a), wanted)
        out = np.zeros_like(a)
        assert c.all_to_all(a, out) is out and equal(out, wanted)
        assert c.all_to_all(a, a) is a and equal(a, wanted)
    with pytest.raises(ShapeError, match="rows, one per rank"):
        c.all_to_all(np.zeros(c.size + 1))


@case
def all_to_all_v_with_counts_that_differ(c):
    for dtype in DTYPES.values():
        counts = [0 if p == c.rank and c.size > 1 else c.rank + p + 1 for p in range(c.size)]
        send = np.concatenate([array(dtype, (n,), 10 * c.rank + p) for p, n in enumerate(counts)])
        wanted = np.concatenate([array(dtype, (n,), 10 * p + c.rank) for p, n in enumerate(counts)])
        receive = np.zeros(len(send) + 2, dtype)
        assert c.all_to_all_v(send, counts, receive, counts) is None
        assert equal(receive[:-2], wanted) and equal(receive[-2:], np.zeros(2, dtype))
    # one sends to nobody, one receives from nobody
    give = [2 if c.rank == 0 and p == c.size - 1 else 0 for p in range(c.size)]
    take = [2 if c.rank == c.size - 1 and p == 0 else 0 for p in range(c.size)]
    receive = np.zeros(sum(take))
    c.all_to_all_v(np.arange(sum(give)) + 1.0, give, receive, take)
    assert receive.tolist() == [1.0, 2.0][: sum(take)]
    c.all_to_all_v(np.zeros(0), [0] * c.size, np.zeros(0), [0] * c.size)
    for wrong in ([1] * (c.size + 1), [-1] * c.size, [9] * c.size):
        with pytest.raises(ShapeError, match="one count per rank"):
            c.all_to_all_v(np.zeros(3), wrong, np.zeros(3), wrong)


@case
def all_gather_v_fills_in_place(c):
    bounds = np.cumsum([1, *(3 * p for p in range(c.size))])
    ranges = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    for order in (ranges, ranges[::-1]):
        for dtype in DTYPES.values():
            a = array(dtype, (2, int(bounds[-1]) + 1), 0)
            wanted = a.copy()
            for p, (lo, hi) in enumerate(order):
                wanted.reshape(-1)[lo:hi] = array(dtype, (hi - lo,), p + 1)
            lo, hi = order[c.rank]
            a.reshape(-1)[lo:hi] = array(dtype, (hi - lo,), c.rank + 1)
            assert c.all_gather_v(a, order) is None
            assert equal(a, wanted)
    c.all_gather_v(np.zeros(0), [(0, 0)] * c.size)
    for wrong in (
        [(0, 1)] * (c.size + 1),
        [(0, 9)] * c.size,
        [(2, 1)] * c.size,
        [(0, 2)] + [(1, 2)] * c.size,
    ):
        with pytest.raises(ShapeError, match="without overlap"):
            c.all_gather_v(np.zeros(3), wrong)


@case
def all_gather_each_takes_any_lengths(c):
    for lengths in ([p % 3 for p in range(c.size)], [0] * c.size):
        for shape in ((), (2,)):
            own = [array(np.dtype(np.int64), (n, *shape), p) for p, n in enumerate(lengths)]
            assert all(map(equal, c.all_gather_each(own[c.rank]), own))


# --- one to one -----------------------------------------------------------------------------------


def neighbours(c):
    return (c.rank + 1) % c.size, (c.rank - 1) % c.size


@case
def messages_of_every_dtype_around_a_ring(c):
    after, before = neighbours(c)
    for dtype, shape in itertools.product(DTYPES.values(), SHAPES):
        request = c.send(array(dtype, shape, c.rank), after, tag=7, wait=False)
        out = np.zeros(shape, dtype)
        assert c.recv(out, before, tag=7) is out
        assert equal(out, array(dtype, shape, before))
        assert request.wait() is None


@case
def messages_keep_their_order_and_their_tags(c):
    after, before = neighbours(c)
    sends = [
        c.send(np.array([100 * tag + i]), after, tag, wait=False)
        for i in range(3)
        for tag in (0, 5)
    ]
    receives = {
        (tag, i): c.recv(np.zeros(1, np.int64), before, tag, wait=False)
        for tag in (5, 0)
        for i in range(3)
    }
    for (tag, i), request in reversed(receives.items()):
        assert request.wait().tolist() == [100 * tag + i]
        assert request.wait() is request.wait() and request.test()
    for request in sends:
        request.wait()


@case
def large_messages_both_ways_at_once(c):
    after, before = neighbours(c)
    receive = c.recv(np.zeros(300_000, np.float32), before, wait=False)
    send = c.send(np.full(300_000, c.rank, np.float32), after, wait=False)
    gc.collect()
    assert (receive.wait() == before).all()
    send.wait()


@case
def messages_to_oneself(c):
    c.send(np.arange(3), c.rank, 1)
    assert c.recv(np.zeros(3, np.int64), c.rank, 1).tolist() == [0, 1, 2]
    request = c.recv(np.zeros(2), c.rank, wait=False)
    assert not request.test()
    a = np.ones(2)
    c.send(a, c.rank)
    a[:] = 5
    assert request.wait().tolist() == [1, 1]
    with pytest.raises(CollectiveError, match="waits for itself"):
        c.recv(np.zeros(2), c.rank)


@case
def messages_that_do_not_fit_are_errors(c):
    after, before = neighbours(c)
    for wrong in (
        np.zeros(4),
        np.zeros(2),
        np.zeros(3, np.float32),
        np.zeros(3, np.int64),
        np.zeros(0),
    ):
        request = c.send(np.ones(3), after, wait=False)
        with pytest.raises(
            CollectiveError, match=r"sends 3 elements of float64.*contract\.py:\d+"
        ) as caught:
            c.recv(wrong, before)
        assert f"rank {c.ranks[before]} sends" in str(caught.value) and not wrong.any()
        request.wait()
    request = c.send(np.ones(3), after, wait=False)  # and the next one arrives whole
    assert c.recv(np.zeros((3, 1)), before).tolist() == [[1], [1], [1]]
    request.wait()


@case
def wrong_peers_and_tags_are_refused(c):
    for peer in (-1, c.size, "0"):
        with pytest.raises(ConfigError, match="it must be .*from 0"):
            c.send(np.zeros(1), peer)
        with pytest.raises(ConfigError, match="it must be .*from 0"):
            c.recv(np.zeros(1), peer)
        with pytest.raises(ConfigError, match="it must be .*from 0"):
            c.broadcast(np.zeros(1), peer)
    for tag in (-1, 1 << 20):
        with pytest.raises(ConfigError, match="tag"):
            c.send(np.zeros(1), 0, tag)


# --- arrays ---------------------------------------------------------------------------------------


@case
def arrays_that_are_read_may_have_any_layout(c):
    a = np.arange(6).reshape(2, 3).T + c.rank
    wanted = np.stack([np.arange(6).reshape(2, 3).T + p for p in range(c.size)])
    assert equal(c.all_gather(a), wanted)
    assert equal(c.all_reduce(a), wanted.sum(0))
    assert c.all_reduce([1, 2]).tolist() == [c.size, 2 * c.size]
    every = c.all_to_all(np.arange(2 * c.size)[::2])
    assert every.tolist() == [2 * c.rank] * c.size
    after, before = neighbours(c)
    request = c.send(a, after, wait=False)
    assert equal(c.recv(np.zeros((3, 2), np.int64), before), wanted[before])
    request.wait()
    frozen = np.ones(3)
    frozen.flags.writeable = False
    assert c.all_reduce(frozen).tolist() == [c.size] * 3


@case
def arrays_that_are_written_must_be_contiguous(c):
    t = np.zeros((4, 4)).T[:3]
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    after, _ = neighbours(c)
    for call in (
        lambda: c.broadcast(t),
        lambda: c.all_reduce(t, out=t),
        lambda: c.all_reduce(np.zeros(3), out=frozen),
        lambda: c.all_gather_v(t, [(0, 0)] * c.size),
        lambda: c.recv(t, after),
    ):
        with pytest.raises(ShapeError, match="contiguous"):
            call()
    for out in (np.zeros(2), np.zeros(3, np.float32), np.zeros((3, 1))):
        with pytest.raises(ShapeError, match="it must be float64"):
            c.all_reduce(np.zeros(3), out=out)
    with pytest.raises(ShapeError, match="a list"):
        c.broadcast([1, 2])


@case
def other_dtypes_and_operations_are_refused(c):
    for a in (np.zeros(2, bool), np.zeros(2, complex), np.array(["a"]), np.array([None])):
        with pytest.raises(ShapeError, match="it must be one of float32"):
            c.all_reduce(a)
    with pytest.raises(ConfigError, match="'median'; it must be sum, mean, max, min or prod"):
        c.all_reduce(np.zeros(1), "median")


@case
def out_may_overlap(c):
    a = np.arange(2 * c.size + 2.0)
    send, out = a[: 2 * c.size], a[2:]
    wanted = np.arange(2.0 * c.size) * c.size
    assert c.all_reduce(send, out=out) is out and equal(out, wanted)
    a = np.arange(float(c.size))
    assert c.reduce_scatter(a, out=a[:1]).tolist() == [c.rank * c.size]


@case
def megabytes(c):
    n = 1_000_003
    a = np.arange(n, dtype=np.float32) % 7 + c.rank
    assert equal(
        c.all_reduce(a),
        np.float32(c.size) * (np.arange(n, dtype=np.float32) % 7) + sum(range(c.size)),
    )
    assert equal(c.broadcast(a, c.size - 1), np.arange(n, dtype=np.float32) % 7 + c.size - 1)
    assert (c.all_gather(np.full(n, c.rank, np.uint8)) == np.arange(c.size)[:, None]).all()


# --- requests -------------------------------------------------------------------------------------


@case
def every_call_may_be_waited_for_later(c):
    n, r = c.size, c.rank
    a, rows = np.full(3, r + 1.0), np.arange(2.0 * n).reshape(n, 2) + r
    total = n * (n + 1) / 2
    v, w = np.zeros(n), np.where(np.arange(n) == r, r, -1)
    requests = {
        "broadcast": c.broadcast(np.full(2, r), 0, wait=False),
        "all_reduce": c.all_reduce(a, wait=False),
        "reduce": c.reduce(a, "max", 0, wait=False),
        "scatter": c.scatter(rows if r == 0 else None, 0, wait=False),
        "barrier": c.barrier(wait=False),
        "gather": c.gather(a, n - 1, wait=False),
        "all_gather": c.all_gather(a, wait=False),
        "reduce_scatter": c.reduce_scatter(rows, "min", wait=False),
        "all_to_all": c.all_to_all(rows, wait=False),
        "all_to_all_v": c.all_to_all_v(np.full(n, r + 1.0), [1] * n, v, [1] * n, wait=False),
        "all_gather_v": c.all_gather_v(w, [(p, p + 1) for p in range(n)], wait=False),
    }
    got = {name: requests[name].wait() for name in reversed(requests)}
    assert got["broadcast"].tolist() == [0, 0] and got["all_reduce"].tolist() == [total] * 3
    assert got["reduce"] is None if r else got["reduce"].tolist() == [n] * 3
    assert got["scatter"].tolist() == [2 * r, 2 * r + 1]
    assert (
        got["gather"] is None
        if r != n - 1
        else got["gather"][:, 0].tolist() == list(range(1, n + 1))
    )
    assert got["all_gather"][:, 0].tolist() == list(range(1, n + 1))
    assert got["reduce_scatter"].tolist() == [[2 * r, 2 * r + 1]]
    assert got["all_to_all"].tolist() == [[2 * r + p, 2 * r + 1 + p] for p in range(n)]
    assert v.tolist() == list(range(1, n + 1)) and w.tolist() == list(range(n))
    assert all(request.test() for request in requests.values())


@case
def requests_complete_out_of_order(c):
    requests = [c.all_reduce(np.full(i + 1, i + c.rank), wait=False) for i in range(20)]
    between = c.all_gather(np.array([c.rank]))  # a blocking call while others are under way
    assert between.ravel().tolist() == list(range(c.size))
    # each rank waits in an order of its own
    order = range(20) if c.rank % 2 else reversed(range(20))
    for i in order:
        result = requests[i].wait()
        assert result.tolist() == [sum(i + p for p in range(c.size))] * (i + 1)
        assert requests[i].wait() is result
    request = c.all_reduce(np.ones(1000), wait=False)
    while not request.test():
        pass
    assert request.wait()[0] == c.size


@case
def requests_own_their_buffers(c):
    requests = [c.all_reduce(np.full(50_000, float(i)), wait=False) for i in range(5)]
    gc.collect()
    # would take the place of buffers that were let go
    other = [np.full(50_000, -1.0) for _ in range(10)]
    for i, request in enumerate(requests):
        assert (request.wait() == i * c.size).all()
    assert all((o == -1).all() for o in other)


@case
def calls_made_again_and_again(c):
    """Persistent calls: each time with what is in the arrays then; several under way, and other
    calls between them.
    """
    n, r = c.size, c.rank
    for dtype, piece in ((np.float32, 3), (np.float64, 40_000), (np.uint16, 1)):
        # so much goes to rank p, from all
        counts = [0 if p == n - 1 and n > 1 else piece + p for p in range(n)]
        send, receive = np.zeros(sum(counts), dtype), np.zeros(counts[r] * n, dtype)
        ranges = [(10 * p, 10 * p + (p % 2 == 0) * piece % 10) for p in range(n)]
        whole = np.zeros(10 * n, dtype)
        out = c.all_to_all_v_init(send, counts, receive, [counts[r]] * n)
        back = c.all_gather_v_init(whole, ranges)
        for turn in range(4):
            send[:] = np.repeat(np.arange(n), counts) + 10 * r + turn
            whole[:] = r + turn
            requests = [out.start(), c.all_reduce(np.ones(2), wait=False), back.start()]
            for request in reversed(requests) if turn % 2 else requests:
                request.wait()
            assert requests[0].test() and requests[2].wait() is None
            assert receive.tolist() == [
                r + 10 * p + turn for p in range(n) for _ in range(counts[r])
            ]
            for p, (a, b) in enumerate(ranges):
                assert (whole[a:b] == p + turn).all() and (whole[b : 10 * p + 10] == r + turn).all()
    with pytest.raises(ShapeError, match="send_counts are"):
        c.all_to_all_v_init(send, [len(send) + 1] * n, receive, [counts[r]] * n)
    both = np.zeros(4 * n, np.float32)
    # of a copy only the first values would be sent
    for refused in (both[::2], both[1 : 2 * n + 1], both.tolist()):
        with pytest.raises(
            ShapeError, match="send must be a C-contiguous array, apart from receive"
        ):
            c.all_to_all_v_init(refused, [1] * n, both[: 2 * n], [1] * n)
    with pytest.raises(ShapeError, match="ranges are"):
        c.all_gather_v_init(whole, [(0, len(whole) + 1)] * n)
    del out, back
    gc.collect()
    c.barrier()


def groups(world: Communicator) -> dict[str, Communicator]:
    """What the cases run on: all ranks, those of the same parity, each alone."""
    return {
        "world": world,
        "split": world.split(world.rank % 2, key=-world.rank),
        "single": world.split(world.rank),
    }


def run(world: Communicator, report) -> None:
    """Runs every case on every group; report(group, case, error or None) on every rank."""
    for name, group in groups(world).items():
        for title, function in CASES.items():
            try:
                function(group)
                error = None
            except (Exception, pytest.fail.Exception) as e:
                error = e
            report(name, title, error)
            if world._broken is not None or group._broken is not None:
                return
        world.barrier()


@case
def a_receive_that_was_started_lets_its_sender_go_on(c):
    """Every rank posts a receive, then sends in a way that waits: a ring of long messages, too
    long to be buffered.
    """
    x = np.full(300_000, c.rank, np.float32)
    got = np.zeros_like(x)
    if c.size == 1:
        return
    request = c.recv(got, (c.rank - 1) % c.size, 9, wait=False)
    c.send(x, (c.rank + 1) % c.size, 9)
    request.wait()
    assert (got == (c.rank - 1) % c.size).all()
