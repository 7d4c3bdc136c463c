"""How fast the kernels of linear layers and convolutions are, shape by shape, as shares of the FMA peak of the same moment.

    mojo build -I mojo benchmarks/products.mojo -o products    (products.py does it, with the options of the library)
    ./products [LINES...]     a line: linear:I:O:rows, conv:C:K:pixels:samples[:kernel:stride], bf16 in front, or winograd:...

One thread, lanes. A row is one shape: GFLOP/s and share of the peak of forward, gradient of the weights and gradient of the
input. Every figure is the best of several calls by processor time, the peak that of independent FMAs in turns with them, or
of products of bf16 pairs.
"""

from std.benchmark import keep
from std.ffi import c_int, external_call
from std.memory import Layout, alloc
from std.sys import argv

from kernels.conv2d import (
    Conv,
    conv2d_backward_input,
    conv2d_backward_weight,
    conv2d_forward,
)
from kernels.conv2d_bf16 import (
    conv2d_backward_input_bf16,
    conv2d_backward_weight_bf16,
    conv2d_forward_bf16,
)
from kernels.lanes import LANES, Ptr, Vec, madd
from kernels.linear import (
    WEIGHT_SCRATCH,
    columns_scratch,
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
)
from kernels.linear_bf16 import (
    linear_backward_input_bf16,
    linear_backward_weight_bf16,
    linear_forward_bf16,
)
from kernels.lowp import HAS_BF16, dot2, pair
from kernels.winograd import (
    scratch_floats,
    winograd_backward_input,
    winograd_forward,
)

comptime SUMS = 16
comptime ROUNDS = 20_000
comptime SECONDS = 0.15  # of each product, at least


def now() -> Int:
    """Nanoseconds of processor time of this thread: other programs take turns with it."""
    var time = Array[Int64, 2](fill=0)
    _ = external_call["clock_gettime", c_int](c_int(3), time.unsafe_ptr())
    return Int(time[0]) * 1_000_000_000 + Int(time[1])


def floats(n: Int) -> Ptr:
    """So many floats between -1 and 1, never freed."""
    var p = alloc(Layout[Float32](count=n + LANES)).unsafe_leak()
    var state = UInt32(n)
    for i in range(n):
        state = state * 1664525 + 1013904223
        p[unsafe_offset=i] = Float32(state >> 8) * Float32(2.0**-23) - 1
    return Ptr(unsafe_from_address=Int(p))


def peak[half: Bool]() -> Float64:
    """GFLOP/s of FMAs in registers, now; of bf16 pairs if `half`."""
    var a = Vec(0.5)
    keep(a)
    var acc = Array[Vec, SUMS](fill=a)
    var start = now()
    for _ in range(ROUNDS):
        comptime for k in range(SUMS):
            comptime if half:
                acc[k] = dot2(acc[k], pair(a, a), pair(a, a))
            else:
                acc[k] = madd(a, acc[k], a)
    var end = now()
    var total = Vec(0)
    comptime for k in range(SUMS):
        total += acc[k]
    keep(total)
    var flops = (4 if half else 2) * LANES * SUMS * ROUNDS
    return Float64(flops) / Float64(end - start)


