"""Ranks started, watched and started again: the launcher, its attempts, the watcher, and who
waits for whom.

docs/watch.md and docs/launch.md explain it, docs/data-flow.md says what each file is.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"run.config": "MOST", "run.diagnosis": "diagnosis", "run.messages": "messages"}
)
