"""Averages of the weights over a training run: EMA over its steps, SWA over the ends of its epochs.

Both keep the whole average on every rank, and compute it element by element from whole weights. So
it has the same bits on any number of ranks and on any layout. The average is the state of the
callback, so checkpoints have it, and a run that resumes continues with it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..base.files import write_whole
from ..base.outputs import write_weights
from ..base.paths import expand_path
from ..checkpoints.trainable import Evaluation
from ..errors import ConfigError, check_integer, check_number
from .base import Callback, Context


class WeightAverage(Callback):
    """Base of callbacks that average the weights of a training run.

    Parameters and floating buffers, such as the running statistics of BatchNorm, are averaged.
    Integer buffers, such as the number of batches of BatchNorm, are copied from the weights.

    Args:
        evaluate: True if evaluations within fit() use the average, so `test_loss` and the other
            metrics of the validation set are those of the average. The weights are put back after
            each evaluation.

    Attributes:
        average: the averaged weights by name, as arrays, whole on every rank. The next update may
            change these arrays in place, so copy them to keep them. If the module is on a GPU, the
            average is kept there, and each read of this attribute copies it to the host.
        updates: how many times the average was updated.
    """

    # No decision is made in on_step_end, so ranks don't need to communicate after each step.
    exact = False
    is_captured = True  # checkpoints keep the attributes that are not in _not_state
    _not_state: tuple[str, ...] = (
        "evaluate",
        "_scratch",
        "_rank",
        "_trainer",
        "_evaluate_before",
    )

    def __init__(self, evaluate: bool = True) -> None:
        if not isinstance(evaluate, (bool, np.bool_)):
            raise ConfigError(f"[{self._kind}] evaluate is {evaluate!r}; use True or False")
        self.evaluate = bool(evaluate)
        # arrays by name, or tensors on the device of the module if that isn't the CPU
        self._values: dict[str, Any] = {}
        self.updates = 0
        self._scratch = Scratch()
        self._rank = 0
        # the trainer that the average is of
        self._trainer: weakref.ReferenceType[Any] | None = None
        # the trainer's replaced evaluate() within fit(), and None outside
        self._evaluate_before: Callable[[Any], Evaluation] | None = None

    @property
    def _kind(self) -> str:
        return type(self).__name__

    @property
    def average(self) -> dict[str, np.ndarray]:
        """The averaged weights by name."""
        return _as_arrays(self._values)

    @property
    def has_average(self) -> bool:
        """True if there is an average that can be used."""
        return bool(self._values)

    # --- use of the average ---

    @contextlib.contextmanager
    def applied(self, trainer: Any) -> Iterator[None]:
        """A context in which the trainer has the averaged weights. All ranks enter and leave it.

        After the block the trainer has its weights again, bit for bit, also if the block raises.
        Don't train inside: those steps would be lost.

        Args:
            trainer: the trainer that had this callback in fit(), or one of the same model.

        Raises:
            ConfigError: There is no average yet, or it is of another model.

        Example:
            with ema.applied(trainer):
                print(trainer.evaluate(test).accuracy)
        """
        restore = self._averaged_weights(trainer).write(self._values)
        try:
            yield
        finally:
            restore()

    def apply(self, trainer: Any) -> None:
        """Replaces the trainer's weights by the average, for good. All ranks call it.

        Call it after fit(), for example before you export the model.

        Raises:
            ConfigError: There is no average yet, or it is of another model.
        """
        self._averaged_weights(trainer).write(self._values)

    def save_weights(self, path: str | Path) -> None:
        """Deprecated; use odyssey.export(trainer, path) within `applied(trainer)`.

        Writes the average as a safetensors file, whole or not at all. All ranks may call it.
        Rank 0 writes.

        Raises:
            ConfigError: There is no average yet.
            OutputError: The file can't be written.
        """
        warnings.warn(
            f"{self._kind}.save_weights() is deprecated; use odyssey.export(trainer, path) within "
            "applied(trainer)",
            DeprecationWarning,
            stacklevel=2,
        )
        self._check_average()
        if self._rank == 0:
            write_whole(
                expand_path(path), lambda file: write_weights(file, self.average), mode=0o666
            )

    def _check_average(self) -> None:
        if not self.has_average:
            raise ConfigError(
                f"[{self._kind}] there is no average yet; pass this callback to "
                f"fit(callbacks=[...]) first{self._hint}"
            )

    _hint = ""  # added to the error about a missing average

    def _averaged_weights(self, trainer: Any) -> EngineWeights | ModuleWeights:
        """Returns access to a trainer's weights, after checks that the average fits."""
        self._check_average()
        weights = _weights_of(trainer)
        shapes = weights.shapes()
        expected_shapes = {name: tuple(value.shape) for name, value in self._values.items()}
        if shapes != expected_shapes:
            pairs = (*shapes.items(), *expected_shapes.items())
            name = next(name for name, _ in pairs if shapes.get(name) != expected_shapes.get(name))
            raise ConfigError(
                f"[{self._kind}] the average is of another model: {name} has shape "
                f"{expected_shapes.get(name)} in the average and {shapes.get(name)} in the "
                "trainer; use the trainer that had this callback in fit()"
            )
        return weights

    # --- events ---

    def on_fit_start(self, context: Context) -> None:
        """Starts the average with the current weights, or continues it in a later fit() of the same
        trainer.
        """
        trainer: Any = context.trainer
        self._check_trainer(context)
        self._rank = trainer.comm.rank
        is_same_trainer = self._trainer is not None and self._trainer() is trainer
        if not is_same_trainer:
            self._trainer = weakref.ref(trainer)
            self.updates = 0
            self._values = _weights_of(trainer).copied()
        if self.evaluate:
            self._evaluate_before = trainer.evaluate
            vars(trainer)["evaluate"] = functools.partial(self._evaluate_average, trainer)

    def on_fit_end(self, context: Context) -> None:
        """Lets evaluate() of the trainer use the weights again."""
        evaluate = self._evaluate_before
        if evaluate is not None:
            trainer: Any = context.trainer
            del vars(trainer)["evaluate"]
            # A program may have replaced the method of this trainer before.
            if getattr(evaluate, "__func__", None) is not type(trainer).evaluate:
                vars(trainer)["evaluate"] = evaluate
            self._evaluate_before = None
        self._scratch = Scratch()

    def _check_trainer(self, context: Context) -> None:
        """Raises ConfigError, on all ranks, if the weights of this trainer can't be averaged."""
        trainer: Any = context.trainer
        if not trainer.mode.together:
            raise ConfigError(
                f"[{self._kind}] ranks have different weights between steps with "
                f"reduction={trainer.settings.reduction!r}, so there are no weights to average; "
                "use reduction='tree', or leave the callback out"
            ).on_all_ranks()
        evaluating = [c for c in context.given if isinstance(c, WeightAverage) and c.evaluate]
        if len(evaluating) > 1:
            names = " and ".join(c._kind for c in evaluating)
            raise ConfigError(
                f"[{self._kind}] {names} would both evaluate their average; pass evaluate=False "
                "to all but one of them"
            ).on_all_ranks()

    def _evaluate_average(self, trainer: Any, loader: Any) -> Evaluation:
        """Evaluates the average. It replaces the trainer's evaluate() within fit()."""
        evaluate = self._evaluate_before
        assert evaluate is not None
        if not self.has_average:
            return evaluate(loader)
        with self.applied(trainer):
            return evaluate(loader)

    # --- the arithmetic ---

    def _update(self, trainer: Any, rate: float) -> None:
        """Moves the average towards the weights: average += rate (weights - average).

        rate: 1 copies the weights.
        """
        weights = _weights_of(trainer)
        # a checkpoint of another device has put its values here
        self._values = weights.localized(self._values)
        weights.average_into(self._values, rate, self._scratch)
        self.updates += 1


