"""The family of linear layers: which kernel computes a record (kernels/products.mojo), a whole layer or a part of
one.
"""

from kernels.buffers import fill
from kernels.conv2d import Conv
from kernels.conv2d_amx import conv2d_backward_input_amx, conv2d_forward_amx, forward_scratch, input_scratch
from kernels.conv2d_amx_weight import conv2d_backward_weight_amx
from kernels.conv2d_amx_weight import weight_scratch as amx_weight_scratch
from kernels.lanes import Ptr
from kernels.linear import (
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
from kernels.linear_bf16 import (
    linear_backward_input_bf16,
    linear_backward_weight_bf16,
    linear_forward_bf16,
    linear_forward_rows_bf16,
    weight_scratch,
)
from kernels.linear_runs import (
    Sums,
    biases_of_run,
    is_gradient,
    runs_scratch,
    runs_scratch_bf16,
    weights_of_run,
    weights_of_run_bf16,
)
from kernels.linear_rows import linear_backward_input_rows, linear_backward_weight_rows, linear_forward_rows
from kernels.lowp import HAS_AMX, HAS_BF16
from kernels.op import Op, OpsPtr, call
from kernels.products import bias_of_operand, half, in_pairs, in_tiles, rounded_operand
from kernels.record import BF16, FP32, Record


def _linear(G: Int, I: Int, O: Int) -> Conv:
    """A linear layer as a convolution of one pixel and one tap."""
    return Conv(G, I, 1, 1, O, 1, 1, 1)


def _linear_forward[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, r: Record):
    if in_tiles(r):
        comptime if HAS_AMX:
            var size = _linear(G, I, O)
            conv2d_forward_amx[relu](y, x, w, b, scratch, size, r.rows())
        return
    if in_pairs(r):
        comptime if HAS_BF16:
            linear_forward_bf16[relu](y, x, w, b, scratch, G, I, O, r.shards(), r.apart())
        return
    if HAS_BF16 and r.dtype() == BF16:
        comptime if HAS_BF16:
            linear_forward_rows_bf16[relu](y, x, w, b, scratch, G, I, O)
        return
    var xr = rounded_operand(r, x, scratch, G * I * r.lanes())
    var wr = rounded_operand(r, w, xr[1], O * I)
    if r.rows():
        linear_forward_rows[relu](y, xr[0], wr[0], b, G, I, O)
    else:
        linear_forward[relu](y, xr[0], wr[0], b, G, I, O, r.shards(), r.apart())


def _linear_forward_op(y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, relu: Bool, r: Record):
    if relu:
        _linear_forward[True](y, x, w, b, scratch, G, I, O, r)
    else:
        _linear_forward[False](y, x, w, b, scratch, G, I, O, r)


def _weight_of_run(dy: Ptr, x: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, r: Record):
    var shards = r.shards()
    if r.dtype() == FP32:
        weights_of_run(Sums.of(r, 1), dy, x, scratch, shards, r.apart(), G, I, O)
    else:
        comptime if HAS_BF16:
            weights_of_run_bf16(Sums.of(r, 1), dy, x, scratch, shards, r.apart(), G, I, O)
    if is_gradient(r, 2):
        biases_of_run(Sums.of(r, 2), dy, scratch, shards, r.apart(), G, O)


def _linear_backward_weight(dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, r: Record):
    if r.joined():
        _weight_of_run(dy, x, scratch, G, I, O, r)
        return
    if in_tiles(r) and not r.rows():
        comptime if HAS_AMX:
            var size = _linear(G, I, O)
            conv2d_backward_weight_amx(dw, db, dy, x, scratch, size, r.begins())
        return
    if in_pairs(r):
        comptime if HAS_BF16:
            linear_backward_weight_bf16(dw, db, dy, x, scratch, G, I, O, r.begins())
        return
    var xr = rounded_operand(r, x, scratch, G * I * r.lanes())
    var dyr = rounded_operand(r, dy, xr[1], G * O * r.lanes())
    var dbr = db
    var rest = scratch
    if r.dtype() != FP32:
        dbr = dyr[1]  # (O): of the rounded dy, not used
        rest = dbr.unsafe_offset(O)
        fill(dbr, 0, O)
    if r.rows():
        if r.begins():
            fill(dw, 0, O * I)
            fill(dbr, 0, O)
        linear_backward_weight_rows(dw, dbr, dyr[0], xr[0], G, I, O)
    else:
        linear_backward_weight(dw, dbr, dyr[0], xr[0], rest, G, I, O, I, r.begins())
    if r.dtype() != FP32:
        if r.begins():
            fill(db, 0, O)
        bias_of_operand(r, db, dy, G, O, 1)


def _linear_backward_weight_columns(
    dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, scratch: Ptr, G: Int, columns: Int, O: Int, stride: Int
):
    linear_backward_weight(dw, db, dy, x, scratch, G, columns, O, stride)


def _linear_backward_input(dx: Ptr, dy: Ptr, w: Ptr, scratch: Ptr, G: Int, I: Int, O: Int, r: Record):
    if in_tiles(r) and not r.rows():
        comptime if HAS_AMX:
            var size = _linear(G, I, O)
            conv2d_backward_input_amx(dx, dy, w, scratch, size)
        return
    if in_pairs(r):
        comptime if HAS_BF16:
            linear_backward_input_bf16(dx, dy, w, scratch, G, I, O, r.shards(), r.apart())
        return
    var dyr = rounded_operand(r, dy, scratch, G * O * r.lanes())
    var wr = rounded_operand(r, w, dyr[1], O * I)
    if r.rows():
        linear_backward_input_rows(dx, dyr[0], wr[0], G, I, O)
    else:
        linear_backward_input(dx, dyr[0], wr[0], wr[1], G, I, O, r.shards(), r.apart())


def _linear_forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var I = r.int(7)
    var n = r.int(6) * r.lanes()
    if r.dtype() == FP32:
        return 0
    if in_tiles(r):
        return forward_scratch(_linear(r.int(6), I, r.int(8)), r.rows())
    if in_pairs(r):
        return 4 * half(I) * (n + 12)  # x and 12 rows of w
    return 4 * I * (n + r.int(8))


def _linear_weight_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var I = r.int(7)
    var O = r.int(8)
    var n = r.int(6) * r.lanes()
    if r.joined():
        var floats = runs_scratch if r.dtype() == FP32 else runs_scratch_bf16
        return 4 * floats(shards, r.int(6), I, O)
    if r.dtype() == FP32:
        return 0 if r.rows() else 4 * WEIGHT_SCRATCH
    if in_tiles(r) and not r.rows():
        return amx_weight_scratch(_linear(r.int(6), I, O))
    if in_pairs(r):
        return 4 * weight_scratch(r.int(6), O)
    return 4 * (n * (I + O) + O + WEIGHT_SCRATCH)


def _linear_input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var O = r.int(7)
    var n = r.int(5) * r.lanes()
    var packed = 0 if r.rows() else 4 * columns_scratch(r.int(5) * (shards if r.joined() else 1), O)
    if r.dtype() == FP32:
        return packed
    if in_tiles(r) and not r.rows():
        return input_scratch(_linear(r.int(5), r.int(6), O))
    if in_pairs(r):
        return 4 * half(O) * (n + 96)  # dy and 96 columns of w
    return 4 * O * (n + r.int(6)) + packed


def _linear_bias(y: Ptr, x: Ptr, b: Ptr, G: Int, O: Int, relu: Bool):
    if relu:
        linear_bias[True](y, x, b, G, O)
    else:
        linear_bias[False](y, x, b, G, O)


# Traits of the three products of a layer. They are joined in float32 and as pairs of bf16, not as AMX's tiles.
comptime IN_PAIRS = HAS_BF16 and not HAS_AMX
comptime PRODUCT: StaticString = "rounds joined:fp32+bf16" if IN_PAIRS else "rounds joined:fp32"
comptime WEIGHTS: StaticString = (
    "rounds sums begins:OI+O joined:fp32+bf16" if IN_PAIRS else "rounds sums begins:OI+O joined:fp32"
)


@export
def odyssey_linear(all: OpsPtr) abi("C"):
    """Adds the ops of this family. relu: with its ReLU; a stride is from one row of w or dw to the next."""
    all[].extend(
        [
            Op(
                "linear_forward",
                "y; x, w, b, ~scratch; G, I, O, relu",
                call[_linear_forward_op],
                PRODUCT,
                _linear_forward_scratch,
            ),
            Op(
                "linear_backward_weight",
                "+dw, +db; dy, x, ~scratch; G, I, O",
                call[_linear_backward_weight],
                WEIGHTS,
                _linear_weight_scratch,
            ),
            Op(
                "linear_backward_input",
                "dx; dy, w, ~scratch; G, I, O",
                call[_linear_backward_input],
                PRODUCT,
                _linear_input_scratch,
            ),
            Op("linear_forward_parts", "y; x, w; G, I, O, part, parts", call[linear_forward_parts], "lanes"),
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
                call[_linear_backward_weight_columns],
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
            Op("linear_bias", "y; x, b; G, O, relu", call[_linear_bias], "lanes"),
        ]
    )
