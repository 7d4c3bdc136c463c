"""Correlation on a GPU with float32 multiply-adds: forward, gradient of the input, and forward with ReLU and max-pool.

Each thread keeps KT output channels x RT rows x QT columns of one sample in registers. The teams of a block differ in
their pixels and its `k_warps` in their channels; weights are in shared memory, from where a team reads them as vectors
that all its threads share. Every sum is one chain: the bias (0 in a gradient), then the input channels, rows and
columns of the kernel in order, whatever the tile.

The gradient of the input of a convolution with stride 1 is a correlation too: of dy, with R - 1 rows and T - 1 columns
of zeros around, and the weights turned by 180 degrees, output and input channels swapped (`PADDED`). With stride S it
is one of these for each of S x S phases (Shape.phase).
"""

from std.math import ceildiv
from std.utils.numerics import inf, isnan

from max.gpu import AddressSpace, WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.memory import external_memory

from ..lanes import BytePtr, F32, LANES, Ptr
from .conv2d_any import correlate_any
from .conv2d_tiles import (
    ENOUGH_BLOCKS,
    MULTIPROCESSORS,
    PADDED,
    POOLED,
    Shape,
    Sizes,
    TEAMS,
    WARPS,
    at_least,
    rounded,
    split,
)
from .launch import Operand, Queue, blocks

comptime SHARED_FLOATS = 8192
comptime ENOUGH_WARPS = 8 * MULTIPROCESSORS  # two for each of their four schedulers


@always_inline
def _slots(kt: Int) -> Int:
    """Floats between the weights of two taps; a multiple of 4 for vectors of 4."""
    return kt if kt <= 2 else ceildiv(kt, 4) * 4


