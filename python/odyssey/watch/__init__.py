"""Ranks watched: the watcher of a machine, and who waits for whom.

docs/watch.md explains it, docs/data-flow.md says what each file is.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"watch.diagnosis": "diagnosis", "watch.messages": "messages"}
)
