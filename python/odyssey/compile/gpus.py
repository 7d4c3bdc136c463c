"""Which GPUs this machine has and what the compiler calls them: NVIDIA's driver is asked, AMD's
has said so in /sys.

NVML is what is asked: unlike CUDA it starts nothing on a GPU.

Environment: `ODYSSEY_TARGET_ACCELERATOR` names the kind, whatever is here; `CUDA_VISIBLE_DEVICES`,
and for AMD `ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES`, as the drivers themselves read them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DeviceError

NVML = "libnvidia-ml.so.1"
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
# NVIDIA's oldest driver that MAX 26.7 takes PTX to; older ones need its MODULAR_NVPTX_COMPILER_PATH
DRIVER = 580


class GpuModel(NamedTuple):
    """One GPU. accelerator: as `mojo build --target-accelerator` takes it, such as "sm_90"."""

    name: str
    accelerator: str
    driver: str = ""  # version, "" if it is not known
    uuid: str = ""


@functools.cache
def found() -> tuple[GpuModel, ...]:
    """The GPUs that a process of this environment sees, in the driver's order; asked once in a
    process.
    """
    nvidia = visible(_nvidia(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    amd = visible(_amd(), os.environ.get("ROCR_VISIBLE_DEVICES"))
    return tuple(nvidia) or tuple(visible(amd, os.environ.get("HIP_VISIBLE_DEVICES")))


def count() -> int:
    """How many there are."""
    return len(found())


def accelerator() -> str | None:
    """Returns what kernels are compiled for: `ODYSSEY_TARGET_ACCELERATOR`, else the kind of the
    first GPU; None without a GPU. Raises DeviceError: no name of an accelerator.
    """
    name = os.environ.get("ODYSSEY_TARGET_ACCELERATOR")
    if name:
        return canonical(name, "ODYSSEY_TARGET_ACCELERATOR")
    return found()[0].accelerator if found() else None


def canonical(name: str, source: str = "--target") -> str:
    """One name for each kind: "nvidia:sm_90" and "sm_90a" are "sm_90": all that the chip has.

    DeviceError: no name.
    """
    form = re.fullmatch(r"(?:(?:nvidia|amdgpu):)?([a-z][a-z0-9_-]{1,30})", name.strip().lower())
    if form is None:
        raise DeviceError(
            f"[gpu] {source} is {name!r}, which names no accelerator; give one such as sm_90 or "
            "gfx942"
        )
    return re.sub(r"^(sm_\d+)a$", r"\1", form[1])


def visible(gpus: Sequence[GpuModel], setting: str | None) -> list[GpuModel]:
    """Returns the GPUs that a list of indices and UUIDs lets through, in its order.

    As in CUDA the first entry that fits none ends the list, and a UUID may be cut short; an
    instance of a GPU (MIG-...) is of the kind of the first.
    """
    if setting is None:
        return list(gpus)
    chosen: list[GpuModel] = []
    for word in (word.strip() for word in setting.split(",")):
        if word.isdecimal():
            matches = list(gpus[int(word) : int(word) + 1])
        elif word.startswith("MIG-"):
            matches = list(gpus[:1])
        else:
            matches = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(matches) != 1 or (matches[0] in chosen and not word.startswith("MIG-")):
            break
        chosen += matches
    return chosen


def _nvidia() -> list[GpuModel]:
    """Returns what NVML says; [] where it is not installed, or does not answer."""
    gpus: list[GpuModel] = []
    with contextlib.suppress(OSError, AttributeError), contextlib.ExitStack() as cleanup:
        nvml = ctypes.CDLL(NVML)
        number = ctypes.c_uint(0)
        byref = ctypes.byref
        if nvml.nvmlInit_v2() != 0:
            return []
        cleanup.callback(nvml.nvmlShutdown)
        if nvml.nvmlDeviceGetCount_v2(byref(number)) != 0:
            return []
        driver = _text(nvml, "nvmlSystemGetDriverVersion")
        for index in range(number.value):
            handle = ctypes.c_void_p()
            major = ctypes.c_int(0)
            minor = ctypes.c_int(0)
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), byref(handle))
            if failed or nvml.nvmlDeviceGetCudaComputeCapability(
                handle, byref(major), byref(minor)
            ):
                continue
            name = _text(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU"
            uuid = _text(nvml, "nvmlDeviceGetUUID", handle)
            gpus.append(GpuModel(name, f"sm_{major.value}{minor.value}", driver, uuid))
    return gpus


def _text(nvml: ctypes.CDLL, function: str, *arguments: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(128)
    with contextlib.suppress(AttributeError):
        if getattr(nvml, function)(*arguments, text, ctypes.c_uint(len(text))) == 0:
            return text.value.decode(errors="replace")
    return ""


def _amd() -> list[GpuModel]:
    """Returns what the kernel's driver shows: a node a processor, with its instructions' version
    if it is a GPU.
    """
    gpus = []
    with contextlib.suppress(OSError):
        for node in sorted(
            (n for n in KFD.iterdir() if n.name.isdecimal()), key=lambda n: int(n.name)
        ):
            with contextlib.suppress(OSError):
                text = (node / "properties").read_text(errors="replace")
                version = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
                if version and (number := int(version[1])):
                    # 90402 is gfx942, 90010 is gfx90a: the last digit is hexadecimal
                    gfx = f"gfx{number // 10000}{number // 100 % 100}{number % 100:x}"
                    unique = re.search(r"^unique_id (\d+)$", text, re.MULTILINE)
                    uuid = f"GPU-{int(unique[1]):016x}" if unique else ""
                    gpus.append(GpuModel(f"AMD {gfx}", gfx, uuid=uuid))
    return gpus
