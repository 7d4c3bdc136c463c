"""A 64-bit fingerprint of floats by their bits, the same however they are cut into runs: a sum over words modulo 2^64.

Float i of an arena has the word w(i), its 32 bits, and the odd key

    key(i) = row(i / 32) * column(i mod 32)  mod 2^64

row and column are the numbers of two SplitMix64 generators (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), made odd. The fingerprint is the sum of key(i) w(i): multilinear hashing (Lemire, Kaser:
"Strongly universal string hashing is fast", 2014) with keys that are products, so the words of a column are multiplied
with a key of the row only and columns are put together once, at the end.

It is for finding errors, not attackers: a checkpoint has SHA-256.
"""

from std.math import iota

from .lanes import Ptr
from .layout import LongPtr

comptime U64 = DType.uint64
comptime ROW = 32  # words with one row key
comptime PAIRS = ROW // 2  # words are read two at a time
comptime LOW = UInt64(0xFFFFFFFF)
comptime GOLDEN = UInt64(0x9E3779B97F4A7C15)
comptime ROWS_SEED = UInt64(0x6F64797373657900)
comptime COLUMNS_SEED = UInt64(0x66696E6765727072)
comptime Words = SIMD[U64, PAIRS]


@always_inline
def odd_key[w: Int](seed: UInt64, i: SIMD[U64, w]) -> SIMD[U64, w]:
    """Number i of the SplitMix64 generator that starts at `seed`, made odd."""
    var z = i * GOLDEN + (seed + GOLDEN)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@always_inline
def _some(x: Ptr, n: Int, start: Int) -> UInt64:
    """The sum over n words that need not fill a row, one at a time."""
    var words = x.unsafe_bitcast[UInt32]()
    var sum = UInt64(0)
    for j in range(n):
        var i = start + j
        var key = odd_key[1](ROWS_SEED, UInt64(i // ROW)) * odd_key[1](COLUMNS_SEED, UInt64(i % ROW))
        sum += key * UInt64(words[unsafe_offset=j])
    return sum


def fingerprint(x: Ptr, n: Int, start: Int) -> UInt64:
    """The share of n floats at x, the first of which is number `start` of the whole."""
    var head = min(n, -start % ROW)
    var total = _some(x, head, start)
    var rows = (n - head) // ROW
    var first = (start + head) // ROW
    var pairs = x.unsafe_offset(head).unsafe_bitcast[UInt64]()
    var even = Words(0)
    var odd = Words(0)
    for r in range(rows):
        var row = Words(odd_key[1](ROWS_SEED, UInt64(first + r)))
        var two = pairs.unsafe_offset(r * PAIRS).unsafe_load[width=PAIRS, alignment=4]()
        even += row * (two & LOW)
        odd += row * (two >> 32)
    var column = iota[U64, PAIRS]() * 2
    even *= odd_key[PAIRS](COLUMNS_SEED, column)
    odd *= odd_key[PAIRS](COLUMNS_SEED, column + 1)
    total += even.reduce_add() + odd.reduce_add()
    var done = head + rows * ROW
    return total + _some(x.unsafe_offset(done), n - done, start + done)


def fingerprint_runs(runs: LongPtr, count: Int) -> UInt64:
    """The sum over runs, each (address, floats, number of the first)."""
    var sum = UInt64(0)
    for i in range(count):
        sum += fingerprint(
            Ptr(unsafe_from_address=Int(runs[unsafe_offset=3 * i])),
            Int(runs[unsafe_offset=3 * i + 1]),
            Int(runs[unsafe_offset=3 * i + 2]),
        )
    return sum
