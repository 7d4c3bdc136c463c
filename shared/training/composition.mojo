"""Models: what a Module has to be, and layers in a row. What does not fit does not compile."""

from std.memory import OwnedPointer
from std.python import Python, PythonObject
from std.python.bindings import PythonModuleBuilder

from .bridge import Value, call, odyssey, part
from .layers import Layer, Parametric
from .tensor import AnyTensor, Shape


trait Module(Parametric):
    """A model, or a part of one: layers and modules as fields, and `forward`, which is traced once.

    A struct needs `comptime Input = Tensor[...]`, `comptime Output = Tensor[...]`, an `__init__` without arguments'
    worth of its layers, and `def forward(self, x: Self.Input) raises -> Self.Output`.
    """

    comptime Input: AnyTensor
    """Type that forward() takes: a tensor with the shape of one sample and its place."""
    comptime Output: AnyTensor
    """Type that it returns."""

    def forward(self, x: Self.Input) raises -> Self.Output:
        """Computes the module; backward passes are derived from it."""
        ...


def wrong_layer[*Ls: Layer](x: Shape) -> Int:
    """The first of some layers that does not take what the one before it gives; -1 if all fit."""
    var s = x
    comptime for i in range(len(Ls)):
        if not Ls[i].fits(s):
            return i
        s = Ls[i].output(s)
    return -1


def chained[*Ls: Layer](x: Shape) -> Shape:
    """Returns the shape that some layers make of a shape."""
    var s = x
    comptime for i in range(len(Ls)):
        s = Ls[i].output(s)
    return s


def moved(x: Shape, device: Int) -> Shape:
    """The same shape on another place."""
    return Shape(x.channels, x.height, x.width, device)


def _built[*Ls: Layer](mut layers: Tuple[*Ls]) raises -> PythonObject:
    """The Python modules of some layers, as a list."""
    var made = Python.list()
    comptime for i in range(len(Ls)):
        made.append(layers[i].build())
    return made


def _applied[*Ls: Layer](layers: Tuple[*Ls], x: Value) raises -> Value:
    """Computes some layers, one after the other."""
    var v = x
    comptime for i in range(len(Ls)):
        v = layers[i].apply(v)
    return v


struct Sequential[*Ls: Layer, In: AnyTensor, Out: AnyTensor](Layer, Module):
    """Layers one after the other; their names are 0, 1, 2, ... `Ls` are inferred."""

    comptime Input = Self.In
    comptime Output = Self.Out
    var layers: Tuple[*Self.Ls]
    """The layers."""

    def __init__(out self, var *layers: *Self.Ls):
        """Takes the layers in order, such as Linear[784, 512](), ReLU(), Linear[512, 10]()."""
        self.layers = Tuple(*layers^)

    def build(mut self) raises -> PythonObject:
        return odyssey().sequential(_built(self.layers))

    def forward(self, x: Self.Input) raises -> Self.Output:
        return Self.Output(self.apply(x.value()))

    @staticmethod
    def fits(x: Shape) -> Bool:
        return x == Self.In.SHAPE

    @staticmethod
    def output(x: Shape) -> Shape:
        return Self.Out.SHAPE

    def apply(self, x: Value) raises -> Value:
        # here and not in forward(): a Sequential within another has its own In and Out as well
        comptime first = wrong_layer[*Self.Ls](Self.In.SHAPE)
        comptime assert (
            first < 0
        ), "a layer of a Sequential does not fit what comes before it: sizes or devices differ, or a Flatten is missing"
        comptime assert (
            chained[*Self.Ls](Self.In.SHAPE) == Self.Out.SHAPE
        ), "the last layer of a Sequential does not give its Out"
        return _applied(self.layers, x)


struct Repeated[M: Module & Defaultable, n: Int](Module):
    """n modules of one type, one after the other; their names are 0, 1, 2, ..."""

    comptime Input = Self.M.Input
    comptime Output = Self.M.Output
    var modules: List[Self.M]
    """The modules."""

    def __init__(out self):
        """Makes them."""
        comptime assert Self.Input.SHAPE == Self.Output.SHAPE, "a module that is repeated gives what it takes"
        self.modules = []
        for _ in range(Self.n):
            self.modules.append(Self.M())

    def build(mut self) raises -> PythonObject:
        var made = Python.list()
        for i in range(Self.n):
            made.append(self.modules[i].build())
        return odyssey().sequential(made)

    def forward(self, x: Self.Input) raises -> Self.Output:
        var v = x.value()
        for i in range(Self.n):
            v = self.modules[i].forward(Self.Input(v)).value()
        return Self.Output(v)


