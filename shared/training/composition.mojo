"""Layers in a row: Sequential, and stages of a pipeline. What does not fit does not compile."""

from .json import JsonList
from .layers import Layer, Shape
from .module import Module
from .parameter import Parameters, dotted, named
from .tensor import AnyTensor
from .value import Value


def shape_of[T: AnyTensor]() -> Shape:
    """The sample shape and place of a tensor type, as numbers.

    Parameters:
        T: The type.

    Returns:
        Its shape.
    """
    return Shape(T.CHANNELS, T.HEIGHT, T.WIDTH, T.DEVICE)


struct Sequential[*Ls: Layer, In: AnyTensor, Out: AnyTensor](Layer, Module):
    """Layers one after the other; their names are 0, 1, 2, ...

    Parameters:
        Ls: The layers; inferred.
        In: What the first takes.
        Out: What the last gives.
    """

    comptime Input = Self.In
    """What the first takes."""
    comptime Output = Self.Out
    """What the last gives."""
    var layers: Tuple[*Self.Ls]
    """The layers."""

    def __init__(out self, var *layers: *Self.Ls):
        """Takes the layers, in order.

        Args:
            layers: Such as Linear[784, 512](), ReLU(), Linear[512, 10]().
        """
        self.layers = Tuple(*layers^)

    @staticmethod
    def describe(mut into: JsonList):
        """Adds its name and those of its layers, as a checkpoint compares them.

        Args:
            into: Where to.
        """
        into.append(named("Sequential"))
        comptime for i in range(len(Self.Ls)):
            Self.Ls[i].describe(into)

    def collect(mut self, mut into: Parameters, name: String):
        """Adds the parameters of all layers.

        Args:
            into: Where to.
            name: Of this one in the model.
        """
        comptime for i in range(len(Self.Ls)):
            self.layers[i].collect(into, dotted(name, String(i)))

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the layers compute.

        Args:
            x: The input of the first.

        Returns:
            The output of the last.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        return Self.Output(self.apply(x.value()))

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether samples have the shape and place of In.

        Args:
            x: Of samples.

        Returns:
            Whether they have.
        """
        return x == shape_of[Self.In]()

    @staticmethod
    def output(x: Shape) -> Shape:
        """The shape and place of Out.

        Args:
            x: Of samples.

        Returns:
            Of the output.
        """
        return shape_of[Self.Out]()

    def apply(self, x: Value) raises -> Value:
        """What the layers compute, of a value without a type.

        Args:
            x: The value.

        Returns:
            The output of the last layer.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        # here and not in forward(): a Sequential within another has its own In and Out as well
        comptime first = wrong_layer[*Self.Ls](shape_of[Self.In]())
        comptime assert first < 0, (
            "a layer of a Sequential does not fit what comes before it: sizes"
            " or devices differ, or a Flatten is missing"
        )
        comptime assert (
            chained[*Self.Ls](shape_of[Self.In]()) == shape_of[Self.Out]()
        ), "the last layer of a Sequential does not give its Out"
        var v = x
        comptime for i in range(len(Self.Ls)):
            v = self.layers[i].apply(v)
        return v


def wrong_layer[*Ls: Layer](x: Shape) -> Int:
    """The first of some layers that does not take what the one before it gives; -1 if all fit.

    Parameters:
        Ls: The layers.

    Args:
        x: What the first takes.

    Returns:
        Its number.
    """
    var s = x
    comptime for i in range(len(Ls)):
        if not Ls[i].fits(s):
            return i
        s = Ls[i].output(s)
    return -1


def chained[*Ls: Layer](x: Shape) -> Shape:
    """What some layers make of samples of a shape.

    Parameters:
        Ls: The layers.

    Args:
        x: The shape.

    Returns:
        That of the output.
    """
    var s = x
    comptime for i in range(len(Ls)):
        s = Ls[i].output(s)
    return s


