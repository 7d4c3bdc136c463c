"""Tensors whose sample shape and place are in their type, and the functions of them that have no parameters.

`Tensor[6, 14, 14]` is a batch of samples of 6 channels of 14 x 14, `Tensor[400]` one of 400 features each,
`Tensor[400, device=1]` one that is on place 1. The size of the batch is not part of the type: forward() is written for
any. A mistake in sizes or places does not compile. While a model is traced a tensor holds no numbers (value.mojo).
"""

from .value import Value


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
        """A cover of a value of this shape.

        Args:
            value: The value.
        """
        ...

    def value(self) -> Value:
        """The value without its type.

        Returns:
            The value.
        """
        ...


struct Tensor[
    channels: Int, height: Int = 1, width: Int = 1, *, device: Int = 0
](AnyTensor):
    """A batch of samples.

    Parameters:
        channels: C of samples (C, H, W), or the number of features.
        height: H.
        width: W.
        device: The place it is on.
    """

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
        """A cover of a value of this shape; forward() gets tensors and has no need of it.

        Args:
            value: The value.
        """
        self._value = value

    def value(self) -> Value:
        """The value without its type.

        Returns:
            The value.
        """
        return self._value

    def to[
        where_to: Int
    ](self) -> Tensor[Self.channels, Self.height, Self.width, device=where_to]:
        """The same numbers on another place; the gradient goes the way back.

        Parameters:
            where_to: The place.

        Returns:
            The tensor there.
        """
        return {self._value.to(where_to)}

    def __add__(self, other: Self) raises -> Self:
        """Element by element.

        Args:
            other: Of the same shape.

        Returns:
            The sum.

        Raises:
            Error: It is not allowed.
        """
        return {self._value.add(other._value)}

    def __mul__(self, other: Self) raises -> Self:
        """Element by element.

        Args:
            other: Of the same shape.

        Returns:
            The product.

        Raises:
            Error: It is not allowed.
        """
        return {self._value.multiply(other._value)}

    def __mul__(self, factor: Float64) -> Self:
        """Every element times a number.

        Args:
            factor: The number.

        Returns:
            The product.
        """
        return {self._value.scale(factor)}

    def __sub__(self, other: Self) raises -> Self:
        """Element by element.

        Args:
            other: Of the same shape.

        Returns:
            The difference.

        Raises:
            Error: It is not allowed.
        """
        return {self._value.add(other._value.scale(-1))}


def flatten[
    c: Int, h: Int, w: Int, d: Int, //
](x: Tensor[c, h, w, device=d]) -> Tensor[c * h * w, device=d]:
    """Samples of (C, H, W) as samples of C H W features, without a copy.

    Args:
        x: The input.

    Returns:
        Of the same batch.
    """
    return {x.value().flatten()}


def max_pool2d[
    c: Int, h: Int, w: Int, d: Int, //, size: Int, *, stride: Int = size
](x: Tensor[c, h, w, device=d]) raises -> Tensor[
    c, (h - size) / stride + 1, (w - size) / stride + 1, device=d
]:
    """The largest number of each window.

    Parameters:
        c: Channels.
        h: Height.
        w: Width.
        d: Place.
        size: Height and width of a window.
        stride: From one window to the next.

    Args:
        x: The input.

    Returns:
        Of the same batch.

    Raises:
        Error: It is not allowed.
    """
    return {x.value().max_pool2d(size, stride)}


def avg_pool2d[
    c: Int, h: Int, w: Int, d: Int, //, size: Int, *, stride: Int = size
](x: Tensor[c, h, w, device=d]) raises -> Tensor[
    c, (h - size) / stride + 1, (w - size) / stride + 1, device=d
]:
    """The mean of each window.

    Parameters:
        c: Channels.
        h: Height.
        w: Width.
        d: Place.
        size: Height and width of a window.
        stride: From one window to the next.

    Args:
        x: The input.

    Returns:
        Of the same batch.

    Raises:
        Error: It is not allowed.
    """
    return {x.value().avg_pool2d(size, stride)}


def relu[T: AnyTensor](x: T) -> T:
    """Of each number the larger of it and 0.

    Parameters:
        T: Any tensor type.

    Args:
        x: The input.

    Returns:
        Of the same batch.
    """
    return T(x.value().relu())


def tanh[T: AnyTensor](x: T) -> T:
    """Hyperbolic tangent.

    Parameters:
        T: Any tensor type.

    Args:
        x: The input.

    Returns:
        Of the same batch.
    """
    return T(x.value().tanh())


def sigmoid[T: AnyTensor](x: T) -> T:
    """1 / (1 + exp(-x)).

    Parameters:
        T: Any tensor type.

    Args:
        x: The input.

    Returns:
        Of the same batch.
    """
    return T(x.value().sigmoid())


def softmax[T: AnyTensor](x: T) -> T:
    """Softmax over the features of a sample.

    Parameters:
        T: Any tensor type.

    Args:
        x: The input.

    Returns:
        Of the same batch.
    """
    return T(x.value().softmax())


def log_softmax[T: AnyTensor](x: T) -> T:
    """Logarithm of the softmax over the features of a sample.

    Parameters:
        T: Any tensor type.

    Args:
        x: The input.

    Returns:
        Of the same batch.
    """
    return T(x.value().log_softmax())


def dropout[T: AnyTensor](x: T, p: Float64 = 0.5) raises -> T:
    """Zeroes elements with probability p, and divides the others by 1 - p, while training.

    The mask is a function of seed, step, position of the sample in the global batch, number of the dropout in the model
    and element: the same on any number of ranks.

    Parameters:
        T: Any tensor type.

    Args:
        x: The input.
        p: The probability.

    Returns:
        Of the same batch.

    Raises:
        Error: p is below 0, or not below 1.
    """
    return T(x.value().dropout(p))
