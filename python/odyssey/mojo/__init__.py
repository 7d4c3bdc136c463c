"""The Python side of Mojo programs: shared/training is a typed face over the package, and goes
through this file.

A Mojo program embeds this interpreter. Its models are Mojo structs whose forward() is called back
while a model is recorded; its errors cross the languages as texts, so `call` remembers the latest
for `stop`. Mojo's main ends without Python's exit handlers; the C library's exit runs them here.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import odyssey as package  # for Mojo, by its public names

from .. import DistributedTrainer, History, Tensor, data, optim
from .. import functional as F
from ..base import exits
from ..comm import Communicator
from ..errors import ConfigError, DataError, OdysseyError
from ..nn import Module, Sequential
from ..optim import Optimizer
from ..train import progress

_latest: BaseException | None = None  # that went into Mojo
# after fit()
_weights: weakref.WeakKeyDictionary[DistributedTrainer, tuple[int, str]] = (
    weakref.WeakKeyDictionary()
)
_training = False  # whether the model that is being recorded is


# --- calls and errors -----------------------------------------------------------------------------


def call(target: Any, name: str, arguments: Sequence[Any], settings: dict[str, Any]) -> Any:
    """A function or method by name, with positional arguments and keywords.

    Raises ConfigError: it has no such keyword; else what it raises.
    """
    global _latest
    function = getattr(target, name)
    try:
        try:
            inspect.signature(function).bind(*arguments, **settings)
        except TypeError as problem:
            raise ConfigError(
                f"[{name}] {problem}; see its documentation for the settings it has"
            ) from None
        return function(*arguments, **settings)
    except BaseException as error:
        _latest = error
        raise
    finally:
        exits.leave_with_c()


class ProgramError(OdysseyError):
    """An error that a Mojo program raises itself, without a word in brackets."""

    exit_code = 70


def _error(text: str) -> BaseException:
    """The error that a Mojo program shows as this text."""
    if _latest is not None and str(_latest) == text:
        return _latest
    if not text.startswith("["):
        return ProgramError(text)
    return DataError(text) if text.startswith("[data]") else ConfigError(text)


def stop(text: str) -> int:
    """Says why the program ends, ends the other ranks, and returns the exit code; nothing else
    follows.
    """
    error = _error(text)
    if text.startswith("[usage]") and isinstance(error, OdysseyError):
        error.on_all_ranks()
    return exits.stop(error)


# --- models ---------------------------------------------------------------------------------------


def module(name: str) -> Module:
    """The Python module of a Mojo struct: it gets its layers as attributes."""
    return type(name, (Module,), {})()


def sequential(layers: Sequence[Module]) -> Sequential:
    return Sequential(*layers)


# channels, height and width of a sample, and its place, as the struct's types say
Sample = tuple[int, int, int, int]


def traced(
    model: Module,
    forward: Callable[[int, Tensor], Tensor],
    address: int,
    loss: Any,
    takes: Sample,
    gives: Sample,
) -> None:
    """Gives a model the forward() of the Mojo struct at an address, and its loss."""

    def run(x: Tensor) -> Tensor:
        global _training
        was_training = _training
        _training = model.training
        try:
            y = forward(address, _fitted(x, takes[:3]))
        except Exception as problem:  # a text, once it has been through Mojo
            raise _error(str(problem)) from None
        finally:
            _training = was_training
        if y.size != y.shape[0] * math.prod(gives[:3]) or y.device.slot != gives[3]:
            raise ConfigError(
                f"[model] forward() gives samples of {y.shape[1:]} on {y.device}; its Output is "
                f"{_text(gives[:3])} on device({gives[3]})"
            )
        return y

    model.forward = run  # type: ignore[method-assign]
    model.loss = loss


def _fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Samples in the shape that the model takes, if they have it, or as many features."""
    if math.prod(shape[1:]) == 1:
        if x.shape == (len(x), shape[0]):  # features, or ids
            return x
        if x.features == shape[0]:
            return x.flatten()
    if x.shape[1:] == tuple(shape):
        return x
    if x.ndim == 2 and x.features == math.prod(shape):
        return x.reshape((-1, *shape))
    raise ConfigError(f"[train] the samples are {x.shape[1:]}; the model takes {_text(shape)}")


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def dropout(x: Tensor, p: float) -> Tensor:
    """functional.dropout in the model that is being recorded."""
    return F.dropout(x, p, _training)


# --- data -----------------------------------------------------------------------------------------


def arrays(
    samples: np.ndarray,
    labels: np.ndarray,
    *,
    channels: int,
    height: int = 1,
    width: int = 1,
    classes: int,
    name: str = "arrays",
    **settings: Any,
) -> data.ArrayDataset:
    """data.arrays of flat samples of (channels, height, width), or of `channels` features if
    height and width are 1. Raises DataError: the sizes do not fit; and what data.arrays
    raises.
    """
    shape = channels, height, width
    if min(*shape, classes) < 1:
        raise DataError(
            f"[data] {name}: samples of {_text(shape)} and {classes} classes; each must be at "
            "least 1"
        )
    if not len(labels) or samples.size != len(labels) * math.prod(shape):
        raise DataError(
            f"[data] {name}: {samples.size} numbers for {len(labels)} samples of {_text(shape)}; "
            "the sizes must fit, and there must be a sample"
        )
    sizes = shape if height * width > 1 else shape[:1]
    return data.arrays(samples.reshape(-1, *sizes), labels, classes=classes, name=name, **settings)


