"""`odyssey.audit.steplog` by the name that users import."""

import sys

from .audit import steplog as _module
from .audit.steplog import *  # noqa: F403

sys.modules[__name__] = _module