@always_inline
def _share_weights[
    KT: Int, turned: Bool, low: Bool
](
    to: Pointer[Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    w: Ptr,
    s: Shape,
    k_first: Int,
    c_first: Int,
    channels: Int,
    taps: Int,  # of one channel
    pixel_warp: Int,
):
    """Copies a warp's weights of some input channels as (channels, taps, slots).

    The warps with the same output channels share the work. Neighbouring threads take the weights of one tap.
    """
    comptime KS = _slots(KT)
    var k = thread_idx.x % KS
    var there = k < KT and k_first + k < s.K
    comptime each = WARP_SIZE // KS
    # `while`: a range whose step is not known checks its sign each time.
    var tap = pixel_warp * each + thread_idx.x % WARP_SIZE // KS
    while tap < channels * taps:
        var v = Float32(0)
        if there:
            comptime if turned:
                var c = tap
                var t = split(c, s.T)
                var r = split(c, s.R)
                v = w[unsafe_offset=((c_first + c) * s.K + k_first + k) * s.WR * s.WT + s.turned(r, t)]
            else:
                v = w[unsafe_offset=((k_first + k) * s.C + c_first) * taps + tap]
        to[unsafe_offset=tap * KS + k] = rounded[low](v, s.precision)
        tap += s.pixel_warps * each


def _direct[
    T: Int,  # kernel height and width with stride 1, or 0 for any
    KT: Int,
    RT: Int,
    QT: Int,
    form: Int,
    low: Bool,  # round the factors
](y: Ptr, y_step: Int64, argmax: BytePtr, argmax_step: Int64, x: Ptr, x_step: Int64, w: Ptr, b: Ptr, sizes: Sizes):
    comptime KS = _slots(KT)
    comptime N = KT * RT * QT
    var s = Shape(sizes)
    var shared = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var R = T if T else s.R
    var columns = T if T else s.T
    var S = 1 if T else s.S
    var taps = R * columns
    var shard = block_idx.z
    var lane = thread_idx.x % LANES
    var pixel_warp = thread_idx.x // WARP_SIZE
    var k_warp = split(pixel_warp, s.k_warps)
    var k_first = (block_idx.y * s.k_warps + k_warp) * KT
    var x_channel = s.H * s.W * LANES
    var x_row = s.W * LANES

    for tile in range(s.tiles):
        # Which pixels: tiles of RT x QT, the last of a row moved back so that it ends with the row.
        comptime across = QT // 2 if form == POOLED else QT
        var n = ((block_idx.x * s.tiles + tile) * s.pixel_warps + pixel_warp) * TEAMS + (
            thread_idx.x % WARP_SIZE
        ) // LANES
        var q_first = min(split(n, ceildiv(s.Q, across)) * across, s.Q - across)
        var p_first = split(n, s.P)
        var there = n < s.G
        var g = min(n, s.G - 1)
        var row = p_first * S - s.pad_rows
        var column = q_first * S - s.pad_columns
        comptime if form == POOLED:
            row *= 2
            column *= 2
        var xp = x.unsafe_offset(shard * Int(x_step) + g * s.C * x_channel + row * x_row + column * LANES + lane)

        var acc = Array[Float32, N](fill=0)
        comptime if form != PADDED:
            comptime for k in range(KT):
                var bias = Float32(0)
                if k_first + k < s.K:
                    bias = b[unsafe_offset=k_first + k]
                comptime for i in range(RT * QT):
                    acc[k * RT * QT + i] = bias

        var c_first = 0
        while c_first < s.C:
            var channels = min(s.chunk, s.C - c_first)
            if tile == 0 or s.chunk < s.C:
                if tile > 0 or c_first > 0:
                    barrier()
                _share_weights[KT, form == PADDED, low](
                    shared.unsafe_offset(k_warp * s.chunk * taps * KS),
                    w,
                    s,
                    k_first,
                    c_first,
                    channels,
                    taps,
                    pixel_warp,
                )
                barrier()

            var wp = shared.unsafe_offset(k_warp * s.chunk * taps * KS)

            @always_inline
            def multiply[tap: Int, rt: Int, shift: Int, m: Int](values: Array[Float32, m]) {mut acc, imm}:
                """Adds the products of one tap for one row of pixels."""
                var f = Array[Float32, KS](fill=0)
                comptime if KT == 2:
                    var two = wp.unsafe_offset(tap * KS).unsafe_load[width=2, alignment=8]()
                    f[0] = two[0]
                    f[1] = two[1]
                else:
                    comptime for j in range(KS // 4):
                        var four = wp.unsafe_offset(tap * KS + 4 * j).unsafe_load[width=4, alignment=16]()
                        comptime for e in range(4):
                            f[4 * j + e] = four[e]
                comptime for k in range(KT):
                    comptime for q in range(QT):
                        comptime i = (k * RT + rt) * QT + q
                        acc[i] = values[q + shift].fma(f[k], acc[i])

            comptime if T:
                comptime ROWS = T + RT - 1
                comptime M = QT + T - 1

                @always_inline
                def load[r: Int](mut v: Array[Float32, ROWS * M]) {imm}:
                    """What the tile needs of row r of the channel at xp."""
                    var xr = xp.unsafe_offset(r * x_row)
                    comptime for j in range(M):
                        if form != PADDED or (UInt32(row + r) < UInt32(s.H) and UInt32(column + j) < UInt32(s.W)):
                            v[r * M + j] = rounded[low](xr[unsafe_offset=j * LANES], s.precision)

                # A small tile has few warps beside it that work while it waits: it loads a channel ahead.
                comptime ahead = KT == 2
                var values = Array[Float32, ROWS * M](fill=0)
                comptime if ahead:
                    comptime for r in range(ROWS):
                        load[r](values)
                for c in range(channels):
                    var coming = Array[Float32, ROWS * M](fill=0)
                    comptime if ahead:
                        if c + 1 < channels:
                            xp = xp.unsafe_offset(x_channel)
                            comptime for r in range(ROWS):
                                load[r](coming)
                    else:
                        values = coming.copy()
                    comptime for r in range(ROWS):
                        comptime if not ahead:
                            load[r](values)
                        comptime for rt in range(RT):
                            comptime if r >= rt and r - rt < T:
                                comptime for t in range(T):
                                    multiply[(r - rt) * T + t, rt, r * M + t, ROWS * M](values)
                    wp = wp.unsafe_offset(T * T * KS)
                    comptime if ahead:
                        values = coming^
                    else:
                        xp = xp.unsafe_offset(x_channel)
                comptime if ahead:
                    xp = xp.unsafe_offset(x_channel)
            else:
                for _ in range(channels):
                    for r in range(R):
                        for t in range(columns):
                            var values = Array[Float32, QT](fill=0)
                            var xr = xp.unsafe_offset(r * x_row + t * LANES)
                            comptime for j in range(QT):
                                comptime if form == PADDED:
                                    if UInt32(row + r) < UInt32(s.H) and UInt32(column + t + j) < UInt32(s.W):
                                        values[j] = rounded[low](xr[unsafe_offset=j * LANES], s.precision)
                                else:
                                    values[j] = rounded[low](xr[unsafe_offset=j * S * LANES], s.precision)
                            multiply[0, 0, 0, QT](values)
                            wp = wp.unsafe_offset(KS)
                    xp = xp.unsafe_offset(x_channel)
            c_first += s.chunk

        var held = s.K - k_first if there else 0
        var plane = s.YP * s.YQ * LANES
        var out = (g * s.K + k_first) * plane + s.pixel(p_first, q_first) * LANES + lane
        var yp = y.unsafe_offset(shard * Int(y_step) + out)
        var ap = argmax
        comptime if form == POOLED:
            ap = argmax.unsafe_offset(shard * Int(argmax_step) + out)
        var least = Float32(0) if s.relu != 0 else -inf[F32]()
        comptime for k in range(KT):
            if k < held:
                comptime if form == POOLED:
                    comptime for j in range(across):
                        var best = at_least(acc[k * RT * QT + 2 * j], 0)
                        var at = UInt8(0)
                        comptime for i in range(1, 4):
                            var v = at_least(acc[(k * RT + i // 2) * QT + 2 * j + i % 2], 0)
                            if v > best or isnan(v):
                                best = v
                                at = UInt8(i)
                        yp[unsafe_offset=j * LANES] = best
                        ap[unsafe_offset=j * LANES] = at
                    ap = ap.unsafe_offset(plane)
                else:
                    comptime for j in range(QT):
                        yp[unsafe_offset=j * s.step * LANES] = at_least(acc[k * QT + j], least)
                yp = yp.unsafe_offset(plane)


# --- which kernel ------------------------------------------------------------------


def correlate[
    form: Int, low: Bool
](q: Queue, shards: Int, y: Operand, argmax: Operand, x: Operand, w: Operand, b: Operand, shape: Shape) raises:
    """Chooses a tile by the sizes and the work, and launches. P and Q of `shape` are the pooled ones if POOLED."""
    comptime rows = 2 if form == POOLED else 1
    comptime columns = 4 // rows

    @always_inline
    def fits[T: Int, KT: Int, QT: Int](most: Int) raises {imm} -> Bool:
        """Launches if a row has enough pixels and shared memory takes one channel's weights."""
        comptime across = QT // 2 if form == POOLED else QT
        var s = shape
        var one = s.R * s.T * _slots(KT)
        var k_warps = min(ceildiv(s.K, KT), most, SHARED_FLOATS // one)
        if k_warps == 0 or s.Q < across:
            return False
        s.k_warps = k_warps
        s.pixel_warps = max(1, WARPS // 2 // k_warps)
        s.chunk = max(1, min(s.C, SHARED_FLOATS // (one * k_warps)))
        var units = s.G * s.P * ceildiv(s.Q, across)
        var across_k = ceildiv(s.K, k_warps * KT)
        while s.pixel_warps > 1 and blocks(units, s.pixel_warps * TEAMS) * across_k * shards < 2 * MULTIPROCESSORS:
            s.pixel_warps //= 2
        var n = blocks(units, s.pixel_warps * TEAMS)
        if s.chunk == s.C:
            # Fewer blocks that load the weights, as long as there are enough.
            s.tiles = max(1, min(8, n * across_k * shards // ENOUGH_BLOCKS))
        q.enqueue_function[_direct[T, KT, rows, QT, form, low]](
            y.ptr(),
            y.step(),
            BytePtr(unsafe_from_address=argmax.address),
            argmax.step() * 4,
            x.ptr(),
            x.step(),
            w.ptr(),
            b.ptr(),
            s.pack(),
            grid_dim=(ceildiv(n, s.tiles), across_k, shards),
            block_dim=s.pixel_warps * k_warps * WARP_SIZE,
            shared_mem_bytes=s.chunk * one * k_warps * 4,
        )
        return True

    # The large tile needs the fewest loads, the small one makes the most threads.
    var pixels = shards * shape.G * shape.P * shape.Q
    var large = pixels * ceildiv(shape.K, 8) >= 4 * TEAMS * ENOUGH_WARPS

    @always_inline
    def known[T: Int]() raises {imm} -> Bool:
        if large:
            comptime if not low:
                if ceildiv(shape.K, 6) * 6 < ceildiv(shape.K, 8) * 8:
                    if fits[T, 6, 4](WARPS):
                        return True
            if fits[T, 8, columns](WARPS):
                return True
        return fits[T, 2, 2](1)

    var done = False
    if shape.S == 1 and shape.R == shape.T and (form != POOLED or (shape.PR == 2 and shape.PT == 2 and shape.PS == 2)):
        if shape.T == 3:
            done = known[3]()
        elif shape.T == 5:
            done = known[5]()
    comptime if form != POOLED:
        if not done and large:
            done = fits[0, 8, 4](WARPS)
        if not done:
            done = fits[0, 2, 1](1)
    if not done:
        correlate_any[form, low](q, shards, y, argmax, x, w, b, shape)
