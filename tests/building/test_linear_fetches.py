"""Linear layers fetch what they will read next: the instructions are in the code for each kind
of processor.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from odyssey.compile import compiler
from odyssey.compile import library as build

PROBE = """
from kernels.lanes import Ptr
from kernels.linear import linear_backward_input, linear_backward_weight, linear_forward


@export
def probe_forward(y: Ptr, x: Ptr, w: Ptr, b: Ptr, G: Int, I: Int, O: Int):
    linear_forward[False](y, x, w, b, G, I, O)


@export
def probe_input(dx: Ptr, dy: Ptr, w: Ptr, packed: Ptr, G: Int, I: Int, O: Int):
    linear_backward_input(dx, dy, w, packed, G, I, O)


@export
def probe_weight(dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, xt: Ptr, G: Int, I: Int, O: Int):
    linear_backward_weight(dw, db, dy, x, xt, G, I, O, I)
"""
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# Of a target: fetches to the first level of the cache, and to the second.
NAMES = {X86: ("prefetcht0", "prefetcht1"), ARM: ("pldl1keep", "pldl2keep")}


@pytest.mark.parametrize(
    ("triple", "cpu"), [(X86, "x86-64-v3"), (X86, "x86-64-v4"), (ARM, "generic")]
)
def test_kernels_of_linear_layers_fetch_ahead(triple, cpu, tmp_path):
    shutil.copytree(build.source_root() / "mojo" / "kernels", tmp_path / "mojo" / "kernels")
    (tmp_path / "mojo" / "probe.mojo").write_text(PROBE)
    code = tmp_path / "probe.s"
    compiler.compile_kernels(
        tmp_path, Path("mojo/probe.mojo"), code, cpu, emit="asm", triple=triple
    )
    text = code.read_text()

    def fetches(function: str) -> list[int]:
        start = text.index(f"\n{function}:")
        body = text[start : text.index(f".size\t{function}", start)]
        return [body.count(name) for name in NAMES[triple]]

    # a tile of each width fetches weights of the next panel
    assert fetches("probe_forward")[1] >= 6
    assert fetches("probe_input")[1] >= 6
    assert fetches("probe_input")[0] >= 3  # packing fetches the rows after the next ones
    elsewhere = fetches("probe_forward")[0] + fetches("probe_input")[0]
    # x of the next group and dy of the tile after the next
    assert text.count(NAMES[triple][0]) - elsewhere >= 90
