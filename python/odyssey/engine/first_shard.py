"""The first shard of a batch, which every rank computes before the first update of a fit().

Ranks compare the fingerprint of its gradients, so kernels that differ are found by the model's own
operations. The shard is computed op by op, which has the bits of a recorded step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..base.quiet import without_prints
from ..core import fingerprint, native
from ..core.program import ShardEager
from ..data import Batch
from ..nn import forward_hooks
from .runner import set_arrays

if TYPE_CHECKING:
    from .engine import Engine


def has_whole_model(engine: Engine) -> bool:
    """Returns whether each rank has all parameters in its memory, so it can compute any shard."""
    layout = engine.layout
    return engine.team is None and not (layout.split or layout.zero == 3 or layout.offload)


def print_first_shard(engine: Engine, batch: Batch, step: int) -> int:
    """Returns the fingerprint of the gradients of a batch's first shard, and of its statistics.

    Args:
        engine: computes training steps, and has the whole model.
        batch: the global batch.
        step: the number of the step.
    """
    samples = engine.shard_size_of(len(batch.indices))
    batch = batch.covering(0, samples)
    data = batch.dataset
    context = native.Context(seed=engine.seed)
    arrays = set_arrays(context, data)
    context.rows = batch.indices.ctypes.data
    context.step = step
    context.loss_scale = engine.loss_scale
    context.first = 0
    context.valid = samples
    floats = engine.arena.size
    gradients = native.aligned(floats + native.library().stats)

    def compute() -> None:
        gradients[:] = 0
        executor = ShardEager(
            context,
            grads_address=gradients.ctypes.data,
            stats_offset=4 * floats,
            samples=samples,
            precision=engine.precision,
        )
        engine.programs.traced(executor, samples, data.form)

    with without_prints(lambda error: False):
        forward_hooks.run_check(engine.model, compute)
    del arrays  # native code has used its address until here
    return fingerprint.of(np.ascontiguousarray(gradients))
