"""Linear layers on an emulated GPU: against float64, and the same bits for any shards, fold and
tile.

Nothing here was run on a GPU. The emulator runs the code the driver of one would get, so it shows
what the kernels compute, in which order, and how they use memory; it says nothing about time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gpu import emulated

from odyssey.compile import compiler
from odyssey.compile import library as build

LANES = 16
FORWARD, INPUT, WEIGHT = range(3)
PRECISIONS = FP32, TF32, BF16, FP16 = range(4)
CHOSEN, SMALL, MEDIUM, LARGE = range(-1, 3)
TILES = SMALL, MEDIUM, LARGE
SOURCES = ["launch", "linear", "gemm", "gemm_tiles", "gemm_results", "conv2d_tiles"]
GAP = 48  # floats between the tensors of neighbouring shards, which nobody may touch
FILL = np.float32(-7777.0)  # what is in a gap

SHAPES = [(1, 1), (3, 5), (84, 10), (400, 120), (20, 44), (132, 260)]  # I, O


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch.

    The values of every operand follow from its sizes, not from `tile`, `shards` or `fold`.
    """

    op: int
    precision: int
    tile: int
    shards: int
    fold: int
    groups: int
    inputs: int
    outputs: int
    flag: bool = False  # ReLU, or accumulate
    special: bool = False  # infinities and values that are not a number among the inputs

    def tensor(self, which: str) -> np.ndarray:
        """x (shards, G, I, 16), dy (shards, G, O, 16), w (O, I), b (O), and what dw and db hold
        before.
        """
        shape = {
            "x": (self.groups, self.inputs, LANES),
            "dy": (self.groups, self.outputs, LANES),
            "w": (self.outputs, self.inputs),
            "b": (self.outputs,),
            "dw": (self.outputs, self.inputs),
            "db": (self.outputs,),
        }[which]

        def values(shard: int) -> np.ndarray:
            random = np.random.default_rng(
                [ord(which[0]), ord(which[-1]), self.groups, self.inputs, self.outputs, shard]
            )
            v = random.standard_normal(shape, np.float32)
            if self.special and which in ("x", "w"):
                v.flat[[5, 40, 100]] = np.inf, -np.inf, np.nan
            return v

        if which in ("x", "dy"):
            return np.stack([values(s) for s in range(self.shards)])
        if which in ("dw", "db"):
            return np.stack([values(s) for s in range(-(-self.shards // self.fold))])
        return values(0)

    def operands(self) -> list[tuple[np.ndarray, int]]:
        """What the launch gets: memory, and the stride from one copy to the next."""

        def spread(v: np.ndarray, aligned: int = LANES) -> tuple[np.ndarray, int]:
            flat = v.reshape(len(v), -1)
            stride = -(-flat.shape[1] // aligned) * aligned + GAP
            memory = np.full((len(v), stride), FILL, np.float32)
            memory[:, : flat.shape[1]] = flat
            return memory, stride

        def shared(v: np.ndarray) -> tuple[np.ndarray, int]:
            return v, 0

        def empty(features: int) -> tuple[np.ndarray, int]:
            return spread(np.full((self.shards, self.groups * features * LANES), FILL, np.float32))

        t = self.tensor
        if self.op == FORWARD:
            return [empty(self.outputs), spread(t("x")), shared(t("w")), shared(t("b"))]
        if self.op == INPUT:
            return [
                empty(self.inputs),
                spread(t("dy")),
                shared(t("w")),
                (np.zeros(4, np.float32), 0),
            ]
        return [spread(t("dw")), spread(t("db")), spread(t("dy")), spread(t("x"))]

    def line(self) -> str:
        numbers = [
            self.op,
            self.precision,
            self.tile,
            self.shards,
            self.fold,
            self.groups,
            self.inputs,
            self.outputs,
            int(self.flag),
        ]
        for memory, stride in self.operands():
            numbers += [memory.size, stride]
        return " ".join(map(str, numbers))

    def read(self, floats: np.ndarray) -> dict[str, np.ndarray]:
        """The results by name, after a look at the gaps."""
        found, at = {}, 0
        shapes = {
            FORWARD: [("y", (self.shards, self.groups, self.outputs, LANES))],
            INPUT: [("dx", (self.shards, self.groups, self.inputs, LANES))],
            WEIGHT: [("dw", self.tensor("dw").shape), ("db", self.tensor("db").shape)],
        }[self.op]
        for (name, shape), (memory, stride) in zip(shapes, self.operands(), strict=False):
            flat = floats[at : at + memory.size].reshape(shape[0], stride)
            used = int(np.prod(shape[1:]))
            assert (flat[:, used:] == FILL).all(), f"{self}: {name} is written beyond its end"
            found[name] = flat[:, :used].reshape(shape)
            at += memory.size
        return found

    def expected(self) -> dict[str, np.ndarray]:
        """The same in float64, of the operands as the tensor cores see them."""
        t, r = self.tensor, lambda v: rounded(v, self.precision).astype(np.float64)
        if self.op == FORWARD:
            y = np.einsum("oi,sgil->sgol", r(t("w")), r(t("x"))) + t("b")[:, None]
            return {"y": np.maximum(y, 0) if self.flag else y}
        if self.op == INPUT:
            return {"dx": np.einsum("oi,sgol->sgil", r(t("w")), r(t("dy")))}
        dw, db = (t(name).astype(np.float64) * self.flag for name in ("dw", "db"))
        dys, xs = t("dy"), t("x")
        for s in range(self.shards):
            dw[s // self.fold] += np.einsum("gol,gil->oi", r(dys[s]), r(xs[s]))
            db[s // self.fold] += dys[s].astype(np.float64).sum((0, 2))
        return {"dw": dw, "db": db}


def rounded(v: np.ndarray, precision: int) -> np.ndarray:
    """To the nearest number of the format, ties to even, as float32."""
    if precision == FP16:
        return v.astype(np.float16).astype(np.float32)
    if precision == FP32:
        return v
    cut = 13 if precision == TF32 else 16
    bits = v.view(np.uint32).astype(np.uint64)
    bits += (1 << (cut - 1)) - 1 + ((bits >> cut) & 1)
    return (bits >> cut << cut).astype(np.uint32).view(np.float32)


class Device:
    """The compiled program and the emulator; many launches in one process, as starting one takes
    a second.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder = program, folder

    def run(self, jobs: list[Job], **settings: object) -> dict[Job, dict[str, np.ndarray]]:
        """Runs all jobs in one process."""
        (self.folder / "jobs").write_text("".join(f"{job.line()}\n" for job in jobs))
        memories = [[memory for memory, _ in job.operands()] for job in jobs]
        with open(self.folder / "floats", "wb") as file:
            for memory in itertools.chain.from_iterable(memories):
                file.write(memory.astype(np.float32).tobytes())
        done = subprocess.run(
            [self.program, *(self.folder / name for name in ("jobs", "floats", "results"))],
            env=emulated.environment(**settings),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        floats = np.fromfile(self.folder / "results", np.float32)
        results, at = {}, 0
        for job, memory in zip(jobs, memories, strict=True):
            n = memory[0].size + memory[1].size
            results[job] = job.read(floats[at : at + n])
            at += n
        return results


def compiled(folder: Path, *options: str) -> Path:
    """The program, from the cache or compiled now (half a minute)."""
    root = build.source_root()
    source = Path(__file__).with_name("linear_jobs.mojo")
    key = hashlib.sha256(
        repr(options).encode() + source.read_bytes() + compiler.compiler_version().encode()
    )
    for path in (
        root / "mojo" / "kernels" / name
        for name in ("lanes.mojo", *map("gpu/{}.mojo".format, SOURCES))
    ):
        key.update(path.read_bytes())
    program = build.cache_dir() / "tests" / f"linear_jobs-{key.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        fresh = folder / program.name
        words = [
            "--target-accelerator",
            "sm_90",
            "-I",
            str(root / "mojo"),
            *options,
            str(source),
            "-o",
            str(fresh),
        ]
        done = compiler.run_mojo(["build", *words])
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.copy(fresh, f"{program}.{os.getpid()}")
        os.replace(f"{program}.{os.getpid()}", program)
    return program


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    folder = tmp_path_factory.mktemp("linear")
    return Device(compiled(folder), folder)


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Device:
    """What other GPUs than NVIDIA's get: no tensor cores, no barriers of a warp."""
    folder = tmp_path_factory.mktemp("portable")
    return Device(compiled(folder, "-D", "PORTABLE"), folder)


def check(results: dict[Job, dict[str, np.ndarray]]) -> None:
    """Every result within 1e-5 of the largest."""
    for job, found in results.items():
        for name, expected in job.expected().items():
            error = np.abs(found[name] - expected).max() / np.abs(expected).max()
            assert error < 1e-5, f"{job}: {name} is off by {error:.1e} of the largest"


def bits(results: dict[Job, dict[str, np.ndarray]], job: Job) -> dict[str, np.ndarray]:
    return {name: v.view(np.uint32) for name, v in results[job].items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values(device: Device, precision: int) -> None:
    """All three products, all tiles, ragged sizes."""
    jobs = []
    for k, (i, o) in enumerate(SHAPES):
        for op, tile in itertools.product((FORWARD, INPUT, WEIGHT), TILES):
            if tile != SMALL and i % 4 and op != WEIGHT:
                continue  # such rows of w are read float by float, which only SMALL does
            jobs.append(Job(op, precision, tile, 2, 2, 1 + k % 3, i, o, bool(k % 2)))
    check(device.run(jobs))


def test_larger_layers(device: Device) -> None:
    """The launcher's own choice; 784 -> 512 at two shards of 64 samples."""
    check(
        device.run(
            [Job(op, p, CHOSEN, 2, 1, 4, 784, 512, True) for op in range(3) for p in (FP32, BF16)]
        )
    )


@pytest.mark.parametrize("precision", [FP32, TF32, BF16])
def test_one_order_of_adding(device: Device, precision: int) -> None:
    """The bits of a shard's activations depend neither on the tile nor on how many shards a
    launch has.
    """
    for op, (g, i, o) in itertools.product(
        (FORWARD, INPUT), [(2, 400, 120), (1, 36, 20), (3, 100, 1028)]
    ):
        jobs = [
            Job(op, precision, tile, shards, 1, g, i, o)
            for tile in TILES
            for shards in (1, 2, 3, 5, 8)
        ]
        if g == 3:
            jobs = [job for job in jobs if job.shards in (1, 3)]
        results = device.run(jobs)
        (name,) = results[jobs[0]]
        most = max(job.shards for job in jobs)
        reference = bits(results, next(job for job in jobs if job.shards == most))[name]
        for job in jobs:
            assert np.array_equal(bits(results, job)[name], reference[: job.shards]), job


def tree(v: list[np.ndarray]) -> np.ndarray:
    """The fixed tree: a node over n splits after the largest power of two smaller than n."""
    if len(v) == 1:
        return v[0]
    half = 1 << (len(v) - 1).bit_length() - 1
    return tree(v[:half]) + tree(v[half:])


@pytest.mark.parametrize("precision", [FP32, TF32, BF16])
def test_gradients_along_the_tree(device: Device, precision: int) -> None:
    """A buffer of `fold` shards holds the tree's sum of the gradients of its shards, in every
    tile.
    """
    for g, i, o in [(2, 40, 24), (3, 7, 9)]:
        jobs = [
            Job(WEIGHT, precision, tile, shards, fold, g, i, o)
            for tile in TILES
            for shards in (1, 2, 3, 5, 7, 8)
            for fold in (1, 2, 4, 8)
        ]
        results = device.run(jobs)
        alone = results[next(job for job in jobs if job.shards == 8 and job.fold == 1)]
        for job in jobs:
            for name, v in results[job].items():
                for buffer, found in enumerate(v):
                    parts = alone[name][
                        buffer * job.fold : min((buffer + 1) * job.fold, job.shards)
                    ]
                    assert np.array_equal(
                        found.view(np.uint32), tree(list(parts)).view(np.uint32)
                    ), (job, name)


def test_accumulate_adds_after_the_tree(device: Device) -> None:
    plain = [
        Job(WEIGHT, FP32, tile, 5, 4, 2, i, o) for tile in TILES for i, o in ((40, 24), (7, 9))
    ]
    added = [dataclasses.replace(job, flag=True) for job in plain]
    results = device.run(plain + added)
    for a, b in zip(plain, added, strict=True):
        for name in ("dw", "db"):
            assert np.array_equal(results[b][name], results[a][name] + b.tensor(name)), (b, name)


def test_infinity_and_not_a_number(device: Device) -> None:
    """They stay what they are in every precision, in the outputs that they reach and in no
    other.
    """
    jobs = [
        Job(FORWARD, p, tile, 2, 1, 1, 24, 12, True, special=True)
        for p in PRECISIONS
        for tile in TILES
    ]
    for job, found in device.run(jobs).items():
        with np.errstate(invalid="ignore"):
            y = np.einsum(
                "oi,sgil->sgol",
                job.tensor("w").astype(np.float64),
                job.tensor("x").astype(np.float64),
            )
            expected = np.where(y < 0, 0, y)
        assert np.array_equal(np.isnan(found["y"]), np.isnan(expected)), job
        assert np.array_equal(np.isposinf(found["y"]), np.isposinf(expected)), job
        assert np.isnan(expected).any()


@pytest.mark.parametrize("settings", [{"order": 7}, {"late": 1}])
def test_the_order_of_threads_and_streams_changes_nothing(
    device: Device, settings: dict[str, int]
) -> None:
    """Warps and blocks in a shuffled order; work that really runs behind the host."""
    jobs = [
        Job(op, p, tile, 3, 2, 2, 100, 68)
        for op in range(3)
        for p in (FP32, BF16)
        for tile in TILES
    ]
    usual, other = device.run(jobs), device.run(jobs, **settings)
    for job in jobs:
        for name in usual[job]:
            assert np.array_equal(bits(usual, job)[name], bits(other, job)[name]), (job, name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_memory_is_used_well(device: Device, precision: int) -> None:
    """Whole sectors, and no bank conflicts but where SMALL stores rows of FP32 (a few percent)."""
    for op, tile in itertools.product(range(3), TILES):
        stats = device.folder / "stats"
        stats.unlink(missing_ok=True)
        device.run([Job(op, precision, tile, 2, 2, 4, 400, 128)], stats=stats)
        (line,) = stats.read_text().splitlines()
        use = json.loads(line)
        for name in ("load", "store"):
            assert use[f"{name}_bytes"] > 0.95 * 32 * use[f"{name}_sectors"], (op, tile, use)
        allowed = 0.08 if (tile, precision) == (SMALL, FP32) else 0
        assert use["shared_extra_wavefronts"] <= allowed * use["shared_wavefronts"], (op, tile, use)


def test_the_portable_form(portable: Device) -> None:
    """The code for other GPUs, run on the emulated one: values, and the same bits from all
    tiles.
    """
    jobs = [
        Job(op, precision, tile, shards, 4, 2, i, o)
        for op, precision in itertools.product(range(3), (FP32, BF16))
        for i, o, tiles in ((100, 68, TILES), (30, 7, (SMALL,)))
        for tile in tiles
        for shards in (1, 3)
    ]
    results = portable.run(jobs)
    check(results)
    for job in jobs:
        other = next(j for j in jobs if dataclasses.replace(j, tile=job.tile) == job)
        for name in results[job]:
            assert np.array_equal(bits(results, job)[name], bits(results, other)[name]), (job, name)


def test_a_fold_too_large_is_refused(device: Device) -> None:
    with pytest.raises(AssertionError, match="fold=16 is refused"):
        device.run([Job(WEIGHT, FP32, CHOSEN, 16, 16, 1, 8, 8)])
