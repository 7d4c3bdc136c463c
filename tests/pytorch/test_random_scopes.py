"""Random numbers that programs draw from the generators of the process: the same on any number of
ranks, and after a resume.
"""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils import data  # noqa: E402

from odyssey import callbacks  # noqa: E402
from odyssey.comm import Communicator  # noqa: E402
from odyssey.errors import ConfigError  # noqa: E402
from odyssey.torch import DataLoader, DistributedDataParallel, DistributedTrainer  # noqa: E402
from odyssey.torch.shard_draws import runs_own_code  # noqa: E402

PROGRAMS = Path(__file__).with_name("drawing_programs.py")
X = torch.linspace(-1, 1, 48).view(12, 4)
Y = torch.arange(12) % 3
BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]


def test_random_programs_draw_the_same_numbers_on_any_ranks_and_after_a_resume(launch):
    done = launch.python(PROGRAMS, 16, 0, 40, ranks=3)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " | " in line]
    assert len(lines) == 16
    wrong = [line for line in lines if line.split(" | ")[1] != "same"]
    assert not wrong, "\n".join(wrong)


def draw(library: str) -> float:
    if library == "torch":
        return float(torch.rand(()))
    return float(np.random.rand()) if library == "numpy" else random.random()


class Draws(nn.Module):
    """A module that draws in a forward pass if it is told to."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.library = library
        self.is_drawing = False
        self.numbers: list[float] = []

    _not_state = ("numbers",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.is_drawing:
            number = draw(self.library)
            self.numbers.append(number)
            y = y + number
        return y


def make(module: nn.Module, **settings: Any) -> DistributedTrainer:
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(module.parameters(), 0.1)
    return DistributedTrainer(
        module,
        optimizer,
        comm=Communicator(),
        shard_size=3,
        **{"deterministic": "warn", **settings},
    )


@pytest.mark.parametrize("library", ["numpy", "python"])
def test_a_step_is_repeated_if_a_shard_draws_for_the_first_time_in_a_later_step(library):
    class Starts(callbacks.Callback):
        def on_step_end(self, context: callbacks.Context) -> None:
            draw(library)
            context.trainer.module.is_drawing = context.steps >= 3

    def train(first_step: int) -> list[float]:
        torch.manual_seed(0)
        module = Draws(library)
        module.is_drawing = first_step == 0
        trainer = make(module)
        trainer.fit(BATCHES, epochs=3, callbacks=[Starts()], verbose=False)
        assert trainer.steps == 6
        return module.numbers

    numbers = train(3)
    # two shards in each of the steps 4, 5 and 6, and those of step 4 twice
    assert len(numbers) == 8
    assert len(set(numbers)) == 8
    # a run whose first step draws seeds all shards, and none of its steps is repeated
    assert numbers[2:] == train(0)[-6:]


@pytest.mark.parametrize("library", ["torch", "numpy", "python"])
def test_the_programs_own_draws_continue_as_without_a_training_run(library):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    draw(library)
    expected = [draw(library) for _ in range(3)]
    module = Draws(library)
    module.is_drawing = True

    class Looks(callbacks.Callback):
        def on_step_end(self, context: callbacks.Context) -> None:
            draw(library)
            context.trainer.evaluate(BATCHES)

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    draw(library)
    numbers = [draw(library)]
    trainer = make(module)
    trainer.fit(BATCHES, callbacks=[Looks()], verbose=False)
    numbers.append(draw(library))
    trainer.evaluate(BATCHES)
    trainer.predict(X)
    numbers.append(draw(library))
    assert numbers == expected


def test_a_seed_in_a_scope_holds_until_its_end():
    numbers: list[list[float]] = []

    class Seeds(callbacks.Callback):
        _not_state = ("numbers",)

        def on_step_end(self, context: callbacks.Context) -> None:
            torch.manual_seed(5)
            numbers.append([draw("torch"), draw("torch")])

        def on_epoch_end(self, context: callbacks.Context) -> None:
            numbers.append([draw("torch"), draw("torch")])

    make(nn.Linear(4, 3)).fit(BATCHES, callbacks=[Seeds()], verbose=False)
    first, second, end = numbers
    assert first == second != end


def test_two_callbacks_and_two_events_draw_different_numbers():
    numbers: list[float] = []

    class Draw(callbacks.Callback):
        def on_step_end(self, context: callbacks.Context) -> None:
            numbers.append(draw("numpy"))

        def on_epoch_start(self, context: callbacks.Context) -> None:
            numbers.append(draw("numpy"))

    make(nn.Linear(4, 3)).fit(BATCHES, callbacks=[Draw(), Draw()], epochs=2, verbose=False)
    assert len(set(numbers)) == len(numbers) == 12


def test_two_trainings_in_two_threads_are_an_error():
    problems: list[Exception] = []
    both_are_there = threading.Barrier(2, timeout=5)

    class Waits(nn.Module):
        """Its first forward pass waits until the other thread is in a shard too, or has failed."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                both_are_there.wait()
            except threading.BrokenBarrierError:
                pass
            return self.layer(x)

    def train() -> None:
        trainer = make(Waits())
        try:
            # on a slow machine one thread may wait, and they meet in a later epoch
            trainer.fit(BATCHES, epochs=300, verbose=False)
        except ConfigError as problem:
            problems.append(problem)
            both_are_there.abort()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (problem,) = problems
    assert "another thread of this process trains at the same time" in str(problem)


