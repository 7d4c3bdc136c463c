"""Loggers: callbacks that write the figures of a training where other tools read them.

Rank 0 writes: "loss", "lr", "grad_norm" and "throughput" of every `log_every_n_steps`-th step and
what callbacks gave Context.log(), and at the end of an epoch its record, "workers" and
"batch_size". A training that goes on from a checkpoint goes on in the same curves: what was written
behind that checkpoint is taken away or not written again. docs/logging.md shows how to read the
files.
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

from .base import install_extra, install_packages
from .base.files import parse_json, write_whole
from .callbacks import Callback, Context
from .errors import ConfigError, OutputError, Stopped, check_integer
from .settings.declarations import did_you_mean

Row = dict[str, Any]  # "step", "epoch" where it is an epoch's record, and figures


class Logger(Callback):
    """Base: collects rows on rank 0; a subclass has `open`, `write`, `flush` and `close`.

    log_every_n_steps: steps from one row of a step to the next.
    """

    exact = False
    writes = True
    after = 1  # what other callbacks log of an event is there

    def __init__(self, log_every_n_steps: int = 10) -> None:
        name = f"[{type(self).__name__}] log_every_n_steps"
        self.log_every_n_steps = check_integer(name, log_every_n_steps, 1)
        self._state: dict[str, Any] = {}
        self._opened = self._failed = False
        self._log_calls_seen = 0  # of what callbacks logged
        # of what was trained after the last row
        self._since = 0.0
        self._samples = 0

    @classmethod
    def in_folder(cls, folder: Path, log_every_n_steps: int) -> Logger:
        """The logger that `odyssey train --log NAME --log-dir FOLDER` makes."""
        return cls(folder=folder, log_every_n_steps=log_every_n_steps)  # type: ignore[call-arg]

    # --- what a subclass does, on rank 0 ---

    def open(self, context: Context, state: dict[str, Any]) -> None:
        """A training begins, or goes on with what state_dict() gave at the checkpoint."""

    def write(self, row: Row) -> None:
        """Writes the figures of a step or an epoch."""

    def flush(self) -> None:
        """A checkpoint follows: what was written must be there if the training goes on from it."""

    def close(self, context: Context) -> None:
        """fit() ends, with context.error or without."""

    # --- events ---

    def on_fit_start(self, context: Context) -> None:
        """Opened with the first row: what a checkpoint says comes after this."""
        self._state = {}
        self._opened = False
        self._failed = False
        self._log_calls_seen = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._opened:  # the training goes back
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
            row = {
                "step": context.steps,
                "loss": context.loss,
                "lr": context.step.rate if context.step else None,
            }
            row["grad_norm"] = context.trainer.gradient_norm()
            row["throughput"] = (
                self._samples / max(current_time - self._since, 1e-9) if self._samples else None
            )
            self._row(context, row)
            self._since = current_time
            self._samples = 0

    def on_epoch_end(self, context: Context) -> None:
        if self._opened:
            sizes = {"workers": context.trainer.workers, "batch_size": context.batch_size or None}
            self._row(context, {"step": context.steps, **context.record, **sizes})

    def on_checkpoint(self, context: Context) -> None:
        if self._opened:
            with self._tolerate_write_errors(context):
                self.flush()

    def on_fit_end(self, context: Context) -> None:
        if self._opened:
            self._opened = False
            with self._tolerate_write_errors(context):
                self.close(context)

    def _row(self, context: Context, row: dict[str, Any]) -> None:
        figures = {
            k: v for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)
        }
        if not math.isfinite(figures.get("grad_norm", 0.0)):
            del figures["grad_norm"]  # of a step that was not taken
        new = {
            name: value
            for name, (number, value) in context.logged.items()
            if number > self._log_calls_seen
        }
        self._log_calls_seen = context.log_calls
        with self._tolerate_write_errors(context):
            self.write(
                {k: v if type(v) is int else float(v) for k, v in {**figures, **new}.items()}
            )

    @contextlib.contextmanager
    def _tolerate_write_errors(self, context: Context) -> Any:
        """A file that cannot be written costs the log and not the training."""
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

    What a training that goes on has behind its checkpoint is taken away.

    A subclass has text(rows), as they stand in the file, and read(), which gives them back.
    """

    name = ""

    def __init__(self, folder: str | Path = "logs", log_every_n_steps: int = 10) -> None:
        super().__init__(log_every_n_steps)
        self.folder = Path(folder)
        self.path = self.folder / self.name
        self._rows: list[Row] = []

    def open(self, context: Context, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        if context.steps and self.path.exists():
            epochs_done = context.cursor.epoch  # epochs whose record is made
            rows = [
                r
                for r in self.read()
                if (r["epoch"] <= epochs_done if "epoch" in r else r["step"] <= context.steps)
            ]
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
        """The file without a last line that a kill has torn."""
        text = self.path.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1]

    def rewrite(self, rows: list[Row]) -> None:
        """Makes these the rows of the file."""
        write_whole(self.path, lambda file: file.write(self.text(rows).encode()), mode=0o666)

    def append(self, rows: list[Row]) -> None:
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(self.text(rows))


