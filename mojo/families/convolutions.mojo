"""The family of convolutions: which kernel computes a record (kernels/products.mojo), a whole layer or a part of
one.
"""

from kernels.buffers import fill
from kernels.conv2d import (
    Conv,
    conv2d_backward_input,
    conv2d_backward_input_any,
    conv2d_backward_weight,
    conv2d_forward,
)
from kernels.conv2d_amx import conv2d_backward_input_amx, conv2d_forward_amx, forward_scratch, input_scratch
from kernels.conv2d_amx_weight import conv2d_backward_weight_amx
from kernels.conv2d_amx_weight import weight_scratch as amx_weight_scratch
from kernels.conv2d_bf16 import conv2d_backward_input_bf16, conv2d_backward_weight_bf16, conv2d_forward_bf16
from kernels.conv2d_bf16 import input_scratch as pairs_input_scratch, weight_scratch as pairs_weight_scratch
from kernels.conv2d_rows import conv2d_backward_input_rows, conv2d_backward_weight_rows, conv2d_forward_rows
from kernels.lanes import LANES, Ptr
from kernels.lowp import HAS_AMX, HAS_BF16
from kernels.op import Op, OpsPtr, call
from kernels.products import bias_of_operand, half, in_pairs, in_tiles, rounded_operand
from kernels.record import FP32, Record, sizes_of


def _conv2d_forward[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, size: Conv, r: Record):
    if in_tiles(r):
        comptime if HAS_AMX:
            conv2d_forward_amx[relu](y, x, w, b, scratch, size, r.rows())
        return
    if in_pairs(r):
        comptime if HAS_BF16:
            conv2d_forward_bf16[relu](y, x, w, b, scratch, size)
        return
    var xr = rounded_operand(r, x, scratch, size.G * size.x() * r.lanes())
    var wr = rounded_operand(r, w, xr[1], size.K * size.taps())
    if r.rows():
        conv2d_forward_rows[relu](y, xr[0], wr[0], b, size)
    else:
        conv2d_forward[relu](y, xr[0], wr[0], b, size)


def _conv2d_forward_op(y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, size: Conv, relu: Bool, r: Record):
    if relu:
        _conv2d_forward[True](y, x, w, b, scratch, size, r)
    else:
        _conv2d_forward[False](y, x, w, b, scratch, size, r)


def _conv2d_backward_weight(dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, scratch: Ptr, size: Conv, r: Record):
    if in_tiles(r) and not r.rows():
        comptime if HAS_AMX:
            conv2d_backward_weight_amx(dw, db, dy, x, scratch, size, r.begins())
        return
    if r.begins() and (in_pairs(r) or r.rows()):
        fill(dw, 0, size.K * size.taps())
        fill(db, 0, size.K)
    if in_pairs(r):
        comptime if HAS_BF16:
            conv2d_backward_weight_bf16(dw, db, dy, x, scratch, size)
        return
    var xr = rounded_operand(r, x, scratch, size.G * size.x() * r.lanes())
    var dyr = rounded_operand(r, dy, xr[1], size.G * size.y() * r.lanes())
    var dbr = db
    if r.dtype() != FP32:
        dbr = dyr[1]  # (K): of the rounded dy, not used
        fill(dbr, 0, size.K)
    if r.rows():
        conv2d_backward_weight_rows(dw, dbr, dyr[0], xr[0], size)
    else:
        conv2d_backward_weight(dw, dbr, dyr[0], xr[0], size, r.begins())
    if r.dtype() != FP32:
        if r.begins():
            fill(db, 0, size.K)
        bias_of_operand(r, db, dy, size.G, size.K, size.P() * size.Q())


def _conv2d_backward_input(dx: Ptr, dy: Ptr, w: Ptr, scratch: Ptr, size: Conv, r: Record):
    if in_tiles(r) and not r.rows():
        comptime if HAS_AMX:
            conv2d_backward_input_amx(dx, dy, w, scratch, size)
        return
    if in_pairs(r):
        comptime if HAS_BF16:
            conv2d_backward_input_bf16(dx, dy, w, scratch, size)
        return
    var dyr = rounded_operand(r, dy, scratch, size.G * size.y() * r.lanes())
    var wr = rounded_operand(r, w, dyr[1], size.K * size.taps())
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
    if in_tiles(r):
        return forward_scratch(size, r.rows())
    if in_pairs(r):  # one group of x, all weights
        var pixels = LANES * size.H * size.W
        return 4 * half(size.C) * (pixels + size.K * size.R * size.T)
    return 4 * (size.G * size.x() * r.lanes() + size.K * size.taps())


def _conv2d_weight_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var size = sizes_of[Conv](r, 6)
    if r.dtype() == FP32:
        return 0
    if in_tiles(r) and not r.rows():
        return amx_weight_scratch(size)
    if in_pairs(r):
        return pairs_weight_scratch(size)
    return 4 * (size.G * (size.x() + size.y()) * r.lanes() + size.K)


def _conv2d_input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var size = sizes_of[Conv](r, 5)
    if r.dtype() == FP32:
        return 0
    if in_tiles(r) and not r.rows():
        return input_scratch(size)
    if in_pairs(r):
        return pairs_input_scratch(size)
    return 4 * (size.G * size.y() * r.lanes() + size.K * size.taps())


@export
def odyssey_convolutions(all: OpsPtr) abi("C"):
    """Adds the ops of this family. relu: with its ReLU; a stride is from one row of w or dw to the next."""
    all[].extend(
        [
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
                "rounds sums begins:KCRT+K",
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
        ]
    )
