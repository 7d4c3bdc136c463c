"""`odyssey train`: its options, and a run of training as they say. Anything that is done here can be done from
Python with the same objects."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from odyssey import __version__
from odyssey.errors import ConfigError

from ...base import launcher as launchers
from ...base import outputs, registry, runs, userfile
from ...settings import declarations as core
from ...settings.declarations import OF_FIT, SECTIONS, Command, Setting, Settings, Training, declared, option
from ...settings.recipes import GPT_BETAS, GPT_DROPOUT
from ..configfile import read_config
from . import FILE, HELP, DataSet, OrOwn, on_all_ranks


def _load_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = read_config(path, context.command.params)
        if runs.ATTEMPT in os.environ:  # what is the launcher's it has read already, here or on its command line
            for name in ("ranks", "run_dir"):
                context.default_map.pop(name, None)


def _option(s: Setting) -> click.Option:
    choice = DataSet if s.name == "dataset" else OrOwn if s.own else click.Choice
    kind = choice(s.choices) if s.choices else FILE if s.kind is Path else s.kind
    files = ("FILE", "DIR")[s.name.endswith("_dir")] if s.kind is Path else None
    more: dict[str, Any] = {"is_flag": True} if s.kind is bool else {"type": kind, "metavar": s.metavar or files}
    return click.Option([s.name, *(s.flags or (option(s.name),))], default=s.default, help=s.help_text(option), **more)


CONFIG = click.Option(
    ["--config"],
    type=FILE,
    is_eager=True,
    expose_value=False,
    callback=_load_config,
    metavar="FILE.toml",
    help="Read options from a TOML file; the command line goes before it. (default: none)",
)


class _Sectioned(click.Command):
    """A command whose help lists its options under headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from .. import foreign_options

        if foreign_options.asked(args):
            foreign_options.command.main(args, prog_name=ctx.command_path, standalone_mode=False)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        of = {"config": core.DATA, **{name: s.section for name, s in declared(Command).items()}}
        for section in (*SECTIONS, "Other"):
            options = [o for o in self.get_params(ctx) if of.get(str(o.name), "Other") == section]
            with formatter.section(section):
                formatter.write_dl([row for row in (o.get_help_record(ctx) for o in options) if row])


@click.pass_context
def _command(context: click.Context, verbose: bool, ranks: int | None, **_: Any) -> None:
    """Train a network and print one line of results.

    Under mpirun or srun the processes train together: mpirun -n 4 odyssey train. To start them, and to start them again
    when something fails: odyssey launch -n 4 train
    """
    with on_all_ranks():
        made = settings_of(context)
    if ranks is None:
        words = sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv[1:]
        run(made, verbose=verbose, words=words)
        return
    from odyssey.launch import DistributedLauncher, LaunchConfig

    gc.enable()
    config = LaunchConfig(nproc_per_node=ranks, run_dir=made.run_dir, max_restarts=3, watchdog=made.watchdog)
    words = without(sys.argv[1:], {"--ranks": 1, "--run-dir": 1, "--watchdog": 1})
    sys.exit(DistributedLauncher(config).launch("train", *(words[1:] if words[:1] == ["train"] else words)))


command = _Sectioned(
    "train",
    callback=_command,
    params=[CONFIG, *(_option(s) for s in declared(Command).values() if s.option)],
    help=_command.__doc__,
    short_help="Train a network.",
    context_settings=HELP,
)


def settings_of(context: click.Context) -> Settings:
    """Returns what the command line of `context` asks for. Raises ConfigError."""
    given = dict(context.params)
    verbose, batch_size, ranks = (given.pop(name) for name in ("verbose", "batch_size", "ranks"))
    if given["no_progress"] and verbose:
        raise ConfigError("[train] --quiet and --verbose are both given; leave one out")
    given["dataset"], given["data_dir"] = DataSet.parted("train", given["dataset"], given["data_dir"])
    core.check(Command, {"batch_size": batch_size, "ranks": ranks}, option)
    if batch_size is not None:
        given["global_batch_size"] = _one_batch_size(context, batch_size, ranks, given["num_gpus"])
    made = core.settings(given)
    if ranks is not None and launchers.launched() is not None:
        raise ConfigError(f"[train] --ranks {ranks} is given, but the ranks were started already; leave one out")
    return made


