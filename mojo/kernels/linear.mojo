"""Linear layer over lanes: y = W x + b (see lanes.mojo for the layout and the letters).

Forward and the gradient of the input are one tile with W walked along rows or along columns. The gradient of the
weights is a sum over samples, so there the samples must leave the lanes: x is transposed once into scratch memory.

The sums of forward (over I) and of the gradient of the input (over O) are cut in parts (parts.mojo), so that several
processes can compute them together. Sums over samples are not: each process that needs one has all samples.
"""

from std.sys import masked_load, masked_store
from std.math import iota
from std.memory import unsafe_stack_allocation

from .lanes import F32, LANES, REGISTERS, Ptr, Vec, load, splat, store, madd
from .layout import unpack_rows
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
):
    """Outputs are w_out apart in w, inputs w_in; x and w start at the first input of `part`.
    """
    var saved = unsafe_stack_allocation[
        2 * nb * gb * LANES, F32, alignment=64
    ]()
    var acc = Array[Vec, nb * gb](fill=Vec(0))
    var start = cut(inputs, part)
    for p in range(parts):
        comptime for i in range(nb * gb):
            acc[i] = Vec(0)
        for i in range(
            cut(inputs, part + p) - start, cut(inputs, part + p + 1) - start
        ):
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


@always_inline
def _product[
    relu: Bool
](
    y: Ptr,
    x: Ptr,
    w: Ptr,
    b: Optional[Ptr],
    G: Int,
    outputs: Int,
    inputs: Int,
    part: Int,
    parts: Int,
    w_out: Int,
    w_in: Int,
):
    """Sums over the inputs of `parts` parts from `part` on; x has those inputs only, w all.
    """
    var start = cut(inputs, part)
    var held = cut(inputs, part + parts) - start
    var wp = w.unsafe_offset(start * w_in)

    @always_inline
    def groups[gb: Int](g: Int) {imm}:
        var n = 0
        comptime for i in range(len(OUTPUTS)):
            comptime nb = materialize[OUTPUTS]()[i]
            comptime if nb * gb + gb + 1 < REGISTERS or nb == 1:
                while n + nb <= outputs:
                    var bias = b
                    if b:
                        bias = b.value().unsafe_offset(n)
                    _tile[nb, gb, relu](
                        y.unsafe_offset((g * outputs + n) * LANES),
                        x.unsafe_offset(g * held * LANES),
                        wp.unsafe_offset(n * w_out),
                        bias,
                        inputs,
                        part,
                        parts,
                        w_out,
                        w_in,
                        held * LANES,
                        outputs * LANES,
                    )
                    n += nb

    var g = 0
    while g + GB <= G:
        groups[GB](g)
        g += GB
    while g < G:
        groups[1](g)
        g += 1


def linear_forward[
    relu: Bool
](
    y: Ptr,  # (G, O, L)
    x: Ptr,  # (G, I, L)
    w: Ptr,  # (O, I)
    b: Ptr,  # (O)
    G: Int,
    I: Int,
    O: Int,
):
    """Computes y = W x + b, then max(y, 0) if `relu`. The sum over I in parts, then the bias.
    """
    _product[relu](y, x, w, b, G, O, I, 0, PARTS, I, 1)


def linear_backward_input(
    dx: Ptr,  # (G, I, L)
    dy: Ptr,  # (G, O, L)
    w: Ptr,  # (O, I)
    G: Int,
    I: Int,
    O: Int,
):
    """Computes dx = W^T dy. The sum over O in parts."""
    _product[False](dx, dy, w, None, G, I, O, 0, PARTS, 1, I)


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
    """The sum of `parts` parts (1, 2 or 4) from `part` on, without bias; linear_bias finishes the sum of all.
    """
    _product[False](y, x, w, None, G, O, I, part, parts, I, 1)


def linear_backward_input_parts(
    dx: Ptr,  # (G, I, L)
    dy: Ptr,  # (G, the outputs of the parts, L)
    w: Ptr,  # (O, I), all of it
    G: Int,
    I: Int,
    O: Int,
    part: Int,
    parts: Int,
):
    """The sum of `parts` parts (1, 2 or 4) from `part` on."""
    _product[False](dx, dy, w, None, G, I, O, part, parts, 1, I)


def linear_backward_input_columns(
    dx: Ptr,  # (G, columns, L)
    dy: Ptr,  # (G, O, L)
    w: Ptr,  # (O, columns of row_stride)
    G: Int,
    columns: Int,
    O: Int,
    row_stride: Int,
):
    """Some features of linear_backward_input: those whose weights are the first `columns` of each row from w on.
    """
    _product[False](dx, dy, w, None, G, columns, O, 0, PARTS, 1, row_stride)


