"""A process as one of a job: what it may have, what it does where others can read it, how it ends; and the watcher.

docs/watch.md explains it, docs/data-flow.md says what each file is. Everything that trains lies above this folder.
"""

from . import slot

__all__ = ["slot"]
