"""`odyssey.train.trainer` by the name that users import."""

import sys

from .train import trainer as _module
from .train.trainer import *  # noqa: F403

sys.modules[__name__] = _module