def linear_bias[
    relu: Bool
](
    y: Ptr,  # (G, O, L)
    x: Ptr,  # (G, O, L), may be y
    b: Ptr,  # (O)
    G: Int,
    O: Int,
):
    """Computes y = x + b, then max(y, 0) if `relu`: the end of linear_forward.
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


@always_inline
def _weight_tile[
    ob: Int, ib: Int, partial: Bool
](
    dw: Ptr,
    dy: Ptr,
    xt: Ptr,
    G: Int,
    I: Int,
    O: Int,
    valid: Int,
    row_stride: Int,
):
    """The dw of ob outputs and ib vectors of inputs; of a partial one only `valid` inputs exist.
    """
    var acc = Array[Vec, ob * ib](fill=Vec(0))
    for g in range(G):
        for l in range(LANES):
            var row = xt.unsafe_offset((g * LANES + l) * I)
            var v = Array[Vec, ib](fill=Vec(0))
            comptime for i in range(ib):
                comptime if partial:
                    v[i] = masked_load[LANES](
                        row, iota[F32, LANES]().lt(Float32(valid)), Vec(0)
                    )
                else:
                    v[i] = load(row, i * LANES)
            comptime for o in range(ob):
                var s = splat(dy, (g * O + o) * LANES + l)
                comptime for i in range(ib):
                    acc[o * ib + i] = madd(v[i], s, acc[o * ib + i])
    comptime for o in range(ob):
        comptime for i in range(ib):
            var p = dw.unsafe_offset(o * row_stride + i * LANES)
            comptime if partial:
                var mask = iota[F32, LANES]().lt(Float32(valid))
                var sum = masked_load[LANES](p, mask, Vec(0)) + acc[o * ib + i]
                masked_store[LANES](sum, p, mask)
            else:
                store(p, 0, load(p, 0) + acc[o * ib + i])


def linear_backward_weight(
    dw: Ptr,  # (O, I of row_stride), added to
    db: Ptr,  # (O), added to
    dy: Ptr,  # (G, O, L)
    x: Ptr,  # (G, I, L)
    xt: Ptr,  # scratch, (G * L, I)
    G: Int,
    I: Int,
    O: Int,
    row_stride: Int,
):
    """Adds dW += dy x^T and db += dy, summed over samples.

    A row of dw is `row_stride` >= I floats after the one before: I, or more where x has some columns of the layer only.
    """
    unpack_rows(xt, x, G * LANES, I)
    var vectors = I // LANES

    @always_inline
    def outputs[ob: Int](o: Int) {imm}:
        @always_inline
        def tile[ib: Int, partial: Bool](i: Int) {imm}:
            _weight_tile[ob, ib, partial](
                dw.unsafe_offset(o * row_stride + i * LANES),
                dy.unsafe_offset(o * LANES),
                xt.unsafe_offset(i * LANES),
                G,
                I,
                O,
                I - i * LANES,
                row_stride,
            )

        var i = 0
        while i + IB <= vectors:
            tile[IB, False](i)
            i += IB
        comptime for n in range(1, IB):
            if vectors - i == n:
                tile[n, False](i)
                i += n
        if I % LANES:
            tile[1, True](vectors)

    var o = 0
    while o + OB <= O:
        outputs[OB](o)
        o += OB
    comptime for n in range(1, OB):
        if O - o == n:
            outputs[n](o)

    for oo in range(O):
        var s = Vec(0)
        for g in range(G):
            s += load(dy, (g * O + oo) * LANES)
        db[unsafe_offset=oo] += s.reduce_add()


# --- the definitions -------------------------------------------------------------


def linear_forward_naive(
    y: Ptr, x: Ptr, w: Ptr, b: Ptr, G: Int, I: Int, O: Int
):
    """The sum as it is written in a textbook, one float at a time."""
    for g in range(G):
        for o in range(O):
            for l in range(LANES):
                var s = b[unsafe_offset=o]
                for i in range(I):
                    s += (
                        w[unsafe_offset=o * I + i]
                        * x[unsafe_offset=(g * I + i) * LANES + l]
                    )
                y[unsafe_offset=(g * O + o) * LANES + l] = s


def linear_backward_naive(
    dx: Ptr, dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, w: Ptr, G: Int, I: Int, O: Int
):
    """Every product of the forward sum hands dy to both its factors. Adds to dx, too.
    """
    for g in range(G):
        for o in range(O):
            for l in range(LANES):
                var d = dy[unsafe_offset=(g * O + o) * LANES + l]
                db[unsafe_offset=o] += d
                for i in range(I):
                    var xi = (g * I + i) * LANES + l
                    dw[unsafe_offset=o * I + i] += d * x[unsafe_offset=xi]
                    dx[unsafe_offset=xi] += d * w[unsafe_offset=o * I + i]
