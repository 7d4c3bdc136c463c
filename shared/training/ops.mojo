"""The op table: what a record of a program means, and the one place where an op's name meets its kernel.

A record is RECORD int64 numbers: an op code, plus ROWS if its activations are in rows instead of lanes
(kernels/lanes.mojo), and its arguments. An argument is a size, a float (its 32 bits) or an
operand: a byte offset in the low 56 bits and a space in the high 8. A space is an entry of the table of base addresses
that comes with a run, so one program serves every shard, thread and process:

    ABSOLUTE   base 0: the offset is an address (how Python runs a single op)
    PARAMS     the arena of parameters
    GRADS      the gradient buffer of this shard: the arena's layout, then STATS floats (loss, samples, correct, -)
    WORK       the workspace of this thread

What changes from shard to shard without being an address is in the context (`Context`). Both front ends read NAMES, so
a code is written nowhere.
"""

from std.memory import bitcast, unsafe_memcpy

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
from kernels.lanes import BytePtr, IntPtr, LANES, Ptr
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
from kernels.optimizer import adam, sgd
from kernels.pool import (
    avgpool_backward,
    avgpool_forward,
    maxpool_backward,
    maxpool_forward,
)
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

comptime RECORD = 24
comptime ROWS = 1 << 16  # added to an op code
comptime ABSOLUTE = 0
comptime PARAMS = 1
comptime GRADS = 2
comptime WORK = 3
comptime SPACES = 4
comptime STATS = 16  # floats behind a gradient buffer, one vector
comptime OFFSET = (1 << 56) - 1

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


def code(name: StaticString) -> Int:
    """The op code of a name; -1 if there is none."""
    var names = materialize[NAMES]()
    for i in range(len(names)):
        if names[i] == name:
            return i
    return -1


@fieldwise_init
struct Context(TrivialRegisterPassable):
    """What a run of a program needs besides addresses."""

    var seed: UInt64
    var step: Int64  # number of the optimizer step
    var first: Int64  # position of the shard's first sample in the global batch
    var valid: Int64  # samples of this shard that exist
    var images: Int64  # address of the data set, (samples, F)
    var bytes: Int64  # 1 if it is uint8, 0 if float32
    var labels: Int64  # address, int32 (samples)
    var rows: Int64  # address, int64: which samples the shard has
    var scale: Int64  # address, float32 (C)
    var shift: Int64  # address, float32 (C)
    var loss_scale: Float64  # what gradients are multiplied by inside a program; a power of two


comptime ContextPtr = Pointer[Context, MutUntrackedOrigin]


@fieldwise_init
struct Record(TrivialRegisterPassable):
    """One op with its arguments, as a kernel call reads them."""

    var at: LongPtr
    var bases: LongPtr

    @always_inline
    def int(self, i: Int) -> Int:
        """Argument i as a size."""
        return Int(self.at[unsafe_offset=i])

    @always_inline
    def float(self, i: Int) -> Float32:
        """Argument i as a float."""
        return bitcast[DType.float32](
            UInt32(self.at[unsafe_offset=i] & 0xFFFFFFFF)
        )

    @always_inline
    def address(self, i: Int) -> Int:
        """Argument i as an operand."""
        var v = Int(self.at[unsafe_offset=i])
        return Int(self.bases[unsafe_offset=v >> 56]) + (v & OFFSET)

    @always_inline
    def ptr(self, i: Int) -> Ptr:
        """Argument i as floats."""
        return Ptr(unsafe_from_address=self.address(i))

    @always_inline
    def ints(self, i: Int) -> IntPtr:
        """Argument i as int32."""
        return IntPtr(unsafe_from_address=self.address(i))

    @always_inline
    def bytes(self, i: Int) -> BytePtr:
        """Argument i as bytes."""
        return BytePtr(unsafe_from_address=self.address(i))


