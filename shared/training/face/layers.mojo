"""Layers: structs with sizes and place in their types over the modules of odyssey.nn; and what every layer has to be.

`forward` takes a tensor of the size and on the place that the type says; another does not compile. `apply` is the same
on a value without a type, for compositions that only know at the end what fits (composition.mojo). A layer gets its
Python module, and its numbers, when a trainer or an Engine takes the model (`build`), so that names and initial
weights are those of the same model in Python.
"""

from std.python import PythonObject
from std.reflection import reflect

from .bridge import Value, odyssey, part
from .tensor import AnyTensor, Tensor, Tokens


@fieldwise_init
struct Shape(Equatable, ImplicitlyCopyable, Movable, Writable):
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


trait Parametric(Deinitable, Movable):
    """What may have parameters: layers, and structs with layers as fields."""

    def build(mut self) raises -> PythonObject:
        """Makes the Python module: one with a module for each field that is a layer or a module, under its name."""
        comptime r = reflect[Self]
        comptime names = r.field_names()
        comptime types = r.field_types()
        comptime own = r.base_name()
        var module = odyssey().module(PythonObject(own))
        comptime for i in range(r.field_count()):
            comptime T = types[i]
            comptime field = names[i]
            comptime if conforms_to(T, Parametric):
                module.__setattr__(String(field), r.field_ref[i](self).build())
        self.begin(module)
        return module

    def begin(self, module: PythonObject) raises:
        """What a struct does with its parameters when they have their first numbers; `module` has them by name."""
        pass


trait Layer(Parametric):
    """A layer that can follow another in a Sequential or Stage."""

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether it takes samples of this shape, on this place."""
        return True

    @staticmethod
    def output(x: Shape) -> Shape:
        """What it makes of them."""
        return x

    def apply(self, x: Value) raises -> Value:
        """What it computes, of a value without a type."""
        ...


struct _Module(Movable):
    """The Python module of a layer, once there is one."""

    var _py: Optional[PythonObject]

    def __init__(out self):
        self._py = None

    def set(mut self, module: PythonObject, device: Int) raises -> PythonObject:
        self._py = module
        return module.to(device)

    def py(self) raises -> PythonObject:
        if not self._py:
            raise Error(
                "[model] a layer is used that was not found in the model: it"
                " is in a list, or not a field of a Module; make every layer a"
                " field, or use Sequential"
            )
        return self._py.value()

    def __call__(self, x: Value) raises -> Value:
        return self.py()(x)


struct Linear[inputs: Int, outputs: Int, *, bias: Bool = True, device: Int = 0](Layer):
    """W x + b for W (outputs, inputs), on a place where its input must be."""

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert Self.inputs > 0 and Self.outputs > 0, "sizes must be positive"
        self._module = {}

    def build(mut self) raises -> PythonObject:
        """Makes nn.Linear."""
        var made = part("nn").Linear(Self.inputs, Self.outputs, bias=Self.bias)
        return self._module.set(made, Self.device)

    def forward[
        d: Int, //
    ](self, x: Tensor[Self.inputs, device=d]) raises -> Tensor[Self.outputs, device=Self.device] where (
        d == Self.device,
        "the input is on another device than the layer; move it with .to[DEVICE]()",
    ):
        """What the layer computes."""
        return {self.apply(x.value())}

    def forward[
        t: Int, //
    ](self, x: Tokens[t, Self.inputs, device=Self.device]) raises -> Tokens[t, Self.outputs, device=Self.device]:
        """The same for each token."""
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether there are as many features, of a sample or of each token, on this place."""
        return x == Shape(Self.inputs, 1, 1, Self.device) or x == Shape(x.channels, Self.inputs, 1, Self.device)

    @staticmethod
    def output(x: Shape) -> Shape:
        """(outputs), or (tokens, outputs)."""
        if x.height > 1:
            return Shape(x.channels, Self.outputs, 1, Self.device)
        return Shape(Self.outputs, 1, 1, Self.device)

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type."""
        return self._module(x if Int(py=x.ndim) == 3 else x.flatten())


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
    """Cross-correlation with square kernels, on a place where its input must be."""

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert (
            Self.in_channels > 0
            and Self.out_channels > 0
            and Self.kernel_size > 0
            and Self.stride > 0
            and Self.padding >= 0
        ), "sizes must be positive"
        self._module = {}

    def build(mut self) raises -> PythonObject:
        """Makes nn.Conv2d."""
        var made = part("nn").Conv2d(
            Self.in_channels,
            Self.out_channels,
            Self.kernel_size,
            stride=Self.stride,
            padding=Self.padding,
            bias=Self.bias,
        )
        return self._module.set(made, Self.device)

    def forward[
        h: Int, w: Int, d: Int, //
    ](self, x: Tensor[Self.in_channels, h, w, device=d]) raises -> Tensor[
        Self.out_channels,
        (h + 2 * Self.padding - Self.kernel_size) / Self.stride + 1,
        (w + 2 * Self.padding - Self.kernel_size) / Self.stride + 1,
        device=Self.device,
    ] where (d == Self.device, "the input is on another device than the layer; move it with .to[DEVICE]()",):
        """What the layer computes."""
        comptime assert (
            min(h, w) + 2 * Self.padding >= Self.kernel_size
        ), "the kernel does not fit the input; add padding"
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether there are as many channels, large enough, on this place."""
        return (
            x.channels == Self.in_channels
            and x.device == Self.device
            and min(x.height, x.width) + 2 * Self.padding >= Self.kernel_size
        )

    @staticmethod
    def output(x: Shape) -> Shape:
        """(out_channels, P, Q)."""
        return Shape(
            Self.out_channels,
            (x.height + 2 * Self.padding - Self.kernel_size) // Self.stride + 1,
            (x.width + 2 * Self.padding - Self.kernel_size) // Self.stride + 1,
            Self.device,
        )

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type."""
        return self._module(x)


struct Pool2d[name: String, function: String, size: Int, stride: Int](Layer):
    """One number of each window; MaxPool2d and AvgPool2d are of this type."""

    def __init__(out self):
        """It has no parameters."""
        pass

    def build(mut self) raises -> PythonObject:
        """Makes the module of nn."""
        return part("nn").__getattr__(Self.name)(Self.size, Self.stride)

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) raises -> Tensor[
        c,
        (h - Self.size) / Self.stride + 1,
        (w - Self.size) / Self.stride + 1,
        device=d,
    ]:
        """What the layer computes."""
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Whether there is a window."""
        return min(x.height, x.width) >= Self.size

    @staticmethod
    def output(x: Shape) -> Shape:
        """(C, P, Q)."""
        return Shape(
            x.channels,
            (x.height - Self.size) // Self.stride + 1,
            (x.width - Self.size) // Self.stride + 1,
            x.device,
        )

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type."""
        var pool = part("functional").__getattr__(Self.function)
        return pool(x, Self.size, Self.stride)


comptime MaxPool2d[size: Int, *, stride: Int = size] = Pool2d["MaxPool2d", "max_pool2d", size, stride]
"""The largest number of each window of `size` x `size`."""
comptime AvgPool2d[size: Int, *, stride: Int = size] = Pool2d["AvgPool2d", "avg_pool2d", size, stride]
"""The mean of each window of `size` x `size`."""


struct Activation[name: String, function: String](Layer):
    """A function that keeps the shape; ReLU, GELU, Tanh, Sigmoid, Softmax and LogSoftmax are of this type."""

    def __init__(out self):
        """It has no parameters."""
        pass

    def build(mut self) raises -> PythonObject:
        """Makes the module of nn."""
        return part("nn").__getattr__(Self.name)()

    def forward[T: AnyTensor](self, x: T) raises -> T:
        """What the layer computes."""
        return T(self.apply(x.value()))

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type."""
        return part("functional").__getattr__(Self.function)(x)


