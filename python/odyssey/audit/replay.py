"""`odyssey replay` and `odyssey diff`: a logged step taken again, alone; the first step in which
two runs part.

A replay runs the command of RUN/run.json again with one environment variable,

    ODYSSEY_REPLAY    "STEP:DIRECTORY"; DIRECTORY/request.json says the rest (`ReplaySession`)

The trainer then starts from the newest checkpoint before that step, keeps a step log in DIRECTORY
instead of the run's, writes nothing else, and ends the process after that step. What its records
say is compared with the run's, by bits.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..base.files import read_json, write_json, write_whole
from ..base.outputs import write_weights
from ..base.runs import ATTEMPT, EXPECTED_RANKS, RUN_DIR, Run
from ..callbacks import Callback, Context
from ..comm import Communicator
from ..errors import ConfigError, DataError, OdysseyError, OutputError
from . import steplog, verify
from .step_recorder import Records
from .steplog import StepRecord, difference

REPLAY = "ODYSSEY_REPLAY"
REQUEST = "request.json"
STATE = "state.safetensors"

# Of run.json and of a command: what says where and when a run was, not what it computes.
PLACES = frozenset({"started", "time", "hosts", "host", "pid", "directory", "run_dir", "launcher"})
OUTPUTS = frozenset(
    {
        "--run-dir",
        "--checkpoint-dir",
        "--checkpoint-every",
        "--keep",
        "--resume",
        "--json",
        "--save-weights",
    }
    | {"--no-progress", "--watchdog"}
)


# --- inside a run that is replayed ----------------------------------------------------------------


@dataclasses.dataclass
class ReplaySession(Callback):
    """A replay, in a trainer: it goes to the step before, keeps the log, and ends the process
    after the step.

    step: the step that is replayed, counted from 1; training ends after it. folder: where
    everything goes that is written. checkpoint: the directory of the checkpoint to start from;
    None: from the beginning. layout: as in `odyssey verify`, e.g. "dp=1"; it goes before the
    trainer's own arguments. save: its weights and gradients as well.
    """

    step: int
    folder: Path
    checkpoint: Path | None = None
    layout: str = ""
    save: bool = False
    records: Records | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> ReplaySession | None:
        """The replay that this process is, if it is one.

        Raises ConfigError: the variable is not STEP:DIRECTORY. DataError: the request in the
        directory cannot be read.
        """
        value = environment.get(REPLAY)
        if not value:
            return None
        number, _, folder = value.partition(":")
        if not (number.isascii() and number.isdigit() and folder):
            raise ConfigError(f"[replay] {REPLAY} is {value!r}; it must be STEP:DIRECTORY")
        path = Path(folder) / REQUEST
        request = read_json(path)
        fields = (
            [request.get(key, 0) for key in ("checkpoint", "layout", "save")]
            if isinstance(request, dict)
            else ()
        )
        kinds = (str | None, str, bool)
        if not fields or not all(map(isinstance, fields, kinds)):
            raise DataError(
                f"[replay] {path} has no checkpoint, layout and save as odyssey replay writes them"
            )
        checkpoint, layout, save = fields
        return cls(
            int(number),
            Path(folder),
            None if checkpoint is None else Path(checkpoint),
            layout,
            save,
        )

    def request(self) -> None:
        """Writes what `current` reads beside the variable."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        write_json(
            self.folder / REQUEST,
            {"checkpoint": checkpoint, "layout": self.layout, "save": self.save},
        )

    variable = property(
        lambda self: f"{self.step}:{self.folder}", doc="The value of ODYSSEY_REPLAY."
    )
    log = property(
        lambda self: self.folder / steplog.NAME, doc="Where the records of the steps go."
    )
    state = property(
        lambda self: self.folder / STATE, doc="Where weights and gradients of the step go."
    )

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Adds what a layout leaves out, as on one process: the run's own may need more ranks."""
        return (
            {"zero": 0, "servers": 1, **verify.arguments(verify.parse(self.layout))}
            if self.layout
            else {}
        )

    def on_fit_plan(self, context: Context) -> None:
        start = "auto" if self.checkpoint is None else self.checkpoint
        context.saving = dataclasses.replace(
            context.saving, folder=None, every=None, resume=start, off=True
        )

    def on_fit_start(self, context: Context) -> None:
        self.records = Records(context.trainer, self.log, 0)

    def on_step_end(self, context: Context) -> None:
        """Takes the record; ends after the step that is replayed."""
        if self.records is None:
            return  # a custom training loop
        self.records.on_step_end(context)
        trainer = context.trainer
        if trainer.steps >= self.step:
            self.records.flush()
            self.records.close()
            tensors = (trainer.state_dict(), trainer.last_gradients()) if self.save else ({}, {})
            self.end(trainer.comm, *tensors)

    def end(
        self, comm: Communicator, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
    ) -> NoReturn:
        """Ends this process on all ranks, with exit code 0: nothing after the training in the
        user's script is done again. weights, gradients: by name, whole, on rank 0; only if
        `save`.
        """
        if self.save and comm.rank == 0:
            tensors_by_kind = {"weights": weights, "gradients": gradients}
            arrays = {
                f"{kind}/{name}": a
                for kind, arrays_by_name in tensors_by_kind.items()
                for name, a in arrays_by_name.items()
            }
            write_whole(self.state, lambda file: write_weights(file, arrays), durable=False)
        comm.barrier()
        raise SystemExit(0)


