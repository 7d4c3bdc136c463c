"""The step log of real trainings: the same on all layouts, parted where settings differ; their
steps taken again.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest

from odyssey import steplog
from odyssey.audit.steplog import SIZE

STEPS = 12
OPTIONS = (
    "--model",
    "mlp",
    "--steps",
    STEPS,
    "--global-batch-size",
    96,
    "--no-eval",
    "--no-progress",
)


@pytest.fixture(scope="module")
def runs(launch_once):
    """Run directories by name: of one process, of other layouts, of other settings; checkpoints
    of steps 5 and 10.
    """

    def train(name: str, *options: object, ranks: int = 0) -> Path:
        folder = launch_once.folder / name
        done = launch_once.train(
            *OPTIONS,
            "--run-dir",
            folder,
            "--checkpoint-every",
            5,
            "--keep",
            3,
            *options,
            ranks=ranks,
        )
        assert done.returncode == 0, done.stderr
        return folder

    return {
        "one": train("one"),
        "three ranks": train("three ranks", ranks=3),
        "zero": train("zero", "--zero", 3, ranks=2),
        "pipeline": train("pipeline", "--pp", 2, "--dp", 1, ranks=2),
        "tensor": train("tensor", "--tp", 2, "--dp", 1, ranks=2),
        "other rate": train("other rate", "--lr", 0.02),
        "other seed": train("other seed", "--seed", 3),
    }


def diff(launch_once, a: Path, b: Path) -> tuple[int, dict, str]:
    done = launch_once.python("-m", "odyssey", "diff", a, b, "--json", "diff.json")
    return done.returncode, json.loads((launch_once.folder / "diff.json").read_text()), done.stdout


def test_every_step_is_in_the_log(runs):
    records = steplog.decoded(steplog.load(runs["one"] / "steps" / "steps.log"))
    assert [r.step for r in records] == list(range(1, STEPS + 1))
    assert [(r.epoch, r.batch) for r in records] == [(0, i) for i in range(STEPS)]
    assert all(
        r.taken and r.samples == 96 and r.gradients and r.weights and r.loss > 0 for r in records
    )
    assert len({r.weights for r in records}) == len({r.gradients for r in records}) == STEPS


@pytest.mark.parametrize("layout", ["three ranks", "zero", "pipeline", "tensor"])
def test_layouts_have_the_same_log(launch_once, runs, layout):
    code, found, said = diff(launch_once, runs["one"], runs[layout])
    assert code == 0, said
    assert (found["same"], found["common_steps"], found["not_compared"]) == (True, STEPS, [])
    assert said.endswith(f"same for all {STEPS} common steps\n")


@pytest.mark.parametrize(
    ("other", "what", "setting"), [("other rate", "rate", "--lr"), ("other seed", "loss", "--seed")]
)
def test_settings_part_runs(launch_once, runs, other, what, setting):
    code, found, said = diff(launch_once, runs["one"], runs[other])
    assert (code, found["step"], found["what"]) == (1, 1, what)
    assert setting in found["settings"]
    assert f"the runs part at step 1 of {STEPS} (epoch 1, batch 1), in the {what}: " in said


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize(
    ("run", "step", "options", "start"),
    [
        ("one", 3, (), "the beginning"),
        ("three ranks", 12, (), "step_00000010"),
        ("pipeline", 7, (), "step_00000005"),
        ("one", 11, ("--ranks", 2), "step_00000010"),
        ("zero", 8, ("--layout", "pp=2,schedule=gpipe"), "step_00000005"),
    ],
)
def test_a_step_taken_again(launch_once, runs, run, step, options, start):
    before = contents(runs[run])
    done = launch_once.python("-m", "odyssey", "replay", runs[run], "--step", step, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  same\n") == 6
    assert f"step {step}: same bits" in done.stdout and f"from {start}" in done.stdout
    assert contents(runs[run]) == before


def test_saved_weights_have_the_fingerprint_of_the_log(launch_once, runs):
    from safetensors.numpy import load_file

    from odyssey import DistributedTrainer, nn, optim
    from odyssey.core import fingerprint

    path = launch_once.folder / "state.safetensors"
    done = launch_once.python(
        "-m", "odyssey", "replay", runs["three ranks"], "--step", "9", "--save", path
    )
    assert done.returncode == 0, done.stderr
    found = load_file(path)
    arena = DistributedTrainer(nn.models.build("mlp"), optim.SGD(lr=0.1)).arena
    logged = next(
        r for r in steplog.decoded(steplog.load(runs["one"] / "steps" / "steps.log")) if r.step == 9
    )
    for kind, expected in (("gradients", logged.gradients), ("weights", logged.weights)):
        parts = [
            fingerprint.of(found[f"{kind}/{name}"], arena.offsets[name]) for name, _ in arena.named
        ]
        assert fingerprint.add(parts) == expected


def test_a_wrong_bit_in_a_run_is_found_by_its_replay(launch_once, runs):
    """As if the weights of that step had been wrong: the record says another fingerprint."""
    path = runs["other seed"] / "steps" / "steps.log"
    data = bytearray(path.read_bytes())
    at = SIZE * 9  # the record of step 9
    data[at + 40] ^= 1
    data[at + 60 : at + 64] = struct.pack("<I", zlib.crc32(data[at : at + 60]))
    path.write_bytes(data)
    done = launch_once.python("-m", "odyssey", "replay", runs["other seed"], "--step", "9")
    assert done.returncode == 1
    assert "weights" in done.stdout and "DIFFERS" in done.stdout
    assert done.stdout.count("  same\n") == 5


SCRIPT = """
import sys
from odyssey import DistributedTrainer, data, nn, optim

loader = data.DataLoader(data.load("mnist", train=True), batch_size=64, shuffle=True)
trainer = DistributedTrainer(nn.models.build("mlp"), optim.SGD(lr=0.1, momentum=0.9))
trainer.fit(loader, steps=6)
open(sys.argv[1], "a").write("trained")
"""


def test_a_script_ends_after_the_step(launch_once, tmp_path):
    from odyssey.base.files import write_json

    script, run, out = tmp_path / "script.py", tmp_path / "run", tmp_path / "out"
    script.write_text(SCRIPT)
    run.mkdir(mode=0o700)
    write_json(run / "run.json", {"command": [str(script), str(out)]})
    launch_once.environment["ODYSSEY_RUN_DIR"] = str(run)
    try:
        assert launch_once.python(script, out).returncode == 0
    finally:
        del launch_once.environment["ODYSSEY_RUN_DIR"]
    assert out.read_text() == "trained"
    done = launch_once.python("-m", "odyssey", "replay", run, "--step", "6")
    assert done.returncode == 0, done.stderr
    assert "step 6: same bits, in all 6 steps from the beginning" in done.stdout
    assert out.read_text() == "trained"
