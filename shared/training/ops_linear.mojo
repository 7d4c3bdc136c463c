"""Records of fully connected layers: their arguments, and which kernel computes them, in lanes and in rows, in float32 and
in 16 bits, whole or a part of a layer.

The processor's own bf16 products are taken where it has them and the batch is in lanes; else float32 copies of the rounded
operands, in scratch, for the float32 kernels. python/odyssey/precision.py knows how much scratch each takes.
"""

from kernels.elementwise import fill
from kernels.lanes import LANES
from kernels.linear import (
    linear_backward_input,
    linear_backward_input_columns,
    linear_backward_input_parts,
    linear_backward_weight,
    linear_bias,
    linear_forward,
    linear_forward_parts,
)
from kernels.linear_bf16 import (
    linear_backward_input_bf16,
    linear_backward_weight_bf16,
    linear_forward_bf16,
)
from kernels.linear_rows import (
    linear_backward_input_rows,
    linear_backward_weight_rows,
    linear_forward_rows,
)
from kernels.lowp import HAS_BF16, bias_gradient, rounded

from .record import Record


def _linear_forward[L: Int, relu: Bool](r: Record):
    comptime kernel = linear_forward_rows[relu] if L == 1 else linear_forward[
        relu
    ]
    kernel(r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.int(5), r.int(6), r.int(7))


def run_linear_forward[L: Int](r: Record):
    """The fully connected layer, with its ReLU if it has one.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments y; x, w, b; G, I, O; relu.
    """
    if r.int(8):
        _linear_forward[L, True](r)
    else:
        _linear_forward[L, False](r)


def run_linear_backward_weight[L: Int](r: Record):
    """Adds to the gradients of weight and bias.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments dw, db; dy, x; scratch; G, I, O.
    """
    comptime if L == 1:
        linear_backward_weight_rows(
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.int(6), r.int(7), r.int(8)
        )
    else:
        linear_backward_weight(
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.ptr(4),
            r.ptr(5),
            r.int(6),
            r.int(7),
            r.int(8),
            r.int(7),
        )


def run_linear_backward_input[L: Int](r: Record):
    """The gradient of the input.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.

    Args:
        r: Arguments dx; dy, w; G, I, O.
    """
    comptime kernel = linear_backward_input_rows if L == 1 else linear_backward_input
    kernel(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5), r.int(6))


def _linear_forward_low[L: Int, dtype: DType, relu: Bool](r: Record):
    var G = r.int(6)
    var I = r.int(7)
    var O = r.int(8)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        linear_forward_bf16[relu](
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.ptr(5), G, I, O
        )
    else:
        var x = r.ptr(5)
        rounded[dtype](x, r.ptr(2), G * I * L)
        var w = x.unsafe_offset(G * I * L)
        rounded[dtype](w, r.ptr(3), O * I)
        comptime kernel = linear_forward_rows[
            relu
        ] if L == 1 else linear_forward[relu]
        kernel(r.ptr(1), x, w, r.ptr(4), G, I, O)


def run_linear_forward_low[L: Int, dtype: DType](r: Record):
    """The layer of rounded operands.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.
        dtype: What the operands are rounded to.

    Args:
        r: Arguments y; x, w, b; scratch; G, I, O; relu.
    """
    if r.int(9):
        _linear_forward_low[L, dtype, True](r)
    else:
        _linear_forward_low[L, dtype, False](r)


def run_linear_backward_weight_low[L: Int, dtype: DType](r: Record):
    """Adds to the gradients of weight and bias, from rounded operands.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.
        dtype: What the operands are rounded to.

    Args:
        r: Arguments dw, db; dy, x; scratch; G, I, O.
    """
    var G = r.int(6)
    var I = r.int(7)
    var O = r.int(8)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        linear_backward_weight_bf16(
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.ptr(5), G, I, O
        )
    else:
        var n = G * I * L
        var x = r.ptr(5)
        rounded[dtype](x, r.ptr(4), n)
        var dy = x.unsafe_offset(n)
        rounded[dtype](dy, r.ptr(3), G * O * L)
        var unused = dy.unsafe_offset(G * O * L)  # (O): db of the rounded dy
        fill(unused, 0, O)
        comptime if L == 1:
            linear_backward_weight_rows(r.ptr(1), unused, dy, x, G, I, O)
        else:
            var scratch = unused.unsafe_offset(O)
            linear_backward_weight(r.ptr(1), unused, dy, x, scratch, G, I, O, I)
        bias_gradient[L](r.ptr(2), r.ptr(3), G, O, 1)


def run_linear_backward_input_low[L: Int, dtype: DType](r: Record):
    """The gradient of the input, from rounded operands.

    Parameters:
        L: Samples per group: LANES or, in rows, 1.
        dtype: What the operands are rounded to.

    Args:
        r: Arguments dx; dy, w; scratch; G, I, O.
    """
    var G = r.int(5)
    var I = r.int(6)
    var O = r.int(7)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        linear_backward_input_bf16(
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), G, I, O
        )
    else:
        var dy = r.ptr(4)
        rounded[dtype](dy, r.ptr(2), G * O * L)
        var w = dy.unsafe_offset(G * O * L)
        rounded[dtype](w, r.ptr(3), O * I)
        comptime kernel = linear_backward_input_rows if L == 1 else linear_backward_input
        kernel(r.ptr(1), dy, w, G, I, O)


# --- tensor parallelism, in lanes only


def run_linear_forward_parts(r: Record):
    """The layer of some parts of its inputs.

    Args:
        r: Arguments y; x of the parts, w; G, I, O, part, parts.
    """
    linear_forward_parts(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
    )


def run_linear_backward_input_parts(r: Record):
    """The gradient of the input, of some parts of the outputs.

    Args:
        r: Arguments dx; dy of the parts, w; G, I, O, part, parts.
    """
    linear_backward_input_parts(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
    )


def run_linear_backward_weight_columns(r: Record):
    """Adds to the gradients of weight and bias, of some inputs.

    Args:
        r: Arguments dw, db; dy, x; scratch; G, columns, O, row stride of dw.
    """
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


def run_linear_backward_input_columns(r: Record):
    """The gradient of some inputs.

    Args:
        r: Arguments dx; dy, w; G, columns, O, row stride of w.
    """
    linear_backward_input_columns(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
    )


def run_linear_bias(r: Record):
    """Adds the bias to a sum, with its ReLU if it has one.

    Args:
        r: Arguments y; x, b; G, O; relu.
    """
    if r.int(6):
        linear_bias[True](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))
    else:
        linear_bias[False](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))
