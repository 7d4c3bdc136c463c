"""Ops of convolutions and linear layers: which kernel computes a record, in lanes and in rows, in float32 and in 16 bits,
a whole layer or a part of one.

The processor's own bf16 products are taken where it has them, of tiles before those of pairs, and the batch is in lanes (a
forward pass: in rows too); else float32 copies of the rounded operands, in scratch memory, for the float32 kernels.
"""

from .conv2d import (
    Conv,
    conv2d_backward_input,
    conv2d_backward_input_any,
    conv2d_backward_weight,
    conv2d_forward,
)
from .conv2d_amx import (
    conv2d_backward_input_amx,
    conv2d_forward_amx,
    forward_scratch,
    input_scratch,
)
from .conv2d_amx_weight import conv2d_backward_weight_amx
from .conv2d_amx_weight import weight_scratch as amx_weight_scratch
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
    WEIGHT_SCRATCH,
    columns_scratch,
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
    linear_forward_rows_bf16,
    weight_scratch,
)
from .linear_rows import (
    linear_backward_input_rows,
    linear_backward_weight_rows,
    linear_forward_rows,
)
from .lowp import HAS_AMX, HAS_BF16, bias_gradient, rounded
from .op import Op, call
from .record import BF16, FP32, Record, sizes_of


@always_inline
def _packed(r: Record) -> Bool:
    """Whether pairs of bf16 are multiplied."""
    return HAS_BF16 and r.dtype() == BF16 and not r.rows()


@always_inline
def _tiled(r: Record) -> Bool:
    """Whether tiles of bf16 are multiplied: in lanes, and in rows in the forward pass."""
    return HAS_AMX and r.dtype() == BF16


def _linear(G: Int, I: Int, O: Int) -> Conv:
    """A linear layer as a convolution of one pixel and one tap."""
    return Conv(G, I, 1, 1, O, 1, 1, 1)


@always_inline
def _rounded(r: Record, x: Ptr, scratch: Ptr, n: Int) -> Tuple[Ptr, Ptr]:
    """The n floats of x rounded to the record's type, which are in scratch memory unless that is float32; and what is left
    of the scratch memory.
    """
    if r.dtype() == FP32:
        return x, scratch
    if r.dtype() == BF16:
        rounded[DType.bfloat16](scratch, x, n)
    else:
        rounded[DType.float16](scratch, x, n)
    return scratch, scratch.unsafe_offset(n)


def _bias(r: Record, db: Ptr, dy: Ptr, G: Int, O: Int, n: Int):
    if r.rows():
        bias_gradient[1](db, dy, G, O, n)
    else:
        bias_gradient[LANES](db, dy, G, O, n)


def _half(n: Int) -> Int:
    """Pairs of n numbers; a last odd one is a pair with 0."""
    return (n + 1) // 2


# --- convolutions ---------------------------------------------------------------------------------------------------------


def _conv2d_forward[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, size: Conv, r: Record):
    if _tiled(r):
        comptime if HAS_AMX:
            conv2d_forward_amx[relu](y, x, w, b, scratch, size, r.rows())
        return
    if _packed(r):
        comptime if HAS_BF16:
            conv2d_forward_bf16[relu](y, x, w, b, scratch, size)
        return
    var xr = _rounded(r, x, scratch, size.G * size.x() * r.lanes())
    var wr = _rounded(r, w, xr[1], size.K * size.taps())
    if r.rows():
        conv2d_forward_rows[relu](y, xr[0], wr[0], b, size)
    else:
        conv2d_forward[relu](y, xr[0], wr[0], b, size)


def _conv2d_forward_op(
    y: Ptr,
    x: Ptr,
    w: Ptr,
    b: Ptr,
    scratch: Ptr,
    size: Conv,
    relu: Bool,
    r: Record,
):
    if relu:
        _conv2d_forward[True](y, x, w, b, scratch, size, r)
    else:
        _conv2d_forward[False](y, x, w, b, scratch, size, r)


def _conv2d_backward_weight(dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, scratch: Ptr, size: Conv, r: Record):
    if _tiled(r) and not r.rows():
        comptime if HAS_AMX:
            conv2d_backward_weight_amx(dw, db, dy, x, scratch, size)
        return
    if _packed(r):
        comptime if HAS_BF16:
            conv2d_backward_weight_bf16(dw, db, dy, x, scratch, size)
        return
    var xr = _rounded(r, x, scratch, size.G * size.x() * r.lanes())
    var dyr = _rounded(r, dy, xr[1], size.G * size.y() * r.lanes())
    var dbr = db
    if r.dtype() != FP32:
        dbr = dyr[1]  # (K): of the rounded dy, not used
        fill(dbr, 0, size.K)
    if r.rows():
        conv2d_backward_weight_rows(dw, dbr, dyr[0], xr[0], size)
    else:
        conv2d_backward_weight(dw, dbr, dyr[0], xr[0], size)
    if r.dtype() != FP32:
        _bias(r, db, dy, size.G, size.K, size.P() * size.Q())


