"""What may change while a training runs, and what comes of it: one sentence of the promise at a
time.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odyssey import DistributedTrainer, Mesh, data, nn, optim
from odyssey import functional as F
from odyssey.callbacks import Callback, Context, LambdaCallback
from odyssey.comm import Communicator, mock
from odyssey.core.tensor import Tensor
from odyssey.errors import CollectiveError, ConfigError, NumericsError, OdysseyError, Stopped

STEPS, EPOCHS = 3, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(1, 2, size=(16 * STEPS, 6)).astype(np.float32), RNG.integers(0, 3, 16 * STEPS)


class Net(nn.Module):
    """A model whose forward() reads attributes, a closure and another object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 3)
        self.gain, self.bent, self.depth, self.scales, self.names = (
            1.0,
            False,
            1,
            [1.0, 0.5],
            {"how": "relu"},
        )
        self.outside: Callable[[], float] = lambda: 1.0
        self.look = False

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.first(x)))) * self.gain
        for layer in list(self.more)[: self.depth]:
            x = x + getattr(F, self.names["how"])(layer(x)) * self.scales[0]
        if self.look:
            self.seen = x
        x = F.tanh(x) if self.bent else x
        return self.last(x) * (sum(self.scales) * self.outside())


class Deep(nn.Module):
    """Layers of which the last two need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 11), nn.ReLU(), nn.Linear(11, 3)
        )
        self.more, self.depth = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), 2

    def forward(self, x):
        y = self.body(x)
        for layer in list(self.more)[: self.depth]:
            y = y + F.tanh(layer(y))
        return y


def made(
    prepare: Callable[[Net], Any] | None = None, comm: Communicator | None = None, **settings: Any
) -> DistributedTrainer:
    """A trainer at its first step; `prepare` is called with its model before."""
    nn.manual_seed(1)
    net = Net()
    if prepare is not None:
        prepare(net)
    optimizer = optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    return DistributedTrainer(
        net, optimizer, comm=comm or Communicator(), shard_size=4, threads=1, **settings
    )


def fit(
    trainer: DistributedTrainer,
    *given: Callback,
    folder: Path | None = None,
    every: int | None = None,
) -> str:
    """Trains, and returns the hash of the weights."""
    loader = data.DataLoader(data.arrays(X, Y, classes=3), batch_size=16)
    saving = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": every}
    trainer.fit(loader, epochs=EPOCHS, callbacks=list(given), verbose=False, **saving)
    return trainer.weights_sha256()


def at_step(step: int, act: Callable[[DistributedTrainer], Any]) -> Callback:
    """Calls `act` with the trainer once, after a step."""
    return LambdaCallback(on_step_end=lambda c: act(c.trainer) if c.steps == step else None)


def set_(step: int, path: str, value: Any) -> Callback:
    """Sets an attribute of the trainer, by its path, after a step."""

    return at_step(step, setting(path, value))


def setting(path: str, value: Any) -> Callable[[DistributedTrainer], None]:
    """Sets an attribute of a trainer, by its path."""

    def act(trainer: DistributedTrainer) -> None:
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, trainer), name, copy.copy(value))

    return act


def stop(step: int) -> Callback:
    """Stops a training after a step, with a checkpoint."""

    def act(context: Context) -> None:
        if context.steps == step:
            context.stop = "as the test wants it"

    return LambdaCallback(on_step_end=act)


def resumed(
    folder: Path, stops: tuple[int, ...], make: Callable[..., DistributedTrainer], *given: Callback
) -> str:
    """The hash of a training that was stopped after some steps."""
    for step in stops:
        with pytest.raises(Stopped):
            fit(make(), *given, stop(step), folder=folder)
    return fit(make(), *given, folder=folder)


CHANGES: dict[str, tuple[str, Any]] = {
    "a rate": ("optimizer.lr", 0.01),
    "a momentum": ("optimizer.momentum", 0.5),
    "a weight decay": ("optimizer.weight_decay", 0.5),
    "which parameters decay": ("optimizer.undecayed", optim.vectors),
    "a norm that gradients are clipped to": ("clip_norm", 0.05),
    "dropout": ("model.drop.p", 0.1),
    "a batch norm's momentum": ("model.norm.momentum", 0.5),
    "a number": ("model.gain", 0.5),
    "a flag": ("model.bent", True),
    "how many layers run": ("model.depth", 2),
    "that fewer layers run": ("model.depth", 0),
    "a list": ("model.scales", [0.3]),
    "a dictionary": ("model.names", {"how": "tanh"}),
    "that a parameter is frozen": ("model.first.weight.requires_grad", False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_next_step_sees_a_change(what):
    change = CHANGES[what]
    eager, replayed = (fit(made(execution=how), set_(4, *change)) for how in ("eager", "replay"))
    assert eager == replayed != fit(made())
    assert set(mock.run(3, lambda comm: fit(made(comm=comm, zero=1), set_(4, *change)))) == {eager}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("stops", [(4,), (5,), (6,), (4, 5, 7)])
def test_a_change_comes_back_at_a_resume(what, stops, tmp_path):
    """Also one that was made at the very step of the checkpoint, or at the last of an epoch, and
    after two resumes.
    """
    change = set_(4, *CHANGES[what])
    assert resumed(tmp_path, stops, made, change) == fit(made(), change)


@pytest.mark.parametrize("stops", [(2,), (3,), (4,), (5,), (4, 5)])
def test_what_an_epoch_s_start_multiplies_is_multiplied_once(stops, tmp_path):
    def act(context: Context) -> None:
        context.trainer.optimizer.lr *= 0.5
        context.trainer.model.gain *= 0.5

    change = LambdaCallback(on_epoch_start=act)
    assert resumed(tmp_path, stops, made, change) == fit(made(), change)


@pytest.mark.parametrize(
    "event", ["on_epoch_start", "on_step_end", "on_epoch_end", "on_checkpoint"]
)
def test_a_change_at_any_event(event, tmp_path):
    """Checkpoints of each step, so that a training that stops has made the same ones."""

    def act(context: Context) -> None:
        context.trainer.optimizer.lr *= 0.9
        context.trainer.model.gain = [1.0, 0.5, 0.7][context.steps % 3]

    change = LambdaCallback(**{event: act})
    eager, replayed = (
        fit(made(execution=how), change, folder=tmp_path / how, every=1)
        for how in ("eager", "replay")
    )
    assert eager == replayed


@pytest.mark.parametrize("stops", [(2,), (4,), (3, 5)])
def test_a_list_that_changes_in_place_within_an_epoch(stops, tmp_path):
    """Also one that is what it was again when the epoch ends, so that nobody who looks only then
    sees it.
    """

    def act(context: Context) -> None:
        context.trainer.model.scales[0] = [1.0, 0.5, 0.7][context.steps % STEPS]
        context.trainer.model.names["how"] = ["relu", "tanh", "tanh"][context.steps % STEPS]

    change = LambdaCallback(on_step_end=act)
    eager = fit(made(execution="eager"), change)
    assert fit(made(), change) == resumed(tmp_path, stops, made, change) == eager != fit(made())
    assert set(mock.run(3, lambda comm: fit(made(comm=comm, zero=2), change))) == {eager}


@pytest.mark.parametrize("pp", [2, 3, 5])
def test_a_stage_whose_layers_are_not_used_any_more_has_no_gradients(pp):
    """The optimizer goes on with momentum and decay, as it does with one process."""

    def act(context: Context) -> None:
        context.trainer.model.depth = 0

    def run(comm: Communicator, **settings: Any) -> str:
        nn.manual_seed(1)
        net = Deep()
        trainer = DistributedTrainer(
            net, optim.SGD(lr=0.1, momentum=0.9), comm=comm, shard_size=4, threads=1, **settings
        )
        return fit(trainer, LambdaCallback(on_epoch_end=act))

    alone = run(Communicator(), execution="eager")
    assert mock.run(pp, lambda comm: run(comm, mesh=Mesh(1, pp, 1))) == [alone] * pp


def test_stages_that_are_cut_elsewhere_after_a_resume_are_refused_where_bits_depend_on_them(
    tmp_path,
):
    """A compressed reduction keeps what it has not sent by rank; the sum along the tree goes on."""

    def act(context: Context) -> None:
        if context.steps == 4:
            context.trainer.model.depth = 0

    def run(comm: Communicator, *given: Callback, **settings: Any) -> str:
        nn.manual_seed(1)
        how = {"comm": comm, "shard_size": 4, "threads": 1, "mesh": Mesh(1, 2, 1), **settings}
        trainer = DistributedTrainer(Deep(), optim.SGD(lr=0.1), **how)
        return fit(
            trainer, LambdaCallback(on_step_end=act), *given, folder=tmp_path / str(settings)
        )

    for settings in ({}, {"compression": "topk", "compression_ratio": 0.5}):
        with pytest.raises(Stopped):
            mock.run(2, lambda comm: run(comm, stop(5), **settings))  # noqa: B023
        if settings:
            with pytest.raises(
                ConfigError, match=r"in other buckets than before, or on other stages.*'topk'"
            ):
                mock.run(2, lambda comm: run(comm, **settings))  # noqa: B023
        else:
            mock.run(2, lambda comm: run(comm, **settings))  # noqa: B023


class Counting(Callback):
    """Lowers the rate by what it has counted."""

    count = 0

    def on_step_end(self, context: Context) -> None:
        self.count += 1
        context.trainer.optimizer.lr = 0.1 / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_callback_s_own_state_comes_back(step, tmp_path):
    with pytest.raises(Stopped):
        fit(made(), Counting(), stop(step), folder=tmp_path)
    assert fit(made(), Counting(), folder=tmp_path) == fit(made(), Counting())


# --- modes, and what is trained -------------------------------------------------------------------


def test_modes_are_the_user_s(tmp_path):
    trainer = made(lambda net: net.norm.eval())
    found = fit(trainer)
    assert not trainer.model.norm.training and trainer.model.drop.training
    assert not trainer.state_dict()["norm.running_mean"].any()
    assert found == fit(made(lambda net: net.norm.eval(), execution="eager")) != fit(made())


@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_mode_comes_back(step, tmp_path):
    change = at_step(4, lambda trainer: trainer.model.norm.eval())
    assert (
        resumed(tmp_path, (step,), made, change)
        == fit(made(), change)
        == fit(made(execution="eager"), change)
    )


@pytest.mark.parametrize("layout", [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}])
def test_layers_are_unfrozen_one_after_the_other(layout, tmp_path):
    def act(context: Context) -> None:
        context.trainer.model.more[context.epoch % 2].requires_grad_(True)
        context.trainer.model.first.requires_grad_(context.epoch > 2)

    def make(comm: Communicator | None = None, **settings: Any) -> DistributedTrainer:
        def freeze(net: Net) -> None:
            net.depth = 2
            net.first.requires_grad_(False)
            net.more.requires_grad_(False)

        return made(freeze, comm, **settings)

    change = LambdaCallback(on_epoch_start=act)
    eager = fit(make(execution="eager"), change)
    assert (
        mock.run(2, lambda comm: fit(make(comm, bucket_size_mb=1e-4, **layout), change))
        == [eager] * 2
    )
    assert resumed(tmp_path, (2, 4, 6, 7), make, change) == eager


# --- arrays ---------------------------------------------------------------------------------------


def torch_ones() -> Any:
    return pytest.importorskip("torch").ones(3)


class Weighted(nn.Module):
    """A loss with class weights: `kind` says how it holds them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        ones = np.ones(3, np.float32)
        kinds = {"array": ones, "tensor": Tensor(ones), "dict": {"w": [ones]}}
        self.weight: Any = torch_ones() if kind == "torch" else kinds[kind]

    def array(self) -> np.ndarray:
        weight = self.weight["w"][0] if isinstance(self.weight, dict) else self.weight
        return np.asarray(weight)

    def forward(self, output, target):
        return F.cross_entropy(output, target, weight=self.array())


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_epoch_start"])
@pytest.mark.parametrize("kind", ["array", "tensor", "dict", "torch"])
def test_an_array_of_the_loss_that_changes_in_place(kind, event, tmp_path):
    def act(context: Context) -> None:
        context.trainer.loss.array()[:] = 1.0 + np.arange(3) * (context.steps + 1)

    def make(**settings: Any) -> DistributedTrainer:
        return made(loss=Weighted(kind), **settings)

    change = LambdaCallback(**{event: act})
    eager = fit(make(execution="eager"), change)
    assert fit(make(), change) == resumed(tmp_path, (2, 3, 5), make, change) == eager
    assert eager != fit(make())
    assert set(mock.run(3, lambda comm: fit(make(comm=comm, zero=2), change))) == {eager}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_large_array_that_changes_in_place_is_named(ranks):
    def prepare(net: Net) -> None:
        net.table = np.ones(20_000, np.float32)
        net.outside = lambda: float(net.table[0])

    def act(context: Context) -> None:
        context.trainer.model.table *= 0.5

    def assign(context: Context) -> None:
        context.trainer.model.table = context.trainer.model.table * np.float32(0.5)

    def run(comm: Communicator, **events: Any) -> str:
        return fit(made(prepare, comm), LambdaCallback(**events))

    with pytest.raises(ConfigError, match="table of Net has changed in place.*too large"):
        mock.run(ranks, functools.partial(run, on_step_end=act))
    whole = mock.run(ranks, functools.partial(run, on_epoch_start=act))
    assert whole == mock.run(ranks, functools.partial(run, on_epoch_start=assign))


