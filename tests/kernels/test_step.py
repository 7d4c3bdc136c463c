"""A step through the C interface: what its programs' checks say is not lost.

And threads that are late.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.core import native
from odyssey.parallel import plan as planning


def test_a_record_that_fails_in_a_step_is_an_error():
    lib = native.library()
    program = np.zeros((2, lib.record), np.int64)
    program[:, 0] = lib.codes["copy"], len(lib.codes)  # of no numbers; and no op at all
    tables = np.array(planning.make(1, 0, 1, 1, 1).tables(), np.int64)
    buffer = native.aligned(lib.lanes)
    step = native.Step(
        program=program.ctypes.data, records=2, threads=1, tables=tables.ctypes.data,
        buffers=buffer.ctypes.data, buffer_floats=lib.lanes, shard_size=1, samples=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="record 1 of 2 of the program of a step failed"):
        lib.step(step)
    step.records = 1
    lib.step(step)


def test_shards_taken_by_more_threads_than_cores_give_one_sum():
    """Threads that lose their core in the middle of a shard, late helpers, few buffers: the bits
    stay.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((203, 1, 28, 28)).astype(np.float32)
    batch = data.Batch(data.arrays(x, rng.integers(0, 10, 203)), np.arange(203), 0, 0)
    hashes = set()
    for threads in (1, 2, 3, 8, 30):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.models.MLP(), optim.SGD(lr=0.01), backend="local", threads=threads, shard_size=8
        )
        for _ in range(40):
            trainer.train_step(batch)
        hashes.add(trainer.weights_sha256())
    assert len(hashes) == 1


def test_a_stopped_process_goes_on_with_the_same_bits():
    """Where no CPU quota can be set, the process is stopped and continued instead, as a quota
    would do.
    """
    program = (
        "from odyssey import DistributedTrainer, data, nn, optim\n"
        "nn.manual_seed(0)\n"
        "t = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.01), backend='local', threads=4)\n"
        "loader = data.DataLoader(data.load('mnist', train=True).take(6400), batch_size=128, "
        "shuffle=True)\n"
        "t.train_step(next(iter(loader)))\n"
        "print('begun', flush=True)\n"
        "t.fit(loader, epochs=4)\n"
        "print(t.weights_sha256())\n"
    )
    found = []
    for throttled in (True, False):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "begun\n"
        for _ in range(15 if throttled else 0):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.004)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.011)
        found.append(process.communicate()[0])
        assert process.returncode == 0
    assert found[0] == found[1] and len(found[0]) == 65


def test_a_forked_child_starts_threads_of_its_own():
    """Helpers are not there after a fork: the child must not wait for them."""
    program = (
        "import os\n"
        "from odyssey import DistributedTrainer, data, nn, optim\n"
        "nn.manual_seed(0)\n"
        "t = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.01), backend='local', threads=3)\n"
        "batch = next(iter(data.DataLoader(data.load('mnist', train=True), batch_size=256)))\n"
        "t.train_step(batch)\n"
        "child = os.fork()\n"
        "for _ in range(50):\n"
        "    t.train_step(batch)\n"
        # One write per process: print() may write the parts of a line one by one.
        "line = f\"{t.weights_sha256()} {len(os.listdir('/proc/self/task')) >= 3}\\n\"\n"
        "os.write(1, line.encode())\n"
        "os._exit(0) if child == 0 else os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 2 and lines[0] == lines[1] and lines[0].endswith("True")
