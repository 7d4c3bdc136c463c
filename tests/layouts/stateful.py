"""Random programs that keep state, and what becomes of them when they are stopped and resumed:
`scripts/random-layouts --stateful`.

A program has two to five members: a loss, schedule, optimizer, data set, callback or other thing
with state of a random kind (stateful_values.py, stateful_native.py). Each run loads the program
again and builds everything anew, as a new process does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cases
import draws
import numpy as np
import own_loops
import stateful_native
import stateful_values
from chance import Random
from changes import Change
from draws import Layout, Training
from samples import Data, Loss

from odyssey import nn
from odyssey.comm import Communicator
from odyssey.core.tensor import Tensor
from odyssey.errors import ConfigError, Stopped

HERE = Path(__file__).parent
REFUSED_SHARE = 0.05  # of programs that must be refused
OWN_LOOP_SHARE = 0.12  # of programs that train in a loop around train_step()
# These members need the events of fit(), or data whose length changes by epoch.
NEEDS_FIT = ("average", "best", "teacher", "data", "sampler", "transform", "collate", "closure")
Member = tuple[str, dict[str, Any]]
#: False if ranks are threads, which share the generators of the process.
ranks_are_processes = False


def load(name: str) -> ModuleType:
    """Returns a file of a user's program as a new process has it: with new globals and classes."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- members ---


def kinds_of_states() -> list[str]:
    """Returns the names of the states that a program may have on these ranks."""
    return [
        name
        for name, kind in stateful_values.KINDS.items()
        if ranks_are_processes or not hasattr(kind, "is_scoped")
    ]


