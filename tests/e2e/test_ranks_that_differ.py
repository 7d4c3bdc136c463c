"""The ways in which a rank can part from the others, from the start or late, on layouts where
ranks have replicas or parts: each is found, on all ranks, before a checkpoint or fit() gives
what it has made; or it is in a table here.

What differs from process to process (target CPU, kernels): tests/preflight.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odyssey import DistributedTrainer, Mesh, callbacks, data, nn, optim
from odyssey import functional as F
from odyssey.comm import Communicator, mock
from odyssey.errors import CollectiveError, OdysseyError

SAMPLES, STEPS, EPOCHS, LATE = 320, 5, 4, 11
X = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, SAMPLES)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero": 1},
    "zero 3": {"zero": 3},
    "pp 2": {"mesh": Mesh(dp=1, pp=2)},
}


#: Ways in which the program of one rank has other ops: with pp its messages differ before settings
#: are compared.
SAID_BY_CALLS = {("late mode", "pp 2")}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a rank is given; a way to differ is other values of it."""

    eps: float = 1e-5
    gelu: str = "none"
    factor: float = 1.0
    smoothing: float = 0.0
    metric: float = 1.0
    noise: float = 0.1
    shift: float = 0.0
    start: int = 0
    seed: int = 0
    order: int = 2
    turn: int = 0
    valid: float = 0.0
    nesterov: bool = False
    clip_norm: float = 1.0
    threads: int = 1
    undecayed: Callable[..., bool] | None = None
    drops_at: int | None = None  # step from which on the rate is half
    source: str = "arrays"
    late: str = ""
    callbacks: int = 1


class Net(nn.Module):
    def __init__(self, given: Given) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 32), nn.LayerNorm(32, eps=given.eps)
        self.drop, self.last, self.gain = nn.Dropout(0.3), nn.Linear(32, 3), given.factor
        self.gelu = given.gelu

    def forward(self, x):
        return self.last(self.drop(F.gelu(self.norm(self.first(x)), self.gelu))) * self.gain


class Source:
    """A sample at a time; `kind` says what is wrong with them."""

    classes = 3

    def __init__(self, kind: str) -> None:
        self.kind, self.reads = kind, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        self.reads += 1
        x = X[i] + (
            np.random.standard_normal(8).astype(np.float32)
            if self.kind == "unseeded"
            else np.float32(0)
        )
        return x + np.float32(self.kind == "late" and self.reads > 250), int(Y[i])


class Late(callbacks.Callback):
    """Changes something after a step, on this rank alone."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, context: callbacks.Context) -> None:
        trainer = context.trainer
        if context.steps != LATE:
            return
        if self.what == "rate":
            trainer.optimizer.lr *= 0.5
        if self.what == "momentum":
            trainer.optimizer.momentum = 0.5
        if self.what == "undecayed":
            trainer.optimizer.undecayed = optim.vectors
        if self.what == "weight":
            trainer.model.first.weight.data[0, 0] += 1e-3
        if self.what == "last weight":
            trainer.model.last.weight.data[0, 0] += 1e-3
        if self.what == "state":
            trainer.optimizer.state["momentum"][:] *= 0.5
        if self.what == "clip_norm":
            trainer.clip_norm = 0.01
        if self.what == "attribute":
            trainer.model.gain = 0.5
        if self.what == "dropout":
            trainer.model.drop.p = 0.1
        if self.what == "mode":
            trainer.model.drop.eval()
        if self.what == "frozen":
            trainer.model.first.weight.requires_grad = False
        if self.what == "finish":
            context.finish("this rank wants it")


#: What rank 1 has otherwise.
WAYS: dict[str, dict[str, Any]] = {
    "eps of a layer": {"eps": 1e-3},
    "form of gelu": {"gelu": "tanh"},
    "factor in forward()": {"factor": 1.0000001},
    "label smoothing": {"smoothing": 0.1},
    "metric": {"metric": 2.0},
    "transform": {"noise": 0.2},
    "augmentation": {"shift": 0.05},
    "unseeded samples": {"source": "unseeded"},
    "samples that change": {"source": "late"},
    "nesterov": {"nesterov": True},
    "seed": {"seed": 1},
    "clip_norm": {"clip_norm": 0.9},
    "order of samples": {"order": 3},
    "schedule": {"drops_at": 12},
    "labels": {"turn": 1},
    "validation set": {"valid": 0.1},
    "callbacks": {"callbacks": 0},
    "undecayed": {"undecayed": optim.vectors},
    "late rate": {"late": "rate"},
    "late momentum": {"late": "momentum"},
    "late undecayed": {"late": "undecayed"},
    "late weight": {"late": "weight"},
    "late weight of the last layer": {"late": "last weight"},
    "late state of the optimizer": {"late": "state"},
    "late clip_norm": {"late": "clip_norm"},
    "late attribute": {"late": "attribute"},
    "late dropout": {"late": "dropout"},
    "late mode": {"late": "mode"},
    "late freezing": {"late": "frozen"},
}
#: What changes nothing.
NOTHING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "initial weights, which are rank 0's": {"start": 5},
    "threads": {"threads": 2},
    "schedule after the end": {"drops_at": 600_001},
}
#: (way, layout) -> why nobody finds it.
KNOWN_NOT_FOUND: dict[tuple[str, str], str] = {}


class Noise:
    """Adds what is drawn from the sample's generator, and a number."""

    def __init__(self, given: Given) -> None:
        self.noise, self.shift = np.float32(given.noise), np.float32(given.shift)

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return x + rng.normal(size=x.shape).astype(np.float32) * self.noise + self.shift


