"""`odyssey verify`: is a training the same, bit for bit, on other layouts?

This file runs it on each and compares.

Every run is the same command, started by mpirun if it has several ranks, with two environment
variables:

    ODYSSEY_TRACE         directory and number of steps, "DIR:5": the trainer writes what it holds
                          after each step
    ODYSSEY_TRACE_LAYOUT  the layout, e.g. "pp=2,dp=2,zero=1", which goes before the trainer's own
                          arguments

After every step rank 0 writes the loss, the metrics, all parameters and all values of the
optimizer, whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.files import write_whole
from ..base.launcher import OPEN_MPI
from ..base.mpi_programs import find_mpirun, loaded_library
from ..callbacks import Callback, Context
from ..errors import ConfigError, printable

if TYPE_CHECKING:
    import numpy as np

TRACE = "ODYSSEY_TRACE"
LAYOUT = "ODYSSEY_TRACE_LAYOUT"
COMPLETE = "complete"  # a file of a trace: fit() had nothing to do

# key of a layout -> (what it is in the trainer, its type)
KEYS: dict[str, tuple[str, type]] = {
    **{name: (name, int) for name in ("dp", "pp", "tp", "zero")},
    "workers": ("num_gpus", int),
    "threads": ("threads", int),
    "accumulation": ("accumulation_steps", int),
    "reduction": ("reduction", str),
    "servers": ("servers", int),
    "schedule": ("pipeline_schedule", str),
    "bucket": ("bucket_size_mb", float),
    "overlap": ("overlap", int),
    "execution": ("execution", str),
}


def parse(text: str) -> dict[str, Any]:
    """A layout as options of the trainer, e.g. "dp=2,zero=3".

    Raises ConfigError: an unknown key, or no number.
    """
    options: dict[str, Any] = {}
    layout = repr(printable(text, limit=80))
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        option = repr(printable(item, limit=40))
        if key not in KEYS or not value:
            raise ConfigError(
                f"[verify] {option} in layout {layout}; write key=value with {', '.join(KEYS)}"
            )
        name, kind = KEYS[key]
        if name in options:
            raise ConfigError(f"[verify] {key} is given twice in layout {layout}; give it once")
        try:
            if kind is int and not re.fullmatch(r"-?[0-9]{1,9}", value):
                raise ValueError
            options[name] = kind(value)
        except ValueError:
            raise ConfigError(
                f"[verify] {option} in layout {layout}: {key} must be a number"
            ) from None
        if kind is float and not math.isfinite(options[name]):
            raise ConfigError(
                f"[verify] {option} in layout {layout}: {key} must be a finite number"
            )
    return options


def ranks(options: dict[str, Any]) -> int:
    """How many ranks a layout has."""
    sizes = [options.get(axis, 1) for axis in ("dp", "pp", "tp")]
    if min(sizes) < 1:
        raise ConfigError(
            f"[verify] dp x pp x tp = {' x '.join(map(str, sizes))}; each must be at least 1"
        )
    return math.prod(sizes)


# --- inside a run: what the trainer writes --------------------------------------------------------


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """A layout as keywords of a trainer."""
    from ..parallel.mesh import Mesh

    axes = ("dp", "pp", "tp")
    keywords = {name: value for name, value in options.items() if name not in axes}
    return {**keywords, "mesh": Mesh(*(options.get(axis, 1) for axis in axes))}


@dataclasses.dataclass
class StepWriter(Callback):
    """Where a trainer of a run writes its steps, and what the layout is."""

    folder: Path
    steps: int
    options: dict[str, Any]
    # which one, in the order of their first steps: a script may make several
    trainer: int | None = None
    steps_done: int = 0

    @classmethod
    def current(cls) -> StepWriter | None:
        """The trace that the environment asks for."""
        value = os.environ.get(TRACE)
        if not value:
            return None
        folder, _, steps = value.rpartition(":")
        if not folder or not steps.isdigit():
            raise ConfigError(f"[verify] {TRACE} is {value!r}; it must be DIRECTORY:STEPS")
        return cls(Path(folder), int(steps), parse(os.environ.get(LAYOUT, "")))

    def arguments(self, keywords: dict[str, Any]) -> dict[str, Any]:
        from ..parallel.strategy import MODES

        accumulation = keywords.get("accumulation_steps", 1)
        if accumulation != 1 and "accumulation_steps" in self.options:
            problem = f"the training accumulates {accumulation} batches itself"
            raise ConfigError(f"[verify] {problem}; leave accumulation out of the layout")
        out = arguments(self.options)
        reduction = {**keywords, **out}.get("reduction")
        if reduction in MODES:
            problem = f"reduction={reduction!r} gives other bits than one process"
            raise ConfigError(f"[verify] {problem}; verify a synchronous one")
        return out

    def on_fit_plan(self, context: Context) -> None:
        """Some steps, without evaluation, checkpoints, loggers; with accumulation a step has the
        same samples.
        """
        context.saving = dataclasses.replace(context.saving, folder=None, every=None, off=True)
        context.limit = min(context.limit or self.steps, self.steps)
        context.validate = False
        context.pieces = self.options.get("accumulation_steps", 1)

    def on_step_end(self, context: Context) -> None:
        if self.trainer is None:
            self.trainer = next(_numbers)
        self.steps_done += 1
        if self.steps_done > self.steps:
            return
        import numpy as np

        trainer = context.trainer
        metrics = {f"metric {name}": value for name, value in context.step.metrics.items()}
        sums = {"loss": context.step.loss, "correct predictions": context.step.correct, **metrics}
        arrays = {
            **trainer.named_state(),
            **{name: np.array(value, np.float64) for name, value in sums.items()},
        }
        if trainer.comm.rank == 0:
            file = step_file(self.folder, self.trainer, self.steps_done)
            write_whole(file, lambda target: np.savez(target, **arrays), durable=False)

    def on_fit_end(self, context: Context) -> None:
        if self.steps_done == 0 and context.error is None and context.trainer.comm.rank == 0:
            (self.folder / COMPLETE).touch()


_numbers = itertools.count()
joins = StepWriter.current


def step_file(folder: Path, trainer: int, step: int) -> Path:
    """Path of what a trainer held after a step, counted from 1."""
    return folder / f"trainer{trainer}-step{step}.npz"


# --- outside: running and comparing ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    step: int
    tensor: str
    element: tuple[int, ...]
    expected: float
    found: float
    differing: int  # elements of this tensor

    def __str__(self) -> str:
        index = f"[{', '.join(map(str, self.element))}]" if self.element else ""
        count = f"{self.differing} element{'s differ' if self.differing > 1 else ' differs'}"
        step = f"step {self.step}: " if self.step else ""
        return (
            f"{step}{self.tensor}{index} is {self.found!r} instead of {self.expected!r} ({count})"
        )


@dataclasses.dataclass
class Result:
    """Outcome of a layout: `same`, or a difference, or an error."""

    layout: str
    ranks: int
    steps: int = 0
    values: int = 0  # compared
    difference: Difference | None = None
    error: str | None = None

    @property
    def same(self) -> bool:
        """Returns whether every bit was the same."""
        return self.difference is None and self.error is None and self.steps > 0

    def __str__(self) -> str:
        if self.error:
            return f"FAILED  {self.error}"
        if self.difference:
            return f"DIFFERS  {self.difference}"
        return f"same bits  {self.values:,} values in {self.steps} step{'s' * (self.steps != 1)}"

    def json(self) -> dict[str, Any]:
        """For machines."""
        return {**dataclasses.asdict(self), "same": self.same}


def compare(expected: Path, actual: Path, steps: int) -> tuple[Difference | None, int, int]:
    """The first difference between two traces, and how many steps and values were compared.

    Raises ConfigError: a trace has no steps, or they have other tensors.
    """
    import numpy as np

    values = step_count = 0
    for trainer, step in ((t, s) for t in itertools.count() for s in range(1, steps + 1)):
        files = [step_file(folder, trainer, step) for folder in (expected, actual)]
        if not any(f.exists() for f in files):
            if step == 1:
                break  # there are no more trainers
            continue
        for f, run_name in zip(files, ("the run on one process", "this layout"), strict=True):
            if not f.exists():
                raise ConfigError(
                    f"[verify] {run_name} ended before step {step}{_of(trainer)}; the other went "
                    "on: a script must train alike on any number of ranks"
                )
        with np.load(files[0], allow_pickle=False) as a, np.load(files[1], allow_pickle=False) as b:
            if a.files != b.files:
                odd = sorted(set(a.files) ^ set(b.files))[:1] or ["their order"]
                raise ConfigError(f"[verify] the runs hold other tensors: {odd[0]}")
            for name in a.files:
                x = a[name]
                y = b[name]
                difference = first(step, name + _of(trainer), x, y)
                if difference:
                    return difference, step_count, values
                values += x.size
        step_count += 1
    if not step_count:
        raise ConfigError(
            "[verify] the run took no step with a DistributedTrainer; there is nothing to compare"
        )
    return None, step_count, values


def _of(trainer: int) -> str:
    return f" of trainer {trainer + 1}" if trainer else ""


def first(step: int, name: str, x: np.ndarray, y: np.ndarray) -> Difference | None:
    """The first element of two arrays whose bits differ; step 0: of no step."""
    import numpy as np

    if x.shape != y.shape or x.dtype != y.dtype:
        raise ConfigError(f"[verify] {name} is {y.shape} {y.dtype} instead of {x.shape} {x.dtype}")
    if x.tobytes() == y.tobytes():
        return None
    bits = [np.ascontiguousarray(v).reshape(-1).view(f"u{v.itemsize}") for v in (x, y)]
    indices = np.flatnonzero(bits[0] != bits[1])
    element = np.unravel_index(indices[0], x.shape) if x.shape else ()
    return Difference(
        step,
        name,
        tuple(int(i) for i in element),
        float(x[element]),
        float(y[element]),
        len(indices),
    )


class Verifier:
    """Runs one command on one process and on layouts, and compares.

    Args:
        command: what to run, e.g. [sys.executable, "-m", "odyssey.train", ...] or a user's script.
        steps: optimizer steps that are compared.
        launcher: words that start several processes, "{ranks}" standing for their number.
    """

    def __init__(
        self, command: Sequence[str], steps: int, launcher: str | None = None, timeout: float = 600
    ) -> None:
        self.command = list(command)
        self.steps = steps
        self.timeout = timeout
        self._launcher = launcher
        self._launcher_words: list[str] = []

    def __call__(
        self, layouts: Sequence[str], show: Callable[[Result], None] = lambda result: None
    ) -> list[Result]:
        """One result per layout, shown at once.

        Raises ConfigError: a layout is wrong, or one process fails.
        """
        plans = [(text, parse(text)) for text in layouts]
        # It may start a process that looks at the MPI, so the layouts are checked before.
        self._launcher_words = launcher_words(self._launcher, "verify")
        results = []
        with tempfile.TemporaryDirectory(prefix="odyssey-verify-") as folder:
            reference = Path(folder) / "reference"
            error = self._run(reference, "", 1)
            if error:
                raise ConfigError(f"[verify] the run on one process failed: {error}")
            if not step_file(reference, 0, 1).exists():
                complete = (reference / COMPLETE).exists()
                hint = (
                    ": it goes on from a checkpoint that is complete already; give it another"
                    if complete
                    else ""
                )
                raise ConfigError(
                    f"[verify] the run on one process took no step with a DistributedTrainer{hint}"
                )
            for text, options in plans:
                result = Result(text, ranks(options))
                trace = Path(folder) / "layout"
                result.error = self._run(trace, text, result.ranks)
                if result.error is None:
                    try:
                        result.difference, result.steps, result.values = compare(
                            reference, trace, self.steps
                        )
                    except ConfigError as problem:
                        result.error = str(problem)
                shutil.rmtree(trace, ignore_errors=True)
                results.append(result)
                show(result)
        return results

    def _run(self, folder: Path, layout: str, n: int) -> str | None:
        """Runs the command on n ranks; the last line it printed if it failed."""
        folder.mkdir()
        words = started(self.command, n, self._launcher_words)
        return failure_of(
            words, {TRACE: f"{folder}:{self.steps}", LAYOUT: layout}, timeout=self.timeout
        )


def launcher_words(launcher: str | None, room: str) -> list[str]:
    """The words that start several ranks, "{ranks}" standing for their number; default: the
    mpirun of the MPI library that mpi4py loads. Raises ConfigError, in the name of `room`,
    where "{ranks}" is missing.
    """
    words = shlex.split(launcher) if launcher else []
    if not launcher:
        mpirun, _ = find_mpirun(loaded_library())
        words = [mpirun.path if mpirun else "mpirun", "-n", "{ranks}"]
    if not any("{ranks}" in word for word in words):
        raise ConfigError(
            f"[{room}] launcher {launcher!r} has no {{ranks}}; write e.g. 'mpirun -n {{ranks}}'"
        )
    return words


def started(words: Sequence[str], ranks: int, launcher: Sequence[str]) -> list[str]:
    """The words of a command, behind those of a launcher if it has several ranks."""
    return [
        *(word.replace("{ranks}", str(ranks)) for word in (launcher if ranks > 1 else ())),
        *words,
    ]


def failure_of(
    words: Sequence[str], variables: Mapping[str, str], without: Sequence[str] = (), **options: Any
) -> str | None:
    """Runs a command with more environment variables and `without` some; the line that says why
    it failed, or None.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without} | {
        **variables,
        **OPEN_MPI,
    }
    try:
        process = subprocess.run(
            words, capture_output=True, text=True, errors="replace", env=environment, **options
        )
    except subprocess.TimeoutExpired as late:
        return f"not over after {late.timeout:g} s"
    except OSError as problem:
        place = f" in {options['cwd']}" if "cwd" in options else ""
        return (
            f"{words[0]} cannot be started{place}: {problem.strerror}; `odyssey doctor` says "
            "what is missing"
        )
    if process.returncode == 0:
        return None
    lines = [
        line.strip() for line in (process.stderr or process.stdout).splitlines() if line.strip()
    ]
    error_lines = [
        line for line in lines if "error:" in line or "defect:" in line or "Error:" in line
    ]
    return f"{(error_lines or lines or ['no output'])[-1]} (exit code {process.returncode})"
