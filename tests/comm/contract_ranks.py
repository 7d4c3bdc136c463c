"""Run under a launcher by test_backends.py: every case of the contract; writes what each did on
this rank.

Arguments: backend, folder of the results.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import contract
import contract_groups  # noqa: F401 - more cases

from odyssey import comm

backend, folder = sys.argv[1], Path(sys.argv[2])
world = comm.world(backend)
results: dict[str, str] = {}


def report(group: str, title: str, error: BaseException | None) -> None:
    text = (
        ""
        if error is None
        else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    )
    results[f"{group} {title}"] = text
    (folder / f"{world.rank}.json").write_text(json.dumps(results))


contract.run(world, report)
