"""`odyssey launch` with real ranks: faults, requests to stop, other numbers of ranks; MPICH or
Open MPI.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

COUNTING = Path(__file__).parent / "counting.py"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def there(names: set[str]) -> set[str]:
    return {name for name in names if os.path.exists(name)}


def test_a_killed_rank_is_named_and_the_run_goes_on(job):
    run = job("-n", 3, COUNTING, 20, 0.02, "1:2:13:kill")
    run.reach(3)
    used = run.maps()
    assert run.end() == 0, run.err
    assert re.search(
        r"odyssey: attempt 1: rank 2 on host \S+ was killed by SIGKILL; restarting from step 10 "
        r"on 3 ranks "
        r"\(1 of 3 restarts\)\n",
        run.err,
    ), run.err
    lines = re.findall(r"step (\d+) of 20 on 3 ranks, attempt (\d)", run.out)
    assert [int(step) for step, attempt in lines if attempt == "2"] == list(range(11, 21))
    assert json.loads((run.run / "ends" / "2.json").read_text())["code"] == 0
    assert not run.processes()
    assert not there(used)


def test_a_complete_run_and_one_of_another_command_are_refused(job):
    assert job("-n", 2, COUNTING, 3, 0).end() == 0
    again = job("-n", 2, COUNTING, 3, 0)
    assert again.end() == 64 and "is complete (DONE.json)" in again.err
    (again.run / "DONE.json").unlink()
    other = job("-n", 2, COUNTING, 4, 0)
    assert other.end() == 64 and re.search(
        r"is a run of \S+counting.py 3 0, not of \S+counting.py 4 0", other.err
    )


def test_a_second_launcher_is_refused(job):
    run = job("-n", 2, COUNTING, 2000, 0.01)
    run.reach(1)
    second = job("-n", 2, COUNTING, 2000, 0.01)
    assert second.end() == 69
    assert f"is being run by process {run.process.pid} on host" in second.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_ends_with_a_checkpoint_and_the_same_command_goes_on(job, number):
    run = job("-n", 2, COUNTING, 60, 0.02)
    run.reach(3)
    run.process.send_signal(number)
    start = time.monotonic()
    assert run.end() == 75, run.err
    assert time.monotonic() - start < 10
    assert "Segmentation" not in run.out + run.err
    stopped = int(
        re.search(rf"stopped by {number.name} at step (\d+); the same command goes on", run.err)[1]
    )
    again = job("-n", 2, COUNTING, 60, 0.02)
    assert again.end() == 0, again.err
    assert int(re.search(r"step (\d+) of 60", again.out)[1]) == stopped + 1
    assert "attempt 2 on 2 ranks" in again.err


def test_ranks_that_do_not_stop_are_killed_after_the_grace(job):
    run = job("-n", 2, "--grace", 1, COUNTING, 60, 0.01, "1:1:5:stop")
    run.reach(4)
    time.sleep(0.2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert "SIGTERM, and ranks did not stop in time" in run.err
    assert run.gone()


def test_a_script_without_a_trainer_gets_sigterm(job, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: (print('asked to end', flush=True), "
        "sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(300)\n"
    )
    run = job("-n", 2, script)
    run.reach("ready\nready")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.err
    assert run.out.count("asked to end") == 2


def test_ranks_that_have_not_met_are_told(job, tmp_path):
    """Such as one that hangs in MPI_Init, where no watcher is yet."""
    script, go = tmp_path / "script.py", tmp_path / "go"
    script.write_text(
        "import os, time\nfrom odyssey import comm\nfrom odyssey.base import launcher\n"
        f"while launcher.rank() == 1 and not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
        "print('met', comm.world().size, flush=True)\n"
    )
    run = job("-n", 2, "--watchdog", 2, script)
    until = time.monotonic() + 60
    for line in iter(run.process.stderr.readline, ""):
        if "the ranks have not met" in line or time.monotonic() > until:
            break
    go.touch()
    assert run.end() == 0 and "met 2" in run.out
    assert re.fullmatch(
        r"odyssey: attempt 1: after \d+ s the ranks have not met: they are in MPI_Init or .*\n",
        line,
    )


def test_a_second_signal_ends_at_once_and_one_during_startup_too(job):
    run = job("-n", 2, COUNTING, 600, 0.01, "1:1:5:stop")
    run.reach(4)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert run.end() == 130 and time.monotonic() - start < 5
    assert run.gone()
    early = job("-n", 2, COUNTING, 600, 0.01, "1:1:5:stop")
    until = time.monotonic() + 20
    while (
        json.loads((early.run / "attempt.json").read_text())["attempt"] < 2
        and time.monotonic() < until
    ):
        time.sleep(0.002)
    early.process.send_signal(signal.SIGTERM)
    assert early.end() in (143, 75)
    assert early.gone()


def test_several_sigterms_do_not_shorten_the_grace(job):
    run = job("-n", 2, "--grace", 60, COUNTING, 600, 0.3)
    run.reach(4)
    for _ in range(4):  # the step that is under way takes longer
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert run.end() == 75, run.err
    assert "again" not in run.err


@pytest.mark.parametrize(
    ("streams", "code"), [("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 73)]
)
def test_standard_streams_that_are_closed_or_full(launch, tmp_path, streams, code):
    script = tmp_path / "script.py"
    script.write_text("print('a word')\n")
    done = launch(
        "bash", "-c", f"'{sys.executable}' -m odyssey launch -n 2 --run-dir run {script} {streams}"
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "run" / "logs" / "attempt-1" / "output.log").read_text() == "a word\n" * 2
    if code:
        assert "standard output cannot be written: No space left on device" in done.stderr


def test_an_error_that_would_come_again_is_not_tried_again(job):
    run = job("-n", 2, COUNTING, 20, 0.01, "*:1:3:exit65")
    assert run.end() == 65
    assert "ended with exit code 65; another attempt would not help" in run.err


def test_a_defect_that_repeats_keeps_its_exit_code_and_its_reason(job):
    run = job("-n", 2, COUNTING, 20, 0.01, "*:1:8:raise")
    assert run.end() == 70
    assert run.err.count(r"ended with exit code 70 at step 8 (ValueError: bad\x1b[2J)") == 2
    assert "as before; no progress since step 8: given up" in run.err


def test_a_rank_that_is_killed_again_and_again_is_given_up_with_back_off(job):
    run = job("-n", 2, "--max-restarts", 2, "--backoff", 0.2, COUNTING, 20, 0.01, "*:1:8:segv")
    assert run.end() == 69
    assert "was killed by SIGSEGV" in run.err and "(2 of 2 restarts) in 0.2 s" in run.err
    assert "no progress since step 5 in 2 restarts: given up" in run.err


def test_an_elastic_run_goes_on_without_the_rank_that_fails(job):
    run = job("-n", 3, "--elastic", "2:3", "--backoff", 0, COUNTING, 20, 0.01, "*:2:8:kill")
    assert run.end() == 0, run.err
    assert "restarting from step 5 on 2 ranks, as rank 2 failed 2 times" in run.err
    assert "step 20 of 20 on 2 ranks" in run.out


def test_scaling(job, launch):
    run = job("-n", 2, "--elastic", "1:3", COUNTING, 3000, 0.01)
    run.reach(2)
    refused = launch.python("-m", "odyssey", "scale", run.run, 4)
    assert refused.returncode == 64 and "1 to 3 are allowed (--elastic 1:3)" in refused.stderr
    done = launch.python("-m", "odyssey", "scale", run.run, 3)
    assert done.returncode == 0, done.stderr
    assert "attempt 2 runs on 3 ranks" in done.stderr
    run.reach("on 3 ranks, attempt 2", attempt=2)
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == 75
    assert "going on with 3 ranks" in run.err and "stopped by SIGUSR1" in run.err
    over = launch.python("-m", "odyssey", "scale", run.run, 2)
    assert over.returncode == 69 and "is not running" in over.stderr


def test_killing_the_launcher_leaves_no_process_and_the_next_start_cleans_up(job):
    run = job("-n", 2, COUNTING, 60, 0.02)
    run.reach(12)
    used = run.maps()
    run.process.kill()
    run.process.wait()
    assert run.gone(3)
    again = job("-n", 2, COUNTING, 60, 0.02)
    assert again.end() == 0, again.err
    assert int(re.search(r"step (\d+) of 60", again.out)[1]) in (11, 16)
    assert not there(used)


@pytest.mark.parametrize("whom", ["the wrapper", "the daemon"])
def test_killing_a_helper_leaves_no_process_and_the_run_goes_on(job, whom):
    """The daemon: hydra_pmi_proxy, or prterun."""
    run = job("-n", 2, COUNTING, 40, 0.02)
    run.reach(7)
    used = run.maps()
    helper = run.parent(run.pid(1))
    ranks = [run.pid(0), run.pid(1)]
    os.kill(helper if whom == "the wrapper" else run.parent(helper), signal.SIGKILL)
    run.reach(12, attempt=2)
    assert not any(alive(pid) for pid in ranks)
    assert run.end() == 0, run.err
    assert not run.processes()
    assert not there(used)


def test_the_environment_of_ranks_is_an_allow_list(job, tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import os\nnames = 'SECRET', 'WANTED', 'ODYSSEY_X', 'HOME'\n"
        "print(*sorted(n for n in os.environ if n in names), flush=True)\n"
        "print(os.environ['ODYSSEY_RANKS'], os.environ['ODYSSEY_WATCHDOG'])\n"
    )
    run = job(
        "-n",
        1,
        "--env",
        "WANTED",
        "--watchdog",
        3,
        script,
        environment={"SECRET": "s3", "WANTED": "1", "ODYSSEY_X": "1"},
    )
    assert run.end() == 0, run.err
    assert run.out == "HOME ODYSSEY_X WANTED\n1 3\n"
    assert not [path for path in run.run.rglob("*") if path.is_file() and "s3" in path.read_text()]


def test_a_training_that_is_killed_ends_with_the_bytes_of_one_that_is_not():
    """One round of scripts/kill-loop, with a kill more while it recovers; LeNet-5 on MNIST."""
    import random

    sys.path.insert(0, str(Path(__file__).parent))
    import kill_loop

    training = "train --steps 60 --global-batch-size 256 --checkpoint-every 10 --no-eval --no-progress".split()
    dice = random.Random(1)
    clean = kill_loop.one(2, training, [], "rank", dice)
    assert clean.code == 0 and clean.steps == 60, clean.printed
    result = kill_loop.one(2, training, [(25, 0.0), (0, 0.3)], "rank", dice)
    assert result.code == 0, result.printed
    assert result.kills >= 1 and result.printed.count("; restarting ") >= 1, result.printed
    assert result.weights == clean.weights


@pytest.mark.parametrize(
    "words", ["script.py a -n 7", "-- python -m pkg.module a -n 7", "-m pkg.module a -n 7"]
)
def test_scripts_and_modules_are_started_alike(job, launch, words):
    (launch.folder / "pkg").mkdir()
    (launch.folder / "pkg" / "__init__.py").touch()
    for name in ("script.py", "pkg/module.py"):
        (launch.folder / name).write_text(
            "import sys\nfrom odyssey import distributed as dist\ndist.init_process_group()\n"
            "total = dist.all_reduce(1)\nif dist.get_rank() == 0:\n    print(total, "
            "sys.argv[1:], __name__)\n"
        )
    run = job("-n", 2, *words.split())
    assert run.end() == 0, run.err
    assert run.out == "2 ['a', '-n', '7'] __main__\n"


def test_a_program_that_is_not_python(job, launch):
    program = launch.folder / "program"
    program.write_text("#!/bin/sh\necho has $1\n")
    program.chmod(0o755)
    run = job("-n", 2, "./program", "it")
    assert run.end() == 0, run.err
    assert run.out == "has it\nhas it\n"
