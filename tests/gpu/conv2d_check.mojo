"""Checks the convolutions of mojo/kernels/gpu on the device there is, an emulated one in the suite.

Results against sums in float64, bits for different numbers of shards, and the fused op against the kernels for the CPU.
Not a measurement: the emulated device says nothing about time.

    conv2d_check            all cases
    conv2d_check NAME...    only these
"""

from std.memory import bitcast
from std.sys import CompilationTarget, argv, has_accelerator
from std.testing import assert_true

from max.gpu.host import DeviceBuffer

from kernels import conv2d as cpu
from kernels import conv2d_general as general
from kernels import pool
from kernels.gpu.conv2d import (
    conv2d_backward_input,
    conv2d_backward_weight,
    conv2d_backward_weight_scratch,
    conv2d_forward,
    conv2d_relu_maxpool_forward,
    conv2d_scratch,
)
from kernels.conv2d import Conv
from kernels.gpu.launch import BF16, FP16, FP32, Operand, Queue, TF32
from kernels.lanes import F32, LANES, Ptr
from kernels.op import Cpu
from numbers import Floats, GUARD, run_op

comptime Wide = SIMD[DType.float64, LANES]


struct Case(Copyable):
    var name: String
    var G: Int
    var C: Int
    var H: Int
    var W: Int
    var K: Int
    var R: Int
    var T: Int
    var S: Int
    var D: Int
    var groups: Int

    def __init__(
        out self,
        name: String,
        G: Int,
        C: Int,
        H: Int,
        W: Int,
        K: Int,
        R: Int,
        T: Int,
        S: Int,
        D: Int = 1,
        groups: Int = 1,
    ):
        self.name = name
        self.G = G
        self.C = C
        self.H = H
        self.W = W
        self.K = K
        self.R = R
        self.T = T
        self.S = S
        self.D = D
        self.groups = groups

    def P(self) -> Int:
        return (self.H - self.D * (self.R - 1) - 1) // self.S + 1

    def Q(self) -> Int:
        return (self.W - self.D * (self.T - 1) - 1) // self.S + 1

    def plain(self) -> Conv:
        return Conv(self.G, self.C, self.H, self.W, self.K, self.R, self.T, self.S)

    def size(self) -> general.General:
        var s = general.General(self.plain())
        s.D = self.D
        s.groups = self.groups
        return s

    def inputs(self) -> Int:
        return self.C // self.groups

    def x(self) -> Int:
        return self.G * self.C * self.H * self.W * LANES

    def y(self) -> Int:
        return self.G * self.K * self.P() * self.Q() * LANES

    def w(self) -> Int:
        return self.K * self.inputs() * self.R * self.T


# --- memory of the device --------------------------------------------------------------


@fieldwise_init
struct Remote(Movable):
    """Numbers on the device and what was copied there; guards included."""

    var host: Floats
    var buffer: DeviceBuffer[F32]

    def at(self, stride: Int = 0) -> Operand:
        return Operand(Int(self.buffer.unsafe_ptr()) + 4 * GUARD, stride)

    def fetch(mut self, q: Queue) raises:
        """Copies back, and fails if something was written outside."""
        var n = self.host.n + 2 * GUARD
        var staging = q.enqueue_create_host_buffer[F32](n)
        q.enqueue_copy(staging, self.buffer)
        q.synchronize()
        for i in range(n):
            self.host.start[unsafe_offset=i] = staging[i]
        self.host.check_guards()


def remote(q: Queue, var host: Floats) raises -> Remote:
    var n = host.n + 2 * GUARD
    var staging = q.enqueue_create_host_buffer[F32](n)
    var buffer = q.enqueue_create_buffer[F32](n)
    q.synchronize()
    for i in range(n):
        staging[i] = host.start[unsafe_offset=i]
    q.enqueue_copy(buffer, staging)
    q.synchronize()
    return Remote(host^, buffer^)


# --- sums in float64 ----------------------------------------------------------------------


def factor[precision: Int](v: Float32) -> Float64:
    """A factor of a product as this precision has it."""
    comptime if precision == BF16:
        return Float64(v.cast[DType.bfloat16]().cast[F32]())
    elif precision == FP16:
        return Float64(v.cast[DType.float16]().cast[F32]())
    elif precision == TF32:
        var bits = bitcast[DType.uint32](v)
        bits += 0xFFF + ((bits >> 13) & 1)
        return Float64(bitcast[F32](bits & ~UInt32(0x1FFF)))
    else:
        return Float64(v)


