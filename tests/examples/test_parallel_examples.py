"""The examples of the kinds of parallelism: what they print alone and under mpirun, and that the
weights agree.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import odyssey

EXAMPLES = Path(odyssey.__file__).parents[2] / "examples"

# example -> ranks of the second run, what both print, what the second prints ({n}: its ranks)
RUNS = {
    "data_parallel.py": (3, "3 steps: test accuracy ", "12 workers on {n} ranks"),
    "large_model.py": (3, "train loss 2.", "dp(1) x pp(3) x tp(1)"),
    "pipeline.py": (3, "device 2  .  .  F0 B0--- F1", "dp(1) x pp(3) x tp(1)"),
    "tensor_parallel.py": (2, "train loss ", "dp(1) x pp(1) x tp(2)"),
    "zero.py": (2, "zero 3: parameters", "MiB on rank 0 of {n}"),
    "mixed_precision.py": (2, "fp16: test accuracy ", "steps skipped"),
    "overlapped.py": (2, "the same weights", "{n} ranks, median step: overlapped "),
    "verify_own_script.py": (2, "train loss ", "3 steps"),
}


def weights(done) -> list[str]:
    return re.findall(r"weights ([0-9a-f]{16})", done.stdout)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_the_same_weights_alone_and_on_several_ranks(launch, name):
    ranks, both, second = RUNS[name]
    alone = launch.python(EXAMPLES / name, "--steps", 3)
    several = launch.python(EXAMPLES / name, "--steps", 3, ranks=ranks)
    for done in (alone, several):
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert both in done.stdout
    assert second.format(n=ranks) in several.stdout
    assert weights(alone) and weights(alone) == weights(several)  # and rank 0 alone has printed


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_file_says_how_it_is_run_and_the_folder_lists_it(name):
    documented = (EXAMPLES / name).read_text().split('"""')[1]
    assert f"    python examples/{name}" in documented
    assert "mpirun" in documented or "odyssey verify" in documented
    assert f"`{name}`" in (EXAMPLES / "README.md").read_text()


def test_the_folder_lists_nothing_else():
    listed = set(re.findall(r"^\| `(\w+\.py)`", (EXAMPLES / "README.md").read_text(), re.M))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}


def test_zero_holds_less_with_each_stage(launch):
    done = launch.python(EXAMPLES / "zero.py", "--steps", 2, ranks=2)
    rows = re.findall(
        r"zero \d: parameters +([\d.]+)  gradients +([\d.]+)  optimizer +([\d.]+)", done.stdout
    )
    parameters, gradients, optimizer = zip(*(map(float, row) for row in rows), strict=True)
    assert optimizer[1] == optimizer[2] == optimizer[3] < 0.6 * optimizer[0]
    assert gradients[2] == gradients[3] < gradients[1] == gradients[0]
    assert parameters[3] < parameters[2] == parameters[1] == parameters[0]


def test_pipeline_schedules_give_the_same_weights(launch):
    both = [
        launch.python(EXAMPLES / "pipeline.py", "--steps", 2, "--schedule", kind)
        for kind in ("gpipe", "1f1b")
    ]
    assert weights(both[0]) == weights(both[1])
    assert both[0].stdout != both[1].stdout  # the pictures


def test_fp16_skips_the_steps_that_overflow(launch):
    done = launch.python(EXAMPLES / "mixed_precision.py", "--steps", 2)
    assert re.search(r"^fp16: .* 2 steps skipped$", done.stdout, re.M)
    assert "[precision] step 2 skipped: gradients overflowed at loss scale 134217728" in done.stderr
    done = launch.python(EXAMPLES / "mixed_precision.py", "--steps", 2, "--scaler-init-scale", 1024)
    assert re.search(r"^fp16: .* 0 steps skipped$", done.stdout, re.M)
    assert done.stderr == ""


def test_verify_takes_the_script(launch):
    script, layouts = EXAMPLES / "verify_own_script.py", ("dp=2", "tp=2")
    done = launch.python(
        "-m", "odyssey", "verify", "--script", script, "--layouts", *layouts, "--steps", 2
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bits") == 2
