"""Looks at the code of each GPU kernel, compiled for GPUs that are not here: that it is there,
and for NVIDIA's that it assembles, and what it takes then.

What it is not: a test of what the code computes.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from building import ptx

from odyssey.compile import compiler, sources
from odyssey.compile import library as build
from odyssey.errors import BuildError

_CUT = 29  # characters of a module's and a function's name in that of an entry
_CODE = (".ptx", ".amdgcn", ".ll")  # what the compiler writes of a kernel: for NVIDIA, AMD, Apple


class Kernel(NamedTuple):
    """The code of one kernel for one accelerator.

    Attributes:
        entry: its name in the code. text: the code. source: file below the root and name of the
            function, such as
        ("mojo/kernels/gpu/pool.mojo", "_maxpool_forward"), None if the code does not say. usage:
        what it takes of an NVIDIA GPU, None for others.
    """

    entry: str
    text: str
    source: tuple[str, str] | None = None
    usage: ptx.Usage | None = None


def check_accelerators(
    report: Callable[[str], None], accelerators: Sequence[str], table: bool = False
) -> int:
    """Compiles the GPU kernels for each accelerator, one reported line each; how many failed.

    One fails if it does not compile, or if NVIDIA's assembler refuses a kernel. Kernels of the
    sources that are not in the code are named: some are for one kind of GPU, and what nothing
    reaches is compiled for none. table: a line for each kernel as well.
    """
    root = build.source_root()
    everything = launched(root)
    failures = 0
    reached: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory(prefix="odyssey-targets-") as directory:
        for name, result, seconds in _compiled(root, accelerators, Path(directory)):
            if isinstance(result, BuildError):
                failures += 1
                report(f"{name:<22} failed: {result}")
                continue
            here = {kernel.source for kernel in result if kernel.source}
            reached |= here
            size = sum(len(kernel.text) for kernel in result)
            report(
                f"{name:<22} {seconds:6.1f} s  {size / 1024:8.0f} KiB  {len(result)} kernels "
                f"from {len(here)} "
                f"functions{_worst(result)}{f'; without {_names(everything - here)}' if everything - here else ''}"
            )
            if table:
                for line in lines(result):
                    report(line)
    if failures == 0 and everything - reached:
        report(f"{'all':<22} nothing reaches, so nothing compiles: {_names(everything - reached)}")
    return failures


def _names(functions: Iterable[tuple[str, str]]) -> str:
    return ", ".join(sorted(f"{name} ({file})" for file, name in functions))


def _compiled(
    root: Path, accelerators: Iterable[str], directory: Path
) -> Iterable[tuple[str, list[Kernel] | BuildError, float]]:
    """(name, kernels or what went wrong, seconds) of each, in order; as many at a time as there
    are cores, at most 2: a compiler takes some GiB.
    """

    def one(name: str) -> tuple[str, list[Kernel] | BuildError, float]:
        start = time.perf_counter()
        try:
            return name, kernels(root, name, directory / name), time.perf_counter() - start
        except BuildError as error:
            return name, error, time.perf_counter() - start

    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        yield from pool.map(one, accelerators)


def kernels(root: Path, accelerator: str, directory: Path) -> list[Kernel]:
    """The code of all kernels that the GPU library launches, for one accelerator, by name.

    Args:
        directory: to be made; the compiler's files are left in it.

    Raises:
        BuildError: they do not compile, or do not assemble.
    """
    compiler.check_accelerator(accelerator)
    directory.mkdir()
    output = directory / "gpu.s"
    cpu = compiler.portable_cpu()
    # tables of lines, from which a kernel's function is known; the code is the same
    options = ["-g1"]
    compiler.compile_kernels(
        root,
        Path(sources.GPU_ROOT),
        output,
        cpu,
        accelerator=accelerator,
        emit="asm",
        flags=options,
    )
    known = sorted(launched(root))
    found = []
    for path in sorted(p for p in directory.iterdir() if p.suffix in _CODE):
        text = path.read_text(errors="replace")
        nvidia = path.suffix == ".ptx"
        usages = ptx.assemble(text) if nvidia and ptx.available() else {}
        for entry in ptx.entries(text) if nvidia else _entries(text, path.suffix):
            found.append(Kernel(entry, text, _source(root, entry, text, known), usages.get(entry)))
    return found


def of_library(path: Path) -> list[Kernel]:
    """The kernels in a library for NVIDIA's GPUs: their PTX lies in it as text.

    Assembled; by name.

    Raises:
        BuildError: one does not assemble.
    """
    texts = re.findall(rb"//\n// Generated by LLVM NVPTX Back-End\n[^\0]*", path.read_bytes())
    found = []
    for text in sorted({text.decode(errors="replace") for text in texts}):
        usages = ptx.assemble(text)
        found += [Kernel(entry, text, None, usages.get(entry)) for entry in ptx.entries(text)]
    return sorted(found)


def _entries(text: str, suffix: str) -> list[str]:
    """Names of the kernels in code for AMD (assembly) or Apple (LLVM)."""
    if suffix == ".amdgcn":
        return re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    listed = re.search(r"^!air\.kernel\s*=\s*!\{(.*)\}", text, re.MULTILINE)
    nodes = re.findall(r"!\d+", listed[1]) if listed else []
    found = (re.search(rf"^{node} = !\{{.*@([\w.$]+)", text, re.MULTILINE) for node in nodes)
    return [form[1] for form in found if form]


def _source(
    root: Path, entry: str, text: str, known: Iterable[tuple[str, str]]
) -> tuple[str, str] | None:
    """Which of the known functions (file, name) a kernel is; None if it is none of them.

    The compiler makes an entry's name from the module and the function, but cuts it short: of those
    that fit, it is the one around the first line of its file that the code names.
    """
    fit = [(file, name) for file, name in known if _fits(entry, _module(file), name)]
    if len(fit) < 2:
        return fit[0] if fit else None
    lines = (root / fit[0][0]).read_text().splitlines()
    for number in _lines(text, Path(fit[0][0]).name):
        around = (re.match(r"def (\w+)", line) for line in reversed(lines[:number]))
        name = next((form[1] for form in around if form), "")
        if (fit[0][0], name) in fit:
            return fit[0][0], name
    return None


def _module(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return "_".join(parts[1:] if parts[0] == "mojo" else parts)


def _fits(entry: str, module: str, name: str) -> bool:
    """Whether this may be the entry of a function: its name stands there, whole or cut."""
    return entry.startswith(f"{module}_{name}"[:_CUT])


def _lines(text: str, file: str) -> list[int]:
    """Numbers of the lines of a file that the code names, in the code's order."""
    files = re.findall(r'^\s*\.file\s+(\d+)((?:\s+"[^"]*")+)', text, re.MULTILINE)
    own = {number for number, names in files if re.split(r'[/"]', names.rstrip('"'))[-1] == file}
    return [
        int(line)
        for number, line in re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)", text, re.MULTILINE)
        if number in own
    ]


