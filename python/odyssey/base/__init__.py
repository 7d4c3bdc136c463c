"""Needed everywhere: files written whole, a process as one of a job, what it is doing now, how
it ends.

docs/data-flow.md says what each file is. Everything that trains lies above this folder.
"""

from .lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "base.exits": "exits",
        "base.files": "files parse_json read_json",
        "base.hooks": "machine",
        "base.lazy": "attach",
        "base.launcher": "free_port launcher",
        "base.outputs": "finite outputs",
        "base.paths": "expand_path",
        "base.proc": "stat",
        "base.quiet": "without_prints",
        "base.registry": "registry",
        "base.requirements": "install_extra install_packages",
        "base.runs": "Run runs",
        "base.slot": "slot",
    },
)
