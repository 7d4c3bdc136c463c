"""Check of a loss: is that of a batch a mean over its samples, which shards may compute apart?

The gradient of a weighted mean is the weighted mean of its parts' gradients, with weights that add up to 1: those of
class weights, `ignore_index` and masks too, whatever they are. A loss that compares samples with each other
(contrastive, ranking, decorrelation, a balance of experts) has no such weights. Looked at are the halves of one shard
in eval mode, in which samples do not meet in normalisations and nothing is drawn. Everything is afterwards as it was.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import CollectiveError
from ..nn import in_mode
from .seeded import keys, put_back, states

FLOATS = 1 << 22  # of gradients that are compared, small parameters first
APART = 1e-4  # of a parameter's gradient, what no weights explain: rounding is 1e-7
NOISE = 1e-6  # of the whole gradient: what smaller ones are may be rounding


def looked_at(
    owners: list[nn.Module], loss: Callable[[Any], torch.Tensor], batch: Any, copies: bool = True
) -> tuple[str, list[float]]:
    """Returns what a loss is, "mean", "sum" or "neither" of its samples, and its values of all and of both halves.
    "unknown": the samples cannot be taken apart, or forward() draws in eval mode too. owners: modules that `loss` of a
    batch calls, the one with the parameters first. batch: a tree, samples in rows. copies: parameters are put back."""
    taken, size = [], 0
    for p in sorted((p for p in owners[0].parameters() if p.requires_grad), key=torch.numel):
        size += p.numel()
        if size <= FLOATS or not taken:
            taken.append(p)
    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
    n = len(tensors[0]) if tensors and tensors[0].dim() else 0
    norms = [m for m in owners[0].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if n < 2 or any(not t.dim() or len(t) != n for t in tensors) or any(m.running_mean is None for m in norms):
        return "unknown", []
    values: list[float] = []
    gradients: list[list[torch.Tensor]] = []
    with _as_before(owners, copies), in_mode(owners[0], False), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        before = keys(states())
        try:
            with getattr(torch.compiler, "set_stance", contextlib.nullcontext)("force_eager"):
                for lo, hi in ((0, n), (0, n // 2), (n // 2, n)):
                    value = loss(pytree.tree_map_only(torch.Tensor, lambda t, a=lo, b=hi: t[a:b].clone(), batch))
                    found = torch.autograd.grad(value, taken, materialize_grads=True)
                    values.append(float(value.detach()))
                    gradients.append([g.reshape(-1) for g in found])
        except CollectiveError:
            raise
        except Exception:  # what is wrong with forward() itself is said where it is trained
            return "unknown", []
        drawn = keys(states()) != before
    return "unknown" if drawn else _kind(*gradients), values


def _kind(whole: list[torch.Tensor], first: list[torch.Tensor], second: list[torch.Tensor]) -> str:
    """By the weights of two parts' gradients that come nearest to the whole's."""
    g, a, b = (torch.cat([t.double() for t in tensors]) for tensors in (whole, first, second))
    largest = float(max(g.norm(), a.norm(), b.norm()))
    if not 0 < largest < float("inf"):
        return "unknown"
    products = torch.stack([torch.stack([a @ a, a @ b]), torch.stack([b @ a, b @ b])])
    u, v = (torch.linalg.pinv(products, rtol=1e-9, hermitian=True) @ torch.stack([a @ g, b @ g])).tolist()
    apart = False
    for t, p, q in zip(whole, first, second, strict=True):
        size = float(t.norm() + (u * p).norm() + (v * q).norm())
        apart |= float((t - u * p - v * q).norm()) > APART * size + NOISE * largest
    total = [name for name, n in (("mean", 1), ("sum", 2)) if abs(u + v - n) < APART and not apart]
    return total[0] if total else "neither"


@contextlib.contextmanager
def _as_before(owners: list[nn.Module], copies: bool) -> Iterator[None]:
    """Generators, parameters, buffers and attributes of modules are afterwards what they were."""
    drawn = states()
    tensors = [t for owner in owners for t in (*(owner.parameters() if copies else ()), *owner.buffers())]
    values = [(t, t._version, t.detach().clone()) for t in tensors]
    own: list[Any] = [vars(m) for owner in owners for m in owner.modules()]
    inside = [c for attributes in own for c in attributes.values() if isinstance(c, (dict, list, set))]
    held = [(container, container.copy()) for container in (*own, *inside)]
    try:
        yield
    finally:
        for container, then in held:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(then)
        with torch.no_grad():
            for t, version, value in values:
                if t._version != version:
                    t.copy_(value)
        put_back(drawn)
