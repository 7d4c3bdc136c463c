"""`odyssey replay` and `odyssey diff`: repeat a logged step, and find the first step in which two
runs differ.

A replay runs the command of RUN/run.json again with one environment variable,

    ODYSSEY_REPLAY    "STEP:DIRECTORY"; DIRECTORY/request.json holds the rest (`ReplaySession`)

The trainer then starts from the newest checkpoint before that step, writes a step log in DIRECTORY
instead of that of the run, writes nothing else, and ends the process after that step. Its records
are compared with those of the run, by bits.
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

# Keys of run.json, and options of a command, that are about the place and time of a run. They don't
# change its results.
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
    """The callback of a replay in a trainer.

    It starts training before the step, writes the log, and ends the process after the step.

    Attributes:
        step: the step that is replayed, counted from 1.
        folder: the folder of everything that is written.
        checkpoint: the directory of the checkpoint to start from. None starts at the beginning.
        layout: a layout as in `odyssey verify`, such as "dp=1". It replaces the arguments of the
            trainer.
        save: also write the weights and gradients of the step.
    """

    step: int
    folder: Path
    checkpoint: Path | None = None
    layout: str = ""
    save: bool = False
    records: Records | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> ReplaySession | None:
        """Returns the replay that this process runs, or None if it runs none.

        Raises:
            ConfigError: the variable is not STEP:DIRECTORY.
            DataError: the request in the directory cannot be read.
        """
        value = environment.get(REPLAY)
        if not value:
            return None
        number, _, folder = value.partition(":")
        if not (number.isascii() and number.isdigit() and folder):
            raise ConfigError(f"[replay] {REPLAY} is {value!r}; it must be STEP:DIRECTORY")
        path = Path(folder) / REQUEST
        request = read_json(path)
        fields: list[Any] = []
        if isinstance(request, dict):
            # 0, the default, is of none of the types.
            fields = [request.get(key, 0) for key in ("checkpoint", "layout", "save")]
        types = (str | None, str, bool)
        if not fields or not all(map(isinstance, fields, types)):
            raise DataError(
                f"[replay] {path} has no checkpoint, layout and save as odyssey replay writes them"
            )
        checkpoint, layout, save = fields
        return cls(
            step=int(number),
            folder=Path(folder),
            checkpoint=None if checkpoint is None else Path(checkpoint),
            layout=layout,
            save=save,
        )

    def request(self) -> None:
        """Writes the request, which `current` reads in the process of the replay."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        write_json(
            self.folder / REQUEST,
            {"checkpoint": checkpoint, "layout": self.layout, "save": self.save},
        )

    variable = property(
        lambda self: f"{self.step}:{self.folder}", doc="The value of ODYSSEY_REPLAY."
    )
    log = property(
        lambda self: self.folder / steplog.NAME, doc="The file of the records of the steps."
    )
    state = property(
        lambda self: self.folder / STATE, doc="The file of the weights and gradients of the step."
    )

    def arguments(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the trainer that the layout replaces.

        `zero` and `servers` become those of one process if the layout doesn't set them, because
        those of the run may need more ranks.
        """
        if not self.layout:
            return {}
        return {"zero": 0, "servers": 1, **verify.arguments(verify.parse(self.layout))}

    def on_fit_plan(self, context: Context) -> None:
        start = "auto" if self.checkpoint is None else self.checkpoint
        context.saving = dataclasses.replace(
            context.saving, folder=None, every=None, resume=start, off=True
        )

    def on_fit_start(self, context: Context) -> None:
        self.records = Records(context.trainer, self.log, 0)

    def on_step_end(self, context: Context) -> None:
        """Records the step. It ends the process after the step that is replayed."""
        if self.records is None:
            return  # a custom training loop
        self.records.on_step_end(context)
        trainer = context.trainer
        if trainer.steps >= self.step:
            self.records.flush()
            self.records.close()
            weights = trainer.state_dict() if self.save else {}
            gradients = trainer.last_gradients() if self.save else {}
            self.end(trainer.comm, weights, gradients)

    def end(
        self, comm: Communicator, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
    ) -> NoReturn:
        """Ends the process of all ranks with exit code 0. Collective.

        So the rest of the user's script, after the training, is not repeated.

        weights, gradients: whole arrays by name on rank 0, if `save` is set.
        """
        if self.save and comm.rank == 0:
            arrays = {f"weights/{name}": array for name, array in weights.items()}
            arrays |= {f"gradients/{name}": array for name, array in gradients.items()}
            write_whole(self.state, lambda file: write_weights(file, arrays), durable=False)
        comm.barrier()
        raise SystemExit(0)


joins = ReplaySession.current


# --- outside: what two logs say about each other --------------------------------------------------


class Comparison(NamedTuple):
    """The comparison of the step logs of two runs."""

    common: int  # how many steps both have
    last: int | None  # the last common step
    first: tuple[StepRecord, StepRecord] | None = None  # the records of the first that differs
    what: str | None = None  # the quantity that differs in it, one of steplog.COMPARED
    unknown: tuple[str, ...] = ()  # fingerprints that one of the two lacks in all common steps

    @property
    def same(self) -> bool:
        """Tells whether there are common steps, and none of them differs."""
        return self.first is None and self.common > 0


def compare(a: np.ndarray, b: np.ndarray) -> Comparison:
    """Compares two histories (steplog.history) step by step."""
    steps, indices_a, indices_b = np.intersect1d(
        a["step"], b["step"], assume_unique=True, return_indices=True
    )
    common_a = a[indices_a]
    common_b = b[indices_b]
    common_flags = common_a["flags"] & common_b["flags"]
    fingerprints = (("gradients", steplog.GRADIENTS), ("weights", steplog.WEIGHTS))
    unknown = tuple(
        name for name, flag in fingerprints if len(steps) and not (common_flags & flag).any()
    )
    last = int(steps[-1]) if len(steps) else None
    # Whole columns are compared first, because decoding records is slow. Records whose bits differ
    # may still be equal, for example if only one has a fingerprint.
    fields = [name for name in steplog.LAYOUT.names if name not in ("step", "attempt", "crc")]
    bits_differ = np.any(
        [_view_bits(common_a[name]) != _view_bits(common_b[name]) for name in fields], axis=0
    )
    for index in np.flatnonzero(bits_differ):
        [record_a] = steplog.decoded(common_a[index : index + 1])
        [record_b] = steplog.decoded(common_b[index : index + 1])
        quantity = difference(record_a, record_b)
        if quantity:
            return Comparison(len(steps), last, (record_a, record_b), quantity, unknown)
    return Comparison(len(steps), last, unknown=unknown)


def _view_bits(column: np.ndarray) -> np.ndarray:
    """Returns a column as unsigned integers. As floats, NaN would differ from itself."""
    return np.ascontiguousarray(column).view(f"u{column.dtype.itemsize}")


def log_of(run: Path) -> np.ndarray:
    """Returns the history of a run, an array of steplog.LAYOUT.

    Raises DataError if the run has no step log, or it is damaged or empty.
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
    """Returns the settings of a run by name, from run.json, to compare them with another run's.

    They are the options of its command and the other values, without places and times. Raises
    DataError if run.json cannot be read.
    """
    description = _read_description(run)
    settings: dict[str, str] = {}

    def flatten(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in PLACES:
                    flatten(f"{name}.{key}" if name else str(key), inner)
        else:
            settings[name] = value if isinstance(value, str) else repr(value)

    flatten(
        "", {key: value for key, value in description.items() if key not in ("command", *PLACES)}
    )
    words = description.get("command")
    if isinstance(words, list):
        settings.update(_parse_options([str(word) for word in words]))
    return settings


def _parse_options(words: Sequence[str]) -> dict[str, str]:
    """Returns the options of a command line with their values, except those that name outputs.

    The words before the first option have the name "command". An option without a value, such as a
    flag, has the value "given".
    """
    options: dict[str, str] = {}
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    ends = [*starts[1:], len(words)]
    first_start = starts[0] if starts else len(words)
    options["command"] = shlex.join(words[1:first_start])  # without the interpreter's path
    for start, end in zip(starts, ends, strict=False):
        name, equals, value = words[start].partition("=")
        if name not in OUTPUTS:
            options[name] = value if equals else shlex.join(words[start + 1 : end]) or "given"
    return options


def settings_that_differ(a: Path, b: Path) -> dict[str, tuple[str | None, str | None]]:
    """Returns the settings of two runs that differ: (value in a, value in b) by name.

    The value is None in a run that doesn't have the setting.
    """
    settings_a = settings_of(a)
    settings_b = settings_of(b)
    pairs = {
        name: (settings_a.get(name), settings_b.get(name))
        for name in sorted({*settings_a, *settings_b})
    }
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y}


def _read_description(run: Path) -> dict[str, Any]:
    """Returns the content of run.json. Raises DataError if it cannot be read."""
    path = Run(run).description
    description = read_json(path)
    if not isinstance(description, dict):
        raise DataError(f"[run] {path} is not the description of a run")
    return description


# --- outside: running a step again ----------------------------------------------------------------


class ReplayResult(NamedTuple):
    """The result of a replay: both records of the step, and the comparison of all steps."""

    logged: StepRecord  # the record in the log of the run
    replayed: StepRecord
    checkpoint: str | None  # name of the checkpoint that it started from
    ranks: int
    comparison: Comparison  # of all steps from there

    @property
    def differing(self) -> tuple[str, ...]:
        """The quantities in which the two records of the step differ.

        A fingerprint that one of them lacks is not compared.
        """
        return steplog.differences(self.logged, self.replayed)

    @property
    def same(self) -> bool:
        """Tells whether all bits that both have are the same, in all steps."""
        return self.comparison.same


def checkpoint_before(
    run: Path, step: int, tell: Callable[[str], None] = lambda line: None
) -> Path | None:
    """Returns the newest valid checkpoint of a run before a step.

    If the run has none, it is the checkpoint that the run itself started from, or None.

    tell: receives a line for each damaged checkpoint that is skipped.
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
    return Path(origin) if isinstance(origin, str) else None


def command_of(run: Path) -> tuple[list[str], Path]:
    """Returns the command of a run as words, and the directory in which it ran, from run.json.

    Raises:
        DataError: run.json has no command.
        ConfigError: other users can write run.json, so its command is not run.
    """
    description = _read_description(run)
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
    status = os.stat(path)
    others_can_write = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.geteuid() or others_can_write:
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
    """Repeats a logged step of a run and compares it with the log.

    Args:
        run: the directory of the run. Nothing is written in it.
        step: the step, counted from 1.
        layout: the layout of the replay (docs/verify.md). "dp=1" is one process.
        save: a safetensors file for the weights after the step and its gradients.
        launcher: words that start several ranks. "{ranks}" is replaced by their number.
        tell: receives lines for the user during the replay.

    Raises:
        DataError: the run has no such step, or no log or command.
        ConfigError: the layout is not supported, or the command failed.
        OutputError: `save` cannot be written.
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
            step=step,
            folder=Path(work),
            checkpoint=start and start.absolute(),
            layout=layout,
            save=save is not None,
        )
        session.request()
        _run_command(words, folder, session, ranks, launcher)
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
    replayed_steps = (history["step"] > first) & (history["step"] <= step)
    return ReplayResult(
        logged=steplog.decoded(logged)[0],
        replayed=steplog.decoded(replayed)[0],
        checkpoint=start.name if start else None,
        ranks=ranks,
        comparison=compare(history[replayed_steps], new_history),
    )


def _run_command(
    words: list[str], folder: Path, session: ReplaySession, ranks: int, launcher: str | None
) -> None:
    """Runs the command of a run as a replay, in the folder of the run.

    Raises ConfigError with the last line that it printed if it fails.
    """
    launcher_words = verify.launcher_words(launcher, "replay") if ranks > 1 else ()
    words = verify.started(words, ranks, launcher_words)
    # Variables of a run would make the replay write into its directory.
    dropped_variables = (RUN_DIR, ATTEMPT, EXPECTED_RANKS, verify.TRACE, verify.LAYOUT)
    problem = verify.failure_of(words, {REPLAY: session.variable}, dropped_variables, cwd=folder)
    if problem:
        raise ConfigError(f"[replay] the command failed: {problem}")
