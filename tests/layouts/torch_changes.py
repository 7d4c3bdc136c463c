"""Random callbacks that change a torch training while it runs, by epoch, by step and by what it
measures.

Drawn from numbers of their own, so that the other draws of a case stay what they are. All of a
callback's own state is in its state_dict(); what it does to modules and optimizer is the
checkpoint's affair.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils import data

from odyssey import callbacks

NORMS = nn.modules.batchnorm._NormBase
DROPOUTS = nn.modules.dropout._DropoutNd


class Gain(nn.Module):
    """A module whose outputs are multiplied by a number, which notes what it saw last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gain, self.shapes = inner, 1.0, [1]
        self.last: Any = None

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        found = self.inner(*inputs, **named) * self.gain
        self.last, self.seen = found.detach(), len(found)
        return found


class Change(callbacks.Callback):
    """Changes something in on_epoch_start, or after some steps.

    at: None: at the start of each epoch; else the number of the step after which it is done, and
    every so many.
    """

    def __init__(self, what: str, at: int | None, number: float) -> None:
        self.what, self.at, self.number = what, at, number

    def __str__(self) -> str:
        return (
            f"{self.what} {self.number} "
            f"{'each epoch' if self.at is None else f'every {self.at} steps'}"
        )

    def on_epoch_start(self, context: callbacks.Context) -> None:
        if self.at is None:
            self.change(context.trainer, context.epoch)

    def on_step_end(self, context: callbacks.Context) -> None:
        if self.at is not None and context.steps % self.at == 0:
            self.change(context.trainer, context.steps // self.at)

    def change(self, trainer: Any, times: int) -> None:
        """Does it, for the `times`-th time, from 1."""
        groups, modules = trainer.optimizer.param_groups, list(trainer.module.modules())
        parameters = list(trainer.module.parameters())
        one = parameters[int(self.number * 1000) % max(1, len(parameters) - 1)]
        if self.what == "rate *=":
            for group in groups:
                group["lr"] *= self.number
        elif self.what == "rate =":
            groups[-1]["lr"] = 0.01 * self.number / times
        elif self.what == "momentum =":
            for group in groups:
                for name in ("momentum", "weight_decay"):
                    if group.get(name):
                        group[name] = group[name] * self.number
        elif self.what == "clip_norm =":
            trainer.clip_norm = self.number * times
        elif self.what == "drop":
            for m in modules:
                if isinstance(m, DROPOUTS):
                    m.p = self.number / (1 + times)
        elif self.what == "momentum of norms":
            for m in modules:
                if isinstance(m, NORMS):
                    m.momentum = self.number / (1 + times)
        elif self.what == "gain *=":
            for m in modules:
                if isinstance(m, Gain):
                    m.gain *= self.number
                    m.shapes.append(times)
        elif self.what == "mode of norms":
            for m in modules:
                if isinstance(m, NORMS) and m.track_running_stats:
                    m.train(times % 2 == 0)
        elif self.what == "freeze":
            one.requires_grad_(times % 2 == 0)
        elif self.what == "unfreeze":
            for p in parameters[-times:]:
                p.requires_grad_(True)
        elif self.what == "add group":
            own = {id(p) for group in groups for p in group["params"]}
            more = [p for p in parameters if id(p) not in own]
            if more:
                for p in more:
                    p.requires_grad_(True)
                trainer.optimizer.add_param_group({"params": more, "lr": 0.01 * self.number})
        else:
            raise AssertionError(self.what)


class Average(callbacks.Callback):
    """A moving average of the last parameter, which is put into the module at the end of an
    epoch.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.values = decay, []

    def __str__(self) -> str:
        return f"average {self.decay}"

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])

    def on_step_end(self, context: callbacks.Context) -> None:
        with context.trainer.gathered() as module:
            now = list(module.parameters())[-1].detach().flatten().tolist()
        before = self.values or now
        self.values = [
            self.decay * a + (1 - self.decay) * b for a, b in zip(before, now, strict=True)
        ]

    def on_epoch_end(self, context: callbacks.Context) -> None:
        with torch.no_grad(), context.trainer.gathered() as module:
            p = list(module.parameters())[-1]
            p.copy_(torch.tensor(self.values).reshape(p.shape))


class Plateau(callbacks.Callback):
    """Lowers the rates where the loss of a step is no better than the best one."""

    def __init__(self, factor: float) -> None:
        self.factor, self.best = factor, None

    def __str__(self) -> str:
        return f"plateau {self.factor}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]

    def on_step_end(self, context: callbacks.Context) -> None:
        if self.best is not None and not context.loss < self.best:
            for group in context.trainer.optimizer.param_groups:
                group["lr"] *= self.factor
        elif context.loss == context.loss:
            self.best = context.loss


KINDS = (
    "rate *=",
    "rate =",
    "momentum =",
    "clip_norm =",
    "drop",
    "momentum of norms",
    "gain *=",
    "mode of norms",
    "freeze",
    "unfreeze",
    "add group",
    "average",
    "plateau",
)
#: What a torch scheduler, or an optimizer with one count of steps for all parameters, cannot be
#: given while it runs.
FIXED_GROUPS = ("add group",)


def drawn(r: random.Random, scheduled: bool, fragile: bool) -> list[callbacks.Callback]:
    """Up to three callbacks. scheduled: there is a scheduler. fragile: parameters stay as they
    are.
    """
    found: list[callbacks.Callback] = []
    for _ in range(r.choice([0, 1, 1, 2, 3])):
        kind, number, at = (
            r.choice(KINDS),
            r.choice([0.5, 0.9, 0.3, 0.703]),
            r.choice([None, 1, 2, 3]),
        )
        if (kind in FIXED_GROUPS and scheduled) or (
            kind in ("freeze", "unfreeze", "add group") and fragile
        ):
            continue
        if kind == "average":
            found.append(Average(number))
        elif kind == "plateau":
            found.append(Plateau(number))
        else:
            found.append(Change(kind, at, number))
    return found


def sampler(r: random.Random, samples: int, seed: int) -> data.Sampler:
    """A sampler with a generator of its own, of as many samples."""
    g = torch.Generator().manual_seed(seed)
    return r.choice(
        [
            lambda: data.WeightedRandomSampler(
                torch.linspace(0.1, 1, samples), samples, generator=g
            ),
            lambda: data.RandomSampler(range(samples), generator=g),
            lambda: data.RandomSampler(
                range(samples), replacement=True, num_samples=samples, generator=g
            ),
            lambda: data.SubsetRandomSampler(range(samples), generator=g),
        ]
    )()
