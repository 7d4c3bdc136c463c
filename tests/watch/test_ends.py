"""Ranks that fail, end or hang under a launcher: the job ends soon, with a code and a line that
names rank and reason.

All cases of misbehave.py run once, several at a time, as hangs are mostly waiting. One that took
longer than is promised while processes waited for a core, as the kernel counts it, runs again,
alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from starved import starved  # noqa: E402

WATCHDOG = 3.0
SLACK = 2.5  # seconds for a busy machine, beyond what is promised
STARVED = 0.5  # of the time a process waited for a core: the machine may be why it took so long
TRIES = 3

ENDING = [
    "raises",
    "raises an error of odyssey",
    "raises in a thread",
    "raises before MPI",
    "exits before MPI",
    "exits",
    "exits in a data set",
    "os._exit",
    "os._exit with a code",
    "is killed",
    "is interrupted",
    "returns",
    "skips",
    "all raise",
    "all exit",
    "an exit is caught",
    "other op",
    "other count",
    "other dtype",
    "other call",
    "other root",
]
PROMISED = {
    **dict.fromkeys(
        ["raises", "raises an error of odyssey", "raises in a thread", "exits", "is interrupted"],
        2.0,
    ),
    "exits in a data set": 2.0,
    **dict.fromkeys(["os._exit", "os._exit with a code", "is killed", "returns"], 2.0),
    **dict.fromkeys(["other op", "other count", "other dtype", "other call", "other root"], 1.0),
    **dict.fromkeys(["stops", "sleeps", "loops", "loops in C"], WATCHDOG + 1),
}  # seconds until the job has ended
HANGING = ["stops", "sleeps", "loops", "loops in C", "waits elsewhere", "waits for a group"]

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watcher reads /proc"
)


@pytest.fixture(scope="module")
def outcomes(launch_once):
    """What each case printed, its exit code, seconds from the misbehaviour to the end, and what
    it left.
    """
    found = {}

    def run(how: str, again: int = 0):
        folder = launch_once.folder / f"{how.replace(' ', '-')}-{again}"
        (folder / "tmp").mkdir(parents=True)
        token = f"odyssey-test-{os.getpid()}-{how.replace(' ', '-')}"
        environment = {
            **launch_once.environment,
            # A rank that has no core for three seconds hangs as well, as far as the watcher can
            # see.
            "ODYSSEY_WATCHDOG": str(WATCHDOG if how in HANGING else 60),
            "TMPDIR": str(folder / "tmp"),
            "TEST_TOKEN": token,
        }
        words = [
            launch_once.mpirun,
            *(["--oversubscribe"] if launch_once.open_mpi else []),
            "-n",
            "3",
        ]
        words += [sys.executable, str(HERE / "misbehave.py"), how]
        before = time.time(), starved()
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=90, env=environment, cwd=folder
        )
        begun = re.search(r"now (\d+\.\d+) (\d+\.\d+)", done.stdout)
        after = time.time(), starved()
        seconds = after[0] - float(begun[1]) if begun else None
        since = (float(begun[1]), float(begun[2])) if begun else before
        files = [path for path in (folder / "tmp").rglob("*") if path.is_file()]
        found[how] = SimpleNamespace(
            code=done.returncode,
            out=done.stdout,
            err=done.stderr,
            seconds=seconds,
            starved=(after[1] - since[1]) / (after[0] - since[0]),  # of the time
            files=files,
            folder=folder,
            token=token,
        )

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, HANGING + ENDING))
    for again in range(1, TRIES):
        for how, outcome in list(found.items()):
            # For longer than a moment a rank that has no core is one that does not exit with the
            # others.
            apart = how == "all exit" and ours(outcome)
            if (apart or not in_time(how, outcome)) and outcome.starved > STARVED:
                run(how, again)
    return found


def in_time(how: str, outcome: SimpleNamespace) -> bool:
    """Whether the rank came to its misbehaviour and the job ended as soon as is promised then;
    where a time is.
    """
    return how not in PROMISED or (
        outcome.seconds is not None and outcome.seconds < PROMISED[how] + SLACK
    )


def ours(outcome) -> list[str]:
    """Lines of odyssey, not of the launcher."""
    return [line for line in outcome.err.splitlines() if line.startswith("odyssey: ")]


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        (
            "raises",
            70,
            r"odyssey: \[rank 1\] defect: ValueError: a defect of this rank \(step 2, compute\)",
        ),
        ("raises an error of odyssey", 64, r"odyssey: \[rank 1\] error: \[test\] a wrong setting"),
        (
            "raises in a thread",
            70,
            r"odyssey: \[rank 1\] defect: ZeroDivisionError: .* \(in thread worker\)",
        ),
        ("raises before MPI", 70, r"odyssey: \[rank 1\] defect: ValueError: before"),
        (
            "exits before MPI",
            3,
            r"odyssey: \[rank 1\] sys.exit\(3\) at watch/misbehave.py:\d+, before the ranks met; "
            r".*",
        ),
        (
            "exits",
            3,
            r"odyssey: \[rank 1\] sys.exit\(3\) at watch/misbehave.py:\d+, and others go on; all "
            r"are ended",
        ),
        (
            "exits in a data set",
            5,
            r"odyssey: \[rank 1\] sys.exit\(5\) at watch/misbehave.py:\d+, and others go on; all "
            r"are ended",
        ),
        ("is interrupted", 130, "odyssey: interrupted"),
    ],
)
def test_an_end_of_one_rank_ends_all_in_two_seconds(outcomes, how, code, line):
    outcome = outcomes[how]
    assert outcome.code == code, outcome.err
    lines = ours(outcome)
    assert len(lines) == 1 and re.fullmatch(line, lines[0]), outcome.err
    assert (outcome.seconds is None) == how.endswith("before MPI")
    assert in_time(how, outcome), outcome
    assert "Segmentation" not in outcome.err


@pytest.mark.parametrize("how", ["raises", "raises in a thread", "raises before MPI"])
def test_the_traceback_of_the_rank_that_fails_comes_first(outcomes, how):
    lines = outcomes[how].err.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("odyssey: "))
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert all(line.startswith("[rank 1] ") for line in lines[:end])
    assert outcomes[how].err.count("Traceback") == 1


def test_an_error_of_odyssey_is_one_line(outcomes):
    assert "Traceback" not in outcomes["raises an error of odyssey"].err


def test_the_same_exception_on_all_ranks_is_told_once(outcomes):
    outcome = outcomes["all raise"]
    assert outcome.code == 70
    assert outcome.err.count("Traceback") == 1 and len(ours(outcome)) == 1


def test_all_ranks_that_exit_alike_do_so(outcomes):
    assert outcomes["all exit"].code == 5
    assert not ours(outcomes["all exit"])


def test_an_exit_that_is_caught_is_none(outcomes):
    outcome = outcomes["an exit is caught"]
    assert outcome.code == 0 and outcome.out.count("step 3 weights 24") == 3


@pytest.mark.parametrize("how", ["os._exit", "os._exit with a code", "is killed"])
def test_a_rank_that_reports_no_error_is_named(outcomes, how, launch):
    outcome = outcomes[how]
    # Hydra gives ranks that it kills the code 0, if it collects them late, and takes the others'
    # for the job's.
    assert outcome.code != 0 or (how == "os._exit" and not launch.open_mpi)
    assert in_time(how, outcome), outcome
    lines = [line for line in ours(outcome) if "[watch]" in line]
    # where all ranks were gone before the watcher ran once, nobody can say who was the first
    if lines:
        assert re.search(
            r"\[watch\] rank \d \(pid \d+ on \S+, step \d, .*\) (was killed by|exited without)",
            lines[0],
        )


@pytest.mark.parametrize("how", ["returns", "skips"])
def test_a_rank_that_returns_early_is_named_and_who_waits(outcomes, how):
    outcome = outcomes[how]
    assert outcome.code == 76 and in_time(how, outcome)
    line = (
        r"odyssey: \[rank [02]\] error: \[comm\] rank 1 has ended; all_reduce float32 \(8,\) "
        r"sum at watch/misbehave.py"
    )
    assert len(ours(outcome)) == 1 and re.match(line, ours(outcome)[0]), outcome.err


@pytest.mark.parametrize(
    ("how", "theirs", "mine"),
    [
        ("other op", r"all_reduce float32 \(8,\) sum", r"all_reduce float32 \(8,\) max"),
        ("other count", r"all_reduce float32 \(8,\) sum", r"all_reduce float32 \(9,\) sum"),
        ("other dtype", r"all_reduce float32 \(8,\) sum", r"all_reduce float64 \(8,\) sum"),
        ("other call", r"all_reduce float32 \(8,\) sum", r"broadcast float32 \(8,\) root 0"),
        ("other root", r"broadcast float32 \(8,\) root 0", r"broadcast float32 \(8,\) root 1"),
    ],
)
def test_calls_that_differ_end_the_job_with_both_places_and_no_wrong_number(
    outcomes, how, theirs, mine
):
    outcome = outcomes[how]
    assert outcome.code == 76, outcome.err
    assert in_time(how, outcome), outcome
    place = r"at watch/misbehave\.py:\d+"
    line = (
        rf"odyssey: error: \[comm\] rank 0 calls {theirs} {place}, but rank 1 calls {mine} "
        rf"{place}; "
    )
    assert len(ours(outcome)) == 1 and re.match(line, ours(outcome)[0]), outcome.err
    taken = set(re.findall(r"step (\d) weights", outcome.out))
    assert taken == {"0", "1"}  # nobody took the step of the wrong call


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("stops", r"is stopped \(SIGSTOP, or a debugger\), in compute"),
        (
            "sleeps",
            r"does nothing \(\d+ % of a core\), in compute at watch/misbehave.py:\d+ in misbehave",
        ),
        (
            "loops",
            r"computes without an end in sight, \d+ % of a core, in compute at "
            r"watch/misbehave.py:\d+ in misbehave",
        ),
        (
            "loops in C",
            r"computes without an end in sight, .* at watch/misbehave.py:\d+ in misbehave",
        ),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_place(outcomes, how, where):
    outcome = outcomes[how]
    assert outcome.code == 77, outcome.err
    assert WATCHDOG - 0.5 < outcome.seconds and in_time(how, outcome), outcome
    wanted = (
        r"odyssey: \[watch\] rank 1 did not come to call 2, all_reduce float32 \(8,\) sum at "
        r"watch/misbehave.py:\d+; "
        rf"ranks 0,2 wait, \d+ s by now\n  rank 1 \(pid \d+ on \S+, step 2\) {where}"
    )
    assert re.search(wanted, outcome.err), outcome.err
    assert "its last call was 1, all_reduce float32 (8,) sum" in outcome.err
    assert "all ranks are ended with exit code 77 (--watchdog 3)" in outcome.err
    (path,) = outcome.folder.glob("odyssey-stacks-*.txt")
    assert path.name in outcome.err
    stacks = path.read_text()
    assert "all_reduce" in stacks and stacks.count("=== rank ") == 3
    assert "in misbehave" in stacks or how == "stops"


def test_ranks_that_wait_for_each_other(outcomes):
    outcome = outcomes["waits elsewhere"]
    assert outcome.code == 77
    assert "odyssey: [watch] ranks 0-1 wait for each other" in outcome.err
    assert re.search(
        r"rank 1 \(.*\) waits in recv float32 \(8,\) from rank 0 tag 0 at watch/misbehave",
        outcome.err,
    )


def test_a_hang_in_a_group(outcomes):
    outcome = outcomes["waits for a group"]
    assert outcome.code == 77
    assert re.search(
        r"rank 1 did not come to call 0 of ranks 0-1, barrier at watch/misbehave", outcome.err
    )
    assert re.search(
        r"rank 2 waits in all_reduce float32 \(8,\) sum at watch/misbehave.py:\d+ for", outcome.err
    )


def test_nothing_is_left(outcomes):
    """No process, no file for temporary things, no shared memory that the ranks had."""
    until = time.monotonic() + 20
    tokens = {outcome.token for outcome in outcomes.values()}
    while (left := processes(tokens)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    for how, outcome in outcomes.items():
        if how.endswith("before MPI"):  # no watcher was there yet
            continue
        assert not [path for path in outcome.files if not path.name.startswith("odyssey-stacks")], (
            how
        )


def processes(tokens: set[str]) -> list[str]:
    """Processes with one of these in their environment, other than this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes().decode(errors="replace")
                if any(token in environment for token in tokens):
                    found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()}")
            except OSError:
                continue
    return found
