"""The run of `odyssey train`, from settings to results.

You can do the same from Python with the same objects.

`run` is the whole run, and the other functions are its steps, in the order of the run. They import
what needs NumPy themselves: `connect_ranks` checks the limits of this process first, and `odyssey
train --help` needs none of it.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odyssey import __version__
from odyssey.errors import ConfigError, counted

from ..base import launcher as launchers
from ..base import outputs, registry, runs, userfile
from ..settings import declarations
from ..settings.declarations import OF_FIT, Settings, Training, declared, option
from ..settings.recipes import GPT_BETAS, GPT_DROPOUT
from .commands import on_all_ranks, without

if TYPE_CHECKING:
    from ..callbacks import Callback
    from ..checkpoints.trainable import History
    from ..comm import Communicator
    from ..core.tensor import Tensor
    from ..data import DataLoader
    from ..nn import Module
    from ..optim import Optimizer, Schedule
    from ..parallel.mesh import Mesh
    from ..train.progress import Progress
    from ..train.trainer import DistributedTrainer

TEST_BATCH_SIZE = 1024
HEAVY_TAIL = 20.0  # standard deviations of the largest target from the mean that cause a note


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks of a run, the mesh that they form, and the warnings of the checks before the
    run.
    """

    world: Communicator
    mesh: Mesh
    warnings: list[str]

    @property
    def is_first(self) -> bool:
        """Tells whether this process is rank 0, which prints and writes for all."""
        return self.world.rank == 0


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    `test_loader` is None if the run does not evaluate. `target_scale` holds the arguments of a
    `TargetScale`, or None if targets are classes. `notes` are lines for the user.
    """

    train_set: Any
    train_loader: DataLoader
    test_loader: DataLoader | None
    steps_per_epoch: int
    target_scale: tuple[list[float], list[float], bool] | None
    notes: list[str]


def run(
    settings: Settings,
    *,
    verbose: bool = False,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    words: Sequence[str] | None = None,
) -> History:
    """Trains a network as the settings say, and returns its history.

    Args:
        settings: checked settings, from `commands.train.settings_of`.
        verbose: also print the settings and the layout before the first step.
        callbacks: callbacks for `fit()`, in addition to those that the settings ask for.
        quiet: do not print the line of results.
        words: the command line that the settings come from. The run directory records it.
    """
    world = connect_ranks(settings)
    settings = choose_layout(settings, world, words)
    ranks = check_ranks(settings, world)
    if ranks.is_first:
        prepare_outputs(settings, words)
    data = load_data(settings, world)
    schedule = build_schedule(settings, data)
    model = build_model(settings, data)
    optimizer = build_optimizer(settings)
    callbacks = [*callbacks, *build_callbacks(settings, data)]
    progress = build_progress(settings, ranks)
    trainer = build_trainer(settings, ranks, data, model, optimizer, schedule, progress)
    if ranks.is_first:
        print_start(settings, ranks, data, trainer, verbose)
    history = train(settings, data, trainer, callbacks, progress)
    report(settings, ranks, data, trainer, history, callbacks, quiet)
    return history


# --- ranks --------------------------------------------------------------------------------------


def connect_ranks(settings: Settings) -> Communicator:
    """Sets the environment and the limits of this process, and connects it with the other ranks."""
    if settings.watchdog is not None:
        os.environ["ODYSSEY_WATCHDOG"] = f"{settings.watchdog:g}"
    if settings.run_dir is not None and not is_replay():
        os.environ[runs.RUN_DIR] = os.path.realpath(settings.run_dir)
    from ..base import limits

    limits.before_mpi(launchers.launched())  # also before NumPy, which needs memory as well
    from .. import comm

    return comm.world(backend="auto")


def is_replay() -> bool:
    """Tells whether `odyssey replay` started this process.

    It then leaves the run directory as it is.
    """
    return bool(os.environ.get(declarations.REPLAY))


def layout_is_imposed() -> bool:
    """Tells whether a tool such as `odyssey verify` chooses the layout of this run, instead of
    the options.
    """
    return any(map(os.environ.get, registry.provided("joining")))


def choose_layout(settings: Settings, world: Communicator, words: Sequence[str] | None) -> Settings:
    """Returns the settings with the layout for `--layout auto` that rank 0 plans.

    Collective if `--layout` is used.
    """
    if not settings.layout or layout_is_imposed():
        return settings
    from ..train import resume

    layout = resume.by_first(world, lambda: plan_layout(settings, world, words))
    return dataclasses.replace(settings, layout=None, **layout)


def plan_layout(
    settings: Settings, world: Communicator, words: Sequence[str] | None
) -> dict[str, Any]:
    """Returns the settings of the fastest layout that fits into memory, such as {"dp": 2,
    "zero": 1}.
    """
    from ..audit import planner, verify

    if words is None:
        raise ConfigError(
            "[train] --layout auto is of one training; give --dp, --pp, --tp or --zero"
        )
    limit = planner.machine_memory() // world.local_size
    options = without(words, {"--run-dir": 1, "--layout": 1})
    command = [sys.executable, "-m", "odyssey.train", "--no-progress", *options]
    plan_layouts = planner.Planner(command, world.local_size, limit)
    plans = planner.best(plan_layouts(tuple(planner.layouts(world.size))), 1)
    if not plans:
        raise ConfigError(
            f"[train] --layout auto: no layout fits into {limit:,} bytes a rank; start more ranks"
        )
    plan = plans[0]
    if not settings.no_progress:
        text = f"{plan.layout}: {1e3 * plan.seconds:.1f} ms a step, {plan.memory:,} bytes a rank"
        print(f"odyssey: --layout auto is {text} as planned", file=sys.stderr, flush=True)
    return verify.parse(plan.layout)


@on_all_ranks()
def check_ranks(settings: Settings, world: Communicator) -> Ranks:
    """Checks that the ranks fit together and that their machines have room for them. Collective."""
    from ..comm.cores import default_threads
    from ..parallel.mesh import Mesh
    from ..train import preflight

    threads = settings.threads or default_threads(world.local_size)
    warnings = preflight.at_start(world, dataclasses.asdict(settings), threads=threads)
    mesh = Mesh(settings.dp, settings.pp, settings.tp)
    if not layout_is_imposed():
        mesh = mesh.fit(world.size)
    return Ranks(world, mesh, warnings)


def prepare_outputs(settings: Settings, words: Sequence[str] | None) -> None:
    """Checks that the files of results can be written, and starts the run directory."""
    for path, name in ((settings.save_weights, "--save-weights"), (settings.json, "--json")):
        if path is not None:
            outputs.check(path, name)
    if settings.run_dir is not None and not is_replay():
        runs.begin(runs.Run.current(), [sys.executable, "-m", "odyssey.train", *(words or ())])


# --- data, model, optimizer ---------------------------------------------------------------------


def load_data(settings: Settings, world: Communicator) -> TrainingData:
    """Opens the training set and, if the run evaluates, the test set. Collective.

    Raises DataError if files don't fit, and ConfigError if a setting doesn't fit the targets.
    """
    from ..data import DataLoader, opened
    from ..data.tables import notes

    unreadable = find_unreadable(settings, world)
    train_set = opened(
        settings.dataset,
        settings.data_dir,
        train=True,
        normalize=settings.normalize,
        drop_columns=settings.drop_columns,
        fill=settings.fill,
        skip=unreadable,
        **sample_settings(settings),
    )
    target_scale = measure_targets(settings, train_set)
    train_loader = DataLoader(
        train_set,
        batch_size=settings.global_batch_size // settings.accumulation_steps,
        shuffle=True,
        seed=settings.seed,
        num_workers=settings.num_workers,
    )
    test_loader = None
    if settings.evaluate:
        # The training part of a table decides its categories and scales.
        columns = getattr(train_set, "columns", None)
        test_set = opened(
            settings.dataset,
            settings.data_dir,
            train=False,
            like=columns,
            skip=unreadable,
            **sample_settings(settings),
        )
        check_log_target(settings, test_set, "test")
        test_loader = DataLoader(
            test_set, batch_size=TEST_BATCH_SIZE, num_workers=settings.num_workers
        )
    steps_per_epoch = -(-len(train_loader) // settings.accumulation_steps)
    lines = [*notes(train_set), *target_notes(settings, train_set)]
    if unreadable:
        from ..data.sources import list_paths

        listed = list_paths(unreadable)
        lines.append(f"{len(unreadable):,} files are left out (--skip-unreadable): {listed}")
    return TrainingData(train_set, train_loader, test_loader, steps_per_epoch, target_scale, lines)


def find_unreadable(settings: Settings, world: Communicator) -> list[str]:
    """Returns the image files that the run leaves out. Rank 0 reads them. Collective.

    Raises DataError, which lists all files that cannot be read, without `--skip-unreadable`.
    """
    folder = settings.data_dir
    if settings.dataset != "image-folder" or folder is None:
        return []
    from ..data import sources
    from ..train import resume

    def read() -> list[str]:
        faults = sources.unreadable_images(folder, thorough=settings.skip_unreadable)
        if not settings.skip_unreadable:
            sources.refuse_images(faults)
        return list(faults)

    return list(resume.by_first(world, read))


def measure_targets(
    settings: Settings, train_set: Any
) -> tuple[list[float], list[float], bool] | None:
    """Returns mean and deviation of each number of a target, of log(1 + target) with
    `--log-target`, and whether that is given. None if targets are classes.

    Every rank measures the whole training part, so the numbers don't depend on ranks. Raises
    ConfigError if a setting doesn't fit the targets.
    """
    import numpy as np

    if train_set.classes:
        if asks_for_numbers(settings):
            stated = option("log_target") if settings.log_target else option("loss", settings.loss)
            raise ConfigError(
                f"[train] {stated} is for targets that are numbers, and --dataset "
                f"{settings.dataset} has classes; leave it out"
            )
        return None
    if settings.class_weights is not None:
        raise ConfigError(
            f"[train] {option('class_weights', settings.class_weights)} is for classes, and "
            "targets are numbers; leave it out"
        )
    check_log_target(settings, train_set, "training")
    targets = np.asarray(train_set.labels, np.float64)
    if settings.log_target:
        targets = np.log1p(targets)
    rows = targets.reshape(len(targets), -1)
    # A constant target has the deviation 0. It becomes 1, instead of a division by 0.
    deviations = [float(deviation) or 1.0 for deviation in rows.std(0)]
    return rows.mean(0).tolist(), deviations, settings.log_target


def target_notes(settings: Settings, train_set: Any) -> list[str]:
    """Returns a note if targets have a heavy tail, which other losses learn better."""
    import numpy as np

    if train_set.classes or settings.log_target or (settings.loss or "mse") != "mse":
        return []
    targets = np.asarray(train_set.labels, np.float64)
    deviations = np.abs(targets - targets.mean(0)).max(0) / np.maximum(targets.std(0), 1e-300)
    if deviations.max() < HEAVY_TAIL:
        return []
    remedy = "--log-target or --loss smooth_l1" if targets.min() >= 0 else "--loss smooth_l1"
    return [
        f"the largest target is {deviations.max():,.0f} standard deviations from the mean, and "
        f"decides most of the loss; {remedy} may learn the rest better"
    ]


def check_log_target(settings: Settings, dataset: Any, part: str) -> None:
    """Raises ConfigError if `--log-target` meets targets below 0."""
    least = 0.0 if not settings.log_target or dataset.classes else float(dataset.labels.min())
    if least < 0:
        raise ConfigError(
            f"[train] --log-target needs targets of at least 0, and the {part} part has "
            f"{least:g}; use --loss smooth_l1"
        )


def asks_for_numbers(settings: Settings) -> bool:
    """Tells whether the settings say that targets are numbers, even if they are whole numbers."""
    return settings.loss is not None or settings.log_target


def sample_settings(settings: Settings) -> dict[str, Any]:
    """Returns the arguments of `data.opened` that decide what a sample is.

    Checkpoints keep them.
    """
    return {
        "size": settings.image_size,
        "target": settings.target,
        "length": settings.sequence_length,
        "numbers": asks_for_numbers(settings),
    }


@on_all_ranks()
def build_schedule(settings: Settings, data: TrainingData) -> Schedule:
    """Builds the factor on the learning rate as a function of the step."""
    from .. import optim

    _, total_steps = settings.length(data.steps_per_epoch)
    return optim.schedule(
        settings.schedule, total_steps=total_steps, warmup_steps=settings.warmup(total_steps)
    )


def is_language_model(settings: Settings) -> bool:
    """Tells whether the model predicts text."""
    return settings.model in GPT_DROPOUT


@on_all_ranks()
def build_model(settings: Settings, data: TrainingData) -> Module:
    """Builds the network for the samples of the training set.

    Its weights depend on the seed alone.
    """
    from .. import nn
    from ..core.offload import offload

    with offload(settings.offload):
        return nn.models.build(
            settings.model, seed=settings.seed, **model_arguments(settings, data)
        )


def model_arguments(settings: Settings, data: TrainingData) -> dict[str, Any]:
    """Returns the arguments of the model's class that depend on the data set."""
    train_set = data.train_set
    if is_language_model(settings):
        if not hasattr(train_set, "vocabulary"):
            raise ConfigError(
                f"[train] --model {settings.model} is for text, --dataset {settings.dataset} has "
                "none; use shakespeare, or text"
            )
        return {
            "vocab_size": train_set.classes,
            "context": settings.sequence_length,
            "dropout": GPT_DROPOUT[settings.model],
        }
    arguments = {
        "sample_shape": train_set.sample_shape,
        "classes": output_count(settings, train_set),
    }
    if data.target_scale is not None:
        arguments["target_scale"] = data.target_scale
    return arguments


