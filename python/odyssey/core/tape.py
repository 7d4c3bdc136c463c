"""Tensors and the tape: values that remember how they were made, and the walk back from a loss.

A tensor is float32 (labels: int32) in one of three layouts. `rows` is NumPy's: C-contiguous, as
arrays come in and as parameters and their gradients are kept; it shares memory with NumPy both
ways. `lanes` is what the kernels compute on (mojo/kernels/lanes.mojo: groups of 16 samples, one per
vector lane); ops make it by themselves, with the first axis as the batch, and `numpy()` of such a
tensor is a copy in rows. A batch of at most SMALL_BATCH samples stays in rows: most lanes would be
empty. `tokens` are lanes as well, for sequences (N, T, ...): a lane is a position of one, and N T
of them fill the groups, so that a layer over the last axis needs no 16 sequences.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, DeviceError, ShapeError
from . import native, program, setting_versions
from .offload import maker
from .partial_arrays import guarded
from .placement import FIRST, Device, different_places, elsewhere, place_of_op
from .program import Memory, OwnMemory, Range, Slot, copied_memory

__all__ = [
    "SMALL_BATCH",
    "Parameter",
    "Shape",
    "Tensor",
    "BackwardWatcher",
    "attach",
    "checkpointed",
    "empty",
    "from_dlpack",
    "layout_of",
    "make",
    "no_grad",
    "to_lanes",
    "to_rows",
]
# LeNet-5 on one core, forward and backward: 33 us for one sample in rows, 58 for two, 172 for 1 to
# 16 in lanes.
SMALL_BATCH = 4
LEADING = {"rows": 1, "lanes": 1, "tokens": 2}  # axes that count lanes (rows: samples)

Shape = tuple[int, ...]
Backward = Callable[["Tensor"], tuple["Tensor | None", ...]]
_sequence = itertools.count()


class _Tape(threading.local):
    enabled = True
    checkpoints = 0  # how many are being computed, one inside the other


_tape = _Tape()


def tick() -> int:
    """A number between those of the ops before and after it (`Node.order`)."""
    return next(_sequence)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One op on the tape: what went in, how to take a gradient back, and the op's number in a
    recording.

    With `repeat` it stands for several: repeat() computes the same output again, with a tape of its
    own.
    """

    inputs: tuple[Tensor, ...]
    backward: Backward | None
    number: int
    repeat: Callable[[], Tensor] | None = None
    order: int = dataclasses.field(default_factory=tick)