def made(given: Given, comm: Communicator, **layout: Any) -> DistributedTrainer:
    """The trainer of a rank."""
    nn.manual_seed(given.start)
    optimizer = optim.SGD(lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=given.nesterov)
    optimizer.undecayed = given.undecayed
    return DistributedTrainer(
        Net(given),
        optimizer,
        loss=lambda y, target: F.cross_entropy(y, target, label_smoothing=given.smoothing),
        metrics={"size": lambda y, target: abs(y).mean(1) * given.metric},
        schedule=lambda step: 1.0 if given.drops_at is None or step < given.drops_at else 0.5,
        comm=comm,
        shard_size=16,
        threads=given.threads,
        seed=given.seed,
        clip_norm=given.clip_norm,
        **layout,
    )


def hash_of(trainer: DistributedTrainer) -> str:
    """A hash of weights and of the optimizer's state; a collective call."""
    state = {
        name: np.asarray(value).tobytes()
        for name, value in trainer.training_state.optimizer_state().items()
    }
    return hashlib.sha256(repr((trainer.weights_sha256(), state)).encode()).hexdigest()


def fit(
    comm: Communicator, given: Given, common: Given, folder: Path | None, more: list, **layout: Any
) -> str:
    """Trains; the hash of what a rank holds then.

    `common`: what samples are, where that is the same on all ranks.
    """
    trainer = made(given, comm, **layout)
    sources = {"arrays": lambda: data.arrays(X, (Y + given.turn) % 3, classes=3)}
    wrong = common.source != "arrays"
    source = Source(given.source) if wrong else sources["arrays"]()
    loader = data.DataLoader(
        source, batch_size=64, shuffle=True, seed=given.order, transform=Noise(given)
    )
    validation = data.arrays(X[:50] + np.float32(given.valid), Y[:50], classes=3)
    heard = [Late(given.late)][: given.callbacks] + more
    saving = (
        {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 4, "keep": 100}
    )
    trainer.fit(loader, validation, epochs=EPOCHS, callbacks=heard, verbose=False, **saving)
    return hash_of(trainer)


@functools.cache
def expected(source: str) -> dict[int, str]:
    """The hash after each step of a training in which nothing is wrong; -1: at its end."""
    steps: dict[int, str] = {}
    note = callbacks.LambdaCallback(
        on_step_end=lambda context: steps.update({context.steps: hash_of(context.trainer)})
    )
    right = dataclasses.replace(Given(), source="" if source != "arrays" else source)
    steps[-1] = fit(Communicator(), right, dataclasses.replace(right, source=source), None, [note])
    return steps


def ended(layout: str, way: dict[str, Any], folder: Path) -> list[str | Exception]:
    """How each of two ranks ends, of which rank 1 differs."""
    odd = dataclasses.replace(Given(), **way)
    same = dataclasses.replace(Given(), source="" if odd.source != "arrays" else "arrays")

    def rank(comm: Communicator) -> str | Exception:
        try:
            return fit(comm, odd if comm.rank else same, odd, folder, [], **LAYOUTS[layout])
        except OdysseyError as error:
            return error

    return mock.run(2, rank)


def saved(folder: Path) -> dict[int, str]:
    """The hashes of all checkpoints, by their steps."""
    found = {}
    for path in sorted(folder.glob("step_*")):
        trainer = made(Given(), Communicator())
        step = trainer.load_checkpoint(path)
        found[step] = hash_of(trainer)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_differs_is_found(way, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("ODYSSEY_TIMEOUT", "20")
    ends = ended(layout, WAYS[way], tmp_path)
    right = expected(WAYS[way].get("source", "arrays"))
    wrong = [step for step, found in saved(tmp_path).items() if found != right[step]]
    found = all(isinstance(end, OdysseyError) for end in ends) and not wrong
    if (way, layout) in KNOWN_NOT_FOUND:
        assert not found, f"this is found now, so it does not belong into the table: {ends[0]}"
    else:
        assert found, f"ends with {ends}, checkpoints of steps {wrong} are wrong"
        said = (way, layout) in SAID_BY_CALLS or not all(
            isinstance(end, CollectiveError) for end in ends
        )
        assert said, "no rank says what differs"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", NOTHING)
def test_what_changes_nothing_is_no_difference(way, layout, tmp_path):
    right = expected("arrays")
    assert ended(layout, NOTHING[way], tmp_path) == [right[-1]] * 2
    assert saved(tmp_path) == {step: right[step] for step in saved(tmp_path)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_that_wants_to_finish_ends_all(layout, tmp_path):
    assert ended(layout, {"late": "finish"}, tmp_path) == [expected("arrays")[LATE]] * 2


SETTINGS = """
    import os
    import numpy as np
    from odyssey import DistributedTrainer, comm, data, nn, optim

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype(np.float32), rng.integers(0, 3, 64)
    nn.manual_seed(0)
    trainer = DistributedTrainer(nn.Linear(8, 3), optim.SGD(lr=0.1), shard_size=8)
    trainer.fit(data.DataLoader(data.arrays(x, y, classes=3), batch_size=32), epochs=2, verbose=False)
    print(trainer.weights_sha256())
"""


def test_variables_of_an_environment_change_nothing(launch):
    program = launch.folder / "settings.py"
    program.write_text(textwrap.dedent(SETTINGS))
    rank = "r=$((${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}} + 1))"
    command = f'{rank}; OMP_NUM_THREADS=$r PYTHONHASHSEED=$r exec "$0" "$1"'
    one, two = (
        launch("bash", "-c", command, launch.mpirun and "python", program, ranks=n) for n in (0, 2)
    )
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout.splitlines() == one.stdout.splitlines() * 2 != []
