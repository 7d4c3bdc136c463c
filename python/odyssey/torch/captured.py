"""How the walk (capture/) looks into what PyTorch has: tensors, generators, modules, optimizers.

Parameters and buffers of the module that is trained, and the optimizer's state, are kept by the
trainer in another way. Of all other modules, such as a teacher in a callback or a perceptual loss,
parameters and buffers are values like any others.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from ..capture import (
    LOADER_ROOTS,
    Edge,
    Kind,
    Memory,
    Place,
    edges_of_object,
    is_own_file,
    is_resource,
    mark,
    register,
    register_contents,
    register_edges,
    register_memory,
    register_remark,
    register_tracked,
    register_value_host,
)
from ..core import fingerprint
from .device_sums import fingerprint_of

# Attributes of every module that are no settings, or hold what is followed by itself.
_SKIPPED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_compiled_call_impl",
    "_is_torch_compile",
    "_version",
)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What a rank has of these is shared out by the trainer (optimizer_parts.py).
_SHARED_OUT = ("state", "param_groups")
# Wrappers that functions of torch put around step(), and counters of theirs.
_WRAPPERS = (
    "step",
    "_step_count",
    "_opt_called",
    "_zero_grad_profile_name",
    "_patched",
    "_need_device_dtype_check_for_fused",  # a rank may have no parameter of its own to update
)

_TRAINED = " trained"  # ends the dtype of a tensor that requires gradients
_ON_DEVICE = " on device"  # ends it, then, for a tensor that isn't on the CPU
# where such tensors of a checkpoint go: the device of the trainer that this process made last
_device = torch.device("cpu")
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def build_on(device: torch.device) -> None:
    """Sets the device for tensors of a checkpoint that were on a GPU when it was written."""
    global _device
    _device = device


def _is_array_like(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has all of its numbers in memory, with strides."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _array_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns the bytes of a tensor as an array; NumPy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _fingerprint_of_bytes(tensor: torch.Tensor) -> int:
    """Returns the fingerprint of the bytes of a tensor with strides.

    Another device than the CPU computes it, and copies one number to the host, unless the bytes
    are no whole words.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.device.type == "cpu" or not flat.numel() or flat.numel() * flat.element_size() % 4:
        return fingerprint.of_bytes(_array_of(tensor))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return fingerprint_of([(flat.view(torch.int32), 0)])


def _is_known(tensor: torch.Tensor) -> bool:
    """Tells whether checkpoints can have a tensor: with strides, or sparse in a known form."""
    is_sparse = tensor.layout in (torch.sparse_coo, torch.sparse_csr) and not tensor.is_meta
    return is_sparse or _is_array_like(tensor)


def _parts_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Returns dtype, shape and numbers. Those that aren't in the order of C have strides too, and
    sparse ones their layout and positions.
    """
    described = [str(tensor.dtype), list(tensor.shape)]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return [*described, "coo", *map(_parts_of_tensor, (tensor.indices(), tensor.values()))]
    if tensor.layout is torch.sparse_csr:
        tensor = tensor.detach()
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return [*described, "csr", *map(_parts_of_tensor, parts)]
    is_in_other_order = not tensor.is_contiguous() and bool(
        torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )
    strides = [list(tensor.stride())] if is_in_other_order else []
    return [*described, _array_of(tensor), *strides]


def _build_tensor(parts: list[Any]) -> torch.Tensor:
    dtype, shape, content, *rest = parts
    if isinstance(content, str):  # the layout of a sparse tensor
        if content == "coo":
            indices, numbers = map(_build_tensor, rest)
            return torch.sparse_coo_tensor(indices, numbers, shape).coalesce()
        rows, columns, numbers = map(_build_tensor, rest)
        return torch.sparse_csr_tensor(rows, columns, numbers, shape)
    wanted = _DTYPES[dtype]
    if not content.size:
        return torch.empty(shape, dtype=wanted)
    tensor = torch.from_numpy(np.array(content)).view(wanted).reshape(shape)
    return torch.empty_strided(shape, rest[0], dtype=wanted).copy_(tensor) if rest else tensor


def _remark_on(tensor: torch.Tensor) -> str:
    """Returns why checkpoints can't have a tensor: "nested" or "mkldnn", for example."""
    found = (("nested", tensor.is_nested), ("meta", tensor.is_meta))
    names = [name for name, is_it in (*found, ("quantized", tensor.is_quantized)) if is_it]
    if tensor.layout is not torch.strided:
        names.append(str(tensor.layout).removeprefix("torch.").removeprefix("_"))
    return ", ".join(names)


