"""How the kernel of gemm.mojo writes its results, and the gradient of a bias, which it computes on the side."""

from max.gpu.primitives import warp

from ..lanes import F32, Ptr
from .gemm_tiles import (
    ACCUMULATE,
    ALIGNED,
    FORWARD,
    INPUT,
    Quad,
    RELU,
    TEAMS,
    Tile,
    U,
    WEIGHT,
    column_of,
    group_at,
    row_of,
    tree_of,
)


@always_inline
def column_at[op: Int](column: U, rows: U, columns: U, G: U, step: Int) -> Int:
    """Where a column begins in the results; -1 if there is none."""
    comptime if op == WEIGHT:
        return Int(column) if column < columns else -1
    else:
        if column >= columns * 16:
            return -1
        return group_at(column // 16, G, rows, step) + Int(column % 16)


@always_inline
def _write[
    op: Int, width: Int
](
    y: Ptr,
    bias: Ptr,
    v: SIMD[F32, width],
    row: U,
    at: Int,  # column_at
    rows: U,
    columns: U,
    first: Bool,
    last: Bool,
    flags: U,
):
    """Writes `width` neighbouring results of a row."""
    if row >= rows or at < 0:
        return
    comptime if op == WEIGHT:
        var p = y.unsafe_offset(Int(row * columns) + at)
        if flags & U(ALIGNED) != 0:
            var s = v
            if flags & U(ACCUMULATE) != 0:
                s += p.unsafe_load[width=width, alignment=4 * width]()
            p.unsafe_store[alignment=4 * width](0, s)
        else:
            comptime for j in range(width):
                if U(at + j) < columns:
                    var s = v[j]
                    if flags & U(ACCUMULATE) != 0:
                        s += p[unsafe_offset=j]
                    p[unsafe_offset=j] = s
    else:
        var p = y.unsafe_offset(at + Int(row * 16))
        var s = v
        if not first:
            s = p.unsafe_load[width=width, alignment=4 * width]() + v
        if last:
            comptime if op == FORWARD:
                s += bias[unsafe_offset=Int(row)]
                if flags & U(RELU) != 0:
                    s = s.lt(0).select(SIMD[F32, width](0), s)
        p.unsafe_store[alignment=4 * width](0, s)


@always_inline
def write_quad[
    op: Int, precision: Int, size: Int
](
    y: Ptr,  # FORWARD, INPUT: y of the first shard; WEIGHT: dw of the buffer
    bias: Ptr,
    v: Quad,
    row: U,
    at: Int,
    rows: U,
    columns: U,
    first: Bool,  # there is no sum to go on from
    last: Bool,  # the sum is complete
    flags: U,
):
    """Writes four sums of a thread, which begin at `row` and at the column that is `at`."""
    comptime if Tile[op, precision, size].TENSOR:
        comptime for h in range(2):
            _write[op, 2](
                y, bias, SIMD[F32, 2](v[2 * h], v[2 * h + 1]), row + U(8 * h), at, rows, columns, first, last, flags
            )
    else:
        _write[op, 4](y, bias, v, row, at, rows, columns, first, last, flags)


@always_inline
def write_all[
    op: Int, precision: Int, size: Int, quads: Int
](
    y: Ptr,
    bias: Ptr,
    acc: Array[Quad, quads],
    lane: Int,
    row0: U,  # the warp's first
    column0: U,
    rows: U,
    columns: U,
    G: U,
    step: Int,
    first: Bool,
    last: Bool,
    flags: U,
):
    """Writes all sums of a thread."""
    comptime T = Tile[op, precision, size]
    var at = Array[Int, T.ACROSS](fill=0)
    comptime for j in range(T.ACROSS):
        at[j] = column_at[op](column0 + U(column_of[op, precision, size](j, lane)), rows, columns, G, step)
    comptime for q in range(quads):
        write_quad[op, precision, size](
            y,
            bias,
            acc[q],
            row0 + U(row_of[op, precision, size](q, lane)),
            at[q % T.ACROSS],
            rows,
            columns,
            first,
            last,
            flags,
        )


@always_inline
def bias_gradient(
    db: Ptr,  # of the buffer
    dy: Ptr,  # of the buffer's first shard
    step: Int,
    output: U,
    lane: U,  # of sixteen
    n: U,  # shards
    G: U,
    O: U,
    flags: U,
):
    """The sum of dy over the samples of n shards, by sixteen neighbouring threads: over the groups one after the
    other, then over the lanes in pairs 8, 4, 2 and 1 apart, then along the tree.
    """
    var o = min(output, O - 1)
    var sums = Array[Float32, TEAMS](fill=0)
    comptime for i in range(TEAMS):
        if U(i) < n:
            var p = dy.unsafe_offset(i * step + Int(o * 16 + lane))
            var s: Float32 = 0
            for g in range(G):
                s += p[unsafe_offset=Int(g * O * 16)]
            comptime for k in range(4):
                s += warp.shuffle_xor(s, UInt32(8 >> k))
            sums[i] = s
    var s = tree_of(sums, n)
    if lane == 0 and output < O:
        if flags & U(ACCUMULATE) != 0:
            s += db[unsafe_offset=Int(o)]
        db[unsafe_offset=Int(o)] = s
