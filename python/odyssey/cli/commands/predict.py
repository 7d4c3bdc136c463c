"""`odyssey predict`: what the model of a checkpoint says of pictures, or of the rows of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...base import install_extra
from ...errors import ConfigError, DataError, printable
from . import FILE, HELP, OWN_MODEL, on_all_ranks


@click.command("predict", short_help="Predictions for pictures or a table.", context_settings=HELP)
@click.argument("model", type=FILE, metavar="RUN|CHECKPOINT_DIR")
@click.argument("inputs", nargs=-1, required=True, metavar="FILES...")
@click.option(
    "--top", default=1, show_default=True, type=click.IntRange(1), help="Classes that are shown."
)
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per input.")
def command(model: Path, inputs: tuple[str, ...], top: int, own: str | None, as_json: bool) -> None:
    """Print what a model that was trained says of inputs: pictures, a table with a header
    (data.csv), or - for a table on standard input.

    A line per picture or row: classes, each with its probability, or numbers. Under mpirun ranks
    share the inputs.
    """
    import numpy as np

    from ... import comm
    from ...train import trained_models

    with on_all_ranks():
        checkpoint = trained_models.opened(model, trained_models.own_model(own))
        names, samples = _samples(inputs, checkpoint.data)
    world = comm.world(backend="auto")
    batches = trained_models.batches_of_array(
        samples, checkpoint.data.get("scale", 1.0), checkpoint.data.get("shift", 0.0)
    )
    outputs = trained_models.predicted(
        checkpoint.model, batches, world, algorithm=checkpoint.algorithm
    )
    if world.rank:
        return
    classes = checkpoint.data.get("classes")
    for name, y in zip(names, outputs, strict=True):
        if not classes:
            numbers = y.reshape(-1).tolist()
            line: Any = {"input": name, "output": numbers}
            text = " ".join(f"{v:.6g}" for v in numbers)
        else:
            shares = np.exp(y - y.max(), dtype=np.float64)
            shares /= shares.sum()
            best = np.argsort(-shares, kind="stable")[:top].tolist()
            labels = [classes[k] if isinstance(classes, list) else k for k in best]
            line = {
                "input": name,
                "classes": labels,
                "probabilities": [float(shares[k]) for k in best],
            }
            text = "  ".join(
                f"{label} {100 * shares[k]:.2f} %" for label, k in zip(labels, best, strict=True)
            )
        click.echo(json.dumps(line) if as_json else f"{printable(name)}  {printable(text)}")


def _samples(inputs: tuple[str, ...], data: dict[str, Any]) -> tuple[list[str], Any]:
    """The inputs' names, and their pixels or numbers (N, ...), as a data set holds them."""
    shape = data.get("sample_shape")
    tables = [name for name in inputs if name == "-" or name.lower().endswith(".csv")]
    if not shape and not tables:
        raise ConfigError(
            "[predict] the checkpoint does not say what samples are; give a table, or use "
            "odyssey.load()"
        )
    if not tables:
        return list(inputs), _pictures(inputs, shape)
    if len(inputs) > 1:
        raise ConfigError(f"[predict] {tables[0]} is a table; give it alone")
    return _table(tables[0], data, shape)


def _pictures(paths: tuple[str, ...], shape: list[int]) -> Any:
    """Pictures scaled and cut as those of the training, uint8 (N, C, H, W)."""
    import numpy as np

    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ConfigError(
            f"[predict] the model takes samples {tuple(shape)}, which are no pictures; give a table"
        )
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError(f"[predict] images need Pillow; {install_extra('image')}") from None
    pixels = np.empty((len(paths), *shape), np.uint8)
    for index, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                image = ImageOps.fit(
                    image.convert("L" if shape[0] == 1 else "RGB"), (shape[2], shape[1]), 2
                )
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            raise DataError(
                f"{printable(path)} cannot be read as a picture ({problem}); leave it out"
            ) from None
        pixels[index] = (
            np.asarray(image, np.uint8).reshape(shape[1], shape[2], -1).transpose(2, 0, 1)
        )
    return pixels


def _table(path: str, data: dict[str, Any], shape: list[int] | None) -> tuple[list[str], Any]:
    """Rows of a table as samples; columns by the names that they had in the training, where
    those are known.
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
    return [f"line {number}" for number, _ in table.lines], Columns.of_saved(
        data.get("table"), columns
    ).samples(table)
