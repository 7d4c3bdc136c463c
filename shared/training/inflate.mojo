"""Unpacks gzip: DEFLATE (RFC 1951) in its container (RFC 1952), with the checksum verified.

Written for data files: the whole file in memory, one member, a limit on what comes out. What it is not: a packer, or a
stream.
"""

from std.memory import unsafe_memcpy, unsafe_memset

from .bytes import Bytes, untracked

comptime MAX_INFLATION = 1032
"""Bytes that one byte can unpack to at most."""

comptime _BITS = 15  # of the longest code
comptime _SHORT = 10  # of the longest that is looked up: a table of 15 bits took longer to fill than all else here
comptime _TABLE = 1 << _SHORT

# Lengths and distances: the first of each code, and how many bits follow that are added to it.
comptime _LENGTH: Array[Int, 29] = [
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    13,
    15,
    17,
    19,
    23,
    27,
    31,
    35,
    43,
    51,
    59,
    67,
    83,
    99,
    115,
    131,
    163,
    195,
    227,
    258,
]
comptime _LENGTH_BITS: Array[Int, 29] = [
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    1,
    1,
    1,
    1,
    2,
    2,
    2,
    2,
    3,
    3,
    3,
    3,
    4,
    4,
    4,
    4,
    5,
    5,
    5,
    5,
    0,
]
comptime _DISTANCE: Array[Int, 30] = [
    1,
    2,
    3,
    4,
    5,
    7,
    9,
    13,
    17,
    25,
    33,
    49,
    65,
    97,
    129,
    193,
    257,
    385,
    513,
    769,
    1025,
    1537,
    2049,
    3073,
    4097,
    6145,
    8193,
    12289,
    16385,
    24577,
]
comptime _DISTANCE_BITS: Array[Int, 30] = [
    0,
    0,
    0,
    0,
    1,
    1,
    2,
    2,
    3,
    3,
    4,
    4,
    5,
    5,
    6,
    6,
    7,
    7,
    8,
    8,
    9,
    9,
    10,
    10,
    11,
    11,
    12,
    12,
    13,
    13,
]
comptime _ORDER: Array[Int, 19] = [
    16,
    17,
    18,
    0,
    8,
    7,
    9,
    6,
    10,
    5,
    11,
    4,
    12,
    3,
    13,
    2,
    14,
    1,
    15,
]


def gunzip(data: List[UInt8], limit: Int) raises -> List[UInt8]:
    """What a gzip file holds.

    Args:
        data: The file.
        limit: Bytes that may come out.

    Returns:
        The bytes.

    Raises:
        Error: it is damaged, has more than one member, or more comes out.
    """
    var start = _header(data)
    if len(data) < start + 8:
        raise Error("it ends early")
    var end = len(data) - 8
    var reader = _Bits(data, start, end)
    var out = List[UInt8](capacity=min(limit, (end - start) * 8))
    var last = False
    while not last:
        last = reader.take(1) == 1
        var kind = reader.take(2)
        if kind == 0:
            reader.stored(out, limit)
        elif kind == 1:
            _fixed(reader, out, limit)
        elif kind == 2:
            _dynamic(reader, out, limit)
        else:
            raise Error("a block is of no known kind")
    if reader.position() != end:
        raise Error("it does not end where its data do")
    if _word(data, end) != crc32(Span(out)):
        raise Error("its checksum is another")
    if _word(data, end + 4) != UInt32(len(out) & 0xFFFFFFFF):
        raise Error("its length is another")
    return out^


def crc32(data: Span[UInt8, _]) -> UInt32:
    """The checksum of gzip.

    Args:
        data: The bytes.

    Returns:
        The checksum.
    """
    return _crc32(untracked(data))


def _crc32(data: Bytes) -> UInt32:
    """Eight bytes at a time (Kounavis, Berry, "A Systematic Approach to Building High Performance Software-based CRC
    Generators", 2005): table k has what a byte does that k more follow.
    """
    var tables = List[UInt32](length=8 * 256, fill=0)
    for i in range(256):
        var c = UInt32(i)
        for _ in range(8):
            c = (c >> 1) ^ (0xEDB88320 & (0 - (c & 1)))
        tables[i] = c
    for i in range(7 * 256):
        var c = tables[i]
        tables[i + 256] = (c >> 8) ^ tables[Int(c & 255)]
    var t = tables.unsafe_ptr()
    var p = data.unsafe_ptr()
    var crc: UInt32 = 0xFFFFFFFF
    var at = 0
    while at + 8 <= len(data):
        var word = p.unsafe_offset(at).unsafe_bitcast[UInt64]()[] ^ UInt64(crc)
        crc = 0
        comptime for k in range(8):
            crc ^= t[
                unsafe_offset=256 * (7 - k) + Int((word >> UInt64(8 * k)) & 255)
            ]
        at += 8
    while at < len(data):
        crc = (crc >> 8) ^ t[
            unsafe_offset=Int((crc ^ UInt32(p[unsafe_offset=at])) & 255)
        ]
        at += 1
    _ = tables^
    return ~crc