def execute(r: Record, ctx: Context) -> Bool:
    """Runs one record. False stops the program: a check failed."""
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
        # y; x, w, b; G, C, H, W, K, R, T, S; relu
        if r.int(13):
            _conv2d_forward[L, True](r)
        else:
            _conv2d_forward[L, False](r)
    elif op == comptime (code("conv2d_backward_weight")):
        # dw, db; dy, x; G, C, H, W, K, R, T, S
        _conv2d_backward_weight[L](r)
    elif op == comptime (code("conv2d_backward_input")):
        # dx; dy, w; G, C, H, W, K, R, T, S
        _conv2d_backward_input[L](r)
    elif op == comptime (code("maxpool_forward")):
        # y, argmax; x; planes, H, W, R, T, S
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
    elif op == comptime (code("maxpool_backward")):
        # dx; dy; argmax, y; planes, H, W, R, T, S; relu
        if r.int(11):
            _maxpool_backward[L, True](r)
        else:
            _maxpool_backward[L, False](r)
    elif op == comptime (
        code("avgpool_forward")
    ):  # y; x; planes, H, W, R, T, S
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
    elif op == comptime (
        code("avgpool_backward")
    ):  # dx; dy; planes, H, W, R, T, S
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
    elif op == comptime (code("linear_forward")):  # y; x, w, b; G, I, O; relu
        if r.int(8):
            _linear_forward[L, True](r)
        else:
            _linear_forward[L, False](r)
    elif op == comptime (code("linear_backward_weight")):
        # dw, db; dy, x; scratch; G, I, O
        _linear_backward_weight[L](r)
    elif op == comptime (code("linear_backward_input")):  # dx; dy, w; G, I, O
        _linear_backward_input[L](r)
    elif op == comptime (
        code("conv2d_forward_bf16")
    ):  # y; x, w, b; scratch; G, C, H, W, K, R, T, S; relu
        if r.int(14):
            _conv2d_forward_low[L, DType.bfloat16, True](r)
        else:
            _conv2d_forward_low[L, DType.bfloat16, False](r)
    elif op == comptime (
        code("conv2d_backward_weight_bf16")
    ):  # dw, db; dy, x; scratch; G, C, H, W, K, R, T, S
        _conv2d_backward_weight_low[L, DType.bfloat16](r)
    elif op == comptime (
        code("conv2d_backward_input_bf16")
    ):  # dx; dy, w; scratch; G, C, H, W, K, R, T, S
        _conv2d_backward_input_low[L, DType.bfloat16](r)
    elif op == comptime (
        code("linear_forward_bf16")
    ):  # y; x, w, b; scratch; G, I, O; relu
        if r.int(9):
            _linear_forward_low[L, DType.bfloat16, True](r)
        else:
            _linear_forward_low[L, DType.bfloat16, False](r)
    elif op == comptime (
        code("linear_backward_weight_bf16")
    ):  # dw, db; dy, x; scratch; G, I, O
        _linear_backward_weight_low[L, DType.bfloat16](r)
    elif op == comptime (
        code("linear_backward_input_bf16")
    ):  # dx; dy, w; scratch; G, I, O
        _linear_backward_input_low[L, DType.bfloat16](r)
    elif op == comptime (
        code("conv2d_forward_fp16")
    ):  # y; x, w, b; scratch; G, C, H, W, K, R, T, S; relu
        if r.int(14):
            _conv2d_forward_low[L, DType.float16, True](r)
        else:
            _conv2d_forward_low[L, DType.float16, False](r)
    elif op == comptime (
        code("conv2d_backward_weight_fp16")
    ):  # dw, db; dy, x; scratch; G, C, H, W, K, R, T, S
        _conv2d_backward_weight_low[L, DType.float16](r)
    elif op == comptime (
        code("conv2d_backward_input_fp16")
    ):  # dx; dy, w; scratch; G, C, H, W, K, R, T, S
        _conv2d_backward_input_low[L, DType.float16](r)
    elif op == comptime (
        code("linear_forward_fp16")
    ):  # y; x, w, b; scratch; G, I, O; relu
        if r.int(9):
            _linear_forward_low[L, DType.float16, True](r)
        else:
            _linear_forward_low[L, DType.float16, False](r)
    elif op == comptime (
        code("linear_backward_weight_fp16")
    ):  # dw, db; dy, x; scratch; G, I, O
        _linear_backward_weight_low[L, DType.float16](r)
    elif op == comptime (
        code("linear_backward_input_fp16")
    ):  # dx; dy, w; scratch; G, I, O
        _linear_backward_input_low[L, DType.float16](r)
    elif op == comptime (code("linear_forward_parts")):
        # y; x of the parts, w; G, I, O, part, parts. Lanes only, as all for tensor parallelism
        comptime if L == 1:
            return False
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
    elif op == comptime (code("linear_backward_input_parts")):
        # dx; dy of the parts, w; G, I, O, part, parts
        comptime if L == 1:
            return False
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
    elif op == comptime (code("linear_backward_weight_columns")):
        # dw, db; dy, x; scratch; G, columns, O, row stride of dw
        comptime if L == 1:
            return False
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
    elif op == comptime (code("linear_backward_input_columns")):
        # dx; dy, w; G, columns, O, row stride of w
        comptime if L == 1:
            return False
        linear_backward_input_columns(
            r.ptr(1),
            r.ptr(2),
            r.ptr(3),
            r.int(4),
            r.int(5),
            r.int(6),
            r.int(7),
        )
    elif op == comptime (code("take_features")):  # y; x; G, F, first, n
        comptime if L == 1:
            return False
        take_features(
            r.ptr(1), r.ptr(2), r.int(3), r.int(4), r.int(5), r.int(6)
        )
    elif op == comptime (code("linear_bias")):  # y; x, b; G, O; relu
        comptime if L == 1:
            return False
        if r.int(6):
            linear_bias[True](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))
        else:
            linear_bias[False](r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5))
    elif op == comptime (code("conv2d_backward_input_parts")):
        # dx; dy of the parts, w; G, C, H, W, K, R, T, S, part, parts
        comptime if L == 1:
            return False
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


# --- kernels that have one form for lanes and one for rows ---------------------------


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


def _conv2d_backward_weight[L: Int](r: Record):
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


def _conv2d_backward_input[L: Int](r: Record):
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


