"""Checkpoints: the state of a training on disk, whole or not there, and every byte of it checked before it is used.

docs/checkpoints.md has the format and what is promised, docs/data-flow.md what each file is. What it is not:
`odyssey.checkpoint`, which recomputes activations; nor does it know a trainer, ranks or MPI. Names are loaded when they
are used: most trainings keep no checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from .manifest import Manifest, environment_key, read_key
    from .snapshot import Snapshot
    from .store import Refused, Store

_HOME = {
    **dict.fromkeys(("Manifest", "environment_key", "read_key"), "manifest"),
    **{"Snapshot": "snapshot", "Refused": "store", "Store": "store"},
}

__all__ = ["CheckpointError", "Manifest", "Refused", "Snapshot", "Store", "environment_key", "read_key"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
