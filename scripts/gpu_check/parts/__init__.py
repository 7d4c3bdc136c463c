"""The parts of gpu-check, in order of value: a short visit gets furthest with the first ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..check import Check
from ..results import ROOT, hash_of
from . import (
    accuracy,
    benchmarks,
    bits,
    kernels,
    machine,
    peers,
    products,
    pytorch,
    ranks,
    sanitizer,
    times,
    trainings,
    transport,
)

ODYSSEY = ("python/odyssey",)
TORCH = ("python/odyssey/torch", "python/odyssey/horovod")  # other parts never import these


class Part(NamedTuple):
    """A part.

    Attributes:
        do: returns the facts of the part; an exception means that it failed, Skip that it can't be
            run here.
        seconds: the time that is reserved for it.
        reads: the files and folders that it runs, from the root of the repository. If one changes,
            it runs again.
        without: folders below these that it doesn't run.
        kernels: it uses the compiled kernels. If these change, it runs again.
    """

    name: str
    do: Callable[[Check], dict[str, Any]]
    seconds: float
    reads: tuple[str, ...] = ODYSSEY
    without: tuple[str, ...] = TORCH
    kernels: bool = True

    def sources(self) -> str:
        """The hash of all that the part runs, apart from kernels: its files and its own code."""
        program = inspect.getsourcefile(self.do)
        paths = [ROOT / name for name in self.reads]
        paths += [] if program is None else [Path(program)]
        return hash_of(paths, [ROOT / name for name in self.without])


def tested(*names: str) -> tuple[str, ...]:
    """The package and programs in tests/gpu."""
    return (*ODYSSEY, *(f"tests/gpu/{name}" for name in names))


PARTS = (
    Part("machine", machine.run, 30),
    Part("products", products.run, 40, (products.FOLDER,), kernels=False),
    Part("kernels", kernels.run, 60, tested("records.py")),
    Part("bits", bits.run, 45),
    Part("ranks", ranks.run, 20),
    Part("peers", peers.run, 25, tested("transports.py", "peer.py")),
    Part(
        "torch",
        pytorch.run,
        120,
        (*tested("torch_facts.py", "torch_models.py"), "tests/pytorch/pretend.py"),
        without=(),
    ),
    Part("times", times.run, 60, (*ODYSSEY, "benchmarks")),
    Part("trainings", trainings.run, 60, (*tested("trainings.py", "records.py"), "tests/layouts")),
    Part("benchmarks", benchmarks.run, 90, (*ODYSSEY, "benchmarks")),
    Part("accuracy", accuracy.run, 20),
    Part("transport", transport.run, 15, tested("nccl_alone.py", "transports.py")),
    Part("sanitizer", sanitizer.run, 25),
)
