"""Models: what a Module has to be, and layers in a row. What does not fit does not compile."""

from std.memory import OwnedPointer
from std.python import Python, PythonObject
from std.python.bindings import PythonModuleBuilder

from .bridge import Value, call, odyssey, part
from .layers import Layer, Parametric, Shape
from .tensor import AnyTensor


trait Module(Parametric):
    """A model, or a part of one: layers and modules as fields, and `forward`, which is traced once.

    A struct needs `comptime Input = Tensor[...]`, `comptime Output = Tensor[...]`, an `__init__` without arguments'
    worth of its layers, and `def forward(self, x: Self.Input) raises -> Self.Output`.
    """

    comptime Input: AnyTensor
    """What forward() takes: a tensor type with the shape of one sample and its place."""
    comptime Output: AnyTensor
    """What it returns."""

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the module computes; backward passes are derived from it."""
        ...


def shape_of[T: AnyTensor]() -> Shape:
    """The sample shape and place of a tensor type, as numbers."""
    return Shape(T.CHANNELS, T.HEIGHT, T.WIDTH, T.DEVICE)


def wrong_layer[*Ls: Layer](x: Shape) -> Int:
    """The first of some layers that does not take what the one before it gives; -1 if all fit."""
    var s = x
    comptime for i in range(len(Ls)):
        if not Ls[i].fits(s):
            return i
        s = Ls[i].output(s)
    return -1


def chained[*Ls: Layer](x: Shape) -> Shape:
    """What some layers make of samples of a shape."""
    var s = x
    comptime for i in range(len(Ls)):
        s = Ls[i].output(s)
    return s


def moved(x: Shape, device: Int) -> Shape:
    """The same shape on another place."""
    return Shape(x.channels, x.height, x.width, device)


struct Sequential[*Ls: Layer, In: AnyTensor, Out: AnyTensor](Layer, Module):
    """Layers one after the other; their names are 0, 1, 2, ... `Ls` are inferred."""

    comptime Input = Self.In
    """What the first takes."""
    comptime Output = Self.Out
    """What the last gives."""
    var layers: Tuple[*Self.Ls]
    """The layers."""

    def __init__(out self, var *layers: *Self.Ls):
        """Takes the layers in order, such as Linear[784, 512](), ReLU(), Linear[512, 10]()."""
        self.layers = Tuple(*layers^)

    def build(mut self) raises -> PythonObject:
        """Makes nn.Sequential."""
        var made = Python.list()
        comptime for i in range(len(Self.Ls)):
            made.append(self.layers[i].build())
        return odyssey().sequential(made)

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the layers compute."""
        return Self.Output(self.apply(x.value()))

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether samples have the shape and place of In."""
        return x == shape_of[Self.In]()

    @staticmethod
    def output(x: Shape) -> Shape:
        """The shape and place of Out."""
        return shape_of[Self.Out]()

    def apply(self, x: Value) raises -> Value:
        """What the layers compute, of a value without a type."""
        # here and not in forward(): a Sequential within another has its own In and Out as well
        comptime first = wrong_layer[*Self.Ls](shape_of[Self.In]())
        comptime assert (
            first < 0
        ), "a layer of a Sequential does not fit what comes before it: sizes or devices differ, or a Flatten is missing"
        comptime assert (
            chained[*Self.Ls](shape_of[Self.In]()) == shape_of[Self.Out]()
        ), "the last layer of a Sequential does not give its Out"
        var v = x
        comptime for i in range(len(Self.Ls)):
            v = self.layers[i].apply(v)
        return v


struct Repeated[M: Module & Defaultable, n: Int](Module):
    """n modules of one type, one after the other; their names are 0, 1, 2, ..."""

    comptime Input = Self.M.Input
    """What the first takes."""
    comptime Output = Self.M.Output
    """What the last gives."""
    var modules: List[Self.M]
    """The modules."""

    def __init__(out self):
        """Makes them."""
        comptime assert (
            shape_of[Self.Input]() == shape_of[Self.Output]()
        ), "a module that is repeated gives what it takes"
        self.modules = []
        for _ in range(Self.n):
            self.modules.append(Self.M())

    def build(mut self) raises -> PythonObject:
        """Makes nn.Sequential."""
        var made = Python.list()
        for i in range(Self.n):
            made.append(self.modules[i].build())
        return odyssey().sequential(made)

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the modules compute."""
        var v = x.value()
        for i in range(Self.n):
            v = self.modules[i].forward(Self.Input(v)).value()
        return Self.Output(v)


