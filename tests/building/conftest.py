"""A stand-in for the kernel sources, small enough to compile in two seconds, and processes that build it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from odyssey import build

SOURCE = '@export\ndef od_answer() abi("C") -> Int32:\n    return 42\n'


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Sources in a directory of their own, an empty cache, an empty temporary directory."""
    root = tmp_path / "sources"
    (root / "mojo").mkdir(parents=True)
    (root / "shared").mkdir()
    (root / "mojo" / "capi.mojo").write_text(SOURCE)
    (tmp_path / "tmp").mkdir()
    for name in ("ODYSSEY_KERNELS", "ODYSSEY_TARGET_CPU", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "source_root", lambda: root)
    return root


@pytest.fixture
def entries(tmp_path):
    """What is in the cache, without the lock files."""

    def names():
        kernels = tmp_path / "cache" / "kernels"
        return sorted(path.name for path in kernels.iterdir() if path.suffix != ".lock") if kernels.exists() else []

    return names


@pytest.fixture
def start(tree):
    """Start a process that asks for the library of the stand-in; `compiler` replaces the compiler's command."""
    running = []

    def run(compiler: str | None = None, **environment: str) -> subprocess.Popen[str]:
        script = "import sys; from pathlib import Path; from odyssey import build\n"
        script += f"build.source_root = lambda: Path({str(tree)!r})\n"
        if compiler is not None:
            script += f"build._mojo_command = lambda: [sys.executable, '-c', {compiler!r}]\n"
        script += (
            "try: print(build.library_path())\nexcept build.BuildError as error: sys.exit(f'BuildError {error}')\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[1]), **environment},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()