def factors[precision: Int](p: Ptr, i: Int) -> Wide:
    var v = Wide(0)
    comptime for l in range(LANES):
        v[l] = factor[precision](p[unsafe_offset=i + l])
    return v


def raw(p: Ptr, i: Int) -> Wide:
    return factors[FP32](p, i)


@fieldwise_init
struct Exact(Movable):
    """What the four results of one shard should be."""

    var y: List[Float64]
    var dx: List[Float64]
    var dw: List[Float64]
    var db: List[Float64]


def exact[precision: Int](c: Case, x: Ptr, w: Ptr, b: Ptr, dy: Ptr) -> Exact:
    """Every product of the forward sum hands dy to both its factors."""
    var y = List[Float64](length=c.y(), fill=0)
    var dx = List[Float64](length=c.x(), fill=0)
    var dw = List[Float64](length=c.w(), fill=0)
    var db = List[Float64](length=c.K, fill=0)
    var yp = y.unsafe_ptr()
    var dxp = dx.unsafe_ptr()
    for g in range(c.G):
        for k in range(c.K):
            for p in range(c.P()):
                for q in range(c.Q()):
                    var out = (((g * c.K + k) * c.P() + p) * c.Q() + q) * LANES
                    var sum = Wide(Float64(b[unsafe_offset=k]))
                    var d = factors[precision](dy, out)
                    db[k] += raw(dy, out).reduce_add()
                    var from_ = k // (c.K // c.groups) * c.inputs()
                    for ch in range(c.inputs()):
                        for r in range(c.R):
                            for t in range(c.T):
                                var wi = ((k * c.inputs() + ch) * c.R + r) * c.T + t
                                var h = p * c.S + r * c.D
                                var xi = (((g * c.C + from_ + ch) * c.H + h) * c.W + q * c.S + t * c.D) * LANES
                                var wv = factor[precision](w[unsafe_offset=wi])
                                var xv = factors[precision](x, xi)
                                sum += xv * wv
                                dw[wi] += (d * xv).reduce_add()
                                var to = dxp.unsafe_offset(xi)
                                to.unsafe_store(
                                    0,
                                    to.unsafe_load[width=LANES]() + d * wv,
                                )
                    yp.unsafe_store(out, sum)
    return Exact(y^, dx^, dw^, db^)


def check_close(what: String, got: Ptr, want: List[Float64], tolerance: Float64 = 1e-5) raises:
    var largest = Float64(0)
    var error = Float64(0)
    var at = 0
    for i in range(len(want)):
        largest = max(largest, abs(want[i]))
        var e = abs(Float64(got[unsafe_offset=i]) - want[i])
        if not (e <= error):
            error = e
            at = i
    assert_true(
        error <= tolerance * largest,
        String(
            what,
            ": element ",
            at,
            " of ",
            len(want),
            " is ",
            got[unsafe_offset=at],
            ", not ",
            want[at],
            "; the largest is ",
            largest,
        ),
    )


def check_same(what: String, a: Ptr, b: Ptr, n: Int) raises:
    for i in range(n):
        assert_true(
            bitcast[DType.uint32](a[unsafe_offset=i]) == bitcast[DType.uint32](b[unsafe_offset=i]),
            String(
                what,
                ": element ",
                i,
                " of ",
                n,
                " is ",
                a[unsafe_offset=i],
                " and ",
                b[unsafe_offset=i],
            ),
        )


# --- one case ----------------------------------------------------------------------------------


@fieldwise_init
struct Results(Movable):
    var y: Remote
    var dx: Remote
    var dw: Remote
    var db: Remote


def compute[
    precision: Int
](
    q: Queue,
    c: Case,
    shards: Int,
    fold: Int,
    x: Remote,
    x_step: Int,
    w: Remote,
    b: Remote,
    dy: Remote,
    first: Int = 0,
    accumulate: Bool = False,
) raises -> Results:
    """Runs forward and backward for `shards` shards from `first` on; what is added to begins with 1."""
    var start = Float32(1) if accumulate else Float32(77)
    var buffers = (shards + fold - 1) // fold
    var y = remote(q, Floats(shards * c.y(), 77))
    var dx = remote(q, Floats(shards * c.x(), 77))
    var dw = remote(q, Floats(buffers * c.w(), start))
    var db = remote(q, Floats(buffers * c.K, start))
    var n = max(conv2d_backward_weight_scratch(shards, fold, c.size()), conv2d_scratch(precision, c.size()))
    var scratch = remote(q, Floats(n, 55))
    var xo = x.at(x_step)
    var dyo = dy.at(c.y())
    xo.address += first * x_step * 4
    dyo.address += first * c.y() * 4
    conv2d_forward[precision, False](
        q,
        shards,
        y.at(c.y()),
        xo,
        w.at(),
        b.at(),
        c.size(),
        scratch.at().ptr(),
    )
    conv2d_backward_input[precision](
        q,
        shards,
        dx.at(c.x()),
        dyo,
        w.at(),
        c.size(),
        scratch.at().ptr(),
    )
    conv2d_backward_weight[precision](
        q,
        shards,
        fold,
        dw.at(c.w()),
        db.at(c.K),
        dyo,
        xo,
        scratch.at().ptr(),
        c.size(),
        accumulate,
    )
    y.fetch(q)
    dx.fetch(q)
    dw.fetch(q)
    db.fetch(q)
    scratch.fetch(q)
    return Results(y^, dx^, dw^, db^)


