"""Every example runs to its end, alone and on two ranks, and only rank 0 speaks."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import odyssey

EXAMPLES = Path(odyssey.__file__).parents[2] / "examples"

# What the quick form of each prints, alone and on two ranks ({n}); what must be found in its
# output.
PRINTED = {
    "accumulation.py": ["10 passes, 3 steps, 3 reductions: loss 2.", "on {n} ranks"],
    "collectives.py": [
        "rank 0 of {n}",
        "all_reduce: ",
        "broadcast: [3.0, 1.0, 4.0]",
        "sum of my group: 0",
    ],
    "custom_ring_allreduce.py": [
        "1,003 floats on {n} ranks: largest difference",
        "ring: ",
        "all_reduce: ",
    ],
    "ddp_loop.py": ["epoch 1: loss 2.", "on {n} ranks"],
    "gpt.py": ["5 steps on {n} ranks: ", "HAMLET"],
    "jax_gradients.py": ["step 3: loss 1.908 on {n} ranks"],
    "manual_multi_device.py": ["step 3: loss 2."],
    "metric_average.py": ["loss 2.30", "of 101 samples", "on each of {n} ranks"],
    "mnist_distributed.py": ["epoch 1: test loss ", "({n} ranks)"],
    "own_op.py": ["with mish, on {n} ranks"],
    "resnet.py": ["test accuracy ", "weights ", " on {n} ranks"],
    "save_and_load.py": ["net.safetensors: 10 arrays, read by {n} ranks, the same outputs"],
}


def test_every_example_is_here():
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert PRINTED.keys() <= files


@pytest.fixture(scope="module")
def quick(launch_once):
    """The quick form of an example, on so many ranks; each is run once."""
    return functools.cache(
        lambda name, ranks: launch_once.python(EXAMPLES / name, "--quick", ranks=ranks)
    )


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_an_example_runs(quick, name, ranks):
    if name.startswith("jax"):
        pytest.importorskip("jax")
    done = quick(name, ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in PRINTED[name]:
        assert done.stdout.count(text.format(n=max(ranks, 1))) == 1, done.stdout
    assert f"python examples/{name}" in (EXAMPLES / name).read_text().split('"""')[1]


def test_figures_do_not_depend_on_the_ranks(quick):
    alone, two = (quick("metric_average.py", ranks) for ranks in (0, 2))
    assert alone.stdout.splitlines()[0] == two.stdout.splitlines()[0]
    for name in ("accumulation.py", "resnet.py"):
        alone, two = (quick(name, ranks) for ranks in (0, 2))
        assert alone.stdout.split(" on ")[0] == two.stdout.split(" on ")[0]


def test_copies_by_hand_give_the_same_bits_wherever_they_are(launch):
    example = EXAMPLES / "manual_multi_device.py"
    said = {
        launch.python(example, "--devices", 4 // ranks, "--steps", 12, ranks=ranks).stdout.replace(
            "\r", ""
        )
        for ranks in (1, 2, 4)
    }
    assert len(said) == 1 and re.search(
        r"^step 12: loss 2\.\d{4} on 4 devices\nweights [0-9a-f]{12}$", said.pop(), re.M
    )
