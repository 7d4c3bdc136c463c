"""How fast the kernels of linear layers and convolutions are, shape by shape, as shares of the FMA peak of the same moment.

    mojo build -I mojo benchmarks/products.mojo -o products    (products.py does it, with the options of the library)
    ./products [LINES...]                                       a line: linear:I:O:rows, conv:C:K:pixels:samples or winograd:...

One thread, lanes, float32. A row is one shape: GFLOP/s and share of the peak of forward, gradient of the input and gradient
of the weights. Every figure is the best of several calls by processor time, the peak that of independent FMAs in turns with them.
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
from kernels.lanes import LANES, Ptr, Vec, madd
from kernels.linear import (
    WEIGHT_SCRATCH,
    columns_scratch,
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
)
from kernels.winograd import (
    scratch_floats,
    winograd_backward_input,
    winograd_forward,
)

comptime SUMS = 16
comptime ROUNDS = 20_000
comptime SECONDS = 0.15  # of each product, at least


def now() -> Int:
    """Nanoseconds of processor time of this thread: other programs take turns with it.
    """
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


def peak() -> Float64:
    """GFLOP/s of FMAs in registers, now."""
    var a = Vec(0.5)
    keep(a)
    var acc = Array[Vec, SUMS](fill=a)
    var start = now()
    for _ in range(ROUNDS):
        comptime for k in range(SUMS):
            acc[k] = madd(a, acc[k], a)
    var end = now()
    var total = Vec(0)
    comptime for k in range(SUMS):
        total += acc[k]
    keep(total)
    return Float64(2 * LANES * SUMS * ROUNDS) / Float64(end - start)


def measured[F: def() -> None](f: F, flops: Int) -> String:
    """The best GFLOP/s of f and the share of the best peak in turns with it."""
    var best: Float64 = 0
    var most: Float64 = 0
    var begin = now()
    var calls = 0
    while calls < 7 or Float64(now() - begin) * 1e-9 < SECONDS:
        if calls % 4 == 0:
            most = max(most, peak())
        var start = now()
        f()
        best = max(best, Float64(flops) / Float64(now() - start))
        calls += 1
    return String(Int(best), " ", Int(100 * best / most + 0.5))


def linear(I: Int, O: Int, rows: Int) -> String:
    """The three products of a linear layer."""
    var G = (rows + LANES - 1) // LANES
    var x = floats(G * LANES * I)
    var y = floats(G * LANES * O)
    var w = floats(O * I)
    var dw = floats(O * I)
    var b = floats(O)
    var scratch = floats(WEIGHT_SCRATCH + columns_scratch(G, O))
    var flops = 2 * G * LANES * I * O

    def forward() {imm}:
        linear_forward[False](y, x, w, b, G, I, O)

    def input() {imm}:
        linear_backward_input(x, y, w, scratch, G, I, O)

    def weight() {imm}:
        linear_backward_weight(dw, b, y, x, scratch, G, I, O, I)

    var line = measured(forward, flops)
    line += " " + measured(weight, flops)
    line += " " + measured(input, flops)
    for p in [x, y, w, dw, b, scratch]:
        p.unsafe_free()
    return line


def convolution(
    C: Int, K: Int, pixels: Int, samples: Int, winograd: Bool
) -> String:
    """Those of a convolution of 3 x 3, stride 1, on so many pixels squared and a frame of zeros. `winograd`: GFLOP/s are
    those of a direct one that takes as long.
    """
    var G = (samples + LANES - 1) // LANES
    var size = Conv(G, C, pixels + 2, pixels + 2, K, 3, 3, 1)
    var x = floats(G * size.x() * LANES)
    var y = floats(G * size.y() * LANES)
    var w = floats(K * size.taps())
    var dw = floats(K * size.taps())
    var b = floats(K)
    var m = 4 if pixels >= 16 else 2  # as products.py has it
    var scratch = floats(scratch_floats(size, m))
    var flops = 2 * G * LANES * size.y() * size.C * 9

    def forward() {imm}:
        if winograd:
            winograd_forward(y, x, w, b, scratch, size, 1, 1, m, False)
        else:
            conv2d_forward[False](y, x, w, b, size)

    def input() {imm}:
        if winograd:
            winograd_backward_input(x, y, w, scratch, size, 1, 1, m)
        else:
            conv2d_backward_input(x, y, w, size)

    def weight() {imm}:
        conv2d_backward_weight(dw, b, y, x, size)

    var line = measured(forward, flops)
    line += " " + measured(weight, flops)
    line += " " + measured(input, flops)
    for p in [x, y, w, dw, b, scratch]:
        p.unsafe_free()
    return line


def main() raises:
    var words = argv()
    for i in range(1, len(words)):
        var parts = String(words[i]).split(":")
        var a = Int(parts[1])
        var b = Int(parts[2])
        if parts[0] == "linear":
            print(words[i], linear(a, b, Int(parts[3])))
        else:
            var winograd = parts[0] == "winograd"
            print(
                words[i],
                convolution(a, b, Int(parts[3]), Int(parts[4]), winograd),
            )