struct _Bits(Movable):
    """Bits of a file, the lowest of each byte first; zeros behind its end, which are refused later.
    """

    var data: List[UInt8]
    var at: Int
    var end: Int
    var held: UInt64
    var count: Int  # of the bits in `held`

    def __init__(out self, data: List[UInt8], at: Int, end: Int):
        self.data = data.copy()
        self.at = at
        self.end = end
        self.held = 0
        self.count = 0

    @always_inline
    def fill(mut self):
        """At least 48 bits."""
        var p = self.data.unsafe_ptr()
        if self.at + 8 <= self.end:  # what does not fit is read again
            var word = p.unsafe_offset(self.at).unsafe_bitcast[UInt64]()[]
            var taken = (63 - self.count) >> 3
            self.held |= word << UInt64(self.count)
            self.at += taken
            self.count += 8 * taken
            return
        while self.count <= 56:
            var byte = UInt64(0)
            if self.at < self.end:
                byte = UInt64(p[unsafe_offset=self.at])
            self.at += 1
            self.held |= byte << UInt64(self.count)
            self.count += 8

    @always_inline
    def drop(mut self, n: Int):
        self.held >>= UInt64(n)
        self.count -= n

    @always_inline
    def take(mut self, n: Int) -> Int:
        """At most 16 bits."""
        if self.count < n:
            self.fill()
        var found = Int(self.held & ((UInt64(1) << UInt64(n)) - 1))
        self.drop(n)
        return found

    def position(self) -> Int:
        """The first byte of which no bit was taken."""
        return self.at - self.count // 8

    def stored(mut self, mut out: List[UInt8], limit: Int) raises:
        """A block as it is."""
        self.drop(self.count % 8)
        self.at = self.position()
        self.held = 0
        self.count = 0
        if self.at + 4 > self.end:
            raise Error("it ends early")
        var n = Int(self.data[self.at]) + 256 * Int(self.data[self.at + 1])
        var check = Int(self.data[self.at + 2]) + 256 * Int(
            self.data[self.at + 3]
        )
        self.at += 4
        if n + check != 65535 or self.at + n > self.end:
            raise Error("a block has another length than it says")
        if len(out) + n > limit:
            raise Error("more than ", limit, " bytes come out")
        out.extend(Span(self.data)[self.at : self.at + n])
        self.at += n


struct _Codes(Movable):
    """A Huffman code: a table of its short words by the next _SHORT bits, the others in order.
    """

    var table: List[
        UInt16
    ]  # symbol * 16 + length of its word; 0: a longer word or none
    var counts: List[Int]  # words of each length
    var symbols: List[UInt16]  # by length, then in order

    def __init__(out self, lengths: List[Int]) raises:
        self.counts = List[Int](length=_BITS + 1, fill=0)
        for n in lengths:
            self.counts[n] += 1
        self.counts[0] = 0
        var following = List[Int](length=_BITS + 2, fill=0)  # the next word
        var places = List[Int](length=_BITS + 2, fill=0)  # its place in order
        var left = 1
        for n in range(1, _BITS + 1):
            left = 2 * left - self.counts[n]
            if left < 0:
                raise Error("a code has too many words")
            following[n + 1] = (following[n] + self.counts[n]) << 1
            places[n + 1] = places[n] + self.counts[n]
        self.table = List[UInt16](length=_TABLE, fill=0)
        self.symbols = List[UInt16](length=len(lengths), fill=0)
        for symbol in range(len(lengths)):
            var n = lengths[symbol]
            if n == 0:
                continue
            var code = following[n]
            following[n] += 1
            self.symbols[places[n]] = UInt16(symbol)
            places[n] += 1
            if n > _SHORT:
                continue
            var turned = 0
            for i in range(n):
                turned |= ((code >> i) & 1) << (n - 1 - i)
            while turned < _TABLE:
                self.table[turned] = UInt16(symbol * 16 + n)
                turned += 1 << n

    @always_inline
    def next(self, mut reader: _Bits) raises -> Int:
        """The next symbol; `reader` holds 15 bits."""
        var entry = Int(
            self.table.unsafe_ptr()[
                unsafe_offset=Int(reader.held & (_TABLE - 1))
            ]
        )
        if entry == 0:
            return self._long(reader)
        reader.drop(entry & 15)
        return entry >> 4

    def _long(self, mut reader: _Bits) raises -> Int:
        """The same bit by bit: words of a length follow one another, behind twice the end of the shorter ones.
        """
        var code = 0
        var first = 0  # word of this length
        var before = 0  # words that are shorter
        for n in range(1, _BITS + 1):
            code |= Int(reader.held >> UInt64(n - 1)) & 1
            var count = self.counts[n]
            if code - first < count:
                reader.drop(n)
                return Int(self.symbols[before + code - first])
            before += count
            first = (first + count) << 1
            code <<= 1
        raise Error("there is no such code")


