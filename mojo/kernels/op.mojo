"""What an op is: a name, the roles of its arguments, and the function that reads a record and computes it.

    Op("linear_backward_weight", "+dw, +db; dy, x, ~scratch; G, I, O", linear_backward_weight_op, "sums rounds",
    scratch)

The roles, in the order of the arguments: outputs; inputs; sizes. `+` marks what is added to instead of written, `~`
scratch memory, of as many bytes as the op's last function says. Traits are words:

    rounds    products, whose operands are rounded to the record's dtype
    lanes     there is no form for rows: the parts of layers that ranks share
    sums      what it adds up is a sum over samples: shards may share the buffer that it adds to
    begins:   its sums can begin with it (record.mojo, BEGINS); then the numbers of each output that it adds to, as
              products of sizes of one letter: begins:OI+O
    joined:   one call can compute all shards of a run (record.mojo, JOINED), of at most 16 groups of samples G; then
              the dtypes for which it can: joined:fp32+bf16. Its kernel reads `Record.shards` and `apart`. Without this
              trait an op computes one shard after the other
    features  every feature is computed by itself, so it runs on some of them as on all; the last size counts numbers
    heads     every head is computed by itself, so it runs on some of them: H heads of D features, `head` is the first
              one's number
    relu      it is max(x, 0), or the gradient of that: an op whose last size is `relu` takes it along where that is 1,
              at the end of its forward pass; one whose last size is `relu of x`, that of its x
    of:a+b    on a GPU: it stands for the op a, with its ReLU if it has one, and b, which alone reads its y: `S of y` is
              the S of b; or for the loss a and its gradient b: `scaled` is 1 if that starts from the loss scale, and
              0 if that starts from 1
    again     it is quickly computed once more, so that its first output need not be kept for the backward pass; the
              others are, and where the op has a size `again`, 1 says that they are there

Everything else is generic: Python reads the table of the library (python/odyssey/core/native.py), so an op's name is
written in its kernel file and in python/odyssey/core/functional.py and nowhere else. A kernel file ends with the list
of its ops.

An op whose arithmetic is one function - of vectors, of a sample's row, of a term of a sum over samples, of a place of a
plane, of a channel - or the rule of an optimizer is declared once for all devices: `Device` has the loops, views.mojo
what they give to it.
"""

from std.memory import Layout, alloc

from .lanes import BytePtr, F32, LANES, LongPtr, Ptr, Vec, first, in_tiles_and_ones, load, load_part, store, store_part
from .record import Arguments, ContextPtr, Record, sizes_of
from .views import (
    Cell,
    Cells,
    Channel,
    Channels,
    Of1,
    Of2,
    OfCell,
    OfLoss,
    OfChannels,
    OfNumber,
    OfRow,
    OfTerm,
    Row,
    Rule,
    Shard,
    Team,
    Two,
    Weights,
)

comptime Kernel = def(Record) thin  # computes a record on the CPU
comptime Scratch = def(Record, Int, Int) thin -> Int
"""Bytes of scratch memory that a record wants; for so many shards, of which so many share a gradient buffer."""


def no_scratch(r: Record, shards: Int, fold: Int) -> Int:
    """For ops that need none."""
    return 0


struct OpOf[Run: Copyable & Deinitable](Copyable):
    """One op of a device whose kernels are functions of type `Run`."""

    var name: StaticString  # which records have in Python
    var roles: StaticString  # of the arguments, as above; empty if another device's table declares the op
    var run: Self.Run  # computes a record
    var traits: StaticString  # words of the list above
    var scratch: Scratch  # how much scratch memory a record wants

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

    def __init__(out self, name: StaticString, run: Self.Run, scratch: Scratch = no_scratch):
        """Of another device, for an op that the CPU's table declares."""
        self = Self(name, "", run, scratch=scratch)


comptime Op = OpOf[Kernel]  # one op of the CPU
comptime OpsPtr = Pointer[List[Op], MutUntrackedOrigin]
"""A table that a family of kernels adds its ops to (mojo/families)."""


