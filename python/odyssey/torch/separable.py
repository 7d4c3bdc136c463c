"""Checks whether a loss is a mean over the samples of a batch. Only then may shards compute it
separately.

If a loss is a weighted mean, the loss of a batch is the weighted mean of the losses of two halves,
with weights that add up to 1. The same weights hold for the gradients. For a mean over samples they
are the halves' shares of the samples. With class weights, `ignore_index` or masks they differ, and
the trainer must know them. A loss that compares samples with each other (contrastive, ranking,
decorrelation, a balance of experts), or is a function of a mean, has no such weights.

The check computes one shard and its two halves in eval mode, because then normalisations don't mix
samples and forward() draws no random numbers. It computes everything in float32, also what autocast
or forward() itself would round to bfloat16 or float16. That rounding would be as large as the
differences that the check is for. Afterwards the modules and generators are as they were.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..base import without_prints
from ..core import random_scopes
from ..errors import CollectiveError
from ..nn import in_mode

MAX_COMPARED_FLOATS = 1 << 22  # of gradients that are compared, small parameters first
#: The largest error that weights may leave, as a share of a parameter's gradient. Rounding leaves
#: 1e-7.
MAX_UNEXPLAINED = 1e-4
NOISE = 1e-6  # gradients below this share of the whole gradient may be rounding
#: The largest error of all gradients and the value together, as a share. Rounding leaves 2e-7.
TOTAL = 1e-5


def looked_at(
    owners: list[nn.Module],
    loss: Callable[[Any], torch.Tensor],
    batch: Any,
    copies: bool = True,
    weight: Callable[[Any], float] | None = None,
) -> tuple[str, list[float]]:
    """Returns the kind of a loss, and its values of all samples and of both halves.

    Args:
        owners: the modules that `loss` calls, the one with the parameters first.
        loss: computes the loss of a batch.
        batch: a tree of tensors with samples in rows.
        copies: True if parameters are restored afterwards.
        weight: computes the weight that shards give to a batch; None: the number of its samples.

    Returns:
        "mean" if the halves have these weights, "weighted" if they have others, "sum" if the loss
        is a sum over samples, "neither" if it is none of these. Or "unknown": the samples can't be
        separated, or forward() or the loss also draws random numbers in eval mode.
    """
    module = owners[0]
    batch = pytree.tree_map_only(torch.Tensor, _widen, batch)
    samples = _count_samples(batch)
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if samples < 2 or any(norm.running_mean is None for norm in norms):
        return "unknown", []
    parameters = _select_parameters(module)
    half = samples // 2
    values: list[float] = []
    gradients: list[list[torch.Tensor]] = []
    weights: list[float] = []

    def cut(lo: int, hi: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t[lo:hi].clone(), batch)

    with (
        _restore_after(owners, copies),
        in_mode(module, False),
        without_prints(lambda error: False),
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        marks = random_scopes.marks()
        try:
            with (
                getattr(torch.compiler, "set_stance", contextlib.nullcontext)("force_eager"),
                _compute_in_float32(),
            ):
                for lo, hi in ((0, samples), (0, half), (half, samples)):
                    value = loss(cut(lo, hi))
                    parts = torch.autograd.grad(value, parameters, materialize_grads=True)
                    values.append(float(value.detach()))
                    gradients.append([part.reshape(-1) for part in parts])
                    weights.append(hi - lo if weight is None else weight(cut(lo, hi)))
                repeated = float(loss(cut(0, samples)).detach())
        except CollectiveError:
            raise
        except Exception:  # an error of forward() itself is raised when the module is trained
            return "unknown", []
        has_drawn = random_scopes.marks() != marks
    if has_drawn or (repeated != values[0] and not math.isnan(repeated)):
        return "unknown", values  # it draws random numbers, which are others for each part
    return _classify_loss(gradients, values, weights), values


def _count_samples(batch: Any) -> int:
    """Returns the number of rows of all tensors of a batch; 0 if they differ, or have no rows."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors or not all(tensor.dim() for tensor in tensors):
        return 0
    counts = {len(tensor) for tensor in tensors}
    return counts.pop() if len(counts) == 1 else 0


