"""Checkpoints in parts: saved on one layout and loaded on another, random ones; damage; who sees
which files.
"""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.checkpoints import Store, manifest, reader, writer
from odyssey.comm import mock
from odyssey.errors import CheckpointError, NumericsError, OutputError

SEED = 20261124


def batch(samples: int = 44) -> data.Batch:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((samples, 20), np.float32), rng.integers(0, 7, samples)
    return next(iter(data.DataLoader(data.arrays(x, y), batch_size=samples)))


def network() -> nn.Module:
    """Sizes that are no multiples of anything; one layer that several stages could share no
    further.
    """
    return nn.Sequential(
        nn.Linear(20, 33),
        nn.ReLU(),
        nn.Linear(33, 18),
        nn.LayerNorm(18),
        nn.ReLU(),
        nn.Linear(18, 25),
        nn.Linear(25, 7),
    )


def trainer(comm, optimizer=optim.Adam, **layout) -> DistributedTrainer:
    nn.manual_seed(0)
    fixed = {"shard_size": 8, "threads": 1, "device": "cpu", "check_every": 0}
    return DistributedTrainer(network(), optimizer(lr=0.01), comm=comm, **fixed, **layout)


def layout(dice: random.Random) -> tuple[int, dict]:
    """Ranks, and what makes a layout of them."""
    kind = dice.choice(["one", "dp", "zero", "zero", "zero", "pp", "tp", "both", "zero 1"])
    dp = dice.choice([1, 2, 3, 4])
    buckets = {"bucket_size_mb": dice.choice([1e-4, 1e-3, 25])}
    if kind == "one":
        return 1, {}
    if kind == "dp":
        return dice.choice([2, 3, 8]), buckets
    if kind == "zero":
        return dice.choice([2, 3, 4, 5, 8]), {"zero": dice.choice([1, 2, 3]), **buckets}
    pp, tp = {"pp": (2, 1), "tp": (1, dice.choice([2, 4])), "both": (2, 2)}.get(
        kind, dice.choice([(2, 1), (1, 2)])
    )
    dp = min(dp, 8 // (pp * tp))
    return dp * pp * tp, {
        "dp": dp,
        "pp": pp,
        "tp": tp,
        **({"zero": 1} if kind == "zero 1" and dp > 1 else {}),
    }


def mesh_of(given: dict) -> dict:
    from odyssey.parallel.mesh import Mesh

    axes = {key: given[key] for key in ("dp", "pp", "tp") if key in given}
    rest = {key: value for key, value in given.items() if key not in axes}
    return {**rest, "mesh": Mesh(**axes)} if axes else rest


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def saved(comm, folder, given, steps: int, optimizer=optim.Adam) -> tuple[dict, str]:
    made = trainer(comm, optimizer, **mesh_of(given))
    for _ in range(steps):
        made.train_step(batch())
    made.save_checkpoint(folder)
    return made.named_state(), made.weights_sha256()


def loaded(comm, path, given, begun: bool, optimizer=optim.Adam) -> tuple[str, dict, str]:
    """What a trainer, which had taken a step of its own if `begun`, has of a checkpoint, and a
    step later.
    """
    made = trainer(comm, optimizer, **mesh_of(given))
    if begun:
        made.train_step(batch())
    made.load_checkpoint(path)
    digest = made.weights_sha256()
    made.train_step(batch())
    return digest, made.named_state(), made.weights_sha256()


@pytest.mark.parametrize("case", range(40))
def test_any_layout_to_any_other(tmp_path, case):
    dice = random.Random(f"{SEED}/{case}")
    (ranks, given), (others, now) = layout(dice), layout(dice)
    steps, begun = dice.choice([0, 1, 2]), dice.random() < 0.5
    optimizer = dice.choice([optim.Adam, optim.SGD])
    everyone = mock.run(ranks, saved, tmp_path, given, steps, optimizer)
    state, digest = everyone[0]
    assert all(same(one, state) and its == digest for one, its in everyone)
    (path,) = tmp_path.glob("step_*")
    whole = Store(tmp_path, owner=False).load(path)
    for name, value in state.items():
        stem, _, tensor = name.partition(" ")
        key = tensor if stem == "weight" else "/".join(reversed(tensor.split(" of ")[::-1]))
        assert np.array_equal(
            whole.arrays["parameters" if stem == "weight" else "optimizer"][key], value
        ), name
    in_parts = json.loads((path / "manifest.json").read_text())["version"] == 4
    assert in_parts == (
        ranks > 1 and bool(given.get("zero") or given.get("pp", 1) * given.get("tp", 1) > 1)
    )
    assert len(list(path.glob("*.safetensors"))) <= max(ranks, 2)

    (one,) = mock.run(1, loaded, path, {}, False, optimizer)
    for rank, (its, later, after) in enumerate(
        mock.run(others, loaded, path, now, begun, optimizer)
    ):
        assert its == digest, rank
        assert same(later, one[1]) and after == one[2], (rank, given, now)


# --- bytes ----------------------------------------------------------------------------------------


def test_no_rank_needs_more_than_it_has(launch):
    """12 MB of parameters, 36 MB of state: without parts each of them would be somewhere once
    more.
    """
    script = Path(__file__).with_name("memory_ranks.py")
    for number, settings in enumerate([{"zero": 3}, {"zero": 1}]):
        done = launch.python(
            script, launch.folder / str(number), 3_000_000, json.dumps(settings), ranks=2
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert set(found) == {"save", "digest", "load", "load into a new one"}
        assert max(found["save"] + found["load"] + found["load into a new one"]) < 8, found
        assert max(found["digest"]) < 14, found  # windows of 4 MB, and what an all-reduce takes


# --- damage and failures --------------------------------------------------------------------------

ZERO = {"zero": 3, "bucket_size_mb": 1e-3}


def flip(file: Path, at: int) -> None:
    text = bytearray(file.read_bytes())
    text[at] ^= 1
    file.write_bytes(text)


@pytest.mark.parametrize("what", ["flipped", "header", "short", "missing", "swapped"])
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(tmp_path, what):
    def run(comm):
        made = trainer(comm, **ZERO)
        for _ in range(2):
            made.train_step(batch())
            made.save_checkpoint(tmp_path)
        comm.barrier()
        if comm.rank == 0:
            file = tmp_path / "step_00000002" / "rank-00001.safetensors"
            if what in ("flipped", "header"):
                flip(file, -1 if what == "flipped" else 20)
            elif what == "short":
                file.write_bytes(file.read_bytes()[:-1])
            elif what == "missing":
                file.unlink()
            else:
                (file.parent / "rank-00002.safetensors").rename(file)
        comm.barrier()
        return made.load_checkpoint(tmp_path), made.steps

    assert mock.run(3, run) == [(1, 1)] * 3
    ((_, reason),) = Store(tmp_path, owner=False).newest()[1]
    assert "rank-0000" in reason and (what != "flipped" or "does not match its SHA-256" in reason)


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(tmp_path, monkeypatch):
    write = writer.write_file

    def fails(folder, stem, *rest):
        if stem == "rank-00002":
            raise OutputError(
                "[checkpoint] step_00000002 cannot be saved: rank-00002.safetensors: No space left"
            )
        return write(folder, stem, *rest)

    def run(comm):
        made = trainer(comm, **ZERO)
        made.train_step(batch())
        made.save_checkpoint(tmp_path)
        comm.barrier()
        monkeypatch.setattr(writer, "write_file", fails)
        comm.barrier()
        made.train_step(batch())
        with pytest.raises(OutputError, match=r"rank-00002\.safetensors: No space left"):
            made.save_checkpoint(tmp_path)
        comm.barrier()
        monkeypatch.setattr(writer, "write_file", write)
        return made.load_checkpoint(tmp_path)

    assert mock.run(3, run) == [1] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step_00000001"]


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    def run(comm):
        made = trainer(comm, **ZERO)
        made.train_step(batch())
        if comm.rank == 1:
            made.optimizer.arrays["m"][0] = np.nan
        with pytest.raises(NumericsError, match="step_00000001 is not saved: optimizer/m/"):
            made.save_checkpoint(tmp_path)

    mock.run(2, run)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_where_not_all_ranks_see_the_directory_rank_0_reads_and_writes(tmp_path, monkeypatch):
    (state, digest), *_ = mock.run(3, saved, tmp_path / "seen", ZERO, 2)
    is_dir, opened = Path.is_dir, reader.open_snapshot

    def blind(path, *given, **more):
        if threading.current_thread() in others:
            raise CheckpointError("the directory is missing")
        return opened(path, *given, **more)

    others = set()

    def run(comm):
        if comm.rank:
            others.add(threading.current_thread())
        comm.barrier()
        made = trainer(comm, **ZERO)
        made.load_checkpoint(tmp_path / "seen")
        found = made.named_state(), made.weights_sha256()
        made.save_checkpoint(tmp_path / "again")
        return found

    monkeypatch.setattr(reader, "open_snapshot", blind)
    monkeypatch.setattr(
        Path, "is_dir", lambda path: threading.current_thread() not in others and is_dir(path)
    )
    for one, its in mock.run(3, run):
        assert same(one, state) and its == digest
    monkeypatch.undo()
    (path,) = (tmp_path / "again").glob("step_*")
    assert sorted(p.stem for p in path.iterdir()) == ["manifest", "optimizer", "parameters"]


def test_a_checkpoint_that_changes_after_it_was_verified_ends_all_ranks(tmp_path):
    """What a rank reads later is hashed once more."""
    mock.run(2, saved, tmp_path, ZERO, 2)
    (path,) = tmp_path.glob("step_*")

    def run(comm):
        made = trainer(comm, **ZERO)
        made.load_checkpoint(tmp_path)  # the state of the optimizer comes with the first step
        comm.barrier()
        if comm.rank == 0:
            for file in path.glob("rank-*"):
                # the first tensor of the optimizer
                flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"))
        comm.barrier()
        with pytest.raises(CheckpointError, match="does not match its SHA-256"):
            made.train_step(batch())

    mock.run(2, run)


# --- manifests that somebody made -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([(0, 6, 6, 1), (6, 6, 6, 1)], None),
        ([(0, 2, 4, 3), (2, 2, 4, 3)], None),
        ([(0, 6, 6, 1), (5, 6, 6, 1)], "gap"),
        ([(0, 2, 4, 3), (1, 2, 4, 3)], "gap"),
        ([(0, 6, 6, 1)], "its parts are not 12 elements"),
        ([(0, 6, 6, 1), (7, 6, 6, 1)], "is no part of"),
        ([(0, 3, 2, 2), (6, 6, 6, 1)], "is no part of"),
        ([(0, 0, 0, 0), (0, 12, 12, 1)], "is no part of"),
    ],
)
def test_parts_fill_their_tensor(runs, said):
    def entry(number, run):
        shape = [run[1] * run[3]]
        tensor = {
            "name": f"p/w/{run[0]}",
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [0, 4 * shape[0]],
        }
        tensors = [{**tensor, "sha256": "0" * 64, "whole": [3, 4], "run": list(run)}]
        return {
            "name": f"rank-{number}.safetensors",
            "size": 100,
            "header_sha256": "0" * 64,
            "tensors": tensors,
        }

    def parsed():
        files = tuple(manifest.parse_file(entry(number, run)) for number, run in enumerate(runs))
        return manifest.parse_manifest(manifest.Manifest(1, 0, {}, files).encoded())

    if said is None:
        assert parsed().version == 2
    else:
        with pytest.raises(CheckpointError, match=said):
            parsed()