def output_count(settings: Settings, train_set: Any) -> int:
    """Returns how many numbers the model must return: one for each class, or for each number of
    a target.
    """
    if hasattr(train_set, "vocabulary"):
        raise ConfigError(
            f"[train] --dataset {settings.dataset} gives tokens, which --model {settings.model} "
            "does not take; use "
            "--model gpt-mini or gpt, or train a model of your own on it from Python"
        )
    if classes := train_set.classes:
        return len(classes) if isinstance(classes, list) else classes
    shape = getattr(train_set.labels, "shape", ())
    if len(shape) > 2:
        raise ConfigError(
            f"[train] targets have the shape {shape[1:]}; --model {settings.model} gives one row "
            "of numbers"
        )
    return shape[1] if len(shape) == 2 else 1


@on_all_ranks()
def build_loss(settings: Settings, data: TrainingData) -> Module | None:
    """Builds the loss that the settings and targets ask for, or None for the model's own loss."""
    import numpy as np

    from .. import nn

    if data.target_scale is not None:
        return nn.ScaledLoss(settings.loss or "mse", *data.target_scale)
    if settings.class_weights is None:
        return None
    if is_language_model(settings):
        raise ConfigError(
            f"[train] {option('class_weights', settings.class_weights)} is not for text; leave it "
            "out"
        )
    counts = np.bincount(data.train_set.labels, minlength=output_count(settings, data.train_set))
    # A class without a sample in the training part counts like one with a sample.
    weights = counts.sum() / (len(counts) * np.maximum(counts, 1))
    return nn.CrossEntropyLoss(weight=weights.tolist())


