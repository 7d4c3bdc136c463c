"""An activation of one's own: mish, x tanh(log(1 + e^x)) (Misra 2019), for CPUs and GPUs. own_op.py uses it."""

from kernels.elementwise import sigmoid
from kernels.functions import exp, log, tanh
from kernels.lanes import F32
from kernels.op import Device, OpOf


@always_inline
def softplus[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return max(x, 0) + log(1 + exp(-abs(x)))


@always_inline
def mish[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return x * tanh(softplus(x))


@always_inline
def mish_gradient[w: Int](dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
    var t = tanh(softplus(x))
    return dy * (t + x * sigmoid(x) * (1 - t * t))


def ops[D: Device]() -> List[OpOf[D.Run]]:
    return [
        OpOf("mish_forward", "y; x; n", D.map[mish](), "features"),
        OpOf("mish_backward", "dx; dy, x; n", D.map[mish_gradient](), "features"),
    ]
