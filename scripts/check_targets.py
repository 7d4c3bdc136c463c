#!/usr/bin/env python3
"""Compiles the kernels for every CPU that they are written for, or with --accelerators for the
GPUs, and keeps nothing.

CPUs to object files, GPUs to the code of each kernel; a line for each. Ends with 1 if one does not
compile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from odyssey.compile import compiler, sources  # noqa: E402
from odyssey.compile import library as build  # noqa: E402
from odyssey.errors import BuildError  # noqa: E402

# (triple, CPU)
CPUS: tuple[tuple[str, str], ...] = (
    ("x86_64-unknown-linux-gnu", "x86-64"),
    ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4+avx512bf16"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4+avx512bf16+amx-bf16"),
    ("aarch64-unknown-linux-gnu", "generic"),
)
ACCELERATORS = ("sm_90", "sm_80", "gfx942")


def check_cpus(report: Callable[[str], None]) -> int:
    """Compiles the kernels to object files for every CPU of `CPUS`, one reported line each; how
    many failed.
    """
    names = [
        cpu if cpu.startswith("x86") else f"{triple.partition('-')[0]} {cpu}"
        for triple, cpu in CPUS
    ]

    def compile_for(number: int, home: Path) -> None:
        triple, cpu = CPUS[number]
        root = build.source_root()
        for n, source in enumerate(sources.roots(sources.read(root, gpu=False))):
            compiler.compile_kernels(root, Path(source), home / f"{n}.o", cpu, triple=triple)

    return _check(report, names, compile_for)


def check_accelerators(
    report: Callable[[str], None], accelerators: Sequence[str] = ACCELERATORS
) -> int:
    """Compiles the GPU kernels for each accelerator, one reported line each; how many failed."""

    def compile_for(number: int, home: Path) -> None:
        compiler.check_accelerator(name := accelerators[number])
        source, cpu = Path(sources.GPU_ROOT), compiler.portable_cpu()
        compiler.compile_kernels(
            build.source_root(), source, home / "gpu.s", cpu, emit="asm", accelerator=name
        )

    return _check(report, accelerators, compile_for)


def _check(
    report: Callable[[str], None], names: Sequence[str], compile_for: Callable[[int, Path], None]
) -> int:
    """Compiles as many at a time as there are cores, at most 2: a compiler takes some GiB."""

    def one(number: int) -> str:
        home = Path(directory) / str(number)
        home.mkdir()
        start = time.perf_counter()
        try:
            compile_for(number, home)
        except BuildError as error:
            return f"failed: {error}"
        size = sum(path.stat().st_size for path in home.iterdir())
        return f"{time.perf_counter() - start:6.1f} s  {size / 1024:8.0f} KiB"

    failures = 0
    with tempfile.TemporaryDirectory(prefix="odyssey-targets-") as directory:
        with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            for name, line in zip(names, pool.map(one, range(len(names))), strict=True):
                failures += line.startswith("failed")
                report(f"{name:<22} {line}")
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerators", action="store_true", help="for the GPUs instead")
    check = check_accelerators if parser.parse_args().accelerators else check_cpus
    sys.exit(check(print) > 0)
