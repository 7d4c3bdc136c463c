"""Loads pickles for test_copies.py in a process that has nothing else: python copied.py PICKLE
OUTPUT.

A pickle holds a list of (module, input); OUTPUT gets what each module computes, as a .npz file.
"""

from __future__ import annotations

import gc
import pickle
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "layouts")]

from odyssey import Tensor  # noqa: E402
from odyssey import functional as F  # noqa: E402


def output(module, inputs):
    """What a module computes, as arrays; of arrays of integers (labels, token ids) as they are."""
    given = [x if x.dtype.kind == "i" else Tensor(x) for x in inputs]
    return np.array(module(*given).numpy())


def relu_twice(x):
    """A function that a model has as a layer."""
    return F.relu(F.relu(x))


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        loaded = pickle.load(file)
    gc.collect()
    results = [output(module, inputs) for module, inputs in loaded]
    np.savez(sys.argv[2], *results)
