"""How many float operations per second one core can do at best: independent fused multiply-adds in registers, and
the same with products of bf16 pairs (`vdpbf16ps`) where the target has them.

A program of its own, compiled and run by common.py for the "% of peak" columns, on one core and on several at once. It
touches no memory; it is no part of the library and says nothing about how fast a kernel with loads and stores can be.

Prints one line: the median GFLOP/s of all repetitions, and the median with bf16 products (0 without the instruction).
The two kinds take turns. Times are processor times of the thread, so other programs on the core do not count.
"""

from std.benchmark import keep
from std.ffi import c_int, external_call
from std.sys import CompilationTarget, llvm_intrinsic, simd_width_of

comptime LANES = simd_width_of[DType.float32]()
comptime Vec = SIMD[DType.float32, LANES]
# More than latency times units; with `a`, they fit the registers: 32 of AVX-512 and NEON, 16 of AVX2.
comptime ACCUMULATORS = 12 if LANES == 8 else 16
comptime BF16 = DType.bfloat16
comptime HAS_BF16 = CompilationTarget._has_feature["avx512bf16"]()
comptime ROUNDS = 200_000
comptime REPETITIONS = 300


@always_inline
def madd(a: Vec, c: Vec) -> Vec:
    """Returns a c + a, as the kernels do it: an x86 processor without FMA instructions multiplies and adds."""
    comptime if CompilationTarget.is_x86() and not CompilationTarget.has_fma():
        return a * c + a
    else:
        return a.fma(c, a)


def now() -> Int:
    """Nanoseconds of processor time of this thread."""
    var time = Array[Int64, 2](fill=0)
    comptime CLOCK_THREAD_CPUTIME_ID = 16 if CompilationTarget.is_macos() else 3
    _ = external_call["clock_gettime", c_int](c_int(CLOCK_THREAD_CPUTIME_ID), time.unsafe_ptr())
    return Int(time[0]) * 1_000_000_000 + Int(time[1])


def once(a: Vec) -> Float64:
    """GFLOP/s of one repetition."""
    var acc = Array[Vec, ACCUMULATORS](fill=a)
    var start = now()
    for _ in range(ROUNDS):
        comptime for k in range(ACCUMULATORS):
            acc[k] = madd(a, acc[k])
    var end = now()
    var total = Vec(0)
    comptime for k in range(ACCUMULATORS):
        total += acc[k]
    keep(total)
    return Float64(2 * LANES * ACCUMULATORS * ROUNDS) / Float64(end - start)


def once_bf16(a: SIMD[BF16, 32]) -> Float64:
    """GFLOP/s of one repetition with bf16 products: 32 multiplications and 32 additions per instruction."""
    var acc = Array[SIMD[DType.float32, 16], ACCUMULATORS](fill=0)
    var start = now()
    for _ in range(ROUNDS):
        comptime for k in range(ACCUMULATORS):
            acc[k] = llvm_intrinsic[
                "llvm.x86.avx512bf16.dpbf16ps.512",
                SIMD[DType.float32, 16],
                has_side_effect=False,
            ](acc[k], a, a)
    var end = now()
    var total = SIMD[DType.float32, 16](0)
    comptime for k in range(ACCUMULATORS):
        total += acc[k]
    keep(total)
    return Float64(64 * ACCUMULATORS * ROUNDS) / Float64(end - start)


def main():
    var a = Vec(0.5)
    keep(a)
    var rates = List[Float64]()
    var bf16 = List[Float64]()
    _ = once(a)
    for _ in range(REPETITIONS):
        rates.append(once(a))
        comptime if HAS_BF16:
            var b = SIMD[BF16, 32](0.5)
            keep(b)
            bf16.append(once_bf16(b))
        else:
            bf16.append(0)
    sort(rates)
    sort(bf16)
    print(rates[REPETITIONS // 2], bf16[REPETITIONS // 2])
