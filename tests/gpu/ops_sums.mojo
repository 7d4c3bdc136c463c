"""Reductions, optimizers and fingerprints. Part of the tests in ops.mojo."""

from std.memory import bitcast
from std.testing import TestSuite, assert_equal, assert_raises, assert_true
from std.utils.numerics import inf, nan
from kernels import fingerprint as cpu_fingerprint
from kernels import optimizer
from kernels import reduce as cpu_reduce
from kernels.gpu import elementwise as gpu
from kernels.gpu import fingerprint as gpu_fingerprint
from kernels.gpu import reduce as gpu_reduce
from kernels.gpu.elementwise import OnGpu
from kernels.gpu.launch import Queue
from kernels.lanes import LANES, Ptr
from kernels.op import Cpu
from lab import Call, Lab, Part, Shape, added, bits, cpu_record, kernel, launches, put_context, up

comptime L = LANES


# --- reductions ---------------------------------------------------------------------------------------------


def test_tree_sums() raises:
    var q = Queue(device_id=0)
    for n in [1, 2, 3, 7, 8, 9, 13, 16, 23, 64, 100]:
        for size in [16, 48]:
            for odd in [0, 1]:
                var stride = size + 16 - odd
                var table = up(n * stride + 32)
                var lab = Lab(q, table + 2 * n)
                lab.upload()
                gpu_reduce.tree_sum_strided(q, lab.dptr(odd), lab.dptr(odd), stride, n, size - odd)
                var sums = List[Float32](length=size, fill=0)
                for i in range(n):
                    lab.longs(table)[unsafe_offset=i] = Int64(lab.address(odd + i * stride))
                cpu_reduce.tree_sum(
                    Ptr(unsafe_from_address=Int(sums.unsafe_ptr())),
                    lab.longs(table),
                    n,
                    size,
                )
                for i in range(size - odd):
                    lab.host[odd + i] = sums[i]
                lab.compare(String(t"tree_sum_strided {n} x {size}"), 0, table, 2 * n)
    var lab = Lab(q, 64)
    with assert_raises(contains="[gpu] the sum of 8192 buffers"):
        gpu_reduce.tree_sum_strided(q, lab.dptr(0), lab.dptr(0), 16, 8192, 16)


def test_stats() raises:
    var q = Queue(device_id=0)
    for shards in [1, 3, 8, 21]:
        for fold in [1, 2, 4, 8, 16]:
            for accumulate in [False, True]:
                var totals = 0
                var loss = 3 * shards
                var stats = loss + 7 * shards
                var context = up(stats + 5 * shards)
                var lab = Lab(q, context + 32)
                var shape = Shape(64, 64 + 32 * (shards - 1) + 9, 32)
                var ctx = put_context(lab, context, shape)
                for s in range(shards):
                    lab.host[stats + 5 * s + 2] = Float32(s * 5 % 33)
                lab.upload()
                var b = 0
                while b * fold < shards:
                    var first = b * fold
                    var n = min(fold, shards - first)
                    var valid = Float32(0)
                    var right = Float32(0)
                    for s in range(first, first + n):
                        valid += Float32(shape.valid(s))
                        right += lab.host[stats + 5 * s + 2]
                    var sum = added(lab, loss + 7 * first, 7, n)
                    if not accumulate:
                        for i in range(3):
                            lab.host[totals + 3 * b + i] = 0
                    lab.host[totals + 3 * b] += sum
                    lab.host[totals + 3 * b + 1] += valid
                    lab.host[totals + 3 * b + 2] += right
                    b += 1
                gpu_reduce.stats(
                    q,
                    shards,
                    fold,
                    lab.op(totals, 3),
                    lab.op(loss, 7),
                    lab.op(stats, 5),
                    0,
                    ctx,
                    accumulate,
                )
                lab.compare(String(t"stats {shards} {fold}"))


def test_sum_lanes() raises:
    var q = Queue(device_id=0)
    var shards = 4
    for G in [1, 2, 5]:
        for F in [1, 10]:
            for N in [-1, 0, 3, 17]:
                var xs = G * F * L + 16
                var x = 0
                var dx = shards * xs
                var y = 2 * shards * xs
                var context = up(y + 3 * shards)
                var lab = Lab(q, context + 32)
                var shape = Shape(0, 16 * G * 2 + 5, 16 * G)
                var ctx = put_context(lab, context, shape)
                lab.upload()
                for s in range(shards):
                    var r = cpu_record(lab, shape, s)
                    cpu_reduce.sum_lanes[L](lab.ptr(y + 3 * s), lab.ptr(x + s * xs), N, G, F, r)
                gpu_reduce.sum_lanes(
                    q,
                    shards,
                    lab.op(y, 3),
                    lab.op(x, xs),
                    N,
                    G,
                    F,
                    ctx,
                )
                lab.compare(String(t"sum_lanes {N} {G} {F}"), 1e-4)
                lab.upload()
                for s in range(shards):
                    var r = cpu_record(lab, shape, s)
                    cpu_reduce.sum_lanes_backward[L](lab.ptr(dx + s * xs), lab.ptr(y + 3 * s), N, G, F, r)
                gpu_reduce.sum_lanes_backward(
                    q,
                    shards,
                    lab.op(dx, xs),
                    lab.op(y, 3),
                    N,
                    G,
                    F,
                    ctx,
                )
                lab.compare(String(t"sum_lanes_backward {N} {G} {F}"))


