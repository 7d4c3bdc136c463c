"""Layers, losses and models. A model is a `Module` with `forward`; nobody writes a backward pass."""

from . import models, utils
from .checkpoint import Checkpoint, checkpoint
from .layers import (
    AvgPool2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sigmoid,
    Softmax,
    Tanh,
)
from .losses import CrossEntropyLoss, NLLLoss
from .models import MLP, ConvNet, LeNet5
from .module import Module, ModuleList, Parameter, Sequential, manual_seed
from .pipeline import PipelineParallel, Stage

__all__ = [
    "MLP",
    "AvgPool2d",
    "Checkpoint",
    "Conv2d",
    "ConvNet",
    "CrossEntropyLoss",
    "Dropout",
    "Flatten",
    "LeNet5",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "NLLLoss",
    "Parameter",
    "PipelineParallel",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Stage",
    "Tanh",
    "checkpoint",
    "manual_seed",
    "models",
    "utils",
]
