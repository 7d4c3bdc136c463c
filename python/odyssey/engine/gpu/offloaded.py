"""An optimizer's state that stays in host memory while GPUs train: kernels read and write it there.

Pinned memory has one address for the host and all devices (CUDA's unified addressing), so an update
takes it as it takes device memory: its bytes cross the bus once each way, in order, at about the
speed of copies (Min et al. 2020, "EMOGI"). State in files passes through a window of pinned memory,
piece by piece. As in ZeRO's first stage (Rajbhandari et al. 2020) a worker updates a part of the
parameters, which the others of its process take from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import DeviceError
from ...optim import Optimizer, Update, run
from ...parallel import plan as planning

if TYPE_CHECKING:
    from .group import Worker


class Offloaded:
    """The state of an optimizer whose parameters these workers train.

    window: floats of each state array that are on their way at a time, of state in files; None: it
    is all pinned.

    Raises DeviceError: the host has not enough memory that can be pinned.
    """

    def __init__(
        self, workers: Sequence[Worker], optimizer: Optimizer, size: int, window: int | None
    ) -> None:
        self._workers = workers
        self._optimizer = optimizer
        self._window = window
        self.ranges = planning.ranges(size, len(workers))
        self._pinned_state: dict[str, np.ndarray] = {}
        for name in optimizer.states if window is None else ():
            try:
                self._pinned_state[name] = workers[0].gpu.pinned(4 * size).view(np.float32)
            except DeviceError as problem:
                mib = 4 * size * len(optimizer.states) >> 20
                raise DeviceError(
                    f"[offload] the optimizer's state wants {mib} MiB of pinned host memory, "
                    "which is not there "
                    f"({problem}); use fewer ranks on a machine, or --offload with a folder"
                ) from None

    def take_back(self) -> None:
        """Before a step: what others, such as another trainer or a checkpoint, have made of the
        state.
        """
        state = self._optimizer.state
        self._optimizer.mirror = None  # no device has a copy
        if any(state[name] is not pinned for name, pinned in self._pinned_state.items()):
            for name, pinned in self._pinned_state.items():
                pinned[:] = state[name]
            self._optimizer.keep(dict(self._pinned_state))

    def update(self, w: int, update: Update, enqueue: Callable[[Update], None]) -> None:
        """Updates worker w's part of the parameters: `enqueue` puts the update of a run into its
        queue.
        """
        lo, hi = self.ranges[w]
        if self._window is None:
            if lo < hi:
                enqueue(run(update, lo, hi))  # the state's addresses are the optimizer's own
            return
        worker = self._workers[w]
        arrays = list(self._optimizer.arrays.values())
        window = (
            worker.pinned("state", 4 * self._window * len(arrays))
            .view(np.float32)
            .reshape(len(arrays), -1)
        )
        for start in range(lo, hi, self._window):
            n = min(self._window, hi - start)
            for array, staged in zip(arrays, window, strict=True):
                staged[:n] = array[start : start + n]
            enqueue(
                run(update, start, start + n)._replace(
                    state=0, arrays=tuple(row.ctypes.data for row in window)
                )
            )
            worker.gpu.synchronize()
            for array, staged in zip(arrays, window, strict=True):
                array[start : start + n] = staged[:n]

    def exchange(self, addresses: Sequence[Sequence[int]]) -> None:
        """Every worker takes from the others what they updated. addresses: of the parameters, by
        worker.
        """
        for q, worker in enumerate(self._workers):
            for p, (lo, hi) in enumerate(self.ranges):
                if p != q and lo < hi:
                    worker.copy(
                        self._workers[p],
                        addresses[q][0] + 4 * lo,
                        addresses[p][0] + 4 * lo,
                        4 * (hi - lo),
                    )
