"""Makes the folders of folder.py: odyssey, its kernels and what they need, for machines without the compiler; and those
with kernels alone that a wheel carries."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import odyssey
from odyssey.errors import BuildError, OutputError

from ..watch.files import exchange
from . import compiler, elf, folder, gpus
from . import library as build

# What odyssey imports besides numpy and mpi4py, which are compiled for a version of Python and bring an MPI: click for
# every command, rich for a terminal, safetensors to write weights.
DEPENDENCIES = ("click", "rich", "markdown-it-py", "mdurl", "pygments", "safetensors")
# What a system with glibc and a C++ program has.
_SYSTEM = frozenset(
    "libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libstdc++.so.6 libgcc_s.so.1 ld-linux-x86-64.so.2 "
    "ld-linux-aarch64.so.1".split()
)

_LAUNCHER = """\
#!/bin/sh
# Runs odyssey from this folder with its compiled kernels. ODYSSEY_PYTHON names the Python, 3.10 or newer.
home=$(dirname "$(readlink -f "$0")")
export ODYSSEY_KERNELS="$home"
export PYTHONPATH="$home/python:$home/site${PYTHONPATH:+:$PYTHONPATH}"
exec "${ODYSSEY_PYTHON:-python3}" -m odyssey "$@"
"""


class Packed(NamedTuple):
    """What was made. sizes: bytes of kernels, run-time libraries, package, dependencies."""

    path: Path
    files: int
    sizes: dict[str, int]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())


def pack(
    output: Path, *, target_cpu: str | None = None, accelerators: Sequence[str] = (), dependencies: bool = False
) -> Packed:
    """Makes a folder, or makes it again.

    Args:
        output: a directory that is not there, is empty, or is a folder that this has made and nothing was put into.
        target_cpu: what the kernels for the CPU are compiled for. Default: compiler.portable_cpu().
        accelerators: the kinds of GPUs. dependencies: copy the packages of `DEPENDENCIES` too.

    Raises BuildError: something does not compile, or a package is not installed here. OutputError: the folder cannot be
    written, or holds something else.
    """
    output = output.absolute()
    names = list(dict.fromkeys(gpus.canonical(name) for name in accelerators))
    _usable(output)
    cpu = target_cpu or compiler.portable_cpu()
    libraries = [build.cached_library(cpu), *(build.cached_library(cpu, name) for name in names)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.tmp-", dir=output.parent))
        try:
            aside.chmod(0o755)
            glibc = _libraries(libraries, aside)
            _package(aside / "python")
            if dependencies:
                _dependencies(aside / "site")
            (aside / "odyssey").write_text(_LAUNCHER)
            (aside / "odyssey").chmod(0o755)
            versions = odyssey.__version__, build.compiler_version(), folder.system()
            sources, digests = build.source_hash(build.source_root()), dict(_digests(aside))
            manifest = folder.Manifest(*versions, cpu, tuple(names), sources, glibc, digests)
            (aside / folder.MANIFEST).write_text(json.dumps(manifest.json(), indent=1) + "\n")
            _put(aside, output)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as problem:
        what = f"{output} cannot be written: {problem.strerror}"
        raise OutputError(f"[build] {what}; choose another --output") from problem
    return Packed(output, len(manifest.files) + 1, _sizes(manifest))


def _usable(output: Path) -> None:
    """Raises OutputError if there is anything at `output` that would be lost."""

    def refused(why: str, advice: str = "choose another --output, or empty it") -> OutputError:
        return OutputError(f"[build] {output} is refused: {why}; {advice}")

    if not output.is_dir():
        if os.path.lexists(output):
            raise refused("it is no directory", "choose another --output")
        return
    if not folder.is_folder(output):
        if os.listdir(output):
            raise refused("it is not empty and not a folder of odyssey's")
        return
    try:
        known = {*folder.read(output).files, folder.MANIFEST}
    except BuildError as problem:
        raise refused(f"its {folder.MANIFEST} is unreadable") from problem
    for name in _names(output):
        if name not in known:
            raise refused(f"{name} was put into it")


def _put(aside: Path, output: Path) -> None:
    """Gives the folder its name; what had it is at `aside` then. A process that uses that keeps its open files."""
    if output.is_symlink():
        output.unlink()
    if output.exists():
        exchange(aside, output, aside.with_name(f"{aside.name}.old"))
    else:
        os.rename(aside, output)


def _libraries(libraries: Iterable[Path], target: Path) -> tuple[int, ...]:
    """Copies the kernels, and of the compiler's run-time libraries those that they need, directly or not; the glibc
    that all of them need."""
    (target / "lib").mkdir()
    open_ = [(path, target / path.name) for path in libraries]
    runtime = build.runtime_libraries()
    open_ += [(path, target / "lib" / path.name) for path in runtime]
    done: set[str] = set()
    glibc: tuple[int, ...] = ()
    while open_:
        source, copy = open_.pop()
        if source.name in done:
            continue
        done.add(source.name)
        shutil.copyfile(source, copy)
        copy.chmod(0o755)
        _strip(copy)
        if not elf.is_elf(copy):  # macOS: the run-time libraries name each other by their install names
            open_ += [(path, target / "lib" / path.name) for path in runtime[0].parent.glob("lib*Globals.dylib")]
            continue
        try:
            needs = elf.read(copy)
        except ValueError as problem:
            raise BuildError(f"[build] {problem}") from problem
        glibc = max(glibc, elf.newest(needs.versions))
        for name in needs.needed:
            beside = runtime[0].parent / name
            if beside.is_file():
                open_.append((beside, target / "lib" / name))
            elif name not in _SYSTEM:
                what = f"{source.name} needs {name}, which is neither the compiler's nor the system's"
                raise BuildError(f"[build] {what}")
    return glibc


def _strip(library: Path) -> None:
    """Removes what only a linker or a debugger reads, where there is a tool for it."""
    strip = shutil.which("strip")
    if strip and elf.is_elf(library):
        command = [strip, "--strip-unneeded", str(library)]  # where it fails, the library is as it was
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)


# -- for wheels -------------------------------------------------------------------------------------------------------

# What a wheel has kernels for. compiler.host_cpu() says which are taken.
SHIPPED = {
    "linux-x86_64": ("x86-64-v3", "x86-64-v4", "x86-64-v4+avx512bf16", "x86-64-v4+avx512bf16+amx-bf16"),
    "linux-aarch64": ("generic",),
}
GLIBC = (2, 34)  # what the wheels of `max` ask for
# The compiler writes where a source lies into what it makes: with one place for all, one source has one library.
_PLACE = Path("/tmp/odyssey-kernels")


def ship(output: Path, system: str) -> None:
    """Makes a folder for each CPU of a system that wheels have kernels for, on any machine that has the compiler: it is
    linked with the compiler's own linker, and the bytes depend on sources, compiler and CPU alone.

    output: a directory that is not there. system: one of `SHIPPED`.

    Raises BuildError: it does not compile, or another process is at it.
    """
    root = build.source_root()
    try:
        _PLACE.mkdir(mode=0o700)
    except FileExistsError as problem:
        why = f"{_PLACE} is there: wheels are being built on this machine, or a build was killed"
        raise BuildError(f"[build] {why}; wait, or remove it") from problem
    try:
        for top in build.SOURCE_DIRS:
            shutil.copytree(root / top, _PLACE / top)
        with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:  # a compiler takes some GiB
            list(pool.map(lambda cpu: _ship(output / cpu, system, cpu), SHIPPED[system]))
    finally:
        shutil.rmtree(_PLACE)


def _ship(home: Path, system: str, cpu: str) -> None:
    home.mkdir(parents=True)
    library, code = home / build.LIBRARY, home / "kernels.o"
    triple = f"{system.partition('-')[2]}-unknown-linux-gnu"
    # With several threads the compiler makes one of two libraries at random.
    compiler.compile_kernels(_PLACE, build.ROOT_SOURCE, code, cpu, emit="object", triple=triple, flags=("-j", "1"))
    # What is not defined is found at run time: the run-time libraries and the C library are there before it is loaded.
    linker = next((root / "bin" / "lld" for root in compiler.sdk_roots() if (root / "bin" / "lld").is_file()), None)
    if linker is None:
        raise BuildError("[build] the compiler's linker, lld, is not installed in this environment; pip install max")
    command = [linker, "-flavor", "gnu", "-shared", "--strip-all", f"-soname={build.LIBRARY}", "-o", library, code]
    done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"[build] the kernels for {cpu} cannot be linked: {done.stderr.strip()}")
    code.unlink()
    versions, sources = (odyssey.__version__, build.compiler_version(), system), build.source_hash(_PLACE)
    manifest = folder.Manifest(*versions, cpu, (), sources, GLIBC, dict(_digests(home)))
    (home / folder.MANIFEST).write_text(json.dumps(manifest.json(), indent=1) + "\n")


def _package(target: Path) -> None:
    """Copies the package that runs, with the Mojo sources and its version where a wheel has them."""
    package = Path(odyssey.__file__).resolve().parent
    for name in _names(package):
        if not name.startswith(("_mojo/", "_kernels/")) and not name.endswith((".so", ".pyc")):
            _copy(package / name, target / "odyssey" / name)
    root = build.source_root()
    for top in build.SOURCE_DIRS:
        for path in sorted((root / top).rglob("*.mojo")):
            _copy(path, target / "odyssey" / "_mojo" / path.relative_to(root))
    info = target / f"odyssey-{odyssey.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: odyssey\nVersion: {odyssey.__version__}\n")


def _dependencies(target: Path) -> None:
    for name in DEPENDENCIES:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError as problem:
            raise BuildError(f"[build] the package {name} is not installed here; pip install {name}") from problem
        for file in files:
            if ".." in file.parts or "__pycache__" in file.parts or file.name == "direct_url.json":
                continue  # scripts, what Python writes itself, and where it was installed from
            if file.suffix == ".so" and ".abi3." not in file.name:
                raise BuildError(f"[build] the package {name} has {file}, which is for one version of Python alone")
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


def _digests(home: Path) -> Iterator[tuple[str, tuple[int, str]]]:
    for name in _names(home):
        data = (home / name).read_bytes()
        yield name, (len(data), hashlib.sha256(data).hexdigest())


def _sizes(manifest: folder.Manifest) -> dict[str, int]:
    sizes = dict.fromkeys(("kernels", "run-time libraries", "package", "dependencies"), 0)
    for name, (size, _) in manifest.files.items():
        kind = {"lib": "run-time libraries", "site": "dependencies"}.get(name.partition("/")[0], "package")
        sizes["kernels" if "/" not in name and name.endswith(".so") else kind] += size
    return sizes
