"""Run under mpirun by test_shared_sums.py: sums in shared memory against those that are sent,
over many plans.
"""

from __future__ import annotations

import numpy as np

from odyssey import comm
from odyssey.parallel import plan, reduction, shared_memory_tree, strategy

world = comm.world()
assert world.name == "shm"
compared = 0
for shards in (1, 2, 3, 5, 8, 13):
    for workers, threads in ((1, 1), (2, 2)):
        for floats, scatter in ((5, False), (16, True), (9_000, False), (40_000, True)):
            made = plan.make(shards, world.rank, world.size, workers, threads)
            near = strategy.make(
                strategy.Strategy("tree"), world, made, floats, workers, scatter=scatter
            )
            sent = reduction.TreeReduction(world, made, floats, workers, scatter=scatter)
            assert isinstance(near, shared_memory_tree.SharedReduction)
            for step in range(3):
                for kind in (near, sent):
                    kind.buffers[:] = np.nan  # what is no partial sum must not matter
                    for (first, n), buffer in made.partial:
                        kind.buffers[buffer] = np.random.default_rng(
                            [step, first, n]
                        ).standard_normal(floats)
                near.start()
                while step == 1 and not near.poll():
                    pass
                result = near.finish()
                sent.start()
                wanted = sent.finish()
                lo, hi = near.own
                assert near.own == sent.own and near.bytes_sent == sent.bytes_sent
                assert result is near.result and result.shape == (floats,)
                assert result[lo:hi].tobytes() == wanted[lo:hi].tobytes(), (
                    shards,
                    workers,
                    floats,
                    scatter,
                )
                assert np.isfinite(result[lo:hi]).all()
                compared += 1
print(f"rank {world.rank}: {compared} sums as sent", flush=True)
