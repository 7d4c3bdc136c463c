"""The tape: what the forward pass of one shard wrote down, as records without addresses and as ops to go back through.

A model's forward() runs once, on values that hold no numbers (value.mojo). Each op appends its record here and, if a
gradient is wanted, a node from which backward.mojo derives the backward pass. program.mojo turns the records into a
program. The records are those of python/odyssey/functional.py, in the same order, so the bits are the same.
"""

from std.math import ceildiv

from kernels.lanes import LANES

from .record import GRADS, PARAMS
from .program import operand

comptime SMALL_BATCH = 4
"""A batch of at most so many samples stays in rows: most lanes would be empty (python/odyssey/tensor.py)."""

comptime NUMBER = 0
"""An argument as it stands: a size, or the bits of a float."""
comptime SLOT = 1
"""Memory of the program, by its number."""
comptime PLACE = 2
"""An operand in the arena or the gradients."""

comptime RESHAPE = -1
"""Node that has no record: the same memory in another shape."""


@fieldwise_init
struct Arg(TrivialRegisterPassable):
    """An argument of a record that has no place in the workspace yet."""

    var kind: Int
    """NUMBER, SLOT or PLACE."""
    var value: Int
    """The number, the number of the memory, or the operand."""

    @implicit
    def __init__(out self, number: Int):
        """A number as it stands.

        Args:
            number: A size, or the bits of a float.
        """
        self.kind = NUMBER
        self.value = number


@fieldwise_init
struct Entry(Copyable, Movable):
    """One record: the op's code, its arguments, whether activations are in rows, and where and when it runs.
    """

    var op: Int
    """The op code."""
    var args: List[Arg]
    """In the order of the op table."""
    var rows: Bool
    """Whether its activations are in rows."""
    var device: Int
    """The place it runs on."""
    var backward: Bool
    """Whether it belongs to the backward pass."""


@fieldwise_init
struct Info(Copyable, Movable):
    """What is known of a value: its memory, the shape of a sample, its place and the op that made it.
    """

    var memory: Arg
    """Where its numbers will be."""
    var channels: Int
    """Of a sample; or its features."""
    var height: Int
    """Of a sample; 1 for features."""
    var width: Int
    """Of a sample; 1 for features."""
    var device: Int
    """Its place."""
    var floats: Int
    """Floats of its memory, unused lanes included."""
    var node: Int
    """The op that made it; -1: nothing that a gradient goes back to."""

    def features(self) -> Int:
        """Numbers per sample.

        Returns:
            Channels * height * width.
        """
        return self.channels * self.height * self.width


@fieldwise_init
struct Node(Copyable, Movable):
    """An op to go back through: its code, its input values, and what its backward needs.
    """

    var op: Int
    """The code of the forward op."""
    var inputs: List[Int]
    """Numbers of the values it was computed from."""
    var saved: List[Arg]
    """Memory that its backward reads."""
    var sizes: List[Int]
    """Sizes that its backward is told, and bits of floats."""