trait Device:
    """The loops of a device, for functions of vectors that are the same on all."""

    comptime Run: Copyable & Deinitable  # its kernels

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
        """`operands` arguments, then G, F and a number: f of every row, by teams (also of what is no sample's)."""
        ...

    @staticmethod
    def columns[f: OfTerm, operands: Int]() -> Self.Run:
        """The same arguments: adds f(row, i) of all rows to number i of the first operand, for i below F."""
        ...

    @staticmethod
    def losses[
        f: OfLoss, operands: Int
    ](name: StaticString, roles: StaticString, traits: StaticString = "") -> OpOf[Self.Run]:
        """An op with the same arguments; and the first operand becomes (sum of losses, samples, right predictions,
        0), exact up to 2^24 samples but for the rounding of the sum itself. A row's number is 1, or the step's
        loss scale if the argument behind F is 1.
        """
        ...

    @staticmethod
    def cells[Z: Cells, f: OfCell[Z], operands: Int, wide: Int = 4]() -> Self.Run:
        """`operands` arguments, then what Z reads: f of every place. A GPU's thread has `wide` samples, 1 or 4."""
        ...

    @staticmethod
    def cells[Z: Cells, f: OfCell[Z], operands: Int, *, cpu: Kernel]() -> Self.Run:
        """The same, but on a CPU its own kernel."""
        ...

    @staticmethod
    def either[
        Z: Cells, f: OfCell[Z], test: def(Z) thin -> Bool, Y: Cells, g: OfCell[Y], operands: Int, cpu: Kernel
    ]() -> Self.Run:
        """The same: f of every place of Z if Z passes the test, else g of those of Y; but on a CPU its own kernel."""
        ...

    @staticmethod
    def channels[A: Channels, f: def[T: Channel](T, A) thin]() -> Self.Run:
        """Arguments as A: f of every channel."""
        ...

    @staticmethod
    def update[R: Rule]() -> Self.Run:
        """Arguments w, states; g, samples; n and the fields of R: one step of n weights."""
        ...


# --- the CPU ----------------------------------------------------------------------------------------------------------


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

    @staticmethod
    def losses[
        f: OfLoss, operands: Int
    ](name: StaticString, roles: StaticString, traits: StaticString = "") -> OpOf[Self.Run]:
        return OpOf[Self.Run](name, roles, by_layout[_losses[f, operands, LANES], _losses[f, operands, 1]], traits)

    @staticmethod
    def cells[Z: Cells, f: OfCell[Z], operands: Int, wide: Int = 4]() -> Self.Run:
        return by_layout[each_cell[Z, f, operands, LANES], each_cell[Z, f, operands, 1]]

    @staticmethod
    def cells[Z: Cells, f: OfCell[Z], operands: Int, *, cpu: Kernel]() -> Self.Run:
        return cpu

    @staticmethod
    def either[
        Z: Cells, f: OfCell[Z], test: def(Z) thin -> Bool, Y: Cells, g: OfCell[Y], operands: Int, cpu: Kernel
    ]() -> Self.Run:
        return cpu

    @staticmethod
    def channels[A: Channels, f: def[T: Channel](T, A) thin]() -> Self.Run:
        return _channels[A, f]

    @staticmethod
    def update[R: Rule]() -> Self.Run:
        return _update[R]


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

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, f[w](load[w](x, i)))

    in_tiles_and_ones[LANES](n, some)


@always_inline
def map_number[f: OfNumber](y: Ptr, x: Ptr, a: Float32, n: Int):
    """Computes y = f(x, a)."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, f[w](load[w](x, i), a))

    in_tiles_and_ones[LANES](n, some)


@always_inline
def map2[f: Of2](y: Ptr, a: Ptr, b: Ptr, n: Int):
    """Computes y = f(a, b)."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, f[w](load[w](a, i), load[w](b, i)))

    in_tiles_and_ones[LANES](n, some)


@fieldwise_init
struct _Alone[samples: Int](Team):
    comptime K = 1
    comptime L = Self.samples

    @always_inline
    def part(self) -> Int:
        return 0

    @always_inline
    def sum(self, v: SIMD[F32, Self.L]) -> SIMD[F32, Self.L]:
        return v

    @always_inline
    def best(
        self, v: SIMD[F32, Self.L], place: SIMD[DType.int32, Self.L]
    ) -> Tuple[SIMD[F32, Self.L], SIMD[DType.int32, Self.L]]:
        return (v, place)


def _rows[f: OfRow, operands: Int, L: Int](r: Record):
    for g in range(r.int(operands + 1)):
        f(_Alone[L](), _row[L, operands](r, g))


def _losses[f: OfLoss, operands: Int, L: Int](r: Record):
    var s = SIMD[F32, 4](0)
    for g in range(r.int(operands + 1)):
        var row = _row[L, operands](r, g)
        row.number = Float32(r.context[].loss_scale) if r.int(operands + 3) == 1 else 1
        var one = f(_Alone[L](), row)
        s[0] += one.loss.reduce_add()
        s[1] += one.counts.cast[F32]().reduce_add()
        s[2] += one.right.cast[F32]().reduce_add()
    r.ptr(1).unsafe_store(0, s)


