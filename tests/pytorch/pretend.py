"""A device "pretend" of PyTorch for tests without a GPU: its tensors aren't the host's, though
their memory is.

It refuses what a CUDA tensor refuses: `numpy()`, data of two devices in one operation, and
addresses for the host. It has a generator and autocast of its own. Arithmetic is the CPU's, so bits
can be compared with those of the CPU. PyTorch calls this way to add a device experimental.

Import this module before a test moves something to "pretend".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from odyssey.capture.values import kind_of, register
from odyssey.torch import captured  # noqa: F401  (it registers tensors)
from odyssey.torch.device import PLAIN_TENSORS

NAME = "pretend"
# The host can't read addresses with this bit.
ADDRESS_BIT = 1 << 46


class _DeviceModule:
    """The module `torch.pretend`, which is to this device what `torch.cuda` is to CUDA."""

    generator = torch.Generator()

    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    synchronize = staticmethod(lambda device=None: None)
    set_device = staticmethod(lambda device: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        cls.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    @classmethod
    def get_rng_state(cls, device: Any = NAME) -> torch.Tensor:
        return cls.generator.get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor, device: Any = NAME) -> None:
        cls.generator.set_state(state)


_setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
DEVICE = torch.device(NAME, 0)
_DRAWING = ("dropout", "bernoulli", "normal", "uniform", "rand", "exponential", "random")


class Pretend(torch.Tensor):
    """A tensor of the device. raw: the tensor of the host that has its numbers."""

    raw: torch.Tensor
    _not_state = ("raw",)  # odyssey captures attributes that are set on parameters

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Pretend:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        tensor.raw = raw
        return tensor

    def numpy(self, *args: Any, **keywords: Any) -> Any:
        raise TypeError(
            f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first."
        )

    def tolist(self) -> Any:
        return self.raw.tolist()  # a copy to the host, as for CUDA

    def __array__(self, *args: Any) -> Any:
        return self.numpy()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw  # type: ignore[attr-defined]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return ADDRESS_BIT | self.raw.data_ptr()

    def __repr__(self, **keywords: Any) -> str:
        return f"{self.raw!r}, device='{NAME}:0'"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


PLAIN_TENSORS.add(Pretend)
register(kind_of(torch.zeros(1))._replace(types=(torch.Tensor, Pretend)))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the memory behind the tensors.

    Raises RuntimeError: it has tensors of the host too, as PyTorch does for CUDA.
    """
    _use_threads_of_main()
    operation = func.overloadpacket
    is_copy = operation is torch.ops.aten.copy_
    leaves = pytree.tree_leaves((args, kwargs))
    of_host = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Pretend)]
    if any(tensor.dim() for tensor in of_host) and not is_copy:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! ({func})"
        )
    to_host = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
    named = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
    raw_args, raw_named = pytree.tree_map_only(Pretend, lambda t: t.raw, (args, named))
    out = _draw_from_device(func, raw_args, raw_named)
    if to_host or (is_copy and not isinstance(args[0], Pretend)):
        return out

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, Pretend) else Pretend(tensor)

    wrapped = pytree.tree_map_only(torch.Tensor, wrap, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


_main_threads = 1  # of torch, in the main thread


def _use_threads_of_main() -> None:
    """Sets the threads of torch in the thread that runs backward passes of the device.

    They are a setting of each thread, and decide bits of operations of the CPU.
    """
    global _main_threads
    if threading.current_thread() is threading.main_thread():
        _main_threads = torch.get_num_threads()
    elif torch.get_num_threads() != _main_threads:
        torch.set_num_threads(_main_threads)


def _draw_from_device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation; if it draws random numbers, they are from the device's generator."""
    is_drawing = any(name in func.name() for name in _DRAWING)
    if not is_drawing or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    of_host = torch.default_generator.get_state()
    torch.default_generator.set_state(_DeviceModule.generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        _DeviceModule.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(of_host)


@torch.library.impl("aten::empty.memory_format", "privateuseone")
def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Pretend:
    return Pretend(torch.empty(size, dtype=dtype))


@torch.library.impl("aten::empty_strided", "privateuseone")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Pretend:
    return Pretend(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl("aten::_copy_from", "privateuseone")
def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.raw if isinstance(tensor, Pretend) else tensor

    raw(target).copy_(raw(source))
    return target


# --- autocast: what the host's does, for the operations that products come down to ---

_autocast = torch.library.Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
_NARROWED = ("linear", "addmm", "mm", "bmm", "matmul", "conv2d", "scaled_dot_product_attention")


def _narrowing(name: str) -> Callable[..., Any]:
    """Returns an operation that casts its floats to the dtype of autocast."""
    operation = getattr(torch.ops.aten, name).default
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            dtype = torch.get_autocast_dtype(NAME)

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
                return tensor.to(dtype) if is_cast else tensor

            args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return narrowed


for _name in _NARROWED:
    _aten.impl(_name, _narrowing(_name), "AutocastPrivateUse1")