def measured[F: def() -> None, //, half: Bool = False](f: F, flops: Int) -> String:
    """The best GFLOP/s of f and the share of the best peak in turns with it."""
    var best: Float64 = 0
    var most: Float64 = 0
    var begin = now()
    var calls = 0
    while calls < 7 or Float64(now() - begin) * 1e-9 < SECONDS:
        if calls % 4 == 0:
            most = max(most, peak[half]())
        var start = now()
        f()
        best = max(best, Float64(flops) / Float64(now() - start))
        calls += 1
    return String(Int(best), " ", Int(100 * best / most + 0.5))


def linear[half: Bool](I: Int, O: Int, rows: Int) -> String:
    """The three products of a linear layer."""
    var G = (rows + LANES - 1) // LANES
    var x = floats(G * LANES * I)
    var y = floats(G * LANES * O)
    var w = floats(O * I)
    var dw = floats(O * I)
    var b = floats(O)
    var packed = G * LANES * (I + O + LANES) if half else 0
    var scratch = floats(WEIGHT_SCRATCH + columns_scratch(G, O) + packed)
    var flops = 2 * G * LANES * I * O

    def forward() {imm}:
        comptime if half:
            linear_forward_bf16[False](y, x, w, b, scratch, G, I, O)
        else:
            linear_forward[False](y, x, w, b, G, I, O)

    def input() {imm}:
        comptime if half:
            linear_backward_input_bf16(x, y, w, scratch, G, I, O)
        else:
            linear_backward_input(x, y, w, scratch, G, I, O)

    def weight() {imm}:
        comptime if half:
            linear_backward_weight_bf16(dw, b, y, x, scratch, G, I, O)
        else:
            linear_backward_weight(dw, b, y, x, scratch, G, I, O, I)

    var line = measured[half](forward, flops)
    line += " " + measured[half](weight, flops)
    line += " " + measured[half](input, flops)
    for p in [x, y, w, dw, b, scratch]:
        p.unsafe_free()
    return line


def convolution[half: Bool](size: Conv, winograd: Bool) -> String:
    """Those of a convolution. `winograd`: GFLOP/s are those of a direct one that takes as long."""
    var x = floats(size.G * size.x() * LANES)
    var y = floats(size.G * size.y() * LANES)
    var w = floats(size.K * size.taps())
    var dw = floats(size.K * size.taps())
    var b = floats(size.K)
    var packed = (size.x() + size.y() + size.K * size.taps()) * 2 * LANES
    var scratch = floats(packed if half else scratch_floats(size))
    var flops = 2 * size.G * LANES * size.y() * size.taps()

    def forward() {imm}:
        if winograd:
            winograd_forward(y, x, w, b, scratch, size, 1, 1, False)
            return
        comptime if half:
            conv2d_forward_bf16[False](y, x, w, b, scratch, size)
        else:
            conv2d_forward[False](y, x, w, b, size)

    def input() {imm}:
        if winograd:
            winograd_backward_input(x, y, w, scratch, size, 1, 1)
            return
        comptime if half:
            conv2d_backward_input_bf16(x, y, w, scratch, size)
        else:
            conv2d_backward_input(x, y, w, size)

    def weight() {imm}:
        comptime if half:
            conv2d_backward_weight_bf16(dw, b, y, x, scratch, size)
        else:
            conv2d_backward_weight(dw, b, y, x, size)

    var line = measured[half](forward, flops)
    line += " " + measured[half](weight, flops)
    line += " " + measured[half](input, flops)
    for p in [x, y, w, dw, b, scratch]:
        p.unsafe_free()
    return line


def layer[half: Bool](kind: String, sizes: List[Int]) -> String:
    """The figures of one layer."""
    if kind == "linear":
        return linear[half](sizes[0], sizes[1], sizes[2])
    var R = sizes[4] if len(sizes) > 4 else 3
    var S = sizes[5] if len(sizes) > 5 else 1
    var G = (sizes[3] + LANES - 1) // LANES
    var side = sizes[2] + R // 2 * 2  # with a frame of zeros
    var size = Conv(G, sizes[0], side, side, sizes[1], R, R, S)
    return convolution[half](size, kind == "winograd")


def main() raises:
    var words = argv()
    for i in range(1, len(words)):
        var parts = String(words[i]).split(":")
        var kind = String(parts[0])
        var sizes = List[Int]()
        for p in range(1, len(parts)):
            sizes.append(Int(parts[p]))
        if kind.startswith("bf16-"):
            comptime if HAS_BF16:
                kind = "linear" if kind == "bf16-linear" else "conv"
                print(words[i], layer[True](kind, sizes))
        else:
            print(words[i], layer[False](kind, sizes))
