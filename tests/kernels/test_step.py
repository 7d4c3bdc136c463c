"""A step through the C interface: what its programs' checks say is not lost. Threads and plans are tests/mojo's."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import native


def test_a_record_that_fails_in_a_step_is_an_error():
    lib = native.library()
    program = np.zeros((2, lib.record), np.int64)
    program[:, 0] = lib.codes["copy"], len(lib.codes)  # of no numbers; and no op at all
    actions, counts = np.zeros((1, 3), np.int64), np.array([1, 0])  # compute shard 0 into buffer 0; nothing at the end
    starts = np.array([actions.ctypes.data, actions.ctypes.data])
    buffer = native.aligned(lib.lanes)
    step = native.Step(
        program=program.ctypes.data, records=2, threads=1, actions=starts.ctypes.data, counts=counts.ctypes.data,
        buffers=buffer.ctypes.data, buffer_floats=lib.lanes, shard_size=1, samples=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="record 1 of 2 of the program of a step failed"):
        lib.step(step)
    step.records = 1
    lib.step(step)
