"""Checkpoints that are interrupted or damaged: is one left that loads, and is damage noticed?

Each save, load and look happens in a process of its own (forked), as some end by a signal. Nothing
here knows what is expected of a format.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from anchors.savers import SAVERS, Saver, State
from common import median

TENSORS = 24
KILLED = (512, 512)  # 1 MiB each: a save takes long enough to be hit
DAMAGED = (64, 64)
PATIENCE = 60.0  # seconds for one load


class Odyssey(Saver):
    """odyssey.checkpoints.Store, keep 2."""

    needs = "odyssey"
    in_place = False

    @classmethod
    def prepare(cls) -> None:
        import odyssey.checkpoints  # noqa: F401

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.store = None

    def save(self, step: int, state: State) -> None:
        from odyssey.checkpoints import Snapshot, Store

        if self.store is None:
            self.store = Store(self.folder, keep=2)
        self.store.save(Snapshot(step, {"parameters": state}, {"step": step}))

    def load(self) -> tuple[int, State]:
        from odyssey.checkpoints import Store

        found, refused = Store(self.folder, owner=False).newest()
        if found is None:
            raise OSError(f"no checkpoint; refused: {[one.reason for one in refused]}")
        return found.step, found.arrays["parameters"]

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


EACH: dict[str, type[Saver]] = {"odyssey Store": Odyssey, **SAVERS}


def state_of(step: int, shape: tuple[int, int]) -> State:
    """Numbers that all depend on the step; not all alike, so that nothing is compressed away."""
    base = np.random.default_rng(0).standard_normal(shape, np.float32)
    return {f"layer{i}": base + np.float32(step + i / 32) for i in range(TENSORS)}


def _same(found: State, right: State) -> bool:
    return found.keys() == right.keys() and all(
        found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()
        for name, array in right.items()
    )


def in_child(call: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What a call returns, as JSON has it, in a forked process; {"error": text} if it raises,
    dies or is too slow.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _silent()
            try:
                answer = call()
            except BaseException as problem:  # DCP's own is no Exception
                answer = {"error": f"{type(problem).__name__}: {problem}"[:300]}
            os.write(writing, json.dumps(answer).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    data, deadline = b"", time.monotonic() + patience
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            data += piece
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            if time.monotonic() >= deadline:
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return (
        json.loads(data)
        if data
        else {"error": "the process ended without an answer, or took too long"}
    )


def _silent() -> None:
    """What programs print while they save and load is not ours."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


# --- killed while saving --------------------------------------------------------------------------


def kills(kind: type[Saver], folder: Path, count: int, dice: random.Random) -> dict[str, Any]:
    """SIGKILL at `count` random moments to a process that does nothing but save; after each,
    what loads?

    lost: nothing loads, or numbers of several steps, or an older step than the last save that had
    returned. The next process goes on in the same folder; after a loss, in an empty one.
    """
    kind.prepare()
    folder.mkdir(parents=True)
    period = _period(kind, folder)
    states = {step: state_of(step, KILLED) for step in range(_STEPS)}
    outcomes = {"whole": 0, "nothing loads": 0, "mixed": 0, "older": 0}
    reasons: set[str] = set()
    next_step = 0
    for _ in range(count):
        returned = _one_kill(kind, folder, states, next_step, dice.uniform(0, 2 * period))
        found = in_child(lambda: _look(kind, folder, states))
        if "error" in found:
            outcome = "nothing loads"
            reasons.add(found["error"][:120])
        elif not found["whole"]:
            outcome = "mixed"
        else:
            outcome = "older" if found["step"] < returned else "whole"
        outcomes[outcome] += 1
        if outcome in ("nothing loads", "mixed"):
            shutil.rmtree(folder)
            folder.mkdir()
            next_step = 0
        else:
            next_step = found["step"] + 1
    return {
        "kills": count,
        "lost": count - outcomes["whole"],
        **outcomes,
        "save_seconds": round(period, 4),
        "reasons": sorted(reasons)[:5],
    }


_STEPS = 8  # different states; a step's is that of step % _STEPS