class Tensor:
    """An n-dimensional float32 array that can be differentiated.

    Args:
        data: anything NumPy can read. A C-contiguous float32 array is used as it is, without a
            copy; other floats and integers are converted.
        requires_grad: whether `backward()` should fill `grad`.
        dtype: float32, or int32 for what is an index.

    `device` is the place it is on (placement.py): that of its inputs, and device(0) for what was
    made from an array.
    """

    __slots__ = (
        "memory",
        "shape",
        "layout",
        "dtype",
        "requires_grad",
        "grad",
        "node",
        "device",
        "mask",
        "__weakref__",
    )

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = np.float32) -> None:
        array = np.asarray(data)
        if array.dtype.kind not in "fiub":
            raise ShapeError(
                f"[tensor] dtype {array.dtype} is not a number; give floats or integers"
            )
        if dtype not in (np.float32, np.int32) or (
            dtype == np.int32 and (requires_grad or array.dtype.kind == "f")
        ):
            raise ShapeError(
                f"[tensor] dtype {dtype} of {array.dtype}; float32, or int32 without gradient"
            )
        array = np.ascontiguousarray(array, dtype).reshape(array.shape)
        self._set(OwnMemory(array), array.shape, "rows", dtype)
        self.requires_grad = requires_grad

    def _set(self, memory: Memory, shape: Shape, layout: str, dtype: Any) -> None:
        self.memory = memory
        self.shape = tuple(shape)
        self.layout = layout
        self.dtype = dtype
        self.requires_grad = False
        self.grad: Tensor | None = None
        self.node: Node | None = None
        self.device: Device = FIRST
        self.mask = False  # whether it is what a comparison gave

    # --- shape ---

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def features(self) -> int:
        """Numbers per sample, of tokens per token: the product of all axes but the leading ones."""
        return math.prod(self.shape[LEADING[self.layout] :])

    @property
    def lanes(self) -> int:
        """Samples, or tokens: the product of the leading axes."""
        return math.prod(self.shape[: LEADING[self.layout]])

    @property
    def groups(self) -> int:
        """Groups of samples in the layout the tensor has: one per 16, or one each in rows."""
        return self.shape[0] if self.layout == "rows" else -(-self.lanes // native.library().lanes)

    @property
    def floats(self) -> int:
        """Numbers in memory, unused lanes included."""
        return (
            self.size
            if self.layout == "rows"
            else self.groups * self.features * native.library().lanes
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of no axes has no length")
        return self.shape[0]

    # --- NumPy ---

    @property
    def data(self) -> np.ndarray:
        """The values as a NumPy array: the memory itself for rows, a copy for lanes."""
        if isinstance(self.memory, Slot):
            _ = self.memory.address  # raises: there are no values yet
        if self.layout == "rows":
            return _view(self.memory, self.shape, self.dtype)
        with no_grad():
            return to_rows(self).data

    @data.setter
    def data(self, values: Any) -> None:
        """Overwrites the values, in the memory that they have."""
        if (array := np.asarray(values)).shape != self.shape:
            raise ShapeError(
                f"[tensor] data of shape {array.shape} for a tensor of shape {self.shape}; give "
                "the same"
            )
        if self.layout == "rows":
            self.data[...] = array
        else:
            rows = OwnMemory(np.ascontiguousarray(array, self.dtype))
            program.current().emit("pack_rows", self.memory, rows, self.lanes, self.features)

    def numpy(self) -> np.ndarray:
        """Same as `data`."""
        return self.data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        a = self.data
        if dtype is not None and a.dtype != dtype:
            return a.astype(dtype)
        return a.copy() if copy else a

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def item(self) -> float:
        """The one value of a tensor of one element."""
        if self.size != 1:
            raise ShapeError(
                f"[tensor] item() needs one element, this tensor has shape {self.shape}"
            )
        return float(self.data.reshape(-1)[0])

    def tolist(self) -> Any:
        return self.data.tolist()

    def __repr__(self) -> str:
        if isinstance(self.memory, Slot):
            return f"Tensor(shape={self.shape}, being recorded)"
        name = type(self).__name__
        long = self.size > 64
        body = np.array2string(
            self.data, prefix=f"{name}(", threshold=64, separator=", ", precision=4
        )
        shape = f", shape={self.shape}" if long else ""
        return f"{name}({body}{shape}{', requires_grad=True' if self.requires_grad else ''})"

    # --- arithmetic: operators.py gives the class its operators and methods, functional.py `to` ---

    if TYPE_CHECKING:

        def __add__(self, other: Tensor | float) -> Tensor: ...
        def __mul__(self, other: Tensor | float) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def reshape(self, *shape: int) -> Tensor: ...
        def flatten(self, start_dim: int = 1, end_dim: int = -1) -> Tensor: ...
        def to(self, device: int | str | Device) -> Tensor: ...
        def __getattr__(self, name: str) -> Any: ...  # size, and the others

        __radd__ = __add__
        __rmul__ = __mul__
        __sub__ = __add__
        __rsub__ = __add__

    # --- gradients ---

    def detach(self) -> Tensor:
        """The same values, cut from the tape."""
        return new_like(self, self.memory)

    def backward(self, gradient: Any = None) -> None:
        """Walks the tape from here and adds to `grad` of every leaf that requires it.

        gradient: dL/d(self), of this tensor's shape; 1 for a tensor of one element.

        Raises ShapeError: no gradient was given for a tensor of several elements, or nothing here
        requires one.
        """
        if self.node is None and not self.requires_grad:
            raise ShapeError(
                "[tensor] backward() of what depends on nothing with requires_grad=True; is all "
                "frozen?"
            )
        if gradient is None:
            if self.size != 1:
                raise ShapeError(
                    f"[tensor] backward() of shape {self.shape} needs a gradient of that shape"
                )
            seed = None
        else:
            seed = (
                Tensor(gradient)
                if not isinstance(gradient, Tensor)
                else new_like(gradient, gradient.memory)
            )
            seed.device = self.device
            if seed.shape != self.shape:
                raise ShapeError(
                    f"[tensor] the gradient has shape {seed.shape}, the tensor {self.shape}"
                )
        executor = program.current()
        with no_grad():
            try:
                executor.enter(self.node.number if self.node else -1, self.device)
                if seed is None:
                    seed = empty(self.shape)
                    if executor.scaled:
                        executor.emit("loss_scale", seed.memory)
                    else:
                        executor.emit("fill", seed.memory, 1.0, 1)
                watch = (
                    _Watch(self)
                    if BackwardWatcher.exist and type(executor) is program.Eager
                    else None
                )
                _walk(self, _as_layout(seed, self.layout), watch)
                if watch is not None:
                    watch.end()
            finally:
                executor.leave()

    def zero_grad(self) -> None:
        """Sets `grad` to zero, if there is one."""
        if self.grad is not None:
            self.grad.data[...] = 0

    # --- copies: each has its own memory, as addresses of memory mean nothing in a copy ---

    def __copy__(self) -> Tensor:
        return self._copied({}, lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._copied(memo, lambda value: copy.deepcopy(value, memo))

    def _copied(self, memo: dict[int, Any], attribute: Callable[[Any], Any]) -> Tensor:
        """A copy. `attribute` copies what a subclass has added."""
        self._check_copied()
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        attributes = {name: attribute(value) for name, value in self._attributes().items()}
        new.__setstate__(
            {**self._state(copied(self.memory, self.shape, self.dtype, memo), memo), **attributes}
        )
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything that pickle keeps.

        Values are kept as rows, so they mean the same to every version.
        """
        self._check_copied()
        memory = self.memory
        if isinstance(memory, Range) or self.layout != "rows":
            memory = OwnMemory(self.data)
        return {**self._state(memory, None), "layout": "rows", **self._attributes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Becomes what `__getstate__` described."""
        self._set(*(state.pop(name) for name in ("memory", "shape", "layout", "dtype")))
        for name, value in state.items():
            setattr(self, name, value)

    def _state(self, memory: OwnMemory, memo: dict[int, Any] | None) -> dict[str, Any]:
        """The attributes of a copy that has this memory.

        `memo` is None for pickle, which copies `grad` itself.
        """
        values = {
            name: getattr(self, name)
            for name in ("shape", "layout", "dtype", "requires_grad", "device", "mask")
        }
        return {
            "memory": memory,
            **values,
            "grad": self.grad if memo is None else copy.deepcopy(self.grad, memo),
        }

    def _attributes(self) -> dict[str, Any]:
        """The attributes that a subclass has added to those of odyssey's own classes."""
        added = dict(getattr(self, "__dict__", {}))
        for kind in type(self).__mro__:
            if kind.__module__ == __name__:
                continue
            slots = vars(kind).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                private = slot.startswith("__") and not slot.endswith("__")
                # as Python calls it
                name = f"_{kind.__name__.lstrip('_')}{slot}" if private else slot
                if name not in ("__dict__", "__weakref__") and hasattr(self, name):
                    added[name] = getattr(self, name)
        return added

    def _check_copied(self) -> None:
        """Raises ConfigError if the values are not here, or belong to a tape."""
        if self.node is not None:
            raise ConfigError(
                "[copy] a tensor that ops computed from a tensor with requires_grad=True can't be "
                "copied or pickled, because its tape can't; use .detach() first"
            )
        if isinstance(self.memory, Slot):
            _ = self.memory.address  # raises: there are no values yet
        elif isinstance(self.memory, Range) and self.memory.space == native.PARAMS:
            self.memory.arena.check_copied()


_gradient: Any = Tensor.grad  # the slots
_requires_grad: Any = Tensor.requires_grad


class Parameter(Tensor):
    """A tensor that a module trains.

    Its gradient exists from the start and is added to by every backward pass.

    `name` is its name in the model, once an optimizer or trainer has it; for messages. `places`:
    where modules that share it are, by their id; `device` is one of them.
    """

    __slots__ = ("name", "places")

    def __init__(self, data: Any) -> None:
        super().__init__(data, requires_grad=True)
        self.name = ""
        self.places = {}
        make = maker()
        array = make(self.shape)
        array[...] = self.data
        self.place(OwnMemory(array), OwnMemory(make(self.shape)))

    @property
    def requires_grad(self) -> bool:
        """True if it is trained; set to False it is frozen, also in the middle of a training."""
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if getattr(self, "requires_grad", None) != bool(value):
            setting_versions.models.rise()
        _requires_grad.__set__(self, bool(value))

    @property
    def grad(self) -> Tensor | None:
        """Gradient that backward passes have added.

        Assigning overwrites the values, in the optimizer's memory.
        """
        return _gradient.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        gradient = getattr(self, "grad", None)
        if gradient is None or (isinstance(value, Tensor) and value.memory is gradient.memory):
            _gradient.__set__(self, value)
        else:
            gradient.data = np.zeros(self.shape, np.float32) if value is None else value

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Becomes what `__getstate__` described.

        The gradient is zero, as that of a copied parameter of PyTorch.
        """
        trained = state.pop("requires_grad")
        # not by the property: a new parameter is no setting that has changed
        _requires_grad.__set__(self, False)
        super().__setstate__({**state, "places": {}})
        _requires_grad.__set__(self, trained)
        self.place(self.memory, OwnMemory(maker()(self.shape)))

    def _state(self, memory: OwnMemory, memo: dict[int, Any] | None) -> dict[str, Any]:
        # `places` is by the id of modules, so the copies of these modules say it again
        # (nn.Module.__setstate__)
        values = {
            name: getattr(self, name)
            for name in ("shape", "layout", "dtype", "requires_grad", "device", "name")
        }
        return {"memory": memory, **values}

    def place(self, memory: Memory, grad: Memory) -> None:
        """Moves the parameter to other memory (an arena's); the caller copies the values."""
        self.memory = memory
        _gradient.__set__(self, make(grad, self.shape))
        self.grad.device = self.device

    def put(self, device: Device, module: Any = None) -> None:
        """Says which place computes with the parameter, and so with its gradient; or which one
        for a module.
        """
        self.places = {} if module is None else {**self.places, id(module): device}
        self.device = device
        if self.grad is not None:
            self.grad.device = device


def copied(memory: Memory, shape: Shape, dtype: Any, memo: dict[int, Any]) -> OwnMemory:
    """The memory of a copy. Tensors that share their own memory share it in a deep copy as well."""
    if isinstance(memory, Range):
        return copied_memory(_view(memory, shape, dtype), memory.arena.copy_maker)
    return copy.deepcopy(memory, memo)


def make(memory: Memory, shape: Shape, layout: str = "rows", dtype: Any = np.float32) -> Tensor:
    """A tensor over memory that exists."""
    t = Tensor.__new__(Tensor)
    t._set(memory, shape, layout, dtype)
    return t


def new_like(t: Tensor, memory: Memory) -> Tensor:
    """Another tensor of the same shape, layout, dtype and place."""
    new = make(memory, t.shape, t.layout, t.dtype)
    new.device = t.device
    return new


def empty(shape: Shape, layout: str = "rows", dtype: Any = np.float32) -> Tensor:
    """An uninitialised tensor from the current executor."""
    # type: ignore[arg-type]
    executor = program.current()
    t = make(None, shape, layout, dtype)
    t.memory = executor.alloc(max(4 * t.floats, 16))
    t.device = executor.scope.device
    if layout != "rows":
        executor.extent = max(executor.extent, t.lanes)
    return t


def empty_like(x: Tensor, shape: Shape, layout: str) -> Tensor:
    """The same in another shape and layout, for numbers of the same kind."""
    y = empty(shape, layout, x.dtype)
    y.mask = x.mask
    return y


def from_dlpack(x: Any) -> Tensor:
    """A tensor over the memory of any CPU array that speaks DLPack (NumPy, PyTorch, JAX, ...)."""
    return Tensor(np.from_dlpack(x))


@contextmanager
def no_grad() -> Iterator[None]:
    """Ops inside leave no tape."""
    was_enabled = _tape.enabled
    _tape.enabled = False
    try:
        yield
    finally:
        _tape.enabled = was_enabled


def tape_is_on(inputs: Iterable[Tensor | None]) -> bool:
    """Returns whether an op of these inputs will have a backward pass."""
    return _tape.enabled and any(t is not None and t.requires_grad for t in inputs)


def attach(
    out: Tensor,
    inputs: tuple[Tensor, ...],
    backward: Backward,
    device: Device | None = None,
    name: str = "",
) -> Tensor:
    """Completes an op: its place, and the tape if one of its inputs wants a gradient.

    device: where the op runs and its output is, if that is not where its inputs are.
    name: of the op in messages; default that of the function that `backward` was written in.

    Raises DeviceError: the inputs are on different places.
    """
    place = place_of_op(inputs)
    if out.dtype != np.int32 and any(t.dtype == np.int32 for t in inputs):
        op = name or backward.__qualname__.split(".")[0].lstrip("_")
        raise ShapeError(
            f"[{op}] a tensor of integers, {inputs[0].shape}, where numbers are computed; use "
            "its .float()"
        )
    for t in inputs[1:]:  # in the backward pass the walk says where ops run
        if program.current().scope.phase == "forward" and elsewhere(t, place):
            raise DeviceError(
                different_places(
                    name or backward.__qualname__.split(".")[0].lstrip("_"), inputs[0], t
                )
            )
    out.device = place if device is None else device
    number = program.current().close(out.device)
    if tape_is_on(inputs):
        out.node = Node(inputs, backward, number)
        out.requires_grad = True
    return out


def checkpointed(fn: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    """fn(*args) with one node on the tape instead of one per op; nn/checkpoint.py says what for.

    The walk back repeats fn and goes on through the tape that this leaves, so gradients are added
    in the same order.
    """
    if not _tape.enabled:
        return fn(*args)
    executor = program.current()
    ops = executor.scope.ops
    layer = executor.layer
    precision = executor.precision
    started = tick()

    def run() -> Tensor:
        _tape.checkpoints += 1
        try:
            y = fn(*args)
        finally:
            _tape.checkpoints -= 1
        if not isinstance(y, Tensor):
            raise ShapeError(
                f"[checkpoint] the function returned a {type(y).__name__}; it must return one "
                "tensor"
            )
        return y

    def repeat() -> Tensor:
        backward_executor = program.current()
        _tape.enabled = True
        previous_precision = backward_executor.precision
        backward_executor.precision = precision
        try:
            with backward_executor.repeat(ops, layer):
                return run()
        finally:
            _tape.enabled = False
            backward_executor.precision = previous_precision

    # nothing was computed that wants a gradient
    if (y := run()).node is None or y.node.order < started:
        return y
    out = new_like(y, y.memory)
    out.node = Node((), None, y.node.number, repeat)
    out.requires_grad = True
    return out


def in_checkpoint() -> bool:
    """Returns whether the function of a checkpoint is being computed."""
    return _tape.checkpoints > 0


class BackwardWatcher:
    """Is told of the eager backward passes that reach an arena's parameters (`arena.watcher`;
    ddp.py).
    """

    exist = False  # whether there ever was one: without any, a backward pass does not look for them

    def begin(self, ops: set[int]) -> None:
        """A backward pass starts that will add to gradients of the arena; none has been touched.

        ops: `Node.order` of the ops that are on its tape.
        """

    def ready(self, p: Parameter) -> None:
        """The pass adds nothing more to p's gradient.

        Parameters that it does not reach are not named.
        """

    def end(self) -> None:
        """The pass is over."""


class _Watch:
    """Counts the uses of watched parameters on the tape before a backward pass starts, to tell
    their watchers.

    What a checkpoint uses is not known before it is repeated, so nothing is complete as long as one
    is ahead.
    """

    def __init__(self, root: Tensor) -> None:
        self._uses_left: dict[int, list[Any]] = {}  # parameter, uses to come
        self._watchers: dict[int, BackwardWatcher] = {}
        self._visited_orders: set[int] = set()  # not ids: a tape frees what it has passed
        self.ahead: set[int] = set()  # checkpoints that are not repeated yet
        self._finished: list[Tensor] = []  # parameters all of whose uses so far have run
        self.extend(root)

    def extend(self, root: Tensor) -> None:
        """Takes in the tape that ends in `root`."""
        stack = [root]
        new = []
        if root.node is None:
            self._use(root, new)
        while stack:
            t = stack.pop()
            if t.node is None or t.node.order in self._visited_orders:
                continue
            self._visited_orders.add(t.node.order)
            if t.node.repeat is not None:
                self.ahead.add(t.node.order)
            for s in t.node.inputs:
                if s.node is not None:
                    stack.append(s)
                else:
                    self._use(s, new)
        for watcher in new:
            watcher.begin(self._visited_orders)

    def _use(self, t: Tensor, new: list[BackwardWatcher]) -> None:
        watcher = (
            t.memory.arena.watcher
            if isinstance(t, Parameter) and isinstance(t.memory, Range)
            else None
        )
        if watcher is None:
            return
        self._uses_left.setdefault(id(t), [t, 0])[1] += 1
        if id(watcher) not in self._watchers:
            self._watchers[id(watcher)] = watcher
            new.append(watcher)

    def used(self, inputs: tuple[Tensor, ...]) -> list[Parameter]:
        """The backward of an op with these inputs has run; returns the parameters that are
        complete now.
        """
        for t in inputs:
            entry = self._uses_left.get(id(t))
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    self._finished.append(t)
        if self.ahead or not self._finished:
            return []
        # a checkpoint may have used it again
        complete = [t for t in self._finished if not self._uses_left[id(t)][1]]
        self._finished = []
        return [self._uses_left.pop(id(t))[0] for t in dict.fromkeys(complete)]

    def end(self) -> None:
        """The pass is over."""
        for p, _ in self._uses_left.values():
            p.memory.arena.watcher.ready(p)
        for watcher in self._watchers.values():
            watcher.end()


def _walk(root: Tensor, seed: Tensor, watch: _Watch | None = None) -> None:
    """Takes the gradient back through the tape, the newest op first, so each op is met once with
    its whole gradient.
    """
    executor = program.current()
    # the tensor, its gradient so far, and the number of the op that gave it last
    pending: dict[int, tuple[Tensor, Tensor, int]] = {id(root): (root, seed, executor.scope.tag)}
    while pending:
        key = max(pending, key=lambda k: pending[k][0].node.order if pending[k][0].node else -1)
        t, grad, giver = pending.pop(key)
        if t.node is None:
            executor.enter(giver, t.device)
            _accumulate(t, grad)
            continue
        if t.node.repeat is not None:
            # Its ops are the newest of the tape now, so they come next, as if they had been there
            # all the time.
            order = t.node.order
            output = t.node.repeat()
            pending[id(output)] = (output, grad, giver)
            if watch is not None:
                watch.extend(output)
                watch.ahead.discard(order)
            continue
        number = t.node.number
        place = place_of_op(t.node.inputs)
        executor.enter(number, t.device)
        grad = _as_layout(grad, t.layout)
        executor.enter(number, place)  # where the gradients are wanted
        for source, g in zip(t.node.inputs, t.node.backward(grad), strict=True):
            if g is None or not source.requires_grad:
                continue
            executor.enter(number, place)  # a backward may have walked a tape of its own
            g.device = source.device
            have = pending.get(id(source))
            pending[id(source)] = (source, g if have is None else have[1] + g, number)
        if watch is not None:
            for p in watch.used(t.node.inputs):
                if id(p) in pending:
                    _, g, giver = pending.pop(id(p))
                    executor.enter(giver, p.device)
                    _accumulate(p, g)
                p.memory.arena.watcher.ready(p)  # type: ignore[union-attr]


def _accumulate(leaf: Tensor, grad: Tensor) -> None:
    grad = _as_layout(grad, leaf.layout)
    if leaf.grad is None:
        leaf.grad = empty(leaf.shape, leaf.layout)
        program.current().emit("fill", leaf.grad.memory, 0.0, leaf.floats)
    program.current().emit("accumulate", leaf.grad.memory, grad.memory, leaf.floats)


def _as_layout(t: Tensor, layout: str) -> Tensor:
    return to_rows(t) if layout == "rows" else to_lanes(t, layout)


def to_lanes(x: Tensor, layout: str = "lanes") -> Tensor:
    """The same samples in lanes; the first axis is the batch.

    Or in tokens: the first two axes are sequences.
    """
    if x.layout == layout:
        return x
    x = to_rows(x)
    if x.ndim < 1 or x.size == 0:
        raise ShapeError(
            f"[tensor] shape {x.shape} has no samples; the first axis is the batch and must not "
            "be empty"
        )
    y = empty_like(x, x.shape, layout)
    program.current().emit("pack_rows", y.memory, x.memory, y.lanes, y.features)
    return attach(y, (x,), lambda dy: (to_rows(dy),))


def to_rows(x: Tensor) -> Tensor:
    """The same samples in rows, as NumPy sees them."""
    if x.layout == "rows":
        return x
    layout = x.layout
    if x.features == 1:  # a number per lane lies as in rows
        y = make(x.memory, x.shape, "rows", x.dtype)
        y.mask = x.mask
    else:
        y = empty_like(x, x.shape, "rows")
        program.current().emit("unpack_rows", y.memory, x.memory, x.lanes, x.features)
    return attach(y, (x,), lambda dy: (to_lanes(dy, layout),))


def layout_of(samples: int) -> str:
    """The layout in which a batch of so many samples is computed; on GPUs always in lanes."""
    return "rows" if samples <= SMALL_BATCH and not program.current().in_lanes else "lanes"


def _view(memory: Memory, shape: Shape, dtype: Any) -> np.ndarray:
    """The memory of a tensor in rows as an array that keeps it alive."""
    n = math.prod(shape)
    if isinstance(memory, Range):
        flat = memory.arena.params if memory.space == native.PARAMS else memory.arena.grads
        view = flat[memory.offset // 4 : memory.offset // 4 + n].reshape(shape)
        return guarded(view) if memory.arena.locked and memory.space == native.PARAMS else view
    array = memory.array  # type: ignore[union-attr]
    if array.dtype == dtype and array.shape == shape:
        return array
    return array.reshape(-1).view(np.uint8)[: 4 * n].view(dtype).reshape(shape)
