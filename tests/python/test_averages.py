"""EMA and SWA of odyssey's own trainer: random networks on all layouts, compared with a plain
recomputation from the weights of each step; evaluations, resumed runs, files, errors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import odyssey
from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.base.outputs import read_weights
from odyssey.callbacks import EMA, SWA, Callback, Context, LambdaCallback
from odyssey.comm import mock
from odyssey.errors import ConfigError, Stopped
from odyssey.parallel.mesh import Mesh

Weights = dict[str, np.ndarray]

# name: (ranks, settings of the trainer)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "1 rank, zero 3": (1, {"zero": 3}),
    "2 ranks": (2, {}),
    "3 ranks": (3, {}),
    "2 ranks, zero 1": (2, {"zero": 1}),
    "3 ranks, zero 2": (3, {"zero": 2}),
    "2 ranks, zero 3": (2, {"zero": 3}),
    "3 ranks, zero 3": (3, {"zero": 3}),
    "small buckets, zero 3": (2, {"zero": 3, "bucket_size_mb": 0.0005}),
    "pp=2": (2, {"mesh": Mesh(pp=2)}),
    "pp=3": (3, {"mesh": Mesh(pp=3), "pipeline_schedule": "gpipe"}),
    "dp=2, pp=2": (4, {"mesh": Mesh(pp=2), "zero": 1}),
    "tp=2": (2, {"mesh": Mesh(tp=2)}),
    "tp=3": (3, {"mesh": Mesh(tp=3)}),
    "dp=2, tp=2, zero 1": (4, {"mesh": Mesh(tp=2), "zero": 1}),
}
WIDTH, CLASSES, BATCH = 5, 3, 24
BATCH_NORM = 1  # the seed of a network that has one


class Network(nn.Module):
    """Random layers: linear ones, normalisations, dropout, a layer that is used twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        width = r.randint(4, 9)
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width) if r.random() < 0.7 else nn.RMSNorm(width)
        layers: list[nn.Module] = []
        for _ in range(r.randint(1, 3)):
            layers += [nn.Linear(width, width), nn.Dropout(0.2)]
        self.hidden = nn.Sequential(*layers)
        self.twice = nn.Linear(width, width, bias=r.random() < 0.5)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.norm(self.first(x))
        x = F.relu(self.hidden(x))
        x = F.tanh(self.twice(F.tanh(self.twice(x))))
        return self.last(x)


class Recorder(Callback):
    """Records the weights at the start, after each step that was taken, and at each epoch's end."""

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.epochs: list[Weights] = []

    def on_fit_start(self, context: Context) -> None:
        self.start = context.trainer.state_dict()

    def on_step_end(self, context: Context) -> None:
        if context.step.taken:
            self.steps.append(context.trainer.state_dict())

    def on_epoch_end(self, context: Context) -> None:
        self.epochs.append(context.trainer.state_dict())


def samples(seed: int, count: int = 88) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, WIDTH)).astype(np.float32)
    return data.arrays(x, rng.integers(0, CLASSES, count))


def make_trainer(comm: Any, seed: int, settings: dict[str, Any]) -> DistributedTrainer:
    nn.manual_seed(seed)
    optimizer = [optim.SGD(lr=0.1, momentum=0.9), optim.Adam(lr=0.02)][seed % 2]
    settings = {"shard_size": 8, "threads": 1, **settings}
    return DistributedTrainer(Network(seed), optimizer, comm=comm, device="cpu", **settings)


def loader(seed: int) -> data.DataLoader:
    return data.DataLoader(samples(seed), batch_size=BATCH, shuffle=True, seed=seed)


def on_ranks(layout: str, function: Callable[[Any, dict[str, Any]], Any]) -> list[Any]:
    """Returns what function(comm, settings) returns on each rank of a layout."""
    ranks, settings = LAYOUTS[layout]
    return mock.run(ranks, function, settings)


def moved(average: np.ndarray, weights: np.ndarray, rate: float) -> np.ndarray:
    return average + np.float32(rate) * (weights - average)


def plain_ema(
    start: Weights, steps: Sequence[Weights], decay: float, warmup: bool | int, every: int
) -> Weights:
    """The average, from the weights of each step, in the simplest form."""
    average = start
    updates = 0
    for weights in steps[every - 1 :: every]:
        now = decay
        if warmup is True:
            now = min(decay, (1 + updates) / (10 + updates))
        elif updates < warmup:
            now = 0.0
        average = {
            name: weights[name] if now == 0 else moved(average[name], weights[name], 1 - now)
            for name in average
        }
        updates += 1
    return average


