"""The op table of the GPU: the names of ops.mojo and their launchers in kernels/gpu.

A record is the one that the CPU runs for one shard. Here an operand in a space becomes an address and a stride, and the
op is enqueued for all shards at once. Ops that share a layer between ranks (*_parts, *_columns) and activations in rows
have no form here: python/odyssey/gpu/rewrite.py refuses them before anything runs.
"""

from std.memory import bitcast
from std.utils import StaticTuple

from kernels.gpu.conv2d import (
    conv2d_backward_input,
    conv2d_backward_weight,
    conv2d_backward_weight_scratch,
    conv2d_forward,
    conv2d_relu_maxpool_forward,
)
from kernels.gpu.dropout import dropout
from kernels.gpu.elementwise import (
    add,
    copy,
    fill,
    loss_scale,
    multiply,
    relu_backward,
    relu_forward,
    scale,
    sigmoid_backward,
    sigmoid_forward,
    tanh_backward,
    tanh_forward,
)
from kernels.gpu.launch import (
    BF16,
    FP16,
    FP32,
    LongPtr,
    Operand,
    Queue,
    StepContextPtr,
    TF32,
)
from kernels.gpu.layout import (
    input,
    labels,
    pack_rows,
    pad_backward,
    pad_forward,
    unpack_rows,
)
from kernels.gpu.linear import (
    linear_backward_input,
    linear_backward_weight,
    linear_backward_weight_scratch,
    linear_forward,
)
from kernels.gpu.optimizer import adam, sgd
from kernels.gpu.pool import (
    avgpool_backward,
    avgpool_forward,
    maxpool_backward,
    maxpool_forward,
)
from kernels.gpu.reduce import (
    finite,
    stats,
    sum_lanes,
    sum_lanes_backward,
)
from kernels.gpu.softmax import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
    log_softmax_backward,
    log_softmax_forward,
    nll_backward,
    nll_forward,
    softmax_backward,
    softmax_forward,
)
from kernels.lanes import IntPtr, Ptr

from .ops import code
from .record import OFFSET, SPACES


@fieldwise_init
struct Launch(Copyable):
    """One record with what it needs to become a launch."""

    var at: LongPtr
    """Numbers of the record."""
    var bases: StaticTuple[Int, SPACES]
    """Addresses of the spaces, of shard 0."""
    var strides: StaticTuple[Int, SPACES]
    """Of each space, floats from one shard to the next."""
    var shards: Int
    """Of the chunk."""
    var fold: Int
    """Shards that share a gradient buffer: 1, 2, 4 or 8."""
    var accumulate: Bool
    """Whether gradients are added to what the buffers hold."""
    var scratch: Ptr
    """Memory that launches share."""
    var context: StepContextPtr
    """What a run brings to the program."""
    var flag: Int
    """Address of an int32: 1 while all numbers checked were finite."""

    @always_inline
    def int(self, i: Int) -> Int:
        """Argument i as a size.

        Args:
            i: From 1.

        Returns:
            The size.
        """
        return Int(self.at[unsafe_offset=i])

    @always_inline
    def float(self, i: Int) -> Float32:
        """Argument i as a float.

        Args:
            i: From 1.

        Returns:
            The float.
        """
        return bitcast[DType.float32](
            UInt32(self.at[unsafe_offset=i] & 0xFFFFFFFF)
        )

    @always_inline
    def op(self, i: Int) -> Operand:
        """Argument i as an operand that walks over the shards.

        Args:
            i: From 1.

        Returns:
            The operand.
        """
        var v = Int(self.at[unsafe_offset=i])
        return Operand(
            self.bases[v >> 56] + (v & OFFSET), self.strides[v >> 56]
        )

    @always_inline
    def ptr(self, i: Int) -> Ptr:
        """Argument i as an operand that there is once.

        Args:
            i: From 1.

        Returns:
            Where it lies.
        """
        return Ptr(unsafe_from_address=self.op(i).address)

    @always_inline
    def ok(self) -> IntPtr:
        """The flag: 1 while all numbers checked were finite.

        Returns:
            Where it lies.
        """
        return IntPtr(unsafe_from_address=self.flag)


