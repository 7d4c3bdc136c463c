"""Mojo programs for a GPU, compiled for sm_90 and kept in the cache, to run on an emulated one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu import emulated

from odyssey.compile.library import cache_dir

MOJO = shutil.which(
    "mojo", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
)


def compiled(source: Path, *imports: Path) -> Path:
    """The program of `source`, which imports these files; compiled if one of them or the
    compiler has changed.
    """
    assert MOJO is not None
    version = subprocess.run([MOJO, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(version.encode())
    for path in (source, *sorted(imports)):
        key.update(path.name.encode() + path.read_bytes())
    target = cache_dir() / "emulator" / f"{source.stem}-{key.hexdigest()[:16]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.with_suffix(f".{os.getpid()}")
        command = [MOJO, "build", "--target-accelerator", "sm_90", str(source), "-o", str(work)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
        assert done.returncode == 0, done.stderr
        work.rename(target)
    return target


def start(
    program: Path, *args: object, timeout: float = 120, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Runs it; `settings` are those of emulated.environment."""
    env = emulated.environment(**settings) | {"MODULAR_CRASH_REPORTING_ENABLED": "false"}
    command = [str(program), *map(str, args)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=timeout
    )
