"""Layers, losses and models. A model is a `Module` with `forward`; nobody writes a backward pass."""

from ..core import functional
from . import init, layers, models, settings, utils
from .checkpoint import Checkpoint, checkpoint
from .gpt import GPT
from .layers import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    Dropout,
    Dropout2d,
    Embedding,
    Flatten,
    GroupNorm,
    Identity,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2d,
    MultiheadAttention,
    RMSNorm,
)
from .losses import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from .models import MLP, ConvNet, LeNet5, ResNet18
from .module import Module, ModuleDict, ModuleList, Parameter, ParameterList, Sequential, in_mode, manual_seed
from .pipeline import PipelineParallel, Stage

__all__ = [
    "AdaptiveAvgPool2d", "AvgPool2d", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "Checkpoint", "Conv1d",
    "Conv2d", "ConvNet", "CrossEntropyLoss", "Dropout", "Dropout2d", "Embedding", "Flatten", "GPT", "GroupNorm",
    "Identity", "L1Loss", "LayerNorm", "LeNet5", "LeakyReLU", "Linear", "MLP", "MSELoss", "MaxPool2d", "Module",
    "ModuleDict", "ModuleList", "MultiheadAttention", "NLLLoss", "Parameter", "ParameterList", "PipelineParallel",
    "RMSNorm", "ResNet18", "Sequential", "SmoothL1Loss", "Stage", "checkpoint", "in_mode", "init", "manual_seed",
    "models", "settings", "utils",
]  # fmt: skip

__all__ += functional.ACTIVATIONS


def __getattr__(name: str) -> type[layers.Activation]:
    """The layers of activations: ReLU, Tanh, ..., and those that programs add (functional.unary)."""
    if name not in functional.ACTIVATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = layers.activation(name, *functional.ACTIVATIONS[name])
    return made
