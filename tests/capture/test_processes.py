"""Two processes walk the same program by the same paths, with the same marks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
from capture import graphs
from odyssey.capture import walk

for seed in range(60):
    graph = graphs.build(seed, 12, int(sys.argv[1]), strange=True)
    graphs.TOUCHED.clear()
    for path, entry in walk(graph.roots).entries.items():
        print(seed, path, entry.sort, entry.mark)
"""


def test_two_processes_have_the_same_paths_and_marks():
    outputs = []
    for hash_seed, order in (("1", "0"), ("2", "5")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, order],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    assert len(outputs[0]) > 1000
    assert outputs[0] == outputs[1]
