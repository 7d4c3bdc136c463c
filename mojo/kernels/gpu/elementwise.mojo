"""The loops of kernels/elementwise.mojo on a GPU: one launch each, four floats per thread, shards side by side.

n counts the floats of one shard and may be any number. What neither divides nor has exp or tanh has the bits of the CPU.
"""

from std.math import ceildiv

from max.gpu import block_idx

from ..lanes import F32, LANES, Ptr
from ..op import Device, Of1, Of2, OfNumber, OfRow, OfTerm, Row
from .launch import (
    Enqueue,
    GpuOp,
    Launch,
    Operand,
    Queue,
    StepContextPtr,
    blocks,
    call,
)
from .quads import THREADS, Four, aligned, index, load4, of_shard, store4
from .reduce import tree


struct OnGpu(Device):
    """The maps of a GPU."""

    comptime Run = Enqueue

    @staticmethod
    def map[f: Of1]() -> Self.Run:
        return _enqueue1[f]

    @staticmethod
    def map[f: OfNumber]() -> Self.Run:
        return _enqueue_number[f]

    @staticmethod
    def map[f: Of2]() -> Self.Run:
        return _enqueue2[f]

    @staticmethod
    def rows[f: OfRow, operands: Int]() -> Self.Run:
        return _enqueue_rows[f, operands]

    @staticmethod
    def columns[f: OfTerm, operands: Int]() -> Self.Run:
        return _enqueue_columns[f, operands]


def _enqueue1[f: Of1](q: Queue, r: Launch) raises:
    @always_inline
    def g[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
        return f[w](x)

    _launch[g](q, r.shards, r.op(1), r.op(2), 0, r.int(3))


def _enqueue_number[f: OfNumber](q: Queue, r: Launch) raises:
    _launch[f](q, r.shards, r.op(1), r.op(2), r.float(3), r.int(4))


def _enqueue2[f: Of2](q: Queue, r: Launch) raises:
    _launch2[f](q, r.shards, r.op(1), r.op(2), r.op(3), r.int(4))


# --- one kernel for all -----------------------------------------------------------------


@always_inline
def _same[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return x


def _map[f: OfNumber](y_: Operand, x_: Operand, a: Float32, n_: Int64):
    var n = Int(n_)
    var y = of_shard(y_)
    var x = of_shard(x_)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y) and aligned(x):
        store4(y, i, f[4](load4(x, i), a))
        return
    while i < end:
        y[unsafe_offset=i] = f[1](x[unsafe_offset=i], a)
        i += 1


def _map2[
    f: Of2
](y_: Operand, u_: Operand, v_: Operand, n_: Int64,):
    var n = Int(n_)
    var y = of_shard(y_)
    var u = of_shard(u_)
    var v = of_shard(v_)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y) and aligned(u) and aligned(v):
        store4(y, i, f[4](load4(u, i), load4(v, i)))
        return
    while i < end:
        y[unsafe_offset=i] = f[1](u[unsafe_offset=i], v[unsafe_offset=i])
        i += 1


@always_inline
def _launch[f: OfNumber](q: Queue, shards: Int, y: Operand, x: Operand, a: Float32, n: Int) raises:
    q.enqueue_function[_map[f]](
        y,
        x,
        a,
        Int64(n),
        grid_dim=(blocks(n, 4 * THREADS), shards),
        block_dim=THREADS,
    )


@always_inline
def _launch2[
    f: Of2
](q: Queue, shards: Int, y: Operand, u: Operand, v: Operand, n: Int,) raises:
    q.enqueue_function[_map2[f]](
        y,
        u,
        v,
        Int64(n),
        grid_dim=(blocks(n, 4 * THREADS), shards),
        block_dim=THREADS,
    )


# --- rows and columns: a thread has a sample, or a feature of all samples of a gradient buffer -----------------------------


@always_inline
def _row(
    shard: Int,
    group: Int,
    lane: Int,
    F: Int,
    number: Float32,
    a: Ptr,
    b: Operand,
    c: Operand,
    d: Operand,
    e: Operand,
) -> Row[1]:
    return Row[1](
        a,
        b.at(shard),
        c.at(shard),
        d.at(shard),
        e.at(shard),
        F,
        number,
        group,
        lane,
        LANES,
    )


