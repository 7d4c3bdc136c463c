"""The Mojo sources of the libraries: read once, as bytes by name, and what of them a root file
imports.

Everything later - the keys of the cache, what the compiler is given - is of these bytes: whatever
an editor does to the files while they are compiled, what is kept under a key is what the key says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

FOLDER = "mojo"  # `shared/` is of Mojo programs, and libraries are made without it
ROOT = f"{FOLDER}/capi.mojo"
FAMILIES = f"{FOLDER}/families/"  # root files beside it: kernels that are compiled together
GPU_ROOT = f"{FOLDER}/gpu_capi.mojo"

_IMPORT = re.compile(r"^[ \t]*(?:from\s+([.\w]+)\s+)?import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def read(root: Path, gpu: bool = True) -> dict[str, bytes]:
    """All Mojo files under `mojo/`, as bytes by their names below `root`, in the names' order;
    gpu False: without those that are for GPUs alone, a folder `gpu` and files `gpu_*`.
    """
    paths = {path.relative_to(root).as_posix(): path for path in (root / FOLDER).rglob("*.mojo")}
    return {name: paths[name].read_bytes() for name in sorted(paths) if gpu or not for_gpus(name)}


def for_gpus(name: str) -> bool:
    """True if a source such as "mojo/kernels/gpu/pool.mojo" is for GPUs alone, by its name."""
    return re.search(r"/gpu[/_.]", f"/{name}") is not None


def digest(texts: Mapping[str, bytes]) -> str:
    """SHA-256 over names and bytes."""
    sha256 = hashlib.sha256()
    for name in sorted(texts):
        sha256.update(b"%d %d\n" % (len(name.encode()), len(texts[name])))
        sha256.update(name.encode())
        sha256.update(texts[name])
    return sha256.hexdigest()


def roots(texts: Mapping[str, bytes], gpu: bool = False) -> tuple[str, ...]:
    """The files that are compiled, each by itself, and linked to a library."""
    return (
        (GPU_ROOT,)
        if gpu
        else (ROOT, *(name for name in sorted(texts) if name.startswith(FAMILIES)))
    )


def imported(texts: Mapping[str, bytes], root: str) -> dict[str, bytes]:
    """Returns what a root file imports, directly or not, itself included.

    It may be more, such as a word that stands behind an `import` in a text, and it is never less
    without an error: the compiler is given nothing else.
    """
    imported_texts: dict[str, bytes] = {}
    pending = [root]
    while pending:
        name = pending.pop()
        if name in texts and name not in imported_texts:
            imported_texts[name] = texts[name]
            pending += _imports(name, texts[name].decode(errors="replace"))
    return imported_texts


def _imports(name: str, text: str) -> list[str]:
    """The files that a file may import, by names that need not exist."""
    paths = []
    for package, import_list in _IMPORT.findall(re.sub(r"#.*", "", text)):
        modules = re.findall(r"[.\w]+", import_list)
        if package:  # a name that is imported from it may be a module, or not
            dot = "" if package.endswith(".") else "."
            modules = [package, *(package + dot + module for module in modules)]
        for module in modules:
            dots = len(module) - len(module.lstrip("."))
            place = PurePosixPath(name).parents[dots - 1] if dots else PurePosixPath(FOLDER)
            for part in module.lstrip(".").split("."):
                place /= part
                paths += [f"{place}.mojo", f"{place}/__init__.mojo"]
    return paths
