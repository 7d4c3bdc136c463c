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


@fieldwise_init
struct Results(TrivialRegisterPassable):
    """Where the results of a product go, and what is done to them."""

    var y: Ptr  # FORWARD, INPUT: y of the first shard; WEIGHT: dw of the buffer
    var bias: Ptr
    var rows: U
    var columns: U
    var G: U
    var step: Int
    var flags: U

    @always_inline
    def at[op: Int](self, column: U) -> Int:
        """Where a column begins in the results; -1 if there is none."""
        comptime if op == WEIGHT:
            return Int(column) if column < self.columns else -1
        else:
            if column >= self.columns * 16:
                return -1
            return group_at(column // 16, self.G, self.rows, self.step) + Int(column % 16)


@always_inline
def _write[op: Int, width: Int](to: Results, v: SIMD[F32, width], row: U, at: Int, first: Bool, last: Bool):
    """Writes `width` neighbouring results of a row."""
    if row >= to.rows or at < 0:
        return
    comptime if op == WEIGHT:
        var p = to.y.unsafe_offset(Int(row * to.columns) + at)
        if to.flags & U(ALIGNED) != 0:
            var s = v
            if to.flags & U(ACCUMULATE) != 0:
                s += p.unsafe_load[width=width, alignment=4 * width]()
            p.unsafe_store[alignment=4 * width](0, s)
        else:
            comptime for j in range(width):
                if U(at + j) < to.columns:
                    var s = v[j]
                    if to.flags & U(ACCUMULATE) != 0:
                        s += p[unsafe_offset=j]
                    p[unsafe_offset=j] = s
    else:
        var p = to.y.unsafe_offset(at + Int(row * 16))
        var s = v
        if not first:
            s = p.unsafe_load[width=width, alignment=4 * width]() + v
        if last:
            comptime if op == FORWARD:
                s += to.bias[unsafe_offset=Int(row)]
                if to.flags & U(RELU) != 0:
                    s = s.lt(0).select(SIMD[F32, width](0), s)
        p.unsafe_store[alignment=4 * width](0, s)


@always_inline
def write_quad[op: Int, precision: Int, size: Int](to: Results, v: Quad, row: U, at: Int, first: Bool, last: Bool):
    """Writes four sums of a thread, which begin at `row` and at the column that is `at`. first: there is no sum to
    go on from; last: the sum is complete.
    """
    comptime if Tile[op, precision, size].TENSOR:
        comptime for h in range(2):
            _write[op, 2](to, SIMD[F32, 2](v[2 * h], v[2 * h + 1]), row + U(8 * h), at, first, last)
    else:
        _write[op, 4](to, v, row, at, first, last)


@always_inline
def write_all[
    op: Int, precision: Int, size: Int, quads: Int
](to: Results, acc: Array[Quad, quads], lane: Int, row0: U, column0: U, first: Bool, last: Bool):
    """Writes all sums of a thread; row0 and column0 are the warp's first."""
    comptime T = Tile[op, precision, size]
    var at = Array[Int, T.ACROSS](fill=0)
    comptime for j in range(T.ACROSS):
        at[j] = to.at[op](column0 + U(column_of[op, precision, size](j, lane)))
    comptime for q in range(quads):
        var row = row0 + U(row_of[op, precision, size](q, lane))
        write_quad[op, precision, size](to, acc[q], row, at[q % T.ACROSS], first, last)


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
