"""Callbacks and loaders that draw from the generators of the process, with odyssey's own modules:
the same numbers on any number of ranks and after a resume.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from resume.drawing import ByEpoch, Drawn

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.core import random_scopes
from odyssey.errors import ConfigError

PROGRAM = """
import random, sys
import numpy as np
from odyssey import DistributedTrainer, Tensor, callbacks, comm, data, nn, optim
from odyssey.errors import Stopped

stop, folder, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
world = comm.world()
nn.manual_seed(0)
g = np.random.default_rng(7)
x, y = g.standard_normal((60, 8)).astype(np.float32), g.integers(0, 3, 60)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
for seed in (random.seed, np.random.seed):
    seed(int(sys.argv[4]) + world.rank)

class Draws(callbacks.Callback):
    def on_step_end(self, context):
        context.trainer.scale_rate(0.9 + 0.2 * random.random())
        if context.steps == stop:
            context.stop = "the test"
        layer, noise = nn.Linear(8, 16), nn.Dropout(0.5)(Tensor(np.ones((1, 16), np.float32)))
        with context.trainer.writing():
            first = net[0].weight.data
            first += 0.01 * noise.data.T * layer.weight.data.reshape(first.shape)

    def on_epoch_start(self, context):
        context.trainer.clip_norm = 0.1 + float(np.random.rand())

class Batches:
    def __iter__(self):
        order = np.random.permutation(60)
        for at in range(0, 60, 20):
            yield x[order[at : at + 20]], y[order[at : at + 20]]

    def __len__(self):
        return 3

pairs = data.arrays(x, y, classes=3)
loader = Batches() if kind == "batches" else data.DataLoader(pairs, 20, shuffle=True)
trainer = DistributedTrainer(net, optim.Adam(lr=0.01), shard_size=4, progress=None)
saving = {"checkpoint_dir": folder, "checkpoint_every": 2} if folder else {}
try:
    trainer.fit(loader, pairs, epochs=3, callbacks=[Draws()], verbose=False, **saving)
    print(trainer.weights_sha256())
except Stopped:
    pass
"""


@pytest.mark.parametrize("kind", ["loader", "batches"])
def test_callbacks_draw_the_same_numbers(launch, tmp_path, kind):
    def weights(ranks: int, stop: int, folder: str, seed: int) -> list[str]:
        done = launch.python("-c", PROGRAM, stop, folder, kind, seed, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    (expected,) = weights(0, 0, "", 100)
    assert set(weights(3, 0, "", 200)) == {expected}
    folder = str(tmp_path / "run")
    weights(2, 4, folder, 300)
    assert set(weights(3, 0, folder, 400)) == {expected}


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
@pytest.mark.parametrize("source", ["loader", "data set", "prediction"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_of_the_trainings_data_changes_nothing(event, source, sampled, workers):
    def weights(evaluates: bool) -> str:
        nn.manual_seed(0)
        rows = ByEpoch()
        order = {"sampler": Drawn()} if sampled else {"shuffle": True}
        loader = data.DataLoader(rows, 8, num_workers=workers, **order)
        trainer = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, threads=1)

        def look(context: callbacks.Context) -> None:
            if not evaluates:
                return
            if source == "prediction":
                trainer.predict(loader)
            else:
                trainer.evaluate(loader if source == "loader" else rows)

        listener = callbacks.LambdaCallback(**{event: look})
        trainer.fit(loader, epochs=3, callbacks=[listener], verbose=False)
        return trainer.weights_sha256()

    assert weights(True) == weights(False)


def test_a_validation_loader_reads_the_same_epoch_after_a_resume(tmp_path):
    def losses(steps: int | None, **saving: object) -> list[float]:
        nn.manual_seed(0)
        pairs = data.arrays(np.eye(24, 4, dtype=np.float32), np.arange(24) % 3, classes=3)
        validation = data.DataLoader(
            pairs, 8, shuffle=True, transform=lambda x, rng: x * np.float32(rng.random())
        )
        trainer = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, threads=1)
        loader = data.DataLoader(pairs, 8, shuffle=True)
        history = trainer.fit(loader, validation, epochs=3, steps=steps, verbose=False, **saving)
        return [record["test_loss"] for record in history.records]

    whole = losses(None)
    losses(4, checkpoint_dir=tmp_path)
    assert losses(None, checkpoint_dir=tmp_path) == whole


SAMPLED = """
import os, random, sys
import numpy as np
from odyssey import DistributedTrainer, comm, data, metrics, nn, optim

