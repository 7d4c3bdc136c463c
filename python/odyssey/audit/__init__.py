"""Comparison of what was computed: verify (layouts), steplog (every step), replay and diff
(runs).
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"audit.steplog": "steplog"})
