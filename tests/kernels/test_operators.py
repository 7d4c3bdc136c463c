"""Ops of tensors against PyTorch in float64, at odd shapes: values and the gradients of all
arguments; and what has no gradient against NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor, nn
from odyssey import functional as F
from odyssey.errors import ShapeError

CASES = {
    "permute": (lambda x: x.permute(2, 0, 3, 1), [(3, 5, 2, 7)]),
    "permute in the batch": (
        lambda x: x.permute(0, 3, 1, 2) * x.permute(0, 3, 1, 2),
        [(17, 5, 2, 7)],
    ),
    "slices": (lambda x: x[1::2, :, -3:] * x[0, 1, 2], [(19, 3, 5)]),
    "expand": (lambda x: x.expand(6, 19, 4) ** 2, [(19, 1)]),
    "split": (lambda x: x.split(3, 1)[1] * x.split([2, 2, 4], 1)[0].sum(1, True), [(21, 8)]),
    "broadcast": (lambda a, b: a * b - b / (a * a + 1), [(7, 1, 5), (18, 7, 3, 1)]),
    "a vector": (lambda a, b: a / (1 + b * b), [(33, 3, 5), (5,)]),
    "means": (
        lambda x: (x - x.mean((1, 2), True)) / (x.var((1, 2), keepdim=True) + 1).sqrt(),
        [(20, 3, 37)],
    ),
    "sums": (lambda x: x.sum(0) * x.sum((0, 2), True) + x.sum(2)[3, 2], [(20, 3, 37)]),
    "powers": (
        lambda a, b: (a * a + 0.1) ** b + (a * a + 2) ** 1.5 + a**5 + 1.5**a,
        [(18, 3), (1, 3)],
    ),
    "products": (lambda a, b: (a @ b) @ (a @ b).transpose(-1, -2), [(2, 1, 19, 7), (3, 7, 53)]),
    "a matrix": (lambda a, b: a @ b, [(17, 5, 33), (33, 3)]),
    "a large product": (lambda a, b: a @ b, [(67, 130), (130, 101)]),
    "vectors": (lambda a, b: (a @ b) * (b @ b), [(5, 9), (9,)]),
    "rows": (lambda a: a[[3, 0, 3]] * a[[1, 1, 2]], [(4, 5, 3)]),
    "functions": (lambda x: (x.exp() + 1).log() * abs(x) + (x * x).sqrt(), [(18, 5)]),
    "clamp": (lambda x: x.clamp(-0.7, 0.4) + x.clamp(max=0.1) * 2, [(18, 5)]),
}


@pytest.mark.parametrize("name", CASES)
def test_against_pytorch(name):
    torch = pytest.importorskip("torch")
    op, shapes = CASES[name]
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    ours = [Tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    y, wanted = op(*ours), op(*theirs)
    np.testing.assert_allclose(y.numpy(), wanted.detach().numpy(), rtol=2e-5, atol=2e-5)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(dy)
    wanted.backward(torch.tensor(dy.astype(np.float64)))
    for a, b in zip(ours, theirs, strict=True):
        scale = b.grad.abs().max().item()
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("shape", [(3, 5), (19, 4), (40, 1)])
def test_comparisons_and_places(shape):
    rng = np.random.default_rng(5)
    a, b = rng.integers(-2, 3, (2, *shape)).astype(np.float32)
    x, y = Tensor(a), F.to_lanes(Tensor(b))
    for op, wanted in (
        (x < y, a < b),
        (x <= y, a <= b),
        (x > y, a > b),
        (x >= y, a >= b),
        (x.eq(y), a == b),
    ):
        np.testing.assert_array_equal(op.numpy(), wanted)
    np.testing.assert_array_equal((x > 0).numpy(), a > 0)
    for dim in (0, 1, -1):
        found = y.argmax(dim)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found.numpy(), b.argmax(dim))


def test_ties_share_the_gradient():
    x = Tensor([[1.0, 3.0, 3.0, 3.0]], requires_grad=True)
    x.max(1).backward([6.0])
    np.testing.assert_array_equal(x.grad.numpy(), [[0, 2, 2, 2]])
    a, b = Tensor([1.0], requires_grad=True), Tensor([1.0], requires_grad=True)
    F.maximum(a, b).backward([1.0])
    assert (a.grad.item(), b.grad.item()) == (0.5, 0.5)


def test_what_is_no_number_is_kept():
    x = Tensor([[np.nan, 1.0], [2.0, np.inf]])
    np.testing.assert_array_equal(x.max(1).numpy(), [np.nan, np.inf])
    np.testing.assert_array_equal(F.minimum(x, 0).numpy(), [[np.nan, 0], [0, 0]])
    np.testing.assert_array_equal(F.where(x.eq(x), x, 7).numpy(), [[7, 1], [2, np.inf]])
    assert x.argmax(1).tolist() == [0, 1]


def test_unused_lanes_do_no_harm():
    """A logarithm of the zeros in the lanes behind the last sample would make the gradient of a
    weight NaN.
    """
    x = F.to_lanes(Tensor(np.full((17, 3), 2.0)))
    w = Tensor(np.ones((2, 3)), requires_grad=True)
    w.grad = Tensor(np.zeros((2, 3)))
    F.linear(F.log(x) / x, w).sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), 17 * np.log(2) / 2, rtol=1e-6)


def test_a_sum_has_the_same_bits_in_every_layout():
    rng = np.random.default_rng(2)
    a = rng.standard_normal((23, 37, 3)).astype(np.float32)
    rows = Tensor(a).sum((1, 2)).numpy()
    assert np.array_equal(rows, F.to_lanes(Tensor(a)).sum((1, 2)).numpy())
    assert np.array_equal(rows[4:5], Tensor(a[4:5]).sum((1, 2)).numpy())


def test_a_tensor_can_be_walked_through():
    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [row.tolist() for row in x] == [[1, 2], [3, 4]]


def test_equality_is_of_elements_and_truth_of_one_number():
    a = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], np.float32)
    x = Tensor(a)
    for found, wanted in (
        (x == 1, a == 1),
        (x != 1, a != 1),
        (a == x, a == a),
        (x == x[:1], a == a[:1]),
    ):
        np.testing.assert_array_equal(found.numpy(), wanted)
    assert (x == None) is False and x in [x] and len({x, Tensor(a)}) == 2  # noqa: E711
    assert bool(x.sum() > 4) and not (x.sum() > 5) and not x[0, 1]
    with pytest.raises(ShapeError, match="neither true nor false"):
        bool(x)
    with pytest.raises(ShapeError, match="no index; use where"):
        x[x > 0]
    with pytest.raises(ShapeError, match="one index of whole numbers alone"):
        x[:, np.array([0, 2])]
    with pytest.raises(ShapeError, match="one index of whole numbers alone"):
        x[..., Tensor([0, 2], dtype=np.int32)]


def test_numpy_leaves_arithmetic_to_the_tensor():
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    (np.full(3, 2.0) * x - np.float32(1) / x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full((2, 3), 3))


def test_flatten_begins_at_an_axis():
    x = Tensor(np.arange(120).reshape(2, 3, 4, 5))
    assert [F.flatten(x, d).shape for d in (0, 1, 2, -1)] == [
        (120,),
        (2, 60),
        (2, 3, 20),
        (2, 3, 4, 5),
    ]
    assert x.flatten(1).shape == x.flatten().shape == (2, 60)


def test_an_embedding_adds_up_what_is_used_again():
    nn.manual_seed(1)
    table = nn.Embedding(5, 3)
    ids = np.array([[0, 4, 4], [1, 4, 0]])
    y = table(Tensor(ids, dtype=np.int32))
    np.testing.assert_array_equal(y.numpy(), table.weight.data[ids])
    assert np.array_equal(y.numpy(), table(F.to_lanes(Tensor(ids.astype(np.float32)))).numpy()), (
        "as data sets give them"
    )
    y.sum().backward()
    np.testing.assert_array_equal(table.weight.grad.data[:, 0], [2, 1, 0, 0, 3])
    assert 0.8 < nn.Embedding(100, 100).weight.data.std() < 1.2


def test_layers_over_the_last_axis_against_pytorch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    a = rng.standard_normal((18, 6, 4, 8)).astype(np.float32)
    t = torch.tensor(a)
    pairs = {
        "LayerNorm": (nn.LayerNorm(8), torch.nn.LayerNorm(8)),
        "RMSNorm": (nn.RMSNorm(8), torch.nn.RMSNorm(8, eps=1e-6)),
        "GroupNorm": (nn.GroupNorm(3, 6), torch.nn.GroupNorm(3, 6)),
        "Linear": (nn.Linear(8, 5), torch.nn.Linear(8, 5)),
        "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d((2, 4)), torch.nn.AdaptiveAvgPool2d((2, 4))),
    }
    for name, (ours, theirs) in pairs.items():
        state = ours.state_dict()
        assert list(state) == list(theirs.state_dict()), name
        theirs.load_state_dict({key: torch.tensor(value) for key, value in state.items()})
        np.testing.assert_allclose(
            ours(Tensor(a)).numpy(), theirs(t).detach().numpy(), rtol=1e-4, atol=2e-5
        )
    for dim in (1, 2, -1):
        np.testing.assert_allclose(
            F.softmax(Tensor(a), dim).numpy(), t.softmax(dim).numpy(), rtol=1e-4, atol=1e-6
        )