def scratch_floats(at: LongPtr, shards: Int, fold: Int) -> Int:
    """Scratch memory that a record wants, in floats.

    Args:
        at: The record.
        shards: Of the chunk.
        fold: Shards that share a gradient buffer: 1, 2, 4 or 8.

    Returns:
        Floats.
    """
    var op = Int(at[unsafe_offset=0])

    @always_inline
    def i(k: Int) {imm} -> Int:
        return Int(at[unsafe_offset=k])

    if op == comptime (code("conv2d_backward_weight")):
        return conv2d_backward_weight_scratch(
            shards, fold, i(5), i(6), i(7), i(8), i(9), i(10), i(11), i(12)
        )
    elif (
        op == comptime (code("conv2d_backward_weight_bf16"))
        or op == comptime (code("conv2d_backward_weight_fp16"))
        or op == comptime (code("conv2d_backward_weight_tf32"))
    ):
        return conv2d_backward_weight_scratch(
            shards, fold, i(6), i(7), i(8), i(9), i(10), i(11), i(12), i(13)
        )
    elif op == comptime (code("linear_backward_weight")) or (
        op == comptime (code("linear_backward_weight_bf16"))
        or op == comptime (code("linear_backward_weight_fp16"))
        or op == comptime (code("linear_backward_weight_tf32"))
    ):
        return linear_backward_weight_scratch(shards, fold, i(6), i(7), i(8))
    return 0


