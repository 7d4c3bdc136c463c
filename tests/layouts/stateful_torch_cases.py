"""Random programs of PyTorch's modules that keep state: `scripts/random-layouts --torch --stateful`.

It is stateful.py for the trainings of torch_draws.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import draws
import numpy as np
import own_loops
import stateful
import stateful_torch
import torch_cases
import torch_draws
from chance import Random
from stateful import Case, Member, Stop

from odyssey.comm import Communicator
from odyssey.errors import Stopped

SPECIAL = ("loss", "scheduler", "optimizer", "transform", "collate", "closure")
# ZeRO takes classes of torch.optim only.
AT_ANY_STAGE = ("hook", "hook with a closure")
DATA = ("data", "sampler", "transform", "collate")


def _state(random: Random, effects: Any, events: Any = stateful_torch.EVENTS) -> Member:
    kinds = [*stateful.kinds_of_states(), *list(stateful_torch.KINDS) * 3]
    return (
        "state",
        {**stateful.state_of(random, list(effects), events), "state": random.one(kinds)},
    )


def _one_state(random: Random) -> list[Member]:
    return [_state(random, [name for name in stateful_torch.EFFECTS if name not in SPECIAL])]


def _changed(kind: str, names: Any, events: Any = stateful_torch.EVENTS) -> Any:
    """Returns a function that draws a member and a callback that changes it."""
    return lambda random: [(kind, {kind: random.one(list(names))}), _state(random, [kind], events)]


def _with_form(kind: str, forms: Any, events: Any) -> Any:
    return lambda random: [(kind, {"form": random.one(forms)}), _state(random, [kind], events)]


TORCH: dict[str, tuple[float, Any]] = {
    "state": (5, _one_state),
    "closure": (0.7, lambda random: [_state(random, ["closure"], stateful.BY_EPOCH)]),
    "loss": (2.5, _changed("loss", stateful_torch.LOSSES)),
    "scheduler": (1.5, _changed("scheduler", stateful_torch.SCHEDULERS)),
    "optimizer": (1.5, _changed("optimizer", stateful_torch.OPTIMIZERS)),
    "average": (1, stateful._average),
    "best": (0.7, stateful._form("best", "dict")),
    "teacher": (0.9, stateful._form("teacher", "before fit()", "in on_fit_start")),
    "leaves": (0.7, stateful._form("leaves", "tensor", "number", "dict")),
    "data": (0.6, stateful._form("data", "curriculum", "growing")),
    "sampler": (0.8, stateful._form("sampler", "weighted", "random", "by epoch")),
    "transform": (0.7, _with_form("transform", ["list", "number"], stateful.BY_EPOCH)),
    "collate": (0.7, _with_form("collate", ["number"], stateful.BY_EPOCH)),
}


def case(seed: int, index: int) -> Case:
    """Returns case number `index` of a seed."""
    random = Random(seed, index, "stateful torch")
    base = next(
        one
        for k in range(100)
        if (one := torch_draws.case(seed, index + (k << 20)).training).kind != "pair"
        and one.settings["accumulation_steps"] == 1
    )
    settings = {name: value for name, value in base.settings.items() if name != "gather"}
    base = dataclasses.replace(base, loop="fit", settings=settings, channels_last=False)
    base = dataclasses.replace(base, epochs=random.integer(2, 3))
    drawn = stateful.members(random, TORCH)
    names = dict(drawn)
    if "growing" in names.get("data", {}).values():
        drawn = [one for one in drawn if one[0] != "sampler"]
    refused = random.chance(stateful.REFUSED_SHARE)
    if refused:
        drawn = [one for one in drawn if one[0] != "loss" and one[1].get("effect") != "loss"]
        drawn = [one for one in drawn if one[1].get("effect") != "closure"]
        drawn.append((random.one(["counting", "loss"]), {"loss": "counting"}))
    is_own_rule = names.get("optimizer", {}).get("optimizer", "hook") not in AT_ANY_STAGE
    own_data = any(one[0] in DATA for one in drawn)
    if own_data:
        base = dataclasses.replace(base, loader="torch")
    where = torch_draws.numbers(seed, index, "stateful layout")
    torch_draws.RANKS = draws.RANKS
    points = sorted(
        {random.integer(1, max(1, base.steps - 1)) for _ in range(random.integer(1, 3))}
    )
    stops = []
    for after in [*points, None]:
        layout = torch_draws.layout(where, 1)
        if random.chance(0.3) and base.loader != "odyssey.torch" and layout.settings["zero"] < 2:
            layout.settings["rebalance"] = True
        if is_own_rule:
            layout.settings["zero"] = 0
        stops.append(Stop(layout, after, random.one(["limit", "stop", "exception"])))
    every = random.one([None, 1, 2, 3])
    if not refused and random.chance(stateful.OWN_LOOP_SHARE):
        # train_step() takes the batches of odyssey's loaders.
        loader = base.loader if base.loader in ("ours", "odyssey.torch") else "ours"
        base = dataclasses.replace(base, loop="own steps", loader=loader)
        drawn, stops = stateful.in_own_loop(drawn, tuple(stops))
    return Case(base, tuple(drawn), refused, tuple(stops), every)


def trained(
    made: Case, layout: Any, comm: Communicator, stop: Stop | None = None, **fit: Any
) -> cases.Result:
    """Returns what a rank holds after a run of a program that is built anew."""
    program_file, values = stateful.load("stateful_torch"), stateful.load("stateful_values")
    values.KINDS["by step"] = own_loops.ByStep
    is_limit = stop is not None and stop.kind == "limit"
    after = None if stop is None or is_limit else stop.after
    raising = program_file.Raising(after, "" if stop is None else stop.kind)
    if stop is not None and is_limit and stop.after is not None:
        fit["steps"] = stop.after
    program = program_file.Program(values, made.members, made.training, raising)
    try:
        result = torch_cases.trained(program, layout, comm, **fit)
    except (program_file.Failure, own_loops.StoppedLoop, Stopped):
        return {}
    for number, callback in enumerate(program.given):
        for name, average in sorted(getattr(callback, "average", {}).items()):
            result[f"average {name} of callback {number}"] = np.asarray(average)
    result["states"] = np.array(program.ends())
    return result


tried = cases.attempted(trained)


def play(team: Any, seed: int, index: int) -> tuple[cases.Outcome, bool, str]:
    """Returns the outcome of a case, whether ranks had parts, and what the case is."""
    return stateful.played(team, case(seed, index), torch_draws.ALONE, tried)
