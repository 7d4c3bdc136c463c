"""The op table: the one place where an op's name meets its kernel.

A record is in record.mojo, with what a run brings to it. Ops whose kernel depends on more than lanes or rows, or that have
many arguments, are unpacked in ops_images.mojo and ops_linear.mojo, the others here. Both front ends read NAMES, so a
code is written nowhere.
"""

from std.memory import unsafe_memcpy

from kernels.dropout import dropout
from kernels.elementwise import (
    add,
    axpy,
    fill,
    multiply,
    relu_backward,
    relu_forward,
    scale,
    sigmoid_backward,
    sigmoid_forward,
    tanh_backward,
    tanh_forward,
)
from kernels.lanes import IntPtr, LANES, Ptr
from kernels.layout import (
    LongPtr,
    gather_labels,
    gather_rows,
    gather_rows_in_rows,
    pack_rows,
    pad_backward,
    pad_forward,
    take_features,
    unpack_rows,
)
from kernels.optimizer import adam, sgd
from kernels.random import uniform
from kernels.reduce import (
    fixed_squares,
    is_finite,
    largest,
    sum_lanes,
    sum_lanes_backward,
    tree_sum,
)
from kernels.softmax import (
    cross_entropy_backward,
    cross_entropy_forward,
    log_softmax_backward,
    log_softmax_forward,
    nll_backward,
    nll_forward,
    softmax_backward,
    softmax_forward,
)

from .ops_images import (
    run_avgpool_backward,
    run_avgpool_forward,
    run_conv2d_backward_input,
    run_conv2d_backward_input_low,
    run_conv2d_backward_input_parts,
    run_conv2d_backward_weight,
    run_conv2d_backward_weight_low,
    run_conv2d_forward,
    run_conv2d_forward_low,
    run_maxpool_backward,
    run_maxpool_forward,
)
from .ops_linear import (
    run_linear_backward_input,
    run_linear_backward_input_columns,
    run_linear_backward_input_low,
    run_linear_backward_input_parts,
    run_linear_backward_weight,
    run_linear_backward_weight_columns,
    run_linear_backward_weight_low,
    run_linear_bias,
    run_linear_forward,
    run_linear_forward_low,
    run_linear_forward_parts,
)
from .record import Context, ROWS, Record

comptime NAMES: List[StaticString] = [
    "input",
    "labels",
    "pack_rows",
    "unpack_rows",
    "pad_forward",
    "pad_backward",
    "conv2d_forward",
    "conv2d_backward_weight",
    "conv2d_backward_input",
    "maxpool_forward",
    "maxpool_backward",
    "avgpool_forward",
    "avgpool_backward",
    "linear_forward",
    "linear_backward_weight",
    "linear_backward_input",
    "conv2d_forward_bf16",
    "conv2d_backward_weight_bf16",
    "conv2d_backward_input_bf16",
    "linear_forward_bf16",
    "linear_backward_weight_bf16",
    "linear_backward_input_bf16",
    "conv2d_forward_fp16",
    "conv2d_backward_weight_fp16",
    "conv2d_backward_input_fp16",
    "linear_forward_fp16",
    "linear_backward_weight_fp16",
    "linear_backward_input_fp16",
    "linear_forward_parts",
    "linear_backward_input_parts",
    "linear_backward_weight_columns",
    "linear_backward_input_columns",
    "linear_bias",
    "take_features",
    "conv2d_backward_input_parts",
    "relu_forward",
    "relu_backward",
    "tanh_forward",
    "tanh_backward",
    "sigmoid_forward",
    "sigmoid_backward",
    "dropout",
    "softmax_forward",
    "softmax_backward",
    "log_softmax_forward",
    "log_softmax_backward",
    "cross_entropy_forward",
    "cross_entropy_backward",
    "nll_forward",
    "nll_backward",
    "stats",
    "sum_lanes",
    "sum_lanes_backward",
    "add",
    "multiply",
    "axpy",
    "scale",
    "copy",
    "fill",
    "loss_scale",
    "uniform",
    "tree_sum",
    "largest",
    "fixed_squares",
    "finite",
    "sgd",
    "adam",
    # on GPUs only (gpu_ops.mojo)
    "conv2d_forward_tf32",
    "conv2d_backward_weight_tf32",
    "conv2d_backward_input_tf32",
    "linear_forward_tf32",
    "linear_backward_weight_tf32",
    "linear_backward_input_tf32",
    "conv2d_relu_maxpool_forward",
    "cross_entropy",
]
"""Of all ops; the index is the op code."""


