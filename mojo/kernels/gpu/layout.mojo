"""Into lanes and out of them on a GPU (kernels/layout.mojo), and padding: the bits of the CPU.

A thread takes four lanes of one feature, so eight neighbouring features of sixteen samples are one warp's: rows are
read and written in whole sectors of 32 bytes (uint8: a sector serves four warps), lanes in runs of 512.
"""

from max.gpu import block_idx

from ..lanes import F32, LANES, IntPtr
from .launch import blocks, call, GpuOp, Operand, Queue, StepContextPtr
from .quads import QUADS, THREADS, Four, divide, divisor, in_lanes, index, load4, of_shard, quads, small_index, store4


def _input(y: Operand, n: UInt32, F: UInt32, by_F: UInt64, by_plane: UInt64, ctx: StepContextPtr):
    var i = small_index()
    if i >= n:
        return
    var shard = block_idx.y
    var vector = i // UInt32(QUADS)
    var g = divide(vector, by_F)
    var f = Int(vector - g * F)
    var first = Int(g) * LANES + Int(i % UInt32(QUADS)) * 4  # sample
    var valid = ctx[].valid(shard)
    var out = Four(0)
    if first < valid:
        var rows = ctx[].rows.unsafe_offset(shard * Int(ctx[].shard_size))
        var v = Four(0)
        comptime for j in range(4):
            var row = rows[unsafe_offset=min(first + j, valid - 1)]
            var at = Int(row) * Int(F) + f
            if ctx[].bytes != 0:
                v[j] = ctx[].images[unsafe_offset=at].cast[F32]()
            else:
                v[j] = ctx[].images.unsafe_bitcast[Float32]()[unsafe_offset=at]
        var c = Int(divide(UInt32(f), by_plane))
        v = v.fma(Four(ctx[].scale[unsafe_offset=c]), Four(ctx[].shift[unsafe_offset=c]))
        comptime for j in range(4):
            out[j] = v[j] if first + j < valid else 0
    store4(of_shard(y), 4 * Int(i), out)