class EMA(WeightAverage):
    """Keeps the exponential moving average of the weights over optimizer steps.

    After each step, average = decay x average + (1 - decay) x weights. The arithmetic is that of
    float32, as average += (1 - decay) (weights - average). Steps that were skipped, because a
    gradient wasn't finite, don't count. The average starts with the weights before the first step.

    With one rank, and with `zero` 0 to 2 without pipelines and tensor parallelism, an update reads
    and writes memory only, in NumPy on one core of each rank. With `zero=3`, pipelines and tensor
    parallelism, each update gathers all weights on every rank. On GPUs each update of one of
    odyssey's own models copies the weights to the host. The average of a PyTorch module is on the
    module's GPU, and an update copies nothing to the host. Use `every` to update less often. In all
    cases each rank needs memory for one more copy of the weights and of the largest tensor. An
    evaluation needs memory for two more copies.

    Args:
        decay: how much of the average stays at an update, from 0 to below 1.
        warmup: True limits the decay to (1 + n) / (10 + n) at the n-th update, counted from 0, as
            TensorFlow's ExponentialMovingAverage does with num_updates. So the first weights are
            forgotten soon: the decay of 0.999 is reached after 8,990 updates. False uses `decay`
            from the start. A number copies the weights at so many updates, and averages with
            `decay` after them, as timm's update_after_step.
        every: the optimizer steps from one update to the next.
        evaluate: True if evaluations within fit() use the average.

    Attributes:
        average: the averaged weights by name, whole on every rank. The next update may change
            these arrays in place, so copy them to keep them.
        updates: how many times the average was updated.
        steps: the optimizer steps that were counted.

    Raises:
        ConfigError: A setting is not allowed, or ranks don't have the same weights after each step
            (local SGD and parameter servers).

    Example:
        ema = callbacks.EMA(decay=0.999)
        trainer.fit(loader, validation, epochs=5, callbacks=[ema])
        with ema.applied(trainer):
            odyssey.export(trainer, "averaged.safetensors")
    """

    def __init__(
        self,
        decay: float = 0.999,
        warmup: bool | int = True,
        every: int = 1,
        *,
        evaluate: bool = True,
    ) -> None:
        super().__init__(evaluate)
        self.decay = check_number("[EMA] decay", decay, 0, 1)
        if isinstance(warmup, (bool, np.bool_)):
            self.warmup: bool | int = bool(warmup)
        else:
            self.warmup = check_integer("[EMA] warmup", warmup, 0)
        self.every = check_integer("[EMA] every", every, 1)
        self.steps = 0

    def on_fit_start(self, context: Context) -> None:
        super().on_fit_start(context)
        if self.updates == 0:
            self.steps = 0

    def on_step_end(self, context: Context) -> None:
        step = context.step
        if step is None or not step.taken:
            return
        self.steps += 1
        if self.steps % self.every == 0:
            self._update(context.trainer, 1 - self._decay_now())

    def _decay_now(self) -> float:
        """Returns the decay of the next update."""
        if self.warmup is True:
            return min(self.decay, (1 + self.updates) / (10 + self.updates))
        if self.updates < self.warmup:
            return 0.0
        return self.decay


