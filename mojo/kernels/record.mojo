"""A record: one op of a program, with its arguments; and what a run of a program brings to it.

A record is RECORD int64 numbers: a header, the arguments and at the end one for timelines. The header has the op's code
in its low 16 bits (its place in the table, mojo/runtime/ops.mojo), 1 << 16 if the activations are in rows instead of
lanes (lanes.mojo), 1 << 17 if sums begin with it, 1 << 18 if one call computes the shards of a run. The bits above them,
24 and up, have how the operands of products are rounded.
An argument is a size, a float (its 32 bits) or an operand: a byte offset in the low 56 bits and a space in the high 8.
A space is an entry of the table of base addresses that comes with a run, so one program serves every shard, thread and
process:

    ABSOLUTE   base 0: the offset is an address (how Python runs a single op)
    PARAMS     the arena of parameters
    GRADS      the gradient buffer of this shard: the arena's layout, then STATS floats (loss, samples, correct, -)
    WORK       the workspace of this thread

What changes from shard to shard without being an address is in the context (`Context`).
"""

from std.builtin.rebind import downcast, rebind
from std.memory import bitcast

from .lanes import BytePtr, IntPtr, LANES, LongPtr, Ptr

comptime RECORD = 25  # numbers of a record; the last is the host's, for timelines
comptime CODES = 1 << 16  # more than there are ops; the bits of a header from here on say more about the record
comptime ROWS = 16  # the bit of the header that says: the activations are in rows, one sample per group
comptime BEGINS = 17  # the bit of the header that says: sums that the record adds to begin with it
comptime JOINED = 18  # the bit of the header that says: one call computes all shards of a run (`ShardRun`)
comptime DTYPE = 24  # the lowest bit of the header that says how operands are rounded: FP32, TF32, BF16 or FP16
comptime ABSOLUTE = 0  # the space of addresses
comptime PARAMS = 1  # the space of parameters
comptime GRADS = 2  # the space of gradients
comptime WORK = 3  # the space of activations
comptime SPACES = 4  # how many spaces there are
comptime STATS = 32  # floats behind a gradient buffer: sums of loss and metrics, then what ranks compare
comptime OFFSET = (1 << 56) - 1  # the bits of an operand that are its offset, in bytes

comptime EARLIER = 3
"""How many sums of earlier shards a run's sum is added to, at most: with its own, buffers.TERMS."""

# How the operands of a product are rounded before they are multiplied; sums are float32.
# python/odyssey/core/precision.py has their names in this order.
comptime FP32 = 0
comptime TF32 = 1  # 10 bits of mantissa, on a GPU's tensor cores
comptime BF16 = 2
comptime FP16 = 3


@fieldwise_init
struct ShardRun(TrivialRegisterPassable):
    """The shards that a joined record computes in one call, and where the sum of their gradients goes.

    The shards are neighbours: a node of the tree of docs/determinism.md.
    """

    var shards: Int64  # how many
    var apart: Int64  # floats from an operand of one shard, in its workspace, to that of the next
    var sum: Int64  # address of the gradient buffer that the sum goes to
    var before: Int64  # how many of `earlier` there are
    var earlier: SIMD[DType.int64, 4]
    """Addresses of gradient buffers (EARLIER at most) that the sum of the shards is added to, one after the other."""


comptime ShardRunPtr = Pointer[ShardRun, MutUntrackedOrigin]  # a run that the caller keeps alive


@fieldwise_init
struct Context(TrivialRegisterPassable):
    """What a run of a program needs besides addresses. native.py has the same, field by field."""

    var seed: UInt64  # of all random numbers
    var step: Int64  # number of the optimizer step
    var first: Int64  # position of the shard's first sample in the global batch
    var valid: Int64  # samples of this shard that exist
    var images: BytePtr  # the data set, (samples, F)
    var bytes: Int64  # 1 if it is uint8, 0 if float32
    var arrays: LongPtr  # addresses of the arrays that `array` gathers, of numbers of 32 bits (samples, F)
    var rows: LongPtr  # which samples the shard has
    var scale: Ptr  # (C): what a number of the data set is multiplied with
    var shift: Ptr  # (C): what is added then
    var loss_scale: Float64  # what gradients are multiplied by inside a program; a power of two
    var stopped: Int64  # set by a record whose check failed: the program ends there
    var times: LongPtr
    """Where each thread writes when its records ran (executor.mojo, `Times`); address 0: they are not timed."""
    var outputs: LongPtr
    """Addresses of the arrays that `keep` fills, of numbers of 32 bits (samples, F); address 0: nothing is kept."""
    var shard_run: ShardRunPtr
    """The shards that joined records compute together. The executor sets it; no other record reads it."""


comptime ContextPtr = Pointer[Context, MutUntrackedOrigin]  # a context that the caller keeps alive


trait Source:
    """What has the arguments of an op: a record on the CPU, a launch on a GPU. The first argument is number 1."""

    def number(self, i: Int) -> Int64:
        """Argument i as it stands there; 0: the header."""
        ...

    @always_inline
    def int(self, i: Int) -> Int:
        """Argument i as a size."""
        return Int(self.number(i))

    @always_inline
    def float(self, i: Int) -> Float32:
        """Argument i as a float."""
        return bitcast[DType.float32](UInt32(self.number(i) & 0xFFFFFFFF))

    @always_inline
    def dtype(self) -> Int:
        """FP32, TF32, BF16 or FP16."""
        return Int((self.number(0) >> DTYPE) & 0xFF)

    @always_inline
    def ptr(self, i: Int) -> Ptr:
        """The operand that is argument i, as float32; on a GPU that of the first shard."""
        return Ptr(unsafe_from_address=self.address(i))

    def address(self, i: Int) -> Int:
        """Where the operand that is argument i lies."""
        ...

    def stride(self, i: Int) -> Int:
        """Floats from one shard's copy of the operand to the next."""
        ...

    def run(self) -> Int:
        """The address of what the run brings: the context of its device."""
        ...


