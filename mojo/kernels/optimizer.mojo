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
from .op import Op
from .record import Record


@always_inline
def sgd_update[
    L: SIMDLength, //
](
    mut w: SIMD[F32, L],
    mut v: SIMD[F32, L],  # neither read nor changed if momentum is 0
    g: SIMD[F32, L],
    mean: Float32,
    lr: Float32,
    momentum: Float32,
    weight_decay: Float32,
    nesterov: Bool,
):
    """Stochastic gradient descent as PyTorch writes it (Sutskever et al. 2013, with the rate outside the momentum):
    d = g + wd w; v = mu v + d; d = d + mu v if nesterov else v; w -= lr d.
    """
    var d = g * mean
    d = madd(w, SIMD[F32, L](weight_decay), d)
    if momentum != 0:
        v = madd(v, SIMD[F32, L](momentum), d)
        d = madd(v, SIMD[F32, L](momentum), d) if nesterov else v
    w = madd(d, SIMD[F32, L](-lr), w)


@always_inline
def _root[L: SIMDLength, //](x: SIMD[F32, L]) -> SIMD[F32, L]:
    """The square root, rounded once; the library's is an approximation on NVIDIA's GPUs.
    """
    comptime if is_nvidia_gpu():
        var y = SIMD[F32, L]()
        comptime for i in range(Int(L)):
            y[i] = llvm_intrinsic[
                "llvm.nvvm.sqrt.rn.f", Float32, has_side_effect=False
            ](x[i])
        return y
    else:
        return sqrt(x)


@always_inline
def adam_update[
    L: SIMDLength, //
](
    mut w: SIMD[F32, L],
    mut m: SIMD[F32, L],
    mut v: SIMD[F32, L],
    g: SIMD[F32, L],
    mean: Float32,
    lr: Float32,
    beta1: Float32,
    beta2: Float32,
    eps: Float32,
    weight_decay: Float32,
    decoupled: Bool,
    correction1: Float32,
    correction2: Float32,
):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) if `decoupled`; corrections are 1 - beta^t.

    d = g (+ wd w); m = b1 m + (1 - b1) d; v = b2 v + (1 - b2) d^2; w = w (1 - lr wd if decoupled)
    - lr (m / c1) / (sqrt(v / c2) + eps).
    """
    var d = g * mean
    if decoupled:
        w = w * (1 - lr * weight_decay)
    else:
        d = madd(w, SIMD[F32, L](weight_decay), d)
    m = m * beta1 + d * (1 - beta1)
    v = v * beta2 + d * d * (1 - beta2)
    var step = (m / correction1) / (_root(v / correction2) + eps)
    w = madd(step, SIMD[F32, L](-lr), w)


def sgd(
    w: Ptr,
    v: Ptr,  # momentum buffer; untouched if momentum is 0
    g: Ptr,
    n: Int,
    mean: Float32,
    lr: Float32,
    momentum: Float32,
    weight_decay: Float32,
    nesterov: Bool,
):
    """Applies sgd_update to all."""

    var i = 0
    while i + LANES <= n:
        var wi = load(w, i)
        var vi = Vec(0)
        if momentum != 0:
            vi = load(v, i)
        sgd_update(
            wi, vi, load(g, i), mean, lr, momentum, weight_decay, nesterov
        )
        if momentum != 0:
            store(v, i, vi)
        store(w, i, wi)
        i += LANES
    if i < n:
        var wi = load_first(w, i, n - i)
        var vi = Vec(0)
        if momentum != 0:
            vi = load_first(v, i, n - i)
        sgd_update(
            wi,
            vi,
            load_first(g, i, n - i),
            mean,
            lr,
            momentum,
            weight_decay,
            nesterov,
        )
        if momentum != 0:
            store_first(v, i, vi, n - i)
        store_first(w, i, wi, n - i)


def adam(
    w: Ptr,
    m: Ptr,
    v: Ptr,
    g: Ptr,
    n: Int,
    mean: Float32,
    lr: Float32,
    beta1: Float32,
    beta2: Float32,
    eps: Float32,
    weight_decay: Float32,
    decoupled: Bool,
    correction1: Float32,
    correction2: Float32,
):
    """Applies adam_update to all."""

    @always_inline
    def update(mut wi: Vec, mut mi: Vec, mut vi: Vec, gi: Vec) {imm}:
        adam_update(
            wi,
            mi,
            vi,
            gi,
            mean,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            decoupled,
            correction1,
            correction2,
        )

    var i = 0
    while i + LANES <= n:
        var wi = load(w, i)
        var mi = load(m, i)
        var vi = load(v, i)
        update(wi, mi, vi, load(g, i))
        store(m, i, mi)
        store(v, i, vi)
        store(w, i, wi)
        i += LANES
    if i < n:
        var wi = load_first(w, i, n - i)
        var mi = load_first(m, i, n - i)
        var vi = load_first(v, i, n - i)
        update(wi, mi, vi, load_first(g, i, n - i))
        store_first(m, i, mi, n - i)
        store_first(v, i, vi, n - i)
        store_first(w, i, wi, n - i)


def _sgd(r: Record):
    sgd(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.int(5),
        1 / r.ptr(4)[],
        r.float(6),
        r.float(7),
        r.float(8),
        r.int(9) != 0,
    )


def _adam(r: Record):
    adam(
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.ptr(4),
        r.int(6),
        1 / r.ptr(5)[],
        r.float(7),
        r.float(8),
        r.float(9),
        r.float(10),
        r.float(11),
        r.int(12) != 0,
        r.float(13),
        r.float(14),
    )


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op(
            "sgd",
            "+w, +v; g, samples; n, lr, momentum, weight decay, nesterov",
            _sgd,
        ),
        Op(
            "adam",
            (
                "+w, +m, +v; g, samples; n, lr, beta1, beta2, eps, weight"
                " decay, decoupled, correction1, correction2"
            ),
            _adam,
        ),
    ]
