"""`odyssey build`: kernels compiled before they are needed, folders for machines without the
compiler.
"""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import ConfigError
from . import FILE, HELP


@click.command(
    "build",
    short_help="Compile the kernels, or make a folder for machines without a compiler.",
    context_settings=HELP,
)
@click.option(
    "--target-cpu",
    metavar="CPU",
    help="Compile for this CPU. (default: the features of this machine's; with --output "
    "x86-64-v3 on x86)",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="GPU",
    help="Compile for this kind of GPU too, such as sm_90 or gfx942; several times for several. "
    "(default: none)",
)
@click.option(
    "--output",
    type=FILE,
    metavar="DIR",
    help="Make a folder for machines without the compiler: kernels, run-time libraries, this "
    "package, and a launcher "
    "DIR/odyssey. ODYSSEY_KERNELS=DIR uses its kernels in another odyssey. (default: into the "
    "cache only)",
)
@click.option(
    "--with-dependencies",
    is_flag=True,
    help="Put click, rich and safetensors into DIR too. (default: off)",
)
def command(
    target_cpu: str | None, targets: tuple[str, ...], output: Path | None, with_dependencies: bool
) -> None:
    """Compile the kernels now, instead of at first use, and print where the library is."""
    from ...compile import gpus
    from ...compile import library as build

    if output is None:
        if with_dependencies:
            raise ConfigError("[build] --with-dependencies belongs to --output DIR")
        click.echo(build.cached_library(target_cpu))
        for name in targets:
            click.echo(build.cached_library(target_cpu, gpus.canonical(name)))
        return
    from ...compile.pack import pack

    manifest = pack(
        output, target_cpu=target_cpu, accelerators=targets, dependencies=with_dependencies
    )
    size = sum(size for size, _ in manifest.files.values())
    click.echo(f"odyssey: {size / 2**20:.1f} MiB in {len(manifest.files)} files", err=True)
    click.echo(output.absolute())
