"""Tensors: memory shared with NumPy and DLPack, shapes, repr, and what the errors say."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor, from_dlpack, nn
from odyssey import functional as F
from odyssey.core.tensor import Parameter
from odyssey.errors import ShapeError


def shared(a: np.ndarray, b: np.ndarray) -> bool:
    return a.ctypes.data == b.ctypes.data and np.shares_memory(a, b)


# --- memory ---


def test_a_float32_array_is_not_copied_in_or_out():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = Tensor(a)
    assert shared(t.numpy(), a) and shared(np.asarray(t), a) and shared(np.from_dlpack(t), a)
    a[0, 1] = 42
    assert t.numpy()[0, 1] == 42
    t.numpy()[1, 2] = -1
    assert a[1, 2] == -1


def test_dlpack_is_not_copied_in():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = from_dlpack(a)
    assert shared(t.numpy(), a)
    assert t.shape == (2, 3)


def test_parameters_and_gradients_are_seen_and_changed_from_numpy():
    layer = nn.Linear(3, 2)
    weight, grad = layer.weight.numpy(), np.from_dlpack(layer.weight.grad)
    weight[...] = 1
    layer.bias.numpy()[...] = 0
    y = layer(Tensor(np.full((1, 3), 2)))
    assert np.array_equal(y.numpy(), [[6, 6]])
    y.sum().backward()
    assert np.array_equal(grad, np.full((2, 3), 2)), "the view must see what backward() wrote"
    grad[...] = 0
    assert np.array_equal(layer.weight.grad.numpy(), np.zeros((2, 3)))
    assert shared(np.asarray(layer.weight), weight)


def test_parameters_own_their_memory():
    a = np.ones((2, 2), np.float32)
    p = Parameter(a)
    a[...] = 7
    assert np.array_equal(p.numpy(), np.ones((2, 2)))


def test_gradient_of_an_input_is_memory_too():
    x = Tensor(np.ones((2, 2)), requires_grad=True)
    (x * 3).sum().backward()
    view = x.grad.numpy()
    view[...] = 5
    assert np.array_equal(x.grad.numpy(), np.full((2, 2), 5))
    x.zero_grad()
    assert np.array_equal(view, np.zeros((2, 2)))


def test_views_keep_the_memory_alive():
    view = nn.Linear(50, 40).weight.numpy()
    copy = view.copy()
    for _ in range(20):
        Parameter(np.zeros((40, 50)))
    assert np.array_equal(view, copy)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, np.uint8, bool])
def test_other_numbers_are_converted(dtype):
    a = np.array([[0, 1], [1, 1]], dtype)
    t = Tensor(a)
    assert t.numpy().dtype == np.float32
    assert np.array_equal(t.numpy(), a.astype(np.float32))


def test_other_orders_are_copied_into_rows():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (a.T, a[:, ::2], a[::-1]):
        t = Tensor(view)
        assert np.array_equal(t.numpy(), view)
        assert np.array_equal(F.to_rows(F.to_lanes(t)).numpy(), view)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (17, 1), (3, 0)])
def test_shapes_of_all_kinds_survive(shape):
    t = Tensor(np.zeros(shape, np.float32))
    assert (t.shape, t.ndim, t.size, t.numpy().shape) == (
        shape,
        len(shape),
        int(np.prod(shape)),
        shape,
    )


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("features", [(1,), (3, 2), (4, 4), (19,)])
def test_rows_into_lanes_and_back(n, features):
    a = np.random.default_rng(0).standard_normal((n, *features)).astype(np.float32)
    assert np.array_equal(F.to_rows(F.to_lanes(Tensor(a))).numpy(), a)


def test_numpy_protocols():
    t = Tensor([[1.5, 2.5]])
    assert np.asarray(t, dtype=np.float64).dtype == np.float64
    assert np.array_equal(np.add(t, 1), [[2.5, 3.5]])
    assert not shared(np.array(t), t.numpy())
    assert t.tolist() == [[1.5, 2.5]]
    assert Tensor(3).item() == 3.0
    assert len(t) == 1
    assert Tensor(t).numpy().tolist() == t.tolist()
    assert repr(Tensor([1.0, 2.0])) == "Tensor([1., 2.])"
    assert repr(Tensor([1.0], requires_grad=True)) == "Tensor([1.], requires_grad=True)"


@pytest.mark.parametrize("n", [2, 6, 20])
@pytest.mark.parametrize("layout", [F.to_lanes, F.to_rows])
def test_reshape_and_flatten(n, layout):
    numbers = np.arange(12 * n, dtype=np.float32)
    x = Tensor(numbers.reshape(n, 3, 4), requires_grad=True)
    assert x.reshape(2 * n, 6).shape == x.reshape((2 * n, -1)).shape == (2 * n, 6)
    assert x.flatten().shape == (n, 12)
    y = F.scale(layout(x), 1.0)
    assert np.array_equal(y.reshape(n, 2, 6).numpy(), numbers.reshape(n, 2, 6))
    (F.flatten(y) * Tensor(numbers.reshape(n, 12))).sum().backward()
    assert np.array_equal(x.grad.numpy(), x.numpy())


# --- errors: who, what was given, what is allowed ---


def image(*shape):
    return Tensor(np.zeros(shape, np.float32))


ERRORS = {
    "text": (lambda: Tensor(["a"]), ["tensor", "<U1"]),
    "complex": (lambda: Tensor([1j]), ["tensor", "complex"]),
    "item": (lambda: image(2, 1).item(), ["item", "(2, 1)"]),
    "reshape": (lambda: image(2, 3).reshape(4, 2), ["reshape", "(2, 3)", "(4, 2)"]),
    "add": (lambda: image(2, 3) + image(3, 2), ["add", "(2, 3)", "(3, 2)", "equal"]),
    "multiply": (lambda: image(2, 3) * image(2), ["multiply", "(2, 3)", "(2,)", "equal"]),
    "permute": (lambda: image(2, 3).permute(0, 0), ["permute", "(0, 0)", "(2, 3)"]),
    "transpose": (lambda: image(2, 3).transpose(0, 2), ["transpose", "axis 2", "-2 to 1"]),
    "expand": (lambda: image(2, 3).expand(2, 6), ["expand", "(2, 3)", "(2, 6)"]),
    "cat": (lambda: F.cat([image(2, 3), image(3, 2)]), ["cat", "(3, 2)", "axis 0"]),
    "cat nothing": (lambda: F.cat([]), ["cat", "at least one"]),
    "split": (lambda: image(2, 3).split([1, 1], 1), ["split", "[1, 1]", "3"]),
    "index": (lambda: image(2, 3)[2], ["index", "2 of axis 0", "-2 to 1"]),
    "index of what is no number": (lambda: image(2, 3)["a"], ["index", "str"]),
    "index backwards": (lambda: image(2, 3)[::-1], ["index", "step -1"]),
    "indices": (lambda: image(2, 3)[0, 0, 0], ["index", "3 indices", "(2, 3)"]),
    "index of nothing": (lambda: image(2, 3)[2:], ["index", "nothing", "(2, 3)"]),
    "backward": (lambda: image(2).backward(), ["backward", "requires_grad=True"]),
    "no gradient": (lambda: (Parameter([1.0, 2.0]) * 2).backward(), ["backward", "(2,)"]),
    "gradient": (lambda: (Parameter([1.0, 2.0]) * 2).backward([1.0]), ["(1,)", "(2,)"]),
    "no samples": (lambda: F.to_lanes(image(0, 3)), ["(0, 3)", "batch"]),
    "mean of nothing": (lambda: F.mean(image(0, 3)), ["(0, 3)"]),
    "loss of nothing": (lambda: F.cross_entropy(image(0, 3), np.zeros(0, int)), ["(0, 3)"]),
    "conv channels": (
        lambda: nn.Conv2d(3, 4, 3)(image(1, 2, 5, 5)),
        ["conv2d", "(1, 2, 5, 5)", "(4, 3, 3, 3)", "3 channels"],
    ),
    "conv axes": (lambda: nn.Conv2d(1, 1, 3)(image(5, 5)), ["conv2d", "(5, 5)", "(N, C, H, W)"]),
    "conv kernel": (
        lambda: nn.Conv2d(1, 1, 6)(image(1, 1, 5, 7)),
        ["conv2d", "6 x 6", "5 x 7", "padding"],
    ),
    "linear": (lambda: nn.Linear(3, 4)(image(2, 5)), ["linear", "(2, 5)", "(4, 3)"]),
    "pool window": (
        lambda: F.max_pool2d(image(1, 1, 4, 4), 5),
        ["max_pool2d", "5 x 5", "(1, 1, 4, 4)"],
    ),
    "pool stride": (
        lambda: F.avg_pool2d(image(1, 1, 4, 4), (2, 3)),
        ["avg_pool2d", "2 x 3", "stride"],
    ),
    "pool places": (lambda: F.max_pool2d(image(1, 1, 20, 20), 17), ["max_pool2d", "289", "256"]),
    "dropout": (lambda: F.dropout(image(1, 2), 1.0), ["dropout", "1.0", "below 1"]),
    "softmax": (lambda: F.softmax(image(3)), ["softmax", "(3,)", "(N, ..., classes)"]),
    "matmul": (lambda: image(2, 3) @ image(2, 3), ["matmul", "(2, 3)", "same K"]),
    "take": (lambda: image(2, 3)[[0, 2]], ["index", "2 of 2 rows", "0 to 1"]),
    "take floats": (lambda: image(2, 3)[np.array([0.5])], ["index", "float64"]),
    "int32 of floats": (lambda: Tensor([0.5], dtype=np.int32), ["int32", "float64"]),
    "loss axes": (
        lambda: F.cross_entropy(image(2), [0, 1]),
        ["cross_entropy", "(2,)", "(N, classes)"],
    ),
    "reduction": (
        lambda: F.nll_loss(image(1, 2), [0], reduction="none"),
        ["nll", "'none'", "'mean'", "'sum'"],
    ),
    "labels": (lambda: F.cross_entropy(image(2, 3), [0, 1, 2]), ["labels", "(3,)", "2 samples"]),
    "label too large": (lambda: F.cross_entropy(image(2, 3), [0, 3]), ["label 1", "3", "0 to 2"]),
    "label negative": (lambda: F.nll_loss(image(2, 3), [-1, 0]), ["label 0", "-1", "0 to 2"]),
    "label fraction": (lambda: F.cross_entropy(image(2, 3), [0.5, 0]), ["label 0", "0.5"]),
    "weight made by an op": (
        lambda: F.linear(image(1, 2), Parameter(np.ones((3, 2))) * 2).sum().backward(),
        ["linear", "parameter"],
    ),
    # what the kernels would read or write beyond the end of an array
    "conv bias": (
        lambda: F.conv2d(image(1, 1, 4, 4), image(5, 1, 3, 3), image(2)),
        ["conv2d", "bias", "(2,)"],
    ),
    "linear bias": (
        lambda: F.linear(image(1, 4), image(40, 4), image(3)),
        ["linear", "bias", "(3,)"],
    ),
    "conv stride": (
        lambda: F.conv2d(image(1, 1, 4, 4), image(1, 1, 3, 3), stride=0),
        ["conv2d", "stride", "0"],
    ),
    "pool stride 0": (
        lambda: F.max_pool2d(image(1, 1, 4, 4), 2, -1),
        ["max_pool2d", "stride", "-1"],
    ),
    "pool window 0": (lambda: F.avg_pool2d(image(1, 1, 4, 4), 0), ["avg_pool2d", "0 x 0"]),
    "reshape negative": (lambda: image(2, 3).reshape(-2, -3), ["reshape", "(2, 3)", "(-2, -3)"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_was_given_and_what_is_allowed(case):
    op, words = ERRORS[case]
    with pytest.raises(ShapeError) as caught:
        op()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_negative_padding_is_refused(launch):
    """In a process of its own: what it would write is not inside any array."""
    code = "import odyssey\nodyssey.functional.pad2d(odyssey.Tensor([[[[1.0, 2], [3, 4]]]]), -1)"
    assert "ShapeError: [pad2d]" in launch.python("-c", code).stderr


@pytest.mark.parametrize("n", [1, 15, 16, 37])
def test_small_powers_do_not_depend_on_their_place(n):
    for a in (0.0, 1e-40, 1e-30, 1e-10):
        row = np.full(n, a, np.float32)
        for b in (0.5, 1.5, 4.5):
            found = (Tensor(row) ** b).numpy()
            assert (found == found[0]).all() and found[0] == pytest.approx(
                np.float32(a) ** b, rel=1e-4, abs=1.2e-38
            )
        assert ((Tensor(row) ** 0.0).numpy() == 1).all()
    assert not F.exp(Tensor(np.full(n, -100, np.float32))).numpy().any()
