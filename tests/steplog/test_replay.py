"""`odyssey replay` with a training of a few lines: what it starts from, what it compares, what
it says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from odyssey.audit import replay
from odyssey.audit.replay import REPLAY, ReplaySession
from odyssey.base.files import write_json
from odyssey.base.runs import RUN_DIR
from odyssey.cli.commands.replay import command
from odyssey.errors import ConfigError, DataError, OdysseyError
from odyssey.parallel.mesh import Mesh

# Halves a vector's distance to its target each step, as a user's script might; FLAKY changes one
# weight at step 8.
SCRIPT = """
import os, sys
import numpy as np
from odyssey import comm
from odyssey.core import fingerprint
from odyssey.checkpoints import Snapshot, Store
from odyssey.audit.replay import ReplaySession
from odyssey.base.runs import Run
from odyssey.audit.steplog import StepLog, StepRecord

session, world = ReplaySession.current(), comm.world()
run = None if session else Run.current()
w, first = np.arange(100, dtype=np.float32), 0
if session and session.checkpoint:
    snapshot = Store(session.checkpoint.parent, owner=False).load(session.checkpoint)
    w, first = snapshot.arrays["parameters"]["w"].copy(), snapshot.step
if world.rank == 0:
    log = StepLog(session.log if session else run.steps / "steps.log")
store = None if session or world.rank else Store(run.checkpoints, keep=2)
for step in range(first + 1, int(sys.argv[1]) + 1):
    g = w - np.float32(3)
    w = w - np.float32(0.5) * g
    if step == 8 and os.environ.get("FLAKY"):
        w[5] += 1
    if world.rank == 0:
        log.append(StepRecord(step, 0, step - 1, 64, float(g.sum()), fingerprint.of(g), fingerprint.of(w), 0.5))
    if store and step % 5 == 0:
        store.save(Snapshot(step, {"parameters": {"w": w}}, {}))
    if session and step == session.step:
        if world.rank == 0:
            log.close()
        session.end(world, {"w": w}, {"w": g})
if world.rank == 0:
    log.close()
    (run.path / "output").write_text("what comes after training")
