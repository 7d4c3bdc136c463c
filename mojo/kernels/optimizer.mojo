"""Optimizer updates over a run of n floats, an arena or any piece of one, in one pass.

What lies behind a run may be another parameter of the same rank (a piece of a layer that several ranks share ends
anywhere), so nothing is read or written there: the last, partial vector is masked.

g is a sum over samples; `mean` = 1 / (number of samples) makes it the mean, once, here. The `*_update` functions are the
formulas, for vectors of any width; gpu/optimizer.mojo uses them too.
"""

from std.math import sqrt
from std.sys import is_nvidia_gpu, llvm_intrinsic

from .lanes import (
    F32,
    LANES,
    Ptr,
    Vec,
    load,
    load_first,
    store,
    store_first,
    madd,
)
from .op import Op, call


@always_inline
def _root[L: SIMDLength, //](x: SIMD[F32, L]) -> SIMD[F32, L]:
    """The square root, rounded once; the library's is an approximation on NVIDIA's GPUs."""
    comptime if is_nvidia_gpu():
        var y = SIMD[F32, L]()
        comptime for i in range(Int(L)):
            y[i] = llvm_intrinsic["llvm.nvvm.sqrt.rn.f", Float32, has_side_effect=False](x[i])
        return y
    else:
        return sqrt(x)


@fieldwise_init
struct Sgd(TrivialRegisterPassable):
    """Stochastic gradient descent as PyTorch writes it (Sutskever et al. 2013, with the rate outside the momentum):
    d = g + wd w; v = mu v + d; d = d + mu v if nesterov else v; w -= lr d.
    """

    var lr: Float32
    var momentum: Float32
    var weight_decay: Float32
    var nesterov: Bool

    @always_inline
    def update[
        L: SIMDLength, //
    ](
        self,
        mut w: SIMD[F32, L],
        mut v: SIMD[F32, L],  # neither read nor changed if momentum is 0
        g: SIMD[F32, L],
        mean: Float32,
    ):
        """One step of L weights; `mean` g is the gradient."""
        var mu = SIMD[F32, L](self.momentum)
        var d = madd(w, SIMD[F32, L](self.weight_decay), g * mean)
        if self.momentum != 0:
            v = madd(v, mu, d)
            d = madd(v, mu, d) if self.nesterov else v
        w = madd(d, SIMD[F32, L](-self.lr), w)


@fieldwise_init
struct Adam(TrivialRegisterPassable):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) if `decoupled`; corrections are 1 - beta^t.

    d = g (+ wd w); m = b1 m + (1 - b1) d; v = b2 v + (1 - b2) d^2; w = w (1 - lr wd if decoupled)
    - lr (m / c1) / (sqrt(v / c2) + eps).
    """

    var lr: Float32
    var beta1: Float32
    var beta2: Float32
    var eps: Float32
    var weight_decay: Float32
    var decoupled: Bool
    var correction1: Float32
    var correction2: Float32

    @always_inline
    def update[
        L: SIMDLength, //
    ](self, mut w: SIMD[F32, L], mut m: SIMD[F32, L], mut v: SIMD[F32, L], g: SIMD[F32, L], mean: Float32,):
        """One step of L weights; `mean` g is the gradient."""
        var d = g * mean
        if self.decoupled:
            w = w * (1 - self.lr * self.weight_decay)
        else:
            d = madd(w, SIMD[F32, L](self.weight_decay), d)
        m = m * self.beta1 + d * (1 - self.beta1)
        v = v * self.beta2 + d * d * (1 - self.beta2)
        var step = (m / self.correction1) / (_root(v / self.correction2) + self.eps)
        w = madd(step, SIMD[F32, L](-self.lr), w)


@always_inline
def _load[whole: Bool](p: Ptr, i: Int, n: Int) -> Vec:
    return load(p, i) if whole else load_first(p, i, n - i)


@always_inline
def _store[whole: Bool](p: Ptr, i: Int, v: Vec, n: Int):
    comptime if whole:
        store(p, i, v)
    else:
        store_first(p, i, v, n - i)


@always_inline
def _each[F: def[whole: Bool](Int) -> None, //](f: F, n: Int):
    """Calls f with the beginning of every vector of n floats, and whether it is a whole one."""
    var i = 0
    while i + LANES <= n:
        f[True](i)
        i += LANES
    if i < n:
        f[False](i)


def sgd(w: Ptr, v: Ptr, g: Ptr, samples: Ptr, n: Int, rule: Sgd):
    """Takes one step of n weights; v is the momentum buffer, untouched if momentum is 0. g is a sum over so many `samples`.
    """
    var mean = 1 / samples[]

    @always_inline
    def step[whole: Bool](i: Int) {imm}:
        var wi = _load[whole](w, i, n)
        var vi = Vec(0)
        if rule.momentum != 0:
            vi = _load[whole](v, i, n)
        rule.update(wi, vi, _load[whole](g, i, n), mean)
        if rule.momentum != 0:
            _store[whole](v, i, vi, n)
        _store[whole](w, i, wi, n)

    _each(step, n)


def adam(w: Ptr, m: Ptr, v: Ptr, g: Ptr, samples: Ptr, n: Int, rule: Adam):
    """Takes one step of n weights; g is a sum over so many `samples`."""
    var mean = 1 / samples[]

    @always_inline
    def step[whole: Bool](i: Int) {imm}:
        var wi = _load[whole](w, i, n)
        var mi = _load[whole](m, i, n)
        var vi = _load[whole](v, i, n)
        rule.update(wi, mi, vi, _load[whole](g, i, n), mean)
        _store[whole](m, i, mi, n)
        _store[whole](v, i, vi, n)
        _store[whole](w, i, wi, n)

    _each(step, n)


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op(
            "sgd",
            "+w, +v; g, samples; n, lr, momentum, weight decay, nesterov",
            call[sgd],
        ),
        Op(
            "adam",
            "+w, +m, +v; g, samples; n, lr, beta1, beta2, eps, weight decay, decoupled, correction1, correction2",
            call[adam],
        ),
    ]
