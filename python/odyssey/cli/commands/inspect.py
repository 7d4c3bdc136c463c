"""`odyssey inspect`: what is in a checkpoint, in all checkpoints of a directory or of a run, and
whether it is intact.

Reads every byte and compares it with its checksum; loads nothing, needs neither kernels nor MPI.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from ...errors import CheckpointError, printable
from . import FILE, HELP, REFUSED

_VALUE_LIMIT = 200  # characters of a value that are printed; --json has all


@click.command("inspect", short_help="Print and verify checkpoints.", context_settings=HELP)
@click.argument("path", type=FILE)
@click.option("--tensors", is_flag=True, help="List the tensors as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with everything.")
@click.option(
    "--key-file",
    type=FILE,
    envvar="ODYSSEY_CHECKPOINT_KEY_FILE",
    help="Refuse what is not signed with the key in this file.",
)
def command(path: Path, tensors: bool, as_json: bool, key_file: Path | None) -> None:
    """Print and verify a checkpoint, or all of a checkpoint directory or run.

    Every checksum is compared. Exit code 0: all are valid; 65: one is refused, or there is none.
    """
    from ...checkpoints import Refused, Store, read_key
    from ...checkpoints.manifest import NAME
    from ...checkpoints.snapshot import step_name

    key = None if key_file is None else read_key(key_file)
    if (path / NAME).is_file() or not path.is_dir():
        checkpoints = [_read_manifest(path, key)]
    else:
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        checkpoints = [
            (checkpoint.path, None, checkpoint.reason)
            if isinstance(checkpoint, Refused)
            else (folder / step_name(checkpoint.step), checkpoint, None)
            for checkpoint in Store(folder, owner=False, key=key).verified()
        ]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "path": str(path),
                    "checkpoints": [_convert_to_json(*checkpoint) for checkpoint in checkpoints],
                },
                indent=1,
            )
        )
    elif not checkpoints:
        click.echo(f"{printable(str(path))}: no checkpoint")
    else:
        for number, checkpoint in enumerate(checkpoints):
            if tensors or len(checkpoints) == 1:
                if number:
                    click.echo()
                _print_details(*checkpoint, tensors=tensors, has_key=key is not None)
            else:
                click.echo(_format_line(*checkpoint))
    if not checkpoints or any(reason is not None for _, _, reason in checkpoints):
        raise click.exceptions.Exit(REFUSED)


def _read_manifest(path: Path, key: bytes | None) -> tuple[Path, Any, str | None]:
    """Verifies a checkpoint.

    Returns (path, manifest, None) if it is valid, (path, None, reason) if it is refused.
    """
    from ...checkpoints.reader import verify

    try:
        return path, verify(path, key, follow=True), None
    except CheckpointError as problem:
        return path, None, str(problem)


def _format_line(path: Path, manifest: Any, reason: str | None) -> str:
    """Returns the line of a checkpoint: its name, whether it is valid, and its size."""
    name = printable(os.path.basename(os.path.abspath(path)))
    if manifest is None:
        return f"{name}  refused: {reason}"
    tensors = sum(len(file.tensors) for file in manifest.files)
    return (
        f"{name}  valid  attempt {manifest.attempt}, {tensors} tensors, {manifest.nbytes:,} bytes"
    )


def _print_details(
    path: Path, manifest: Any, reason: str | None, *, tensors: bool, has_key: bool
) -> None:
    """Prints a checkpoint with its values and files, and each tensor if `tensors` is set."""
    click.echo(_format_line(path, manifest, reason))
    if manifest is None:
        return
    click.echo(f"  step {manifest.step}")
    checked = "yes, with this key" if has_key else "yes, not checked: no key is given"
    click.echo(f"  signed {checked if manifest.signed else 'no'}")
    for name, value in manifest.values.items():
        text = json.dumps(value)
        if len(text) > _VALUE_LIMIT:
            text = text[: _VALUE_LIMIT - 4] + " ..."
        click.echo(f"  {printable(name)} {text}")
    for file in manifest.files:
        click.echo(f"  {file.name}  {len(file.tensors)} tensors, {file.size:,} bytes")
        for tensor, digest in zip(file.tensors, file.digests, strict=True):
            if tensors:
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                click.echo(f"    {tensor.name}  {tensor.dtype} {shape}  sha256 {digest[:16]}")


def _convert_to_json(path: Path, manifest: Any, reason: str | None) -> dict[str, Any]:
    """Returns a checkpoint as JSON values, for --json."""
    if manifest is None:
        return {"path": str(path), "valid": False, "reason": reason}
    files = []
    for file in manifest.files:
        pairs = zip(file.tensors, file.digests, strict=True)
        tensors = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "sha256": digest}
            for tensor, digest in pairs
        ]
        files.append({"name": file.name, "bytes": file.size, "tensors": tensors})
    facts = {"step": manifest.step, "attempt": manifest.attempt, "signed": manifest.signed}
    return {"path": str(path), "valid": True, **facts, "values": manifest.values, "files": files}
