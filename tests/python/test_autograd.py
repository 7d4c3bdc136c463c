"""The tape: how gradients flow, join, add up, and where they stop."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from odyssey import Tensor, nn, no_grad
from odyssey import functional as F
from odyssey.core.tensor import Parameter


def leaf(*values):
    return Tensor(np.array([values]), requires_grad=True)


def test_a_value_used_twice_gets_both_gradients():
    x = leaf(3.0, -2.0)
    (x * x + x * 5).sum().backward()
    assert x.grad.tolist() == [[2 * 3 + 5, 2 * -2 + 5]]


def test_fan_out_and_fan_in_over_several_ops():
    x = leaf(0.5)
    a = F.tanh(x)
    b, c = a * a, F.sigmoid(a)
    (b * c + a).sum().backward()
    t, s = np.tanh(0.5), 1 / (1 + np.exp(-np.tanh(0.5)))
    by_a = 2 * t * s + t * t * s * (1 - s) + 1
    assert x.grad.item() == pytest.approx(by_a * (1 - t * t), rel=1e-6)


def test_each_op_is_met_once_however_many_paths_lead_to_it():
    """40 doublings: 2^40 paths, which a walk along paths would not finish."""
    x = leaf(1.0)
    y = x
    for _ in range(40):
        y = y + y
    y.sum().backward()
    assert x.grad.item() == 2.0**40


def test_a_long_chain_needs_no_stack():
    x = leaf(1.0)
    y = x
    for _ in range(3000):
        y = y * 1.0
    y.sum().backward()
    assert x.grad.item() == 1


def test_backward_adds_to_what_is_there_until_zero_grad():
    layer = nn.Linear(2, 1)
    x = leaf(1.0, 2.0)
    for times in (1, 2, 3):
        layer(x).sum().backward()
        assert layer.weight.grad.tolist() == [[times, 2 * times]]
        assert layer.bias.grad.tolist() == [times]
    layer.zero_grad()
    assert layer.weight.grad.tolist() == [[0, 0]]
    layer(x).sum().backward()
    assert layer.weight.grad.tolist() == [[1, 2]]


def test_the_same_graph_twice():
    x, p = leaf(2.0), Parameter([[3.0]])
    loss = (F.linear(x, p) * 2).sum()
    loss.backward()
    loss.backward()
    assert (x.grad.item(), p.grad.item()) == (12, 8)


def test_gradient_argument_scales_per_element():
    x = leaf(1.0, 2.0, 3.0)
    (x * 2).backward([[1.0, 10.0, 100.0]])
    assert x.grad.tolist() == [[2, 20, 200]]


def test_the_gradient_argument_is_not_changed():
    x, seed = leaf(1.0, 2.0), np.ones((1, 2), np.float32)
    y = x + x
    y.backward(seed)
    y.backward(seed)
    assert seed.tolist() == [[1, 1]]
    assert x.grad.tolist() == [[4, 4]]


def test_a_leaf_is_its_own_loss():
    x = Tensor(2.0, requires_grad=True)
    x.backward()
    assert x.grad.item() == 1


def test_only_what_asks_for_a_gradient_gets_one():
    a, b = leaf(2.0), Tensor([[3.0]])
    (a * b).sum().backward()
    assert a.grad.item() == 3
    assert b.grad is None


def test_weights_get_their_gradient_where_inputs_want_none_and_the_other_way_round():
    x, w = Tensor([[2.0]]), Parameter([[3.0]])
    F.linear(x, w).sum().backward()
    assert (x.grad, w.grad.item()) == (None, 2)
    x, fixed = leaf(2.0), Tensor([[3.0]])
    F.linear(x, fixed).sum().backward()
    assert (x.grad.item(), fixed.grad) == (3, None)


def test_bias_alone_gets_its_gradient():
    """A frozen weight (fine-tuning) and a bias that learns."""
    x, w, b = Tensor([[2.0], [5.0]]), Tensor([[3.0]]), Parameter([1.0])
    F.linear(x, w, b).sum().backward()
    assert b.grad.tolist() == [2]
    image, kernel, b = (
        Tensor(np.ones((2, 1, 3, 3))),
        Tensor(np.ones((1, 1, 2, 2))),
        Parameter([1.0]),
    )
    F.conv2d(image, kernel, b).sum().backward()
    assert b.grad.tolist() == [8]


def test_a_fixed_bias_is_left_alone():
    x, w, b = Tensor([[2.0]]), Parameter([[3.0]]), Tensor([1.0])
    F.linear(x, w, b).sum().backward()
    assert w.grad.item() == 2
    assert b.grad is None


def test_no_grad_leaves_no_tape_and_is_undone_by_an_error():
    x = leaf(1.0)
    with no_grad():
        y = x * 2
    assert not y.requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        raise ZeroDivisionError
    assert (x * 2).requires_grad


def test_no_grad_is_of_one_thread():
    seen = []
    x = leaf(1.0)
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append((x * 2).requires_grad))
        thread.start()
        thread.join()
    assert seen == [True]


def test_detach_cuts_and_shares():
    x = leaf(2.0)
    y = x * 3
    cut = y.detach()
    assert not cut.requires_grad
    assert cut.tolist() == y.tolist()
    (cut * x).sum().backward()
    assert x.grad.item() == 6


def test_operators():
    a, b = leaf(6.0), leaf(2.0)
    y = 1 - (-a) + b * 2 - 3 * a / 4 + 0.5 * b
    assert y.item() == 1 + 6 + 4 - 4.5 + 1
    y.sum().backward()
    assert (a.grad.item(), b.grad.item()) == (0.25, 2.5)


def test_tied_weights_add_up():
    w = Parameter(np.array([[2.0]]))
    x = leaf(3.0)
    F.linear(F.linear(x, w), w).sum().backward()
    assert w.grad.item() == 2 * 2 * 3
    assert x.grad.item() == 4


def test_mean_loss_is_the_sum_over_samples_by_their_number():
    logits = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    by_mean, by_sum = Tensor(logits, requires_grad=True), Tensor(logits, requires_grad=True)
    F.cross_entropy(by_mean, [0, 1, 2, 0, 1]).backward()
    F.cross_entropy(by_sum, [0, 1, 2, 0, 1], reduction="sum").backward()
    np.testing.assert_allclose(by_mean.grad.numpy() * 5, by_sum.grad.numpy(), rtol=1e-6)
