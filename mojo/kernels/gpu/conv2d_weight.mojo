"""Gradient of a convolution's weights on a GPU with float32 multiply-adds.

A weight's gradient is a sum over all pixels and samples of a shard: thousands of products for a few hundred weights.
Each warp takes a tile of weights and a *piece* of the pixels; each of its threads adds up the products of one sample's
pixels in registers, and at the end the warp adds its threads. A second launch adds the pieces of each shard, in
STRANDS strands (strand j has pieces j, j + STRANDS, ...) and then the strands, and the shards of a buffer
along their tree.

A *unit* is a segment of a row of pixels of a group; a piece is `units` of them for each team of the warp. Segments
and pieces depend on the layer's sizes alone.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, WARP_SIZE, barrier, block_idx, thread_idx

from ..lanes import F32, LANES, Ptr
from .conv2d_tiles import MULTIPROCESSORS, Shape, Sizes, TEAMS, WARPS, quotient, rounded, split, sum_warp
from .launch import Operand, Queue

comptime COLUMNS = 4  # pixels that are loaded together
comptime ANY_K = 4  # tile of the kernel for any size
comptime ANY_TAPS = 8
comptime STRANDS = 8  # also the largest fold
comptime SEGMENT = 12  # pixels of a segment, at least


# --- how a shard's pixels are cut: pure functions of the sizes ----------------------


@always_inline
def known(s: Shape) -> Bool:
    """True for the kernels that have a form of their own."""
    return s.S * s.D * s.groups == 1 and s.R == s.T and (s.T == 3 or s.T == 5)


@always_inline
def tile_of_k(s: Shape) -> Int:
    """Output channels of a tile."""
    if not known(s):
        return ANY_K
    if s.T == 3:
        return 8
    return 3 if ceildiv(s.K, 3) * 3 < ceildiv(s.K, 4) * 4 else 4


@always_inline
def tiles_of_k(s: Shape) -> Int:
    """Tiles that the output channels are cut into, each group for itself."""
    return s.groups * ceildiv(s.outputs(), tile_of_k(s))


@always_inline
def tiles_of_taps(s: Shape) -> Int:
    """Tiles that the taps of all input channels are cut into."""
    return s.C if known(s) else ceildiv(s.taps(), ANY_TAPS)


@always_inline
def segments(s: Shape) -> Int:
    """Units in a row of pixels."""
    return max(1, s.Q // SEGMENT)


def units_of_a_team(s: Shape) -> Int:
    """Units of a piece for each team.

    Few enough that two small shards occupy a large GPU (512 warps for each shard), but as many as it takes to make the
    sum over the warp at the end a small part of the work (some 4000 multiply-adds before it), as long as 96 warps a
    shard remain.
    """
    var taps = s.T * s.T if known(s) else ANY_TAPS
    var tiles = tiles_of_k(s) * tiles_of_taps(s)
    var units = s.G * s.P * segments(s)
    var work = ceildiv(s.Q, segments(s)) * tile_of_k(s) * taps
    var wide = units * tiles // (TEAMS * 512)
    var narrow = units * tiles // (TEAMS * 96)
    var wanted = max(1, wide, min(ceildiv(4000, work), narrow))
    return min(wanted, ceildiv(units, TEAMS))


def pieces(s: Shape) -> Int:
    """Pieces of a shard's sum."""
    return ceildiv(s.G * s.P * segments(s), units_of_a_team(s) * TEAMS)


# --- sums of a piece -----------------------------------------------------------------


@always_inline
def tiles_and_piece(s: Shape, tiles_k: Int) -> Tuple[Int, Int, Int]:
    """The tiles of this thread's warp, of the `tiles_k` of output channels and of those of taps, and its piece."""
    var warp = thread_idx.x // WARP_SIZE
    var k_warp = split(warp, s.k_warps)
    var tap_warp = split(warp, s.chunk)
    var block = block_idx.y
    var k = split(block, ceildiv(tiles_k, s.k_warps)) * s.k_warps + k_warp
    return k, block * s.chunk + tap_warp, block_idx.x * s.pixel_warps + warp