random.seed(os.getpid())
np.random.seed(os.getpid())

class Shuffled:
    def __len__(self):
        return 48

    def __iter__(self):
        order = list(range(48))
        random.shuffle(order)
        return iter(order)

class Noisy:
    classes = 3

    def set_epoch(self, epoch):
        self.noise = np.random.randn(48)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return np.full(4, i / 50 + self.noise[i] / 100, np.float32), i % 3

def share(output, target):
    return float((np.random.rand(len(target)) < 0.5).mean())

nn.manual_seed(0)
loader = data.DataLoader(Noisy(), 12, sampler=Shuffled())
trainer = DistributedTrainer(
    nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, metrics={"share": metrics.Gathered(share)}
)
history = trainer.fit(loader, epochs=2, verbose=False)
if comm.world().rank == 0:
    print(trainer.weights_sha256(), [record["train_share"] for record in history.records])
"""


def test_samplers_data_sets_and_metrics_draw_the_same_numbers(launch):
    outputs = set()
    for ranks in (0, 2, 3):
        done = launch.python("-c", SAMPLED, ranks=ranks)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_generators_are_as_before_whatever_a_scope_draws():
    draw = np.random.default_rng(0)
    for case in range(100):
        random.seed(case)
        np.random.seed(case)
        for _ in range(int(draw.integers(0, 700))):
            random.random()
            np.random.standard_normal()
        if case % 3 == 0:
            random.gauss(0, 1)
        python_state = random.getstate()
        numpy_state = np.random.get_state()

        def numbers() -> list[float]:
            return [
                random.random(),
                random.gauss(0, 1),
                np.random.rand(),
                np.random.standard_normal(),
            ]

        with random_scopes.scope(5, "first", case):
            first = numbers()
            with random_scopes.scope(5, "second", case):
                assert numbers() != first
            second = numbers()
        with random_scopes.scope(5, "first", case):
            assert numbers() + numbers() == first + second
        assert random.getstate() == python_state
        for one, other in zip(np.random.get_state(), numpy_state, strict=True):
            assert np.array_equal(one, other)


def test_another_bit_generator_of_numpy_is_seeded_and_restored():
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = np.random.get_state(legacy=False)
        numbers = []
        for _ in range(2):
            with random_scopes.scope(1, "a"):
                numbers.append(np.random.rand())
        assert numbers[0] == numbers[1]
        assert np.random.get_state(legacy=False) == state
    finally:
        np.random.set_bit_generator(original)


def test_the_state_of_python_without_a_look_into_its_memory(monkeypatch):
    generator = random_scopes.PythonGenerator()
    assert generator._has_memory
    monkeypatch.setattr(generator, "_has_memory", False)
    mark = generator.mark()
    state = generator.state()
    random.random()
    assert generator.mark() != mark
    generator.restore(state)
    assert generator.mark() == mark


def test_the_position_of_a_stateful_loader_is_not_lost(tmp_path):
    class Stateful:
        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

        def __len__(self) -> int:
            return 3

        def __iter__(self):
            for self.at in range(3):
                yield np.full((4, 4), self.at, np.float32), np.arange(4) % 3

    loader = Stateful()
    trainer = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=4, threads=1)
    look = callbacks.LambdaCallback(on_step_end=lambda context: trainer.evaluate(loader))
    with pytest.raises(ConfigError, match="which has one position; use another loader"):
        trainer.fit(loader, callbacks=[look], checkpoint_dir=tmp_path, verbose=False)


def test_a_normal_number_that_numpy_holds_back_is_restored_on_every_path():
    generator = random_scopes.NumpyGenerator()
    original = np.random.get_state()
    draw = random.Random(5)
    try:
        for _ in range(200):
            np.random.seed(draw.randrange(1000))
            if draw.random() < 0.7:
                np.random.standard_normal(draw.randrange(4))
            state = generator.state()
            expected = np.random.standard_normal(3)
            generator.restore(state)
            if draw.random() < 0.5:
                generator.seed(draw.randrange(1000))
            np.random.standard_normal(draw.randrange(3))
            generator.restore(state)
            assert generator.mark() == state
            assert np.array_equal(np.random.standard_normal(3), expected)
    finally:
        np.random.set_state(original)
