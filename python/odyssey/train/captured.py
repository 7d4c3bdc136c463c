"""What a trainer's state is walked from (capture/): its roots, and how odyssey's classes are looked
into.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..callbacks import Callback, Context
from ..capture import (
    ARRAYS,
    Edge,
    Kind,
    Place,
    edges_of_host,
    edges_of_object,
    register,
    register_edges,
    register_memory,
    register_walkable,
)
from ..core.tensor import Parameter, Tensor
from ..data import DataLoader, transforms
from ..data.datasets import Described
from ..errors import ConfigError, OdysseyError
from ..metrics import Metric
from ..nn import Module
from ..optim import LambdaLR, Optimizer
from .loader_state import is_stateful
from .whole_set import Running

if TYPE_CHECKING:
    from .trainer_base import Trainer

# Attributes of data sets, as torchvision calls them, that are functions of a sample.
_TRANSFORMS = ("transform", "target_transform", "transforms")
# What decides the batches of a loader, so the position of a checkpoint holds for these alone.
_LOADER_SETTINGS = ("batch_size", "drop_last", "seed", "shuffle")
_DEEPEST = 5  # data sets inside one another whose transforms are roots


def roots_of(trainer: Trainer) -> dict[str, Any]:
    """Returns the objects that a training run depends on, by name, in the order of the walk."""
    context = trainer.context
    callbacks = {
        f"callbacks.{name}": callback
        for name, callback in context.named().items()
        if callback.is_captured
    }
    # an attribute is read from __dict__, because a trainer under construction lacks some
    parts = vars(trainer)
    return {
        "model": parts.get("model") or parts.get("module"),
        "loss": parts.get("loss"),
        "weight": parts.get("weight"),
        "optimizer": parts.get("optimizer"),
        "scheduler": parts.get("scheduler"),
        "schedule": parts.get("schedule"),
        "metrics": parts.get("metrics"),
        **({} if "whole_set" not in parts else parts["whole_set"].roots()),
        **_roots_of_loader(context.loader),
        **callbacks,
        "trainer": trainer,
        "context": context,
    }


def _roots_of_loader(loader: Any) -> dict[str, Any]:
    """Returns the parts of a loader that decide its batches."""
    parts = parts_of_samples(loader)
    dataset = parts.pop("dataset")
    roots = parts
    if is_stateful(loader):
        return roots  # its state_dict() has the rest (loader_state.py)
    if isinstance(loader, Iterator):
        return roots  # a resumed run reads it from its start, and skips batches that were used
    roots["dataset"] = loader if isinstance(loader, (list, tuple)) else dataset
    roots["sampler"] = getattr(loader, "sampler", None)
    roots["batch sampler"] = getattr(loader, "batch_sampler", None)
    roots["loader"] = loader
    return roots


def parts_of_samples(loader: Any) -> dict[str, Any]:
    """Returns the parts of a loader that decide what its samples are, as roots by name."""
    dataset = getattr(loader, "dataset", None)
    return {
        "dataset": dataset,
        "transform": list(_transforms_of(loader, dataset)) or None,
        "collate": getattr(loader, "collate_fn", None),
    }


def _transforms_of(loader: Any, dataset: Any) -> Iterator[Any]:
    """Yields the transforms of a loader, of its data set, and of the data sets inside that."""
    if isinstance(loader, DataLoader):
        yield from loader.transforms
    owners = [loader]
    while dataset is not None and len(owners) < _DEEPEST:
        owners.append(dataset)
        dataset = vars(dataset).get("dataset") if hasattr(dataset, "__dict__") else None
    for owner in owners:
        for name in _TRANSFORMS:
            transform = vars(owner).get(name) if hasattr(owner, "__dict__") else None
            if transform is not None:
                yield transform


def kept_by_arena(trainer: Any) -> set[int]:
    """Returns the ids of what checkpoints of a trainer of odyssey's modules hold as tensors."""
    parameters = [p for _, p in trainer.arena.named]
    buffers = [buffer for _, buffer in trainer.arena.buffers]
    return {id(one) for one in (*parameters, *buffers, trainer.optimizer.arrays)}


# What a hook keeps is of the shards of its rank, so ranks don't compare it.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _edges_of_module(module: Module, path: str) -> Iterator[Edge]:
    """Yields the attributes of a module of odyssey, and which of its parameters are trained."""
    for edge in edges_of_object(module, path, skip=("arguments", "_wrapped", *_HOOKS)):
        if isinstance(edge.value, Parameter):
            place = Place("attribute", edge.value, "requires_grad")
            yield Edge(f"{edge.path}.requires_grad", bool(edge.value.requires_grad), place)
        yield edge


def _edges_of_parameter(parameter: Parameter, path: str) -> Iterator[Edge]:
    """Yields the numbers of a parameter of another model than the one that is trained."""
    yield Edge(f"{path}.data", parameter.data, Place("fixed", parameter, "data"))


def _array_of(parameter: Parameter) -> np.ndarray | None:
    """Returns the numbers of a parameter; None if they are spread over ranks (zero=3)."""
    try:
        return parameter.data
    except ConfigError:
        return None


def _edges_of_optimizer(optimizer: Optimizer, path: str) -> Iterator[Edge]:
    """Yields the settings of an optimizer, and what else a rule of the user's own keeps."""
    yield from edges_of_object(optimizer, path, skip=Optimizer._internal)


def _edges_of_loader(loader: DataLoader, path: str) -> Iterator[Edge]:
    """Yields the settings of a loader, and the attributes that the user's code has set on it."""
    for name in _LOADER_SETTINGS:
        yield Edge(f"{path}.{name}", vars(loader).get(name), Place("setting", loader, name))
    yield from edges_of_host(loader, path)


def _has_numbers(tensor: Tensor) -> bool:
    """Tells whether a tensor has its numbers now, and none that a tape computes."""
    try:
        return tensor.node is None and tensor.data is not None
    except OdysseyError:  # it belongs to a recorded program
        return False


def _build_tensor(parts: list[Any]) -> Tensor:
    data, requires_grad = parts
    return Tensor(data, requires_grad, data.dtype.type)


def _put_tensor(target: Tensor, value: Tensor) -> bool:
    if target.shape != value.shape or target.dtype != value.dtype:
        return False
    target.data = value.data
    target.requires_grad = value.requires_grad
    return True


register(
    Kind(
        "odyssey tensor",
        (Tensor,),
        lambda tensor: [tensor.data, bool(tensor.requires_grad)],
        _build_tensor,
        _put_tensor,
        fits=_has_numbers,
    )
)
register_edges(Module, _edges_of_module)
register_memory(Parameter, ARRAYS._replace(owned=_array_of))
register_edges(DataLoader, _edges_of_loader)
register_edges(Context, edges_of_host)
register_edges(Parameter, _edges_of_parameter)
register_edges(Optimizer, _edges_of_optimizer)
register_walkable(
    Module,
    Parameter,
    Optimizer,
    LambdaLR,
    Callback,
    Context,
    DataLoader,
    Described,
    Metric,
    Running,
    *(one for one in vars(transforms).values() if isinstance(one, type)),
)
