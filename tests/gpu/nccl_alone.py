"""What can be checked of NCCL with one GPU: a group of one calls what odyssey uses; prints a
JSON object.

    python tests/gpu/nccl_alone.py

For test_gpu_transport.py over the emulated NCCL and, on a machine with a GPU and NCCL, over the
real ones: that the library is found, that arguments arrive as they are meant, that queues and
events order what it does.
"""

from __future__ import annotations

import json
import time

import numpy as np

from odyssey.comm import Communicator, nccl
from odyssey.core.gpu_native import Gpu


def wait(done) -> None:
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until, "it does not end"


def messages(gpu: Gpu, n: int = 1 << 20) -> None:
    """From the GPU to itself in its COMPUTE queue, between two things that others put there."""
    link = nccl.NcclTransport(Communicator(), gpu)
    a, b = gpu.allocate(n), gpu.allocate(n)
    sent, came = np.random.default_rng(1).integers(0, 256, n, np.uint8), np.zeros(n, np.uint8)
    for _ in range(3):
        gpu.clear(a, n)
        gpu.clear(b, n)
        gpu.upload(a, sent)
        link.exchange(
            [(0, a, n // 2), (0, a + n // 2, n // 2)], [(0, b + n // 2, n // 2), (0, b, n // 2)]
        )
        gpu.clear(a, n)
        gpu.download(came, b)
        link.mark()
        wait(link.is_complete)
        gpu.synchronize()
        assert np.array_equal(came, np.roll(sent, n // 2))
    link.abort()


def main() -> None:
    messages(Gpu(0))
    print(json.dumps({"version": nccl.spelled(nccl.library().version)}))


if __name__ == "__main__":
    main()
