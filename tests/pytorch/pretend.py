"""A device "pretend" of PyTorch for tests without a GPU: its tensors aren't the host's, though
their memory is.

It refuses what a CUDA tensor refuses: `numpy()`, data of two devices in one operation, and
addresses for the host. It has a generator and autocast of its own. Arithmetic is the CPU's, so bits
can be compared with those of the CPU. PyTorch calls this way to add a device experimental.

Import this module before a test moves something to "pretend".
"""

from __future__ import annotations

import threading
import traceback
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


class HostCopies:
    """The copies to the host, which waits for each of them. sizes: the elements of each."""

    _not_state = ("sizes",)

    def __init__(self) -> None:
        self.sizes: list[int] = []


copies = HostCopies()
# The host can't read addresses with this bit.
ADDRESS_BIT = 1 << 48


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
_move = torch.nn.Module.to
_one_moves = threading.Lock()


def _move_and_keep_parameters(module: torch.nn.Module, *target: Any, **options: Any) -> Any:
    """Moves a module and keeps its parameters, so that tied ones stay tied, as on CUDA."""
    if not any(NAME in str(one) for one in (*target, *options.values())):
        return _move(module, *target, **options)
    with _one_moves:  # ranks may be threads, and this is a setting of the process
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return _move(module, *target, **options)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


torch.nn.Module.to = _move_and_keep_parameters
_DRAWING = ("dropout", "bernoulli", "normal", "uniform", "rand", "exponential", "random")


class Pretend(torch.Tensor):
    """A tensor of the device. raw: the tensor of the host that has its numbers."""

    raw: torch.Tensor
    # odyssey captures attributes that are set on parameters
    _not_state = ("raw", "_memory")

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
        copies.sizes.append(self.numel())
        return self.raw.tolist()

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

    def record_stream(self, stream: Any) -> None:
        """Does nothing, because memory isn't used again while a tensor has it."""

    def data_ptr(self) -> int:
        return ADDRESS_BIT | self.raw.data_ptr()

    def __repr__(self, **keywords: Any) -> str:
        return f"{self.raw!r}, device='{NAME}:0'"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return run(func, args, kwargs or {})
        except Exception:
            # PyTorch ends the process if an operation fails in its thread of backward passes
            if threading.current_thread() is not threading.main_thread():
                traceback.print_exc()
            raise


PLAIN_TENSORS.add(Pretend)
register(kind_of(torch.zeros(1))._replace(types=(torch.Tensor, Pretend)))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the memory behind the tensors.

    Raises RuntimeError: it has tensors of the host too, as PyTorch does for CUDA.
    """
    _use_threads_of_main()
    if func._can_decompose() and _is_composite(func):
        # PyTorch has not split such an operation, for example aten::to, into simpler ones yet
        return func.decompose(*args, **kwargs)
    operation = func.overloadpacket
    is_copy = operation is torch.ops.aten.copy_
    leaves = pytree.tree_leaves((args, kwargs))
    of_host = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Pretend)]
    if any(tensor.dim() for tensor in of_host) and not is_copy:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! ({func})"
        )
    if operation in _READ_BY_HOST:
        copies.sizes.append(1)
    to_host = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
    named = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
    raw_args, raw_named = pytree.tree_map_only(Pretend, lambda t: t.raw, (args, named))
    if of_device := _OF_DEVICE.get(operation):
        return pytree.tree_map_only(torch.Tensor, Pretend, of_device(*raw_args, **raw_named))
    out = _draw_from_device(func, raw_args, raw_named)
    if to_host or (is_copy and not isinstance(args[0], Pretend)):
        copies.sizes.append(out.numel())
        return out

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, Pretend) else Pretend(tensor)

    wrapped = pytree.tree_map_only(torch.Tensor, wrap, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


#: Operations whose result is a number for the host.
_READ_BY_HOST = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
}


def _is_composite(func: Any) -> bool:
    """Returns whether PyTorch computes an operation of every device by others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


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


def _make_on_host(function: Callable[..., torch.Tensor]) -> Callable[..., Pretend]:
    """Returns a function of numbers that makes a tensor of the device."""

    def make(*numbers: Any, dtype: Any = None, **_: Any) -> Pretend:
        return Pretend(function(*numbers, dtype=dtype))

    return make


# PyTorch would make them without elements, and resize them, which wrappers don't follow.
for _name in ("arange", "arange.start", "arange.start_step"):
    torch.library.impl(f"aten::{_name}", "privateuseone", _make_on_host(torch.arange))
for _name in ("eye", "eye.m"):
    torch.library.impl(f"aten::{_name}", "privateuseone", _make_on_host(torch.eye))


