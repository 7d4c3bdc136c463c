"""How many float operations per second one core can do at best: independent fused multiply-adds in registers.

A program of its own, compiled and run by common.py for the "% of peak" columns. It touches no memory; it is no part of
the library and says nothing about how fast a kernel with loads and stores can be.

Prints one line: best and median GFLOP/s of all repetitions, and the lanes of one vector.
"""

from std.benchmark import keep
from std.sys import CompilationTarget, simd_width_of
from std.time import perf_counter_ns

comptime LANES = simd_width_of[DType.float32]()
comptime Vec = SIMD[DType.float32, LANES]
# More than latency times units; with `a`, they fit the registers: 32 of AVX-512 and NEON, 16 of AVX2.
comptime ACCUMULATORS = 12 if LANES == 8 else 16
comptime ROUNDS = 200_000
comptime REPETITIONS = 300


@always_inline
def madd(a: Vec, c: Vec) -> Vec:
    """Returns a c + a, as the kernels do it: an x86 processor without FMA instructions multiplies and adds.
    """
    comptime if CompilationTarget.is_x86() and not CompilationTarget.has_fma():
        return a * c + a
    else:
        return a.fma(c, a)


def once(a: Vec) -> Float64:
    """GFLOP/s of one repetition."""
    var acc = Array[Vec, ACCUMULATORS](fill=a)
    var start = perf_counter_ns()
    for _ in range(ROUNDS):
        comptime for k in range(ACCUMULATORS):
            acc[k] = madd(a, acc[k])
    var end = perf_counter_ns()
    var total = Vec(0)
    comptime for k in range(ACCUMULATORS):
        total += acc[k]
    keep(total)
    return Float64(2 * LANES * ACCUMULATORS * ROUNDS) / Float64(end - start)


def main():
    var a = Vec(0.5)
    keep(a)
    var rates = List[Float64]()
    _ = once(a)
    for _ in range(REPETITIONS):
        rates.append(once(a))
    sort(rates)
    print(rates[len(rates) - 1], rates[len(rates) // 2], LANES)