trait Argument(TrivialRegisterPassable):
    """A type of kernel arguments that is read in a way of its own."""

    @staticmethod
    def read[S: Source](r: S, mut i: Int) -> Self:
        """Of the arguments from i on; i becomes that of the first it does not need."""
        ...


@fieldwise_init
struct Record(Argument, Source):
    """One op with its arguments, as its kernel reads them. As an argument of a kernel it is itself."""

    var at: LongPtr  # its RECORD numbers
    var bases: LongPtr  # base addresses of the SPACES spaces
    var context: ContextPtr  # of the run

    @staticmethod
    @always_inline
    def read[S: Source](r: S, mut i: Int) -> Self:
        return rebind[Self](r)

    @always_inline
    def code(self) -> Int:
        """Which op it is."""
        return Int(self.at[] & (CODES - 1))

    @always_inline
    def rows(self) -> Bool:
        """Whether the activations are in rows."""
        return Bool((self.at[] >> ROWS) & 1)

    @always_inline
    def begins(self) -> Bool:
        """True if what it adds to counts as zeros."""
        return Bool((self.at[] >> BEGINS) & 1)

    @always_inline
    def joined(self) -> Bool:
        """True if one call computes all shards of a run."""
        return Bool((self.at[] >> JOINED) & 1)

    @always_inline
    def shards(self) -> Int:
        """How many shards one call computes. Operands are those of the first of them."""
        return Int(self.context[].shard_run[].shards) if self.joined() else 1

    @always_inline
    def apart(self) -> Int:
        """Floats from an operand of one shard to that of the next."""
        return Int(self.context[].shard_run[].apart) if self.joined() else 0

    @always_inline
    def lanes(self) -> Int:
        """Samples per group."""
        return 1 if self.rows() else LANES

    @always_inline
    def number(self, i: Int) -> Int64:
        return self.at[unsafe_offset=i]

    @always_inline
    def address(self, i: Int) -> Int:
        var v = Int(self.at[unsafe_offset=i])
        return Int(self.bases[unsafe_offset=v >> 56]) + (v & OFFSET)

    @always_inline
    def stride(self, i: Int) -> Int:
        return 0

    @always_inline
    def run(self) -> Int:
        return Int(self.context)


# --- the arguments of a kernel, by the types it declares --------------------------------------------------------------


struct Arguments[Ts: TypeList[Trait=AnyType, ...]]:
    """Room for arguments of the types Ts: Int, Bool, Float32, pointers to numbers, structs of them (one number of the
    record for each of their fields), a pointer to the context of the run, or an `Argument`.

    `read` fills it from a record, in order, and returns them as what `f(*pack)` takes; they live as long as this does.
    """

    comptime Value[T: AnyType]: Movable & Deinitable = downcast[T, TrivialRegisterPassable]
    comptime Place[T: AnyType]: ImplicitlyCopyable & Deinitable = Pointer[T, MutUntrackedOrigin]
    comptime Pack = VariadicPack[origin=MutUntrackedOrigin, element_trait=AnyType, False, *Self.Ts]
    var values: Tuple[*Self.Ts.map[Self.Value]()]
    var places: Tuple[*Self.Ts.map[Self.Place]()]

    @always_inline
    def __init__(out self):
        # Nothing to construct: all types are trivial, and `read` writes every one.
        __mlir_op.`lit.ownership.mark_initialized`(__get_mvalue_as_litref(self))

    @always_inline
    def read[S: Source](mut self, r: S) -> Self.Pack:
        """The arguments of r."""
        var at = 1
        comptime for i in range(Self.Ts.length):
            var place = Pointer(to=self.values[i]).unsafe_origin_cast[MutUntrackedOrigin]()
            self.places[i] = rebind[type_of(self.places[i])](place)
            _read(r, at, rebind[Self.Place[Self.Ts[i]]](place))
        # The language makes packs of arguments that are written out alone; the standard library does this for Python's.
        return Self.Pack(
            __mlir_op.`lit.ref.pack.from_pointer_pack`[_type=Self.Pack._mlir_type](self.places._mlir_value)
        )


@always_inline
def _read[T: AnyType, S: Source](r: S, mut i: Int, to: Pointer[T, MutUntrackedOrigin]):
    comptime if conforms_to(T, Argument):
        comptime A = downcast[T, Argument]
        to.unsafe_bitcast[A]().unsafe_write(A.read(r, i))
        return
    comptime if T == Int:
        to.unsafe_bitcast[Int]()[] = r.int(i)
    elif T == Bool:
        to.unsafe_bitcast[Bool]()[] = r.int(i) != 0
    elif T == Float32:
        to.unsafe_bitcast[Float32]()[] = r.float(i)
    elif T == Ptr or T == IntPtr or T == BytePtr or T == LongPtr:
        to.unsafe_bitcast[Int]()[] = r.address(i)
    elif reflect[T].base_name() == "Pointer":
        to.unsafe_bitcast[Int]()[] = r.run()
        return
    else:
        comptime for field in range(reflect[T].field_count()):
            ref place = reflect[T].field_ref[field](to[])
            _read(r, i, Pointer(to=place).unsafe_origin_cast[MutUntrackedOrigin]())
        return
    i += 1


@always_inline
def sizes_of[S: Source, //, T: TrivialRegisterPassable](r: S, i: Int) -> T:
    """The arguments from i on as a T."""
    var value = Array[T, 1](uninitialized=True)
    var at = i
    _read(r, at, value.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())
    return value[0]
