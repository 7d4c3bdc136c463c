"""Taking a step: what was recorded is run, gradients are summed, the optimizer writes.

engine.py records and hands out; direct, bucketed and pipeline are one way of taking a step each;
layout.py says what lies where, ownership.py what of it is this rank's (ZeRO); gpu/ takes a step on
devices.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"engine.engine": "Engine", "engine.layout": "Layout", "engine.metrics": "metrics"}
)