def input(
    q: Queue,
    shards: Int,
    y: Operand,  # (G, F, L)
    G: Int,
    F: Int,
    C: Int,
    ctx: StepContextPtr,
) raises:
    """Sample i of shard s becomes row rows[s shard_size + i] of the data set, times scale plus shift, per channel (F
    / C features each); lanes without a sample become 0.
    """
    in_lanes(y)
    var n = quads(G * F)
    q.enqueue_function[_input](
        y,
        UInt32(n),
        UInt32(F),
        divisor(F),
        divisor(F // C),
        ctx,
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def _array(y: Operand, n: Int32, F: Int32, T: Int32, k: Int32, rest: Int32, ctx: StepContextPtr):
    var i = index()
    var shard = block_idx.y
    if i >= Int(n):
        return
    var lane = i // (Int(F) * LANES) * LANES + i % LANES
    var sample = lane // Int(T)
    var v = rest
    if sample < ctx[].valid(shard):
        var row = ctx[].rows[unsafe_offset=shard * Int(ctx[].shard_size) + sample]
        var x = IntPtr(unsafe_from_address=Int(ctx[].arrays[unsafe_offset=Int(k)]))
        var place = Int(row) * Int(T) + lane % Int(T)
        v = x[unsafe_offset=place * Int(F) + i // LANES % Int(F)]
    y.ints_at(shard)[unsafe_offset=i] = v


def array(
    q: Queue,
    shards: Int,
    y: Operand,  # (G, F, L), numbers of 32 bits
    G: Int,
    F: Int,
    T: Int,
    k: Int,
    rest: Int,
    ctx: StepContextPtr,
) raises:
    """Places i T .. i T + T - 1 of shard s become row rows[s shard_size + i] of array k, bit by bit; lanes without a
    sample `rest`.
    """
    var n = G * F * LANES
    q.enqueue_function[_array](
        y,
        Int32(n),
        Int32(F),
        Int32(T),
        Int32(k),
        Int32(rest),
        ctx,
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def _rows[pack: Bool](lanes_: Operand, rows_: Operand, n: UInt32, N: Int32, F: UInt32, by_F: UInt64):
    """Rows into lanes if `pack`, else lanes into rows."""
    var i = small_index()
    if i >= n:
        return
    var vector = i // UInt32(QUADS)
    var g = divide(vector, by_F)
    var f = Int(vector - g * F)
    var first = Int(g) * LANES + Int(i % UInt32(QUADS)) * 4
    var lanes = of_shard(lanes_)
    var rows = of_shard(rows_)
    var v = Four(0)
    comptime if not pack:
        v = load4(lanes, 4 * Int(i))
    comptime for j in range(4):
        if first + j < Int(N):
            comptime if pack:
                v[j] = rows[unsafe_offset=(first + j) * Int(F) + f]
            else:
                rows[unsafe_offset=(first + j) * Int(F) + f] = v[j]
    comptime if pack:
        store4(lanes, 4 * Int(i), v)


def _enqueue_rows[pack: Bool](q: Queue, shards: Int, lanes: Operand, rows: Operand, N: Int, F: Int) raises:
    in_lanes(lanes)
    var n = quads(blocks(N, LANES) * F)
    q.enqueue_function[_rows[pack]](
        lanes,
        rows,
        UInt32(n),
        Int32(N),
        UInt32(F),
        divisor(F),
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def pack_rows(q: Queue, shards: Int, y: Operand, x: Operand, N: Int, F: Int) raises:
    """Writes rows x (N, F) into lanes y (G, F, L); lanes from N on become 0."""
    _enqueue_rows[True](q, shards, y, x, N, F)


def unpack_rows(q: Queue, shards: Int, y: Operand, x: Operand, N: Int, F: Int) raises:
    """Writes the first N lanes of x (G, F, L) into rows y (N, F)."""
    _enqueue_rows[False](q, shards, x, y, N, F)


def _pad[
    back: Bool
](y: Operand, x: Operand, n: UInt32, H: Int32, W: Int32, ph: Int32, pw: Int32, by_rows: UInt64, by_columns: UInt64):
    """H x W numbers into a frame of zeros, or if `back` out of it; divisors of the rows and columns of y."""
    var i = small_index()
    if i >= n:
        return
    var at = i // UInt32(QUADS)
    var row = divide(at, by_columns)
    var plane = divide(row, by_rows)
    var v = Four(0)
    comptime if back:
        var h = Int32(row) - Int32(plane) * H + ph
        var w = Int32(at) - Int32(row) * W + pw
        var from_ = (Int32(plane) * (H + 2 * ph) + h) * (W + 2 * pw) + w
        v = load4(of_shard(x), Int(from_) * LANES + Int(i % UInt32(QUADS)) * 4)
    else:
        var h = Int32(row - plane * UInt32(H + 2 * ph)) - ph
        var w = Int32(at - row * UInt32(W + 2 * pw)) - pw
        if h >= 0 and h < H and w >= 0 and w < W:
            v = load4(of_shard(x), Int((Int32(plane) * H + h) * W + w) * LANES + Int(i % UInt32(QUADS)) * 4)
    store4(of_shard(y), 4 * Int(i), v)


@always_inline
def _enqueue_pad[
    back: Bool
](q: Queue, shards: Int, y: Operand, x: Operand, planes: Int, H: Int, W: Int, ph: Int, pw: Int) raises:
    in_lanes(y, x)
    var high = H + 2 * ph
    var wide = W + 2 * pw
    var n = quads(planes * high * wide)
    comptime if back:
        n = quads(planes * H * W)
    q.enqueue_function[_pad[back]](
        y,
        x,
        UInt32(n),
        Int32(H),
        Int32(W),
        Int32(ph),
        Int32(pw),
        divisor(H if back else high),
        divisor(W if back else wide),
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def pad_forward(q: Queue, shards: Int, y: Operand, x: Operand, planes: Int, H: Int, W: Int, ph: Int, pw: Int) raises:
    """Copies x (planes, H, W, L) into a frame of zeros, y (planes, H + 2 ph, W + 2 pw, L); planes: G * C."""
    _enqueue_pad[False](q, shards, y, x, planes, H, W, ph, pw)


def pad_backward(q: Queue, shards: Int, dx: Operand, dy: Operand, planes: Int, H: Int, W: Int, ph: Int, pw: Int) raises:
    """Copies the inside of the frame dy to dx."""
    _enqueue_pad[True](q, shards, dx, dy, planes, H, W, ph, pw)


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("input", call[input]),
        GpuOp("array", call[array]),
        GpuOp("pack_rows", call[pack_rows]),
        GpuOp("unpack_rows", call[unpack_rows]),
        GpuOp("pad_forward", call[pad_forward]),
        GpuOp("pad_backward", call[pad_backward]),
    ]
