"""Places: which slot of the mesh's model axis computes a layer.

A slot is a number, not hardware: another rank under MPI, another worker of one process, the same
CPU when alone. So a script that places its layers is the same everywhere. This file knows nothing
of ranks: the mesh says who fills a slot.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..compile import gpus
from ..errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from .tape import Tensor


@dataclasses.dataclass(frozen=True)
class Device:
    """Slot `slot` of the model axis."""

    slot: int = 0

    def __repr__(self) -> str:
        return f"device({self.slot})"


FIRST = Device()  # where the samples arrive, and where everything is that nobody placed


def device(where: int | str | Device = 0) -> Device:
    """A place for layers and activations.

    where: a slot, 0 or more; or "cpu", "cpu:1", "gpu:1" (also written "cuda:1"): the slot of that
        number, on a CPU or a GPU. A `Device` is given back as it is.

    Raises ConfigError: no such form. DeviceError: a GPU on a machine without one, or that this
    version cannot use.
    """
    if isinstance(where, Device):
        return where
    if isinstance(where, int) and not isinstance(where, bool) and where >= 0:
        return Device(where) if where else FIRST
    if isinstance(where, str):
        form = re.fullmatch(r"(cpu|gpu|cuda)(?::(\d+))?", where)
        if form:
            kind = form[1]
            slot = int(form[2] or 0)
            if kind == "cpu":
                return Device(slot)
            gpu_count = gpus.count()
            if slot >= gpu_count:
                raise DeviceError(
                    f"[device] {where!r} needs {slot + 1} GPUs and this machine has "
                    f"{gpu_count or 'none'}; use device({slot}) or 'cpu'"
                )
            raise DeviceError(
                f"[device] {where!r}: layers are placed on slots, and a trainer with device='gpu' "
                f"runs all of them on its GPUs; use device({slot}) or 'cpu'"
            )
        if where.isdigit():
            return device(int(where))
    raise ConfigError(
        f"[device] {where!r} is no place; give a slot from 0, or 'cpu', 'cpu:1', 'gpu:1'"
    )


def elsewhere(t: Tensor, place: Device) -> bool:
    """Returns whether a tensor is on another place; a parameter is on those of all modules that
    share it.
    """
    return t.device.slot != place.slot and place not in getattr(t, "places", {}).values()


def place_of_op(inputs: tuple[Any, ...]) -> Device:
    """Where an op runs: where its first input is, or the others, if that is a parameter of
    several places.
    """
    shared = len(getattr(inputs[0], "places", ())) > 1
    return next(
        (t.device for t in inputs if not (shared and hasattr(t, "places"))), inputs[0].device
    )


def different_places(op: str, a: Tensor, b: Tensor) -> str:
    """Returns what to say about two inputs of an op that are on different places."""

    def describe(t: Tensor) -> str:
        if hasattr(t, "places"):
            return f"the {'bias' if t.ndim == 1 else 'weight'} {t.name or t.shape}"
        return "the label tensor" if t.dtype.__name__ == "int32" else "the input"

    if hasattr(a, "places") and not hasattr(b, "places"):
        a, b = b, a
    move = describe(a) if not hasattr(a, "places") else "the layer"
    first = describe(a)
    second = describe(b)
    if first == second:
        first = "one input"
        second = "another"
        move = "one"
    place = (
        f", or place the layer with @ {a.device}, after its weights are shared"
        if hasattr(b, "places")
        else ""
    )
    return (
        f"[{op}] {first} is on {a.device}, {second} on {b.device}; move {move} with "
        f".to({b.device}){place}"
    )


def check_places(schedule: str, place: Sequence[int]) -> None:
    """Raises ConfigError if stages on the slots `place`, in order, do not fit a pipeline's
    schedule.
    """
    count = len(set(place))
    if schedule == "interleaved":
        if list(place) != [s % count for s in range(len(place))] or len(place) % count:
            raise ConfigError(
                "[pipeline] schedule 'interleaved' needs stages = v x devices with stage s on "
                f"device s mod devices, but {len(place)} stages are on {list(place)}; change "
                "Stage(device=) or @ device(k), or add stages"
            )
    elif list(place) != list(range(len(place))):
        raise ConfigError(
            f"[pipeline] schedule {schedule!r} needs stage s on device s, but the {len(place)} "
            f"stages are on {list(place)}; change Stage(device=) or @ device(k), or use "
            "'interleaved' for several stages per device"
        )
