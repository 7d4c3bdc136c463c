"""Records of ops on images, convolution and pooling: their arguments, and which kernel computes them, in lanes and in rows,
in float32 and in 16 bits.

The processor's own bf16 products are taken where it has them and the batch is in lanes; else float32 copies of the rounded
operands, in scratch, for the float32 kernels. python/odyssey/precision.py knows how much scratch each takes.
"""

from kernels.conv2d import (
    conv2d_backward_input,
    conv2d_backward_input_any,
    conv2d_backward_weight,
    conv2d_forward,
)
from kernels.conv2d_bf16 import (
    conv2d_backward_input_bf16,
    conv2d_backward_weight_bf16,
    conv2d_forward_bf16,
)
from kernels.conv2d_rows import (
    conv2d_backward_input_rows,
    conv2d_backward_weight_rows,
    conv2d_forward_rows,
)
from kernels.elementwise import fill
from kernels.lanes import LANES
from kernels.lowp import HAS_BF16, bias_gradient, rounded
from kernels.pool import (
    avgpool_backward,
    avgpool_forward,
    maxpool_backward,
    maxpool_forward,
)

from .record import Record


def _conv2d_forward[L: Int, relu: Bool](r: Record):
    comptime kernel = conv2d_forward_rows[relu] if L == 1 else conv2d_forward[
        relu
    ]
    kernel(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.ptr(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
        r.int(10),
        r.int(11),
        r.int(12),
    )


def run_conv2d_forward[L: Int](r: Record):
    """The convolution, with its ReLU if it has one.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments y; x, w, b; G, C, H, W, K, R, T, S; relu.
    """
    if r.int(13):
        _conv2d_forward[L, True](r)
    else:
        _conv2d_forward[L, False](r)


def run_conv2d_backward_weight[L: Int](r: Record):
    """Adds to the gradients of weight and bias.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments dw, db; dy, x; G, C, H, W, K, R, T, S.
    """
    comptime kernel = conv2d_backward_weight_rows if L == 1 else conv2d_backward_weight
    kernel(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.ptr(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
        r.int(10),
        r.int(11),
        r.int(12),
    )


def run_conv2d_backward_input[L: Int](r: Record):
    """The gradient of the input.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments dx; dy, w; G, C, H, W, K, R, T, S.
    """
    comptime if L == 1:
        if r.int(11) == 1:
            conv2d_backward_input_rows(
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
            )
        else:
            conv2d_backward_input_any[L](
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
            )
    else:
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
        )


def _conv2d_forward_low[L: Int, dtype: DType, relu: Bool](r: Record):
    var G = r.int(6)
    var C = r.int(7)
    var H = r.int(8)
    var W = r.int(9)
    var K = r.int(10)
    var R = r.int(11)
    var T = r.int(12)
    var S = r.int(13)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        conv2d_forward_bf16[relu](
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.ptr(4),
            r.ptr(5),
            G,
            C,
            H,
            W,
            K,
            R,
            T,
            S,
        )
    else:
        var n = G * C * H * W * L
        var x = r.ptr(5)
        rounded[dtype](x, r.ptr(2), n)
        var w = x.unsafe_offset(n)
        rounded[dtype](w, r.ptr(3), K * C * R * T)
        comptime kernel = conv2d_forward_rows[
            relu
        ] if L == 1 else conv2d_forward[relu]
        kernel(r.ptr(1), x, w, r.ptr(4), G, C, H, W, K, R, T, S)


def run_conv2d_forward_low[L: Int, dtype: DType](r: Record):
    """The convolution of rounded operands.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.
        dtype: What the operands are rounded to.

    Args:
        r: Arguments y; x, w, b; scratch; G, C, H, W, K, R, T, S; relu.
    """
    if r.int(14):
        _conv2d_forward_low[L, dtype, True](r)
    else:
        _conv2d_forward_low[L, dtype, False](r)


def run_conv2d_backward_weight_low[L: Int, dtype: DType](r: Record):
    """Adds to the gradients of weight and bias, from rounded operands.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.
        dtype: What the operands are rounded to.

    Args:
        r: Arguments dw, db; dy, x; scratch; G, C, H, W, K, R, T, S.
    """
    var G = r.int(6)
    var C = r.int(7)
    var H = r.int(8)
    var W = r.int(9)
    var K = r.int(10)
    var R = r.int(11)
    var T = r.int(12)
    var S = r.int(13)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        conv2d_backward_weight_bf16(
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.ptr(4),
            r.ptr(5),
            G,
            C,
            H,
            W,
            K,
            R,
            T,
            S,
        )
    else:
        var plane = ((H - R) // S + 1) * ((W - T) // S + 1)
        var n = G * C * H * W * L
        var m = G * K * plane * L
        var x = r.ptr(5)
        rounded[dtype](x, r.ptr(4), n)
        var dy = x.unsafe_offset(n)
        rounded[dtype](dy, r.ptr(3), m)
        var unused = dy.unsafe_offset(m)  # (K): db of the rounded dy
        fill(unused, 0, K)
        comptime kernel = conv2d_backward_weight_rows if L == 1 else conv2d_backward_weight
        kernel(r.ptr(1), unused, dy, x, G, C, H, W, K, R, T, S)
        bias_gradient[L](r.ptr(2), r.ptr(3), G, K, plane)


def run_conv2d_backward_input_low[L: Int, dtype: DType](r: Record):
    """The gradient of the input, from rounded operands.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.
        dtype: What the operands are rounded to.

    Args:
        r: Arguments dx; dy, w; scratch; G, C, H, W, K, R, T, S.
    """
    var G = r.int(5)
    var C = r.int(6)
    var H = r.int(7)
    var W = r.int(8)
    var K = r.int(9)
    var R = r.int(10)
    var T = r.int(11)
    var S = r.int(12)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        comptime for t in range(1, 6, 2):
            if S == 1 and T == t:
                conv2d_backward_input_bf16[t](
                    r.ptr(1),
                    r.ptr(2),
                    r.ptr(3),
                    r.ptr(4),
                    G,
                    C,
                    H,
                    W,
                    K,
                    R,
                )
                return
    var n = G * K * ((H - R) // S + 1) * ((W - T) // S + 1) * L
    var dy = r.ptr(4)
    rounded[dtype](dy, r.ptr(2), n)
    var w = dy.unsafe_offset(n)
    rounded[dtype](w, r.ptr(3), K * C * R * T)
    comptime if L == 1:
        if S == 1:
            conv2d_backward_input_rows(r.ptr(1), dy, w, G, C, H, W, K, R, T, S)
        else:
            conv2d_backward_input_any[L](
                r.ptr(1), dy, w, G, C, H, W, K, R, T, S
            )
    else:
        conv2d_backward_input(r.ptr(1), dy, w, G, C, H, W, K, R, T, S)


def run_conv2d_backward_input_parts(r: Record):
    """The gradient of the input, of some parts of the outputs. For tensor parallelism, in lanes only.

    Args:
        r: Arguments dx; dy of the parts, w; G, C, H, W, K, R, T, S, part, parts.
    """
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


def run_maxpool_forward[L: Int](r: Record):
    """The largest of each window, and where it was.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments y, argmax; x; planes, H, W, R, T, S.
    """
    maxpool_forward[L](
        r.ptr(1),
        r.bytes(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
    )


def _maxpool_backward[L: Int, relu: Bool](r: Record):
    maxpool_backward[L, relu](
        r.ptr(1),
        r.ptr(2),
        r.bytes(3),
        r.ptr(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
        r.int(10),
    )


def run_maxpool_backward[L: Int](r: Record):
    """The gradient of the input, with that of a ReLU before it if it has one.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments dx; dy; argmax, y; planes, H, W, R, T, S; relu.
    """
    if r.int(11):
        _maxpool_backward[L, True](r)
    else:
        _maxpool_backward[L, False](r)


def run_avgpool_forward[L: Int](r: Record):
    """The mean of each window.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments y; x; planes, H, W, R, T, S.
    """
    avgpool_forward[L](
        r.ptr(1),
        r.ptr(2),
        r.int(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
    )


def run_avgpool_backward[L: Int](r: Record):
    """The gradient of the input.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments dx; dy; planes, H, W, R, T, S.
    """
    avgpool_backward[L](
        r.ptr(1),
        r.ptr(2),
        r.int(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
    )
