"""Values: what a forward() computes with while it is traced. A value has a shape and a place, and no numbers.

Each method is an op: it checks shapes, appends the record of its kernel and a node to the tape. Tensors with their
shape in the type (tensor.mojo) and layers are thin covers of these; the ops and their records are those of
python/odyssey/functional.py. Letters as in kernels/lanes.mojo.
"""

from .ops import code
from .parameter import Parameter
from .program import float_bits
from .tape import Arg, Info, RESHAPE, Tape

comptime TapePtr = Pointer[Tape, MutUntrackedOrigin]
"""A tape that the engine keeps while it traces."""


@fieldwise_init
struct Value(ImplicitlyCopyable, Movable):
    """The result of an op, or the input of the model."""

    var tape: TapePtr
    """Where its ops are written."""
    var id: Int
    """Its number on the tape."""

    def info(self) -> Info:
        """Its memory, shape and place.

        Returns:
            What the tape knows of it.
        """
        return self.tape[].values[self.id].copy()

    def training(self) -> Bool:
        """Whether dropout is on.

        Returns:
            Whether it is; then ops keep what a backward pass needs.
        """
        return self.tape[].training

    def _new(self, channels: Int, height: Int = 1, width: Int = 1) -> Self:
        """An empty value on this value's place."""
        ref t = self.tape[]
        var memory = t.activation(channels * height * width)
        var device = t.values[self.id].device
        t.device = device
        return Self(self.tape, t.new(memory, channels, height, width, device))

    def _like(self) -> Self:
        var x = self.info()
        return self._new(x.channels, x.height, x.width)

    # --- shape and place ---

    def flatten(self) -> Self:
        """(C, H, W) to (F), without a copy.

        Returns:
            The value (F).
        """
        ref t = self.tape[]
        var x = self.info()
        var y = Self(self.tape, t.new(x.memory, x.features(), device=x.device))
        t.attach(y.id, RESHAPE, [self.id], List[Arg](), List[Int]())
        return y

    def to(self, device: Int) -> Self:
        """The same numbers on another place; itself if it is there. Its gradient goes the way back.

        Args:
            device: The place.

        Returns:
            The value there.
        """
        var x = self.info()
        if x.device == device:
            return self
        ref t = self.tape[]
        var y = self._like()
        t.values[y.id].device = device
        t.device = device
        t.emit(
            comptime (code("copy")), t.values[y.id].memory, x.memory, x.floats
        )
        t.attach(
            y.id, comptime (code("copy")), [self.id], List[Arg](), [x.floats]
        )
        return y

    # --- arithmetic ---

    def _binary(self, other: Self, op: Int) raises -> Self:
        ref t = self.tape[]
        var a = self.info()
        var b = other.info()
        if (
            a.channels != b.channels
            or a.height != b.height
            or a.width != b.width
            or a.device != b.device
        ):
            raise Error(
                "[tensor] two values of different shapes or places; they must"
                " be equal (nothing is broadcast)"
            )
        var y = self._like()
        t.emit(op, t.values[y.id].memory, a.memory, b.memory, a.floats)
        t.attach(
            y.id, op, [self.id, other.id], [a.memory, b.memory], [a.floats]
        )
        return y

    def add(self, other: Self) raises -> Self:
        """Element by element.

        Args:
            other: Of the same shape and place.

        Returns:
            The value.

        Raises:
            Error: They are not of the same shape and place.
        """
        return self._binary(other, comptime (code("add")))

    def multiply(self, other: Self) raises -> Self:
        """Element by element.

        Args:
            other: Of the same shape and place.

        Returns:
            The value.

        Raises:
            Error: They are not of the same shape and place.
        """
        return self._binary(other, comptime (code("multiply")))

    def scale(self, factor: Float64) -> Self:
        """All elements times a number.

        Args:
            factor: Rounded to float32.

        Returns:
            The value.
        """
        ref t = self.tape[]
        var x = self.info()
        var y = self._like()
        var bits = float_bits(Float32(factor))
        comptime op = code("scale")
        t.emit(op, t.values[y.id].memory, x.memory, bits, x.floats)
        t.attach(y.id, op, [self.id], List[Arg](), [bits, x.floats])
        return y

    # --- layers ---

    def linear(
        self, weight: Parameter, bias: Optional[Parameter]
    ) raises -> Self:
        """W x + b for W (O, I), b (O).

        Args:
            weight: (O, I).
            bias: (O), or none.

        Returns:
            The value (O).

        Raises:
            Error: The input has other than I features, or the weight is of no engine.
        """
        ref t = self.tape[]
        var x = self.info()
        var O = weight.shape[0]
        var I = weight.shape[1]
        if x.height * x.width != 1 or x.channels != I:
            raise Error(
                "[linear] an input of ",
                x.channels,
                " x ",
                x.height,
                " x ",
                x.width,
                " for a weight of ",
                O,
                " x ",
                I,
                "; it must have ",
                I,
                " features: flatten it first",
            )
        var y = self._new(O)
        var b = self._bias(bias, O)
        t.emit(
            comptime (code("linear_forward")),
            t.values[y.id].memory,
            x.memory,
            t.param(weight.found()),
            b,
            t.groups,
            I,
            O,
            0,
            rows=True,
        )
        t.attach(
            y.id,
            comptime (code("linear_forward")),
            [self.id],
            [x.memory, t.param(weight.at), self._grad(weight), self._db(bias)],
            [t.groups, I, O],
            parameters=True,
        )
        return y

    def conv2d(
        self,
        weight: Parameter,
        bias: Optional[Parameter],
        stride: Int = 1,
        padding: Int = 0,
    ) raises -> Self:
        """Cross-correlation with W (K, C, R, T), plus b (K).

        Args:
            weight: (K, C, R, T).
            bias: (K), or none.
            stride: Places from one window to the next, both ways.
            padding: Zeros around the image.

        Returns:
            The value (K, (H + 2 padding - R) // stride + 1, (W + 2 padding - T) // stride + 1).

        Raises:
            Error: The input has other than C channels or is smaller than the kernel, or the weight is of no engine.
        """
        if padding:
            return self.pad2d(padding).conv2d(weight, bias, stride)
        ref t = self.tape[]
        var x = self.info()
        var K = weight.shape[0]
        var C = weight.shape[1]
        var R = weight.shape[2]
        var T = weight.shape[3]
        if x.channels != C or R > x.height or T > x.width:
            raise Error(
                "[conv2d] an input of ",
                x.channels,
                " x ",
                x.height,
                " x ",
                x.width,
                "; it must have ",
                C,
                " channels and be at least ",
                R,
                " x ",
                T,
            )
        var y = self._new(
            K, (x.height - R) // stride + 1, (x.width - T) // stride + 1
        )
        var b = self._bias(bias, K)
        t.emit(
            comptime (code("conv2d_forward")),
            t.values[y.id].memory,
            x.memory,
            t.param(weight.found()),
            b,
            t.groups,
            C,
            x.height,
            x.width,
            K,
            R,
            T,
            stride,
            0,
            rows=True,
        )
        t.attach(
            y.id,
            comptime (code("conv2d_forward")),
            [self.id],
            [x.memory, t.param(weight.at), self._grad(weight), self._db(bias)],
            [t.groups, C, x.height, x.width, K, R, T, stride],
            parameters=True,
        )
        return y

    def pad2d(self, padding: Int) -> Self:
        """A frame of zeros, so many wide.

        Args:
            padding: On each of the four sides.

        Returns:
            The value (C, H + 2 padding, W + 2 padding).
        """
        ref t = self.tape[]
        var x = self.info()
        var y = self._new(
            x.channels, x.height + 2 * padding, x.width + 2 * padding
        )
        var planes = t.groups * x.channels
        t.emit(
            comptime (code("pad_forward")),
            t.values[y.id].memory,
            x.memory,
            planes,
            x.height,
            x.width,
            padding,
            padding,
            rows=True,
        )
        t.attach(
            y.id,
            comptime (code("pad_forward")),
            [self.id],
            List[Arg](),
            [planes, x.height, x.width, padding, padding],
        )
        return y

    def _bias(self, bias: Optional[Parameter], n: Int) raises -> Arg:
        """The bias of a layer, zeros if it has none."""
        ref t = self.tape[]
        if bias:
            return t.param(bias.value().found())
        var zeros = t.alloc(max(4 * n, 16))
        t.emit(comptime (code("fill")), zeros, float_bits(0), n)
        return zeros

    def _grad(self, p: Parameter) -> Arg:
        return self.tape[].grad(p.at)

    def _db(self, bias: Optional[Parameter]) -> Arg:
        """Where the bias gradient goes; a number if nowhere, as backward.mojo knows.
        """
        return self._grad(bias.value()) if bias else Arg(0)

    # --- windows ---

    def _window(self, size: Int, stride: Int, name: String) raises -> Self:
        var x = self.info()
        if size < 1 or stride < 1 or size > x.height or size > x.width:
            raise Error(
                "[",
                name,
                "] a window of ",
                size,
                " at stride ",
                stride,
                " does not fit an input of ",
                x.height,
                " x ",
                x.width,
            )
        return self._new(
            x.channels,
            (x.height - size) // stride + 1,
            (x.width - size) // stride + 1,
        )

    def max_pool2d(self, size: Int, stride: Int) raises -> Self:
        """The largest of each window of size x size.

        Args:
            size: At most 16.
            stride: Places from one window to the next.

        Returns:
            The value (C, (H - size) // stride + 1, (W - size) // stride + 1).

        Raises:
            Error: The window does not fit.
        """
        if size > 16:
            raise Error(
                "[max_pool2d] a window of ",
                size,
                " x ",
                size,
                "; at most 256 places are supported",
            )
        ref t = self.tape[]
        var x = self.info()
        var y = self._window(size, stride, "max_pool2d")
        var memory = t.values[y.id].memory
        var argmax = t.alloc(t.values[y.id].floats)
        var planes = t.groups * x.channels
        t.emit(
            comptime (code("maxpool_forward")),
            memory,
            argmax,
            x.memory,
            planes,
            x.height,
            x.width,
            size,
            size,
            stride,
            rows=True,
        )
        t.attach(
            y.id,
            comptime (code("maxpool_forward")),
            [self.id],
            [argmax, memory],
            [planes, x.height, x.width, size, size, stride],
        )
        return y

    def avg_pool2d(self, size: Int, stride: Int) raises -> Self:
        """The mean of each window of size x size.

        Args:
            size: Of the window.
            stride: Places from one window to the next.

        Returns:
            The value (C, (H - size) // stride + 1, (W - size) // stride + 1).

        Raises:
            Error: The window does not fit.
        """
        ref t = self.tape[]
        var x = self.info()
        var y = self._window(size, stride, "avg_pool2d")
        var planes = t.groups * x.channels
        t.emit(
            comptime (code("avgpool_forward")),
            t.values[y.id].memory,
            x.memory,
            planes,
            x.height,
            x.width,
            size,
            size,
            stride,
            rows=True,
        )
        t.attach(
            y.id,
            comptime (code("avgpool_forward")),
            [self.id],
            List[Arg](),
            [planes, x.height, x.width, size, size, stride],
        )
        return y

    # --- activations ---

    def _activation(self, op: Int) -> Self:
        ref t = self.tape[]
        var x = self.info()
        var y = self._like()
        var memory = t.values[y.id].memory
        t.emit(op, memory, x.memory, x.floats, rows=True)
        t.attach(y.id, op, [self.id], [memory], [x.floats])
        return y

    def relu(self) -> Self:
        """Of each number the larger of it and 0.

        Returns:
            The value, of the same shape.
        """
        return self._activation(comptime (code("relu_forward")))

    def tanh(self) -> Self:
        """Hyperbolic tangent.

        Returns:
            The value, of the same shape.
        """
        return self._activation(comptime (code("tanh_forward")))

    def sigmoid(self) -> Self:
        """1 / (1 + exp(-x)).

        Returns:
            The value, of the same shape.
        """
        return self._activation(comptime (code("sigmoid_forward")))

    def dropout(self, p: Float64) raises -> Self:
        """Zeroes elements with probability p while training, a function of seed, step, sample, dropout and element.

        Args:
            p: From 0 to below 1. What is left is divided by 1 - p.

        Returns:
            The value; itself when not training.

        Raises:
            Error: The probability is not allowed.
        """
        if not (p >= 0 and p < 1):
            raise Error(
                "[dropout] p is ", p, "; it must be at least 0 and below 1"
            )
        ref t = self.tape[]
        if not t.training or p == 0:
            return self
        var x = self.info()
        var y = self._like()
        var layer = t.dropouts
        t.dropouts += 1
        var bits = float_bits(Float32(p))
        comptime op = code("dropout")
        t.emit(
            op,
            t.values[y.id].memory,
            x.memory,
            t.groups,
            x.features(),
            bits,
            layer,
            rows=True,
        )
        t.attach(
            y.id,
            op,
            [self.id],
            List[Arg](),
            [t.groups, x.features(), bits, layer],
        )
        return y

    def _over_classes(self, op: Int) -> Self:
        ref t = self.tape[]
        var x = self.info()
        var y = self._like()
        var memory = t.values[y.id].memory
        t.emit(op, memory, x.memory, t.groups, x.features(), rows=True)
        t.attach(y.id, op, [self.id], [memory], [t.groups, x.features()])
        return y

    def softmax(self) -> Self:
        """Softmax over the features of a sample.

        Returns:
            The value, of the same shape.
        """
        return self._over_classes(comptime (code("softmax_forward")))

    def log_softmax(self) -> Self:
        """Its logarithm.

        Returns:
            The value, of the same shape.
        """
        return self._over_classes(comptime (code("log_softmax_forward")))

    # --- losses: sums over samples ---

    def _loss(self, labels: Arg, op: Int, saved: List[Arg]) -> Self:
        ref t = self.tape[]
        var x = self.info()
        var total = t.alloc(16)
        var y = Self(self.tape, t.new(total, 1, device=x.device))
        t.outputs = x.features()
        t.device = x.device
        var kept = saved.copy()
        if len(saved):
            t.emit(
                op,
                total,
                saved[0],
                x.memory,
                labels,
                t.groups,
                x.features(),
                rows=True,
            )
        else:
            t.emit(
                op, total, x.memory, labels, t.groups, x.features(), rows=True
            )
        kept.append(labels)
        t.attach(y.id, op, [self.id], kept^, [t.groups, x.features()])
        return y

    def cross_entropy(self, labels: Arg) -> Self:
        """Of logits: log sum exp(x) - x[label], summed over samples.

        Args:
            labels: Memory of int32, one per sample.

        Returns:
            The sum, one float.
        """
        var probabilities = self.tape[].alloc(4 * self.info().floats)
        return self._loss(
            labels, comptime (code("cross_entropy_forward")), [probabilities]
        )

    def nll(self, labels: Arg) -> Self:
        """Of log-probabilities: -x[label], summed over samples.

        Args:
            labels: Memory of int32, one per sample.

        Returns:
            The sum, one float.
        """
        return self._loss(labels, comptime (code("nll_forward")), List[Arg]())