class SWA(WeightAverage):
    """Keeps the equal average of the weights at the ends of epochs (Izmailov et al., 2018).

    An epoch ends before its evaluation, so this evaluation has the average with this epoch. If
    `steps` of fit() ends an epoch early, that counts as its end.

    The running statistics of BatchNorm are averaged as well. torch.optim.swa_utils leaves them to
    update_bn(), which computes them again from the data. The docs show how to do that.

    An update gathers the weights as in `EMA`, but only once in `every` epochs.

    Args:
        start_epoch: the first epoch whose end counts, from 1. Three quarters of all epochs are
            usual. Use a constant or cyclic learning rate from there on.
        every: the epochs from one update to the next.
        evaluate: True if evaluations within fit() use the average, from the first update on.

    Attributes:
        average: the averaged weights by name, whole on every rank. The next update may change
            these arrays in place, so copy them to keep them. Before the first update these are the
            weights at the start.
        updates: how many ends of epochs were averaged.

    Raises:
        ConfigError: A setting is not allowed, or ranks don't have the same weights after each step
            (local SGD and parameter servers).

    Example:
        swa = callbacks.SWA(start_epoch=8)
        trainer.fit(loader, validation, epochs=10, callbacks=[swa])
        swa.apply(trainer)
    """

    _not_state = ("_is_counted",)
    _hint = "; SWA has one after the end of epoch start_epoch"

    def __init__(self, start_epoch: int, every: int = 1, *, evaluate: bool = True) -> None:
        super().__init__(evaluate)
        self.start_epoch = check_integer("[SWA] start_epoch", start_epoch, 1)
        self.every = check_integer("[SWA] every", every, 1)
        # True if the current epoch is in the average: its evaluation comes before on_epoch_end.
        self._is_counted = False

    @property
    def has_average(self) -> bool:
        return self.updates > 0

    def on_epoch_start(self, context: Context) -> None:
        self._is_counted = False

    def on_epoch_end(self, context: Context) -> None:
        self._count_epoch(context)

    def _evaluate_average(self, trainer: Any, loader: Any) -> Evaluation:
        context = trainer.context
        # The record of an epoch is created after its last step, and before its evaluation.
        if context.record.get("epoch") == context.epoch:
            self._count_epoch(context)
        return super()._evaluate_average(trainer, loader)

    def _count_epoch(self, context: Context) -> None:
        """Adds the end of this epoch to the average, unless it is in it already."""
        if self._is_counted:
            return
        self._is_counted = True
        epochs_since_start = context.epoch - self.start_epoch
        if epochs_since_start >= 0 and epochs_since_start % self.every == 0:
            self._update(context.trainer, 1 / (1 + self.updates))


