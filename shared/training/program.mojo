"""Programs: records with symbolic operands, written by hand or made of what a tape holds.

`compiled` makes a tape a program as python/odyssey/program.py does: pairs of ops become one where that changes no bit,
and the memory of one shard is laid out in a workspace.
"""

from std.memory import bitcast

from kernels.layout import LongPtr

from .record import GRADS, PARAMS, RECORD, WORK

comptime ALIGNMENT = 64
"""Bytes of a vector; every piece of workspace begins on one."""


def operand(space: Int, offset: Int) -> Int:
    """A place as a record holds it.

    Args:
        space: One of the spaces of record.mojo.
        offset: In bytes.

    Returns:
        The operand.
    """
    return space << 56 | offset


def float_bits(x: Float32) -> Int:
    """A float as a record holds it.

    Args:
        x: The float.

    Returns:
        Its bits.
    """
    return Int(bitcast[DType.uint32](x))


struct Program(Movable, Sized):
    """The recorded list of kernel calls of one pass over one shard."""

    var records: List[Int64]
    """RECORD numbers for each."""
    var work_bytes: Int
    """Bytes of workspace that one thread needs."""

    def __init__(out self):
        """An empty program."""
        self.records = List[Int64]()
        self.work_bytes = 0

    def __len__(self) -> Int:
        """How many records there are.

        Returns:
            The number.
        """
        return len(self.records) // RECORD

    def emit(mut self, op: Int, *args: Int):
        """Appends one record.

        Args:
            op: An op code (ops.code).
            args: Its arguments in the order of ops.mojo.
        """
        self.records.append(Int64(op))
        for a in args:
            self.records.append(Int64(a))
        for _ in range(RECORD - 1 - len(args)):
            self.records.append(0)

    def append(mut self, op: Int, args: List[Int]):
        """The same from a list.

        Args:
            op: An op code.
            args: Its arguments.
        """
        self.records.append(Int64(op))
        for a in args:
            self.records.append(Int64(a))
        for _ in range(RECORD - 1 - len(args)):
            self.records.append(0)

    def workspace(mut self, floats: Int) -> Int:
        """A new piece of workspace, as an operand.

        Args:
            floats: How many.

        Returns:
            The operand.
        """
        var at = self.work_bytes
        self.work_bytes += (4 * floats + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return operand(WORK, at)

    def address(ref self) -> LongPtr:
        """Where the records are; valid until the next emit and while the program lives.

        Returns:
            The address.
        """
        return LongPtr(unsafe_from_address=Int(self.records.unsafe_ptr()))
