"""Layers: structs with sizes and place in their types over the modules of odyssey.nn; and what every layer has to be.

`forward` takes a tensor of the size and on the place that the type says; another does not compile. `apply` is the same
on a value without a type, for compositions that only know at the end what fits (composition.mojo). A layer gets its
Python module, and its numbers, when a trainer or an Engine takes the model (`build`), so that names and initial
weights are those of the same model in Python.
"""

from std.python import PythonObject
from std.reflection import reflect

from .bridge import Value, odyssey, part
from .tensor import AnyTensor, Shape, Tensor, Tokens, Windows


trait Parametric(Deinitable, Movable):
    """Layer, or struct with layers as fields: it may have parameters."""

    def make(self) raises -> PythonObject:
        """Makes the Python module, without those of the fields."""
        return odyssey().module(PythonObject(reflect[Self].base_name()))

    def build(mut self) raises -> PythonObject:
        """Makes the Python module, with a module for each field that is a layer or a module, under its name."""
        comptime r = reflect[Self]
        comptime names = r.field_names()
        comptime types = r.field_types()
        var module = self.make()
        comptime for i in range(r.field_count()):
            comptime T = types[i]
            comptime field = names[i]
            comptime if conforms_to(T, Parametric):
                module.__setattr__(String(field), r.field_ref[i](self).build())
            comptime if conforms_to(T, _IsModule):
                rebind[_Module](r.field_ref[i](self)).py = module
        self.begin(module)
        return module

    def begin(self, module: PythonObject) raises:
        """Changes or ties parameters once they have their first numbers; `module` has them by name."""
        pass


trait Layer(Parametric):
    """A layer that can follow another in a Sequential or Stage."""

    @staticmethod
    def fits(x: Shape) -> Bool:
        """Returns whether it takes samples of this shape, on this place."""
        return True

    @staticmethod
    def output(x: Shape) -> Shape:
        """Returns the shape and place of what it makes of them."""
        return x

    def apply(self, x: Value) raises -> Value:
        """Computes the layer of a value without a type, by the Python module that it was built with, if it has one."""
        comptime r = reflect[Self]
        comptime types = r.field_types()
        comptime for i in range(r.field_count()):
            comptime if conforms_to(types[i], _IsModule):
                return rebind[_Module](r.field_ref[i](self)).built()(x)
        return self.make()(x)


trait _IsModule:
    """Marks _Module, the only type that conforms, where fields are looked through."""

    pass


struct _Module(ImplicitlyCopyable, Movable, _IsModule):
    """Python module of a layer, once there is one."""

    var py: Optional[PythonObject]

    def __init__(out self):
        self.py = None

    def built(self) raises -> PythonObject:
        if not self.py:
            raise Error(
                "[model] a layer is used that was not found in the model: it"
                " is in a list, or not a field of a Module; make every layer a"
                " field, or use Sequential"
            )
        return self.py.value()


struct Linear[inputs: Int, outputs: Int, *, bias: Bool = True, device: Int = 0](ImplicitlyCopyable, Layer):
    """W x + b for W (outputs, inputs), on a place where its input must be."""

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert Self.inputs > 0 and Self.outputs > 0, "sizes must be positive"
        self._module = {}

    def make(self) raises -> PythonObject:
        return part("nn").Linear(Self.inputs, Self.outputs, bias=Self.bias).to(Self.device)

    def forward[
        d: Int, //
    ](self, x: Tensor[Self.inputs, device=d]) raises -> Tensor[Self.outputs, device=Self.device] where (
        d == Self.device,
        "the input is on another device than the layer; move it with .to(device=NUMBER)",
    ):
        """Computes the layer."""
        return {self.apply(x.value())}

    def forward[
        t: Int, //
    ](self, x: Tokens[t, Self.inputs, device=Self.device]) raises -> Tokens[t, Self.outputs, device=Self.device]:
        """The same for each token."""
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        return x == Shape(Self.inputs, 1, 1, Self.device) or x == Shape(x.channels, Self.inputs, 1, Self.device)

    @staticmethod
    def output(x: Shape) -> Shape:
        if x.height > 1:
            return Shape(x.channels, Self.outputs, 1, Self.device)
        return Shape(Self.outputs, 1, 1, Self.device)

    def apply(self, x: Value) raises -> Value:
        return self._module.built()(x.flatten() if Int(py=x.ndim) == 4 else x)


