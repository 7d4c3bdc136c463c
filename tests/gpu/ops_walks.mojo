"""What only walks over memory, element by element or along a generator's counters. Part of the tests in ops.mojo."""

from std.testing import TestSuite, assert_equal, assert_raises
from std.utils import StaticTuple
from std.utils.numerics import inf, nan
from kernels import dropout
from kernels.elementwise import maps
from kernels.gpu import elementwise as gpu
from kernels.gpu import layout as gpu_layout
from kernels.gpu.elementwise import OnGpu
from kernels.gpu.launch import Launch, Queue, StepContextPtr
from kernels.gpu.quads import divide, divisor
from kernels.lanes import LANES, LongPtr
from kernels.op import Cpu
from kernels.record import ContextPtr, RECORD, Record, SPACES
from lab import Call, Lab, Part, Shape, bits, kernel, put_context, up

comptime L = LANES
comptime EXACT = " relu_forward relu_backward tanh_backward sigmoid_backward add multiply scale "


# --- index arithmetic -------------------------------------------------------------------


def test_division() raises:
    for d in [
        1,
        2,
        3,
        5,
        6,
        7,
        10,
        28,
        641,
        65535,
        65537,
        1 << 20,
        (1 << 31) - 1,
    ]:
        var by = divisor(d)
        for k in [0, 1, 2, 3, 1000, (1 << 31) // d]:
            for n in [k * d - 1, k * d, k * d + 1, (1 << 31) - 1]:
                if n >= 0 and n < 1 << 31:
                    assert_equal(Int(divide(UInt32(n), by)), n // d)


# --- elementwise ----------------------------------------------------------------------------


def special(mut lab: Lab, at: Int):
    """Numbers that functions stumble over."""
    var odd = [
        Float32(0),
        -0.0,
        inf[DType.float32](),
        -inf[DType.float32](),
        nan[DType.float32](),
        1e-38,
        -3e-42,
        88,
        -88,
        200,
        -200,
    ]
    for i in range(len(odd)):
        lab.host[at + i] = odd[i]


def each_map(q: Queue, mut lab: Lab, shards: Int, n: Int, stride: Int, first: Int) raises:
    """All elementwise ops of the tables over operands at `first`, one after the other."""
    var size = up(first + shards * stride)
    var a = size + first  # what was saved, if the op is a gradient
    var b = 2 * size + first
    special(lab, a)
    var on_cpu = maps[Cpu]()
    var on_gpu = maps[OnGpu]()
    assert_equal(len(on_cpu), len(on_gpu))
    for k in range(len(on_cpu)):
        ref op = on_cpu[k]
        assert_equal(String(op.name), String(on_gpu[k].name))
        var two = op.roles.split(";")[1].count(",") == 1
        var numbers = List[Int64](length=RECORD, fill=0)
        var at = LongPtr(unsafe_from_address=Int(numbers.unsafe_ptr()))

        def fill(y: Int, x: Int, dy: Int) {mut numbers, imm}:
            numbers[1] = Int64(y)
            numbers[2] = Int64(dy if two else x)
            numbers[3] = Int64(x) if two else 0x3E99999A  # 0.3
            numbers[4] = Int64(n)
            if not two and op.name != "scale":
                numbers[3] = Int64(n)

        lab.upload()
        for s in range(shards):
            fill(
                Int(lab.ptr(first + s * stride)),
                Int(lab.ptr(a + s * stride)),
                Int(lab.ptr(b + s * stride)),
            )
            var bases = List[Int64](length=SPACES, fill=0)
            var from_ = LongPtr(unsafe_from_address=Int(bases.unsafe_ptr()))
            op.run(Record(at, from_, ContextPtr(unsafe_from_address=Int(at))))
            _ = bases^
        fill(lab.op(first).address, lab.op(a).address, lab.op(b).address)
        var left = 0
        on_gpu[k].run(
            q,
            Launch(
                at,
                StaticTuple[Int, SPACES](fill=0),
                StaticTuple[Int, SPACES](fill=stride),
                shards,
                1,
                False,
                lab.ptr(0),
                StepContextPtr(unsafe_from_address=Int(at)),
                0,
                Pointer(to=left).unsafe_origin_cast[MutUntrackedOrigin](),
            ),
        )
        _ = numbers^
        lab.compare(
            String(t"{op.name}, {shards} shards of {n}, stride {stride}"),
            Float32(0) if String(t" {op.name} ") in EXACT else Float32(2e-6),
        )


def test_elementwise() raises:
    var q = Queue(device_id=0)
    for n in [1, 5, 16, 1027]:
        var aligned = Lab(q, 4 * up(3 * up(n) + 16))
        each_map(q, aligned, 3, n, up(n), 0)
        var odd = Lab(q, 4 * up(3 * (n + 7) + 16))
        each_map(q, odd, 3, n, n + 7, 3)


def test_tensors_in_lanes_must_be_aligned() raises:
    var q = Queue(device_id=0)
    var lab = Lab(q, 64)
    with assert_raises(contains="multiples of 16 bytes"):
        gpu_layout.pad_forward(q, 2, lab.op(0, 16), lab.op(32, 15), 1, 1, 1, 0, 0)
    with assert_raises(contains="too large"):
        gpu_layout.pad_forward(q, 1, lab.op(0), lab.op(32), 1 << 15, 1 << 15, 1, 0, 0)


# --- random numbers -----------------------------------------------------------------------------------


def test_dropout() raises:
    var q = Queue(device_id=0)
    var shards = 3
    var G = 2
    for F in [1, 6, 33]:
        var stride = G * F * L + 7
        var x = 0
        var y = up(shards * stride)
        var bits_ = y + up(shards * stride)
        var dx = bits_ + up(shards * stride)
        var context = dx + up(shards * stride)
        var lab = Lab(q, context + 32)
        var shape = Shape(first=64, samples=150, shard_size=32)
        var ctx = put_context(lab, context, shape)
        lab.upload()
        var forward = Call(
            Part(y, stride),
            Part(bits_, stride),
            Part(x, stride),
            sizes=[G, F, bits(0.4), 9, 4],
            shards=shards,
        )
        var backward = Call(
            Part(dx, stride),
            Part(x, stride),
            Part(bits_, stride),
            sizes=[G, F, bits(0.4)],
            shards=shards,
        )
        forward.shape = shape
        forward.context = context
        forward.on_cpu(lab, kernel(dropout.ops[Cpu](), "dropout_forward"))
        forward.on_gpu(lab, kernel(dropout.ops[OnGpu](), "dropout_forward"))
        backward.on_cpu(lab, kernel(dropout.ops[Cpu](), "dropout_backward"))
        backward.on_gpu(lab, kernel(dropout.ops[OnGpu](), "dropout_backward"))
        lab.compare(String(t"dropout {F}"))
        gpu.loss_scale(q, shards, lab.op(y, stride), ctx)
        for s in range(shards):
            lab.host[y + s * stride] = 1024
        lab.compare("loss_scale")


def add_tests(mut suite: TestSuite):
    """The tests of this file."""
    suite.test[test_division]()
    suite.test[test_elementwise]()
    suite.test[test_tensors_in_lanes_must_be_aligned]()
    suite.test[test_dropout]()
