"""The Python side of Mojo programs: shared/training is a typed face over the package, and goes through this file.

A Mojo program embeds this interpreter. Its models are Mojo structs whose forward() is called back while a model is
recorded; its errors cross the languages as texts, so `call` remembers the latest for `stop`. Mojo's main ends without
Python's exit handlers; the C library's exit runs them here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import data
from .comm import Communicator
from .core import functional as F
from .core import native
from .core.arena import Arena
from .core.tensor import Tensor
from .engine.engine import Engine, Layout
from .errors import ConfigError, DataError, OdysseyError
from .nn import Module, Sequential
from .optim import Optimizer, Update
from .train.trainer import DistributedTrainer, History, shard_size_of
from .watch import entry

_latest: BaseException | None = None  # that went into Mojo
_weights: weakref.WeakKeyDictionary[DistributedTrainer, tuple[int, str]] = weakref.WeakKeyDictionary()  # after fit()
_training = False  # whether the model that is being recorded is


# --- calls and errors ------------------------------------------------------------------------------------------------


def part(name: str) -> Any:
    """A module of the package, by the name that users import it by."""
    return (
        importlib.import_module(f"odyssey.{name}") if "." in name else getattr(importlib.import_module("odyssey"), name)
    )


def call(target: Any, name: str, arguments: Sequence[Any], settings: dict[str, Any]) -> Any:
    """A function or method by name, with positional arguments and keywords. Raises ConfigError: it has no such keyword;
    else what it raises."""
    global _latest
    function = getattr(target, name)
    try:
        try:
            inspect.signature(function).bind(*arguments, **settings)
        except TypeError as problem:
            raise ConfigError(f"[{name}] {problem}; see its documentation for the settings it has") from None
        return function(*arguments, **settings)
    except BaseException as error:
        _latest = error
        raise
    finally:
        entry.leave_with_c()


def _error(text: str) -> BaseException:
    """The error that a Mojo program shows as this text."""
    if _latest is not None and str(_latest) == text:
        return _latest
    if text.startswith("[data]"):
        return DataError(text)
    return ConfigError(text) if text.startswith("[") else RuntimeError(text)


def stop(text: str) -> int:
    """Says why the program ends, ends the other ranks, and returns the exit code; nothing else follows."""
    error = _error(text)
    if error is _latest or isinstance(error, OdysseyError):
        code, line, trace = entry.described(error)
    else:  # a plain error of the program's own
        code, line, trace = entry.DEFECT, f"error: {text}", ""
    on_all_ranks = getattr(error, "raised_on_all_ranks", False) or text.startswith("[usage]")
    sys.stdout.flush()
    entry.leave_with_c()
    code = entry.end(code, line, text=trace, on_all_ranks=on_all_ranks, late=entry.may_follow(error))
    entry.leave(code, line)
    return code


# --- models ----------------------------------------------------------------------------------------------------------


def module(name: str) -> Module:
    """The Python module of a Mojo struct: it gets its layers as attributes."""
    return type(name, (Module,), {})()


def sequential(layers: Sequence[Module]) -> Sequential:
    """nn.Sequential of a list."""
    return Sequential(*layers)


def traced(model: Module, forward: Callable[[int, Tensor], Tensor], address: int, loss: Any) -> None:
    """Gives a model the forward() of the Mojo struct at an address, and its loss."""

    def run(x: Tensor) -> Tensor:
        global _training
        before, _training = _training, model.training
        try:
            return forward(address, x)
        except Exception as problem:  # a text, once it has been through Mojo
            raise _error(str(problem)) from None
        finally:
            _training = before

    model.forward = run  # type: ignore[method-assign]
    model.loss = loss


def dropout(x: Tensor, p: float) -> Tensor:
    """functional.dropout in the model that is being recorded."""
    return F.dropout(x, p, _training)


# --- data ------------------------------------------------------------------------------------------------------------


def arrays(
    samples: np.ndarray, labels: np.ndarray, shape: Sequence[int], *, classes: int, name: str, **settings: Any
) -> data.ArrayDataset:
    """data.arrays of flat samples of a shape (C, H, W), or of C features if H and W are 1. Raises DataError: the sizes
    do not fit; and what data.arrays raises."""
    text = " x ".join(map(str, shape))
    if min(*shape, classes) < 1:
        raise DataError(f"[data] {name}: samples of {text} and {classes} classes; each must be at least 1")
    if not len(labels) or samples.size != len(labels) * int(np.prod(shape)):
        raise DataError(
            f"[data] {name}: {samples.size} numbers for {len(labels)} samples of {text}; the sizes must fit, and there "
            "must be a sample"
        )
    sizes = shape if shape[1] * shape[2] > 1 else shape[:1]
    return data.arrays(samples.reshape(-1, *sizes), labels, classes=classes, name=name, **settings)


@functools.lru_cache(maxsize=1)
def _order(loader: data.DataLoader, epoch: int) -> np.ndarray:
    return loader._order(epoch)


def batch(loader: data.DataLoader, epoch: int, index: int, size: int) -> data.Batch:
    """Samples index * size up to (index + 1) * size of an epoch, fewer at its end."""
    order = _order(loader, epoch)
    if loader.drop_last:
        order = order[: len(order) // loader.batch_size * loader.batch_size]
    return data.Batch(loader.dataset, order[index * size : (index + 1) * size], epoch, index)


def part_of(batch: data.Batch, first: int, samples: int) -> data.Batch:
    """Some samples of a batch, as a batch. Raises DataError: it does not have them."""
    if first < 0 or samples < 1 or first + samples > len(batch):
        raise DataError(f"[data] samples {first} to {first + samples - 1} of a batch of {len(batch)}; there are none")
    return data.Batch(batch.dataset, batch.indices[first : first + samples], batch.epoch, batch.index)


# --- training --------------------------------------------------------------------------------------------------------


def trainer(model: Module, optimizer: Optimizer, settings: dict[str, Any]) -> DistributedTrainer:
    """A DistributedTrainer; `verbose` shows progress."""
    from .train import progress

    verbose = settings.pop("verbose")
    if verbose:
        settings.setdefault("progress", progress.make(False, sys.stdout))
    return call(sys.modules[__name__], "DistributedTrainer", (model, optimizer), settings)


def fit(trainer: DistributedTrainer, loader: data.DataLoader, **settings: Any) -> History:
    """trainer.fit; what its weights are after it is known to each rank, for programs in which only rank 0 asks."""
    settings |= {name: settings[name] or None for name in ("checkpoint_dir", "checkpoint_every")}
    history = call(trainer, "fit", (loader,), settings)
    if trainer.comm.size > 1:
        _weights[trainer] = trainer.steps, trainer.weights_sha256()
    return history


def weights_sha256(trainer: DistributedTrainer) -> str:
    """trainer.weights_sha256(); no collective call after fit()."""
    steps, digest = _weights.get(trainer, (-1, ""))
    return digest if steps == trainer.steps else trainer.weights_sha256()


class Loop:
    """Sums and gradients of batches that this process computes alone, and steps: an Engine of a Mojo program."""

    def __init__(self, model: Module, seed: int) -> None:
        self.arena = Arena.of(model.named_parameters(), model.named_buffers())
        layout = Layout(Communicator(), 1, 1, shard_size_of(model, None) or 32, "tree", "replay")
        self.engine = Engine(model, model.loss, self.arena, layout, train=True, seed=seed)
        self.names, self.size = [name for name, _ in self.arena.named], self.arena.size

    def run(self, batch: data.Batch, step: int) -> tuple[float, float, float, int]:
        """Sums of losses, correct predictions and samples, and the address of the gradients."""
        if not len(batch):
            raise ConfigError(
                f"[train] the batch has no samples: number {batch.index} of epoch {batch.epoch}; len(loader) says how "
                "many there are"
            )
        sums = self.engine.run(batch, step)
        return sums.loss, sums.correct, sums.samples, sums.updates[0].grads

    def update(self, optimizer: Optimizer, grads: int, divisor: float, rate: float) -> bool:
        """A step with the gradients at an address, divided; whether they were finite, as it changes nothing else."""
        optimizer.bind(self.arena)
        if not divisor:  # of an empty batch
            return False
        by = np.array([divisor], np.float32)
        update = Update(self.arena.address(native.PARAMS), grads, 0, self.size, 0)
        return optimizer.apply([update], by.ctypes.data, rate)

    def weights_sha256(self) -> str:
        """SHA-256 over the bytes of the parameters."""
        return hashlib.sha256(self.arena.params.tobytes()).hexdigest()