def _select_parameters(module: nn.Module) -> list[torch.Tensor]:
    """Returns the trained parameters whose gradients are compared: the smallest, at least one."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    selected = []
    floats = 0
    for parameter in sorted(trained, key=torch.numel):
        floats += parameter.numel()
        if floats <= MAX_COMPARED_FLOATS or not selected:
            selected.append(parameter)
    return selected


def _classify_loss(
    gradients: list[list[torch.Tensor]], values: list[float], weights: list[float]
) -> str:
    """Returns the kind of a loss as `looked_at` does, "unknown" if there is no finite gradient.

    Args:
        gradients: of the whole, the first half and the second half; each by parameter.
        values: of the loss of these three.
        weights: that shards would give to these three.
    """
    _, *half_weights = weights
    total_weight = sum(half_weights)
    if not total_weight:
        return "unknown"
    if not all(half_weights):  # such a half has no loss, and shards don't use it
        empty = 1 + half_weights.index(0)
        gradients[empty] = [torch.zeros_like(gradient) for gradient in gradients[empty]]
        values[empty] = 0.0
    shares = (half_weights[0] / total_weight, half_weights[1] / total_weight)
    parts = [[gradient.double().cpu() for gradient in tensors] for tensors in gradients]
    largest = max(float(torch.cat(tensors).norm()) for tensors in parts)
    if not 0 < largest < math.inf:
        return "unknown"
    highest = max(map(abs, values))
    # A half in which no sample counts may have no value. Else the value is compared like another
    # gradient, and weighs as much as all of them.
    if highest > 0 and all(map(math.isfinite, values)):
        for tensors, value in zip(parts, values, strict=True):
            tensors.append(torch.tensor([value / highest * largest], dtype=torch.float64))
    whole, first, second = (torch.cat(tensors) for tensors in parts)
    # u with the smallest error in: whole = u * first + (1 - u) * second
    difference = first - second
    square = float(difference @ difference)
    u = float((whole - second) @ difference) / square if square else 0.5
    for kind, factors in (("mean", shares), ("sum", (1.0, 1.0)), ("weighted", (u, 1 - u))):
        if _weights_explain_whole(factors, parts, largest):
            return kind
    return "neither"


def _weights_explain_whole(
    weights: tuple[float, float], parts: list[list[torch.Tensor]], largest: float
) -> bool:
    """Returns whether the whole is the sum of its halves with these weights, except for rounding.

    Args:
        weights: of the first and the second half.
        parts: the tensors of the whole, the first half and the second half.
        largest: the largest norm of the gradients of these three.
    """
    u, v = weights
    total_error = 0.0
    total_size = 0.0
    for whole, first, second in zip(*parts, strict=True):
        size = float(whole.norm() + (u * first).norm() + (v * second).norm())
        error = float((whole - u * first - v * second).norm())
        if error > MAX_UNEXPLAINED * size + NOISE * largest:
            return False
        total_error = math.hypot(total_error, error)
        total_size = math.hypot(total_size, size)
    return total_error <= TOTAL * total_size


def _is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype is a float of fewer than 32 bits."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4


def _widen(t: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of narrow floats as float32, others as they are."""
    return t.float() if _is_narrow(t.dtype) else t


class _ComputeInFloat32(TorchDispatchMode):
    """A dispatch mode that computes narrow floats in float32, also those of autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_narrow(kwargs.get("dtype")):
            kwargs["dtype"] = torch.float32
        # tensors that an operation writes to, or returns views of, keep their dtype
        if not any(argument.alias_info for argument in func._schema.arguments):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widen, (args, kwargs))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _compute_in_float32() -> Iterator[None]:
    """Computes everything in the block in float32, whatever the user has set."""
    precision_before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with _ComputeInFloat32():
            yield
    finally:
        torch.set_float32_matmul_precision(precision_before)


@contextlib.contextmanager
def _restore_after(owners: list[nn.Module], copies: bool) -> Iterator[None]:
    """Restores generators, buffers and attributes of modules after the block.

    copies: True restores parameters too; it takes memory for a copy of them.
    """
    tensors: list[torch.Tensor] = []
    for owner in owners:
        if copies:
            tensors += owner.parameters()
        tensors += owner.buffers()
    saved_tensors = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
    attributes: list[Any] = [vars(m) for owner in owners for m in owner.modules()]
    # containers that are attributes: forward() may change what is in them
    inside = [
        value
        for module_attributes in attributes
        for value in module_attributes.values()
        if isinstance(value, (dict, list, set))
    ]
    saved_containers = [(container, container.copy()) for container in (*attributes, *inside)]
    try:
        with random_scopes.restored():
            yield
    finally:
        for container, content in saved_containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        with torch.no_grad():
            for tensor, version, value in saved_tensors:
                if tensor._version != version:
                    tensor.copy_(value)
