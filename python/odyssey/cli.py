"""The command line: `odyssey train`, `odyssey verify`, and the way to the commands of odyssey/commands.

What it is: options and a configuration file become checked `Settings`; those become calls of the library; an error
becomes one line and an exit code. What it is not: a place for training logic. Anything a command does can be done from
Python with the same objects. Heavy imports stand inside the commands: `--help` and a mistyped option answer at once.

Exit codes: 0, 1 verify found a difference, 64 usage, 65 data, 69 unavailable, 70 defect, 73 output, 75 stopped on
request, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from odyssey import launcher as launchers
from odyssey import runs
from odyssey.commands import COMMANDS
from odyssey.commands import FILE as _FILE
from odyssey.commands import HELP as _HELP
from odyssey.configfile import read_config
from odyssey.errors import LINE, CollectiveError, ConfigError, OdysseyError, OutputError, printable
from odyssey.placement import SCHEDULES as PIPELINES
from odyssey.recipes import COMPRESSIONS, DATASETS, LR_SCALINGS, NONFINITE, OPTIMIZERS, RECIPES, REDUCTIONS, SCHEDULES

DIFFERENT, USAGE, DEFECT, INTERRUPTED, BROKEN_PIPE = 1, 64, 70, 130, 141
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

_world: Any = None  # the communicator once there is one: an error must then end the other ranks as well


# -- settings: what was asked for, complete and checked ---------------------------------------------------------------


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
            raise ConfigError(f"[train] {_option(name)} is {value}; 1 or more is allowed")
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
                f"[train] {_option(name)} is given, but --precision {made.precision} scales no loss; "
                "leave it out, or use --precision fp16"
            )
    if made.warmup_steps is not None and made.warmup_steps < 0:
        raise ConfigError(f"[train] --warmup-steps is {made.warmup_steps}; 0 or more is allowed")
    for name in ("clip_norm", "bucket_size_mb"):
        value = getattr(made, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"[train] {_option(name)} is {value}; a finite number above 0 is allowed")
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
                raise ConfigError(f"[train] {_option(name)} is given, but no --checkpoint-dir or --run-dir; give one")
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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


# -- the configuration file -------------------------------------------------------------------------------------------


def _load_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = read_config(path, context.command.params)


# -- files that a run leaves ------------------------------------------------------------------------------------------


def check_output(path: Path, option: str) -> None:
    """OutputError now if the file could not be written after hours of training."""
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise OutputError(f"[output] {option} {path} is a directory; name a file in it")
        if not target.parent.is_dir():
            raise OutputError(f"[output] {option} {path}: {target.parent} is not a directory; create it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise OutputError(f"[output] {option} {path} is there and write-protected; name another file")
        if target.exists() and not target.is_file():
            return  # a pipe or a device: written in place
        aside = _aside(target)
        with open(aside, "xb"):
            pass
        aside.unlink()
    except OSError as problem:
        raise OutputError(f"[output] {option} {path} cannot be written: {problem.strerror}") from problem


def write_output(path: Path, option: str, write: Callable[[Path], None]) -> None:
    """Let `write` make the file aside, then rename it: the file is there whole or not at all."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            write(target)
            return
        aside = _aside(target)
        try:
            write(aside)
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as problem:
        raise OutputError(f"[output] {option} {path} cannot be written: {problem.strerror or problem}") from problem


def _aside(target: Path) -> Path:
    return target.with_name(f".odyssey-{os.getpid()}{target.suffix[:20]}")


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def version() -> str:
    """The installed version."""
    from importlib import metadata

    try:
        return metadata.version("odyssey")
    except metadata.PackageNotFoundError:
        return "unknown"


# -- a training run ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _on_all_ranks(kind: type[OdysseyError] = OdysseyError) -> Iterator[None]:
    """Errors of this kind come from here on every rank alike, so one rank prints them."""
    try:
        yield
    except kind as error:
        error.everywhere = True  # type: ignore[attr-defined]
        raise


