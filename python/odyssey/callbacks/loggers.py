"""Loggers: callbacks that write the metrics of a training run for other tools.

Rank 0 writes "loss", "lr", "grad_norm" and "throughput" of every `log_every_n_steps`-th step, the
values that callbacks passed to Context.log(), and at the end of an epoch its record, "workers" and
"batch_size". A run that resumes from a checkpoint continues the same curves: rows after that
checkpoint are removed, or not written again. docs/logging.md shows how to read the files.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from ..base import install_extra, install_packages
from ..base.files import parse_json, write_whole
from ..base.paths import expand_path
from ..errors import ConfigError, OutputError, Stopped, check_integer
from ..settings.declarations import did_you_mean
from .base import Callback, Context

__all__ = [
    "CSVLogger",
    "JSONLLogger",
    "Logger",
    "MLflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "asked",
    "named",
    "parameters",
]

Row = dict[str, Any]  # "step", "epoch" if it is the record of an epoch, and metrics


class Logger(Callback):
    """Base of loggers: it collects rows on rank 0.

    A subclass has `open`, `write`, `flush` and `close`. The log is opened at the start of the first
    epoch, because a checkpoint is loaded after the start of fit(). An error of a file ends the log,
    not the training.

    log_every_n_steps: the number of steps from one row of a step to the next.
    """

    exact = False
    writes = True
    after = 1  # called after other callbacks, so the values that they log are available

    def __init__(self, log_every_n_steps: int = 10) -> None:
        name = f"[{type(self).__name__}] log_every_n_steps"
        self.log_every_n_steps = check_integer(name, log_every_n_steps, 1)
        self._state: dict[str, Any] = {}
        self._opened = self._failed = False
        self._log_calls_seen = 0  # the calls of Context.log() whose values are written
        # The start time and the number of samples since the last row, for the throughput.
        self._since = 0.0
        self._samples = 0

    @classmethod
    def in_folder(cls, folder: Path, log_every_n_steps: int) -> Logger:
        """Builds the logger of `odyssey train --log NAME --log-dir FOLDER`."""
        return cls(folder=folder, log_every_n_steps=log_every_n_steps)  # type: ignore[call-arg]

    # --- what a subclass does, on rank 0 ---

    def open(self, context: Context, state: dict[str, Any]) -> None:
        """Opens the log. `state` is the state_dict() of the checkpoint that the run resumes from.

        It is empty if the run starts from the beginning.
        """

    def write(self, row: Row) -> None:
        """Writes the metrics of a step or an epoch."""

    def flush(self) -> None:
        """Stores all rows so far. It is called before a checkpoint, which a run may resume from."""

    def close(self, context: Context) -> None:
        """Closes the log at the end of fit(). context.error is its error, or None."""

    # --- events ---

    def on_fit_start(self, context: Context) -> None:
        """Resets the logger. A checkpoint is loaded later, so the log is not opened here."""
        self._state = {}
        self._opened = False
        self._failed = False
        self._log_calls_seen = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._opened:  # training goes back to a checkpoint
            self.flush()
        self._log_calls_seen = int(state.get("seen", 0))
        self._state = state
        self._opened = False

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._log_calls_seen}

    def on_epoch_start(self, context: Context) -> None:
        if context.trainer.comm.rank == 0 and not self._opened and not self._failed:
            with self._tolerate_write_errors(context):
                self.open(context, self._state)
                self._opened = True
        self._since = time.perf_counter()
        self._samples = 0

    def on_step_end(self, context: Context) -> None:
        if not self._opened:
            return
        self._samples += len(context.batch.indices) if context.batch is not None else 0
        if context.steps % self.log_every_n_steps == 0:
            current_time = time.perf_counter()
            throughput = None
            if self._samples:
                throughput = self._samples / max(current_time - self._since, 1e-9)
            row = {
                "step": context.steps,
                "loss": context.loss,
                "lr": context.step.rate if context.step else None,
                "grad_norm": context.trainer.gradient_norm(),
                "throughput": throughput,
            }
            self._write_row(context, row)
            self._since = current_time
            self._samples = 0

    def on_epoch_end(self, context: Context) -> None:
        if self._opened:
            sizes = {"workers": context.trainer.workers, "batch_size": context.batch_size or None}
            self._write_row(context, {"step": context.steps, **context.record, **sizes})

    def on_checkpoint(self, context: Context) -> None:
        if self._opened:
            with self._tolerate_write_errors(context):
                self.flush()

    def on_fit_end(self, context: Context) -> None:
        if self._opened:
            self._opened = False
            with self._tolerate_write_errors(context):
                self.close(context)

    def _write_row(self, context: Context, row: dict[str, Any]) -> None:
        """Writes the numbers of a row, and the values that callbacks logged since the last row."""
        numbers = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if not math.isfinite(numbers.get("grad_norm", 0.0)):
            del numbers["grad_norm"]  # the step was skipped
        for name, (call_number, value) in context.logged.items():
            if call_number > self._log_calls_seen:
                numbers[name] = value
        self._log_calls_seen = context.log_calls
        with self._tolerate_write_errors(context):
            # NumPy's numbers become those of Python.
            self.write(
                {
                    name: value if type(value) is int else float(value)
                    for name, value in numbers.items()
                }
            )

    @contextlib.contextmanager
    def _tolerate_write_errors(self, context: Context) -> Any:
        """Ends the log instead of the training if a file cannot be written, and reports it."""
        try:
            yield
        except (OSError, OutputError) as problem:
            self._opened = False
            self._failed = True
            reason = getattr(problem, "strerror", None) or problem
            context.trainer.say(
                f"[{type(self).__name__}] {reason}; training goes on, without this log from here on"
            )


class _Rows(Logger):
    """A file of rows, NAME in a directory.

    When a run resumes from a checkpoint, the rows after the checkpoint are removed. A subclass has
    text(rows), which returns rows as text of the file, and read(), which returns the rows of the
    file.
    """

    name = ""

    def __init__(self, folder: str | Path = "logs", log_every_n_steps: int = 10) -> None:
        super().__init__(log_every_n_steps)
        self.folder = expand_path(folder)
        self.path = self.folder / self.name
        self._rows: list[Row] = []

    def open(self, context: Context, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        if context.steps and self.path.exists():
            epochs_done = context.cursor.epoch
            for row in self.read():
                # The record of an epoch has the step of its last row. So its number decides.
                is_before = (
                    row["epoch"] <= epochs_done if "epoch" in row else row["step"] <= context.steps
                )
                if is_before:
                    rows.append(row)
        self._rows = []
        self.rewrite(rows)

    def write(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= 100 or "epoch" in row:
            self.flush()

    def flush(self) -> None:
        rows = self._rows
        self._rows = []
        if rows:
            self.append(rows)

    def close(self, context: Context) -> None:
        self.flush()

    def whole_lines(self) -> str:
        """Returns the text of the file without a last line that a kill has cut off."""
        text = self.path.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1]

    def rewrite(self, rows: list[Row]) -> None:
        """Replaces the file by one with these rows."""
        write_whole(self.path, lambda file: file.write(self.text(rows).encode()), mode=0o666)

    def append(self, rows: list[Row]) -> None:
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(self.text(rows))


class JSONLLogger(_Rows):
    """Writes a JSON object per line to DIR/metrics.jsonl.

    It holds "step", the metrics, and "epoch" if it is the record of an epoch. NaN and infinity are
    null.
    """

    name = "metrics.jsonl"

    def text(self, rows: list[Row]) -> str:
        lines = []
        for row in rows:
            # JSON has no NaN.
            finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
            lines.append(json.dumps(finite) + "\n")
        return "".join(lines)

    def read(self) -> list[Row]:
        rows = [
            parse_json(line.encode(), self.path.name) for line in self.whole_lines().splitlines()
        ]
        for row in rows:
            for name, value in row.items():
                if value is None:
                    row[name] = math.nan
        return rows


class CSVLogger(_Rows):
    """Writes a table to DIR/metrics.csv: a column per metric, empty if a row doesn't have it.

    When a new metric appears, the table is written again with one column more.
    """

    name = "metrics.csv"
    _keys: tuple[str, ...] = ()

    def text(self, rows: list[Row]) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [row.get(key) for key in self._keys] for row in rows
        )
        return out.getvalue()

    def read(self) -> list[Row]:
        table = csv.DictReader(io.StringIO(self.whole_lines()))
        return [
            {k: int(v) if v.isdecimal() else float(v) for k, v in row.items() if v} for row in table
        ]

    def rewrite(self, rows: list[Row]) -> None:
        self._keys = tuple(dict.fromkeys(key for row in rows for key in row))
        head = ",".join(self._keys) + "\n"
        write_whole(
            self.path, lambda file: file.write((head + self.text(rows)).encode()), mode=0o666
        )

    def append(self, rows: list[Row]) -> None:
        if all(key in self._keys for row in rows for key in row):
            super().append(rows)
        else:
            self.rewrite([*self.read(), *rows])


def parameters(context: Context) -> dict[str, Any]:
    """Returns the parameters for the run of a tracking service.

    They are the configuration of the training run, and its size.
    """
    trainer = context.trainer
    sizes = {
        "workers": trainer.workers,
        "ranks": trainer.comm.size,
        "learning_rate": trainer.base_rate,
    }
    return {
        **trainer.configuration(),
        "epochs": context.epochs,
        "batch_size": context.batch_size or None,
        **sizes,
    }


def _require_module(owner: Any, module: str, remedy: str) -> None:
    """Raises ConfigError if a module is not installed.

    owner: the logger that needs it. remedy: the advice to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"[{type(owner).__name__}] the package {module} is not installed; {remedy}"
        )


