"""Ops of convolutions and linear layers: which kernel computes a record, in lanes and in rows, in float32 and in 16 bits,
a whole layer or a part of one.

The processor's own bf16 products are taken where it has them and the batch is in lanes; else float32 copies of the rounded
operands, in scratch memory, for the float32 kernels.
"""

from std.math import ceildiv

from .conv2d import (
    conv2d_backward_input,
    conv2d_backward_input_any,
    conv2d_backward_weight,
    conv2d_forward,
)
from .conv2d_bf16 import (
    conv2d_backward_input_bf16,
    conv2d_backward_weight_bf16,
    conv2d_forward_bf16,
)
from .conv2d_rows import (
    conv2d_backward_input_rows,
    conv2d_backward_weight_rows,
    conv2d_forward_rows,
)
from .elementwise import fill
from .lanes import LANES, Ptr
from .linear import (
    linear_backward_input,
    linear_backward_input_columns,
    linear_backward_input_parts,
    linear_backward_weight,
    linear_bias,
    linear_forward,
    linear_forward_parts,
)
from .linear_bf16 import (
    linear_backward_input_bf16,
    linear_backward_weight_bf16,
    linear_forward_bf16,
)
from .linear_rows import (
    linear_backward_input_rows,
    linear_backward_weight_rows,
    linear_forward_rows,
)
from .lowp import HAS_BF16, bias_gradient, rounded
from .op import Op
from .record import BF16, FP32, Record


@always_inline
def _packed(r: Record) -> Bool:
    """Whether pairs of bf16 are multiplied."""
    return HAS_BF16 and r.dtype() == BF16 and not r.rows()


@always_inline
def _copy(r: Record, y: Ptr, x: Ptr, n: Int):
    """Rounds n floats of x to the record's type."""
    if r.dtype() == BF16:
        rounded[DType.bfloat16](y, x, n)
    else:
        rounded[DType.float16](y, x, n)


def _bias(r: Record, db: Ptr, dy: Ptr, G: Int, O: Int, n: Int):
    if r.rows():
        bias_gradient[1](db, dy, G, O, n)
    else:
        bias_gradient[LANES](db, dy, G, O, n)


def _half(n: Int) -> Int:
    """Pairs of n numbers; a last odd one is a pair with 0."""
    return (n + 1) // 2


# --- convolutions ---------------------------------------------------------------------------------------------------------


