"""`odyssey export`: the model of a checkpoint for other programs."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from ...errors import ConfigError
from ...watch import outputs
from . import FILE, HELP

FORMATS = ("safetensors", "onnx", "torch")


@click.command("export", short_help="A trained model for other programs.", context_settings=HELP)
@click.argument("model", type=FILE, metavar="RUN|CHECKPOINT_DIR")
@click.option("--format", "kind", required=True, type=click.Choice(FORMATS), help="What is written.")
@click.option("--output", required=True, type=FILE, metavar="FILE", help="Where.")
def command(model: Path, kind: str, output: Path) -> None:
    """Write the model of a checkpoint: its weights by name as safetensors or as a PyTorch state dict, or the whole
    model as ONNX, for samples that are normalised as in the training."""
    from ...train import saved

    outputs.check(output, "--output")
    if kind == "onnx":
        from ...nn import GPT
        from ...nn.export import onnx_model

        found = saved.opened(model)
        shape = found.data.get("sample_shape") or ()
        if not shape and not isinstance(found.model, GPT):
            raise ConfigError("[export] the checkpoint does not say what its samples are; use --format safetensors")
        content = onnx_model(found.model, tuple(shape)).SerializeToString()
        outputs.write(output, "--output", lambda file: file.write(content))
        return
    snapshot, _ = saved.found(model)
    state = {**snapshot.arrays.get("parameters", {}), **snapshot.arrays.get("buffers", {})}
    if kind == "safetensors":
        outputs.write(output, "--output", lambda file: outputs.write_weights(file, state))
        return
    try:
        weights = importlib.import_module("odyssey.torch.weights")  # above the rooms, as all that imports torch
    except ImportError:
        raise ConfigError("[export] --format torch needs PyTorch; install odyssey[torch]") from None
    outputs.write(output, "--output", lambda file: weights.save(state, file))
