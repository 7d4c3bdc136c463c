"""Which bytes are added when: `plan` decides (pure functions), `reduction` does (a short loop
over the plan).
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "parallel.failures": "StepOutcome",
        "parallel.mesh": "Mesh",
        "parallel.plan": "default_shard_size plan",
        "parallel.reduction": "Reduction",
        "parallel.schedule": "schedule",
        "parallel.strategy": "MODES Strategy strategy",
    },
)
