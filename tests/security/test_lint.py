"""No file of the repository runs code that it reads (S1): no pickle, eval or shell; and the lint
would see them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lint import findings  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "tests/packaging/test_pixi.py": "shell of subprocess.run",  # tasks of pixi are lines of a shell
    "tests/packaging/pages.py": "call of exec",  # programs in our own pages
    "tests/python/test_precision.py": "call of exec",
    # code blocks of the seeds, which are copies in tests/third_party
    "tests/python/test_averages.py": "call of exec",  # a program of docs/callbacks.md
    "tests/pytorch/own_loop_cases.py": "call of torch.load",  # of what it has saved itself
    "tests/pytorch/test_own_loop_resume.py": "call of torch.load",  # likewise
    "tests/seeds/run.py": "call of exec",
    "tests/data/test_loader.py": "call of exec",  # a program of docs/determinism.md
    "tests/cli/conftest.py": "call of __import__",
    # what odyssey is compared with; reads its own files
    "benchmarks/faults/anchors/savers.py": "call of torch.load",
    "benchmarks/faults/anchors/train_ddp.py": "call of torch.load",
    "tests/e2e/test_trained_models.py": "call of torch.load",  # weights_only=True
    "python/odyssey/torch/objects.py": "pickle",  # where the caller wrote allow_pickle=True
    "python/odyssey/torch/horovod.py": "allow_pickle of",  # hands it on
    "tests/pytorch/hvd_names.py": "allow_pickle of",
    "tests/python/test_copies.py": "pickle",  # of what it has made itself
    "tests/python/copied.py": "pickle",  # of what test_copies.py has made
    "tests/pytorch/run_example.py": "call of runpy",  # a copy of Horovod's own example
    "tests/pytorch/run_in_turn.py": "call of runpy",  # copies of the examples of frameworks
}
COMMUNICATORS = {"python/odyssey/comm/mpi.py": ("_data", "_head", "_alarm")}


def python_files():
    for folder in ("python", "scripts", "benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py":
                yield path
            elif (
                path.is_file()
                and not path.suffix
                and path.read_bytes().startswith(b"#!/usr/bin/env python")
            ):
                yield path


def test_nothing_here_runs_what_it_reads():
    wrong, seen = [], 0
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        seen += 1
        for found in findings(path.read_text(), communicators=COMMUNICATORS.get(name, ())):
            if ALLOWED.get(name, "-") not in found:
                wrong.append(f"{name}, {found}")
    assert wrong == []
    assert seen > 150


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import marshal as m",
        "from pickle import loads",
        "from dill.source import getsource",
        "import importlib\nimportlib.import_module('shelve')",
        "eval('1')",
        "exec(open('x').read())",
        "import builtins\nbuiltins.eval('1')",
        "__import__('os')",
        "import os\nos.system('ls')",
        "from os import system as run\nrun('ls')",
        "import os\nos.popen('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess as s\ns.Popen(['ls'], shell=flag)",
        "run('ls', shell=1)",
        "import subprocess\nsubprocess.getoutput('ls')",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from numpy import load\nload('x')",
        "import torch\ntorch.load('x', weights_only=True)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import tempfile\ntempfile.mktemp()",
        "from mpi4py import MPI\nMPI.COMM_WORLD.bcast({})",
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\ncomm.send(1, 0)",
        "from mpi4py import MPI\nclass A:\n def f(self):\n  self._c = MPI.COMM_WORLD.Dup()\n  "
        "self._c.allreduce(1)",
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD.Split(0)\nreceive = comm.recv",
    ],
)
def test_each_kind_is_found(text):
    assert len(findings(text)) >= 1


def test_names_that_hold_a_communicator_can_be_told():
    text = "class A:\n def f(self):\n  return self._data.bcast(1)"
    assert findings(text) == [] and findings(text, ["_data"]) == [
        "line 3: _data.bcast pickles; use Bcast"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "Net().eval()",
        "import re\nre.compile('x')",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "'import pickle'  # pickle",
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\ncomm.Send(x, 0)\nqueue.send(1)",
        "world = comm.world()\nworld.all_reduce(x)\nworld.send(x, 1)",
    ],
)
def test_what_is_harmless_passes(text):
    assert findings(text) == []
