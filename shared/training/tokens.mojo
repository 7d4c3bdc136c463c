"""Layers of transformers: over sequences of ids (tensor.Ids) and of tokens (tensor.Tokens)."""

from std.python import PythonObject

from .bridge import Value, part
from .layers import Layer, _Module
from .tensor import Ids, Shape, Tokens


struct Embedding[count: Int, features: Int, *, device: Int = 0](ImplicitlyCopyable, Layer):
    """A vector for each of `count` ids, normal with variance 1 at first."""

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        self._module = {}

    def make(self) raises -> PythonObject:
        return part("nn").Embedding(Self.count, Self.features).to(Self.device)

    def forward[t: Int, //](self, x: Ids[t, device=Self.device]) raises -> Tokens[t, Self.features, device=Self.device]:
        """The vectors of the ids."""
        return {self.apply(x.value())}

    def first[
        t: Int
    ](self) raises -> Tokens[t, Self.features, device=Self.device] where (t <= Self.count, "there are fewer vectors"):
        """Returns the vectors of ids 0 to t - 1, the same for each sequence: of places in it."""
        return {self._module.built().weight[0:t]}

    @staticmethod
    def fits(x: Shape) -> Bool:
        return x == Shape(x.channels, 1, 1, Self.device)

    @staticmethod
    def output(x: Shape) -> Shape:
        return Shape(x.channels, Self.features, 1, x.device)


struct LayerNorm[features: Int, *, device: Int = 0](ImplicitlyCopyable, Layer):
    """The features of each token with mean 0 and variance 1, times weight, plus bias (Ba, Kiros, Hinton 2016)."""

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        self._module = {}

    def make(self) raises -> PythonObject:
        return part("nn").LayerNorm(Self.features).to(Self.device)

    def forward[t: Int, //](self, x: Tokens[t, Self.features, device=Self.device]) raises -> type_of(x):
        """Computes the layer."""
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        return x == Shape(x.channels, Self.features, 1, Self.device)


struct MultiheadAttention[
    features: Int, heads: Int, *, is_causal: Bool = False, dropout: Float64 = 0.0, device: Int = 0
](ImplicitlyCopyable, Layer):
    """Each token's attention to all tokens of its sequence, or to those up to it (Vaswani et al. 2017).

    While training each is left out with probability `dropout`.
    """

    var _module: _Module

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        comptime assert Self.heads > 0 and Self.features % Self.heads == 0, "the features must divide by the heads"
        self._module = {}

    def make(self) raises -> PythonObject:
        return part("nn").MultiheadAttention(Self.features, Self.heads, Self.dropout).to(Self.device)

    def forward[t: Int, //](self, x: Tokens[t, Self.features, device=Self.device]) raises -> type_of(x):
        """Computes the layer."""
        return {self.apply(x.value())}

    @staticmethod
    def fits(x: Shape) -> Bool:
        return x == Shape(x.channels, Self.features, 1, Self.device)

    def apply(self, x: Value) raises -> Value:
        return self._module.built()(x, is_causal=Self.is_causal)
