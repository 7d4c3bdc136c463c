"""Metrics that are summed over samples beside the loss: engine/metrics.py's names and meaning,
for tensors of torch.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..core import random_scopes
from ..engine import metrics as ours
from ..errors import ConfigError
from ..metrics import check_mean
from ..train import WholeSet
from . import huggingface
from .device import Device, host_array, to_host

Metric = Callable[[Any, Any], Any]
# Batches of random samples that show whether a function is a mean, and how many samples each has.
RANDOM_TRIALS = 2
RANDOM_SAMPLES = 64


def top_k(out: Any, y: Any, k: int = 1) -> torch.Tensor:
    """1 for each target, a class number, that is among the k largest of its outputs, else 0; of
    y's shape. Classes are dimension 1 of outputs, as for torch's losses, or the last where
    targets have all others' shape. Of equal entries the first counts as larger.
    """
    out, y = huggingface.compared(out, y)
    if not _of_classes(out, y):
        raise ConfigError(
            "[torch] accuracy and top5 are of targets that are class numbers; give metrics of "
            "your own"
        )
    return _hits(out, y, k)


def _hits(out: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
    """Returns 1 for each class number in `y` that is among the k largest of its outputs, else 0."""
    classes = -1 if out.shape[:-1] == y.shape else 1
    if k == 1:
        return (out.argmax(classes) == y).float()
    out = out.movedim(classes, -1)
    first = out.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return (first == y.unsqueeze(-1)).any(-1).float()


def accuracy(out: Any, y: Any) -> Any:
    """Returns what is counted where no metrics are given: below 0 where targets are no classes,
    so that nobody shows it. Of a dict batch only where samples have one label each: models
    shift or mask those of tokens in their way.
    """
    if isinstance(y, dict):
        out = huggingface.field(out, "logits")
        y = y.get("labels")
        if not isinstance(y, torch.Tensor) or y.dim() != 1:
            return torch.tensor(-1.0)
    return _hits(out, y, 1) if _of_classes(out, y) else torch.tensor(-1.0)


NAMED: dict[str, Metric] = {
    "accuracy": top_k,
    "mae": lambda out, y: F.l1_loss(*huggingface.compared(out, y)),
    "mse": lambda out, y: F.mse_loss(*huggingface.compared(out, y)),
}


def chosen(metrics: Any) -> dict[str, Metric]:
    """Metrics by name, of what a trainer is given; None: accuracy."""
    return {"accuracy": accuracy} if metrics is None else ours.chosen(metrics, NAMED, top_k)


def sums(
    metrics: dict[str, Metric], out: Any, y: Any, samples: int, device: Device
) -> list[float | torch.Tensor]:
    """Sums each metric over the samples of a shard; see `Device.read` for the numbers."""
    totals = []
    with torch.no_grad():
        for name, metric in metrics.items():
            value = torch.as_tensor(metric(out, y)).float()
            if value.dim() and len(value) != samples:
                raise ConfigError(
                    f"[train] the metric {name} gave {tuple(value.shape)}; it must give a value of "
                    f"each sample ({samples}, ...) or one number"
                )
            total = device.read(value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum())
            totals.append(total if value.dim() else total * samples)
    return totals


class ModuleWholeSet(WholeSet):
    """Metrics of the whole set that get tensors of the CPU, without gradients and of at least 32
    bits.
    """

    # (first sample, output and target) of shards on a device, until `bring`
    _waiting: list[tuple[int, Any]]

    def begin(self) -> None:
        super().begin()
        self._waiting = []

    def collect(self, first: int, output: Any, target: Any) -> None:
        """Takes what the metrics need of a shard. From another device it is copied by `bring`."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            # forward() may use its memory again
            return tensor if tensor.device.type == "cpu" else tensor.clone()

        pair = pytree.tree_map_only(torch.Tensor, keep, (output, target))
        if all(leaf.device.type == "cpu" for leaf in _tensors_in(pair)):
            super().collect(first, *pytree.tree_map_only(torch.Tensor, _widened, pair))
        else:
            self._waiting.append((first, pair))

    def bring(self) -> None:
        """Copies what was collected from the device, all shards of a batch at once."""
        brought = iter(to_host(_tensors_in(self._waiting)))
        for first, pair in self._waiting:
            on_host = pytree.tree_map_only(torch.Tensor, lambda _: _widened(next(brought)), pair)
            super().collect(first, *on_host)
        self._waiting = []

    def to_array(self, value: Any) -> np.ndarray:
        # a copy, because forward() may use its memory again
        return host_array(value).copy() if isinstance(value, torch.Tensor) else np.asarray(value)

    def from_array(self, array: np.ndarray) -> torch.Tensor:
        return tensor_of(array)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Returns an array as a tensor; int32, as odyssey's modules have class numbers, as int64."""
    tensor = torch.from_numpy(array)
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def check(metrics: dict[str, Metric], out: Any, y: Any, samples: int, repeats: bool = True) -> None:
    """Raises ConfigError if a function of the user's is no mean over samples, or has another value
    when it is called again: with this shard, or with random outputs and targets.

    repeats: False allows other values, for example because ranks are threads, which draw from the
        same generators.

    A model that predicts one class for all samples has an F1 of 0 in any part of a shard, and so
    has a shard with one class. Random samples have neither.
    """
    leaves, _ = pytree.tree_flatten((out, y))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) < len(leaves) or any(t.shape[:1] != (samples,) for t in tensors):
        return
    ours_by_name = (accuracy, *NAMED.values())
    with random_scopes.restored(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in metrics.items():
            if function not in ours_by_name and getattr(function, "func", None) is not top_k:
                _check_function(name, function, out, y, samples, repeats)


def _check_function(
    name: str, function: Metric, out: Any, y: Any, samples: int, repeats: bool
) -> None:
    """Raises ConfigError if a function is no mean over samples, or doesn't repeat its value."""
    generator = torch.Generator().manual_seed(0)
    trials = [(out, y, samples)]
    for _ in range(RANDOM_TRIALS):
        rows = torch.randint(samples, (RANDOM_SAMPLES,), generator=generator)
        trials.append((*_random_samples(out, y, rows, generator), RANDOM_SAMPLES))
    for trial in trials:
        if not _check_trial(name, function, *trial, repeats):
            return


def _check_trial(
    name: str, function: Metric, outputs: Any, targets: Any, samples: int, repeats: bool
) -> bool:
    """Raises ConfigError if a function has another value of the same samples when it is called
    again, or is no mean over them.

    Returns False if other samples would show no more.
    """

    def measure(lo: int, hi: int, key: int = 0) -> torch.Tensor:
        with random_scopes.scope(key, "metric") if repeats else contextlib.nullcontext():
            return torch.as_tensor(metric(*_rows((outputs, targets), lo, hi))).float()

    half = samples // 2
    if not half:
        return True
    try:
        metric = copy.deepcopy(function)  # it may count its calls
        repeated, first, reseeded = [measure(0, samples, key) for key in (0, 0, 1)]
    except Exception:  # what is wrong with it is reported where it is summed
        return False
    if repeats and not torch.equal(repeated, first):
        raise ConfigError(
            f"[train] the metric {name} has another value when it is called again with the same "
            "outputs and targets, for example because it draws from a generator that it holds, or "
            "adds up earlier values. How often a rank calls it depends on the layout; use "
            "odyssey.metrics.Gathered(function), draw from torch, numpy.random or random, which "
            "odyssey seeds, or use deterministic='warn'"
        )
    if not (torch.equal(repeated, first) and torch.equal(first, reseeded)):
        return False  # it draws random numbers, which are others for each part
    try:
        parts = [measure(0, half), measure(half, samples)]
    except Exception:
        return False
    if first.dim() or any(part.dim() for part in parts):
        return False
    check_mean(name, float(first), [(float(parts[0]), half), (float(parts[1]), samples - half)])
    return True


def _rows(tree: Any, lo: int, hi: int) -> Any:
    """Returns copies of rows lo to hi of all tensors of a tree."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach()[lo:hi].clone(), tree)


def _random_samples(
    out: Any, y: Any, rows: torch.Tensor, generator: torch.Generator
) -> tuple[Any, Any]:
    """Returns an output and a target of these rows, with random numbers in the range of theirs."""
    is_class = isinstance(out, torch.Tensor) and isinstance(y, torch.Tensor) and _of_classes(out, y)
    classes = (out.shape[-1] if out.shape[:-1] == y.shape else out.shape[1]) if is_class else 2

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()[rows]
        if not tensor.numel():
            return tensor
        lowest, highest = map(float, torch.aminmax(tensor.float()))
        is_whole = bool((tensor == tensor.round()).all()) if tensor.is_floating_point() else True
        if is_whole and 0 <= lowest and highest < classes:
            numbers = torch.randint(classes, tensor.shape, generator=generator)
        elif not tensor.is_floating_point():
            numbers = tensor[torch.randperm(len(tensor), generator=generator)]
        elif highest > lowest:
            numbers = lowest + torch.rand(tensor.shape, generator=generator) * (highest - lowest)
        else:
            numbers = torch.randn(tensor.shape, generator=generator)
        return numbers.to(tensor.dtype)

    return (
        pytree.tree_map_only(torch.Tensor, draw, out),
        pytree.tree_map_only(torch.Tensor, draw, y),
    )


def _of_classes(out: Any, y: Any) -> bool:
    tensors = isinstance(out, torch.Tensor) and isinstance(y, torch.Tensor)
    return tensors and not y.is_floating_point() and out.dim() == y.dim() + 1
