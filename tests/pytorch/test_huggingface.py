"""The programs of docs/huggingface.md, as they stand there, on 1, 2 and 4 ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from pytorch.published import RUN

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "packaging"))

import pages  # noqa: E402

pytestmark = pytest.mark.skipif(
    not all(
        importlib.util.find_spec(name) for name in ("torch", "transformers", "accelerate", "peft")
    ),
    reason="transformers, accelerate or peft is not installed (extra [published])",
)
RANKS = (1, 2, 4)
PROGRAMS = ("bert.py", "lora.py", "own_trainer.py", "own_loop.py")

# One after the other in one process: their imports take longer than they do.
ALL = f"""
import runpy
for name in {PROGRAMS}:
    runpy.run_path(name, run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(launch_once) -> Path:
    for block in pages.blocks((ROOT / "docs" / "huggingface.md").read_text()):
        if block.comment.startswith("file: "):
            (launch_once.folder / block.comment.removeprefix("file: ")).write_text(block.text)
    (launch_once.folder / "all.py").write_text(ALL)
    launch_once.environment.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    return launch_once.folder


@pytest.fixture(scope="module")
def printed(folder, launch_once) -> dict[str, list[str]]:
    """The line that rank 0 of each program prints in the end, on each number of ranks."""
    found: dict[str, list[str]] = {name: [] for name in PROGRAMS}
    for ranks in RANKS:
        done = launch_once.python("-W", "ignore", RUN, "all.py", ranks=ranks)
        assert done.returncode == 0, done.stderr
        said = [
            line for line in done.stdout.splitlines() if "weights" in line or "processes" in line
        ]
        for name, line in zip(PROGRAMS, said, strict=True):
            found[name].append(line)
    return found


@pytest.mark.parametrize(
    ("program", "saved"),
    [("bert.py", "trained/model.safetensors"), ("lora.py", "adapter/adapter_model.safetensors")],
)
def test_the_same_bits_on_any_number_of_ranks(printed, folder, program, saved):
    lines = printed[program]
    assert len(lines) == len(RANKS) and len(set(lines)) == 1 and "weights" in lines[0], lines
    assert (folder / saved).exists()


@pytest.mark.parametrize("program", ["own_trainer.py", "own_loop.py"])
def test_their_trainers_over_the_group(printed, program):
    lines = printed[program]
    assert [line.partition(", loss ")[0] for line in lines] == [
        f"odyssey, {n} processes" for n in RANKS
    ]
    losses = [float(line.partition(", loss ")[2]) for line in lines]
    # ln 2 = 0.69 is that of guessing
    assert max(losses) < 0.72 and max(losses) - min(losses) < 0.05, losses