# PyTorch computes these by others on devices other than CPUs and GPUs.
@torch.library.impl("aten::silu_backward", "privateuseone")
def _silu_backward(gradient: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return run(torch.ops.aten.silu_backward.default, (gradient, numbers), {})


@torch.library.impl("aten::mish_backward", "privateuseone")
def _mish_backward(gradient: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return run(torch.ops.aten.mish_backward.default, (gradient, numbers), {})


@torch.library.impl("aten::_copy_from", "privateuseone")
def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.raw if isinstance(tensor, Pretend) else tensor

    raw(target).copy_(raw(source))
    if not isinstance(target, Pretend):
        copies.sizes.append(target.numel())
    return target


# --- cells of recurrent layers, which the CPU computes by other operations ---


def _add_gates(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    first, *others = (part for part in parts if part is not None)
    return sum(others, start=first)


def _lstm_cell(
    from_input: torch.Tensor,
    from_hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    gates = _add_gates((from_hidden, from_input, input_bias, hidden_bias))
    i, f, g, o = gates.chunk(4, 1)
    activated = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    i, f, g, o = activated
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat(activated, 1)


def _lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_after: torch.Tensor | None,
    cell: torch.Tensor,
    after: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    i, f, g, o = workspace.chunk(4, 1)
    hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    shape = after.tanh()
    total = hidden * o * (1 - shape * shape)
    if grad_after is not None:
        total = total + grad_after
    parts = (
        total * g * i * (1 - i),
        total * cell * f * (1 - f),
        total * i * (1 - g * g),
        hidden * shape * o * (1 - o),
    )
    gates = torch.cat(parts, 1)
    return gates, total * f, gates.sum(0) if has_bias else None


def _gru_cell(
    from_input: torch.Tensor,
    from_hidden: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    r, z, n = _add_gates((from_input, input_bias)).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _add_gates((from_hidden, hidden_bias)).chunk(3, 1)
    r = (r + hidden_r).sigmoid()
    z = (z + hidden_z).sigmoid()
    n = (n + r * hidden_n).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hidden_n], 1)


def _gru_cell_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    r, z, n, hidden, hidden_n = workspace.chunk(5, 1)
    to_n = grad * (1 - z) * (1 - n * n)
    to_r = to_n * hidden_n * r * (1 - r)
    to_z = grad * (hidden - n) * z * (1 - z)
    to_input = torch.cat([to_r, to_z, to_n], 1)
    to_hidden = torch.cat([to_r, to_z, to_n * r], 1)
    biases = (to_input.sum(0), to_hidden.sum(0)) if has_bias else (None, None)
    return to_input, to_hidden, grad * z, *biases


def _count_in_bins(numbers: torch.Tensor, *bins: Any, **named: Any) -> torch.Tensor:
    """Runs histc, which the CPU has for floats only."""
    return torch.histc(numbers.double(), *bins, **named).to(numbers.dtype)


#: Operations that the CPU doesn't have, with what the device runs on the memory behind tensors.
_OF_DEVICE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.histc: _count_in_bins,
    torch.ops.aten._thnn_fused_lstm_cell: _lstm_cell,
    torch.ops.aten._thnn_fused_lstm_cell_backward_impl: _lstm_cell_backward,
    torch.ops.aten._thnn_fused_gru_cell: _gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward: _gru_cell_backward,
}

# --- autocast: that of CUDA, for the operations that models of the tests use ---

_autocast = torch.library.Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
# CUDA runs these in the dtype of autocast ...
_NARROWED = (
    "linear matmul mm mv bmm addmm addmv addbmm baddbmm prelu scaled_dot_product_attention conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input"
).split()
# ... and these in float32
_WIDENED = (
    "layer_norm group_norm softmax.int log_softmax.int nll_loss nll_loss2d nll_loss_nd mse_loss "
    "l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div cosine_similarity softplus exp "
    "expm1 log log1p log2 rsqrt reciprocal pow.Tensor_Scalar pow.Tensor_Tensor sum sum.dim_IntList "
    "cumsum cumprod prod norm.Scalar norm.ScalarOpt_dim cdist multi_margin_loss "
    "multilabel_margin_loss soft_margin_loss margin_ranking_loss hinge_embedding_loss "
    "cosine_embedding_loss triplet_margin_loss poisson_nll_loss"
).split()


def _casting(name: str, read_dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    """Returns an operation that casts its floats to a dtype."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run_cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            dtype = read_dtype()

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
                return tensor.to(dtype) if is_cast else tensor

            args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return run_cast


for _name in _NARROWED:
    _narrowed = _casting(_name, lambda: torch.get_autocast_dtype(NAME))
    _aten.impl(_name, _narrowed, "AutocastPrivateUse1")
for _name in _WIDENED:
    _aten.impl(_name, _casting(_name, lambda: torch.float32), "AutocastPrivateUse1")
