"""Every setting of a training, declared once: name, type, default, what is allowed, help, what
it belongs to.

From the declaration come the options of `odyssey train` and the keys of its TOML file
(commands/train.py), the keywords of DistributedTrainer and their documentation, the checks, what
ranks compare, what a checkpoint compares, the keys of DistributedConfig, the report of --json and
docs/settings.md. CONTRIBUTING.md shows how to add one. It imports nothing heavy, as `odyssey train
--help` needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from ..base import runs
from ..errors import ConfigError, near
from . import recipes

REPLAY = "ODYSSEY_REPLAY"  # as in replay.py, which must not be imported for --help

KINDS = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}

#: Sections of the help text and of the documentation.
DATA = "What is trained"
UPDATE = "The update"
PROCESS = "This process"
RANKS = "Ranks, and how they share the work"
SAVING = "Checkpoints and failures"
OUTPUT = "What comes out"
SECTIONS = (DATA, UPDATE, PROCESS, RANKS, SAVING, OUTPUT)

Kind = TypeVar("Kind")
Function = TypeVar("Function", bound=Callable[..., Any])


class Setting(NamedTuple):
    """Declaration of a setting beside its field's name, type and default, which `declared` fills
    in.
    """

    section: str  # one of SECTIONS
    help: str  # what it does, for all interfaces
    # the default in words, where the value does not say it; "{recipe}": the recipes' values
    shown: str = ""
    choices: tuple[str, ...] = ()  # allowed texts
    own: bool = False  # or FILE.py:CLASS, of the user's own code
    low: float = -math.inf  # the least number allowed
    above: float = -math.inf  # a bound that is not allowed itself
    high: float = math.inf
    below: float = math.inf
    # the setting that it belongs to, and the values of that with which it applies
    only: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # the words of its option, if not --name
    metavar: str | None = None  # what stands for its value in the help text
    alias: str = ""  # its key in DistributedConfig
    # where a checkpoint's configuration has it; settings of one key make a list
    checkpoint: str = ""
    alike: bool = True  # whether it must be the same on all ranks; a path need not
    option: bool = True  # whether `odyssey train` has an option for it
    name: str = ""
    kind: type = str
    optional: bool = False
    default: Any = None

    @property
    def same_on_ranks(self) -> bool:
        """Returns whether it must be the same on all ranks; paths are each rank's own."""
        return self.alike and self.kind is not Path

    @property
    def allowed(self) -> str:
        """Returns what is allowed, as messages and documentation say it."""
        if self.choices:
            alternatives = (
                ", or None" * self.optional + f", or write {recipes.OWN_CLASS}" * self.own
            )
            return f"choose from {', '.join(self.choices)}{alternatives}"
        if self.kind is bool:
            return "it must be True or False"
        if self.kind not in (int, float):
            return "give a path" if self.kind is Path else "give a text"
        noun = "an integer" if self.kind is int else "a number"
        if self.kind is int and self.high < math.inf:
            return f"it must be {noun} from {self.low} to {self.high}"
        bounds = (
            (self.above, "above"),
            (self.low, "of at least"),
            (self.high, "at most"),
            (self.below, "below"),
        )
        limits = " and ".join(f"{word} {bound}" for bound, word in bounds if not math.isinf(bound))
        return (
            f"it must be {noun} "
            f"{limits}{' and finite' * (self.kind is float and self.high == self.below)}"
        )

    def check(self, value: Any, label: str) -> Any:
        """The value, an integer as Python's own; ConfigError, with `label` for the name, if it is
        not allowed.
        """
        if value is None and self.optional:
            return value
        if self.kind in (int, float):
            number = numbers.Integral if self.kind is int else numbers.Real
            fits = isinstance(value, number) and not isinstance(value, bool)
            fits = fits and self.low <= value <= self.high and self.above < value < self.below
        elif self.kind is bool:
            # NumPy's as well
            fits = (isinstance(value, int) or type(value).__name__ == "bool_") and value in (0, 1)
        else:
            fits = isinstance(value, (str, Path)) and (
                not self.choices or value in self.choices or self.is_own(value)
            )
        if not fits:
            raise ConfigError(f"{label} is {value!r}; {self.allowed}")
        return int(value) if self.kind is int else value

    def is_own(self, value: Any) -> bool:
        """Returns whether a value names a class of the user's own code."""
        return self.own and ".py" in str(value)

    @property
    def default_text(self) -> str:
        """The default as help and documentation say it."""
        if "{recipe}" in self.shown or not self.shown and self.name in recipes.RECIPES["lenet5"]:
            return (self.shown or "{recipe}").format(recipe=_recipes(self.name))
        return self.shown or (
            ("off", "on")[self.default] if self.kind is bool else f"{self.default}"
        )

    def help_text(self, spell: Callable[..., str]) -> str:
        """Returns what it does, what it belongs to, and its default."""
        only = f"only with {spell(*self.only)}; " if self.only else ""
        return f"{self.help[0].upper()}{self.help[1:]}. ({only}default: {self.default_text})"