struct Conv2d[
    in_channels: Int,
    out_channels: Int,
    kernel_size: Int,
    *,
    stride: Int = 1,
    padding: Int = 0,
    bias: Bool = True,
    device: Int = 0,
](ImplicitlyCopyable, Layer):
    """Cross-correlation with square kernels, on a place where its input must be."""

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert (
            min(Self.in_channels, Self.out_channels, Self.kernel_size, Self.stride) > 0 and Self.padding >= 0
        ), "sizes must be positive"
        self._module = {}

    def make(self) raises -> PythonObject:
        return (
            part("nn")
            .Conv2d(Self.in_channels, Self.out_channels, Self.kernel_size, Self.stride, Self.padding, bias=Self.bias)
            .to(Self.device)
        )

    def forward[
        h: Int, w: Int, d: Int, //
    ](self, x: Tensor[Self.in_channels, h, w, device=d]) raises -> Tensor[
        Self.out_channels,
        Windows[h, Self.kernel_size, Self.stride, Self.padding],
        Windows[w, Self.kernel_size, Self.stride, Self.padding],
        device=Self.device,
    ] where (d == Self.device, "the input is on another device than the layer; move it with .to(device=NUMBER)"):
        """Computes the layer."""
        comptime assert (
            min(h, w) + 2 * Self.padding >= Self.kernel_size
        ), "the kernel does not fit the input; add padding"
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        return (
            x.channels == Self.in_channels
            and x.device == Self.device
            and min(x.height, x.width) + 2 * Self.padding >= Self.kernel_size
        )

    @staticmethod
    def output(x: Shape) -> Shape:
        return _windows(x, Self.out_channels, Self.kernel_size, Self.stride, Self.padding)


def _windows(x: Shape, channels: Int, size: Int, stride: Int, padding: Int = 0) -> Shape:
    """Returns the shape of the windows of samples, with so many channels."""
    var h = (x.height + 2 * padding - size) // stride + 1
    return Shape(channels, h, (x.width + 2 * padding - size) // stride + 1, x.device)


@fieldwise_init
struct Pool2d[name: StaticString, size: Int, stride: Int](ImplicitlyCopyable, Layer):
    """One number of each window; MaxPool2d and AvgPool2d are of this type."""

    def make(self) raises -> PythonObject:
        return part("nn").__getattr__(String(Self.name))(Self.size, Self.stride)

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) raises -> Tensor[
        c, Windows[h, Self.size, Self.stride], Windows[w, Self.size, Self.stride], device=d
    ]:
        """Computes the layer."""
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        return min(x.height, x.width) >= Self.size

    @staticmethod
    def output(x: Shape) -> Shape:
        return _windows(x, x.channels, Self.size, Self.stride)


comptime MaxPool2d[size: Int, *, stride: Int = size] = Pool2d["MaxPool2d", size, stride]
"""The largest number of each window of `size` x `size`."""
comptime AvgPool2d[size: Int, *, stride: Int = size] = Pool2d["AvgPool2d", size, stride]
"""The mean of each window of `size` x `size`."""


@fieldwise_init
struct Activation[name: StaticString](ImplicitlyCopyable, Layer):
    """A function that keeps the shape; ReLU, GELU, Tanh, Sigmoid, Softmax and LogSoftmax are of this type."""

    def make(self) raises -> PythonObject:
        return part("nn").__getattr__(String(Self.name))()

    def forward[T: AnyTensor](self, x: T) raises -> T:
        """Computes the layer."""
        return T(self.apply(x.value()))


comptime ReLU = Activation["ReLU"]
"""The larger of each number and 0."""
comptime GELU = Activation["GELU"]
"""x times the normal distribution function of x."""
comptime Tanh = Activation["Tanh"]
"""Hyperbolic tangent."""
comptime Sigmoid = Activation["Sigmoid"]
"""1 / (1 + exp(-x))."""
comptime Softmax = Activation["Softmax"]
"""Softmax over the features of a sample."""
comptime LogSoftmax = Activation["LogSoftmax"]
"""Logarithm of the softmax over the features of a sample."""


struct Dropout[p: Float64 = 0.5](ImplicitlyCopyable, Layer):
    """Zeroes elements with probability p while training (tensor.dropout)."""

    def __init__(out self):
        """It has no parameters."""
        comptime assert Self.p >= 0 and Self.p < 1, "p must be at least 0 and below 1"

    def make(self) raises -> PythonObject:
        return part("nn").Dropout(Self.p)

    def forward[T: AnyTensor](self, x: T) raises -> T:
        """Computes the layer."""
        return T(self.apply(x.value()))

    def apply(self, x: Value) raises -> Value:
        return odyssey().dropout(x, Self.p)


@fieldwise_init
struct Flatten(ImplicitlyCopyable, Layer):
    """Samples of (C, H, W) as samples of C H W features, without a copy."""

    def make(self) raises -> PythonObject:
        return part("nn").Flatten()

    def forward[
        c: Int, h: Int, w: Int, d: Int, //
    ](self, x: Tensor[c, h, w, device=d]) raises -> Tensor[c * h * w, device=d]:
        """Computes the layer."""
        return {self.apply(x.value())}

    @staticmethod
    def output(x: Shape) -> Shape:
        return Shape(x.features(), 1, 1, x.device)