@fieldwise_init
struct _Conv(TrivialRegisterPassable):
    """The sizes of a convolution, which are the arguments G, C, H, W, K, R, T, S of a record.
    """

    var r: Record
    var i: Int  # where they begin

    @always_inline
    def size(self, k: Int) -> Int:
        return self.r.int(self.i + k)

    def x(self) -> Int:
        """Floats of x."""
        var floats = self.size(0) * self.size(1) * self.size(2) * self.size(3)
        return floats * self.r.lanes()

    def plane(self) -> Int:
        """Pixels of a channel of y."""
        var S = self.size(7)
        var P = (self.size(2) - self.size(5)) // S + 1
        return P * ((self.size(3) - self.size(6)) // S + 1)

    def y(self) -> Int:
        """Floats of y."""
        return self.size(0) * self.size(4) * self.plane() * self.r.lanes()

    def w(self) -> Int:
        """Floats of the weight."""
        return self.size(4) * self.size(1) * self.size(5) * self.size(6)

    @always_inline
    def run[
        f: def(Ptr, Ptr, Ptr, Ptr, Int, Int, Int, Int, Int, Int, Int, Int) thin
    ](self, a: Ptr, b: Ptr, c: Ptr, d: Ptr):
        f(
            a,
            b,
            c,
            d,
            self.size(0),
            self.size(1),
            self.size(2),
            self.size(3),
            self.size(4),
            self.size(5),
            self.size(6),
            self.size(7),
        )

    @always_inline
    def run[
        f: def(
            Ptr, Ptr, Ptr, Ptr, Ptr, Int, Int, Int, Int, Int, Int, Int, Int
        ) thin
    ](self, a: Ptr, b: Ptr, c: Ptr, d: Ptr, e: Ptr):
        f(
            a,
            b,
            c,
            d,
            e,
            self.size(0),
            self.size(1),
            self.size(2),
            self.size(3),
            self.size(4),
            self.size(5),
            self.size(6),
            self.size(7),
        )

    @always_inline
    def run[
        f: def(Ptr, Ptr, Ptr, Int, Int, Int, Int, Int, Int, Int, Int) thin
    ](self, a: Ptr, b: Ptr, c: Ptr):
        f(
            a,
            b,
            c,
            self.size(0),
            self.size(1),
            self.size(2),
            self.size(3),
            self.size(4),
            self.size(5),
            self.size(6),
            self.size(7),
        )


def _conv2d_forward[relu: Bool](r: Record):
    var sizes = _Conv(r, 6)
    var x = r.ptr(2)
    var w = r.ptr(3)
    if _packed(r):
        comptime if HAS_BF16:
            comptime kernel = conv2d_forward_bf16[relu]
            sizes.run[kernel](r.ptr(1), x, w, r.ptr(4), r.ptr(5))
        return
    if r.dtype() != FP32:
        x = r.ptr(5)
        w = x.unsafe_offset(sizes.x())
        _copy(r, x, r.ptr(2), sizes.x())
        _copy(r, w, r.ptr(3), sizes.w())
    if r.rows():
        sizes.run[conv2d_forward_rows[relu]](r.ptr(1), x, w, r.ptr(4))
    else:
        sizes.run[conv2d_forward[relu]](r.ptr(1), x, w, r.ptr(4))


def _conv2d_forward_op(r: Record):
    if r.int(14):
        _conv2d_forward[True](r)
    else:
        _conv2d_forward[False](r)


def _conv2d_backward_weight(r: Record):
    var sizes = _Conv(r, 6)
    var db = r.ptr(2)
    var dy = r.ptr(3)
    var x = r.ptr(4)
    var K = sizes.size(4)
    if _packed(r):
        comptime if HAS_BF16:
            comptime kernel = conv2d_backward_weight_bf16
            sizes.run[kernel](r.ptr(1), db, dy, x, r.ptr(5))
        return
    if r.dtype() != FP32:
        x = r.ptr(5)
        dy = x.unsafe_offset(sizes.x())
        db = dy.unsafe_offset(sizes.y())  # (K): of the rounded dy, not used
        _copy(r, x, r.ptr(4), sizes.x())
        _copy(r, dy, r.ptr(3), sizes.y())
        fill(db, 0, K)
    if r.rows():
        sizes.run[conv2d_backward_weight_rows](r.ptr(1), db, dy, x)
    else:
        sizes.run[conv2d_backward_weight](r.ptr(1), db, dy, x)
    if r.dtype() != FP32:
        _bias(r, r.ptr(2), r.ptr(3), sizes.size(0), K, sizes.plane())


def _conv2d_backward_input(r: Record):
    var sizes = _Conv(r, 5)
    var dy = r.ptr(2)
    var w = r.ptr(3)
    var one = sizes.size(7) == 1  # the stride
    if _packed(r) and one:
        comptime if HAS_BF16:
            comptime for t in range(1, 6, 2):
                if sizes.size(6) == t:
                    conv2d_backward_input_bf16[t](
                        r.ptr(1),
                        dy,
                        w,
                        r.ptr(4),
                        r.int(5),
                        r.int(6),
                        r.int(7),
                        r.int(8),
                        r.int(9),
                        r.int(10),
                    )
                    return
    if r.dtype() != FP32:
        dy = r.ptr(4)
        w = dy.unsafe_offset(sizes.y())
        _copy(r, dy, r.ptr(2), sizes.y())
        _copy(r, w, r.ptr(3), sizes.w())
    if not r.rows():
        sizes.run[_input_of_all](r.ptr(1), dy, w)
    elif one:
        sizes.run[conv2d_backward_input_rows](r.ptr(1), dy, w)
    else:
        sizes.run[_input_of_any](r.ptr(1), dy, w)


def _input_of_all(
    dx: Ptr,
    dy: Ptr,
    w: Ptr,
    G: Int,
    C: Int,
    H: Int,
    W: Int,
    K: Int,
    R: Int,
    T: Int,
    S: Int,
):
    conv2d_backward_input(dx, dy, w, G, C, H, W, K, R, T, S)


def _input_of_any(
    dx: Ptr,
    dy: Ptr,
    w: Ptr,
    G: Int,
    C: Int,
    H: Int,
    W: Int,
    K: Int,
    R: Int,
    T: Int,
    S: Int,
):
    conv2d_backward_input_any[1](dx, dy, w, G, C, H, W, K, R, T, S)


def _conv2d_backward_input_parts(r: Record):
    conv2d_backward_input(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
        r.int(10),
        r.int(11),
        r.int(12),
        r.int(13),
    )


def _conv2d_forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var s = _Conv(r, 6)
    if r.dtype() == FP32:
        return 0
    if _packed(r):  # one group of x, all weights
        var pixels = LANES * s.size(2) * s.size(3)
        return (
            4 * _half(s.size(1)) * (pixels + s.size(4) * s.size(5) * s.size(6))
        )
    return 4 * (s.x() + s.w())


def _conv2d_weight_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var s = _Conv(r, 6)
    if r.dtype() == FP32:
        return 0
    if _packed(r):  # two groups of x and dy
        return 4 * (s.x() + s.y()) // s.size(0)
    return 4 * (s.x() + s.y() + s.size(4))


def _conv2d_input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var s = _Conv(r, 5)
    var T = s.size(6)
    if r.dtype() == FP32:
        return 0
    if _packed(r) and s.size(7) == 1 and (T == 1 or T == 3 or T == 5):
        var weights = s.size(1) * s.size(5) * T  # one group of dy, all weights
        return 4 * _half(s.size(4)) * (LANES * s.plane() + weights)
    return 4 * (s.y() + s.w())


# --- linear layers --------------------------------------------------------------------------------------------------------


def _linear_forward[relu: Bool](r: Record):
    var G = r.int(6)
    var I = r.int(7)
    var O = r.int(8)
    var x = r.ptr(2)
    var w = r.ptr(3)
    var b = r.ptr(4)
    if _packed(r):
        comptime if HAS_BF16:
            linear_forward_bf16[relu](r.ptr(1), x, w, b, r.ptr(5), G, I, O)
        return
    if r.dtype() != FP32:
        var n = G * I * r.lanes()
        x = r.ptr(5)
        w = x.unsafe_offset(n)
        _copy(r, x, r.ptr(2), n)
        _copy(r, w, r.ptr(3), O * I)
    if r.rows():
        linear_forward_rows[relu](r.ptr(1), x, w, b, G, I, O)
    else:
        linear_forward[relu](r.ptr(1), x, w, b, G, I, O)


def _linear_forward_op(r: Record):
    if r.int(9):
        _linear_forward[True](r)
    else:
        _linear_forward[False](r)


def _linear_backward_weight(r: Record):
    var G = r.int(6)
    var I = r.int(7)
    var O = r.int(8)
    var db = r.ptr(2)
    var dy = r.ptr(3)
    var x = r.ptr(4)
    var scratch = r.ptr(5)
    if _packed(r):
        comptime if HAS_BF16:
            linear_backward_weight_bf16(r.ptr(1), db, dy, x, scratch, G, I, O)
        return
    if r.dtype() != FP32:
        var n = G * I * r.lanes()
        var m = G * O * r.lanes()
        x = scratch
        dy = x.unsafe_offset(n)
        db = dy.unsafe_offset(m)  # (O): of the rounded dy, not used
        scratch = db.unsafe_offset(O)
        _copy(r, x, r.ptr(4), n)
        _copy(r, dy, r.ptr(3), m)
        fill(db, 0, O)
    if r.rows():
        linear_backward_weight_rows(r.ptr(1), db, dy, x, G, I, O)
    else:
        linear_backward_weight(r.ptr(1), db, dy, x, scratch, G, I, O, I)
    if r.dtype() != FP32:
        _bias(r, r.ptr(2), r.ptr(3), G, O, 1)


def _linear_backward_input(r: Record):
    var G = r.int(5)
    var I = r.int(6)
    var O = r.int(7)
    var dy = r.ptr(2)
    var w = r.ptr(3)
    if _packed(r):
        comptime if HAS_BF16:
            linear_backward_input_bf16(r.ptr(1), dy, w, r.ptr(4), G, I, O)
        return
    if r.dtype() != FP32:
        var m = G * O * r.lanes()
        dy = r.ptr(4)
        w = dy.unsafe_offset(m)
        _copy(r, dy, r.ptr(2), m)
        _copy(r, w, r.ptr(3), O * I)
    if r.rows():
        linear_backward_input_rows(r.ptr(1), dy, w, G, I, O)
    else:
        linear_backward_input(r.ptr(1), dy, w, G, I, O)


def _linear_forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var I = r.int(7)
    var n = r.int(6) * r.lanes()
    if r.dtype() == FP32:
        return 0
    if _packed(r):
        return 4 * _half(I) * (n + 12)  # x and 12 rows of w
    return 4 * I * (n + r.int(8))


def _linear_weight_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var I = r.int(7)
    var O = r.int(8)
    var n = r.int(6) * r.lanes()
    if r.dtype() == FP32:
        return 0 if r.rows() else 4 * n * I
    if _packed(r):
        return 2 * n * (ceildiv(I, LANES) * LANES + O)  # x and dy
    return 4 * (n * (2 * I + O) + O)


def _linear_input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var O = r.int(7)
    var n = r.int(5) * r.lanes()
    if r.dtype() == FP32:
        return 0
    if _packed(r):
        return 4 * _half(O) * (n + 96)  # dy and 96 columns of w
    return 4 * O * (n + r.int(6))


# --- parts of linear layers, in lanes -------------------------------------------------------------------------------------


def _product_parts[
    f: def(Ptr, Ptr, Ptr, Int, Int, Int, Int, Int) thin
](r: Record):
    f(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
    )


def _linear_backward_weight_columns(r: Record):
    linear_backward_weight(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.ptr(4),
        r.ptr(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
    )


def _linear_backward_input_columns(r: Record):
    linear_backward_input_columns(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
    )


def _linear_bias(r: Record):
    if r.int(6):
        linear_bias[True](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))
    else:
        linear_bias[False](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))


