"""Jobs of the test beds."""

from __future__ import annotations

import pytest

from beds import faults


@pytest.fixture
def job(tmp_path):
    """Starts jobs in a folder of the test, and ends what is left of them: job(command, ...) as faults.Job."""
    started = []

    def start(command, **settings):
        started.append(faults.Job(command, tmp_path, **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()
