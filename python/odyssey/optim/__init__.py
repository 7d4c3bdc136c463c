"""Optimizers over an arena, schedules of the learning rate, and rules that users write.

`optimizers.py` has the optimizers and `schedules.py` the schedules. `rule.py` records the rule of
an optimizer that has no kernel.
"""

from . import optimizers, schedules
from .optimizers import *  # noqa: F403
from .optimizers import BY_NAME as BY_NAME
from .optimizers import Group as Group
from .optimizers import KeptTable as KeptTable
from .optimizers import Kind as Kind
from .optimizers import Update as Update
from .optimizers import run as run
from .schedules import *  # noqa: F403

__all__: list[str] = []
__all__ += optimizers.__all__
__all__ += schedules.__all__
