"""What is compiled for processors that are not here: the checks, with a stand-in for the
kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from building import gpu_code, ptx

from odyssey.compile import library as build
from odyssey.errors import BuildError

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import check_targets as targets  # noqa: E402


def test_cpus(tree, entries):
    lines = []
    assert targets.check_cpus(lines.append) == 0
    names = [line.split("  ")[0] for line in lines]
    x86 = [
        "x86-64",
        "x86-64-v3",
        "x86-64-v4",
        "x86-64-v4+avx512bf16",
        "x86-64-v4+avx512bf16+amx-bf16",
    ]
    assert names == [*x86, "aarch64 generic"]
    assert entries() == []


def test_cpus_that_fail_are_counted(tree, monkeypatch):
    monkeypatch.setattr(targets, "CPUS", targets.CPUS[:1])
    (tree / "mojo" / "capi.mojo").write_text("nonsense\n")
    lines = []
    assert targets.check_cpus(lines.append) == 1
    assert "failed" in lines[0]


def test_accelerators(gpu_tree, entries):
    lines = []
    assert targets.check_accelerators(lines.append, ("sm_90", "gfx942")) == 0, lines
    assert [line.split()[0] for line in lines] == ["sm_90", "gfx942"] and all(
        line.endswith("KiB") for line in lines
    )
    lines = []
    assert gpu_code.check_accelerators(lines.append, ("sm_90", "gfx942"), table=True) == 0, lines
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == ["sm_90", "gfx942"]
    assert (
        "1 kernels from 1 functions, assembled: at most" in lines[0]
        and "0 bytes spilled" in lines[0]
    )
    assert sum("kernels_gpu_numbers__double" in line for line in lines) == 2
    assert entries() == []


def test_a_kernel_that_nothing_reaches_is_named(gpu_tree):
    source = gpu_tree / "mojo" / "kernels" / "gpu" / "numbers.mojo"
    text = source.read_text()
    source.write_text(text + text[text.index("def _double") :].replace("double", "doubles"))
    lines = []
    assert gpu_code.check_accelerators(lines.append, ("sm_80",)) == 0
    assert lines[0].endswith("; without _doubles (mojo/kernels/gpu/numbers.mojo)")
    assert lines[1].endswith(
        "nothing reaches, so nothing compiles: _doubles (mojo/kernels/gpu/numbers.mojo)"
    )


@pytest.mark.skipif(not ptx.available(), reason="the PTX assembler is not installed")
def test_kernels_of_a_library(gpu_tree):
    (kernel,) = gpu_code.of_library(build.gpu_library_path("sm_90"))
    assert (
        kernel.entry.startswith("kernels_gpu_numbers__double")
        and ptx.target(kernel.text) == "sm_90a"
    )
    assert 4 <= kernel.usage.registers <= 32 and kernel.usage.spilled == 0
    assert kernel.text.rstrip().endswith("}")


def test_accelerators_that_fail_are_counted(gpu_tree):
    (gpu_tree / "mojo" / "gpu_capi.mojo").write_text("nonsense\n")
    lines = []
    assert targets.check_accelerators(lines.append, ("sm_90", "sm_1")) == 2
    assert (
        "did not compile for sm_90 and " in lines[0] and "knows no accelerator 'sm_1'" in lines[1]
    )


def test_kernels_are_known_by_their_functions(tmp_path):
    folder = tmp_path / "mojo" / "kernels" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    (folder / "a.mojo").write_text(
        "def _map2[\n    f: F\n](): ...\n"
        "comptime _third = _real[4]\n"
        "def launch[\n    kernel: def(Int) thin\n]() raises {imm}:\n    "
        "q.enqueue_function[kernel](x)\n"
        "def all():\n    launch[_one[low]]()\n    launch[\n        _two]()\n"
        "    q.enqueue_function[_map](x)  # enqueue_function[_not]\n"
        "    q.enqueue_function[\n    _map2[f]](x)\n    q.enqueue_function[_third](x)\n"
    )
    (folder / "b.mojo").write_text("from .a import all\ndef _map(): ...\ndef _map2(): ...\n")
    a, b = "mojo/kernels/gpu/a.mojo", "mojo/kernels/gpu/b.mojo"
    assert gpu_code.launched(tmp_path) == {
        (a, name) for name in ("_map2", "_real", "_one", "_two")
    } | {(b, "_map")}

    known = sorted(gpu_code.launched(tmp_path))

    def source(entry, *lines, of="a.mojo"):
        text = f'\t.file\t2 "/x/other.mojo"\n\t.file\t7 "{folder}/{of}"\n\t.loc\t2 1 0\n'
        return gpu_code._source(
            tmp_path, entry, text + "".join(f"\t.loc\t7 {line} 5\n" for line in lines), known
        )

    assert source("kernels_gpu_b__map_Po6A6A_1234", of="b.mojo") == (b, "_map")
    assert source("kernels_gpu_a__real6A6A_1234") == (a, "_real")
    assert source("kernels_gpu_a__map26A6A_1234") == (a, "_map2")
    assert source("kernels_gpu_a__re6A6A_1234") is None
    assert source("kernels_gpu_c__map26A6A_1234") is None
    # cut after 29 characters
    (folder / "pools.mojo").write_text(
        "def _max_pool_forward():\n    a()\n\ndef _max_pool_forward_2x2():\n    a()\n\ndef "
        "helper():\n    a()\n"
        "def all():\n    enqueue_function[_max_pool_forward](x)\n    "
        "enqueue_function[_max_pool_forward_2x2](x)\n"
    )
    (folder / "with_a_long_name_x.mojo").write_text(
        "def _one(): ...\ndef all():\n    enqueue_function[_one]()\n"
    )
    known = sorted(gpu_code.launched(tmp_path))
    pools = "mojo/kernels/gpu/pools.mojo"
    assert source("kernels_gpu_pools__max_pool_f6A6A_12", 8, 2, of="pools.mojo") == (
        pools,
        "_max_pool_forward",
    )
    assert source("kernels_gpu_pools__max_pool_f6A6A_13", 5, 2, of="pools.mojo") == (
        pools,
        "_max_pool_forward_2x2",
    )
    assert source("kernels_gpu_pools__max_pool_f6A6A_14", 8, of="pools.mojo") is None
    amd = f'\t.file\t1 "{folder}" "pools.mojo"\n\t.loc\t1 4 0\n'
    found = gpu_code._source(tmp_path, "kernels_gpu_pools__max_pool_f6A6A_12", amd, known)
    assert found == (pools, "_max_pool_forward_2x2")
    assert source("kernels_gpu_with_a_long_name_6A6A_12") == (
        "mojo/kernels/gpu/with_a_long_name_x.mojo",
        "_one",
    )


# -- the assembler ---------------------------------------------------------------------------------

PTX = """.version 8.1
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 p)
{
  .reg .b64 %r<3>;
  .reg .f32 %f<3>;
  .shared .align 4 .b8 kept[256];
  ld.param.u64 %r1, [p];
  ld.global.f32 %f1, [%r1];
  st.shared.f32 [kept], %f1;
  bar.sync 0;
  ld.shared.f32 %f1, [kept+4];
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%r1], %f2;
  ret;
}
"""


@pytest.mark.skipif(not ptx.available(), reason="the PTX assembler is not installed")
def test_assembler():
    assert (ptx.target(PTX), ptx.entries(PTX)) == ("sm_80", ["twice"])
    used = ptx.assemble(PTX)["twice"]
    assert 4 <= used.registers <= 32 and used.shared == 256 and (used.stack, used.spilled) == (0, 0)
    with pytest.raises(
        BuildError, match="the PTX of twice does not assemble: .*error.*Arguments mismatch"
    ):
        ptx.assemble(PTX.replace("add.f32 %f2, %f1", "add.f32 %f2, %f9"))


def test_what_the_assembler_prints():
    said = (
        "ptxas info    : Compiling entry function 'a_1' for 'sm_90a'\n"
        "ptxas info    : Function properties for a_1\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, "
        "1024 bytes smem\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
        "ptxas info    : Used 8 registers\n"
    )
    assert ptx.usages(said) == {"a_1": ptx.Usage(168, 1024, 16, 12), "b": ptx.Usage(8, 0, 0, 0)}