def plain_swa(epochs: Sequence[Weights]) -> Weights:
    average = epochs[0]
    for n, weights in enumerate(epochs[1:], 1):
        average = {name: moved(average[name], weights[name], 1 / (1 + n)) for name in average}
    return average


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


# --- the arithmetic, on all layouts ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_ema_is_that_of_the_recorded_weights(layout, seed):
    r = random.Random(seed)
    arguments = {
        "decay": r.choice([0.0, 0.5, 0.9, 0.999]),
        "warmup": [True, False, 3][seed],
        "every": r.choice([1, 1, 2, 3]),
    }

    def train(comm, settings):
        ema = EMA(**arguments, evaluate=seed != 1)
        recorder = Recorder()
        trainer = make_trainer(comm, seed, settings)
        validation = samples(99, 40) if seed != 2 else None
        trainer.fit(loader(seed), validation, epochs=2, callbacks=[ema, recorder], verbose=False)
        return ema.average, recorder, ema.steps, ema.updates

    [(alone, recorder, steps, updates)] = mock.run(1, train, {})
    assert (steps, updates) == (8, 8 // arguments["every"])
    expected = plain_ema(recorder.start, recorder.steps, **arguments)
    assert_same(alone, expected)
    for average, rank_recorder, *_ in on_ranks(layout, train):
        assert_same(average, plain_ema(recorder.start, rank_recorder.steps, **arguments))
        assert_same(average, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swa_is_that_of_the_recorded_epochs(layout):
    def train(comm, settings):
        swa = SWA(start_epoch=2, every=2)
        recorder = Recorder()
        trainer = make_trainer(comm, 4, settings)
        trainer.fit(loader(4), samples(99, 40), epochs=7, callbacks=[swa, recorder], verbose=False)
        return swa.average, recorder.epochs, swa.updates, trainer.weights_sha256()

    [(alone, epochs, updates, sha)] = mock.run(1, train, {})
    assert updates == 3
    expected = plain_swa(epochs[1::2])
    assert_same(alone, expected)
    for average, rank_epochs, _, rank_sha in on_ranks(layout, train):
        assert_same(average, plain_swa(rank_epochs[1::2]))
        assert_same(average, expected)
        assert rank_sha == sha


def test_averages_of_constant_weights_are_these_weights():
    """decay x average + (1 - decay) x weights would shrink them, as float32 has no 0.9999."""
    trainer = make_trainer(None, 0, {})
    ema = EMA(decay=0.9999, warmup=False, evaluate=False)
    recorder = Recorder()
    trainer.optimizer.lr = 0.0
    for p in trainer.model.parameters():
        p.requires_grad = p.name.startswith("first.")
    trainer.fit(loader(0), epochs=20, callbacks=[ema, recorder], verbose=False)
    frozen = [name for name in ema.average if name.startswith(("hidden", "twice", "last"))]
    assert frozen
    for name in frozen:
        assert ema.average[name].tobytes() == recorder.start[name].tobytes()


def test_skipped_steps_are_not_counted():
    x = np.random.default_rng(0).normal(size=(72, WIDTH)).astype(np.float32)
    x[BATCH + 1] = 3e38  # overflows in the first layer
    batches = data.DataLoader(data.arrays(x, np.arange(72) % CLASSES), batch_size=BATCH)
    trainer = make_trainer(None, 1, {"nonfinite": "skip"})
    ema = EMA(decay=0.5, warmup=False)
    recorder = Recorder()
    trainer.fit(batches, epochs=2, callbacks=[ema, recorder], verbose=False)
    assert trainer.steps == 6
    assert ema.steps == ema.updates == len(recorder.steps) == 4
    assert_same(ema.average, plain_ema(recorder.start, recorder.steps, 0.5, False, 1))


# --- evaluation ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [EMA, lambda evaluate: SWA(1, evaluate=evaluate)])
def test_an_evaluation_has_the_average_and_leaves_no_trace(layout, kind):
    """The weights of each step are the same with and without it."""
    validation = samples(99, 40)

    def train(comm, settings, evaluate):
        average = kind(evaluate=evaluate)
        recorder = Recorder()
        trainer = make_trainer(comm, 2, settings)
        history = trainer.fit(
            loader(2), validation, epochs=3, callbacks=[average, recorder], verbose=False
        )
        losses = [record["test_loss"] for record in history.records]
        before = trainer.weights_sha256()
        weights_loss = trainer.evaluate(validation).loss
        with average.applied(trainer):
            averaged_sha = trainer.weights_sha256()
            average_loss = trainer.evaluate(validation).loss
        assert trainer.weights_sha256() == before != averaged_sha
        assert trainer.evaluate(validation).loss == weights_loss
        optimizer = trainer.training_state.optimizer_state()
        return recorder.steps, losses, weights_loss, average_loss, optimizer, before

    ranks, settings = LAYOUTS[layout]
    [(steps, losses, weights_loss, average_loss, optimizer, sha)] = mock.run(1, train, {}, False)
    assert losses[-1] == weights_loss != average_loss
    for result in mock.run(ranks, train, settings, True):
        for rank_weights, weights in zip(result[0], steps, strict=True):
            assert_same(rank_weights, weights)
        assert result[1][-1] == average_loss
        assert result[2:4] == (weights_loss, average_loss)
        for name, value in optimizer.items():
            assert np.array_equal(result[4][name], value), name
        assert result[5] == sha


def test_a_model_with_the_average_gives_the_loss_of_the_record():
    validation = samples(99, 40)
    trainer = make_trainer(None, 3, {})
    ema = EMA(decay=0.9)
    history = trainer.fit(loader(3), validation, epochs=3, callbacks=[ema], verbose=False)
    other = make_trainer(None, 3, {})
    other.model.load_state_dict(ema.average)
    assert other.evaluate(validation).loss == history.records[-1]["test_loss"]
    assert trainer.evaluate(validation).loss != history.records[-1]["test_loss"]


def test_swa_evaluates_the_weights_before_its_first_epoch():
    def losses(callbacks):
        trainer = make_trainer(None, 3, {})
        history = trainer.fit(
            loader(3), samples(99, 40), epochs=4, callbacks=callbacks, verbose=False
        )
        return [record["test_loss"] for record in history.records]

    recorder = Recorder()
    plain = losses([recorder])
    averaged = losses([SWA(start_epoch=3)])
    # the average of one epoch is the weights at its end
    assert averaged[:3] == plain[:3]
    assert averaged[3] != plain[3]
    other = make_trainer(None, 3, {})
    other.model.load_state_dict(plain_swa(recorder.epochs[2:]))
    assert averaged[3] == other.evaluate(samples(99, 40)).loss


def test_an_evaluation_in_the_middle_of_an_epoch_counts_no_epoch():
    def averaged(callbacks):
        trainer = make_trainer(None, 3, {})
        swa = SWA(start_epoch=1)
        trainer.fit(
            loader(3), samples(99, 40), epochs=3, callbacks=[swa, *callbacks], verbose=False
        )
        return swa.updates, swa.average

    looks = LambdaCallback(on_step_end=lambda context: context.trainer.evaluate(samples(98, 20)))
    updates, average = averaged([looks])
    expected_updates, expected = averaged([])
    assert updates == expected_updates == 3
    assert_same(average, expected)


def test_evaluate_is_the_trainers_again_after_fit():
    trainer = make_trainer(None, 0, {})
    with pytest.raises(ZeroDivisionError):
        trainer.fit((1 / 0 for _ in range(2)), callbacks=[EMA()], verbose=False)
    assert "evaluate" not in vars(trainer)
    calls = []

    def evaluate(loader):
        calls.append(loader)
        return DistributedTrainer.evaluate(trainer, loader)

    vars(trainer)["evaluate"] = evaluate
    trainer.fit(loader(0), samples(99, 40), epochs=1, callbacks=[EMA()], verbose=False)
    assert len(calls) == 1
    assert vars(trainer)["evaluate"] is evaluate


# --- use of the average ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_applied_before_the_first_step(layout):
    """The evaluation inside decides which rank keeps which weights."""
    validation = samples(99, 40)
    trainer = make_trainer(None, 6, {})
    ema = EMA(decay=0.9)
    trainer.fit(loader(6), epochs=2, callbacks=[ema], verbose=False)
    with ema.applied(trainer):
        expected_loss = trainer.evaluate(validation).loss

    def train(comm, settings):
        trainer = make_trainer(comm, 6, settings)
        sha = trainer.weights_sha256()
        with ema.applied(trainer):
            assert trainer.evaluate(validation).loss == expected_loss
        assert trainer.weights_sha256() == sha
        trainer.fit(loader(6), epochs=2, verbose=False)
        return trainer.weights_sha256()

    expected_sha = trainer.weights_sha256()
    for sha in on_ranks(layout, train):
        assert sha == expected_sha


@pytest.mark.parametrize("layout", ["1 rank", "3 ranks, zero 3", "pp=2", "tp=2"])
def test_applied_and_apply(layout):
    def train(comm, settings):
        trainer = make_trainer(comm, 6, settings)
        ema = EMA(decay=0.9)
        trainer.fit(loader(6), epochs=2, callbacks=[ema], verbose=False)
        weights = trainer.state_dict()
        with pytest.raises(KeyError), ema.applied(trainer):
            assert_same(trainer.state_dict(), ema.average)
            raise KeyError
        assert_same(trainer.state_dict(), weights)
        ema.apply(trainer)
        assert_same(trainer.state_dict(), ema.average)
        trainer.fit(loader(6), epochs=1, verbose=False)
        return trainer.weights_sha256(), ema.average

    [(sha, average)] = mock.run(1, train, {})
    for rank_sha, rank_average in on_ranks(layout, train):
        assert rank_sha == sha
        assert_same(rank_average, average)


@pytest.mark.parametrize("layout", ["1 rank", "3 ranks, zero 3"])
def test_export_within_applied_writes_the_average(layout, tmp_path):
    path = tmp_path / "averaged.safetensors"

    def train(comm, settings):
        trainer = make_trainer(comm, 6, settings)
        ema = EMA(decay=0.9)
        trainer.fit(loader(6), epochs=2, callbacks=[ema], verbose=False)
        with ema.applied(trainer):
            odyssey.export(trainer, path)
        with pytest.deprecated_call(match="use odyssey.export"):
            ema.save_weights(tmp_path / "old.safetensors")
        comm.barrier()
        return ema.average

    averages = on_ranks(layout, train)
    saved, _ = read_weights(path)
    assert_same(dict(sorted(saved.items())), dict(sorted(averages[-1].items())))
    assert_same(read_weights(tmp_path / "old.safetensors")[0], saved)
    nn.manual_seed(0)
    Network(6).load_state_dict(saved)


def test_a_second_fit_continues_and_another_trainer_starts():
    def train(parts):
        trainer = make_trainer(None, 6, {})
        ema = EMA(decay=0.9)
        for epochs in parts:
            trainer.fit(loader(6), epochs=epochs, callbacks=[ema], verbose=False)
        return ema

    recorder = Recorder()
    ema = EMA(decay=0.9)
    trainer = make_trainer(None, 6, {})
    trainer.fit(loader(6), epochs=1, callbacks=[ema, recorder], verbose=False)
    start = recorder.start
    trainer.fit(loader(6), epochs=1, callbacks=[ema, recorder], verbose=False)
    assert ema.updates == len(recorder.steps) == 8
    assert_same(ema.average, plain_ema(start, recorder.steps, 0.9, True, 1))
    make_trainer(None, 7, {}).fit(loader(6), epochs=1, callbacks=[ema], verbose=False)
    assert ema.updates == ema.steps == 4


@pytest.mark.parametrize("layout", ["3 ranks", "2 ranks, zero 3", "pp=2", "tp=2"])
def test_the_documented_update_of_batch_norm(layout):
    """Statistics become the means over batches of 24 with the averaged weights."""
    page = (Path(__file__).parents[2] / "docs/callbacks.md").read_text()
    [code] = re.findall(r"(def update_bn\(.*?)\n\n\nema\.apply", page, re.S)

    names: dict[str, Any] = {"nn": nn, "odyssey": odyssey}
    exec(code, names)

    def train(comm, settings, epochs_after):
        trainer = make_trainer(comm, BATCH_NORM, settings)
        swa = SWA(1)
        trainer.fit(loader(0), epochs=2, callbacks=[swa], verbose=False)
        swa.apply(trainer)
        names["update_bn"](trainer, data.DataLoader(samples(0, 72), batch_size=24))
        assert trainer.model.norm.momentum == 0.1
        state = trainer.state_dict()
        if epochs_after:
            trainer.fit(loader(0), epochs=epochs_after, verbose=False)
        return swa.average, state, trainer.weights_sha256()

    [(average, state, sha)] = mock.run(1, train, {}, 1)
    x, _ = samples(0, 72).gather(np.arange(72))
    outputs = (x @ average["first.weight"].T + average["first.bias"]).reshape(3, 24, -1)
    mean = outputs.mean((0, 1))
    np.testing.assert_allclose(state["norm.running_mean"], mean, rtol=1e-4, atol=1e-6)
    variance = outputs.var(1, ddof=1).mean(0)
    np.testing.assert_allclose(state["norm.running_var"], variance, rtol=1e-4)
    ranks, settings = LAYOUTS[layout]
    for _, rank_state, rank_sha in mock.run(ranks, train, settings, 1):
        assert_same(rank_state, state)
        assert rank_sha == sha


# --- stopping and resuming (needs the capture of callbacks' attributes in checkpoints) ---


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: Context) -> None:
        if context.steps == self.step:
            context.stop = "the test"


@pytest.mark.parametrize("first, second", [("1 rank", "3 ranks, zero 3"), ("pp=2", "2 ranks")])
@pytest.mark.parametrize("stop", [3, 8, 9])
@pytest.mark.parametrize("kind", [lambda: EMA(decay=0.9, every=2), lambda: SWA(1)])
def test_a_resumed_run_has_the_same_average(first, second, stop, kind, tmp_path):
    def train(comm, settings, callbacks, **fit):
        average = kind()
        trainer = make_trainer(comm, 4, settings)
        try:
            history = trainer.fit(
                loader(4),
                samples(99, 40),
                epochs=4,
                callbacks=[average, *callbacks()],
                verbose=False,
                **fit,
            )
        except Stopped:
            return None
        losses = [record["test_loss"] for record in history.records]
        return average.average, average.updates, losses, trainer.weights_sha256()

    [(expected, *others)] = mock.run(1, lambda comm: train(comm, {}, list))
    stopped = on_ranks(
        first,
        lambda comm, settings: train(
            comm, settings, lambda: [StopAt(stop)], checkpoint_dir=tmp_path, checkpoint_every=2
        ),
    )
    assert stopped == [None] * len(stopped)
    resumed = on_ranks(
        second,
        lambda comm, settings: train(
            comm, settings, lambda: [StopAt(0)], checkpoint_dir=tmp_path, checkpoint_every=2
        ),
    )
    for average, *rank_others in resumed:
        assert rank_others == others
        assert_same(average, expected)


class Ramped(EMA):
    """Changes its own decay after each step."""

    def on_step_end(self, context: Context) -> None:
        super().on_step_end(context)
        self.decay = min(0.99, self.decay + 0.02)


class Retuned(Callback):
    """Changes the settings of the averages at random after each step."""

    def __init__(self, averages: list[Any], seed: int) -> None:
        self.averages = averages
        self.seed = seed

    def on_step_end(self, context: Context) -> None:
        draw = random.Random(f"{self.seed} {context.steps}")
        for average in self.averages:
            names = sorted({"decay", "warmup", "every", "start_epoch"} & {*vars(average)})
            choices = {"decay": (0.3, 0.6), "warmup": (False, True, 4)}
            name = draw.choice(names)
            setattr(average, name, draw.choice(choices.get(name, (1, 2))))


@pytest.mark.parametrize("seed", range(4))
def test_settings_that_change_in_a_step_come_back(seed, tmp_path):
    draw = random.Random(seed)

    def train(stop, folder):
        averages = [EMA(0.5, evaluate=False), Ramped(0.2, False, evaluate=False)]
        averages.append(SWA(1, evaluate=False))
        fit = {"epochs": 3, "verbose": False, "checkpoint_dir": folder}
        callbacks = [Retuned(averages, seed), *averages, StopAt(stop)]
        try:
            make_trainer(None, 4, {}).fit(loader(4), callbacks=callbacks, **fit)
        except Stopped:
            return None
        return averages

    folder = tmp_path / "run"
    train(draw.randrange(1, 12), folder)
    for whole, resumed in zip(train(0, tmp_path / "whole"), train(0, folder), strict=True):
        assert_same(resumed.average, whole.average)
        for name in ("decay", "warmup", "every", "start_epoch", "updates"):
            assert getattr(resumed, name, None) == getattr(whole, name, None), name


def test_a_complete_run_that_is_started_again_has_its_average(tmp_path):
    def train():
        ema = EMA(decay=0.9)
        trainer = make_trainer(None, 4, {})
        fit = {"checkpoint_dir": tmp_path, "verbose": False}
        trainer.fit(loader(4), samples(99, 40), steps=6, epochs=4, callbacks=[ema], **fit)
        return ema.average

    assert_same(train(), train())


@pytest.mark.parametrize("layout", ["1 rank", "3 ranks, zero 3"])
def test_a_rollback_takes_the_average_back(layout, tmp_path):
    """Steps after the checkpoint that training goes back to count once."""
    x = np.random.default_rng(0).normal(size=(5 * BATCH, WIDTH)).astype(np.float32)
    x[3 * BATCH + 1] = 3e38  # overflows in the fourth step

    def train(comm, settings):
        weights_by_step: dict[int, Weights] = {}

        def record(context):
            if context.step.taken:
                weights_by_step[context.steps] = context.trainer.state_dict()

        trainer = make_trainer(comm, 1, {"nonfinite": "rollback", **settings})
        start = trainer.state_dict()
        ema = EMA(decay=0.5, warmup=False)
        batches = data.DataLoader(data.arrays(x, np.arange(len(x)) % CLASSES), batch_size=BATCH)
        trainer.fit(
            batches,
            epochs=1,
            callbacks=[ema, LambdaCallback(on_step_end=record)],
            verbose=False,
            checkpoint_dir=tmp_path,
            checkpoint_every=2,
        )
        assert sorted(weights_by_step) == [1, 2, 3, 5]
        assert ema.steps == 4
        steps = [weights for _, weights in sorted(weights_by_step.items())]
        return ema.average, plain_ema(start, steps, 0.5, False, 1)

    for average, expected in on_ranks(layout, train):
        assert_same(average, expected)


# --- errors ---


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: EMA(decay=1.0), "decay is 1.0; it must be at least 0 and below 1"),
        (lambda: EMA(decay=-0.1), "decay is -0.1"),
        (lambda: EMA(decay="a"), "decay is 'a'"),
        (lambda: EMA(every=0), "every is 0; it must be at least 1"),
        (lambda: EMA(warmup=-1), "warmup is -1"),
        (lambda: EMA(warmup="yes"), "warmup is 'yes'"),
        (lambda: EMA(evaluate=2), "evaluate is 2; use True or False"),
        (lambda: SWA(0), "start_epoch is 0; it must be at least 1"),
        (lambda: SWA(0.75), "start_epoch is 0.75; it must be an integer"),
        (lambda: SWA(1, 0), "every is 0"),
    ],
)
def test_settings_that_are_not_allowed(make, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make()


def test_an_average_that_is_missing_or_of_another_model(tmp_path):
    trainer = make_trainer(None, 0, {})
    ema = EMA()
    with pytest.raises(ConfigError, match="there is no average yet"), ema.applied(trainer):
        pass
    with pytest.raises(ConfigError, match="there is no average yet"):
        ema._check_average()
    swa = SWA(start_epoch=5)
    trainer.fit(loader(0), epochs=1, callbacks=[swa], verbose=False)
    with pytest.raises(ConfigError, match="after the end of epoch start_epoch"):
        swa.apply(trainer)
    trainer.fit(loader(0), epochs=1, callbacks=[ema], verbose=False)
    other = DistributedTrainer(nn.Linear(WIDTH, CLASSES), optim.SGD(lr=0.1), device="cpu")
    before = other.weights_sha256()
    with pytest.raises(ConfigError, match="the average is of another model: weight has shape None"):
        ema.apply(other)
    assert other.weights_sha256() == before


def test_two_averages_that_evaluate_and_two_of_which_one_does():
    trainer = make_trainer(None, 0, {})
    with pytest.raises(ConfigError, match="EMA and SWA would both evaluate"):
        trainer.fit(loader(0), callbacks=[EMA(), SWA(1)], verbose=False)
    assert "evaluate" not in vars(trainer)
    history = trainer.fit(
        loader(0), samples(99, 40), callbacks=[EMA(evaluate=False), SWA(1)], verbose=False
    )
    assert history.records[0]["test_loss"] is not None


@pytest.mark.parametrize("reduction", ["local_sgd", "async_parameter_server"])
def test_ranks_that_step_apart_are_not_supported(reduction):
    def train(comm):
        trainer = make_trainer(comm, 0, {"reduction": reduction})
        with pytest.raises(ConfigError, match=f"between steps with reduction='{reduction}', so"):
            trainer.fit(loader(0), epochs=1, callbacks=[EMA()], verbose=False)

    mock.run(3, train)


def test_repr():
    assert repr(EMA(0.99)) == "EMA(decay=0.99, warmup=True, every=1, evaluate=True)"
    assert repr(SWA(3)) == "SWA(start_epoch=3, every=1, evaluate=True)"
