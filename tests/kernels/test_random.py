"""Random numbers: dropout masks and initial values are those of Philox (reference.py); a mask
depends on the sample.
"""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import reference as R

from odyssey import functional as F
from odyssey import nn
from odyssey.core.program import Eager, using
from odyssey.core.tensor import Tensor
from odyssey.nn import module


def dropout(x, p=0.3, seed=5, step=0, first=0, layer=0):
    executor = Eager()
    executor.context.seed, executor.context.step, executor.context.first = seed, step, first
    with using(executor):
        for _ in range(layer):
            executor.next_layer()
        x = Tensor(x, requires_grad=True)
        y = F.dropout(x, p)
        y.backward(np.ones(x.shape, np.float32))
        return y.numpy(), x.grad.numpy()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (16, 4), (17, 13), (33, 2, 3, 5)])
@pytest.mark.parametrize(
    ("seed", "step", "first", "layer"), [(0, 0, 0, 0), (2**62 + 3, 1000, 96, 2), (1, 2**31, 7, 1)]
)
def test_mask_is_that_of_philox(shape, seed, step, first, layer):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y, dx = dropout(x, 0.3, seed, step, first, layer)
    kept = R.dropout_kept(shape, 0.3, seed, step, first, layer)
    np.testing.assert_allclose(y, np.where(kept, x / 0.7, 0), rtol=1e-6)
    np.testing.assert_allclose(dx, np.where(kept, 1 / 0.7, 0), rtol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_mean(p):
    y, _ = dropout(np.ones((400, 100), np.float32), p)
    assert (y == 0).mean() == pytest.approx(p, abs=0.01)
    assert y.mean() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("cut", [1, 5, 16, 20])
def test_mask_of_a_sample_does_not_depend_on_the_cut_of_the_batch(cut):
    x = np.ones((40, 9), np.float32)
    whole, _ = dropout(x)
    pieces = [dropout(x[i : i + cut], first=i)[0] for i in range(0, 40, cut)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_seed_step_sample_and_layer_change_the_mask():
    x = np.ones((16, 64), np.float32)
    masks = [dropout(x, **{name: 1})[0].tobytes() for name in ("seed", "step", "first", "layer")]
    assert len({dropout(x, seed=5)[0].tobytes(), *masks}) == 5
    assert len({row.tobytes() for row in dropout(x)[0]}) == 16


def test_two_dropouts_in_a_row_differ_and_manual_seed_does_not_repeat_the_layer():
    x = Tensor(np.ones((4, 64), np.float32))
    assert not np.array_equal(F.dropout(x).numpy(), F.dropout(x).numpy())


def test_off_is_the_tensor_itself():
    x = Tensor(np.ones((2, 3)))
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0) is x


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
def test_initial_values_are_those_of_philox(size):
    nn.manual_seed(2**40 + 11)
    first, second = nn.Linear(1, size), nn.Linear(4, 1)
    assert np.array_equal(first.weight.numpy().ravel(), R.uniform(size, 2**40 + 11, 0, -1, 1))
    assert np.array_equal(first.bias.numpy(), R.uniform(size, 2**40 + 11, 1, -1, 1))
    assert np.array_equal(second.weight.numpy().ravel(), R.uniform(4, 2**40 + 11, 2, -0.5, 0.5))


def test_random_shapes_of_normal_values_are_sums_of_twelve_rows_of_the_stream():
    rng = np.random.default_rng(31)
    shapes = [
        (),
        (1,),
        (1, 1),
        (2,),
        (0,),
        *(tuple(rng.integers(1, 40, rng.integers(1, 4))) for _ in range(40)),
        (1000, 77),
    ]
    for k, shape in enumerate(shapes):
        seed, size = int(rng.integers(2**62)), math.prod(shape)
        nn.manual_seed(seed)
        nn.Linear(1, 3)  # streams 0 and 1
        rows = R.uniform(12 * size, seed, 2, -0.5, 0.5).reshape(12, *shape)
        assert (
            module.normal(tuple(map(int, shape))).numpy().tobytes() == rows.sum(axis=0).tobytes()
        ), (k, shape)


def test_normal_values_take_no_more_memory_than_themselves():
    module.normal((1000,))
    tracemalloc.start()
    p = module.normal((512, 1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # zeros, the same aligned, room for a gradient; twelve rows would be 12 more
    assert peak < 4 * p.data.nbytes
