"""What an op is: a name, the roles of its arguments, and the function that reads a record and computes it.

    Op("linear_backward_weight", "+dw, +db; dy, x, ~scratch; G, I, O", linear_backward_weight_op, "sums rounds", scratch)

The roles, in the order of the arguments: outputs; inputs; sizes. `+` marks what is added to instead of written, `~`
scratch memory, of as many bytes as the op's last function says. Traits are words:

    rounds    products, whose operands are rounded to the record's dtype
    lanes     there is no form for rows: the parts of layers that ranks share
    sums      what it adds up is a sum over samples: shards may share the buffer that it adds to
    features  every feature is computed by itself, so it runs on some of them as on all; the last size counts numbers
    heads     every head is computed by itself, so it runs on some of them: H heads of D features, `head` is the first one's number
    again     it is quickly computed once more, so that its first output need not be kept for the backward pass; the others
              are, and where the op has a size `again`, 1 says that they are there

Everything else is generic: Python reads the table of the library (python/odyssey/core/native.py), so an op's name is written
in its kernel file and in python/odyssey/core/functional.py and nowhere else. A kernel file ends with the list of its ops.

An op whose arithmetic is one function - of vectors, of a sample's row, of a term of a sum over samples - is declared once
for all devices: `Device` has the loops.
"""

from std.memory import Layout, alloc

from .lanes import BytePtr, F32, LANES, LongPtr, Ptr, load, store
from .record import Arguments, ContextPtr, Record

comptime Kernel = def(Record) thin
"""Computes a record on the CPU."""
comptime Scratch = def(Record, Int, Int) thin -> Int
"""Bytes of scratch memory that a record wants; for so many shards, of which so many share a gradient buffer."""

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
    def at(self, p: Ptr, f: Int) -> SIMD[F32, Self.L]:
        """Number f of a parameter, for all samples."""
        return SIMD[F32, Self.L](p[unsafe_offset=f])


comptime OfRow = def[L: Int](Row[L]) thin
comptime OfTerm = def[L: Int](Row[L], Int) thin -> SIMD[F32, L]


def no_scratch(r: Record, shards: Int, fold: Int) -> Int:
    """For ops that need none."""
    return 0


struct OpOf[Run: Copyable & Deinitable](Copyable):
    """One op of a device whose kernels are functions of type `Run`."""

    var name: StaticString
    """Which records have in Python."""
    var roles: StaticString
    """Of the arguments, as above; empty if another device's table declares the op."""
    var run: Self.Run
    """Computes a record."""
    var traits: StaticString
    """Words of the list above."""
    var scratch: Scratch
    """How much scratch memory a record wants."""

    def __init__(
        out self,
        name: StaticString,
        roles: StaticString,
        run: Self.Run,
        traits: StaticString = "",
        scratch: Scratch = no_scratch,
    ):
        self.name = name
        self.roles = roles
        self.run = run.copy()
        self.traits = traits
        self.scratch = scratch

    def __init__(
        out self,
        name: StaticString,
        run: Self.Run,
        scratch: Scratch = no_scratch,
    ):
        """Of another device, for an op that the CPU's table declares."""
        self.name = name
        self.roles = ""
        self.run = run.copy()
        self.traits = ""
        self.scratch = scratch


comptime Op = OpOf[Kernel]
"""One op of the CPU."""


trait Device:
    """The loops of a device, for functions of vectors that are the same on all."""

    comptime Run: Copyable & Deinitable
    """Its kernels."""

    @staticmethod
    def map[f: Of1]() -> Self.Run:
        """Arguments y; x; n: y = f(x)."""
        ...

    @staticmethod
    def map[f: OfNumber]() -> Self.Run:
        """Arguments y; x; a, n: y = f(x, a)."""
        ...

    @staticmethod
    def map[f: Of2]() -> Self.Run:
        """Arguments y; a, b; n: y = f(a, b)."""
        ...

    @staticmethod
    def rows[f: OfRow, operands: Int]() -> Self.Run:
        """`operands` arguments, then G, F and a number: f of every row (of what is no sample's as well)."""
        ...

    @staticmethod
    def columns[f: OfTerm, operands: Int]() -> Self.Run:
        """The same arguments: adds f(row, i) of all rows to number i of the first operand, for i below F."""
        ...


# --- the CPU -------------------------------------------------------------------------------------------------------------


struct Cpu(Device):
    """This processor, 16 floats at a time."""

    comptime Run = Kernel

    @staticmethod
    def map[f: Of1]() -> Self.Run:
        return call[map1[f]]

    @staticmethod
    def map[f: OfNumber]() -> Self.Run:
        return call[map_number[f]]

    @staticmethod
    def map[f: Of2]() -> Self.Run:
        return call[map2[f]]

    @staticmethod
    def rows[f: OfRow, operands: Int]() -> Self.Run:
        return by_layout[_rows[f, operands, LANES], _rows[f, operands, 1]]

    @staticmethod
    def columns[f: OfTerm, operands: Int]() -> Self.Run:
        return by_layout[_columns[f, operands, LANES], _columns[f, operands, 1]]


