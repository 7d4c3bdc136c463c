"""The events of a training, whoever listens, and what the environment adds to one.

A trainer says what happens and knows nobody that listens: progress, step log, loggers, requests to
stop, verify and replay are callbacks, as are those that are given to fit(). The order of events:

    on_fit_plan                              before anything is done; may change the plan (Context)
    on_fit_start                             the checkpoint, if there is one, is put back
      on_epoch_start
        on_step_end, on_sync, on_checkpoint
      on_validation_end, on_epoch_end
    on_exception                             where fit() ends with one, on the ranks that raise it
    on_fit_end                               finished or not

All ranks call all of them at the same steps (but on_exception and on_server_update), so a callback
may call collectives, and must then call them on all ranks. A callback is called with a `Context`.
What one rank alone wishes, all do: train/stop_requests.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import registry, slot
from ..checkpoints.trainable import Cursor, History, Saving, Step, Tally, Trainable
from ..core.random_scopes import scope
from ..errors import ConfigError
from ..settings.declarations import brief

if TYPE_CHECKING:
    from ..data import Batch


@dataclasses.dataclass
class Context:
    """Where a training is: one object per fit(), the same for all its events.

    The plan, which on_fit_plan may change: `limit` (optimizer steps, None: all epochs), `validate`
    (False: the validation set is left out), `pieces` (in so many each batch of the loader is cut),
    `saving`.
    """

    trainer: Trainable
    history: History = dataclasses.field(default_factory=History)
    epochs: int = 0
    limit: int | None = None
    validate: bool = True
    pieces: int = 1
    saving: Saving = dataclasses.field(default_factory=Saving)
    batch_size: int = 0  # of a step; 0: not known
    steps_per_epoch: int = 0  # 0: not known
    # in on_step_end: of the step that has ended
    cursor: Cursor = dataclasses.field(default_factory=Cursor)
    tally: Tally = dataclasses.field(default_factory=Tally)  # of the epoch that is under way
    batch: Batch | None = None  # of the last step
    step: Step | None = None  # the last one
    loss: float = 0.0  # mean over the samples of the last step
    record: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the last epoch
    error: Exception | None = None
    folder: Path | None = None  # of the checkpoints; None: there are none
    # why the training is to stop here, to go on some other time: fit() raises Stopped
    stop: str | None = None
    finished: str | None = None  # why it is complete here: fit() returns
    # by log(): its number, value
    logged: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    log_calls: int = 0
    due: bool = False  # in on_epoch_end: a checkpoint of this moment is wanted
    # in on_checkpoint: further names of it, as links
    marks: set[str] = dataclasses.field(default_factory=set)
    # likewise: steps whose checkpoints stay with the newest
    kept: set[int] = dataclasses.field(default_factory=set)
    callbacks: Sequence[Callback] = ()
    given: Sequence[Callback] = ()  # those of them that were given to fit()
    # the classes of these when fit() began, by id
    first_classes: dict[int, type] = dataclasses.field(default_factory=dict, repr=False)
    loader: Any = None  # as it was given to fit()
    asking: Callback | None = None  # whose event it is, or was
    finisher: Callback | None = None  # who has finished it
    # what an epoch's record will have; None: not known before the first has ended
    figures: Sequence[str] | None = None

    def __repr__(self) -> str:
        position = f"epoch {min(self.epoch, self.epochs)} of {self.epochs}, step {self.steps}"
        return f"Context({position}, loss={self.loss:.6g}, record={self.record})"

    def emit(self, event: str) -> None:
        """Calls a method of all callbacks, in their order.

        Callbacks of the user's own code may draw from the generators of the process. So each call
        is in a scope of random numbers, which depend on the callback, the event and the step. The
        watcher of the ranks is told that this is a callback, which may take long.
        """
        for callback in self.callbacks:
            self.asking = callback
            method = getattr(callback, event)
            is_inherited = getattr(method, "__func__", None) is getattr(Callback, event)
            place = next((n for n, one in enumerate(self.given) if one is callback), -1)
            is_given = place >= 0 or callback.own_code
            if is_inherited or self.trainer.comm.in_threads or not is_given:
                method(self)
                continue
            previous_phase = slot.phase("callback")
            try:
                with self._scope_of(callback, place, event):
                    method(self)
            finally:
                slot.phase(previous_phase)

    def _scope_of(self, callback: Callback, place: int, event: str) -> AbstractContextManager[None]:
        """Returns the scope of random numbers of a callback's event."""
        if not callback.own_code:
            return nullcontext()
        return scope(self.trainer.seed, "callback", place, event, self.trainer.steps)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 1."""
        return self.cursor.epoch + 1

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self.trainer.steps

    def finish(self, why: str) -> None:
        """Completes the training here, with its last checkpoint, as if it had been asked for so
        many steps; fit() returns. Said by any rank, in on_step_end, on_validation_end or
        on_epoch_end.
        """
        self.finished = why
        self.finisher = self.asking

    @property
    def own_code(self) -> bool:
        """True if fit() was given callbacks of the user's own code."""
        return any(c.own_code for c in self.given)

    def log(self, name: str, value: float) -> None:
        """Gives loggers a number: it stands with what they write next."""
        self.log_calls += 1
        self.logged[name] = self.log_calls, float(value)

    def named(self) -> dict[str, Callback]:
        """The callbacks that were given to fit(), by the names that checkpoints have for them:
        Timer, Timer-2.
        """
        callbacks: dict[str, Callback] = {}
        for callback in self.given:
            # a callback may change its class while it runs, and keeps its name
            first_class = self.first_classes.setdefault(id(callback), type(callback))
            name = first_class.__name__
            count = sum(earlier_name.partition("-")[0] == name for earlier_name in callbacks)
            callbacks[f"{name}-{count + 1}" if count else name] = callback
        return callbacks


