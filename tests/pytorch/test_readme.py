"""The README's six lines of PyTorch: the same weights on one rank and on three."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_readme_s_module_has_the_same_weights_on_any_number_of_ranks(launch):
    block = re.search(r"```python\n(import torch\n.*?)```", README, re.S)[1]
    program = launch.folder / "train.py"
    program.write_text(f"{block}print(trainer.weights_sha256())\n")
    one, three = (launch(launch.mpirun and "python" or "python", program, ranks=n) for n in (0, 3))
    assert one.returncode == three.returncode == 0, one.stderr + three.stderr
    hashes = set(re.findall(r"^[0-9a-f]{64}$", one.stdout + three.stdout, re.M))
    assert len(hashes) == 1 and three.stdout.count(hashes.pop()) == 3
