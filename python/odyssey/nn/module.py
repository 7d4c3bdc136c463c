"""Module: parameters and sub-modules by name, and where they are placed.

It knows nothing of ranks or optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core import random_scopes, setting_versions
from ..core.arena import Buffer
from ..core.placement import Device
from ..core.placement import device as place_of
from ..core.program import Eager, current
from ..core.tensor import Parameter, Tensor
from ..errors import ConfigError, ShapeError
from . import forward_hooks

# --- initial values -------------------------------------------------------------------------


class _Init(threading.local):
    seed = 0
    stream = 0
    remaining: int | None = None  # numbers that may still be made; None: any


_init = _Init()


def manual_seed(seed: int) -> None:
    """Sets the seed of initial parameters and starts counting them again; also that of dropout
    outside a trainer.

    The k-th parameter made after this call holds numbers that are a function of (seed, k) alone.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"[seed] {seed} is not allowed; give an integer from 0 to 2^63 - 1")
    _init.seed = seed
    _init.stream = 0
    executor = current()
    if isinstance(executor, Eager):
        executor.context.seed = seed


class _OwnNumbers:
    """The random numbers of odyssey outside a training step: those of new parameters, and of
    dropout that is called by itself. Each thread has its own.
    """

    def mark(self) -> Any:
        executor = current()
        if type(executor) is not Eager:  # the numbers of a step are the trainer's
            return _init.seed, _init.stream, None, 0, 0
        return _init.seed, _init.stream, executor, executor.context.seed, executor.layer

    def state(self) -> Any:
        return self.mark()

    def restore(self, state: Any) -> None:
        _init.seed, _init.stream, executor, seed, layer = state
        if executor is not None:
            executor.context.seed = seed
            executor.layer = layer

    def seed(self, number: int) -> None:
        _init.seed = number
        _init.stream = 0
        executor = current()
        if type(executor) is Eager:
            executor.context.seed = number
            executor.layer = 0


random_scopes.add("odyssey", _OwnNumbers())


def uniform(shape: tuple[int, ...], bound: float) -> Parameter:
    """A parameter with numbers from [-bound, bound).

    Raises ConfigError: there would be more than `limited` allows.
    """
    _count(shape)
    return _drawn("uniform", shape, -float(bound), float(bound))


def _count(shape: tuple[int, ...]) -> None:
    if _init.remaining is not None:
        _init.remaining -= math.prod(shape)
        if _init.remaining < 0:
            raise ConfigError(f"a parameter {shape} is more than there may be")


def _drawn(op: str, shape: tuple[int, ...], *numbers: float) -> Parameter:
    p = Parameter(np.zeros(shape, np.float32))
    Eager().emit(op, p.memory, p.size, _init.seed, _init.stream, *numbers)
    _init.stream += 1
    return p


def normal(shape: tuple[int, ...]) -> Parameter:
    """A parameter with numbers of mean 0 and variance 1: sums of twelve uniform ones (the bits
    of no library's log).
    """
    _count(shape)
    # NumPy adds twelve numbers in a row in another order, as it always did here
    if math.prod(shape) == 1:
        return Parameter(_drawn("uniform", (12, *shape), -0.5, 0.5).data.sum(axis=0))
    return _drawn("normal", shape)


@contextlib.contextmanager
def limited(numbers: int) -> Iterator[None]:
    """Modules that are made inside have at most so many initial values; those made afterwards
    have the values that they would have without.
    """
    previous = vars(_init).copy()
    _init.remaining = numbers
    try:
        yield
    finally:
        vars(_init).clear()
        vars(_init).update(previous)


@contextlib.contextmanager
def in_mode(model: Any, training: bool) -> Iterator[None]:
    """A model, also torch's, in the mode of training or that of evaluation; afterwards each
    layer is in its own. No change of a setting (core/setting_versions.py): what is recorded
    for a mode stays.
    """
    previous = [(vars(m), vars(m).get("training")) for m in model.modules()]
    mode = model.training
    try:
        with setting_versions.unnoticed():  # a model may have a train() of its own
            model.train(training)
        yield
    finally:
        with setting_versions.unnoticed():
            if model.training != mode:
                model.train(mode)
        for attributes, was in previous:
            if was is None:
                attributes.pop("training", None)
            else:
                attributes["training"] = was


