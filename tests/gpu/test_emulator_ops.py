"""The emulated GPU's instructions, one by one, on hand-written PTX, against numpy.

Not the driver's streams and checks (test_emulator.py), and not kernels of this project.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu import emulated
from gpu.ptx_bench import Gpu

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="no C compiler")

N = 5 * 128 - 37  # lanes that do not fill the last warp
LETTER = {2: "h", 4: "r", 8: "d"}
DECLARE = ".reg .b16 %h<12>;\n.reg .b32 %r<32>;\n.reg .b64 %d<32>;\n.reg .pred %p<8>;\n"


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


def apply(gpu: Gpu, code: str, out: object, *inputs: np.ndarray, before: str = "") -> np.ndarray:
    """Runs `code`, which computes Y from A, B, C, for each element of the inputs."""
    n = len(inputs[0])
    names, text = {}, ""
    for i, x in enumerate(inputs):
        size = x.dtype.itemsize
        names["ABC"[i]] = f"%{LETTER[size]}{i + 4}"
        text += f"ld.param.u64 %d1, [p{i + 1}];\nmad.wide.u32 %d1, %r1, {size}, %d1;\n"
        text += f"ld.global.b{size * 8} {names['ABC'[i]]}, [%d1];\n"
    size = np.dtype(out).itemsize
    names["Y"] = f"%{LETTER[size]}10"
    for name, register in names.items():
        code = code.replace(f"${name}", register)
    k = gpu.kernel(
        DECLARE
        + "mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ntid.x;\nmad.lo.s32 %r1, "
        "%r2, %r3, %r1;\n"
        + f"setp.ge.u32 %p1, %r1, {n};\n@%p1 bra $END;\n"
        + text
        + f"mov.b{size * 8} {names['Y']}, 0;\n{code};\n"
        + f"ld.param.u64 %d1, [p0];\nmad.wide.u32 %d1, %r1, {size}, %d1;\n"
        f"st.global.b{size * 8} [%d1], {names['Y']};\n$END:\nret;",
        "u64 " * (1 + len(inputs)),
        before,
    )
    y = gpu.empty(n * size)
    gpu.launch(k, y, *[gpu.put(x) for x in inputs], grid=(n + 127) // 128, block=128)
    return gpu.get(y, n, out)


def floats(seed: int, n: int = N, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10 ** rng.uniform(-spread, spread, n)).astype(np.float32)
    x[:12] = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.4e38, 0.5, 2.5]
    return x


def ints(seed: int, dtype: object, n: int = N) -> np.ndarray:
    info = np.iinfo(dtype)
    x = np.random.default_rng(seed).integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    x[:5] = [0, 1, info.max, info.min, info.max - 1]
    return x


def same(got: np.ndarray, want: np.ndarray) -> None:
    """The same bits, except that one NaN is as good as another."""
    nan = np.isnan(want) if want.dtype.kind == "f" else np.zeros(len(want), bool)
    bits = f"u{want.dtype.itemsize}"
    wrong = (got.view(bits) != want.view(bits)) & ~nan
    if nan.any():
        wrong |= nan & ~np.isnan(got)
    assert not wrong.any(), (np.flatnonzero(wrong)[:5], got[wrong][:5], want[wrong][:5])


INT_OPS = {
    "add.s": lambda a, b: a + b,
    "sub.s": lambda a, b: a - b,
    "mul.lo.s": lambda a, b: a * b,
    "and.b": lambda a, b: a & b,
    "or.b": lambda a, b: a | b,
    "xor.b": lambda a, b: a ^ b,
    "min.s": np.minimum,
    "max.s": np.maximum,
}


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_integers(gpu: Gpu, bits: int) -> None:
    a, b = ints(1, f"i{bits // 8}"), ints(2, f"i{bits // 8}")
    a[20:40] = b[20:40]
    with np.errstate(all="ignore"):
        for op, reference in INT_OPS.items():
            same(apply(gpu, f"{op}{bits} $Y, $A, $B", a.dtype, a, b), reference(a, b))
        same(apply(gpu, f"not.b{bits} $Y, $A", a.dtype, a), ~a)
        same(apply(gpu, f"neg.s{bits} $Y, $A", a.dtype, a), -a)
        same(apply(gpu, f"abs.s{bits} $Y, $A", a.dtype, a), np.abs(a))
        u, v = a.view(f"u{bits // 8}"), b.view(f"u{bits // 8}")
        same(apply(gpu, f"min.u{bits} $Y, $A, $B", u.dtype, u, v), np.minimum(u, v))
        same(apply(gpu, f"mad.lo.s{bits} $Y, $A, $B, $C", a.dtype, a, b, a), a * b + a)
        small = v % 7 + 1
        same(apply(gpu, f"div.u{bits} $Y, $A, $B", u.dtype, u, small), u // small)
        same(apply(gpu, f"rem.u{bits} $Y, $A, $B", u.dtype, u, small), u % small)
        signed = small.astype(a.dtype) * np.where(a & 4, 1, -1).astype(a.dtype)
        quotient = (
            np.abs(a.astype(object)) // np.abs(signed.astype(object)) * np.sign(a.astype(object))
        ).astype(object) * np.sign(signed.astype(object))
        wrapped = np.array(
            [(int(q) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for q in quotient], a.dtype
        )
        same(apply(gpu, f"div.s{bits} $Y, $A, $B", a.dtype, a, signed), wrapped)
        same(apply(gpu, f"rem.s{bits} $Y, $A, $B", a.dtype, a, signed), a - wrapped * signed)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(gpu: Gpu, bits: int) -> None:
    a = ints(3, f"i{bits // 8}")
    by = (np.arange(N) % (bits + 20)).astype(np.uint32)
    wide, unsigned = a.astype(object), a.view(f"u{bits // 8}").astype(object)
    left = np.array(
        [(int(x) << int(s)) % 2**bits for x, s in zip(unsigned, by, strict=True)], f"u{bits // 8}"
    )
    same(apply(gpu, f"shl.b{bits} $Y, $A, $B", left.dtype, a, by), left)
    right = np.array([int(x) >> int(s) for x, s in zip(unsigned, by, strict=True)], left.dtype)
    same(apply(gpu, f"shr.u{bits} $Y, $A, $B", left.dtype, a, by), right)
    signed = np.array([int(x) >> int(s) for x, s in zip(wide, by, strict=True)], a.dtype)
    same(apply(gpu, f"shr.s{bits} $Y, $A, $B", a.dtype, a, by), signed)


def test_products(gpu: Gpu) -> None:
    a, b, c = ints(4, np.int32), ints(5, np.int32), ints(6, np.int64)
    ua, ub = a.view(np.uint32), b.view(np.uint32)
    wide, uwide = a.astype(np.int64) * b, ua.astype(np.uint64) * ub
    same(apply(gpu, "mul.wide.s32 $Y, $A, $B", np.int64, a, b), wide)
    same(apply(gpu, "mul.wide.u32 $Y, $A, $B", np.uint64, ua, ub), uwide)
    same(apply(gpu, "mul.hi.s32 $Y, $A, $B", np.int32, a, b), (wide >> 32).astype(np.int32))
    same(
        apply(gpu, "mul.hi.u32 $Y, $A, $B", np.uint32, ua, ub),
        (uwide >> np.uint64(32)).astype(np.uint32),
    )
    with np.errstate(over="ignore"):
        same(apply(gpu, "mad.wide.s32 $Y, $A, $B, $C", np.int64, a, b, c), wide + c)
    u, v = c.view(np.uint64), c.view(np.uint64)[::-1].copy()
    high = np.array([int(x) * int(y) >> 64 for x, y in zip(u, v, strict=True)], np.uint64)
    same(apply(gpu, "mul.hi.u64 $Y, $A, $B", np.uint64, u, v), high)
    h = a.astype(np.int16)
    same(
        apply(gpu, "mul.wide.s16 $Y, $A, $B", np.int32, h, h[::-1].copy()),
        h.astype(np.int32) * h[::-1],
    )


def test_bits(gpu: Gpu) -> None:
    a, b = ints(7, np.uint32), ints(8, np.uint32)
    same(
        apply(gpu, "popc.b32 $Y, $A", np.uint32, a),
        np.array([x.bit_count() for x in a.tolist()], np.uint32),
    )
    same(
        apply(gpu, "clz.b32 $Y, $A", np.uint32, a),
        np.array([32 - x.bit_length() for x in a.tolist()], np.uint32),
    )
    same(
        apply(gpu, "brev.b32 $Y, $A", np.uint32, a),
        np.array([int(f"{x:032b}"[::-1], 2) for x in a.tolist()], np.uint32),
    )
    rotated = np.array([(x << 13 | x >> 19) & 0xFFFFFFFF for x in a.tolist()], np.uint32)
    same(apply(gpu, "shf.l.wrap.b32 $Y, $A, $A, 13", np.uint32, a), rotated)
    same(apply(gpu, "bfe.u32 $Y, $A, 5, 9", np.uint32, a), a >> np.uint32(5) & np.uint32(511))
    swapped = np.array(
        [int.from_bytes(x.to_bytes(4, "little"), "big") for x in a.tolist()], np.uint32
    )
    same(apply(gpu, "prmt.b32 $Y, $A, $A, 0x0123", np.uint32, a), swapped)
    same(apply(gpu, "lop3.b32 $Y, $A, $B, $A, 0x3c", np.uint32, a, b), a ^ b)
    mask = np.uint32(0xFF00)
    same(
        apply(gpu, "bfi.b32 $Y, $A, $B, 8, 8", np.uint32, a, b),
        b & ~mask | (a & np.uint32(255)) << np.uint32(8),
    )
    pair = apply(gpu, "mov.b32 {%h1, %h2}, $A; mov.b32 $Y, {%h2, %h1}", np.uint32, a)
    same(pair, a >> np.uint32(16) | a << np.uint32(16))
    d = ints(9, np.uint64)
    swap = apply(gpu, "mov.b64 {%r20, %r21}, $A; mov.b64 $Y, {%r21, %r20}", np.uint64, d)
    same(swap, d >> np.uint64(32) | d << np.uint64(32))


@pytest.mark.parametrize(
    "dtype", [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64]
)
def test_comparisons(gpu: Gpu, dtype: type) -> None:
    kind = np.dtype(dtype)
    a, b = (ints(s, dtype) if kind.kind in "iu" else floats(s).astype(dtype) for s in (10, 11))
    a[50:90] = b[50:90]
    t = f"{ {'i': 's', 'u': 'u', 'f': 'f'}[kind.kind] }{kind.itemsize * 8}"
    for name, reference in (
        ("lt", a < b),
        ("le", a <= b),
        ("gt", a > b),
        ("ge", a >= b),
        ("eq", a == b),
    ):
        got = apply(gpu, f"setp.{name}.{t} %p2, $A, $B; selp.b32 $Y, 1, 0, %p2", np.uint32, a, b)
        same(got, reference.astype(np.uint32))
    ordered = ~(np.isnan(a) | np.isnan(b)) if kind.kind == "f" else np.ones(N, bool)
    got = apply(gpu, f"setp.ne.{t} %p2, $A, $B; selp.b32 $Y, 1, 0, %p2", np.uint32, a, b)
    same(got, ((a != b) & ordered).astype(np.uint32))
    if kind.kind == "f":
        for name, reference in (
            ("ltu", ~(a >= b)),
            ("geu", ~(a < b)),
            ("neu", a != b),
            ("nan", ~ordered),
            ("num", ordered),
        ):
            got = apply(
                gpu, f"setp.{name}.{t} %p2, $A, $B; selp.b32 $Y, 1, 0, %p2", np.uint32, a, b
            )
            same(got, reference.astype(np.uint32))
    both = apply(
        gpu, f"setp.lt.{t} %p3, $B, $A; setp.lt.and.{t} %p1|%p2, $A, $B, !%p3; selp.b32 $Y, 2, " "4, %p1; "
            f"@%p2 add.s32 $Y, $Y, 1",
        np.uint32, a, b,
    )  # fmt: skip
    p, q = (a < b) & ~(b < a), ~(a < b) & ~(b < a)
    same(both, (np.where(p, 2, 4) + q).astype(np.uint32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float_arithmetic(gpu: Gpu, dtype: type) -> None:
    a, b = floats(12).astype(dtype), floats(13).astype(dtype)
    b[:12] = b[:12][::-1].copy()
    t = "f32" if dtype is np.float32 else "f64"
    with np.errstate(all="ignore"):
        for op, reference in (("add", a + b), ("sub", a - b), ("mul", a * b), ("div.rn", a / b)):
            same(apply(gpu, f"{op}.{t} $Y, $A, $B", dtype, a, b), reference)
        same(apply(gpu, f"sqrt.rn.{t} $Y, $A", dtype, a), np.sqrt(a))
        same(apply(gpu, f"rcp.rn.{t} $Y, $A", dtype, a), dtype(1) / a)
        same(apply(gpu, f"neg.{t} $Y, $A", dtype, a), -a)
        same(apply(gpu, f"abs.{t} $Y, $A", dtype, a), np.abs(a))
        # the sign of a zero: below
        same(apply(gpu, f"min.{t} $Y, $A, $B", dtype, a, b)[2:], np.fmin(a, b)[2:])
        same(apply(gpu, f"max.{t} $Y, $A, $B", dtype, a, b)[2:], np.fmax(a, b)[2:])
    zeros = np.array([0.0, -0.0], dtype)
    same(apply(gpu, f"min.{t} $Y, $A, $B", dtype, zeros, -zeros), np.array([-0.0, -0.0], dtype))
    same(apply(gpu, f"max.{t} $Y, $A, $B", dtype, zeros, -zeros), np.array([0.0, 0.0], dtype))


def test_fma_rounds_once(gpu: Gpu) -> None:
    a, b, c = floats(14), floats(15), floats(16)
    a[20:] = 1 + 2.0**-12 * (1 + np.arange(N - 20) % 100)
    b[20:], c[20:] = a[20:], -1
    with np.errstate(all="ignore"):
        exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
        same(
            apply(gpu, "fma.rn.f32 $Y, $A, $B, $C", np.float32, a, b, c)[20:],
            exact.astype(np.float32)[20:],
        )


def half_of(dtype: str, x: np.ndarray) -> np.ndarray:
    """float64 rounded to the nearest float16 or bfloat16, as its bits."""
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32)  # the tests give values that are exact in float32
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_half(dtype: str, bits: np.ndarray) -> np.ndarray:
    return (
        bits.view(np.float16).astype(np.float32)
        if dtype == "f16"
        else (bits.astype(np.uint32) << 16).view(np.float32)
    )


def same_half(dtype: str, got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(from_half(dtype, want))
    assert (got == want)[~nan].all() and np.isnan(from_half(dtype, got[nan])).all()


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_small_floats(gpu: Gpu, t: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    values = from_half(t, every)
    same(apply(gpu, f"cvt.f32.{t} $Y, $A", np.float32, every), values)
    with np.errstate(all="ignore"):
        beside = [np.nextafter(values, np.float32(to)) for to in (np.inf, -np.inf)]
        near = np.concatenate([values, *beside])
        middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        near = np.concatenate(
            [near, middle, np.nextafter(middle, np.float32(0)), floats(17, 4096, 30)]
        )
        same_half(t, apply(gpu, f"cvt.rn.{t}.f32 $Y, $A", np.uint16, near), half_of(t, near))
        rng = np.random.default_rng(18)
        a, b, c = (rng.integers(0, 65536, 20000, dtype=np.uint16) for _ in range(3))
        fa, fb, fc = (from_half(t, x) for x in (a, b, c))
        for op, exact in (("add", fa + fb), ("sub", fa - fb), ("mul", fa * fb)):
            same_half(t, apply(gpu, f"{op}.rn.{t} $Y, $A, $B", np.uint16, a, b), half_of(t, exact))
        pa = a[::2].astype(np.uint32) | a[1::2].astype(np.uint32) << 16
        pb = b[::2].astype(np.uint32) | b[1::2].astype(np.uint32) << 16
        pairs = apply(gpu, f"mul.rn.{t}x2 $Y, $A, $B", np.uint32, pa, pb).view(np.uint16)
        same_half(t, pairs, half_of(t, fa * fb))
        # one rounding: a product just above the middle of two values, and a tiny c that decides
        got = apply(gpu, f"fma.rn.{t} $Y, $A, $B, $C", np.uint16, a, b, c)
        exact = fa.astype(np.longdouble) * fb + fc
        low, high = (
            np.nextafter(exact.astype(np.float32), np.float32(d)) for d in (-np.inf, np.inf)
        )
        sure = half_of(t, low) == half_of(t, high)
        assert sure.mean() > 0.9
        same_half(t, got[sure], half_of(t, exact.astype(np.float32))[sure])
    # the product lies in the middle of two values and a c far below it decides: float64 alone would
    # lose c
    eps, tiny = {"f16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 2.0**-100)}[t]
    x, y = half_of(t, np.full(3, 1 + eps)), half_of(t, np.full(3, 1.5))
    got = apply(
        gpu, f"fma.rn.{t} $Y, $A, $B, $C", np.uint16, x, y, half_of(t, np.array([tiny, -tiny, 0]))
    )
    np.testing.assert_array_equal(from_half(t, got), 1.5 + eps * np.array([2, 1, 2]))
    pair = apply(gpu, f"cvt.rn.{t}x2.f32 $Y, $A, $B", np.uint32, values[:1000], values[1000:2000])
    same_half(t, (pair >> 16).astype(np.uint16), every[:1000])
    same_half(t, pair.astype(np.uint16), every[1000:2000])


def test_conversions(gpu: Gpu) -> None:
    f = floats(19, spread=12)
    for bits in (32, 64):
        for sign, dtype in (("s", f"i{bits // 8}"), ("u", f"u{bits // 8}")):
            info = np.iinfo(dtype)
            for mode, fn in (
                ("rzi", np.trunc),
                ("rni", np.rint),
                ("rmi", np.floor),
                ("rpi", np.ceil),
            ):
                want = [0 if np.isnan(x) else min(max(fn(float(x)), info.min), info.max) for x in f]
                want = np.array([int(x) for x in want], dtype)
                same(apply(gpu, f"cvt.{mode}.{sign}{bits}.f32 $Y, $A", dtype, f), want)
            x = ints(20, dtype)
            same(apply(gpu, f"cvt.rn.f32.{sign}{bits} $Y, $A", np.float32, x), x.astype(np.float32))
            same(apply(gpu, f"cvt.rn.f64.{sign}{bits} $Y, $A", np.float64, x), x.astype(np.float64))
    x = ints(21, np.int32)
    same(apply(gpu, "cvt.s32.s8 $Y, $A", np.int32, x), x.astype(np.int8).astype(np.int32))
    same(apply(gpu, "cvt.u64.u32 $Y, $A", np.uint64, x), x.view(np.uint32).astype(np.uint64))
    same(apply(gpu, "cvt.s64.s32 $Y, $A", np.int64, x), x.astype(np.int64))
    same(apply(gpu, "cvt.u16.u32 $Y, $A", np.uint16, x), x.astype(np.uint16))
    same(apply(gpu, "cvt.sat.u8.s32 $Y, $A", np.uint32, x), np.clip(x, 0, 255).astype(np.uint32))
    d = floats(22).astype(np.float64) * 1.1
    with np.errstate(all="ignore"):
        same(apply(gpu, "cvt.rn.f32.f64 $Y, $A", np.float32, d), d.astype(np.float32))
        same(apply(gpu, "cvt.f64.f32 $Y, $A", np.float64, f), f.astype(np.float64))
        same(apply(gpu, "cvt.rni.f32.f32 $Y, $A", np.float32, f), np.rint(f))
        tf = (f.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
        finite = np.isfinite(f)
        same(apply(gpu, "cvt.rna.tf32.f32 $Y, $A", np.float32, f)[finite], tf[finite])


def test_approximations(gpu: Gpu) -> None:
    x = np.linspace(-30, 30, 4001, dtype=np.float32)
    wide = x.astype(np.float64)

    def close(code: str, want: np.ndarray, inputs: np.ndarray, tolerance: float = 3e-7) -> None:
        got = apply(gpu, code, np.float32, inputs)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-37)

    close("ex2.approx.f32 $Y, $A", 2**wide, x)
    close("ex2.approx.ftz.f32 $Y, $A", 2**wide, x)
    positive = np.abs(x) + np.float32(0.01)
    close("lg2.approx.f32 $Y, $A", np.log2(positive.astype(np.float64)), positive)
    close("rsqrt.approx.f32 $Y, $A", 1 / np.sqrt(positive.astype(np.float64)), positive)
    close("sqrt.approx.f32 $Y, $A", np.sqrt(positive.astype(np.float64)), positive)
    close("rcp.approx.f32 $Y, $A", 1 / positive.astype(np.float64), positive)
    close("sin.approx.f32 $Y, $A", np.sin(wide), x)
    close("cos.approx.f32 $Y, $A", np.cos(wide), x)
    close("tanh.approx.f32 $Y, $A", np.tanh(wide), x)
    special = np.array([np.inf, -np.inf, np.nan, 128, -150, -126, 0, -0.0], np.float32)
    with np.errstate(over="ignore"):
        want = np.exp2(special.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(
        apply(gpu, "ex2.approx.f32 $Y, $A", np.float32, special), want, rtol=2e-7
    )
    subnormal = np.array([1e-40, -1e-40, 1.5], np.float32)
    np.testing.assert_array_equal(
        apply(gpu, "mul.ftz.f32 $Y, $A, 0f3F800000", np.float32, subnormal),
        np.array([0, -0.0, 1.5], np.float32),
    )
    np.testing.assert_array_equal(
        apply(gpu, "mul.f32 $Y, $A, 0f3F800000", np.float32, subnormal), subnormal
    )


@pytest.mark.parametrize("mode,offset", [("up", 3), ("down", 5), ("bfly", 9), ("idx", 7)])
def test_shuffles(gpu: Gpu, mode: str, offset: int) -> None:
    x = np.arange(128, dtype=np.uint32) * 3 + 1
    clamp = 0 if mode == "up" else 31
    got = apply(
        gpu,
        f"shfl.sync.{mode}.b32 $Y|%p2, $A, {offset}, {clamp}, -1; @%p2 add.s32 $Y, $Y, 1000",
        np.uint32,
        x,
    )
    lane = np.arange(128) % 32
    source = {
        "up": lane - offset,
        "down": lane + offset,
        "bfly": lane ^ offset,
        "idx": np.full(128, offset),
    }[mode]
    inside = (source >= 0) & (source < 32)
    source = np.where(inside, source, lane) + np.arange(128) // 32 * 32
    np.testing.assert_array_equal(got, x[source] + 1000 * inside)
    # in segments of 8 lanes
    clamp = 0x1800 if mode == "up" else 0x181F
    got = apply(gpu, f"shfl.sync.{mode}.b32 $Y, $A, {offset % 8}, {clamp}, -1", np.uint32, x)
    eight, k = lane % 8, offset % 8
    source = {"up": eight - k, "down": eight + k, "bfly": eight ^ k, "idx": np.full(128, k)}[mode]
    source = np.where((source >= 0) & (source < 8), source, eight) + np.arange(128) // 8 * 8
    np.testing.assert_array_equal(got, x[source])


def test_votes(gpu: Gpu) -> None:
    x = ints(23, np.uint32, 128)
    x[32:64] = 5
    warps = x.reshape(4, 32)
    ballot = [sum(int(v & 1) << i for i, v in enumerate(w)) for w in warps]
    code = "and.b32 %r20, $A, 1; setp.eq.u32 %p2, %r20, 1; vote.sync.{} ; {}"
    got = apply(gpu, code.format("ballot.b32 $Y, %p2, -1", ""), np.uint32, x)
    np.testing.assert_array_equal(got, np.repeat(np.array(ballot, np.uint32), 32))
    for name, fn in (("all", np.all), ("any", np.any)):
        got = apply(
            gpu, code.format(f"{name}.pred %p3, %p2, -1", "selp.b32 $Y, 1, 0, %p3"), np.uint32, x
        )
        np.testing.assert_array_equal(got, np.repeat([int(fn(w & 1)) for w in warps], 32))
    got = apply(gpu, "and.b32 $A, $A, 3; match.any.sync.b32 $Y, $A, -1", np.uint32, x)
    want = [sum(1 << j for j in range(32) if w[j] & 3 == v & 3) for w in warps for v in w]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))
    got = apply(gpu, "redux.sync.add.u32 $Y, $A, -1", np.uint32, x)
    np.testing.assert_array_equal(
        got, np.repeat(warps.astype(np.uint64).sum(1).astype(np.uint32), 32)
    )
    got = apply(gpu, "redux.sync.min.s32 $Y, $A, -1", np.int32, x.view(np.int32))
    np.testing.assert_array_equal(got, np.repeat(warps.view(np.int32).min(1), 32))


LOOP = """
    mov.b32 %r20, 0; and.b32 %r21, $A, 31;
