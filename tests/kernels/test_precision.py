"""Products with bf16 and fp16 operands: against float64 of the rounded operands (tight) and of
the operands (loose).
"""

from __future__ import annotations

import numpy as np
import pytest
import reference as R

import odyssey
from odyssey import functional as F
from odyssey.comm.calls import bfloat16, narrow, widen
from odyssey.core import native, program
from odyssey.core.precision import PRECISIONS
from odyssey.core.tensor import Tensor, no_grad
from odyssey.errors import ConfigError
from odyssey.nn import Parameter

BATCHES = (1, 4, 5, 16, 17, 33, 64)
TIGHT = 1e-5  # of the largest element: float32 sums of exact products
LOOSE = {"bf16": 2.0**-6, "fp16": 2.0**-9}  # two operands of 8 and 11 bits
NARROW = ("bf16", "fp16")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def bf16(x):
    """To the nearest bf16, ties to even, in integers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (upper << 16).astype(np.uint32).view(np.float32).reshape(np.shape(x))


def fp16(x):
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


ROUND = {"bf16": bf16, "fp16": fp16, "fp32": lambda x: x}


def off(got, wanted):
    assert got.shape == wanted.shape
    return np.abs(got - wanted).max() / np.abs(wanted).max()


def check(precision, op, formula, backward, x, w, b):
    with odyssey.autocast(precision):
        inputs = Tensor(x, requires_grad=True), Parameter(w), Parameter(b)
        y = op(*inputs)
    dy = normal(*y.shape, seed=1)
    y.backward(dy)  # outside: the gradients have the precision of the op
    got = [y.numpy(), *(t.grad.numpy() for t in inputs)]

    def truth(cast):
        wide = [cast(a).astype(np.float64) for a in (x, w)]
        gradients = backward(*wide, b.astype(np.float64), cast(dy).astype(np.float64))
        return [
            formula(*wide, b.astype(np.float64)),
            *gradients[:2],
            dy.astype(np.float64).sum((0, *range(2, dy.ndim))),
        ]

    names = ("y", "dx", "dw", "db")
    for name, g, tight, loose in zip(
        names, got, truth(ROUND[precision]), truth(ROUND["fp32"]), strict=True
    ):
        assert off(g, tight) < TIGHT, name
        assert off(g, loose) < LOOSE[precision], name
    return got


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("n", BATCHES)
@pytest.mark.parametrize(
    ("i", "o"),
    [
        (1, 1),
        (400, 120),
        (84, 10),
        (17, 33),
        (16, 12),
        (15, 5),
        (3, 64),
        (130, 23),
        (97, 26),
        (200, 7),
    ],
)
def test_linear(i, o, n, precision):
    check(precision, F.linear, R.linear, R.linear_backward, normal(n, i), normal(o, i), normal(o))


# C, H, W, K, R, T, stride, padding
CONVOLUTIONS = [
    (6, 14, 14, 16, 5, 5, 1, 0),
    (3, 9, 7, 5, 3, 3, 1, 1),
    (2, 8, 11, 7, 3, 3, 2, 0),
    (4, 7, 7, 3, 1, 1, 1, 0),
    (2, 9, 10, 3, 1, 1, 3, 0),
    (3, 6, 13, 2, 2, 5, 1, (1, 2)),
    (2, 10, 6, 9, 5, 2, 2, (0, 3)),
    (5, 5, 5, 4, 5, 5, 1, 0),
    (2, 12, 12, 1, 7, 7, 1, 3),
    (2, 4, 29, 3, 3, 3, 1, 1),
]


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("n", (1, 4, 5, 17, 33))
@pytest.mark.parametrize(("c", "h", "w", "k", "r", "t", "stride", "padding"), CONVOLUTIONS)
def test_conv2d(n, c, h, w, k, r, t, stride, padding, precision):
    check(
        precision,
        lambda x, weight, bias: F.conv2d(x, weight, bias, stride, padding),
        lambda x, weight, bias: R.conv2d(x, weight, bias, stride, padding),
        lambda x, weight, bias, dy: R.conv2d_backward(x, weight, bias, stride, padding, dy),
        normal(n, c, h, w),
        normal(k, c, r, t),
        normal(k),
    )


# more than a tile of everything, images and batches of more than is packed at once (amx.mojo)
LARGE = [
    (33, 70, 11, 9, 50, 3, 3, 1, 1),
    (48, 33, 12, 12, 65, 3, 2, 2, 1),
    (17, 64, 40, 41, 33, 3, 3, 1, 1),
    (35, 65, 46, 45, 34, 4, 5, 3, 2),
    (80, 40, 5, 6, 97, 1, 1, 1, 0),
    (3, 40, 50, 51, 33, 5, 4, 1, 1),
]


@pytest.mark.parametrize(("n", "c", "h", "w", "k", "r", "t", "stride", "padding"), LARGE)
def test_large_convolutions_in_bf16(n, c, h, w, k, r, t, stride, padding):
    test_conv2d(n, c, h, w, k, r, t, stride, padding, "bf16")


@pytest.mark.parametrize(
    ("n", "i", "o"), [(1000, 384, 80), (200, 1500, 33), (513, 65, 190), (4, 700, 129)]
)
def test_large_layers_in_bf16(n, i, o):
    test_linear(i, o, n, "bf16")


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("n", (2, 17))
def test_a_convolution_of_one_channel_stays_float32(precision, n):
    x, w, b = normal(n, 1, 9, 8), normal(3, 1, 3, 3), normal(3)
    y = []
    for p in (precision, "fp32"):
        with odyssey.autocast(p):
            y.append(F.conv2d(Tensor(x), Parameter(w), Parameter(b)).numpy())
    assert np.array_equal(*y)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("n", (3, 17))
def test_rounding_is_to_nearest_even(precision, n):
    """An identity shows the rounded operand itself: ties, a carry into the exponent, the largest
    and small numbers.
    """
    bits = 8 if precision == "bf16" else 11
    one = 2.0 ** (1 - bits)  # from 1 to the next number
    values = [
        1 + one / 2,
        1 + 3 * one / 2,
        1 + 0.51 * one,
        1 + 0.49 * one,
        2 - one / 4,
        -1 - one / 2,
        60000.0,
        1e-4,
        0,
    ]
    x = np.tile(np.array(values, np.float32), (n, 1))
    with odyssey.autocast(precision):
        y = F.linear(Tensor(x), Parameter(np.eye(len(values)))).numpy()
    assert np.array_equal(y, ROUND[precision](x))


@pytest.mark.parametrize("n", (2, 17))
def test_fp16_overflows_to_infinity_and_bf16_does_not(n):
    x, w = np.full((n, 1), 7e4, np.float32), np.ones((1, 1), np.float32)
    y = {}
    for precision in NARROW:
        with odyssey.autocast(precision):
            y[precision] = F.linear(Tensor(x), Parameter(w)).numpy()
    assert np.isposinf(y["fp16"]).all()
    assert np.allclose(y["bf16"], 7e4, rtol=2.0**-8)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", (2, 17, 33))
def test_what_is_not_finite_is_not_hidden(precision, bad, n):
    x = normal(n, 2, 6, 6)
    x[n - 1, 1, 2, 3] = bad
    with odyssey.autocast(precision):
        conv = F.conv2d(Tensor(x), Parameter(normal(3, 2, 3, 3))).numpy()
        line = F.linear(Tensor(x.reshape(n, -1)), Parameter(normal(5, 72))).numpy()
    for y in (conv, line):
        assert not np.isfinite(y[n - 1]).all()
        assert np.isfinite(y[: n - 1]).all()


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("n", "h", "k", "stride"),
    [(3, 7, 5, 1), (16, 7, 5, 1), (17, 8, 17, 1), (16, 9, 3, 2), (33, 8, 33, 2)],
)
def test_what_is_not_finite_stays_in_its_channel(precision, bad, n, h, k, stride):
    """Also where a last channel, sample or row of an odd number is padded with zeros."""
    x, w, dy = (
        normal(n, 3, h, 6),
        normal(k, 3, 3, 3),
        normal(n, k, (h - 3) // stride + 1, 3 // stride + 1),
    )
    x[n - 1, 1, h // 2, 3] = bad
    with odyssey.autocast(precision):
        inputs = Tensor(x, requires_grad=True), Parameter(w)
        y = F.conv2d(*inputs, None, stride)
    y.backward(dy[:, :, :, : y.shape[3]])
    dx, dw = (t.grad.numpy() for t in inputs)
    assert np.isfinite(dx).all()
    assert np.isfinite(dw[:, [0, 2]]).all()
    assert not np.isfinite(dw[:, 1]).all()


@pytest.mark.parametrize("precision", NARROW)
def test_gradients_are_added_to(precision):
    x, w = Tensor(normal(17, 6)), Parameter(normal(4, 6))
    with odyssey.autocast(precision):
        F.linear(x, w).backward(normal(17, 4))
        once = w.grad.numpy().copy()
        F.linear(x, w).backward(normal(17, 4))
    assert np.array_equal(w.grad.numpy(), 2 * once)


def test_autocast_nests_and_ends():
    x, w = Tensor(normal(17, 40)), Parameter(normal(8, 40))
    plain = F.linear(x, w).numpy()
    with odyssey.autocast("bf16"):
        narrow = F.linear(x, w).numpy()
        with odyssey.autocast("fp32"):
            assert np.array_equal(F.linear(x, w).numpy(), plain)
        with pytest.raises(ZeroDivisionError), odyssey.autocast("fp16"):
            raise ZeroDivisionError
        assert np.array_equal(F.linear(x, w).numpy(), narrow)
    assert not np.array_equal(narrow, plain)
    assert np.array_equal(F.linear(x, w).numpy(), plain)


def test_autocast_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="int8.*fp32, tf32, bf16, fp16"), odyssey.autocast("int8"):
        pass


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "tf32"])  # which is a GPU's
def test_the_same_op_twice_gives_the_same_bits(precision):
    x, w = Tensor(normal(33, 3, 9, 9)), Parameter(normal(5, 3, 3, 3))
    with odyssey.autocast(precision), no_grad():
        assert np.array_equal(F.conv2d(x, w).numpy(), F.conv2d(x, w).numpy())


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1000, 65_537])
def test_bf16_for_the_wire_has_the_bits_of_its_definition(n):
    """Random bits: NaN, infinities and subnormals among them; NaN keeps sign and upper bits, as
    a quiet one.
    """
    bits = np.random.default_rng(n).integers(0, 1 << 32, n, dtype=np.uint32)
    special = np.array(
        [
            0,
            1,
            0x7F800000,
            0xFF800000,
            0x7F800001,
            0xFFFFFFFF,
            0x7F7FFFFF,
            0x8000,
            0x18000,
            0x807FFFFF,
        ]
    )
    bits[: len(special)] = special.astype(np.uint32)[:n]
    out = np.zeros(n + 1, bfloat16)
    narrow(bits.view(np.float32), out[:n])
    upper = (bits >> 16).astype(np.uint16)
    nearest = ((bits.astype(np.uint64) + 0x7FFF + (upper & 1)) >> 16).astype(np.uint16)
    wanted = np.where(np.isnan(bits.view(np.float32)), upper | 0x7FC0, nearest)
    assert np.array_equal(out[:n].view(np.uint16), wanted)
    assert out[n:].view(np.uint16) == 0
    assert np.array_equal(widen(out[:n]).view(np.uint32), wanted.astype(np.uint32) << 16)


# --- nothing is written behind the scratch memory ------------------------------------------------

MARK = 0xA5


def guarded(monkeypatch):
    """Lets the executor hand out scratch between guards; returns a check."""
    executor = program.current()
    blocks = []

    def alloc(nbytes):
        room = native.aligned(nbytes + 4096, np.uint8)
        room[nbytes:] = MARK
        blocks.append((room, nbytes))
        return program.OwnMemory(room)

    monkeypatch.setattr(executor, "alloc", alloc)
    return lambda: all((room[nbytes:] == MARK).all() for room, nbytes in blocks)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("n", (3, 5, 17, 33))
def test_scratch_is_large_enough(monkeypatch, precision, n):
    intact = guarded(monkeypatch)
    for i, o in [(1, 1), (15, 5), (17, 33), (97, 26), (3, 13)]:
        check(
            precision, F.linear, R.linear, R.linear_backward, normal(n, i), normal(o, i), normal(o)
        )
    for c, h, w, k, r, t, s, p in CONVOLUTIONS:
        check(
            precision,
            lambda x, weight, bias, s=s, p=p: F.conv2d(x, weight, bias, s, p),
            lambda x, weight, bias, s=s, p=p: R.conv2d(x, weight, bias, s, p),
            lambda x, weight, bias, dy, s=s, p=p: R.conv2d_backward(x, weight, bias, s, p, dy),
            normal(n, c, h, w),
            normal(k, c, r, t),
            normal(k),
        )
    assert intact()


def test_packed_scratch_is_smaller_than_copies():
    """What the instruction saves in memory: half a word per number, and never more than one or
    two groups at once.
    """
    if not native.library().bf16:
        pytest.skip("this target multiplies no bf16")
    sizes = (2, 32, 26, 26, 64, 3, 3, 1)
    for op in ("conv2d_forward", "conv2d_backward_weight", "conv2d_backward_input"):
        lib = native.library()
        packed, copied = (
            lib.scratch(lib.ops[op], sizes, "lanes", dtype) for dtype in ("bf16", "fp16")
        )
        assert 0 < packed <= copied / 2