def test_an_optimizer_that_draws_with_zero_is_an_error(launch):
    program = """
import torch
from odyssey.torch import DistributedTrainer
module = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(module.parameters(), 0.1)
def add_noise(one, arguments, keywords):
    for group in one.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad += torch.randn_like(p)
optimizer.register_step_pre_hook(add_noise)
trainer = DistributedTrainer(module, optimizer, shard_size=3, zero=1)
batch = torch.ones(6, 4), torch.arange(6) % 3
trainer.fit([batch], verbose=False)
"""
    done = launch.python("-c", program, ranks=2)
    assert done.returncode == 64, done.stderr
    assert "the optimizer draws random numbers, and with zero=1 each rank updates" in done.stderr


def test_optimizers_and_schedulers_that_run_own_code():
    parameters = [nn.Parameter(torch.ones(2))]
    plain = torch.optim.Adam(parameters)
    hooked = torch.optim.Adam(parameters)
    hooked.register_step_post_hook(lambda *arguments: None)

    class Own(torch.optim.SGD):
        pass

    schedulers = torch.optim.lr_scheduler
    assert not runs_own_code(plain) and runs_own_code(hooked) and runs_own_code(Own(parameters))
    assert not runs_own_code(schedulers.StepLR(plain, 3))
    chained = schedulers.ChainedScheduler([schedulers.LambdaLR(plain, lambda step: 1.0)])
    assert runs_own_code(chained)


def test_shards_of_a_custom_loop_draw_from_all_generators_by_step_and_shard():
    def numbers(seed: int) -> list[float]:
        for seed_one in (random.seed, np.random.seed, torch.manual_seed):
            seed_one(seed)
        net = DistributedDataParallel(Draws("numpy"), shard_size=3, comm=Communicator())
        drawn = []
        for batch in BATCHES:
            for x, y in net.shards(batch):
                drawn += [draw("torch"), draw("numpy"), draw("python")]
                nn.functional.cross_entropy(net(x), y).backward()
            net.zero_grad()
        return drawn

    first = numbers(1)
    assert first == numbers(2)
    assert len(set(first)) == len(first) == 12


