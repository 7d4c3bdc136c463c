"""Runs in a process with inject.c preloaded: lets every write-side call of a save go wrong, one
after the other.

`python injected.py LIBRARY FOLDER` prints JSON: for each call and each way of going wrong what was
raised, what lay in the directory, and what was found there afterwards. What is right is decided in
test_faults.py.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.checkpoints import Snapshot, Store
from odyssey.errors import OdysseyError

COUNT, FAIL, SHORT, SHORT_THEN_FULL, KILL_BEFORE, KILL_AFTER = range(6)
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EDQUOT": errno.EDQUOT}
WORD = "/saved-here/"


def snapshot(step: int, change: int = 0) -> Snapshot:
    """Two small files; everything depends on the two numbers."""
    arrays = {
        "parameters": {"w": np.full(100, step + change / 16, np.float32)},
        "optimizer": {"m": np.full(9, step)},
    }
    return Snapshot(step, arrays, {"cursor": 64 * step, "change": change})


def state(store: Store) -> dict[str, Any]:
    """What is in the directory, and what is found there.

    `whole`: every number is that of the same snapshot.
    """
    found, refused = store.newest()
    what = {
        "entries": sorted(os.listdir(store.folder)),
        "refused": [one.reason for one in refused],
        "step": None,
    }
    if found is not None:
        right = snapshot(found.step, found.values["change"])
        whole = found.values == right.values and all(
            np.array_equal(found.arrays[stem][name], array)
            for stem, some in right.arrays.items()
            for name, array in some.items()
        )
        what |= {"step": found.step, "change": found.values["change"], "whole": whole}
    return what


class Injector:
    def __init__(self, library: str, folder: Path) -> None:
        self.library = ctypes.CDLL(library)
        self.library.inject_name.restype = ctypes.c_char_p
        self.folder = folder
        self.rounds = 0

    def arm(self, call: int, action: int, error: int = 0) -> None:
        self.library.inject_arm(WORD.encode(), call, action, error)

    def disarm(self) -> list[str]:
        """The names of the calls there were."""
        return [
            self.library.inject_name(number).decode()
            for number in range(self.library.inject_disarm())
        ]

    def fresh(self) -> Path:
        """A directory with the checkpoints of steps 1 and 2."""
        self.rounds += 1
        folder = self.folder / str(self.rounds) / WORD.strip("/") / "checkpoints"
        with Store(folder) as store:
            store.save(snapshot(1))
            store.save(snapshot(2))
        return folder

    def fail(
        self, save: Callable[[Store], Any], call: int, action: int, error: int = 0
    ) -> dict[str, Any]:
        """One save in which one call goes wrong."""
        with Store(self.fresh()) as store:
            self.arm(call, action, error)
            raised = None
            try:
                save(store)
            except OdysseyError as problem:
                raised = {"kind": type(problem).__name__, "text": str(problem)}
            names = self.disarm()
            after = state(store)
            store.save(snapshot(4))
            return {"calls": names, "raised": raised, **after, "next": state(store)}

    def kill(self, save: Callable[[Store], Any], call: int, action: int) -> dict[str, Any]:
        """A process that opens the directory, saves, and is killed before or after one call of
        it.
        """
        folder = self.fresh()
        child = os.fork()
        if child == 0:
            self.arm(call, action)
            with Store(folder) as store:
                save(store)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        after = state(Store(folder, owner=False))
        with Store(folder) as store:
            swept = state(store)
            store.save(snapshot(4))
            killed = os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL
            return {"killed": killed, **after, "swept": swept["entries"], "next": state(store)}


def main() -> None:
    injector = Injector(sys.argv[1], Path(sys.argv[2]))
    saves: dict[str, Callable[[Store], Any]] = {
        "new": lambda store: store.save(snapshot(3)),
        "replaced": lambda store: store.save(snapshot(2, change=1)),
        "later": lambda store: (store.save_later(snapshot(3)), store.wait()),
    }
    result: dict[str, Any] = {}
    for name, save in saves.items():
        calls = injector.fail(save, -1, COUNT)["calls"]
        failed = [
            {
                "call": call,
                "name": calls[call],
                "error": error,
                **injector.fail(save, call, FAIL, number),
            }
            for error, number in (ERRORS.items() if name == "new" else [("EIO", errno.EIO)])
            for call in range(len(calls))
        ]
        writes = [call for call, one in enumerate(calls) if one == "write"]
        result[name] = {
            "calls": calls,
            "failed": failed,
            "short": [injector.fail(save, call, SHORT) for call in writes],
            "full": [injector.fail(save, call, SHORT_THEN_FULL) for call in writes],
            "killed": [],
        }
        for action in (KILL_BEFORE, KILL_AFTER):
            call = 0
            while True:
                one = injector.kill(save, call, action)
                if not one["killed"]:
                    break
                result[name]["killed"].append({"call": call, "after": action == KILL_AFTER, **one})
                call += 1
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
