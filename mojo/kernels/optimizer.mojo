"""Optimizer updates over a whole arena in one pass. n is the number of floats, a multiple of LANES.

g is a sum over samples; `mean` = 1 / (number of samples) makes it the mean, once, here.
"""

from std.math import sqrt

from .lanes import F32, LANES, Ptr, Vec, load, store, madd


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
    """Stochastic gradient descent as PyTorch writes it (Sutskever et al. 2013, with the rate outside the momentum):
    d = g + wd w; v = mu v + d; d = d + mu v if nesterov else v; w -= lr d.
    """
    for i in range(0, n, LANES):
        var wi = load(w, i)
        var d = load(g, i) * mean
        d = madd(wi, Vec(weight_decay), d)
        if momentum != 0:
            var vi = madd(load(v, i), Vec(momentum), d)
            store(v, i, vi)
            d = madd(vi, Vec(momentum), d) if nesterov else vi
        store(w, i, madd(d, Vec(-lr), wi))


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
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) if `decoupled`; corrections are 1 - beta^t.

    d = g (+ wd w); m = b1 m + (1 - b1) d; v = b2 v + (1 - b2) d^2; w = w (1 - lr wd if decoupled)
    - lr (m / c1) / (sqrt(v / c2) + eps).
    """
    for i in range(0, n, LANES):
        var wi = load(w, i)
        var d = load(g, i) * mean
        if decoupled:
            wi = wi * (1 - lr * weight_decay)
        else:
            d = madd(wi, Vec(weight_decay), d)
        var mi = load(m, i) * beta1 + d * (1 - beta1)
        var vi = load(v, i) * beta2 + d * d * (1 - beta2)
        store(m, i, mi)
        store(v, i, vi)
        var step = (mi / correction1) / (sqrt(vi / correction2) + eps)
        store(w, i, madd(step, Vec(-lr), wi))
