"""Sums of several ranks that are added on a device, over links that move bytes only, or through the
memory of the host. device_links.py has the cases. The device is a pretended one (pretend.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("device_links.py")
CASES = (
    "direct zero zero2 zero3 fp16 hierarchical frozen errors no_way peers peers_zero3 streams_zero3"
).split()
HOST = "odyssey: [torch] sums of ranks go through the memory of the host: "
NO_WAY = HOST + "nothing: the last rank has no such way; wrong: a pattern did not arrive"


def run(launch, ranks: int, *cases: str) -> tuple[dict[str, str], list[str]]:
    """Returns the hash of each case, and the lines about the memory of the host."""
    done = launch.python("-W", "ignore", PROGRAM, *cases, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.split()
    found = dict(zip(lines[::2], lines[1::2], strict=True))
    assert len(lines) == 2 * len(cases) * max(ranks, 1)
    assert len({*zip(lines[::2], lines[1::2], strict=True)}) == len(cases)
    return found, [line for line in done.stderr.splitlines() if "memory of the host" in line]


@pytest.fixture(scope="module")
def alone(launch_once) -> dict[str, str]:
    found, said = run(launch_once, 0, *CASES)
    assert not said
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_sums_on_the_device_have_the_bits_of_one_process(launch, alone, ranks):
    found, said = run(launch, ranks, *CASES)
    assert found == alone
    assert said == [HOST + "reduction='hierarchical' runs there", NO_WAY]


def test_a_setting_sends_sums_through_the_host(launch, alone):
    launch.environment["ODYSSEY_DEVICE_SUMS"] = "host"
    found, said = run(launch, 2, "no_way")
    assert found == {"no_way": alone["direct"]}
    assert said == [HOST + "ODYSSEY_DEVICE_SUMS=host"]


def test_a_wrong_setting_is_reported_once(launch):
    launch.environment["ODYSSEY_DEVICE_SUMS"] = "gpu"
    done = launch.python("-W", "ignore", PROGRAM, "direct", ranks=2)
    assert done.returncode == 64, done.stderr
    text = "[torch] ODYSSEY_DEVICE_SUMS=gpu isn't supported; use auto or host"
    assert done.stderr.count(text) == 1, done.stderr