def _conv2d_backward_input(dx: Ptr, dy: Ptr, w: Ptr, scratch: Ptr, size: Conv, r: Record):
    if _tiled(r) and not r.rows():
        comptime if HAS_AMX:
            conv2d_backward_input_amx(dx, dy, w, scratch, size)
        return
    if _packed(r):
        comptime if HAS_BF16:
            conv2d_backward_input_bf16(dx, dy, w, scratch, size)
        return
    var dyr = _rounded(r, dy, scratch, size.G * size.y() * r.lanes())
    var wr = _rounded(r, w, dyr[1], size.K * size.taps())
    if not r.rows():
        conv2d_backward_input(dx, dyr[0], wr[0], size)
    elif size.S == 1:
        conv2d_backward_input_rows(dx, dyr[0], wr[0], size)
    else:
        conv2d_backward_input_any[1](dx, dyr[0], wr[0], size)


def _conv2d_forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var size = sizes_of[Conv](r, 6)
    if r.dtype() == FP32:
        return 0
    if _tiled(r):
        return forward_scratch(size, r.rows())
    if _packed(r):  # one group of x, all weights
        var pixels = LANES * size.H * size.W
        return 4 * _half(size.C) * (pixels + size.K * size.R * size.T)
    return 4 * (size.G * size.x() * r.lanes() + size.K * size.taps())


def _conv2d_weight_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var size = sizes_of[Conv](r, 6)
    if r.dtype() == FP32:
        return 0
    if _tiled(r) and not r.rows():
        return amx_weight_scratch(size)
    if _packed(r):  # two groups of x and dy
        return 4 * LANES * (size.x() + size.y())
    return 4 * (size.G * (size.x() + size.y()) * r.lanes() + size.K)


def _conv2d_input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var size = sizes_of[Conv](r, 5)
    var T = size.T
    if r.dtype() == FP32:
        return 0
    if _tiled(r) and not r.rows():
        return input_scratch(size)
    if _packed(r):
        var pixels = LANES * size.P() * size.Q()  # one group of dy, all weights
        return 4 * _half(size.K) * (pixels + size.C * size.R * T)
    return 4 * (size.G * size.y() * r.lanes() + size.K * size.taps())


# --- linear layers --------------------------------------------------------------------------------------------------------


def _linear_forward[
    relu: Bool
](y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, r: Record,):
    if _tiled(r):
        comptime if HAS_AMX:
            var size = _linear(G, I, O)
            conv2d_forward_amx[relu](y, x, w, b, scratch, size, r.rows())
        return
    if _packed(r):
        comptime if HAS_BF16:
            linear_forward_bf16[relu](y, x, w, b, scratch, G, I, O)
        return
    if HAS_BF16 and r.dtype() == BF16:
        comptime if HAS_BF16:
            linear_forward_rows_bf16[relu](y, x, w, b, scratch, G, I, O)
        return
    var xr = _rounded(r, x, scratch, G * I * r.lanes())
    var wr = _rounded(r, w, xr[1], O * I)
    if r.rows():
        linear_forward_rows[relu](y, xr[0], wr[0], b, G, I, O)
    else:
        linear_forward[relu](y, xr[0], wr[0], b, G, I, O)


def _linear_forward_op(
    y: Ptr,
    x: Ptr,
    w: Ptr,
    b: Ptr,
    scratch: Ptr,
    G: Int,
    I: Int,
    O: Int,
    relu: Bool,
    r: Record,
):
    if relu:
        _linear_forward[True](y, x, w, b, scratch, G, I, O, r)
    else:
        _linear_forward[False](y, x, w, b, scratch, G, I, O, r)


def _linear_backward_weight(
    dw: Ptr,
    db: Ptr,
    dy: Ptr,
    x: Ptr,
    scratch: Ptr,
    G: Int,
    I: Int,
    O: Int,
    r: Record,
):
    if _tiled(r) and not r.rows():
        comptime if HAS_AMX:
            var size = _linear(G, I, O)
            conv2d_backward_weight_amx(dw, db, dy, x, scratch, size)
        return
    if _packed(r):
        comptime if HAS_BF16:
            linear_backward_weight_bf16(dw, db, dy, x, scratch, G, I, O)
        return
    var xr = _rounded(r, x, scratch, G * I * r.lanes())
    var dyr = _rounded(r, dy, xr[1], G * O * r.lanes())
    var dbr = db
    var rest = scratch
    if r.dtype() != FP32:
        dbr = dyr[1]  # (O): of the rounded dy, not used
        rest = dbr.unsafe_offset(O)
        fill(dbr, 0, O)
    if r.rows():
        linear_backward_weight_rows(dw, dbr, dyr[0], xr[0], G, I, O)
    else:
        linear_backward_weight(dw, dbr, dyr[0], xr[0], rest, G, I, O, I)
    if r.dtype() != FP32:
        _bias(r, db, dy, G, O, 1)


