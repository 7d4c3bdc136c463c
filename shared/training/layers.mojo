"""Layers with parameters: structs with sizes and place in their types; and what every layer has to be.

`forward` takes a tensor of the size and on the place that the type says; another does not compile. `apply` is the same
on a value without a type, for compositions that only know at the end what fits (composition.mojo). Initial weights and
biases are uniform in +-1 / sqrt(fan-in), as in python/odyssey/nn/layers.py.
"""

from std.math import sqrt

from .json import JsonList, json
from .parameter import Parameter, Parameters, Parametric
from .tensor import Tensor
from .value import Value


@fieldwise_init
struct Shape(Equatable, ImplicitlyCopyable, Movable, Writable):
    """The shape of a sample and its place, as numbers that the compiler computes with.
    """

    var channels: Int
    """C, or the number of features."""
    var height: Int
    """H."""
    var width: Int
    """W."""
    var device: Int
    """The place."""

    def features(self) -> Int:
        """Numbers of a sample.

        Returns:
            Their number.
        """
        return self.channels * self.height * self.width


trait Layer(Parametric):
    """A layer that can follow another in a Sequential or Stage."""

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether it takes samples of this shape, on this place.

        Args:
            x: The input.

        Returns:
            Whether it does.
        """
        return True

    @staticmethod
    def output(x: Shape) -> Shape:
        """What it makes of them.

        Args:
            x: The input.

        Returns:
            Of the output.
        """
        return x

    def apply(self, x: Value) raises -> Value:
        """What it computes.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        ...


struct Linear[inputs: Int, outputs: Int, *, bias: Bool = True, device: Int = 0](
    Layer
):
    """W x + b for W (outputs, inputs).

    Parameters:
        inputs: Features of a sample.
        outputs: Features of the result.
        bias: Whether there is a b.
        device: The place of the layer; its input must be there.
    """

    var weight: Parameter
    """W (outputs, inputs)."""
    var bias_term: _Bias[Self.bias]
    """The bias, or nothing."""

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert (
            Self.inputs > 0 and Self.outputs > 0
        ), "sizes must be positive"
        var bound = 1 / sqrt(Float64(Self.inputs))
        self.weight = Parameter([Self.outputs, Self.inputs], bound)
        self.bias_term = {Self.outputs, bound}

    def forward[
        d: Int, //
    ](self, x: Tensor[Self.inputs, device=d]) raises -> Tensor[
        Self.outputs, device=Self.device
    ] where (
        d == Self.device,
        "the input is on another device than the layer; move it with"
        " .to[DEVICE]()",
    ):
        """What the layer computes.

        Parameters:
            d: The place of the input.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether there are as many features, on this place.

        Args:
            x: The input.

        Returns:
            Whether it does.
        """
        return x == Shape(Self.inputs, 1, 1, Self.device)

    @staticmethod
    def output(x: Shape) -> Shape:
        """(outputs).

        Args:
            x: The input.

        Returns:
            Of the output.
        """
        return Shape(Self.outputs, 1, 1, Self.device)

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.linear(self.weight, self.bias_term.get())


struct Conv2d[
    in_channels: Int,
    out_channels: Int,
    kernel_size: Int,
    *,
    stride: Int = 1,
    padding: Int = 0,
    bias: Bool = True,
    device: Int = 0,
](Layer):
    """Cross-correlation with square kernels.

    Parameters:
        in_channels: C.
        out_channels: K.
        kernel_size: Height and width of a kernel.
        stride: From one window to the next.
        padding: Frame of zeros.
        bias: Whether a number per channel is added.
        device: The place of the layer; its input must be there.
    """

    var weight: Parameter
    """W (out_channels, in_channels, kernel_size, kernel_size)."""
    var bias_term: _Bias[Self.bias]
    """The bias, or nothing."""

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert (
            Self.in_channels > 0
            and Self.out_channels > 0
            and Self.kernel_size > 0
            and Self.stride > 0
            and Self.padding >= 0
        ), "sizes must be positive"
        var fan_in = Self.in_channels * Self.kernel_size * Self.kernel_size
        var bound = 1 / sqrt(Float64(fan_in))
        self.weight = Parameter(
            [
                Self.out_channels,
                Self.in_channels,
                Self.kernel_size,
                Self.kernel_size,
            ],
            bound,
        )
        self.bias_term = {Self.out_channels, bound}

    def forward[
        h: Int, w: Int, d: Int, //
    ](self, x: Tensor[Self.in_channels, h, w, device=d]) raises -> Tensor[
        Self.out_channels,
        (h + 2 * Self.padding - Self.kernel_size) / Self.stride + 1,
        (w + 2 * Self.padding - Self.kernel_size) / Self.stride + 1,
        device=Self.device,
    ] where (
        d == Self.device,
        "the input is on another device than the layer; move it with"
        " .to[DEVICE]()",
    ):
        """What the layer computes.

        Parameters:
            h: Height of the input.
            w: Width of the input.
            d: Place of the input.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        comptime assert (
            min(h, w) + 2 * Self.padding >= Self.kernel_size
        ), "the kernel does not fit the input; add padding"
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether there are as many channels, large enough, on this place.

        Args:
            x: The input.

        Returns:
            Whether it does.
        """
        return (
            x.channels == Self.in_channels
            and x.device == Self.device
            and min(x.height, x.width) + 2 * Self.padding >= Self.kernel_size
        )

    @staticmethod
    def output(x: Shape) -> Shape:
        """(K, P, Q).

        Args:
            x: The input.

        Returns:
            Of the output.
        """
        return Shape(
            Self.out_channels,
            (x.height + 2 * Self.padding - Self.kernel_size) // Self.stride + 1,
            (x.width + 2 * Self.padding - Self.kernel_size) // Self.stride + 1,
            Self.device,
        )

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return x.conv2d(
            self.weight, self.bias_term.get(), Self.stride, Self.padding
        )


struct _Bias[wanted: Bool](Parametric):
    """A bias or none, as the type says."""

    var parameter: Parameter

    def __init__(out self, n: Int, bound: Float64):
        self.parameter = Parameter([n], bound)

    def collect(mut self, mut into: Parameters, name: String):
        """Adds the bias under the name that Python gives it."""
        comptime if Self.wanted:
            into.add(
                self.parameter, String(name.removesuffix("bias_term"), "bias")
            )

    @staticmethod
    def describe(mut into: JsonList):
        """It is no layer."""
        pass

    def get(self) -> Optional[Parameter]:
        """It, or none."""
        comptime if Self.wanted:
            return self.parameter.copy()
        return None