class JSONLLogger(_Rows):
    """One JSON object per line, in DIR/metrics.jsonl: "step", figures, and "epoch" where it is
    the record of one. What is no finite number is null.
    """

    name = "metrics.jsonl"

    def text(self, rows: list[Row]) -> str:
        plain = ({k: v if math.isfinite(v) else None for k, v in row.items()} for row in rows)
        return "".join(json.dumps(row) + "\n" for row in plain)

    def read(self) -> list[Row]:
        rows = [
            parse_json(line.encode(), self.path.name) for line in self.whole_lines().splitlines()
        ]
        return [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]


class CSVLogger(_Rows):
    """A table, in DIR/metrics.csv: a column per figure, empty where a row has none.

    A figure that comes later gets a column of its own: the table is then written anew.
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
    """Returns how a run of a tracking service is described: the training's configuration, and
    its size.
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


def _need(owner: Any, module: str, remedy: str) -> None:
    """Raises ConfigError: a module is not installed. `remedy`: the command that installs it."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"[{type(owner).__name__}] the package {module} is not installed; {remedy}"
        )


class TensorBoardLogger(Logger):
    """Event files in a directory, which `tensorboard --logdir DIR` shows.

    Needs tensorboardX (the extra `track`).
    """

    def __init__(self, folder: str | Path = "logs", log_every_n_steps: int = 10) -> None:
        super().__init__(log_every_n_steps)
        _need(self, "tensorboardX", install_extra("track"))
        self.folder = Path(folder)
        self._writer: Any = None
        self._last: Row = {}  # everything that was written at the newest step

    def open(self, context: Context, state: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
        import tensorboardX

        step = context.steps
        # of one second: told apart, and in order
        suffix = f".{os.getpid()}.{step:08d}.{time.time_ns()}"
        # Readers leave out what earlier files have from this step on; what this step had is written
        # again.
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
    """A run of MLflow: the training's configuration as parameters, figures as metrics, the last
    checkpoint as artifact (its best, with a ModelCheckpoint). Needs mlflow or mlflow-skinny
    (with sqlalchemy for a SQLite store).

    A run that the program has started (mlflow.start_run) is joined: it gets all of this and is left
    open; experiment and run_name are then its own. experiment: its name. uri: of the store, such as
    "sqlite:///mlflow.db"; default: MLflow's own, MLFLOW_TRACKING_URI. artifacts: where those of a
    new experiment go; default: MLflow's own place, with SQLite ./mlruns. `run_id`: of the run. A
    training that goes on from a checkpoint goes on in the same run.
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
        _need(self, "mlflow", install_packages(["mlflow-skinny"]))
        self._artifacts = None if artifacts is None else Path(artifacts).absolute().as_uri()
        self.experiment = experiment
        self.uri = uri
        self.run_name = run_name
        self.log_checkpoint = log_checkpoint
        self.run_id: str | None = None
        self._client: Any = None
        self._joined = False
        self._metrics: list[Any] = []
        # the newest step of each metric that an earlier process has written
        self._newest_steps: dict[str, int] = {}

    @classmethod
    def in_folder(cls, folder: Path, log_every_n_steps: int) -> MLflowLogger:
        """Logs to MLFLOW_TRACKING_URI, or where that is not set into a SQLite store in the
        folder.
        """
        if os.environ.get("MLFLOW_TRACKING_URI"):
            return cls(log_every_n_steps=log_every_n_steps)
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
        names = (
            sorted(path.name for path in context.folder.glob("step_*"))
            if context.folder is not None
            else []
        )
        if self.log_checkpoint and names and context.error is None:
            best = context.folder / "best"
            chosen = best if best.exists() else context.folder / names[-1]
            self._client.log_artifacts(self.run_id, str(chosen), "checkpoint")
        status = (
            "FINISHED"
            if context.error is None
            else "KILLED"
            if isinstance(context.error, Stopped)
            else "FAILED"
        )
        if not self._joined:
            self._client.set_terminated(self.run_id, status)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run": self.run_id}


class WandbLogger(Logger):
    """A run of Weights & Biases.

    Needs wandb. mode: "offline" writes files in DIR/wandb, which `wandb sync` sends.
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
        _need(self, "wandb", install_packages(["wandb"]))
        self.project = project
        self.folder = Path(folder)
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
    """The loggers of `odyssey train --log csv,tensorboard --log-dir DIR`; each writes into DIR,
    default "logs".

    Raises ConfigError: there is no such logger.
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
    """The loggers that these keys of other platforms ask for: TensorBoard's (default directory
    "runs"), MLflow's (default experiment "odyssey"), or none. DistributedConfig,
    PyTorchDDPTrainer and their like take all of them.
    """
    loggers: list[Logger] = []
    if tensorboard or tensorboard_dir is not None:
        loggers.append(
            TensorBoardLogger(
                "runs" if tensorboard_dir is None else tensorboard_dir, log_every_n_steps
            )
        )
    if mlflow_tracking or mlflow_experiment is not None:
        loggers.append(
            MLflowLogger(mlflow_experiment or "odyssey", log_every_n_steps=log_every_n_steps)
        )
    return loggers