struct Stage[*Ls: Layer, device: Int](Layer):
    """Layers that are computed on one place, one after the other; their names are 0, 1, 2, ...

    Parameters:
        Ls: The layers; inferred.
        device: The place; layers with parameters must name the same.
    """

    var layers: Tuple[*Self.Ls]
    """The layers."""

    def __init__(out self, var *layers: *Self.Ls):
        """Takes the layers, in order.

        Args:
            layers: Such as Linear[784, 512, device=1](), ReLU().
        """
        self.layers = Tuple(*layers^)

    @staticmethod
    def describe(mut into: JsonList):
        """Adds its name and those of its layers, as a checkpoint compares them.

        Args:
            into: Where to.
        """
        into.append(named("Stage"))
        comptime for i in range(len(Self.Ls)):
            Self.Ls[i].describe(into)

    def collect(mut self, mut into: Parameters, name: String):
        """Adds the parameters of all layers.

        Args:
            into: Where to.
            name: Of this one in the model.
        """
        comptime for i in range(len(Self.Ls)):
            self.layers[i].collect(into, dotted(name, String(i)))

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether the layers take such samples once they are on this place.

        Args:
            x: Of samples.

        Returns:
            Whether they do.
        """
        return wrong_layer[*Self.Ls](moved(x, Self.device)) < 0

    @staticmethod
    def output(x: Shape) -> Shape:
        """What the layers make of them.

        Args:
            x: Of samples.

        Returns:
            Of the output.
        """
        return chained[*Self.Ls](moved(x, Self.device))

    def apply(self, x: Value) raises -> Value:
        """Moves a value to the place of the stage and computes the layers.

        Args:
            x: The value.

        Returns:
            The output of the last layer.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        var v = x.to(Self.device)
        comptime for i in range(len(Self.Ls)):
            v = self.layers[i].apply(v)
        return v


def moved(x: Shape, device: Int) -> Shape:
    """The same shape on another place.

    Args:
        x: The shape.
        device: The place.

    Returns:
        The shape there.
    """
    return Shape(x.channels, x.height, x.width, device)


struct PipelineParallel[
    *Stages: Layer, In: AnyTensor, Out: AnyTensor, micro_batch_size: Int = 8
](Module):
    """A model as a row of stages, each on its place.

    A micro-batch is a shard: its gradient is computed alone and added along the tree, so the number of processes
    changes no bit, but the size of a micro-batch does. Parameters are named "stage.layer.name", as "0.2.weight".

    Parameters:
        Stages: Types of the stages; inferred.
        In: What the first stage takes.
        Out: What the last gives, on its place.
        micro_batch_size: Samples of one micro-batch.
    """

    comptime Input = Self.In
    """What the first stage takes."""
    comptime Output = Self.Out
    """What the last gives."""
    var stages: Tuple[*Self.Stages]
    """The stages."""

    def __init__(out self, var *stages: *Self.Stages):
        """Takes the stages, in order.

        Args:
            stages: Stage[device=0, ...](...), Stage[device=1, ...](...), ...
        """
        self.stages = Tuple(*stages^)

    @staticmethod
    def describe(mut into: JsonList):
        """Adds its name and those of its stages, as a checkpoint compares them.

        Args:
            into: Where to.
        """
        into.append(named("PipelineParallel"))
        comptime for i in range(len(Self.Stages)):
            Self.Stages[i].describe(into)

    def collect(mut self, mut into: Parameters, name: String):
        """Adds the parameters of all stages.

        Args:
            into: Where to.
            name: Of this one in the model.
        """
        comptime for i in range(len(Self.Stages)):
            self.stages[i].collect(into, dotted(name, String(i)))

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the stages compute.

        Args:
            x: The input of the first.

        Returns:
            The output of the last.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        comptime assert Self.micro_batch_size > 0, "a micro-batch has samples"
        comptime assert wrong_layer[*Self.Stages](shape_of[Self.In]()) < 0, (
            "a stage does not fit what comes before it: sizes differ, a layer"
            " names another device than its stage, or a Flatten is missing"
        )
        comptime assert (
            chained[*Self.Stages](shape_of[Self.In]()) == shape_of[Self.Out]()
        ), "the last stage does not give the pipeline's Out"
        var v = x.value()
        comptime for i in range(len(Self.Stages)):
            v = self.stages[i].apply(v)
        return Self.Output(v)

    @staticmethod
    def micro_batch() -> Int:
        """Samples of one micro-batch.

        Returns:
            Their number.
        """
        return Self.micro_batch_size
