"""`odyssey train`: the files it leaves, how it ends, what is shown on the way."""

from __future__ import annotations

import io
import json
import os
import pathlib
from types import SimpleNamespace

import pytest

import odyssey
from odyssey.comm import Request
from odyssey.compile import gpus, pack
from odyssey.compile import library as build
from odyssey.errors import BuildError, CollectiveError, ConfigError, NumericsError
from odyssey.settings.declarations import OUTPUT, Settings, declared
from odyssey.train import progress


def test_json(odyssey_command, fake, tmp_path):
    path = tmp_path / "out.json"
    assert odyssey_command("train", "--json", path, "--seed", "3").code == 0
    report = json.loads(path.read_text())
    expected = {
        "test_accuracy": 0.9905,
        "test_loss": None,  # not a number: JSON has none
        "train_loss": 0.0123,
        "steps": 3752,
        "epochs": 1,
        "samples_per_second": 61234.4,
        "seconds": 7.71,
        "world_size": 1,
        "workers": 4,
        "threads": 2,
        "weights_sha256": "3f2a" * 16,
        "model": "lenet5",
        "dataset": "mnist",
        "global_batch_size": 128,
        "shard_size": 32,
        "seed": 3,
        "device": "cpu",
        "reduction": "tree",
        "servers": 1,
        "ranks_per_node": None,
        "compression": None,
        "compression_ratio": 0.01,
        "compression_warmup_steps": 0,
        "powersgd_rank": 2,
        "staleness": 4,
        "local_steps": 8,
        "lr_scaling": "none",
        "base_batch_size": None,
        "bytes_per_step": 1000.0,
        "bytes_per_step_uncompressed": 1000.0,
        "wire_bytes_per_step": 0.0,
        "execution": "replay",
        "mesh": {"dp": 1, "pp": 1, "tp": 1},
        "zero": 0,
        "accumulation_steps": 1,
        "clip_norm": None,
        "memory_bytes": {"parameters": 1},
        "precision": "fp32",
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 5e-4,
        "schedule": "cosine",
        "version": odyssey.__version__,
        "history": [{"epoch": 1, "train_loss": 0.5, "test_accuracy": 0.9}],
    }
    assert {key: report[key] for key in expected} == expected
    assert set(report) - set(expected) == {
        name
        for name, s in declared(Settings).items()
        if s.kind is not pathlib.Path and s.section != OUTPUT and name not in expected
    }
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_compressed_run_says_what_a_step_sends(odyssey_command, fake):
    fake.history.bytes_per_step = 49.36
    line = odyssey_command("train", "--compression", "topk").out
    assert "  3752 steps  0.0 KB/step sent (uncompressed 1.0)  61,234 samples/s" in line
    assert fake.calls["trainer"]["compression"] == "topk"


def test_json_without_eval(odyssey_command, tmp_path):
    odyssey_command("train", "--json", tmp_path / "out.json", "--no-eval")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["test_accuracy"] is None and report["test_loss"] is None


def test_weights_replace_the_old_file(odyssey_command, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    assert odyssey_command("train", "--save-weights", path).code == 0
    assert path.read_bytes() == b"weights"
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_only_rank_0_writes_and_prints(odyssey_command, fake, tmp_path):
    fake.world.rank, fake.world.size = 1, 2
    done = odyssey_command("train", "--json", tmp_path / "a", "--save-weights", tmp_path / "b")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert os.listdir(tmp_path) == []
    assert fake.calls["trainer"]["progress"] is None


@pytest.mark.parametrize("option", ["--json", "--save-weights"])
@pytest.mark.parametrize("name", ["", "none/out", "file/out"])
def test_output_that_cannot_be_written_stops_before_training(
    odyssey_command, fake, tmp_path, option, name
):
    (tmp_path / "file").touch()
    done = odyssey_command("train", option, tmp_path / name)
    assert done.code == 73
    assert option in done.err and done.err.count("\n") == 1
    assert "trainer" not in fake.calls


def test_failed_run_leaves_the_old_files(odyssey_command, fake, tmp_path):
    fake.error = NumericsError("[train] the loss is NaN in step 7; lower --lr")
    (tmp_path / "out.json").write_text("old")
    done = odyssey_command(
        "train", "--json", tmp_path / "out.json", "--save-weights", tmp_path / "w"
    )
    assert done.code == 65
    assert (
        done.err.splitlines()[-1] == "odyssey: error: [train] the loss is NaN in step 7; lower --lr"
    )
    assert os.listdir(tmp_path) == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "old"


def test_disk_full_at_the_end(odyssey_command, fake, tmp_path):
    fake.save_error = OSError(28, "No space left on device")
    done = odyssey_command("train", "--save-weights", tmp_path / "w", "--json", tmp_path / "j")
    assert done.code == 73
    assert "No space left on device" in done.err
    assert os.listdir(tmp_path) == []


def test_json_to_a_device(odyssey_command):
    assert odyssey_command("train", "--json", "/dev/null").code == 0
    assert not os.path.isfile("/dev/null")


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "code"), [(BuildError("b"), 69), (ConfigError("c"), 64)])
def test_exit_codes(odyssey_command, fake, error, code):
    fake.error = error
    done = odyssey_command("train", "--no-progress")
    assert done.code == code
    assert done.err.count("\n") == 1 and done.err.startswith("odyssey: ")
    assert fake.world.aborted == []