joins = ReplaySession.current


# --- outside: what two logs say about each other --------------------------------------------------


class Comparison(NamedTuple):
    """Two logs: how many steps both have, and the first that differs with what differs in it;
    `first` None if none.
    """

    common: int
    last: int | None  # of the common steps
    first: tuple[StepRecord, StepRecord] | None = None
    what: str | None = None
    unknown: tuple[str, ...] = ()  # fingerprints that one of the two lacks in all common steps

    @property
    def same(self) -> bool:
        """Returns whether no common step differs, and there is one."""
        return self.first is None and self.common > 0


def compare(a: np.ndarray, b: np.ndarray) -> Comparison:
    """Compares two histories (steplog.history) step by step."""
    steps, i, j = np.intersect1d(a["step"], b["step"], assume_unique=True, return_indices=True)
    x = a[i]
    y = b[j]
    flags = x["flags"] & y["flags"]
    kinds = (("gradients", steplog.GRADIENTS), ("weights", steplog.WEIGHTS))
    unknown = tuple(name for name, flag in kinds if len(steps) and not (flags & flag).any())
    last = int(steps[-1]) if len(steps) else None
    fields = [name for name in steplog.LAYOUT.names if name not in ("step", "attempt", "crc")]
    suspicious = np.any([_bits(x[name]) != _bits(y[name]) for name in fields], axis=0)
    for index in np.flatnonzero(suspicious):
        pair = steplog.decoded(x[index : index + 1])[0], steplog.decoded(y[index : index + 1])[0]
        aspect = difference(*pair)
        if aspect:
            return Comparison(len(steps), last, pair, aspect, unknown)
    return Comparison(len(steps), last, unknown=unknown)


