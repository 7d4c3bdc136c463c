"""Programs that change while they run: eager, replayed, resumed and restarted after a kill they
are one training.
"""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from e2e.changing import CHANGES, EPOCHS, Change, made

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.comm import Communicator, mock
from odyssey.errors import Stopped

PROGRAM = Path(__file__).with_name("changing.py")


@functools.cache
def computed(change: str) -> str:
    """The hash of what the program computes when every step runs forward()."""
    trainer, loader = made(change, execution="eager")
    trainer.fit(loader, epochs=EPOCHS, callbacks=[Change(change)], verbose=False)
    return trainer.weights_sha256()


def test_the_changes_have_an_effect():
    assert len({computed(change) for change in CHANGES}) == len(CHANGES)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("execution", ["eager", "replay"])
def test_a_step_computes_what_the_program_says_now(change, execution):
    trainer, loader = made(change, execution=execution)
    first = trainer.model.first.weight.data.copy()
    trainer.fit(loader, epochs=EPOCHS, callbacks=[Change(change)], verbose=False)
    assert trainer.weights_sha256() == computed(change)
    assert (trainer.model.first.weight.data != first).any()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stop", [2, 3, 4, 7])
@pytest.mark.parametrize(
    "executions", [("replay", "eager"), ("eager", "replay"), ("replay", "replay")]
)
def test_a_stopped_training_goes_on_as_it_would_have(tmp_path, change, stop, executions):
    before, after = executions
    trainer, loader = made(change, execution=before)
    with pytest.raises(Stopped):
        trainer.fit(
            loader,
            epochs=EPOCHS,
            callbacks=[Change(change, stop)],
            checkpoint_dir=tmp_path,
            verbose=False,
        )
    trainer, loader = made(change, execution=after)
    trainer.fit(
        loader, epochs=EPOCHS, callbacks=[Change(change)], checkpoint_dir=tmp_path, verbose=False
    )
    assert trainer.steps == 12 and trainer.weights_sha256() == computed(change)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_is_killed_changes_nothing(launch, change, killed):
    words = [
        "-m",
        "odyssey",
        "launch",
        "-n",
        2,
        "--run-dir",
        launch.folder / "run",
        PROGRAM,
        change,
    ]
    done = launch.python(*words, *[launch.folder / "killed"] * killed)
    assert done.returncode == 0, done.stderr
    assert ("was killed by SIGKILL" in done.stderr) == killed
    assert re.findall("hash (.*)", done.stdout) == [computed(change)]


# --- modes ----------------------------------------------------------------------------------------


def in_mode(
    comm: Communicator, evaluated: str, execution: str
) -> tuple[str, list[float], list[bool]]:
    """Weights, running means and modes after a training whose model, or only its norm, was put
    into eval() before.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 3, size=(96, 8)).astype(np.float32), rng.integers(0, 3, 96)
    nn.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    for module in {"none": [], "norm": [net[1]], "dropout": [net[2]], "model": [net]}[evaluated]:
        module.eval()
    trainer = DistributedTrainer(
        net, optim.SGD(lr=0.05), comm=comm, shard_size=8, threads=1, execution=execution
    )
    set_ = data.arrays(x, y, classes=3)
    trainer.fit(data.DataLoader(set_, batch_size=32), set_, epochs=2, verbose=False)
    return (
        trainer.weights_sha256(),
        trainer.state_dict()["1.running_mean"].tolist(),
        [m.training for m in net.modules()],
    )


def test_fit_leaves_modes_as_the_user_has_set_them():
    found = {
        mode: in_mode(Communicator(), mode, "eager")
        for mode in ("none", "norm", "dropout", "model")
    }
    assert len({weights for weights, *_ in found.values()}) == 4
    moved = {mode: any(mean) for mode, (_, mean, _) in found.items()}
    assert moved == {"none": True, "norm": False, "dropout": True, "model": False}
    assert [found[mode][2] for mode in found] == [
        [True] * 5, [True, True, False, True, True], [True, True, True, False, True], [False] * 5
    ]  # fmt: skip
    for mode, expected in found.items():
        assert [in_mode(Communicator(), mode, "replay"), *mock.run(2, in_mode, mode, "replay")] == [
            expected
        ] * 3, mode


# --- ZeRO on five ranks ---------------------------------------------------------------------------

FIVE = """
    import sys
    import numpy as np
    from odyssey import DistributedTrainer, comm, data, nn, optim

    zero, samples = int(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(samples, 16)).astype(np.float32), rng.integers(0, 14, samples)
    nn.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 14, bias=False))  # buckets of 128 and 112 floats
    trainer = DistributedTrainer(net, optim.SGD(lr=0.1), shard_size=1, zero=zero, bucket_size_mb=1e-6, threads=1)
    trainer.fit(data.DataLoader(data.arrays(x, y, classes=14), batch_size=samples), verbose=False)
    found = trainer.weights_sha256()
    if comm.world().rank == 0:
        print("hash", found)
"""


@pytest.mark.parametrize(("zero", "samples"), [(2, 13), (3, 7)])
def test_zero_on_five_ranks_with_buckets_of_near_sizes(launch, zero, samples):
    program = launch.folder / "five.py"
    program.write_text(textwrap.dedent(FIVE))
    one, five = (launch.python(program, zero, samples, ranks=ranks) for ranks in (0, 5))
    assert one.returncode == five.returncode == 0, five.stderr
    assert one.stdout == five.stdout != ""
