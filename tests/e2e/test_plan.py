"""`odyssey plan`: as a user calls it, beside trainings of two ranks."""

from __future__ import annotations

import json

import pytest

from odyssey.audit import planner

SCRIPT = """
import numpy as np, odyssey, sys
from odyssey import data, nn, optim
nn.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
x = np.zeros((64, 8), np.float32)
loader = data.DataLoader(data.arrays(x, np.arange(64) % 3), batch_size=64)
trainer = odyssey.DistributedTrainer(model, optim.Adam(), shard_size=16, threads=1)
trainer.fit(loader, steps=2, verbose=False)
if trainer.comm.rank == 0:
    print(sum(trainer.memory().values()), trainer.bytes_per_step)
"""


def test_plan_of_a_script(launch, tmp_path):
    """Memory and bytes of a script's layouts, beside those of the script on two ranks that share
    memory.
    """
    script, found = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    done = launch.python(
        "-m", "odyssey", "plan", script, "--ranks", 2, "--json", found, "-l", "dp=2", "dp=2,zero=3"
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(found.read_text())
    assert sorted(written["best"]) == ["dp=2", "dp=2,zero=3"]
    real = launch.python(script, ranks=2)
    memory, sent = real.stdout.split()
    one = written["layouts"][0]
    assert (one["memory"], one["layout"], one["why"]) == (int(memory), "dp=2", None) and one[
        "seconds"
    ] > 0
    assert one["sent"] == pytest.approx(float(sent), abs=200)
    assert "a batch of 64 samples is 4 shards of 16, which suits 2 replicas" in done.stdout
    small, large = sorted(written["layouts"], key=lambda plan: plan["memory"])
    limit = ("--memory", f"{(small['memory'] + 100) / 1e6}")
    done = launch.python(
        "-m", "odyssey", "plan", script, "--ranks", 2, "-l", "dp=2", "dp=2,zero=3", *limit
    )
    assert (
        f"no: takes {large['memory']:,} bytes of the {small['memory'] + 100:,} that a rank may have"
        in done.stdout
    )
    assert f"\n1. {small['layout']}\n" in done.stdout and "\n2." not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("lenet", "--ranks", 2),
            "'lenet' is no file and no model; give a script, or one of lenet5, mlp",
        ),
        (("mlp", "--ranks", 0), "--ranks is 0"),
        (("mlp", "--ranks", 2, "--per-node", 0), "--per-node is 0"),
        (
            ("mlp", "--ranks", 2, "-l", "dp=3"),
            "layout dp=3 has 3 ranks, and --ranks is 2; give layouts of 2",
        ),
        (("mlp", "--ranks", 2, "--bandwidth", -1), "--bandwidth is -1; give a number above 0"),
        (("mlp", "--ranks", 1, "--lr", "much"), "no layout can be trained; dp=1: "),
        (
            ("mlp", "--ranks", 2, "--measure", "--launcher", "nothing -n {ranks}"),
            "--measure: nothing cannot be started",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(launch, words, said):
    done = launch.python("-m", "odyssey", "plan", *words)
    assert done.returncode == 64 and said in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )


def test_a_script_that_trains_nothing_is_named(launch, tmp_path):
    (tmp_path / "empty.py").write_text("")
    done = launch.python("-m", "odyssey", "plan", tmp_path / "empty.py", "--ranks", 1)
    assert "dp=1: it called no fit() of a DistributedTrainer" in done.stderr


def test_the_link_of_two_ranks_is_measured():
    link, near = planner.measured(None)
    assert near and 0 < link.latency < 1 and 1e6 < link.bandwidth


def test_a_training_takes_the_best_layout(launch):
    """--layout auto on two ranks: one of the layouts that are planned, and the bits of one process."""
    options = ("--model", "mlp", "--steps", 3, "--no-eval", "--threads", 1)
    alone = launch.result(*options)
    found = launch.result(*options, "--layout", "auto", ranks=2)
    assert found["weights_sha256"] == alone["weights_sha256"]
    chosen = ",".join(f"{name}={found[name]}" for name in ("dp", "pp", "tp", "zero") if found[name])
    assert chosen in set(planner.layouts(2)), found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("train", "--layout", "auto", "--pp", 2),
            "--layout auto and --pp 2 are both given; leave one of them out",
        ),
        (("train", "--layout", "best"), "'best' is not 'auto'"),
    ],
)
def test_a_layout_that_is_not_taken(launch, words, said):
    done = launch.python("-m", "odyssey", *words)
    assert done.returncode == 64 and said in done.stderr, done.stderr
