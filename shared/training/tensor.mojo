"""Tensors whose sample shape and place are in their type, and the functions of them that have no parameters.

`Tensor[6, 14, 14]` is a batch of samples of 6 channels of 14 x 14, `Tensor[400]` one of 400 features each,
`Tensor[400, device=1]` one that is on place 1. The size of the batch is not part of the type: forward() is written for
any. A mistake in sizes or places does not compile.
"""

from std.python import ConvertibleToPython, Python, PythonObject

from .bridge import Value, odyssey, part


@fieldwise_init
struct Shape(ConvertibleToPython, Equatable, ImplicitlyCopyable, Movable, Writable):
    """The shape of a sample and its place, as numbers that the compiler computes with."""

    var channels: Int
    """C, or the number of features."""
    var height: Int
    """H."""
    var width: Int
    """W."""
    var device: Int
    """The place."""

    def features(self) -> Int:
        """Numbers of a sample."""
        return self.channels * self.height * self.width

    def to_python_object(var self) raises -> PythonObject:
        """The four numbers as a tuple."""
        return Python.tuple(self.channels, self.height, self.width, self.device)


trait AnyTensor(Deinitable, ImplicitlyCopyable, Movable):
    """A tensor of some sample shape on some place."""

    comptime SHAPE: Shape
    """The shape of a sample, and the place."""

    def __init__(out self, value: Value):
        """Covers a Python tensor of this shape; forward() gets tensors and has no need of it."""
        ...

    def value(self) -> Value:
        """The Python tensor."""
        ...


struct PlacedTensor[channels: Int, height: Int = 1, width: Int = 1, *, place: Int = 0, of: StaticString = "samples"](
    AnyTensor
):
    """A batch of samples on a place.

    Write Tensor[...], which names the place `device`.

    The two names differ because Mojo refuses `to(device=1)` in a type that has a parameter `device`.
    """

    comptime SHAPE = Shape(Self.channels, Self.height, Self.width, Self.place)
    var _value: Value

    def __init__(out self, value: Value):
        """Covers a Python tensor of this shape; forward() gets tensors and has no need of it."""
        self._value = value

    def value(self) -> Value:
        return self._value

    def to[
        v: __mlir_type.`!pop.int_literal`, //
    ](self, *, device: IntLiteral[v]) raises -> PlacedTensor[
        Self.channels, Self.height, Self.width, place=Int(IntLiteral[v]()), of=Self.of
    ]:
        """The same numbers on another place, which must be written as a number: x.to(device=1).

        The gradient goes the way back.
        """
        return {self._value.to(Int(IntLiteral[v]()))}

    def to[
        where_to: Int
    ](self) raises -> PlacedTensor[Self.channels, Self.height, Self.width, place=where_to, of=Self.of]:
        """The same for a place that is computed: x.to[n + 1]()."""
        return {self._value.to(where_to)}

    def __add__(self, other: Self) raises -> Self:
        """The sum, element by element."""
        return {self._value + other._value}

    def __sub__(self, other: Self) raises -> Self:
        """The difference, element by element."""
        return {self._value - other._value}

    def __mul__(self, other: Self) raises -> Self:
        """The product, element by element."""
        return {self._value * other._value}

    def __mul__(self, factor: Float64) raises -> Self:
        """Every element times a number."""
        return {self._value * PythonObject(factor)}


comptime Tensor[
    channels: Int, height: Int = 1, width: Int = 1, *, device: Int = 0, of: StaticString = "samples"
] = PlacedTensor[channels, height, width, place=device, of=of]
"""A batch of samples of (channels, height, width), or of `channels` features, on a place."""
comptime Ids[length: Int, *, device: Int = 0] = Tensor[length, device=device, of="ids"]
"""A batch of sequences of `length` whole numbers, such as the ids of tokens, on a place."""
comptime Tokens[length: Int, features: Int, *, device: Int = 0] = Tensor[length, features, device=device, of="tokens"]
"""A batch of sequences of `length` tokens of so many features, on a place."""
comptime Windows[n: Int, size: Int, stride: Int, padding: Int = 0] = (n + 2 * padding - size) / stride + 1
"""Number of windows of `size` along an axis of n numbers."""


def flatten[c: Int, h: Int, w: Int, d: Int, //](x: Tensor[c, h, w, device=d]) raises -> Tensor[c * h * w, device=d]:
    """Samples of (C, H, W) as samples of C H W features, without a copy."""
    return {x.value().flatten()}


def pooled[
    c: Int, h: Int, w: Int, d: Int, //, function: StaticString, size: Int, *, stride: Int = size
](x: Tensor[c, h, w, device=d]) raises -> Tensor[c, Windows[h, size, stride], Windows[w, size, stride], device=d]:
    """One number of each window of `size` x `size`, by a function of odyssey.functional."""
    return {part("functional").__getattr__(String(function))(x.value(), size, stride)}


comptime max_pool2d = pooled["max_pool2d", ...]
"""The largest number of each window: max_pool2d[size, stride=size](x)."""
comptime avg_pool2d = pooled["avg_pool2d", ...]
"""The mean of each window: avg_pool2d[size, stride=size](x)."""


def elementwise[function: StaticString, T: AnyTensor](x: T) raises -> T:
    """A function of odyssey.functional that keeps the shape."""
    return T(part("functional").__getattr__(String(function))(x.value()))


comptime relu = elementwise["relu", ...]
"""The larger of each number and 0."""
comptime gelu = elementwise["gelu", ...]
"""x times the normal distribution function of x."""
comptime tanh = elementwise["tanh", ...]
"""Hyperbolic tangent."""
comptime sigmoid = elementwise["sigmoid", ...]
"""1 / (1 + exp(-x))."""
comptime softmax = elementwise["softmax", ...]
"""Softmax over the features of a sample."""
comptime log_softmax = elementwise["log_softmax", ...]
"""Logarithm of the softmax over the features of a sample."""


def dropout[T: AnyTensor](x: T, p: Float64 = 0.5) raises -> T:
    """Zeroes elements with probability p, and divides the others by 1 - p, while training.

    The mask is a function of seed, step, position of the sample in the global batch, number of the dropout in the model
    and element: the same on any number of ranks.
    """
    return T(odyssey().dropout(x.value(), p))
