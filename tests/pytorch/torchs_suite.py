"""PyTorch's own tests of its collectives and of DDP, as its wheel brings them, over backend
"odyssey" on two processes.

    torchs_suite.py odyssey|gloo|alias [NAME ...]      prints NAME OUTCOME, and behind it why

odyssey: the tests as they are, with the backend's name among those that have DDP and subgroups.
alias: those that ask for Gloo by name get a group of odyssey for it. gloo: Gloo's own. Outcomes are
passed, skipped and failed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
import unittest

HOW, NAMES = sys.argv[1], sys.argv[2:]
os.environ |= {"BACKEND": "odyssey" if HOW == "odyssey" else "gloo", "WORLD_SIZE": "2"}
os.environ |= {"TEMP_DIR": tempfile.mkdtemp(), "MASTER_ADDR": "localhost"}

# Of this package torch's tests take the base class alone, and it is installed with nothing else.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).__dict__.setdefault(
    "TestCase", unittest.TestCase
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

import odyssey.torch  # noqa: E402, F401

for feature in ("ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[feature].add("odyssey")

if HOW == "alias":
    helper = dist.distributed_c10d._new_process_group_helper

    def as_odyssey(size, rank, ranks, backend, *rest, **named):
        return helper(size, rank, ranks, dist.Backend("odyssey"), *rest, **named)

    dist.distributed_c10d._new_process_group_helper = as_odyssey

from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Lines(unittest.TestResult):
    """A line for each test, at its end."""

    def say(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        line = " ".join(why.split())[-600:]
        print(f"{test._testMethodName} {outcome} {line}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: tuple) -> None:
        self.say(test, "failed", str(error[1]))

    addError = addFailure


torch.set_num_threads(1)
names = NAMES or unittest.TestLoader().getTestCaseNames(Suite)
unittest.TestSuite(Suite(name) for name in names).run(Lines())
