"""The contract over every backend, 1 to 4 ranks, all ranks and groups of them: one launch per
backend and world.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from odyssey.comm import Communicator, mock

sys.path.insert(0, str(Path(__file__).parent))
import contract  # noqa: E402
import contract_groups  # noqa: E402, F401 - more cases

HERE = Path(__file__).parent
GROUPS = ("world", "split", "single")
BACKENDS = ("local", "mock", "mpi", "shm", "gloo")


def _missing(backend: str) -> str | None:
    """Why a backend cannot be tested here."""
    if backend == "gloo" and importlib.util.find_spec("torch") is None:
        return "torch is not installed (extra [torch])"
    if backend == "shm" and importlib.util.find_spec("odyssey.comm.shm") is None:
        return "no shared-memory backend in this version"
    return None


def _marks(backend: str, ranks: int) -> list[pytest.MarkDecorator]:
    """Three ranks have groups of two and one, and a tree that is not full: other numbers are
    variations.
    """
    if why := _missing(backend):
        return [pytest.mark.skip(reason=why)]
    return (
        [pytest.mark.long]
        if ranks not in (1, 3) and backend != "mock" or (backend, ranks) == ("gloo", 1)
        else []
    )


WORLDS = [
    pytest.param((backend, ranks), id=f"{backend}-{ranks}", marks=_marks(backend, ranks))
    for backend in BACKENDS
    for ranks in ((1,) if backend == "local" or _missing(backend) else (1, 2, 3, 4))
]


def on_threads(backend: str, ranks: int) -> list[dict[str, str]]:
    results: list[dict[str, str]] = [{} for _ in range(ranks)]

    def work(world: Communicator) -> None:
        def report(group: str, title: str, error: BaseException | None) -> None:
            text = (
                ""
                if error is None
                else "".join(traceback.format_exception(type(error), error, error.__traceback__))
            )
            results[world.rank][f"{group} {title}"] = text

        contract.run(world, report)

    if backend == "local":
        work(Communicator())
    else:
        mock.run(ranks, work)
    return results


def on_processes(launch, backend: str, ranks: int) -> list[dict[str, str]]:
    for file in launch.folder.glob("*.json"):
        file.unlink()
    arguments = [HERE / "contract_ranks.py", backend, launch.folder]
    launch.environment["ODYSSEY_TIMEOUT"] = "100"
    if backend == "gloo":
        done = together(launch, ranks, sys.executable, *arguments)
    else:
        done = launch.python(*arguments, ranks=ranks, timeout=200)
    files = [launch.folder / f"{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), done.stderr
    results = [json.loads(file.read_text()) for file in files]
    if done.returncode:  # after the last case, or a case that took the process away
        results[0].setdefault("world the end", done.stderr)
    return results


def together(
    launch, ranks: int, *command: object, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Processes with the variables of env://; the result of all as one."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [str(word) for word in command]
    processes = []
    for rank in range(ranks):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        environment = {**launch.environment, **common, **mine}
        processes.append(
            subprocess.Popen(
                words,
                env=environment,
                cwd=launch.folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    killer = threading.Timer(timeout, lambda: [p.kill() for p in processes])
    killer.start()
    said = [p.communicate() for p in processes]
    killer.cancel()
    codes = [p.returncode for p in processes]
    out, err = ("".join(part) for part in zip(*said, strict=True))
    return subprocess.CompletedProcess(words, max(codes, key=abs), out, err)


@pytest.fixture(scope="module", params=WORLDS)
def results(request, launch_once):
    """What every case did on every rank of one world: [{"group case": "" or a traceback}]."""
    backend, ranks = request.param
    if backend in ("local", "mock"):
        os.environ["ODYSSEY_TIMEOUT"] = "100"
        try:
            return on_threads(backend, ranks)
        finally:
            del os.environ["ODYSSEY_TIMEOUT"]
    return on_processes(launch_once, backend, ranks)


@pytest.mark.parametrize("group", GROUPS)
def test_contract(results, group):
    failed = [
        f"rank {rank}, {case}: {said}"
        for case in contract.CASES
        for rank, result in enumerate(results)
        if (said := result.get(f"{group} {case}", "did not run"))
    ]
    assert not failed, "\n".join(failed)


def test_the_processes_end_well(results):
    assert "world the end" not in results[0], results[0]["world the end"]