def _recipes(key: str) -> str:
    values = {model: recipe[key] for model, recipe in recipes.RECIPES.items()}
    if len(set(values.values())) == 1:
        return str(next(iter(values.values())))
    return ", ".join(
        f"{v:g} {m}" if isinstance(v, (int, float)) else f"{v} {m}" for m, v in values.items()
    )


def setting(section: str, default: Any, text: str, shown: str = "", **fields: Any) -> Any:
    """A field of a class of settings."""
    return dataclasses.field(
        default=default, metadata={"setting": Setting(section, text, shown, **fields)}
    )


@functools.cache
def declared(kind: type) -> dict[str, Setting]:
    """The settings of a class by name, a class's own before those of its bases."""
    fields = {f.name: f for f in dataclasses.fields(kind) if "setting" in f.metadata}
    settings_by_name = {}
    for name in (
        n for cls in kind.__mro__ for n in vars(cls).get("__annotations__", ()) if n in fields
    ):
        first, *other_types = str(fields[name].type).split(" | ")
        about = {
            "name": name,
            "kind": KINDS[first],
            "optional": "None" in other_types,
            "default": fields[name].default,
        }
        settings_by_name[name] = fields[name].metadata["setting"]._replace(**about)
    return settings_by_name


# --- the settings ---------------------------------------------------------------------------------

# functions that dataclasses would write take milliseconds of each start
_settings = dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)

# what settings belong to
TOPK = ("compression", "topk")
FP16 = ("precision", "fp16")
SGD = ("optimizer", "sgd", recipes.OWN_CLASS)
SERVERS = ("reduction", "parameter_server", "async_parameter_server")


@_settings
class ReductionSettings:
    """How gradients are summed between ranks: parallel/strategy.py."""

    def __init__(self, **values: Any) -> None:
        vars(self).update({f.name: f.default for f in dataclasses.fields(self)} | values)

    reduction: str = setting(
        RANKS,
        "tree",
        "how gradients are summed; tree, hierarchical and parameter_server give the same bits on "
        "any number of workers",
        choices=tuple(recipes.REDUCTIONS),
    )
    servers: int = setting(
        RANKS, 1, "ranks that add, or serve, of a parameter server", low=1, only=SERVERS
    )
    ranks_per_node: int | None = setting(
        RANKS,
        None,
        "neighbouring ranks that count as a node",
        "those on one machine",
        low=1,
        only=("reduction", "hierarchical"),
    )
    compression: str | None = setting(
        RANKS,
        None,
        "how gradients are sent: 16-bit floats, the largest only, or products of rank r",
        "whole",
        choices=recipes.COMPRESSIONS,
    )
    compression_ratio: float = setting(
        RANKS, 0.01, "share of the gradients that is sent", above=0, high=1, only=TOPK
    )
    compression_warmup_steps: int = setting(
        RANKS,
        0,
        "steps in which the share that is sent falls from a quarter to that",
        low=0,
        only=TOPK,
    )
    powersgd_rank: int = setting(
        RANKS, 2, "the rank r of the products", low=1, only=("compression", "powersgd")
    )
    staleness: int = setting(
        RANKS,
        4,
        "steps that a worker may be ahead of the slowest before it waits",
        low=0,
        only=("reduction", "async_parameter_server"),
    )
    local_steps: int = setting(
        RANKS, 8, "steps between two averages", low=1, only=("reduction", "local_sgd")
    )


