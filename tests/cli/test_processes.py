"""The command line as processes: start-up, `python -m`, and how several ranks end together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey import cli

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, **environment},
    )


@pytest.mark.parametrize(
    "module", [("odyssey.train",), ("odyssey", "train"), ("odyssey.cli", "train")]
)
def test_the_same_command_in_every_way(module):
    done = run(sys.executable, "-m", *module, "--epochs", "0")
    assert done.returncode == 64
    assert done.stderr.startswith("odyssey: error: [train] --epochs is 0")
    assert done.stderr.count("\n") == 1
    assert run(sys.executable, "-m", *module, "--help").returncode == 0


def test_a_mistyped_option_answers_at_once_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom odyssey import cli\nprint([m for m in ('mpi4py', 'rich', 'max', "
        "'mojo') if m in sys.modules])"
    )
    assert run(sys.executable, "-c", code).stdout == "[]\n"
    times = []
    for _ in range(3):
        before = os.times()
        run(sys.executable, "-m", "odyssey.train", "--zork")
        after = os.times()  # the process's own time: others may have the cores
        times.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(times) < 0.5


def test_garbage_is_collected_again_when_the_training_begins():
    code = (
        "import gc, runpy, sys\n"
        "seen = []\n"
        "sys.argv[1:] = '--steps 1 --model mlp --global-batch-size 64 --no-eval "
        "--no-progress'.split()\n"
        "from odyssey import trainer\n"
        "fit = trainer.DistributedTrainer.fit\n"
        "def spied(*given, **more):\n"
        "    seen.append((gc.isenabled(), gc.get_freeze_count()))\n"
        "    return fit(*given, **more)\n"
        "trainer.DistributedTrainer.fit = spied\n"
        "disable = gc.disable\n"
        "gc.disable = lambda: seen.append('off') or disable()\n"
        "try:\n"
        "    runpy.run_module('odyssey.train', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "off, (enabled, frozen) = seen\n"
        "assert off == 'off' and enabled and frozen > 10000, seen\n"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_closed_pipe_is_no_traceback():
    done = run(
        "bash", "-c", f"set -o pipefail; '{sys.executable}' -m odyssey train --help | head -c 0"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        (
            "train --steps 1 --no-eval --no-progress > /dev/full",
            73,
            "[output] standard output cannot be written: No space",
        ),
        ("train --steps 1 --no-eval --no-progress | true", 141, ""),
        ("--version > /dev/full", 73, "[output] standard output cannot be written: No space"),
        ("inspect --help > /dev/full", 73, "[output] standard output cannot be written: No space"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_that_takes_nothing(rest, code, said, unbuffered):
    done = run(
        "bash",
        "-c",
        f"set -o pipefail; PYTHONUNBUFFERED={unbuffered} '{sys.executable}' -m odyssey {rest}",
    )
    assert done.returncode == code
    assert (
        (done.stderr.startswith(f"odyssey: error: {said}") and done.stderr.count("\n") == 1)
        if said
        else not done.stderr
    )


def test_a_reader_that_has_gone_is_no_difference(tmp_path):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "odyssey", "inspect", tmp_path]
    done = subprocess.run(
        words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=ENVIRONMENT
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "command", ["inspect x", "launch train", "train --steps 1 --no-eval --checkpoint-dir x"]
)
def test_a_removed_current_directory_is_one_line(command, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run(
        "bash",
        "-c",
        f"cd '{gone}' && rmdir '{gone}' && exec '{sys.executable}' -m odyssey {command}",
    )
    assert done.returncode == 64
    assert re.fullmatch(
        r"odyssey: error: .*the current directory has been removed; .*\n", done.stderr
    ), done.stderr


def mpiexec():
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found, "mpiexec comes with the package mpich"
    return found


def test_the_same_mistake_on_three_ranks_is_one_line():
    done = run(mpiexec(), "-n", "3", sys.executable, "-m", "odyssey.train", "--lr", "nan")
    assert done.returncode != 0
    assert done.stderr.count("--lr is nan") == 1
    assert "Traceback" not in done.stderr


ONE_RANK_FAILS = """
from odyssey import cli, comm
from odyssey.cli.commands import train
from odyssey.errors import DataError
def run(settings, verbose=False, words=None):
    world = comm.world("mpi")
    world.barrier()
    if world.rank == 1:
        raise ERROR
    world.barrier()
