"""A sample's forward result has the same bits whatever else is in its batch: alone and in threes
in rows, in any larger number in lanes, at any place. What inference gives for a sample is
then what training computed for it.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor, autocast, nn, no_grad
from odyssey import functional as F
from odyssey.compile import library as build

SAMPLES = 40
TILES = "amx" in build.plan(build.source_root()).cpu  # which are multiplied in rows as well


class Strided(nn.Module):
    """A convolution with a stride, an average, a sum of two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(1, 7, 3, stride=2, padding=1),
            nn.Conv2d(7, 7, 3, padding=1),
        )
        self.fc = nn.Linear(7 * 7 * 7, 11)

    def forward(self, x):
        x = F.silu(self.conv1(x))
        return F.softmax(self.fc(F.flatten(F.avg_pool2d(x + F.sigmoid(self.conv2(x)), 2))))


def mlp(*sizes: int, activation: type[nn.Module]) -> nn.Module:
    """Linear layers with norms and dropouts between them, and a softmax."""
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [nn.Linear(i, o), nn.LayerNorm(o), activation(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]), nn.Softmax())


class Filtered(nn.Module):
    """Convolutions by Winograd's algorithm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 33, 3), nn.Conv2d(33, 32, 3, padding=1)
        self.conv3, self.fc = nn.Conv2d(32, 35, 3, padding=1), nn.Linear(35 * 36, 40)

    def forward(self, x):
        x = F.relu(
            F.conv2d(
                F.relu(self.conv1(x)),
                self.conv2.weight,
                self.conv2.bias,
                1,
                1,
                algorithm="winograd",
            )
        )
        x = F.conv2d(
            F.max_pool2d(x, 2), self.conv3.weight, self.conv3.bias, 1, 1, algorithm="winograd"
        )
        return self.fc(F.flatten(F.max_pool2d(x, 2)))


MODELS = {
    "relu": lambda: mlp(784, 100, 17, 10, activation=nn.ReLU),
    "gelu": lambda: mlp(784, 33, 65, activation=nn.GELU),
    "tanh": lambda: mlp(784, 16, 3, 2, 130, activation=nn.Tanh),
    "linear": lambda: mlp(784, 67, activation=nn.ReLU),
    "lenet5": lambda: nn.models.build("lenet5"),
    "convnet": lambda: nn.models.build("convnet"),
    "strided": Strided,
    "winograd": Filtered,
}


def outputs(model: nn.Module, x: np.ndarray, precision: str = "fp32") -> np.ndarray:
    with no_grad(), autocast(precision):
        return model(Tensor(x)).numpy()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in MODELS),
        *((name, "bf16") for name in ("relu", "gelu", "tanh", "linear")),
        # but for AMX, convolutions whose operands are bf16 add pairs in lanes and single products
        # in rows
        *((name, "bf16") for name in ("lenet5", "convnet", "strided") if TILES),
        ("relu", "fp16"),
        ("lenet5", "fp16"),
    ],
)
def test_a_sample_has_the_same_bits_in_any_batch(name, precision):
    rng = np.random.default_rng(len(name))
    nn.manual_seed(1)
    model = MODELS[name]().eval()
    x = rng.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32)
    wanted = outputs(model, x, precision)
    assert np.isfinite(wanted).all() and len(np.unique(wanted)) > SAMPLES
    for size in (1, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33):
        batch = rng.permutation(SAMPLES)[:size]
        assert outputs(model, x[batch], precision).tobytes() == wanted[batch].tobytes(), (
            f"a batch of {size}"
        )
