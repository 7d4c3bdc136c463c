"""What only walks over memory, element by element or along a generator's counters. Part of the tests in ops.mojo."""

from std.testing import TestSuite, assert_equal, assert_raises
from std.utils.numerics import inf, nan
from kernels import dropout as cpu_dropout
from kernels import elementwise as cpu
from kernels.gpu import dropout as gpu_dropout
from kernels.gpu import elementwise as gpu
from kernels.gpu import layout as gpu_layout
from kernels.gpu.launch import Queue
from kernels.gpu.quads import divide, divisor
from kernels.lanes import LANES
from lab import Lab, Shape, put_context, up

comptime L = LANES


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


def each_elementwise(
    q: Queue, mut lab: Lab, shards: Int, n: Int, stride: Int, first: Int
) raises:
    """All elementwise ops over operands at `first`, one after the other."""
    var size = up(first + shards * stride)
    var y = first
    var a = size + first
    var b = 2 * size + first
    special(lab, a)

    @always_inline
    def run(name: String, which: Int, tolerance: Float32) raises {mut lab, imm}:
        lab.upload()
        var oy = lab.op(y, stride)
        var oa = lab.op(a, stride)
        var ob = lab.op(b, stride)
        for s in range(shards):
            var py = lab.ptr(y + s * stride)
            var pa = lab.ptr(a + s * stride)
            var pb = lab.ptr(b + s * stride)
            if which == 0:
                cpu.relu_forward(py, pa, n)
            elif which == 1:
                cpu.relu_backward(py, pb, pa, n)
            elif which == 2:
                cpu.tanh_forward(py, pa, n)
            elif which == 3:
                cpu.tanh_backward(py, pb, pa, n)
            elif which == 4:
                cpu.sigmoid_forward(py, pa, n)
            elif which == 5:
                cpu.sigmoid_backward(py, pb, pa, n)
            elif which == 6:
                cpu.add(py, pa, pb, n)
            elif which == 7:
                cpu.multiply(py, pa, pb, n)
            elif which == 8:
                cpu.scale(py, pa, 0.3, n)
            elif which == 9:
                for i in range(n):
                    py[unsafe_offset=i] = pa[unsafe_offset=i]
            else:
                cpu.fill(py, 0.3, n)
        if which == 0:
            gpu.relu_forward(q, shards, oy, oa, n)
        elif which == 1:
            gpu.relu_backward(q, shards, oy, ob, oa, n)
        elif which == 2:
            gpu.tanh_forward(q, shards, oy, oa, n)
        elif which == 3:
            gpu.tanh_backward(q, shards, oy, ob, oa, n)
        elif which == 4:
            gpu.sigmoid_forward(q, shards, oy, oa, n)
        elif which == 5:
            gpu.sigmoid_backward(q, shards, oy, ob, oa, n)
        elif which == 6:
            gpu.add(q, shards, oy, oa, ob, n)
        elif which == 7:
            gpu.multiply(q, shards, oy, oa, ob, n)
        elif which == 8:
            gpu.scale(q, shards, oy, oa, 0.3, n)
        elif which == 9:
            gpu.copy(q, shards, oy, oa, n)
        else:
            gpu.fill(q, shards, oy, 0.3, n)
        lab.compare(
            String(t"{name}, {shards} shards of {n}, stride {stride}"),
            tolerance,
        )

    run("relu_forward", 0, 0)
    run("relu_backward", 1, 0)
    run("tanh_forward", 2, 1e-6)
    run("tanh_backward", 3, 0)
    run("sigmoid_forward", 4, 1e-6)
    run("sigmoid_backward", 5, 0)
    run("add", 6, 0)
    run("multiply", 7, 0)
    run("scale", 8, 0)
    run("copy", 9, 0)
    run("fill", 10, 0)


def test_elementwise() raises:
    var q = Queue(device_id=0)
    for n in [1, 5, 16, 1027]:
        var aligned = Lab(q, 4 * up(3 * up(n) + 16))
        each_elementwise(q, aligned, 3, n, up(n), 0)
        var odd = Lab(q, 4 * up(3 * (n + 7) + 16))
        each_elementwise(q, odd, 3, n, n + 7, 3)


def test_tanh_and_sigmoid_to_the_last_bits() raises:
    """Over their whole range, also where they are small."""
    var q = Queue(device_id=0)
    var n = 20000
    var lab = Lab(q, 2 * up(n))
    for i in range(n):
        lab.host[up(n) + i] = Float32(i - n // 2) * Float32(0.002)
    for which in range(2):
        lab.upload()
        for i in range(n):
            lab.host[i] = 0
        if which == 0:
            cpu.tanh_forward(lab.ptr(0), lab.ptr(up(n)), n)
            gpu.tanh_forward(q, 1, lab.op(0), lab.op(up(n)), n)
        else:
            cpu.sigmoid_forward(lab.ptr(0), lab.ptr(up(n)), n)
            gpu.sigmoid_forward(q, 1, lab.op(0), lab.op(up(n)), n)
        var got = List[Float32](length=2 * up(n), fill=0)
        lab.q.enqueue_copy(got.unsafe_ptr(), lab.device)
        lab.q.synchronize()
        for i in range(n):
            var a = got[i]
            var b = lab.host[i]
            if not (abs(a - b) <= 5e-7 * abs(b)):
                raise Error(t"{which} at {lab.host[up(n) + i]}: {a}, {b}")


def test_tensors_in_lanes_must_be_aligned() raises:
    var q = Queue(device_id=0)
    var lab = Lab(q, 64)
    with assert_raises(contains="multiples of 16 bytes"):
        gpu_layout.pad_forward(
            q, 2, lab.op(0, 16), lab.op(32, 15), 1, 1, 1, 0, 0
        )
    with assert_raises(contains="too large"):
        gpu_layout.pad_forward(
            q, 1, lab.op(0), lab.op(32), 1 << 15, 1 << 15, 1, 0, 0
        )


# --- random numbers -----------------------------------------------------------------------------------


def test_dropout() raises:
    var q = Queue(device_id=0)
    var shards = 3
    var G = 2
    for F in [1, 6, 33]:
        var stride = G * F * L + 7
        var x = 0
        var y = up(shards * stride)
        var context = y + up(shards * stride)
        var lab = Lab(q, context + 32)
        var shape = Shape(first=64, samples=150, shard_size=32)
        var ctx = put_context(lab, context, shape)
        lab.upload()
        for s in range(shards):
            cpu_dropout.dropout[L](
                lab.ptr(y + s * stride),
                lab.ptr(x + s * stride),
                G,
                F,
                0.4,
                0x123456789ABCDEF,
                77,
                UInt32(64 + 32 * s),
                9,
            )
        gpu_dropout.dropout(
            q,
            shards,
            lab.op(y, stride),
            lab.op(x, stride),
            G,
            F,
            0.4,
            9,
            ctx,
        )
        lab.compare(String(t"dropout {F}"))
        gpu.loss_scale(q, shards, lab.op(y, stride), ctx)
        for s in range(shards):
            lab.host[y + s * stride] = 1024
        lab.compare("loss_scale")


def add_tests(mut suite: TestSuite):
    """The tests of this file."""
    suite.test[test_division]()
    suite.test[test_elementwise]()
    suite.test[test_tanh_and_sigmoid_to_the_last_bits]()
    suite.test[test_tensors_in_lanes_must_be_aligned]()
    suite.test[test_dropout]()
