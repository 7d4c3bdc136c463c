"""Run directories with step logs, made by hand."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from odyssey.audit.steplog import NAME, StepLog, StepRecord
from odyssey.base.files import write_json
from odyssey.base.runs import Run


def step(at: int, **changes) -> StepRecord:
    base = StepRecord(at, (at - 1) // 10, (at - 1) % 10, 64, 2.5 / at, 7 * at, 2**64 - at, 0.1)
    return base._replace(**changes)


@pytest.fixture
def make_run(tmp_path):
    """make_run("a", records, command=[...], ...): a directory with a log and, unless command is
    None, a run.json.
    """

    def make(
        name: str, records: list[StepRecord], command: list[str] | None = None, **description
    ) -> Path:
        run = Run(tmp_path / name)
        run.path.mkdir(mode=0o700)
        with closing(StepLog(run.steps / NAME)) as log:
            for record in records:
                log.append(record)
        if command is not None:
            write_json(run.description, {"command": command, **description})
        return run.path

    return make


@pytest.fixture
def steps():
    """steps(n, {k: changes}): records 1 to n; step k with changes."""

    def make(n: int, changed: dict[int, dict] | None = None) -> list[StepRecord]:
        return [step(i, **(changed or {}).get(i, {})) for i in range(1, n + 1)]

    return make
