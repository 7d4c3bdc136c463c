"""Samples of torch's arithmetic: operations with fixed inputs, whose hashes ranks compare.

The last bits of these results depend on the processor, the libraries that torch calls (oneDNN, MKL)
and the environment variables that limit them. The shapes are chosen to reach different kernels:
products of a vector, of narrow and of wide matrices, convolutions with and without groups.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from .modes import Modes, flushes_subnormals

# rows, inputs and outputs of products
_PRODUCTS = ((1, 64, 64), (8, 33, 17), (32, 256, 48))
# samples, channels, outputs, height and width, kernel, stride, groups of convolutions
_CONVOLUTIONS = ((2, 3, 16, 12, 3, 1, 1), (2, 32, 16, 6, 1, 1, 1), (1, 16, 16, 7, 3, 2, 16))
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NUMBERS = 8191  # different inputs; a prime, so rows of matrices differ
_MOST_NUMBERS = 1 << 14  # inputs of one operation, with its start; more than any has


def sample(modes: Modes, device: torch.device) -> dict[str, str]:
    """Returns the hash of each kind of operation on a device by its name, such as "fp32 products".

    It draws no random numbers. A process computes it once for each combination of modes and device.
    """
    oneDNN = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    return dict(_sample(modes, device, oneDNN))


@functools.lru_cache(maxsize=8)
def _sample(modes: Modes, device: torch.device, oneDNN: bool) -> tuple[tuple[str, str], ...]:
    kinds: dict[str, Callable[[torch.dtype, torch.device], Iterable[torch.Tensor]]] = {
        "products": _compute_products,
        "convolutions": _compute_convolutions,
        "exponentials": _compute_exponentials,
        "reductions": _compute_reductions,
        "subnormal numbers": _compute_subnormals,
    }
    hashes: list[tuple[str, str]] = []
    with modes.held(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for precision, dtype in _DTYPES.items():
            for kind, compute in kinds.items():
                hashes.append((f"{precision} {kind}", _hash(compute(dtype, device))))
    return tuple(hashes)


def _hash(results: Iterable[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for result in results:
        digest.update(result.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@functools.cache
def _numbers() -> torch.Tensor:
    """Returns numbers from -4 to 4, some of them 1,000 times as small as others, float32. After the
    last one come the first ones again.

    Sums of numbers of one size would be exact, in any order.
    """
    index = torch.arange(_MOST_NUMBERS, dtype=torch.int64) % _NUMBERS
    numerators = (index * 2654435761) % _NUMBERS - _NUMBERS // 2
    return torch.ldexp(numerators.to(torch.float32), -(10 + index % 11))


def _fill(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, start: int = 0
) -> torch.Tensor:
    """Returns these numbers from `start` on. No operation may write into them."""
    count = torch.Size(shape).numel()
    return _numbers()[start : start + count].view(shape).to(device, dtype)


def _compute_products(dtype: torch.dtype, device: torch.device) -> Iterable[torch.Tensor]:
    for rows, inputs, outputs in _PRODUCTS:
        x = _fill((rows, inputs), dtype, device)
        weight = _fill((outputs, inputs), dtype, device, start=1)
        bias = _fill((outputs,), dtype, device, start=2)
        y = functional.linear(x, weight, bias)
        yield y
        yield y.t() @ x  # as the gradient of the weight


def _compute_convolutions(dtype: torch.dtype, device: torch.device) -> Iterable[torch.Tensor]:
    for samples, channels, outputs, size, kernel, stride, groups in _CONVOLUTIONS:
        x = _fill((samples, channels, size, size), dtype, device)
        weight = _fill((outputs, channels // groups, kernel, kernel), dtype, device, start=1)
        y = torch.conv2d(x, weight, stride=stride, groups=groups)
        yield y
        yield torch.nn.grad.conv2d_weight(x, weight.shape, y, stride=stride, groups=groups)
        if groups == 1 and kernel > 1:
            yield torch.nn.grad.conv2d_input(x.shape, weight, y, stride=stride, groups=groups)


def _compute_exponentials(dtype: torch.dtype, device: torch.device) -> Iterable[torch.Tensor]:
    x = _fill((1000,), dtype, device)
    for function in (torch.exp, torch.tanh, torch.sigmoid, torch.erf, functional.gelu):
        yield function(x)
    for function in (torch.log1p, torch.sqrt, torch.rsqrt):
        yield function(x.abs() + 0.25)


def _compute_reductions(dtype: torch.dtype, device: torch.device) -> Iterable[torch.Tensor]:
    x = _fill((8, 301), dtype, device)
    yield torch.softmax(x, 1)
    yield torch.log_softmax(x, 1)
    yield torch.layer_norm(x, (301,))
    yield x.sum()
    yield x.mean(0)
    yield x.var(1)
    yield torch.linalg.vector_norm(x)


def _compute_subnormals(dtype: torch.dtype, device: torch.device) -> Iterable[torch.Tensor]:
    tiny = torch.full((64,), 1 << 20, dtype=torch.int32).view(torch.float32).to(device, dtype)
    yield tiny * 0.75
    yield tiny + tiny
    yield torch.tensor([flushes_subnormals()])  # as this process does


def libraries() -> dict[str, str]:
    """Returns the versions of torch and of what it calls, to name the cause of a difference."""
    build = hashlib.blake2b(torch.__config__.show().encode(), digest_size=4).hexdigest()
    return {"torch": str(torch.__version__), "the build of torch": build}