"""


@pytest.fixture
def trained(launch, tmp_path):
    """trained(FLAKY=1): the run directory of SCRIPT after 12 steps; checkpoints of steps 5 and
    10.
    """

    def train(**environment: str) -> Path:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        run = tmp_path / "run"
        run.mkdir(mode=0o700)
        command = [sys.executable, str(script), "12"]
        write_json(run / "run.json", {"command": command, "directory": str(tmp_path)})
        launch.environment.update({RUN_DIR: str(run), **environment})
        done = launch(*command)
        assert done.returncode == 0, done.stderr
        for name in (RUN_DIR, *environment):
            del launch.environment[name]
        return run

    return train


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize(
    ("step", "start", "taken"), [(5, "the beginning", 5), (6, "step_00000005", 1)]
)
def test_a_step_alone(launch, trained, step, start, taken):
    run = trained()
    before = contents(run)
    done = launch.python("-m", "odyssey", "replay", run, "--step", step)
    assert done.returncode == 0, done.stderr
    assert (
        f"step {step}: same bits, in all {taken} step{'s' if taken > 1 else ''} from {start}"
        in done.stdout
    )
    assert done.stdout.count("  same\n") == 6
    assert f"are taken again on 1 rank, from {start}" in done.stderr
    assert contents(run) == before


def test_a_step_that_comes_out_otherwise(launch, trained):
    run = trained(FLAKY="1")
    done = launch.python("-m", "odyssey", "replay", run, "--step", "9", "--json", "out.json")
    assert done.returncode == 1
    assert (
        "step 9: DIFFERS, as does step 8, the first that differs from step_00000005 on"
        in done.stdout
    )
    found = json.loads((launch.folder / "out.json").read_text())
    assert found["first_different_step"] == 8 and found["differing"] == [
        "loss",
        "gradients",
        "weights",
    ]
    done = launch.python("-m", "odyssey", "replay", run, "--step", "8", "--json", "out.json")
    assert done.returncode == 1
    assert "step 8: DIFFERS; the 2 before it, from step_00000005 on, are the same" in done.stdout
    assert json.loads((launch.folder / "out.json").read_text())["differing"] == ["weights"]
    # from a checkpoint behind the fault there is none any more
    assert launch.python("-m", "odyssey", "replay", run, "--step", "11").returncode == 0


def test_save_writes_weights_and_gradients(launch, trained):
    from safetensors.numpy import load_file

    run = trained()
    done = launch.python(
        "-m", "odyssey", "replay", run, "--step", "7", "--save", "state.safetensors"
    )
    assert done.returncode == 0, done.stderr
    found = load_file(launch.folder / "state.safetensors")
    w = np.arange(100, dtype=np.float32)
    for _ in range(7):
        g = w - np.float32(3)
        w = w - np.float32(0.5) * g
    assert sorted(found) == ["gradients/w", "weights/w"]
    assert np.array_equal(found["weights/w"], w) and np.array_equal(found["gradients/w"], g)


def test_on_two_ranks(launch, trained):
    run = trained()
    done = launch.python("-m", "odyssey", "replay", run, "--step", "11", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "steps 11 to 11 are taken again on 2 ranks, from step_00000010" in done.stderr


def test_a_damaged_checkpoint_is_passed_over(launch, trained):
    run = trained()
    file = next((run / "checkpoints" / "step_00000010").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    done = launch.python("-m", "odyssey", "replay", run, "--step", "12")
    assert done.returncode == 0, done.stderr
    assert "in all 7 steps from step_00000005" in done.stdout
    assert "step_00000010 is refused" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--step", "6"], 65, "has no step 6; its log has steps 1 to 5"),
        (["--step", "0"], 64, "--step is 0; it must be at least 1"),
        (["--step", "3", "--ranks", "0"], 64, "--ranks is 0"),
        (["--step", "3", "--ranks", "2", "--layout", "dp=2"], 64, "give one"),
        (["--step", "3", "--layout", "nonsense"], 64, "'nonsense' in layout"),
        (["--step", "3", "--ranks", "2", "--launcher", "mpirun"], 64, "has no {ranks}"),
    ],
)
def test_what_is_refused(make_run, steps, options, code, said):
    done = CliRunner().invoke(command, [str(make_run("run", steps(5), ["x"])), *options])
    assert isinstance(done.exception, OdysseyError) and done.exception.exit_code == code
    assert said in str(done.exception)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('odyssey: error: no luck')", "the command failed: odyssey: error: " "no " "luck"),
        ("pass", "ended without a log of its steps"),
        ("from odyssey.audit.replay import *; steplog.StepLog(ReplaySession.current().log).close()",
         "ended before step 3"),
    ],
)  # fmt: skip
def test_a_command_that_does_not_train(make_run, steps, program, said):
    with pytest.raises(ConfigError, match=said):
        replay.replay(make_run("run", steps(5), [sys.executable, "-c", program]), 3)


def test_a_command_that_is_not_there(make_run, steps):
    with pytest.raises(ConfigError, match="/no/such/python cannot be started"):
        replay.replay(make_run("run", steps(5), ["/no/such/python"]), 3)


def test_a_command_that_others_could_have_written_is_not_run(launch, make_run, steps):
    run = make_run("run", steps(5), [sys.executable, "-c", "open('ran', 'w')"])
    os.chmod(run / "run.json", 0o666)
    done = launch.python("-m", "odyssey", "replay", run, "--step", "3")
    assert done.returncode == 64 and "can be written by other users" in done.stderr
    assert not (launch.folder / "ran").exists()


@pytest.mark.parametrize("command", [None, "python x.py", [], [1], ["a\0b"]])
def test_a_description_without_a_command(make_run, steps, command):
    run = make_run("run", steps(5), [])
    write_json(run / "run.json", {} if command is None else {"command": command})
    with pytest.raises(DataError, match="has no command"):
        replay.replay(run, 3)


def test_what_a_command_may_begin_with(make_run, steps):
    for words, expected in (
        (["train", "--model", "mlp"], [sys.executable, "-m", "odyssey.train", "--model", "mlp"]),
        (["a/b.py", "x"], [sys.executable, "a/b.py", "x"]),
        (["/bin/python", "b.py"], ["/bin/python", "b.py"]),
    ):
        run = make_run(f"run{len(words)}{words[0][-3:]}", steps(1), words)
        assert replay.command_of(run) == (expected, Path.cwd())


# --- the trainer's side ---


def test_no_replay():
    assert ReplaySession.current({}) is None
    assert ReplaySession.current({REPLAY: ""}) is None


def test_a_session_is_what_was_requested(tmp_path):
    given = ReplaySession(12, tmp_path, tmp_path / "step_00000010", "dp=2,zero=1", True)
    given.request()
    assert ReplaySession.current({REPLAY: given.variable}) == given
    assert given.arguments({}) == {"mesh": Mesh(2, 1, 1), "zero": 1, "servers": 1}
    ReplaySession(3, tmp_path).request()
    assert ReplaySession.current({REPLAY: f"3:{tmp_path}"}) == ReplaySession(3, tmp_path)
    assert ReplaySession(3, tmp_path).arguments({}) == {}


@pytest.mark.parametrize("value", ["12", "x:/tmp", ":/tmp", "12:", "-1:/tmp"])
def test_a_variable_that_is_none(value):
    with pytest.raises(ConfigError, match="must be STEP:DIRECTORY"):
        ReplaySession.current({REPLAY: value})


@pytest.mark.parametrize(
    "request_",
    [
        [],
        {},
        {"checkpoint": 1, "layout": "", "save": False},
        {"checkpoint": None, "layout": None, "save": 0},
    ],
)
def test_a_request_that_is_none(tmp_path, request_):
    write_json(tmp_path / "request.json", request_)
    with pytest.raises(DataError, match="has no checkpoint, layout and save"):
        ReplaySession.current({REPLAY: f"1:{tmp_path}"})


def test_the_layout_goes_before_the_trainers_own(tmp_path, monkeypatch):
    from odyssey import DistributedTrainer, nn, optim

    session = ReplaySession(1, tmp_path, layout="dp=1,execution=eager")
    session.request()
    monkeypatch.setenv(REPLAY, session.variable)
    trainer = DistributedTrainer(nn.models.build("mlp"), optim.SGD(lr=0.1), mesh=Mesh(2, 2, 1))
    assert trainer.mesh == Mesh(1, 1, 1) and trainer.layout.execution == "eager"
