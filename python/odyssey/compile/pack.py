"""Makes the folders of folder.py: odyssey, its kernels and what they need, for machines without
the compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import odyssey
from odyssey.errors import BuildError, OutputError

from ..base.files import exchange
from ..base.requirements import DISTRIBUTION, FILE_NAME, install_packages
from . import compiler, folder, gpus
from . import library as build

# What odyssey imports besides numpy and mpi4py, which are compiled for a version of Python and
# bring an MPI: click for every command, rich for a terminal, safetensors to write weights.
DEPENDENCIES = ("click", "rich", "markdown-it-py", "mdurl", "pygments", "safetensors")
_LAUNCHER = """\
#!/bin/sh
# Runs odyssey from this folder with its compiled kernels. ODYSSEY_PYTHON names the Python,
# 3.10 or newer.
home=$(dirname "$(readlink -f "$0")")
export ODYSSEY_KERNELS="$home"
export PYTHONPATH="$home/python:$home/site${PYTHONPATH:+:$PYTHONPATH}"
exec "${ODYSSEY_PYTHON:-python3}" -m odyssey "$@"
"""


def pack(
    output: Path,
    *,
    target_cpu: str | None = None,
    accelerators: Sequence[str] = (),
    dependencies: bool = False,
) -> folder.PackManifest:
    """Makes a folder, or makes it again; returns what is in it.

    Args:
        output: a directory that is not there, is empty, or is a folder that this has made and
            nothing was put into.
        target_cpu: what the kernels for the CPU are compiled for. Default: compiler.portable_cpu().
        accelerators: the kinds of GPUs. dependencies: copy the packages of `DEPENDENCIES` too.

    Raises BuildError: something does not compile, or a package is not installed here. OutputError:
    the folder cannot be written, or holds something else.
    """
    output = output.absolute()
    names = list(dict.fromkeys(gpus.canonical(name) for name in accelerators))
    _check_output(output)
    cpu = target_cpu or compiler.portable_cpu()
    libraries = [build.cached_library(cpu), *(build.cached_library(cpu, name) for name in names)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{output.name}.tmp-"
        parent = output.parent
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=parent, ignore_cleanup_errors=True
        ) as aside:
            (staging := Path(aside) / "made").mkdir()
            glibc = _libraries(libraries, staging)
            _package(staging / "python")
            if dependencies:
                _dependencies(staging / "site")
            (staging / "odyssey").write_text(_LAUNCHER)
            (staging / "odyssey").chmod(0o755)
            manifest = seal(staging, folder.system(), cpu, names, glibc)
            _move_into_place(staging, output)
    except OSError as problem:
        reason = f"{output} cannot be written: {problem.strerror}"
        raise OutputError(f"[build] {reason}; choose another --output") from problem
    return manifest


def seal(
    home: Path, system: str, cpu: str, accelerators: Sequence[str], glibc: tuple[int, ...]
) -> folder.PackManifest:
    """Writes the manifest of a folder that has all its files; the arguments are the manifest's."""
    texts = (
        odyssey.__version__,
        build.compiler_version(),
        system,
        cpu,
        build.source_hash(build.source_root()),
    )
    files = {}
    for name in _names(home):
        data = (home / name).read_bytes()
        files[name] = len(data), hashlib.sha256(data).hexdigest()
    manifest = folder.PackManifest(*texts, tuple(accelerators), glibc, files)
    (home / folder.MANIFEST).write_text(json.dumps(manifest.json(), indent=1) + "\n")
    return manifest


def _check_output(output: Path) -> None:
    """Raises OutputError if there is anything at `output` that would be lost."""

    def refusal(reason: str, advice: str = "choose another --output") -> OutputError:
        return OutputError(f"[build] {output} is refused: {reason}; {advice}")

    if not output.is_dir():
        if os.path.lexists(output):
            raise refusal("it is not a directory")
        return
    if not folder.is_folder(output):
        if os.listdir(output):
            raise refusal("it is not empty and not a folder of odyssey's")
        return
    try:
        packed_names = {*folder.read(output).files, folder.MANIFEST}
    except BuildError as problem:
        raise refusal(f"its {folder.MANIFEST} is unreadable") from problem
    for name in _names(output):
        if name not in packed_names:
            raise refusal(f"{name} was put into it")


def _move_into_place(staging: Path, output: Path) -> None:
    """Gives the folder its name; what had it is at `staging` then.

    A process that uses that keeps its open files.
    """
    if output.is_symlink():
        output.unlink()
    if output.exists():
        exchange(staging, output, staging.with_name("old"))
    else:
        os.rename(staging, output)


def _libraries(libraries: Iterable[Path], target: Path) -> tuple[int, ...]:
    """Copies the kernels and the run-time libraries that are loaded with them; returns the glibc
    that all need.
    """
    (target / "lib").mkdir()
    runtime = build.runtime_libraries()
    runtime += runtime[0].parent.glob(f"lib*Globals{runtime[0].suffix}")  # which those need
    copies = [(path, target / path.name) for path in libraries]
    copies += [(path, target / "lib" / path.name) for path in runtime]
    strip = shutil.which("strip")
    glibc = ()
    for source, copy in copies:
        shutil.copyfile(source, copy)
        copy.chmod(0o755)
        # what only a linker or a debugger reads; where it fails, it is as it was
        if strip and copy.suffix == ".so":
            command = [strip, "--strip-unneeded", str(copy)]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
        glibc = max(glibc, newest_glibc(copy.read_bytes()))
    return glibc


def newest_glibc(library: bytes) -> tuple[int, ...]:
    """The highest version of glibc that a library names among the versions of symbols, such as
    (2, 34); () if none.
    """
    versions = re.findall(rb"\0GLIBC_(\d+(?:\.\d+)*)(?=\0)", library)
    return max((tuple(map(int, version.split(b"."))) for version in versions), default=())


def _package(target: Path) -> None:
    """Copies the package that runs, with the Mojo sources and its version where a wheel has
    them.
    """
    package = Path(odyssey.__file__).resolve().parent
    for name in _names(package):
        if not name.startswith(("_mojo/", "_kernels/")) and not name.endswith((".so", ".pyc")):
            _copy(package / name, target / "odyssey" / name)
    root = build.source_root()
    for top in ("mojo", "shared"):
        for path in sorted((root / top).rglob("*.mojo")):
            _copy(path, target / "odyssey" / "_mojo" / path.relative_to(root))
    info = target / f"{FILE_NAME}-{odyssey.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {odyssey.__version__}\n"
    )


def _dependencies(target: Path) -> None:
    for name in DEPENDENCIES:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError as problem:
            raise BuildError(
                f"[build] the package {name} is not installed here; {install_packages([name])}"
            ) from problem
        for file in files:
            if ".." in file.parts or "__pycache__" in file.parts or file.name == "direct_url.json":
                continue  # scripts, what Python writes itself, and where it was installed from
            if file.suffix == ".so" and ".abi3." not in file.name:
                raise BuildError(
                    f"[build] the package {name} has {file}, which is for one version of Python "
                    "alone"
                )
            _copy(Path(str(file.locate())), target / file)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _names(home: Path) -> Iterator[str]:
    """Files below a directory, with "/", without what Python writes there itself."""
    for place, folders, files in os.walk(home):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            yield (Path(place) / name).relative_to(home).as_posix()
