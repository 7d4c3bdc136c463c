"""A folder for a machine without a compiler, and the identity of the kernels that a visit uses.

DIR/kernels         what `odyssey build --target sm_90 --output DIR/kernels` builds
DIR/programs        the programs of tests/gpu/hopper, compiled
DIR/prepared.json   the commit, and the hash of the sources of the programs
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from .results import ROOT, commit, hash_of

KERNELS = "kernels"
PROGRAMS = "programs"
NOTE = "prepared.json"
HOPPER = ROOT / "tests" / "gpu" / "hopper"
NAMES = ("check", "bits", "bench")


def programs_hash() -> str:
    """The hash of the sources of the programs."""
    return hash_of(HOPPER.glob("*.mojo"))


def compile_program(name: str, target: str, output: Path) -> None:
    """Compiles a program of tests/gpu/hopper.

    Raises RuntimeError with the messages of the compiler.
    """
    mojo = compiler()
    if mojo is None:
        raise RuntimeError("[gpu-check] the Mojo compiler is required; install the package `max`")
    source = HOPPER / f"{name}.mojo"
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        made = Path(folder) / name
        command = [mojo, "build", "--target-accelerator", target, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HOPPER)
        if done.returncode:
            raise RuntimeError(f"[gpu-check] {source.name} does not compile: {done.stderr[-900:]}")
        os.replace(made, output)


def compiler() -> str | None:
    """The path of `mojo`, or None."""
    beside = Path(sys.executable).parent / "mojo"
    return str(beside) if beside.is_file() else shutil.which("mojo")


def prepare(folder: Path, target: str) -> int:
    """Builds the folder. Returns the exit code."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    environment.pop("ODYSSEY_KERNELS", None)
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "odyssey",
        "build",
        "--target",
        target,
        "--output",
        str(folder / KERNELS),
    ]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        return done.returncode
    try:
        for name in NAMES if target.startswith("sm_90") else ():
            compile_program(name, target, folder / PROGRAMS / name)
    except RuntimeError as problem:
        print(problem, file=sys.stderr)
        return 1
    note = {"commit": commit(), "programs": programs_hash()}
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    print(
        f"{folder}: ready for {target}, {note['commit']}. Carry it, and run: scripts/gpu-check "
        f"--prepared {folder}"
    )
    return 0


def note_of(folder: Path | None) -> dict[str, str]:
    """The facts that `prepare` wrote into a folder; none if there is no folder, or no such file."""
    try:
        note = json.loads((folder / NOTE).read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def commit_of(folder: Path | None) -> str:
    """The commit that a folder was prepared from, for a machine without git."""
    return str(note_of(folder).get("commit", "an unknown commit"))


def kernels_hash(environment: Mapping[str, str]) -> str:
    """The identity of the kernels: of the libraries of a folder, or of the sources that are
    compiled here.
    """
    named = environment.get("ODYSSEY_KERNELS")
    if named:
        path = Path(named)
        folder = path if path.is_dir() else path.parent
        return hash_of(folder.glob("libodyssey*.so"))
    try:
        version = metadata.version("mojo-compiler")
    except metadata.PackageNotFoundError:
        version = "unknown"
    sources = hash_of([*(ROOT / "mojo").rglob("*.mojo"), *(ROOT / "shared").rglob("*.mojo")])
    return f"sources {sources}, mojo {version}"
