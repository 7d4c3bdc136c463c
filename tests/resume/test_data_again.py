"""A training goes on only with data that repeat themselves: the last batch before a checkpoint
is read again.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey import data, manual_seed, nn, optim
from odyssey.errors import ConfigError, DataError
from odyssey.train.session import Session
from odyssey.train.trainer import DistributedTrainer


class Drawing:
    """Samples with noise of (seed, epoch, sample). If it doesn't repeat itself, each program has
    another seed.
    """

    classes = 3

    def __init__(self, repeats: bool) -> None:
        self.epoch = 0
        self.seed = 7 if repeats else int(np.random.default_rng().integers(8, 1 << 30))
        self.x = np.random.default_rng(5).normal(size=(60, 4)).astype(np.float32)

    def __len__(self) -> int:
        return 60

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: int):
        draw = np.random.default_rng([self.seed, self.epoch, i])
        return self.x[i] + draw.normal(size=4).astype(np.float32), i % 3


def fitted(
    loader, steps: int | None = None, settings: dict | None = None, **fit
) -> DistributedTrainer:
    manual_seed(0)
    t = DistributedTrainer(
        nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, threads=1, **(settings or {})
    )
    t.fit(loader, epochs=2, steps=steps, **fit)
    return t


def loader(repeats: bool, size: int = 8) -> data.DataLoader:
    return data.DataLoader(Drawing(repeats), batch_size=size, shuffle=True)


def manifest(folder) -> dict:
    newest = max(folder.glob("step_*"))
    return json.loads((newest / "manifest.json").read_text())["values"]


@pytest.mark.parametrize("steps", [1, 3, 8, 11])  # an epoch has 8, the last of them with 4 samples
def test_a_data_set_that_does_not_repeat_itself(tmp_path, capfd, steps):
    fitted(loader(False), steps, checkpoint_dir=tmp_path)
    assert "nondeterministic data" not in manifest(tmp_path)
    with pytest.raises(DataError) as caught:
        fitted(loader(False), checkpoint_dir=tmp_path)
    epoch, step = divmod(steps - 1, 8)
    assert str(caught.value) == (
        f"[resume] the last batch before step_{steps:08d} (epoch {epoch + 1}, step {step + 1} of "
        "it), read again, is another: files changed, or the data set does not repeat itself, so "
        "training would go on with other bits; make samples with one seed (torch.manual_seed), or "
        "draw random numbers from (seed, epoch, sample index), as transform= of DataLoader does "
        "and docs/determinism.md shows, or use --allow-nondeterministic-data "
        "(allow_nondeterministic_data=True)"
    )
    assert caught.value.exit_code == 65
    t = fitted(loader(False), checkpoint_dir=tmp_path, allow_nondeterministic_data=True)
    assert t.steps == 16
    assert "the data set does not repeat itself; training goes on" in capfd.readouterr().err
    assert manifest(tmp_path)["nondeterministic data"] is True


@pytest.mark.parametrize("steps", [3, 8, 11])
@pytest.mark.parametrize("settings", [{"num_gpus": 2, "device": "cpu"}, {"execution": "eager"}])
def test_one_that_does_goes_on_with_the_same_bits(tmp_path, steps, settings):
    whole = fitted(loader(True)).weights_sha256()
    fitted(loader(True), steps, checkpoint_dir=tmp_path)
    t = fitted(loader(True), settings=settings, checkpoint_dir=tmp_path)
    assert (t.steps, t.weights_sha256()) == (16, whole)


def test_the_batches_of_a_step_count_together(tmp_path):
    settings = {"accumulation_steps": 2}
    whole = fitted(loader(True), settings=settings).weights_sha256()
    fitted(loader(True), 3, settings, checkpoint_dir=tmp_path)
    assert (
        fitted(loader(True), settings=settings, checkpoint_dir=tmp_path).weights_sha256() == whole
    )
    fitted(loader(False), 3, settings, checkpoint_dir=tmp_path / "other")
    with pytest.raises(DataError, match=r"epoch 1, step 3 of it"):
        fitted(loader(False), settings=settings, checkpoint_dir=tmp_path / "other")


def test_a_checkpoint_that_does_not_know_its_last_batch(tmp_path, monkeypatch):
    values = Session._collect_values
    monkeypatch.setattr(
        Session,
        "_collect_values",
        lambda s: {k: v for k, v in values(s).items() if k != "last batch"},
    )
    fitted(loader(False), 5, checkpoint_dir=tmp_path)
    assert "last batch" not in manifest(tmp_path)
    assert fitted(loader(False), checkpoint_dir=tmp_path).steps == 16


@pytest.mark.parametrize("kind", [list, "iterable"])
@pytest.mark.parametrize("steps", [3, 8])
def test_batches_of_ones_own(tmp_path, kind, steps):
    class Batches:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __iter__(self):
            draw = np.random.default_rng(self.seed)
            for _ in range(8):
                yield draw.normal(size=(8, 4)).astype(np.float32), np.arange(8) % 3

    def batches(seed):
        return list(Batches(seed)) if kind is list else Batches(seed)

    fitted(batches(1), steps, checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match="does not repeat itself"):
        fitted(batches(2), checkpoint_dir=tmp_path)
    assert (
        fitted(batches(1), checkpoint_dir=tmp_path).weights_sha256()
        == fitted(batches(1)).weights_sha256()
    )


# the batch would be read from among the last, or would not be there
@pytest.mark.parametrize("n", [5, 6])
def test_a_generator_gives_its_batches_once_and_none_is_lost(tmp_path, n):
    def batches():
        draw = np.random.default_rng(1)
        for _ in range(n):
            yield draw.normal(size=(8, 4)).astype(np.float32), np.arange(8) % 3

    def trained(**fit):
        manual_seed(0)
        t = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, threads=1)
        t.fit(batches(), **fit)
        return t.steps, t.weights_sha256()

    trained(steps=3, checkpoint_dir=tmp_path)
    assert trained(checkpoint_dir=tmp_path) == trained()
    with pytest.raises(
        ConfigError, match="epoch 2 has no batch, as a generator gives its batches only once"
    ):
        trained(epochs=2)


def test_reading_a_batch_again_changes_nothing():
    a, b = loader(True), loader(True)
    first = list(a)
    again = a.read_again(0, 3)
    assert np.array_equal(next(iter(again)), next(iter(first[3]))) and np.array_equal(
        again.numbers, first[3].numbers
    )
    assert a.next_epoch == 1
    list(b)
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x.numbers, y.numbers) and np.array_equal(next(iter(x)), next(iter(y)))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_data_again import fitted, loader
from odyssey import comm
repeats, steps, folder = sys.argv[1] == "repeats", int(sys.argv[2]) or None, sys.argv[3]
if sys.argv[1] == "on1":
    repeats = comm.world().rank != 1
t = fitted(loader(repeats, 16), steps, checkpoint_dir=folder)
sha = t.weights_sha256()
if t.comm.rank == 0:
    print("result", sha)
"""


