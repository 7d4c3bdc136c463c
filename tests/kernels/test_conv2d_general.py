"""Convolutions with groups and dilation, Conv1d, and adaptive pools of any size: values and
gradients against PyTorch in float64 at odd shapes, and the same bits in every layout.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import functional as F
from odyssey import nn
from odyssey.core.tensor import Tensor
from odyssey.errors import ConfigError, ShapeError
from odyssey.nn.module import Parameter

# n, c, (h, w), k, kernel, stride, padding, dilation, groups
IMAGES = [
    (17, 6, (7, 9), 9, (3, 2), 1, 1, 1, 3),
    (3, 6, (7, 9), 9, (3, 2), 1, 1, 1, 3),
    (5, 7, (9, 8), 7, (3, 3), 1, 1, 1, 7),
    (16, 3, (11, 13), 5, (3, 3), 1, 2, 2, 1),
    (2, 4, (12, 9), 10, (2, 3), 2, (0, 3), 3, 2),
    (33, 8, (6, 5), 16, (3, 1), 3, (2, 0), 1, 4),
    (1, 4, (5, 5), 4, (5, 5), 1, 4, 2, 2),
]
SIGNALS = [
    (17, 5, (13,), 7, (3,), 1, 1, 1, 1),
    (4, 6, (20,), 4, (4,), 2, 3, 3, 2),
    (16, 3, (9,), 3, (1,), 1, 0, 1, 3),
]


def draw(n, c, size, k, kernel, groups):
    rng = np.random.default_rng([n, c, k, *size])
    shapes = (n, c, *size), (k, c // groups, *kernel), (k,)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes], rng


@pytest.mark.parametrize("case", IMAGES + SIGNALS)
def test_values_and_gradients(case):
    torch = pytest.importorskip("torch")
    n, c, size, k, kernel, stride, padding, dilation, groups = case
    (x, w, b), rng = draw(n, c, size, k, kernel, groups)
    wide = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w, b)]
    plain, ours = (
        (torch.nn.functional.conv2d, F.conv2d)
        if len(size) == 2
        else (torch.nn.functional.conv1d, F.conv1d)
    )
    wanted = plain(*wide, stride=stride, padding=padding, dilation=dilation, groups=groups)
    dy = rng.standard_normal(wanted.shape).astype(np.float32)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    given = Tensor(x, requires_grad=True), Parameter(w), Parameter(b)
    y = ours(*given, stride, padding, dilation, groups)
    y.backward(dy)
    pairs = [("y", y, wanted.detach())]
    pairs += [(name, a.grad, t.grad) for name, a, t in zip("xwb", given, wide, strict=True)]
    for name, got, right in pairs:
        assert got.shape == right.shape
        assert np.abs(got.numpy() - right.numpy()).max() < 3e-6 * np.abs(right.numpy()).max(), name


def test_a_sample_has_the_same_bits_in_any_batch():
    (x, w, b), rng = draw(40, 6, (7, 9), 9, (3, 2), 3)
    whole = F.conv2d(Tensor(x), Parameter(w), Parameter(b), 1, 1, 2, 3).numpy()
    for size in (1, 2, 4, 5, 17):
        some = rng.permutation(40)[:size]
        got = F.conv2d(Tensor(x[some]), Parameter(w), Parameter(b), 1, 1, 2, 3).numpy()
        assert got.tobytes() == whole[some].tobytes(), size


@pytest.mark.parametrize(
    ("n", "size", "to"),
    [(17, (7, 9), (3, 4)), (3, (5, 8), (5, 3)), (16, (6, 6), 3), (2, (7, 7), 1)],
)
def test_adaptive_pools(n, size, to):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, 3, *size)).astype(np.float32)
    wide = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    wanted = torch.nn.AdaptiveAvgPool2d(to)(wide)
    dy = rng.standard_normal(wanted.shape).astype(np.float32)
    wanted.backward(torch.tensor(dy, dtype=torch.float64))
    given = Tensor(x, requires_grad=True)
    y = nn.AdaptiveAvgPool2d(to)(given)
    y.backward(dy)
    for got, right in ((y, wanted.detach()), (given.grad, wide.grad)):
        assert np.abs(got.numpy() - right.numpy()).max() < 1e-6


def test_layers():
    nn.manual_seed(1)
    conv, line = (
        nn.Conv2d(4, 6, 3, padding=1, dilation=2, groups=2, bias=False),
        nn.Conv1d(4, 6, 3, stride=2),
    )
    assert (
        conv.weight.shape == (6, 2, 3, 3) and line.weight.shape == (6, 4, 3) and conv.bias is None
    )
    assert "dilation=2, groups=2" in repr(conv) and repr(line) == "Conv1d(4, 6, 3, stride=2)"
    assert conv(Tensor(np.ones((2, 4, 9, 9), np.float32))).shape == (2, 6, 7, 7)
    assert line(Tensor(np.ones((2, 4, 9), np.float32))).shape == (2, 6, 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: nn.Conv2d(4, 6, 3, groups=3),
            r"\[Conv2d\] 4 to 6 channels in 3 groups; they must be equal",
        ),
        (
            lambda: nn.Conv1d(4, 6, 3, dilation=0),
            r"\[Conv1d\] dilation is 0; it must be an integer of at least 1",
        ),
        (
            lambda: nn.Conv2d(4, 6, 3, groups=2)(Tensor(np.ones((1, 5, 9, 9)))),
            "with 2 groups; the input must have 4 channels",
        ),
        (
            lambda: nn.Conv2d(4, 6, 3, dilation=5)(Tensor(np.ones((1, 4, 9, 9)))),
            "a kernel of 11 x 11 does not fit",
        ),
        (
            lambda: nn.Conv1d(4, 6, 3)(Tensor(np.ones((1, 4, 9, 9)))),
            r"\[conv1d\] input \(1, 4, 9, 9\) and weight",
        ),
        (
            lambda: nn.AdaptiveAvgPool2d(8)(Tensor(np.ones((1, 4, 9, 7)))),
            "9 x 7 to 8 x 8; give 1 to the size of the input",
        ),
    ],
)
def test_what_does_not_fit_is_told(make, says):
    with pytest.raises((ConfigError, ShapeError), match=says):
        make()