def test_interrupt_is_no_traceback(odyssey_command, fake, tmp_path):
    fake.error = KeyboardInterrupt()
    done = odyssey_command("train", "--no-progress", "--json", tmp_path / "out.json")
    assert done.code == 130
    assert done.err.strip() == "odyssey: interrupted"
    assert os.listdir(tmp_path) == []


def test_defect_shows_a_traceback(odyssey_command, fake):
    fake.error = ZeroDivisionError("x")
    done = odyssey_command("train", "--no-progress")
    assert done.code == 70
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1] == "odyssey: defect: ZeroDivisionError: x"


def test_error_of_one_rank_names_it_and_ends_all(odyssey_command, fake):
    fake.world.rank, fake.world.size = 2, 4
    fake.error = BuildError("no library")
    done = odyssey_command("train")
    assert done.err == "odyssey: [rank 2] error: no library\n"
    assert fake.world.aborted == [69]


@pytest.mark.parametrize(("rank", "line"), [(0, "odyssey: error: all\n"), (3, "")])
def test_error_of_all_ranks_is_printed_by_the_first(odyssey_command, fake, rank, line):
    fake.world.rank, fake.world.size = rank, 4
    fake.error = ConfigError("all")
    fake.error.raised_on_all_ranks = True
    fake.world.meet_start = Request  # all came
    done = odyssey_command("train", "--no-progress")
    assert done.err == line
    assert done.code == 64
    assert fake.world.aborted == []


@pytest.mark.parametrize(
    ("rank", "line"), [(0, "odyssey: error: all\n"), (3, "odyssey: [rank 3] error: all\n")]
)
def test_error_of_all_ranks_that_some_do_not_have(odyssey_command, fake, rank, line):
    fake.world.rank, fake.world.size = rank, 4
    fake.error = ConfigError("all")
    fake.error.raised_on_all_ranks = True

    def meet_start():
        raise CollectiveError("another rank is elsewhere")

    fake.world.meet_start = meet_start
    done = odyssey_command("train", "--no-progress")
    assert done.err == line
    assert fake.world.aborted == [64]