train.run = run
cli.main(["train"])
"""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        ("DataError('it is torn')", 65, "odyssey: [rank 1] error: it is torn"),
        ("ZeroDivisionError('x')", 70, "odyssey: [rank 1] defect: ZeroDivisionError: x"),
    ],
)
def test_an_error_on_one_rank_hangs_nobody(error, code, line):
    done = run(mpiexec(), "-n", "3", sys.executable, "-c", ONE_RANK_FAILS.replace("ERROR", error))
    assert done.returncode == code
    assert line in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("'it is torn'", r"odyssey: error: it is torn"),
        ("f'rank {world.rank} it is'", r"odyssey: \[rank (\d)\] error: rank \1 it is"),
    ],
)
def test_ranks_that_come_to_the_same_error_have_one_line_without_a_rank(message, line):
    program = f"""
from odyssey import comm
from odyssey.errors import DataError
from odyssey.base import exits
exits.TOGETHER_S = 3
world = comm.world("mpi")
world.barrier()
raise DataError({message})
"""
    done = run(mpiexec(), "-n", "3", sys.executable, "-c", program)
    assert done.returncode == 65
    (said,) = [row for row in done.stderr.splitlines() if row.startswith("odyssey:")]
    assert re.fullmatch(line, said), done.stderr


ONE_RANK_FAILS_AND_SHARES_MEMORY = """
import re
from pathlib import Path
from odyssey import cli, comm
from odyssey.cli.commands import train
from odyssey.errors import DataError
def run(settings, verbose=False, words=None):
    world = comm.world("mpi")
    files = re.findall(r"/dev/shm/(?:mpich|sm)_\\S+", Path("/proc/self/maps").read_text())
    if world.rank == 0:
        print(*set(files), flush=True)
    world.barrier()
    if world.rank == 1:
        raise DataError("it is torn")
    world.barrier()
train.run = run
cli.main(["train"])
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is no folder here")
def test_an_error_leaves_no_shared_memory():
    done = run(mpiexec(), "-n", "2", sys.executable, "-c", ONE_RANK_FAILS_AND_SHARES_MEMORY)
    assert done.returncode == 65
    files = done.stdout.split()
    assert files
    assert [name for name in files if Path(name).exists()] == []


def test_verify_under_a_launcher_is_refused_in_one_line():
    done = run(mpiexec(), "-n", "2", sys.executable, "-m", "odyssey", "verify", "--layouts", "dp=2")
    assert done.returncode == 64
    assert done.stderr.count("[verify] it starts the ranks of each layout itself") == 1


def test_ranks_expand_the_paths_of_a_configuration_file(tmp_path, monkeypatch):
    """Launchers pass ranks few variables, but those in the paths of the file."""
    from odyssey.compile import library

    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        "HOME": str(home),
        "PLACE": str(home / "place"),
        "ODYSSEY_CACHE_DIR": str(library.cache_dir()),
        "ODYSSEY_ALLOW_ROOT": "1",
    }
    (home / "run.toml").write_text(
        'model = "mlp"\nsteps = 1\neval = false\ncheckpoint-dir = "$PLACE/checkpoints"\n'
    )
    odyssey = (sys.executable, "-m", "odyssey")
    started = run(
        *odyssey,
        "launch",
        "-n",
        2,
        "--run-dir",
        "$PLACE/a",
        "train",
        "--config",
        "~/run.toml",
        **environment,
    )
    assert started.returncode == 0, started.stderr
    (home / "run.toml").write_text((home / "run.toml").read_text().replace("PLACE", "{PLACE}-2"))
    started = run(
        *odyssey, "train", "--config", "~/run.toml", "--ranks", 2, "--run-dir", "~/b", **environment
    )
    assert started.returncode == 0, started.stderr
    for folder in ("place/checkpoints", "place/a/steps", "place-2/checkpoints", "b/steps"):
        assert (home / folder).exists()
    assert os.listdir(tmp_path) == ["home"]
