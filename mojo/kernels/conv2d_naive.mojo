"""The definition of a convolution, one float at a time: for strides in rows, and to check the fast forms against."""

from .conv2d import Conv
from .lanes import LANES, Ptr


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