def test_on_other_ranks(launch):
    from pathlib import Path

    script = launch.folder / "again.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    whole = launch.python(script, "repeats", 0, launch.folder / "whole").stdout
    for ranks, then in ((0, 2), (2, 3)):
        folder = launch.folder / f"c{ranks}"
        assert launch.python(script, "repeats", 5, folder, ranks=ranks).returncode == 0
        done = launch.python(script, "repeats", 0, folder, ranks=then)
        assert (done.returncode, done.stdout) == (0, whole), done.stderr
    folder = launch.folder / "d"
    assert launch.python(script, "repeats", 3, folder, ranks=3).returncode == 0
    done = launch.python(script, "on1", 0, folder, ranks=3)
    assert done.returncode == 65
    assert (
        done.stderr.count("\n") == 1
        and "read again, is another on rank 1: files changed, or" in done.stderr
    )


def test_files_that_changed_are_refused_as_that(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for i in range(12):
        path = tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.random.default_rng(i).integers(0, 256, (4, 4, 3), np.uint8)).save(path)

    def trained(steps, **fit):
        manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
        t = DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=4, threads=1)
        loader = data.DataLoader(data.ImageFolder(tmp_path / "pictures"), batch_size=4)
        t.fit(loader, epochs=3, steps=steps, checkpoint_dir=tmp_path / "kept", verbose=False, **fit)
        return t.steps

    assert trained(2) == 2
    kept = manifest(tmp_path / "kept")["configuration"]["data set"]
    assert kept[0] == 12 and kept[1] == data.ImageFolder(tmp_path / "pictures").fingerprint()
    last = tmp_path / "pictures" / "b" / "11.png"  # which no batch before the checkpoint has
    before = last.read_bytes()
    last.write_bytes(before + b"\0")
    with pytest.raises(
        ConfigError,
        match=r"another data set \(12 samples, fingerprint .*files changed, or other ones",
    ):
        trained(4)
    last.write_bytes(before)
    assert trained(4) == 4


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_of_before_fingerprints_goes_on(tmp_path, known):
    from odyssey.train import resume

    own = data.arrays(np.arange(40.0).reshape(10, 4), np.arange(10) % 3) if known else Drawing(True)
    now = resume.data_configuration(data.DataLoader(own, batch_size=4), 4)
    count, found, before = now["data set"]
    assert (found is None) is not known and (before == "e3b0c44298fc1c14") is not known
    resume.check({**now, "data set": [count, before]}, now, "step_1")
    for other in ([count, "0" * 16], [count + 1, before], [count, "0" * 16, before], [], "x", None):
        with pytest.raises(ConfigError, match="another data set"):
            resume.check({**now, "data set": other}, now, "step_1")