def _linear_forward[L: Int, relu: Bool](r: Record):
    comptime kernel = linear_forward_rows[relu] if L == 1 else linear_forward[
        relu
    ]
    kernel(r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.int(5), r.int(6), r.int(7))


def _linear_backward_weight[L: Int](r: Record):
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


def _linear_backward_input[L: Int](r: Record):
    comptime kernel = linear_backward_input_rows if L == 1 else linear_backward_input
    kernel(r.ptr(1), r.ptr(2), r.ptr(3), r.int(4), r.int(5), r.int(6))


# --- products of bf16 and fp16 operands ----------------------------------------------
# The processor's own bf16 products where it has them and the batch is in lanes; else float32 copies of rounded operands,
# in scratch, for the float32 kernels. python/odyssey/precision.py knows how much scratch each takes.


@always_inline
def _rounded[dtype: DType](scratch: Ptr, x: Ptr, n: Int) -> Ptr:
    """A rounded copy of x at `scratch`."""
    rounded[dtype](scratch, x, n)
    return scratch


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
        var x = _rounded[dtype](r.ptr(5), r.ptr(2), n)
        var w = _rounded[dtype](x.unsafe_offset(n), r.ptr(3), K * C * R * T)
        comptime kernel = conv2d_forward_rows[
            relu
        ] if L == 1 else conv2d_forward[relu]
        kernel(r.ptr(1), x, w, r.ptr(4), G, C, H, W, K, R, T, S)


def _conv2d_backward_weight_low[L: Int, dtype: DType](r: Record):
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
        var x = _rounded[dtype](r.ptr(5), r.ptr(4), n)
        var dy = _rounded[dtype](x.unsafe_offset(n), r.ptr(3), m)
        var unused = dy.unsafe_offset(m)  # (K): db of the rounded dy
        fill(unused, 0, K)
        comptime kernel = conv2d_backward_weight_rows if L == 1 else conv2d_backward_weight
        kernel(r.ptr(1), unused, dy, x, G, C, H, W, K, R, T, S)
        bias_gradient[L](r.ptr(2), r.ptr(3), G, K, plane)


def _conv2d_backward_input_low[L: Int, dtype: DType](r: Record):
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
    var dy = _rounded[dtype](r.ptr(4), r.ptr(2), n)
    var w = _rounded[dtype](dy.unsafe_offset(n), r.ptr(3), K * C * R * T)
    comptime if L == 1:
        if S == 1:
            conv2d_backward_input_rows(r.ptr(1), dy, w, G, C, H, W, K, R, T, S)
        else:
            conv2d_backward_input_any[L](
                r.ptr(1), dy, w, G, C, H, W, K, R, T, S
            )
    else:
        conv2d_backward_input(r.ptr(1), dy, w, G, C, H, W, K, R, T, S)


def _linear_forward_low[L: Int, dtype: DType, relu: Bool](r: Record):
    var G = r.int(6)
    var I = r.int(7)
    var O = r.int(8)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        linear_forward_bf16[relu](
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.ptr(5), G, I, O
        )
    else:
        var x = _rounded[dtype](r.ptr(5), r.ptr(2), G * I * L)
        var w = _rounded[dtype](x.unsafe_offset(G * I * L), r.ptr(3), O * I)
        comptime kernel = linear_forward_rows[
            relu
        ] if L == 1 else linear_forward[relu]
        kernel(r.ptr(1), x, w, r.ptr(4), G, I, O)


def _linear_backward_weight_low[L: Int, dtype: DType](r: Record):
    var G = r.int(6)
    var I = r.int(7)
    var O = r.int(8)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        linear_backward_weight_bf16(
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.ptr(5), G, I, O
        )
    else:
        var n = G * I * L
        var x = _rounded[dtype](r.ptr(5), r.ptr(4), n)
        var dy = _rounded[dtype](x.unsafe_offset(n), r.ptr(3), G * O * L)
        var unused = dy.unsafe_offset(G * O * L)  # (O): db of the rounded dy
        fill(unused, 0, O)
        comptime if L == 1:
            linear_backward_weight_rows(r.ptr(1), unused, dy, x, G, I, O)
        else:
            var scratch = unused.unsafe_offset(O)
            linear_backward_weight(r.ptr(1), unused, dy, x, scratch, G, I, O, I)
        bias_gradient[L](r.ptr(2), r.ptr(3), G, O, 1)


def _linear_backward_input_low[L: Int, dtype: DType](r: Record):
    var G = r.int(5)
    var I = r.int(6)
    var O = r.int(7)
    comptime if HAS_BF16 and dtype == DType.bfloat16 and L == LANES:
        linear_backward_input_bf16(
            r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), G, I, O
        )
    else:
        var dy = _rounded[dtype](r.ptr(4), r.ptr(2), G * O * L)
        var w = _rounded[dtype](dy.unsafe_offset(G * O * L), r.ptr(3), O * I)
        comptime kernel = linear_backward_input_rows if L == 1 else linear_backward_input
        kernel(r.ptr(1), dy, w, G, I, O)


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


@always_inline
def _samples(r: Record, i: Int, ctx: Context) -> Int:
    return r.int(i) if r.int(i) >= 0 else Int(ctx.valid)
