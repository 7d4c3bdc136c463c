"""Check of a loss: is that of a batch a mean over its samples, which shards may compute apart?

A weighted mean and its gradient are the weighted means of its parts' values and gradients, with
weights that add up to 1: those of class weights, `ignore_index` and masks too, whatever they are. A
loss that compares samples with each other (contrastive, ranking, decorrelation, a balance of
experts) or is a function of a mean has no such weights. Looked at are the halves of one shard in
eval mode, in which samples do not meet in normalisations and nothing is drawn. All of it is
computed in float32, also what autocast or forward() itself would round to bfloat16 or float16: that
rounding is as large as what is looked for. Everything is afterwards as it was.
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

from ..errors import CollectiveError
from ..nn import in_mode
from .seeded import keys, put_back, states

MAX_COMPARED_FLOATS = 1 << 22  # of gradients that are compared, small parameters first
MAX_UNEXPLAINED = 1e-4  # of a parameter's gradient, what no weights explain: rounding is 1e-7
NOISE = 1e-6  # of the whole gradient: what smaller ones are may be rounding
TOTAL = 1e-5  # of all gradients and the value together, what no weights explain: rounding is 2e-7


def looked_at(
    owners: list[nn.Module], loss: Callable[[Any], torch.Tensor], batch: Any, copies: bool = True
) -> tuple[str, list[float]]:
    """Returns what a loss is, "mean", "sum" or "neither" of its samples, and its values of all
    and of both halves. "unknown": the samples cannot be taken apart, or forward() draws in
    eval mode too. owners: modules that `loss` of a batch calls, the one with the parameters
    first. batch: a tree, samples in rows. copies: parameters are put back.
    """
    parameters = []
    size = 0
    for p in sorted((p for p in owners[0].parameters() if p.requires_grad), key=torch.numel):
        size += p.numel()
        if size <= MAX_COMPARED_FLOATS or not parameters:
            parameters.append(p)
    batch = pytree.tree_map_only(torch.Tensor, _widened, batch)
    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
    n = len(tensors[0]) if tensors and tensors[0].dim() else 0
    norms = [m for m in owners[0].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if (
        n < 2
        or any(not t.dim() or len(t) != n for t in tensors)
        or any(m.running_mean is None for m in norms)
    ):
        return "unknown", []
    values: list[float] = []
    gradients: list[list[torch.Tensor]] = []
    with (
        _restore_after(owners, copies),
        in_mode(owners[0], False),
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        keys_before = keys(states())
        try:
            with (
                getattr(torch.compiler, "set_stance", contextlib.nullcontext)("force_eager"),
                _in_float32(),
            ):
                for lo, hi in ((0, n), (0, n // 2), (n // 2, n)):
                    value = loss(
                        pytree.tree_map_only(
                            torch.Tensor, lambda t, a=lo, b=hi: t[a:b].clone(), batch
                        )
                    )
                    parts = torch.autograd.grad(value, parameters, materialize_grads=True)
                    values.append(float(value.detach()))
                    gradients.append([g.reshape(-1) for g in parts])
        except CollectiveError:
            raise
        except Exception:  # what is wrong with forward() itself is said where it is trained
            return "unknown", []
        drawn = keys(states()) != keys_before
    return "unknown" if drawn else _classify(gradients, values), values


def _classify(gradients: list[list[torch.Tensor]], values: list[float]) -> str:
    """By whether weights make the gradient and value of the whole of those of its two parts."""
    parts = [[g.double() for g in tensors] for tensors in gradients]
    largest = max(float(torch.cat(tensors).norm()) for tensors in parts)
    if not 0 < largest < math.inf:
        return "unknown"
    highest = max(map(abs, values))
    # a half in which no sample counts may have no value
    if highest > 0 and all(map(math.isfinite, values)):
        for tensors, value in zip(parts, values, strict=True):  # as much as all gradients
            tensors.append(torch.tensor([value / highest * largest], dtype=torch.float64))
    g, a, b = (torch.cat(tensors) for tensors in parts)
    difference = a - b
    square = float(difference @ difference)
    u = float((g - b) @ difference) / square if square else 0.5
    for kind, weights in (("mean", (u, 1 - u)), ("sum", (1.0, 1.0))):
        if _explain(weights, parts, largest):
            return kind
    return "neither"


def _explain(weights: tuple[float, float], parts: list[list[torch.Tensor]], largest: float) -> bool:
    """True if the whole is the sum of its parts with these weights, but for rounding."""
    u, v = weights
    error = 0.0
    sizes = 0.0
    for t, p, q in zip(*parts, strict=True):
        size = float(t.norm() + (u * p).norm() + (v * q).norm())
        apart = float((t - u * p - v * q).norm())
        if apart > MAX_UNEXPLAINED * size + NOISE * largest:
            return False
        error = math.hypot(error, apart)
        sizes = math.hypot(sizes, size)
    return error <= TOTAL * sizes


def _is_narrow(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.float() if _is_narrow(t.dtype) else t


class _Wide(TorchDispatchMode):
    """Has operations computed in float32 that would be in fewer bits, those of autocast too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_narrow(kwargs.get("dtype")):
            kwargs["dtype"] = torch.float32
        # views and results stay what they are
        if not any(argument.alias_info for argument in func._schema.arguments):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    """Computes in float32 whatever is set."""
    products = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with _Wide():
            yield
    finally:
        torch.set_float32_matmul_precision(products)


@contextlib.contextmanager
def _restore_after(owners: list[nn.Module], copies: bool) -> Iterator[None]:
    """Generators, parameters, buffers and attributes of modules are afterwards what they were."""
    drawn = states()
    tensors = [
        t for owner in owners for t in (*(owner.parameters() if copies else ()), *owner.buffers())
    ]
    values = [(t, t._version, t.detach().clone()) for t in tensors]
    module_dicts: list[Any] = [vars(m) for owner in owners for m in owner.modules()]
    inside = [
        c
        for attributes in module_dicts
        for c in attributes.values()
        if isinstance(c, (dict, list, set))
    ]
    held = [(container, container.copy()) for container in (*module_dicts, *inside)]
    try:
        yield
    finally:
        for container, saved in held:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(saved)
        with torch.no_grad():
            for t, version, value in values:
                if t._version != version:
                    t.copy_(value)
        put_back(drawn)
