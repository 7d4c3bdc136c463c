"""Callbacks on several ranks: random ones decide alike wherever they run and whenever they go
on, and a rank that fails in one ends the job. The order of events:
tests/python/test_callbacks.py.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.errors import CheckpointError, ConfigError

CALLED = Path(__file__).with_name("called.py")
COUNT = 10


def called(launch, folder: str, mode: str, ranks: int, first: int = 0, count: int = COUNT):
    return launch.python(
        CALLED, first, count, launch.folder / folder, mode, ranks=ranks, timeout=200
    )


@pytest.fixture(scope="module")
def alone(launch_once):
    done = called(launch_once, "alone", "whole", 0)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == COUNT
    return done.stdout


@pytest.mark.parametrize(("before", "after"), [pytest.param(0, 3, marks=pytest.mark.long), (3, 2)])
def test_random_callbacks_decide_alike_on_any_ranks_and_after_a_stop(launch, alone, before, after):
    if before:
        done = called(launch, "runs", "half", before)
        assert (
            done.returncode == 0
            and done.stdout.count("the same command goes on from it") > COUNT // 3
        ), done.stderr
    done = called(launch, "runs", "whole", after)
    assert done.stdout == alone, done.stderr


@pytest.mark.parametrize(("number", "ranks"), [(103, 2), (107, 3)])
def test_a_rank_that_fails_in_a_callback_ends_the_job_and_costs_no_bits(launch, number, ranks):
    done = called(launch, "runs", "fail", ranks, number, 1)
    assert done.returncode == 70 and not done.stdout, done.stderr
    assert re.search(
        r"Traceback .*ZeroDivisionError: in on_\w+\n.*odyssey: .*defect: ZeroDivisionError",
        done.stderr,
        re.S,
    )
    again = called(launch, "runs", "whole", ranks, number, 1)
    assert again.stdout == called(launch, "others", "whole", 0, number, 1).stdout != ""


SCRIPT = """
    import odyssey
    from odyssey import callbacks, data, nn, optim

    class Stop(callbacks.Callback):
        def __init__(self): self.n = 0
        def on_fit_start(self, context): print("start", context.epochs, context.batch_size)
        def on_step_end(self, context): self.n += 1; (self.n < 3 and print("step", context.epoch, context.loss))
        def on_epoch_end(self, context): print("epoch", context.record["epoch"], context.record["test_loss"])
        def on_fit_end(self, context): print("end", context.steps)

    ds = data.load("mnist", train=True).take(1024)
    t = odyssey.DistributedTrainer(
        nn.LeNet5(), optim.SGD(lr=.05), schedule=lambda step: 1.0 if step < 4 else 0.1)
    early = callbacks.EarlyStopping("test_loss", patience=1, min_delta=10.0)
    t.fit(data.DataLoader(ds, batch_size=128), data.load("mnist", train=False).take(512), epochs=5,
          callbacks=[Stop(), early])
    print("steps", t.steps, t.weights_sha256())
"""


def test_a_user_s_callback_and_early_stopping_on_one_rank_and_three(launch, tmp_path):
    program = tmp_path / "callback.py"
    program.write_text(textwrap.dedent(SCRIPT))
    one, three = launch.python(program), launch.python(program, ranks=3)
    assert one.returncode == three.returncode == 0, one.stderr + three.stderr
    lines = one.stdout.splitlines()
    assert lines[0] == "start 5 128" and lines[-1].startswith("steps 16 ") and lines[-2] == "end 16"
    assert sorted(three.stdout.splitlines()) == sorted(3 * lines)
    assert "finished by EarlyStopping (test_loss was not better" in three.stderr
    assert one.stderr.count("epoch ") == 2  # progress: a line per epoch


# --- in one process -------------------------------------------------------------------------------


def parts() -> tuple[DistributedTrainer, data.DataLoader]:
    rng = np.random.default_rng(0)
    set_ = data.arrays(
        rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40), classes=3
    )
    nn.manual_seed(0)
    return DistributedTrainer(nn.Linear(6, 3), optim.SGD(lr=0.1), threads=1), data.DataLoader(
        set_, 16
    )


class Figures(callbacks.Callback):
    """Says what the test_loss of each epoch is."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def on_validation_end(self, context: callbacks.Context) -> None:
        context.record["test_loss"] = self.values[context.cursor.epoch]


def test_model_checkpoint_keeps_the_best_and_names_them(tmp_path):
    trainer, loader = parts()
    best = callbacks.ModelCheckpoint("test_loss", save_top_k=2)
    seen = {}
    note = callbacks.LambdaCallback(
        on_epoch_end=lambda context: seen.update({context.steps: context.trainer.weights_sha256()})
    )
    figures = Figures(0.5, 0.2, 0.4, 0.3, 0.6, float("nan"), 0.7)
    trainer.fit(
        loader, loader.dataset, epochs=7, checkpoint_dir=tmp_path, callbacks=[figures, best, note]
    )
    steps = sorted(path.name for path in tmp_path.glob("step_*"))
    assert steps == [f"step_{n:08d}" for n in (6, 12, 18, 21)]  # the two best, the two newest
    assert (
        best.top == [(0.2, 6), (0.3, 12)]
        and best.best_value == 0.2
        and best.best_path == tmp_path / "best"
    )
    assert [(tmp_path / name).resolve().name for name in ("best", "last")] == [steps[0], steps[-1]]
    for name, step in (("best", 6), ("last", 21)):
        other, _ = parts()
        assert (
            other.load_checkpoint(tmp_path / name) == step and other.weights_sha256() == seen[step]
        )


