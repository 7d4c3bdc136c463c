"""Collectives that do not match between two ranks: what each rank gets, and after how long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness import ANCHORS, HERE, System, ended

KINDS = {
    "dtype": "all-reduce of float64 and of int64",
    "count": "all-reduce of 1024 and of 1023 numbers",
    "op": "all-reduce and broadcast",
    "root": "broadcast from rank 0 and from rank 1",
}
WAITS = 3  # seconds: timeout of the process group
WATCHED = 15.0  # seconds


def mismatch(system: System, folder: Path, kind: str) -> dict[str, Any]:
    """What the ranks got or raised; `verdict` in one word: error, wrong, died, hangs."""
    if system.kind == "torch":
        start = [
            system.python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            2,
        ]
        command = [*start, ANCHORS / "calls_torch.py", kind, WAITS]
    else:
        script = (
            HERE / "calls_odyssey.py" if system.kind == "odyssey" else ANCHORS / "calls_mpi4py.py"
        )
        command = [*system.mpirun, "-n", 2, system.python, script, kind]
    with system.job(command, folder) as job:
        job.wait_until(lambda: len(_begins(job.output)) == 2, 120, "call of both ranks")
        end = ended(job, WATCHED)
        output, lines = job.output, job.lines
        job.outside.end()
    begins = _begins(output)
    raised = dict(re.findall(r"^rank (\d) raised (.*)$", output, re.MULTILINE))
    got = dict(re.findall(r"^rank (\d) got (.*)$", output, re.MULTILINE))
    told = [at for at, line in lines if re.match(r"rank \d raised ", line)]
    if len(raised) == 2:
        verdict, at = "error", max(told)
    elif len(got) == 2:
        verdict, at = "wrong", max(begins)  # calls that do not match have no right result
    elif end is None:
        verdict, at = "hangs", None
    else:
        verdict, at = "died", end[0]
    sites = [site for text in raised.values() for site in set(re.findall(r"[\w/]+\.py:\d+", text))]
    return {
        "verdict": verdict,
        "seconds": None if at is None else round(max(0.0, at - max(begins)), 2),
        "watched": WATCHED,
        "code": None if end is None else end[1],
        "got": got,
        "raised": raised,
        "names_calls": verdict == "error" and all(names_both(text) for text in raised.values()),
        "names_lines": bool(sites),
        "last_words": output[-1500:] if verdict in ("died", "hangs") else "",
    }


def names_both(text: str) -> bool:
    """Whether an error says what either rank called."""
    return all(re.search(rf"\brank {rank}\b", text, re.IGNORECASE) for rank in (0, 1))


def _begins(output: str) -> list[float]:
    """When each rank called, time.monotonic()."""
    return [float(at) for at in re.findall(r"rank \d calls (\d+\.\d+)$", output, re.MULTILINE)]
