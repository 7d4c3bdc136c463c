"""The kernels of narrower processors: other register tiles, and on the oldest no FMA, against
the same references.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from odyssey.compile import library as build

LEVELS = [
    "x86-64",
    "x86-64-v3",
    "x86-64-v4",
    "x86-64-v4+avx512bf16",
    "x86-64-v4+avx512bf16+amx-bf16",
]
HOST = build.host_cpu()


@pytest.mark.parametrize("cpu", LEVELS[: LEVELS.index(HOST)] if HOST in LEVELS else [])
def test_ops_compiled_for(launch, cpu):
    launch.environment["ODYSSEY_TARGET_CPU"] = cpu
    here = Path(__file__).parent
    files = [
        here / name
        for name in ("test_ops.py", "test_precision.py", "test_random.py", "test_optimizers.py")
    ]
    done = launch.python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        *files,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
