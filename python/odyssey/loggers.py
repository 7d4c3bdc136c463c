"""`odyssey.callbacks.loggers` by the name that users import."""

import sys

from .callbacks import loggers as _module
from .callbacks.loggers import *  # noqa: F403

sys.modules[__name__] = _module
