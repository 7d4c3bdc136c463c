"""What a training run was asked for: options and a configuration file, completed by the model's recipe and checked.

What it is not: a reader of files or options (configfile.py, commands/train.py), or anything that looks at the machine.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from . import runs
from .errors import ConfigError
from .recipes import OPTIMIZERS, RECIPES

STRATEGY = (  # settings that go to the trainer as they are
    "reduction",
    "servers",
    "ranks_per_node",
    "compression",
    "compression_ratio",
    "compression_warmup_steps",
    "powersgd_rank",
    "staleness",
    "local_steps",
    "lr_scaling",
    "base_batch_size",
)
REPLAY = "ODYSSEY_REPLAY"  # as in replay.py, which must not be imported for --help


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training run. `None` stands for "whatever the machine or the data set gives"."""

    model: str
    dataset: str
    data_dir: Path | None
    epochs: int | None  # None: as many as `steps` needs
    steps: int | None
    global_batch_size: int
    shard_size: int
    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    optimizer: str
    schedule: str
    warmup_steps: int | None  # None: the recipe's, shortened for a short run
    seed: int
    num_gpus: int | None
    device: str
    oversubscribe: bool
    threads: int | None
    reduction: str
    servers: int
    ranks_per_node: int | None
    compression: str | None
    compression_ratio: float
    compression_warmup_steps: int
    powersgd_rank: int
    staleness: int
    local_steps: int
    lr_scaling: str
    base_batch_size: int | None
    execution: str
    dp: int | None
    pp: int | None
    tp: int | None
    zero: int
    pipeline_schedule: str | None
    bucket_size_mb: float | None
    overlap: bool
    accumulation_steps: int
    clip_norm: float | None
    nonfinite: str
    check_every: int
    precision: str
    scaler_init_scale: float | None  # None: the default of GradScaler; only with fp16
    scaler_growth_interval: int | None
    run_dir: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int | None  # None: at the end of each epoch
    keep: int
    resume: str
    watchdog: float | None  # seconds; None: ODYSSEY_WATCHDOG, or the default
    evaluate: bool
    save_weights: Path | None
    json: Path | None
    progress: bool

    @property
    def shards(self) -> int:
        """How many shards a full global batch has."""
        return -(-self.global_batch_size // self.shard_size)

    def length(self, steps_per_epoch: int) -> tuple[int, int]:
        """Epochs, and optimizer steps altogether, for a data set of so many steps."""
        epochs = self.epochs
        if epochs is None:
            epochs = -(-(self.steps or 1) // steps_per_epoch)
        total = epochs * steps_per_epoch
        return epochs, total if self.steps is None else min(self.steps, total)

    def warmup(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`: the recipe's take no more than a fifth of it."""
        if self.warmup_steps is None:
            return min(RECIPES[self.model]["warmup_steps"], total_steps // 5)
        if self.warmup_steps > total_steps:
            raise ConfigError(
                f"[train] {self.warmup_steps} warm-up steps but {total_steps} steps altogether; "
                "lower --warmup-steps, or raise --epochs or --steps"
            )
        return self.warmup_steps


def settings(given: dict[str, Any]) -> Settings:
    """Fill what was not given (None) from the model's recipe and check every value; pure."""
    values = dict(given)
    recipe = RECIPES[values["model"]]
    changed = values["optimizer"] not in (None, recipe["optimizer"])
    values["optimizer"] = values["optimizer"] or recipe["optimizer"]
    origin = OPTIMIZERS[values["optimizer"]] if changed else recipe
    sgd = values["optimizer"] == "sgd"
    if values["momentum"] is not None and not sgd:
        raise ConfigError(f"[train] --momentum is given, but --optimizer {values['optimizer']} has none; leave it out")
    if values["nesterov"] and not sgd:
        raise ConfigError(f"[train] --nesterov is given, but --optimizer {values['optimizer']} has no momentum")
    for name in ("lr", "momentum", "weight_decay"):
        values[name] = origin[name] if values[name] is None else values[name]
    values["schedule"] = values["schedule"] or recipe["schedule"]
    if values["epochs"] is None and values["steps"] is None:
        values["epochs"] = recipe["epochs"]
    made = Settings(**values)
    _check(made)
    return made


def _check(made: Settings) -> None:
    counts = ("epochs", "steps", "global_batch_size", "shard_size", "num_gpus", "threads")
    for name in (*counts, "dp", "pp", "tp", "accumulation_steps", "checkpoint_every"):
        value = getattr(made, name)
        if value is not None and value < 1:
            raise ConfigError(f"[train] {option_of(name)} is {value}; 1 or more is allowed")
    if not (math.isfinite(made.lr) and made.lr > 0):
        raise ConfigError(f"[train] --lr is {made.lr}; a finite number above 0 is allowed")
    if not 0 <= made.momentum < 1:
        raise ConfigError(f"[train] --momentum is {made.momentum}; 0 up to, not including, 1 is allowed")
    if made.nesterov and made.momentum == 0:
        raise ConfigError("[train] --nesterov is given, but --momentum is 0; raise --momentum or leave --nesterov out")
    if not (math.isfinite(made.weight_decay) and made.weight_decay >= 0):
        raise ConfigError(f"[train] --weight-decay is {made.weight_decay}; a finite number from 0 is allowed")
    for name in ("scaler_init_scale", "scaler_growth_interval"):
        if getattr(made, name) is not None and made.precision != "fp16":
            raise ConfigError(
                f"[train] {option_of(name)} is given, but --precision {made.precision} scales no loss; "
                "leave it out, or use --precision fp16"
            )
    if made.warmup_steps is not None and made.warmup_steps < 0:
        raise ConfigError(f"[train] --warmup-steps is {made.warmup_steps}; 0 or more is allowed")
    for name in ("clip_norm", "bucket_size_mb"):
        value = getattr(made, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"[train] {option_of(name)} is {value}; a finite number above 0 is allowed")
    if made.global_batch_size % made.accumulation_steps:
        raise ConfigError(
            f"[train] --global-batch-size {made.global_batch_size} / --accumulation-steps {made.accumulation_steps} = "
            f"{made.global_batch_size / made.accumulation_steps:g}; give numbers that divide"
        )
    if not 0 <= made.seed < 2**63:
        raise ConfigError(f"[train] --seed is {made.seed}; 0 to 2**63-1 is allowed")
    if made.keep < 2:
        raise ConfigError(f"[train] --keep is {made.keep}; 2 or more is allowed: the newest may be damaged")
    if made.checkpoint_dir is None and made.run_dir is None and not (runs.Run.current() or os.environ.get(REPLAY)):
        for name, default in (("checkpoint_every", None), ("resume", "auto")):
            if getattr(made, name) != default:
                raise ConfigError(f"[train] {option_of(name)} is given, but no --checkpoint-dir or --run-dir; give one")
    if made.watchdog is not None and not (math.isfinite(made.watchdog) and made.watchdog >= 0):
        raise ConfigError(f"[train] --watchdog is {made.watchdog}; seconds are allowed, and 0 for none")
    if made.json and made.save_weights and os.path.realpath(made.json) == os.path.realpath(made.save_weights):
        raise ConfigError(f"[train] --json and --save-weights both name {made.json}; give two files")
    check_workers(made, made.num_gpus or 1)


def check_workers(made: Settings, workers: int) -> None:
    """Every worker needs a shard of its own."""
    if workers > made.shards:
        raise ConfigError(
            f"[train] {workers} workers but {made.shards} shard{'s' * (made.shards > 1)} (global batch "
            f"{made.global_batch_size} / shard size {made.shard_size}); lower --num-gpus, or --shard-size, "
            "or raise --global-batch-size"
        )


def option_of(name: str) -> str:
    """--global-batch-size of global_batch_size."""
    return "--" + name.replace("_", "-")