class TensorBoardLogger(Logger):
    """Writes event files to a directory, which `tensorboard --logdir DIR` shows.

    Needs tensorboardX (the extra `track`).
    """

    def __init__(self, folder: str | Path = "logs", log_every_n_steps: int = 10) -> None:
        super().__init__(log_every_n_steps)
        _require_module(self, "tensorboardX", install_extra("track"))
        self.folder = expand_path(folder)
        self._writer: Any = None
        self._last: Row = {}  # everything that was written at the newest step

    def open(self, context: Context, state: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
        import tensorboardX

        step = context.steps
        # Files of the same second need different names, in the order of their steps.
        suffix = f".{os.getpid()}.{step:08d}.{time.time_ns()}"
        # Because of `purge_step`, readers skip the rows of earlier files from this step on. So the
        # row of this step is written again.
        self._writer = tensorboardX.SummaryWriter(
            str(self.folder), purge_step=step, filename_suffix=suffix
        )
        self._last = {}
        last = state.get("last") or {}
        if last.get("step") == step:
            self.write(last)

    def write(self, row: Row) -> None:
        step = row["step"]
        self._last = {**(self._last if self._last.get("step") == step else {}), **row}
        for name, value in row.items():
            if name not in ("step", "epoch"):
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self, context: Context) -> None:
        self._writer.close()
        self._writer = None

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "last": {k: v for k, v in self._last.items() if math.isfinite(v)},
        }


