"""Convolutions on an emulated GPU: against float64, the same bits for any shards and fold, the
fused op as on the CPU.

The checks are in conv2d_check.mojo. Nothing here was run on a GPU and nothing here says anything
about time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu import emulated

from odyssey.compile import compiler
from odyssey.compile import library as build

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled conv2d_check.mojo (half a minute), from the cache if no source has changed."""
    root = build.source_root()
    source = HERE / "conv2d_check.mojo"
    key = hashlib.sha256((compiler.compiler_version() + Path(__file__).read_text()).encode())
    kernels = sorted((root / "mojo" / "kernels" / "gpu").glob("conv2d*.mojo"))
    names = ("lanes", "conv2d", "conv2d_general", "pool", "gpu/launch")
    others = [root / "mojo" / "kernels" / f"{name}.mojo" for name in names]
    for path in (source, root / "tests" / "mojo" / "numbers.mojo", *kernels, *others):
        key.update(path.read_bytes())
    target = build.cache_dir() / "tests" / f"conv2d_check-{key.hexdigest()[:16]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = tmp_path_factory.mktemp("build") / target.name
        # With so few blocks each has several tiles of pixels, as it has at large batches.
        options = [
            "-I",
            str(root / "mojo"),
            "-I",
            str(root / "tests" / "mojo"),
            "-D",
            "CONV_ENOUGH_BLOCKS=4",
        ]
        done = compiler.run_mojo(
            ["build", "--target-accelerator", "sm_90", *options, str(source), "-o", str(fresh)]
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.copy(fresh, f"{target}.{os.getpid()}")
        os.replace(f"{target}.{os.getpid()}", target)
    return target


def check(program: Path, *names: str, **settings: object) -> str:
    environment = emulated.environment(**settings)
    done = subprocess.run(
        [program, *names], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "all ok" in done.stdout, done.stdout + done.stderr
    return done.stdout


GENERAL = [
    *(
        "groups",
        "depthwise",
        "multiplier",
        "dilation",
        "both",
        "stride over dilation",
        "common factor",
        "signal",
    )
]
LAYERS = [
    "lenet1",
    "lenet2",
    "convnet1",
    "convnet2",
    "1x1",
    "stride2",
    "oblong",
    "thin",
    "point",
    "seven",
]
STRIDED = ["strided", "gaps", "three", "uneven", "wide"]


def test_results_are_close_to_float64(program):
    """Forward (of small layers also the bits of the CPU's kernel), both gradients; nothing is
    written outside.
    """
    assert check(program, *LAYERS).count(" ok\n") == len(LAYERS) + 1


def test_gradients_of_strided_inputs(program):
    """Each phase of the input's pixels with its own taps; more steps than taps; sizes that are
    no multiples of it.
    """
    assert check(program, *STRIDED, late=1, order=2).count(" ok\n") == len(STRIDED) + 1


def test_groups_and_dilation(program):
    """The same of convolutions with groups of channels or dilation, also where strides pass over
    taps.
    """
    assert check(program, *GENERAL, late=1, order=3).count(" ok\n") == len(GENERAL) + 1


@pytest.mark.parametrize("name", ["large5", "large3", "large1"])
def test_large_tiles(program, name):
    check(program, name)


@pytest.mark.parametrize(
    "name", ["bits5", "bits3", "bits0", "bits of groups", "bits of a large layer"]
)
def test_bits_do_not_depend_on_shards_and_fold(program, name):
    """1, 2, 3, 5 and 8 shards, 1 to 8 of them in a buffer; added to a buffer and written to one."""
    assert f"{name} precision 0 bits ok" in check(program, name)


def test_pooling_in_the_same_launch(program):
    """Values and argmax have the bits of the CPU's three ops, also for windows that overlap and
    rounded factors.
    """
    assert check(program, "pooled").count("pooled") == 7


def test_low_precision(program):
    """Against float64 sums of rounded factors; on tensor cores where the layer is large enough."""
    out = check(program, "low")
    assert out.count("shards 1 ok") == 25 and out.count("bits ok") == 3


def test_results_are_the_same_when_warps_run_in_another_order(program):
    """And when each launch runs late, on a thread of its own."""
    check(program, "lenet1", "convnet2", "bits0", order=7, late=1)


def test_too_large_a_fold_is_refused(program):
    check(program, "errors")


def test_memory_is_read_in_whole_sectors(program, tmp_path):
    """Activations are read 64 bytes at a time, weights once for many threads, without conflicts
    in shared memory.
    """
    check(program, "lenet2", "convnet2", stats=tmp_path / "stats")
    rows = [json.loads(line) for line in (tmp_path / "stats").read_text().splitlines()]
    # A thread that packs weights reads a run of its own: the cache has what is left of a sector.
    kernels = [row for row in rows if "conv2d" in row["kernel"] and "__pack" not in row["kernel"]]
    assert len(kernels) >= 6
    for row in kernels:
        assert row["load_sectors"] * 32 <= 1.3 * row["load_bytes"], row
        assert row["shared_extra_wavefronts"] <= 0.02 * row["shared_wavefronts"], row
        assert row["local_bytes"] == 0, row