struct Tape(Movable):
    """The recording of one shard of `samples` samples, for a model of `arena` floats of parameters.
    """

    var samples: Int
    """Of the shard."""
    var arena: Int
    """Floats of all parameters; the statistics are behind so many."""
    var training: Bool
    """Whether there is to be a backward pass, and dropout."""
    var rows: Bool
    """Whether the batch is small enough to stay in rows."""
    var groups: Int
    """Groups of lanes: G of kernels/lanes.mojo."""
    var lanes: Int
    """Samples of a group: L."""
    var entries: List[Entry]
    """The records so far."""
    var slots: List[Int]
    """Bytes of each piece of memory."""
    var values: List[Info]
    """The values so far."""
    var nodes: List[Node]
    """The ops to go back through, so far."""
    var dropouts: Int
    """Dropouts so far, so that no two draw the same mask."""
    var outputs: Int
    """Classes that the loss saw."""
    var device: Int
    """Where the next record runs; a copy is its destination's, its backward the source's."""
    var backward: Bool
    """Whether the next record belongs to the backward pass."""

    def __init__(out self, samples: Int, arena: Int, training: Bool):
        """An empty tape; dropout and gradients are there if it is for `training`.

        Args:
            samples: Of the shard.
            arena: Floats of all parameters.
            training: Whether it trains.
        """
        self.samples = samples
        self.arena = arena
        self.training = training
        self.rows = samples <= SMALL_BATCH
        self.lanes = 1 if self.rows else LANES
        self.groups = ceildiv(samples, self.lanes)
        self.entries = List[Entry]()
        self.slots = List[Int]()
        self.values = List[Info]()
        self.nodes = List[Node]()
        self.dropouts = 0
        self.outputs = 0
        self.device = 0
        self.backward = False

    def emit(mut self, op: Int, *args: Arg, rows: Bool = False):
        """Appends a record; `rows` for ops to which the layout of activations matters.

        Args:
            op: Its code.
            args: In the order of the op table.
            rows: Whether the record says so if the batch is in rows.
        """
        var list = List[Arg](capacity=len(args))
        for a in args:
            list.append(a)
        self.entries.append(
            Entry(op, list^, rows and self.rows, self.device, self.backward)
        )

    def alloc(mut self, bytes: Int) -> Arg:
        """New memory of the program.

        Args:
            bytes: How many.

        Returns:
            The memory.
        """
        self.slots.append(bytes)
        return Arg(SLOT, len(self.slots) - 1)

    def activation(mut self, features: Int) -> Arg:
        """Memory of so many numbers per sample.

        Args:
            features: Numbers per sample.

        Returns:
            The memory.
        """
        return self.alloc(max(4 * self.floats(features), 16))

    def floats(self, features: Int) -> Int:
        """Floats in memory of so many numbers per sample.

        Args:
            features: Numbers per sample.

        Returns:
            Floats, unused lanes included.
        """
        return self.groups * features * self.lanes

    def param(self, at: Int) -> Arg:
        """The parameter at so many floats of the arena.

        Args:
            at: Floats before it.

        Returns:
            The place.
        """
        return Arg(PLACE, operand(PARAMS, 4 * at))

    def grad(self, at: Int) -> Arg:
        """Its gradient, or the statistics behind them.

        Args:
            at: Floats before it.

        Returns:
            The place.
        """
        return Arg(PLACE, operand(GRADS, 4 * at))

    def new(
        mut self,
        memory: Arg,
        channels: Int,
        height: Int = 1,
        width: Int = 1,
        device: Int = 0,
    ) -> Int:
        """A value over memory, with samples of this shape.

        Args:
            memory: Its numbers.
            channels: Or features.
            height: 1 for features.
            width: 1 for features.
            device: Its place.

        Returns:
            Its number.
        """
        var floats = self.floats(channels * height * width)
        self.values.append(
            Info(memory, channels, height, width, device, floats, -1)
        )
        return len(self.values) - 1

    def wants(self, value: Int) -> Bool:
        """Whether a gradient goes back to a value.

        Args:
            value: Its number.

        Returns:
            Whether one does.
        """
        return self.values[value].node >= 0

    def attach(
        mut self,
        out_value: Int,
        op: Int,
        var inputs: List[Int],
        var saved: List[Arg],
        var sizes: List[Int],
        parameters: Bool = False,
    ):
        """Completes an op: the tape keeps it if an input wants a gradient or it has parameters.

        Args:
            out_value: The number of the value that it made.
            op: Its code.
            inputs: Numbers of the values it was computed from.
            saved: Memory that its backward reads.
            sizes: Sizes that its backward is told.
            parameters: Whether it has parameters.
        """
        var wanted = parameters
        for i in inputs:
            wanted = wanted or self.wants(i)
        if wanted and self.training:
            self.nodes.append(Node(op, inputs^, saved^, sizes^))
            self.values[out_value].node = len(self.nodes) - 1