def _bits(column: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(column).view(f"u{column.dtype.itemsize}")


def log_of(run: Path) -> np.ndarray:
    """The history of a run, an array of steplog.LAYOUT.

    Raises DataError: there is none, or it is damaged.
    """
    path = Run(run).steps / steplog.NAME
    if not path.exists():
        advice = "name the directory of a run whose ranks take every step together"
        raise DataError(f"[steps] {run} has no step log ({path.relative_to(run)}); {advice}")
    records = steplog.history(steplog.load(path))
    if not len(records):
        raise DataError(f"[steps] {path} has no steps yet")
    return records


def settings_of(run: Path) -> dict[str, str]:
    """Returns what run.json says that the run was, by name, without places and times, to compare
    it with another's.
    """
    description = _description(run)
    out: dict[str, str] = {}

    def flatten(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in PLACES:
                    flatten(f"{name}.{key}" if name else str(key), inner)
        else:
            out[name] = value if isinstance(value, str) else repr(value)

    flatten(
        "", {key: value for key, value in description.items() if key not in ("command", *PLACES)}
    )
    words = description.get("command")
    if isinstance(words, list):
        out.update(_options([str(word) for word in words]))
    return out


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options of a command line with their values; the words before them under the name
    "command".
    """
    out: dict[str, str] = {}
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    first = starts[0] if starts else len(words)
    out["command"] = shlex.join(words[1:first])  # without the interpreter's path
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(words)
        name, equals, value = words[start].partition("=")
        if name not in OUTPUTS:
            out[name] = value if equals else shlex.join(words[start + 1 : end]) or "given"
    return out


def settings_that_differ(a: Path, b: Path) -> dict[str, tuple[str | None, str | None]]:
    """By name what two runs were told differently; None: not told."""
    x = settings_of(a)
    y = settings_of(b)
    return {
        name: (x.get(name), y.get(name)) for name in sorted({*x, *y}) if x.get(name) != y.get(name)
    }


def _description(run: Path) -> dict[str, Any]:
    path = Run(run).description
    description = read_json(path)
    if not isinstance(description, dict):
        raise DataError(f"[run] {path} is not the description of a run")
    return description


# --- outside: running a step again ----------------------------------------------------------------


class ReplayResult(NamedTuple):
    """Outcome of a replay: the run's record of the step and the new one, and how the steps
    before it compare.
    """

    logged: StepRecord
    replayed: StepRecord
    checkpoint: str | None  # name of the checkpoint that it started from
    ranks: int
    comparison: Comparison  # of all steps from there

    @property
    def differing(self) -> tuple[str, ...]:
        """In what the two records of the step differ; a fingerprint that one of them lacks is
        not compared.
        """
        return steplog.differences(self.logged, self.replayed)

    @property
    def same(self) -> bool:
        """Returns whether all bits that both know are the same, in all steps."""
        return self.comparison.same


def checkpoint_before(
    run: Path, step: int, tell: Callable[[str], None] = lambda line: None
) -> Path | None:
    """The newest valid checkpoint of a run from before a step; None: there is none, start from
    the beginning.
    """
    if not Run(run).checkpoints.is_dir():
        return None
    from ..checkpoints import Store
    from ..checkpoints.snapshot import step_of

    with Store(Run(run).checkpoints, owner=False) as store:
        for name in reversed(store.names()):
            if (step_of(name) or 0) >= step:
                continue
            try:
                store.load(store.folder / name)
            except OdysseyError as problem:
                tell(str(problem))
                continue
            return store.folder / name
        newest, _ = store.newest()
        origin = None if newest is None else newest.values.get("origin")
    return Path(origin) if isinstance(origin, str) else None  # where the run itself began


def command_of(run: Path) -> tuple[list[str], Path]:
    """Returns what run.json says that the run is, as words, and the directory in which it ran.

    Raises DataError: it does not say it. ConfigError: other users could have written it: it is not
    run.
    """
    description = _description(run)
    path = Run(run).description
    words = description.get("command")
    folder = description.get("directory", os.getcwd())
    if not (
        isinstance(words, list)
        and words
        and all(isinstance(word, str) and "\0" not in word for word in words)
    ):
        advice = "replay needs a run of odyssey train --run-dir or odyssey launch"
        raise DataError(f"[replay] {path} has no command; {advice}")
    if not isinstance(folder, str):
        raise DataError(f"[replay] {path}: its directory is {folder!r:.80}")
    about = os.stat(path)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
        raise ConfigError(
            f"[replay] {path} can be written by other users, and its command would be run as you; "
            "look at it, make it yours (chown, chmod go-w), then replay"
        )
    if words[0] == "train":
        words = [sys.executable, "-m", "odyssey.train", *words[1:]]
    elif words[0] == "-m" or words[0].endswith(".py"):
        words = [sys.executable, *words]
    return words, Path(folder)


def replay(
    run: Path,
    step: int,
    layout: str = "dp=1",
    *,
    save: Path | None = None,
    launcher: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> ReplayResult:
    """Takes a logged step of a run again and compares it with the log.

    Args:
        run: its directory; nothing is written in it.
        step: counted from 1.
        layout: on which layout (docs/verify.md); "dp=1" is one process.
        save: a safetensors file for the weights after the step and its gradients.
        launcher: words that start several ranks, "{ranks}" standing for their number.
        tell: is given lines for the user while it goes on.

    Raises DataError: the run has no such step, or no log or command. ConfigError: the layout, or
    the command failed. OutputError: `save` cannot be written.
    """
    history = log_of(run)
    logged = history[history["step"] == step]
    if not len(logged):
        steps = history["step"]
        raise DataError(
            f"[replay] {run} has no step {step}; its log has steps {steps[0]} to {steps[-1]}"
        )
    options = verify.parse(layout)
    if "accumulation_steps" in options:
        raise ConfigError(
            "[replay] accumulation cuts the batches of a run, which a replay takes whole; leave "
            "it out"
        )
    ranks = verify.ranks(options)
    words, folder = command_of(run)
    start = checkpoint_before(run, step, tell)
    first = int(start.name.rpartition("_")[2]) if start else 0
    ranks_and_start = (
        f"on {ranks} rank{'s' if ranks > 1 else ''}, from "
        f"{start.name if start else 'the beginning'}"
    )
    tell(f"steps {first + 1} to {step} are taken again {ranks_and_start}: {shlex.join(words)}")
    with tempfile.TemporaryDirectory(prefix="odyssey-replay-") as work:
        session = ReplaySession(
            step, Path(work), start and start.absolute(), layout, save is not None
        )
        session.request()
        _run(words, folder, session, ranks, launcher)
        try:
            new_history = steplog.history(steplog.load(session.log))
        except DataError as problem:
            raise ConfigError(
                f"[replay] the command ended without a log of its steps ({problem}); it must "
                "train with fit()"
            ) from problem
        replayed = new_history[new_history["step"] == step]
        if not len(replayed):
            raise ConfigError(
                f"[replay] the command ended before step {step}; its length must be that of the run"
            )
        if save is not None:
            try:
                save.write_bytes(session.state.read_bytes())
            except OSError as problem:
                raise OutputError(
                    f"[replay] {save} cannot be written: {problem.strerror}"
                ) from problem
    return ReplayResult(
        steplog.decoded(logged)[0],
        steplog.decoded(replayed)[0],
        start.name if start else None,
        ranks,
        compare(history[(history["step"] > first) & (history["step"] <= step)], new_history),
    )


def _run(
    words: list[str], folder: Path, session: ReplaySession, ranks: int, launcher: str | None
) -> None:
    """Runs the command as a replay. ConfigError with the last line it printed if it fails."""
    words = verify.started(
        words, ranks, verify.launcher_words(launcher, "replay") if ranks > 1 else ()
    )
    dropped_variables = (RUN_DIR, ATTEMPT, EXPECTED_RANKS, verify.TRACE, verify.LAYOUT)
    problem = verify.ran(words, {REPLAY: session.variable}, dropped_variables, cwd=folder)
    if problem:
        raise ConfigError(f"[replay] the command failed: {problem}")
