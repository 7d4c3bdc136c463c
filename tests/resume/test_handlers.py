"""Handlers of signals that a program has set before fit()."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import odyssey
from odyssey import callbacks, data, nn, optim
from odyssey.errors import Stopped

SAMPLES = data.arrays(np.ones((64, 4), np.float32), np.arange(64) % 2, classes=2)


def fit(number, folder, times=1):
    """Sends a signal after the second step; the trainer."""
    odyssey.manual_seed(0)
    trainer = odyssey.DistributedTrainer(nn.Linear(4, 2), optim.SGD(lr=0.1))

    def send(context):
        for _ in range(times if context.steps == 2 else 0):
            os.kill(os.getpid(), number)

    hook = callbacks.LambdaCallback(on_step_end=send)
    loader = data.DataLoader(SAMPLES, 8)
    trainer.fit(loader, epochs=1, callbacks=[hook], checkpoint_dir=folder, verbose=False)
    return trainer


@pytest.fixture
def handler(request):
    """Sets a handler of SIGTERM, and puts the one from before back."""
    previous = signal.getsignal(signal.SIGTERM)
    yield lambda function: signal.signal(signal.SIGTERM, function)
    signal.signal(signal.SIGTERM, previous)


def test_the_program_s_handler_runs_and_the_training_stops_with_a_checkpoint(handler, tmp_path):
    seen = []

    def note(number, frame):
        seen.append(number)

    handler(note)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        fit(signal.SIGTERM, tmp_path, times=2)
    assert seen and set(seen) == {signal.SIGTERM}
    assert signal.getsignal(signal.SIGTERM) is note
    assert [path.name for path in tmp_path.glob("step_*")]


def test_what_the_handler_raises_comes_after_the_checkpoint(handler, tmp_path):
    def leave(number, frame):
        raise SystemExit(3)

    handler(leave)
    with pytest.raises(SystemExit) as end:
        fit(signal.SIGTERM, tmp_path)
    assert end.value.code == 3 and [path.name for path in tmp_path.glob("step_*")]


@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.SIG_IGN])
def test_without_a_handler_nothing_else_happens(handler, tmp_path, default):
    handler(default)
    with pytest.raises(Stopped):
        fit(signal.SIGTERM, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is default
