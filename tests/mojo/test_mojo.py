"""Runs the Mojo tests next to this file, and checks that all Mojo sources are formatted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey.compile import library as build

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import check_targets as targets  # noqa: E402

HERE = Path(__file__).parent
ROOT = build.source_root()
MOJO = Path(sys.executable).with_name("mojo")
ENVIRONMENT = {
    **os.environ,
    "MODULAR_CRASH_REPORTING_ENABLED": "false",
    "MODULAR_TELEMETRY_ENABLED": "false",
}


def mojo(*arguments: object, **settings) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in (MOJO, *arguments)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, **settings
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("test_*.mojo")))
def test_in_mojo(name):
    """With all internal checks on. The program prints what failed and ends with 1."""
    include = ["-I", ROOT / "mojo", "-I", ROOT, "-I", HERE]
    done = mojo("run", "-D", "ASSERT=all", *include, HERE / f"{name}.mojo")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "PASS" in done.stdout and " 0 failed" in done.stdout, done.stdout
    assert "warning:" not in done.stderr, done.stderr


def test_all_sources_are_formatted(tmp_path):
    """What `mojo format` makes of a copy is the original."""
    repository = HERE.parents[1]
    folders = [
        f
        for f in ("mojo", "shared", "examples", "tests", "benchmarks")
        if (repository / f).is_dir()
    ]
    files = sorted(
        p.relative_to(repository) for f in folders for p in (repository / f).rglob("*.mojo")
    )
    assert len(files) > 20
    for file in (*files, "pyproject.toml"):  # which has the length of lines
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / file, tmp_path / file)
    done = mojo("format", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    changed = [
        str(f) for f in files if (tmp_path / f).read_bytes() != (repository / f).read_bytes()
    ]
    assert not changed, f"run: mojo format {' '.join(changed)}"


def test_the_kernels_compile_for_every_supported_cpu():
    lines: list[str] = []
    assert targets.check_cpus(lines.append) == 0, "\n".join(lines)
    names = [line.split("  ")[0] for line in lines]
    x86 = [
        "x86-64",
        "x86-64-v3",
        "x86-64-v4",
        "x86-64-v4+avx512bf16",
        "x86-64-v4+avx512bf16+amx-bf16",
    ]
    assert names == [*x86, "aarch64 generic"]
