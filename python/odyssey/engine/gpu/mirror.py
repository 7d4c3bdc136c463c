"""Arrays that are on the host and on GPUs at once: which copy is the newer one, and when it has
to move.

The GPUs train; the host reads the numbers for checkpoints and messages. Whoever touches a host
array first asks for it (`read`), so that it holds what the GPUs hold. As it may have been written
to from then on, the GPUs take it back before they go on (`write`). Nothing moves while nobody
looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...core.gpu_native import Gpu


class Mirror:
    """Host arrays and a copy of each on every one of some GPUs.

    Args:
        gpus: of the workers; a device may come several times.
        arrays: gives the host arrays, C-contiguous; asked each time, as they may be replaced by
            others of their size.
    """

    def __init__(self, gpus: Sequence[Gpu], arrays: Callable[[], Sequence[np.ndarray]]) -> None:
        self._gpus = gpus
        self._arrays = arrays
        self.sizes = [a.nbytes for a in arrays()]  # bytes
        # by worker, then array
        self.addresses = [[gpu.allocate(n) for n in self.sizes] for gpu in gpus]
        self._host_newer = True
        self._gpus_newer = False

    def write(self) -> None:
        """Before GPUs compute: brings them what the host may have changed."""
        if not self._host_newer:
            return
        for gpu, addresses in zip(self._gpus, self.addresses, strict=True):
            for address, array in zip(addresses, self._arrays(), strict=True):
                gpu.upload(address, array)
        for gpu in self._gpus:
            gpu.synchronize()
        self._host_newer = False

    def outdated(self) -> None:
        """The host has other numbers than the GPUs."""
        self._host_newer = True
        self._gpus_newer = False

    def changed(self) -> None:
        """The GPUs change their copies, all alike, in what was just enqueued; follows a `write`."""
        self._gpus_newer = True
        self._host_newer = False

    def read(self) -> None:
        """Before the host reads or writes its arrays: brings it what the GPUs have."""
        if self._gpus_newer:
            self._gpus_newer = False
            gpu = self._gpus[0]
            for address, array in zip(self.addresses[0], self._arrays(), strict=True):
                gpu.download(array, address)
            gpu.synchronize()
        self._host_newer = True
