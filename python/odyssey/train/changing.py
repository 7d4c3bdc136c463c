"""Settings that change while a training runs: those of the optimizer and of modules, modes, and
what is trained.

    built     the settings at the beginning of a fit(): the configuration that a checkpoint is
              compared by
    now       what they are: state, which a checkpoint holds as far as it differs from `built`, and
              which is put back

Ranks compare them in the exchange of the very step (engine.Runner.mark), and settings and weights
before every checkpoint and at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..nn import settings as of_modules
from . import resume
from .stepper import EngineStepper


class ChangingSettings:
    """The settings of a training that may change: as it was built with, and as they are now."""

    def __init__(self, stepper: EngineStepper) -> None:
        self.stepper = stepper
        self.model = stepper.model
        self.optimizer = stepper.optimizer
        self.built: dict[str, Any] = {}
        self.remember()

    def remember(self) -> None:
        """Takes what the training is set to now as what it was built with."""
        arena = self.stepper.arena
        frozen = {
            n for n, p in arena.named if not p.requires_grad and arena.offsets[n] < arena.trained
        }
        optimizer = dict(self.optimizer.settings)
        if names := self.optimizer.undecayed_names:
            optimizer["undecayed"] = names
        self.built = {
            "optimizer": optimizer,
            "frozen": frozen,
            "modules": self.of_modules(),
            "layers": self._layers(),
            "schedule": resume.probed(self.stepper.learning_rate.schedule),
        }

    def of_modules(self) -> dict[str, Any]:
        """Returns the settings of all modules, by path."""
        return self.stepper.engine.programs.values()

    def _layers(self) -> dict[str, Any]:
        """Returns what the configuration says of layers and loss."""
        modules = list(self.model.modules())
        layers = []
        for m in modules:
            named = (getattr(m, name, None) for name in ("p", *getattr(m, "configured", ())))
            # "p" may be a layer
            layers.append((type(m).__name__, *(v for v in named if isinstance(v, (int, float)))))
        return {
            "layers": layers,
            "settings of layers": [pair for m in modules for pair in resume.settings_of(m)],
            "settings of the loss": resume.settings_of(self.stepper.loss),
        }

    def of_update(self) -> dict[str, Any]:
        """Returns what an update reads beside gradients and state, as it is now: ranks must have
        it alike.
        """
        return {
            **{
                f"{name} of the optimizer": value
                for name, value in sorted(self.optimizer.settings.items())
            },
            "parameters without weight decay (undecayed)": self.optimizer.undecayed_names,
            "clip_norm": self.stepper.clip_norm,
            "factor on the learning rate": self.stepper.learning_rate.factor,
        }

    def changed(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of what the trainer itself keeps. Settings of modules
        and of the optimizer are captured by the walk.
        """
        return {
            "undecayed": self.optimizer.undecayed_names,
            "clip_norm": self.stepper.clip_norm,
        }

    def restore(self, saved: Mapping[str, Any], name: str) -> None:
        """Puts back what `changed` gave. Raises CheckpointError: it is something else."""
        try:
            # checkpoints before 0.3 have settings and modules here
            saved_settings = saved.get("settings", {})
            settings = {key: of_modules.decoded(v) for key, v in saved_settings.items()}
            self.optimizer.restore(settings, list(saved["undecayed"]))
            norm = saved["clip_norm"]
            self.stepper.clip_norm = None if norm is None else float(norm)
            if "modules" in saved:
                modules = {key: of_modules.decoded(v) for key, v in saved["modules"].items()}
                of_modules.restore(self.model, {**self.built["modules"], **modules})
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: what was changed while it ran cannot be restored: {problem}"
            ) from problem
