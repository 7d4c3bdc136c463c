"""Streams of the pretended device, which check that no operation races with one of another stream.

Operations run at once, so nothing is late. But each stream counts its operations, and remembers up
to which operation of the others it has waited. An operation that reads or writes memory must come
after the last write, and one that writes after the last reads too.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from pytorch import pretend
from torch.futures import Future
from torch.utils import _pytree as pytree

from odyssey.torch import pending

Clock = dict[int, int]  # stream -> operations


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Checked:
    """What has been checked. reads: accesses to memory that another stream had written."""

    _not_state = ("reads", "lock")

    def __init__(self) -> None:
        self.reads = 0
        self.lock = threading.RLock()


checked = Checked()
_done: Clock = {}  # operations that the host has waited for
_memory: weakref.WeakKeyDictionary[Any, dict[str, Clock]] = weakref.WeakKeyDictionary()


class Event:
    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or current_stream()).record_event().clock

    def query(self) -> bool:
        """Returns that the host knows that everything before the event is complete."""
        with checked.lock:
            _merge(_done, self.clock)
        return True


class Stream:
    """A stream: the operations that it has run, and those of others that it comes after."""

    _not_state = ("clock", "number")
    _count = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        Stream._count += 1
        self.number = Stream._count
        self.clock: Clock = {self.number: 0}

    def record_event(self) -> Event:
        with checked.lock:
            return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        with checked.lock:
            _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        with checked.lock:
            _merge(_done, self.clock)

    def run(self, read: list[Any], written: list[Any]) -> None:
        """Counts an operation with the memory that it reads and writes."""
        with checked.lock:
            self.clock[self.number] += 1
            for memory in (*read, *written):
                self._check(_of(memory)["written"], "was written")
            for memory in written:
                self._check(_of(memory)["read"], "was read")
                _of(memory).update(read={}, written={self.number: self.clock[self.number]})
            for memory in read:
                _of(memory)["read"][self.number] = self.clock[self.number]

    def _check(self, earlier: Clock, what: str) -> None:
        for stream, count in earlier.items():
            if stream != self.number:
                checked.reads += 1
            if max(self.clock.get(stream, 0), _done.get(stream, 0)) < count:
                raise RuntimeError(f"stream {self.number} uses memory that {what} by {stream}")


def _of(storage: Any) -> dict[str, Clock]:
    return _memory.setdefault(storage, {"read": {}, "written": {}})


_default = Stream()
_threads = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_threads, "stream", _default)


@contextlib.contextmanager
def stream(wanted: Stream) -> Iterator[None]:
    before = current_stream()
    _threads.stream = wanted
    try:
        yield
    finally:
        _threads.stream = before


class _Storage:
    """The memory of tensors; PyTorch makes a new object for each look at it."""


def _storage_of(tensor: pretend.Pretend) -> Any:
    # tensors keep it, so that a number that is used again is new memory
    number = tensor.raw.untyped_storage()._cdata
    kept = getattr(tensor, "_memory", None)
    if kept is None:
        kept = _kept_of_number.get(number)
        if kept is None:
            kept = _kept_of_number[number] = _Storage()
        tensor._memory = kept
    return kept


def note_write(tensor: pretend.Pretend) -> None:
    """Counts an operation of the current stream that PyTorch doesn't run, for example NCCL's."""
    current_stream().run([], [_storage_of(tensor)])


_kept_of_number: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
_run = pretend.run


def _run_functional(func: Any, tensor: pretend.Pretend, *args: Any) -> pretend.Pretend:
    """Runs an operation of torch.distributed._functional_collectives, which DTensors use."""
    name = func.overloadpacket.__name__
    if name in ("wait_tensor", "_wrap_tensor_autograd"):  # nothing is under way
        return pretend.Pretend(tensor.raw)
    assert name == "all_gather_into_tensor", func
    size, group = args
    gathered = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    group = dist.distributed_c10d._resolve_process_group(group)
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group)
    return gathered


def _run_checked(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.namespace == "_c10d_functional":
        return _run_functional(func, *args)
    if func._can_decompose() and pretend._is_composite(func):
        return func.decompose(*args, **kwargs)
    if func.is_view:  # it looks at no number
        return _run(func, args, kwargs)
    arguments = func._schema.arguments
    read: list[Any] = []
    written: list[Any] = []
    for place, value in enumerate((*args, *kwargs.values())):
        names = {a.name: a for a in arguments}
        declared = arguments[place] if place < len(args) else names[[*kwargs][place - len(args)]]
        is_write = declared.alias_info is not None and declared.alias_info.is_write
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, pretend.Pretend) and tensor.numel():
                (written if is_write else read).append(_storage_of(tensor))
    here = current_stream()
    here.run(read, written)
    result = _run(func, args, kwargs)
    leaves = pytree.tree_leaves(result)
    made = [t for t in leaves if isinstance(t, pretend.Pretend) and t.numel()]
    given = set(map(id, (*read, *written)))
    new = [_storage_of(t) for t in made if id(_storage_of(t)) not in given]
    here.run([], new)
    if any(not isinstance(t, pretend.Pretend) for t in leaves) or _waits_for_copy(func, args):
        here.synchronize()  # a copy to or from the host
    return result


def _waits_for_copy(func: Any, args: Any) -> bool:
    """Returns whether the host waits for an operation, because it copies from pageable memory."""
    if func is not torch.ops.aten.copy_.default:
        return False
    _, source, *is_late = args
    return not isinstance(source, pretend.Pretend) and not any(is_late)


def use(own_stream: bool = True) -> str:
    """Gives the device streams, and backend "odyssey" the device. Returns the device's name.

    own_stream: True if this thread's current stream isn't the default stream of others.
    """
    pretend.run = _run_checked
    module = torch.get_device_module(pretend.NAME)
    module.device = contextlib.nullcontext
    for part in (current_stream, stream, Stream, Event):
        setattr(module, part.__name__, part)
    if own_stream:
        _threads.stream = Stream()
    # a device that is written in Python has no pool of streams for callbacks of futures
    pending.future_of = lambda value: Future()
    dist.Backend.backend_capability["odyssey"].append(pretend.NAME)
    return pretend.NAME