def each_cell[Z: Cells, f: OfCell[Z], operands: Int, L: Int](r: Record):
    """Computes f of every place."""
    var i = operands + 1
    var z = Z.read(r, i)
    # read once: for all the compiler knows, what f writes may be the record
    var cell = Cell[L](
        r.ptr(1),
        r.ptr(min(2, operands)),
        r.ptr(min(3, operands)),
        r.ptr(min(4, operands)),
        Shard(r.context[].seed, r.context[].step, r.context[].first),
        0,
        0,
        0,
        0,
        0,
        L,
    )
    var planes, rows, columns = z.shape()
    for plane in range(planes):
        cell.plane = plane
        for row in range(rows):
            cell.row = row
            for column in range(columns):
                cell.column = column
                f[L](cell, z)
                cell.at += 1


@fieldwise_init
struct _Channel(Channel):
    """One after the other, sixteen neighbours at a time."""

    comptime L = LANES
    var z: OfChannels
    var channel: Int
    var live: Int  # samples that count
    var lanes: Int

    @always_inline
    def number(self) -> Int:
        return self.channel

    @always_inline
    def samples(self) -> Int:
        return self.live

    @always_inline
    def leads(self) -> Bool:
        return True

    @staticmethod
    @always_inline
    def load[whole: Bool](p: Ptr, at: Int, own: Int) -> SIMD[F32, Self.L]:
        return load_part[whole](p, at, own)

    @staticmethod
    @always_inline
    def own[whole: Bool](v: SIMD[F32, Self.L], own: Int) -> SIMD[F32, Self.L]:
        comptime if whole:
            return v
        else:
            return first(own).select(v, Vec(0))

    @staticmethod
    @always_inline
    def store[whole: Bool](p: Ptr, at: Int, v: SIMD[F32, Self.L], there: Int):
        store_part[whole](p, at, v, there)

    @always_inline
    def fold[B: def[whole: Bool](Int, Int, Two[Self.L]) -> Two[Self.L], //, both: Bool](self, body: B) -> Two[1]:
        """Four partial sums take turns."""
        var sums = Array[Two[Self.L], 4](fill=Two[Self.L](0, 0))

        @always_inline
        def add[whole: Bool, j: Int](at: Int, own: Int, there: Int) {mut sums, imm body}:
            sums[j] = body[whole](at, own, sums[j])

        self.walk(add)
        return Two[1](
            ((sums[0].s + sums[1].s) + (sums[2].s + sums[3].s)).reduce_add(),
            ((sums[0].t + sums[1].t) + (sums[2].t + sums[3].t)).reduce_add(),
        )

    @always_inline
    def each[B: def[whole: Bool](Int, Int, Int) -> None, //](self, body: B):
        @always_inline
        def put[whole: Bool, j: Int](at: Int, own: Int, there: Int) {imm body}:
            body[whole](at, own, there)

        self.walk(put)

    @always_inline
    def walk[B: def[whole: Bool, j: Int](Int, Int, Int) -> None, //](self, body: B):
        """Calls body[whole, j](at, own, there) for each vector, j being 0, 1, 2, 3 in turn."""
        var L = self.lanes
        var n = self.z.P * L
        for g in range(self.z.G):
            var at = (g * self.z.C + self.channel) * n
            var left = self.live - g * L
            var i = 0
            if left >= L:
                while i + 4 * LANES <= n:
                    comptime for j in range(4):
                        body[True, j](at + i + j * LANES, LANES, LANES)
                    i += 4 * LANES
                while i + LANES <= n:
                    body[True, 0](at + i, LANES, LANES)
                    i += LANES
            while i < n:
                var there = min(n - i, LANES)
                var own = there if left >= L else (0 if L == 1 else max(left, 0))
                body[False, 0](at + i, own, there)
                i += LANES


def _channels[A: Channels, f: def[T: Channel](T, A) thin](r: Record):
    var a = sizes_of[A](r, 1)
    var z = a.sizes()
    var live = z.N if z.N >= 0 else Int(r.context[].valid)
    for c in range(z.C):
        f(_Channel(z, c, live, r.lanes()), a)


def _update[R: Rule](r: Record):
    var weights = Weights[R].read(r)
    var mean = 1 / weights.samples[]
    var i = 0
    while i + LANES <= weights.n:
        weights.step[LANES](i, mean)
        i += LANES
    if i < weights.n:
        weights.step[LANES, False](i, mean)


# --- kernels that take their arguments one by one ---------------------------------------------------------------------


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


# --- a table for others -----------------------------------------------------------------------------------------------


def describe[Run: Copyable & Deinitable, //](ops: List[OpOf[Run]], op: Int, text: BytePtr, size: Int) -> Int:
    """Writes an op's name, roles and traits, each with an end of line (at most `size` bytes); returns the length."""
    return write_text(String(ops[op].name, ops[op].roles, ops[op].traits, sep="\n"), text, size)


def write_text(line: String, text: BytePtr, size: Int) -> Int:
    """Writes the first `size` bytes of a line; returns how many it has."""
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
