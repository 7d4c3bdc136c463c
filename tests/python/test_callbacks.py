"""Who hears what of a training, in which order; and fit() and what belongs to it over a trainer
without an engine.
"""

from __future__ import annotations

import hashlib
import types

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim, steplog
from odyssey.callbacks import Callback, Context
from odyssey.checkpoints import Snapshot
from odyssey.checkpoints.trainable import Evaluation, Step
from odyssey.comm import Communicator
from odyssey.core.fingerprint import of
from odyssey.errors import ConfigError, Stopped
from odyssey.parallel.mesh import Mesh
from odyssey.settings.declarations import Training, make_settings
from odyssey.train.feed import BatchFeed
from odyssey.train.rank_checks import RankChecks
from odyssey.train.sharing import BatchSharing
from odyssey.train.trainer_base import Trainer

EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


class Listener(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        for name in EVENTS:
            setattr(
                self, name, lambda context, name=name: self.hear(name.removeprefix("on_"), context)
            )

    def hear(self, event: str, context: Context) -> None:
        self.heard.append(f"{event} {context.cursor.step}" if event == "step_end" else event)


def loader() -> data.DataLoader:
    rng = np.random.default_rng(0)
    return data.DataLoader(
        data.arrays(rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)), 16
    )


def engine() -> DistributedTrainer:
    nn.manual_seed(0)
    return DistributedTrainer(nn.Linear(6, 3), optim.SGD(lr=0.1), threads=1)


class Plain(Trainer):
    """Weights in NumPy; a step takes the mean of a batch's images off them."""

    partial = False
    in_parts = False
    state_bytes = 24

    def __init__(self) -> None:
        self.callbacks = []
        super().__init__(make_settings(Training, {}), Communicator(), None)
        self.metrics = None
        self.arithmetic = types.SimpleNamespace(state=dict)
        self.replicas = 1
        self.layout = types.SimpleNamespace(workers=1, offload=None, balance=None, mesh=Mesh(1))
        self.stepper = types.SimpleNamespace(steps=0, last=None, traffic=lambda: (0, 0, 0))
        shards = types.SimpleNamespace(shard_size=16)
        self.sharing = BatchSharing(shards, self.mode, self.layout, lambda form: 1, self.say)
        self.checks = RankChecks(self.mode, 0, self.say)
        self.feed = BatchFeed(self.mode, 1, seed=0, capture=self.checks.capture)
        self.weights = np.ones(6, np.float32)
        self.gradient = np.zeros(6, np.float32)

    def say(self, line: str) -> None:
        self.told = line

    def take_step(self, batch: data.Batch) -> Step:
        images, _ = batch.dataset.gather(batch.indices)
        self.gradient = images.mean(axis=0)
        self.weights = self.weights - self.gradient
        self.steps += 1
        self.last = Step(
            float(self.weights.sum()) * len(images), 0.0, 1.0, True, None, {"accuracy": 0.0}
        )
        return self.last

    def evaluate(self, loader: object) -> Evaluation:
        loss = float(self.weights.sum())
        return Evaluation(loss, 0.5, 1, {"loss": loss, "accuracy": 0.5})

    def configuration(self) -> dict:
        return {"kind": "plain"}

    def state(self, values: dict, parts: bool = False) -> Snapshot:
        values = {**values, "configuration": self.configuration()}
        return Snapshot(self.steps, {"parameters": {"w": self.weights}}, values)

    def load(self, snapshot: Snapshot, name: str) -> None:
        self.weights, self.steps = snapshot.arrays["parameters"]["w"].copy(), snapshot.step

    def fingerprints(self) -> tuple[int, int]:
        return of(self.gradient), of(self.weights)

    def weights_sha256(self) -> str:
        return hashlib.sha256(self.weights.tobytes()).hexdigest()


@pytest.mark.parametrize("make", [engine, Plain])
def test_the_order_of_events(make, tmp_path):
    trainer, listener = make(), Listener()
    trainer.callbacks.append(listener)
    trainer.fit(loader(), loader().dataset, epochs=2, checkpoint_dir=tmp_path)
    epoch = [
        "epoch_start",
        "step_end 0",
        "step_end 1",
        "step_end 2",
        "validation_end",
        "epoch_end",
        "checkpoint",
    ]
    heard = [event for event in listener.heard if event != "sync"]
    assert heard == ["fit_plan", "fit_start", *epoch, *epoch, "checkpoint", "fit_end"]
    assert "sync" in listener.heard


def test_an_exception_and_a_step_outside_of_fit():
    trainer, listener = engine(), Listener()
    trainer.callbacks.append(listener)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(1 / 0 for _ in range(2))
    assert listener.heard == ["fit_plan", "fit_start", "epoch_start", "exception", "fit_end"]
    assert isinstance(trainer.context.error, ZeroDivisionError)
    listener.heard.clear()
    trainer.train_step(next(iter(loader())))
    assert listener.heard == ["step_end 0"]


def test_a_step_is_not_its_number():
    """`if context.step == 10` would never be true, and nobody would know."""
    trainer, seen = engine(), []
    trainer.callbacks.append(
        type("Tenth", (Callback,), {"on_step_end": lambda _, context: seen.append(context.step)})()
    )
    trainer.fit(loader(), steps=2)
    assert seen[0] == seen[0] != seen[1]
    with pytest.raises(ConfigError, match=r"its number is context\.steps"):
        _ = seen[0] == 1


@pytest.mark.parametrize("saved", [True, False])
def test_a_callback_stops_a_training(saved, tmp_path):
    class Enough(Callback):
        def on_step_end(self, context: Context) -> None:
            if context.trainer.steps == 2:
                context.stop = "a callback"

    trainer = engine()
    trainer.callbacks.append(Enough())
    said = "after step 2; checkpoint step_00000002 is written" if saved else "after step 2$"
    with pytest.raises(Stopped, match=f"stopped by a callback {said}"):
        trainer.fit(loader(), checkpoint_dir=tmp_path if saved else None)


def test_a_trainer_without_an_engine_goes_on_and_has_a_step_log(tmp_path, monkeypatch):
    whole = Plain()
    whole.fit(loader(), epochs=2)
    monkeypatch.setenv("ODYSSEY_RUN_DIR", str(tmp_path))
    first, second = Plain(), Plain()
    first.fit(loader(), epochs=2, steps=2, checkpoint_dir=tmp_path / "c")
    history = second.fit(loader(), epochs=2, checkpoint_dir=tmp_path / "c")
    assert (second.steps, history.steps, len(history.records)) == (6, 6, 2)
    assert second.weights_sha256() == whole.weights_sha256()
    logs = sorted((tmp_path / "steps").glob("*"))
    records = {
        r.step: r for log in logs for r in steplog.decoded(steplog.history(steplog.load(log)))
    }
    assert sorted(records) == [1, 2, 3, 4, 5, 6]
    assert records[6].weights == of(second.weights)


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("on_step_end", lambda self, trainer, context: None, "does not take the context alone"),
        (
            "on_train_batch_end",
            lambda self, context: None,
            "is no event of a training; events are on_fit_plan, on_fit",
        ),
    ],
)
def test_methods_as_other_libraries_have_them_are_named(name, method, said):
    trainer = engine()
    given = type("Timer", (Callback,), {name: method})()
    with pytest.raises(ConfigError, match=rf"\[train\] Timer\.{name} {said}"):
        trainer.fit(loader(), callbacks=[given])
    assert trainer.steps == 0