def _period(kind: type[Saver], folder: Path) -> float:
    """Seconds of one save, in a folder that is then emptied."""

    def measure() -> list[float]:
        saver, seconds = kind(folder), []
        for step in range(4):
            start = time.perf_counter()
            saver.save(step, state_of(step, KILLED))
            seconds.append(time.perf_counter() - start)
        saver.close()
        return seconds[1:]

    seconds = in_child(measure)
    if isinstance(seconds, dict):
        raise SystemExit(f"{kind.__doc__}: cannot save: {seconds['error']}")
    shutil.rmtree(folder)
    folder.mkdir()
    return median(seconds)


def _one_kill(
    kind: type[Saver], folder: Path, states: dict[int, State], first: int, wait: float
) -> int:
    """Kills a saving process `wait` seconds after its first save; returns the last step whose
    save had returned.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _silent()
            saver, step = kind(folder), first
            while True:
                saver.save(step, states[step % _STEPS])
                os.write(writing, step.to_bytes(8, "little"))
                step += 1
        finally:
            os._exit(1)
    os.close(writing)
    data = b""
    try:
        select.select([reading], [], [], PATIENCE)
        time.sleep(wait)
    finally:
        os.kill(child, signal.SIGKILL)
    while piece := os.read(reading, 1 << 16):
        data += piece
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or not data:
        raise SystemExit(f"{kind.__doc__}: the saving process ended by itself: status {status}")
    return int.from_bytes(data[-8:], "little")


def _look(kind: type[Saver], folder: Path, states: dict[int, State]) -> dict[str, Any]:
    step, state = kind(folder).load()
    return {"step": step, "whole": _same(state, states[step % _STEPS])}


# --- damaged afterwards ---------------------------------------------------------------------------


def damage(
    kind: type[Saver], folder: Path, flips: int, cuts: int, dice: random.Random
) -> dict[str, Any]:
    """One bit flipped, or one file cut, in the newest of two checkpoints: what does loading say?

    Per kind of damage: silent (other numbers, no error), found (an error), fell_back (found, and
    the checkpoint before it was given), harmless (the right numbers all the same).
    """
    kind.prepare()
    good = folder / "good"
    good.mkdir(parents=True)
    first, second = state_of(1, DAMAGED), state_of(2, DAMAGED)

    def save() -> list[str]:
        saver = kind(good)
        saver.save(1, first)
        before = {path: _inode(path) for path in good.rglob("*") if path.is_file()}
        saver.save(2, second)
        saver.close()
        now = {path: _inode(path) for path in good.rglob("*") if path.is_file()}
        return [
            path.relative_to(good).as_posix()
            for path, node in now.items()
            if before.get(path) != node
        ]

    newest = in_child(save)
    if isinstance(newest, dict):
        raise SystemExit(f"{kind.__doc__}: cannot save: {newest['error']}")
    files = sorted(
        name for name in newest if (good / name).stat().st_size and Path(name).name != ".lock"
    )
    control = in_child(lambda: _judge(kind, good, first, second))
    if control != "harmless":
        raise SystemExit(f"{kind.__doc__}: what was saved does not load undamaged: {control}")
    sizes = [(good / name).stat().st_size for name in files]
    result: dict[str, Any] = {"files": len(files), "bytes": sum(sizes)}
    for what, count in (("flips", flips), ("cuts", cuts)):
        outcomes = {"count": count, "silent": 0, "found": 0, "fell_back": 0, "harmless": 0}
        for _ in range(count):
            name, size = dice.choices(list(zip(files, sizes, strict=True)), weights=sizes)[0]
            bad = folder / "bad"
            shutil.copytree(good, bad)
            if what == "flips":
                _flip(bad / name, dice.randrange(8 * size))
            else:
                os.truncate(bad / name, dice.randrange(size))
            answer = in_child(lambda bad=bad: _judge(kind, bad, first, second))
            outcomes["found" if isinstance(answer, dict) else answer] += 1
            shutil.rmtree(bad)
        result[what] = outcomes
    return result


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _judge(kind: type[Saver], folder: Path, first: State, second: State) -> str:
    step, state = kind(folder).load()
    if step == 2 and _same(state, second):
        return "harmless"
    return "fell_back" if step == 1 and _same(state, first) else "silent"


def _flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        value = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([value ^ 1 << bit % 8]))
