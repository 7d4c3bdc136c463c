"""Pools, padding, and the way into lanes and out of them. Part of the tests in ops.mojo."""

from std.testing import TestSuite
from std.utils.numerics import nan
from kernels import layout as cpu_layout
from kernels import pool
from kernels.gpu import layout as gpu_layout
from kernels.gpu.elementwise import OnGpu
from kernels.gpu.launch import Queue
from kernels.lanes import LANES
from kernels.op import Cpu
from lab import Call, Lab, Part, Shape, cpu_record, kernel, put_context, up

comptime L = LANES


# --- pools --------------------------------------------------------------------------------------


def each_pool(q: Queue, planes: Int, H: Int, W: Int, R: Int, T: Int, S: Int) raises:
    var shards = 3
    var P = (H - R) // S + 1
    var Q = (W - T) // S + 1
    var n = planes * H * W * L
    var m = planes * P * Q * L
    var xs = n + 16
    var ys = m + 32
    var x = 0
    var y = x + shards * xs
    var dx = y + shards * ys
    var dy = dx + shards * xs
    var argmax = dy + shards * ys
    var places = up(m // 4) + 16
    var lab = Lab(q, argmax + shards * places)
    for i in range(n):  # equal numbers; zeros where a ReLU was
        if i % 3 == 0:
            lab.host[x + i] = lab.host[x + i // 2]
        if i % 5 == 0:
            lab.host[x + i] = 0
    lab.host[x + 7] = nan[DType.float32]()
    lab.host[dy + 3] = -0.0
    var px = Part(x, xs)
    var py = Part(y, ys)
    var pdx = Part(dx, xs)
    var pdy = Part(dy, ys)
    var won = Part(argmax, places)
    var sizes: List[Int] = [planes, H, W, R, T, S, 0]

    def check(name: StaticString, call: Call) raises {mut lab, imm}:
        call.on_cpu(lab, kernel(pool.ops[Cpu](), name))
        call.on_gpu(lab, kernel(pool.ops[OnGpu](), name))
        lab.compare(String(t"{name} {planes} x {H} x {W}, {R} x {T}, {S}"))

    lab.upload()
    check("maxpool_forward", Call(py, won, px, sizes=sizes, shards=shards))
    for relu in range(2):
        sizes[6] = relu
        check("maxpool_backward", Call(pdx, pdy, won, py, sizes=sizes, shards=shards))
    lab.host[x + 7] = 1
    lab.upload()
    check("avgpool_forward", Call(py, px, sizes=sizes, shards=shards))
    check("avgpool_backward", Call(pdx, pdy, sizes=sizes, shards=shards))


def test_pools() raises:
    var q = Queue(device_id=0)
    each_pool(q, 3, 8, 6, 2, 2, 2)
    each_pool(q, 2, 7, 9, 2, 2, 2)
    each_pool(q, 2, 7, 8, 3, 2, 2)
    each_pool(q, 1, 6, 5, 3, 3, 1)
    each_pool(q, 2, 9, 7, 1, 2, 3)
    each_pool(q, 1, 4, 4, 4, 4, 4)


# --- layouts ----------------------------------------------------------------------------------------


def test_padding() raises:
    var q = Queue(device_id=0)
    var shards = 2
    var planes = 3
    for ph in [0, 2]:
        for pw in [0, 1]:
            var H = 4
            var W = 5
            var xs = planes * H * W * L + 16
            var ys = planes * (H + 2 * ph) * (W + 2 * pw) * L
            var x = 0
            var y = shards * xs
            var dx = y + shards * ys
            var lab = Lab(q, dx + shards * xs)
            lab.upload()
            for s in range(shards):
                cpu_layout.pad_forward[L](
                    lab.ptr(y + s * ys),
                    lab.ptr(x + s * xs),
                    planes,
                    H,
                    W,
                    ph,
                    pw,
                )
                cpu_layout.pad_backward[L](
                    lab.ptr(dx + s * xs),
                    lab.ptr(y + s * ys),
                    planes,
                    H,
                    W,
                    ph,
                    pw,
                )
            gpu_layout.pad_forward(
                q,
                shards,
                lab.op(y, ys),
                lab.op(x, xs),
                planes,
                H,
                W,
                ph,
                pw,
            )
            gpu_layout.pad_backward(
                q,
                shards,
                lab.op(dx, xs),
                lab.op(y, ys),
                planes,
                H,
                W,
                ph,
                pw,
            )
            lab.compare(String(t"padding {ph} {pw}"))


def test_rows() raises:
    var q = Queue(device_id=0)
    var shards = 2
    for N in [1, 16, 21]:
        for F in [1, 7, 40]:
            var xs = N * F + 3
            var ys = up(N) * F * L // L
            var x = 0
            var y = up(shards * xs)
            var z = y + shards * ys
            var lab = Lab(q, z + up(shards * xs))
            lab.upload()
            for s in range(shards):
                cpu_layout.pack_rows(lab.ptr(y + s * ys), lab.ptr(x + s * xs), N, F)
                cpu_layout.unpack_rows(lab.ptr(z + s * xs), lab.ptr(y + s * ys), N, F)
            gpu_layout.pack_rows(q, shards, lab.op(y, ys), lab.op(x, xs), N, F)
            gpu_layout.unpack_rows(q, shards, lab.op(z, xs), lab.op(y, ys), N, F)
            lab.compare(String(t"rows {N} x {F}"))


def test_input_and_labels() raises:
    """Full shards, a part of one, and shards without a sample; not from the first shard on."""
    var q = Queue(device_id=0)
    var shards = 4
    var G = 2
    comptime for bytes in range(2):
        for C in [1, 3]:
            for plane in [1, 14]:
                for samples in [128, 75, 65, 33, 7]:
                    var F = C * plane
                    var ys = G * F * L
                    var ls = G * L + 5
                    var y = 0
                    var labels = shards * ys
                    var images = up(labels + shards * ls)
                    var all_labels = up(images + 50 * F)
                    var arrays = up(all_labels + 50)
                    var rows = arrays + 16
                    var scale = rows + 2 * 128
                    var host_arrays = scale + 16
                    var context = host_arrays + 16
                    var lab = Lab(q, context + 32)
                    for i in range(50):
                        lab.ints(all_labels)[unsafe_offset=i] = Int32(i % 10)
                    lab.longs(arrays)[] = Int64(lab.there(all_labels))
                    lab.longs(host_arrays)[] = Int64(lab.address(all_labels))
                    for i in range(128):
                        lab.longs(rows)[unsafe_offset=i] = Int64(i * 7 % 50)
                    var shape = Shape(
                        first=32 if samples > 32 else 0,
                        samples=samples,
                        shard_size=32,
                    )
                    var ctx = put_context(
                        lab,
                        context,
                        shape,
                        images=images,
                        bytes=bytes,
                        arrays=arrays,
                        rows=rows,
                        scale=scale,
                        shift=scale + 8,
                    )
                    lab.upload()
                    for s in range(shards):
                        var r = cpu_record(
                            lab,
                            shape,
                            s,
                            images=images,
                            bytes=bytes,
                            arrays=host_arrays,
                            rows=rows,
                            scale=scale,
                            shift=scale + 8,
                        )
                        comptime if L == 1:
                            cpu_layout.input[cpu_layout._input_in_rows](lab.ptr(y + s * ys), G, F, C, r)
                        else:
                            cpu_layout.input[cpu_layout._input_in_lanes](lab.ptr(y + s * ys), G, F, C, r)
                        cpu_layout.array[L](lab.ints(labels + s * ls), G, 1, 1, 0, -1, r)
                    gpu_layout.input(q, shards, lab.op(y, ys), G, F, C, ctx)
                    gpu_layout.array(q, shards, lab.op(labels, ls), G, 1, 1, 0, -1, ctx)
                    lab.compare(String(t"input {C} x {plane}, {samples}"))


def add_tests(mut suite: TestSuite):
    """The tests of this file."""
    suite.test[test_pools]()
    suite.test[test_padding]()
    suite.test[test_rows]()
    suite.test[test_input_and_labels]()
