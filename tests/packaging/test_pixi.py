"""pixi.toml: its tasks run as pixi would run them, and it says nothing that pyproject.toml contradicts. pixi itself is
not needed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
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
    for name, module in (("odyssey", "odyssey"), ("ruff", "ruff"), ("pytest", "pytest"), ("python", None)):
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