@_settings
class Training(ReductionSettings):
    """Keyword settings of DistributedTrainer."""

    def __repr__(self) -> str:
        both = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        changed = ", ".join(f"{name}={v!r}" for name, v, default in both if v != default)
        return f"{type(self).__name__}({changed})"

    shard_size: int | None = setting(
        DATA,
        None,
        "samples per shard, whose gradient is computed as one piece; part of what is computed",
        "the checkpoint's, else for images and tables 32 from a global batch of 128 on, 16 from "
        "32 on, and one shard "
        "below; for sequences about 1,024 tokens, but at most an eighth of the batch",
        low=1,
    )
    seed: int = setting(
        DATA,
        0,
        "of the weights, the data order and dropout",
        low=0,
        high=2**63 - 1,
        alias="seed",
        checkpoint="seed",
    )
    precision: str = setting(
        DATA,
        "fp32",
        "what the operands of products are rounded to; tf32 on GPUs only, fp16 scales the loss",
        choices=recipes.PRECISIONS,
    )
    conv_algorithm: str = setting(
        DATA,
        "auto",
        "how 3 x 3 convolutions of stride 1 are computed: directly, or on CPUs in fp32 from 32 "
        "channels and 7 x 7 pixels on by Winograd's algorithm",
        "the checkpoint's, else winograd on CPUs and direct on GPUs",
        choices=recipes.CONV_ALGORITHMS,
    )
    scaler_init_scale: float = setting(
        DATA,
        65536.0,
        "first loss scale, a power of two",
        "65536",
        low=1,
        only=FP16,
        alias="scaler_init_scale",
    )
    scaler_growth_interval: int = setting(
        DATA,
        2000,
        "steps without an overflow after which the loss scale doubles",
        low=1,
        only=FP16,
        alias="scaler_growth_interval",
    )
    lr_scaling: str = setting(
        UPDATE,
        "none",
        "multiply the rate by the batch size over the base batch size, or by its root",
        choices=recipes.LR_SCALINGS,
        checkpoint="learning-rate scaling",
    )
    base_batch_size: int | None = setting(
        UPDATE,
        None,
        "the batch size that the learning rate is for",
        "none",
        low=1,
        only=("lr_scaling", "sqrt", "linear"),
        checkpoint="learning-rate scaling",
    )
    clip_norm: float | None = setting(
        UPDATE,
        None,
        "largest global norm of the gradients",
        "not clipped",
        above=0,
        alias="gradient_clipping",
        checkpoint="clip norm",
    )
    accumulation_steps: int = setting(
        UPDATE,
        1,
        "batches of the loader that make one update",
        low=1,
        alias="gradient_accumulation_steps",
    )
    num_gpus: int | None = setting(
        PROCESS,
        None,
        "workers of this process (of each, under mpirun): GPUs, or CPU workers where there is none",
        "one",
        low=1,
    )
    backend: str = setting(
        PROCESS,
        "auto",
        "how ranks are connected; in a single process nccl stands for its num_gpus GPUs, which add "
        "along the tree as with auto",
        choices=recipes.BACKENDS,
        alias="communication_backend",
        alike=False,
        option=False,
    )
    device: str = setting(
        PROCESS,
        "auto",
        "what the workers are; auto: GPUs if num_gpus is given and the machine has some",
        choices=("auto", "cpu", "gpu"),
    )
    oversubscribe: bool = setting(PROCESS, False, "several workers may share a GPU")
    threads: int | None = setting(
        PROCESS,
        None,
        "CPU threads of a process",
        "the cores that it may use and its CPU quota pays for, divided by the processes on this "
        "machine",
        low=1,
        alike=False,
    )
    execution: str = setting(
        PROCESS,
        "replay",
        "replay a recorded step, or call each kernel from Python; the same bits",
        choices=("replay", "eager"),
    )
    zero: int = setting(
        RANKS,
        0,
        "what replicas keep in parts: 1 optimizer state, 2 gradients as well, 3 parameters as well",
        low=0,
        high=3,
        alias="zero_stage",
    )
    pipeline_schedule: str | None = setting(
        RANKS,
        None,
        "order of the micro-batches of a pipeline",
        "the model's own, else 1f1b",
        choices=recipes.PIPELINES,
    )
    bucket_size_mb: float | None = setting(
        RANKS,
        None,
        "gradients are reduced in buckets of this size during the backward pass",
        "4, and 25 for a model of at most that; with zero 2 and 3 at most a 32nd of the model",
        above=0,
        alias="bucket_size_mb",
    )
    overlap: bool = setting(
        RANKS, True, "reduce buckets during the backward pass", flags=("--overlap/--no-overlap",)
    )
    rebalance: bool = setting(
        RANKS,
        False,
        "move shards between steps from ranks that take long to the others; the same bits",
        alias="rebalance",
    )
    offload: str | None = setting(
        RANKS,
        None,
        "where the optimizer's state is kept: cpu, the host's memory, for GPUs; or a folder on a "
        "disk, for files, of which memory holds what is in use, and on CPU workers for parameters "
        "and gradients too",
        "where it is computed",
        metavar="cpu|DIR",
        alias="offload",
        alike=False,
    )
    nonfinite: str = setting(
        SAVING,
        "stop",
        "at a NaN or infinity: stop, skip the step, or go back to the last checkpoint and leave "
        "the batch out",
        choices=recipes.NONFINITE,
    )
    check_every: int = setting(
        SAVING,
        100,
        "steps between comparisons of the replicas' weights, and of the ranks' data; 0: never",
        low=0,
    )
    other_arithmetic: bool = setting(
        SAVING,
        False,
        "train where processors, libraries or their variables compute different results from the "
        "same numbers, on ranks or since the checkpoint; the journal and checkpoints note it",
        "an error",
    )


