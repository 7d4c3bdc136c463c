"""`odyssey train`: its options, and a run of training as they say.

What it is not: a place for training logic. Anything that is done here can be done from Python with the same objects.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from odyssey import launcher as launchers
from odyssey import outputs, runs
from odyssey.commands import FILE, HELP, on_all_ranks, version
from odyssey.configfile import read_config
from odyssey.errors import ConfigError
from odyssey.placement import SCHEDULES as PIPELINES
from odyssey.recipes import COMPRESSIONS, DATASETS, LR_SCALINGS, NONFINITE, OPTIMIZERS, RECIPES, REDUCTIONS, SCHEDULES
from odyssey.settings import REPLAY, STRATEGY, Settings, check_workers, settings


def _load_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = read_config(path, context.command.params)
        if runs.ATTEMPT in os.environ:  # what is the launcher's it has read already, here or on its command line
            for name in ("ranks", "run_dir"):
                context.default_map.pop(name, None)


def _recipes(key: str) -> str:
    """The default of a recipe's value, for help texts."""
    values = {model: recipe[key] for model, recipe in RECIPES.items()}
    if len(set(values.values())) == 1:
        return f"default: {next(iter(values.values()))}"
    return "default: " + ", ".join(
        f"{value:g} {model}" if isinstance(value, (int, float)) else f"{value} {model}"
        for model, value in values.items()
    )


#: Headings of the help text, and the options under each by their names in Python.
SECTIONS = {
    "What is trained": "config model dataset data_dir epochs steps global_batch_size shard_size seed precision "
    "scaler_init_scale scaler_growth_interval",
    "The update": "optimizer lr lr_scaling base_batch_size momentum nesterov weight_decay schedule warmup_steps "
    "clip_norm accumulation_steps",
    "This process": "num_gpus device oversubscribe threads execution",
    "Ranks, and how they share the work": "ranks dp pp tp zero pipeline_schedule reduction servers staleness "
    "local_steps ranks_per_node compression compression_ratio compression_warmup_steps powersgd_rank bucket_size_mb "
    "overlap",
    "Checkpoints and failures": "run_dir checkpoint_dir checkpoint_every keep resume nonfinite check_every watchdog",
    "What comes out": "evaluate save_weights json no_progress",
}


class _Sectioned(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        rows = {heading: [options.pop(name) for name in names.split()] for heading, names in SECTIONS.items()}
        rows["Other"] = list(options.values())
        for heading, found in rows.items():
            with formatter.section(heading):
                formatter.write_dl([row for row in found if row])


@click.command("train", cls=_Sectioned, short_help="Train a network.", context_settings=HELP)
@click.option(
    "--config",
    type=FILE,
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
    type=FILE,
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
    type=FILE,
    metavar="DIR",
    help="Keep what a run leaves here: checkpoints, a log of its steps, stacks. (default: none, or that of odyssey "
    "launch)",
)
@click.option(
    "--checkpoint-dir",
    type=FILE,
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
    type=FILE,
    metavar="FILE.safetensors",
    help="Write the weights at the end. (default: not written)",
)
@click.option("--json", type=FILE, metavar="FILE", help="Write the results at the end. (default: not written)")
@click.option("--no-progress", is_flag=True, help="Print the summary line only. (default: progress is shown)")
def command(no_progress: bool, ranks: int | None, **given: Any) -> None:
    """Train a network and print one line of results.

    Under mpirun or srun the processes train together: mpirun -n 4 odyssey train. To start them, and to start them again
    when something fails: odyssey launch -n 4 train
    """
    with on_all_ranks():
        made = settings({**given, "progress": not no_progress})
        if ranks is not None and launchers.launched() is not None:
            raise ConfigError(
                f"[train] --ranks {ranks} is given, but the ranks were started already; leave out --ranks, or mpirun"
            )
    if ranks is None:
        run(made)
        return
    from odyssey.launch import DistributedLauncher, LaunchConfig

    gc.enable()
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


# --- the run ---------------------------------------------------------------------------------------------------------


def run(made: Settings) -> None:
    """Train as the settings say: print one summary line and write the files that were asked for."""
    if made.watchdog is not None:
        os.environ["ODYSSEY_WATCHDOG"] = f"{made.watchdog:g}"
    again = os.environ.get(REPLAY)
    if made.run_dir is not None and not again:
        os.environ[runs.RUN_DIR] = os.path.realpath(made.run_dir)
    from odyssey import comm, launcher, preflight, verify
    from odyssey.parallel.mesh import Mesh

    preflight.before_mpi(launcher.launched())
    world = comm.world(backend="auto")
    first = world.rank == 0
    with on_all_ranks():
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
                outputs.check(path, option)
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
    with on_all_ranks():
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
    with on_all_ranks(ConfigError):
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
    if first and made.progress:
        for warning in warnings:
            print(f"odyssey: {warning}", file=sys.stderr, flush=True)
    if first and world.size > 1 and made.progress:
        print(f"odyssey: {world.size} ranks as {trainer.mesh}; {world.why}", file=sys.stderr, flush=True)
    if first and trainer.notice:
        print(f"odyssey: {trainer.notice}", file=sys.stderr, flush=True)
    gc.freeze()
    gc.enable()  # train.py has turned it off
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
            outputs.write(made.save_weights, "--save-weights", lambda path: write_weights(path, state))
        if made.json is not None:
            outputs.write_json(made.json, "--json", _report(made, world, trainer, history, weights))
        outputs.say(summary(history, weights))


def _report(made: Settings, world: Any, trainer: Any, history: Any, weights: str) -> dict[str, Any]:
    """What `--json` writes."""
    return {
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


def summary(history: Any, weights: str) -> str:
    """The last line of a run."""
    from odyssey.progress import traffic

    parts = [f"train loss {history.train_loss:.4f}", f"{history.steps} steps"]
    if history.test_accuracy is not None:
        parts.insert(0, f"test accuracy {100 * history.test_accuracy:.2f} %")
    parts += traffic(history.bytes_per_step, history.bytes_per_step_uncompressed)
    parts += [f"{history.samples_per_second:,.0f} samples/s", f"{history.seconds:.1f} s", f"weights {weights[:16]}"]
    return "  ".join(parts)
