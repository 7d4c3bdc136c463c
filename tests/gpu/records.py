"""Every op on a GPU against the CPU kernels: the same records, the same memory, several shards.

A program, not a test.

    python tests/gpu/records.py [--json FILE] [NAME ...]

test_gpu_training.py runs it on an emulated GPU, scripts/gpu-check on a real one. A case is a short
program over named operands. The CPU runs it shard by shard; the GPU runs it once for all shards;
then everything that either of them wrote is compared, relative to the largest number of the
operand. Gradients are compared as the sum over shards.

Exit code: 0, 1 if a case failed, 3 if the GPU can no longer be used by this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator

import numpy as np

from odyssey.core import native as host
from odyssey.core.gpu_native import Gpu, GpuStep, StepContext, library
from odyssey.parallel.plan import split

LANES = 16
TOLERANCE = 2e-5
SHARD = 32  # samples
# What CUDA says when nothing of a process can use the GPU any more.
LOST = re.compile(
    r"ILLEGAL_|MISALIGNED|LAUNCH_FAILED|LAUNCH_TIMEOUT|HARDWARE_STACK|ECC_|_ASSERT", re.IGNORECASE
)


@dataclasses.dataclass
class Operand:
    """A tensor of a case. space: where it is; exact: bits must be those of the CPU."""

    name: str
    floats: int
    space: int = host.WORK
    # or "zero", "labels", "positive", "hidden N": some, and every N-th, are -inf
    fill: str = "normal"
    exact: bool = False
    at: int = 0  # floats from the start of its space


@dataclasses.dataclass
class Case:
    """A program: records of (op, arguments); an argument that is a string names an operand."""

    name: str
    operands: list[Operand]
    records: list[tuple]
    classes: int = 10
    tolerance: float = TOLERANCE
    fold: int = 1


def w(name: str, floats: int, fill: str = "normal", exact: bool = False) -> Operand:
    return Operand(name, floats, host.WORK, fill, exact)


def p(name: str, floats: int) -> Operand:
    return Operand(name, floats, host.PARAMS)


def g(name: str, floats: int) -> Operand:
    return Operand(name, floats, host.GRADS, "zero")


def product(op: str, dtype: str, operands: list[str], *numbers: int) -> tuple:
    """A product in a precision, "op:dtype", with its scratch memory "s".

    The CPU has no tf32: there it is float32's.
    """
    mine = (f"{op}:{dtype}", *operands, "s", *numbers)
    return (mine, [(op, *operands, "s", *numbers)]) if dtype == "tf32" else mine


def scratch_of(op: str, dtype: str, sizes: tuple[int, ...]) -> Operand:
    """The scratch memory that the CPU's product wants."""
    lib = host.library()
    need = lib.scratch(lib.ops[op], sizes, dtype="fp32" if dtype == "tf32" else dtype)
    return w("s", max(need // 4, 16), "zero")


# tf32 against float32: 10 bits of mantissa
LOOSE = {"fp32": TOLERANCE, "bf16": 2e-5, "fp16": 2e-5, "tf32": 2e-3}


def products(
    kind: str, sizes: tuple[int, ...], n: tuple[int, int, int, int], form: str, fold: int
) -> Iterator[Case]:
    """A layer's forward pass and both gradients; n: floats of x, y, w and b."""
    tail = f" {'x'.join(map(str, sizes))} {form}"
    x, y, dy, dx = w("x", n[0]), w("y", n[1], "zero"), w("dy", n[1]), w("dx", n[0], "zero")
    weight, bias = p("w", n[2]), p("b", n[3])

    def case(
        pass_: str, tensors: list[Operand], *numbers: int, fold: int = 1, note: str = ""
    ) -> Case:
        op = f"{kind}_{pass_}"
        scratch = scratch_of(op, form, sizes)
        record = product(op, form, [t.name for t in tensors], *sizes, *numbers)
        return Case(
            f"{op}{tail}{note}", [*tensors, scratch], [record], tolerance=LOOSE[form], fold=fold
        )

    for relu in (0, 1):
        yield case("forward", [y, x, weight, bias], relu, note=f" relu={relu}")
    yield case("backward_input", [dx, dy, weight])
    dw, db = g("dw", n[2]), g("db", -(-n[3] // 16) * 16)
    yield case("backward_weight", [dw, db, dy, x], fold=fold, note=f" fold={fold}")


def linear(G: int, I: int, O: int, form: str = "fp32", fold: int = 1) -> Iterator[Case]:  # noqa: E741
    yield from products("linear", (G, I, O), (G * I * LANES, G * O * LANES, O * I, O), form, fold)


def conv(G, C, H, W, K, R, T, S, form="fp32", fold=1) -> Iterator[Case]:
    P, Q = (H - R) // S + 1, (W - T) // S + 1
    n = (G * C * H * W * LANES, G * K * P * Q * LANES, K * C * R * T, K)
    yield from products("conv2d", (G, C, H, W, K, R, T, S), n, form, fold)


def inside(G, C, H, W, K, R, T, S, ph, pw, form="fp32") -> Iterator[Case]:
    """The gradient of a padded input and its inside, in one launch on GPUs."""
    sizes = (G, C, H, W, K, R, T, S)
    P, Q = (H - R) // S + 1, (W - T) // S + 1
    h, w_ = H - 2 * ph, W - 2 * pw
    whole = ("conv2d_backward_input" + f":{form}" * (form != "tf32"), "c", "dy", "w", "s", *sizes)
    yield Case(
        f"conv2d_backward_input_inside {'x'.join(map(str, (*sizes, ph, pw)))} {form}",
        [
            w("dx", G * C * h * w_ * LANES, "zero"),
            w("c", G * C * H * W * LANES, "zero"),
            w("dy", G * K * P * Q * LANES),
            p("w", K * C * R * T),
            scratch_of("conv2d_backward_input", form, sizes),
        ],
        [
            (
                (f"conv2d_backward_input_inside:{form}", "dx", "dy", "w", *sizes, ph, pw),
                [whole, ("pad_backward", "dx", "c", G * C, h, w_, ph, pw)],
            )
        ],
        tolerance=LOOSE[form],
    )


def general(*sizes: int, fold: int = 1) -> Iterator[Case]:
    """A convolution with groups or dilation: both gradients with it."""
    G, C, H, W, K, R, T, S, D, groups = sizes
    P, Q = (H - D * (R - 1) - 1) // S + 1, (W - D * (T - 1) - 1) // S + 1
    n, m, weights = G * C * H * W * LANES, G * K * P * Q * LANES, K * C // groups * R * T
    operands = [
        w("y", m, "zero"),
        w("x", n),
        w("dx", n, "zero"),
        w("dy", m),
        p("w", weights),
        p("b", K),
    ]
    records = [
        ("conv2d_general_forward", "y", "x", "w", "b", *sizes),
        ("conv2d_general_backward_input", "dx", "dy", "w", *sizes),
        ("conv2d_general_backward_weight", "dw", "db", "dy", "x", *sizes),
    ]
    yield Case(
        f"conv2d_general {'x'.join(map(str, sizes))} fold={fold}",
        [*operands, g("dw", weights), g("db", K)],
        records,
        fold=fold,
    )


def pools(planes, H, W, R, T, S) -> Iterator[Case]:
    P, Q = (H - R) // S + 1, (W - T) // S + 1
    n, m = planes * H * W * LANES, planes * P * Q * LANES
    sizes = (planes, H, W, R, T, S)
    tail = " " + "x".join(map(str, sizes))
    maxed = [w("y", m, "zero", True), w("a", m, "zero"), w("x", n), w("dx", n, "zero"), w("dy", m)]
    for relu in (0, 1):
        yield Case(
            f"maxpool{tail} relu={relu}",
            maxed,
            [
                ("maxpool_forward", "y", "a", "x", *sizes),
                ("maxpool_backward", "dx", "dy", "a", "y", *sizes, relu),
            ],
        )
    yield Case(
        f"avgpool{tail}",
        [w("y", m, "zero"), w("x", n), w("dx", n, "zero"), w("dy", m)],
        [("avgpool_forward", "y", "x", *sizes), ("avgpool_backward", "dx", "dy", *sizes)],
    )


def elementwise(n: int) -> Iterator[Case]:
    x, y, dy, dx = w("x", n), w("y", n, "zero"), w("dy", n), w("dx", n, "zero")
    for name in ("relu", "tanh", "sigmoid"):
        yield Case(
            f"{name} {n}",
            [x, y, dx, dy],
            [(f"{name}_forward", "y", "x", n), (f"{name}_backward", "dx", "dy", "y", n)],
        )
    y, b = w("y", n, "zero", True), w("b", n)
    yield Case(f"add {n}", [y, x, b], [("add", "y", "x", "b", n)])
    yield Case(f"multiply {n}", [y, x, b], [("multiply", "y", "x", "b", n)])
    yield Case(f"scale {n}", [y, x], [("scale", "y", "x", 0.3, n)])
    yield Case(f"copy {n}", [y, x], [("copy", "y", "x", n)])
    yield Case(f"fill {n}", [y], [("fill", "y", 0.3, n)])


def losses(G: int, F: int) -> Iterator[Case]:
    n = G * F * LANES
    x, labels = w("x", n), w("l", G * LANES, "zero", True)
    y, dx, dy = w("y", n, "zero"), w("dx", n, "zero"), w("dy", n)
    for name in ("softmax", "log_softmax"):
        yield Case(
            f"{name} {G}x{F}",
            [x, y, dx, dy],
            [(f"{name}_forward", "y", "x", G, F), (f"{name}_backward", "dx", "dy", "y", G, F)],
        )
    stats, seed = w("t", 16, "zero"), w("d", 16, "zero")
    first = [("array", "l", G, 1, 1, 0, -1), ("fill", "d", 1.0, 1)]
    yield Case(
        f"cross_entropy {G}x{F}",
        [x, y, labels, stats, seed, dx, g("total", 16)],
        [
            *first,
            ("cross_entropy_forward", "t", "y", "x", "l", G, F),
            ("cross_entropy_backward", "dx", "d", "y", "l", G, F),
            ("stats", "total", "t", "t", 0),
            ("stats", "total", "t", "t", 7),
        ],
        classes=F,
    )
    yield Case(
        f"cross_entropy, one launch {G}x{F}",
        [x, labels, stats, seed, w("dx", n, "zero"), y, g("total", 16)],
        [
            *first,
            (
                ("cross_entropy", "t", "dx", "x", "l", G, F, 0),
                [
                    ("cross_entropy_forward", "t", "y", "x", "l", G, F),
                    ("cross_entropy_backward", "dx", "d", "y", "l", G, F),
                ],
            ),
            ("stats", "total", "t", "t", 0),
            ("stats", "total", "t", "t", 7),
        ],
        classes=F,
        fold=2,
    )
    yield Case(
        f"nll {G}x{F}",
        [x, labels, stats, seed, dx],
        [*first, ("nll_forward", "t", "x", "l", G, F), ("nll_backward", "dx", "d", "l", G, F)],
        classes=F,
    )


def normed(G: int, F: int, fold: int = 1) -> Iterator[Case]:
    """Layer norm with its gradients."""
    n = G * F * LANES
    yield Case(
        f"layer_norm {G}x{F} fold={fold}",
        [
            *(w("y", n, "zero"), w("t", 2 * G * LANES, "zero"), w("x", n), p("w", F), p("b", F)),
            *(w("dx", n, "zero"), w("dy", n), g("dw", F), g("db", F)),
        ],
        [
            ("layer_norm_forward", "y", "t", "x", "w", "b", G, F, 1e-5),
            ("layer_norm_backward_input", "dx", "dy", "x", "t", "w", G, F),
            ("layer_norm_backward_weight", "dw", "dy", "x", "t", G, F),
            ("layer_norm_backward_bias", "db", "dy", G, F),
        ],
        fold=fold,
    )


def channels(G: int, C: int, P: int, N: int = -1) -> Iterator[Case]:
    """Batch norm with its gradients; N: the samples that count."""
    n = G * C * P * LANES
    each = [w(name, C, "zero") for name in ("dw", "db")] + [w(name, C) for name in ("w", "b", "m")]
    for relu in (0, 1):
        yield Case(
            f"batch_norm {G}x{C}x{P}, {N} samples, relu={relu}",
            [
                *each,
                w("v", C, "zero"),
                w("y", n, "zero"),
                w("t", 3 * C, "zero"),
                w("x", n),
                w("dx", n, "zero"),
                w("dy", n),
            ],
            [
                ("fill", "v", 0.7, C),
                (
                    "batch_norm_forward",
                    "y",
                    "t",
                    "x",
                    "w",
                    "b",
                    "m",
                    "v",
                    G,
                    C,
                    P,
                    N,
                    1e-5,
                    0,
                    0,
                    relu,
                ),
                (
                    "batch_norm_forward",
                    "y",
                    "t",
                    "x",
                    "w",
                    "b",
                    "m",
                    "v",
                    G,
                    C,
                    P,
                    N,
                    1e-5,
                    1,
                    0,
                    relu,
                ),
                (
                    "batch_norm_backward",
                    "dx",
                    "dw",
                    "db",
                    "dy",
                    "x",
                    "t",
                    "w",
                    "b",
                    G,
                    C,
                    P,
                    N,
                    1,
                    relu,
                ),
            ],
        )


def rows_of_a_table(n: int, V: int, F: int) -> Iterator[Case]:
    """Rows by their numbers, of which some are none, and their gradients."""
    yield Case(
        f"take {n} of {V}x{F}",
        [
            *(
                w("y", n * F, "zero", True),
                w("x", V * F),
                w("i", n),
                w("j", n),
                w("k", n, "zero", True),
            ),
            *(w("dy", n * F), w("dx", V * F, "zero", True)),
        ],
        [
            ("multiply", "j", "i", "i", n),
            ("scale", "j", "j", V / 2, n),
            ("to_int32", "k", "j", n),
            ("take_backward", "dx", "dy", "k", n, V, F),
        ],
    )


def others() -> Iterator[Case]:
    for C, H in ((1, 28), (3, 9)):
        F = C * H * H
        yield Case(f"input {F}", [w("y", 2 * F * LANES, "zero", True)], [("input", "y", 2, F, C)])
    yield Case("labels", [w("l", 2 * LANES, "zero", True)], [("array", "l", 2, 1, 1, 0, -1)])
    yield Case("array", [w("x", 2 * 5 * LANES, "zero", True)], [("array", "x", 2, 5, 1, 1, 0)])
    yield Case("tokens", [w("x", 10 * LANES, "zero", True)], [("array", "x", 10, 1, 5, 1, 0)])
    n = 2 * 3 * 5 * 4 * LANES
    m = 2 * 3 * 9 * 6 * LANES
    yield Case(
        "pad",
        [w("y", m, "zero", True), w("x", n), w("dx", n, "zero", True)],
        [("pad_forward", "y", "x", 6, 5, 4, 2, 1), ("pad_backward", "dx", "y", 6, 5, 4, 2, 1)],
    )
    for samples, F in ((32, 7), (20, 784), (17, 1)):
        rows, lanes = samples * F, -(-samples // LANES) * LANES * F
        yield Case(
            f"pack and unpack {samples}x{F}",
            [w("r", rows), w("y", lanes, "zero", True), w("z", rows, "zero", True)],
            [("pack_rows", "y", "r", samples, F), ("unpack_rows", "z", "y", samples, F)],
        )
    for F in (1, 5, 130):
        yield Case(
            f"dropout {F}",
            [
                *(
                    w("x", 2 * F * LANES),
                    w("y", 2 * F * LANES, "zero", True),
                    w("dx", 2 * F * LANES, "zero", True),
                ),
                w("bits", -(-F // 8) * 2 * LANES // 4, "zero", True),
            ],
            [
                ("dropout_forward", "y", "bits", "x", 2, F, 0.3, 5, 1),
                ("dropout_backward", "dx", "x", "bits", 2, F, 0.3),
            ],
        )
        yield Case(
            f"sum_lanes {F}",
            [w("x", 2 * F * LANES), w("t", 16, "zero"), w("dx", 2 * F * LANES, "zero")],
            [("sum_lanes", "t", "x", -1, 2, F), ("sum_lanes_backward", "dx", "t", -1, 2, F)],
        )
    for past, t, s, drop, masks in (
        (0, 17, 17, 0.0, 0),
        (0, 17, 17, 0.3, 0),
        (9, 5, 19, 0.6, 15),
        (40, 7, 40, 0.1, 3),
    ):
        yield attention(past, (3, t, s, 2, 6), drop, masks)
    yield attention(40, (3, 7, 40, 2, 6), 0.0, 9)
    # several tiles, of which the last are not full
    yield attention(0, (2, 70, 70, 2, 64), 0.2, 0, fused=1)
    yield attention(0, (1, 144, 144, 2, 32), 0.0, 0, fused=1)
    yield attention(0, (1, 67, 67, 1, 64), 0.0, 3, hidden=67)  # the first query sees no key
    yield attention(150, (2, 72, 150, 1, 20), 0.3, 15, hidden=72)  # nor does any first query here
    yield attention(3, (1, 130, 66, 1, 100), 0.1, 9, hidden=130)  # features that are two parts
    for name in ("reduce_sum", "reduce_max"):
        for kept, reduced, strides in (
            ((1, 1, 96), (1, 1, 40), (0, 0, 1, 0, 0, 96)),
            ((1, 3, 5), (2, 7, 4), (0, 140, 1, 420, 20, 5)),
            ((2, 3, 1), (1, 1, 50), (150, 50, 0, 0, 0, 1)),
        ):
            yield Case(
                f"{name} {kept} {reduced}",
                [
                    w("y", math.prod(kept), "zero", True),
                    w("x", math.prod(kept) * math.prod(reduced)),
                ],
                [(name, "y", "x", *kept, *reduced, *strides)],
            )
    for fold in (1, 4):  # more than one launch computes, and another op in between
        sizes = (5, 1, 300, 16, 64, 7, 20, 1000, 3, 12, 2)
        records = [("accumulate", f"d{i}", f"x{i}", n) for i, n in enumerate(sizes)]
        yield Case(
            f"accumulate fold={fold}",
            [
                *(w(f"x{i}", n) for i, n in enumerate(sizes)),
                *(g(f"d{i}", n) for i, n in enumerate(sizes)),
                w("y", 7),
            ],
            [*records[:10], ("fill", "y", 0.3, 7), *records[10:]],
            fold=fold,
        )
    yield Case("loss_scale", [w("y", 16, "zero", True)], [("loss_scale", "y")])


def attention(
    past: int, sizes: tuple[int, ...], drop: float, masks: int, fused: int = 0, hidden: int = 0
) -> Case:
    """Both passes for N, T, S, H, D. hidden: some numbers of the mask are -inf, and every
    so-manieth is.
    """
    n, t, s, h, d = sizes
    many = [-(-n * tokens // LANES) * LANES for tokens in (t, s, s)]
    each = [w(name, h * d * size) for name, size in zip(("q", "k", "v"), many, strict=True)]
    if fused:
        each = [w("q", 3 * h * d * many[0])]
    slopes = [w("d" + x.name, x.floats, "zero") for x in each]
    rest = [
        w("y", h * d * many[0], "zero"),
        w("lse", h * many[0], "zero"),
        w("dy", h * d * many[0]),
    ]
    numbers = (*sizes, past, fused, 0.4, drop, 3, 5, masks)
    names, to = ([x.name for x in of] * (3 if fused else 1) for of in (each, slopes))
    tail = (*names, "m", "s", *numbers)
    return Case(
        f"attention {'x'.join(map(str, sizes))} past {past} dropout {drop} masks "
        f"{masks}{' fused' * fused}",
        [
            *each,
            *slopes,
            *rest,
            w("m", n * h * t * s, f"hidden {hidden}" if hidden else "normal", True),
            w("s", 1 << 18),
        ],
        [
            ("attention_forward", "y", "lse", *tail),
            ("attention_backward", *to, "dy", "y", "lse", *tail),
        ],
    )


def cases() -> Iterator[Case]:
    for form in host.PRECISIONS:
        for fold in (1, 4):
            yield from linear(2, 400, 120, form, fold)
        for sizes in ((2, 120, 84), (2, 84, 10), (1, 3, 5), (1, 1, 1), (2, 784, 33), (4, 64, 64)):
            # one number: there is no larger one to be relative to
            if form != "tf32" or sizes != (1, 1, 1):
                yield from linear(*sizes, form)
        for fold in (1, 4):
            yield from conv(2, 6, 14, 14, 16, 5, 5, 1, form, fold)
        yield from conv(1, 8, 9, 7, 12, 3, 3, 1, form)
        yield from conv(2, 3, 8, 11, 7, 3, 2, 2, form)
        yield from conv(1, 17, 11, 13, 34, 3, 3, 2, form)
        yield from conv(1, 33, 9, 12, 18, 1, 1, 2, form)
        yield from conv(2, 24, 10, 10, 72, 3, 3, 1, form, 2)  # several blocks of every kind
        yield from inside(1, 17, 11, 13, 34, 3, 3, 2, 1, 1, form)
        yield from inside(1, 20, 8, 12, 18, 3, 5, 1, 1, 2, form)
        yield from inside(1, 5, 10, 9, 7, 4, 3, 3, 2, 1, form)
    yield from conv(2, 1, 32, 32, 6, 5, 5, 1)
    yield from conv(1, 1, 1, 1, 1, 1, 1, 1)
    yield from conv(1, 32, 12, 12, 64, 3, 3, 1)
    yield from conv(1, 5, 9, 10, 3, 1, 1, 3)
    for fold in (1, 2, 8):
        yield from general(2, 6, 7, 9, 9, 3, 2, 1, 1, 3, fold=fold)
    yield from general(1, 8, 9, 12, 8, 3, 3, 1, 1, 8)  # each channel by itself
    yield from general(2, 3, 9, 10, 6, 3, 3, 2, 1, 3)
    yield from general(1, 4, 15, 13, 5, 3, 3, 1, 2, 1)
    yield from general(2, 4, 12, 15, 10, 2, 3, 2, 3, 2)
    yield from general(1, 20, 6, 11, 24, 3, 1, 3, 2, 4)
    yield from general(1, 6, 1, 23, 4, 1, 4, 2, 3, 2)  # of signals
    yield from general(1, 2, 5, 5, 2, 5, 5, 1, 1, 2)
    yield from general(1, 2, 1, 3, 2, 1, 1, 2, 1, 2)
    sizes = (2, 1, 32, 32, 6, 5, 5, 1)
    pooled = 2 * 6 * 14 * 14 * LANES
    yield Case(
        "conv, ReLU and max-pool in one launch",
        [
            w("y", pooled, "zero"),
            w("a", pooled, "zero"),
            w("x", 2 * 32 * 32 * LANES),
            p("w", 6 * 25),
            p("b", 6),
            w("c", 2 * 6 * 28 * 28 * LANES, "zero"),
            w("dx", 2 * 6 * 28 * 28 * LANES, "zero"),
            w("dy", pooled),
        ],
        [
            (
                ("conv2d_relu_maxpool_forward", "y", "a", "x", "w", "b", *sizes, 2, 2, 2),
                [
                    ("conv2d_forward", "c", "x", "w", "b", 0, *sizes, 1),
                    ("maxpool_forward", "y", "a", "c", 12, 28, 28, 2, 2, 2),
                ],
            ),
            ("maxpool_backward", "dx", "dy", "a", "y", 12, 28, 28, 2, 2, 2, 1),
        ],
    )
    for pool in ((12, 28, 28, 2, 2, 2), (4, 7, 9, 3, 2, 2), (2, 5, 5, 3, 3, 1)):
        yield from pools(*pool)
    for n in (16, 4096, 1008):
        yield from elementwise(n)
    for G, F in ((2, 10), (1, 3), (2, 100), (13, 76), (3, 300)):
        yield from losses(G, F)
    for G, F, fold in ((2, 10, 1), (5, 128, 4), (11, 200, 8), (1, 7, 2)):
        yield from normed(G, F, fold)
    for sizes in ((2, 5, 1), (2, 3, 35), (1, 4, 33, 11), (3, 2, 100, 37), (2, 1, 1200)):
        yield from channels(*sizes)
    for sizes in ((50, 7, 5), (700, 19, 300), (3, 40, 1)):
        yield from rows_of_a_table(*sizes)
    yield from others()


# --- running --------------------------------------------------------------------------------------


def tree(buffers: np.ndarray) -> np.ndarray:
    """The sum over the first axis along the tree, in float32."""
    n = len(buffers)
    if n == 1:
        return buffers[0]
    return tree(buffers[: split(n)]) + tree(buffers[split(n) :])


def layout(case: Case) -> dict[int, int]:
    """Places the operands; floats of each space."""
    used = {host.WORK: 0, host.PARAMS: 0, host.GRADS: 0}
    for o in case.operands:
        o.at = used[o.space]
        used[o.space] += -(-o.floats // 16) * 16
    return {space: max(n, 16) for space, n in used.items()}


def encode(case: Case, records: list[tuple], lib: host.OpTable) -> np.ndarray:
    """The program for a library, that of the CPU or that of GPUs."""
    places = {o.name: o.space << 56 | 4 * o.at for o in case.operands}
    table = np.zeros((len(records), host.library().record), np.int64)
    for row, (op, *args) in zip(table, records, strict=True):
        name, _, dtype = op.partition(":")
        row[0] = host.header(lib.codes[name], dtype=dtype or "fp32")
        for i, a in enumerate(args, 1):
            row[i] = (
                places[a]
                if isinstance(a, str)
                else host.float_bits(a)
                if isinstance(a, float)
                else a
            )
    return table


def of(records: list[tuple], gpu: bool) -> list[tuple]:
    """The program as one of them runs it: (a, [b, c]) is a on a GPU, b and c on the CPU."""
    out = []
    for r in records:
        if isinstance(r[0], tuple):
            out += [r[0]] if gpu else r[1]
        else:
            out.append(r)
    return out


def run_case(gpu: Gpu, case: Case, shards: int, rng: np.random.Generator) -> dict[str, float]:
    """Errors of all operands that were written, relative to their largest number; 0 or 1 where
    bits must be equal.
    """
    sizes = layout(case)
    work = host.aligned((shards, sizes[host.WORK]))
    params = host.aligned(sizes[host.PARAMS])
    params[:] = rng.standard_normal(len(params))
    for o in case.operands:
        if o.space == host.WORK and o.fill.startswith(("normal", "hidden")):
            numbers = rng.standard_normal((shards, o.floats))
            if o.fill != "normal":
                numbers[rng.random(numbers.shape) < 0.3] = -np.inf
                numbers[:, :: int(o.fill.split()[1])] = -np.inf
            work[:, o.at : o.at + o.floats] = numbers
    samples = SHARD * shards - 11
    features = max([r[3] for r in case.records if r[0] == "input"], default=4)
    channels = max([r[4] for r in case.records if r[0] == "input"], default=1)
    images = rng.integers(0, 256, (100, features)).astype(np.uint8)
    arrays = [
        rng.integers(0, case.classes, 100).astype(np.int32),
        rng.standard_normal((100, 5)).astype(np.float32),
    ]
    table_of_arrays = np.array([a.ctypes.data for a in arrays], np.int64)
    rows = rng.integers(0, 100, SHARD * shards).astype(np.int64)
    scale, shift = (rng.standard_normal(channels).astype(np.float32) for _ in range(2))
    grads = host.aligned((shards, sizes[host.GRADS]))

    # the CPU, shard by shard
    lib = host.library()
    table = encode(case, of(case.records, False), lib)
    mine = host.aligned(work.shape)
    mine[:] = work
    for s in range(shards):
        context = host.Context(seed=7, step=3, first=SHARD * s, loss_scale=4.0)
        context.valid = min(SHARD, samples - SHARD * s)
        context.images, context.bytes, context.arrays = (
            images.ctypes.data,
            1,
            table_of_arrays.ctypes.data,
        )
        context.rows = rows[SHARD * s :].ctypes.data
        context.scale, context.shift = scale.ctypes.data, shift.ctypes.data
        bases = np.array(
            [0, params.ctypes.data, grads[s].ctypes.data, mine[s].ctypes.data], np.int64
        )
        assert lib.run(table.ctypes.data, len(table), context, bases.ctypes.data) < 0
    wanted = tree(grads)

    # the GPU, all at once
    kept = {}
    held: list[int] = []

    def up(array: np.ndarray) -> int:
        at = gpu.allocate(array.nbytes)
        held.append(at)
        gpu.upload(at, array)
        kept[at] = array
        return at

    context = StepContext(
        seed=7, step=3, first=0, samples=samples, shard_size=SHARD, bytes=1, loss_scale=4.0
    )
    there = np.array([up(a) for a in arrays], np.int64)
    context.images, context.arrays, context.rows = up(images), up(there), up(rows)
    context.scale, context.shift = up(scale), up(shift)
    told = np.frombuffer(bytes(context), np.uint8)
    table = encode(case, of(case.records, True), library())
    buffers = -(-shards // case.fold)
    theirs = np.zeros((buffers, sizes[host.GRADS]), np.float32)
    step = GpuStep(
        program=table.ctypes.data,
        records=len(table),
        params=up(params),
        grads=up(theirs),
        grad_floats=sizes[host.GRADS],
        work=up(work),
        work_floats=sizes[host.WORK],
        context=up(told),
        flag=up(np.ones(4, np.int32)),
        shards=shards,
        fold=case.fold,
        accumulate=0,
    )
    step.scratch = gpu.allocate(max(4 * gpu.scratch(step), 16))
    held.append(step.scratch)
    gpu.run(step)
    got = np.zeros_like(work)
    gpu.download(got, step.work)
    gpu.download(theirs, step.grads)
    gpu.synchronize()
    for at in held:
        gpu.free(at)
    summed = tree(theirs)

    errors = {}
    gpu_names = {a for r in of(case.records, True) for a in r[1:] if isinstance(a, str)}
    for o in case.operands:
        if o.name not in gpu_names or o.space == host.PARAMS or o.name == "s":
            continue
        if o.space == host.GRADS:
            a, b = summed[o.at : o.at + o.floats], wanted[o.at : o.at + o.floats]
        else:
            a, b = got[:, o.at : o.at + o.floats], mine[:, o.at : o.at + o.floats]
        if o.exact or o.name in ("l", "a"):
            errors[o.name] = float(not np.array_equal(a.view(np.int32), b.view(np.int32)))
        elif not np.isfinite(a).all():
            errors[o.name] = float("inf")
        else:
            errors[o.name] = float(
                np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30)
            )
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--json", help="write all errors here")
    parser.add_argument("--shards", default="1,3,8", help="how many shards a launch has")
    parser.add_argument("--after", help="go on after this one, as a line of FAILED names it")
    options = parser.parse_args()
    gpu = Gpu(0)
    failed, results, skipping = 0, {}, options.after is not None
    for number, (case, shards) in enumerate(
        (c, int(s)) for c in cases() for s in options.shards.split(",")
    ):
        if options.names and not any(n in case.name for n in options.names):
            continue
        if skipping:
            skipping = f"{case.name}, {shards} shards" != options.after
        else:
            lost = False
            try:
                errors = run_case(gpu, case, shards, np.random.default_rng(number))
            except Exception as problem:
                errors = {str(problem)[:200]: float("inf")}
                lost = LOST.search(str(problem)) is not None
            bad = {n: e for n, e in errors.items() if not e <= case.tolerance}
            failed += bool(bad)
            results[f"{case.name}, {shards} shards"] = {n: min(e, 1e30) for n, e in errors.items()}
            if bad:
                print(f"FAILED {case.name}, {shards} shards: {bad}", flush=True)
            if lost:
                print("the GPU can no longer be used by this process; go on with --after")
                return 3
    worst = max((max(e.values()) for e in results.values() if e), default=0.0)
    print(f"{len(results)} cases, {failed} failed; worst {worst:.1e}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(results, f, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