struct Stage[*Ls: Layer, device: Int](Layer):
    """Layers that are computed on one place, one after the other; their names are 0, 1, 2, ...

    `Ls` are inferred; those with parameters must name the same `device`.
    """

    var layers: Tuple[*Self.Ls]
    """The layers."""

    def __init__(out self, var *layers: *Self.Ls):
        """Takes the layers in order, such as Linear[784, 512, device=1](), ReLU()."""
        self.layers = Tuple(*layers^)

    def build(mut self) raises -> PythonObject:
        """Makes nn.Stage."""
        var made = Python.list()
        comptime for i in range(len(Self.Ls)):
            made.append(self.layers[i].build())
        return part("nn").Stage(made, Self.device)

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether the layers take such samples once they are on this place."""
        return wrong_layer[*Self.Ls](moved(x, Self.device)) < 0

    @staticmethod
    def output(x: Shape) -> Shape:
        """What the layers make of them."""
        return chained[*Self.Ls](moved(x, Self.device))

    def apply(self, x: Value) raises -> Value:
        """Moves a value to the place of the stage and computes the layers."""
        var v = x.to(Self.device)
        comptime for i in range(len(Self.Ls)):
            v = self.layers[i].apply(v)
        return v


struct PipelineParallel[
    *Stages: Layer,
    In: AnyTensor,
    Out: AnyTensor,
    micro_batch_size: Int = 8,
    schedule: String = "1f1b",
](Module):
    """A model as a row of stages, each on its place, run as a pipeline of micro-batches ("1f1b", "gpipe", "interleaved").

    A micro-batch is a shard: its gradient is computed alone and added along the tree, so neither the schedule nor the
    number of processes changes a bit, but micro_batch_size does. Parameters are named "stage.layer.name", as
    "0.2.weight".
    """

    comptime Input = Self.In
    """What the first stage takes."""
    comptime Output = Self.Out
    """What the last gives, on its place."""
    var stages: Tuple[*Self.Stages]
    """The stages."""

    def __init__(out self, var *stages: *Self.Stages):
        """Takes the stages in order: Stage[device=0, ...](...), Stage[device=1, ...](...), ..."""
        self.stages = Tuple(*stages^)

    def build(mut self) raises -> PythonObject:
        """Makes nn.PipelineParallel."""
        var made = Python.list()
        comptime for i in range(len(Self.Stages)):
            made.append(self.stages[i].build())
        return part("nn").PipelineParallel(made, Self.micro_batch_size, Self.schedule)

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the stages compute."""
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


# --- the model of a trainer or an Engine --------------------------------------------------------------------


struct Traced[M: Module](Movable):
    """A model with the Python module that calls back into its forward()."""

    var model: OwnedPointer[Self.M]
    """The model; it stays where it is while the struct moves."""
    var py: PythonObject
    """The Python module: the parameters, and forward()."""

    def __init__(out self, var model: Self.M, loss: PythonObject, seed: UInt64) raises:
        """Makes the Python modules of all layers, their numbers a function of the seed."""
        self.model = OwnedPointer(model^)
        _ = call(part("nn"), "manual_seed", Python.int(String(seed)))
        self.py = self.model[].build()
        var builder = PythonModuleBuilder("odyssey_model")
        builder.def_function[_forward[Self.M]]("forward")
        var address = PythonObject(Int(self.model.ptr()))
        _ = odyssey().traced(self.py, builder.finalize().forward, address, loss)


def _forward[M: Module](address: PythonObject, x: PythonObject) raises -> PythonObject:
    """What Python calls while it records; Python has checked that x has the samples' features."""
    comptime input = shape_of[M.Input]()
    comptime output = shape_of[M.Output]()
    ref model = Pointer[M, MutUntrackedOrigin](unsafe_from_address=Int(py=address))[]
    var y = model.forward(M.Input(_fitted(x, input))).value()
    if Int(py=y.size) != Int(py=y.shape[0]) * output.features() or Int(py=y.device.slot) != output.device:
        raise Error(
            "[model] forward() gives samples of ",
            y.shape[1:],
            " on ",
            y.device,
            "; its Output is ",
            output.channels,
            " x ",
            output.height,
            " x ",
            output.width,
            " on device(",
            output.device,
            ")",
        )
    return y


def _fitted(x: PythonObject, to: Shape) raises -> PythonObject:
    """Samples in the shape that the model takes, if they have it, or as many features."""
    var n = Int(py=x.shape[0])
    if to.height * to.width == 1:
        if x.shape == Python.tuple(n, to.channels):  # features, or ids
            return x
        if Int(py=x.features) == to.channels:
            return x.flatten()
    var shape = Python.tuple(n, to.channels, to.height, to.width)
    if x.shape == shape:
        return x
    if Int(py=x.ndim) == 2 and Int(py=x.features) == to.features():
        return x.reshape(shape)
    raise Error(
        "[train] the samples are ",
        x.shape[1:],
        "; the model takes ",
        to.channels,
        " x ",
        to.height,
        " x ",
        to.width,
    )
