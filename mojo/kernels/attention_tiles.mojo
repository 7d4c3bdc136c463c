"""What attention.mojo adds up and draws: products of a block of tokens with others, in registers.

The letters are that file's.
"""

from std.math import ceildiv, iota
from std.utils.numerics import inf

from .dropout import stays
from .lanes import F32, LANES, REGISTERS, Ptr, Vec, load, load_first, madd, splat, store
from .panels import Panel
from .random import U32
from .record import ContextPtr

# Register tiles: TILE broadcast numbers x BLOCK vectors. 8 x 2 sums: 16 FMAs for 10 loads.
comptime TILE = 8 if REGISTERS == 32 else (4 if REGISTERS == 8 else 2)
comptime TILES: List[Int] = [8, 4, 2, 1]
comptime BLOCK = 2 if REGISTERS == 32 else 1  # groups of queries at once; and of keys, in the backward pass
comptime SIDE = BLOCK * LANES
comptime AREA = SIDE * SIDE  # scores of a block of queries and a block of keys


# The bits of `masks`: that there is one, and along which axes it has numbers of its own.
comptime THERE = 1
comptime SEQUENCES = 2
comptime HEADS = 4
comptime QUERIES = 8
comptime HIDDEN = -inf[F32]()


@fieldwise_init
struct Attention(TrivialRegisterPassable):
    """The sizes, as above, in the order of the record."""

    var N: Int
    var T: Int
    var S: Int
    var H: Int
    var D: Int
    var past: Int
    var fused: Int
    var scale: Float32
    var p: Float32
    var layer: Int
    var head: Int
    var masks: Int

    @always_inline
    def mask(self, n: Int, h: Int) -> Int:
        """Where the mask of a head of a sequence begins: (N, H, S, T), but for axes along which it is the same."""
        var head = self.S * (self.T if self.masks & QUERIES else 1)
        var sequence = head * (self.H if self.masks & HEADS else 1)
        return (n * sequence if self.masks & SEQUENCES else 0) + (h * head if self.masks & HEADS else 0)

    @always_inline
    def features(self) -> Int:
        """Of the tensors that q, k, v and their gradients are or are thirds of."""
        return self.H * self.D * (3 if self.fused else 1)

    @always_inline
    def at(self, third: Int, head: Int) -> Int:
        """The first feature of a head of q (0), k (1) or v (2)."""
        return head * self.D + (third * self.H * self.D if self.fused else 0)

    @always_inline
    def part(self) -> Int:
        """Floats of a group of a head, with features rounded up to 16."""
        return ceildiv(self.D, LANES) * LANES * LANES

    @always_inline
    def panel(self, tokens: Int) -> Int:
        """Floats of a head of one sequence."""
        return ceildiv(tokens, LANES) * self.part()

    @always_inline
    def draws(self, head: Int) -> Int:
        """The first number of a head's keys, in fours.

        A query draws as a token of H times S features does in Dropout, with S rounded up to a multiple of 4.
        """
        return (self.head + head) * ceildiv(self.S, 4)


@fieldwise_init
struct Mask(TrivialRegisterPassable):
    """What is added to a head's scores of a sequence; keys with -inf are not seen. Without one, 0."""

    var p: Ptr  # (S, T), or (S)
    var size: Attention

    @always_inline
    def __init__(out self, p: Ptr, n: Int, h: Int, size: Attention):
        self.p = p.unsafe_offset(size.mask(n, h))
        self.size = size

    @always_inline
    def at(self, key: Int, g: Int) -> Vec:
        """For the queries of a group."""
        var s = min(key, self.size.S - 1)
        if self.size.masks == 0:
            return Vec(0)
        if self.size.masks & QUERIES == 0:
            return Vec(self.p[unsafe_offset=s])
        var t = g * LANES
        return load_first(self.p, s * self.size.T + t, min(self.size.T - t, LANES))


@fieldwise_init
struct Drawn(TrivialRegisterPassable):
    """What dropout draws for a head of a sequence."""

    var token: UInt32  # the sequence's first, in the global batch
    var first: Int  # size.draws(head)
    var context: ContextPtr