def state_of(random: Random, effects: list[str], events: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings of a callback with a state of a random kind."""
    return {
        "state": random.one(kinds_of_states()),
        "start": random.integer(1, 9),
        "event": random.one(events),
        "effect": random.one(effects),
        "every": random.integer(1, 2),
        "late": random.chance(0.15),
    }


# What forward() reads outside of modules may change when an epoch starts, and so may arrays and
# dicts of modules that have other keys than strings, in place.
BY_EPOCH = ("on_epoch_start",)
ONLY_BY_EPOCH = ("closure", "noise_in_place", "table_of_numbers")
SPECIAL = ("loss", "schedule", "optimizer", "transform", *ONLY_BY_EPOCH)


def members(random: Random, makers: dict[str, Any]) -> list[Member]:
    """Returns the members of a program, and the callbacks that change them."""
    kinds = random.integer(2, 5)
    drawn: list[Member] = []
    for _ in range(kinds):
        names = [name for name in makers if name == "state" or name not in dict(drawn)]
        name = random.one(names, [makers[one][0] for one in names])
        drawn.extend(makers[name][1](random))
    return drawn


def _one_state(random: Random) -> list[Member]:
    effects = [name for name in stateful_native.EFFECTS if name not in SPECIAL]
    return [("state", state_of(random, effects, stateful_native.EVENTS))]


def _closure(random: Random) -> list[Member]:
    return [("state", state_of(random, list(ONLY_BY_EPOCH), BY_EPOCH))]


def _loss(random: Random) -> list[Member]:
    return [
        ("loss", {"loss": random.one(list(stateful_native.LOSSES))}),
        ("state", state_of(random, ["loss"], BY_EPOCH)),
    ]


def _schedule(random: Random) -> list[Member]:
    return [
        ("schedule", {"schedule": random.one(list(stateful_native.SCHEDULES))}),
        ("state", state_of(random, ["schedule"], stateful_native.EVENTS)),
    ]


def _optimizer(random: Random) -> list[Member]:
    return [
        ("optimizer", {"optimizer": random.one(list(stateful_native.OPTIMIZERS))}),
        ("state", state_of(random, ["optimizer"], stateful_native.EVENTS)),
    ]


def _average(random: Random) -> list[Member]:
    settings = {
        "form": random.one(["EMA", "SWA"]),
        "warmup": random.chance(0.5),
        "every": random.integer(1, 2),
        "evaluate": random.chance(0.5),
    }
    return [("average", settings)]


def _transform(random: Random) -> list[Member]:
    return [
        ("transform", {"form": random.one(["list", "number"])}),
        ("state", state_of(random, ["transform"], BY_EPOCH)),
    ]


def _form(kind: str, *forms: str) -> Any:
    return lambda random: [(kind, {"form": random.one(forms)})]


NATIVE: dict[str, tuple[float, Any]] = {
    "state": (5, _one_state),
    "closure": (0.7, _closure),
    "loss": (2.5, _loss),
    "schedule": (1, _schedule),
    "optimizer": (1, _optimizer),
    "average": (1, _average),
    "best": (0.7, _form("best", "dict")),
    "teacher": (0.7, _form("teacher", "copy")),
    "leaves": (0.7, _form("leaves", "tensor", "number", "list")),
    "data": (0.6, _form("data", "curriculum", "growing")),
    "sampler": (0.6, _form("sampler", "by epoch")),
    "transform": (0.7, _transform),
}


# --- native cases ---


@dataclasses.dataclass(frozen=True)
class Stop:
    """A run on a layout until so many steps are taken, of all; None: to its end."""

    layout: Any
    after: int | None
    kind: str = "limit"

    def __str__(self) -> str:
        how = "" if self.after is None else f", {self.kind} after step {self.after}"
        return f"{self.layout}{how}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and where it runs: stop by stop."""

    training: Any  # draws.Training, or torch_draws.Training
    members: tuple[Member, ...]
    refused: bool
    stops: tuple[Stop, ...]
    every: int | None

    def __str__(self) -> str:
        words = [f"{kind}{settings}" for kind, settings in self.members]
        return (
            f"{self.training} | {'; '.join(words)} | checkpoint every {self.every or 'epoch'} | "
            f"{' | '.join(map(str, self.stops))}"
        )


def _suitable(made: Training) -> bool:
    """Tells whether a training has one input, classes, and finite numbers."""
    network, source = made.network, made.data
    if network.micro is not None or network.vocabulary or "huge" in source.text:
        return False
    return "targets that are" not in source.text


def case(seed: int, index: int) -> Case:
    """Returns case number `index` of a seed."""
    random = Random(seed, index, "stateful")
    made = next(t for k in range(100) if _suitable(t := draws.training(seed, index + (k << 20))))
    settings = {**made.settings, "precision": random.one(["fp32", "fp32", "fp32", "bf16"])}
    made = dataclasses.replace(
        made,
        epochs=random.integer(2, 4),
        settings=settings,
        loop="fit",
    )
    drawn = members(random, NATIVE)
    if dict(drawn).get("data") == {"form": "growing"}:
        drawn = [one for one in drawn if one[0] != "sampler"]
    # After a resume a validation loader counts its epochs from 0 again.
    by_epoch = {"transform", "data"} & dict(drawn).keys()
    if random.chance(0.5) and not by_epoch:
        made = dataclasses.replace(made, loop="fit with a validation set")
    refused = random.chance(REFUSED_SHARE)
    if refused:
        drawn = [one for one in drawn if one[0] != "loss" and one[1].get("effect") != "loss"]
        drawn = [one for one in drawn if one[1].get("effect") != "closure"]
        kind = random.one(["counting", "loss"])
        drawn.append((kind, {"loss": "counting"}))
    stops = _stops(random, seed, index, made)
    every = _every(random)
    if not refused and random.chance(OWN_LOOP_SHARE):
        made = dataclasses.replace(made, loop="own")
        by_step = [one for one in drawn if one[1].get("effect") not in ("loss", *ONLY_BY_EPOCH)]
        drawn, stops = in_own_loop(by_step, stops)
    return Case(made, tuple(drawn), refused, stops, every)


def in_own_loop(
    drawn: list[Member], stops: tuple[Stop, ...]
) -> tuple[list[Member], tuple[Stop, ...]]:
    """Returns the members that a loop of the user's own can have, and its stops.

    Its callbacks draw from the number of the step, and there is no context that can stop it.
    """
    members_of_loop: list[Member] = []
    for kind, settings in drawn:
        effect = settings.get("effect", "")
        if kind in NEEDS_FIT or effect in NEEDS_FIT:
            continue
        if "state" in settings:
            settings = {**settings, "state": "by step", "late": False, "event": "on_step_end"}
        members_of_loop.append((kind, settings))
    return members_of_loop, tuple(
        dataclasses.replace(stop, kind="exception") if stop.kind == "stop" else stop
        for stop in stops
    )


def _every(random: Random) -> int | None:
    return random.one([None, 1, 2, 3])


def _stops(random: Random, seed: int, index: int, made: Training) -> tuple[Stop, ...]:
    total = made.steps * made.epochs
    points = sorted({random.integer(1, max(1, total - 1)) for _ in range(random.integer(1, 3))})
    stops = []
    for number, after in enumerate([*points, None]):
        kind = random.one(["limit", "stop", "exception"])
        stops.append(Stop(draws.layout(seed, index, made, number), after, kind))
    return tuple(stops)


def trained(
    made: Case, layout: Layout, comm: Communicator, stop: Stop | None = None, **fit: Any
) -> cases.Result:
    """Returns what a rank holds after a run of a program that is built anew."""
    base = made.training
    native, values = load("stateful_native"), load("stateful_values")
    values.KINDS["by step"] = own_loops.ByStep
    program = native.Program(
        values,
        made.members,
        base.network.classes,
        base.optimizer[1],
        nn.CrossEntropyLoss,
        base.schedule[1],
    )
    after = None if stop is None or stop.kind == "limit" else stop.after
    raising = native.Raising(after, "" if stop is None else stop.kind)
    if stop is not None and stop.kind == "limit" and stop.after is not None:
        fit["steps"] = stop.after
    given: list[Any] = []

    def make(model: Any) -> list[Any]:
        given.extend(program.callbacks(_sample_of(base)))
        return [*given, raising]

    source: Data = base.data
    source = dataclasses.replace(
        source,
        build=lambda: program.dataset(base.data.build()),
        transform=program.transform or source.transform,
    )
    if (sampler := program.sampler(base.data.samples)) is not None:
        source = dataclasses.replace(source, sampler=lambda _: sampler, shuffle=False)
    run = dataclasses.replace(
        base,
        network=dataclasses.replace(
            base.network, build=lambda: program.model(base.network.build())
        ),
        data=source,
        loss=Loss("the program's", lambda: program.loss),
        optimizer=("the program's", lambda: program.optimizer),
        schedule=("the program's", program.schedule),
        changes=(Change("the program's", make),),
    )
    try:
        result = cases.trained(run, layout, comm, **fit)
    except (native.Failure, own_loops.StoppedLoop, Stopped):
        return {}
    for number, callback in enumerate(given):
        for name, average in sorted(getattr(callback, "average", {}).items()):
            result[f"average {name} of callback {number}"] = np.asarray(average)
    result["states"] = np.array(program.ends())
    return result


def _sample_of(base: Training) -> Any:
    """Returns two samples for a teacher."""
    shape = (2, *base.network.shape)
    return Tensor(np.random.default_rng(1).standard_normal(shape).astype(np.float32))


tried = cases.attempted(trained)


def play(team: Any, seed: int, index: int) -> tuple[cases.Outcome, bool, str]:
    """Returns the outcome of a case, whether ranks had parts, and what the case is."""
    return played(team, case(seed, index), draws.EAGER, tried)


def played(
    team: Any, made: Case, alone: Any, attempted: Callable[..., Any]
) -> tuple[cases.Outcome, bool, str]:
    """Runs a case on one process, and stop by stop; see `play`."""

    def tried(*given: Any, **fit: Any) -> cases.Ran:
        ran = attempted(*given, **fit)
        if made.refused and isinstance(ran, ConfigError) and "depends on the layout" in str(ran):
            return ConfigError("how often it runs depends on the layout")  # counts differ by rank
        return ran

    expected = team.alone(lambda comm: tried(made, alone, comm))
    outcome = None
    with team.folder() as folder:
        for stop in made.stops:
            everyone = team.run(
                stop.layout.ranks,
                lambda comm, at=stop: tried(
                    made,
                    at.layout,
                    comm,
                    at,
                    checkpoint_dir=folder / "parts",
                    checkpoint_every=made.every,
                ),
            )
            team.meet()
            if outcome is None and team.leads:
                errors = [str(ran) for ran in everyone if isinstance(ran, Exception)]
                if errors or stop.after is None:
                    outcome = cases.judged(expected, everyone, made.refused)
                    outcome.text += f" ({stop})" * bool(errors)
    outcome = outcome or cases.Outcome("")
    # BatchNorm of one sample has no variance on any layout, so an error is right.
    is_right = made.refused or "no variance" in outcome.text
    if outcome.kind == "refused" and is_right:
        outcome.kind = "needed"
    return outcome, any(s.layout.splits for s in made.stops), str(made)


def torch_case(seed: int, index: int) -> Case:
    """Returns case number `index` of a seed, with PyTorch's modules."""
    import stateful_torch_cases

    return stateful_torch_cases.case(seed, index)


def play_torch(team: Any, seed: int, index: int) -> tuple[cases.Outcome, bool, str]:
    """Returns the outcome of a case with PyTorch's modules, as `play` does."""
    import stateful_torch_cases

    return stateful_torch_cases.play(team, seed, index)
