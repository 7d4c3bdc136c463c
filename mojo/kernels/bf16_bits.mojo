"""float32 as bf16 and back, number by number, for what travels between ranks: the same bits on every processor."""

from .lanes import LANES, in_tiles_and_ones

comptime Words = Pointer[UInt32, MutUntrackedOrigin]
comptime Halves = Pointer[UInt16, MutUntrackedOrigin]


@always_inline
def _rounded[w: SIMDLength, //](bits: SIMD[DType.uint32, w]) -> SIMD[DType.uint16, w]:
    var top = bits >> 16
    var nearest = (bits + ((top & 1) + 0x7FFF)) >> 16
    return (bits & 0x7FFFFFFF).gt(0x7F800000).select(top | 0x7FC0, nearest).cast[DType.uint16]()


def narrow_bf16(y: Halves, x: Words, n: Int):
    """Rounds n floats to the nearest bf16, ties to even; NaN stays NaN."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        y.unsafe_store(i, _rounded(x.unsafe_offset(i).unsafe_load[width=w]()))

    in_tiles_and_ones[LANES](n, some)


def widen_bf16(y: Words, x: Halves, n: Int):
    """Makes n bf16 floats, exactly."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        y.unsafe_store(i, x.unsafe_offset(i).unsafe_load[width=w]().cast[DType.uint32]() << 16)

    in_tiles_and_ones[LANES](n, some)
