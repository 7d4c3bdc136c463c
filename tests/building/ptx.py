"""Assembles PTX with the assembler that comes with MAX (libNVPTX.so), on any machine: does the
code become machine code of that GPU, and what does a kernel take of it? No GPU, no CUDA
toolkit. What it is not: a way to run it.

The interface is that of NVIDIA's PTX Compiler API (nvPTXCompiler.h).
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import NamedTuple

from odyssey.compile import compiler
from odyssey.errors import BuildError

LIBRARY = "libNVPTX.so"


class Usage(NamedTuple):
    """What one kernel takes: registers of a thread; bytes of shared memory of a block, and of a
    thread's stack; bytes that are stored and loaded because there were too few registers.
    """

    registers: int
    shared: int
    stack: int
    spilled: int  # the larger of stores and loads


def available() -> bool:
    """Whether the assembler is installed: not on all systems that the compiler runs on."""
    return any((root / "lib" / LIBRARY).is_file() for root in compiler.sdk_roots())


def target(text: str) -> str:
    """The GPU that a PTX text is for, such as "sm_90a"."""
    found = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if found is None:
        raise BuildError("[build] not a PTX file: no .target directive")
    return found[1]


def entries(text: str) -> list[str]:
    """Names of the kernels in a PTX text."""
    return re.findall(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)", text, re.MULTILINE)


def assemble(text: str, gpu: str | None = None) -> dict[str, Usage]:
    """What each kernel of a PTX text takes, assembled for the GPU that the text names (or for
    `gpu`).

    Raises:
        BuildError: it is refused; with what the assembler said.
    """
    library = _library()
    data = text.encode()
    handle = ctypes.c_void_p()
    if code := library.nvPTXCompilerCreate(ctypes.byref(handle), len(data), data):
        raise BuildError(f"[build] the PTX assembler does not start (nvPTXCompilerCreate: {code})")
    try:
        options = [f"--gpu-name={gpu or target(text)}".encode(), b"--verbose", b"-O3"]
        code = library.nvPTXCompilerCompile(
            handle, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        said = _log(library, handle, "Error" if code else "Info")
    finally:
        library.nvPTXCompilerDestroy(ctypes.byref(handle))
    if code:
        first = next(
            (line for line in said.splitlines() if "error" in line or "fatal" in line), said.strip()
        )
        raise BuildError(
            f"[build] the PTX of {', '.join(entries(text)) or 'no kernel'} does not assemble: "
            f"{first}"
        )
    return usages(said)


def usages(said: str) -> dict[str, Usage]:
    """Reads what the assembler prints of each kernel."""
    found: dict[str, Usage] = {}
    name, stack, spilled = "", 0, 0
    for line in said.splitlines():
        if entry := re.search(r"Compiling entry function '([\w$]+)'", line):
            name, stack, spilled = entry[1], 0, 0
        elif form := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spilled = int(form[1]), max(int(form[2]), int(form[3]))
        elif name and (form := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = Usage(int(form[1]), int(shared[1]) if shared else 0, stack, spilled)
            name = ""
    return found


@functools.cache
def _library() -> ctypes.CDLL:
    for root in compiler.sdk_roots():
        if (root / "lib" / LIBRARY).is_file():
            library = ctypes.CDLL(str(root / "lib" / LIBRARY))
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            library.nvPTXCompilerCreate.argtypes = [ctypes.POINTER(pointer), size, ctypes.c_char_p]
            library.nvPTXCompilerCompile.argtypes = [
                pointer,
                ctypes.c_int,
                ctypes.POINTER(ctypes.c_char_p),
            ]
            library.nvPTXCompilerDestroy.argtypes = [ctypes.POINTER(pointer)]
            for kind in ("Error", "Info"):
                getattr(library, f"nvPTXCompilerGet{kind}LogSize").argtypes = [
                    pointer,
                    ctypes.POINTER(size),
                ]
                getattr(library, f"nvPTXCompilerGet{kind}Log").argtypes = [pointer, ctypes.c_char_p]
            return library
    raise BuildError(
        f"[build] the PTX assembler {LIBRARY} is not installed; install the package `max`"
    )


def _log(library: ctypes.CDLL, handle: ctypes.c_void_p, kind: str) -> str:
    size = ctypes.c_size_t()
    getattr(library, f"nvPTXCompilerGet{kind}LogSize")(handle, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    getattr(library, f"nvPTXCompilerGet{kind}Log")(handle, text)
    return text.value.decode(errors="replace")
