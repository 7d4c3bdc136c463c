"""`odyssey diff`: the first step in which two runs part, in what, with both values, and which
settings differ.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from odyssey.audit import replay
from odyssey.cli.commands.diff import command

COMMAND = ["/usr/bin/python", "-m", "odyssey.train", "--model", "mlp", "--lr", "0.1"]


def test_two_runs_that_are_the_same(launch, make_run, steps):
    a, b = (
        make_run("a", steps(30), COMMAND),
        make_run("b", steps(30), ["/else/python3", *COMMAND[1:]]),
    )
    done = launch.python("-m", "odyssey", "diff", a, b)
    assert (done.returncode, done.stdout, done.stderr) == (0, "same for all 30 common steps\n", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"epoch": 7},
            "in the cursor: epoch 2 batch 2 with 64 samples in A, epoch 8 batch 2 with 64 "
            "samples in B",
        ),
        ({"rate": 0.2}, "in the rate: 0.1 in A, 0.2 in B"),
        ({"loss": 0.25}, f"in the loss: {2.5 / 12!r} in A, 0.25 in B"),
        ({"gradients": 1}, "in the gradients: 0000000000000054 in A, 0000000000000001 in B"),
        ({"weights": 255}, "in the weights: fffffffffffffff4 in A, 00000000000000ff in B"),
        ({"taken": False}, "in the taken: True in A, False in B"),
    ],
)
def test_the_first_step_that_differs(tmp_path, make_run, steps, changes, said):
    a, b = (
        make_run("a", steps(30), COMMAND),
        make_run("b", steps(25, {12: changes, 20: {"loss": 0.0}}), COMMAND),
    )
    done = CliRunner().invoke(command, [str(a), str(b), "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 1
    assert done.output == f"the runs part at step 12 of 25 (epoch 2, batch 2), {said}\n"
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["same"], found["common_steps"], found["step"]) == (False, 25, 12)
    assert found["what"] in said and all(value in said for value in found["values"])


def test_settings_that_differ_are_named(launch, make_run, steps):
    a = make_run(
        "a",
        steps(3),
        [*COMMAND, "--run-dir", "a"],
        versions={"odyssey": "1", "numpy": "2"},
        started="x",
    )
    b = make_run(
        "b", steps(3, {1: {"rate": 0.2}}), ["python", "-m", "odyssey.train", "--model=mlp", "--lr", "0.2", "--no-eval"],
        versions={"odyssey": "1", "numpy": "3"}, started="y",
    )  # fmt: skip
    done = launch.python("-m", "odyssey", "diff", a, b)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:-1] == [
        "setting --lr: 0.1 in A, 0.2 in B",
        "setting --no-eval: not given in A, given in B",
        "setting versions.numpy: 2 in A, 3 in B",
    ]


def test_what_one_run_has_more(launch, make_run, steps):
    a, b = make_run("a", steps(30), COMMAND), make_run("b", steps(20)[5:], COMMAND)
    done = launch.python("-m", "odyssey", "diff", a, b)
    assert (
        done.stdout == "same for all 15 common steps (A has steps 1 to 30, B has steps 6 to 20)\n"
    )
    assert done.returncode == 0


def test_no_step_in_common_is_an_error(launch, make_run, steps):
    a, b = make_run("a", steps(30)[20:], COMMAND), make_run("b", steps(20), COMMAND)
    done = launch.python("-m", "odyssey", "diff", a, b)
    assert done.returncode == 65
    assert "no step in common: A has steps 21 to 30, B has steps 1 to 20" in done.stderr


def test_fingerprints_that_are_missing_are_said(launch, make_run, steps):
    without = [r._replace(gradients=None) for r in steps(5)]
    a, b = make_run("a", steps(5)), make_run("b", without)
    done = launch.python("-m", "odyssey", "diff", a, b)
    assert done.returncode == 0
    assert "no step has a fingerprint of its gradients in both runs" in done.stderr
    assert "has no run.json; settings are not compared" in done.stderr


def test_a_run_without_a_log(launch, make_run, steps, tmp_path):
    a = make_run("a", steps(3), COMMAND)
    done = launch.python("-m", "odyssey", "diff", a, tmp_path)
    assert done.returncode == 65 and "has no step log" in done.stderr
    assert done.stderr.count("\n") == 1
    empty = make_run("empty", [], COMMAND)
    done = launch.python("-m", "odyssey", "diff", a, empty)
    assert done.returncode == 65 and "has no steps yet" in done.stderr


def test_superseded_records_do_not_count(make_run, steps):
    a = make_run("a", steps(10))
    b = make_run("b", [*steps(8, {7: {"loss": 1.0}, 8: {"loss": 1.0}}), *steps(10)[6:]])
    assert replay.compare(replay.log_of(a), replay.log_of(b)).same


def test_options_of_a_command():
    assert replay._parse_options(
        ["py", "train.py", "x", "--lr", "0.1", "--flag", "--name=a b", "--two", "1", "2"]
    ) == {
        "command": "train.py x",
        "--lr": "0.1",
        "--flag": "given",
        "--name": "a b",
        "--two": "1 2",
    }
