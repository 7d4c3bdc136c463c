"""`odyssey completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from . import HELP

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion", short_help="Completion of commands and options in a shell.", context_settings=HELP
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and their values in a shell.

    \b
    bash  odyssey completion bash > ~/.local/share/bash-completion/completions/odyssey
    zsh   odyssey completion zsh > a folder of $fpath, as _odyssey
    fish  odyssey completion fish > ~/.config/fish/completions/odyssey.fish

    For this shell alone: source <(odyssey completion bash)
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "odyssey", "_ODYSSEY_COMPLETE").source())