$L1: setp.ge.u32 %p2, %r20, %r21; @%p2 bra $L4;
    and.b32 %r22, %r20, 1; setp.eq.u32 %p3, %r22, 0; @%p3 bra $L2;
    add.s32 $Y, $Y, 3; setp.gt.u32 %p4, %r20, 20; @%p4 bra $L5; bra $L3;
$L2: add.s32 $Y, $Y, %r20;
$L3: add.s32 %r20, %r20, 1; bra $L1;
$L4: add.s32 $Y, $Y, 1000;
$L5: shfl.sync.idx.b32 %r23, $Y, 0, 31, -1; add.s32 $Y, $Y, %r23
"""


def test_divergence(gpu: Gpu) -> None:
    """Loops of different length, an if in them, a way out of the middle; then all lanes are
    together again.
    """
    x = ints(24, np.uint32, 128)

    def one(v: int) -> int:
        y = 0
        for i in range(v & 31):
            if i & 1:
                y += 3
                if i > 20:
                    return y
            else:
                y += i
        return y + 1000

    alone = np.array([one(v) for v in x.tolist()], np.uint32).reshape(4, 32)
    np.testing.assert_array_equal(apply(gpu, LOOP, np.uint32, x), (alone + alone[:, :1]).ravel())


FUNCTIONS = """
.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0) {
    .reg .b32 %r<3>; .reg .pred %p<2>;
    ld.param.u32 %r1, [twice_param_0];
    setp.gt.u32 %p1, %r1, 1000;
    @%p1 bra $L1;
    shl.b32 %r2, %r1, 1; st.param.b32 [func_retval0], %r2; ret;
$L1: st.param.b32 [func_retval0+0], %r1;
    ret;
}
.func (.param .b32 func_retval0) more(.param .b32 more_param_0, .param .align 4 .b8 more_param_1[8]) {
    .reg .b32 %r<6>;
    ld.param.u32 %r1, [more_param_0]; ld.param.u32 %r2, [more_param_1+4];
    { .param .b32 param0; st.param.b32 [param0], %r1; .param .b32 retval0;
      call.uni (retval0), twice, (param0); ld.param.b32 %r3, [retval0]; }
    add.s32 %r4, %r3, %r2; st.param.b32 [func_retval0], %r4; ret;
}
"""


def test_functions(gpu: Gpu) -> None:
    """Calls, in calls, on ways that not all lanes take."""
    x = ints(27, np.uint32, 200) % np.uint32(2000)
    code = """
    .param .b32 param0; .param .align 4 .b8 param1[8]; .param .b32 retval0;
    st.param.b32 [param0], $A; st.param.b32 [param1], 7; st.param.b32 [param1+4], 5;
    call.uni (retval0), more, (param0, param1); ld.param.b32 $Y, [retval0];
    """
    got = apply(
        gpu,
        "{" + code.strip().rstrip(";") + "; } and.b32 $Y, $Y, $Y",
        np.uint32,
        x,
        before=FUNCTIONS,
    )
    np.testing.assert_array_equal(got, np.where(x > 1000, x, 2 * x) + 5)


def test_jump_tables(gpu: Gpu) -> None:
    x = np.arange(64, dtype=np.uint32)
    code = (
        """
    and.b32 %r20, $A, 3; $T: .branchtargets $A0, $A1, $A2, $A1;
    brx.idx %r20, $T;
    $A0: add.s32 $Y, $A, 100; bra.uni $Z;
    $A1: add.s32 $Y, $A, 200; bra.uni $Z;
    $A2: mov.b32 $Y, 9;
    $Z: add.s32 $Y, $Y, 1
    """.replace("$A0", "$X0")
        .replace("$A1", "$X1")
        .replace("$A2", "$X2")
    )
    got = apply(gpu, code, np.uint32, x)
    np.testing.assert_array_equal(got, np.choose(x & 3, [x + 101, x + 201, 10, x + 201]))


@pytest.mark.parametrize(
    "t,k", [("bf16", 16), ("bf16", 8), ("f16", 16), ("f16", 8), ("tf32", 8), ("tf32", 4)]
)
@pytest.mark.parametrize("exact", [True, False])
def test_mma(gpu: Gpu, t: str, k: int, exact: bool) -> None:
    shape = f"m16n8k{k}"
    rng = np.random.default_rng(25)

    def numbers(*size: int) -> np.ndarray:
        x = (
            rng.integers(-8, 9, size).astype(np.float32)
            if exact
            else rng.standard_normal(size).astype(np.float32)
        )
        if t == "tf32":
            return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return from_half(t, half_of(t, x.ravel())).reshape(size)

    a, b, c = numbers(16, k), numbers(k, 8), rng.integers(-99, 99, (16, 8)).astype(np.float32)
    lane = np.arange(32)
    g, q = lane // 4, lane % 4
    ra, rb = [], []
    if t == "tf32":
        for j in range(k // 2):
            ra.append(a[g + j % 2 * 8, q + j // 2 * 4].view(np.uint32))
        for j in range(k // 4):
            rb.append(b[q + j * 4, g].view(np.uint32))
    else:

        def pack(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
            return half_of(t, lo).astype(np.uint32) | half_of(t, hi).astype(np.uint32) << 16

        for j in range(k // 4):
            row, col = g + j % 2 * 8, q * 2 + j // 2 * 8
            ra.append(pack(a[row, col], a[row, col + 1]))
        for j in range(k // 8):
            rb.append(pack(b[q * 2 + j * 8, g], b[q * 2 + j * 8 + 1, g]))
    rc = [c[g + j // 2 * 8, q * 2 + j % 2] for j in range(4)]
    regs = np.stack([*ra, *rb, *[x.view(np.uint32) for x in rc]])
    n, na, nb = len(regs), len(ra), len(rb)
    body = (
        DECLARE + "mov.u32 %r1, %laneid;\nld.param.u64 %d1, [p0];\nmad.wide.u32 %d1, %r1, 4, %d1;\n"
        "ld.param.u64 %d2, [p1];\nmad.wide.u32 %d2, %r1, 4, %d2;\n"
    )
    body += "".join(f"ld.global.b32 %r{i + 2}, [%d2+{128 * i}];\n" for i in range(n))
    names = [f"%r{i + 2}" for i in range(n)]
    lists = [
        ", ".join(x)
        for x in (
            ["%r20", "%r21", "%r22", "%r23"],
            names[:na],
            names[na : na + nb],
            names[na + nb :],
        )
    ]
    body += (
        f"mma.sync.aligned.{shape}.row.col.f32.{t}.{t}.f32 "
        + ", ".join(f"{{{x}}}" for x in lists)
        + ";\n"
    )
    body += "".join(f"st.global.b32 [%d1+{128 * i}], %r{20 + i};\n" for i in range(4)) + "ret;"
    y = gpu.empty(4 * 128)
    gpu.launch(gpu.kernel(body, "u64 u64"), y, gpu.put(regs))
    out = gpu.get(y, (4, 32), np.float32)
    got = np.empty((16, 8), np.float32)
    for j in range(4):
        got[g + j // 2 * 8, q * 2 + j % 2] = out[j]
    want = a.astype(np.float64) @ b + c
    if exact:
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


def test_atomics(gpu: Gpu) -> None:
    x = ints(26, np.uint32, 1000)
    k = gpu.kernel(
        DECLARE + """
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r1, %r2, %r3, %r1;
        setp.ge.u32 %p1, %r1, 1000; @%p1 bra $END;
        ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mad.wide.u32 %d2, %r1, 4, %d2; ld.global.u32 %r4, [%d2];
        and.b32 %r5, %r4, 7; mad.wide.u32 %d3, %r5, 4, %d1;
        red.relaxed.gpu.global.add.u32 [%d3], 1;
        atom.global.max.u32 %r6, [%d1+32], %r4;
        atom.global.min.s32 %r6, [%d1+36], %r4;
        atom.acquire.sys.global.add.f32 %r6, [%d1+40], 0f3F000000;
        atom.global.add.u64 %d4, [%d1+48], 3;
        cvt.u32.u64 %r7, %d4;
        rem.u32 %r8, %r7, 3; red.global.add.u32 [%d1+44], %r8;
        $END: ret;""",
        "u64 u64",
    )  # fmt: skip
    y = gpu.put(np.zeros(14, np.uint32))
    gpu.launch(k, y, gpu.put(x), grid=8, block=128)
    got = gpu.get(y, 14, np.uint32)
    np.testing.assert_array_equal(got[:8], np.bincount(x & 7, minlength=8))
    assert got[8] == x.max() and got[9:10].view(np.int32)[0] == min(0, x.view(np.int32).min())
    assert (
        got[10:11].view(np.float32)[0] == 500
        and got[11] == 0
        and got[12:14].view(np.uint64)[0] == 3000
    )
    cas = gpu.kernel(
        DECLARE + "ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; $L: ld.volatile.global.u32 %r2, " "[%d1]; "
            "add.s32 %r3, %r2, %r1;"
        "atom.global.cas.b32 %r4, [%d1], %r2, %r3; setp.ne.u32 %p1, %r4, %r2; @%p1 bra $L; ret;",
        "u64",
    )  # fmt: skip
    y = gpu.put(np.zeros(1, np.uint32))
    gpu.launch(cas, y, grid=16, block=64)
    assert gpu.get(y, 1, np.uint32)[0] == 16 * sum(range(64))


def test_parameters_of_all_sizes(gpu: Gpu) -> None:
    k = gpu.kernel(
        DECLARE + "ld.param.u64 %d1, [p1]; ld.param.s8 %r1, [p0]; ld.param.u16 %r2, [p2]; " "ld.param.f32 %r3, [p3]; "
            "ld.param.b64 %d2, [p4];"
        "st.global.b32 [%d1], %r1; st.global.b32 [%d1+4], %r2; st.global.b32 [%d1+8], %r3; "
        "st.global.b64 [%d1+16], %d2; ret;",
        "u8 u64 u16 f32 b64",
    )  # fmt: skip
    y = gpu.empty(24)
    gpu.launch(
        k,
        ctypes.c_int8(-3),
        y,
        ctypes.c_uint16(65535),
        ctypes.c_float(2.5),
        ctypes.c_int64(-7),
        block=1,
    )
    raw = gpu.get(y, 24, np.uint8)
    assert raw[:8].view(np.int32).tolist() == [-3, 65535] and raw[8:12].view(np.float32)[0] == 2.5
    assert raw[16:].view(np.int64)[0] == -7
