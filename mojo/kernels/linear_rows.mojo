"""Linear layer for a few samples, in rows (N, I): vectors run along the inputs.

The same functions as linear.mojo with the same letters and arguments; G counts samples. Bound by reading the weights,
so each pass over them does all it can.
"""

from .lanes import (
    madd,
    F32,
    LANES,
    REGISTERS,
    Ptr,
    Vec,
    load,
    load_first,
    splat,
    store,
    store_first,
)

comptime WIDE = 8 if REGISTERS == 32 else 2  # outputs (forward) or vectors of inputs (backward) at once


def linear_forward_rows[
    relu: Bool
](y: Ptr, x: Ptr, w: Ptr, b: Ptr, G: Int, I: Int, O: Int):
    """Computes y = W x + b, then max(y, 0) if `relu`. Shapes as for linear_forward with L = 1.
    """

    @always_inline
    def tile[ob: Int](n: Int, o: Int) {imm}:
        var acc = Array[Vec, ob](fill=Vec(0))
        var xn = x.unsafe_offset(n * I)
        var wo = w.unsafe_offset(o * I)
        var i = 0
        while i + LANES <= I:
            var v = load(xn, i)
            comptime for j in range(ob):
                acc[j] = madd(load(wo, j * I + i), v, acc[j])
            i += LANES
        if i < I:
            var v = load_first(xn, i, I - i)
            comptime for j in range(ob):
                acc[j] = madd(load_first(wo, j * I + i, I - i), v, acc[j])
        comptime for j in range(ob):
            var s = acc[j].reduce_add() + b[unsafe_offset=o + j]
            comptime if relu:
                if s < 0:
                    s = 0
            y[unsafe_offset=n * O + o + j] = s

    for n in range(G):
        var o = 0
        while o + WIDE <= O:
            tile[WIDE](n, o)
            o += WIDE
        while o < O:
            tile[1](n, o)
            o += 1


def linear_backward_input_rows(
    dx: Ptr, dy: Ptr, w: Ptr, G: Int, I: Int, O: Int
):
    """Computes dx = W^T dy. Shapes as for linear_backward_input with L = 1."""
    for n in range(G):
        var i = 0
        while i + WIDE * LANES <= I:
            var acc = Array[Vec, WIDE](fill=Vec(0))
            for o in range(O):
                var d = splat(dy, n * O + o)
                comptime for j in range(WIDE):
                    acc[j] = madd(load(w, o * I + i + j * LANES), d, acc[j])
            comptime for j in range(WIDE):
                store(dx, n * I + i + j * LANES, acc[j])
            i += WIDE * LANES
        while i < I:
            var acc = Vec(0)
            for o in range(O):
                acc = madd(
                    load_first(w, o * I + i, I - i), splat(dy, n * O + o), acc
                )
            store_first(dx, n * I + i, acc, I - i)
            i += LANES


def linear_backward_weight_rows(
    dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, G: Int, I: Int, O: Int
):
    """Adds dW += dy x^T and db += dy, summed over samples. Shapes as for linear_backward_weight with L = 1.
    """
    for o in range(O):
        var row = dw.unsafe_offset(o * I)
        for n in range(G):
            var d = splat(dy, n * O + o)
            var xn = x.unsafe_offset(n * I)
            var i = 0
            while i + LANES <= I:
                store(row, i, madd(load(xn, i), d, load(row, i)))
                i += LANES
            if i < I:
                store_first(
                    row,
                    i,
                    madd(
                        load_first(xn, i, I - i), d, load_first(row, i, I - i)
                    ),
                    I - i,
                )
            db[unsafe_offset=o] += dy[unsafe_offset=n * O + o]
