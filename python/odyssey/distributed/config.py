"""DistributedConfig: a training's settings under the names that other platforms use, turned into
odyssey's own.

A key that is unknown, or a value that this version cannot do, is refused with what to use instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import registry
from ..callbacks import loggers
from ..comm import BACKENDS, world
from ..errors import ConfigError, check_integer
from ..nn import Module
from ..settings.declarations import Settings, Training, declared, did_you_mean

# What stands in other platforms' configurations and is done in another way here, or not yet.
_INSTEAD = {
    "deepspeed_config": "use zero_stage, its zero_optimization's stage, 1 to 3",
    "device_ids": "leave it out: the ranks decide",
    "bucket_cap_mb": "use bucket_size_mb",
    "pin_memory": "leave it out",
}
# of a torch module; a model of our own has one, whatever its name elsewhere
_TRAINERS = registry.provided("trainers")
FRAMEWORKS = {
    "tensorflow": "a Keras model trains with KERAS_BACKEND=torch and backend='pytorch-ddp' "
    "(docs/migration.md)",
    "deepspeed": "use zero_stage (1 to 3)",
}
_LOGGING = {name: p.default for name, p in inspect.signature(loggers.asked).parameters.items()}
_OWN: dict[str, Any] = {  # keys that mean something else than a setting of odyssey
    "num_gpus": None,
    "num_nodes": None,
    "gpus_per_node": None,
    "backend": None,
    "batch_size": 32,
    "mixed_precision": False,
    "find_unused_parameters": False,
    "checkpoint_frequency": 1,
    "resume_from_checkpoint": True,
    "num_workers": 0,
    **_LOGGING,
}
_SETTINGS = {s.alias: s for s in declared(Settings).values() if s.alias}
_SETTINGS["compression"] = declared(Settings)["compression"]
_SETTINGS["bucket_size_mb"] = _SETTINGS["bucket_size_mb"]._replace(default=25.0)
for _key, _default in (("epochs", 1), ("learning_rate", 0.001)):  # here no recipe gives them
    _SETTINGS[_key] = _SETTINGS[_key]._replace(default=_default, optional=False)
_DEFAULTS = {**_OWN, **{key: s.default for key, s in _SETTINGS.items()}}


class DistributedConfig:
    """Settings by keyword, checked when it is made; attributes of the same names.

    Keys, beside those that docs/settings.md names as other platforms' names of a setting:
        backend: "pytorch-ddp", "horovod" or "ray": which trainer() a torch module gets; our own
            models have one.
        num_gpus: workers of all ranks together; or num_nodes and gpus_per_node. Default: one per
            rank.
        batch_size: samples per worker (default 32). learning_rate: 0.001. epochs: 1.
        mixed_precision: True or "fp16" (with loss scaling: scaler_init_scale,
            scaler_growth_interval), "bf16", False.
        checkpoint_dir: where checkpoints go; none by default. checkpoint_frequency: epochs from one
            to the next.
        resume_from_checkpoint: True: from the newest valid one, if there is one; a path: from that;
            False: refuse a directory that has some.
        num_workers: processes of a rank that read samples. tensorboard, tensorboard_dir,
            mlflow_tracking, mlflow_experiment, log_every_n_steps: loggers that fit_options() has
            (odyssey.loggers).
        find_unused_parameters: either; unused parameters count as zero and are named, which costs
            nothing.

    Raises ConfigError: a key is unknown, a value not allowed, or a key is done in another way here.
    """

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any: ...

    KEYS = frozenset({*_DEFAULTS, *_INSTEAD})

    def __init__(self, **settings: Any) -> None:
        for key, value in settings.items():
            if key in _INSTEAD:
                if value not in (None, False):
                    raise ConfigError(
                        f"[config] {key}={value!r} is not a setting here; {_INSTEAD[key]}"
                    )
            elif key not in _DEFAULTS:
                raise ConfigError(f"[config] unknown key {key!r}{did_you_mean(key, _DEFAULTS)}")
        self.given = {key: value for key, value in settings.items() if key not in _INSTEAD}
        for key, default in _DEFAULTS.items():
            setattr(self, key, settings.get(key, default))
        self._check()

    def _check(self) -> None:
        if self.backend in BACKENDS:
            raise ConfigError(
                f"[config] backend={self.backend!r}; say communication_backend={self.backend!r}"
            )
        if self.backend in FRAMEWORKS:
            raise ConfigError(
                f"[config] backend={self.backend!r} is another framework; "
                f"{FRAMEWORKS[self.backend]}"
            )
        if self.backend not in (None, *_TRAINERS):
            raise ConfigError(
                f"[config] backend={self.backend!r} is unknown; choose from {', '.join(_TRAINERS)}"
            )
        for key, setting in _SETTINGS.items():
            setattr(self, key, setting.check(getattr(self, key), f"[config] {key}"))
        for key in ("num_gpus", "num_nodes", "gpus_per_node", "batch_size", "checkpoint_frequency"):
            if getattr(self, key) is not None or _OWN[key] is not None:
                check_integer(f"[config] {key}", getattr(self, key), 1)
        check_integer("[config] num_workers", self.num_workers, 0)
        check_integer("[config] log_every_n_steps", self.log_every_n_steps, 1)
        if not isinstance(self.resume_from_checkpoint, (bool, str, Path)):
            raise ConfigError(
                f"[config] resume_from_checkpoint is {self.resume_from_checkpoint!r}; give a path"
            )
        if self.mixed_precision not in (True, False, "fp16", "bf16"):
            raise ConfigError(
                f"[config] mixed_precision={self.mixed_precision!r}; use True, False, 'fp16' or "
                "'bf16'"
            )
        by_node = (self.num_nodes or 1) * (self.gpus_per_node or 1)
        by_node = None if self.num_nodes is self.gpus_per_node is None else by_node
        if None not in (by_node, self.num_gpus) and by_node != self.num_gpus:
            raise ConfigError(
                f"[config] num_nodes({self.num_nodes or 1}) x "
                f"gpus_per_node({self.gpus_per_node or 1}) = {by_node}, "
                f"but num_gpus is {self.num_gpus}; leave one of them out"
            )
        self._workers = by_node if self.num_gpus is None else self.num_gpus

    def workers(self, ranks: int) -> int:
        """Workers of all ranks together.

        Raises ConfigError: they cannot be shared out evenly over so many ranks.
        """
        total = ranks if self._workers is None else self._workers
        if total % ranks:
            raise ConfigError(
                f"[config] {total} workers on {ranks} ranks; start ranks that divide it or set "
                "num_gpus"
            )
        return total

    def global_batch_size(self, ranks: int) -> int:
        """Samples of one optimizer step: batch_size x workers x gradient_accumulation_steps."""
        return self.batch_size * self.workers(ranks) * self.gradient_accumulation_steps

    def loader_options(self, ranks: int) -> dict[str, Any]:
        """Keywords of a data.DataLoader; `gradient_accumulation_steps` of its batches make one
        step.
        """
        size = self.batch_size * self.workers(ranks)
        return {
            "batch_size": size,
            "shuffle": True,
            "seed": self.seed,
            "num_workers": self.num_workers,
        }

    def trainer_options(self, ranks: int) -> dict[str, Any]:
        """Keywords of a DistributedTrainer on so many ranks."""
        return {
            **self.settings(_SETTINGS),
            "num_gpus": None if self._workers is None else self.workers(ranks) // ranks,
            "precision": {True: "fp16", False: "fp32"}.get(
                self.mixed_precision, self.mixed_precision
            ),
        }

    def settings(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns these keys as far as a trainer has them, under the trainer's names."""
        trainer_names = {key: _SETTINGS[key].name for key in keys if key in _SETTINGS}
        return {
            name: getattr(self, key)
            for key, name in trainer_names.items()
            if name in declared(Training)
        }

    def fit_options(self) -> dict[str, Any]:
        """Keywords of DistributedTrainer.fit(); the loggers are made here."""
        resume = self.resume_from_checkpoint
        return {
            "epochs": self.epochs,
            "checkpoint_dir": self.checkpoint_dir,
            "checkpoint_epochs": self.checkpoint_frequency,
            "resume": {True: "auto", False: "never"}[resume]
            if isinstance(resume, bool)
            else resume,
            "callbacks": loggers.asked(**{name: getattr(self, name) for name in _LOGGING}),
        }

    def trainer(self, model: Any, optimizer: Any = None, **more: Any) -> Any:
        """A DistributedTrainer with these settings, on the ranks that are running; `more` goes
        before them.

        The optimizer's rate becomes `learning_rate`. A torch module gets the trainer that `backend`
        names, by default odyssey.torch.PyTorchDDPTrainer, whose optimizer is by default Adam;
        fit_options() are its own already.
        """
        if not isinstance(model, Module):
            if not _TRAINERS:
                raise ConfigError(
                    f"[config] the model is a {type(model).__name__}; give an odyssey.nn.Module"
                )
            make = registry.load("trainers", self.backend or next(iter(_TRAINERS)))
            return make(model, optimizer=optimizer, **{**self.given, **more})
        from ..train.trainer import DistributedTrainer

        comm = more.get("comm") or world(more.get("backend", self.communication_backend))
        optimizer.lr = float(self.learning_rate)
        return DistributedTrainer(
            model, optimizer, **{**self.trainer_options(comm.size), "comm": comm, **more}
        )

    def __repr__(self) -> str:
        changed = {k: getattr(self, k) for k, v in _DEFAULTS.items() if getattr(self, k) != v}
        return f"DistributedConfig({', '.join(f'{k}={v!r}' for k, v in changed.items())})"
