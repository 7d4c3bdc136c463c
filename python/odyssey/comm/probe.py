"""Short processes that report the versions and the MPI of their environment.

`main` is the program of such a process: it prints one line of JSON. `probe` starts it on this
machine, alone or under a launcher of ranks, and `probe_host` on another machine by ssh.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base import launcher
from ..base.variables import is_named
from ..base.versions import versions
from ..errors import printable

TIMEOUT_S = 60.0
#: The module that runs `main`. Other versions of odyssey on other machines know it by this name.
PROGRAM = ("-m", "odyssey.cli.doctor")
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "StrictHostKeyChecking=yes", "--"),
)
SSH_FAILED = 255  # the exit code of ssh itself, not of the remote command

Completed = subprocess.CompletedProcess[str]


class Probed(NamedTuple):
    """The answers of a probe's processes about themselves, or why there are none."""

    answers: list[dict[str, Any]]
    problem: str = ""


def run(words: Sequence[str], variables: Mapping[str, str] | None = None) -> Completed:
    """Runs a command outside of any job of ranks, with more environment variables.

    Raises OSError: it cannot be started. subprocess.TimeoutExpired: it doesn't end.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not is_named(name, launcher.OF_RANKS)  # a probe is no rank
    }
    return subprocess.run(
        list(words),
        env={**environment, **launcher.OPEN_MPI, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
    )


def probe(words: Sequence[str]) -> Probed:
    """Starts the program behind some words, such as those of a launcher and of a Python, and
    returns the answer of each process.
    """
    try:
        result = run([*words, *PROGRAM])
    except OSError as problem:
        return Probed([], f"{words[0]} cannot be started: {problem.strerror}")
    except subprocess.TimeoutExpired:
        return Probed([], f"no answer after {TIMEOUT_S:g} s")
    answers = answers_in(result.stdout)
    if answers and result.returncode == 0:
        return Probed(answers)
    return Probed(answers, last_line(result))


def probe_host(host: str) -> Completed:
    """Runs the program on another machine, with this Python's path there. It reports no MPI.

    Raises OSError: there is no ssh. subprocess.TimeoutExpired: no answer.
    """
    return run([*SSH, host, shlex.join([sys.executable, *PROGRAM, "--versions"])])


def mpi_of(probed: Probed) -> str:
    """Returns the MPI library of a probe's first process; "no MPI" if there was none."""
    return str(probed.answers[0].get("MPI")) if probed.answers else "no MPI"


def answers_in(text: str) -> list[dict[str, Any]]:
    """Returns the lines of JSON among what processes printed."""
    answers = []
    for line in text.splitlines():
        if line.startswith('{"'):
            with contextlib.suppress(ValueError, RecursionError):
                answers.append(json.loads(line))
    return answers


def last_line(result: Completed) -> str:
    """Returns the last line that a command printed, as the reason why it failed."""
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip(" =-")]
    return printable(lines[-1].strip(), limit=200) if lines else f"exit code {result.returncode}"


def main(arguments: Sequence[str]) -> None:
    """Prints the answer of this process: one line, in one write, so that lines don't mix."""
    answer: dict[str, Any] = {"host": socket.gethostname()}
    if "--versions" not in arguments:
        from . import mpi

        answer["level"] = mpi.thread_level()
        answer["size"] = mpi.MPI.COMM_WORLD.Get_size()
        answer["rank"] = mpi.MPI.COMM_WORLD.Get_rank()
    answer.update(versions())
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
