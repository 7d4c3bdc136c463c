"""Lines to the user while a training runs."""

from __future__ import annotations

from typing import Any

from ..comm import Communicator
from .progress import tell


class Reporter:
    """Tells the user lines, from rank 0, without tearing a progress bar.

    Attributes:
        progress: the progress object that the trainer was given, on rank 0; else None.
        fit_progress: the one that fit() shows, while it runs.
        silent: True while nothing is told.
    """

    def __init__(self, comm: Communicator, progress: Any) -> None:
        self.comm = comm
        self.progress = progress if comm.rank == 0 else None
        self.fit_progress: Any = None
        self.silent = False

    def say(self, line: str) -> None:
        """Tells a line: to the progress object, to Python's logger "odyssey" where the program
        has made use of that (progress.find_logger), or prints it.
        """
        if self.comm.rank == 0 and not self.silent:
            tell(getattr(self.fit_progress or self.progress, "say", None), line)
