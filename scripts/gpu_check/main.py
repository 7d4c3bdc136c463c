"""Everything that needs a GPU, in one command, under 8 minutes on one H200-class device.

    scripts/gpu-check --prepare DIR                      # elsewhere, from the same commit: kernels
                                                         # and programs
    scripts/gpu-check --prepared DIR --resume            # on the machine with the GPU

It looks at the machine, checks the kernels against the CPU's, compares bits of workers and ranks,
times kernels and steps, and trains LeNet-5 to 98.9 %. It needs Python, NumPy and the packages of
odyssey itself. PyTorch, mpirun, ncu and compute-sanitizer are used if they are there. Where the
Mojo compiler is, --prepare isn't needed.

The parts run in order of value and don't depend on each other. A part that fails, hangs or ends its
process doesn't stop the others. Time that a part leaves goes to the next ones. Results are in
DIR/gpu-check.json as soon as they exist, and all output is in DIR/gpu-check.log.

--resume skips a part that passed before in DIR/gpu-check.json for the same sources, the same
kernels and the same kind of GPU. Carry that file from visit to visit. --emulated runs the same
parts, shortened, on the emulated GPU of the tests: to try this program without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import parts, prepare
from .check import EMULATED_SECONDS, Check, Skip
from .parts import Part, machine
from .results import Visit, commit

SECONDS = 465.0  # for all parts

# What the output may contain, and what to look at then.
HINTS = (
    (
        r"libcuda\.so|libnvidia-ml",
        "the driver's libraries are not found: see 'libraries' of the part machine, and add their "
        "folder to LD_LIBRARY_PATH",
    ),
    (
        r"UNSUPPORTED_PTX|INVALID_PTX|PTX JIT|ptxas|unsupported toolchain",
        "the driver does not take this PTX: see 'ptx' and 'driver' of the part machine; PTX 8.5 "
        "wants a driver for CUDA 12.5, MAX one of 580",
    ),
    (
        r"NO_BINARY_FOR_GPU",
        "the kernels are for another kind of GPU: build the folder with --target of this one",
    ),
    (r"GLIBC|GLIBCXX", "this system's C library is older than the run-time libraries want"),
    (
        r"\[build\]",
        "no kernels for this machine: build a folder where the compiler is, from this commit, and "
        "name it with --prepared or --kernels",
    ),
    (r"OUT_OF_MEMORY|MiB free", "somebody else uses the GPU: see nvidia-smi in the log"),
    (
        r"ILLEGAL|MISALIGNED|LAUNCH_FAILED|illegal memory",
        "a kernel went wrong: ODYSSEY_GPU_GRAPHS=0 and compute-sanitizer --tool memcheck say which",
    ),
    (
        r"took more than",
        "too slow, or it hangs: see the times in the log; the driver compiles kernels in each "
        "process again if its cache does not work",
    ),
    (
        r"exit code -",
        "a signal ended the process: run the command of the log again with python -X faulthandler",
    ),
    (r"No module named", "a Python package is missing"),
)


class Outcome(NamedTuple):
    """The outcome of a part, in words."""

    part: str
    word: str  # passed, skipped, FAILED or not run
    why: str
    seconds: float

    def line(self) -> str:
        """One line for the summary."""
        why = f" ({self.why.strip().splitlines()[0][:160]})" if self.why.strip() else ""
        return f"  {self.part:<11} {self.seconds:6.1f} s  {self.word}{why}"


def hint(problem: str) -> str:
    """The advice for an error."""
    advice = [text for pattern, text in HINTS if re.search(pattern, problem)]
    return (
        f"look at: {'; '.join(advice[:2])}" if advice else "look at the end of its part of the log"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument(
        "--kernels", type=Path, metavar="DIR", help="folder of `odyssey build --output DIR`"
    )
    folder.add_argument("--prepared", type=Path, metavar="DIR", help="folder of --prepare")
    folder.add_argument(
        "--prepare",
        type=Path,
        metavar="DIR",
        help="only build kernels and programs for a machine with no compiler",
    )
    parser.add_argument(
        "--target", default="sm_90", help="with --prepare: the kind of GPU (default: sm_90)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="of results (default: gpu-check)"
    )
    parser.add_argument("--resume", action="store_true", help="skip the parts that passed before")
    parser.add_argument(
        "--only", nargs="+", choices=[p.name for p in parts.PARTS], help="these parts only"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for everything (default: {SECONDS:.0f})"
    )
    parser.add_argument("--emulated", action="store_true", help="on the emulated GPU, shortened")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = Path("gpu-check-emulated" if options.emulated else "gpu-check")
    options.programs = None
    if options.prepared is not None:
        options.kernels = options.prepared / prepare.KERNELS
        options.programs = options.prepared / prepare.PROGRAMS
    if options.kernels is not None and not options.kernels.is_dir():
        parser.error(
            f"expected a folder with kernels, {options.kernels} is not one; build it with --prepare"
        )
    return options


@contextlib.contextmanager
def ended_by_signals(c: Check) -> Iterator[None]:
    """Lets `timeout` and the like end this process as Ctrl-C does, so that no command of it runs
    on.
    """

    if threading.current_thread() is not threading.main_thread():  # only that one may change it
        yield
        return

    def end(number: int, frame: Any) -> None:
        c.end_by_signal(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts. Returns the exit code: 1 if a part failed, otherwise 0."""
    options = parse(arguments)
    if options.prepare is not None:
        return prepare.prepare(options.prepare, options.target)
    c = Check(options)
    with ended_by_signals(c):
        outcomes: list[Outcome] = []
        try:
            visit_all(c, outcomes)
        finally:
            c.close()
            report(c, outcomes)
    return 1 if any(outcome.word == "FAILED" for outcome in outcomes) else 0


