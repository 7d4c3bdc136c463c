"""SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): what checkpoints and data files are verified with.

A portable form of about 400 MB/s on one core; no special instructions. What it is not: a defence against somebody who
may write both the data and its digest.
"""

from std.bit import byte_swap
from std.memory import bitcast

from .bytes import Bytes, untracked

comptime _WORDS = SIMD[DType.uint32, 16]
comptime _STATE = SIMD[DType.uint32, 8]
comptime _BLOCK = 64  # bytes

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
# The same of the square roots of the first 8.
comptime _H: Array[UInt32, 8] = [
    0x6A09E667,
    0xBB67AE85,
    0x3C6EF372,
    0xA54FF53A,
    0x510E527F,
    0x9B05688C,
    0x1F83D9AB,
    0x5BE0CD19,
]


struct Sha256(Copyable, Movable):
    """A digest that is being made: `update` as often as there is data, then `hex` or `digest`.
    """

    var _state: _STATE
    var _rest: List[UInt8]  # fewer bytes than a block
    var _length: Int  # bytes so far

    def __init__(out self):
        """The digest of nothing."""
        self._state = _STATE(0)
        comptime for i in range(8):
            comptime start = _H[i]
            self._state[i] = start
        self._rest = List[UInt8](capacity=_BLOCK)
        self._length = 0

    def update(mut self, data: Span[UInt8, _]):
        """Goes on over these bytes.

        Args:
            data: The bytes.
        """
        self._update(untracked(data))

    def _update(mut self, data: Bytes):
        self._length += len(data)
        var at = 0
        if len(self._rest):
            at = min(_BLOCK - len(self._rest), len(data))
            self._rest.extend(data[0:at])
            if len(self._rest) < _BLOCK:
                return
            self._state = _blocks(self._state, untracked(Span(self._rest)))
            self._rest.clear()
        var whole = (len(data) - at) // _BLOCK * _BLOCK
        self._state = _blocks(self._state, data[at : at + whole])
        self._rest.extend(data[at + whole : len(data)])

    def digest(self) -> List[UInt8]:
        """The digest of what has come so far.

        Returns:
            32 bytes.
        """
        var end = self._rest.copy()
        end.append(0x80)
        while len(end) % _BLOCK != _BLOCK - 8:
            end.append(0)
        for i in range(8):
            end.append(UInt8((self._length * 8 >> (56 - 8 * i)) & 255))
        var state = _blocks(self._state, untracked(Span(end)))
        _ = end^
        var out = List[UInt8](capacity=32)
        for i in range(8):
            for j in range(4):
                out.append(UInt8((state[i] >> UInt32(24 - 8 * j)) & 255))
        return out^

    def hex(self) -> String:
        """The digest of what has come so far, as text.

        Returns:
            64 characters of 0-9 a-f.
        """
        return to_hex(self.digest())


def sha256(data: Span[UInt8, _]) -> String:
    """The digest of some bytes.

    Args:
        data: The bytes.

    Returns:
        64 characters of 0-9 a-f.
    """
    return _sha256(untracked(data))


def _sha256(data: Bytes) -> String:
    var made = Sha256()
    made._update(data)
    return made.hex()


def hmac_sha256(key: Span[UInt8, _], data: Span[UInt8, _]) -> String:
    """The code that somebody with this key gives to some bytes.

    Args:
        key: The key.
        data: The bytes.

    Returns:
        64 characters of 0-9 a-f.
    """
    return _hmac(untracked(key), untracked(data))


def _hmac(key: Bytes, data: Bytes) -> String:
    var padded = List[UInt8](key)
    if len(padded) > _BLOCK:
        var short = Sha256()
        short.update(key)
        padded = short.digest()
    while len(padded) < _BLOCK:
        padded.append(0)
    var inner = Sha256()
    var outer = Sha256()
    for i in range(_BLOCK):
        padded[i] ^= 0x36
    inner.update(Span(padded))
    inner.update(data)
    for i in range(_BLOCK):
        padded[i] ^= 0x36 ^ 0x5C
    outer.update(Span(padded))
    outer.update(Span(inner.digest()))
    return outer.hex()


def to_hex(data: List[UInt8]) -> String:
    """Bytes as text.

    Args:
        data: The bytes.

    Returns:
        Two characters of 0-9 a-f for each.
    """
    var out = List[UInt8](capacity=2 * len(data))
    for byte in data:
        for four in [byte >> 4, byte & 15]:
            out.append(four + 48 if four < 10 else four + 87)
    return String(StringSpan(unsafe_from_utf8=Span(out)))


def same_digest(a: String, b: String) -> Bool:
    """Whether two digests are the same; takes as long whatever they differ in.

    Args:
        a: One.
        b: The other.

    Returns:
        True if they are.
    """
    if a.byte_length() != b.byte_length():
        return False
    var other: UInt8 = 0
    for i in range(a.byte_length()):
        other |= a.as_bytes()[i] ^ b.as_bytes()[i]
    return other == 0


@always_inline
def _turned[n: UInt32](x: UInt32) -> UInt32:
    return (x >> n) | (x << (32 - n))


def _blocks(var s: _STATE, data: Bytes) -> _STATE:
    """The state after whole blocks."""
    for block in range(len(data) // _BLOCK):
        var bytes = (
            data.unsafe_ptr()
            .unsafe_offset(_BLOCK * block)
            .unsafe_load[width=_BLOCK]()
        )
        var w = byte_swap(bitcast[DType.uint32, 16](bytes))
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
        s += _STATE(a, b, c, d, e, f, g, h)
    return s
