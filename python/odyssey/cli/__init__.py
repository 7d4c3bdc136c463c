"""The command line: it finds a command of odyssey/cli/commands, runs it, and ends the process.

An error becomes one line and an exit code, and ends the other ranks too. There is no training logic
here. Heavy imports are inside the commands, so `--help` and a mistyped option answer at once.

Exit codes: 0, 1 verify found a difference, 64 usage, 65 data, 69 unavailable, 70 defect, 73 output,
75 stopped on request, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from .. import __version__
from ..base import files, launcher, outputs
from ..errors import LINE, CollectiveError, OdysseyError, OutputError, near, printable
from .commands import COMMANDS, HELP

USAGE = 64
DEFECT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Commands(click.Group):
    """The group of commands. It imports the module of a command when the command is used."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            return importlib.import_module(COMMANDS[name]).command
        return super().get_command(context, name)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # as git and pip have it: `odyssey help launch`
            args = [*args[1:2], "--help"]
        return super().parse_args(context, args)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            suggestions = near(args[0], COMMANDS)
            hint = (
                f"; did you mean {' or '.join(suggestions)}?"
                if suggestions
                else f"; choose from {', '.join(COMMANDS)}"
            )
            context.fail(f"No such command '{printable(args[0], limit=60)}'{hint}")
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        # click would end with 1, the exit code of a difference.
        except BrokenPipeError as problem:
            outputs.drop()
            raise outputs.ReaderGone from problem


@click.group(cls=_Commands, context_settings=HELP, invoke_without_command=True)
@click.version_option(
    __version__,
    "--version",
    "-V",
    message="odyssey %(version)s",
    help="Print the version and exit.",
)
@click.pass_context
def group(context: click.Context) -> None:
    """Train neural nets: Mojo kernels, Python, MPI. The same bits on any number of workers."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(
    arguments: Sequence[str] | None = None,
    prog_name: str = "odyssey",
    command: click.Command = group,
) -> NoReturn:
    """Runs a command and ends the process with its exit code."""
    outputs.open_streams()
    if line := launcher.leave_job_of_parent():
        print(f"odyssey: {line}", file=sys.stderr)
    sys.exit(_run_command(command, arguments, prog_name))


def _run_command(command: click.Command, arguments: Sequence[str] | None, prog_name: str) -> int:
    """Runs a command, reports its error if it raises one, and returns the exit code."""
    try:
        code = command.main(arguments, prog_name=prog_name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except OdysseyError as error:
        line = printable(f"error: {error}", keep="\n\t" if error.lines else "", limit=LINE)
        on_all_ranks = error.raised_on_all_ranks
        return _end(
            error.exit_code,
            line,
            on_all_ranks=on_all_ranks,
            late=isinstance(error, CollectiveError),
        )
    except click.ClickException as error:
        _suggest_ranks(error)
        text = printable(" ".join(error.format_message().split()).rstrip("."), limit=LINE)
        context = getattr(error, "ctx", None)
        name = context.command_path if context else prog_name
        return _end(USAGE, f"error: {text} (see `{name} --help`)", on_all_ranks=True)
    except (click.Abort, KeyboardInterrupt):
        return _end(INTERRUPTED, "interrupted")
    except outputs.ReaderGone:
        return _end(BROKEN_PIPE, None)
    except Exception as error:
        if isinstance(error, OSError) and (reason := _explain_write_error(error)):
            return _end(
                OutputError.exit_code,
                f"error: [output] standard output cannot be written: {reason}",
            )
        if isinstance(error, FileNotFoundError) and not files.current_directory():
            return _end(USAGE, f"error: {files.NO_DIRECTORY}", on_all_ranks=True)
        import traceback

        text = printable(traceback.format_exc(), keep="\n\t")
        return _end(
            DEFECT, printable(f"defect: {type(error).__name__}: {error}", limit=LINE), text=text
        )


def _suggest_ranks(error: click.ClickException) -> None:
    """Lets an error about another launcher's option suggest -n, if the command has it."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        name = error.option_name.partition("=")[0].lstrip("-").replace("-", "_")
        has_ranks = any("-n" in parameter.opts for parameter in error.ctx.command.params)
        if has_ranks and name in ("nproc_per_node", "nproc", "num_processes", "np"):
            error.possibilities = ["-n"]


def _explain_write_error(error: OSError) -> str:
    """Returns the reason why standard output cannot be written.

    "" if it can be written, so the error comes from somewhere else.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # Without a buffer, click.echo itself fails. With one, flushing shows whether it fails.
    if traceback is None or traceback.tb_frame.f_code is not click.echo.__code__:
        try:
            sys.stdout.flush()
            return ""
        except OSError as problem:
            error = problem
    outputs.drop()
    return error.strerror or str(error)


def _end(
    code: int, line: str | None, *, text: str = "", on_all_ranks: bool = False, late: bool = False
) -> int:
    """Prints the line, and ends the other ranks, which may be waiting for this one.

    See base/exits.py for the arguments. Returns the exit code.
    """
    if "odyssey.train.completion" in sys.modules:
        sys.modules["odyssey.train.completion"].incomplete()
    from ..base import exits

    comm = sys.modules.get("odyssey.comm")
    world = None if comm is None else comm.met()  # all processes of this run, if they have met
    return exits.end(
        code,
        line,
        text=text,
        on_all_ranks=on_all_ranks,
        late=late and not on_all_ranks,
        world=world,
    )