def each_flat(q: Queue, n: Int, first: Int) raises:
    """What has no order, over n floats: in one block, and in several."""
    var x = 16 + first
    var lab = Lab(q, x + up(n) + 16)
    var where_ = (n * 3) // 5

    @always_inline
    def look(name: String) raises {mut lab, imm}:
        lab.ints(8)[] = 1
        lab.host[x + n] = nan[DType.float32]()  # not to be read
        lab.upload()
        cpu_reduce.largest(lab.ptr(0), lab.ptr(x), n)
        gpu_reduce.largest(q, lab.dptr(0), lab.dptr(x), n)
        if not cpu_reduce.is_finite(lab.ptr(x), n):
            lab.ints(8)[] = 0
        gpu_reduce.finite(q, lab.dints(8), lab.dptr(x), n)
        lab.compare(String(t"{name} {n} {first}"))

    look("finite")
    lab.host[x + n - 1] = 100
    look("last is largest")
    lab.upload()
    cpu_reduce.fixed_squares(lab.longs(2), lab.ptr(x), n, 0.0078125)
    gpu_reduce.fixed_squares(q, lab.dlongs(2), lab.dints(0), lab.dptr(x), n)
    lab.compare(String(t"fixed_squares {n}"))
    # from the largest there can be in a unit to the smallest there is, and units from 2^-128 to 2^126
    for bits in [
        UInt32(0x3F7FFFFF),
        0x7F7FFFFF,
        0x7EFFFFFF,
        0x7E000000,
        0x00800000,
        0x007FFFFF,
    ]:
        var most = bitcast[DType.float32](bits)
        for i in range(n):
            lab.host[x + i] = most if i == 0 else lab.host[x + i - 1] * Float32(-0.7)
        lab.host[0] = most
        lab.upload()
        var exponent = Int(bits >> 23) - 126
        var unit = bitcast[DType.float32](
            UInt32(127 - exponent) << 23 if exponent < 127 else UInt32(1) << UInt32(149 - exponent)
        )
        cpu_reduce.fixed_squares(lab.longs(2), lab.ptr(x), n, unit)
        gpu_reduce.fixed_squares(q, lab.dlongs(2), lab.dints(0), lab.dptr(x), n)
        lab.compare(String(t"fixed_squares of at most {most}, {n}"))
    lab.host[x + where_] = -inf[DType.float32]()
    look("infinity")
    lab.host[x + where_] = 0
    lab.host[x + n - 1] = nan[DType.float32]()
    look("NaN")


def test_flat_reductions() raises:
    var q = Queue(device_id=0)
    for n in [1, 6, 300, 5000, 70001]:
        for first in [0, 1]:
            each_flat(q, n, first)


# --- optimizers and fingerprints --------------------------------------------------------------------------------


def each_optimizer(q: Queue, n: Int, m: Int) raises:
    """Arenas of n floats, of which a step has m: what lies behind stays as it is."""
    var w = 0
    var v = n
    var g = 2 * n
    var u = 3 * n
    var ok = 4 * n
    for form in range(6):
        var lab = Lab(q, 4 * n + 16)
        for i in range(n):
            lab.host[u + i] = abs(lab.host[u + i])
        lab.host[u] = 1e-40  # squares may be that small
        lab.ints(ok)[] = 0 if form == 5 else 1
        lab.host[ok + 1] = 96
        lab.upload()
        var states: List[Part] = [Part(w, 0), Part(v, 0)]
        var sizes: List[Int] = [m]
        if form < 3:
            for x in [Float32(0.05), Float32(0.9 if form else 0.0), 0.01]:
                sizes.append(bits(x))
            sizes.append(Int(form == 2))
        else:
            states.append(Part(u, 0))
            for x in [Float32(0.01), 0.9, 0.999, 1e-8, 0.01]:
                sizes.append(bits(x))
            sizes.append(Int(form == 4))
            sizes.append(bits(0.271))
            sizes.append(bits(0.003))
        var step = Call(sizes=sizes)
        step.operands = states.copy()
        step.operands.append(Part(g, 0))
        step.operands.append(Part(ok + 1, 0))
        step.flag = ok
        var name = StaticString("sgd") if form < 3 else "adam"
        if form < 5:
            step.on_cpu(lab, kernel(optimizer.ops[Cpu](), name))
        step.on_gpu(lab, kernel(optimizer.ops[OnGpu](), name))
        lab.compare(String(t"optimizer {form}, {m} of {n}"))


