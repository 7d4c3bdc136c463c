"""The real kernels for GPUs, compiled for three kinds of them: the code is there, assembles, and
keeps in registers.

`pytest -s` prints what each kernel takes. What the code computes: tests/gpu.
"""

from __future__ import annotations

import re

import pytest
from building import gpu_code, ptx

from odyssey.compile import library as build

ENOUGH = 100  # kernels; there are some 150, many of them forms of one function
# For NVIDIA's tensor cores; other GPUs have the plain ones.
NVIDIA_ONLY = {"_correlate", "_weights"}
SPILLED = 64  # bytes, of any kernel


@pytest.mark.skipif(not ptx.available(), reason="the PTX assembler is not installed")
def test_the_library_for_sm_90_assembles_and_spills_nothing(monkeypatch):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    found = gpu_code.of_library(build.gpu_library_path("sm_90"))
    print("", *gpu_code.lines(found), sep="\n")
    assert len(found) > ENOUGH
    assert {ptx.target(kernel.text) for kernel in found} == {"sm_90a"}
    assert all(kernel.usage for kernel in found)
    assert [kernel.entry for kernel in found if kernel.usage.spilled > SPILLED] == []
    # what a block may have without being asked for
    assert max(kernel.usage.shared for kernel in found) <= 48 << 10


def test_every_kernel_compiles_for_sm_80_and_gfx942():
    """Minutes of the compiler."""
    lines: list[str] = []
    failures = gpu_code.check_accelerators(lines.append, ("sm_80", "gfx942"))
    print("", *lines, sep="\n")
    assert failures == 0, lines
    assert [line.split()[0] for line in lines][:2] == ["sm_80", "gfx942"]
    for line, absent in zip(lines, (set(), NVIDIA_ONLY), strict=False):
        kernels, functions = map(
            int, re.search(r"(\d+) kernels from (\d+) functions", line).groups()
        )
        assert kernels > ENOUGH and functions >= 30, line
        assert set(re.findall(r"(\w+) \(mojo/", line)) <= absent, line