# --- what no module knows -------------------------------------------------------------------------


def outside(
    event: str, value: Callable[[Context], float]
) -> tuple[Callable[[Net], None], Callback]:
    """A closure that forward() reads, and who sets it at an event."""
    other = types.SimpleNamespace(gain=1.0)

    def prepare(net: Net) -> None:
        other.gain = 1.0
        net.outside = lambda: other.gain

    def act(context: Context) -> None:
        other.gain = value(context)

    return prepare, LambdaCallback(**{event: act})


@pytest.mark.parametrize("stops", [(2,), (3,), (4,), (6,), (2, 3, 4)])
def test_a_closure_may_be_a_function_of_the_epoch(stops, tmp_path):
    prepare, change = outside("on_epoch_start", lambda context: 1 / context.epoch)
    whole = fit(made(prepare), change)
    assert whole == fit(made(prepare, execution="eager"), change) != fit(made())
    assert resumed(tmp_path, stops, lambda: made(prepare), change) == whole


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
def test_a_closure_that_is_set_elsewhere_is_refused(event, saves, tmp_path):
    """Also where no checkpoint is made after the event, before the next epoch takes up what is
    there.
    """
    prepare, change = outside(event, lambda context: 1 / context.steps)
    with pytest.raises(ConfigError, match=r"Net.*on_epoch_start"):
        fit(made(prepare), change, **({"folder": tmp_path, "every": 2} if saves else {}))


