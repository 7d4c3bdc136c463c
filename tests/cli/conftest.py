"""A trainer that trains nothing, in place of the real one: these tests are about the command
line alone.
"""

from __future__ import annotations

import inspect
import types

import pytest

from odyssey import callbacks, cli, data, loggers, optim  # noqa: F401 - the real ones, before there are fakes below them
from odyssey.data import tables  # noqa: F401 - as above


class World:
    """A communicator of one process, or one that pretends to be of several."""

    why = "local: one process"

    def __init__(self, rank=0, size=1):
        self.rank, self.size, self.local_size, self.aborted = rank, size, size, []

    def abort(self, code):
        self.aborted.append(code)


class Record:
    """Everything the command line asked the library for."""

    def __init__(self):
        self.calls = {}
        self.world = World()
        self.met = None  # the world, once it was asked for
        self.error = None
        self.save_error = None
        self.notice = None

    def call(self, name, result=None):
        def called(*args, **kwargs):
            self.calls[name] = (args, kwargs)
            return result

        return called

    def optimizer(self, name, kind):
        """A call that takes what the class takes."""
        called = self.call(kind.__name__, name)
        called.__signature__ = inspect.signature(kind)
        return called


@pytest.fixture
def fake(monkeypatch):
    """The library's parts that a training run uses, recorded."""
    record = Record()
    history = types.SimpleNamespace(
        records=[{"epoch": 1, "train_loss": 0.5, "test_accuracy": 0.9}],
        train_loss=0.0123,
        test_accuracy=0.9905,
        test_loss=float("nan"),
        steps=3752,
        samples_per_second=61234.4,
        seconds=7.71,
        bytes_per_step=1000.0,
        bytes_per_step_uncompressed=1000.0,
        wire_bytes_per_step=0.0,
    )

    record.history = history

    class Trainer:
        workers, threads, shard_size, device = 4, 2, 32, "cpu"
        conv_algorithm = "direct"
        scaler = types.SimpleNamespace(value=1.0, skipped=0)

        def __init__(self, **kwargs):
            record.calls["trainer"] = kwargs
            self.notice = record.notice
            self.mesh = kwargs["mesh"]

        def fit(self, loader, validation, epochs, steps, **saving):
            record.calls["fit"] = {"validation": validation, "epochs": epochs, "steps": steps}
            record.calls["saving"] = saving
            if record.error is not None:
                raise record.error
            if validation is None:
                history.test_accuracy = history.test_loss = None
            return history

        def weights_sha256(self):
            return "3f2a" * 16

        def state_dict(self):
            return "state"

        def memory(self):
            return {"parameters": 1}

    def write_weights(file, state):
        assert state == "state"
        file.write(b"wei")
        if record.save_error is not None:
            raise record.save_error
        file.write(b"ghts")

    def world(backend):
        record.met = record.world
        return record.world

    class Set:
        sample_shape, classes = (1, 28, 28), 10

    modules = {
        "comm": types.SimpleNamespace(world=world, met=lambda: record.met),
        "comm.cores": types.SimpleNamespace(default_threads=lambda ranks: 2),
        "train.preflight": types.SimpleNamespace(at_start=lambda *a, **k: []),
        "nn": types.SimpleNamespace(
            models=types.SimpleNamespace(build=record.call("model", "model"))
        ),
        "optim": types.SimpleNamespace(
            BY_NAME={name: record.optimizer(name, kind) for name, kind in optim.BY_NAME.items()},
            schedule=record.call("schedule", "schedule"),
        ),
        "data": types.SimpleNamespace(
            opened=record.call("opened", Set()), DataLoader=lambda *a, **k: range(469)
        ),
        "train.trainer": types.SimpleNamespace(
            DistributedTrainer=Trainer, write_weights=write_weights
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, f"odyssey.{name}", module)
        home, _, last = f"odyssey.{name}".rpartition(".")
        monkeypatch.setattr(
            __import__("importlib").import_module(home), last, module, raising=False
        )
    # a rank that cannot join the others ends after a while whatever it does then: here it would be
    # the tests
    monkeypatch.setattr("odyssey.base.exits._end_in", lambda seconds, code: None)
    for name in (
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_RANK",
        "SLURM_PROCID",
    ):
        monkeypatch.delenv(name, raising=False)
    return record


@pytest.fixture
def odyssey_command(fake, capfd):
    """Run a command line; gives its exit code and what it printed."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return types.SimpleNamespace(code=caught.value.code, out=out, err=err)

    return run
