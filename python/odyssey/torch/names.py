"""Trainers under other platforms' names and arguments: thin constructors over DistributedTrainer.

There a batch is that of one rank; it is converted here into the global batch, and the line says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoints.trainable import History
from ..errors import ConfigError
from .trainer import DistributedTrainer


class PyTorchDDPTrainer(DistributedTrainer):
    """A DistributedTrainer from the arguments of other platforms' DDP trainers.

    Args:
        num_gpus: workers that are meant to be; as many ranks as `odyssey launch -n` starts are there.
        batch_size: samples of one rank, of data sets that fit() is given.
        optimizer: default torch.optim.Adam(lr=learning_rate).
        mixed_precision: autocast to bf16.
        resume_from_checkpoint: True: the newest of checkpoint_dir; or a path.
        more: settings of DistributedTrainer; gradient_clipping and zero_stage are other names of clip_norm and zero.
    """

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
        resume_from_checkpoint: bool | str | Path = True,
        **more: Any,
    ) -> None:
        for theirs, ours in (("gradient_clipping", "clip_norm"), ("zero_stage", "zero")):
            if theirs in more:
                more[ours] = more.pop(theirs)
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=learning_rate)
        super().__init__(model, optimizer, loss_fn, precision="bf16" if mixed_precision else "fp32", **more)
        self._epochs, self._batch_size = epochs, batch_size
        resume = resume_from_checkpoint
        resume = ("never", "auto")[resume] if isinstance(resume, bool) else resume
        self._saving = {"checkpoint_dir": checkpoint_dir, "resume": resume} if checkpoint_dir else {}
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
        options = {**self._saving, "steps": max_steps, **more}
        val_loader = None if val_loader is None else self._global(val_loader, "validation")
        return super().fit(self._global(train_loader, "training"), val_loader, epochs or self._epochs, **options)

    train = fit

    def _global(self, given: Any, what: str) -> Any:
        """A loader of global batches instead of one of a rank's; others are taken as they are."""
        sets = torch.utils.data
        if isinstance(given, sets.Dataset):
            given = sets.DataLoader(given, self._batch_size, shuffle=what == "training")
        if self.comm.size == 1 or not isinstance(given, sets.DataLoader) or given.batch_size is None:
            return given
        if not isinstance(given.sampler, sets.RandomSampler | sets.SequentialSampler | sets.DistributedSampler):
            name = type(given.sampler).__name__
            raise ConfigError(f"[torch] the loader's {name} is of one rank; give DistributedTrainer global batches")
        size = given.batch_size * self.comm.size
        shuffle = getattr(given.sampler, "shuffle", isinstance(given.sampler, sets.RandomSampler))
        self.say(f"[torch] {what} batch of {given.batch_size} x {self.comm.size} ranks: {size} samples a step")
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
        if getattr(self, "_verbose", True):
            super().say(line)

    def metric_average(self, value: Any, name: str = "") -> float:
        """The mean of a number over all ranks; a collective call. `name` is not needed."""
        return float(self.comm.all_reduce(np.array([float(value)], np.float64), "sum")[0]) / self.comm.size
