"""The steps of containers/, one after the other, without a container: in a folder in place of
its /opt.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = re.split(r"^FROM .*$", (ROOT / "containers" / "Dockerfile").read_text(), flags=re.M)[1:]
SYSTEM = ("apt-get ", "useradd ", "echo ")  # change the machine: looked at, not run


def steps(stage: str, word: str) -> list[str]:
    return re.findall(rf"^{word} (.*)$", stage, re.M)


def test_both_definitions_have_the_same_steps():
    other = (ROOT / "containers" / "odyssey.def").read_text()
    for step in steps(STAGES[0], "RUN"):
        step = step.replace(" $GPUS", "").replace("$TARGET_CPU", "x86-64-v3")
        assert f"    {step}\n" in other, step
    for step in steps(STAGES[1], "COPY --from=build"):
        assert f"    {step}\n" in other, step
    for word in ("/opt/odyssey:/opt/python/bin", "ODYSSEY_PYTHON=/opt/python/bin/python"):
        assert word in STAGES[1] and word in other


def test_what_is_copied_and_installed_is_there():
    for stage in STAGES:
        for step in steps(stage, "COPY"):
            if not step.startswith("--from"):
                assert (ROOT / step.split()[0]).exists(), step
    assert steps(STAGES[1], "USER") == ["1000:1000"] and "gcc" not in STAGES[1]
    packages = [
        word
        for s in STAGES
        for step in steps(s, "RUN")
        for word in step.partition("recommends ")[2].split()
    ]
    assert {"python3", "openssh-server", "gcc"} <= set(packages)
    if shutil.which("apt-cache"):
        known = subprocess.run(
            ["apt-cache", "show", *packages], capture_output=True, text=True
        ).stdout
        assert set(packages) <= set(re.findall(r"^Package: (\S+)$", known, re.M))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="images are of Linux")
def test_the_image_trains_without_a_compiler(tmp_path):
    places = {"/opt/": f"{tmp_path}/opt/", "/build": f"{tmp_path}/build", "/src": str(ROOT)}

    def here(text: str) -> str:
        for place, mine in places.items():
            text = re.sub(rf"(?<![\w.]){place}", mine, text)
        return text

    arguments = dict(line.split("=") for line in steps(STAGES[0], "ARG"))
    for step in steps(STAGES[0], "RUN"):
        if not step.startswith(SYSTEM):
            step = here(step.replace("python3 ", f"{shlex.quote(sys.executable)} ", 1))
            where = {**os.environ, **{name: value.strip('"') for name, value in arguments.items()}}
            done = subprocess.run(
                ["sh", "-c", step], env=where, capture_output=True, text=True, timeout=900
            )
            assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
    assert all(step.startswith(SYSTEM) for step in steps(STAGES[1], "RUN"))
    assert not {"mojo", "lld", "gcc", "cc"} & {
        path.name for path in (tmp_path / "opt").rglob("*") if path.is_file()
    }
    (environment,) = steps(STAGES[1], "ENV")
    where = dict(word.split("=", 1) for word in here(environment).split())
    where["PATH"] = (
        ":".join(p for p in where["PATH"].split(":") if p.startswith(str(tmp_path)))
        + f":{_tools(tmp_path)}"
    )
    command = [
        "odyssey",
        "launch",
        "-n",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        "train",
        "--steps",
        "3",
        "--no-eval",
    ]
    where = {**where, "HOME": str(tmp_path), "ODYSSEY_ALLOW_ROOT": "1"}
    done = subprocess.run(
        [shutil.which("odyssey", path=where["PATH"]), *command[1:]],
        env=where,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "weights" in done.stdout, done.stdout + done.stderr
    assert (
        "compil" not in done.stderr and not (tmp_path / ".cache" / "odyssey" / "kernels").exists()
    )


def _tools(home: Path) -> Path:
    """What the image's system has of PATH that the launcher script uses; not a compiler."""
    (home / "bin").mkdir()
    for name in ("sh", "dirname", "readlink", "ps"):
        if found := shutil.which(name):
            (home / "bin" / name).symlink_to(found)
    return home / "bin"
