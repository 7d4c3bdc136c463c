"""Loggers: what they write is read back by the tools that it is for, and a training that goes on
has the curves of one that was never stopped, each step once.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, loggers, nn, optim
from odyssey.errors import ConfigError

TIMES = ("seconds", "samples_per_second", "throughput")


class Fail(callbacks.Callback):
    """Raises an exception after a step; logs a number at odd ones."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps % 2:
            context.log("odd", context.steps)
        if context.steps == self.at:
            raise ZeroDivisionError


def train(folder: Path, make, fail: int = 0, every: int | None = 4, **more) -> list[loggers.Logger]:
    """Fifteen steps in three epochs."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)
    nn.manual_seed(0)
    trainer = DistributedTrainer(nn.Linear(6, 3), optim.SGD(lr=0.1), threads=1, **more)
    made = make()
    given = [*made, callbacks.LearningRateMonitor(), Fail(fail)]
    loader = data.DataLoader(data.arrays(x, y, classes=3), 8)
    where = {"checkpoint_dir": folder / "c", "checkpoint_every": every}
    if fail:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(loader, loader.dataset, epochs=3, callbacks=given, **where)
    else:
        trainer.fit(loader, loader.dataset, epochs=3, callbacks=given, **where)
    return made


def by_csv(folder: Path) -> list[dict]:
    with open(folder / "metrics.csv", newline="") as file:
        return [
            {k: float(v) for k, v in row.items() if v and k not in TIMES}
            for row in csv.DictReader(file)
        ]


def by_json(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


@pytest.mark.parametrize(
    ("fail", "every"), [(3, None), (6, 4), (6, 5), (10, 5), (11, None), (15, 4)]
)
def test_tables_have_the_rows_of_a_training_that_was_never_stopped(tmp_path, fail, every):
    def make(folder: Path) -> list[loggers.Logger]:
        return [loggers.CSVLogger(folder, 2), loggers.JSONLLogger(folder, 2)]

    train(tmp_path / "1", lambda: make(tmp_path / "1"), every=every)
    train(tmp_path / "2", lambda: make(tmp_path / "2"), fail, every)
    with open(tmp_path / "2" / "metrics.csv", "a") as file:
        file.write("16,0.5")  # torn by a kill
    train(tmp_path / "2", lambda: make(tmp_path / "2"), every=every)
    whole = by_csv(tmp_path / "1")
    assert by_csv(tmp_path / "2") == whole
    assert by_json(tmp_path / "2") == by_json(tmp_path / "1") == whole
    assert [row["step"] for row in whole] == [2, 4, 5, 6, 8, 10, 10, 12, 14, 15]
    assert [row["epoch"] for row in whole if "epoch" in row] == [1, 2, 3]
    assert [row["grad_norm"] > 0 for row in whole if "loss" in row] == [True] * 7
    assert all((row["workers"], row["batch_size"]) == (1, 8) for row in whole if "epoch" in row)
    with open(tmp_path / "1" / "metrics.csv", newline="") as file:
        assert all(float(row["throughput"]) > 0 for row in csv.DictReader(file) if row["loss"])
    assert whole[0]["lr"] == 0.1 and [row.get("odd") for row in whole] == [
        1,
        3,
        5,
        None,
        7,
        9,
        None,
        11,
        13,
        15,
    ]


def test_tensorboard_reads_each_step_once(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator

    def curves(folder: Path) -> dict[str, list]:
        found = accumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        return {
            tag: [(e.step, e.value) for e in found.Scalars(tag)]
            for tag in found.Tags()["scalars"]
            if tag not in TIMES
        }

    for every in (4, 5):
        one, two = tmp_path / f"1-{every}", tmp_path / f"2-{every}"
        train(one, lambda folder=one: [loggers.TensorBoardLogger(folder / "t", 1)], every=every)
        for fail in (7, 10, 0):
            train(two, lambda folder=two: [loggers.TensorBoardLogger(folder / "t", 1)], fail, every)
        whole = curves(one / "t")
        assert [step for step, _ in whole["loss"]] == list(range(1, 16))
        assert [step for step, _ in whole["test_loss"]] == [5, 10, 15] and len(whole["lr"]) >= 15
        assert curves(two / "t") == whole


def test_mlflow_has_parameters_metrics_and_the_checkpoint(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)  # artifacts go to ./mlruns
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def make() -> list[loggers.Logger]:
        return [loggers.MLflowLogger("nets", uri, 1)]

    client = mlflow.MlflowClient(uri)
    (first,) = train(tmp_path, make, 10)
    assert client.get_run(first.run_id).info.status == "FAILED"
    (second,) = train(tmp_path, make)
    assert second.run_id == first.run_id
    run = client.get_run(second.run_id)
    assert (
        run.info.status == "FINISHED"
        and run.data.params["batch size"] == "8"
        and run.data.params["epochs"] == "3"
    )
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(m.step for m in history) == list(range(1, 16))
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "test_loss")) == [
        5,
        10,
        15,
    ]
    assert "checkpoint/manifest.json" in [
        f.path for f in client.list_artifacts(run.info.run_id, "checkpoint")
    ]


def test_mlflow_joins_the_run_that_the_program_has_started(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        with mlflow.start_run(run_name="mine") as mine:
            mlflow.log_param("learning_rate", "as I call it")
            (logger,) = train(tmp_path, lambda: [loggers.MLflowLogger(log_every_n_steps=1)], 10)
            assert logger.run_id == mine.info.run_id == mlflow.active_run().info.run_id
            train(tmp_path, lambda: [loggers.MLflowLogger(log_every_n_steps=1)])
            client = mlflow.MlflowClient()
            assert client.get_run(mine.info.run_id).info.status == "RUNNING"  # the program's own
            mlflow.log_metric("afterwards", 1)
        run = client.get_run(mine.info.run_id)
        assert run.info.status == "FINISHED" and run.info.run_name == "mine"
        assert sorted(
            m.step for m in client.get_metric_history(mine.info.run_id, "grad_norm")
        ) == list(range(1, 16))
        assert {
            "loss",
            "lr",
            "throughput",
            "workers",
            "batch_size",
            "afterwards",
        } <= run.data.metrics.keys()
        wanted = {
            "workers": "1",
            "ranks": "1",
            "batch_size": "8",
            "learning_rate": "as I call it",
            "epochs": "3",
        }
        assert wanted.items() <= run.data.params.items()
        assert len(client.search_runs([run.info.experiment_id])) == 1
        assert client.get_experiment_by_name("odyssey") is None
    finally:
        mlflow.set_tracking_uri(before)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("kind", ["own", "own eager", "own bucketed", "fp16", "torch"])
def test_the_gradient_norm_is_of_the_mean_gradient(tmp_path, kind, clip_norm):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)).astype(np.float32), rng.integers(0, 3, 8)
    more = {"clip_norm": clip_norm, "threads": 1, "shard_size": 4}
    if kind == "torch":
        torch = pytest.importorskip("torch")
        from odyssey.torch import DistributedTrainer as TorchTrainer

        model = torch.nn.Linear(6, 3)
        w, b = (p.detach().numpy().copy() for p in model.parameters())
        trainer = TorchTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)
    else:
        model = nn.Linear(6, 3)
        w, b = model.weight.numpy().copy(), model.bias.numpy().copy()
        more |= {"own eager": {"execution": "eager"}, "own bucketed": {"bucket_size_mb": 1e-5}}.get(
            kind, {}
        )
        more |= {"precision": "fp16"} if kind == "fp16" else {}
        trainer = DistributedTrainer(model, optim.SGD(lr=0.1), **more)
    z = np.exp(x @ w.T + b)
    d = (z / z.sum(1, keepdims=True) - np.eye(3)[y]) / 8
    wanted = math.sqrt(np.square(d.T @ x).sum() + np.square(d.sum(0)).sum())
    loader = data.DataLoader(data.arrays(x, y, classes=3), 8)
    trainer.fit(loader, epochs=1, callbacks=[loggers.CSVLogger(tmp_path, 1)], verbose=False)
    assert by_csv(tmp_path)[0]["grad_norm"] == pytest.approx(
        wanted, rel=2e-3 if kind == "fp16" else 1e-5
    )
    assert trainer.gradient_norm() == pytest.approx(wanted, rel=2e-3 if kind == "fp16" else 1e-5)


def test_wandb_writes_a_run_without_a_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    (logger,) = train(tmp_path, lambda: [loggers.WandbLogger("nets", tmp_path, 1)])
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert logger.run_id in file.name and wandb.run is None
    wanted, end = list(range(1, 16)), time.monotonic() + 60
    # wandb's process writes
    while (steps := wandb_steps(file.read_bytes())) != wanted and time.monotonic() < end:
        time.sleep(0.2)
    assert steps == wanted


def wandb_steps(raw: bytes) -> list[int]:
    """The steps of which wandb has a loss."""
    steps = []
    for record in wandb_records(raw):
        if record.HasField("history"):
            names = {item.key or ".".join(item.nested_key) for item in record.history.item}
            steps += [record.history.step.num] if "loss" in names else []
    return steps


def wandb_records(raw: bytes) -> list:
    """The records of a file of wandb: 7 bytes, then pieces as in LevelDB's log, in blocks of 32
    KB.
    """
    from wandb.proto import wandb_internal_pb2

    found, data, at = [], b"", 7
    while at + 7 <= len(raw):
        length, kind = struct.unpack_from("<HB", raw, at + 4)
        data, at = data + raw[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last piece of one
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(data)
            data = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
    return found


def test_one_rank_writes(launch, tmp_path):
    words = (
        "--steps",
        4,
        "--global-batch-size",
        32,
        "--no-eval",
        "--log",
        "csv,jsonl",
        "--log-dir",
        tmp_path / "logs",
    )
    done = launch.train(*words, "--log-every-n-steps", 1, ranks=2)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in by_csv(tmp_path / "logs")] == [1, 2, 3, 4, 4]
    done = launch.train("--log", "csvs", ranks=2)
    assert (
        done.returncode == 64 and done.stderr.count("--log names 'csvs'; did you mean 'csv'?") == 1
    ), done.stderr


def test_a_full_disk_costs_the_log_and_not_the_training(tmp_path, capsys):
    class Full(loggers.JSONLLogger):
        def append(self, rows: list) -> None:
            raise OSError(28, "No space left on device")

    train(tmp_path, lambda: [Full(tmp_path)])
    said = capsys.readouterr().err
    assert (
        said.count(
            "[Full] No space left on device; training goes on, without this log from here on"
        )
        == 1
    )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"\[TensorBoardLogger\] the package tensorboardX is not installed"
    ):
        loggers.TensorBoardLogger()


def test_lines_go_to_python_s_logging_where_that_is_configured(tmp_path, caplog, capsys):
    train(tmp_path / "1", list)
    assert capsys.readouterr().err.count("epoch ") == 3
    with caplog.at_level(logging.INFO, "odyssey"):
        train(tmp_path / "2", list)
        train(tmp_path / "2", list)
    lines = [record.getMessage() for record in caplog.records if record.name == "odyssey"]
    assert (
        sum(line.startswith("epoch ") for line in lines) == 3
        and "resumed from step_00000015" in lines[-1]
    )
    assert capsys.readouterr().err == ""


def test_numbers_that_are_none_stay_readable(tmp_path):
    loss = callbacks.LambdaCallback(on_epoch_end=lambda context: context.log("none", math.nan))
    train(tmp_path, lambda: [loggers.JSONLLogger(tmp_path), loggers.CSVLogger(tmp_path), loss])
    assert by_json(tmp_path)[-1]["none"] is None and math.isnan(by_csv(tmp_path)[-1]["none"])
