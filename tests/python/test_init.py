"""Initial values: their moments are PyTorch's, and they depend on the seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import nn
from odyssey.core.tensor import Parameter
from odyssey.errors import ConfigError

SHAPE = (60, 40, 3, 3)
CASES = [
    ("uniform_", {"a": -0.5, "b": 1.5}),
    ("normal_", {"mean": 0.5, "std": 0.2}),
    ("trunc_normal_", {"std": 0.7, "a": -0.5, "b": 1.0}),
    ("xavier_uniform_", {"gain": 2.0}),
    ("xavier_normal_", {}),
    ("kaiming_uniform_", {"a": 5**0.5}),
    ("kaiming_normal_", {"mode": "fan_out", "nonlinearity": "relu"}),
]


def made(name, settings, seed=3):
    nn.manual_seed(seed)
    return getattr(nn.init, name)(Parameter(np.zeros(SHAPE, np.float32)), **settings).data.copy()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_moments_are_those_of_pytorch(name, settings):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = getattr(torch.nn.init, name)(torch.zeros(SHAPE), **settings).numpy()
    ours = made(name, settings)
    assert abs(ours.mean() - theirs.mean()) < 0.03 * theirs.std()
    assert abs(ours.std() / theirs.std() - 1) < 0.02
    if name != "normal_" and "normal" not in name or name == "trunc_normal_":
        assert abs(ours.min() - theirs.min()) < 0.01 * np.ptp(theirs)
        assert abs(ours.max() - theirs.max()) < 0.01 * np.ptp(theirs)
    assert made(name, settings).tobytes() == ours.tobytes() != made(name, settings, 4).tobytes()


def test_constants_and_what_is_refused():
    p = Parameter(np.zeros(3, np.float32))
    assert nn.init.ones_(p) is p and p.data.tolist() == [1, 1, 1]
    assert nn.init.zeros_(p).data.tolist() == [0, 0, 0]
    for wrong in (
        lambda: nn.init.xavier_normal_(p),
        lambda: nn.init.calculate_gain("swish"),
        lambda: nn.init.trunc_normal_(p, a=9, b=10),
        lambda: nn.init.kaiming_normal_(Parameter(np.zeros((2, 2), np.float32)), mode="fan"),
    ):
        with pytest.raises(ConfigError, match=r"\[init\]"):
            wrong()
