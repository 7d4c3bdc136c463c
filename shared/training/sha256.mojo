"""SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): what checkpoints and data files are verified with.

What it is not: a defence against somebody who may write both the data and its digest.
"""

from .bytes import Bytes, untracked
from .sha256_blocks import BLOCK, State, absorb, has_instructions

# The first 32 bits of the fractions of the square roots of the first 8 primes.
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

    var _state: State
    var _rest: List[UInt8]  # fewer bytes than a block
    var _length: Int  # bytes so far
    var _fast: Bool  # with the processor's own instructions

    def __init__(out self):
        """The digest of nothing."""
        self._state = State(0)
        comptime for i in range(8):
            comptime start = _H[i]
            self._state[i] = start
        self._rest = List[UInt8](capacity=BLOCK)
        self._length = 0
        self._fast = has_instructions()

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
            at = min(BLOCK - len(self._rest), len(data))
            self._rest.extend(data[0:at])
            if len(self._rest) < BLOCK:
                return
            self._state = absorb(
                self._state, untracked(Span(self._rest)), self._fast
            )
            self._rest.clear()
        var whole = (len(data) - at) // BLOCK * BLOCK
        self._state = absorb(self._state, data[at : at + whole], self._fast)
        self._rest.extend(data[at + whole : len(data)])

    def digest(self) -> List[UInt8]:
        """The digest of what has come so far.

        Returns:
            32 bytes.
        """
        var end = self._rest.copy()
        end.append(0x80)
        while len(end) % BLOCK != BLOCK - 8:
            end.append(0)
        for i in range(8):
            end.append(UInt8((self._length * 8 >> (56 - 8 * i)) & 255))
        var state = absorb(self._state, untracked(Span(end)), self._fast)
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
    if len(padded) > BLOCK:
        var short = Sha256()
        short.update(key)
        padded = short.digest()
    while len(padded) < BLOCK:
        padded.append(0)
    var inner = Sha256()
    var outer = Sha256()
    for i in range(BLOCK):
        padded[i] ^= 0x36
    inner.update(Span(padded))
    inner.update(data)
    for i in range(BLOCK):
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
