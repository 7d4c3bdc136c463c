"""An error in one rank's part of a step: all ranks hear of it in the sums that they add up anyway.

The rank that failed completes its part of the exchange with a number of samples that is NaN, which
no step has. So all know, at the same place, and only then say in a collective call of its own what
it was. The ranks stay together: a program that catches the error may take its next step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from .. import errors
from ..comm import Communicator
from ..errors import CollectiveError, OdysseyError
from .reduction import Reduction

MAX_TEXT_BYTES = 1000  # bytes of what a rank says to the others


class StepOutcome:
    """The part of one rank in one step. error: what it failed with; None: it did not.

    samples_at: place of the number of samples in the floats of `reduction`, which adds up the
    step's statistics.
    """

    def __init__(self, reduction: Reduction, samples_at: int) -> None:
        self.reduction = reduction
        self.samples_at = samples_at
        self.error: Exception | None = None

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Keeps an error of the block for `end`.

        Not that of a collective call: nobody knows where the others are.
        """
        try:
            yield
        except CollectiveError:
            raise
        except Exception as error:
            self.error = error

    def tell(self) -> None:
        """Before the exchange: after an error, what this rank adds to the sums, if it has a
        shard, says so.
        """
        if self.error is not None:
            for _, b in self.reduction.plan.partial:
                self.reduction.buffers[b][:] = 0
                self.reduction.buffers[b][self.samples_at] = math.nan

    def end(self, samples: float) -> None:
        """After the exchange: raises what a rank failed with, on all ranks; a collective call if
        one did.

        samples: their sum over all ranks. Raises its own error on a rank that failed, on the others
        one of the same class if it is odyssey's, else CollectiveError, naming the rank.
        """
        if math.isnan(samples):
            raise_on_all_ranks(self.reduction.comm, self.error)
        if self.error is not None:  # of a rank without a shard, which has told nobody
            raise self.error


def raise_on_all_ranks(comm: Communicator, error: Exception | None) -> NoReturn:
    """Raises the error of a rank on all; a collective call of all ranks, of which at least one
    has an error.
    """
    message = ""
    if error is not None:
        kind = type(error).__name__
        message = f"{kind}\0{error if isinstance(error, OdysseyError) else f'{kind}: {error}'}"
    rows = comm.all_gather_each(np.frombuffer(message.encode()[:MAX_TEXT_BYTES], np.uint8))
    texts = [row.tobytes().decode(errors="ignore") for row in rows]
    first = next(p for p, text in enumerate(texts) if text)
    name, _, text = texts[first].partition("\0")
    kind = getattr(errors, name, None)
    is_odyssey_error = isinstance(kind, type) and issubclass(kind, OdysseyError)
    if error is None:
        error = (kind if is_odyssey_error else CollectiveError)(
            f"[train] rank {comm.ranks[first]} failed in its part: {text}"
        )
    if isinstance(error, OdysseyError) and is_odyssey_error:
        error.raised_on_all_ranks = True  # so rank 0 alone says it
    raise error