@always_inline
def _store[
    n: Int, //, KT: Int, TT: Int
](partial: Ptr, sums: Array[Float32, n], s: Shape, k: Int, last: Int, tap: Int, taps: Int):  # (K, taps) and then (K)
    """Writes the warp's KT x TT weights and KT biases of its tile, which begins at (k, tap) and has no channel from
    `last` on.
    """
    var lane = thread_idx.x % WARP_SIZE
    comptime for group in range(ceildiv(n, WARP_SIZE)):
        var sum = sum_warp[group * WARP_SIZE](sums, lane)
        var i = group * WARP_SIZE + lane
        if i < KT * TT:
            var j = tap + i % TT
            if k + i // TT < last and j < taps:
                partial[unsafe_offset=(k + i // TT) * taps + j] = sum
        elif i < n and tap == 0 and k + i - KT * TT < last:
            partial[unsafe_offset=s.K * taps + k + i - KT * TT] = sum


def _sums[T: Int, KT: Int, low: Bool](scratch: Ptr, dy: Ptr, dy_step: Int64, x: Ptr, x_step: Int64, sizes: Sizes):
    """Tile: KT output channels x the T x T taps of one input channel."""
    comptime TT = T * T
    comptime N = KT * TT + KT
    var s = Shape(sizes)
    var shard = block_idx.z
    var lane = thread_idx.x % LANES
    var team = thread_idx.x % WARP_SIZE // LANES
    var tile, c, piece = tiles_and_piece(s, ceildiv(s.K, KT))
    var k = tile * KT
    if k >= s.K or c >= s.C or piece >= s.pieces:
        return
    var taps = s.C * TT
    var cuts = segments(s)
    var units = s.G * s.P * cuts
    var each = s.units * TEAMS
    var plane = s.P * s.Q * LANES
    var x_row = s.W * LANES

    var acc = Array[Float32, N](fill=0)

    for unit in range(piece * each + team, min(units, (piece + 1) * each), TEAMS):
        var g = unit
        var segment = split(g, cuts)
        var p = split(g, s.P)
        var q_first = quotient(s.Q * segment, cuts)
        var q_last = quotient(s.Q * (segment + 1), cuts)
        var dp = dy.unsafe_offset(shard * Int(dy_step) + (g * s.K + k) * plane + (p * s.Q + q_first) * LANES + lane)
        var xp = x.unsafe_offset(shard * Int(x_step) + ((g * s.C + c) * s.H + p) * x_row + q_first * LANES + lane)

        @always_inline
        def step[M: Int]() {mut acc, imm}:
            """Adds the products of M neighbouring pixels."""
            var d = Array[Float32, KT * M](fill=0)
            comptime for i in range(KT):
                # a channel too many: the last one again, not stored
                var row = dp.unsafe_offset(min(i, s.K - 1 - k) * plane)
                comptime for q in range(M):
                    d[i * M + q] = row[unsafe_offset=q * LANES]
                    if c == 0:
                        acc[KT * TT + i] += d[i * M + q]
                    d[i * M + q] = rounded[low](d[i * M + q], s.precision)
            comptime for r in range(T):
                var v = Array[Float32, M + T - 1](fill=0)
                comptime for j in range(M + T - 1):
                    v[j] = rounded[low](xp[unsafe_offset=r * x_row + j * LANES], s.precision)
                comptime for i in range(KT):
                    comptime for t in range(T):
                        comptime for q in range(M):
                            comptime at = (i * T + r) * T + t
                            acc[at] = d[i * M + q].fma(v[q + t], acc[at])

        var q = q_first
        while q + COLUMNS <= q_last:
            step[COLUMNS]()
            dp = dp.unsafe_offset(COLUMNS * LANES)
            xp = xp.unsafe_offset(COLUMNS * LANES)
            q += COLUMNS
        while q < q_last:
            step[1]()
            dp = dp.unsafe_offset(LANES)
            xp = xp.unsafe_offset(LANES)
            q += 1

    _store[KT, TT](scratch.unsafe_offset((shard * s.pieces + piece) * s.K * (taps + 1)), acc, s, k, s.K, c * TT, taps)


def _sums_any[low: Bool](scratch: Ptr, dy: Ptr, dy_step: Int64, x: Ptr, x_step: Int64, sizes: Sizes):
    """Any convolution. Tile: ANY_K output channels of a group x ANY_TAPS taps (c, r, t) in a row."""
    comptime N = ANY_K * ANY_TAPS + ANY_K
    var s = Shape(sizes)
    var shard = block_idx.z
    var lane = thread_idx.x % LANES
    var team = thread_idx.x % WARP_SIZE // LANES
    var tiles = ceildiv(s.outputs(), ANY_K)
    var group, tile, piece = tiles_and_piece(s, s.groups * tiles)
    var k = split(group, tiles) * ANY_K
    k += group * s.outputs()
    var last = (group + 1) * s.outputs()
    var tap = tile * ANY_TAPS
    var taps = s.taps()
    if group >= s.groups or tap >= taps or piece >= s.pieces:
        return
    var cuts = segments(s)
    var units = s.G * s.P * cuts
    var each = s.units * TEAMS
    var plane = s.P * s.Q * LANES
    var offset = Array[Int, ANY_TAPS](fill=0)
    comptime for j in range(ANY_TAPS):
        var c = min(tap + j, taps - 1)
        var t = split(c, s.T)
        var r = split(c, s.R)
        c += group * s.inputs()
        offset[j] = ((c * s.H + r * s.D) * s.W + t * s.D) * LANES

    var acc = Array[Float32, N](fill=0)
    for unit in range(piece * each + team, min(units, (piece + 1) * each), TEAMS):
        var g = unit
        var segment = split(g, cuts)
        var p = split(g, s.P)
        var q_first = quotient(s.Q * segment, cuts)
        var dp = dy.unsafe_offset(shard * Int(dy_step) + (g * s.K + k) * plane + (p * s.Q + q_first) * LANES + lane)
        var xp = x.unsafe_offset(shard * Int(x_step) + ((g * s.C * s.H + p * s.S) * s.W + q_first * s.S) * LANES + lane)
        for _ in range(q_first, quotient(s.Q * (segment + 1), cuts)):
            var v = Array[Float32, ANY_TAPS](fill=0)
            comptime for j in range(ANY_TAPS):
                v[j] = rounded[low](xp[unsafe_offset=offset[j]], s.precision)
            comptime for i in range(ANY_K):
                var d = dp[unsafe_offset=min(i, last - 1 - k) * plane]
                acc[ANY_K * ANY_TAPS + i] += d
                d = rounded[low](d, s.precision)
                comptime for j in range(ANY_TAPS):
                    acc[i * ANY_TAPS + j] = d.fma(v[j], acc[i * ANY_TAPS + j])
            dp = dp.unsafe_offset(LANES)
            xp = xp.unsafe_offset(s.S * LANES)

    _store[ANY_K, ANY_TAPS](
        scratch.unsafe_offset((shard * s.pieces + piece) * s.K * (taps + 1)), acc, s, k, last, tap, taps
    )


# --- pieces, then shards ---------------------------------------------------------------


def _add_pieces(
    dw: Ptr,
    dw_step: Int64,
    db: Ptr,
    db_step: Int64,
    scratch: Ptr,
    pieces: Int32,
    weights: Int32,
    n_: Int32,
    fold: Int32,
    shards: Int32,
    accumulate: Int32,
):
    """A block takes WARP_SIZE numbers of one buffer; a thread one of them and one strand, later one shard."""
    var sums = unsafe_stack_allocation[STRANDS * STRANDS * WARP_SIZE, F32, address_space=AddressSpace.SHARED]()
    var n = Int(n_)
    var column = thread_idx.x % WARP_SIZE
    var strand = thread_idx.x // WARP_SIZE
    var i = block_idx.x * WARP_SIZE + column
    var first = block_idx.y * Int(fold)
    var held = min(Int(fold), Int(shards) - first)
    for j in range(held):
        var sum = Float32(0)
        if i < n:
            var p = scratch.unsafe_offset(((first + j) * Int(pieces) + strand) * n + i)
            for _ in range(strand, Int(pieces), STRANDS):
                sum += p[]
                p = p.unsafe_offset(STRANDS * n)
        sums[unsafe_offset=(j * STRANDS + strand) * WARP_SIZE + column] = sum
    barrier()
    if strand < held:
        var at = strand * STRANDS * WARP_SIZE + column
        var sum = sums[unsafe_offset=at]
        comptime for j in range(1, STRANDS):
            sum += sums[unsafe_offset=at + j * WARP_SIZE]
        sums[unsafe_offset=at] = sum
    barrier()
    if strand > 0 or i >= n:
        return
    var v = Array[Float32, STRANDS](fill=0)
    comptime for j in range(STRANDS):
        if j < held:
            v[j] = sums[unsafe_offset=j * STRANDS * WARP_SIZE + column]
    # Pairs of neighbours, then pairs of pairs: a node of m splits after the largest power of two smaller than m.
    comptime for level in range(3):
        comptime half = 1 << level
        comptime for j in range(0, STRANDS, 2 * half):
            if j + half < held:
                v[j] += v[j + half]
    var to = dw.unsafe_offset(block_idx.y * Int(dw_step) + i)
    if i >= Int(weights):
        to = db.unsafe_offset(block_idx.y * Int(db_step) + i - Int(weights))
    to[] = to[] + v[0] if accumulate != 0 else v[0]


def spread_warps(mut s: Shape, shards: Int, tiles_k: Int, tiles_of_taps: Int):
    """Chooses the warps of a block: some that share their output's gradient, some that share their input, and pieces.

    As many as let the launch have a block for each multiprocessor.
    """
    var warps = min(WARPS, max(1, shards * s.pieces * tiles_k * tiles_of_taps // MULTIPROCESSORS))
    s.k_warps = min(tiles_k, 4, warps)
    s.chunk = min(tiles_of_taps, warps // s.k_warps)
    s.pixel_warps = warps // (s.k_warps * s.chunk)


@fieldwise_init
struct Gradients(TrivialRegisterPassable):
    """The operands of a gradient of weights, as conv2d_backward_weight of conv2d.mojo has them."""

    var shards: Int
    var fold: Int
    var dw: Operand
    var db: Operand
    var dy: Operand
    var x: Operand
    var scratch: Ptr  # (shards, pieces, weights + biases)
    var accumulate: Bool


def weight_gradient[low: Bool](q: Queue, of: Gradients, shape: Shape) raises:
    """Two launches; `shape` is that of the convolution."""
    var s = shape
    s.pieces = pieces(s)
    s.units = units_of_a_team(s)
    var tiles_k = tiles_of_k(s)
    var tiles_tap = tiles_of_taps(s)

    @always_inline
    def launch[kernel: def(Ptr, Ptr, Int64, Ptr, Int64, Sizes) thin]() raises {imm}:
        launch_sums[kernel](q, of, s, tiles_k, tiles_tap)

    if not known(s):
        launch[_sums_any[low]]()
    elif s.T == 3:
        launch[_sums[3, 8, low]]()
    elif tile_of_k(s) == 3:
        launch[_sums[5, 3, low]]()
    else:
        launch[_sums[5, 4, low]]()


def launch_sums[
    kernel: def(Ptr, Ptr, Int64, Ptr, Int64, Sizes) thin
](q: Queue, of: Gradients, shape: Shape, tiles_k: Int, tiles_tap: Int) raises:
    """Sums of pieces by `kernel`, in warps that are chosen here, then of these to gradients of buffers.

    `shape` has its pieces and units.
    """
    var s = shape
    spread_warps(s, of.shards, tiles_k, tiles_tap)
    var blocks = ceildiv(tiles_k, s.k_warps) * ceildiv(tiles_tap, s.chunk)
    q.enqueue_function[kernel](
        of.scratch,
        of.dy.ptr(),
        of.dy.step(),
        of.x.ptr(),
        of.x.step(),
        s.pack(),
        grid_dim=(ceildiv(s.pieces, s.pixel_warps), blocks, of.shards),
        block_dim=s.pixel_warps * s.k_warps * s.chunk * WARP_SIZE,
    )
    var weights = s.K * s.taps()
    q.enqueue_function[_add_pieces](
        of.dw.ptr(),
        of.dw.step(),
        of.db.ptr(),
        of.db.step(),
        of.scratch,
        Int32(s.pieces),
        Int32(weights),
        Int32(weights + s.K),
        Int32(of.fold),
        Int32(of.shards),
        Int32(of.accumulate),
        grid_dim=(ceildiv(weights + s.K, WARP_SIZE), ceildiv(of.shards, of.fold)),
        block_dim=STRANDS * WARP_SIZE,
    )