def code(name: StaticString) -> Int:
    """The op code of a name.

    Args:
        name: One of NAMES.

    Returns:
        The code; -1 if there is none.
    """
    var names = materialize[NAMES]()
    for i in range(len(names)):
        if names[i] == name:
            return i
    return -1


def execute(r: Record, ctx: Context) -> Bool:
    """Runs one record.

    Args:
        r: The record.
        ctx: Of the run.

    Returns:
        Whether the program goes on. It does not if a check failed, or if there is no such op.
    """
    if r.int(0) < ROWS:
        return _execute[LANES](r.int(0), r, ctx)
    return _execute[1](r.int(0) - ROWS, r, ctx)


def _execute[L: Int](op: Int, r: Record, ctx: Context) -> Bool:
    """L is the number of samples per group: LANES or, in rows, 1."""

    if op == comptime (code("input")):  # y; G, F, C
        if ctx.bytes:
            _gather[L, DType.uint8](r, ctx)
        else:
            _gather[L, DType.float32](r, ctx)
    elif op == comptime (code("labels")):  # labels; G
        gather_labels[L](
            r.ints(1),
            IntPtr(unsafe_from_address=Int(ctx.labels)),
            LongPtr(unsafe_from_address=Int(ctx.rows)),
            Int(ctx.valid),
            r.int(2),
        )
    elif op == comptime (code("pack_rows")):  # y; x; N, F
        pack_rows(r.ptr(1), r.ptr(2), r.int(3), r.int(4))
    elif op == comptime (code("unpack_rows")):  # y; x; N, F
        unpack_rows(r.ptr(1), r.ptr(2), r.int(3), r.int(4))
    elif op == comptime (code("pad_forward")):  # y; x; planes, H, W, ph, pw
        pad_forward[L](
            r.ptr(1), r.ptr(2), r.int(3), r.int(4), r.int(5), r.int(6), r.int(7)
        )
    elif op == comptime (code("pad_backward")):  # dx; dy; planes, H, W, ph, pw
        pad_backward[L](
            r.ptr(1), r.ptr(2), r.int(3), r.int(4), r.int(5), r.int(6), r.int(7)
        )
    elif op == comptime (code("conv2d_forward")):
        run_conv2d_forward[L](r)
    elif op == comptime (code("conv2d_backward_weight")):
        run_conv2d_backward_weight[L](r)
    elif op == comptime (code("conv2d_backward_input")):
        run_conv2d_backward_input[L](r)
    elif op == comptime (code("maxpool_forward")):
        run_maxpool_forward[L](r)
    elif op == comptime (code("maxpool_backward")):
        run_maxpool_backward[L](r)
    elif op == comptime (code("avgpool_forward")):
        run_avgpool_forward[L](r)
    elif op == comptime (code("avgpool_backward")):
        run_avgpool_backward[L](r)
    elif op == comptime (code("linear_forward")):
        run_linear_forward[L](r)
    elif op == comptime (code("linear_backward_weight")):
        run_linear_backward_weight[L](r)
    elif op == comptime (code("linear_backward_input")):
        run_linear_backward_input[L](r)
    elif op == comptime (code("conv2d_forward_bf16")):
        run_conv2d_forward_low[L, DType.bfloat16](r)
    elif op == comptime (code("conv2d_backward_weight_bf16")):
        run_conv2d_backward_weight_low[L, DType.bfloat16](r)
    elif op == comptime (code("conv2d_backward_input_bf16")):
        run_conv2d_backward_input_low[L, DType.bfloat16](r)
    elif op == comptime (code("linear_forward_bf16")):
        run_linear_forward_low[L, DType.bfloat16](r)
    elif op == comptime (code("linear_backward_weight_bf16")):
        run_linear_backward_weight_low[L, DType.bfloat16](r)
    elif op == comptime (code("linear_backward_input_bf16")):
        run_linear_backward_input_low[L, DType.bfloat16](r)
    elif op == comptime (code("conv2d_forward_fp16")):
        run_conv2d_forward_low[L, DType.float16](r)
    elif op == comptime (code("conv2d_backward_weight_fp16")):
        run_conv2d_backward_weight_low[L, DType.float16](r)
    elif op == comptime (code("conv2d_backward_input_fp16")):
        run_conv2d_backward_input_low[L, DType.float16](r)
    elif op == comptime (code("linear_forward_fp16")):
        run_linear_forward_low[L, DType.float16](r)
    elif op == comptime (code("linear_backward_weight_fp16")):
        run_linear_backward_weight_low[L, DType.float16](r)
    elif op == comptime (code("linear_backward_input_fp16")):
        run_linear_backward_input_low[L, DType.float16](r)
    elif op == comptime (code("linear_forward_parts")):
        comptime if L == 1:
            return False
        run_linear_forward_parts(r)
    elif op == comptime (code("linear_backward_input_parts")):
        comptime if L == 1:
            return False
        run_linear_backward_input_parts(r)
    elif op == comptime (code("linear_backward_weight_columns")):
        comptime if L == 1:
            return False
        run_linear_backward_weight_columns(r)
    elif op == comptime (code("linear_backward_input_columns")):
        comptime if L == 1:
            return False
        run_linear_backward_input_columns(r)
    elif op == comptime (code("take_features")):  # y; x; G, F, first, n
        comptime if L == 1:
            return False
        take_features(
            r.ptr(1), r.ptr(2), r.int(3), r.int(4), r.int(5), r.int(6)
        )
    elif op == comptime (code("linear_bias")):
        comptime if L == 1:
            return False
        run_linear_bias(r)
    elif op == comptime (code("conv2d_backward_input_parts")):
        comptime if L == 1:
            return False
        run_conv2d_backward_input_parts(r)
    elif op == comptime (code("relu_forward")):  # y; x; n
        relu_forward(r.ptr(1), r.ptr(2), r.int(3))
    elif op == comptime (code("relu_backward")):  # dx; dy; y; n
        relu_backward(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4))
    elif op == comptime (code("tanh_forward")):
        tanh_forward(r.ptr(1), r.ptr(2), r.int(3))
    elif op == comptime (code("tanh_backward")):
        tanh_backward(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4))
    elif op == comptime (code("sigmoid_forward")):
        sigmoid_forward(r.ptr(1), r.ptr(2), r.int(3))
    elif op == comptime (code("sigmoid_backward")):
        sigmoid_backward(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4))
    elif op == comptime (code("dropout")):  # y; x; G, F; p, layer
        dropout[L](
            r.ptr(1),
            r.ptr(2),
            r.int(3),
            r.int(4),
            r.float(5),
            ctx.seed,
            UInt32(ctx.step),
            UInt32(ctx.first),
            UInt32(r.int(6)),
        )
    elif op == comptime (code("softmax_forward")):  # y; x; G, F
        softmax_forward[L](r.ptr(1), r.ptr(2), r.int(3), r.int(4))
    elif op == comptime (code("softmax_backward")):  # dx; dy; y; G, F
        softmax_backward[L](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))
    elif op == comptime (code("log_softmax_forward")):
        log_softmax_forward[L](r.ptr(1), r.ptr(2), r.int(3), r.int(4))
    elif op == comptime (code("log_softmax_backward")):
        log_softmax_backward[L](
            r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5)
        )
    elif op == comptime (
        code("cross_entropy_forward")
    ):  # stats, p; x, labels; G, F
        cross_entropy_forward[L](
            r.ptr(1), r.ptr(2), r.ptr(3), r.ints(4), r.int(5), r.int(6)
        )
    elif op == comptime (code("cross_entropy_backward")):
        # dx; dloss; p, labels; G, F
        cross_entropy_backward[L](
            r.ptr(1), r.ptr(2), r.ptr(3), r.ints(4), r.int(5), r.int(6)
        )
    elif op == comptime (code("nll_forward")):  # stats; x, labels; G, F
        nll_forward[L](r.ptr(1), r.ptr(2), r.ints(3), r.int(4), r.int(5))
    elif op == comptime (code("nll_backward")):  # dx; dloss; labels; G, F
        nll_backward[L](r.ptr(1), r.ptr(2), r.ints(3), r.int(4), r.int(5))
    elif op == comptime (code("stats")):  # totals; loss, stats of a loss op
        var total = r.ptr(1)
        total[unsafe_offset=0] += r.ptr(2)[]
        total[unsafe_offset=1] += Float32(ctx.valid)
        total[unsafe_offset=2] += r.ptr(3)[unsafe_offset=2]
    elif op == comptime (code("sum_lanes")):  # y; x; N or -1, G, F
        sum_lanes[L](
            r.ptr(1), r.ptr(2), _samples(r, 3, ctx), r.int(4), r.int(5)
        )
    elif op == comptime (code("sum_lanes_backward")):  # dx; dy; N or -1, G, F
        sum_lanes_backward[L](
            r.ptr(1), r.ptr(2), _samples(r, 3, ctx), r.int(4), r.int(5)
        )
    elif op == comptime (code("add")):  # y; a, b; n
        add(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4))
    elif op == comptime (code("multiply")):  # y; a, b; n
        multiply(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4))
    elif op == comptime (code("axpy")):  # y; x; a, n
        axpy(r.ptr(1), r.ptr(2), r.float(3), r.int(4))
    elif op == comptime (code("scale")):  # y; x; a, n
        scale(r.ptr(1), r.ptr(2), r.float(3), r.int(4))
    elif op == comptime (code("copy")):  # y; x; n
        unsafe_memcpy(dest=r.ptr(1), src=r.ptr(2), count=r.int(3))
    elif op == comptime (code("fill")):  # y; a, n
        fill(r.ptr(1), r.float(2), r.int(3))
    elif op == comptime (code("loss_scale")):  # y (1)
        r.ptr(1)[] = Float32(ctx.loss_scale)
    elif op == comptime (code("uniform")):  # y; n, seed, stream, low, high
        uniform(
            r.ptr(1),
            r.int(2),
            UInt64(r.int(3)),
            UInt32(r.int(4)),
            r.float(5),
            r.float(6),
        )
    elif op == comptime (code("tree_sum")):  # y; addresses; n, size
        tree_sum(
            r.ptr(1),
            LongPtr(unsafe_from_address=r.address(2)),
            r.int(3),
            r.int(4),
        )
    elif op == comptime (code("largest")):  # y; x; n
        largest(r.ptr(1), r.ptr(2), r.int(3))
    elif op == comptime (code("fixed_squares")):  # y (2 int64); x; n, unit
        fixed_squares(
            LongPtr(unsafe_from_address=r.address(1)),
            r.ptr(2),
            r.int(3),
            r.float(4),
        )
    elif op == comptime (code("finite")):  # x; n. Stops the program if not
        return is_finite(r.ptr(1), r.int(2))
    elif op == comptime (code("sgd")):
        # w, v; g, samples; n; lr, momentum, weight decay, nesterov
        sgd(
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.int(5),
            1 / r.ptr(4)[],
            r.float(6),
            r.float(7),
            r.float(8),
            r.int(9) != 0,
        )
    elif op == comptime (code("adam")):
        # w, m, v; g, samples; n; lr, beta1, beta2, eps, weight decay, decoupled, corrections
        adam(
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.ptr(4),
            r.int(6),
            1 / r.ptr(5)[],
            r.float(7),
            r.float(8),
            r.float(9),
            r.float(10),
            r.float(11),
            r.int(12) != 0,
            r.float(13),
            r.float(14),
        )
    else:
        return False
    return True


def _gather[L: Int, dtype: DType](r: Record, ctx: Context):
    var images = Pointer[Scalar[dtype], MutUntrackedOrigin](
        unsafe_from_address=Int(ctx.images)
    )
    var rows = LongPtr(unsafe_from_address=Int(ctx.rows))
    var scale = Ptr(unsafe_from_address=Int(ctx.scale))
    var shift = Ptr(unsafe_from_address=Int(ctx.shift))
    comptime kernel = gather_rows_in_rows[dtype] if L == 1 else gather_rows[
        dtype
    ]
    kernel(
        r.ptr(1),
        images,
        rows,
        scale,
        shift,
        Int(ctx.valid),
        r.int(2),
        r.int(3),
        r.int(4),
    )


@always_inline
def _samples(r: Record, i: Int, ctx: Context) -> Int:
    return r.int(i) if r.int(i) >= 0 else Int(ctx.valid)
