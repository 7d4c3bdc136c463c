"""Layers, losses and models.

A model is a `Module` with `forward`; nobody writes a backward pass.
"""

from ..core import functional
from . import init, layers, losses, models, settings, targets, utils
from .checkpoint import Checkpoint, checkpoint
from .gpt import GPT
from .layers import *  # noqa: F403
from .losses import *  # noqa: F403
from .models import MLP, ConvNet, LeNet5, ResNet18
from .module import (
    Module,
    ModuleDict,
    ModuleList,
    Parameter,
    ParameterList,
    Sequential,
    in_mode,
    manual_seed,
)
from .pipeline import PipelineParallel, Stage
from .targets import *  # noqa: F403

__all__ = [
    "Checkpoint",
    "ConvNet",
    "GPT",
    "LeNet5",
    "MLP",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "ParameterList",
    "PipelineParallel",
    "ResNet18",
    "Sequential",
    "Stage",
    "checkpoint",
    "functional",
    "in_mode",
    "init",
    "manual_seed",
    "models",
    "settings",
    "utils",
]
__all__ += layers.__all__
__all__ += losses.__all__
__all__ += targets.__all__
__all__ += functional.ACTIVATIONS


def __getattr__(name: str) -> type[layers.Activation]:
    """The layers of activations: ReLU, Tanh, ..., and those that programs add
    (functional.unary).
    """
    if name not in functional.ACTIVATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(layers, name)
