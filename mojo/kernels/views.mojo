"""What a device's loops (op.Device) give to arithmetic that is declared once for all: vectors, a row or a team's
share of one, a place of a plane, a run of weights.
"""

from std.sys import is_gpu
from std.utils import StaticTuple

from .lanes import F32, Ptr, load, load_part, store, store_part
from .record import Argument, Source, sizes_of

# Functions of vectors: of one, of one and a number that is the same everywhere, of two.
comptime Of1 = def[w: Int](SIMD[F32, w]) thin -> SIMD[F32, w]
comptime OfNumber = def[w: Int](SIMD[F32, w], Float32) thin -> SIMD[F32, w]
comptime Of2 = def[w: Int](SIMD[F32, w], SIMD[F32, w]) thin -> SIMD[F32, w]


@fieldwise_init
struct Row[L: Int](TrivialRegisterPassable):
    """L samples side by side that a function of a row computes: a group in lanes, or one sample (L 1).

    `get` and `put` reach feature f of an activation that has `of` features; `at` reads a parameter. a to e are the
    record's first five operands, in its order; of fewer, the last one is repeated.
    """

    var a: Ptr
    var b: Ptr
    var c: Ptr
    var d: Ptr
    var e: Ptr
    var F: Int  # features
    var number: Float32  # the argument behind G, F
    var group: Int
    var lane: Int
    var stride: Int  # samples per group, in memory

    @always_inline
    def get(self, p: Ptr, f: Int, of: Int) -> SIMD[F32, Self.L]:
        """Feature f."""
        var i = (self.group * of + f) * self.stride + self.lane
        return load[Self.L](p, i)

    @always_inline
    def put(self, p: Ptr, f: Int, of: Int, v: SIMD[F32, Self.L]):
        """Writes feature f."""
        var i = (self.group * of + f) * self.stride + self.lane
        store[Self.L](p, i, v)

    @always_inline
    def pick(self, p: Ptr, places: SIMD[DType.int32, Self.L]) -> SIMD[F32, Self.L]:
        """A feature of F for each sample; 0 where there is no such feature."""
        var v = SIMD[F32, Self.L](0)
        comptime for i in range(Self.L):
            var f = Int(places[i])
            if 0 <= f < self.F:
                v[i] = p[unsafe_offset=(self.group * self.F + f) * self.stride + self.lane + i]
        return v

    @always_inline
    def at(self, p: Ptr, f: Int) -> SIMD[F32, Self.L]:
        """Number f of a parameter, for all samples."""
        return SIMD[F32, Self.L](p[unsafe_offset=f])


comptime OfTerm = def[L: Int](Row[L], Int) thin -> SIMD[F32, L]


@fieldwise_init
struct Shard(TrivialRegisterPassable):
    """What random numbers are made of."""

    var seed: UInt64
    var step: Int64
    var first: Int64  # position of the shard's first sample in the global batch


@fieldwise_init
struct Cell[L: Int](TrivialRegisterPassable):
    """L samples of one place of planes (planes, rows, columns, LANES or 1), a lane's worth of what a function computes.

    `get` and `put` reach place i of a tensor, counted over all its planes; a to d are operands as in `Row`.
    """

    var a: Ptr
    var b: Ptr
    var c: Ptr
    var d: Ptr
    var run: Shard
    var at: Int  # this place, counted over all planes
    var plane: Int
    var row: Int
    var column: Int
    var lane: Int
    var stride: Int  # samples side by side, in memory

    @always_inline
    def get(self, p: Ptr, i: Int) -> SIMD[F32, Self.L]:
        """Place i."""
        return load[Self.L](p, i * self.stride + self.lane)

    @always_inline
    def put(self, p: Ptr, i: Int, v: SIMD[F32, Self.L]):
        """Writes place i."""
        store[Self.L](p, i * self.stride + self.lane, v)

    @always_inline
    def get_bytes(self, p: Ptr, i: Int) -> SIMD[DType.uint8, Self.L]:
        """Place i of a tensor of bytes."""
        var at = p.unsafe_bitcast[UInt8]().unsafe_offset(i * self.stride + self.lane)
        return at.unsafe_load[width=Self.L, alignment=Self.L if is_gpu() else 1]()

    @always_inline
    def put_bytes(self, p: Ptr, i: Int, v: SIMD[DType.uint8, Self.L]):
        """Writes place i of a tensor of bytes."""
        var at = p.unsafe_bitcast[UInt8]().unsafe_offset(i * self.stride + self.lane)
        at.unsafe_store[alignment=Self.L if is_gpu() else 1](0, v)


trait Cells(Argument):
    """The sizes of an op that computes places of planes; what needs a division is computed when they are read."""

    def shape(self) -> Tuple[Int, Int, Int]:
        """How many planes, those of all samples or groups; rows and columns of one."""
        ...


comptime OfCell[Z: Cells] = def[L: Int](Cell[L], Z) thin


trait Rule(TrivialRegisterPassable):
    """How an optimizer changes weights. Its fields are the arguments of an op behind n."""

    comptime STATES: Int  # numbers kept for each weight

    @always_inline
    def keeps(self) -> Bool:
        """False if this time the states are neither read nor written."""
        return True

    def update[L: Int](self, mut w: SIMD[F32, L], mut s: Array[SIMD[F32, L], Self.STATES], g: SIMD[F32, L]):
        """One step of L weights w with their states s; g is the gradient."""
        ...


