"""The groups and the state of a torch optimizer, as checkpoints hold them.

Parameters are stored by name. All other values are encoded as capture/values.py says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..capture import Kind, NotAValue, decode, encode, is_value, mark, put_into, register
from ..errors import CheckpointError, ConfigError
from .arena import ModuleArena
from .device import PLAIN_TENSORS

# the dtypes that both NumPy and checkpoints have
_ARRAY_DTYPES = frozenset(
    getattr(torch, name)
    for name in "bool uint8 int8 int16 int32 int64 float16 float32 float64".split()
)

# of hyperparameters that are as they should be
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})


class ParameterName(str):
    """The name of a parameter of the module, which stands for the parameter in a checkpoint."""


register(Kind("parameter name", (ParameterName,), str, ParameterName))


class SavedState(NamedTuple):
    """The state of an optimizer as JSON and arrays.

    Attributes:
        tensors: tensors of parameters as arrays, by "KEY/NAME", for example "exp_avg/fc1.weight".
        numbers: other values of parameters as JSON, by "KEY/NAME". "/NAME" is all state of a
            parameter whose keys can't be part of such a name.
        others: pairs of keys that are not parameters, and their state, as JSON.
        arrays: the arrays of `numbers` and `others`.
    """

    tensors: dict[str, Any]
    numbers: dict[str, Any]
    others: list[Any]
    arrays: dict[str, Any]


class OptimizerState:
    """Encodes, decodes and replaces the groups and the state of an optimizer.

    Args:
        optimizer: the optimizer of the module.
        arena: has the module's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, arena: ModuleArena) -> None:
        self.optimizer = optimizer
        self.arena = arena
        self._parameters = dict(arena.named)
        self._names = {id(p): name for name, p in arena.named}

    # --- groups ---

    def normalize_groups(self) -> None:
        """Turns hyperparameters that are numbers by default into Python numbers again.

        A callback may have set them to a number of NumPy, or to an array or tensor of one number.
        The parameters of a group become a list.
        """
        defaults = getattr(self.optimizer, "defaults", {})
        for group in self.optimizer.param_groups:
            if type(group["params"]) is not list:
                group["params"] = list(group["params"])
            for key, value in group.items():
                if type(value) in _PLAIN_TYPES:
                    continue
                default = defaults.get(key)
                if key == "lr" or type(default) in (bool, int, float):
                    group[key] = as_number(value)
                elif type(value) is tuple and type(default) is tuple:  # such as betas
                    group[key] = tuple(map(as_number, value))

    def group_names(self) -> list[list[str]]:
        """Returns the names of the parameters of each group.

        Raises:
            ConfigError: a group has a parameter that is not the module's.
        """
        groups = self.optimizer.param_groups
        for i, group in enumerate(groups):
            if any(id(p) not in self._names for p in group["params"]):
                raise ConfigError(
                    f"[torch] group {i} of {type(self.optimizer).__name__} has a parameter that is "
                    "not the module's; use parameters of the module only"
                )
        return [[self._names[id(p)] for p in group["params"]] for group in groups]

    def encode_groups(self, arrays: dict[str, np.ndarray]) -> list[Any]:
        """Returns the hyperparameters of each group as JSON, and puts their arrays into `arrays`.

        Raises:
            ConfigError: a checkpoint can't hold a hyperparameter.
        """
        return [
            self._encode(group, arrays, f"group {i}")
            for i, group in enumerate(self._hyperparameters())
        ]

    def describe_groups(self) -> list[dict[str, Any]]:
        """Returns the hyperparameters of each group as JSON, in a form to compare.

        Raises:
            ConfigError: a checkpoint can't hold a hyperparameter.
        """
        self.encode_groups({})
        return [
            _describe(self._with_names(group, f"group {i}"))
            for i, group in enumerate(self._hyperparameters())
        ]

    def check_groups(self, saved: Any, name: str) -> None:
        """Checks that the groups of a checkpoint fit the module.

        saved: the optimizer's part of the checkpoint's values. name: of the checkpoint.

        Raises:
            CheckpointError: the groups don't fit.
        """
        try:
            groups = saved["groups"]
            names = saved.get("names")  # None before version 0.3
            needed = len(self.optimizer.param_groups) if names is None else len(names)
            if len(groups) != needed:
                raise ValueError(f"it has {len(groups)} groups; {needed} are needed")
            for i, group_names in enumerate(names or ()):
                if unknown := sorted({*group_names} - {*self._parameters}):
                    raise ValueError(f"group {i} has {unknown[0]}, which is not in the module")
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: its optimizer is not complete: {problem}"
            ) from problem

    def decode_groups(
        self, saved: dict[str, Any], arrays: Mapping[str, Any]
    ) -> list[dict[Any, Any]]:
        """Returns the hyperparameters of each group of a checkpoint. Changes nothing.

        saved: the optimizer's part of the checkpoint's values. arrays: those of `encode_groups`.

        Raises:
            KeyError, TypeError, ValueError: the checkpoint is damaged.
        """
        groups = [dict(self._decode(group, arrays)) for group in saved["groups"]]
        if saved.get("typed"):
            return groups
        # before version 0.3, checkpoints had plain JSON
        return [
            merged(now, group) for now, group in zip(self._hyperparameters(), groups, strict=True)
        ]

    def regroup(self, groups: list[dict[Any, Any]], names: list[list[str]] | None) -> None:
        """Gives the optimizer the groups of a checkpoint.

        groups: hyperparameters, as `decode_groups` returned them.
        names: the names of each group's parameters. None leaves the parameters where they are.
        """
        current = self.optimizer.param_groups
        if names is not None:
            del current[len(groups) :]
            current.extend({"params": []} for _ in groups[len(current) :])
            for group, members in zip(current, names, strict=True):
                group["params"][:] = [self._parameters[name] for name in members]
        # An array or tensor stays the object that the optimizer has, because attributes of the
        # optimizer may be the same object. Groups that share one must agree on its new value.
        new_marks: dict[int, set[str]] = {}
        for group, new in zip(current, groups, strict=True):
            for key, value in new.items():
                new_marks.setdefault(id(group.get(key)), set()).add(mark(value))
        for group, new in zip(current, groups, strict=True):
            for key in [key for key in group if key != "params" and key not in new]:
                del group[key]
            for key, value in new.items():
                old = group.get(key)
                is_array = isinstance(old, (np.ndarray, torch.Tensor))
                if not (is_array and len(new_marks[id(old)]) == 1 and put_into(old, value)):
                    group[key] = value

    def _hyperparameters(self) -> list[dict[Any, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    # --- state ---

    def encode(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> SavedState:
        """Returns the state of these parameters, with their names, and under all other keys.

        Raises:
            ConfigError: a checkpoint can't hold a value.
        """
        saved = SavedState({}, {}, [], {})
        state = self.optimizer.state
        for name, p in parameters:
            if p in state:
                self._encode_parameter(name, state[p], saved)
        for key, value in state.items():
            if id(key) in self._names:
                continue
            if isinstance(key, torch.Tensor):
                raise ConfigError(
                    f"[torch] {type(self.optimizer).__name__} has the state of a tensor "
                    f"{tuple(key.shape)} that is not a parameter of the module; create the "
                    "optimizer of the module's parameters"
                )
            path = f"state of {key!r}"
            nodes = [self._encode(item, saved.arrays, path) for item in (key, value)]
            saved.others.append(nodes)
        return saved

    def _encode_parameter(self, name: str, state: Any, saved: SavedState) -> None:
        """Puts the state of a parameter into `saved`."""
        if not isinstance(state, dict) or not all(map(_can_be_in_a_name, state)):
            saved.numbers[f"/{name}"] = self._encode(state, saved.arrays, f"state/{name}")
            return
        for key, value in state.items():
            path = f"{key}/{name}"
            if self._is_array(value):
                saved.tensors[path] = value.detach().cpu().numpy()
            else:
                saved.numbers[path] = self._encode(value, saved.arrays, path)

    def decode(
        self, saved: SavedState, parameters: Mapping[str, nn.Parameter]
    ) -> dict[Any, dict[Any, Any]]:
        """Returns the state of these parameters, by parameter, and the state under other keys.

        A tensor with the shape of its parameter gets the strides of the parameter.

        Raises:
            KeyError, TypeError, ValueError: the checkpoint is damaged.
        """
        state: dict[Any, Any] = {}
        for path in (*saved.tensors, *saved.numbers):
            key, _, name = path.partition("/")
            if name not in self._parameters:
                raise KeyError(path)
            if name not in parameters:
                continue
            p = parameters[name]
            value = (
                torch.from_numpy(np.array(saved.tensors[path]))
                if path in saved.tensors
                else self._decode(saved.numbers[path], saved.arrays)
            )
            if type(value) in PLAIN_TENSORS and value.shape == p.shape and key != "step":
                value = torch.empty_like(p, dtype=value.dtype).copy_(value)
            elif key != "step" or self._is_step_on_device(p):
                value = self._move_to_device(value)
            if key:
                state.setdefault(p, {})[key] = value
            else:
                state[p] = value
        for key, value in saved.others:
            state[self._decode(key, saved.arrays)] = self._move_to_device(
                self._decode(value, saved.arrays)
            )
        return state

    def _move_to_device(self, value: Any) -> Any:
        """Returns a value with its tensors on the device of the module.

        PyTorch's `load_state_dict` moves all state there too, except steps.
        """
        device = self.arena.device.torch_device

        def move(leaf: Any) -> Any:
            is_movable = type(leaf) in PLAIN_TENSORS and leaf.device != device
            return leaf.to(device) if is_movable else leaf

        return value if self.arena.device.is_host else tree_map(move, value)

    def _is_step_on_device(self, parameter: nn.Parameter) -> bool:
        """Returns whether the optimizer keeps the step of a parameter on the device."""
        for group in self.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
        return False  # a program has taken it out of its group, and left its state

    def order(self) -> list[str]:
        """Returns the names of the parameters that have state, in the order of the state."""
        return [self._names[id(key)] for key in self.optimizer.state if id(key) in self._names]

    def in_order(self, state: dict[Any, Any], names: Iterable[str]) -> dict[Any, Any]:
        """Returns a state in the order of these names of parameters; others come after them.

        A program may read the values of `optimizer.state` one after the other.
        """
        first = [self._parameters[name] for name in names if name in self._parameters]
        return {key: state[key] for key in dict.fromkeys((*first, *state)) if key in state}

    def replace(self, state: dict[Any, Any]) -> None:
        """Gives the optimizer this state, by parameters and other keys."""
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    # --- values ---

    def _encode(self, value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
        """Returns a value as JSON. Raises ConfigError: a checkpoint can't hold it."""
        try:
            named = self._with_names(value, path)
            node = encode(named, arrays, path)
            if not is_value(named):
                raise NotAValue(f"{path} has tensors as keys, or too many containers in each other")
        except RecursionError as problem:
            raise self._error(f"{path} contains itself") from problem
        except NotAValue as problem:
            raise self._error(str(problem)) from problem
        return node

    def _decode(self, node: Any, arrays: Mapping[str, Any]) -> Any:
        def parameter_of(leaf: Any) -> Any:
            return self._parameters[leaf] if type(leaf) is ParameterName else leaf

        return tree_map(parameter_of, decode(node, arrays))

    def _with_names(self, value: Any, path: str) -> Any:
        """Returns a value with names in place of the module's parameters.

        Raises NotAValue: it has a parameter of another module, or the memory of a parameter.
        """

        def name_of(leaf: Any) -> Any:
            if id(leaf) in self._names:
                return ParameterName(self._names[id(leaf)])
            if isinstance(leaf, nn.Parameter):
                raise NotAValue(f"{path} has a parameter that is not the module's")
            if isinstance(leaf, torch.Tensor) and self._is_in_parameters(leaf):
                raise NotAValue(f"{path} has the memory of a parameter; use a clone")
            return leaf

        return tree_map(name_of, value)

    def _is_in_parameters(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor has the memory of a parameter."""
        parameters = self.arena.params
        start = parameters.data_ptr()
        is_strided = tensor.layout == torch.strided and tensor.numel() > 0
        return is_strided and start <= tensor.data_ptr() < start + parameters.nbytes

    def _is_array(self, value: Any) -> bool:
        """Returns True for a tensor that a checkpoint can have as an array."""
        return (
            type(value) in PLAIN_TENSORS
            and value.layout == torch.strided
            and value.dtype in _ARRAY_DTYPES
            and not self._is_in_parameters(value)
        )

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(
            f"[torch] a checkpoint can't hold what {type(self.optimizer).__name__} has: {problem}; "
            "use numbers, strings, arrays, dense tensors and containers of them"
        )


def as_number(value: Any) -> Any:
    """Returns a number of NumPy, or an array or tensor of one number, as a Python number.

    Returns anything else as it is.
    """
    is_number = isinstance(value, (np.number, np.bool_)) or (
        isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 0
    )
    return value.item() if is_number else value


def merged(current: Any, saved: Any) -> Any:
    """Returns a state with saved values, for values that were saved as JSON without their types.

    A list becomes a tuple if the current state has a tuple.
    """
    if isinstance(current, dict) and isinstance(saved, dict):
        return {**current, **{k: merged(current.get(k), v) for k, v in saved.items()}}
    if isinstance(current, (list, tuple)) and isinstance(saved, list):
        if len(current) == len(saved):
            return type(current)(merged(a, b) for a, b in zip(current, saved, strict=True))
    return saved


def _can_be_in_a_name(key: Any) -> bool:
    """Returns True if a key of a parameter's state can be the first part of an array's name."""
    return type(key) is str and key != "" and "/" not in key


def _describe(value: Any) -> Any:
    """Returns JSON that is equal for equal values; as version 0.2.0 had it, if it could."""
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    if type(value) is dict:
        return {str(key): _describe(item) for key, item in value.items()}
    is_json = value is None or type(value) in (bool, int, float, str)
    if is_json and (type(value) is not float or math.isfinite(value)):
        return value
    return mark(value)
