"""The part machine: what is here."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

from ..check import Check, last_json

PLACES = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/cuda/compat",
)

PACKAGES = """
import platform, sys
from importlib import metadata
print(sys.version.replace(chr(10), " "), platform.platform())
for name in "numpy torch triton mpi4py click rich safetensors nvidia-nccl-cu12 nvidia-nccl-cu13".split():
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "-")
"""

OPENED = r"""
import json, re
from odyssey.compile import gpus, library as build
from odyssey.core.gpu_native import Gpu, library
path = build.gpu_library_path()
data = path.read_bytes()
ptx = sorted({(m[1].decode(), m[2].decode()) for m in re.finditer(rb"\.version (\S+)\n\.target (\w+)", data)})
facts = {"kernels": str(path), "ptx": ptx, "nvml": [list(g) for g in gpus.found()], "opened": []}
for i in range(library().count()):
    gpu = Gpu(i)
    free, whole = gpu.memory()
    facts["opened"].append(f"{gpu.name}, {free >> 20} of {whole >> 20} MiB free")
print(json.dumps(facts))
if not facts["opened"]:
    raise SystemExit("the runtime finds no GPU that it can use")
"""

NAMES = r"""
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for i in range(count.value):
    name = ctypes.create_string_buffer(256)
    assert cuda.cuDeviceGetName(name, 256, i) == 0
    numbers = [ctypes.c_int(), ctypes.c_int()]
    for number, attribute in zip(numbers, (75, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        assert cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, i) == 0
    print(f"GPU {numbers[0].value}.{numbers[1].value} {name.value.decode()}")
"""


def run(c: Check) -> dict[str, Any]:
    """The driver and its place, the kernels, and the time in which a process starts training."""
    facts: dict[str, Any] = {}
    wanted = "name,driver_version,clocks.max.sm,memory.total,mig.mode.current"
    loader = "ldd --version | head -1; ldconfig -p | grep -E 'libcuda.so|libnvidia-ml|nccl'; true"
    for name, command in {
        "nvidia-smi": ["nvidia-smi"],
        "gpus": ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"],
        "compilers": [
            "sh",
            "-c",
            "command -v mojo nvcc ptxas gcc cc mpirun compute-sanitizer ncu; true",
        ],
        "packages": [sys.executable, "-c", PACKAGES],
        "loader": ["sh", "-c", loader],
    }.items():
        with contextlib.suppress(OSError, RuntimeError):
            facts[name] = c.run(*command, limit=20).strip()
    facts.pop("nvidia-smi", None)  # it is in the log
    wanted = r"LD_|CUDA_|NVIDIA_|ODYSSEY_|MODULAR_|OMPI_|SLURM_JOB_ID"
    facts["environment"] = {
        name: value for name, value in c.environment.items() if re.match(wanted, name)
    }
    facts["libraries"] = c.facts.get("libraries")
    c.attempt(sys.executable, "-m", "odyssey", "doctor", limit=60)  # for the log
    facts.update(last_json(c.python("-c", OPENED, limit=600 if c.options.emulated else 120)))
    starts = []
    for _ in range(2):
        begun = time.monotonic()
        c.train("--num-gpus", 1, "--steps", 1, "--global-batch-size", 64, "--no-eval", limit=150)
        starts.append(round(time.monotonic() - begun, 1))
    return {**facts, "seconds of one step in a new process, twice": starts}


def driver(c: Check) -> dict[str, str]:
    """The places of the driver's libraries.

    If the loader does not find them, LD_LIBRARY_PATH gets their folder.
    """
    places: dict[str, str] = {}
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        loads = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})"]
        if c.attempt(*loads, limit=30)[0] == 0:
            places[name] = "found by the loader"
            continue
        folder = next((place for place in PLACES if (Path(place) / name).exists()), None)
        if folder is None:
            places[name] = f"not found, nor in {', '.join(PLACES)}"
            continue
        before = c.environment.get("LD_LIBRARY_PATH")
        c.environment["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else folder
        places[name] = f"in {folder}, which the loader did not know"
    return places


def gpus(c: Check) -> list[tuple[str, str]]:
    """The compute capability and the name of each GPU of this machine, as the driver gives them."""
    code, output = c.attempt(sys.executable, "-c", NAMES, limit=60)
    found = re.findall(r"^GPU (\d+\.\d+) (.+)$", output, re.MULTILINE)
    return found if code == 0 else []
