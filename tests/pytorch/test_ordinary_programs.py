"""Ordinary models, losses and callbacks aren't refused, and a stopped run continues with the same
weights.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from pytorch import ordinary_programs

from odyssey.comm import Communicator


@pytest.mark.parametrize("name", ordinary_programs.CASES)
def test_a_program_is_resumed_in_an_epoch_and_between_two(name, tmp_path):
    if not ordinary_programs.is_available(name):
        pytest.skip(f"needs {ordinary_programs.PACKAGES[name]}, which tests do without")
    whole, _ = ordinary_programs.train(Communicator(), name, tmp_path)
    for step in (2, 4, 5):
        saving = {"checkpoint_dir": tmp_path / f"stop {step}", "checkpoint_every": 1}
        ordinary_programs.train(Communicator(), name, tmp_path, step, **saving)
        resumed, _ = ordinary_programs.train(Communicator(), name, tmp_path, **saving)
        assert resumed == whole, step
