"""Trainers under other platforms' names and arguments: thin constructors over DistributedTrainer.

There a batch is that of one rank; it is converted here into the global batch, and the line says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..callbacks import Callback, Context
from ..checkpoints.trainable import History
from ..errors import ConfigError
from .trainer import DistributedTrainer

ALIASES = {"gradient_clipping": "clip_norm", "zero_stage": "zero"}
NEEDLESS = ("find_unused_parameters", "scaler_growth_interval", "scaler_init_scale")


class GradientNorm(Callback):
    """The norm of the mean gradient of an epoch's last step, in the epoch's record."""

    def on_step_end(self, context: Context) -> None:
        trainer: Any = context.trainer
        norm = torch.linalg.vector_norm(trainer._grads) if trainer.grad_norm is None else trainer.grad_norm
        context.tally.extra["grad_norm"] = float(norm)


class PyTorchDDPTrainer(DistributedTrainer):
    """A DistributedTrainer from the arguments of other platforms' DDP trainers.

    Args:
        num_gpus: workers that are meant to be; as many ranks as `odyssey launch -n` starts are there.
        batch_size: samples of one rank, of data sets that fit() is given.
        optimizer: default torch.optim.Adam(lr=learning_rate).
        mixed_precision: autocast to bf16.
        gradient_accumulation_steps: batches of one rank that make a step, in one larger batch: shards bound its memory.
        checkpoint_frequency: epochs from one checkpoint to the next.
        resume_from_checkpoint: True: the newest of checkpoint_dir; or a path.
        more: arguments of DistributedTrainer, or other names of them (ALIASES); NEEDLESS ones are taken and not used.
    """

    _verbose = True

    def __init__(
        self,
        model: torch.nn.Module,
        num_gpus: int | None = None,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        learning_rate: float = 1e-3,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Any = None,
        mixed_precision: bool = False,
        checkpoint_dir: str | Path | None = None,
        checkpoint_frequency: int = 1,
        gradient_accumulation_steps: int = 1,
        resume_from_checkpoint: bool | str | Path = True,
        **more: Any,
    ) -> None:
        more = {ALIASES.get(name, name): value for name, value in more.items() if name not in NEEDLESS}
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=learning_rate)
        super().__init__(model, optimizer, loss_fn, precision="bf16" if mixed_precision else "fp32", **more)
        self._epochs, self._batch_size, self._passes = epochs, batch_size, gradient_accumulation_steps
        resume: Any = {True: "auto", False: "never"}.get(resume_from_checkpoint, resume_from_checkpoint)  # type: ignore
        self._saving = {"checkpoint_dir": checkpoint_dir, "checkpoint_epochs": checkpoint_frequency, "resume": resume}
        self.callbacks.append(GradientNorm())
        if num_gpus is not None and num_gpus != self.comm.size:
            self.say(f"[torch] num_gpus is {num_gpus}, {self.comm.size} ranks run; start odyssey launch -n {num_gpus}")

    def fit(  # type: ignore[override]
        self,
        train_loader: Any,
        val_loader: Any = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        **more: Any,
    ) -> History:
        """Trains; `train_loader` gives batches of one rank, of which as many as there are ranks make a step."""
        options = {**self._saving, "steps": max_steps, "verbose": self._verbose, **more}
        val_loader = None if val_loader is None else self._global(val_loader, "validation")
        return super().fit(self._global(train_loader, "training"), val_loader, epochs or self._epochs, **options)

    train = fit

    def _global(self, given: Any, what: str) -> Any:
        """A loader of global batches instead of one of a rank's; others are taken as they are."""
        sets = torch.utils.data
        if isinstance(given, sets.Dataset):
            given = sets.DataLoader(given, self._batch_size, shuffle=what == "training")
        batches = self.comm.size * (self._passes if what == "training" else 1)
        if batches == 1 or not isinstance(given, sets.DataLoader) or given.batch_size is None:
            return given
        if not isinstance(given.sampler, sets.RandomSampler | sets.SequentialSampler | sets.DistributedSampler):
            name = type(given.sampler).__name__
            raise ConfigError(f"[torch] the loader's {name} is of one rank; give DistributedTrainer global batches")
        size = given.batch_size * batches
        shuffle = getattr(given.sampler, "shuffle", isinstance(given.sampler, sets.RandomSampler))
        passes = f" x {self._passes} passes" if batches > self.comm.size else ""
        self.say(f"[torch] {what} batch of {given.batch_size} x {self.comm.size} ranks{passes}: {size} samples a step")
        kept = {name: getattr(given, name) for name in ("num_workers", "collate_fn", "drop_last")}
        return sets.DataLoader(given.dataset, size, shuffle=shuffle, **kept)


class HorovodTrainer(PyTorchDDPTrainer):
    """The same from the arguments of Horovod's trainers.

    Args:
        compression: "none", "fp16", or an object of that name, such as hvd.Compression.fp16.
        verbose: whether rank 0 prints.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        compression: Any = "none",
        verbose: bool = True,
        **more: Any,
    ) -> None:
        name = compression if isinstance(compression, str) else getattr(compression, "__name__", "")
        kind = "fp16" if "fp16" in name.lower() else None
        super().__init__(model, optimizer=optimizer, compression=kind, **more)
        self._verbose = verbose

    def say(self, line: str) -> None:
        """One line from rank 0, unless it is not to print."""
        if self._verbose:
            super().say(line)

    def metric_average(self, value: Any, name: str = "") -> float:
        """The mean of a number over all ranks; a collective call. `name` is not needed."""
        return float(self.comm.all_reduce(np.array([float(value)], np.float64), "sum")[0]) / self.comm.size
