"""A record: one op of a program, with its arguments; and what a run of a program brings to it.

A record is RECORD int64 numbers: an op code (ops.mojo), plus ROWS if its activations are in rows instead of lanes
(kernels/lanes.mojo), and its arguments. An argument is a size, a float (its 32 bits) or an
operand: a byte offset in the low 56 bits and a space in the high 8. A space is an entry of the table of base addresses
that comes with a run, so one program serves every shard, thread and process:

    ABSOLUTE   base 0: the offset is an address (how Python runs a single op)
    PARAMS     the arena of parameters
    GRADS      the gradient buffer of this shard: the arena's layout, then STATS floats (loss, samples, correct, -)
    WORK       the workspace of this thread

What changes from shard to shard without being an address is in the context (`Context`).
"""

from std.memory import bitcast

from kernels.lanes import BytePtr, IntPtr, Ptr
from kernels.layout import LongPtr

comptime RECORD = 24
"""Numbers of a record."""
comptime ROWS = 1 << 16
"""Added to an op code: the activations are in rows, one sample per group."""
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
    var labels: Int64
    """Address, int32 (samples)."""
    var rows: Int64
    """Address, int64: which samples the shard has."""
    var scale: Int64
    """Address, float32 (C): what a number of the data set is multiplied with."""
    var shift: Int64
    """Address, float32 (C): what is added then."""
    var loss_scale: Float64
    """What gradients are multiplied by inside a program; a power of two."""


comptime ContextPtr = Pointer[Context, MutUntrackedOrigin]
"""A context that the caller keeps alive."""


@fieldwise_init
struct Record(TrivialRegisterPassable):
    """One op with its arguments, as a kernel call reads them. Argument 0 is the op code.
    """

    var at: LongPtr
    """Its RECORD numbers."""
    var bases: LongPtr
    """Base addresses of the SPACES spaces."""

    @always_inline
    def int(self, i: Int) -> Int:
        """Argument i as a size.

        Args:
            i: From 1.

        Returns:
            The size.
        """
        return Int(self.at[unsafe_offset=i])

    @always_inline
    def float(self, i: Int) -> Float32:
        """Argument i as a float.

        Args:
            i: From 1.

        Returns:
            The float.
        """
        return bitcast[DType.float32](
            UInt32(self.at[unsafe_offset=i] & 0xFFFFFFFF)
        )

    @always_inline
    def address(self, i: Int) -> Int:
        """Where the operand that is argument i lies.

        Args:
            i: From 1.

        Returns:
            The address.
        """
        var v = Int(self.at[unsafe_offset=i])
        return Int(self.bases[unsafe_offset=v >> 56]) + (v & OFFSET)

    @always_inline
    def ptr(self, i: Int) -> Ptr:
        """The operand that is argument i, as float32.

        Args:
            i: From 1.

        Returns:
            Where it lies.
        """
        return Ptr(unsafe_from_address=self.address(i))

    @always_inline
    def ints(self, i: Int) -> IntPtr:
        """The operand that is argument i, as int32.

        Args:
            i: From 1.

        Returns:
            Where it lies.
        """
        return IntPtr(unsafe_from_address=self.address(i))

    @always_inline
    def bytes(self, i: Int) -> BytePtr:
        """The operand that is argument i, as bytes.

        Args:
            i: From 1.

        Returns:
            Where it lies.
        """
        return BytePtr(unsafe_from_address=self.address(i))
