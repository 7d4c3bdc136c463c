"""Settings of a torch module while it is trained: modes, requires_grad, attributes that JSON has
(nn/settings.py).

A callback may change them; a checkpoint holds what differs from the beginning of fit(). What
forward() itself sets is left out; where it counts its calls it is refused, as how often it runs on
a rank depends on the layout.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..comm import Communicator
from ..errors import CheckpointError, ConfigError
from ..nn import settings
from ..train import agreement

# times that a number rises by as much as the time before, which a length or a loss does not
COUNTS = 3
SMALL = 64  # values of a list or dict that is looked into
LONGEST = 1 << 20  # bytes of the names of attributes that forward() sets


class ModuleSettings:
    """The settings of a module, and of the loss if that is a module. strict: refuse a forward()
    that counts its calls. by_forward: keys of attributes that forward() sets, of shards that
    this rank has run, or of all (`share`).
    """

    def __init__(self, module: nn.Module, loss: Any, strict: bool) -> None:
        self.roots = {"module": module}
        if isinstance(loss, nn.Module):
            self.roots["loss"] = loss
        self.strict = strict
        self.by_forward: set[str] = set()
        self._structures = self._structure()
        self._owned = [
            (f"{root}.{path}." if path else f"{root}.", vars(module))
            for root, top in self.roots.items()
            for path, module in top.named_modules()
        ]
        holders = [own for _, own in self._owned if "_modules" in own]
        self._held = [
            (own[kind], dict(own[kind])) for own in holders for kind in ("_modules", "_parameters")
        ]
        # numbers that forward() sets: last, rise, how often so
        self._last: dict[str, tuple[float, float, int]] = {}
        self.remember()

    def remember(self) -> None:
        """Takes what all is set to now as what the training was built with."""
        self._built = self.values()
        self._containers = [
            (at + name, value)
            for at, own in self._owned
            for name, value in own.items()
            if name[0] != "_"
            and type(value) in (list, dict)
            and len(value) <= SMALL
            and settings.is_value(value)
        ]

    def values(self) -> dict[str, Any]:
        """All settings by their keys, such as "module.drop.p"; without what forward() sets."""
        found = {
            f"{root}.{k}": v
            for root, top in self.roots.items()
            for k, v in settings.values(top).items()
        }
        return {key: value for key, value in found.items() if key not in self.by_forward}

    def changed(self) -> dict[str, Any]:
        """Returns the settings that are not what they were at `remember`, as JSON has them."""
        return settings.changed(self.values(), self._built)

    def restore(self, saved: Mapping[str, Any], name: str) -> None:
        """Sets all to what `changed` gave, the others to what was built.

        Raises CheckpointError: one is not there.
        """
        try:
            wanted = {**self._built, **{key: settings.decoded(v) for key, v in saved.items()}}
            for root, top in self.roots.items():
                own = {
                    k: v
                    for k, v in wanted.items()
                    if k.partition(".")[0] == root and k not in self.by_forward
                }
                settings.restore(top, {key.partition(".")[2]: value for key, value in own.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: settings of modules are not taken back: {problem}"
            ) from problem

    def share(self, comm: Communicator) -> None:
        """Lets all ranks know what forward() sets; a collective call."""
        if comm.size > 1:
            for text in agreement.texts(comm, json.dumps(sorted(self.by_forward)), LONGEST):
                self.by_forward.update(json.loads(text))

    def _structure(self) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
        top = self.roots["module"]
        return dict(top.named_modules(remove_duplicate=False)), dict(
            top.named_parameters(remove_duplicate=False)
        )

    def check_structure(self) -> None:
        """Raises ConfigError: the module has other parameters or submodules than when the
        trainer was made.
        """
        if all(_same(now, before) for now, before in self._held):
            return
        for what, before, now in zip(
            ("submodule", "parameter"), self._structures, self._structure(), strict=True
        ):
            for name in {**before, **now}:
                if now.get(name) is not before.get(name):
                    does = (
                        "is new"
                        if name not in before
                        else "is gone"
                        if name not in now
                        else "is another one"
                    )
                    raise ConfigError(
                        f"[torch] the {what} {name} {does} since the trainer was made, so it is "
                        "not what is trained; "
                        "change values in place (load_state_dict, p.copy_), or make a new "
                        "trainer of the module"
                    )

    # --- what forward() sets ---

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Finds which attributes the block, forward() of a shard, sets.

        Raises ConfigError: it counts in one.
        """
        before = [dict(attributes) for _, attributes in self._owned]
        inside = [(key, value, repr(value)) for key, value in self._containers]
        yield
        for (at, now), then in zip(self._owned, before, strict=True):
            if _same(now, then):
                continue
            for name, value in now.items():
                if name[0] != "_" and then.get(name, self) is not value:
                    self._set(at + name, then.get(name), value)
        for key, value, text in inside:
            if repr(value) != text:
                self._set(key, None, None)

    def _set(self, key: str, old: Any, value: Any) -> None:
        self.by_forward.add(key)
        if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (old, value)):
            return
        by = value - old
        (last, rose, times) = self._last.get(key, (math.nan, math.nan, 0))
        times = times + 1 if by and last == old and math.isclose(by, rose) else 0
        self._last[key] = value, by, times
        if self.strict and times >= COUNTS:
            raise ConfigError(
                f"[torch] forward() counts in {key} ({old}, then {value}): how often it runs on "
                "a rank depends on the "
                "layout; count steps in a callback (on_step_end) instead, or use "
                "deterministic='warn'"
            )


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """True if both hold the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
