"""Linear layer over lanes: y = W x + b (see lanes.mojo for the layout and the letters).

Forward and the gradient of the input are one tile with W walked along rows or along columns. The gradient of the
weights is a sum over samples, so there the samples must leave the lanes: x is transposed into scratch memory.

The sums of forward (over I) and of the gradient of the input (over O) are cut in parts (parts.mojo), so that several
processes can compute them together. Sums over samples are not: each process that needs one has all samples.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import PrefetchOptions, prefetch

from .buffers import fill
from .lanes import (
    F32,
    LANES,
    REGISTERS,
    Ptr,
    Vec,
    in_tiles,
    in_tiles_and_ones,
    load,
    load_first,
    madd,
    splat,
    store,
    store_first,
)
from .layout import transpose
from .lowp import bias_gradient
from .parts import PARTS, cut, fold

# --- register tiles -----------------------------------------------------------
# nb outputs x gb groups of samples. 12 x 2 sums: 24 FMAs (12 cycles) for 14 loads (7 cycles).
comptime OUTPUTS: List[Int] = [12, 10, 8, 6, 4, 2, 1]
comptime GB = 2 if REGISTERS == 32 else 1


@always_inline
def _tile[
    nb: Int, gb: Int, relu: Bool
](
    y: Ptr,
    x: Ptr,
    w: Ptr,
    b: Optional[Ptr],
    inputs: Int,
    part: Int,
    parts: Int,
    w_out: Int,
    w_in: Int,
    x_group: Int,
    y_group: Int,
    ahead: Ptr,
    ahead_row: Int,
):
    """Outputs are w_out apart in w, inputs w_in; x and w start at the first input of `part`.

    On the way, weights that are needed later are fetched: a line of memory for each input, `ahead_row` floats apart,
    from `ahead` on. If there is nothing to fetch, `ahead_row` is 0 and `ahead` is a line that is in the cache. A
    pointer that runs is all that the registers have room for. With an address computed from i, sums spill and a third
    of the speed is lost.
    """
    var saved = unsafe_stack_allocation[2 * nb * gb * LANES, F32, alignment=64]()
    var acc = Array[Vec, nb * gb](fill=Vec(0))
    var start = cut(inputs, part)
    var next = ahead
    for p in range(parts):
        comptime for i in range(nb * gb):
            acc[i] = Vec(0)
        for i in range(cut(inputs, part + p) - start, cut(inputs, part + p + 1) - start):
            prefetch[TO_SECOND_LEVEL](next)
            next = next.unsafe_offset(ahead_row)
            var v = Array[Vec, gb](fill=Vec(0))
            comptime for g in range(gb):
                v[g] = load(x, g * x_group + i * LANES)
            var wi = w.unsafe_offset(i * w_in)
            comptime for n in range(nb):
                var s = splat(wi, n * w_out)
                comptime for g in range(gb):
                    acc[n * gb + g] = madd(v[g], s, acc[n * gb + g])
        fold(acc, saved, p, parts)
    comptime for n in range(nb):
        if b:
            var bias = splat(b.value(), n)
            comptime for g in range(gb):
                acc[n * gb + g] += bias
        comptime for g in range(gb):
            var s = acc[n * gb + g]
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            store(y, g * y_group + n * LANES, s)


# Outputs are taken in panels whose weights stay in the second level of the cache while all groups pass. In the gradient
# of the input outputs are columns of w, and every tile would take a line of memory, and often a page, per row of w: if
# there are more groups than one tile has, the columns of a panel are packed side by side first (1536 -> 384, 256
# samples: 80 % of the peak instead of 50 %). A panel's weights are seldom in the cache when their turn comes, so the
# last groups that meet a panel fetch those of the next one, a part with each tile. They go to the second level only: in
# the first, lines of columns lie so far apart that they would push out what the tile reads (GPT on a Xeon: 11 % of the
# gradient of the input lost).
comptime PANEL = 96  # 8 tiles of 12 outputs
comptime AHEAD = 16  # rows that packing fetches ahead
comptime TO_SECOND_LEVEL = PrefetchOptions().for_read().medium_locality().to_data_cache()


@always_inline
def _product[
    relu: Bool, columns: Bool
](
    y: Ptr,
    x: Ptr,
    w: Ptr,
    b: Optional[Ptr],
    packed: Optional[Ptr],
    G: Int,
    outputs: Int,
    inputs: Int,
    part: Int,
    parts: Int,
    stride: Int,
    shards: Int = 1,
    apart: Int = 0,
):
    """Sums over the inputs of `parts` parts from `part` on; x has those inputs only, w all.

    Outputs are rows of w, `stride` floats apart, or if `columns` columns, for which `packed` has room for PANEL of each
    of those inputs. A panel of w meets all shards of a run, whose x and y are `apart` floats apart.
    """
    var packs = columns and G * shards > GB
    var start = cut(inputs, part)
    var held = cut(inputs, part + parts) - start
    var step = stride if columns else 1
    var wp = w.unsafe_offset(start * step)
    if packs:
        step = PANEL

    for first in range(0, outputs, PANEL):
        var end = min(first + PANEL, outputs)
        if packs:
            _pack(packed.value(), wp.unsafe_offset(first), held, end - first, stride)

        @always_inline
        def groups[gb: Int](g: Int, shard: Int) {imm}:
            var n = first
            comptime for i in range(len(OUTPUTS)):
                comptime nb = materialize[OUTPUTS]()[i]
                comptime if nb * gb + gb + 1 < REGISTERS or nb == 1:
                    while n + nb <= end:
                        var bias = b
                        if b:
                            bias = b.value().unsafe_offset(n)
                        var wn = wp.unsafe_offset(n if columns else n * stride)
                        if packs:
                            wn = packed.value().unsafe_offset(n - first)
                        var ahead = wn
                        var ahead_row = 0
                        if g + gb >= G and shard == shards - 1:  # the last groups
                            comptime if columns:
                                # A line of each row that will be packed, as long as the next panel has lines.
                                var line = (n - first) // nb * LANES
                                if packs and line < PANEL and first + PANEL + line < outputs:
                                    ahead = wp.unsafe_offset(first + PANEL + line)
                                    ahead_row = stride
                            else:
                                # As many rows of the next panel as this tile has. They lie one after another.
                                if held == stride and n + PANEL < outputs:
                                    ahead = wp.unsafe_offset((n + PANEL) * stride)
                                    ahead_row = nb
                        _tile[nb, gb, relu](
                            y.unsafe_offset(shard * apart + (g * outputs + n) * LANES),
                            x.unsafe_offset(shard * apart + g * held * LANES),
                            wn,
                            bias,
                            inputs,
                            part,
                            parts,
                            1 if columns else stride,
                            step,
                            held * LANES,
                            outputs * LANES,
                            ahead,
                            ahead_row,
                        )
                        n += nb

        for shard in range(shards):

            @always_inline
            def of_shard[gb: Int](g: Int) {imm}:
                groups[gb](g, shard)

            in_tiles_and_ones[GB](G, of_shard)


@always_inline
def _pack(y: Ptr, w: Ptr, rows: Int, columns: Int, stride: Int):
    """The first `columns` numbers of each row of w (rows, stride), to y (rows, PANEL)."""
    for r in range(rows):
        var from_ = w.unsafe_offset(r * stride)
        var to = y.unsafe_offset(r * PANEL)
        if columns == PANEL:
            comptime for i in range(0, PANEL, LANES):
                prefetch(from_.unsafe_offset(AHEAD * stride + i))
                store(to, i, load(from_, i))
        else:
            for i in range(0, columns, LANES):
                store(to, i, load_first(from_, i, columns - i))


def columns_scratch(G: Int, O: Int) -> Int:
    """Floats of scratch memory that linear_backward_input, and its forms for O outputs or columns, want.

    G counts the groups of all shards.
    """
    return PANEL * O if G > GB else 0


def linear_forward[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, G: Int, I: Int, O: Int, shards: Int = 1, apart: Int = 0):
    """Computes y = W x + b, then max(y, 0) if `relu`, of `shards` shards whose x and y are `apart` floats apart.

    The sum over I is added in parts, then the bias. Shapes: y (G, O, L), x (G, I, L), w (O, I), b (O).
    """
    _product[relu, False](y, x, w, b, None, G, O, I, 0, PARTS, I, shards, apart)


def linear_backward_input(
    dx: Ptr,  # (G, I, L)
    dy: Ptr,  # (G, O, L)
    w: Ptr,  # (O, I)
    packed: Ptr,  # scratch, columns_scratch(shards G, O) floats
    G: Int,
    I: Int,
    O: Int,
    shards: Int = 1,
    apart: Int = 0,  # floats from dx and dy of one shard to those of the next
):
    """Computes dx = W^T dy. The sum over O in parts."""
    _product[False, True](dx, dy, w, None, packed, G, I, O, 0, PARTS, I, shards, apart)


# --- a node of the sums, for tensor parallelism ---------------------------------------


def linear_forward_parts(
    y: Ptr,  # (G, O, L)
    x: Ptr,  # (G, the inputs of the parts, L)
    w: Ptr,  # (O, I), all of it
    G: Int,
    I: Int,
    O: Int,
    part: Int,
    parts: Int,
):
    """The sum of `parts` parts (1, 2 or 4) from `part` on, without bias; linear_bias finishes the sum of all."""
    _product[False, False](y, x, w, None, None, G, O, I, part, parts, I)


def linear_backward_input_parts(
    dx: Ptr,  # (G, I, L)
    dy: Ptr,  # (G, the outputs of the parts, L)
    w: Ptr,  # (O, I), all of it
    packed: Ptr,  # scratch, columns_scratch(G, those outputs) floats
    G: Int,
    I: Int,
    O: Int,
    part: Int,
    parts: Int,
):
    """The sum of `parts` parts (1, 2 or 4) from `part` on."""
    _product[False, True](dx, dy, w, None, packed, G, I, O, part, parts, I)


def linear_backward_input_columns(
    dx: Ptr,  # (G, columns, L)
    dy: Ptr,  # (G, O, L)
    w: Ptr,  # (O, columns of row_stride)
    packed: Ptr,  # scratch, columns_scratch(G, O) floats
    G: Int,
    columns: Int,
    O: Int,
    row_stride: Int,
):
    """Some features of linear_backward_input: those whose weights are the first `columns` of each row from w on."""
    _product[False, True](dx, dy, w, None, packed, G, columns, O, 0, PARTS, row_stride)


def linear_bias[relu: Bool](y: Ptr, x: Ptr, b: Ptr, G: Int, O: Int):
    """Computes y = x + b, then max(y, 0) if `relu`: the end of linear_forward.

    Shapes: y and x (G, O, L), b (O). x may be y.
    """
    for g in range(G):
        for o in range(O):
            var at = (g * O + o) * LANES
            var s = load(x, at) + splat(b, o)
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            store(y, at, s)


# --- gradient of the weights ---------------------------------------------------
# 5 outputs x 5 vectors of inputs: 25 sums + 5 + 1 registers, 10 loads for 25 FMAs.
comptime OB = 5 if REGISTERS == 32 else (2 if REGISTERS == 8 else 1)
comptime IB = 5 if REGISTERS == 32 else (2 if REGISTERS == 8 else 1)
# Samples are taken in blocks of 8 groups, inputs in panels of at most IB vectors: a panel's x, 40 KiB, stays in the
# first or second level of the cache while it meets all outputs, and each tile reads it from one end to the other. All
# rows of x at a stride of I floats (4,096 x 1536 -> 384) reached a quarter of the speed. A sum is a chain over the
# samples of a block; the chains are added to dw in the order of the blocks.
comptime BLOCK = 8
comptime WEIGHT_SCRATCH = BLOCK * LANES * IB * LANES
"""Floats of scratch memory that linear_backward_weight wants."""


@always_inline
def weight_products[ob: Int, ib: Int](mut acc: Array[Vec, ob * ib], dy: Ptr, xt: Ptr, G: Int, O: Int):
    """Adds to `acc` the products of ob outputs and ib vectors of inputs, over the samples of G groups."""
    for g in range(G):
        var d = dy.unsafe_offset(g * O * LANES)
        comptime for o in range(ob):  # dy of the tile after the next: a group's outputs lie one after another
            prefetch(d.unsafe_offset((2 * ob + o) * LANES))
        var rows = xt.unsafe_offset(g * LANES * ib * LANES)
        for l in range(LANES):
            var v = Array[Vec, ib](fill=Vec(0))
            comptime for i in range(ib):
                v[i] = load(rows, (l * ib + i) * LANES)
            comptime for o in range(ob):
                var s = splat(d, o * LANES + l)
                comptime for i in range(ib):
                    acc[o * ib + i] = madd(v[i], s, acc[o * ib + i])


@always_inline
def _weight_tile[
    ob: Int, ib: Int
](dw: Ptr, dy: Ptr, xt: Ptr, G: Int, O: Int, valid: Int, row_stride: Int, begins: Bool):
    """The dw of ob outputs and ib vectors of inputs, of which the last has `valid` inputs."""
    # From beyond the second level it takes as long as the samples of a small shard: that of the tile below is fetched.
    comptime for o in range(ob):
        comptime for i in range(ib):
            prefetch(dw.unsafe_offset((ob + o) * row_stride + i * LANES))
    var acc = Array[Vec, ob * ib](fill=Vec(0))
    weight_products[ob, ib](acc, dy, xt, G, O)
    comptime for o in range(ob):
        var row = dw.unsafe_offset(o * row_stride)
        comptime for i in range(ib):
            var n = LANES if i < ib - 1 else valid
            var before = Vec(0) if begins else load_first(row, i * LANES, n)
            store_first(row, i * LANES, before + acc[o * ib + i], n)


@always_inline
def samples_first[ib: Int](xt: Ptr, x: Ptr, G: Int, I: Int, inputs: Int):
    """Transposes `inputs` inputs of G groups, which fill ib vectors, from x (G, I, L) into xt (G * L, ib * L)."""
    for g in range(G):
        comptime for i in range(ib):
            var n = min(inputs - i * LANES, LANES)
            var a = Array[Vec, LANES](fill=Vec(0))
            comptime for f in range(LANES):
                prefetch(x.unsafe_offset(((g + 1) * I + i * LANES + f) * LANES))  # of the next group
                if f < n:
                    a[f] = load(x, (g * I + i * LANES + f) * LANES)
            transpose(a)
            comptime for l in range(LANES):
                store(xt, ((g * LANES + l) * ib + i) * LANES, a[l])


@always_inline
def _weight_panel[
    ib: Int
](dw: Ptr, dy: Ptr, x: Ptr, xt: Ptr, G: Int, I: Int, O: Int, inputs: Int, row_stride: Int, begins: Bool):
    """All outputs of `inputs` inputs, which fill ib vectors, over G groups."""
    samples_first[ib](xt, x, G, I, inputs)
    var valid = inputs - (ib - 1) * LANES

    @always_inline
    def tile[ob: Int](o: Int) {imm}:
        _weight_tile[ob, ib](
            dw.unsafe_offset(o * row_stride), dy.unsafe_offset(o * LANES), xt, G, O, valid, row_stride, begins
        )

    in_tiles[OB](O, tile)


def linear_backward_weight(
    dw: Ptr,  # (O, I of row_stride), added to
    db: Ptr,  # (O), added to
    dy: Ptr,  # (G, O, L)
    x: Ptr,  # (G, I, L)
    xt: Ptr,  # scratch, WEIGHT_SCRATCH floats
    G: Int,
    I: Int,
    O: Int,
    row_stride: Int,
    begins: Bool = False,
):
    """Adds dW += dy x^T and db += dy, summed over samples; to zeros if it `begins`.

    A row of dw is `row_stride` >= I floats after the one before: I, or more where x has some columns of the layer only.
    """
    var vectors = ceildiv(I, LANES)
    var panels = ceildiv(vectors, IB)
    for g in range(0, G, BLOCK):
        for p in range(panels):
            var first = vectors * p // panels
            var last = vectors * (p + 1) // panels
            comptime for ib in range(1, IB + 1):
                if last - first == ib:
                    _weight_panel[ib](
                        dw.unsafe_offset(first * LANES),
                        dy.unsafe_offset(g * O * LANES),
                        x.unsafe_offset((g * I + first * LANES) * LANES),
                        xt,
                        min(BLOCK, G - g),
                        I,
                        O,
                        min(last * LANES, I) - first * LANES,
                        row_stride,
                        begins and g == 0,
                    )
    if begins:
        fill(db, 0, O)
    bias_gradient[LANES](db, dy, G, O, 1)