@always_inline
def dots[n: Int, gb: Int](a: Panel, g: Int, b: Ptr, D: Int) -> Array[Vec, n * gb]:
    """Products of the tokens of gb groups of a, from g on, with the n tokens from lane b on."""
    var acc = Array[Vec, n * gb](fill=Vec(0))
    var p = a.group(g)
    for d in range(D):
        var v = Array[Vec, gb](fill=Vec(0))
        comptime for i in range(gb):
            v[i] = load(p, i * a.step + d * LANES)
        comptime for j in range(n):
            var s = splat(b, d * LANES + j)
            comptime for i in range(gb):
                acc[j * gb + i] = madd(v[i], s, acc[j * gb + i])
    return acc^


@always_inline
def combine[
    gb: Int
](
    y: Ptr,  # (gb, D, L), groups y_group floats apart, added to
    y_group: Int,
    weights: Ptr,  # (count, L) for each of the gb groups
    of_group: Int,  # floats from one group's weights to the next
    of_token: Int,  # from one token's to the next
    b: Panel,
    g: Int,
    count: Int,
    D: Int,
):
    """Adds the `count` tokens of b from group g on, each times its weights, to y."""

    @always_inline
    def tile[n: Int](d: Int) {imm}:
        var acc = Array[Vec, n * gb](fill=Vec(0))
        comptime for j in range(n):
            comptime for i in range(gb):
                acc[j * gb + i] = load(y, i * y_group + (d + j) * LANES)
        for group in range(ceildiv(count, LANES)):
            var p = b.group(g + group).unsafe_offset(d * LANES)
            var w = weights.unsafe_offset(group * LANES * of_token)
            for l in range(min(count - group * LANES, LANES)):
                var v = Array[Vec, gb](fill=Vec(0))
                comptime for i in range(gb):
                    v[i] = load(w, l * of_token + i * of_group)
                comptime for j in range(n):
                    var s = splat(p, j * LANES + l)
                    comptime for i in range(gb):
                        acc[j * gb + i] = madd(v[i], s, acc[j * gb + i])
        comptime for j in range(n):
            comptime for i in range(gb):
                store(y, i * y_group + (d + j) * LANES, acc[j * gb + i])

    var d = 0
    comptime for i in range(len(TILES)):
        comptime n = materialize[TILES]()[i]
        comptime if n <= TILE:
            while d + n <= D:
                tile[n](d)
                d += n


@always_inline
def keys_of(g: Int, size: Attention) -> Int:
    """Keys that the block of queries from group g on sees."""
    return min(size.S, min(g + BLOCK, ceildiv(size.T, LANES)) * LANES + size.past)


@always_inline
def last_seen(size: Attention, g: Int) -> SIMD[DType.int32, LANES]:
    """The last key that each query of a group sees."""
    var last = iota[DType.int32, LANES](Int32(g * LANES + size.past))
    return min(last, SIMD[DType.int32, LANES](Int32(size.S - 1)))


@always_inline
def all_see(size: Attention, g: Int, keys: Int) -> Int:
    """How many of the keys of a block of two groups, from g on, the first group sees as well, if that is whole groups;
    else all. What it does not see need not be computed for it.
    """
    var first = (g + 1) * LANES + size.past
    return first if first % LANES == 0 and first < keys else keys


@always_inline
def drop[
    lo: Int, gb: Int
](x: Ptr, drawn: Drawn, g: Int, first: Int, start: Int, end: Int, size: Attention):  # (keys, gb, L)
    """Divides those of keys start .. end - 1 behind key `first` that stay by 1 - p, zeroes the others, of groups lo ..
    gb - 1 of queries. start must be a multiple of 4.
    """
    var keep = Vec(Float32(1) / (1 - size.p))
    comptime for i in range(lo, gb):
        var token = iota[U32, LANES](drawn.token + UInt32((g + i) * LANES))
        for key in range(start, end, 4):
            var stay = stays[LANES](
                drawn.first + (first + key) // 4, token, size.layer, size.p, drawn.context[].step, drawn.context[].seed
            )
            comptime for j in range(4):
                var at = ((key + j) * gb + i) * LANES
                store(x, at, load(x, at) * stay[j].select(keep, Vec(0)))
