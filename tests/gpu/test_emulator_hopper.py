"""The emulated GPU's instructions of sm_90: mbarrier, TMA, wgmma, elect, stmatrix, on
hand-written PTX.

numpy places operands and boxes here, by the figures of the PTX ISA, independently of the emulator's
formulas. The kernels that use these instructions together are in hopper/ (test_gpu_hopper.py).
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from gpu import emulated
from gpu.ptx_bench import Failed, Gpu
from gpu.test_emulator import found

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="no C compiler")

REGS = ".reg .b32 %r<40>;\n.reg .b64 %d<16>;\n.reg .pred %p<8>;\n"
SHARED = ".extern .shared .align 1024 .b8 tile[];"
BARRIER = ".shared .align 8 .b64 bar;\n"


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


# --- barriers in shared memory --------------------------------------------------------------------


def wait(parity: object = 0, name: str = "bar") -> str:
    """A block as inline assembly has it. Several blocks of a kernel have the same labels."""
    return (
        f"{{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [{name}], "
        f"{parity}; @P1 bra DONE; bra LAB_WAIT; DONE: }}"
    )


def test_warps_pass_numbers_through_barriers() -> None:
    """Warp 1 reads what warp 0 has written, eight times through one place, in every order of the
    warps.
    """
    body = (
        REGS + ".shared .align 8 .b64 full;\n.shared .align 8 .b64 empty;\n.shared .align 4 .b8 "
        "tile[128];\n"
        "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; setp.ne.u32 %p1, %r1, 0; mov.u32 %r8, tile;"
        "@!%p1 mbarrier.init.shared.b64 [full], 32; @!%p1 mbarrier.init.shared.b64 [empty], 32; "
        "bar.sync 0;"
        "and.b32 %r2, %r1, 31; mad.lo.u32 %r8, %r2, 4, %r8; mov.u32 %r3, 0; setp.ge.u32 %p2, "
        "%r1, 32; @%p2 bra $READ;"
        "$WRITE: xor.b32 %r4, %r3, 1; " + wait("%r4", "empty") + "mad.lo.u32 %r5, %r3, 1000, %r2;"
        "st.shared.u32 [%r8], %r5; mbarrier.arrive.shared.b64 %d3, [full];"
        "add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 8; @%p3 bra $WRITE; ret;"
        "$READ: "
        + wait("%r3", "full")
        + "xor.b32 %r6, %r2, 5; mov.u32 %r7, tile; mad.lo.u32 %r6, %r6, 4, %r7;"
        "ld.shared.u32 %r9, [%r6]; mad.lo.u32 %r10, %r3, 32, %r2; mad.wide.u32 %d2, %r10, 4, %d1;"
        "st.global.u32 [%d2], %r9; mbarrier.arrive.release.cta.shared::cta.b64 _, [empty], 1;"
        "add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 8; @%p3 bra $READ; ret;"
    )
    want = np.arange(8)[:, None] * 1000 + (np.arange(32) ^ 5)
    for order in ("", "1", "2", "3"):
        gpu = Gpu(ODYSSEY_EMULATOR_ORDER=order)
        y = gpu.empty(8 * 128)
        gpu.launch(gpu.kernel(body, "u64"), y, block=64)
        np.testing.assert_array_equal(gpu.get(y, (8, 32), np.uint32), want)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 _, [bar];" + wait(),
            "waits for the barrier at 0 of shared memory, whose phase 0 nobody completes: 1 of 2 "
            "arrivals are missing",
        ),
        (
            "mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.shared.b64 _, [bar];"
            + wait(1)
            + wait(0)
            + wait(1),
            "whose phase 1 nobody completes: 1 of 1 arrivals are missing",
        ),
        (
            "mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 48;"
            + wait(),
            "whose phase 0 nobody completes: 0 of 1 arrivals and 48 bytes are missing",
        ),
        ("mbarrier.init.shared.b64 [bar], 0;", "a barrier for 0 arrivals; it must be 1 to 1048575"),
        (
            "mbarrier.init.shared.b64 [bar+4], 1;",
            "a barrier at 4 of shared memory, which is not a multiple of 8",
        ),
        (
            "mbarrier.init.shared.b64 [bar+8], 1;",
            "a barrier of 8 bytes at 8 of shared memory, of which the block has 8",
        ),
        (
            "mbarrier.arrive.shared.b64 _, [bar];",
            "the barrier at 0 of shared memory was not initialised",
        ),
        (
            "mbarrier.init.shared.b64 [bar], 1; mbarrier.inval.shared.b64 [bar];" + wait(),
            "the barrier at 0 of shared memory was not initialised",
        ),
        (
            "mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 _, [bar], 3;",
            "3 arrive at a barrier for 2, at which 2 are missing",
        ),
        (
            "mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], "
            "1048576;",
            "waits for 1048576 bytes; it can count 1048575",
        ),
    ],
)
def test_findings_at_barriers(
    gpu: Gpu, capfd: pytest.CaptureFixture[str], body: str, said: str
) -> None:
    assert said in found(gpu, capfd, gpu.kernel(REGS + BARRIER + body + "ret;"), block=1)


def test_a_barrier_may_be_asked_a_few_times_in_vain(gpu: Gpu) -> None:
    """Only a warp that asks for ever is reported."""
    k = gpu.kernel(
        REGS
        + BARRIER
        + "mbarrier.init.shared.b64 [bar], 1; mov.u32 %r1, 0; $L: add.u32 %r1, %r1, 1;"
        "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; setp.lt.u32 %p2, %r1, 100; @%p2 bra "
        "$L;"
        "mbarrier.arrive.shared.b64 _, [bar];"
        + wait()
        + "ld.param.u64 %d1, [p0]; st.global.u32 [%d1], %r1; ret;",
        "u64",
    )
    y = gpu.empty(4)
    gpu.launch(k, y, block=1)
    assert gpu.get(y, 1, np.uint32)[0] == 100


# --- elect, stmatrix ------------------------------------------------------------------------------


def test_elect(gpu: Gpu) -> None:
    """One of the lanes of the mask, with and without its number."""
    body = (
        REGS + "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 4, %d1; "
        "setp.lt.u32 %p1, %r1, 3;"
        "mov.u32 %r2, 99; mov.u32 %r3, 0; @%p1 bra $E; elect.sync %r2|%p2, 0xfffffff8; "
        "elect.sync _|%p3, -8;"
        "selp.b32 %r3, 100, 0, %p2; selp.b32 %r4, 1000, 0, %p3; add.u32 %r3, %r3, %r4;"
        "$E: add.u32 %r2, %r2, %r3; st.global.u32 [%d1], %r2; ret;"
    )
    y = gpu.empty(128)
    gpu.launch(gpu.kernel(body, "u64"), y)
    np.testing.assert_array_equal(gpu.get(y, 32, np.uint32), [99] * 3 + [1103] + [3] * 28)


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_stmatrix(gpu: Gpu, capfd: pytest.CaptureFixture[str], n: int, transposed: str) -> None:
    """It writes what ldmatrix reads; rows of other warps without a barrier are a race, as for
    any store.
    """
    regs = np.random.default_rng(n).integers(0, 1 << 32, (4, 32), np.uint32)
    names = ", ".join(f"%r{10 + j}" for j in range(n))
    again = ", ".join(f"%r{20 + j}" for j in range(n))
    start = REGS + (
        "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r2, tile; "
        "and.b32 %r3, %r1, 31;mad.lo.u32 %r4, %r3, 48, %r2; mad.wide.u32 %d1, %r3, 4, %d1; "
        "mad.wide.u32 %d2, %r3, 4, %d2;"
    )
    loads = "".join(f"ld.global.u32 %r{10 + j}, [%d2+{128 * j}];" for j in range(4))
    store = f"stmatrix.sync.aligned.m8n8.x{n}{transposed}.shared.b16 [%r4], {{{names}}};"
    load = f"ldmatrix.sync.aligned.m8n8.x{n}{transposed}.shared.b16 {{{again}}}, [%r4];"
    stores = "".join(f"st.global.u32 [%d1+{128 * j}], %r{20 + j};" for j in range(n)) + "ret;"
    y = gpu.empty(512)
    gpu.launch(
        gpu.kernel(start + loads + store + load + stores, "u64 u64", SHARED),
        y,
        gpu.put(regs),
        shared=2048,
    )
    np.testing.assert_array_equal(gpu.get(y, (n, 32), np.uint32), regs[:n])
    rows = start + loads + store + "bar.warp.sync -1; mov.u32 %r5, tile; shl.b32 %r6, %r3, 1;"
    for row in range(8 * n):  # two bytes of each row for each of the first eight lanes
        rows += f"add.u32 %r7, %r5, {48 * row}; add.u32 %r7, %r7, %r6; setp.lt.u32 %p1, %r3, 8;"
        rows += f"@%p1 ld.shared.u16 %r8, [%r7]; @%p1 st.global.u16 [%d1+{128 * row}], %r8;"
    y = gpu.empty(128 * 40)
    gpu.launch(gpu.kernel(rows + "ret;", "u64 u64", SHARED), y, gpu.put(regs), shared=2048)
    got = gpu.get(y, (40, 32, 2), np.uint16)[: 8 * n, :8, 0]
    # a lane has two numbers that lie side by side in a row
    want = regs[:n].view(np.uint16).reshape(n, 8, 8)
    np.testing.assert_array_equal(
        got, (want.transpose(0, 2, 1) if transposed else want).reshape(8 * n, 8)
    )
    two = gpu.kernel(start + loads + store + "ret;", "u64 u64", SHARED)
    assert "race" in found(gpu, capfd, two, y, gpu.put(regs), shared=2048, block=64)
    crooked = gpu.kernel(
        start + loads + store.replace("[%r4]", "[%r4+8]") + "ret;", "u64 u64", SHARED
    )
    assert "not a multiple of 16" in found(
        gpu, capfd, crooked, gpu.empty(512), gpu.put(regs), shared=2048
    )


# --- TMA ------------------------------------------------------------------------------------------

TYPES = {np.uint8: 0, np.uint16: 1, np.uint32: 2, np.uint64: 4}


class Map:
    """What cuTensorMapEncodeTiled is called with, outermost dimension first as in numpy."""

    def __init__(
        self,
        address: int,
        dims: list[int],
        strides: list[int],
        box: list[int],
        dtype: type = np.uint16,
    ) -> None:
        self.address, self.dims, self.strides, self.box = address, dims, strides, box
        self.type, self.steps, self.interleave, self.swizzle, self.fill = (
            TYPES[dtype],
            [1] * len(dims),
            0,
            0,
            0,
        )
        self.rank, self.shift = len(dims), 0

    def make(self, gpu: Gpu) -> np.ndarray:
        """128 bytes at an address that is a multiple of 64, and `shift` more."""
        memory = np.zeros(256, np.uint8)
        at = -memory.ctypes.data % 64 + self.shift
        dims, strides = (
            (ctypes.c_uint64 * 5)(*self.dims[::-1]),
            (ctypes.c_uint64 * 4)(*self.strides[-2::-1]),
        )
        box, steps = (
            (ctypes.c_uint32 * 5)(*self.box[::-1]),
            (ctypes.c_uint32 * 5)(*self.steps[::-1]),
        )
        gpu.call(
            "cuTensorMapEncodeTiled",
            *(
                ctypes.c_void_p(memory.ctypes.data + at),
                self.type,
                self.rank,
                ctypes.c_void_p(self.address),
            ),
            *(dims, strides, box, steps, self.interleave, self.swizzle, 0, self.fill),
        )
        return memory[at : at + 128]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"rank": 0}, 1, "rank 0; it must be 1 to 5"),
        ({"rank": 6}, 1, "rank 6; it must be 1 to 5"),
        ({"shift": 8}, 1, "its address must be a multiple of 64"),
        ({"address": 4096 + 8}, 1, "the tensor is at 0x1008; its address must be a multiple of 16"),
        ({"dims": [4, 0]}, 1, "dimension 0 is 0; it must be 1 to 2^32"),
        ({"dims": [(1 << 32) + 1, 64]}, 1, "dimension 1 is 4294967297; it must be 1 to 2^32"),
        ({"box": [0, 16]}, 1, "the box is 0 along dimension 1; it must be 1 to 256"),
        ({"box": [257, 16]}, 1, "the box is 257 along dimension 1; it must be 1 to 256"),
        (
            {"strides": [136, 2]},
            1,
            "the stride of dimension 1 is 136 bytes; it must be a multiple of 16 below 2^40",
        ),
        (
            {"strides": [1 << 40, 2]},
            1,
            "the stride of dimension 1 is 1099511627776 bytes; it must be a multiple of 16",
        ),
        ({"box": [4, 12]}, 1, "the box is 24 bytes wide; it must be a multiple of 16"),
        ({"box": [4, 32], "swizzle": 1}, 1, "the box is 64 bytes wide; the swizzle allows 32"),
        ({"box": [4, 128], "swizzle": 3}, 1, "the box is 256 bytes wide; the swizzle allows 128"),
        (
            {"box": [4, 16], "swizzle": 2},
            801,
            "a box of 32 bytes in a swizzle of 64 is not emulated; use the whole width",
        ),
        ({"steps": [9, 1]}, 1, "step 9 along dimension 1; it must be 1 to 8"),
        ({"steps": [0, 1]}, 1, "step 0 along dimension 1; it must be 1 to 8"),
        ({"steps": [2, 1]}, 801, "step 2 along dimension 1 is not emulated; use 1"),
        ({"swizzle": 4}, 801, "swizzle 4 is not emulated; use 0 to 3"),
        ({"interleave": 1}, 801, "interleave 1 is not emulated; use 0 (none)"),
        ({"fill": 1}, 801, "fill 1 is not emulated; use 0 (zeros)"),
        ({"type": 13}, 801, "data type 13 is not emulated; use 0 to 12"),
    ],
)
def test_maps_that_are_refused(
    gpu: Gpu, capfd: pytest.CaptureFixture[str], change: dict[str, object], code: int, said: str
) -> None:
    one = Map(4096, [4, 64], [128, 2], [4, 16])
    one.make(gpu)
    one.steps = [1, 7]  # CUDA ignores the step of the innermost dimension
    one.make(gpu)
    for name, value in change.items():
        setattr(one, name, value)
    with pytest.raises(Failed, match=f"cuTensorMapEncodeTiled returned {code}$"):
        one.make(gpu)
    err = capfd.readouterr().err
    assert err.startswith("[emulated GPU] cuTensorMapEncodeTiled: ")
    assert said in err
    assert err.count("\n") == 1


def test_older_gpus_have_no_maps(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failed, match="returned 801"):
        Map(4096, [4, 64], [128, 2], [4, 16]).make(Gpu(ODYSSEY_EMULATED_CC="80"))
    assert (
        "requires a GPU of compute capability 9.0, and this one has 8.0" in capfd.readouterr().err
    )


def fetch(rank: int, expect: object = "%r7", to: object = "%r6") -> str:
    """A kernel: thread 0 fetches a box by the map at p1 and the coordinates at p2; p3 bytes of
    it go to p0.
    """
    coordinates = "".join(f"ld.global.s32 %r{10 + i}, [%d3+{4 * i}];" for i in range(rank))
    names = ", ".join(f"%r{10 + i}" for i in range(rank))
    return (
        REGS
        + BARRIER
        + "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 "
        "%d3, [p2];"
        "ld.param.u32 %r7, [p3]; mov.u32 %r8, bar; mov.u32 %r6, tile; add.u32 %r6, %r6, 1008;"
        + coordinates
        + ""
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra $W; mbarrier.init.shared.b64 [%r8], 1;"
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;"
        f"mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {expect};"
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[{to}], "
        f"[%d2, {{{names}}}], [%r8]; $W: bar.sync 0;" + wait(0, "%r8") + "shl.b32 %r2, %r1, 2;"
        "$L: setp.ge.u32 %p2, %r2, %r7; @%p2 bra $E; add.u32 %r3, %r6, %r2; ld.shared.u32 %r4, "
        "[%r3];"
        "cvt.u64.u32 %d4, %r2; add.s64 %d4, %d1, %d4; st.global.u32 [%d4], %r4; add.u32 %r2, "
        "%r2, 256; bra $L; $E: ret;"
    )


def swizzled(image: np.ndarray, mode: int) -> np.ndarray:
    """Bytes of shared memory from a multiple of 1,024 on, in which pieces of 16 bytes change
    places.

    They do so within spans of 32, 64 or 128 bytes, as the figures of "Swizzling Modes" show: the
    number of the row of 128 bytes decides which piece takes whose place.
    """
    if mode == 0:
        return image
    span = 16 << mode
    padded = np.zeros(-(-len(image) // 1024) * 1024, np.uint8)
    padded[: len(image)] = image
    # patterns, rows, spans, pieces, bytes
    rows = padded.reshape(-1, 8, 128 // span, span // 16, 16)
    out = np.empty_like(rows)
    for row, piece in itertools.product(range(8), range(span // 16)):
        out[:, row, :, piece ^ (row % (span // 16))] = rows[:, row, :, piece]
    return out.reshape(-1)[: len(image)]


def test_boxes_of_tensors(gpu: Gpu) -> None:
    """Boxes of 1 to 5 dimensions, inside, across and beyond the edges of tensors with gaps, in
    every swizzle.
    """
    rng = np.random.default_rng(4)
    kernels = [gpu.kernel(fetch(rank), "u64 u64 u64 u32", SHARED) for rank in range(1, 6)]
    outside = 0
    for turn in range(120):
        rank, dtype, mode = int(rng.integers(1, 6)), list(TYPES)[turn % 4], int(rng.integers(0, 4))
        size = np.dtype(dtype).itemsize
        inner = 16 << mode if mode else 16 * int(rng.integers(1, 4))  # bytes
        dims = [int(n) for n in rng.integers(1, 7, rank - 1)] + [
            int(rng.integers(1, 2 * inner // size))
        ]
        box = [int(n) for n in rng.integers(1, 5, rank - 1)] + [inner // size]
        strides, step = [size], -(-dims[-1] * size // 16) * 16
        for n in dims[-2::-1]:
            strides.insert(0, step + 16 * int(rng.integers(0, 3)))
            step = strides[0] * n
        memory = rng.integers(1, 256, step, np.uint8)
        tensor = np.lib.stride_tricks.as_strided(memory.view(dtype), dims, strides)
        at = [int(rng.integers(-2, n + 2)) for n in dims]
        want = np.zeros(box, dtype)
        for index in np.ndindex(*box):
            where = tuple(a + i for a, i in zip(at, index, strict=True))
            if all(0 <= w < n for w, n in zip(where, dims, strict=True)):
                want[index] = tensor[where]
            else:
                outside += 1
        a_map = Map(gpu.put(memory), dims, strides, box, dtype)
        a_map.swizzle = mode
        y = gpu.empty(want.nbytes)
        map_there, at_there = gpu.put(a_map.make(gpu)), gpu.put(np.array(at[::-1], np.int32))
        n = ctypes.c_uint32(want.nbytes)
        gpu.launch(
            kernels[rank - 1], y, map_there, at_there, n, block=64, shared=1008 + want.nbytes
        )
        got = gpu.get(y, want.nbytes, np.uint8)
        np.testing.assert_array_equal(
            got, swizzled(want.reshape(-1).view(np.uint8), mode), f"turn {turn}"
        )
    assert outside > 1000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"expect": 512},
            "phase 0 nobody completes: 0 of 1 arrivals are missing, and 512 bytes too many came",
        ),
        ({"expect": 1536}, "phase 0 nobody completes: 0 of 1 arrivals and 512 bytes are missing"),
        ({"to": "%r6+64"}, "a box at 1088 of shared memory, which is not a multiple of 128"),
        (
            {"to": "%r6+128"},
            "a box of 1024 bytes at 1152 of shared memory, of which the block has 2048 bytes",
        ),
        ({"rank": 3}, "no tensor map of 3 dimensions"),
        ({"map": 64}, "no tensor map of 2 dimensions"),
        ({"map": 32}, "which is not a multiple of 64"),
        ({"free": True}, "copies 128 bytes from"),
        ({"short": True}, "copies 128 bytes from"),
    ],
)
def test_findings_of_tma(
    gpu: Gpu, capfd: pytest.CaptureFixture[str], change: dict[str, object], said: str
) -> None:
    change = dict(change)
    memory = np.ones(4096, np.uint16)
    x = gpu.put(memory[: 64 * 7] if change.pop("short", False) else memory)
    there = gpu.put(
        np.concatenate([Map(x, [8, 64], [128, 2], [8, 64]).make(gpu), np.zeros(256, np.uint8)])
    )
    if change.pop("free", False):
        gpu.call("cuMemFree_v2", ctypes.c_uint64(x))
    at, y = gpu.put(np.zeros(5, np.int32)), gpu.empty(1024)
    there += change.pop("map", 0)
    k = gpu.kernel(fetch(change.pop("rank", 2), **change), "u64 u64 u64 u32", SHARED)
    assert said in found(
        gpu, capfd, k, y, there, at, ctypes.c_uint32(1024), block=64, shared=2048 - 16
    )


def bulk(size: object, source: str = "%d2", to: str = "%r6") -> str:
    return REGS + BARRIER + (
        "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r6, tile; mov.u32 %r1, %tid.x;"
        "mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[{to}], [{source}], {size}, [bar]; " + wait() + "ld.shared.u32 %r2, [%r6+60]; " "st.global.u32 [%d1], %r2; " "ret;"
    )  # fmt: skip


def test_bulk_copies(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    y, x = gpu.empty(4), gpu.put(np.arange(16, dtype=np.uint32))
    gpu.launch(gpu.kernel(bulk(64), "u64 u64", SHARED), y, x, block=1, shared=64)
    assert gpu.get(y, 1, np.uint32)[0] == 15
    for text, said in (
        (bulk(48), "0 of 1 arrivals and 16 bytes are missing"),
        (bulk(40), "a bulk copy of 40 bytes from"),
        (bulk(0), "a bulk copy of 0 bytes from"),
        (bulk(64, "%d2+8"), "both must be multiples of 16"),
        (bulk(64, to="%r6+8"), "a bulk copy at 24 of shared memory, which is not a multiple of 16"),
        (bulk(64, "%d2+16"), "copies 64 bytes from"),
    ):
        y, x = gpu.empty(4), gpu.put(np.arange(16, dtype=np.uint32))
        assert said in found(
            gpu, capfd, gpu.kernel(text, "u64 u64", SHARED), y, x, block=1, shared=96
        )


# --- wgmma ----------------------------------------------------------------------------------------


def rounded(kind: str, x: np.ndarray) -> np.ndarray:
    """The nearest numbers of the type, or with fewer digits; as float32."""
    if kind == "f16":
        return x.astype(np.float16).astype(np.float32)
    mask = np.uint32(0xFFFF0000 if kind == "bf16" else 0xFFFFE000)
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & mask).view(np.float32)


def stored(kind: str, x: np.ndarray) -> np.ndarray:
    """The bits of the type, as whole numbers. tf32: with low bits that must not count."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if kind == "bf16" else bits | np.uint32(0x1234)