@on_all_ranks()
def build_optimizer(settings: Settings) -> Optimizer:
    """Builds the optimizer with the settings that its class takes."""
    from .. import optim

    options = values_of(settings, ("lr", "weight_decay", "momentum", "nesterov"))
    if settings.optimizer not in optim.BY_NAME:
        optimizer = build_user_optimizer(str(settings.optimizer), options)
    else:
        if is_language_model(settings):
            options["betas"] = GPT_BETAS
        optimizer_class = optim.BY_NAME[settings.optimizer]
        parameters = inspect.signature(optimizer_class).parameters
        optimizer = optimizer_class(
            **{name: value for name, value in options.items() if name in parameters}
        )
    if is_language_model(settings):
        optimizer.undecayed = optim.vectors
    return optimizer


def build_user_optimizer(place: str, options: dict[str, Any]) -> Optimizer:
    """Builds an optimizer of the user's class at FILE.py:CLASS, with the options that the user
    set.
    """
    from .. import optim

    optimizer_class = userfile.named("[train] --optimizer", place, "lion.py:Lion")
    arguments = {
        name: value for name, value in options.items() if value is not None and value is not False
    }
    try:
        optimizer = optimizer_class(**arguments)
    except TypeError as problem:
        advice = (
            f"it is called with what is given of {', '.join(map(option, options))}, by name: "
            "leave out what it does not take, give the rest defaults"
        )
        raise ConfigError(f"[train] --optimizer {place}: {problem}; {advice}") from problem
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"[train] --optimizer {place} gives a {type(optimizer).__name__}; "
            "a subclass of odyssey.optim.Optimizer is needed"
        )
    return optimizer