def enqueue(q: Queue, r: Launch) raises:
    """Enqueues one record for all its shards.

    Args:
        q: Where to.
        r: The record.

    Raises:
        Error: The op has no kernel for GPUs, or the device refuses.
    """
    var op = r.int(0)
    var n = r.shards
    if op == comptime (code("input")):  # y; G, F, C
        input(q, n, r.op(1), r.int(2), r.int(3), r.int(4), r.context)
    elif op == comptime (code("labels")):  # labels; G
        labels(q, n, r.op(1), r.int(2), r.context)
    elif op == comptime (code("pack_rows")):  # y; x; N, F
        pack_rows(q, n, r.op(1), r.op(2), r.int(3), r.int(4))
    elif op == comptime (code("unpack_rows")):
        unpack_rows(q, n, r.op(1), r.op(2), r.int(3), r.int(4))
    elif op == comptime (code("pad_forward")):  # y; x; planes, H, W, ph, pw
        pad_forward(
            q,
            n,
            r.op(1),
            r.op(2),
            r.int(3),
            r.int(4),
            r.int(5),
            r.int(6),
            r.int(7),
        )
    elif op == comptime (code("pad_backward")):
        pad_backward(
            q,
            n,
            r.op(1),
            r.op(2),
            r.int(3),
            r.int(4),
            r.int(5),
            r.int(6),
            r.int(7),
        )
    elif op == comptime (code("conv2d_forward")):
        # y; x, w, b; G, C, H, W, K, R, T, S; relu
        _conv2d_forward[FP32](q, r, 5)
    elif op == comptime (code("conv2d_forward_bf16")):
        # y; x, w, b; scratch; G, C, H, W, K, R, T, S; relu
        _conv2d_forward[BF16](q, r, 6)
    elif op == comptime (code("conv2d_forward_fp16")):
        _conv2d_forward[FP16](q, r, 6)
    elif op == comptime (code("conv2d_forward_tf32")):
        _conv2d_forward[TF32](q, r, 6)
    elif op == comptime (code("conv2d_relu_maxpool_forward")):
        # y, argmax; x, w, b; G, C, H, W, K, R, T, S, pool R, T, S
        conv2d_relu_maxpool_forward[FP32](
            q,
            n,
            r.op(1),
            r.op(2),
            r.op(3),
            r.op(4),
            r.op(5),
            r.int(6),
            r.int(7),
            r.int(8),
            r.int(9),
            r.int(10),
            r.int(11),
            r.int(12),
            r.int(13),
            r.int(14),
            r.int(15),
            r.int(16),
        )
    elif op == comptime (code("conv2d_backward_weight")):
        # dw, db; dy, x; G, C, H, W, K, R, T, S
        _conv2d_backward_weight[FP32](q, r, 5)
    elif op == comptime (code("conv2d_backward_weight_bf16")):
        # dw, db; dy, x; scratch; G, C, H, W, K, R, T, S
        _conv2d_backward_weight[BF16](q, r, 6)
    elif op == comptime (code("conv2d_backward_weight_fp16")):
        _conv2d_backward_weight[FP16](q, r, 6)
    elif op == comptime (code("conv2d_backward_weight_tf32")):
        _conv2d_backward_weight[TF32](q, r, 6)
    elif op == comptime (code("conv2d_backward_input")):
        # dx; dy, w; G, C, H, W, K, R, T, S
        _conv2d_backward_input[FP32](q, r, 4)
    elif op == comptime (code("conv2d_backward_input_bf16")):
        # dx; dy, w; scratch; G, C, H, W, K, R, T, S
        _conv2d_backward_input[BF16](q, r, 5)
    elif op == comptime (code("conv2d_backward_input_fp16")):
        _conv2d_backward_input[FP16](q, r, 5)
    elif op == comptime (code("conv2d_backward_input_tf32")):
        _conv2d_backward_input[TF32](q, r, 5)
    elif op == comptime (code("maxpool_forward")):
        # y, argmax; x; planes, H, W, R, T, S
        maxpool_forward(
            q,
            n,
            r.op(1),
            r.op(2),
            r.op(3),
            r.int(4),
            r.int(5),
            r.int(6),
            r.int(7),
            r.int(8),
            r.int(9),
        )
    elif op == comptime (code("maxpool_backward")):
        # dx; dy; argmax, y; planes, H, W, R, T, S; relu
        if r.int(11):
            _maxpool_backward[True](q, r)
        else:
            _maxpool_backward[False](q, r)
    elif op == comptime (code("avgpool_forward")):
        # y; x; planes, H, W, R, T, S
        avgpool_forward(
            q,
            n,
            r.op(1),
            r.op(2),
            r.int(3),
            r.int(4),
            r.int(5),
            r.int(6),
            r.int(7),
            r.int(8),
        )
    elif op == comptime (code("avgpool_backward")):
        avgpool_backward(
            q,
            n,
            r.op(1),
            r.op(2),
            r.int(3),
            r.int(4),
            r.int(5),
            r.int(6),
            r.int(7),
            r.int(8),
        )
    elif op == comptime (code("linear_forward")):  # y; x, w, b; G, I, O; relu
        _linear_forward[FP32](q, r, 5)
    elif op == comptime (code("linear_forward_bf16")):
        # y; x, w, b; scratch; G, I, O; relu
        _linear_forward[BF16](q, r, 6)
    elif op == comptime (code("linear_forward_fp16")):
        _linear_forward[FP16](q, r, 6)
    elif op == comptime (code("linear_forward_tf32")):
        _linear_forward[TF32](q, r, 6)
    elif op == comptime (code("linear_backward_weight")):
        # dw, db; dy, x; scratch; G, I, O
        _linear_backward_weight[FP32](q, r)
    elif op == comptime (code("linear_backward_weight_bf16")):
        _linear_backward_weight[BF16](q, r)
    elif op == comptime (code("linear_backward_weight_fp16")):
        _linear_backward_weight[FP16](q, r)
    elif op == comptime (code("linear_backward_weight_tf32")):
        _linear_backward_weight[TF32](q, r)
    elif op == comptime (code("linear_backward_input")):  # dx; dy, w; G, I, O
        _linear_backward_input[FP32](q, r, 4)
    elif op == comptime (code("linear_backward_input_bf16")):
        # dx; dy, w; scratch; G, I, O
        _linear_backward_input[BF16](q, r, 5)
    elif op == comptime (code("linear_backward_input_fp16")):
        _linear_backward_input[FP16](q, r, 5)
    elif op == comptime (code("linear_backward_input_tf32")):
        _linear_backward_input[TF32](q, r, 5)
    elif op == comptime (code("relu_forward")):  # y; x; n
        relu_forward(q, n, r.op(1), r.op(2), r.int(3))
    elif op == comptime (code("relu_backward")):  # dx; dy; y; n
        relu_backward(q, n, r.op(1), r.op(2), r.op(3), r.int(4))
    elif op == comptime (code("tanh_forward")):
        tanh_forward(q, n, r.op(1), r.op(2), r.int(3))
    elif op == comptime (code("tanh_backward")):
        tanh_backward(q, n, r.op(1), r.op(2), r.op(3), r.int(4))
    elif op == comptime (code("sigmoid_forward")):
        sigmoid_forward(q, n, r.op(1), r.op(2), r.int(3))
    elif op == comptime (code("sigmoid_backward")):
        sigmoid_backward(q, n, r.op(1), r.op(2), r.op(3), r.int(4))
    elif op == comptime (code("dropout")):  # y; x; G, F; p, layer
        dropout(
            q,
            n,
            r.op(1),
            r.op(2),
            r.int(3),
            r.int(4),
            r.float(5),
            r.int(6),
            r.context,
        )
    elif op == comptime (code("softmax_forward")):  # y; x; G, F
        softmax_forward(q, n, r.op(1), r.op(2), r.int(3), r.int(4))
    elif op == comptime (code("softmax_backward")):  # dx; dy; y; G, F
        softmax_backward(q, n, r.op(1), r.op(2), r.op(3), r.int(4), r.int(5))
    elif op == comptime (code("log_softmax_forward")):
        log_softmax_forward(q, n, r.op(1), r.op(2), r.int(3), r.int(4))
    elif op == comptime (code("log_softmax_backward")):
        log_softmax_backward(
            q, n, r.op(1), r.op(2), r.op(3), r.int(4), r.int(5)
        )
    elif op == comptime (code("cross_entropy_forward")):
        # stats, p; x, labels; G, F
        cross_entropy_forward(
            q, n, r.op(1), r.op(2), r.op(3), r.op(4), r.int(5), r.int(6)
        )
    elif op == comptime (code("cross_entropy_backward")):
        # dx; dloss; p, labels; G, F
        cross_entropy_backward(
            q, n, r.op(1), r.op(2), r.op(3), r.op(4), r.int(5), r.int(6)
        )
    elif op == comptime (code("cross_entropy")):
        # stats, dx; x, labels; G, F; scaled
        cross_entropy(
            q,
            n,
            r.op(1),
            r.op(2),
            r.op(3),
            r.op(4),
            r.int(5),
            r.int(6),
            r.int(7) != 0,
            r.context,
        )
    elif op == comptime (code("nll_forward")):  # stats; x, labels; G, F
        nll_forward(q, n, r.op(1), r.op(2), r.op(3), r.int(4), r.int(5))
    elif op == comptime (code("nll_backward")):  # dx; dloss; labels; G, F
        nll_backward(q, n, r.op(1), r.op(2), r.op(3), r.int(4), r.int(5))
    elif op == comptime (code("stats")):  # totals; loss, stats of a loss op
        stats(
            q,
            n,
            r.fold,
            r.op(1),
            r.op(2),
            r.op(3),
            r.context,
            r.accumulate,
        )
    elif op == comptime (code("sum_lanes")):  # y; x; N or -1, G, F
        sum_lanes(
            q, n, r.op(1), r.op(2), r.int(3), r.int(4), r.int(5), r.context
        )
    elif op == comptime (code("sum_lanes_backward")):  # dx; dy; N or -1, G, F
        sum_lanes_backward(
            q, n, r.op(1), r.op(2), r.int(3), r.int(4), r.int(5), r.context
        )
    elif op == comptime (code("add")):  # y; a, b; n
        add(q, n, r.op(1), r.op(2), r.op(3), r.int(4))
    elif op == comptime (code("multiply")):
        multiply(q, n, r.op(1), r.op(2), r.op(3), r.int(4))
    elif op == comptime (code("scale")):  # y; x; a, n
        scale(q, n, r.op(1), r.op(2), r.float(3), r.int(4))
    elif op == comptime (code("copy")):  # y; x; n
        copy(q, n, r.op(1), r.op(2), r.int(3))
    elif op == comptime (code("fill")):  # y; a, n
        fill(q, n, r.op(1), r.float(2), r.int(3))
    elif op == comptime (code("loss_scale")):  # y (1)
        loss_scale(q, n, r.op(1), r.context)
    elif op == comptime (code("finite")):  # x; n
        finite(q, r.ok(), r.ptr(1), r.int(2))
    elif op == comptime (code("sgd")):
        # w, v; g, samples; n; lr, momentum, weight decay, nesterov
        sgd(
            q,
            r.ok(),
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.ptr(4),
            r.int(5),
            r.float(6),
            r.float(7),
            r.float(8),
            r.int(9) != 0,
        )
    elif op == comptime (code("adam")):
        # w, m, v; g, samples; n; lr, beta1, beta2, eps, weight decay, decoupled, corrections
        adam(
            q,
            r.ok(),
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.ptr(4),
            r.ptr(5),
            r.int(6),
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
        raise Error("op ", op, " has no form for GPUs")


# --- layers in four precisions; `at` is where the sizes of a record begin --------------------------------------------


def _conv2d_forward[precision: Int](q: Queue, r: Launch, at: Int) raises:
    if r.int(at + 8):
        _conv2d_forward_relu[precision, True](q, r, at)
    else:
        _conv2d_forward_relu[precision, False](q, r, at)


def _conv2d_forward_relu[
    precision: Int, relu: Bool
](q: Queue, r: Launch, at: Int) raises:
    conv2d_forward[precision, relu](
        q,
        r.shards,
        r.op(1),
        r.op(2),
        r.op(3),
        r.op(4),
        r.int(at),
        r.int(at + 1),
        r.int(at + 2),
        r.int(at + 3),
        r.int(at + 4),
        r.int(at + 5),
        r.int(at + 6),
        r.int(at + 7),
    )


def _conv2d_backward_weight[
    precision: Int
](q: Queue, r: Launch, at: Int) raises:
    conv2d_backward_weight[precision](
        q,
        r.shards,
        r.fold,
        r.op(1),
        r.op(2),
        r.op(3),
        r.op(4),
        r.scratch,
        r.int(at),
        r.int(at + 1),
        r.int(at + 2),
        r.int(at + 3),
        r.int(at + 4),
        r.int(at + 5),
        r.int(at + 6),
        r.int(at + 7),
        r.accumulate,
    )


def _conv2d_backward_input[precision: Int](q: Queue, r: Launch, at: Int) raises:
    conv2d_backward_input[precision](
        q,
        r.shards,
        r.op(1),
        r.op(2),
        r.op(3),
        r.int(at),
        r.int(at + 1),
        r.int(at + 2),
        r.int(at + 3),
        r.int(at + 4),
        r.int(at + 5),
        r.int(at + 6),
        r.int(at + 7),
    )


def _linear_forward[precision: Int](q: Queue, r: Launch, at: Int) raises:
    if r.int(at + 3):
        linear_forward[precision, True](
            q,
            r.shards,
            r.op(1),
            r.op(2),
            r.op(3),
            r.op(4),
            r.int(at),
            r.int(at + 1),
            r.int(at + 2),
        )
    else:
        linear_forward[precision, False](
            q,
            r.shards,
            r.op(1),
            r.op(2),
            r.op(3),
            r.op(4),
            r.int(at),
            r.int(at + 1),
            r.int(at + 2),
        )


def _linear_backward_weight[precision: Int](q: Queue, r: Launch) raises:
    linear_backward_weight[precision](
        q,
        r.shards,
        r.fold,
        r.op(1),
        r.op(2),
        r.op(3),
        r.op(4),
        r.scratch,
        r.int(6),
        r.int(7),
        r.int(8),
        r.accumulate,
    )


def _linear_backward_input[precision: Int](q: Queue, r: Launch, at: Int) raises:
    linear_backward_input[precision](
        q,
        r.shards,
        r.op(1),
        r.op(2),
        r.op(3),
        r.int(at),
        r.int(at + 1),
        r.int(at + 2),
    )


def _maxpool_backward[relu: Bool](q: Queue, r: Launch) raises:
    maxpool_backward[relu](
        q,
        r.shards,
        r.op(1),
        r.op(2),
        r.op(3),
        r.op(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
        r.int(10),
    )