def _parts_with_training(tensor: torch.Tensor) -> list[Any]:
    """Returns the parts of a tensor. One that is trained has that after its dtype."""
    dtype, *parts = _parts_of_tensor(tensor)
    if type(tensor) is torch.Tensor and _is_trained(tensor):
        dtype += _TRAINED
    if tensor.device.type != "cpu":
        dtype += _ON_DEVICE
    return [dtype, *parts]


def _build_with_training(parts: list[Any]) -> torch.Tensor:
    dtype, *rest = parts
    dtype_there = dtype.removesuffix(_ON_DEVICE)
    tensor = _build_there([dtype.replace(_TRAINED, ""), *rest])
    return tensor.requires_grad_() if dtype_there.endswith(_TRAINED) else tensor


def _build_there(parts: list[Any]) -> torch.Tensor:
    """Builds a tensor, on the device of the trainer if it was on one."""
    dtype, *numbers = parts
    tensor = _build_tensor([dtype.removesuffix(_ON_DEVICE), *numbers])
    return tensor.to(_device) if dtype.endswith(_ON_DEVICE) else tensor


def _build_parameter(parts: list[Any]) -> nn.Parameter:
    # Whether it is trained is a value of its own.
    return nn.Parameter(_build_there(parts), requires_grad=False)


def _put_tensor(target: torch.Tensor, value: torch.Tensor) -> bool:
    if target.shape != value.shape or target.dtype != value.dtype:
        return False
    if target.layout is not torch.strided:
        return False  # a new tensor takes its place
    if target.stride() != value.stride() and torch.ops.aten.is_non_overlapping_and_dense(target):
        return False
    with torch.no_grad():
        target.copy_(value)
    return True


def _write_contents(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.as_subclass(torch.Tensor).copy_(value)


def _mark_tensor(tensor: torch.Tensor) -> str:
    is_plain = tensor.layout is torch.strided and (
        tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )
    if not is_plain:
        parts = mark(_parts_of_tensor(tensor))
        return f"tensor({str(tensor.dtype)[6:]}, {tuple(tensor.shape)}, {parts})"
    bits = _fingerprint_of_bytes(tensor)
    return f"tensor({str(tensor.dtype)[6:]}, {tuple(tensor.shape)}, {bits:016x})"


def _put_generator(target: torch.Generator, value: torch.Generator) -> bool:
    target.set_state(value.get_state())
    return True


def _build_generator(state: np.ndarray) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(np.array(state)))
    return generator


def _bounds_of_tensor(tensor: torch.Tensor) -> tuple[int, int, bool] | None:
    if not _is_array_like(tensor) or not tensor.numel():
        return None
    spans = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    end = tensor.data_ptr() + (sum(spans) + 1) * tensor.element_size()
    return tensor.data_ptr(), end, tensor.is_contiguous()


def _form_of_tensor(tensor: torch.Tensor, first: int, owner: torch.Tensor) -> list[Any] | None:
    if owner.dtype != tensor.dtype:
        return None
    offset = (tensor.data_ptr() - first) // tensor.element_size()
    return [offset, list(tensor.shape), list(tensor.stride())]


def _window_of_tensor(
    owner: torch.Tensor, form: list[Any], tensor: torch.Tensor
) -> torch.Tensor | None:
    offset, shape, strides = form
    if not owner.is_contiguous() or owner.dtype != tensor.dtype:
        return None
    window = owner.detach().as_strided(shape, strides, owner.storage_offset() + offset)
    if isinstance(tensor, nn.Parameter):
        tensor.data = window
        return tensor
    return window.requires_grad_(tensor.requires_grad)


