"""Checks that all ranks train the same: settings, data, programs, weights.

What is compared, and how, is agreement.py's; these classes say when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import data as datasets
from ..callbacks import Context
from ..capture import Capture, is_own_file, last_name, names_in
from ..checkpoints.trainable import Mode
from ..comm import Communicator
from ..core.fingerprint import hash_of
from ..data import Batch
from ..engine.engine import Engine
from ..engine.first_shard import has_whole_model, print_first_shard
from ..engine.layout import Layout
from ..engine.listing import first_difference
from ..errors import LINE, ConfigError, NumericsError, OdysseyError, ShapeError
from ..settings.declarations import Training, declared
from . import agreement, numerics, resume
from .arithmetic import Arithmetic
from .changing import ChangingSettings
from .stepper import EngineStepper

WORD = 8  # hexadecimal digits of the hash of an op in a checkpoint


def compare_settings(
    comm: Communicator,
    settings: Training,
    extra_settings: dict[str, Any],
    arithmetic: Arithmetic | None = None,
) -> None:
    """Raises ConfigError, on all ranks, if they differ in settings or in these; a collective
    call.

    arithmetic: compares what ranks compute in the same call; None: nothing.
    """
    common_settings = {
        name: getattr(settings, name)
        for name, declaration in declared(Training).items()
        if declaration.same_on_ranks
    }
    compared = {**common_settings, **extra_settings}
    if arithmetic is None:
        agreement.compare(comm, compared)
    else:
        arithmetic.compare(compared)


class RankChecks:
    """The checks of any trainer.

    Args:
        mode: how ranks take steps; has their communicator.
        check_every: steps from one comparison to the next; 0: only at the first step.
        say: tells the user a line.
        capture: knows the state beyond weights; None: there is none.
    """

    def __init__(
        self,
        mode: Mode,
        check_every: int,
        say: Callable[[str], None],
        capture: Capture | None = None,
    ) -> None:
        self.capture = Capture(dict, set, say) if capture is None else capture
        self.mode = mode
        self.comm = mode.comm
        self.say = say
        self.watch = agreement.Watch(mode.comm, check_every)

    def begin_fit(self, context: Context, compared_data: datasets.ArrayDataset | None) -> None:
        """Begins a fit(), for which all ranks have the same data.

        Args:
            compared_data: the data set, if all its bytes were compared.
        """
        self.watch.begin(compared_data, self.say if context.saving.nondeterministic else None)

    def begin_epoch(self) -> None:
        """Takes up what callbacks of an epoch's start may have changed."""

    def end_epoch(self) -> None:
        """After an epoch's last step: compares which samples its last steps had."""
        self.watch.end()
        self.expect(None, "", exactly=False)  # the checkpoint was made after the epoch's last step
        if self.mode.together:
            self.check_program()
            self.compare_captured()

    def expect(self, snapshot: Any, name: str, *, exactly: bool) -> None:
        """The next step must compute what the snapshot says, if `exactly` and it can be known."""

    def check_program(self) -> None:
        """Raises ConfigError: what a step computes has changed though no setting has, where that
        can be known; a collective call.
        """

    def check_alike(self) -> None:
        """Compares what ranks hold alike: settings, weights; a collective call."""
        raise NotImplementedError

    def compare_captured(self) -> None:
        """Raises ConfigError, on all ranks, naming the first value of the model, the loss, the
        optimizer or another root that a rank has otherwise than rank 0; a collective call.
        """
        if self.comm.size > 1 and self.mode.together:
            agreement.standing(self.comm, self.when(), self.captured())

    def captured(self) -> dict[str, Any]:
        """Returns what the walk has found that all ranks must have alike, by path."""
        return {path: agreement.Shown(mark) for path, mark in self.capture.compared().items()}

    def when(self) -> str:
        """Returns the moment for messages, for example "step 12"."""
        return f"step {self.mode.trainer.steps}"

    def check_replicas(self) -> None:
        """Compares the weights that several ranks have; a collective call."""
        raise NotImplementedError