def each_update_in_pieces(q: Queue, ends: List[Int], launches_: Int) raises:
    """An arena of which every second piece does not decay; pieces that follow each other share launches."""
    var n = 0
    for end in ends:
        n = max(n, up(end))
    var ok = 4 * n
    var lab = Lab(q, 4 * n + 16)
    for i in range(n):
        lab.host[2 * n + i] = abs(lab.host[2 * n + i])
    lab.ints(ok)[] = 1
    lab.host[ok + 1] = 96
    lab.upload()
    var calls = List[Call]()
    for k in range(0, len(ends), 2):
        var a = ends[k]
        var sizes: List[Int] = [ends[k + 1] - a]
        for x in [Float32(0.01), 0.9, 0.999, 1e-8, Float32(0.01 if k % 4 == 0 else 0.0)]:
            sizes.append(bits(x))
        sizes.append(1)
        sizes.append(bits(0.271))
        sizes.append(bits(0.003))
        var operands = (Part(a, 0), Part(n + a, 0), Part(2 * n + a, 0), Part(3 * n + a, 0), Part(ok + 1, 0))
        var call = Call(operands[0], operands[1], operands[2], operands[3], operands[4], sizes=sizes)
        call.flag = ok
        call.on_cpu(lab, kernel(optimizer.ops[Cpu](), "adam"))
        calls.append(call.copy())
    assert_equal(launches(lab, calls, kernel(optimizer.ops[OnGpu](), "adam")), launches_)
    lab.compare(String(t"an update in {len(calls)} pieces"))


def test_updates_in_pieces() raises:
    var q = Queue(device_id=0)
    each_update_in_pieces(q, [0, 1500], 1)
    each_update_in_pieces(q, [0, 1500, 1500, 1507, 1510, 6000], 1)
    var many = List[Int]()
    for k in range(11):
        many.extend([(k * k + 1) * 37, (k * k + k + 2) * 37])
    each_update_in_pieces(q, many, 2)
    each_update_in_pieces(q, [0, 7, 100, 200, 50, 60], 1)  # not in order


def test_optimizers() raises:
    var q = Queue(device_id=0)
    each_optimizer(q, 16, 3)
    each_optimizer(q, 2064, 2064)
    each_optimizer(q, 1040, 1030)


def test_fingerprint() raises:
    var q = Queue(device_id=0)
    var lab = Lab(q, 70000)
    var table = 69000
    var cases = [
        [0, 1, 0],
        [1, 40, 31],
        [3, 5000, 17],
        [0, 66000, 0],
        [100, 0, 7],
        [5, 2048, 123456789],
    ]
    for count in range(1, len(cases) + 1):
        for i in range(count):
            lab.longs(table)[unsafe_offset=3 * i] = Int64(lab.address(cases[i][0]))
            lab.longs(table)[unsafe_offset=3 * i + 1] = Int64(cases[i][1])
            lab.longs(table)[unsafe_offset=3 * i + 2] = Int64(cases[i][2])
        var wanted = cpu_fingerprint.fingerprint_runs(lab.longs(table), count)
        var longest = 0
        for i in range(count):
            longest = max(longest, cases[i][1])
            lab.longs(table)[unsafe_offset=3 * i] = Int64(lab.there(cases[i][0]))
        for hint in [longest, 1]:  # a wrong hint makes it slow, not wrong
            var words = gpu_fingerprint.fingerprint_scratch(count, hint)
            assert_true(2 * words < 900)
            lab.upload()
            gpu_fingerprint.fingerprint(
                q,
                lab.dlongs(66800),
                lab.dlongs(67000),
                lab.dlongs(table),
                count,
                hint,
            )
            lab.longs(66800)[] = Int64(wanted)
            lab.compare(String(t"fingerprint of {count}"), 0, 67000, 2 * words)


def add_tests(mut suite: TestSuite):
    """The tests of this file."""
    suite.test[test_tree_sums]()
    suite.test[test_stats]()
    suite.test[test_sum_lanes]()
    suite.test[test_flat_reductions]()
    suite.test[test_optimizers]()
    suite.test[test_updates_in_pieces]()
    suite.test[test_fingerprint]()
