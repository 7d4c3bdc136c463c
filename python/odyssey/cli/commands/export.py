"""`odyssey export`: the model of a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from ...base import outputs
from ...errors import printable
from ...settings.recipes import FORMATS
from . import FILE, HELP, NEWEST, OWN_MODEL


@click.command("export", short_help="A trained model for other programs.", context_settings=HELP)
@click.argument("model", type=FILE, metavar="RUN|CHECKPOINT_DIR")
@click.option(
    "--format", "kind", required=True, type=click.Choice(FORMATS), help="What is written."
)
@click.option("--output", required=True, type=FILE, metavar="FILE", help="Where.")
@NEWEST
@OWN_MODEL
def command(model: Path, kind: str, output: Path, newest: bool, own_model: str | None) -> None:
    """Write the model of a checkpoint: its weights by name as safetensors or as a PyTorch state
    dict, or the whole model as ONNX. Of a table ONNX takes the columns as they are; of images it
    takes samples that are normalised as in the training.

    Of a run it is the best checkpoint, if one is marked, else the newest.
    """
    from ...train import trained_models

    outputs.check(output, "--output")
    content, name = trained_models.exported(
        model, kind, trained_models.own_model(own_model), best=not newest
    )
    click.echo(f"odyssey: the model of {printable(name)}", err=True)
    outputs.write(output, "--output", lambda file: file.write(content))
