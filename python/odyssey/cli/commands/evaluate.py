"""`odyssey evaluate`: loss and metrics of the model of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...settings.recipes import DATASETS
from . import FILE, HELP, NEWEST, OWN_MODEL, DataSet, on_all_ranks


@click.command("evaluate", short_help="Loss and metrics of a model.", context_settings=HELP)
@click.argument("model", type=FILE, metavar="RUN|CHECKPOINT_DIR")
@click.option(
    "--dataset", type=DataSet(DATASETS), help="The data set. (default: that of the training)"
)
@click.option("--data-dir", type=FILE, help="Where its files are. (default: where they were)")
@click.option("--train", "training", is_flag=True, help="Its training part, not its test part.")
@click.option(
    "--metrics",
    metavar="NAME,...",
    help="What is measured beside the loss, as of odyssey train. (default: as in the training)",
)
@NEWEST
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: Path,
    dataset: str | None,
    data_dir: Path | None,
    training: bool,
    metrics: str | None,
    newest: bool,
    own_model: str | None,
    as_json: bool,
) -> None:
    """Print the loss and metrics of a model on the test set of its training, or on another.

    Of a run it is the best checkpoint, if one is marked, else the newest. Under mpirun ranks share
    the work: the same bits.
    """
    from ... import data, optim
    from ...train import trained_models
    from ...train.progress import format_figure
    from ...train.trainer import DistributedTrainer

    with on_all_ranks():
        dataset, data_dir = DataSet.parted("evaluate", dataset, data_dir)
        checkpoint = trained_models.opened(
            model, trained_models.own_model(own_model), best=not newest
        )
        test = trained_models.samples(checkpoint, dataset, data_dir, training)
    loss = trained_models.loss_of(checkpoint)
    # of PyTorch's there is no program
    execution = "eager" if hasattr(checkpoint.model, "wrapped") else "replay"
    settings: dict[str, Any] = {
        "loss": loss,
        "conv_algorithm": checkpoint.algorithm,
        "execution": execution,
    }
    if metrics is not None:
        settings["metrics"] = [name.strip() for name in metrics.split(",")]
    elif checkpoint.data.get("metrics"):
        settings["metrics"] = checkpoint.data["metrics"]
    trainer = DistributedTrainer(checkpoint.model, optim.SGD(lr=1.0), **settings)
    result = trainer.evaluate(data.DataLoader(test, batch_size=1024))
    if trainer.comm.rank:
        return
    results = {**result.metrics, **(test.bits(result.loss) if hasattr(test, "bits") else {})}
    if as_json:
        click.echo(
            json.dumps({"checkpoint": checkpoint.name, "samples": result.samples, **results})
        )
    else:
        figures = "  ".join(f"{key} {format_figure(value)}" for key, value in results.items())
        click.echo(f"{checkpoint.name}: {figures}  {result.samples:,} samples")
