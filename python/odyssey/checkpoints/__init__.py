"""Checkpoints: the state of a training on disk, whole or not there, and every byte of it checked before it is used.

docs/checkpoints.md has the format and what is promised, docs/data-flow.md what each file is. What it is not:
`odyssey.checkpoint`, which recomputes activations; nor does it know a trainer, ranks or MPI.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "errors": "CheckpointError",
        "checkpoints.manifest": "Manifest environment_key read_key",
        "checkpoints.snapshot": "Snapshot",
        "checkpoints.store": "Refused Store",
        "checkpoints.trainable": "Evaluation History Step",
    },
)
