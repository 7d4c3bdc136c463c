"""Pictures, a table and a text from the command line alone: trained, stopped, gone on with on
other ranks until the training stops early, asked, exported, and looked at with the tools that
its figures are for.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import data

RNG = np.random.default_rng(0)
SAME = ("--schedule", "constant", "--warmup-steps", 0, "--epochs", 6, "-q")


def pictures(root: Path) -> list:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 16), ("test", 4)):
        for name, colour in (("blue", (30, 30, 200)), ("red", (200, 30, 30))):
            (root / "p" / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(RNG.normal(colour, 30, size=(9, 8, 3)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(root / "p" / part / name / f"{i}.png")
    return [
        "--dataset",
        "image-folder:p",
        "--model",
        "convnet",
        "--image-size",
        8,
        "--global-batch-size",
        8,
    ]


def table(root: Path) -> list:
    x = RNG.normal(size=(60, 3))
    rows = "".join(f"{a},{a + 2 * b - c},{b},{c}\n" for a, b, c in x.tolist())
    (root / "t.csv").write_text("a,price,b,c\n" + rows)
    words = ["--dataset", "csv:t.csv", "--target", "price", "--model", "mlp", "--metrics", "mae"]
    return [*words, "--global-batch-size", 16]


def text(root: Path) -> list:
    (root / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 12)
    words = ["--dataset", "text:t.txt", "--model", "gpt-mini", "--sequence-length", 16]
    return [*words, "--global-batch-size", 8, "--shard-size", 2]


def tensorboard_reads(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def mlflow_reads(folder: Path) -> dict[str, list]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs(["1"])
    assert run.info.status == "FINISHED" and run.data.params["epochs"] == "6"
    assert "checkpoint/manifest.json" in [
        f.path for f in client.list_artifacts(run.info.run_id, "checkpoint")
    ]
    of = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return {key: sorted((m.step, m.value) for m in found) for key, found in of.items()}


def table_reads(folder: Path) -> dict[str, list]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: [(int(r["step"]), float(r[key])) for r in rows if r[key]] for key in rows[0]}


def pictures_say(launch, session) -> None:
    files = ["p/test/blue/1.png", "p/test/red/0.png"]
    said = launch.python("-m", "odyssey", "predict", "run", *files, "--top", 2, "--json", ranks=2)
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    assert [row["classes"][0] for row in rows] == ["blue", "red"], said.stderr
    pixels = data.ImageFolder(launch.folder / "p" / "test", 8)
    x = np.stack([pixels[1][0], pixels[4][0]]).astype(np.float32) / 127.5 - 1
    (y,) = session.run(None, {"x": x})
    shares = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    assert np.sort(shares)[:, ::-1] == pytest.approx(
        np.array([row["probabilities"] for row in rows]), rel=1e-4
    )


def table_says(launch, session) -> None:
    # columns are found by their names
    (launch.folder / "new.csv").write_text("c,b,a\n0,0,1\n-1,1,0\n")
    said = launch.python("-m", "odyssey", "predict", "run", "new.csv", "--json", ranks=2)
    outputs = [json.loads(line)["output"] for line in said.stdout.splitlines()]
    (y,) = session.run(None, {"x": np.array([[1, 0, 0], [0, 1, -1]], np.float32)})
    assert y == pytest.approx(np.array(outputs), rel=1e-4, abs=1e-5) and len(outputs) == 2, (
        said.stderr
    )


def text_says(launch, session) -> None:
    said = launch.python(
        "-m", "odyssey", "generate", "run", "--prompt", "the qu", "--tokens", 6, "--temperature", 0
    )
    assert said.returncode == 0 and said.stdout.startswith("the qu"), said.stderr
    letters = sorted(set((launch.folder / "t.txt").read_text()))
    tokens = [letters.index(c) for c in "the qu"]
    for _ in range(6):
        (y,) = session.run(None, {"x": np.array([tokens[-16:]], np.int64)})
        tokens.append(int(y[0, -1].argmax()))
    assert said.stdout.rstrip("\n") == "".join(letters[t] for t in tokens).rstrip("\n")


@pytest.mark.parametrize(
    ("make", "stop", "log", "read", "says"),
    [
        (pictures, "test_accuracy:2:0.9", "tensorboard", tensorboard_reads, pictures_say),
        pytest.param(
            table, "test_mae:2:9", "mlflow", mlflow_reads, table_says, marks=pytest.mark.long
        ),
        pytest.param(text, "train_loss:2:9", "csv", table_reads, text_says, marks=pytest.mark.long),
    ],
)
def test_a_training_from_the_command_line_alone(launch, monkeypatch, make, stop, log, read, says):
    runtime = pytest.importorskip("onnxruntime")
    for module in {"tensorboard": ["tensorboard", "tensorboardX"], "mlflow": ["mlflow"]}.get(
        log, []
    ):
        pytest.importorskip(module)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    launch.environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
    words = [*make(launch.folder), *SAME, "--early-stopping", stop]
    whole = launch.result(*words)
    assert len(whole["history"]) == 3 < 6  # no figure is so much better than the first
    words += ["--run-dir", "run", "--log", log, "--log-every-n-steps", 1, "--log-dir", "logs"]
    cut = launch.train(*words, "--steps", whole["steps"] // 2, ranks=2)
    assert cut.returncode == 0, cut.stderr
    done = launch.result(*words, ranks=3)
    assert (done["weights_sha256"], done["steps"]) == (whole["weights_sha256"], whole["steps"])
    if log == "csv":  # the quickest
        # it is complete, for the same command
        assert launch.result(*words)["steps"] == whole["steps"]
    curves = read(launch.folder / "logs")
    assert [step for step, _ in curves["loss"]] == list(range(1, whole["steps"] + 1))
    kept = [name for name in whole["history"][0] if name.startswith(("train_", "test_"))]
    for record in whole["history"]:
        for name in (name for name in kept if record[name] is not None):
            step = whole["steps"] * record["epoch"] // 3
            assert dict(curves[name])[step] == pytest.approx(record[name], rel=1e-6), name
    assert not (launch.folder / "mlruns").exists()
    best = odyssey.load(launch.folder / "run" / "checkpoints" / "best")
    assert best.state_dict().keys() == odyssey.load(launch.folder / "run").state_dict().keys()
    export = launch.python(
        "-m", "odyssey", "export", "run", "--format", "onnx", "--output", "m.onnx"
    )
    assert export.returncode == 0, export.stderr
    says(
        launch,
        runtime.InferenceSession(launch.folder / "m.onnx", providers=["CPUExecutionProvider"]),
    )