def _one_batch_size(context: click.Context, size: int, ranks: int | None, workers: int | None) -> int:
    """--batch-size as the global one, if it can mean nothing else."""
    if context.get_parameter_source("global_batch_size") not in (None, click.core.ParameterSource.DEFAULT):
        raise ConfigError("[train] --batch-size and --global-batch-size are both given; leave out --batch-size")
    started = launchers.launched()
    count = (ranks or (started.size if started else 1)) * (workers or 1)
    if count > 1:
        raise ConfigError(
            f"[train] --batch-size {size} on {count} workers is not clear; give --global-batch-size {count * size} "
            f"({size} samples on each) or --global-batch-size {size} (over all of them)"
        )
    return size


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


def run(  # noqa: C901, PLR0915
    made: Settings,
    *,
    verbose: bool = False,
    listeners: Sequence[Any] = (),
    quiet: bool = False,
    words: Sequence[str] | None = None,
) -> Any:
    """Train as the settings say: print one summary line, unless `quiet`, and write the files that were asked for.
    listeners: callbacks of fit(), whose history is returned. words: of the command line that the settings are of."""
    if made.watchdog is not None:
        os.environ["ODYSSEY_WATCHDOG"] = f"{made.watchdog:g}"
    again = os.environ.get(core.REPLAY)
    if made.run_dir is not None and not again:
        os.environ[runs.RUN_DIR] = os.path.realpath(made.run_dir)
    from ...base import limits

    limits.before_mpi(launchers.launched())  # also before NumPy, which needs memory as well
    from odyssey.comm.cores import default_threads
    from odyssey.parallel.mesh import Mesh

    from ... import comm
    from ...train import preflight

    world = comm.world(backend="auto")
    first = world.rank == 0
    joined = any(map(os.environ.get, registry.provided("joining")))  # then the layout is not that of the options
    if made.layout and not joined:
        made = _planned(made, world, words)
    with on_all_ranks():
        threads = made.threads or default_threads(world.local_size)
        warnings = preflight.at_start(world, dataclasses.asdict(made), threads=threads)
        mesh = Mesh(made.dp, made.pp, made.tp)
        if not joined:
            mesh = mesh.fit(world.size)
    if first:
        for path, name in ((made.save_weights, "--save-weights"), (made.json, "--json")):
            if path is not None:
                outputs.check(path, name)
        if made.run_dir is not None and not again:
            runs.begin(runs.Run.current(), [sys.executable, "-m", "odyssey.train", *(words or ())])

    from odyssey import data, loggers, nn, optim

    from ...core.offload import offload
    from ...data.tables import notes
    from ...train.progress import make
    from ...train.trainer import DistributedTrainer, write_weights

    own = {"size": made.image_size, "target": made.target, "length": made.sequence_length}
    table = {"normalize": made.normalize, "drop_columns": made.drop_columns, "fill": made.fill}
    train_set = data.opened(made.dataset, made.data_dir, train=True, **own, **table)
    warnings = [*warnings, *notes(train_set)]
    micro = made.global_batch_size // made.accumulation_steps
    workers = {"num_workers": made.num_workers}
    loader = data.DataLoader(train_set, batch_size=micro, shuffle=True, seed=made.seed, **workers)
    validation = None
    if made.evaluate:
        like = getattr(train_set, "columns", None)  # of a table: what was learnt of it
        test_set = data.opened(made.dataset, made.data_dir, train=False, like=like, **own)
        validation = data.DataLoader(test_set, batch_size=1024, **workers)
    with on_all_ranks():
        epochs, total = made.length(-(-len(loader) // made.accumulation_steps))
        schedule = optim.schedule(made.schedule, total_steps=total, warmup_steps=made.warmup(total))
        with offload(made.offload):
            model = nn.models.build(made.model, seed=made.seed, **_model_settings(train_set, made))
        text = made.model in GPT_DROPOUT
        optimizer = _optimizer(made, text)
        if text:
            optimizer.undecayed = optim.vectors
        if made.early_stopping is not None:
            listeners = [*listeners, *_early_stopping(made, train_set, text)]
        if made.log is not None:
            where = made.log_dir or (None if made.run_dir is None else made.run_dir / "logs")
            listeners = [*listeners, *loggers.named(made.log, where, made.log_every_n_steps)]
    progress = make(made.no_progress, sys.stderr) if first else None
    with on_all_ranks(ConfigError):
        keywords = {name: getattr(made, name) for name in declared(Training)}
        with_what = {"comm": world, "mesh": mesh, "schedule": schedule, "progress": progress}
        with_what["loss"] = None if train_set.classes else nn.MSELoss()
        with_what["metrics"] = None if made.metrics is None else [n.strip() for n in made.metrics.split(",")]
        trainer = DistributedTrainer(model=model, optimizer=optimizer, **with_what, **keywords)
    where = None if made.data_dir is None else os.path.abspath(made.data_dir)
    trainer.data_source = {"source": {"dataset": made.dataset, "data_dir": where, **own}}
    if first:
        _tell_what_is_trained(made, trainer, world, warnings, verbose)
    gc.freeze()
    gc.enable()  # train/__main__.py has turned it off
    try:
        asked = {name: getattr(made, name) for name in OF_FIT}
        history = trainer.fit(loader, validation, epochs=epochs, callbacks=listeners, verbose=False, **asked)
    finally:
        if progress is not None:
            progress.end()
    weights = trainer.weights_sha256()
    bits = train_set.bits(history.test_loss) if text and history.test_loss is not None else {}
    state = None if made.save_weights is None else trainer.state_dict()  # ranks may have parts: all take part
    if first:
        if state is not None:
            outputs.write(made.save_weights, "--save-weights", lambda file: write_weights(file, state))
        if made.json is not None:
            outputs.write_json(made.json, "--json", {**_report(made, world, trainer, history, weights), **bits})
        if not quiet:
            outputs.say(summary(history, weights, bits))
    return history


def _optimizer(made: Settings, text: bool) -> Any:
    """The optimizer, with those settings that it takes; of the user's own class with those that were given."""
    from odyssey import optim

    numbers = {name: getattr(made, name) for name in ("lr", "weight_decay", "momentum", "nesterov")}
    if made.optimizer in optim.BY_NAME:
        numbers |= {"betas": GPT_BETAS} if text else {}
        kind = optim.BY_NAME[made.optimizer]
        takes = inspect.signature(kind).parameters
        return kind(**{name: value for name, value in numbers.items() if name in takes})
    said = f"[train] --optimizer {made.optimizer}"
    own = userfile.named("[train] --optimizer", str(made.optimizer), "lion.py:Lion")
    given = {name: value for name, value in numbers.items() if value is not None and value is not False}
    try:
        optimizer = own(**given)
    except TypeError as problem:
        todo = f"it is called with what is given of {', '.join(map(core.option, numbers))}, by name"
        advice = f"{todo}: leave out what it does not take, give the rest defaults"
        raise ConfigError(f"{said}: {problem}; {advice}") from problem
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(f"{said} gives a {type(optimizer).__name__}; a subclass of odyssey.optim.Optimizer is needed")
    return optimizer


def _planned(made: Settings, world: Any, words: Sequence[str] | None) -> Settings:
    """The settings with the layout that rank 0 finds best for these ranks, on all; a collective call."""
    from ...audit import planner, verify
    from ...train import resume

    def found() -> dict[str, Any]:
        if words is None:
            raise ConfigError("[train] --layout auto is of one training; give --dp, --pp, --tp or --zero")
        limit = planner.machine_memory() // world.local_size
        rest = without(words, {"--run-dir": 1, "--layout": 1})
        command = [sys.executable, "-m", "odyssey.train", "--no-progress", *rest]
        best = planner.best(planner.Planner(command, world.local_size, limit)(tuple(planner.layouts(world.size))), 1)
        if not best:
            raise ConfigError(f"[train] --layout auto: no layout fits into {limit:,} bytes a rank; start more ranks")
        if not made.no_progress:
            text = f"{best[0].layout}: {1e3 * best[0].seconds:.1f} ms a step, {best[0].memory:,} bytes a rank"
            print(f"odyssey: --layout auto is {text} as planned", file=sys.stderr, flush=True)
        return verify.parse(best[0].layout)

    return dataclasses.replace(made, layout=None, **resume.by_first(world, found))


def _early_stopping(made: Settings, train_set: Any, text: bool) -> list[Any]:
    """The callbacks of --early-stopping; the second keeps the best checkpoint, where there are checkpoints."""
    from ...callbacks import EarlyStopping, ModelCheckpoint

    names = made.metrics.split(",") if made.metrics else ["accuracy"] * bool(train_set.classes and not text)
    parts = ("test", "train") if made.evaluate else ("train",)
    figures = [f"{part}_{name.strip()}" for part in parts for name in ("loss", *names)]
    stopping = EarlyStopping.parse(made.early_stopping, figures)
    saves = made.checkpoint_dir or made.run_dir or runs.Run.current()
    return [stopping, ModelCheckpoint(stopping.monitor)] if saves else [stopping]


def _tell_what_is_trained(made: Settings, trainer: Any, world: Any, warnings: Sequence[str], verbose: bool) -> None:
    lines = [] if made.no_progress else list(warnings)
    if world.size > 1 and not made.no_progress:
        lines.append(f"{world.size} ranks as {trainer.mesh}; {world.why}")
    if verbose:
        asked = dataclasses.asdict(made).items()
        lines += [f"{name.replace('_', '-')} = {value}" for name, value in asked if value is not None]
        lines.append(
            f"ranks {world.size}, mesh {trainer.mesh}, workers {trainer.workers}, device {trainer.device}, "
            f"threads {trainer.threads} of each rank; {world.why}"
        )
    for line in lines + ([trainer.notice] if trainer.notice else []):
        print(f"odyssey: {line}", file=sys.stderr, flush=True)


def _model_settings(train_set: Any, made: Settings) -> dict[str, Any]:
    """Returns what models.build is told of the data."""
    if made.model not in GPT_DROPOUT:
        outputs: dict[str, Any] = {"sample_shape": train_set.sample_shape, "classes": _outputs(train_set, made)}
        if made.normalize and made.model == "mlp" and not train_set.classes:
            numbers = train_set.labels.astype("float64")
            outputs["targets"] = (float(numbers.mean()), float(numbers.std()) or 1.0)
        return outputs
    if not hasattr(train_set, "vocabulary"):
        raise ConfigError(
            f"[train] --model {made.model} is for text, --dataset {made.dataset} has none; use shakespeare, or text"
        )
    return {"vocab_size": train_set.classes, "context": made.sequence_length, "dropout": GPT_DROPOUT[made.model]}


def _outputs(train_set: Any, made: Settings) -> int:
    """How many numbers a model must give: one for each class, or as many as a target has."""
    if hasattr(train_set, "vocabulary"):
        raise ConfigError(
            f"[train] --dataset {made.dataset} gives tokens, which --model {made.model} does not take; use "
            "--model gpt-mini or gpt, or train a model of your own on it from Python"
        )
    if classes := train_set.classes:
        return len(classes) if isinstance(classes, list) else classes
    shape = getattr(train_set.labels, "shape", ())
    if len(shape) > 2:
        raise ConfigError(f"[train] targets have the shape {shape[1:]}; --model {made.model} gives one row of numbers")
    return shape[1] if len(shape) == 2 else 1


def _report(made: Settings, world: Any, trainer: Any, history: Any, weights: str) -> dict[str, Any]:
    """Returns what `--json` writes."""
    from ...train.progress import SENT

    shown = [n for n, s in declared(Settings).items() if s.kind is not Path and s.section != core.OUTPUT]
    figures = ("train_loss", "steps", "samples_per_second", "seconds", *SENT)
    return {
        **{name: getattr(made, name) for name in shown},
        "test_accuracy": history.test_accuracy if made.evaluate else None,
        "test_loss": history.test_loss if made.evaluate else None,
        **{name: getattr(history, name) for name in figures},
        "epochs": len(history.records),
        "world_size": world.size,
        **{name: getattr(trainer, name) for name in ("workers", "threads", "device", "shard_size")},
        "weights_sha256": weights,
        "mesh": {"dp": trainer.mesh.dp, "pp": trainer.mesh.pp, "tp": trainer.mesh.tp},
        "memory_bytes": trainer.memory(),
        "loss_scale": trainer.scaler.value,
        "skipped_steps": trainer.scaler.skipped,
        "version": __version__,
        "history": history.records,
    }


def summary(history: Any, weights: str, bits: dict[str, float]) -> str:
    """The last two lines of a run: its numbers, and its weights; for text the test loss in bits is added."""
    from ...train.progress import SENT, traffic

    parts = [f"train loss {history.train_loss:.4f}", f"{history.steps} steps"]
    if history.test_accuracy is not None:
        parts.insert(0, f"test accuracy {100 * history.test_accuracy:.2f} %")
    elif bits:
        parts[:0] = [f"test {value:.4f} {name.replace('_', ' ')}" for name, value in bits.items()]
    elif history.test_loss is not None:
        parts.insert(0, f"test loss {history.test_loss:.4f}")
    parts += traffic(*(getattr(history, name) for name in SENT))
    parts += [f"{history.samples_per_second:,.0f} samples/s", f"{history.seconds:.1f} s"]
    return "  ".join(parts) + f"\nweights {weights[:16]}"