def test_a_collate_function_draws_by_epoch_and_sample():
    class Mix:
        def __call__(self, samples: list[Any]) -> Any:
            x, _ = data.default_collate(samples)
            return x[:, :1] * 0 + draw("numpy"), torch.zeros(len(x), dtype=torch.int64)

    def numbers(workers: int) -> list[float]:
        np.random.seed(workers)
        loader = DataLoader(
            data.TensorDataset(X, Y),
            6,
            shuffle=True,
            shard_size=3,
            comm=Communicator(),
            collate_fn=Mix(),
            num_workers=workers,
        )
        net = DistributedDataParallel(nn.Linear(1, 3), shard_size=3, comm=Communicator())
        drawn = []
        for _ in range(2):
            for batch in loader:
                for x, _y in net.shards(batch):
                    drawn.append(float(x[0]))
                    net(x).sum().backward()
                net.zero_grad()
        return drawn

    first = numbers(0)
    assert len(set(first)) == len(first) == 8
    assert numbers(1) == first


class ByEpoch(data.Dataset):
    """Samples that depend on the epoch that was set last."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return X[i] * (1 + self.epoch), Y[i]


def test_persistent_workers_get_the_epoch_of_the_data_set(tmp_path):
    def weights(steps: int | None, **saving: Any) -> str:
        torch.manual_seed(0)
        loader = DataLoader(
            ByEpoch(), 4, comm=Communicator(), num_workers=1, persistent_workers=True
        )
        trainer = make(nn.Linear(4, 3))
        trainer.fit(loader, epochs=3, steps=steps, verbose=False, **saving)
        return trainer.weights_sha256()

    whole = weights(None)
    weights(5, checkpoint_dir=tmp_path)
    assert weights(None, checkpoint_dir=tmp_path) == whole


@pytest.mark.parametrize("kind", ["odyssey", "torch", "sampler"])
@pytest.mark.parametrize("every", ["on_step_end", "on_epoch_end"])
@pytest.mark.parametrize("what", ["loader", "data set"])
def test_an_evaluation_of_the_trainings_data_changes_nothing(kind, every, what):
    def weights(evaluates: bool) -> str:
        torch.manual_seed(0)
        rows = ByEpoch()
        if kind == "odyssey":
            loader: Any = DataLoader(rows, 4, shuffle=True, comm=Communicator())
        elif kind == "torch":
            loader = data.DataLoader(rows, 4, shuffle=True)
        else:
            sampler = data.RandomSampler(rows, generator=torch.Generator().manual_seed(3))
            loader = data.DataLoader(rows, 4, sampler=sampler)
        trainer = make(nn.Linear(4, 3))
        source = loader if what == "loader" else rows

        def look(context: callbacks.Context) -> None:
            if evaluates:
                trainer.evaluate(source)

        listener = callbacks.LambdaCallback(**{every: look})
        trainer.fit(loader, epochs=3, callbacks=[listener], verbose=False)
        return trainer.weights_sha256()

    assert weights(True) == weights(False)


def test_an_evaluation_that_would_end_the_epoch_is_an_error():
    rows = data.TensorDataset(X, Y)
    loader = data.DataLoader(rows, 4, num_workers=1, persistent_workers=True)
    trainer = make(nn.Linear(4, 3))
    look = callbacks.LambdaCallback(on_step_end=lambda context: trainer.evaluate(loader))
    with pytest.raises(ConfigError, match="persistent workers read one epoch at a time"):
        trainer.fit(loader, callbacks=[look], verbose=False)


def test_callbacks_of_odysseys_trainer_draw_from_torch():
    import odyssey
    from odyssey import nn as modules
    from odyssey import optim
    from odyssey.data import arrays

    drawn = []

    class Draw(callbacks.Callback):
        _not_state = ("drawn",)

        def on_step_end(self, context: callbacks.Context) -> None:
            drawn.append(draw("torch"))

    for seed in (1, 2):
        torch.manual_seed(seed)
        trainer = odyssey.DistributedTrainer(
            modules.Linear(4, 3), optim.SGD(lr=0.1), shard_size=3, threads=1
        )
        samples = arrays(X.numpy(), Y.numpy(), classes=3)
        trainer.fit(odyssey.data.DataLoader(samples, 6), callbacks=[Draw()], verbose=False)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


GENERATORS = {
    "numpy": lambda: np.random.default_rng(3),
    "numpy, old": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}
DRAWS_OF = {
    "numpy": lambda one: one.random(),
    "numpy, old": lambda one: one.rand(),
    "python": lambda one: one.random(),
    "torch": lambda one: float(torch.rand((), generator=one)),
}


@pytest.mark.parametrize("where", ["loop", "module", "nowhere"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_shards_of_a_custom_loop_that_draw_from_a_generator_are_an_error(kind, where):
    class Holder(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.noise = GENERATORS[kind]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + (DRAWS_OF[kind](self.noise) if where == "module" else 0.0))

    net = DistributedDataParallel(Holder(), shard_size=3, comm=Communicator())
    own = GENERATORS[kind]()

    def train() -> None:
        generator = own
        DRAWS_OF[kind](generator)  # before the loop over shards it may
        for x, y in net.shards(BATCHES[0]):
            factor = DRAWS_OF[kind](generator) if where == "loop" else 1.0
            (factor * nn.functional.cross_entropy(net(x), y)).backward()

    if where == "nowhere":
        train()
        return
    name = "generator" if where == "loop" else "module.noise"
    with pytest.raises(ConfigError, match=f"a shard draws from {name}, a generator of the program"):
        train()


class NoiseInEvaluation(nn.Module):
    """A module that adds noise to its inputs, in evaluation only."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if self.training else x + self.draw())


