"""Data of a user's own from the command line alone: stopped, and gone on with on other ranks,
with the same bits.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")


def pictures(root):
    """Small JPEGs of three colours, not all of one size."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 18), ("test", 5)):
        for k, name in enumerate(("blue", "green", "red")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 200, (14 + i % 3, 12, 3), np.uint8)
                pixels[..., 2 - k] += 50
                Image.fromarray(pixels).save(root / part / name / f"{i:02}.jpg")
    return "image-folder", root, "--image-size", 12, "--metrics", "accuracy,top2"


def table(root):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 4))
    rows = np.column_stack([x, x @ [1, 2, -1, 0.5]])
    path = root / "houses.csv"
    np.savetxt(path, rows[:, [0, 4, 1, 2, 3]], delimiter=",", header="a,price,b,c,d", comments="")
    return "csv", path, "--target", "price", "--metrics", "mae,mse", "--lr", 0.05


@pytest.mark.parametrize(("made", "more"), [(pictures, ("--num-workers", 1)), (table, ())])
def test_it_is_stopped_and_goes_on_on_other_ranks(launch, made, more):
    name, path, *options = made(launch.folder)
    words = [
        "--dataset",
        name,
        "--data-dir",
        path,
        *options,
        "--model",
        "mlp",
        "--epochs",
        3,
        "--shard-size",
        4,
    ]
    words += [
        "--global-batch-size",
        16,
        "--schedule",
        "constant",
        "--warmup-steps",
        0,
        "--no-progress",
    ]
    whole = launch.result(*words)
    stopped = launch.result(*words, "--checkpoint-dir", "kept", "--steps", 6, ranks=2)
    assert (
        stopped["steps"] == 6 < whole["steps"]
        and stopped["weights_sha256"] != whole["weights_sha256"]
    )
    again = launch.result(*words, *more, "--checkpoint-dir", "kept", "--zero", 2, ranks=3)
    assert again["weights_sha256"] == whole["weights_sha256"]
    kept = [n for n in whole["history"][-1] if n.startswith(("train_", "test_"))]
    assert len(kept) == 6
    for mine, theirs in zip(again["history"], whole["history"], strict=True):
        assert [mine[n] for n in kept] == [theirs[n] for n in kept]
    first, last = whole["history"][0], whole["history"][-1]
    assert (
        last["test_loss"] < first["test_loss"]
        and whole["metrics"] == options[options.index("--metrics") + 1]
    )


def cifar10(root):
    """In its own format: a label and 3 x 32 x 32 pixels per image."""
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = draw.integers(0, 256, (4, 3073), np.uint8)
        records[:, 0] %= 10
        records.tofile(root / f"{name}.bin")
    return f"cifar10:{root}"


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(cifar10, marks=pytest.mark.long),
        lambda root: f"image-folder:{pictures(root)[1]}",
    ],
    ids=["cifar10", "folder"],
)
def test_resnet18_on_pictures(launch, made):
    words = [
        "--model",
        "resnet18",
        "--dataset",
        made(launch.folder),
        "--steps",
        2,
        "--no-eval",
        "--no-progress",
    ]
    words += [
        "--global-batch-size",
        4,
        "--shard-size",
        2,
        *(["--image-size", 12] if made is not cifar10 else []),
    ]
    alone, two = launch.result(*words), launch.result(*words, ranks=2)
    assert alone["weights_sha256"] == two["weights_sha256"] and alone["dataset"] in (
        "cifar10",
        "image-folder",
    )


def test_gpt_on_a_text_and_its_bits_per_character(launch):
    text = launch.folder / "own.txt"
    text.write_text("ein Text, der sich wiederholt: äöü. " * 60)
    words = [
        "--model",
        "gpt-mini",
        "--sequence-length",
        16,
        "--steps",
        3,
        "--no-progress",
        "--run-dir",
        "run",
    ]
    found = launch.result("--dataset", f"text:{text}", *words)
    bits = found["test_loss"] / math.log(2)
    assert found["bits_per_character"] == pytest.approx(bits)
    done = launch.python("-m", "odyssey", "evaluate", "run", "--json")
    assert json.loads(done.stdout)["bits_per_character"] == pytest.approx(bits, rel=1e-6)
    done = launch.train("--dataset", f"text:{text}", *words, "--data-dir", text)
    assert done.returncode == 64 and "--dataset text: and --data-dir are both given" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--metrics", "far"),
            "[train] there is no metric 'far'; give one of accuracy, mae, mse, top5 (any "
            "number), auc, correlation",
        ),
        (
            ("--metrics", "accuracy"),
            "[train] the metric accuracy: [loss] a target of float32 (32,); it must be integers",
        ),
        (
            ("--model", "lenet5"),
            "[model] lenet5 takes images (C, H, W) of at least 12 x 12; the samples are (4,)",
        ),
        (
            ("--sequence-length", 8),
            "[train] --sequence-length applies only to --dataset shakespeare or text, not csv; "
            "remove it",
        ),
        (
            ("--image-size", 8),
            "[train] --image-size applies only to --dataset image-folder, not csv; remove it",
        ),
        (("--target", "prize"), "has no column 'prize'; its columns are a, price, b, c, d"),
    ],
)
def test_what_is_wrong_is_one_line(launch, words, message):
    name, path, *options = table(launch.folder)
    done = launch.train(
        "--dataset",
        name,
        "--data-dir",
        path,
        *options,
        "--model",
        "mlp",
        "--steps",
        1,
        "-q",
        *words,
    )
    assert (
        done.returncode in (64, 65) and done.stderr.count("\n") == 1 and message in done.stderr
    ), done.stderr


def broken_pictures(root):
    """A folder of pictures of which five files cannot be used."""
    pictures(root)
    for name in ("blue/00.jpg", "red/03.jpg"):
        path = root / "train" / name
        path.write_bytes(path.read_bytes()[:-100])
    (root / "train" / "red" / "04.jpg").write_bytes(b"no picture")
    (root / "test" / "green" / "01.jpg").write_bytes(b"")
    (root / "test" / "green" / "list.txt").write_text("")
    return [root / "train" / "blue" / "00.jpg", root / "test" / "green" / "list.txt"]


def test_broken_pictures_are_listed_or_left_out_before_the_first_step(launch):
    listed = broken_pictures(launch.folder)
    words = f"train --model mlp --dataset image-folder:{launch.folder} --image-size 12 --epochs 1"
    words += " --global-batch-size 16 --shard-size 4 --json out.json"
    for ranks in (0, 2):
        refused = launch.python("-m", "odyssey", *words.split(), ranks=ranks)
        assert refused.returncode == 65 and refused.stderr.count("\n") == 1, refused.stderr
        assert "5 files cannot be read as images: " in refused.stderr
        assert all(str(path) in refused.stderr for path in listed)
    bits = set()
    for ranks in (0, 2, 3):
        done = launch.python(
            "-m",
            "odyssey",
            *words.split(),
            "--skip-unreadable",
            "--run-dir",
            f"r{ranks}",
            ranks=ranks,
        )
        assert done.returncode == 0, done.stderr
        assert "5 files are left out (--skip-unreadable): " in done.stderr
        bits.add(json.loads((launch.folder / "out.json").read_text())["weights_sha256"])
    assert len(bits) == 1
    said = launch.python("-m", "odyssey", "evaluate", "r2")
    assert said.returncode == 0 and "14 samples" in said.stdout, said.stderr
