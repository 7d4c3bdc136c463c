"""`odyssey generate`: text from a model that `odyssey train --model gpt` or gpt-mini has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...errors import CheckpointError, OdysseyError, printable
from . import FILE, HELP
from .train import MODEL


@click.command("generate", short_help="Write text with a trained GPT.", context_settings=HELP)
@click.argument("run", type=FILE)
@click.option("--prompt", default="\n", help="The text to go on from. (default: an empty line)")
@click.option("--tokens", type=click.IntRange(1), default=500, help="How many tokens to write. (default: 500)")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.8, help="0 takes the likeliest token each time. (default: 0.8)"
)
@click.option("--top-k", type=click.IntRange(1), help="Draw among so many likeliest tokens. (default: all)")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the draws. (default: 0)")
def command(run: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    """Write the text that a model puts behind a prompt.

    RUN is the directory that `odyssey train --run-dir` or --checkpoint-dir wrote; its newest valid checkpoint is read.
    The same prompt and seed give the same text.
    """
    model, vocabulary = load(run)
    ids = vocabulary.encode(prompt)
    click.echo(vocabulary.decode([*ids, *model.generate(ids, tokens, temperature, top_k, seed)]))


def load(run: Path) -> tuple[Any, Any]:
    """The model of a run with its newest weights, and what its tokens stand for. Raises CheckpointError."""
    from odyssey import data, nn

    from ...checkpoints import Store
    from ...checkpoints.snapshot import step_name
    from ...watch.files import read_json

    try:
        about = read_json(run / MODEL)
        model = nn.models.build(about.pop("model"), **about)
    except (OdysseyError, KeyError, AttributeError, TypeError) as problem:
        raise CheckpointError(
            f"[generate] {printable(str(run))} has no {MODEL} of a GPT ({problem}); give the directory that "
            "odyssey train --model gpt --run-dir DIR wrote"
        ) from None
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    snapshot, refused = Store(folder, owner=False).newest()
    if snapshot is None:
        why = f": {refused[0].reason}" if refused else ""
        raise CheckpointError(f"[generate] {printable(str(folder))} has no valid checkpoint{why}")
    model.load_state_dict(snapshot.arrays["parameters"])
    return model, data.Vocabulary.of_checkpoint(folder / step_name(snapshot.step))