@fieldwise_init
struct Weights[R: Rule](TrivialRegisterPassable):
    """What a step changes: a run of n weights with their states, an arena or any piece of one.

    What lies behind a run may be another parameter of the same rank, so nothing is read or written there.
    """

    var w: Ptr
    var states: StaticTuple[Ptr, Self.R.STATES]
    var g: Ptr  # a sum over so many
    var samples: Ptr
    var n: Int
    var rule: Self.R

    @staticmethod
    def read[S: Source](r: S) -> Self:
        """The arguments of an op: w, states, g, samples, n and the fields of the rule."""
        comptime g = 2 + Self.R.STATES
        var states = StaticTuple[Ptr, Self.R.STATES](fill=r.ptr(1))
        comptime for i in range(Self.R.STATES):
            states[i] = r.ptr(2 + i)
        return Self(r.ptr(1), states, r.ptr(g), r.ptr(g + 1), r.int(g + 2), sizes_of[Self.R](r, g + 3))

    @always_inline
    def step[L: Int, whole: Bool = True](self, i: Int, mean: Float32):
        """Changes the L weights from i on, those of them that there are if not `whole`; `mean` g is the gradient."""
        var n = self.n - i
        var w = load_part[whole, L](self.w, i, n)
        var s = Array[SIMD[F32, L], Self.R.STATES](fill=0)
        var keeps = self.rule.keeps()
        if keeps:
            comptime for j in range(Self.R.STATES):
                s[j] = load_part[whole, L](self.states[j], i, n)
        self.rule.update[L](w, s, load_part[whole, L](self.g, i, n) * mean)
        if keeps:
            comptime for j in range(Self.R.STATES):
                store_part[whole, L](self.states[j], i, s[j], n)
        store_part[whole, L](self.w, i, w, n)


trait Team(TrivialRegisterPassable):
    """The threads that share a row: each takes features part(), part() + K, ...

    What they have found is put together in an order that K alone fixes. A GPU's team may find a row without features;
    it has to call `sum` and `best` all the same.
    """

    comptime K: Int  # how many they are; 1 on a CPU
    comptime L: Int  # samples of a thread

    def part(self) -> Int:
        """The first feature of this thread."""
        ...

    @always_inline
    def leads(self, r: Row[Self.L]) -> Bool:
        """True for the one thread that writes what a row has once."""
        return self.part() == 0 and r.F > 0

    def sum(self, v: SIMD[F32, Self.L]) -> SIMD[F32, Self.L]:
        """The sum over the team."""
        ...

    def best(
        self, v: SIMD[F32, Self.L], place: SIMD[DType.int32, Self.L]
    ) -> Tuple[SIMD[F32, Self.L], SIMD[DType.int32, Self.L]]:
        """The largest number of the team and its place, the smallest of equals."""
        ...


@fieldwise_init
struct Loss[L: Int](TrivialRegisterPassable):
    """What a loss finds out of L samples."""

    var loss: SIMD[F32, Self.L]
    var counts: SIMD[DType.bool, Self.L]  # a sample is there
    var right: SIMD[DType.bool, Self.L]  # and is what was predicted


comptime OfRow = def[T: Team](T, Row[T.L]) thin
comptime OfLoss = def[T: Team](T, Row[T.L]) thin -> Loss[T.L]


# --- channels ---------------------------------------------------------------------------------------------------------


@fieldwise_init
struct OfChannels(TrivialRegisterPassable):
    """The sizes of a tensor (G, C, P, L), and how many samples count."""

    var G: Int
    var C: Int
    var P: Int
    var N: Int  # -1: the samples that the shard really has


@fieldwise_init
struct Two[L: Int](TrivialRegisterPassable):
    """Two partial sums."""

    var s: SIMD[F32, Self.L]
    var t: SIMD[F32, Self.L]


trait Channels(TrivialRegisterPassable):
    """The arguments of an op that computes channels, in the record's order; operands are `Ptr`."""

    def sizes(self) -> OfChannels:
        """Of the tensor."""
        ...


trait Channel(TrivialRegisterPassable):
    """One channel of all samples of a shard.

    It is walked L numbers at a time: from place `at` on `there` numbers are in memory, of which the first `own` are a
    sample's; all are if they are `whole`.
    """

    comptime L: Int  # numbers at a time

    def number(self) -> Int:
        """Which channel it is."""
        ...

    def samples(self) -> Int:
        """Samples that count."""
        ...

    def leads(self) -> Bool:
        """True for the one thread that writes what is written once."""
        ...

    @staticmethod
    def load[whole: Bool](p: Ptr, at: Int, own: Int) -> SIMD[F32, Self.L]:
        """Numbers that are a sample's; 0 for others."""
        ...

    @staticmethod
    def own[whole: Bool](v: SIMD[F32, Self.L], own: Int) -> SIMD[F32, Self.L]:
        """Number v where it is a sample's; 0 for others."""
        ...

    @staticmethod
    def store[whole: Bool](p: Ptr, at: Int, v: SIMD[F32, Self.L], there: Int):
        """Writes numbers."""
        ...

    def fold[B: def[whole: Bool](Int, Int, Two[Self.L]) -> Two[Self.L], //, both: Bool](self, body: B) -> Two[1]:
        """Sums of the channel, in the order of the device: body(at, own, sums) adds some numbers to partial sums.

        Not `both`: only s is asked for.
        """
        ...

    def each[B: def[whole: Bool](Int, Int, Int) -> None, //](self, body: B):
        """Calls body(at, own, there) for all numbers."""
        ...
