"""Kernels that a wheel carries: a folder (compile/folder.py) for each CPU, without the package;
for scripts/release.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
from pathlib import Path

from odyssey.compile import compiler, pack, sources
from odyssey.compile import library as build

# What a wheel has kernels for. compiler.host_cpu() says which are taken.
SHIPPED = {
    "linux-x86_64": (
        "x86-64-v3",
        "x86-64-v4",
        "x86-64-v4+avx512bf16",
        "x86-64-v4+avx512bf16+amx-bf16",
    ),
    "linux-aarch64": ("generic",),
}
GLIBC = (2, 34)  # what the wheels of `max` ask for


def ship(output: Path, system: str) -> None:
    """Makes a folder for each CPU of a system that wheels have kernels for, on any machine that
    has the compiler: the bytes depend on sources, compiler and CPU alone.

    output: a directory that is not there. system: one of `SHIPPED`.

    Raises BuildError: it does not compile.
    """
    # a compiler takes some GiB
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda cpu: _ship(output / cpu, system, cpu), SHIPPED[system]))


def _ship(home: Path, system: str, cpu: str) -> None:
    home.mkdir(parents=True)
    root, objects = build.source_root(), home / "objects"
    objects.mkdir()
    triple = f"{system.partition('-')[2]}-unknown-linux-gnu"
    for source in map(Path, sources.roots(sources.read(root, gpu=False))):
        # With several threads the compiler makes one of two objects at random.
        output = objects / f"{source.stem}.o"
        compiler.compile_kernels(root, source, output, cpu, triple=triple, flags=("-j", "1"))
    compiler.link(sorted(objects.iterdir()), home / build.LIBRARY, "--strip-all", apple=False)
    shutil.rmtree(objects)
    pack.seal(home, system, cpu, (), GLIBC)
