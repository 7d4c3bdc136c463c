"""The Mojo compiler of this environment: where it is, its version, the processors it compiles
for, how it is run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from odyssey.base.requirements import REINSTALL
from odyssey.errors import BuildError, near

from . import sources

if TYPE_CHECKING:
    import subprocess

_MAX_STDERR_LINES = 40
_DIE_WITH_PARENT = Path(__file__).parents[1] / "base" / "die_with_parent.py"


def source_root() -> Path:
    """The directory that holds `mojo/` and `shared/`: inside an installed wheel, else the
    checkout.
    """
    package = Path(__file__).resolve().parents[1]
    for root in (package / "_mojo", package.parents[1]):
        if (root / sources.ROOT).is_file():
            return root
    raise BuildError(
        f"[build] the kernel sources ({sources.ROOT}) are neither in {package / '_mojo'} nor in "
        f"{package.parents[1]}; {REINSTALL}, or name a prebuilt library with ODYSSEY_KERNELS"
    )


def mojo_package() -> Path | None:
    """The directory of the installed `mojo` package.

    A folder or file of that name in the current directory may stand before it on the path: only the
    one with the entry points counts.
    """
    places = (os.path.join(place, "mojo") for place in sys.path)
    return next(
        (Path(p) for p in places if os.path.isfile(os.path.join(p, "_entrypoints.py"))), None
    )


def sdk_roots() -> list[Path]:
    """Where the compiler's `bin/` and `lib/` may be: in the wheel, or in a conda environment."""
    package = mojo_package()
    if package is None:
        return []
    site = package.resolve().parent
    return [site / "modular", *site.parents[2:3]]


def compiler_version() -> str:
    """The version of the installed compiler, from the name of its metadata directory: importing
    `importlib.metadata` would take longer than all the rest of a start with a warm cache.
    """
    package = mojo_package()
    if package is not None:
        for path in package.parent.glob("mojo_compiler-*.dist-info"):
            return path.name[len("mojo_compiler-") : -len(".dist-info")]
    import shutil

    executable = shutil.which("mojo")
    if executable is None:
        return "none"
    info = os.stat(executable)
    return f"{executable}-{info.st_size}-{info.st_mtime_ns}"


def mojo_command() -> list[str]:
    """How to start the compiler: the one of this Python environment, else the one on PATH."""
    import shutil

    if mojo_package() is not None:
        start = (
            "import sys; sys.argv[0] = 'mojo'; from mojo._entrypoints import exec_mojo; exec_mojo()"
        )
        return [sys.executable, "-c", start]
    beside = Path(sys.executable).parent / "mojo"
    executable = str(beside) if beside.is_file() else shutil.which("mojo")
    if executable is None:
        raise BuildError(
            "[build] the Mojo compiler is not installed in this environment; install the package "
            "`max`, or name a prebuilt library with ODYSSEY_KERNELS"
        )
    return [executable]