def _block_of_tensors(tensors: list[tuple[torch.Tensor, list[Any]]]) -> torch.Tensor | None:
    first, _ = tensors[0]
    ends = []
    for tensor, (offset, shape, strides) in tensors:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            return None
        spans = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        ends.append(offset + sum(spans) + 1)
    block = torch.zeros(max(ends), dtype=first.dtype, device=first.device)
    windows = [(tensor.detach(), block.as_strided(*form[1:], form[0])) for tensor, form in tensors]
    for tensor, window in windows:
        window.copy_(tensor)
    is_same = all(_mark_tensor(tensor) == _mark_tensor(window) for tensor, window in windows)
    return block if is_same else None


_TENSORS = Memory(
    torch.Tensor, _bounds_of_tensor, _form_of_tensor, _window_of_tensor, _block_of_tensors
)


def _edges_of_tensor(tensor: torch.Tensor, path: str) -> Iterator[Edge]:
    """Yields whether a tensor is trained, and the gradient of one that a callback trains.

    Other gradients, such as those of a loss's own modules, may differ between ranks, and nobody
    reads them.
    """
    if path.endswith(".grad") or not tensor.is_leaf:
        return
    if path.partition(".")[0].partition("[")[0] in LOADER_ROOTS:
        return
    for name in _TENSOR_HOOKS:
        hooks = getattr(tensor, name, None) or {}
        # other packages, such as those that share out gradients, set some on some layouts
        users = [hook for hook in hooks.values() if _is_own_hook(hook)]
        for number, hook in enumerate(users):
            yield Edge(f"{path}.{name}[{number}]", hook, Place("hook", hooks, number))
    if tensor.is_floating_point() or tensor.is_complex():
        place = Place("attribute", tensor, "requires_grad")
        yield Edge(f"{path}.requires_grad", tensor.requires_grad, place)
    if path.startswith("callbacks.") and (_is_trained(tensor) or tensor.grad is not None):
        yield Edge(f"{path}.grad", tensor.grad, Place("attribute", tensor, "grad"))


def _is_own_hook(hook: Any) -> bool:
    """Tells whether a hook is code of the user's own files."""
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    call = hook if isinstance(hook, types.FunctionType) else type(hook).__call__
    code = getattr(call, "__code__", None)
    return code is not None and is_own_file(code.co_filename)


def _is_trained(tensor: torch.Tensor) -> bool:
    """Tells whether an optimizer may have a tensor."""
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter))


def _edges_of_module(module: nn.Module, path: str) -> Iterator[Edge]:
    """Yields submodules, parameters, buffers, and the attributes of a module."""
    attributes = vars(module)
    if "_orig_mod" in attributes.get("_modules", ()):
        # torch.compile wraps a module; its settings are those of the module inside
        yield Edge(path, attributes["_modules"]["_orig_mod"], Place("fixed", module, "_orig_mod"))
        return
    for name, parameter in attributes["_parameters"].items():
        if parameter is not None:
            place = Place("attribute", module, name)
            yield Edge(f"{path}.{name}", parameter, place)
            place = Place("attribute", parameter, "requires_grad")
            yield Edge(f"{path}.{name}.requires_grad", parameter.requires_grad, place)
    for name, buffer in attributes["_buffers"].items():
        if buffer is not None:
            yield Edge(f"{path}.{name}", buffer, Place("attribute", module, name))
    yield from _edges_of_hooks(module, path, _HOOKS)
    if path == "model":
        yield from _edges_of_global_hooks(nn.modules.module)
    yield from edges_of_object(module, path, (*_SKIPPED, *_HOOKS))
    for name, child in attributes["_modules"].items():
        if child is not None:
            yield Edge(f"{path}.{name}", child, Place("attribute", module, name))


