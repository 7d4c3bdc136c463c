"""Batch norm and what ResNet needs, against PyTorch in float64: values, gradients, running
statistics; odd shapes.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor, nn
from odyssey import functional as F
from odyssey.errors import ConfigError, ShapeError

torch = pytest.importorskip("torch")


def close(got, wanted, tolerance=1e-5):
    wanted = wanted.detach().numpy()
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= tolerance * (np.abs(wanted).max() + 1e-30)


def compared(ours, theirs, shape, rng, tolerance=1e-5):
    """Forward and backward of both with the same numbers."""
    a = (3 * rng.standard_normal(shape) + 2).astype(np.float32)
    x, t = Tensor(a, requires_grad=True), torch.tensor(a.astype(np.float64), requires_grad=True)
    y, z = ours(x), theirs(t)
    close(y.numpy(), z, tolerance)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(dy)
    z.backward(torch.tensor(dy.astype(np.float64)))
    close(x.grad.numpy(), t.grad, 10 * tolerance)


@pytest.mark.parametrize(
    "shape", [(19, 5), (3, 5), (33, 4, 3, 5), (2, 4, 7, 3), (17, 6, 9), (48, 3, 8, 8)], ids=str
)
def test_batch_norm(shape):
    rng, c = np.random.default_rng(3), shape[1]
    ours = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(c)
    theirs = (torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d)(c).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    state = {"weight": rng.standard_normal(c), "bias": rng.standard_normal(c)}
    ours.load_state_dict({**ours.state_dict(), **state})
    theirs.load_state_dict({k: torch.tensor(v) for k, v in ours.state_dict().items()})
    for training in (True, True, False):
        ours.train(training), theirs.train(training)
        ours.zero_grad(), theirs.zero_grad()
        compared(ours, theirs, shape, rng)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(p.grad.data, q.grad)
        for name, buffer in theirs.named_buffers():
            close(dict(ours.named_buffers())[name].data, buffer)


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (nn.MaxPool2d(3, 2, 1), torch.nn.MaxPool2d(3, 2, 1), (17, 3, 7, 10)),
        (nn.MaxPool2d((2, 3), 1, (1, 0)), torch.nn.MaxPool2d((2, 3), 1, (1, 0)), (3, 2, 5, 4)),
        (nn.LeakyReLU(0.2), torch.nn.LeakyReLU(0.2), (19, 5)),
        (nn.AdaptiveAvgPool2d(1), torch.nn.AdaptiveAvgPool2d(1), (18, 3, 5, 7)),
        (nn.BatchNorm1d(4, affine=False), torch.nn.BatchNorm1d(4, affine=False).double(), (5, 4)),
        (
            nn.BatchNorm2d(2, track_running_stats=False),
            torch.nn.BatchNorm2d(2, track_running_stats=False).double(),
            (5, 2, 3, 3),
        ),
    ],
    ids=str,
)
def test_layers(ours, theirs, shape):
    compared(ours, theirs, shape, np.random.default_rng(4))


@pytest.mark.parametrize(
    "sizes", [(3, 7, 9, 4, 3, 2, 1), (4, 7, 7, 3, 1, 2, 0), (3, 15, 17, 2, 7, 2, 3)], ids=str
)
def test_convolutions_of_stride_two(sizes):
    c, h, w, k, kernel, stride, padding = sizes
    ours = nn.Conv2d(c, k, kernel, stride, padding, bias=False)
    theirs = torch.nn.Conv2d(c, k, kernel, stride, padding, bias=False).double()
    theirs.load_state_dict({name: torch.tensor(v) for name, v in ours.state_dict().items()})
    for n in (3, 18):
        compared(ours, theirs, (n, c, h, w), np.random.default_rng(n))


def test_what_is_refused():
    x = Tensor(np.ones((1, 3), np.float32))
    with pytest.raises(ShapeError, match="one number per channel"):
        nn.BatchNorm1d(3)(x)
    with pytest.raises(ShapeError, match=r"\(1, 3\).*4 axes"):
        nn.BatchNorm2d(3)(x)
    with pytest.raises(ShapeError, match="no running mean"):
        F.batch_norm(x, None, None)
    with pytest.raises(ConfigError, match="sync=True"):
        nn.BatchNorm1d(3, sync=True)
    with pytest.raises(ShapeError, match="half a window"):
        F.max_pool2d(Tensor(np.ones((1, 1, 5, 5))), 3, 2, 2)


def test_buffers_of_a_module():
    m = nn.Linear(2, 3)
    m.register_buffer("offset", np.ones(3))
    m.register_buffer("mask", Tensor([1, 0], dtype=np.int32), persistent=False)
    assert list(m.state_dict()) == ["weight", "bias", "offset"] and len(list(m.parameters())) == 2
    assert [name for name, _ in m.named_buffers("m.")] == ["m.offset"]
    m.load_state_dict({**m.state_dict(), "offset": np.full(3, 2)})
    assert m.offset.tolist() == [2, 2, 2]
    for name, tensor, said in (("offset", [1.0], "taken"), ("ids", np.arange(3), "int64")):
        with pytest.raises(ConfigError, match=said):
            m.register_buffer(name, tensor)
