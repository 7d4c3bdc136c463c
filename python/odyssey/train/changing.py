"""Changes while a training runs: settings of the optimizer and of modules, modes, what is
trained, the program.

    built     the settings at the beginning of a fit(): the configuration that a checkpoint is
              compared by
    now       what they are: state, which a checkpoint holds as far as it differs from `built`, and
              which is put back
    program   what forward() computes with them: recorded again at epochs and checkpoints, compared
              with the one that
              steps were taken with, and after a resume with the one that its checkpoint names

Ranks compare settings and program in the exchange of the very step (engine.Runner.mark), and
settings and weights before every checkpoint and at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core import fingerprint
from ..core.arena import Arena
from ..core.fingerprint import hash_of
from ..data import Batch
from ..engine.engine import Engine
from ..engine.listing import first_difference
from ..errors import LINE, CheckpointError, ConfigError, NumericsError, ShapeError
from ..nn import Module
from ..nn import settings as of_modules
from ..optim import Optimizer
from . import agreement
from .trainer_base import Sharing

WORD = 8  # hexadecimal digits of the hash of an op in a checkpoint


class Changing(Sharing):
    """The part of a DistributedTrainer that is about what changes."""

    model: Module
    optimizer: Optimizer
    arena: Arena
    _train: Engine
    _lr_factor: float
    _warned: bool
    _layers: Callable[[], dict[str, Any]]  # what the configuration says of layers and loss
    optimizer_arrays: Callable[[], dict[str, np.ndarray]]  # the optimizer's arrays, whole
    _built: dict[str, Any]  # what the training was built with
    # how a checkpoint's training cut parameters into buckets
    _expected_cut: tuple[int | None, str] = None, ""
    # a checkpoint's program, its name, whether it must be it
    _expected: tuple[dict[str, Any], str, bool] | None = None

    def remember(self) -> None:
        """Takes what the training is set to now as what it was built with."""
        frozen = {
            n
            for n, p in self.arena.named
            if not p.requires_grad and self.arena.offsets[n] < self.arena.trained
        }
        optimizer = dict(self.optimizer.settings)
        if names := self.optimizer.undecayed_names:
            optimizer["undecayed"] = names
        self._built = {
            "optimizer": optimizer,
            "frozen": frozen,
            "modules": self._train.programs.values(),
            "layers": self._layers(),
        }

    def standing(self) -> dict[str, Any]:
        """Returns what an update reads beside gradients and state, as it is now: ranks must have
        it alike.
        """
        return {
            **{
                f"{name} of the optimizer": value
                for name, value in sorted(self.optimizer.settings.items())
            },
            "parameters without weight decay (undecayed)": self.optimizer.undecayed_names,
            "clip_norm": self.clip_norm,
            "factor on the learning rate": self._lr_factor,
        }

    # --- in a checkpoint ---

    def changed(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of all this, as JSON values."""
        return {
            "settings": {
                name: of_modules.encoded(v) for name, v in self.optimizer.settings.items()
            },
            "undecayed": self.optimizer.undecayed_names,
            "clip_norm": self.clip_norm,
            "modules": of_modules.changed(self._train.programs.values(), self._built["modules"]),
            "program": self._program(),
        }

    def take_back(self, saved: Mapping[str, Any], name: str) -> None:
        """Puts back what `changed` gave. Raises CheckpointError: it is something else."""
        try:
            settings = {key: of_modules.decoded(v) for key, v in saved["settings"].items()}
            self.optimizer.restore(settings, list(saved["undecayed"]))
            norm = saved["clip_norm"]
            self.clip_norm = None if norm is None else float(norm)
            modules = {key: of_modules.decoded(value) for key, value in saved["modules"].items()}
            of_modules.restore(self.model, {**self._built["modules"], **modules})
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: what was changed while it ran cannot be restored: {problem}"
            ) from problem

    # --- the program ---

    def epoch_begins(self) -> None:
        """Takes up what forward() reads beyond attributes of modules, where it has changed:
        callbacks of an epoch's start have been called.
        """
        self._train.programs.refresh()

    def stays(self) -> None:
        astray = self._train.programs.astray()
        everyone = self.comm.all_gather(np.array([bool(astray)], np.int32))
        if everyone.any():
            astray = agreement.texts(self.comm, astray, LINE)[int(np.argmax(everyone))]
            raise ConfigError(
                f"[train] by step {self.steps} forward() of {type(self.model).__name__} computes "
                "something else than "
                f"in the steps before, though no attribute was changed: {astray}. It reads a "
                "value outside of its "
                "modules: make that an attribute (module.gain = ...), or set it in on_epoch_start"
            ).on_all_ranks()

    def _program(self) -> dict[str, Any] | None:
        """The program of the next step, if it is of the last one's form: a hash of each op."""
        programs = self._train.programs
        made = None
        # such as of a model that is all frozen: the next step says so
        with contextlib.suppress(ShapeError):
            made = programs.shape and programs.recording(*programs.shape)
        if made is None:
            return None
        n, form = programs.shape
        return {
            "samples": n,
            "form": hash_of(form),
            "gpu": programs.gpu,
            "ops": "".join(_words(made)),
        }

    def expect(self, snapshot: Any, name: str, exactly: bool) -> None:
        """The next step of this epoch must compute what the checkpoint says, unless callbacks of
        an epoch's start may have changed what forward() reads beyond attributes (not
        `exactly`). snapshot: None: no checkpoint says.
        """
        saved = None if snapshot is None else snapshot.values.get("changed", {}).get("program")
        self._expected = (saved, name, exactly) if isinstance(saved, dict) else None

    def _check_expected(self, batch: Batch) -> None:
        """Raises ConfigError, on all ranks: the program after a resume is not that of the
        checkpoint.
        """
        saved, name, exactly = self._expected
        self._expected = None
        form = batch.dataset.form
        n = saved.get("samples")
        programs = self._train.programs
        if (
            type(n) is not int
            or saved.get("form") != hash_of(form)
            or saved.get("gpu") != programs.gpu
            or not exactly
        ):
            return
        made = programs.recording(n, form)
        if made is None:
            return
        text = str(saved.get("ops"))
        ops = [text[i : i + WORD] for i in range(0, len(text), WORD)]
        if (at := first_difference(_words(made), ops)) is not None:
            raise ConfigError(
                f"[resume] forward() of {type(self.model).__name__} computes something else than "
                f"when {name} was made: "
                f"op {at + 1}, {programs.told(made, at, n, form)}. What it reads beside "
                "attributes of modules must be "
                "set again by a callback in on_epoch_start; or start anew (--resume never, "
                "another directory)"
            ).on_all_ranks()

    def check_cut(self, batch: Batch) -> None:
        """Raises ConfigError, on all ranks: gradients are compressed, and in other buckets than
        before a resume.
        """
        (saved, name) = self._expected_cut
        self._expected_cut = (None, "")
        self._train.settle(len(batch.indices), batch.dataset.form)
        if saved not in (None, self._train.ownership.cut):
            raise ConfigError(
                f"[resume] {name}: the program has changed so that parameters are in other "
                "buckets than before, or on "
                f"other stages, and the bits of {self.layout.reduction!r} depend on them; use "
                "reduction='tree', or "
                "one bucket (bucket_size_mb) and stages by hand"
            ).on_all_ranks()

    # --- on all ranks ---

    def check_alike(self) -> None:
        """Compares settings of modules as well."""
        agreement.standing(
            self.comm, f"step {self.steps}", self.standing(), self._train.programs.values()
        )
        self.check_replicas()

    @property
    def in_parts(self) -> bool:
        """True if ranks have parts of weights or of the optimizer's state that no other rank
        has.
        """
        return self.comm.size > 1 and (self._train.layout.split or self._train.layout.zero > 0)

    partial = in_parts  # fingerprints() are then of this rank's part

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Gives weights (p.data) and the optimizer's state (optimizer.state), whole on every
        rank, to be written alike.

        A collective call: all ranks enter and leave it. On layouts where ranks have parts of them
        (ZeRO, pipelines, tensor parallelism) they can be written nowhere else. Raises
        NumericsError: ranks have written other values; nothing was changed. An exception inside
        changes nothing either.
        """
        self.mode.settle()
        whole = self._train.ownership.parameters().copy()
        states = {name: array.copy() for name, array in self.optimizer_arrays().items()}
        with self.arena.whole(whole), self.optimizer.whole(states):
            yield
        prints = [fingerprint.signed(fingerprint.of(a)) for a in (whole, *states.values())]
        rank, _ = agreement.first_other(self.comm, prints)
        if rank is not None:
            raise NumericsError(
                f"[train] within writing() rank {rank} has written other values than rank 0; "
                "write the same on all "
                "ranks, whatever part of the model they have"
            ).on_all_ranks()
        self._train.ownership.load(lambda lo, out: np.copyto(out, whole[lo : lo + out.size]))
        for name, array in states.items():
            self.optimizer.arrays[name][...] = (
                self._train.ownership.own_state(array) if self._warned else array
            )


def _words(made: Any) -> list[str]:
    """A hash of each op of a recording."""
    return [f"{hash_of(line):016x}"[-WORD:] for line in made.training]
