"""Convolution and linear layers as a textbook has them, one float at a time."""

from kernels.conv2d import Conv
from kernels.lanes import LANES, Ptr


def conv2d_forward_naive[
    L: Int = LANES
](y: Ptr, x: Ptr, w: Ptr, b: Ptr, size: Conv,):
    """The sum as it is written in a textbook, one float at a time."""
    var P = size.P()
    var Q = size.Q()
    for g in range(size.G):
        for k in range(size.K):
            for p in range(P):
                for q in range(Q):
                    for l in range(L):
                        var s = b[unsafe_offset=k]
                        for c in range(size.C):
                            for r in range(size.R):
                                for t in range(size.T):
                                    s += (
                                        w[unsafe_offset=((k * size.C + c) * size.R + r) * size.T + t]
                                        * x[
                                            unsafe_offset=(
                                                ((g * size.C + c) * size.H + p * size.S + r) * size.W + q * size.S + t
                                            )
                                            * L
                                            + l
                                        ]
                                    )
                        y[unsafe_offset=(((g * size.K + k) * P + p) * Q + q) * L + l] = s


def conv2d_backward_naive[
    L: Int = LANES
](dx: Ptr, dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, w: Ptr, size: Conv,):
    """Every product of the forward sum hands dy to both its factors. Adds to dx, too."""
    var P = size.P()
    var Q = size.Q()
    for g in range(size.G):
        for k in range(size.K):
            for p in range(P):
                for q in range(Q):
                    for l in range(L):
                        var d = dy[unsafe_offset=(((g * size.K + k) * P + p) * Q + q) * L + l]
                        db[unsafe_offset=k] += d
                        for c in range(size.C):
                            for r in range(size.R):
                                for t in range(size.T):
                                    var wi = ((k * size.C + c) * size.R + r) * size.T + t
                                    var xi = (
                                        ((g * size.C + c) * size.H + p * size.S + r) * size.W + q * size.S + t
                                    ) * L + l
                                    dw[unsafe_offset=wi] += d * x[unsafe_offset=xi]
                                    dx[unsafe_offset=xi] += d * w[unsafe_offset=wi]


def linear_forward_naive(y: Ptr, x: Ptr, w: Ptr, b: Ptr, G: Int, I: Int, O: Int):
    """The sum as it is written in a textbook, one float at a time."""
    for g in range(G):
        for o in range(O):
            for l in range(LANES):
                var s = b[unsafe_offset=o]
                for i in range(I):
                    s += w[unsafe_offset=o * I + i] * x[unsafe_offset=(g * I + i) * LANES + l]
                y[unsafe_offset=(g * O + o) * LANES + l] = s


def linear_backward_naive(dx: Ptr, dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, w: Ptr, G: Int, I: Int, O: Int):
    """Every product of the forward sum hands dy to both its factors. Adds to dx, too."""
    for g in range(G):
        for o in range(O):
            for l in range(LANES):
                var d = dy[unsafe_offset=(g * O + o) * LANES + l]
                db[unsafe_offset=o] += d
                for i in range(I):
                    var xi = (g * I + i) * LANES + l
                    dw[unsafe_offset=o * I + i] += d * x[unsafe_offset=xi]
                    dx[unsafe_offset=xi] += d * w[unsafe_offset=o * I + i]