def test_figures_that_are_no_numbers_stop_early_too(capsys):
    trainer, loader = parts()
    figures = Figures(*[float("nan")] * 5)
    trainer.fit(
        loader, loader.dataset, epochs=5, callbacks=[figures, callbacks.EarlyStopping(patience=2)]
    )
    assert (
        trainer.steps == 6 and "(test_loss was not a number in 2 epochs)" in capsys.readouterr().err
    )


def test_a_plateau_lowers_the_rate_to_its_least_and_that_is_resumed(tmp_path):
    def train(epochs: int) -> tuple[DistributedTrainer, list[float]]:
        trainer, loader = parts()
        lower = callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_lr=0.03)
        given = [Figures(*[1.0] * 6), lower, callbacks.LearningRateMonitor()]
        history = trainer.fit(
            loader,
            loader.dataset,
            epochs=epochs,
            checkpoint_dir=tmp_path / str(epochs),
            callbacks=given,
        )
        return trainer, [record["lr"] for record in history.records]

    whole, rates = train(6)
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.03, 0.03, 0.03])
    train(3)
    (tmp_path / "6").rename(tmp_path / "whole")
    (tmp_path / "3").rename(tmp_path / "6")
    assert train(6)[1] == rates
    assert train(6)[0].weights_sha256() == whole.weights_sha256()


def test_a_timer_ends_a_training_and_more_time_lets_it_go_on(tmp_path):
    trainer, loader = parts()
    trainer.fit(loader, epochs=10**6, callbacks=[callbacks.Timer(0.05)], checkpoint_dir=tmp_path)
    steps = trainer.steps
    for duration, more in ((0.05, False), ("00:00:10", True)):
        trainer, loader = parts()
        end = callbacks.LambdaCallback(on_step_end=lambda context: context.finish("enough"))
        trainer.fit(
            loader,
            epochs=10**6,
            callbacks=[callbacks.Timer(duration), end],
            checkpoint_dir=tmp_path,
        )
        assert (trainer.steps > steps) == more


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: callbacks.EarlyStopping(patience=-1), "[EarlyStopping] patience is -1"),
        (
            lambda: callbacks.EarlyStopping(mode="least"),
            "[EarlyStopping] mode is 'least'; choose from auto, min, max",
        ),
        (
            lambda: callbacks.ReduceLROnPlateau(factor=2),
            "[ReduceLROnPlateau] factor is 2; it must be between 0 and 1",
        ),
        (lambda: callbacks.Timer("soon"), "[Timer] duration is 'soon'; give seconds above 0"),
        (lambda: callbacks.ModelCheckpoint(name="step_1"), "[ModelCheckpoint] name is 'step_1'"),
        (
            lambda: callbacks.LambdaCallback(on_epoch=print),
            "'on_epoch' is no event; did you mean 'on_epoch_end'?",
        ),
    ],
)
def test_what_is_not_allowed(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_what_fit_refuses(tmp_path):
    class Odd(callbacks.Callback):
        def state_dict(self) -> dict:
            return {"best": object()}

    for given, message in (
        (
            [callbacks.EarlyStopping("val_loss")],
            "no figure 'val_loss'; give fit() a validation set, whose",
        ),
        ([callbacks.EarlyStopping()], "no figure 'test_loss'; give fit() a validation set, whose"),
        ([callbacks.EarlyStopping], "callbacks has the class EarlyStopping; give objects"),
        (
            [callbacks.ModelCheckpoint("train_loss")],
            "fit() makes no checkpoints; give it a checkpoint_dir",
        ),
        ([print], "callbacks has a builtin_function_or_method"),
    ):
        trainer, loader = parts()
        with pytest.raises(ConfigError) as caught:
            trainer.fit(loader, callbacks=given)
        assert message in str(caught.value) and trainer.steps == 0
    trainer, loader = parts()
    with pytest.raises(
        ConfigError, match="no figure 'test_acc'; choose from train_loss, test_loss, train_accuracy"
    ):
        trainer.fit(loader, loader.dataset, callbacks=[callbacks.ReduceLROnPlateau("test_acc")])
    with pytest.raises(ConfigError, match="no figure 'lr'"):  # who would give it is not there
        trainer.fit(loader, callbacks=[callbacks.EarlyStopping("lr", mode="min")])
    assert trainer.steps == 0
    trainer.fit(
        loader,
        callbacks=[callbacks.EarlyStopping("lr", mode="min"), callbacks.LearningRateMonitor()],
        verbose=False,
    )
    steps = trainer.steps
    # a callback might have given it: known after an epoch
    with pytest.raises(ConfigError, match="no figure 'mine'"):
        trainer.fit(
            loader,
            callbacks=[callbacks.EarlyStopping("mine", mode="min"), callbacks.Callback(), Odd()],
            verbose=False,
        )
    assert trainer.steps == 2 * steps
    trainer, loader = parts()
    with pytest.raises(ConfigError, match=r"\[Odd\] state_dict\(\) returns something that"):
        trainer.fit(loader, callbacks=Odd(), checkpoint_dir=tmp_path)


def test_a_state_that_a_callback_does_not_take_is_an_error_of_one_line(tmp_path):
    trainer, loader = parts()
    trainer.fit(loader, callbacks=[callbacks.Timer(100)], checkpoint_dir=tmp_path)
    other = type("Timer", (callbacks.EarlyStopping,), {})
    trainer, loader = parts()
    with pytest.raises(
        CheckpointError,
        match="state of Timer is not taken back: KeyError: 'best'; leave the callback",
    ):
        trainer.fit(loader, epochs=2, callbacks=[other("train_loss")], checkpoint_dir=tmp_path)
