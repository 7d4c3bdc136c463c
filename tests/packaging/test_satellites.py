"""Satellites can be deleted: in a copy of the package without one, or without any, the core's
unit tests pass.

Of the tests, those are left out that name what was deleted. With one satellite gone a sample of the
files is run, with all of them gone every file (long).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "odyssey"
SATELLITES = {path.parent.name for path in PACKAGE.glob("*/provides.json")} - {
    "audit",
    "inexact",
} | {"mojo"}
BESIDE = {
    "torch": ["python/odyssey/horovod", "python/odyssey/ray.py", "python/odyssey_c10d.py"],
    "mojo": ["shared"],
}
SAMPLE = [f"tests/python/test_{name}.py" for name in "modules optim settings".split()]


def without(satellites: set[str], tmp_path: Path) -> Path:
    """A copy of the repository's package without these folders; the rest of the repository is
    linked.
    """
    gone = {f"python/odyssey/{name}" for name in satellites}
    gone.update(path for name in satellites for path in BESIDE.get(name, []))

    def left_out(folder: str, names: list[str]) -> set[str]:
        here = Path(folder).relative_to(ROOT)
        return {name for name in names if name == "__pycache__" or (here / name).as_posix() in gone}

    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=left_out)
    for path in ROOT.iterdir():
        if path.name not in {"python", ".git", *gone}:
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def named(satellites: set[str]) -> re.Pattern[str]:
    """What of a satellite a test may name: its modules, names, commands and back ends."""
    words = [
        rf"odyssey\.{name}\b|odyssey/{name}\b|odyssey import [^\n]*\b{name}\b"
        for name in satellites
    ]
    for name in satellites & {path.parent.name for path in PACKAGE.glob("*/provides.json")}:
        provided = json.loads((PACKAGE / name / "provides.json").read_text())
        for kind in provided.values():
            words += [
                rf"(?<![\w./]){word}\b" for word in kind if word not in ("torch", "horovod", "ray")
            ]
    if "torch" in satellites:
        words += [r"import torch|importorskip\(.torch", r"odyssey\.(horovod|ray)"]
    if "view" in satellites:
        words += ["profile=", "journal"]
    return re.compile("|".join(words))


def unit_tests_pass(copy: Path, files: list[str], satellites: set[str]) -> str:
    """The last line of pytest's report. Fails: a test of these files failed, or none was run."""
    pattern = named(satellites)
    kept = [file for file in files if not pattern.search((ROOT / file).read_text())]
    assert len(kept) >= len(files) / 2, (
        f"{len(kept)} of {len(files)} files name nothing of {satellites}"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["-m", "pytest", "-q", "-x", "-n", "2", "-m", "unit", "-p", "no:cacheprovider", *kept]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("satellite", sorted(SATELLITES))
def test_the_core_does_not_miss(satellite, tmp_path):
    copy = without({satellite}, tmp_path)
    code = (
        "import odyssey.train.trainer, odyssey.cli, sys; print(odyssey.__file__, "
        "[*odyssey.cli.COMMANDS])"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy / "python")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(copy)) and "'train'" in done.stdout, done.stderr
    assert "passed" in unit_tests_pass(copy, SAMPLE, {satellite})


@pytest.mark.long
def test_the_core_misses_none_of_them(tmp_path):
    copy = without(SATELLITES, tmp_path)
    folders = "python parallel data kernels steplog resume checkpoints".split()
    files = [
        path.relative_to(ROOT).as_posix()
        for f in folders
        for path in sorted(ROOT.glob(f"tests/{f}/test_*.py"))
    ]
    files = [
        file for file in files if Path(file).name not in ("test_layers.py", "test_measures.py")
    ]
    assert "passed" in unit_tests_pass(copy, files, SATELLITES)