def _edges_of_optimizer(optimizer: torch.optim.Optimizer, path: str) -> Iterator[Edge]:
    """Yields the attributes of an optimizer, without what the trainer shares out over ranks, and
    the tensors that an optimizer of a callback trains.
    """
    groups = enumerate(optimizer.param_groups if path.startswith("callbacks.") else ())
    for number, group in groups:
        for position, tensor in enumerate(group["params"]):
            place = Place("fixed", group["params"], position)
            yield Edge(f"{path}.param_groups[{number}][{position}]", tensor, place)
    hooks = [name for name in vars(optimizer) if "_hooks" in name]
    yield from _edges_of_hooks(optimizer, path, hooks)
    if path == "optimizer":
        yield from _edges_of_global_hooks(optimizers)
    yield from edges_of_object(optimizer, path, (*_SHARED_OUT, *_WRAPPERS, *hooks))


def _edges_of_global_hooks(home: types.ModuleType) -> Iterator[Edge]:
    """Yields the functions that are registered as hooks of all modules or optimizers."""
    names = [name for name in sorted(vars(home)) if name.startswith("_global_") and "hooks" in name]
    yield from _edges_of_hooks(home, home.__name__, names)


def _edges_of_hooks(owner: Any, path: str, names: Iterable[str]) -> Iterator[Edge]:
    """Yields the functions that are registered as hooks, without those of odyssey.

    Their keys count all hooks of a process, so they are numbered anew here.
    """
    for name in names:
        hooks = vars(owner).get(name)
        if hooks:
            # PyTorch wraps some, together with the module
            functions = [getattr(hook, "hook", hook) for hook in hooks.values()]
            users = [function for function in functions if not is_resource(function)]
            for number, hook in enumerate(users):
                yield Edge(f"{path}.{name}[{number}]", hook, Place("hook", hooks, number))


def _edges_of_scheduler(scheduler: Any, path: str) -> Iterator[Edge]:
    """Yields the attributes of a scheduler; its optimizer is a root of its own."""
    yield from edges_of_object(scheduler, path, ("optimizer",))


for _name, _type, _build in (
    ("tensor", torch.Tensor, _build_with_training),
    ("parameter", nn.Parameter, _build_parameter),
    ("buffer", getattr(nn, "Buffer", None), _build_there),
):
    if _type is not None:
        register(
            Kind(
                _name,
                (_type,),
                _parts_with_training,
                _build,
                _put_tensor,
                _mark_tensor,
                _is_known,
                is_opaque_else=True,
            )
        )
        register_memory(_type, _TENSORS)
        register_value_host(_type, _edges_of_tensor)
        register_tracked(_type, _is_trained)
        register_remark(_type, _remark_on)
for _kind in (
    Kind(
        "torch generator",
        (torch.Generator,),
        lambda generator: generator.get_state().numpy(),
        _build_generator,
        _put_generator,
    ),
    Kind("torch dtype", (torch.dtype,), str, _DTYPES.__getitem__),
    Kind("device", (torch.device,), str, torch.device),
    Kind("size", (torch.Size,), list, torch.Size),
):
    register(_kind)
register_contents(torch.Generator, torch.Generator.clone_state, _put_generator)
register_contents(
    torch.Tensor, lambda tensor: tensor.detach().as_subclass(torch.Tensor), _write_contents
)
register_edges(nn.Module, _edges_of_module)
register_edges(torch.optim.Optimizer, _edges_of_optimizer)
register_edges(torch.optim.lr_scheduler.LRScheduler, _edges_of_scheduler)


def kept_by_trainer(trainer: Any) -> set[int]:
    """Returns the ids of what checkpoints of a trainer of a torch module hold as tensors."""
    optimizer = trainer.optimizer
    tensors = [tensor for _, tensor in (*trainer.arena.named, *trainer.arena.buffers)]
    tensors += [*trainer.module.parameters(), *trainer.module.buffers()]
    return {id(one) for one in (*tensors, optimizer.state, optimizer.param_groups)}