def check_values[precision: Int](q: Queue, c: Case, shards: Int) raises:
    """Against float64, all shards; x of the shards is a little apart."""
    var x_step = c.x() + 32
    var x = remote(q, Floats(shards * x_step, noise=1))
    var dy = remote(q, Floats(shards * c.y(), noise=2))
    var w = remote(q, Floats(c.w(), noise=3))
    var b = remote(q, Floats(c.K, noise=4))
    var got = compute[precision](q, c, shards, 1, x, x_step, w, b, dy)
    for s in range(shards):
        var want = exact[precision](
            c,
            x.host.p.unsafe_offset(s * x_step),
            w.host.p,
            b.host.p,
            dy.host.p.unsafe_offset(s * c.y()),
        )
        check_close("y", got.y.host.p.unsafe_offset(s * c.y()), want.y)
        check_close("dx", got.dx.host.p.unsafe_offset(s * c.x()), want.dx)
        check_close("dw", got.dw.host.p.unsafe_offset(s * c.w()), want.dw)
        check_close("db", got.db.host.p.unsafe_offset(s * c.K), want.db)
    comptime if precision == FP32 and (not CompilationTarget.is_x86() or CompilationTarget.has_fma()):
        if c.C >= 16 and c.K >= 32 and c.D * c.groups == 1:  # large layers have another order
            print(c.name, "precision", precision, "shards", shards, "ok")
            return
        # The forward sum is the chain of the CPU's kernel.
        var y = Floats(c.y())
        if c.D * c.groups > 1:
            general.forward[LANES](y.p, x.host.p, w.host.p, b.host.p, c.size())
        else:
            cpu.conv2d_forward[False](y.p, x.host.p, w.host.p, b.host.p, c.plain())
        check_same("y of the CPU", got.y.host.p, y.p, c.y())
    print(c.name, "precision", precision, "shards", shards, "ok")


def check_bits[precision: Int](q: Queue, c: Case) raises:
    """A shard's results do not depend on who is computed with it, and buffers have the sum along the tree."""
    comptime MOST = 8
    var x = remote(q, Floats(MOST * c.x(), noise=1))
    var dy = remote(q, Floats(MOST * c.y(), noise=2))
    var w = remote(q, Floats(c.w(), noise=3))
    var b = remote(q, Floats(c.K, noise=4))
    var y = Floats(MOST * c.y())
    var dx = Floats(MOST * c.x())
    var dw = Floats(MOST * c.w())
    var db = Floats(MOST * c.K)
    for s in range(MOST):
        var one = compute[precision](q, c, 1, 1, x, c.x(), w, b, dy, first=s)
        put(y.p.unsafe_offset(s * c.y()), one.y)
        put(dx.p.unsafe_offset(s * c.x()), one.dx)
        put(dw.p.unsafe_offset(s * c.w()), one.dw)
        put(db.p.unsafe_offset(s * c.K), one.db)
    var counts: List[Int] = [1, 2, 3, 5, 8]
    for shards in counts:
        for level in range(4):
            var fold = 1 << level
            if fold > 1 and fold >= 2 * shards:
                continue
            var accumulate = fold == 2 or fold == 8
            var many = compute[precision](
                q,
                c,
                shards,
                fold,
                x,
                c.x(),
                w,
                b,
                dy,
                accumulate=accumulate,
            )
            check_same("y", many.y.host.p, y.p, shards * c.y())
            check_same("dx", many.dx.host.p, dx.p, shards * c.x())
            for first in range(0, shards, fold):
                var held = min(fold, shards - first)
                var i = first // fold
                check_tree(
                    "dw",
                    many.dw.host.p.unsafe_offset(i * c.w()),
                    dw.p.unsafe_offset(first * c.w()),
                    held,
                    c.w(),
                    accumulate,
                )
                check_tree(
                    "db",
                    many.db.host.p.unsafe_offset(i * c.K),
                    db.p.unsafe_offset(first * c.K),
                    held,
                    c.K,
                    accumulate,
                )
    print(c.name, "precision", precision, "bits ok")