def _fixed(mut reader: _Bits, mut out: List[UInt8], limit: Int) raises:
    var lengths = List[Int](length=288, fill=8)
    for i in range(144, 256):
        lengths[i] = 9
    for i in range(256, 280):
        lengths[i] = 7
    _block(
        reader,
        out,
        limit,
        _Codes(lengths),
        _Codes(List[Int](length=30, fill=5)),
    )


def _dynamic(mut reader: _Bits, mut out: List[UInt8], limit: Int) raises:
    var symbols = reader.take(5) + 257
    var distances = reader.take(5) + 1
    var words = reader.take(4) + 4
    var order = materialize[_ORDER]()
    var lengths = List[Int](length=19, fill=0)
    for i in range(words):
        lengths[order[i]] = reader.take(3)
    var codes = _Codes(lengths)
    var all = List[Int]()
    while len(all) < symbols + distances:
        reader.fill()
        var symbol = codes.next(reader)
        if symbol < 16:
            all.append(symbol)
            continue
        var what = 0
        var n: Int
        if symbol == 16:
            if len(all) == 0:
                raise Error("a code repeats what was not there")
            what = all[len(all) - 1]
            n = 3 + reader.take(2)
        elif symbol == 17:
            n = 3 + reader.take(3)
        else:
            n = 11 + reader.take(7)
        for _ in range(n):
            all.append(what)
    if (
        len(all) > symbols + distances
        or symbols > 286
        or distances > 30
        or all[256] == 0
    ):
        raise Error("a block has a wrong code")
    _block(
        reader,
        out,
        limit,
        _Codes(List[Int](Span(all)[0:symbols])),
        _Codes(List[Int](Span(all)[symbols : symbols + distances])),
    )


def _block(
    mut reader: _Bits,
    mut out: List[UInt8],
    limit: Int,
    symbols: _Codes,
    distances: _Codes,
) raises:
    var length = materialize[_LENGTH]()
    var length_bits = materialize[_LENGTH_BITS]()
    var distance = materialize[_DISTANCE]()
    var distance_bits = materialize[_DISTANCE_BITS]()
    while True:
        reader.fill()
        if reader.at - reader.count // 8 > reader.end:
            raise Error("it ends early")
        var symbol = symbols.next(reader)
        if symbol < 256:
            if len(out) == limit:
                raise Error("more than ", limit, " bytes come out")
            out.append(UInt8(symbol))
            continue
        if symbol == 256:
            return
        symbol -= 257
        if symbol >= 29:
            raise Error("there is no such length")
        var n = length[symbol] + reader.take(length_bits[symbol])
        reader.fill()
        var word = distances.next(reader)
        if word >= 30:
            raise Error("there is no such distance")
        var back = distance[word] + reader.take(distance_bits[word])
        var have = len(out)
        if back > have:
            raise Error("it repeats what was not there")
        if have + n > limit:
            raise Error("more than ", limit, " bytes come out")
        out.resize(unsafe_uninit_length=have + n)
        var p = out.unsafe_ptr()
        if back == 1:
            unsafe_memset(p.unsafe_offset(have), p[unsafe_offset=have - 1], n)
            continue
        if back >= n:
            unsafe_memcpy(
                dest=p.unsafe_offset(have),
                src=untracked(Span(out))
                .unsafe_ptr()
                .unsafe_offset(have - back),
                count=n,
            )
            continue
        for i in range(n):  # one after the other: it may repeat itself
            p[unsafe_offset=have + i] = p[unsafe_offset=have + i - back]


def _header(data: List[UInt8]) raises -> Int:
    """Where the packed data of the only member begin."""
    if len(data) < 18 or data[0] != 0x1F or data[1] != 0x8B:
        raise Error("it is no gzip file")
    var flags = Int(data[3])
    if data[2] != 8 or flags & 0xE0:
        raise Error("it is packed in an unknown way")
    var at = 10
    if flags & 4:
        at += 2 + Int(data[10]) + 256 * Int(data[11])
    for flag in [8, 16]:  # a name, a comment: each ends with 0
        if flags & flag:
            while at < len(data) and data[at] != 0:
                at += 1
            at += 1
    if flags & 2:
        at += 2
    return at


def _word(data: List[UInt8], at: Int) -> UInt32:
    var word = UInt32(0)
    for i in range(4):
        word |= UInt32(data[at + i]) << UInt32(8 * i)
    return word