class MLflowLogger(Logger):
    """Writes to a run of MLflow.

    The run has the configuration as parameters, the metrics, and the last checkpoint as an artifact
    (the best one with a ModelCheckpoint). If the program has started a run (mlflow.start_run), the
    logger writes to it and leaves it open, and `experiment` and `run_name` have no effect. When
    training resumes from a checkpoint, it continues the same run. Needs mlflow or mlflow-skinny
    (with sqlalchemy for a SQLite store).

    Args:
        experiment: the name of the experiment.
        uri: the store, such as "sqlite:///mlflow.db". None is MLflow's default,
            MLFLOW_TRACKING_URI.
        log_every_n_steps: see `Logger`.
        run_name: the name of a new run.
        log_checkpoint: write the checkpoint as an artifact.
        artifacts: the folder of artifacts of a new experiment. None is MLflow's default, with
            SQLite ./mlruns.

    Attributes:
        run_id: the identifier of the run.
    """

    def __init__(
        self,
        experiment: str = "odyssey",
        uri: str | None = None,
        log_every_n_steps: int = 10,
        *,
        run_name: str | None = None,
        log_checkpoint: bool = True,
        artifacts: str | Path | None = None,
    ) -> None:
        super().__init__(log_every_n_steps)
        _require_module(self, "mlflow", install_packages(["mlflow-skinny"]))
        self._artifacts = None if artifacts is None else expand_path(artifacts).absolute().as_uri()
        self.experiment = experiment
        self.uri = uri
        self.run_name = run_name
        self.log_checkpoint = log_checkpoint
        self.run_id: str | None = None
        self._client: Any = None
        self._joined = False
        self._metrics: list[Any] = []
        # The newest step of each metric that an earlier process has written.
        self._newest_steps: dict[str, int] = {}

    @classmethod
    def in_folder(cls, folder: Path, log_every_n_steps: int) -> MLflowLogger:
        """Builds a logger for MLFLOW_TRACKING_URI.

        If the variable is not set, it writes to a SQLite store in the folder.
        """
        if os.environ.get("MLFLOW_TRACKING_URI"):
            return cls(log_every_n_steps=log_every_n_steps)
        folder = expand_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        store = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        artifacts = folder / "mlruns"
        return cls(uri=store, artifacts=artifacts, log_every_n_steps=log_every_n_steps)

    def on_fit_start(self, context: Context) -> None:
        super().on_fit_start(context)
        self.run_id = None

    def open(self, context: Context, state: dict[str, Any]) -> None:
        import mlflow

        self._client = client = mlflow.MlflowClient(self.uri)
        self.run_id = state.get("run")
        self._newest_steps = {}
        self._metrics = []
        logged_parameters = {}
        active = mlflow.active_run() if self.uri in (None, mlflow.get_tracking_uri()) else None
        self._joined = active is not None
        if active is not None:
            self.run_id = active.info.run_id
        if self.run_id is not None:
            try:
                run = client.get_run(self.run_id)
            except mlflow.MlflowException:  # another store, or removed
                self.run_id = None
            else:
                logged_parameters = run.data.params
                if not self._joined:
                    client.update_run(self.run_id, "RUNNING")
                if self.run_id == state.get("run"):
                    for key in run.data.metrics:
                        self._newest_steps[key] = max(
                            m.step for m in client.get_metric_history(self.run_id, key)
                        )
        if self.run_id is None:
            experiment = client.get_experiment_by_name(self.experiment)
            number = (
                experiment.experiment_id
                if experiment
                else client.create_experiment(self.experiment, self._artifacts)
            )
            self.run_id = client.create_run(number, run_name=self.run_name).info.run_id
        new = {
            name: str(value)[:500]
            for name, value in parameters(context).items()
            if name not in logged_parameters
        }
        client.log_batch(self.run_id, params=[mlflow.entities.Param(*pair) for pair in new.items()])

    def write(self, row: Row) -> None:
        from mlflow.entities import Metric

        time_ms = int(time.time() * 1000)
        for name, value in row.items():
            if name not in ("step", "epoch") and row["step"] > self._newest_steps.get(name, -1):
                self._metrics.append(Metric(name, value, time_ms, row["step"]))
        if len(self._metrics) >= 500:
            self.flush()

    def flush(self) -> None:
        if self._metrics:
            self._client.log_batch(self.run_id, metrics=self._metrics)
            self._metrics = []

    def on_epoch_end(self, context: Context) -> None:
        super().on_epoch_end(context)
        if self._opened:
            with self._tolerate_write_errors(context):
                self.flush()

    def close(self, context: Context) -> None:
        self.flush()
        names: list[str] = []
        if context.folder is not None:
            names = sorted(path.name for path in context.folder.glob("step_*"))
        if self.log_checkpoint and names and context.error is None:
            best = context.folder / "best"
            checkpoint = best if best.exists() else context.folder / names[-1]
            self._client.log_artifacts(self.run_id, str(checkpoint), "checkpoint")
        if context.error is None:
            status = "FINISHED"
        else:
            status = "KILLED" if isinstance(context.error, Stopped) else "FAILED"
        if not self._joined:
            self._client.set_terminated(self.run_id, status)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run": self.run_id}


