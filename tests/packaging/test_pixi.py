"""pixi.toml: its tasks run as pixi would run them, and it says nothing that pyproject.toml
contradicts. pixi itself is not needed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def task(tmp_path):
    """`pixi run NAME ARGUMENTS`: the task's shell command, with the arguments behind it."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (
        ("odyssey", "odyssey"),
        ("ruff", "ruff"),
        ("pytest", "pytest"),
        ("python", None),
    ):
        start = f'"{sys.executable}"' + (f" -m {module}" if module else "")
        (commands / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (commands / name).chmod(0o755)

    def run(name, *arguments, **environment):
        paths = {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "python"),
            "RUFF_NO_CACHE": "true",
        }
        return subprocess.run(
            " ".join([PIXI["tasks"][name], *map(shlex.quote, arguments)]),
            shell=True,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, **paths, **environment},
        )

    return run


def test_train_takes_arguments(task):
    done = task("train", "--num-gpus", "4", "--help")
    assert done.returncode == 0
    assert "--num-gpus" in done.stdout
    done = task("train", "--num-gpus", "0")
    assert done.returncode == 64
    assert "--num-gpus is 0" in done.stderr


def test_verify_takes_arguments(task):
    done = task("verify", "--layouts", "workers=2", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 1 layouts give the bits of one process"


def test_build(task, tmp_path):
    """Ends with the library's path. It is compiled for this machine, unless the cache has it."""
    done = task("build")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("libodyssey.so\n")


def test_lint(task):
    done = task("lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_test_and_bench_start(task):
    assert task("test", "--version").returncode == 0
    done = task("bench", "--help")
    assert done.returncode == 0, done.stderr


def test_dependencies_are_those_of_pyproject():
    assert PIXI["workspace"]["name"] == PROJECT["name"]
    own = PIXI["pypi-dependencies"]
    assert set(own) == {PROJECT["name"]}  # everything else comes through it: one place for versions
    assert own[PROJECT["name"]]["path"] == "." and own[PROJECT["name"]]["editable"] is True
    assert set(own[PROJECT["name"]]["extras"]) <= set(PROJECT["optional-dependencies"])
    assert set(PIXI["dependencies"]) == {"python"}


def test_python_floor_and_ceiling():
    """The floor is the project's; the ceiling is that of the pinned max."""
    from importlib import metadata

    floor, ceiling = PIXI["dependencies"]["python"].split(",")
    assert floor == PROJECT["requires-python"]
    assert ceiling in metadata.metadata("max")["Requires-Python"].split(",")


def test_the_pinned_max_is_the_installed_one():
    from importlib import metadata

    assert f"max=={metadata.version('max')}" in PROJECT["dependencies"]


def test_platforms_have_a_kernel_target():
    assert set(PIXI["workspace"]["platforms"]) == {"linux-64", "linux-aarch64", "osx-arm64"}


def test_the_c_library_that_max_needs_is_declared():
    """Wheels of max are for glibc 2.34 (manylinux_2_34); pixi resolves for 2.28 where nothing is
    said.
    """
    tags = distribution("max-core").read_text("WHEEL")
    found = re.search(r"manylinux_2_(\d+)_", tags)
    assert found, tags
    libc = PIXI["system-requirements"]["libc"]
    assert libc["family"] == "glibc" and libc["version"] == f"2.{found[1]}"


# -- what pixi resolves, by uv, which pixi uses for packages of Python -----------------------------

UV = shutil.which(
    "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
)
LIBC = PIXI["system-requirements"]["libc"]["version"]
PLATFORMS = {
    "linux-64": "x86_64-manylinux_{}",
    "linux-aarch64": "aarch64-manylinux_{}",
    "osx-arm64": "aarch64-apple-darwin",
}
OLDEST, NEWEST = "3.10", "3.14"  # of the range of `python`


def resolved(platform: str, libc: str, python: str) -> subprocess.CompletedProcess[str]:
    """What uv makes of the package with pixi's extras on a platform; of wheels alone where they
    depend on it.
    """
    extras = [f"--extra={name}" for name in PIXI["pypi-dependencies"][PROJECT["name"]]["extras"]]
    where = [
        "--python-platform",
        PLATFORMS[platform].format(libc.replace(".", "_")),
        "--python-version",
        python,
    ]
    words = [
        UV,
        "pip",
        "compile",
        "-q",
        "--no-header",
        "--only-binary",
        "max",
        *extras,
        *where,
        "pyproject.toml",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip("no registry of packages can be reached")
    return done


uv = pytest.mark.skipif(UV is None, reason="uv is not installed (extra [release])")


def test_every_python_in_the_range_is_meant():
    floor, ceiling = PIXI["dependencies"]["python"].split(",")
    major, minor = NEWEST.split(".")
    assert floor == f">={OLDEST}" and ceiling == f"<{major}.{int(minor) + 1}"
    assert set(PLATFORMS) == set(PIXI["workspace"]["platforms"])


@uv
@pytest.mark.parametrize("python", [OLDEST, NEWEST])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_declared_can_be_resolved(platform, python):
    done = resolved(platform, LIBC, python)
    assert done.returncode == 0, done.stderr
    assert next(d for d in PROJECT["dependencies"] if d.startswith("max=")) in done.stdout.split()


@uv
def test_without_the_declared_c_library_it_cannot():
    """A bare linux-64 means glibc 2.28."""
    done = resolved("linux-64", "2.28", OLDEST)
    assert done.returncode != 0 and f"manylinux_{LIBC.replace('.', '_')}" in done.stderr
