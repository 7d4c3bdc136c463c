"""The tape: what the forward pass of one shard wrote down, as records without addresses and as ops to go back through.

A model's forward() runs once, on values that hold no numbers (value.mojo). Each op appends its record here and, if a
gradient is wanted, a node from which backward.mojo derives the backward pass. program.mojo turns the records into a
program. The records are those of python/odyssey/functional.py, in the same order, so the bits are the same.
"""

from std.math import ceildiv

from kernels.lanes import LANES

from .ops import GRADS, PARAMS
from .program import operand

# A batch of at most so many samples stays in rows: most lanes would be empty (python/odyssey/tensor.py).
comptime SMALL_BATCH = 4

comptime NUMBER = 0  # an argument as it stands: a size, or the bits of a float
comptime SLOT = 1  # memory of the program, by its number
comptime PLACE = 2  # an operand in the arena or the gradients

comptime RESHAPE = -1  # node that has no record: the same memory in another shape


@fieldwise_init
struct Arg(TrivialRegisterPassable):
    """An argument of a record that has no place in the workspace yet."""

    var kind: Int
    var value: Int

    @implicit
    def __init__(out self, number: Int):
        """A number as it stands."""
        self.kind = NUMBER
        self.value = number


@fieldwise_init
struct Entry(Copyable, Movable):
    """One record: the op's code, its arguments, whether activations are in rows, and where and when it runs.
    """

    var op: Int
    var args: List[Arg]
    var rows: Bool
    var device: Int
    var backward: Bool


@fieldwise_init
struct Info(Copyable, Movable):
    """What is known of a value: its memory, the shape of a sample, its place and the op that made it.
    """

    var memory: Arg
    var channels: Int
    var height: Int
    var width: Int
    var device: Int
    var floats: Int  # in memory, unused lanes included
    var node: Int  # -1: nothing that a gradient goes back to

    def features(self) -> Int:
        """Numbers per sample."""
        return self.channels * self.height * self.width


@fieldwise_init
struct Node(Copyable, Movable):
    """An op to go back through: its code, its input values, and what its backward needs.
    """

    var op: Int
    var inputs: List[Int]
    var saved: List[Arg]
    var sizes: List[Int]


struct Tape(Movable):
    """The recording of one shard of `samples` samples, for a model of `arena` floats of parameters.
    """

    var samples: Int
    var arena: Int
    var training: Bool
    var rows: Bool
    var groups: Int  # G of kernels/lanes.mojo
    var lanes: Int  # L
    var entries: List[Entry]
    var slots: List[Int]  # bytes of each
    var values: List[Info]
    var nodes: List[Node]
    var dropouts: Int  # so far, so that no two draw the same mask
    var outputs: Int  # classes that the loss saw
    var device: Int  # where the next record runs; a copy is its destination's, its backward the source's
    var backward: Bool  # whether it belongs to the backward pass

    def __init__(out self, samples: Int, arena: Int, training: Bool):
        """An empty tape; dropout and gradients are there if it is for `training`.
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
        """
        var list = List[Arg](capacity=len(args))
        for a in args:
            list.append(a)
        self.entries.append(
            Entry(op, list^, rows and self.rows, self.device, self.backward)
        )

    def alloc(mut self, bytes: Int) -> Arg:
        """New memory of the program."""
        self.slots.append(bytes)
        return Arg(SLOT, len(self.slots) - 1)

    def activation(mut self, features: Int) -> Arg:
        """Memory of so many numbers per sample."""
        return self.alloc(max(4 * self.floats(features), 16))

    def floats(self, features: Int) -> Int:
        """Floats in memory of so many numbers per sample."""
        return self.groups * features * self.lanes

    def param(self, at: Int) -> Arg:
        """The parameter at so many floats of the arena."""
        return Arg(PLACE, operand(PARAMS, 4 * at))

    def grad(self, at: Int) -> Arg:
        """Its gradient, or the statistics behind them."""
        return Arg(PLACE, operand(GRADS, 4 * at))

    def new(
        mut self,
        memory: Arg,
        channels: Int,
        height: Int = 1,
        width: Int = 1,
        device: Int = 0,
    ) -> Int:
        """A value over memory, with samples of this shape; returns its number.
        """
        var floats = self.floats(channels * height * width)
        self.values.append(
            Info(memory, channels, height, width, device, floats, -1)
        )
        return len(self.values) - 1

    def wants(self, value: Int) -> Bool:
        """Whether a gradient goes back to a value."""
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
        """
        var wanted = parameters
        for i in inputs:
            wanted = wanted or self.wants(i)
        if wanted and self.training:
            self.nodes.append(Node(op, inputs^, saved^, sizes^))
            self.values[out_value].node = len(self.nodes) - 1
