"""A stand-in for the kernel sources, small enough to compile in two seconds, and processes that
build it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from odyssey.compile import gpus
from odyssey.compile import library as build

SOURCE = '@export\ndef od_answer() abi("C") -> Int32:\n    return 42\n'
GPU_SOURCE = """
from max.gpu import global_idx
from max.gpu.host import DeviceContext

from kernels.gpu.numbers import double


@export
def od_gpus() abi("C") -> Int:
    return DeviceContext.number_of_devices()


@export
def od_double(address: Int, n: Int) abi("C") -> Int:
    try:
        double(DeviceContext(), address, n)
    except:
        return 1
    return 0
"""
KERNELS = """
from max.gpu import global_idx
from max.gpu.host import DeviceContext

comptime Floats = Pointer[Float32, MutUntrackedOrigin]


def _double(x: Floats, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        x[unsafe_offset=i] = 2 * x[unsafe_offset=i]


def double(q: DeviceContext, address: Int, n: Int) raises:
    q.enqueue_function[_double](Floats(unsafe_from_address=address), Int32(n), grid_dim=(n + 63) // 64, block_dim=64)
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Sources in a directory of their own, an empty cache, an empty temporary directory."""
    root = tmp_path / "sources"
    (root / "mojo").mkdir(parents=True)
    (root / "shared").mkdir()
    (root / "mojo" / "capi.mojo").write_text(SOURCE)
    (tmp_path / "tmp").mkdir()
    for name in (
        "ODYSSEY_KERNELS",
        "ODYSSEY_TARGET_CPU",
        "ODYSSEY_TARGET_ACCELERATOR",
        "XDG_CACHE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "source_root", lambda: root)
    return root


FAMILY = """from kernels.numbers import {name}


@export
def od_{name}() abi("C") -> Int32:
    return {name}()
"""


@pytest.fixture
def family_tree(tree):
    """The same with two families, each with a kernel of its own, and one file that both import."""
    for folder in ("kernels", "families"):
        (tree / "mojo" / folder).mkdir()
    (tree / "mojo" / "kernels" / "__init__.mojo").touch()
    (tree / "mojo" / "kernels" / "both.mojo").write_text("comptime TEN: Int32 = 10\n")
    for number, name in enumerate(("one", "two"), 1):
        kernel = f"from .both import TEN\n\n\ndef {name}() -> Int32:\n    return TEN + {number}\n"
        (tree / "mojo" / "kernels" / f"{name}.mojo").write_text(kernel)
        text = FAMILY.format(name=name).replace("kernels.numbers", f"kernels.{name}")
        (tree / "mojo" / "families" / f"{name}.mojo").write_text(text)
    return tree


@pytest.fixture
def gpu_tree(tree):
    """The same with a kernel for GPUs."""
    (tree / "mojo" / "kernels" / "gpu").mkdir(parents=True)
    for folder in ("kernels", "kernels/gpu"):
        (tree / "mojo" / folder / "__init__.mojo").touch()
    (tree / "mojo" / "kernels" / "gpu" / "numbers.mojo").write_text(KERNELS)
    (tree / "mojo" / "gpu_capi.mojo").write_text(GPU_SOURCE)
    return tree


@pytest.fixture
def no_gpus(monkeypatch):
    """A machine without GPUs, whatever this one is."""
    monkeypatch.delenv("ODYSSEY_TARGET_ACCELERATOR", raising=False)
    monkeypatch.setattr(gpus, "found", lambda: ())


@pytest.fixture
def entries(tmp_path):
    """What is in the cache, without the lock files and the parts of libraries."""

    def names():
        found = (
            path for path in (tmp_path / "cache" / "kernels").glob("*") if path.suffix != ".lock"
        )
        return sorted(path.name for path in found if not (path / "part.o").exists())

    return names


@pytest.fixture
def start(tree):
    """Start a process that asks for the library of the stand-in; `compiler` replaces the
    compiler's command, `linker` the function that links.
    """
    running = []

    def run(
        compiler: str | None = None, linker: str | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        script = (
            "import sys; from pathlib import Path; from odyssey.compile import compiler, "
            "library as build\n"
        )
        script += f"build.source_root = lambda: Path({str(tree)!r})\n"
        if compiler is not None:
            script += f"compiler.mojo_command = lambda: [sys.executable, '-c', {compiler!r}]\n"
            if linker is not None:
                script += f"compiler.link = {linker}\n"
        script += "try: print(build.library_path())\nexcept build.BuildError as error: sys.exit(f'BuildError {error}')\n"
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[2]), **environment},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()
