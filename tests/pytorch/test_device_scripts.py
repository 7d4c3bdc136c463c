"""Scripts of DDP, FSDP2, Accelerate and Lightning over backend "odyssey", as users write them for
GPUs, have the weights of the CPU on the pretended device (device_scripts.py).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)

PROGRAM = Path(__file__).with_name("device_scripts.py")
SCRIPTS = ["ddp", "ddp_static_graph", "ddp_unused", "ddp_accumulates", "fsdp", "fsdp_bf16"]
OF_LIBRARIES = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name)]
# Autocast of CPUs and of GPUs casts the arguments of different operations.
ON_DEVICE_ONLY = ["ddp_autocast"]


def run(launch, device: str, ranks: int, scripts: list[str]) -> dict[str, set[str]]:
    """Returns the hashes that the ranks print for each script."""
    done = launch.python("-W", "ignore", PROGRAM, device, *scripts, ranks=ranks)
    assert done.returncode == 0, done.stderr
    found: dict[str, set[str]] = {}
    for name, digest in re.findall(r"^script (\w+) ([0-9a-f]{16})$", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(digest)
    assert done.stdout.count("script ") == ranks * len(scripts), done.stdout
    assert [*found] == scripts
    return found


@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 3])
def test_a_script_for_gpus_has_the_weights_of_the_cpu(launch, ranks):
    scripts = [*SCRIPTS, *OF_LIBRARIES]
    expected = run(launch, "cpu", ranks, scripts)
    found = run(launch, "pretend", ranks, [*scripts, *ON_DEVICE_ONLY])
    assert all(len(digests) == 1 for digests in found.values()), found
    assert {name: found[name] for name in scripts} == expected