class WandbLogger(Logger):
    """Writes to a run of Weights & Biases. Needs wandb.

    mode: "offline" writes files to DIR/wandb, which `wandb sync` sends.
    """

    def __init__(
        self,
        project: str = "odyssey",
        folder: str | Path = "logs",
        log_every_n_steps: int = 10,
        *,
        mode: str = "offline",
    ) -> None:
        super().__init__(log_every_n_steps)
        _require_module(self, "wandb", install_packages(["wandb"]))
        self.project = project
        self.folder = expand_path(folder)
        self.mode = mode
        self.run_id: str | None = None
        self._run: Any = None

    def open(self, context: Context, state: dict[str, Any]) -> None:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        run_options = {
            "project": self.project,
            "dir": str(self.folder),
            "mode": self.mode,
            "config": parameters(context),
        }
        earlier_run_id = state.get("run")
        quiet = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            **run_options,
            id=earlier_run_id,
            resume="allow" if earlier_run_id else None,
            settings=quiet,
        )
        self.run_id = self._run.id

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self, context: Context) -> None:
        self._run.finish(exit_code=int(context.error is not None))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run": self.run_id}


KINDS: dict[str, type[Logger]] = {  # by the names of `--log`
    "csv": CSVLogger,
    "jsonl": JSONLLogger,
    "tensorboard": TensorBoardLogger,
    "mlflow": MLflowLogger,
    "wandb": WandbLogger,
}


