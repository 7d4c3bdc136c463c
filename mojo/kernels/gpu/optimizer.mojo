"""Optimizer updates on a GPU: the formulas of kernels/optimizer.mojo, a whole arena in one launch, four floats per thread.

The device decides itself whether the step is taken: where *ok is 0 nothing changes, and no host has to wait for it.
"""

from ..lanes import F32, IntPtr, Ptr
from ..optimizer import Adam, Sgd
from ..record import sizes_of
from .launch import blocks, GpuOp, Launch, Queue
from .quads import THREADS, aligned, index


@always_inline
def _load[w: Int](p: Ptr, i: Int) -> SIMD[F32, w]:
    return p.unsafe_offset(i).unsafe_load[width=w, alignment=4 * w]()


@always_inline
def _store[w: Int](p: Ptr, i: Int, v: SIMD[F32, w]):
    p.unsafe_offset(i).unsafe_store[alignment=4 * w](0, v)


def _sgd(
    ok: IntPtr,
    w: Ptr,
    v: Ptr,
    g: Ptr,
    samples: Ptr,
    n_: Int64,
    lr: Float32,
    momentum: Float32,
    weight_decay: Float32,
    nesterov: Int32,
):
    var n = Int(n_)
    var i = 4 * index()
    if i >= n or ok[] == 0:
        return
    var mean = 1 / samples[]
    var rule = Sgd(lr, momentum, weight_decay, nesterov != 0)

    @always_inline
    def update[width: Int](i: Int) {imm}:
        var wi = _load[width](w, i)
        var vi = SIMD[F32, width](0)
        if momentum != 0:
            vi = _load[width](v, i)
        rule.update(wi, vi, _load[width](g, i), mean)
        if momentum != 0:
            _store(v, i, vi)
        _store(w, i, wi)

    if i + 4 <= n and aligned(w) and aligned(v) and aligned(g):
        update[4](i)
        return
    var end = min(i + 4, n)
    while i < end:
        update[1](i)
        i += 1


def sgd(
    q: Queue,
    ok: IntPtr,
    w: Ptr,
    v: Ptr,  # momentum buffer; untouched if momentum is 0
    g: Ptr,
    samples: Ptr,  # how many samples g is a sum over
    n: Int,
    rule: Sgd,
) raises:
    """Stochastic gradient descent; the bits of the CPU."""
    q.enqueue_function[_sgd](
        ok,
        w,
        v,
        g,
        samples,
        Int64(n),
        rule.lr,
        rule.momentum,
        rule.weight_decay,
        Int32(rule.nesterov),
        grid_dim=blocks(n, 4 * THREADS),
        block_dim=THREADS,
    )


def _adam(
    ok: IntPtr,
    w: Ptr,
    m: Ptr,
    v: Ptr,
    g: Ptr,
    samples: Ptr,
    n_: Int64,
    lr: Float32,
    beta1: Float32,
    beta2: Float32,
    eps: Float32,
    weight_decay: Float32,
    decoupled: Int32,
    correction1: Float32,
    correction2: Float32,
):
    var n = Int(n_)
    var i = 4 * index()
    if i >= n or ok[] == 0:
        return
    var mean = 1 / samples[]
    var rule = Adam(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled != 0,
        correction1,
        correction2,
    )

    @always_inline
    def update[width: Int](i: Int) {imm}:
        var wi = _load[width](w, i)
        var mi = _load[width](m, i)
        var vi = _load[width](v, i)
        rule.update(wi, mi, vi, _load[width](g, i), mean)
        _store(m, i, mi)
        _store(v, i, vi)
        _store(w, i, wi)

    if i + 4 <= n and (Int(w) | Int(m) | Int(v) | Int(g)) & 15 == 0:
        update[4](i)
        return
    var end = min(i + 4, n)
    while i < end:
        update[1](i)
        i += 1


def adam(
    q: Queue,
    ok: IntPtr,
    w: Ptr,
    m: Ptr,
    v: Ptr,
    g: Ptr,
    samples: Ptr,  # how many samples g is a sum over
    n: Int,
    rule: Adam,
) raises:
    """Adam, or AdamW if `decoupled`; corrections are 1 - beta^t."""
    q.enqueue_function[_adam](
        ok,
        w,
        m,
        v,
        g,
        samples,
        Int64(n),
        rule.lr,
        rule.beta1,
        rule.beta2,
        rule.eps,
        rule.weight_decay,
        Int32(rule.decoupled),
        rule.correction1,
        rule.correction2,
        grid_dim=blocks(n, 4 * THREADS),
        block_dim=THREADS,
    )


# --- ops ----------------------------------------------------------------------------------


def _sgd_op(q: Queue, r: Launch) raises:
    var rule = sizes_of[Sgd](r, 6)
    sgd(q, r.ok(), r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), r.int(5), rule)


def _adam_op(q: Queue, r: Launch) raises:
    adam(
        q,
        r.ok(),
        r.ptr(1),
        r.ptr(2),
        r.ptr(3),
        r.ptr(4),
        r.ptr(5),
        r.int(6),
        sizes_of[Adam](r, 7),
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("sgd", _sgd_op), GpuOp("adam", _adam_op)]
