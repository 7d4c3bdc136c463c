"""Memory of one process in another on the emulated GPU (cuIpc*), and numbers that queues write
and wait for.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu import emulated
from gpu.ptx_bench import Failed, Gpu

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="no C compiler")

INVALID = 1
SIZES = [4, 4096, 100_000, 9 << 20]  # bytes: also more than what is filled at first


class Handle(ctypes.Structure):
    """A CUipcMemHandle, passed by value."""

    _fields_ = [("bytes", ctypes.c_uint8 * 64)]


def export(gpu: Gpu, address: int) -> str:
    handle = Handle()
    gpu.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.bytes).hex()


def mapped(gpu: Gpu, handle: str) -> int:
    there = Handle.from_buffer_copy(bytes.fromhex(handle))
    return gpu.new("cuIpcOpenMemHandle_v2", there, 1).value


def elsewhere(code: str, *arguments: object) -> str:
    """What a process that maps the handles `arguments` prints."""
    start = (
        f"import sys, ctypes; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import numpy as np\nfrom gpu.ptx_bench import Failed, Gpu\n"
        "from gpu.test_emulator_ipc import export, mapped\ngpu = Gpu()\n"
    )
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_process_reads_and_writes() -> None:
    gpu = Gpu()
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, 256, n, np.uint8) for n in SIZES]
    addresses = [gpu.put(x) for x in numbers]
    free = [gpu.empty(5000) for _ in range(3)]
    gpu.call("cuMemFree_v2", ctypes.c_uint64(free[1]))  # a hole in what the process has
    code = """
for handle, size in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    at = mapped(gpu, handle)
    x = gpu.get(at, size, np.uint8)
    y = 255 - x
    gpu.call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), ctypes.c_void_p(y.ctypes.data), ctypes.c_size_t(size))
    try:
        gpu.get(at, size + 1, np.uint8)
    except Failed as error:
        print(error.code, int(x.astype(np.int64).sum()), end=" ")
    gpu.call("cuIpcCloseMemHandle", ctypes.c_uint64(at))
    try:
        gpu.get(at, size, np.uint8)
    except Failed as error:
        print(error.code, end=" ")
"""
    pairs = [
        word for at, x in zip(addresses, numbers, strict=True) for word in (export(gpu, at), x.size)
    ]
    words = elsewhere(code, *pairs).split()
    assert words == [
        word for x in numbers for word in ("1", str(int(x.astype(np.int64).sum())), "1")
    ]
    for at, x in zip(addresses, numbers, strict=True):
        np.testing.assert_array_equal(gpu.get(at, x.size, np.uint8), 255 - x)


def test_what_has_no_handle() -> None:
    """Memory of the host, of another process, freed memory; and an open handle can only be
    closed.
    """
    gpu = Gpu()
    pinned = gpu.new("cuMemHostAlloc", ctypes.c_size_t(4096), 0).value
    freed = gpu.empty(4096)
    gpu.call("cuMemFree_v2", ctypes.c_uint64(freed))
    for address in (pinned, freed, 12345):
        with pytest.raises(Failed, match=f"cuIpcGetMemHandle returned {INVALID}$"):
            export(gpu, address)
    here = export(gpu, gpu.empty(4096))
    with pytest.raises(Failed, match=f"cuIpcOpenMemHandle_v2 returned {INVALID}$"):
        mapped(gpu, here)
    with pytest.raises(Failed, match=f"cuIpcOpenMemHandle_v2 returned {INVALID}$"):
        mapped(gpu, "00" * 64)
    with pytest.raises(Failed, match=f"cuIpcCloseMemHandle returned {INVALID}$"):
        gpu.call("cuIpcCloseMemHandle", ctypes.c_uint64(gpu.empty(4096)))
    code = """
at = mapped(gpu, sys.argv[1])
for call, arguments in ((gpu.call, ("cuMemFree_v2", ctypes.c_uint64(at))), (export, (gpu, at))):
    try:
        call(*arguments)
    except Failed as error:
        print(error.code, end=" ")
print(gpu.get(at, 1, np.uint8)[0])
"""
    assert elsewhere(code, here) == "1 1 255"


def test_a_process_that_has_ended_has_no_memory() -> None:
    handle = elsewhere("print(export(gpu, gpu.empty(4096)))")
    with pytest.raises(Failed, match=f"cuIpcOpenMemHandle_v2 returned {INVALID}$"):
        mapped(Gpu(), handle)


def test_many_allocations_open_one_file() -> None:
    """And freed memory is given back."""
    gpu = Gpu()
    gpu.empty(4)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3000):
        gpu.empty(4)
    assert len(os.listdir("/proc/self/fd")) == before
    x = np.ones(16 << 20, np.uint8)
    for _ in range(8):
        gpu.call("cuMemFree_v2", ctypes.c_uint64(gpu.put(x)))
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [
        os.stat(link)
        for link in links
        if os.path.islink(link) and "odyssey-emulated-gpu" in os.readlink(link)
    ]
    assert files
    assert all(512 * file.st_blocks < 64 << 20 for file in files)


def test_a_fork_leaves_its_parents_memory_alone() -> None:
    gpu = Gpu()
    x = gpu.put(np.arange(1024, dtype=np.int32))
    child = os.fork()
    if not child:
        gpu.call("cuMemFree_v2", ctypes.c_uint64(x))
        gpu.put(np.zeros(4096, np.int32))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(gpu.get(x, 1024, np.int32), np.arange(1024))


@pytest.mark.parametrize("late", ["0", "3000"])
def test_queues_wait_for_numbers(late: str) -> None:
    """A copy of one queue comes after one of another, which writes a number."""
    gpu = Gpu(ODYSSEY_EMULATOR_LATE=late)
    one, two = (gpu.new("cuStreamCreateWithPriority", 1, 0) for _ in range(2))
    x, y, z = (gpu.put(np.full(64, v, np.int32)) for v in (1, 2, 3))
    flag = gpu.put(np.zeros(2, np.uint32))

    def number(
        name: str, stream: ctypes.c_void_p, value: int, at: int = flag, flags: int = 0
    ) -> None:
        gpu.call(
            f"cuStream{name}Value32_v2", stream, ctypes.c_uint64(at), ctypes.c_uint32(value), flags
        )

    def copy(to: int, of: int, stream: ctypes.c_void_p) -> None:
        gpu.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(to),
            ctypes.c_uint64(of),
            ctypes.c_size_t(256),
            stream,
        )

    if late != "0":  # in order it would wait for ever
        number("Wait", two, 7)
        copy(z, y, two)
    copy(y, x, one)
    number("Write", one, 7)
    if late == "0":
        number("Wait", two, 6)
        copy(z, y, two)
    for stream in (one, two):
        gpu.call("cuStreamSynchronize", stream)
    assert (gpu.get(z, 64, np.int32) == 1).all()
    for at, flags, code in ((flag + 2, 0, INVALID), (12345, 0, INVALID), (flag, 1, 801)):
        with pytest.raises(Failed, match=f"cuStreamWaitValue32_v2 returned {code}$"):
            number("Wait", two, 7, at, flags)
