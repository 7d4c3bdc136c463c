"""Ranks started, watched and started again: the launcher, its attempts, the watcher, and who waits for whom.

docs/watch.md and docs/launch.md explain it, docs/data-flow.md says what each file is. What it is not:
`odyssey.base.launcher`, which reads what a launcher put into the environment of a rank.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"run.config": "MOST", "run.diagnosis": "diagnosis", "run.messages": "messages"}
)
