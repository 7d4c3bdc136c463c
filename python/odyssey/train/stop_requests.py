"""Requests to a running training: to stop after a step that all ranks agree on, by a signal, by
the run's directory, or by a callback, which may finish it as well.

A rank alone must not stop: the others would wait for it. So every rank notes what it is asked for,
and now and then, about ten times a second, all tell each other (`Requests.agreed`): what one wants,
all do at the same step. How many steps lie in between is agreed as well, so nothing is sent in the
others. Callbacks whose wishes are `exact` have all tell each other after every step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np

from ..base.files import read_json
from ..base.runs import Run
from ..callbacks import Callback, Context
from ..comm import Communicator
from ..errors import DataError

AGREEMENT_PERIOD_S = 0.1  # seconds between two agreements
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CONTROL = 1000  # the request came by control.json
# it came from the callback of this place, counted from 1; 0: another
STOP = 2000
FINISH = 4000
# seconds after a signal from which on a SIGINT is another request, and not the same by another way
NEW_REQUEST_AFTER_S = 2.0


class Requests(Callback):
    """Requests to this training.

    It hears of each event last. comm: the world of the training. run: the run that it belongs to,
    whose control.json rank 0 reads. asking: callbacks that may ask, in the same order on all ranks.
    signals: whether signals are requests.
    """

    def __init__(
        self, comm: Communicator, run: Run | None, asking: Sequence[Callback], signals: bool
    ) -> None:
        self._comm = comm
        self._run = run
        self._asking = asking
        self._signals = SIGNALS if signals else ()
        steps = (
            c
            for c in asking
            if getattr(c.on_step_end, "__func__", None) is not Callback.on_step_end
        )
        self._exact = any(c.exact for c in steps)
        self._request = 0  # number of a signal, or CONTROL
        # of a callback
        self._wish = 0
        self._reason = ""
        self._requested_at = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._raised: BaseException | None = None  # by a handler of the program
        self._steps_left = self._every = 1
        self._since = time.monotonic()
        self.synced = False  # whether ranks talked after the last step

    def on_fit_start(self, context: Context) -> None:
        """Takes signals as requests from now on.

        A SIGINT later than NEW_REQUEST_AFTER_S has the effect that it had before; any number of
        others shortens nothing: service managers and schedulers send several, and SLURM sends one
        to all processes of a step, of which srun and what is around a rank hand theirs on.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread only; control.json works
        for number in self._signals:
            # None: C's, in a Mojo program
            self._previous_handlers[number] = (
                signal.signal(number, self._take_signal) or signal.SIG_DFL
            )

    def on_fit_end(self, context: Context) -> None:
        """Puts the program's handlers back, and raises what one of them has raised."""
        for number in list(self._previous_handlers):
            signal.signal(number, self._previous_handlers.pop(number))
        error = self._raised
        self._raised = None
        if error is not None:
            raise error

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal as a request, and calls the program's own handler of it.

        A later SIGINT is sent again with its former effect. What a handler raises, such as the
        SystemExit of `sys.exit`, is raised when the last checkpoint is written: other ranks wait
        for this one until then.
        """
        late = self._request and time.monotonic() - self._requested_at > NEW_REQUEST_AFTER_S
        if number == signal.SIGINT and late:
            signal.signal(number, self._previous_handlers.pop(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        if not self._request:
            self._request = number
            self._requested_at = time.monotonic()
        handler = self._previous_handlers.get(number)
        if callable(handler) and handler is not signal.default_int_handler:
            try:
                handler(number, frame)
            except BaseException as error:
                self._raised = error

    def on_step_end(self, context: Context) -> None:
        self._collect_wishes(context)
        # else each rank has weights of its own: no step to stop at
        if context.trainer.mode.settled:
            self._apply_request(context, self.agreed(self._exact))
            if self.synced:
                context.emit("on_sync")

    def on_epoch_end(self, context: Context) -> None:
        self._collect_wishes(context)
        self.synced = True
        self._apply_request(context, self._exchange_requests())

    def _collect_wishes(self, context: Context) -> None:
        """Notes the wishes of this rank's callbacks, until all ranks agree on them."""
        for base, reason in ((STOP, context.stop), (FINISH, context.finished)):
            if reason is not None:
                asking = context.finisher if base == FINISH else None
                place = next((i for i, c in enumerate(self._asking, 1) if c is asking), 0)
                self._wish = max(self._wish, base + place)
                self._reason = reason
        context.stop = context.finished = None

    def _apply_request(self, context: Context, request: int) -> None:
        """Stops or finishes the training run, as all ranks have agreed; 0 does nothing.

        request: a signal, CONTROL, or STOP or FINISH plus the place of a callback.
        """
        if not request:
            return
        if request < STOP:
            context.stop = "a request" if request == CONTROL else signal.Signals(request).name
            return
        reason = self._reason if request == self._wish else "another rank's callback"
        if request < FINISH:
            context.stop = reason
            return
        context.finisher = self._asking[request - FINISH - 1] if request > FINISH else None
        name = "a callback" if context.finisher is None else type(context.finisher).__name__
        context.finished = f"{name} ({reason})"

    @property
    def _local_request(self) -> int:
        return max(self._request, self._wish)

    def agreed(self, exact: bool = False) -> int:
        """Returns the request of any rank, if ranks exchange requests after this step, else 0.

        All ranks call it after each step. exact: True exchanges them after every step; it must be
        equal on all ranks.
        """
        self._steps_left -= 1
        self.synced = self._steps_left <= 0
        if self.synced:
            return self._exchange_requests()
        return (
            int(self._comm.all_reduce(np.array([self._local_request], np.int64), "max")[0])
            if exact
            else 0
        )

    def _exchange_requests(self) -> int:
        """Exchanges the requests of all ranks, and agrees on the steps until the next exchange.

        Returns the request, 0 if there is none. A collective call.
        """
        seconds = (time.monotonic() - self._since) / max(self._every - self._steps_left, 1)
        wish = max(1, min(1000, int(AGREEMENT_PERIOD_S / max(seconds, 1e-6))))
        if self._comm.rank == 0 and not self._request:
            self._request = self._read_control()
        # the largest request, and the smallest number of steps
        request, negative_steps = self._comm.all_reduce(
            np.array([self._local_request, -wish], np.int64), "max"
        ).tolist()
        self._steps_left = self._every = -negative_steps
        self._since = time.monotonic()
        return request

    def _read_control(self) -> int:
        """Returns the request to this attempt in control.json: a signal, CONTROL, or 0 for none."""
        if self._run is None or not os.path.exists(self._run.control):
            return 0
        try:
            control = read_json(self._run.control)
        except DataError:
            return 0  # it is being replaced, or is not ours
        if (
            not isinstance(control, dict)
            or not control.get("stop")
            or control.get("attempt") != self._run.attempt
        ):
            return 0
        return next(
            (int(number) for number in signal.Signals if number.name == control["stop"]), CONTROL
        )
