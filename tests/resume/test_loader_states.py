"""Loaders with a state continue where they were; native modules."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from resume.stateful import SHAPES, Drawing, Stream, Within, batch_of

from odyssey import callbacks, manual_seed, nn, optim
from odyssey.comm import mock
from odyssey.errors import CheckpointError, ConfigError, DataError, Stopped
from odyssey.train.trainer import DistributedTrainer

EPOCHS = 3


def train(comm, make, length, accumulation=1, stop=None, epochs=EPOCHS, **fit):
    """Returns the hash of the weights, or None if the run was stopped after `stop` steps."""
    manual_seed(0)
    trainer = DistributedTrainer(
        nn.Linear(4, 3),
        optim.Adam(lr=0.1),
        shard_size=4,
        threads=1,
        comm=comm,
        accumulation_steps=accumulation,
    )

    def stop_here(context):
        if stop is not None and trainer.steps == stop:
            context.stop = "the test"

    hook = callbacks.LambdaCallback(on_step_end=stop_here)
    try:
        trainer.fit(make(length), epochs=epochs, callbacks=[hook], verbose=False, **fit)
    except Stopped:
        return None
    return trainer.weights_sha256()


@pytest.mark.parametrize("case", range(40))
def test_random_stops_change_nothing(tmp_path, case):
    draw = random.Random(case)
    make = draw.choice(SHAPES)
    length = draw.randint(1, 7)
    accumulation = draw.randint(1, 3)
    (whole,) = mock.run(1, train, make, length, accumulation)
    total = EPOCHS * -(-length // accumulation)
    every = draw.choice([None, 1, 2, 3])
    stops = sorted(draw.sample(range(1, total + 1), min(total, draw.randint(1, 3))))
    for stop in [*stops, None]:
        ranks = draw.randint(1, 3)

        def run(comm, stop=stop):
            options = {"checkpoint_dir": tmp_path, "checkpoint_every": every}
            return train(comm, make, length, accumulation, stop, **options)

        shas = mock.run(ranks, run)
        # a stop at the last step is no stop
        expected = [None] if stop not in (None, total) else [None, whole]
        assert all(sha in expected for sha in shas), (make, length, accumulation, stops, ranks)
    assert set(shas) == {whole}


@pytest.mark.parametrize("stop", range(1, 9))
def test_draws_from_the_process_continue(tmp_path, stop):
    def run(stop=None, **fit):
        random.seed(1)
        np.random.seed(1)
        return mock.run(1, lambda comm: train(comm, Drawing, 3, stop=stop, **fit))

    whole = run()
    run(stop, checkpoint_dir=tmp_path)
    random.random()
    assert run(checkpoint_dir=tmp_path) == whole


@pytest.mark.parametrize("make", SHAPES[:3])
def test_a_rollback_goes_back_in_the_loader(tmp_path, make):
    class Watched:
        """An iterator that makes the sixth batch overflow."""

        def __init__(self, items):
            self.items = items

        def __iter__(self):
            return self

        def __next__(self):
            x, y = next(self.items)
            numbers.append(float(x[0, 0]))
            return (np.copysign(np.float32(3e38), x), y) if len(numbers) == 6 else (x, y)

    class Poisoned(make):
        def __iter__(self):
            return Watched(super().__iter__())

    numbers: list[float] = []
    manual_seed(0)
    trainer = DistributedTrainer(
        nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, threads=1, nonfinite="rollback"
    )
    trainer.fit(Poisoned(4), epochs=2, checkpoint_dir=tmp_path, checkpoint_every=4, verbose=False)
    # batches 1 to 6, and then from the last one before the checkpoint on
    assert len(numbers) == 6 + 5
    assert numbers[6:8] == numbers[3:5]
    assert trainer.steps == 8


def test_a_loader_that_does_not_continue_is_reported(tmp_path):
    class Other(Stream):
        def load_state_dict(self, state):
            self.at = state["at"] + 1

    mock.run(1, lambda comm: train(comm, Other, 5, stop=3, checkpoint_dir=tmp_path))
    with pytest.raises(DataError, match=r"load_state_dict\(\) of the Other does not continue"):
        mock.run(2, lambda comm: train(comm, Other, 5, checkpoint_dir=tmp_path))
    train_on = {"checkpoint_dir": tmp_path, "allow_nondeterministic_data": True}
    assert mock.run(1, lambda comm: train(comm, Other, 5, **train_on))[0]


def test_a_state_that_is_not_accepted_is_named(tmp_path):
    class Failing(Stream):
        def load_state_dict(self, state):
            raise RuntimeError("no such shard")

    mock.run(1, lambda comm: train(comm, Failing, 5, stop=3, checkpoint_dir=tmp_path))
    message = r"step_00000003: load_state_dict\(\) of the Failing failed: RuntimeError: no such"
    with pytest.raises(CheckpointError, match=message):
        mock.run(2, lambda comm: train(comm, Failing, 5, checkpoint_dir=tmp_path))


def test_a_state_that_cannot_be_kept_is_named_before_the_first_step(tmp_path):
    class Locked(Stream):
        def state_dict(self):
            return {"at": self.at, "lock": [threading.Lock()]}

    steps = []

    def run(comm, **fit):
        hook = callbacks.LambdaCallback(on_step_end=lambda context: steps.append(1))
        manual_seed(0)
        trainer = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), threads=1, comm=comm)
        trainer.fit(Locked(2), callbacks=[hook], verbose=False, **fit)

    with pytest.raises(ConfigError, match=r"state_dict\(\) of the Locked .*state\.lock\[0\]"):
        mock.run(1, lambda comm: run(comm, checkpoint_dir=tmp_path))
    assert not steps
    mock.run(1, run)  # without checkpoints nobody asks for a state
    assert len(steps) == 2


def test_a_loader_without_a_state_now_is_read_from_its_start(tmp_path):
    class Plain:
        """Has the methods, and no state, as MosaicML's loader of a plain data set."""

        def __init__(self, length):
            self.length = length

        def __iter__(self):
            return (batch_of(i) for i in range(self.length))

        def state_dict(self):
            return None

        def load_state_dict(self, state):
            raise AssertionError("there is none")

    whole = mock.run(1, lambda comm: train(comm, Plain, 4))
    mock.run(2, lambda comm: train(comm, Plain, 4, stop=6, checkpoint_dir=tmp_path))
    assert mock.run(1, lambda comm: train(comm, Plain, 4, checkpoint_dir=tmp_path)) == whole


class KeepsCount:
    """A sampler with a memory of its own, which checkpoints hold."""

    def __init__(self):
        self.epochs = [0]


class KeepsIterator:
    """A sampler with a memory that checkpoints can't hold."""

    def __init__(self):
        self.order = (i for i in range(3))


class KnowsEpoch(KeepsIterator):
    def set_epoch(self, epoch):
        self.order = iter(range(epoch))


@pytest.mark.parametrize("kind", [KeepsCount, KeepsIterator, KnowsEpoch])
def test_a_sampler_whose_memory_is_lost_is_reported(kind, tmp_path, capfd):
    class Plain:
        sampler = kind()

        def __init__(self, length):
            self.length = length

        def __iter__(self):
            return (batch_of(i) for i in range(self.length))

    class WithState(Within):
        sampler = kind()

    mock.run(1, lambda comm: train(comm, WithState, 2, checkpoint_dir=tmp_path / "a"))
    assert "can't keep" not in capfd.readouterr().err
    mock.run(1, lambda comm: train(comm, Plain, 2, checkpoint_dir=tmp_path / "b"))
    line = "can't keep sampler.order (generator): a resumed run"
    assert (line in capfd.readouterr().err) == (kind is KeepsIterator)