def launched(root: Path) -> set[tuple[str, str]]:
    """The kernels that the sources launch, as (file, function): what stands in
    `enqueue_function[...]`, or what is put in for it where that is a parameter.
    """
    texts = {}
    for path in sorted((root / sources.FOLDER).rglob("*.mojo")):
        texts[path.relative_to(root).as_posix()] = re.sub(r"#.*", "", path.read_text())
    found = set()
    for file, text in texts.items():
        names = re.findall(r"\benqueue_function\[\s*(\w+)", text)
        for name in names:
            if taker := re.search(rf"\bdef (\w+)\[\s*{name}: def\b", text):
                names += re.findall(rf"\b(?<!def ){taker[1]}\[\s*(\w+)", text)
                continue
            if alias := re.search(rf"\bcomptime {name}\s*=\s*(\w+)", text):
                name = alias[1]
            places = [file, *texts]
            home = next(
                (
                    other
                    for other in places
                    if re.search(rf"^def {name}\b", texts[other], re.MULTILINE)
                ),
                file,
            )
            found.add((home, name))
    return found


def lines(found: Iterable[Kernel]) -> list[str]:
    """A table: what each kernel takes."""
    rows = [f"    {'regs':>4} {'shared':>7} {'stack':>6} {'spilled':>8}  kernel"]
    for kernel in found:
        use = kernel.usage
        numbers = (
            f"{use.registers:>4} {use.shared:>7} {use.stack:>6} {use.spilled:>8}"
            if use
            else f"{'-':>28}"
        )
        rows.append(f"    {numbers}  {kernel.entry}")
    return rows


def _worst(found: Iterable[Kernel]) -> str:
    usages = [kernel.usage for kernel in found if kernel.usage]
    if not usages:
        return ""
    most = (
        max(use.registers for use in usages),
        max(use.shared for use in usages),
        sum(use.spilled for use in usages),
    )
    return ", assembled: at most {} registers, {} bytes shared; {} bytes spilled".format(*most)
