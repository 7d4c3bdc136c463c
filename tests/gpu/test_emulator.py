"""The emulated GPU's driver and checks: memory, streams, events, peers, findings, shuffled
order, counters.

On hand-written PTX. Each check is shown to fail where it should. Instructions:
test_emulator_ops.py; programs of Mojo that run on it through MAX: test_emulator_mojo.py.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu import emulated
from gpu.ptx_bench import ILLEGAL_ADDRESS, Failed, Gpu

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="no C compiler")

REGS = ".reg .b32 %r<16>;\n.reg .b64 %d<16>;\n.reg .pred %p<8>;\n"
INDEX = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, "
    "%r3, %r1;"
)
SHARED = ".shared .align 16 .b8 tile[1024];\n"
ADD_ONE = REGS + INDEX + (
    "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mul.wide.u32 %d3, %r4, 4; add.s64 %d1, %d1, " "%d3; "
    "add.s64 %d2, %d2, %d3;"
    "ld.global.u32 %r5, [%d2]; add.s32 %r5, %r5, 1; st.global.u32 [%d1], %r5; ret;"
)  # fmt: skip


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def found(gpu: Gpu, capfd: pytest.CaptureFixture[str], *args: object, **launch: object) -> str:
    """The launch fails, the error is sticky, and this is what was said."""
    capfd.readouterr()
    with pytest.raises(Failed) as failure:
        gpu.launch(*args, **launch)
    assert failure.value.code == ILLEGAL_ADDRESS
    with pytest.raises(Failed, match="700"):
        gpu.call("cuCtxSynchronize")
    gpu.free_everything()
    gpu.call("cuCtxSynchronize")
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("[emulated GPU] kernel k, block (")
    return said


def test_out_of_bounds(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    k = gpu.kernel(ADD_ONE, "u64 u64")
    x, y = gpu.put(np.arange(100, dtype=np.int32)), gpu.empty(400)
    gpu.launch(k, y, x, grid=4, block=25)
    np.testing.assert_array_equal(gpu.get(y, 100, np.int32), np.arange(1, 101))
    said = found(gpu, capfd, k, y, x, grid=1, block=101)
    assert (
        "load of 4 bytes" in said and "0 bytes after the end of an allocation of 400 bytes" in said
    )
    assert "thread 100 of (101, 1, 1)" in said and "ld.global.u32 %r5, [%d2]" in said
    big = gpu.put(np.zeros(101, np.int32))
    assert "store of 4 bytes" in found(gpu, capfd, k, y, big, grid=1, block=101)
    assert "not a multiple of 4" in found(gpu, capfd, k, y, x + 2, grid=1, block=8)
    gpu.call("cuMemFree_v2", ctypes.c_uint64(x))
    assert "in memory that has been freed" in found(gpu, capfd, k, y, x, grid=1, block=8)
    host = np.zeros(8, np.int32)
    assert "where nothing is allocated" in found(
        gpu, capfd, k, y, host.ctypes.data, grid=1, block=8
    )


def test_copies_stay_inside(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    y = gpu.empty(400)
    with pytest.raises(Failed, match="cuMemcpyDtoH_v2 returned 1"):
        gpu.get(y, 101, np.int32)
    assert "ends after 400 bytes" in capfd.readouterr().err
    with pytest.raises(Failed, match="returned 1"):
        gpu.call("cuMemsetD32Async", ctypes.c_uint64(y + 4), 0, ctypes.c_size_t(100), None)


SHARE = (
    REGS + SHARED + INDEX + "mov.u32 %r6, tile; shl.b32 %r7, %r1, 2; add.s32 %r8, %r6, %r7; " "ld.param.u64 %d1, " "[p0];"
    "mul.wide.u32 %d3, %r4, 4; add.s64 %d1, %d1, %d3; {first} st.shared.u32 [%r8], %r1; {second}"
    "xor.b32 %r9, %r7, 0x1fc; add.s32 %r9, %r6, %r9; ld.shared.u32 %r10, [%r9]; st.global.u32 " "[%d1], %r10; " "ret;"
)  # fmt: skip


def share(first: str = "", second: str = "bar.sync 0;") -> str:
    return SHARE.replace("{first}", first).replace("{second}", second)


def test_shared_memory(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    y = gpu.empty(512)
    gpu.launch(gpu.kernel(share(), "u64"), y, block=128)
    np.testing.assert_array_equal(gpu.get(y, 128, np.uint32), np.arange(128) ^ 127)
    # without the barrier: warp 0 reads what warp 3 has not written yet
    said = found(gpu, capfd, gpu.kernel(share(second=""), "u64"), y, block=128)
    assert "which no thread of the block has written" in said
    zero = "mov.b32 %r11, 0; st.shared.u32 [%r8], %r11; bar.sync 0;"
    said = found(gpu, capfd, gpu.kernel(share(first=zero, second=""), "u64"), y, block=128)
    assert "race: writes byte 256" in said and "which warp 1 (threads 32 to 63) has read" in said
    # a second round that overwrites what others still read
    again = share().replace("ret;", "st.shared.u32 [%r8], %r10; ret;")
    assert "race: byte 252 of shared memory was written by warp 1" in found(
        gpu, capfd, gpu.kernel(again, "u64"), y, block=128
    )
    outside = share(second="bar.sync 0; add.s32 %r8, %r8, 1024; ld.shared.u32 %r5, [%r8];")
    assert "of which the block has 1024 bytes" in found(
        gpu, capfd, gpu.kernel(outside, "u64"), y, block=128
    )


def test_dynamic_shared_memory(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    text = share().replace(SHARED, "")
    k = gpu.kernel(text, "u64", before=".extern .shared .align 16 .b8 tile[];")
    y = gpu.empty(512)
    gpu.launch(k, y, block=128, shared=512)
    np.testing.assert_array_equal(gpu.get(y, 128, np.uint32), np.arange(128) ^ 127)
    assert "of which the block has 256 bytes" in found(gpu, capfd, k, y, block=128, shared=256)
    with pytest.raises(Failed, match="cuLaunchKernel returned 1"):
        gpu.launch(k, y, block=128, shared=49153)
    gpu.call("cuFuncSetAttribute", k, 8, 60000)
    gpu.launch(k, y, block=128, shared=49153)


def test_barriers(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    y = gpu.empty(512)
    part = REGS + INDEX + "setp.ge.u32 %p1, %r1, {0}; @%p1 bra $E; bar.sync 0; $E: ret;"
    said = found(gpu, capfd, gpu.kernel(part.replace("{0}", "32"), "u64"), y, block=64)
    assert (
        "warp 0 (threads 0 to 31" in said
        and "warp 1 (threads 32 to 63) has ended without coming to it" in said
    )
    said = found(gpu, capfd, gpu.kernel(part.replace("{0}", "20"), "u64"), y, block=32)
    assert "lanes fff00000" in said
    apart = (
        REGS
        + INDEX
        + "setp.ge.u32 %p1, %r1, 7; @%p1 bra $E; bar.sync 0; bra $F; $E: bar.sync 0; $F: ret;"
    )
    assert "each for the others" in found(gpu, capfd, gpu.kernel(apart, "u64"), y, block=32)
    other = (
        REGS
        + INDEX
        + "setp.ge.u32 %p1, %r1, 32; @%p1 bra $E; bar.sync 1; bra $F; $E: bar.sync 2; $F: ret;"
    )
    assert "waits at barrier 1" in found(gpu, capfd, gpu.kernel(other, "u64"), y, block=64)
    alone = (
        REGS
        + INDEX
        + "setp.ge.u32 %p1, %r1, 7; @%p1 bra $E; shfl.sync.idx.b32 %r2, %r1, 9, 31, 127; $E: ret;"
    )
    assert "shfl reads lane 9" in found(gpu, capfd, gpu.kernel(alone, "u64"), y, block=32)
    count = REGS + INDEX + (
        "and.b32 %r5, %r1, 3; setp.eq.u32 %p1, %r5, 0; bar.red.popc.u32 %r6, 0, %p1; " "bar.red.and.pred %p2, 0, " "%p1;"
        "ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 4, %d1; selp.b32 %r7, 100, 0, %p2; " "add.s32 %r6, %r6, %r7; "
        "st.global.u32 [%d1], %r6; ret;"
    )  # fmt: skip
    gpu.launch(gpu.kernel(count, "u64"), y, block=128)
    np.testing.assert_array_equal(gpu.get(y, 128, np.uint32), 32)


COPY = (
    REGS + SHARED + INDEX + "mov.u32 %r6, tile; shl.b32 %r7, %r1, 4; add.s32 %r8, %r6, %r7; " "ld.param.u64 %d1, [p0]; "
        "ld.param.u64 %d2, [p1];"
    "mul.wide.u32 %d3, %r1, 16; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;"
    "cp.async.cg.shared.global [%r8], [%d2], 16{size}; cp.async.commit_group; {wait}"
    "ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r8]; st.global.v4.u32 [%d1], {%r9, %r10, %r11, " "%r12}; ret;"
)  # fmt: skip


def test_parameters_by_their_address(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    k = gpu.kernel(
        REGS + INDEX + "mov.b32 %r5, p1; mad.lo.s32 %r5, %r1, 4, %r5; ld.param::entry.b32 %r6, " "[%r5]; "
        "ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 4, %d1; st.global.u32 [%d1], %r6; ret;",
        "u64 u64",
    )  # fmt: skip
    y = gpu.empty(512)
    gpu.launch(k, y, ctypes.c_uint64(7 << 32 | 5), block=2)
    np.testing.assert_array_equal(gpu.get(y, 2, np.uint32), [5, 7])
    assert "access at 16 of the parameters, which are 16 bytes" in found(
        gpu, capfd, k, y, ctypes.c_uint64(0), block=3
    )


def test_asynchronous_copies(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    x, y = np.arange(128, dtype=np.uint32), gpu.empty(512)
    good = COPY.replace("{wait}", "cp.async.wait_group 0;")
    gpu.launch(gpu.kernel(good.replace("{size}", ""), "u64 u64"), y, gpu.put(x))
    np.testing.assert_array_equal(gpu.get(y, 128, np.uint32), x)
    # thread t: its first t bytes
    gpu.launch(gpu.kernel(good.replace("{size}", ", %r1"), "u64 u64"), y, gpu.put(x))
    want = x.view(np.uint8).reshape(32, 16) * (np.arange(16) < np.arange(32)[:, None])
    np.testing.assert_array_equal(gpu.get(y, (32, 16), np.uint8), want)
    early = gpu.kernel(
        COPY.replace("{wait}", "cp.async.wait_group 1;").replace("{size}", ""), "u64 u64"
    )
    assert "which no thread of the block has written" in found(gpu, capfd, early, y, gpu.put(x))


def test_unknown_instruction_is_an_error_only_when_reached(
    gpu: Gpu, capfd: pytest.CaptureFixture[str]
) -> None:
    k = gpu.kernel(
        REGS + "ld.param.u32 %r1, [p0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $E; "
        "tcgen05.fence::before_thread_sync; $E: ret;",
        "u32",
    )
    gpu.launch(k, ctypes.c_uint32(0))
    said = found(gpu, capfd, k, ctypes.c_uint32(1))
    assert "not emulated" in said and "tcgen05.fence" in said


def test_labels_of_blocks_are_their_own(gpu: Gpu) -> None:
    """A block inside another may jump out of it, and may name a label as one outside is named."""
    body = REGS + INDEX + (
        "ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 4, %d1; mov.u32 %r5, %r1; $A: add.u32 " "%r5, %r5, 1;"
        "{ .reg .pred q; .reg .b32 %r9; $A: mov.u32 %r9, 10; add.u32 %r5, %r5, %r9; setp.lt.u32 " "q, %r5, 35; @q bra " "$A;"
        "{ $B: add.u32 %r5, %r5, 100; setp.lt.u32 q, %r5, 250; @q bra $B; setp.gt.u32 q, %r5, " "1240; @q bra " "$OUT;"
        "add.u32 %r5, %r5, 3; } $B: add.u32 %r5, %r5, 7; $OUT: add.u32 %r5, %r5, 1000; }"
        "setp.lt.u32 %p1, %r5, 3000; @%p1 bra $A; st.global.u32 [%d1], %r5; ret;"
    )  # fmt: skip

    def want(x: int) -> int:
        while True:
            x += 11
            while x < 35:
                x += 10
            x += 100
            while x < 250:
                x += 100
            if x <= 1240:
                x += 10
            x += 1000
            if x >= 3000:
                return x

    y = gpu.empty(128)
    gpu.launch(gpu.kernel(body, "u64"), y)
    np.testing.assert_array_equal(gpu.get(y, 32, np.uint32), [want(i) for i in range(32)])


def test_launches_that_are_not_possible(gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    k = gpu.kernel(ADD_ONE, "u64 u64")
    x = gpu.put(np.zeros(1024, np.int32))
    for shape in ({"block": 1025}, {"block": 0}, {"grid": 0}, {"grid": (1, 65536, 1)}):
        with pytest.raises(Failed, match="cuLaunchKernel returned 1"):
            gpu.launch(k, x, x, **shape)
    assert "a launch of (1, 65536, 1) blocks" in capfd.readouterr().err
    small = gpu.new(
        "cuModuleLoadData",
        ctypes.c_char_p(b".version 8.1\n.visible .entry k() .maxntid 64, 2, 1\n{ ret; }"),
    )
    small = gpu.new("cuModuleGetFunction", small, ctypes.c_char_p(b"k"))
    gpu.launch(small, block=128)
    with pytest.raises(Failed, match="cuLaunchKernel returned 1"):
        gpu.launch(small, block=129)


def test_memory_is_limited_and_given_back() -> None:
    gpu = Gpu(ODYSSEY_EMULATED_MEMORY="64M")
    first = gpu.empty(40 << 20)
    with pytest.raises(Failed, match="cuMemAlloc_v2 returned 2"):
        gpu.empty(40 << 20)
    gpu.call("cuMemFree_v2", ctypes.c_uint64(first))
    gpu.empty(40 << 20)


def test_two_devices_and_peer_access(capfd: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu(ODYSSEY_EMULATED_GPUS="2")
    x = gpu.put(np.arange(64, dtype=np.int32))
    gpu.use(1)
    y = gpu.empty(256)
    k = gpu.kernel(ADD_ONE, "u64 u64")
    capfd.readouterr()
    with pytest.raises(Failed, match="700"):
        gpu.launch(k, y, x, grid=2)
    assert "memory of device 0, which device 1 has no peer access to" in capfd.readouterr().err
    gpu.call("cuDevicePrimaryCtxReset_v2", 1)
    gpu.call(
        "cuMemcpyPeer",
        *(
            ctypes.c_uint64(y),
            gpu.context(1),
            ctypes.c_uint64(x),
            gpu.context(0),
            ctypes.c_size_t(256),
        ),
    )
    np.testing.assert_array_equal(gpu.get(y, 64, np.int32), np.arange(64))
    gpu.call("cuCtxEnablePeerAccess", gpu.context(0), 0)
    gpu.launch(k, y, x, grid=2)
    np.testing.assert_array_equal(gpu.get(y, 64, np.int32), np.arange(1, 65))


class Late:
    """A GPU on which nothing happens before it is waited for (or 5 s have passed), and two
    streams.
    """

    def __init__(self) -> None:
        self.gpu = Gpu(ODYSSEY_EMULATOR_LATE="5000")
        self.one, self.two = (self.gpu.new("cuStreamCreateWithPriority", 1, 0) for _ in range(2))
        self.k = self.gpu.kernel(ADD_ONE, "u64 u64")
        self.x, self.y, self.z = (self.gpu.put(np.full(64, v, np.int32)) for v in (1, 10, 20))

    def step(self, stream: ctypes.c_void_p, to: int, of: int) -> None:
        self.gpu.launch(self.k, to, of, grid=2, stream=stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self.gpu.call("cuStreamSynchronize", stream)

    def pinned(self) -> np.ndarray:
        memory = self.gpu.new("cuMemHostAlloc", ctypes.c_size_t(256), 0).value
        array = np.ctypeslib.as_array((ctypes.c_int32 * 64).from_address(memory))
        array[:] = -5
        return array

    def read(self, host: np.ndarray, of: int, stream: ctypes.c_void_p) -> None:
        arguments = (
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_uint64(of),
            ctypes.c_size_t(256),
            stream,
        )
        self.gpu.call("cuMemcpyDtoHAsync_v2", *arguments)


@pytest.mark.parametrize("event", [True, False])
def test_late_streams_show_a_missing_event(event: bool) -> None:
    t = Late()
    t.step(t.one, t.y, t.x)
    if event:
        e = t.gpu.new("cuEventCreate", 0)
        t.gpu.call("cuEventRecord", e, t.one)
        t.gpu.call("cuStreamWaitEvent", t.two, e, 0)
    t.step(t.two, t.z, t.y)
    host = t.pinned()
    t.read(host, t.z, t.two)
    assert (host == -5).all()  # nobody has waited for it
    t.wait(t.two)
    np.testing.assert_array_equal(host, 3 if event else 11)


def test_late_streams_are_in_order_each() -> None:
    t = Late()
    for _ in range(20):
        t.step(t.one, t.y, t.x)
        t.step(t.one, t.x, t.y)
    host = t.pinned()
    t.read(host, t.x, t.one)
    e = t.gpu.new("cuEventCreate", 0)
    t.gpu.call("cuEventRecord", e, t.one)
    assert t.gpu.lib.cuEventQuery(e) == 600 and t.gpu.lib.cuStreamQuery(t.one) == 600
    t.gpu.call("cuEventSynchronize", e)
    assert t.gpu.lib.cuEventQuery(e) == 0
    np.testing.assert_array_equal(host, 41)


def test_late_streams_show_a_buffer_of_the_host_that_changes_too_early() -> None:
    t = Late()
    pinned, plain = t.pinned(), np.full(64, 7, np.int32)
    for host, to in ((pinned, t.x), (plain, t.y)):
        arguments = (
            ctypes.c_uint64(to),
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_size_t(256),
            t.one,
        )
        t.gpu.call("cuMemcpyHtoDAsync_v2", *arguments)
    pinned[:], plain[:] = 99, 99  # pageable memory has been read by now, pinned memory has not
    t.wait(t.one)
    assert t.gpu.get(t.x, 64, np.int32)[0] == 99 and t.gpu.get(t.y, 64, np.int32)[0] == 7


def test_late_host_functions_and_frees() -> None:
    t = Late()
    order: list[str] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: order.append("host"))
    t.step(t.one, t.y, t.x)
    t.gpu.call("cuLaunchHostFunc", t.one, callback, None)
    t.gpu.call("cuMemFreeAsync", ctypes.c_uint64(t.x), t.one)
    t.gpu.call(
        "cuMemcpyDtoHAsync_v2",
        *(
            ctypes.c_void_p(t.pinned().ctypes.data),
            ctypes.c_uint64(t.y),
            ctypes.c_size_t(256),
            t.two,
        ),
    )
    assert not order
    t.wait(t.one)
    assert order == ["host"]
    np.testing.assert_array_equal(t.gpu.get(t.y, 64, np.int32), 2)
    t.wait(t.two)


def test_late_errors_come_with_the_wait(capfd: pytest.CaptureFixture[str]) -> None:
    t = Late()
    t.gpu.launch(t.k, t.y, t.x, grid=3, stream=t.one)  # 96 threads for 64 numbers
    with pytest.raises(Failed, match="cuStreamSynchronize returned 700"):
        t.wait(t.one)
    assert "after the end of an allocation of 256 bytes" in capfd.readouterr().err


def test_work_is_done_at_last_without_a_wait() -> None:
    gpu = Gpu(ODYSSEY_EMULATOR_LATE="30")
    stream = gpu.new("cuStreamCreateWithPriority", 1, 0)
    done: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: done.append(1))
    gpu.call("cuLaunchHostFunc", stream, callback, None)
    deadline = 2000
    while not done and deadline:
        subprocess.run([sys.executable, "-c", ""], check=True)  # gives the other thread time
        deadline -= 1
    assert done


def test_shuffled_order_shows_what_depends_on_it() -> None:
    """Blocks in a different order: a right kernel's result is the same, that of one which takes
    tickets is not.
    """
    ticket = REGS + INDEX + (
        "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; atom.global.add.u32 %r5, [%d2], 1; "
        "mad.wide.u32 %d1, %r4, 4, %d1;st.global.u32 [%d1], %r5; ret;"
    )  # fmt: skip
    results = []
    for order in ("", "1", "2", "2"):
        gpu = Gpu(ODYSSEY_EMULATOR_ORDER=order, ODYSSEY_EMULATOR_THREADS="1")
        y, x = gpu.empty(4096), gpu.put(np.arange(1024, dtype=np.int32))
        gpu.launch(gpu.kernel(ADD_ONE, "u64 u64"), y, x, grid=16, block=64)
        np.testing.assert_array_equal(gpu.get(y, 1024, np.int32), np.arange(1, 1025))
        gpu.launch(
            gpu.kernel(ticket, "u64 u64"), y, gpu.put(np.zeros(1, np.int32)), grid=16, block=64
        )
        got = gpu.get(y, 1024, np.int32)
        np.testing.assert_array_equal(np.sort(got), np.arange(1024))
        results.append(got.tolist())
    assert results[0] == list(range(1024)) != results[1] != results[2] == results[3]


def test_counters(tmp_path: Path) -> None:
    """A coalesced kernel and one with a stride; " "bank conflicts.

    In a process of its own: counters are written at its end.
    """
    stats = tmp_path / "stats"
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
from gpu.ptx_bench import Gpu
from gpu import test_emulator as t
gpu = Gpu(ODYSSEY_EMULATOR_STATS={str(stats)!r})
x, y = gpu.put(np.zeros(4096, np.int32)), gpu.empty(16384)
gpu.launch(gpu.kernel(t.ADD_ONE, "u64 u64"), y, x, grid=4, block=128)
gpu.launch(gpu.kernel(t.ADD_ONE.replace("%r4, 4;", "%r4, 32;"), "u64 u64"), y, x, grid=4, block=128)
gpu.launch(gpu.kernel(t.CONFLICT, "u64"), y, block=32)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    rows = [json.loads(line) for line in stats.read_text().splitlines()]
    good, wide, conflict = rows
    assert good["launches"] == 1 and good["grid"] == [4, 1, 1] and good["block"] == [128, 1, 1]
    assert good["load_bytes"] == wide["load_bytes"] == 512 * 4
    assert (
        good["load_sectors"] == good["store_sectors"] == 512 * 4 // 32
        and wide["load_sectors"] == 512
    )
    assert good["warp_instructions"] == 16 * ADD_ONE.count(";") - 16 * REGS.count(";")
    assert conflict["shared_extra_wavefronts"] == 31 and conflict["fma"] == 3 * 32


CONFLICT = REGS + ".shared .align 16 .b8 tile[4096];\n" + (
    "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 7; mov.u32 %r3, tile; add.s32 %r2, %r2, %r3; " "st.shared.u32 [%r2], %r1; "
    "shl.b32 %r4, %r1, 2;"
    "add.s32 %r4, %r4, %r3; st.shared.u32 [%r4], %r1; fma.rn.f32 %r5, %r4, %r4, %r4; fma.rn.f32 " "%r5, %r4, %r4, %r4; "
    "mul.f32 %r5, %r4, %r4;"
    "mad.lo.s32 %r5, %r4, %r4, %r4; fma.rn.f32 %r5, %r4, %r4, %r4; ret;"
)  # fmt: skip