struct Row[*Ls: Layer](Movable):
    """Layers or stages of different types, written as a list: [conv1, conv2]. A layer in it is a copy."""

    var items: Tuple[*Self.Ls]
    """The layers, in order."""

    def __init__(out self, var *items: *Self.Ls, __list_literal__: NoneType):
        """Takes what is between the brackets."""
        self.items = Tuple(*items^)


struct Stage[*Ls: Layer, place: Int](Layer):
    """Layers that are computed on one place, one after the other; their names are 0, 1, 2, ...

    `Ls` and `place` are inferred. Layers with parameters must have the same place: Stage(layers=[Linear[784, 512,
    device=1](), ReLU()], device=1).
    """

    var layers: Row[*Self.Ls]
    """The layers."""

    def __init__[
        v: __mlir_type.`!pop.int_literal`, //
    ](out self: Stage[*Self.Ls, place=Int(IntLiteral[v]())], var layers: Row[*Self.Ls], device: IntLiteral[v]):
        """Takes the layers in order, and their place, which must be written as a number."""
        self.layers = layers^

    def __init__(out self, var layers: Row[*Self.Ls]):
        """Takes the layers in order. Use it for a place that is computed: Stage[place=n + 1, ...](layers=[...])."""
        self.layers = layers^

    def build(mut self) raises -> PythonObject:
        return part("nn").Stage(_built(self.layers.items), Self.place)

    @staticmethod
    def fits(x: Shape) -> Bool:
        return wrong_layer[*Self.Ls](moved(x, Self.place)) < 0

    @staticmethod
    def output(x: Shape) -> Shape:
        return chained[*Self.Ls](moved(x, Self.place))

    def apply(self, x: Value) raises -> Value:
        return _applied(self.layers.items, x.to(Self.place))


struct PipelineParallel[*Stages: Layer, In: AnyTensor, Out: AnyTensor](Module):
    """A model as a row of stages, each on its place, run as a pipeline of micro-batches.

    A micro-batch is a shard: its gradient is computed alone and added along the tree, so neither the schedule nor the
    number of processes changes a bit, but micro_batch_size does. Parameters are named "stage.layer.name", as
    "0.2.weight".
    """

    comptime Input = Self.In
    comptime Output = Self.Out
    var stages: Row[*Self.Stages]
    """The stages."""
    var micro_batch_size: Int
    """Samples of a micro-batch."""
    var schedule: String
    """The order of micro-batches: "1f1b", "gpipe" or "interleaved"."""

    def __init__(out self, var stages: Row[*Self.Stages], micro_batch_size: Int = 8, schedule: String = "1f1b"):
        """Takes the stages in order: stages=[Stage(layers=[...], device=0), Stage(layers=[...], device=1), ...]."""
        self.stages = stages^
        self.micro_batch_size = micro_batch_size
        self.schedule = schedule

    def build(mut self) raises -> PythonObject:
        return part("nn").PipelineParallel(_built(self.stages.items), self.micro_batch_size, self.schedule)

    def forward(self, x: Self.Input) raises -> Self.Output:
        comptime assert wrong_layer[*Self.Stages](Self.In.SHAPE) < 0, (
            "a stage does not fit what comes before it: sizes differ, a layer"
            " names another device than its stage, or a Flatten is missing"
        )
        comptime assert (
            chained[*Self.Stages](Self.In.SHAPE) == Self.Out.SHAPE
        ), "the last stage does not give the pipeline's Out"
        return Self.Output(_applied(self.stages.items, x.value()))


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
        _ = call(part("nn"), "manual_seed", seed)
        self.py = self.model[].build()
        var builder = PythonModuleBuilder("odyssey_model")
        builder.def_function[_forward[Self.M]]("forward")
        var address = PythonObject(Int(self.model.ptr()))
        comptime takes = Self.M.Input.SHAPE
        comptime gives = Self.M.Output.SHAPE
        _ = odyssey().traced(
            self.py, builder.finalize().forward, address, loss, materialize[takes](), materialize[gives]()
        )


def _forward[M: Module](address: PythonObject, x: PythonObject) raises -> PythonObject:
    """Runs forward() of the model at an address, for Python, which calls it while it records."""
    ref model = Pointer[M, MutUntrackedOrigin](unsafe_from_address=Int(py=address))[]
    return model.forward(M.Input(x)).value()
