"""`odyssey.optim.schedules` by the name that users import."""

import sys

from .optim import schedules as _module
from .optim.schedules import *  # noqa: F403

sys.modules[__name__] = _module
