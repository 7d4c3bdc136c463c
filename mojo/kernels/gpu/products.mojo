"""Ops of convolutions and linear layers on a GPU: the launcher for a record's precision, with or without its ReLU."""

from ..conv2d import Conv
from ..conv2d_general import General
from ..record import Record, sizes_of
from .conv2d import (
    conv2d_backward_input,
    conv2d_backward_weight,
    conv2d_backward_weight_scratch,
    conv2d_forward,
    conv2d_relu_maxpool_forward,
    conv2d_scratch,
)
from .launch import BF16, FP16, FP32, GpuOp, Launch, Queue, TF32, call
from .linear import linear_backward_input, linear_backward_weight, linear_forward


def _by_dtype[f: def[precision: Int](Queue, Launch) raises thin](q: Queue, r: Launch) raises:
    """f for the record's precision."""
    if r.dtype() == FP32:
        f[FP32](q, r)
    elif r.dtype() == TF32:
        f[TF32](q, r)
    elif r.dtype() == BF16:
        f[BF16](q, r)
    else:
        f[FP16](q, r)


def _conv2d_forward[precision: Int](q: Queue, r: Launch) raises:
    var size = sizes_of[Conv](r, 6)
    if r.int(14):
        conv2d_forward[precision, True](q, r.shards, r.op(1), r.op(2), r.op(3), r.op(4), size, r.scratch)
    else:
        conv2d_forward[precision, False](q, r.shards, r.op(1), r.op(2), r.op(3), r.op(4), size, r.scratch)


def _conv2d_backward_weight[precision: Int](q: Queue, r: Launch) raises:
    _weights[precision](q, r, sizes_of[Conv](r, 6))


def _general_backward_weight(q: Queue, r: Launch) raises:
    _weights[FP32](q, r, sizes_of[General](r, 5))


def _weights[precision: Int](q: Queue, r: Launch, size: General) raises:
    conv2d_backward_weight[precision](
        q, r.shards, r.fold, r.op(1), r.op(2), r.op(3), r.op(4), r.scratch, size, r.accumulate
    )


def _general_forward(q: Queue, r: Launch) raises:
    conv2d_forward[FP32, False](q, r.shards, r.op(1), r.op(2), r.op(3), r.op(4), sizes_of[General](r, 5), r.scratch)


def _general_backward_input(q: Queue, r: Launch) raises:
    conv2d_backward_input[FP32](q, r.shards, r.op(1), r.op(2), r.op(3), sizes_of[General](r, 4), r.scratch)


def _forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    return 4 * conv2d_scratch(r.dtype(), sizes_of[Conv](r, 6))


def _input_scratch(r: Record, shards: Int, fold: Int) -> Int:
    return 4 * conv2d_scratch(r.dtype(), sizes_of[Conv](r, 5))


def _conv2d_scratch(r: Record, shards: Int, fold: Int) -> Int:
    return 4 * conv2d_backward_weight_scratch(shards, fold, sizes_of[Conv](r, 6))


def _general_scratch(r: Record, shards: Int, fold: Int) -> Int:
    return 4 * conv2d_backward_weight_scratch(shards, fold, sizes_of[General](r, 5))


def _conv2d_backward_input[precision: Int](q: Queue, r: Launch) raises:
    var size = sizes_of[Conv](r, 5)
    conv2d_backward_input[precision](q, r.shards, r.op(1), r.op(2), r.op(3), size, r.scratch)


def _conv2d_input_inside[precision: Int](q: Queue, r: Launch) raises:
    var size = sizes_of[Conv](r, 4)
    conv2d_backward_input[precision](q, r.shards, r.op(1), r.op(2), r.op(3), size, r.scratch, r.int(12), r.int(13))


def _inside_scratch(r: Record, shards: Int, fold: Int) -> Int:
    return 4 * conv2d_scratch(r.dtype(), sizes_of[Conv](r, 4))


def _linear_forward_with[precision: Int, relu: Bool](q: Queue, r: Launch) raises:
    linear_forward[precision, relu](q, r.shards, r.op(1), r.op(2), r.op(3), r.op(4), r.int(6), r.int(7), r.int(8))


def _linear_forward[precision: Int](q: Queue, r: Launch) raises:
    if r.int(9):
        _linear_forward_with[precision, True](q, r)
    else:
        _linear_forward_with[precision, False](q, r)


def _linear_backward_weight[precision: Int](q: Queue, r: Launch) raises:
    linear_backward_weight[precision](
        q, r.shards, r.fold, r.op(1), r.op(2), r.op(3), r.op(4), r.int(6), r.int(7), r.int(8), r.accumulate
    )


def _linear_backward_input[precision: Int](q: Queue, r: Launch) raises:
    linear_backward_input[precision](q, r.shards, r.op(1), r.op(2), r.op(3), r.int(5), r.int(6), r.int(7))


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("conv2d_forward", _by_dtype[_conv2d_forward], _forward_scratch),
        GpuOp("conv2d_backward_weight", _by_dtype[_conv2d_backward_weight], _conv2d_scratch),
        GpuOp("conv2d_backward_input", _by_dtype[_conv2d_backward_input], _input_scratch),
        GpuOp(
            "conv2d_backward_input_inside",
            "dx; dy, w; G, C, H, W, K, R, T, S, ph of y, pw of y",
            _by_dtype[_conv2d_input_inside],
            "rounds of:conv2d_backward_input+pad_backward",
            _inside_scratch,
        ),
        GpuOp(
            "conv2d_relu_maxpool_forward",
            "y, argmax; x, w, b; G, C, H, W, K, R, T, S, R of y, T of y, S of y",
            call[conv2d_relu_maxpool_forward[FP32]],
            "of:conv2d_forward+maxpool_forward",
        ),
        GpuOp("conv2d_general_forward", _general_forward),
        GpuOp("conv2d_general_backward_weight", _general_backward_weight, _general_scratch),
        GpuOp("conv2d_general_backward_input", _general_backward_input),
        GpuOp("linear_forward", _by_dtype[_linear_forward]),
        GpuOp("linear_backward_weight", _by_dtype[_linear_backward_weight]),
        GpuOp("linear_backward_input", _by_dtype[_linear_backward_input]),
    ]