class Scratch:
    """Memory for the differences of one tensor, which grows to the largest one."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def like(self, array: np.ndarray) -> np.ndarray:
        """Returns an array of this form. Float32 arrays share memory."""
        if array.dtype != np.float32:
            return np.empty_like(array)
        if self._memory.size < array.size:
            self._memory = np.empty(array.size, np.float32)
        return self._memory[: array.size].reshape(array.shape)


class HostWeights:
    """Access to weights whose average is in arrays of the host. A subclass is for each trainer."""

    def buffers(self) -> set[str]:
        """Returns the names of the tensors that are no parameters."""
        raise NotImplementedError

    def all_tensors(self) -> contextlib.AbstractContextManager[dict[str, np.ndarray]]:
        """Yields all tensors by name, whole on every rank, to be read."""
        raise NotImplementedError

    def copied(self) -> dict[str, Any]:
        """Returns copies of all tensors by name, with which an average starts."""
        with self.all_tensors() as tensors:
            return {name: np.array(array, order="C") for name, array in tensors.items()}

    def localized(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of an average, in the form that `average_into` needs."""
        return _as_arrays(values)

    def average_into(self, values: dict[str, Any], rate: float, scratch: Scratch) -> None:
        """Moves the values of an average towards the weights: values += rate (weights - values).

        rate: 1 copies the weights.
        """
        buffers = self.buffers()
        with self.all_tensors() as tensors:
            for name, array in tensors.items():
                average = values[name]
                if rate == 1 or not np.issubdtype(average.dtype, np.floating):
                    np.copyto(average, array)
                else:
                    difference = scratch.like(average)
                    _move_towards(average, array, rate, difference, is_buffer=name in buffers)


def _move_towards(
    average: np.ndarray,
    weights: np.ndarray,
    rate: float,
    difference: np.ndarray,
    is_buffer: bool,
) -> None:
    """Moves one tensor, in its own precision.

    Equal numbers stay exactly as they are. Without this form, a float32 decay of 0.9999 would
    shrink weights that don't change by 0.02 %.

    difference: memory for it.
    """
    # Masks of attention are buffers of infinities, whose difference would be NaN.
    mask: Any = weights != average if is_buffer else True
    np.subtract(weights, average, out=difference, where=mask)
    np.multiply(difference, average.dtype.type(rate), out=difference, where=mask)
    np.add(average, difference, out=average, where=mask)