def laid_out(
    rng: np.random.Generator,
    bits: np.ndarray,
    mode: int,
    by_rows: bool,
    image: np.ndarray,
    start: int,
) -> int:
    """Writes an operand (rows, terms) to `image` from `start` on, a multiple of 1,024; returns
    its descriptor.

    Eight rows (or, for MN-major operands, eight terms) of 16 << mode bytes make an atom. Atoms may
    lie in any order.
    """
    rows, terms = bits.shape
    size = bits.itemsize
    span = 16 << mode
    shift = 0
    x = np.arange(rows)[:, None]
    k = np.arange(terms)[None, :]
    if not by_rows:  # K-major
        along_k = 1 if mode else terms * size // 16  # atoms along the terms
        if mode:  # the step of 32 bytes may be any of those of a row
            shift = 32 * int(rng.integers(0, span // 32))
        groups = rows // 8
        leading, stride = (
            (groups * 8 * span, 8 * span) if rng.integers(2) else (8 * span, along_k * 8 * span)
        )
        byte = k * size + shift
        at = x // 8 * stride + x % 8 * span
        at = at + (byte if mode else byte // 16 * leading + byte % 16)
        used = groups * along_k * 8 * span
    else:
        wide, steps = span // size, terms // 8
        count = rows // wide  # atoms along the rows
        along_x, along_k = (
            (8 * span, count * 8 * span) if rng.integers(2) else (steps * 8 * span, 8 * span)
        )
        at = x // wide * along_x + x % wide * size + k // 8 * along_k + k % 8 * span
        leading, stride = (along_x, along_k) if mode else (along_k, along_x)
        used = count * steps * 8 * span
    image[start + at[..., None] + np.arange(size)] = (
        np.ascontiguousarray(bits).view(np.uint8).reshape(rows, terms, size)
    )
    image[start : start + used] = swizzled(image[start : start + used].copy(), mode)
    code = (0, 3, 2, 1)[mode]
    return (start + shift) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | code << 62


def product(kind: str, n: int, in_registers: bool, a_rows: bool, b_rows: bool, add: bool) -> str:
    """A kernel that copies p1's p2 bytes to shared memory, multiplies by the descriptors p3 and
    p4, and adds to p0.
    """
    sums = ", ".join(f"%f{i}" for i in range(n // 2))
    a = "{%r20, %r21, %r22, %r23}" if in_registers else "%d3"
    flags = "1, 1" + (
        ""
        if kind == "tf32"
        else f", {int(b_rows)}"
        if in_registers
        else f", {int(a_rows)}, {int(b_rows)}"
    )
    k = 8 if kind == "tf32" else 16
    text = REGS + f".reg .f32 %f<{n // 2}>;" + (
        "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u32 %r2, " "[p2];"
        "ld.param.u64 %d3, [p3]; ld.param.u64 %d4, [p4]; ld.param.u64 %d7, [p5]; mov.u32 %r3, tile;"
        "shl.b32 %r4, %r1, 2; setp.gt.u32 %p2, %r1, 127; @%p2 bra $E; $L: setp.ge.u32 %p1, %r4, " "%r2; @%p1 bra " "$E;"
        "cvt.u64.u32 %d5, %r4; add.s64 %d5, %d2, %d5; ld.global.u32 %r5, [%d5]; add.u32 %r6, " "%r3, %r4;"
        "st.shared.u32 [%r6], %r5; add.u32 %r4, %r4, 512; bra $L; $E: " "fence.proxy.async.shared::cta; " "bar.sync 0;"
        "mad.wide.u32 %d1, %r1, 4, %d1; mad.wide.u32 %d7, %r1, 16, %d7;"
    )  # fmt: skip
    if in_registers:
        text += "ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d7];"
    text += "".join(f"ld.global.f32 %f{i}, [%d1+{512 * i}];" for i in range(n // 2))
    text += (
        f"wgmma.fence.sync.aligned; {{ .reg .pred p; setp.ne.b32 p, {int(add)}, "
        f"0;wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{sums}}}, {a}, %d4, p, "
        f"{flags}; }}wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )
    return text + "".join(f"st.global.f32 [%d1+{512 * i}], %f{i};" for i in range(n // 2)) + "ret;"


@pytest.mark.parametrize("n", [8, 72, 256])
@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_wgmma(gpu: Gpu, kind: str, n: int) -> None:
    """All layouts and swizzles that the columns allow, A in memory or in registers, with and
    without an old sum.
    """
    rng = np.random.default_rng(n)
    terms, size = (8, 4) if kind == "tf32" else (16, 2)
    lane = np.arange(128)
    rows = lane // 32 * 16 + lane % 32 // 4  # of the first number of a lane
    kernels: dict[tuple[object, ...], ctypes.c_void_p] = {}
    cases = 0
    for a_mode, b_mode, a_rows, b_rows, in_registers in itertools.product(
        range(4), range(4), *[(False, True)] * 3
    ):
        if (kind == "tf32" and (a_rows or b_rows)) or (b_rows and n % ((16 << b_mode) // size)):
            continue
        if in_registers and (a_mode or a_rows):
            continue
        cases += 1
        add = bool(cases % 3)
        a = rounded(kind, rng.integers(-64, 65, (64, terms)) / 8)
        b = rounded(kind, rng.integers(-64, 65, (n, terms)) / 8)
        old = rng.integers(-99, 99, (64, n)).astype(np.float32)
        image = np.zeros(48 << 10, np.uint8)
        a_desc = laid_out(rng, stored(kind, a), a_mode, a_rows, image, 0)
        b_desc = laid_out(rng, stored(kind, b), b_mode, b_rows, image, 16 << 10)
        regs = np.zeros((128, 4), np.uint32)
        for r in range(4):
            row = rows + r % 2 * 8
            if kind == "tf32":
                regs[:, r] = stored(kind, a[row, lane % 4 + r // 2 * 4])
            else:
                low, high = (
                    stored(kind, a[row, lane % 4 * 2 + h + r // 2 * 8]).astype(np.uint32)
                    for h in (0, 1)
                )
                regs[:, r] = low | high << 16
        sums = np.zeros((n // 2, 128), np.float32)
        for i in range(n // 2):
            sums[i] = old[rows + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2]
        key = (in_registers, a_rows, b_rows, add)
        if key not in kernels:
            kernels[key] = gpu.kernel(product(kind, n, *key), "u64 u64 u32 u64 u64 u64", SHARED)
        y = gpu.put(sums)
        size_there = ctypes.c_uint32(len(image))
        gpu.launch(
            kernels[key],
            y,
            gpu.put(image),
            size_there,
            a_desc,
            b_desc,
            gpu.put(regs),
            block=128,
            shared=len(image),
        )
        got = gpu.get(y, (n // 2, 128), np.float32)
        out = np.empty((64, n), np.float32)
        for i in range(n // 2):
            out[rows + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2] = got[i]
        want = a.astype(np.float64) @ b.T + (old if add else 0)
        np.testing.assert_array_equal(out, want, f"{a_mode} {b_mode} {key}")
    assert cases >= 20


def test_findings_of_wgmma(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    text = product("bf16", 8, False, False, False, True)
    image = np.zeros(4096, np.uint8)
    rng = np.random.default_rng(0)
    zeros = np.zeros((64, 16), np.uint16)
    a, b = laid_out(rng, zeros, 0, False, image, 0), laid_out(rng, zeros[:8], 0, False, image, 3072)

    def said(text: str, a: int = a, b: int = b, block: int = 128, size: int = 4096) -> str:
        k = gpu.kernel(text, "u64 u64 u32 u64 u64 u64", SHARED)
        y, x = gpu.put(np.zeros(1024, np.float32)), gpu.put(image)
        return found(gpu, capfd, k, y, x, ctypes.c_uint32(size), a, b, 0, block=block, shared=4096)

    assert "wgmma reads byte 3072 of shared memory, which nobody has written" in said(
        text, size=3072
    )
    assert "of which the block has 4096 bytes" in said(text, b=b | 0x3FFF)
    assert "has a base offset, which is not emulated" in said(text, a=a | 1 << 49)
    assert "the block has no four from warp 0 on" in said(text, block=96)
    assert "the block has no four from warp 4 on" in said(text, block=160)
    lanes = "mov.u32 %r9, %laneid; cvt.u64.u32 %d9, %r9; add.s64 %d3, %d3, %d9; wgmma.fence"
    assert "a descriptor of wgmma is not the same in all lanes of the warp" in said(
        text.replace("wgmma.fence", lanes)
    )
    part = text.replace("setp.ne.b32 p, 1, 0", "mov.u32 %r9, %laneid; setp.ne.b32 p, %r9, 0")
    assert "scale-d of wgmma is not the same in all lanes of the warp" in said(part)
    for wrong in ("p, -1, 1", "!p, 1, 1"):
        assert "not emulated" in said(text.replace("p, 1, 1", wrong))
