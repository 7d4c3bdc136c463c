"""Layers without parameters: pools, Flatten, Dropout and activations, for compositions and as fields of modules.

As functions they are in tensor.mojo.
"""

from .json import JsonList, json
from .layers import Layer, Shape
from .tensor import AnyTensor, Tensor, avg_pool2d, max_pool2d
from .value import Value


struct MaxPool2d[size: Int, *, stride: Int = size](Layer):
    """The largest number of each window.

    Parameters:
        size: Height and width of a window.
        stride: From one window to the next.
    """

    def __init__(out self):
        """It has no state."""
        pass

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) raises -> Tensor[
        c,
        (h - Self.size) / Self.stride + 1,
        (w - Self.size) / Self.stride + 1,
        device=d,
    ]:
        """What the layer computes.

        Parameters:
            c: Channels.
            h: Height.
            w: Width.
            d: Place.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return max_pool2d[Self.size, stride=Self.stride](x)

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether a window fits.

        Args:
            x: The input.

        Returns:
            Whether it does.
        """
        return min(x.height, x.width) >= Self.size

    @staticmethod
    def output(x: Shape) -> Shape:
        """(C, P, Q).

        Args:
            x: The input.

        Returns:
            Of the output.
        """
        return _windows(x, Self.size, Self.stride)

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.max_pool2d(Self.size, Self.stride)


struct AvgPool2d[size: Int, *, stride: Int = size](Layer):
    """The mean of each window.

    Parameters:
        size: Height and width of a window.
        stride: From one window to the next.
    """

    def __init__(out self):
        """It has no state."""
        pass

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) raises -> Tensor[
        c,
        (h - Self.size) / Self.stride + 1,
        (w - Self.size) / Self.stride + 1,
        device=d,
    ]:
        """What the layer computes.

        Parameters:
            c: Channels.
            h: Height.
            w: Width.
            d: Place.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return avg_pool2d[Self.size, stride=Self.stride](x)

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether a window fits.

        Args:
            x: The input.

        Returns:
            Whether it does.
        """
        return min(x.height, x.width) >= Self.size

    @staticmethod
    def output(x: Shape) -> Shape:
        """(C, P, Q).

        Args:
            x: The input.

        Returns:
            Of the output.
        """
        return _windows(x, Self.size, Self.stride)

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.avg_pool2d(Self.size, Self.stride)


def _windows(x: Shape, size: Int, stride: Int) -> Shape:
    return Shape(
        x.channels,
        (x.height - size) // stride + 1,
        (x.width - size) // stride + 1,
        x.device,
    )


struct Flatten(Layer):
    """(C, H, W) to (C H W), without a copy."""

    def __init__(out self):
        """It has no state."""
        pass

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) -> Tensor[c * h * w, device=d]:
        """What the layer computes.

        Parameters:
            c: Channels.
            h: Height.
            w: Width.
            d: Place.

        Args:
            x: The input.

        Returns:
            The output.
        """
        return {x.value().flatten()}

    @staticmethod
    def output(x: Shape) -> Shape:
        """(C H W).

        Args:
            x: The input.

        Returns:
            Of the output.
        """
        return Shape(x.features(), 1, 1, x.device)

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.flatten()


struct Dropout[p: Float64 = 0.5](Layer):
    """Zeroes elements with probability p while training (tensor.dropout).

    Parameters:
        p: At least 0 and below 1.
    """

    def __init__(out self):
        """It has no state."""
        comptime assert (
            Self.p >= 0 and Self.p < 1
        ), "p must be at least 0 and below 1"

    @staticmethod
    def describe(mut into: JsonList):
        """Adds its name and probability, as a checkpoint compares them.

        Args:
            into: Where to.
        """
        var one = JsonList()
        one.append(json(String("Dropout")))
        one.append(json(Self.p))
        into.append(one.json())

    def forward[T: AnyTensor](self, x: T) raises -> T:
        """What the layer computes.

        Parameters:
            T: Any tensor type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return T(self.apply(x.value()))

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.dropout(Self.p)


struct ReLU(Layer):
    """Of each number the larger of it and 0."""

    def __init__(out self):
        """It has no state."""
        pass

    def forward[T: AnyTensor](self, x: T) -> T:
        """What the layer computes.

        Parameters:
            T: Any tensor type.

        Args:
            x: The input.

        Returns:
            The output.
        """
        return T(x.value().relu())

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.relu()


struct Tanh(Layer):
    """Hyperbolic tangent."""

    def __init__(out self):
        """It has no state."""
        pass

    def forward[T: AnyTensor](self, x: T) -> T:
        """What the layer computes.

        Parameters:
            T: Any tensor type.

        Args:
            x: The input.

        Returns:
            The output.
        """
        return T(x.value().tanh())

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.tanh()


struct Sigmoid(Layer):
    """1 / (1 + exp(-x))."""

    def __init__(out self):
        """It has no state."""
        pass

    def forward[T: AnyTensor](self, x: T) -> T:
        """What the layer computes.

        Parameters:
            T: Any tensor type.

        Args:
            x: The input.

        Returns:
            The output.
        """
        return T(x.value().sigmoid())

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.sigmoid()


struct Softmax(Layer):
    """Softmax over the features of a sample."""

    def __init__(out self):
        """It has no state."""
        pass

    def forward[T: AnyTensor](self, x: T) -> T:
        """What the layer computes.

        Parameters:
            T: Any tensor type.

        Args:
            x: The input.

        Returns:
            The output.
        """
        return T(x.value().softmax())

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.softmax()


struct LogSoftmax(Layer):
    """Logarithm of the softmax over the features of a sample."""

    def __init__(out self):
        """It has no state."""
        pass

    def forward[T: AnyTensor](self, x: T) -> T:
        """What the layer computes.

        Parameters:
            T: Any tensor type.

        Args:
            x: The input.

        Returns:
            The output.
        """
        return T(x.value().log_softmax())

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.log_softmax()
