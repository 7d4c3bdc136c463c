"""Products on Hopper's tensor cores (hopper/wgmma.mojo), which use TMA, mbarriers and wgmma, on
an emulated GPU.

The bits of results that are not exact are a question for a real GPU: the emulated one rounds in its
own way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu import emulated
from gpu.programs import MOJO, compiled, start

FOLDER = Path(__file__).with_name("hopper")
KERNEL = FOLDER / "wgmma.mojo"
LAYER = FOLDER / "layer.mojo"

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None or MOJO is None, reason="no C compiler or no mojo"
)


@pytest.mark.parametrize("order", ["", "3"])
def test_products_are_right(order: str) -> None:
    """Exact sums, in order and with blocks and warps shuffled."""
    done = start(compiled(FOLDER / "check.mojo", KERNEL, LAYER), memory="4G", order=order)
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, last = done.stdout.splitlines()
    assert len(cases) == 36
    assert all(" wrong 0 of " in case for case in cases)
    assert last == "wrong in all: 0"


def test_bits_do_not_depend_on_tiles_lanes_or_shards() -> None:
    done = start(compiled(FOLDER / "bits.mojo", KERNEL, LAYER), memory="4G", timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 36
    assert all(" same 0x" in line for line in lines)
    # of three products, the first and the third shard
    assert len({line.split()[-1] for line in lines}) == 6


def test_the_benchmark_starts() -> None:
    """Its times say nothing here."""
    done = start(
        compiled(FOLDER / "bench.mojo", KERNEL, LAYER), "--turns", 1, 1, memory="4G", timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 48  # 2 lanes, 4 layers, 3 products, 2 widths


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (
            "_barrier_expect(here, STAGE)",
            "_barrier_expect(here, STAGE + 16)",
            "0 of 1 arrivals and 16 bytes are missing",
        ),
        (
            "_barrier_expect(here, STAGE)",
            "_barrier_expect(here, STAGE - 16)",
            "16 bytes too many came",
        ),
        ("UInt32(CONSUMERS // 32))", "UInt32(CONSUMERS // 32 + 1))", "1 of 9 arrivals are missing"),
        ("_barrier_wait(full + 8 * stage, parity)\n", "pass\n", "which nobody has written"),
    ],
)
def test_mistakes_are_found(tmp_path: Path, was: str, now: str, said: str) -> None:
    """The kernel with a wrong count, or without a wait, does not pass.

    The narrowest tiles show it.
    """
    text = KERNEL.read_text()
    assert text.count(was) == 1
    kernel, layer, check = (tmp_path / path.name for path in (KERNEL, LAYER, FOLDER / "check.mojo"))
    kernel.write_text(text.replace(was, now))
    layer.write_text(LAYER.read_text())
    cases = (
        (FOLDER / "check.mojo")
        .read_text()
        .replace("[16, 64]", "[16]")
        .replace("[64, 128, 256]", "[64]")
    )
    check.write_text(cases)
    done = start(compiled(check, kernel, layer), memory="4G")
    assert done.returncode != 0
    assert said in done.stderr, done.stdout + done.stderr
