"""Ops of a user's own: load_ops on the example's file, and on files that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import functional as F
from odyssey import nn
from odyssey.core import native
from odyssey.errors import BuildError, ConfigError
from odyssey.testing import check_op

FILE = Path(__file__).parents[2] / "examples" / "own_ops.mojo"


def test_ops_of_ones_own():
    assert odyssey.load_ops(FILE) == ("mish_forward", "mish_backward")
    assert odyssey.load_ops(str(FILE)) == ("mish_forward", "mish_backward"), "a second time"
    assert native.library().ops["mish_backward"].inputs == ("dy", "x")
    mish = F.unary("mish", saves="x", layer="Mish")
    assert repr(nn.Mish()) == "Mish()"
    check_op(mish, lambda x: x * np.tanh(np.log1p(np.exp(x))), (24,))


def test_a_file_that_does_not_compile_is_named(tmp_path):
    file = tmp_path / "broken.mojo"
    file.write_text("def ops() ->\n")
    with pytest.raises(BuildError, match=r"broken\.mojo:1:"):
        odyssey.load_ops(file)
    with pytest.raises(
        ConfigError, match=r"there is no file .*none\.mojo; give the path of a \.mojo file"
    ):
        odyssey.load_ops(tmp_path / "none.mojo")


def test_a_name_that_is_taken(tmp_path):
    file = tmp_path / "again.mojo"
    file.write_text(FILE.read_text().replace('"mish_forward"', '"tanh_forward"'))
    with pytest.raises(
        ConfigError, match=r"there is an op tanh_forward already; give yours another name"
    ):
        odyssey.load_ops(file)
