"""Runs programs one after the other in one process, because frameworks take longer to import than
small programs to run: run_in_turn.py '[["PROGRAM", "ARGUMENT", ...], ...]'.

Each prints a hash of the weights that a Trainer of Lightning, or a prepared model of Accelerate,
has at its end, on each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys

import vision  # noqa: F401 (Lightning's metrics import torchvision)

import odyssey.torch  # noqa: F401 (its backend)


def print_weights(program: str, module) -> None:
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    # in one piece, or those of several ranks mix
    sys.stdout.write(f"\nweights {program} {hashlib.sha256(weights).hexdigest()[:16]}\n")


def watch_lightning() -> None:
    from lightning.pytorch import Trainer

    fit = Trainer.fit

    def fit_and_print(trainer, model, *arguments, **keywords):
        fit(trainer, model, *arguments, **keywords)
        print_weights(sys.argv[0], model)

    Trainer.fit = fit_and_print


def watch_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    end_training = Accelerator.end_training

    def print_and_end(accelerator):
        print_weights(sys.argv[0], accelerator._models[0])
        end_training(accelerator)
        AcceleratorState._reset_state(reset_partial_state=True)

    Accelerator.end_training = print_and_end


if __name__ == "__main__":
    programs = json.loads(sys.argv[1])
    {"lightning": watch_lightning, "accelerate": watch_accelerate}[sys.argv[2]]()
    sys.path.insert(0, os.getcwd())  # the stand-ins for data sets of a hub
    for words in programs:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
