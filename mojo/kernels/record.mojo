"""A record: one op of a program, with its arguments; and what a run of a program brings to it.

A record is RECORD int64 numbers: a header and the arguments. The header has the op's code in its low 16 bits (its place
in the table, shared/training/ops.mojo), 1 << 16 if the activations are in rows instead of lanes (lanes.mojo), and in the
bits from 24 on how the operands of products are rounded. An argument is a size, a float (its 32 bits) or an operand: a
byte offset in the low 56 bits and a space in the high 8. A space is an entry of the table of base addresses that comes
with a run, so one program serves every shard, thread and process:

    ABSOLUTE   base 0: the offset is an address (how Python runs a single op)
    PARAMS     the arena of parameters
    GRADS      the gradient buffer of this shard: the arena's layout, then STATS floats (loss, samples, correct, -)
    WORK       the workspace of this thread

What changes from shard to shard without being an address is in the context (`Context`).
"""

from std.memory import bitcast

from .lanes import BytePtr, IntPtr, LANES, LongPtr, Ptr

comptime RECORD = 24
"""Numbers of a record."""
comptime CODES = 1 << 16
"""More than there are ops; the bits of a header from here on say more about the record."""
comptime ROWS = 16
"""The bit of the header that says: the activations are in rows, one sample per group."""
comptime DTYPE = 24
"""The lowest bit of the header that says how operands are rounded: FP32, TF32, BF16 or FP16."""
comptime ABSOLUTE = 0
"""The space of addresses."""
comptime PARAMS = 1
"""The space of parameters."""
comptime GRADS = 2
"""The space of gradients."""
comptime WORK = 3
"""The space of activations."""
comptime SPACES = 4
"""How many spaces there are."""
comptime STATS = 16
"""Floats behind a gradient buffer, one vector."""
comptime OFFSET = (1 << 56) - 1
"""The bits of an operand that are its offset, in bytes."""

# How the operands of a product are rounded before they are multiplied; sums are float32. python/odyssey/core/precision.py
# has their names in this order.
comptime FP32 = 0
comptime TF32 = 1  # 10 bits of mantissa, on a GPU's tensor cores
comptime BF16 = 2
comptime FP16 = 3


@fieldwise_init
struct Context(TrivialRegisterPassable):
    """What a run of a program needs besides addresses. native.py has the same, field by field.
    """

    var seed: UInt64
    """Of all random numbers."""
    var step: Int64
    """Number of the optimizer step."""
    var first: Int64
    """Position of the shard's first sample in the global batch."""
    var valid: Int64
    """Samples of this shard that exist."""
    var images: Int64
    """Address of the data set, (samples, F)."""
    var bytes: Int64
    """1 if it is uint8, 0 if float32."""
    var arrays: Int64
    """Address, int64: where the arrays are that `array` gathers, of numbers of 32 bits (samples, F).
    """
    var rows: Int64
    """Address, int64: which samples the shard has."""
    var scale: Int64
    """Address, float32 (C): what a number of the data set is multiplied with."""
    var shift: Int64
    """Address, float32 (C): what is added then."""
    var loss_scale: Float64
    """What gradients are multiplied by inside a program; a power of two."""
    var stopped: Int64
    """Set by a record whose check failed: the program ends there."""


comptime ContextPtr = Pointer[Context, MutUntrackedOrigin]
"""A context that the caller keeps alive."""


@fieldwise_init
struct Record(TrivialRegisterPassable):
    """One op with its arguments, as its kernel reads them; the first argument is number 1.
    """

    var at: LongPtr
    """Its RECORD numbers."""
    var bases: LongPtr
    """Base addresses of the SPACES spaces."""
    var context: ContextPtr
    """Of the run."""

    @always_inline
    def code(self) -> Int:
        """Which op it is."""
        return Int(self.at[] & (CODES - 1))

    @always_inline
    def rows(self) -> Bool:
        """Whether the activations are in rows."""
        return Bool((self.at[] >> ROWS) & 1)

    @always_inline
    def lanes(self) -> Int:
        """Samples per group."""
        return 1 if self.rows() else LANES

    @always_inline
    def dtype(self) -> Int:
        """FP32, TF32, BF16 or FP16."""
        return Int((self.at[] >> DTYPE) & 0xFF)

    @always_inline
    def int(self, i: Int) -> Int:
        """Argument i as a size."""
        return Int(self.at[unsafe_offset=i])

    @always_inline
    def float(self, i: Int) -> Float32:
        """Argument i as a float."""
        return bitcast[DType.float32](
            UInt32(self.at[unsafe_offset=i] & 0xFFFFFFFF)
        )

    @always_inline
    def address(self, i: Int) -> Int:
        """Where the operand that is argument i lies."""
        var v = Int(self.at[unsafe_offset=i])
        return Int(self.bases[unsafe_offset=v >> 56]) + (v & OFFSET)

    @always_inline
    def ptr(self, i: Int) -> Ptr:
        """The operand that is argument i, as float32."""
        return Ptr(unsafe_from_address=self.address(i))

    @always_inline
    def ints(self, i: Int) -> IntPtr:
        """The operand that is argument i, as int32."""
        return IntPtr(unsafe_from_address=self.address(i))

    @always_inline
    def bytes(self, i: Int) -> BytePtr:
        """The operand that is argument i, as bytes."""
        return BytePtr(unsafe_from_address=self.address(i))