@functools.lru_cache(maxsize=1)
def _order(loader: data.DataLoader, epoch: int) -> np.ndarray:
    count = len(loader.dataset)
    order = data.permutation(count, loader.seed, epoch) if loader.shuffle else np.arange(count)
    return order[: count // loader.batch_size * loader.batch_size] if loader.drop_last else order


def batch(loader: data.DataLoader, epoch: int, index: int, size: int) -> data.Batch:
    """Samples index * size up to (index + 1) * size of an epoch, fewer at its end."""
    return data.Batch(
        loader.dataset, _order(loader, epoch)[index * size : (index + 1) * size], epoch, index
    )


def part_of(batch: data.Batch, first: int, samples: int) -> data.Batch:
    """Some samples of a batch, as a batch. Raises DataError: it does not have them."""
    if first < 0 or samples < 1 or first + samples > len(batch):
        raise DataError(
            f"[data] samples {first} to {first + samples - 1} of a batch of {len(batch)}; there "
            "are none"
        )
    return data.Batch(
        batch.dataset, batch.indices[first : first + samples], batch.epoch, batch.index
    )


# --- training -------------------------------------------------------------------------------------


def optimizer(*numbers: float, name: str, decay_vectors: bool = True, **settings: Any) -> Optimizer:
    """A class of odyssey.optim by its name and settings, in its order or by name; `beta1` and
    `beta2` are its `betas`. Raises ConfigError: a setting is unknown or not allowed.
    """
    parameters = inspect.signature(getattr(optim, name)).parameters
    names = [
        n
        for p in parameters
        for n in (("beta1", "beta2") if p == "betas" else (p,))
        if p != "params"
    ]
    settings = dict(zip(names, numbers, strict=False)) | settings
    if "betas" in parameters:
        first, second = parameters["betas"].default
        settings["betas"] = settings.pop("beta1", first), settings.pop("beta2", second)
    built_optimizer = call(optim, name, (), settings)
    if not decay_vectors:
        built_optimizer.undecayed = optim.vectors
    return built_optimizer


def trainer(
    model: Module,
    optimizer: Optimizer,
    *,
    threads: int | None = None,
    verbose: bool = False,
    **settings: Any,
) -> DistributedTrainer:
    """A DistributedTrainer; `verbose` shows progress on standard output."""
    if verbose:
        settings.setdefault("progress", progress.make(False, sys.stdout))
    return call(
        package, "DistributedTrainer", (model, optimizer), {**settings, "threads": threads or None}
    )


def fit(trainer: DistributedTrainer, loader: data.DataLoader, **settings: Any) -> History:
    """trainer.fit; what its weights are after it is known to each rank, for programs in which
    only rank 0 asks.
    """
    settings |= {
        name: settings.get(name) or None for name in ("checkpoint_dir", "checkpoint_every")
    }
    history = call(trainer, "fit", (loader,), settings)
    if trainer.comm.size > 1:
        _weights[trainer] = trainer.steps, trainer.weights_sha256()
    return history


def weights_sha256(trainer: DistributedTrainer) -> str:
    """trainer.weights_sha256(); no collective call after fit()."""
    steps, digest = _weights.get(trainer, (-1, ""))
    return digest if steps == trainer.steps else trainer.weights_sha256()


class Loop:
    """Sums and gradients of batches that this process computes alone, and steps: an Engine of a
    Mojo program.
    """

    def __init__(self, model: Module, seed: int) -> None:
        shard_size = getattr(model, "micro_batch_size", 32)
        self.trainer = DistributedTrainer(
            model,
            optim.SGD(),
            device="cpu",
            comm=Communicator(),
            threads=1,
            shard_size=shard_size,
            seed=seed,
        )
        self.names = [name for name, _ in self.trainer.arena.named]
        self.size = self.trainer.arena.size

    def run(self, batch: data.Batch, step: int) -> tuple[float, float, float, int]:
        """Sums of losses, correct predictions and samples, and the address of the gradients."""
        if not len(batch):
            raise ConfigError(
                f"[train] the batch has no samples: number {batch.index} of epoch {batch.epoch}; "
                "len(loader) says how many there are"
            )
        sums = self.trainer.stepper.gradients(batch, step)[0]
        return sums.loss, sums.correct, sums.samples, sums.updates[0].grads

    def update(self, optimizer: Optimizer, grads: int, divisor: float, rate: float) -> bool:
        """A step with the gradients at an address, divided; whether they were finite, as it
        changes nothing else.
        """
        optimizer.bind(self.trainer.arena)
        if not divisor:  # of an empty batch
            return False
        by = np.array([divisor], np.float32)
        return optimizer.apply_whole(grads, by.ctypes.data, rate)
