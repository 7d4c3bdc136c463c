"""Does everything compile for the processors that are not here? CPUs to object files, GPUs to the code of each kernel,
which is then looked at: that it is there, and for NVIDIA's that it assembles.

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

from odyssey import build, compiler, ptx
from odyssey.errors import BuildError

# (triple, CPU)
CPUS: tuple[tuple[str, str], ...] = (
    ("x86_64-unknown-linux-gnu", "x86-64"),
    ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4+avx512bf16"),
    ("aarch64-unknown-linux-gnu", "generic"),
)
ACCELERATORS = ("sm_90", "sm_80", "gfx942")
_CODE = (".ptx", ".amdgcn", ".ll")  # what the compiler writes of a kernel: for NVIDIA, AMD, Apple


class Kernel(NamedTuple):
    """The code of one kernel for one accelerator.

    Attributes:
        entry: its name in the code. text: the code. usage: what it takes of an NVIDIA GPU, None for others.
    """

    entry: str
    text: str
    usage: ptx.Usage | None


def check_cpus(report: Callable[[str], None]) -> int:
    """Compiles the kernels to object files for every CPU of `CPUS`, one reported line each; how many failed."""
    root = build.source_root()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="odyssey-targets-") as directory:
        for number, (triple, cpu) in enumerate(CPUS):
            architecture = triple.partition("-")[0]
            name = cpu if cpu.startswith("x86") else f"{architecture} {cpu}"
            output = Path(directory) / f"{number}.o"
            start = time.perf_counter()
            try:
                compiler.compile_kernels(root, build.ROOT_SOURCE, output, cpu, emit="object", triple=triple)
            except BuildError as error:
                failures += 1
                report(f"{name:<22} failed: {error}")
            else:
                seconds, size = time.perf_counter() - start, output.stat().st_size
                report(f"{name:<22} {seconds:6.1f} s  {size / 1024:8.0f} KiB")
    return failures


def check_accelerators(
    report: Callable[[str], None], accelerators: Sequence[str] = ACCELERATORS, table: bool = False
) -> int:
    """Compiles the GPU kernels for each accelerator, one reported line each; how many failed.

    One fails if it does not compile, if a kernel of the sources is not in the code, or if NVIDIA's assembler refuses
    one. table: a line for each kernel as well.
    """
    root = build.source_root()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="odyssey-targets-") as directory:
        for name, result, seconds in _compiled(root, accelerators, Path(directory)):
            if isinstance(result, BuildError):
                failures += 1
                report(f"{name:<22} failed: {result}")
                continue
            absent = missing(root, result)
            failures += bool(absent)
            size = sum(len(kernel.text) for kernel in result)
            said = f"failed: no code of {', '.join(absent)}; " if absent else ""
            report(f"{name:<22} {said}{seconds:6.1f} s  {size / 1024:8.0f} KiB  {len(result)} kernels{_worst(result)}")
            if table:
                for line in lines(result):
                    report(line)
    return failures


def _compiled(
    root: Path, accelerators: Iterable[str], directory: Path
) -> Iterable[tuple[str, list[Kernel] | BuildError, float]]:
    """(name, kernels or what went wrong, seconds) of each, in order; as many at a time as there are cores, at most 2: a
    compiler takes some GiB."""

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
    compiler.compile_kernels(root, build.GPU_ROOT_SOURCE, output, cpu, accelerator=accelerator, emit="asm")
    found = []
    for path in sorted(p for p in directory.iterdir() if p.suffix in _CODE):
        text = path.read_text(errors="replace")
        if path.suffix == ".ptx":
            usages = ptx.assemble(text) if ptx.available() else {}
            found += [Kernel(entry, text, usages.get(entry)) for entry in ptx.entries(text)]
        else:
            found += [Kernel(entry, text, None) for entry in _entries(text, path.suffix)]
    return found


def _entries(text: str, suffix: str) -> list[str]:
    """Names of the kernels in code for AMD (assembly) or Apple (LLVM)."""
    if suffix == ".amdgcn":
        return re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    listed = re.search(r"^!air\.kernel\s*=\s*!\{(.*)\}", text, re.MULTILINE)
    nodes = re.findall(r"!\d+", listed[1]) if listed else []
    found = (re.search(rf"^{node} = !\{{.*@([\w.$]+)", text, re.MULTILINE) for node in nodes)
    return [form[1] for form in found if form]


def launched(root: Path) -> dict[str, list[str]]:
    """Names of the kernels that the sources launch, by file: what stands in `enqueue_function[...]`, seen through one
    `comptime` name."""
    found: dict[str, list[str]] = {}
    for top in build.SOURCE_DIRS:
        for path in sorted((root / top).rglob("*.mojo")):
            text = re.sub(r"#.*", "", path.read_text())
            names = set(re.findall(r"\benqueue_function\[\s*(\w+)", text))
            for name in list(names):
                if alias := re.search(rf"\bcomptime {name}\s*=\s*(\w+)", text):
                    names.remove(name)
                    names.add(alias[1])
            if names:
                found[path.relative_to(root).as_posix()] = sorted(names)
    return found


def missing(root: Path, found: Iterable[Kernel]) -> list[str]:
    """Kernels that a source launches and that are not in the code: nothing reaches them, so nothing has compiled them.

    The compiler makes the name of an entry from the module's path and the function's name, with its parameters and a
    hash behind; of the names of one file the longest that fits is the one.
    """
    entries = [kernel.entry for kernel in found]
    absent = []
    for file, names in launched(root).items():
        parts = Path(file).with_suffix("").parts
        module = "_".join(parts[1:] if parts[0] == "mojo" else parts)
        there = set()
        for entry in entries:
            if entry.startswith(f"{module}_"):
                rest = entry[len(module) + 1 :]
                there.add(max((name for name in names if rest.startswith(name)), key=len, default=""))
        absent += [f"{name} ({file})" for name in names if name not in there]
    return absent


def lines(found: Iterable[Kernel]) -> list[str]:
    """A table: what each kernel takes."""
    rows = [f"    {'regs':>4} {'shared':>7} {'stack':>6} {'spilled':>8}  kernel"]
    for kernel in found:
        use = kernel.usage
        numbers = f"{use.registers:>4} {use.shared:>7} {use.stack:>6} {use.spilled:>8}" if use else f"{'-':>28}"
        rows.append(f"    {numbers}  {kernel.entry}")
    return rows


def _worst(found: Iterable[Kernel]) -> str:
    usages = [kernel.usage for kernel in found if kernel.usage]
    if not usages:
        return ""
    most = max(use.registers for use in usages), max(use.shared for use in usages), sum(use.spilled for use in usages)
    return ", assembled: at most {} registers, {} bytes shared; {} bytes spilled".format(*most)