def _rows[
    f: OfRow
](a: Operand, b: Operand, c: Operand, d: Operand, e: Operand, G: Int32, F: Int32, number: Float32,):
    var i = index()
    if i >= Int(G) * LANES:
        return
    f[1](
        _row(
            block_idx.y,
            i // LANES,
            i % LANES,
            Int(F),
            number,
            of_shard(a),
            b,
            c,
            d,
            e,
        )
    )


def _columns[
    f: OfTerm
](
    a: Operand,
    b: Operand,
    c: Operand,
    d: Operand,
    e: Operand,
    G: Int32,
    F: Int32,
    number: Float32,
    shards: Int32,
    fold: Int32,
    accumulate: Int32,
):
    var i = index()
    if i >= Int(F):
        return
    var first = block_idx.y * Int(fold)

    @always_inline
    def of_shard_(j: Int) {imm} -> SIMD[F32, 1]:
        var s = Float32(0)
        for g in range(Int(G)):
            for lane in range(LANES):
                s += f[1](
                    _row(
                        first + j,
                        g,
                        lane,
                        Int(F),
                        number,
                        a.ptr(),
                        b,
                        c,
                        d,
                        e,
                    ),
                    i,
                )[0]
        return s

    var s = tree[1](of_shard_, min(Int(fold), Int(shards) - first))
    var y = of_shard(a)
    if accumulate != 0:
        s += y[unsafe_offset=i]
    y[unsafe_offset=i] = s[0]


def _enqueue_rows[f: OfRow, operands: Int](q: Queue, r: Launch) raises:
    var b = r.op(min(2, operands))
    var c = r.op(min(3, operands))
    var d = r.op(min(4, operands))
    var e = r.op(min(5, operands))
    var G = r.int(operands + 1)
    q.enqueue_function[_rows[f]](
        r.op(1),
        b,
        c,
        d,
        e,
        Int32(G),
        Int32(r.int(operands + 2)),
        r.float(operands + 3),
        grid_dim=(blocks(G * LANES, THREADS), r.shards),
        block_dim=THREADS,
    )


def _enqueue_columns[f: OfTerm, operands: Int](q: Queue, r: Launch) raises:
    var b = r.op(min(2, operands))
    var c = r.op(min(3, operands))
    var d = r.op(min(4, operands))
    var e = r.op(min(5, operands))
    var F = r.int(operands + 2)
    q.enqueue_function[_columns[f]](
        r.op(1),
        b,
        c,
        d,
        e,
        Int32(r.int(operands + 1)),
        Int32(F),
        r.float(operands + 3),
        Int32(r.shards),
        Int32(r.fold),
        Int32(r.accumulate),
        grid_dim=(blocks(F, THREADS), ceildiv(r.shards, r.fold)),
        block_dim=THREADS,
    )


def _fill(y_: Operand, a: Float32, n_: Int64):
    var n = Int(n_)
    var y = of_shard(y_)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y):
        store4(y, i, Four(a))
        return
    while i < end:
        y[unsafe_offset=i] = a
        i += 1


def fill(q: Queue, shards: Int, y: Operand, a: Float32, n: Int) raises:
    """Sets n floats of each shard to a."""
    q.enqueue_function[_fill](
        y,
        a,
        Int64(n),
        grid_dim=(blocks(n, 4 * THREADS), shards),
        block_dim=THREADS,
    )


def _loss_scale(y: Operand, shards: Int32, ctx: StepContextPtr):
    var s = index()
    if s < Int(shards):
        y.at(s)[] = ctx[].loss_scale


def loss_scale(q: Queue, shards: Int, y: Operand, ctx: StepContextPtr) raises:
    """Writes the step's loss scale, one float per shard."""
    q.enqueue_function[_loss_scale](
        y,
        Int32(shards),
        ctx,
        grid_dim=blocks(shards, THREADS),
        block_dim=THREADS,
    )


def copy(q: Queue, shards: Int, y: Operand, x: Operand, n: Int) raises:
    """Copies n floats of each shard."""
    _launch[_same](q, shards, y, x, 0, n)


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("copy", call[copy]),
        GpuOp("fill", call[fill]),
        GpuOp("loss_scale", call[loss_scale]),
    ]
