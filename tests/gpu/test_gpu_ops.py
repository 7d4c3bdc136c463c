"""Runs ops.mojo, the kernels for GPUs against those for the CPU, on an emulated GPU."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from odyssey.compile import library as build

# under importmode=importlib a test file does not see its neighbours
sys.path.insert(0, str(Path(__file__).parent))

import emulated  # noqa: E402

HERE = Path(__file__).parent
MOJO = Path(sys.executable).with_name("mojo")
ENVIRONMENT = {
    **os.environ,
    "MODULAR_CRASH_REPORTING_ENABLED": "false",
    "MODULAR_TELEMETRY_ENABLED": "false",
}
SOURCES = [HERE / "lab.mojo", HERE / "ops.mojo", *sorted(HERE.glob("ops_*.mojo"))]


@pytest.fixture(scope="module")
def program() -> Path:
    """The tests, compiled for sm_90; kept in the cache, as that takes longer than to run them."""
    if emulated.compiler() is None:
        pytest.skip("no C compiler for the emulated GPU")
    root = build.source_root()
    key = hashlib.sha256(
        f"{build.source_hash(root)} {build.compiler_version()} {build.host_cpu()}".encode()
    )
    for source in SOURCES:
        key.update(source.read_bytes())
    built = build.cache_dir() / "tests" / f"gpu_ops_{key.hexdigest()[:16]}"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            output = Path(folder, "ops")
            include = ["-I", root / "mojo", "-I", root, "-I", HERE]
            words = [
                MOJO,
                "build",
                "--target-accelerator",
                "sm_90",
                *include,
                HERE / "ops.mojo",
                "-o",
                output,
            ]
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=500, env=ENVIRONMENT
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert "warning:" not in done.stderr, done.stderr
            output.rename(built)
    return built


@pytest.mark.parametrize(
    "mode", [{}, {"late": 1}, {"order": 5}], ids=["in order", "late", "shuffled"]
)
def test_ops(program, mode):
    """In order; with queues that run behind the program; with warps and blocks in another order."""
    environment = emulated.environment(base=ENVIRONMENT, **mode)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    tests = sum(
        len(re.findall(r"^def test_", source.read_text(), re.MULTILINE)) for source in SOURCES
    )
    assert f" {tests} tests run: {tests} passed , 0 failed" in done.stdout, done.stdout
