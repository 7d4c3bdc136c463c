"""Hyperparameters: trials of a training side by side, each on a group of ranks, by Optuna; needs
the extra `[tune]`.

tuner.py says how. Names are loaded when they are first used: `odyssey --help` needs no Optuna.
"""

from ..base import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "tune.tuner": "Analysis DIRECTIONS DistributedTuner Pruning SAMPLERS Trial choice "
        "loguniform randint run uniform"
    },
)
