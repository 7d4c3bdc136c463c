"""Linear layer for a few samples, in rows (N, I).

The same functions as linear.mojo with the same letters and arguments; G counts samples. Forward and the gradient of the
input add in the same order, in the same parts, so a sample has the bits that it has in lanes. Bound by reading the
weights, so each pass over them does all it can.
"""

from std.memory import unsafe_stack_allocation

from .lanes import madd, F32, LANES, REGISTERS, Ptr, Vec, in_tiles, load, load_first, splat, store, store_first
from .layout import transpose
from .parts import PARTS, cut, fold

comptime WIDE = 8 if REGISTERS == 32 else 2  # vectors of inputs (backward) at once
comptime SAMPLES = 4  # at once (forward)


def linear_forward_rows[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, G: Int, I: Int, O: Int):
    """Computes y = W x + b, then max(y, 0) if `relu`.

    Shapes as for linear_forward with L = 1.

    A vector is 16 outputs of one input, so the weights are transposed on their way, 16 x 16 at a time.
    """
    for o in range(0, O, LANES):

        @always_inline
        def outputs[ns: Int](n: Int) {imm}:
            _outputs[ns, relu](
                y.unsafe_offset(n * O + o),
                x.unsafe_offset(n * I),
                w.unsafe_offset(o * I),
                b.unsafe_offset(o),
                I,
                O,
                min(O - o, LANES),
            )

        in_tiles[SAMPLES](G, outputs)


@always_inline
def _outputs[ns: Int, relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, I: Int, O: Int, rows: Int):
    """The first `rows` <= LANES outputs of ns samples."""
    var saved = unsafe_stack_allocation[2 * ns * LANES, F32, alignment=64]()
    var acc = Array[Vec, ns](fill=Vec(0))

    @always_inline
    def block[whole: Bool](i: Int, columns: Int) {mut acc, imm}:
        var a = Array[Vec, LANES](fill=Vec(0))
        comptime for o in range(LANES):
            comptime if whole:
                a[o] = load(w, o * I + i)
            else:
                if o < rows:
                    a[o] = load_first(w, o * I + i, columns)
        transpose(a)
        comptime for c in range(LANES):
            if whole or c < columns:
                comptime for n in range(ns):
                    acc[n] = madd(a[c], splat(x, n * I + i + c), acc[n])

    for p in range(PARTS):
        comptime for n in range(ns):
            acc[n] = Vec(0)
        var i = cut(I, p)
        var end = cut(I, p + 1)
        if rows == LANES:
            while i + LANES <= end:
                block[True](i, LANES)
                i += LANES
        while i < end:
            block[False](i, min(end - i, LANES))
            i += LANES
        fold(acc, saved, p, PARTS)
    comptime for n in range(ns):
        var s = acc[n] + load_first(b, 0, rows)
        comptime if relu:
            s = s.lt(0).select(Vec(0), s)
        store_first(y, n * O, s, rows)


def linear_backward_input_rows(dx: Ptr, dy: Ptr, w: Ptr, G: Int, I: Int, O: Int):
    """Computes dx = W^T dy. Shapes as for linear_backward_input with L = 1."""

    @always_inline
    def inputs[wide: Int](n: Int, i: Int) {imm}:
        """Of `wide` vectors of inputs, the last of which may be partly there."""
        var saved = unsafe_stack_allocation[2 * wide * LANES, F32, alignment=64]()
        var acc = Array[Vec, wide](fill=Vec(0))
        for p in range(PARTS):
            comptime for j in range(wide):
                acc[j] = Vec(0)
            for o in range(cut(O, p), cut(O, p + 1)):
                var d = splat(dy, n * O + o)
                comptime for j in range(wide):
                    comptime if wide > 1:
                        acc[j] = madd(load(w, o * I + i + j * LANES), d, acc[j])
                    else:
                        acc[j] = madd(load_first(w, o * I + i, I - i), d, acc[j])
            fold(acc, saved, p, PARTS)
        comptime for j in range(wide):
            comptime if wide > 1:
                store(dx, n * I + i + j * LANES, acc[j])
            else:
                store_first(dx, n * I + i, acc[j], I - i)

    for n in range(G):
        var i = 0
        while i + WIDE * LANES <= I:
            inputs[WIDE](n, i)
            i += WIDE * LANES
        while i < I:
            inputs[1](n, i)
            i += LANES


def linear_backward_weight_rows(dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, G: Int, I: Int, O: Int):
    """Adds dW += dy x^T and db += dy, summed over samples. Shapes as for linear_backward_weight with L = 1."""
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
                store_first(row, i, madd(load_first(xn, i, I - i), d, load_first(row, i, I - i)), I - i)
            db[unsafe_offset=o] += dy[unsafe_offset=n * O + o]
