"""The device of a module: the only file that knows what memory, generators and settings a GPU has.
streams.py knows its streams, and links.py what is between the GPUs of ranks.

Everything else of odyssey.torch asks a `Device` for memory, copies and settings, and has no branch
for CUDA. On the CPU, memory is shared with NumPy, so nothing is copied. On other devices the host
sees copies.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base import machine
from ..core import cuda as cuda_driver
from ..core import fingerprint, native, random_scopes
from ..data import mapped
from ..errors import ConfigError, DeviceError
from ..nn.utils import global_norm
from .device_averages import move_averages
from .device_sums import DeviceNorm, fingerprint_of

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
#: The values of settings that decide the bits of a device, in a fixed order; empty for the CPU.
DeviceSettings = tuple[bool, ...]
#: A function that combines an array of this rank with those of the others.
Combine = Callable[[np.ndarray], np.ndarray]
#: Classes of tensors that are nothing but their numbers. Subclasses may keep more, so they aren't.
PLAIN_TENSORS: set[type] = {torch.Tensor}


def default_shard_size(samples: int, is_host: bool = True) -> int:
    """Returns the samples per shard for a global batch of so many, if the user sets none.

    Eight shards can be shared by eight ranks, and PyTorch takes longer for many small shards than
    for few large ones. The least size is small on GPUs, where large models train in small batches.
    But a shard of one sample would have no variance for BatchNorm.

    Args:
        samples: the samples of the global batch.
        is_host: True for a module on the CPU.
    """
    least = 32 if is_host else 2
    return max(least, -(-samples // 8))


class Device:
    """The device that a module's parameters are on.

    Args:
        device: as PyTorch names it.

    Attributes:
        name: as PyTorch writes it, for example "cuda:0".
        is_host: True for the CPU, whose memory NumPy and the reductions share.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.type = device.type
        self.name = str(device)
        self.is_host = device.type == "cpu"
        self._copies: CopyStream | None = None
        if device.type == "cuda":
            self._copies = CopyStream(device)
            # cuBLAS reads it when it starts: with one workspace, its sums have one order
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not self.is_host:
            random_scopes.add(self.name, _DeviceGenerator(self))

    # --- memory ---

    def zeros(self, floats: int) -> torch.Tensor:
        """Returns new float32 memory (floats,) of zeros.

        Kernels of the CPU need it aligned there.
        """
        if self.is_host:
            return torch.from_numpy(native.aligned(floats) if floats else np.empty(0, np.float32))
        return torch.zeros(floats, device=self.torch_device)

    def put(self, tree: Any) -> Any:
        """Returns a tree (data/nested.py) with its tensors on the device.

        On the CPU the tree is returned as it is.
        """
        if self.is_host:
            return tree

        def move(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, torch.Tensor)
            return leaf.to(self.torch_device, non_blocking=True) if is_tensor else leaf

        return mapped(move, tree)

    def bring(self, tree: Any) -> Any:
        """Returns a tree with its tensors on the device, as `put` does, for samples of a shard.

        A GPU copies them while it computes the shard before. The host waits for neither.
        """
        return self.put(tree) if self._copies is None else self._copies.bring(tree)

    def tensor_of(self, value: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Returns a value as a tensor on the device. It shares memory with one that is there."""
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        return tensor.to(self.torch_device)

    def read(self, number: torch.Tensor) -> float | torch.Tensor:
        """Returns a tensor of one number as a number that can be computed with.

        From another device it stays a tensor, of float64, so that the host doesn't wait for it.
        """
        return float(number) if self.is_host else number.detach().double()

    def write(
        self, flat: torch.Tensor, start: int, numbers: Sequence[float | torch.Tensor]
    ) -> None:
        """Writes numbers into a flat tensor of the device, from float `start` on.

        Some of them may be tensors, as `read` returns them.
        """
        target = flat[start : start + len(numbers)]
        if self.is_host:
            target.numpy()[:] = numbers
            return
        plain = [0.0 if isinstance(one, torch.Tensor) else float(one) for one in numbers]
        target.copy_(torch.tensor(plain, dtype=torch.float32), non_blocking=True)
        for place, one in enumerate(numbers):
            if isinstance(one, torch.Tensor):
                target[place] = one

    def number(self, value: float, dtype: torch.dtype = torch.float32) -> float | torch.Tensor:
        """Returns a number to divide tensors of the device by, which have this dtype.

        CUDA multiplies by the reciprocal of a Python number, which has other bits than a division.
        """
        if self.is_host:
            return value
        return torch.full((), value, dtype=dtype, device=self.torch_device)

    def pin(self, array: np.ndarray) -> None:
        """Pins the memory of an array until it is freed, so that copies to and from it are fast.

        Does nothing on the CPU, and if the system doesn't allow it.
        """
        if self.type != "cuda" or not array.nbytes:
            return
        address = array.ctypes.data
        with self.entered(), contextlib.suppress(DeviceError):
            # CUDA's runtime would keep an error of this call for the next kernel
            cuda_driver.driver().call("cuMemHostRegister_v2", address, array.nbytes, _PORTABLE)
            unregister = torch.cuda.cudart().cudaHostUnregister
            weakref.finalize(array, unregister, address).atexit = False

    # --- streams and other ranks ---

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the device the current one in the block."""
        if self.type == "cuda":
            with torch.cuda.device(self.torch_device):
                yield
        else:
            yield

    def stream(self) -> int:
        """Returns the CUstream that is current."""
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def identity(self) -> np.ndarray:
        """Returns bytes (uint8) that no other device of any machine has."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        text = f"{machine()} {getattr(properties, 'uuid', self.name)}"
        return np.frombuffer(text.encode(), np.uint8)

    # --- numbers of whole tensors ---

    def fingerprint(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> int:
        """Returns the fingerprint of flat float32 tensors, given with the number of their first
        float in the whole. Other devices copy one number to the host.
        """
        if self.is_host:
            return fingerprint.add([fingerprint.of(flat.numpy(), start) for flat, start in tensors])
        return fingerprint_of(tensors)

    def norm(self, flat: torch.Tensor, combine: Callable[[str], Combine]) -> float:
        """Returns the norm of a flat float32 tensor, or of its parts on all ranks.

        combine: returns a function that combines an array of all ranks by "max" or by "sum".
        """
        largest = combine("max")
        total = combine("sum")
        if not self.is_host:
            return global_norm([flat], largest, total, machine=DeviceNorm())
        runs = [(flat.data_ptr(), flat.numel())] if flat.numel() else []
        return global_norm(runs, largest, total)

    def move_averages(
        self,
        averages: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        rate: float,
        keeps_equal: bool,
    ) -> None:
        """Moves averages towards weights, without a copy to the host; see device_averages.py."""
        move_averages(averages, weights, rate, keeps_equal)

    # --- settings ---

    def settings(self) -> DeviceSettings:
        """Returns the settings of the device with which shards run; empty for the CPU.

        Whether products may round to TF32 or to 16 bits is as the program has set it. cuDNN may not
        choose algorithms by their time, and attention of cuDNN isn't deterministic.
        """
        if self.type != "cuda":
            return ()
        current = _CudaSettings(*read_settings())
        return tuple(
            current._replace(cudnn_benchmark=False, cudnn_deterministic=True, cudnn_attention=False)
        )

    @property
    def autocast_key(self) -> Any:
        """The dispatch key under which PyTorch casts the arguments of operations."""
        name = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}.get(self.type, "AutocastPrivateUse1")
        return getattr(torch._C.DispatchKey, name)

    def describe(self) -> list[Any]:
        """Returns the properties of the device and its libraries on which results depend."""
        if self.type != "cuda":
            return [self.type]
        properties = torch.cuda.get_device_properties(self.torch_device)
        return [
            properties.name,
            properties.multi_processor_count,
            *torch.cuda.get_device_capability(self.torch_device),
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
            str(torch.backends.cuda.preferred_blas_library()),
            *self.settings(),
        ]


class _CudaSettings(NamedTuple):
    """The settings of CUDA that decide bits, as torch.backends has them."""

    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn_tf32: bool
    short_sums_bf16: bool
    short_sums_fp16: bool
    flash_attention: bool
    memory_efficient_attention: bool
    plain_attention: bool
    cudnn_attention: bool


def read_settings() -> DeviceSettings:
    """Returns the settings of CUDA that decide bits, as they are."""
    cudnn = torch.backends.cudnn
    cuda = torch.backends.cuda
    return tuple(
        _CudaSettings(
            cudnn_benchmark=cudnn.benchmark,
            cudnn_deterministic=cudnn.deterministic,
            cudnn_tf32=cudnn.allow_tf32,
            short_sums_bf16=cuda.matmul.allow_bf16_reduced_precision_reduction,
            short_sums_fp16=cuda.matmul.allow_fp16_reduced_precision_reduction,
            flash_attention=cuda.flash_sdp_enabled(),
            memory_efficient_attention=cuda.mem_efficient_sdp_enabled(),
            plain_attention=cuda.math_sdp_enabled(),
            cudnn_attention=cuda.cudnn_sdp_enabled(),
        )
    )


def write_settings(settings: DeviceSettings) -> None:
    """Sets the settings of CUDA that `read_settings` returned."""
    wanted = _CudaSettings(*settings)
    cudnn = torch.backends.cudnn
    cuda = torch.backends.cuda
    cudnn.benchmark = wanted.cudnn_benchmark
    cudnn.deterministic = wanted.cudnn_deterministic
    cudnn.allow_tf32 = wanted.cudnn_tf32
    cuda.matmul.allow_bf16_reduced_precision_reduction = wanted.short_sums_bf16
    cuda.matmul.allow_fp16_reduced_precision_reduction = wanted.short_sums_fp16
    cuda.enable_flash_sdp(wanted.flash_attention)
    cuda.enable_mem_efficient_sdp(wanted.memory_efficient_attention)
    cuda.enable_math_sdp(wanted.plain_attention)
    cuda.enable_cudnn_sdp(wanted.cudnn_attention)


def device_of(module: torch.nn.Module) -> Device:
    """Returns the device of a module's parameters; the CPU if it has none."""
    parameter = next(module.parameters(), None)
    return Device(torch.device("cpu") if parameter is None else parameter.device)


@contextlib.contextmanager
def on_host(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """Yields a tensor as an array. What the block writes into it becomes the tensor's values."""
    array = host_array(tensor)
    yield array
    if tensor.device.type != "cpu":
        tensor.copy_(torch.from_numpy(array))


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as an array: its memory on the CPU, a copy of it from other devices."""
    return tensor.detach().cpu().numpy()


class CopyStream:
    """Copies from the host to a GPU, on a stream beside the one that computes.

    A copy starts at once, from pinned memory. What the host launches afterwards waits for it on the
    GPU. Never run on a GPU: tests/pytorch/test_copy_stream.py looks at the order of the calls.

    Args:
        device: the GPU.
        cuda: the module that makes streams.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream: Any = None  # made by the first copy, because CUDA may not have started

    def bring(self, tree: Any) -> Any:
        """Returns a tree with its tensors on the GPU."""
        if self._stream is None:
            self._stream = self._cuda.Stream(self._device)
        compute = self._cuda.current_stream(self._device)
        brought: list[torch.Tensor] = []

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                return leaf
            pinned = self._pinned(leaf)
            with self._cuda.stream(self._stream):
                brought.append(pinned.to(self._device, non_blocking=True))
            return brought[-1]

        tree = mapped(copy, tree)
        if brought:
            compute.wait_event(self._stream.record_event())
        for tensor in brought:
            # its memory is of the other stream: not used again before the shard is computed
            tensor.record_stream(compute)
        return tree

    @staticmethod
    def _pinned(tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the host in memory that a GPU reads while the host continues.

        PyTorch doesn't use that memory again before the copy has ended.
        """
        if tensor.layout != torch.strided:
            return tensor
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        return (tensor if is_dense else tensor.contiguous()).pin_memory()


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors in memory of the host, with one copy from the device for each dtype.

    Tensors that are there already are returned as they are.
    """
    on_host_now = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors if tensor.device.type != "cpu"}:
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype and t.device.type != "cpu"]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in places]).cpu()
        parts = flat.split([tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            # separate memory: bits of a later operation may depend on where a tensor starts
            on_host_now[i] = part.clone().view(tensors[i].shape)
    return on_host_now


class Findings:
    """Mistakes that a device finds. The host reads all of them at once, and waits only then."""

    def __init__(self) -> None:
        self._flags: list[torch.Tensor] = []
        self._messages: list[str] = []

    def add(self, flag: torch.Tensor, message: str) -> None:
        """Notes a mistake, if the flag, a bool, is true.

        Raises ConfigError: it is true, and on the CPU.
        """
        if flag.device.type != "cpu":
            self._flags.append(flag)
            self._messages.append(message)
        elif flag:
            raise ConfigError(message)

    def read(self) -> None:
        """Raises ConfigError: a flag is true; the message is that of the first one."""
        flags = torch.stack(self._flags).tolist() if self._flags else []
        for is_true, message in zip(flags, self._messages, strict=True):
            if is_true:
                raise ConfigError(message)


class _DeviceGenerator:
    """The generator of a device as random scopes use it."""

    def __init__(self, device: Device) -> None:
        self._entered = device.entered
        self._device = device.torch_device
        self._module = torch.get_device_module(self._device)

    def mark(self) -> Any:
        return self.state().numpy().tobytes()

    def state(self) -> Any:
        return self._module.get_rng_state(self._device)

    def restore(self, state: Any) -> None:
        self._module.set_rng_state(state, self._device)

    def seed(self, number: int) -> None:
        with self._entered():
            self._module.manual_seed(number)
