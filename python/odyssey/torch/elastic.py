"""`hvd.elastic`: a state that is committed, and a function that begins from the last commit.

Horovod changes the ranks of a running job; here a job that lost a rank is started anew by `odyssey
launch`, perhaps with fewer. So a commit is a file beside the run, and no checkpoint; without
`odyssey launch` it is kept in memory.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..base import files, runs
from ..errors import DataError
from ..train import resume
from . import horovod, objects


class ObjectState:
    """Values by name, as attributes: `state.epoch`.

    All of JSON's types, tensors, and what has a state_dict().
    """

    def __init__(self, **values: Any) -> None:
        self._names = list(values)
        self._callbacks: list[Callable[[], Any]] = []
        self._committed: Any = None  # a tree of objects.py
        self.__dict__.update(values)

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Functions that are called when `run` has restored the state: the number of ranks may
        have changed.
        """
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Calls the functions of `register_reset_callbacks`."""
        for callback in self._callbacks:
            callback()

    def _take(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        return {
            k: dict(v.state_dict()) if hasattr(v, "load_state_dict") else v
            for k, v in values.items()
        }

    def _give(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if hasattr(current := getattr(self, name), "load_state_dict"):
                current.load_state_dict(value)
            else:
                setattr(self, name, value)

    def save(self) -> None:
        """Keeps the state in memory."""
        self._committed = copy.deepcopy(objects.packed(self._take()))

    def restore(self) -> None:
        """Takes back what was saved last."""
        if self._committed is not None:
            self._give(objects.unpacked(self._committed))

    def commit(self) -> None:
        """Saves, and under `odyssey launch` writes the file that a restarted job begins from."""
        self.save()
        path = _path()
        if path is not None and horovod.rank() == 0:
            text, arrays = resume.pack_tree(self._committed)
            data = b"".join([len(text).to_bytes(8, "little"), text, *(a.tobytes() for a in arrays)])
            files.write_whole(
                path, lambda file: file.write(hashlib.sha256(data).digest() + data), durable=False
            )

    def check_host_updates(self) -> None:
        """Nothing: ranks come and go when the job is started anew."""

    def sync(self) -> None:
        """Gives all ranks the last commit of the run, or rank 0's state where there is none."""
        path = _path()
        has_commit = path is not None and horovod.rank() == 0 and path.exists()
        tree = _read(path) if has_commit else objects.packed(self._take())
        self._give(
            objects.unpacked(resume.spread(horovod.global_process_set._member("sync"), tree))
        )
        self.save()


def _read(path: Path) -> Any:
    """The tree of a file that `commit` wrote. Raises DataError: it is damaged."""
    data = path.read_bytes()
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise DataError(
            f"[horovod] {path} is damaged (its SHA-256 differs); start in another --run-dir"
        )
    start = 40 + int.from_bytes(data[32:40], "little")
    stream = io.BytesIO(data[start:])

    def take(dtype: str, shape: list[int]) -> np.ndarray:
        return np.frombuffer(bytearray(stream.read(shape[0])), dtype)  # bytes, as `packed` has them

    return resume.read(data[40:start], take)


class TorchState(ObjectState):
    """A state with a module and an optimizer as well."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)


State = ObjectState


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a state that begins with the last commit; when a rank is lost, `odyssey
    launch` starts all anew.
    """

    @functools.wraps(function)
    def run_from_commit(state: ObjectState, *arguments: Any, **keywords: Any) -> Any:
        state.sync()
        state.on_reset()
        return function(state, *arguments, **keywords)

    return run_from_commit


def _path() -> Path | None:
    run = runs.Run.current()
    return None if run is None else run.path / "elastic-state"
