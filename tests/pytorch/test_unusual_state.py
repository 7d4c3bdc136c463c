"""State where few programs have it: a stopped run continues with the same weights, or the place is
named before a checkpoint is written.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from pytorch import ordinary_programs, unusual_state

from odyssey.comm import Communicator
from odyssey.errors import ConfigError


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    for program in (*unusual_state.RIGHT, *unusual_state.REFUSED):
        monkeypatch.setitem(ordinary_programs.CASES, program.__name__, program)


@pytest.mark.parametrize("program", unusual_state.RIGHT)
def test_a_stopped_run_continues_with_the_same_weights(program, tmp_path):
    name = program.__name__
    whole, _ = ordinary_programs.train(Communicator(), name, tmp_path)
    for step in (2, 4, 5, 8):
        saving = {"checkpoint_dir": tmp_path / f"stop {step}", "checkpoint_every": 1}
        ordinary_programs.train(Communicator(), name, tmp_path, step, **saving)
        resumed, _ = ordinary_programs.train(Communicator(), name, tmp_path, **saving)
        assert resumed == whole, step


@pytest.mark.parametrize("program", unusual_state.REFUSED)
def test_what_a_resumed_run_cannot_do_again_is_named(program, tmp_path):
    saving = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(ConfigError, match=unusual_state.REFUSED[program]):
        ordinary_programs.train(Communicator(), program.__name__, tmp_path, **saving)
