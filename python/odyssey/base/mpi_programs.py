"""The MPI library that mpi4py loads in this environment, and the mpirun that belongs to it.

A machine often has several: the one of a cluster's module, a distribution's, and the one of a wheel
in the environment. Ranks that the mpirun of another library starts don't see each other. So
`odyssey launch`, `odyssey verify`, `odyssey doctor` and the messages of ranks all ask here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .launcher import mpi_library

MPICH = "mpich"
OPEN_MPI = "openmpi"
KINDS = {"MPICH": MPICH, "Open MPI": OPEN_MPI}
ANSWER_S = 30.0

# The program of a process that loads the library as a rank would, and doesn't start MPI. Nothing
# of the current directory stands in for a module.
_LOAD = """
import sys
sys.path = [path for path in sys.path if path]
from mpi4py import rc
rc.initialize = rc.finalize = False
from mpi4py import MPI
from odyssey.base.proc import mpi_file
print(MPI.Get_library_version().split("\\n", 1)[0].replace("\\0", ""))
print(mpi_file())
"""


class Library(NamedTuple):
    """An MPI library: its name and version as "MPICH 5.0.2", and its file, "" if unknown."""

    name: str
    path: str = ""

    @property
    def kind(self) -> str:
        """Returns "mpich" or "openmpi"; "" for another library."""
        return next((kind for name, kind in KINDS.items() if self.name.startswith(name)), "")


class Mpirun(NamedTuple):
    """A program that starts ranks: "mpich" or "openmpi" ("" for another), its path and version."""

    kind: str
    path: str
    version: str

    def starts(self, library: Library | None) -> bool:
        """Returns whether ranks with this library see each other; True if that is unknown."""
        return library is None or not library.kind or library.kind == self.kind


def loaded_library(environment: Mapping[str, str] = os.environ) -> Library | None:
    """Returns the library that mpi4py loads in a process with this environment; None if there is
    no mpi4py, or it finds no library.
    """
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [environment.get("PYTHONPATH")])]
    answer = _answer([sys.executable, "-c", _LOAD], environment, {"PYTHONPATH": ":".join(paths)})
    lines = answer.splitlines()
    return Library(mpi_library(lines[0]), lines[1]) if len(lines) == 2 else None


def identify(path: str, environment: Mapping[str, str] = os.environ) -> Mpirun:
    """Returns whose launcher a program is, by what it prints for --version."""
    lines = [line.strip() for line in _answer([path, "--version"], environment).splitlines()]
    if lines and ("Open MPI" in lines[0] or "OpenRTE" in lines[0]):
        return Mpirun(OPEN_MPI, path, f"Open MPI {lines[0].split()[-1]}")
    for line in lines:
        if line.startswith("Version:"):
            return Mpirun(MPICH, path, f"MPICH {line.split()[-1]}")
    return Mpirun("", path, "")


def find_mpirun(
    library: Library | None, environment: Mapping[str, str] = os.environ
) -> tuple[Mpirun | None, list[Mpirun]]:
    """Returns the mpirun that starts ranks with a library, and those that do not.

    It is the one of the library's own folder, otherwise one of the same version, otherwise one of
    the same maker. Places are the library's folder, the one of this Python, and PATH. Without a
    library it is the first that answers as MPICH's or Open MPI's.
    """
    unusable: list[Mpirun] = []
    usable: list[Mpirun] = []
    for path in _candidates(library, environment):
        program = identify(path, environment)
        if not program.kind or not program.starts(library):
            unusable.append(program)
        elif library is None or not library.kind or program.version == library.name:
            return program, unusable
        else:
            usable.append(program)
    return (usable[0] if usable else None), unusable


def advice(library: Library) -> str:
    """Returns what starts ranks with this library, for a message."""
    mpirun, _ = find_mpirun(library)
    return f"use {mpirun.path}" if mpirun else f"load the mpirun of {library.name}"


def _candidates(library: Library | None, environment: Mapping[str, str]) -> Iterator[str]:
    """Yields programs that may start ranks, each once, the likeliest first."""
    folders = [Path(sys.executable).parent]
    if library is not None and library.path:
        above = Path(library.path).resolve().parents
        folders[:0] = [folder / "bin" for folder in above if folder != folder.parent]
    folders += [Path(name) for name in environment.get("PATH", os.defpath).split(os.pathsep)]
    kind = library.kind if library is not None else ""
    # Debian's names, as several libraries share /usr/bin there
    names = [f"mpirun.{kind}"] * bool(kind) + ["mpirun"]
    yielded: set[str] = set()
    for folder, name in itertools.product(folders, names):
        path = shutil.which(name, path=str(folder)) if str(folder) else None
        if path is not None and os.path.realpath(path) not in yielded:
            yielded.add(os.path.realpath(path))
            yield path


def _answer(
    words: list[str], environment: Mapping[str, str], variables: Mapping[str, str] | None = None
) -> str:
    """Returns what a command prints on standard output; "" if it can't be started or fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(
            words,
            env={**environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
        )
        if not result.returncode:
            return result.stdout
    return ""