def ops() -> List[Op]:
    """The ops of convolutions and linear layers. relu: with its ReLU; a stride is from one row of w or dw to the next.
    """
    return [
        Op(
            "conv2d_forward",
            "y; x, w, b, ~scratch; G, C, H, W, K, R, T, S, relu",
            _conv2d_forward_op,
            "rounds",
            _conv2d_forward_scratch,
        ),
        Op(
            "conv2d_backward_weight",
            "+dw, +db; dy, x, ~scratch; G, C, H, W, K, R, T, S",
            _conv2d_backward_weight,
            "rounds sums",
            _conv2d_weight_scratch,
        ),
        Op(
            "conv2d_backward_input",
            "dx; dy, w, ~scratch; G, C, H, W, K, R, T, S",
            _conv2d_backward_input,
            "rounds",
            _conv2d_input_scratch,
        ),
        Op(
            "conv2d_backward_input_parts",
            "dx; dy, w; G, C, H, W, K, R, T, S, part, parts",
            _conv2d_backward_input_parts,
            "lanes",
        ),
        Op(
            "linear_forward",
            "y; x, w, b, ~scratch; G, I, O, relu",
            _linear_forward_op,
            "rounds",
            _linear_forward_scratch,
        ),
        Op(
            "linear_backward_weight",
            "+dw, +db; dy, x, ~scratch; G, I, O",
            _linear_backward_weight,
            "rounds sums",
            _linear_weight_scratch,
        ),
        Op(
            "linear_backward_input",
            "dx; dy, w, ~scratch; G, I, O",
            _linear_backward_input,
            "rounds",
            _linear_input_scratch,
        ),
        Op(
            "linear_forward_parts",
            "y; x, w; G, I, O, part, parts",
            _product_parts[linear_forward_parts],
            "lanes",
        ),
        Op(
            "linear_backward_input_parts",
            "dx; dy, w; G, I, O, part, parts",
            _product_parts[linear_backward_input_parts],
            "lanes",
        ),
        Op(
            "linear_backward_weight_columns",
            "+dw, +db; dy, x, ~scratch; G, columns, O, stride",
            _linear_backward_weight_columns,
            "lanes sums",
            _linear_weight_scratch,
        ),
        Op(
            "linear_backward_input_columns",
            "dx; dy, w; G, columns, O, stride",
            _linear_backward_input_columns,
            "lanes",
        ),
        Op(
            "linear_bias",
            "y; x, b; G, O, relu",
            _linear_bias,
            "lanes",
        ),
    ]
