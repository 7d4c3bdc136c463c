"""The compression function of SHA-256 (FIPS 180-4, 6.2.2): whole blocks into a state. Messages are sha256.mojo's.

Two forms with the same result: a portable one of about 400 MB/s, and one with the instructions that most x86
processors since 2017 have for it (Intel, "Intel SHA Extensions", 2013), four to five times as fast. Which it is, is asked of
the processor that the program runs on, not of the one that it was compiled for.
"""

from std.bit import byte_swap
from std.memory import bitcast
from std.sys import CompilationTarget, inlined_assembly

from .bytes import Bytes

comptime BLOCK = 64
"""Bytes of a block."""
comptime State = SIMD[DType.uint32, 8]
"""What is carried from block to block: a to h."""

comptime _FOUR = SIMD[DType.uint32, 4]

# The first 32 bits of the fractions of the cube roots of the first 64 primes.
comptime _K: Array[UInt32, 64] = [
    0x428A2F98,
    0x71374491,
    0xB5C0FBCF,
    0xE9B5DBA5,
    0x3956C25B,
    0x59F111F1,
    0x923F82A4,
    0xAB1C5ED5,
    0xD807AA98,
    0x12835B01,
    0x243185BE,
    0x550C7DC3,
    0x72BE5D74,
    0x80DEB1FE,
    0x9BDC06A7,
    0xC19BF174,
    0xE49B69C1,
    0xEFBE4786,
    0x0FC19DC6,
    0x240CA1CC,
    0x2DE92C6F,
    0x4A7484AA,
    0x5CB0A9DC,
    0x76F988DA,
    0x983E5152,
    0xA831C66D,
    0xB00327C8,
    0xBF597FC7,
    0xC6E00BF3,
    0xD5A79147,
    0x06CA6351,
    0x14292967,
    0x27B70A85,
    0x2E1B2138,
    0x4D2C6DFC,
    0x53380D13,
    0x650A7354,
    0x766A0ABB,
    0x81C2C92E,
    0x92722C85,
    0xA2BFE8A1,
    0xA81A664B,
    0xC24B8B70,
    0xC76C51A3,
    0xD192E819,
    0xD6990624,
    0xF40E3585,
    0x106AA070,
    0x19A4C116,
    0x1E376C08,
    0x2748774C,
    0x34B0BCB5,
    0x391C0CB3,
    0x4ED8AA4A,
    0x5B9CCA4F,
    0x682E6FF3,
    0x748F82EE,
    0x78A5636F,
    0x84C87814,
    0x8CC70208,
    0x90BEFFFA,
    0xA4506CEB,
    0xBEF9A3F7,
    0xC67178F2,
]


def has_instructions() -> Bool:
    """Whether this processor has the instructions for SHA-256.

    Returns:
        True if it has; `absorb` may then be told so.
    """
    comptime if CompilationTarget.is_x86():
        return _cpuid_a() >= 7 and (_cpuid_7b() >> 29) & 1 == 1
    else:
        return False


def absorb(state: State, data: Bytes, fast: Bool) -> State:
    """The state after whole blocks.

    Args:
        state: Before them.
        data: The blocks; what is behind the last whole one is left out.
        fast: With the processor's own instructions, which it must have.

    Returns:
        The state.
    """
    comptime if CompilationTarget.is_x86():
        if fast:
            return _with_instructions(state, data)
    return _portable(state, data)


@always_inline
def _words(data: Bytes, block: Int) -> SIMD[DType.uint32, 16]:
    """The words of a block, which are big-endian."""
    var bytes = (
        data.unsafe_ptr()
        .unsafe_offset(BLOCK * block)
        .unsafe_load[width=BLOCK]()
    )
    return byte_swap(bitcast[DType.uint32, 16](bytes))


@always_inline
def _turned[n: UInt32](x: UInt32) -> UInt32:
    return (x >> n) | (x << (32 - n))