@on_all_ranks()
def build_callbacks(settings: Settings, data: TrainingData) -> list[Callback]:
    """Builds the callbacks of `--early-stopping` and the loggers of `--log`."""
    callbacks: list[Callback] = []
    if settings.early_stopping is not None:
        callbacks += build_early_stopping(settings, data.train_set)
    if settings.log is not None:
        from ..callbacks import loggers

        folder = settings.log_dir
        if folder is None and settings.run_dir is not None:
            folder = settings.run_dir / "logs"
        callbacks += loggers.named(settings.log, folder, settings.log_every_n_steps)
    return callbacks


def build_early_stopping(settings: Settings, train_set: Any) -> list[Callback]:
    """Builds the callbacks of `--early-stopping`.

    If the run has checkpoints, the second one keeps the best.
    """
    from ..callbacks import EarlyStopping, ModelCheckpoint

    stopping = EarlyStopping.parse(settings.early_stopping, epoch_figures(settings, train_set))
    if settings.checkpoint_dir or settings.run_dir or runs.Run.current():
        return [stopping, ModelCheckpoint(stopping.monitor)]
    return [stopping]


def epoch_figures(settings: Settings, train_set: Any) -> list[str]:
    """Returns the names of the figures that the record of an epoch has, such as test_loss."""
    metrics = ["loss"]
    if settings.metrics:
        metrics += metric_names(settings)
    elif train_set.classes and not is_language_model(settings):
        metrics.append("accuracy")
    parts = ("test", "train") if settings.evaluate else ("train",)
    return [f"{part}_{name}" for part in parts for name in metrics]


