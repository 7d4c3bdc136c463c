"""The environment variables that decide the bits of results: one list.

`odyssey launch` passes them on to ranks. When ranks compute different bits, the error names those
of them in which the ranks differ. docs/launch.md shows the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OTHER_ARITHMETIC = "ODYSSEY_OTHER_ARITHMETIC"  # set: ranks may compute different results
#: A name that ends with "*" stands for all names that start so.
DECIDE_BITS = (
    # kernels of PyTorch, oneDNN and MKL: the instructions that they use
    "ATEN_* ONEDNN_* DNNL_* MKL_* "
    # threads, and the order in which they add
    "OMP_* GOMP_* KMP_* "
    # other libraries for products, and NumPy
    "OPENBLAS_* BLIS_* VECLIB_* NPY_* "
    # code that torch.compile generates
    "TORCHINDUCTOR_* TORCHDYNAMO_* TORCH_COMPILE_DISABLE "
    # products of GPUs
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE CUBLAS_WORKSPACE_CONFIG "
    # functions of the C library, and libraries that replace others
    "GLIBC_TUNABLES LD_PRELOAD "
    # odyssey's kernels
    "ODYSSEY_TARGET_CPU ODYSSEY_TARGET_ACCELERATOR ODYSSEY_KERNELS"
).split()


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a variable is one of these names, of which "X*" stands for all with X."""
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )


def deciding(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that decide bits, sorted by name.

    Those of folders, such as caches of compiled code, are not among them.
    """
    names = sorted(
        name
        for name in environment
        if is_named(name, DECIDE_BITS) and not name.endswith(("_DIR", "_PATH"))
    )
    return {name: environment[name] for name in names}
