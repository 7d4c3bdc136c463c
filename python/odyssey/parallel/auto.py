"""`odyssey.parallel.auto_placement` by the name that it had before."""

import sys

from . import auto_placement as _module
from .auto_placement import *  # noqa: F403

sys.modules[__name__] = _module
