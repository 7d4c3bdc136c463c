"""`odyssey generate`: text from a model that `odyssey train --model gpt` or gpt-mini has
trained.
"""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import ConfigError, printable
from . import FILE, HELP, NEWEST


@click.command("generate", short_help="Write text with a trained GPT.", context_settings=HELP)
@click.argument("run", type=FILE)
@click.option("--prompt", default="\n", help="The text to go on from. (default: an empty line)")
@click.option(
    "--tokens", type=click.IntRange(1), default=500, help="How many tokens to write. (default: 500)"
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    help="0: the likeliest token. (default: 0.8)",
)
@click.option(
    "--top-k", type=click.IntRange(1), help="Draw among so many likeliest tokens. (default: all)"
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the draws. (default: 0)"
)
@NEWEST
def command(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    newest: bool,
) -> None:
    """Write the text that a model puts behind a prompt.

    RUN is a checkpoint, or the directory that `odyssey train --run-dir` or --checkpoint-dir wrote.
    Of a directory the best checkpoint is read if one is marked, else the newest valid one. The same
    prompt and seed give the same text.
    """
    from ...data import Vocabulary
    from ...nn import GPT
    from ...train import trained_models

    checkpoint = trained_models.opened(run, best=not newest)
    click.echo(f"odyssey: the model of {printable(checkpoint.name)}", err=True)
    if not isinstance(checkpoint.model, GPT) or checkpoint.vocabulary is None:
        raise ConfigError(
            f"[generate] {printable(checkpoint.name)} is of {type(checkpoint.model).__name__}, "
            "without a vocabulary; give the "
            "directory that odyssey train --model gpt --run-dir DIR wrote"
        )
    vocabulary = Vocabulary.restored(checkpoint.vocabulary, checkpoint.name)
    ids = vocabulary.encode(prompt)
    click.echo(
        vocabulary.decode([*ids, *checkpoint.model.generate(ids, tokens, temperature, top_k, seed)])
    )
