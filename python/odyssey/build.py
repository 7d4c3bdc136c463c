"""`odyssey.compile` by the name that users import."""

import sys

from . import compile as _module
from .compile import *  # noqa: F403

sys.modules[__name__] = _module
