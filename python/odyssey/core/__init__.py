"""Tensors and their ops, the program that is recorded of a step, and the compiled kernels that
run it.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "core.arena": "Arena",
        "core.cuda": "cuda",
        "core.fingerprint": "fingerprint",
        "core.functional": "functional",
        "core.native": "native",
        "core.program": "ONNX Range Record Recorder using",
        "core.random_scopes": "random_scopes",
        "core.tensor": "Tensor empty no_grad",
    },
)
