"""Ops of a user's own: `load_ops("my_ops.mojo")` compiles them into the cache and adds them to
the table.

The file declares ops as those of this package are declared (mojo/kernels/op.mojo): a function
`ops[D: Device]()` that returns their list. From then on their records run as any others, replayed
natively, and on a GPU too. What it is not: the Python side of an op, its shape rule and derivative
(functional.unary, or a function like those in functional.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..base.paths import expand_path
from ..compile import gpus
from ..compile import library as build
from ..errors import BuildError, ConfigError
from . import native

_ROOT = """from kernels.lanes import BytePtr, LongPtr
from kernels.op import addresses, describe
from {where} import {device}
from own import ops


@export
def odyssey_own_ops() abi("C") -> Int:
    return len(ops[{device}]())


@export
def odyssey_own_op(op: Int, text: BytePtr, size: Int) abi("C") -> Int:
    return describe(ops[{device}](), op, text, size)


@export
def odyssey_own_kernels() abi("C") -> LongPtr:
    return addresses(ops[{device}]())
"""
_loaded: dict[Path, tuple[str, ...]] = {}  # names of the ops of each file


def load_ops(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Compiles a file of ops, unless it has been on this machine, and adds them to the table.

    Call it on every rank, before a model is trained, in the same order. A file that is loaded is
    left as it is.

    path: a Mojo file with `def ops[D: Device]() -> List[OpOf[D.Run]]`.

    Returns the names of its ops.

    Raises ConfigError: there is no such file; an op's name is taken. BuildError: it does not
    compile.
    """
    file = expand_path(path).resolve()
    if file in _loaded:
        return _loaded[file]
    if not file.is_file():
        raise ConfigError(f"[ops] there is no file {path}; give the path of a .mojo file")
    names = tuple(op.name for op in native.library().add(_compiled(file), "odyssey_own"))
    _loaded[file] = names
    from . import gpu_native as gpu

    if gpu.library.cache_info().currsize:
        add_to_gpus(gpu.library(), (file,))
    return names


def add_to_gpus(library: native.OpTable, files: Iterable[Path] = _loaded) -> None:
    """Adds ops of files, all loaded so far unless given, to the table of the library for GPUs."""
    for file in files:
        library.add(_compiled(file, gpus.accelerator() or ""), "odyssey_own")


def _compiled(file: Path, accelerator: str | None = None) -> str:
    """Returns what to load of a file: its library, from the cache; compiled first when it is not
    there.
    """
    device, module_path = (
        ("OnGpu", "kernels.gpu.elementwise") if accelerator else ("Cpu", "kernels.op")
    )
    try:
        exports = _ROOT.format(device=device, where=module_path)
        return build.open_own_library(file.read_bytes(), exports, accelerator).to_load()
    except BuildError as problem:
        raise BuildError(re.sub(r"[^\s:]*own\.mojo", str(file), str(problem))) from None
