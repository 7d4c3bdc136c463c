"""Trainers under other platforms' names and arguments: thin constructors over DistributedTrainer.

There a batch is that of one rank; it is converted here into the global batch, and the line says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..callbacks import Callback, Context
from ..checkpoints import History
from ..distributed import DistributedConfig
from ..errors import ConfigError
from .trainer import DistributedTrainer

#: Keys that mean what it is without them here: autocast is to bf16, and parameters that no shard
#: reaches are known.
NEEDLESS = ("scaler_growth_interval", "scaler_init_scale", "find_unused_parameters")


class GradientNorm(Callback):
    """The norm of the mean gradient of an epoch's last step, in the epoch's record."""

    def on_step_end(self, context: Context) -> None:
        norm = context.trainer.gradient_norm()
        if norm is not None:
            context.tally.extra["grad_norm"] = norm


class PyTorchDDPTrainer(DistributedTrainer):
    """A DistributedTrainer from the arguments of other platforms' DDP trainers.

    Args:
        num_gpus: workers that are meant to be; as many ranks as `odyssey launch -n` starts are
            there.
        optimizer: default torch.optim.Adam(lr=learning_rate).
        loss_fn: as DistributedTrainer's `loss`.
        settings: keys of DistributedConfig, and arguments of DistributedTrainer. batch_size is that
            of one rank, of data sets that fit() is given; mixed_precision is autocast to bf16;
            gradient_accumulation_steps are batches of one rank that make a step, in one larger
            batch: shards bound its memory. NEEDLESS: not used.
    """

    _verbose = True

    def __init__(
        self,
        model: torch.nn.Module,
        num_gpus: int | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Any = None,
        **settings: Any,
    ) -> None:
        keys = [key for key in settings if key in DistributedConfig.KEYS]
        self.config = config = DistributedConfig(
            num_gpus=num_gpus, **{key: settings.pop(key) for key in keys}
        )
        self._passes = config.gradient_accumulation_steps
        config_settings = config.settings(
            k for k in keys if k not in (*NEEDLESS, "gradient_accumulation_steps")
        )
        precision = {"precision": "bf16"} if config.mixed_precision else {}
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=config.learning_rate)
        super().__init__(model, optimizer, loss_fn, **{**config_settings, **precision, **settings})
        self.callbacks.append(GradientNorm())
        if config.workers(1) not in (1, self.comm.size):
            workers = config.workers(1)
            self.say(
                f"[torch] num_gpus is {workers}, {self.comm.size} ranks run; start odyssey "
                f"launch -n {workers}"
            )

    def fit(
        self, train_loader: Any, val_loader: Any = None, epochs: int | None = None, **options: Any
    ) -> History:  # type: ignore[override]
        """Trains; `train_loader` gives batches of one rank, of which as many as there are ranks
        make a step. What is not given is as the constructor was told; loggers are those of
        both.
        """
        defaults = {**self.config.fit_options(), "verbose": self._verbose}
        callbacks = [*defaults.pop("callbacks"), *options.pop("callbacks", ())]
        epochs = epochs or defaults.pop("epochs")
        val_loader = val_loader and self._make_global(val_loader, "validation")
        options = {**defaults, "epochs": epochs, "callbacks": callbacks, **options}
        return super().fit(self._make_global(train_loader, "training"), val_loader, **options)

    train = fit

    @property
    def best_accuracy(self) -> float | None:
        """The best of all epochs of the last fit(), on the validation set."""
        return self.context.history.best_accuracy

    def _make_global(self, loader: Any, purpose: str) -> Any:
        """A loader of global batches instead of one of a rank's; others are taken as they are."""
        sets = torch.utils.data
        if isinstance(loader, sets.Dataset):
            options = {"shuffle": purpose == "training", "num_workers": self.config.num_workers}
            loader = sets.DataLoader(loader, self.config.batch_size, **options)
        batches = self.comm.size * (self._passes if purpose == "training" else 1)
        parted = isinstance(getattr(loader, "sampler", None), sets.DistributedSampler)
        if (
            (batches == 1 and not parted)
            or not isinstance(loader, sets.DataLoader)
            or loader.batch_size is None
        ):
            return loader
        if not isinstance(
            loader.sampler, sets.RandomSampler | sets.SequentialSampler | sets.DistributedSampler
        ):
            name = type(loader.sampler).__name__
            raise ConfigError(
                f"[torch] the loader's {name} is of one rank; give DistributedTrainer global "
                "batches"
            )
        size = loader.batch_size * batches
        shuffle = getattr(loader.sampler, "shuffle", isinstance(loader.sampler, sets.RandomSampler))
        passes = f" x {self._passes} passes" if batches > self.comm.size else ""
        self.say(
            f"[torch] {purpose} batch of {loader.batch_size} x {self.comm.size} ranks{passes}: "
            f"{size} samples a step"
        )
        copied_options = {
            name: getattr(loader, name) for name in ("num_workers", "collate_fn", "drop_last")
        }
        return sets.DataLoader(loader.dataset, size, shuffle=shuffle, **copied_options)


class HorovodTrainer(PyTorchDDPTrainer):
    """The same from the arguments of Horovod's trainers. compression: "none", "fp16", or an
    object of that name, such as hvd.Compression.fp16. verbose: whether rank 0 prints.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        compression: Any = "none",
        verbose: bool = True,
        **settings: Any,
    ) -> None:
        name = compression if isinstance(compression, str) else getattr(compression, "__name__", "")
        kind = "fp16" if "fp16" in name.lower() else None
        super().__init__(model, optimizer=optimizer, compression=kind, **settings)
        self._verbose = verbose

    def say(self, line: str) -> None:
        """One line from rank 0, unless it is not to print."""
        if self._verbose:
            super().say(line)

    def metric_average(self, value: Any, name: str = "") -> float:
        """The mean of a number over all ranks; a collective call. `name` is not needed."""
        return (
            float(self.comm.all_reduce(np.array([float(value)], np.float64), "sum")[0])
            / self.comm.size
        )
