"""Which GPUs there are: the drivers are stand-ins, so that it can be asked anywhere."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey.cli import doctor
from odyssey.compile import gpus
from odyssey.compile import library as build
from odyssey.compile.gpus import GpuModel
from odyssey.errors import DeviceError

H200 = GpuModel("H200", "sm_90", "580.65.06", "GPU-aaaa-1")
A100 = GpuModel("A100", "sm_80", "580.65.06", "GPU-bbbb-2")


class Nvml:
    """What NVML answers, of these GPUs: (name, major, minor, uuid)."""

    def __init__(self, *listed: tuple[str, int, int, str], fails: str = "") -> None:
        self.listed, self.fails, self.open = listed, fails, 0

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: 999 if name == self.fails else self.answer(name, *arguments)

    def answer(self, name, *arguments):
        of = (
            self.listed[arguments[0].value - 1]
            if arguments and isinstance(arguments[0], ctypes.c_void_p)
            else None
        )
        if name == "nvmlInit_v2":
            self.open += 1
        elif name == "nvmlShutdown":
            self.open -= 1
        elif name == "nvmlDeviceGetCount_v2":
            arguments[0]._obj.value = len(self.listed)
        elif name == "nvmlDeviceGetHandleByIndex_v2":
            arguments[1]._obj.value = arguments[0].value + 1
        elif name == "nvmlDeviceGetCudaComputeCapability":
            arguments[1]._obj.value, arguments[2]._obj.value = of[1], of[2]
        elif name == "nvmlSystemGetDriverVersion":
            arguments[0].value = b"580.65.06"
        else:
            arguments[1].value = {"nvmlDeviceGetName": of[0], "nvmlDeviceGetUUID": of[3]}[
                name
            ].encode()
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with these GPUs of NVIDIA's; `kfd` is where AMD's would be."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ODYSSEY_TARGET_ACCELERATOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "KFD", tmp_path / "nodes")

    def make(*listed, **settings):
        nvml = Nvml(*listed, **settings)
        monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: nvml)
        gpus.found.cache_clear()
        return nvml

    yield make
    gpus.found.cache_clear()


def test_nvidia(machine, monkeypatch):
    nvml = machine(("H200", 9, 0, "GPU-aaaa-1"), ("A100", 8, 0, "GPU-bbbb-2"))
    assert gpus.found() == (H200, A100)
    assert nvml.open == 0
    assert (gpus.count(), gpus.accelerator()) == (2, "sm_90")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus.found.cache_clear()
    assert gpus.found() == (A100,)
    monkeypatch.setenv("ODYSSEY_TARGET_ACCELERATOR", "gfx942")
    assert gpus.accelerator() == "gfx942"


@pytest.mark.parametrize(
    "fails", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetCudaComputeCapability"]
)
def test_a_driver_that_does_not_answer_has_no_gpus(machine, fails):
    nvml = machine(("H200", 9, 0, "GPU-aaaa-1"), fails=fails)
    assert gpus.found() == () and gpus.accelerator() is None
    assert nvml.open == 0


def test_no_driver_at_all(machine, monkeypatch):
    machine()

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", absent)
    assert gpus.found() == ()


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, [H200, A100]),
        ("", []),
        ("-1", []),
        ("1,0", [A100, H200]),
        ("0,5,1", [H200]),  # CUDA ends the list there
        ("0,0", [H200]),
        ("GPU-b", [A100]),
        ("GPU-", []),  # fits both
        ("MIG-1,MIG-2", [H200, H200]),
        ("x", []),
    ],
)
def test_what_a_process_may_see(setting, chosen):
    assert gpus.visible([H200, A100], setting) == chosen


def test_amd(machine, tmp_path, monkeypatch):
    machine()
    for number, text in enumerate(
        ("gfx_target_version 0", "gfx_target_version 90402\nunique_id 255", "x")
    ):
        (tmp_path / "nodes" / str(number)).mkdir(parents=True)
        (tmp_path / "nodes" / str(number) / "properties").write_text(f"simd_count 1\n{text}\n")
    (tmp_path / "nodes" / "2" / "properties").write_text("gfx_target_version 90010\n")
    assert [gpu.accelerator for gpu in gpus.found()] == ["gfx942", "gfx90a"]
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    gpus.found.cache_clear()
    assert [gpu.accelerator for gpu in gpus.found()] == ["gfx90a"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("nvidia:sm_100a", "sm_100"),
        ("gfx90a", "gfx90a"),
        (" MI300X ", "mi300x"),
    ],
)
def test_one_name_for_each_kind(name, known):
    assert gpus.canonical(name) == known


@pytest.mark.parametrize("name", ["../x", "sm 90", "9", "a" * 40, "sm_90\n--output", "-D"])
def test_what_names_no_accelerator(name):
    with pytest.raises(DeviceError, match="names no accelerator; give one such as sm_90 or gfx942"):
        gpus.canonical(name)


def test_what_the_doctor_says(machine, monkeypatch, tmp_path):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    machine()
    assert doctor.gpus() == doctor.Check("gpus", doctor.OK, "none: CPU workers are used")
    machine(("H200", 9, 0, "a"), ("H200", 9, 0, "b"), ("A100", 8, 0, "c"))
    monkeypatch.setattr(
        build, "cached", lambda accelerator: tmp_path / f"libodyssey-{accelerator}.so"
    )
    said = f"2 x H200 (sm_90), 1 x A100 (sm_80), kernels {tmp_path}/libodyssey-sm_90.so"
    assert doctor.gpus() == doctor.Check("gpus", doctor.OK, said)
    monkeypatch.setattr(build, "cached", lambda accelerator: None)
    found = doctor.gpus()
    assert (
        found.state == doctor.WARN and "`odyssey build --target sm_90` does it now" in found.line()
    )
    monkeypatch.setattr(gpus, "DRIVER", 999)
    assert (
        doctor.gpus()
        .line()
        .endswith("1 x A100 (sm_80), driver 580.65.06; install driver 999 or newer")
    )
    monkeypatch.setattr(gpus, "DRIVER", 1)
    monkeypatch.setenv("ODYSSEY_KERNELS", str(tmp_path))
    assert "no file" in doctor.gpus().line() and doctor.gpus().state == doctor.WARN


FAKE = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.1", n); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(0x700000000000ul + i); return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { strncpy(s, "Chip", n); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b)
{ *a = 10; *b = (unsigned long)h & 1 ? 3 : 0; return (unsigned long)h >> 40 != 0x70; }
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a library of Linux")
def test_a_library_in_c_is_called_as_it_is_declared(tmp_path):
    """Handles are pointers of 64 bits; nvmlDeviceGetUUID is missing."""
    (tmp_path / "nvml.c").write_text(FAKE)
    subprocess.run(
        ["cc", "-w", "-shared", "-fPIC", "-o", tmp_path / gpus.NVML, tmp_path / "nvml.c"],
        check=True,
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    environment |= {
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": str(Path(gpus.__file__).parents[2]),
    }
    script = "from odyssey.compile import gpus\n"
    script += "print(*(f'{g.name} {g.accelerator} {g.driver}' for g in gpus.found()), sep=';')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("Chip sm_100 580.1;Chip sm_103 580.1\n", "")