class EngineChecks(RankChecks):
    """The checks of a trainer with the engine: also programs, op by op, and their changes.

    A program is what forward() computes. It is recorded again at epochs and checkpoints, and
    compared with the one that steps were taken with, and after a resume with the one that its
    checkpoint names.
    """

    def __init__(
        self,
        stepper: EngineStepper,
        settings: ChangingSettings,
        layout: Layout,
        check_every: int,
        say: Callable[[str], None],
        capture: Capture,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(stepper.mode, check_every, say, capture)
        self.arithmetic = arithmetic
        # the gradients of the first shard of the next step are compared
        self._compares_first_shard = True
        self.stepper = stepper
        self.settings = settings
        self.layout = layout
        self._weight_prints: Callable[[], list[int]] | None = None
        # what the optimizer's rule reads beyond its settings, when fit() began
        self._read_by_rule: dict[str, str] = {}
        # a checkpoint's program, its name, whether it must be it
        self._expected_program: tuple[dict[str, Any], str, bool] | None = None
        # how a checkpoint's training cut parameters into buckets, and its name
        self._expected_buckets: tuple[int | None, str] = None, ""

    def begin_fit(self, context: Context, compared_data: datasets.ArrayDataset | None) -> None:
        super().begin_fit(context, compared_data)
        self._compares_first_shard = not context.saving.nondeterministic
        self.settings.remember()
        self._read_by_rule = self._find_read_by_rule()

    def begin_epoch(self) -> None:
        """Takes up what forward() reads beyond attributes of modules, where it has changed."""
        self.stepper.engine.programs.refresh()

    # --- before and after a step ---

    def before_step(self, batch: Batch) -> None:
        """Compares what is due before a step: data and rates, programs, and what a checkpoint
        says of the first step after it.
        """
        self.compare_step(batch)
        self._compare_first_shard(batch)
        if self._expected_program is not None:
            self._check_expected_program(batch)
        if self._expected_buckets[0] is not None:
            self._check_expected_buckets(batch)

    def _compare_first_shard(self, batch: Batch) -> None:
        """Compares the gradients of the first shard of a fit()'s first step, where ranks have the
        whole model; a collective call.

        Raises ConfigError, on all ranks: ranks compute different results.
        """
        is_due = self._compares_first_shard and self.comm.size > 1 and self.mode.together
        self._compares_first_shard = False
        engine = self.stepper.engine
        if not is_due or not has_whole_model(engine):
            return

        def compute() -> int | None:
            with contextlib.suppress(OdysseyError):  # the step raises it
                engine.loss_scale = self.stepper.scaler.value
                return print_first_shard(engine, batch, self.stepper.steps)
            return None

        self.arithmetic.compare_first_shard(compute(), self.stepper.steps, compute)

    def compare_step(self, batch: Batch) -> None:
        """Compares what the ranks are given in a step and what their models do with it, where
        that is due.
        """
        self.watch.batch(batch, self.stepper.steps, self.stepper.learning_rate.of_step)
        self.compare_programs(batch, self.stepper.engine)

    def compare_programs(self, batch: Batch, engine: Engine) -> None:
        """Compares what the ranks' models do with a batch, at the first one of its form."""
        kind = (engine.train, engine.shard_size_of(len(batch.indices)), *batch.dataset.form)
        if self.comm.size > 1 and kind not in self.watch.programs:
            agreement.programs(self.comm, engine, batch, self.stepper.steps)
            # not where that raises: a program that catches it may go on
            self.watch.programs.add(kind)

    def raise_divergence(self, engine: Engine, batch: Batch) -> None:
        """Raises ConfigError, on all ranks: what they computed in a step, which was not taken,
        differs.
        """
        step = f"step {self.stepper.steps + 1}"
        agreement.standing(self.comm, step, self.settings.of_update(), engine.programs.values())
        agreement.programs(self.comm, engine, batch, self.stepper.steps)
        self.check_replicas()
        raise ConfigError(
            f"[train] ranks do not compute the same at {step}, which was not taken; change "
            "settings on all ranks alike"
        ).on_all_ranks()

    # --- now and then ---

    def check_alike(self) -> None:
        agreement.standing(
            self.comm,
            f"step {self.stepper.steps}",
            self.settings.of_update(),
            self.settings.of_modules(),
            self.captured(),
        )
        self.check_replicas()

    def check_replicas(self) -> None:
        """Compares the weights that ranks hold alike; a collective call.

        Raises NumericsError: on all ranks: they differ, as after a flipped bit in one rank's
        memory.
        """
        engine = self.stepper.engine
        if self.layout.zero == 3:
            return
        steps = self.stepper.steps
        if engine.team is not None:
            by_worker = engine.team.weights()
            wrong = [w for w, value in enumerate(by_worker) if value != by_worker[0]]
            if wrong:
                raise NumericsError(
                    f"[check] step {steps}: the weights of worker {wrong[0]} of rank "
                    f"{self.comm.rank} differ from those of its worker 0; a memory or hardware "
                    "error. Go on from the last checkpoint (--resume auto)"
                )
            weights = by_worker[0]
        else:
            if self._weight_prints is None:
                address = engine.parameters_address
                # none on a rank whose stage has no parameters
                runs = engine.ownership.replicated()
                self._weight_prints = engine.fingerprints(
                    [(address + 4 * start, n, start) for start, n in runs]
                )
            (weights,) = self._weight_prints()
        numerics.check_replicas(self.comm, steps, {"weights": weights}, engine.groups.model.rank)

    # --- the program ---

    def _find_read_by_rule(self) -> dict[str, str]:
        """Returns what a rule of the user's own reads in addition to its settings: marks by path.

        These are values whose names the code of the rule has.
        """
        optimizer = self.stepper.optimizer
        rule = type(optimizer).rule
        if not is_own_file(rule.__code__.co_filename):
            return {}
        names = {name for group in names_in(rule.__code__) for name in group}
        picture = self.capture.look(("optimizer",))

        def is_setting(path: str) -> bool:
            # If the model leads to the optimizer too, the path starts with "model".
            place = picture.entries[path].place
            return place.holder is optimizer and place.key in optimizer.settings

        return {
            path: mark
            for path, mark in picture.marks().items()
            if last_name(path) in names and not is_setting(path)
        }

    def _check_rule(self) -> None:
        """Raises ConfigError: what a rule reads has changed, but the rule was recorded before."""
        now = self._find_read_by_rule() if self._read_by_rule else {}
        for path, mark in self._read_by_rule.items():
            if now.get(path) != mark:
                raise ConfigError(
                    f"[train] {path} was {mark} when fit() began and is {now.get(path, 'missing')} "
                    f"now, but rule() of {type(self.stepper.optimizer).__name__} is recorded once "
                    "and computes with the first value; make it a number that is an attribute of "
                    "the optimizer"
                )

    def check_program(self) -> None:
        with resume.on_all_ranks(self.comm):
            self._check_rule()
        change = self.stepper.engine.programs.astray()
        everyone = self.comm.all_gather(np.array([bool(change)], np.int32))
        if everyone.any():
            rank = int(np.argmax(everyone))
            array = self.stepper.engine.programs.changed_array() or ""
            change, array = (agreement.texts(self.comm, t, LINE)[rank] for t in (change, array))
            if array:
                raise ConfigError(
                    f"[train] by step {self.stepper.steps} {array} of "
                    f"{type(self.stepper.model).__name__} has changed in place, and is too large "
                    "to be compared in each step, so steps computed with its earlier values; set "
                    "the attribute to another array instead, or change it in on_epoch_start"
                ).on_all_ranks()
            raise ConfigError(
                f"[train] by step {self.stepper.steps} forward() of "
                f"{type(self.stepper.model).__name__} computes something else than in the steps "
                f"before, though no attribute was changed: {change}. It reads a value outside of "
                "its modules: make that an attribute (module.gain = ...), or set it in "
                "on_epoch_start"
            ).on_all_ranks()

    def program(self) -> dict[str, Any] | None:
        """Returns the program of the next step, if it is of the last one's form: a hash of each
        op.
        """
        programs = self.stepper.engine.programs
        recording = None
        # such as of a model that is all frozen: the next step says so
        with contextlib.suppress(ShapeError):
            recording = programs.shape and programs.recording(*programs.shape)
        if recording is None:
            return None
        n, form = programs.shape
        return {
            "samples": n,
            "form": hash_of(form),
            "gpu": programs.gpu,
            "ops": "".join(_op_hashes(recording)),
        }

    def expect(self, snapshot: Any, name: str, *, exactly: bool) -> None:
        """The next step of this epoch must compute what the checkpoint says, unless callbacks of
        an epoch's start may have changed what forward() reads beyond attributes (not
        `exactly`), or other kernels made it. snapshot: None: no checkpoint says.
        """
        saved = None
        if snapshot is not None and resume.has_same_kernels(snapshot):
            saved = snapshot.values.get("changed", {}).get("program")
        self._expected_program = (saved, name, exactly) if isinstance(saved, dict) else None

    def _check_expected_program(self, batch: Batch) -> None:
        """Raises ConfigError, on all ranks: the program after a resume is not that of the
        checkpoint.
        """
        saved, name, exactly = self._expected_program
        self._expected_program = None
        form = batch.dataset.form
        n = saved.get("samples")
        programs = self.stepper.engine.programs
        if (
            type(n) is not int
            or saved.get("form") != hash_of(form)
            or saved.get("gpu") != programs.gpu
            or not exactly
        ):
            return
        recording = programs.recording(n, form)
        if recording is None:
            return
        text = str(saved.get("ops"))
        ops = [text[i : i + WORD] for i in range(0, len(text), WORD)]
        op = first_difference(_op_hashes(recording), ops)
        if op is not None:
            raise ConfigError(
                f"[resume] forward() of {type(self.stepper.model).__name__} computes something "
                f"else than when {name} was made: op {op + 1}, "
                f"{programs.told(recording, op, n, form)}. What it reads beside attributes of "
                "modules must be set again by a callback in on_epoch_start; or start anew "
                "(--resume never, another directory)"
            ).on_all_ranks()

    def expect_buckets(self, buckets: int | None, name: str) -> None:
        """The next step must have its parameters in the buckets that a checkpoint names; None: in
        any.
        """
        self._expected_buckets = buckets, name

    def _check_expected_buckets(self, batch: Batch) -> None:
        """Raises ConfigError, on all ranks: gradients are compressed, and in other buckets than
        before a resume.
        """
        saved, name = self._expected_buckets
        self._expected_buckets = None, ""
        engine = self.stepper.engine
        engine.settle(len(batch.indices), batch.dataset.form)
        if saved not in (None, engine.ownership.cut):
            raise ConfigError(
                f"[resume] {name}: the program has changed so that parameters are in other buckets "
                f"than before, or on other stages, and the bits of {self.layout.reduction!r} "
                "depend on them; use reduction='tree', or one bucket (bucket_size_mb) and stages "
                "by hand"
            ).on_all_ranks()


def _op_hashes(recording: Any) -> list[str]:
    """Returns a hash of each op of a recording."""
    return [f"{hash_of(line):016x}"[-WORD:] for line in recording.training]