def visit_all(c: Check, outcomes: list[Outcome]) -> None:
    """Runs the parts that were asked for and have not passed before.

    Appends the outcome of each part.
    """
    c.until = time.monotonic() + 60
    c.facts["libraries"] = machine.driver(c)
    gpus = machine.gpus(c)
    c.facts["capabilities"] = [capability for capability, _ in gpus]
    name = ", ".join(name for _, name in gpus) or "no GPU"
    visit = Visit(
        commit(prepare.commit_of(c.options.prepared)), prepare.kernels_hash(c.environment), name
    )
    say(c, f"commit {visit.commit}, kernels {visit.kernels}, {visit.gpu}")
    for note in c.results.notes:
        say(c, note)
    chosen = [part for part in parts.PARTS if c.options.only is None or part.name in c.options.only]
    keys = {part.name: key_of(part, visit) for part in chosen}
    earlier = {part.name: c.results.passed(part.name, keys[part.name]) for part in chosen}
    todo = [part for part in chosen if earlier[part.name] is None]
    # reading its files takes long where the disk is cold
    if any(part.name == "torch" for part in todo):
        c.start(sys.executable, "-c", "import torch, torch.distributed")
    for part in chosen:
        record = earlier[part.name]
        if record is None:
            outcomes.append(run_part(c, part, keys[part.name], time_for(c, part, todo)))
            continue
        c.results.records[part.name] = record
        why = f"passed at {record['for']['commit']}, in {record.get('seconds', 0)} s"
        outcomes.append(Outcome(part.name, "skipped", why, 0.0))
        say(c, outcomes[-1].line().strip())
    c.results.write()


def key_of(part: Part, visit: Visit) -> dict[str, str]:
    """The facts for which the results of a part hold."""
    kernels = visit.kernels if part.kernels else "not used"
    return {"commit": visit.commit, "sources": part.sources(), "kernels": kernels, "gpu": visit.gpu}


def time_for(c: Check, part: Part, todo: Sequence[Part]) -> float:
    """The seconds of a part: its share, and what the parts before it have left."""
    if c.options.emulated:
        return EMULATED_SECONDS
    elapsed = time.monotonic() - c.started
    so_far = sum(p.seconds for p in todo[: todo.index(part) + 1])
    factor = c.options.seconds / sum(p.seconds for p in todo)
    end = min(max(so_far * factor, elapsed + part.seconds), c.options.seconds)
    return end - elapsed


def run_part(c: Check, part: Part, key: dict[str, str], seconds: float) -> Outcome:
    """Runs a part and writes its record."""
    begun = time.monotonic()
    c.begin(part.name, key, seconds)
    text = ""
    try:
        record: dict[str, Any] = {"passed": True, **part.do(c)}
        word = "passed"
        why = f"but not run: {record['not run']}" if "not run" in record else ""
    except Skip as problem:
        word = "not run"
        why = str(problem)
        record = {"not run": why}
    except Exception as problem:
        word = "FAILED"
        why = str(problem) or type(problem).__name__
        record = {"passed": False, "error": why, "hint": hint(why)}
        text = f"\n{why[-1500:]}\n{hint(why)}"
    taken = round(time.monotonic() - begun, 1)
    c.end({**record, "seconds": taken})
    outcome = Outcome(part.name, word, why, taken)
    say(c, outcome.line().strip() + text)
    return outcome


def say(c: Check, line: str) -> None:
    """Prints a line, also into the log."""
    print(line, flush=True)
    c.write_log(line + "\n")


def report(c: Check, outcomes: Sequence[Outcome]) -> None:
    """Prints the summary."""
    say(c, "summary:")
    for outcome in outcomes:
        say(c, outcome.line())
    failed = [outcome.part for outcome in outcomes if outcome.word == "FAILED"]
    left = [outcome.part for outcome in outcomes if outcome.word == "not run"]
    word = f"FAILED: {', '.join(failed)}" if failed else "passed"
    word += f"; not run: {', '.join(left)}" if left else ""
    say(c, f"{word} in {time.monotonic() - c.started:.0f} s")