def named(names: str, folder: Path | None, log_every_n_steps: int = 10) -> list[Logger]:
    """Builds the loggers of `odyssey train --log csv,tensorboard --log-dir DIR`.

    folder: each logger writes to it. None is "logs". Raises ConfigError for an unknown name.
    """
    kinds = dict.fromkeys(part.strip() for part in names.split(","))
    for name in kinds:
        if name not in KINDS:
            raise ConfigError(f"[train] --log names {name!r}{did_you_mean(name, KINDS)}")
    return [KINDS[name].in_folder(folder or Path("logs"), log_every_n_steps) for name in kinds]


def asked(
    tensorboard: bool = False,
    tensorboard_dir: str | Path | None = None,
    mlflow_tracking: bool = False,
    mlflow_experiment: str | None = None,
    log_every_n_steps: int = 10,
) -> list[Logger]:
    """Builds the loggers for the keys of other platforms.

    They are a TensorBoardLogger (default directory "runs"), an MLflowLogger (default experiment
    "odyssey"), both or none. DistributedConfig, PyTorchDDPTrainer and similar classes have these
    keys.
    """
    loggers: list[Logger] = []
    if tensorboard or tensorboard_dir is not None:
        folder = "runs" if tensorboard_dir is None else tensorboard_dir
        loggers.append(TensorBoardLogger(folder, log_every_n_steps))
    if mlflow_tracking or mlflow_experiment is not None:
        loggers.append(
            MLflowLogger(mlflow_experiment or "odyssey", log_every_n_steps=log_every_n_steps)
        )
    return loggers