def _portable(var s: State, data: Bytes) -> State:
    for block in range(len(data) // BLOCK):
        var w = _words(data, block)
        var a = s[0]
        var b = s[1]
        var c = s[2]
        var d = s[3]
        var e = s[4]
        var f = s[5]
        var g = s[6]
        var h = s[7]
        comptime for i in range(64):
            comptime k = _K[i]
            comptime if i >= 16:
                var x = w[(i - 15) % 16]
                var y = w[(i - 2) % 16]
                w[i % 16] += (
                    w[(i - 7) % 16]
                    + (_turned[7](x) ^ _turned[18](x) ^ (x >> 3))
                    + (_turned[17](y) ^ _turned[19](y) ^ (y >> 10))
                )
            var t = (
                h
                + (_turned[6](e) ^ _turned[11](e) ^ _turned[25](e))
                + ((e & f) ^ (~e & g))
                + k
                + w[i % 16]
            )
            var u = (_turned[2](a) ^ _turned[13](a) ^ _turned[22](a)) + (
                (a & b) ^ (a & c) ^ (b & c)
            )
            h = g
            g = f
            f = e
            e = d + t
            d = c
            c = b
            b = a
            a = t + u
        s += State(a, b, c, d, e, f, g, h)
    return s


# --- x86 -----------------------------------------------------------------------------


@no_inline
def _cpuid_a() -> UInt32:
    """The highest leaf that CPUID knows."""
    return inlined_assembly[
        "xorl %eax, %eax; cpuid",
        UInt32,
        constraints="={eax},~{ebx},~{ecx},~{edx}",
    ]()


@no_inline
def _cpuid_7b() -> UInt32:
    """EBX of leaf 7: bit 29 says whether there are the instructions for SHA."""
    return inlined_assembly[
        "movl $$7, %eax; xorl %ecx, %ecx; cpuid",
        UInt32,
        constraints="={ebx},~{eax},~{ecx},~{edx}",
    ]()


@always_inline
def _two_rounds(cdgh: _FOUR, abef: _FOUR, wk: _FOUR) -> _FOUR:
    """The new (f, e, b, a) after two rounds; the old ones are then (h, g, d, c). `wk`: two words, constants added.
    """
    return inlined_assembly[
        "sha256rnds2 %xmm0, $3, $0",
        _FOUR,
        constraints="=x,0,{xmm0},x",
    ](cdgh, wk, abef)


@always_inline
def _first_part(x: _FOUR, y: _FOUR) -> _FOUR:
    """Of four new words: x plus the small sigma 0 of the words one later."""
    return inlined_assembly["sha256msg1 $2, $0", _FOUR, constraints="=x,0,x"](
        x, y
    )


@always_inline
def _second_part(x: _FOUR, y: _FOUR) -> _FOUR:
    """Of four new words: x plus the small sigma 1 of the words two before."""
    return inlined_assembly["sha256msg2 $2, $0", _FOUR, constraints="=x,0,x"](
        x, y
    )


def _with_instructions(s: State, data: Bytes) -> State:
    var abef = _FOUR(s[5], s[4], s[1], s[0])
    var cdgh = _FOUR(s[7], s[6], s[3], s[2])
    for block in range(len(data) // BLOCK):
        var at = data.unsafe_ptr().unsafe_offset(BLOCK * block)
        var w0 = _FOUR(0)  # of the last sixteen words, the oldest
        var w1 = _FOUR(0)
        var w2 = _FOUR(0)
        var w3 = _FOUR(0)
        var abef_before = abef
        var cdgh_before = cdgh
        comptime for i in range(16):
            var w: _FOUR
            comptime if i < 4:
                w = byte_swap(
                    bitcast[DType.uint32, 4](
                        at.unsafe_offset(16 * i).unsafe_load[width=16]()
                    )
                )
            else:
                w = _second_part(
                    _first_part(w0, w1) + w2.shuffle[1, 2, 3, 4](w3), w3
                )
            comptime a = _K[4 * i]
            comptime b = _K[4 * i + 1]
            comptime c = _K[4 * i + 2]
            comptime d = _K[4 * i + 3]
            var wk = w + _FOUR(a, b, c, d)
            cdgh = _two_rounds(cdgh, abef, wk)
            abef = _two_rounds(abef, cdgh, wk.shuffle[2, 3, 2, 3]())
            w0 = w1
            w1 = w2
            w2 = w3
            w3 = w
        abef += abef_before
        cdgh += cdgh_before
    return State(
        abef[3],
        abef[2],
        cdgh[3],
        cdgh[2],
        abef[1],
        abef[0],
        cdgh[1],
        cdgh[0],
    )
