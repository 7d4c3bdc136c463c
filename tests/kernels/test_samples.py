"""Every op of ops_samples.py in every way that a training computes it
(odyssey.testing.check_op), and what is said of ops that are wrong.
"""

from __future__ import annotations

import numpy as np
import ops_samples
import pytest

from odyssey import functional as F
from odyssey.core.program import current
from odyssey.core.tensor import attach, empty
from odyssey.testing import OpError, check_op


@pytest.mark.parametrize("sample", ops_samples.SAMPLES, ids=ops_samples.name_of)
def test_op(sample):
    check_op(*sample[:2], *sample.shapes, parameters=sample.parameters, training=sample.training)


def test_a_wrong_gradient_is_found():
    def op(x):
        return attach(F.scale(x, 2.0), (x,), lambda dy: (F.scale(dy, 3.0),))

    with pytest.raises(
        OpError, match=r"op of 1 samples: the gradient of argument 0 is off by 5.0e-01"
    ):
        check_op(op, lambda x: 2 * x, (6,))


def test_a_wrong_value_is_found():
    with pytest.raises(OpError, match=r"tanh of 1 samples is off by"):
        check_op(F.tanh, lambda x: np.tanh(x) + 1e-3, (6,))


def test_a_write_past_the_end_is_found():
    def op(x):
        y = empty(x.shape, x.layout)
        current().emit("fill", y.memory, 0.0, y.floats + 1)
        return attach(y, (x,), lambda dy: (F.scale(dy, 0.0),))

    with pytest.raises(
        OpError, match=r"fill writes past the end of a tensor of 24 bytes, at byte 0 behind"
    ):
        check_op(op, np.zeros_like, (6,))


def _with_bias(kernel):
    """x + b, with a kernel for the gradient of b that is declared otherwise."""

    def op(x, b):
        y = F.add(x, 0.0)

        def backward(dy):
            current().emit(kernel, b.grad.memory, dy.memory, 0.0, b.size)
            return (dy, None)

        return attach(y, (x, b), backward)

    return op


def test_what_adds_to_a_gradient_must_say_so():
    with pytest.raises(
        OpError, match=r'axpy adds to y, a parameter.s gradient, and lacks the trait "sums"'
    ):
        check_op(_with_bias("axpy"), lambda x, b: x + 0 * b, (6,), parameters=[(6,)])
    with pytest.raises(
        OpError,
        match=r"scale writes y, a parameter.s gradient; gradients of parameters are added to",
    ):
        check_op(_with_bias("scale"), lambda x, b: x + 0 * b, (6,), parameters=[(6,)])
