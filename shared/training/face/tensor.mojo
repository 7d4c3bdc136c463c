"""Tensors whose sample shape and place are in their type, and the functions of them that have no parameters.

`Tensor[6, 14, 14]` is a batch of samples of 6 channels of 14 x 14, `Tensor[400]` one of 400 features each,
`Tensor[400, device=1]` one that is on place 1. The size of the batch is not part of the type: forward() is written for
any. A mistake in sizes or places does not compile.
"""

from std.python import PythonObject

from .bridge import Value, odyssey, part


trait AnyTensor(Deinitable, ImplicitlyCopyable, Movable):
    """A tensor of some sample shape on some place."""

    comptime CHANNELS: Int
    """Channels, or features if it has no other axes."""
    comptime HEIGHT: Int
    """Rows of a channel."""
    comptime WIDTH: Int
    """Columns of a channel."""
    comptime DEVICE: Int
    """The place."""

    def __init__(out self, value: Value):
        """Covers a Python tensor of this shape."""
        ...

    def value(self) -> Value:
        """The Python tensor."""
        ...


struct Tensor[channels: Int, height: Int = 1, width: Int = 1, *, device: Int = 0](AnyTensor):
    """A batch of samples of (channels, height, width), or of `channels` features, on a place."""

    comptime CHANNELS = Self.channels
    """Channels, or features if it has no other axes."""
    comptime HEIGHT = Self.height
    """Rows of a channel."""
    comptime WIDTH = Self.width
    """Columns of a channel."""
    comptime DEVICE = Self.device
    """The place."""
    var _value: Value

    def __init__(out self, value: Value):
        """Covers a Python tensor of this shape; forward() gets tensors and has no need of it."""
        self._value = value

    def value(self) -> Value:
        """The Python tensor."""
        return self._value

    def to[where_to: Int](self) raises -> Tensor[Self.channels, Self.height, Self.width, device=where_to]:
        """The same numbers on another place; the gradient goes the way back."""
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


struct Ids[length: Int, *, device: Int = 0](AnyTensor):
    """A batch of sequences of `length` whole numbers, such as the ids of tokens, on a place."""

    comptime CHANNELS = Self.length
    """Numbers of a sequence."""
    comptime HEIGHT = 1
    """1."""
    comptime WIDTH = 1
    """1."""
    comptime DEVICE = Self.device
    """The place."""
    var _value: Value

    def __init__(out self, value: Value):
        """Covers a Python tensor of this shape."""
        self._value = value

    def value(self) -> Value:
        """The Python tensor."""
        return self._value


struct Tokens[length: Int, features: Int, *, device: Int = 0](AnyTensor):
    """A batch of sequences of `length` tokens of so many features, on a place."""

    comptime CHANNELS = Self.length
    """Tokens of a sequence."""
    comptime HEIGHT = Self.features
    """Features of a token."""
    comptime WIDTH = 1
    """1."""
    comptime DEVICE = Self.device
    """The place."""
    var _value: Value

    def __init__(out self, value: Value):
        """Covers a Python tensor of this shape."""
        self._value = value

    def value(self) -> Value:
        """The Python tensor."""
        return self._value

    def __add__(self, other: Self) raises -> Self:
        """The sum, element by element."""
        return {self._value + other._value}


def flatten[c: Int, h: Int, w: Int, d: Int, //](x: Tensor[c, h, w, device=d]) raises -> Tensor[c * h * w, device=d]:
    """Samples of (C, H, W) as samples of C H W features, without a copy."""
    return {x.value().flatten()}


def max_pool2d[
    c: Int, h: Int, w: Int, d: Int, //, size: Int, *, stride: Int = size
](x: Tensor[c, h, w, device=d]) raises -> Tensor[c, (h - size) / stride + 1, (w - size) / stride + 1, device=d]:
    """The largest number of each window of `size` x `size`."""
    return {part("functional").max_pool2d(x.value(), size, stride)}


def avg_pool2d[
    c: Int, h: Int, w: Int, d: Int, //, size: Int, *, stride: Int = size
](x: Tensor[c, h, w, device=d]) raises -> Tensor[c, (h - size) / stride + 1, (w - size) / stride + 1, device=d]:
    """The mean of each window of `size` x `size`."""
    return {part("functional").avg_pool2d(x.value(), size, stride)}


def relu[T: AnyTensor](x: T) raises -> T:
    """The larger of each number and 0."""
    return T(part("functional").relu(x.value()))


def gelu[T: AnyTensor](x: T) raises -> T:
    """x times the normal distribution function of x."""
    return T(part("functional").gelu(x.value()))


def tanh[T: AnyTensor](x: T) raises -> T:
    """Hyperbolic tangent."""
    return T(part("functional").tanh(x.value()))


def sigmoid[T: AnyTensor](x: T) raises -> T:
    """1 / (1 + exp(-x))."""
    return T(part("functional").sigmoid(x.value()))


def softmax[T: AnyTensor](x: T) raises -> T:
    """Softmax over the features of a sample."""
    return T(part("functional").softmax(x.value()))


def log_softmax[T: AnyTensor](x: T) raises -> T:
    """Logarithm of the softmax over the features of a sample."""
    return T(part("functional").log_softmax(x.value()))


def dropout[T: AnyTensor](x: T, p: Float64 = 0.5) raises -> T:
    """Zeroes elements with probability p, and divides the others by 1 - p, while training.

    The mask is a function of seed, step, position of the sample in the global batch, number of the dropout in the model
    and element: the same on any number of ranks.
    """
    return T(odyssey().dropout(x.value(), p))
