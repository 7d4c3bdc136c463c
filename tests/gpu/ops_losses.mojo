"""Softmax, log-softmax and the losses. Part of the tests in ops.mojo."""

from std.testing import TestSuite
from std.utils.numerics import inf, nan
from kernels import softmax as cpu_softmax
from kernels.gpu import softmax as gpu_softmax
from kernels.gpu.launch import Queue
from kernels.lanes import LANES
from lab import Lab, Shape, put_context, up

comptime L = LANES


# --- losses ----------------------------------------------------------------------------------------------


def each_softmax(q: Queue, G: Int, F: Int) raises:
    var shards = 3
    var n = G * F * L
    var xs = n + 32
    var x = 0
    var y = shards * xs
    var dy = 2 * y
    var dx = 3 * y
    var lab = Lab(q, 4 * y)
    lab.host[x + 5] = 60  # large ones
    lab.host[x + 6] = -100
    for form in range(2):
        lab.upload()
        for s in range(shards):
            var px = lab.ptr(x + s * xs)
            var py = lab.ptr(y + s * xs)
            var pdy = lab.ptr(dy + s * xs)
            var pdx = lab.ptr(dx + s * xs)
            if form == 0:
                cpu_softmax.softmax_forward[L](py, px, G, F)
                cpu_softmax.softmax_backward[L](pdx, pdy, py, G, F)
            else:
                cpu_softmax.log_softmax_forward[L](py, px, G, F)
                cpu_softmax.log_softmax_backward[L](pdx, pdy, py, G, F)
        var ox = lab.op(x, xs)
        var oy = lab.op(y, xs)
        var ody = lab.op(dy, xs)
        var odx = lab.op(dx, xs)
        if form == 0:
            gpu_softmax.softmax_forward(q, shards, oy, ox, G, F)
            gpu_softmax.softmax_backward(q, shards, odx, ody, oy, G, F)
        else:
            gpu_softmax.log_softmax_forward(q, shards, oy, ox, G, F)
            gpu_softmax.log_softmax_backward(q, shards, odx, ody, oy, G, F)
        lab.compare(String(t"softmax {form} {G} x {F}"), 1e-5)


def each_loss(q: Queue, G: Int, F: Int, odd: Bool) raises:
    """`odd`: with numbers that are none among the predictions."""
    var shards = 3
    var n = G * F * L
    var xs = n + 16
    var ls = G * L + 3
    var x = 0
    var p = shards * xs
    var dx = 2 * p
    var dx2 = 3 * p
    var labels = 4 * p
    var stats = up(labels + shards * ls)
    var dloss = stats + shards * 5
    var context = up(dloss + shards * 3)
    var lab = Lab(q, context + 32)
    for s in range(shards):
        for i in range(G * L):
            var label = Int32((i * 7 + s) % (F + 1) - 1)
            lab.ints(labels)[unsafe_offset=s * ls + i] = label
            if i % 3 == 0 and label >= 0:  # some predictions are right
                lab.host[x + s * xs + ((i // L) * F + Int(label)) * L + i % L] = 5
        lab.host[dloss + s * 3] = 1024
    if odd:
        lab.host[x] = nan[DType.float32]()
        lab.host[x + 1] = inf[DType.float32]()
        lab.host[x + (F - 1) * L + 2] = nan[DType.float32]()
        for f in range(F):
            lab.host[x + f * L + 3] = 2  # all equal
            lab.host[x + f * L + 4] = -inf[DType.float32]()
    var ctx = put_context(lab, context, Shape(0, 96, 32))
    var name = String(t" {G} x {F}")
    var ox = lab.op(x, xs)
    var olabels = lab.op(labels, ls)
    var ostats = lab.op(stats, 5)
    var odloss = lab.op(dloss, 3)

    lab.upload()
    for s in range(shards):
        var px = lab.ptr(x + s * xs)
        var label = lab.ints(labels + s * ls)
        cpu_softmax.cross_entropy_forward[L](lab.ptr(stats + s * 5), lab.ptr(p + s * xs), px, label, G, F)
    gpu_softmax.cross_entropy_forward(q, shards, ostats, lab.op(p, xs), ox, olabels, G, F)
    lab.compare("cross_entropy_forward" + name, 1e-5)

    lab.upload()  # both have the same p from here on
    for s in range(shards):
        cpu_softmax.cross_entropy_backward[L](
            lab.ptr(dx + s * xs),
            lab.ptr(dloss + s * 3),
            lab.ptr(p + s * xs),
            lab.ints(labels + s * ls),
            G,
            F,
        )
    gpu_softmax.cross_entropy_backward(q, shards, lab.op(dx, xs), odloss, lab.op(p, xs), olabels, G, F)
    lab.compare("cross_entropy_backward" + name)

    for s in range(shards):
        for i in range(n):
            lab.host[dx2 + s * xs + i] = lab.host[dx + s * xs + i]
    gpu_softmax.cross_entropy(q, shards, ostats, lab.op(dx2, xs), ox, olabels, G, F, True, ctx)
    lab.compare("cross_entropy" + name, 2e-3)  # times 1024
    for s in range(shards):
        for i in range(n):
            lab.host[dx2 + s * xs + i] /= 1024
    gpu_softmax.cross_entropy(q, shards, ostats, lab.op(dx2, xs), ox, olabels, G, F, False, ctx)
    lab.compare("cross_entropy, not scaled" + name, 1e-5)

    # The gradient in one launch is that of two, to the bit.
    gpu_softmax.cross_entropy_forward(q, shards, ostats, lab.op(p, xs), ox, olabels, G, F)
    gpu_softmax.cross_entropy_backward(q, shards, lab.op(dx, xs), odloss, lab.op(p, xs), olabels, G, F)
    gpu_softmax.cross_entropy(q, shards, ostats, lab.op(dx2, xs), ox, olabels, G, F, True, ctx)
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
    for s in range(shards):
        var px = lab.ptr(x + s * xs)
        var label = lab.ints(labels + s * ls)
        cpu_softmax.nll_forward[L](lab.ptr(stats + s * 5), px, label, G, F)
        cpu_softmax.nll_backward[L](lab.ptr(dx + s * xs), lab.ptr(dloss + s * 3), label, G, F)
    gpu_softmax.nll_forward(q, shards, ostats, ox, olabels, G, F)
    gpu_softmax.nll_backward(q, shards, lab.op(dx, xs), odloss, olabels, G, F)
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
