"""`odyssey inspect`: what it prints, and its exit code."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner, Result

from odyssey.checkpoints import Snapshot, Store
from odyssey.cli.commands.inspect import command


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path):
    """A run's directory with three checkpoints, of which the middle one is damaged."""
    with Store(tmp_path / "checkpoints", keep=3, attempt=2) as store:
        for step in (10, 20, 30):
            arrays = {
                "parameters": {"w": np.full((2, 3), step, np.float32)},
                "optimizer": {"t": np.array(step)},
            }
            store.save(
                Snapshot(
                    step,
                    arrays,
                    {"cursor": 64 * step, "configuration": {"lr": 0.1, "name": "a\x1b[2Jb"}},
                )
            )
    (store.path_of(20) / "optimizer.safetensors").write_bytes(b"")
    return tmp_path


def test_all_of_a_run_or_a_directory_are_listed_and_a_refused_one_has_its_reason(run):
    for path in (run, run / "checkpoints"):
        said = inspect(path)
        assert said.exit_code == 65
        assert said.output.splitlines() == [
            "step_00000010  valid  attempt 2, 2 tensors, 168 bytes",
            "step_00000020  refused: optimizer.safetensors: it has 0 bytes, not 72",
            "step_00000030  valid  attempt 2, 2 tensors, 168 bytes",
        ]


def test_one_is_printed_in_full(run):
    said = inspect(run / "checkpoints" / "step_00000030", "--tensors")
    assert said.exit_code == 0
    lines = said.output.splitlines()
    assert lines[:6] == [
        "step_00000030  valid  attempt 2, 2 tensors, 168 bytes",
        "  step 30",
        "  signed no",
        "  cursor 1920",
        r'  configuration {"lr": 0.1, "name": "a\u001b[2Jb"}',
        "  parameters.safetensors  1 tensors, 96 bytes",
    ]
    assert any(line.startswith("    w  F32 2x3  sha256 ") for line in lines)
    assert any(line.startswith("    t  I64 scalar  sha256 ") for line in lines)


def test_json_has_everything(run):
    said = inspect(run, "--json")
    assert said.exit_code == 65
    one, bad, last = json.loads(said.stdout)["checkpoints"]
    assert (one["step"], one["attempt"], one["valid"], one["signed"], bad["valid"]) == (
        10,
        2,
        True,
        False,
        False,
    )
    assert bad["reason"] == "optimizer.safetensors: it has 0 bytes, not 72"
    assert last["values"]["configuration"] == {"lr": 0.1, "name": "a\x1b[2Jb"}
    assert last["files"][0]["tensors"][0]["shape"] == [2, 3]


@pytest.mark.parametrize("name", ["", "missing", "file"])
def test_what_is_no_checkpoint_ends_with_65(tmp_path, name):
    (tmp_path / "file").write_text("")
    said = inspect(tmp_path / name)
    assert said.exit_code == 65
    assert ("no checkpoint" if not name else "refused") in said.output


def test_a_key_file_is_an_option_or_in_the_environment(tmp_path, monkeypatch):
    with Store(tmp_path / "c", key=b"k" * 32) as store:
        path = store.save(Snapshot(1, {"parameters": {"w": np.zeros(1)}}))
    assert "signed yes, not checked: no key is given" in inspect(path).output
    for number, letter in enumerate("ko"):
        file = tmp_path / letter
        file.write_text(letter * 32)
        file.chmod(0o600)
        said = inspect(path, "--key-file", file)
        assert said.exit_code == (65 if number else 0)
        assert (
            "is not signed with the key" if number else "signed yes, with this key"
        ) in said.output
    monkeypatch.setenv("ODYSSEY_CHECKPOINT_KEY_FILE", str(tmp_path / "o"))
    assert inspect(path).exit_code == 65


def test_the_command_is_part_of_the_command_line(launch, run):
    done = launch.python("-m", "odyssey", "inspect", run / "checkpoints" / "step_00000020")
    assert done.returncode == 65
    assert done.stdout == "step_00000020  refused: optimizer.safetensors: it has 0 bytes, not 72\n"
