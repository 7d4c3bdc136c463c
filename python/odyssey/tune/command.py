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
    default="test_accuracy",
    show_default=True,
    help="The figure of the last epoch to judge by.",
)
@click.option(
    "--direction",
    type=click.Choice(("maximize", "minimize")),
    help="(default: by the name of the metric)",
)
@click.option(
    "--storage",
    metavar="FILE|URL",
    help="Keep the study here, and go on with it. (default: not kept)",
)
@click.option("--sampler", type=click.Choice(("tpe", "random")), default="tpe", show_default=True)
@click.option(
    "--prune", is_flag=True, help="End trials early that are worse than the median of the others."
)
@click.option(
    "--json", "json_file", type=FILE, metavar="FILE", help="Write params and figures of all trials."
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF odyssey train]")
def command(
    params: Sequence[str],
    trials: int,
    metric: str,
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
        from .. import tune

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
        _settings(options, first, 0)  # what is wrong is said before the first trial
        if json_file is not None:
            outputs.check(json_file, "--json")

    def play(config: dict[str, Any], trial: Any) -> Any:
        settings = _settings(options, config, trial.number)
        gc.unfreeze()
        return train.run(settings, callbacks=[trial.pruning(metric)] if prune else (), quiet=True)

    tuner = tune.DistributedTuner(play, space, metric=metric, **tuner_options)
    tuner.tune(trials)
    if tuner.comm.rank:
        return
    if json_file is not None:
        rows = [
            {
                "number": t.number,
                "state": t.state.name.lower(),
                "value": t.value,
                "params": t.params,
            }
            for t in tuner.study.get_trials()
        ]
        best = {"best_params": tuner.best_params, "best_value": tuner.best_value}
        outputs.write_json(json_file, "--json", {**best, "metric": metric, "trials": rows})
    words = " ".join(f"--{name} {value}" for name, value in tuner.best_params.items())
    outputs.say(f"best {metric} {tuner.best_value:.6g}: {words}")


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
