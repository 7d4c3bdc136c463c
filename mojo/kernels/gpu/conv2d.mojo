"""Two-dimensional convolution on a GPU, for all shards of a launch (launch.mojo; layouts and letters in lanes.mojo).

Which kernel computes what is chosen here and in correlate(), by the sizes:

    conv2d_mma.mojo         large layers on NVIDIA GPUs: forward, gradient of the input; tensor cores unless float32
    conv2d_mma_weight.mojo  likewise, gradient of the weights
    conv2d_direct.mojo      other GPUs, small layers, forward with ReLU and max-pool: float32 multiply-adds
    conv2d_weight.mojo      likewise, gradient of the weights
    conv2d_any.mojo         sizes that are left, groups and dilation (their weights: conv2d_weight.mojo)
    conv2d_tiles.mojo       what they share
"""

from std.sys.info import _has_nvidia_gpu_accelerator

from ..conv2d import Conv
from ..conv2d_general import General
from ..lanes import Ptr
from .conv2d_any import correlate_any, gather_input
from .conv2d_direct import correlate
from .conv2d_mma import correlate_mma, weights_mma, worth_it
from .conv2d_mma_weight import scratch_mma, weight_gradient_mma, worth_it_for_weights
from .conv2d_tiles import PADDED, PLAIN, POOLED, Shape
from .conv2d_weight import Gradients, STRANDS, pieces, weight_gradient
from .launch import BF16, FP32, Operand, Queue

comptime NONE = Operand(0, 0)


comptime NVIDIA = _has_nvidia_gpu_accelerator()


def conv2d_scratch(precision: Int, size: General) -> Int:
    """Floats of scratch memory that conv2d_forward and conv2d_backward_input want for weights, rounded and in order."""
    comptime if NVIDIA:
        var s = Shape.forward(size, precision, False)
        return max(weights_mma(s), weights_mma(s.phase(0, 0, 0, 0)))
    return 0


def conv2d_forward[
    precision: Int, relu: Bool
](
    q: Queue,
    shards: Int,
    y: Operand,  # (G, K, P, Q, 16)
    x: Operand,  # (G, C, H, W, 16)
    w: Operand,  # (K, C / groups, R, T)
    b: Operand,  # (K)
    size: General,
    scratch: Ptr,  # conv2d_scratch floats
) raises:
    """Computes y = x * w + b (cross-correlation), then max(y, 0) if `relu`."""
    var s = Shape.forward(size, precision, relu)
    comptime low = precision != FP32
    if s.D * s.groups > 1:
        correlate_any[PLAIN, low](q, shards, y, NONE, x, w, b, s)
        return
    comptime if NVIDIA:
        if worth_it(s):
            correlate_mma[precision, False](q, shards, y, x, w, b, scratch, s)
            return
    correlate[PLAIN, low](q, shards, y, NONE, x, w, b, s)


def conv2d_relu_maxpool_forward[
    precision: Int
](
    q: Queue,
    shards: Int,
    y: Operand,  # (G, K, PP, PQ, 16)
    argmax: Operand,  # bytes (G, K, PP, PQ, 16): which place of the window, as maxpool_forward has it
    x: Operand,  # (G, C, H, W, 16)
    w: Operand,  # (K, C, R, T)
    b: Operand,  # (K)
    size: Conv,
    PR: Int,
    PT: Int,
    PS: Int,
) raises:
    """Convolution, ReLU and max-pool in one launch: what is pooled is never in memory.

    PR x PT is the window, at most 256 places, PS its stride. With FP32 the bits are those of the CPU's three ops one
    after the other. In every precision the products are float32 multiply-adds, of rounded factors: where K is 16 or
    more and the precision low, tensor cores and an op for the pooling may be faster.
    """
    var s = Shape.forward(size, precision, True)
    s.PR = PR
    s.PT = PT
    s.PS = PS
    s.P = (s.P - PR) // PS + 1
    s.Q = (s.Q - PT) // PS + 1
    s.YP = s.P
    s.YQ = s.Q
    correlate[POOLED, precision != FP32](q, shards, y, argmax, x, w, b, s)


def conv2d_backward_input[
    precision: Int
](
    q: Queue,
    shards: Int,
    dx: Operand,  # (G, C, H - 2 frame_rows, W - 2 frame_columns, 16)
    dy: Operand,  # (G, K, P, Q, 16)
    w: Operand,  # (K, C / groups, R, T)
    size: General,
    scratch: Ptr,  # conv2d_scratch floats
    frame_rows: Int = 0,
    frame_columns: Int = 0,
) raises:
    """Writes the gradient of the (padded) input without its frame, which is nothing where there are groups or
    dilation.
    """
    var of = Shape.forward(size, precision, False)
    if size.D * size.groups != 1:
        gather_input[precision != FP32](q, shards, dx, dy, w, of)
        return
    for row in range(min(size.S, size.H - 2 * frame_rows)):
        for column in range(min(size.S, size.W - 2 * frame_columns)):  # phases
            var s = of.phase(row, column, frame_rows, frame_columns)
            comptime if NVIDIA:
                if worth_it(s):
                    correlate_mma[precision, True](q, shards, dx, dy, w, NONE, scratch, s)
                    continue
            correlate[PADDED, precision != FP32](q, shards, dx, NONE, dy, w, NONE, s)


def conv2d_backward_weight_scratch(shards: Int, fold: Int, size: General) -> Int:
    """Floats of scratch memory that conv2d_backward_weight wants."""
    var s = Shape.forward(size, FP32, False)
    var most = shards * pieces(s) * s.K * (s.taps() + 1)
    comptime if NVIDIA:
        for precision in [FP32, BF16]:
            s.precision = precision
            most = max(most, scratch_mma(shards, fold, s))
    return most


def conv2d_backward_weight[
    precision: Int
](
    q: Queue,
    shards: Int,
    fold: Int,  # 1, 2, 4 or 8
    dw: Operand,  # (K, C / groups, R, T), one for `fold` shards
    db: Operand,  # (K), likewise
    dy: Operand,  # (G, K, P, Q, 16)
    x: Operand,  # (G, C, H, W, 16)
    scratch: Ptr,
    size: General,
    accumulate: Bool,
) raises:
    """Writes the gradients of weights and bias, or adds them to what is there if `accumulate`.

    The bias is a sum of float32 numbers in every precision. Errors: a fold above 8.
    """
    if fold > STRANDS:
        raise Error("conv2d_backward_weight: ", fold, " shards for one buffer; at most ", STRANDS)
    var s = Shape.forward(size, precision, False)
    var of = Gradients(shards, fold, dw, db, dy, x, scratch, accumulate)
    comptime if NVIDIA:
        if s.D * s.groups == 1 and worth_it_for_weights(s):
            weight_gradient_mma[precision](q, of, s)
            return
    weight_gradient[precision != FP32](q, of, s)