def put(to: Ptr, what: Remote):
    for i in range(what.host.n):
        to[unsafe_offset=i] = what.host.p[unsafe_offset=i]


def tree(p: Ptr, n: Int, stride: Int) -> Float32:
    """A node over n numbers splits after the largest power of two below n."""
    if n == 1:
        return p[]
    var left = 1
    while 2 * left < n:
        left *= 2
    return tree(p, left, stride) + tree(p.unsafe_offset(left * stride), n - left, stride)


def check_tree(what: String, got: Ptr, parts: Ptr, n: Int, size: Int, accumulate: Bool) raises:
    var want = Floats(size)
    for i in range(size):
        var sum = tree(parts.unsafe_offset(i), n, size)
        want.p[unsafe_offset=i] = 1 + sum if accumulate else sum
    check_same(what, got, want.p, size)


def check_pooled[precision: Int](q: Queue, c: Case, shards: Int, PR: Int, PT: Int, PS: Int) raises:
    """Conv + ReLU + max-pool in one launch, against the CPU's kernels one after the other: the same bits.

    With rounded factors against float64.
    """
    var PP = (c.P() - PR) // PS + 1
    var PQ = (c.Q() - PT) // PS + 1
    var n = c.G * c.K * PP * PQ * LANES
    var x = remote(q, Floats(shards * c.x(), noise=1))
    var w = remote(q, Floats(c.w(), noise=3))
    var b = remote(q, Floats(c.K, noise=4))
    var y = remote(q, Floats(shards * n, 77))
    var argmax = remote(q, Floats(shards * n // 4, 77))
    conv2d_relu_maxpool_forward[precision](
        q,
        shards,
        y.at(n),
        argmax.at(n // 4),
        x.at(c.x()),
        w.at(),
        b.at(),
        c.plain(),
        PR,
        PT,
        PS,
    )
    y.fetch(q)
    argmax.fetch(q)
    var x_low = Floats(c.x())
    var w_low = Floats(c.w())
    for i in range(c.w()):
        w_low.p[unsafe_offset=i] = Float32(factor[precision](w.host.p[unsafe_offset=i]))
    var full = Floats(c.y())
    var pooled = Floats(n)
    var places = Floats(n // 4)
    for s in range(shards):
        for i in range(c.x()):
            x_low.p[unsafe_offset=i] = Float32(factor[precision](x.host.p[unsafe_offset=s * c.x() + i]))
        cpu.conv2d_forward[True](
            full.p,
            x_low.p,
            w_low.p,
            b.host.p,
            c.plain(),
        )
        run_op(
            pool.ops[Cpu](),
            "maxpool_forward",
            False,
            [Int(pooled.p), Int(places.p), Int(full.p), c.G * c.K, c.P(), c.Q(), PR, PT, PS],
        )
        check_same("pooled y", y.host.p.unsafe_offset(s * n), pooled.p, n)
        check_same(
            "argmax",
            argmax.host.p.unsafe_offset(s * n // 4),
            places.p,
            n // 4,
        )
    print(c.name, "precision", precision, "pooled", PR, PT, PS, "ok")


def run() raises:
    var q = Queue(device_id=0)
    var names: List[String] = []
    for i in range(1, len(argv())):
        names.append(String(argv()[i]))

    def wanted(name: String) {imm} -> Bool:
        if len(names) == 0:
            return True
        for n in names:
            if n == name:
                return True
        return False

    var cases: List[Case] = [
        Case("lenet1", 2, 1, 32, 32, 6, 5, 5, 1),
        Case("lenet2", 2, 6, 14, 14, 16, 5, 5, 1),
        Case("convnet1", 1, 1, 18, 18, 32, 3, 3, 1),
        Case("convnet2", 1, 32, 10, 10, 64, 3, 3, 1),
        Case("1x1", 2, 5, 4, 7, 9, 1, 1, 1),
        Case("stride2", 1, 3, 11, 13, 5, 3, 3, 2),
        Case("oblong", 1, 3, 9, 11, 5, 2, 4, 1),
        Case("thin", 1, 2, 3, 4, 3, 3, 3, 1),
        Case("point", 1, 3, 5, 5, 5, 5, 5, 1),
        Case("seven", 1, 3, 13, 13, 8, 7, 7, 2),
        Case("strided", 1, 17, 13, 19, 34, 3, 3, 2),
        Case("gaps", 2, 18, 10, 17, 33, 1, 1, 2),
        Case("three", 1, 16, 16, 15, 9, 5, 4, 3),
        Case("uneven", 1, 3, 11, 10, 4, 2, 1, 3),
        Case("wide", 1, 20, 7, 9, 72, 3, 3, 1),
        Case("groups", 2, 6, 8, 10, 9, 3, 2, 1, 1, 3),
        Case("depthwise", 1, 7, 9, 11, 7, 3, 3, 1, 1, 7),
        Case("multiplier", 1, 3, 9, 8, 6, 3, 3, 2, 1, 3),
        Case("dilation", 1, 5, 12, 13, 6, 3, 3, 1, 2),
        Case("both", 2, 8, 12, 15, 20, 2, 3, 2, 3, 2),
        Case("stride over dilation", 1, 4, 15, 16, 6, 3, 4, 3, 2, 2),
        Case("common factor", 1, 2, 17, 14, 2, 3, 2, 4, 6, 2),
        Case("signal", 1, 6, 1, 40, 4, 1, 5, 2, 3, 2),
    ]
    for c in cases:
        if wanted(c.name):
            check_values[FP32](q, c, 2)
    var small: List[Case] = [
        Case("bits5", 1, 2, 8, 9, 6, 5, 5, 1),
        Case("bits3", 2, 3, 6, 10, 17, 3, 3, 1),
        Case("bits0", 1, 3, 7, 9, 5, 3, 2, 2),
        Case("bits of groups", 2, 6, 9, 8, 10, 3, 2, 2, 2, 2),
    ]
    for c in small:
        if wanted(c.name):
            check_bits[FP32](q, c)
    # Enough pixels for the large tiles; one shard of it has the small ones.
    if wanted("bits of a large layer"):
        check_bits[FP32](q, Case("bits of a large layer", 1, 17, 6, 6, 33, 3, 3, 1))
    var large = Case("large5", 2, 2, 24, 28, 12, 5, 5, 1)
    if wanted(large.name):
        check_values[FP32](q, large, 3)
        check_pooled[FP32](q, large, 3, 2, 2, 2)
    large = Case("large3", 1, 12, 12, 14, 72, 3, 3, 1)
    if wanted(large.name):
        check_values[FP32](q, large, 8)
        check_pooled[FP32](q, large, 8, 2, 2, 2)
    large = Case("large1", 2, 12, 12, 14, 40, 1, 1, 1)
    if wanted(large.name):
        check_values[FP32](q, large, 8)
    if wanted("pooled"):
        check_pooled[FP32](q, cases[0], 2, 2, 2, 2)
        check_pooled[FP32](q, cases[1], 1, 2, 2, 2)
        check_pooled[FP32](q, cases[5], 2, 3, 2, 1)
        check_pooled[FP32](q, cases[2], 1, 3, 3, 2)
        check_pooled[BF16](q, cases[1], 1, 2, 2, 2)
        check_pooled[FP16](q, cases[0], 1, 2, 2, 2)
        check_pooled[TF32](q, cases[2], 1, 2, 2, 2)
    if wanted("low"):
        for i in [0, 3, 4, 5, 10, 11, 12, 14]:
            ref c = cases[i]
            check_values[BF16](q, c, 1)
            check_values[FP16](q, c, 1)
            check_values[TF32](q, c, 1)
        check_values[BF16](q, Case("both", 1, 48, 6, 12, 96, 2, 3, 1, 2, 2), 1)
        check_bits[BF16](q, Case("bits3", 2, 6, 6, 10, 17, 3, 3, 1))
        check_bits[TF32](q, Case("bits3", 2, 6, 6, 10, 17, 3, 3, 1))
        check_bits[BF16](q, Case("one piece", 1, 9, 4, 6, 20, 3, 3, 1))
    if wanted("errors"):
        var refused = False
        try:
            var o = Operand(4096, 0)
            conv2d_backward_weight[FP32](
                q,
                16,
                16,
                o,
                o,
                o,
                o,
                o.ptr(),
                Conv(1, 1, 4, 4, 1, 3, 3, 1),
                False,
            )
        except e:
            refused = "at most 8" in String(e)
        assert_true(refused, "a fold of 16 is not refused")
    print("all ok")


def main() raises:
    comptime if has_accelerator():
        run()
    else:
        raise Error("built without a GPU: --target-accelerator sm_90")
