"""`odyssey.core.placement` by the name that users import."""

import sys

from .core import placement as _module
from .core.placement import *  # noqa: F403

sys.modules[__name__] = _module