comptime ReLU = Activation["ReLU", "relu"]
"""The larger of each number and 0."""
comptime GELU = Activation["GELU", "gelu"]
"""x times the normal distribution function of x."""
comptime Tanh = Activation["Tanh", "tanh"]
"""Hyperbolic tangent."""
comptime Sigmoid = Activation["Sigmoid", "sigmoid"]
"""1 / (1 + exp(-x))."""
comptime Softmax = Activation["Softmax", "softmax"]
"""Softmax over the features of a sample."""
comptime LogSoftmax = Activation["LogSoftmax", "log_softmax"]
"""Logarithm of the softmax over the features of a sample."""


struct Dropout[p: Float64 = 0.5](Layer):
    """Zeroes elements with probability p while training (tensor.dropout)."""

    def __init__(out self):
        """It has no parameters."""
        comptime assert Self.p >= 0 and Self.p < 1, "p must be at least 0 and below 1"

    def build(mut self) raises -> PythonObject:
        """Makes nn.Dropout."""
        return part("nn").Dropout(Self.p)

    def forward[T: AnyTensor](self, x: T) raises -> T:
        """What the layer computes."""
        return T(self.apply(x.value()))

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type."""
        return odyssey().dropout(x, Self.p)


struct Flatten(Layer):
    """Samples of (C, H, W) as samples of C H W features, without a copy."""

    def __init__(out self):
        """It has no parameters."""
        pass

    def build(mut self) raises -> PythonObject:
        """Makes nn.Flatten."""
        return part("nn").Flatten()

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) raises -> Tensor[c * h * w, device=d]:
        """What the layer computes."""
        return {self.apply(x.value())}

    @staticmethod
    def output(x: Shape) -> Shape:
        """(C H W)."""
        return Shape(x.features(), 1, 1, x.device)

    def apply(self, x: Value) raises -> Value:
        """What the layer computes, of a value without a type."""
        return x.flatten()
