"""The options of `odyssey train`, and the settings that a command line stands for. training.py
runs them.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import click

from odyssey.errors import ConfigError

from ...base import launcher as launchers
from ...base import runs
from ...base.paths import variables_in
from ...settings import declarations
from ...settings.declarations import SECTIONS, Command, Setting, Settings, declared, option
from ..configfile import read_config
from ..training import epoch_figures, load_data, run  # noqa: F401 - `odyssey tune` uses all
from . import FILE, HELP, DataSet, OrOwn, on_all_ranks, without


def _load_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Makes the values of the configuration file the defaults of the other options."""
    if path is not None:
        context.default_map = read_config(path, context.command.params)
        # In a rank, the launcher has applied its options already.
        if runs.ATTEMPT in os.environ:
            for name in ("ranks", "run_dir"):
                context.default_map.pop(name, None)


def _build_option(setting: Setting) -> click.Option:
    """Builds the option of click for a setting."""
    kind: Any = setting.kind
    metavar = setting.metavar or None
    if setting.kind is Path:
        kind = FILE
        metavar = metavar or ("DIR" if setting.name.endswith("_dir") else "FILE")
    if setting.choices:
        if setting.name == "dataset":
            kind = DataSet(setting.choices)
        else:
            kind = OrOwn(setting.choices) if setting.own else click.Choice(setting.choices)
    type_options: dict[str, Any] = {"type": kind, "metavar": metavar}
    if setting.kind is bool:
        type_options = {"is_flag": True}
    return click.Option(
        [setting.name, *(setting.flags or (option(setting.name),))],
        default=setting.default,
        help=setting.help_text(option),
        **type_options,
    )


CONFIG = click.Option(
    ["--config"],
    type=FILE,
    is_eager=True,
    expose_value=False,
    callback=_load_config,
    metavar="FILE.toml",
    help="Read options from a TOML file; the command line goes before it. (default: none)",
)


class _SectionedCommand(click.Command):
    """A command whose help lists its options under headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Passes a command line of another platform on to its command, which ends the process."""
        from .. import foreign_options

        if foreign_options.has_foreign_option(args):
            foreign_options.command.main(args, prog_name=ctx.command_path, standalone_mode=False)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        section_by_option = {
            "config": declarations.DATA,
            **{name: setting.section for name, setting in declared(Command).items()},
        }
        for section in (*SECTIONS, "Other"):
            options = [
                parameter
                for parameter in self.get_params(ctx)
                if section_by_option.get(str(parameter.name), "Other") == section
            ]
            help_records = [parameter.get_help_record(ctx) for parameter in options]
            with formatter.section(section):
                # Hidden options have no record.
                formatter.write_dl([record for record in help_records if record])


@click.pass_context
def _run_command(context: click.Context, verbose: bool, ranks: int | None, **_: Any) -> None:
    """Train a network and print one line of results.

    Under mpirun or srun the processes train together: mpirun -n 4 odyssey train. To start them, and
    to start them again when something fails: odyssey launch -n 4 train
    """
    with on_all_ranks():
        settings = settings_of(context)
    if ranks is None:
        words = sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv[1:]
        run(settings, verbose=verbose, words=words)
        return
    from odyssey.launch import DistributedLauncher, LaunchConfig

    gc.enable()
    config = LaunchConfig(
        nproc_per_node=ranks,
        run_dir=settings.run_dir,
        max_restarts=3,
        watchdog=settings.watchdog,
        # Ranks expand the same paths.
        env=variables_in([*sys.argv, *map(str, (context.default_map or {}).values())]),
    )
    words = without(sys.argv[1:], {"--ranks": 1, "-n": 1, "--run-dir": 1, "--watchdog": 1})
    sys.exit(
        DistributedLauncher(config).launch(
            "train", *(words[1:] if words[:1] == ["train"] else words)
        )
    )


command = _SectionedCommand(
    "train",
    callback=_run_command,
    params=[
        CONFIG,
        *(_build_option(setting) for setting in declared(Command).values() if setting.option),
    ],
    help=_run_command.__doc__,
    short_help="Train a network.",
    context_settings=HELP,
)


def settings_of(context: click.Context) -> Settings:
    """Returns the settings that the command line of `context` asks for.

    Raises ConfigError if options contradict each other, or a value is not allowed.
    """
    values = dict(context.params)
    batch_size = values.pop("batch_size")
    ranks = values.pop("ranks")
    verbose = values.pop("verbose")
    if values["no_progress"] and verbose:
        raise ConfigError("[train] --quiet and --verbose are both given; leave one out")
    values["dataset"], values["data_dir"] = DataSet.parted(
        "train", values["dataset"], values["data_dir"]
    )
    declarations.check(Command, {"batch_size": batch_size, "ranks": ranks}, option)
    if batch_size is not None:
        values["global_batch_size"] = _check_batch_size(
            context, batch_size, ranks, values["num_gpus"]
        )
    settings = declarations.settings(values)
    if ranks is not None and launchers.launched() is not None:
        raise ConfigError(
            f"[train] --ranks {ranks} is given, but the ranks were started already; leave one out"
        )
    return settings


def _check_batch_size(
    context: click.Context, size: int, ranks: int | None, workers: int | None
) -> int:
    """Returns --batch-size as the global batch size.

    Raises ConfigError if there are several workers, because it could also be the size for each
    worker, or if --global-batch-size is given too.
    """
    if context.get_parameter_source("global_batch_size") not in (
        None,
        click.core.ParameterSource.DEFAULT,
    ):
        raise ConfigError(
            "[train] --batch-size and --global-batch-size are both given; leave out --batch-size"
        )
    started = launchers.launched()
    count = (ranks or (started.size if started else 1)) * (workers or 1)
    if count > 1:
        raise ConfigError(
            f"[train] --batch-size {size} on {count} workers is not clear; give "
            f"--global-batch-size {count * size} "
            f"({size} samples on each) or --global-batch-size {size} (over all of them)"
        )
    return size
