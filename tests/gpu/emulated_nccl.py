"""The emulated NCCL of the tests (nccl/nccl.c): builds it, gives the environment in which
odyssey finds it.

It works in the streams of the emulated GPU (emulated.py), so both are needed. Ranks are processes
of this machine. `python tests/gpu/emulated_nccl.py GPUS COMMAND ...` runs a command with both.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from odyssey.compile.library import cache_dir

sys.path.append(str(Path(__file__).parents[1]))
from gpu import emulated  # noqa: E402

LIBRARY = "ODYSSEY_NCCL_LIBRARY"
SOURCE = Path(__file__).with_name("nccl") / "nccl.c"
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-fPIC", "-fvisibility=hidden", "-shared"]


def build() -> Path:
    """libnccl.so.2, built if its source has changed.

    Raises RuntimeError with the compiler's messages.
    """
    key = hashlib.sha256(repr(FLAGS).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = cache_dir() / "emulated_nccl" / key
    target = folder / "libnccl.so.2"
    if target.exists():
        return target
    compiler = emulated.compiler()
    if compiler is None:
        raise RuntimeError("[emulated NCCL] no C compiler found: install gcc or clang")
    folder.mkdir(parents=True, exist_ok=True)
    handle, work = tempfile.mkstemp(dir=folder)
    os.close(handle)
    done = subprocess.run(
        [compiler, *FLAGS, str(SOURCE), "-o", work, "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        os.unlink(work)
        raise RuntimeError(f"[emulated NCCL] it does not compile:\n{done.stderr}")
    os.replace(work, target)
    return target


def environment(
    gpus: int, base: dict[str, str] | None = None, **settings: object
) -> dict[str, str]:
    """That of emulated.environment, with the emulated NCCL.

    Streams run 2 ms late: as on a GPU no call waits for another rank.

    Settings as there, and `version`: what the library says that it is.
    """
    version = settings.pop("version", None)
    env = emulated.environment(gpus, base=base, **{"late": 2, **settings})
    env[LIBRARY] = str(build())
    if version is not None:
        env["ODYSSEY_EMULATED_NCCL_VERSION"] = str(version)
    return env


if __name__ == "__main__":
    gpus = int(sys.argv[1])
    os.execvpe(sys.argv[2], sys.argv[2:], environment(gpus))