@pytest.mark.parametrize("what", ["an attribute changes after it", "the last batch is smaller"])
def test_a_closure_that_changes_within_an_epoch_is_refused_though_the_last_program_has_it(what):
    """By then another program has been recorded, in which the closure has the new value; the
    step before had not.
    """
    box = [1.0]

    def act(context: Context) -> None:
        if context.steps == 1:
            box[0] = 0.5
        if context.steps == 2 and what.startswith("an attribute"):
            context.trainer.model.drop.p = 0.1

    trainer = made(lambda net: setattr(net, "outside", lambda: box[0]))
    n = len(X) - (0 if what.startswith("an attribute") else 14)
    loader = data.DataLoader(data.arrays(X[:n], Y[:n], classes=3), batch_size=16)
    with pytest.raises(ConfigError, match="computes something else than in the steps before"):
        trainer.fit(loader, epochs=1, callbacks=[LambdaCallback(on_step_end=act)], verbose=False)


@pytest.mark.parametrize("execution", ["replay", "eager"])
def test_a_program_that_is_kept_does_not_hide_a_closure_that_has_changed_since(execution):
    """Settings come back for a step, in the middle of an epoch, after the closure was set
    together with others.
    """
    other = types.SimpleNamespace(gain=1.0)

    def prepare(net: Net) -> None:
        other.gain, net.outside = 1.0, lambda: other.gain

    def act(context: Context) -> None:
        context.trainer.model.gain = {1: 2.0, 7: 1.0, 8: 3.0}.get(
            context.steps, context.trainer.model.gain
        )
        other.gain = 1.5 if context.steps == 1 else other.gain

    with pytest.raises(ConfigError, match="reads a value outside of its modules"):
        fit(made(prepare, execution=execution), LambdaCallback(on_step_end=act))

    def begin(context: Context) -> None:
        context.trainer.model.gain, other.gain = (
            (1.0, 2.0, 1.0)[context.epoch - 1],
            (1.0, 1.0, 1.5)[context.epoch - 1],
        )

    change = LambdaCallback(on_epoch_start=begin)
    assert fit(made(prepare), change) == fit(made(prepare, execution="eager"), change)


