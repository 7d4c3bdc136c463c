"""Kernels compiled from Mojo run on the emulated GPU through MAX's DeviceContext as they would
on a GPU.

One program (emulator_kernels.mojo), compiled once for sm_90 and kept in the cache; each case is a
process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu import emulated
from gpu.programs import MOJO, compiled, start

SOURCE = Path(__file__).with_name("emulator_kernels.mojo")

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None or MOJO is None, reason="no C compiler or no mojo"
)


@pytest.fixture(scope="module")
def program() -> Path:
    return compiled(SOURCE)


class Runner:
    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder = program, folder

    def __call__(self, case: str, x: np.ndarray, **settings: object) -> np.ndarray:
        """All that the case has written, in float32."""
        (self.folder / "x").write_bytes(x.astype(np.float32).tobytes())
        done = start(self.program, case, self.folder / "x", self.folder / "y", **settings)
        assert done.returncode == 0, done.stderr
        return np.fromfile(self.folder / "y", np.float32)

    def fails(self, case: str, x: np.ndarray) -> str:
        (self.folder / "x").write_bytes(x.astype(np.float32).tobytes())
        done = start(self.program, case, self.folder / "x", self.folder / "y")
        assert done.returncode != 0 and "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout + done.stderr
        return next(
            line for line in done.stderr.splitlines() if line.startswith("[emulated GPU] kernel")
        )


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Runner:
    return Runner(program, tmp_path)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_elementwise_with_a_tail(run: Runner) -> None:
    x = normal(1000)
    got = run("elementwise", x)
    np.testing.assert_array_equal(got[:1000], np.maximum(x, 0) * 2 + 1)
    assert not got[1000:].any()


def test_matmul_in_shared_memory(run: Runner) -> None:
    x = normal(33 * 50 + 50 * 17)
    want = x[: 33 * 50].reshape(33, 50).astype(np.float64) @ x[33 * 50 :].reshape(50, 17)
    results = [
        run("matmul", x, **settings)[: 33 * 17] for settings in ({}, {"order": 5}, {"threads": 1})
    ]
    np.testing.assert_allclose(results[0].reshape(33, 17), want, atol=2e-5)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_reductions_of_warps_and_blocks(run: Runner) -> None:
    x = normal(4, 256)
    got = run("reductions", x.ravel())
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(got[:1024].reshape(4, 256), e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(got[1024 : 1024 + 32], x.reshape(32, 32).sum(1), atol=1e-4)


def test_divergence(run: Runner) -> None:
    x = np.arange(1, 500)

    def collatz(v: int) -> int:
        if v % 7 == 0:
            return -1
        steps = 0
        while v != 1 and steps < 200:
            v = 3 * v + 1 if v & 1 else v // 2
            steps += 1
        return steps

    np.testing.assert_array_equal(run("divergence", x)[:499], [collatz(v) for v in x.tolist()])


def test_small_types(run: Runner) -> None:
    x = np.concatenate([normal(500), normal(200) * 1e-6, normal(200) * 1e4]).astype(np.float32)
    bits = x.view(np.uint32)
    bf16 = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        want = np.concatenate([bf16, half.astype(np.float32), (half * half).astype(np.float32)])
    np.testing.assert_array_equal(run("small_types", x)[: 3 * 900], want)


def test_local_memory(run: Runner) -> None:
    x = np.random.default_rng(0).integers(0, 100, (40, 32))
    want = [[row[row % 8 == j].sum() for j in range(8)] for row in x]
    np.testing.assert_array_equal(run("local_memory", x.ravel())[:320].reshape(40, 8), want)


def test_tensor_core(run: Runner) -> None:
    x = np.random.default_rng(1).integers(-9, 10, 16 * 32 + 32 * 8)
    a, b = x[:512].reshape(16, 32), x[512:].reshape(32, 8)
    np.testing.assert_array_equal(run("tensor_core", x)[:128].reshape(16, 8), a @ b)


def test_asynchronous_copies(run: Runner) -> None:
    x = normal(2048)
    want = x.reshape(2, 256, 4)[:, ::-1].ravel()
    np.testing.assert_array_equal(run("asynchronous", x)[:2048], want)


def test_counting(run: Runner) -> None:
    x = np.random.default_rng(2).integers(0, 16, 1000)
    np.testing.assert_array_equal(
        run("counting", x).view(np.int32)[:16], np.bincount(x, minlength=16)
    )


def test_findings(run: Runner) -> None:
    x = normal(256)
    assert "shared memory" in (said := run.fails("race", x)) and "emulator_kernels_race" in said
    assert "ended without coming to it" in run.fails("missing_barrier", x)
    assert "0 bytes after the end of an allocation of 1024 bytes" in run.fails("beyond", x)


@pytest.mark.parametrize("event", ["event", "none"])
def test_late_streams(program: Path, event: str) -> None:
    """y = 3 from x = 1, and z = 2 y + 1 = 7 on another stream; without the event it is made of
    the old y, 10.
    """
    done = start(program, "streams", event, late=5000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["7.0", "7.0"] if event == "event" else ["21.0", "21.0"])


def test_two_devices(program: Path) -> None:
    done = start(program, "peers", gpus=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "4.0", "4.0", "9.0", "9.0"]


def test_python_finds_it() -> None:
    """max.driver, as the library uses it."""
    code = (
        "import numpy as np; from max.driver import Accelerator, Buffer, CPU, accelerator_count;"
        "d = Accelerator(1); b = Buffer.from_numpy(np.arange(10.0)).to(d);"
        "print(accelerator_count(), d.api, b.to(CPU()).to_numpy().sum())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=emulated.environment(gpus=2),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["2", "cuda", "45.0"], done.stderr