def run_mojo(arguments: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the Mojo compiler with these arguments and captures what it prints; it ends when this
    process is killed. Raises BuildError: there is none.
    """
    import subprocess

    quiet = {"MODULAR_CRASH_REPORTING_ENABLED": "false", "MODULAR_TELEMETRY_ENABLED": "false"}
    words = [
        sys.executable,
        "-I",
        "-S",
        str(_DIE_WITH_PARENT),
        str(os.getpid()),
        *mojo_command(),
        *arguments,
    ]
    options = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "errors": "replace",
    }
    return subprocess.run(words, cwd=cwd, env={**os.environ, **quiet}, **options)


def compile_kernels(
    root: Path,
    source: Path,
    output: Path,
    cpu: str,
    *,
    accelerator: str | None = None,
    emit: str = "object",
    triple: str | None = None,
    flags: Iterable[str] = (),
) -> None:
    """One call of the compiler.

    Args:
        root: directory of `mojo/`. source: the root file, relative to it. The compiler names
            sources as they are named here, in messages and in what it makes: one source has one
            object wherever it lies.
        cpu: a target such as "x86-64-v4+avx512bf16". accelerator: what GPU kernels are compiled
            for.
        emit: what `output` is: "object" or "asm"; with the latter the kernels of a GPU lie beside
            it.

    Raises BuildError: with what the compiler said.
    """
    import shutil

    if emit != "asm" and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise BuildError(
            "[build] no C compiler (cc, gcc or clang) is on PATH, and Mojo's compiler asks for "
            "one; install it (`apt-get install gcc`, `dnf install gcc`, `conda install "
            "c-compiler`, `xcode-select --install`), or name a prebuilt library with "
            "ODYSSEY_KERNELS"
        )
    # What lies beside the root file is found by its absolute path.
    command = [
        "build",
        "--emit",
        emit,
        str(source),
        "-I",
        "mojo",
        f"-strip-file-prefix={root.resolve()}/",
    ]
    command += [*target_options(cpu), *(["--target-triple", triple] if triple else []), *flags]
    command += [*(["--target-accelerator", accelerator] if accelerator else []), "-o", str(output)]
    result = run_mojo(command, cwd=root)
    if result.returncode == 0 and output.is_file():
        return
    message = (
        result.stderr.strip() or result.stdout.strip() or f"nothing, exit code {result.returncode}"
    )
    message = message.replace(f"{root}/", "")
    if "unknown target CPU" in message:
        raise _unknown_cpu_error(cpu, triple)
    target = f"{accelerator} and {cpu}" if accelerator else cpu
    raise BuildError(
        f"[build] the kernels did not compile for {target} (mojo "
        f"{compiler_version()}):\n{_trim(message)}"
    )


def link(
    objects: Iterable[Path], library: Path, *options: str, apple: bool = sys.platform == "darwin"
) -> None:
    """Links a library, with the compiler's own linker (for macOS with `cc`).

    What is not defined is found at run time: the run-time libraries and the C library are there
    before it is loaded. Raises BuildError: it cannot be linked.
    """
    import subprocess

    lld = next(
        (root / "bin" / "lld" for root in sdk_roots() if (root / "bin" / "lld").is_file()), "lld"
    )
    command = [str(lld), "-flavor", "gnu", "-shared", f"-soname={library.name}", *options]
    if apple:
        command = ["cc", "-dynamiclib", "-undefined", "dynamic_lookup"]
    command += ["-o", str(library), *map(str, objects)]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as problem:
        reason = f"the linker {command[0]} cannot be started ({problem.strerror})"
        raise BuildError(
            f"[build] {reason}; install the package `max`, which brings it"
        ) from problem
    if result.returncode:
        raise BuildError(f"[build] the kernels cannot be linked:\n{_trim(result.stderr.strip())}")


def _trim(text: str) -> str:
    """From the first error on, at most 40 lines; the last line of a long list of notes is kept,
    it has the reason.
    """
    lines = text.splitlines()
    lines = lines[next((i for i, line in enumerate(lines) if "error:" in line), 0) :]
    if len(lines) > _MAX_STDERR_LINES:
        lines[_MAX_STDERR_LINES - 10 : -9] = [
            f"... {len(lines) - _MAX_STDERR_LINES + 1} lines left out ..."
        ]
    return "\n".join(lines)


def _unknown_cpu_error(cpu: str, triple: str | None) -> BuildError:
    native = (
        "arm64-apple-darwin"
        if sys.platform == "darwin"
        else f"{platform.machine()}-unknown-linux-gnu"
    )
    listing = run_mojo(["build", "--print-supported-cpus", "--target-triple", triple or native])
    names = [line.strip() for line in listing.stdout.splitlines() if line.startswith("  ")]
    return _unknown_name_error("target CPU", cpu, "ODYSSEY_TARGET_CPU or --target-cpu", names)


def _unknown_name_error(kind: str, name: str, source: str, names: list[str]) -> BuildError:
    suggestions = near(name, names, 0.5)
    advice = (
        f"did you mean {' or '.join(suggestions)}?"
        if suggestions
        else f"known are {', '.join(names[:12])}, ..."
    )
    return BuildError(f"[build] the compiler knows no {kind} {name!r} ({source}); {advice}")


def check_accelerator(name: str) -> None:
    """Raises BuildError unless the compiler knows this accelerator; for sources without GPU code
    it takes any name.
    """
    listing = run_mojo(["build", "--print-supported-accelerators"])
    names = re.findall(r"^ +([a-z0-9_-]+) +- ", listing.stdout, re.MULTILINE)
    if not names:
        raise BuildError(f"[build] the compiler names no accelerators: {_trim(listing.stderr)}")
    if name not in names:
        raise _unknown_name_error(
            "accelerator", name, "ODYSSEY_TARGET_ACCELERATOR or --target", names
        )


# -- the target CPU --------------------------------------------------------------------------------

# The features of the x86-64 levels, as /proc/cpuinfo spells them (abm: lzcnt).
_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
# the compiler's name: that of /proc/cpuinfo
_CPUINFO_NAMES = {"avx512bf16": "avx512_bf16", "amx-bf16": "amx_bf16"}
# syscall, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
_ARCH_PRCTL = 158
_REQUEST = 0x1023
_TILES = 18


def host_cpu() -> str:
    """The target for this machine, from what the CPU can do.

    The compiler guesses from the model number instead, which is wrong on virtual machines. A target
    is a CPU of the compiler, and single features after it: `x86-64-v4` alone has no bf16
    instructions.
    """
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return x86_level(cpu_features())
    return "apple-m1" if sys.platform == "darwin" else "generic"


def x86_level(features: frozenset[str]) -> str:
    """The highest x86-64 level whose features are all there, and the bf16 products, of pairs and
    tiles, if they are.
    """
    if features >= _V4:
        tiles = "+amx-bf16" if "amx_bf16" in features else ""
        return f"x86-64-v4+avx512bf16{tiles}" if "avx512_bf16" in features else "x86-64-v4"
    if features >= _V3:
        return "x86-64-v3"
    return "x86-64"


def target_options(target: str) -> list[str]:
    """The compiler's options for a target such as "x86-64-v4+avx512bf16"."""
    cpu, *features = target.split("+")
    options = ["--target-cpu", cpu]
    return (
        [*options, "--target-features", ",".join(f"+{name}" for name in features)]
        if features
        else options
    )


def lacking(target: str) -> list[str]:
    """Returns the features that this CPU lacks for kernels of a target; [] if none, or if it
    cannot be told.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or not (
        host_features := cpu_features()
    ):
        return []
    cpu, *features = target.split("+")
    level_features = {"x86-64-v3": _V3, "x86-64-v4": _V4}.get(cpu, frozenset())
    return sorted(
        (level_features | {_CPUINFO_NAMES.get(name, name) for name in features}) - host_features
    )


def portable_cpu() -> str:
    """The target for kernels that go to other machines of this architecture, and for what need
    not be fast: x86-64-v3 is what nearly all x86 machines have, so if this one has it too.
    """
    native_cpu = host_cpu()
    return (
        "x86-64-v3"
        if platform.machine().lower() in ("x86_64", "amd64") and native_cpu != "x86-64"
        else native_cpu
    )


def cpu_features() -> frozenset[str]:
    """Reads /proc/cpuinfo, less the tile registers where Linux does not let this process use
    them; () elsewhere.
    """
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                flags = frozenset(line.partition(":")[2].split())
                return (
                    flags if "amx_bf16" not in flags or tiles_permitted() else flags - {"amx_bf16"}
                )
    return frozenset()


def tiles_permitted() -> bool:
    """Asks Linux for AMX's tile registers, for all threads of this process; whether they are
    given (not before Linux 5.16, nor in a sandbox without this system call).
    """
    import ctypes

    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILES) == 0