def test_a_closure_that_is_set_nowhere_after_a_resume_is_restored(tmp_path):
    prepare, change = outside("on_epoch_start", lambda context: 1 / (context.epoch + 1))
    with pytest.raises(Stopped):
        fit(made(prepare), change, stop(4), folder=tmp_path)
    resumed = made(prepare)
    fit(resumed, folder=tmp_path)
    assert resumed.model.outside() == 1 / 3


def test_another_program_after_a_resume_is_refused(tmp_path):
    with pytest.raises(Stopped):
        fit(made(), stop(4), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"step_00000004"):
        fit(made(lambda net: setattr(net, "outside", lambda: 0.5)), folder=tmp_path)


@pytest.mark.parametrize("execution", ["replay", "eager"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["calls", "numpy"])
def test_forward_that_is_not_the_same_twice_is_refused(kind, ranks, execution):
    def work(comm: Communicator) -> str:
        calls, rng = [], np.random.default_rng(comm.rank)

        def number() -> float:
            calls.append(1)
            return 1.0 + len(calls) % 5 / 10 if kind == "calls" else float(rng.random())

        with pytest.raises(ConfigError, match=r"forward\(\) of Net|the model of rank") as caught:
            fit(made(lambda net: setattr(net, "outside", number), comm, execution=execution))
        return type(caught.value).__name__

    assert mock.run(ranks, work) == ["ConfigError"] * ranks


@pytest.mark.parametrize("execution", ["replay", "eager"])
def test_a_tensor_that_is_left_to_look_at_is_allowed(execution):
    assert fit(made(lambda net: setattr(net, "look", True), execution=execution)) == fit(made())


@pytest.mark.parametrize("execution", ["replay", "eager"])
@pytest.mark.parametrize("new", ["parameter", "module"])
def test_new_parameters_and_modules_in_mid_run_are_refused(new, execution):
    def act(trainer: DistributedTrainer) -> None:
        trainer.model.added = nn.Linear(3, 3) if new == "module" else nn.Linear(3, 3).weight

    with pytest.raises(ConfigError, match="added"):
        fit(made(execution=execution), at_step(4, act))


# --- ranks that part ------------------------------------------------------------------------------


def caught(
    comm: Communicator, step: int, act: Callable[[DistributedTrainer], Any], **settings: Any
) -> tuple[Any, int]:
    """How a rank ends of which the last one does something after a step, and how many steps it
    has taken.
    """
    trainer = made(None, comm, check_every=100, **settings)
    try:
        return fit(
            trainer, at_step(step, act if comm.rank == comm.size - 1 else lambda trainer: None)
        ), trainer.steps
    except OdysseyError as error:
        return error, trainer.steps


@pytest.mark.parametrize("layout", [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_on_one_rank_is_found_at_the_next_step(what, layout):
    path, value = CHANGES[what]
    ends = mock.run(2, lambda comm: caught(comm, 4, setting(path, value), **layout))
    # other buckets have gradients: their calls differ first
    if "layers run" in what and layout.get("zero", 0) > 1:
        assert all(isinstance(end, (ConfigError, CollectiveError)) for end, _ in ends), ends
        return
    assert all(isinstance(end, ConfigError) and "rank 1" in str(end) for end, _ in ends), ends
    assert {steps for _, steps in ends} == {4} and len({str(end) for end, _ in ends}) == 1


@pytest.mark.parametrize("step", [4, STEPS * EPOCHS])
def test_a_weight_that_one_rank_writes_is_found_by_the_end(step):
    def act(trainer: DistributedTrainer) -> None:
        trainer.model.first.weight.data[0, 0] += 1e-3

    ends = mock.run(2, lambda comm: caught(comm, step, act))
    assert all(
        isinstance(end, NumericsError) and "the weights of ranks 0 and 1 differ" in str(end)
        for end, _ in ends
    )


@pytest.mark.parametrize("layout", [{"zero": 1}, {"zero": 3}])
def test_state_with_one_owner_is_written_in_writing_alone(layout):
    def alone(trainer: DistributedTrainer) -> None:
        trainer.optimizer.state["momentum"][:] = 0

    ends = mock.run(2, lambda comm: caught(comm, 4, alone, **layout))
    assert all(isinstance(end, OdysseyError) for end, _ in ends), ends

    def together(comm: Communicator) -> str:
        def act(trainer: DistributedTrainer) -> None:
            with trainer.writing():
                trainer.optimizer.state["momentum"][:] = 0
                trainer.model.last.weight.data[:] *= 0.5

        return fit(made(None, comm, **(layout if comm.size > 1 else {})), at_step(4, act))

    assert mock.run(2, together) == [together(Communicator())] * 2
