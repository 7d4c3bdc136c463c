"""Weights of torch modules into our own models and back, by name: one model trains on either
engine.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import nn as own
from ..core.tensor import Tensor
from ..errors import ConfigError, ShapeError


def load_torch(model: own.Module, source: Any, names: Mapping[str, str] | None = None) -> None:
    """Gives one of our own models the weights of a torch module.

    Linear and Conv2d hold theirs alike in both.

    source: a torch module, or its state_dict(), such as safetensors.torch.load_file() gives. names:
    our name -> torch's, of parameters (or beginnings of names) that are called otherwise there.
    Raises ShapeError: a name is missing or unknown, or a shape differs; nothing was changed.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else dict(source)
    if not all(isinstance(value, (torch.Tensor, np.ndarray)) for value in state.values()):
        raise ConfigError(
            f"[torch] load_torch was given a {type(source).__name__}; give a module, or its "
            "state_dict()"
        )
    back = {theirs: ours for ours, theirs in (names or {}).items()}
    model.load_state_dict({_renamed(name, back): _array(value) for name, value in state.items()})


def to_torch(model: Any, module: nn.Module, names: Mapping[str, str] | None = None) -> None:
    """The inverse: gives a torch module the weights of our model (or of a trainer's state_dict()).

    Raises RuntimeError: torch's, naming what is missing or of another shape.
    """
    state = model if isinstance(model, Mapping) else model.state_dict()
    module.load_state_dict(
        {_renamed(name, names or {}): torch.from_numpy(np.array(v)) for name, v in state.items()}
    )


class Wrapped(own.Module):
    """A torch module as a model of ours, for predictions and figures; its weights are not ours
    to train.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module.eval()
        # as many, and unused
        self.numbers = own.ParameterList(own.Parameter(_array(p)) for p in module.parameters())

    @torch.no_grad()
    def forward(self, *x: Tensor) -> Tensor:
        try:
            y = self.wrapped(*(torch.from_numpy(np.array(t.numpy())) for t in x))
        except RuntimeError as problem:
            raise ShapeError(
                f"[torch] samples {tuple(x[0].shape[1:])}: {problem}; the model takes others"
            ) from problem
        if not isinstance(y, torch.Tensor):
            raise ConfigError(
                f"[torch] the module gives a {type(y).__name__}; one tensor (N, ...) is needed"
            )
        return Tensor(y.numpy())


def content(
    model: Any, arrays: Mapping[str, np.ndarray], sample_shape: tuple[int, ...] | None
) -> bytes:
    """A state dict of tensors as the bytes of a file that torch.load(file, weights_only=True)
    reads.
    """
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}, file)
    return file.getvalue()


def _renamed(name: str, names: Mapping[str, str]) -> str:
    start = max((n for n in names if name == n or name.startswith(f"{n}.")), key=len, default=None)
    return name if start is None else names[start] + name[len(start) :]


def _array(value: Any) -> np.ndarray:
    return (
        value.detach().cpu().float().numpy()
        if isinstance(value, torch.Tensor)
        else np.asarray(value, np.float32)
    )
