"""What a step asks the driver for, counted on an emulated GPU, for test_gpu_training.py; prints
a JSON object.

    python tests/gpu/emulated.py python tests/gpu/counts.py [NAME ...]

Each case gives what the last steps of a short training took, one step like another: launches, CUDA
graphs, copies to the device and from it, waits of the host, allocations and frees. What it is not:
a measurement of time.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from emulated import counts
from trainings import loader, trainer

from odyssey.audit.step_recorder import Records
from odyssey.engine.gpu import group

CASES: dict[str, Callable[[], list[dict[str, int]]]] = {}
STEPS, LAST = 6, 3  # steps that are taken, of which the last so many are looked at


def case(f: Callable[[], list[dict[str, int]]]) -> Callable[[], list[dict[str, int]]]:
    CASES[f.__name__] = f
    return f


def between(marks: list[dict[str, int]]) -> list[dict[str, int]]:
    """What was asked for from each mark to the next, of the last ones."""
    steps = [{k: b[k] - a[k] for k in a} for a, b in zip(marks, marks[1:], strict=False)]
    return steps[-LAST:]


def fitted(
    batches: Any = None, after: Callable[..., None] = lambda *a: None, **settings: Any
) -> list[dict[str, int]]:
    """The steps of a fit(); what happens between two steps counts as well."""
    t, marks = trainer("mlp", **settings), []
    own = t.train_step

    def step(batch: Any) -> tuple[float, float]:
        marks.append(counts())
        result = own(batch)
        after(t, batch)
        return result

    t.train_step = step  # type: ignore[method-assign]
    t.fit(loader() if batches is None else batches, epochs=1, steps=STEPS)
    return between(marks)


def arrays() -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches of loader() as a list of arrays."""
    return [
        batch.dataset.gather(batch.indices)
        for _, batch in zip(range(STEPS), loader(), strict=False)
    ]


@case
def plain() -> list[dict[str, int]]:
    return fitted()


@case
def offloaded() -> list[dict[str, int]]:
    """The optimizer's state in host memory: no copies, its kernel reads it there."""
    return fitted(offload="cpu")


@case
def step_log() -> list[dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        records: list[Records] = []

        def logged(t: Any, batch: Any) -> None:
            if not records:
                records.append(Records(t, Path(folder) / "steps", 1))
            records[0].on_step_end(t.context)

        return fitted(after=logged)


@case
def fp16() -> list[dict[str, int]]:
    return fitted(precision="fp16", scaler_init_scale=256.0)


@case
def clipped() -> list[dict[str, int]]:
    return fitted(clip_norm=0.05)


@case
def fp16_clipped() -> list[dict[str, int]]:
    return fitted(precision="fp16", scaler_init_scale=256.0, clip_norm=0.05)


@case
def brought() -> list[dict[str, int]]:
    """A data set that does not fit."""
    share, group.DATA_SHARE = group.DATA_SHARE, 0.0
    try:
        return fitted()
    finally:
        group.DATA_SHARE = share


@case
def of_arrays() -> list[dict[str, int]]:
    return fitted(arrays())


@case
def evaluation() -> list[dict[str, int]]:
    """Of a data set that does not fit, in batches."""
    share, group.DATA_SHARE = group.DATA_SHARE, 0.0
    try:
        t, marks = trainer("mlp"), []
        own, there = t.stepper.evaluation_engine.run, []

        def run(batch: Any, step: int) -> Any:
            marks.append(counts())
            brought = t.stepper.evaluation_engine.team.workers[0].prefetched
            there.append(brought is not None and brought[1] is batch)
            return own(batch, step)

        t.stepper.evaluation_engine.run = run  # type: ignore[method-assign]
        t.evaluate([batch for _, batch in zip(range(STEPS), loader(), strict=False)])
        # brought while the batch before was computed
        assert there == [False, False, *[True] * (STEPS - 2)], there
        return between(marks)
    finally:
        group.DATA_SHARE = share


if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:] or CASES:
        gc.collect()  # what the case before holds is not freed in this one
        results[name] = CASES[name]()
    print(json.dumps(results))