def _linear_backward_input(dx: Ptr, dy: Ptr, w: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, r: Record):
    if _tiled(r) and not r.rows():
        comptime if HAS_AMX:
            var size = _linear(G, I, O)
            conv2d_backward_input_amx(dx, dy, w, scratch, size)
        return
    if _packed(r):
        comptime if HAS_BF16:
            linear_backward_input_bf16(dx, dy, w, scratch, G, I, O)
        return
    var dyr = _rounded(r, dy, scratch, G * O * r.lanes())
    var wr = _rounded(r, w, dyr[1], O * I)
    if r.rows():
        linear_backward_input_rows(dx, dyr[0], wr[0], G, I, O)
    else:
        linear_backward_input(dx, dyr[0], wr[0], wr[1], G, I, O)


def _linear_forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var I = r.int(7)
    var n = r.int(6) * r.lanes()
    if r.dtype() == FP32:
        return 0
    if _tiled(r):
        return forward_scratch(_linear(r.int(6), I, r.int(8)), r.rows())
    if _packed(r):
        return 4 * _half(I) * (n + 12)  # x and 12 rows of w
    return 4 * I * (n + r.int(8))


def _linear_weight_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var I = r.int(7)
    var O = r.int(8)
    var n = r.int(6) * r.lanes()
    if r.dtype() == FP32:
        return 0 if r.rows() else 4 * WEIGHT_SCRATCH
    if _tiled(r) and not r.rows():
        return amx_weight_scratch(_linear(r.int(6), I, O))
    if _packed(r):
        return 4 * weight_scratch(r.int(6), O)
    return 4 * (n * (I + O) + O + WEIGHT_SCRATCH)


def _linear_input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var O = r.int(7)
    var n = r.int(5) * r.lanes()
    var packed = 0 if r.rows() else 4 * columns_scratch(r.int(5), O)
    if r.dtype() == FP32:
        return packed
    if _tiled(r) and not r.rows():
        return input_scratch(_linear(r.int(5), r.int(6), O))
    if _packed(r):
        return 4 * _half(O) * (n + 96)  # dy and 96 columns of w
    return 4 * O * (n + r.int(6)) + packed


def _linear_bias(y: Ptr, x: Ptr, b: Ptr, G: Int, O: Int, relu: Bool):
    if relu:
        linear_bias[True](y, x, b, G, O)
    else:
        linear_bias[False](y, x, b, G, O)


def ops() -> List[Op]:
    """The ops of convolutions and linear layers. relu: with its ReLU; a stride is from one row of w or dw to the next.
    """
    return [
        Op(
            "conv2d_forward",
            "y; x, w, b, ~scratch; G, C, H, W, K, R, T, S, relu",
            call[_conv2d_forward_op],
            "rounds",
            _conv2d_forward_scratch,
        ),
        Op(
            "conv2d_backward_weight",
            "+dw, +db; dy, x, ~scratch; G, C, H, W, K, R, T, S",
            call[_conv2d_backward_weight],
            "rounds sums",
            _conv2d_weight_scratch,
        ),
        Op(
            "conv2d_backward_input",
            "dx; dy, w, ~scratch; G, C, H, W, K, R, T, S",
            call[_conv2d_backward_input],
            "rounds",
            _conv2d_input_scratch,
        ),
        Op(
            "conv2d_backward_input_parts",
            "dx; dy, w; G, C, H, W, K, R, T, S, part, parts",
            call[conv2d_backward_input],
            "lanes",
        ),
        Op(
            "linear_forward",
            "y; x, w, b, ~scratch; G, I, O, relu",
            call[_linear_forward_op],
            "rounds",
            _linear_forward_scratch,
        ),
        Op(
            "linear_backward_weight",
            "+dw, +db; dy, x, ~scratch; G, I, O",
            call[_linear_backward_weight],
            "rounds sums",
            _linear_weight_scratch,
        ),
        Op(
            "linear_backward_input",
            "dx; dy, w, ~scratch; G, I, O",
            call[_linear_backward_input],
            "rounds",
            _linear_input_scratch,
        ),
        Op(
            "linear_forward_parts",
            "y; x, w; G, I, O, part, parts",
            call[linear_forward_parts],
            "lanes",
        ),
        Op(
            "linear_backward_input_parts",
            "dx; dy, w, ~scratch; G, I, O, part, parts",
            call[linear_backward_input_parts],
            "lanes",
            _linear_input_scratch,
        ),
        Op(
            "linear_backward_weight_columns",
            "+dw, +db; dy, x, ~scratch; G, columns, O, stride",
            call[linear_backward_weight],
            "lanes sums",
            _linear_weight_scratch,
        ),
        Op(
            "linear_backward_input_columns",
            "dx; dy, w, ~scratch; G, columns, O, stride",
            call[linear_backward_input_columns],
            "lanes",
            _linear_input_scratch,
        ),
        Op(
            "linear_bias",
            "y; x, b; G, O, relu",
            call[_linear_bias],
            "lanes",
        ),
    ]