def metric_names(settings: Settings) -> list[str] | None:
    """Returns the names in `--metrics`, or None if it is not given."""
    if settings.metrics is None:
        return None
    return [name.strip() for name in settings.metrics.split(",")]


# --- training -----------------------------------------------------------------------------------


def build_progress(settings: Settings, ranks: Ranks) -> Progress | None:
    """Builds what shows the progress on rank 0. Other ranks show none."""
    from ..train import progress

    return progress.make(settings.no_progress, sys.stderr) if ranks.is_first else None


@on_all_ranks(ConfigError)
def build_trainer(
    settings: Settings,
    ranks: Ranks,
    data: TrainingData,
    model: Module,
    optimizer: Optimizer,
    schedule: Schedule,
    progress: Progress | None,
) -> DistributedTrainer:
    """Builds the trainer. Collective."""
    from ..train.trainer import DistributedTrainer

    trainer = DistributedTrainer(
        model=model,
        optimizer=optimizer,
        loss=build_loss(settings, data),
        metrics=metric_names(settings),
        schedule=schedule,
        mesh=ranks.mesh,
        comm=ranks.world,
        progress=progress,
        **values_of(settings, declared(Training)),
    )
    data_dir = None if settings.data_dir is None else os.path.abspath(settings.data_dir)
    trainer.data_source = {
        "source": {
            "dataset": settings.dataset,
            "data_dir": data_dir,
            "skip_unreadable": settings.skip_unreadable,
            **sample_settings(settings),
        },
        "metrics": metric_names(settings),
    }
    return trainer


def print_start(
    settings: Settings, ranks: Ranks, data: TrainingData, trainer: DistributedTrainer, verbose: bool
) -> None:
    """Prints warnings and what is trained where, unless the user asked for silence."""
    world = ranks.world
    lines: list[str] = []
    if not settings.no_progress:
        lines += [*ranks.warnings, *data.notes]
        if world.size > 1:
            lines.append(f"{world.size} ranks as {trainer.mesh}; {world.why}")
    if verbose:
        for name, value in dataclasses.asdict(settings).items():
            if value is not None:
                lines.append(f"{name.replace('_', '-')} = {value}")
        lines.append(
            f"ranks {world.size}, mesh {trainer.mesh}, workers {trainer.workers}, device "
            f"{trainer.device}, threads {trainer.threads} of each rank; {world.why}"
        )
    if trainer.notice:
        lines.append(trainer.notice)
    for line in lines:
        print(f"odyssey: {line}", file=sys.stderr, flush=True)


def train(
    settings: Settings,
    data: TrainingData,
    trainer: DistributedTrainer,
    callbacks: Sequence[Callback],
    progress: Progress | None,
) -> History:
    """Trains for the epochs or steps of the settings. Collective."""
    epochs, _ = settings.length(data.steps_per_epoch)
    gc.freeze()
    gc.enable()  # train/__main__.py turned it off
    try:
        return trainer.fit(
            data.train_loader,
            data.test_loader,
            epochs=epochs,
            callbacks=callbacks,
            verbose=False,
            **values_of(settings, OF_FIT),
        )
    finally:
        if progress is not None:
            progress.end()


# --- results ------------------------------------------------------------------------------------


