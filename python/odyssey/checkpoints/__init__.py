"""Checkpoints: the state of a training on disk, whole or not there, and every byte of it checked
before it is used.

docs/checkpoints.md has the format and what is promised. What it is not: `odyssey.checkpoint`, for
activations.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "errors": "CheckpointError",
        "checkpoints.manifest": "Manifest environment_key read_key",
        "checkpoints.snapshot": "Snapshot",
        "checkpoints.store": "Refused Store",
        "checkpoints.trainable": "Evaluation History Mode Step",
    },
)
