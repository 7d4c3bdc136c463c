"""Kills a process that saves checkpoints, with SIGKILL, at random moments, again and again; see
scripts/kill-saves.

With --ranks N the checkpoints are in parts: N processes of mpirun write them, and one of them, any
one, is killed.

After each kill the newest checkpoint must be valid, hold the numbers of one step only, and be at
least as new as the last one whose save had returned; then the next process opens the directory and
goes on from it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.checkpoints import Snapshot, Store
from odyssey.checkpoints.writer import Aside

FLOATS = 61_706  # parameters of LeNet-5; twice as many with momentum


def snapshot(step: int) -> Snapshot:
    """Every number depends on the step."""
    parameters = np.full(FLOATS, step, np.float32)
    parameters[::7] += 0.5
    arrays = {
        "parameters": {"a": parameters[:1000], "b": parameters[1000:]},
        "optimizer": {"m": -parameters},
    }
    return Snapshot(step, arrays, {"cursor": 128 * step})


def save_for_ever(folder: Path, attempt: int, done: int) -> None:
    """The process that is killed: says on `done` which saves have returned."""
    store = Store(folder, attempt=attempt)
    found, _ = store.newest()
    step = found.step if found else 0
    while True:
        step += 1
        if step % 3:
            store.save(snapshot(step))
        else:  # in the background; the wait says that it is there
            store.save_later(snapshot(step))
            store.wait()
        os.write(done, step.to_bytes(8, "little"))


def parts_for_ever(folder: Path, attempt: int) -> None:
    """A rank of several, each of which writes its part: leaves its number beside the
    checkpoints, and rank 0 the steps whose saves have returned.
    """
    from odyssey import comm
    from odyssey.checkpoints.header import ElementRun
    from odyssey.checkpoints.snapshot import TensorSlice
    from odyssey.train import checkpoint_parts

    world = comm.world()
    store = Store(folder, attempt=attempt) if world.rank == 0 else None
    found, _ = Store(folder, owner=False).newest()
    (folder.parent / f"pid.{world.rank}").write_text(str(os.getpid()))
    step = int(world.broadcast(np.array([found.step if found else 0]))[0])
    while True:
        step += 1
        whole, pieces = snapshot(step), []
        for stem, some in whole.arrays.items():
            for name, array in some.items():
                lo, hi = (array.size * (world.rank + i) // world.size for i in (0, 1))
                pieces.append(
                    TensorSlice(
                        stem, name, array.shape, ElementRun(lo, hi - lo, hi - lo, 1), array, 0
                    )
                )
        assert checkpoint_parts.save(world, store, Snapshot(step, {}, whole.values, pieces=pieces))
        if store is not None:
            with (folder.parent / "returned").open("ab") as file:
                file.write(step.to_bytes(8, "little"))


def one_rank_killed(
    folder: Path, attempt: int, wait: float, ranks: int, victim: int
) -> dict[str, Any]:
    """As one_kill, of one rank of several."""
    beside = Path(sys.executable).parent / "mpirun"
    said = folder.parent / "returned"
    said.unlink(missing_ok=True)
    words = [
        beside if beside.exists() else "mpirun",
        "-n",
        ranks,
        sys.executable,
        __file__,
        "--work",
        attempt,
    ]
    job = subprocess.Popen(
        [*map(str, words), "--folder", str(folder.parent)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not said.exists() and job.poll() is None:
        time.sleep(0.01)
    time.sleep(wait)
    if job.poll() is not None:
        return {"ok": False, "why": f"the job ended by itself: {job.returncode}"}
    os.kill(int((folder.parent / f"pid.{victim}").read_text()), signal.SIGKILL)
    job.wait(120)
    data = said.read_bytes()
    return judged(folder, int.from_bytes(data[len(data) // 8 * 8 - 8 :][:8], "little"))


def moment(folder: Path) -> str:
    """What the kill interrupted, by what lies aside."""
    asides = [
        (parsed, folder / name) for name in os.listdir(folder) if (parsed := Aside.parse(name))
    ]
    if not asides:
        return "between saves"
    aside, path = asides[0]
    if aside.kind == "old":
        return "while an old one was removed"
    files = sorted(os.listdir(path))
    if "manifest.json" in files:
        return "after the manifest was begun"
    return f"with {len(files)} files begun"


def one_kill(folder: Path, attempt: int, wait: float) -> dict[str, Any]:
    """Starts a process, kills it `wait` seconds after its first save, and looks what is there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, attempt, writing)
        finally:
            os._exit(1)
    os.close(writing)
    data = b""
    try:
        select.select([reading], [], [], 30)
        time.sleep(wait)
    finally:
        os.kill(child, signal.SIGKILL)
    while piece := os.read(reading, 4096):
        data += piece
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or not data:
        return {
            "ok": False,
            "why": f"the process ended by itself, or saved nothing: status {status}",
        }
    return judged(folder, int.from_bytes(data[len(data) // 8 * 8 - 8 :][:8], "little"))


def judged(folder: Path, returned: int) -> dict[str, Any]:
    """What is there after a kill, where step `returned` was saved at least."""
    when = moment(folder)
    found, refused = Store(folder, owner=False).newest()
    if found is None or refused:
        return {"ok": False, "why": f"refused: {[one.reason for one in refused]}", "moment": when}
    right = snapshot(found.step)
    whole = found.values == right.values and all(
        np.array_equal(found.arrays[stem][name], array)
        for stem, some in right.arrays.items()
        for name, array in some.items()
    )
    if not whole or found.step < returned:
        return {
            "ok": False,
            "why": f"step {found.step} is there, {returned} was saved, whole: {whole}",
            "moment": when,
        }
    return {"ok": True, "moment": when, "ahead": found.step - returned}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="kills (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument(
        "--longest", type=float, default=0.03, help="seconds until the kill, at most (0.03)"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="that write a checkpoint in parts (one process, whole)"
    )
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)  # a rank of this attempt
    parser.add_argument("--folder", type=Path, help="where to save (a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.work is not None:
        parts_for_ever(options.folder / "checkpoints", options.work)
    dice = random.Random(options.seed)
    moments: collections.Counter[str] = collections.Counter()
    lost, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / "checkpoints"
        for number in range(options.count):
            wait = dice.uniform(0, options.longest)
            if options.ranks:
                result = one_rank_killed(
                    folder, number + 1, wait, options.ranks, dice.randrange(options.ranks)
                )
            else:
                result = one_kill(folder, number + 1, wait)
            moments[result.get("moment", "none")] += 1
            if not result["ok"]:
                lost.append({"kill": number, **result})
        Store(folder, attempt=options.count + 1).close()
        left = [name for name in os.listdir(folder) if Aside.parse(name)]
    resumable = options.count - len(lost)
    if options.json:
        facts = {
            "kills": options.count,
            "resumable": resumable,
            "moments": moments,
            "lost": lost,
            "left": left,
        }
        json.dump({**facts, "seconds": time.monotonic() - began}, sys.stdout)
    else:
        print(
            f"{options.count} kills, {resumable} resumable, {len(left)} directories left aside "
            "after the next start"
        )
        for name, times in moments.most_common():
            print(f"{times:6} {name}")
        for one in lost:
            print(one)
    return 1 if lost or left else 0


if __name__ == "__main__":
    sys.exit(main())
