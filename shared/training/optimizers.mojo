"""Optimizers over an arena: settings and state around the kernels of kernels/optimizer.mojo.

`apply` takes gradients summed over samples, followed by STATS floats of which the second is the number of samples. It
changes nothing and returns False if one of them is not finite.
"""

from kernels.lanes import Ptr
from kernels.optimizer import adam, sgd
from kernels.reduce import is_finite

from .arena import Arena, aligned_zeros
from .ops import STATS


struct SGD(Movable):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay.
    """

    var lr: Float32
    var momentum: Float32
    var weight_decay: Float32
    var nesterov: Bool
    var velocity: Ptr

    def __init__(
        out self,
        arena: Arena,
        lr: Float32 = 0.01,
        momentum: Float32 = 0,
        weight_decay: Float32 = 0,
        nesterov: Bool = False,
    ):
        """Starts with a velocity of 0 for the parameters of `arena`."""
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self.velocity = aligned_zeros(arena.size)

    def __deinit__(deinit self):
        self.velocity.unsafe_free()

    def apply(mut self, arena: Arena, sums: Ptr) -> Bool:
        """Updates the parameters; see the head of this file."""
        if not is_finite(sums, arena.size + STATS):
            return False
        sgd(
            arena.params,
            self.velocity,
            sums,
            arena.size,
            1 / sums[unsafe_offset=arena.size + 1],
            self.lr,
            self.momentum,
            self.weight_decay,
            self.nesterov,
        )
        return True


struct Adam(Movable):
    """Adam, or AdamW if `decoupled`."""

    var lr: Float32
    var beta1: Float64
    var beta2: Float64
    var eps: Float32
    var weight_decay: Float32
    var decoupled: Bool
    var steps: Int
    var m: Ptr
    var v: Ptr

    def __init__(
        out self,
        arena: Arena,
        lr: Float32 = 1e-3,
        beta1: Float64 = 0.9,
        beta2: Float64 = 0.999,
        eps: Float32 = 1e-8,
        weight_decay: Float32 = 0,
        decoupled: Bool = False,
    ):
        """Starts with moments of 0 for the parameters of `arena`."""
        self.lr = lr
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.weight_decay = weight_decay
        self.decoupled = decoupled
        self.steps = 0
        self.m = aligned_zeros(arena.size)
        self.v = aligned_zeros(arena.size)

    def __deinit__(deinit self):
        self.m.unsafe_free()
        self.v.unsafe_free()

    def apply(mut self, arena: Arena, sums: Ptr) -> Bool:
        """Updates the parameters; see the head of this file."""
        if not is_finite(sums, arena.size + STATS):
            return False
        self.steps += 1
        adam(
            arena.params,
            self.m,
            self.v,
            sums,
            arena.size,
            1 / sums[unsafe_offset=arena.size + 1],
            self.lr,
            Float32(self.beta1),
            Float32(self.beta2),
            self.eps,
            self.weight_decay,
            self.decoupled,
            Float32(1 - self.beta1**self.steps),
            Float32(1 - self.beta2**self.steps),
        )
        return True
