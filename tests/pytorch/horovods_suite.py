"""Horovod's own tests of its PyTorch interface (tests/third_party/horovod), over odyssey's, on
two processes.

    horovods_suite.py [NAME ...]        prints NAME OUTCOME, and behind it why

Horovod runs them one after the other in the processes of one job, where a test that fails on one
rank alone spoils those behind it. Here each gets two processes of its own, forked from one that has
imported everything. Outcomes are passed, skipped and failed; on both ranks, or it has failed.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
import types
import unittest
import warnings
from pathlib import Path

import torch

import odyssey.torch.gloo  # noqa: F401, before processes are forked
import odyssey.torch.horovod as hvd

FILE = Path(__file__).parent.parent / "third_party" / "horovod" / "test_torch.py.gz"
RANKS, SECONDS = 2, 300


@contextlib.contextmanager
def temppath():
    """As in Horovod's test/utils/common.py, of which the tests take three functions."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/file"


def skip_or_fail_gpu_test(test: unittest.TestCase, message: str) -> None:
    test.skipTest(message)


common = types.ModuleType("common")
common.__dict__.update(temppath=temppath, skip_or_fail_gpu_test=skip_or_fail_gpu_test)
common.mpi_env_rank_and_size = lambda: (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
sys.modules |= {"common": common, "horovod": types.ModuleType("horovod"), "horovod.torch": hvd}
sys.modules["horovod"].torch = hvd


def suite() -> type[unittest.TestCase]:
    path = Path(tempfile.mkdtemp()) / "test_torch.py"
    path.write_bytes(gzip.decompress(FILE.read_bytes()))
    spec = importlib.util.spec_from_file_location("test_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TorchTests


class Outcome(unittest.TestResult):
    """Of one test, in a line."""

    line = "passed"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.line = f"skipped {reason}"

    def addFailure(self, test: unittest.TestCase, error: tuple) -> None:
        if not self.line.startswith("failed"):
            lines = [
                f.lineno
                for f in traceback.extract_tb(error[2])
                if f.filename.endswith("test_torch.py")
            ]
            text = " ".join(str(error[1]).split())[:400]
            self.line = f"failed {error[0].__name__} at line {lines[-1] if lines else 0}: {text}"

    addError = addFailure


def rank(test: unittest.TestCase, number: int, port: int, out: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the ranks' watch says that they are killed
    outcome = Outcome()
    test.run(outcome)
    os.write(out, outcome.line.encode())
    while True:  # a rank that ends without a word ends the other
        signal.pause()


def outcome(test: unittest.TestCase) -> str:
    for mark in getattr(getattr(test, test._testMethodName), "pytestmark", ()):
        if mark.name == "skip":
            return f"skipped {mark.kwargs['reason']}"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = []
    for number in range(RANKS):
        mine, theirs = os.pipe()
        child = os.fork()
        if not child:
            rank(test, number, port, theirs)
        os.close(theirs)
        ranks.append((child, mine))
    lines = []
    for _, pipe in ranks:
        came = select.select([pipe], [], [], SECONDS)[0]
        said = os.read(pipe, 10000).decode() if came else f"failed: no end in {SECONDS} s"
        lines.append(said or "failed: its process died")
    for child, pipe in ranks:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(pipe)
    failed = [line for line in lines if line.startswith("failed")]
    return failed[0] if failed else lines[0]


# Three tests try all optimizers of torch.optim, but those that do not take their model's vectors,
# by name: Muon, which is newer than they are, is one of these.
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "torch"

torch.set_num_threads(1)
warnings.simplefilter("ignore")
TorchTests = suite()
names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(TorchTests)
for name in names:
    print(name, outcome(TorchTests(name)), flush=True)
