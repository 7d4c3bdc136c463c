"""Lightning's own launchers: processes of a command line, of multiprocessing's spawn, and of a
notebook (fork).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed (extra [published])",
)

PROGRAM = Path(__file__).with_name("lightning_launchers.py")


@pytest.mark.parametrize("start", ["popen", "spawn", "fork"])
def test_a_launcher_of_lightnings_trains_as_over_gloo(launch, start):
    found = []
    for backend in ("gloo", "odyssey"):
        done = launch.python("-W", "ignore", PROGRAM, backend, start)
        assert done.returncode == 0, done.stderr
        found += re.findall(r"^weights (.*)$", done.stdout, re.M)
    assert len(found) == 2 and found[0] == found[1]
