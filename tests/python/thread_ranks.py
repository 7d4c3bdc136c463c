"""What the tests of distributed/ and ddp.py share: ranks that are threads, samples, one backward
pass.
"""

from __future__ import annotations

import numpy as np

from odyssey import Tensor
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.comm import mock

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 1, 28, 28)).astype(np.float32)
Y = RNG.integers(0, 10, 96)


def on(ranks, function, *arguments):
    """Results of function(*arguments) on ranks that have initialized the world."""

    def work(_):
        dist.init_process_group()
        try:
            return function(*arguments)
        finally:
            dist.destroy_process_group()

    return mock.run(ranks, work)


def one_pass(net, r=0):
    loss = F.cross_entropy(net(Tensor(X[8 * r : 8 * r + 8])), Y[8 * r : 8 * r + 8])
    loss.backward()