class Counter:
    """A source of numbers that count its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return float(self.calls)


OWN_SOURCES = {
    "seeded": lambda: np.random.default_rng(3).random,
    "without a seed": lambda: lambda: np.random.default_rng().random(),
    "python": lambda: random.Random(3).random,
    "torch": lambda: partial(torch.rand, (), generator=torch.Generator().manual_seed(3)),
    "calls": Counter,
}
SCOPED_SOURCES = {
    "torch": lambda: partial(torch.rand, ()),
    "numpy": lambda: lambda: float(np.random.rand()),
    "python": lambda: random.random,
}


@pytest.mark.parametrize("call", ["evaluate", "predict", "fit"])
@pytest.mark.parametrize("source", OWN_SOURCES)
def test_forward_that_differs_in_each_evaluation_is_an_error(source, call):
    trainer = make(NoiseInEvaluation(OWN_SOURCES[source]()), deterministic="error")
    given = {"evaluate": (BATCHES,), "predict": (X,), "fit": (BATCHES, BATCHES)}[call]
    with pytest.raises(ConfigError, match="has other results in evaluation"):
        getattr(trainer, call)(*given)


@pytest.mark.parametrize("source", SCOPED_SOURCES)
def test_forward_may_draw_from_the_process_in_evaluation(source):
    trainer = make(NoiseInEvaluation(SCOPED_SOURCES[source]()), deterministic="error")
    assert trainer.evaluate(BATCHES).loss == trainer.evaluate(BATCHES).loss
    assert torch.equal(trainer.predict(X), trainer.predict(X))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("source", OWN_SOURCES)
def test_a_metric_that_differs_in_each_call_is_an_error(source, per_sample):
    draw = OWN_SOURCES[source]()

    def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = (output.argmax(1) == target).float() + draw()
        return value if per_sample else value.mean()

    trainer = make(nn.Linear(4, 3), metrics={"noisy": noisy}, deterministic="error")
    with pytest.raises(ConfigError, match="the metric noisy has another value when it is called"):
        trainer.evaluate(BATCHES)


@pytest.mark.parametrize("source", SCOPED_SOURCES)
def test_a_metric_may_draw_from_the_process(source):
    draw = SCOPED_SOURCES[source]()
    trainer = make(nn.Linear(4, 3), metrics={"noisy": lambda output, target: output[:, 0] + draw()})
    first = trainer.evaluate(BATCHES).metrics["noisy"]
    assert first == trainer.evaluate(BATCHES).metrics["noisy"]
