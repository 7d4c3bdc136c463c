"""Softmax, log-softmax and the losses. Part of the tests in ops.mojo."""

from std.testing import TestSuite
from std.utils.numerics import inf, nan
from kernels import softmax
from kernels.gpu.elementwise import OnGpu
from kernels.gpu.launch import Queue
from kernels.lanes import LANES
from kernels.op import Cpu
from lab import Call, Lab, Part, Shape, kernel, put_context, up

comptime L = LANES


# --- losses ----------------------------------------------------------------------------------------------


def each_softmax(q: Queue, G: Int, F: Int) raises:
    var shards = 3
    var xs = G * F * L + 32
    var x = Part(0, xs)
    var y = Part(shards * xs, xs)
    var dy = Part(2 * y.at, xs)
    var dx = Part(3 * y.at, xs)
    var lab = Lab(q, 4 * y.at)
    lab.host[x.at + 5] = 60  # large ones
    lab.host[x.at + 6] = -100
    var names: List[StaticString] = [
        "softmax_forward",
        "softmax_backward",
        "log_softmax_forward",
        "log_softmax_backward",
    ]
    for i in range(4):
        if i % 2 == 0:
            lab.upload()
        var call = Call(y, x, sizes=[G, F], shards=shards) if i % 2 == 0 else Call(
            dx, dy, y, sizes=[G, F], shards=shards
        )
        call.on_cpu(lab, kernel(softmax.ops[Cpu](), names[i]))
        call.on_gpu(lab, kernel(softmax.ops[OnGpu](), names[i]))
        lab.compare(String(t"{names[i]} {G} x {F}"), 1e-5)


def each_loss(q: Queue, G: Int, F: Int, odd: Bool) raises:
    """`odd`: with numbers that are none among the predictions."""
    var shards = 3
    var n = G * F * L
    var xs = n + 16
    var ls = G * L + 4
    var p = shards * xs
    var dx = 2 * p
    var dx2 = 3 * p
    var labels = 4 * p
    var stats = up(labels + shards * ls)
    var dloss = up(stats + shards * 5)
    var context = up(dloss + shards * 8)
    var lab = Lab(q, context + 32)
    for s in range(shards):
        for i in range(G * L):
            var label = Int32((i * 7 + s) % (F + 1) - 1)
            lab.ints(labels)[unsafe_offset=s * ls + i] = label
            if i % 3 == 0 and label >= 0:  # some predictions are right
                lab.host[s * xs + ((i // L) * F + Int(label)) * L + i % L] = 5
        lab.host[dloss + s * 8] = 1024
    if odd:
        lab.host[0] = nan[DType.float32]()
        lab.host[1] = inf[DType.float32]()
        lab.host[(F - 1) * L + 2] = nan[DType.float32]()
        for f in range(F):
            lab.host[f * L + 3] = 2  # all equal
            lab.host[f * L + 4] = -inf[DType.float32]()
    _ = put_context(lab, context, Shape(0, 96, 32))
    var name = String(t" {G} x {F}")
    var sizes: List[Int] = [G, F]
    var on_cpu = softmax.ops[Cpu]()
    var on_gpu = softmax.ops[OnGpu]()
    var of_x = Part(0, xs)
    var of_p = Part(p, xs)
    var of_dx = Part(dx, xs)
    var of_labels = Part(labels, ls)
    var of_stats = Part(stats, 5)
    var of_loss = Part(dloss, 8)
    var forward = Call(of_stats, of_p, of_x, of_labels, sizes=sizes, shards=shards)
    var backward = Call(of_dx, of_loss, of_p, of_labels, sizes=sizes, shards=shards)

    def fused(scaled: Int) raises {imm}:
        """Loss and gradient in one launch."""
        var call = Call(of_stats, Part(dx2, xs), of_x, of_labels, sizes=[G, F, scaled], shards=shards)
        call.context = context
        call.on_gpu(lab, kernel(softmax.fused[OnGpu](), "cross_entropy"))

    lab.upload()
    forward.on_cpu(lab, kernel(on_cpu, "cross_entropy_forward"))
    forward.on_gpu(lab, kernel(on_gpu, "cross_entropy_forward"))
    lab.compare("cross_entropy_forward" + name, 1e-5)

    lab.upload()  # both have the same p from here on
    backward.on_cpu(lab, kernel(on_cpu, "cross_entropy_backward"))
    backward.on_gpu(lab, kernel(on_gpu, "cross_entropy_backward"))
    lab.compare("cross_entropy_backward" + name)

    for s in range(shards):
        for i in range(n):
            lab.host[dx2 + s * xs + i] = lab.host[dx + s * xs + i]
    fused(1)
    lab.compare("cross_entropy" + name, 2e-3)  # times 1024
    for s in range(shards):
        for i in range(n):
            lab.host[dx2 + s * xs + i] /= 1024
    fused(0)
    lab.compare("cross_entropy, not scaled" + name, 1e-5)

    # The gradient in one launch is that of two, to the bit.
    forward.on_gpu(lab, kernel(on_gpu, "cross_entropy_forward"))
    backward.on_gpu(lab, kernel(on_gpu, "cross_entropy_backward"))
    fused(1)
    var got = List[Float32](length=lab.n, fill=0)
    q.enqueue_copy(got.unsafe_ptr(), lab.device)
    q.synchronize()
    for s in range(shards):
        for i in range(n):
            var one = got[dx2 + s * xs + i]
            var two = got[dx + s * xs + i]
            if not (one == two or (one != one and two != two)):
                raise Error(t"one launch {one}, two launches {two}")

    lab.upload()
    var nll = Call(of_stats, of_x, of_labels, sizes=sizes, shards=shards)
    var nll_backward = Call(of_dx, of_loss, of_labels, sizes=sizes, shards=shards)
    nll.on_cpu(lab, kernel(on_cpu, "nll_forward"))
    nll.on_gpu(lab, kernel(on_gpu, "nll_forward"))
    nll_backward.on_cpu(lab, kernel(on_cpu, "nll_backward"))
    nll_backward.on_gpu(lab, kernel(on_gpu, "nll_backward"))
    lab.compare("nll" + name, Float32(0) if G <= 2 else Float32(1e-5))


def test_softmax() raises:
    var q = Queue(device_id=0)
    each_softmax(q, 2, 10)
    each_softmax(q, 1, 1)
    each_softmax(q, 5, 33)
    each_softmax(q, 3, 100)


def test_losses() raises:
    var q = Queue(device_id=0)
    each_loss(q, 2, 10, False)
    each_loss(q, 2, 10, True)
    each_loss(q, 1, 3, False)
    each_loss(q, 11, 32, False)
    each_loss(q, 3, 100, True)


def add_tests(mut suite: TestSuite):
    """The tests of this file."""
    suite.test[test_softmax]()
    suite.test[test_losses]()
