"""Arrays in files without a name: what a training keeps and need not fit into memory, `offload`.

The system brings a page of such a file when it is touched, and writes it back and takes it away
when memory is short; the engine touches one layer after the other (engine/bucketed.py). The idea is
that of ZeRO-Infinity (Rajbhandari et al. 2021), with the system's page cache in the place of an
exchange of its own. Bytes are bytes: no bit changes.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..base.paths import expand_path
from ..errors import OutputError
from . import native

SMALL = 1 << 16  # bytes; below it an array is in memory


class Files:
    """Makes arrays as native.aligned does, each in a file of a folder that is gone when the
    array is.

    Room for all of it is taken at once, so that a full disk is an error here and no signal in the
    middle of a step. Raises OutputError: the folder cannot be used, or has no room.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, shape: int | tuple[int, ...], dtype: Any = np.float32, *, zero: bool = True
    ) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if count < SMALL:
            return native.aligned(shape, dtype, zero=zero)
        import tempfile

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=".odyssey-offload-", dir=self.folder)
            try:
                os.unlink(path)
                os.posix_fallocate(descriptor, 0, count)
                mapping = mmap.mmap(descriptor, count)
            finally:
                os.close(descriptor)
        except OSError as problem:
            full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            reason = f"has no room for {count / 2**20:,.0f} MiB more" if full else "cannot be used"
            raise OutputError(
                f"[offload] {self.folder} {reason} ({problem.strerror}); name another folder, on a "
                "disk with room for parameters, gradients and the optimizer's state"
            ) from None
        return np.frombuffer(mapping, np.uint8).view(dtype).reshape(shape)


_thread_state = threading.local()


def maker(usual: Any = native.aligned) -> Any:
    """Returns what makes arrays on this thread: `usual`, or Files within `offload`."""
    return getattr(_thread_state, "maker", None) or usual


@contextmanager
def offload(folder: str | Path | None) -> Iterator[None]:
    """Models and optimizers that are made within it have their parameters and state in files of
    a folder.

    For a model that does not fit into memory before a trainer has it; give the trainer the same
    `offload`. None, and "cpu", which is no folder: nothing is changed.
    """
    previous_maker = maker(None)
    _thread_state.maker = previous_maker if folder in (None, "cpu") else Files(expand_path(folder))
    try:
        yield
    finally:
        _thread_state.maker = previous_maker
