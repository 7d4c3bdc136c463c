"""`odyssey tune`: trials of `odyssey train` with other values of its options."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..base import outputs
from ..cli.commands import FILE, HELP, on_all_ranks, train
from ..errors import ConfigError
from ..settings import option

# Options that change what a loss measures, so trials with other values can't be compared by it.
CHANGE_LOSS = ("loss", "log-target", "class-weights", "target", "dataset", "data-dir", "model")
CONTEXT_SETTINGS = {**HELP, "ignore_unknown_options": True, "allow_extra_args": True}


@click.command(
    "tune",
    short_help="Look for good values of training options.",
    context_settings=CONTEXT_SETTINGS,
)
@click.option(
    "--param",
    "params",
    multiple=True,
    required=True,
    metavar="NAME:...",
    help="What to try; several times.",
)
@click.option("--trials", type=int, default=20, show_default=True, help="Trials in all.")
@click.option(
    "--ranks-per-trial",
    type=int,
    default=1,
    show_default=True,
    help="Trials run side by side on the rest.",
)
@click.option(
    "--metric",
    help="The figure of the last epoch to judge by. (default: test_accuracy of classes, test_loss "
    "of numbers and of text)",
)
@click.option(
    "--direction",
    type=click.Choice(("maximize", "minimize")),
    help="(default: by the name of the metric)",
)
@click.option(
    "--storage",
    metavar="FILE|URL",
    help="Keep the study here, and go on with it. (default: kept until the search ends)",
)
@click.option("--sampler", type=click.Choice(("tpe", "random")), default="tpe", show_default=True)
@click.option(
    "--prune", is_flag=True, help="End trials early that are worse than the median of the others."
)
@click.option(
    "--json",
    "json_file",
    type=FILE,
    metavar="FILE",
    help="Write params and figures of all trials, again after each trial.",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF odyssey train]")
def command(
    params: Sequence[str],
    trials: int,
    metric: str | None,
    prune: bool,
    json_file: Path | None,
    options: tuple[str, ...],
    **tuner_options: Any,
) -> None:
    """Train with other values of options, and print the best ones.

    \b
    --param lr:log:1e-3:1       a number, each order of magnitude alike
    --param momentum:0.5:0.99   a number
    --param warmup-steps:int:0:200
    --param optimizer:sgd,adam  one of these

    Other options are those of `odyssey train`. Under mpirun trials run side by side: mpirun -n 4
    odyssey tune
    """
    with on_all_ranks():
        from .. import comm, tune

        space: dict[str, Any] = {}
        for name, drawn in (_parameter(tune, text) for text in params):
            if name in space or any(word.partition("=")[0] == f"--{name}" for word in options):
                raise ConfigError(
                    f"[tune] --param {name} draws what is given a second time; leave one of the "
                    "two out"
                )
            space[name] = drawn
        first = {
            name: d.choices[0] if hasattr(d, "choices") else d.low for name, d in space.items()
        }
        settings = _settings(options, first, 0)  # what is wrong is said before the first trial
        metric = _metric(metric, settings, space, comm.world(backend="auto"))
        if json_file is not None:
            outputs.check(json_file, "--json")

    def write_trials() -> None:
        if json_file is not None and tuner.comm.rank == 0:
            outputs.write_json(json_file, "--json", {"metric": metric, **_results(tuner.study)})

    def play(config: dict[str, Any], trial: Any) -> Any:
        write_trials()
        settings = _settings(options, config, trial.number)
        gc.unfreeze()
        return train.run(settings, callbacks=[trial.pruning(metric)] if prune else (), quiet=True)

    with on_all_ranks():
        tuner = tune.DistributedTuner(play, space, metric=metric, **tuner_options)
    try:
        tuner.tune(trials)
    finally:
        if tuner.study is not None:
            write_trials()
    if tuner.comm.rank:
        return
    words = " ".join(f"--{name} {value}" for name, value in tuner.best_params.items())
    outputs.say(f"best {metric} {tuner.best_value:.6g}: {words}")


def _metric(name: str | None, settings: Any, space: dict[str, Any], world: Any) -> str:
    """Returns the figure to judge by: the one that is given, or the one that fits the data.

    Collective over the ranks of `world`.

    Raises ConfigError if an epoch of the training has no such figure, or if trials of this search
    can't be compared by their loss.
    """
    train_set = train.load_data(settings, world).train_set
    figures = train.epoch_figures(settings, train_set)
    if name is not None and name not in figures:
        raise ConfigError(
            f"[tune] --metric {name}: an epoch has no such figure; choose from "
            f"{', '.join(figures)}, or measure more with --metrics"
        )
    if name is not None:
        return name
    accuracies = [figure for figure in figures if figure.endswith("_accuracy")]
    chosen = (accuracies or figures)[0]
    changing = next((option for option in CHANGE_LOSS if option in space), None)
    if chosen.endswith("_loss") and changing is not None:
        raise ConfigError(
            f"[tune] --param {changing} changes what {chosen} measures; give --metric, such as "
            "--metrics mae --metric test_mae"
        )
    return chosen


def _results(study: Any) -> dict[str, Any]:
    """Returns the trials of a study that are under way or have ended, as JSON values."""
    trials = [t for t in study.get_trials(deepcopy=False) if t.state.name != "WAITING"]
    completed = any(t.state.name == "COMPLETE" for t in trials)
    return {
        "best_params": study.best_params if completed else None,
        "best_value": study.best_value if completed else None,
        "trials": [
            {
                "number": t.number,
                "state": t.state.name.lower(),
                "value": t.value,
                "params": t.params,
            }
            for t in trials
        ],
    }


def _parameter(tune: Any, text: str) -> tuple[str, Any]:
    """Name and distribution of a --param."""
    name, *fields = text.split(":")
    try:
        if len(fields) == 1 and fields[0]:
            return name, tune.choice(fields[0].split(","))
        if len(fields) == 3 and fields[0] == "log":
            return name, tune.loguniform(float(fields[1]), float(fields[2]))
        if len(fields) == 3 and fields[0] == "int":
            return name, tune.randint(int(fields[1]), int(fields[2]) + 1)
        if len(fields) == 2:
            return name, tune.uniform(float(fields[0]), float(fields[1]))
    except ConfigError:  # a ValueError too: Optuna is not installed
        raise
    except ValueError:  # no number, or low is above high
        pass
    raise ConfigError(
        f"[tune] --param {text}; give NAME:LOW:HIGH, NAME:log:LOW:HIGH, NAME:int:LOW:HIGH or "
        "NAME:a,b,c"
    )


def _settings(options: Sequence[str], config: dict[str, Any], number: int) -> Any:
    """The settings of a trial, as `odyssey train` reads them; what it writes goes into a folder
    of its own.
    """
    words = [*options, *(f"--{name}={value}" for name, value in config.items())]
    context = train.command.make_context("odyssey tune", words)
    settings = train.settings_of(context)
    for name in ("save_weights", "run_dir"):
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"[tune] {option(name)} is of one training; give --checkpoint-dir, which keeps "
                "all trials'"
            )
    if context.params["ranks"] is not None:
        raise ConfigError(
            "[tune] --ranks is of one training; start tune with mpirun -n, and give "
            "--ranks-per-trial"
        )
    folders = {
        name: getattr(settings, name)
        for name in ("checkpoint_dir", "log_dir")
        if getattr(settings, name) is not None
    }
    return dataclasses.replace(
        settings,
        no_progress=True,
        **{name: folder / f"trial-{number}" for name, folder in folders.items()},
    )