def test_usage_error_under_a_launcher_is_printed_by_the_first(odyssey_command, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert odyssey_command("train", "--lr", "-1").err == ""
    monkeypatch.setenv("PMI_RANK", "0")
    assert odyssey_command("train", "--lr", "-1").err.count("\n") == 1


def test_error_of_one_rank_before_mpi_ends_all(odyssey_command, fake, monkeypatch, tmp_path):
    monkeypatch.setenv("PMI_RANK", "1")
    fake.world.rank, fake.world.size = 1, 2
    done = odyssey_command("train", "--config", tmp_path / "only-on-the-other-machine.toml")
    assert done.err.startswith("odyssey: [rank 1] error: [config]")
    assert fake.world.aborted == [65]


def test_notice_is_printed_once(odyssey_command, fake):
    fake.notice = "no GPU found: 4 CPU workers are used"
    assert (
        odyssey_command("train", "--no-progress").err
        == "odyssey: no GPU found: 4 CPU workers are used\n"
    )


# -- `odyssey build` -------------------------------------------------------------------------------


def test_build_prints_the_path(odyssey_command, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        build, "cached_library", lambda *target: seen.append(target) or tmp_path / f"{len(seen)}.so"
    )
    done = odyssey_command("build", "--target-cpu", "x86-64", "--target", "nvidia:sm_90a")
    assert (done.code, done.out) == (0, f"{tmp_path / '1.so'}\n{tmp_path / '2.so'}\n")
    assert seen == [("x86-64",), ("x86-64", "sm_90")]
    seen.clear()
    monkeypatch.setenv("ODYSSEY_TARGET_ACCELERATOR", "gfx942")  # is not asked about
    monkeypatch.setattr(gpus, "found", lambda: seen.append("asked"))
    assert odyssey_command("build").out == f"{tmp_path / '1.so'}\n"
    assert seen == [(None,)]


def test_build_makes_a_folder(odyssey_command, monkeypatch, tmp_path):
    seen = []
    made = SimpleNamespace(files={"libodyssey.so": (4 << 20, "1f"), "odyssey": (1 << 19, "2e")})
    monkeypatch.setattr(
        pack, "pack", lambda output, **kwargs: seen.append((output, kwargs)) or made
    )
    monkeypatch.chdir(tmp_path)
    done = odyssey_command(
        "build", "--target", "sm_90", "--target", "sm_80", "--output", "x", "--with-dependencies"
    )
    assert (done.code, done.out) == (0, f"{tmp_path / 'x'}\n")
    assert done.err == "odyssey: 4.5 MiB in 2 files\n"
    assert seen == [
        (
            pathlib.Path("x"),
            {"target_cpu": None, "accelerators": ("sm_90", "sm_80"), "dependencies": True},
        )
    ]


def test_dependencies_go_into_a_folder(odyssey_command):
    assert odyssey_command("build", "--with-dependencies").code == 64


# -- progress --------------------------------------------------------------------------------------

RECORD = {
    "epoch": 2,
    "train_loss": 0.05,
    "train_accuracy": 0.98,
    "test_loss": 0.04,
    "test_accuracy": 0.9905,
    "samples_per_second": 61234.0,
    "seconds": 0.98,
}


def drive(shown):
    shown.begin(2, 469, 128)
    shown.step(0, 10, 1.5, 60000.0)
    shown.epoch({**RECORD, "epoch": 1})
    shown.step(1, 469, 0.05, 60000.0)
    shown.epoch(RECORD)
    shown.end()


def test_piped_progress_is_one_plain_line_per_epoch():
    stream = io.StringIO()
    drive(progress.make(False, stream))
    lines = stream.getvalue().splitlines()
    assert lines[1] == (
        "epoch 2/2  train loss 0.0500  train accuracy 98.00 %  test loss 0.0400  test accuracy "
        "99.05 %  61,234 samples/s  1.0 s"
    )
    assert len(lines) == 2
    assert stream.getvalue().replace("\n", "").isprintable()


def test_piped_progress_without_a_test_set():
    assert (
        progress.epoch_line({"epoch": 1, "train_loss": 1.0, "test_loss": None}, 1)
        == "epoch 1/1  train loss 1.0000"
    )


def test_large_losses_have_five_digits():
    record = {"epoch": 1, "train_loss": 21534581780208013312.0, "test_mae": 62244.2239}
    line = progress.epoch_line(record, 0)
    assert line == "epoch 1  train loss 2.1535e+19  test mae 62244"


@pytest.mark.parametrize("columns", [46, 50, 80])
def test_a_narrow_terminal_takes_room_from_the_bar_alone(monkeypatch, columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    shown = progress.make(False, stream)
    shown.begin(3, 10, 8)
    shown.step(0, 5, 2.3456, 1234.0)
    shown._bar.refresh()
    shown.end()
    assert "2.3456  1,234 samples/s" in stream.getvalue() and "…" not in stream.getvalue()


def test_terminal_progress_is_one_live_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    shown = progress.make(False, stream)
    assert isinstance(shown, progress.RichProgress)
    drive(shown)
    assert "\x1b[" in stream.getvalue()
    assert "test accuracy 99.05 %" in stream.getvalue()


def test_no_progress():
    assert progress.make(True, io.StringIO()) is None
