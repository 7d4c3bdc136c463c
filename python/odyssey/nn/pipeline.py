"""A model as a row of stages, each on a place: what a pipeline runs.

Who runs which stage when is decided elsewhere (parallel/schedule.py, the engine); alone on one CPU
this is an ordinary model with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core.placement import FIRST, Device, check_places
from ..core.placement import device as place_of
from ..core.tensor import Tensor
from ..errors import ConfigError
from ..settings.recipes import PIPELINES
from .layers import Activation, Dropout, Flatten, Linear
from .module import Module

KEEP_SHAPE = (Activation, Dropout)


class Function(Module):
    """A function of one tensor as a layer without parameters."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)

    def __repr__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)


class _Flatten(Flatten):
    """Before a Linear: (N, C, H, W) to (N, F); tokens (N, T, F) stay, as the Linear is one over
    the last axis.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self._features = features

    def forward(self, x: Tensor) -> Tensor:
        image = (
            x.shape[-1] != self._features or x.ndim > 3 and math.prod(x.shape[1:]) == self._features
        )
        return super().forward(x) if image else x

    def __repr__(self) -> str:
        return "Flatten()"


class Stage(Module):
    """Layers that are computed on one place, one after the other.

    A `Flatten` is put before a Linear that may get an image: before each one that does not follow
    another Linear or a Flatten, activations between them left aside. On (N, features) and tokens
    (N, T, features) it does nothing. print(stage) shows it. A layer's name is its position in
    `layers`: parameters are "0.weight", "2.bias", ...

    Args:
        layers: modules, or functions of one tensor (functional.relu, a lambda).
        device: the place of all their parameters; default the stage's position in its
            PipelineParallel.

    Raises ConfigError: no layers, or one that is neither. DeviceError: see placement.device.
    """

    def __init__(
        self,
        layers: Sequence[Module | Callable[[Tensor], Tensor]],
        device: int | str | Device | None = None,
    ) -> None:
        super().__init__()
        layers = list(layers) if isinstance(layers, Iterable) else [layers]
        if not layers:
            raise ConfigError("[Stage] there are no layers; give at least one")
        flat = False  # whether the next layer is known to get (N, features)
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise ConfigError(
                    f"[Stage] layer {i} is a {type(layer).__name__}; give modules or functions"
                )
            if not isinstance(layer, Module):
                layer = Function(layer)
            elif isinstance(layer, Linear):
                if not flat:
                    setattr(self, f"flatten{i}", _Flatten(layer.weight.shape[1]))
                flat = True
            elif not isinstance(layer, KEEP_SHAPE):
                flat = isinstance(layer, Flatten)
            setattr(self, str(i), layer)
        self.device: Device | None = None
        if device is not None:
            self.to(device)

    def to(self, device: int | str | Device) -> Stage:
        """Places the stage: its parameters, and where its input is moved to."""
        super().to(device)
        self.device = place_of(device)
        for _, p in self._state():
            p.put(self.device, self)  # a module may be in several stages
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device or FIRST)
        for layer in self.children():
            x = layer(x)
        return x

    def __repr__(self) -> str:
        suffix = f", device={self.device.slot}" if self.device else ""
        return f"Stage([{', '.join(repr(layer) for layer in self.children())}]{suffix})"


class PipelineParallel(Module):
    """Stages one after the other, each on its place; a trainer runs them as a pipeline of
    micro-batches.

    A micro-batch is a shard: its gradient is computed alone and added along the tree, so neither
    the schedule nor the number of devices changes a bit, but micro_batch_size does. As a module on
    its own it computes its stages in a row. Parameters are named "stage.layer.name", as
    "0.2.weight".

    Args:
        stages: Stage objects. For "gpipe" and "1f1b" stage s is on device s; for "interleaved" on
            device s mod p, with the same number of stages on each of the p devices.
        micro_batch_size: samples of one micro-batch.
        schedule: "gpipe", "1f1b" or "interleaved"; see parallel/schedule.py.
        loss: called as loss(model(x), labels) on the last stage's place; default the trainer's.

    Stages may share layers, or layers parameters.

    Raises ConfigError: there are no stages, or their places do not fit the schedule.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        micro_batch_size: int = 8,
        schedule: str = "1f1b",
        *,
        loss: Callable[[Tensor, Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        stages = list(stages)
        if not stages:
            raise ConfigError(
                "[pipeline] there are no stages; give at least one Stage(layers=[...])"
            )
        for i, stage in enumerate(stages):
            if not isinstance(stage, Stage):
                raise ConfigError(
                    f"[pipeline] stage {i} is a {type(stage).__name__}; give Stage(layers=[...], "
                    f"device={i})"
                )
        if (
            not isinstance(micro_batch_size, int)
            or isinstance(micro_batch_size, bool)
            or micro_batch_size < 1
        ):
            raise ConfigError(
                f"[pipeline] micro_batch_size is {micro_batch_size!r}; it must be an integer of "
                "at least 1"
            )
        if schedule not in PIPELINES:
            raise ConfigError(
                f"[pipeline] schedule is {schedule!r}; choose from {', '.join(PIPELINES)}"
            )
        self.micro_batch_size = micro_batch_size
        self.schedule = schedule
        self.loss = loss
        for i, stage in enumerate(stages):
            if stage.device is None:
                stage.to(i)
            setattr(self, str(i), stage)
        check_places(schedule, self.places)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(m for m in self.children() if isinstance(m, Stage))

    @property
    def places(self) -> tuple[int, ...]:
        """The slot of each stage."""
        return tuple(s.device.slot for s in self.stages)

    def to(self, device: int | str | Device) -> Module:
        """Not for a pipeline: its stages have places. Raises ConfigError."""
        raise ConfigError(
            f"[pipeline] a pipeline has a place for each stage, not {device!r} for all; set "
            "Stage(device=)"
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x

    def __repr__(self) -> str:
        stages = ", ".join(map(repr, self.stages))
        return (
            f"PipelineParallel([{stages}], micro_batch_size={self.micro_batch_size}, "
            f"schedule={self.schedule!r})"
        )
