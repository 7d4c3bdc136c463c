"""Linear layer over lanes with bf16 products (AVX512-BF16): the functions of linear.mojo with operands packed in pairs.

Pairs are neighbours along the axis that is summed: inputs in forward, outputs in the gradient of the input, samples in
the gradient of the weights. Weights are packed a panel at a time, right before the panel is used, while it is in the
first-level cache; packing all of them first would cost as much as half the product of a shard of 32 samples.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import prefetch

from .buffers import fill
from .lanes import LANES, Ptr, Vec, in_tiles, in_tiles_and_ones, load, load_first, splat, store, store_first
from .layout import transpose
from .lowp import (
    HALF,
    HalfPtr,
    Pair,
    bias_gradient,
    dot2,
    load_pair,
    pack_neighbours,
    pack_row,
    pack_samples,
    pair,
    splat_pair,
    words,
)

# --- register tiles: as in linear.mojo; 24 dot2 start in 12 cycles, 14 loads in 7 -----------
comptime OUTPUTS: List[Int] = [12, 10, 8, 6, 4, 2, 1]
comptime NB = 12  # the first of them: outputs of a forward panel
comptime GB = 2
comptime COLUMNS = 96  # inputs of a panel of the gradient of the input: 8 tiles, 6 lines of memory
# The summed axis is cut into blocks whose x, 50 KiB of two groups, nearly stays in a first-level cache of 48 KiB. Sums
# wait in y, unrounded, so the cut changes no bit.
comptime BLOCK = 400  # pairs
comptime AHEAD = 16  # rows that packing fetches ahead, as in linear.mojo


@no_inline
def _tile[
    nb: Int, gb: Int, relu: Bool, columns: Bool
](
    y: Ptr,
    x: HalfPtr,
    w: HalfPtr,
    start: Optional[Ptr],
    pairs: Int,
    w_out: Int,
    w_in: Int,
    x_group: Int,
    y_group: Int,
    ahead: Ptr,
    ahead_row: Int,
):
    """Adds `pairs` pairs of inputs to `nb` outputs of `gb` groups.

    Outputs are w_out pairs apart in w, inputs w_in. A sum starts from `start` (nb), or goes on from y. On the way the
    weights at `ahead`, of the next panel, are brought closer: 16 rows of 2 `pairs`, or if `columns` one line of memory
    of each of 2 `pairs` rows.
    """
    var acc = Array[Vec, nb * gb](fill=Vec(0))
    if start:
        comptime for n in range(nb):
            var bias = splat(start.value(), n)
            comptime for g in range(gb):
                acc[n * gb + g] = bias
    else:
        comptime for n in range(nb):
            comptime for g in range(gb):
                acc[n * gb + g] = load(y, g * y_group + n * LANES)
    for i in range(pairs):
        comptime if columns:
            prefetch(ahead.unsafe_offset(2 * i * ahead_row))
            prefetch(ahead.unsafe_offset((2 * i + 1) * ahead_row))
        else:
            var line = ahead.unsafe_offset((i & 7) * ahead_row + (i >> 3) * 16)
            prefetch(line)
            prefetch(line.unsafe_offset(8 * ahead_row))
        var v = Array[Pair, gb](fill=Pair(0))
        comptime for g in range(gb):
            v[g] = load_pair(x, g * x_group + i)
        comptime for n in range(nb):
            var s = splat_pair(w, n * w_out + i * w_in)
            comptime for g in range(gb):
                acc[n * gb + g] = dot2(acc[n * gb + g], v[g], s)
    comptime for n in range(nb):
        comptime for g in range(gb):
            var s = acc[n * gb + g]
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            store(y, g * y_group + n * LANES, s)


@always_inline
def _panel[
    relu: Bool, columns: Bool
](
    y: Ptr,
    x: HalfPtr,
    w: HalfPtr,
    start: Optional[Ptr],
    G: Int,
    outputs: Int,
    pairs: Int,
    w_out: Int,
    w_in: Int,
    x_group: Int,
    y_group: Int,
    ahead: Ptr,
    ahead_row: Int,
):
    """All groups of some neighbouring outputs, whose weights are packed."""

    @always_inline
    def groups[gb: Int](g: Int) {imm}:
        var n = 0
        var line = ahead
        comptime for i in range(len(OUTPUTS)):
            comptime nb = materialize[OUTPUTS]()[i]
            while n + nb <= outputs:
                var bias = start
                if start:
                    bias = start.value().unsafe_offset(n)
                _tile[nb, gb, relu, columns](
                    y.unsafe_offset(g * y_group + n * LANES),
                    x.unsafe_offset(g * x_group * 2 * LANES),
                    w.unsafe_offset(2 * n * w_out),
                    bias,
                    pairs,
                    w_out,
                    w_in,
                    x_group,
                    y_group,
                    line,
                    ahead_row,
                )
                n += nb
                line = line.unsafe_offset(LANES)

    in_tiles_and_ones[GB](G, groups)


def linear_forward_bf16[
    relu: Bool
](
    y: Ptr,  # (G, O, L)
    x: Ptr,  # (G, I, L)
    w: Ptr,  # (O, I)
    b: Ptr,  # (O)
    scratch: Ptr,  # pairs of x, of each shard in its own; and NB rows of w
    G: Int,
    I: Int,
    O: Int,
    shards: Int = 1,
    apart: Int = 0,  # floats from x, y and scratch of one shard to those of the next
):
    """Computes y = W x + b, then max(y, 0) if `relu`.

    The weights are packed once, and multiplied with all shards of a run.
    """
    var pairs = (I + 1) // 2
    var xp = scratch.unsafe_bitcast[BFloat16]()  # (G, pairs, L, 2)
    var wp = xp.unsafe_offset(G * pairs * 2 * LANES)  # (NB, pairs, 2)
    for s in range(shards):
        pack_neighbours(xp.unsafe_offset(2 * s * apart), x.unsafe_offset(s * apart), G, I, 1)
    var blocks = (pairs + BLOCK - 1) // BLOCK
    for block in range(blocks):
        var p0 = pairs * block // blocks
        var count = pairs * (block + 1) // blocks - p0
        for o in range(0, O, NB):
            var n = min(NB, O - o)
            for i in range(n):
                pack_row(
                    wp.unsafe_offset(i * 2 * count), w.unsafe_offset((o + i) * I + 2 * p0), min(2 * count, I - 2 * p0)
                )

            @always_inline
            def panel[last: Bool](start: Optional[Ptr], s: Int) {imm}:
                _panel[relu and last, False](
                    y.unsafe_offset(s * apart + o * LANES),
                    xp.unsafe_offset(2 * s * apart + p0 * 2 * LANES),
                    wp,
                    start,
                    G,
                    n,
                    count,
                    count,
                    1,
                    pairs,
                    O * LANES,
                    w.unsafe_offset((o + NB) * I + 2 * p0),
                    I,
                )

            var start = Optional[Ptr]()
            if block == 0:
                start = b.unsafe_offset(o)
            for s in range(shards):
                if block == blocks - 1:
                    panel[True](start, s)
                else:
                    panel[False](start, s)


def linear_forward_rows_bf16[
    relu: Bool
](
    y: Ptr,  # (G, O)
    x: Ptr,  # (G, I)
    w: Ptr,  # (O, I)
    b: Ptr,  # (O)
    scratch: Ptr,  # pairs of x
    G: Int,
    I: Int,
    O: Int,
):
    """The same for a few samples in rows, with the bits that they have in lanes.

    A vector is 16 outputs of one pair of inputs: pairs of weights are transposed on their way (linear_rows.mojo).
    """
    var pairs = (I + 1) // 2
    var xp = scratch.unsafe_bitcast[BFloat16]()  # (G, pairs, 2)
    for n in range(G):
        pack_row(xp.unsafe_offset(n * pairs * 2), x.unsafe_offset(n * I), I)
    for o in range(0, O, LANES):
        var rows = min(O - o, LANES)
        for n in range(G):
            var acc = load_first(b, o, rows)
            for p in range(0, pairs, LANES):
                var a = Array[SIMD[DType.uint32, LANES], LANES](fill=0)
                comptime for r in range(LANES):
                    if r < rows:
                        var at = (o + r) * I + 2 * p
                        var left = I - 2 * p
                        var low = load_first(w, at, left)
                        var high = load_first(w, at + LANES, left - LANES)
                        a[r] = words(low.join(high).cast[DType.bfloat16]())
                transpose(a)
                comptime for c in range(LANES):
                    if p + c < pairs:
                        var v = splat_pair(xp, n * pairs + p + c)
                        acc = dot2(acc, v, bitcast[DType.bfloat16, 2 * LANES](a[c]))
            comptime if relu:
                acc = acc.lt(0).select(Vec(0), acc)
            store_first(y, n * O + o, acc, rows)


def linear_backward_input_bf16(
    dx: Ptr,  # (G, I, L)
    dy: Ptr,  # (G, O, L)
    w: Ptr,  # (O, I)
    scratch: Ptr,  # pairs of dy, of each shard in its own; and COLUMNS columns of w
    G: Int,
    I: Int,
    O: Int,
    shards: Int = 1,
    apart: Int = 0,  # floats from dx, dy and scratch of one shard to those of the next
):
    """Computes dx = W^T dy.

    The weights are packed once, and multiplied with all shards of a run.
    """
    var pairs = (O + 1) // 2
    var dyp = scratch.unsafe_bitcast[BFloat16]()  # (G, pairs, L, 2)
    var wp = dyp.unsafe_offset(G * pairs * 2 * LANES)  # (pairs, COLUMNS, 2)
    var zeros = Array[Float32, COLUMNS](fill=0)
    var zero = zeros.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    for s in range(shards):
        pack_neighbours(dyp.unsafe_offset(2 * s * apart), dy.unsafe_offset(s * apart), G, O, 1)
    var blocks = (pairs + BLOCK - 1) // BLOCK
    for block in range(blocks):
        var p0 = pairs * block // blocks
        var count = pairs * (block + 1) // blocks - p0
        for i in range(0, I, COLUMNS):
            var n = min(COLUMNS, I - i)
            for p in range(count):
                _pack_columns(
                    wp.unsafe_offset(p * 2 * COLUMNS), w.unsafe_offset(2 * (p0 + p) * I + i), n, I, 2 * (p0 + p) + 1 < O
                )
            var start = Optional[Ptr]()
            if block == 0:
                start = zero
            for s in range(shards):
                _panel[False, True](
                    dx.unsafe_offset(s * apart + i * LANES),
                    dyp.unsafe_offset(2 * s * apart + p0 * 2 * LANES),
                    wp,
                    start,
                    G,
                    n,
                    count,
                    1,
                    COLUMNS,
                    pairs,
                    I * LANES,
                    w.unsafe_offset(2 * p0 * I + i + COLUMNS),
                    I,
                )
    _ = zeros^


@always_inline
def _pack_columns(y: HalfPtr, w: Ptr, n: Int, row: Int, two: Bool):
    """Pairs of n columns of a row of w and the next one, or zeros if there is none."""
    for v in range(0, n, LANES):
        prefetch(w.unsafe_offset(AHEAD * row + v))
        prefetch(w.unsafe_offset((AHEAD + 1) * row + v))
        var left = n - v
        var a = load_first(w, v, left)
        var b = Vec(0)
        if two:
            b = load_first(w, row + v, left)
        y.unsafe_store(2 * v, pair(a, b))


# --- gradient of the weights -----------------------------------------------------------------
# 5 outputs x 5 vectors of inputs: 25 sums + 5 + 1 registers, 10 loads for 25 dot2. Blocks and panels as in linear.mojo,
# of twice the samples in as many bytes.
comptime OB = 5
comptime IB = 5
comptime GROUPS = 16  # of a block


def weight_scratch(G: Int, O: Int) -> Int:
    """Floats of scratch memory that linear_backward_weight_bf16 wants."""
    return GROUPS * HALF * IB * LANES + min(G, GROUPS) * HALF * O


@always_inline
def weight_products_bf16[ob: Int, ib: Int](mut acc: Array[Vec, ob * ib], dy: HalfPtr, xt: HalfPtr, G: Int, O: Int):
    """Adds to `acc` the products of ob outputs and ib vectors of inputs, over the pairs of samples of G groups."""
    for g in range(G):
        var d = dy.unsafe_offset(g * O * LANES)
        var x = xt.unsafe_offset(g * HALF * ib * 2 * LANES)
        for l in range(HALF):
            var v = Array[Pair, ib](fill=Pair(0))
            comptime for i in range(ib):
                v[i] = load_pair(x, l * ib + i)
            comptime for o in range(ob):
                var s = splat_pair(d, o * HALF + l)
                comptime for i in range(ib):
                    acc[o * ib + i] = dot2(acc[o * ib + i], v[i], s)


@always_inline
def pairs_first[ib: Int](xt: HalfPtr, x: Ptr, G: Int, I: Int, inputs: Int):
    """Packs pairs of samples of `inputs` inputs of G groups, which fill ib vectors, from x (G, I, L).

    Shape of xt: (G, HALF, ib L, 2).
    """
    for g in range(G):
        for i in range(ib):
            pack_samples(
                xt.unsafe_offset((g * HALF * ib + i) * 2 * LANES),
                x.unsafe_offset((g * I + i * LANES) * LANES),
                LANES,
                ib * LANES,
                inputs - i * LANES,
            )


@no_inline
def _weight_tile[ob: Int, ib: Int](dw: Ptr, dy: HalfPtr, xt: HalfPtr, G: Int, I: Int, O: Int, valid: Int, begins: Bool):
    """The dw of ob outputs and ib vectors of inputs, of which the last has `valid` inputs.

    That of the tile below is fetched: of a shard of 32 samples it takes longer than the products.
    """
    comptime for o in range(ob):
        comptime for i in range(ib):
            prefetch(dw.unsafe_offset((ob + o) * I + i * LANES))
    var acc = Array[Vec, ob * ib](fill=Vec(0))
    weight_products_bf16[ob, ib](acc, dy, xt, G, O)
    comptime for o in range(ob):
        comptime for i in range(ib):
            var at = o * I + i * LANES
            var n = LANES if i < ib - 1 else valid
            var before = Vec(0) if begins else load_first(dw, at, n)
            store_first(dw, at, before + acc[o * ib + i], n)


def linear_backward_weight_bf16(
    dw: Ptr,  # (O, I), added to
    db: Ptr,  # (O), added to
    dy: Ptr,  # (G, O, L)
    x: Ptr,  # (G, I, L)
    scratch: Ptr,  # weight_scratch floats
    G: Int,
    I: Int,
    O: Int,
    begins: Bool = False,
):
    """Adds dW += dy x^T and db += dy, summed over samples; to zeros if it `begins`."""
    var vectors = ceildiv(I, LANES)
    var panels = ceildiv(vectors, IB)
    var xt = scratch.unsafe_bitcast[BFloat16]()  # (groups, HALF, ib L, 2)
    var dyp = xt.unsafe_offset(GROUPS * HALF * IB * 2 * LANES)  # (groups, O, HALF, 2)
    for first in range(0, G, GROUPS):
        var groups = min(GROUPS, G - first)
        pack_row(dyp, dy.unsafe_offset(first * O * LANES), groups * O * LANES)

        @always_inline
        def panel[ib: Int](v: Int) {imm}:
            pairs_first[ib](xt, x.unsafe_offset((first * I + v * LANES) * LANES), groups, I, I - v * LANES)

            @always_inline
            def tile[ob: Int](o: Int) {imm}:
                _weight_tile[ob, ib](
                    dw.unsafe_offset(o * I + v * LANES),
                    dyp.unsafe_offset(o * LANES),
                    xt,
                    groups,
                    I,
                    O,
                    min(I - (v + ib - 1) * LANES, LANES),
                    begins and first == 0,
                )

            in_tiles[OB](O, tile)

        for p in range(panels):
            var v = vectors * p // panels
            var n = vectors * (p + 1) // panels - v
            comptime for ib in range(1, IB + 1):
                if n == ib:
                    panel[ib](v)
    if begins:
        fill(db, 0, O)
    bias_gradient[LANES](db, dy, G, O, 1)
