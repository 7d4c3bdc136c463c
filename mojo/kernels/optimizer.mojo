"""Optimizers, once for all devices: the rule by which weights change (views.Rule), over a run of n floats, an arena
or any piece of one. g is a sum over samples and becomes their mean, once, before a rule is given it.
"""

from std.math import sqrt
from std.sys import is_nvidia_gpu, llvm_intrinsic

from .lanes import F32, madd
from .op import Device, OpOf
from .views import Rule


@always_inline
def _root[L: Int](x: SIMD[F32, L]) -> SIMD[F32, L]:
    """The square root, rounded once; the library's is an approximation on NVIDIA's GPUs."""
    comptime if is_nvidia_gpu():
        var y = SIMD[F32, L]()
        comptime for i in range(L):
            y[i] = llvm_intrinsic["llvm.nvvm.sqrt.rn.f", Float32, has_side_effect=False](x[i])
        return y
    else:
        return sqrt(x)


@fieldwise_init
struct Sgd(Rule):
    """Stochastic gradient descent as PyTorch writes it (Sutskever et al. 2013, with the rate outside the momentum):
    d = g + wd w; v = mu v + d; d = d + mu v if nesterov else v; w -= lr d.
    """

    comptime STATES = 1
    var lr: Float32
    var momentum: Float32
    var weight_decay: Float32
    var nesterov: Bool

    @always_inline
    def keeps(self) -> Bool:
        return self.momentum != 0

    @always_inline
    def update[L: Int](self, mut w: SIMD[F32, L], mut s: Array[SIMD[F32, L], Self.STATES], g: SIMD[F32, L]):
        var mu = SIMD[F32, L](self.momentum)
        var d = madd(w, SIMD[F32, L](self.weight_decay), g)
        if self.momentum != 0:
            s[0] = madd(s[0], mu, d)
            d = madd(s[0], mu, d) if self.nesterov else s[0]
        w = madd(d, SIMD[F32, L](-self.lr), w)


@fieldwise_init
struct Adam(Rule):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) if `decoupled`; corrections are 1 - beta^t.

    d = g (+ wd w); m = b1 m + (1 - b1) d; v = b2 v + (1 - b2) d^2; w = w (1 - lr wd if decoupled)
    - lr (m / c1) / (sqrt(v / c2) + eps).
    """

    comptime STATES = 2
    var lr: Float32
    var beta1: Float32
    var beta2: Float32
    var eps: Float32
    var weight_decay: Float32
    var decoupled: Bool
    var correction1: Float32
    var correction2: Float32

    @always_inline
    def update[L: Int](self, mut w: SIMD[F32, L], mut s: Array[SIMD[F32, L], Self.STATES], g: SIMD[F32, L]):
        var d = g
        if self.decoupled:
            w = w * (1 - self.lr * self.weight_decay)
        else:
            d = madd(w, SIMD[F32, L](self.weight_decay), d)
        s[0] = s[0] * self.beta1 + d * (1 - self.beta1)
        s[1] = s[1] * self.beta2 + d * d * (1 - self.beta2)
        var step = (s[0] / self.correction1) / (_root(s[1] / self.correction2) + self.eps)
        w = madd(step, SIMD[F32, L](-self.lr), w)


def ops[D: Device]() -> List[OpOf[D.Run]]:
    """The ops of this file: weights, states; the gradients' sum, its samples; n, then the fields of the rule."""
    return [
        OpOf("sgd", "+w, +v; g, samples; n, lr, momentum, weight decay, nesterov", D.update[Sgd]()),
        OpOf(
            "adam",
            "+w, +m, +v; g, samples; n, lr, beta1, beta2, eps, weight decay, decoupled, correction1, correction2",
            D.update[Adam](),
        ),
    ]
