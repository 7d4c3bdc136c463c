"""The layout all activations have, and the few names every kernel file uses.

An activation of N samples is stored in groups of LANES samples, one sample per vector lane:

    (G, features..., LANES)      G = ceil(N / LANES)

so a kernel never shuffles: a vector holds one feature of sixteen samples, weights are broadcast, and a tensor of any
spatial size vectorises without a tail. Lanes beyond N hold finite numbers whose gradients are zero. Parameters stay
row-major, as Python shows them. LANES is the same on every instruction set; on a narrower one a vector is two or four
registers.

A batch of a few samples would leave most lanes empty. It is kept in rows (N, features...), which is the same
layout with one lane: G = N, L = 1. Kernels that only walk over features are written once for any L; convolution and
linear layers have a second form that vectorises along the row (conv2d_rows.mojo, linear_rows.mojo).

Letters, in all kernel files:

    G  groups of samples            L  samples per group: LANES, or 1 for rows
    C  input channels, H W their height and width (padding included)
    K  output channels, P Q their height and width       (P = (H - R) / S + 1)
    R  kernel height, T kernel width, S stride
    I  input features of a linear layer, O output features
    F  features of a tensor whose shape does not matter

Arguments come in the order outputs, inputs, saved values, sizes. Gradients of parameters are added to (+=), so that
several uses of one parameter sum up; gradients of activations are written (=).
"""

from std.math import iota
from std.sys import CompilationTarget, is_gpu, masked_load, masked_store
from std.utils import IndexList

comptime F32 = DType.float32
comptime LANES = 16
comptime Vec = SIMD[F32, LANES]
comptime Ptr = Pointer[Float32, MutUntrackedOrigin]
comptime BytePtr = Pointer[UInt8, MutUntrackedOrigin]
comptime IntPtr = Pointer[Int32, MutUntrackedOrigin]
comptime LongPtr = Pointer[Int64, MutUntrackedOrigin]

# How many vectors of 16 floats the register file holds: the register tiles of conv2d and linear are cut to this.
# AVX-512: 32 registers of 16 floats. AVX2: 16 of 8, so 8 vectors. NEON: 32 of 4, so 8. SSE: 16 of 4, so 4.
comptime REGISTERS = 32 if CompilationTarget.has_avx512f() else (
    4 if CompilationTarget.is_x86() and not CompilationTarget.has_avx2() else 8
)


@always_inline
def load[L: Int = LANES](p: Ptr, i: Int) -> SIMD[F32, L]:
    """Loads the L floats at element offset `i`; on a GPU p + i must be a multiple of 4 L bytes."""
    return p.unsafe_offset(i).unsafe_load[width=L, alignment=4 * L if is_gpu() else 4]()


@always_inline
def store[L: Int = LANES](p: Ptr, i: Int, v: SIMD[F32, L]):
    """Stores L floats at element offset `i`, as `load`."""
    p.unsafe_offset(i).unsafe_store[alignment=4 * L if is_gpu() else 4](0, v)


@always_inline
def madd[dtype: DType, w: SIMDLength, //](a: SIMD[dtype, w], b: SIMD[dtype, w], c: SIMD[dtype, w]) -> SIMD[dtype, w]:
    """a b + c, rounded once where the processor can; without FMA instructions that would be a call per float."""
    comptime if CompilationTarget.is_x86() and not CompilationTarget.has_fma():
        return a * b + c
    else:
        return a.fma(b, c)


@always_inline
def first[L: Int = LANES](n: Int) -> SIMD[DType.bool, L]:
    """True in the first n lanes (all for n >= L, none for n <= 0)."""
    return iota[F32, L]().lt(Float32(n))


@always_inline
def load_first(p: Ptr, i: Int, n: Int) -> Vec:
    """Loads the first n of LANES floats; the others are 0 and their memory is not touched."""
    return masked_load[LANES](p.unsafe_offset(i), first(n), Vec(0))


@always_inline
def store_first(p: Ptr, i: Int, v: Vec, n: Int):
    """Stores the first n of LANES floats."""
    masked_store[LANES](v, p.unsafe_offset(i), first(n))


@always_inline
def load_part[whole: Bool, L: Int = LANES](p: Ptr, i: Int, n: Int) -> SIMD[F32, L]:
    """Loads L floats if `whole`, else the first n of them."""
    comptime if whole:
        return load[L](p, i)
    else:
        return masked_load[L](p.unsafe_offset(i), first[L](n), SIMD[F32, L](0))


@always_inline
def store_part[whole: Bool, L: Int = LANES](p: Ptr, i: Int, v: SIMD[F32, L], n: Int):
    """Stores L floats if `whole`, else the first n of them."""
    comptime if whole:
        store[L](p, i, v)
    else:
        masked_store[L](v, p.unsafe_offset(i), first[L](n))


@always_inline
def splat(p: Ptr, i: Int) -> Vec:
    """One float at element offset `i`, in every lane."""
    return Vec(p[unsafe_offset=i])


@always_inline
def in_tiles[B: def[size: Int](Int) -> None, //, most: Int](n: Int, body: B):
    """Calls body[size](i) for tiles that cover 0 to n - 1: as many of `most` as fit, then one of what is left."""
    var i = 0
    while i + most <= n:
        body[most](i)
        i += most
    comptime for size in range(1, most):
        if n - i == size:
            body[size](i)


@always_inline
def in_tiles_and_ones[B: def[size: Int](Int) -> None, //, most: Int](n: Int, body: B):
    """Likewise, where what is left is computed one by one."""
    var i = 0
    while i + most <= n:
        body[most](i)
        i += most
    while i < n:
        body[1](i)
        i += 1


def _half(w: Int, second: Int) -> IndexList[LANES]:
    """Of two vectors, the first or second half of each run of 2 w lanes."""
    var mask = IndexList[LANES]()
    for i in range(LANES):
        mask[i] = i // w * 2 * w + second * w + i % w
    return mask


@always_inline
def totals[n: Int](v: Array[Vec, n], y: Ptr):
    """Writes to y the reduce_add of each of n vectors, and zeros up to a multiple of LANES: the same additions, of
    sixteen vectors at once.
    """
    comptime for first in range(0, n, LANES):
        var a = Array[Vec, LANES](fill=Vec(0))
        comptime for i in range(min(n - first, LANES)):
            a[i] = v[first + i]
        comptime for level in range(4):
            comptime w = LANES >> (level + 1)
            comptime for i in range(w):
                var b = a[2 * i + 1]
                var halves = a[2 * i].shuffle[mask=_half(w, 0)](b)
                a[i] = halves + a[2 * i].shuffle[mask=_half(w, 1)](b)
        store(y, first, a[0])
