"""`odyssey.base` by the name that users import."""

import sys

from . import base as _module
from .base import *  # noqa: F403

sys.modules[__name__] = _module
