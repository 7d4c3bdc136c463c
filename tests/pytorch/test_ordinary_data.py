"""Ordinary data sets aren't refused, and a stopped run continues with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from pytorch import ordinary_data

from odyssey.comm import Communicator


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the samples as files of many formats."""
    path = tmp_path_factory.mktemp("samples")
    ordinary_data.write(path)
    return path


@pytest.mark.parametrize("name", ordinary_data.CASES)
def test_a_data_set_is_resumed_in_an_epoch_and_between_two(name, folder, tmp_path):
    if not ordinary_data.is_available(name):
        pytest.skip(f"needs {ordinary_data.PACKAGES[name]}, which tests do without")
    whole, _ = ordinary_data.train(Communicator(), name, folder)
    for step in (2, ordinary_data.STEPS // 2, ordinary_data.STEPS - 1):
        saving = {"checkpoint_dir": tmp_path / str(step), "checkpoint_every": 1}
        ordinary_data.train(Communicator(), name, folder, step, **saving)
        resumed, _ = ordinary_data.train(Communicator(), name, folder, **saving)
        assert resumed == whole, step
