"""The emulated GPU of the tests: builds it, gives the environment in which MAX finds it instead
of a CUDA driver.

Not a simulator of a GPU's speed. `python tests/gpu/emulated.py` prints the directory to put first
in LD_LIBRARY_PATH; `python tests/gpu/emulated.py COMMAND ...` runs a command with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from odyssey.compile.library import cache_dir

SOURCES = Path(__file__).with_name("emulator")
FLAGS = [
    *(
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O3",
        "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
    ),
    *("-fno-trapping-math", "-fPIC", "-fvisibility=hidden", "-shared", "-Wall"),
]


def compiler() -> str | None:
    """The C compiler that builds it, or None."""
    return next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)


def _cpu() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith(b"flags")), b"")


def build() -> Path:
    """Directory of libcuda.so.1 and libnvidia-ml.so.1, built for this machine if its sources
    have changed.

    Several processes may call it at once. Raises RuntimeError with the compiler's messages.
    """
    sources = sorted(SOURCES.glob("*.[ch]"))
    key = hashlib.sha256(repr(FLAGS).encode() + _cpu())
    for path in sources:
        key.update(path.name.encode() + path.read_bytes())
    cache = cache_dir() / "emulator"
    target = cache / key.hexdigest()[:16]
    if (target / "libcuda.so.1").exists():
        return target
    cc = compiler()
    if cc is None:
        raise RuntimeError("[emulated GPU] no C compiler found: install gcc or clang")
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=cache))
    try:
        driver = [str(path) for path in sources if path.suffix == ".c" and path.name != "nvml.c"]
        for output, files in (
            ("libcuda.so.1", driver),
            ("libnvidia-ml.so.1", [str(SOURCES / "nvml.c")]),
        ):
            command = [cc, *FLAGS, *files, "-o", str(work / output), "-lm", "-lpthread"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"[emulated GPU] {output} does not compile:\n{done.stderr}")
        try:
            work.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def environment(
    gpus: int = 1, memory: str = "1G", base: dict[str, str] | None = None, **settings: object
) -> dict[str, str]:
    """A copy of `base` (default: os.environ) in which a program finds `gpus` emulated GPUs of
    `memory` bytes each.

    Further settings by their names in small letters: late=1, order=7, stats="file", verbose=1,
    threads=1, cc=80. MAX's own pool is switched off, so that the emulated driver knows each buffer
    and sees an access beyond its end.
    """
    env = dict(os.environ if base is None else base)
    for name in [
        name for name in env if name.startswith(("ODYSSEY_EMULATOR_", "ODYSSEY_EMULATED_"))
    ]:
        del env[name]
    env.update(_found(env))
    env["ODYSSEY_EMULATED_GPUS"] = str(gpus)
    env["ODYSSEY_EMULATED_MEMORY"] = memory
    for name, value in settings.items():
        env["ODYSSEY_EMULATED_CC" if name == "cc" else f"ODYSSEY_EMULATOR_{name.upper()}"] = str(
            value
        )
    return env


COUNTED = ("launches", "graphs", "up", "down", "within", "sets", "waits", "allocations", "frees")


def counts() -> dict[str, int]:
    """What this process has asked the emulated driver for so far (emulator_counts in driver.c).

    For a program that runs on an emulated GPU and has used it already. Raises AttributeError with a
    real driver.
    """
    out = (ctypes.c_uint64 * len(COUNTED))()
    ctypes.CDLL("libcuda.so.1").emulator_counts(out)
    return dict(zip(COUNTED, out, strict=True))


def _found(env: dict[str, str]) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(
            p for p in (str(build()), env.get("LD_LIBRARY_PATH")) if p
        ),
        "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE": "0",
        "MODULAR_DEVICE_CONTEXT_HOST_MEMORY_MANAGER_SIZE": "0",
    }


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(build())
    else:
        os.execvpe(
            sys.argv[1],
            sys.argv[1:],
            {"ODYSSEY_EMULATED_GPUS": "1", **os.environ, **_found(dict(os.environ))},
        )