@always_inline
def _row[L: Int, operands: Int](r: Record, g: Int) -> Row[L]:
    return Row[L](
        r.ptr(1),
        r.ptr(min(2, operands)),
        r.ptr(min(3, operands)),
        r.ptr(min(4, operands)),
        r.ptr(min(5, operands)),
        r.int(operands + 2),
        r.float(operands + 3),
        g,
        0,
        L,
    )


def _rows[f: OfRow, operands: Int, L: Int](r: Record):
    for g in range(r.int(operands + 1)):
        f[L](_row[L, operands](r, g))


def _columns[f: OfTerm, operands: Int, L: Int](r: Record):
    var y = r.ptr(1)
    for i in range(r.int(operands + 2)):
        var s = SIMD[F32, L](0)
        for g in range(r.int(operands + 1)):
            s += f[L](_row[L, operands](r, g), i)
        y[unsafe_offset=i] += s.reduce_add()


@always_inline
def map1[f: Of1](y: Ptr, x: Ptr, n: Int):
    """Computes y = f(x); n may be any number."""
    var i = 0
    while i + LANES <= n:
        store(y, i, f[LANES](load(x, i)))
        i += LANES
    while i < n:
        y[unsafe_offset=i] = f[1](SIMD[F32, 1](x[unsafe_offset=i]))
        i += 1


@always_inline
def map_number[f: OfNumber](y: Ptr, x: Ptr, a: Float32, n: Int):
    """Computes y = f(x, a)."""
    var i = 0
    while i + LANES <= n:
        store(y, i, f[LANES](load(x, i), a))
        i += LANES
    while i < n:
        y[unsafe_offset=i] = f[1](SIMD[F32, 1](x[unsafe_offset=i]), a)
        i += 1


@always_inline
def map2[f: Of2](y: Ptr, a: Ptr, b: Ptr, n: Int):
    """Computes y = f(a, b)."""
    var i = 0
    while i + LANES <= n:
        store(y, i, f[LANES](load(a, i), load(b, i)))
        i += LANES
    while i < n:
        y[unsafe_offset=i] = f[1](SIMD[F32, 1](a[unsafe_offset=i]), SIMD[F32, 1](b[unsafe_offset=i]))
        i += 1


# --- kernels that take their arguments one by one ------------------------------------------------------------------------


def by_layout[lanes: Kernel, rows: Kernel](r: Record):
    """The first for lanes, the second for rows."""
    if r.rows():
        rows(r)
    else:
        lanes(r)


def call[Ts: TypeList[Trait=AnyType, ...], //, f: def(* args: * Ts) thin](r: Record):
    """f of the record's arguments, each read as the type that f declares (record.Arguments)."""
    var arguments = Arguments[Ts]()
    var pack = arguments.read(r)
    f(*pack)
    _ = arguments^


# --- a table for others ---------------------------------------------------------------------------------------------------


def describe[Run: Copyable & Deinitable, //](ops: List[OpOf[Run]], op: Int, text: BytePtr, size: Int) -> Int:
    """Writes an op's name, roles and traits, each with an end of line (at most `size` bytes); returns the length."""
    var line = String(ops[op].name, ops[op].roles, ops[op].traits, sep="\n")
    var bytes = line.as_bytes()
    for i in range(min(len(bytes), size)):
        text[unsafe_offset=i] = bytes[i]
    return len(bytes)


@always_inline
def kernel_of[Run: Copyable & Deinitable](table: LongPtr, code: Int) -> Run:
    """The kernel of a code, from an array as `addresses` makes it."""
    return Pointer[Run, MutUntrackedOrigin](unsafe_from_address=Int(table) + 16 * code)[].copy()


def scratch_of(table: LongPtr, at: LongPtr, shards: Int, fold: Int) -> Int:
    """Bytes of scratch memory that the record at `at` wants."""
    var r = Record(at, at, ContextPtr(unsafe_from_address=Int(at)))
    var scratch = Pointer[Scratch, MutUntrackedOrigin](unsafe_from_address=Int(table) + 16 * r.code() + 8)
    return scratch[](r, shards, fold)


def addresses[Run: Copyable & Deinitable, //](ops: List[OpOf[Run]]) -> LongPtr:
    """An array of (address of `run`, address of `scratch`) of all ops, which is never freed."""
    var at = alloc(Layout[Int64](count=2 * len(ops))).unsafe_leak()
    for i in range(len(ops)):
        Pointer[Run, MutUntrackedOrigin](unsafe_from_address=Int(at) + 16 * i).unsafe_write(ops[i].run.copy())
        Pointer[Scratch, MutUntrackedOrigin](unsafe_from_address=Int(at) + 16 * i + 8).unsafe_write(ops[i].scratch)
    return LongPtr(unsafe_from_address=Int(at))