def report(
    settings: Settings,
    ranks: Ranks,
    data: TrainingData,
    trainer: DistributedTrainer,
    history: History,
    callbacks: Sequence[Callback],
    quiet: bool,
) -> None:
    """Writes the files of `--save-weights` and `--json` and, unless `quiet`, prints the line of
    results. Collective.
    """
    from ..callbacks import EarlyStopping
    from ..train.trainer import write_weights

    weights_hash = trainer.weights_sha256()
    bits: dict[str, float] = {}
    if is_language_model(settings) and history.test_loss is not None:
        bits = data.train_set.bits(history.test_loss)
    stopping = next((one for one in callbacks if isinstance(one, EarlyStopping)), None)
    best = None if stopping is None else stopping.best_record(history.records)
    weights: dict[str, Tensor] | None = None
    if settings.save_weights is not None:
        weights = trainer.state_dict()  # on all ranks: each may have a part
    if not ranks.is_first:
        return
    if weights is not None:
        outputs.write(
            settings.save_weights, "--save-weights", lambda file: write_weights(file, weights)
        )
    if settings.json is not None:
        results = results_of(settings, ranks, trainer, history, weights_hash)
        best_epoch = {"best_epoch": best["epoch"]} if best else {}
        outputs.write_json(settings.json, "--json", results | bits | best_epoch)
    if not quiet:
        best_line = describe_best(best, stopping.monitor) if best and stopping else ""
        outputs.say(summary(history, weights_hash, bits, best_line))


def results_of(
    settings: Settings,
    ranks: Ranks,
    trainer: DistributedTrainer,
    history: History,
    weights_hash: str,
) -> dict[str, Any]:
    """Returns the results that `--json` writes."""
    from ..train.progress import SENT

    names = [
        name
        for name, setting in declared(Settings).items()
        if setting.kind is not Path and setting.section != declarations.OUTPUT
    ]
    return {
        **values_of(settings, names),
        "test_accuracy": history.test_accuracy if settings.evaluate else None,
        "test_loss": history.test_loss if settings.evaluate else None,
        **values_of(history, ("train_loss", "steps", "samples_per_second", "seconds", *SENT)),
        "epochs": len(history.records),
        "world_size": ranks.world.size,
        **values_of(trainer, ("workers", "threads", "device", "shard_size", "conv_algorithm")),
        "weights_sha256": weights_hash,
        "mesh": values_of(trainer.mesh, ("dp", "pp", "tp")),
        "memory_bytes": trainer.memory(),
        "loss_scale": trainer.scaler.value,
        "skipped_steps": trainer.scaler.skipped,
        "version": __version__,
        "history": history.records,
    }


def describe_best(record: dict[str, Any], monitor: str) -> str:
    """Returns the line about the best epoch, which is often not the last one."""
    from ..train.progress import format_figure

    name = monitor.replace("_", " ")
    return f"best epoch {record['epoch']}: {name} {format_figure(record[monitor])}"


def summary(
    history: History, weights_hash: str, bits: dict[str, float], best_line: str = ""
) -> str:
    """Returns the lines of results: the numbers, the best epoch if there is one, and the weights'
    hash.

    Text also has the test loss in bits, and numbers have all metrics of the test.
    """
    from ..train.progress import SENT, format_figure, traffic

    parts: list[str] = []
    if history.test_accuracy is not None:
        parts.append(f"test accuracy {100 * history.test_accuracy:.2f} %")
    elif bits:
        parts += [f"test {value:.4f} {name.replace('_', ' ')}" for name, value in bits.items()]
    elif history.test_loss is not None:
        parts += [
            f"test {name.removeprefix('test_')} {format_figure(value)}"
            for name, value in history.records[-1].items()
            if name.startswith("test_") and value is not None
        ]
    parts.append(f"train loss {format_figure(history.train_loss)}")
    parts.append(counted(history.steps, "step"))
    parts += traffic(*(getattr(history, name) for name in SENT))
    parts.append(f"{history.samples_per_second:,.0f} samples/s")
    parts.append(f"{history.seconds:.1f} s")
    lines = ["  ".join(parts), best_line, f"weights {weights_hash[:16]}"]
    return "\n".join(filter(None, lines))


def values_of(record: object, names: Iterable[str]) -> dict[str, Any]:
    """Returns attributes of an object by name, for example as keyword arguments."""
    return {name: getattr(record, name) for name in names}