# --- modules -----------------------------------------------------------------------------------

_PLACED = "\0placed"  # no attribute has this name


class Module:
    """Base of layers and models: assign parameters and modules as attributes, write `forward`."""

    training = True
    _wrapped = False  # by a DistributedDataParallel
    _forward_pre_hooks: tuple[forward_hooks.Hook, ...] = ()
    _forward_hooks: tuple[forward_hooks.Hook, ...] = ()
    # that one of odyssey's own was made with, as JSON has them
    arguments: dict[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        order = type(self).__mro__
        if (args or kwargs) and order[order.index(Module) + 1] is object:
            arguments = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            raise ConfigError(
                f"[{type(self).__name__}] takes no arguments, but {arguments} was given; leave "
                "it out"
            )
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(f"{__package__}."):
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        setting_versions.noted(self, name, value)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        setting_versions.noted(self, name)
        object.__delattr__(self, name)

    def __copy__(self) -> Module:
        """A module with the same parameters and sub-modules, as for any object.

        It doesn't place them again.
        """
        new = type(self).__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """The attributes, and the parameters that this module has placed, because a parameter
        knows it by its id.
        """
        state = {name: value for name, value in vars(self).items() if name != "_wrapped"}
        placed = {
            name: p.places[id(self)]
            for name, p in self._walk_parameters("")
            if id(self) in p.places
        }
        return {**state, _PLACED: placed} if placed else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the attributes of a copy, and places its parameters as those of the original."""
        placed = state.pop(_PLACED, {})
        vars(self).update(state)
        for name, p in self._walk_parameters("") if placed else ():
            if name in placed:
                p.places = {**p.places, id(self): placed[name]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's output; every subclass has its own."""
        raise TypeError(f"{type(self).__name__} has no forward(); write one")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and inspect.signature(self.forward).parameters:
            if self._wrapped:  # ddp.module(), as it is a method elsewhere
                return self  # type: ignore[return-value]
            raise ConfigError(f"[nn] {type(self).__name__} is called without inputs; give them")
        if (self._forward_pre_hooks or self._forward_hooks) and not forward_hooks.are_skipped():
            return forward_hooks.call(self, args, kwargs)
        return self.forward(*args, **kwargs)

    def register_forward_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> forward_hooks.HookHandle:
        """Has `hook(module, args, output)` called after each forward(), as PyTorch does.

        What the hook returns replaces the output, unless it is None. With `execution="eager"` a
        trainer calls hooks for each shard. Otherwise it calls them while it records the step, when
        tensors have no values yet.

            handle = model.fc1.register_forward_hook(lambda m, args, y: print(y.numpy().mean()))

        Args:
            hook: the function.
            prepend: call it before the other hooks.
            with_kwargs: call `hook(module, args, kwargs, output)`.

        Returns the handle that removes the hook.
        """
        return self._add_hook("_forward_hooks", hook, prepend, with_kwargs)

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> forward_hooks.HookHandle:
        """Has `hook(module, args)` called before each forward(), see `register_forward_hook`.

        What the hook returns replaces the inputs, unless it is None: one input, a tuple of them,
        or a pair (args, kwargs) with `with_kwargs`.
        """
        return self._add_hook("_forward_pre_hooks", hook, prepend, with_kwargs)

    def _add_hook(
        self, kind: str, function: Callable[..., Any], prepend: bool, with_kwargs: bool
    ) -> forward_hooks.HookHandle:
        if not callable(function):
            raise ConfigError(
                f"[{type(self).__name__}] a hook must be a function, and got "
                f"{type(function).__name__}; pass a function of (module, args, output)"
            )
        hook = forward_hooks.Hook(function, with_kwargs)
        others = getattr(self, kind)
        # a new tuple: a change of a setting, after which a step is recorded again
        setattr(self, kind, (hook, *others) if prepend else (*others, hook))
        return forward_hooks.HookHandle(self, kind, hook)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Sub-modules with their names, in the order they were assigned."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        """Sub-modules, in the order they were assigned."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, with dotted names; its own is `prefix`."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        return (module for _, module in self.named_modules())

    def apply(self, fn: Callable[[Module], Any]) -> Module:
        """Calls fn with every module below this one, then with this one, which is returned."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def add_module(self, name: str, module: Module | None) -> None:
        """The same as assigning it."""
        setattr(self, name, module)

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Says of all parameters whether they are trained, and returns the module."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Parameters with dotted names, each once, in the order they were assigned.

        Raises ConfigError: a list, tuple or dictionary holds a module or parameter that would not
        be found.
        """
        self._refuse_lists()
        return ((name, p) for name, p in self._state(prefix) if not isinstance(p, Buffer))

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
        """Buffers with dotted names, likewise."""
        return ((name, p) for name, p in self._state(prefix) if isinstance(p, Buffer))

    def _state(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Parameters and buffers, each once."""
        seen_ids: set[int] = set()
        for name, p in self._walk_parameters(prefix):
            if id(p) not in seen_ids:
                seen_ids.add(id(p))
                yield name, p

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Makes `tensor` an attribute that is part of the module's state, in `state_dict` and
        checkpoints, and trained by no optimizer; not part of them unless `persistent`. Raises
        ConfigError: it is not of float32 and persistent, or the name is taken.
        """
        if hasattr(self, name) or not name.isidentifier():
            raise ConfigError(
                f"[register_buffer] the name {name!r} is taken, or no word; give another one"
            )
        if not persistent:
            setattr(self, name, tensor if isinstance(tensor, Tensor) else Tensor(tensor))
            return
        dtype = getattr(tensor, "dtype", np.float32)
        if np.dtype(dtype).kind != "f":
            raise ConfigError(
                f"[register_buffer] {name} has the dtype {np.dtype(dtype)}; buffers are float32: "
                "give that, or persistent=False"
            )
        setattr(self, name, Buffer(tensor.data if isinstance(tensor, Tensor) else tensor))

    def _refuse_lists(self) -> None:
        """A module in a plain list would not be trained, nor hear of train() and eval()."""
        modules = list(self.modules())
        registered = {id(m) for m in modules} | {id(p) for _, p in self._walk_parameters("")}
        for m in modules:
            for name, value in vars(m).items():
                for v in _inside(value):
                    if id(v) not in registered:
                        raise ConfigError(
                            f"[{type(m).__name__}] {name} is a {type(value).__name__} with a "
                            f"{type(v).__name__} in it, "
                            "which is not found there; use nn.ModuleList, or an attribute for each"
                        )

    def _walk_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value._walk_parameters(f"{prefix}{name}.")

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once."""
        return (p for _, p in self.named_parameters())

    def buffers(self) -> Iterator[Buffer]:
        """All buffers, each once."""
        return (b for _, b in self.named_buffers())

    def to(self, device: int | str | Device) -> Module:
        """Places the parameters of this module and all below it (placement.device), and returns
        the module. One that several modules share is where each of them was placed.
        """
        place = place_of(device)
        for m in self.modules():
            for p in vars(m).values():
                if isinstance(p, Parameter):
                    p.put(place, m)
        return self

    def __matmul__(self, device: int | str | Device) -> Module:
        """`Linear(784, 512) @ device(1)`: same as `to`."""
        return self.to(device)

    def train(self, mode: bool = True) -> Module:
        """Switches dropout and the like on (or off)."""
        for m in self.modules():
            m.training = mode
        return self

    def eval(self) -> Module:
        """Switches dropout and the like off."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets all gradients to zero; they are never None."""
        for p in self.parameters():
            p.zero_grad()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters and buffers by name, as copies; one that is used in two places under both
        names.
        """
        self._refuse_lists()
        return {name: p.data.copy() for name, p in self._walk_parameters("")}

    def load_state_dict(
        self, state: Mapping[str, np.ndarray], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Copies values in.

        Nothing is changed unless all names and shapes fit.

        strict: False: names that are missing keep their values, and unknown ones are left out.
        Returns (missing, unknown) names. Raises ShapeError: a name is missing (of a parameter with
        two names both) or
            unknown, or a shape differs.
        """
        parameters = dict(self._walk_parameters(""))
        given_ids = {id(p) for name, p in parameters.items() if name in state}
        missing = sorted(name for name, p in parameters.items() if id(p) not in given_ids)
        unknown = sorted(state.keys() - parameters.keys())
        if strict and (missing or unknown):
            raise ShapeError(
                f"[load_state_dict] missing: {missing or 'none'}; unknown: {unknown or 'none'}"
            )
        parameters = {name: p for name, p in parameters.items() if name in state}
        for name, p in parameters.items():
            if tuple(state[name].shape) != p.shape:
                raise ShapeError(
                    f"[load_state_dict] {name} has shape {tuple(state[name].shape)}, not {p.shape}"
                )
        for name, p in parameters.items():
            p.data[...] = state[name]
        return missing, unknown

    def __repr__(self) -> str:
        # names and layers; neighbours in a list that are alike are on one
        lines: list[tuple[str, str]] = []
        for name, child in self.named_children():
            text = repr(child).replace("\n", "\n  ")
            if lines and name.isdecimal() and lines[-1][1] == text:
                lines[-1] = (f"{lines[-1][0].partition('-')[0]}-{name}", text)
            else:
                lines.append((name, text))
        inner = "".join(f"\n  ({name}): {text}" for name, text in lines)
        return (
            f"{type(self).__name__}({inner}\n)"
            if inner
            else f"{type(self).__name__}({self.extra_repr()})"
        )

    def extra_repr(self) -> str:
        """Returns what stands between the brackets of a layer's repr; default: the arguments
        that it was made with.
        """
        return ", ".join(
            f"{k}={reprlib.repr(v)}" for k, v in (vars(self).get("arguments") or {}).items()
        )


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """An __init__ that keeps its arguments in `arguments`, if JSON has them; of the outermost
    class.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def noted(self: Module, *args: Any, **kwargs: Any) -> None:
        if "arguments" not in vars(self):
            self.arguments = None
            with contextlib.suppress(TypeError, ValueError):  # of another signature, or no JSON
                bound = signature.bind(self, *args, **kwargs)
                self.arguments = json.loads(json.dumps(dict(list(bound.arguments.items())[1:])))
        init(self, *args, **kwargs)

    return noted


def _inside(value: Any) -> Iterator[Module | Parameter]:
    """Modules and parameters in a plain list, tuple, set or dictionary, and in those it holds."""
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        for v in value.values() if isinstance(value, dict) else value:
            if isinstance(v, (Module, Parameter)):
                yield v
            else:
                yield from _inside(v)


class ModuleList(Module):
    """A list of modules that are found: their names are 0, 1, 2, ...

    It has no forward; its owner calls them.
    """

    kind: type = Module

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def _set_entry(self, name: str, value: Any) -> None:
        if not isinstance(value, self.kind):
            expected = f"{self.kind.__name__.lower()}s"
            raise ConfigError(
                f"[{type(self).__name__}] a {type(value).__name__} was given; give {expected}"
            )
        setattr(self, name, value)

    def append(self, module: Any) -> Any:
        self._set_entry(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Any]) -> None:
        for module in modules:
            self.append(module)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Any]:
        return (value for value in vars(self).values() if isinstance(value, self.kind))

    def __getitem__(self, i: int | slice) -> Any:
        selected = list(self)[i]
        return type(self)(selected) if isinstance(i, slice) else selected

    def __setitem__(self, i: int, module: Any) -> None:
        self._set_entry(str(range(len(self))[i]), module)


class ParameterList(ModuleList):
    """A list of parameters that are found, likewise."""

    kind = Parameter


class ModuleDict(Module):
    """Modules by name, which are found; also attributes.

    It has no forward; its owner calls them.
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module]) -> None:
        for name, module in modules.items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(module, Module) or hasattr(type(self), name):
            raise ConfigError(
                f"[ModuleDict] {name!r}, a {type(module).__name__}; give modules, and other names"
            )
        setattr(self, name, module)

    def items(self) -> Iterator[tuple[str, Module]]:
        return self.named_children()

    def keys(self) -> list[str]:
        return [name for name, _ in self.items()]

    def values(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, name: str) -> Module:
        return dict(self.items())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


class Sequential(ModuleList):
    """Modules one after the other; their names are 0, 1, 2, ..., or those of a dictionary."""

    def __init__(self, *layers: Any) -> None:
        argument = layers[0] if len(layers) == 1 else None
        if not isinstance(argument, Mapping):
            super().__init__(layers)
            return
        super().__init__()
        for name, layer in argument.items():
            self._set_entry(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


__all__ = [
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "ParameterList",
    "Sequential",
    "manual_seed",
    "uniform",
]
