"""resume="weights": a new training that begins with the weights of another."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.comm import mock
from odyssey.errors import CheckpointError, ConfigError

RNG = np.random.default_rng(0)
SET = data.arrays(RNG.normal(size=(60, 6)).astype(np.float32), RNG.integers(0, 3, 60))


def trainer(lr=0.1, width=8, comm=None, kind=optim.SGD):
    nn.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)
    )
    return DistributedTrainer(model, kind(lr=lr), shard_size=10, comm=comm)


def fit(made, folder, epochs=1, **more):
    made.fit(
        data.DataLoader(SET, batch_size=20),
        epochs=epochs,
        checkpoint_dir=folder,
        verbose=False,
        **more,
    )
    return made


def test_a_finished_training_goes_on_with_other_settings(tmp_path, capsys):
    first = fit(trainer(), tmp_path / "c")
    with pytest.raises(
        ConfigError, match=r"optimizer lr = 0.1, this training has lr = 0.01; .*resume='weights'"
    ):
        fit(trainer(lr=0.01), tmp_path / "c", epochs=2)
    second = trainer(lr=0.01, kind=optim.Adam)
    fit(second, tmp_path / "c", epochs=2, resume="weights")
    expected = trainer(lr=0.01, kind=optim.Adam)
    expected.model.load_state_dict(first.model.state_dict())
    fit(expected, tmp_path / "other", epochs=2)
    assert second.weights_sha256() == expected.weights_sha256() and second.steps == 6
    assert sorted(p.name for p in (tmp_path / "c-before-1").iterdir() if p.is_dir()) == [
        "step_00000003"
    ]
    assert (tmp_path / "c" / "step_00000006").is_dir()
    # resume="auto": the new training's own
    again = fit(trainer(lr=0.01, kind=optim.Adam), tmp_path / "c", epochs=2)
    assert again.weights_sha256() == second.weights_sha256()


def test_on_ranks_and_from_another_directory(tmp_path):
    first = fit(trainer(), tmp_path / "c")
    alone = trainer(lr=0.5)
    alone.fit(
        data.DataLoader(SET, batch_size=20), resume=f"weights:{tmp_path / 'c'}", verbose=False
    )

    def work(comm):
        made = fit(trainer(lr=0.5, comm=comm), tmp_path / "new", resume=f"weights:{tmp_path / 'c'}")
        return made.weights_sha256()

    assert set(mock.run(3, work)) == {alone.weights_sha256()} != {first.weights_sha256()}
    assert not (tmp_path / "c-before-1").exists()  # another's directory is left as it is


def test_what_cannot_be_taken(tmp_path):
    fit(trainer(), tmp_path / "c")
    with pytest.raises(CheckpointError, match="has no valid checkpoint"):
        fit(trainer(), tmp_path / "empty", resume="weights")
    with pytest.raises(ConfigError, match="no checkpoint_dir; give 'weights:PATH'"):
        fit(trainer(), None, resume="weights")
    with pytest.raises(
        CheckpointError, match=r"0.weight is float32 \(8, 6\); float32 \(9, 6\) is needed"
    ):
        fit(trainer(width=9), tmp_path / "d", resume=f"weights:{tmp_path / 'c'}")
    with pytest.raises(
        ConfigError, match=r"another model: 0.weight is \(8, 6\) there and \(9, 6\) here;"
    ):
        fit(trainer(width=9), tmp_path / "c", epochs=2)


def test_what_cannot_be_taken_leaves_the_directory_as_it_is(tmp_path):
    fit(trainer(), tmp_path / "c")
    with pytest.raises(CheckpointError, match="0.weight is float32"):
        fit(trainer(width=9), tmp_path / "c", resume="weights")
    assert [p.name for p in (tmp_path / "c").glob("step_*")] == ["step_00000003"]
    assert not (tmp_path / "c-before-1").exists()


def test_of_a_run_by_its_name(launch, tmp_path):
    """The step log of the training before is put aside with its checkpoints, else each step
    would differ from it.
    """
    words = ("--model", "mlp", "--no-eval", "--no-progress")
    assert launch.train(*words, "--steps", 4, "--run-dir", "run").returncode == 0
    done = launch.train(*words, "--steps", 6, "--run-dir", "run", "--resume", "weights")
    assert (
        done.returncode == 0 and "the weights of checkpoints/step_00000004 are taken" in done.stderr
    ), done.stderr
    assert "came out otherwise" not in done.stderr
    assert (tmp_path / "run" / "checkpoints-before-1" / "steps.log").exists()
    # a run, not its checkpoints
    again = launch.train(*words, "--steps", 6, "--run-dir", "new", "--resume", "run")
    assert again.returncode == 0 and "resumed from checkpoints/step_00000006" in again.stderr, (
        again.stderr
    )
