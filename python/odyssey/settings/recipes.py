"""Default training settings per model and per optimizer.

Plain data: nothing heavy is imported, nothing is computed.

A command-line option or a line of the configuration file replaces one value; the rest stays. When
the optimizer is replaced, the learning rate, momentum and weight decay come from `OPTIMIZERS`:
those of the recipe belong to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..base.registry import provided
from ..errors import ConfigError

_SCHEDULE = {"schedule": "cosine", "warmup_steps": 100}
RECIPES: dict[str, dict[str, Any]] = {
    "lenet5": {
        "epochs": 8,
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        **_SCHEDULE,
    },
    "mlp": {
        "epochs": 5,
        "optimizer": "adam",
        "lr": 1e-3,
        "momentum": 0.0,
        "weight_decay": 0.0,
        **_SCHEDULE,
    },
    "convnet": {
        "epochs": 2,
        "optimizer": "adam",
        "lr": 1e-3,
        "momentum": 0.0,
        "weight_decay": 0.0,
        **_SCHEDULE,
    },
    "resnet18": {
        "epochs": 6,
        "optimizer": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        **_SCHEDULE,
    },
    "gpt": {
        "epochs": 22,
        "optimizer": "adamw",
        "lr": 1e-3,
        "momentum": 0.0,
        "weight_decay": 0.1,
        **_SCHEDULE,
    },
    "gpt-mini": {
        "epochs": 2,
        "optimizer": "adamw",
        "lr": 1e-3,
        "momentum": 0.0,
        "weight_decay": 0.1,
        **_SCHEDULE,
    },
}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.01},
    "rmsprop": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0},
}

# what a setting may be beside its choices; its numbers that are not given: the class's own
OWN_CLASS = "FILE.py:CLASS"

# What is not said, beside the recipe: of every model, and of some (nanoGPT's settings for
# characters; mini: for CPUs).
GENERAL: dict[str, Any] = {"dataset": "mnist", "global_batch_size": 128, "sequence_length": 64}
_TEXT_DEFAULTS = {"dataset": "shakespeare", "clip_norm": 1.0}
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {
        **_TEXT_DEFAULTS,
        "global_batch_size": 64,
        "shard_size": 4,
        "sequence_length": 256,
        "steps": 5000,
    },
    "gpt-mini": {
        **_TEXT_DEFAULTS,
        "global_batch_size": 12,
        "shard_size": 3,
        "sequence_length": 64,
        "steps": 2000,
    },
}
GPT_DROPOUT: dict[str, float] = {"gpt": 0.2, "gpt-mini": 0.0}
GPT_BETAS: tuple[float, float] = (0.9, 0.99)

# of targets that are numbers; those of classes come with the model
LOSSES: tuple[str, ...] = ("mse", "l1", "smooth_l1")
SCHEDULES: tuple[str, ...] = ("constant", "step", "cosine", "linear-warmup")
DATASETS: tuple[str, ...] = (
    "mnist",
    "fashion-mnist",
    "cifar10",
    "shakespeare",
    "image-folder",
    "csv",
    "npz",
    "text",
)

REDUCTIONS: dict[str, bool] = {  # whether the bits are the same on any number of ranks
    "tree": True,
    "mpi": False,  # where the library gives them
    "ring": False,  # on the same number of ranks
    "hierarchical": True,
    "parameter_server": True,
    "async_parameter_server": False,
    "local_sgd": False,
}
NONFINITE: tuple[str, ...] = ("stop", "skip", "rollback")
FORMATS: tuple[str, ...] = ("safetensors", *provided("formats"))  # that models are exported in
LR_SCALINGS: tuple[str, ...] = ("none", "sqrt", "linear")
COMPRESSIONS: tuple[str, ...] = ("fp16", "bf16", "topk", "powersgd")
CONV_ALGORITHMS: tuple[str, ...] = ("auto", "direct", "winograd")
PRECISIONS: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")
BACKENDS: tuple[str, ...] = ("auto", "mpi", "shm", "local", "nccl", *provided("backends"))
# orders in which a pipeline runs its micro-batches
PIPELINES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved")


def check_listed(label: str, names: Iterable[str], listed: Iterable[str]) -> None:
    """Raises ConfigError if the names that the code has for `label` are not those that are listed
    here for settings.
    """
    forgotten = [f"{name!r} is not in settings/recipes.py" for name in {*names} - {*listed}]
    forgotten += [f"{name!r} of settings/recipes.py has no code" for name in {*listed} - {*names}]
    if forgotten:
        raise ConfigError(
            f"[settings] {label}: {', '.join(sorted(forgotten))}; add it there, or remove it"
        )