@_settings
class Settings(Training):
    """One run of `odyssey train`.

    `None` stands for "whatever the model, the machine or the data set gives".
    """

    model: str = setting(DATA, "lenet5", "the network", choices=tuple(recipes.RECIPES))
    dataset: str | None = setting(
        DATA,
        None,
        "the data set",
        "mnist; shakespeare with gpt and gpt-mini",
        choices=recipes.DATASETS,
    )
    data_dir: Path | None = setting(
        DATA,
        None,
        "where the data set's files are: a folder, or one file",
        "what comes with odyssey",
    )
    image_size: int = setting(
        DATA,
        32,
        "height and width to which pictures are scaled",
        low=1,
        only=("dataset", "image-folder"),
    )
    target: str | None = setting(
        DATA,
        None,
        "the column that is learnt",
        "the last one",
        metavar="COLUMN",
        only=("dataset", "csv"),
    )
    normalize: bool = setting(
        DATA,
        False,
        "numbers of a table less their column's mean, over its standard deviation; both of the "
        "training part, and kept in checkpoints and ONNX",
        only=("dataset", "csv"),
    )
    drop_columns: str | None = setting(
        DATA,
        None,
        "columns of a table that are left out",
        "none",
        metavar="COLUMN,...",
        only=("dataset", "csv"),
    )
    fill: str | None = setting(
        DATA,
        None,
        "what stands for a missing number of a table: a number, or mean, of its column in the "
        "training part",
        "a missing number is refused",
        metavar="mean|NUMBER",
        only=("dataset", "csv"),
    )
    skip_unreadable: bool = setting(
        DATA,
        False,
        "read all images of a folder before the first step, and leave out files that cannot be "
        "read; the first ten names are printed",
        "an error, which lists them",
        only=("dataset", "image-folder"),
    )
    loss: str | None = setting(
        DATA,
        None,
        "loss of targets that are numbers, which it standardises; whole numbers are then no "
        "classes",
        "mse of numbers, cross-entropy of classes",
        choices=recipes.LOSSES,
    )
    log_target: bool = setting(
        DATA,
        False,
        "learn log(1 + target), for targets of at least 0 with a heavy tail; predictions and "
        "metrics have the target's units",
    )
    class_weights: str | None = setting(
        DATA,
        None,
        "balanced: in the loss, a class counts samples / (classes * samples of the class)",
        "all samples count alike",
        choices=("balanced",),
    )
    sequence_length: int | None = setting(
        DATA,
        None,
        "tokens of a sample of text",
        "64; 256 with gpt",
        low=1,
        only=("dataset", "shakespeare", "text"),
    )
    metrics: str | None = setting(
        DATA,
        None,
        "what is measured beside the loss: accuracy, top5 (any number), mae, mse, f1, precision, "
        "recall, auc, r2, correlation, with commas",
        "accuracy of classes",
        metavar="NAME,...",
    )
    num_workers: int = setting(DATA, 0, "processes of each rank that read samples ahead", low=0)
    epochs: int | None = setting(DATA, None, "passes over the training set", low=1, alias="epochs")
    steps: int | None = setting(
        DATA, None, "stop after so many optimizer steps", "at the end of the last epoch", low=1
    )
    early_stopping: str | None = setting(
        DATA,
        None,
        "stop when this figure of epochs was no better for PATIENCE of them (3); the best "
        "checkpoint is then best in the directory of checkpoints",
        "all epochs",
        metavar="FIGURE[:PATIENCE[:MIN_DELTA]]",
    )
    global_batch_size: int | None = setting(
        DATA,
        None,
        "samples per optimizer step, over all workers",
        "128; 64 gpt, 12 gpt-mini",
        low=1,
    )
    optimizer: str | None = setting(
        UPDATE,
        None,
        "how parameters are updated, or a class of your own",
        choices=tuple(recipes.OPTIMIZERS),
        own=True,
    )
    lr: float | None = setting(UPDATE, None, "peak learning rate", low=0, alias="learning_rate")
    momentum: float | None = setting(
        UPDATE, None, "momentum of the gradients", "0.9", low=0, below=1, only=SGD
    )
    nesterov: bool = setting(UPDATE, False, "Nesterov momentum", only=SGD)
    weight_decay: float | None = setting(
        UPDATE, None, "weight decay", "{recipe}; 0.01 with adamw", low=0
    )
    schedule: str | None = setting(
        UPDATE, None, "learning rate over time", choices=recipes.SCHEDULES
    )
    warmup_steps: int | None = setting(
        UPDATE,
        None,
        "steps in which the learning rate rises",
        "{recipe}, at most a fifth of the run",
        low=0,
    )
    dp: int | None = setting(
        RANKS, None, "replicas of the model", "as many as pp and tp leave ranks for", low=1
    )
    pp: int | None = setting(RANKS, None, "pipeline stages, each on a rank of its own", "1", low=1)
    tp: int | None = setting(RANKS, None, "ranks that share each layer, 1 to 4", "1", low=1)
    layout: str | None = setting(
        RANKS,
        None,
        "auto: rank 0 plans all layouts first, as `odyssey plan` does, and the fastest that fits "
        "is taken",
        "that of --dp, --pp, --tp and --zero",
        choices=("auto",),
    )
    run_dir: Path | None = setting(
        SAVING,
        None,
        "keep what a run leaves here: checkpoints, a log of its steps, stacks",
        "none, or that of odyssey launch",
    )
    checkpoint_dir: Path | None = setting(
        SAVING,
        None,
        "write checkpoints here, and go on from the newest",
        "none, or those of the run directory",
        alias="checkpoint_dir",
    )
    checkpoint_every: int | None = setting(
        SAVING, None, "steps from one checkpoint to the next", "at the end of each epoch", low=1
    )
    keep: int = setting(
        SAVING, 2, "number of most recent checkpoints to keep; the newest may be damaged", low=2
    )
    resume: str = setting(
        SAVING,
        "auto",
        "go on from the newest valid checkpoint, refuse if there is one, go on from that at PATH, "
        "or begin a new training with the newest weights (those at PATH)",
        metavar="auto|never|PATH|weights[:PATH]",
    )
    allow_nondeterministic_data: bool = setting(
        SAVING,
        False,
        "go on where the data set gives other samples than before the checkpoint",
        "an error",
    )
    watchdog: float | None = setting(
        SAVING,
        None,
        "seconds without progress after which a run says who is missing where, and ends; 0: never",
        "60",
        low=0,
    )
    evaluate: bool = setting(OUTPUT, True, "test after each epoch", flags=("--eval/--no-eval",))
    save_weights: Path | None = setting(
        OUTPUT, None, "write the weights at the end", "not written", metavar="FILE.safetensors"
    )
    json: Path | None = setting(OUTPUT, None, "write the results at the end", "not written")
    log: str | None = setting(
        OUTPUT,
        None,
        "write the figures of steps and epochs: csv, jsonl, tensorboard, mlflow, wandb, or several "
        "of them with commas",
        "not written",
        metavar="NAMES",
    )
    log_dir: Path | None = setting(
        OUTPUT, None, "where --log writes", "logs, in the run directory if there is one"
    )
    log_every_n_steps: int = setting(OUTPUT, 10, "steps between two that --log writes", low=1)
    trace: Path | None = setting(
        OUTPUT,
        None,
        "record when each rank and thread did what, for Perfetto and Chrome",
        "not recorded",
        metavar="FILE.json",
    )
    no_progress: bool = setting(
        OUTPUT,
        False,
        "print the summary line only",
        "progress is shown",
        flags=("--no-progress", "-q", "--quiet"),
        alike=False,
    )

    def length(self, steps_per_epoch: int) -> tuple[int, int]:
        """Epochs, and optimizer steps altogether, for a data set of so many steps."""
        epochs = -(-(self.steps or 1) // steps_per_epoch) if self.epochs is None else self.epochs
        total = epochs * steps_per_epoch
        return epochs, total if self.steps is None else min(self.steps, total)

    def warmup(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`: the recipe's take no more than a fifth of it."""
        if self.warmup_steps is None:
            return min(recipes.RECIPES[self.model]["warmup_steps"], total_steps // 5)
        if self.warmup_steps > total_steps:
            raise ConfigError(
                f"[train] {self.warmup_steps} warm-up steps but {total_steps} steps altogether; "
                "lower --warmup-steps, or raise --epochs or --steps"
            )
        return self.warmup_steps


@_settings
class Command(Settings):
    """Settings of `odyssey train` beside those of a run."""

    batch_size: int | None = setting(
        DATA,
        None,
        "global batch size with one worker; with several it is not clear, and refused",
        "none",
        low=1,
    )
    ranks: int | None = setting(
        RANKS,
        None,
        "start so many processes, and keep the run going, as `odyssey launch -n RANKS train` does",
        "none",
        low=1,
        flags=("--ranks", "-n"),
    )
    verbose: bool = setting(
        OUTPUT, False, "print the settings and the layout as well", flags=("--verbose", "-v")
    )


# --- checks ---------------------------------------------------------------------------------------


def option(name: str, *values: Any) -> str:
    """A setting as the command line spells it: --global-batch-size, --compression topk."""
    return " ".join(["--" + name.replace("_", "-"), " or ".join(map(str, values))]).rstrip()


def keyword(name: str, *values: Any) -> str:
    """A setting as Python spells it: global_batch_size, compression='topk'."""
    return f"{name}={' or '.join(map(repr, values))}" if values else name


def check(
    kind: type, values: Mapping[str, Any], spell: Callable[..., str] = keyword
) -> dict[str, Any]:
    """The values of settings of a class, each checked alone and with the setting that it belongs
    to; pure. Raises ConfigError: a value is not allowed, or applies only to another choice.
    """
    declarations = declared(kind)
    values = {
        name: declarations[name].check(value, f"[train] {spell(name)}")
        for name, value in values.items()
    }
    for name, value in values.items():
        owner, *of = declarations[name].only or ("",)
        chosen = values.get(owner, declarations[owner].default) if owner else ""
        chosen = recipes.OWN_CLASS if owner and declarations[owner].is_own(chosen) else chosen
        if owner and value != declarations[name].default and chosen not in of:
            raise ConfigError(
                f"[train] {spell(name)} applies only to {spell(owner, *of)}, not {chosen}; "
                "remove it"
            )
    if values.get("lr_scaling", "none") != "none" and values.get("base_batch_size") is None:
        scaling = spell("lr_scaling", values["lr_scaling"])
        raise ConfigError(
            f"[train] {scaling} needs the batch size that the rate is for; give "
            f"{spell('base_batch_size')}"
        )
    return values


OF_FIT = (
    "steps",
    "checkpoint_dir",
    "checkpoint_every",
    "keep",
    "resume",
    "allow_nondeterministic_data",
    "trace",
)
#: Who takes what a trainer does not.
ELSEWHERE = {
    "fit()": "train_loader val_loader epochs max_steps callbacks verbose profile "
    "checkpoint_epochs mlflow_experiment state",
    "data.DataLoader": "dataset batch_size shuffle sampler drop_last prefetch transform "
    "num_workers pin_memory",
    "the optimizer": "lr momentum nesterov betas eps weight_decay",
    "optim.schedule()": "warmup_steps total_steps",
}


#: Arguments by the names that other libraries have for them.
FOREIGN_NAMES = {
    "learning_rate": "lr",
    "l2": "weight_decay",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "n_epochs": "epochs",
    "validation_data": "val_loader",
    "val_dataloader": "val_loader",
    "val_dataloaders": "val_loader",
    "train_dataloader": "train_loader",
    "train_dataloaders": "train_loader",
    "gradient_clip_val": "clip_norm",
    "accumulate_grad_batches": "accumulation_steps",
}


def make_settings(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """The settings of a class from keywords; ConfigError if one is unknown or not allowed."""
    for name in values:
        if name not in declared(kind):
            owners = {
                n: receiver for receiver, names in ELSEWHERE.items() for n in names.split()
            } | dict.fromkeys(OF_FIT, "fit()")
            own_name = FOREIGN_NAMES.get(name, name)
            owner = owners.get(own_name)
            hint = did_you_mean(name, declared(kind))
            if owner is not None:
                hint = f"; give {'it' if own_name == name else f'{own_name}='} to {owner}"
            raise ConfigError(f"[train] unknown setting {name!r}{hint}")
    return kind(**check(kind, values))


def explain_keywords(function: Function) -> Function:
    """Decorates a method: an unknown keyword, or an argument that needs its name, is a ConfigError
    with the name to use.

    Python's own TypeError does not know the names that other libraries have.
    """
    _, *parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    positions = len(names) - len(keyword_only)

    @functools.wraps(function)
    def call(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        is_method = function.__name__ != "__init__"
        label = f"{function.__name__}()" if is_method else type(owner).__name__
        for name in keywords:
            if name not in names:
                raise ConfigError(f"[{label}] unknown argument {name!r}{did_you_mean(name, names)}")
        if keyword_only and len(arguments) > positions:
            value = reprlib.repr(arguments[positions])
            raise ConfigError(
                f"[{label}] argument {positions + 1} is {value}; use a name, such as "
                f"{keyword_only[0]}={value}"
            )
        return function(owner, *arguments, **keywords)

    return cast(Function, call)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that is unknown."""
    names = list(names)
    if FOREIGN_NAMES.get(name) in names:
        return f"; use {FOREIGN_NAMES[name]}="
    nearest = near(name, names)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; choose from {', '.join(names)}"


def part(kind: type[Kind], of: Any, **overrides: Any) -> Kind:
    """A dataclass whose fields have the values of the settings of their names; `overrides` go
    before them.
    """
    names = declared(type(of))
    return kind(
        **{f.name: getattr(of, f.name) for f in dataclasses.fields(kind) if f.name in names}
        | overrides
    )


def settings(options: Mapping[str, Any]) -> Settings:
    """Fill what was not given (None) from the model's recipe and check every value; pure."""
    recipe = recipes.RECIPES[options["model"]]
    name = options["optimizer"] or recipe["optimizer"]
    # not those of Command
    training_options = {key: value for key, value in options.items() if key in declared(Settings)}
    model_defaults = recipes.GENERAL | recipes.MODEL_DEFAULTS.get(options["model"], {})
    chosen = {
        "optimizer": name,
        "dataset": training_options.get("dataset") or model_defaults["dataset"],
    }
    values = check(Settings, training_options | chosen, option)
    origin = recipe if name == recipe["optimizer"] else recipes.OPTIMIZERS.get(name, {})
    for key in ("lr", "momentum", "weight_decay"):
        values[key] = origin.get(key) if values[key] is None else values[key]
    values["schedule"] = values["schedule"] or recipe["schedule"]
    steps = model_defaults.pop("steps", None)
    if values["epochs"] is None and values["steps"] is None:
        values["epochs"] = recipe["epochs"] if steps is None else None
        values["steps"] = steps
    values.update((key, value) for key, value in model_defaults.items() if values[key] is None)
    run = Settings(**values)
    _check_together(run)
    return run


def _check_together(run: Settings) -> None:
    placement_options = [
        option(name, value) for name in ("dp", "pp", "tp", "zero") if (value := getattr(run, name))
    ]
    if run.layout and placement_options:
        raise ConfigError(
            f"[train] --layout {run.layout} and {placement_options[0]} are both given; leave one "
            "of them out"
        )
    if run.nesterov and run.momentum == 0:
        raise ConfigError(
            "[train] --nesterov needs momentum, but --momentum is 0; raise --momentum, or remove it"
        )
    if run.global_batch_size % run.accumulation_steps:
        raise ConfigError(
            f"[train] --global-batch-size {run.global_batch_size} / --accumulation-steps "
            f"{run.accumulation_steps} = "
            f"{run.global_batch_size / run.accumulation_steps:g}; give numbers that divide"
        )
    if (
        run.checkpoint_dir is None
        and run.run_dir is None
        and not (runs.Run.current() or os.environ.get(REPLAY))
    ):
        for name in ("checkpoint_every", "resume"):
            if getattr(run, name) != declared(Settings)[name].default:
                raise ConfigError(
                    f"[train] {option(name)} is given, but no --checkpoint-dir or --run-dir; "
                    "give one"
                )
    if (
        run.json
        and run.save_weights
        and os.path.realpath(run.json) == os.path.realpath(run.save_weights)
    ):
        raise ConfigError(f"[train] --json and --save-weights both name {run.json}; give two files")


# --- what comes from the declaration --------------------------------------------------------------


def of_checkpoint(of: Any) -> dict[str, Any]:
    """The part of a checkpoint's configuration that settings declare, as JSON values."""
    values_by_key: dict[str, list[Any]] = {}
    for name, s in declared(type(of)).items():
        if s.checkpoint:
            value = getattr(of, name)
            values_by_key.setdefault(s.checkpoint, []).append(
                float(value) if s.kind is float and value is not None else value
            )
    return {key: values[0] if len(values) == 1 else values for key, values in values_by_key.items()}


def brief(of: Any) -> str:
    """An object as one line: those arguments of its class that it keeps under their names, if
    they are short ones.
    """
    plain = (str, int, float, tuple, Path, type(None))
    arguments = (
        (name, vars(of).get(name, of)) for name in inspect.signature(type(of).__init__).parameters
    )
    short_arguments = (
        (name, str(v) if isinstance(v, Path) else v)
        for name, v in arguments
        if isinstance(v, plain)
    )
    return f"{type(of).__name__}({', '.join(f'{name}={v!r}' for name, v in short_arguments)})"


def keywords(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates an __init__ with **settings: its signature lists the settings of a class."""

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(init)
        listed_parameters = [
            p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD
        ]
        fields = dataclasses.fields(kind)
        only = inspect.Parameter.KEYWORD_ONLY
        setting_parameters = (
            inspect.Parameter(f.name, only, default=f.default, annotation=f.type) for f in fields
        )
        new_parameters = [p for p in setting_parameters if p.name not in signature.parameters]
        init.__signature__ = signature.replace(parameters=[*listed_parameters, *new_parameters])  # type: ignore[attr-defined]
        return init

    return decorate


def documentation(kind: type) -> str:
    """The settings of a class for the docstring of another, under their sections."""
    import textwrap

    lines = []
    for section in SECTIONS:
        entries = [
            f"{name}: {s.help_text(keyword)}"
            for name, s in declared(kind).items()
            if s.section == section
        ]
        lines += [f"\n    {section}:"] * bool(entries)
        lines += [
            textwrap.fill(line, 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
            for line in entries
        ]
    return "\n".join(lines).strip()
