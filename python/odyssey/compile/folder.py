"""Folders with odyssey and its compiled kernels for machines without the compiler: what is in
one, and its checks.

    <folder>/odyssey                  a launcher: `<folder>/odyssey train` and all other commands
    <folder>/manifest.json            versions, targets, and the SHA-256 of every file
    <folder>/libodyssey.so            the kernels for the CPU
    <folder>/libodyssey-sm_90.so      those for a kind of GPU, one file for each
    <folder>/lib/                     the compiler's run-time libraries
    <folder>/python/                  the package, with the Mojo sources in it as in a wheel
    <folder>/site/                    Python packages that it needs, if they were asked for

`ODYSSEY_KERNELS=<folder>` has the libraries used by whatever odyssey runs, if its sources are the
same. The digests find what was torn or altered by accident; whoever can write to the folder can
write the manifest too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from odyssey.errors import BuildError, DataError

from ..base.files import JSON_LIMIT, parse_json
from . import compiler

MANIFEST = "manifest.json"
FORMAT = 1


def library_name(accelerator: str | None) -> str:
    """The file of the kernels for an accelerator, or for the CPU."""
    return f"libodyssey-{accelerator}.so" if accelerator else "libodyssey.so"


def system() -> str:
    """Returns what a library is for besides the CPU's features: such as "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine()}"


class PackManifest(NamedTuple):
    """Manifest of a folder.

    Attributes:
        odyssey, compiler: versions. system, cpu, accelerators: what its libraries are for. sources:
        SHA-256 of the Mojo sources (library.source_hash). glibc: the oldest that the libraries run
        with, () if unknown. files: size in bytes and SHA-256 by name, "/" between folders.
    """

    odyssey: str
    compiler: str
    system: str
    cpu: str
    sources: str
    accelerators: tuple[str, ...]
    glibc: tuple[int, ...]
    files: dict[str, tuple[int, str]]

    def json(self) -> dict[str, Any]:
        """Returns it as the file holds it."""
        files = {
            name: {"bytes": size, "sha256": digest}
            for name, (size, digest) in sorted(self.files.items())
        }
        lists = {
            "accelerators": list(self.accelerators),
            "glibc": ".".join(map(str, self.glibc)),
            "files": files,
        }
        return {"format": FORMAT, **self._asdict(), **lists}


def is_folder(path: Path) -> bool:
    """Returns whether a directory has a manifest."""
    return (path / MANIFEST).is_file()


def read(home: Path) -> PackManifest:
    """The manifest of a folder. Raises BuildError: there is none that this version reads."""
    try:
        with open(home / MANIFEST, "rb") as file:
            value = parse_json(file.read(JSON_LIMIT + 1), MANIFEST)
    except (OSError, DataError) as problem:
        raise _refused(home, f"{MANIFEST} cannot be read ({type(problem).__name__})") from problem
    number = value.get("format") if isinstance(value, dict) else None
    if type(number) is int and number != FORMAT:
        raise BuildError(
            f"[build] {home} is refused: it has format {number}, and {FORMAT} is read; build it "
            "again"
        )
    try:
        texts = [value[name] for name in PackManifest._fields[:5]]
        accelerators = value["accelerators"]
        well_formed = type(number) is int and isinstance(accelerators, list)
        if not well_formed or not all(isinstance(text, str) for text in (*texts, *accelerators)):
            raise TypeError
        glibc = tuple(int(part) for part in value["glibc"].split(".") if part)
        files = {
            _name(name): (int(entry["bytes"]), entry["sha256"])
            for name, entry in value["files"].items()
        }
        return PackManifest(*texts, tuple(accelerators), glibc, files)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _refused(home, f"{MANIFEST} is not one that `odyssey build` writes") from problem


def library(home: Path, accelerator: str | None, sources: str | None) -> Path:
    """A library of a folder, after everything that can be wrong with it here has been looked at.

    accelerator: of the GPU; None: of the CPU. sources: SHA-256 of the Mojo sources of the running
    odyssey, if any.

    Raises BuildError: it is for another machine or another version, or a file is not as it was
    written.
    """
    manifest = read(home)
    host_system = system()
    if manifest.system != host_system:
        raise _refused(
            home,
            f"it is for {manifest.system}, and this is {host_system}",
            "build one on such a machine",
        )
    if lacking := compiler.lacking(manifest.cpu):
        reason = f"it is for {manifest.cpu}, and this CPU has no {', '.join(lacking)}"
        raise _refused(home, reason, f"build one with --target-cpu {compiler.host_cpu()}")
    if (host_glibc := _glibc()) and host_glibc < manifest.glibc:
        versions = (".".join(map(str, version)) for version in (manifest.glibc, host_glibc))
        raise _refused(
            home, "it needs glibc {} and this system has {}".format(*versions), "use a newer system"
        )
    if sources is not None and sources != manifest.sources:
        reason = (
            f"it is of odyssey {manifest.odyssey} with other kernel sources than the odyssey "
            "that runs"
        )
        raise _refused(home, reason, f"start {home / 'odyssey'}, or build it again")
    if accelerator is not None and accelerator not in manifest.accelerators:
        kinds = ", ".join(manifest.accelerators) or "no GPU"
        raise _refused(
            home,
            f"it is for {kinds}, not for {accelerator}",
            f"build one with --target {accelerator}",
        )
    name = library_name(accelerator)
    if name not in manifest.files:
        raise _refused(home, f"{MANIFEST} does not name {name}")
    names = [name]
    # what is used along with it; all at the first library that is asked for
    if accelerator is None:
        names += [file for file in manifest.files if file.startswith("lib/")]
        # the odyssey that runs is its own
        if Path(__file__).resolve().is_relative_to((home / "python").resolve()):
            names += [
                file
                for file in manifest.files
                if file.startswith("python/") and file.endswith(".py")
            ]
    verify(home, manifest, names)
    return home / name


def verify(home: Path, manifest: PackManifest, names: Iterable[str]) -> None:
    """Raises BuildError unless these files are as they were written."""
    for name in names:
        try:
            with open(home / name, "rb") as file:
                fault = damage(file, *manifest.files[name])
        except OSError as problem:
            raise _refused(home, f"{name} cannot be read: {problem.strerror}") from problem
        if fault:
            raise _refused(home, f"{name} {fault}")


def damage(file: BinaryIO, size: int, digest: str) -> str | None:
    """Returns what an open file is not, that once had `size` bytes with this SHA-256; None if it
    is as it was.
    """
    if os.fstat(file.fileno()).st_size != size:
        return f"has not the {size} bytes that it had"
    if hashlib.sha256(file.read(size + 1)).hexdigest() != digest:
        return "does not match its SHA-256"
    return None


def _refused(
    home: Path, reason: str, advice: str = "copy the folder again, or build it again"
) -> BuildError:
    return BuildError(f"[build] {home} is refused: {reason}; {advice}")


def _glibc() -> tuple[int, ...]:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
        return tuple(map(int, text.split()[1].split(".")))
    except (AttributeError, ValueError, IndexError, OSError):
        return ()


def _name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(name)
    return name