class Callback:
    """Hears of a training; override what you need.

    exact: where on_step_end is overridden, a wish to stop or finish takes effect at its very step:
    ranks then talk after each. False: within about a tenth of a second. after: hears of each event
    after those whose `after` is lower. writes: leaves something that outlives the training, so it
    is left out where one is only tried: verify, replay.
    """

    exact = True
    after = 0
    writes = False
    _not_state: tuple[str, ...] = ("state_dict()",)  # checkpoints keep it in any case

    def __repr__(self) -> str:
        return brief(self)

    @property
    def own_code(self) -> bool:
        """True if the user has written what it does, which may change the training."""
        return not type(self).__module__.startswith("odyssey.")

    @property
    def is_captured(self) -> bool:
        """True if checkpoints keep the attributes that change, as docs/state.md describes."""
        return self.own_code

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps for it in addition to its attributes: numbers, strings,
        arrays, and containers of them. All ranks get what rank 0 returned.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back, on all ranks, what state_dict() gave; after on_fit_start, and where
        training goes back.
        """

    def still_finished(self, context: Context) -> bool:
        """Returns whether a training that this callback finished, before it was started again,
        is to be left so.
        """
        return True

    def arguments(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Returns, for one that joins from the environment, arguments that go before the
        trainer's `keywords`.
        """
        return {}

    def on_fit_plan(self, context: Context) -> None:
        """fit() was called."""

    def on_fit_start(self, context: Context) -> None:
        """The first step comes next; of a training that is resumed, `cursor` and `history` say
        where it is.
        """

    def on_epoch_start(self, context: Context) -> None:
        """An epoch begins, or what is left of it."""

    def on_step_end(self, context: Context) -> None:
        """An optimizer step was taken or skipped: `step`, `batch`, `loss`; `tally` counts it.

        Also outside of fit().
        """

    def on_server_update(self, context: Context) -> None:
        """Hears of an update of an asynchronous parameter server, on rank 0 alone (`loss`,
        `tally`).
        """

    def on_sync(self, context: Context) -> None:
        """Ranks have just talked to each other, as about ten times a second: a time for
        collective calls.
        """

    def on_checkpoint(self, context: Context) -> None:
        """A checkpoint of this moment is about to be made."""

    def on_validation_end(self, context: Context) -> None:
        """The validation set was evaluated: `record`."""

    def on_epoch_end(self, context: Context) -> None:
        """An epoch is done: `record`."""

    def on_exception(self, context: Context) -> None:
        """fit() ends with `error`."""

    def on_fit_end(self, context: Context) -> None:
        """fit() ends, finished or not."""


def check_events(callback: Callback) -> None:
    """Raises ConfigError where a method is called like an event and is none, or does not take a
    context alone.
    """
    events = [name for name in vars(Callback) if name.startswith("on_")]
    kind = type(callback).__name__
    for name in (
        name
        for name in dir(callback)
        if name.startswith("on_") and callable(getattr(callback, name))
    ):
        if name not in events:
            raise ConfigError(
                f"[train] {kind}.{name} is no event of a training; events are {', '.join(events)}"
            )
        try:
            inspect.signature(getattr(callback, name)).bind(None)
        except TypeError:
            raise ConfigError(
                f"[train] {kind}.{name} does not take the context alone, with which it is called: "
                f"def {name}(self, context); the trainer is context.trainer"
            ) from None


def joined(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates a trainer's __init__: sets `trainer.callbacks`, those that the environment asks
    for (at most one), whose arguments go before those that were given.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(trainer: Any, *args: Any, **kwargs: Any) -> None:
        names = [variable for variable in registry.provided("joining") if os.environ.get(variable)]
        trainer.callbacks = [registry.load("joining", name)() for name in names[:1]]
        for callback in trainer.callbacks:
            bound = signature.bind(trainer, *args, **kwargs)
            bound.arguments.update(callback.arguments(dict(bound.arguments)))
            args = bound.args[1:]
            kwargs = bound.kwargs
        init(trainer, *args, **kwargs)

    return wrapped
