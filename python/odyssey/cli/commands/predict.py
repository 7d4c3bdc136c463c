"""`odyssey predict`: prints what the model of a checkpoint predicts for images or table rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...base import expand_path, install_extra
from ...errors import ConfigError, DataError, printable
from . import FILE, HELP, NEWEST, OWN_MODEL, on_all_ranks

if TYPE_CHECKING:
    import numpy as np


@click.command("predict", short_help="Predictions for pictures or a table.", context_settings=HELP)
@click.argument("model", type=FILE, metavar="RUN|CHECKPOINT_DIR")
@click.argument("inputs", nargs=-1, required=True, metavar="FILES...")
@click.option(
    "--top", default=1, show_default=True, type=click.IntRange(1), help="Classes that are shown."
)
@NEWEST
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per input.")
def command(
    model: Path,
    inputs: tuple[str, ...],
    top: int,
    newest: bool,
    own_model: str | None,
    as_json: bool,
) -> None:
    """Print what a model that was trained says of inputs: pictures, a table with a header
    (data.csv), or - for a table on standard input.

    A line per picture or row: classes, each with its probability, or numbers. Of a run the best
    checkpoint predicts, if one is marked, else the newest. Under mpirun ranks share the inputs.
    """
    import numpy as np

    from ... import comm
    from ...train import trained_models

    # Every rank reads all inputs, so every rank raises the same errors, and one rank prints them.
    with on_all_ranks():
        checkpoint = trained_models.opened(
            model, trained_models.own_model(own_model), best=not newest
        )
        names, samples = _read_samples(inputs, checkpoint.data)
    world = comm.world(backend="auto")
    batches = trained_models.batches_of_array(
        samples, checkpoint.data.get("scale", 1.0), checkpoint.data.get("shift", 0.0)
    )
    outputs = trained_models.predicted(
        checkpoint.model, batches, world, algorithm=checkpoint.algorithm
    )
    if world.rank:
        return
    click.echo(f"odyssey: the model of {printable(checkpoint.name)}", err=True)
    # A list of names, a number of classes, or None if the model doesn't classify.
    classes = checkpoint.data.get("classes")
    for name, output in zip(names, outputs, strict=True):
        if not classes:
            numbers = output.reshape(-1).tolist()
            record: dict[str, Any] = {"input": name, "output": numbers}
            text = " ".join(f"{number:.6g}" for number in numbers)
        else:
            # The softmax of the outputs.
            probabilities = np.exp(output - output.max(), dtype=np.float64)
            probabilities /= probabilities.sum()
            best_classes = np.argsort(-probabilities, kind="stable")[:top].tolist()
            best_probabilities = [float(probabilities[k]) for k in best_classes]
            labels = [classes[k] if isinstance(classes, list) else k for k in best_classes]
            record = {"input": name, "classes": labels, "probabilities": best_probabilities}
            text = "  ".join(
                f"{label} {100 * probability:.2f} %"
                for label, probability in zip(labels, best_probabilities, strict=True)
            )
        click.echo(json.dumps(record) if as_json else f"{printable(name)}  {printable(text)}")


def _read_samples(inputs: tuple[str, ...], data: dict[str, Any]) -> tuple[list[str], np.ndarray]:
    """Reads images or one table as samples for the model.

    Args:
        inputs: paths of images, or one path of a table. "-" is a table on standard input.
        data: the description of the training data that the checkpoint holds.

    Returns:
        A name for each sample, and the samples (N, ...): uint8 pixels or float32 numbers.

    Raises:
        ConfigError: the shape of a sample is unknown, or a table comes with other inputs.
        DataError: a file cannot be read, or doesn't fit the model.
    """
    shape = data.get("sample_shape")
    tables = [name for name in inputs if name == "-" or name.lower().endswith(".csv")]
    if not shape and not tables:
        raise ConfigError(
            "[predict] the checkpoint does not say what samples are; give a table, or use "
            "odyssey.load()"
        )
    if not tables:
        return list(inputs), _read_images(inputs, shape)
    if len(inputs) > 1:
        raise ConfigError(f"[predict] {tables[0]} is a table; give it alone")
    return _read_table(tables[0], data, shape)


def _read_images(paths: tuple[str, ...], shape: list[int]) -> np.ndarray:
    """Reads image files as uint8 pixels (N, C, H, W).

    Each image is scaled until it covers the size of a sample, and the excess is cut off at both
    ends. `data.ImageFolder` reads images in the same way for training.

    Args:
        paths: the image files.
        shape: the shape of a sample (C, H, W). C is 1 (grey) or 3 (RGB).

    Raises:
        ConfigError: the model doesn't take images, or Pillow is missing.
        DataError: a file is not a readable image.
    """
    import numpy as np

    from ...data.images import read_image

    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ConfigError(
            f"[predict] the model takes samples {tuple(shape)}, which are no pictures; give a table"
        )
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(f"[predict] images need Pillow; {install_extra('image')}") from None
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    return np.stack([read_image(str(expand_path(path)), (width, height), mode) for path in paths])


def _read_table(
    path: str, data: dict[str, Any], shape: list[int] | None
) -> tuple[list[str], np.ndarray]:
    """Reads the rows of a table as samples.

    Columns are found by the names that they had in training. A checkpoint without names of columns
    takes all columns of the table, in their order.

    Args:
        path: the table, or "-" for standard input.
        data: the description of the training data that the checkpoint holds.
        shape: the shape of a sample, if the checkpoint holds it.

    Returns:
        The name "line N" of each row, and the samples (N, F), float32.

    Raises:
        DataError: the model doesn't take rows, or the columns or fields don't fit it.
    """
    from ...data.tables import Columns, Table

    table = Table(path)
    columns = data.get("columns") or table.header
    shape = shape or [len(columns)]
    if len(shape) != 1:
        raise DataError(
            f"{table.path} is a table, and the model takes samples {tuple(shape)}; give pictures"
        )
    if not data.get("columns") and len(columns) != shape[0]:
        reason = f"has {len(columns)} columns, the model takes {shape[0]}"
        raise DataError(f"{table.path} {reason}; its columns are {', '.join(columns)}")
    row_names = [f"line {number}" for number, _ in table.lines]
    trained_columns = Columns.of_saved(data.get("table"), columns)
    return row_names, trained_columns.samples(table)