def _as_arrays(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns values by name as arrays of the host; the same dict if they are arrays already."""
    if all(isinstance(value, np.ndarray) for value in values.values()):
        return values
    return {name: _as_array(value) for name, value in values.items()}


def _as_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.ascontiguousarray(value.detach().cpu().numpy()).reshape(tuple(value.shape))


class EngineWeights(HostWeights):
    """Access to the weights of odyssey's own trainer, which may be spread over ranks."""

    def __init__(self, trainer: Any) -> None:
        self._arena = trainer.arena
        self._ownership = trainer.stepper.engine.ownership

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by name."""
        return {name: tuple(p.shape) for name, p in self._arena.named}

    def buffers(self) -> set[str]:
        """Returns the names of the tensors that are no parameters."""
        return {name for name, _ in self._arena.buffers}

    @contextlib.contextmanager
    def all_tensors(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields all tensors by name, whole on every rank, to be read.

        Collective if ranks have parts of them. Otherwise nothing is copied.
        """
        yield self._views(self._ownership.parameters())

    def _views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors in an array of the arena's layout."""
        offsets = self._arena.offsets
        return {
            name: flat[offsets[name] : offsets[name] + p.size].reshape(p.shape)
            for name, p in self._arena.named
        }

    def write(self, values: dict[str, Any]) -> Callable[[], None]:
        """Writes values by name into the parts that this rank has; all ranks call it.

        Returns a function that writes back what was there. All ranks call that, too.
        """
        values = self.localized(values)
        flat = np.zeros(self._arena.size, np.float32)
        for name, view in self._views(flat).items():
            np.copyto(view, values[name])
        # An evaluation before the first step cuts the whole array into the parts of ranks.
        is_cut = self._ownership.settled
        previous_values: dict[int, np.ndarray] = {}

        def exchange(start: int, array: np.ndarray) -> None:
            previous_values[start] = array.copy()
            np.copyto(array, flat[start : start + array.size])

        def put_back(start: int, array: np.ndarray) -> None:
            if is_cut:
                np.copyto(array, previous_values[start])
            else:
                np.copyto(array, previous_values[0][start : start + array.size])

        self._ownership.load(exchange)
        return functools.partial(self._ownership.load, put_back)


class ModuleWeights(HostWeights):
    """Access to the weights of the trainer of PyTorch modules, which may be spread over ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._device = trainer.arena.device

    def _named_tensors(self) -> list[tuple[str, Any]]:
        """Returns parameters and buffers by name."""
        arena = self._trainer.arena
        return [*arena.named, *arena.buffers]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._named_tensors()}

    def buffers(self) -> set[str]:
        """Returns the names of the tensors that are no parameters."""
        return {name for name, _ in self._trainer.arena.buffers}

    @contextlib.contextmanager
    def all_tensors(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields all tensors by name, whole on every rank, to be read.

        Collective with zero=3. Otherwise nothing is copied, except from a GPU.
        """
        with self._trainer.gathered():
            yield {name: tensor.detach().cpu().numpy() for name, tensor in self._named_tensors()}

    def copied(self) -> dict[str, Any]:
        if self._device.is_host:
            return super().copied()
        with self._trainer.gathered():
            return {name: tensor.detach().clone() for name, tensor in self._named_tensors()}

    def localized(self, values: dict[str, Any]) -> dict[str, Any]:
        if self._device.is_host:
            return super().localized(values)
        return {name: self._device.tensor_of(value) for name, value in values.items()}

    def average_into(self, values: dict[str, Any], rate: float, scratch: Scratch) -> None:
        if self._device.is_host:
            super().average_into(values, rate, scratch)
            return
        with self._trainer.gathered():
            arena = self._trainer.arena
            for tensors, is_buffer in ((arena.named, False), (arena.buffers, True)):
                averages = [values[name] for name, _ in tensors]
                weights = [tensor.detach() for _, tensor in tensors]
                self._device.move_averages(averages, weights, rate, is_buffer)

    @contextlib.contextmanager
    def _local(self) -> Iterator[dict[str, Any]]:
        """Yields the tensors by name that this rank has, to be written."""
        with self._trainer.shards.holding() as local_ids:
            buffers = self.buffers()
            yield {
                name: tensor.detach()
                for name, tensor in self._named_tensors()
                if local_ids is None or name in buffers or id(tensor) in local_ids
            }

    def write(self, values: dict[str, Any]) -> Callable[[], None]:
        """Writes values by name into the tensors that this rank has.

        Returns a function that writes back what was there.
        """
        values = self.localized(values)
        with self._local() as tensors:
            # All are copied before the first is written, because tensors may share memory.
            previous_values = {name: tensor.clone() for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                tensor.copy_(self._device.tensor_of(values[name]))

        def restore() -> None:
            with self._local() as tensors:
                for name, tensor in tensors.items():
                    tensor.copy_(previous_values[name])

        return restore


def _weights_of(trainer: Any) -> EngineWeights | ModuleWeights:
    """Returns access to the weights of a trainer."""
    return ModuleWeights(trainer) if hasattr(trainer, "gathered") else EngineWeights(trainer)