def run(made: Settings) -> None:
    """Train as the settings say: print one summary line and write the files that were asked for."""
    global _world
    if made.watchdog is not None:
        os.environ["ODYSSEY_WATCHDOG"] = f"{made.watchdog:g}"
    again = os.environ.get(REPLAY)
    if made.run_dir is not None and not again:
        os.environ[runs.RUN_DIR] = os.path.realpath(made.run_dir)
    from odyssey import comm, launcher, preflight, verify
    from odyssey.parallel.mesh import Mesh

    preflight.before_mpi(launcher.launched())
    _world = world = comm.world(backend="auto")
    first = world.rank == 0
    with _on_all_ranks():
        threads = made.threads or max(1, comm.base.cores() // world.local_size)
        warnings = preflight.at_start(world, dataclasses.asdict(made), threads=threads)
        mesh = Mesh(made.dp, made.pp, made.tp)
        if verify.Trace.current() is None and not again:  # else the layout is not that of the options
            mesh = mesh.fit(world.size)
            shared = 1 if made.reduction == "async_parameter_server" else mesh.dp  # ranks that share out a batch
            check_workers(made, (made.num_gpus or 1) * shared)
    if first:
        for path, option in ((made.save_weights, "--save-weights"), (made.json, "--json")):
            if path is not None:
                check_output(path, option)
        if made.run_dir is not None and not again:
            words = sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv[1:]
            runs.begin(runs.Run.current(), [sys.executable, "-m", "odyssey.train", *words])

    from odyssey import data, nn, optim
    from odyssey.progress import make
    from odyssey.trainer import DistributedTrainer, write_weights

    train_set = data.load(made.dataset, train=True, data_dir=made.data_dir)
    micro = made.global_batch_size // made.accumulation_steps
    loader = data.DataLoader(train_set, batch_size=micro, shuffle=True, seed=made.seed)
    validation = None
    if made.evaluate:
        test_set = data.load(made.dataset, train=False, data_dir=made.data_dir)
        validation = data.DataLoader(test_set, batch_size=1024)
    with _on_all_ranks():
        epochs, total = made.length(-(-len(loader) // made.accumulation_steps))
        schedule = optim.schedule(made.schedule, total_steps=total, warmup_steps=made.warmup(total))
        model = nn.models.build(
            made.model, sample_shape=train_set.sample_shape, classes=train_set.classes, seed=made.seed
        )
        if made.optimizer == "sgd":
            optimizer = optim.SGD(
                lr=made.lr, momentum=made.momentum, nesterov=made.nesterov, weight_decay=made.weight_decay
            )
        else:
            kind = optim.Adam if made.optimizer == "adam" else optim.AdamW
            optimizer = kind(lr=made.lr, weight_decay=made.weight_decay)
    scaler = {k: getattr(made, k) for k in ("scaler_init_scale", "scaler_growth_interval")}
    progress = make(not made.progress, sys.stderr) if first else None
    with _on_all_ranks(ConfigError):
        trainer = DistributedTrainer(
            model=model,
            optimizer=optimizer,
            num_gpus=made.num_gpus,
            device=made.device,
            oversubscribe=made.oversubscribe,
            backend="auto",
            comm=world,
            shard_size=made.shard_size,
            threads=made.threads,
            **{name: getattr(made, name) for name in STRATEGY},
            execution=made.execution,
            mesh=mesh,
            zero=made.zero,
            pipeline_schedule=made.pipeline_schedule,
            bucket_size_mb=made.bucket_size_mb,
            overlap=made.overlap,
            accumulation_steps=made.accumulation_steps,
            clip_norm=made.clip_norm,
            nonfinite=made.nonfinite,
            check_every=made.check_every,
            seed=made.seed,
            schedule=schedule,
            precision=made.precision,
            progress=progress,
            **{k: v for k, v in scaler.items() if v is not None},
        )
    if first and world.size > 1 and made.progress:
        for warning in warnings:
            print(f"odyssey: {warning}", file=sys.stderr)
        print(f"odyssey: {world.size} ranks as {trainer.mesh}; {world.why}", file=sys.stderr, flush=True)
    if first and trainer.notice:
        print(f"odyssey: {trainer.notice}", file=sys.stderr, flush=True)
    try:
        history = trainer.fit(
            loader,
            validation,
            epochs=epochs,
            steps=made.steps,
            checkpoint_dir=made.checkpoint_dir,
            checkpoint_every=made.checkpoint_every,
            keep=made.keep,
            resume=made.resume,
        )
    finally:
        if progress is not None:
            progress.end()
    weights = trainer.weights_sha256()
    state = None if made.save_weights is None else trainer.state_dict()  # ranks may have parts: all take part
    if first:
        if state is not None:
            write_output(made.save_weights, "--save-weights", lambda path: write_weights(path, state))
        if made.json is not None:
            text = json.dumps(_report(made, world, trainer, history, weights), indent=1, allow_nan=False) + "\n"
            write_output(made.json, "--json", lambda path: _write_text(path, text))
        print(summary(history, weights), flush=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _report(made: Settings, world: Any, trainer: Any, history: Any, weights: str) -> dict[str, Any]:
    """What `--json` writes."""
    return _finite(
        {
            "test_accuracy": history.test_accuracy if made.evaluate else None,
            "test_loss": history.test_loss if made.evaluate else None,
            "train_loss": history.train_loss,
            "steps": history.steps,
            "epochs": len(history.records),
            "samples_per_second": history.samples_per_second,
            "seconds": history.seconds,
            "world_size": world.size,
            "workers": trainer.workers,
            "threads": trainer.threads,
            "weights_sha256": weights,
            "model": made.model,
            "dataset": made.dataset,
            "global_batch_size": made.global_batch_size,
            "shard_size": made.shard_size,
            "seed": made.seed,
            "device": trainer.device,
            **{name: getattr(made, name) for name in STRATEGY},
            "bytes_per_step": history.bytes_per_step,
            "bytes_per_step_uncompressed": history.bytes_per_step_uncompressed,
            "execution": made.execution,
            "mesh": {"dp": trainer.mesh.dp, "pp": trainer.mesh.pp, "tp": trainer.mesh.tp},
            "zero": made.zero,
            "accumulation_steps": made.accumulation_steps,
            "clip_norm": made.clip_norm,
            "memory_bytes": trainer.memory(),
            "precision": made.precision,
            "loss_scale": trainer.scaler.value,
            "skipped_steps": trainer.scaler.skipped,
            "optimizer": made.optimizer,
            "lr": made.lr,
            "momentum": made.momentum,
            "nesterov": made.nesterov,
            "weight_decay": made.weight_decay,
            "schedule": made.schedule,
            "version": version(),
            "history": history.records,
        }
    )


def summary(history: Any, weights: str) -> str:
    """The last line of a run."""
    from odyssey.progress import traffic

    parts = [f"train loss {history.train_loss:.4f}", f"{history.steps} steps"]
    if history.test_accuracy is not None:
        parts.insert(0, f"test accuracy {100 * history.test_accuracy:.2f} %")
    parts += traffic(history.bytes_per_step, history.bytes_per_step_uncompressed)
    parts += [f"{history.samples_per_second:,.0f} samples/s", f"{history.seconds:.1f} s", f"weights {weights[:16]}"]
    return "  ".join(parts)


# -- commands ---------------------------------------------------------------------------------------------------------


def _recipes(key: str) -> str:
    """The default of a recipe's value, for help texts."""
    values = {model: recipe[key] for model, recipe in RECIPES.items()}
    if len(set(values.values())) == 1:
        return f"default: {next(iter(values.values()))}"
    return "default: " + ", ".join(
        f"{value:g} {model}" if isinstance(value, (int, float)) else f"{value} {model}"
        for model, value in values.items()
    )


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"odyssey {version()}")
        context.exit()


class _Commands(click.Group):
    """Finds the commands of odyssey/commands when they are asked for: each is `command` of a module of its own."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *COMMANDS})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            return importlib.import_module(f"odyssey.commands.{name}").command
        return super().get_command(context, name)


@click.group(cls=_Commands, context_settings=_HELP, invoke_without_command=True)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@click.pass_context
def group(context: click.Context) -> None:
    """Train neural nets: Mojo kernels, Python, MPI. The same bits on any number of workers."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@group.command("train", context_settings=_HELP)
@click.option(
    "--config",
    type=_FILE,
    is_eager=True,
    expose_value=False,
    callback=_load_config,
    metavar="FILE.toml",
    help="Read options from a TOML file; the command line goes before it. (default: none)",
)
@click.option("--model", type=click.Choice(list(RECIPES)), default="lenet5", help="The network. (default: lenet5)")
@click.option("--dataset", type=click.Choice(DATASETS), default="mnist", help="The data set. (default: mnist)")
@click.option(
    "--data-dir",
    type=_FILE,
    metavar="DIR",
    help="Where the data set's files are. (default: the MNIST that comes with odyssey)",
)
@click.option("--epochs", type=int, help=f"Passes over the training set. ({_recipes('epochs')})")
@click.option("--steps", type=int, help="Stop after so many optimizer steps. (default: at the end of the last epoch)")
@click.option(
    "--global-batch-size", type=int, default=128, help="Samples per optimizer step, over all workers. (default: 128)"
)
@click.option(
    "--shard-size", type=int, default=32, help="Samples per shard; a worker has one shard or more. (default: 32)"
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help=f"({_recipes('optimizer')})")
@click.option("--lr", type=float, help=f"Peak learning rate. ({_recipes('lr')})")
@click.option(
    "--lr-scaling",
    type=click.Choice(LR_SCALINGS),
    default="none",
    help="Multiply the rate by the batch size over --base-batch-size, or by its root. (default: none)",
)
@click.option("--base-batch-size", type=int, help="The batch size that --lr is for. (default: none)")
@click.option("--momentum", type=float, help=f"Momentum of sgd. (default: {OPTIMIZERS['sgd']['momentum']})")
@click.option("--nesterov", is_flag=True, help="Nesterov momentum with sgd. (default: off)")
@click.option("--weight-decay", type=float, help=f"({_recipes('weight_decay')}; 0.01 with adamw)")
@click.option("--schedule", type=click.Choice(SCHEDULES), help=f"Learning rate over time. ({_recipes('schedule')})")
@click.option(
    "--warmup-steps",
    type=int,
    help=f"Steps in which the learning rate rises. ({_recipes('warmup_steps')}, at most a fifth of the run)",
)
@click.option("--seed", type=int, default=0, help="Of the weights, the data order and dropout. (default: 0)")
@click.option(
    "--num-gpus",
    "-n",
    type=int,
    help="Workers of this process (of each, under mpirun): GPUs, or CPU workers where there is none. (default: one)",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    help="What the workers are; auto: GPUs if --num-gpus is given and the machine has some. (default: auto)",
)
@click.option("--oversubscribe", is_flag=True, help="Several workers may share a GPU. (default: no)")
@click.option(
    "--threads",
    type=int,
    help="CPU threads of a process. (default: the cores, divided by the processes on this machine)",
)
@click.option(
    "--reduction",
    type=click.Choice(REDUCTIONS),
    default="tree",
    help="How gradients are summed; tree, hierarchical and parameter_server give the same bits on any number of "
    "workers. (default: tree)",
)
@click.option("--servers", type=int, default=1, help="Ranks that add, of a parameter server. (default: 1)")
@click.option(
    "--staleness",
    type=int,
    default=4,
    help="Steps that a worker of async_parameter_server may be ahead before it waits. (default: 4)",
)
@click.option("--local-steps", type=int, default=8, help="Steps of local_sgd between two averages. (default: 8)")
@click.option(
    "--ranks-per-node",
    type=int,
    help="Neighbouring ranks that count as a node, with --reduction hierarchical. (default: those on one machine)",
)
@click.option(
    "--compression",
    type=click.Choice(COMPRESSIONS),
    help="What gradients are sent as: 16-bit floats, the largest only, or products of rank r. (default: whole)",
)
@click.option("--compression-ratio", type=float, default=0.01, help="Share that topk sends. (default: 0.01)")
@click.option(
    "--compression-warmup-steps",
    type=int,
    default=0,
    help="Steps in which the share that topk sends falls from a quarter to that. (default: 0)",
)
@click.option("--powersgd-rank", type=int, default=2, help="The r of powersgd. (default: 2)")
@click.option(
    "--execution",
    type=click.Choice(["replay", "eager"]),
    default="replay",
    help="Replay a recorded step, or call each kernel from Python; the same bits. (default: replay)",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16", "fp16"]),
    default="fp32",
    help="What the operands of products are rounded to; tf32 on GPUs only, fp16 scales the loss. (default: fp32)",
)
@click.option("--scaler-init-scale", type=float, help="First loss scale with fp16, a power of two. (default: 65536)")
@click.option(
    "--scaler-growth-interval",
    type=int,
    help="Steps without an overflow after which the loss scale doubles, with fp16. (default: 2000)",
)
@click.option("--dp", type=int, help="Replicas of the model. (default: as many as the other two leave ranks for)")
@click.option("--pp", type=int, help="Pipeline stages, each on a rank of its own. (default: 1)")
@click.option("--tp", type=int, help="Ranks that share each layer, 1 to 4. (default: 1)")
@click.option(
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    help="What replicas keep in parts: 1 optimizer state, 2 gradients as well, 3 parameters as well. (default: 0)",
)
@click.option(
    "--pipeline-schedule",
    type=click.Choice(PIPELINES),
    help="Order of the micro-batches of a pipeline. (default: 1f1b)",
)
@click.option(
    "--bucket-size-mb",
    type=float,
    help="Gradients are reduced in buckets of this size during the backward pass. "
    "(default: 25, with --zero 2 and 3 at most a 32nd of the model)",
)
@click.option("--overlap/--no-overlap", default=True, help="Reduce buckets while going on. (default: --overlap)")
@click.option(
    "--accumulation-steps",
    type=int,
    default=1,
    help="Cut a global batch into so many batches of the loader; one update. (default: 1)",
)
@click.option("--clip-norm", type=float, help="Largest global norm of the gradients. (default: not clipped)")
@click.option(
    "--nonfinite",
    type=click.Choice(NONFINITE),
    default="stop",
    help="At a NaN or infinity: end, skip the step, or go back to the last checkpoint and leave the batch out. "
    "(default: stop)",
)
@click.option(
    "--check-every",
    type=click.IntRange(0),
    default=100,
    help="Steps from one comparison of the replicas' weights to the next; 0: never. (default: 100)",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Start so many processes, and keep the run going, as `odyssey launch -n RANKS train` does. (default: none)",
)
@click.option(
    "--run-dir",
    type=_FILE,
    metavar="DIR",
    help="Keep what a run leaves here: checkpoints, a log of its steps, stacks. (default: none, or that of odyssey "
    "launch)",
)
@click.option(
    "--checkpoint-dir",
    type=_FILE,
    metavar="DIR",
    help="Write checkpoints here, and go on from the newest. (default: none, or those of --run-dir)",
)
@click.option(
    "--checkpoint-every", type=int, help="Steps from one checkpoint to the next. (default: at the end of each epoch)"
)
@click.option("--keep", type=int, default=2, help="How many checkpoints stay, at least 2. (default: 2)")
@click.option(
    "--resume",
    default="auto",
    metavar="auto|never|PATH",
    help="Go on from the newest valid checkpoint, refuse if there is one, or go on from that at PATH. (default: auto)",
)
@click.option(
    "--watchdog",
    type=float,
    help="Seconds without progress after which a run says who is missing where, and ends; 0: never. (default: 60)",
)
@click.option("--eval/--no-eval", "evaluate", default=True, help="Test after each epoch. (default: --eval)")
@click.option(
    "--save-weights",
    type=_FILE,
    metavar="FILE.safetensors",
    help="Write the weights at the end. (default: not written)",
)
@click.option("--json", type=_FILE, metavar="FILE", help="Write the results at the end. (default: not written)")
@click.option("--no-progress", is_flag=True, help="Print the summary line only. (default: progress is shown)")
def train(no_progress: bool, ranks: int | None, **given: Any) -> None:
    """Train a network and print one line of results.

    Under mpirun or srun every process is a worker: mpirun -n 4 odyssey train
    """
    with _on_all_ranks():
        made = settings({**given, "progress": not no_progress})
        if ranks is not None and launchers.launched() is not None:
            raise ConfigError(
                f"[train] --ranks {ranks} is given, but the ranks were started already; leave out --ranks, or mpirun"
            )
    if ranks is None:
        run(made)
        return
    from odyssey.launch import DistributedLauncher, LaunchConfig

    config = LaunchConfig(nproc_per_node=ranks, run_dir=made.run_dir, max_restarts=3, watchdog=made.watchdog)
    words = without(sys.argv[1:], {"--ranks": 1, "--run-dir": 1, "--watchdog": 1})
    sys.exit(DistributedLauncher(config).launch("train", *(words[1:] if words[:1] == ["train"] else words)))


def without(words: Sequence[str], options: dict[str, int]) -> list[str]:
    """Words of a command line without some options, given as "--option value" or "--option=value"."""
    left, skip = [], 0
    for word in words:
        if skip:
            skip -= 1
        elif word in options:
            skip = options[word]
        elif word.split("=")[0] not in options:
            left.append(word)
    return left


@group.command("verify", context_settings={**_HELP, "ignore_unknown_options": True})
@click.option(
    "--layouts",
    "-l",
    multiple=True,
    required=True,
    metavar="LAYOUT",
    help='What to compare, e.g. "dp=4" "pp=2,dp=2,schedule=gpipe" "tp=2" "dp=2,zero=3"; several may follow one option.',
)
@click.option("--steps", type=int, default=5, help="Optimizer steps to compare. (default: 5)")
@click.option("--script", type=_FILE, help="A script that uses DistributedTrainer, instead of odyssey train.")
@click.option(
    "--launcher", metavar="WORDS", help="What starts ranks. (default: 'mpirun -n {ranks}', that of this environment)"
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the results. (default: not written)")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def verify_command(
    layouts: tuple[str, ...],
    steps: int,
    script: Path | None,
    launcher: str | None,
    json_file: Path | None,
    rest: tuple[str, ...],
) -> None:
    """Train on one process and on each layout, and compare every bit after every step.

    Options that are not listed here are those of `odyssey train` (--model, --global-batch-size, ...), or the script's.
    Ends with 0 if all layouts gave the same bits, with 1 if one did not.
    """
    from odyssey.verify import Verifier

    found = launchers.launched()
    if found is not None and found.size > 1:
        with _on_all_ranks():
            raise ConfigError("[verify] it starts the ranks of each layout itself; run it without mpirun or srun")
    layouts, rest = _layouts(layouts, rest)
    if steps < 1:
        raise ConfigError(f"[verify] --steps is {steps}; 1 or more is allowed")
    if json_file is not None:
        check_output(json_file, "--json")
    command = [sys.executable, *(["-m", "odyssey.train", "--no-progress"] if script is None else [str(script)]), *rest]
    width = max(len(text) for text in layouts)
    results = Verifier(command, steps, launcher)(
        layouts,
        lambda result: click.echo(
            f"{result.layout:{width}}  {result.ranks} rank{'s' if result.ranks > 1 else ' '}  {result}"
        ),
    )
    same = sum(result.same for result in results)
    click.echo(f"{same} of {len(results)} layouts give the bits of one process")
    if json_file is not None:
        text = json.dumps(_finite({"command": command[1:], "results": [r.json() for r in results]}), indent=1) + "\n"
        write_output(json_file, "--json", lambda path: _write_text(path, text))
    if same < len(results):
        sys.exit(DIFFERENT)


def _layouts(given: tuple[str, ...], rest: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layouts that follow the option's first one without repeating it are among the arguments: "key=value" words."""
    from odyssey.verify import KEYS

    more = tuple(word for word in rest if word.split("=")[0] in KEYS and "=" in word)
    return given + more, tuple(word for word in rest if word not in more)


# -- the way out ------------------------------------------------------------------------------------------------------


def main(
    arguments: Sequence[str] | None = None, prog_name: str = "odyssey", command: click.Command = group
) -> NoReturn:
    """Run a command and end the process with its exit code."""
    sys.exit(_run_command(command, arguments, prog_name))


def _run_command(command: click.Command, arguments: Sequence[str] | None, prog_name: str) -> int:
    try:
        code = command.main(arguments, prog_name=prog_name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except OdysseyError as error:
        line = printable(f"error: {error}", keep="\n\t" if error.lines else "", limit=LINE)
        everywhere = getattr(error, "everywhere", False)
        return _end(error.exit_code, line, everywhere=everywhere, late=isinstance(error, CollectiveError))
    except click.ClickException as error:
        text = printable(" ".join(error.format_message().split()).rstrip("."), limit=LINE)
        context = getattr(error, "ctx", None)
        name = context.command_path if context else prog_name
        return _end(USAGE, f"error: {text} (see `{name} --help`)", everywhere=True)
    except (click.Abort, KeyboardInterrupt):
        return _end(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail again
        return _end(BROKEN_PIPE, None)
    except Exception as error:
        import traceback

        text = printable(traceback.format_exc(), keep="\n\t")
        return _end(DEFECT, printable(f"defect: {type(error).__name__}: {error}", limit=LINE), text=text)


def _end(code: int, line: str | None, *, text: str = "", everywhere: bool = False, late: bool = False) -> int:
    """Says what happened and takes the other ranks along, which may be waiting for this one: watch/entry.py."""
    if "odyssey.session" in sys.modules:
        sys.modules["odyssey.session"].incomplete()
    from odyssey.watch import entry

    return entry.end(code, line, text=text, everywhere=everywhere, late=late and not everywhere, world=_world)


if __name__ == "__main__":
    main()
