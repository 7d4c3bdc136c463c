"""Attention's products of bf16 by AMX (amx.mojo), for attention.mojo, whose letters these are; softmax stays float32.

A group of tokens is a vector of a tile of sums: scores are 16 keys by 16 queries, y and all gradients 16 features by 16
tokens, as they lie in memory. What is summed is cut at multiples of 32 features, keys or queries of the sequence,
wherever the blocks are, and what is not seen or not there is 0, which changes nothing. So a token has the same bits
beside any others, and with keys computed in another call; but padding between tokens moves those behind it into other
tiles.
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.sys import prefetch

from .amx import SUMS, TILE, load_tile, multiply, store_tile, tiles_of, vectors_of, zero_tile
from .attention_tiles import Attention, BLOCK, keys_of
from .lanes import LANES, Ptr, Vec, in_tiles, load, load_first
from .layout import transpose
from .lowp import HalfPtr, halves, pair, store_pair, words
from .panels import Panel

comptime Words = SIMD[DType.uint32, LANES]
# Blocks of queries that are added to dk and dv together: these are read and written once for all of them, and what is
# added, 4 KiB for a block of keys and of queries, stays in the second-level cache.
comptime TOGETHER = 4
# Keys of a block of the backward pass, whose p and ds nearly fill a first-level cache of 48 KiB. AMX waits when it has
# not multiplied for a while: of blocks of 32 the first product of each took a tenth of the time.
comptime KEYS = 128


@always_inline
def _add_products[
    nb: Int, adds: Bool
](
    c: Ptr,
    c_vector: Int,  # floats from 16 rows to the next
    c_group: Int,
    c_row: Int,
    a: HalfPtr,  # tiles: a_vector from 16 rows to the next, a_sum along the sum
    a_vector: Int,
    a_sum: Int,
    b: HalfPtr,
    b_group: Int,
    b_sum: Int,
    vectors: Int,
    tiles: Int,
):
    """Sums `tiles` products of A and B for each of some vectors of rows and of nb groups; added to what is there if
    `adds`.
    """

    @always_inline
    def block[mb: Int](v: Int) {imm}:
        comptime for m in range(mb):
            comptime for n in range(nb):
                comptime if adds:
                    load_tile[m * nb + n](c.unsafe_offset((v + m) * c_vector + n * c_group), 4 * c_row)
                else:
                    zero_tile[m * nb + n]()
        for t in range(tiles):
            comptime for n in range(nb):
                load_tile[4 + n](b.unsafe_offset((n * b_group + t * b_sum) * TILE))
            comptime for m in range(mb):
                comptime A = 4 + nb + m % (4 - nb)
                load_tile[A](a.unsafe_offset(((v + m) * a_vector + t * a_sum) * TILE))
                comptime for n in range(nb):
                    multiply[m * nb + n, A, 4 + n]()
        comptime for m in range(mb):
            comptime for n in range(nb):
                store_tile[m * nb + n](c.unsafe_offset((v + m) * c_vector + n * c_group), 4 * c_row)

    in_tiles[4 // nb](vectors, block)


# --- packing ----------------------------------------------------------------------------------------------------------


@always_inline
def _pack_pairs[turned: Bool](y: HalfPtr, x: Ptr, row: Int, F: Int, ahead: Int = 0):
    """Tiles of pairs of the F rows of x, `row` floats apart, by lanes; if `turned` of lanes by rows.

    Then the rows `ahead` floats behind are fetched.
    """

    @always_inline
    def tile[whole: Bool](t: Int) {imm}:
        @always_inline
        def vector(f: Int) {imm} -> Vec:
            comptime if turned:
                prefetch(x.unsafe_offset(f * row + ahead))
            return load(x, f * row) if whole or f < F else Vec(0)

        var a = Array[Words, LANES](fill=0)
        comptime for j in range(LANES):
            var f = 2 * (t * LANES + j)
            a[j] = words(pair(vector(f), vector(f + 1)))
        comptime if turned:
            transpose(a)
        var to = y.unsafe_offset(t * TILE).unsafe_bitcast[UInt32]()
        comptime for j in range(LANES):
            to.unsafe_store(j * LANES, a[j])

    for t in range(F // (2 * LANES)):
        tile[True](t)
    if F % (2 * LANES):
        tile[False](F // (2 * LANES))


def _pack_tokens(y: HalfPtr, x: Panel, g: Int, tokens: Int, D: Int):
    """Tiles of features by the 32 tokens from group g on; zeros from token `tokens` of the sequence on."""
    var first = tokens - g * LANES
    for d in range(vectors_of(D) * LANES):
        var v = SIMD[DType.float32, 2 * LANES](0)
        if d < D:
            var high = Vec(0)
            if first > LANES:
                high = load_first(x.group(g + 1), d * LANES, first - LANES)
            v = load_first(x.group(g), d * LANES, first).join(high)
        store_pair(y, d, halves(v))


@always_inline
def _pack_queries[gb: Int](y: HalfPtr, x: Ptr):
    """The tile of pairs of queries by keys of a group of keys: x is (keys, gb, L of queries)."""
    var a = Array[Words, LANES](fill=0)
    comptime for j in range(LANES):
        comptime if gb == 2:
            a[j] = words(halves(load[2 * LANES](x, j * gb * LANES)))
        else:
            a[j] = words(halves(load(x, j * LANES).join(Vec(0))))
    transpose(a)
    comptime for j in range(LANES):
        y.unsafe_bitcast[UInt32]().unsafe_store(j * LANES, a[j])


@fieldwise_init
struct Tiles(TrivialRegisterPassable):
    """Room for a head of a sequence in tiles."""

    var k: HalfPtr  # keys by features, (groups, features): for scores
    var v: HalfPtr  # the same, in the backward pass
    var along: HalfPtr  # features by keys, (keys, features): of v for y, of k for dq
    var p: HalfPtr  # pairs of keys by queries, (groups, keys), of probabilities, or of ds
    var q: HalfPtr  # pairs of features by queries, (groups, features)
    var dy: HalfPtr
    var qt: HalfPtr  # features by queries, (TOGETHER, features)
    var dyt: HalfPtr
    var pt: HalfPtr  # pairs of queries by keys, (groups, TOGETHER)
    var dst: HalfPtr
    var end: HalfPtr

    def __init__(out self, scratch: Ptr, size: Attention):
        var tiles = tiles_of(size.D)
        var vectors = vectors_of(size.D)
        var sums = tiles_of(size.S)
        self.k = scratch.unsafe_bitcast[BFloat16]()
        self.v = self.k.unsafe_offset(vectors_of(size.S) * tiles * TILE)
        self.along = self.v.unsafe_offset(vectors_of(size.S) * tiles * TILE)
        self.p = self.along.unsafe_offset(sums * vectors * TILE)
        self.q = self.p.unsafe_offset(BLOCK * sums * TILE)
        self.dy = self.q.unsafe_offset(BLOCK * tiles * TILE)
        self.qt = self.dy.unsafe_offset(BLOCK * tiles * TILE)
        self.dyt = self.qt.unsafe_offset(TOGETHER * vectors * TILE)
        self.pt = self.dyt.unsafe_offset(TOGETHER * vectors * TILE)
        self.dst = self.pt.unsafe_offset(TOGETHER * 2 * sums * TILE)
        self.end = self.dst.unsafe_offset(TOGETHER * 2 * sums * TILE)

    @staticmethod
    def floats(size: Attention) -> Int:
        """Of scratch memory."""
        comptime ANYWHERE = 64
        return (Int(Tiles(Ptr(unsafe_from_address=ANYWHERE), size).end) - ANYWHERE) // 4

    def pack_keys(self, to: HalfPtr, x: Panel, size: Attention):
        for g in range(vectors_of(size.S)):
            _pack_pairs[True](to.unsafe_offset(g * tiles_of(size.D) * TILE), x.group(g), LANES, size.D, x.step)

    def pack_along(self, x: Panel, size: Attention):
        for t in range(tiles_of(size.S)):
            _pack_tokens(self.along.unsafe_offset(t * vectors_of(size.D) * TILE), x, 2 * t, size.S, size.D)

    def pack_block[gb: Int](self, to: HalfPtr, x: Panel, g: Int, size: Attention):
        comptime for i in range(gb):
            _pack_pairs[False](to.unsafe_offset(i * tiles_of(size.D) * TILE), x.group(g + i), LANES, size.D)

    def pack_block_along(self, to: HalfPtr, x: Panel, g: Int, size: Attention):
        var at = g // BLOCK % TOGETHER * vectors_of(size.D) * TILE
        _pack_tokens(to.unsafe_offset(at), x, g, size.T, size.D)

    @always_inline
    def pack_scores[gb: Int](self, x: Ptr, key: Int, keys: Int, size: Attention):
        """Packs x (keys, gb, L), the first of which is number `key`, into p."""
        comptime for i in range(gb):
            var at = i * tiles_of(size.S) + key // (2 * LANES)
            _pack_pairs[False](self.p.unsafe_offset(at * TILE), x.unsafe_offset(i * LANES), gb * LANES, keys)

    @always_inline
    def pack_scores_along[gb: Int](self, to: HalfPtr, x: Ptr, key: Int, groups: Int, g: Int):
        """Packs x (groups of keys, 16, gb, L) of the block of queries from group g on; zeros if the last pair lacks
        one.
        """
        for i in range(ceildiv(groups, 2) * 2):
            var tile = to.unsafe_offset(((key // LANES + i) * TOGETHER + g // BLOCK % TOGETHER) * TILE)
            if i < groups:
                _pack_queries[gb](tile, x.unsafe_offset(i * LANES * gb * LANES))
            else:
                unsafe_memset_zero(tile, TILE)

    @always_inline
    def score[gb: Int](self, y: Ptr, keys: HalfPtr, queries: HalfPtr, g: Int, groups: Int, size: Attention):
        """Products y (keys, gb, L) of some groups of keys, from g on, with a block of queries."""
        var t = tiles_of(size.D)
        var a = keys.unsafe_offset(g * t * TILE)
        _add_products[gb, False](y, gb * SUMS, LANES, gb * LANES, a, t, 1, queries, t, 1, groups, t)

    @always_inline
    def combine[gb: Int](self, y: Ptr, keys: Int, size: Attention):
        """Sums over the first `keys` keys, times what is packed in p: y (gb, D rounded up to 16, L)."""
        var v = vectors_of(size.D)
        _add_products[gb, False](
            y, SUMS, v * SUMS, LANES, self.along, 1, v, self.p, tiles_of(size.S), 1, v, tiles_of(keys)
        )

    def add(self, dk: Ptr, dv: Ptr, end: Int, size: Attention):
        """Adds queries to the gradients (groups of keys, D rounded up to 16, L), if those before group `end` are
        TOGETHER blocks, or the last ones.
        """
        var v = vectors_of(size.D)
        var g = (end - 1) // (TOGETHER * BLOCK) * TOGETHER * BLOCK
        if end < min(g + TOGETHER * BLOCK, vectors_of(size.T)):
            return
        var blocks = tiles_of((end - g) * LANES)
        for t in range(tiles_of(keys_of((end - 1) // BLOCK * BLOCK, size))):
            var j = 0
            while keys_of(g + j * BLOCK, size) <= t * 2 * LANES:
                j += 1

            @always_inline
            def side[kb: Int](to: Ptr, a: HalfPtr, b: HalfPtr) {imm}:
                _add_products[kb, True](
                    to.unsafe_offset(2 * t * v * SUMS),
                    SUMS,
                    v * SUMS,
                    LANES,
                    a.unsafe_offset(j * v * TILE),
                    1,
                    v,
                    b.unsafe_offset((2 * t * TOGETHER + j) * TILE),
                    TOGETHER,
                    1,
                    v,
                    blocks - j,
                )

            if 2 * t + 1 < vectors_of(size.S):
                side[2](dv, self.dyt, self.pt)
                side[2](dk, self.qt, self.dst)
            else:
                side[1](dv, self.dyt, self.pt)
                side[1](dk, self.qt, self.dst)
